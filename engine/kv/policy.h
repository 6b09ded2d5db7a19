/*
 * Context policies: which of its pages a sequence that grows long keeps in its block table. Pure functions of
 * positions; who drops the pages is the scheduler (kv_seq_drop).
 *
 * A policy acts at fixed positions only, in front of the row that stands there, and what it does there depends on
 * nothing but the sequence's own positions. So a row sees the same pages however the prompt was cut into chunks,
 * whatever else ran, and whether earlier turns were computed again or found: the same request has the same answer. Rows
 * in front of the first of these positions see all there is: their KV is exact, and only theirs may enter the prefix
 * index.
 *
 * When it acts first may be left open (acts_pages is INT32_MAX) and be decided on the way, for good: see trigger.h and
 * kv_policy_fire().
 *
 * STREAMING keeps the first pages, on which attention leans whatever they say, and a window of the last ones (Xiao et
 * al., "Efficient Streaming Language Models with Attention Sinks", 2023), all at their exact positions. The window
 * moves in jumps of an eighth of its length, so that a prompt can still be computed in chunks. Once rows would look
 * back further than the model was trained to, the first pages move after them: they are computed again at later
 * positions, which leaves all other distances as they are, and what they hold but for the rotation of their keys.
 *
 * EVICT keeps the first pages and a shorter window, and of those between the ones that are worth most (struct kv_note,
 * score.h): at most as many in all as it has a bound for, and no more than a share of all there were. Pages that are to
 * be kept, as those with a system prompt and where turns begin, go last.
 *
 * MERGE keeps the first pages and the last as EVICT does. Of those between, tokens and what was merged before come to
 * share their KV, until they take as few pages as are left for them (merge.h).
 *
 * QUEST drops nothing. Behind the prompt, rows read the first pages, the last, and of those between the ones that their
 * query could match best (struct page_choice). The prompt is computed exactly, whoever wrote its parts: what the rows
 * of an answer leave is used by that answer alone and computed again for the next turn, so that this depends on no
 * choice made before.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/kv/seq.h"

enum kv_policy_kind {
	KV_POLICY_FULL,
	KV_POLICY_STREAMING,
	KV_POLICY_EVICT,
	KV_POLICY_QUEST,
	KV_POLICY_MERGE,
	KV_POLICIES
};

/* Zeroed: all pages stay. Other policies are made by kv_policy_streaming() and its kind. */
struct kv_policy {
	enum kv_policy_kind kind;
	int32_t first_pages; /* that stay */
	int32_t last_pages;  /* EVICT, MERGE: that stay; QUEST: that are read; STREAMING: all others that stay */
	/* in the block table, once it has acted; INT32_MAX: no bound but the share. QUEST: that a row reads */
	int32_t most_pages;
	int32_t dropped_permille; /* of all pages there were, this many at least go */
	bool by_age;         /* EVICT: the oldest go first, whatever they are worth */
	/* EVICT: pages are worth what rows have given them of their attention, from kv_policy_weighs_from() on */
	bool by_mass;
	int32_t acts_pages;  /* it acts first when the sequence would have more pages than this */
	int32_t jump_pages;  /* and again each time it has grown by so many */
	int32_t reach_pages; /* STREAMING: no row looks back so far as this or further; 0: as far as it may be */
	int32_t step_pages;  /* ... for which the first pages move by multiples of this */
	/* STREAMING: so many at most come back from an attic, beside most_pages; 0: what goes is gone */
	int32_t back_pages;
	/* chosen anew for each so many tokens of an answer; 0: at its beginning only */
	int32_t choose_tokens;
	int32_t again_tokens; /* rows of a request that may be computed again to have them back */
	int32_t trained_tokens; /* STREAMING: kv_policy_keep_within() this, once it is known when it acts */
};

/* "full", "streaming", "evict", "quest", "merge"; NULL past the end. */
const char *kv_policy_name(enum kv_policy_kind kind);
/* False when there is none of that name. */
bool kv_policy_find(const char *name, enum kv_policy_kind *out);

/*
 * Rows that choose what comes back from an attic: the last of a prompt, and those of an answer since it was chosen
 * before, so many at most. Of these 4 found as many pass keys as 16 (0.36 and 0.32 of the digits at 2,048 and 4,096
 * tokens), which took a fifth more time a token; those of a prompt are computed together, and cost next to nothing.
 */
enum { KV_POLICY_PROBE_PROMPT = 16, KV_POLICY_PROBE_ANSWER = 4 };
/* Shortest window that can move and still show a row more than its own page. */
enum { KV_POLICY_MIN_WINDOW = 2 };
/*
 * first_pages + window_pages stay, once there are acts_pages; window_pages >= KV_POLICY_MIN_WINDOW, acts_pages >= both.
 */
struct kv_policy kv_policy_streaming(int32_t first_pages, int32_t window_pages, int32_t acts_pages);
/*
 * Rows of a streaming policy are to look back less than so many tokens. False, and nothing changes, where what it keeps
 * leaves no room to move the first pages in.
 */
bool kv_policy_keep_within(struct kv_policy *p, int32_t tokens);
/*
 * At most most_pages stay, and of those between the first and the last the better ones; it acts each jump_pages from
 * acts_pages on.
 */
struct kv_policy kv_policy_evict(int32_t first_pages, int32_t last_pages, int32_t most_pages, int32_t dropped_permille,
                                 int32_t acts_pages, int32_t jump_pages);
/* The same, but that those between are merged: into one at least. */
struct kv_policy kv_policy_merge(int32_t first_pages, int32_t last_pages, int32_t most_pages, int32_t merged_permille,
				 int32_t acts_pages, int32_t jump_pages);
/*
 * Of more than acts_pages, rows behind the prompt read most_pages, among them the first and the last ones; last_pages
 * >= 1.
 */
struct kv_policy kv_policy_quest(int32_t first_pages, int32_t last_pages, int32_t most_pages, int32_t acts_pages);
bool kv_policy_same(const struct kv_policy *a, const struct kv_policy *b);
/* The same but for when it acts first. */
bool kv_policy_same_but_when(const struct kv_policy *a, const struct kv_policy *b);
/*
 * It is to act as soon as it can, n_tokens being computed without it: in front of the next page, or where it has as
 * many as it keeps. By mass: once a jump more of rows has been looked at.
 */
void kv_policy_fire(struct kv_policy *p, int32_t n_tokens);
/* Pages there are at least when it acts. */
int32_t kv_policy_least_pages(const struct kv_policy *p);

/* Positions below this are computed as without a policy; INT32_MAX: all. QUEST: so are all of the prompt. */
int32_t kv_policy_exact_tokens(const struct kv_policy *p);
/* The most pages that a sequence of so many tokens ever has in its block table. */
int32_t kv_policy_max_pages(const struct kv_policy *p, int32_t n_tokens);
/* The next position behind n_tokens at which it acts: no step goes beyond it. QUEST drops nothing and has none. */
int32_t kv_policy_next(const struct kv_policy *p, int32_t n_tokens);
/* By how much the positions of its first pages are later than their own while the row behind n_tokens is computed. */
int32_t kv_policy_moved(const struct kv_policy *p, int32_t n_tokens);
/*
 * From which position on rows count for what pages are worth by their attention: the last jump before it acts first,
 * whose rows are therefore always computed. INT32_MAX: none do.
 */
int32_t kv_policy_weighs_from(const struct kv_policy *p);
/* How many pages have to go before position s->n_tokens is computed. */
int32_t kv_policy_due(const struct kv_policy *p, const struct kv_seq *s);
/*
 * Which page of the block table goes next: STREAMING: the first behind those that stay. EVICT: the one that is worth
 * least, the oldest of these, of those that may go; all of them have notes.
 */
int32_t kv_policy_next_victim(const struct kv_policy *p, const struct kv_seq *s);
