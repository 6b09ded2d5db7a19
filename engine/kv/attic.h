/*
 * Pages that have left a sequence's window and may come back (policy.h: page_in): their KV goes to the tier in host
 * memory under keys that nobody else can have, and what bounds their keys stays here, so that it can be told which of
 * them a query would match.
 *
 * Like any tier it may drop what it has: such a page is lost, and is left out. The bounds of all attics together take
 * at most KV_ATTIC_SHARE of what that tier may; beyond that pages are lost as well.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/kv/pool.h"
#include "engine/kv/tiers.h"

enum { KV_ATTIC_SHARE = 16 };

/* What all attics of a worker share. */
struct kv_attics {
	struct kv_tiers *tiers;
	struct kv_pool *pool;
	uint64_t most_bytes, used_bytes; /* of bounds */
	uint64_t serial;                 /* of the last attic */
	uint64_t n_kept, n_lost, n_back; /* pages, so far */
};

/* Pages of one sequence; it moves with it. */
struct kv_attic {
	struct kv_attics *of;
	struct kv_key base;
	int32_t n, cap;
	int32_t *number;  /* [n] of pages in the conversation, ascending */
	uint16_t *bounds; /* [n][n_layer][n_head_kv][least, greatest][head_dim], as struct page_probe has them */
	int32_t n_lost;
};

/* The tiers have one in host memory, and pages have bounds. */
bool kv_attics_init(struct kv_attics *a, struct kv_tiers *tiers, struct kv_pool *pool);

/* NULL without memory. */
struct kv_attic *kv_attic_create(struct kv_attics *of);
void kv_attic_destroy(struct kv_attic *a); /* NULL is allowed */
/*
 * Keeps a page, which is full and computed; `number` is more than all before. One that it has is left as it is. False:
 * it is lost.
 */
bool kv_attic_put(struct kv_attic *a, int32_t number, int32_t page);
/* Copies the i-th page back into a page of the device. False: it is lost. */
bool kv_attic_bring(struct kv_attic *a, int32_t i, int32_t page);
