/*
 * Rows that choose the pages they read (struct page_choice in backend.h), and those that say what pages are worth to
 * them: what the CPU backends share of it.
 */
#pragma once

#include "engine/backend.h"

/* Adds a share of a row's weights to the entry of its page (batch_seq.mass); no number, or less than none, is none. */
static inline void mass_add(uint64_t *to, double share)
{
	if (share > 0)
		__atomic_fetch_add(to, (uint64_t)(share * (1 << KV_MASS_BITS) + 0.5), __ATOMIC_RELAXED);
}

/* A row's description, by one head: see struct attention_look. */
static inline void look_add(struct attention_look *to, double entropy, double largest)
{
	__atomic_fetch_add(&to->n, 1, __ATOMIC_RELAXED);
	mass_add(&to->entropy, entropy);
	mass_add(&to->largest, largest);
}

/* What a row of a KV head adds to the scores of n pages with these bounds (struct page_probe), which are lost. */
void probe_add(float *bound, int32_t n, float scale, uint64_t *score);

/*
 * The least and the greatest of each dimension of 16 keys, elements of two bytes in the given order, NaNs beyond all
 * others: to[0][head_dim] and to[1][head_dim].
 */
void bounds_of_keys(const uint16_t *keys, enum kv_block_order order, int32_t head_dim, uint16_t *to);

/*
 * What a row in entry `own` of a block table reads, when its choice binds: c->n_pages page numbers in their order.
 * score[i]: the bound of entry i, for those in [n_first, own + 1 - n_last).
 */
void choose_pages(const struct page_choice *c, const int32_t *block_table, int32_t own, const float *score,
                  int32_t *pages);
