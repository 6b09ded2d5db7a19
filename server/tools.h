/*
 * Tools of a request: what may be called, what must be, and how the model at hand writes a call. Also what an answer's
 * form may be (response_format): both end in a grammar for the engine.
 */
#pragma once

#include "engine/engine.h"
#include "server/json.h"
#include "server/tool_parser.h"

struct tools {
	bool active;		 /* there are tools, and they may be called */
	bool forced;		 /* the answer must be a call */
	bool many;		 /* more than one call may come (parallel_tool_calls) */
	enum tool_family family; /* how calls are written */
	bool as_text;		 /* the template knows no tools: they are told of in the system message (messages.h) */
	struct buf names;	 /* each followed by a NUL */
};

void tools_free(struct tools *t);

/* True when the model's chat template never asks for tools. info: NULL while there is no model. */
bool tools_as_text(const struct engine_info *info);

/*
 * Reads tools, tool_choice and parallel_tool_calls. `flat`: the Responses API's form, {"type":"function","name":...},
 * not {"type":"function","function":{"name":...}}. When the answer must be a call, *grammar is set; the caller frees
 * it.
 */
enum status tools_read(struct tools *t, const struct json *body, bool flat, const struct engine_info *info,
		       struct grammar **grammar, struct error *err);

/*
 * Reads response_format (`flat`: as text.format has it) into a grammar, or NULL for plain text. json_object may carry a
 * "schema" as llama.cpp has it.
 */
enum status answer_format_read(const struct json *format, bool flat, struct grammar **grammar, struct error *err);
