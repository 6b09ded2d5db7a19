/*
 * Narrow KV on the CPU. For each layer and KV head a page has a block: the scales of its 16 keys and of its 16 values,
 * then the codes of the keys and of the values, in the backend's order of elements.
 */
#pragma once

#include <math.h>

#include "engine/backend.h"

struct narrow_block {
	float k_scale[KV_PAGE_TOKENS], v_scale[KV_PAGE_TOKENS];
	uint8_t code[]; /* K [16 * head_dim], V [16 * head_dim] */
};

static inline size_t narrow_block_bytes(int32_t head_dim)
{
	return sizeof(struct narrow_block) + 2 * (size_t)head_dim * KV_PAGE_TOKENS;
}

/* Where the block of a layer and head lies in a page. */
static inline size_t narrow_offset(const struct kv_layout *l, int32_t layer, int32_t head_kv)
{
	return ((size_t)layer * (size_t)l->n_head_kv + (size_t)head_kv) * narrow_block_bytes(l->head_dim);
}

/* Counts vectors that became NaNs. */
static inline void narrow_count(const struct kv_layout *l, float k_scale, float v_scale)
{
	if (l->wide && (k_scale != k_scale || v_scale != v_scale))
		__atomic_fetch_add(&l->wide->n_not_finite, (uint64_t)(k_scale != k_scale) + (v_scale != v_scale),
		                   __ATOMIC_RELAXED);
}

/* The wide copy of a page of the slab, or NULL. */
static inline char *narrow_wide_page(const struct kv_layout *l, const char *kv, int32_t page)
{
	if (!l->wide || l->wide->slot[page] < 0)
		return NULL;
	return (char *)(l->wide->slab ? l->wide->slab : kv) + l->wide->offset +
	       (size_t)l->wide->slot[page] * l->wide->stride;
}
