/* A document that is being cut with a model's tokenizer: text/split.h and what it has found so far. */
#pragma once

#include "engine/engine.h"
#include "engine/text/tokenizer.h"

struct splitting;

/* NULL when there is no memory. What is wrong with the params is said by splitting_next(). */
struct splitting *splitting_create(const struct engine_split_params *params);
void splitting_destroy(struct splitting *s); /* NULL is allowed */
/* Finds another part of `text`, the same at each call, or that there is none left. Errors as split_next(). */
enum status splitting_next(struct splitting *s, const struct tokenizer *t, struct str text, bool *done,
                           struct error *err);
/* Hands over all that were found: malloc'd, NULL when there are none. */
void splitting_take(struct splitting *s, struct engine_chunk **chunks, size_t *n);
