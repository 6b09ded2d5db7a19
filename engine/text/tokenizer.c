#include "engine/text/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/hash.h"
#include "engine/text/tokenizer_impl.h"

enum { PRE_SHOWN = 64 }; /* bytes of a name from the file that a message repeats */

/*
 * Names that end a turn or a text in published models. A token of such a name is a control token even where the file's
 * types say otherwise, which conversions have got wrong.
 */
/* clang-format off */
static const char *const end_names[] = {
	"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
	"<|end_of_turn|>", "<end_of_turn>", "<|EOT|>", "<EOT>", "<|return|>", "<|call|>",
	"<\uFF5Cend\u2581of\u2581sentence\uFF5C>", /* DeepSeek */
};
/* clang-format on */

void token_buf_free(struct token_buf *t)
{
	free(t->ids);
	memset(t, 0, sizeof *t);
}

bool token_buf_add(struct token_buf *t, int32_t id)
{
	if (t->n == t->cap) {
		size_t cap = t->cap ? t->cap * 2 : 64;
		int32_t *ids = cap <= SIZE_MAX / 2 / sizeof *ids ? realloc(t->ids, cap * sizeof *ids) : NULL;
		if (!ids)
			return false;
		t->ids = ids;
		t->cap = cap;
	}
	t->ids[t->n++] = id;
	return true;
}

/* ---- Creation ---- */

struct str tokenizer_bytes(const struct tokenizer *t, int32_t id)
{
	return (struct str){t->blob + t->start[id], t->start[id + 1] - t->start[id]};
}

/* The slot that holds these bytes, or the free one where they belong. */
static int32_t *index_slot(const struct tokenizer *t, const char *p, size_t n)
{
	const struct token_index *x = &t->index;
	for (size_t i = hash64(p, n, 0) & (x->n_slots - 1);; i = (i + 1) & (x->n_slots - 1)) {
		if (x->slots[i] < 0 || str_eq(tokenizer_bytes(t, x->slots[i]), (struct str){p, n}))
			return &x->slots[i];
	}
}

int32_t tokenizer_lookup(const struct tokenizer *t, const char *p, size_t n)
{
	return *index_slot(t, p, n);
}

/* Indexes the tokens of one type; of two with the same bytes the first stays. */
static void index_add(struct tokenizer *t, enum token_type type)
{
	for (int32_t id = 0; id < t->n_vocab; id++) {
		struct str s = tokenizer_bytes(t, id);
		if (t->type[id] != type || s.n == 0)
			continue;
		int32_t *slot = index_slot(t, s.p, s.n);
		if (*slot < 0)
			*slot = id;
	}
}

static enum status index_create(struct tokenizer *t, struct error *err)
{
	size_t n_slots = 16;
	while (n_slots / 2 < (size_t)t->n_vocab)
		n_slots *= 2;
	t->index.slots = malloc(n_slots * sizeof *t->index.slots);
	if (!t->index.slots)
		return error_set(err, STATUS_NOMEM, "no memory for the tokenizer");
	t->index.n_slots = n_slots;
	memset(t->index.slots, 0xFF, n_slots * sizeof *t->index.slots);
	index_add(t, TOKEN_NORMAL);
	/* In byte-level BPE a merge may give a token that is recognised in the text as well. */
	if (t->kind == TOKENIZER_BPE)
		index_add(t, TOKEN_USER_DEFINED);
	return STATUS_OK;
}

static bool is_one_of(struct str name, const char *const *names, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (str_is(name, names[i]))
			return true;
	}
	return false;
}

static bool is_end_name(struct str name)
{
	return is_one_of(name, end_names, sizeof end_names / sizeof *end_names);
}

static bool is_between(struct str s, const char *left, const char *right)
{
	size_t l = strlen(left), r = strlen(right);
	return s.n > l + r && memcmp(s.p, left, l) == 0 && memcmp(s.p + s.n - r, right, r) == 0;
}

/* Names that only turn markers have. A user-defined token of such a name must not be found in a user's text either. */
static bool looks_control(struct str s)
{
	static const char *const turns[] = {"<start_of_turn>", "[INST]", "[/INST]"};
	return is_between(s, "<|", "|>") || is_between(s, "<\uFF5C", "\uFF5C>") ||
	       is_one_of(s, turns, sizeof turns / sizeof *turns);
}

/* The value of "<0x0A>" as the vocabulary writes byte tokens, or -1. */
static int byte_token_value(struct str s)
{
	if (s.n != 6 || memcmp(s.p, "<0x", 3) != 0 || s.p[5] != '>')
		return -1;
	int value = 0;
	for (int i = 3; i < 5; i++) {
		char c = s.p[i];
		if (c >= '0' && c <= '9')
			value = value * 16 + (c - '0');
		else if (c >= 'A' && c <= 'F')
			value = value * 16 + (c - 'A' + 10);
		else
			return -1;
	}
	return value;
}

/* The type of a token in a file that has no types. */
static enum token_type guess_type(const struct tokenizer *t, struct str name)
{
	if (looks_control(name))
		return TOKEN_CONTROL;
	if (t->kind == TOKENIZER_SPM) {
		if (byte_token_value(name) >= 0)
			return TOKEN_BYTE;
		if (str_is(name, "<unk>"))
			return TOKEN_UNKNOWN;
		if (str_is(name, "<s>") || str_is(name, "</s>"))
			return TOKEN_CONTROL;
	}
	return TOKEN_NORMAL;
}

static enum status load_types(struct tokenizer *t, const struct gguf *g, const struct str *names, struct error *err)
{
	size_t n_vocab = (size_t)t->n_vocab, n = 0;
	int32_t *types = NULL;
	t->type = malloc(n_vocab);
	if (!t->type)
		return error_set(err, STATUS_NOMEM, "no memory for the tokenizer");
	enum status status = gguf_get_ints(g, "tokenizer.ggml.token_type", &types, &n, err);
	if (status && status != STATUS_NOT_FOUND)
		return status;
	bool have = status == STATUS_OK;
	status = STATUS_OK;
	if (have && n != n_vocab) {
		status = error_set(err, STATUS_INVALID, "tokenizer.ggml.token_type has %zu values for %zu tokens", n,
		                   n_vocab);
		goto out;
	}
	for (size_t i = 0; i < n_vocab; i++) {
		int32_t type = have ? types[i] : (int32_t)guess_type(t, names[i]);
		if (type < 0 || type > TOKEN_BYTE) {
			status = error_set(err, STATUS_INVALID,
			                   "tokenizer.ggml.token_type: token %zu has the unknown type %d", i, type);
			goto out;
		}
		if (type == 0) /* undefined */
			type = TOKEN_NORMAL;
		if (is_end_name(names[i]) || (type == TOKEN_USER_DEFINED && looks_control(names[i])))
			type = TOKEN_CONTROL;
		t->type[i] = (uint8_t)type;
	}
out:
	free(types);
	return status;
}

/* Appends a SentencePiece token's text with U+2581 as a space. */
static void append_spaced(struct buf *out, struct str s)
{
	for (size_t i = 0; i < s.n; i++) {
		if (s.n - i >= 3 && memcmp(s.p + i, "\xE2\x96\x81", 3) == 0) {
			buf_putc(out, ' ');
			i += 2;
		} else {
			buf_putc(out, s.p[i]);
		}
	}
}

/* Appends what token `id` stands for in a text. */
static enum status append_token(const struct tokenizer *t, int32_t id, struct str name, struct buf *out,
                                struct error *err)
{
	size_t before = out->len;
	int byte;
	switch ((enum token_type)t->type[id]) {
	case TOKEN_BYTE:
		byte = byte_token_value(name);
		if (byte < 0) {
			return error_set(err, STATUS_INVALID,
			                 "tokenizer.ggml.tokens: token %d (\"%.*s\") has the type of a byte", id,
			                 name.n > PRE_SHOWN ? PRE_SHOWN : (int)name.n, name.p);
		}
		buf_putc(out, (char)byte);
		return STATUS_OK;
	case TOKEN_NORMAL:
	case TOKEN_UNUSED:
	case TOKEN_USER_DEFINED:
		if (t->kind == TOKENIZER_SPM) {
			append_spaced(out, name);
			return STATUS_OK;
		}
		/* A user-defined token is written as it is read; others are, if they are not in the alphabet of BPE. */
		if (t->type[id] != TOKEN_USER_DEFINED && bpe_unprintable(name.p, name.n, out))
			return STATUS_OK;
		if (!out->failed)
			out->len = before;
		buf_append(out, name.p, name.n);
		return STATUS_OK;
	case TOKEN_UNKNOWN:
	case TOKEN_CONTROL:
		break;
	}
	buf_append(out, name.p, name.n);
	return STATUS_OK;
}

static enum status load_tokens(struct tokenizer *t, const struct gguf *g, struct error *err)
{
	struct str *names = NULL;
	size_t n = 0;
	struct buf blob = BUF_INIT;
	enum status status = gguf_get_strs(g, "tokenizer.ggml.tokens", &names, &n, err);
	if (status == STATUS_NOT_FOUND)
		return error_set(err, STATUS_INVALID, "tokenizer.ggml.tokens is missing");
	if (status)
		return status;
	if (n == 0 || n >= INT32_MAX) {
		status = error_set(err, STATUS_INVALID, "tokenizer.ggml.tokens has %zu tokens", n);
		goto out;
	}
	t->n_vocab = (int32_t)n;
	status = load_types(t, g, names, err);
	if (status)
		goto out;
	t->start = malloc((n + 1) * sizeof *t->start);
	t->ends = calloc(n, sizeof *t->ends);
	if (!t->start || !t->ends) {
		status = error_set(err, STATUS_NOMEM, "no memory for the tokenizer");
		goto out;
	}
	for (size_t i = 0; i < n; i++) {
		t->start[i] = (uint32_t)blob.len;
		status = append_token(t, (int32_t)i, names[i], &blob, err);
		if (status)
			goto out;
		if (blob.len > UINT32_MAX) {
			status = error_set(err, STATUS_INVALID, "tokenizer.ggml.tokens is larger than 4 GiB");
			goto out;
		}
		t->ends[i] = t->type[i] == TOKEN_CONTROL && is_end_name(names[i]);
	}
	t->start[n] = (uint32_t)blob.len;
	buf_putc(&blob, '\0'); /* so that it is never NULL */
	t->blob = buf_take(&blob, &t->blob_n);
	if (!t->blob)
		status = error_set(err, STATUS_NOMEM, "no memory for the tokenizer");
out:
	buf_free(&blob);
	free(names);
	return status;
}

/* Reads a token id; *id stays as it is when the key is absent or says "none" (-1). */
static enum status get_id(const struct tokenizer *t, const struct gguf *g, const char *key, int32_t *id,
                          struct error *err)
{
	uint64_t value;
	enum status status = gguf_get_uint(g, key, &value, err);
	if (status == STATUS_NOT_FOUND || (status == STATUS_OK && value == UINT32_MAX))
		return STATUS_OK;
	if (status)
		return status;
	if (value >= (uint64_t)t->n_vocab) {
		return error_set(err, STATUS_INVALID, "%s is %llu, but the vocabulary has %d tokens", key,
		                 (unsigned long long)value, t->n_vocab);
	}
	*id = (int32_t)value;
	return STATUS_OK;
}

/* The first token of a type with this text, or -1. */
static int32_t find_named(const struct tokenizer *t, const char *name, enum token_type type)
{
	for (int32_t id = 0; id < t->n_vocab; id++) {
		if (t->type[id] == type && str_is(tokenizer_bytes(t, id), name))
			return id;
	}
	return -1;
}

static enum status load_ids(struct tokenizer *t, const struct gguf *g, struct error *err)
{
	t->bos = t->eos = t->unk = -1;
	if (t->kind == TOKENIZER_SPM) {
		t->bos = find_named(t, "<s>", TOKEN_CONTROL);
		t->eos = find_named(t, "</s>", TOKEN_CONTROL);
		t->unk = find_named(t, "<unk>", TOKEN_UNKNOWN);
	}
	int32_t eot = -1, eom = -1;
	const struct {
		const char *key;
		int32_t *id;
		bool ends;
	} rows[] = {
		{"tokenizer.ggml.bos_token_id", &t->bos, false},
		{"tokenizer.ggml.eos_token_id", &t->eos, true},
		{"tokenizer.ggml.unknown_token_id", &t->unk, false},
		{"tokenizer.ggml.eot_token_id", &eot, true},
		{"tokenizer.ggml.eom_token_id", &eom, true},
	};
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		enum status status = get_id(t, g, rows[i].key, rows[i].id, err);
		if (status)
			return status;
		if (rows[i].ends && *rows[i].id >= 0)
			t->ends[*rows[i].id] = true;
	}
	return STATUS_OK;
}

/* Reads a boolean; *value stays as it is when the key is absent. */
static enum status get_flag(const struct gguf *g, const char *key, bool *value, struct error *err)
{
	enum status status = gguf_get_bool(g, key, value, err);
	return status == STATUS_NOT_FOUND ? STATUS_OK : status;
}

static enum status load_flags(struct tokenizer *t, const struct gguf *g, struct error *err)
{
	bool spm = t->kind == TOKENIZER_SPM;
	t->add_bos = spm || t->pre->adds_bos;
	t->add_eos = false;
	t->space_prefix = true;
	enum status status = get_flag(g, "tokenizer.ggml.add_bos_token", &t->add_bos, err);
	if (!status)
		status = get_flag(g, "tokenizer.ggml.add_eos_token", &t->add_eos, err);
	if (!status)
		status = get_flag(g, "tokenizer.ggml.add_space_prefix", &t->space_prefix, err);
	t->add_bos = t->add_bos && t->bos >= 0;
	t->add_eos = t->add_eos && t->eos >= 0;
	t->space_prefix = t->space_prefix && spm;
	return status;
}

static enum status load_kind(struct tokenizer *t, const struct gguf *g, struct error *err)
{
	struct str model, pre = {"", 0};
	enum status status = gguf_get_str(g, "tokenizer.ggml.model", &model, err);
	if (status == STATUS_NOT_FOUND)
		return error_set(err, STATUS_INVALID, "tokenizer.ggml.model is missing: the file has no tokenizer");
	if (status)
		return status;
	if (str_is(model, "llama")) {
		t->kind = TOKENIZER_SPM;
		return STATUS_OK;
	}
	if (!str_is(model, "gpt2")) {
		return error_set(err, STATUS_UNSUPPORTED,
		                 "the tokenizer model \"%.*s\" is not supported (gpt2 and llama are)",
		                 model.n > PRE_SHOWN ? PRE_SHOWN : (int)model.n, model.p);
	}
	t->kind = TOKENIZER_BPE;
	status = gguf_get_str(g, "tokenizer.ggml.pre", &pre, err);
	if (status && status != STATUS_NOT_FOUND)
		return status;
	t->pre = pretokenizer_find(pre);
	if (!t->pre) {
		return error_set(err, STATUS_UNSUPPORTED,
		                 "the pre-tokenizer \"%.*s\" (tokenizer.ggml.pre) is not supported",
		                 pre.n > PRE_SHOWN ? PRE_SHOWN : (int)pre.n, pre.p);
	}
	return STATUS_OK;
}

static enum status load_specials(struct tokenizer *t, struct error *err)
{
	for (int32_t id = 0; id < t->n_vocab; id++) {
		bool control = tokenizer_is_special(t, id);
		if (!control && t->type[id] != TOKEN_USER_DEFINED)
			continue;
		if (!special_add(&t->specials, tokenizer_bytes(t, id), id, control))
			return error_set(err, STATUS_NOMEM, "no memory for the tokenizer");
	}
	return STATUS_OK;
}

enum status tokenizer_create(const struct gguf *g, struct tokenizer **out, struct error *err)
{
	struct tokenizer *t = calloc(1, sizeof *t);
	if (!t)
		return error_set(err, STATUS_NOMEM, "no memory for the tokenizer");
	special_init(&t->specials);
	enum status status = load_kind(t, g, err);
	if (!status)
		status = load_tokens(t, g, err);
	if (!status)
		status = load_ids(t, g, err);
	if (!status)
		status = load_flags(t, g, err);
	if (!status)
		status = index_create(t, err);
	if (!status)
		status = load_specials(t, err);
	if (!status)
		status = t->kind == TOKENIZER_BPE ? bpe_create(t, g, err) : spm_create(t, g, err);
	if (status) {
		tokenizer_destroy(t);
		return status;
	}
	*out = t;
	return STATUS_OK;
}

void tokenizer_destroy(struct tokenizer *t)
{
	if (!t)
		return;
	special_free(&t->specials);
	merge_table_free(&t->merges);
	merge_table_free(&t->adjacent);
	free(t->index.slots);
	free(t->blob);
	free(t->start);
	free(t->type);
	free(t->ends);
	free(t);
}

/* ---- Text to tokens ---- */

/* The text before, between or after special tokens. */
static bool encode_plain(const struct tokenizer *t, struct merge_work *w, const char *s, size_t n,
                         struct token_buf *out)
{
	if (n == 0)
		return true;
	return t->kind == TOKENIZER_BPE ? bpe_encode(t, w, s, n, out) : spm_encode(t, w, s, n, out);
}

enum status tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, const struct text_span *data,
                             size_t n_data, unsigned flags, struct token_buf *out, struct error *err)
{
	if (n >= INT32_MAX)
		return error_set(err, STATUS_LIMIT, "a text of %zu bytes is too long to tokenise", n);
	struct merge_work work = {0};
	struct special_scan scan = {&t->specials, text, n, data, n_data, flags & TOKENIZE_SPECIAL};
	size_t at = 0, begin, end;
	int32_t id;
	bool ok = true;
	bool want_bos = flags & TOKENIZE_ADD_BOS_EOS && t->add_bos;
	bool found = special_next(&scan, 0, &id, &begin, &end);
	/* A text that brings its own BOS gets no second one. */
	if (want_bos && !(found && begin == 0 && id == t->bos))
		ok = token_buf_add(out, t->bos);
	while (ok && found) {
		ok = encode_plain(t, &work, text + at, begin - at, out) && token_buf_add(out, id);
		at = end;
		found = special_next(&scan, at, &id, &begin, &end);
	}
	ok = ok && encode_plain(t, &work, text + at, n - at, out);
	if (ok && flags & TOKENIZE_ADD_BOS_EOS && t->add_eos)
		ok = token_buf_add(out, t->eos);
	merge_work_free(&work);
	return ok ? STATUS_OK : error_set(err, STATUS_NOMEM, "no memory to tokenise a text of %zu bytes", n);
}

/* ---- Tokens to text ---- */

struct str tokenizer_piece(const struct tokenizer *t, int32_t id, bool at_start)
{
	if (id < 0 || id >= t->n_vocab)
		return (struct str){"", 0};
	struct str s = tokenizer_bytes(t, id);
	if (at_start && t->space_prefix && t->type[id] == TOKEN_NORMAL && s.n > 0 && s.p[0] == ' ')
		return (struct str){s.p + 1, s.n - 1};
	return s;
}

void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool keep_special, struct buf *out)
{
	/* The encoder puts its space at the start and after each special token, so that is where it is taken away. */
	bool at_start = true;
	for (size_t i = 0; i < n; i++) {
		bool special = tokenizer_is_special(t, ids[i]);
		if (!special || keep_special) {
			struct str s = tokenizer_piece(t, ids[i], at_start);
			buf_append(out, s.p, s.n);
		}
		at_start = special || (ids[i] >= 0 && ids[i] < t->n_vocab && t->type[ids[i]] == TOKEN_USER_DEFINED);
	}
}

/* ---- Facts ---- */

int32_t tokenizer_n_vocab(const struct tokenizer *t)
{
	return t->n_vocab;
}

int32_t tokenizer_bos(const struct tokenizer *t)
{
	return t->bos;
}

int32_t tokenizer_eos(const struct tokenizer *t)
{
	return t->eos;
}

bool tokenizer_adds_bos(const struct tokenizer *t)
{
	return t->add_bos;
}

bool tokenizer_is_special(const struct tokenizer *t, int32_t id)
{
	return id >= 0 && id < t->n_vocab && (t->type[id] == TOKEN_CONTROL || t->type[id] == TOKEN_UNKNOWN);
}

bool tokenizer_is_end(const struct tokenizer *t, int32_t id)
{
	return id >= 0 && id < t->n_vocab && t->ends[id];
}

const char *tokenizer_model_name(const struct tokenizer *t)
{
	return t->kind == TOKENIZER_BPE ? "gpt2" : "llama";
}

const char *tokenizer_pre_name(const struct tokenizer *t)
{
	return t->pre ? t->pre->name : "";
}
