/* Chats that are too long for the context, whose oldest turns may be left out: see engine_request.turn_of. */
#pragma once

#include "engine/engine.h"
#include "engine/text/tokenizer.h"

/* The most turns that may go: all but the last, or 0. */
int32_t truncate_most(const struct engine_request *r);
/* The messages of r->chat, in r->arena; NULL when it is full, or there is no list of as many as turn_of has. */
const struct value *truncate_messages(struct engine_request *r);
/*
 * Finds where turns begin in a prompt that was rendered from a chat, and where its system message ends: most templates
 * begin every message with the same control token, the first one behind BOS. Nothing is found where there is none.
 * False without memory.
 */
bool turns_mark(struct engine_request *r, const struct tokenizer *tokenizer, const struct token_buf *tokens);
/* Replaces the messages of r->chat by `all` of them without the n oldest turns. False when the arena is full. */
bool truncate_turns(struct engine_request *r, const struct value *all, int32_t n);
