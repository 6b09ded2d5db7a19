#include "engine/model/forward.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/rope.h"
#include "engine/model/weights.h"

/* Device memory of one step; R = max_rows, O = max_outputs. */
struct activations {
	float *hidden; /* [R][n_embd] the residual stream */
	float *normed; /* [R][n_embd] */
	float *q;      /* [R][n_head * head_dim] */
	float *k;      /* [R][n_head_kv * head_dim] */
	float *v;      /* [R][n_head_kv * head_dim] */
	float *mixed;  /* [R][n_head * head_dim] what attention gives */
	float *gate;   /* [R][n_ff] */
	float *up;     /* [R][n_ff] */
	float *logits; /* [O][n_vocab] */
};

struct model {
	struct backend *backend;
	struct model_params params;
	struct model_weights weights;
	uint64_t n_params;
	struct rope_params rope, rope_local; /* of layers without a window, and of those with one */
	float *inv_freq; /* [2][rope_dims / 2] of all layers, and of those with a window where these have their own */

	int32_t max_rows, max_outputs; /* 0 before model_reserve() */
	struct kv_layout layout, layer_layout; /* of the pool, and of a slab that has one layer of its pages */
	struct activations act;
	void *slab; /* device memory that `act` points into */
	size_t slab_bytes;
	float *host_logits; /* [max_outputs][n_vocab]; NULL where device memory is host memory */
};

/* ---- Life ---- */

static enum status init_rope(struct model *m, const struct gguf *g, struct error *err)
{
	const struct model_params *p = &m->params;
	float *factors;
	const struct gguf_tensor *table = p->rope_table ? gguf_find_tensor(g, "rope_freqs.weight") : NULL;
	enum status st = weights_read_vector(table, p->rope_dims / 2, &factors, err);
	if (st != STATUS_OK)
		return st;
	for (int32_t i = 0; factors && i < p->rope_dims / 2; i++) {
		if (!(factors[i] > 0.0f && factors[i] < INFINITY)) {
			st = error_set(err, STATUS_CORRUPT, "tensor 'rope_freqs.weight': divisor %" PRId32 " is %g", i,
			               (double)factors[i]);
			goto out;
		}
	}
	m->inv_freq = malloc((size_t)p->rope_dims * sizeof *m->inv_freq);
	if (!m->inv_freq) {
		st = error_set(err, STATUS_NOMEM, "no memory for the RoPE table");
		goto out;
	}
	rope_frequencies(p, factors, m->inv_freq);
	m->rope = (struct rope_params){
		.pairing = p->rope_pairing,
		.n_dims = p->rope_dims,
		.inv_freq = m->inv_freq,
		.magnitude = rope_magnitude(p),
	};
	m->rope_local = m->rope;
	if (p->rope_base_local > 0) {
		rope_frequencies_local(p, m->inv_freq + p->rope_dims / 2);
		m->rope_local.inv_freq = m->inv_freq + p->rope_dims / 2;
		m->rope_local.magnitude = 1;
	}
	m->rope.chunks = p->rope_chunks;
out:
	free(factors);
	return st;
}

static enum status check_device(const struct model *m, struct error *err)
{
	struct backend_info info;
	m->backend->ops->info(m->backend, &info);
	if (m->params.rope_chunks.size == 0 || info.turns_chunks)
		return STATUS_OK;
	return error_set_param(err, STATUS_UNSUPPORTED, "rope-scaling",
			       "rope-scaling: the device %s cannot compute dca", info.name);
}

enum status model_load(const struct gguf *g, struct backend *b, struct model **out, struct error *err)
{
	return model_load_stretched(g, b, NULL, out, err);
}

enum status model_load_stretched(const struct gguf *g, struct backend *b, const struct rope_choice *rope,
                                 struct model **out, struct error *err)
{
	struct model *m = calloc(1, sizeof *m);
	if (!m)
		return error_set(err, STATUS_NOMEM, "no memory for a model");
	m->backend = b;
	enum status st = arch_read_params(g, &m->params, err);
	if (st == STATUS_OK && rope)
		st = rope_choice_apply(rope, &m->params, err);
	if (st == STATUS_OK)
		st = check_device(m, err);
	if (st == STATUS_OK)
		st = init_rope(m, g, err);
	if (st == STATUS_OK)
		st = weights_load(g, b, &m->params, &m->weights, err);
	if (st != STATUS_OK) {
		model_destroy(m);
		return st;
	}
	for (size_t i = 0; i < gguf_n_tensors(g); i++)
		m->n_params += gguf_tensor_at(g, i)->n_elems;
	*out = m;
	return STATUS_OK;
}

static void release_step_memory(struct model *m)
{
	if (m->slab)
		m->backend->ops->mem_free(m->backend, m->slab, m->slab_bytes);
	free(m->host_logits);
	m->slab = NULL;
	m->host_logits = NULL;
	m->max_rows = m->max_outputs = 0;
}

void model_destroy(struct model *m)
{
	if (!m)
		return;
	release_step_memory(m);
	if (m->weights.backend)
		weights_free(&m->weights);
	free(m->inv_freq);
	free(m);
}

const struct model_params *model_params(const struct model *m)
{
	return &m->params;
}

/* Whether layers with a window turn otherwise than those without. */
static bool other_angles(const struct model_params *p)
{
	return p->rope_base_local > 0 || p->rope_chunks.size > 0;
}

const struct rope_params *model_rope(const struct model *m, int32_t layer)
{
	bool local = model_layer_window(&m->params, layer) > 0 && other_angles(&m->params);
	return local ? &m->rope_local : &m->rope;
}

uint64_t model_n_params(const struct model *m)
{
	return m->n_params;
}

/* ---- Step memory ---- */

static enum status no_step_memory(enum status st, int32_t max_rows, int32_t max_outputs, struct error *err)
{
	return error_set(err, st, "no memory for steps of %" PRId32 " rows and %" PRId32 " outputs", max_rows,
	                 max_outputs);
}

enum { STEP_PARTS = 9, STEP_ALIGN_FLOATS = 1024 };

/* The arrays of a step: where each begins in the slab, in floats, and the slab's size in bytes. */
struct step_parts {
	size_t offset[STEP_PARTS];
	size_t bytes;
};

/* False when the sizes overflow. max_outputs is at most max_rows: no step can want more. */
static bool layout_step(const struct model_params *p, int32_t max_rows, int32_t max_outputs, struct step_parts *out)
{
	size_t rows = (size_t)max_rows, q_width = (size_t)p->n_head * (size_t)p->head_dim;
	size_t kv_width = (size_t)p->n_head_kv * (size_t)p->head_dim, embd = (size_t)p->n_embd, ff = (size_t)p->n_ff;
	const size_t width[STEP_PARTS] = {embd, embd, q_width, kv_width, kv_width, q_width, ff, ff, (size_t)p->n_vocab};
	size_t total = 0;
	for (size_t i = 0; i < STEP_PARTS; i++) {
		size_t floats, n = i + 1 < STEP_PARTS ? rows : (size_t)max_outputs;
		if (__builtin_mul_overflow(n, width[i], &floats) || floats > SIZE_MAX / 64 || total > SIZE_MAX / 64)
			return false;
		out->offset[i] = total;
		total += (floats + STEP_ALIGN_FLOATS - 1) & ~(size_t)(STEP_ALIGN_FLOATS - 1);
	}
	out->bytes = total * sizeof(float);
	return true;
}

size_t model_step_bytes(const struct model_params *p, int32_t max_rows, int32_t max_outputs)
{
	struct step_parts parts;
	bool fits = layout_step(p, max_rows, max_outputs < max_rows ? max_outputs : max_rows, &parts);
	return fits ? parts.bytes : SIZE_MAX;
}

enum status model_reserve(struct model *m, int32_t max_rows, int32_t max_outputs, const struct kv_layout *layout,
                          struct error *err)
{
	const struct model_params *p = &m->params;
	const struct backend_ops *ops = m->backend->ops;
	struct step_parts parts;
	float **const place[STEP_PARTS] = {&m->act.hidden, &m->act.normed, &m->act.q, &m->act.k,     &m->act.v,
	                                   &m->act.mixed,  &m->act.gate,   &m->act.up, &m->act.logits};
	if (max_outputs > max_rows)
		max_outputs = max_rows;

	if (m->slab)
		return error_set(err, STATUS_INVALID, "step memory is reserved already");
	if (max_rows < 1 || max_outputs < 0)
		return error_set(err, STATUS_INVALID, "a step cannot have %" PRId32 " rows and %" PRId32 " outputs",
		                 max_rows, max_outputs);
	if (layout->n_layer != p->n_layer || layout->n_head_kv != p->n_head_kv || layout->head_dim != p->head_dim)
		return error_set(err, STATUS_INVALID, "the KV layout is another model's");
	if (!layout_step(p, max_rows, max_outputs, &parts))
		return no_step_memory(STATUS_NOMEM, max_rows, max_outputs, err);

	struct backend_info info;
	ops->info(m->backend, &info);
	m->slab_bytes = parts.bytes;
	enum status st = ops->mem_alloc(m->backend, m->slab_bytes, &m->slab);
	if (st != STATUS_OK)
		return no_step_memory(st, max_rows, max_outputs, err);
	if (!info.host_memory && max_outputs > 0) {
		m->host_logits = malloc((size_t)max_outputs * (size_t)p->n_vocab * sizeof *m->host_logits);
		if (!m->host_logits)
			st = STATUS_NOMEM;
	}
	int32_t q_width = p->n_head * p->head_dim, widest = p->n_embd > p->n_ff ? p->n_embd : p->n_ff;
	if (st == STATUS_OK)
		st = ops->reserve(m->backend, max_rows, widest > q_width ? widest : q_width, layout);
	if (st != STATUS_OK) {
		release_step_memory(m);
		if (st == STATUS_UNSUPPORTED)
			return error_set(err, st, "device %s cannot compute attention heads of %" PRId32 " elements",
			                 info.name, p->head_dim);
		return no_step_memory(st, max_rows, max_outputs, err);
	}
	for (size_t i = 0; i < STEP_PARTS; i++)
		*place[i] = (float *)m->slab + parts.offset[i];
	m->layout = *layout;
	m->layer_layout = kv_layout_of_layer(layout);
	m->max_rows = max_rows;
	m->max_outputs = max_outputs;
	return STATUS_OK;
}

/* ---- The forward pass ---- */

#define TRY(call)                                                                                                      \
	do {                                                                                                           \
		enum status try_st = (call);                                                                           \
		if (try_st != STATUS_OK)                                                                               \
			return try_st;                                                                                 \
	} while (0)

/*
 * Attention of a sequence with far pages: these, as many as can be had at a time, then those in the pool. When some
 * cannot be had, its rows get something, for nobody, and those of others are what they were.
 */
static enum status attend_far(struct model *m, const struct batch *batch, int32_t s, const void *kv, int32_t layer,
                              const struct attention_params *params)
{
	const struct batch_seq *seq = &batch->seq[s];
	const struct backend_ops *ops = m->backend->ops;
	struct activations *a = &m->act;
	struct kv_far_run run;
	struct kv_layout layout = m->layer_layout;
	bool windowed = params->window > 0 && seq->first_position >= params->window;
	struct attention_part part = {.seq = s, .first = true};
	int32_t page = windowed ? (seq->first_position + 1 - params->window) / m->layout.page_tokens : 0;
	page -= page % KV_PART_PAGES;
	for (; page < seq->far->n_pages && seq->far->get(seq->far, layer, page, &run); page += run.n_pages) {
		part.first_page = page;
		part.n_pages = run.n_pages;
		part.block_table = run.block_table;
		layout.wide = run.wide;
		TRY(ops->attention_part(m->backend, run.kv, &layout, 0, a->q, m->params.n_head, params, &part,
		                        a->mixed));
		part.first = false;
	}
	part.first_page = page > seq->far->n_pages ? page : seq->far->n_pages;
	part.n_pages = seq->n_pages - part.first_page;
	part.block_table = seq->block_table + part.first_page;
	part.last = true;
	return ops->attention_part(m->backend, kv, &m->layout, layer, a->q, m->params.n_head, params, &part, a->mixed);
}

/* Whether attention is to tell something of its rows: in all layers, whatever other rows there are. */
static bool is_asked(const struct batch *b)
{
	for (int32_t i = 0; i < b->n_seqs; i++)
		if (b->seq[i].mass || b->seq[i].look || b->seq[i].probe)
			return true;
	return false;
}

/* Keys, values and queries of all rows; leaves what attention gives in act.mixed. */
static enum status attend(struct model *m, const struct batch *batch, void *kv, int32_t layer)
{
	const struct layer_weights *w = &m->weights.layers[layer];
	const struct model_params *p = &m->params;
	const struct backend_ops *ops = m->backend->ops;
	struct activations *a = &m->act;
	int32_t n = batch->n_rows;
	const struct matmul qkv[] = {
		{.weight = w->q.weight, .bias = w->q.bias, .y = a->q},
		{.weight = w->k.weight, .bias = w->k.bias, .y = a->k},
		{.weight = w->v.weight, .bias = w->v.bias, .y = a->v},
	};
	TRY(ops->rms_norm(m->backend, a->hidden, n, p->n_embd, w->attn_norm, p->rms_eps, a->normed));
	TRY(ops->matmul(m->backend, a->normed, n, qkv, 3));
	if (p->qk_norm) {
		TRY(ops->rms_norm(m->backend, a->q, (int64_t)n * p->n_head, p->head_dim, w->q_norm, p->rms_eps, a->q));
		TRY(ops->rms_norm(m->backend, a->k, (int64_t)n * p->n_head_kv, p->head_dim, w->k_norm, p->rms_eps,
		                  a->k));
	}
	struct attention_params params = {
		.scale = p->attn_scale, .softcap = p->attn_softcap, .window = model_layer_window(p, layer)};
	const struct rope_params *rope = model_rope(m, layer);
	params.chunked = rope->chunks.size > 0 ? rope : NULL;
	TRY(ops->rope(m->backend, a->q, p->n_head, a->k, p->n_head_kv, p->head_dim, rope));
	TRY(ops->kv_write(m->backend, kv, &m->layout, layer, a->k, a->v));
	if (layer == p->n_layer - 1 && batch->n_outputs == 0 && !is_asked(batch))
		return STATUS_OK; /* the last layer's keys and values were all that was wanted of it */
	if (batch->arrival && !batch->arrival->wait(batch->arrival, layer))
		return STATUS_CANCELLED;
	TRY(ops->attention(m->backend, kv, &m->layout, layer, a->q, p->n_head, &params, a->mixed));
	for (int32_t s = 0; s < batch->n_seqs; s++) {
		if (batch->seq[s].far)
			TRY(attend_far(m, batch, s, kv, layer, &params));
	}
	return STATUS_OK;
}

/* hidden += x W^T, or what a norm makes of the product where there is one; normed is lost then. */
static enum status add_product(struct model *m, const float *x, int32_t n, const struct linear *w,
                               const float *post_norm, float *normed, float *hidden)
{
	const struct model_params *p = &m->params;
	const struct backend_ops *ops = m->backend->ops;
	const struct matmul mm = {
		.weight = w->weight, .bias = w->bias, .y = post_norm ? normed : hidden, .accumulate = !post_norm};
	TRY(ops->matmul(m->backend, x, n, &mm, 1));
	return post_norm ? ops->rms_norm_add(m->backend, normed, n, p->n_embd, post_norm, p->rms_eps, hidden)
	                 : STATUS_OK;
}

/* hidden += o(mixed); hidden += down(glu(gate(norm(hidden))) * up(norm(hidden))), for n rows. */
static enum status project_and_feed_forward(struct model *m, int32_t layer, int32_t n, float *hidden, float *normed,
                                            const float *mixed)
{
	const struct layer_weights *w = &m->weights.layers[layer];
	const struct model_params *p = &m->params;
	const struct backend_ops *ops = m->backend->ops;
	struct activations *a = &m->act;
	const struct matmul gate_up[] = {
		{.weight = w->gate.weight, .bias = w->gate.bias, .y = a->gate},
		{.weight = w->up.weight, .bias = w->up.bias, .y = a->up},
	};
	TRY(add_product(m, mixed, n, &w->o, w->post_attn_norm, normed, hidden));
	TRY(ops->rms_norm(m->backend, hidden, n, p->n_embd, w->ffn_norm, p->rms_eps, normed));
	TRY(ops->matmul(m->backend, normed, n, gate_up, 2));
	TRY(ops->glu(m->backend, p->glu, a->gate, a->up, n, p->n_ff));
	return add_product(m, a->gate, n, &w->down, w->post_ffn_norm, normed, hidden);
}

/*
 * All layers, then logits. After the last layer's attention only the rows whose logits are wanted go on: they are
 * gathered into `normed` and `q`, which are free by then.
 */
static enum status run(struct model *m, const struct batch *batch, void *kv)
{
	const struct model_params *p = &m->params;
	const struct backend_ops *ops = m->backend->ops;
	struct activations *a = &m->act;
	int32_t last = p->n_layer - 1, n = batch->n_outputs;
	float *hidden = a->hidden, *normed = a->normed, *mixed = a->mixed;

	TRY(ops->embed(m->backend, m->weights.embedding, p->embd_scale, a->hidden));
	for (int32_t layer = 0; layer < last; layer++) {
		TRY(attend(m, batch, kv, layer));
		TRY(project_and_feed_forward(m, layer, batch->n_rows, a->hidden, a->normed, a->mixed));
	}
	TRY(attend(m, batch, kv, last));
	if (n == 0)
		return STATUS_OK;
	if (n < batch->n_rows) {
		TRY(ops->gather_rows(m->backend, a->hidden, p->n_embd, batch->output_row, n, a->normed));
		TRY(ops->gather_rows(m->backend, a->mixed, p->n_head * p->head_dim, batch->output_row, n, a->q));
		hidden = a->normed;
		normed = a->hidden;
		mixed = a->q;
	}
	TRY(project_and_feed_forward(m, last, n, hidden, normed, mixed));
	const struct matmul output = {.weight = m->weights.output, .y = a->logits, .precise = true};
	TRY(ops->rms_norm(m->backend, hidden, n, p->n_embd, m->weights.output_norm, p->rms_eps, normed));
	TRY(ops->matmul(m->backend, normed, n, &output, 1));
	return p->final_softcap > 0 ? ops->softcap(m->backend, a->logits, (int64_t)n * p->n_vocab, p->final_softcap)
	                            : STATUS_OK;
}

/* A batch that does not fit would make the backend write elsewhere, so it is looked at although the engine made it. */
static bool batch_fits(const struct model *m, const struct batch *b)
{
	int32_t next = 0;
	if (b->n_rows < 1 || b->n_rows > m->max_rows || b->n_outputs < 0 || b->n_outputs > m->max_outputs ||
	    b->n_seqs < 1)
		return false;
	for (int32_t i = 0; i < b->n_rows; i++) {
		if (b->token[i] < 0 || b->token[i] >= m->params.n_vocab)
			return false;
	}
	for (int32_t i = 0; i < b->n_seqs; i++) {
		const struct batch_seq *s = &b->seq[i];
		if (s->first_row != next || s->n_rows < 1 || s->n_rows > b->n_rows - next || s->first_position < 0 ||
		    (int64_t)s->first_position + s->n_rows > (int64_t)s->n_pages * m->layout.page_tokens)
			return false;
		const struct page_choice *c = &s->choice;
		if (m->rope.chunks.size > 0 && (c->n_pages != 0 || b->position[next] != s->first_position))
			return false;
		if (c->n_pages != 0 && (!m->layout.bounds || c->n_first < 0 || c->n_last < 1 ||
		                        c->n_pages < (int64_t)c->n_first + c->n_last))
			return false;
		if (s->probe && (s->probe->n_pages < 1 || s->far || m->layout.form != KV_FORM_F16))
			return false;
		if (s->plus && (c->n_pages != 0 || s->far || m->layout.form != KV_FORM_F16 ||
				s->n_plus % (KV_PART_PAGES * KV_PAGE_TOKENS) != 0))
			return false;
		if (s->far &&
		    (!m->backend->ops->attention_part || s->far->n_pages > s->first_position / m->layout.page_tokens))
			return false;
		for (int32_t j = 0; j < s->n_rows; j++) {
			if (b->position[next + j] < s->first_position || b->position[next + j] != b->position[next] + j)
				return false;
		}
		next += s->n_rows;
	}
	for (int32_t i = 0; i < b->n_outputs; i++) {
		if (b->output_row[i] < 0 || b->output_row[i] >= b->n_rows ||
		    (i && b->output_row[i] <= b->output_row[i - 1]))
			return false;
	}
	return next == b->n_rows;
}

enum status model_run(struct model *m, const struct batch *batch, void *kv)
{
	const struct backend_ops *ops = m->backend->ops;
	enum status st, end;
	if (!batch_fits(m, batch))
		return STATUS_INVALID;
	do {
		TRY(ops->step_begin(m->backend, batch));
		st = run(m, batch, kv);
		end = ops->step_end(m->backend);
	} while (st == STATUS_OK && end == STATUS_BUSY); /* at most once for each of its pages */
	return st == STATUS_OK || end == STATUS_DEVICE ? end : st; /* the end may know better that the device is lost */
}

enum status model_logits(struct model *m, int32_t first, int32_t n, float **logits)
{
	size_t at = (size_t)first * (size_t)m->params.n_vocab;
	if (first < 0 || n < 0 || n > m->max_outputs - first)
		return STATUS_INVALID;
	*logits = (m->host_logits ? m->host_logits : m->act.logits) + at;
	if (!m->host_logits || n == 0)
		return STATUS_OK;
	size_t bytes = (size_t)n * (size_t)m->params.n_vocab * sizeof **logits;
	return m->backend->ops->mem_read(m->backend, *logits, m->act.logits + at, bytes);
}

bool model_samples(const struct model *m)
{
	return m->backend->ops->sample != NULL;
}

enum status model_sample(struct model *m, int32_t n_vocab, const struct sample_row *rows, int32_t n, int32_t *tokens)
{
	return m->backend->ops->sample(m->backend, m->act.logits, n_vocab, m->params.n_vocab, rows, n, tokens);
}

enum status model_forward(struct model *m, const struct batch *batch, void *kv, float **logits)
{
	enum status st = model_run(m, batch, kv);
	return st == STATUS_OK ? model_logits(m, 0, batch->n_outputs, logits) : st;
}
