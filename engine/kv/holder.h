/* Who holds a reference on a page: a word that goes along with every reference, so that each can be accounted for. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* One row per kind: name, text. */
#define KV_HOLDER_MAP(X)                                                                                               \
	X(OTHER, "other")     /* whoever has not said who it is: tests and tools */                                   \
	X(RUNNING, "running") /* a request that is computed; id: the request's */                                     \
	X(SESSION, "session") /* a session, for KV of its own (engine/parked.h); id: its serial */                     \
	X(WAITING, "waiting") /* a queued request, for what it is about to hit; id: the request's */                  \
	X(INDEX, "index")     /* the prefix index */                                                                  \
	X(COPY, "copy")       /* a copy that is under way, for its target */

enum kv_holder_kind {
#define X(name, text) KV_HOLDER_##name,
	KV_HOLDER_MAP(X)
#undef X
	KV_HOLDER_KINDS
};

struct kv_holder {
	enum kv_holder_kind kind;
	uint64_t id; /* among those of its kind */
};

static inline bool kv_holder_is(struct kv_holder a, struct kv_holder b)
{
	return a.kind == b.kind && a.id == b.id;
}

/* The word for a kind: "running" ... */
const char *kv_holder_text(enum kv_holder_kind kind);
