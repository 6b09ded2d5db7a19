/*
 * WebSocket as the API files see it. ws.c is the only file that knows libwebsockets.
 *
 * All of this runs on the loop thread. A connection stays valid until its closed callback returns. Pings go out every
 * config.ws_ping_interval; a connection that does not answer within config.ws_ping_timeout is closed. Messages are
 * whole, valid UTF-8 text of at most config.max_body bytes; anything else is closed with the code RFC 6455 names.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/base/str.h"

struct ws_conn;

/* Why a connection is closed (RFC 6455, 7.4.1, and the IANA registry it names). */
enum ws_close_code { WS_CLOSE_POLICY = 1008, WS_CLOSE_SERVICE_RESTART = 1012 };

struct ws_app {
	void *app;
	void (*opened)(struct ws_conn *c, void *app);
	void (*message)(struct ws_conn *c, struct str text, void *app);
	/* Any frame of the peer, pongs included: a heartbeat. */
	void (*alive)(struct ws_conn *c, void *app);
	/* All that was queued has been handed to the kernel; may be NULL. */
	void (*drained)(struct ws_conn *c, void *app);
	void (*closed)(struct ws_conn *c, void *app);
};

/*
 * Queues one text message (copied; an empty one is none). LIMIT when more than config.stream_buffer bytes are unread:
 * the connection is then dropped.
 */
enum status ws_send(struct ws_conn *c, const char *text, size_t n);
/* Bytes that the client has left unread, as far as they are queued here. */
size_t ws_unread(const struct ws_conn *c);
/* Sends what is queued, then a close frame. `closed` follows. */
void ws_close(struct ws_conn *c, int code, const char *reason);
void ws_set_user(struct ws_conn *c, void *user);
void *ws_user(const struct ws_conn *c);
const char *ws_peer(const struct ws_conn *c);
/* Who opened it: what http_set_principal() said of the request that did. */
int32_t ws_principal(const struct ws_conn *c);
