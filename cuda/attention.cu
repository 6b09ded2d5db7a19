/*
 * Causal attention over paged keys and values, on the tensor cores, for any mix of decode rows and prompt chunks.
 *
 * What a row gets does not depend on how its prompt was cut into chunks nor on the rows beside it. Keys are taken in
 * splits of 128 tokens. A split runs a page of 16 tokens at a time with a running maximum, and results (largest score
 * m, sum of weights l, weighted values o) are merged from the first split to the last. Scores are in base 2 and every
 * maximum is rounded up to an integer, so that going over to a larger maximum multiplies by a power of two and rounds
 * nothing: only the order of additions matters, and it is the same in both kernels:
 *
 *   parts:  a warp takes one split for a few rows and writes m, l and o; merge_parts adds them up. For decode and short
 * chunks: the work is spread over the splits, and all query heads of a KV head use a key once it is loaded. whole:  a
 * block takes some rows of a chunk through all their keys, which pass through shared memory.
 *
 * Queries are columns of the products: S^T[token][query] = K Q^T and O^T[d][query] = V^T P^T. A query is a pair of a
 * row and one of the query heads that share a KV head.
 */
#include "cuda/block.cuh"
#include "cuda/kv_page.cuh"
#include "cuda/packed.cuh"

namespace GPU_NS
{

static constexpr float NO_SCORE = -1e30f, LOG2_E = 1.44269504f;
enum {
	SPLIT_PAGES = SPLIT_TOKENS / PAGE_TOKENS,
	PART_WARPS = 4,
	WHOLE_WARPS = 8,
	WHOLE_STAGES = 3,
	MERGE_THREADS = 128
};

/* What params say, as kernels use it: in powers of two, and no window is one that nothing leaves. */
struct bounds {
	float cap; /* 0: none */
	int window;
};

__device__ __forceinline__ struct bounds bounds_of(const struct attention_params &p)
{
	return {p.softcap * LOG2_E, p.window > 0 ? p.window : INT32_MAX};
}

/* The first position that a row at `position` sees. */
__device__ __forceinline__ int first_seen(int position, const struct attention_params &p)
{
	return p.window > 0 ? max(position + 1 - p.window, 0) : 0;
}

/* 2^n for an integer n <= 0. */
__device__ __forceinline__ float power_of_two(float n)
{
	return n < -126.0f ? 0.0f : __int_as_float((static_cast<int>(n) + 127) << 23);
}

/*
 * Keys and values of a page as left operands, from memory or from shared memory: load(byte offset) gives 16 bytes,
 * load_narrow() 8. dim is head_dim rounded up to a template's size.
 */
struct key_block {
	uint4 token[2]; /* tokens g and g + 8, 8 of 32 elements */
};

template <typename Load>
__device__ __forceinline__ struct key_block load_key(int block, int head_dim, int lane, const Load &load)
{
	const int g = lane / 4, d = 32 * block + lane % 4 * 8;
	struct key_block k = {{{0, 0, 0, 0}, {0, 0, 0, 0}}};
	if (d < head_dim) {
		k.token[0] = load(key_offset(head_dim, g, d));
		k.token[1] = load(key_offset(head_dim, g + 8, d));
	}
	return k;
}

template <typename Load, typename LoadNarrow>
__device__ __forceinline__ uint4 load_value(int block, int head_dim, int lane, const Load &load,
					    const LoadNarrow &load_narrow)
{
	uint4 v = {0, 0, 0, 0};
	if (16 * block + 16 <= head_dim) {
		v = load(512 * block + 16 * lane);
	} else if (16 * block < head_dim) {
		const uint2 x = load_narrow(512 * block + 8 * lane);
		v.x = x.x;
		v.z = x.y;
	}
	return v;
}

/* Two neighbouring tokens' halves, without those after `last`. What lies there may be anything, NaN as well. */
__device__ __forceinline__ uint32_t without_later(uint32_t pair, int token, int last)
{
	return token > last ? 0 : token + 1 > last ? pair & 0xffffu : pair;
}

__device__ __forceinline__ uint4 hide_later(uint4 v, int first_token, int last, int lane)
{
	const int token = first_token + lane % 4 * 2;
	v.x = without_later(v.x, token, last);
	v.y = without_later(v.y, token, last);
	v.z = without_later(v.z, token + 8, last);
	v.w = without_later(v.w, token + 8, last);
	return v;
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

	__device__ __forceinline__ void clear()
	{
		nothing_seen(m, l, o);
	}

	/* Weights of a page's tokens: s[k][c] for token g (c < 2) or g + 8 and query 2t + c % 2 becomes the right
	 * operand of P V. */
	__device__ __forceinline__ void weigh(float (&s)[n8][4], int first_token, int lane, const struct bounds &to,
					      uint32_t (&p)[n8][2])
	{
		const int g = lane / 4, t = lane % 4;
		float factor[n8][2];
		bool changed = false;
#pragma unroll
		for (int k = 0; k < n8; k++)
#pragma unroll
			for (int c = 0; c < 2; c++) {
				if (to.cap > 0) {
					s[k][c] = to.cap * tanhf(s[k][c] / to.cap);
					s[k][c + 2] = to.cap * tanhf(s[k][c + 2] / to.cap);
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
				s[k][c] = exp2f(s[k][c] - m[k][c % 2]);
				l[k][c % 2] += s[k][c];
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

	/* value(b) gives block b of a page's values, whose tokens after `last` do not count. */
	template <typename Value>
	__device__ __forceinline__ void add_values(const uint32_t (&p)[n8][2], int first_token, int last, int lane,
						   const Value &value)
	{
		const bool hide = first_token + PAGE_TOKENS - 1 > last;
#pragma unroll
		for (int b = 0; b < dim / 16; b++) {
			uint4 v = value(b);
			if (hide)
				v = hide_later(v, first_token, last, lane);
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

/* ---- Parts ---- */

/*
 * blockIdx.y: the KV head and, when an item has more than 8 * n8 queries, which of them. Keys of the next page are on
 * their way while a page is computed, unless that takes more registers than there are.
 */
template <int dim, bool exact, int n8> /* exact: head_dim is dim */
__global__ void __launch_bounds__(32 * PART_WARPS, 2) attend_parts(struct attention_args a)
{
	constexpr bool ahead = dim <= 128;
	const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const int index = blockIdx.x * PART_WARPS + warp;
	const int head_kv = blockIdx.y % a.n_head_kv, first = blockIdx.y / a.n_head_kv * 8 * n8;
	const int head_dim = exact ? dim : a.head_dim, group = a.n_head / a.n_head_kv;
	if (index >= a.n_parts)
		return;
	const struct attention_item item = a.parts[index];
	if (item.n_rows == 0)
		return;
	const int32_t *table = a.table + a.seq_table[item.seq];
	const int last = item.first_position + item.n_rows - 1, n = item.n_rows * group;
	/* Pages before all windows are not looked at: their places in the table may hold anything. */
	const int first_page =
		max(item.first_split * SPLIT_PAGES, first_seen(item.first_position, a.params) / PAGE_TOKENS);
	const int n_pages = min((item.first_split + 1) * SPLIT_PAGES, last / PAGE_TOKENS + 1) - first_page;
	if (n_pages <= 0)
		return;
	const struct bounds to_see = bounds_of(a.params);

	queries<dim, n8> x;
	x.load(a.q, a.n_head, head_dim, head_kv * group, group, item.first_row, item.first_position, first, n,
	       a.params.scale * LOG2_E, lane);

	const int32_t my_page = table[first_page + min(lane, n_pages - 1)];
	const size_t keys_at = a.layer_offset + head_offset(a.n_head_kv, head_dim, 0, head_kv);
	const size_t values_at = a.layer_offset + head_offset(a.n_head_kv, head_dim, 1, head_kv);
	const auto page_data = [&](int i) {
		return a.kv + static_cast<size_t>(__shfl_sync(ALL, my_page, i)) * a.page_stride;
	};
	const uint8_t *data = page_data(0);
	const auto load_key_block = [&](int block) {
		return load_key(block, head_dim, lane, [&](int at) { return ldg_stream<uint4>(data + keys_at + at); });
	};
	const auto load_value_block = [&](int block) {
		return load_value(
			block, head_dim, lane, [&](int at) { return ldg_stream<uint4>(data + values_at + at); },
			[&](int at) { return ldg_stream<uint2>(data + values_at + at); });
	};
	struct key_block key[ahead ? dim / 32 : 1];
	uint4 value[ahead ? dim / 16 : 1];
	const auto load_keys = [&]() {
#pragma unroll
		for (int block = 0; block < dim / 32; block++)
			key[block] = load_key_block(block);
	};
	if constexpr (ahead)
		load_keys();

	for (int i = 0; i < n_pages; i++) {
		float s[n8][4];
		uint32_t p[n8][2];
		const int first_token = (first_page + i) * PAGE_TOKENS;
		if constexpr (ahead) {
#pragma unroll
			for (int block = 0; block < dim / 16; block++)
				value[block] = load_value_block(block);
			x.scores(s, [&](int block) { return key[block]; });
			data = page_data(min(i + 1, n_pages - 1));
			if (i + 1 < n_pages)
				load_keys();
			x.weigh(s, first_token, lane, to_see, p);
			x.add_values(p, first_token, last, lane, [&](int block) { return value[block]; });
		} else {
			x.scores(s, load_key_block);
			x.weigh(s, first_token, lane, to_see, p);
			x.add_values(p, first_token, last, lane, load_value_block);
			data = page_data(min(i + 1, n_pages - 1));
		}
	}
	x.reduce();

#pragma unroll
	for (int k = 0; k < n8; k++)
#pragma unroll
		for (int c = 0; c < 2; c++) {
			const int i = first + 8 * k + 2 * t + c;
			if (i >= n)
				continue;
			float *to = a.partial + (static_cast<size_t>(item.partial + i / group) * a.n_head +
						 head_kv * group + i % group) *
							(2 + head_dim);
			if (g == 0) {
				to[0] = x.m[k][c];
				to[1] = x.l[k][c];
			}
#pragma unroll
			for (int b = 0; b < dim / 16; b++)
#pragma unroll
				for (int h = 0; h < 2; h++)
					if (16 * b + 8 * h < head_dim)
						to[2 + 16 * b + 8 * h + g] = x.o[b][k][c + 2 * h];
		}
}

/* One row and head: out = (sum of 2^(m_i - M) o_i) / (sum of 2^(m_i - M) l_i), from the first split to the last. */
__global__ void __launch_bounds__(MERGE_THREADS) merge_parts(struct attention_args a)
{
	enum { AT_ONCE = MERGE_THREADS, PER_THREAD = 256 / MERGE_THREADS };
	GPU_SHARED(float, scratch, MERGE_THREADS / 32);
	GPU_SHARED(float, weight, AT_ONCE);
	GPU_SHARED(float, sum_of, AT_ONCE);
	const struct merge_item item = a.merges[blockIdx.x];
	const int head = blockIdx.y, width = 2 + a.head_dim;
	/* Splits before the window have no results. */
	const int unseen = a.params.window > 0 ? first_seen(a.position[item.row], a.params) / SPLIT_TOKENS : 0;
	const int n_splits = item.n_splits - unseen;
	const size_t apart = static_cast<size_t>(item.stride) * a.n_head * width;
	const float *first =
		a.partial + (static_cast<size_t>(item.first_slot) * a.n_head + head) * width + unseen * apart;

	float top = NO_SCORE;
	for (int i = threadIdx.x; i < n_splits; i += MERGE_THREADS)
		top = fmaxf(top, first[i * apart]);
	top = block_max<MERGE_THREADS>(top, scratch);

	float l = 0, o[PER_THREAD] = {0};
	for (int begin = 0; begin < n_splits; begin += AT_ONCE) {
		const int n = min(static_cast<int>(AT_ONCE), n_splits - begin);
		__syncthreads();
		if (static_cast<int>(threadIdx.x) < n) {
			const float *part = first + (begin + threadIdx.x) * apart;
			const float w = power_of_two(part[0] - top);
			weight[threadIdx.x] = w;
			sum_of[threadIdx.x] = part[1] * w;
		}
		__syncthreads();
		for (int i = 0; i < n; i++)
			l += sum_of[i];
#pragma unroll
		for (int k = 0; k < PER_THREAD; k++) {
			const int d = threadIdx.x + k * MERGE_THREADS;
			if (d >= a.head_dim)
				continue;
			const float *from = first + begin * apart + 2 + d;
#pragma unroll 16
			for (int i = 0; i < n; i++)
				o[k] += from[i * apart] * weight[i];
		}
	}
#pragma unroll
	for (int k = 0; k < PER_THREAD; k++) {
		const int d = threadIdx.x + k * MERGE_THREADS;
		if (d >= a.head_dim)
			continue;
		const float v = o[k] / l;
		a.out[(static_cast<size_t>(item.row) * a.n_head + head) * a.head_dim + d] = v;
		if (a.h.x)
			a.h.x[static_cast<size_t>(item.row) * a.h.stride + head * a.head_dim + d] = __float2half_rn(v);
	}
	if (a.h.x && head == 0 && threadIdx.x == 0)
		a.h.scale[item.row] = 1.0f;
}

/* ---- Whole rows ---- */

template <int dim, bool exact, int n8>
__global__ void __launch_bounds__(32 * WHOLE_WARPS, 1) attend_whole(struct attention_args a)
{
	GPU_DYNAMIC_SHARED(uint8_t, stages); /* [WHOLE_STAGES][keys, values] of one page and head */
	const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const int head_kv = blockIdx.y, head_dim = exact ? dim : a.head_dim, group = a.n_head / a.n_head_kv;
	const struct attention_item item = a.whole[blockIdx.x];
	const int32_t *table = a.table + a.seq_table[item.seq];
	const int n = item.n_rows * group, first = warp * 8 * n8;
	const int last = item.first_position + item.n_rows - 1, n_pages = last / PAGE_TOKENS + 1;
	/* The last key any query of this warp looks at, or -1, and the first; and the first page that any of the block does. */
	const int warp_last = first < n ? item.first_position + min(first + 8 * n8 - 1, n - 1) / group : -1;
	const int warp_first = first_seen(item.first_position + first / group, a.params);
	const int first_page = first_seen(item.first_position, a.params) / PAGE_TOKENS;
	const struct bounds to_see = bounds_of(a.params);
	const int bytes = static_cast<int>(head_bytes(head_dim));

	queries<dim, n8> x;
	float total_m[n8][2], total_l[n8][2], total_o[dim / 16][n8][4];
	x.load(a.q, a.n_head, head_dim, head_kv * group, group, item.first_row, item.first_position, first, n,
	       a.params.scale * LOG2_E, lane);
	nothing_seen(total_m, total_l, total_o);
	const auto fold = [&]() {
		x.reduce();
#pragma unroll
		for (int k = 0; k < n8; k++) {
			float before[2], now[2];
#pragma unroll
			for (int c = 0; c < 2; c++) {
				const float top = fmaxf(total_m[k][c], x.m[k][c]);
				before[c] = power_of_two(total_m[k][c] - top);
				now[c] = power_of_two(x.m[k][c] - top);
				total_m[k][c] = top;
				total_l[k][c] = total_l[k][c] * before[c] + x.l[k][c] * now[c];
			}
#pragma unroll
			for (int b = 0; b < dim / 16; b++)
#pragma unroll
				for (int c = 0; c < 4; c++)
					total_o[b][k][c] = total_o[b][k][c] * before[c % 2] + x.o[b][k][c] * now[c % 2];
		}
		x.clear();
	};

	const size_t keys_at = a.layer_offset + head_offset(a.n_head_kv, head_dim, 0, head_kv);
	const size_t values_at = a.layer_offset + head_offset(a.n_head_kv, head_dim, 1, head_kv);
	const auto copy_page = [&](int page) {
		if (page < n_pages) {
			const uint8_t *data = a.kv + static_cast<size_t>(table[page]) * a.page_stride;
			const auto to = stages + page % WHOLE_STAGES * 2 * bytes;
			for (int i = threadIdx.x * 16; i < bytes; i += 32 * WHOLE_WARPS * 16) {
				cp_async<16>(to + i, data + keys_at + i);
				cp_async<16>(to + (bytes + i), data + values_at + i);
			}
		}
		cp_async_commit();
	};
	for (int page = 0; page < WHOLE_STAGES - 1; page++)
		copy_page(first_page + page);

	for (int page = first_page; page < n_pages; page++) {
		const int first_token = page * PAGE_TOKENS;
		cp_async_wait<WHOLE_STAGES - 2>();
		__syncthreads();
		copy_page(page + WHOLE_STAGES - 1);
		if (first_token > warp_last || first_token + PAGE_TOKENS <= warp_first)
			continue;
		if (page > first_page && page % SPLIT_PAGES == 0)
			fold();
		const auto stage = stages + page % WHOLE_STAGES * 2 * bytes;
		float s[n8][4];
		uint32_t p[n8][2];
		x.scores(s, [&](int block) {
			return load_key(block, head_dim, lane, [&](int at) { return ld_shared<uint4>(stage + at); });
		});
		x.weigh(s, first_token, lane, to_see, p);
		x.add_values(p, first_token, last, lane, [&](int block) {
			return load_value(
				block, head_dim, lane, [&](int at) { return ld_shared<uint4>(stage + (bytes + at)); },
				[&](int at) { return ld_shared<uint2>(stage + (bytes + at)); });
		});
	}
	cp_async_wait<0>();
	fold();

#pragma unroll
	for (int k = 0; k < n8; k++)
#pragma unroll
		for (int c = 0; c < 2; c++) {
			const int i = first + 8 * k + 2 * t + c;
			if (i >= n)
				continue;
			const int row = item.first_row + i / group, head = head_kv * group + i % group;
			float *to = a.out + (static_cast<size_t>(row) * a.n_head + head) * head_dim;
			__half *to_half = a.h.x + static_cast<size_t>(row) * a.h.stride + head * head_dim;
#pragma unroll
			for (int b = 0; b < dim / 16; b++)
#pragma unroll
				for (int h = 0; h < 2; h++) {
					const int d = 16 * b + 8 * h + g;
					if (16 * b + 8 * h >= head_dim)
						continue;
					const float v = total_o[b][k][c + 2 * h] / total_l[k][c];
					to[d] = v;
					if (a.h.x)
						to_half[d] = __float2half_rn(v);
				}
			if (a.h.x && g == 0 && head == 0)
				a.h.scale[row] = 1.0f;
		}
}

/* ---- Launch ---- */

/* Heads above 128 elements take half as many queries a warp: registers. */
static int queries_of_whole(int head_dim)
{
	return WHOLE_WARPS * (head_dim > 128 ? 8 : 16);
}

int part_rows(int n_head, int n_head_kv)
{
	const int group = n_head / n_head_kv;
	return group >= 8 ? 1 : 8 / group;
}

int whole_rows(int n_head, int n_head_kv, int head_dim)
{
	return queries_of_whole(head_dim) / (n_head / n_head_kv);
}

bool attention_supports(int n_head, int n_head_kv, int head_dim)
{
	return head_dim > 0 && head_dim % 8 == 0 && head_dim <= 256 && n_head_kv > 0 && n_head % n_head_kv == 0 &&
	       n_head / n_head_kv <= WHOLE_WARPS * 8;
}

template <int dim, bool exact> static cudaError_t launch(const struct attention_args &a, cudaStream_t stream)
{
	cudaError_t e = cudaSuccess;
	const unsigned heads = static_cast<unsigned>(a.n_head_kv);
	if (a.n_parts) {
		const unsigned blocks = static_cast<unsigned>((a.n_parts + PART_WARPS - 1) / PART_WARPS);
		constexpr int most = dim > 128 ? 1 : 2;
		const unsigned group = static_cast<unsigned>(a.n_head / a.n_head_kv);
		if (group <= 8 || most == 1)
			GPU_LAUNCH((attend_parts<dim, exact, 1>), dim3(blocks, heads * ((group + 7) / 8)),
				   dim3(32 * PART_WARPS), 0, stream, a);
		else
			GPU_LAUNCH((attend_parts<dim, exact, most>), dim3(blocks, heads * ((group + 15) / 16)),
				   dim3(32 * PART_WARPS), 0, stream, a);
		e = cudaGetLastError();
		if (e == cudaSuccess) {
			GPU_LAUNCH(merge_parts,
				   dim3(static_cast<unsigned>(a.n_merges), static_cast<unsigned>(a.n_head)),
				   dim3(MERGE_THREADS), 0, stream, a);
			e = cudaGetLastError();
		}
	}
	if (e == cudaSuccess && a.n_whole) {
		const size_t shared = WHOLE_STAGES * 2 * head_bytes(a.head_dim);
		GPU_LAUNCH((attend_whole<dim, exact, (dim > 128 ? 1 : 2)>),
			   dim3(static_cast<unsigned>(a.n_whole), heads), dim3(32 * WHOLE_WARPS), shared, stream, a);
		e = cudaGetLastError();
	}
	return e;
}

cudaError_t attention(const struct attention_args &a, cudaStream_t stream)
{
	switch (a.head_dim) {
	case 64:
		return launch<64, true>(a, stream);
	case 96:
		return launch<96, true>(a, stream);
	case 128:
		return launch<128, true>(a, stream);
	case 256:
		return launch<256, true>(a, stream);
	}
	return a.head_dim < 64	  ? launch<64, false>(a, stream)
	       : a.head_dim < 128 ? launch<128, false>(a, stream)
				  : launch<256, false>(a, stream);
}

} // namespace GPU_NS
