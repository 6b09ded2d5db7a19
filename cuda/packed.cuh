/*
 * Weights as products read them: every lane of a warp loads 16 bytes and has exactly the elements it passes to the
 * tensor core.
 *
 * A matrix is cut into tiles of 16 outputs, a tile into units of `unit` inputs, a unit into steps of 64 inputs. A step
 * is four products m16n8k16 with the weights as the left operand. Which inputs a product takes is free, as long as both
 * operands agree: lane (g, t) = (lane / 4, lane % 4) owns inputs 16t .. 16t + 15 of a step, for outputs g and g + 8,
 * and product j of the step takes
 *
 *     a0, a1 (outputs g, g + 8): inputs 16t + 4j, 16t + 4j + 1        b0: the same inputs of row g of the activations
 *     a2, a3 (outputs g, g + 8): inputs 16t + 4j + 2, 16t + 4j + 3    b1: likewise
 *
 * So the right operand of a lane is 32 contiguous bytes of a row of halves, and all the elements of a lane share one
 * scale, whether scales come per 16 or per 32 inputs.
 *
 * A unit is: the low bits of its steps [step][chunk][lane] 16 bytes (8 for two-bit formats); high bits [chunk][lane] 16
 * bytes; scales; and the scales' own scale. It takes the bytes of the file's blocks, give or take 3%: six-bit scales
 * become bytes. Outputs and inputs that pad a matrix to whole units are zeros.
 *
 * Elements become halves: integer minus zero point, exactly, times the scale, minus the minimum, each rounded to a
 * half. Floats become a half and the half that is nearest to the rest, and take two products.
 */
#pragma once

#include "cuda/quant.cuh"

namespace GPU_NS
{

enum scale_kind {
	SCALE_NONE,
	SCALE_HALF32,	/* d per 32: [g][t / 2][step][2 outputs] half */
	SCALE_HALF32_M, /* d, m per 32: [step / 2][g][t / 2][step % 2][2 outputs] (d, m) */
	SCALE_K32,   /* scale, min per 32: [g][t / 2][step][2 outputs] (s, m) bytes; d, dmin: [g][2 outputs] (d, dmin)
			halves */
	SCALE_K16_M, /* scale | min << 4 per 16: [lane][step][2 outputs] byte; d, dmin as in SCALE_K32 */
	SCALE_K16,   /* scale + 128 per 16: [lane][step][2 outputs] byte; d: [g][2 outputs] half */
};

enum { TILE_OUTPUTS = 16, STEP_INPUTS = 64, STEP_PRODUCTS = 4 };

__device__ __forceinline__ __half2 as_half2(uint32_t u)
{
	__half2 h;
	memcpy(&h, &u, sizeof h);
	return h;
}

__device__ __forceinline__ uint32_t as_u32(__half2 h)
{
	uint32_t u;
	memcpy(&u, &h, sizeof u);
	return u;
}

/* 1024 + n as halves, for n < 1024 in both halves of u. */
__device__ __forceinline__ __half2 integers(uint32_t u, float zero)
{
	return __hsub2(as_half2(u | 0x64006400u), __float2half2_rn(1024.0f + zero));
}

/* What all elements of a lane in a step share, for outputs g and g + 8. */
struct step_scale {
	__half2 s[2], m[2]; /* an element is q * s + m */
};

template <int low_bits_, int high_bits_, enum scale_kind scales_, int zero_>
struct packed {
	static constexpr int low_bits = low_bits_, high_bits = high_bits_, zero = zero_;
	static constexpr enum scale_kind scales = scales_;
	static constexpr bool has_min = scales == SCALE_HALF32_M || scales == SCALE_K32 || scales == SCALE_K16_M;
	static constexpr int steps = low_bits == 32   ? 1
				     : low_bits == 16 ? 2
						      : 4;
	static constexpr int planes = low_bits == 32 ? 2 : 1; /* products per j */
	static constexpr int unit = steps * STEP_INPUTS; static constexpr int step_bytes = 32 * 4 * low_bits;
	static constexpr int high_at = steps * step_bytes; static constexpr int scale_at = high_at + 512 * high_bits;
	static constexpr int scale_bytes = scales == SCALE_NONE	      ? 0
					   : scales == SCALE_HALF32_M ? 512
								      : 256;
	static constexpr int d_at = scale_at + scale_bytes;
	static constexpr int d_bytes = scales == SCALE_K32 || scales == SCALE_K16_M ? 64
				       : scales == SCALE_K16			    ? 32
										    : 0;
	static constexpr int unit_bytes = d_at + d_bytes;

	/* Low bits of a step: what a lane loads, 4 * low_bits bytes. */
	struct low{uint32_t v[low_bits];};

/* The rest of a unit. */
struct meta {
	uint32_t high[high_bits ? 4 * high_bits : 1];
	uint32_t scale[scales == SCALE_HALF32_M ? 8 : 4];
	uint32_t d[2];
};

static __device__ __forceinline__ low load_low(const uint8_t *unit_data, int step, int lane)
{
	low l;
	const uint8_t *p = unit_data + step * step_bytes;
	if constexpr (low_bits == 2) {
		const uint2 v = ldg_stream<uint2>(p + lane * 8);
		l.v[0] = v.x;
		l.v[1] = v.y;
	} else {
#pragma unroll
		for (int c = 0; c < low_bits / 4; c++) {
			const uint4 v = ldg_stream<uint4>(p + c * 512 + lane * 16);
			l.v[4 * c] = v.x;
			l.v[4 * c + 1] = v.y;
			l.v[4 * c + 2] = v.z;
			l.v[4 * c + 3] = v.w;
		}
	}
	return l;
}

static __device__ __forceinline__ void load4(uint32_t *out, const uint8_t *p)
{
	const uint4 v = ldg_stream<uint4>(p);
	out[0] = v.x;
	out[1] = v.y;
	out[2] = v.z;
	out[3] = v.w;
}

/* Formats of whole halves only: the elements of products 2 * half and 2 * half + 1. */
static __device__ __forceinline__ void load_half(low &l, const uint8_t *unit_data, int step, int half, int lane)
{
#pragma unroll
	for (int plane = 0; plane < planes; plane++)
#pragma unroll
		for (int c = 2 * half; c < 2 * half + 2; c++)
			load4(l.v + 16 * plane + 4 * c,
			      unit_data + step * step_bytes + (4 * plane + c) * 512 + lane * 16);
}

static __device__ __forceinline__ meta load_meta(const uint8_t *unit_data, int lane)
{
	meta r;
	const int g = lane / 4, pair = lane / 2; /* g * 2 + t / 2 */
#pragma unroll
	for (int c = 0; c < high_bits; c++)
		load4(r.high + 4 * c, unit_data + high_at + c * 512 + lane * 16);
	if constexpr (scales == SCALE_HALF32 || scales == SCALE_K32)
		load4(r.scale, unit_data + scale_at + pair * 16);
	if constexpr (scales == SCALE_HALF32_M) {
		load4(r.scale, unit_data + scale_at + pair * 16);
		load4(r.scale + 4, unit_data + scale_at + 256 + pair * 16);
	}
	if constexpr (scales == SCALE_K16 || scales == SCALE_K16_M) {
		const uint2 v = ldg_stream<uint2>(unit_data + scale_at + lane * 8);
		r.scale[0] = v.x;
		r.scale[1] = v.y;
	}
	if constexpr (scales == SCALE_K32 || scales == SCALE_K16_M) {
		const uint2 v = ldg_stream<uint2>(unit_data + d_at + g * 8);
		r.d[0] = v.x;
		r.d[1] = v.y;
	}
	if constexpr (scales == SCALE_K16)
		r.d[0] = ldg_stream<uint32_t>(unit_data + d_at + g * 4);
	return r;
}

/* sign: 0x80000000 where the file subtracts the minimum. */
static __device__ __forceinline__ void spread(step_scale &r, int output, __half2 scale_min, uint32_t sign)
{
	const __half2 x = as_half2(as_u32(scale_min) ^ sign);
	r.s[output] = __half2half2(__low2half(x));
	r.m[output] = __half2half2(__high2half(x));
}

static __device__ __forceinline__ step_scale scale(const meta &u, int step)
{
	step_scale r;
	r.s[0] = r.s[1] = r.m[0] = r.m[1] = __float2half2_rn(0.0f);
	if constexpr (scales == SCALE_HALF32) {
		const __half2 d = as_half2(u.scale[step]);
		r.s[0] = __half2half2(__low2half(d));
		r.s[1] = __half2half2(__high2half(d));
	} else if constexpr (scales == SCALE_HALF32_M) {
		spread(r, 0, as_half2(u.scale[2 * step]), 0);
		spread(r, 1, as_half2(u.scale[2 * step + 1]), 0);
	} else if constexpr (scales == SCALE_K32) {
		const uint32_t b = u.scale[step];
		spread(r, 0, __hmul2(integers(__byte_perm(b, 0, 0x4140), 0), as_half2(u.d[0])), 0x80000000u);
		spread(r, 1, __hmul2(integers(__byte_perm(b, 0, 0x4342), 0), as_half2(u.d[1])), 0x80000000u);
	} else if constexpr (scales == SCALE_K16_M) {
		const uint32_t b = u.scale[step / 2] >> 16 * (step % 2);
		spread(r, 0, __hmul2(integers((b & 15) | (b << 12 & 0xF0000), 0), as_half2(u.d[0])), 0x80000000u);
		spread(r, 1, __hmul2(integers((b >> 8 & 15) | (b << 4 & 0xF0000), 0), as_half2(u.d[1])), 0x80000000u);
	} else if constexpr (scales == SCALE_K16) {
		const uint32_t b = __byte_perm(u.scale[step / 2], 0, step % 2 ? 0x4342 : 0x4140);
		const __half2 s = __hmul2(integers(b, 128), as_half2(u.d[0]));
		r.s[0] = __half2half2(__low2half(s));
		r.s[1] = __half2half2(__high2half(s));
	}
	return r;
}

/* The left operand of product j of a step. plane: 0, or 1 for the low half of floats. */
static __device__ __forceinline__ void fragment(const low &l, const meta &u, const step_scale &sc, int step, int j,
						int plane, uint32_t (&a)[4])
{
	if constexpr (low_bits >= 16) {
#pragma unroll
		for (int n = 0; n < 4; n++)
			a[n] = l.v[plane * 16 + 4 * j + n];
	} else {
#pragma unroll
		for (int n = 0; n < 4; n++) {
			uint32_t q;
			if constexpr (low_bits == 8)
				q = __byte_perm(l.v[2 * j + n / 2], 0, n % 2 ? 0x4342 : 0x4140);
			else if constexpr (low_bits == 4)
				q = l.v[j] >> 4 * n & 0x000F000Fu;
			else
				q = l.v[j / 2] >> 2 * (4 * (j % 2) + n) & 0x00030003u;
			if constexpr (high_bits == 1)
				q |= (u.high[step] >> (4 * j + n) & 0x00010001u) << low_bits;
			if constexpr (high_bits == 2)
				q |= (u.high[2 * step + j / 2] >> 2 * (4 * (j % 2) + n) & 0x00030003u) << low_bits;
			const __half2 x = integers(q, zero);
			if constexpr (has_min)
				a[n] = as_u32(__hfma2(x, sc.s[n % 2], sc.m[n % 2]));
			else
				a[n] = as_u32(__hmul2(x, sc.s[n % 2]));
		}
	}
}
}; // namespace GPU_NS

template <enum quant_type type> struct packed_of;
template <> struct packed_of<QUANT_F32> : packed<32, 0, SCALE_NONE, 0> {
};
template <> struct packed_of<QUANT_F16> : packed<16, 0, SCALE_NONE, 0> {
};
template <> struct packed_of<QUANT_BF16> : packed<16, 0, SCALE_NONE, 0> {
};
template <> struct packed_of<QUANT_Q4_0> : packed<4, 0, SCALE_HALF32, 8> {
};
template <> struct packed_of<QUANT_Q4_1> : packed<4, 0, SCALE_HALF32_M, 0> {
};
template <> struct packed_of<QUANT_Q5_0> : packed<4, 1, SCALE_HALF32, 16> {
};
template <> struct packed_of<QUANT_Q5_1> : packed<4, 1, SCALE_HALF32_M, 0> {
};
template <> struct packed_of<QUANT_Q8_0> : packed<8, 0, SCALE_HALF32, 128> {
};
template <> struct packed_of<QUANT_Q2_K> : packed<2, 0, SCALE_K16_M, 0> {
};
template <> struct packed_of<QUANT_Q3_K> : packed<2, 1, SCALE_K16, 4> {
};
template <> struct packed_of<QUANT_Q4_K> : packed<4, 0, SCALE_K32, 0> {
};
template <> struct packed_of<QUANT_Q5_K> : packed<4, 1, SCALE_K32, 0> {
};
template <> struct packed_of<QUANT_Q6_K> : packed<4, 2, SCALE_K16, 32> {
};

} // namespace GPU_NS
