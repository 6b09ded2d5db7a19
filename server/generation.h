/*
 * A group of engine requests behind one API request: its choices (n) and its prompts. It decides when output may begin,
 * ends all when one fails, counts, and writes the request's log line when the engine has let go of the last member.
 *
 * Output begins when every member has passed its PROMPT, or with the first token: until then nothing has been sent, so
 * whatever goes wrong can still be answered with a real status.
 *
 * Lifetime. The group belongs to itself once started: it frees itself after the last member's last event. The owner
 * gets `ended` exactly once, or calls generation_cancel(), after which it hears nothing more; it must not use the group
 * after either.
 */
#pragma once

#include "server/api.h"

struct generation;

/* All are required. `i` is the member's index, in the order of generation_add(). */
struct generation_ops {
	void (*prompt)(void *arg, int i, const struct engine_event *ev); /* before or after begin */
	void (*begin)(void *arg);					 /* once, before the first token */
	void (*token)(void *arg, int i, const struct engine_event *ev);
	void (*done)(void *arg, int i, const struct engine_event *ev); /* ev->finish is STOP or LENGTH */
	/* All members are done (f == NULL), or the group failed; `began` tells whether begin was called. */
	void (*ended)(void *arg, const struct failure *f, bool began);
};

/* Facts for the log line, copied; NULL is allowed. */
struct generation_origin {
	const char *method, *path, *peer, *request_id;
};

/* NULL when there is no memory. */
struct generation *generation_create(struct app *a, size_t n_members, const struct generation_origin *origin,
				     const struct generation_ops *ops, void *arg);
/* Adds a member; takes ownership of r. At most n_members times, before the start. */
void generation_add(struct generation *g, struct engine_request *r);
/* Submits the members. Events come later, never from within. */
void generation_start(struct generation *g);
/* Frees a group that was never started, and its requests. NULL is allowed. */
void generation_discard(struct generation *g);
/*
 * The owner lets go: the members are cancelled and nothing is reported any more. `why` is static text for the log
 * ("disconnect", "slow_reader", ...), or NULL when nothing was wrong.
 */
void generation_cancel(struct generation *g, const char *why);
/* Cancels the members; unlike the above, the owner hears of the end through `ended`, with FAILURE_CANCELLED. */
void generation_stop(struct generation *g, const char *why);
/* Somebody waits for it now: see engine_hurry(). */
void generation_hurry(struct generation *g);
/* Those that nobody waits for: see engine_request.background. */
void generation_stop_background(struct app *a, const char *why);
void generation_stop_all(struct app *a, const char *why);
/* The HTTP status that the client got, for the log; 0 until known. */
void generation_set_status(struct generation *g, int status);

/*
 * Sums over the members so far; a prompt shared by n choices counts once per distinct prompt (see
 * generation_share_prompt).
 */
struct generation_usage {
	int64_t prompt_tokens, cached_tokens, completion_tokens;
	struct engine_context_usage context; /* of the first member: no policy until it has ended */
};

/* Every `n` consecutive members have the same prompt. Default 1. */
void generation_share_prompt(struct generation *g, int n);
void generation_usage(const struct generation *g, struct generation_usage *out);
