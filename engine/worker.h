/*
 * The worker as its parts see it: worker.c has its life and its loop, worker_commands.c does what it is told,
 * worker_step.c computes. All of it is the worker thread's alone.
 */
#pragma once

#include "engine/census.h"
#include "engine/context.h"
#include "engine/engine_internal.h"
#include "engine/restart.h"
#include "engine/sched.h"
#include "engine/session.h"
#include "engine/session_watch.h"
#include "engine/transfer.h"

struct worker {
	struct engine *e;
	struct tenant_table tenants;
	struct session_table sessions;
	struct sched sched;
	struct census census;
	struct context_bounds context;
	struct kv_scorer scorer;
	struct kv_attics attics;
	struct kv_page_merger *merger; /* NULL: pages cannot be merged */
	struct transfers transfers;
	struct session_watches watches;
	struct list exports;    /* commands that wait for a page from a tier */
	struct restart restart; /* sessions of the process before that still wait for their tenant */
	struct engine_kv kv;    /* as the census found it last */
	int64_t census_ms;      /* and when */
	bool census_stale;      /* something may have changed since */
	int64_t next_gc_ms;
	/* events of this turn of the loop; they leave together, after the figures that belong to them */
	struct list out;
	/*
	 * Of a step, by part, [2 * max_running] each: the logits it needs here, or the token that the backend has
	 * chosen.
	 */
	float **part_logits;
	int32_t *part_token;
	struct sample_row *choice; /* [max_running] what the backend chooses */
	int32_t *chosen;           /* [max_running] and what comes back */
	struct engine_stats stats; /* counters; gauges are filled in at publication */
	int32_t overflow_tokens; /* that a request may have below the pool, when that was looked at last */
	bool stopping;
	bool lost;               /* the device is: nothing can be computed any more */
	struct error lost_error; /* what was wrong with it */
};

/* ---- worker.c ---- */

/* The request's last event says how it ended, and goes out with those of this turn; the request is gone. */
void worker_fail_request(struct worker *w, struct request *r, const struct error *err);
void worker_finish_request(struct worker *w, struct request *r, enum engine_finish finish, const char *detail);
/* Ends every request of a session, then the session. */
void worker_end_session(struct worker *w, struct session *s, const char *detail);
/* Ends the sessions whose time is over. */
void worker_collect_sessions(struct worker *w);
void worker_take_census(struct worker *w);
/* The longest conversation of which all is kept, as far as there is room for it now. */
int32_t worker_max_tokens(const struct worker *w);
/* The sentence for requests that have lost what they had below the pool. */
void worker_explain_loss(struct error *err);
/* The sentence for requests that a failed device leaves without an answer. */
void worker_explain_failure(const struct worker *w, enum status st, struct error *err);

/* ---- worker_commands.c ---- */

/* Does what a command asks for, and answers or destroys it, at once or later. */
void worker_handle(struct worker *w, struct command *c);
/* Exports that wait for pages from tiers try again. */
void worker_continue_exports(struct worker *w);

/* ---- worker_step.c ---- */

/* Computes the batch that the scheduler has built, and sends what came of it. */
void worker_run_step(struct worker *w);
