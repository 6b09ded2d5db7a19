/*
 * Idle WebSockets are parked. One that is awake takes three descriptors: the client's socket, and the pair of sockets
 * behind which libwebsockets reads what conn_ws.c has checked. Most are idle most of the time; so one on which nothing
 * but heartbeats was said for config.ws_park_after gives back the pair, and libwebsockets' memory, and keeps the
 * client's socket. Who uses it (ws.h) notices nothing.
 *
 *   AWAKE    has its pair, and all bytes go through that.
 *   PARKED   has none. Our pings and pongs are written here; the client's, and a close frame of either side, need
 *            nobody behind the pair either (frame_check_quiet()). Another frame of the client's, or something to send,
 *            makes it QUEUED.
 *   QUEUED   is to wake, as soon as there are descriptors and memory. Meanwhile its client is not read any further than
 *            what has come, and what is to be sent waits in its queue. They wake in the order in which they came; after
 *            PARK_WAKE_MS in which none could be woken they are closed with 1013.
 *   WAKING   has a new pair, whose other end libwebsockets got together with a handshake of our own. The 101 that
 *            answers it is swallowed: the client had one long ago. When that is done it is AWAKE; a library that does
 *            not answer properly is a close with 1011.
 *   CLOSING  our close frame was sent from PARKED, and the client's is awaited (ws.c has the deadline).
 *
 * A violation of the client's, or a failure, while there is no way through libwebsockets is a close frame of our own
 * and the end.
 *
 * Only what may be awake at once needs three descriptors (listener.h). When that many are, whoever has been silent for
 * only PARK_PRESSED_MS is parked for those that wait and for new requests. All of it happens in conn_park_run(),
 * outside of libwebsockets' callbacks.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "engine/base/list.h"

struct conn;
struct conn_host;

enum {
	/* how long waking may take, and how long those in the queue wait while none can be woken */
	PARK_WAKE_MS = 5000,
	PARK_PRESSED_MS = 10, /* the silence that is enough when descriptors are short */
	PARK_HANDLES = 2,     /* that conn_park_host_close() closes */
};

enum park_state { PARK_AWAKE, PARK_PARKED, PARK_QUEUED, PARK_WAKING, PARK_CLOSING };

/* How much of the answer to our own handshake has come. */
struct park_answer {
	uint16_t n;	 /* bytes */
	uint8_t matched; /* of the CR LF CR LF that ends it */
	bool wrong;	 /* it is not a 101, or too long */
};

struct park {
	struct list node; /* of the host's list for the state, if that has one */
	enum park_state state;
	int64_t since_ms; /* in this state; AWAKE: the last sign of anything but heartbeats */
	uint32_t since_turn;
	bool failed;	  /* in WAKING: libwebsockets gave up */
	struct park_answer answer;
};

/* Returns how many of p[0..n) belong to the answer; it is whole when answer->matched is 4. */
size_t park_swallow(struct park_answer *answer, const char *p, size_t n);

/* The connection has become a WebSocket, and ceases to be one. */
void conn_park_begin(struct conn *c);
void conn_park_leave(struct conn *c);
/* The client has sent more than a heartbeat: wakes what is parked. */
void conn_park_active(struct conn *c);
/* libwebsockets gave up on a connection that was waking. */
void conn_park_failed(struct conn *c);
/* Bytes from the pair: how many of them the client is not to see. */
size_t conn_park_filter(struct conn *c, const char *p, size_t n);
/* Sends a close frame on the client's own socket, and then lingers. */
void conn_park_end(struct conn *c, int code, const char *reason);
/* The client's ping was taken, and nobody behind the pair writes: answers it. */
void conn_park_pong(struct conn *c);
/* The client's close frame was taken quietly: answers it, if ours was not sent before, and lingers. */
void conn_park_closed(struct conn *c);
/* Parks those that have been silent, if only for a moment, until a pair is free again or there are no more. */
void conn_park_make_room(struct conn_host *host);
/* Parks, wakes and gives up what is due; the host's timer calls it. */
void conn_park_run(struct conn_host *host);

/*
 * Before the first connection, and after the last. `closed` is called for each of the handles, whose data is the host.
 */
void conn_park_host_init(struct conn_host *host);
void conn_park_host_close(struct conn_host *host, uv_close_cb closed);
