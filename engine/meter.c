#include "engine/meter.h"

#include <stdlib.h>
#include <string.h>

struct known_weight {
	const struct weight *weight;
	enum meter_op op;
};

struct meter {
	struct backend base;
	struct backend_ops ops; /* without those that `inner` lacks */
	struct backend *inner;
	const struct clock *clock;
	struct known_weight *weights;
	size_t n_weights, cap_weights;
	const struct batch *batch; /* of the step that is open */
	bool counting;
	struct meter_counts counts;
};

/* What a matrix is for follows from its name. */
static const struct {
	const char *part;
	enum meter_op op;
} weight_names[] = {
        {"attn_q.", METER_QKV},         {"attn_k.", METER_QKV},       {"attn_v.", METER_QKV},
        {"attn_output.", METER_O},      {"ffn_gate.", METER_GATE_UP}, {"ffn_up.", METER_GATE_UP},
        {"ffn_down.", METER_DOWN},      {"output.", METER_OUTPUT},    {"token_embd.", METER_OUTPUT},
};

const char *meter_op_name(enum meter_op op)
{
	static const char *const names[METER_N_OPS] = {
	        [METER_EMBED] = "embed",         [METER_NORM] = "norm",           [METER_QKV] = "qkv",
	        [METER_ROPE] = "rope",           [METER_KV_WRITE] = "kv_write",   [METER_ATTENTION] = "attention",
	        [METER_O] = "attn_output",       [METER_GATE_UP] = "ffn_gate_up", [METER_GLU] = "glu",
	        [METER_DOWN] = "ffn_down",       [METER_OUTPUT] = "output",       [METER_OTHER] = "other",
	};
	return names[op];
}

static struct meter *self(const struct backend *b)
{
	return (struct meter *)b;
}

static int64_t begin(const struct meter *m)
{
	return m->counting ? clock_now_ns(m->clock) : 0;
}

/* Ends what began at `start`. */
static enum status end(struct meter *m, enum meter_op op, int64_t start, enum status st)
{
	if (!m->counting)
		return st;
	enum status waited = m->inner->ops->sync(m->inner);
	m->counts.ns[op] += clock_now_ns(m->clock) - start;
	return st != STATUS_OK ? st : waited;
}

/* ---- Passed on as they are ---- */

static void meter_backend_destroy(struct backend *b)
{
	(void)b; /* meter_destroy() */
}

static void info(const struct backend *b, struct backend_info *out)
{
	self(b)->inner->ops->info(self(b)->inner, out);
}

static enum status mem_alloc(struct backend *b, size_t bytes, void **out)
{
	return self(b)->inner->ops->mem_alloc(self(b)->inner, bytes, out);
}

static void mem_free(struct backend *b, void *p, size_t bytes)
{
	self(b)->inner->ops->mem_free(self(b)->inner, p, bytes);
}

static size_t mem_available(struct backend *b)
{
	return self(b)->inner->ops->mem_available(self(b)->inner);
}

static const char *last_failure(const struct backend *b)
{
	return self(b)->inner->ops->last_failure(self(b)->inner);
}

static enum status mem_write(struct backend *b, void *dst, const void *host, size_t bytes)
{
	return self(b)->inner->ops->mem_write(self(b)->inner, dst, host, bytes);
}

static enum status mem_read(struct backend *b, void *host, const void *src, size_t bytes)
{
	return self(b)->inner->ops->mem_read(self(b)->inner, host, src, bytes);
}

static void weight_destroy(struct backend *b, struct weight *w)
{
	self(b)->inner->ops->weight_destroy(self(b)->inner, w);
}

static size_t weight_bytes(const struct backend *b, const struct weight *w)
{
	return self(b)->inner->ops->weight_bytes(self(b)->inner, w);
}

static enum status reserve(struct backend *b, int32_t max_rows, int32_t max_width, const struct kv_layout *layout)
{
	return self(b)->inner->ops->reserve(self(b)->inner, max_rows, max_width, layout);
}

static enum status step_begin(struct backend *b, const struct batch *batch)
{
	self(b)->batch = batch;
	return self(b)->inner->ops->step_begin(self(b)->inner, batch);
}

static enum status step_end(struct backend *b)
{
	self(b)->batch = NULL;
	return self(b)->inner->ops->step_end(self(b)->inner);
}

static enum status page_copy(struct backend *b, void *kv, const struct kv_layout *layout, const int32_t *from,
                             const int32_t *to, int32_t n)
{
	return self(b)->inner->ops->page_copy(self(b)->inner, kv, layout, from, to, n);
}

static enum status sync(struct backend *b)
{
	return self(b)->inner->ops->sync(self(b)->inner);
}

static enum status scan(struct backend *b, const void *p, size_t bytes, uint64_t *sum)
{
	return self(b)->inner->ops->scan(self(b)->inner, p, bytes, sum);
}

/* ---- Counted ---- */

static enum meter_op op_of_name(const char *name)
{
	for (size_t i = 0; i < sizeof weight_names / sizeof weight_names[0]; i++)
		if (strstr(name, weight_names[i].part))
			return weight_names[i].op;
	return METER_OTHER;
}

static enum meter_op op_of_weight(const struct meter *m, const struct weight *w)
{
	for (size_t i = 0; i < m->n_weights; i++)
		if (m->weights[i].weight == w)
			return m->weights[i].op;
	return METER_OTHER;
}

static enum status weight_create(struct backend *b, const struct weight_desc *desc, struct weight **out,
                                 struct error *err)
{
	struct meter *m = self(b);
	if (m->n_weights == m->cap_weights) {
		size_t cap = m->cap_weights ? 2 * m->cap_weights : 64;
		struct known_weight *grown = realloc(m->weights, cap * sizeof *grown);
		if (!grown)
			return error_set(err, STATUS_NOMEM, "no memory for matrix \"%s\"", desc->name);
		m->weights = grown;
		m->cap_weights = cap;
	}
	enum status st = m->inner->ops->weight_create(m->inner, desc, out, err);
	if (st == STATUS_OK)
		m->weights[m->n_weights++] = (struct known_weight){*out, op_of_name(desc->name)};
	return st;
}

static enum status embed(struct backend *b, const struct weight *w, float scale, float *out)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	return end(m, METER_EMBED, start, m->inner->ops->embed(m->inner, w, scale, out));
}

static enum status rms_norm(struct backend *b, const float *x, int64_t n, int32_t dim, const float *gain, float eps,
                            float *out)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	return end(m, METER_NORM, start, m->inner->ops->rms_norm(m->inner, x, n, dim, gain, eps, out));
}

static enum status rms_norm_add(struct backend *b, const float *x, int64_t n, int32_t dim, const float *gain, float eps,
                                float *out)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	return end(m, METER_NORM, start, m->inner->ops->rms_norm_add(m->inner, x, n, dim, gain, eps, out));
}

static enum status matmul(struct backend *b, const float *x, int64_t n_rows, const struct matmul *mm, int32_t n_mm)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	enum status st = m->inner->ops->matmul(m->inner, x, n_rows, mm, n_mm);
	if (!m->counting || n_mm < 1)
		return st;
	st = end(m, op_of_weight(m, mm[0].weight), start, st);
	for (int32_t i = 0; i < n_mm; i++)
		m->counts.weight_bytes += m->inner->ops->weight_bytes(m->inner, mm[i].weight);
	return st;
}

static enum status rope(struct backend *b, float *q, int32_t n_head, float *k, int32_t n_head_kv, int32_t head_dim,
                        const struct rope_params *params)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	return end(m, METER_ROPE, start, m->inner->ops->rope(m->inner, q, n_head, k, n_head_kv, head_dim, params));
}

static enum status kv_write(struct backend *b, void *kv, const struct kv_layout *layout, int32_t layer, const float *k,
                            const float *v)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	return end(m, METER_KV_WRITE, start, m->inner->ops->kv_write(m->inner, kv, layout, layer, k, v));
}

static enum status attention(struct backend *b, const void *kv, const struct kv_layout *layout, int32_t layer,
                             const float *q, int32_t n_head, const struct attention_params *params, float *out)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	enum status st = m->inner->ops->attention(m->inner, kv, layout, layer, q, n_head, params, out);
	if (!m->counting)
		return st;
	uint64_t token_bytes = layout->page_bytes / KV_PAGE_TOKENS / (uint64_t)layout->n_layer;
	st = end(m, METER_ATTENTION, start, st);
	for (int32_t i = 0; i < m->batch->n_seqs; i++) {
		const struct batch_seq *seq = &m->batch->seq[i];
		int32_t seen = seq->first_position + seq->n_rows;
		if (params->window && seen - seq->n_rows + 1 > params->window)
			seen = params->window + seq->n_rows - 1;
		m->counts.kv_bytes += token_bytes * (uint64_t)seen;
	}
	return st;
}

static enum status glu(struct backend *b, enum glu f, float *gate, const float *up, int64_t n, int32_t dim)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	return end(m, METER_GLU, start, m->inner->ops->glu(m->inner, f, gate, up, n, dim));
}

static enum status softcap(struct backend *b, float *x, int64_t n, float cap)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	return end(m, METER_OUTPUT, start, m->inner->ops->softcap(m->inner, x, n, cap));
}

static enum status gather_rows(struct backend *b, const float *x, int32_t dim, const int32_t *rows, int32_t n,
                               float *out)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	return end(m, METER_OTHER, start, m->inner->ops->gather_rows(m->inner, x, dim, rows, n, out));
}

static enum status sample(struct backend *b, float *logits, int32_t n_vocab, int32_t stride,
                          const struct sample_row *rows, int32_t n, int32_t *tokens)
{
	struct meter *m = self(b);
	int64_t start = begin(m);
	return end(m, METER_OTHER, start, m->inner->ops->sample(m->inner, logits, n_vocab, stride, rows, n, tokens));
}

static const struct backend_ops meter_ops = {
        .destroy = meter_backend_destroy,
        .info = info,
        .mem_alloc = mem_alloc,
        .mem_free = mem_free,
        .mem_available = mem_available,
        .mem_write = mem_write,
        .mem_read = mem_read,
        .weight_create = weight_create,
        .weight_destroy = weight_destroy,
        .weight_bytes = weight_bytes,
        .reserve = reserve,
        .step_begin = step_begin,
        .step_end = step_end,
        .embed = embed,
        .rms_norm = rms_norm,
        .rms_norm_add = rms_norm_add,
        .matmul = matmul,
        .rope = rope,
        .kv_write = kv_write,
        .attention = attention,
        .glu = glu,
        .softcap = softcap,
        .gather_rows = gather_rows,
        .sample = sample,
        .page_copy = page_copy,
        .sync = sync,
        .scan = scan,
        .last_failure = last_failure,
};

enum status meter_create(struct backend *inner, const struct clock *clock, struct meter **out)
{
	struct meter *m = calloc(1, sizeof *m);
	if (!m)
		return STATUS_NOMEM;
	m->ops = meter_ops;
	if (!inner->ops->mem_available)
		m->ops.mem_available = NULL;
	if (!inner->ops->sample)
		m->ops.sample = NULL;
	if (!inner->ops->scan)
		m->ops.scan = NULL;
	if (!inner->ops->last_failure)
		m->ops.last_failure = NULL;
	m->base.ops = &m->ops;
	m->inner = inner;
	m->clock = clock;
	*out = m;
	return STATUS_OK;
}

void meter_destroy(struct meter *m)
{
	if (!m)
		return;
	free(m->weights);
	free(m);
}

struct backend *meter_backend(struct meter *m)
{
	return &m->base;
}

void meter_start(struct meter *m)
{
	memset(&m->counts, 0, sizeof m->counts);
	m->counting = true;
}

void meter_stop(struct meter *m, struct meter_counts *out)
{
	m->counting = false;
	*out = m->counts;
}
