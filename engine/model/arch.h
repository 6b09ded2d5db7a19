/*
 * What a model is made of: hyper-parameters read from GGUF metadata through one table row per architecture.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/model/gguf.h"

enum rope_scaling { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_LLAMA3, ROPE_SCALING_YARN };

struct model_params {
	const char *arch; /* "llama", "qwen2", "qwen3" */
	int32_t n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim, n_vocab;
	int32_t n_ctx_train;
	float rms_eps;
	bool qkv_bias;      /* the architecture has biases on q, k and v */
	bool qk_norm;       /* RMS norm of each head's q and k before RoPE */
	bool tied_output;   /* no output.weight: the embedding matrix is the output matrix */
	enum rope_pairing rope_pairing;
	enum rope_scaling rope_scaling;
	int32_t rope_dims;
	float rope_base;
	float rope_factor;               /* linear, yarn, llama3 */
	int32_t rope_original_ctx;       /* yarn, llama3 */
	float rope_attn_factor;          /* yarn; 0: derived from the factor */
	float yarn_beta_fast, yarn_beta_slow, yarn_ext_factor;
};

/* UNSUPPORTED names the unknown architecture or RoPE type; INVALID or CORRUPT what does not fit together. */
enum status arch_read_params(const struct gguf *g, struct model_params *out, struct error *err);
/* A line naming all supported architectures, for messages. */
const char *arch_supported(void);
