/*
 * Tokenizers built from GGUF metadata (tokenizer.ggml.*): byte-level BPE with the pre-tokenizer families of GPT-2,
 * llama-3, qwen2, smollm and deepseek-coder, and SentencePiece (merges ranked by score, "llama") with byte fallback.
 *
 * Immutable after creation and usable from any thread. Time is linear (BPE: n log n within one pre-token) in the text.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/base/str.h"
#include "engine/model/gguf.h"
#include "engine/text/template.h"

struct tokenizer;

struct token_buf {
	int32_t *ids; /* [n], free with token_buf_free() */
	size_t n, cap;
};

void token_buf_free(struct token_buf *t);
/* Appends; false when there is no memory. */
bool token_buf_add(struct token_buf *t, int32_t id);

enum tokenize_flags {
	TOKENIZE_SPECIAL = 1,     /* recognise control tokens in the text */
	TOKENIZE_ADD_BOS_EOS = 2, /* put BOS/EOS around the text where the model's metadata asks for it */
};

/*
 * UNSUPPORTED names an unknown tokenizer model or pre-tokenizer; INVALID a vocabulary that does not hold together. The
 * tokenizer borrows from g, which must outlive it.
 */
enum status tokenizer_create(const struct gguf *g, struct tokenizer **out, struct error *err);
void tokenizer_destroy(struct tokenizer *t); /* NULL is allowed */

/*
 * Appends the ids of text[0..n) to *out. With TOKENIZE_SPECIAL, control tokens are recognised except where they overlap
 * one of the `data` ranges (n_data may be 0). User-defined tokens (<tool_call>, <think>: text that models read and
 * write, without power over the conversation) are recognised everywhere, as the published tokenizers do; of several
 * tokens at one place the longest counts. A text that begins with a recognised BOS gets no second one.
 *
 * Bytes that are not UTF-8 are encoded as bytes, never dropped; a byte for which a BPE vocabulary has no token (SmolLM2
 * lacks 21) becomes the bytes of U+FFFD. LIMIT at 2 GiB; NOMEM. *out may hold part of the ids after an error.
 */
enum status tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, const struct text_span *data,
                             size_t n_data, unsigned flags, struct token_buf *out, struct error *err);

/*
 * The bytes a token stands for, as they appear in the text: SentencePiece's U+2581 is a space, <0x0A> is one byte.
 * Special tokens give their literal name. `at_start` drops the space that SentencePiece puts before a text's first
 * word. The result is borrowed from the tokenizer. An id outside the vocabulary gives an empty string.
 */
struct str tokenizer_piece(const struct tokenizer *t, int32_t id, bool at_start);

/*
 * Appends the text of n ids; special tokens are left out unless keep_special. May end in an incomplete code point. The
 * space that SentencePiece puts before a text is left out at the start and after a special token, so that this undoes
 * encoding.
 */
void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool keep_special, struct buf *out);

int32_t tokenizer_n_vocab(const struct tokenizer *t);
int32_t tokenizer_bos(const struct tokenizer *t); /* -1: none; so the next */
int32_t tokenizer_eos(const struct tokenizer *t);
bool tokenizer_adds_bos(const struct tokenizer *t);
/* A control token (or one with the name of a turn marker, <|...|>) or the unknown token: no part of an answer. */
bool tokenizer_is_special(const struct tokenizer *t, int32_t id);
/* True for every token that ends a generation: EOS, EOT, EOM and known end-of-turn names (<|im_end|>, <|eot_id|>). */
bool tokenizer_is_end(const struct tokenizer *t, int32_t id);
const char *tokenizer_model_name(const struct tokenizer *t); /* "gpt2", "llama" */
const char *tokenizer_pre_name(const struct tokenizer *t); /* "smollm", "default", ...; "" for SentencePiece */
