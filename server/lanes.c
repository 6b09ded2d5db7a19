#include "server/lanes.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/base/log.h"
#include "server/context_events.h"
#include "server/responses.h"

struct conn {
	struct list link; /* app.websockets */
	struct ws_conn *ws;
	struct app *app;
	int32_t tenant;	   /* who opened it; all its sessions are that tenant's */
	struct list lanes; /* struct lane.link */
	int n_lanes, n_in_flight;
	bool dead; /* the peer is gone or too slow: nothing is sent or started any more */
	int64_t last_heartbeat_ms;
	struct context_events context;
	char id[RESPONSE_ID_MAX];
};

/* An engine session being made for a lane; outlives the lane when the connection closes first. */
struct opening {
	struct waiter waiter;
	struct lane *lane; /* NULL: the lane is gone */
};

struct turn {
	struct list link; /* lane.queue, until it runs */
	struct lane *lane;
	struct response *r;
	struct history *base; /* what it continues, or NULL */
	bool base_later;      /* previous_response_id names a response of this lane that has not ended yet */
	bool retried;	      /* its lane's session had gone and was made again */
};

struct lane {
	struct list link;
	struct conn *conn;
	char *name; /* NULL: messages without a stream_id */
	struct list queue;
	struct turn *running;
	struct history *latest;			  /* NULL until a response has ended */
	char session[ENGINE_SESSION_ID_MAX + 1];  /* "": none yet */
	struct opening *opening;		  /* while the session is being made */
	char external[ENGINE_SESSION_ID_MAX + 1]; /* a client's own session that the last turn named: kept alive */
};

static void pump(struct lane *l);

/* ---- Sending ---- */

/* A message that cannot be written would leave the client waiting for it: the connection ends instead. */
static void send_text(struct conn *c, const struct buf *text)
{
	if (c->dead)
		return;
	if (text->failed) {
		c->dead = true;
		ws_close(c->ws, 1011, "out of memory");
	} else if (ws_send(c->ws, text->data, text->len) != STATUS_OK) {
		c->dead = true;
	}
}

/* {"type":"error","status":...,"error":{...}} */
static void send_failure(struct conn *c, const char *stream_id, const struct failure *f)
{
	struct buf out = BUF_INIT;
	buf_printf(&out, "{\"type\":\"error\",\"status\":%d", failure_http(f));
	if (stream_id)
		buf_printf(&out, ",\"stream_id\":\"%s\"", stream_id);
	buf_puts(&out, ",\"error\":");
	failure_write(&out, f);
	buf_putc(&out, '}');
	send_text(c, &out);
	buf_free(&out);
}

static void send_error(struct conn *c, const char *stream_id, const struct error *err)
{
	struct failure f;
	failure_from(&f, err);
	send_failure(c, stream_id, &f);
}

/* ---- Turns ---- */

static void turn_free(struct turn *t)
{
	response_destroy(t->r);
	history_unref(t->base);
	free(t);
}

/* A client that is idle while the server drains can go on elsewhere at once. */
static void release_idle(struct conn *c)
{
	if (c->app->draining && c->n_in_flight == 0 && !c->dead)
		ws_close(c->ws, WS_CLOSE_SERVICE_RESTART, "the server restarts");
}

/* The turn is over; the next one of its lane begins. */
static void turn_over(struct turn *t)
{
	struct lane *l = t->lane;
	struct conn *c = l->conn;
	if (l->running == t)
		l->running = NULL;
	list_remove(&t->link);
	c->n_in_flight--;
	turn_free(t);
	pump(l);
	release_idle(c);
}

static bool on_event(void *arg, const char *type, const struct buf *json)
{
	struct turn *t = arg;
	struct conn *c = t->lane->conn;
	(void)type;
	send_text(c, json);
	return !c->dead;
}

static void on_ended(void *arg)
{
	struct turn *t = arg;
	struct history *h = response_history(t->r);
	if (h) {
		history_unref(t->lane->latest);
		t->lane->latest = history_ref(h);
	}
	turn_over(t);
}

static void on_refused(void *arg, const struct failure *f)
{
	struct turn *t = arg;
	struct lane *l = t->lane;
	/* Somebody deleted the lane's session: its KV is lost, but not the conversation, which is computed again. */
	if (f->kind == FAILURE_NO_SESSION && !t->retried && !response_request(t->r)->params.proto->session[0]) {
		t->retried = true;
		l->session[0] = '\0';
		l->running = NULL;
		list_push_front(&l->queue, &t->link);
		pump(l);
		return;
	}
	send_failure(l->conn, l->name, f);
	turn_over(t);
}

static const struct response_sink sink = {.event = on_event, .refused = on_refused, .ended = on_ended, .keeps = true};

/* ---- Sessions ---- */

static void on_opened(struct waiter *w, const struct engine_event *ev)
{
	struct opening *o = list_entry(w, struct opening, waiter);
	struct lane *l = o->lane;
	free(o);
	if (!l)
		return;
	l->opening = NULL;
	if (ev->type == ENGINE_EVENT_ERROR) {
		struct turn *t = list_empty(&l->queue) ? NULL : list_entry(l->queue.next, struct turn, link);
		l->session[0] = '\0';
		if (t) {
			send_error(l->conn, l->name, &ev->error);
			turn_over(t);
			return;
		}
	}
	pump(l);
}

/* The session's name is chosen here, so that it can be deleted whenever the connection closes. */
static bool open_session(struct lane *l)
{
	struct app *a = l->conn->app;
	struct engine_session_params p = {.heartbeat_timeout_ms = -1, .ttl_ms = -1, .tenant = l->conn->tenant};
	struct opening *o = calloc(1, sizeof *o);
	if (!o)
		return false;
	make_id(l->session, sizeof l->session, "ws_");
	memcpy(p.id, l->session, sizeof p.id);
	o->lane = l;
	o->waiter.event = on_opened;
	l->opening = o;
	app_wait(a, &o->waiter, engine_next_id(a->engine));
	engine_session_create(a->engine, o->waiter.id, &p);
	context_events_lane(&l->conn->context, l->session);
	return true;
}

/* ---- Lanes ---- */

static struct lane *find_lane(struct conn *c, const char *name)
{
	list_each(node, tmp, &c->lanes)
	{
		struct lane *l = list_entry(node, struct lane, link);
		if (name ? l->name && strcmp(l->name, name) == 0 : !l->name)
			return l;
	}
	return NULL;
}

static struct lane *add_lane(struct conn *c, const char *name)
{
	struct lane *l = calloc(1, sizeof *l);
	if (l && name)
		l->name = strdup(name);
	if (!l || (name && !l->name)) {
		free(l);
		return NULL;
	}
	l->conn = c;
	list_init(&l->queue);
	list_push_back(&c->lanes, &l->link);
	c->n_lanes++;
	return l;
}

static void lane_free(struct lane *l)
{
	struct engine *e = l->conn->app->engine;
	struct list *node;
	if (l->running)
		turn_free(l->running);
	while ((node = list_pop_front(&l->queue)))
		turn_free(list_entry(node, struct turn, link));
	if (l->opening)
		l->opening->lane = NULL;
	/*
	 * Commands keep their order, so this also ends a session that is still being made. Nobody waits for the answer.
	 */
	if (l->session[0])
		engine_session_delete(e, engine_next_id(e), l->conn->tenant, l->session);
	history_unref(l->latest);
	list_remove(&l->link);
	free(l->name);
	free(l);
}

/* The latest response of any lane of the connection, or one that is stored. */
static struct history *find_history(struct conn *c, const char *id)
{
	list_each(node, tmp, &c->lanes)
	{
		struct lane *l = list_entry(node, struct lane, link);
		if (l->latest && strcmp(l->latest->response_id, id) == 0)
			return l->latest;
	}
	struct stored *s = store_find(&c->app->store, c->tenant, str_from(id));
	return s ? s->history : NULL;
}

/* Whether a response of this lane that has not ended yet has the id. */
static bool is_pending(const struct lane *l, const char *id)
{
	if (l->running && strcmp(response_id(l->running->r), id) == 0)
		return true;
	list_each(node, tmp,
		  &l->queue) if (strcmp(response_id(list_entry(node, struct turn, link)->r), id) == 0) return true;
	return false;
}

static void no_previous(struct failure *f, const char *id)
{
	failure_set(f, FAILURE_NO_PREVIOUS, "previous_response_id",
	            "There is no response '%s' to continue: a connection keeps the latest one of each lane, and others "
	            "only while there is room.",
	            id);
}

static enum status start_turn(struct turn *t, struct error *err)
{
	struct lane *l = t->lane;
	const struct response_request *q = response_request(t->r);

	l->running = t;
	if (q->params.proto->session[0]) {
		memcpy(l->external, q->params.proto->session, sizeof l->external);
		context_events_lane(&l->conn->context, l->external);
		return response_start(t->r, t->base, NULL, err);
	}
	l->external[0] = '\0';
	context_events_lane(&l->conn->context, l->session);
	/* A turn that continues another lane's response finds its pages in the prefix index. */
	return response_start(t->r, t->base, l->session, err);
}

/* Starts the next turn of a lane, if it can. What goes wrong ends that turn, which brings the one after it here. */
static void pump(struct lane *l)
{
	struct turn *t;
	const struct response_request *q;
	struct error err = {0};
	struct failure f;

	if (l->conn->dead || l->running || l->opening || list_empty(&l->queue))
		return;
	t = list_entry(l->queue.next, struct turn, link);
	q = response_request(t->r);
	if (t->base_later) {
		t->base_later = false;
		t->base = history_ref(find_history(l->conn, q->previous_id));
		if (!t->base) {
			no_previous(&f, q->previous_id);
			send_failure(l->conn, l->name, &f);
			turn_over(t);
			return;
		}
	}
	if (!q->params.proto->session[0] && !l->session[0]) {
		if (open_session(l))
			return;
		error_set(&err, STATUS_NOMEM, "There is no memory for the request.");
	} else {
		list_remove(&t->link);
		if (start_turn(t, &err) == STATUS_OK)
			return;
	}
	send_error(l->conn, l->name, &err);
	turn_over(t);
}

/* ---- Messages ---- */

/* Copies the stream_id; *given tells whether there is one. */
static bool read_stream_id(struct conn *c, const struct json *root, char name[LANES_MAX_NAME + 1], bool *given)
{
	struct json j = json_get(root, "stream_id");
	struct str s = json_text(&j);
	struct failure f;
	bool ok = s.p && s.n > 0 && s.n <= LANES_MAX_NAME;

	*given = json_has(&j);
	if (!*given)
		return true;
	for (size_t i = 0; ok && i < s.n; i++) {
		char ch = s.p[i];
		ok = (ch >= 'a' && ch <= 'z') || (ch >= 'A' && ch <= 'Z') || (ch >= '0' && ch <= '9') || ch == '_' ||
		     ch == '.' || ch == '-';
	}
	if (!ok) {
		failure_set(&f, FAILURE_STREAM_ID, "stream_id",
			    "stream_id must be 1 to %d of the characters A-Z a-z 0-9 _ . -", LANES_MAX_NAME);
		send_failure(c, NULL, &f);
		return false;
	}
	memcpy(name, s.p, s.n);
	name[s.n] = '\0';
	return true;
}

/* Reads a request, or fills in why it is refused. */
static bool read_request(struct conn *c, const struct json *root, struct response_request *q, struct failure *f)
{
	struct app *a = c->app;
	struct json model = json_get(root, "model");
	struct error err = {0};

	if (!app_accepts(a, f) || !app_serves(a, &model, f))
		return false;
	if (response_request_parse(q, a->engine, c->tenant, root, (struct str){NULL, 0}, &err) == STATUS_OK)
		return true;
	failure_from(f, &err);
	return false;
}

static size_t history_bytes(const struct history *h)
{
	return h ? h->messages.len + h->window.len : 0;
}

/* Bytes that a connection keeps: the latest conversation of each lane, and the turns that run or wait. */
static size_t kept_bytes(const struct conn *c)
{
	size_t n = 0;
	list_each(node, tmp, &c->lanes)
	{
		const struct lane *l = list_entry(node, struct lane, link);
		n += history_bytes(l->latest);
		n += l->running ? response_request_bytes(response_request(l->running->r)) : 0;
		list_each(waiting, tmp2, &l->queue)
			n += response_request_bytes(response_request(list_entry(waiting, struct turn, link)->r));
	}
	return n;
}

/*
 * A conversation can be as long as a message, and the one that it becomes is there beside the one that it was: so a
 * connection may keep twice that.
 */
static bool has_room(const struct conn *c, const struct response_request *q, const struct history *base,
                     struct failure *f)
{
	uint64_t most = 2 * (uint64_t)c->app->config->max_body;
	size_t n = kept_bytes(c) + response_request_bytes(q) + history_bytes(base);
	if (n <= most)
		return true;
	failure_set(f, FAILURE_INVALID, "input",
	            "With this turn the conversations of this connection would have %zu bytes, and %llu is the most: "
	            "twice --max-body.",
	            n, (unsigned long long)most);
	return false;
}

/* Puts a request into its lane, which may be new; false with the reason. Takes the content of *q. */
static bool enqueue(struct conn *c, const char *name, struct response_request *q, struct failure *f)
{
	struct lane *l = find_lane(c, name);
	struct history *base = NULL;
	struct turn *t;
	bool later = false;

	if (c->n_in_flight >= LANES_MAX_IN_FLIGHT) {
		failure_set(f, FAILURE_STREAM_LIMIT, NULL,
			    "This connection has %d responses in flight, which is the limit.", c->n_in_flight);
		return false;
	}
	if (!l && c->n_lanes >= LANES_MAX) {
		failure_set(f, FAILURE_STREAM_LIMIT, "stream_id", "This connection has %d streams, which is the limit.",
			    c->n_lanes);
		return false;
	}
	if (q->previous_id[0]) {
		base = find_history(c, q->previous_id);
		later = !base && l && is_pending(l, q->previous_id);
		if (!base && !later) {
			no_previous(f, q->previous_id);
			return false;
		}
	}
	if (!has_room(c, q, base, f))
		return false;
	if (!l)
		l = add_lane(c, name);
	t = calloc(1, sizeof *t);
	if (l && t)
		t->r = response_create(
			c->app, q, &sink, t,
			&(struct generation_origin){
				.method = "WS", .path = "/v1/responses", .peer = ws_peer(c->ws), .request_id = c->id},
			l->name);
	if (!l || !t || !t->r) {
		free(t);
		failure_set(f, FAILURE_NOMEM, NULL, "There is no memory for the request.");
		return false;
	}
	t->lane = l;
	t->base = history_ref(base);
	t->base_later = later;
	list_push_back(&l->queue, &t->link);
	c->n_in_flight++;
	pump(l);
	return true;
}

static void on_create(struct conn *c, const struct json *root)
{
	char name[LANES_MAX_NAME + 1];
	bool named;
	struct response_request q = {0};
	struct failure f;

	if (!read_stream_id(c, root, name, &named))
		return;
	if (!read_request(c, root, &q, &f) || !enqueue(c, named ? name : NULL, &q, &f))
		send_failure(c, named ? name : NULL, &f);
	response_request_free(&q);
}

/* The response of a lane that answers to id; any that runs when id.p is NULL. */
static struct turn *find_turn(struct lane *l, struct str id)
{
	if (l->running && (!id.p || str_is(id, response_id(l->running->r))))
		return l->running;
	list_each(node, tmp, &l->queue)
	{
		struct turn *t = list_entry(node, struct turn, link);
		if (!id.p || str_is(id, response_id(t->r)))
			return t;
	}
	return NULL;
}

/* Without a response_id: what runs in the named lane, or in the unnamed one, or the only one in flight. */
static void on_cancel(struct conn *c, const struct json *root)
{
	char name[LANES_MAX_NAME + 1];
	bool named;
	struct json id = json_get(root, "response_id");
	struct str wanted = {NULL, 0};
	struct error err = {0};
	struct turn *found = NULL;
	struct failure f;

	if (!read_stream_id(c, root, name, &named))
		return;
	if (json_read_text(&id, &wanted, &err) != STATUS_OK) {
		send_error(c, named ? name : NULL, &err);
		return;
	}
	if (!wanted.p && (named || find_lane(c, NULL))) {
		struct lane *l = find_lane(c, named ? name : NULL);
		found = l ? find_turn(l, wanted) : NULL;
	}
	if (!found && (wanted.p || (!named && c->n_in_flight == 1))) {
		list_each(node, tmp, &c->lanes)
		{
			struct turn *t = find_turn(list_entry(node, struct lane, link), wanted);
			found = found ? found : t;
		}
	}
	if (found) {
		response_cancel(found->r);
		return;
	}
	failure_set(&f, FAILURE_NO_RESPONSE, "response_id", "There is no such response in flight.");
	send_failure(c, named ? name : NULL, &f);
}

static enum status update_context(struct conn *c, bool wanted, const char *session, struct error *err)
{
	if (session[0] && wanted)
		return context_events_add(&c->context, session, err);
	if (session[0])
		context_events_remove(&c->context, session);
	else if (!wanted)
		context_events_clear(&c->context);
	c->context.lanes = session[0] ? c->context.lanes : wanted;
	list_each(node, tmp, &c->lanes)
	{
		struct lane *l = list_entry(node, struct lane, link);
		context_events_lane(&c->context, l->external[0] ? l->external : l->session);
	}
	return STATUS_OK;
}

/* session.context events are wanted, or not any more: see context_events.h. */
static void on_update(struct conn *c, const struct json *root)
{
	struct json events = json_get(root, "context_events"), id = json_get(root, "session_id");
	struct str name = {NULL, 0};
	char session[ENGINE_SESSION_ID_MAX + 1] = "";
	bool wanted = false;
	struct error err = {0};
	struct buf out = BUF_INIT;
	enum status status = json_read_bool(&events, &wanted, &err);
	if (status == STATUS_OK && !json_has(&events))
		status = json_fail(&events, STATUS_INVALID, &err,
		                   "must be true or false: it is all that can be updated.");
	if (status == STATUS_OK)
		status = json_read_text(&id, &name, &err);
	if (status == STATUS_OK && name.p)
		status = params_session_id(name, "session_id", session, &err);
	if (status != STATUS_OK) {
		send_error(c, NULL, &err);
		return;
	}
	buf_printf(&out,
	           "{\"type\":\"session.updated\",\"context_events\":%s,\"session_id\":", wanted ? "true" : "false");
	if (session[0])
		buf_printf(&out, "\"%s\"}", session);
	else
		buf_puts(&out, "null}");
	send_text(c, &out);
	buf_free(&out);
	if (!c->dead && update_context(c, wanted, session, &err) != STATUS_OK)
		send_error(c, NULL, &err);
}

void lanes_message(struct ws_conn *ws, struct str text, void *app)
{
	struct conn *c = ws_user(ws);
	struct json_doc *doc;
	struct json root, type;
	struct error err = {0};
	struct failure f;
	(void)app;

	if (!c || c->dead)
		return;
	if (!auth_find(&c->app->auth, c->tenant)) {
		failure_set(&f, FAILURE_BAD_KEY, NULL, "The API key of this connection is not valid any more.");
		send_failure(c, NULL, &f);
		ws_close(ws, WS_CLOSE_POLICY, "the API key is not valid any more");
		return;
	}
	if (json_parse(text, "The message", &doc, &root, &err) != STATUS_OK) {
		send_error(c, NULL, &err);
		return;
	}
	type = json_get(&root, "type");
	if (str_is(json_text(&type), "response.create")) {
		on_create(c, &root);
	} else if (str_is(json_text(&type), "response.cancel")) {
		on_cancel(c, &root);
	} else if (str_is(json_text(&type), "session.update")) {
		on_update(c, &root);
	} else {
		json_fail(&type, STATUS_INVALID, &err, "must be response.create, response.cancel or session.update.");
		send_error(c, NULL, &err);
	}
	json_doc_free(doc);
}

/* ---- The connection ---- */

void lanes_opened(struct ws_conn *ws, void *app)
{
	struct conn *c = calloc(1, sizeof *c);
	if (!c) {
		ws_close(ws, 1011, "out of memory");
		return;
	}
	c->ws = ws;
	c->app = app;
	c->tenant = ws_principal(ws);
	context_events_init(&c->context, app, ws, c->tenant);
	list_init(&c->lanes);
	make_id(c->id, sizeof c->id, "ws_");
	list_push_back(&c->app->websockets, &c->link);
	ws_set_user(ws, c);
	release_idle(c);
}

void lanes_drain(struct app *a)
{
	list_each(node, tmp, &a->websockets) release_idle(list_entry(node, struct conn, link));
}

/* A client's own session stays alive as long as its connection shows signs of life. */
void lanes_alive(struct ws_conn *ws, void *app)
{
	struct app *a = app;
	struct conn *c = ws_user(ws);
	int64_t now = clock_now_ms(clock_system());

	if (!c || now - c->last_heartbeat_ms < a->config->session_heartbeat / 4)
		return;
	c->last_heartbeat_ms = now;
	list_each(node, tmp, &c->lanes)
	{
		struct lane *l = list_entry(node, struct lane, link);
		if (l->external[0])
			engine_session_heartbeat(a->engine, engine_next_id(a->engine), c->tenant, l->external);
	}
}

void lanes_closed(struct ws_conn *ws, void *app)
{
	struct conn *c = ws_user(ws);
	struct list *node;
	(void)app;
	if (!c)
		return;
	c->dead = true;
	context_events_clear(&c->context);
	while ((node = c->lanes.next) != &c->lanes)
		lane_free(list_entry(node, struct lane, link));
	ws_set_user(ws, NULL);
	list_remove(&c->link);
	free(c);
}

void lanes_drained(struct ws_conn *ws, void *app)
{
	struct conn *c = ws_user(ws);
	(void)app;
	if (c && !c->dead)
		context_events_drained(&c->context);
}

void lanes_note_compaction(struct app *a, int32_t tenant, const char *session, const struct compact_note *note)
{
	list_each(node, tmp, &a->websockets)
	{
		struct conn *c = list_entry(node, struct conn, link);
		if (!c->dead)
			context_events_compaction(&c->context, tenant, session, note);
	}
}
