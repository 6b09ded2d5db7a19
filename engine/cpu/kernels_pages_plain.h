/*
 * Pages of halves, or with PAGES_BF16 of bfloat16s, whose elements become floats as they are read: within a page and KV
 * head, K is [head_dim][16 tokens] and V [16 tokens][head_dim]. Included by kernels_attention.h; kernels_pages_bf16.h
 * has the same names.
 */
#pragma once

#include "engine/cpu/kernels_fetch.h"
#include "engine/cpu/kernels_rows.h"

#define KV_KEYS KV_BY_DIM
#define KV_VALUES KV_BY_TOKEN

/* What becomes floats for an item serves so many: half as many would be converted for twice as often. */
enum { ITEM_QUERIES = ATTN_QUERIES };

#ifdef PAGES_BF16
#define KV_TYPE QUANT_BF16
INLINE vf page_load(const void *p) { return vf_load_bf16(p); }
INLINE vf page_load_n(const void *p, int n) { return vf_load_bf16_n(p, n); }
INLINE void page_store(void *p, vf v) { vf_round_bf16(p, v); }
INLINE void page_store_n(void *p, vf v, int n) { vf_round_bf16_n(p, v, n); }
#else
#define KV_TYPE QUANT_F16
INLINE vf page_load(const void *p) { return vf_load_half(p); }
INLINE vf page_load_n(const void *p, int n) { return vf_load_half_n(p, n); }
INLINE void page_store(void *p, vf v) { vf_store_half(p, vf_hold(v, vf_set1(KV_HALF_MAX))); }
INLINE void page_store_n(void *p, vf v, int n) { vf_store_half_n(p, vf_hold(v, vf_set1(KV_HALF_MAX)), n); }
#endif

INLINE vf bound_load(const void *p) { return page_load(p); }
INLINE vf bound_load_n(const void *p, int n) { return page_load_n(p, n); }

typedef float kv_factor; /* what K and V are multiplied with: queries and weights */

/* A vector from element i on. Codes become floats that have to be multiplied by their scale and code_unit(). */
INLINE vf element_load(enum elements e, const uint16_t *from, int64_t i)
{
	switch (e) {
	case ELEMENTS_FLOAT: return vf_load((const float *)(const void *)from + i);
	case ELEMENTS_INT8: return vf_load_s8((const char *)from + i);
	case ELEMENTS_E4M3: return vf_load_e4m3((const char *)from + i);
	default: return page_load(from + i);
	}
}

/* Its first n lanes, where no more may be read. */
INLINE vf element_load_n(enum elements e, const uint16_t *from, int64_t i, int n)
{
	uint16_t code[LANES / 2] = {0};
	if (e == ELEMENTS_PAGE)
		return page_load_n(from + i, n);
	if (e == ELEMENTS_FLOAT)
		return vf_load_n((const float *)(const void *)from + i, n);
	memcpy(code, (const char *)from + i, (size_t)n);
	return element_load(e, code, 0);
}

/* n elements as floats; n: whole vectors. */
INLINE void elements_to_floats(enum elements e, const uint16_t *from, int64_t n, float *to)
{
	for (int64_t i = 0; i < n; i += LANES)
		vf_store(to + i, element_load(e, from, i));
}

/* Factors between two queries whose rows have n floats' room. */
#define FACTOR_STRIDE(n) ((int64_t)(n))

static void kv_store(const float *k, const float *v, int32_t head_dim, int32_t token, uint16_t *k_page,
                     uint16_t *v_page)
{
	uint16_t *row = v_page + (int64_t)token * head_dim;
	for (int32_t d = 0; d < head_dim; d += LANES) {
		uint16_t column[LANES];
		int n = head_dim - d < LANES ? head_dim - d : LANES;
		page_store(column, vf_load_n(k + d, n));
		for (int i = 0; i < n; i++)
			k_page[(d + i) * KV_PAGE_TOKENS + token] = column[i];
		page_store_n(row + d, vf_load_n(v + d, n), n);
	}
}

/* Queries as the products take them: x * by. */
static void attn_query(const float *x, float by, int32_t n, void *out)
{
	scale(x, by, n, out);
}

/* Weights k * LANES .. of a query, over its scores. */
INLINE void store_weights(float *score, int k, vf w)
{
	vf_store(score + k * LANES, w);
}

/* score[i][0 .. 16 n_pages) = q[i] K for n_queries queries over n_pages pages; both counts are constants. */
INLINE void qk(enum elements e, int n_queries, int n_pages, const kv_factor *q, const uint16_t *const *k,
               int32_t head_dim, float *score, struct fetcher *f)
{
	const int n_vectors = n_pages * PAGE_VECTORS;
	vf sum[QK_QUERIES][4];
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int v = 0; v < n_vectors; v++)
			sum[i][v] = vf_zero();
	for (int32_t d = 0; d < head_dim; d++) {
		vf x[QK_QUERIES];
		fetch(f, 2);
		UNROLL
		for (int i = 0; i < n_queries; i++)
			x[i] = vf_set1(q[i * head_dim + d]);
		UNROLL
		for (int v = 0; v < n_vectors; v++) {
			vf key = element_load(e, k[v / PAGE_VECTORS], d * KV_PAGE_TOKENS + v % PAGE_VECTORS * LANES);
			UNROLL
			for (int i = 0; i < n_queries; i++)
				sum[i][v] = vf_fma(x[i], key, sum[i][v]);
		}
	}
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int v = 0; v < n_vectors; v++)
			vf_store(score + i * ATTN_BLOCK + v * LANES, sum[i][v]);
}

/*
 * acc[i][at ..] += sum over tokens [from, n) of weight[i][t] V[t][at ..], n_vectors vectors wide; `partial`: only the
 * first `partial` lanes.
 */
INLINE void pv(enum elements e, int n_queries, int n_vectors, int partial, const kv_factor *weight,
               const uint16_t *const *v, int from, int n, int32_t head_dim, int32_t at, float *acc, struct fetcher *f)
{
	vf sum[QK_QUERIES][4];
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int k = 0; k < n_vectors; k++) {
			const float *a = acc + i * head_dim + at + k * LANES;
			sum[i][k] = partial ? vf_load_n(a, partial) : vf_load(a);
		}
	for (int t = from; t < n;) {
		const uint16_t *page = v[t / KV_PAGE_TOKENS];
		int64_t row = (int64_t)(t % KV_PAGE_TOKENS) * head_dim + at;
		const int next = t - t % KV_PAGE_TOKENS + KV_PAGE_TOKENS, end = next < n ? next : n;
		for (; t < end; t++, row += head_dim) {
			vf w[QK_QUERIES];
			fetch(f, 2);
			UNROLL
			for (int i = 0; i < n_queries; i++)
				w[i] = vf_set1(weight[i * ATTN_BLOCK + t]);
			UNROLL
			for (int k = 0; k < n_vectors; k++) {
				vf value = partial ? element_load_n(e, page, row, partial)
				                   : element_load(e, page, row + k * LANES);
				UNROLL
				for (int i = 0; i < n_queries; i++)
					sum[i][k] = vf_fma(w[i], value, sum[i][k]);
			}
		}
	}
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int k = 0; k < n_vectors; k++) {
			float *a = acc + i * head_dim + at + k * LANES;
			if (partial)
				vf_store_n(a, sum[i][k], partial);
			else
				vf_store(a, sum[i][k]);
		}
}
