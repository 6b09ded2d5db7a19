/* The vocabulary sorted by its bytes, so that one walk over it looks at each shared beginning once. */
#include "engine/text/grammar_vocab.h"

#include <stdlib.h>
#include <string.h>

static int compare(const void *a, const void *b, void *tokenizer)
{
	struct str x = tokenizer_piece(tokenizer, *(const int32_t *)a, false);
	struct str y = tokenizer_piece(tokenizer, *(const int32_t *)b, false);
	int order = memcmp(x.p, y.p, x.n < y.n ? x.n : y.n);
	if (order)
		return order;
	if (x.n != y.n)
		return x.n < y.n ? -1 : 1;
	return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1;
}

static size_t shared(struct str a, struct str b)
{
	size_t n = 0;
	while (n < a.n && n < b.n && a.p[n] == b.p[n])
		n++;
	return n;
}

enum status grammar_vocab_create(const struct tokenizer *t, struct grammar_vocab **out)
{
	int32_t n_vocab = tokenizer_n_vocab(t);
	struct grammar_vocab *v = calloc(1, sizeof *v);
	struct str before = {"", 0};
	if (!v)
		return STATUS_NOMEM;
	v->tokenizer = t;
	v->n_vocab = n_vocab;
	v->ids = malloc((size_t)n_vocab * sizeof *v->ids + 1);
	v->end = malloc((size_t)n_vocab * sizeof *v->end + 1);
	v->shared = malloc((size_t)n_vocab * sizeof *v->shared + 1);
	if (!v->ids || !v->end || !v->shared) {
		grammar_vocab_destroy(v);
		return STATUS_NOMEM;
	}
	for (int32_t id = 0; id < n_vocab; id++) {
		if (tokenizer_is_end(t, id))
			v->end[v->n_end++] = id;
		else if (!tokenizer_is_special(t, id) && tokenizer_piece(t, id, false).n > 0)
			v->ids[v->n_ids++] = id;
	}
	qsort_r(v->ids, (size_t)v->n_ids, sizeof *v->ids, compare, (void *)t);
	for (int32_t i = 0; i < v->n_ids; i++) {
		struct str piece = tokenizer_piece(t, v->ids[i], false);
		size_t n = shared(before, piece);
		v->shared[i] = n < UINT16_MAX ? (uint16_t)n : UINT16_MAX;
		v->longest = piece.n > v->longest ? piece.n : v->longest;
		before = piece;
	}
	*out = v;
	return STATUS_OK;
}

void grammar_vocab_destroy(struct grammar_vocab *v)
{
	if (!v)
		return;
	free(v->ids);
	free(v->end);
	free(v->shared);
	free(v);
}
