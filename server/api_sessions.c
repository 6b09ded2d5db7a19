/*
 * Sessions: conversations whose KV stays with the server between requests.
 *
 *     POST   /v1/sessions                 {"id"?, "heartbeat_timeout"?, "ttl"?, "max_tokens"?}, times in seconds
 *     GET    /v1/sessions                 ?limit=N&after=CURSOR
 *     GET    /v1/sessions/{id}
 *     DELETE /v1/sessions/{id}
 *     POST   /v1/sessions/{id}/heartbeat
 *     POST   /v1/sessions/{id}/export, /import    (api_transfer.c)
 *
 * Each API key has sessions of its own: none sees, or can tell of, another's.
 */
#include "server/api.h"
#include "server/params.h"

enum { LIST_LIMIT = 1000 };

void write_pages_by_tier(int32_t device, const int32_t tier[ENGINE_TIER_KINDS], int32_t lost, struct buf *out)
{
	buf_printf(out, ",\"pages_by_tier\":{\"device\":%d,\"ram\":%d,\"disk\":%d,\"remote\":%d,\"lost\":%d}", device,
	           tier[ENGINE_TIER_RAM], tier[ENGINE_TIER_DISK] + tier[ENGINE_TIER_DISK_WIDE],
	           tier[ENGINE_TIER_REMOTE], lost);
}

/* Times are seconds, as everywhere in the API. */
void write_session(const struct app *a, const struct engine_session_info *s, struct buf *out)
{
	int64_t positions = s->n_tokens + (int64_t)s->positions_unused;
	buf_puts(out, "{\"id\":");
	buf_json_string(out, s->id, strlen(s->id));
	buf_printf(out, ",\"object\":\"session\",\"created\":%lld,\"age\":%.3f,\"idle\":%.3f,\"expires_in\":",
		   (long long)(unix_now() - s->age_ms / 1000), (double)s->age_ms / 1e3, (double)s->idle_ms / 1e3);
	/* The server's own sessions (a WebSocket's) never expire. */
	const struct {
		const char *name;
		int64_t ms;
	} times[] = {{"", s->expires_in_ms},
		     {",\"heartbeat_timeout\":", s->heartbeat_timeout_ms},
		     {",\"ttl\":", s->ttl_ms},
		     {",\"claim\":", s->claim_ms}};
	for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
		buf_puts(out, times[i].name);
		if (s->heartbeat_timeout_ms < 0 && s->ttl_ms < 0)
			buf_puts(out, "null");
		else if (times[i].ms < 0 && i)
			buf_puts(out, "null");
		else
			buf_printf(out, "%.3f", (double)times[i].ms / 1e3);
	}
	buf_printf(out,
		   ",\"tokens\":%d,\"pages\":%d,\"kv_bytes\":%llu,\"running\":%d,\"waiting\":%d,\"requests\":%llu",
		   s->n_tokens, s->n_pages, (unsigned long long)s->kv_bytes, s->n_running, s->n_waiting,
		   (unsigned long long)s->n_requests);
	write_pages_by_tier(s->pages_device, s->pages_tier, s->pages_lost, out);
	buf_printf(out,
		   ",\"pages_exclusive\":%d,\"pages_shared\":%d,\"pages_indexed\":%d,\"references\":%lld"
		   ",\"positions_unused\":%d,\"fragmentation\":%.6g",
		   s->pages_exclusive, s->n_pages - s->pages_exclusive, s->pages_indexed, (long long)s->references,
		   s->positions_unused, positions > 0 ? (double)s->positions_unused / (double)positions : 0.0);
	buf_printf(out, ",\"prompt_tokens\":%llu,\"cached_tokens\":%llu,\"generated_tokens\":%llu",
		   (unsigned long long)s->prompt_tokens, (unsigned long long)s->cached_tokens,
		   (unsigned long long)s->generated_tokens);
	buf_printf(out, ",\"kv_cache\":{\"policy\":\"%s\",\"tokens_logical\":%d,\"tokens_resident\":%d}",
	           s->policy ? s->policy : "full", s->n_logical, s->n_tokens);
	buf_puts(out, ",\"max_tokens\":");
	if (s->max_tokens > 0)
		buf_printf(out, "%d", s->max_tokens);
	else
		buf_puts(out, "null");
	buf_printf(out, ",\"key\":\"%s\"}", app_key_name(a, s->tenant));
}

void write_session_list(const struct app *a, const struct engine_event *ev, struct buf *out)
{
	buf_puts(out, "\"data\":[");
	for (size_t i = 0; i < ev->n_sessions; i++) {
		if (i)
			buf_putc(out, ',');
		write_session(a, &ev->sessions[i], out);
	}
	buf_printf(out, "],\"has_more\":%s,\"next\":", ev->more_sessions ? "true" : "false");
	if (ev->more_sessions && ev->n_sessions)
		buf_printf(out, "\"%llu\"}", (unsigned long long)ev->sessions[ev->n_sessions - 1].serial);
	else
		buf_puts(out, "null}");
}

/* Digits and nothing else, within the bounds; an absent value leaves *out as it is. */
static bool read_digits(struct str s, uint64_t min, uint64_t max, uint64_t *out)
{
	uint64_t v = 0;
	if (!s.p)
		return true;
	for (size_t i = 0; i < s.n; i++) {
		if (s.p[i] < '0' || s.p[i] > '9' || v > (UINT64_MAX - 9) / 10)
			return false;
		v = v * 10 + (uint64_t)(s.p[i] - '0');
	}
	*out = v;
	return s.n > 0 && v >= min && v <= max;
}

bool read_session_page(struct http_exchange *x, int32_t default_limit, struct engine_session_page *page)
{
	uint64_t limit = (uint64_t)default_limit;
	struct failure f;
	*page = (struct engine_session_page){0};
	if (!read_digits(http_query(x, "limit"), 1, LIST_LIMIT, &limit)) {
		failure_set(&f, FAILURE_INVALID, "limit", "limit must be a number from 1 to %d.", LIST_LIMIT);
	} else if (!read_digits(http_query(x, "after"), 0, UINT64_MAX, &page->after)) {
		failure_set(&f, FAILURE_INVALID, "after", "after must be the \"next\" of an earlier answer.");
	} else {
		page->limit = (int32_t)limit;
		return true;
	}
	reply_failure(x, &f);
	return false;
}

void reply_session(struct app *a, struct http_exchange *x, const struct engine_event *ev)
{
	struct buf body = BUF_INIT;
	write_session(a, &ev->sessions[0], &body);
	reply_json(x, 200, &body);
}

static void reply_sessions(struct app *a, struct http_exchange *x, const struct engine_event *ev)
{
	struct buf body = BUF_INIT;
	buf_puts(&body, "{\"object\":\"list\",");
	write_session_list(a, ev, &body);
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
	struct json max = json_get(body, "max_tokens");
	int64_t tokens = 0;
	if (status == STATUS_OK)
		status = json_read_int(&max, 1, INT32_MAX, &tokens, err);
	p->max_tokens = (int32_t)tokens;
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
	p.tenant = http_principal(x);
	if (read_create(&root, &p, &err) != STATUS_OK)
		reply_error(x, &err);
	else if ((id = call_start(a, x, reply_session)))
		engine_session_create(a->engine, id, &p);
	json_doc_free(doc);
}

/* The three that name a session in their path. A draining server still answers them: clients end what they began. */
static void one_session(struct app *a, struct http_exchange *x,
			void (*done)(struct app *a, struct http_exchange *x, const struct engine_event *ev),
			void (*command)(struct engine *e, uint64_t id, int32_t tenant, const char *session))
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
	int32_t tenant = http_principal(x);
	id = call_start(a, x, done);
	if (id)
		command(a->engine, id, tenant, session);
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
	struct engine_session_page page;
	int32_t tenant = http_principal(x);
	uint64_t id;
	if (engine_state(a->engine) != ENGINE_READY && !accepting(a, x))
		return;
	if (!read_session_page(x, LIST_LIMIT, &page))
		return;
	id = call_start(a, x, reply_sessions);
	if (id)
		engine_session_list(a->engine, id, tenant, &page);
}
