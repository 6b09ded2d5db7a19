#include "engine/cpu/choice.h"

#include <math.h>
#include <string.h>

/* Halves and bfloat16s in the order of integers; the same again is the way back. */
static int16_t sortable(uint16_t bits)
{
	return (int16_t)(bits & 0x8000 ? bits ^ 0x7FFF : bits);
}

void bounds_of_keys(const uint16_t *keys, enum kv_block_order order, int32_t head_dim, uint16_t *to)
{
	for (int32_t d = 0; d < head_dim; d++) {
		int32_t at = d * KV_PAGE_TOKENS, step = 1;
		if (order == KV_BY_TOKEN) {
			at = d;
			step = head_dim;
		} else if (order == KV_BY_DIM_PAIRS && (d | 1) < head_dim) {
			at = (d & ~1) * KV_PAGE_TOKENS + (d & 1);
			step = 2;
		}
		int16_t least = INT16_MAX, greatest = INT16_MIN;
		for (int32_t token = 0; token < KV_PAGE_TOKENS; token++) {
			int16_t x = sortable(keys[at + token * step]);
			least = x < least ? x : least;
			greatest = x > greatest ? x : greatest;
		}
		to[d] = sortable((uint16_t)least);
		to[head_dim + d] = sortable((uint16_t)greatest);
	}
}

/* Floats in the order of integers, a NaN above all. */
static uint32_t rank(float x)
{
	uint32_t bits;
	if (isnan(x))
		return UINT32_MAX;
	memcpy(&bits, &x, sizeof bits);
	return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

void choose_pages(const struct page_choice *c, const int32_t *block_table, int32_t own, const float *score,
                  int32_t *pages)
{
	int32_t begin = c->n_first, end = own + 1 - c->n_last, n = 0;
	/* of those ranked with the worst that is taken, how many are */
	int32_t left = c->n_pages - c->n_first - c->n_last;
	uint32_t worst = 0;                                 /* its rank, found from the highest byte down */
	for (int shift = 24; shift >= 0; shift -= 8) {
		int32_t count[256] = {0}, byte = 255;
		for (int32_t i = begin; i < end; i++) {
			uint32_t r = rank(score[i]);
			count[r >> shift & 255] += ((uint64_t)(r ^ worst) >> (shift + 8)) == 0;
		}
		while (count[byte] < left)
			left -= count[byte--];
		worst |= (uint32_t)byte << shift;
	}
	for (int32_t i = 0; i < begin; i++)
		pages[n++] = block_table[i];
	for (int32_t i = begin; i < end; i++) {
		uint32_t r = rank(score[i]);
		if (r > worst || (r == worst && left-- > 0))
			pages[n++] = block_table[i];
	}
	for (int32_t i = end; i <= own; i++)
		pages[n++] = block_table[i];
}

void probe_add(float *bound, int32_t n, float scale, uint64_t *score)
{
	float max = -INFINITY;
	double total = 0;
	for (int32_t i = 0; i < n; i++) {
		bound[i] = isfinite(bound[i]) ? bound[i] * scale : -INFINITY;
		max = bound[i] > max ? bound[i] : max;
	}
	if (max == -INFINITY)
		return;
	for (int32_t i = 0; i < n; i++)
		total += bound[i] = expf(bound[i] - max);
	for (int32_t i = 0; i < n; i++)
		mass_add(&score[i], bound[i] / total * (bound[i] / total));
}
