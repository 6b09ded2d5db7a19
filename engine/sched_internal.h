/* What the two files of the scheduler share: sched.c has the lists, memory, admission and the step, sched_policy.c what
 * context policies do. */
#pragma once

#include "engine/sched.h"

/* Sets a running request back: what it has falls to the index, and it waits again. */
void sched_preempt(struct sched *s, struct request *r, enum engine_room room);
/*
 * A running request lacks a page: one becomes free, at the cost of younger requests if need be, of its tenant's when
 * that has reached its limit (allowed is false), else of anybody's. False when the request itself was the youngest of
 * these and had to go.
 */
bool sched_find_page(struct sched *s, struct request *r, bool allowed);

/*
 * Its policy is set off when it is time for that, and acts where it does; n: positions that the next step may compute.
 * As sched_find_page().
 */
bool sched_act(struct sched *s, struct request *r, int32_t n);
