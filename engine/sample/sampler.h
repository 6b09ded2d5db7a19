/*
 * The sampler chain: penalties and bias, then temperature, top-k, typical, top-p and min-p filters, then a draw. One
 * sampler per generation; its random numbers depend on its seed alone.
 *
 * Each filter works on what the one before it left, renormalised, and always leaves at least one token. With
 * temperature 0 or top_k 1 the choice is greedy: the most likely token after penalties and bias, the lowest id of
 * equals, no random number.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/base/status.h"

struct logit_bias {
	int32_t token;
	float bias; /* added to the logit; -100 and below bans the token */
};

enum { SAMPLING_MAX_TOP_LOGPROBS = 20, SAMPLING_MAX_PENALTY_WINDOW = 1 << 20 };

struct sampling_params {
	float temperature; /* 0: greedy */
	int32_t top_k;     /* 0 or less: all */
	float top_p;       /* 1: all; else the fewest most likely tokens that hold this much probability */
	float min_p;       /* 0: all; else tokens at least this likely relative to the most likely one */
	float typical_p;   /* 1: all; else the fewest tokens nearest to the entropy (arXiv:2202.00666) that hold it */
	float repeat_penalty;    /* 1: none; divides positive and multiplies negative logits of seen tokens */
	float presence_penalty;  /* OpenAI: subtracted once for a token that was generated */
	float frequency_penalty; /* OpenAI: subtracted for each time a token was generated */
	int32_t penalty_last_n;  /* how many last tokens (prompt included) repeat_penalty sees; -1: all, 0: none */
	uint64_t seed;
	struct logit_bias *bias; /* [n_bias], owned by whoever owns the params */
	size_t n_bias;
	int32_t n_logprobs; /* -1: none; else how many alternatives besides the chosen token's own (0-20) */
};

/* The neutral setting: temperature 1 and everything else off. */
void sampling_params_init(struct sampling_params *p);
/* INVALID names the parameter that is out of range. */
enum status sampling_params_check(const struct sampling_params *p, int32_t n_vocab, struct error *err);

struct token_logprob {
	int32_t token;
	float logprob;
};

struct sample_result {
	int32_t token;
	float logprob; /* natural log, of the model's own distribution (before penalties and filters); NaN if not wanted
	                */
	int32_t n_top;
	struct token_logprob top[SAMPLING_MAX_TOP_LOGPROBS]; /* most likely first */
};

struct sampler;

/* Copies p, which sampling_params_check() has accepted. Errors: NOMEM. */
enum status sampler_create(const struct sampling_params *p, int32_t n_vocab, struct sampler **out);
void sampler_destroy(struct sampler *s); /* NULL is allowed */
/* Tells the sampler of a token of the prompt (generated = false) or of the answer. */
void sampler_accept(struct sampler *s, int32_t token, bool generated);
/*
 * Chooses from logits[n_vocab], which it may overwrite. Does not accept the token. NaN logits are never chosen; when no
 * logit is above -infinity, the answer is the first token that is not NaN, or token 0.
 */
void sampler_sample(struct sampler *s, float *logits, struct sample_result *out);
/*
 * As sampler_sample, among the tokens whose bit is set (bit t of allowed[t / 64]; NULL: all). Log-probabilities stay
 * those of the model. When none of them is above -infinity the choice may be one that is not allowed.
 */
void sampler_sample_allowed(struct sampler *s, float *logits, const uint64_t *allowed, struct sample_result *out);

/*
 * For a backend that samples: fills *row (all but `output`) with what the choice depends on, valid until the sampler's
 * next call. False when the choice must be made here: log-probabilities are wanted, or something that backends do not
 * have. The backend's token goes to sampler_take(), which returns it without the mark and moves the random numbers on;
 * like sampler_sample(), it does not accept the token.
 */
bool sampler_offload(struct sampler *s, struct sample_row *row);
int32_t sampler_take(struct sampler *s, int32_t token);

/*
 * log softmax(logits)[token], and the n_top (0-20) most likely tokens, lowest id first among equals; used for a
 * prompt's own log-probabilities. NaN counts as impossible.
 */
void sampler_logprobs(const float *logits, int32_t n_vocab, int32_t token, int32_t n_top, struct sample_result *out);
