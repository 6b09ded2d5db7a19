/*
 * Turns generated tokens into releasable text: never splits a code point between two releases, never leaks a stop
 * string or its beginning, and never loses the text held back for one that did not come.
 *
 * The text is always UTF-8: bytes that are not become U+FFFD, one for each longest part that could have begun a code
 * point (Unicode 3.9, "substitution of maximal subparts"; what Python's errors="replace" does). Stop strings are looked
 * for in this text, whatever tokens and code points they are spread over. The one that is complete first ends it; of
 * several that end at the same byte the longest, of equal ones the first.
 *
 * The text continues a prompt, so SentencePiece's space before the first word is part of it ("It is" + " Paris").
 * Chat templates end after a turn's header, where that space is an artefact: see detok_drop_first_space().
 */
#pragma once

#include <stdbool.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/text/tokenizer.h"

struct detok;

/*
 * Copies the stop strings; empty ones, and ones that are not UTF-8 and so can never come, are ignored. keep_special
 * makes special tokens visible as text. The tokenizer is borrowed.
 */
enum status detok_create(const struct tokenizer *t, const struct str *stops, size_t n_stops, bool keep_special,
                         struct detok **out);
void detok_destroy(struct detok *d); /* NULL is allowed */

/* For an answer that begins a text of its own (chat): SentencePiece's space before the first word is not released. */
void detok_drop_first_space(struct detok *d);

/*
 * Adds one token and appends what may be released to `out`. Returns the index of the stop string that is now complete
 * (the text before it has been released, the rest is discarded; push no more), or -1.
 */
int detok_push(struct detok *d, int32_t token, struct buf *out);
/* Releases all that is held (an incomplete code point becomes U+FFFD); nothing when a stop string ended the text. */
void detok_finish(struct detok *d, struct buf *out);
