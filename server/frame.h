/*
 * The rules for WebSocket frames from a client (RFC 6455, section 5), checked on the raw bytes before libwebsockets
 * sees them: every frame masked, no reserved bits or opcodes, the shortest length encoding, small whole control frames,
 * fragments in order, a bounded message, a proper close frame. libwebsockets 4.1.6 accepts unmasked frames and overlong
 * lengths, echoes malformed close codes and refuses some that are fine, drops the connection without a close frame for
 * some of the rest, does not report a peer's pings, and answers only the first of several. So it is given no pings and
 * pongs: see frame_check_quiet().
 *
 * Whether text is UTF-8 is not looked at here: libwebsockets does that. Nothing here allocates; a frame may arrive in
 * any pieces.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Close codes of RFC 6455, 7.4.1. */
enum {
	WS_NORMAL = 1000,
	WS_PROTOCOL_ERROR = 1002,
	WS_UNSUPPORTED_DATA = 1003,
	WS_INVALID_PAYLOAD = 1007,
	WS_TOO_BIG = 1009,
	WS_INTERNAL_ERROR = 1011,
	WS_TRY_AGAIN_LATER = 1013, /* of the IANA registry */
};

enum { FRAME_MAX_HEADER = 14, FRAME_MAX_CONTROL = 125 };

/* Opcodes of control frames (RFC 6455, 11.8). */
enum { FRAME_CLOSE = 8, FRAME_PING = 9, FRAME_PONG = 10 };

struct frame_check {
	uint64_t max;			  /* bytes a message may have */
	uint64_t message;		  /* bytes of the message so far announced */
	uint64_t left;			  /* payload bytes of the current frame still to come */
	uint64_t frames;		  /* whose payload is complete */
	uint8_t header[FRAME_MAX_HEADER]; /* of the current frame; not passed on before it is whole and checked */
	uint8_t n_header;
	uint8_t held[FRAME_MAX_HEADER];
	uint8_t control[FRAME_MAX_CONTROL]; /* the payload of a close frame or a ping, unmasked */
	uint8_t n_control;
	bool in_payload;
	bool in_message; /* between the first fragment and the last */
	bool quiet;	 /* the current frame is one that frame_check_quiet() takes */
	bool pinged;	 /* it has taken a ping, which is to be answered; the caller clears it */
	bool closed;	 /* a close frame came, or a rule was broken: nothing may follow */
};

struct frame_error {
	int code;	    /* to close with */
	const char *reason; /* static */
};

void frame_check_init(struct frame_check *f, uint64_t max);
/*
 * Looks at p[0..n). True: first f->held[0..*n_held), which earlier calls were given, and then p[0..*used) may be passed
 * on; the rest was the beginning of a header, which is kept, or followed a close frame and is to be thrown away; or, if
 * frame_check_beats() says so, it begins with a ping or pong. False: *err says how to close; nothing may be passed on
 * any more.
 */
bool frame_check_feed(struct frame_check *f, const uint8_t *p, size_t n, size_t *n_held, size_t *used,
		      struct frame_error *err);
/*
 * The same for what is not passed on: pings and pongs, and with `close_too`, for a connection with nobody behind it
 * (see conn_park.h), a close frame. *used bytes were theirs; it stops at the first byte of any other frame, for
 * frame_check_feed(), and behind a ping, with f->pinged set. After a ping or close frame f->control[0..f->n_control) is
 * its payload; after the latter f->closed is set.
 */
bool frame_check_quiet(struct frame_check *f, bool close_too, const uint8_t *p, size_t n, size_t *used,
		       struct frame_error *err);
/* Whether a frame that begins, or has begun, and goes on with this byte is a ping or pong. */
bool frame_check_beats(const struct frame_check *f, uint8_t next);
/* No frame, and no message of several, has begun and not ended. */
bool frame_check_at_rest(const struct frame_check *f);

/* Writes a server's control frame, n <= FRAME_MAX_CONTROL bytes of payload, to out; returns its size. */
size_t frame_put_control(uint8_t out[2 + FRAME_MAX_CONTROL], int opcode, const void *payload, size_t n);
/* A close frame. The reason is cut, between code points, to what fits; NULL: none. */
size_t frame_put_close(uint8_t out[2 + FRAME_MAX_CONTROL], int code, const char *reason);
