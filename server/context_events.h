/*
 * session.context events, for WebSocket clients that ask for them:
 *
 *     {"type":"session.update","context_events":true}                     of the sessions of this connection's lanes
 *     {"type":"session.update","context_events":true,"session_id":"tea"}  of one session of the same API key
 *
 * and false to end that. Each is answered by session.updated, and from then on
 *
 *     {"type":"session.context","session_id":"tea","tokens":512,"pages_by_tier":{...},"moved":{...},...}
 *
 * comes whenever what the session has of the KV cache changes, within 120 ms and at most ten times a second for each
 * session; and
 * {"type":"session.context","session_id":"tea","compaction":{"state":"started",...}} when its older turns are
 * summarised (compact.h). The engine's worker tells of changes by itself (engine_session_watch()), so nothing is
 * polled.
 *
 * A client that does not read gets no more of them until it has read what it was sent: then the latest one of each
 * session.
 */
#pragma once

#include "server/api.h"
#include "server/compact.h"

enum {
	CONTEXT_EVENTS_MAX = 64,       /* sessions that a connection watches */
	CONTEXT_EVENTS_UNREAD = 16384, /* bytes that a client may leave unread before they wait */
};

/* What a connection watches. */
struct context_events {
	struct app *app;
	struct ws_conn *ws;
	int32_t tenant;
	bool lanes;	 /* the sessions of all its lanes */
	struct list all; /* struct watch.link */
	int n;
};

void context_events_init(struct context_events *c, struct app *a, struct ws_conn *ws, int32_t tenant);
/* Ends all. */
void context_events_clear(struct context_events *c);
/* A lane uses this session: it is watched if lanes are. */
void context_events_lane(struct context_events *c, const char *session);
/* Watches one; LIMIT when there are too many, NOMEM. */
enum status context_events_add(struct context_events *c, const char *session, struct error *err);
void context_events_remove(struct context_events *c, const char *session);
/* The client has read all it was sent. */
void context_events_drained(struct context_events *c);
/* A compaction of the session begins or has ended. */
void context_events_compaction(struct context_events *c, int32_t tenant, const char *session,
			       const struct compact_note *note);
