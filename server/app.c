#include "server/app.h"

#include <stdlib.h>

#include "server/api.h"
#include "server/generation.h"
#include "server/lanes.h"
#include "server/routes.h"

static const char *error_body(struct buf *out, int status, const char *code, const char *message)
{
	failure_write_plain(out, status, code, message);
	return "application/json";
}

enum status app_create(const struct config *config, struct engine *engine, struct app **out)
{
	struct app *a = calloc(1, sizeof *a);
	*out = NULL;
	if (!a)
		return STATUS_NOMEM;
	a->config = config;
	a->engine = engine;
	auth_init(&a->auth, config->api_key);
	a->http = (struct http_app){
		.app = a, .dispatch = routes_dispatch, .streams = routes_streams, .error_body = error_body};
	a->ws = (struct ws_app){.app = a,
				.opened = lanes_opened,
				.message = lanes_message,
				.alive = lanes_alive,
				.drained = lanes_drained,
				.closed = lanes_closed};
	a->started_unix_s = unix_now();
	for (size_t i = 0; i < APP_BUCKETS; i++)
		list_init(&a->waiters[i]);
	list_init(&a->generations);
	list_init(&a->compactions);
	store_init(&a->store, (size_t)config->response_store);
	list_init(&a->websockets);
	*out = a;
	return STATUS_OK;
}

void app_destroy(struct app *a)
{
	struct engine_event gone = {.type = ENGINE_EVENT_ERROR};
	if (!a)
		return;
	/* Whoever still waits is told that nothing will come, and frees itself. */
	error_set(&gone.error, STATUS_CANCELLED, "The server is shutting down.");
	for (size_t i = 0; i < APP_BUCKETS; i++) {
		while (!list_empty(&a->waiters[i])) {
			struct waiter *w = list_entry(list_pop_front(&a->waiters[i]), struct waiter, link);
			w->event(w, &gone);
		}
	}
	store_free(&a->store);
	free(a);
}

const struct http_app *app_http(struct app *a)
{
	return &a->http;
}

const struct ws_app *app_ws(struct app *a)
{
	return &a->ws;
}

void app_wait(struct app *a, struct waiter *w, uint64_t id)
{
	w->id = id;
	list_push_back(&a->waiters[id % APP_BUCKETS], &w->link);
}

enum status app_set_keys(struct app *a, struct str text, const char *where, struct error *err)
{
	enum status status = auth_set_keys(&a->auth, text, where, err);
	for (int32_t i = 1; status == STATUS_OK && i < a->auth.n; i++)
		engine_tenant_set(a->engine, &a->auth.keys[i].tenant);
	return status;
}

static void deliver(struct app *a, const struct engine_event *ev)
{
	list_each(node, tmp, &a->waiters[ev->request_id % APP_BUCKETS])
	{
		struct waiter *w = list_entry(node, struct waiter, link);
		if (w->id != ev->request_id)
			continue;
		if (ev->type != ENGINE_EVENT_PROMPT && ev->type != ENGINE_EVENT_TOKEN &&
		    ev->type != ENGINE_EVENT_CONTEXT)
			list_remove(&w->link);
		w->event(w, ev);
		return;
	}
}

void app_handle_events(struct app *a)
{
	struct list events, *node;
	list_init(&events);
	engine_poll(a->engine, &events);
	while ((node = list_pop_front(&events))) {
		struct engine_event *ev = list_entry(node, struct engine_event, link);
		deliver(a, ev);
		engine_event_free(ev);
	}
}

void app_start_drain(struct app *a)
{
	a->draining = true;
	generation_stop_background(a, "drain");
	lanes_drain(a);
}

int app_active(const struct app *a)
{
	return a->n_generations + a->n_preparing + a->n_exports + a->n_documents;
}

void app_cancel_all(struct app *a)
{
	generation_stop_all(a, "drain");
}

void app_set_mlflow(struct app *a, struct mlflow *m)
{
	a->mlflow = m;
}

void app_set_listener(struct app *a, void *listener,
		      void (*figures)(void *listener, struct metrics_gauges *g))
{
	a->listener = listener;
	a->listener_figures = figures;
}
