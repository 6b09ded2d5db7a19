/*
 * API keys. Only SHA-256 digests of the secrets are kept; what a client presents is hashed and compared with every key,
 * all bytes of each, so the time tells only the length of what was sent.
 *
 * A key is a tenant of the engine. The key of --api-key, and everybody when there are no keys at all, is tenant 0,
 * without limits. The keys of --api-keys get a number of their own, which belongs to the name from then on: a key that
 * leaves the file and comes back, or whose secret changes, finds its sessions again.
 */
#pragma once

#include <stdbool.h>

#include "engine/base/sha256.h"
#include "engine/base/status.h"
#include "engine/base/str.h"
#include "engine/engine.h"

enum { AUTH_NAME_MAX = ENGINE_TENANT_NAME_MAX, AUTH_REFUSED = -1 };

struct auth_key {
	char name[AUTH_NAME_MAX + 1]; /* [A-Za-z0-9_.-], so it can stand in logs, labels and JSON as it is */
	bool live;                    /* in the file as it is now */
	bool admin;                   /* sees what belongs to others: figures of every key, all sessions in /v1/kv */
	uint8_t digest[SHA256_BYTES];
	struct engine_tenant tenant;
};

struct auth {
	struct auth_key keys[ENGINE_MAX_TENANTS]; /* [n] by tenant; the first is that of --api-key */
	int32_t n;
	bool open; /* no key is needed */
};

/* api_key: NULL or "" is none, and then everybody may do everything. */
void auth_init(struct auth *a, const char *api_key);
/*
 * Replaces the keys of --api-keys by those of the text, a JSON object:
 *     {"keys": [{"name": "alice", "key": "SECRET", "cache_salt": "TEXT", "max_requests": N, "max_sessions": N,
 *                "kv_memory": BYTES, "admin": true}, ...]}
 * "sha256": "HEX", the secret's digest, may stand in place of "key". All but the name and the secret may be left out:
 * no limit, no admin, and a salt of its own, which is the name. INVALID for anything else, LIMIT for too many names; *a
 * is then as it was. `where` begins every message and no message holds a secret. NOMEM.
 */
enum status auth_set_keys(struct auth *a, struct str text, const char *where, struct error *err);

/*
 * The tenant of what the client presents: `authorization` is the Authorization header ("Bearer KEY", any case),
 * `x_api_key` the X-Api-Key header; absent ones have p == NULL. AUTH_REFUSED when it is no key. Tenant 0 when none is
 * needed.
 */
int32_t auth_check(const struct auth *a, struct str authorization, struct str x_api_key);
/* NULL for a tenant that has no key now. */
const struct auth_key *auth_find(const struct auth *a, int32_t tenant);
