/*
 * How the units of quantised formats stand in tiles, over the primitives of one instruction set: what kernels_matmul.h
 * and kernels_amx.h take them apart with. Layouts: fast.h.
 */
#pragma once

#include "engine/cpu/fast.h"

#if defined(KVASIR_EMULATE_AVX512)
#define UNROLL /* functions in place of instructions would take the compiler many minutes */
#define NO_UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define NO_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define NO_UNROLL _Pragma("GCC unroll 1")
#endif

enum { VB = 4 * LANES }; /* bytes of a byte vector */

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

/* Subvector j of the unit whose planes are the vectors v; the other arguments are constants after inlining. */
INLINE vb subvector(const vb *v, enum pack_planes planes, int j)
{
	vb low;
	switch (planes) {
	case PLANES_8:
		return vb_prepare_s8(v[j]);
	case PLANES_2:
	case PLANES_2_1:
		low = vb_and(move_bit(v[j / 4], 2 * (j % 4), 0), vb_set1(3));
		return planes == PLANES_2 ? low : vb_or_and(low, move_bit(v[2], j, 2), vb_set1(4));
	default:
		low = vb_and(move_bit(v[j % 4], j / 4 * 4, 0), vb_set1(15));
		if (planes == PLANES_4_1)
			low = vb_or_and(low, move_bit(v[4], j, 4), vb_set1(16));
		if (planes == PLANES_4_2)
			low = vb_or_and(low, move_bit(v[4 + j / 4], 2 * (j % 4), 4), vb_set1(48));
		return low;
	}
}

/*
 * How a quantised format stands in tiles: the arguments of its pack_format row, and its offset: the stored integers are
 * too large by 1 << offset; -1: by nothing. All are constants after inlining.
 */
struct form {
	enum pack_planes planes;
	int groups;
	bool has_min, super;
	int offset;
};

INLINE int unit_scale_bytes(struct form f)
{
	return f.groups * (f.super ? 1 : 2) * (f.has_min ? 2 : 1) * LANES;
}

INLINE int super_scale_bytes(struct form f)
{
	return (f.super ? f.has_min ? 4 : 2 : 0) * LANES;
}

/* Bytes of the scales of a span of n units. */
INLINE int span_scale_bytes(struct form f, int n)
{
	return (super_scale_bytes(f) + n * unit_scale_bytes(f) + VB - 1) & -VB;
}

/* The scales of a super-block, where the format has them. */
struct super {
	vf d, dmin;
};

INLINE struct super load_super(const char *s, struct form f)
{
	struct super super = {vf_zero(), vf_zero()};
	if (f.super)
		super.d = vf_load_half(s);
	if (f.super && f.has_min)
		super.dmin = vf_load_half(s + 2 * LANES);
	return super;
}

/* The scales of a group: x = d * q + min. */
struct unit_scale {
	vf d, min;
};

/* Of the next group, whose scales are at *s; min: zero where the format has none. */
INLINE struct unit_scale load_unit_scale(const char **s, struct super super, struct form f)
{
	struct unit_scale scale = {.min = vf_zero()};
	scale.d = f.super ? vf_mul(vf_load_s8(*s), super.d) : vf_load_half(*s);
	*s += f.super ? LANES : 2 * LANES;
	if (f.has_min) {
		scale.min = f.super ? vf_mul(vf_load_s8(*s), super.dmin) : vf_load_half(*s);
		*s += f.super ? LANES : 2 * LANES;
	}
	return scale;
}

/*
 * The forms of all quantised formats: planes, groups, has_min and super as in the pack_format row; offset of the
 * format.
 */
#define FORMS(X)                                                                                                       \
	X(QUANT_Q4_0, q4_0, PLANES_4, 1, false, false, 3)                                                              \
	X(QUANT_Q4_1, q4_1, PLANES_4, 1, true, false, -1)                                                              \
	X(QUANT_Q5_0, q5_0, PLANES_4_1, 1, false, false, 4)                                                            \
	X(QUANT_Q5_1, q5_1, PLANES_4_1, 1, true, false, -1)                                                            \
	X(QUANT_Q8_0, q8_0, PLANES_8, 1, false, false, S8_SHIFT)                                                       \
	X(QUANT_Q2_K, q2_k, PLANES_2, 2, true, true, -1)                                                               \
	X(QUANT_Q3_K, q3_k, PLANES_2_1, 2, false, true, 2)                                                             \
	X(QUANT_Q4_K, q4_k, PLANES_4, 1, true, true, -1)                                                               \
	X(QUANT_Q5_K, q5_k, PLANES_4_1, 1, true, true, -1)                                                             \
	X(QUANT_Q6_K, q6_k, PLANES_4_2, 2, false, true, 5)
