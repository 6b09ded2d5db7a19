/*
 * What sets a context policy off, beside a number of tokens: that the pool runs short of pages, or that the answer
 * attends to little of what there is. Until then all is kept and exact. Where it acts is then fixed for good
 * (kv_policy_fire()), so that a request that is set back and computed again comes to the same.
 *
 * Short of pages is what depends on the other requests, and so the same request may have another answer. Attention is a
 * matter of the request alone: the entropy of the weights of each token of its answer, a mean over layers and heads in
 * integers (struct attention_look), and of these the mean over the latest TRIGGER_WINDOW. Each token counts once, when
 * it is computed first.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/engine.h"

enum { TRIGGER_WINDOW = 32 };

struct trigger {
	int32_t free_pages; /* fires when fewer could be had; 0: whatever could */
	uint64_t entropy;   /* fires when the mean is below, in units of 2^-KV_MASS_BITS nats; 0: however it attends */
	enum engine_trigger fired;
	int32_t fired_at;		    /* tokens that were computed then */
	int32_t next;			    /* the first position that has not counted yet */
	uint32_t n_seen;		    /* tokens that have counted */
	uint64_t sum, seen[TRIGGER_WINDOW]; /* of the latest of them */
	struct attention_look before;	    /* what the request's look came to */
};

/* The part of a request that is about it: entropy in nats. */
struct trigger trigger_of(const struct engine_context *asked);
/* Whether it may still fire for want of pages, or by entropy. */
bool trigger_waits_for_room(const struct trigger *t);
bool trigger_watches(const struct trigger *t);
/* Whether `a` is what `b` waits for: a turn that goes on from where `a` fired need not wait. */
bool trigger_same(const struct trigger *a, const struct trigger *b);
/* Fires, unless it has; whether it did. */
bool trigger_fire(struct trigger *t, enum engine_trigger why, int32_t n_tokens);
/*
 * The row at `position` of an answer has been computed, after which the request's look came to this; whether it fires.
 */
bool trigger_saw(struct trigger *t, int32_t position, const struct attention_look *look);
/* Looks begin anew. */
void trigger_reset_look(struct trigger *t);
