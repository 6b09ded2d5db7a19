/*
 * The transport alone, for tests/api/test_transport.py: listener, HTTP and WebSocket with small handlers and no engine.
 * Takes the daemon's options as --name VALUE, in bytes and milliseconds, prints "listening on port N" and drains on
 * SIGTERM as the daemon does.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "engine/base/log.h"
#include "server/http.h"
#include "server/listener.h"
#include "server/loop.h"
#include "server/ws.h"

struct state {
	uv_loop_t loop;
	struct config config;
	struct listener *listener;
	struct loop_timer *drain;
	uv_signal_t term;
	int64_t written; /* bytes into streams */
	int64_t started, closed, ws_opened, ws_closed, alive;
};

static struct state state;

static void reply(struct http_exchange *x, int status, const char *text)
{
	struct buf body = BUF_INIT;
	buf_puts(&body, text);
	http_reply(x, status, "application/json", &body);
}

static int64_t query_number(struct http_exchange *x, const char *name, int64_t otherwise)
{
	struct str v = http_query(x, name);
	return v.p ? strtoll(v.p, NULL, 10) : otherwise;
}

static void get_live(struct http_exchange *x, void *app)
{
	(void)app;
	reply(x, 200, "{\"status\":\"ok\"}");
}

static void post_tokenize(struct http_exchange *x, void *app)
{
	(void)app;
	struct str body = http_body(x);
	if (body.n == 0 || body.p[0] != '{') {
		reply(x, 400, "{}");
		return;
	}
	reply(x, 200, "{\"tokens\":[]}");
}

/* What the handler saw of the request, for tests of the accessors. */
static void post_echo(struct http_exchange *x, void *app)
{
	(void)app;
	struct buf out = BUF_INIT;
	struct str body = http_body(x), path = http_path(x), q = http_query(x, "q"), h = http_header(x, "x-test");
	buf_puts(&out, "{\"path\":");
	buf_json_string(&out, path.p, path.n);
	buf_puts(&out, ",\"q\":");
	buf_json_string(&out, q.p ? q.p : "", q.n);
	buf_puts(&out, ",\"x-test\":");
	buf_json_string(&out, h.p ? h.p : "", h.n);
	buf_puts(&out, ",\"peer\":");
	buf_json_string(&out, http_peer(x), strlen(http_peer(x)));
	uint32_t sum = 0;
	for (size_t i = 0; i < body.n; i++)
		sum = sum * 31 + (unsigned char)body.p[i];
	buf_printf(&out, ",\"length\":%zu,\"sum\":%u}", body.n, sum);
	http_set_header(x, "x-echo", "yes");
	http_reply(x, 200, "application/json", &out);
}

static void get_stats(struct http_exchange *x, void *app)
{
	(void)app;
	struct listener_stats s;
	struct buf out = BUF_INIT;
	struct rusage usage;
	listener_stats(state.listener, &s);
	getrusage(RUSAGE_SELF, &usage);
	buf_printf(&out,
	           "{\"started\":%lld,\"closed\":%lld,\"active\":%d,\"connections\":%d,\"websockets\":%d,\"parked\":%d,"
	           "\"client_bytes\":%lld,\"dropped_"
	           "slow\":%llu,"
	           "\"refused\":%llu,\"ws_opened\":%lld,\"ws_closed\":%lld,\"alive\":%lld,\"written\":%lld}",
	           (long long)state.started, (long long)state.closed, listener_active(state.listener), s.connections,
	           s.websockets, s.parked, (long long)s.client_bytes, (unsigned long long)s.dropped_slow,
	           (unsigned long long)s.refused, (long long)state.ws_opened, (long long)state.ws_closed,
	           (long long)state.alive, (long long)state.written);
	http_reply(x, 200, "application/json", &out);
}

/* An answer that comes later, or never: what a generation looks like from here. */
struct pending {
	struct http_exchange *x;
	struct loop_timer *timer;
	int64_t left, size, n;
};

static void on_exchange_closed(struct http_exchange *x, void *arg)
{
	struct pending *p = arg;
	(void)x;
	state.closed++;
	loop_timer_stop(p->timer);
	free(p);
}

static struct pending *begin(struct http_exchange *x)
{
	struct pending *p = calloc(1, sizeof *p);
	p->x = x;
	state.started++;
	http_on_close(x, on_exchange_closed, p);
	return p;
}

static void on_slow(void *arg)
{
	struct pending *p = arg;
	reply(p->x, 200, "{\"slow\":true}");
}

/* /slow?ms=N */
static void get_slow(struct http_exchange *x, void *app)
{
	(void)app;
	struct pending *p = begin(x);
	p->timer = loop_timer_start(&state.loop, (uint64_t)query_number(x, "ms", 1000), 0, on_slow, p);
}

/* /big?bytes=N: a whole answer of that size */
static void get_big(struct http_exchange *x, void *app)
{
	(void)app;
	struct buf out = BUF_INIT;
	size_t n = (size_t)query_number(x, "bytes", 1 << 20);
	begin(x);
	if (buf_reserve(&out, n)) {
		memset(out.data, 'b', n);
		out.len = n;
	}
	http_reply(x, 200, "text/plain", &out);
}

static void on_stream(void *arg)
{
	struct pending *p = arg;
	struct buf event = BUF_INIT;
	buf_printf(&event, "data: {\"n\":%lld,\"pad\":\"", (long long)p->n++);
	while ((int64_t)event.len < p->size)
		buf_putc(&event, 'x');
	buf_puts(&event, "\"}\n\n");
	struct http_exchange *x = p->x;
	enum status status = http_stream_write(x, event.data, event.len);
	state.written += (int64_t)event.len;
	buf_free(&event);
	if (status != STATUS_OK) {
		loop_timer_stop(p->timer);
		p->timer = NULL;
		return;
	}
	if (--p->left == 0) {
		loop_timer_stop(p->timer);
		p->timer = NULL;
		http_stream_write(x, "data: [DONE]\n\n", 14);
		http_stream_end(x);
	}
}

/* /stream?n=EVENTS&ms=BETWEEN&size=BYTES */
static void get_stream(struct http_exchange *x, void *app)
{
	(void)app;
	struct pending *p = begin(x);
	p->left = query_number(x, "n", 10);
	p->size = query_number(x, "size", 0);
	http_set_header(x, "X-Accel-Buffering", "no");
	http_stream_begin(x, 200, "text/event-stream");
	uint64_t ms = (uint64_t)query_number(x, "ms", 1);
	p->timer = loop_timer_start(&state.loop, ms, ms ? ms : 1, on_stream, p);
}

/* All events in one go, from inside the handler. */
static void get_burst(struct http_exchange *x, void *app)
{
	(void)app;
	int64_t n = query_number(x, "n", 10);
	begin(x);
	http_stream_begin(x, 200, "text/event-stream");
	for (int64_t i = 0; i < n; i++) {
		char event[64];
		int len = snprintf(event, sizeof event, "data: %lld\n\n", (long long)i);
		http_stream_write(x, event, (size_t)len);
	}
	http_stream_end(x);
}

static void get_responses(struct http_exchange *x, void *app)
{
	(void)app;
	reply(x, 426,
	      "{\"error\":{\"message\":\"This is a WebSocket.\",\"type\":\"invalid_request_error\",\"param\":null,"
	      "\"code\":\"upgrade_required\"}}");
}

static const struct route routes[] = {
	{HTTP_GET, "/health/live", get_live, ROUTE_OPEN},
	{HTTP_POST, "/tokenize", post_tokenize, 0},
	{HTTP_POST, "/echo", post_echo, 0},
	{HTTP_PATCH, "/echo", post_echo, 0},
	{HTTP_DELETE, "/echo", post_echo, 0},
	{HTTP_GET, "/stats", get_stats, 0},
	{HTTP_GET, "/slow", get_slow, 0},
	{HTTP_POST, "/slow", get_slow, 0},
	{HTTP_GET, "/big", get_big, 0},
	{HTTP_GET, "/stream", get_stream, 0},
	{HTTP_GET, "/burst", get_burst, 0},
	{HTTP_GET, "/v1/responses", get_responses, ROUTE_WEBSOCKET},
};

static const char *error_body(struct buf *out, int status, const char *code, const char *message)
{
	buf_puts(out, "{\"error\":{\"message\":");
	buf_json_string(out, message, strlen(message));
	buf_printf(out, ",\"type\":\"%s\",\"param\":null,\"code\":\"%s\"}}",
		   status < 500 ? "invalid_request_error" : "server_error", code);
	return "application/json";
}

static void refuse(struct http_exchange *x, int status, const char *code, const char *message)
{
	struct buf body = BUF_INIT;
	const char *type = error_body(&body, status, code, message);
	http_reply(x, status, type, &body);
}

static const struct route *dispatch(struct http_exchange *x, void *app)
{
	(void)app;
	enum http_method method = http_method(x) == HTTP_HEAD ? HTTP_GET : http_method(x);
	const struct route *found = NULL;
	bool path_known = false;
	for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
		if (!str_is(http_path(x), routes[i].pattern))
			continue;
		path_known = true;
		if (routes[i].method == method)
			found = &routes[i];
	}
	if (!found) {
		refuse(x, path_known ? 405 : 404, path_known ? "method_not_allowed" : "not_found",
		       "There is no such route.");
		return NULL;
	}
	if (state.config.api_key && !(found->flags & ROUTE_OPEN)) {
		struct str auth = http_header(x, "authorization");
		if (!str_starts(auth, "Bearer ") ||
		    !str_is((struct str){auth.p + 7, auth.n - 7}, state.config.api_key)) {
			refuse(x, 401, "invalid_api_key", "The API key is wrong.");
			return NULL;
		}
	}
	return found;
}

/* ---- WebSocket ---- */

static void ws_opened(struct ws_conn *c, void *app)
{
	(void)app;
	(void)c;
	state.ws_opened++;
}

static void ws_message(struct ws_conn *c, struct str text, void *app)
{
	(void)app;
	long n = 0, size = 0;
	if (str_starts(text, "close ")) {
		ws_send(c, "closing", 7);
		ws_close(c, atoi(text.p + 6), "asked to");
	} else if (sscanf(text.p, "flood %ld %ld", &n, &size) == 2) {
		char *p = malloc((size_t)size + 1);
		memset(p, 'f', (size_t)size);
		while (n-- && ws_send(c, p, (size_t)size) == STATUS_OK)
			;
		free(p);
	} else {
		ws_send(c, text.n ? text.p : "(empty)", text.n ? text.n : 7);
	}
}

static void ws_alive(struct ws_conn *c, void *app)
{
	(void)app;
	(void)c;
	state.alive++;
}

static void ws_closed(struct ws_conn *c, void *app)
{
	(void)app;
	(void)c;
	state.ws_closed++;
}

/* ---- Start and end ---- */

static void on_listener_closed(void *arg)
{
	(void)arg;
	state.listener = NULL;
}

static void on_drain(void *arg)
{
	static int turns;
	(void)arg;
	if (listener_active(state.listener) && ++turns < 200)
		return;
	loop_timer_stop(state.drain);
	listener_close(state.listener, on_listener_closed, NULL);
}

static void on_term(uv_signal_t *handle, int signo)
{
	(void)signo;
	uv_close((uv_handle_t *)handle, NULL);
	listener_stop_accepting(state.listener);
	listener_close_websockets(state.listener, 1012, "The server restarts.");
	state.drain = loop_timer_start(&state.loop, 10, 10, on_drain, NULL);
}

static void set_string(char **field, const char *value)
{
	*field = (char *)(uintptr_t)value; /* argv and literals outlive it */
}

static void set_number(int64_t *field, const char *value)
{
	*field = strtoll(value, NULL, 10);
}

static void set_bool(bool *field, const char *value)
{
	*field = strcmp(value, "0") != 0;
}

#define DEFAULT_STRING(field, def)  set_string(&state.config.field, def)
#define DEFAULT_BOOL(field, def)    (state.config.field = (def))
#define DEFAULT_INT(field, def)	    (state.config.field = (def))
#define DEFAULT_BYTES(field, def)   (state.config.field = (def))
#define DEFAULT_SECONDS(field, def) (state.config.field = (def))
#define SET_STRING		    set_string
#define SET_BOOL		    set_bool
#define SET_INT			    set_number
#define SET_BYTES		    set_number
#define SET_SECONDS		    set_number

static bool read_options(int argc, char **argv)
{
#define OPT(kind, field, name, def, min, max, help) DEFAULT_##kind(field, def);
#include "config/options.def"
#undef OPT
	for (int i = 1; i < argc; i += 2) {
		bool found = false;
		if (i + 1 == argc || strncmp(argv[i], "--", 2) != 0)
			return false;
#define OPT(kind, field, name, def, min, max, help)                                                                    \
	if (strcmp(argv[i] + 2, name) == 0) {                                                                          \
		SET_##kind(&state.config.field, argv[i + 1]);                                                          \
		found = true;                                                                                          \
	}
#include "config/options.def"
#undef OPT
		if (!found)
			return false;
	}
	return true;
}

int main(int argc, char **argv)
{
	struct error err = {0};
	static const struct http_app http = {.dispatch = dispatch, .error_body = error_body};
	static const struct ws_app ws = {
		.opened = ws_opened, .message = ws_message, .alive = ws_alive, .closed = ws_closed};

	signal(SIGPIPE, SIG_IGN);
	uv_loop_init(&state.loop);
	if (!read_options(argc, argv)) {
		fprintf(stderr, "usage: echo-server [--name VALUE]...\n");
		return 2;
	}
	listener_allow_descriptors(&state.config);
	if (listener_start(&state.loop, &state.config, &http, &ws, &state.listener, &err) != STATUS_OK) {
		fprintf(stderr, "%s\n", err.message);
		uv_run(&state.loop, UV_RUN_DEFAULT);
		uv_loop_close(&state.loop);
		return 1;
	}
	uv_signal_init(&state.loop, &state.term);
	uv_signal_start(&state.term, on_term, SIGTERM);
	printf("listening on port %d\n", listener_port(state.listener));
	fflush(stdout);
	uv_run(&state.loop, UV_RUN_DEFAULT);
	int left = uv_loop_close(&state.loop);
	printf("ended: %lld of %lld exchanges, %lld of %lld websockets closed, loop %s\n", (long long)state.closed,
	       (long long)state.started, (long long)state.ws_closed, (long long)state.ws_opened,
	       left ? uv_strerror(left) : "closed");
	return left ? 1 : 0;
}
