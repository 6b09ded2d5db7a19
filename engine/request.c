#include "engine/request.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/drift.h"
#include "engine/event.h"
#include "engine/kv/attic.h"

int32_t tokens_common_prefix(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b)
{
	int32_t n = n_a < n_b ? n_a : n_b, i = 0;
	while (i < n && a[i] == b[i])
		i++;
	return i;
}

/* The prompt and the room asked for the answer must fit the context; nothing is ever cut to make them fit. */
static enum status check_length(struct request *r, int32_t n_ctx, struct error *err)
{
	int32_t max_tokens = r->spec->max_tokens;
	if (r->tokens.n == 0)
		return error_set_param(err, STATUS_INVALID, "prompt", "the prompt is empty");
	if (r->tokens.n > (size_t)n_ctx)
		return error_set_param(err, STATUS_CONTEXT_LENGTH, "prompt",
		                       "This model's maximum context length is %" PRId32
		                       " tokens, but the prompt has %zu tokens",
		                       n_ctx, r->tokens.n);
	r->n_prompt = (int32_t)r->tokens.n;
	if (max_tokens > n_ctx - r->n_prompt)
		return error_set_param(err, STATUS_CONTEXT_LENGTH, "max_tokens",
		                       "This model's maximum context length is %" PRId32 " tokens, but %" PRId64
		                       " were requested (%" PRId32 " in the prompt, %" PRId32 " for the answer)",
		                       n_ctx, (int64_t)r->n_prompt + max_tokens, r->n_prompt, max_tokens);
	if (max_tokens < 0 && r->n_prompt == n_ctx)
		return error_set_param(err, STATUS_CONTEXT_LENGTH, "prompt",
		                       "This model's maximum context length is %" PRId32
		                       " tokens, and the prompt takes all %" PRId32
		                       " of them: there is no room for an answer",
		                       n_ctx, r->n_prompt);
	r->max_total = max_tokens < 0 ? n_ctx : r->n_prompt + max_tokens;
	return STATUS_OK;
}

enum status request_create(struct engine_request *spec, struct token_buf *tokens, const struct tokenizer *tokenizer,
                           const struct grammar_vocab *words, int32_t n_ctx, int64_t submitted_ns, struct request **out,
                           struct error *err)
{
	enum status st = STATUS_NOMEM;
	int32_t n_vocab = tokenizer_n_vocab(tokenizer);
	struct request *r = calloc(1, sizeof *r);
	if (!r) {
		engine_request_destroy(spec);
		token_buf_free(tokens);
		return error_set(err, STATUS_NOMEM, "no memory for another request");
	}
	list_init(&r->link);
	kv_fetch_init(&r->fetch);
	r->id = spec->id;
	r->spec = spec;
	r->tokens = *tokens;
	*tokens = (struct token_buf){NULL, 0, 0};
	r->submitted_ns = submitted_ns;
	for (size_t i = 0; i < r->tokens.n; i++) {
		if (r->tokens.ids[i] < 0 || r->tokens.ids[i] >= n_vocab) {
			st = error_set_param(err, STATUS_INVALID, "prompt",
			                     "token id %" PRId32
			                     " at position %zu is outside the vocabulary of %" PRId32,
			                     r->tokens.ids[i], i, n_vocab);
			goto fail;
		}
	}
	st = check_length(r, n_ctx, err);
	if (st != STATUS_OK)
		goto fail;
	st = sampling_params_check(&spec->sampling, n_vocab, err);
	if (st != STATUS_OK)
		goto fail;
	st = error_set(err, STATUS_NOMEM, "no memory for another request");
	r->last = event_create(ENGINE_EVENT_DONE, r->id);
	if (!r->last)
		goto fail;
	if (sampler_create(&spec->sampling, n_vocab, &r->sampler) != STATUS_OK)
		goto fail;
	if (detok_create(tokenizer, spec->stops, spec->n_stops, spec->keep_special, &r->detok) != STATUS_OK)
		goto fail;
	/* A chat's answer is a text of its own; a completion goes on with its prompt's. */
	if (spec->input == ENGINE_INPUT_CHAT)
		detok_drop_first_space(r->detok);
	if (spec->grammar) {
		bool drops = spec->input == ENGINE_INPUT_CHAT && strcmp(tokenizer_model_name(tokenizer), "llama") == 0;
		st = grammar_matcher_create(spec->grammar, words, drops, &r->matcher);
		if (st != STATUS_OK) {
			error_set(err, st,
			          st == STATUS_NOMEM ? "no memory for another request"
			                             : "the answer's schema is too ambiguous");
			goto fail;
		}
		st = STATUS_NOMEM;
	}
	if (spec->want_prompt_logprobs) {
		r->prompt_logprobs = calloc((size_t)r->n_prompt, sizeof *r->prompt_logprobs);
		if (!r->prompt_logprobs)
			goto fail;
	}
	for (int32_t i = 0; i < r->n_prompt; i++)
		sampler_accept(r->sampler, r->tokens.ids[i], false);
	r->usage.prompt_tokens = r->n_prompt;
	*out = r;
	return STATUS_OK;

fail:
	request_destroy(r);
	return st;
}

void request_destroy(struct request *r)
{
	if (!r)
		return;
	engine_event_free(r->last);
	free(r->prompt_logprobs);
	drift_destroy(r->drift);
	recall_free(&r->recall);
	grammar_matcher_destroy(r->matcher);
	detok_destroy(r->detok);
	sampler_destroy(r->sampler);
	token_buf_free(&r->tokens);
	kv_chain_free(&r->chain);
	engine_request_destroy(r->spec);
	free(r);
}

int32_t request_pending(const struct request *r)
{
	return (int32_t)r->tokens.n - r->kv.n_tokens;
}

int32_t request_reach(const struct request *r)
{
	int32_t at = r->kv.n_tokens, pending = request_pending(r), until = kv_policy_next(&r->policy, at) - at;
	struct page_choice choice = request_choice(r);
	if (at < kv_policy_weighs_from(&r->policy) && until > kv_policy_weighs_from(&r->policy) - at)
		until = kv_policy_weighs_from(&r->policy) - at;
	/* Each row of the answer counts once, and by itself. */
	if (request_waits(r) && at < r->trigger.next && until > r->trigger.next - at)
		until = r->trigger.next - at;
	/* What comes back does so at a position of its own, and only the rows in front of that have a say. */
	int32_t next = recall_next(r);
	if (next < INT32_MAX) {
		int32_t from = recall_probes_from(r), stop = at < from ? from : next;
		until = at < stop && until > stop - at ? stop - at : until;
	}
	/* It is asked for often enough whether pages run short. */
	int32_t stretch = r->policy.jump_pages * KV_PAGE_TOKENS;
	if (request_waits(r) && trigger_waits_for_room(&r->trigger) && until > stretch - at % stretch)
		until = stretch - at % stretch;
	/*
	 * Rows choose from pages that are computed, so those of an answer that is computed again go a page at a time.
	 */
	if (choice.n_pages > 0)
		until = at < choice.from ? choice.from - at : KV_PAGE_TOKENS - at % KV_PAGE_TOKENS;
	return pending < until ? pending : until;
}

bool request_waits(const struct request *r)
{
	return r->trigger.fired == ENGINE_TRIGGER_NONE && r->kv.n_tokens < kv_policy_exact_tokens(&r->policy);
}

bool request_looks(const struct request *r)
{
	bool watched = trigger_watches(&r->trigger) && request_waits(r);
	return r->kv.n_tokens >= r->n_prompt && (r->spec->context.diagnostics || watched);
}

int32_t request_exact(const struct request *r)
{
	int32_t n = (int32_t)r->tokens.n, exact = kv_policy_exact_tokens(&r->policy);
	if (r->policy.kind == KV_POLICY_QUEST && exact < r->n_prompt)
		exact = r->n_prompt;
	return n < exact ? n : exact;
}

int32_t request_known(const struct request *r)
{
	int32_t exact = request_exact(r), from = kv_policy_weighs_from(&r->policy);
	return exact < from ? exact : from;
}

struct page_choice request_choice(const struct request *r)
{
	const struct kv_policy *p = &r->policy;
	if (p->kind != KV_POLICY_QUEST)
		return (struct page_choice){0};
	int32_t exact = kv_policy_exact_tokens(p);
	return (struct page_choice){
	        .from = exact > r->n_prompt ? exact : r->n_prompt,
	        .n_pages = p->most_pages,
	        .n_first = p->first_pages,
	        .n_last = p->last_pages,
	};
}

bool request_keeps_page(const struct request *r, int32_t number)
{
	const struct engine_request *q = r->spec;
	int32_t begin = number * KV_PAGE_TOKENS;
	size_t low = 0, high = q->n_turn_starts;
	while (low < high) {
		size_t middle = low + (high - low) / 2;
		if (q->turn_starts[middle] < begin)
			low = middle + 1;
		else
			high = middle;
	}
	return begin < q->system_tokens || (low < q->n_turn_starts && q->turn_starts[low] < begin + KV_PAGE_TOKENS);
}

bool request_is_end_token(const struct request *r, const struct tokenizer *tokenizer, int32_t token,
                          const char **detail)
{
	for (size_t i = 0; i < r->spec->n_stop_tokens; i++) {
		if (r->spec->stop_tokens[i] == token) {
			*detail = "stop_token";
			return true;
		}
	}
	*detail = "eos";
	return (!r->spec->ignore_eos || r->matcher) && tokenizer_is_end(tokenizer, token);
}

struct engine_request *engine_request_create(struct engine *e)
{
	struct engine_request *r = calloc(1, sizeof *r);
	if (!r)
		return NULL;
	r->id = engine_next_id(e);
	r->max_tokens = -1;
	r->context.start_size = -1;
	sampling_params_init(&r->sampling);
	return r;
}

void engine_request_destroy(struct engine_request *r)
{
	if (!r)
		return;
	free(r->text);
	free(r->tokens);
	arena_destroy(r->arena);
	free(r->turn_of);
	free(r->turn_starts);
	free(r->cache_salt);
	grammar_unref(r->grammar);
	free(r->sampling.bias);
	for (size_t i = 0; i < r->n_stops; i++)
		free((char *)r->stops[i].p);
	free(r->stops);
	free(r->stop_tokens);
	free(r);
}

bool engine_request_add_stop(struct engine_request *r, const char *s, size_t n)
{
	struct str *stops = realloc(r->stops, (r->n_stops + 1) * sizeof *stops);
	if (!stops)
		return false;
	r->stops = stops;
	char *copy = malloc(n + 1);
	if (!copy)
		return false;
	memcpy(copy, s, n);
	copy[n] = '\0';
	r->stops[r->n_stops++] = (struct str){copy, n};
	return true;
}
