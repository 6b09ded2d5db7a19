/*
 * What a warp's queries keep while attention passes over the pages that they see (attention.cuh): the largest score,
 * the sum of weights, the weighted values; and, where they are asked, what they gave to each page.
 */
#pragma once

#include "cuda/block.cuh"
#include "cuda/kv_operand.cuh"

namespace GPU_NS
{

static constexpr float NO_SCORE = -1e30f;
enum {
	SPLIT_PAGES = SPLIT_TOKENS / PAGE_TOKENS,
	PART_WARPS = 4,
	WHOLE_WARPS = 8,
	WHOLE_STAGES = 3
};

/* What params say, as kernels use it: in powers of two, and no window is one that nothing leaves. */
struct bounds {
	float cap;   /* 0: none */
	float steep; /* 2 / cap, for scores that are not in powers of two */
	int window;
};

__device__ __forceinline__ struct bounds bounds_of(const struct attention_params &p)
{
	return {p.softcap * LOG2_E, p.softcap > 0 ? __fdiv_rn(2.0f, p.softcap) : 0.0f,
	        p.window > 0 ? p.window : INT32_MAX};
}

/* cap * tanh(score / cap), by tanh x = 1 - 2 / (1 + e^2x): tanhf() takes registers that there are not. */
__device__ __forceinline__ float softcapped(float score, const struct bounds &to)
{
	return to.cap - __fdividef(2.0f * to.cap, 1.0f + exp2f(score * to.steep));
}

/* The first position that a row at `position` sees. */
__device__ __forceinline__ int first_seen(int position, const struct attention_params &p)
{
	return p.window > 0 ? max(position + 1 - p.window, 0) : 0;
}

/*
 * Of rows of one chunk, how they meet the keys of a page (enum rope_chunk). first_position: of one of the rows.
 */
__device__ __forceinline__ int keys_of_page(int page, int first_position, int chunk_pages)
{
	const int apart = first_position / PAGE_TOKENS / chunk_pages - page / chunk_pages;
	return min(apart, static_cast<int>(ROPE_CHUNKS_FAR));
}

/* 2^n for an integer n <= 0. */
__device__ __forceinline__ float power_of_two(float n)
{
	return n < -126.0f ? 0.0f : __int_as_float((static_cast<int>(n) + 127) << 23);
}

/* ---- What rows gave to pages ---- */

/* Of a page that was weighed last: of queries 2t and 2t + 1 of eights, this lane's tokens only. */
template <int n8> struct page_weights {
	float sum[n8][2], product[n8][2], largest[n8][2];
};

/*
 * A page's share of a row's weights, in units of 2^-KV_MASS_BITS; none where it is no number. top, l: the row's largest
 * score and sum.
 */
__device__ __forceinline__ uint32_t share_of(const struct page_weight &w, float top, float l)
{
	const float share = __fdiv_rn(w.sum * power_of_two(w.max - top), l);
	return share > 0 ? static_cast<uint32_t>(__float2int_rn(share * (1 << KV_MASS_BITS))) : 0;
}

/*
 * Of the splits so far, relative to the row's largest score: weights times their logarithms, and the largest. Additions
 * are in one order, by pages and then by splits, in whichever kernel.
 */
struct look_of_splits {
	float product, largest;
};

__device__ __forceinline__ void add_splits(struct look_of_splits &to, const struct look_of_splits &more)
{
	to.product = __fadd_rn(to.product, more.product);
	to.largest = fmaxf(to.largest, more.largest);
}

/*
 * Pages from `page` to the end of the split, of those that the row sees. weights: of `page`; those of the next ones
 * follow, so far apart.
 */
__device__ __forceinline__ struct look_of_splits look_at_split(int page, int first_page, int last_page, float top,
							       const struct page_weight *weights, int apart)
{
	struct look_of_splits look = {0, 0};
	for (int i = max(page, first_page); i <= min(page + SPLIT_PAGES - 1, last_page); i++) {
		const struct page_weight w = ld_global<struct page_weight>(weights + (i - page) * apart);
		const float factor = power_of_two(w.max - top);
		if (factor > 0)
			add_splits(look, {factor * __fmaf_rn(w.sum, w.max - top, w.product), factor * w.largest});
	}
	return look;
}

/* See struct attention_look. */
__device__ __forceinline__ void add_look(struct look_sums *to, const struct look_of_splits &look, float l)
{
	const float entropy = (log2f(l) - __fdiv_rn(look.product, l)) * 0.69314718f,
		    largest = __fdiv_rn(look.largest, l);
	atomicAdd(&to->n, 1ull);
	if (entropy > 0)
		atomicAdd(&to->entropy,
			  static_cast<unsigned long long>(static_cast<double>(entropy) * (1 << KV_MASS_BITS) + 0.5));
	if (largest > 0)
		atomicAdd(&to->largest,
			  static_cast<unsigned long long>(static_cast<double>(largest) * (1 << KV_MASS_BITS) + 0.5));
}

/* Largest score, sum of weights and weighted sum of values before the first key. */
template <int blocks, int n8>
__device__ __forceinline__ void nothing_seen(float (&m)[n8][2], float (&l)[n8][2], float (&o)[blocks][n8][4])
{
#pragma unroll
	for (int k = 0; k < n8; k++) {
#pragma unroll
		for (int c = 0; c < 2; c++) {
			m[k][c] = NO_SCORE;
			l[k][c] = 0;
		}
#pragma unroll
		for (int b = 0; b < blocks; b++)
#pragma unroll
			for (int c = 0; c < 4; c++)
				o[b][k][c] = 0;
	}
}

/* Up to 8 * n8 queries of one KV head, and what a split has given them so far. */
template <int dim, int n8> struct queries {
	uint32_t q[n8][dim / 32][4]; /* right operand: query g, elements 8t .. 8t + 7 of a block of 32 */
	int position[n8][2];	     /* of queries 2t and 2t + 1; -1: there is none */
	float m[n8][2], l[n8][2];    /* likewise; l has this lane's tokens only until reduce() */
	float o[dim / 16][n8][4];    /* element g or g + 8 of queries 2t, 2t + 1 */

	/* Query i of the warp is head i % group of row i / group. n: how many there are. */
	__device__ __forceinline__ void load(const float *from, int n_head, int head_dim, int first_head, int group,
					     int first_row, int first_position, int first, int n, float scale, int lane)
	{
		const int g = lane / 4, t = lane % 4;
#pragma unroll
		for (int k = 0; k < n8; k++) {
			const int i = first + 8 * k + g;
			const float *x =
				from + (static_cast<size_t>(first_row + i / group) * n_head + first_head + i % group) *
					       head_dim;
#pragma unroll
			for (int b = 0; b < dim / 32; b++) {
				float4 lo = {0, 0, 0, 0}, hi = {0, 0, 0, 0};
				const int d = 32 * b + 8 * t;
				if (i < n && d < head_dim) {
					lo = ldg<float4>(x + d);
					hi = ldg<float4>(x + d + 4);
				}
				q[k][b][0] = as_u32(__floats2half2_rn(lo.x * scale, lo.y * scale));
				q[k][b][1] = as_u32(__floats2half2_rn(lo.z * scale, lo.w * scale));
				q[k][b][2] = as_u32(__floats2half2_rn(hi.x * scale, hi.y * scale));
				q[k][b][3] = as_u32(__floats2half2_rn(hi.z * scale, hi.w * scale));
			}
#pragma unroll
			for (int c = 0; c < 2; c++) {
				const int column = first + 8 * k + 2 * t + c;
				position[k][c] = column < n ? first_position + column / group : -1;
			}
		}
		clear();
	}

	/* Goes over to the queries that keys of a kind meet: struct attention_args.turned. The rest stays. */
	__device__ __forceinline__ void meet(const struct attention_args &a, int keys, int head_dim, int first_head,
					     int group, int first_row, int first, int n, int lane)
	{
		const int g = lane / 4, t = lane % 4;
#pragma unroll
		for (int k = 0; k < n8; k++) {
			const int i = first + 8 * k + g;
			const size_t row = first_row + i / group;
			const __half *x = a.turned + ((row * CHUNK_KINDS + keys) * a.n_head + first_head + i % group) *
							     head_dim;
#pragma unroll
			for (int b = 0; b < dim / 32; b++) {
				const int d = 32 * b + 8 * t;
				uint4 v = {0, 0, 0, 0};
				if (i < n && d < head_dim)
					v = ldg<uint4>(x + d);
				q[k][b][0] = v.x;
				q[k][b][1] = v.y;
				q[k][b][2] = v.z;
				q[k][b][3] = v.w;
			}
		}
	}

	__device__ __forceinline__ void clear()
	{
		nothing_seen(m, l, o);
	}

	/*
	 * Weights of a page's tokens: s[k][c] for token g (c < 2) or g + 8 and query 2t + c % 2 becomes the right
	 * operand of P V. scaled: weights are multiplied by rest[0] of token g, rest[1] of g + 8. more: `told` gets what
	 * they were, and logits are raised by plus[0] of token g, plus[1] of g + 8.
	 */
	template <bool scaled, bool more>
	__device__ __forceinline__ void weigh(float (&s)[n8][4], int first_token, int lane, const struct bounds &to,
					      uint32_t (&p)[n8][2], const float (&rest)[2],
					      const float (&plus)[2], struct page_weights<n8> &told)
	{
		const int g = lane / 4, t = lane % 4;
		float factor[n8][2];
		bool changed = false;
#pragma unroll
		for (int k = 0; k < n8; k++)
#pragma unroll
			for (int c = 0; c < 2; c++) {
				if (to.cap > 0) {
					s[k][c] = softcapped(s[k][c], to);
					s[k][c + 2] = softcapped(s[k][c + 2], to);
				}
				if constexpr (more) {
					s[k][c] += plus[0];
					s[k][c + 2] += plus[1];
				}
				/* How far before the query the token stands. */
				const int back = position[k][c] - first_token - g;
				if (back < 0 || back >= to.window)
					s[k][c] = -INFINITY;
				if (back < 8 || back - 8 >= to.window)
					s[k][c + 2] = -INFINITY;
				float top = fmaxf(s[k][c], s[k][c + 2]);
				top = fmaxf(top, __shfl_xor_sync(ALL, top, 4));
				top = fmaxf(top, __shfl_xor_sync(ALL, top, 8));
				top = fmaxf(top, __shfl_xor_sync(ALL, top, 16));
				const float next = fmaxf(m[k][c], ceilf(top));
				factor[k][c] = power_of_two(m[k][c] - next);
				changed = changed || next != m[k][c];
				m[k][c] = next;
			}
		if (__any_sync(ALL, changed)) {
#pragma unroll
			for (int k = 0; k < n8; k++) {
#pragma unroll
				for (int c = 0; c < 2; c++)
					l[k][c] *= factor[k][c];
#pragma unroll
				for (int b = 0; b < dim / 16; b++)
#pragma unroll
					for (int c = 0; c < 4; c++)
						o[b][k][c] *= factor[k][c % 2];
			}
		}
#pragma unroll
		for (int k = 0; k < n8; k++) {
#pragma unroll
			for (int c = 0; c < 4; c++) {
				const bool unseen = s[k][c] == -INFINITY;
				const float below = s[k][c] - m[k][c % 2];
				s[k][c] = exp2f(below);
				l[k][c % 2] += s[k][c];
				if constexpr (more) {
					const float product = s[k][c] > 0 ? __fmul_rn(s[k][c], below) : 0.0f;
					told.sum[k][c % 2] = c < 2 ? s[k][c] : told.sum[k][c % 2] + s[k][c];
					told.product[k][c % 2] =
						c < 2 ? product : __fadd_rn(told.product[k][c % 2], product);
					told.largest[k][c % 2] =
						c < 2 ? s[k][c] : fmaxf(told.largest[k][c % 2], s[k][c]);
				}
				if (scaled) /* the rest may be no number */
					s[k][c] = unseen ? 0.0f : s[k][c] * rest[c / 2];
			}
			/* From [token g][queries 2t, 2t + 1] to [tokens 2t, 2t + 1][query g]. */
			const int from = 8 * t + g / 2;
			const unsigned pick = g % 2 ? 0x7632 : 0x5410;
#pragma unroll
			for (int h = 0; h < 2; h++) {
				const uint32_t pair = as_u32(__floats2half2_rn(s[k][2 * h], s[k][2 * h + 1]));
				const uint32_t even = __shfl_sync(ALL, pair, from),
					       odd = __shfl_sync(ALL, pair, from + 4);
				p[k][h] = __byte_perm(even, odd, pick);
			}
		}
	}

	/*
	 * Writes what the page that was weighed last has got; to(i) says where query i's goes. Queries are from `first`
	 * to before n.
	 */
	template <typename To>
	__device__ __forceinline__ void tell(struct page_weights<n8> &told, int first, int n, int lane,
					     const To &to) const
	{
#pragma unroll
		for (int k = 0; k < n8; k++)
#pragma unroll
			for (int c = 0; c < 2; c++) {
				float sum = told.sum[k][c], product = told.product[k][c], largest = told.largest[k][c];
				for (int apart = 4; apart < 32; apart *= 2) {
					sum += __shfl_xor_sync(ALL, sum, apart);
					product += __shfl_xor_sync(ALL, product, apart);
					largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, apart));
				}
				const int i = first + 8 * k + lane % 4 * 2 + c;
				if (lane < 4 && i < n)
					stg<struct page_weight>(to(i), {sum, product, largest, m[k][c]});
			}
	}

	/* Narrow keys have scales: of tokens g and g + 8. */
	__device__ __forceinline__ void scale_scores(float (&s)[n8][4], float scale, float scale8) const
	{
#pragma unroll
		for (int k = 0; k < n8; k++)
#pragma unroll
			for (int c = 0; c < 4; c++)
				s[k][c] *= c < 2 ? scale : scale8;
	}

	/* key(b) gives block b. */
	template <typename Key> __device__ __forceinline__ void scores(float (&s)[n8][4], const Key &key) const
	{
#pragma unroll
		for (int k = 0; k < n8; k++)
#pragma unroll
			for (int c = 0; c < 4; c++)
				s[k][c] = 0;
#pragma unroll
		for (int b = 0; b < dim / 32; b++) {
			const struct key_block block = key(b);
			const uint4 x = block.token[0], y = block.token[1];
			const uint32_t a[2][4] = {{x.x, y.x, x.y, y.y}, {x.z, y.z, x.w, y.w}};
#pragma unroll
			for (int i = 0; i < 2; i++)
#pragma unroll
				for (int k = 0; k < n8; k++) {
					const uint32_t right[2] = {q[k][b][2 * i], q[k][b][2 * i + 1]};
					mma_f16(s[k], a[i], right);
				}
		}
	}

	/*
	 * Block b when not all of it are numbers, which a weight of zero would not hide: each position's queries by
	 * themselves, with the values that they see.
	 */
	__device__ __forceinline__ void add_odd_values(int b, const uint32_t (&p)[n8][2], int first_token, int first,
						       int last, int lane, const uint4 &v)
	{
		for (int row = max(first, first_token); row <= last; row++) {
			const uint4 seen = hide_later(v, first_token, row, lane);
			const uint32_t a[4] = {seen.x, seen.y, seen.z, seen.w};
#pragma unroll
			for (int k = 0; k < n8; k++) {
				float sum[4] = {o[b][k][0], o[b][k][1], o[b][k][2], o[b][k][3]};
				mma_f16(sum, a, p[k]);
#pragma unroll
				for (int c = 0; c < 4; c++)
					if (position[k][c % 2] == row)
						o[b][k][c] = sum[c];
			}
		}
	}

	/*
	 * value(b) gives block b of a page's values, whose tokens after `last` do not count; may_be_odd: not all may be
	 * numbers. first: the first position of a query.
	 */
	template <bool may_be_odd, typename Value>
	__device__ __forceinline__ void add_values(const uint32_t (&p)[n8][2], int first_token, int first, int last,
						   int lane, const Value &value)
	{
		const bool hide = first_token + PAGE_TOKENS - 1 > last;
		const bool some_see_less = may_be_odd && first < last && first_token + PAGE_TOKENS - 1 > first;
#pragma unroll
		for (int b = 0; b < dim / 16; b++) {
			uint4 v = value(b);
			if (hide)
				v = hide_later(v, first_token, last, lane);
			if (some_see_less &&
			    __any_sync(ALL, odd_pair(v.x) || odd_pair(v.y) || odd_pair(v.z) || odd_pair(v.w))) {
				add_odd_values(b, p, first_token, first, last, lane, v);
				continue;
			}
			const uint32_t a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
			for (int k = 0; k < n8; k++)
				mma_f16(o[b][k], a, p[k]);
		}
	}

	/* Makes l whole at the end of a split. */
	__device__ __forceinline__ void reduce()
	{
#pragma unroll
		for (int k = 0; k < n8; k++)
#pragma unroll
			for (int c = 0; c < 2; c++) {
				l[k][c] += __shfl_xor_sync(ALL, l[k][c], 4);
				l[k][c] += __shfl_xor_sync(ALL, l[k][c], 8);
				l[k][c] += __shfl_xor_sync(ALL, l[k][c], 16);
			}
	}
};

} // namespace GPU_NS
