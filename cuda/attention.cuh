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
 *
 * Narrow KV. Codes become halves in registers, exactly: those of keys as they are, and a score is multiplied by its
 * key's scale; those of values times the power of two in their scale, whose rest goes into the weight. So nothing is
 * rounded that is not with f16, and values may be as small and larger. A page that has a wide copy is read there.
 *
 * A value that is no number reaches the queries that see its token, and no others.
 */
#pragma once

#include "cuda/attention_queries.cuh"

namespace GPU_NS
{

/* attention.cu: adds up the parts. */
cudaError_t merge(const struct attention_args &a, cudaStream_t stream);
/* attention_bf16.cu, attention_int8.cu, attention_fp8.cu: attention() of those pages. */
cudaError_t attention_bf16(const struct attention_args &a, cudaStream_t stream);
cudaError_t attention_int8(const struct attention_args &a, cudaStream_t stream);
cudaError_t attention_fp8(const struct attention_args &a, cudaStream_t stream);

/* ---- Logits that are raised ---- */

/* Of a sequence's pages, those whose tokens' logits are raised (batch_seq.plus). */
struct raised_pages {
	const float *plus; /* [n][PAGE_TOKENS] in powers of two */
	int n;

	/* Of a page's tokens g and g + 8. */
	__device__ __forceinline__ void load(int page, int lane, float (&to)[2]) const
	{
		to[0] = to[1] = 0;
		if (page < n) {
			to[0] = plus[page * PAGE_TOKENS + lane / 4];
			to[1] = plus[page * PAGE_TOKENS + lane / 4 + 8];
		}
	}
};

__device__ __forceinline__ struct raised_pages raised_pages_of(const struct attention_args &a, int seq)
{
	if (!a.raises)
		return {NULL, 0};
	const struct attention_raise r = a.raises[seq];
	return {a.plus + r.first, r.n_pages};
}

/* ---- Parts ---- */

/*
 * The pages of a split, one after the other: run(first_token, this page, the next one, there is a next one). In each of
 * these, keys of the next page are on their way while a page is computed, unless that takes more registers than there
 * are.
 */
template <int dim, int n8, enum kv_form form> struct split_of_elements {
	static constexpr bool ahead = dim <= 128;
	struct key_block key[ahead ? dim / 32 : 1];

	__device__ __forceinline__ void load_keys(const struct page_place &page, int head_dim, int lane)
	{
		if constexpr (ahead)
#pragma unroll
			for (int block = 0; block < dim / 32; block++)
				key[block] = load_key(block, head_dim, lane, load_global{page.keys});
	}

	template <bool asks_more>
	__device__ __forceinline__ void run(queries<dim, n8> &x, int head_dim, int lane, int first_token, int first,
					    int last, const struct bounds &to, const float (&plus)[2],
					    const struct page_place &page, const struct page_place &next, bool more,
					    struct page_weights<n8> &told)
	{
		const float one[2] = {1.0f, 1.0f};
		float s[n8][4];
		uint32_t p[n8][2];
		const auto load_block = [&](int block) {
			return load_value(block, head_dim, lane, load_global{page.values});
		};
		/* As they are multiplied and no sooner: until then they are on their way. */
		const auto key_at = [&](int block) {
			return halves_of<form>(ahead ? key[ahead ? block : 0]
		                                     : load_key(block, head_dim, lane, load_global{page.keys}));
		};
		if constexpr (ahead) {
			uint4 value[dim / 16];
#pragma unroll
			for (int block = 0; block < dim / 16; block++)
				value[block] = load_block(block);
			x.scores(s, key_at);
			if (more)
				load_keys(next, head_dim, lane);
			x.template weigh<false, asks_more>(s, first_token, lane, to, p, one, plus, told);
			x.template add_values<true>(p, first_token, first, last, lane,
						   [&](int block) { return halves_of<form>(value[block]); });
		} else {
			x.scores(s, key_at);
			x.template weigh<false, asks_more>(s, first_token, lane, to, p, one, plus, told);
			x.template add_values<true>(p, first_token, first, last, lane,
						   [&](int block) { return halves_of<form>(load_block(block)); });
		}
	}
};

template <int dim, int n8, enum kv_form form> struct split_of_codes {
	static constexpr bool ahead = dim <= 128;
	uint4 key[ahead ? dim / 32 : 1];
	float4 scale; /* keys' of tokens g and g + 8, values' likewise */

	__device__ __forceinline__ void load_keys(const struct page_place &page, int head_dim, int lane)
	{
		if (page.wide)
			return;
		scale = ldg_stream<float4>(page.keys + scale_offset(0, lane / 4));
		if constexpr (ahead)
#pragma unroll
			for (int block = 0; block < dim / 32; block++)
				key[block] = key_codes(page, block, head_dim, lane);
	}

	__device__ __forceinline__ uint4 key_codes(const struct page_place &page, int block, int head_dim, int lane)
	{
		return load_key_codes(block, head_dim, lane, load_global{page.keys + codes_offset(head_dim, 0)});
	}

	__device__ __forceinline__ uint4 value_codes(const struct page_place &page, int block, int head_dim, int lane)
	{
		return load_value_codes(block, head_dim, lane, load_global{page.values + codes_offset(head_dim, 1)});
	}

	template <bool asks_more>
	__device__ __forceinline__ void run(queries<dim, n8> &x, int head_dim, int lane, int first_token, int first,
					    int last, const struct bounds &to, const float (&plus)[2],
					    const struct page_place &page, const struct page_place &next, bool more,
					    struct page_weights<n8> &told)
	{
		float s[n8][4];
		uint32_t p[n8][2];
		uint4 value[ahead ? dim / 32 : 1];
		struct value_scales scales = {{1.0f, 1.0f}, {}};
		if (page.wide) {
			x.scores(s, [&](int block) { return load_key(block, head_dim, lane, load_global{page.keys}); });
		} else {
			if constexpr (ahead)
#pragma unroll
				for (int block = 0; block < dim / 32; block++)
					value[block] = value_codes(page, block, head_dim, lane);
			x.scores(s, [&](int block) {
				return key_of_codes<form>(ahead ? key[ahead ? block : 0]
								: key_codes(page, block, head_dim, lane));
			});
			x.scale_scores(s, scale.x, scale.y);
			scales = split_scales(scale.z, scale.w, lane);
		}
		if (more)
			load_keys(next, head_dim, lane);
		x.template weigh<true, asks_more>(s, first_token, lane, to, p, scales.rest, plus, told);
		if (page.wide)
			x.template add_values<true>(p, first_token, first, last, lane, [&](int block) {
				return load_value(block, head_dim, lane, load_global{page.values});
			});
		else
			x.template add_values<false>(p, first_token, first, last, lane, [&](int block) {
				if (!ahead && block % 2 == 0)
					value[0] = value_codes(page, block / 2, head_dim, lane);
				return value_of_codes<form>(block, head_dim, value[ahead ? block / 2 : 0], scales);
			});
	}
};

template <int dim, int n8, enum kv_form form> struct split_of : split_of_codes<dim, n8, form> {
};
template <int dim, int n8> struct split_of<dim, n8, KV_FORM_F16> : split_of_elements<dim, n8, KV_FORM_F16> {
};
template <int dim, int n8> struct split_of<dim, n8, PAGES_BF16> : split_of_elements<dim, n8, PAGES_BF16> {
};

/*
 * blockIdx.y: the KV head and, when an item has more than 8 * n8 queries, which of them. exact: head_dim is dim. tells:
 * some items say what they gave to pages, have their logits raised, or have keys of chunks, for which the others have no
 * registers.
 */
template <int dim, bool exact, int n8, enum kv_form form, bool tells>
__global__ void __launch_bounds__(32 * PART_WARPS, 2) attend_parts(struct attention_args a)
{
	const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const int index = blockIdx.x * PART_WARPS + warp;
	const int head_kv = blockIdx.y % a.n_head_kv, first = blockIdx.y / a.n_head_kv * 8 * n8;
	const int head_dim = exact ? dim : a.head_dim, group = a.n_head / a.n_head_kv;
	if (index >= a.n_parts)
		return;
	const struct attention_item item = a.parts[index];
	if (item.n_rows == 0)
		return;
	/* Pages before all windows are not looked at: their places in the table may hold anything. */
	const int first_page =
		max(item.first_split * SPLIT_PAGES, first_seen(item.first_position, a.params) / PAGE_TOKENS);
	const int last = item.first_position + item.n_rows - 1, n = item.n_rows * group;
	const int n_pages = min((item.first_split + 1) * SPLIT_PAGES, last / PAGE_TOKENS + 1) - first_page;
	if (n_pages <= 0)
		return;
	const struct bounds to = bounds_of(a.params);
	const struct raised_pages raised = tells ? raised_pages_of(a, item.seq) : raised_pages();

	queries<dim, n8> x;
	x.load(a.q, a.n_head, head_dim, head_kv * group, group, item.first_row, item.first_position, first, n,
	       a.params.scale * LOG2_E, lane);

	const int my_place = first_page + min(lane, n_pages - 1);
	const int my_entry =
		item.chosen != CHOSEN_NONE
			? a.chosen[item.chosen + static_cast<size_t>(head_kv) * (last / PAGE_TOKENS + 1) + my_place]
		: a.part_table ? my_place - a.part_first
			       : a.seq_table[item.seq] + my_place;
	const int32_t my_page = a.part_table ? a.part_table[my_entry] : a.table[my_entry];
	const int32_t my_slot = !is_plain(form) && a.slots ? a.slots[my_entry] : -1;
	const auto page_at = [&](int i) {
		const int32_t slot = is_plain(form) ? -1 : __shfl_sync(ALL, my_slot, i);
		return place_of<form>(a, head_dim, head_kv, __shfl_sync(ALL, my_page, i), slot);
	};
	split_of<dim, n8, form> split;
	struct page_place page = page_at(0);
	split.load_keys(page, head_dim, lane);
	int met = -1;
	for (int i = 0; i < n_pages; i++) {
		const struct page_place next = page_at(min(i + 1, n_pages - 1));
		if (tells && a.turned) {
			const int keys = keys_of_page(first_page + i, item.first_position, a.chunk_pages);
			if (keys != met)
				x.meet(a, keys, head_dim, head_kv * group, group, item.first_row, first, n, lane);
			met = keys;
		}
		struct page_weights<n8> told = {};
		float plus[2];
		raised.load(first_page + i, lane, plus);
		split.template run<tells>(x, head_dim, lane, (first_page + i) * PAGE_TOKENS, item.first_position, last,
					  to, plus, page, next, i + 1 < n_pages, told);
		if (tells && item.tells)
			x.tell(told, first, n, lane, [&](int query) {
				return a.part_weights +
				       ((static_cast<size_t>(item.partial) + query / group) * a.n_head +
					head_kv * group + query % group) *
					       SPLIT_PAGES +
				       (first_page + i) % SPLIT_PAGES;
			});
		page = next;
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

/* ---- Whole rows ---- */

/* Floats of a block's sums. */
template <int dim, int n8> static constexpr int WHOLE_STATE = 32 * WHOLE_WARPS * (4 * n8 + dim / 16 * n8 * 4);

/*
 * What a block's queries gave to pages, now that their largest scores and sums are known: a query for each thread, and
 * as many pages at a time as there are threads for.
 */
template <int n_queries>
__device__ void tell_whole(const struct attention_args &a, const struct attention_item &item,
			   const struct page_weight *weights, int group, int n, int first_page, int n_pages,
			   shared_span<float> top_of, shared_span<float> sum_of)
{
	const int query = threadIdx.x % n_queries, at_once = 32 * WHOLE_WARPS / n_queries;
	const struct attention_tells to = a.tells[item.seq];
	const bool is_one = query < n;
	const int position = item.first_position + query / group;
	const int row_first = is_one ? first_seen(position, a.params) / PAGE_TOKENS : n_pages,
		  row_last = position / PAGE_TOKENS;
	const float top = is_one ? static_cast<float>(top_of[query]) : 0.0f,
		    l = is_one ? static_cast<float>(sum_of[query]) : 1.0f;
	const auto weight = [&](int page) { return weights + static_cast<size_t>(page) * n_queries + query; };
	if (to.mass != NOBODY) {
		unsigned long long *mass = a.masses + to.mass;
		for (int page = first_page + threadIdx.x / n_queries; page < n_pages; page += at_once) {
			uint32_t share = 0;
			if (page >= row_first && page <= row_last)
				share = share_of(ld_global<struct page_weight>(weight(page)), top, l);
			for (int apart = 16; apart; apart /= 2) /* 32 of at most 2^24 */
				share += __shfl_xor_sync(ALL, share, apart);
			if (threadIdx.x % 32 == 0 && share)
				atomicAdd(mass + page, static_cast<unsigned long long>(share));
		}
	}
	if (to.look != NOBODY && is_one && static_cast<int>(threadIdx.x) < n_queries) {
		struct look_of_splits look = {0, 0};
		for (int page = row_first / SPLIT_PAGES * SPLIT_PAGES; page <= row_last; page += SPLIT_PAGES)
			add_splits(look,
				   look_at_split(page, row_first, row_last, top, weight(page), n_queries));
		add_look(a.looks + to.look, look, l);
	}
}

/*
 * ROWS_TELL: some items say what they gave to pages, have their logits raised, or have keys of chunks. ROWS_IN_PARTS:
 * they go on with what the part before has left; keys may be of chunks as well. Both want registers, so that their
 * weighted values are in memory between splits.
 */
enum rows_mode { ROWS_PLAIN, ROWS_TELL, ROWS_IN_PARTS };

template <int dim, bool exact, int n8, enum kv_form form, enum rows_mode mode>
__global__ void __launch_bounds__(32 * WHOLE_WARPS, 1) attend_whole(struct attention_args a)
{
	constexpr bool tells = mode == ROWS_TELL, in_parts = mode == ROWS_IN_PARTS, in_memory = mode != ROWS_PLAIN;
	enum { QUERIES = WHOLE_WARPS * 8 * n8 };
	GPU_DYNAMIC_SHARED(uint8_t, stages); /* [WHOLE_STAGES][keys, values] of one page and head, or a narrow block */
	const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const int head_kv = blockIdx.y, head_dim = exact ? dim : a.head_dim, group = a.n_head / a.n_head_kv;
	const struct attention_item item = a.whole[blockIdx.x];
	const bool far = in_parts && a.part_table;
	const int32_t *table = far ? a.part_table : a.table + a.seq_table[item.seq];
	const int table_from = far ? a.part_first : 0;
	const int32_t *slots = !is_plain(form) && a.slots ? a.slots + a.seq_table[item.seq] : NULL;
	const int n = item.n_rows * group, first = warp * 8 * n8;
	const int last = item.first_position + item.n_rows - 1;
	const int n_pages = in_parts ? min(last / PAGE_TOKENS + 1, a.part_end) : last / PAGE_TOKENS + 1;
	/* The last key any query of this warp looks at, or -1. */
	const int warp_last = first < n ? item.first_position + min(first + 8 * n8 - 1, n - 1) / group : -1;
	const int warp_first = item.first_position + first / group, warp_sees = first_seen(warp_first, a.params);
	/* The first page that any query of the block looks at. */
	const int sees_from = first_seen(item.first_position, a.params) / PAGE_TOKENS;
	const int first_page = in_parts ? max(sees_from, a.part_first) : sees_from;
	const struct bounds to = bounds_of(a.params);
	const struct raised_pages raised = tells ? raised_pages_of(a, item.seq) : raised_pages();
	const int bytes = static_cast<int>(head_bytes(head_dim));
	struct page_weight *weights =
		tells && item.tells
			? a.whole_weights +
				  (static_cast<size_t>(item.partial) + static_cast<size_t>(head_kv) * n_pages) * QUERIES
			: NULL;

	queries<dim, n8> x;
	float total_m[n8][2], total_l[n8][2], total_o[in_memory ? 1 : dim / 16][n8][4];
	x.load(a.q, a.n_head, head_dim, head_kv * group, group, item.first_row, item.first_position, first, n,
	       a.params.scale * LOG2_E, lane);
	nothing_seen(total_m, total_l, total_o);
	/* This thread's numbers in the state. */
	const size_t block = static_cast<size_t>(blockIdx.x) * gridDim.y + head_kv;
	float *state = in_memory ? a.state + block * WHOLE_STATE<dim, n8> + threadIdx.x : NULL;
	const auto state_m = [&](int k, int c) { return state + (4 * k + c) * 32 * WHOLE_WARPS; };
	const auto state_l = [&](int k, int c) { return state + (4 * k + 2 + c) * 32 * WHOLE_WARPS; };
	const auto state_o = [&](int b, int k, int c) {
		return state + (4 * n8 + 4 * (b * n8 + k) + c) * 32 * WHOLE_WARPS;
	};
	if constexpr (in_memory) {
#pragma unroll
		for (int k = 0; k < n8; k++) {
#pragma unroll
			for (int c = 0; in_parts && c < 2; c++) {
				total_m[k][c] = a.goes_on ? ld_global<float>(state_m(k, c)) : NO_SCORE;
				total_l[k][c] = a.goes_on ? ld_global<float>(state_l(k, c)) : 0.0f;
			}
			if (in_parts && a.goes_on)
				continue;
#pragma unroll
			for (int b = 0; b < dim / 16; b++)
#pragma unroll
				for (int c = 0; c < 4; c++)
					stg<float>(state_o(b, k, c), 0.0f);
		}
	}
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
				for (int c = 0; c < 4; c++) {
					const float more = x.o[b][k][c] * now[c % 2];
					if constexpr (in_memory)
						stg<float>(state_o(b, k, c),
							   ld_global<float>(state_o(b, k, c)) * before[c % 2] + more);
					else
						total_o[b][k][c] = total_o[b][k][c] * before[c % 2] + more;
				}
		}
		x.clear();
	};

	const auto is_wide = [&](int page) { return is_plain(form) || (slots && slots[page] >= 0); };
	const auto copy_page = [&](int page) {
		if (page < n_pages) {
			const struct page_place from = place_of<form>(a, head_dim, head_kv, table[page - table_from],
								      slots ? slots[page] : -1);
			const auto to = stages + page % WHOLE_STAGES * 2 * bytes;
			if (from.wide) {
				for (int i = threadIdx.x * 16; i < bytes; i += 32 * WHOLE_WARPS * 16) {
					cp_async<16>(to + i, from.keys + i);
					cp_async<16>(to + (bytes + i), from.values + i);
				}
			} else {
				const int block = static_cast<int>(narrow_bytes(head_dim));
				for (int i = threadIdx.x * 16; i < block; i += 32 * WHOLE_WARPS * 16)
					cp_async<16>(to + i, from.keys + i);
			}
		}
		cp_async_commit();
	};
	for (int page = 0; page < WHOLE_STAGES - 1; page++)
		copy_page(first_page + page);

	int met = -1;
	for (int page = first_page; page < n_pages; page++) {
		const int first_token = page * PAGE_TOKENS;
		cp_async_wait<WHOLE_STAGES - 2>();
		__syncthreads();
		copy_page(page + WHOLE_STAGES - 1);
		if (first_token > warp_last || first_token + PAGE_TOKENS <= warp_sees)
			continue;
		if (page > first_page && page % SPLIT_PAGES == 0)
			fold();
		if (in_memory && a.turned) {
			const int keys = keys_of_page(page, item.first_position, a.chunk_pages);
			if (keys != met)
				x.meet(a, keys, head_dim, head_kv * group, group, item.first_row, first, n, lane);
			met = keys;
		}
		const auto stage = stages + page % WHOLE_STAGES * 2 * bytes;
		float s[n8][4];
		uint32_t p[n8][2];
		struct page_weights<n8> told = {};
		struct value_scales scales = {{1.0f, 1.0f}, {}};
		const bool wide = is_wide(page);
		if (wide) {
			x.scores(s, [&](int block) {
				return halves_of<form>(load_key(block, head_dim, lane, load_shared{stage}));
			});
		} else if constexpr (!is_plain(form)) {
			const float4 scale = ld_shared<float4>(stage + scale_offset(0, g));
			x.scores(s, [&](int block) {
				return key_of_codes<form>(load_key_codes(
					block, head_dim, lane, load_shared{stage + codes_offset(head_dim, 0)}));
			});
			x.scale_scores(s, scale.x, scale.y);
			scales = split_scales(scale.z, scale.w, lane);
		}
		float plus[2];
		raised.load(page, lane, plus);
		x.template weigh<!is_plain(form), tells>(s, first_token, lane, to, p, scales.rest, plus, told);
		if (tells && item.tells)
			x.tell(told, first, n, lane,
			       [&](int query) { return weights + static_cast<size_t>(page) * QUERIES + query; });
		if (wide) {
			x.template add_values<true>(p, first_token, warp_first, last, lane, [&](int block) {
				return halves_of<form>(load_value(block, head_dim, lane, load_shared{stage + bytes}));
			});
		} else if constexpr (!is_plain(form)) {
			uint4 codes = {0, 0, 0, 0}; /* of two blocks */
			x.template add_values<false>(p, first_token, warp_first, last, lane, [&](int block) {
				if (block % 2 == 0)
					codes = load_value_codes(block / 2, head_dim, lane,
								 load_shared{stage + codes_offset(head_dim, 1)});
				return value_of_codes<form>(block, head_dim, codes, scales);
			});
		}
	}
	cp_async_wait<0>();
	fold();
	if (in_parts && !a.is_last) {
#pragma unroll
		for (int k = 0; k < n8; k++)
#pragma unroll
			for (int c = 0; c < 2; c++) {
				stg<float>(state_m(k, c), total_m[k][c]);
				stg<float>(state_l(k, c), total_l[k][c]);
			}
		return;
	}

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
					float sum;
					if constexpr (in_memory)
						sum = ld_global<float>(state_o(b, k, c + 2 * h));
					else
						sum = total_o[b][k][c + 2 * h];
					const float v = sum / total_l[k][c];
					to[d] = v;
					if (a.h.x)
						to_half[d] = __float2half_rn(v);
				}
			if (a.h.x && g == 0 && head == 0)
				a.h.scale[row] = 1.0f;
		}
	if (!tells || !item.tells)
		return;
	__syncthreads(); /* nobody reads pages any more */
	const auto top_of = shared_cast<float>(stages), sum_of = top_of + QUERIES;
#pragma unroll
	for (int k = 0; k < n8; k++)
#pragma unroll
		for (int c = 0; c < 2; c++)
			if (g == 0) {
				top_of[first + 8 * k + 2 * t + c] = total_m[k][c];
				sum_of[first + 8 * k + 2 * t + c] = total_l[k][c];
			}
	__syncthreads();
	tell_whole<QUERIES>(a, item, weights, group, n, first_page, n_pages, top_of, sum_of);
}

/* ---- Launch ---- */

template <int dim, bool exact, enum kv_form form, bool tells = false>
static cudaError_t launch(const struct attention_args &a, cudaStream_t stream)
{
	cudaError_t e = cudaSuccess;
	const unsigned heads = static_cast<unsigned>(a.n_head_kv);
	if (a.n_parts) {
		const unsigned blocks = static_cast<unsigned>((a.n_parts + PART_WARPS - 1) / PART_WARPS);
		constexpr int most = dim > 128 ? 1 : 2;
		const unsigned group = static_cast<unsigned>(a.n_head / a.n_head_kv);
		if (group <= 8 || most == 1)
			GPU_LAUNCH((attend_parts<dim, exact, 1, form, tells>), dim3(blocks, heads * ((group + 7) / 8)),
				   dim3(32 * PART_WARPS), 0, stream, a);
		else
			GPU_LAUNCH((attend_parts<dim, exact, most, form, tells>),
				   dim3(blocks, heads * ((group + 15) / 16)), dim3(32 * PART_WARPS), 0, stream, a);
		e = cudaGetLastError();
		if (e == cudaSuccess && a.n_merges)
			e = merge(a, stream);
	}
	if (e == cudaSuccess && a.n_whole) {
		constexpr int n8 = dim > 128 ? 1 : 2;
		constexpr enum rows_mode mode = tells ? ROWS_TELL : ROWS_PLAIN;
		const size_t shared = WHOLE_STAGES * 2 * head_bytes(a.head_dim);
		const dim3 grid(static_cast<unsigned>(a.n_whole), heads), block(32 * WHOLE_WARPS);
		if constexpr (is_plain(form) && tells) {
			if (a.in_parts) {
				GPU_LAUNCH((attend_whole<dim, exact, n8, form, ROWS_IN_PARTS>), grid, block, shared,
					   stream, a);
				return cudaGetLastError();
			}
		}
		GPU_LAUNCH((attend_whole<dim, exact, n8, form, mode>), grid, block, shared, stream, a);
		e = cudaGetLastError();
	}
	return e;
}

/* Whether it takes the kernels with `tells`, or with ROWS_IN_PARTS. */
static inline bool asks_more(const struct attention_args &a)
{
	return a.tells || a.turned || a.raises || (a.in_parts && a.n_whole);
}

/* These have no shapes of their own. */
template <enum kv_form form> cudaError_t attention_that_asks_more(const struct attention_args &a, cudaStream_t stream)
{
	return a.head_dim <= 64	   ? launch<64, false, form, true>(a, stream)
	       : a.head_dim <= 128 ? launch<128, false, form, true>(a, stream)
				   : launch<256, false, form, true>(a, stream);
}

/* Pages that are not in f16 have fewer shapes of their own. */
template <enum kv_form form> cudaError_t attention_of(const struct attention_args &a, cudaStream_t stream)
{
	if (asks_more(a))
		return attention_that_asks_more<form>(a, stream);
	switch (a.head_dim) {
	case 64:
		return launch<64, true, form>(a, stream);
	case 128:
		return launch<128, true, form>(a, stream);
	}
	return a.head_dim < 64	  ? launch<64, false, form>(a, stream)
	       : a.head_dim < 128 ? launch<128, false, form>(a, stream)
				  : launch<256, false, form>(a, stream);
}

} // namespace GPU_NS
