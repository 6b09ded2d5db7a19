/*
 * Finds the calls of tools in what a model writes, as it writes it. Three families of notation, by the templates that
 * models are published with:
 *
 *   TOOLS_TAGGED   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list in the tags (Hermes, Qwen,
 *                  SmolLM2)
 *   TOOLS_LLAMA    {"name": ..., "parameters": {...}} as the whole answer, or behind <|python_tag|> (Llama 3)
 *   TOOLS_MISTRAL  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] (Mistral)
 *
 * Text is passed on as soon as it cannot be the beginning of a call; a call as soon as its name is known, and its
 * arguments byte by byte as the model writes them. What looks like a call and turns out to be none is text: nothing is
 * lost. Blanks around calls are dropped.
 */
#pragma once

#include "engine/base/buf.h"
#include "engine/base/str.h"

enum tool_family { TOOLS_TAGGED, TOOLS_LLAMA, TOOLS_MISTRAL };

/* All are required. Data is borrowed. `call` begins the next call; `arguments` adds to the last one. */
struct tool_sink {
	void (*text)(void *arg, struct str text);
	void (*call)(void *arg, struct str name);
	void (*arguments)(void *arg, struct str part);
};

struct tool_parser;

/* names: of the tools, each followed by a NUL; borrowed. NULL when there is no memory. */
struct tool_parser *tool_parser_create(enum tool_family family, const struct buf *names, const struct tool_sink *sink,
                                       void *arg);
void tool_parser_destroy(struct tool_parser *p); /* NULL is allowed */
void tool_parser_push(struct tool_parser *p, struct str text);
/* The answer has ended: what was held back is text. */
void tool_parser_finish(struct tool_parser *p);
/* Memory ran out on the way: what has been passed on has holes. */
bool tool_parser_failed(const struct tool_parser *p);
