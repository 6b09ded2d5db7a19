/*
 * What the API files share: the state of the application, replies, and waiting for the engine. Private to them; the
 * rest of the server sees app.h. Everything here runs on the loop thread.
 */
#pragma once

#include "server/app.h"
#include "server/auth.h"
#include "server/failure.h"
#include "server/json.h"
#include "server/metrics.h"
#include "server/store.h"

/* Whoever waits for the events of one engine command. */
struct waiter {
	struct list link;
	uint64_t id;
	/*
	 * Given each event; after the last one (anything but PROMPT, TOKEN and CONTEXT) the waiter is out of the table
	 * already.
	 */
	void (*event)(struct waiter *w, const struct engine_event *ev);
};

enum { APP_BUCKETS = 1024 };

struct app {
	const struct config *config;
	struct engine *engine;
	struct auth auth;
	struct http_app http;
	struct ws_app ws;
	struct list waiters[APP_BUCKETS]; /* by id; ids are consecutive, so the buckets stay even */
	struct list generations;	  /* struct generation.link */
	int n_generations;
	int n_exports;		      /* on their way to a client */
	int n_documents;	      /* that are answered for in parts */
	struct list compactions;      /* struct compact.link */
	/* responses that are not submitted yet: a conversation is measured, or its summary waited for */
	int n_preparing;
	int n_background;	      /* compactions that nobody waits for */
	struct response_store store;
	struct list websockets; /* struct conn.link in lanes.c */
	bool draining;
	int64_t started_unix_s;
	char fingerprint[24]; /* "" until the model is loaded */
	struct metrics metrics;
	void *listener;
	void (*listener_figures)(void *listener, struct metrics_gauges *g);
	struct mlflow *mlflow; /* NULL: none */
};

void app_wait(struct app *a, struct waiter *w, uint64_t id);

/* The id under which the model is served: config.model_name, else the file's name. "" while nothing is known. */
const char *app_model_id(const struct app *a);
/* Identifies build, model and backend: same fingerprint and seed, same answer. */
const char *app_fingerprint(struct app *a);

/* Whether a tenant may see what belongs to others. */
bool app_is_admin(const struct app *a, int32_t tenant);
/* The name of a tenant's key, also of one that is gone; "-" when no key is needed. */
const char *app_key_name(const struct app *a, int32_t tenant);

/* False, and the failure, when no new work is taken now: loading, failed or draining. */
bool app_accepts(const struct app *a, struct failure *f);
/* False, and the failure, when `model` names another model than the one served and config.strict_model is set. */
bool app_serves(const struct app *a, const struct json *model, struct failure *f);

/* Writes prefix and 24 random hexadecimal digits. */
void make_id(char *out, size_t cap, const char *prefix);
int64_t unix_now(void);
const char *method_name(enum http_method method);

/* ---- Replies ---- */

/* Answers with JSON and empties body; a body that ran out of memory becomes a 503. */
void reply_json(struct http_exchange *x, int status, struct buf *body);
/* Answers with an error and writes the request's log line: what became no generation has no other. */
void reply_failure(struct http_exchange *x, const struct failure *f);
void reply_failure_unlogged(struct http_exchange *x, const struct failure *f);
void reply_error(struct http_exchange *x, const struct error *err);
/*
 * Parses the body, or answers 400 and returns false. With `optional`, an empty body is an empty object (*doc is NULL).
 */
bool read_body(struct http_exchange *x, bool optional, struct json_doc **doc, struct json *root);

/* Reads which part of a list of sessions is wanted, ?limit=N&after=CURSOR, or answers 400 and returns false. */
bool read_session_page(struct http_exchange *x, int32_t default_limit, struct engine_session_page *page);
/* ",\"pages_by_tier\":{...}": see struct engine_session_info. */
void write_pages_by_tier(int32_t device, const int32_t tier[ENGINE_TIER_KINDS], int32_t lost, struct buf *out);
/* The session object of GET /v1/sessions/{id}. */
void write_session(const struct app *a, const struct engine_session_info *s, struct buf *out);
/* {"data":[...],"has_more":...,"next":...}, less the opening brace, of a SESSIONS or KV event. */
void write_session_list(const struct app *a, const struct engine_event *ev, struct buf *out);

/* A log-probability as JSON; minus infinity becomes -9999. */
void write_logprob(struct buf *out, float logprob);
/*
 * A TOKEN's log-probability in the form that chat and responses share:
 * {"token","logprob","bytes","top_logprobs":[...]}.
 */
void write_token_logprob(const struct app *a, struct buf *out, const struct engine_event *ev, int32_t n_top);

/* ---- One command, one event, one answer ---- */

struct call;
/*
 * Registers the exchange to be answered by `done` when the engine's one event for the command comes (an ERROR is
 * answered here). Returns the command's id, or 0 after answering 503 when there is no memory. `done` is not called once
 * the client has left.
 */
uint64_t call_start(struct app *a, struct http_exchange *x,
		    void (*done)(struct app *a, struct http_exchange *x, const struct engine_event *ev));

/* ---- Handlers, one file per resource; the table is in routes.c ---- */

void api_completions(struct http_exchange *x, void *app);
void api_chat(struct http_exchange *x, void *app);
void api_chunk(struct http_exchange *x, void *app);
void api_responses(struct http_exchange *x, void *app);
void api_responses_plain_get(struct http_exchange *x, void *app);
void api_response_get(struct http_exchange *x, void *app);
void api_response_delete(struct http_exchange *x, void *app);
void api_response_input(struct http_exchange *x, void *app);
void api_responses_compact(struct http_exchange *x, void *app);
void api_models(struct http_exchange *x, void *app);
void api_model(struct http_exchange *x, void *app);
void api_tokenize(struct http_exchange *x, void *app);
void api_detokenize(struct http_exchange *x, void *app);
void api_tokenizer_info(struct http_exchange *x, void *app);
void api_health_live(struct http_exchange *x, void *app);
void api_health_ready(struct http_exchange *x, void *app);
void api_metrics(struct http_exchange *x, void *app);
void api_sessions_create(struct http_exchange *x, void *app);
void api_sessions_list(struct http_exchange *x, void *app);
void api_kv(struct http_exchange *x, void *app);
void api_session_get(struct http_exchange *x, void *app);
void api_session_delete(struct http_exchange *x, void *app);
void api_session_heartbeat(struct http_exchange *x, void *app);
void api_session_export(struct http_exchange *x, void *app);
void api_session_import(struct http_exchange *x, void *app);
/* The answer to whoever asked for one session. */
void reply_session(struct app *a, struct http_exchange *x, const struct engine_event *ev);
void api_page(struct http_exchange *x, void *app);
