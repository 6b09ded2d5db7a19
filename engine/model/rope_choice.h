/*
 * How far a model's positions are stretched, where that is told otherwise than in its file: "yarn:4", "linear:2",
 * "yarn:4,original=32768", "llama3:8,original=8192,base=500000", "dca:4", "none", "base=1000000".
 *
 *     TYPE[:FACTOR][,KEY=NUMBER]...
 *
 * TYPE is none, linear, yarn, llama3 or dca; without one the file's scaling stays, and only the keys change. A type
 * replaces all of the file's scaling, its table of divisors (rope_freqs.weight) too. Keys: original, the context before
 * stretching; base, of the frequencies; attn-factor, which multiplies the magnitude that YaRN asks for; beta-fast and
 * beta-slow of YaRN; low-freq-factor and high-freq-factor of llama3. Angles of layers that have a window and a base of
 * their own are never stretched.
 *
 * dca is Dual Chunk Attention (struct rope_chunks), which leaves the angles as the file has them and has no distance
 * longer than `original`, by default the length that the model was trained to; chunk, the size of chunks, is three
 * quarters of that by default, as its authors have it.
 */
#pragma once

#include "engine/model/arch.h"

/* Zeroed: nothing is told. */
struct rope_choice {
	bool has_scaling;
	enum rope_scaling scaling;
	bool by_chunks; /* "dca", in place of a scaling */
	float factor; /* 1 with ROPE_SCALING_NONE */
	int32_t original_ctx, chunk; /* 0: as the model says, and by that */
	/* 0: as the model or the method says */
	float base, attn_factor, beta_fast, beta_slow, low_freq_factor, high_freq_factor;
};

/* NULL and "" tell nothing. INVALID (param rope-scaling) says what is wrong and what is possible. */
enum status rope_choice_parse(const char *text, struct rope_choice *out, struct error *err);
/*
 * Changes what the file says to what was chosen, p->n_ctx too: the original context times the factor or, where no
 * original was given, the trained one as many times longer as this factor is above the file's. INVALID (param
 * rope-scaling) when the two do not go together.
 */
enum status rope_choice_apply(const struct rope_choice *c, struct model_params *p, struct error *err);
