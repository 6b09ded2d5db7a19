#include "server/context_events.h"

#include <stdio.h>
#include <stdlib.h>

struct watch {
	struct list link;
	struct waiter waiter;
	struct context_events *owner;
	char session[ENGINE_SESSION_ID_MAX + 1];
	struct buf held; /* the latest event, which the client has had no room for */
};

void context_events_init(struct context_events *c, struct app *a, struct ws_conn *ws, int32_t tenant)
{
	*c = (struct context_events){.app = a, .ws = ws, .tenant = tenant};
	list_init(&c->all);
}

static void forget(struct watch *w)
{
	list_remove(&w->link);
	list_remove(&w->waiter.link);
	w->owner->n--;
	buf_free(&w->held);
	free(w);
}

static void end(struct watch *w)
{
	engine_cancel(w->owner->app->engine, w->waiter.id);
	forget(w);
}

void context_events_clear(struct context_events *c)
{
	c->lanes = false;
	while (!list_empty(&c->all))
		end(list_entry(c->all.next, struct watch, link));
}

static void write_context(const struct engine_session_info *s, const struct engine_session_moves *m, struct buf *out)
{
	buf_printf(out,
		   "{\"type\":\"session.context\",\"session_id\":\"%s\",\"tokens\":%d,\"tokens_logical\":%d,\"policy\":"
		   "\"%s\",\"pages\":%d,\"kv_bytes\":%llu,"
		   "\"running\":%d,\"waiting\":%d",
		   s->id, s->n_tokens, s->n_logical, s->policy ? s->policy : "full", s->n_pages,
		   (unsigned long long)s->kv_bytes, s->n_running, s->n_waiting);
	write_pages_by_tier(s->pages_device, s->pages_tier, s->pages_lost, out);
	buf_printf(out, ",\"evicted_pages\":%d,\"moved\":{\"down\":%d,\"up\":%d,\"lost\":%d}}", m->evicted, m->down,
		   m->up, m->lost);
}

/* Sends an event, or keeps it in place of an earlier one until there is room. */
static void send(struct watch *w, const struct buf *event)
{
	struct context_events *c = w->owner;
	buf_clear(&w->held);
	if (event->failed)
		return; /* the next one will do */
	if (ws_unread(c->ws) > CONTEXT_EVENTS_UNREAD)
		buf_append_buf(&w->held, event);
	else
		ws_send(c->ws, event->data, event->len);
}

static void on_context(struct waiter *waiter, const struct engine_event *ev)
{
	struct watch *w = list_entry(waiter, struct watch, waiter);
	struct buf out = BUF_INIT;
	if (ev->type == ENGINE_EVENT_ERROR) {
		/* Nothing that was held says more than that it is over. */
		buf_printf(&out, "{\"type\":\"session.context\",\"session_id\":\"%s\",\"ended\":true}", w->session);
		if (!out.failed)
			ws_send(w->owner->ws, out.data, out.len);
		forget(w);
	} else {
		write_context(&ev->sessions[0], &ev->moves, &out);
		send(w, &out);
	}
	buf_free(&out);
}

static struct watch *find(const struct context_events *c, const char *session)
{
	list_each(node, tmp, &c->all)
	{
		struct watch *w = list_entry(node, struct watch, link);
		if (strcmp(w->session, session) == 0)
			return w;
	}
	return NULL;
}

enum status context_events_add(struct context_events *c, const char *session, struct error *err)
{
	if (find(c, session))
		return STATUS_OK;
	if (c->n >= CONTEXT_EVENTS_MAX)
		return error_set_param(err, STATUS_LIMIT, "session_id",
				       "This connection watches %d sessions, which is the limit.", c->n);
	struct watch *w = calloc(1, sizeof *w);
	if (!w)
		return error_set(err, STATUS_NOMEM, "There is no memory to watch a session.");
	w->owner = c;
	snprintf(w->session, sizeof w->session, "%s", session);
	w->waiter.event = on_context;
	list_push_back(&c->all, &w->link);
	c->n++;
	app_wait(c->app, &w->waiter, engine_next_id(c->app->engine));
	engine_session_watch(c->app->engine, w->waiter.id, c->tenant, session);
	return STATUS_OK;
}

void context_events_lane(struct context_events *c, const char *session)
{
	struct error err;
	if (c->lanes && session[0])
		context_events_add(c, session, &err);
}

void context_events_remove(struct context_events *c, const char *session)
{
	struct watch *w = find(c, session);
	if (w)
		end(w);
}

void context_events_drained(struct context_events *c)
{
	list_each(node, tmp, &c->all)
	{
		struct watch *w = list_entry(node, struct watch, link);
		if (w->held.len)
			ws_send(c->ws, w->held.data, w->held.len);
		buf_free(&w->held);
	}
}

void context_events_compaction(struct context_events *c, int32_t tenant, const char *session,
			       const struct compact_note *note)
{
	static const char *const states[] = {"started", "done", "failed"};
	struct buf out = BUF_INIT;
	if (c->tenant != tenant || !find(c, session) || ws_unread(c->ws) > CONTEXT_EVENTS_UNREAD)
		return;
	buf_printf(&out,
		   "{\"type\":\"session.context\",\"session_id\":\"%s\",\"compaction\":{\"state\":\"%s\","
		   "\"background\":%s,\"tokens_before\":%d",
		   session, states[note->state], note->background ? "true" : "false", note->tokens_before);
	if (note->state == COMPACT_NOTE_DONE)
		buf_printf(&out, ",\"tokens_after\":%d,\"turns\":%d", note->tokens_after, note->turns);
	buf_puts(&out, "}}");
	if (!out.failed)
		ws_send(c->ws, out.data, out.len);
	buf_free(&out);
}
