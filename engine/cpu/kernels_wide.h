/*
 * Products of quantised weights with activations of sixteen bits: included by the sources of instruction sets that
 * multiply pairs of short integers about as fast as they add up products of bytes. There the two parts of a precise row
 * (struct act) become one, and a product costs one pass rather than two. The sums of integers are exact.
 *
 * Bytes of weights become shorts in two vectors, of the first outputs and of the last, with four inputs of an output
 * next to each other, so that there are two sums for each output until vi_join() adds them.
 */
#pragma once

#include "engine/cpu/kernels_matmul.h"

#define HAS_WIDE /* for kernels_table.h */

/* A unit of a row: 256 * q of the coarse part + q of the fine one. */
struct act_wide {
	int16_t q[UNIT];
};
_Static_assert(sizeof(struct act_wide) == sizeof(struct act), "it takes the place of the fine part");

/* Makes one part of a unit's two, in the place of the fine one; the sums of activations go to the coarse one. */
static void widen(struct act *coarse, struct act *fine)
{
	struct act_wide wide;
	for (int i = 0; i < UNIT; i++)
		wide.q[i] = (int16_t)(256 * coarse->q[i] + fine->q[i]);
	for (int i = 0; i < 3; i++)
		coarse->sum[i] += fine->sum[i];
	memcpy(fine, &wide, sizeof wide);
}

/* add_unit() for parts `wide`; a: their scale, which is a 256th of the coarse part's, and sums. */
INLINE void add_unit_wide(vf *acc, const char *p, const char *s, struct super super, const struct act *a,
			  const struct act_wide *wide, int rows, struct form f)
{
	const int subvectors = 8 / f.groups;
	vb v[8];
	UNROLL
	for (int i = 0; i < unit_bytes(f.planes) / VB; i++)
		v[i] = vb_load(p + i * VB);
	UNROLL
	for (int g = 0; g < f.groups; g++) {
		const struct unit_scale scale = load_unit_scale(&s, super, f);
		vi first[ROWS_MAX], last[ROWS_MAX];
		UNROLL
		for (int r = 0; r < rows; r++)
			first[r] = last[r] = vi_zero();
		UNROLL
		for (int j = g * subvectors; j < (g + 1) * subvectors; j++) {
			vb w = subvector(v, f.planes, j);
			w = f.offset < 0 ? w : vb_sub(w, vb_set1(1 << f.offset));
			vi w_first = vi_first_shorts(w), w_last = vi_last_shorts(w);
			vi_pin(&w_first);
			vi_pin(&w_last);
			UNROLL
			for (int r = 0; r < rows; r++) {
				vi four = vi_four_shorts(wide[r].q + 4 * j);
				first[r] = vi_add(first[r], vi_short_pairs(w_first, four));
				last[r] = vi_add(last[r], vi_short_pairs(w_last, four));
				vi_pin(&first[r]);
				vi_pin(&last[r]);
			}
		}
		UNROLL
		for (int r = 0; r < rows; r++) {
			vf sum = vi_to_float(vi_join(first[r], last[r]));
			acc[r] = vf_fma(vf_mul(sum, scale.d), vf_set1(a[r].d * (1.0f / 256)), acc[r]);
			if (f.has_min)
				acc[r] = vf_fma(scale.min, vf_set1(a[r].sum[f.groups == 1 ? 2 : g]), acc[r]);
		}
	}
}

/* A tile of a quantised format times `rows` rows, all of whose units are wide. */
INLINE void tile_quantised_wide(const struct tile_job *t, int rows, struct form f)
{
	const char *p = t->tile;
	const struct act *a = t->act;
	const struct act_wide *wide = (const struct act_wide *)(const void *)t->fine;
	vf acc[ROWS_MAX];
	UNROLL
	for (int r = 0; r < rows; r++)
		acc[r] = vf_zero();
	for (int64_t left = t->n_units; left > 0; left -= SPAN_UNITS) {
		const int n = f.super || left > SPAN_UNITS ? SPAN_UNITS : (int)left;
		const char *s = p + super_scale_bytes(f);
		struct super super = load_super(p, f);
		p += span_scale_bytes(f, n);
		NO_UNROLL
		for (int u = 0; u < n; u++, a += rows, wide += rows) {
			if (rows >= PREFETCH_ROWS)
				prefetch_ahead(p, unit_bytes(f.planes), f.planes == PLANES_8);
			add_unit_wide(acc, p, s, super, a, wide, rows, f);
			p += unit_bytes(f.planes);
			s += unit_scale_bytes(f);
		}
	}
	UNROLL
	for (int r = 0; r < rows; r++)
		store_outputs(t, r, 0, acc[r]);
}

#define WIDE_FORM(type, name, ...)                                                                                     \
	TILE_FUNCTION(wide_##name, QUANT_ROWS, tile_quantised_wide(t, ROWS, ((struct form){__VA_ARGS__})))
FORMS(WIDE_FORM)

static void tile_wide(const struct tile_job *t, enum quant_type type, int rows)
{
	static void (*const kernel[])(const struct tile_job *, int) = {
#define WIDE_ROW(type, name, ...) [type] = wide_##name,
		FORMS(WIDE_ROW)
	};
	kernel[type](t, rows);
}
