/*
 * The tokens that are recognised in a text as they stand, before anything else looks at it: a trie that finds the
 * longest one at a position. Control tokens are found only where the caller allows them; user-defined ones always, as
 * in the tokenizers that models are published with.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/str.h"
#include "engine/text/template.h"

struct special_set {
	struct special_node {
		int32_t child; /* first of the nodes below, -1: none */
		int32_t sibling; /* next with the same parent, -1: none */
		int32_t token; /* the token that ends here, -1: none */
		uint8_t byte;
		bool control; /* of the token */
	} *nodes;
	size_t n, cap;
	int32_t root[256];
};

void special_init(struct special_set *s);
void special_free(struct special_set *s);
/* Empty texts are ignored, and so is a text that is there already. False when there is no memory. */
bool special_add(struct special_set *s, struct str text, int32_t token, bool control);

/* A scan over one text. */
struct special_scan {
	const struct special_set *set;
	const char *s;
	size_t n;
	const struct text_span *data; /* control tokens must not touch these */
	size_t n_data;
	bool control; /* control tokens are allowed at all */
};

/*
 * The first special token at or after `from`, the longest at its place: true, its token and its range. Spans that end
 * before `from` are dropped from the scan, so `from` must not go back.
 */
bool special_next(struct special_scan *scan, size_t from, int32_t *token, size_t *begin, size_t *end);
