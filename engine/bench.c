/*
 * Measuring a model on a device: what `kvasir bench` prints. The formulas and what is counted: engine_bench() in
 * engine.h.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_internal.h"
#include "engine/kv/seq.h"
#include "engine/meter.h"
#include "engine/tools.h"

enum {
	CHUNK = ENGINE_DEFAULT_STEP_TOKENS,
	METERED_STEPS = 8,        /* decode steps of the run whose operations are timed */
	MEMORY_BYTES = 256 << 20, /* more than the caches of most processors */
	MEMORY_BYTES_MIN = 64 << 20,
	/* a GPU reads as fast as its launches take time, and has caches as large as some 100 MB */
	DEVICE_MEMORY_BYTES = 1 << 30,
	CACHE_BYTES = 4 << 20,
	MEMORY_SCANS = 5, CACHE_SCANS = 50,
};

_Static_assert((int)ENGINE_BENCH_OPS_MAX > (int)METER_N_OPS,
               "a row has room for every kind of operation and for the host");
_Static_assert((int)ENGINE_BENCH_BATCH_MAX <= (int)CHUNK, "a step has a row for every sequence");

struct bench {
	const struct engine_bench_params *params;
	const struct engine_bench_sink *sink;
	const struct clock *clock;
	struct gguf *gguf;
	struct backend *device;
	struct meter *meter;
	struct backend *backend; /* the meter's */
	struct model *model;
	struct rope_choice rope;
	struct kv_layout layout;
	void *kv;
	size_t kv_bytes;
	void *memory; /* what is read to measure the bandwidth; NULL when the device cannot */
	size_t memory_bytes;

	int32_t n_seqs, n_pages; /* pages of each sequence */
	int32_t *table;          /* [n_seqs][n_pages] */
	int32_t *depths;         /* ascending */
	float *random;           /* [CHUNK][n_head_kv * head_dim], host; only for random KV */
	void *random_device;
	size_t random_bytes;
	int32_t token[CHUNK], position[CHUNK], output[ENGINE_BENCH_BATCH_MAX];
	struct batch_seq seq[ENGINE_BENCH_BATCH_MAX];
};

/* ---- What makes no sense ---- */

static enum status check_list(const char *name, const int32_t *list, size_t n, int32_t min, int32_t max,
                              struct error *err)
{
	for (size_t i = 0; i < n; i++)
		if (list[i] < min || list[i] > max)
			return error_set_param(err, STATUS_INVALID, name,
			                       "%s: %" PRId32 " is not from %" PRId32 " to %" PRId32, name, list[i],
			                       min, max);
	return STATUS_OK;
}

static enum status check(const struct engine_bench_params *p, struct error *err)
{
	const int32_t tokens_max = 1 << 24;
	enum status st = check_list("prefill", p->prefill, p->n_prefill, 1, tokens_max, err);
	if (st == STATUS_OK)
		st = check_list("decode", &p->decode_tokens, 1, 0, tokens_max, err);
	if (st == STATUS_OK)
		st = check_list("depth", p->depth, p->n_depths, 0, tokens_max, err);
	if (st == STATUS_OK)
		st = check_list("batch", p->batch, p->n_batches, 1, ENGINE_BENCH_BATCH_MAX, err);
	if (st == STATUS_OK)
		st = check_list("runs", &p->runs, 1, 1, ENGINE_BENCH_RUNS_MAX, err);
	if (st != STATUS_OK)
		return st;
	struct kv_choice kv;
	if (!kv_choice_find(p->kv_type, &kv))
		return error_set_param(err, STATUS_INVALID, "kv-dtype", "kv-dtype: \"%.64s\" is none of " KV_CHOICES,
		                       p->kv_type);
	if (p->n_depths == 0)
		return error_set_param(err, STATUS_INVALID, "depth", "depth: at least one is needed");
	if (p->n_prefill == 0 && (p->decode_tokens == 0 || p->n_batches == 0))
		return error_set_param(err, STATUS_INVALID, "decode",
		                       "there is nothing to measure: neither prefill nor decode");
	return STATUS_OK;
}

/* ---- Steps ---- */

/*
 * n rows of each of the first n_seqs sequences, from position `at`; logits of each one's last row where they are
 * wanted.
 */
static enum status step(struct bench *b, int32_t n_seqs, int32_t at, int32_t n, bool logits_wanted)
{
	int32_t n_vocab = model_params(b->model)->n_vocab;
	const struct batch batch = {n_seqs * n, b->token, b->position, n_seqs, b->seq, logits_wanted ? n_seqs : 0,
	                            b->output};
	float *logits;
	for (int32_t s = 0; s < n_seqs; s++) {
		b->seq[s] = (struct batch_seq){s * n, n, at, b->table + (size_t)s * (size_t)b->n_pages, b->n_pages};
		b->output[s] = s * n + n - 1;
		for (int32_t i = 0; i < n; i++) {
			b->position[s * n + i] = at + i;
			/*
			 * Any will do, but sequences have different ones, as they would: rows that are alike are
			 * quicker.
			 */
			b->token[s * n + i] = (int32_t)(((int64_t)(at + i) * 7919 + (int64_t)s * 104729) % n_vocab);
		}
	}
	return model_forward(b->model, &batch, b->kv, &logits);
}

static enum status prefill(struct bench *b, int32_t at, int32_t n, bool logits_wanted)
{
	for (int32_t end = at + n; at < end; at += CHUNK) {
		int32_t rows = end - at < CHUNK ? end - at : CHUNK;
		enum status st = step(b, 1, at, rows, logits_wanted && at + rows == end);
		if (st != STATUS_OK)
			return st;
	}
	return STATUS_OK;
}

static enum status decode(struct bench *b, int32_t n_seqs, int32_t at, int32_t n)
{
	enum status st = STATUS_OK;
	for (int32_t i = 0; i < n && st == STATUS_OK; i++)
		st = step(b, n_seqs, at + i, 1, true);
	return st;
}

/* ---- Context ---- */

/* Writes finite random keys and values at positions [at, end) of the first sequence. */
static enum status fill_random(struct bench *b, int32_t at, int32_t end)
{
	const struct backend_ops *ops = b->backend->ops;
	enum status st = STATUS_OK;
	for (; at < end && st == STATUS_OK; at += CHUNK) {
		int32_t n = end - at < CHUNK ? end - at : CHUNK;
		b->seq[0] = (struct batch_seq){0, n, at, b->table, b->n_pages};
		for (int32_t i = 0; i < n; i++)
			b->position[i] = at + i;
		const struct batch batch = {n, b->token, b->position, 1, b->seq, 0, b->output};
		st = ops->step_begin(b->backend, &batch);
		for (int32_t layer = 0; layer < b->layout.n_layer && st == STATUS_OK; layer++)
			st = ops->kv_write(b->backend, b->kv, &b->layout, layer, b->random_device, b->random_device);
		enum status ended = ops->step_end(b->backend);
		st = st != STATUS_OK ? st : ended;
	}
	return st;
}

/* The first sequence goes from `from` to `to` tokens of context; the others get copies of its pages. */
static enum status fill(struct bench *b, int32_t from, int32_t to)
{
	int32_t first = from / KV_PAGE_TOKENS, n = kv_pages_for(to) - first;
	enum status st = b->params->random_kv ? fill_random(b, from, to) : prefill(b, from, to - from, false);
	for (int32_t s = 1; s < b->n_seqs && st == STATUS_OK; s++)
		st = b->backend->ops->page_copy(b->backend, b->kv, &b->layout, b->table + first,
		                                b->table + (size_t)s * (size_t)b->n_pages + first, n);
	return st == STATUS_OK ? b->backend->ops->sync(b->backend) : st;
}

/* ---- Bandwidth ---- */

/* Bytes per second of the fastest of n readings; 0 when the device cannot tell. */
static double read_speed(struct bench *b, size_t bytes, int n)
{
	double best = 0;
	for (int i = 0; i < n && b->memory; i++) {
		uint64_t sum;
		int64_t start = clock_now_ns(b->clock);
		if (b->backend->ops->scan(b->backend, b->memory, bytes, &sum) != STATUS_OK)
			return 0;
		int64_t ns = clock_now_ns(b->clock) - start;
		double speed = (double)bytes * 1e9 / (double)(ns > 0 ? ns : 1);
		best = speed > best ? speed : best;
	}
	return best;
}

/* Every byte of device memory becomes `value`. */
static enum status write_all(struct bench *b, void *to, size_t bytes, int value)
{
	enum { PART = 1 << 20 };
	void *part = malloc(PART);
	if (!part)
		return STATUS_NOMEM;
	memset(part, value, PART);
	enum status st = STATUS_OK;
	for (size_t at = 0; st == STATUS_OK && at < bytes; at += PART)
		st = b->backend->ops->mem_write(b->backend, (char *)to + at, part,
		                                bytes - at < PART ? bytes - at : PART);
	free(part);
	return st;
}

/* Memory to read. It is written first: pages that never were may all be the same one of zeros. */
static enum status prepare_memory(struct bench *b)
{
	const struct backend_ops *ops = b->backend->ops;
	if (!ops->scan)
		return STATUS_OK;
	size_t bytes = ops->mem_available ? DEVICE_MEMORY_BYTES : MEMORY_BYTES;
	enum status st = ops->mem_alloc(b->backend, bytes, &b->memory);
	for (; st == STATUS_NOMEM && bytes > MEMORY_BYTES_MIN; st = ops->mem_alloc(b->backend, bytes, &b->memory))
		bytes /= 2;
	if (st != STATUS_OK)
		return st;
	b->memory_bytes = bytes;
	return write_all(b, b->memory, bytes, 1);
}

/* ---- Tests ---- */

static int compare_speeds(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static enum status run_once(struct bench *b, const struct engine_bench_row *row, double *tokens_per_s)
{
	int64_t start = clock_now_ns(b->clock);
	enum status st = row->prefill ? prefill(b, row->depth, row->tokens, true)
	                              : decode(b, row->batch, row->depth, row->tokens);
	int64_t ns = clock_now_ns(b->clock) - start;
	*tokens_per_s = (double)row->tokens * row->batch * 1e9 / (double)(ns > 0 ? ns : 1);
	return st;
}

/* One more run, for what the operations take and read. */
static enum status run_metered(struct bench *b, struct engine_bench_row *row)
{
	struct meter_counts counts;
	int32_t n = row->prefill || row->tokens < METERED_STEPS ? row->tokens : METERED_STEPS,
		at = row->depth + (row->tokens - n) / 2;
	int64_t start = clock_now_ns(b->clock);
	meter_start(b->meter);
	enum status st = row->prefill ? prefill(b, at, n, true) : decode(b, row->batch, at, n);
	meter_stop(b->meter, &counts);
	double total = (double)(clock_now_ns(b->clock) - start), host = 1;
	if (st != STATUS_OK)
		return st;
	for (int i = 0; i < METER_N_OPS; i++) {
		double share = total > 0 ? (double)counts.ns[i] / total : 0;
		row->ops[row->n_ops].name = meter_op_name((enum meter_op)i);
		row->ops[row->n_ops++].share = share;
		host -= share;
	}
	row->ops[row->n_ops].name = "host";
	row->ops[row->n_ops++].share = host > 0 ? host : 0;
	row->bytes_per_token = (double)(counts.weight_bytes + counts.kv_bytes) / ((double)n * row->batch);
	return STATUS_OK;
}

static enum status measure(struct bench *b, bool is_prefill, int32_t tokens, int32_t depth, int32_t batch)
{
	struct engine_bench_row row = {
		.prefill = is_prefill, .tokens = tokens, .depth = depth, .batch = batch, .runs = b->params->runs};
	double speed[ENGINE_BENCH_RUNS_MAX];
	enum status st = run_metered(b, &row); /* first, so that it also warms the caches up */
	for (int32_t i = 0; i < row.runs && st == STATUS_OK; i++) {
		double reading = read_speed(b, b->memory_bytes, 1);
		row.read_bytes_per_s = reading > row.read_bytes_per_s ? reading : row.read_bytes_per_s;
		st = run_once(b, &row, &speed[i]);
	}
	if (st != STATUS_OK)
		return st;
	qsort(speed, (size_t)row.runs, sizeof *speed, compare_speeds);
	row.best_tokens_per_s = speed[row.runs - 1];
	row.tokens_per_s = (speed[row.runs / 2] + speed[(row.runs - 1) / 2]) / 2;
	row.bytes_per_s = row.tokens_per_s * row.bytes_per_token;
	b->sink->row(b->sink->arg, &row);
	return STATUS_OK;
}

static bool fits(const struct bench *b, int32_t tokens, int32_t depth)
{
	return (int64_t)tokens + depth <= model_params(b->model)->n_ctx;
}

static enum status run_tests(struct bench *b)
{
	const struct engine_bench_params *p = b->params;
	enum status st = STATUS_OK;
	int32_t filled = 0;
	for (size_t d = 0; d < p->n_depths; d++) {
		int32_t depth = b->depths[d];
		bool any = p->decode_tokens > 0 && fits(b, p->decode_tokens, depth);
		for (size_t i = 0; i < p->n_prefill; i++)
			any |= fits(b, p->prefill[i], depth);
		if (any && st == STATUS_OK)
			st = fill(b, filled, depth);
		filled = any ? depth : filled;
		for (size_t i = 0; i < p->n_prefill && st == STATUS_OK; i++) {
			if (fits(b, p->prefill[i], depth))
				st = measure(b, true, p->prefill[i], depth, 1);
			else
				b->sink->left_out(b->sink->arg, true, p->prefill[i], depth);
		}
		if (p->decode_tokens > 0 && p->n_batches > 0 && !fits(b, p->decode_tokens, depth)) {
			b->sink->left_out(b->sink->arg, false, p->decode_tokens, depth);
			continue;
		}
		for (size_t i = 0; i < p->n_batches && p->decode_tokens > 0 && st == STATUS_OK; i++)
			st = measure(b, false, p->decode_tokens, depth, p->batch[i]);
	}
	return st;
}

/* ---- Setting up ---- */

static int compare_depths(const void *a, const void *b)
{
	int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
	return (x > y) - (x < y);
}

/* The longest that any sequence gets, among the tests that fit the context; 0 when none does. */
static int32_t longest(const struct bench *b)
{
	const struct engine_bench_params *p = b->params;
	int32_t most = 0;
	for (size_t d = 0; d < p->n_depths; d++) {
		for (size_t i = 0; i <= p->n_prefill; i++) {
			int32_t tokens = i < p->n_prefill ? p->prefill[i] : p->decode_tokens;
			if (tokens > 0 && fits(b, tokens, p->depth[d]) && tokens + p->depth[d] > most)
				most = tokens + p->depth[d];
		}
	}
	return most;
}

static enum status prepare_random(struct bench *b)
{
	const struct model_params *m = model_params(b->model);
	size_t n = (size_t)CHUNK * (size_t)m->n_head_kv * (size_t)m->head_dim;
	uint32_t x = 1;
	b->random = malloc(n * sizeof *b->random);
	if (!b->random)
		return STATUS_NOMEM;
	for (size_t i = 0; i < n; i++) {
		x = x * 1664525 + 1013904223; /* Numerical Recipes' generator */
		b->random[i] = (float)(x >> 8) / (1 << 23) - 1;
	}
	enum status st = b->backend->ops->mem_alloc(b->backend, n * sizeof *b->random, &b->random_device);
	if (st == STATUS_OK)
		b->random_bytes = n * sizeof *b->random;
	return st == STATUS_OK ? b->backend->ops->mem_write(b->backend, b->random_device, b->random, b->random_bytes)
	                       : st;
}

static enum status prepare_kv(struct bench *b, struct error *err)
{
	const struct engine_bench_params *p = b->params;
	const struct model_params *m = model_params(b->model);
	struct kv_choice kv;
	enum status st = kv_choice_make(b->backend, p->kv_type, &kv, err);
	if (st != STATUS_OK)
		return st;
	b->n_seqs = 1;
	for (size_t i = 0; i < p->n_batches; i++)
		b->n_seqs = p->batch[i] > b->n_seqs ? p->batch[i] : b->n_seqs;
	b->n_pages = kv_pages_for(longest(b));
	if (b->n_pages == 0)
		return error_set_param(err, STATUS_INVALID, "depth",
		                       "no test fits the model's context of %" PRId32 " tokens", m->n_ctx);
	if (kv_layout_for(b->backend, &b->layout, m->n_layer, m->n_head_kv, m->head_dim) != STATUS_OK)
		return error_set(err, STATUS_UNSUPPORTED, "the model's KV geometry is not supported");
	if (kv.form != KV_FORM_F16)
		kv_layout_narrow(&b->layout, kv.form);
	size_t n = (size_t)b->n_seqs * (size_t)b->n_pages;
	if (n > INT32_MAX || __builtin_mul_overflow(n, b->layout.page_stride, &b->kv_bytes) ||
	    b->backend->ops->mem_alloc(b->backend, b->kv_bytes, &b->kv) != STATUS_OK)
		return error_set(err, STATUS_NOMEM,
		                 "no memory for the KV of %" PRId32 " sequences of %" PRId32 " tokens", b->n_seqs,
		                 b->n_pages * KV_PAGE_TOKENS);
	b->table = malloc(n * sizeof *b->table);
	b->depths = malloc(p->n_depths * sizeof *b->depths);
	if (!b->table || !b->depths || (p->random_kv && prepare_random(b) != STATUS_OK))
		return error_set(err, STATUS_NOMEM, "no memory for block tables");
	/* Else the first run, the one that is metered, would wait in kv_write for the kernel to find memory. */
	st = write_all(b, b->kv, b->kv_bytes, 0);
	if (st != STATUS_OK)
		return error_set(err, st, "the memory for KV cannot be written: %s", status_text(st));
	/* Pages of the sequences take turns, as when they grow together. */
	for (int32_t s = 0; s < b->n_seqs; s++)
		for (int32_t i = 0; i < b->n_pages; i++)
			b->table[(size_t)s * (size_t)b->n_pages + (size_t)i] = i * b->n_seqs + s;
	memcpy(b->depths, p->depth, p->n_depths * sizeof *b->depths);
	qsort(b->depths, p->n_depths, sizeof *b->depths, compare_depths);
	return model_reserve(b->model, CHUNK, b->n_seqs, &b->layout, err);
}

static void report_info(struct bench *b)
{
	struct backend_info device;
	struct engine_bench_info info = {.memory_bytes = b->memory_bytes, .cache_bytes = b->memory ? CACHE_BYTES : 0};
	b->backend->ops->info(b->backend, &device);
	snprintf(info.backend, sizeof info.backend, "%s", device.name);
	engine_rope_describe(model_params(b->model), &b->rope, &info.rope);
	snprintf(info.detail, sizeof info.detail, "%s", device.detail);
	info.n_threads = device.n_threads;
	info.memory_bytes_per_s = read_speed(b, b->memory_bytes, MEMORY_SCANS);
	info.cache_bytes_per_s = read_speed(b, CACHE_BYTES, CACHE_SCANS);
	b->sink->info(b->sink->arg, &info);
}

static void tear_down(struct bench *b)
{
	if (b->kv)
		b->backend->ops->mem_free(b->backend, b->kv, b->kv_bytes);
	if (b->memory)
		b->backend->ops->mem_free(b->backend, b->memory, b->memory_bytes);
	if (b->random_device)
		b->backend->ops->mem_free(b->backend, b->random_device, b->random_bytes);
	model_destroy(b->model);
	meter_destroy(b->meter);
	if (b->device)
		b->device->ops->destroy(b->device);
	gguf_close(b->gguf);
	free(b->random);
	free(b->depths);
	free(b->table);
	free(b);
}

enum status engine_bench(const struct engine_bench_params *params, const struct engine_bench_sink *sink,
                         struct error *err)
{
	enum status st = check(params, err);
	if (st != STATUS_OK)
		return st;
	struct bench *b = calloc(1, sizeof *b);
	if (!b)
		return error_set(err, STATUS_NOMEM, "no memory for a benchmark");
	b->params = params;
	b->sink = sink;
	b->clock = clock_system();
	const struct backend_options device = {.device = params->device, .n_threads = params->n_threads};
	st = rope_choice_parse(params->rope_scaling, &b->rope, err);
	if (st == STATUS_OK)
		st = gguf_open(params->model_path, &b->gguf, err);
	if (st == STATUS_OK)
		st = backend_create(&device, &b->device, err);
	if (st != STATUS_OK)
		goto out;
	st = meter_create(b->device, b->clock, &b->meter);
	if (st != STATUS_OK) {
		error_set(err, st, "no memory for a benchmark");
		goto out;
	}
	b->backend = meter_backend(b->meter);
	st = model_load_stretched(b->gguf, b->backend, &b->rope, &b->model, err);
	if (st == STATUS_OK)
		st = prepare_kv(b, err);
	if (st != STATUS_OK)
		goto out;
	st = prepare_memory(b);
	if (st != STATUS_OK) {
		error_set(err, st, "no memory to measure the read bandwidth with");
		goto out;
	}
	report_info(b);
	st = run_tests(b);
	if (st != STATUS_OK)
		error_set(err, st, "a step failed: %s", status_text(st));
out:
	tear_down(b);
	return st;
}
