/* libwebsockets on the libuv loop, as the connections and the listener use it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "config/config.h"
#include "server/listener.h"
#include "server/meter.h"
#include "server/ws.h"

struct conn;
struct ws_server;

/* stats->dropped_slow is counted up. All pointers must outlive the server. */
enum status ws_server_create(uv_loop_t *loop, const struct config *config, const struct ws_app *app,
                             struct listener_stats *stats, struct meter *meter, struct ws_server **out,
                             struct error *err);
/*
 * Gives libwebsockets fd, one end of a non-blocking socket pair (closed in any case), for a connection whose upgrade
 * request was read, checked and dispatched: 101 is answered through it. key is the request's Sec-WebSocket-Key,
 * principal what dispatch said of it. NULL when it failed.
 */
struct ws_conn *ws_server_adopt(struct ws_server *s, int fd, struct conn *conn, const char *peer, const char *key,
				int32_t principal);
/* The peer sent a whole frame of any kind. */
void ws_conn_alive(struct ws_conn *c);
/*
 * It sent a ping, which is to be answered: one of several may be the only one that is, if it does not read (RFC
 * 6455, 5.5.3).
 */
void ws_conn_pong(struct ws_conn *c, const void *payload, size_t n);
/* The peer broke the rules: closes with this code, at once. Nothing may be sent through the pair any more. */
void ws_conn_refuse(struct ws_conn *c, int code, const char *reason);
/* The client is gone: `closed` runs before this returns, and nothing more is heard of c. */
void ws_conn_drop(struct ws_conn *c);
/*
 * Parking (conn_park.h). Silent: nothing is queued or half received, and no end has begun. Unlinking lets go of
 * libwebsockets while c lives on; linking gives it fd, one end of a new pair (closed in any case), with a handshake
 * whose answer the client is not to see. False: no memory; all is as before.
 */
bool ws_conn_is_silent(const struct ws_conn *c);
void ws_conn_unlink(struct ws_conn *c);
bool ws_conn_link(struct ws_conn *c, int fd);

/* What conn.c offers: the WebSocket has ended and c is no longer valid. With `reset` its output is thrown away. */
void conn_ws_ended(struct conn *conn, bool reset);
/* Something is to be sent: a parked one wakes. */
void conn_ws_active(struct conn *conn);
/* libwebsockets gave up on what ws_conn_link() gave it. */
void conn_ws_unlinked(struct conn *conn);
/* There is nobody behind the connection: these send on the client's own socket. False: it is broken. */
bool conn_ws_is_parked(const struct conn *conn);
bool conn_ws_ping(struct conn *conn);
bool conn_ws_close(struct conn *conn, int code, const char *reason);
/* The payload of the client's close frame, after it has come. */
size_t conn_ws_close_payload(const struct conn *conn, const void **payload);

int32_t ws_server_count(const struct ws_server *s);
/* As ws_close(), for every connection. */
void ws_server_close_all(struct ws_server *s, int code, const char *reason);
/* Drops what is still open. `closed` runs from the loop when the last handle is gone and *s is freed. */
void ws_server_close(struct ws_server *s, void (*closed)(void *arg), void *arg);
