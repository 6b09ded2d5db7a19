/*
 * Vector primitives of AVX-512 (F, BW, DQ, VL, VNNI, and BF16 where the compiler may use it): 16 floats or 64 bytes.
 * simd_avx2.h has the same names; what each does is said here. `n` of a partial load or store is 0..LANES; lanes beyond
 * read as zero and are not written.
 */
#pragma once

#include <stdint.h>
#ifdef KVASIR_EMULATE_AVX512
#include "tests/support/avx512_emulated.h"
#else
#include <immintrin.h>
#endif

enum {
	LANES = 16,
	/*
	 * vi_dot_s8 adds 1 << S8_SHIFT times the sum of a, which the accumulator must begin without; -1: adds nothing
	 */
	S8_SHIFT = 7,
	HAS_SHORTS = 0, /* whether vi_short_products() and its kind are the faster way */
#ifdef __AVX512BF16__
	HAS_BF16 = 1, /* whether vf_dot_bf16() and vf_store_bf16_n() work */
#else
	HAS_BF16 = 0,
#endif
	QUANT_ROWS = 8, /* rows of a quantised tile whose sums fit the registers */
	/* tiles that such rows go through at once: more save loads where there are fewer sums than loads pay for */
	QUANT_TILES = 1,
	FLOAT_ROWS = 6,
};

#define QK_QUERIES 6 /* queries whose sums fit the registers, times 4 vectors */

typedef __m512 vf;
typedef __m512i vi;  /* 16 int32 */
typedef __m512i vb;  /* [LANES][4] bytes */

#define INLINE static inline __attribute__((always_inline, unused))

INLINE __mmask16 first(int n)
{
	return (__mmask16)((1u << n) - 1);
}
INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE vf vf_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
INLINE void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
INLINE void vf_store_n(float *p, vf v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
/* Where b is NaN, so is the result. */
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
/* of the lanes as int32 */
INLINE vf vf_bits_max(vf a, vf b)
{
	return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
/*
 * a held between -most and most; a NaN stays one: of two operands, one of them a NaN, these instructions give the
 * second
 */
INLINE vf vf_hold(vf a, vf most)
{
	return _mm512_max_ps(_mm512_xor_ps(_mm512_set1_ps(-0.0f), most), _mm512_min_ps(most, a));
}
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
/* a * b + c, rounded once */
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* c - a * b, rounded once */
INLINE vf vf_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* a * 2^n for integral n; gradual underflow and overflow to infinity */
INLINE vf vf_scale2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
/* lanes below n from a, the others from b */
INLINE vf vf_first(vf a, vf b, int n) { return _mm512_mask_blend_ps(first(n), b, a); }
/* halves to floats */
INLINE vf vf_load_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE vf vf_load_half_n(const void *p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
INLINE void vf_store_half(void *p, vf v)
{
	_mm256_storeu_si256(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void vf_store_half_n(void *p, vf v, int n)
{
	_mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* bfloat16s by plain instructions: the upper halves of floats, rounded to nearest even; a NaN stays one */
INLINE __m256i rounded_bf16(vf v)
{
	__m512i x = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
	__m512i up = _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
	__m512i quiet = _mm512_or_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(0x40));
	return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet));
}
INLINE vf vf_load_bf16(const void *p)
{
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE vf vf_load_bf16_n(const void *p, int n)
{
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16));
}
INLINE void vf_round_bf16(void *p, vf v) { _mm256_storeu_si256(p, rounded_bf16(v)); }
INLINE void vf_round_bf16_n(void *p, vf v, int n) { _mm256_mask_storeu_epi16(p, first(n), rounded_bf16(v)); }
/* rounded to nearest integers in -128..127 */
INLINE void vf_store_s8(int8_t *p, vf v)
{
	_mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
/* the first (second) bfloat16 of each pair */
INLINE vf vf_low_bf16(vb w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
INLINE vf vf_high_bf16(vb w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xFFFF0000))); }
#ifdef __AVX512BF16__
/*
 * each lane: acc + the products of two pairs of bfloat16s, that of w's lane and the one at a; numbers below 2^-126
 * count as zero
 */
INLINE vf vf_dot_bf16(vf acc, vb w, const uint16_t *a)
{
	int32_t pair;
	__builtin_memcpy(&pair, a, 4);
	return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(pair));
}
/*
 * the first of LANES pairs of shorts, and zeros in place of the second ones; of n pairs, and zeros; of LANES shorts
 * that stand together
 */
INLINE vb vb_evens(vb w) { return _mm512_and_si512(w, _mm512_set1_epi32(0xFFFF)); }
INLINE vb vb_odds(vb w) { return _mm512_and_si512(w, _mm512_set1_epi32((int)0xFFFF0000)); }
INLINE vb vb_load_n(const void *p, int n) { return _mm512_maskz_loadu_epi32(first(n), p); }
INLINE vb vb_load_even(const void *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(p)); }
/* as bfloat16, rounded to nearest */
INLINE void vf_store_bf16_n(uint16_t *p, vf v, int n)
{
	_mm256_mask_storeu_epi16(p, first(n), (__m256i)_mm512_cvtneps_pbh(v));
}
#else
INLINE vf vf_dot_bf16(vf acc, vb w, const uint16_t *a)
{
	return (void)w, (void)a, acc;
} /* never called: HAS_BF16 is 0 */
INLINE void vf_store_bf16_n(uint16_t *p, vf v, int n) { (void)p, (void)v, (void)n; }
#endif
INLINE float vf_hmax(vf v) { return _mm512_reduce_max_ps(v); }
/* of the lanes as int32 */
INLINE float vf_bits_hmax(vf v)
{
	int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(v));
	float x;
	__builtin_memcpy(&x, &bits, sizeof x);
	return x;
}
/* in a fixed order: halves onto halves */
INLINE float vf_hsum(vf v)
{
	__m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
	__m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
	b = _mm_add_ps(b, _mm_movehl_ps(b, b));
	return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
/* (x[2i], x[2i+1]) -> (x[2i+1], x[2i]), and the even (odd) element in both places */
INLINE vf vf_swap_pairs(vf v) { return _mm512_permute_ps(v, 0xB1); }
INLINE vf vf_even_twice(vf v) { return _mm512_moveldup_ps(v); }
INLINE vf vf_odd_twice(vf v) { return _mm512_movehdup_ps(v); }
/* even lanes a - b, odd lanes a + b */
INLINE vf vf_fmaddsub(vf a, vf b, vf c) { return _mm512_fmaddsub_ps(a, b, c); }

INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_shl(vi a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
INLINE vf vi_to_float(vi a) { return _mm512_cvtepi32_ps(a); }
/* LANES int8 to float */
INLINE vf vf_load_s8(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))); }
/*
 * LANES codes of E4M3 as floats, times 2^-8: with their bits in those places, and the sign kept, they are halves with
 * an exponent that is 8 too small.
 */
INLINE vf vf_load_e4m3(const void *p)
{
	__m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7);
	return _mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16((int16_t)0xBFFF)));
}

INLINE vb vb_load(const void *p) { return _mm512_loadu_si512(p); }
/* a vector that is in a register and stays there, rather than being read again for each use */
#ifdef KVASIR_EMULATE_AVX512
INLINE void vb_settle(vb *w) { (void)w; }
#else
INLINE void vb_settle(vb *w) { __asm__("" : "+v"(*w)); }
#endif
INLINE void vb_pin(vb *w) { (void)w; }
INLINE void vi_pin(vi *a) { (void)a; }
INLINE vb vb_set1(int x) { return _mm512_set1_epi8((char)x); }
INLINE vb vb_and(vb a, vb b) { return _mm512_and_si512(a, b); }
/* a | (b & mask) */
INLINE vb vb_or_and(vb a, vb b, vb mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xF8); }
/* shifts of 16-bit words: bits cross into the neighbour byte and must be masked away */
INLINE vb vb_shr(vb a, int n) { return _mm512_srli_epi16(a, (unsigned)n); }
INLINE vb vb_shl(vb a, int n) { return _mm512_slli_epi16(a, (unsigned)n); }
/* each lane: acc + the four products of w (unsigned, up to 63) and the four signed bytes at a */
INLINE vi vi_dot_u8(vi acc, vb w, const int8_t *a)
{
	int32_t four;
	__builtin_memcpy(&four, a, 4);
	return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}
/* likewise for any signed w, prepared by vb_prepare_s8 */
INLINE vb vb_prepare_s8(vb w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
INLINE vi vi_dot_s8(vi acc, vb w, const int8_t *a) { return vi_dot_u8(acc, w, a); }
/* 2 * LANES short integers, each the sum of two products */
INLINE vi vi_short_products(vb w, const int8_t *a)
{
	int32_t four;
	__builtin_memcpy(&four, a, 4);
	return _mm512_maddubs_epi16(w, _mm512_set1_epi32(four));
}
INLINE vi vi_add_shorts(vi a, vi b) { return _mm512_add_epi16(a, b); }
/* sums of neighbours */
INLINE vi vi_pair_sums(vi a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }

#ifdef __AVX512VBMI__
INLINE vb vb_load_bytes_n(const void *p, int n)
{
	return _mm512_maskz_loadu_epi8(n < 64 ? ((uint64_t)1 << n) - 1 : ~(uint64_t)0, p);
}
INLINE void vb_store(void *p, vb v) { _mm512_storeu_si512(p, v); }
INLINE void vb_store_bytes_n(void *p, vb v, int n)
{
	_mm512_mask_storeu_epi8(p, n < 64 ? ((uint64_t)1 << n) - 1 : ~(uint64_t)0, v);
}
/* the first 32 bytes of a, then those of b */
INLINE vb vb_halves(vb a, vb b) { return _mm512_inserti64x4(a, _mm512_castsi512_si256(b), 1); }
INLINE vb vb_load_halves(const void *a, const void *b)
{
	return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(a)), _mm256_loadu_si256(b), 1);
}
INLINE vb vb_abs(vb v) { return _mm512_abs_epi8(v); }
/* each byte: the one of v that index's low six bits say */
INLINE vb vb_permute(vb index, vb v) { return _mm512_permutexvar_epi8(index, v); }
/* each byte: the one of table[0] and table[1] together that index's low seven bits say */
INLINE vb vb_look_up(vb index, const vb *table) { return _mm512_permutex2var_epi8(table[0], index, table[1]); }
/* in each 16 bytes: the first (last) eight of a, each followed by its like of b */
INLINE vb vb_zip_first(vb a, vb b) { return _mm512_unpacklo_epi8(a, b); }
INLINE vb vb_zip_last(vb a, vb b) { return _mm512_unpackhi_epi8(a, b); }
/* the same for pairs of bytes */
INLINE vb vb_zip_pairs_first(vb a, vb b)
{
	return _mm512_unpacklo_epi16(a, b);
}
INLINE vb vb_zip_pairs_last(vb a, vb b)
{
	return _mm512_unpackhi_epi16(a, b);
}
/* rounded to nearest integers in 0..255 */
INLINE void vf_store_u8(uint8_t *p, vf v)
{
	_mm_storeu_si128((__m128i *)p, _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(v)));
}
/* quarter k of v[i] becomes quarter i of v[k] */
INLINE void vf_turn_quarters(vf *v)
{
	vf a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[0], v[1], 0xEE);
	vf c = _mm512_shuffle_f32x4(v[2], v[3], 0x44), d = _mm512_shuffle_f32x4(v[2], v[3], 0xEE);
	v[0] = _mm512_shuffle_f32x4(a, c, 0x88);
	v[1] = _mm512_shuffle_f32x4(a, c, 0xDD);
	v[2] = _mm512_shuffle_f32x4(b, d, 0x88);
	v[3] = _mm512_shuffle_f32x4(b, d, 0xDD);
}

/*
 * 16 int32, as vi has them, which is a vector of 8 longs: where many sums of dot products stay in registers over a
 * loop, gcc copies each of them from the one type to the other every time.
 */
typedef int32_t vsum __attribute__((vector_size(64), may_alias));
INLINE vsum vsum_zero(void)
{
	return (vsum)_mm512_setzero_si512();
}
/* as vi_dot_s8() */
INLINE vsum vsum_dot_s8(vsum acc, vb w, const int8_t *a)
{
	return (vsum)vi_dot_s8((vi)acc, w, a);
}
/* each lane: acc + the four products of the unsigned bytes at a and of w */
INLINE vsum vsum_dot_by_u8(vsum acc, const uint8_t *a, vb w)
{
	int32_t four;
	__builtin_memcpy(&four, a, 4);
	return (vsum)_mm512_dpbusd_epi32((vi)acc, _mm512_set1_epi32(four), w);
}
/* acc + x */
INLINE vf vsum_to_float(vsum acc, int32_t x)
{
	return _mm512_cvtepi32_ps(_mm512_add_epi32((vi)acc, _mm512_set1_epi32(x)));
}
#endif
