/*
 * Loading: the file, its tokenizer and template, a device, the weights, and a page pool whose size follows from the
 * memory that is there. Runs in the worker's thread while the server already answers health checks.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/engine_internal.h"
#include "engine/kv/policy.h"
#include "engine/kv/seq.h"
#include "engine/sched.h"

/* Outputs of a step beyond one per running request: rows of prompts whose own log-probabilities were asked for. */
enum { EXTRA_OUTPUTS = 64 };
/*
 * Without --kv-memory: at most this part of the machine's or the device's memory that is available, and max_running
 * full contexts.
 */
enum { KV_DIR_BYTES = 4096 };
enum { MEMORY_SHARE_PERCENT = 50, DEVICE_SHARE_PERCENT = 90 };

int32_t engine_max_outputs(int32_t max_running, int32_t step_tokens)
{
	return max_running + EXTRA_OUTPUTS < step_tokens ? max_running + EXTRA_OUTPUTS : step_tokens;
}

static uint64_t read_number(const char *path, const char *key)
{
	char line[256];
	uint64_t value = UINT64_MAX;
	FILE *f = fopen(path, "re");
	if (!f)
		return value;
	while (fgets(line, sizeof line, f)) {
		size_t n = strlen(key);
		if (strncmp(line, key, n) == 0) {
			char *end;
			unsigned long long v = strtoull(line + n, &end, 10);
			if (end != line + n)
				value = v;
			break;
		}
	}
	fclose(f);
	return value;
}

/* Memory this process may still take: the machine's, and what its cgroup (v2, or v1) leaves of its limit. */
static uint64_t available_memory(void)
{
	uint64_t best = read_number("/proc/meminfo", "MemAvailable:");
	best = best > UINT64_MAX / 1024 ? UINT64_MAX : best * 1024;
	static const char *const groups[][2] = {
	        {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
	        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"},
	};
	for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
		uint64_t limit = read_number(groups[i][0], ""), used = read_number(groups[i][1], "");
		if (limit == UINT64_MAX || used == UINT64_MAX)
			continue;
		uint64_t left = limit > used ? limit - used : 0;
		best = left < best ? left : best;
	}
	return best;
}

static enum status load_text(struct engine *e, struct error *err)
{
	enum status st = tokenizer_create(e->gguf, &e->tokenizer, err);
	if (st != STATUS_OK)
		return st;
	st = grammar_vocab_create(e->tokenizer, &e->words);
	if (st != STATUS_OK)
		return error_set(err, st, "no memory to sort the vocabulary");
	struct str source = {NULL, 0};
	if (e->options.chat_template) {
		source = str_from(e->options.chat_template);
	} else {
		st = gguf_get_str(e->gguf, "tokenizer.chat_template", &source, err);
		if (st != STATUS_OK && st != STATUS_NOT_FOUND)
			return st;
	}
	if (!source.p) {
		error_set(&e->template_error, STATUS_NOT_FOUND,
		          "the model file has no chat template; start the server with --chat-template NAME or FILE");
		return STATUS_OK;
	}
	e->template_source = strndup(source.p, source.n);
	if (!e->template_source)
		return error_set(err, STATUS_NOMEM, "no memory for the chat template");
	st = template_compile(source.p, source.n, &e->template, &e->template_error);
	if (st == STATUS_NOMEM)
		return error_set(err, st, "no memory for the chat template");
	return STATUS_OK;
}

/*
 * Memory the pool may take when nobody has said how much: part of the machine's, or nearly all that a device has left
 * once the activations of a step are in it. The rest is for what the backend and others allocate later.
 */
static uint64_t default_kv_bytes(struct engine *e, const struct model_params *p)
{
	const struct engine_options *o = &e->options;
	const struct backend_ops *ops = e->backend->ops;
	uint64_t available = ops->mem_available ? ops->mem_available(e->backend) : 0;
	if (available) {
		uint64_t step = model_step_bytes(p, o->step_tokens, engine_max_outputs(o->max_running, o->step_tokens));
		return available > step ? (available - step) / 100 * DEVICE_SHARE_PERCENT : 0;
	}
	available = available_memory();
	return available == UINT64_MAX ? UINT64_C(1) << 30 : available / 100 * MEMORY_SHARE_PERCENT;
}

void engine_split_kv(const struct kv_layout *layout, bool bounds, uint64_t bytes, uint64_t *n_pages, uint64_t *n_wide)
{
	*n_wide = 0;
	if (layout->form != KV_FORM_F16) {
		/* With two pages of a conversation kept wide, this is enough for conversations of 20 pages. */
		*n_wide = bytes / ENGINE_WIDE_SHARE / kv_pool_bytes(layout, 0, 1);
		bytes -= *n_wide * kv_pool_bytes(layout, 0, 1);
	}
	*n_pages = bytes / (layout->page_stride + (bounds ? kv_bounds_bytes(layout) : 0));
}

/*
 * Longest conversations: that the model, or the user, allows; of which all is kept; and of which all is kept in the
 * pool.
 */
struct contexts {
	int32_t all, full, pool;
};

/* Pages that the pool gets, for conversations of n_ctx tokens. */
static enum status size_pool(struct engine *e, const struct model_params *p, int32_t *n_pages, int32_t *n_wide,
                             int32_t *n_ctx, struct error *err)
{
	const struct engine_options *o = &e->options;
	size_t stride = e->layout.page_stride;
	if (o->context_tokens > p->n_ctx)
		log_msg(LOG_WARN, "context", "the context of %" PRId32 " tokens is longer than the %" PRId32 " %s",
		        o->context_tokens, p->n_ctx,
		        p->n_ctx == p->n_ctx_train ? "the model was trained on" : "that positions are stretched to");
	*n_ctx = o->context_tokens ? o->context_tokens : p->n_ctx;
	uint64_t full = (uint64_t)kv_pages_for(*n_ctx);
	uint64_t pages, wide;
	engine_split_kv(&e->layout, o->kv_bounds, o->kv_bytes ? o->kv_bytes : default_kv_bytes(e, p), &pages, &wide);
	if (!o->kv_bytes && pages > full * (uint64_t)o->max_running) {
		pages = full * (uint64_t)o->max_running;
		wide = wide < pages / 8 ? wide : pages / 8;
	}
	*n_wide = wide < INT32_MAX ? (int32_t)wide : INT32_MAX;
	if (pages > INT32_MAX / KV_PAGE_TOKENS)
		pages = INT32_MAX / KV_PAGE_TOKENS;
	if (pages < 1)
		return error_set(err, STATUS_NOMEM,
		                 "the KV cache gets %" PRIu64 " bytes, but one page of %d tokens takes %zu",
		                 o->kv_bytes, KV_PAGE_TOKENS, stride);
	*n_pages = (int32_t)pages;
	return STATUS_OK;
}

/* Cuts the context to what there is room for, in the pool and below it. */
static enum status fit_context(struct engine *e, struct contexts *c, struct error *err)
{
	const struct engine_options *o = &e->options;
	size_t stride = e->layout.page_stride;
	int64_t all = c->all, pool = (int64_t)kv_pool_n_pages(e->pool) * KV_PAGE_TOKENS;
	int64_t below = e->overflow ? kv_overflow_now(e->overflow)->max_tokens : 0, most = below > pool ? below : pool;
	int32_t horizon = model_horizon(model_params(e->model));
	/* What no row will see again goes. */
	if (horizon > 0 && sched_large_windowed(kv_pool_n_pages(e->pool), horizon, o->step_tokens).step_rows > 0)
		most = all;
	c->pool = (int32_t)(all < pool ? all : pool);
	c->full = (int32_t)(all < most ? all : most);
	if (c->full == c->all)
		return STATUS_OK;
	/* Where a policy keeps a part of it, it need not all fit. */
	if (o->context_tokens && strcmp(o->context_policy, kv_policy_name(KV_POLICY_FULL)) == 0)
		return error_set(err, STATUS_NOMEM,
		                 "a context of %" PRId32 " tokens takes %" PRIu64
		                 " bytes of KV cache, but there are %" PRIu64 "%s"
		                 ": choose a smaller --context or a larger --kv-memory",
		                 c->all, (uint64_t)kv_pages_for(c->all) * stride,
		                 (uint64_t)most / KV_PAGE_TOKENS * stride, e->overflow ? " with what is below it" : "");
	log_msg(LOG_WARN, "context",
	        "the KV cache of %" PRIu64 " bytes%s holds %" PRId32 " tokens, less than the model's context",
	        (uint64_t)kv_pool_n_pages(e->pool) * stride, e->overflow ? " with what is below it" : "", c->full);
	return STATUS_OK;
}

/* Room for conversations larger than the pool. */
static enum status open_overflow(struct engine *e, struct error *err)
{
	const struct engine_options *o = &e->options;
	struct kv_overflow_options options = {
	        .ram_bytes = o->kv_overflow_bytes,
	        .dir = o->kv_overflow_dir,
	        .disk_bytes = o->kv_overflow_disk_bytes,
	        .step_tokens = o->step_tokens,
	};
	if (!options.ram_bytes && !options.dir)
		return STATUS_OK;
	if (model_horizon(model_params(e->model)) > 0) {
		log_msg(LOG_INFO, "kv_overflow",
		        "all layers of this model have a window, so that conversations may be larger than the KV cache "
		        "without kv-overflow: it is not used");
		return STATUS_OK;
	}
	enum status st = kv_overflow_create(e->backend, e->pool, &options, &e->overflow, err);
	/* A disk that cannot be used is no reason not to serve what fits. */
	if (st == STATUS_IO) {
		log_msg(LOG_WARN, "kv_overflow", "conversations have no room beyond the KV cache: %s", err->message);
		return STATUS_OK;
	}
	if (st == STATUS_OK)
		log_msg(LOG_INFO, "kv_overflow",
		        "conversations of up to %" PRId32 " tokens find room beyond the KV cache",
		        kv_overflow_now(e->overflow)->max_tokens);
	return st;
}

/*
 * Identifies the weights for the prefix index: the file's head (metadata and tensor table) and both ends of every
 * tensor. Reading all of a large file would double the time to load it.
 */
static void digest_weights(const struct gguf *g, uint8_t digest[SHA256_BYTES])
{
	enum { END_BYTES = 4096 };
	struct sha256 s;
	sha256_init(&s);
	/* A model has tensors; what stands before the first of them is the head. */
	const struct gguf_tensor *first = gguf_tensor_at(g, 0);
	for (size_t i = 1; i < gguf_n_tensors(g); i++) {
		if (gguf_tensor_at(g, i)->offset < first->offset)
			first = gguf_tensor_at(g, i);
	}
	sha256_update(&s, first->data - first->offset, first->offset);
	for (size_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);
		size_t n = t->n_bytes < END_BYTES ? t->n_bytes : END_BYTES;
		sha256_update(&s, t->data, n);
		sha256_update(&s, t->data + t->n_bytes - n, n);
	}
	sha256_final(&s, digest);
}

/* Everything but a request's salt that the content of a page depends on. */
static void make_root(struct engine *e)
{
	const struct model_params *p = model_params(e->model);
	snprintf(e->rope_text, sizeof e->rope_text, "%d %d %d %d %a %a %a %d %a %a %a %a %a %a", (int)p->rope_pairing,
	         (int)p->rope_scaling, (int)p->rope_table, (int)p->rope_dims, p->rope_base, p->rope_base_local,
	         p->rope_factor, (int)p->rope_original_ctx, p->rope_attn_factor, p->yarn_beta_fast, p->yarn_beta_slow,
	         p->yarn_ext_factor, p->rope_low_freq_factor, p->rope_high_freq_factor);
	size_t n = strlen(e->rope_text);
	if (p->rope_chunks.size > 0)
		snprintf(e->rope_text + n, sizeof e->rope_text - n, " %d %d", (int)p->rope_chunks.size,
			 (int)p->rope_chunks.reach);
	/* With a lossy tier all KV may have gone through it: none of it is taken for exact, here or elsewhere. */
	enum kv_form ram = KV_FORM_F16;
	if (e->options.kv_ram_bytes)
		kv_form_find(e->options.kv_ram_type, &ram);
	snprintf(e->scheme_text, sizeof e->scheme_text, "%s%s", e->backend_info.name, kv_tier_scheme(ram));
	e->root = (struct kv_root){.n_layer = p->n_layer,
	                           .n_head_kv = p->n_head_kv,
	                           .head_dim = p->head_dim,
	                           .page_tokens = KV_PAGE_TOKENS,
	                           .kv_type = (int32_t)e->layout.type | (int32_t)e->layout.form << 16,
	                           .scheme = str_from(e->scheme_text),
	                           .rope = str_from(e->rope_text)};
	digest_weights(e->gguf, e->root.weights);
	kv_key_root(&e->root, &e->identity);
}

/* ---- Tiers ---- */

/* From the disk tier's thread. Without memory the worker finds out a little later. */
static void wake_worker(void *arg)
{
	struct engine *e = arg;
	if (atomic_exchange(&e->wake_sent, true))
		return;
	struct command *c = calloc(1, sizeof *c);
	if (!c) {
		atomic_store(&e->wake_sent, false);
		return;
	}
	c->type = COMMAND_WAKE;
	mailbox_post(&e->worker_box, &c->link);
}

/* Names this machine: pages that another one computed may differ in their last bits. */
static void host_name(char out[64])
{
	FILE *f = fopen("/etc/machine-id", "re");
	out[0] = '\0';
	if (f) {
		if (!fgets(out, 64, f))
			out[0] = '\0';
		fclose(f);
	}
	out[strcspn(out, "\n")] = '\0';
	if (!out[0] && gethostname(out, 64) != 0)
		out[0] = '\0';
	out[63] = '\0';
}

/* A disk that cannot be used is no reason not to serve. */
static struct kv_tier *open_disk(struct engine *e, const struct kv_tier_device *device, const char *dir, uint64_t bytes,
                                 enum kv_tier_pages pages)
{
	const struct engine_options *o = &e->options;
	struct kv_tier *disk = NULL;
	struct kv_tier_stats stats;
	struct error err;
	char host[64];
	struct kv_tier_disk_options d = {
	        .dir = dir,
	        .bytes = bytes,
	        .pages = pages,
	        .write_bytes_per_s = o->kv_disk_write_bytes_per_s,
	        .version = KVASIR_VERSION,
	        .host = host,
	        .wake = wake_worker,
	        .wake_arg = e,
	};
	host_name(host);
	d.identity = e->identity;
	if (kv_tier_disk_create(device, e->clock, &d, &disk, &err) != STATUS_OK) {
		log_msg(LOG_WARN, "kv_disk", "there is no disk tier: %s", err.message);
		return NULL;
	}
	kv_tier_stats(disk, &stats);
	log_msg(LOG_INFO, "kv_disk",
	        "the disk tier in %s has %" PRId32 " of %" PRId32 " pages (%s); it reads %.0f and writes %.0f MB/s",
	        dir, stats.n_pages, stats.max_pages, stats.io, stats.read_bytes_per_s / 1e6,
	        stats.write_bytes_per_s / 1e6);
	return disk;
}

/*
 * One for all pages; in a narrow pool, one for those with wide copies, which get the share that they have of the
 * device.
 */
static void open_disks(struct engine *e, const struct kv_tier_device *device, struct kv_tier *tier[KV_TIER_KINDS])
{
	const struct engine_options *o = &e->options;
	uint64_t wide = e->layout.form == KV_FORM_F16 ? 0 : o->kv_disk_bytes / ENGINE_WIDE_SHARE;
	char dir[KV_DIR_BYTES];
	if (wide && snprintf(dir, sizeof dir, "%s/wide", o->kv_disk_dir) < (int)sizeof dir) {
		/* The outer directory is made by the first that needs it. */
		tier[KV_TIER_DISK] = open_disk(e, device, o->kv_disk_dir, o->kv_disk_bytes - wide, KV_TIER_NARROW);
		if (!tier[KV_TIER_DISK])
			return;
		tier[KV_TIER_DISK_WIDE] = open_disk(e, device, dir, wide, KV_TIER_WIDE);
		if (tier[KV_TIER_DISK_WIDE])
			return;
		kv_tier_destroy(tier[KV_TIER_DISK]);
	}
	tier[KV_TIER_DISK] = open_disk(e, device, o->kv_disk_dir, o->kv_disk_bytes, KV_TIER_ALL);
}

/* The same of a server. */
static struct kv_tier *open_remote(struct engine *e, const struct kv_tier_device *device)
{
	struct kv_tier *remote = NULL;
	struct kv_tier_stats stats;
	struct error err;
	const struct kv_tier_remote_options r = {
	        .address = e->options.kv_remote,
	        .secret = e->options.transfer_key,
	        .wake = wake_worker,
	        .wake_arg = e,
	};
	if (kv_tier_remote_create(device, e->clock, &r, &remote, &err) != STATUS_OK) {
		log_msg(LOG_WARN, "kv_remote", "there is no remote tier: %s", err.message);
		return NULL;
	}
	kv_tier_stats(remote, &stats);
	if (!stats.off)
		log_msg(LOG_INFO, "kv_remote", "KV pages are shared with others at %s", r.address);
	return remote;
}

static enum status open_tiers(struct engine *e, struct error *err)
{
	const struct engine_options *o = &e->options;
	struct kv_tier_device device = {e->backend, kv_pool_slab(e->pool), e->layout};
	struct kv_tier *tier[KV_TIER_KINDS] = {NULL};
	enum kv_form type;
	if (o->kv_ram_bytes) {
		kv_form_find(o->kv_ram_type, &type);
		enum status st = kv_tier_ram_create(&device, e->clock, o->kv_ram_bytes, type, &tier[KV_TIER_RAM], err);
		if (st != STATUS_OK)
			return st;
	}
	if (o->kv_disk_dir)
		open_disks(e, &device, tier);
	if (o->kv_remote)
		tier[KV_TIER_REMOTE] = open_remote(e, &device);
	if (!tier[KV_TIER_RAM] && !tier[KV_TIER_DISK] && !tier[KV_TIER_DISK_WIDE] && !tier[KV_TIER_REMOTE])
		return STATUS_OK;
	if (kv_tiers_create(e->pool, e->prefix, tier, e->clock, &e->tiers) != STATUS_OK)
		return error_set(err, STATUS_NOMEM, "no memory for the KV tiers");
	return STATUS_OK;
}

/* The tensor type that holds most of the parameters. */
static const char *main_type(const struct gguf *g)
{
	const char *best = "none";
	uint64_t best_elems = 0;
	for (size_t i = 0; quant_format_at(i); i++) {
		uint64_t elems = 0;
		for (size_t t = 0; t < gguf_n_tensors(g); t++) {
			if (gguf_tensor_at(g, t)->format == quant_format_at(i))
				elems += gguf_tensor_at(g, t)->n_elems;
		}
		if (elems > best_elems) {
			best_elems = elems;
			best = quant_format_at(i)->name;
		}
	}
	return best;
}

static enum status fill_info(struct engine *e, int32_t n_pages, int32_t n_wide, const struct contexts *c,
                             struct error *err)
{
	const struct model_params *p = model_params(e->model);
	struct engine_info *info = &e->info;
	struct str name;
	const char *slash = strrchr(e->options.model_path, '/');
	e->file_name = strdup(slash ? slash + 1 : e->options.model_path);
	if (gguf_get_str(e->gguf, "general.name", &name, NULL) == STATUS_OK && name.n > 0 && name.n <= 256)
		e->model_name = strndup(name.p, name.n);
	else
		e->model_name = e->file_name ? strdup(e->file_name) : NULL;
	if (!e->file_name || !e->model_name)
		return error_set(err, STATUS_NOMEM, "no memory for the model's name");
	*info = (struct engine_info){
		.model_name = e->model_name,
		.file_name = e->file_name,
		.arch = p->arch,
		.backend = e->backend_info.name,
		.quantization = main_type(e->gguf),
		.n_params = model_n_params(e->model),
		.file_bytes = gguf_file_bytes(e->gguf),
		.n_ctx = c->full,
		.n_ctx_pool = c->pool,
		.n_ctx_long = c->all,
		.n_ctx_train = p->n_ctx_train,
		.n_vocab = p->n_vocab,
		.n_embd = p->n_embd,
		.n_layer = p->n_layer,
		.window = model_n_windowed(p) ? p->window : 0,
		.n_windowed = model_n_windowed(p),
		.n_threads = e->backend_info.n_threads,
		.kv_bytes_per_token = e->layout.page_bytes / KV_PAGE_TOKENS,
		.kv_bytes = kv_pool_bytes(&e->layout, n_pages, n_wide),
		.page_bytes = e->layout.page_stride,
		.bounds_bytes = e->layout.bounds ? (uint64_t)n_pages * kv_bounds_bytes(&e->layout) : 0,
		.kv_type = e->layout.form == KV_FORM_F16 ? quant_format(e->layout.type)->name
	                                                 : kv_form_name(e->layout.form),
		.page_tokens = KV_PAGE_TOKENS,
		.n_pages = n_pages,
		.bos_token = tokenizer_bos(e->tokenizer),
		.eos_token = tokenizer_eos(e->tokenizer),
		.has_chat_template = e->template_source != NULL,
		.chat_template = e->template_source ? e->template_source : "",
		.chat_template_error = e->template ? NULL : e->template_error.message,
	};
	engine_rope_describe(p, &e->rope, &info->rope);
	if (e->template_source && !e->template)
		log_msg(LOG_WARN, "chat_template",
		        "the model's chat template cannot run: %s; chat requests will be refused",
		        e->template_error.message);
	return STATUS_OK;
}

enum status engine_load(struct engine *e, struct error *err)
{
	const struct engine_options *o = &e->options;
	int32_t n_pages = 0, n_wide = 0;
	struct contexts contexts = {0};
	enum status st = gguf_open(o->model_path, &e->gguf, err);
	if (st != STATUS_OK)
		return st;
	st = load_text(e, err);
	if (st != STATUS_OK)
		return st;
	struct backend_options bo = {.device = o->device, .n_threads = o->n_threads};
	st = backend_create(&bo, &e->backend, err);
	if (st == STATUS_INVALID || st == STATUS_UNSUPPORTED)
		memcpy(err->param, "device", sizeof "device"); /* the option is wrong here, not the model */
	if (st != STATUS_OK)
		return st;
	struct kv_choice kv;
	st = kv_choice_make(e->backend, o->kv_type, &kv, err);
	e->backend->ops->info(e->backend, &e->backend_info);
	if (st == STATUS_OK && o->kv_bounds && !e->backend_info.chooses_pages)
		st = error_set_param(err, STATUS_UNSUPPORTED, "kv-bounds", "the device %s has no bounds of KV pages",
		                     e->backend_info.name);
	if (st == STATUS_OK)
		st = model_load_stretched(e->gguf, e->backend, &e->rope, &e->model, err);
	if (st != STATUS_OK)
		return st;
	const struct model_params *p = model_params(e->model);
	if (tokenizer_n_vocab(e->tokenizer) > p->n_vocab)
		return error_set(err, STATUS_INVALID,
		                 "the tokenizer has %" PRId32 " tokens, but the model only %" PRId32,
		                 tokenizer_n_vocab(e->tokenizer), p->n_vocab);
	st = kv_layout_for(e->backend, &e->layout, p->n_layer, p->n_head_kv, p->head_dim);
	if (st != STATUS_OK)
		return error_set(err, st, "the model's KV geometry is not supported");
	if (kv.form != KV_FORM_F16)
		kv_layout_narrow(&e->layout, kv.form);
	st = size_pool(e, p, &n_pages, &n_wide, &contexts.all, err);
	if (st != STATUS_OK)
		return st;
	st = kv_pool_create_narrow(e->backend, &e->layout, n_pages, n_wide, &e->pool, err);
	if (st != STATUS_OK)
		return st;
	st = o->kv_bounds ? kv_pool_add_bounds(e->pool) : STATUS_OK;
	if (st != STATUS_OK)
		return error_set(err, st, "no memory for the bounds of %" PRId32 " pages", n_pages);
	e->layout = *kv_pool_layout(e->pool);
	st = open_overflow(e, err);
	if (st == STATUS_OK)
		st = fit_context(e, &contexts, err);
	if (st != STATUS_OK)
		return st;
	st = kv_prefix_create(e->pool, o->kv_policy, &e->prefix, err);
	if (st != STATUS_OK)
		return st;
	make_root(e);
	st = open_tiers(e, err);
	if (st != STATUS_OK)
		return st;
	e->max_outputs = engine_max_outputs(o->max_running, o->step_tokens);
	st = model_reserve(e->model, o->step_tokens, e->max_outputs, &e->layout, err);
	if (st != STATUS_OK)
		return st;
	return fill_info(e, n_pages, n_wide, &contexts, err);
}

void engine_unload(struct engine *e)
{
	kv_tiers_destroy(e->tiers);
	kv_prefix_destroy(e->prefix);
	kv_overflow_destroy(e->overflow);
	kv_pool_destroy(e->pool); /* says who still holds what, if anybody does */
	model_destroy(e->model);
	if (e->backend)
		e->backend->ops->destroy(e->backend);
	template_destroy(e->template);
	free(e->template_source);
	grammar_vocab_destroy(e->words);
	tokenizer_destroy(e->tokenizer);
	free(e->file_name);
	free(e->model_name);
	gguf_close(e->gguf);
}
