/* Row operations over the primitives of one instruction set: included by avx2.c and its like. */
#pragma once

#include <math.h>

#include "engine/cpu/fast.h"

/* 2^x to about one unit in the last place; 0 from -150 down. NaN stays NaN. */
INLINE vf exp2_vf(vf x)
{
	/* Taylor series of 2^f, |f| <= 0.5: the first term left out is below 1.3e-7 of the result. */
	x = vf_max(vf_set1(-200), x);
	vf n = vf_round(x), f = vf_sub(x, n);
	vf y = vf_set1(0x1.430912p-13f); /* ln(2)^6 / 6! */
	y = vf_fma(y, f, vf_set1(0x1.5d87fep-10f));
	y = vf_fma(y, f, vf_set1(0x1.3b2ab6p-7f));
	y = vf_fma(y, f, vf_set1(0x1.c6b08ep-5f));
	y = vf_fma(y, f, vf_set1(0x1.ebfbep-3f));
	y = vf_fma(y, f, vf_set1(0x1.62e43p-1f)); /* ln(2) */
	y = vf_fma(y, f, vf_set1(1));
	return vf_scale2(y, n);
}

/* Elements of a normed row; what is there is read only if it counts. */
INLINE vf normed(vf x, vf scale, vf gain, bool add, const float *out, int n)
{
	vf y = vf_mul(vf_mul(x, scale), gain);
	return add ? vf_add(y, n == LANES ? vf_load(out) : vf_load_n(out, n)) : y;
}

static void rms_norm(const float *x, int32_t dim, const float *gain, float eps, bool add, float *out)
{
	vf part[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
	int32_t i = 0;
	for (; i + 4 * LANES <= dim; i += 4 * LANES)
		for (int k = 0; k < 4; k++) {
			vf v = vf_load(x + i + k * LANES);
			part[k] = vf_fma(v, v, part[k]);
		}
	for (; i < dim; i += LANES) {
		vf v = vf_load_n(x + i, dim - i < LANES ? dim - i : LANES);
		part[0] = vf_fma(v, v, part[0]);
	}
	float sum = vf_hsum(vf_add(vf_add(part[0], part[1]), vf_add(part[2], part[3])));
	vf scale = vf_set1(1 / sqrtf(sum / (float)dim + eps));
	for (i = 0; i + LANES <= dim; i += LANES)
		vf_store(out + i, normed(vf_load(x + i), scale, vf_load(gain + i), add, out + i, LANES));
	if (i < dim)
		vf_store_n(
			out + i,
			normed(vf_load_n(x + i, dim - i), scale, vf_load_n(gain + i, dim - i), add, out + i, dim - i),
			dim - i);
}

INLINE vf silu_times(vf gate, vf up)
{
	/* exp(-x) beyond 2^127 would be infinite and x / inf is the right limit, 0; -inf itself does not matter. */
	vf e = exp2_vf(vf_mul(gate, vf_set1(-0x1.715476p+0f)));
	return vf_mul(vf_div(gate, vf_add(vf_set1(1), e)), up);
}

/* x / 2 * (1 + tanh(y)) = x / (1 + exp(-2 y)), so GELU is a SiLU of another argument. */
INLINE vf gelu_times(vf gate, vf up)
{
	/*
	 * -2 log2(e) sqrt(2 / pi) (x + 0.044715 x^3); a sum whose powers of two leave the floats is 0 or x in the end.
	 */
	vf cubic = vf_fma(vf_mul(gate, gate), vf_set1(-0x1.a5a7dp-4f), vf_set1(-0x1.26aec2p+1f));
	vf e = exp2_vf(vf_min(vf_mul(gate, cubic), vf_set1(126)));
	return vf_mul(vf_div(gate, vf_add(vf_set1(1), e)), up);
}

INLINE vf gated(enum glu f, vf gate, vf up)
{
	return f == GLU_GELU ? gelu_times(gate, up) : silu_times(gate, up);
}

INLINE void glu_of(enum glu f, float *gate, const float *up, int64_t n)
{
	int64_t i = 0;
	for (; i + LANES <= n; i += LANES)
		vf_store(gate + i, gated(f, vf_load(gate + i), vf_load(up + i)));
	if (i < n) {
		int left = (int)(n - i);
		vf_store_n(gate + i, gated(f, vf_load_n(gate + i, left), vf_load_n(up + i, left)), left);
	}
}

static void glu(enum glu f, float *gate, const float *up, int64_t n)
{
	if (f == GLU_GELU)
		glu_of(GLU_GELU, gate, up, n);
	else
		glu_of(GLU_SILU, gate, up, n);
}

/*
 * cap * tanh(x / cap), to a few units in the last place of the cap; to_exponent: 2 log2(e) / cap. What is no number, or
 * infinite, gives NaN.
 */
INLINE vf softcapped(vf x, vf cap, vf to_exponent)
{
	/* tanh(y) = 1 - 2 / (1 + exp(2 y)); vf_min() and exp2_vf() make numbers of NaNs. */
	vf e = exp2_vf(vf_min(vf_mul(x, to_exponent), vf_set1(126)));
	vf t = vf_sub(vf_set1(1), vf_div(vf_set1(2), vf_add(vf_set1(1), e)));
	return vf_fma(x, vf_zero(), vf_mul(cap, t));
}

static void softcap(float *x, int64_t n, float cap)
{
	const vf c = vf_set1(cap), to_exponent = vf_set1(0x1.715476p+1f / cap);
	int64_t i = 0;
	for (; i + LANES <= n; i += LANES)
		vf_store(x + i, softcapped(vf_load(x + i), c, to_exponent));
	if (i < n)
		vf_store_n(x + i, softcapped(vf_load_n(x + i, (int)(n - i)), c, to_exponent), (int)(n - i));
}

static void rope(float *x, int32_t n_dims, enum rope_pairing pairing, const float *cs)
{
	int32_t half = n_dims / 2;
	if (pairing == ROPE_INTERLEAVED) {
		for (int32_t i = 0; i < 2 * half; i += LANES) {
			int n = 2 * half - i < LANES ? 2 * half - i : LANES;
			vf v = vf_load_n(x + i, n), t = vf_load_n(cs + i, n);
			vf turned = vf_mul(vf_swap_pairs(v), vf_odd_twice(t));
			vf_store_n(x + i, vf_fmaddsub(v, vf_even_twice(t), turned), n);
		}
		return;
	}
	for (int32_t i = 0; i < half; i += LANES) {
		int n = half - i < LANES ? half - i : LANES;
		vf a = vf_load_n(x + i, n), b = vf_load_n(x + half + i, n);
		vf c = vf_load_n(cs + i, n), s = vf_load_n(cs + half + i, n);
		vf_store_n(x + i, vf_fnma(b, s, vf_mul(a, c)), n);
		vf_store_n(x + half + i, vf_fma(a, s, vf_mul(b, c)), n);
	}
}

static void scale(const float *x, float factor, int64_t n, float *out)
{
	for (int64_t i = 0; i < n; i++)
		out[i] = x[i] * factor;
}
