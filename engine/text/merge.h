/*
 * The core of both tokenizers: a sequence of symbols in which, again and again, the neighbours of the lowest rank are
 * merged into one, the leftmost first among equals, until no two neighbours have a merge. Byte-level BPE ranks pairs by
 * the order of the merge list; SentencePiece ranks them by the score of the token they form.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* (left, right) -> (rank, result), with open addressing. Also used as a plain set of pairs. */
struct merge_table {
	struct merge_slot {
		uint64_t pair; /* left << 32 | right; MERGE_FREE: unused */
		uint32_t rank;
		int32_t result;
	} *slots;
	size_t n_slots; /* a power of two, or 0 */
	size_t n_used;
};

#define MERGE_FREE UINT64_MAX

/* Room for n pairs without growing; false when there is no memory. */
bool merge_table_init(struct merge_table *m, size_t n);
void merge_table_free(struct merge_table *m);
/* Adds a pair of ids (not negative); one that is there keeps the lower rank. False when there is no memory. */
bool merge_table_add(struct merge_table *m, int32_t left, int32_t right, uint32_t rank, int32_t result);
/* NULL when the pair is not there. */
const struct merge_slot *merge_table_find(const struct merge_table *m, int32_t left, int32_t right);

/* Scratch memory of one thread, kept between calls. Zero it first. */
struct merge_work {
	struct merge_node *nodes; /* [cap] */
	uint64_t *heap; /* [2 * cap] */
	size_t cap;
};

void merge_work_free(struct merge_work *w);

/*
 * Merges ids[0..*n) in place and sets *n to what is left. O(n log n). False when there is no memory (ids are then
 * unchanged). *n must be below INT32_MAX.
 */
bool merge_run(const struct merge_table *m, struct merge_work *w, int32_t *ids, size_t *n);
