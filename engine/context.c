#include "engine/context.h"

#include <inttypes.h>

enum { DEFAULT_START_TOKENS = 4 };
_Static_assert((int)KV_POLICIES <= (int)ENGINE_MAX_CONTEXT_POLICIES, "engine_stats counts by policy");

static int64_t rounded_up(int32_t tokens)
{
	return (int64_t)kv_pages_for(tokens) * KV_PAGE_TOKENS;
}

/* Whether a policy that has no use for it was given one of its sizes. */
static enum status no_sizes(const struct engine_context *asked, const char *policy, struct error *err)
{
	const char *param = asked->start_size >= 0       ? "kv_cache.start_size"
	                    : asked->recent_size > 0     ? "kv_cache.recent_size"
	                    : asked->max_cache_size > 0  ? "kv_cache.max_cache_size"
	                    : asked->trigger_tokens > 0  ? "kv_cache.trigger"
	                                                 : NULL;
	if (!param)
		return STATUS_OK;
	return error_set_param(err, STATUS_INVALID, param, "%s has no meaning with the policy \"%s\", which keeps everything; name another, or leave it out",
	                       param, policy);
}

/* Sinks and a window, in tokens of whole pages; 0 where a default is to be found. */
static enum status streaming(const struct context_bounds *bounds, const struct engine_context *asked, struct kv_policy *out, struct error *err)
{
	int64_t start = rounded_up(asked->start_size < 0 ? DEFAULT_START_TOKENS : asked->start_size), recent = rounded_up(asked->recent_size);
	int32_t most = asked->max_cache_size;
	const int32_t least = KV_POLICY_MIN_WINDOW * KV_PAGE_TOKENS;
	if (most == 0 && recent == 0)
		most = bounds->max_cache_size;
	if (most == 0 && recent == 0)
		return error_set_param(err, STATUS_INVALID, "kv_cache.max_cache_size",
		                       "the policy \"streaming\" needs max_cache_size or recent_size: how many tokens to keep");
	most -= most % KV_PAGE_TOKENS;
	if (asked->recent_size > 0 && asked->recent_size < least)
		return error_set_param(err, STATUS_INVALID, "kv_cache.recent_size", "kv_cache.recent_size is %" PRId32 ", but a window has %" PRId32 " tokens at least",
		                       asked->recent_size, least);
	if (recent == 0 && most < start + least)
		return error_set_param(err, STATUS_INVALID, "kv_cache.max_cache_size",
		                       "kv_cache.max_cache_size is %" PRId32 ", but it takes %" PRId64 " at least: %" PRId64
		                       " for start_size and %" PRId32 " for the shortest window",
		                       asked->max_cache_size ? asked->max_cache_size : most, start + least, start, least);
	if (recent > 0 && most > 0 && start + recent > most)
		return error_set_param(err, STATUS_INVALID, "kv_cache.recent_size",
		                       "start_size and recent_size come to %" PRId64 " and %" PRId64 " tokens in whole pages of %d, more than the max_cache_size of %" PRId32,
		                       start, recent, KV_PAGE_TOKENS, asked->max_cache_size);
	if (recent == 0)
		recent = most - start;
	int64_t kept = start + recent, acts = asked->trigger_tokens > 0 ? rounded_up(asked->trigger_tokens) : kept;
	if (acts < kept)
		return error_set_param(err, STATUS_INVALID, "kv_cache.trigger.tokens",
		                       "kv_cache.trigger.tokens is %" PRId32 ", less than the %" PRId64 " tokens that are kept", asked->trigger_tokens, kept);
	if (bounds->max_cache_size > 0 && acts > bounds->max_cache_size)
		return error_set_param(err, STATUS_INVALID, acts > kept ? "kv_cache.trigger.tokens" : "kv_cache.max_cache_size",
		                       "up to %" PRId64 " tokens would be kept, more than the %" PRId32 " that this server allows (--max-cache-size)", acts,
		                       bounds->max_cache_size);
	if (acts / KV_PAGE_TOKENS > bounds->pool_pages)
		return error_set_param(err, STATUS_INVALID, acts > kept ? "kv_cache.trigger.tokens" : "kv_cache.max_cache_size",
		                       "up to %" PRId64 " tokens would be kept, more than the %" PRId64 " that the KV cache holds", acts,
		                       (int64_t)bounds->pool_pages * KV_PAGE_TOKENS);
	*out = kv_policy_streaming((int32_t)(start / KV_PAGE_TOKENS), (int32_t)(recent / KV_PAGE_TOKENS), (int32_t)(acts / KV_PAGE_TOKENS));
	return STATUS_OK;
}

enum status context_resolve(const struct context_bounds *bounds, const struct engine_context *asked, struct kv_policy *out, struct error *err)
{
	enum kv_policy_kind kind = bounds->policy;
	*out = (struct kv_policy){.kind = KV_POLICY_FULL};
	if (asked->policy && !kv_policy_find(asked->policy, &kind))
		return error_set_param(err, STATUS_INVALID, "kv_cache.policy", "there is no context policy \"%.32s\"", asked->policy);
	if (kind == KV_POLICY_FULL)
		return no_sizes(asked, kv_policy_name(kind), err);
	return streaming(bounds, asked, out, err);
}

void context_describe(const struct kv_policy *policy, const struct kv_seq *kv, size_t page_bytes, struct engine_context_usage *out)
{
	*out = (struct engine_context_usage){
	        .policy = kv_policy_name(policy->kind),
	        .tokens_logical = kv->n_tokens,
	        .tokens_resident = kv_seq_places(kv),
	        .evicted_tokens = kv->n_tokens - kv_seq_places(kv),
	        .pages = kv_pages_for(kv_seq_places(kv)),
	};
	out->bytes = (uint64_t)out->pages * page_bytes;
}

const char *engine_context_policy(size_t i)
{
	return i < KV_POLICIES ? kv_policy_name((enum kv_policy_kind)i) : NULL;
}
