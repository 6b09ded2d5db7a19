/* What requests ask of context policies, measured against what there is, becomes a policy with sizes in pages. */
#pragma once

#include "engine/engine.h"
#include "engine/kv/policy.h"
#include "engine/trigger.h"

/* What the engine offers. */
struct context_bounds {
	enum kv_policy_kind policy; /* of requests that name none */
	/* of those that give none, and the most that any may ask for; 0: none, and no bound */
	int32_t max_cache_size;
	int32_t pool_pages;
	bool can_score;             /* pages can be weighed: score.h */
	bool can_weigh;             /* by the attention they get: batch_seq.mass */
	bool can_choose;            /* they have bounds: struct page_choice */
	bool can_merge;		    /* they can be merged: merge.h */
	bool can_recall;	    /* they can go to an attic and come back: attic.h */
	int32_t n_ctx_train;        /* as far as rows shall look back */
	bool by_chunks;		    /* pages have to stand in block tables at their positions: struct rope_chunks */
};

/* What the engine offers, with its own policy and size. */
struct context_bounds context_bounds_of(const struct engine_options *o, struct context_bounds offered);
/*
 * INVALID (param kv_cache or a field of it) for a combination that cannot be: the error says what is possible. Sizes
 * are rounded to pages: what has to be kept up, what bounds memory down.
 */
enum status context_resolve(const struct context_bounds *bounds, const struct engine_context *asked,
                            struct kv_policy *out, struct error *err);
/* Whether what is kept has a bound that does not grow with the conversation, so that this need not fit. */
bool context_is_bounded(const struct engine_options *o, const struct engine_context *asked);
/* INVALID when diagnostics are wanted of a device that has none. */
enum status context_check_diagnostics(const struct context_bounds *bounds, const struct engine_context *asked,
                                      struct error *err);
/* Which of the triggers that were given has set the policy off. */
void context_describe_trigger(const struct engine_context *asked, const struct trigger *t,
			      const struct kv_policy *policy, const struct kv_seq *kv,
			      struct engine_context_usage *out);
/* What is left of a sequence under a policy. */
void context_describe(const struct kv_policy *policy, const struct kv_seq *kv, const struct kv_pool *pool,
                      struct engine_context_usage *out);
