/*
 * Whole pages: copied, made narrow for where they go when they leave the device, and made wide again, and the norms of
 * what they have; and memory read as fast as it can be.
 */
#include "cuda/block.cuh"
#include "cuda/kv_narrow.cuh"

namespace GPU_NS
{

enum { PAGE_THREADS = 256, PAGE_BLOCKS = 16 };

/* ---- Copies; the list travels with the launch ---- */

__global__ void __launch_bounds__(PAGE_THREADS) copy_listed_pages(uint8_t *kv, size_t page_bytes, struct page_list list)
{
	const uint8_t *from = kv + list.from[blockIdx.x];
	uint8_t *to = kv + list.to[blockIdx.x];
	for (size_t i = (static_cast<size_t>(blockIdx.y) * PAGE_THREADS + threadIdx.x) * 16; i < page_bytes;
	     i += static_cast<size_t>(gridDim.y) * PAGE_THREADS * 16)
		stg<uint4>(to + i, ld_global<uint4>(from + i));
}

cudaError_t copy_pages(uint8_t *kv, size_t page_bytes, const struct page_list &list, int n, cudaStream_t stream)
{
	GPU_LAUNCH(copy_listed_pages, dim3(static_cast<unsigned>(n), PAGE_BLOCKS), dim3(PAGE_THREADS), 0, stream, kv,
		   page_bytes, list);
	return cudaGetLastError();
}

/* ---- Narrow forms of plain pages ---- */

/* A block has the 16 vectors of one layer, keys or values, and head, 16 lanes each. */
enum { VECTOR_LANES = PAGE_THREADS / PAGE_TOKENS };

template <enum kv_form form>
__global__ void __launch_bounds__(PAGE_THREADS) pack_vectors(const uint8_t *page, bool bf16, int n_head_kv,
                                                             int head_dim, float *scales, uint8_t *codes, uint32_t *odd)
{
	const int token = threadIdx.x / VECTOR_LANES, lane = threadIdx.x % VECTOR_LANES;
	const bool is_value = blockIdx.x / n_head_kv % 2;
	const size_t vector = static_cast<size_t>(blockIdx.x) * PAGE_TOKENS + token;
	const uint8_t *head = page + blockIdx.x * head_bytes(head_dim);
	const auto element = [&](int d) {
		return element_of(ld_global<uint16_t>(head + element_offset(is_value, head_dim, token, d)), bf16);
	};
	float largest = 0;
	for (int d = lane; d < head_dim; d += VECTOR_LANES)
		largest = fmaxf(largest, magnitude(element(d)));
	for (int apart = VECTOR_LANES / 2; apart; apart /= 2)
		largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, apart));
	if (largest == INFINITY) {
		if (lane == 0)
			atomicOr(odd, 1u);
		return;
	}
	const struct narrow_scale s = narrow_scale_of<form>(largest);
	for (int d = lane; d < head_dim; d += VECTOR_LANES)
		stg<uint8_t>(codes + vector * head_dim + d,
			     static_cast<uint8_t>(code_of<form>(__fmul_rn(element(d), s.inverse))));
	if (lane == 0)
		stg<float>(scales + vector, s.scale);
}

template <enum kv_form form>
__global__ void __launch_bounds__(PAGE_THREADS)
	unpack_vectors(const float *scales, const uint8_t *codes, int n_head_kv, int head_dim, uint8_t *page, bool bf16)
{
	const int token = threadIdx.x / VECTOR_LANES, lane = threadIdx.x % VECTOR_LANES;
	const bool is_value = blockIdx.x / n_head_kv % 2;
	const size_t vector = static_cast<size_t>(blockIdx.x) * PAGE_TOKENS + token;
	uint8_t *head = page + blockIdx.x * head_bytes(head_dim);
	const float scale = scales[vector];
	for (int d = lane; d < head_dim; d += VECTOR_LANES) {
		const float x = __fmul_rn(scale, value_of<form>(codes[vector * head_dim + d]));
		stg<uint16_t>(head + element_offset(is_value, head_dim, token, d),
			      bf16 ? static_cast<uint16_t>(bf16_bits(x)) : __half_as_ushort(__float2half_rn(x)));
	}
}

cudaError_t pack_page(enum kv_form form, const uint8_t *page, bool bf16, int n_layer, int n_head_kv, int head_dim,
		      uint8_t *packed, uint32_t *odd, cudaStream_t stream)
{
	const unsigned n_blocks = static_cast<unsigned>(2 * n_layer * n_head_kv);
	float *scales = reinterpret_cast<float *>(packed);
	uint8_t *codes = packed + static_cast<size_t>(n_blocks) * PAGE_TOKENS * sizeof *scales;
	if (form == KV_FORM_INT8)
		GPU_LAUNCH((pack_vectors<KV_FORM_INT8>), dim3(n_blocks), dim3(PAGE_THREADS), 0, stream, page, bf16,
			   n_head_kv, head_dim, scales, codes, odd);
	else
		GPU_LAUNCH((pack_vectors<KV_FORM_FP8_E4M3>), dim3(n_blocks), dim3(PAGE_THREADS), 0, stream, page,
			   bf16, n_head_kv, head_dim, scales, codes, odd);
	return cudaGetLastError();
}

cudaError_t unpack_page(enum kv_form form, const uint8_t *packed, int n_layer, int n_head_kv, int head_dim,
                        uint8_t *page, bool bf16, cudaStream_t stream)
{
	const unsigned n_blocks = static_cast<unsigned>(2 * n_layer * n_head_kv);
	const float *scales = reinterpret_cast<const float *>(packed);
	const uint8_t *codes = packed + static_cast<size_t>(n_blocks) * PAGE_TOKENS * sizeof *scales;
	if (form == KV_FORM_INT8)
		GPU_LAUNCH((unpack_vectors<KV_FORM_INT8>), dim3(n_blocks), dim3(PAGE_THREADS), 0, stream, scales, codes,
			   n_head_kv, head_dim, page, bf16);
	else
		GPU_LAUNCH((unpack_vectors<KV_FORM_FP8_E4M3>), dim3(n_blocks), dim3(PAGE_THREADS), 0, stream, scales,
			   codes, n_head_kv, head_dim, page, bf16);
	return cudaGetLastError();
}

/* ---- Wide copies of narrow pages ---- */

/* A block has a layer and head, keys and values, of one page. */
template <enum kv_form form>
__global__ void __launch_bounds__(PAGE_THREADS) widen_blocks(uint8_t *kv, struct page_list list, int n_head_kv,
                                                             int head_dim, size_t layer_bytes, size_t wide_layer_bytes)
{
	const int layer = blockIdx.x / n_head_kv, head = blockIdx.x % n_head_kv;
	const uint8_t *block = kv + list.from[blockIdx.y] + layer * layer_bytes + head * narrow_bytes(head_dim);
	uint8_t *wide = kv + list.to[blockIdx.y] + layer * wide_layer_bytes;
	for (int i = threadIdx.x; i < 2 * PAGE_TOKENS * head_dim; i += PAGE_THREADS) {
		const bool is_value = i >= PAGE_TOKENS * head_dim;
		const int d = i % head_dim, token = i / head_dim % PAGE_TOKENS;
		const int code_at = is_value ? value_code_offset(head_dim, token, d)
					     : key_code_offset(head_dim, token, d / 8 * 8) + d % 8;
		const uint32_t code = ld_global<uint8_t>(block + codes_offset(head_dim, is_value) + code_at) ^
				      (page_code_flip<form> & 0xffu);
		const float x =
			__fmul_rn(ld_global<float>(block + scale_offset(is_value, token)), value_of<form>(code));
		stg<uint16_t>(wide + head_offset(n_head_kv, head_dim, is_value, head) +
				      element_offset(is_value, head_dim, token, d),
			      __half_as_ushort(__float2half_rn(x)));
	}
}

cudaError_t fill_wide(enum kv_form form, uint8_t *kv, const struct page_list &list, int n, int n_layer, int n_head_kv,
                      int head_dim, size_t layer_bytes, size_t wide_layer_bytes, cudaStream_t stream)
{
	const dim3 grid(static_cast<unsigned>(n_layer * n_head_kv), static_cast<unsigned>(n)), block(PAGE_THREADS);
	if (form == KV_FORM_INT8)
		GPU_LAUNCH((widen_blocks<KV_FORM_INT8>), grid, block, 0, stream, kv, list, n_head_kv, head_dim,
		           layer_bytes, wide_layer_bytes);
	else
		GPU_LAUNCH((widen_blocks<KV_FORM_FP8_E4M3>), grid, block, 0, stream, kv, list, n_head_kv, head_dim,
			   layer_bytes, wide_layer_bytes);
	return cudaGetLastError();
}

/* ---- Norms ---- */

/* A block has a layer of a page: its keys, then its values. */
__global__ void __launch_bounds__(PAGE_THREADS)
	square_sums_of_layers(const uint8_t *kv, bool bf16, struct page_numbers list, size_t page_stride,
			      size_t layer_bytes, double *sums)
{
	GPU_SHARED(double, scratch, PAGE_THREADS / 32);
	const uint8_t *layer = kv + static_cast<size_t>(list.page[blockIdx.y]) * page_stride + blockIdx.x * layer_bytes;
	const size_t half = layer_bytes / 2;
	for (int what = 0; what < 2; what++) {
		double sum = 0;
		for (size_t at = threadIdx.x * 16; at < half; at += PAGE_THREADS * 16) {
			const uint4 eight = ldg_stream<uint4>(layer + what * half + at);
			const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
			for (int i = 0; i < 8; i++) {
				const double x = element_of(static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2)), bf16);
				sum += x * x;
			}
		}
		sum = block_sum<PAGE_THREADS>(sum, scratch);
		if (threadIdx.x == 0)
			sums[(static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x) * 2 + what] = sum;
	}
}

cudaError_t square_sums(const uint8_t *kv, bool bf16, const struct page_numbers &list, int n, int n_layer,
			size_t page_stride, size_t layer_bytes, double *sums, cudaStream_t stream)
{
	GPU_LAUNCH(square_sums_of_layers, dim3(static_cast<unsigned>(n_layer), static_cast<unsigned>(n)),
		   dim3(PAGE_THREADS), 0, stream, kv, bf16, list, page_stride, layer_bytes, sums);
	return cudaGetLastError();
}

/* ---- The measure of memory ---- */

enum { SCAN_THREADS = 512, SCAN_BLOCKS = 2048, SCAN_AHEAD = 4 };

__global__ void __launch_bounds__(SCAN_THREADS) scan_words(const uint8_t *p, size_t bytes, unsigned long long *sum)
{
	const size_t step = static_cast<size_t>(gridDim.x) * SCAN_THREADS * 16;
	unsigned long long mine = 0;
	for (size_t at = (static_cast<size_t>(blockIdx.x) * SCAN_THREADS + threadIdx.x) * 16; at < bytes;
	     at += SCAN_AHEAD * step) {
		uint4 x[SCAN_AHEAD];
#pragma unroll
		for (int i = 0; i < SCAN_AHEAD; i++)
			x[i] = at + i * step < bytes ? ldg_stream<uint4>(p + at + i * step) : uint4{0, 0, 0, 0};
#pragma unroll
		for (int i = 0; i < SCAN_AHEAD; i++)
			mine += (x[i].x | static_cast<unsigned long long>(x[i].y) << 32) +
				(x[i].z | static_cast<unsigned long long>(x[i].w) << 32);
	}
	for (int apart = 16; apart; apart /= 2)
		mine += __shfl_xor_sync(ALL, mine, apart);
	if (threadIdx.x % 32 == 0)
		atomicAdd(sum, mine);
}

cudaError_t scan(const uint8_t *p, size_t bytes, unsigned long long *sum, cudaStream_t stream)
{
	const size_t per_block = static_cast<size_t>(SCAN_THREADS) * 16 * SCAN_AHEAD;
	const size_t n = (bytes + per_block - 1) / per_block;
	const unsigned n_blocks = n < SCAN_BLOCKS ? static_cast<unsigned>(n) : static_cast<unsigned>(SCAN_BLOCKS);
	GPU_LAUNCH(scan_words, dim3(n_blocks), dim3(SCAN_THREADS), 0, stream, p, bytes, sum);
	return cudaGetLastError();
}

} // namespace GPU_NS
