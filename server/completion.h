/*
 * The life of a /v1/completions or /v1/chat/completions request after it has been read: its choices are collected into
 * one answer, or streamed as server-sent events, each a complete `data: {...}` line in one write. The two APIs differ
 * in how a choice looks; that is a struct completion_shape.
 */
#pragma once

#include "server/generation.h"
#include "server/params.h"
#include "server/turns.h"

/* One choice while it grows. The buffers hold what has not been sent yet: everything, when not streaming. */
struct completion_choice {
	struct buf text;
	struct buf token_ids;	/* "1,2,3" */
	struct buf prompt_ids;	/* "1,2,3", when asked for */
	struct buf logprobs[4]; /* comma-separated, as the shape likes */
	size_t offset;		/* characters of text before the next token, for text_offset */
	const char *finish;	/* "stop", "length" or "tool_calls"; NULL while it runs */
	bool prompt_seen, intro_sent;

	struct tool_parser *parser; /* finds the calls in the text, when there are tools */
	struct completion *owner;
	int n_calls;
	char call_id[40];	/* of the last call */
	struct buf call_name;	/* of a call that has not been written yet */
	struct buf arguments;	/* what has not been written yet of the last call's */
	struct buf tool_calls;	/* as JSON: the calls (whole answers), or what the next chunk says of them */
};

struct completion;

struct completion_shape {
	const char *object, *chunk_object, *id_prefix;
	/* The prompt has arrived: notes what the choice needs of it. May be NULL. */
	void (*prompt)(struct completion *c, struct completion_choice *ch, const struct engine_event *ev);
	/* Writes the first chunk's choice, or nothing (then none is sent). */
	void (*intro)(struct completion *c, int i, struct buf *out);
	/* Adds a token's log-probability to the choice's buffers. Only called when they are wanted. */
	void (*logprob)(struct completion *c, struct completion_choice *ch, const struct engine_event *ev);
	/* Writes the choice object of one chunk, from the choice's buffers. `finish`: NULL, or this is the last one. */
	void (*chunk)(struct completion *c, int i, const char *finish, struct buf *out);
	/* True when text and finish_reason go in chunks of their own. */
	bool finish_apart;
	/* Writes the choice object of a whole answer. */
	void (*choice)(struct completion *c, int i, struct buf *out);
};

struct completion {
	struct app *app;
	struct http_exchange *x;
	struct generation *generation; /* NULL once it has ended or been let go */
	const struct completion_shape *shape;
	struct params params;
	char id[48];
	int64_t created;
	int n_choices;
	bool streaming;	 /* the 200 has been sent */
	struct buf head; /* start of every chunk, up to the choices */
	struct turns turns; /* that may be left out, and how many were */
	int32_t turns_dropped;
	struct buf out;	 /* scratch */
	struct completion_choice choices[];
};

/*
 * Takes over the exchange: n_prompts prompts with params->n choices each. Takes the content of *params. NULL (and a 503
 * answer) when there is no memory. Then completion_add() for each choice, in order, then completion_start(); or
 * completion_abort().
 */
struct completion *completion_create(struct app *a, struct http_exchange *x, const struct completion_shape *shape,
				     struct params *params, int n_prompts);
/* A member's request, to be given its prompt and then to completion_add(); NULL when there is no memory. */
struct engine_request *completion_request(struct completion *c, int choice);
void completion_add(struct completion *c, struct engine_request *r);
void completion_start(struct completion *c);
/* Answers with the error and lets go. */
void completion_abort(struct completion *c, const struct error *err);

/* ---- For the shapes ---- */

/* True when the answer so far is calls and nothing else: then it has no content. */
bool only_calls(const struct completion_choice *ch);

/* Appends ",NAME:[ids]" when token ids were asked for. */
void write_token_ids(struct buf *out, const char *name, const struct buf *ids);
void append_id(struct buf *ids, int32_t id);
