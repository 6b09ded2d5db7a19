/* Which tokens may come next in an answer that a grammar constrains. */
#pragma once

#include "engine/text/grammar.h"
#include "engine/text/tokenizer.h"

/* The vocabulary in an order that makes walking it cheap. Immutable; the tokenizer must outlive it. */
struct grammar_vocab;
enum status grammar_vocab_create(const struct tokenizer *t, struct grammar_vocab **out);
void grammar_vocab_destroy(struct grammar_vocab *v);

struct grammar_matcher;

/* Takes a reference of g; v is borrowed. drop_first_space: a space before the text will not be shown (see detok.h). */
enum status grammar_matcher_create(struct grammar *g, const struct grammar_vocab *v, bool drop_first_space,
                                   struct grammar_matcher **out);
void grammar_matcher_destroy(struct grammar_matcher *m);

/*
 * Which tokens may come next: bit t of mask[t / 64] for every token of the vocabulary; end tokens when the text may end
 * here. Valid until the next call. INVALID when there is none (the vocabulary cannot spell what must come), LIMIT when
 * the grammar is too ambiguous, NOMEM.
 */
enum status grammar_matcher_mask(struct grammar_matcher *m, const uint64_t **mask, struct error *err);
/*
 * Goes on by a token. INVALID when the mask forbids it: the matcher then stays where it was. *complete: the text is
 * whole and nothing can follow.
 */
enum status grammar_matcher_accept(struct grammar_matcher *m, int32_t token, bool *complete, struct error *err);
