/*
 * Vector primitives of NEON, as every 64-bit ARM has it: 4 floats or 16 bytes; with the instruction for four products
 * of bytes at once (FEAT_DotProd) where the compiler may use it. What each does is said in simd_avx512.h. Half floats
 * are those of the baseline, which converts them and computes in floats.
 */
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

enum {
	LANES = 4,
	S8_SHIFT = -1,
#ifdef __ARM_FEATURE_DOTPROD
	HAS_SHORTS = 0,
	QUANT_ROWS = 8,
#else
	HAS_SHORTS = 1,
	QUANT_ROWS = 4,
#endif
	QUANT_TILES = 1,
	HAS_BF16 = 0,
	FLOAT_ROWS = 6,
};

#define QK_QUERIES 6

typedef float32x4_t vf;
typedef int32x4_t vi;
typedef uint8x16_t vb;

#define INLINE static inline __attribute__((always_inline, unused))

INLINE vf vf_zero(void) { return vdupq_n_f32(0); }
INLINE vf vf_set1(float x) { return vdupq_n_f32(x); }
INLINE vf vf_load(const float *p) { return vld1q_f32(p); }
INLINE vf vf_load_n(const float *p, int n)
{
	float part[4] = {0};
	if (n >= 4)
		return vld1q_f32(p);
	for (int i = 0; i < n; i++)
		part[i] = p[i];
	return vld1q_f32(part);
}
INLINE void vf_store(float *p, vf v) { vst1q_f32(p, v); }
INLINE void vf_store_n(float *p, vf v, int n)
{
	float part[4];
	if (n >= 4) {
		vst1q_f32(p, v);
		return;
	}
	vst1q_f32(part, v);
	for (int i = 0; i < n; i++)
		p[i] = part[i];
}
INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
/* Of a number and a NaN, the number. */
INLINE vf vf_min(vf a, vf b) { return vminnmq_f32(a, b); }
/* Where b is NaN, so is the result. */
INLINE vf vf_max(vf a, vf b) { return vmaxq_f32(a, b); }
INLINE vf vf_bits_max(vf a, vf b)
{
	return vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b)));
}
/* a held between -most and most; a NaN stays one */
INLINE vf vf_hold(vf a, vf most) { return vmaxq_f32(vnegq_f32(most), vminq_f32(most, a)); }
INLINE vf vf_abs(vf a) { return vabsq_f32(a); }
INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE vf vf_fnma(vf a, vf b, vf c) { return vfmsq_f32(c, a, b); }
INLINE vf vf_round(vf a) { return vrndnq_f32(a); }
/* Exact for results that are normal numbers; n is cut to -127..127, where 2^-127 counts as zero. */
INLINE vf vf_scale2(vf a, vf n)
{
	n = vf_min(vf_max(n, vf_set1(-127)), vf_set1(127));
	int32x4_t e = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23);
	return vmulq_f32(a, vreinterpretq_f32_s32(e));
}
INLINE vf vf_first(vf a, vf b, int n)
{
	static const int32_t lane[4] = {0, 1, 2, 3};
	return vbslq_f32(vcltq_s32(vld1q_s32(lane), vdupq_n_s32(n)), a, b);
}
INLINE vf vf_load_half(const void *p)
{
	return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
}
INLINE vf vf_load_half_n(const void *p, int n)
{
	uint16_t part[4] = {0};
	memcpy(part, p, (size_t)n * 2);
	return vf_load_half(part);
}
INLINE void vf_store_half(void *p, vf v)
{
	vst1_u16((uint16_t *)p, vreinterpret_u16_f16(vcvt_f16_f32(v)));
}
INLINE void vf_store_half_n(void *p, vf v, int n)
{
	uint16_t part[4];
	vf_store_half(part, v);
	memcpy(p, part, (size_t)n * 2);
}
INLINE vf vf_load_bf16(const void *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p), 16)); }
INLINE vf vf_load_bf16_n(const void *p, int n)
{
	uint16_t part[4] = {0};
	memcpy(part, p, (size_t)n * 2);
	return vf_load_bf16(part);
}
INLINE void vf_round_bf16(void *p, vf v)
{
	uint32x4_t x = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(1));
	uint32x4_t up = vshrq_n_u32(vaddq_u32(x, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16);
	uint32x4_t quiet = vorrq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(0x40));
	vst1_u16((uint16_t *)p, vmovn_u32(vbslq_u32(vceqq_f32(v, v), up, quiet)));
}
INLINE void vf_round_bf16_n(void *p, vf v, int n)
{
	uint16_t part[4];
	vf_round_bf16(part, v);
	memcpy(p, part, (size_t)n * 2);
}
INLINE void vf_store_s8(int8_t *p, vf v)
{
	int16x4_t w = vqmovn_s32(vcvtnq_s32_f32(v));
	int8x8_t b = vqmovn_s16(vcombine_s16(w, w));
	vst1_lane_s32((int32_t *)(void *)p, vreinterpret_s32_s8(b), 0);
}
INLINE vf vf_low_bf16(vb w) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(w), 16)); }
INLINE vf vf_high_bf16(vb w)
{
	return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(w), vdupq_n_u32(0xFFFF0000)));
}
INLINE float vf_hmax(vf v) { return vmaxnmvq_f32(v); }
INLINE float vf_hsum(vf v)
{
	float32x2_t a = vadd_f32(vget_low_f32(v), vget_high_f32(v));
	return vget_lane_f32(a, 0) + vget_lane_f32(a, 1);
}
INLINE vf vf_swap_pairs(vf v) { return vrev64q_f32(v); }
INLINE vf vf_even_twice(vf v) { return vtrn1q_f32(v, v); }
INLINE vf vf_odd_twice(vf v) { return vtrn2q_f32(v, v); }
INLINE vf vf_fmaddsub(vf a, vf b, vf c)
{
	static const uint32_t signs[4] = {0x80000000, 0, 0x80000000, 0};
	return vfmaq_f32(vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(c), vld1q_u32(signs))), a, b);
}

INLINE vi vi_zero(void) { return vdupq_n_s32(0); }
INLINE vi vi_set1(int32_t x) { return vdupq_n_s32(x); }
INLINE vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
INLINE vi vi_shl(vi a, int n) { return vshlq_s32(a, vdupq_n_s32(n)); }
INLINE vf vi_to_float(vi a) { return vcvtq_f32_s32(a); }
INLINE int8x16_t four_bytes(const int8_t *a)
{
	return vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(const void *)a));
}
INLINE vf vf_load_s8(const void *p)
{
	int16x8_t w = vmovl_s8(vget_low_s8(four_bytes(p)));
	return vcvtq_f32_s32(vmovl_s16(vget_low_s16(w)));
}
INLINE vf vf_load_e4m3(const void *p)
{
	int16x4_t w = vshl_n_s16(vget_low_s16(vmovl_s8(vget_low_s8(four_bytes(p)))), 7);
	return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(vreinterpret_u16_s16(w), vdup_n_u16(0xBFFF))));
}

INLINE vb vb_load(const void *p) { return vld1q_u8(p); }
INLINE void vb_settle(vb *w) { (void)w; }
INLINE void vb_pin(vb *w) { (void)w; }
INLINE void vi_pin(vi *a) { (void)a; }
INLINE vb vb_set1(int x) { return vdupq_n_u8((uint8_t)x); }
INLINE vb vb_and(vb a, vb b) { return vandq_u8(a, b); }
INLINE vb vb_or_and(vb a, vb b, vb mask) { return vorrq_u8(a, vandq_u8(b, mask)); }
INLINE vb vb_shr(vb a, int n) { return vshlq_u8(a, vdupq_n_s8((int8_t)-n)); }
INLINE vb vb_shl(vb a, int n) { return vshlq_u8(a, vdupq_n_s8((int8_t)n)); }
/* never called: HAS_BF16 is 0 */
INLINE vf vf_dot_bf16(vf acc, vb w, const uint16_t *a) { return (void)w, (void)a, acc; }
INLINE void vf_store_bf16_n(uint16_t *p, vf v, int n) { (void)p, (void)v, (void)n; }
/*
 * Of a byte below 64 and one of -127..127, or of any two signed ones without -128 twice, two products stay within a
 * short integer.
 */
INLINE vi vi_short_products(vb w, const int8_t *a)
{
	int8x16_t s = vreinterpretq_s8_u8(w), four = four_bytes(a);
	int16x8_t low = vmull_s8(vget_low_s8(s), vget_low_s8(four)), high = vmull_high_s8(s, four);
	return vreinterpretq_s32_s16(vpaddq_s16(low, high));
}
INLINE vi vi_add_shorts(vi a, vi b)
{
	return vreinterpretq_s32_s16(vaddq_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}
INLINE vi vi_pair_sums(vi a) { return vpaddlq_s16(vreinterpretq_s16_s32(a)); }
INLINE vb vb_prepare_s8(vb w) { return w; }
INLINE vi vi_dot_s8(vi acc, vb w, const int8_t *a)
{
#ifdef __ARM_FEATURE_DOTPROD
	return vdotq_s32(acc, vreinterpretq_s8_u8(w), four_bytes(a));
#else
	return vi_add(acc, vi_pair_sums(vi_short_products(w, a)));
#endif
}
INLINE vi vi_dot_u8(vi acc, vb w, const int8_t *a) { return vi_dot_s8(acc, w, a); }
