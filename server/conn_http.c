/* Requests: from the client's bytes to libmicrohttpd, one at a time, and the answer back. See conn.h. */
#include <errno.h>
#include <string.h>

#include "engine/base/log.h"
#include "server/conn_impl.h"

static void consume(struct buf *b, size_t n)
{
	memmove(b->data, b->data + n, b->len - n);
	b->len -= n;
}

/* Passes n checked bytes from the front of c->in on to libmicrohttpd. */
static bool pass_on(struct conn *c, size_t n)
{
	if (!conn_send(c->pair->fd, NULL, &c->up, c->in.data, n)) {
		/*
		 * It has closed its end: it answered early and will not read the rest, or it failed. conn_http_pump()
		 * sees which.
		 */
		if (errno != EPIPE && errno != ECONNRESET)
			return false;
	}
	consume(&c->in, n);
	http_server_kick(c->host->http);
	return true;
}

static bool open_link(struct conn *c)
{
	int theirs;
	if (!conn_open_pair(c, &theirs))
		return false;
	c->link = http_link_open(c->host->http, theirs, c);
	return c->link != NULL;
}

/* A whole head is in c->in. */
static void begin_request(struct conn *c)
{
	struct head_error err;
	const struct http_app *app = http_server_app(c->host->http);
	struct str target = {c->in.data + c->head.target_at, c->head.target_n};
	uint64_t max = (uint64_t)c->host->config->max_body;
	c->streamed = app->streams && app->streams(app->app, c->head.method, target);
	enum head_result body = body_init(&c->body, &c->head, c->streamed ? INT64_MAX : max, &err);
	if (body == HEAD_BAD) {
		conn_refuse(c, &err);
		return;
	}
	if (!c->link && !open_link(c)) {
		log_msg(LOG_WARN, "http", "there are no descriptors or memory for a request from %s", c->peer.name);
		conn_refuse(c, &(struct head_error){503, "server_overloaded",
						    "The server has no descriptors or memory left for this request."});
		return;
	}
	conn_set_state(c, body == HEAD_DONE ? CONN_WAIT : CONN_BODY);
	conn_set_deadline(c, body == HEAD_DONE ? -1 : c->host->config->body_timeout);
	if (!pass_on(c, c->head.length))
		conn_drop(c);
}

static void read_head(struct conn *c)
{
	if (c->head.at == 0) {
		/* Empty lines before a request are to be ignored (RFC 9112, 2.2). */
		size_t skip = 0;
		while (c->in.len - skip >= 2 && memcmp(c->in.data + skip, "\r\n", 2) == 0)
			skip += 2;
		consume(&c->in, skip);
		if (c->in.len == 0 || (c->in.len == 1 && c->in.data[0] == '\r'))
			return;
		/* The first byte of a later request: from now on it has the time that a head has. */
		if (c->served)
			conn_set_deadline(c, c->host->config->header_timeout);
	}
	struct head_error err;
	enum head_result r = head_feed(&c->head, c->in.data, c->in.len, (size_t)c->host->config->max_header, &err);
	if (r == HEAD_BAD)
		conn_refuse(c, &err);
	else if (r == HEAD_DONE)
		begin_request(c);
}

static void read_body(struct conn *c)
{
	struct head_error err;
	size_t used;
	enum head_result r = body_feed(&c->body, c->in.data, c->in.len, &used, &err);
	if (r == HEAD_BAD) {
		conn_refuse(c, &err);
		return;
	}
	if (r == HEAD_DONE) {
		conn_set_state(c, CONN_WAIT);
		conn_set_deadline(c, -1);
	} else if (c->streamed) {
		/* It may be as long as it likes, as long as it moves. */
		conn_set_deadline(c, c->host->config->body_timeout);
	}
	if (!pass_on(c, used))
		conn_drop(c);
}

void conn_http_advance(struct conn *c)
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
	if (c->pair->ended || !c->head.keep_alive || c->host->draining || (c->half_closed && c->in.len == 0)) {
		conn_linger(c);
		return;
	}
	int64_t idle = c->host->config->idle_timeout;
	c->served = true;
	c->answered = c->input_waits = false;
	head_init(&c->head);
	conn_set_state(c, CONN_HEAD);
	conn_set_deadline(c, idle < KEEP_LINK_MS ? idle : KEEP_LINK_MS);
	conn_http_advance(c);
}

void conn_http_idle(struct conn *c)
{
	int64_t left = c->host->config->idle_timeout - KEEP_LINK_MS;
	if (!c->pair || left <= 0) {
		conn_drop(c);
		return;
	}
	/* From here on it costs one descriptor and a kilobyte; the next request makes a new pair. */
	conn_close_pair(c);
	conn_set_deadline(c, left);
}

void conn_http_pump(struct conn *c)
{
	if (!c->pair || !conn_pump(c))
		return;
	if (c->answered && c->state == CONN_WAIT)
		next_request(c);
	else if (c->pair->ended || c->answered)
		conn_linger(c); /* answered before the body was complete, or libmicrohttpd gave up */
}

void conn_http_ended(struct conn *c)
{
	if (c->state != CONN_WAIT) {
		conn_http_advance(c);
		return;
	}
	/*
	 * Its request may just have arrived together with the FIN: an answer that is there at once is delivered.
	 * libmicrohttpd takes one run to read a head and one for the handler.
	 */
	for (int i = 0; i < 4 && c->state == CONN_WAIT && !c->answered && http_link_waiting(c->link); i++)
		http_server_run(c->host->http);
	if (c->state == CONN_WAIT && !c->answered && http_link_waiting(c->link))
		conn_drop(c);
}
