/*
 * bench-gpu: what a model does on a GPU, as shares of what the GPU does.
 *
 *   bench-gpu FILE DEVICE --copy GB/S --product TFLOP/S [--kv FORM] [--quick] [--small]
 *
 * Prints decode tokens/s at batch 1, 8 and 64 over contexts of 1k, 8k and 32k, prefill tokens/s at 512 and 8k, and, for
 * this model's shapes, the bandwidth of the matrix-vector products and of decode attention over KV of each form. With
 * --kv int8 or fp8_e4m3, decode over such KV alone. Bytes are those that must be read: the weights in the file, keys
 * and values. --copy and --product are what measure.cu found: bytes read and written by a device copy, and a bf16
 * product. --quick takes fewer rounds; --product none: there was nothing to measure; --small divides contexts and
 * lengths by 256, for a test of this program.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/gpu/whole.h"

enum { CHUNK = 2048 };

static struct {
	double copy_gbs, product_tflops;
	bool quick;
	enum kv_form form;
	int32_t divide; /* contexts and lengths by this */
} options = {.divide = 1};

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void must(enum status s, const char *what)
{
	if (s == STATUS_OK)
		return;
	printf("%s: %s\n", what, status_text(s));
	exit(1);
}

/* Bytes of all matrices that a decode step reads: all but the embedding, of which it reads a row. */
static double weight_bytes(const struct gguf *g)
{
	double bytes = 0;
	for (size_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);
		if (t->name.n < 10 || strncmp(t->name.p, "token_embd", 10) != 0)
			bytes += (double)t->n_bytes;
	}
	return bytes;
}

static double kv_bytes_per_token(const struct whole *w)
{
	return (double)w->layout.page_bytes / KV_PAGE_TOKENS;
}

static void bench_decode(struct whole *w)
{
	static const int32_t batches[] = {1, 8, 64}, contexts[] = {1024, 8192, 32768};
	float *logits;
	double weights = weight_bytes(w->gguf);
	char title[32];
	snprintf(title, sizeof title, "decode, KV in %s", kv_form_name(options.form));
	printf("\n%-22s %10s %10s %8s\n", title, "tokens/s", "GB/s", "of copy");
	for (int i = 0; i < 3; i++)
		for (int k = 0; k < 3; k++) {
			int32_t n_seqs = batches[i], at = contexts[k] / options.divide, steps = options.quick ? 4 : 24;
			char name[64];
			snprintf(name, sizeof name, "batch %d, context %dk", n_seqs, contexts[k] / 1024);
			/* What the pages hold does not matter for speed, so the context is not computed. */
			if (!whole_pages(w, n_seqs, at + 2 * steps + 8)) {
				printf("%-22s %10s\n", name, "no room");
				continue;
			}
			for (int32_t s = 0; s < 4; s++)
				must(whole_step(w, n_seqs, at++, 1, NULL, false, &logits), "decode");
			double t = now();
			for (int32_t s = 0; s < steps; s++)
				must(whole_step(w, n_seqs, at++, 1, NULL, false, NULL), "decode");
			must(w->backend->ops->sync(w->backend), "decode");
			t = (now() - t) / steps;
			double gbs = (weights + kv_bytes_per_token(w) * n_seqs * at) / t * 1e-9;
			printf("%-22s %10.1f %10.0f %7.1f%%\n", name, n_seqs / t, gbs, 100 * gbs / options.copy_gbs);
			fflush(stdout);
		}
}

static void bench_prefill(struct whole *w)
{
	static const int32_t lengths[] = {512, 8192};
	const struct model_params *p = model_params(w->model);
	/*
	 * Multiplications and additions of the layers' matrices per token; attention adds 4 n_head head_dim for each
	 * token before.
	 */
	double per_token =
		2.0 * p->n_layer *
		((double)p->n_embd * (2.0 * p->n_head + 2.0 * p->n_head_kv) * p->head_dim + 3.0 * p->n_embd * p->n_ff);
	printf("\n%-22s %10s %10s %8s\n", "prefill", "tokens/s", "TFLOP/s", "of bf16");
	for (int i = 0; i < 2; i++) {
		int32_t n = lengths[i] / options.divide;
		char name[64];
		double best = 1e30;
		snprintf(name, sizeof name, "%d tokens", lengths[i]);
		if (!whole_pages(w, 1, n)) {
			printf("%-22s %10s\n", name, "no room");
			continue;
		}
		for (int k = 0; k < 3; k++) {
			double t = now();
			for (int32_t at = 0; at < n; at += CHUNK)
				must(whole_step(w, 1, at, n - at < CHUNK ? n - at : CHUNK, NULL, false, NULL),
				     "prefill");
			must(w->backend->ops->sync(w->backend), "prefill");
			t = now() - t;
			best = t < best ? t : best;
		}
		double flops = per_token * n + 2.0 * p->n_layer * p->n_head * p->head_dim * (double)n * n;
		printf("%-22s %10.0f %10.1f", name, n / best, flops / best * 1e-12);
		if (isinf(options.product_tflops))
			printf(" %8s\n", "unknown");
		else
			printf(" %7.1f%%\n", 100 * flops / best * 1e-12 / options.product_tflops);
		fflush(stdout);
	}
}

/* Matrix-vector products of the file's largest kind of matrix, layer after layer, so that none is still in a cache. */
static void bench_matvec(struct whole *w)
{
	enum { MANY = 12 };
	struct backend *b = w->backend;
	struct weight *weight[MANY];
	const struct gguf_tensor *tensor[MANY];
	int n = 0, rounds = options.quick ? 2 : 20;
	void *x, *y;
	double bytes = 0;
	for (int i = 0; i < MANY && i < model_params(w->model)->n_layer; i++) {
		char name[64];
		struct error err;
		snprintf(name, sizeof name, "blk.%d.ffn_down.weight", i);
		const struct gguf_tensor *t = gguf_find_tensor(w->gguf, name);
		if (!t)
			break;
		struct weight_desc d = {name, t->format, (int64_t)t->dim[0], (int64_t)t->dim[1], t->data, false};
		must(b->ops->weight_create(b, &d, &weight[n], &err), "weight_create");
		tensor[n++] = t;
		bytes += (double)t->n_bytes;
	}
	if (n == 0)
		return;
	size_t x_bytes = (size_t)tensor[0]->dim[0] * 4, y_bytes = (size_t)tensor[0]->dim[1] * 4;
	must(b->ops->mem_alloc(b, x_bytes, &x), "mem_alloc");
	must(b->ops->mem_alloc(b, y_bytes, &y), "mem_alloc");
	double t = 0;
	for (int k = -1; k < rounds; k++) {
		if (k == 0) {
			must(b->ops->sync(b), "matmul");
			t = now();
		}
		for (int i = 0; i < n; i++) {
			struct matmul mm = {weight[i], NULL, y, false, false};
			must(b->ops->matmul(b, x, 1, &mm, 1), "matmul");
		}
	}
	must(b->ops->sync(b), "matmul");
	double gbs = bytes * rounds / (now() - t) * 1e-9;
	printf("\n%-22s %10s %10.0f %7.1f%%\n", "matrix-vector", tensor[0]->format->name, gbs,
	       100 * gbs / options.copy_gbs);
	b->ops->mem_free(b, x, x_bytes);
	b->ops->mem_free(b, y, y_bytes);
	for (int i = 0; i < n; i++)
		b->ops->weight_destroy(b, weight[i]);
}

static void bench_attention(struct whole *w, enum kv_form form)
{
	const struct kv_layout exact = w->layout;
	const struct model_params *p = model_params(w->model);
	static const int32_t shapes[][2] = {{1, 32768}, {8, 8192}, {64, 2048}};
	struct backend *b = w->backend;
	if (form != KV_FORM_F16)
		kv_layout_narrow(&w->layout, form);
	for (int i = 0; i < 3; i++) {
		int32_t n_seqs = shapes[i][0], at = shapes[i][1] / options.divide, token[WHOLE_SEQS] = {0},
			position[WHOLE_SEQS];
		struct batch_seq seq[WHOLE_SEQS];
		size_t bytes = (size_t)n_seqs * (size_t)p->n_head * (size_t)p->head_dim * 4;
		void *q, *out;
		char name[64];
		snprintf(name, sizeof name, "attention %d x %dk", n_seqs, shapes[i][1] / 1024);
		if (!whole_pages(w, n_seqs, at + 1)) {
			printf("%-22s %10s\n", name, "no room");
			continue;
		}
		for (int32_t s = 0; s < n_seqs; s++) {
			seq[s] = (struct batch_seq){s, 1, at, w->table + s * w->n_pages, w->n_pages};
			position[s] = at;
		}
		struct batch batch = {n_seqs, token, position, n_seqs, seq, 0, NULL};
		must(b->ops->mem_alloc(b, bytes, &q), "mem_alloc");
		must(b->ops->mem_alloc(b, bytes, &out), "mem_alloc");
		double t = 0;
		int rounds = options.quick ? 2 : 10;
		for (int k = -1; k < rounds; k++) {
			if (k == 0)
				t = now();
			/* Every layer's keys and values once a step: more than a cache holds. */
			must(b->ops->step_begin(b, &batch), "step_begin");
			for (int32_t layer = 0; layer < p->n_layer; layer++)
				must(b->ops->attention(b, w->kv, &w->layout, layer, q, p->n_head,
				                       &(struct attention_params){.scale = 0.1f}, out),
				     "attention");
			must(b->ops->step_end(b), "step_end");
		}
		double gbs = kv_bytes_per_token(w) * n_seqs * (at + 1) * rounds / (now() - t) * 1e-9;
		printf("%-22s %10s %10.0f %7.1f%%\n", name, kv_form_name(form), gbs, 100 * gbs / options.copy_gbs);
		fflush(stdout);
		b->ops->mem_free(b, q, bytes);
		b->ops->mem_free(b, out, bytes);
	}
	w->layout = exact;
}

int main(int argc, char **argv)
{
	for (int i = 3; i < argc; i++) {
		if (strcmp(argv[i], "--quick") == 0)
			options.quick = true;
		else if (strcmp(argv[i], "--small") == 0)
			options.divide = 256;
		else if (strcmp(argv[i], "--copy") == 0 && i + 1 < argc)
			options.copy_gbs = atof(argv[++i]);
		else if (strcmp(argv[i], "--kv") == 0 && i + 1 < argc && kv_form_find(argv[i + 1], &options.form))
			i++;
		else if (strcmp(argv[i], "--product") == 0 && i + 1 < argc)
			options.product_tflops = strcmp(argv[++i], "none") == 0 ? INFINITY : atof(argv[i]);
	}
	if (argc < 3 || options.copy_gbs <= 0 || options.product_tflops <= 0) {
		fprintf(stderr,
		        "usage: bench-gpu FILE DEVICE --copy GB/S --product TFLOP/S [--kv FORM] [--quick] [--small]\n");
		return 2;
	}
	struct whole w;
	double t = now();
	whole_open(&w, argv[2], 0, argv[1], CHUNK, options.form, NULL);
	printf("%s: loaded in %.1f s, %.2f GB of weights\n", argv[1], now() - t, weight_bytes(w.gguf) * 1e-9);
	bench_decode(&w);
	if (options.form == KV_FORM_F16) {
		bench_prefill(&w);
		bench_matvec(&w);
		for (int form = 0; form < KV_N_FORMS; form++)
			bench_attention(&w, (enum kv_form)form);
	}
	whole_close(&w);
	return 0;
}
