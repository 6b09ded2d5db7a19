/* How a sorted vocabulary is laid out, for grammar_match.c. */
#pragma once

#include "engine/text/grammar_match.h"

struct grammar_vocab {
	const struct tokenizer *tokenizer;
	int32_t n_vocab;
	int32_t *ids;     /* [n_ids] tokens that are text, sorted by their bytes */
	uint16_t *shared; /* [n_ids] how many first bytes each shares with the one before, or a few fewer */
	int32_t n_ids;
	int32_t *end; /* [n_end] tokens that end an answer */
	int32_t n_end;
	size_t longest; /* bytes */
};
