/*
 * One client connection: reads its socket, checks the framing of all that comes, and relays what passes to
 * libmicrohttpd or libwebsockets.
 *
 * Why there is something in front of libmicrohttpd. Its Debian 12 version (0.9.75) accepts requests that have two
 * readings, answers some errors in HTML, reads pipelined requests before anything of ours sees them, has no deadline
 * for a slow request, and neither times out nor notices a disconnect while a request is suspended. So it is given one
 * end of a socket pair instead of the client's socket. The other end is here, and gets the bytes of one request at a
 * time, unchanged, as far as they were found clean (head.h); the answer's bytes go the other way. libwebsockets is
 * treated alike, frame by frame (frame.h). What that gives, on the first request and on every later one of the
 * connection:
 *
 * - libmicrohttpd sees only requests with one reading, and never two at once;
 * - refusals are ours, in JSON, and the connection closes without losing them (lingering close);
 * - deadlines for head, body, idleness and a client that does not read are timers here;
 * - a client that leaves is noticed in the loop iteration in which its FIN or RST arrives, whatever its request does;
 * - a WebSocket can be opened by any request of a connection.
 *
 * It costs two more descriptors per connection that has work in progress, and one copy in the kernel; an idle one gives
 * them back (KEEP_LINK_MS, conn_park.h). Back pressure passes through: while the client does not read, the pair is not
 * drained, libmicrohttpd is not asked for more, and the exchange's bounded queue fills (stream.h).
 *
 * Half-close: a client that shuts down its sending side while its answer is still being worked on counts as gone. That
 * is how a closed socket looks from here, and not computing for nobody is worth more than the rare client that does so
 * and waits. An answer that is complete when the FIN is seen is still delivered.
 */
#pragma once

#include <uv.h>

#include "server/http_mhd.h"
#include "server/listener.h"
#include "server/meter.h"

struct clock;
struct tls_context;
struct ws_server;

enum { CONN_SITE_BYTES = 16, CONN_SITE_SLOTS = 1024 };

/* Where a client is. */
struct conn_peer {
	/* what a client has for itself: an IPv4 address, the first 64 bits of an IPv6 one */
	uint8_t site[CONN_SITE_BYTES];
	char name[72];                 /* address and port, for the log */
};

/* What all connections of a listener share. */
struct conn_host {
	uv_loop_t *loop;
	const struct config *config;
	struct tls_context *tls; /* NULL: without */
	struct http_server *http;
	struct ws_server *ws;
	struct list conns;
	struct list by_site[CONN_SITE_SLOTS]; /* the same by a hash of the peer's site */
	int32_t n_conns;     /* in the list */
	/* socket pairs between us and the libraries; as many as there are descriptors for */
	int32_t n_pairs, max_pairs;
	struct list awake, to_wake, waking; /* WebSockets by their state (conn_park.h), the longest in it first */
	int32_t n_parked;
	int64_t woken_ms; /* when one was woken last */
	uv_timer_t park_timer;
	uv_prepare_t park_turns;
	uint32_t turn; /* of the loop */
	const struct clock *clock; /* for parking */
	int32_t n_exchanges; /* requests whose head is there and whose answer is not delivered */
	bool draining;
	struct listener_stats stats;	       /* the counters; the gauges are computed */
	struct meter meter;
	void (*empty)(struct conn_host *host); /* the last connection's memory is free; may be NULL */
	char scratch[65536];
};

/* Before the first connection. */
void conn_host_init(struct conn_host *host, uv_loop_t *loop, const struct config *config);
/*
 * Takes over an accepted, non-blocking socket (closed in any case). With `full` it is answered 503 and closed, with 429
 * when its site has as many connections as one may have, and just closed when it goes on to ask. NOMEM or IO when it
 * could not be served.
 */
enum status conn_open(struct conn_host *host, int fd, const struct conn_peer *from, bool full);
/* Connections that have not sent their first request yet, or only a part of one. */
int32_t conn_count_expected(const struct conn_host *host);
/* Closes every kept-alive connection that waits for a further request. */
void conn_close_idle(struct conn_host *host);
/* Drops everything. */
void conn_close_all(struct conn_host *host);
