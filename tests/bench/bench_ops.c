/*
 * bench_ops: how fast a CPU backend's operations are, one by one.
 *
 *   bench_ops [--device NAME] [--threads N] [--shapes 1b|small] [--rows N] [--only WORD] [--kv-dtype f16|int8|fp8_e4m3]
 *
 * Weights are random. Each line is the best of several runs: for one row the bytes of weights read per second, for many
 * rows the multiply-adds per second, for attention the bytes of KV read per second. "1b" is the shape of a 1B llama
 * (2048 wide, 8192 in the feed-forward), "small" that of SmolLM2-135M (576, 1536).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/backend.h"

struct shape {
	const char *name;
	int64_t n_in, n_out;
	int32_t n_head, n_head_kv, head_dim;
};

static const struct shape shapes[] = {
        {"1b", 2048, 8192, 32, 8, 64},
        {"small", 576, 1536, 9, 3, 64},
};

/* With one thread its own time, so that a busy machine does not count. */
static clockid_t clock_id = CLOCK_MONOTONIC;

static double now(void)
{
	struct timespec t;
	clock_gettime(clock_id, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void must(enum status s, const char *what)
{
	if (s == STATUS_OK)
		return;
	fprintf(stderr, "bench_ops: %s: %s\n", what, status_text(s));
	exit(1);
}

static void *must_alloc(size_t bytes)
{
	void *p = calloc(1, bytes);
	if (!p)
		must(STATUS_NOMEM, "memory");
	return p;
}

static uint32_t next(void)
{
	static uint32_t x = 1;
	x = x * 1664525 + 1013904223;
	return x >> 8;
}

/* Random bits; halves and floats among them become small numbers. */
static void *random_weights(const struct quant_format *f, int64_t n)
{
	size_t bytes = (size_t)n / f->block_elems * f->block_bytes;
	uint8_t *p = must_alloc(bytes);
	for (size_t i = 0; i < bytes; i++)
		p[i] = (uint8_t)(next() & (i & 1 ? 0x3B : 0xFF)); /* no infinities or NaNs at even offsets */
	return p;
}

/* As in real models, some channels are much larger than the others: here one of 256. */
static float *random_rows(int64_t n)
{
	float *p = must_alloc((size_t)n * sizeof *p);
	for (int64_t i = 0; i < n; i++)
		p[i] = ((float)(next() & 0xFFFF) / 32768.0f - 1) * (i % 256 == 77 ? 8.0f : 1.0f);
	return p;
}

/* Seconds of the fastest of several runs. */
static double best_of(void (*run)(void *arg), void *arg)
{
	double best = 1e9, start = now();
	for (int i = 0; i < 2000 && (i < 5 || now() - start < 0.8); i++) {
		double t = now();
		run(arg);
		t = now() - t;
		best = t < best ? t : best;
	}
	return best;
}

struct product {
	struct backend *b;
	const float *x;
	int64_t n_rows;
	struct matmul mm[24];
	int32_t n, at;
};

/* Takes another copy of the matrix each time, so that one row finds its weights in memory and not in a cache. */
static void run_product(void *arg)
{
	struct product *p = arg;
	must(p->b->ops->matmul(p->b, p->x, p->n_rows, &p->mm[p->at], 1), "matmul");
	p->at = (p->at + 1) % p->n;
}

static void bench_products(struct backend *b, const struct shape *s, int64_t n_rows, const char *only)
{
	const struct quant_format *f;
	float *x = random_rows(s->n_in * n_rows), *y = must_alloc(sizeof(float) * (size_t)(s->n_out * n_rows));
	printf("%-8s %12s %16s\n", "format", "1 row, GB/s", "many, GMAC/s");
	for (size_t i = 0; (f = quant_format_at(i)); i++) {
		if ((only && !strstr(f->name, only)) || s->n_in % f->block_elems)
			continue;
		void *data = random_weights(f, s->n_in * s->n_out);
		struct product p = {.b = b, .x = x};
		struct weight_desc d = {.name = "w", .format = f, .n_in = s->n_in, .n_out = s->n_out, .data = data};
		size_t total = 0, bytes = 0;
		while (p.n < 24 && (p.n == 0 || total < (size_t)256 << 20)) {
			struct weight *w;
			must(b->ops->weight_create(b, &d, &w, NULL), "weight");
			p.mm[p.n++] = (struct matmul){.weight = w, .y = y};
			bytes = b->ops->weight_bytes(b, w);
			total += bytes;
		}
		p.n_rows = 1;
		double one = best_of(run_product, &p);
		p.n_rows = n_rows;
		double many = best_of(run_product, &p);
		printf("%-8s %12.1f %16.1f\n", f->name, (double)bytes / one * 1e-9,
		       (double)(s->n_in * s->n_out * n_rows) / many * 1e-9);
		fflush(stdout);
		for (int32_t k = 0; k < p.n; k++)
			b->ops->weight_destroy(b, (struct weight *)p.mm[k].weight);
		free(data);
	}
	free(x);
	free(y);
}

enum { DEPTH = 4096, CHUNK = 512, LAYERS = 24 };

struct attention {
	struct backend *b;
	struct kv_layout layout;
	void *kv;
	const float *q;
	float *out;
	int32_t n_head, layer;
};

static void run_attention(void *arg)
{
	struct attention *a = arg;
	must(a->b->ops->attention(a->b, a->kv, &a->layout, a->layer, a->q, a->n_head,
	                          &(struct attention_params){.scale = 0.125f}, a->out),
	     "attention");
	a->layer = (a->layer + 1) % LAYERS;
}

struct reading {
	struct backend *b;
	const char *p;
	size_t bytes, at, size;
};

/* What one layer's attention reads, but in one piece, and another one each time. */
static void run_reading(void *arg)
{
	struct reading *r = arg;
	uint64_t sum;
	r->at = r->at + 2 * r->bytes <= r->size ? r->at + r->bytes : 0;
	must(r->b->ops->scan(r->b, r->p + r->at, r->bytes, &sum), "scan");
}

static void bench_attention(struct backend *b, const struct shape *s, enum kv_form form)
{
	enum { PAGES = (DEPTH + CHUNK) / KV_PAGE_TOKENS };
	struct attention a = {.b = b, .n_head = s->n_head};
	int32_t table[PAGES], position[CHUNK];
	for (int32_t i = 0; i < PAGES; i++)
		table[i] = i * 37 % PAGES; /* 37 shares no factor with PAGES */
	must(kv_layout_for(b, &a.layout, LAYERS, s->n_head_kv, s->head_dim), "layout");
	if (form != KV_FORM_F16)
		kv_layout_narrow(&a.layout, form);
	must(b->ops->mem_alloc(b, a.layout.page_stride * PAGES, &a.kv), "kv");
	struct kv_bounds bounds = {.n_pages = PAGES};
	if (b->ops->page_bounds) {
		must(b->ops->mem_alloc(b, kv_bounds_bytes(&a.layout) * PAGES, &bounds.slab), "bounds");
		a.layout.bounds = &bounds;
	}
	must(b->ops->reserve(b, CHUNK, 0, &a.layout), "reserve");
	float *k = random_rows((int64_t)CHUNK * s->n_head_kv * s->head_dim);
	a.q = random_rows((int64_t)CHUNK * s->n_head * s->head_dim);
	a.out = must_alloc(sizeof(float) * CHUNK * (size_t)(s->n_head * s->head_dim));
	struct batch_seq seq = {.n_rows = CHUNK, .block_table = table, .n_pages = PAGES};
	struct batch batch = {.n_rows = CHUNK, .position = position, .n_seqs = 1, .seq = &seq};
	for (int32_t at = 0; at < DEPTH + CHUNK; at += CHUNK) {
		seq.first_position = at;
		for (int32_t i = 0; i < CHUNK; i++)
			position[i] = at + i;
		must(b->ops->step_begin(b, &batch), "step");
		for (int32_t layer = 0; layer < LAYERS; layer++)
			must(b->ops->kv_write(b, a.kv, &a.layout, layer, k, k), "kv_write");
		must(b->ops->step_end(b), "step");
	}
	const struct {
		const char *name;
		int32_t at, n, chosen;
	} cases[] = {{"1 row at 256", 256, 1, 0},
	             {"1 row at 4096", DEPTH, 1, 0},
	             {"... reads a quarter", DEPTH, 1, DEPTH / KV_PAGE_TOKENS / 4},
	             {"512 rows at 0", 0, CHUNK, 0},
	             {"512 rows at 4096", DEPTH, CHUNK, 0}};
	if (b->ops->page_bounds)
		must(b->ops->page_bounds(b, a.kv, &a.layout, table, PAGES), "page_bounds");
	double token_bytes = (double)a.layout.page_bytes / LAYERS / KV_PAGE_TOKENS;
	printf("%-20s %10s %10s %10s\n", "attention", "us", "GB/s", "GMAC/s");
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		seq.first_position = cases[i].at;
		seq.n_rows = batch.n_rows = cases[i].n;
		seq.choice = (struct page_choice){0, cases[i].chosen, 1, 1};
		if (cases[i].chosen && !b->ops->page_bounds)
			continue;
		must(b->ops->step_begin(b, &batch), "step");
		double t = best_of(run_attention, &a);
		must(b->ops->step_end(b), "step");
		double seen = cases[i].n * (cases[i].at + (cases[i].n + 1) / 2.0);
		double bytes = (double)(cases[i].at + cases[i].n) * token_bytes;
		printf("%-20s %10.1f %10.1f %10.1f\n", cases[i].name, t * 1e6, bytes / t * 1e-9,
		       seen * s->n_head * s->head_dim * 2 / t * 1e-9);
	}
	struct reading r = {.b = b, .p = a.kv, .size = a.layout.page_stride * PAGES};
	r.bytes = (size_t)(DEPTH * token_bytes) & ~(size_t)4095;
	if (b->ops->scan) {
		double t = best_of(run_reading, &r);
		printf("%-20s %10.1f %10.1f\n", "plain reading", t * 1e6, (double)r.bytes / t * 1e-9);
	}
	b->ops->mem_free(b, a.kv, a.layout.page_stride * PAGES);
	if (bounds.slab)
		b->ops->mem_free(b, bounds.slab, kv_bounds_bytes(&a.layout) * PAGES);
	free((void *)a.q);
	free(a.out);
	free(k);
}

static void nothing(void *arg)
{
	struct backend *b = arg;
	float x[4096 * 3] = {0};
	static const float gain[4096];
	must(b->ops->rms_norm(b, x, 3, 4096, gain, 1, x), "rms_norm");
}

int main(int argc, char **argv)
{
	struct backend_options o = {.device = "cpu"};
	const char *shape = "1b", *only = NULL;
	int64_t n_rows = 512;
	enum kv_form form = KV_FORM_F16;
	for (int i = 1; i < argc; i += 2) {
		const char *value = i + 1 < argc ? argv[i + 1] : "";
		if (strcmp(argv[i], "--device") == 0)
			o.device = value;
		else if (strcmp(argv[i], "--threads") == 0)
			o.n_threads = atoi(value);
		else if (strcmp(argv[i], "--shapes") == 0)
			shape = value;
		else if (strcmp(argv[i], "--rows") == 0)
			n_rows = atoi(value);
		else if (strcmp(argv[i], "--only") == 0)
			only = value;
		else if (strcmp(argv[i], "--kv-dtype") != 0 || !kv_form_find(value, &form)) {
			fprintf(stderr, "usage: bench_ops [--device NAME] [--threads N] [--shapes 1b|small] [--rows N] "
			                "[--only WORD] [--kv-dtype T]\n");
			return 2;
		}
	}
	struct backend *b;
	struct error err = {0};
	if (backend_create(&o, &b, &err) != STATUS_OK) {
		fprintf(stderr, "bench_ops: %s\n", err.message);
		return 1;
	}
	struct backend_info info;
	b->ops->info(b, &info);
	if (info.n_threads == 1)
		clock_id = CLOCK_THREAD_CPUTIME_ID;
	for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
		if (strcmp(shapes[i].name, shape) != 0)
			continue;
		printf("%s, %d threads, %lld x %lld, %lld rows\n", info.name, info.n_threads, (long long)shapes[i].n_in,
		       (long long)shapes[i].n_out, (long long)n_rows);
		bench_products(b, &shapes[i], n_rows, only);
		if (!only || strstr("attention", only))
			bench_attention(b, &shapes[i], form);
	}
	printf("a small parallel section: %.2f us\n", best_of(nothing, b) * 1e6);
	b->ops->destroy(b);
	return 0;
}
