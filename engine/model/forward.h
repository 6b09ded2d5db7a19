/*
 * A loaded model: weights on a backend, and the forward pass over a batch.
 */
#pragma once

#include "engine/model/rope_choice.h"

struct model;

/* Loads every weight. The reader and the backend must outlive the model. Errors name what is wrong and should be. */
enum status model_load(const struct gguf *g, struct backend *b, struct model **out, struct error *err);
/* The same with positions stretched as `rope` says, rather than the file. NULL: as the file says. */
enum status model_load_stretched(const struct gguf *g, struct backend *b, const struct rope_choice *rope,
                                 struct model **out, struct error *err);
void model_destroy(struct model *m); /* NULL is allowed */

const struct model_params *model_params(const struct model *m);
/* How keys and queries of a layer are rotated; the model's. */
const struct rope_params *model_rope(const struct model *m, int32_t layer);
/* Parameters in all tensors, for information. */
uint64_t model_n_params(const struct model *m);
/* Allocates memory for steps of up to max_rows rows and max_outputs wanted rows. Call once before model_forward(). */
enum status model_reserve(struct model *m, int32_t max_rows, int32_t max_outputs, const struct kv_layout *layout,
                          struct error *err);
/* Bytes of device memory that model_reserve() takes for such steps; SIZE_MAX when they overflow. */
size_t model_step_bytes(const struct model_params *p, int32_t max_rows, int32_t max_outputs);
/*
 * Runs one step: writes the KV of every row into its page and computes logits[n_outputs][n_vocab] for
 * batch->output_row, which stay on the device until the next step. kv is the slab of the pool the block tables refer
 * to. INVALID for a batch that does not fit what was reserved or does not hold together; CANCELLED when batch->arrival
 * says that something does not come; else what the backend reports.
 */
enum status model_run(struct model *m, const struct batch *batch, void *kv);
/*
 * The logits of the last step's outputs first .. first + n - 1, in host memory: *logits is row `first`. The memory is
 * the model's, valid until the next step; the caller may overwrite it.
 */
enum status model_logits(struct model *m, int32_t first, int32_t n, float **logits);
/* Whether model_sample() can be used. */
bool model_samples(const struct model *m);
/* Chooses a token for each row where the logits are; see `sample` in backend.h. n_vocab: the tokenizer's tokens. */
enum status model_sample(struct model *m, int32_t n_vocab, const struct sample_row *rows, int32_t n, int32_t *tokens);
/* model_run(), then model_logits() of all outputs. */
enum status model_forward(struct model *m, const struct batch *batch, void *kv, float **logits);
