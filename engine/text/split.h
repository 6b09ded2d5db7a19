/*
 * Cuts a document into parts of a bounded number of tokens, at the best place there is near the end of each: before a
 * heading, behind a paragraph, a line, a sentence, a word, and only then anywhere, but never inside a code point or one
 * of the given texts (control tokens). Each part may begin with a repetition of the end of the one before it.
 *
 * Reads one part at a time, so that a long document can be cut beside other work. Knows no tokenizer: it is told how
 * many tokens a text has, and relies on nothing but being told the same for the same text, so that the limit holds
 * whatever the tokenizer does. The parts without their repetitions are the document, byte for byte.
 *
 * Where a part may end is looked for in its last half: of the boundaries there the one of the best kind, and of these
 * the last.
 */
#pragma once

#include <stdint.h>

#include "engine/base/status.h"
#include "engine/base/str.h"

enum split_cut { SPLIT_TOKEN, SPLIT_WORD, SPLIT_SENTENCE, SPLIT_LINE, SPLIT_PARAGRAPH, SPLIT_HEADING, SPLIT_END };

enum {
	SPLIT_MIN_TOKENS = 16,
	SPLIT_MAX_OVERLAP_PERMILLE = 500,
};

struct split_chunk {
	size_t start, fresh, end; /* bytes of the document; [start, fresh) is repeated from the part before */
	int32_t n_tokens;         /* of [start, end) */
	enum split_cut cut;       /* what there is at its end */
};

struct split {
	struct str text;
	int32_t max_tokens;       /* of a part with its repetition, at least SPLIT_MIN_TOKENS */
	int32_t overlap_permille; /* of max_tokens that are repeated, at most */
	/* Tokens of a text; -1: no memory. */
	int32_t (*count)(void *arg, struct str text);
	void *arg;
	/* Texts that no cut goes through, unless one alone is longer than a part. */
	const struct str *atoms; /* [n_atoms] */
	size_t n_atoms;
	/* Where it stands; zeroed at first. */
	size_t at, start;
	double bytes_per_token;
};

/*
 * The next part; *done when there was none left. INVALID: max_tokens do not even hold one character, or a number is out
 * of range; NOMEM.
 */
enum status split_next(struct split *s, struct split_chunk *out, bool *done, struct error *err);
/* "heading", "paragraph", "line", "sentence", "word", "token", "end" */
const char *split_cut_name(enum split_cut cut);
