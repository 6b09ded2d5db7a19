/* A model on a backend with room for some sequences, and its steps: what benchmarks time. Failures end the program. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/model/forward.h"

enum { STEPS_CHUNK = 512, STEPS_SEQS_MAX = 64 };

struct model_steps {
	struct gguf *gguf;
	struct backend *backend;
	struct model *model;
	struct kv_layout layout;
	void *kv;
	size_t kv_bytes;
	int32_t n_pages; /* of each sequence */
	int32_t *table;  /* [STEPS_SEQS_MAX][n_pages] */
};

static inline double bench_now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline void bench_fail(const char *what, const char *why)
{
	fprintf(stderr, "%s: %s\n", what, why);
	exit(1);
}

/* n_seqs sequences of at most `longest` tokens each. */
static inline void model_steps_open(struct model_steps *b, const char *path, const struct backend_options *o,
                                    int32_t n_seqs, int32_t longest)
{
	struct error err = {0};
	memset(b, 0, sizeof *b);
	if (gguf_open(path, &b->gguf, &err) != STATUS_OK || backend_create(o, &b->backend, &err) != STATUS_OK ||
	    model_load(b->gguf, b->backend, &b->model, &err) != STATUS_OK)
		bench_fail(path, err.message);
	const struct model_params *p = model_params(b->model);
	b->n_pages = (longest + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
	b->table = malloc((size_t)STEPS_SEQS_MAX * (size_t)b->n_pages * sizeof *b->table);
	if (!b->table || kv_layout_for(b->backend, &b->layout, p->n_layer, p->n_head_kv, p->head_dim) != STATUS_OK)
		bench_fail("memory", "not enough");
	b->kv_bytes = b->layout.page_stride * (size_t)b->n_pages * (size_t)n_seqs;
	if (b->backend->ops->mem_alloc(b->backend, b->kv_bytes, &b->kv) != STATUS_OK ||
	    model_reserve(b->model, STEPS_CHUNK, STEPS_SEQS_MAX, &b->layout, &err) != STATUS_OK)
		bench_fail("memory", err.message);
	/* Pages of the sequences take turns, as when they grow together. */
	for (int32_t s = 0; s < STEPS_SEQS_MAX; s++) {
		for (int32_t i = 0; i < b->n_pages; i++)
			b->table[s * b->n_pages + i] = i * n_seqs + s % n_seqs;
	}
}

static inline void model_steps_close(struct model_steps *b)
{
	b->backend->ops->mem_free(b->backend, b->kv, b->kv_bytes);
	free(b->table);
	model_destroy(b->model);
	b->backend->ops->destroy(b->backend);
	gguf_close(b->gguf);
}

/* One step of n rows of each of n_seqs sequences, from position `at`, with the logits of each one's last. */
static inline void model_step(struct model_steps *b, int32_t n_seqs, int32_t at, int32_t n)
{
	static int32_t token[STEPS_CHUNK], position[STEPS_CHUNK], output[STEPS_SEQS_MAX];
	static struct batch_seq seq[STEPS_SEQS_MAX];
	struct batch batch = {n_seqs * n, token, position, n_seqs, seq, n_seqs, output};
	int32_t n_vocab = model_params(b->model)->n_vocab;
	float *logits;
	for (int32_t s = 0; s < n_seqs; s++) {
		seq[s] = (struct batch_seq){s * n, n, at, b->table + s * b->n_pages, b->n_pages};
		output[s] = s * n + n - 1;
		for (int32_t i = 0; i < n; i++) {
			position[s * n + i] = at + i;
			token[s * n + i] = (at + i) * 7919 % n_vocab;
		}
	}
	enum status st = model_forward(b->model, &batch, b->kv, &logits);
	if (st != STATUS_OK)
		bench_fail("step", status_text(st));
}

static inline void model_prefill(struct model_steps *b, int32_t n_seqs, int32_t at, int32_t n)
{
	int32_t chunk = STEPS_CHUNK / n_seqs;
	for (int32_t end = at + n; at < end; at += chunk)
		model_step(b, n_seqs, at, at + chunk < end ? chunk : end - at);
}
