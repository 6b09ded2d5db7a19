/*
 * The Responses API over a WebSocket. One connection has lanes, named by stream_id; the responses of a lane run one
 * after the other, lanes run side by side. A lane keeps its latest response with the whole conversation, which any lane
 * of the connection may continue, and an engine session that holds its KV.
 */
#pragma once

#include <stdint.h>

#include "server/ws.h"

struct app;
struct compact_note;

enum {
	LANES_MAX = 32,		  /* lanes of a connection, the unnamed one included */
	LANES_MAX_IN_FLIGHT = 16, /* its responses that run or wait */
	LANES_MAX_NAME = 256,
};

/* struct ws_app's callbacks. */
void lanes_opened(struct ws_conn *c, void *app);
void lanes_message(struct ws_conn *c, struct str text, void *app);
void lanes_alive(struct ws_conn *c, void *app);
void lanes_drained(struct ws_conn *c, void *app);
void lanes_closed(struct ws_conn *c, void *app);

/* A compaction of a session begins or has ended: clients that watch the session are told. */
void lanes_note_compaction(struct app *a, int32_t tenant, const char *session, const struct compact_note *note);
/* The app drains: see app_start_drain(). */
void lanes_drain(struct app *a);
