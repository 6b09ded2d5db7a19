/*
 * The Responses API (platform.openai.com/docs/api-reference/responses): one response from its request to its terminal
 * event. Who asked, over HTTP or over a WebSocket, is behind a struct response_sink.
 *
 * Events: response.created, response.in_progress, response.output_item.added, response.content_part.added,
 * response.output_text.delta*, response.output_text.done, response.content_part.done, response.output_item.done, then
 * response.completed, response.incomplete or response.failed. A call of a tool is an output item of its own, with
 * response.function_call_arguments.delta* and response.function_call_arguments.done in it. With context_management
 * (compact.h), a summary is the first output item of the response that reads it first. Nothing is sent before the
 * prompt has been accepted, so what goes wrong until then is a plain error. A cancelled response ends with
 * response.incomplete, status "cancelled" and reason "cancelled".
 */
#pragma once

#include "server/history.h"
#include "server/params.h"

/* What was asked for. */
struct response_request {
	struct params params;
	struct buf input;		       /* the input items as comma-separated chat messages */
	struct buf tools;		       /* chat tools as a JSON array, or empty */
	struct buf flat_tools;		       /* the same as they were given */
	struct buf format, tool_choice;	       /* as JSON, or empty: the defaults */
	struct buf instructions, metadata;     /* as JSON: a string or null, an object */
	char previous_id[RESPONSE_ID_MAX * 2]; /* "": none */
	/* the input items as they came, comma-separated, each with an id and a type */
	struct buf items;
	struct compact_settings compact;
	/* of an input that begins with a summary, which stands for all before it */
	struct compact_base base;
	bool generate;			       /* false: only warm the cache */
	bool logprobs;
	/* it can be asked for, and continued by anybody with the key, for a while */
	bool store;
};

/* Free with response_request_free() in any case. */
enum status response_request_parse(struct response_request *q, struct engine *e, int32_t tenant,
                                   const struct json *body, struct str session_header, struct error *err);
void response_request_free(struct response_request *q);
/* What the client sent of it that is kept. */
size_t response_request_bytes(const struct response_request *q);
/*
 * Reads a POST of one and has `begin` go on: base is the history of the response that it continues, or NULL. What is
 * wrong with it is answered; `missing` is how "There is no response ID to" goes on.
 */
void response_request_read(struct app *a, struct http_exchange *x, const char *missing,
                           void (*begin)(struct app *a, struct http_exchange *x, struct response_request *q,
                                         struct history *base));

struct response;

struct response_sink {
	/*
	 * One event as a JSON object (check json->failed: a stream with a hole must not go on). False: the reader is
	 * gone or too slow, and the response ends at once and unseen; `ended` is not called. NULL: events are not
	 * wanted.
	 */
	bool (*event)(void *arg, const char *type, const struct buf *json);
	/* It failed before anything was sent. The owner answers, then destroys it or starts it again. */
	void (*refused)(void *arg, const struct failure *f);
	/* The terminal event has been sent (or, without `event`, the response is whole). The owner destroys it. */
	void (*ended)(void *arg);
	bool keeps; /* response_history() is wanted, whatever is stored */
};

/*
 * Takes the content of *q. stream_id: put into every event, or NULL. NULL when there is no memory (*q is then
 * untouched).
 */
struct response *response_create(struct app *a, struct response_request *q, const struct response_sink *sink, void *arg,
				 const struct generation_origin *origin, const char *stream_id);
/*
 * Submits it. base: what it continues, or NULL (a reference is taken). session as in struct engine_request, or NULL for
 * the request's own. On an error nothing has been submitted and no callback will come.
 */
enum status response_start(struct response *r, struct history *base, const char *session, struct error *err);
/* Ends it with its terminal event: at once when it was not started, else when the engine has stopped. */
void response_cancel(struct response *r);
/* Cancels it unseen when it still runs. NULL is allowed. */
void response_destroy(struct response *r);

const char *response_id(const struct response *r);
const struct response_request *response_request(const struct response *r);
/* Appends the response object as it is now. */
void response_write(struct response *r, struct buf *out);
/*
 * Once it has ended, the conversation with this response's input and output. NULL for a response that failed, or that
 * was cancelled before it ran: a lane then keeps what it had.
 */
struct history *response_history(const struct response *r);
/* The sequence_number of what would be sent next. */
int64_t response_next_number(const struct response *r);
