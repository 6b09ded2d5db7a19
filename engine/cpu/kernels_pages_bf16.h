/*
 * Pages of bfloat16s, for processors that multiply pairs of them and add both products to a float (vf_dot_bf16()):
 * twice the products of floats for each instruction, and nothing to convert. Within a page and KV head, K is [head_dim
 * / 2][16 tokens][2 dimensions] (when head_dim is odd, then [16 tokens] of the last one) and V [8 pairs of
 * tokens][head_dim][2 tokens]; queries and weights are rounded to bfloat16 too. Included by kernels_attention.h;
 * kernels_pages_plain.h has the same names.
 */
#pragma once

#include "engine/cpu/kernels_fetch.h"

#define KV_TYPE QUANT_BF16
#define KV_KEYS KV_BY_DIM_PAIRS
#define KV_VALUES KV_BY_TOKEN_PAIRS

enum { ITEM_QUERIES = ATTN_QUERIES / 2 };

INLINE vf bound_load(const void *p) { return vf_load_bf16(p); }
INLINE vf bound_load_n(const void *p, int n) { return vf_load_bf16_n(p, n); }

typedef uint16_t kv_factor; /* what K and V are multiplied with: queries and weights */

/* Factors between two queries whose rows have n floats' room. */
#define FACTOR_STRIDE(n) (2 * (int64_t)(n))

static void kv_store(const float *k, const float *v, int32_t head_dim, int32_t token, uint16_t *k_page,
                     uint16_t *v_page)
{
	uint16_t *v_row = v_page + (int64_t)(token & ~1) * head_dim + (token & 1);
	for (int32_t d = 0; d < head_dim; d += LANES) {
		uint16_t key[LANES], value[LANES];
		int n = head_dim - d < LANES ? head_dim - d : LANES, i = 0;
		vf_store_bf16_n(key, vf_load_n(k + d, n), n);
		vf_store_bf16_n(value, vf_load_n(v + d, n), n);
		for (; i + 1 < n; i += 2)
			memcpy(k_page + (int64_t)(d + i) * KV_PAGE_TOKENS + 2 * token, key + i, 2 * sizeof *key);
		if (i < n)
			k_page[(int64_t)(d + i) * KV_PAGE_TOKENS + token] = key[i];
		/* Element by element: another thread may be writing the other token of the pair. */
		for (i = 0; i < n; i++)
			v_row[2 * (d + i)] = value[i];
	}
}

/* Queries as the products take them: x * by. */
static void attn_query(const float *x, float by, int32_t n, void *out)
{
	for (int32_t d = 0; d < n; d += LANES) {
		int left = n - d < LANES ? n - d : LANES;
		vf_store_bf16_n((uint16_t *)out + d, vf_mul(vf_load_n(x + d, left), vf_set1(by)), left);
	}
}

/* Weights k * LANES .. of a query, over its scores, which are in registers by then. */
INLINE void store_weights(float *score, int k, vf w)
{
	vf_store_bf16_n((uint16_t *)(void *)score + k * LANES, w, LANES);
}

/* score[i][0 .. 16 n_pages) = q[i] K for n_queries queries over n_pages pages; both counts are constants. */
INLINE void qk(enum elements e, int n_queries, int n_pages, const kv_factor *q, const uint16_t *const *k,
               int32_t head_dim, float *score, struct fetcher *f)
{
	vf sum[QK_QUERIES][4];
	(void)e; /* there is one kind */
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int p = 0; p < n_pages; p++)
			sum[i][p] = vf_zero();
	int32_t d = 0;
	for (; d + 1 < head_dim; d += 2) {
		vb key[4];
		fetch(f, 4);
		UNROLL
		for (int p = 0; p < n_pages; p++)
			key[p] = vb_load(k[p] + d * KV_PAGE_TOKENS);
		UNROLL
		for (int i = 0; i < n_queries; i++)
			UNROLL
			for (int p = 0; p < n_pages; p++)
				sum[i][p] = vf_dot_bf16(sum[i][p], key[p], q + i * FACTOR_STRIDE(head_dim) + d);
	}
	UNROLL
	for (int p = 0; p < n_pages && d < head_dim; p++) {
		vb key = vb_load_even(k[p] + d * KV_PAGE_TOKENS);
		UNROLL
		for (int i = 0; i < n_queries; i++) {
			uint16_t last[2] = {q[i * FACTOR_STRIDE(head_dim) + d], 0};
			sum[i][p] = vf_dot_bf16(sum[i][p], key, last);
		}
	}
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int p = 0; p < n_pages; p++)
			vf_store(score + i * ATTN_BLOCK + p * LANES, sum[i][p]);
}

/*
 * acc[i][at ..] += sum over tokens [from, n) of weight[i][t] V[t][at ..], n_vectors vectors wide; `partial`: only the
 * first `partial` lanes.
 */
INLINE void pv(enum elements e, int n_queries, int n_vectors, int partial, const kv_factor *weight,
               const uint16_t *const *v, int from, int n, int32_t head_dim, int32_t at, float *acc, struct fetcher *f)
{
	vf sum[QK_QUERIES][4];
	(void)e;
	UNROLL
	for (int i = 0; i < n_queries; i++)
		UNROLL
		for (int k = 0; k < n_vectors; k++) {
			const float *a = acc + i * head_dim + at + k * LANES;
			sum[i][k] = partial ? vf_load_n(a, partial) : vf_load(a);
		}
	for (int t = from & ~1; t < n; t += 2) {
		const uint16_t *pairs = v[t / KV_PAGE_TOKENS] + (int64_t)(t % KV_PAGE_TOKENS) * head_dim + 2 * at;
		vb value[4];
		fetch(f, 4);
		UNROLL
		for (int k = 0; k < n_vectors; k++)
			value[k] = partial ? vb_load_n(pairs, partial) : vb_load(pairs + 2 * k * LANES);
		if (t + 1 == n) /* the pair's other token is not there, and what stands in its place may be no number */
			UNROLL
			for (int k = 0; k < n_vectors; k++)
				value[k] = vb_evens(value[k]);
		if (t < from)
			UNROLL
			for (int k = 0; k < n_vectors; k++)
				value[k] = vb_odds(value[k]);
		UNROLL
		for (int i = 0; i < n_queries; i++)
			UNROLL
			for (int k = 0; k < n_vectors; k++)
				sum[i][k] =
					vf_dot_bf16(sum[i][k], value[k], weight + i * FACTOR_STRIDE(ATTN_BLOCK) + t);
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
