/*
 * The turns of a conversation, for "truncation": "auto": a turn begins with a user's message and ends before the next
 * user's, with all that was called and answered in between. System messages belong to none and always stay; so does the
 * last turn. The engine drops whole turns, the oldest first, until the prompt fits; the answer lists the messages that
 * they were.
 */
#pragma once

#include "engine/engine.h"
#include "server/json.h"

struct turns {
	int32_t *of; /* [n]: of each message, the turn that it belongs to, from 0; -1: none */
	size_t n;
};

/* messages: an array of chat messages as clients write them. NOMEM. */
enum status turns_read(struct turns *t, const struct json *messages, struct error *err);
/* The first turn stays as well: it is a summary. */
void turns_keep_first(struct turns *t);
void turns_free(struct turns *t);
/* Lets the engine drop them. n_before: messages that its chat has in front of these, which stay. NOMEM. */
enum status turns_give(const struct turns *t, size_t n_before, struct engine_request *r, struct error *err);
/*
 * Appends ",\"truncated\":{...}" when the n_dropped oldest are missing; the messages are numbered without the first
 * `skip`.
 */
void turns_write(const struct turns *t, size_t skip, int32_t n_dropped, struct buf *out);
