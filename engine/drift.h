/*
 * How far the next token's distribution under a policy is from what it would be without: by exact rows that are
 * computed now and then beside the policy's. Where all pages are still there (QUEST), every DRIFT_EVERY-th token of an
 * answer that has to choose is first computed as a row that reads everything; the row that chooses then writes over
 * what it left. Exact is thus what the model would say now, after an answer that was written under the policy.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"

enum { DRIFT_EVERY = 16 };

struct drift {
	int32_t n_vocab;
	int32_t sampled_at; /* the last position that was computed exactly; -1: none */
	bool pending;       /* its row under the policy is still to come */
	float *exact;       /* [n_vocab] its probabilities */
	int32_t n;
	double sum, most;   /* of the divergences so far */
};

/* NULL without memory. */
struct drift *drift_create(int32_t n_vocab);
void drift_destroy(struct drift *d); /* NULL is allowed */
/* Whether the row at a position, the i-th of its answer, which chooses, is to be computed exactly now. */
bool drift_wants(const struct drift *d, int32_t position, int32_t i);
/* The logits of that row, and then of the policy's. */
void drift_exact(struct drift *d, int32_t position, const float *logits);
void drift_compare(struct drift *d, const float *logits);
/* The Jensen-Shannon divergence (Lin, 1991) of two distributions over n things, in nats: 0 to ln 2. */
double drift_divergence(const float *p, const float *q, int32_t n);
