#include "engine/model/rope_choice.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "engine/base/log.h"

#define PARAM "rope-scaling"
#define FORM  "TYPE:FACTOR[,KEY=NUMBER...], as in yarn:4, yarn:4,original=32768 or dca:4"

enum { CTX_MAX = 1 << 28, NUMBER_MAX = 32 };

/* Which methods know a key: bits by their scaling, and one of chunks. */
enum {
	OF_CHUNKS = 1 << 8,
	OF_ALL = 1 << ROPE_SCALING_NONE | 1 << ROPE_SCALING_LINEAR | 1 << ROPE_SCALING_LLAMA3 | 1 << ROPE_SCALING_YARN |
		 OF_CHUNKS
};

static const struct key {
	const char *name;
	bool tokens; /* an int32_t, else a float */
	size_t offset;
	double min, max;
	int of;
} keys[] = {
	{"original", true, offsetof(struct rope_choice, original_ctx), 1, CTX_MAX, OF_ALL},
	{"chunk", true, offsetof(struct rope_choice, chunk), 1, CTX_MAX, OF_CHUNKS},
	{"base", false, offsetof(struct rope_choice, base), 1.5, 1e12, OF_ALL},
	{"attn-factor", false, offsetof(struct rope_choice, attn_factor), 1e-3, 1e3, 1 << ROPE_SCALING_YARN},
	{"beta-fast", false, offsetof(struct rope_choice, beta_fast), 1e-3, 1e6, 1 << ROPE_SCALING_YARN},
	{"beta-slow", false, offsetof(struct rope_choice, beta_slow), 1e-3, 1e6, 1 << ROPE_SCALING_YARN},
	{"low-freq-factor", false, offsetof(struct rope_choice, low_freq_factor), 1e-3, 1e3, 1 << ROPE_SCALING_LLAMA3},
	{"high-freq-factor", false, offsetof(struct rope_choice, high_freq_factor), 1e-3, 1e3,
	 1 << ROPE_SCALING_LLAMA3},
};
enum { N_KEYS = sizeof keys / sizeof *keys };

static enum status refuse(struct error *err, struct str part, const char *why)
{
	part.n = part.n < 64 ? part.n : 64;
	return error_set_param(err, STATUS_INVALID, PARAM, PARAM ": \"%.*s\" %s", STR_ARG(part), why);
}

/* All of `s`, which must be a plain decimal number. */
static bool read_number(struct str s, double *out)
{
	char text[NUMBER_MAX + 1], *end;
	if (s.n == 0 || s.n > NUMBER_MAX || !((s.p[0] >= '0' && s.p[0] <= '9') || s.p[0] == '.'))
		return false;
	memcpy(text, s.p, s.n);
	text[s.n] = '\0';
	*out = strtod(text, &end);
	return *end == '\0' && isfinite(*out) && !strpbrk(text, "xXpPnN");
}

static enum status read_type(struct str part, struct rope_choice *out, struct error *err)
{
	const char *colon = memchr(part.p, ':', part.n);
	struct str name = {part.p, colon ? (size_t)(colon - part.p) : part.n};
	double factor = 1;
	out->by_chunks = str_is(name, "dca");
	if (!out->by_chunks && !rope_scaling_find(name, &out->scaling))
		return refuse(
			err, name,
			"is no way to stretch positions; there are none, linear, yarn, llama3 and dca, written " FORM);
	out->has_scaling = !out->by_chunks;
	bool none = out->has_scaling && out->scaling == ROPE_SCALING_NONE;
	if (none)
		out->factor = 1;
	if (!colon && !none)
		return refuse(err, part, "needs a factor: " FORM);
	if (!colon)
		return STATUS_OK;
	if (none)
		return refuse(err, part, "has a factor, and nothing to stretch by it");
	if (!read_number((struct str){colon + 1, part.n - name.n - 1}, &factor) || factor < 1 || factor > 1e4)
		return refuse(err, part, "needs a factor from 1 to 10000 behind the colon");
	out->factor = (float)factor;
	return STATUS_OK;
}

static enum status read_key(struct str part, bool seen[N_KEYS], struct rope_choice *out, struct error *err)
{
	const char *equals = memchr(part.p, '=', part.n);
	struct str name = {part.p, equals ? (size_t)(equals - part.p) : part.n};
	double v;
	size_t i = 0;
	while (i < N_KEYS && !str_is(name, keys[i].name))
		i++;
	if (i == N_KEYS || !equals)
		return refuse(err, part,
			      "is not understood; the keys are original, chunk, base, attn-factor, beta-fast, "
			      "beta-slow, low-freq-factor "
			      "and high-freq-factor, each with =NUMBER");
	if (seen[i])
		return refuse(err, name, "is given twice");
	seen[i] = true;
	if (!read_number((struct str){equals + 1, part.n - name.n - 1}, &v) || v < keys[i].min || v > keys[i].max)
		return error_set_param(err, STATUS_INVALID, PARAM, PARAM ": %s must be a number from %g to %g",
		                       keys[i].name, keys[i].min, keys[i].max);
	if ((out->has_scaling || out->by_chunks) && !(keys[i].of & (out->by_chunks ? OF_CHUNKS : 1 << out->scaling)))
		return error_set_param(err, STATUS_INVALID, PARAM, PARAM ": %s means nothing to %s", keys[i].name,
				       out->by_chunks ? "dca" : rope_scaling_name(out->scaling));
	if (keys[i].tokens && v != floor(v))
		return refuse(err, part, "is no number of tokens");
	if (keys[i].tokens)
		*(int32_t *)(void *)((char *)out + keys[i].offset) = (int32_t)v;
	else
		*(float *)(void *)((char *)out + keys[i].offset) = (float)v;
	return STATUS_OK;
}

enum status rope_choice_parse(const char *text, struct rope_choice *out, struct error *err)
{
	struct rope_choice c = {.factor = 1};
	bool seen[N_KEYS] = {false};
	const char *p = text ? text : "";
	for (bool first = true; *p; first = false) {
		size_t n = strcspn(p, ",");
		struct str part = {p, n};
		enum status st = first && !memchr(p, '=', n) ? read_type(part, &c, err) : read_key(part, seen, &c, err);
		if (st != STATUS_OK)
			return st;
		if (p[n] == ',' && !p[n + 1])
			return refuse(err, str_from(text), "ends in a comma");
		p += n + (p[n] == ',');
	}
	*out = c;
	return STATUS_OK;
}

static void set(float *field, float chosen, float otherwise)
{
	*field = chosen > 0 ? chosen : otherwise;
}

/* The context before the file's own stretching; 0: it does not say. */
static int32_t unstretched(const struct model_params *p)
{
	if (p->rope_original_ctx != p->n_ctx_train)
		return p->rope_original_ctx;
	if (p->rope_factor > 1)
		return (int32_t)((double)p->n_ctx_train / (double)p->rope_factor);
	return p->rope_table ? 0 : p->n_ctx_train;
}

static enum status apply_scaling(const struct rope_choice *c, struct model_params *p, struct error *err)
{
	int32_t original = c->original_ctx ? c->original_ctx : unstretched(p);
	double reach = (double)original * (double)c->factor;
	if (original == 0)
		return error_set_param(err, STATUS_INVALID, PARAM,
		                       PARAM ": the file stretches its %" PRId32
		                             " tokens by a table (rope_freqs.weight) that does not say from how "
		                             "many: add original=N",
		                       p->n_ctx_train);
	/* Llama 3.1 was trained further than its factor reaches; it goes as much further as the factor grows. */
	if (!c->original_ctx && p->rope_factor > 1 && c->scaling != ROPE_SCALING_NONE)
		reach = (double)p->n_ctx_train * (double)c->factor / (double)p->rope_factor;
	if (reach > CTX_MAX)
		return error_set_param(err, STATUS_INVALID, PARAM,
		                       PARAM ": %g times %" PRId32 " tokens are more than %d", (double)c->factor,
		                       original, CTX_MAX);
	p->n_ctx = reach < 1 ? 1 : (int32_t)reach;
	p->rope_scaling = c->scaling;
	p->rope_factor = c->factor;
	p->rope_original_ctx = original;
	p->rope_table = false;
	/* Without any scaling, all is as in a file that has none, so that its KV is the same too. */
	float used = c->scaling == ROPE_SCALING_NONE ? 0 : 1;
	p->yarn_ext_factor = used;
	set(&p->rope_attn_factor, c->attn_factor, 1);
	set(&p->yarn_beta_fast, c->beta_fast, 32 * used);
	set(&p->yarn_beta_slow, c->beta_slow, used);
	set(&p->rope_low_freq_factor, c->low_freq_factor, used);
	set(&p->rope_high_freq_factor, c->high_freq_factor, 4 * used);
	return STATUS_OK;
}

/* Angles stay as the file has them. */
static enum status apply_chunks(const struct rope_choice *c, struct model_params *p, struct error *err)
{
	int32_t reach = c->original_ctx ? c->original_ctx : p->n_ctx_train;
	int32_t size = c->chunk ? c->chunk : (int32_t)((int64_t)reach * 3 / 4 / ROPE_CHUNK_STEP * ROPE_CHUNK_STEP);
	if (size < ROPE_CHUNK_STEP || size % ROPE_CHUNK_STEP != 0 || size >= reach)
		return error_set_param(err, STATUS_INVALID, PARAM,
				       PARAM ": chunks of %" PRId32
					     " tokens; chunk must be a multiple of %d below the %" PRId32
					     " tokens that distances may have",
				       size, ROPE_CHUNK_STEP, reach);
	if ((double)reach * (double)c->factor > CTX_MAX)
		return error_set_param(err, STATUS_INVALID, PARAM,
				       PARAM ": %g times %" PRId32 " tokens are more than %d", (double)c->factor, reach,
				       CTX_MAX);
	p->n_ctx = (int32_t)((double)reach * (double)c->factor);
	p->rope_chunks = (struct rope_chunks){size, reach};
	return STATUS_OK;
}

/* Keys without a type belong to the file's method. */
static enum status apply_keys(const struct rope_choice *c, struct model_params *p, struct error *err)
{
	const struct {
		float chosen, *field;
		int of;
		const char *name;
	} rows[] = {
		{c->attn_factor, &p->rope_attn_factor, 1 << ROPE_SCALING_YARN, "attn-factor"},
		{c->beta_fast, &p->yarn_beta_fast, 1 << ROPE_SCALING_YARN, "beta-fast"},
		{c->beta_slow, &p->yarn_beta_slow, 1 << ROPE_SCALING_YARN, "beta-slow"},
		{c->low_freq_factor, &p->rope_low_freq_factor, 1 << ROPE_SCALING_LLAMA3, "low-freq-factor"},
		{c->high_freq_factor, &p->rope_high_freq_factor, 1 << ROPE_SCALING_LLAMA3, "high-freq-factor"},
		{(float)c->chunk, NULL, OF_CHUNKS, "chunk"},
		{(float)c->original_ctx, NULL,
		 1 << ROPE_SCALING_YARN | 1 << ROPE_SCALING_LLAMA3 | 1 << ROPE_SCALING_LINEAR, "original"},
	};
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		if (rows[i].chosen <= 0)
			continue;
		if (!(rows[i].of & 1 << p->rope_scaling) || (p->rope_table && p->rope_scaling == ROPE_SCALING_LLAMA3))
			return error_set_param(err, STATUS_INVALID, PARAM,
			                       PARAM ": %s means nothing to the file's scaling, which is %s",
			                       rows[i].name,
			                       p->rope_table ? "a table" : rope_scaling_name(p->rope_scaling));
		if (rows[i].field)
			*rows[i].field = rows[i].chosen;
	}
	if (c->original_ctx) {
		double reach = (double)c->original_ctx * (double)p->rope_factor;
		p->rope_original_ctx = c->original_ctx;
		p->n_ctx = reach > CTX_MAX ? CTX_MAX : (int32_t)reach;
	}
	return STATUS_OK;
}

enum status rope_choice_apply(const struct rope_choice *c, struct model_params *p, struct error *err)
{
	enum status st = c->by_chunks	  ? apply_chunks(c, p, err)
			 : c->has_scaling ? apply_scaling(c, p, err)
					  : apply_keys(c, p, err);
	if (st != STATUS_OK)
		return st;
	if (p->rope_scaling == ROPE_SCALING_LLAMA3 && p->rope_low_freq_factor >= p->rope_high_freq_factor)
		return error_set_param(err, STATUS_INVALID, PARAM,
		                       PARAM ": low-freq-factor (%g) must be below high-freq-factor (%g)",
		                       (double)p->rope_low_freq_factor, (double)p->rope_high_freq_factor);
	if (c->base > 0)
		p->rope_base = c->base;
	if (p->ctx_bound && p->n_ctx > p->ctx_bound) {
		log_msg(LOG_WARN, "model",
		        "the context stays within the model's attention window of %" PRId32
		        " tokens, however far positions "
		        "are stretched",
		        p->ctx_bound);
		p->n_ctx = p->ctx_bound;
	}
	return STATUS_OK;
}
