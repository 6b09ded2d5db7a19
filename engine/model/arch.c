#include "engine/model/arch.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/log.h"

/*
 * One row per architecture: the name in general.architecture, how its files pair the rotated dimensions, and what else
 * it has of struct arch.
 *
 * Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786): every second and all but every sixth layer are local.
 * Which layers, the base of the local ones' angles, the window of Gemma 2 where the file does not say, and the scale of
 * the 27B models are in the models' published configurations, not in their files. The gains of their norms are stored
 * as they are multiplied with (conversion adds the 1 that the publications leave out).
 */
#define GEMMA .glu = GLU_GELU, .post_norm = true, .scaled_embedding = true
#define ARCH_MAP(X)                                                                                                    \
	X("llama", ROPE_INTERLEAVED, .window_period = 1)                                                               \
	X("qwen2", ROPE_HALVES, .qkv_bias = true)                                                                      \
	X("qwen3", ROPE_HALVES, .qk_norm = true)                                                                       \
	X("gemma2", ROPE_HALVES, GEMMA, .window_period = 2, .window = 4096, .embd_scaled_layers = 46)                  \
	X("gemma3", ROPE_HALVES, GEMMA, .window_period = 6, .qk_norm = true, .local_base = 10000,                      \
	  .embd_scaled_layers = 62)

static const struct arch {
	const char *name;
	enum rope_pairing pairing;
	bool qkv_bias, qk_norm, post_norm, scaled_embedding;
	enum glu glu;
	/*
	 * Where there is a window: of so many layers the last sees everything; 1: none does, 0: files do not tell which
	 * do.
	 */
	int32_t window_period;
	int32_t window;             /* when the file has none */
	float local_base;           /* rope_base_local */
	/* with so many layers, attention is scaled by the share of the embedding that a head has */
	int32_t embd_scaled_layers;
} archs[] = {
#define X(name, pairing, ...) {name, pairing, __VA_ARGS__},
	ARCH_MAP(X)
#undef X
};

const char *arch_supported(void)
{
#define X(name, pairing, ...) ", " name
	static const char all[] = ARCH_MAP(X);
#undef X
	return all + 2;
}

/* RoPE scaling types by their name in {arch}.rope.scaling.type. */
static const struct {
	const char *name;
	enum rope_scaling scaling;
} rope_types[] = {
	{"none", ROPE_SCALING_NONE},
	{"linear", ROPE_SCALING_LINEAR},
	{"llama3", ROPE_SCALING_LLAMA3},
	{"yarn", ROPE_SCALING_YARN},
};

/* Settings that other engines compute and this one does not, with the value that makes them do nothing. */
static const struct {
	const char *suffix;
	double neutral;
	const char *what;
} unsupported[] = {
	{"expert_count", 0, "mixture of experts"},
	{"expert_used_count", 0, "mixture of experts"},
	{"expert_shared_count", 0, "mixture of experts"},
	{"logit_scale", 1, "scaling of logits"},
	{"residual_scale", 1, "scaling of residuals"},
	{"embedding_scale", 1, "scaling of embeddings"},
	{"attention.clamp_kqv", 0, "clamping of q, k and v"},
	{"attention.max_alibi_bias", 0, "ALiBi"},
	{"attention.temperature_scale", 0, "attention temperature"},
	{"attention.kv_lora_rank", 0, "latent attention"},
	{"attention.q_lora_rank", 0, "latent attention"},
	{"rope.scaling.yarn_log_multiplier", 0, "YaRN's log multiplier"},
	{"use_parallel_residual", 0, "parallel residuals"},
};

/* Keys that are read below, or that describe the model without changing what is computed. */
static const char *const known[] = {
	"block_count",
	"context_length",
	"embedding_length",
	"feed_forward_length",
	"vocab_size",
	"attention.head_count",
	"attention.head_count_kv",
	"attention.key_length",
	"attention.value_length",
	"attention.layer_norm_rms_epsilon",
	"attention.sliding_window",
	"attention.sliding_window_pattern",
	"attn_logit_softcapping",
	"final_logit_softcapping",
	"attention.scale",
	"attention.causal",
	"rope.dimension_count",
	"rope.freq_base",
	"rope.freq_base_swa",
	"rope.scale_linear",
	"rope.scaling.type",
	"rope.scaling.factor",
	"rope.scaling.original_context_length",
	"rope.scaling.attn_factor",
	"rope.scaling.yarn_attn_factor",
	"rope.scaling.yarn_ext_factor",
	"rope.scaling.yarn_beta_fast",
	"rope.scaling.yarn_beta_slow",
	"rope.scaling.low_freq_factor",
	"rope.scaling.high_freq_factor",
	"rope.scaling.finetuned",
	"tensor_data_layout",
};

/* Reads keys of one architecture. The first failure sticks: later reads do nothing. */
struct reader {
	const struct gguf *g;
	const char *arch;
	enum status status;
	struct error *err;
	char key[128];
};

static const char *key(struct reader *r, const char *suffix)
{
	snprintf(r->key, sizeof r->key, "%s.%s", r->arch, suffix);
	return r->key;
}

/* False, with *out unchanged, when the key is absent (a failure if `required`) or unusable. */
static bool read_float(struct reader *r, const char *suffix, bool required, double min, double max, float *out)
{
	double v;
	if (r->status != STATUS_OK || (!required && !gguf_find(r->g, key(r, suffix))))
		return false;
	r->status = gguf_get_float(r->g, key(r, suffix), &v, r->err);
	if (r->status != STATUS_OK)
		return false;
	if (!(v >= min && v <= max)) {
		r->status = error_set(r->err, STATUS_INVALID, "metadata key '%s' is %g, but must be between %g and %g",
		                      r->key, v, min, max);
		return false;
	}
	*out = (float)v;
	return true;
}

static bool read_int(struct reader *r, const char *suffix, bool required, uint64_t min, uint64_t max, int32_t *out)
{
	uint64_t v;
	if (r->status != STATUS_OK || (!required && !gguf_find(r->g, key(r, suffix))))
		return false;
	r->status = gguf_get_uint(r->g, key(r, suffix), &v, r->err);
	if (r->status != STATUS_OK)
		return false;
	if (v < min || v > max) {
		r->status = error_set(r->err, STATUS_INVALID,
		                      "metadata key '%s' is %" PRIu64 ", but must be between %" PRIu64 " and %" PRIu64,
		                      r->key, v, min, max);
		return false;
	}
	*out = (int32_t)v;
	return true;
}

#define FAIL(r, st, ...) ((r)->status = (r)->status == STATUS_OK ? error_set((r)->err, st, __VA_ARGS__) : (r)->status)

/* ---- Parts ---- */

static const struct arch *find_arch(const struct gguf *g, struct error *err, enum status *status)
{
	struct str name;
	*status = gguf_get_str(g, "general.architecture", &name, err);
	if (*status != STATUS_OK)
		return NULL;
	for (size_t i = 0; i < sizeof archs / sizeof archs[0]; i++) {
		if (str_is(name, archs[i].name))
			return &archs[i];
	}
	if (name.n > 64)
		name.n = 64;
	*status = error_set(err, STATUS_UNSUPPORTED, "architecture '%.*s' is not supported; supported are %s",
	                    STR_ARG(name), arch_supported());
	return NULL;
}

static void read_shape(struct reader *r, struct model_params *p)
{
	int32_t value_dim;
	read_int(r, "block_count", true, 1, 1 << 12, &p->n_layer);
	read_int(r, "embedding_length", true, 1, 1 << 20, &p->n_embd);
	read_int(r, "feed_forward_length", true, 1, 1 << 22, &p->n_ff);
	read_int(r, "attention.head_count", true, 1, 1 << 12, &p->n_head);
	p->n_head_kv = p->n_head;
	read_int(r, "attention.head_count_kv", false, 1, 1 << 12, &p->n_head_kv);
	read_int(r, "context_length", true, 1, 1 << 28, &p->n_ctx_train);
	read_float(r, "attention.layer_norm_rms_epsilon", true, 0.0, 0.1, &p->rms_eps);
	if (r->status != STATUS_OK)
		return;
	if (p->n_head % p->n_head_kv != 0)
		FAIL(r, STATUS_INVALID, "%" PRId32 " attention heads cannot be shared evenly by %" PRId32 " KV heads",
		     p->n_head, p->n_head_kv);
	if (!read_int(r, "attention.key_length", false, 1, 1 << 12, &p->head_dim)) {
		p->head_dim = p->n_embd / p->n_head;
		if (p->head_dim == 0 || p->n_embd % p->n_head != 0)
			FAIL(r, STATUS_INVALID,
			     "an embedding width of %" PRId32 " cannot be split into %" PRId32
			     " heads, and there is no '%s.attention.key_length'",
			     p->n_embd, p->n_head, r->arch);
	}
	value_dim = p->head_dim;
	read_int(r, "attention.value_length", false, 1, 1 << 12, &value_dim);
	if (value_dim != p->head_dim)
		FAIL(r, STATUS_UNSUPPORTED,
		     "keys of %" PRId32 " and values of %" PRId32
		     " dimensions are not supported: attention.key_length and attention.value_length must be equal",
		     p->head_dim, value_dim);
	if ((int64_t)p->n_head * p->head_dim > 1 << 22)
		FAIL(r, STATUS_INVALID, "%" PRId32 " heads of %" PRId32 " dimensions are more than %d together",
		     p->n_head, p->head_dim, 1 << 22);
}

static void read_attention(struct reader *r, const struct arch *a, struct model_params *p)
{
	float scale = 0;
	p->attn_scale = 1 / sqrtf((float)p->head_dim);
	if (p->n_layer == a->embd_scaled_layers)
		p->attn_scale = 1 / sqrtf((float)p->n_embd / (float)p->n_head);
	if (read_float(r, "attention.scale", false, 0, 1e3, &scale) && scale > 0)
		p->attn_scale = scale;
	read_float(r, "attn_logit_softcapping", false, 0, 1e6, &p->attn_softcap);
	read_float(r, "final_logit_softcapping", false, 0, 1e6, &p->final_softcap);

	p->window = a->window;
	p->window_period = a->window_period;
	read_int(r, "attention.sliding_window", false, 0, INT32_MAX, &p->window);
	read_int(r, "attention.sliding_window_pattern", false, 1, 1 << 12, &p->window_period);
	if (p->window > 0 && p->window_period == 0) {
		if (p->window < p->n_ctx_train) {
			log_msg(LOG_WARN, "model",
			        "the context is limited to the model's attention window: %d instead of %d tokens",
			        p->window, p->n_ctx_train);
			p->n_ctx_train = p->ctx_bound = p->window;
		}
		p->window = 0;
	}
}

int32_t model_layer_window(const struct model_params *p, int32_t layer)
{
	bool local = p->window_period == 1 || (p->window_period > 1 && (layer + 1) % p->window_period != 0);
	return local ? p->window : 0;
}

int32_t model_n_windowed(const struct model_params *p)
{
	int32_t n = 0;
	for (int32_t i = 0; i < p->n_layer; i++)
		n += model_layer_window(p, i) > 0;
	return n;
}

int32_t model_horizon(const struct model_params *p)
{
	return model_n_windowed(p) == p->n_layer ? p->window : 0;
}

bool rope_scaling_find(struct str name, enum rope_scaling *out)
{
	for (size_t i = 0; i < sizeof rope_types / sizeof rope_types[0]; i++) {
		if (str_is(name, rope_types[i].name)) {
			*out = rope_types[i].scaling;
			return true;
		}
	}
	return false;
}

const char *rope_scaling_name(enum rope_scaling scaling)
{
	size_t i = 0;
	while (rope_types[i].scaling != scaling)
		i++;
	return rope_types[i].name;
}

static void read_rope_type(struct reader *r, struct model_params *p)
{
	struct str name;
	p->rope_scaling = ROPE_SCALING_NONE;
	if (r->status != STATUS_OK)
		return;
	if (!gguf_find(r->g, key(r, "rope.scaling.type"))) {
		/* Files from before the type was written: a factor alone meant linear scaling. */
		if (gguf_find(r->g, key(r, "rope.scaling.factor")) || gguf_find(r->g, key(r, "rope.scale_linear")))
			p->rope_scaling = ROPE_SCALING_LINEAR;
		return;
	}
	r->status = gguf_get_str(r->g, key(r, "rope.scaling.type"), &name, r->err);
	if (r->status != STATUS_OK)
		return;
	if (rope_scaling_find(name, &p->rope_scaling))
		return;
	if (name.n > 64)
		name.n = 64;
	FAIL(r, STATUS_UNSUPPORTED,
	     "RoPE scaling type '%.*s' is not supported; supported are none, linear, llama3 and yarn", STR_ARG(name));
}

static void read_rope(struct reader *r, const struct arch *a, struct model_params *p)
{
	float attn_factor = 1.0f;
	p->rope_dims = p->head_dim;
	read_int(r, "rope.dimension_count", false, 1, 1 << 12, &p->rope_dims);
	if (p->rope_dims > p->head_dim || p->rope_dims % 2 != 0)
		FAIL(r, STATUS_INVALID,
		     "%" PRId32 " rotated dimensions: must be even and at most the %" PRId32 " of a head", p->rope_dims,
		     p->head_dim);
	p->rope_base = 10000.0f;
	read_float(r, "rope.freq_base", false, 1.5, 1e12, &p->rope_base);
	p->rope_base_local = a->local_base;
	read_float(r, "rope.freq_base_swa", false, 1.5, 1e12, &p->rope_base_local);

	read_rope_type(r, p);
	p->rope_factor = 1.0f;
	p->rope_attn_factor = 1.0f;
	p->rope_original_ctx = p->n_ctx = p->n_ctx_train;
	p->rope_table = gguf_find_tensor(r->g, "rope_freqs.weight") != NULL;
	if (read_float(r, "rope.scaling.attn_factor", false, 1e-3, 1e3, &attn_factor))
		p->rope_attn_factor *= attn_factor;
	if (read_float(r, "rope.scaling.yarn_attn_factor", false, 1e-3, 1e3, &attn_factor))
		p->rope_attn_factor *= attn_factor;
	if (p->rope_scaling == ROPE_SCALING_NONE)
		return;

	/* Llama 3 files carry the divisors as a tensor instead, and then need no factor. */
	bool factor_needed = p->rope_scaling != ROPE_SCALING_LLAMA3 || !p->rope_table;
	if (!read_float(r, "rope.scaling.factor", false, 1e-3, 1e6, &p->rope_factor) &&
	    !read_float(r, "rope.scale_linear", false, 1e-3, 1e6, &p->rope_factor) && factor_needed)
		FAIL(r, STATUS_NOT_FOUND, "metadata key '%s' is missing, which this RoPE scaling needs",
		     key(r, "rope.scaling.factor"));
	read_int(r, "rope.scaling.original_context_length", false, 1, 1 << 28, &p->rope_original_ctx);

	p->rope_low_freq_factor = 1.0f;
	p->rope_high_freq_factor = 4.0f;
	read_float(r, "rope.scaling.low_freq_factor", false, 1e-3, 1e3, &p->rope_low_freq_factor);
	read_float(r, "rope.scaling.high_freq_factor", false, 1e-3, 1e3, &p->rope_high_freq_factor);
	if (p->rope_low_freq_factor >= p->rope_high_freq_factor)
		FAIL(r, STATUS_INVALID, "rope.scaling.low_freq_factor (%g) must be below high_freq_factor (%g)",
		     (double)p->rope_low_freq_factor, (double)p->rope_high_freq_factor);

	p->yarn_beta_fast = 32.0f;
	p->yarn_beta_slow = 1.0f;
	p->yarn_ext_factor = 1.0f;
	read_float(r, "rope.scaling.yarn_beta_fast", false, 1e-3, 1e6, &p->yarn_beta_fast);
	read_float(r, "rope.scaling.yarn_beta_slow", false, 1e-3, 1e6, &p->yarn_beta_slow);
	if (read_float(r, "rope.scaling.yarn_ext_factor", false, -1.0, 1.0, &p->yarn_ext_factor) &&
	    p->yarn_ext_factor < 0.0f)
		p->yarn_ext_factor = 1.0f; /* negative stands for "not set" */
}

static void check_vocabulary(struct reader *r, struct model_params *p)
{
	const struct gguf_tensor *t = gguf_find_tensor(r->g, "token_embd.weight");
	if (!t) {
		FAIL(r, STATUS_NOT_FOUND, "tensor 'token_embd.weight' is missing");
		return;
	}
	if (t->n_dims != 2 || t->dim[0] != (uint64_t)p->n_embd || t->dim[1] < 1 || t->dim[1] > 1 << 24) {
		FAIL(r, STATUS_CORRUPT,
		     "tensor 'token_embd.weight' is %" PRIu64 " x %" PRIu64 " where %" PRId32
		     " x the vocabulary is expected",
		     t->dim[0], t->dim[1], p->n_embd);
		return;
	}
	p->n_vocab = (int32_t)t->dim[1];
	p->tied_output = !gguf_find_tensor(r->g, "output.weight");
	const struct gguf_value *tokens = gguf_find(r->g, "tokenizer.ggml.tokens");
	if (tokens && tokens->type == GGUF_ARRAY && tokens->count != t->dim[1])
		FAIL(r, STATUS_CORRUPT,
		     "the tokenizer has %" PRIu64 " tokens, but tensor 'token_embd.weight' has rows for %" PRIu64,
		     tokens->count, t->dim[1]);
}

/* ---- What is not computed ---- */

/* A number or bool as a number; false when the key has another type. */
static bool as_number(const struct gguf *g, const char *k, double *out)
{
	bool b;
	if (gguf_get_float(g, k, out, NULL) == STATUS_OK)
		return true;
	if (gguf_get_bool(g, k, &b, NULL) != STATUS_OK)
		return false;
	*out = b;
	return true;
}

static void refuse_unsupported(struct reader *r)
{
	double v;
	for (size_t i = 0; i < sizeof unsupported / sizeof unsupported[0]; i++) {
		const char *k = key(r, unsupported[i].suffix);
		if (!gguf_find(r->g, k))
			continue;
		if (!as_number(r->g, k, &v))
			FAIL(r, STATUS_UNSUPPORTED, "%s (metadata key '%s') is not supported", unsupported[i].what, k);
		else if (v != unsupported[i].neutral)
			FAIL(r, STATUS_UNSUPPORTED, "%s ('%s' = %g) is not supported", unsupported[i].what, k, v);
	}
	const char *k = key(r, "attention.causal");
	if (gguf_find(r->g, k) && (!as_number(r->g, k, &v) || v != 1.0))
		FAIL(r, STATUS_UNSUPPORTED, "attention that is not causal ('%s') is not supported", k);
}

static bool is_known(struct str suffix)
{
	for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
		if (str_is(suffix, known[i]))
			return true;
	}
	for (size_t i = 0; i < sizeof unsupported / sizeof unsupported[0]; i++) {
		if (str_is(suffix, unsupported[i].suffix))
			return true;
	}
	return false;
}

static void warn_of_unknown_keys(const struct reader *r)
{
	size_t prefix = strlen(r->arch) + 1;
	for (size_t i = 0; i < gguf_n_values(r->g); i++) {
		struct str k = gguf_value_at(r->g, i)->key;
		if (k.n <= prefix || !str_starts(k, r->arch) || k.p[prefix - 1] != '.')
			continue;
		if (!is_known((struct str){k.p + prefix, k.n - prefix}))
			log_msg(LOG_WARN, "model", "metadata key '%.*s' is not known and has no effect", STR_ARG(k));
	}
}

enum status arch_read_params(const struct gguf *g, struct model_params *out, struct error *err)
{
	enum status st;
	const struct arch *a = find_arch(g, err, &st);
	if (!a)
		return st;
	struct reader r = {.g = g, .arch = a->name, .status = STATUS_OK, .err = err};
	struct model_params p = {
		.arch = a->name,
		.rope_pairing = a->pairing,
		.qkv_bias = a->qkv_bias,
		.qk_norm = a->qk_norm,
		.post_norm = a->post_norm,
		.glu = a->glu,
		.embd_scale = 1,
	};
	read_shape(&r, &p);
	if (r.status == STATUS_OK)
		read_attention(&r, a, &p);
	if (r.status == STATUS_OK)
		read_rope(&r, a, &p);
	if (a->scaled_embedding)
		p.embd_scale = sqrtf((float)p.n_embd);
	if (r.status == STATUS_OK)
		refuse_unsupported(&r);
	if (r.status == STATUS_OK)
		check_vocabulary(&r, &p);
	if (r.status != STATUS_OK)
		return r.status;
	warn_of_unknown_keys(&r);
	*out = p;
	return STATUS_OK;
}
