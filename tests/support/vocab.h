/*
 * Small vocabularies for tests of the tokenizers: a list of tokens with types and scores, and for byte-level BPE the
 * merges, written as a GGUF image and opened.
 */
#pragma once

#include "engine/model/gguf.h"
#include "engine/text/tokenizer.h"
#include "engine/base/utf8.h"
#include "tests/support/gguf_image.h"

enum { VOCAB_MAX = 2048 };

struct vocab {
	struct str tokens[VOCAB_MAX]; /* malloc'd */
	int32_t types[VOCAB_MAX];
	float scores[VOCAB_MAX];
	size_t n;
	struct str merges[VOCAB_MAX]; /* malloc'd */
	size_t n_merges;
	bool no_types; /* leave the array of types out */

	struct gguf_image image; /* keys may be added before vocab_open() */
	struct gguf *file;
	struct tokenizer *tokenizer;
};

/* What tokenizer.ggml.token_type says. */
enum { VOCAB_NORMAL = 1, VOCAB_UNKNOWN, VOCAB_CONTROL, VOCAB_USER, VOCAB_UNUSED, VOCAB_BYTE };

/*
 * The character in which byte-level BPE writes a byte, as UTF-8; its length. Made as bytes_to_unicode() of GPT-2 does
 * it.
 */
static inline size_t vocab_printable(unsigned byte, char out[4])
{
	unsigned next = 0;
	for (unsigned b = 0; b < 256; b++) {
		bool shows = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
		unsigned cp = shows ? b : 256 + next++;
		if (b == byte)
			return utf8_encode(cp, out);
	}
	return 0;
}

/* n bytes as byte-level BPE writes them; malloc'd. */
static inline struct str vocab_escape(const char *p, size_t n)
{
	struct buf b = BUF_INIT;
	for (size_t i = 0; i < n; i++) {
		char c[4];
		buf_append(&b, c, vocab_printable((unsigned char)p[i], c));
	}
	struct str s;
	s.p = buf_take(&b, &s.n);
	return s;
}

static inline struct str vocab_copy(const char *p, size_t n)
{
	char *copy = malloc(n + 1);
	if (copy && n)
		memcpy(copy, p, n);
	return (struct str){copy, n};
}

/* Adds a token as it is written in the file; its id. */
static inline int32_t vocab_add_n(struct vocab *v, struct str owned, int32_t type, float score)
{
	v->tokens[v->n] = owned;
	v->types[v->n] = type;
	v->scores[v->n] = score;
	return (int32_t)v->n++;
}

static inline int32_t vocab_add(struct vocab *v, const char *text, int32_t type, float score)
{
	return vocab_add_n(v, vocab_copy(text, strlen(text)), type, score);
}

/* The 256 bytes as tokens 0-255. */
static inline void vocab_add_bytes(struct vocab *v)
{
	for (unsigned b = 0; b < 256; b++) {
		char c = (char)b;
		vocab_add_n(v, vocab_escape(&c, 1), VOCAB_NORMAL, 0);
	}
}

/* Adds the merge of two texts, and its result as a token; the token's id. */
static inline int32_t vocab_merge(struct vocab *v, const char *left, const char *right)
{
	struct str l = vocab_escape(left, strlen(left)), r = vocab_escape(right, strlen(right));
	struct buf line = BUF_INIT, token = BUF_INIT;
	buf_append(&line, l.p, l.n);
	buf_putc(&line, ' ');
	buf_append(&line, r.p, r.n);
	buf_append(&token, l.p, l.n);
	buf_append(&token, r.p, r.n);
	free((char *)l.p);
	free((char *)r.p);
	struct str *m = &v->merges[v->n_merges++];
	m->p = buf_take(&line, &m->n);
	struct str t;
	t.p = buf_take(&token, &t.n);
	return vocab_add_n(v, t, VOCAB_NORMAL, 0);
}

/* <unk>, <s>, </s> and the 256 byte tokens, as SentencePiece models begin: 0-258. */
static inline void vocab_add_spm_base(struct vocab *v)
{
	vocab_add(v, "<unk>", VOCAB_UNKNOWN, 0);
	vocab_add(v, "<s>", VOCAB_CONTROL, 0);
	vocab_add(v, "</s>", VOCAB_CONTROL, 0);
	for (unsigned b = 0; b < 256; b++) {
		struct buf name = BUF_INIT;
		buf_printf(&name, "<0x%02X>", b);
		struct str s;
		s.p = buf_take(&name, &s.n);
		vocab_add_n(v, s, VOCAB_BYTE, 0);
	}
}

static inline void vocab_begin(struct vocab *v, const char *model, const char *pre)
{
	memset(v, 0, sizeof *v);
	image_begin(&v->image);
	if (model)
		image_add_str(&v->image, "tokenizer.ggml.model", model);
	if (pre)
		image_add_str(&v->image, "tokenizer.ggml.pre", pre);
}

/* Writes the lists that are not empty, and makes the tokenizer. */
static inline enum status vocab_open(struct vocab *v, struct error *err)
{
	bool scored = false;
	for (size_t i = 0; i < v->n; i++)
		scored = scored || v->types[i] == VOCAB_BYTE;
	image_add_strs(&v->image, "tokenizer.ggml.tokens", v->tokens, v->n);
	if (!v->no_types)
		image_add_ints(&v->image, "tokenizer.ggml.token_type", v->types, v->n);
	if (scored)
		image_add_floats(&v->image, "tokenizer.ggml.scores", v->scores, v->n);
	else
		image_add_strs(&v->image, "tokenizer.ggml.merges", v->merges, v->n_merges);
	struct str image = image_finish(&v->image);
	enum status status = gguf_open_memory(image.p, image.n, &v->file, err);
	return status ? status : tokenizer_create(v->file, &v->tokenizer, err);
}

static inline void vocab_close(struct vocab *v)
{
	tokenizer_destroy(v->tokenizer);
	gguf_close(v->file);
	image_free(&v->image);
	for (size_t i = 0; i < v->n; i++)
		free((char *)v->tokens[i].p);
	for (size_t i = 0; i < v->n_merges; i++)
		free((char *)v->merges[i].p);
}
