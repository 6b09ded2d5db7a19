/*
 * Codes of narrow KV: backend.h says what they stand for, engine/cpu/narrow.h and engine/kv/tier_codec.c have the same
 * arithmetic for the host. fp8_e4m3 is the E4M3 of OCP's 8-bit floating point specification (OFP8, 2023).
 */
#pragma once

#include "cuda/kv_page.cuh"

namespace GPU_NS
{

#ifndef GPU_HAS_FP8

/*
 * Two E4M3 codes, in the low 16 bits, as halves: the bits are those of halves whose exponent is 8 too small, subnormal
 * ones included. A code that is no number becomes one; none is ever written.
 */
__device__ __forceinline__ uint32_t fp8_to_halves(uint32_t pair)
{
	const uint32_t high = __byte_perm(pair, 0, 0x1404);
	const uint32_t bits = (high & 0x80008000u) | ((high >> 1) & 0x3f803f80u);
	__half2 h;
	memcpy(&h, &bits, sizeof h);
	h = __hmul2(h, __float2half2_rn(256.0f));
	uint32_t u;
	memcpy(&u, &h, sizeof u);
	return u;
}

/* The nearest code, ties to even, beyond 448 the largest; x is a number. */
__device__ __forceinline__ uint32_t fp8_from_float(float x)
{
	const float a = fabsf(x);
	const uint32_t sign = __float_as_uint(x) >> 31 << 7;
	/* Below the smallest normal, 2^-6, codes are multiples of 2^-9. */
	if (a < 0.015625f)
		return sign | static_cast<uint32_t>(__float2int_rn(a * 512.0f));
	if (a >= 448.0f)
		return sign | 0x7eu;
	uint32_t bits = __float_as_uint(a);
	bits += 0x7ffffu + (bits >> 20 & 1u);
	return sign | ((bits >> 20) - ((127 - 7) << 3));
}

#endif

/* The value of the largest code. */
template <enum kv_form form> __device__ __forceinline__ constexpr float largest_code()
{
	return form == KV_FORM_INT8 ? 127.0f : 448.0f;
}

/* x is a vector's element divided by its scale, so at most largest_code() but for rounding. */
template <enum kv_form form> __device__ __forceinline__ uint32_t code_of(float x)
{
	if constexpr (form == KV_FORM_INT8)
		return static_cast<uint32_t>(__float2int_rn(x)) & 0xffu;
	else
		return fp8_from_float(x);
}

template <enum kv_form form> __device__ __forceinline__ float value_of(uint32_t code)
{
	if constexpr (form == KV_FORM_INT8) {
		return static_cast<float>(static_cast<signed char>(code));
	} else {
		const uint32_t pair = fp8_to_halves(code);
		return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
	}
}

/* Codes in a page: of int8, c + 128. */
template <enum kv_form form> static constexpr uint32_t page_code_flip = form == KV_FORM_INT8 ? 0x80808080u : 0u;

/* Two neighbouring codes of four, as halves: the first two or the last. Exact. */
template <enum kv_form form, int which> __device__ __forceinline__ uint32_t code_pair(uint32_t four)
{
	if constexpr (form == KV_FORM_INT8) {
		/* 1024 + 128 + c, whose last bit is worth 1 */
		const uint32_t bits = __byte_perm(four, 0x64646464u, which ? 0x4342 : 0x4140);
		__half2 h;
		memcpy(&h, &bits, sizeof h);
		h = __hsub2(h, __float2half2_rn(1152.0f));
		uint32_t u;
		memcpy(&u, &h, sizeof u);
		return u;
	} else {
		return fp8_to_halves(which ? four >> 16 : four);
	}
}

/* As halves can have it: what is beyond their range is held at its end, and what is no number stays none. */
__device__ __forceinline__ float held(float x)
{
	return x > KV_HALF_MAX ? KV_HALF_MAX : x < -KV_HALF_MAX ? -KV_HALF_MAX : x;
}

/* Bits of a bfloat16, held at the last that is a half as well: attention makes halves of them. */
__device__ __forceinline__ uint32_t bf16_bits(float x)
{
	constexpr float end = 65280.0f;
	const uint32_t bits = __float_as_uint(x > end ? end : x < -end ? -end : x);
	return x != x ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

/*
 * The largest magnitude among a thread's elements of a vector, for block_max(): infinite when there is one that is no
 * number or infinite.
 */
__device__ __forceinline__ float magnitude(float x)
{
	const float a = fabsf(x);
	return a <= 3.402823466e38f ? held(a) : INFINITY;
}

/* What a vector is multiplied by to become codes, and the scale that goes with them; NaN when it has no codes. */
struct narrow_scale {
	float inverse, scale;
};

template <enum kv_form form> __device__ __forceinline__ struct narrow_scale narrow_scale_of(float largest)
{
	if (largest == INFINITY)
		return {0.0f, __int_as_float(0x7fffffff)};
	if (largest < 0x1p-100f) /* the inverse would be no float: see kv_form_pack() */
		return {0.0f, 0.0f};
	return {__fdiv_rn(largest_code<form>(), largest), __fdiv_rn(largest, largest_code<form>())};
}

} // namespace GPU_NS
