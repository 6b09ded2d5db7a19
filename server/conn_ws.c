/* WebSocket: frames checked on their way to libwebsockets, which has the other end of a socket pair. See conn.h and
 * frame.h. */
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

/* Without a library behind: the bytes left of p[0..n), which begin with a frame for it, or 0. */
static size_t receive_quietly(struct conn *c, const uint8_t *p, size_t n)
{
	struct frame_error err;
	size_t used, n_held;
	uint64_t before = c->frames.frames;
	bool fine = frame_check_quiet(&c->frames, p, n, &used, &err);
	/* After our close frame the client may still send what it had begun: only its own close matters. */
	if (fine && c->park.state == PARK_CLOSING && used < n)
		fine = frame_check_feed(&c->frames, p + used, n - used, &n_held, &used, &err);
	if (!fine) {
		conn_park_end(c, err.code, err.reason);
		return 0;
	}
	if (c->frames.frames != before)
		ws_conn_alive(c->ws);
	if (c->frames.closed)
		conn_park_closed(c);
	return c->state != CONN_WS || c->park.state == PARK_CLOSING ? 0 : n - used;
}

void conn_ws_receive(struct conn *c, const char *bytes, size_t n)
{
	const uint8_t *p = (const uint8_t *)bytes;
	struct frame_error err;
	size_t n_held, used;

	if (!c->ws)
		return; /* closed from our side; what still comes is thrown away */
	if (c->park.state == PARK_PARKED || c->park.state == PARK_CLOSING || c->frames.quiet) {
		size_t left = receive_quietly(c, p, n);
		p += n - left;
		n = left;
		if (n == 0)
			return;
	}
	uint64_t before = c->frames.frames, pongs = c->frames.pongs;
	if (!frame_check_feed(&c->frames, p, n, &n_held, &used, &err)) {
		if (c->park.state == PARK_AWAKE)
			ws_conn_refuse(c->ws, err.code, err.reason);
		else
			conn_park_end(c, err.code, err.reason);
		return;
	}
	if (!pass_on(c, c->frames.held, n_held) || !pass_on(c, p, used)) {
		conn_drop(c);
		return;
	}
	if (c->frames.frames - before != c->frames.pongs - pongs || !frame_check_at_rest(&c->frames))
		conn_park_active(c);
	if (c->frames.frames != before)
		ws_conn_alive(c->ws);
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
