#include "engine/context.h"

#include <inttypes.h>
#include <string.h>

#include "engine/kv/attic.h"
#include "engine/kv/merge.h"

enum { DEFAULT_START_TOKENS = 4, EVERY_TOKENS = 16 };
_Static_assert((int)KV_POLICIES <= (int)ENGINE_MAX_CONTEXT_POLICIES, "engine_stats counts by policy");

static int64_t rounded_up(int32_t tokens)
{
	return (int64_t)kv_pages_for(tokens) * KV_PAGE_TOKENS;
}

/* Whether it is left open how many tokens there are when the policy acts. */
static bool is_open(const struct engine_context *asked)
{
	return asked->trigger_free_pages > 0 || asked->trigger_entropy > 0;
}

static bool has_trigger(const struct engine_context *asked)
{
	return asked->trigger_tokens > 0 || is_open(asked);
}

/* Whether a policy that has no use for it was given one of its sizes. */
static enum status no_sizes(const struct engine_context *asked, const char *policy, struct error *err)
{
	const char *param = asked->start_size >= 0	      ? "kv_cache.start_size"
			    : asked->recent_size > 0	      ? "kv_cache.recent_size"
			    : asked->max_cache_size > 0	      ? "kv_cache.max_cache_size"
			    : asked->by_share		      ? "kv_cache.cache_length_shrink_ratio"
			    : asked->by_age || asked->by_mass ? "kv_cache.aggregation"
			    : has_trigger(asked)	      ? "kv_cache.trigger"
							      : NULL;
	if (!param)
		return STATUS_OK;
	return error_set_param(
		err, STATUS_INVALID, param,
		"%s has no meaning with the policy \"%s\", which keeps everything; name another, or leave it out",
		param, policy);
}

/* `least` tokens are kept when it acts, and all up to `acts`. */
static enum status check_trigger(const struct context_bounds *bounds, const struct engine_context *asked, int64_t least,
                                 int64_t acts, struct error *err)
{
	const char *param = acts > least ? "kv_cache.trigger.tokens" : "kv_cache.max_cache_size";
	if (acts < least)
		return error_set_param(err, STATUS_INVALID, "kv_cache.trigger.tokens",
		                       "kv_cache.trigger.tokens is %" PRId32 ", less than the %" PRId64
		                       " tokens that are kept",
		                       asked->trigger_tokens, least);
	if (bounds->max_cache_size > 0 && is_open(asked) && asked->trigger_tokens == 0)
		return error_set_param(err, STATUS_INVALID, "kv_cache.trigger",
				       "kv_cache.trigger needs \"tokens\" as well, since this server keeps %" PRId32
				       " tokens at most (--max-cache-size)",
				       bounds->max_cache_size);
	if (bounds->max_cache_size > 0 && acts > bounds->max_cache_size)
		return error_set_param(err, STATUS_INVALID, param,
		                       "up to %" PRId64 " tokens would be kept, more than the %" PRId32
		                       " that this server allows (--max-cache-size)",
		                       acts, bounds->max_cache_size);
	if (acts / KV_PAGE_TOKENS > bounds->pool_pages)
		return error_set_param(err, STATUS_INVALID, param,
		                       "up to %" PRId64 " tokens would be kept, more than the %" PRId64
		                       " that the KV cache holds",
		                       acts, (int64_t)bounds->pool_pages * KV_PAGE_TOKENS);
	return STATUS_OK;
}

/*
 * Triggers that no number of tokens is. jump: pages whose rows are looked at before the policy acts, for what pages are
 * worth to them.
 */
static enum status check_open_triggers(const struct context_bounds *bounds, const struct engine_context *asked,
				       enum kv_policy_kind kind, int32_t jump, struct error *err)
{
	if (asked->trigger_entropy > 0 && !bounds->can_weigh)
		return error_set_param(err, STATUS_INVALID, "kv_cache.trigger.entropy",
				       "the device of this server does not tell how its rows attend: %s possible",
				       kind == KV_POLICY_QUEST ? "\"tokens\" is" : "\"tokens\" and \"free_pages\" are");
	if (asked->trigger_free_pages == 0)
		return STATUS_OK;
	if (kind == KV_POLICY_QUEST)
		return error_set_param(err, STATUS_INVALID, "kv_cache.trigger.free_pages",
				       "the policy \"quest\" keeps all pages, however few are free: \"tokens\" and "
				       "\"entropy\" are possible");
	if (asked->trigger_free_pages >= bounds->pool_pages)
		return error_set_param(err, STATUS_INVALID, "kv_cache.trigger.free_pages",
				       "kv_cache.trigger.free_pages is %" PRId32
				       ", but it has to be less than the %" PRId32 " pages of the KV cache",
				       asked->trigger_free_pages, bounds->pool_pages);
	if (asked->by_mass && asked->trigger_free_pages <= jump)
		return error_set_param(err, STATUS_INVALID, "kv_cache.trigger.free_pages",
				       "kv_cache.trigger.free_pages is %" PRId32
				       ", but \"attention_mass\" takes more than %" PRId32
				       ", the pages whose tokens it looks at before it lets go of any",
				       asked->trigger_free_pages, jump);
	return STATUS_OK;
}

/* Of a policy that keeps `least` pages when it acts: how many there are when it first does. */
static int32_t acts_pages(const struct engine_context *asked, int64_t least)
{
	return asked->trigger_tokens > 0 ? kv_pages_for(asked->trigger_tokens)
	       : is_open(asked)		 ? INT32_MAX
					 : (int32_t)least;
}

/* Sinks and a window, in tokens of whole pages; 0 where a default is to be found. */
static enum status streaming(const struct context_bounds *bounds, const struct engine_context *asked,
                             struct kv_policy *out, struct error *err)
{
	int64_t start = rounded_up(asked->start_size < 0 ? DEFAULT_START_TOKENS : asked->start_size),
		recent = rounded_up(asked->recent_size);
	int32_t most = asked->max_cache_size;
	const int32_t least = KV_POLICY_MIN_WINDOW * KV_PAGE_TOKENS;
	if (asked->by_share || asked->by_age || asked->by_mass)
		return error_set_param(
			err, STATUS_INVALID,
			asked->by_share ? "kv_cache.cache_length_shrink_ratio" : "kv_cache.aggregation",
			"the policy \"streaming\" keeps the latest tokens and chooses none; \"evict\" does");
	if (most == 0 && recent == 0)
		most = bounds->max_cache_size;
	if (most == 0 && recent == 0)
		return error_set_param(
			err, STATUS_INVALID, "kv_cache.max_cache_size",
			"the policy \"streaming\" needs max_cache_size or recent_size: how many tokens to keep");
	most -= most % KV_PAGE_TOKENS;
	if (asked->recent_size > 0 && asked->recent_size < least)
		return error_set_param(err, STATUS_INVALID, "kv_cache.recent_size",
		                       "kv_cache.recent_size is %" PRId32 ", but a window has %" PRId32
		                       " tokens at least",
		                       asked->recent_size, least);
	const int32_t spare = asked->page_in ? KV_PAGE_TOKENS : 0; /* for what comes back, at least */
	if (recent == 0 && most < start + least + spare)
		return error_set_param(err, STATUS_INVALID, "kv_cache.max_cache_size",
				       "kv_cache.max_cache_size is %" PRId32 ", but it takes %" PRId64
				       " at least: %" PRId64 " for start_size and %" PRId32 " for the shortest window",
				       asked->max_cache_size ? asked->max_cache_size : most, start + least + spare,
				       start, least + spare);
	if (recent > 0 && most > 0 && start + recent + spare > most)
		return error_set_param(err, STATUS_INVALID, "kv_cache.recent_size",
		                       "start_size and recent_size come to %" PRId64 " and %" PRId64
		                       " tokens in whole pages of %d, more than the max_cache_size of %" PRId32,
		                       start, recent, KV_PAGE_TOKENS, asked->max_cache_size);
	/* Of what is kept beside the first tokens, a quarter is for those that come back, where it is not said. */
	int64_t back = 0, rest = recent > 0 ? recent : most - start;
	if (asked->page_in && recent > 0 && most > 0)
		back = (most - start - recent) / KV_PAGE_TOKENS;
	else if (asked->page_in)
		back = rest / KV_PAGE_TOKENS / 4 > 1 ? rest / KV_PAGE_TOKENS / 4 : 1;
	if (recent == 0)
		recent = rest - back * KV_PAGE_TOKENS;
	int64_t kept = start + recent, all = kept + back * KV_PAGE_TOKENS, acts = rounded_up(asked->trigger_tokens);
	enum status status = check_trigger(bounds, asked, acts > 0 ? kept : all,
					   acts > all || (acts > 0 && acts < kept) ? acts : all, err);
	if (status == STATUS_OK)
		status = check_open_triggers(bounds, asked, KV_POLICY_STREAMING, 0, err);
	if (status != STATUS_OK)
		return status;
	*out = kv_policy_streaming((int32_t)(start / KV_PAGE_TOKENS), (int32_t)(recent / KV_PAGE_TOKENS),
				   acts_pages(asked, kept / KV_PAGE_TOKENS));
	/* Where what is kept takes all of it, positions go on as they do without a policy. */
	kv_policy_keep_within(out, bounds->n_ctx_train);
	out->trained_tokens = is_open(asked) || back > 0 ? bounds->n_ctx_train : 0;
	out->back_pages = (int32_t)back;
	out->choose_tokens = asked->recall_every > 0 ? asked->recall_every : asked->recall_every < 0 ? 0 : EVERY_TOKENS;
	out->again_tokens = asked->recompute_tokens > 0   ? asked->recompute_tokens
			    : asked->recompute_tokens < 0 ? 0
							  : (int32_t)all;
	return STATUS_OK;
}

/* What pages are worth to "evict": which ways there are of weighing them. */
static enum status check_aggregation(const struct context_bounds *bounds, const struct engine_context *asked,
				     struct error *err)
{
	if (asked->by_mass && !bounds->can_weigh)
		return error_set_param(
			err, STATUS_INVALID, "kv_cache.aggregation",
			"the device of this server does not tell what attention gives to pages: %s possible",
			bounds->can_score ? "\"norm_ratio\" and \"recency\" are" : "\"recency\" is");
	if (!asked->by_age && !asked->by_mass && !bounds->can_score)
		return error_set_param(err, STATUS_INVALID, "kv_cache.aggregation",
				       "the KV of this server cannot be weighed, since it is narrow or of a device "
				       "that keeps its order to itself: %s possible",
				       bounds->can_weigh ? "\"attention_mass\" and \"recency\" are" : "\"recency\" is");
	return STATUS_OK;
}

static enum status check_merge(const struct context_bounds *bounds, const struct engine_context *asked,
			       struct error *err)
{
	if (asked->by_age || asked->by_mass)
		return error_set_param(err, STATUS_INVALID, "kv_cache.aggregation",
				       "the policy \"merge\" joins tokens whose keys are alike, whatever they are "
				       "worth; \"evict\" has use for that");
	if (!bounds->can_merge)
		return error_set_param(err, STATUS_INVALID, "kv_cache.policy",
				       "the policy \"merge\" needs KV in f16 or bf16 (--kv-dtype), on a CPU: \"evict\" "
				       "and \"streaming\" are possible");
	return STATUS_OK;
}

/* Sinks, the latest pages, and a choice of those between, or fewer into which they are merged; sizes in pages. */
static enum status evict_or_merge(const struct context_bounds *bounds, const struct engine_context *asked,
				  enum kv_policy_kind kind, struct kv_policy *out, struct error *err)
{
	enum { RECENT = 8, JUMP = 8 };
	int32_t tokens = asked->max_cache_size > 0 ? asked->max_cache_size : bounds->max_cache_size;
	int32_t most = tokens > 0 ? tokens / KV_PAGE_TOKENS : INT32_MAX;
	int32_t jump = most == INT32_MAX ? JUMP : most < 8 ? 1 : most / 8;
	int32_t first = kv_pages_for(asked->start_size < 0 ? DEFAULT_START_TOKENS : asked->start_size),
		last = kv_pages_for(asked->recent_size);
	int32_t permille = asked->by_share ? asked->shrink_permille : 0;
	if (most == INT32_MAX && !asked->by_share)
		return error_set_param(
			err, STATUS_INVALID, "kv_cache.max_cache_size",
			"the policy \"%s\" needs max_cache_size or cache_length_shrink_ratio: how much to keep",
			kv_policy_name(kind));
	/*
	 * What is merged says little of what comes next: less of it, and more of the latest, was measured to be better.
	 */
	if (last == 0 && kind == KV_POLICY_MERGE && most < INT32_MAX) {
		last = most - most / 4;
		last = last < most - first - jump - 1 ? last : most - first - jump - 1;
	}
	if (last == 0)
		last = most / 2 < RECENT ? most / 2 : RECENT;
	if (last < KV_POLICY_MIN_WINDOW || (int64_t)first + last + jump >= most)
		return error_set_param(
			err, STATUS_INVALID, tokens > 0 ? "kv_cache.max_cache_size" : "kv_cache.recent_size",
			"start_size and recent_size come to %" PRId64 " and %" PRId64
			" tokens in whole pages of %d; the latter is %d at least, and "
			"max_cache_size has to be more than both and an eighth of it to grow in: it is %" PRId32,
			(int64_t)first * KV_PAGE_TOKENS, (int64_t)last * KV_PAGE_TOKENS, KV_PAGE_TOKENS,
			KV_POLICY_MIN_WINDOW * KV_PAGE_TOKENS, tokens);
	enum status status =
		kind == KV_POLICY_MERGE ? check_merge(bounds, asked, err) : check_aggregation(bounds, asked, err);
	if (status != STATUS_OK)
		return status;
	*out = kind == KV_POLICY_MERGE ? kv_policy_merge(first, last, most, permille, INT32_MAX, jump)
				       : kv_policy_evict(first, last, most, permille, INT32_MAX, jump);
	/* Nothing is ever let go of. */
	if (most == INT32_MAX && permille == 0)
		return STATUS_OK;
	int64_t least = kv_policy_least_pages(out),
		acts = asked->trigger_tokens > 0 ? kv_pages_for(asked->trigger_tokens) : least;
	status = check_trigger(bounds, asked, least * KV_PAGE_TOKENS, acts * KV_PAGE_TOKENS, err);
	if (status == STATUS_OK)
		status = check_open_triggers(bounds, asked, kind, jump, err);
	/* Pages that others have as well are copied one by one. */
	if (status == STATUS_OK && kind == KV_POLICY_MERGE && acts >= bounds->pool_pages)
		status = error_set_param(err, STATUS_INVALID, "kv_cache.max_cache_size",
					 "up to %" PRId64
					 " tokens would be kept; to merge them takes a page more than the %" PRId32
					 " pages of the KV cache",
					 acts * KV_PAGE_TOKENS, bounds->pool_pages);
	if (status != STATUS_OK)
		return status;
	out->acts_pages = acts_pages(asked, least);
	out->by_age = asked->by_age;
	out->by_mass = asked->by_mass;
	return STATUS_OK;
}

/* All pages stay; how many of them a row reads, in whole pages. */
static enum status quest(const struct context_bounds *bounds, const struct engine_context *asked, struct kv_policy *out,
                         struct error *err)
{
	enum { RECENT = 4 };
	int32_t tokens = asked->max_cache_size > 0 ? asked->max_cache_size : bounds->max_cache_size,
		most = tokens / KV_PAGE_TOKENS;
	int32_t first = kv_pages_for(asked->start_size < 0 ? DEFAULT_START_TOKENS : asked->start_size),
		last = kv_pages_for(asked->recent_size);
	if (!bounds->can_choose)
		return error_set_param(
			err, STATUS_INVALID, "kv_cache.policy",
			"the policy \"quest\" needs a server that keeps bounds of its pages: --kv-bounds");
	if (asked->by_share || asked->by_age || asked->by_mass)
		return error_set_param(err, STATUS_INVALID,
		                       asked->by_share ? "kv_cache.cache_length_shrink_ratio" : "kv_cache.aggregation",
		                       "the policy \"quest\" keeps everything and chooses what to read by itself; "
		                       "\"evict\" has use for that");
	if (tokens == 0)
		return error_set_param(err, STATUS_INVALID, "kv_cache.max_cache_size",
		                       "the policy \"quest\" needs max_cache_size: how many tokens each new one reads");
	if (last == 0)
		last = most / 4 < RECENT ? (most >= 4 ? most / 4 : 1) : RECENT;
	if ((int64_t)first + last >= most)
		return error_set_param(err, STATUS_INVALID, "kv_cache.max_cache_size",
		                       "kv_cache.max_cache_size is %" PRId32
		                       ", but it has to be more than start_size and recent_size, which come to %" PRId64
		                       " and %" PRId64 " tokens in whole pages of %d",
		                       tokens, (int64_t)first * KV_PAGE_TOKENS, (int64_t)last * KV_PAGE_TOKENS,
		                       KV_PAGE_TOKENS);
	int32_t acts = acts_pages(asked, most);
	enum status status = check_open_triggers(bounds, asked, KV_POLICY_QUEST, 0, err);
	if (status != STATUS_OK)
		return status;
	if (acts < most)
		return error_set_param(err, STATUS_INVALID, "kv_cache.trigger.tokens",
		                       "kv_cache.trigger.tokens is %" PRId32 ", less than the %" PRId32
		                       " tokens that are read",
		                       asked->trigger_tokens, most * KV_PAGE_TOKENS);
	*out = kv_policy_quest(first, last, most, acts);
	return STATUS_OK;
}

enum status context_resolve(const struct context_bounds *bounds, const struct engine_context *asked,
                            struct kv_policy *out, struct error *err)
{
	enum kv_policy_kind kind = bounds->policy;
	*out = (struct kv_policy){.kind = KV_POLICY_FULL};
	if (asked->policy && !kv_policy_find(asked->policy, &kind))
		return error_set_param(err, STATUS_INVALID, "kv_cache.policy", "there is no context policy \"%.32s\"",
		                       asked->policy);
	if (asked->page_in && kind != KV_POLICY_STREAMING)
		return error_set_param(err, STATUS_INVALID, "kv_cache.page_in",
				       "kv_cache.page_in has no meaning with the policy \"%s\": what may come back is "
				       "what \"streaming\" drops",
				       kv_policy_name(kind));
	if (asked->page_in && !bounds->can_recall)
		return error_set_param(err, STATUS_INVALID, "kv_cache.page_in",
				       "kv_cache.page_in needs a server with --kv-ram and --kv-bounds, whose KV is not "
				       "narrow");
	if (kind == KV_POLICY_FULL)
		return no_sizes(asked, kv_policy_name(kind), err);
	if (bounds->by_chunks)
		return error_set_param(err, STATUS_INVALID, "kv_cache.policy",
				       "under --rope-scaling dca the only context policy is \"full\", not \"%s\"",
				       kv_policy_name(kind));
	if (kind == KV_POLICY_QUEST)
		return quest(bounds, asked, out, err);
	return kind == KV_POLICY_STREAMING ? streaming(bounds, asked, out, err)
					   : evict_or_merge(bounds, asked, kind, out, err);
}

struct context_bounds context_bounds_of(const struct engine_options *o, struct context_bounds offered)
{
	offered.max_cache_size = o->max_cache_size;
	kv_policy_find(o->context_policy, &offered.policy);
	return offered;
}

bool context_is_bounded(const struct engine_options *o, const struct engine_context *asked)
{
	const char *policy = asked->policy ? asked->policy : o->context_policy;
	if (strcmp(policy, kv_policy_name(KV_POLICY_FULL)) == 0 || strcmp(policy, kv_policy_name(KV_POLICY_QUEST)) == 0)
		return false;
	/* How an answer attends bounds nothing. */
	if (asked->trigger_entropy > 0 && asked->trigger_tokens == 0 && asked->trigger_free_pages == 0)
		return false;
	return strcmp(policy, kv_policy_name(KV_POLICY_STREAMING)) == 0 || asked->max_cache_size > 0 ||
	       o->max_cache_size > 0;
}

enum status context_check_diagnostics(const struct context_bounds *bounds, const struct engine_context *asked,
                                      struct error *err)
{
	if (!asked->diagnostics || bounds->can_weigh)
		return STATUS_OK;
	return error_set_param(err, STATUS_INVALID, "kv_cache.diagnostics",
	                       "the device of this server does not tell how its rows attend");
}

void context_describe(const struct kv_policy *policy, const struct kv_seq *kv, const struct kv_pool *pool,
                      struct engine_context_usage *out)
{
	*out = (struct engine_context_usage){
		.policy = kv_policy_name(policy->kind),
		.tokens_logical = kv->n_tokens,
		.tokens_resident = kv_seq_places(kv),
		.evicted_tokens = policy->kind == KV_POLICY_MERGE ? kv->n_unsound : kv->n_tokens - kv_seq_places(kv),
		.merged_tokens = kv_merged_tokens(kv),
		.pages = kv_pages_for(kv_seq_places(kv)),
	};
	out->bytes = (uint64_t)out->pages * kv_pool_layout(pool)->page_stride + kv_merge_bytes(kv);
	for (int32_t i = kv->n_gone; i < kv->n_pages; i++)
		out->fallback_pages += kv_pool_fell_back(pool, kv->pages[i]);
	out->moved = kv->moved;
	out->pages_in = policy->back_pages > 0;
	out->pages_back = kv->n_back;
	out->pages_below = kv->attic ? kv->attic->n - kv->attic->n_lost : 0;
	out->pages_missing = kv->attic ? kv->attic->n_lost + kv->attic->n_unknown : 0;
	if (policy->kind != KV_POLICY_QUEST)
		return;
	int32_t most = policy->most_pages * KV_PAGE_TOKENS;
	out->chooses = true;
	out->tokens_read = kv->n_tokens < kv_policy_exact_tokens(policy) || kv->n_tokens < most ? kv->n_tokens : most;
}

const char *engine_context_policy(size_t i)
{
	return i < KV_POLICIES ? kv_policy_name((enum kv_policy_kind)i) : NULL;
}

const char *engine_trigger_name(enum engine_trigger trigger)
{
	static const char *const names[ENGINE_TRIGGERS] = {
		[ENGINE_TRIGGER_TOKENS] = "tokens",
		[ENGINE_TRIGGER_FREE_PAGES] = "free_pages",
		[ENGINE_TRIGGER_ENTROPY] = "entropy",
	};
	return (unsigned)trigger < ENGINE_TRIGGERS ? names[trigger] : NULL;
}

void context_describe_trigger(const struct engine_context *asked, const struct trigger *t,
			      const struct kv_policy *policy, const struct kv_seq *kv, struct engine_context_usage *out)
{
	int32_t acts = kv_policy_exact_tokens(policy);
	out->trigger_asked = has_trigger(asked);
	if (t->fired != ENGINE_TRIGGER_NONE) {
		out->trigger = t->fired;
		out->trigger_tokens = t->fired_at;
	} else if (asked->trigger_tokens > 0 && kv->n_tokens > acts) {
		out->trigger = ENGINE_TRIGGER_TOKENS;
		out->trigger_tokens = acts;
	}
}
