/*
 * The transport without sockets: http.h and ws.h implemented in memory, for tests of the API. A request goes through
 * dispatch to its handler as in http.c; what is answered is kept to be looked at.
 */
#pragma once

#include "server/app.h"

/* ---- The application under test ---- */

struct fake_server {
	struct config config;
	struct engine *engine;
	struct app *app;
};

void fake_server_start(struct fake_server *s);
/* Closes what is open, lets the engine's last events through, and checks that no generation is left. */
void fake_server_stop(struct fake_server *s);
/* One step of the engine, and its events delivered. */
void fake_server_step(struct fake_server *s);
/* Until nothing runs any more. */
void fake_server_run(struct fake_server *s);

/* ---- HTTP ---- */

/* `headers`: "name: value\n..." or NULL. The exchange lives until http_fake_close(). */
struct http_exchange *http_fake_request(struct fake_server *s, enum http_method method, const char *path,
					const char *headers, const char *body);
/* POST with a JSON body, run to its end. */
struct http_exchange *http_fake_post(struct fake_server *s, const char *path, const char *body);
struct http_exchange *http_fake_get(struct fake_server *s, const char *path);
/* The client leaves, or the answer is done with. */
void http_fake_close(struct http_exchange *x);
/* From now on a stream write is LIMIT. */
void http_fake_stall(struct http_exchange *x);

int http_fake_status(const struct http_exchange *x); /* 0: not answered */
const char *http_fake_type(const struct http_exchange *x);
/* All that was sent: the body, or the stream. */
const char *http_fake_body(const struct http_exchange *x);
const char *http_fake_header(const struct http_exchange *x, const char *name); /* NULL: not set */
bool http_fake_ended(const struct http_exchange *x);
/* Streamed writes, each on its own. */
size_t http_fake_n_writes(const struct http_exchange *x);
struct str http_fake_write(const struct http_exchange *x, size_t i);
/* The JSON behind "data: " of the i-th write, which must be one whole event. */
const char *http_fake_event(const struct http_exchange *x, size_t i);

/* ---- WebSocket ---- */

struct ws_conn *ws_fake_open(struct fake_server *s);
void ws_fake_say(struct ws_conn *c, const char *text);
void ws_fake_close(struct ws_conn *c);
void ws_fake_stall(struct ws_conn *c);
/* What the client has not read of what it was sent; 0: it has read all. */
void ws_fake_leave_unread(struct ws_conn *c, size_t n);
void ws_fake_alive(struct ws_conn *c);
size_t ws_fake_n(const struct ws_conn *c);
const char *ws_fake_sent(const struct ws_conn *c, size_t i);
/* Forgets what was sent so far. */
void ws_fake_clear(struct ws_conn *c);
/* The code it was closed with, or 0. */
int ws_fake_close_code(const struct ws_conn *c);

/* ---- Looking into JSON ---- */

/* The value at a path like "choices.0.text", as compact JSON; "(absent)" when there is none. Static storage. */
const char *json_at_path(const char *text, const char *path);
#define assert_json(text, path, expected) assert_string_equal(json_at_path(text, path), expected)
