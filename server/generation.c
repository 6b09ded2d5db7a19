#include "server/generation.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/base/log.h"

struct member {
	struct waiter waiter;
	struct generation *group;
	struct engine_request *request; /* until submitted */
	int index;
	bool prompt_seen, ended;
	int64_t last_token_ns; /* 0: none yet */
	struct engine_usage usage;
	const char *finish; /* for the log */
};

struct generation {
	struct list link; /* app.generations, while started */
	struct app *app;
	const struct generation_ops *ops; /* NULL: the owner has let go, or has been told the end */
	void *arg;
	bool began;
	bool background;
	bool stopping; /* generation_stop(): cancelled members are expected */
	int share;
	size_t n_members, n_added, n_prompts, n_ended;
	int64_t start_ns;
	int status;
	const char *why; /* of a cancellation, for the log */
	const char *code; /* of the failure that it ended with; NULL: none */
	char param[64];
	int32_t tenant;
	char method[8], path[64], peer[64], request_id[80], session[ENGINE_SESSION_ID_MAX + 1];
	struct member members[];
};

static void member_event(struct waiter *w, const struct engine_event *ev);

static void copy(char *to, size_t cap, const char *from)
{
	snprintf(to, cap, "%s", from ? from : "");
}

struct generation *generation_create(struct app *a, size_t n_members, const struct generation_origin *origin,
				     const struct generation_ops *ops, void *arg)
{
	struct generation *g = calloc(1, sizeof *g + n_members * sizeof *g->members);
	if (!g)
		return NULL;
	list_init(&g->link);
	g->app = a;
	g->ops = ops;
	g->arg = arg;
	g->share = 1;
	g->n_members = n_members;
	copy(g->method, sizeof g->method, origin->method);
	copy(g->path, sizeof g->path, origin->path);
	copy(g->peer, sizeof g->peer, origin->peer);
	copy(g->request_id, sizeof g->request_id, origin->request_id);
	return g;
}

void generation_add(struct generation *g, struct engine_request *r)
{
	struct member *m = &g->members[g->n_added];
	m->waiter.event = member_event;
	m->group = g;
	m->request = r;
	m->index = (int)g->n_added++;
	g->tenant = r->tenant;
	g->background = r->background;
	if (!g->session[0])
		copy(g->session, sizeof g->session, r->session);
}

void generation_share_prompt(struct generation *g, int n)
{
	g->share = n;
}

void generation_start(struct generation *g)
{
	g->start_ns = clock_now_ns(clock_system());
	list_push_back(&g->app->generations, &g->link);
	g->app->n_generations++;
	for (size_t i = 0; i < g->n_added; i++) {
		struct member *m = &g->members[i];
		struct engine_request *r = m->request;
		m->request = NULL;
		app_wait(g->app, &m->waiter, r->id);
		engine_submit(g->app->engine, r);
	}
}

void generation_discard(struct generation *g)
{
	if (!g)
		return;
	for (size_t i = 0; i < g->n_added; i++)
		engine_request_destroy(g->members[i].request);
	free(g);
}

static void cancel_members(struct generation *g)
{
	for (size_t i = 0; i < g->n_added; i++)
		if (!g->members[i].ended)
			engine_cancel(g->app->engine, g->members[i].waiter.id);
}

void generation_cancel(struct generation *g, const char *why)
{
	g->ops = NULL;
	g->why = why;
	cancel_members(g);
}

void generation_stop(struct generation *g, const char *why)
{
	g->stopping = true;
	g->why = why;
	cancel_members(g);
}

void generation_hurry(struct generation *g)
{
	g->background = false;
	for (size_t i = 0; i < g->n_added; i++)
		engine_hurry(g->app->engine, g->members[i].waiter.id);
}

void generation_stop_background(struct app *a, const char *why)
{
	list_each(node, tmp, &a->generations)
	{
		struct generation *g = list_entry(node, struct generation, link);
		if (g->background)
			generation_stop(g, why);
	}
}

void generation_stop_all(struct app *a, const char *why)
{
	list_each(node, tmp, &a->generations) generation_stop(list_entry(node, struct generation, link), why);
}

void generation_set_status(struct generation *g, int status)
{
	g->status = status;
}

void generation_usage(const struct generation *g, struct generation_usage *out)
{
	*out = (struct generation_usage){.context = g->members[0].usage.context};
	for (size_t i = 0; i < g->n_added; i++) {
		const struct engine_usage *u = &g->members[i].usage;
		out->completion_tokens += u->completion_tokens;
		if (i % (size_t)g->share == 0) {
			out->prompt_tokens += u->prompt_tokens;
			out->cached_tokens += u->cached_tokens;
		}
	}
}

/* ---- The end ---- */

static void write_log(const struct generation *g)
{
	struct log_line l;
	struct generation_usage u;
	int64_t queue_ns = 0, ttft_ns = 0, total_ns = clock_now_ns(clock_system()) - g->start_ns, decode_ns = 0;
	const char *finish = NULL;
	bool cancelled = g->why != NULL;

	generation_usage(g, &u);
	for (size_t i = 0; i < g->n_added; i++) {
		const struct member *m = &g->members[i];
		if (m->usage.queue_ns > queue_ns)
			queue_ns = m->usage.queue_ns;
		if (m->usage.ttft_ns && (!ttft_ns || m->usage.ttft_ns < ttft_ns))
			ttft_ns = m->usage.ttft_ns;
		if (m->usage.decode_ns > decode_ns)
			decode_ns = m->usage.decode_ns;
		if (m->finish && (!finish || strcmp(m->finish, "cancelled") != 0))
			finish = m->finish;
	}
	log_begin(&l, LOG_INFO, "request");
	log_text(&l, "method", g->method);
	log_text(&l, "path", g->path);
	log_int(&l, "status", g->status);
	log_text(&l, "id", g->request_id);
	log_text(&l, "peer", g->peer);
	log_text(&l, "model", app_model_id(g->app));
	log_int(&l, "prompt_tokens", u.prompt_tokens);
	log_int(&l, "cached_tokens", u.cached_tokens);
	log_int(&l, "completion_tokens", u.completion_tokens);
	log_num(&l, "queue_ms", (double)queue_ns / 1e6);
	log_num(&l, "ttft_ms", (double)ttft_ns / 1e6);
	log_num(&l, "total_ms", (double)total_ns / 1e6);
	log_num(&l, "tokens_per_s", decode_ns > 0 ? (double)u.completion_tokens * 1e9 / (double)decode_ns : 0);
	log_text(&l, "finish", cancelled ? g->why : finish ? finish : "error");
	if (g->code) {
		log_text(&l, "code", g->code);
		log_text(&l, "param", g->param[0] ? g->param : "-");
	}
	log_text(&l, "cancelled", cancelled ? "true" : "false");
	log_text(&l, "key", app_key_name(g->app, g->tenant));
	log_text(&l, "session", g->session[0] ? g->session : "-");
	log_end(&l);
}

static void finish_group(struct generation *g)
{
	struct metrics *m = &g->app->metrics;
	m->http_requests++;
	if (g->why)
		m->http_cancelled++;
	else if (g->status >= 500)
		m->http_server_errors++;
	else if (g->status >= 400)
		m->http_client_errors++;
	write_log(g);
	list_remove(&g->link);
	g->app->n_generations--;
	free(g);
}

/* Tells the owner that it failed; the rest of the members are cancelled and finish unseen. */
static void fail(struct generation *g, const struct failure *f)
{
	const struct generation_ops *ops = g->ops;
	if (!ops)
		return;
	g->ops = NULL;
	/* Once output has begun the client has a 200, but the log shows how it ended. */
	if (!g->status || !g->stopping)
		g->status = failure_http(f);
	g->code = failure_code(f);
	copy(g->param, sizeof g->param, f->param);
	cancel_members(g);
	ops->ended(g->arg, f, g->began);
}

/* ---- Events ---- */

static void begin(struct generation *g)
{
	if (g->began || !g->ops)
		return;
	g->began = true;
	g->ops->begin(g->arg);
}

static void on_prompt(struct generation *g, struct member *m, const struct engine_event *ev)
{
	m->usage.prompt_tokens = ev->usage.prompt_tokens;
	m->usage.cached_tokens = ev->usage.cached_tokens;
	if (g->ops)
		g->ops->prompt(g->arg, m->index, ev);
	if (!m->prompt_seen) {
		m->prompt_seen = true;
		if (++g->n_prompts == g->n_added)
			begin(g);
	}
}

static void on_token(struct generation *g, struct member *m, const struct engine_event *ev)
{
	int64_t now = clock_now_ns(clock_system());
	m->usage.completion_tokens++;
	if (m->last_token_ns)
		metrics_token(&g->app->metrics, now - m->last_token_ns);
	m->last_token_ns = now;
	begin(g);
	if (g->ops)
		g->ops->token(g->arg, m->index, ev);
}

static void on_done(struct generation *g, struct member *m, const struct engine_event *ev)
{
	struct failure f;
	m->usage = ev->usage;
	m->finish = ev->detail ? ev->detail : "";
	int64_t total_ns = clock_now_ns(clock_system()) - g->start_ns;
	metrics_finished(&g->app->metrics, &ev->usage, total_ns);
	mlflow_add(g->app->mlflow, &ev->usage, total_ns);
	if (ev->finish == ENGINE_FINISH_CANCELLED) {
		if (!g->stopping && ev->detail && strncmp(ev->detail, "session", 7) == 0)
			failure_set(&f, FAILURE_SESSION_ENDED, "session_id",
				    "The session ended while this request ran.");
		else
			failure_set(&f, FAILURE_CANCELLED, NULL, "The request was cancelled.");
		fail(g, &f);
		return;
	}
	begin(g);
	if (g->ops)
		g->ops->done(g->arg, m->index, ev);
}

static void member_event(struct waiter *w, const struct engine_event *ev)
{
	struct member *m = list_entry(w, struct member, waiter);
	struct generation *g = m->group;
	struct failure f;

	switch (ev->type) {
	case ENGINE_EVENT_PROMPT:
		on_prompt(g, m, ev);
		return;
	case ENGINE_EVENT_TOKEN:
		on_token(g, m, ev);
		return;
	case ENGINE_EVENT_DONE:
		m->ended = true;
		on_done(g, m, ev);
		break;
	default:
		m->ended = true;
		failure_from(&f, &ev->error);
		fail(g, &f);
		break;
	}
	if (++g->n_ended < g->n_added)
		return;
	if (g->ops) {
		const struct generation_ops *ops = g->ops;
		g->ops = NULL;
		ops->ended(g->arg, NULL, g->began);
	}
	finish_group(g);
}
