#include "engine/census.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"

/* By precedence: a page is counted under the greatest of its holders. */
enum holder { NOBODY, INDEX, SESSION, QUEUED, RUNNING };

enum status census_init(struct census *c, const struct kv_pool *pool, const struct sched *sched,
                        const struct session_table *sessions, const struct tenant_table *tenants)
{
	size_t n = (size_t)kv_pool_n_pages(pool);
	*c = (struct census){.pool = pool, .sched = sched, .sessions = sessions, .tenants = tenants};
	c->holder = malloc(n);
	c->sequences = malloc(n);
	c->used = malloc(n);
	if (c->holder && c->sequences && c->used)
		return STATUS_OK;
	census_free(c);
	return STATUS_NOMEM;
}

void census_free(struct census *c)
{
	free(c->holder);
	free(c->sequences);
	free(c->used);
	memset(c, 0, sizeof *c);
}

struct sum {
	int64_t refs, tokens;
};

/*
 * One sequence, of which n_positions are or will be written in the pages it has: a prompt that is being computed has
 * its pages already, and they are not wasted.
 */
static void count_sequence(struct census *c, const struct kv_seq *kv, int32_t n_positions, enum holder holder,
                           struct sum *sum, struct engine_kv *out)
{
	for (int32_t i = kv->n_gone; i < kv->n_pages; i++) {
		int32_t page = kv->pages[i], used = n_positions - i * KV_PAGE_TOKENS;
		used = used < 0 ? 0 : used > KV_PAGE_TOKENS ? KV_PAGE_TOKENS : used;
		if (c->holder[page] < holder)
			c->holder[page] = (uint8_t)holder;
		if (c->used[page] < used)
			c->used[page] = (uint8_t)used;
		c->sequences[page] += c->sequences[page] < 2;
	}
	sum->refs += kv_seq_refs(kv);
	sum->tokens += kv_seq_places(kv) - kv->n_gone * KV_PAGE_TOKENS;
	if (n_positions % KV_PAGE_TOKENS != 0 && kv->n_pages == kv_pages_for(n_positions)) {
		out->tails++;
		out->tails_shared += kv_pool_refs(c->pool, kv->pages[kv->n_pages - 1]) > 1;
	}
}

static void count_requests(struct census *c, const struct list *head, enum holder holder, int64_t *charged,
                           struct sum *sum, struct engine_kv *out)
{
	list_each(l, next, head) {
		const struct request *r = list_entry(l, struct request, link);
		count_sequence(c, &r->kv,
		               holder == RUNNING ? (int32_t)r->tokens.n - r->kv.n_dropped * KV_PAGE_TOKENS
		                                 : r->kv.n_tokens,
		               holder, sum, out);
		for (int32_t i = 0; i < r->fetch.n; i++) {
			int32_t page = kv_fetch_page(&r->fetch, i);
			if (page == KV_NO_PAGE)
				continue;
			/* On its way from a tier: full by the time anybody sees it. */
			c->holder[page] = (uint8_t)holder;
			c->used[page] = KV_PAGE_TOKENS;
			sum->refs++;
		}
		if (holder != RUNNING)
			continue;
		charged[r->tenant->id] += kv_seq_refs(&r->kv);
		/* Pages that it lacks are computed again beside it. */
		const struct kv_seq *again = &r->recall.again;
		count_sequence(c, again, again->n_pages * KV_PAGE_TOKENS, holder, sum, out);
		charged[r->tenant->id] += kv_seq_refs(again);
	}
}

/* What a session left in the index for its next turn, or has of its own. A running one is counted as a request. */
static void count_session(struct census *c, const struct session *s, struct sum *sum, struct engine_kv *out)
{
	int32_t alive = s->running || s->parked ? 0 : kv_weak_alive(c->sched->prefix, &s->kv);
	for (int32_t i = 0; i < alive; i++) {
		int32_t page = s->kv.pages[i].page;
		if (c->holder[page] < SESSION)
			c->holder[page] = SESSION;
		c->sequences[page] += c->sequences[page] < 2;
		out->tokens_sessions += kv_prefix_page_tokens(c->sched->prefix, page);
	}
	if (s->parked)
		count_sequence(c, &s->parked->kv, kv_seq_places(&s->parked->kv), SESSION, sum, out);
}

static void count_page(const struct census *c, int32_t page, struct engine_kv *out)
{
	int32_t *const by_holder[] = {
	        [NOBODY] = &out->pages_free,      [INDEX] = &out->pages_index,     [SESSION] = &out->pages_sessions,
	        [QUEUED] = &out->pages_queued, [RUNNING] = &out->pages_running,
	};
	++*by_holder[c->holder[page]];
	if (c->holder[page] == NOBODY)
		return;
	out->pages_shared += c->sequences[page] > 1;
	out->positions_used += c->used[page];
	out->positions_unused += KV_PAGE_TOKENS - c->used[page];
}

static int64_t distance(int64_t a, int64_t b)
{
	return a > b ? a - b : b - a;
}

/* What is wrong with the books: nothing, as long as the engine has no bug. */
static int64_t audit(const struct census *c, const struct engine_kv *out, const int64_t *charged)
{
	int64_t refs = 0, drift = distance(out->pages_free, kv_pool_n_free(c->pool));
	for (int32_t i = 0; i < kv_pool_n_pages(c->pool); i++)
		refs += kv_pool_refs(c->pool, i);
	drift += distance(refs, out->refs_running + out->refs_queued + out->refs_sessions + out->refs_index);
	for (int32_t i = 0; i < c->tenants->n; i++) {
		const struct tenant *t = c->tenants->all[i];
		drift += t ? distance(t->kv.n_pages, charged[i]) : 0;
	}
	return drift;
}

static void judge(struct census *c, struct engine_kv *out)
{
	int64_t all = out->positions_used + out->positions_unused;
	int32_t in_use = out->pages_total - out->pages_free;
	out->fragmentation = all > 0 ? (double)out->positions_unused / (double)all : 0;
	bool was = c->alarm;
	if (out->fragmentation > ENGINE_FRAGMENTATION_ALARM && in_use >= ENGINE_FRAGMENTATION_PAGES)
		c->alarm = true;
	else if (out->fragmentation < ENGINE_FRAGMENTATION_WELL || in_use < ENGINE_FRAGMENTATION_PAGES)
		c->alarm = false;
	out->alarm = c->alarm;
	if (c->alarm && !was)
		log_msg(LOG_WARN, "kv_fragmentation",
		        "%.1f%% of the positions in %" PRId32
		        " KV pages are unused, more than %.0f%%: many short conversations hold "
		        "a page that they do not fill",
		        100 * out->fragmentation, in_use, 100 * ENGINE_FRAGMENTATION_ALARM);
	else if (was && !c->alarm)
		log_msg(LOG_WARN, "kv_fragmentation",
		        "%.1f%% of the positions in %" PRId32 " KV pages are unused: well again",
		        100 * out->fragmentation, in_use);
}

void census_take(struct census *c, struct engine_kv *out)
{
	int64_t charged[ENGINE_MAX_TENANTS] = {0};
	int32_t n = kv_pool_n_pages(c->pool);
	struct sum running = {0, 0}, queued = {0, 0}, sessions = {0, 0};
	*out = (struct engine_kv){.pages_total = n};
	memset(c->sequences, 0, (size_t)n);
	for (int32_t i = 0; i < n; i++) {
		c->used[i] = (uint8_t)kv_prefix_page_tokens(c->sched->prefix, i);
		c->holder[i] = c->used[i] ? INDEX : NOBODY;
		out->refs_index += c->used[i] > 0;
	}
	count_requests(c, &c->sched->running, RUNNING, charged, &running, out);
	count_requests(c, &c->sched->waiting, QUEUED, charged, &queued, out);
	for (size_t i = 0; i < c->sessions->n_sessions; i++)
		count_session(c, c->sessions->heap[i], &sessions, out);
	for (int32_t i = 0; i < n; i++)
		count_page(c, i, out);
	out->refs_running = running.refs;
	out->refs_queued = queued.refs;
	out->refs_sessions = sessions.refs;
	out->tokens_sessions += sessions.tokens;
	out->tokens_running = running.tokens;
	out->tokens_queued = queued.tokens;
	out->drift_pages = audit(c, out, charged);
	judge(c, out);
}
