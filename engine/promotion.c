#include "engine/promotion.h"

#include "engine/base/clock.h"
#include "engine/sched.h"

enum { WAIT_MS = 100 };

/* Pages that fetches may take: what is free or only indexed, but for the next token of each running request. */
static int32_t pages_to_fetch(const struct sched *s)
{
	struct kv_prefix_stats index;
	kv_prefix_stats(s->prefix, &index);
	return kv_pool_n_free(s->pool) + index.n_idle - s->n_running;
}

/* Whether it could begin before its pages are whole, for all that does not change while they come. */
static bool is_plain(const struct sched *s, const struct request *r)
{
	/* Rows that choose want whole pages, and what rows add to masses and looks could not be taken back. */
	return r->policy.kind == KV_POLICY_FULL && !r->admitted_before && !r->prompt_logprobs && !r->begun &&
	       kv_pages_for(r->n_prompt + 1) <= kv_pool_n_pages(s->pool);
}

bool promotion_awaited(struct sched *s, struct request *r)
{
	int32_t n = request_known(r);
	struct kv_use use = sched_use(s, r);
	if (!s->tiers || r->fetched || (r->prompt_logprobs && !r->prompt_done))
		return false;
	if (!r->fetch.under_way) {
		kv_seq_release(s->pool, &r->kv);
		/* Others may have brought more of it since it came. */
		r->fetched = kv_prefix_hold(s->prefix, &r->chain, r->tokens.ids, n, &r->kv) != STATUS_OK;
		if (!r->fetched && kv_tiers_comes(s->tiers, &r->chain.root, r->tokens.ids, n, &r->kv))
			return true;
		bool by_parts = s->overlaps && list_empty(&s->running) && is_plain(s, r);
		r->fetched = r->fetched || !kv_tiers_fetch(s->tiers, &r->fetch, &r->chain.root, r->tokens.ids, n,
		                                           &r->kv, pages_to_fetch(s), by_parts);
	}
	r->fetched = r->fetched || kv_tiers_advance(s->tiers, &r->fetch, &r->kv, &use);
	return !r->fetched;
}

void promotion_advance(struct sched *s)
{
	kv_tiers_poll(s->tiers);
	list_each(l, next, &s->waiting) {
		struct request *r = list_entry(l, struct request, link);
		struct kv_use use = sched_use(s, r);
		if (r->fetch.under_way && kv_tiers_advance(s->tiers, &r->fetch, &r->kv, &use))
			r->fetched = true;
	}
}

bool promotion_may_begin(const struct sched *s, const struct request *r)
{
	return r->fetch.under_way && list_empty(&s->running) && is_plain(s, r) && kv_tiers_may_begin(&r->fetch);
}

void promotion_begin(struct sched *s, struct request *r, int32_t most)
{
	r->begun = true;
	if (kv_tiers_begin(s->tiers, &r->fetch, &r->kv, most))
		return;
	kv_tiers_cancel(s->tiers, &r->fetch);
	r->fetched = true;
	kv_seq_truncate(s->pool, &r->kv, r->kv.n_tokens < most ? r->kv.n_tokens : most);
}

void promotion_retreat(struct sched *s, struct request *r)
{
	if (r->begun && r->fetch.under_way)
		kv_tiers_retreat(s->tiers, &r->fetch, &r->kv);
}

static bool wait(struct kv_arrival *arrival, int32_t layer)
{
	struct sched_arrival *a = (struct sched_arrival *)arrival;
	int64_t begun = clock_now_ns(clock_system());
	bool here = kv_tiers_wait(a->tiers, &a->request->fetch, layer, begun + a->patience_ns);
	a->patience_ns -= clock_now_ns(clock_system()) - begun;
	return here;
}

void promotion_announce(struct sched *s, struct request *r)
{
	s->arrival = (struct sched_arrival){{wait}, s->tiers, r, WAIT_MS * INT64_C(1000000)};
	s->batch.arrival = &s->arrival.base;
}

bool promotion_complete(struct sched *s)
{
	struct request *r = s->arrival.request;
	if (!wait(&s->arrival.base, kv_pool_layout(s->pool)->n_layer - 1))
		return false;
	kv_tiers_arrived(s->tiers, &r->fetch);
	r->fetched = true;
	return true;
}
