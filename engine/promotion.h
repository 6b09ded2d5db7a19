/*
 * How what the tiers have of a prompt comes up (kv/tiers.h) for a request that is next in line: beside what others
 * compute, while it waits; or, when nobody computes anything, beside its own first step, which it then has to itself.
 *
 * Such a step may have to wait for a layer. It does so for WAIT_MS in all: until then nobody else is looked at. After
 * that, or when a page turns out to be damaged, the step is given up, and the request waits for its pages, or computes
 * them, like any other.
 *
 * Part of the scheduler, and of its thread.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct request;
struct sched;

/* True while pages of its prompt are on their way from the tiers, for it or for another that begins alike. */
bool promotion_awaited(struct sched *s, struct request *r);
/* What is on its way for those that nobody looks at, since others wait before them, is moved on as well. */
void promotion_advance(struct sched *s);
/*
 * Whether r may begin although pages of it are on their way: nothing else runs, and the first layers of them are there.
 */
bool promotion_may_begin(const struct sched *s, const struct request *r);
/*
 * It is being admitted: its kv, charged to its tenant, gets the pages that are coming, and has no more than `most`
 * tokens. When that is impossible its pages stop coming, and it has what is there.
 */
void promotion_begin(struct sched *s, struct request *r, int32_t most);
/* The pages of a request that has begun leave it; they come on, for a request that waits. Nothing for another. */
void promotion_retreat(struct sched *s, struct request *r);
/* The step under construction waits for the pages of r, which is alone in it. */
void promotion_announce(struct sched *s, struct request *r);
/* The step has been computed: waits for what the last layers left out. False: it is to be given up. */
bool promotion_complete(struct sched *s);
