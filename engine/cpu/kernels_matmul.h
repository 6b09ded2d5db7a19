/* Matmul kernels over the primitives of one instruction set: included by avx2.c and its like. Layouts: fast.h. */
#pragma once

#include <stddef.h>
#include <string.h>

#include "engine/cpu/kernels_unit.h"

enum {
	FLOAT_VECTORS = 4,
	ROW_STRIDE = sizeof(struct act), /* of rows in a group */
	PRODUCTS_MAX = QUANT_TILES * ROWS_MAX,
	FINE_ABOVE = 2, /* times the mean square of the units' largest values: see struct act */
	/*
	 * With so many rows the products of a unit take longer than the memory, and what the processor fetches of
	 * itself comes too late: it is asked for NEAR bytes ahead, and where a unit is large, FAR ahead into the
	 * second-level cache too. A 1B model's Q4_K and Q8_0 multiply 8 rows 1.4 and 1.7 times as fast with it on a Zen
	 * 4, SmolLM2's Q4_1 1.2 times; up to three are better off without.
	 */
	PREFETCH_ROWS = 4,
	PREFETCH_NEAR = 2048,
	PREFETCH_FAR = 8192,
};

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

INLINE float largest(const float *x)
{
	vf max = vf_zero();
	for (int k = 0; k < UNIT; k += LANES)
		max = vf_max(max, vf_abs(vf_load(x + k)));
	return vf_hmax(max);
}

/* Zeros, or numbers too small for 127 / top, become zeros. */
INLINE vf inverse_scale(float top)
{
	return vf_set1(top > 0x1p-100f ? 127 / top : 0);
}

/* The integers of a unit. The bounds also turn NaNs into numbers, and keep -128 away, which has no opposite. */
INLINE vf whole_part(vf scaled)
{
	return vf_max(vf_round(scaled), vf_set1(-127));
}

INLINE void store_unit(const vf *v, float d, struct act *a)
{
	store_integers(v, a->q, a->minus_sum);
	a->d = d;
	for (int k = 0; k < 3; k++)
		a->sum[k] = d * (float)-a->minus_sum[k];
}

static void quantize(const float *x, int64_t n_in, int rows, bool precise, struct act *out, uint8_t *fine,
                     int64_t fine_stride)
{
	enum { N = UNIT / LANES };
	int64_t n_units = n_in / UNIT;
	for (int r = 0; r < rows; r++) {
		float square_sum = 0;
		for (int64_t u = 0; u < n_units; u++) {
			float top = largest(x + r * n_in + u * UNIT);
			vf inverse = inverse_scale(top), v[N];
			for (int k = 0; k < N; k++)
				v[k] = whole_part(vf_mul(vf_load(x + r * n_in + u * UNIT + k * LANES), inverse));
			store_unit(v, top / 127, out + u * rows + r);
			square_sum += top * top;
		}
		for (int64_t u = 0; u < n_units; u++) {
			float top = 127 * out[u * rows + r].d;
			fine[u * fine_stride + r] = precise || top * top * (float)n_units > FINE_ABOVE * square_sum;
		}
	}
}

/* The part of a unit that quantize() left: eight more bits. */
static void refine(const float *x, struct act *out)
{
	enum { N = UNIT / LANES };
	float top = largest(x);
	vf inverse = inverse_scale(top), v[N];
	for (int k = 0; k < N; k++) {
		vf scaled = vf_mul(vf_load(x + k * LANES), inverse);
		v[k] = vf_round(vf_mul(vf_sub(scaled, whole_part(scaled)), vf_set1(256)));
		v[k] = vf_max(vf_min(v[k], vf_set1(127)), vf_set1(-127));
	}
	store_unit(v, top / 127 * (1.0f / 256), out);
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
	if (t->sums)
		v = vf_add(v, vf_load(t->sums + at / LANES * t->sums_stride + row * LANES));
	vf_store_n(y, v, n);
}

/*
 * Adds the integer products of a group's weights and each row's q; v: the planes of `tiles` tiles, sum: [tiles][rows].
 * With few rows, several partial sums keep the multipliers busy in spite of their latency; without an instruction for
 * four products at a time, partial sums are short integers for as long as they fit. Integer sums are the same in any
 * order.
 */
INLINE void add_products(vi *sum, vb (*v)[8], int rows, int tiles, enum pack_planes planes, int group, int groups,
                         const int8_t *q)
{
	const int subvectors = groups == 1 ? 8 : 4, n = rows * tiles;
	const bool in_shorts = HAS_SHORTS && planes != PLANES_8;
	const int parts = in_shorts ? 1 : n == 1 ? 4 : n <= 3 ? 2 : 1;
	vi part[PRODUCTS_MAX][4];
	UNROLL
	for (int i = 0; i < n && parts > 1; i++)
		UNROLL
		for (int k = 1; k < parts; k++)
			part[i][k] = vi_zero();
	UNROLL
	for (int j = 0; j < subvectors; j++) {
		int sub = group * subvectors + j, k = j % parts, run = short_run(planes);
		vb w[QUANT_TILES];
		UNROLL
		for (int t = 0; t < tiles; t++) {
			w[t] = subvector(v[t], planes, sub);
			vb_pin(&w[t]);
		}
		UNROLL
		for (int i = 0; i < n; i++) {
			const int r = i / tiles, t = i % tiles, at = t * rows + r;
			const int8_t *a = q + r * ROW_STRIDE + 4 * sub;
			if (!in_shorts) {
				vi *to = k == 0 ? &sum[at] : &part[at][k];
				*to = dot(*to, w[t], a, planes);
				vi_pin(to);
				continue;
			}
			part[at][0] = j % run == 0 ? vi_short_products(w[t], a)
			                           : vi_add_shorts(part[at][0], vi_short_products(w[t], a));
			vi_pin(&part[at][0]);
			if (j % run == run - 1 || j == subvectors - 1)
				sum[at] = vi_add(sum[at], vi_pair_sums(part[at][0]));
		}
	}
	UNROLL
	for (int i = 0; i < n && parts > 1; i++)
		UNROLL
		for (int k = 1; k < parts; k++)
			sum[i] = vi_add(sum[i], part[i][k]);
}

/* What a sum begins with: minus the stored integers' offset times the sum of the row's q. */
INLINE vi begin_sum(int32_t minus_sum, int offset)
{
	return offset < 0 ? vi_zero() : vi_shl(vi_set1(minus_sum), offset);
}

/* Where a unit of some tiles is: the scales and planes of the first, and how far behind them the next tile's are. */
struct unit {
	const char *scales, *planes;
	size_t stride;
	struct super super[QUANT_TILES];
};

/*
 * Adds the products of a unit of `tiles` tiles with `rows` rows' part of it; acc: [tiles][rows]. Integer sums are
 * exact; each group adds d_w * d_a * dot (+ min * sum) to the float sum.
 */
INLINE void add_unit(vf *acc, const struct unit *u, const struct act *a, int rows, int tiles, struct form f)
{
	vb v[QUANT_TILES][8];
	const char *s[QUANT_TILES];
	UNROLL
	for (int t = 0; t < tiles; t++) {
		s[t] = u->scales + (size_t)t * u->stride;
		UNROLL
		for (int i = 0; i < unit_bytes(f.planes) / VB; i++) {
			v[t][i] = vb_load(u->planes + (size_t)t * u->stride + i * VB);
			vb_settle(&v[t][i]);
		}
	}
	UNROLL
	for (int g = 0; g < f.groups; g++) {
		vi sum[PRODUCTS_MAX];
		const int which = f.groups == 1 ? 2 : g;
		UNROLL
		for (int i = 0; i < tiles * rows; i++)
			sum[i] = begin_sum(a[i % rows].minus_sum[which], f.offset);
		add_products(sum, v, rows, tiles, f.planes, g, f.groups, a->q);
		UNROLL
		for (int t = 0; t < tiles; t++) {
			const struct unit_scale scale = load_unit_scale(&s[t], u->super[t], f);
			UNROLL
			for (int r = 0; r < rows; r++) {
				const int i = t * rows + r;
				acc[i] = vf_fma(vf_mul(vi_to_float(sum[i]), scale.d), vf_set1(a[r].d), acc[i]);
				if (f.has_min)
					acc[i] = vf_fma(scale.min, vf_set1(a[r].sum[which]), acc[i]);
			}
		}
	}
}

/* Weights that come after `bytes` of them at p. They may end before: addresses that are not there are no fault. */
INLINE void prefetch_ahead(const char *p, int bytes, bool far)
{
	UNROLL
	for (int i = 0; i < bytes; i += 64) {
		__builtin_prefetch(p + PREFETCH_NEAR + i);
		if (far)
			__builtin_prefetch(p + PREFETCH_FAR + i, 0, 2);
	}
}

/* Adds a unit's products with the fine parts of n rows of `rows`; acc is indexed by row. */
INLINE void add_fine(vf *acc, const struct unit *u, const struct act *a, const int32_t *row, int n, int rows,
                     struct form f)
{
	if (n == rows && rows > 1) {
		add_unit(acc, u, a, rows, 1, f);
		return;
	}
	NO_UNROLL
	for (int i = 0; i < n; i++)
		add_unit(&acc[row[i]], u, a + i, 1, 1, f);
}

/* `tiles` tiles of a quantised format times `rows` rows; fine: with their fine parts, of one tile. */
INLINE void tile_quantised(const struct tile_job *j, int rows, int tiles, struct form f, bool fine)
{
	const char *p = j->tile;
	const struct act *a = j->act, *more = j->fine;
	const int32_t *n_fine = j->n_fine, *fine_row = j->fine_row;
	vf acc[PRODUCTS_MAX], acc_fine[PRODUCTS_MAX];
	UNROLL
	for (int i = 0; i < tiles * rows; i++)
		acc[i] = acc_fine[i] = vf_zero();
	for (int64_t left = j->n_units; left > 0; left -= SPAN_UNITS) {
		const int n = f.super || left > SPAN_UNITS ? SPAN_UNITS : (int)left;
		struct unit at = {.scales = p + super_scale_bytes(f),
		                  .planes = p + span_scale_bytes(f, n),
		                  .stride = j->tile_bytes};
		UNROLL
		for (int t = 0; t < tiles; t++) {
			const char *scales = p + (size_t)t * j->tile_bytes, *end = scales + span_scale_bytes(f, n);
			/* All scales before the planes, so that memory sees one ascending stream. */
			for (const char *line = scales; line < end; line += 64)
				__builtin_prefetch(line);
			at.super[t] = load_super(scales, f);
		}
		NO_UNROLL /* the loop fits the decoder's cache, eight copies of it do not */
		for (int u = 0; u < n; u++, a += rows) {
			for (int t = 0; t < tiles && rows >= PREFETCH_ROWS; t++)
				prefetch_ahead(at.planes + (size_t)t * at.stride, unit_bytes(f.planes),
				               f.planes == PLANES_8);
			add_unit(acc, &at, a, rows, tiles, f);
			if (fine) {
				if (*n_fine > 0)
					add_fine(acc_fine, &at, more, fine_row, *n_fine, rows, f);
				n_fine++;
				more += rows;
				fine_row += rows;
			}
			at.planes += unit_bytes(f.planes);
			at.scales += unit_scale_bytes(f);
		}
		p = at.planes;
	}
	UNROLL
	for (int i = 0; i < tiles * rows; i++)
		store_outputs(j, i % rows, i / rows * LANES, acc[i]);
	if (!fine)
		return;
	UNROLL
	for (int r = 0; r < rows; r++) {
		float *y = j->y + r * j->y_stride;
		vf_store_n(y, vf_add(vf_load_n(y, j->n_outs), acc_fine[r]), j->n_outs);
	}
}

/* Adds one unit's products to the sums that `rows` rows have already: for the parts that refine() made. */
INLINE void tile_unit(const struct tile_job *j, int rows, int tiles, struct form f)
{
	const int span = (int)(j->unit / SPAN_UNITS), u = (int)(j->unit % SPAN_UNITS);
	const int64_t left = j->n_units - (int64_t)span * SPAN_UNITS;
	const char *s = j->tile + (int64_t)span * (span_scale_bytes(f, SPAN_UNITS) + SPAN_UNITS * unit_bytes(f.planes));
	const char *p = s + span_scale_bytes(f, left < SPAN_UNITS ? (int)left : SPAN_UNITS) + u * unit_bytes(f.planes);
	struct unit at = {.scales = s + super_scale_bytes(f) + u * unit_scale_bytes(f),
	                  .planes = p,
	                  .stride = j->tile_bytes};
	vf acc[PRODUCTS_MAX];
	UNROLL
	for (int t = 0; t < tiles; t++)
		at.super[t] = load_super(s + (size_t)t * j->tile_bytes, f);
	UNROLL
	for (int i = 0; i < tiles * rows; i++)
		acc[i] = vf_load(j->sums + i / rows * j->sums_stride + j->row[i % rows] * LANES);
	add_unit(acc, &at, j->act, rows, tiles, f);
	UNROLL
	for (int i = 0; i < tiles * rows; i++)
		vf_store(j->sums + i / rows * j->sums_stride + j->row[i % rows] * LANES, acc[i]);
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
		vf x[FLOAT_ROWS];
		UNROLL
		for (int r = 0; r < rows; r++)
			x[r] = vf_set1(t->x[r * t->n_in + k]);
		UNROLL
		for (int v = 0; v < FLOAT_VECTORS; v++) {
			vf w = load_weights(p + v * LANES * bytes, planes);
			UNROLL
			for (int r = 0; r < rows; r++)
				acc[r][v] = vf_fma(w, x[r], acc[r][v]);
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
		for (int v = 0; v < FLOAT_VECTORS && narrow; v++)
			w[v] = vb_load(p + v * VB);
		UNROLL
		for (int r = 0; r < rows && narrow; r++)
			UNROLL
			for (int v = 0; v < FLOAT_VECTORS; v++)
				acc[r][v] = vf_dot_bf16(acc[r][v], w[v], t->narrow + r * stride + k);
		UNROLL
		for (int half = 0; half < 2 && !narrow; half++) {
			vf x[FLOAT_ROWS];
			const char *pairs = p;
			if (k + half == t->n_in)
				break;
			__asm__ volatile("" : "+r"(pairs)); /* read again: there is no room for both halves */
			UNROLL
			for (int r = 0; r < rows; r++)
				x[r] = vf_set1(t->x[r * t->n_in + k + half]);
			UNROLL
			for (int v = 0; v < FLOAT_VECTORS; v++) {
				vb pair = vb_load(pairs + v * VB);
				vf element = half ? vf_high_bf16(pair) : vf_low_bf16(pair);
				UNROLL
				for (int r = 0; r < rows; r++)
					acc[r][v] = vf_fma(element, x[r], acc[r][v]);
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
		vf_store_bf16_n(out + k, vf_load_n(x + k, n - k < LANES ? (int)(n - k) : LANES),
		                n - k < LANES ? (int)(n - k) : LANES);
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

/* Several tiles at once: with as many rows as there may be. */
#define TILES_FUNCTION(name, call, ...)                                                                                \
	static __attribute__((unused)) void name(const struct tile_job *t)                                             \
	{                                                                                                              \
		const struct form form = {__VA_ARGS__};                                                                \
		call;                                                                                                  \
	}

#define QUANTISED(name, ...)                                                                                           \
	TILE_FUNCTION(whole_##name, QUANT_ROWS, tile_quantised(t, ROWS, 1, ((struct form){__VA_ARGS__}), false))       \
	TILE_FUNCTION(fine_##name, QUANT_ROWS, tile_quantised(t, ROWS, 1, ((struct form){__VA_ARGS__}), true))         \
	TILE_FUNCTION(unit_##name, QUANT_ROWS, tile_unit(t, ROWS, 1, ((struct form){__VA_ARGS__})))                    \
	TILES_FUNCTION(tiles_whole_##name, tile_quantised(t, QUANT_ROWS, QUANT_TILES, form, false), __VA_ARGS__)       \
	TILES_FUNCTION(tiles_unit_##name, tile_unit(t, QUANT_ROWS, QUANT_TILES, form), __VA_ARGS__)                    \
	static void tile_##name(const struct tile_job *t, int rows)                                                    \
	{                                                                                                              \
		if (QUANT_TILES > 1 && t->n_tiles > 1)                                                                 \
			tiles_whole_##name(t);                                                                         \
		else if (t->fine)                                                                                      \
			fine_##name(t, rows);                                                                          \
		else                                                                                                   \
			whole_##name(t, rows);                                                                         \
	}                                                                                                              \
	static void add_##name(const struct tile_job *t, int rows)                                                     \
	{                                                                                                              \
		if (QUANT_TILES > 1 && t->n_tiles > 1)                                                                 \
			tiles_unit_##name(t);                                                                          \
		else                                                                                                   \
			unit_##name(t, rows);                                                                          \
	}

#define QUANTISED_FORM(type, name, ...) QUANTISED(name, __VA_ARGS__)
FORMS(QUANTISED_FORM)
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

static void tile_add_unit(const struct tile_job *t, enum quant_type type, int rows)
{
	static void (*const kernel[])(const struct tile_job *, int) = {
	        [QUANT_Q4_0] = add_q4_0, [QUANT_Q4_1] = add_q4_1, [QUANT_Q5_0] = add_q5_0, [QUANT_Q5_1] = add_q5_1,
	        [QUANT_Q8_0] = add_q8_0, [QUANT_Q2_K] = add_q2_k, [QUANT_Q3_K] = add_q3_k, [QUANT_Q4_K] = add_q4_k,
	        [QUANT_Q5_K] = add_q5_k, [QUANT_Q6_K] = add_q6_k,
	};
	kernel[type](t, rows);
}
