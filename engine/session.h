/*
 * Sessions: conversations with a lifetime. A session is a soft claim: while it lives, the pages it used last are worth
 * more to the prefix index, where all KV is that no request uses now, so that the next turn computes only what is new.
 * It pins nothing. It ends when no sign of life came for its heartbeat timeout, when its TTL has passed, or when it is
 * deleted; so does its claim. A running request is a sign of life: it suspends the heartbeat timeout, not the TTL.
 *
 * The table belongs to the worker thread and reads time from the clock it is given. Expiry is exact: a session whose
 * deadline has passed is not found, whether or not a collection has run since. Collection pops a heap of deadlines,
 * which are moved lazily, so a heartbeat costs O(1) and a collection O(log n) for each session it looks at.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/clock.h"
#include "engine/base/list.h"
#include "engine/engine.h"
#include "engine/kv/prefix.h"
#include "engine/kv/tiers.h"
#include "engine/tenant.h"

struct parked;
struct request;

struct session {
	char id[ENGINE_SESSION_ID_MAX + 1]; /* unique among its tenant's */
	struct tenant *tenant;
	uint64_t serial;              /* rises with each session made */
	int64_t created_ms, seen_ms;
	int64_t heartbeat_ms, ttl_ms; /* -1: never */
	struct request *running;      /* at most one */
	int32_t n_waiting;
	int32_t max_tokens;           /* that its requests may come to; 0: no limit */
	struct ended_requests ended;
	struct kv_weak kv;            /* what its last request left in the index */
	uint64_t claim;               /* on pages of the index */
	struct parked *parked;        /* KV of its own, for its next turn; NULL: none */
	struct session *hash_next;
	size_t heap_at;
	int64_t heap_deadline_ms;
};

struct session_table {
	const struct clock *clock;
	struct kv_prefix *prefix;     /* NULL: sessions without KV */
	struct kv_tiers *tiers;       /* below it; NULL, as session_table_init() leaves it: none */
	int64_t heartbeat_ms, ttl_ms; /* defaults and upper bounds */
	int32_t max_sessions;
	int32_t max_tokens; /* of a session's requests, default and upper bound; 0: no limit */
	struct tenant_table *tenants;
	struct session **buckets;
	size_t n_buckets; /* a power of two */
	struct session **heap; /* [n_sessions] by heap_deadline_ms */
	size_t n_sessions, cap_heap;
	uint64_t id_seed[2];
	uint64_t created, expired, deleted;
	/* what it took to know who has expired: sessions looked at, places in the heap written */
	uint64_t heap_looks, heap_moves;
};

/*
 * The tenants, and the prefix index, which may be NULL, must outlive the table; the index gets room for the claims.
 * NOMEM.
 */
enum status session_table_init(struct session_table *t, struct tenant_table *tenants, struct kv_prefix *prefix,
                               const struct clock *clock, int64_t heartbeat_ms, int64_t ttl_ms, int32_t max_sessions);
/* Every session must have been removed. */
void session_table_free(struct session_table *t);

/*
 * EXISTS, INVALID (id), LIMIT (too many, of all or of the tenant), NOMEM. Collect expired sessions first: one that is
 * still there holds its id.
 */
enum status session_create(struct session_table *t, const struct engine_session_params *p, struct session **out,
                           struct error *err);
/* What outlives the process of a session. Times are milliseconds of the system's calendar clock. */
struct session_saved {
	char id[ENGINE_SESSION_ID_MAX + 1];
	char tenant[ENGINE_TENANT_NAME_MAX + 1]; /* the name of whose it is */
	int64_t created_ms;
	int64_t heartbeat_ms, ttl_ms;
	int32_t max_tokens;
	struct ended_requests ended;
};

void session_save(const struct session_table *t, const struct session *s, int64_t calendar_ms,
                  struct session_saved *out);
/*
 * A session as it was, of a tenant that the caller has found by its name: its TTL has gone on, and being restored is a
 * sign of life. As session_create(); NOT_FOUND: its TTL has passed meanwhile.
 */
enum status session_restore(struct session_table *t, int32_t tenant, const struct session_saved *saved,
                            int64_t calendar_ms, struct error *err);

/* NULL when the tenant has none of this id, or its deadline has passed. */
struct session *session_find(struct session_table *t, int32_t tenant, const char *id);
/* A sign of life: its deadline and its claim move. */
void session_touch(struct session_table *t, struct session *s);
/* When it ends, on the clock's milliseconds; INT64_MAX: never. */
int64_t session_deadline_ms(const struct session *s);
/* A session whose deadline has passed, or NULL. The caller ends its requests and removes it. */
struct session *session_next_expired(struct session_table *t);
/* The earliest moment at which session_next_expired() could find one; INT64_MAX: never. */
int64_t session_next_deadline_ms(const struct session_table *t);
/* Takes it out of the table, ends its claim, lets go of what it has parked and frees it. Nothing may run on it. */
void session_remove(struct session_table *t, struct session *s);

/* Remembers what a request of the session, which ends, leaves in the index of its KV. */
void session_keep(struct session_table *t, struct session *s, const struct kv_seq *kv);

/* The keys of what it had, as another process has left them; copied. It may be in tiers. */
void session_recall(struct session *s, const struct kv_key *keys, int32_t n_pages, int32_t n_tokens);

/* Looks at each of its pages. */
void session_describe(const struct session_table *t, const struct session *s, const struct kv_pool *pool,
                      struct engine_session_info *out);
/*
 * Describes up to limit sessions of a tenant (ENGINE_ALL_TENANTS: of all) whose serial is greater than after, in that
 * order. *out is malloc'd, [*n]; *more tells whether there are others behind. NOMEM.
 */
enum status session_list(const struct session_table *t, const struct kv_pool *pool, int32_t tenant,
                         const struct engine_session_page *page, struct engine_session_info **out, size_t *n,
                         bool *more);
