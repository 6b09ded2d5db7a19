/*
 * What outlives the process: sessions in a file beside the disk tier's, and their pages in the tier. When a daemon drains it leaves
 * both; the next one reads the file, removes it, and finds the pages when a session's next turn asks for them: they are known by
 * their tokens, which the client sends again, so the file needs none.
 *
 * The file is bound to what pages depend on, like the tier's (tier_file.h). Only sessions of tenant 0 are kept: what the other
 * tenants' numbers mean follows from the keys a daemon is started with, and a number that means somebody else would hand a session
 * over. Their pages are found again under their salts.
 */
#pragma once

#include "engine/base/status.h"
#include "engine/kv/tiers.h"
#include "engine/session.h"

/* Saves all sessions and their pages, for at most limit_ms. */
void restart_save(const char *dir, const struct kv_key *identity, struct session_table *sessions, struct kv_tiers *tiers,
                  int64_t limit_ms);
/* Makes the sessions that are saved in dir, if any are and they are of this identity. */
void restart_load(const char *dir, const struct kv_key *identity, struct session_table *sessions);
