/* What a model will take, from its file alone: the same formulas by which an engine sizes itself. */
#include <inttypes.h>
#include <string.h>

#include "engine/engine_internal.h"
#include "engine/kv/overflow.h"
#include "engine/kv/seq.h"
#include "engine/sched.h"
#include "engine/tools.h"

static enum status check(const struct engine_plan_params *p, struct error *err)
{
	if (p->context_tokens < 0)
		return error_set_param(err, STATUS_INVALID, "ctx", "a context cannot have %" PRId32 " tokens",
		                       p->context_tokens);
	if (p->n_sessions < 0)
		return error_set_param(err, STATUS_INVALID, "sessions", "there cannot be %" PRId32 " sessions",
		                       p->n_sessions);
	if (!(p->tokens_per_s >= 0))
		return error_set_param(err, STATUS_INVALID, "rate", "a rate is zero or more tokens a second");
	return STATUS_OK;
}

/* The cache that has so many pages, at least. */
static uint64_t cache_bytes(const struct kv_layout *l, bool bounds, uint64_t n_pages)
{
	uint64_t bytes = n_pages * (l->page_stride + (bounds ? kv_bounds_bytes(l) : 0));
	return l->form == KV_FORM_F16 ? bytes : bytes + (bytes + ENGINE_WIDE_SHARE - 2) / (ENGINE_WIDE_SHARE - 1);
}

static enum status plan_pool(const struct engine_plan_params *params, const struct kv_layout *layout,
                             struct engine_plan *out, struct error *err)
{
	uint64_t pages, wide;
	uint64_t fixed = out->weights_bytes + out->activation_bytes;
	if (__builtin_mul_overflow(out->kv_bytes_per_session, (uint64_t)params->n_sessions, &out->kv_bytes) ||
	    __builtin_add_overflow(fixed, out->kv_bytes, &out->total_bytes))
		return error_set_param(err, STATUS_INVALID, "sessions",
		                       "%" PRId32 " sessions of %" PRId32 " tokens take more than 2^64 bytes",
		                       params->n_sessions, out->n_ctx);
	uint64_t memory = params->memory_bytes ? params->memory_bytes : out->total_bytes;
	engine_split_kv(layout, params->kv_bounds, memory > fixed ? memory - fixed : 0, &pages, &wide);
	out->pool_bytes =
		pages * (layout->page_stride + out->bounds_bytes_per_page) + wide * kv_pool_bytes(layout, 0, 1);
	out->pool_pages = pages;
	out->sessions_that_fit = (int64_t)(pages / (uint64_t)kv_pages_for(out->n_ctx));
	/*
	 * Pages go in the order they came, at the latest: one stays until as many tokens as the pool holds have been
	 * written.
	 */
	if (params->tokens_per_s > 0)
		out->idle_seconds = (double)pages * KV_PAGE_TOKENS / params->tokens_per_s;
	return STATUS_OK;
}

/* How long conversations can be, with what is below the pool. */
static enum status plan_longest(const struct engine_plan_params *params, const struct kv_layout *layout,
                                int32_t step_tokens, int32_t horizon, struct engine_plan *out, struct error *err)
{
	struct kv_overflow_plan below;
	uint64_t pages = out->pool_pages < INT32_MAX / KV_PAGE_TOKENS ? out->pool_pages : INT32_MAX / KV_PAGE_TOKENS;
	int64_t pool = (int64_t)pages * KV_PAGE_TOKENS;
	out->pool_tokens = (int32_t)(pool < out->n_ctx ? pool : out->n_ctx);
	out->longest_tokens = out->pool_tokens;
	if (horizon > 0 && sched_large_windowed((int32_t)pages, horizon, step_tokens).step_rows > 0)
		out->longest_tokens = out->n_ctx;
	if (horizon > 0 || (params->kv_overflow_bytes == 0 && params->kv_overflow_disk_bytes == 0))
		return STATUS_OK;
	enum status st = kv_overflow_plan(layout, (int32_t)pages, step_tokens, params->kv_overflow_bytes,
	                                  params->kv_overflow_disk_bytes, &below, err);
	if (st != STATUS_OK)
		return st;
	if (below.max_tokens > out->longest_tokens)
		out->longest_tokens = below.max_tokens < out->n_ctx ? below.max_tokens : out->n_ctx;
	out->overflow_ram_bytes = below.ram_bytes;
	out->overflow_disk_bytes = below.disk_bytes;
	return STATUS_OK;
}

enum status engine_device_check(const char *device, struct error *err)
{
	const struct backend_options options = {.device = device, .n_threads = 1};
	struct backend *b = NULL;
	enum status st = backend_create(&options, &b, err);
	if (st == STATUS_OK)
		b->ops->destroy(b);
	return st;
}

void engine_rope_describe(const struct model_params *p, const struct rope_choice *choice, struct engine_rope *out)
{
	bool keys = choice->original_ctx || choice->base > 0 || choice->attn_factor > 0 || choice->beta_fast > 0 ||
		    choice->beta_slow > 0 || choice->low_freq_factor > 0 || choice->high_freq_factor > 0;
	*out = (struct engine_rope){
		.scaling = rope_scaling_name(p->rope_scaling),
		.factor = p->rope_factor,
		.freq_base = p->rope_base,
		.original_ctx = p->rope_original_ctx,
		.reach = p->n_ctx,
		.chunk = p->rope_chunks.size,
		.chosen = choice->has_scaling || choice->by_chunks || keys,
	};
	if (choice->by_chunks) {
		out->scaling = "dca";
		out->factor = choice->factor;
		out->original_ctx = p->rope_chunks.reach;
	}
}

enum status engine_plan(const struct engine_plan_params *params, struct engine_plan *out, struct error *err)
{
	struct gguf *g = NULL;
	struct model_params p;
	struct kv_layout layout;
	struct kv_choice choice;
	struct rope_choice rope;
	int32_t step = params->step_tokens ? params->step_tokens : ENGINE_DEFAULT_STEP_TOKENS;
	int32_t running = params->max_running ? params->max_running : ENGINE_DEFAULT_MAX_RUNNING;
	memset(out, 0, sizeof *out);
	enum status st = check(params, err);
	if (st == STATUS_OK && !kv_choice_find(params->kv_type, &choice))
		st = error_set_param(err, STATUS_INVALID, "kv-dtype", "kv-dtype: \"%.64s\" is none of " KV_CHOICES,
		                     params->kv_type);
	if (st == STATUS_OK)
		st = rope_choice_parse(params->rope_scaling, &rope, err);
	if (st == STATUS_OK)
		st = gguf_open(params->model_path, &g, err);
	if (st == STATUS_OK)
		st = arch_read_params(g, &p, err);
	if (st == STATUS_OK)
		st = rope_choice_apply(&rope, &p, err);
	if (st != STATUS_OK)
		goto out;
	st = kv_layout_init(&layout, p.n_layer, p.n_head_kv, p.head_dim, QUANT_F16);
	if (st != STATUS_OK) {
		error_set(err, st, "the model's KV geometry is not supported");
		goto out;
	}
	if (choice.form != KV_FORM_F16)
		kv_layout_narrow(&layout, choice.form);
	strncpy(out->arch, p.arch, sizeof out->arch - 1);
	out->n_ctx = params->context_tokens ? params->context_tokens : p.n_ctx;
	engine_rope_describe(&p, &rope, &out->rope);
	out->n_layer = p.n_layer;
	out->n_head = p.n_head;
	out->n_head_kv = p.n_head_kv;
	out->head_dim = p.head_dim;
	out->page_tokens = KV_PAGE_TOKENS;
	out->n_windowed = model_n_windowed(&p);
	out->window = out->n_windowed ? p.window : 0;
	for (size_t i = 0; i < gguf_n_tensors(g); i++)
		out->weights_bytes += gguf_tensor_at(g, i)->n_bytes;
	out->activation_bytes =
		model_step_bytes(&p, step < running ? running : step, engine_max_outputs(running, step));
	out->kv_bytes_per_token = layout.page_bytes / KV_PAGE_TOKENS;
	out->page_bytes = layout.page_stride;
	out->bounds_bytes_per_page = params->kv_bounds ? kv_bounds_bytes(&layout) : 0;
	out->kv_bytes_per_session = cache_bytes(&layout, params->kv_bounds, (uint64_t)kv_pages_for(out->n_ctx));
	/* At the end of a context: the pages that its window touches, which begin and end within one. */
	int32_t horizon = model_horizon(&p), all = kv_pages_for(out->n_ctx);
	int32_t seen = horizon && horizon < out->n_ctx ? kv_pages_for(horizon) + 1 : all;
	out->kv_bytes_running = cache_bytes(&layout, params->kv_bounds, (uint64_t)(seen < all ? seen : all));
	st = plan_pool(params, &layout, out, err);
	if (st == STATUS_OK)
		st = plan_longest(params, &layout, step, horizon, out, err);
out:
	gguf_close(g);
	return st;
}
