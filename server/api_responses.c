/*
 * POST /v1/responses: the Responses API over HTTP, whole or as server-sent events. previous_response_id names what is
 * stored (store.h); within a WebSocket connection (lanes.c), whose URL this is as well, what has just ended too.
 */
#include <stdio.h>
#include <stdlib.h>

#include "server/responses.h"

struct http_response {
	struct app *app;
	struct http_exchange *x;
	struct response *r;
	struct buf frame;
	bool streaming;
};

/* The last words of a stream that cannot go on, which take no memory. */
static void end_without_memory(struct http_response *h)
{
	char text[256];
	int n = snprintf(text, sizeof text,
	                 "event: error\ndata: "
	                 "{\"type\":\"error\",\"sequence_number\":%lld,\"code\":\"out_of_memory\",\"message\":"
	                 "\"There is no memory to go on with the answer.\",\"param\":null}\n\n",
	                 (long long)response_next_number(h->r));
	http_stream_finish(h->x, text, (size_t)n);
}

static bool on_event(void *arg, const char *type, const struct buf *json)
{
	struct http_response *h = arg;
	enum status status;
	if (!h->streaming) {
		http_set_header(h->x, "Cache-Control", "no-cache");
		http_set_header(h->x, "X-Accel-Buffering", "no");
		if (http_stream_begin(h->x, 200, "text/event-stream; charset=utf-8") != STATUS_OK)
			return false;
		h->streaming = true;
	}
	buf_clear(&h->frame);
	buf_printf(&h->frame, "event: %s\ndata: ", type);
	buf_append(&h->frame, json->data, json->len);
	buf_puts(&h->frame, "\n\n");
	status = json->failed || h->frame.failed ? STATUS_NOMEM : http_stream_write(h->x, h->frame.data, h->frame.len);
	if (status == STATUS_NOMEM)
		end_without_memory(h);
	return status == STATUS_OK;
}

static void on_refused(void *arg, const struct failure *f)
{
	struct http_response *h = arg;
	reply_failure_unlogged(h->x, f); /* the generation has its line */
}

static void on_stream_ended(void *arg)
{
	struct http_response *h = arg;
	http_stream_end(h->x);
}

static void on_whole(void *arg)
{
	struct http_response *h = arg;
	struct buf body = BUF_INIT;
	response_write(h->r, &body);
	reply_json(h->x, 200, &body);
}

static const struct response_sink stream_sink = {.event = on_event, .refused = on_refused, .ended = on_stream_ended};
static const struct response_sink whole_sink = {.event = NULL, .refused = on_refused, .ended = on_whole};

static void on_close(struct http_exchange *x, void *arg)
{
	struct http_response *h = arg;
	(void)x;
	response_destroy(h->r);
	buf_free(&h->frame);
	free(h);
}

static void start(struct app *a, struct http_exchange *x, struct response_request *q, struct history *base)
{
	struct http_response *h = calloc(1, sizeof *h);
	struct generation_origin origin = {
		.method = "POST", .path = "/v1/responses", .peer = http_peer(x), .request_id = http_request_id(x)};
	const struct response_sink *sink = q->params.stream ? &stream_sink : &whole_sink;
	struct error err = {0};

	if (h)
		h->r = response_create(a, q, sink, h, &origin, NULL);
	if (!h || !h->r) {
		free(h);
		error_set(&err, STATUS_NOMEM, "There is no memory for the request.");
		reply_error(x, &err);
		return;
	}
	h->app = a;
	h->x = x;
	if (response_start(h->r, base, NULL, &err) != STATUS_OK) {
		response_destroy(h->r);
		free(h);
		reply_error(x, &err);
		return;
	}
	http_on_close(x, on_close, h);
}

void response_request_read(struct app *a, struct http_exchange *x, const char *missing,
                           void (*begin)(struct app *a, struct http_exchange *x, struct response_request *q,
                                         struct history *base))
{
	struct json_doc *doc;
	struct json root, model;
	struct response_request q = {0};
	struct stored *base = NULL;
	struct error err = {0};
	struct failure f;

	if (!app_accepts(a, &f)) {
		reply_failure(x, &f);
		return;
	}
	if (!read_body(x, false, &doc, &root))
		return;
	model = json_get(&root, "model");
	if (!app_serves(a, &model, &f)) {
		reply_failure(x, &f);
	} else if (response_request_parse(&q, a->engine, http_principal(x), &root, http_header(x, "x-session-token"),
	                                  &err) != STATUS_OK) {
		reply_error(x, &err);
	} else if (q.previous_id[0] && !(base = store_find(&a->store, http_principal(x), str_from(q.previous_id)))) {
		failure_set(&f, FAILURE_NO_PREVIOUS, "previous_response_id", "There is no response '%s' to %s",
			    q.previous_id, missing);
		reply_failure(x, &f);
	} else {
		begin(a, x, &q, base ? base->history : NULL);
	}
	response_request_free(&q);
	json_doc_free(doc);
}

void api_responses(struct http_exchange *x, void *app)
{
	response_request_read(app, x,
			      "continue: it was not stored, or had to make room; send the whole conversation as input.",
			      start);
}

void api_responses_plain_get(struct http_exchange *x, void *app)
{
	struct buf body = BUF_INIT;
	(void)app;
	http_set_header(x, "Upgrade", "websocket");
	failure_write_plain(&body, 426, "upgrade_required",
			    "GET /v1/responses opens a WebSocket; send POST for a response over HTTP.");
	reply_json(x, 426, &body);
}
