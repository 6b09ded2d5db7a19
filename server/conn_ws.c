/* WebSocket: frames checked on their way to libwebsockets, which has the other end of a socket pair. See conn.h and
 * frame.h. */
#include "server/conn_impl.h"
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
	if (!conn_open_pair(c, &theirs)) {
		conn_refuse(c,
			    &(struct head_error){503, "server_overloaded",
						 "The server has no descriptors or memory left for this WebSocket."});
		goto done;
	}
	conn_set_state(c, CONN_WS);
	c->input_waits = false;
	conn_set_deadline(c, -1);
	frame_check_init(&c->frames, (uint64_t)c->host->config->max_body);
	c->ws = ws_server_adopt(c->host->ws, theirs, c, c->peer.name, key, principal);
	if (!c->ws)
		conn_drop(c);
	else if (early.len)
		conn_ws_receive(c, early.data, early.len);
done:
	buf_free(&early);
}

void conn_ws_receive(struct conn *c, const char *p, size_t n)
{
	struct frame_error err;
	size_t n_held, used;
	uint64_t before = c->frames.frames;

	if (!c->ws)
		return; /* closed from our side; what still comes is thrown away */
	if (!frame_check_feed(&c->frames, (const uint8_t *)p, n, &n_held, &used, &err)) {
		ws_conn_refuse(c->ws, err.code, err.reason);
		return;
	}
	if (!conn_send(c->pair->fd, NULL, &c->up, (const char *)c->frames.held, n_held) ||
	    !conn_send(c->pair->fd, NULL, &c->up, p, used)) {
		conn_drop(c);
		return;
	}
	if (c->frames.frames != before)
		ws_conn_alive(c->ws);
}

void conn_ws_pump(struct conn *c)
{
	if (conn_pump(c) && c->pair->ended)
		conn_linger(c);
}
