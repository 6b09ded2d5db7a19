/*
 * Any bytes as a request body: either a sentence that says what is wrong, or something that each request parser accepts
 * or refuses in order. The whole API stands behind it, with an engine and a transport that are fakes: what is accepted
 * runs to its end, and whatever is answered must be JSON itself.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "engine/base/utf8.h"
#include "server/app.h"
#include "server/json.h"
#include "tests/support/fake_engine.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The chat page of the build is not part of this. */
extern const char web_index_html[];
extern const size_t web_index_html_len;
const char web_index_html[] = "";
const size_t web_index_html_len = 0;
extern const char web_index_csp[];
const char web_index_csp[] = "";

static void expect(int holds)
{
	if (!holds)
		abort();
}

/* ---- A transport that checks what it is given ---- */

struct http_exchange {
	enum http_method method;
	const char *path;
	struct str body;
	struct str id;
	void (*on_close)(struct http_exchange *x, void *arg);
	void *arg;
	int status;
	bool streaming, ended;
};

struct ws_conn {
	void *user;
};

static void expect_json(const char *text, size_t n)
{
	struct json_doc *doc;
	struct json root;
	struct error err = {0};
	expect(utf8_valid(text, n));
	if (json_parse((struct str){text, n}, "The body", &doc, &root, &err) != STATUS_OK) {
		/* jansson does not read keys with NUL in them, nor does json.c read what is too deep or too large. */
		expect(strstr(err.message, "NUL byte") || strstr(err.message, "nested") ||
		       strstr(err.message, "more than"));
		return;
	}
	json_doc_free(doc);
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
	(void)x;
	(void)name;
	return (struct str){NULL, 0};
}

struct str http_query(const struct http_exchange *x, const char *name)
{
	return http_header(x, name);
}

struct str http_param(const struct http_exchange *x, const char *name)
{
	(void)name;
	return x->id;
}

void http_add_param(struct http_exchange *x, const char *name, struct str value)
{
	(void)name;
	x->id = value;
}

struct str http_body(const struct http_exchange *x)
{
	return x->body;
}

const char *http_peer(const struct http_exchange *x)
{
	(void)x;
	return "fuzz";
}

/* There are no keys: everybody is tenant 0. */
void http_set_principal(struct http_exchange *x, int32_t principal)
{
	(void)x;
	expect(principal == 0);
}

int32_t http_principal(const struct http_exchange *x)
{
	(void)x;
	return 0;
}

int32_t ws_principal(const struct ws_conn *c)
{
	(void)c;
	return 0;
}

const char *http_request_id(const struct http_exchange *x)
{
	(void)x;
	return "fuzz";
}

void http_set_user(struct http_exchange *x, void *user)
{
	(void)x;
	(void)user;
}

void *http_user(const struct http_exchange *x)
{
	(void)x;
	return NULL;
}

void http_on_close(struct http_exchange *x, void (*cb)(struct http_exchange *x, void *arg), void *arg)
{
	expect(x->on_close == NULL);
	x->on_close = cb;
	x->arg = arg;
}

void http_set_header(struct http_exchange *x, const char *name, const char *value)
{
	expect(x->status == 0);
	expect(!strpbrk(name, "\r\n") && !strpbrk(value, "\r\n"));
}

void http_reply(struct http_exchange *x, int status, const char *content_type, struct buf *body)
{
	expect(x->status == 0 && status >= 200 && status < 600 && status != 500);
	x->status = status;
	x->ended = true;
	if (strcmp(content_type, "application/json") == 0)
		expect_json(buf_str(body).p, body->len);
	buf_free(body);
}

enum status http_stream_begin(struct http_exchange *x, int status, const char *content_type)
{
	(void)content_type;
	expect(x->status == 0);
	x->status = status;
	x->streaming = true;
	return STATUS_OK;
}

enum status http_stream_write(struct http_exchange *x, const void *data, size_t n)
{
	const char *text = data, *json;
	expect(x->streaming && !x->ended);
	expect(n > 2 && memcmp(text + n - 2, "\n\n", 2) == 0);
	expect(memmem(text, n, "\n\n", 2) == text + n - 2);
	json = memmem(text, n, "data: ", 6);
	expect(json != NULL);
	json += 6;
	if (strncmp(json, "[DONE]", 6) != 0)
		expect_json(json, (size_t)(text + n - 2 - json));
	return STATUS_OK;
}

void http_stream_finish(struct http_exchange *x, const void *data, size_t n)
{
	(void)data;
	(void)n;
	http_stream_end(x);
}

void http_stream_end(struct http_exchange *x)
{
	expect(x->streaming && !x->ended);
	x->ended = true;
}

/* None of the paths below streams a body in, or an answer at the client's pace. */
void http_on_drained(struct http_exchange *x, void (*drained)(struct http_exchange *x, void *arg), void *arg)
{
	(void)x;
	(void)drained;
	(void)arg;
	expect(false);
}

void http_stream_abort(struct http_exchange *x)
{
	(void)x;
	expect(false);
}

void http_on_body(struct http_exchange *x, bool (*body)(struct http_exchange *x, const char *data, size_t n, void *arg),
                  void *arg)
{
	(void)x;
	(void)body;
	(void)arg;
	expect(false);
}

void http_body_resume(struct http_exchange *x)
{
	(void)x;
	expect(false);
}

size_t http_stream_pending(const struct http_exchange *x)
{
	(void)x;
	return 0;
}

enum status ws_send(struct ws_conn *c, const char *text, size_t n)
{
	(void)c;
	expect_json(text, n);
	return STATUS_OK;
}

size_t ws_unread(const struct ws_conn *c)
{
	(void)c;
	return 0;
}

void ws_close(struct ws_conn *c, int code, const char *reason)
{
	(void)c;
	(void)code;
	(void)reason;
	abort();
}

void ws_set_user(struct ws_conn *c, void *user)
{
	c->user = user;
}

void *ws_user(const struct ws_conn *c)
{
	return c->user;
}

const char *ws_peer(const struct ws_conn *c)
{
	(void)c;
	return "fuzz";
}

/* ---- One input ---- */

/* An endless generation need not run to its end. */
static void run(struct engine *e, struct app *a)
{
	for (int i = 0; i < 40 && (fake_engine_has_events(e) || fake_engine_active(e)); i++) {
		app_handle_events(a);
		fake_engine_step(e);
		app_handle_events(a);
	}
}

/* What goes on in the background once everybody has left, which is bounded. */
static void rest(struct engine *e, struct app *a)
{
	app_handle_events(a);
	for (int i = 0; i < 5000 && app_active(a); i++) {
		fake_engine_step(e);
		app_handle_events(a);
	}
	expect(app_active(a) == 0);
}

static void post(struct engine *e, struct app *a, const char *path, struct str body)
{
	struct http_exchange x = {.method = HTTP_POST, .path = path, .body = body};
	const struct route *route = app_http(a)->dispatch(&x, a);
	expect(route != NULL);
	route->handler(&x, a);
	run(e, a);
	if (x.on_close)
		x.on_close(&x, x.arg);
	rest(e, a);
}

static void say(struct engine *e, struct app *a, struct str text)
{
	struct ws_conn c = {NULL};
	const struct ws_app *ws = app_ws(a);
	ws->opened(&c, a);
	ws->message(&c, text, a);
	ws->message(&c, text, a);
	run(e, a);
	ws->message(&c, text, a);
	ws->closed(&c, a);
	rest(e, a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const char *const paths[] = {"/v1/completions", "/v1/chat/completions", "/v1/responses",
	                                    "/tokenize",       "/detokenize",          "/v1/sessions",
	                                    "/v1/chunk",       "/v1/responses/compact"};
	struct config config = {.cors_origin = (char *)"*", .session_heartbeat = 30000, .response_store = 65536};
	struct engine *e = fake_engine_create();
	struct app *a;
	char *copy = malloc(size + 1);
	struct str body = {copy, size};

	expect(e && copy);
	log_set_level(LOG_OFF);
	/* A copy of the exact size, so that a read beyond it is seen. */
	memcpy(copy, data, size);
	copy[size] = '\0';
	expect(app_create(&config, e, &a) == STATUS_OK);
	for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
		post(e, a, paths[i], body);
	say(e, a, body);
	app_destroy(a);
	engine_destroy(e);
	free(copy);
	return 0;
}
