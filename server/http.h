/*
 * HTTP as the API files see it. http.c is the only file that knows libmicrohttpd.
 *
 * All of this runs on the loop thread. An exchange is one request and its answer. It is given to the route's handler
 * once the whole body is there, and stays valid until its on_close callback has run; a handler that answers later keeps
 * the pointer and registers on_close to learn that it must let go (the client left, or the answer has been sent or
 * dropped). Answering from within the handler is allowed, and so is answering from any later callback on the loop.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "config/config.h"
#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/base/str.h"

struct http_exchange;

enum http_method { HTTP_GET, HTTP_POST, HTTP_DELETE, HTTP_PUT, HTTP_PATCH, HTTP_OPTIONS, HTTP_HEAD };

/* What was asked. Strings live as long as the exchange; absent ones have p == NULL. Header names ignore case. */
enum http_method http_method(const struct http_exchange *x);
struct str http_path(const struct http_exchange *x); /* decoded, without the query */
struct str http_header(const struct http_exchange *x, const char *name);
struct str http_query(const struct http_exchange *x, const char *name);
struct str http_param(const struct http_exchange *x, const char *name); /* from the route pattern: {id} */
struct str http_body(const struct http_exchange *x);
const char *http_peer(const struct http_exchange *x); /* "127.0.0.1:5123" */
/* The id in the x-request-id response header: the client's if it is sane, else a fresh one. */
const char *http_request_id(const struct http_exchange *x);

/*
 * Who asks: a number that dispatch gives, and that a WebSocket opened here has as well (ws_principal()). 0 unless it is
 * set.
 */
void http_set_principal(struct http_exchange *x, int32_t principal);
int32_t http_principal(const struct http_exchange *x);

/* State of the owner of this exchange, e.g. the generation it waits for. */
void http_set_user(struct http_exchange *x, void *user);
void *http_user(const struct http_exchange *x);
/* Called exactly once, when the exchange ends for whatever reason; it must not be used afterwards. */
void http_on_close(struct http_exchange *x, void (*cb)(struct http_exchange *x, void *arg), void *arg);

/* Adds a response header; before the answer begins. Name and value are copied. */
void http_set_header(struct http_exchange *x, const char *name, const char *value);
/*
 * The whole answer. Takes the content of body (which is then empty). At most one answer per exchange; later ones are
 * ignored.
 */
void http_reply(struct http_exchange *x, int status, const char *content_type, struct buf *body);

/*
 * A streamed answer. Each write is queued whole and sent as the client reads; it is delivered in one piece. LIMIT when
 * the client has left more than config.stream_buffer bytes unread: the exchange is then dropped (on_close follows,
 * later, from the loop). NOMEM: this piece is not queued, and the stream is to be ended by http_stream_finish().
 */
enum status http_stream_begin(struct http_exchange *x, int status, const char *content_type);
enum status http_stream_write(struct http_exchange *x, const void *data, size_t n);
void http_stream_end(struct http_exchange *x);
/*
 * The last piece and the end. Without memory for the piece the connection breaks off, so that nothing looks complete.
 */
void http_stream_finish(struct http_exchange *x, const void *data, size_t n);
/* Bytes queued and not yet handed to the kernel. */
size_t http_stream_pending(const struct http_exchange *x);

/*
 * The client has taken all that was written: `drained` is called once, soon after. For answers that are longer than
 * what may be queued. At most one at a time.
 */
void http_on_drained(struct http_exchange *x, void (*drained)(struct http_exchange *x, void *arg), void *arg);
/* A streamed answer that cannot be completed: the connection is cut, so that the client does not take it for whole. */
void http_stream_abort(struct http_exchange *x);

/*
 * The body of a ROUTE_STREAMED route, piece by piece; n == 0 once: its end. Returns whether it was taken; if not, the
 * same bytes come again after http_body_resume(). What comes after an answer is thrown away. Set by the handler.
 */
void http_on_body(struct http_exchange *x, bool (*body)(struct http_exchange *x, const char *data, size_t n, void *arg),
                  void *arg);
void http_body_resume(struct http_exchange *x);

/* ---- Routes ---- */

enum route_flags {
	ROUTE_OPEN = 1, /* no API key needed: health, CORS preflight, the chat page */
	/*
	 * A WebSocket may be opened here: a GET that asks for one goes through dispatch (so the API key is checked) and
	 * then to ws_app instead of the handler, which sees only plain GETs (answer 426). Asking for one elsewhere gets
	 * 404.
	 */
	ROUTE_WEBSOCKET = 2,
	/*
	 * The handler runs when the head is there, and takes the body with http_on_body(); config.max_body does not
	 * hold.
	 */
	ROUTE_STREAMED = 4,
};

struct route {
	enum http_method method;
	const char *pattern; /* "/v1/sessions/{id}"; with and without a trailing slash; /v1 is optional where it begins
				so */
	void (*handler)(struct http_exchange *x, void *app);
	unsigned flags;
};

/* What http.c asks of the application. */
struct http_app {
	void *app; /* passed to handlers */
	/*
	 * Finds the route and sets its parameters with http_add_param(); answers 404 and 405 itself and returns NULL
	 * then. Also checks the API key. Called when the head is there, before the body is read.
	 */
	const struct route *(*dispatch)(struct http_exchange *x, void *app);
	/* Whether a request goes to a ROUTE_STREAMED route, by its target as it came; may be NULL: none does. */
	bool (*streams)(void *app, enum http_method method, struct str target);
	/* Appends an error body {"error":{...}} and returns its content type; used for refusals by http.c itself. */
	const char *(*error_body)(struct buf *out, int status, const char *code, const char *message);
};

/* For dispatch: sets a path parameter (copied). Ignored when there are more than 8. */
void http_add_param(struct http_exchange *x, const char *name, struct str value);
