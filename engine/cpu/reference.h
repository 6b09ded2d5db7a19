/* What the two halves of the reference backend share: its weights and rows (reference.c), and attention over its KV. */
#pragma once

#include "engine/cpu/cpu.h"

struct reference {
	struct cpu_base base;
	enum quant_type kv_type;
	float *half; /* [65536] the value of every half */
	/*
	 * Per thread: OUT_TILE dequantised weight rows, or the keys and values of one head. Grows with the longest
	 * sequence.
	 */
	float *scratch; /* [n_threads][scratch_floats] */
	size_t scratch_floats;
	double *state;  /* [rows][n_head][head_dim + 2] of a sequence whose attention is computed by parts */
	float *turned;  /* [rows of the batch][n_head][ROPE_CHUNKS_FAR][head_dim] queries, turned further for chunks
			   before their own */
};

static inline struct reference *reference_of(const struct backend *b)
{
	return (struct reference *)b;
}

/* Makes each thread's scratch at least so many floats; NOMEM. Its contents are gone. */
enum status reference_scratch(struct reference *r, size_t floats);

/* Sum of products of n floats. */
double reference_dot(const float *a, const float *b, int64_t n);

/* Entries of the vtable, as backend.h has them. */
enum status reference_kv_write(struct backend *b, void *kv, const struct kv_layout *l, int32_t layer, const float *k,
                               const float *v);
enum status reference_attention(struct backend *b, const void *kv, const struct kv_layout *l, int32_t layer,
                                const float *q, int32_t n_head, const struct attention_params *params, float *out);
enum status reference_attention_part(struct backend *b, const void *kv, const struct kv_layout *l, int32_t layer,
                                     const float *q, int32_t n_head, const struct attention_params *params,
                                     const struct attention_part *part, float *out);
enum status reference_page_bounds(struct backend *b, const void *kv, const struct kv_layout *l, const int32_t *pages,
                                  int32_t n);
