/*
 * SentencePiece's BPE (google/sentencepiece, bpe_model.cc): the characters of the whole text are symbols at first; the
 * neighbours whose join is the token of the highest score are merged, the leftmost among equals; a character that has
 * no token is written as its bytes. U+2581, which stands for a space in the vocabulary, is a plain space everywhere
 * here.
 *
 * The text is not cut into words before, but most neighbours never meet inside a token. Those places are boundaries no
 * merge can cross, and cutting there gives the same tokens from short runs.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"
#include "engine/text/tokenizer_impl.h"

/* U+2581 */
#define SPACE_MARK "\xE2\x96\x81"

enum { LONGEST_TOKEN = 1024 }; /* bytes; the cost of loading grows with the square */

/* The length of the character at s[0..n), n > 0; a byte that is not UTF-8 counts as one. */
static size_t char_length(const char *s, size_t n)
{
	uint32_t cp;
	size_t len = utf8_decode(s, n, &cp);
	return len ? len : 1;
}

struct scored {
	float score;
	int32_t id;
};

static int by_score(const void *a, const void *b)
{
	const struct scored *x = a, *y = b;
	if (x->score != y->score)
		return x->score > y->score ? -1 : 1;
	return x->id < y->id ? -1 : x->id > y->id;
}

/* Adds every way to join two tokens to this one, and the neighbours in it. */
static bool add_token(struct tokenizer *t, int32_t id, uint32_t rank)
{
	struct str s = tokenizer_bytes(t, id);
	int32_t before = -1;
	for (size_t i = 0; i < s.n;) {
		size_t len = char_length(s.p + i, s.n - i);
		int32_t c = tokenizer_lookup(t, s.p + i, len);
		if (before >= 0 && c >= 0 && !merge_table_add(&t->adjacent, before, c, 0, 0))
			return false;
		before = c;
		if (i > 0) {
			int32_t left = tokenizer_lookup(t, s.p, i);
			int32_t right = left < 0 ? -1 : tokenizer_lookup(t, s.p + i, s.n - i);
			if (right >= 0 && !merge_table_add(&t->merges, left, right, rank, id))
				return false;
		}
		i += len;
	}
	return true;
}

static enum status add_tokens(struct tokenizer *t, const float *scores, struct error *err)
{
	size_t n = (size_t)t->n_vocab, n_scored = 0;
	struct scored *order = malloc(n * sizeof *order);
	if (!order || !merge_table_init(&t->merges, n) || !merge_table_init(&t->adjacent, n)) {
		free(order);
		return error_set(err, STATUS_NOMEM, "no memory for the tokenizer");
	}
	for (int32_t id = 0; id < t->n_vocab; id++) {
		if (t->type[id] == TOKEN_NORMAL)
			order[n_scored++] = (struct scored){scores[id], id};
	}
	qsort(order, n_scored, sizeof *order, by_score);
	enum status status = STATUS_OK;
	uint32_t rank = 0;
	for (size_t i = 0; i < n_scored && !status; i++) {
		int32_t id = order[i].id;
		if (i > 0 && order[i].score != order[i - 1].score)
			rank++;
		if (tokenizer_bytes(t, id).n > LONGEST_TOKEN) {
			status = error_set(err, STATUS_INVALID, "tokenizer.ggml.tokens: token %d has over %d bytes", id,
			                   LONGEST_TOKEN);
		} else if (!add_token(t, id, rank)) {
			status = error_set(err, STATUS_NOMEM, "no memory for the tokenizer");
		}
	}
	free(order);
	return status;
}

enum status spm_create(struct tokenizer *t, const struct gguf *g, struct error *err)
{
	for (int b = 0; b < 256; b++)
		t->byte[b] = -1;
	for (int32_t id = 0; id < t->n_vocab; id++) {
		if (t->type[id] == TOKEN_BYTE)
			t->byte[(unsigned char)tokenizer_bytes(t, id).p[0]] = id;
	}
	for (int b = 0; b < 256; b++) {
		if (t->byte[b] < 0 && t->unk < 0) {
			return error_set(
				err, STATUS_INVALID,
				"tokenizer.ggml.tokens: byte 0x%02X has no token, and there is no unknown token",
				(unsigned)b);
		}
	}

	float *scores = NULL;
	size_t n = 0;
	enum status status = gguf_get_floats(g, "tokenizer.ggml.scores", &scores, &n, err);
	if (status == STATUS_NOT_FOUND)
		return error_set(err, STATUS_INVALID, "tokenizer.ggml.scores is missing: a llama tokenizer needs it");
	if (status)
		return status;
	if (n != (size_t)t->n_vocab) {
		status = error_set(err, STATUS_INVALID, "tokenizer.ggml.scores has %zu values for %d tokens", n,
		                   t->n_vocab);
		goto out;
	}
	for (size_t i = 0; i < n; i++) {
		if (isnan(scores[i])) {
			status = error_set(err, STATUS_INVALID,
			                   "tokenizer.ggml.scores: the score of token %zu is not a number", i);
			goto out;
		}
	}
	status = add_tokens(t, scores, err);
out:
	free(scores);
	return status;
}

/* A run of characters that has no boundary inside, at the end of `out`. */
struct run {
	const struct tokenizer *t;
	struct merge_work *work;
	struct token_buf *out;
	size_t begin; /* in out */
	int32_t last; /* the character before, -1: none */
};

static bool run_end(struct run *r)
{
	size_t n = r->out->n - r->begin;
	if (n == 0)
		return true;
	if (!merge_run(&r->t->merges, r->work, r->out->ids + r->begin, &n))
		return false;
	r->out->n = r->begin + n;
	r->begin = r->out->n;
	r->last = -1;
	return true;
}

/* A character that is no token: its bytes, or the unknown token once. */
static bool add_bytes(struct run *r, const char *s, size_t n)
{
	if (!run_end(r))
		return false;
	bool all = true;
	for (size_t i = 0; i < n; i++)
		all = all && r->t->byte[(unsigned char)s[i]] >= 0;
	if (!all && !token_buf_add(r->out, r->t->unk))
		return false;
	for (size_t i = 0; all && i < n; i++) {
		if (!token_buf_add(r->out, r->t->byte[(unsigned char)s[i]]))
			return false;
	}
	r->begin = r->out->n;
	return true;
}

static bool add_char(struct run *r, const char *s, size_t n)
{
	bool mark = n == 3 && memcmp(s, SPACE_MARK, 3) == 0;
	int32_t id = mark ? tokenizer_lookup(r->t, " ", 1) : tokenizer_lookup(r->t, s, n);
	if (id < 0)
		return *s == ' ' ? add_bytes(r, SPACE_MARK, 3) : add_bytes(r, s, n);
	if (r->last >= 0 && !merge_table_find(&r->t->adjacent, r->last, id) && !run_end(r))
		return false;
	r->last = id;
	return token_buf_add(r->out, id);
}

bool spm_encode(const struct tokenizer *t, struct merge_work *w, const char *s, size_t n, struct token_buf *out)
{
	struct run run = {t, w, out, out->n, -1};
	if (t->space_prefix && !add_char(&run, " ", 1))
		return false;
	for (size_t i = 0; i < n;) {
		size_t len = char_length(s + i, n - i);
		if (!add_char(&run, s + i, len))
			return false;
		i += len;
	}
	return run_end(&run);
}
