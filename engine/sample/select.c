#include "engine/sample/select.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

/*
 * A weighted radix select. Scores become unsigned keys in the same order. Three passes look at 11, 11 and 10 bits of
 * the keys that begin as the threshold does: each adds up the mass per digit, and walks from the highest digit down to
 * the one in which the target is reached. The threshold is then a whole key.
 */
enum { DIGIT_BITS = 11, N_DIGITS = 1 << DIGIT_BITS, BLOCK = 256 };

/*
 * Keys of count <= BLOCK elements, 0 for those that must not be kept. IEEE 754: flipping the sign bit of positive
 * numbers and all bits of negative ones makes integer order the order of the floats. Free of branches, so that it
 * becomes vector code. Returns 0 when all keys are 0, as they mostly are once another filter has been at work.
 */
static uint32_t block_keys(const float *score, const float *mass, int32_t count, float least, uint32_t key[BLOCK])
{
	uint32_t any = 0;
	for (int32_t i = 0; i < count; i++) {
		float x = score[i] + 0.0f; /* -0 becomes +0: they are equal */
		uint32_t bits, eligible = -(uint32_t)(x > -INFINITY);
		memcpy(&bits, &x, sizeof bits);
		bits ^= (uint32_t)((int32_t)bits >> 31) | 0x80000000u;
		key[i] = bits & eligible;
	}
	for (int32_t i = 0; mass && i < count; i++)
		key[i] &= -(uint32_t)((mass[i] > 0.0f) & (mass[i] >= least));
	for (int32_t i = 0; i < count; i++)
		any |= key[i];
	return any;
}

void select_best(const float *score, const float *mass, int32_t n, double target, float least, float *values,
                 float dropped)
{
	static const struct {
		int shift, bits;
	} pass[] = {{21, 11}, {10, 11}, {0, 10}};
	double sum[N_DIGITS];
	uint32_t key[BLOCK];
	double above = 0.0; /* mass of the keys above those that begin with the threshold's digits so far */
	uint32_t threshold = 0, known = 0; /* digits of the threshold found so far, and their mask */
	for (int p = 0; p < 3; p++) {
		uint32_t digit_mask = (1u << pass[p].bits) - 1;
		memset(sum, 0, sizeof sum);
		for (int32_t at = 0; at < n; at += BLOCK) {
			int32_t count = n - at < BLOCK ? n - at : BLOCK;
			if (!block_keys(score + at, mass ? mass + at : NULL, count, least, key))
				continue;
			for (int32_t i = 0; i < count; i++) {
				if (key[i] && (key[i] & known) == threshold)
					sum[key[i] >> pass[p].shift & digit_mask] += mass ? (double)mass[at + i] : 1.0;
			}
		}
		/* The lowest digit that holds anything is the answer if rounding keeps the target out of reach. */
		int32_t digit = -1;
		for (int32_t d = (int32_t)digit_mask; d >= 0; d--) {
			if (sum[d] <= 0.0)
				continue;
			if (digit >= 0)
				above += sum[digit];
			digit = d;
			if (above + sum[d] >= target)
				break;
		}
		if (digit < 0) /* nothing is eligible */
			break;
		threshold |= (uint32_t)digit << pass[p].shift;
		known |= digit_mask << pass[p].shift;
	}

	double kept = above;
	bool any = false;
	for (int32_t at = 0; at < n; at += BLOCK) {
		int32_t count = n - at < BLOCK ? n - at : BLOCK;
		if (!block_keys(score + at, mass ? mass + at : NULL, count, least, key)) {
			for (int32_t i = 0; i < count; i++)
				values[at + i] = dropped;
			continue;
		}
		for (int32_t i = 0; i < count; i++) {
			bool keep = key[i] > threshold;
			if (key[i] == threshold && key[i]) {
				/* Equals share what is left, in order of their index. */
				keep = kept < target || !any;
				kept += mass ? (double)mass[at + i] : 1.0;
				any = true;
			}
			values[at + i] = keep ? values[at + i] : dropped;
		}
	}
}
