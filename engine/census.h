/*
 * The census: all pages of the pool counted one by one, with whom each is held by, at one moment. It is what the
 * figures of the KV cache come from, and an audit: references that it finds must be those the pool knows, and what
 * tenants are charged must be what their sequences hold.
 *
 * It takes time proportional to the pages and references, 1.2 ms for 100,000 pages in use, so the worker takes one when
 * somebody asks and something has changed since the last, and otherwise at most every CENSUS_MS. The worker's thread
 * only.
 */
#pragma once

#include "engine/kv/pool.h"
#include "engine/sched.h"
#include "engine/session.h"
#include "engine/tenant.h"

enum { CENSUS_MS = 1000 };

struct census {
	const struct kv_pool *pool;
	const struct sched *sched;
	const struct session_table *sessions;
	const struct tenant_table *tenants;
	/* [pages]: the first that holds it; sequences that do, up to 2; positions used */
	uint8_t *holder, *sequences, *used;
	bool alarm;
};

/* NOMEM. Everything must outlive it. */
enum status census_init(struct census *c, const struct kv_pool *pool, const struct sched *sched,
                        const struct session_table *sessions, const struct tenant_table *tenants);
void census_free(struct census *c);
/* Counts. Raises or takes back the alarm, with a line in the log. */
void census_take(struct census *c, struct engine_kv *out);
