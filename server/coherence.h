/*
 * How far answers about neighbouring parts of a document speak of the same things: the cosine between the counts of
 * their tokens, in which a token weighs the less the more of the answers have it,
 *
 *     w(t) = ln(1 + N / df(t)),   c(a, b) = sum_t w(t)^2 a(t) b(t) / (|w a| |w b|)
 *
 * where N is the number of answers, df(t) of how many of them t is a part, and a(t) how often it occurs (Salton and
 * Buckley, "Term-weighting approaches in automatic text retrieval", 1988). 1: the same counts; 0: no token in common.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

struct coherence_text {
	const int32_t *tokens; /* [n] ids */
	size_t n;
};

/* out[i] = c(text i, text i + 1), for i from 0 to n - 2; NAN where one of them is empty. NOMEM. */
enum status coherence_of_neighbours(const struct coherence_text *text, size_t n, double *out);
