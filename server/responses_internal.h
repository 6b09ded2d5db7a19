/* A response as its two parts know it: responses.c has its life, responses_write.c what a client sees of it. */
#pragma once

#include "server/responses.h"
#include "server/turns.h"

struct response {
	struct app *app;
	struct response_request q;
	const struct response_sink *sink;
	void *arg;
	struct generation_origin origin;
	char *stream_id;
	struct generation *generation; /* NULL before the start and after the end */
	struct history *base;
	struct history *kept; /* of itself, once it has ended */
	struct buf window;    /* what the model reads: what it continues and the input, or a summary of it */
	struct compact_base window_base;
	struct compact *compact;      /* that looks whether it is too long, and shortens it */
	struct history_waiter waiter; /* for the base's, which is under way already */
	struct compacted compacted;   /* what came of its own */
	int64_t start_ms;
	bool stored;
	bool has_summary; /* as its first output item */
	char session[ENGINE_SESSION_ID_MAX + 1];
	char id[RESPONSE_ID_MAX], item_id[RESPONSE_ID_MAX];
	int64_t created, sequence;
	const char *status;	/* "in_progress", ... */
	struct failure failure; /* when status is "failed" */
	struct generation_usage usage;
	struct turns turns; /* that may be left out, behind n_instructions messages; and how many were */
	size_t n_instructions;
	int32_t turns_dropped;
	bool ran;	/* the prompt was accepted */
	bool announced; /* created and in_progress have been sent */
	bool cancelling;
	bool dead; /* the sink takes no more */

	struct buf output; /* the items that are closed, as JSON */
	int index;	   /* of the item that is open, or will be next */
	enum { NO_ITEM, MESSAGE, CALL } open;
	struct buf text, logprobs;	       /* of the message that is open */
	struct buf delta_logprobs;	       /* of tokens whose text is held back */
	struct tool_parser *parser;	       /* when there are tools */
	struct buf found;		       /* text that it has let through and that is not sent yet */
	struct buf call_name, arguments, part; /* of the call that is open; part: what is to be sent of its arguments */
	char call_id[RESPONSE_ID_MAX];
	struct buf said, calls; /* for the history: all text, and the calls as chat messages have them */
	struct buf out;		/* the event under construction */
};

/* Whether what it continues is part of what the model reads: an input that begins with a summary stands alone. */
static inline bool response_goes_on(const struct response *r)
{
	return r->base && !r->q.base.turns;
}

/* Sends what begins it, once. */
void response_announce(struct response *r);
/* Sends the summary that it is the first to read, if there is one. */
void response_send_summary(struct response *r);
/* Text of the answer, in which calls are found when there are tools; and the end of it. */
void response_add_text(struct response *r, const struct buf *text);
void response_end_text(struct response *r);
void response_open_message(struct response *r);
/* The open item is whole, or all there will be of it. `told`: its last events are sent. */
void response_close_item(struct response *r, bool told);
/* An event with the response as it is. */
void response_send_object(struct response *r, const char *type);
/* For the parser of calls; its argument is the response. */
extern const struct tool_sink response_tool_sink;
