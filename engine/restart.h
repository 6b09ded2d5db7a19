/*
 * What outlives the process: sessions in a file beside the disk tier's, and their pages in the tier. When a daemon
 * drains it leaves both; the next one reads the file, removes it, and finds the pages when a session's next turn asks
 * for them: they are known by their tokens, which the client sends again, so the file needs none. It has the keys of
 * the pages, for whoever asks where they are, or exports the session, before its next turn.
 *
 * The file is bound to what pages depend on, like the tier's (tier_file.h). A tenant is known in it by its name, since
 * what its number means follows from the keys a daemon is started with: its sessions wait until a tenant of that name
 * is made. Who has no name is tenant 0.
 */
#pragma once

#include "engine/base/status.h"
#include "engine/kv/tiers.h"
#include "engine/session.h"

struct restart_session {
	struct session_saved saved;
	struct kv_key *keys;       /* [n_pages] */
	int32_t n_pages, n_tokens; /* of its KV: struct kv_weak */
};

/* Saved sessions whose tenants there are not yet. */
struct restart {
	struct restart_session *waiting; /* [n] */
	size_t n;
};

/* Saves all sessions and their pages, for at most limit_ms; and again those that still wait. */
void restart_save(const char *dir, const struct kv_key *identity, struct session_table *sessions,
                  struct kv_tiers *tiers, const struct restart *r, int64_t limit_ms);
/*
 * Makes the sessions of tenant 0 that are saved in dir, if any are and they are of this identity; the others wait in
 * the empty *r.
 */
void restart_load(const char *dir, const struct kv_key *identity, struct session_table *sessions, struct restart *r);
/* A tenant has been made: so are its sessions. */
void restart_claim(struct restart *r, struct session_table *sessions, const struct tenant *tenant);
void restart_free(struct restart *r);
