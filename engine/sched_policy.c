#include "engine/sched_internal.h"

#include <stdlib.h>

/* ---- What sets it off ---- */

/*
 * For want of pages: those that are free or that only the index holds, when the request has taken what its next n
 * positions need.
 */
static void look_at_room(struct sched *s, struct request *r, int32_t n)
{
	struct kv_prefix_stats index;
	kv_prefix_stats(s->prefix, &index);
	int64_t could = (int64_t)kv_pool_n_free(s->pool) + index.n_idle - kv_seq_pages_needed(s->pool, &r->kv, n);
	if (could < r->trigger.free_pages && trigger_fire(&r->trigger, ENGINE_TRIGGER_FREE_PAGES, r->kv.n_tokens))
		kv_policy_fire(&r->policy, r->kv.n_tokens);
}

/* ---- Which pages go ---- */

/* Notes on all of its pages, which are full; false without memory. */
static bool note_pages(struct sched *s, struct request *r)
{
	struct kv_seq *kv = &r->kv;
	int32_t n = kv_seq_places(kv) / KV_PAGE_TOKENS;
	struct kv_note *notes = realloc(kv->notes, (size_t)n * sizeof *notes);
	if (!notes)
		return false;
	kv->notes = notes;
	const float *scores = NULL;
	const int32_t first = kv->n_notes;
	if (s->scorer && !r->policy.by_mass && !r->policy.by_age && n > first) {
		scores = kv_score_pages(s->scorer, kv->pages + first, n - first);
		if (!scores)
			return false;
	}
	for (int32_t i = 0; r->policy.by_mass && i < kv->n_notes; i++)
		notes[i].score = (float)kv->mass[i];
	for (; kv->n_notes < n; kv->n_notes++) {
		struct kv_note *note = &notes[kv->n_notes];
		note->number = kv->n_notes + kv->n_dropped; /* all that went stood before it */
		note->keep = request_keeps_page(r, note->number);
		note->score = r->policy.by_mass ? (float)kv->mass[kv->n_notes]
		              : scores          ? scores[kv->n_notes - first]
		                                : 0;
	}
	return true;
}

/* Where rows would look back too far on its first pages, these are to be computed again. As sched_find_page(). */
static bool move_first_pages(struct sched *s, struct request *r)
{
	int32_t moved = kv_policy_moved(&r->policy, r->kv.n_tokens), n = r->policy.first_pages;
	if (moved == r->kv.moved)
		return true;
	while (kv_seq_renew(s->pool, &r->kv, n) != STATUS_OK) {
		if (!sched_find_page(s, r, true))
			return false;
	}
	r->kv.moved = moved;
	r->n_moving = n * KV_PAGE_TOKENS;
	return true;
}

/* As few pages as are to be left come of those between the first and the last, n_due fewer. As sched_find_page(). */
static bool merge_pages(struct sched *s, struct request *r, int32_t n_due)
{
	struct kv_seq *kv = &r->kv;
	int32_t first = r->policy.first_pages, n = kv_seq_places(kv) / KV_PAGE_TOKENS - first - r->policy.last_pages;
	int32_t n_unsound = kv->n_unsound;
	while (kv_seq_own(s->pool, kv, first, n) != STATUS_OK) {
		if (!sched_find_page(s, r, true))
			return false;
	}
	bool *keep = malloc((size_t)n * sizeof *keep);
	for (int32_t i = 0; keep && i < n; i++)
		keep[i] = request_keeps_page(r, first + i + kv->n_dropped);
	if (!keep || kv_merge(s->merger, s->pool, kv, first, n, n - n_due, keep) != STATUS_OK) {
		free(keep);
		sched_preempt(s, r, ENGINE_ROOM_DECODE);
		return false;
	}
	free(keep);
	s->n_unmerged += (uint64_t)(kv->n_unsound - n_unsound);
	return true;
}

/* A page of its window goes to its attic before it is dropped. */
static void keep_below(struct sched *s, struct request *r, int32_t place)
{
	struct kv_seq *kv = &r->kv;
	if (!kv->attic)
		kv->attic = kv_attic_create(s->attics);
	if (kv->attic)
		kv_attic_put(kv->attic, place + kv->n_dropped, kv->pages[place]);
}

bool sched_act(struct sched *s, struct request *r, int32_t n)
{
	if (request_waits(r) && trigger_waits_for_room(&r->trigger))
		look_at_room(s, r, n);
	int32_t n_due = kv_policy_due(&r->policy, &r->kv);
	if (n_due > 0 && r->policy.kind == KV_POLICY_EVICT && !note_pages(s, r)) {
		sched_preempt(s, r, ENGINE_ROOM_DECODE);
		return false;
	}
	/* Pages that were prepared behind are none that it could choose. */
	if (n_due > 0)
		kv_seq_truncate(s->pool, &r->kv, r->kv.n_tokens);
	bool merges = r->policy.kind == KV_POLICY_MERGE;
	if (n_due > 0 && merges && !merge_pages(s, r, n_due))
		return false;
	for (int32_t i = 0; i < n_due && !merges; i++) {
		int32_t victim = kv_policy_next_victim(&r->policy, &r->kv);
		if (r->policy.back_pages > 0 && s->attics)
			keep_below(s, r, victim);
		kv_seq_drop(s->pool, &r->kv, victim, 1);
	}
	s->pages_dropped[r->policy.kind] += (uint64_t)n_due;
	if (!recall_act(s, r))
		return false;
	return move_first_pages(s, r);
}
