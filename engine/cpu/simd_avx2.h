/* Vector primitives of AVX2 with FMA and F16C: 8 floats or 32 bytes. What each does is said in simd_avx512.h. */
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum {
	LANES = 8,
	S8_SHIFT = -1,
	HAS_SHORTS = 1,
	HAS_BF16 = 0,
	QUANT_ROWS = 4,
	QUANT_TILES = 2,
	FLOAT_ROWS = 3,
};

#define QK_QUERIES 3

typedef __m256 vf;
typedef __m256i vi;
typedef __m256i vb;

#define INLINE static inline __attribute__((always_inline, unused))

INLINE __m256i first(int n)
{
	return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE vf vf_load_n(const float *p, int n) { return _mm256_maskload_ps(p, first(n)); }
INLINE void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
INLINE void vf_store_n(float *p, vf v, int n) { _mm256_maskstore_ps(p, first(n), v); }
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
/* Where b is NaN, so is the result. */
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_bits_max(vf a, vf b)
{
	return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
/*
 * a held between -most and most; a NaN stays one: of two operands, one of them a NaN, these instructions give the
 * second
 */
INLINE vf vf_hold(vf a, vf most)
{
	return _mm256_max_ps(_mm256_xor_ps(_mm256_set1_ps(-0.0f), most), _mm256_min_ps(most, a));
}
INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* Exact for results that are normal numbers; n is cut to -127..127, where 2^-127 counts as zero. */
INLINE vf vf_scale2(vf a, vf n)
{
	n = _mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-127)), _mm256_set1_ps(127));
	__m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
	return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
INLINE vf vf_first(vf a, vf b, int n) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(first(n))); }
INLINE vf vf_load_half(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE vf vf_load_half_n(const void *p, int n)
{
	uint16_t part[8] = {0};
	memcpy(part, p, (size_t)n * 2);
	return vf_load_half(part);
}
INLINE void vf_store_half(void *p, vf v)
{
	_mm_storeu_si128(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void vf_store_half_n(void *p, vf v, int n)
{
	uint16_t part[8];
	vf_store_half(part, v);
	memcpy(p, part, (size_t)n * 2);
}
/* bfloat16s by plain instructions: the upper halves of floats, rounded to nearest even; a NaN stays one */
INLINE vf vf_load_bf16(const void *p)
{
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
INLINE vf vf_load_bf16_n(const void *p, int n)
{
	uint16_t part[8] = {0};
	memcpy(part, p, (size_t)n * 2);
	return vf_load_bf16(part);
}
INLINE void vf_round_bf16(void *p, vf v)
{
	__m256i x = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
	__m256i up = _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
	__m256i quiet = _mm256_or_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(0x40));
	up = _mm256_blendv_epi8(up, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
	_mm_storeu_si128(p, _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1)));
}
INLINE void vf_round_bf16_n(void *p, vf v, int n)
{
	uint16_t part[8];
	vf_round_bf16(part, v);
	memcpy(p, part, (size_t)n * 2);
}
INLINE void vf_store_s8(int8_t *p, vf v)
{
	__m256i i = _mm256_cvtps_epi32(v);
	__m128i w = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
	_mm_storel_epi64((__m128i *)p, _mm_packs_epi16(w, w));
}
INLINE vf vf_low_bf16(vb w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
INLINE vf vf_high_bf16(vb w) { return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xFFFF0000))); }
INLINE float vf_hmax(vf v)
{
	__m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
	a = _mm_max_ps(a, _mm_movehl_ps(a, a));
	return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
INLINE float vf_hsum(vf v)
{
	__m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
	a = _mm_add_ps(a, _mm_movehl_ps(a, a));
	return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
INLINE vf vf_swap_pairs(vf v) { return _mm256_permute_ps(v, 0xB1); }
INLINE vf vf_even_twice(vf v) { return _mm256_moveldup_ps(v); }
INLINE vf vf_odd_twice(vf v) { return _mm256_movehdup_ps(v); }
INLINE vf vf_fmaddsub(vf a, vf b, vf c) { return _mm256_fmaddsub_ps(a, b, c); }

INLINE vi vi_zero(void) { return _mm256_setzero_si256(); }
INLINE vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi vi_shl(vi a, int n) { return _mm256_slli_epi32(a, n); }
INLINE vf vi_to_float(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vf vf_load_s8(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p))); }
INLINE vf vf_load_e4m3(const void *p)
{
	__m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p)), 7);
	return _mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16((int16_t)0xBFFF)));
}

INLINE vb vb_load(const void *p) { return _mm256_loadu_si256(p); }
INLINE void vb_settle(vb *w) { (void)w; } /* there are too few registers */
INLINE void vb_pin(vb *w) { __asm__("" : "+x"(*w)); }
INLINE void vi_pin(vi *a) { __asm__("" : "+x"(*a)); }
INLINE vb vb_set1(int x) { return _mm256_set1_epi8((char)x); }
INLINE vb vb_and(vb a, vb b) { return _mm256_and_si256(a, b); }
INLINE vb vb_or_and(vb a, vb b, vb mask) { return _mm256_or_si256(a, _mm256_and_si256(b, mask)); }
INLINE vb vb_shr(vb a, int n) { return _mm256_srli_epi16(a, n); }
INLINE vb vb_shl(vb a, int n) { return _mm256_slli_epi16(a, n); }
INLINE __m256i four_bytes(const int8_t *a)
{
	int32_t four;
	memcpy(&four, a, 4);
	return _mm256_set1_epi32(four);
}
/* maddubs saturates pairs at 32767: two products of at most 63 * 127 are far below. */
INLINE vi vi_short_products(vb w, const int8_t *a) { return _mm256_maddubs_epi16(w, four_bytes(a)); }
INLINE vi vi_add_shorts(vi a, vi b) { return _mm256_add_epi16(a, b); }
INLINE vi vi_pair_sums(vi a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
/* never called: HAS_BF16 is 0 */
INLINE vf vf_dot_bf16(vf acc, vb w, const uint16_t *a) { return (void)w, (void)a, acc; }
INLINE void vf_store_bf16_n(uint16_t *p, vf v, int n) { (void)p, (void)v, (void)n; }
INLINE vi vi_dot_u8(vi acc, vb w, const int8_t *a) { return vi_add(acc, vi_pair_sums(vi_short_products(w, a))); }
INLINE vb vb_prepare_s8(vb w) { return w; }
INLINE vi vi_dot_s8(vi acc, vb w, const int8_t *a)
{
	/*
	 * |w| * (a with w's sign): at most 128 * 127 twice, which does not saturate. |-128| is 128 as an unsigned byte.
	 */
	__m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four_bytes(a), w));
	return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
/* For kernels_wide.h. */
INLINE vb vb_sub(vb a, vb b) { return _mm256_sub_epi8(a, b); }
/* The signed bytes of lanes 0 to 3, and of 4 to 7, as shorts. */
INLINE vi vi_first_shorts(vb w) { return _mm256_cvtepi8_epi16(_mm256_castsi256_si128(w)); }
INLINE vi vi_last_shorts(vb w) { return _mm256_cvtepi8_epi16(_mm256_extracti128_si256(w, 1)); }
INLINE vi vi_four_shorts(const int16_t *a)
{
	int64_t four;
	memcpy(&four, a, 8);
	return _mm256_set1_epi64x(four);
}
/* Sums of products of two shorts. */
INLINE vi vi_short_pairs(vi a, vi b) { return _mm256_madd_epi16(a, b); }
/* The sums of neighbours: of `first` in lanes 0 to 3, of `last` in 4 to 7. */
INLINE vi vi_join(vi first, vi last)
{
	return _mm256_permute4x64_epi64(_mm256_hadd_epi32(first, last), 0xD8);
}
