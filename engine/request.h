/*
 * One generation as the worker sees it: the prompt and the answer so far, the KV computed for them, and where it
 * stands. Owned by the worker thread from arrival to its terminal event.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"
#include "engine/kv/overflow.h"
#include "engine/kv/policy.h"
#include "engine/kv/prefix.h"
#include "engine/kv/seq.h"
#include "engine/kv/tiers.h"
#include "engine/recall.h"
#include "engine/sample/sampler.h"
#include "engine/text/detok.h"
#include "engine/text/grammar_match.h"
#include "engine/text/tokenizer.h"
#include "engine/trigger.h"

struct session;
struct tenant;

enum request_state {
	REQUEST_WAITING, /* its kv holds what the prefix index knew of it, unless memory is short */
	REQUEST_PREFILL, /* positions of known tokens are still to be computed */
	REQUEST_DECODE,  /* all but the newest token are computed */
	REQUEST_ENDED,
};

struct request {
	struct list link;         /* in the scheduler's waiting or running list */
	uint64_t id;
	uint64_t order;           /* of arrival; the youngest is preempted first */
	enum request_state state;
	struct engine_request *spec;
	struct session *session;  /* NULL: none */
	struct tenant *tenant;    /* whose it is; its kv is charged to it while it runs */
	bool background;          /* nobody waits for it, so far */
	uint64_t turn;            /* its place in the queue among those of all tenants */

	struct token_buf tokens;  /* the prompt, then the answer */
	int32_t n_prompt;
	int32_t max_total;        /* the answer ends when tokens.n reaches this */
	struct kv_seq kv;         /* kv.n_tokens positions of `tokens` are computed */
	struct kv_spill spill;    /* pages in front of kv that are not in the pool */
	bool is_large;            /* it runs, and has more tokens than the pool holds */
	struct kv_policy policy;  /* which pages of kv stay when it grows long */
	struct trigger trigger;	  /* and what sets that off, beside a number of tokens */
	struct kv_chain chain;    /* of tokens: what its pages are indexed under */
	struct kv_fetch fetch;    /* pages that come from the tiers; under way while it waits */
	bool fetched;             /* the tiers have been asked */
	bool begun;               /* once, before its fetch was over: see promotion.h */
	/* of its first pages, positions that are still to be computed where they have moved to, ... */
	int32_t n_moving;
	int32_t n_moving_now;     /* ... and how many of them are in the step under construction */
	struct recall recall;     /* what comes back to its window */
	struct drift *drift;      /* NULL: not wanted */
	struct attention_look
		look; /* of the rows of the answer, where diagnostics are wanted or a trigger watches them */
	int32_t n_indexed;        /* leading pages of kv that the prefix index knows */
	uint64_t awaits_id;       /* a running request that computes part of this prompt; 0: none */
	int32_t awaits_tokens;    /* how much of it */
	struct sampler *sampler;
	struct detok *detok;
	struct grammar_matcher *matcher; /* NULL: the answer is free */
	bool prompt_done;         /* the PROMPT event is out */
	bool completed;           /* its answer came to its own end: it was not cancelled and did not fail */
	bool admitted_before;     /* a step has seen it: queue time has been taken */
	struct sample_result *prompt_logprobs; /* [n_prompt] when wanted */

	struct engine_usage usage;
	int64_t submitted_ns, started_ns, first_token_ns;
	int64_t deadline_ns;      /* when it has to have ended; INT64_MAX: whenever it does */
	struct engine_event *last; /* the terminal event, made at arrival so that it cannot fail */
};

/*
 * Makes a request from its parts; takes ownership of spec and of *tokens (which is then empty), also on failure.
 * NOMEM; INVALID and CONTEXT_LENGTH as the parameters say.
 */
enum status request_create(struct engine_request *spec, struct token_buf *tokens, const struct tokenizer *tokenizer,
                           const struct grammar_vocab *words, int32_t n_ctx, int64_t submitted_ns, struct request **out,
                           struct error *err);
/* The pages must have been given back. The terminal event is freed if it was not sent. NULL is allowed. */
void request_destroy(struct request *r);

/* Positions that a step could compute now: the rest of the prompt, or 1 for the newest token. */
int32_t request_pending(const struct request *r);
/* Of what is pending, how much can be computed before the policy acts next. */
int32_t request_reach(const struct request *r);
/* How many of its tokens, from the first on, have the KV that the index knows. */
int32_t request_exact(const struct request *r);
/* And how many of them may be taken from there: not those whose rows have to be seen for what they give to others. */
int32_t request_known(const struct request *r);
/* Whether its policy has not acted yet, and may be set off on the way. */
bool request_waits(const struct request *r);
/* Whether the rows at its next positions are looked at. */
bool request_looks(const struct request *r);
/* Which of its rows do not read all they see. */
struct page_choice request_choice(const struct request *r);
/* Whether page `number` of the conversation has a turn's beginning or part of the system message. */
bool request_keeps_page(const struct request *r, int32_t number);
/* True when this token ends the answer; *detail says why. */
bool request_is_end_token(const struct request *r, const struct tokenizer *tokenizer, int32_t token,
                          const char **detail);

/* Length of the common beginning of two token sequences. */
int32_t tokens_common_prefix(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b);
