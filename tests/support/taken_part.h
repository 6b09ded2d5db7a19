/* What the worker does with a request's part of a step, for tests and benches of the scheduler that have no model. */
#pragma once

#include "engine/sched.h"

/*
 * The part has been computed; `token` is what the request goes on with, if that was the last of its prompt or it
 * decodes, and its answer is not full. True when the answer is full now: the caller ends the request.
 */
static inline bool take_part(struct sched *s, const struct step_part *part, int32_t token)
{
	struct request *r = part->request;
	if (part->moves) {
		sched_moved(part);
		return false;
	}
	if (part->again) {
		recall_computed(s, r, part->n_rows);
		return false;
	}
	r->kv.n_tokens += part->n_rows;
	sched_index(s, r);
	if (request_pending(r) > 0)
		return false;
	r->prompt_done = true;
	if ((int32_t)r->tokens.n < r->max_total) {
		token_buf_add(&r->tokens, token);
		r->state = REQUEST_DECODE;
	}
	return (int32_t)r->tokens.n >= r->max_total;
}
