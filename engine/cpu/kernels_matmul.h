/* Matmul kernels over the primitives of one instruction set: included by avx2.c and avx512.c. Layouts: fast.h. */
#pragma once

#include <stddef.h>
#include <string.h>

#include "engine/cpu/fast.h"

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum {
	VB = 4 * LANES, /* bytes of a byte vector */
	FLOAT_VECTORS = 4,
	ROW_STRIDE = sizeof(struct act), /* of rows in a group */
	FINE_ABOVE = 2, /* times the mean square of the units' largest values: see struct act */
};

_Static_assert(sizeof(struct act_fine) == sizeof(struct act) && offsetof(struct act_fine, d) == offsetof(struct act, d),
               "both parts of the activations are read with the same strides");

/* Stores a unit of integers that stand in floats; out: the sums of both halves, and of all, negated. */
INLINE void store_integers(const vf *v, int8_t *q, int32_t *minus_sum)
{
	vf first_half = v[0], second_half = v[UNIT / LANES / 2];
	for (int k = 0; k < UNIT / LANES; k++)
		vf_store_s8(q + k * LANES, v[k]);
	for (int k = 1; k < UNIT / LANES / 2; k++) {
		first_half = vf_add(first_half, v[k]);
		second_half = vf_add(second_half, v[k + UNIT / LANES / 2]);
	}
	minus_sum[0] = -(int32_t)vf_hsum(first_half); /* floats hold such sums exactly */
	minus_sum[1] = -(int32_t)vf_hsum(second_half);
	minus_sum[2] = minus_sum[0] + minus_sum[1];
}

/* One unit; its largest magnitude stands in a->d. */
INLINE void quantize_unit(const float *x, bool fine, struct act *a, struct act_fine *f)
{
	enum { N = UNIT / LANES };
	float top = a->d;
	/* Zeros, or numbers too small for 127 / top, become zeros. */
	vf inverse = vf_set1(top > 0x1p-100f ? 127 / top : 0), whole[N], rest[N];
	for (int k = 0; k < N; k++) {
		vf v = vf_mul(vf_load(x + k * LANES), inverse);
		/* The bounds also turn NaNs into numbers, and keep -128 away, which has no opposite. */
		whole[k] = vf_max(vf_round(v), vf_set1(-127));
		rest[k] = vf_round(vf_mul(vf_sub(v, whole[k]), vf_set1(256)));
		rest[k] = vf_max(vf_min(rest[k], vf_set1(127)), vf_set1(-127));
	}
	a->d = top / 127;
	f->d = a->d * (1.0f / 256);
	store_integers(whole, a->q, a->minus_sum);
	if (fine) {
		store_integers(rest, f->q, f->minus_sum);
	} else {
		memset(f->q, 0, sizeof f->q);
		memset(f->minus_sum, 0, sizeof f->minus_sum);
	}
	for (int k = 0; k < 3; k++)
		a->sum[k] = f->d * (float)-(256 * a->minus_sum[k] + f->minus_sum[k]);
}

static void quantize(const float *x, int64_t n_in, int rows, bool precise, struct act *out, struct act_fine *fine)
{
	int64_t n_units = n_in / UNIT;
	for (int r = 0; r < rows; r++) {
		float square_sum = 0;
		for (int64_t u = 0; u < n_units; u++) {
			vf max = vf_zero();
			for (int k = 0; k < UNIT; k += LANES)
				max = vf_max(max, vf_abs(vf_load(x + r * n_in + u * UNIT + k)));
			float top = vf_hmax(max);
			out[u * rows + r].d = top;
			square_sum += top * top;
		}
		for (int64_t u = 0; u < n_units; u++) {
			struct act *a = out + u * rows + r;
			bool is_fine = precise || a->d * a->d * (float)n_units > FINE_ABOVE * square_sum;
			quantize_unit(x + r * n_in + u * UNIT, is_fine, a, fine + u * rows + r);
			out[u * rows].fine = is_fine || (r > 0 && out[u * rows].fine);
		}
	}
}

INLINE int unit_bytes(enum pack_planes planes)
{
	switch (planes) {
	case PLANES_8:
		return 8 * VB;
	case PLANES_4:
		return 4 * VB;
	case PLANES_4_1:
		return 5 * VB;
	case PLANES_4_2:
		return 6 * VB;
	case PLANES_2:
		return 2 * VB;
	default: /* PLANES_2_1 */
		return 3 * VB;
	}
}

/* x with its bit `from` moved to bit `to`, the others anywhere. */
INLINE vb move_bit(vb x, int from, int to)
{
	return from == to ? x : from < to ? vb_shl(x, to - from) : vb_shr(x, from - to);
}

/* Subvector j of the unit at p; the arguments but p are constants after inlining. */
INLINE vb subvector(const char *p, enum pack_planes planes, int j)
{
	vb low;
	switch (planes) {
	case PLANES_8:
		return vb_prepare_s8(vb_load(p + j * VB));
	case PLANES_2:
	case PLANES_2_1:
		low = vb_and(move_bit(vb_load(p + j / 4 * VB), 2 * (j % 4), 0), vb_set1(3));
		return planes == PLANES_2 ? low : vb_or_and(low, move_bit(vb_load(p + 2 * VB), j, 2), vb_set1(4));
	default:
		low = vb_and(move_bit(vb_load(p + j % 4 * VB), j / 4 * 4, 0), vb_set1(15));
		if (planes == PLANES_4_1)
			low = vb_or_and(low, move_bit(vb_load(p + 4 * VB), j, 4), vb_set1(16));
		if (planes == PLANES_4_2)
			low = vb_or_and(low, move_bit(vb_load(p + (4 + j / 4) * VB), 2 * (j % 4), 4), vb_set1(48));
		return low;
	}
}

INLINE vi dot(vi acc, vb w, const int8_t *a, enum pack_planes planes)
{
	return planes == PLANES_8 ? vi_dot_s8(acc, w, a) : vi_dot_u8(acc, w, a);
}

/* Subvectors whose products may be added in 16 bits: pairs of products are below 2 * 127 * the largest integer. */
INLINE int short_run(enum pack_planes planes)
{
	switch (planes) {
	case PLANES_4:
	case PLANES_2:
	case PLANES_2_1:
		return 8; /* 2 * 127 * 15 * 8 = 30480 */
	case PLANES_4_1:
		return 4; /* 2 * 127 * 31 * 4 = 31496 */
	case PLANES_4_2:
		return 2; /* 2 * 127 * 63 * 2 = 32004 */
	default:
		return 1;
	}
}

/* Writes LANES outputs of a row, from output `at` of the tile. */
INLINE void store_outputs(const struct tile_job *t, int row, int at, vf v)
{
	int n = t->n_outs - at;
	if (n <= 0)
		return;
	float *y = t->y + row * t->y_stride + at;
	n = n < LANES ? n : LANES;
	if (t->bias)
		v = vf_add(v, vf_load_n(t->bias + at, n));
	if (t->accumulate)
		v = vf_add(v, vf_load_n(y, n));
	vf_store_n(y, v, n);
}

/*
 * Adds the integer products of a group's weights and each row's q. With few rows, several partial sums keep the multipliers
 * busy in spite of their latency; without an instruction for four products at a time, partial sums are short integers for as long
 * as they fit. Integer sums are the same in any order.
 */
INLINE void add_products(vi *sum, const char *p, int rows, enum pack_planes planes, int group, int groups, const int8_t *q)
{
	const int subvectors = groups == 1 ? 8 : 4;
	const bool in_shorts = HAS_SHORTS && planes != PLANES_8;
	const int parts = in_shorts ? 1 : rows == 1 ? 4 : rows <= 3 ? 2 : 1;
	vi part[ROWS_MAX][4];
	UNROLL
	for (int r = 0; r < rows && parts > 1; r++)
		UNROLL
		for (int k = 1; k < parts; k++)
			part[r][k] = vi_zero();
	UNROLL
	for (int j = 0; j < subvectors; j++) {
		int sub = group * subvectors + j, k = j % parts, run = short_run(planes);
		vb w = subvector(p, planes, sub);
		UNROLL
		for (int r = 0; r < rows; r++) {
			const int8_t *a = q + r * ROW_STRIDE + 4 * sub;
			if (!in_shorts) {
				vi *to = k == 0 ? &sum[r] : &part[r][k];
				*to = dot(*to, w, a, planes);
				continue;
			}
			part[r][0] = j % run == 0 ? vi_short_products(w, a) : vi_add_shorts(part[r][0], vi_short_products(w, a));
			if (j % run == run - 1 || j == subvectors - 1)
				sum[r] = vi_add(sum[r], vi_pair_sums(part[r][0]));
		}
	}
	UNROLL
	for (int r = 0; r < rows && parts > 1; r++)
		UNROLL
		for (int k = 1; k < parts; k++)
			sum[r] = vi_add(sum[r], part[r][k]);
}

/* What a sum begins with: minus the stored integers' offset times the sum of the row's q. */
INLINE vi begin_sum(int32_t minus_sum, int offset)
{
	return offset < 0 ? vi_zero() : vi_shl(vi_set1(minus_sum), offset);
}

/*
 * A tile of a quantised format times `rows` rows. Everything but t is constant after inlining. `offset`: the stored integers are too
 * large by 1 << offset; -1: by nothing. Integer sums are exact; each group adds d_w * d_a * dot (+ min * sum) to the float sum.
 */
INLINE void tile_quantised(const struct tile_job *t, int rows, enum pack_planes planes, int groups, bool has_min, bool super,
                           int offset)
{
	const int unit_scales = groups * (super ? 1 : 2) * (has_min ? 2 : 1) * LANES;
	const int super_scales = (super ? has_min ? 4 : 2 : 0) * LANES;
	const char *p = t->tile;
	const struct act *a = t->act;
	const struct act_fine *f = t->fine;
	vf acc[ROWS_MAX];
	UNROLL
	for (int r = 0; r < rows; r++)
		acc[r] = vf_zero();
	for (int64_t left = t->n_units; left > 0; left -= SPAN_UNITS) {
		const int n = super || left > SPAN_UNITS ? SPAN_UNITS : (int)left;
		const char *s = p;
		vf d = vf_zero(), dmin = vf_zero();
		p += (super_scales + n * unit_scales + VB - 1) & -VB;
		/* All scales before the planes, so that memory sees one ascending stream. */
		for (const char *line = s; line < p; line += 64)
			_mm_prefetch(line, _MM_HINT_T0);
		if (super) {
			d = vf_load_half(s);
			s += 2 * LANES;
		}
		if (super && has_min) {
			dmin = vf_load_half(s);
			s += 2 * LANES;
		}
		for (int u = 0; u < n; u++, p += unit_bytes(planes), a += rows, f += rows) {
			const bool fine = a->fine;
			UNROLL
			for (int g = 0; g < groups; g++) {
				vf scale, min = vf_zero();
				scale = super ? vf_mul(vf_load_s8(s), d) : vf_load_half(s);
				s += super ? LANES : 2 * LANES;
				if (has_min) {
					min = super ? vf_mul(vf_load_s8(s), dmin) : vf_load_half(s);
					s += super ? LANES : 2 * LANES;
				}
				vi sum[ROWS_MAX];
				const int which = groups == 1 ? 2 : g;
				UNROLL
				for (int r = 0; r < rows; r++)
					sum[r] = begin_sum(a[r].minus_sum[which], offset);
				const int8_t *q = a->q;
				const float *da = &a->d;
				for (bool again = fine;; again = false) {
					add_products(sum, p, rows, planes, g, groups, q);
					if (!again)
						break;
					UNROLL
					for (int r = 0; r < rows; r++)
						sum[r] = vi_add(vi_shl(sum[r], 8), begin_sum(f[r].minus_sum[which], offset));
					q = f->q;
					da = &f->d;
				}
				UNROLL
				for (int r = 0; r < rows; r++) {
					/* 256 times the sum times d / 256: the same, bit for bit, as without a fine part. */
					vf d_row = vf_set1(da[r * ROW_STRIDE / (int)sizeof *da]);
					acc[r] = vf_fma(vf_mul(vi_to_float(sum[r]), scale), d_row, acc[r]);
					if (has_min)
						acc[r] = vf_fma(min, vf_set1(a[r].sum[which]), acc[r]);
				}
			}
		}
	}
	UNROLL
	for (int r = 0; r < rows; r++)
		store_outputs(t, r, 0, acc[r]);
}

INLINE vf load_weights(const char *p, enum pack_planes planes)
{
	return planes == PLANES_F32 ? vf_load((const float *)(const void *)p) : vf_load_half(p);
}

/* A tile of F32 or F16 times `rows` rows. */
INLINE void tile_float(const struct tile_job *t, int rows, enum pack_planes planes)
{
	const int bytes = planes == PLANES_F32 ? 4 : 2;
	const char *p = t->tile;
	vf acc[FLOAT_ROWS][FLOAT_VECTORS];
	UNROLL
	for (int r = 0; r < rows; r++)
		UNROLL
		for (int v = 0; v < FLOAT_VECTORS; v++)
			acc[r][v] = vf_zero();
	for (int64_t k = 0; k < t->n_in; k++, p += FLOAT_VECTORS * LANES * bytes) {
		vf w[FLOAT_VECTORS];
		UNROLL
		for (int v = 0; v < FLOAT_VECTORS; v++)
			w[v] = load_weights(p + v * LANES * bytes, planes);
		UNROLL
		for (int r = 0; r < rows; r++) {
			vf x = vf_set1(t->x[r * t->n_in + k]);
			UNROLL
			for (int v = 0; v < FLOAT_VECTORS; v++)
				acc[r][v] = vf_fma(w[v], x, acc[r][v]);
		}
	}
	UNROLL
	for (int r = 0; r < rows; r++)
		UNROLL
		for (int v = 0; v < FLOAT_VECTORS; v++)
			store_outputs(t, r, v * LANES, acc[r][v]);
}

/* A tile of BF16 times `rows` rows: of floats, or `narrow` of bfloat16s. */
INLINE void tile_pairs(const struct tile_job *t, int rows, bool narrow)
{
	const int64_t stride = (t->n_in + 1) & ~INT64_C(1); /* of narrow rows */
	const char *p = t->tile;
	vf acc[FLOAT_ROWS][FLOAT_VECTORS];
	UNROLL
	for (int r = 0; r < rows; r++)
		UNROLL
		for (int v = 0; v < FLOAT_VECTORS; v++)
			acc[r][v] = vf_zero();
	for (int64_t k = 0; k < t->n_in; k += 2, p += FLOAT_VECTORS * VB) {
		vb w[FLOAT_VECTORS];
		UNROLL
		for (int v = 0; v < FLOAT_VECTORS; v++)
			w[v] = vb_load(p + v * VB);
		UNROLL
		for (int r = 0; r < rows && narrow; r++)
			UNROLL
			for (int v = 0; v < FLOAT_VECTORS; v++)
				acc[r][v] = vf_dot_bf16(acc[r][v], w[v], t->narrow + r * stride + k);
		UNROLL
		for (int half = 0; half < 2 && !narrow; half++) {
			vf element[FLOAT_VECTORS];
			if (k + half == t->n_in)
				break;
			UNROLL
			for (int v = 0; v < FLOAT_VECTORS; v++)
				element[v] = half ? vf_high_bf16(w[v]) : vf_low_bf16(w[v]);
			UNROLL
			for (int r = 0; r < rows; r++) {
				vf x = vf_set1(t->x[r * t->n_in + k + half]);
				UNROLL
				for (int v = 0; v < FLOAT_VECTORS; v++)
					acc[r][v] = vf_fma(element[v], x, acc[r][v]);
			}
		}
	}
	UNROLL
	for (int r = 0; r < rows; r++)
		UNROLL
		for (int v = 0; v < FLOAT_VECTORS; v++)
			store_outputs(t, r, v * LANES, acc[r][v]);
}

static __attribute__((unused)) void narrow(const float *x, int64_t n, uint16_t *out)
{
	for (int64_t k = 0; k < n; k += LANES)
		vf_store_bf16_n(out + k, vf_load_n(x + k, n - k < LANES ? (int)(n - k) : LANES), n - k < LANES ? (int)(n - k) : LANES);
	if (n % 2)
		out[n] = 0;
}

/* One function per format; a case per number of rows, so that the sums stay in registers. */
#define ROW_CASE(n, max, call)                                                                                         \
	case n:                                                                                                        \
		if (n <= (max)) {                                                                                      \
			enum { ROWS = n <= (max) ? n : 1 };                                                            \
			call;                                                                                          \
		}                                                                                                      \
		break;

#define TILE_FUNCTION(name, max, call)                                                                                 \
	static void name(const struct tile_job *t, int rows)                                                           \
	{                                                                                                              \
		switch (rows) {                                                                                        \
			ROW_CASE(1, max, call)                                                                         \
			ROW_CASE(2, max, call)                                                                         \
			ROW_CASE(3, max, call)                                                                         \
			ROW_CASE(4, max, call)                                                                         \
			ROW_CASE(5, max, call)                                                                         \
			ROW_CASE(6, max, call)                                                                         \
			ROW_CASE(7, max, call)                                                                         \
			ROW_CASE(8, max, call)                                                                         \
		}                                                                                                      \
	}

/* planes, groups, has_min and super as in the pack_format row; offset of the format */
TILE_FUNCTION(tile_q4_0, QUANT_ROWS, tile_quantised(t, ROWS, PLANES_4, 1, false, false, 3))
TILE_FUNCTION(tile_q4_1, QUANT_ROWS, tile_quantised(t, ROWS, PLANES_4, 1, true, false, -1))
TILE_FUNCTION(tile_q5_0, QUANT_ROWS, tile_quantised(t, ROWS, PLANES_4_1, 1, false, false, 4))
TILE_FUNCTION(tile_q5_1, QUANT_ROWS, tile_quantised(t, ROWS, PLANES_4_1, 1, true, false, -1))
TILE_FUNCTION(tile_q8_0, QUANT_ROWS, tile_quantised(t, ROWS, PLANES_8, 1, false, false, S8_SHIFT))
TILE_FUNCTION(tile_q2_k, QUANT_ROWS, tile_quantised(t, ROWS, PLANES_2, 2, true, true, -1))
TILE_FUNCTION(tile_q3_k, QUANT_ROWS, tile_quantised(t, ROWS, PLANES_2_1, 2, false, true, 2))
TILE_FUNCTION(tile_q4_k, QUANT_ROWS, tile_quantised(t, ROWS, PLANES_4, 1, true, true, -1))
TILE_FUNCTION(tile_q5_k, QUANT_ROWS, tile_quantised(t, ROWS, PLANES_4_1, 1, true, true, -1))
TILE_FUNCTION(tile_q6_k, QUANT_ROWS, tile_quantised(t, ROWS, PLANES_4_2, 2, false, true, 5))
TILE_FUNCTION(tile_f32, FLOAT_ROWS, tile_float(t, ROWS, PLANES_F32))
TILE_FUNCTION(tile_f16, FLOAT_ROWS, tile_float(t, ROWS, PLANES_F16))
TILE_FUNCTION(tile_bf16_float, FLOAT_ROWS, tile_pairs(t, ROWS, false))
TILE_FUNCTION(tile_bf16_narrow, FLOAT_ROWS, tile_pairs(t, ROWS, true))

static void tile_bf16(const struct tile_job *t, int rows)
{
	if (HAS_BF16 && t->narrow)
		tile_bf16_narrow(t, rows);
	else
		tile_bf16_float(t, rows);
}

static void tile(const struct tile_job *t, enum quant_type type, int rows)
{
	static void (*const kernel[])(const struct tile_job *, int) = {
	        [QUANT_F32] = tile_f32,   [QUANT_F16] = tile_f16,   [QUANT_BF16] = tile_bf16, [QUANT_Q4_0] = tile_q4_0,
	        [QUANT_Q4_1] = tile_q4_1, [QUANT_Q5_0] = tile_q5_0, [QUANT_Q5_1] = tile_q5_1, [QUANT_Q8_0] = tile_q8_0,
	        [QUANT_Q2_K] = tile_q2_k, [QUANT_Q3_K] = tile_q3_k, [QUANT_Q4_K] = tile_q4_k, [QUANT_Q5_K] = tile_q5_k,
	        [QUANT_Q6_K] = tile_q6_k,
	};
	kernel[type](t, rows);
}
