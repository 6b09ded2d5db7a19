/*
 * bench_model: tokens per second of a model over a backend, in the terms of llama-bench, for compare.py.
 *
 *   bench_model --model FILE [--device NAME] [--threads N] [--runs N] TEST ...
 *
 * A TEST is pN (prefill of N tokens), nN (N tokens one after the other), either with @D (on top of D tokens that are there already),
 * or bB:N (B sequences together, N tokens each). Prints one line per test: the test and the tokens per second of the fastest run.
 * The tokens are arbitrary: what is computed does not depend on them. Prefill goes in chunks of 512 rows, and only the last row's
 * logits are computed, as both programs do for a prompt.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/model/forward.h"

enum { CHUNK = 512, SEQS_MAX = 64 };

struct bench {
	struct backend *backend;
	struct model *model;
	struct kv_layout layout;
	void *kv;
	int32_t n_pages; /* of each sequence */
	int32_t *table;  /* [SEQS_MAX][n_pages] */
};

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what, const char *why)
{
	fprintf(stderr, "bench_model: %s: %s\n", what, why);
	exit(1);
}

/* n rows of each of n_seqs sequences, from position `at`. */
static void step(struct bench *b, int32_t n_seqs, int32_t at, int32_t n)
{
	static int32_t token[CHUNK], position[CHUNK], output[SEQS_MAX];
	static struct batch_seq seq[SEQS_MAX];
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
		fail("step", status_text(st));
}

static void prefill(struct bench *b, int32_t n_seqs, int32_t at, int32_t n)
{
	int32_t chunk = CHUNK / n_seqs;
	for (int32_t end = at + n; at < end; at += chunk)
		step(b, n_seqs, at, at + chunk < end ? chunk : end - at);
}

static double run(struct bench *b, char kind, int32_t n_seqs, int32_t n, int32_t depth)
{
	prefill(b, n_seqs, 0, depth);
	double t = now();
	if (kind == 'p')
		prefill(b, 1, depth, n);
	else
		for (int32_t i = 0; i < n; i++)
			step(b, n_seqs, depth + i, 1);
	return (double)n_seqs * n / (now() - t);
}

struct test {
	char kind;
	int n_seqs, n, depth;
};

static bool parse_test(const char *s, struct test *t)
{
	*t = (struct test){.kind = s[0], .n_seqs = 1};
	if (s[0] == 'b')
		return sscanf(s, "b%d:%d", &t->n_seqs, &t->n) == 2 && t->n_seqs >= 1 && t->n_seqs <= SEQS_MAX && t->n >= 1;
	return (s[0] == 'p' || s[0] == 'n') && sscanf(s + 1, "%d@%d", &t->n, &t->depth) >= 1 && t->n >= 1 && t->depth >= 0;
}

int main(int argc, char **argv)
{
	struct backend_options o = {.device = "cpu"};
	const char *path = NULL;
	int runs = 3, at = 1;
	for (; at + 1 < argc && strncmp(argv[at], "--", 2) == 0; at += 2) {
		if (strcmp(argv[at], "--model") == 0)
			path = argv[at + 1];
		else if (strcmp(argv[at], "--device") == 0)
			o.device = argv[at + 1];
		else if (strcmp(argv[at], "--threads") == 0)
			o.n_threads = atoi(argv[at + 1]);
		else if (strcmp(argv[at], "--runs") == 0)
			runs = atoi(argv[at + 1]);
		else
			fail(argv[at], "unknown option");
	}
	if (!path || at == argc)
		fail("usage", "bench_model --model FILE [--device NAME] [--threads N] [--runs N] pN|nN[@D]|bB:N ...");

	struct bench b = {0};
	struct gguf *g;
	struct error err = {0};
	if (gguf_open(path, &g, &err) != STATUS_OK || backend_create(&o, &b.backend, &err) != STATUS_OK ||
	    model_load(g, b.backend, &b.model, &err) != STATUS_OK)
		fail(path, err.message);
	int32_t longest = 1, most_seqs = 1;
	for (int i = at; i < argc; i++) {
		struct test t;
		if (!parse_test(argv[i], &t))
			fail(argv[i], "not a test");
		longest = t.n + t.depth > longest ? t.n + t.depth : longest;
		most_seqs = t.n_seqs > most_seqs ? t.n_seqs : most_seqs;
	}
	const struct model_params *p = model_params(b.model);
	b.n_pages = (longest + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
	b.table = malloc((size_t)SEQS_MAX * (size_t)b.n_pages * sizeof *b.table);
	if (!b.table || kv_layout_init(&b.layout, p->n_layer, p->n_head_kv, p->head_dim, QUANT_F16) != STATUS_OK ||
	    b.backend->ops->mem_alloc(b.backend, b.layout.page_stride * (size_t)b.n_pages * (size_t)most_seqs, &b.kv) !=
	            STATUS_OK ||
	    model_reserve(b.model, CHUNK, SEQS_MAX, &b.layout, &err) != STATUS_OK)
		fail("memory", err.message);
	/* Pages of the sequences take turns, as when they grow together. */
	for (int32_t s = 0; s < SEQS_MAX; s++)
		for (int32_t i = 0; i < b.n_pages; i++)
			b.table[s * b.n_pages + i] = i * most_seqs + s % most_seqs;

	for (int i = at; i < argc; i++) {
		struct test t;
		double best = 0;
		parse_test(argv[i], &t);
		for (int k = 0; k < runs; k++) {
			double speed = run(&b, t.kind, t.n_seqs, t.n, t.depth);
			best = speed > best ? speed : best;
		}
		printf("%s %.2f\n", argv[i], best);
		fflush(stdout);
	}
	b.backend->ops->mem_free(b.backend, b.kv, b.layout.page_stride * (size_t)b.n_pages * (size_t)most_seqs);
	free(b.table);
	model_destroy(b.model);
	b.backend->ops->destroy(b.backend);
	gguf_close(g);
	return 0;
}
