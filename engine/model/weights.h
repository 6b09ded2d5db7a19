/*
 * The tensors of a model: checked against a table of what its architecture needs, then handed to the backend.
 */
#pragma once

#include "engine/model/arch.h"

/* A matrix and, where the file has one, its bias (a device address, else NULL). */
struct linear {
	struct weight *weight;
	const float *bias;
};

/* Vectors are device addresses. */
struct layer_weights {
	const float *attn_norm; /* [n_embd] */
	struct linear q;        /* n_embd -> n_head * head_dim */
	struct linear k, v;     /* n_embd -> n_head_kv * head_dim */
	const float *q_norm;    /* [head_dim], or NULL */
	const float *k_norm;    /* [head_dim], or NULL */
	struct linear o;        /* n_head * head_dim -> n_embd */
	const float *post_attn_norm; /* [n_embd], or NULL */
	const float *ffn_norm;  /* [n_embd] */
	struct linear gate, up; /* n_embd -> n_ff */
	struct linear down;     /* n_ff -> n_embd */
	const float *post_ffn_norm; /* [n_embd], or NULL */
};

struct model_weights {
	struct backend *backend;
	struct weight *embedding;     /* n_vocab rows of n_embd */
	const float *output_norm;     /* [n_embd] */
	struct weight *output;        /* n_embd -> n_vocab; the embedding itself when they are tied */
	struct layer_weights *layers; /* [n_layer] */
	int32_t n_layer;
	void *vectors; /* device memory of all norms and biases */
	size_t vectors_bytes;
};

/*
 * Creates every weight on b. g and b must outlive the weights. Errors name the tensor and what it should be: NOT_FOUND,
 * CORRUPT (shape), UNSUPPORTED (a format the backend or a vector cannot have, or a tensor inside a layer that the
 * forward pass does not know and that would change the result), NOMEM. On failure nothing is left allocated.
 */
enum status weights_load(const struct gguf *g, struct backend *b, const struct model_params *p,
                         struct model_weights *out, struct error *err);
void weights_free(struct model_weights *w);

/* Reads a vector of n elements in F32, F16 or BF16 into host memory. *out is malloc'd. NULL tensor: *out = NULL. */
enum status weights_read_vector(const struct gguf_tensor *t, int64_t n, float **out, struct error *err);
