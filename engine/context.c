#include "engine/context.h"

#include <inttypes.h>
#include <string.h>

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
	                    : asked->by_share ? "kv_cache.cache_length_shrink_ratio"
	                    : asked->by_age              ? "kv_cache.aggregation"
	                    : asked->trigger_tokens > 0  ? "kv_cache.trigger"
	                                                 : NULL;
	if (!param)
		return STATUS_OK;
	return error_set_param(err, STATUS_INVALID, param, "%s has no meaning with the policy \"%s\", which keeps everything; name another, or leave it out",
	                       param, policy);
}

/* `least` tokens are kept when it acts, and all up to `acts`. */
static enum status check_trigger(const struct context_bounds *bounds, const struct engine_context *asked, int64_t least, int64_t acts,
                                 struct error *err)
{
	const char *param = acts > least ? "kv_cache.trigger.tokens" : "kv_cache.max_cache_size";
	if (acts < least)
		return error_set_param(err, STATUS_INVALID, "kv_cache.trigger.tokens",
		                       "kv_cache.trigger.tokens is %" PRId32 ", less than the %" PRId64 " tokens that are kept", asked->trigger_tokens, least);
	if (bounds->max_cache_size > 0 && acts > bounds->max_cache_size)
		return error_set_param(err, STATUS_INVALID, param, "up to %" PRId64 " tokens would be kept, more than the %" PRId32
		                       " that this server allows (--max-cache-size)", acts, bounds->max_cache_size);
	if (acts / KV_PAGE_TOKENS > bounds->pool_pages)
		return error_set_param(err, STATUS_INVALID, param, "up to %" PRId64 " tokens would be kept, more than the %" PRId64 " that the KV cache holds",
		                       acts, (int64_t)bounds->pool_pages * KV_PAGE_TOKENS);
	return STATUS_OK;
}

/* Sinks and a window, in tokens of whole pages; 0 where a default is to be found. */
static enum status streaming(const struct context_bounds *bounds, const struct engine_context *asked, struct kv_policy *out, struct error *err)
{
	int64_t start = rounded_up(asked->start_size < 0 ? DEFAULT_START_TOKENS : asked->start_size), recent = rounded_up(asked->recent_size);
	int32_t most = asked->max_cache_size;
	const int32_t least = KV_POLICY_MIN_WINDOW * KV_PAGE_TOKENS;
	if (asked->by_share || asked->by_age)
		return error_set_param(err, STATUS_INVALID, asked->by_age ? "kv_cache.aggregation" : "kv_cache.cache_length_shrink_ratio",
		                       "the policy \"streaming\" keeps the latest tokens and chooses none; \"evict\" does");
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
	enum status status = check_trigger(bounds, asked, kept, acts, err);
	if (status != STATUS_OK)
		return status;
	*out = kv_policy_streaming((int32_t)(start / KV_PAGE_TOKENS), (int32_t)(recent / KV_PAGE_TOKENS), (int32_t)(acts / KV_PAGE_TOKENS));
	return STATUS_OK;
}

/* Sinks, the latest pages, and a choice of those between; sizes in pages. */
static enum status evict(const struct context_bounds *bounds, const struct engine_context *asked, struct kv_policy *out, struct error *err)
{
	enum { RECENT = 8, JUMP = 8 };
	int32_t tokens = asked->max_cache_size > 0 ? asked->max_cache_size : bounds->max_cache_size;
	int32_t most = tokens > 0 ? tokens / KV_PAGE_TOKENS : INT32_MAX, jump = most == INT32_MAX ? JUMP : most < 8 ? 1 : most / 8;
	int32_t first = kv_pages_for(asked->start_size < 0 ? DEFAULT_START_TOKENS : asked->start_size), last = kv_pages_for(asked->recent_size);
	int32_t permille = asked->by_share ? asked->shrink_permille : 0;
	if (most == INT32_MAX && !asked->by_share)
		return error_set_param(err, STATUS_INVALID, "kv_cache.max_cache_size",
		                       "the policy \"evict\" needs max_cache_size or cache_length_shrink_ratio: how much to keep");
	if (last == 0)
		last = most / 2 < RECENT ? most / 2 : RECENT;
	if (last < KV_POLICY_MIN_WINDOW || (int64_t)first + last + jump >= most)
		return error_set_param(err, STATUS_INVALID, tokens > 0 ? "kv_cache.max_cache_size" : "kv_cache.recent_size",
		                       "start_size and recent_size come to %" PRId64 " and %" PRId64 " tokens in whole pages of %d; the latter is %d at least, and "
		                       "max_cache_size has to be more than both and an eighth of it to grow in: it is %" PRId32,
		                       (int64_t)first * KV_PAGE_TOKENS, (int64_t)last * KV_PAGE_TOKENS, KV_PAGE_TOKENS,
		                       KV_POLICY_MIN_WINDOW * KV_PAGE_TOKENS, tokens);
	if (!asked->by_age && !bounds->can_score)
		return error_set_param(err, STATUS_INVALID, "kv_cache.aggregation",
		                       "the KV of this server cannot be weighed, since it is narrow or of a device that keeps its order to itself: \"recency\" is possible");
	int64_t least = permille > 0 ? (int64_t)first + last + jump : most, acts = asked->trigger_tokens > 0 ? kv_pages_for(asked->trigger_tokens) : least;
	/* Nothing is ever let go of. */
	if (most == INT32_MAX && permille == 0) {
		*out = kv_policy_evict(first, last, most, 0, INT32_MAX, jump);
		return STATUS_OK;
	}
	enum status status = check_trigger(bounds, asked, least * KV_PAGE_TOKENS, acts * KV_PAGE_TOKENS, err);
	if (status != STATUS_OK)
		return status;
	*out = kv_policy_evict(first, last, most, permille, (int32_t)acts, jump);
	out->by_age = asked->by_age;
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
	return kind == KV_POLICY_EVICT ? evict(bounds, asked, out, err) : streaming(bounds, asked, out, err);
}

struct context_bounds context_bounds_of(const struct engine_options *o, int32_t pool_pages, bool can_score)
{
	struct context_bounds b = {KV_POLICY_FULL, o->max_cache_size, pool_pages, can_score};
	kv_policy_find(o->context_policy, &b.policy);
	return b;
}

bool context_is_bounded(const struct engine_options *o, const struct engine_context *asked)
{
	const char *policy = asked->policy ? asked->policy : o->context_policy;
	if (strcmp(policy, kv_policy_name(KV_POLICY_FULL)) == 0)
		return false;
	return strcmp(policy, kv_policy_name(KV_POLICY_EVICT)) != 0 || asked->max_cache_size > 0 || o->max_cache_size > 0;
}

void context_describe(const struct kv_policy *policy, const struct kv_seq *kv, const struct kv_pool *pool, struct engine_context_usage *out)
{
	*out = (struct engine_context_usage){
	        .policy = kv_policy_name(policy->kind),
	        .tokens_logical = kv->n_tokens,
	        .tokens_resident = kv_seq_places(kv),
	        .evicted_tokens = kv->n_tokens - kv_seq_places(kv),
	        .pages = kv_pages_for(kv_seq_places(kv)),
	};
	out->bytes = (uint64_t)out->pages * kv_pool_layout(pool)->page_stride;
	for (int32_t i = kv->n_gone; i < kv->n_pages; i++)
		out->fallback_pages += kv_pool_fell_back(pool, kv->pages[i]);
}

const char *engine_context_policy(size_t i)
{
	return i < KV_POLICIES ? kv_policy_name((enum kv_policy_kind)i) : NULL;
}
