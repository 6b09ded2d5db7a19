/*
 * Products by matrix tiles: included by amx.c and amx_emulated.c, which give the tile functions
 *
 *   tile_begin(), tile_end()     around all others: eight tiles of 16 rows of 64 bytes
 *   tile_zero(t)
 *   tile_load(t, p, stride)      16 rows of 64 bytes, `stride` bytes apart
 *   tile_store(t, p)             16 rows in a row
 *   tile_dot_bf16(c, a, b)       c[m][n] += sum over k of a[m][k] * b[k / 2][n][k % 2]
 *
 * whose tile numbers are constants. 16 outputs of a matrix are a strip: for each 32 inputs a tile [16 pairs of
 * inputs][16 outputs][2].
 */
#pragma once

#include <string.h>

#include "engine/cpu/amx.h"
#include "engine/cpu/kernels_unit.h"

enum { TILE_BYTES = AMX_ROWS * 64 };

/*
 * The tiles: sums of [tile of rows][strip], two strips, two tiles of rows. Literals, which is what gcc's intrinsics
 * want.
 */
#define SUM_00 0
#define SUM_01 1
#define SUM_10 2
#define SUM_11 3
#define STRIP_0 4
#define STRIP_1 5
#define ROWS_0 6
#define ROWS_1 7

_Static_assert((int)LANES == (int)AMX_ROWS && (int)UNIT == (int)AMX_K, "a unit of a quantised tile becomes a tile");

/* A strip ready to be multiplied: tiles `step` bytes apart, their rows `stride`. */
struct strip {
	const char *at;
	size_t step, stride;
};

/* Floats a and b as bfloat16s: pairs of a lane's a and b. */
INLINE vb bf16_pairs(vf a, vf b)
{
	static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
	                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
	return _mm512_permutexvar_epi16(_mm512_loadu_si512(order), (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

/* Byte `at` of each lane of w as x * scale.d + scale.min. */
INLINE vf dequantized_byte(vb w, int at, struct unit_scale scale)
{
	__m512i x = _mm512_and_si512(_mm512_srli_epi32(w, 8 * (unsigned)at), _mm512_set1_epi32(0xFF));
	return vf_fma(vi_to_float(x), scale.d, scale.min);
}

/* A unit, whose planes are at p and scales at s, as a tile. The stored integers' offset is part of the minimum. */
INLINE void dequantize_unit(const char *p, const char *s, struct super super, struct form f, char *out)
{
	vb v[8];
	UNROLL
	for (int i = 0; i < unit_bytes(f.planes) / VB; i++)
		v[i] = vb_load(p + i * VB);
	UNROLL
	for (int g = 0; g < f.groups; g++) {
		const int n = 8 / f.groups;
		struct unit_scale scale = load_unit_scale(&s, super, f);
		if (!f.has_min && f.offset >= 0)
			scale.min = vf_mul(scale.d, vf_set1(-(float)(1 << f.offset)));
		UNROLL
		for (int j = g * n; j < (g + 1) * n; j++, out += 2 * VB) {
			vb w = subvector(v, f.planes, j);
			_mm512_storeu_si512(out, bf16_pairs(dequantized_byte(w, 0, scale),
			                                    dequantized_byte(w, 1, scale)));
			_mm512_storeu_si512(out + VB, bf16_pairs(dequantized_byte(w, 2, scale),
			                                         dequantized_byte(w, 3, scale)));
		}
	}
}

INLINE void dequantize_tile(const char *p, int64_t n_units, struct form f, char *out)
{
	for (int64_t left = n_units; left > 0; left -= SPAN_UNITS) {
		const int n = left > SPAN_UNITS ? SPAN_UNITS : (int)left;
		const char *s = p + super_scale_bytes(f);
		struct super super = load_super(p, f);
		p += span_scale_bytes(f, n);
		NO_UNROLL
		for (int u = 0; u < n; u++, p += unit_bytes(f.planes), s += unit_scale_bytes(f), out += TILE_BYTES)
			dequantize_unit(p, s, super, f, out);
	}
}

#define DEQUANTIZE(type, name, ...)                                                                                    \
	static void dequantize_##name(const char *p, int64_t n_units, char *out)                                       \
	{                                                                                                              \
		dequantize_tile(p, n_units, (struct form){__VA_ARGS__}, out);                                          \
	}
FORMS(DEQUANTIZE)

/* Strip i of a matrix, in place where it is one already, else in `room`. */
static struct strip get_strip(const struct weight *w, int64_t i, char *room)
{
	static void (*const dequantize[])(const char *, int64_t, char *) = {
#define DEQUANTIZE_ROW(type, name, ...) [type] = dequantize_##name,
	        FORMS(DEQUANTIZE_ROW)
	};
	if (!pack_is_float(w->format)) {
		dequantize[w->format->type](w->tiles + (size_t)i * w->tile_bytes, w->n_units, room);
		return (struct strip){room, TILE_BYTES, VB};
	}
	const int64_t per_tile = w->tile_outs / AMX_ROWS, n_pairs = (w->desc.n_in + 1) / 2;
	const size_t stride = (size_t)per_tile * VB;
	const char *from = w->tiles + (size_t)(i / per_tile) * w->tile_bytes + (size_t)(i % per_tile) * VB;
	if (n_pairs % AMX_ROWS == 0)
		return (struct strip){from, AMX_ROWS * stride, stride};
	for (int64_t k = 0; k < amx_stride(w->desc.n_in) / 2; k++, from += stride) {
		if (k < n_pairs)
			memcpy(room + k * VB, from, VB);
		else
			memset(room + k * VB, 0, VB);
	}
	return (struct strip){room, TILE_BYTES, VB};
}

/* Writes a tile of sums: of rows from `row` on, of strip `strip`. */
static void store_sums(const struct amx_job *j, const float *sums, int64_t row, int64_t strip)
{
	const int64_t n_out = j->weight->desc.n_out, at = strip * AMX_ROWS;
	const int n = n_out - at < LANES ? (int)(n_out - at) : LANES;
	const vf bias = j->bias ? vf_load_n(j->bias + at, n) : vf_zero();
	for (int64_t r = 0; r < AMX_ROWS && row + r < j->n_rows; r++) {
		float *y = j->y + (row + r) * n_out + at;
		vf v = vf_add(vf_load(sums + r * LANES), bias);
		vf_store_n(y, j->accumulate ? vf_add(v, vf_load_n(y, n)) : v, n);
	}
}

/* Rows from `row` on, one tile of them or two, times one strip or two. */
INLINE void multiply_block(const struct amx_job *j, int64_t row, const struct strip *strips, int64_t strip,
                           bool two_rows, bool two_strips, float *sums)
{
	const size_t stride = (size_t)j->stride * sizeof *j->x;
	const char *x = (const char *)(j->x + row * j->stride);
	tile_zero(SUM_00);
	tile_zero(SUM_01);
	tile_zero(SUM_10);
	tile_zero(SUM_11);
	for (int64_t k = 0; k < j->stride / AMX_K; k++) {
		tile_load(STRIP_0, strips[0].at + (size_t)k * strips[0].step, strips[0].stride);
		tile_load(ROWS_0, x + k * 64, stride);
		tile_dot_bf16(SUM_00, ROWS_0, STRIP_0);
		if (two_strips) {
			tile_load(STRIP_1, strips[1].at + (size_t)k * strips[1].step, strips[1].stride);
			tile_dot_bf16(SUM_01, ROWS_0, STRIP_1);
		}
		if (two_rows) {
			tile_load(ROWS_1, x + k * 64 + AMX_ROWS * stride, stride);
			tile_dot_bf16(SUM_10, ROWS_1, STRIP_0);
			if (two_strips)
				tile_dot_bf16(SUM_11, ROWS_1, STRIP_1);
		}
	}
	tile_store(SUM_00, sums);
	store_sums(j, sums, row, strip);
	if (two_strips) {
		tile_store(SUM_01, sums);
		store_sums(j, sums, row, strip + 1);
	}
	if (two_rows) {
		tile_store(SUM_10, sums);
		store_sums(j, sums, row + AMX_ROWS, strip);
	}
	if (two_rows && two_strips) {
		tile_store(SUM_11, sums);
		store_sums(j, sums, row + AMX_ROWS, strip + 1);
	}
}

static void product(const struct amx_job *j)
{
	const int64_t per_tile = j->weight->tile_outs / AMX_ROWS,
		      n_strips = (j->weight->desc.n_out + AMX_ROWS - 1) / AMX_ROWS;
	const int64_t end = j->end * per_tile < n_strips ? j->end * per_tile : n_strips;
	char *room = j->scratch;
	float *sums = (float *)(void *)(room + (size_t)j->stride * AMX_BLOCK * AMX_ROWS * sizeof *j->x);
	tile_begin();
	for (int64_t s = j->begin * per_tile; s < end; s += AMX_BLOCK) {
		const bool two_strips = s + 1 < end;
		struct strip strips[AMX_BLOCK] = {get_strip(j->weight, s, room)};
		if (two_strips)
			strips[1] = get_strip(j->weight, s + 1, room + (size_t)j->stride * AMX_ROWS * sizeof *j->x);
		for (int64_t row = 0; row < j->n_rows; row += AMX_BLOCK * AMX_ROWS) {
			const bool two_rows = row + AMX_ROWS < j->n_rows;
			if (two_rows && two_strips)
				multiply_block(j, row, strips, s, true, true, sums);
			else
				multiply_block(j, row, strips, s, two_rows, two_strips, sums);
		}
	}
	tile_end();
}
