/*
 * engine_inspect(): what a GGUF file holds, as text for people or as one JSON object for programs. It reads metadata
 * directly rather than through the architecture table, so that files the engine cannot run can be looked at as well.
 */
#include "engine/inspect.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"
#include "engine/tools.h"

enum {
	TEXT_STRING_BYTES = 72, /* of a string value in the text form */
	TEXT_ARRAY_ITEMS = 4,	/* of an array in the text form */
	JSON_ARRAY_ITEMS = 32,	/* a longer array is abbreviated in JSON */
	JSON_FIRST_ITEMS = 8,	/* ... to so many of its elements */
	MAX_FORMATS = 32,
	UNKNOWN = -1,
};

/* Whole numbers of an architecture, `{arch}.` + suffix in the metadata. */
enum fact { N_LAYER, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD_DIM, N_CTX_TRAIN, WINDOW, ROPE_DIMS, N_VOCAB, N_FACTS };

static const struct {
	const char *suffix, *json, *label;
} fact_names[N_FACTS] = {
	[N_LAYER] = {"block_count", "n_layer", "layers"},
	[N_EMBD] = {"embedding_length", "n_embd", "embedding width"},
	[N_FF] = {"feed_forward_length", "n_ff", "feed-forward width"},
	[N_HEAD] = {"attention.head_count", "n_head", "query heads"},
	[N_HEAD_KV] = {"attention.head_count_kv", "n_head_kv", "KV heads"},
	[HEAD_DIM] = {"attention.key_length", "head_dim", "head dimension"},
	[N_CTX_TRAIN] = {"context_length", "n_ctx_train", "trained context"},
	[WINDOW] = {"attention.sliding_window", "attention_window", "attention window"},
	[ROPE_DIMS] = {"rope.dimension_count", "rope_dims", "rotated dimensions"},
	[N_VOCAB] = {"vocab_size", "n_vocab", "vocabulary"},
};

struct format_total {
	const struct quant_format *format;
	uint64_t n_tensors, n_elems, n_bytes;
};

/* What the summary says; gathered once, written in two forms. */
struct facts {
	struct str name, arch;			/* empty: not in the file */
	int64_t value[N_FACTS];			/* UNKNOWN: not in the file, or different in each layer */
	int64_t kv_bytes_per_token;		/* of an f16 cache; UNKNOWN when a number it needs is */
	double rope_base, rope_factor, rms_eps; /* 0: not in the file */
	struct str rope_scaling;
	struct str tokenizer, pre;
	struct str *tokens; /* [n_tokens] malloc'd, or NULL */
	size_t n_tokens;
	const struct gguf_value *chat_template;
	uint64_t n_params, tensor_bytes;
	struct format_total total[MAX_FORMATS]; /* in the order of quant_format_at() */
};

/* ---- Gathering ---- */

/* `{arch}.suffix` in key[]; false when it does not fit, which no real key does. */
static bool arch_key(const struct facts *f, const char *suffix, char key[160])
{
	int n = snprintf(key, 160, "%.*s.%s", f->arch.n > 100 ? 100 : (int)f->arch.n, f->arch.p, suffix);
	return f->arch.n > 0 && f->arch.n <= 100 && n < 160;
}

static int64_t arch_uint(const struct gguf *g, const struct facts *f, const char *suffix)
{
	char key[160];
	uint64_t x;
	if (!arch_key(f, suffix, key) || gguf_get_uint(g, key, &x, NULL) != STATUS_OK || x > INT64_MAX)
		return UNKNOWN;
	return (int64_t)x;
}

static double arch_float(const struct gguf *g, const struct facts *f, const char *suffix)
{
	char key[160];
	double x = 0;
	if (arch_key(f, suffix, key))
		gguf_get_float(g, key, &x, NULL);
	return x;
}

/* KV heads of all layers together; some architectures give an array with one number for each layer. */
static int64_t kv_heads_of_all_layers(const struct gguf *g, const struct facts *f)
{
	char key[160];
	int32_t *heads;
	size_t n;
	int64_t sum = 0;
	if (arch_key(f, fact_names[N_HEAD_KV].suffix, key) && gguf_get_ints(g, key, &heads, &n, NULL) == STATUS_OK) {
		for (size_t i = 0; i < n; i++)
			sum += heads[i] > 0 ? heads[i] : 0;
		free(heads);
		return sum;
	}
	if (f->value[N_LAYER] < 0 || f->value[N_HEAD_KV] < 0 ||
	    __builtin_mul_overflow(f->value[N_LAYER], f->value[N_HEAD_KV], &sum))
		return UNKNOWN;
	return sum;
}

/* Bytes of K and V for one position of all layers in half precision. */
static int64_t kv_bytes_per_token(const struct gguf *g, const struct facts *f)
{
	int64_t heads = kv_heads_of_all_layers(g, f);
	int64_t key = f->value[HEAD_DIM], value = arch_uint(g, f, "attention.value_length");
	int64_t both, bytes;
	if (value < 0)
		value = key;
	if (heads < 0 || key < 0 || __builtin_add_overflow(key, value, &both) ||
	    __builtin_mul_overflow(heads, both, &bytes) || __builtin_mul_overflow(bytes, (int64_t)2, &bytes))
		return UNKNOWN;
	return bytes;
}

static enum status gather_tokens(const struct gguf *g, struct facts *f)
{
	enum status st = gguf_get_strs(g, "tokenizer.ggml.tokens", &f->tokens, &f->n_tokens, NULL);
	if (st == STATUS_NOMEM)
		return st;
	if (st != STATUS_OK) /* absent, or of a type that the listing shows */
		f->tokens = NULL;
	return STATUS_OK;
}

static void gather_tensors(const struct gguf *g, struct facts *f)
{
	for (size_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);
		/*
		 * Tensors lie side by side in the file, so that bytes cannot wrap; elements are at most four times as
		 * many.
		 */
		f->n_params += t->n_elems;
		f->tensor_bytes += t->n_bytes;
		for (size_t k = 0; k < MAX_FORMATS && quant_format_at(k); k++) {
			struct format_total *total = &f->total[k];
			if (quant_format_at(k) != t->format)
				continue;
			total->format = t->format;
			total->n_tensors++;
			total->n_elems += t->n_elems;
			total->n_bytes += t->n_bytes;
		}
	}
}

static enum status gather(const struct gguf *g, struct facts *f)
{
	memset(f, 0, sizeof *f);
	gguf_get_str(g, "general.name", &f->name, NULL);
	gguf_get_str(g, "general.architecture", &f->arch, NULL);
	for (int i = 0; i < N_FACTS; i++)
		f->value[i] = arch_uint(g, f, fact_names[i].suffix);
	enum status st = gather_tokens(g, f);
	if (st != STATUS_OK)
		return st;

	int64_t *v = f->value;
	const struct gguf_tensor *embd = gguf_find_tensor(g, "token_embd.weight");
	if (f->tokens)
		v[N_VOCAB] = (int64_t)f->n_tokens;
	else if (v[N_VOCAB] < 0 && embd)
		v[N_VOCAB] = (int64_t)embd->dim[1];
	char key[160];
	if (v[N_HEAD_KV] < 0 && !(arch_key(f, fact_names[N_HEAD_KV].suffix, key) && gguf_find(g, key)))
		v[N_HEAD_KV] = v[N_HEAD]; /* absent: no grouping */
	if (v[HEAD_DIM] < 0 && v[N_EMBD] >= 0 && v[N_HEAD] > 0)
		v[HEAD_DIM] = v[N_EMBD] / v[N_HEAD];
	f->kv_bytes_per_token = kv_bytes_per_token(g, f);

	f->rope_base = arch_float(g, f, "rope.freq_base");
	f->rope_factor = arch_float(g, f, "rope.scaling.factor");
	f->rms_eps = arch_float(g, f, "attention.layer_norm_rms_epsilon");
	if (arch_key(f, "rope.scaling.type", key))
		gguf_get_str(g, key, &f->rope_scaling, NULL);
	gguf_get_str(g, "tokenizer.ggml.model", &f->tokenizer, NULL);
	gguf_get_str(g, "tokenizer.ggml.pre", &f->pre, NULL);
	f->chat_template = gguf_find(g, "tokenizer.chat_template");
	if (f->chat_template && f->chat_template->type != GGUF_STRING)
		f->chat_template = NULL;
	gather_tensors(g, f);
	return STATUS_OK;
}

/* The i-th metadata entry as a special token: true when it is `tokenizer.ggml.NAME_token_id`. */
static bool special_token(const struct gguf *g, size_t i, struct str *name, uint64_t *id)
{
	const char *prefix = "tokenizer.ggml.", *suffix = "_token_id";
	const struct gguf_value *v = gguf_value_at(g, i);
	size_t p = strlen(prefix), s = strlen(suffix);
	if (!str_starts(v->key, prefix) || v->key.n <= p + s || memcmp(v->key.p + v->key.n - s, suffix, s) != 0)
		return false;
	char key[160];
	if (v->key.n >= sizeof key)
		return false;
	memcpy(key, v->key.p, v->key.n);
	key[v->key.n] = '\0';
	*name = (struct str){v->key.p + p, v->key.n - p - s};
	return gguf_get_uint(g, key, id, NULL) == STATUS_OK;
}

/* ---- Values ---- */

static uint64_t load_u64(const uint8_t *p)
{
	uint64_t n;
	memcpy(&n, p, sizeof n);
	return n;
}

/* The shortest decimal that reads back as the same float: 1e-05, where the double would be 9.99999974738e-06. */
static void put_f32(struct buf *out, float x)
{
	char text[40];
	if (!(x - x == 0)) { /* NaN or infinite */
		buf_puts(out, "null");
		return;
	}
	for (int digits = 6; digits <= 9; digits++) {
		snprintf(text, sizeof text, "%.*g", digits, (double)x);
		if (strtof(text, NULL) == x)
			break;
	}
	buf_puts(out, text);
}

/* A string in JSON quotes, cut to `limit` bytes at a code point. */
static void put_string(struct buf *out, struct str s, size_t limit)
{
	size_t n = s.n;
	if (n > limit) {
		n = limit;
		n -= utf8_incomplete_tail(s.p, n);
	}
	buf_json_string(out, s.p, n);
	if (n < s.n)
		buf_puts(out, "...");
}

/* One value as JSON writes it; *p moves past it. */
static void put_element(struct buf *out, enum gguf_type type, const uint8_t **p, size_t string_limit)
{
	union {
		int8_t i8;
		int16_t i16;
		int32_t i32;
		int64_t i64;
		uint64_t u64;
		float f32;
		double f64;
	} x = {0};
	if (type == GGUF_STRING) {
		uint64_t n = load_u64(*p);
		put_string(out, (struct str){(const char *)*p + 8, n}, string_limit);
		*p += 8 + n;
		return;
	}
	memcpy(&x, *p, gguf_type_bytes(type));
	*p += gguf_type_bytes(type);
	switch (type) {
	case GGUF_U8:
	case GGUF_U16:
	case GGUF_U32:
	case GGUF_U64:
		buf_printf(out, "%" PRIu64, x.u64); /* zero-extended by the initialiser */
		break;
	case GGUF_I8:
		buf_printf(out, "%d", x.i8);
		break;
	case GGUF_I16:
		buf_printf(out, "%d", x.i16);
		break;
	case GGUF_I32:
		buf_printf(out, "%d", x.i32);
		break;
	case GGUF_I64:
		buf_printf(out, "%" PRId64, x.i64);
		break;
	case GGUF_F32:
		put_f32(out, x.f32);
		break;
	case GGUF_F64:
		buf_json_number(out, x.f64);
		break;
	case GGUF_BOOL:
		buf_puts(out, x.u64 ? "true" : "false");
		break;
	case GGUF_STRING:
	case GGUF_ARRAY:
		break;
	}
}

/* The first n elements of an array, comma-separated. */
static void put_elements(struct buf *out, const struct gguf_value *v, uint64_t n, size_t string_limit)
{
	const uint8_t *p = v->data;
	for (uint64_t i = 0; i < n; i++) {
		if (i > 0)
			buf_puts(out, ", ");
		put_element(out, v->elem_type, &p, string_limit);
	}
}

/* ---- Text ---- */

/* 1234567 as "1,234,567". */
static void put_grouped(struct buf *out, uint64_t x)
{
	char digits[24];
	int n = snprintf(digits, sizeof digits, "%" PRIu64, x);
	for (int i = 0; i < n; i++) {
		if (i > 0 && (n - i) % 3 == 0)
			buf_putc(out, ',');
		buf_putc(out, digits[i]);
	}
}

static void put_size(struct buf *out, uint64_t bytes)
{
	static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
	put_grouped(out, bytes);
	buf_puts(out, " bytes");
	if (bytes < 1024)
		return;
	double x = (double)bytes / 1024;
	size_t unit = 0;
	for (; x >= 1024 && unit + 1 < sizeof units / sizeof units[0]; unit++)
		x /= 1024;
	buf_printf(out, " (%.1f %s)", x, units[unit]);
}

static void label(struct buf *out, const char *name)
{
	buf_printf(out, "  %-22s ", name);
}

static void text_string(struct buf *out, const char *name, struct str s)
{
	if (s.n == 0)
		return;
	label(out, name);
	put_string(out, s, TEXT_STRING_BYTES);
	buf_putc(out, '\n');
}

static void text_float(struct buf *out, const char *name, double x)
{
	if (x == 0)
		return;
	label(out, name);
	put_f32(out, (float)x);
	buf_putc(out, '\n');
}

static void text_model(struct buf *out, const struct facts *f)
{
	buf_puts(out, "\nModel\n");
	text_string(out, "name", f->name);
	text_string(out, "architecture", f->arch);
	for (int i = 0; i < N_FACTS; i++) {
		if (f->value[i] == UNKNOWN)
			continue;
		label(out, fact_names[i].label);
		put_grouped(out, (uint64_t)f->value[i]);
		buf_putc(out, '\n');
	}
	text_float(out, "RMS norm epsilon", f->rms_eps);
	text_float(out, "RoPE base", f->rope_base);
	text_string(out, "RoPE scaling", f->rope_scaling);
	text_float(out, "RoPE scaling factor", f->rope_factor);
	label(out, "parameters");
	put_grouped(out, f->n_params);
	buf_putc(out, '\n');
	label(out, "KV cache per token");
	if (f->kv_bytes_per_token == UNKNOWN) {
		buf_puts(out, "unknown");
	} else {
		put_size(out, (uint64_t)f->kv_bytes_per_token);
		buf_puts(out, " in f16");
	}
	buf_putc(out, '\n');
}

static void text_tokenizer(struct buf *out, const struct gguf *g, const struct facts *f)
{
	buf_puts(out, "\nTokenizer\n");
	if (f->tokenizer.n == 0 && !f->tokens)
		buf_puts(out, "  none\n");
	text_string(out, "model", f->tokenizer);
	text_string(out, "pre-tokenizer", f->pre);
	if (f->tokens) {
		label(out, "tokens");
		put_grouped(out, f->n_tokens);
		buf_putc(out, '\n');
	}
	for (size_t i = 0; i < gguf_n_values(g); i++) {
		struct str name;
		uint64_t id;
		if (!special_token(g, i, &name, &id))
			continue;
		buf_printf(out, "  %-22.*s %" PRIu64, STR_ARG(name), id);
		if (id < f->n_tokens) {
			buf_putc(out, ' ');
			put_string(out, f->tokens[id], TEXT_STRING_BYTES);
		} else if (f->tokens) {
			buf_puts(out, " (outside the vocabulary)");
		}
		buf_putc(out, '\n');
	}
	label(out, "chat template");
	if (f->chat_template) {
		put_grouped(out, load_u64(f->chat_template->data));
		buf_puts(out, " bytes\n");
	} else {
		buf_puts(out, "none\n");
	}
}

/* Wide enough for the longest of up to 48 bytes; a longer one pushes its own line only. */
static int column(int width, struct str s)
{
	return s.n <= 48 && (int)s.n > width ? (int)s.n : width;
}

static void text_metadata(struct buf *out, const struct gguf *g)
{
	int width = 0;
	for (size_t i = 0; i < gguf_n_values(g); i++)
		width = column(width, gguf_value_at(g, i)->key);
	buf_printf(out, "\nMetadata: %zu entries\n", gguf_n_values(g));
	for (size_t i = 0; i < gguf_n_values(g); i++) {
		const struct gguf_value *v = gguf_value_at(g, i);
		buf_printf(out, "  %-*.*s  %-6s  ", width, STR_ARG(v->key), gguf_type_name(v->elem_type));
		if (v->type != GGUF_ARRAY) {
			put_elements(out, v, 1, TEXT_STRING_BYTES);
		} else {
			uint64_t n = v->count < TEXT_ARRAY_ITEMS ? v->count : TEXT_ARRAY_ITEMS;
			buf_putc(out, '[');
			put_grouped(out, v->count);
			buf_puts(out, n > 0 ? "] " : "]");
			put_elements(out, v, n, TEXT_STRING_BYTES / TEXT_ARRAY_ITEMS);
			if (n < v->count)
				buf_puts(out, ", ...");
		}
		buf_putc(out, '\n');
	}
}

static void text_tensors(struct buf *out, const struct gguf *g, const struct facts *f)
{
	int width = 0;
	for (size_t i = 0; i < gguf_n_tensors(g); i++)
		width = column(width, gguf_tensor_at(g, i)->name);
	buf_printf(out, "\nTensors: %zu", gguf_n_tensors(g));
	if (gguf_n_tensors(g) == 0) {
		buf_puts(out, " (a vocabulary only)\n");
		return;
	}
	buf_puts(out, ", ");
	put_size(out, f->tensor_bytes);
	buf_printf(out, "\n  %-*s  %-5s  %-20s  %14s  %14s\n", width, "name", "type", "shape", "bytes", "offset");
	for (size_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);
		char shape[100];
		int n = 0;
		for (uint32_t k = 0; k < t->n_dims; k++) {
			n += snprintf(shape + n, sizeof shape - (size_t)n, "%s%" PRIu64, k ? " x " : "", t->dim[k]);
		}
		buf_printf(out, "  %-*.*s  %-5s  %-20s  %14" PRIu64 "  %14" PRIu64 "\n", width, STR_ARG(t->name),
			   t->format->name, shape, t->n_bytes, t->offset);
	}
	buf_puts(out, "\nTensor types\n");
	for (size_t k = 0; k < MAX_FORMATS; k++) {
		const struct format_total *total = &f->total[k];
		if (!total->format)
			continue;
		buf_printf(out, "  %-5s  %5" PRIu64 " tensors  %5.1f%%  ", total->format->name, total->n_tensors,
			   100 * (double)total->n_bytes / (double)f->tensor_bytes);
		put_size(out, total->n_bytes);
		buf_putc(out, '\n');
	}
}

static void write_text(struct buf *out, const char *path, const struct gguf *g, const struct facts *f)
{
	buf_puts(out, "File\n");
	label(out, "path");
	buf_puts(out, path);
	buf_putc(out, '\n');
	label(out, "format");
	buf_printf(out, "GGUF version %u\n", gguf_version(g));
	label(out, "size");
	put_size(out, gguf_file_bytes(g));
	buf_putc(out, '\n');
	text_model(out, f);
	text_tokenizer(out, g, f);
	text_metadata(out, g);
	text_tensors(out, g, f);
}

/* ---- JSON ---- */

static void json_str(struct buf *out, const char *key, struct str s)
{
	buf_printf(out, "\"%s\":", key);
	if (s.n > 0)
		buf_json_string(out, s.p, s.n);
	else
		buf_puts(out, "null");
}

static void json_int(struct buf *out, const char *key, int64_t x)
{
	if (x == UNKNOWN)
		buf_printf(out, ",\"%s\":null", key);
	else
		buf_printf(out, ",\"%s\":%" PRId64, key, x);
}

static void json_metadata(struct buf *out, const struct gguf *g)
{
	buf_puts(out, ",\"metadata\":{");
	for (size_t i = 0; i < gguf_n_values(g); i++) {
		const struct gguf_value *v = gguf_value_at(g, i);
		if (i > 0)
			buf_putc(out, ',');
		buf_json_string(out, v->key.p, v->key.n);
		buf_putc(out, ':');
		if (v->type != GGUF_ARRAY) {
			put_elements(out, v, 1, SIZE_MAX);
		} else if (v->count <= JSON_ARRAY_ITEMS) {
			buf_putc(out, '[');
			put_elements(out, v, v->count, SIZE_MAX);
			buf_putc(out, ']');
		} else {
			buf_printf(out, "{\"type\":\"%s\",\"count\":%" PRIu64 ",\"first\":[",
				   gguf_type_name(v->elem_type), v->count);
			put_elements(out, v, JSON_FIRST_ITEMS, SIZE_MAX);
			buf_puts(out, "]}");
		}
	}
	buf_putc(out, '}');
}

static void json_tensors(struct buf *out, const struct gguf *g)
{
	buf_puts(out, ",\"tensors\":[");
	for (size_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);
		if (i > 0)
			buf_putc(out, ',');
		buf_puts(out, "{\"name\":");
		buf_json_string(out, t->name.p, t->name.n);
		buf_printf(out, ",\"type\":\"%s\",\"shape\":[", t->format->name);
		for (uint32_t k = 0; k < t->n_dims; k++)
			buf_printf(out, "%s%" PRIu64, k ? "," : "", t->dim[k]);
		buf_printf(out, "],\"bytes\":%" PRIu64 ",\"offset\":%" PRIu64 "}", t->n_bytes, t->offset);
	}
	buf_putc(out, ']');
}

static void json_tokenizer(struct buf *out, const struct gguf *g, const struct facts *f)
{
	buf_puts(out, ",\"tokenizer\":{");
	json_str(out, "model", f->tokenizer);
	buf_putc(out, ',');
	json_str(out, "pre", f->pre);
	json_int(out, "n_tokens", f->tokens ? (int64_t)f->n_tokens : UNKNOWN);
	buf_puts(out, ",\"special\":{");
	bool first = true;
	for (size_t i = 0; i < gguf_n_values(g); i++) {
		struct str name;
		uint64_t id;
		if (!special_token(g, i, &name, &id))
			continue;
		if (!first)
			buf_putc(out, ',');
		first = false;
		buf_json_string(out, name.p, name.n);
		buf_printf(out, ":{\"id\":%" PRIu64 ",\"text\":", id);
		if (id < f->n_tokens)
			buf_json_string(out, f->tokens[id].p, f->tokens[id].n);
		else
			buf_puts(out, "null");
		buf_putc(out, '}');
	}
	buf_puts(out, "}}");
}

static void json_summary(struct buf *out, const struct gguf *g, const struct facts *f)
{
	buf_puts(out, ",\"summary\":{");
	json_str(out, "name", f->name);
	buf_putc(out, ',');
	json_str(out, "architecture", f->arch);
	for (int i = 0; i < N_FACTS; i++)
		json_int(out, fact_names[i].json, f->value[i]);
	buf_printf(out, ",\"n_params\":%" PRIu64 ",\"tensor_bytes\":%" PRIu64, f->n_params, f->tensor_bytes);
	json_int(out, "kv_bytes_per_token", f->kv_bytes_per_token);
	json_int(out, "chat_template_bytes", f->chat_template ? (int64_t)load_u64(f->chat_template->data) : UNKNOWN);
	buf_puts(out, ",\"tensor_types\":{");
	bool first = true;
	for (size_t k = 0; k < MAX_FORMATS; k++) {
		const struct format_total *total = &f->total[k];
		if (!total->format)
			continue;
		buf_printf(out, "%s\"%s\":{\"tensors\":%" PRIu64 ",\"elements\":%" PRIu64 ",\"bytes\":%" PRIu64 "}",
			   first ? "" : ",", total->format->name, total->n_tensors, total->n_elems, total->n_bytes);
		first = false;
	}
	buf_putc(out, '}');
	json_tokenizer(out, g, f);
	buf_putc(out, '}');
}

static void write_json(struct buf *out, const char *path, const struct gguf *g, const struct facts *f)
{
	buf_puts(out, "{\"file\":");
	buf_json_string(out, path, strlen(path));
	buf_printf(out, ",\"version\":%u,\"bytes\":%" PRIu64, gguf_version(g), gguf_file_bytes(g));
	json_summary(out, g, f);
	json_metadata(out, g);
	json_tensors(out, g);
	buf_puts(out, "}\n");
}

enum status inspect_gguf(const struct gguf *g, const char *path, bool json, struct buf *out, struct error *err)
{
	struct facts f;
	enum status st = gather(g, &f);
	if (st == STATUS_OK) {
		if (json)
			write_json(out, path, g, &f);
		else
			write_text(out, path, g, &f);
		if (out->failed)
			st = STATUS_NOMEM;
	}
	free(f.tokens);
	return st == STATUS_OK ? st : error_set(err, st, "no memory to describe %s", path);
}

enum status engine_inspect(const char *path, bool json, struct buf *out, struct error *err)
{
	struct gguf *g;
	enum status st = gguf_open(path, &g, err);
	if (st != STATUS_OK)
		return st;
	st = inspect_gguf(g, path, json, out, err);
	gguf_close(g);
	return st;
}
