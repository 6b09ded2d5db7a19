/*
 * Chat requests -> the variables of the model's template. Everything that came from a client is marked VALUE_DATA, role
 * names included, so that no message can put a control token into the prompt.
 */
#pragma once

#include "engine/engine.h"
#include "server/json.h"
#include "server/turns.h"

struct chat_request {
	const struct json *messages; /* array of OpenAI chat messages */
	const struct json *tools;    /* array, passed on as it is; absent: none */
	const struct json *extra;    /* object: more template variables; NULL or absent: none */
	bool tools_as_text; /* the template knows no tools: see below */
	bool add_generation_prompt;
	const struct turns *turns; /* of the messages, which may then be left out; NULL: none may */
	size_t text_n; /* bytes of the JSON this comes from: bounds the memory it may take */
};

/*
 * Checks the messages and builds the template's variables in an arena of their own, which the caller owns. INVALID
 * names the message at fault. Content parts that are text are joined by newlines; parts of another kind are
 * UNSUPPORTED. "developer" becomes "system"; null content becomes ""; a tool call's arguments, which are a JSON string,
 * become the object they spell, as templates expect.
 *
 * tools_as_text: the tools are described in the system message, earlier calls are part of what the assistant said, and
 * their results come from the user, all in the notation that models of the Hermes and Qwen families know.
 */
enum status chat_build(const struct chat_request *c, struct arena **arena, struct value **chat, struct error *err);

/* Whether messages of a role instruct the model rather than take part in the talk. */
bool chat_is_system(struct str role);
/* Builds the chat of a request, and gives it the turns. */
enum status chat_give(const struct chat_request *c, struct engine_request *r, struct error *err);

/* Appends the text of a message's content: a string, or text parts joined by newlines. */
enum status content_text(const struct json *content, struct buf *out, struct error *err);
