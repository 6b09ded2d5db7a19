/*
 * Selection of the best-scored part of a vocabulary in linear time and without sorting: the mechanism below top-k,
 * top-p and typical sampling.
 */
#pragma once

#include <stdint.h>

/*
 * Keeps elements from the highest score downwards until their mass together reaches `target` (at least one is kept),
 * and writes `dropped` to values[i] of all others. mass[i] <= 0 or score[i] == -infinity or NaN is never kept; mass ==
 * NULL counts 1 each, which makes target a number of elements. Elements with mass below `least` are dropped without
 * being looked at, which the caller knows to be right. Equal scores are kept from the lowest index up. `values` may be
 * `score` or `mass`.
 *
 * score, mass, values: [n].
 */
void select_best(const float *score, const float *mass, int32_t n, double target, float least, float *values,
                 float dropped);
