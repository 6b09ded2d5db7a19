/*
 * Pages that have left a sequence's window and may come back (policy.h: page_in): their KV goes to the tier in host
 * memory under keys that nobody else can have, and what bounds their keys stays here, so that it can be told which of
 * them a query would match.
 *
 * Like any tier it may drop what it has: such a page is lost, but its bounds stay, so that whoever wants it can have it
 * computed again (engine/sched_recall.c). The bounds of all attics together take at most a KV_ATTIC_SHARE-th of what that
 * tier may, which are those of several times the pages that it holds; beyond that nothing is known of a page, and it is
 * lost for good.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/kv/pool.h"
#include "engine/kv/tiers.h"

enum { KV_ATTIC_SHARE = 4 };

/* What all attics of a worker share. */
struct kv_attics {
	struct kv_tiers *tiers;
	struct kv_pool *pool;
	uint64_t most_bytes, used_bytes; /* of bounds */
	uint64_t serial;                 /* of the last attic */
	/* pages, so far: that were kept, lost, brought back, computed again */
	uint64_t n_kept, n_lost, n_back, n_again;
	uint64_t n_choices, n_again_tokens; /* of what comes back, so far, and the rows that were computed for it */
};

/* Pages of one sequence; it moves with it. */
struct kv_attic {
	struct kv_attics *of;
	struct kv_key base;
	int32_t n, cap;
	int32_t *number;  /* [n] of pages in the conversation, ascending */
	uint16_t *bounds; /* [n][n_layer][n_head_kv][least, greatest][head_dim], as struct page_probe has them */
	bool *lost;       /* [n] the tier has it no more, when that was looked at last */
	int32_t n_lost;   /* of these */
	int32_t n_unknown; /* pages that left, and nothing is known of them */
	/* [n_back] of its pages, ascending, those that are in the block table now: written by sched_recall.c */
	int32_t *back;
	int32_t n_back, cap_back;
};

/* The tiers have one in host memory, and pages have bounds. */
bool kv_attics_init(struct kv_attics *a, struct kv_tiers *tiers, struct kv_pool *pool);

/* NULL without memory. */
struct kv_attic *kv_attic_create(struct kv_attics *of);
void kv_attic_destroy(struct kv_attic *a); /* NULL is allowed */
/*
 * Keeps a page, which is full and computed; `number` is more than all before. One that it has is left as it is. False:
 * not even its bounds.
 */
bool kv_attic_put(struct kv_attic *a, int32_t number, int32_t page);
/* Looks which of its pages are lost. */
void kv_attic_look(struct kv_attic *a);
/* Copies the i-th page back into a page of the device. False: it is lost. */
bool kv_attic_bring(struct kv_attic *a, int32_t i, int32_t page);
/* The tier is to have the i-th page, which it may have dropped: here it is. */
void kv_attic_keep(struct kv_attic *a, int32_t i, int32_t page);
/* Room for so many pages to be back; false without memory. */
bool kv_attic_reserve_back(struct kv_attic *a, int32_t n);
