/* A connection's life, its sockets and its refusals. See conn.h. */
#include "server/conn.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/hash.h"
#include "engine/base/log.h"
#include "server/conn_impl.h"
#include "server/ws_server.h"

const char *conn_peer(const struct conn *c)
{
	return c->peer.name;
}

const struct head *conn_head(const struct conn *c)
{
	return &c->head;
}

static ssize_t send_some(int fd, struct tls *tls, const char *p, size_t n)
{
	return tls ? tls_send(tls, p, n) : send(fd, p, n, MSG_NOSIGNAL);
}

bool conn_send(int fd, struct tls *tls, struct backlog *b, const char *p, size_t n)
{
	size_t sent = 0;
	while (backlog_empty(b) && sent < n) {
		ssize_t r = send_some(fd, tls, p + sent, n - sent);
		if (r >= 0)
			sent += (size_t)r;
		else if (errno == EAGAIN || errno == EWOULDBLOCK)
			break;
		else if (errno != EINTR)
			return false;
	}
	buf_append(&b->bytes, p + sent, n - sent);
	if (b->bytes.failed)
		errno = ENOMEM;
	return !b->bytes.failed;
}

bool conn_send_backlog(int fd, struct tls *tls, struct backlog *b)
{
	while (!backlog_empty(b)) {
		ssize_t r = send_some(fd, tls, b->bytes.data + b->at, b->bytes.len - b->at);
		if (r >= 0)
			b->at += (size_t)r;
		else if (errno == EAGAIN || errno == EWOULDBLOCK)
			return true;
		else if (errno != EINTR)
			return false;
	}
	buf_free(&b->bytes);
	b->at = 0;
	return true;
}

/* ---- Life and death ---- */

void conn_set_state(struct conn *c, enum conn_state state)
{
	bool was = c->state == CONN_BODY || c->state == CONN_WAIT;
	bool is = state == CONN_BODY || state == CONN_WAIT;
	if (c->state == CONN_WS && state != CONN_WS)
		conn_park_leave(c);
	c->host->n_exchanges += is - was;
	c->state = state;
}

static void release(struct conn *c)
{
	if (--c->n_handles)
		return;
	struct conn_host *host = c->host;
	list_remove(&c->node);
	list_remove(&c->site_node);
	host->n_conns--;
	buf_free(&c->in);
	buf_free(&c->up.bytes);
	buf_free(&c->down.bytes);
	meter_set(&host->meter, &c->metered, 0);
	tls_free(c->tls);
	free(c);
	if (host->n_conns == 0 && host->empty)
		host->empty(host);
}

static void on_handle_closed(uv_handle_t *handle)
{
	release(handle->data);
}

static void on_pair_closed(uv_handle_t *handle)
{
	struct conn_pair *p = handle->data;
	release(p->conn);
	free(p);
}

bool conn_open_pair(struct conn *c, int *theirs)
{
	int fds[2];
	struct conn_host *host = c->host;
	if (host->n_pairs >= host->max_pairs)
		conn_park_make_room(host);
	if (host->n_pairs >= host->max_pairs)
		return false;
	struct conn_pair *p = calloc(1, sizeof *p);
	if (!p || socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) {
		free(p);
		return false;
	}
	if (uv_poll_init(host->loop, &p->poll, fds[0]) != 0) {
		close(fds[0]);
		close(fds[1]);
		free(p);
		return false;
	}
	int room = UNSENT_BYTES / 2; /* the kernel doubles it */
	setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
	p->poll.data = p;
	p->conn = c;
	p->fd = fds[0];
	c->pair = p;
	c->n_handles++;
	host->n_pairs++;
	*theirs = fds[1];
	return true;
}

void conn_give_back_pair(struct conn *c)
{
	struct conn_pair *p = c->pair;
	if (!p)
		return;
	c->pair = NULL;
	c->host->n_pairs--;
	/* libuv forgets a descriptor by its number, so it must do so before the number can be used again. */
	uv_close((uv_handle_t *)&p->poll, on_pair_closed);
	close(p->fd);
}

void conn_close_pair(struct conn *c)
{
	struct http_link *link = c->link;
	struct ws_conn *ws = c->ws;
	c->link = NULL;
	c->ws = NULL;
	buf_free(&c->up.bytes);
	c->up.at = 0;
	conn_give_back_pair(c);
	if (link)
		http_link_close(link);
	if (ws)
		ws_conn_drop(ws);
}

void conn_drop(struct conn *c)
{
	if (c->state == CONN_CLOSED)
		return;
	conn_set_state(c, CONN_CLOSED);
	uv_close((uv_handle_t *)&c->poll, on_handle_closed);
	uv_close((uv_handle_t *)&c->timer, on_handle_closed);
	close(c->fd);
	conn_close_pair(c);
}

void conn_reset(struct conn *c)
{
	struct linger now = {.l_onoff = 1, .l_linger = 0};
	if (c->state != CONN_CLOSED)
		setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
	conn_drop(c);
}

static void on_deadline(uv_timer_t *handle);

void conn_set_deadline(struct conn *c, int64_t ms)
{
	if (ms < 0)
		uv_timer_stop(&c->timer);
	else
		uv_timer_start(&c->timer, on_deadline, (uint64_t)ms, 0);
}

void conn_linger(struct conn *c)
{
	if (c->state == CONN_CLOSED)
		return;
	if (c->state != CONN_LINGER) {
		conn_set_state(c, CONN_LINGER);
		c->input_waits = false;
		conn_close_pair(c);
		buf_free(&c->in);
		conn_set_deadline(c, c->host->config->idle_timeout);
	}
	if (backlog_empty(&c->down) && !c->shut) {
		c->shut = true;
		if (c->tls)
			tls_shutdown(c->tls);
		shutdown(c->fd, SHUT_WR);
		conn_set_deadline(c, LINGER_MS);
	}
	if (c->shut && c->half_closed)
		conn_drop(c);
}

/* ---- Refusing ---- */

static void put_error_head(struct buf *out, int status, const char *type, size_t n)
{
	static const struct {
		int status;
		const char *reason;
	} reasons[] = {
		{400, "Bad Request"},	      {408, "Request Timeout"},
		{413, "Content Too Large"},   {417, "Expectation Failed"},
		{429, "Too Many Requests"},   {431, "Request Header Fields Too Large"},
		{501, "Not Implemented"},
		{503, "Service Unavailable"}, {505, "HTTP Version Not Supported"},
	};
	const char *reason = "Error";
	for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
		if (reasons[i].status == status)
			reason = reasons[i].reason;
	char date[64];
	time_t now = time(NULL);
	struct tm tm;
	gmtime_r(&now, &tm);
	strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", &tm);
	buf_printf(out,
		   "HTTP/1.1 %d %s\r\nDate: %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nConnection: close\r\n"
		   "%s\r\n",
		   status, reason, date, type, n, status == 503 || status == 429 ? "Retry-After: 1\r\n" : "");
}

void conn_refuse(struct conn *c, const struct head_error *e)
{
	/*
	 * An answer is on its way already: there can be no second one. Before the handshake there can be none at all.
	 */
	if (c->answered || (c->link && http_link_begun(c->link)) || (c->tls && !tls_is_up(c->tls))) {
		conn_drop(c);
		return;
	}
	struct buf body = BUF_INIT, out = BUF_INIT;
	const char *type = http_server_app(c->host->http)->error_body(&body, e->status, e->code, e->message);
	bool head_only = c->head.method == HTTP_HEAD; /* as far as its head was read */

	c->host->stats.refused++;
	conn_close_pair(c);
	put_error_head(&out, e->status, type, body.len);
	if (!head_only)
		buf_append(&out, body.data, body.len);
	if (body.failed || out.failed || !conn_send(c->fd, c->tls, &c->down, out.data, out.len))
		conn_drop(c);
	else
		conn_linger(c);
	buf_free(&body);
	buf_free(&out);
}

static void refuse_late(struct conn *c, const char *message)
{
	conn_refuse(c, &(struct head_error){408, "request_timeout", message});
}

/* ---- The loop's callbacks ---- */

static void on_client(uv_poll_t *handle, int status, int events);
static void on_pair(uv_poll_t *handle, int status, int events);

static void poll_for(uv_poll_t *poll, int *now, int events, uv_poll_cb cb)
{
	if (*now == events)
		return;
	*now = events;
	if (events)
		uv_poll_start(poll, events, cb);
	else
		uv_poll_stop(poll);
}

void conn_update(struct conn *c)
{
	meter_set(&c->host->meter, &c->metered,
		  sizeof *c + (c->pair ? sizeof *c->pair : 0) + c->in.cap + c->up.bytes.cap + c->down.bytes.cap);
	if (c->state == CONN_CLOSED)
		return;
	int events = 0;
	/*
	 * While an answer is awaited, only the client's end is of interest. But asking for that alone costs two system
	 * calls per request; so reading is asked for as before, until it turns out that there is something to read.
	 */
	bool reading = backlog_empty(&c->up) && !c->input_waits;
	if (!c->half_closed)
		events = reading ? UV_READABLE : UV_DISCONNECT;
	if (!backlog_empty(&c->down) || (c->tls && tls_recv_blocks_on_write(c->tls)))
		events |= UV_WRITABLE;
	poll_for(&c->poll, &c->fd_events, events, on_client);
	if (!c->pair || c->pair->ended)
		return;
	events = backlog_empty(&c->down) ? UV_READABLE : 0;
	if (!backlog_empty(&c->up))
		events |= UV_WRITABLE;
	poll_for(&c->pair->poll, &c->pair->events, events, on_pair);
}

bool conn_pump(struct conn *c)
{
	char *p = c->host->scratch;
	bool drained = false;
	for (int i = 0; c->pair && !c->pair->ended && backlog_empty(&c->down) && !drained; i++) {
		/* The last round only looks whether there is more, for if there is not, no event will tell. */
		bool last = i == PUMP_ROUNDS;
		ssize_t n = recv(c->pair->fd, p, last ? 1 : sizeof c->host->scratch, last ? MSG_PEEK : 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			return true;
		if (n <= 0) {
			c->pair->ended = true;
			poll_for(&c->pair->poll, &c->pair->events, 0, on_pair);
			return true;
		}
		if (last)
			return false;
		drained = (size_t)n < sizeof c->host->scratch;
		size_t skip = c->state == CONN_WS ? conn_park_filter(c, p, (size_t)n) : 0;
		if (!conn_send(c->fd, c->tls, &c->down, p + skip, (size_t)n - skip)) {
			conn_drop(c);
			return false;
		}
		/* From here on an HTTP client has to read on, or it is dropped; a WebSocket has its pings. */
		if (!backlog_empty(&c->down) && c->state != CONN_WS)
			conn_set_deadline(c, c->host->config->idle_timeout);
	}
	return backlog_empty(&c->down);
}

static void pump(struct conn *c)
{
	if (c->state == CONN_WS)
		conn_ws_pump(c);
	else if (c->state != CONN_LINGER && c->state != CONN_CLOSED)
		conn_http_pump(c);
}

/* The client has sent its last byte, as far as can be seen. */
static void client_ended(struct conn *c)
{
	c->half_closed = true;
	if (c->state == CONN_LINGER)
		conn_linger(c);
	else if (c->state == CONN_WS)
		conn_drop(c);
	else
		conn_http_ended(c);
}

/* In CONN_WAIT: is it the next request, or the end? */
static void look_at_client(struct conn *c)
{
	char byte;
	ssize_t n = recv(c->fd, &byte, 1, MSG_PEEK);
	if (n > 0)
		c->input_waits = true;
	else if (n == 0)
		client_ended(c);
	else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
		conn_drop(c);
}

/* Reading failed: the socket is broken, or what came over it is not TLS. */
static void read_failed(struct conn *c)
{
	if (c->tls && errno == EPROTO) {
		log_msg(LOG_DEBUG, "tls", "the connection of %s failed: %s", c->peer.name, tls_failure(c->tls));
		if (tls_met_http(c->tls)) {
			tls_free(c->tls);
			c->tls = NULL;
			conn_refuse(c, &(struct head_error){400, "tls_required", "This port speaks HTTPS only."});
			return;
		}
		c->host->stats.refused++;
	}
	conn_drop(c);
}

static void read_client(struct conn *c)
{
	char *p = c->host->scratch;
	for (int i = 0; i < READ_ROUNDS; i++) {
		ssize_t n = c->tls ? tls_recv(c->tls, p, sizeof c->host->scratch)
		                   : recv(c->fd, p, sizeof c->host->scratch, 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			if (errno != EAGAIN && errno != EWOULDBLOCK)
				read_failed(c);
			return;
		}
		if (n == 0) {
			client_ended(c);
			return;
		}
		if (c->state == CONN_WS) {
			conn_ws_receive(c, p, (size_t)n);
		} else if (c->state != CONN_LINGER) {
			buf_append(&c->in, p, (size_t)n);
			if (c->in.failed) {
				conn_drop(c);
				return;
			}
			conn_http_advance(c);
		}
		if ((size_t)n < sizeof c->host->scratch || c->state == CONN_WAIT || c->state == CONN_CLOSED ||
		    !backlog_empty(&c->up))
			return;
	}
}

static void write_client(struct conn *c)
{
	size_t left = c->down.bytes.len - c->down.at;
	if (!conn_send_backlog(c->fd, c->tls, &c->down)) {
		conn_drop(c);
		return;
	}
	if (!backlog_empty(&c->down)) {
		if (c->down.bytes.len - c->down.at < left && c->state != CONN_WS)
			conn_set_deadline(c, c->host->config->idle_timeout);
		return;
	}
	if (c->state == CONN_LINGER) {
		conn_linger(c);
		return;
	}
	if (c->state != CONN_WS)
		conn_set_deadline(c, c->state == CONN_BODY ? c->host->config->body_timeout : -1);
	pump(c);
}

static void on_client(uv_poll_t *handle, int status, int events)
{
	struct conn *c = handle->data;
	if (status < 0) {
		conn_drop(c); /* libuv has seen EPOLLERR: the client's RST */
		return;
	}
	int polled = c->fd_events;
	bool blocked = c->tls && tls_recv_blocks_on_write(c->tls);
	if (events & UV_WRITABLE && !backlog_empty(&c->down))
		write_client(c);
	if (c->state == CONN_WAIT && events & polled & UV_READABLE)
		look_at_client(c);
	else if (c->state != CONN_CLOSED && (events & polled & UV_READABLE || (blocked && events & UV_WRITABLE)))
		read_client(c);
	else if (c->state != CONN_CLOSED && events & polled & UV_DISCONNECT)
		client_ended(c);
	conn_update(c);
}

static void on_pair(uv_poll_t *handle, int status, int events)
{
	struct conn_pair *p = handle->data;
	struct conn *c = p->conn;
	if (p != c->pair)
		return;
	/*
	 * EPOLLERR: the library has closed its end with something of ours unread. What it wrote before is still there
	 * to be read, its end behind it; libuv has stopped polling.
	 */
	if (status < 0)
		p->events = 0;
	if (events & UV_WRITABLE && !backlog_empty(&c->up)) {
		if (!conn_send_backlog(p->fd, NULL, &c->up)) {
			/* The library has closed its end and will not read the rest; pump() sees it. */
			buf_free(&c->up.bytes);
			c->up.at = 0;
		}
		if (c->link)
			http_server_kick(c->host->http);
		if (backlog_empty(&c->up) && c->link)
			conn_http_advance(c);
	}
	pump(c);
	conn_update(c);
}

static void on_deadline(uv_timer_t *handle)
{
	struct conn *c = handle->data;
	if (c->state == CONN_HEAD && c->in.len)
		refuse_late(c, "The request head did not arrive in time.");
	else if (c->state == CONN_BODY && backlog_empty(&c->down))
		refuse_late(c, "The request body did not arrive in time.");
	else if (c->state == CONN_BODY || c->state == CONN_WAIT)
		conn_reset(c); /* the client does not read its answer */
	else if (c->state == CONN_HEAD)
		conn_http_idle(c);
	else
		conn_drop(c);
	conn_update(c);
}

/* ---- For the libraries' side ---- */

void conn_event(struct conn *c, unsigned events)
{
	if (c->state == CONN_CLOSED)
		return;
	if (events & LINK_SLOW) {
		c->host->stats.dropped_slow++;
		log_msg(LOG_INFO, "slow_client", "%s left too much unread and was dropped", c->peer.name);
	}
	if (events & (LINK_SLOW | LINK_FAILED)) {
		conn_reset(c);
		return;
	}
	if (events & LINK_UPGRADE) {
		conn_ws_begin(c);
	} else if (events & LINK_ANSWERED) {
		c->answered = true;
		pump(c);
	}
	conn_update(c);
}

void conn_ws_ended(struct conn *c, bool reset)
{
	c->ws = NULL;
	if (reset)
		conn_reset(c);
	/* Else its last bytes, and then the end, come through the pair. */
}

/* ---- For the listener ---- */

void conn_host_init(struct conn_host *host, uv_loop_t *loop, const struct config *config)
{
	host->loop = loop;
	host->config = config;
	host->meter.most = config->max_client_memory;
	conn_park_host_init(host);
	list_init(&host->conns);
	for (int i = 0; i < CONN_SITE_SLOTS; i++)
		list_init(&host->by_site[i]);
}

/* Connections of a site among those of its slot; it looks no further than `enough`. */
static int64_t count_site(const struct list *slot, const uint8_t *site, int64_t enough)
{
	int64_t n = 0;
	for (const struct list *node = slot->next; node != slot && n < enough; node = node->next) {
		const struct conn *c = list_entry(node, struct conn, site_node);
		n += memcmp(c->peer.site, site, CONN_SITE_BYTES) == 0;
	}
	return n;
}

enum status conn_open(struct conn_host *host, int fd, const struct conn_peer *from, bool full)
{
	int64_t most = host->config->max_connections_per_address;
	struct list *slot = &host->by_site[hash64(from->site, CONN_SITE_BYTES, 0) % CONN_SITE_SLOTS];
	int64_t there = most ? count_site(slot, from->site, most + SPARE_OF_SITE) : 0;
	bool crowded = most && there >= most;
	if (crowded && there >= most + SPARE_OF_SITE) {
		host->stats.refused++;
		close(fd);
		return STATUS_OK;
	}
	struct conn *c = calloc(1, sizeof *c);
	if (!c) {
		close(fd);
		return STATUS_NOMEM;
	}
	if (host->tls) {
		c->tls = tls_accept(host->tls, fd);
		if (!c->tls) {
			close(fd);
			free(c);
			return STATUS_NOMEM;
		}
	}
	if (uv_poll_init(host->loop, &c->poll, fd) != 0) {
		tls_free(c->tls);
		close(fd);
		free(c);
		return STATUS_IO;
	}
	uv_timer_init(host->loop, &c->timer);
	c->poll.data = c->timer.data = c;
	c->n_handles = 2;
	c->host = host;
	c->fd = fd;
	head_init(&c->head);
	c->peer = *from;
	list_push_back(slot, &c->site_node);
	list_push_back(&host->conns, &c->node);
	host->n_conns++;

	/* A delta is a small write that nothing follows for a while; and a peer that vanished is to be noticed. */
	int on = 1;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
	/*
	 * Else the kernel would queue megabytes for a client that does not read before the client's own queue sees it.
	 */
	int unsent = UNSENT_BYTES;
	setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);

	if (full) {
		conn_refuse(c,
			    &(struct head_error){503, "too_many_connections", "The server has too many connections."});
	} else if (crowded) {
		conn_refuse(c, &(struct head_error){429, "too_many_connections",
		                                    "Your address has too many connections to the server."});
	} else {
		conn_set_deadline(c, host->config->header_timeout);
		host->stats.accepted++;
	}
	conn_update(c);
	return STATUS_OK;
}

/* A client connects to ask something: until it has, it is as good as a request. One that was answered is not. */
static bool is_expected(const struct conn *c)
{
	return c->state == CONN_HEAD && (!c->served || c->in.len > 0);
}

int32_t conn_count_expected(const struct conn_host *host)
{
	int32_t n = 0;
	list_each(node, tmp, &host->conns) n += is_expected(list_entry(node, struct conn, node));
	return n;
}

void conn_close_idle(struct conn_host *host)
{
	list_each(node, tmp, &host->conns)
	{
		struct conn *c = list_entry(node, struct conn, node);
		char byte;
		/* A request may have arrived since the loop last looked. */
		if (c->state != CONN_HEAD || is_expected(c) || recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0)
			continue;
		conn_linger(c);
		conn_update(c);
	}
}

void conn_close_all(struct conn_host *host)
{
	list_each(node, tmp, &host->conns) conn_drop(list_entry(node, struct conn, node));
}
