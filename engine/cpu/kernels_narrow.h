/*
 * Attention over narrow KV (narrow.h; the codes of keys are [head_dim][16]): a block of a page becomes what the kernels of wide pages read, in
 * the first-level cache, just before it is computed with. Included by the sources of each instruction set, behind kernels_attention.h.
 */
#pragma once

#include <float.h>

#include "engine/cpu/kernels_attention.h"
#include "engine/cpu/narrow.h"

/* What a code is worth, times 2^8 for E4M3: its bits are those of a half whose exponent is 8 too small, subnormal ones included. */
INLINE vf narrow_values(enum kv_form form, const uint8_t *code)
{
	if (form == KV_FORM_INT8) {
		float x[LANES];
		for (int i = 0; i < LANES; i++)
			x[i] = (float)(int8_t)code[i];
		return vf_load(x);
	}
	uint16_t half[LANES];
	for (int i = 0; i < LANES; i++)
		half[i] = (uint16_t)((code[i] & 0x80) << 8 | (code[i] & 0x7F) << 7);
	return vf_load_half(half);
}

#ifdef __AVX512BF16__
/* n bfloat16s of a, each followed by one of b. */
INLINE void store_pairs(uint16_t *to, vf a, vf b, int n)
{
	uint16_t x[LANES], y[LANES];
	vf_store_bf16_n(x, a, LANES);
	vf_store_bf16_n(y, b, LANES);
	for (int i = 0; i < n; i++) {
		to[2 * i] = x[i];
		to[2 * i + 1] = y[i];
	}
}

/* K and V as kernels_pages_bf16.h has them. */
INLINE void narrow_unpack(enum kv_form form, const struct narrow_block *from, int32_t head_dim, uint16_t *to)
{
	const float unit = form == KV_FORM_INT8 ? 1 : 256;
	const int64_t n = (int64_t)head_dim * KV_PAGE_TOKENS;
	const uint8_t *v = from->code + n;
	const vf scale = vf_mul(vf_load(from->k_scale), vf_set1(unit)), zero = vf_zero();
	int32_t d = 0;
	for (; d + 1 < head_dim; d += 2)
		store_pairs(to + (int64_t)d * LANES, vf_mul(narrow_values(form, from->code + (int64_t)d * LANES), scale),
		            vf_mul(narrow_values(form, from->code + (int64_t)(d + 1) * LANES), scale), LANES);
	if (d < head_dim)
		vf_store_bf16_n(to + (int64_t)d * LANES, vf_mul(narrow_values(form, from->code + (int64_t)d * LANES), scale), LANES);
	to += n;
	for (int t = 0; t < KV_PAGE_TOKENS; t += 2) {
		const uint8_t *row[2] = {v + (int64_t)t * head_dim, v + (int64_t)(t + 1) * head_dim};
		for (d = 0; d < head_dim; d += LANES) {
			int count = head_dim - d < LANES ? head_dim - d : LANES;
			vf x[2] = {zero, zero};
			for (int i = 0; i < 2; i++) {
				uint8_t code[LANES] = {0};
				memcpy(code, row[i] + d, (size_t)count);
				x[i] = vf_mul(narrow_values(form, code), vf_set1(from->v_scale[t + i] * unit));
			}
			store_pairs(to + (int64_t)t * head_dim + 2 * d, x[0], x[1], count);
		}
	}
}
_Static_assert((int)LANES == (int)KV_PAGE_TOKENS, "the keys of a page in one dimension are a vector");
#else
/* K [head_dim][16] and V [16][head_dim] as kernels_pages_plain.h has them. */
INLINE void narrow_unpack(enum kv_form form, const struct narrow_block *from, int32_t head_dim, uint16_t *to)
{
	const float unit = form == KV_FORM_INT8 ? 1 : 256;
	const int64_t n = (int64_t)head_dim * KV_PAGE_TOKENS;
	const uint8_t *v = from->code + n;
	vf scale[PAGE_VECTORS];
	for (int p = 0; p < PAGE_VECTORS; p++)
		scale[p] = vf_mul(vf_load(from->k_scale + p * LANES), vf_set1(unit));
	for (int64_t i = 0; i < n; i += LANES)
		page_store(to + i, vf_mul(narrow_values(form, from->code + i), scale[i / LANES % PAGE_VECTORS]));
	to += n;
	for (int t = 0; t < KV_PAGE_TOKENS; t++) {
		float s = from->v_scale[t] * unit;
		int32_t d = 0;
		for (; d + LANES <= head_dim; d += LANES)
			page_store(to + (int64_t)t * head_dim + d, vf_mul(narrow_values(form, v + (int64_t)t * head_dim + d), vf_set1(s)));
		if (d < head_dim) {
			uint8_t rest[LANES] = {0};
			memcpy(rest, v + (int64_t)t * head_dim + d, (size_t)(head_dim - d));
			page_store_n(to + (int64_t)t * head_dim + d, vf_mul(narrow_values(form, rest), vf_set1(s)), head_dim - d);
		}
	}
}
#endif

static void narrow_store(enum kv_form form, const float *k, const float *v, int32_t head_dim, int32_t token, struct narrow_block *to)
{
	const float most = KV_TYPE == QUANT_F16 ? KV_HALF_MAX : FLT_MAX; /* what narrow_unpack() can make of it */
	to->k_scale[token] = kv_form_pack(form, k, head_dim, most, to->code + token, KV_PAGE_TOKENS);
	to->v_scale[token] = kv_form_pack(form, v, head_dim, most, to->code + (int64_t)head_dim * (KV_PAGE_TOKENS + token), 1);
}

/* The same K and V as in the page's wide copy, where those of this block are at `to`. */
static void narrow_widen(enum kv_form form, const struct narrow_block *from, int32_t head_dim, uint16_t *to)
{
	narrow_unpack(form, from, head_dim, to);
}

/* See watch.h. */
static int32_t peak(const float *x, int64_t n)
{
	vf most = vf_zero();
	int32_t bits[LANES], top = 0;
	/* As integers: a maximum of floats may lose a NaN. */
	for (int64_t i = 0; i < n; i += LANES) {
		vf v = vf_abs(i + LANES <= n ? vf_load(x + i) : vf_load_n(x + i, (int)(n - i)));
		most = vf_bits_max(most, v);
	}
	memcpy(bits, &most, sizeof bits);
	for (int i = 0; i < LANES; i++)
		top = bits[i] > top ? bits[i] : top;
	return top;
}

static void attn_run_narrow(const struct attn_job *j)
{
	const struct kv_layout *l = j->layout;
	const int64_t k_size = (int64_t)j->head_dim * KV_PAGE_TOKENS;
	struct block b = {0}; /* fetches nothing ahead: what is read is half as much, and in a row */
	for (int32_t at = j->from; at < j->to; at += ATTN_BLOCK) {
		int32_t end = at + ATTN_BLOCK < j->to ? at + ATTN_BLOCK : j->to;
		int n_pages = (end - at + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
		for (int head = 0; head < j->n_heads; head++) {
			for (int p = 0; p < n_pages; p++) {
				int32_t page = j->block_table[at / KV_PAGE_TOKENS + p];
				const char *wide = narrow_wide_page(l, j->slab, page);
				const char *block = j->slab + (size_t)page * l->page_stride + narrow_offset(l, j->layer, j->head_kv + head);
				uint16_t *halves = j->unpacked + p * 2 * k_size;
				if (wide)
					b.k[p] = (const uint16_t *)(const void *)wide + ((int64_t)j->layer * l->n_head_kv + j->head_kv + head) * 2 * k_size;
				else if (l->form == KV_FORM_INT8)
					narrow_unpack(KV_FORM_INT8, (const struct narrow_block *)(const void *)block, j->head_dim, halves);
				else
					narrow_unpack(KV_FORM_FP8_E4M3, (const struct narrow_block *)(const void *)block, j->head_dim, halves);
				if (!wide)
					b.k[p] = halves;
				b.v[p] = b.k[p] + k_size;
			}
			attend_head(j, head, at, &b);
		}
	}
}
