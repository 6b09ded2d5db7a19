/*
 * Reference dequantisers, plain and exact: what the fast kernels are compared with. Block layouts are ggml's, which the
 * GGUF tensor type numbers name (https://github.com/ggml-org/ggml, ggml-common.h).
 *
 * In the formulas e is an element's index in its block, d and m (dmin) are halves.
 * Every product is rounded to float in the order written.
 */
#include "engine/model/quant.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 32, SUPER = 256 };

static uint32_t float_bits(float f)
{
	uint32_t u;
	memcpy(&u, &f, sizeof u);
	return u;
}

static float bits_float(uint32_t u)
{
	float f;
	memcpy(&f, &u, sizeof f);
	return f;
}

uint8_t quant_fp8_from_float(float x)
{
	/* Adding it rounds a float below 2^22 to a whole number, ties to even: the sum has no bits below one. */
	const float rounder = 12582912.0f; /* 1.5 * 2^23 */
	float a = fabsf(x), shifted = a * 512 + rounder;
	uint32_t bits;
	memcpy(&bits, &x, sizeof bits);
	uint8_t sign = (uint8_t)(bits >> 31 << 7);
	if (x != x)
		return 0x7F;
	/* Below the smallest normal, 2^-6, codes are multiples of 2^-9. */
	if (a < 0x1p-6f) {
		memcpy(&bits, &shifted, sizeof bits);
		return sign | (bits & 0xF);
	}
	if (a >= 448)
		return sign | 0x7E;
	memcpy(&bits, &a, sizeof bits);
	bits += 0x7FFFF + (bits >> 20 & 1);
	return sign | (uint8_t)((bits >> 20) - ((127 - 7) << 3));
}

float quant_fp8_to_float(uint8_t c)
{
	uint32_t low = c & 0x7F, bits = (uint32_t)(c & 0x80) << 24;
	float x;
	if (low == 0x7F)
		return NAN;
	if (low < 8)
		return (c & 0x80 ? -1 : 1) * ((float)low * 0x1p-9f);
	bits |= (low + ((127 - 7) << 3)) << 20;
	memcpy(&x, &bits, sizeof x);
	return x;
}

float quant_half_to_float(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16;
	uint32_t exponent = h >> 10 & 31, fraction = h & 0x3FF;
	if (exponent == 31)
		return bits_float(sign | 0x7F800000 | fraction << 13);
	if (exponent == 0) {
		/* Subnormal: fraction * 2^-24, which float holds exactly; OR keeps the sign of zero. */
		return bits_float(sign | float_bits((float)fraction * 0x1p-24f));
	}
	return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
}

uint16_t quant_float_to_half(float f)
{
	uint32_t u = float_bits(f);
	uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
	u &= 0x7FFFFFFF;
	if (u > 0x7F800000) /* NaN: quiet, with the payload's top bits */
		return (uint16_t)(sign | 0x7E00 | (u >> 13 & 0x1FF));
	if (u >= 0x477FF000) /* 65520 and above round to infinity */
		return (uint16_t)(sign | 0x7C00);
	uint32_t kept, dropped, half;
	if (u >= 0x38800000) { /* normal: 2^-14 and above */
		kept = (u - 0x38000000) >> 13;
		dropped = u & 0x1FFF;
		half = 0x1000;
	} else if (u >= 0x33000000) { /* 2^-25 and above: subnormal, or rounds up to the smallest one */
		uint32_t shift = 126 - (u >> 23);
		uint32_t mantissa = (u & 0x7FFFFF) | 0x800000;
		kept = mantissa >> shift;
		dropped = mantissa & ((1u << shift) - 1);
		half = 1u << (shift - 1);
	} else {
		return sign;
	}
	/* A carry out of the fraction is right: it moves to the next exponent. */
	if (dropped > half || (dropped == half && (kept & 1)))
		kept++;
	return (uint16_t)(sign | kept);
}

uint16_t quant_float_to_bf16(float f)
{
	uint32_t bits;
	memcpy(&bits, &f, sizeof bits);
	if (f != f)
		return (uint16_t)(bits >> 16 | 0x40);
	return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float quant_bf16_to_float(uint16_t h)
{
	return bits_float((uint32_t)h << 16);
}

static uint16_t load16(const uint8_t *p)
{
	return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t load32(const uint8_t *p)
{
	return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static float load_half(const uint8_t *p)
{
	return quant_half_to_float(load16(p));
}

/* x = the float itself. */
static void dequantize_f32(const void *src, float *dst, size_t n)
{
	memcpy(dst, src, n * sizeof *dst);
}

/* x = the half. */
static void dequantize_f16(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i++)
		dst[i] = load_half(p + 2 * i);
}

/* x = the upper 16 bits of a float. */
static void dequantize_bf16(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i++)
		dst[i] = quant_bf16_to_float(load16(p + 2 * i));
}

/*
 * d:2 qs:16.  x = d * (q - 8), q = low nibble of qs[e] for e < 16, high nibble of qs[e - 16] otherwise.
 */
static void dequantize_q4_0(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i += BLOCK, p += 18, dst += BLOCK) {
		float d = load_half(p);
		const uint8_t *qs = p + 2;
		for (int e = 0; e < 16; e++) {
			dst[e] = d * (float)((qs[e] & 15) - 8);
			dst[e + 16] = d * (float)((qs[e] >> 4) - 8);
		}
	}
}

/* d:2 m:2 qs:16.  x = d * q + m, q as in Q4_0. */
static void dequantize_q4_1(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i += BLOCK, p += 20, dst += BLOCK) {
		float d = load_half(p), m = load_half(p + 2);
		const uint8_t *qs = p + 4;
		for (int e = 0; e < 16; e++) {
			dst[e] = d * (float)(qs[e] & 15) + m;
			dst[e + 16] = d * (float)(qs[e] >> 4) + m;
		}
	}
}

/* d:2 qh:4 qs:16.  x = d * (q - 16), q = nibble as in Q4_0 | bit e of the little-endian qh << 4. */
static void dequantize_q5_0(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i += BLOCK, p += 22, dst += BLOCK) {
		float d = load_half(p);
		uint32_t qh = load32(p + 2);
		const uint8_t *qs = p + 6;
		for (int e = 0; e < 16; e++) {
			int low = (qs[e] & 15) | (int)(qh >> e & 1) << 4;
			int high = qs[e] >> 4 | (int)(qh >> (e + 16) & 1) << 4;
			dst[e] = d * (float)(low - 16);
			dst[e + 16] = d * (float)(high - 16);
		}
	}
}

/* d:2 m:2 qh:4 qs:16.  x = d * q + m, q as in Q5_0. */
static void dequantize_q5_1(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i += BLOCK, p += 24, dst += BLOCK) {
		float d = load_half(p), m = load_half(p + 2);
		uint32_t qh = load32(p + 4);
		const uint8_t *qs = p + 8;
		for (int e = 0; e < 16; e++) {
			int low = (qs[e] & 15) | (int)(qh >> e & 1) << 4;
			int high = qs[e] >> 4 | (int)(qh >> (e + 16) & 1) << 4;
			dst[e] = d * (float)low + m;
			dst[e + 16] = d * (float)high + m;
		}
	}
}

/* d:2 qs:32.  x = d * qs[e], qs signed. */
static void dequantize_q8_0(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i += BLOCK, p += 34, dst += BLOCK) {
		float d = load_half(p);
		for (int e = 0; e < BLOCK; e++)
			dst[e] = d * (float)(int8_t)p[2 + e];
	}
}

/*
 * scales:16 qs:64 d:2 dmin:2.  x = (d * s) * q - dmin * m, where s and m are the low and high nibble of scales[e / 16],
 * q = bits 2k, 2k+1 of qs[32 * (e / 128) + e % 32], k = e / 32 % 4.
 */
static void dequantize_q2_k(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i += SUPER, p += 84, dst += SUPER) {
		const uint8_t *scales = p, *qs = p + 16;
		float d = load_half(p + 80), dmin = load_half(p + 82);
		for (int g = 0; g < 16; g++) { /* 16 elements share a scale */
			float scale = d * (float)(scales[g] & 15), min = dmin * (float)(scales[g] >> 4);
			const uint8_t *q = qs + 32 * (g / 8) + 16 * (g % 2);
			int shift = 2 * (g / 2 % 4);
			for (int e = 0; e < 16; e++)
				dst[16 * g + e] = scale * (float)(q[e] >> shift & 3) - min;
		}
	}
}

/*
 * hmask:32 qs:64 scales:12 d:2.  x = (d * (s - 32)) * q; q = two bits as in Q2_K, minus 4 when bit e / 32 of
 * hmask[e % 32] is clear. s is a 6-bit scale, i = e / 16: its low nibble in scales[i % 8] (low half for i < 8), its
 * upper two bits at bit 2 * (i / 4) of scales[8 + i % 4].
 */
static void dequantize_q3_k(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i += SUPER, p += 110, dst += SUPER) {
		const uint8_t *hmask = p, *qs = p + 32, *scales = p + 96;
		float d = load_half(p + 108);
		for (int g = 0; g < 16; g++) {
			int s = (scales[g % 8] >> 4 * (g / 8) & 15) | (scales[8 + g % 4] >> 2 * (g / 4) & 3) << 4;
			float scale = d * (float)(s - 32);
			const uint8_t *q = qs + 32 * (g / 8) + 16 * (g % 2), *h = hmask + 16 * (g % 2);
			int shift = 2 * (g / 2 % 4), bit = g / 2;
			for (int e = 0; e < 16; e++) {
				int v = (q[e] >> shift & 3) - (h[e] >> bit & 1 ? 0 : 4);
				dst[16 * g + e] = scale * (float)v;
			}
		}
	}
}

/*
 * The eight 6-bit scales and mins of Q4_K and Q5_K in 12 bytes: those of i < 4 are the low six bits of a[i] and a[i +
 * 4]; those of i >= 4 have their low nibbles in a[i + 4] (scale below, min above) and their upper bits in bits 6-7 of
 * a[i - 4] and a[i].
 */
static void k_scale_min(const uint8_t a[12], int i, int *scale, int *min)
{
	if (i < 4) {
		*scale = a[i] & 63;
		*min = a[i + 4] & 63;
	} else {
		*scale = (a[i + 4] & 15) | a[i - 4] >> 6 << 4;
		*min = a[i + 4] >> 4 | a[i] >> 6 << 4;
	}
}

/*
 * d:2 dmin:2 scales:12 qs:128.  x = (d * s) * q - dmin * m with s, m of group e / 32 (see k_scale_min);
 * q = low nibble of qs[32 * (e / 64) + e % 32] for even groups, high nibble for odd ones.
 */
static void dequantize_q4_k(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i += SUPER, p += 144, dst += SUPER) {
		float d = load_half(p), dmin = load_half(p + 2);
		const uint8_t *qs = p + 16;
		for (int g = 0; g < 8; g++) {
			int s, m;
			k_scale_min(p + 4, g, &s, &m);
			float scale = d * (float)s, min = dmin * (float)m;
			const uint8_t *q = qs + 32 * (g / 2);
			int shift = 4 * (g % 2);
			for (int e = 0; e < 32; e++)
				dst[32 * g + e] = scale * (float)(q[e] >> shift & 15) - min;
		}
	}
}

/* d:2 dmin:2 scales:12 qh:32 qs:128.  As Q4_K, with q |= bit e / 32 of qh[e % 32] << 4. */
static void dequantize_q5_k(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i += SUPER, p += 176, dst += SUPER) {
		float d = load_half(p), dmin = load_half(p + 2);
		const uint8_t *qh = p + 16, *qs = p + 48;
		for (int g = 0; g < 8; g++) {
			int s, m;
			k_scale_min(p + 4, g, &s, &m);
			float scale = d * (float)s, min = dmin * (float)m;
			const uint8_t *q = qs + 32 * (g / 2);
			int shift = 4 * (g % 2);
			for (int e = 0; e < 32; e++) {
				int v = (q[e] >> shift & 15) | (qh[e] >> g & 1) << 4;
				dst[32 * g + e] = scale * (float)v - min;
			}
		}
	}
}

/*
 * ql:128 qh:64 scales:16 d:2.  x = (d * scales[e / 16]) * (q - 32), scales signed. With h = e / 128, k = e / 32 % 4, l
 * = e % 32: q = nibble k / 2 of ql[64 * h + 32 * (k % 2) + l] | bits 2k, 2k+1 of qh[32 * h + l] << 4.
 */
static void dequantize_q6_k(const void *src, float *dst, size_t n)
{
	const uint8_t *p = src;
	for (size_t i = 0; i < n; i += SUPER, p += 210, dst += SUPER) {
		const uint8_t *ql = p, *qh = p + 128, *scales = p + 192;
		float d = load_half(p + 208);
		for (int g = 0; g < 16; g++) {
			float scale = d * (float)(int8_t)scales[g];
			int h = g / 8, k = g / 2 % 4, first = 16 * (g % 2);
			const uint8_t *low = ql + 64 * h + 32 * (k % 2) + first, *high = qh + 32 * h + first;
			for (int e = 0; e < 16; e++) {
				int v = (low[e] >> 4 * (k / 2) & 15) | (high[e] >> 2 * k & 3) << 4;
				dst[16 * g + e] = scale * (float)(v - 32);
			}
		}
	}
}

static const struct quant_format formats[] = {
	{QUANT_F32, "F32", 1, 4, dequantize_f32},	   {QUANT_F16, "F16", 1, 2, dequantize_f16},
	{QUANT_BF16, "BF16", 1, 2, dequantize_bf16},	   {QUANT_Q4_0, "Q4_0", BLOCK, 18, dequantize_q4_0},
	{QUANT_Q4_1, "Q4_1", BLOCK, 20, dequantize_q4_1},  {QUANT_Q5_0, "Q5_0", BLOCK, 22, dequantize_q5_0},
	{QUANT_Q5_1, "Q5_1", BLOCK, 24, dequantize_q5_1},  {QUANT_Q8_0, "Q8_0", BLOCK, 34, dequantize_q8_0},
	{QUANT_Q2_K, "Q2_K", SUPER, 84, dequantize_q2_k},  {QUANT_Q3_K, "Q3_K", SUPER, 110, dequantize_q3_k},
	{QUANT_Q4_K, "Q4_K", SUPER, 144, dequantize_q4_k}, {QUANT_Q5_K, "Q5_K", SUPER, 176, dequantize_q5_k},
	{QUANT_Q6_K, "Q6_K", SUPER, 210, dequantize_q6_k},
};

const struct quant_format *quant_format(uint32_t type)
{
	for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
		if ((uint32_t)formats[i].type == type)
			return &formats[i];
	}
	return NULL;
}

const struct quant_format *quant_format_at(size_t i)
{
	return i < sizeof formats / sizeof formats[0] ? &formats[i] : NULL;
}
