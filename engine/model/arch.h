/*
 * What a model is made of: hyper-parameters read from GGUF metadata through one table row per architecture.
 *
 * A setting that would change the results and that this engine does not compute (experts, scaled residuals)
 * is refused by name. Metadata of the architecture that is not known at all is named in a warning.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/model/gguf.h"

enum rope_scaling { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_LLAMA3, ROPE_SCALING_YARN };

struct model_params {
	const char *arch; /* "llama", "qwen2", ... */
	int32_t n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim, n_vocab;
	/*
	 * The longest context whose results are the model's own. Where a file has a window but nobody knows of which
	 * layers, that is the window: as long as the context fits in it, every row sees all rows before it whichever
	 * they are.
	 */
	int32_t n_ctx_train;
	/* as far as positions are stretched: n_ctx_train, unless that was chosen otherwise (rope_choice.h) */
	int32_t n_ctx;
	int32_t ctx_bound; /* that window, which no stretching gets beyond; 0: none */
	/* positions that rows see in layers that have a window, see model_layer_window(); 0: none has */
	int32_t window;
	int32_t window_period; /* of so many layers the last has none; 1: all have one */
	float rms_eps;
	bool qkv_bias;    /* q, k and v must have biases; without it they may */
	bool qk_norm;     /* RMS norm of each head's q and k before RoPE */
	bool post_norm;   /* RMS norms of what attention and feed-forward give, before it is added */
	enum glu glu;     /* the feed-forward's gate */
	float embd_scale; /* of embeddings; 1: nothing */
	float attn_scale; /* of attention scores */
	float attn_softcap, final_softcap; /* of attention scores and of logits; 0: none */
	bool tied_output; /* no output.weight: the embedding matrix is the output matrix */
	enum rope_pairing rope_pairing;
	enum rope_scaling rope_scaling;
	int32_t rope_dims; /* rotated dimensions of a head, even */
	float rope_base;
	/* of layers with a window, whose angles are not stretched; 0: they turn like the others */
	float rope_base_local;
	bool rope_table;           /* rope_freqs.weight divides the frequencies */
	float rope_factor;         /* how far the context is stretched: linear, yarn, llama3; else 1 */
	int32_t rope_original_ctx; /* yarn, llama3: the context before stretching */
	float rope_attn_factor;    /* multiplies the magnitude that the scaling itself asks for; 1: nothing */
	float rope_low_freq_factor, rope_high_freq_factor; /* llama3 */
	float yarn_beta_fast, yarn_beta_slow, yarn_ext_factor;
	struct rope_chunks rope_chunks; /* of layers without a window */
};

/*
 * UNSUPPORTED names the unknown architecture, RoPE type or setting; NOT_FOUND the missing key or tensor; INVALID or
 * CORRUPT what is out of range or does not fit together. out->arch is a static string.
 */
enum status arch_read_params(const struct gguf *g, struct model_params *out, struct error *err);
/* Positions that a row of this layer sees, its own among them; 0: all. */
int32_t model_layer_window(const struct model_params *p, int32_t layer);
/* How many layers have a window. */
int32_t model_n_windowed(const struct model_params *p);
/* Positions that any layer sees: those further back are never read again. 0: there are layers that see all. */
int32_t model_horizon(const struct model_params *p);
/* Ways to stretch positions by their name in files; false when there is none. */
bool rope_scaling_find(struct str name, enum rope_scaling *out);
const char *rope_scaling_name(enum rope_scaling scaling);
/* A line naming all supported architectures, for messages. */
const char *arch_supported(void);
