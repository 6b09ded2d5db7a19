#include "server/conn.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "server/ws_server.h"

enum {
	LINGER_MS = 3000,   /* how long a refused client's remaining bytes are read and thrown away */
	PUMP_ROUNDS = 16,   /* reads from the pair before other connections have their turn */
	READ_ROUNDS = 4,    /* the same for reads from the client */
	KEEP_BUFFER = 4096, /* an idle connection keeps a read buffer up to this size */
};

enum conn_state {
	CONN_HEAD,   /* waiting for a request, or inside its head */
	CONN_BODY,   /* inside a body */
	CONN_WAIT,   /* the request is complete, its answer is not */
	CONN_LINGER, /* sending what is left, then throwing away what still comes */
	CONN_CLOSED, /* handles are closing */
};

/* Bytes on their way that the kernel had no room for yet. */
struct backlog {
	struct buf bytes;
	size_t at;
};

struct conn {
	struct list node;
	struct conn_host *host;
	enum conn_state state;
	int fd, pair; /* -1: none, or no longer ours */
	uv_poll_t fd_poll, pair_poll;
	uv_timer_t timer;
	int fd_events, pair_events; /* polled for */
	int n_handles;
	struct http_link *link;
	struct head head;
	struct body body;
	struct buf in;       /* read, and not yet passed on */
	struct backlog up;   /* checked, for the pair */
	struct backlog down; /* answer, for the client */
	bool served;         /* a request was answered before */
	bool answered;       /* libmicrohttpd is done with the current request */
	bool pair_ended;     /* libmicrohttpd has closed its end */
	bool half_closed;    /* the client sends no more */
	bool shut;           /* we send no more */
	char peer[72];
};

const char *conn_peer(const struct conn *c)
{
	return c->peer;
}

const struct head *conn_head(const struct conn *c)
{
	return &c->head;
}

static bool backlog_empty(const struct backlog *b)
{
	return b->at == b->bytes.len;
}

/* Sends what the kernel takes and keeps the rest; false when the socket is broken or there is no memory. */
static bool send_some(int fd, struct backlog *b, const char *p, size_t n)
{
	size_t sent = 0;
	if (backlog_empty(b)) {
		while (sent < n) {
			ssize_t r = send(fd, p + sent, n - sent, MSG_NOSIGNAL);
			if (r >= 0) {
				sent += (size_t)r;
			} else if (errno == EAGAIN || errno == EWOULDBLOCK) {
				break;
			} else if (errno != EINTR) {
				return false;
			}
		}
	}
	buf_append(&b->bytes, p + sent, n - sent);
	return !b->bytes.failed;
}

/* Sends from the backlog; false when the socket is broken. */
static bool send_backlog(int fd, struct backlog *b)
{
	while (!backlog_empty(b)) {
		ssize_t r = send(fd, b->bytes.data + b->at, b->bytes.len - b->at, MSG_NOSIGNAL);
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

static void set_state(struct conn *c, enum conn_state state)
{
	bool was = c->state == CONN_BODY || c->state == CONN_WAIT;
	bool is = state == CONN_BODY || state == CONN_WAIT;
	c->host->n_exchanges += is - was;
	c->state = state;
}

static void on_handle_closed(uv_handle_t *handle)
{
	struct conn *c = handle->data;
	if (--c->n_handles)
		return;
	struct conn_host *host = c->host;
	list_remove(&c->node);
	host->n_conns--;
	buf_free(&c->in);
	buf_free(&c->up.bytes);
	buf_free(&c->down.bytes);
	free(c);
	if (host->n_conns == 0 && host->empty)
		host->empty(host);
}

static void close_link(struct conn *c)
{
	struct http_link *l = c->link;
	c->link = NULL;
	/* libuv forgets a descriptor by its number, so it must do so before the number can be used again. */
	if (c->pair >= 0) {
		uv_close((uv_handle_t *)&c->pair_poll, on_handle_closed);
		close(c->pair);
	}
	c->pair = -1;
	if (l)
		http_link_close(l);
}

/* The exchange's on_close runs in here. The memory stays until the handles are closed. */
static void conn_drop(struct conn *c)
{
	if (c->state == CONN_CLOSED)
		return;
	set_state(c, CONN_CLOSED);
	uv_close((uv_handle_t *)&c->fd_poll, on_handle_closed);
	uv_close((uv_handle_t *)&c->timer, on_handle_closed);
	if (c->fd >= 0)
		close(c->fd);
	c->fd = -1;
	close_link(c);
}

/* Drops the connection with an RST: what the client has not read is not kept for it. */
static void conn_reset(struct conn *c)
{
	struct linger now = {.l_onoff = 1, .l_linger = 0};
	if (c->fd >= 0)
		setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
	conn_drop(c);
}

static void on_client(uv_poll_t *handle, int status, int events);
static void on_pair(uv_poll_t *handle, int status, int events);
static void on_deadline(uv_timer_t *handle);

static void set_deadline(struct conn *c, int64_t ms)
{
	if (ms < 0)
		uv_timer_stop(&c->timer);
	else
		uv_timer_start(&c->timer, on_deadline, (uint64_t)ms, 0);
}

/* Polls for what this state can use. */
static void update_polls(struct conn *c)
{
	if (c->state == CONN_CLOSED)
		return;
	int fd_events = 0, pair_events = 0;
	bool reading = (c->state == CONN_HEAD || c->state == CONN_BODY) && backlog_empty(&c->up) && !c->half_closed;
	if (reading || (c->state == CONN_LINGER && !c->half_closed))
		fd_events |= UV_READABLE;
	else if (!c->half_closed)
		fd_events |= UV_DISCONNECT;
	if (!backlog_empty(&c->down))
		fd_events |= UV_WRITABLE;
	if (c->pair >= 0 && !c->pair_ended) {
		if (backlog_empty(&c->down))
			pair_events |= UV_READABLE;
		if (!backlog_empty(&c->up))
			pair_events |= UV_WRITABLE;
	}
	if (fd_events != c->fd_events) {
		c->fd_events = fd_events;
		if (fd_events)
			uv_poll_start(&c->fd_poll, fd_events, on_client);
		else
			uv_poll_stop(&c->fd_poll);
	}
	if (c->pair >= 0 && pair_events != c->pair_events) {
		c->pair_events = pair_events;
		if (pair_events)
			uv_poll_start(&c->pair_poll, pair_events, on_pair);
		else
			uv_poll_stop(&c->pair_poll);
	}
}

/* Nothing more will be said to the client: sends what is queued, then FIN, and reads on for a while so that the answer is not lost to an RST. */
static void linger(struct conn *c)
{
	if (c->state != CONN_LINGER) {
		set_state(c, CONN_LINGER);
		close_link(c);
		buf_free(&c->in);
		set_deadline(c, backlog_empty(&c->down) ? LINGER_MS : c->host->config->idle_timeout);
	}
	if (backlog_empty(&c->down) && !c->shut) {
		c->shut = true;
		shutdown(c->fd, SHUT_WR);
		set_deadline(c, LINGER_MS);
	}
	if (c->shut && c->half_closed)
		conn_drop(c);
}

static void put_error_head(struct buf *out, int status, const char *type, size_t n)
{
	static const struct {
		int status;
		const char *reason;
	} reasons[] = {
	        {400, "Bad Request"},        {408, "Request Timeout"},
	        {413, "Content Too Large"},  {417, "Expectation Failed"},
	        {431, "Request Header Fields Too Large"}, {501, "Not Implemented"},
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
	           status, reason, date, type, n, status == 503 ? "Retry-After: 1\r\n" : "");
}

/* Answers with an error of our own and closes. */
static void refuse(struct conn *c, const struct head_error *e)
{
	/* An answer is on its way already: there can be no second one. */
	if (c->answered || (c->link && http_link_begun(c->link))) {
		conn_drop(c);
		return;
	}
	struct buf body = BUF_INIT, out = BUF_INIT;
	const char *type = http_server_app(c->host->http)->error_body(&body, e->status, e->code, e->message);

	c->host->stats.refused++;
	close_link(c);
	if (c->state == CONN_CLOSED)
		goto done;
	put_error_head(&out, e->status, type, body.len);
	bool has_body = c->state == CONN_HEAD || c->head.method != HTTP_HEAD;
	if (has_body)
		buf_append(&out, body.data, body.len);
	if (body.failed || out.failed || !send_some(c->fd, &c->down, out.data, out.len))
		conn_drop(c);
	else
		linger(c);
done:
	buf_free(&body);
	buf_free(&out);
}

static void refuse_with(struct conn *c, int status, const char *code, const char *message)
{
	refuse(c, &(struct head_error){status, code, message});
}

/* ---- Requests ---- */

static bool open_link(struct conn *c)
{
	int fds[2];
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0)
		return false;
	if (uv_poll_init(c->host->loop, &c->pair_poll, fds[0]) != 0) {
		close(fds[0]);
		close(fds[1]);
		return false;
	}
	c->pair_poll.data = c;
	c->pair_events = 0;
	c->n_handles++;
	c->pair = fds[0];
	c->link = http_link_open(c->host->http, fds[1], c);
	return c->link != NULL;
}

/* Passes n checked bytes from the front of c->in on to libmicrohttpd. */
static bool pass_on(struct conn *c, size_t n)
{
	if (!send_some(c->pair, &c->up, c->in.data, n)) {
		/* It has closed its end: it answered early and will not read the rest, or it failed. on_pair() sees which. */
		if (errno != EPIPE && errno != ECONNRESET)
			return false;
		buf_clear(&c->up.bytes);
		c->up.at = 0;
	}
	memmove(c->in.data, c->in.data + n, c->in.len - n);
	c->in.len -= n;
	http_server_kick(c->host->http);
	return true;
}

/* A whole head is in c->in. */
static void begin_request(struct conn *c)
{
	struct head_error err;
	enum head_result body = body_init(&c->body, &c->head, (uint64_t)c->host->config->max_body, &err);
	if (body == HEAD_BAD) {
		refuse(c, &err);
		return;
	}
	if (!c->link && !open_link(c)) {
		log_msg(LOG_WARN, "http", "no descriptors or memory for a request from %s", c->peer);
		refuse_with(c, 503, "server_overloaded", "The server has no descriptors or memory left for this request.");
		return;
	}
	c->answered = false;
	set_state(c, body == HEAD_DONE ? CONN_WAIT : CONN_BODY);
	set_deadline(c, body == HEAD_DONE ? -1 : c->host->config->body_timeout);
	if (!pass_on(c, c->head.length))
		conn_drop(c);
}

static void read_head(struct conn *c)
{
	/* Empty lines before a request are to be ignored (RFC 9112, 2.2). */
	if (c->head.at == 0) {
		size_t skip = 0;
		while (c->in.len - skip >= 2 && memcmp(c->in.data + skip, "\r\n", 2) == 0)
			skip += 2;
		if (skip) {
			memmove(c->in.data, c->in.data + skip, c->in.len - skip);
			c->in.len -= skip;
		}
		if (c->in.len == 0 || (c->in.len == 1 && c->in.data[0] == '\r'))
			return;
		/* The first byte of a later request: from now on it has the time a head has. */
		if (c->served)
			set_deadline(c, c->host->config->header_timeout);
	}
	struct head_error err;
	enum head_result r = head_feed(&c->head, c->in.data, c->in.len, (size_t)c->host->config->max_header, &err);
	if (r == HEAD_BAD)
		refuse(c, &err);
	else if (r == HEAD_DONE)
		begin_request(c);
}

static void read_body(struct conn *c)
{
	struct head_error err;
	size_t used;
	enum head_result r = body_feed(&c->body, c->in.data, c->in.len, &used, &err);
	if (r == HEAD_BAD) {
		refuse(c, &err);
		return;
	}
	if (r == HEAD_DONE) {
		set_state(c, CONN_WAIT);
		set_deadline(c, -1);
	}
	if (!pass_on(c, used))
		conn_drop(c);
}

/* Goes on with what was read, as far as this request goes. */
static void advance(struct conn *c)
{
	enum conn_state before;
	do {
		before = c->state;
		if (c->in.len == 0)
			break;
		if (c->state == CONN_HEAD)
			read_head(c);
		else if (c->state == CONN_BODY)
			read_body(c);
	} while (c->state != before);
	if (c->in.len == 0 && c->in.cap > KEEP_BUFFER)
		buf_free(&c->in);
	/* A request that the client did not finish, or none at all. */
	if (c->half_closed && (c->state == CONN_HEAD || c->state == CONN_BODY))
		conn_drop(c);
}

static void next_request(struct conn *c)
{
	if (c->pair_ended || c->host->draining || (c->half_closed && c->in.len == 0)) {
		linger(c);
		return;
	}
	c->served = true;
	c->answered = false;
	head_init(&c->head);
	set_state(c, CONN_HEAD);
	set_deadline(c, c->host->config->idle_timeout);
	advance(c);
}

/* Moves answer bytes from the pair to the client, and sees whether that was all. */
static void pump(struct conn *c)
{
	char *p = c->host->scratch;
	bool drained = false;

	for (int i = 0; i < PUMP_ROUNDS && !drained && !c->pair_ended && backlog_empty(&c->down); i++) {
		ssize_t n = recv(c->pair, p, sizeof c->host->scratch, 0);
		if (n > 0) {
			if (!send_some(c->fd, &c->down, p, (size_t)n)) {
				conn_drop(c);
				return;
			}
			/* From here on the client has to read on, or it is dropped. */
			if (!backlog_empty(&c->down))
				set_deadline(c, c->host->config->idle_timeout);
		} else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
			c->pair_ended = true;
		} else if (errno != EINTR) {
			drained = true;
		}
	}
	if (!backlog_empty(&c->down))
		return;
	/* Stopped for the sake of others; if that was the end, no event would tell. */
	if (!drained && !c->pair_ended)
		drained = recv(c->pair, p, 1, MSG_PEEK) < 0;
	if (c->answered && drained && c->state == CONN_WAIT)
		next_request(c);
	else if (c->pair_ended || (c->answered && drained))
		linger(c); /* answered early or for the last time; without an answer, libmicrohttpd failed */
}

static void upgrade(struct conn *c)
{
	int fd = c->fd;
	c->fd = -1;
	conn_drop(c); /* stops polling the descriptor, which libwebsockets is about to poll; *c stays a while */
	/* What follows the head are frames sent before the handshake was answered. */
	ws_server_adopt(c->host->ws, fd, c->peer, c->head.ws_key, c->in.data, c->in.len);
}

void conn_event(struct conn *c, unsigned events)
{
	if (c->state == CONN_CLOSED)
		return;
	if (events & LINK_SLOW) {
		c->host->stats.dropped_slow++;
		log_msg(LOG_INFO, "slow_client", "%s left too much unread and was dropped", c->peer);
		conn_reset(c);
		return;
	}
	if (events & LINK_FAILED) {
		conn_reset(c);
		return;
	}
	if (events & LINK_UPGRADE) {
		upgrade(c);
		return;
	}
	if (events & LINK_ANSWERED) {
		c->answered = true;
		if (c->state == CONN_BODY || c->state == CONN_WAIT)
			pump(c);
	}
	update_polls(c);
}

/* ---- The loop's callbacks ---- */

/* The client has sent its last byte, as far as can be seen. */
static void client_ended(struct conn *c)
{
	c->half_closed = true;
	if (c->state == CONN_WAIT) {
		/*
		 * Its request may just have arrived together with the FIN: an answer that is there at once is delivered.
		 * libmicrohttpd takes one run to read a head and one for the handler.
		 */
		for (int i = 0; i < 4 && c->state == CONN_WAIT && !c->answered && http_link_waiting(c->link); i++)
			http_server_run(c->host->http);
		if (c->state == CONN_WAIT && !c->answered && http_link_waiting(c->link))
			conn_drop(c);
		return;
	}
	if (c->state == CONN_LINGER)
		linger(c);
	else
		advance(c);
}

static void read_client(struct conn *c)
{
	for (int i = 0; i < READ_ROUNDS; i++) {
		ssize_t n = recv(c->fd, c->host->scratch, sizeof c->host->scratch, 0);
		if (n < 0) {
			if (errno == EINTR)
				continue;
			if (errno != EAGAIN && errno != EWOULDBLOCK)
				conn_drop(c);
			return;
		}
		if (n == 0) {
			client_ended(c);
			return;
		}
		if (c->state == CONN_LINGER)
			continue;
		buf_append(&c->in, c->host->scratch, (size_t)n);
		if (c->in.failed) {
			conn_drop(c);
			return;
		}
		advance(c);
		if (n < (ssize_t)sizeof c->host->scratch || (c->state != CONN_HEAD && c->state != CONN_BODY) ||
		    !backlog_empty(&c->up))
			return;
	}
}

static void on_client(uv_poll_t *handle, int status, int events)
{
	struct conn *c = handle->data;
	if (status < 0) {
		conn_drop(c); /* libuv has seen EPOLLERR: the client's RST */
		return;
	}
	if (events & UV_WRITABLE && !backlog_empty(&c->down)) {
		size_t left = c->down.bytes.len - c->down.at;
		if (!send_backlog(c->fd, &c->down)) {
			conn_drop(c);
			return;
		}
		if (backlog_empty(&c->down)) {
			if (c->state == CONN_LINGER) {
				linger(c);
			} else {
				set_deadline(c, c->state == CONN_BODY ? c->host->config->body_timeout : -1);
				pump(c);
			}
		} else if (c->down.bytes.len - c->down.at < left) {
			set_deadline(c, c->host->config->idle_timeout);
		}
	}
	if (c->state != CONN_CLOSED && events & UV_READABLE && c->fd_events & UV_READABLE)
		read_client(c);
	else if (c->state != CONN_CLOSED && events & UV_DISCONNECT && c->fd_events & UV_DISCONNECT)
		client_ended(c);
	update_polls(c);
}

static void on_pair(uv_poll_t *handle, int status, int events)
{
	struct conn *c = handle->data;
	if (status < 0)
		c->pair_ended = true;
	if (events & UV_WRITABLE && !backlog_empty(&c->up)) {
		if (!send_backlog(c->pair, &c->up)) {
			buf_clear(&c->up.bytes);
			c->up.at = 0;
		}
		http_server_kick(c->host->http);
		if (backlog_empty(&c->up))
			advance(c);
	}
	if (c->state != CONN_CLOSED && c->state != CONN_LINGER)
		pump(c); /* between requests libmicrohttpd has nothing to say but that it closed */
	update_polls(c);
}

static void on_deadline(uv_timer_t *handle)
{
	struct conn *c = handle->data;
	if (c->state == CONN_HEAD && c->in.len)
		refuse_with(c, 408, "request_timeout", "The request head did not arrive in time.");
	else if (c->state == CONN_BODY && backlog_empty(&c->down))
		refuse_with(c, 408, "request_timeout", "The request body did not arrive in time.");
	else if (c->state == CONN_WAIT)
		conn_reset(c); /* armed only while the client does not read its answer */
	else
		conn_drop(c);
	update_polls(c);
}

enum status conn_open(struct conn_host *host, int fd, const char *peer, bool full)
{
	struct conn *c = calloc(1, sizeof *c);
	if (!c) {
		close(fd);
		return STATUS_NOMEM;
	}
	c->host = host;
	c->fd = fd;
	c->pair = -1;
	head_init(&c->head);
	snprintf(c->peer, sizeof c->peer, "%s", peer);
	if (uv_poll_init(host->loop, &c->fd_poll, fd) != 0) {
		close(fd);
		free(c);
		return STATUS_IO;
	}
	uv_timer_init(host->loop, &c->timer);
	c->fd_poll.data = c->timer.data = c;
	c->n_handles = 2;
	list_push_back(&host->conns, &c->node);
	host->n_conns++;

	/* A delta is a small write that nothing follows for a while; and a peer that vanished is to be noticed. */
	int on = 1;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);

	if (full) {
		refuse_with(c, 503, "too_many_connections", "The server has too many connections.");
	} else {
		set_deadline(c, host->config->header_timeout);
		host->stats.accepted++;
	}
	update_polls(c);
	return STATUS_OK;
}

void conn_close_idle(struct conn_host *host)
{
	list_each(node, tmp, &host->conns) {
		struct conn *c = list_entry(node, struct conn, node);
		if (c->state == CONN_HEAD && c->in.len == 0) {
			linger(c);
			update_polls(c);
		}
	}
}

void conn_close_all(struct conn_host *host)
{
	list_each(node, tmp, &host->conns)
		conn_drop(list_entry(node, struct conn, node));
}
