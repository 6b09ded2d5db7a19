#include "tests/gpu/whole.h"

#include <stdio.h>
#include <stdlib.h>

static _Noreturn void fail(const char *what, const char *why, int status)
{
	printf("%s: %s\n", what, why);
	exit(status);
}

void whole_open(struct whole *w, const char *device, int32_t n_threads, const char *path, int32_t max_rows,
                enum kv_form form, const char *rope)
{
	struct rope_choice stretched;
	struct backend_options o = {.device = device, .n_threads = n_threads};
	struct error err = {0};
	*w = (struct whole){.max_rows = max_rows};
	enum status s = backend_create(&o, &w->backend, &err);
	if (s != STATUS_OK)
		fail(device, err.message, s == STATUS_UNSUPPORTED ? 77 : 1);
	if ((rope && rope_choice_parse(rope, &stretched, &err) != STATUS_OK) ||
	    gguf_open(path, &w->gguf, &err) != STATUS_OK ||
	    model_load_stretched(w->gguf, w->backend, rope ? &stretched : NULL, &w->model, &err) != STATUS_OK)
		fail(path, err.message, 1);
	const struct model_params *p = model_params(w->model);
	w->token = calloc((size_t)max_rows, sizeof *w->token);
	w->position = calloc((size_t)max_rows, sizeof *w->position);
	if (!w->token || !w->position ||
	    kv_layout_for(w->backend, &w->layout, p->n_layer, p->n_head_kv, p->head_dim) != STATUS_OK)
		fail(path, "no memory", 1);
	if (form != KV_FORM_F16)
		kv_layout_narrow(&w->layout, form);
	/* Logits of every row only in small steps, see whole_step(). */
	int32_t max_outputs = max_rows > WHOLE_SEQS && max_rows <= 512 ? max_rows : WHOLE_SEQS;
	if (model_reserve(w->model, max_rows, max_outputs, &w->layout, &err) != STATUS_OK)
		fail(path, err.message, 1);
}

bool whole_pages(struct whole *w, int32_t n_seqs, int32_t length)
{
	struct backend *b = w->backend;
	if (w->kv)
		b->ops->mem_free(b, w->kv, w->kv_bytes);
	free(w->table);
	w->kv = NULL;
	w->n_pages = (length + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
	w->kv_bytes = w->layout.page_stride * (size_t)w->n_pages * (size_t)n_seqs;
	w->table = malloc((size_t)WHOLE_SEQS * (size_t)w->n_pages * sizeof *w->table);
	/* Leave room for what a step needs. */
	if (b->ops->mem_available && w->kv_bytes > b->ops->mem_available(b) / 20 * 19)
		return false;
	if (!w->table || b->ops->mem_alloc(b, w->kv_bytes, &w->kv) != STATUS_OK) {
		w->kv = NULL;
		return false;
	}
	/* Pages of the sequences take turns, as when they grow together. */
	for (int32_t s = 0; s < WHOLE_SEQS; s++)
		for (int32_t i = 0; i < w->n_pages; i++)
			w->table[s * w->n_pages + i] = i * n_seqs + s % n_seqs;
	return true;
}

enum status whole_step(struct whole *w, int32_t n_seqs, int32_t at, int32_t n, const int32_t *tokens, bool all,
                       float **logits)
{
	struct batch_seq seq[WHOLE_SEQS];
	int32_t output[512], n_vocab = model_params(w->model)->n_vocab, n_rows = n_seqs * n;
	if (n_rows > w->max_rows || n_seqs > WHOLE_SEQS || (all && n_rows > 512))
		return STATUS_LIMIT;
	struct batch batch = {n_rows, w->token, w->position, n_seqs, seq, all ? n_rows : n_seqs, output};
	for (int32_t s = 0; s < n_seqs; s++) {
		seq[s] = (struct batch_seq){s * n, n, at, w->table + s * w->n_pages, w->n_pages};
		for (int32_t i = 0; i < n; i++) {
			int32_t row = s * n + i;
			w->position[row] = at + i;
			w->token[row] = tokens ? tokens[row] : (int32_t)((int64_t)(at + i + 31 * s) * 7919 % n_vocab);
			if (all)
				output[row] = row;
		}
		if (!all)
			output[s] = s * n + n - 1;
	}
	return logits ? model_forward(w->model, &batch, w->kv, logits) : model_run(w->model, &batch, w->kv);
}

void whole_close(struct whole *w)
{
	if (w->kv)
		w->backend->ops->mem_free(w->backend, w->kv, w->kv_bytes);
	free(w->table);
	free(w->token);
	free(w->position);
	model_destroy(w->model);
	w->backend->ops->destroy(w->backend);
	gguf_close(w->gguf);
}
