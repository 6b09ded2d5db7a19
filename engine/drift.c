#include "engine/drift.h"

#include <math.h>
#include <stdlib.h>

struct drift *drift_create(int32_t n_vocab)
{
	struct drift *d = calloc(1, sizeof *d);
	if (!d)
		return NULL;
	d->n_vocab = n_vocab;
	d->sampled_at = -1;
	d->exact = malloc(2 * (size_t)n_vocab * sizeof *d->exact); /* and the policy's behind them */
	if (!d->exact) {
		free(d);
		return NULL;
	}
	return d;
}

void drift_destroy(struct drift *d)
{
	if (!d)
		return;
	free(d->exact);
	free(d);
}

bool drift_wants(const struct drift *d, int32_t position, int32_t i)
{
	return d->sampled_at < position && i % DRIFT_EVERY == 0;
}

static void probabilities(const float *logits, int32_t n, float *p)
{
	float max = -INFINITY;
	double sum = 0;
	for (int32_t i = 0; i < n; i++)
		max = logits[i] > max ? logits[i] : max;
	for (int32_t i = 0; i < n; i++)
		sum += p[i] = expf(logits[i] - max);
	for (int32_t i = 0; i < n; i++)
		p[i] = (float)(p[i] / sum);
}

double drift_divergence(const float *p, const float *q, int32_t n)
{
	double sum = 0;
	for (int32_t i = 0; i < n; i++) {
		double mean = 0.5 * ((double)p[i] + q[i]);
		sum += p[i] > 0 ? 0.5 * p[i] * log(p[i] / mean) : 0;
		sum += q[i] > 0 ? 0.5 * q[i] * log(q[i] / mean) : 0;
	}
	return sum > 0 ? sum : 0;
}

void drift_exact(struct drift *d, int32_t position, const float *logits)
{
	probabilities(logits, d->n_vocab, d->exact);
	d->sampled_at = position;
	d->pending = true;
}

void drift_compare(struct drift *d, const float *logits)
{
	float *policy = d->exact + d->n_vocab;
	if (!d->pending)
		return;
	probabilities(logits, d->n_vocab, policy);
	double divergence = drift_divergence(d->exact, policy, d->n_vocab);
	d->pending = false;
	d->n++;
	d->sum += divergence;
	d->most = divergence > d->most ? divergence : d->most;
}
