#include "server/api.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

#include "engine/base/hash.h"
#include "engine/base/log.h"

const char *app_model_id(const struct app *a)
{
	const struct engine_info *info = engine_info(a->engine);
	if (a->config->model_name && a->config->model_name[0])
		return a->config->model_name;
	return info ? info->file_name : "";
}

const char *app_fingerprint(struct app *a)
{
	const struct engine_info *info = engine_info(a->engine);
	if (!a->fingerprint[0] && info) {
		uint64_t h = hash64(KVASIR_VERSION, sizeof KVASIR_VERSION, info->file_bytes);
		h = hash64(info->file_name, strlen(info->file_name), h);
		h = hash64(info->backend, strlen(info->backend), h);
		snprintf(a->fingerprint, sizeof a->fingerprint, "b%016llx", (unsigned long long)h);
	}
	return a->fingerprint;
}

bool app_is_admin(const struct app *a, int32_t tenant)
{
	const struct auth_key *k = auth_find(&a->auth, tenant);
	return k && k->admin;
}

const char *app_key_name(const struct app *a, int32_t tenant)
{
	bool known = tenant >= 0 && tenant < a->auth.n && !(tenant == 0 && a->auth.open);
	return known ? a->auth.keys[tenant].name : "-";
}

bool app_accepts(const struct app *a, struct failure *f)
{
	if (a->draining) {
		failure_set(f, FAILURE_DRAINING, NULL, "The server is shutting down and takes no new work.");
		return false;
	}
	switch (engine_state(a->engine)) {
	case ENGINE_READY:
		return true;
	case ENGINE_LOADING:
		failure_set(f, FAILURE_LOADING, NULL, "The model is being loaded.");
		return false;
	case ENGINE_FAILED:
		break;
	}
	failure_set(f, FAILURE_LOAD_FAILED, NULL, "The model is not available: %s",
		    engine_load_error(a->engine)->message);
	return false;
}

bool app_serves(const struct app *a, const struct json *model, struct failure *f)
{
	struct str name = {NULL, 0};
	struct error err;
	if (json_read_text(model, &name, &err) != STATUS_OK) {
		failure_from(f, &err);
		return false;
	}
	if (!a->config->strict_model || !name.p || str_is(name, app_model_id(a)))
		return true;
	failure_set(f, FAILURE_NO_MODEL, "model", "The model '%.*s' does not exist; this server has '%s'.",
		    (int)(name.n < 200 ? name.n : 200), name.p, app_model_id(a));
	return false;
}

void make_id(char *out, size_t cap, const char *prefix)
{
	static uint64_t n_fallback;
	uint64_t bits[2];
	if (getrandom(bits, sizeof bits, GRND_NONBLOCK) != sizeof bits) {
		/* Before the kernel's pool is ready: unique at least. */
		bits[0] = (uint64_t)clock_now_ns(clock_system());
		bits[1] = ++n_fallback;
	}
	snprintf(out, cap, "%s%016llx%08llx", prefix, (unsigned long long)bits[0],
		 (unsigned long long)(bits[1] & 0xffffffff));
}

int64_t unix_now(void)
{
	return (int64_t)time(NULL);
}

const char *method_name(enum http_method method)
{
	static const char *const names[] = {
		[HTTP_GET] = "GET",	[HTTP_POST] = "POST",	    [HTTP_DELETE] = "DELETE", [HTTP_PUT] = "PUT",
		[HTTP_PATCH] = "PATCH", [HTTP_OPTIONS] = "OPTIONS", [HTTP_HEAD] = "HEAD",
	};
	return names[method];
}

/* ---- Replies ---- */

void reply_json(struct http_exchange *x, int status, struct buf *body)
{
	struct failure f;
	if (body->failed) {
		buf_free(body);
		failure_set(&f, FAILURE_NOMEM, NULL, "There is no memory to answer.");
		failure_write_body(body, &f);
		status = failure_http(&f);
	}
	http_reply(x, status, "application/json", body);
	buf_free(body);
}

void reply_failure_unlogged(struct http_exchange *x, const struct failure *f)
{
	struct buf body = BUF_INIT;
	char seconds[16];
	if (failure_retry_after(f)) {
		snprintf(seconds, sizeof seconds, "%d", failure_retry_after(f));
		http_set_header(x, "Retry-After", seconds);
	}
	/* A client that keeps its connection to a draining server would only come back to it. */
	if (f->kind == FAILURE_DRAINING)
		http_set_header(x, "Connection", "close");
	if (f->kind == FAILURE_BAD_KEY)
		http_set_header(x, "WWW-Authenticate", "Bearer");
	failure_write_body(&body, f);
	reply_json(x, failure_http(f), &body);
}

void reply_failure(struct http_exchange *x, const struct failure *f)
{
	struct log_line l;
	log_begin(&l, LOG_INFO, "request");
	log_text(&l, "method", method_name(http_method(x)));
	log_str(&l, "path", http_path(x));
	log_int(&l, "status", failure_http(f));
	log_text(&l, "id", http_request_id(x));
	log_text(&l, "peer", http_peer(x));
	log_text(&l, "code", failure_code(f));
	log_text(&l, "param", f->param[0] ? f->param : "-");
	log_end(&l);
	reply_failure_unlogged(x, f);
}

void reply_error(struct http_exchange *x, const struct error *err)
{
	struct failure f;
	failure_from(&f, err);
	reply_failure(x, &f);
}

bool read_body(struct http_exchange *x, bool optional, struct json_doc **doc, struct json *root)
{
	struct error err = {0};
	*doc = NULL;
	*root = (struct json){0};
	if (optional && http_body(x).n == 0)
		return true;
	if (json_parse(http_body(x), "The body", doc, root, &err) == STATUS_OK)
		return true;
	reply_error(x, &err);
	return false;
}

void write_logprob(struct buf *out, float logprob)
{
	if (logprob > -9999.0f)
		buf_printf(out, "%.9g", (double)logprob);
	else
		buf_puts(out, "-9999.0");
}

static void write_token(struct buf *out, struct str piece, float logprob)
{
	buf_puts(out, "{\"token\":");
	buf_json_string(out, piece.p, piece.n);
	buf_puts(out, ",\"logprob\":");
	write_logprob(out, logprob);
	buf_puts(out, ",\"bytes\":[");
	for (size_t i = 0; i < piece.n; i++)
		buf_printf(out, i ? ",%u" : "%u", (unsigned)(unsigned char)piece.p[i]);
	buf_putc(out, ']');
}

void write_token_logprob(const struct app *a, struct buf *out, const struct engine_event *ev, int32_t n_top)
{
	const struct sample_result *s = &ev->sample;
	write_token(out, buf_str(&ev->piece), s->logprob);
	buf_puts(out, ",\"top_logprobs\":[");
	for (int32_t i = 0; i < n_top && i < s->n_top; i++) {
		if (i)
			buf_putc(out, ',');
		write_token(out, engine_token_piece(a->engine, s->top[i].token), s->top[i].logprob);
		buf_putc(out, '}');
	}
	buf_puts(out, "]}");
}

/* ---- One command, one event, one answer ---- */

/* Held by the exchange (until it closes) and by the engine's command (until it is answered). */
struct call {
	struct waiter waiter;
	struct app *app;
	struct http_exchange *x; /* NULL once closed */
	bool answered;
	void (*done)(struct app *a, struct http_exchange *x, const struct engine_event *ev);
};

static void call_event(struct waiter *w, const struct engine_event *ev)
{
	struct call *c = list_entry(w, struct call, waiter);
	struct http_exchange *x = c->x;
	c->answered = true;
	if (!x) {
		free(c);
		return;
	}
	/* The call may be freed by the close that an answer causes: it is not touched from here on. */
	if (ev->type == ENGINE_EVENT_ERROR)
		reply_error(x, &ev->error);
	else
		c->done(c->app, x, ev);
}

static void call_closed(struct http_exchange *x, void *arg)
{
	struct call *c = arg;
	(void)x;
	c->x = NULL;
	if (c->answered)
		free(c);
}

uint64_t call_start(struct app *a, struct http_exchange *x,
		    void (*done)(struct app *a, struct http_exchange *x, const struct engine_event *ev))
{
	struct call *c = calloc(1, sizeof *c);
	struct failure f;
	if (!c) {
		failure_set(&f, FAILURE_NOMEM, NULL, "There is no memory to answer.");
		reply_failure(x, &f);
		return 0;
	}
	c->app = a;
	c->x = x;
	c->done = done;
	c->waiter.event = call_event;
	app_wait(a, &c->waiter, engine_next_id(a->engine));
	http_on_close(x, call_closed, c);
	return c->waiter.id;
}
