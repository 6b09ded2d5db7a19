#include "tests/support/fake_transport.h"

#include <stdio.h>
#include <strings.h>

#include "engine/base/log.h"
#include "server/json.h"
#include "tests/support/fake_engine.h"
#include "tests/unit/unit.h"

/* What the build makes of the chat page. */
extern const char web_index_html[];
extern const size_t web_index_html_len;
const char web_index_html[] = "<!doctype html>";
const size_t web_index_html_len = sizeof web_index_html - 1;
extern const char web_index_csp[];
const char web_index_csp[] = "default-src 'none'";

enum { MAX_PIECES = 4096, MAX_PAIRS = 32 };

struct pieces {
	struct buf items[MAX_PIECES];
	size_t n;
};

struct pair {
	char name[64];
	char value[1024];
};

struct http_exchange {
	struct list link;
	enum http_method method;
	char path[512];
	char query[512]; /* as it stands behind the path */
	char *body;
	struct pair headers[MAX_PAIRS], params[8], sent[MAX_PAIRS];
	size_t n_headers, n_params, n_sent;
	void *user;
	int32_t principal;
	void (*on_close)(struct http_exchange *x, void *arg);
	void *on_close_arg;
	bool streaming, ended, stalled;
	int status;
	char type[128];
	struct buf all;
	struct pieces writes;
	char *event;
};

struct ws_conn {
	struct list link;
	struct app *app;
	void *user;
	int32_t principal;
	bool stalled;
	size_t unread;
	int close_code;
	struct pieces sent;
};

static struct list exchanges = {&exchanges, &exchanges}, sockets = {&sockets, &sockets};

static void add_piece(struct pieces *p, const void *data, size_t n)
{
	assert_true(p->n < MAX_PIECES);
	p->items[p->n] = BUF_INIT;
	buf_append(&p->items[p->n], data, n);
	buf_append(&p->items[p->n], "", 0);
	p->n++;
}

static void clear_pieces(struct pieces *p)
{
	for (size_t i = 0; i < p->n; i++)
		buf_free(&p->items[i]);
	p->n = 0;
}

/* ---- The application ---- */

void fake_server_start(struct fake_server *s)
{
	*s = (struct fake_server){0};
	/* Only what the API reads. */
	s->config.cors_origin = (char *)"*";
	s->config.session_heartbeat = 30000;
	s->config.max_body = 3000;
	s->config.response_store = 1 << 20;
	s->engine = fake_engine_create();
	assert_non_null(s->engine);
	log_set_level(LOG_OFF);
	assert_int_equal(app_create(&s->config, s->engine, &s->app), STATUS_OK);
}

void fake_server_step(struct fake_server *s)
{
	app_handle_events(s->app);
	fake_engine_step(s->engine);
	app_handle_events(s->app);
}

void fake_server_run(struct fake_server *s)
{
	while (fake_engine_has_events(s->engine) || fake_engine_active(s->engine))
		fake_server_step(s);
}

void fake_server_stop(struct fake_server *s)
{
	while (!list_empty(&exchanges))
		http_fake_close(list_entry(exchanges.next, struct http_exchange, link));
	while (!list_empty(&sockets))
		ws_fake_close(list_entry(sockets.next, struct ws_conn, link));
	/* Everybody has left: what ran has been cancelled, without another step. */
	app_handle_events(s->app);
	assert_int_equal(fake_engine_active(s->engine), 0);
	assert_int_equal(app_active(s->app), 0);
	app_destroy(s->app);
	engine_destroy(s->engine);
}

/* ---- http.h ---- */

static struct str find_pair(const struct pair *pairs, size_t n, const char *name)
{
	for (size_t i = 0; i < n; i++)
		if (strcasecmp(pairs[i].name, name) == 0)
			return str_from(pairs[i].value);
	return (struct str){NULL, 0};
}

enum http_method http_method(const struct http_exchange *x)
{
	return x->method;
}

struct str http_path(const struct http_exchange *x)
{
	return str_from(x->path);
}

struct str http_header(const struct http_exchange *x, const char *name)
{
	return find_pair(x->headers, x->n_headers, name);
}

struct str http_query(const struct http_exchange *x, const char *name)
{
	size_t n = strlen(name);
	for (const char *at = x->query; *at; at += strcspn(at, "&"), at += *at == '&')
		if (strncmp(at, name, n) == 0 && at[n] == '=')
			return (struct str){at + n + 1, strcspn(at + n + 1, "&")};
	return (struct str){NULL, 0};
}

struct str http_param(const struct http_exchange *x, const char *name)
{
	return find_pair(x->params, x->n_params, name);
}

void http_add_param(struct http_exchange *x, const char *name, struct str value)
{
	struct pair *p = &x->params[x->n_params++];
	snprintf(p->name, sizeof p->name, "%s", name);
	snprintf(p->value, sizeof p->value, "%.*s", STR_ARG(value));
}

struct str http_body(const struct http_exchange *x)
{
	return x->body ? str_from(x->body) : (struct str){"", 0};
}

const char *http_peer(const struct http_exchange *x)
{
	(void)x;
	return "192.0.2.1:4711";
}

const char *http_request_id(const struct http_exchange *x)
{
	(void)x;
	return "req-1";
}

void http_set_user(struct http_exchange *x, void *user)
{
	x->user = user;
}

void http_set_principal(struct http_exchange *x, int32_t principal)
{
	x->principal = principal;
}

int32_t http_principal(const struct http_exchange *x)
{
	return x->principal;
}

void *http_user(const struct http_exchange *x)
{
	return x->user;
}

void http_on_close(struct http_exchange *x, void (*cb)(struct http_exchange *x, void *arg), void *arg)
{
	x->on_close = cb;
	x->on_close_arg = arg;
}

void http_set_header(struct http_exchange *x, const char *name, const char *value)
{
	struct pair *p = &x->sent[x->n_sent++];
	assert_int_equal(x->status, 0); /* not after the answer began */
	assert_true(x->n_sent <= MAX_PAIRS);
	snprintf(p->name, sizeof p->name, "%s", name);
	snprintf(p->value, sizeof p->value, "%s", value);
}

void http_reply(struct http_exchange *x, int status, const char *content_type, struct buf *body)
{
	assert_int_equal(x->status, 0);
	x->status = status;
	x->ended = true;
	snprintf(x->type, sizeof x->type, "%s", content_type ? content_type : "");
	buf_append(&x->all, buf_str(body).p, body->len);
	buf_free(body);
}

enum status http_stream_begin(struct http_exchange *x, int status, const char *content_type)
{
	assert_int_equal(x->status, 0);
	x->status = status;
	x->streaming = true;
	snprintf(x->type, sizeof x->type, "%s", content_type);
	return STATUS_OK;
}

enum status http_stream_write(struct http_exchange *x, const void *data, size_t n)
{
	assert_true(x->streaming);
	assert_false(x->ended);
	if (x->stalled)
		return STATUS_LIMIT;
	add_piece(&x->writes, data, n);
	buf_append(&x->all, data, n);
	return STATUS_OK;
}

void http_stream_end(struct http_exchange *x)
{
	x->ended = true;
}

void http_stream_finish(struct http_exchange *x, const void *data, size_t n)
{
	http_stream_write(x, data, n);
	http_stream_end(x);
}

/* What is written is taken at once. */
void http_on_drained(struct http_exchange *x, void (*drained)(struct http_exchange *x, void *arg), void *arg)
{
	drained(x, arg);
}

void http_stream_abort(struct http_exchange *x)
{
	http_fake_close(x);
}

void http_on_body(struct http_exchange *x, bool (*body)(struct http_exchange *x, const char *data, size_t n, void *arg),
                  void *arg)
{
	struct str all = http_body(x);
	if (all.n)
		body(x, all.p, all.n, arg);
	body(x, NULL, 0, arg);
}

void http_body_resume(struct http_exchange *x)
{
	(void)x;
}

size_t http_stream_pending(const struct http_exchange *x)
{
	(void)x;
	return 0;
}

/* ---- The client's side ---- */

static void read_headers(struct http_exchange *x, const char *headers)
{
	while (headers && *headers) {
		struct pair *p = &x->headers[x->n_headers++];
		int used = 0;
		assert_int_equal(sscanf(headers, "%63[^:]: %1023[^\n]\n%n", p->name, p->value, &used), 2);
		headers += used;
	}
}

struct http_exchange *http_fake_request(struct fake_server *s, enum http_method method, const char *path,
					const char *headers, const char *body)
{
	struct http_exchange *x = calloc(1, sizeof *x);
	const struct http_app *http = app_http(s->app);
	const struct route *route;
	assert_non_null(x);
	list_push_back(&exchanges, &x->link);
	x->method = method;
	size_t n = strcspn(path, "?");
	snprintf(x->path, sizeof x->path, "%.*s", (int)n, path);
	snprintf(x->query, sizeof x->query, "%s", path[n] ? path + n + 1 : "");
	read_headers(x, headers);
	route = http->dispatch(x, http->app);
	if (!route) {
		assert_int_not_equal(x->status, 0);
		return x;
	}
	x->body = body ? strdup(body) : NULL;
	route->handler(x, http->app);
	return x;
}

struct http_exchange *http_fake_post(struct fake_server *s, const char *path, const char *body)
{
	struct http_exchange *x = http_fake_request(s, HTTP_POST, path, NULL, body);
	fake_server_run(s);
	return x;
}

struct http_exchange *http_fake_get(struct fake_server *s, const char *path)
{
	struct http_exchange *x = http_fake_request(s, HTTP_GET, path, NULL, NULL);
	fake_server_run(s);
	return x;
}

void http_fake_close(struct http_exchange *x)
{
	list_remove(&x->link);
	if (x->on_close)
		x->on_close(x, x->on_close_arg);
	clear_pieces(&x->writes);
	buf_free(&x->all);
	free(x->event);
	free(x->body);
	free(x);
}

void http_fake_stall(struct http_exchange *x)
{
	x->stalled = true;
}

int http_fake_status(const struct http_exchange *x)
{
	return x->status;
}

const char *http_fake_type(const struct http_exchange *x)
{
	return x->type;
}

const char *http_fake_body(const struct http_exchange *x)
{
	return buf_str(&x->all).p;
}

const char *http_fake_header(const struct http_exchange *x, const char *name)
{
	return find_pair(x->sent, x->n_sent, name).p;
}

bool http_fake_ended(const struct http_exchange *x)
{
	return x->ended;
}

size_t http_fake_n_writes(const struct http_exchange *x)
{
	return x->writes.n;
}

struct str http_fake_write(const struct http_exchange *x, size_t i)
{
	return buf_str(&x->writes.items[i]);
}

const char *http_fake_event(const struct http_exchange *x, size_t i)
{
	assert_true(i < x->writes.n);
	struct str w = http_fake_write(x, i);
	const char *data = strstr(w.p, "data: ");
	struct http_exchange *mutable = (struct http_exchange *)x;
	assert_non_null(data);
	/* One event, whole, and nothing after it. */
	assert_true(w.n >= 2 && memcmp(w.p + w.n - 2, "\n\n", 2) == 0);
	assert_ptr_equal(strstr(w.p, "\n\n"), w.p + w.n - 2);
	free(mutable->event);
	mutable->event = strndup(data + 6, (size_t)(w.p + w.n - 2 - data - 6));
	return mutable->event;
}

/* ---- ws.h ---- */

enum status ws_send(struct ws_conn *c, const char *text, size_t n)
{
	if (c->stalled)
		return STATUS_LIMIT;
	add_piece(&c->sent, text, n);
	return STATUS_OK;
}

size_t ws_unread(const struct ws_conn *c)
{
	return c->unread;
}

void ws_fake_leave_unread(struct ws_conn *c, size_t n)
{
	c->unread = n;
	if (n == 0)
		app_ws(c->app)->drained(c, c->app);
}

void ws_close(struct ws_conn *c, int code, const char *reason)
{
	(void)reason;
	c->close_code = code;
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
	(void)c;
	return "192.0.2.2:4712";
}

struct ws_conn *ws_fake_open(struct fake_server *s)
{
	struct ws_conn *c = calloc(1, sizeof *c);
	assert_non_null(c);
	list_push_back(&sockets, &c->link);
	c->app = s->app;
	app_ws(s->app)->opened(c, app_ws(s->app)->app);
	return c;
}

void ws_fake_say(struct ws_conn *c, const char *text)
{
	app_ws(c->app)->message(c, str_from(text), app_ws(c->app)->app);
}

void ws_fake_alive(struct ws_conn *c)
{
	app_ws(c->app)->alive(c, app_ws(c->app)->app);
}

void ws_fake_close(struct ws_conn *c)
{
	list_remove(&c->link);
	app_ws(c->app)->closed(c, app_ws(c->app)->app);
	clear_pieces(&c->sent);
	free(c);
}

void ws_fake_stall(struct ws_conn *c)
{
	c->stalled = true;
}

size_t ws_fake_n(const struct ws_conn *c)
{
	return c->sent.n;
}

const char *ws_fake_sent(const struct ws_conn *c, size_t i)
{
	assert_true(i < c->sent.n);
	return buf_str(&c->sent.items[i]).p;
}

void ws_fake_clear(struct ws_conn *c)
{
	clear_pieces(&c->sent);
}

int ws_fake_close_code(const struct ws_conn *c)
{
	return c->close_code;
}

/* ---- Looking into JSON ---- */

static void walk(const struct json *j, const char *path, struct buf *out)
{
	char key[64];
	size_t n = strcspn(path, ".");
	struct json next;
	if (*path == '\0') {
		json_write(out, j);
		return;
	}
	snprintf(key, sizeof key, "%.*s", (int)n, path);
	next = json_kind(j) == JSON_LIST ? json_at(j, strtoul(key, NULL, 10)) : json_get(j, key);
	if (!next.node) {
		/* null and absence differ on the wire, if not in json.h. */
		struct json member;
		void *it = NULL;
		bool there = false;
		while (json_kind(j) == JSON_DICT && json_next(j, &it, &member))
			there = there || strcmp(member.key, key) == 0;
		buf_puts(out, there && path[n] == '\0' ? "null" : "(absent)");
		return;
	}
	walk(&next, path[n] ? path + n + 1 : "", out);
}

const char *json_at_path(const char *text, const char *path)
{
	static char result[65536];
	struct buf out = BUF_INIT;
	struct json_doc *doc;
	struct json root;
	struct error err = {0};
	if (json_parse(str_from(text), "The body", &doc, &root, &err) != STATUS_OK) {
		snprintf(result, sizeof result, "(not JSON: %s) %s", err.message, text);
		return result;
	}
	walk(&root, path, &out);
	snprintf(result, sizeof result, "%s", out.data);
	buf_free(&out);
	json_doc_free(doc);
	return result;
}
