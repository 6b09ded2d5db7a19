/*
 * Tenants: whom the engine serves. A tenant is a small number that the server gives meaning (an API key), a salt that
 * keeps its KV apart, limits, and what it holds and has used. Tenant 0 always exists, without a salt and without
 * limits: it is everybody when there are no keys.
 *
 * What a tenant is charged for is the references of its running generations (struct kv_account): a page that two of
 * them share counts twice, one that only the prefix index keeps not at all, and neither does what a queued request
 * merely keeps from being evicted.
 *
 * The worker thread owns the table. A tenant is never freed before the table: sessions and requests point to it.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/list.h"
#include "engine/base/status.h"
#include "engine/engine.h"
#include "engine/kv/seq.h"

/* What ended requests have come to, of a tenant or a session. */
struct ended_requests {
	uint64_t requests;
	uint64_t prompt_tokens, cached_tokens, generated_tokens;
};

struct tenant {
	int32_t id;
	char name[ENGINE_TENANT_NAME_MAX + 1];
	char salt[ENGINE_SALT_MAX + 1];
	struct engine_tenant_limits limits;
	int32_t max_pages;     /* limits.kv_bytes in whole pages; INT32_MAX: no limit */

	struct kv_account kv;  /* of its running generations */
	int32_t n_running, n_waiting, n_sessions;
	uint64_t last_turn;    /* of the request that it put into the queue last: see sched.c */
	uint64_t blocked_pass; /* the pass of admission in which its limit stopped one of its requests */

	/* Since start. */
	struct ended_requests ended;
	uint64_t refused;      /* by one of its limits */
};

struct tenant_table {
	struct tenant *all[ENGINE_MAX_TENANTS]; /* NULL: never set */
	int32_t n;                              /* one more than the highest number in use */
	size_t page_bytes;
};

/* page_bytes: what a page takes in the pool, by which kv_bytes is counted. NOMEM. */
enum status tenant_table_init(struct tenant_table *t, size_t page_bytes);
/* No session and no request may point to a tenant any more. */
void tenant_table_free(struct tenant_table *t);

/*
 * Makes or changes a tenant. Limits that are lower than what it holds stop what comes next, not what is there. NOMEM.
 */
enum status tenant_set(struct tenant_table *t, const struct engine_tenant *given);
/* NULL when it was never set. */
struct tenant *tenant_find(const struct tenant_table *t, int32_t id);
/* Tokens that one generation of it can have KV for at most, whole pages counted; INT32_MAX: no limit. */
int32_t tenant_max_tokens(const struct tenant *t);

/* Adds one that has ended; usage is NULL when it came to no answer. */
void ended_add(struct ended_requests *e, const struct engine_usage *usage);

void tenant_describe(const struct tenant *t, size_t page_bytes, struct engine_tenant_usage *out);
