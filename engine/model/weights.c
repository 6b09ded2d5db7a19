#include "engine/model/weights.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"

/* ---- The table of tensors ---- */

enum dim { DIM_ONE, DIM_EMBD, DIM_FF, DIM_Q, DIM_KV, DIM_HEAD, DIM_VOCAB };

enum need {
	NEED_ALWAYS,
	NEED_OPTIONAL, /* taken if it is there */
	NEED_QKV_BIAS, /* needed by architectures with biases on q, k and v, else taken if it is there */
	NEED_QK_NORM,  /* belongs to architectures with norms on q and k only */
	NEED_POST_NORM, /* belongs to architectures with norms behind attention and feed-forward */
	NEED_IGNORED,  /* may be there; what it holds is computed */
};

struct rule {
	const char *name;
	enum dim n_in, n_out; /* n_out == DIM_ONE: a vector of n_in floats */
	enum need need;
	size_t offset; /* of the `struct weight *` or `const float *` it fills in */
};

#define AT(member) offsetof(struct layer_weights, member)
/* Names follow "blk.N.". */
static const struct rule layer_rules[] = {
	{"attn_norm.weight", DIM_EMBD, DIM_ONE, NEED_ALWAYS, AT(attn_norm)},
	{"attn_q.weight", DIM_EMBD, DIM_Q, NEED_ALWAYS, AT(q.weight)},
	{"attn_q.bias", DIM_Q, DIM_ONE, NEED_QKV_BIAS, AT(q.bias)},
	{"attn_k.weight", DIM_EMBD, DIM_KV, NEED_ALWAYS, AT(k.weight)},
	{"attn_k.bias", DIM_KV, DIM_ONE, NEED_QKV_BIAS, AT(k.bias)},
	{"attn_v.weight", DIM_EMBD, DIM_KV, NEED_ALWAYS, AT(v.weight)},
	{"attn_v.bias", DIM_KV, DIM_ONE, NEED_QKV_BIAS, AT(v.bias)},
	{"attn_q_norm.weight", DIM_HEAD, DIM_ONE, NEED_QK_NORM, AT(q_norm)},
	{"attn_k_norm.weight", DIM_HEAD, DIM_ONE, NEED_QK_NORM, AT(k_norm)},
	{"attn_output.weight", DIM_Q, DIM_EMBD, NEED_ALWAYS, AT(o.weight)},
	{"attn_output.bias", DIM_EMBD, DIM_ONE, NEED_OPTIONAL, AT(o.bias)},
	{"post_attention_norm.weight", DIM_EMBD, DIM_ONE, NEED_POST_NORM, AT(post_attn_norm)},
	{"post_ffw_norm.weight", DIM_EMBD, DIM_ONE, NEED_POST_NORM, AT(post_ffn_norm)},
	{"ffn_norm.weight", DIM_EMBD, DIM_ONE, NEED_ALWAYS, AT(ffn_norm)},
	{"ffn_gate.weight", DIM_EMBD, DIM_FF, NEED_ALWAYS, AT(gate.weight)},
	{"ffn_gate.bias", DIM_FF, DIM_ONE, NEED_OPTIONAL, AT(gate.bias)},
	{"ffn_up.weight", DIM_EMBD, DIM_FF, NEED_ALWAYS, AT(up.weight)},
	{"ffn_up.bias", DIM_FF, DIM_ONE, NEED_OPTIONAL, AT(up.bias)},
	{"ffn_down.weight", DIM_FF, DIM_EMBD, NEED_ALWAYS, AT(down.weight)},
	{"ffn_down.bias", DIM_EMBD, DIM_ONE, NEED_OPTIONAL, AT(down.bias)},
	{"attn_rot_embd.weight", DIM_ONE, DIM_ONE, NEED_IGNORED, 0}, /* old files: RoPE's frequencies */
};
#undef AT

#define AT(member) offsetof(struct model_weights, member)
static const struct rule model_rules[] = {
	{"token_embd.weight", DIM_EMBD, DIM_VOCAB, NEED_ALWAYS, AT(embedding)},
	{"output_norm.weight", DIM_EMBD, DIM_ONE, NEED_ALWAYS, AT(output_norm)},
	{"output.weight", DIM_EMBD, DIM_VOCAB, NEED_OPTIONAL, AT(output)},
	{"rope_freqs.weight", DIM_ONE, DIM_ONE, NEED_IGNORED, 0}, /* read by forward.c */
};
#undef AT

enum {
	N_LAYER_RULES = sizeof layer_rules / sizeof layer_rules[0],
	N_MODEL_RULES = sizeof model_rules / sizeof model_rules[0]
};

/* ---- Loading ---- */

/* Vectors are collected on the host and written to the device in one piece. */
struct loader {
	const struct gguf *g;
	struct backend *b;
	const struct model_params *p;
	struct error *err;
	size_t n_floats; /* of all vectors, each rounded up to VECTOR_ALIGN */
	float *host;     /* [n_floats] */
	float *device;   /* [n_floats] */
	size_t at;       /* the next vector's place */
};

enum { VECTOR_ALIGN = 16 };

static int64_t extent(const struct model_params *p, enum dim d)
{
	switch (d) {
	case DIM_ONE:
		break;
	case DIM_EMBD:
		return p->n_embd;
	case DIM_FF:
		return p->n_ff;
	case DIM_Q:
		return (int64_t)p->n_head * p->head_dim;
	case DIM_KV:
		return (int64_t)p->n_head_kv * p->head_dim;
	case DIM_HEAD:
		return p->head_dim;
	case DIM_VOCAB:
		return p->n_vocab;
	}
	return 1;
}

static size_t aligned_floats(int64_t n)
{
	return ((size_t)n + VECTOR_ALIGN - 1) & ~(size_t)(VECTOR_ALIGN - 1);
}

static bool is_required(const struct rule *r, const struct model_params *p)
{
	return r->need == NEED_ALWAYS || (r->need == NEED_QKV_BIAS && p->qkv_bias) ||
	       (r->need == NEED_QK_NORM && p->qk_norm) || (r->need == NEED_POST_NORM && p->post_norm);
}

/* Whether the forward pass of these parameters uses the tensor at all. */
static bool is_used(const struct rule *r, const struct model_params *p)
{
	return r->need != NEED_IGNORED && (r->need != NEED_QK_NORM || p->qk_norm) &&
	       (r->need != NEED_POST_NORM || p->post_norm);
}

static bool is_vector_format(const struct gguf_tensor *t)
{
	return t->format->type == QUANT_F32 || t->format->type == QUANT_F16 || t->format->type == QUANT_BF16;
}

/* Finds the rule's tensor (NULL when it is optional and absent) and checks its shape and format. */
static enum status find_tensor(const struct loader *l, const struct rule *r, const char *name,
                               const struct gguf_tensor **out)
{
	const struct gguf_tensor *t = *out = gguf_find_tensor(l->g, name);
	uint64_t n_in = (uint64_t)extent(l->p, r->n_in), n_out = (uint64_t)extent(l->p, r->n_out);
	if (!t && is_required(r, l->p))
		return error_set(l->err, STATUS_NOT_FOUND,
		                 "tensor '%s' (%" PRIu64 " x %" PRIu64 ") is missing, which architecture %s needs",
		                 name, n_in, n_out, l->p->arch);
	if (!t)
		return STATUS_OK;
	if (t->dim[0] != n_in || t->dim[1] != n_out || t->dim[2] != 1 || t->dim[3] != 1)
		return error_set(l->err, STATUS_CORRUPT,
		                 "tensor '%s' is %" PRIu64 " x %" PRIu64 " x %" PRIu64 " x %" PRIu64
		                 " where the metadata asks for %" PRIu64 " x %" PRIu64,
		                 name, t->dim[0], t->dim[1], t->dim[2], t->dim[3], n_in, n_out);
	if (r->n_out == DIM_ONE && !is_vector_format(t))
		return error_set(l->err, STATUS_UNSUPPORTED, "tensor '%s' is %s where F32, F16 or BF16 is expected",
		                 name, t->format->name);
	if (n_in % t->format->block_elems != 0)
		return error_set(l->err, STATUS_CORRUPT, "tensor '%s': rows of %" PRIu64 " are not whole blocks of %s",
		                 name, n_in, t->format->name);
	return STATUS_OK;
}

static enum status load_matrix(struct loader *l, const struct rule *r, const struct gguf_tensor *t, const char *name,
                               struct weight **slot)
{
	struct weight_desc desc = {
		.name = name,
		.format = t->format,
		.n_in = (int64_t)t->dim[0],
		.n_out = (int64_t)t->dim[1],
		.data = t->data,
		.rows_only = r->n_out == DIM_VOCAB && r->need == NEED_ALWAYS && !l->p->tied_output,
	};
	return l->b->ops->weight_create(l->b, &desc, slot, l->err);
}

static void load_vector(struct loader *l, const struct gguf_tensor *t, const float **slot)
{
	t->format->dequantize(t->data, l->host + l->at, (size_t)t->n_elems);
	*slot = l->device + l->at;
	l->at += aligned_floats((int64_t)t->n_elems);
}

enum pass { PASS_CHECK, PASS_LOAD };

/* One pass over one table: PASS_CHECK looks at every tensor and counts vectors, PASS_LOAD fills in `base`. */
static enum status apply_rules(struct loader *l, enum pass pass, const struct rule *rules, size_t n, const char *prefix,
                               void *base)
{
	for (size_t i = 0; i < n; i++) {
		const struct rule *r = &rules[i];
		const struct gguf_tensor *t;
		char name[64];
		if (!is_used(r, l->p))
			continue;
		snprintf(name, sizeof name, "%s%s", prefix, r->name);
		enum status st = find_tensor(l, r, name, &t);
		if (st != STATUS_OK)
			return st;
		if (!t)
			continue;
		if (pass == PASS_CHECK)
			l->n_floats += r->n_out == DIM_ONE ? aligned_floats(extent(l->p, r->n_in)) : 0;
		else if (r->n_out == DIM_ONE)
			load_vector(l, t, (const float **)((char *)base + r->offset));
		else
			st = load_matrix(l, r, t, name, (struct weight **)((char *)base + r->offset));
		if (st != STATUS_OK)
			return st;
	}
	return STATUS_OK;
}

static enum status apply_all(struct loader *l, enum pass pass, struct model_weights *w)
{
	enum status st = apply_rules(l, pass, model_rules, N_MODEL_RULES, "", w);
	for (int32_t i = 0; i < l->p->n_layer && st == STATUS_OK; i++) {
		char prefix[32];
		snprintf(prefix, sizeof prefix, "blk.%" PRId32 ".", i);
		st = apply_rules(l, pass, layer_rules, N_LAYER_RULES, prefix, &w->layers[i]);
	}
	return st;
}

/* ---- Tensors that no rule names ---- */

static bool has_rule(struct str name, const struct rule *rules, size_t n, const struct model_params *p)
{
	for (size_t i = 0; i < n; i++) {
		if (str_is(name, rules[i].name))
			return rules[i].need == NEED_IGNORED || is_used(&rules[i], p);
	}
	return false;
}

/* Splits "blk.N.rest"; false when the name does not begin so. */
static bool split_layer(struct str name, int32_t *layer, struct str *rest)
{
	size_t i = strlen("blk.");
	int32_t n = 0;
	if (!str_starts(name, "blk."))
		return false;
	for (; i < name.n && name.p[i] >= '0' && name.p[i] <= '9' && n < 1 << 20; i++)
		n = n * 10 + (name.p[i] - '0');
	if (i == strlen("blk.") || i >= name.n || name.p[i] != '.')
		return false;
	*layer = n;
	*rest = (struct str){name.p + i + 1, name.n - i - 1};
	return true;
}

static enum status refuse_unknown(const struct loader *l)
{
	for (size_t i = 0; i < gguf_n_tensors(l->g); i++) {
		struct str name = gguf_tensor_at(l->g, i)->name, rest = {"", 0};
		int32_t layer = -1;
		bool in_layer = split_layer(name, &layer, &rest) && layer < l->p->n_layer;
		if (in_layer ? has_rule(rest, layer_rules, N_LAYER_RULES, l->p)
		             : has_rule(name, model_rules, N_MODEL_RULES, l->p))
			continue;
		if (name.n > 128)
			name.n = 128;
		if (in_layer)
			return error_set(l->err, STATUS_UNSUPPORTED,
			                 "tensor '%.*s' is not part of architecture %s as it is computed here",
			                 STR_ARG(name), l->p->arch);
		log_msg(LOG_WARN, "model", "tensor '%.*s' is not used", STR_ARG(name));
	}
	return STATUS_OK;
}

/* ---- Interface ---- */

enum status weights_load(const struct gguf *g, struct backend *b, const struct model_params *p,
                         struct model_weights *out, struct error *err)
{
	struct loader l = {.g = g, .b = b, .p = p, .err = err};
	enum status st;
	memset(out, 0, sizeof *out);
	out->backend = b;
	out->n_layer = p->n_layer;
	out->layers = calloc((size_t)p->n_layer, sizeof *out->layers);
	if (!out->layers) {
		st = error_set(err, STATUS_NOMEM, "no memory for the tables of %" PRId32 " layers", p->n_layer);
		goto fail;
	}
	st = apply_all(&l, PASS_CHECK, out);
	if (st == STATUS_OK)
		st = refuse_unknown(&l);
	if (st != STATUS_OK)
		goto fail;

	out->vectors_bytes = l.n_floats * sizeof(float);
	l.host = calloc(l.n_floats, sizeof *l.host);
	st = l.host ? b->ops->mem_alloc(b, out->vectors_bytes, &out->vectors) : STATUS_NOMEM;
	if (st != STATUS_OK) {
		error_set(err, st, "no memory for %zu bytes of norms and biases", out->vectors_bytes);
		goto fail;
	}
	l.device = out->vectors;
	st = apply_all(&l, PASS_LOAD, out);
	if (st != STATUS_OK)
		goto fail;
	st = b->ops->mem_write(b, out->vectors, l.host, out->vectors_bytes);
	if (st != STATUS_OK) {
		error_set(err, st, "norms and biases could not be written to the device");
		goto fail;
	}
	if (!out->output)
		out->output = out->embedding;
	free(l.host);
	return STATUS_OK;
fail:
	free(l.host);
	weights_free(out);
	return st;
}

void weights_free(struct model_weights *w)
{
	struct backend *b = w->backend;
	for (int32_t i = 0; w->layers && i < w->n_layer; i++) {
		for (size_t j = 0; j < N_LAYER_RULES; j++) {
			if (layer_rules[j].n_out == DIM_ONE)
				continue;
			struct weight *matrix = *(struct weight **)((char *)&w->layers[i] + layer_rules[j].offset);
			if (matrix)
				b->ops->weight_destroy(b, matrix);
		}
	}
	if (w->output && w->output != w->embedding)
		b->ops->weight_destroy(b, w->output);
	if (w->embedding)
		b->ops->weight_destroy(b, w->embedding);
	if (w->vectors)
		b->ops->mem_free(b, w->vectors, w->vectors_bytes);
	free(w->layers);
	memset(w, 0, sizeof *w);
}

enum status weights_read_vector(const struct gguf_tensor *t, int64_t n, float **out, struct error *err)
{
	*out = NULL;
	if (!t)
		return STATUS_OK;
	if (t->n_elems != (uint64_t)n || t->dim[0] != (uint64_t)n)
		return error_set(err, STATUS_CORRUPT,
		                 "tensor '%.*s' has %" PRIu64 " elements where %" PRId64 " are expected",
		                 STR_ARG(t->name), t->n_elems, n);
	if (!is_vector_format(t))
		return error_set(err, STATUS_UNSUPPORTED, "tensor '%.*s' is %s where F32, F16 or BF16 is expected",
		                 STR_ARG(t->name), t->format->name);
	*out = malloc((size_t)n * sizeof **out);
	if (!*out)
		return error_set(err, STATUS_NOMEM, "no memory for tensor '%.*s'", STR_ARG(t->name));
	t->format->dequantize(t->data, *out, (size_t)n);
	return STATUS_OK;
}
