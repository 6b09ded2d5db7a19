/*
 * What the files of the scheduler share: sched.c has the lists, memory and admission, sched_step.c what the next step
 * computes, sched_policy.c what context policies do, sched_recall.c what comes back to a window.
 */
#pragma once

#include "engine/sched.h"

/* The request that an element of s->waiting or s->running belongs to. */
static inline struct request *sched_entry(struct list *l)
{
	return list_entry(l, struct request, link);
}

/* Admits those that wait, as far as there is room. */
void sched_admit(struct sched *s);
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

/*
 * Makes the next n positions of a running request's sequence, its own or one beside it, writable. As sched_find_page().
 */
bool sched_make_room(struct sched *s, struct request *r, struct kv_seq *kv, int32_t n);
/* Takes a page for a running request, whose holder gets the reference. As sched_find_page(). */
bool sched_take_page(struct sched *s, struct request *r, int32_t *page);
/*
 * Pages of a large request leave the pool until it has no more there than it may, its next rows among them. False when
 * there is no more room below, for one that came to more than was reserved for it. When copying fails it is lost
 * (struct kv_spill), and stays as it is.
 */
bool sched_make_way(struct sched *s, struct request *r);
/* ---- sched_recall.c ---- */

/* At its position, what its attic has may be scored and chosen from. As sched_find_page(). */
bool recall_act(struct sched *s, struct request *r);
/*
 * While pages are computed again its own rows wait, and this sequence has rows: its policy acts on it, and there is
 * room for what recall_reach() says. As sched_find_page().
 */
bool recall_go_on(struct sched *s, struct request *r);
int32_t recall_reach(const struct request *r);
/* It gives up what it computes again, if anything. */
void recall_stop(struct sched *s, struct request *r);
/* It begins anew. */
void recall_reset(struct request *r);

/* What the next step may compute of a request. */
int32_t sched_reach(const struct sched *s, const struct request *r);
