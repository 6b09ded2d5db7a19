/*
 * AVX-512 on machines without it, for tests: SIMDe's plain versions of its intrinsics under their own names, and here
 * those that SIMDe 0.7.4 does not have, as Intel's Intrinsics Guide describes them. Rounding is to nearest even, as it
 * is wherever the kernels say nothing else. Slow.
 */
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wpedantic"
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#pragma GCC diagnostic pop

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EMULATED static __attribute__((noinline, unused))

typedef simde__m512bh emulated_m512bh;
#define __m512bh emulated_m512bh

/* NAME(a): TO lanes of type OUT from each of N lanes of type IN, lane i by EXPR of x. */
#define CONVERT(name, result, argument, n, in, out, expr)                                                              \
	EMULATED result name(argument a)                                                                               \
	{                                                                                                              \
		in from[sizeof(argument) / sizeof(in)];                                                                \
		out to[sizeof(result) / sizeof(out)] = {0};                                                            \
		result r;                                                                                              \
		memcpy(from, &a, sizeof a);                                                                            \
		for (int i = 0; i < (n); i++) {                                                                        \
			in x = from[i];                                                                                \
			to[i] = expr;                                                                                  \
		}                                                                                                      \
		memcpy(&r, to, sizeof r);                                                                              \
		return r;                                                                                              \
	}
CONVERT(emulated_cvtepi32_epi16, __m256i, __m512i, 16, int32_t, int16_t, (int16_t)x)
CONVERT(emulated_cvtepi32_epi8, __m128i, __m512i, 16, int32_t, int8_t, (int8_t)x)
CONVERT(emulated_cvtusepi32_epi8, __m128i, __m512i, 16, uint32_t, uint8_t, (uint8_t)(x > 255 ? 255 : x))
CONVERT(emulated_cvtepi32_ps, __m512, __m512i, 16, int32_t, float, (float)x)
CONVERT(emulated_cvtepi8_epi32, __m512i, __m128i, 16, int8_t, int32_t, x)
CONVERT(emulated_cvtepu16_epi32, __m512i, __m256i, 16, uint16_t, uint32_t, x)
/* What is no number, or beyond the integers, becomes the lowest one. */
CONVERT(emulated_cvtps_epi32, __m512i, __m512, 16, float, int32_t,
	x >= -0x1p31f && x < 0x1p31f ? (int32_t)rintf(x) : INT32_MIN)
CONVERT(emulated_moveldup, __m512, __m512, 16, float, float, ((void)x, from[i & ~1]))
CONVERT(emulated_movehdup, __m512, __m512, 16, float, float, ((void)x, from[i | 1]))

/* Half of 16 floats. */
EMULATED __m256 emulated_half_of(__m512 a, int half)
{
	__m256 r;
	memcpy(&r, (const char *)&a + 32 * half, sizeof r);
	return r;
}

EMULATED __m512 emulated_cvtph_ps(__m256i a)
{
	__m128i half[2];
	__m256 to[2];
	__m512 r;
	memcpy(half, &a, sizeof half);
	for (int i = 0; i < 2; i++)
		to[i] = _mm256_cvtph_ps(half[i]);
	memcpy(&r, to, sizeof r);
	return r;
}

EMULATED __m256i emulated_cvtps_ph(__m512 a)
{
	__m128i to[2];
	__m256i r;
	for (int i = 0; i < 2; i++)
		to[i] = _mm256_cvtps_ph(emulated_half_of(a, i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
	memcpy(&r, to, sizeof r);
	return r;
}

/* To nearest even; a number too small to be normal becomes zero, and what is no number stays none. */
EMULATED uint16_t emulated_bf16(float x)
{
	uint32_t bits;
	memcpy(&bits, &x, sizeof bits);
	if (x != x)
		return (uint16_t)(bits >> 16 | 0x40);
	if ((bits & 0x7F800000) == 0)
		return (uint16_t)(bits >> 16 & 0x8000);
	return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

CONVERT(emulated_cvtneps_pbh, __m256i, __m512, 16, float, uint16_t, emulated_bf16(x))

/* b in the lower half. */
EMULATED __m512bh emulated_cvtne2ps_pbh(__m512 a, __m512 b)
{
	__m256i half[2] = {emulated_cvtneps_pbh(b), emulated_cvtneps_pbh(a)};
	__m512bh r;
	memcpy(&r, half, sizeof r);
	return r;
}

/* Each lane: acc + the odd pair's product, then the even one's, each fused; what is not normal counts as zero. */
EMULATED float emulated_normal(float x)
{
	return x > -0x1p-126f && x < 0x1p-126f ? x * 0 : x;
}
EMULATED float emulated_from_bf16(uint16_t h)
{
	uint32_t bits = (uint32_t)h << 16;
	float x;
	memcpy(&x, &bits, sizeof x);
	return emulated_normal(x);
}
EMULATED __m512 emulated_dpbf16_ps(__m512 acc, __m512bh a, __m512bh b)
{
	uint16_t x[32], y[32];
	float sum[16];
	memcpy(x, &a, sizeof x);
	memcpy(y, &b, sizeof y);
	memcpy(sum, &acc, sizeof sum);
	for (int i = 0; i < 16; i++)
		for (int k = 1; k >= 0; k--)
			sum[i] = emulated_normal(__builtin_fmaf(emulated_from_bf16(x[2 * i + k]),
								emulated_from_bf16(y[2 * i + k]),
								emulated_normal(sum[i])));
	memcpy(&acc, sum, sizeof acc);
	return acc;
}

EMULATED __m512 emulated_fmaddsub_ps(__m512 a, __m512 b, __m512 c)
{
	float x[16], y[16], z[16];
	memcpy(x, &a, sizeof x);
	memcpy(y, &b, sizeof y);
	memcpy(z, &c, sizeof z);
	for (int i = 0; i < 16; i++)
		x[i] = __builtin_fmaf(x[i], y[i], i % 2 ? z[i] : -z[i]);
	memcpy(&a, x, sizeof a);
	return a;
}

EMULATED __m512 emulated_permute_ps(__m512 a, int order)
{
	float from[16], to[16];
	memcpy(from, &a, sizeof from);
	for (int i = 0; i < 16; i++)
		to[i] = from[(i & ~3) + (order >> 2 * (i & 3) & 3)];
	memcpy(&a, to, sizeof a);
	return a;
}

EMULATED __m512 emulated_shuffle_f32x4(__m512 a, __m512 b, int order)
{
	char to[64];
	for (int i = 0; i < 4; i++)
		memcpy(to + 16 * i, (const char *)(i < 2 ? &a : &b) + 16 * (order >> 2 * i & 3), 16);
	memcpy(&a, to, sizeof a);
	return a;
}

/* As the instructions do it: halves against each other, so that a NaN is lost or not as it is there. */
EMULATED float emulated_reduce_max_ps(__m512 a)
{
	__m256 eight = _mm256_max_ps(emulated_half_of(a, 1), emulated_half_of(a, 0));
	float x[8];
	memcpy(x, &eight, sizeof x);
	for (int n = 4; n > 0; n /= 2)
		for (int i = 0; i < n; i++)
			x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
	return x[0];
}

EMULATED int32_t emulated_reduce_max_epi32(__m512i a)
{
	int32_t x[16], most;
	memcpy(x, &a, sizeof x);
	most = x[0];
	for (int i = 1; i < 16; i++)
		most = x[i] > most ? x[i] : most;
	return most;
}

/* Masked loads and stores touch what their mask names only. */
#define MASKED(name, vector, n, element)                                                                               \
	EMULATED vector emulated_load_##name(uint64_t mask, const void *p)                                             \
	{                                                                                                              \
		element to[n] = {0};                                                                                   \
		vector r;                                                                                              \
		for (int i = 0; i < (n); i++)                                                                          \
			if (mask >> i & 1)                                                                             \
				memcpy(&to[i], (const char *)p + i * (int)sizeof(element), sizeof(element));           \
		memcpy(&r, to, sizeof r);                                                                              \
		return r;                                                                                              \
	}                                                                                                              \
	EMULATED void emulated_store_##name(void *p, uint64_t mask, vector v)                                          \
	{                                                                                                              \
		element from[n];                                                                                       \
		memcpy(from, &v, sizeof from);                                                                         \
		for (int i = 0; i < (n); i++)                                                                          \
			if (mask >> i & 1)                                                                             \
				memcpy((char *)p + i * (int)sizeof(element), &from[i], sizeof(element));               \
	}
MASKED(16_of_16, __m256i, 16, uint16_t)
MASKED(16_of_32, __m512i, 16, uint32_t)
MASKED(64_of_8, __m512i, 64, uint8_t)
MASKED(floats, __m512, 16, float)

/* Its alias in SIMDe 0.7.4 has the arguments of another one. */
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define _mm256_mask_storeu_epi16(p, mask, v) emulated_store_16_of_16(p, mask, v)
#define _mm256_maskz_loadu_epi16(mask, p) emulated_load_16_of_16(mask, p)
#define _mm512_maskz_loadu_epi32(mask, p) emulated_load_16_of_32(mask, p)
#define _mm512_maskz_loadu_epi8(mask, p) emulated_load_64_of_8(mask, p)
#define _mm512_mask_storeu_epi8(p, mask, v) emulated_store_64_of_8(p, mask, v)
#define _mm512_maskz_loadu_ps(mask, p) emulated_load_floats(mask, p)
#define _mm512_mask_storeu_ps(p, mask, v) emulated_store_floats(p, mask, v)
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtusepi32_epi8 emulated_cvtusepi32_epi8
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtps_ph(v, rounding) emulated_cvtps_ph(v)
#define _mm512_cvtneps_pbh emulated_cvtneps_pbh
#define _mm512_cvtne2ps_pbh emulated_cvtne2ps_pbh
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps emulated_dpbf16_ps
#define _mm512_extractf32x8_ps emulated_half_of
#define _mm512_fmaddsub_ps emulated_fmaddsub_ps
#define _mm512_moveldup_ps emulated_moveldup
#define _mm512_movehdup_ps emulated_movehdup
#define _mm512_permute_ps emulated_permute_ps
#define _mm512_shuffle_f32x4 emulated_shuffle_f32x4
#define _mm512_reduce_max_ps emulated_reduce_max_ps
#define _mm512_reduce_max_epi32 emulated_reduce_max_epi32

/* So do the kernels know that there are these. */
#ifdef KVASIR_EMULATE_AVX512_BF16
#define __AVX512BF16__ 1
#define __AVX512VBMI__ 1
#endif
