/*
 * The one port. A connection is accepted by libuv, its request head is peeked at without taking it, and its socket is
 * handed to ws.c when it asks for a WebSocket, else to http.c. Framing that the libraries would misread is refused here
 * or in http.c, before any handler runs.
 */
#pragma once

#include <uv.h>

#include "config/config.h"
#include "server/http.h"
#include "server/ws.h"

struct listener;

struct listener_stats {
	int32_t connections, websockets; /* open now */
	int32_t parked;			 /* of the WebSockets; see conn_park.h */
	int64_t client_bytes;		 /* see meter.h */
	uint64_t accepted, refused, dropped_slow;
};

/*
 * A connection needs one descriptor while it is idle, and three while it has work in progress: the client's, and a pair
 * between us and the library behind it. Raises the soft limit, which often is 1024, as far as the hard limit allows,
 * and lowers one in the billions, as containers have it: libwebsockets allocates by it. Where that is not enough for
 * three each, says what there is room for. Returns how many descriptors there will be at most. Before the first thread.
 */
int listener_allow_descriptors(const struct config *config);
/*
 * How so many descriptors are shared out: connections that are accepted at most, and pairs at most, each for one with
 * work in progress. Some are kept for files and the like. Connections come before pairs as long as a quarter of them
 * can have work at once.
 */
void listener_share_descriptors(const struct config *config, int64_t descriptors, int32_t *connections, int32_t *pairs);
/* Listens on config.host:config.port. Errors name the address. The config must outlive the listener. */
enum status listener_start(uv_loop_t *loop, const struct config *config, const struct http_app *http,
			   const struct ws_app *ws, struct listener **out, struct error *err);
/*
 * Reads the certificate and its key again (config.tls_cert, config.tls_key), for connections that come from now on. On
 * failure, as tls_context_create() says, all stays as it was. Without TLS there is nothing to do.
 */
enum status listener_reload_tls(struct listener *l, struct error *err);
/* The port in use (for port 0). */
int listener_port(const struct listener *l);
void listener_stats(const struct listener *l, struct listener_stats *out);
/* From now on every answer says that its connection ends with it, so that balancers and clients go elsewhere. */
void listener_drain(struct listener *l);
/*
 * Takes what already waits to be accepted, then stops. Open connections go on, except that kept-alive ones on which
 * nothing has come are closed.
 */
void listener_stop_accepting(struct listener *l);
/* Exchanges, WebSockets, and connections that have not said anything yet: what a drain waits for. */
int32_t listener_active(const struct listener *l);
/* Closes every WebSocket with `code` once its queue is sent. */
void listener_close_websockets(struct listener *l, int code, const char *reason);
/* Drops everything; `closed` runs (from the loop) when the last handle is gone and *l is freed. */
void listener_close(struct listener *l, void (*closed)(void *arg), void *arg);
