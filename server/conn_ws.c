/*
 * WebSocket: frames checked on their way to libwebsockets, which has the other end of a socket pair. See conn.h and
 * frame.h.
 */
#include "server/conn_impl.h"
#include "server/ws_memory.h"
#include "server/ws_server.h"

void conn_ws_begin(struct conn *c)
{
	int theirs;
	char key[HEAD_WS_KEY + 1];
	int32_t principal = c->link ? c->link->principal : 0;
	memcpy(key, c->head.ws_key, sizeof key);

	/* libmicrohttpd has let go of the request; now let go of libmicrohttpd. */
	conn_close_pair(c);
	if (c->state == CONN_CLOSED)
		return;
	struct buf early = c->in; /* frames sent before the handshake was answered */
	c->in = BUF_INIT;
	if (!ws_memory_reserve() || !conn_open_pair(c, &theirs)) {
		conn_refuse(c,
			    &(struct head_error){503, "server_overloaded",
						 "The server has no descriptors or memory left for this WebSocket."});
		goto done;
	}
	conn_set_state(c, CONN_WS);
	c->input_waits = false;
	conn_set_deadline(c, -1);
	frame_check_init(&c->frames, (uint64_t)c->host->config->max_body);
	conn_park_begin(c);
	c->ws = ws_server_adopt(c->host->ws, theirs, c, c->peer.name, key, principal);
	if (!c->ws)
		conn_drop(c);
	else if (early.len)
		conn_ws_receive(c, early.data, early.len);
done:
	buf_free(&early);
}

/* Passes bytes on: to the pair, or, as long as there is none, to the backlog for it. */
static bool pass_on(struct conn *c, const void *p, size_t n)
{
	if (c->pair)
		return conn_send(c->pair->fd, NULL, &c->up, p, n);
	buf_append(&c->up.bytes, p, n);
	return !c->up.bytes.failed;
}

static void violated(struct conn *c, const struct frame_error *err)
{
	if (c->park.state == PARK_AWAKE)
		ws_conn_refuse(c->ws, err->code, err->reason);
	else
		conn_park_end(c, err->code, err->reason);
}

/*
 * Pings and pongs, which are never passed on, and a close frame while there is nobody behind: *used bytes of p[0..n).
 * False: the rest is nobody's any more.
 */
static bool take_quietly(struct conn *c, const uint8_t *p, size_t n, size_t *used)
{
	struct frame_error err;
	uint64_t before = c->frames.frames;
	bool alone = c->park.state == PARK_PARKED || c->park.state == PARK_CLOSING;
	if (!frame_check_quiet(&c->frames, alone, p, n, used, &err)) {
		violated(c, &err);
		return false;
	}
	if (c->frames.frames != before)
		ws_conn_alive(c->ws);
	if (c->frames.pinged) {
		c->frames.pinged = false;
		if (c->park.state == PARK_AWAKE)
			ws_conn_pong(c->ws, c->frames.control, c->frames.n_control);
		else
			conn_park_pong(c);
	}
	if (c->frames.closed && alone && c->state == CONN_WS)
		conn_park_closed(c);
	return c->state == CONN_WS && c->ws;
}

/* The beginning of p[0..n), up to the next ping or pong, to whom it concerns: *used bytes. False: as above. */
static bool take_frames(struct conn *c, const uint8_t *p, size_t n, size_t *used)
{
	struct frame_error err;
	size_t n_held;
	uint64_t before = c->frames.frames;
	if (!frame_check_feed(&c->frames, p, n, &n_held, used, &err)) {
		violated(c, &err);
		return false;
	}
	/* After our close frame the client may still send what it had begun: only its own close matters. */
	if (c->park.state == PARK_CLOSING) {
		if (c->frames.closed)
			conn_park_closed(c);
		return c->state == CONN_WS && c->ws;
	}
	if (!pass_on(c, c->frames.held, n_held) || !pass_on(c, p, *used)) {
		conn_drop(c);
		return false;
	}
	conn_park_active(c);
	if (c->frames.frames != before)
		ws_conn_alive(c->ws);
	return c->state == CONN_WS && c->ws;
}

void conn_ws_receive(struct conn *c, const char *bytes, size_t n)
{
	const uint8_t *p = (const uint8_t *)bytes;
	size_t used;
	/* Without c->ws it was closed from our side; what still comes is thrown away. */
	while (c->ws && n && !c->frames.closed) {
		if (!take_quietly(c, p, n, &used))
			return;
		p += used;
		n -= used;
		if (n == 0 || c->frames.closed || frame_check_beats(&c->frames, *p))
			continue;
		if (!take_frames(c, p, n, &used))
			return;
		if (used == n || !frame_check_beats(&c->frames, p[used]))
			return;
		p += used;
		n -= used;
	}
}

void conn_ws_pump(struct conn *c)
{
	if (!conn_pump(c) || !c->pair || !c->pair->ended)
		return;
	if (c->park.state == PARK_WAKING)
		conn_park_failed(c);
	else
		conn_linger(c);
}
