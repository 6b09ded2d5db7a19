/*
 * What a request is measured against when it arrives: the limits of its tenant and its session, and its time. What it
 * takes later is the scheduler's business (sched.h).
 */
#pragma once

#include "engine/request.h"
#include "engine/session.h"

/* LIMIT (param session_id) when the session has `most` generations already; 0: no limit. */
enum status limits_session(const struct session *s, int32_t most, struct error *err);
/*
 * CONTEXT_LENGTH when the limit of the tenant's KV or of the session's tokens could never let the request end; the
 * error has the limit's name and both numbers. One without a max_tokens ends at the limit as it would at the end of the
 * context.
 */
enum status limits_apply(struct request *r, struct error *err);
/* When it has to have ended, by its own timeout and the engine's (0: none), whichever is shorter; INT64_MAX: never. */
int64_t limits_deadline_ns(const struct request *r, int64_t engine_ms);
