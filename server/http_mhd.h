/*
 * Between the connections (conn.c) and libmicrohttpd (http_mhd.c), and between the latter and the exchanges (http.c).
 *
 * libmicrohttpd never holds a client's socket. It is given one end of a socket pair; conn.c has the other end and the
 * client, and passes on one checked request at a time. See conn.h for why.
 */
#pragma once

#include <uv.h>

#include "config/config.h"
#include "engine/base/list.h"
#include "server/head.h"
#include "server/http.h"
#include "server/meter.h"
#include "server/stream.h"

struct MHD_Connection;
struct MHD_Response;
struct conn;
struct http_server;

/* One connection as libmicrohttpd has it. Lives from http_link_open() until libmicrohttpd has let go of its end. */
struct http_link {
	struct http_server *server;
	struct conn *conn; /* NULL once the client is gone */
	struct MHD_Connection *mhd;
	struct http_exchange *x; /* the one in progress, or NULL */
	struct list event_node;	 /* in server->events while events != 0 */
	unsigned events;
	size_t metered; /* libmicrohttpd's memory for it */
	int32_t principal; /* of the request in progress */
	char peer[72]; /* for http_peer(), also in on_close */
};

enum link_event {
	LINK_ANSWERED = 1, /* the answer is completely in the socket pair */
	LINK_UPGRADE = 2,  /* the request was dispatched: open a WebSocket instead of answering */
	LINK_SLOW = 4,	   /* the client left too much unread: drop it */
	LINK_FAILED = 8,   /* no memory, or the like: drop it */
};

/* All pointers must outlive the server. */
enum status http_server_create(uv_loop_t *loop, const struct config *config, const struct http_app *app,
                               struct meter *meter, struct http_server **out, struct error *err);
/* All connections must have been closed. `closed` runs from the loop when the last handle is gone and *s is freed. */
void http_server_close(struct http_server *s, void (*closed)(void *arg), void *arg);
/* From now on answers end their connection. */
void http_server_drain(struct http_server *s);
/* Runs libmicrohttpd in this iteration of the loop, after the current callbacks. */
void http_server_kick(struct http_server *s);
/* Runs it now, and delivers the events. Does nothing from within itself. */
void http_server_run(struct http_server *s);
const struct http_app *http_server_app(const struct http_server *s);

/* Hands fd, one end of a non-blocking socket pair, to libmicrohttpd: it is closed in any case. NULL: no memory. */
struct http_link *http_link_open(struct http_server *s, int fd, struct conn *conn);
/*
 * The client is gone, or refused. The exchange's on_close runs before this returns; nothing more is heard of the link.
 * The caller then closes its end of the pair.
 */
void http_link_close(struct http_link *l);
/* True while the handler of the request in progress has not finished its answer (or was not called yet). */
bool http_link_waiting(const struct http_link *l);
/* True once it has begun one. */
bool http_link_begun(const struct http_link *l);

/* What conn.c offers. */
void conn_event(struct conn *c, unsigned events); /* called outside of libmicrohttpd's callbacks */
const char *conn_peer(const struct conn *c);
const struct head *conn_head(const struct conn *c);

/* ---- The exchange, shared by http.c and http_mhd.c only ---- */

struct http_pair {
	struct http_pair *next;
	char *value; /* in text[] */
	char text[]; /* name, NUL, value, NUL */
};

struct http_exchange {
	struct http_link *link;
	struct MHD_Connection *mhd;
	const struct config *config;
	enum http_method method;
	struct str path; /* borrowed from libmicrohttpd's memory of this request */
	struct buf body;
	char request_id[64];
	const struct route *route;
	struct http_pair *params, *headers;
	int n_params;
	void *user;
	void (*on_close)(struct http_exchange *x, void *arg);
	void *on_close_arg;
	bool (*on_body)(struct http_exchange *x, const char *data, size_t n, void *arg);
	void *on_body_arg;
	void (*on_drained)(struct http_exchange *x, void *arg);
	void *on_drained_arg;

	struct MHD_Response *response; /* ready to be queued, or NULL */
	int status;
	struct stream out; /* of a streamed answer */
	size_t reply_bytes; /* of another */
	size_t metered;
	bool handled;	   /* the handler was called, and what takes the body knows of its end */
	bool answered;	   /* it has begun an answer */
	bool streaming, ended;
	bool suspended;
	bool gone;   /* on_close has run, or the client is being dropped */
	bool closed; /* on_close has run */
	bool starved; /* a parameter or header is missing for want of memory */
};

struct http_exchange *http_exchange_create(struct http_link *l, enum http_method method, const char *url);
/* Tells the meter what it holds. */
void http_exchange_measure(struct http_exchange *x);
/* Runs on_close, once. */
void http_exchange_close(struct http_exchange *x);
void http_exchange_free(struct http_exchange *x);
/* Answers with http_app.error_body. */
void http_exchange_refuse(struct http_exchange *x, int status, const char *code, const char *message);
/* Lets libmicrohttpd go on with a suspended exchange. */
void http_exchange_wake(struct http_exchange *x);
void http_link_post(struct http_link *l, unsigned event);
/* The answer that needs no memory, shared by all; http_response_free() leaves it alone. */
struct MHD_Response *http_server_out_of_memory(const struct http_server *s);
void http_response_free(struct MHD_Response *r, const struct http_server *s); /* NULL is allowed */
bool http_server_draining(const struct http_server *s);
struct meter *http_server_meter(const struct http_server *s);
