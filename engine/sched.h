/*
 * The scheduler: which requests run, and which rows the next step computes. It belongs to the worker thread.
 *
 * Admission goes round among the tenants that wait, and is first come, first served within one; but the requests of one
 * session run one after the other, and a request whose prompt begins like one that is being computed waits for the
 * common part instead of computing it twice. A request begins with what the prefix index knows of its prompt, its own
 * earlier turns included. It is admitted when the pool has pages for the rest (pages that only the index holds are
 * evicted for it, then those last in line give up the pages they wait to use), so a running prefill never waits for
 * memory. A step takes one row from each request that decodes, then fills its budget with equal shares of the prompts
 * that are being computed. When a decoding request finds no page and nothing can be reclaimed, the youngest request is
 * preempted: its pages fall to the index, and what is evicted of them is computed again later with the same result. A
 * tenant's limit of KV works in the same way on what that tenant holds, and stops only its own requests.
 *
 * What the tiers below the pool have of a prompt comes up before the request is admitted: it waits, holding what is
 * there, while others go on, and requests behind it may overtake it. When there are no others it is admitted, alone, as
 * soon as the first layers are there (promotion.h).
 *
 * A request under a context policy (kv/policy.h) takes from the index, and gives it, only what is exact. Steps end
 * where its policy acts next, and what has to go then goes in front of the next one. Pages that go may be shared, so
 * each stretch asks for room as a decoding request does.
 *
 * A request with more tokens than the pool holds is large. Where all layers have a window it passes through the pool,
 * in pieces that it has room for behind the window. Else it can run where there is room below the pool for its first
 * pages (kv/overflow.h), which is reserved when it is admitted, for all that it may come to if it says that; those that
 * wait for such room are overtaken. It has half of the pool at most, and is computed in steps as large as that allows,
 * since each of them reads all that is below. A step with such a request is slow for everybody in it: while there are
 * others, they get as much time to themselves afterwards.
 *
 * Work in the background, which nobody waits for, comes last in every order: it is admitted while nothing else runs or
 * waits, goes on beside what comes then, and is set back first, for a prompt that lacks room as well.
 *
 * Nothing is decided once and for all: each step estimates afresh what a waiting request lacks and what could be had
 * for it, and takes nothing from anybody while the estimate says that it would not be enough.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/base/clock.h"
#include "engine/base/list.h"
#include "engine/kv/attic.h"
#include "engine/kv/merge.h"
#include "engine/kv/overflow.h"
#include "engine/kv/pool.h"
#include "engine/kv/prefix.h"
#include "engine/kv/score.h"
#include "engine/parked.h"
#include "engine/request.h"
#include "engine/session.h"

/* The request whose step begins before its pages are there, and how long that may still wait for them. */
struct sched_arrival {
	struct kv_arrival base;
	struct kv_tiers *tiers;
	struct request *request;
	int64_t patience_ns;
};

/* Pages that a large request has in the pool at most, and rows of it that a step computes. */
struct sched_large {
	int32_t resident_pages, step_rows; /* 0: none can run */
};
/* The same where all layers have windows, and rows look back on `horizon` positions. */
struct sched_large sched_large_windowed(int32_t pool_pages, int32_t horizon, int32_t step_tokens);

/* What one request does in a step. */
struct step_part {
	struct request *request;
	int32_t n_rows;
	/* of n_outputs consecutive ones: the last row's, or all rows' for prompt log-probabilities */
	int32_t first_output;
	int32_t n_outputs;
	bool exact; /* its row is computed without its policy, for its logits only: see drift.h */
	/* its rows are not the request's next ones but its first ones, at later positions: see kv_policy_moved() */
	bool moves;
	bool again; /* they are none of its own: a page that it lacks is computed again, see recall_computed() */
};

struct sched {
	struct kv_pool *pool;
	struct kv_prefix *prefix;
	struct kv_tiers *tiers; /* below the pool; NULL, as sched_init() leaves it: none */
	bool overlaps; /* requests may begin while their pages come up; false, as sched_init() leaves it: when they are
	                  there */
	/* room for what large requests have beyond the pool; NULL, as sched_init() leaves it: none */
	struct kv_overflow *overflow;
	struct kv_scorer *scorer; /* NULL, as sched_init() leaves it: all pages are worth the same */
	struct kv_attics *attics; /* NULL, as sched_init() leaves it: what a window leaves is gone */
	struct kv_merger *merger; /* NULL, as sched_init() leaves it: no request merges */
	struct session_table *sessions;
	struct parking parking; /* KV of idle sessions that is not the index's */
	const struct clock *clock;
	int32_t max_running, step_tokens, max_outputs;
	struct sched_large large; /* without overflow; zeroed, as sched_init() leaves it: none can run */
	/* positions that a row looks back on at most, so that older pages can go; 0, as sched_init() leaves it: all */
	int32_t horizon;

	struct list waiting; /* by turn, then by arrival */
	struct list running; /* by arrival */
	int32_t n_waiting, n_running;
	uint64_t next_order;
	uint64_t turn;       /* of the request admitted last */
	uint64_t pass;       /* of admission */
	uint64_t overflow_pass; /* in which a request had to wait for room below the pool */
	int64_t owed_ns;     /* to the other requests, for the last step that had a large one */
	/* during a pass of admission: whom the last one that waits for another waits for */
	const struct request *awaited;
	uint64_t n_preemptions, preempted[ENGINE_N_ROOMS]; /* in all, and by what needed the room */
	uint64_t n_holds_dropped;
	uint64_t pages_dropped[KV_POLICIES]; /* by context policies, of block tables */
	uint64_t n_unmerged; /* tokens that MERGE let go of, since they have no KV that could be merged */
	/* full pages of the prompts admitted, and those of them that were known, to whomever */
	uint64_t pages_wanted, pages_found;
	double rows_per_s;   /* measured speed of steps with prompt rows; 0: not known yet */

	/* The step under construction: host arrays that `batch` points to. */
	struct batch batch;
	int32_t *token, *position; /* [step_tokens] */
	struct batch_seq *seq;     /* [2 * max_running]: some have two parts */
	int32_t *output_row;       /* [max_outputs] */
	struct step_part *part;    /* [2 * max_running] */
	struct kv_spill **spill;   /* [max_running] of the large ones */
	struct sched_arrival arrival; /* while batch.arrival is set */
};

/* step_tokens and max_outputs are at least max_running. */
enum status sched_init(struct sched *s, struct kv_pool *pool, struct kv_prefix *prefix, struct session_table *sessions,
                       const struct clock *clock, int32_t max_running, int32_t step_tokens, int32_t max_outputs);
/* Every request must have been removed. */
void sched_free(struct sched *s);

/* Of a running request's pages, those that no later position will see fall to the index. */
void sched_let_go(struct sched *s, struct request *r);
/* Puts a new request into the queue, behind those of its tenant; its tenant is set, and its session, if any. */
void sched_add(struct sched *s, struct request *r);
/* A request in the background gets a place among the others. */
void sched_hurry(struct sched *s, struct request *r);
/*
 * Takes a request out, wherever it stands, and leaves what it computed to the index. The caller destroys it.
 */
void sched_remove(struct sched *s, struct request *r);
struct request *sched_find(const struct sched *s, uint64_t id);

/*
 * Admits what can be admitted and builds s->batch and s->part[0..batch.n_seqs). False when there is nothing to compute.
 */
bool sched_build(struct sched *s);
/* Who uses pages for a request, now. */
struct kv_use sched_use(const struct sched *s, const struct request *r);
/*
 * A step whose batch has an arrival was computed, as far as possible, and means something if `computed`. False: it does
 * not, since not all it saw is there; its request waits again, and nothing has happened.
 */
bool sched_arrived(struct sched *s, bool computed);
/* A part of moved rows is computed. */
void sched_moved(const struct step_part *part);
/* So many rows of what a request computes again are. */
void recall_computed(struct sched *s, struct request *r, int32_t n_rows);
/* Indexes the full pages that a request has computed; call it when its kv.n_tokens has grown. */
void sched_index(struct sched *s, struct request *r);
/* Its counters and gauges, and those of its index and its pool. */
void sched_describe(const struct sched *s, struct engine_stats *out);
/* Tells how long a step of so many rows took, so that the next ones keep to the time a step may take. */
void sched_measure(struct sched *s, int32_t n_rows, bool has_prompt_rows, int64_t step_ns);
