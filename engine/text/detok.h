/*
 * Turns generated tokens into releasable text: never splits a code point between two releases, never leaks a stop
 * string or its beginning, and never loses the text held back for one that did not come.
 */
#pragma once

#include <stdbool.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/text/tokenizer.h"

struct detok;

/* Copies the stop strings (empty ones are ignored). keep_special makes special tokens visible as text. */
enum status detok_create(const struct tokenizer *t, const struct str *stops, size_t n_stops, bool keep_special,
                         struct detok **out);
void detok_destroy(struct detok *d); /* NULL is allowed */

/*
 * Adds one token and appends what may be released to `out`. Returns the index of the stop string that is now complete
 * (the text before it has been released, the rest is discarded; push no more), or -1.
 */
int detok_push(struct detok *d, int32_t token, struct buf *out);
/* Releases all that is held (an incomplete code point becomes U+FFFD); nothing when a stop string ended the text. */
void detok_finish(struct detok *d, struct buf *out);
