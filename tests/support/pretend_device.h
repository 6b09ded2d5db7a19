/*
 * A pretended device for the scheduler: "computing" a position writes into its page a digest of the salt and of all
 * tokens up to it, as real KV depends on all of them. So whoever reads a page can tell whether it is what it would have
 * computed itself, whatever was shared, found, copied, dropped or preempted in between.
 */
#pragma once

#include "engine/sched.h"
#include "tests/unit/unit.h"

enum { PRETEND_CELL = 8, PRETEND_PAGE = KV_PAGE_TOKENS * PRETEND_CELL };

static inline struct kv_layout pretend_layout(void)
{
	/* Layers, so that pages come from tiers in parts. */
	return (struct kv_layout){4, 1, 2, KV_PAGE_TOKENS, QUANT_F16, PRETEND_PAGE, PRETEND_PAGE};
}

/* The digest behind one more token; before the first it is the salt's. */
static inline uint64_t pretend_next(uint64_t before, int32_t token)
{
	uint64_t h = (before ^ (uint32_t)token) * 0x9E3779B97F4A7C15ull;
	return h ^ h >> 29;
}

static inline uint64_t *pretend_cell(struct kv_pool *pool, const int32_t *pages, int32_t position)
{
	char *page = (char *)kv_pool_slab(pool) + (size_t)pages[position / KV_PAGE_TOKENS] * PRETEND_PAGE;
	return (uint64_t *)(page + position % KV_PAGE_TOKENS * PRETEND_CELL);
}

/*
 * Checks positions [0, n_known) of a sequence and writes the next n_new ones, whose pages nobody else may see. Returns
 * the digest at the end, which stands for its logits.
 */
static inline uint64_t pretend_compute(struct kv_pool *pool, const int32_t *pages, const int32_t *tokens,
                                       int32_t n_known, int32_t n_new, uint64_t salt)
{
	uint64_t h = salt;
	for (int32_t p = 0; p < n_known + n_new; p++) {
		uint64_t *cell = pretend_cell(pool, pages, p);
		h = pretend_next(h, tokens[p]);
		if (p >= n_known) {
			if (p == n_known || p % KV_PAGE_TOKENS == 0)
				assert_int_equal(kv_pool_refs(pool, pages[p / KV_PAGE_TOKENS]), 1);
			*cell = h;
		} else if (*cell != h) {
			fail_msg("position %d of page %d is not what its tokens make it", p, pages[p / KV_PAGE_TOKENS]);
		}
	}
	return h;
}

/* The token that an answer goes on with. */
static inline int32_t pretend_token(uint64_t digest)
{
	return (int32_t)(digest % 50000);
}
