/*
 * The KV of one sequence: a block table that holds one reference on each of its pages, and how many positions of it
 * are computed. Sequences share pages by reference; a page that more than one holder can see is never written: it is
 * copied first (kv_seq_prepare). Its references are held in the name of its holder, whom kv_seq_label() changes.
 *
 * Pages may leave its middle for good (kv_seq_drop). The table closes behind them, so a position's place in it is the
 * position less what was dropped, and all that is computed from then on is no longer what the tokens alone would give.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/kv/pool.h"

/*
 * Who pays for references. Each page in the block table of a sequence that is charged to an account counts once, so a
 * page that two sequences share counts twice: what an account holds then depends on nobody else, and costs O(1) to keep
 * exactly.
 */
struct kv_account {
	int64_t n_pages;
};

/* What is known of a page in a block table. */
struct kv_note {
	int32_t number; /* of the page in the conversation: its first position by KV_PAGE_TOKENS */
	bool keep;      /* it goes after those that are not */
	float score;    /* the less, the sooner it goes */
};

/* What stands at a place of a block table where tokens have been merged: merge.h. */
struct kv_bucket {
	double position; /* mean of its tokens' */
	float apart;	 /* from the next one: struct kv_merger; below 0: not known */
	int32_t n;	 /* tokens; 1: a token as it was, 0: nothing */
	bool keep;	 /* they are to be kept as they are for as long as others are left */
};

struct kv_seq {
	int32_t *pages; /* [n_pages], in order of position */
	int32_t n_pages, cap_pages;
	int32_t n_tokens; /* positions [0, n_tokens) are computed */
	int32_t n_dropped;  /* pages that kv_seq_drop() took out */
	/* of the pages it has, those in front of all that it took out; means nothing while it took out none */
	int32_t n_leading;
	int32_t dropped_at; /* n_tokens when it did so last */
	/* by how much the positions of its first pages are later than their own: see kv_seq_renew() */
	int32_t moved;
	/* [n_mass], of its first pages, as struct batch_seq has it; kept with its pages. NULL: not wanted */
	uint64_t *mass;
	int32_t n_mass;
	/*
	 * [n_notes], of its first pages; their owner writes them and kv_seq_*() keep them with their pages. NULL: none
	 */
	struct kv_note *notes;
	int32_t n_notes;
	struct kv_bucket *buckets; /* [n_buckets], of its first places, in whole pages; NULL: nothing was merged */
	float *plus;		   /* [n_buckets, made a multiple of four pages'] as struct batch_seq has it */
	int32_t n_buckets;
	struct kv_attic *attic;    /* its own: pages that have left it and may come back (attic.h); NULL: none */
	int32_t n_back;            /* pages that came back; they stand behind those that a window keeps in front */
	int32_t n_unsound;	    /* tokens that were left out of them, since they have a value that is no number */
	struct kv_holder holder;    /* of its references */
	/* charged with what it holds; NULL: nobody is. Stays, like the holder, when the pages leave */
	struct kv_account *account;
	bool goes_on;               /* more will be prepared before anybody stays: see kv_seq_prepare() */
	/* leading pages that were given back, see kv_seq_let_go(): their places in the table are empty */
	int32_t n_gone;
};

#define KV_SEQ_INIT ((struct kv_seq){.holder = {KV_HOLDER_OTHER, 0}})

/* Pages that n_tokens positions take. */
int32_t kv_pages_for(int32_t n_tokens);

/* Where its next position stands in the block table. */
static inline int32_t kv_seq_places(const struct kv_seq *s)
{
	return s->n_tokens - s->n_dropped * KV_PAGE_TOKENS;
}

/*
 * In a narrow pool two of a sequence's pages have a wide copy, as far as there is room for it: the first, on which
 * attention leans more than on others (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023),
 * and the last, while it fills.
 *
 * A prompt that is prepared piece by piece, up to whole pages, has the same copies as one prepared at once: while it
 * goes_on, the last page of a piece gets none.
 *
 * Makes positions [n_tokens, n_tokens + n) writable: takes the pages that are missing and replaces a shared tail page
 * with a copy. LIMIT when the pool runs out (what was taken so far stays and is not lost), NOMEM when the table cannot
 * grow.
 */
enum status kv_seq_prepare(struct kv_pool *pool, struct kv_seq *s, int32_t n);
/* Fresh pages that kv_seq_prepare(n) would take now. */
int32_t kv_seq_pages_needed(const struct kv_pool *pool, const struct kv_seq *s, int32_t n);
/* Pages it holds: one reference on each. */
static inline int32_t kv_seq_refs(const struct kv_seq *s)
{
	return s->n_pages - s->n_gone;
}
/*
 * Gives back the full pages that lie wholly before the last `window` positions, the next one included, which no later
 * position will see; the last full page stays, so that what follows can be indexed behind it. Not together with
 * kv_seq_drop().
 */
void kv_seq_let_go(struct kv_pool *pool, struct kv_seq *s, int32_t window);
/*
 * Gives back the pages in front of the n-th, which are full and not the last that are, because they are kept elsewhere.
 * As above.
 */
void kv_seq_move_out(struct kv_pool *pool, struct kv_seq *s, int32_t n);
/*
 * Forgets positions from n_tokens on and gives their pages back. Where pages would be missing, which were there when
 * those positions were computed (n_tokens < dropped_at, or any before where some are gone), nothing is left at all.
 */
void kv_seq_truncate(struct kv_pool *pool, struct kv_seq *s, int32_t n_tokens);
/* Gives every page back and frees the table; the holder stays. */
void kv_seq_release(struct kv_pool *pool, struct kv_seq *s);
/* Makes the empty `dst` share the first n_tokens positions of `src`, of which nothing was dropped or is gone. */
enum status kv_seq_share(struct kv_pool *pool, struct kv_seq *dst, const struct kv_seq *src, int32_t n_tokens);
/* Gives back n pages from block table entry `first` on, all of them computed and full. */
void kv_seq_drop(struct kv_pool *pool, struct kv_seq *s, int32_t first, int32_t n);
/*
 * Puts a page back that was dropped, which is full and computed, in front of the block table's entry `at`; takes over
 * its reference, which is the sequence's holder's. False without memory. kv_seq_remove() gives it back again. What was
 * computed before either stays what it is: both leave dropped_at alone.
 */
bool kv_seq_insert(struct kv_seq *s, int32_t at, int32_t page);
void kv_seq_remove(struct kv_pool *pool, struct kv_seq *s, int32_t at);
/*
 * From now on the masses of all its pages are counted, those it has not got yet beginning at none; false without
 * memory.
 */
bool kv_seq_weigh(struct kv_seq *s);
/*
 * Makes its first n pages, which are full, its own, to be written again for later positions: those that others see as
 * well are replaced. LIMIT when the pool runs out; what was done so far stays and is not lost.
 */
enum status kv_seq_renew(struct kv_pool *pool, struct kv_seq *s, int32_t n);
/*
 * Makes n pages from block table entry `first` on, which are full, its own, as they are: those that others see as well
 * are copied. LIMIT as above; it takes one free page at a time.
 */
enum status kv_seq_own(struct kv_pool *pool, struct kv_seq *s, int32_t first, int32_t n);
/* Adds one full page that is computed already behind the full pages of s, taking a reference; false without memory. */
bool kv_seq_append(struct kv_pool *pool, struct kv_seq *s, int32_t page);
/* Everything that s holds, and will hold, is somebody else's. */
void kv_seq_label(struct kv_pool *pool, struct kv_seq *s, struct kv_holder holder);
/* From now on `account` (NULL: nobody) is charged for the sequence, with the pages it has as well. */
void kv_seq_charge(struct kv_seq *s, struct kv_account *account);
