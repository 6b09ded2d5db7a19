#include "engine/session_watch.h"

#include <stdlib.h>
#include <string.h>

#include "engine/event.h"
#include "engine/kv/tiers.h"
#include "engine/request.h"

struct watch {
	struct list link;
	uint64_t id;
	const struct session *session;
	uint64_t mark;     /* of what could concern it, when it was looked at last */
	int64_t told_ms;
	bool told, dirty;  /* once; there may be something to tell */
	struct engine_session_info last;
};

void session_watches_init(struct session_watches *w, const struct session_table *sessions, const struct kv_pool *pool,
                          const struct parking *parking)
{
	*w = (struct session_watches){.sessions = sessions, .pool = pool, .parking = parking};
	list_init(&w->all);
}

static void forget(struct watch *v)
{
	list_remove(&v->link);
	free(v);
}

void session_watches_free(struct session_watches *w)
{
	while (w->all.next && !list_empty(&w->all))
		forget(list_entry(w->all.next, struct watch, link));
}

enum status session_watch(struct session_watches *w, uint64_t id, const struct session *s)
{
	struct watch *v = calloc(1, sizeof *v);
	if (!v)
		return STATUS_NOMEM;
	v->id = id;
	v->session = s;
	v->dirty = true;
	v->told_ms = INT64_MIN / 2; /* at once */
	list_push_back(&w->all, &v->link);
	return STATUS_OK;
}

bool session_unwatch(struct session_watches *w, uint64_t id)
{
	list_each(node, tmp, &w->all) {
		struct watch *v = list_entry(node, struct watch, link);
		if (v->id != id)
			continue;
		forget(v);
		return true;
	}
	return false;
}

void session_watches_end(struct session_watches *w, const struct session *s, struct list *out)
{
	struct error err;
	list_each(node, tmp, &w->all) {
		struct watch *v = list_entry(node, struct watch, link);
		if (v->session != s)
			continue;
		struct engine_event *ev = event_create(ENGINE_EVENT_ERROR, v->id);
		error_set_param(&err, STATUS_NOT_FOUND, "session_id", "the session '%s' has ended", s->id);
		if (ev) {
			event_set_error(ev, &err);
			list_push_back(out, &ev->link);
		}
		forget(v);
	}
}

/* Rises with all that can move pages which no request of the session has touched. */
static uint64_t common_mark(const struct session_watches *w)
{
	const struct kv_tiers *tiers = w->sessions->tiers;
	struct kv_prefix_stats index;
	uint64_t mark = w->parking->n_parked + w->parking->n_dropped;
	kv_prefix_stats(w->sessions->prefix, &index);
	mark += index.inserted;
	for (int reason = 0; reason < EVICT_N_REASONS; reason++)
		mark += index.evicted[reason];
	if (!tiers)
		return mark;
	struct kv_tiers_stats s;
	kv_tiers_stats(tiers, &s);
	for (int kind = 0; kind < KV_TIER_KINDS; kind++)
		mark += s.fetched[kind] + s.tier[kind].evicted + s.tier[kind].put[KV_PUT_STORED] +
		        s.tier[kind].loads[KV_LOAD_DONE] + s.tier[kind].off;
	return mark;
}

static uint64_t own_mark(const struct session *s)
{
	uint64_t running = s->running ? 1 + (uint64_t)s->running->kv.n_tokens : 0;
	return running + s->ended.requests * 2 + (uint64_t)s->n_waiting;
}

/* What moved, of a session whose pages are the same ones as before. */
static struct engine_session_moves moves(const struct engine_session_info *a, const struct engine_session_info *b)
{
	int32_t device = b->pages_device - a->pages_device, lost = b->pages_lost - a->pages_lost;
	struct engine_session_moves m = {.lost = lost > 0 ? lost : 0, .up = device > 0 ? device : 0};
	m.evicted = device < 0 ? -device : 0;
	m.down = m.evicted > m.lost ? m.evicted - m.lost : 0;
	return m;
}

static bool same(const struct engine_session_info *a, const struct engine_session_info *b)
{
	return a->n_tokens == b->n_tokens && a->n_logical == b->n_logical && a->n_pages == b->n_pages &&
	       a->pages_device == b->pages_device && memcmp(a->pages_tier, b->pages_tier, sizeof a->pages_tier) == 0 &&
	       a->pages_lost == b->pages_lost && a->n_running == b->n_running && a->n_waiting == b->n_waiting &&
	       a->n_requests == b->n_requests && a->policy == b->policy;
}

static bool tell(struct session_watches *w, struct watch *v, int64_t now_ms, struct list *out)
{
	struct engine_session_info now;
	session_describe(w->sessions, v->session, w->pool, &now);
	v->dirty = false;
	if (v->told && same(&now, &v->last))
		return false;
	struct engine_event *ev = event_create(ENGINE_EVENT_CONTEXT, v->id);
	struct engine_session_info *copy = ev ? malloc(sizeof *copy) : NULL;
	if (!copy) {
		/* Without memory it is told later. */
		engine_event_free(ev);
		v->dirty = true;
		v->told_ms = now_ms;
		return false;
	}
	*copy = now;
	ev->sessions = copy;
	ev->n_sessions = 1;
	/* Pages of a turn that runs, or of another one than before, are others. */
	if (v->told && !now.n_running && !v->last.n_running && now.n_requests == v->last.n_requests)
		ev->moves = moves(&v->last, &now);
	v->last = now;
	v->told = true;
	v->told_ms = now_ms;
	list_push_back(out, &ev->link);
	return true;
}

bool session_watches_tell(struct session_watches *w, int64_t now_ms, struct list *out)
{
	bool any = false;
	if (list_empty(&w->all))
		return false;
	uint64_t common = common_mark(w);
	list_each(node, tmp, &w->all) {
		struct watch *v = list_entry(node, struct watch, link);
		/* A mix of both, so that one cannot hide the other. */
		uint64_t mark = common * UINT64_C(0x9E3779B97F4A7C15) + own_mark(v->session);
		v->dirty = v->dirty || mark != v->mark;
		v->mark = mark;
		if (v->dirty && now_ms - v->told_ms >= SESSION_WATCH_MS)
			any = tell(w, v, now_ms, out) || any;
	}
	return any;
}

int64_t session_watches_due_ms(const struct session_watches *w)
{
	int64_t due = INT64_MAX;
	list_each(node, tmp, (struct list *)&w->all) {
		const struct watch *v = list_entry(node, struct watch, link);
		int64_t at = v->dirty ? v->told_ms + SESSION_WATCH_MS : INT64_MAX;
		due = at < due ? at : due;
	}
	return due;
}
