/*
 * Attention kernels over the primitives of one instruction set: included by avx2.c and its like.
 *
 * How K and V stand in a page, and the products with them, are in kernels_pages_plain.h or, where the processor
 * multiplies bfloat16s, kernels_pages_bf16.h. Scores of 16 tokens stand in the lanes of a vector and add up over
 * head_dim without a horizontal sum; the weighted sum of V has dimensions in its lanes. Softmax is computed in one pass
 * over blocks of ATTN_BLOCK positions with a running maximum (Milakov and Gimelshein, "Online normalizer calculation
 * for softmax", 2018), in powers of two: q comes multiplied by log2(e).
 *
 * Several queries that share the KV head go through the same loads, each with its own sums in the same order as it
 * would have alone, so a row's result does not depend on the rows beside it.
 */
#pragma once

#include "engine/cpu/kernels_rows.h"

#ifdef __AVX512BF16__
#include "engine/cpu/kernels_pages_bf16.h"
#else
#include "engine/cpu/kernels_pages_plain.h"
#endif

enum {
	QK_PAGES = 4 / PAGE_VECTORS, /* pages whose scores are computed together: four vectors a query */
	BOUND_HEADS = 4,             /* queries whose bounds are */
};

/* A block of positions: where its pages' K and V of one head are, and what to fetch meanwhile. */
struct block {
	const uint16_t *k[BLOCK_PAGES], *v[BLOCK_PAGES];
	const float *k_scale, *v_scale; /* [ATTN_BLOCK] of each position's K and V; NULL: all are 1 */
	const struct unpacker *unpacker; /* kernels_narrow.h: K and V are codes */
	struct block_weights *weights;   /* of the first query, j->n_blocks before that of the next; NULL: not wanted */
	const float *plus;		 /* [ATTN_BLOCK] see struct attn_job; NULL: nothing */
	struct fetcher fetch;
};

/* Queries i .. of a job over positions [from, end) of a block. */
typedef void attend_fn(const struct attn_job *j, int i, int from, int end, struct block *b);

/*
 * Scores of positions [from, n), times k_scale, soft-capped where there is a cap, plus what is to be added, become
 * weights relative to the new maximum, times v_scale, in their place, and what lies beside them zeros; what was summed
 * before is scaled to that maximum. Scales of other positions may be anything. floats: weights stay floats, not what
 * products take. weights: where their sums go, or NULL.
 */
INLINE void softmax_of(float *score, int from, int n, const float *k_scale, const float *v_scale, float cap,
		       const float *plus, bool floats, float *max, float *sum, float *acc, int32_t head_dim,
		       struct block_weights *weights)
{
	enum { N = ATTN_BLOCK / LANES };
	const vf lowest = vf_set1(-INFINITY), to_exponent = vf_set1(0x1.715476p+1f / (cap > 0 ? cap : 1));
	vf s[N], top = lowest, total = vf_zero();
	for (int k = 0; k < N; k++) {
		int left = n - k * LANES, before = from - k * LANES;
		s[k] = lowest;
		if (left > 0 && before < LANES) {
			s[k] = vf_load(score + k * LANES);
			s[k] = k_scale ? vf_mul(s[k], vf_load(k_scale + k * LANES)) : s[k];
			s[k] = cap > 0 ? softcapped(s[k], vf_set1(cap), to_exponent) : s[k];
			s[k] = plus ? vf_fma(vf_load(plus + k * LANES), vf_set1(0x1.715476p+0f), s[k]) : s[k];
			s[k] = left < LANES ? vf_first(s[k], lowest, left) : s[k];
			s[k] = before > 0 ? vf_first(lowest, s[k], before) : s[k];
		}
		top = vf_max(top, s[k]);
	}
	float new_max = vf_hmax(top);
	new_max = new_max > *max ? new_max : *max;
	for (int k = 0; k < N; k++) {
		vf w = exp2_vf(vf_sub(s[k], vf_set1(new_max)));
		int left = n - k * LANES, before = from - k * LANES;
		total = vf_add(total, w);
		if (weights) {
			weights->page[k * LANES / KV_PAGE_TOKENS] += vf_hsum(w);
			/* Of what is not seen the weight is none and its logarithm no number. */
			weights->product += vf_hsum(vf_mul(w, vf_max(vf_set1(-1000), vf_sub(s[k], vf_set1(new_max)))));
		}
		if (v_scale && left > 0)
			w = vf_mul(w,
			           left < LANES ? vf_load_n(v_scale + k * LANES, left) : vf_load(v_scale + k * LANES));
		if (v_scale && before > 0)
			w = vf_first(vf_zero(), w, before < LANES ? before : LANES);
		if (floats)
			vf_store(score + k * LANES, w);
		else
			store_weights(score, k, w);
	}
	if (new_max != *max) {
		float factor[LANES];
		vf_store(factor, exp2_vf(vf_set1(*max - new_max)));
		*max = new_max;
		*sum *= factor[0];
		scale(acc, factor[0], head_dim, acc);
	}
	*sum += vf_hsum(total);
	if (weights)
		weights->max = new_max;
}

static void softmax_block(float *score, int from, int n, const float *k_scale, const float *v_scale, float cap,
			  const float *plus, float *max, float *sum, float *acc, int32_t head_dim,
			  struct block_weights *weights)
{
	if (plus)
		softmax_of(score, from, n, k_scale, v_scale, cap, plus, false, max, sum, acc, head_dim, weights);
	else if (weights)
		softmax_of(score, from, n, k_scale, v_scale, cap, NULL, false, max, sum, acc, head_dim, weights);
	else if (cap > 0)
		softmax_of(score, from, n, k_scale, v_scale, cap, NULL, false, max, sum, acc, head_dim, NULL);
	else if (from > 0 || n < ATTN_BLOCK || k_scale || v_scale)
		softmax_of(score, from, n, k_scale, v_scale, 0, NULL, false, max, sum, acc, head_dim, NULL);
	else /* most of them */
		softmax_of(score, 0, ATTN_BLOCK, NULL, NULL, 0, NULL, false, max, sum, acc, head_dim, NULL);
}

/* Where the weights of a query in a block go, or NULL. */
INLINE struct block_weights *weights_of(const struct attn_job *j, const struct block *b, int query)
{
	return b->weights ? b->weights + (int64_t)query * j->n_blocks : NULL;
}

/* Queries i .. i + n_queries over positions [from, n) of a block. */
INLINE void attend_block(const struct attn_job *j, enum elements e, int n_queries, int i, int from, int n,
                         struct block *b)
{
	int32_t dim = j->head_dim, at = 0;
	const kv_factor *q = (const kv_factor *)j->q + i * FACTOR_STRIDE(dim);
	float *score = j->score + (int64_t)i * ATTN_BLOCK, *acc = j->acc + (int64_t)i * dim;
	const kv_factor *weight = (const kv_factor *)(const void *)score;
	int n_pages = (n + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, page = from / KV_PAGE_TOKENS;
	struct fetcher f = b->fetch; /* kept in registers */
	for (; page + QK_PAGES <= n_pages; page += QK_PAGES)
		qk(e, n_queries, QK_PAGES, q, b->k + page, dim, score + page * KV_PAGE_TOKENS, &f);
	for (; page < n_pages; page++)
		qk(e, n_queries, 1, q, b->k + page, dim, score + page * KV_PAGE_TOKENS, &f);
	for (int m = 0; m < n_queries; m++)
		softmax_block(score + m * ATTN_BLOCK, from, n, b->k_scale, b->v_scale, j->softcap, b->plus,
			      j->max + i + m, j->sum + i + m, acc + (int64_t)m * dim, dim, weights_of(j, b, i + m));
	for (; at + 4 * LANES <= dim; at += 4 * LANES)
		pv(e, n_queries, 4, 0, weight, b->v, from, n, dim, at, acc, &f);
	for (; at + LANES <= dim; at += LANES)
		pv(e, n_queries, 1, 0, weight, b->v, from, n, dim, at, acc, &f);
	if (at < dim)
		pv(e, n_queries, 1, dim - at, weight, b->v, from, n, dim, at, acc, &f);
	b->fetch = f;
}

/* attend_NAME: a table of what takes n queries, over elements E. */
#define ATTEND(name, e, n)                                                                                             \
	static void attend_##name##_##n(const struct attn_job *j, int i, int from, int end, struct block *b)           \
	{                                                                                                              \
		attend_block(j, e, n, i, from, end, b);                                                                \
	}
#if QK_QUERIES > 3
#define ATTEND_TABLE(name, e)                                                                                          \
	ATTEND(name, e, 1)                                                                                             \
	ATTEND(name, e, 2)                                                                                             \
	ATTEND(name, e, 3)                                                                                             \
	ATTEND(name, e, 4)                                                                                             \
	ATTEND(name, e, 5)                                                                                             \
	ATTEND(name, e, 6)                                                                                             \
	static attend_fn *const attend_##name[] = {                                                                    \
		NULL, attend_##name##_1, attend_##name##_2, attend_##name##_3, attend_##name##_4, attend_##name##_5,   \
		attend_##name##_6};
#else
#define ATTEND_TABLE(name, e)                                                                                          \
	ATTEND(name, e, 1)                                                                                             \
	ATTEND(name, e, 2)                                                                                             \
	ATTEND(name, e, 3)                                                                                             \
	static attend_fn *const attend_##name[] = {NULL, attend_##name##_1, attend_##name##_2, attend_##name##_3};
#endif
ATTEND_TABLE(page, ELEMENTS_PAGE)

#ifdef __AVX512BF16__
#define attend_unpacked attend_page
typedef uint16_t unpacked;

static bool are_unpacked(const struct attn_job *j)
{
	(void)j;
	return false;
}
#else
/*
 * Of more queries than these, several groups go through the same elements, which become floats once for all of them.
 * What is computed with them is the same.
 */
enum { UNPACK_ABOVE = 2 * QK_QUERIES };
ATTEND_TABLE(unpacked, ELEMENTS_FLOAT)
typedef float unpacked;

static bool are_unpacked(const struct attn_job *j)
{
	return j->n_queries > UNPACK_ABOVE;
}
#endif

/* Room for a page's K and V of a head, which they come to when they are unpacked. */
INLINE unpacked *unpacked_page(const struct attn_job *j, int page)
{
	return (unpacked *)j->unpacked + (int64_t)page * 2 * j->head_dim * KV_PAGE_TOKENS;
}

/* A page's K and V, which are at `from`. */
INLINE const uint16_t *unpack_elements(const struct attn_job *j, const uint16_t *from, int page)
{
#ifdef __AVX512BF16__
	(void)j, (void)page;
	return from;
#else
	float *to = unpacked_page(j, page);
	elements_to_floats(ELEMENTS_PAGE, from, 2 * (int64_t)j->head_dim * KV_PAGE_TOKENS, to);
	return (const uint16_t *)(const void *)to;
#endif
}

/* What unpacked V is behind unpacked K, counted in shorts. */
INLINE int64_t unpacked_size(const struct attn_job *j)
{
	return (int64_t)j->head_dim * KV_PAGE_TOKENS * (int64_t)(sizeof(unpacked) / sizeof(uint16_t));
}

/*
 * The first head's K in the block's pages from position `at`, those that hold positions below `end`; how many there
 * are. Those before all windows, which are not read, may be gone: the first one behind stands in their places.
 */
static int find_pages(const struct attn_job *j, int32_t at, int32_t end, const uint16_t **k)
{
	int n = at < end ? (end - at + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS : 0;
	n = n < BLOCK_PAGES ? n : BLOCK_PAGES;
	int32_t seen = j->first[0] / KV_PAGE_TOKENS;
	for (int p = 0; p < n; p++) {
		int32_t page = at / KV_PAGE_TOKENS + p;
		page = page < seen ? seen : page;
		k[p] = (const uint16_t *)(const void *)(j->kv +
		                                        (size_t)j->block_table[page - j->first_page] * j->page_stride);
	}
	return n;
}

/* The pages of a block that have positions [from, end) of it: a bit for each. */
INLINE uint32_t pages_in(int32_t from, int32_t end)
{
	return (UINT32_C(1) << (end + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS) - (UINT32_C(1) << from / KV_PAGE_TOKENS);
}

/*
 * Queries of head `head` over the block at position `at`: those that see any of its `wide` pages (a bit for each), or
 * those that see none. attend[n] takes n of them, up to QK_QUERIES or all there are.
 */
static void attend_head(const struct attn_job *j, int head, int32_t at, struct block *b, attend_fn *const *attend,
                        uint32_t wide, bool see_wide)
{
	int i = 0;
	b->weights = j->weights ? j->weights + at / ATTN_BLOCK - j->first_block : NULL;
	while (i < j->n_queries && j->limit[i] <= at)
		i++;
	/*
	 * Neighbours that see equally much of this block go together; those whose windows begin behind it come last,
	 * and see nothing.
	 */
	while (i < j->n_queries && j->first[i] < at + ATTN_BLOCK) {
		int from = j->first[i] > at ? j->first[i] - at : 0,
		    end = j->limit[i] - at < ATTN_BLOCK ? j->limit[i] - at : ATTN_BLOCK;
		int n = 1;
		while (n < QK_QUERIES && i + n < j->n_queries &&
		       (j->limit[i + n] == j->limit[i] || end == ATTN_BLOCK) &&
		       (j->first[i + n] == j->first[i] || j->first[i + n] <= at))
			n++;
		if (((wide & pages_in(from, end)) != 0) == see_wide)
			attend[n](j, head * j->n_queries + i, from, end, b);
		i += n;
	}
}

static void attn_run(const struct attn_job *j)
{
	const int64_t k_size = (int64_t)j->head_dim * KV_PAGE_TOKENS;
	const bool unpack = are_unpacked(j);
	struct block b = {0};
	struct fetcher *f = &b.fetch;
	int n_pages = find_pages(j, j->from, j->to, f->pages);
	f->page_lines = j->n_heads * j->head_dim; /* K and V of a head are head_dim lines in a row */
	for (int32_t at = j->from; at < j->to; at += ATTN_BLOCK) {
		const uint16_t *base[BLOCK_PAGES];
		memcpy(base, f->pages, sizeof base);
		f->n_pages = find_pages(j, at + ATTN_BLOCK, j->end, f->pages);
		f->page = 0;
		f->left = f->page_lines;
		f->line = f->n_pages ? (const char *)f->pages[0] : NULL;
		b.plus = at < j->n_plus ? j->plus + at : NULL;
		for (int head = 0; head < j->n_heads; head++) {
			for (int p = 0; p < n_pages; p++) {
				b.k[p] = base[p] + 2 * head * k_size;
				b.v[p] = b.k[p] + k_size;
				if (unpack) {
					b.k[p] = unpack_elements(j, b.k[p], p);
					b.v[p] = b.k[p] + unpacked_size(j);
				}
			}
			attend_head(j, head, at, &b, unpack ? attend_unpacked : attend_page, 0, false);
		}
		n_pages = f->n_pages;
	}
}

/*
 * The largest bound of a page for n_heads queries, a constant, or no number. Dimensions are in the lanes: the one sum
 * here whose terms stand beside each other, and one of a page whatever the other pages are. A bound that is no number
 * makes the sum none, whatever it is multiplied with.
 */
INLINE float bound_of(int n_heads, const float *plus, const float *minus, const uint16_t *least,
                      const uint16_t *greatest, int32_t dim, float bound)
{
	vf low[BOUND_HEADS], high[BOUND_HEADS];
	int32_t d = 0;
	UNROLL
	for (int h = 0; h < n_heads; h++)
		low[h] = high[h] = vf_zero();
	for (; d + LANES <= dim; d += LANES) {
		vf from = bound_load(least + d), to = bound_load(greatest + d);
		UNROLL
		for (int h = 0; h < n_heads; h++) {
			low[h] = vf_fma(vf_load(minus + h * dim + d), from, low[h]);
			high[h] = vf_fma(vf_load(plus + h * dim + d), to, high[h]);
		}
	}
	if (d < dim) {
		vf from = bound_load_n(least + d, dim - d), to = bound_load_n(greatest + d, dim - d);
		UNROLL
		for (int h = 0; h < n_heads; h++) {
			low[h] = vf_fma(vf_load_n(minus + h * dim + d, dim - d), from, low[h]);
			high[h] = vf_fma(vf_load_n(plus + h * dim + d, dim - d), to, high[h]);
		}
	}
	UNROLL
	for (int h = 0; h < n_heads; h++) {
		float sum = vf_hsum(vf_add(low[h], high[h]));
		bound = sum > bound || sum != sum ? sum : bound;
	}
	return bound;
}

static void attn_bound(const struct bound_job *j)
{
	enum { AHEAD = 6, LINE = 64 / sizeof(uint16_t) };
	const int32_t dim = j->head_dim;
	const uint16_t *all = (const uint16_t *)(const void *)j->bounds;
	for (int32_t i = 0; i < j->n; i++) {
		const uint16_t *least = all + (int64_t)j->pages[i] * 2 * dim, *greatest = least + dim;
		const uint16_t *next = all + (int64_t)j->pages[i + AHEAD < j->n ? i + AHEAD : i] * 2 * dim;
		float bound = -INFINITY;
		for (int32_t at = 0; at < 2 * dim; at += LINE)
			__builtin_prefetch(next + at);
		for (int h = 0; h < j->n_heads; h += BOUND_HEADS) {
			const float *plus = j->plus + h * dim, *minus = j->minus + h * dim;
			switch (j->n_heads - h) {
			case 1: bound = bound_of(1, plus, minus, least, greatest, dim, bound); break;
			case 2: bound = bound_of(2, plus, minus, least, greatest, dim, bound); break;
			case 3: bound = bound_of(3, plus, minus, least, greatest, dim, bound); break;
			default: bound = bound_of(BOUND_HEADS, plus, minus, least, greatest, dim, bound);
			}
		}
		j->bound[i] = bound;
	}
}

static void attn_fold(float *max, float *sum, float *acc, float max2, float sum2, const float *acc2, int32_t head_dim)
{
	float top = *max > max2 ? *max : max2, a[LANES], b[LANES];
	vf_store(a, exp2_vf(vf_set1(*max - top)));
	vf_store(b, exp2_vf(vf_set1(max2 - top)));
	*max = top;
	*sum = *sum * a[0] + sum2 * b[0];
	for (int32_t d = 0; d < head_dim; d++)
		acc[d] = acc[d] * a[0] + acc2[d] * b[0];
}

static void attn_finish(const float *acc, float sum, int32_t head_dim, float *out)
{
	scale(acc, 1 / sum, head_dim, out);
}
