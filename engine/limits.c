#include "engine/limits.h"

#include <inttypes.h>

enum status limits_session(const struct session *s, int32_t most, struct error *err)
{
	int32_t n = s->n_waiting + (s->running != NULL);
	if (most == 0 || n < most)
		return STATUS_OK;
	s->tenant->refused++;
	return error_set_param(err, STATUS_LIMIT, "session_id",
	                       "session '%s' has %" PRId32
	                       " generations running or waiting, the most that --session-requests (%" PRId32
	                       ") allows; try again later",
	                       s->id, n, most);
}

static enum status apply(struct request *r, int32_t limit, const char *param, const char *whose, struct error *err)
{
	int32_t max_tokens = r->spec->max_tokens, pages = kv_policy_max_pages(&r->policy, r->max_total);
	/* What its policy ever keeps of it counts. */
	if (pages < kv_pages_for(r->max_total) && pages * KV_PAGE_TOKENS <= limit)
		return STATUS_OK;
	if (pages < kv_pages_for(r->max_total) && r->policy.most_pages < INT32_MAX)
		return error_set_param(err, STATUS_CONTEXT_LENGTH, param,
		                       "%s may hold %" PRId32 " tokens at most, but kv_cache asks for %" PRId32, whose,
		                       limit, pages * KV_PAGE_TOKENS);
	if (r->n_prompt > limit || (max_tokens < 0 && r->n_prompt == limit))
		return error_set_param(err, STATUS_CONTEXT_LENGTH, param,
		                       "%s may hold %" PRId32 " tokens at most, but the prompt has %" PRId32 " tokens",
		                       whose, limit, r->n_prompt);
	if (max_tokens > limit - r->n_prompt)
		return error_set_param(err, STATUS_CONTEXT_LENGTH, param,
		                       "%s may hold %" PRId32 " tokens at most, but %" PRId32
		                       " were requested (%" PRId32 " in the prompt, %" PRId32 " for the answer)",
		                       whose, limit, r->max_total, r->n_prompt, max_tokens);
	if (r->max_total > limit)
		r->max_total = limit;
	return STATUS_OK;
}

enum status limits_apply(struct request *r, struct error *err)
{
	enum status st = apply(r, tenant_max_tokens(r->tenant), "kv_memory", "this API key", err);
	if (st == STATUS_OK && r->session && r->session->max_tokens > 0)
		st = apply(r, r->session->max_tokens, "session_id", "this session", err);
	if (st != STATUS_OK)
		r->tenant->refused++;
	return st;
}

int64_t limits_deadline_ns(const struct request *r, int64_t engine_ms)
{
	int64_t ms = r->spec->timeout_ms;
	if (ms == 0 || (engine_ms > 0 && engine_ms < ms))
		ms = engine_ms;
	return ms == 0 || ms > (INT64_MAX - r->submitted_ns) / 1000000 ? INT64_MAX : r->submitted_ns + ms * 1000000;
}
