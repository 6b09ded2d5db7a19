/*
 * Sessions that move to another daemon of the same model.
 *
 *     POST /v1/sessions/{id}/export    the answer is a stream of bytes
 *     POST /v1/sessions/{id}/import    the body is that stream; {id} is the session's name here
 *
 * Neither side ever has the whole: the export asks the engine for a part when the client has taken the one before it,
 * and the import lets the client wait while the engine has enough to do.
 */
#include <stdlib.h>

#include "engine/base/log.h"
#include "server/api.h"
#include "server/params.h"

enum { AHEAD_BYTES = 4 << 20 }; /* of an import's body that may wait for the engine */

/* Held by the exchange until it closes, and by the command that the engine has not answered yet. */
struct transfer {
	struct waiter waiter;
	struct app *app;
	struct http_exchange *x; /* NULL once closed */
	uint64_t id;
	bool is_export;
	bool asked;    /* a command is under way */
	bool over;     /* the engine has forgotten it */
	bool begun;    /* the stream of an export */
	bool complete; /* the body of an import has come to its end */
	bool end_sent;
	struct buf ahead;
	size_t n_bytes;
};

static void release(struct transfer *t)
{
	if (t->x || t->asked)
		return;
	if (!t->over)
		engine_cancel(t->app->engine, t->id);
	t->app->n_exports -= t->is_export;
	buf_free(&t->ahead);
	free(t);
}

static void closed(struct http_exchange *x, void *arg)
{
	struct transfer *t = arg;
	(void)x;
	t->x = NULL;
	release(t);
}

static void ask(struct transfer *t)
{
	t->asked = true;
	app_wait(t->app, &t->waiter, t->id);
}

/* Registers the exchange; NULL after a refusal. */
static struct transfer *start(struct app *a, struct http_exchange *x, bool is_export,
                              char session[ENGINE_SESSION_ID_MAX + 1])
{
	struct error err = {0};
	struct failure f;
	bool draining_will_do = is_export && engine_state(a->engine) == ENGINE_READY;
	if (!draining_will_do && !app_accepts(a, &f)) {
		reply_failure(x, &f);
		return NULL;
	}
	if (params_session_id(http_param(x, "id"), "id", session, &err) != STATUS_OK) {
		if (is_export)
			error_set_param(&err, STATUS_NOT_FOUND, "id", "There is no session of this name.");
		reply_error(x, &err);
		return NULL;
	}
	struct transfer *t = calloc(1, sizeof *t);
	if (!t) {
		failure_set(&f, FAILURE_NOMEM, NULL, "There is no memory to move a session.");
		reply_failure(x, &f);
		return NULL;
	}
	t->app = a;
	t->x = x;
	t->id = engine_next_id(a->engine);
	t->is_export = is_export;
	a->n_exports += is_export;
	http_on_close(x, closed, t);
	ask(t);
	return t;
}

static void log_transfer(const struct transfer *t, const char *end)
{
	struct log_line l;
	log_begin(&l, LOG_INFO, "session_moved");
	log_str(&l, "path", http_path(t->x));
	log_text(&l, "id", http_request_id(t->x));
	log_text(&l, "peer", http_peer(t->x));
	log_text(&l, "key", app_key_name(t->app, http_principal(t->x)));
	log_int(&l, "bytes", (int64_t)t->n_bytes);
	log_text(&l, "end", end);
	log_end(&l);
}

/* ---- Out ---- */

static void drained(struct http_exchange *x, void *arg)
{
	struct transfer *t = arg;
	(void)x;
	ask(t);
	engine_session_export_next(t->app->engine, t->id);
}

static void exported(struct waiter *w, const struct engine_event *ev)
{
	struct transfer *t = list_entry(w, struct transfer, waiter);
	t->asked = false;
	t->over = ev->type == ENGINE_EVENT_ERROR || !ev->more;
	if (!t->x) {
		release(t);
	} else if (ev->type == ENGINE_EVENT_ERROR && !t->begun) {
		reply_error(t->x, &ev->error);
	} else if (ev->type == ENGINE_EVENT_ERROR) {
		log_transfer(t, ev->error.message);
		http_stream_abort(t->x);
	} else if ((!t->begun && http_stream_begin(t->x, 200, "application/octet-stream") != STATUS_OK) ||
		   http_stream_write(t->x, ev->text.data, ev->text.len) != STATUS_OK) {
		http_stream_abort(t->x);
	} else {
		t->begun = true;
		t->n_bytes += ev->text.len;
		if (ev->more) {
			http_on_drained(t->x, drained, t);
		} else {
			log_transfer(t, "complete");
			http_stream_end(t->x);
		}
	}
}

void api_session_export(struct http_exchange *x, void *app)
{
	struct app *a = app;
	char session[ENGINE_SESSION_ID_MAX + 1];
	struct transfer *t = start(a, x, true, session);
	if (!t)
		return;
	t->waiter.event = exported;
	engine_session_export(a->engine, t->id, http_principal(x), session);
}

/* ---- In ---- */

/* Hands over what has come, or that nothing more will. */
static void hand_over(struct transfer *t)
{
	size_t n = 0;
	if (t->asked || t->over || t->end_sent || (t->ahead.len == 0 && !t->complete))
		return;
	char *data = buf_take(&t->ahead, &n);
	t->n_bytes += n;
	t->end_sent = n == 0;
	ask(t);
	engine_session_import_data(t->app->engine, t->id, data, n);
}

static bool body(struct http_exchange *x, const char *data, size_t n, void *arg)
{
	struct transfer *t = arg;
	struct failure f;
	if (t->ahead.len >= AHEAD_BYTES)
		return false;
	buf_append(&t->ahead, data, n);
	t->complete = n == 0;
	if (t->ahead.failed) {
		failure_set(&f, FAILURE_NOMEM, NULL, "There is no memory to import a session.");
		reply_failure(x, &f);
		return true;
	}
	hand_over(t);
	return true;
}

static void imported(struct waiter *w, const struct engine_event *ev)
{
	struct transfer *t = list_entry(w, struct transfer, waiter);
	t->asked = false;
	t->over = ev->type != ENGINE_EVENT_IMPORT;
	if (!t->x) {
		release(t);
	} else if (ev->type == ENGINE_EVENT_ERROR) {
		reply_error(t->x, &ev->error);
	} else if (ev->type == ENGINE_EVENT_SESSION) {
		log_transfer(t, "complete");
		reply_session(t->app, t->x, ev);
	} else {
		hand_over(t);
		http_body_resume(t->x);
	}
}

void api_session_import(struct http_exchange *x, void *app)
{
	struct app *a = app;
	char session[ENGINE_SESSION_ID_MAX + 1];
	struct transfer *t = start(a, x, false, session);
	if (!t)
		return;
	t->waiter.event = imported;
	http_on_body(x, body, t);
	engine_session_import(a->engine, t->id, http_principal(x), session);
}
