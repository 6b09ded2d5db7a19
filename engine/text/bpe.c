/* Byte-level BPE: pre-tokens, each of whose bytes is a symbol at first, merged by the order of the merge list. */
#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"
#include "engine/text/tokenizer_impl.h"
#include "engine/text/unicode.h"

/*
 * The printable character of each byte. Those that Latin-1 prints stand for themselves; the others take U+0100 and up,
 * in order: bytes 00-20, 7F-A0 and AD.
 */
static int byte_of_char(uint32_t cp)
{
	if ((cp >= 0x21 && cp <= 0x7E) || (cp >= 0xA1 && cp <= 0xAC) || (cp >= 0xAE && cp <= 0xFF))
		return (int)cp;
	if (cp >= 0x100 && cp <= 0x120)
		return (int)(cp - 0x100);
	if (cp >= 0x121 && cp <= 0x142)
		return (int)(cp - 0x121 + 0x7F);
	return cp == 0x143 ? 0xAD : -1;
}

bool bpe_unprintable(const char *s, size_t n, struct buf *out)
{
	for (size_t i = 0; i < n;) {
		uint32_t cp;
		size_t len = utf8_decode(s + i, n - i, &cp);
		int byte = len ? byte_of_char(cp) : -1;
		if (byte < 0)
			return false;
		buf_putc(out, (char)byte);
		i += len;
	}
	return true;
}

/* Where a merge's line is cut: the first space after its first byte (no part holds one itself). 0: nowhere. */
static size_t merge_cut(struct str line)
{
	const char *space = line.n > 1 ? memchr(line.p + 1, ' ', line.n - 1) : NULL;
	return space ? (size_t)(space - line.p) : 0;
}

/* Adds line `rank` of the merge list. `scratch` is empty before and after. */
static enum status add_merge(struct tokenizer *t, struct str line, uint32_t rank, struct buf *scratch,
                             struct error *err)
{
	size_t cut = merge_cut(line);
	bool known = cut > 0 && bpe_unprintable(line.p, cut, scratch);
	size_t left_n = scratch->len;
	known = known && bpe_unprintable(line.p + cut + 1, line.n - cut - 1, scratch);
	if (scratch->failed)
		return error_set(err, STATUS_NOMEM, "no memory for the merges of the tokenizer");
	int32_t left = -1, right = -1, result = -1;
	if (known) {
		left = tokenizer_lookup(t, scratch->data, left_n);
		right = tokenizer_lookup(t, scratch->data + left_n, scratch->len - left_n);
		result = tokenizer_lookup(t, scratch->data, scratch->len);
	}
	buf_clear(scratch);
	if (left < 0 || right < 0 || result < 0) {
		return error_set(err, STATUS_INVALID,
		                 "tokenizer.ggml.merges: line %u (\"%.*s\") does not join two tokens of the vocabulary "
		                 "to a third",
		                 rank, line.n > 80 ? 80 : (int)line.n, line.p);
	}
	if (!merge_table_add(&t->merges, left, right, rank, result))
		return error_set(err, STATUS_NOMEM, "no memory for the merges of the tokenizer");
	return STATUS_OK;
}

/* A byte without a token is written as U+FFFD, so the bytes of that must be tokens then. */
static enum status check_bytes(const struct tokenizer *t, struct error *err)
{
	for (int b = 0; b < 256; b++) {
		if (t->byte[b] < 0 && (t->byte[0xEF] < 0 || t->byte[0xBF] < 0 || t->byte[0xBD] < 0))
			return error_set(err, STATUS_INVALID, "tokenizer.ggml.tokens: byte 0x%02X has no token",
			                 (unsigned)b);
	}
	return STATUS_OK;
}

enum status bpe_create(struct tokenizer *t, const struct gguf *g, struct error *err)
{
	for (int b = 0; b < 256; b++) {
		char c = (char)b;
		t->byte[b] = tokenizer_lookup(t, &c, 1);
	}
	enum status status = check_bytes(t, err);
	if (status)
		return status;

	struct str *lines = NULL;
	size_t n = 0;
	struct buf scratch = BUF_INIT;
	status = gguf_get_strs(g, "tokenizer.ggml.merges", &lines, &n, err);
	if (status == STATUS_NOT_FOUND)
		return error_set(err, STATUS_INVALID, "tokenizer.ggml.merges is missing: a gpt2 tokenizer needs it");
	if (status)
		return status;
	if (n >= UINT32_MAX)
		status = error_set(err, STATUS_INVALID, "tokenizer.ggml.merges has %zu lines, more than can be", n);
	if (!status && !merge_table_init(&t->merges, n))
		status = error_set(err, STATUS_NOMEM, "no memory for the merges of the tokenizer");
	for (size_t i = 0; !status && i < n; i++)
		status = add_merge(t, lines[i], (uint32_t)i, &scratch, err);
	buf_free(&scratch);
	free(lines);
	return status;
}

static bool add_byte(const struct tokenizer *t, unsigned char c, struct token_buf *out)
{
	if (t->byte[c] >= 0)
		return token_buf_add(out, t->byte[c]);
	return token_buf_add(out, t->byte[0xEF]) && token_buf_add(out, t->byte[0xBF]) &&
	       token_buf_add(out, t->byte[0xBD]);
}

static bool encode_piece(const struct tokenizer *t, struct merge_work *w, struct str piece, struct token_buf *out)
{
	if (t->pre->whole_first) {
		int32_t id = tokenizer_lookup(t, piece.p, piece.n);
		if (id >= 0)
			return token_buf_add(out, id);
	}
	size_t begin = out->n;
	for (size_t i = 0; i < piece.n; i++) {
		if (!add_byte(t, (unsigned char)piece.p[i], out))
			return false;
	}
	size_t n = out->n - begin;
	if (!merge_run(&t->merges, w, out->ids + begin, &n))
		return false;
	out->n = begin + n;
	return true;
}

bool bpe_encode(const struct tokenizer *t, struct merge_work *w, const char *s, size_t n, struct token_buf *out)
{
	struct buf normal = BUF_INIT;
	bool ok = true;
	if (t->pre->nfc && !unicode_is_plain(s, n)) {
		ok = unicode_nfc(s, n, &normal);
		s = normal.data;
		n = normal.len;
	}
	struct pretoken_iter it;
	struct str piece;
	pretoken_start(&it, t->pre, s, n);
	while (ok && pretoken_next(&it, &piece))
		ok = encode_piece(t, w, piece, out);
	buf_free(&normal);
	return ok;
}
