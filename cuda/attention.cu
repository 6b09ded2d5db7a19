/*
 * Attention: the parts' results added up, what shapes there are, and the kernels of attention.cuh for pages in f16;
 * those for other pages are in files of their own, so that they compile beside each other.
 */
#include "cuda/attention.cuh"

namespace GPU_NS
{

enum { MERGE_THREADS = 128 };

/* One row and head: out = (sum of 2^(m_i - M) o_i) / (sum of 2^(m_i - M) l_i), from the first split to the last. */
template <bool may_tell> __global__ void __launch_bounds__(MERGE_THREADS) merge_parts(struct attention_args a)
{
	enum { AT_ONCE = MERGE_THREADS, PER_THREAD = 256 / MERGE_THREADS };
	GPU_SHARED(float, scratch, MERGE_THREADS / 32);
	GPU_SHARED(float, weight, AT_ONCE);
	GPU_SHARED(float, sum_of, AT_ONCE);
	GPU_SHARED(float, product_of, AT_ONCE);
	GPU_SHARED(float, largest_of, AT_ONCE);
	const struct merge_item item = a.merges[blockIdx.x];
	const int head = blockIdx.y, width = 2 + a.head_dim;
	/* Splits before the window have no results. */
	const int unseen = first_seen(item.place, a.params) / SPLIT_TOKENS;
	const int n_splits = item.n_splits - unseen;
	const size_t apart = static_cast<size_t>(item.stride) * a.n_head * width;
	const float *first =
		a.partial + (static_cast<size_t>(item.first_slot) * a.n_head + head) * width + unseen * apart;

	float top = NO_SCORE;
	for (int i = threadIdx.x; i < n_splits; i += MERGE_THREADS)
		top = fmaxf(top, first[i * apart]);
	top = block_max<MERGE_THREADS>(top, scratch);

	const int first_page = first_seen(item.place, a.params) / PAGE_TOKENS, last_page = item.place / PAGE_TOKENS;
	const bool has_look = may_tell && item.look != NOBODY, has_mass = may_tell && item.mass != NOBODY;
	const struct page_weight *weights =
		has_look || has_mass
			? a.part_weights + ((item.first_slot + static_cast<size_t>(unseen) * item.stride) * a.n_head +
					    head) * SPLIT_PAGES
			: NULL;
	const size_t weights_apart = static_cast<size_t>(item.stride) * a.n_head * SPLIT_PAGES;
	struct look_of_splits look = {};

	float l = 0, o[PER_THREAD] = {0};
	for (int begin = 0; begin < n_splits; begin += AT_ONCE) {
		const int n = min(static_cast<int>(AT_ONCE), n_splits - begin);
		__syncthreads();
		if (static_cast<int>(threadIdx.x) < n) {
			const float *part = first + (begin + threadIdx.x) * apart;
			const float w = power_of_two(part[0] - top);
			weight[threadIdx.x] = w;
			sum_of[threadIdx.x] = part[1] * w;
			if (has_look) {
				const int split = begin + threadIdx.x, page = (split + unseen) * SPLIT_PAGES;
				const struct look_of_splits mine = look_at_split(page, first_page, last_page, top,
										 weights + split * weights_apart, 1);
				product_of[threadIdx.x] = mine.product;
				largest_of[threadIdx.x] = mine.largest;
			}
		}
		__syncthreads();
		for (int i = 0; i < n; i++)
			l += sum_of[i];
		for (int i = 0; has_look && i < n; i++)
			add_splits(look, {product_of[i], largest_of[i]});
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
	if (has_look && threadIdx.x == 0)
		add_look(a.looks + item.look, look, l);
	for (int page = first_page + threadIdx.x; has_mass && page <= last_page; page += MERGE_THREADS) {
		const struct page_weight *w =
			weights + (page / SPLIT_PAGES - unseen) * weights_apart + page % SPLIT_PAGES;
		const uint32_t share = share_of(ld_global<struct page_weight>(w), top, l);
		if (share)
			atomicAdd(a.masses + item.mass + page, static_cast<unsigned long long>(share));
	}
}

cudaError_t merge(const struct attention_args &a, cudaStream_t stream)
{
	const dim3 grid(static_cast<unsigned>(a.n_merges), static_cast<unsigned>(a.n_head));
	if (a.tells)
		GPU_LAUNCH((merge_parts<true>), grid, dim3(MERGE_THREADS), 0, stream, a);
	else
		GPU_LAUNCH((merge_parts<false>), grid, dim3(MERGE_THREADS), 0, stream, a);
	return cudaGetLastError();
}

/* ---- Shapes ---- */

/* Heads above 128 elements take half as many queries a warp: registers. */
int whole_queries(int head_dim)
{
	return WHOLE_WARPS * (head_dim > 128 ? 8 : 16);
}

size_t whole_state(int head_dim)
{
	return static_cast<size_t>(head_dim <= 64    ? WHOLE_STATE<64, 2>
				   : head_dim <= 128 ? WHOLE_STATE<128, 2>
						     : WHOLE_STATE<256, 1>);
}

int part_rows(int n_head, int n_head_kv)
{
	const int group = n_head / n_head_kv;
	return group >= 8 ? 1 : 8 / group;
}

int whole_rows(int n_head, int n_head_kv, int head_dim)
{
	return whole_queries(head_dim) / (n_head / n_head_kv);
}

bool attention_supports(int n_head, int n_head_kv, int head_dim)
{
	return head_dim > 0 && head_dim % 8 == 0 && head_dim <= 256 && n_head_kv > 0 && n_head % n_head_kv == 0 &&
	       n_head / n_head_kv <= WHOLE_WARPS * 8;
}

cudaError_t attention(const struct attention_args &a, cudaStream_t stream)
{
	if (a.place.form == PAGES_BF16)
		return attention_bf16(a, stream);
	if (a.place.form == KV_FORM_INT8)
		return attention_int8(a, stream);
	if (a.place.form == KV_FORM_FP8_E4M3)
		return attention_fp8(a, stream);
	if (asks_more(a))
		return attention_that_asks_more<KV_FORM_F16>(a, stream);
	switch (a.head_dim) {
	case 64:
		return launch<64, true, KV_FORM_F16>(a, stream);
	case 96:
		return launch<96, true, KV_FORM_F16>(a, stream);
	case 128:
		return launch<128, true, KV_FORM_F16>(a, stream);
	case 256:
		return launch<256, true, KV_FORM_F16>(a, stream);
	}
	return a.head_dim < 64	  ? launch<64, false, KV_FORM_F16>(a, stream)
	       : a.head_dim < 128 ? launch<128, false, KV_FORM_F16>(a, stream)
				  : launch<256, false, KV_FORM_F16>(a, stream);
}

} // namespace GPU_NS
