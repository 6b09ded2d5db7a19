/* libwebsockets on the libuv loop, as conn.c and listener.c use it. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "config/config.h"
#include "server/listener.h"
#include "server/ws.h"

struct ws_server;

/* stats->dropped_slow is counted up. All pointers must outlive the server. */
enum status ws_server_create(uv_loop_t *loop, const struct config *config, const struct ws_app *app,
                             struct listener_stats *stats, struct ws_server **out, struct error *err);
/*
 * Takes over a client's socket (closed in any case) whose upgrade request was read, checked and dispatched: answers 101
 * and goes on from there. key is its Sec-WebSocket-Key; early[0..n_early) is what was read behind the request.
 */
void ws_server_adopt(struct ws_server *s, int fd, const char *peer, const char *key, const char *early, size_t n_early);
int32_t ws_server_count(const struct ws_server *s);
/* As ws_close(), for every connection. */
void ws_server_close_all(struct ws_server *s, int code, const char *reason);
/* Drops what is still open. `closed` runs from the loop when the last handle is gone and *s is freed. */
void ws_server_close(struct ws_server *s, void (*closed)(void *arg), void *arg);
