/*
 * Weights from the file's form to the packed one, on the device, and rows of either form as floats for the embedding.
 */
#include "cuda/kernels.cuh"
#include "cuda/packed.cuh"

namespace GPU_NS
{

enum { PACK_WARPS = 4 };

__device__ __forceinline__ uint32_t half_bits(float x)
{
	/* A half has no room above 65504; weights stay finite. */
	const float y = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
	return __half_as_ushort(__float2half_rn(y));
}

/*
 * One warp packs a unit. rows: the raw rows of `first_tile` and those after it, n_rows of them in the matrix from
 * there.
 */
template <enum quant_type type>
__global__ void __launch_bounds__(32 * PACK_WARPS, 4)
	pack_units(const uint8_t *rows, size_t row_bytes, int n_rows, int n_in, int n_units, int n_tiles, uint8_t *out)
{
	using form = packed_of<type>;
	using file = raw<type>;
	const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const long long item = static_cast<long long>(blockIdx.x) * PACK_WARPS + threadIdx.x / 32;
	if (item >= static_cast<long long>(n_tiles) * n_units)
		return;
	const int tile = static_cast<int>(item / n_units), first_k = static_cast<int>(item % n_units) * form::unit;
	uint8_t *u = out + static_cast<size_t>(item) * form::unit_bytes;

	for (int step = 0; step < form::steps; step++) {
		uint32_t low[form::low_bits] = {0}, high[form::high_bits ? form::high_bits : 1] = {0};
#pragma unroll /* constant indices: registers */
		for (int i = 0; i < 32; i++) {
			const int j = i / 8, n = i / 2 % 4, e = i % 2;
			const int row = tile * TILE_OUTPUTS + g + 8 * (n % 2);
			const int k = first_k + step * STEP_INPUTS + 16 * t + 4 * j + 2 * (n / 2) + e;
			if (row >= n_rows || k >= n_in)
				continue;
			const uint8_t *p = rows + static_cast<size_t>(row) * row_bytes;
			if constexpr (form::low_bits >= 16) {
				const float x = file::value(p, k);
				const uint32_t top = half_bits(x);
				low[4 * j + n] |= top << 16 * e;
				if constexpr (form::planes == 2)
					low[16 + 4 * j + n] |= half_bits(x - __half2float(__ushort_as_half(
										     static_cast<unsigned short>(top))))
							       << 16 * e;
			} else {
				const uint32_t q = file::q(p, k);
				if constexpr (form::low_bits == 8)
					low[2 * j + n / 2] |= q << (16 * (n % 2) + 8 * e);
				else if constexpr (form::low_bits == 4)
					low[j] |= (q & 15) << (4 * n + 16 * e);
				else
					low[j / 2] |= (q & 3) << (2 * (4 * (j % 2) + n) + 16 * e);
				if constexpr (form::high_bits == 1)
					high[0] |= (q >> form::low_bits) << (4 * j + n + 16 * e);
				if constexpr (form::high_bits == 2)
					high[j / 2] |= (q >> form::low_bits) << (2 * (4 * (j % 2) + n) + 16 * e);
			}
		}
#pragma unroll
		for (int i = 0; i < form::low_bits; i++) {
			const int at = form::low_bits == 2 ? lane * 8 + 4 * i : i / 4 * 512 + lane * 16 + i % 4 * 4;
			stg<uint32_t>(u + step * form::step_bytes + at, low[i]);
		}
#pragma unroll
		for (int i = 0; i < form::high_bits; i++) {
			const int word = step * form::high_bits + i;
			stg<uint32_t>(u + form::high_at + word / 4 * 512 + lane * 16 + word % 4 * 4, high[i]);
		}
	}

	if constexpr (form::scales != SCALE_NONE)
		for (int step = 0; step < form::steps; step++)
			for (int o = 0; o < 2; o++) {
				const int row = tile * TILE_OUTPUTS + g + 8 * o;
				const int k = first_k + step * STEP_INPUTS + 16 * t;
				const bool inside = row < n_rows && k < n_in;
				const uint8_t *p = rows + (inside ? static_cast<size_t>(row) * row_bytes : 0);
				uint8_t *s = u + form::scale_at;
				const int pair = lane / 2, both = 2 * step + o;
				if constexpr (form::scales == SCALE_HALF32 || form::scales == SCALE_HALF32_M) {
					const uint32_t d = inside ? file::d(p, k) : 0, m = inside ? file::m(p, k) : 0;
					if (t % 2)
						continue;
					if constexpr (form::scales == SCALE_HALF32)
						stg<uint16_t>(s + pair * 16 + 2 * both, static_cast<uint16_t>(d));
					else
						stg<uint32_t>(s + step / 2 * 256 + pair * 16 + 4 * (2 * (step % 2) + o),
							      d | m << 16);
				} else if constexpr (form::scales == SCALE_K32) {
					const uint32_t x = inside ? file::scale(p, k) | file::min(p, k) << 8 : 0;
					if (t % 2 == 0)
						stg<uint16_t>(s + pair * 16 + 2 * both, static_cast<uint16_t>(x));
				} else if constexpr (form::scales == SCALE_K16_M) {
					const uint32_t x = inside ? file::scale(p, k) | file::min(p, k) << 4 : 0;
					stg<uint8_t>(s + lane * 8 + both, static_cast<uint8_t>(x));
				} else {
					const int x = inside ? file::scale(p, k) + 128 : 0;
					stg<uint8_t>(s + lane * 8 + both, static_cast<uint8_t>(x));
				}
			}

	if constexpr (form::d_bytes > 0)
		for (int o = 0; o < 2; o++) {
			const int row = tile * TILE_OUTPUTS + g + 8 * o;
			const bool inside = row < n_rows && first_k < n_in;
			const uint8_t *p = rows + (inside ? static_cast<size_t>(row) * row_bytes : 0);
			if (t != 0)
				continue;
			if constexpr (form::scales == SCALE_K16)
				stg<uint16_t>(u + form::d_at + g * 4 + 2 * o,
					      static_cast<uint16_t>(inside ? file::d(p, first_k) : 0));
			else
				stg<uint32_t>(u + form::d_at + g * 8 + 4 * o,
					      inside ? file::d(p, first_k) | file::dmin(p, first_k) << 16 : 0);
		}
}

struct pack_launch {
	const struct pack_args *a;
	cudaStream_t stream;
	template <enum quant_type type> cudaError_t run() const
	{
		const long long items = static_cast<long long>(a->n_tiles) * a->n_units;
		const unsigned blocks = static_cast<unsigned>((items + PACK_WARPS - 1) / PACK_WARPS);
		GPU_LAUNCH((pack_units<type>), dim3(blocks), dim3(32 * PACK_WARPS), 0, stream, a->rows, a->row_bytes,
			   a->n_rows, a->n_in, a->n_units, a->n_tiles, a->out);
		return cudaGetLastError();
	}
};

cudaError_t pack(enum quant_type type, const struct pack_args &a, cudaStream_t stream)
{
	return with_type(type, pack_launch{&a, stream});
}

struct form_of {
	template <enum quant_type type> struct packed_form run() const
	{
		return {packed_of<type>::unit, packed_of<type>::unit_bytes};
	}
};

struct packed_form packed_form(enum quant_type type)
{
	return with_type(type, form_of{});
}

/* ---- Embedding ---- */

enum { EMBED_THREADS = 128 };

template <enum quant_type type>
__global__ void __launch_bounds__(EMBED_THREADS)
	embed_raw(const uint8_t *rows, size_t row_bytes, const int32_t *token, int n_in, float scale,
		  float *out)
{
	const uint8_t *row = rows + static_cast<size_t>(token[blockIdx.x]) * row_bytes;
	float *to = out + static_cast<size_t>(blockIdx.x) * n_in;
	for (int k = threadIdx.x + blockIdx.y * EMBED_THREADS; k < n_in; k += EMBED_THREADS * gridDim.y)
		to[k] = raw<type>::value(row, k) * scale;
}

/*
 * A matrix that products read as well is kept in the packed form alone: a thread takes the part of a product that it
 * owns.
 */
template <enum quant_type type>
__global__ void __launch_bounds__(EMBED_THREADS)
	embed_packed(const uint8_t *data, int n_units, const int32_t *token, int n_in, float scale,
		  float *out)
{
	using form = packed_of<type>;
	const int row = token[blockIdx.x], r = row % TILE_OUTPUTS;
	const uint8_t *tile = data + static_cast<size_t>(row / TILE_OUTPUTS) * n_units * form::unit_bytes;
	float *to = out + static_cast<size_t>(blockIdx.x) * n_in;
	for (int i = threadIdx.x + blockIdx.y * EMBED_THREADS; i < n_units * form::steps * 4;
	     i += EMBED_THREADS * gridDim.y) {
		const int unit = i / (form::steps * 4), step = i / 4 % form::steps, t = i % 4, lane = r % 8 * 4 + t;
		const uint8_t *u = tile + static_cast<size_t>(unit) * form::unit_bytes;
		const typename form::meta meta = form::load_meta(u, lane);
		const typename form::low low = form::load_low(u, step, lane);
		float x[16];
#pragma unroll /* constant indices keep meta and x in registers */
		for (int s = 0; s < form::steps; s++)
			if (s == step) {
				const step_scale by = form::scale(meta, s);
#pragma unroll
				for (int j = 0; j < STEP_PRODUCTS; j++)
#pragma unroll
					for (int plane = 0; plane < form::planes; plane++) {
						uint32_t a[4];
						form::fragment(low, meta, by, s, j, plane, a);
#pragma unroll
						for (int half = 0; half < 2; half++) {
							const uint32_t pair = r < 8 ? a[2 * half] : a[2 * half + 1];
							const float2 v = __half22float2(as_half2(pair));
							float *to_x = x + 4 * j + 2 * half;
							to_x[0] = v.x + (plane ? to_x[0] : 0.0f);
							to_x[1] = v.y + (plane ? to_x[1] : 0.0f);
						}
					}
			}
		const int k = unit * form::unit + step * STEP_INPUTS + 16 * t;
#pragma unroll
		for (int e = 0; e < 16; e++)
			if (k + e < n_in)
				to[k + e] = x[e] * scale;
	}
}

struct embed_launch {
	const struct embed_args *a;
	cudaStream_t stream;
	template <enum quant_type type> cudaError_t run() const
	{
		const dim3 grid(static_cast<unsigned>(a->n_rows), a->raw ? 4 : 2);
		if (a->raw)
			GPU_LAUNCH((embed_raw<type>), grid, dim3(EMBED_THREADS), 0, stream, a->raw, a->row_bytes,
				   a->token, a->n_in, a->scale, a->out);
		else
			GPU_LAUNCH((embed_packed<type>), grid, dim3(EMBED_THREADS), 0, stream, a->packed, a->n_units,
				   a->token, a->n_in, a->scale, a->out);
		return cudaGetLastError();
	}
};

cudaError_t embed(enum quant_type type, const struct embed_args &a, cudaStream_t stream)
{
	return with_type(type, embed_launch{&a, stream});
}

} // namespace GPU_NS
