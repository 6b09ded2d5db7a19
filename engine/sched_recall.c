/*
 * What comes back to a window (policy.h: page_in): the last rows of a prompt, and as the answer grows the rows of each
 * stretch of it, score the pages of the attic (struct page_probe); the best of these stand in the block table, behind
 * the first pages, until the next choice. Choices are made at fixed positions, so that a request that is set back comes
 * to the same.
 *
 * A page that the tier has dropped is computed again, beside the conversation, in a sequence of its own that reads the
 * conversation's tokens under its policy, in the shares of a step that prompts have. The KV of a page depends on all
 * tokens before it, those that had left the window included (each layer hands on what the one below saw), so this
 * begins at the start, or rather behind what the index knows of it: what is exact. It could begin at a whole window of
 * pages that the tier has; but the tier drops what was given to it first, so that there is hardly ever one in front of
 * a page that it has dropped. The cost is a row for each token from there to the end of the last page that is wanted,
 * each of them attending to a window, and as many pages of the pool as the policy keeps for as long as it takes.
 *
 * The page is to the bit what it was, where it was computed with nothing back: in all of a conversation up to its first
 * answer. Behind that, rows may have seen what was back then, and it is what it would be if the conversation were read
 * anew. Either way it is KV of its policy, so it stays with its sequence, and nothing of it reaches the index.
 *
 * What this may take is the request's to say (kv_policy.again_tokens), and never more than reading the conversation
 * once more. What would take more stays away, and the next best page comes in its place; so does what lies where the
 * first pages had moved (kv_policy_moved()), or when the pool, or the tenant's share of it, is too small for both
 * sequences.
 */
#include "engine/sched_internal.h"

#include <stdlib.h>

int32_t recall_next(const struct request *r)
{
	const struct recall *c = &r->recall;
	int64_t next = (int64_t)r->n_prompt - 1 + (int64_t)c->n_stops * r->policy.choose_tokens;
	if (r->policy.back_pages == 0 || (c->n_stops > 0 && r->policy.choose_tokens == 0) || next > INT32_MAX)
		return INT32_MAX;
	return (int32_t)next;
}

int32_t recall_probes_from(const struct request *r)
{
	return recall_next(r) - (r->recall.n_stops > 0 ? KV_POLICY_PROBE_ANSWER : KV_POLICY_PROBE_PROMPT);
}

bool recall_probes(const struct request *r)
{
	int32_t at = r->kv.n_tokens, next = recall_next(r);
	return next < INT32_MAX && at >= recall_probes_from(r) && at < next && r->kv.attic && r->kv.attic->n > 0;
}

bool recall_under_way(const struct request *r)
{
	return r->recall.n_lacking > 0;
}

/* Positions that are computed again at most, up to where its last page ends. */
static int32_t again_end(const struct request *r)
{
	const struct recall *c = &r->recall;
	return (r->kv.attic->number[c->lacking[c->n_lacking - 1]] + 1) * KV_PAGE_TOKENS;
}

int32_t recall_reach(const struct request *r)
{
	int32_t at = r->recall.again.n_tokens, until = kv_policy_next(&r->policy, at), end = again_end(r);
	return (until < end ? until : end) - at;
}

void recall_stop(struct sched *s, struct request *r)
{
	struct recall *c = &r->recall;
	kv_seq_release(s->pool, &c->again);
	kv_seq_charge(&c->again, NULL);
	c->n_lacking = 0;
}

void recall_reset(struct request *r)
{
	r->recall.n_stops = r->recall.spent_tokens = r->recall.probe.n_pages = 0;
}

void recall_free(struct recall *c)
{
	free(c->probe.score);
	free(c->lacking);
}

/* ---- The choice ---- */

/* Its next rows score what is in its attic; without memory, no more of it than before. */
static void prepare_probe(struct request *r)
{
	struct recall *c = &r->recall;
	struct page_probe *p = &c->probe;
	const struct kv_attic *a = r->kv.attic;
	p->bounds = a->bounds;
	if (c->cap_probe < a->n) {
		uint64_t *score = realloc(p->score, (size_t)a->n * sizeof *score);
		if (!score)
			return;
		p->score = score;
		c->cap_probe = a->n;
	}
	for (; p->n_pages < a->n; p->n_pages++)
		p->score[p->n_pages] = 0;
}

/* What it takes to compute pages again: rows, and pages beside those that the request may come to. */
struct price {
	int32_t known;       /* tokens from the start that the index has */
	int32_t left;        /* rows that it may still spend */
	int32_t spare_pages; /* that the pool has for it */
};

static struct price price_of(struct sched *s, const struct request *r, struct kv_chain *chain)
{
	const struct kv_policy *p = &r->policy;
	int32_t exact = kv_policy_exact_tokens(p), n = r->kv.n_tokens < exact ? r->kv.n_tokens : exact,
		most = p->again_tokens < r->max_total ? p->again_tokens : r->max_total, pages = kv_pool_n_pages(s->pool);
	if (pages > r->tenant->max_pages)
		pages = r->tenant->max_pages;
	return (struct price){
		.known = kv_prefix_match(s->prefix, chain, r->tokens.ids, n) * KV_PAGE_TOKENS,
		.left = most - r->recall.spent_tokens,
		.spare_pages = pages - kv_policy_max_pages(p, r->max_total),
	};
}

/* Whether a page of this number can be computed again. */
static bool can_compute(const struct request *r, const struct price *price, int32_t number)
{
	struct kv_policy alone = r->policy;
	int32_t end = (number + 1) * KV_PAGE_TOKENS;
	alone.back_pages = 0;
	/* One page more, where what the index knows ends within one. */
	return kv_policy_moved(&alone, end - 1) == 0 && end - price->known <= price->left &&
	       kv_policy_max_pages(&alone, end) + 1 <= price->spare_pages;
}

/* The page of the attic with the largest score that may come back; of equals the latest. -1: there is none. */
static int32_t best_page(const struct request *r)
{
	const struct kv_attic *a = r->kv.attic;
	const struct page_probe *p = &r->recall.probe;
	int32_t best = -1,
		reach = r->policy.reach_pages > 0 ? r->policy.reach_pages : r->policy.trained_tokens / KV_PAGE_TOKENS;
	int32_t nearest =
		reach > 0 ? kv_pages_for(r->max_total) - reach : 0; /* no row is to look back further than it may */
	for (int32_t i = 0; i < p->n_pages; i++)
		if (a->number[i] >= nearest && p->score[i] > 0 && (best < 0 || p->score[i] >= p->score[best]))
			best = i;
	return best;
}

static int by_index(const void *a, const void *b)
{
	return *(const int32_t *)a - *(const int32_t *)b;
}

static bool is_among(const int32_t *sorted, int32_t n, int32_t i)
{
	return n > 0 && bsearch(&i, sorted, (size_t)n, sizeof *sorted, by_index);
}

/* Which pages are to be back, at most `most`, ascending: how many. */
static int32_t pick(struct sched *s, struct request *r, int32_t most, int32_t *chosen)
{
	const struct kv_attic *a = r->kv.attic;
	struct price price = price_of(s, r, &r->chain);
	int32_t n = 0;
	for (int32_t i; n < most && (i = best_page(r)) >= 0;) {
		r->recall.probe.score[i] = 0;
		if (!a->lost[i] || is_among(a->back, a->n_back, i) || can_compute(r, &price, a->number[i]))
			chosen[n++] = i;
	}
	qsort(chosen, (size_t)n, sizeof *chosen, by_index);
	return n;
}

/* Those that are back and not among these leave again; the tier has them, or they are lost. */
static void send_away(struct sched *s, struct request *r, const int32_t *chosen, int32_t n)
{
	struct kv_attic *a = r->kv.attic;
	for (int32_t i = a->n_back - 1; i >= 0; i--) {
		if (is_among(chosen, n, a->back[i]))
			continue;
		kv_seq_remove(s->pool, &r->kv, r->policy.first_pages + i);
		memmove(a->back + i, a->back + i + 1, (size_t)(--a->n_back - i) * sizeof *a->back);
	}
	r->kv.n_back = a->n_back;
}

/* The i-th page of its attic is back; takes over the reference. */
static void welcome(struct sched *s, struct request *r, int32_t i, int32_t page)
{
	struct kv_attic *a = r->kv.attic;
	int32_t at = a->n_back;
	while (at > 0 && a->back[at - 1] > i)
		at--;
	if (!kv_seq_insert(&r->kv, r->policy.first_pages + at, page)) {
		kv_pool_unref(s->pool, page, r->kv.holder);
		return;
	}
	memmove(a->back + at + 1, a->back + at, (size_t)(a->n_back - at) * sizeof *a->back);
	a->back[at] = i;
	r->kv.n_back = ++a->n_back;
}

/* ---- Pages that are computed again ---- */

/* Of the pages that it lacks, those that have been computed come back; the last one ends it. */
static void collect(struct sched *s, struct request *r)
{
	struct recall *c = &r->recall;
	struct kv_attic *a = r->kv.attic;
	int32_t n = 0;
	for (; n < c->n_lacking && (a->number[c->lacking[n]] + 1) * KV_PAGE_TOKENS <= c->again.n_tokens; n++) {
		int32_t i = c->lacking[n], page = c->again.pages[a->number[i] - c->again.n_dropped];
		/* Else the index knew it. */
		bool computed = (a->number[i] + 1) * KV_PAGE_TOKENS > c->again_from;
		kv_pool_ref(s->pool, page, r->kv.holder);
		welcome(s, r, i, page);
		kv_attic_keep(a, i, page);
		c->again_pages += computed;
		a->of->n_again += (uint64_t)computed;
	}
	c->n_lacking -= n;
	memmove(c->lacking, c->lacking + n, (size_t)c->n_lacking * sizeof *c->lacking);
	if (n > 0 && c->n_lacking == 0)
		recall_stop(s, r);
}

/* Begins with what the index knows. */
static void begin(struct sched *s, struct request *r)
{
	struct kv_seq *again = &r->recall.again;
	struct kv_use use = sched_use(s, r);
	int32_t exact = kv_policy_exact_tokens(&r->policy), end = again_end(r), n = exact < end ? exact : end;
	*again = KV_SEQ_INIT;
	again->holder = r->kv.holder;
	kv_seq_charge(again, &r->tenant->kv);
	/* Without memory for the block table all of it is computed. */
	if (kv_prefix_get(s->prefix, &r->chain, r->tokens.ids, n, &use, again) == STATUS_OK)
		kv_seq_truncate(s->pool, again, again->n_tokens < n ? again->n_tokens : n);
	r->recall.again_from = again->n_tokens;
	collect(s, r);
}

void recall_computed(struct sched *s, struct request *r, int32_t n_rows)
{
	struct recall *c = &r->recall;
	c->again.n_tokens += n_rows;
	c->spent_tokens += n_rows;
	c->again_tokens += n_rows;
	r->kv.attic->of->n_again_tokens += (uint64_t)n_rows;
	collect(s, r);
}

bool recall_go_on(struct sched *s, struct request *r)
{
	struct kv_seq *again = &r->recall.again;
	int32_t n_due = kv_policy_due(&r->policy, again);
	if (n_due > 0)
		kv_seq_truncate(s->pool, again, again->n_tokens);
	for (; n_due > 0; n_due--)
		kv_seq_drop(s->pool, again, kv_policy_next_victim(&r->policy, again), 1);
	return sched_make_room(s, r, again, recall_reach(r));
}

/* ---- ---- */

/* The best pages of its attic stand in its block table from now on. As sched_find_page(). */
static bool choose(struct sched *s, struct request *r)
{
	struct kv_seq *kv = &r->kv;
	struct kv_attic *a = kv->attic;
	struct recall *c = &r->recall;
	size_t most = (size_t)r->policy.back_pages;
	int32_t *chosen = malloc(most * sizeof *chosen), *lacking = realloc(c->lacking, most * sizeof *lacking);
	if (lacking)
		c->lacking = lacking;
	if (!chosen || !lacking || !kv_attic_reserve_back(a, r->policy.back_pages)) {
		free(chosen);
		return true;
	}
	kv_seq_truncate(s->pool, kv, kv->n_tokens);
	kv_attic_look(a);
	/* One at least stays away: a sequence that lacks nothing would pass for an exact one. */
	int32_t away = kv->n_dropped + kv->n_back - 1,
		n = pick(s, r, away < r->policy.back_pages ? away : r->policy.back_pages, chosen);
	send_away(s, r, chosen, n);
	c->n_choices++;
	a->of->n_choices++;
	for (int32_t i = 0; i < n; i++) {
		int32_t page;
		if (is_among(a->back, a->n_back, chosen[i]))
			continue;
		if (a->lost[chosen[i]]) {
			c->lacking[c->n_lacking++] = chosen[i];
			continue;
		}
		if (!sched_take_page(s, r, &page)) {
			free(chosen);
			return false;
		}
		if (kv_attic_bring(a, chosen[i], page))
			welcome(s, r, chosen[i], page);
		else
			kv_pool_unref(s->pool, page, kv->holder);
	}
	free(chosen);
	if (c->n_lacking > 0)
		begin(s, r);
	return true;
}

bool recall_act(struct sched *s, struct request *r)
{
	struct recall *c = &r->recall;
	for (int32_t next; (next = recall_next(r)) <= r->kv.n_tokens;) {
		c->n_stops++;
		if (next == r->kv.n_tokens && r->kv.attic && c->probe.n_pages > 0 && !choose(s, r))
			return false;
		c->probe.n_pages = 0;
	}
	if (recall_probes(r))
		prepare_probe(r);
	return true;
}
