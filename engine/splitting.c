#include "engine/splitting.h"

#include <stdlib.h>

#include "engine/text/split.h"

struct splitting {
	struct split split;
	const struct tokenizer *tokenizer;
	struct token_buf tokens; /* of what is counted */
	struct str *atoms;
	struct engine_chunk *chunks; /* [n] */
	size_t n, cap;
};

struct splitting *splitting_create(const struct engine_split_params *params)
{
	struct splitting *s = calloc(1, sizeof *s);
	if (!s)
		return NULL;
	s->split.max_tokens = params->max_tokens;
	s->split.overlap_permille = params->overlap_permille;
	return s;
}

void splitting_destroy(struct splitting *s)
{
	if (!s)
		return;
	token_buf_free(&s->tokens);
	free(s->atoms);
	free(s->chunks);
	free(s);
}

/* In a document nothing is a control token, so its name is a few ordinary ones. */
static int32_t count(void *arg, struct str text)
{
	struct splitting *s = arg;
	s->tokens.n = 0;
	if (tokenizer_encode(s->tokenizer, text.p, text.n, NULL, 0, 0, &s->tokens, NULL) != STATUS_OK ||
	    s->tokens.n > INT32_MAX)
		return -1;
	return (int32_t)s->tokens.n;
}

/* The names of control tokens stay whole all the same. */
static enum status begin(struct splitting *s, const struct tokenizer *t)
{
	size_t n = 0, at = 0;
	for (int32_t i = 0; i < tokenizer_n_vocab(t); i++)
		n += tokenizer_is_special(t, i);
	s->atoms = malloc((n ? n : 1) * sizeof *s->atoms);
	if (!s->atoms)
		return STATUS_NOMEM;
	for (int32_t i = 0; i < tokenizer_n_vocab(t); i++)
		if (tokenizer_is_special(t, i) && tokenizer_piece(t, i, false).n > 1)
			s->atoms[at++] = tokenizer_piece(t, i, false);
	s->split.atoms = s->atoms;
	s->split.n_atoms = at;
	s->split.count = count;
	s->split.arg = s;
	s->tokenizer = t;
	return STATUS_OK;
}

enum status splitting_next(struct splitting *s, const struct tokenizer *t, struct str text, bool *done,
                           struct error *err)
{
	struct split_chunk c;
	if (!s->tokenizer && begin(s, t) != STATUS_OK)
		return error_set(err, STATUS_NOMEM, "no memory to cut a document");
	s->split.text = text;
	enum status st = split_next(&s->split, &c, done, err);
	if (st != STATUS_OK || *done)
		return st;
	if (s->n == s->cap) {
		size_t cap = s->cap ? 2 * s->cap : 16;
		struct engine_chunk *grown = realloc(s->chunks, cap * sizeof *grown);
		if (!grown)
			return error_set(err, STATUS_NOMEM, "no memory to cut a document");
		s->chunks = grown;
		s->cap = cap;
	}
	s->chunks[s->n++] = (struct engine_chunk){c.start, c.fresh, c.end, c.n_tokens, split_cut_name(c.cut)};
	return STATUS_OK;
}

void splitting_take(struct splitting *s, struct engine_chunk **chunks, size_t *n)
{
	*chunks = s->chunks;
	*n = s->n;
	s->chunks = NULL;
	s->n = s->cap = 0;
}
