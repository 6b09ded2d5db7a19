/*
 * The frequency tables of rotary position embeddings (arXiv:2104.09864) and of the ways to stretch them to longer
 * contexts.
 */
#pragma once

#include "engine/model/arch.h"

/*
 * Writes inv_freq[p->rope_dims / 2]: pair i of a head at position m is turned by m * inv_freq[i]. factors,
 * [p->rope_dims / 2] or NULL, are divisors from the model file (tensor rope_freqs.weight); with them the llama3 scaling
 * is already told and not applied again.
 */
void rope_frequencies(const struct model_params *p, const float *factors, float *inv_freq);

/* The same for layers with a base of their own (p->rope_base_local), which no scaling stretches. */
void rope_frequencies_local(const struct model_params *p, float *inv_freq);

/* What sine and cosine are multiplied by: 1 unless the scaling or the file asks for more. */
float rope_magnitude(const struct model_params *p);
