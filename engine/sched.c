#include "engine/sched_internal.h"

#include <stdlib.h>

#include "engine/promotion.h"

/* In the order of requests that nobody waits for. */
#define BACKGROUND (UINT64_C(1) << 63)

enum status sched_init(struct sched *s, struct kv_pool *pool, struct kv_prefix *prefix, struct session_table *sessions,
                       const struct clock *clock, int32_t max_running, int32_t step_tokens, int32_t max_outputs)
{
	memset(s, 0, sizeof *s);
	list_init(&s->waiting);
	list_init(&s->running);
	s->pool = pool;
	s->prefix = prefix;
	s->sessions = sessions;
	parking_init(&s->parking, pool);
	s->clock = clock;
	s->max_running = max_running;
	s->step_tokens = step_tokens;
	s->max_outputs = max_outputs;
	s->token = calloc((size_t)step_tokens, sizeof *s->token);
	s->position = calloc((size_t)step_tokens, sizeof *s->position);
	s->seq = calloc(2 * (size_t)max_running, sizeof *s->seq);
	s->output_row = calloc((size_t)max_outputs, sizeof *s->output_row);
	s->part = calloc(2 * (size_t)max_running, sizeof *s->part);
	s->spill = calloc((size_t)max_running, sizeof(struct kv_spill *));
	if (!s->token || !s->position || !s->seq || !s->output_row || !s->part || !s->spill) {
		sched_free(s);
		return STATUS_NOMEM;
	}
	s->batch.token = s->token;
	s->batch.position = s->position;
	s->batch.seq = s->seq;
	s->batch.output_row = s->output_row;
	return STATUS_OK;
}

void sched_free(struct sched *s)
{
	free(s->token);
	free(s->position);
	free(s->seq);
	free(s->output_row);
	free(s->part);
	free(s->spill);
	memset(s, 0, sizeof *s);
}

/* ---- The lists ---- */

/* Requests run in the order in which they arrived. */
static bool arrived_after(const struct request *a, const struct request *b)
{
	return a->order > b->order;
}

/* They wait for their turn. */
static bool comes_after(const struct request *a, const struct request *b)
{
	return a->turn != b->turn ? a->turn > b->turn : arrived_after(a, b);
}

/* New requests mostly go to the end, preempted ones back to where they were. */
static void insert(struct list *head, struct request *r,
                   bool (*after)(const struct request *a, const struct request *b))
{
	struct list *before = head->prev;
	while (before != head && after(sched_entry(before), r))
		before = before->prev;
	list_insert_between(&r->link, before, before->next);
}

static void to_waiting(struct sched *s, struct request *r)
{
	r->state = REQUEST_WAITING;
	kv_seq_label(s->pool, &r->kv, (struct kv_holder){KV_HOLDER_WAITING, r->id});
	insert(&s->waiting, r, comes_after);
	s->n_waiting++;
	r->tenant->n_waiting++;
	if (r->session)
		r->session->n_waiting++;
}

static void leave_list(struct sched *s, struct request *r)
{
	list_remove(&r->link);
	if (r->state == REQUEST_WAITING) {
		s->n_waiting--;
		if (--r->tenant->n_waiting == 0 && r->tenant->last_turn > s->turn)
			r->tenant->last_turn = s->turn; /* turns that were cancelled are not owed */
		if (r->session)
			r->session->n_waiting--;
	} else {
		s->n_running--;
		r->tenant->n_running--;
		if (r->session)
			r->session->running = NULL;
	}
}

/*
 * Turns are start-time fair queueing (Goyal, Vin and Cheng, 1996) with equal weights and requests as the unit: each
 * request of a tenant that waits comes one turn after its last, and a tenant that had nothing in the queue begins at
 * the turn that is being served. So a tenant with a thousand requests delays another's next one by a single request of
 * its own.
 */
void sched_add(struct sched *s, struct request *r)
{
	uint64_t last = r->tenant->last_turn;
	r->order = s->next_order++;
	r->background = r->spec->background;
	if (r->background) {
		/* Behind all others, now and later, so that it is their youngest as well. */
		r->order |= BACKGROUND;
		r->turn = UINT64_MAX;
	} else {
		r->turn = r->tenant->last_turn = (last > s->turn ? last : s->turn) + 1;
	}
	to_waiting(s, r);
	/* What it is about to hit is not evicted while it waits. Without memory for that it takes its chance. */
	if (!r->prompt_logprobs)
		kv_prefix_hold(s->prefix, &r->chain, r->tokens.ids, request_known(r), &r->kv);
}

/* Gives back what it has in the pool and below. */
static void release_kv(struct sched *s, struct request *r)
{
	recall_stop(s, r);
	kv_seq_release(s->pool, &r->kv);
	kv_overflow_release(&r->spill);
	r->is_large = false;
}

void sched_hurry(struct sched *s, struct request *r)
{
	if (!r->background)
		return;
	r->background = false;
	r->order &= ~BACKGROUND;
	r->turn = s->turn; /* it has waited longer than anybody */
	list_remove(&r->link);
	if (r->state == REQUEST_WAITING)
		insert(&s->waiting, r, comes_after);
	else
		insert(&s->running, r, arrived_after);
}

struct kv_use sched_use(const struct sched *s, const struct request *r)
{
	return (struct kv_use){
	        .request = r->id,
	        .now_ms = clock_now_ms(s->clock),
	        .n_prompt = r->n_prompt,
	        .claim = r->session ? r->session->claim : 0,
	};
}

/* What it computed falls to the index, with the page that is not full; what is not exact, to its session. */
static void leave_kv(struct sched *s, struct request *r)
{
	struct kv_use use = sched_use(s, r);
	int32_t exact = request_exact(r);
	/* What is not, but goes on from all there is, is of no use to anybody: see QUEST in kv/policy.h. */
	kv_seq_truncate(s->pool, &r->kv, r->kv.n_dropped == 0 && r->kv.n_tokens > exact ? exact : r->kv.n_tokens);
	kv_prefix_put_tail(s->prefix, r->tokens.ids, &r->kv, &use);
	if (s->tiers)
		kv_tiers_write_behind(s->tiers, &r->kv);
	if (r->session)
		session_keep(s->sessions, r->session, &r->kv);
	if (r->session && r->kv.n_dropped > 0 && r->n_moving == 0)
		park(&s->parking, r);
}

void sched_remove(struct sched *s, struct request *r)
{
	bool was_running = r->state != REQUEST_WAITING;
	int32_t n_generated = (int32_t)r->tokens.n - r->n_prompt;
	promotion_retreat(s, r);
	if (s->tiers)
		kv_tiers_cancel(s->tiers, &r->fetch);
	leave_list(s, r);
	if (r->completed && n_generated > 0 && n_generated < EVICT_SHORT_TOKENS)
		kv_prefix_hint(s->prefix, &r->kv, r->n_indexed, r->id, EVICT_SHORT_ANSWER);
	r->state = REQUEST_ENDED;
	if (was_running)
		leave_kv(s, r);
	const struct engine_usage *usage = r->prompt_done ? &r->usage : NULL;
	ended_add(&r->tenant->ended, usage);
	if (r->session) {
		ended_add(&r->session->ended, usage);
		session_touch(s->sessions, r->session);
	}
	release_kv(s, r);
}

struct request *sched_find(const struct sched *s, uint64_t id)
{
	const struct list *heads[] = {&s->running, &s->waiting};
	for (size_t i = 0; i < 2; i++) {
		list_each(l, next, (struct list *)heads[i]) {
			if (sched_entry(l)->id == id)
				return sched_entry(l);
		}
	}
	return NULL;
}

/* ---- Memory ---- */

/* The last request in line, but for `r`, lets go of the pages it waits to use. */
static bool drop_last_hold(struct sched *s, const struct request *r)
{
	for (struct list *l = s->waiting.prev; l != &s->waiting; l = l->prev) {
		if (sched_entry(l) != r && sched_entry(l)->kv.n_pages > 0) {
			kv_seq_release(s->pool, &sched_entry(l)->kv);
			sched_entry(l)->fetched = false;
			s->n_holds_dropped++;
			return true;
		}
	}
	return false;
}

/*
 * Makes some page free for r, or lets one fall to the index where it can be had next; false when nothing is left to
 * take.
 */
static bool reclaim_one(struct sched *s, const struct request *r, enum evict_reason reason)
{
	return kv_prefix_evict(s->prefix, clock_now_ms(s->clock), reason) || parking_drop_oldest(&s->parking) ||
	       drop_last_hold(s, r);
}

static bool reclaim(struct sched *s, const struct request *r, int32_t n_free)
{
	while (kv_pool_n_free(s->pool) < n_free) {
		if (!reclaim_one(s, r, EVICT_FOR_PROMPT))
			return false;
	}
	return true;
}

void sched_preempt(struct sched *s, struct request *r, enum engine_room room)
{
	leave_list(s, r);
	promotion_retreat(s, r);
	if (s->tiers)
		kv_tiers_cancel(s->tiers, &r->fetch);
	release_kv(s, r);
	kv_seq_charge(&r->kv, NULL);
	r->fetched = false;
	r->n_moving = 0;
	r->look = (struct attention_look){0}; /* all of them come again */
	trigger_reset_look(&r->trigger);
	recall_reset(r);
	to_waiting(s, r);
	r->usage.n_preempted++;
	s->n_preemptions++;
	s->preempted[room]++;
}

/* References that n more positions add to what the tenant is charged for. */
static int64_t more_pages(const struct kv_seq *kv, int32_t n)
{
	int32_t want = kv_pages_for(kv_seq_places(kv) + n);
	return want > kv->n_pages ? want - kv->n_pages : 0;
}

/* Whether the limit of r's tenant, which is charged for r's kv, allows n pages more. */
static bool keeps_cap(const struct request *r, int64_t n)
{
	return r->tenant->kv.n_pages + n <= r->tenant->max_pages;
}

static struct request *youngest_of(const struct sched *s, const struct tenant *t)
{
	struct list *l = s->running.prev;
	while (sched_entry(l)->tenant != t)
		l = l->prev;
	return sched_entry(l);
}

bool sched_find_page(struct sched *s, struct request *r, bool allowed)
{
	if (allowed && reclaim_one(s, r, EVICT_FOR_DECODE))
		return true;
	struct request *youngest = allowed ? sched_entry(s->running.prev) : youngest_of(s, r->tenant);
	sched_preempt(s, youngest, allowed ? ENGINE_ROOM_DECODE : ENGINE_ROOM_CAP);
	return youngest != r;
}

bool sched_take_page(struct sched *s, struct request *r, int32_t *page)
{
	for (;;) {
		bool allowed = keeps_cap(r, 1);
		*page = allowed ? kv_pool_get(s->pool, r->kv.holder) : KV_NO_PAGE;
		if (*page != KV_NO_PAGE)
			return true;
		if (!sched_find_page(s, r, allowed))
			return false;
	}
}

bool sched_make_room(struct sched *s, struct request *r, struct kv_seq *kv, int32_t n)
{
	for (;;) {
		int64_t more = more_pages(kv, n);
		bool allowed = more == 0 || keeps_cap(r, more);
		enum status st = allowed ? kv_seq_prepare(s->pool, kv, n) : STATUS_LIMIT;
		if (st == STATUS_OK)
			return true;
		/* No memory for the block table, which no page can give. */
		if (st == STATUS_NOMEM) {
			sched_preempt(s, r, ENGINE_ROOM_DECODE);
			return false;
		}
		if (!sched_find_page(s, r, allowed))
			return false;
	}
}

/* ---- Large requests ---- */

struct sched_large sched_large_windowed(int32_t pool_pages, int32_t horizon, int32_t step_tokens)
{
	/* A window begins and ends within a page; behind it one page is not full, and another may be a copy of it. */
	int32_t seen = kv_pages_for(horizon) + 1, step_pages = pool_pages - seen - 2;
	if (step_pages < 1)
		return (struct sched_large){0};
	int32_t rows = step_tokens / KV_PAGE_TOKENS < step_pages ? step_tokens : step_pages * KV_PAGE_TOKENS;
	return (struct sched_large){seen + 2 + kv_pages_for(rows), rows};
}

static struct sched_large large_bounds(const struct sched *s)
{
	if (!s->overflow)
		return s->large;
	const struct kv_overflow_plan *p = kv_overflow_now(s->overflow);
	return (struct sched_large){p->resident_pages, p->step_rows};
}

/* Whether the pool holds so many tokens of it. */
static bool fits_pool(const struct sched *s, const struct request *r, int32_t n_tokens)
{
	return r->policy.kind != KV_POLICY_FULL || kv_pages_for(n_tokens) <= kv_pool_n_pages(s->pool);
}

/* Tokens that it is sure to come to, as far as is known: all that were asked for, or a group more than there are. */
static int32_t sure_tokens(const struct sched *s, const struct request *r)
{
	int32_t group = kv_overflow_now(s->overflow)->group_pages * KV_PAGE_TOKENS, n = (int32_t)r->tokens.n;
	return r->spec->max_tokens >= 0 || n > r->max_total - group ? r->max_total : n + group;
}

/* Reserves what it will have below the pool; false when that is others' now. */
static bool reserve_below(struct sched *s, struct request *r)
{
	if (!s->overflow)
		return true;
	int32_t n = sure_tokens(s, r);
	if (fits_pool(s, r, n))
		return true;
	if (s->overflow_pass == s->pass ||
	    !kv_overflow_reserve(s->overflow, &r->spill, kv_overflow_groups_for(kv_overflow_now(s->overflow), n))) {
		s->overflow_pass = s->pass;
		return false;
	}
	return true;
}

int32_t sched_reach(const struct sched *s, const struct request *r)
{
	int32_t n = request_reach(r);
	return r->is_large && n > large_bounds(s).step_rows ? large_bounds(s).step_rows : n;
}

bool sched_make_way(struct sched *s, struct request *r)
{
	if (large_bounds(s).step_rows > 0 && !r->is_large)
		r->is_large =
			!fits_pool(s, r, (int32_t)r->tokens.n < r->max_total ? (int32_t)r->tokens.n + 1 : r->max_total);
	if (!r->is_large || !s->overflow)
		return true;
	const struct kv_overflow_plan *plan = kv_overflow_now(s->overflow);
	int32_t last_full = r->kv.n_tokens / KV_PAGE_TOKENS - 1;
	while (kv_pages_for(r->kv.n_tokens + sched_reach(s, r)) - r->kv.n_gone > plan->resident_pages &&
	       r->kv.n_gone + plan->group_pages <= last_full) {
		if (!kv_overflow_reserve(s->overflow, &r->spill, r->spill.n_groups + 1))
			return false;
		if (!kv_overflow_spill(s->overflow, &r->spill, &r->kv, s->pool))
			return true;
	}
	return true;
}

/* ---- Admission ---- */

/* Finds what its session or the index has of the prompt. */
static void attach_kv(struct sched *s, struct request *r)
{
	int32_t n = request_known(r), last = (int32_t)r->tokens.n - 1;
	/* The last token is computed in any case, for its logits; a prompt's own log-probabilities need all of them. */
	int32_t most = r->prompt_logprobs && !r->prompt_done ? 0 : n < last ? n : last;
	struct kv_use use = sched_use(s, r);
	r->n_indexed = 0;
	if (r->fetch.under_way) {
		kv_seq_charge(&r->kv, &r->tenant->kv);
		promotion_begin(s, r, most);
		return;
	}
	kv_seq_release(s->pool, &r->kv);
	kv_seq_charge(&r->kv, &r->tenant->kv);
	if (most > 0 && unpark(r))
		return;
	/* Without memory for the block table it is computed instead. */
	if (most > 0 && kv_prefix_get(s->prefix, &r->chain, r->tokens.ids, n, &use, &r->kv) != STATUS_OK)
		kv_seq_release(s->pool, &r->kv);
	kv_seq_truncate(s->pool, &r->kv, r->kv.n_tokens < most ? r->kv.n_tokens : most);
}

/*
 * Whether the pages that r lacks could be had at all now, as far as counters tell: what it can reuse is taken at its
 * most, and so is what could be reclaimed. When this says no, trying would only take pages from the index for nothing.
 */
static bool could_admit(const struct sched *s, struct request *r)
{
	int32_t n = request_known(r), pages = kv_policy_max_pages(&r->policy, (int32_t)r->tokens.n);
	bool large = large_bounds(s).step_rows > 0 && !fits_pool(s, r, (int32_t)r->tokens.n);
	if (large)
		pages = large_bounds(s).resident_pages;
	/* It fires in time. */
	if (trigger_waits_for_room(&r->trigger) && pages > kv_policy_least_pages(&r->policy))
		pages = kv_policy_least_pages(&r->policy);
	int64_t need = (int64_t)pages + s->n_running; /* without what the index knows, which takes a look */
	int64_t can = kv_pool_n_free(s->pool);
	if (s->n_running == 0 || need <= can)
		return true;
	struct kv_prefix_stats index;
	struct kv_pool_counts held;
	kv_prefix_stats(s->prefix, &index);
	kv_pool_counts(s->pool, &held);
	can += index.n_idle + held.pages[KV_HOLDER_WAITING] + s->parking.n_pages;
	/* What a large one finds does not stay in the pool. */
	return need <= can || (!large && need - kv_prefix_match(s->prefix, &r->chain, r->tokens.ids, n) <= can);
}

enum admission { ADMITTED, WAITS_FOR_MEMORY, WAITS_FOR_CAP, WAITS_FOR_ROOM_BELOW };

/*
 * Takes the pages of the whole prompt, or of as much as its policy, or its size, ever has pages for, and leaves one for
 * each running request's next token, of all and of the tenant.
 */
static enum admission admit(struct sched *s, struct request *r)
{
	enum admission why = WAITS_FOR_MEMORY;
	if (!reserve_below(s, r))
		return WAITS_FOR_ROOM_BELOW;
	if (!could_admit(s, r)) {
		kv_overflow_release(&r->spill);
		return WAITS_FOR_MEMORY;
	}
	attach_kv(s, r);
	if (!sched_make_way(s, r)) {
		why = WAITS_FOR_ROOM_BELOW;
		goto wait;
	}
	if (r->is_large && s->horizon > 0) {
		/* It may have found more than it will see. */
		r->n_indexed = r->kv.n_tokens / KV_PAGE_TOKENS;
		sched_let_go(s, r);
	}
	int32_t reach = sched_reach(s, r);
	r->kv.goes_on = reach < request_reach(r);
	int32_t need = kv_seq_pages_needed(s->pool, &r->kv, reach);
	if (!keeps_cap(r, more_pages(&r->kv, reach) + r->tenant->n_running)) {
		why = WAITS_FOR_CAP;
		goto wait;
	}
	if (!reclaim(s, r, need + s->n_running) && s->n_running > 0)
		goto wait;
	if (kv_seq_prepare(s->pool, &r->kv, reach) != STATUS_OK)
		goto wait;
	leave_list(s, r);
	r->state = REQUEST_PREFILL;
	kv_seq_label(s->pool, &r->kv, (struct kv_holder){KV_HOLDER_RUNNING, r->id});
	insert(&s->running, r, arrived_after);
	s->n_running++;
	r->tenant->n_running++;
	if (r->turn > s->turn && !r->background)
		s->turn = r->turn;
	if (r->session)
		r->session->running = r;
	if (!r->admitted_before) {
		r->admitted_before = true;
		r->started_ns = clock_now_ns(s->clock);
		r->usage.cached_tokens = r->kv.n_tokens;
		s->pages_wanted += (uint64_t)(r->n_prompt / KV_PAGE_TOKENS);
		s->pages_found += (uint64_t)(r->kv.n_tokens / KV_PAGE_TOKENS);
		r->usage.queue_ns = r->started_ns - r->submitted_ns;
	}
	return ADMITTED;

wait:
	if (r->spill.n_groups > 0)
		release_kv(s, r);
	kv_overflow_release(&r->spill);
	r->is_large = false;
	promotion_retreat(s, r);
	/* What the index knew of it, it holds on to. */
	kv_seq_truncate(s->pool, &r->kv, r->kv.n_tokens);
	kv_seq_charge(&r->kv, NULL);
	return why;
}

/*
 * The running request that r waits for; NULL when there is none any more. A whole queue waits for the same one at
 * times.
 */
static const struct request *awaited_by(struct sched *s, const struct request *r)
{
	if (s->awaited && s->awaited->id == r->awaits_id)
		return s->awaited;
	list_each(l, next, &s->running) {
		if (sched_entry(l)->id == r->awaits_id)
			return s->awaited = sched_entry(l);
	}
	return NULL;
}

/*
 * True while a running request still computes a beginning that this one shares and the index does not know yet. Only a
 * request that is next in line asks, and it remembers whom it waits for, so a step looks at it in O(1).
 */
static bool awaits_other(struct sched *s, struct request *r)
{
	if (r->prompt_logprobs && !r->prompt_done)
		return false;
	const struct request *awaited = r->awaits_id ? awaited_by(s, r) : NULL;
	if (awaited && awaited->state == REQUEST_PREFILL && awaited->kv.n_tokens < r->awaits_tokens)
		return true;
	r->awaits_id = 0;
	int32_t n = request_known(r), best = 0;
	list_each(l, next, &s->running) {
		const struct request *q = sched_entry(l);
		if (q->state != REQUEST_PREFILL || memcmp(&q->chain.root, &r->chain.root, sizeof r->chain.root) != 0)
			continue;
		int32_t common = tokens_common_prefix(r->tokens.ids, n, q->tokens.ids, request_exact(q));
		common -= common % KV_PAGE_TOKENS;
		if (common > best && common > q->kv.n_tokens) {
			best = common;
			r->awaits_id = q->id;
			r->awaits_tokens = common;
		}
	}
	if (best == 0)
		return false;
	if (best <= kv_prefix_match(s->prefix, &r->chain, r->tokens.ids, n) * KV_PAGE_TOKENS)
		r->awaits_id = 0;
	return r->awaits_id != 0;
}

/* The oldest tells: work in the background is younger than all other. */
static bool runs_for_somebody(const struct sched *s)
{
	return !list_empty(&s->running) && !sched_entry(s->running.next)->background;
}

/* Whether something runs in the background that gives way to r. */
static bool can_set_back(const struct sched *s, const struct request *r)
{
	return !r->background && !list_empty(&s->running) && sched_entry(s->running.prev)->background;
}

static void set_back(struct sched *s)
{
	sched_preempt(s, sched_entry(s->running.prev), ENGINE_ROOM_PROMPT);
}

void sched_admit(struct sched *s)
{
	s->pass++;
	s->awaited = NULL;
	if (s->tiers && kv_tiers_busy(s->tiers))
		promotion_advance(s);
	list_each(l, next, &s->waiting) {
		struct request *r = sched_entry(l);
		if ((s->n_running >= s->max_running && !can_set_back(s, r)) || (r->background && runs_for_somebody(s)))
			return;
		if (r->tenant->blocked_pass == s->pass || (r->session && r->session->running) || awaits_other(s, r) ||
		    (promotion_awaited(s, r) && !promotion_may_begin(s, r)))
			continue;
		/*
		 * Nobody overtakes a request that waits for memory, or it would never get it; a tenant's limit stops
		 * that tenant only.
		 */
		if (s->n_running >= s->max_running)
			set_back(s);
		enum admission a = admit(s, r);
		while (a == WAITS_FOR_MEMORY && can_set_back(s, r)) {
			set_back(s);
			a = admit(s, r);
		}
		/* One whose pages are still coming has the step for itself. */
		if (a == WAITS_FOR_MEMORY || (a == ADMITTED && r->fetch.under_way))
			return;
		if (a == WAITS_FOR_CAP)
			r->tenant->blocked_pass = s->pass;
	}
}

bool sched_arrived(struct sched *s, bool computed)
{
	struct request *r = s->arrival.request;
	if (computed && promotion_complete(s))
		return true;
	leave_list(s, r);
	promotion_retreat(s, r);
	kv_seq_charge(&r->kv, NULL);
	to_waiting(s, r);
	/* It was not admitted before: promotion.c sees to that. */
	r->admitted_before = false;
	s->pages_wanted -= (uint64_t)(r->n_prompt / KV_PAGE_TOKENS);
	s->pages_found -= (uint64_t)(r->usage.cached_tokens / KV_PAGE_TOKENS);
	return false;
}

void sched_index(struct sched *s, struct request *r)
{
	struct kv_use use = sched_use(s, r);
	int32_t n = r->kv.n_tokens, exact = request_exact(r);
	if (r->kv.n_dropped > 0 || (n < exact ? n : exact) / KV_PAGE_TOKENS <= r->n_indexed)
		return;
	r->kv.n_tokens = n < exact ? n : exact;
	r->n_indexed = kv_prefix_put(s->prefix, &r->chain, r->tokens.ids, &r->kv, r->n_indexed, &use);
	r->kv.n_tokens = n;
}

void sched_let_go(struct sched *s, struct request *r)
{
	if (s->horizon > 0 && r->policy.kind == KV_POLICY_FULL)
		kv_seq_let_go(s->pool, &r->kv, s->horizon);
}

void sched_describe(const struct sched *s, struct engine_stats *out)
{
	struct kv_prefix_stats prefix;
	struct kv_wide_counts wide;
	kv_prefix_stats(s->prefix, &prefix);
	kv_pool_wide_counts(s->pool, &wide);
	out->kv_wide_pages = wide.n_used;
	out->kv_wide_max = wide.n_slots;
	out->kv_wide_refused = wide.refused;
	out->kv_not_finite = wide.n_not_finite;
	out->kv_fallback_pages = wide.fallback;
	out->kv_unsound_pages = wide.n_unsound;
	out->kv_clamped = wide.n_clamped;
	out->kv_bounded = wide.n_bounded;
	out->pages_cached = prefix.n_idle;
	out->prefix_evictions = 0;
	for (int reason = 0; reason < EVICT_N_REASONS; reason++)
		out->prefix_evictions += prefix.evicted[reason];
	out->prefix_evictions_decode = prefix.evicted[EVICT_FOR_DECODE];
	out->prefix_inserted = prefix.inserted;
	out->prefix_collisions = prefix.collisions;
	out->prefix_revived = prefix.revived;
	out->prefix_pages = prefix.n_pages;
	out->prefix_tails = prefix.n_tails;
	out->prefix_ghosts = prefix.n_ghosts;
	out->n_running = s->n_running;
	out->n_waiting = s->n_waiting;
	out->prefix_queries = s->pages_wanted;
	out->prefix_hits = s->pages_found;
	out->preemptions = s->n_preemptions;
	memcpy(out->preempted, s->preempted, sizeof out->preempted);
	out->holds_dropped = s->n_holds_dropped;
	for (int kind = 0; kind < KV_POLICIES; kind++)
		out->context_evicted[kind] = s->pages_dropped[kind] * KV_PAGE_TOKENS;
	out->context_evicted[KV_POLICY_MERGE] = s->n_unmerged; /* its pages were given back, and hardly any token */
	if (s->attics) {
		out->attic_kept = s->attics->n_kept;
		out->attic_back = s->attics->n_back;
		out->attic_lost = s->attics->n_lost;
		out->attic_choices = s->attics->n_choices;
		out->attic_again = s->attics->n_again;
		out->attic_again_tokens = s->attics->n_again_tokens;
		out->attic_bytes = s->attics->used_bytes;
	}
	out->parked_pages = (int32_t)s->parking.n_pages;
	out->parked = s->parking.n_parked;
	out->parked_resumed = s->parking.n_resumed;
	out->parked_dropped = s->parking.n_dropped;
}
