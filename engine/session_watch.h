/*
 * Who wants to hear of a session whenever what it has of the KV cache changes. Nothing is polled: a watch is looked at
 * after a turn of the worker in which something happened that could concern it (its requests moved on; pages were
 * evicted, indexed, parked or moved between tiers), and tells at most so often. The worker thread's alone.
 */
#pragma once

#include "engine/engine.h"
#include "engine/kv/pool.h"
#include "engine/parked.h"
#include "engine/session.h"

enum { SESSION_WATCH_MS = 100 }; /* between two events of one watch */

struct session_watches {
	struct list all;
	const struct session_table *sessions;
	const struct kv_pool *pool;
	const struct parking *parking;
};

void session_watches_init(struct session_watches *w, const struct session_table *sessions, const struct kv_pool *pool,
                          const struct parking *parking);
void session_watches_free(struct session_watches *w);
/* From now on; its first event is due at once. NOMEM. */
enum status session_watch(struct session_watches *w, uint64_t id, const struct session *s);
/* False when there is none of this id. */
bool session_unwatch(struct session_watches *w, uint64_t id);
/* The session ends: whoever watches it gets an ERROR, NOT_FOUND, at the end of `out`. */
void session_watches_end(struct session_watches *w, const struct session *s, struct list *out);
/* Appends a CONTEXT event for each watch that has something to tell and may. False when there are none. */
bool session_watches_tell(struct session_watches *w, int64_t now_ms, struct list *out);
/* When one that has something to tell may do so; INT64_MAX: none has. */
int64_t session_watches_due_ms(const struct session_watches *w);
