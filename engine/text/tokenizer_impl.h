/* What the files of the tokenizer share with each other, and nobody else. */
#pragma once

#include "engine/text/merge.h"
#include "engine/text/pretokenize.h"
#include "engine/text/special.h"
#include "engine/text/tokenizer.h"

/* The values of tokenizer.ggml.token_type. */
enum token_type {
	TOKEN_NORMAL = 1,
	TOKEN_UNKNOWN,
	TOKEN_CONTROL,
	TOKEN_USER_DEFINED,
	TOKEN_UNUSED,
	TOKEN_BYTE,
};

enum tokenizer_kind { TOKENIZER_BPE, TOKENIZER_SPM };

/* Bytes -> id over the tokens' own bytes: an open-addressed index that stores ids only. */
struct token_index {
	int32_t *slots; /* [n_slots], -1: free */
	size_t n_slots; /* a power of two */
};

struct tokenizer {
	enum tokenizer_kind kind;
	const struct pretokenizer *pre; /* NULL for SentencePiece */
	int32_t n_vocab;
	/* Token i stands for blob[start[i] .. start[i + 1]). */
	char *blob;
	size_t blob_n;
	uint32_t *start; /* [n_vocab + 1] */
	uint8_t *type; /* [n_vocab], enum token_type */
	bool *ends; /* [n_vocab], see tokenizer_is_end() */
	int32_t bos, eos, unk; /* -1: none */
	bool add_bos, add_eos;
	bool space_prefix; /* SentencePiece: a space goes before the first word */

	struct token_index index; /* of the tokens that merging can give */
	int32_t byte[256]; /* the token of each byte, or -1 */
	struct merge_table merges;
	struct merge_table adjacent; /* SentencePiece: pairs of characters that are neighbours inside some token */
	struct special_set specials;
};

struct str tokenizer_bytes(const struct tokenizer *t, int32_t id);

/* The token of these bytes that merging can give, or -1. */
int32_t tokenizer_lookup(const struct tokenizer *t, const char *p, size_t n);

/* Build what their kind needs beyond the tokens themselves. */
enum status bpe_create(struct tokenizer *t, const struct gguf *g, struct error *err);
enum status spm_create(struct tokenizer *t, const struct gguf *g, struct error *err);

/*
 * Append the tokens of a text without special tokens, n > 0; false when there is no memory. SentencePiece puts its
 * space before it, as llama.cpp does (and transformers in its "legacy" mode) both at the start and after each special
 * token.
 */
bool bpe_encode(const struct tokenizer *t, struct merge_work *w, const char *s, size_t n, struct token_buf *out);
bool spm_encode(const struct tokenizer *t, struct merge_work *w, const char *s, size_t n, struct token_buf *out);

/*
 * Byte-level BPE writes each byte as one printable character (openai/gpt-2, encoder.py, bytes_to_unicode). Appends the
 * bytes that the n bytes at s stand for; false when a character is none of the 256.
 */
bool bpe_unprintable(const char *s, size_t n, struct buf *out);
