/*
 * Pre-tokenizers: the cut of a text into the pieces ("pre-tokens") that byte-level BPE merges never cross. Each
 * published tokenizer gives its cut as a regular expression, or as several applied one after the other; here each
 * expression is a scanner written by hand, linear in the text.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/str.h"

/* The length of the next piece of s[0..n), n > 0: between 1 and n, and never inside a code point. */
typedef size_t (*pretoken_scan)(const char *s, size_t n);

enum { PRETOKEN_STAGES = 5 };

/* One value of `tokenizer.ggml.pre` and what it says about the tokenizer. */
struct pretokenizer {
	const char *name;
	pretoken_scan stage[PRETOKEN_STAGES]; /* each cuts the pieces of the one before; NULL after the last */
	bool nfc; /* the text is normalised first */
	bool whole_first; /* a piece that is a token is not merged ("ignore_merges") */
	bool adds_bos; /* when the metadata does not say */
};

/* NULL when the name is unknown. An empty name is "default". */
const struct pretokenizer *pretokenizer_find(struct str name);

/* Walks over the pieces of a text. */
struct pretoken_iter {
	const struct pretokenizer *pre;
	const char *s;
	size_t n, pos;
	size_t end[PRETOKEN_STAGES]; /* where the current piece of each stage ends */
};

void pretoken_start(struct pretoken_iter *it, const struct pretokenizer *pre, const char *s, size_t n);
/* False at the end of the text. Pieces are never empty and together are the text. */
bool pretoken_next(struct pretoken_iter *it, struct str *piece);
