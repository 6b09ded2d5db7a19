/*
 * The block formats of model files as device code: one struct per format, reading an element's parts from a row as it
 * lies in the file. Only loading and the embedding read files' blocks; products read the packed form of packed.cuh,
 * which is made from these. Layouts and formulas: engine/model/quant.c.
 *
 *   q(row, k)       the integer of element k, without its zero point
 *   value(row, k)   the element, in float, rounded as the reference dequantiser rounds
 *
 * and for packing, depending on the format's `scales` (see packed.cuh): d(), m() of a block of 32, or d(), dmin(),
 * scale() and min() of a block of 256 and a group in it.
 */
#pragma once

#include "cuda/gpu.cuh"

extern "C" {
#include "engine/model/quant.h"
}

namespace GPU_NS
{

__device__ __forceinline__ uint32_t load_u16(const uint8_t *p)
{
	return p[0] | static_cast<uint32_t>(p[1]) << 8;
}

__device__ __forceinline__ float load_half(const uint8_t *p)
{
	return __half2float(__ushort_as_half(static_cast<unsigned short>(load_u16(p))));
}

__device__ __forceinline__ uint32_t load_u32(const uint8_t *p)
{
	return load_u16(p) | load_u16(p + 2) << 16;
}

template <enum quant_type type> struct raw;

template <> struct raw<QUANT_F32> {
	static constexpr int block_elems = 1, block_bytes = 4;
	static __device__ __forceinline__ float value(const uint8_t *row, int k)
	{
		return __uint_as_float(load_u32(row + 4 * static_cast<size_t>(k)));
	}
};

template <> struct raw<QUANT_F16> {
	static constexpr int block_elems = 1, block_bytes = 2;
	static __device__ __forceinline__ float value(const uint8_t *row, int k)
	{
		return load_half(row + 2 * static_cast<size_t>(k));
	}
};

template <> struct raw<QUANT_BF16> {
	static constexpr int block_elems = 1, block_bytes = 2;
	static __device__ __forceinline__ float value(const uint8_t *row, int k)
	{
		return __uint_as_float(load_u16(row + 2 * static_cast<size_t>(k)) << 16);
	}
};

/* Q4_0, Q4_1, Q5_0, Q5_1: d, perhaps m, perhaps 32 high bits, 16 bytes of nibbles. */
template <int bytes, bool has_min, bool has_high> struct raw_nibbles {
	static constexpr int block_elems = 32, block_bytes = bytes;
	static constexpr int high_at = has_min ? 4 : 2, low_at = high_at + (has_high ? 4 : 0);

	static __device__ __forceinline__ const uint8_t *block(const uint8_t *row, int k)
	{
		return row + static_cast<size_t>(k / 32) * bytes;
	}
	static __device__ __forceinline__ uint32_t d(const uint8_t *row, int k)
	{
		return load_u16(block(row, k));
	}
	static __device__ __forceinline__ uint32_t m(const uint8_t *row, int k)
	{
		return has_min ? load_u16(block(row, k) + 2) : 0;
	}
	static __device__ __forceinline__ uint32_t q(const uint8_t *row, int k)
	{
		const uint8_t *b = block(row, k);
		const int e = k % 32;
		uint32_t q = b[low_at + e % 16] >> (e < 16 ? 0 : 4) & 15;
		if (has_high)
			q |= (load_u32(b + high_at) >> e & 1) << 4;
		return q;
	}
	static __device__ __forceinline__ float value(const uint8_t *row, int k)
	{
		const uint8_t *b = block(row, k);
		const int zero = has_min ? 0 : has_high ? 16 : 8;
		const float x = __fmul_rn(load_half(b), static_cast<float>(static_cast<int>(q(row, k)) - zero));
		return has_min ? __fadd_rn(x, load_half(b + 2)) : x;
	}
};

template <> struct raw<QUANT_Q4_0> : raw_nibbles<18, false, false> {
};
template <> struct raw<QUANT_Q4_1> : raw_nibbles<20, true, false> {
};
template <> struct raw<QUANT_Q5_0> : raw_nibbles<22, false, true> {
};
template <> struct raw<QUANT_Q5_1> : raw_nibbles<24, true, true> {
};

/* The integer is kept as q + 128. */
template <> struct raw<QUANT_Q8_0> {
	static constexpr int block_elems = 32, block_bytes = 34;
	static __device__ __forceinline__ const uint8_t *block(const uint8_t *row, int k)
	{
		return row + static_cast<size_t>(k / 32) * block_bytes;
	}
	static __device__ __forceinline__ uint32_t d(const uint8_t *row, int k)
	{
		return load_u16(block(row, k));
	}
	static __device__ __forceinline__ uint32_t m(const uint8_t *, int)
	{
		return 0;
	}
	static __device__ __forceinline__ uint32_t q(const uint8_t *row, int k)
	{
		return block(row, k)[2 + k % 32] ^ 0x80u;
	}
	static __device__ __forceinline__ float value(const uint8_t *row, int k)
	{
		return __fmul_rn(load_half(block(row, k)), static_cast<float>(static_cast<int>(q(row, k)) - 128));
	}
};

/* Two bits of 256 elements, as Q2_K and Q3_K lay them. */
__device__ __forceinline__ uint32_t two_bits(const uint8_t *qs, int e)
{
	return qs[32 * (e / 128) + e % 32] >> 2 * (e / 32 % 4) & 3;
}

template <> struct raw<QUANT_Q2_K> {
	static constexpr int block_elems = 256, block_bytes = 84;
	static __device__ __forceinline__ const uint8_t *block(const uint8_t *row, int k)
	{
		return row + static_cast<size_t>(k / 256) * block_bytes;
	}
	static __device__ __forceinline__ uint32_t d(const uint8_t *row, int k)
	{
		return load_u16(block(row, k) + 80);
	}
	static __device__ __forceinline__ uint32_t dmin(const uint8_t *row, int k)
	{
		return load_u16(block(row, k) + 82);
	}
	static __device__ __forceinline__ uint32_t scale(const uint8_t *row, int k)
	{
		return block(row, k)[k % 256 / 16] & 15;
	}
	static __device__ __forceinline__ uint32_t min(const uint8_t *row, int k)
	{
		return block(row, k)[k % 256 / 16] >> 4;
	}
	static __device__ __forceinline__ uint32_t q(const uint8_t *row, int k)
	{
		return two_bits(block(row, k) + 16, k % 256);
	}
	static __device__ __forceinline__ float value(const uint8_t *row, int k)
	{
		const uint8_t *b = block(row, k);
		const float s = __fmul_rn(load_half(b + 80), static_cast<float>(scale(row, k)));
		const float m = __fmul_rn(load_half(b + 82), static_cast<float>(min(row, k)));
		return __fsub_rn(__fmul_rn(s, static_cast<float>(q(row, k))), m);
	}
};

/* Integers are kept as q + 4; scales are signed. */
template <> struct raw<QUANT_Q3_K> {
	static constexpr int block_elems = 256, block_bytes = 110;
	static __device__ __forceinline__ const uint8_t *block(const uint8_t *row, int k)
	{
		return row + static_cast<size_t>(k / 256) * block_bytes;
	}
	static __device__ __forceinline__ uint32_t d(const uint8_t *row, int k)
	{
		return load_u16(block(row, k) + 108);
	}
	static __device__ __forceinline__ int scale(const uint8_t *row, int k)
	{
		const uint8_t *scales = block(row, k) + 96;
		const int i = k % 256 / 16;
		return static_cast<int>((scales[i % 8] >> 4 * (i / 8) & 15) | (scales[8 + i % 4] >> 2 * (i / 4) & 3)
										      << 4) -
		       32;
	}
	static __device__ __forceinline__ uint32_t q(const uint8_t *row, int k)
	{
		const uint8_t *b = block(row, k);
		const int e = k % 256;
		return two_bits(b + 32, e) | (static_cast<uint32_t>(b[e % 32]) >> e / 32 & 1) << 2;
	}
	static __device__ __forceinline__ float value(const uint8_t *row, int k)
	{
		const float s = __fmul_rn(load_half(block(row, k) + 108), static_cast<float>(scale(row, k)));
		return __fmul_rn(s, static_cast<float>(static_cast<int>(q(row, k)) - 4));
	}
};

/* Q4_K and Q5_K: d, dmin, 12 bytes of six-bit scales and mins, perhaps 32 bytes of high bits, 128 of nibbles. */
template <int bytes, bool has_high> struct raw_k32 {
	static constexpr int block_elems = 256, block_bytes = bytes;
	static __device__ __forceinline__ const uint8_t *block(const uint8_t *row, int k)
	{
		return row + static_cast<size_t>(k / 256) * bytes;
	}
	static __device__ __forceinline__ uint32_t d(const uint8_t *row, int k)
	{
		return load_u16(block(row, k));
	}
	static __device__ __forceinline__ uint32_t dmin(const uint8_t *row, int k)
	{
		return load_u16(block(row, k) + 2);
	}
	static __device__ __forceinline__ uint32_t scale(const uint8_t *row, int k)
	{
		const uint8_t *a = block(row, k) + 4;
		const int i = k % 256 / 32;
		return i < 4 ? a[i] & 63u : (a[i + 4] & 15u) | (a[i - 4] >> 6 << 4);
	}
	static __device__ __forceinline__ uint32_t min(const uint8_t *row, int k)
	{
		const uint8_t *a = block(row, k) + 4;
		const int i = k % 256 / 32;
		return i < 4 ? a[i + 4] & 63u : (a[i + 4] >> 4) | (a[i] >> 6 << 4);
	}
	static __device__ __forceinline__ uint32_t q(const uint8_t *row, int k)
	{
		const uint8_t *b = block(row, k);
		const int e = k % 256, group = e / 32;
		uint32_t q = b[(has_high ? 48 : 16) + 32 * (group / 2) + e % 32] >> 4 * (group % 2) & 15;
		if (has_high)
			q |= (static_cast<uint32_t>(b[16 + e % 32]) >> group & 1) << 4;
		return q;
	}
	static __device__ __forceinline__ float value(const uint8_t *row, int k)
	{
		const uint8_t *b = block(row, k);
		const float s = __fmul_rn(load_half(b), static_cast<float>(scale(row, k)));
		const float m = __fmul_rn(load_half(b + 2), static_cast<float>(min(row, k)));
		return __fsub_rn(__fmul_rn(s, static_cast<float>(q(row, k))), m);
	}
};

template <> struct raw<QUANT_Q4_K> : raw_k32<144, false> {
};
template <> struct raw<QUANT_Q5_K> : raw_k32<176, true> {
};

/* Integers are kept as q + 32; scales are signed. */
template <> struct raw<QUANT_Q6_K> {
	static constexpr int block_elems = 256, block_bytes = 210;
	static __device__ __forceinline__ const uint8_t *block(const uint8_t *row, int k)
	{
		return row + static_cast<size_t>(k / 256) * block_bytes;
	}
	static __device__ __forceinline__ uint32_t d(const uint8_t *row, int k)
	{
		return load_u16(block(row, k) + 208);
	}
	static __device__ __forceinline__ int scale(const uint8_t *row, int k)
	{
		return static_cast<int8_t>(block(row, k)[192 + k % 256 / 16]);
	}
	static __device__ __forceinline__ uint32_t q(const uint8_t *row, int k)
	{
		const uint8_t *b = block(row, k);
		const int e = k % 256, h = e / 128, part = e / 32 % 4, l = e % 32;
		return (b[64 * h + 32 * (part % 2) + l] >> 4 * (part / 2) & 15) |
		       (static_cast<uint32_t>(b[128 + 32 * h + l]) >> 2 * part & 3) << 4;
	}
	static __device__ __forceinline__ float value(const uint8_t *row, int k)
	{
		const float s = __fmul_rn(load_half(block(row, k) + 208), static_cast<float>(scale(row, k)));
		return __fmul_rn(s, static_cast<float>(static_cast<int>(q(row, k)) - 32));
	}
};

/* Calls f.template run<type>() for the format, a type only known at run time. */
template <typename F> auto with_type(enum quant_type type, const F &f)
{
	switch (type) {
	case QUANT_F32:
		return f.template run<QUANT_F32>();
	case QUANT_F16:
		return f.template run<QUANT_F16>();
	case QUANT_BF16:
		return f.template run<QUANT_BF16>();
	case QUANT_Q4_0:
		return f.template run<QUANT_Q4_0>();
	case QUANT_Q4_1:
		return f.template run<QUANT_Q4_1>();
	case QUANT_Q5_0:
		return f.template run<QUANT_Q5_0>();
	case QUANT_Q5_1:
		return f.template run<QUANT_Q5_1>();
	case QUANT_Q8_0:
		return f.template run<QUANT_Q8_0>();
	case QUANT_Q2_K:
		return f.template run<QUANT_Q2_K>();
	case QUANT_Q3_K:
		return f.template run<QUANT_Q3_K>();
	case QUANT_Q4_K:
		return f.template run<QUANT_Q4_K>();
	case QUANT_Q5_K:
		return f.template run<QUANT_Q5_K>();
	case QUANT_Q6_K:
		break;
	}
	return f.template run<QUANT_Q6_K>();
}

} // namespace GPU_NS
