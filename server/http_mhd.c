/*
 * libmicrohttpd on the libuv loop: its epoll descriptor is polled, and it runs (never blocking) in the iteration in
 * which there is something to do for it.
 */
#include "server/http_mhd.h"

#include <errno.h>
#include <microhttpd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "engine/base/log.h"

/* MHD_Result became a type of its own in 0.9.71. */
#if MHD_VERSION < 0x00097100
#error "libmicrohttpd 0.9.71 or newer is needed"
#endif

/* A request refused before its body came (401, 404) still reads this much of it, to keep the connection. */
enum { EARLY_READ_BYTES = 256 * 1024 };

/*
 * With the rest of that memory, which is free by then: a piece of a stream up to about 128 KiB goes out as one chunk.
 */
enum { OUTPUT_ROOM = 32 * 1024 };

struct http_server {
	uv_loop_t *loop;
	const struct config *config;
	const struct http_app *app;
	struct meter *meter;
	size_t pool_bytes; /* what libmicrohttpd takes for a connection */
	struct MHD_Daemon *daemon;
	struct MHD_Response *out_of_memory; /* made beforehand: what is said when nothing else can be */
	uv_poll_t poll;	      /* its epoll descriptor */
	uv_timer_t timer;     /* its timeouts */
	uv_prepare_t prepare; /* runs before the loop sleeps: work left by timers */
	uv_check_t check;     /* runs right after it woke: work left by the callbacks of this iteration */
	int n_handles;
	bool running, kicked, draining, closing;
	struct list events; /* http_link.event_node */
	struct http_link *adding;
	int64_t n_links;
	void (*closed)(void *arg);
	void *closed_arg;
};

const struct http_app *http_server_app(const struct http_server *s)
{
	return s->app;
}

bool http_server_draining(const struct http_server *s)
{
	return s->draining;
}

struct meter *http_server_meter(const struct http_server *s)
{
	return s->meter;
}

void http_server_drain(struct http_server *s)
{
	s->draining = true;
}

void http_server_kick(struct http_server *s)
{
	s->kicked = true;
}

void http_link_post(struct http_link *l, unsigned event)
{
	if (!l->conn)
		return;
	l->events |= event;
	list_remove(&l->event_node);
	list_push_back(&l->server->events, &l->event_node);
	l->server->kicked = true;
}

static void deliver_events(struct http_server *s)
{
	struct list *node;
	while ((node = list_pop_front(&s->events))) {
		struct http_link *l = list_entry(node, struct http_link, event_node);
		unsigned events = l->events;
		l->events = 0;
		if (l->conn)
			conn_event(l->conn, events);
	}
}

static void on_timer(uv_timer_t *handle)
{
	http_server_kick(handle->data);
}

void http_server_run(struct http_server *s)
{
	if (s->running || !s->daemon)
		return;
	s->running = true;
	s->kicked = false;
	MHD_run(s->daemon);
	s->running = false;
	deliver_events(s);

	MHD_UNSIGNED_LONG_LONG ms;
	if (MHD_get_timeout(s->daemon, &ms) == MHD_YES)
		uv_timer_start(&s->timer, on_timer, ms, 0);
	else
		uv_timer_stop(&s->timer);
}

static void on_poll(uv_poll_t *handle, int status, int events)
{
	struct http_server *s = handle->data;
	(void)events;
	if (status < 0)
		log_msg(LOG_ERROR, "http", "polling libmicrohttpd failed: %s", uv_strerror(status));
	http_server_kick(s);
}

static void on_closed(uv_handle_t *handle)
{
	struct http_server *s = handle->data;
	if (--s->n_handles)
		return;
	void (*closed)(void *) = s->closed;
	void *arg = s->closed_arg;
	free(s);
	if (closed)
		closed(arg);
}

/* Once every connection has been let go of, outside of libmicrohttpd's own callbacks. */
static void finish_close(struct http_server *s)
{
	uv_close((uv_handle_t *)&s->poll, on_closed);
	uv_close((uv_handle_t *)&s->timer, on_closed);
	uv_close((uv_handle_t *)&s->prepare, on_closed);
	uv_close((uv_handle_t *)&s->check, on_closed);
	MHD_stop_daemon(s->daemon);
	MHD_destroy_response(s->out_of_memory);
	s->daemon = NULL;
}

static void on_turn(struct http_server *s)
{
	if (s->kicked)
		http_server_run(s);
	if (s->closing && s->daemon && !s->running) {
		/* A few more runs: each lets go of connections whose other end is closed. */
		if (s->n_links)
			http_server_run(s);
		finish_close(s);
	}
}

static void on_prepare(uv_prepare_t *handle)
{
	on_turn(handle->data);
}

static void on_check(uv_check_t *handle)
{
	on_turn(handle->data);
}

/* ---- libmicrohttpd's callbacks ---- */

static struct http_link *link_of(struct MHD_Connection *mhd)
{
	const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
	return info ? info->socket_context : NULL;
}

static void on_connection(void *cls, struct MHD_Connection *mhd, void **context,
			  enum MHD_ConnectionNotificationCode code)
{
	struct http_server *s = cls;
	if (code == MHD_CONNECTION_NOTIFY_STARTED) {
		*context = s->adding;
		if (s->adding)
			s->adding->mhd = mhd;
		return;
	}
	struct http_link *l = *context;
	if (!l)
		return;
	l->mhd = NULL;
	*context = NULL;
	meter_set(s->meter, &l->metered, 0);
	if (l->conn)
		return; /* conn.c sees the end of the pair, and then calls http_link_close() */
	list_remove(&l->event_node);
	s->n_links--;
	free(l);
}

static void on_completed(void *cls, struct MHD_Connection *mhd, void **con_cls, enum MHD_RequestTerminationCode code)
{
	struct http_exchange *x = *con_cls;
	(void)cls;
	(void)mhd;
	(void)code;
	if (!x)
		return;
	*con_cls = NULL;
	struct http_link *l = x->link;
	l->x = NULL;
	if (!(l->events & LINK_UPGRADE))
		http_link_post(l, LINK_ANSWERED);
	http_exchange_free(x);
}

void http_response_free(struct MHD_Response *r, const struct http_server *s)
{
	if (r && r != s->out_of_memory)
		MHD_destroy_response(r);
}

struct MHD_Response *http_server_out_of_memory(const struct http_server *s)
{
	return s->out_of_memory;
}

static enum MHD_Result queue_response(struct http_exchange *x)
{
	struct MHD_Response *r = x->response;
	if (!r)
		return MHD_NO;
	x->response = NULL;
	enum MHD_Result result = MHD_queue_response(x->mhd, (unsigned)x->status, r);
	http_response_free(r, x->link->server); /* libmicrohttpd has its own reference */
	return result;
}

/* True when the WebSocket is to be opened; otherwise the exchange was answered. */
static bool check_websocket(struct http_exchange *x, const struct head *head)
{
	if (!(x->route->flags & ROUTE_WEBSOCKET)) {
		http_exchange_refuse(x, 404, "not_found", "There is no WebSocket at this path.");
	} else if (!head->ws_version_ok) {
		http_set_header(x, "Sec-WebSocket-Version", "13");
		http_exchange_refuse(x, 426, "websocket_version",
				     "The only WebSocket version that is supported is 13.");
	} else if (!head->ws_key[0]) {
		http_exchange_refuse(x, 400, "websocket_key", "The Sec-WebSocket-Key header is missing or malformed.");
	} else {
		return true;
	}
	return false;
}

static void refuse_for_memory(struct http_exchange *x)
{
	http_set_header(x, "Retry-After", "1");
	http_exchange_refuse(x, 503, "server_overloaded", "The server has no room for a request of this size now.");
}

/* The head is there. */
static enum MHD_Result on_head(struct http_server *s, struct http_link *l, const char *url, struct http_exchange **out)
{
	const struct head *head = conn_head(l->conn);
	struct http_exchange *x = http_exchange_create(l, head->method, url);
	if (!x)
		return MHD_NO;
	x->config = s->config;
	*out = l->x = x;

	x->route = s->app->dispatch(x, s->app->app);
	if (x->starved && !x->answered)
		http_exchange_refuse(x, 503, "out_of_memory", "There is no memory for the request.");
	if (!x->route && !x->answered)
		http_exchange_refuse(x, 404, "not_found", "There is nothing at this path.");
	if (x->route && !x->answered && head->wants_websocket && check_websocket(x, head)) {
		http_link_post(l, LINK_UPGRADE);
		return MHD_NO;
	}
	if (x->route && !x->answered && !(x->route->flags & ROUTE_STREAMED) && head->framing == HEAD_SIZED &&
	    !meter_allows(s->meter, head->content_length, head->content_length))
		refuse_for_memory(x);
	/*
	 * Refused already, and the client waits for a 100 or has much to send: answer now. libmicrohttpd then closes
	 * the connection; it does so properly for these two methods only.
	 */
	if (x->route && !x->answered && (x->route->flags & ROUTE_STREAMED))
		x->route->handler(x, s->app->app);
	if (x->answered && head->framing != HEAD_NO_BODY && (head->method == HTTP_POST || head->method == HTTP_PUT) &&
	    (head->expects_continue || head->framing == HEAD_CHUNKED || head->content_length > EARLY_READ_BYTES))
		return queue_response(x);
	return MHD_YES;
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *mhd, const char *url, const char *method,
				  const char *version, const char *data, size_t *size, void **con_cls)
{
	struct http_server *s = cls;
	struct http_exchange *x = *con_cls;
	(void)method;
	(void)version;

	if (!x) {
		struct http_link *l = link_of(mhd);
		if (!l || !l->conn)
			return MHD_NO;
		return on_head(s, l, url, (struct http_exchange **)con_cls);
	}
	if (x->gone)
		return MHD_NO;
	if (*size && x->on_body && !x->answered) {
		if (x->on_body(x, data, *size, x->on_body_arg)) {
			*size = 0;
		} else if (!x->answered) {
			x->suspended = true;
			MHD_suspend_connection(mhd);
		}
		return MHD_YES;
	}
	if (*size) {
		if (!x->answered && !meter_allows(s->meter, x->body.len + *size, *size))
			refuse_for_memory(x);
		if (!x->answered)
			buf_append(&x->body, data, *size);
		http_exchange_measure(x);
		*size = 0;
		if (x->body.failed)
			http_exchange_refuse(x, 503, "out_of_memory", "There is no memory for the request body.");
		return MHD_YES;
	}
	if (!x->handled) {
		x->handled = true;
		if (x->on_body && !x->answered)
			x->on_body(x, NULL, 0, x->on_body_arg);
		else if (!x->answered && !(x->route->flags & ROUTE_STREAMED))
			x->route->handler(x, s->app->app);
	}
	if (x->answered)
		return queue_response(x);
	x->suspended = true;
	MHD_suspend_connection(mhd);
	return MHD_YES;
}

static void on_log(void *cls, const char *fmt, va_list args)
{
	(void)cls;
	if (!log_enabled(LOG_DEBUG))
		return;
	struct buf text = BUF_INIT;
	buf_vprintf(&text, fmt, args);
	while (text.len && text.data[text.len - 1] == '\n')
		text.data[--text.len] = '\0';
	log_msg(LOG_DEBUG, "libmicrohttpd", "%s", text.data ? text.data : "");
	buf_free(&text);
}

/* ---- For http.c and conn.c ---- */

void http_exchange_wake(struct http_exchange *x)
{
	if (x->suspended) {
		x->suspended = false;
		MHD_resume_connection(x->mhd);
	}
	http_server_kick(x->link->server);
}

struct http_link *http_link_open(struct http_server *s, int fd, struct conn *conn)
{
	struct http_link *l = calloc(1, sizeof *l);
	if (!l) {
		close(fd);
		return NULL;
	}
	l->server = s;
	l->conn = conn;
	snprintf(l->peer, sizeof l->peer, "%s", conn_peer(conn));
	list_init(&l->event_node);

	/* Without threads MHD_add_connection calls on_connection() before it returns. */
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	s->adding = l;
	enum MHD_Result added = MHD_add_connection(s->daemon, fd, (struct sockaddr *)&address, sizeof address);
	s->adding = NULL;
	if (added != MHD_YES || !l->mhd) {
		/* libmicrohttpd has closed fd. */
		free(l);
		return NULL;
	}
	s->n_links++;
	meter_set(s->meter, &l->metered, s->pool_bytes);
	return l;
}

void http_link_close(struct http_link *l)
{
	struct http_server *s = l->server;
	struct http_exchange *x = l->x;

	l->conn = NULL;
	l->events = 0;
	list_remove(&l->event_node);
	if (!l->mhd) {
		s->n_links--;
		free(l);
		return;
	}
	if (x) {
		x->gone = true;
		http_exchange_close(x);
		http_exchange_wake(x);
	}
	http_server_kick(s);
}

bool http_link_waiting(const struct http_link *l)
{
	return !l->x || !l->x->answered || (l->x->streaming && !l->x->ended);
}

bool http_link_begun(const struct http_link *l)
{
	return l->x && l->x->answered;
}

static struct MHD_Response *make_out_of_memory(void)
{
	static const char body[] =
		"{\"error\":{\"message\":\"There is no memory to answer.\",\"type\":\"server_error\","
		"\"param\":null,\"code\":\"out_of_memory\"}}";
	static const char *const headers[][2] = {{"Content-Type", "application/json"}, {"Retry-After", "1"}};
	struct MHD_Response *r = MHD_create_response_from_buffer(sizeof body - 1, (void *)body, MHD_RESPMEM_PERSISTENT);
	for (size_t i = 0; r && i < sizeof headers / sizeof headers[0]; i++) {
		if (MHD_add_response_header(r, headers[i][0], headers[i][1]) != MHD_YES) {
			MHD_destroy_response(r);
			return NULL;
		}
	}
	return r;
}

enum status http_server_create(uv_loop_t *loop, const struct config *config, const struct http_app *app,
                               struct meter *meter, struct http_server **out, struct error *err)
{
	struct http_server *s = calloc(1, sizeof *s);
	if (!s)
		return error_set(err, STATUS_NOMEM, "There is no memory for the HTTP server.");
	s->loop = loop;
	s->config = config;
	s->app = app;
	s->meter = meter;
	list_init(&s->events);

	/*
	 * A head up to max_header must fit, a copy of its cookies, a record for each of its fields, and room for
	 * output: conn.c has refused what is larger. The limit of connections is conn.c's business, too.
	 */
	s->pool_bytes = (size_t)config->max_header * 2 + HEAD_MAX_FIELDS * 128 + OUTPUT_ROOM;
	unsigned limit = (unsigned)config->max_connections * 2 + 1024;
	s->daemon = MHD_start_daemon(
		MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_NO_LISTEN_SOCKET | MHD_USE_ERROR_LOG, 0, NULL, NULL,
		on_request, s, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, MHD_OPTION_NOTIFY_CONNECTION, on_connection, s,
		MHD_OPTION_NOTIFY_COMPLETED, on_completed, s, MHD_OPTION_CONNECTION_MEMORY_LIMIT, s->pool_bytes,
		MHD_OPTION_CONNECTION_LIMIT, limit, MHD_OPTION_CONNECTION_TIMEOUT, 0u, MHD_OPTION_END);
	s->out_of_memory = make_out_of_memory();
	const union MHD_DaemonInfo *info =
		s->daemon && s->out_of_memory ? MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_EPOLL_FD) : NULL;
	if (!info || uv_poll_init(loop, &s->poll, info->epoll_fd) != 0) {
		if (s->daemon)
			MHD_stop_daemon(s->daemon);
		if (s->out_of_memory)
			MHD_destroy_response(s->out_of_memory);
		free(s);
		return error_set(err, STATUS_INTERNAL, "libmicrohttpd could not be started.");
	}
	uv_timer_init(loop, &s->timer);
	uv_prepare_init(loop, &s->prepare);
	uv_check_init(loop, &s->check);
	s->n_handles = 4;
	s->poll.data = s->timer.data = s->prepare.data = s->check.data = s;
	uv_poll_start(&s->poll, UV_READABLE, on_poll);
	uv_prepare_start(&s->prepare, on_prepare);
	uv_check_start(&s->check, on_check);
	*out = s;
	return STATUS_OK;
}

void http_server_close(struct http_server *s, void (*closed)(void *arg), void *arg)
{
	s->closing = true;
	s->closed = closed;
	s->closed_arg = arg;
	/*
	 * The rest happens in on_turn(), outside of libmicrohttpd's callbacks; the timer makes sure that there is a
	 * turn.
	 */
	uv_timer_start(&s->timer, on_timer, 0, 0);
}
