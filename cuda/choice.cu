/*
 * Rows that choose the pages they read (struct page_choice of backend.h): the bounds of pages, what they promise a
 * row's queries, and the choice. What a row and KV head choose becomes a list of entries of its block table, over which
 * attention.cuh runs as over the table of a conversation that has no other pages. Nothing of it passes through the
 * host, so a graph can have it.
 *
 * The order among pages is the host's (engine/cpu/choice.c): of equals the earlier, and first those whose bound is no
 * number.
 */
#include "cuda/block.cuh"
#include "cuda/kv_operand.cuh"
#include "cuda/promise.cuh"

namespace GPU_NS
{

/* ---- Bounds ---- */

enum { BOUND_WARPS = 4 };

/* Halves and bfloat16s in the order of integers, NaNs beyond all others; the same again is the way back. */
__device__ __forceinline__ int sortable(uint32_t bits)
{
	const int x = static_cast<int16_t>(bits);
	return x < 0 ? x ^ 0x7fff : x;
}

/*
 * Bits of keys of tokens g and g + 8, 8 of 32 elements, in the type of the layout: of narrow pages what a wide copy
 * would have.
 */
template <enum kv_form form>
__device__ __forceinline__ void keys_as_elements(const struct page_place &page, int block, int head_dim, int lane,
						 uint32_t (&bits)[2][8])
{
	if (page.wide) {
		const struct key_block k = load_key(block, head_dim, lane, load_global{page.keys});
#pragma unroll
		for (int i = 0; i < 2; i++) {
			const uint32_t pairs[4] = {k.token[i].x, k.token[i].y, k.token[i].z, k.token[i].w};
#pragma unroll
			for (int e = 0; e < 8; e++)
				bits[i][e] = pairs[e / 2] >> 16 * (e % 2) & 0xffff;
		}
	} else if constexpr (!is_plain(form)) {
		const float4 scale = ldg_stream<float4>(page.keys + scale_offset(0, lane / 4));
		const uint4 k =
			load_key_codes(block, head_dim, lane, load_global{page.keys + codes_offset(head_dim, 0)});
		const uint32_t fours[2][2] = {{k.x, k.y}, {k.z, k.w}};
#pragma unroll
		for (int i = 0; i < 2; i++)
#pragma unroll
			for (int e = 0; e < 8; e++) {
				const uint32_t code = (fours[i][e / 4] ^ page_code_flip<form>) >> 8 * (e % 4) & 0xff;
				const float x = __fmul_rn(i ? scale.y : scale.x, value_of<form>(code));
				bits[i][e] = __half_as_ushort(__float2half_rn(held(x)));
			}
	}
}

/* A warp has the keys of a layer and head of one page. */
template <enum kv_form form>
__global__ void __launch_bounds__(32 * BOUND_WARPS)
	bound_keys(struct bound_args a, struct page_numbers list, struct page_numbers slots)
{
	const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, index = blockIdx.x * BOUND_WARPS + warp;
	if (index >= a.n_layer * a.n_head_kv)
		return;
	const int layer = index / a.n_head_kv, head = index % a.n_head_kv, head_dim = a.head_dim;
	struct attention_args pages = {};
	pages.kv = a.kv;
	pages.place = a.place;
	pages.place.layer_offset = layer * a.layer_bytes;
	pages.place.wide_layer_offset = layer * a.wide_layer_bytes;
	pages.n_head_kv = a.n_head_kv;
	const int32_t number = list.page[blockIdx.y];
	const struct page_place page = place_of<form>(pages, head_dim, head, number, slots.page[blockIdx.y]);
	uint16_t *to = a.bounds + (static_cast<size_t>(index) * a.n_pages + number) * 2 * head_dim;
	for (int block = 0; 32 * block < head_dim; block++) {
		uint32_t bits[2][8], least[4], greatest[4];
		keys_as_elements<form>(page, block, head_dim, lane, bits);
		const auto lower = [](uint32_t p, uint32_t q) {
			return static_cast<uint32_t>(min(static_cast<int>(static_cast<int16_t>(p)),
							 static_cast<int>(static_cast<int16_t>(q))) &
						     0xffff) |
			       static_cast<uint32_t>(min(static_cast<int>(p) >> 16, static_cast<int>(q) >> 16)) << 16;
		};
		const auto higher = [](uint32_t p, uint32_t q) {
			return static_cast<uint32_t>(max(static_cast<int>(static_cast<int16_t>(p)),
							 static_cast<int>(static_cast<int16_t>(q))) &
						     0xffff) |
			       static_cast<uint32_t>(max(static_cast<int>(p) >> 16, static_cast<int>(q) >> 16)) << 16;
		};
#pragma unroll
		for (int i = 0; i < 4; i++) {
			uint32_t pair[2];
#pragma unroll
			for (int token = 0; token < 2; token++)
				pair[token] = static_cast<uint32_t>(sortable(bits[token][2 * i]) & 0xffff) |
					      static_cast<uint32_t>(sortable(bits[token][2 * i + 1])) << 16;
			least[i] = lower(pair[0], pair[1]);
			greatest[i] = higher(pair[0], pair[1]);
			for (int apart = 4; apart < 32; apart *= 2) {
				least[i] = lower(least[i], __shfl_xor_sync(ALL, least[i], apart));
				greatest[i] = higher(greatest[i], __shfl_xor_sync(ALL, greatest[i], apart));
			}
			const auto back = [](uint32_t pair_of) {
				return static_cast<uint32_t>(sortable(pair_of & 0xffff) & 0xffff) |
				       static_cast<uint32_t>(sortable(pair_of >> 16)) << 16;
			};
			least[i] = back(least[i]);
			greatest[i] = back(greatest[i]);
		}
		const int d = 32 * block + lane % 4 * 8;
		if (lane < 4 && d < head_dim)
			stg<uint4>(to + d, uint4{least[0], least[1], least[2], least[3]});
		else if (lane < 8 && lane >= 4 && d < head_dim)
			stg<uint4>(to + head_dim + d, uint4{greatest[0], greatest[1], greatest[2], greatest[3]});
	}
}

cudaError_t bound_pages(const struct bound_args &a, const struct page_numbers &list, const struct page_numbers &slots,
			int n, cudaStream_t stream)
{
	const dim3 grid(static_cast<unsigned>((a.n_layer * a.n_head_kv + BOUND_WARPS - 1) / BOUND_WARPS),
			static_cast<unsigned>(n));
	const dim3 block(32 * BOUND_WARPS);
	switch (a.place.form) {
	case KV_FORM_INT8:
		GPU_LAUNCH((bound_keys<KV_FORM_INT8>), grid, block, 0, stream, a, list, slots);
		break;
	case KV_FORM_FP8_E4M3:
		GPU_LAUNCH((bound_keys<KV_FORM_FP8_E4M3>), grid, block, 0, stream, a, list, slots);
		break;
	default: /* bounds of bfloat16s are found as those of halves are */
		GPU_LAUNCH((bound_keys<KV_FORM_F16>), grid, block, 0, stream, a, list, slots);
	}
	return cudaGetLastError();
}

/*
 * blockIdx.x: the row that chooses, and KV head; blockIdx.y: a run of its pages. One that is there to fill a graph's
 * shape has none.
 */
__global__ void __launch_bounds__(SCORE_THREADS) score_pages(struct choice_args a)
{
	const struct chooser who = a.choosers[blockIdx.x / a.n_head_kv];
	const int head_kv = blockIdx.x % a.n_head_kv, group = a.n_head / a.n_head_kv;
	const size_t of_page = 2 * static_cast<size_t>(a.head_dim);
	if (who.n_pages == 0)
		return;
	score_run({a.bounds + static_cast<size_t>(head_kv) * a.n_pages * of_page, of_page, a.bf16},
		  {a.q + (static_cast<size_t>(who.row) * a.n_head + head_kv * group) * a.head_dim, group, a.head_dim},
		  who.n_first, who.own + 1 - who.n_last, a.scores + static_cast<size_t>(blockIdx.x) * a.most,
		  [&](int i) { return a.table[who.table + i]; });
}

/* ---- The choice ---- */

enum { CHOOSE_THREADS = 256, CHOOSE_WARPS = CHOOSE_THREADS / 32 };

/* Floats in the order of integers, a NaN above all. */
__device__ __forceinline__ uint32_t rank_of(float x)
{
	const uint32_t bits = __float_as_uint(x);
	return x != x ? UINT32_MAX : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/*
 * Sums of v over the threads before this one and over all of them. scratch: [CHOOSE_WARPS], free behind the next
 * barrier.
 */
struct running {
	int before, all;
};

__device__ __forceinline__ struct running count_up(int v, shared_span<int> scratch)
{
	const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	int sum = v;
	for (int apart = 1; apart < 32; apart *= 2) {
		const int from = __shfl_up_sync(ALL, sum, static_cast<unsigned>(apart));
		sum += lane >= apart ? from : 0;
	}
	__syncthreads();
	if (lane == 31)
		scratch[warp] = sum;
	__syncthreads();
	struct running r = {sum - v, 0};
	for (int i = 0; i < CHOOSE_WARPS; i++) {
		const int of_warp = scratch[i];
		r.before += i < warp ? of_warp : 0;
		r.all += of_warp;
	}
	return r;
}

/* A block has a row and KV head. The rank of the worst page that is taken is found from its highest byte down. */
__global__ void __launch_bounds__(CHOOSE_THREADS) choose_best(struct choice_args a)
{
	GPU_SHARED(int, count, 256);
	GPU_SHARED(int, scratch, CHOOSE_WARPS);
	GPU_SHARED(int, found, 2); /* a byte, and how many pages are left to be taken of those that have it */
	const struct chooser who = a.choosers[blockIdx.x / a.n_head_kv];
	const int tid = threadIdx.x, first = who.n_first, end = who.own + 1 - who.n_last;
	const float *score = a.scores + static_cast<size_t>(blockIdx.x) * a.most;
	int32_t *to = a.chosen + who.chosen + static_cast<size_t>(blockIdx.x % a.n_head_kv) * who.n_pages;
	int left = who.n_pages - first - who.n_last;
	uint32_t worst = 0;
	if (who.n_pages == 0)
		return;
	for (int shift = 24; shift >= 0; shift -= 8) {
		count[tid] = 0;
		__syncthreads();
		for (int i = first + tid; i < end; i += CHOOSE_THREADS) {
			const uint32_t r = rank_of(ld_global<float>(score + i));
			if (shift == 24 || (r ^ worst) >> (shift + 8) == 0)
				atomicAdd(count + (255 - (r >> shift & 255)), 1);
		}
		__syncthreads();
		const int mine = count[tid];
		const struct running sum = count_up(mine, scratch);
		if ((tid == 0 || sum.before < left) && sum.before + mine >= left) {
			found[0] = 255 - tid;
			found[1] = left - sum.before;
		}
		__syncthreads();
		const int byte = found[0];
		worst |= static_cast<uint32_t>(byte) << shift;
		left = found[1];
		__syncthreads();
	}
	for (int i = tid; i < first; i += CHOOSE_THREADS)
		to[i] = who.table + i;
	int taken = first, equals = 0; /* before this round */
	for (int begin = first; begin < end; begin += CHOOSE_THREADS) {
		const int i = begin + tid;
		const uint32_t r = i < end ? rank_of(ld_global<float>(score + i)) : 0;
		const bool better = i < end && r > worst, equal = i < end && r == worst;
		const struct running e = count_up(equal, scratch);
		const bool take = better || (equal && equals + e.before < left);
		const struct running t = count_up(take, scratch);
		if (take)
			to[taken + t.before] = who.table + i;
		taken += t.all;
		equals += e.all;
	}
	for (int i = tid; i < who.n_last; i += CHOOSE_THREADS)
		to[who.n_pages - who.n_last + i] = who.table + end + i;
}

static cudaError_t choose_some(const struct choice_args &a, cudaStream_t stream)
{
	const unsigned heads = static_cast<unsigned>(a.n_choosers * a.n_head_kv);
	GPU_LAUNCH(score_pages, dim3(heads, score_runs(a.most)), dim3(SCORE_THREADS), 0, stream, a);
	const cudaError_t e = cudaGetLastError();
	if (e != cudaSuccess)
		return e;
	GPU_LAUNCH(choose_best, dim3(heads), dim3(CHOOSE_THREADS), 0, stream, a);
	return cudaGetLastError();
}

cudaError_t choose_pages(const struct choice_args &a, cudaStream_t stream)
{
	cudaError_t e = cudaSuccess;
	for (int at = 0; at < a.n_choosers && e == cudaSuccess; at += CHOOSERS_AT_ONCE) {
		struct choice_args some = a;
		some.choosers += at;
		some.n_choosers =
			a.n_choosers - at < CHOOSERS_AT_ONCE ? a.n_choosers - at : static_cast<int>(CHOOSERS_AT_ONCE);
		e = choose_some(some, stream);
	}
	return e;
}

} // namespace GPU_NS
