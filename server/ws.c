/* WebSocket by libwebsockets, on the libuv loop. See ws.h and ws_server.h. */
#include "server/ws.h"

#include <dlfcn.h>
#include <libwebsockets.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/list.h"
#include "engine/base/log.h"
#include "server/frame.h"
#include "server/stream.h"
#include "server/ws_memory.h"
#include "server/ws_server.h"

enum {
	CLOSE_MS = 5000,    /* how long a close handshake may take */
	SEND_ROUNDS = 16,   /* messages sent before other connections have their turn */
	RX_CHUNK = 4096,    /* libwebsockets hands over this much of a message at a time */
	PONGS_BYTES = 2048, /* of pongs that wait at most; then only the latest does */
	REASON_MAX = 123,   /* bytes of a close reason (RFC 6455, 5.5) */
	/*
	 * What libwebsockets 4.1.6 holds for a connection that is open: about 5 KiB, of which RX_CHUNK is the buffer of
	 * frames. It does not tell, so the meter takes this for it.
	 */
	LWS_BYTES = RX_CHUNK + 1024,
};

struct ws_conn {
	struct list node; /* in server->conns once open */
	struct list doomed_node;
	struct ws_server *server;
	struct conn *conn; /* NULL once it has let go */
	struct lws *wsi; /* NULL while parked */
	void *user;
	struct stream out;
	struct buf in;	    /* the message so far */
	struct buf pongs;   /* to be sent: for each the length of its payload, and that */
	int64_t ping_ms;    /* the last ping */
	int64_t closing_ms; /* since when */
	size_t metered;
	int close_code;
	bool open;		  /* `opened` was called, `closed` was not */
	bool linked;		  /* wsi is an open WebSocket */
	bool ping_due, ping_open; /* a ping is to be sent; was sent and not answered */
	bool closing;		  /* ws_close was called, or the peer broke the rules */
	bool close_sent;
	bool refused; /* by frame.c */
	bool throttled; /* the peer is not heard: it has asked for more than it has read */
	bool doomed;
	char close_reason[REASON_MAX + 1];
	int32_t principal;
	char peer[72];
};

struct ws_server {
	uv_loop_t *loop;
	const struct config *config;
	const struct ws_app *app;
	struct listener_stats *stats;
	struct meter *meter;
	struct lws_context *context;
	struct lws_vhost *vhost;
	struct list conns;
	struct list doomed;
	int32_t n_conns;
	struct ws_conn *adopting;
	uv_timer_t sweep;  /* pings and their deadlines */
	uv_timer_t reaper; /* drops doomed connections, outside of the callbacks that doomed them */
	int n_handles;
	bool closing;
	void (*closed)(void *arg);
	void *closed_arg;
};

static int64_t now_ms(void)
{
	return clock_now_ms(clock_system());
}

/* ---- Sending and closing ---- */

static void measure(struct ws_conn *c)
{
	meter_set(c->server->meter, &c->metered,
		  sizeof *c + (c->wsi ? LWS_BYTES : 0) + c->in.cap + c->pongs.cap + c->out.pending);
}

static void on_reap(uv_timer_t *handle);

/* Drops a connection soon, and its output with it: not now, for its memory is in use by whoever calls. */
static void doom(struct ws_conn *c)
{
	if (c->doomed)
		return;
	c->doomed = true;
	list_push_back(&c->server->doomed, &c->doomed_node);
	uv_timer_start(&c->server->reaper, on_reap, 0, 0);
}

/*
 * A peer that asks for much at once is not heard on until it has read half of what waits for it: the pair fills, and
 * conn.c reads no further. Only what comes by itself, such as an answer that is being generated, can then go over the
 * limit of the queue.
 */
static void throttle(struct ws_conn *c)
{
	bool full = c->out.pending > c->out.limit / (c->throttled ? 4 : 2);
	if (!c->linked || full == c->throttled)
		return;
	c->throttled = full;
	lws_rx_flow_control(c->wsi, !full);
}

enum status ws_send(struct ws_conn *c, const char *text, size_t n)
{
	if (!c->open || c->closing || c->doomed)
		return STATUS_CANCELLED;
	enum status status = stream_push(&c->out, text, n);
	if (status != STATUS_OK) {
		if (status == STATUS_LIMIT) {
			c->server->stats->dropped_slow++;
			log_msg(LOG_INFO, "slow_client", "%s left too much unread and was dropped", c->peer);
			doom(c);
		} else {
			ws_close(c, WS_INTERNAL_ERROR, "out of memory");
		}
		return status;
	}
	measure(c);
	throttle(c);
	conn_ws_active(c->conn);
	if (c->linked)
		lws_callback_on_writable(c->wsi);
	return STATUS_OK;
}

size_t ws_unread(const struct ws_conn *c)
{
	return c->out.pending;
}

void ws_close(struct ws_conn *c, int code, const char *reason)
{
	if (!c->open || c->closing)
		return;
	c->closing = true;
	c->closing_ms = now_ms();
	c->close_code = code;
	snprintf(c->close_reason, sizeof c->close_reason, "%s", reason ? reason : "");
	/* Cut inside a code point? A close reason must be valid UTF-8. */
	size_t n = strlen(c->close_reason);
	while (n && reason && reason[n] != '\0' && ((unsigned char)reason[n] & 0xC0) == 0x80)
		c->close_reason[--n] = '\0';
	if (c->linked) {
		lws_callback_on_writable(c->wsi);
	} else if (conn_ws_is_parked(c->conn)) {
		c->close_sent = true;
		if (!conn_ws_close(c->conn, code, c->close_reason))
			doom(c);
	}
}

void ws_set_user(struct ws_conn *c, void *user)
{
	c->user = user;
}

void *ws_user(const struct ws_conn *c)
{
	return c->user;
}

int32_t ws_principal(const struct ws_conn *c)
{
	return c->principal;
}

const char *ws_peer(const struct ws_conn *c)
{
	return c->peer;
}

/*
 * Sends the close frame. libwebsockets has a close of its own (lws_close_reason), but asked for in the writable
 * callback it sends nothing; so the frame is ours, and the peer's answer is seen in
 * LWS_CALLBACK_WS_PEER_INITIATED_CLOSE.
 */
static int send_close(struct ws_conn *c)
{
	unsigned char frame[LWS_PRE + 2 + FRAME_MAX_CONTROL];
	size_t n = frame_put_close(frame + LWS_PRE, c->close_code, c->close_reason);
	c->close_sent = true;
	if (lws_write(c->wsi, frame + LWS_PRE, n, LWS_WRITE_RAW) < 0)
		return -1;
	/* Nothing of a peer that broke the rules is read any more, so there is no answer to wait for. */
	return c->refused ? -1 : 0;
}

void ws_conn_refuse(struct ws_conn *c, int code, const char *reason)
{
	if (c->refused)
		return; /* once is enough: the close frame is on its way */
	c->refused = true;
	if (!c->open || c->close_sent) {
		doom(c);
		return;
	}
	/* A close that waits for its queue gives way. */
	stream_clear(&c->out);
	measure(c);
	c->closing = false;
	ws_close(c, code, reason);
}

void ws_conn_pong(struct ws_conn *c, const void *payload, size_t n)
{
	uint8_t length = (uint8_t)n;
	if (!c->linked || c->close_sent || c->doomed)
		return;
	if (c->pongs.len + 1 + n > PONGS_BYTES)
		buf_clear(&c->pongs);
	buf_append(&c->pongs, &length, 1);
	buf_append(&c->pongs, payload, n);
	if (c->pongs.failed)
		buf_free(&c->pongs); /* the peer may take it for dead; there is no memory for more */
	measure(c);
	lws_callback_on_writable(c->wsi);
}

/* As many as the kernel takes; with `all`, libwebsockets keeps the others, as it does with the rest of any message. */
static bool send_pongs(struct ws_conn *c, bool all)
{
	unsigned char pong[LWS_PRE + FRAME_MAX_CONTROL];
	size_t at = 0;
	while (at < c->pongs.len && (all || !lws_send_pipe_choked(c->wsi))) {
		size_t n = (uint8_t)c->pongs.data[at++];
		memcpy(pong + LWS_PRE, c->pongs.data + at, n);
		at += n;
		if (lws_write(c->wsi, pong + LWS_PRE, n, LWS_WRITE_PONG) < 0)
			return false;
	}
	if (at == c->pongs.len) {
		buf_free(&c->pongs);
		return true;
	}
	memmove(c->pongs.data, c->pongs.data + at, c->pongs.len - at);
	c->pongs.len -= at;
	lws_callback_on_writable(c->wsi);
	return true;
}

/* The next one. What the kernel does not take, libwebsockets keeps and sends before it asks for more. */
static bool send_message(struct ws_conn *c)
{
	size_t n;
	char *text = stream_front(&c->out, &n);
	if (lws_write(c->wsi, (unsigned char *)text, n, LWS_WRITE_TEXT) < (int)n)
		return false;
	stream_consume(&c->out, n);
	return true;
}

static int on_writable(struct ws_conn *c)
{
	size_t before = c->out.pending;
	if (c->close_sent)
		return 0;
	if (c->pongs.len && !send_pongs(c, false))
		return -1;
	if (c->ping_due) {
		unsigned char ping[LWS_PRE + 1];
		c->ping_due = false;
		c->ping_open = true;
		c->ping_ms = now_ms();
		if (lws_write(c->wsi, ping + LWS_PRE, 0, LWS_WRITE_PING) < 0)
			return -1;
	}
	for (int i = 0; i < SEND_ROUNDS && !lws_send_pipe_choked(c->wsi); i++) {
		if (!c->out.pending)
			break;
		if (!send_message(c))
			return -1;
		if (!c->out.pending && !c->closing && c->server->app->drained)
			c->server->app->drained(c, c->server->app->app);
	}
	measure(c);
	/* Its pong may be among what is not heard: that it reads is a sign of life as well. */
	if (c->throttled && c->out.pending < before)
		c->ping_ms = now_ms();
	throttle(c);
	if (c->closing && !c->out.pending && !lws_send_pipe_choked(c->wsi))
		return send_close(c);
	if (c->closing || c->out.pending)
		lws_callback_on_writable(c->wsi);
	return 0;
}

/* ---- Receiving ---- */

void ws_conn_alive(struct ws_conn *c)
{
	c->ping_open = false;
	if (c->open && !c->closing && !c->doomed && c->server->app->alive)
		c->server->app->alive(c, c->server->app->app);
}

/* A piece of a text message, which frame.c found to be in order and not too large. */
static int on_receive(struct ws_conn *c, const char *p, size_t n)
{
	if (c->closing || c->doomed)
		return 0; /* the peer may still be sending what it had begun */
	if (!meter_allows(c->server->meter, c->in.len + n, n)) {
		buf_free(&c->in);
		measure(c);
		ws_close(c, WS_TRY_AGAIN_LATER, "The server has no room for a message of this size now.");
		return 0;
	}
	buf_append(&c->in, p, n);
	measure(c);
	if (c->in.failed) {
		ws_close(c, WS_INTERNAL_ERROR, "There is no memory for the message.");
		return 0;
	}
	if (lws_remaining_packet_payload(c->wsi) || !lws_is_final_fragment(c->wsi))
		return 0;
	/* The handler gets the message and this connection a fresh buffer, so that idle ones hold none. */
	struct buf message = c->in;
	c->in = BUF_INIT;
	c->server->app->message(c, buf_str(&message), c->server->app->app);
	measure(c);
	buf_free(&message);
	return 0;
}

static void on_established(struct ws_conn *c)
{
	struct ws_server *s = c->server;
	c->linked = true;
	if (c->open) { /* it was parked */
		lws_callback_on_writable(c->wsi);
		return;
	}
	c->open = true;
	c->ping_ms = now_ms();
	list_push_back(&s->conns, &c->node);
	s->n_conns++;
	s->app->opened(c, s->app->app);
}

static void release(struct ws_conn *c)
{
	stream_clear(&c->out);
	buf_free(&c->in);
	buf_free(&c->pongs);
	meter_set(c->server->meter, &c->metered, 0);
	free(c);
}

static void on_gone(struct ws_conn *c)
{
	if (!c->open)
		return;
	c->open = false;
	list_remove(&c->node);
	list_remove(&c->doomed_node);
	c->server->n_conns--;
	c->server->app->closed(c, c->server->app->app);
}

/* libwebsockets is done with the connection; whoever else has it keeps it. */
static void on_destroyed(struct ws_conn *c)
{
	if (c->open && !c->linked) { /* it was to wake */
		c->wsi = NULL;
		measure(c);
		conn_ws_unlinked(c->conn);
		return;
	}
	on_gone(c);
	if (c->conn)
		conn_ws_ended(c->conn, false);
	release(c);
}

/*
 * The answer to our close frame ends the connection. A close of the peer's own is answered here, behind what was to be
 * sent before, with the same payload: libwebsockets would answer it first, and some codes that are fine with 1002.
 */
static int on_peer_closes(struct ws_conn *c)
{
	unsigned char frame[LWS_PRE + 2 + FRAME_MAX_CONTROL];
	const void *payload;
	bool fine = !c->close_sent && c->conn && send_pongs(c, true);
	while (fine && c->out.pending)
		fine = send_message(c);
	if (fine) {
		size_t n = conn_ws_close_payload(c->conn, &payload);
		n = frame_put_control(frame + LWS_PRE, FRAME_CLOSE, payload, n);
		c->close_sent = true;
		lws_write(c->wsi, frame + LWS_PRE, n, LWS_WRITE_RAW);
	}
	return -1;
}

static int on_event(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in, size_t n)
{
	struct ws_conn *c = wsi ? lws_get_opaque_user_data(wsi) : NULL;
	(void)user;

	switch (reason) {
	case LWS_CALLBACK_SERVER_NEW_CLIENT_INSTANTIATED: {
		struct ws_server *s = lws_context_user(lws_get_context(wsi));
		if (s->adopting) {
			s->adopting->wsi = wsi;
			lws_set_opaque_user_data(wsi, s->adopting);
			s->adopting = NULL;
		}
		return 0;
	}
	case LWS_CALLBACK_ESTABLISHED:
		if (!c)
			return -1;
		on_established(c);
		return 0;
	case LWS_CALLBACK_RECEIVE:
		return c ? on_receive(c, in, n) : -1;
	case LWS_CALLBACK_WS_PEER_INITIATED_CLOSE:
		return c ? on_peer_closes(c) : -1;
	case LWS_CALLBACK_SERVER_WRITEABLE:
		return c ? on_writable(c) : -1;
	case LWS_CALLBACK_CLOSED:
		if (c)
			on_gone(c);
		return 0;
	case LWS_CALLBACK_WSI_DESTROY:
		if (c) {
			lws_set_opaque_user_data(wsi, NULL);
			on_destroyed(c);
		}
		return 0;
	case LWS_CALLBACK_HTTP:
		return -1; /* only upgrades come here */
	default:
		return 0;
	}
}

static void on_reap(uv_timer_t *handle)
{
	struct ws_server *s = handle->data;
	struct list *node;
	while ((node = list_pop_front(&s->doomed))) {
		struct ws_conn *c = list_entry(node, struct ws_conn, doomed_node);
		struct conn *conn = c->conn;
		ws_conn_drop(c);
		if (conn)
			conn_ws_ended(conn, true);
	}
}

void ws_conn_drop(struct ws_conn *c)
{
	c->conn = NULL;
	on_gone(c); /* now, whatever libwebsockets thinks has still to be done */
	if (c->wsi)
		lws_set_timeout(c->wsi, PENDING_TIMEOUT_USER_OK, LWS_TO_KILL_SYNC);
	else
		release(c);
}

bool ws_conn_is_silent(const struct ws_conn *c)
{
	return c->linked && !c->throttled && !c->closing && !c->doomed && !c->out.pending && !c->in.len &&
	       !c->pongs.len && !c->ping_due && !lws_send_pipe_choked(c->wsi);
}

void ws_conn_unlink(struct ws_conn *c)
{
	struct lws *wsi = c->wsi;
	c->wsi = NULL;
	c->linked = c->throttled = false;
	lws_set_opaque_user_data(wsi, NULL); /* its callbacks find nobody */
	lws_set_timeout(wsi, PENDING_TIMEOUT_USER_OK, LWS_TO_KILL_SYNC);
	buf_free(&c->in);
	measure(c);
}

/* ---- The server ---- */

static const struct lws_protocols protocols[] = {
	{.name = "kvasir", .callback = on_event, .rx_buffer_size = RX_CHUNK},
	{0},
};

static void on_sweep(uv_timer_t *handle)
{
	struct ws_server *s = handle->data;
	int64_t now = now_ms();

	list_each(node, tmp, &s->conns)
	{
		struct ws_conn *c = list_entry(node, struct ws_conn, node);
		if (c->closing) {
			if (now - c->closing_ms >= CLOSE_MS)
				doom(c);
		} else if (!c->linked && !conn_ws_is_parked(c->conn)) {
			c->ping_ms = now; /* it is waking, and its client not read meanwhile */
		} else if (c->ping_open) {
			if (now - c->ping_ms >= s->config->ws_ping_timeout) {
				log_msg(LOG_INFO, "websocket", "%s did not answer a ping and was dropped", c->peer);
				doom(c);
			}
		} else if (now - c->ping_ms >= s->config->ws_ping_interval) {
			/* A ping that cannot even be sent counts as unanswered. */
			c->ping_open = true;
			c->ping_ms = now;
			if (c->linked) {
				c->ping_due = true;
				lws_callback_on_writable(c->wsi);
			} else if (!conn_ws_ping(c->conn)) {
				doom(c);
			}
		}
	}
}

/* What libwebsockets says while it starts is worth reading; later it complains about every odd peer. */
static bool starting;

static void on_lws_log(int level, const char *line)
{
	size_t n = strlen(line);
	(void)level;
	while (n && line[n - 1] == '\n')
		n--;
	log_msg(starting ? LOG_WARN : LOG_DEBUG, "libwebsockets", "%.*s", (int)n, line);
}

/*
 * libwebsockets unloads its libuv plugin at the end of lws_context_destroy() while libuv has still to call back into it
 * (close callbacks run in the next turn of the loop). So the plugin is made to stay.
 */
static int pin_plugin(struct dl_phdr_info *info, size_t size, void *arg)
{
	(void)size;
	(void)arg;
	if (!strstr(info->dlpi_name, "evlib_uv"))
		return 0;
	dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE); /* the reference is kept for good */
	return 1;
}

enum status ws_server_create(uv_loop_t *loop, const struct config *config, const struct ws_app *app,
                             struct listener_stats *stats, struct meter *meter, struct ws_server **out,
                             struct error *err)
{
	struct ws_server *s = calloc(1, sizeof *s);
	if (!s)
		return error_set(err, STATUS_NOMEM, "There is no memory for the WebSocket server.");
	s->loop = loop;
	s->config = config;
	s->app = app;
	s->stats = stats;
	s->meter = meter;
	list_init(&s->conns);
	list_init(&s->doomed);

	/* libwebsockets has pings of its own, in whole seconds; they are turned off in favour of ours. */
	static const lws_retry_bo_t no_pings = {.secs_since_valid_ping = 0, .secs_since_valid_hangup = 0};
	void *loops[1] = {loop};
	struct lws_context_creation_info info = {
		.port = CONTEXT_PORT_NO_LISTEN_SERVER,
		.protocols = protocols,
		.options = LWS_SERVER_OPTION_LIBUV | LWS_SERVER_OPTION_VALIDATE_UTF8 |
			   LWS_SERVER_OPTION_EXPLICIT_VHOSTS | LWS_SERVER_OPTION_DISABLE_IPV6,
		.foreign_loops = loops,
		.gid = (gid_t)-1,
		.uid = (uid_t)-1,
		.user = s,
		.pcontext = &s->context,
		.retry_and_idle_policy = &no_pings,
		.vhost_name = "kvasir",
	};
	lws_set_allocator(ws_memory);
	lws_set_log_level(LLL_ERR | LLL_WARN, on_lws_log);
	starting = true;
	s->context = lws_create_context(&info);
	if (!s->context) {
		free(s);
		return error_set(err, STATUS_INTERNAL,
				 "libwebsockets could not be started; its libuv plugin (libwebsockets-evlib-uv) may be "
				 "missing.");
	}
	dl_iterate_phdr(pin_plugin, NULL);
	s->vhost = lws_create_vhost(s->context, &info);
	starting = false;
	uv_timer_init(loop, &s->sweep);
	uv_timer_init(loop, &s->reaper);
	s->sweep.data = s->reaper.data = s;
	s->n_handles = 2;
	if (!s->vhost) {
		ws_server_close(s, NULL, NULL);
		return error_set(err, STATUS_INTERNAL, "libwebsockets could not make a virtual host.");
	}
	int64_t tick =
		config->ws_ping_interval < config->ws_ping_timeout ? config->ws_ping_interval : config->ws_ping_timeout;
	tick = tick / 4 < 10 ? 10 : tick / 4 > 1000 ? 1000 : tick / 4;
	uv_timer_start(&s->sweep, on_sweep, (uint64_t)tick, (uint64_t)tick);
	*out = s;
	return STATUS_OK;
}

/*
 * Gives fd to libwebsockets. It gets a request of our own with all that matters: it has then nothing to misread, no h2c
 * to offer, no extension to agree to, and no cookie that does not fit. False: fd is closed. *owned says whether c was
 * known to libwebsockets then, so that WSI_DESTROY has dealt with it.
 */
static bool adopt(struct ws_conn *c, int fd, const char *key, bool *owned)
{
	struct ws_server *s = c->server;
	struct buf head = BUF_INIT;
	struct lws *wsi = NULL;
	*owned = false;
	buf_printf(&head,
		   "GET / HTTP/1.1\r\nHost: kvasir\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
		   "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n\r\n",
		   key);
	if (head.failed || s->closing || !ws_memory_reserve()) {
		close(fd);
	} else {
		s->adopting = c; /* until on_event() takes it */
		wsi = lws_adopt_socket_vhost_readbuf(s->vhost, fd, head.data, head.len); /* on failure it closes fd */
		*owned = s->adopting != c;
		s->adopting = NULL;
	}
	buf_free(&head);
	return wsi != NULL;
}

struct ws_conn *ws_server_adopt(struct ws_server *s, int fd, struct conn *conn, const char *peer, const char *key,
				int32_t principal)
{
	struct ws_conn *c = calloc(1, sizeof *c);
	bool owned;
	if (!c) {
		close(fd);
		return NULL;
	}
	c->server = s;
	c->conn = conn;
	c->principal = principal;
	snprintf(c->peer, sizeof c->peer, "%s", peer);
	list_init(&c->node);
	list_init(&c->doomed_node);
	stream_init(&c->out, (size_t)s->config->stream_buffer, LWS_PRE);
	if (!adopt(c, fd, key, &owned)) {
		if (!owned)
			release(c);
		return NULL;
	}
	measure(c);
	return c;
}

bool ws_conn_link(struct ws_conn *c, int fd)
{
	static const char any_key[] = "AAAAAAAAAAAAAAAAAAAAAA=="; /* nobody looks at the answer to it */
	bool owned;
	bool linked = adopt(c, fd, any_key, &owned);
	measure(c);
	return linked;
}

int32_t ws_server_count(const struct ws_server *s)
{
	return s->n_conns;
}

void ws_server_close_all(struct ws_server *s, int code, const char *reason)
{
	list_each(node, tmp, &s->conns) ws_close(list_entry(node, struct ws_conn, node), code, reason);
}

static void on_closed(uv_handle_t *handle)
{
	struct ws_server *s = handle->data;
	if (--s->n_handles)
		return;
	void (*closed)(void *) = s->closed;
	void *arg = s->closed_arg;
	ws_memory_end();
	free(s);
	if (closed)
		closed(arg);
}

/* libwebsockets closes its handles in the course of some turns of the loop, and clears s->context when it is done. */
static void on_destroy(uv_timer_t *handle)
{
	struct ws_server *s = handle->data;
	if (s->context) {
		ws_memory_hold();
		lws_context_destroy(s->context);
		return;
	}
	uv_close((uv_handle_t *)&s->sweep, on_closed);
	uv_close((uv_handle_t *)&s->reaper, on_closed);
}

void ws_server_close(struct ws_server *s, void (*closed)(void *arg), void *arg)
{
	s->closing = true;
	s->closed = closed;
	s->closed_arg = arg;
	uv_timer_stop(&s->reaper);
	uv_timer_start(&s->sweep, on_destroy, 0, 1);
}
