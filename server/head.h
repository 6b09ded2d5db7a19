/*
 * The rules for a request's head and for the framing of its body, checked on the raw bytes before any library sees
 * them.
 *
 * What passes has exactly one reading: no two parsers can disagree about where a message ends. That is stricter than
 * RFC 9112 where the RFC lets a recipient choose: lines end in CRLF (a bare LF is refused), there is no folding, one
 * Content-Length of digits only, and no transfer coding but a lone "chunked". A proxy in front of us and the HTTP
 * library behind can therefore not be played against each other (request smuggling).
 *
 * Nothing here does I/O or allocates. Both parsers are fed as bytes arrive and never look at a byte twice, so a client
 * that sends its head one byte at a time costs no more than one that sends it whole.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/str.h"
#include "server/http.h"

enum head_result { HEAD_MORE, HEAD_DONE, HEAD_BAD };

enum head_framing { HEAD_NO_BODY, HEAD_SIZED, HEAD_CHUNKED };

/* Why something was refused; static strings. */
struct head_error {
	int status;	     /* HTTP status */
	const char *code;    /* for error.code */
	const char *message; /* one sentence */
};

enum {
	/*
	 * Header fields, query arguments and cookies together. libmicrohttpd makes a record of each in memory of a
	 * fixed size, and hangs (0.9.75) when that runs out.
	 */
	HEAD_MAX_FIELDS = 256,
	HEAD_WS_KEY = 24,	   /* base64 of 16 bytes (RFC 6455, 4.1) */
	BODY_MAX_OVERHEAD = 16384, /* chunk extensions and trailers of one message, in bytes */
};

struct head {
	/* Valid after HEAD_DONE. */
	size_t length; /* of the head in bytes, with the empty line */
	enum http_method method;
	size_t target_at, target_n; /* where the request target lies in the head */
	bool is_http11; /* else HTTP/1.0 */
	enum head_framing framing;
	uint64_t content_length; /* when HEAD_SIZED */
	bool keep_alive;	 /* what the client asks for */
	bool expects_continue;
	bool wants_websocket;	      /* a GET with Connection: upgrade and Upgrade: websocket */
	bool ws_version_ok;	      /* Sec-WebSocket-Version: 13 */
	char ws_key[HEAD_WS_KEY + 1]; /* "" when absent or malformed */

	/* The parser's own. */
	size_t at, line;
	uint32_t n_fields; /* as HEAD_MAX_FIELDS counts them */
	uint32_t seen;	   /* fields that may come only once */
	bool conn_close, conn_keep_alive, conn_upgrade;
	struct head_error error;
};

void head_init(struct head *h);
/*
 * Goes on with the head at p[0..n), where p[0..previous n) is what earlier calls were given. HEAD_BAD fills *err. A
 * head that is longer than max bytes is refused with 431.
 */
enum head_result head_feed(struct head *h, const char *p, size_t n, size_t max, struct head_error *err);

/* Follows a body through its framing. */
struct body {
	enum head_framing framing;
	uint64_t left;	/* bytes of data still to come: of the body, or of this chunk */
	uint64_t total; /* bytes of data in all chunks so far announced */
	uint64_t max;
	uint32_t overhead;
	uint8_t state, digits;
	bool trailer_colon;
	bool quoted, escaped; /* in a quoted string of a chunk extension; behind its backslash */
};

/* HEAD_BAD (413) when the head announces more than max bytes, HEAD_DONE when there is no body. */
enum head_result body_init(struct body *b, const struct head *h, uint64_t max, struct head_error *err);
/* Looks at p[0..n): *used bytes belong to this message. After HEAD_DONE the rest belongs to the next one. */
enum head_result body_feed(struct body *b, const char *p, size_t n, size_t *used, struct head_error *err);
