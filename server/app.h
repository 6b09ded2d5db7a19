/*
 * The application: the routes and the state they share. Built by server.c, used by routes.c and the api_*.c files, on
 * the loop thread only.
 */
#pragma once

#include "config/config.h"
#include "engine/engine.h"
#include "server/http.h"
#include "server/mlflow.h"
#include "server/ws.h"

struct app;
struct metrics_gauges;

/* Called by server.c. The engine and the config must outlive the app. */
enum status app_create(const struct config *config, struct engine *engine, struct app **out);
void app_destroy(struct app *a); /* NULL is allowed */
const struct http_app *app_http(struct app *a);
const struct ws_app *app_ws(struct app *a);
/*
 * Takes over the keys of --api-keys, as a text (auth_set_keys()), and tells the engine of their limits. Connections of
 * a key that is gone get no further answers; what it has running ends by itself.
 */
enum status app_set_keys(struct app *a, struct str text, const char *where, struct error *err);
/* Takes the engine's waiting events and hands each to whoever waits for it; called when the engine wakes the loop. */
void app_handle_events(struct app *a);
/*
 * From now on readiness fails and new work gets 503 with Retry-After. A WebSocket on which nothing runs is closed with
 * 1012 (service restart) now, any other when its last response has ended.
 */
void app_start_drain(struct app *a);
/* Who is told the figures of each generation that has ended; may be NULL. */
void app_set_mlflow(struct app *a, struct mlflow *m);
/* Generations in flight. */
int app_active(const struct app *a);
/* Cancels everything in flight: the drain deadline has passed. */
void app_cancel_all(struct app *a);
/* Where the listener's figures for /metrics come from; may be NULL. */
void app_set_listener(struct app *a, void *listener, void (*figures)(void *listener, struct metrics_gauges *g));
