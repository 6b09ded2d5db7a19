/*
 * Sessions: conversations whose KV stays with the server between requests.
 *
 *     POST   /v1/sessions                 {"id"?, "heartbeat_timeout"?, "ttl"?}, in seconds
 *     GET    /v1/sessions
 *     GET    /v1/sessions/{id}
 *     DELETE /v1/sessions/{id}
 *     POST   /v1/sessions/{id}/heartbeat
 */
#include "server/api.h"
#include "server/params.h"

/* Times are seconds, as everywhere in the API. */
static void write_session(const struct engine_session_info *s, struct buf *out)
{
	buf_puts(out, "{\"id\":");
	buf_json_string(out, s->id, strlen(s->id));
	buf_printf(out, ",\"object\":\"session\",\"created\":%lld,\"age\":%.3f,\"idle\":%.3f,\"expires_in\":",
		   (long long)(unix_now() - s->age_ms / 1000), (double)s->age_ms / 1e3, (double)s->idle_ms / 1e3);
	/* The server's own sessions (a WebSocket's) never expire. */
	const struct {
		const char *name;
		int64_t ms;
	} times[] = {
		{"", s->expires_in_ms}, {",\"heartbeat_timeout\":", s->heartbeat_timeout_ms}, {",\"ttl\":", s->ttl_ms}};
	for (size_t i = 0; i < 3; i++) {
		buf_puts(out, times[i].name);
		if (s->heartbeat_timeout_ms < 0 && s->ttl_ms < 0)
			buf_puts(out, "null");
		else if (times[i].ms < 0 && i)
			buf_puts(out, "null");
		else
			buf_printf(out, "%.3f", (double)times[i].ms / 1e3);
	}
	buf_printf(out,
		   ",\"tokens\":%d,\"pages\":%d,\"kv_bytes\":%llu,\"running\":%d,\"waiting\":%d,\"requests\":%llu}",
		   s->n_tokens, s->n_pages, (unsigned long long)s->kv_bytes, s->n_running, s->n_waiting,
		   (unsigned long long)s->n_requests);
}

static void reply_session(struct app *a, struct http_exchange *x, const struct engine_event *ev)
{
	struct buf body = BUF_INIT;
	(void)a;
	write_session(&ev->sessions[0], &body);
	reply_json(x, 200, &body);
}

static void reply_sessions(struct app *a, struct http_exchange *x, const struct engine_event *ev)
{
	struct buf body = BUF_INIT;
	(void)a;
	buf_puts(&body, "{\"object\":\"list\",\"data\":[");
	for (size_t i = 0; i < ev->n_sessions; i++) {
		if (i)
			buf_putc(&body, ',');
		write_session(&ev->sessions[i], &body);
	}
	buf_puts(&body, "]}");
	reply_json(x, 200, &body);
}

static void reply_deleted(struct app *a, struct http_exchange *x, const struct engine_event *ev)
{
	struct buf body = BUF_INIT;
	struct str id = ev->n_sessions ? str_from(ev->sessions[0].id) : http_param(x, "id");
	(void)a;
	buf_puts(&body, "{\"id\":");
	buf_json_string(&body, id.p, id.n);
	buf_puts(&body, ",\"object\":\"session.deleted\",\"deleted\":true}");
	reply_json(x, 200, &body);
}

static enum status read_seconds(const struct json *body, const char *key, int64_t *ms, struct error *err)
{
	struct json j = json_get(body, key);
	double s = 0;
	enum status status = json_read_number(&j, 0.001, 2592000, &s, err);
	if (status == STATUS_OK && json_has(&j))
		*ms = (int64_t)(s * 1000 + 0.5);
	return status;
}

static enum status read_create(const struct json *body, struct engine_session_params *p, struct error *err)
{
	struct json id = json_get(body, "id");
	struct str s = {NULL, 0};
	enum status status = json_read_text(&id, &s, err);
	if (status == STATUS_OK && s.p)
		status = params_session_id(s, "id", p->id, err);
	if (status == STATUS_OK)
		status = read_seconds(body, "heartbeat_timeout", &p->heartbeat_timeout_ms, err);
	if (status == STATUS_OK)
		status = read_seconds(body, "ttl", &p->ttl_ms, err);
	return status;
}

static bool accepting(struct app *a, struct http_exchange *x)
{
	struct failure f;
	if (app_accepts(a, &f))
		return true;
	reply_failure(x, &f);
	return false;
}

void api_sessions_create(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct json_doc *doc;
	struct json root;
	struct engine_session_params p = {0};
	struct error err = {0};
	uint64_t id;

	if (!accepting(a, x) || !read_body(x, true, &doc, &root))
		return;
	if (read_create(&root, &p, &err) != STATUS_OK)
		reply_error(x, &err);
	else if ((id = call_start(a, x, reply_session)))
		engine_session_create(a->engine, id, &p);
	json_doc_free(doc);
}

/* The three that name a session in their path. A draining server still answers them: clients end what they began. */
static void one_session(struct app *a, struct http_exchange *x,
			void (*done)(struct app *a, struct http_exchange *x, const struct engine_event *ev),
			void (*command)(struct engine *e, uint64_t id, const char *session))
{
	char session[ENGINE_SESSION_ID_MAX + 1];
	struct error err = {0};
	struct failure f;
	uint64_t id;

	if (engine_state(a->engine) != ENGINE_READY && !accepting(a, x))
		return;
	if (params_session_id(http_param(x, "id"), "id", session, &err) != STATUS_OK) {
		/* No session can have such a name. */
		failure_set(&f, FAILURE_NO_SESSION, "id", "There is no session of this name.");
		reply_failure(x, &f);
		return;
	}
	id = call_start(a, x, done);
	if (id)
		command(a->engine, id, session);
}

void api_session_get(struct http_exchange *x, void *app)
{
	one_session(app, x, reply_session, engine_session_get);
}

void api_session_heartbeat(struct http_exchange *x, void *app)
{
	one_session(app, x, reply_session, engine_session_heartbeat);
}

void api_session_delete(struct http_exchange *x, void *app)
{
	one_session(app, x, reply_deleted, engine_session_delete);
}

void api_sessions_list(struct http_exchange *x, void *app)
{
	struct app *a = app;
	uint64_t id;
	if (engine_state(a->engine) != ENGINE_READY && !accepting(a, x))
		return;
	id = call_start(a, x, reply_sessions);
	if (id)
		engine_session_list(a->engine, id);
}
