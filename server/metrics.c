#include "server/metrics.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>

#include "engine/base/log.h"

/* Upper bounds, in seconds or tokens; 0 ends a row. */
static const double latency_bounds[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,  0.25,	 0.5,	0.75,
					1.0,   2.5,   5.0,  7.5,  10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 0};
static const double token_bounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1,  0.15, 0.2,	0.3, 0.4,
				      0.5,   0.75,   1.0,   2.5,  5.0,	 7.5,  10.0,  20.0, 40.0, 80.0, 0};
static const double request_bounds[] = {0.3,  0.5,  0.8,  1.0,	1.5,   2.0,   2.5,   5.0,   10.0,   15.0,   20.0,
					30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0, 0};
static const double count_bounds[] = {1,    2,	  5,	 10,	20,    50,     100,    200,    500,	1000,
				      2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000, 0};

static void observe(struct histogram *h, const double *bounds, double v)
{
	size_t i = 0;
	while (bounds[i] != 0 && v > bounds[i])
		i++;
	h->buckets[i]++;
	h->count++;
	h->sum += v;
}

void metrics_finished(struct metrics *m, const struct engine_usage *u, int64_t total_ns)
{
	if (u->ttft_ns > 0)
		observe(&m->ttft, latency_bounds, (double)u->ttft_ns / 1e9);
	if (u->completion_tokens > 1)
		observe(&m->tpot, token_bounds, (double)u->decode_ns / 1e9 / (u->completion_tokens - 1));
	observe(&m->e2e, request_bounds, (double)total_ns / 1e9);
	observe(&m->queue, request_bounds, (double)u->queue_ns / 1e9);
	observe(&m->prefill, request_bounds, (double)u->prefill_ns / 1e9);
	observe(&m->decode, request_bounds, (double)u->decode_ns / 1e9);
	observe(&m->inference, request_bounds, (double)(u->prefill_ns + u->decode_ns) / 1e9);
	observe(&m->prompt_tokens, count_bounds, u->prompt_tokens);
	observe(&m->generation_tokens, count_bounds, u->completion_tokens);
}

void metrics_token(struct metrics *m, int64_t since_last_ns)
{
	observe(&m->itl, token_bounds, (double)since_last_ns / 1e9);
}

/* A label value: backslash, quote and newline are escaped, as the format asks. */
static void label(struct buf *out, const char *name, const char *value)
{
	buf_printf(out, "%s=\"", name);
	for (; *value; value++) {
		if (*value == '\\' || *value == '"')
			buf_putc(out, '\\');
		if (*value == '\n')
			buf_puts(out, "\\n");
		else
			buf_putc(out, *value);
	}
	buf_putc(out, '"');
}

static void head(struct buf *out, const char *name, const char *type, const char *help)
{
	buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void series(struct buf *out, const char *name, const char *model, const char *extra)
{
	buf_printf(out, "%s{", name);
	label(out, "model_name", model);
	if (extra)
		buf_printf(out, ",%s", extra);
	buf_puts(out, "} ");
}

static void one(struct buf *out, const char *name, const char *type, const char *help, const char *model, double v)
{
	head(out, name, type, help);
	series(out, name, model, NULL);
	buf_printf(out, "%.17g\n", v);
}

static void write_histogram(struct buf *out, const char *name, const char *help, const char *model,
			    const double *bounds, const struct histogram *h)
{
	char full[96], extra[48];
	uint64_t sum = 0;
	head(out, name, "histogram", help);
	snprintf(full, sizeof full, "%s_bucket", name);
	for (size_t i = 0;; i++) {
		sum += h->buckets[i];
		if (bounds[i] != 0)
			snprintf(extra, sizeof extra, "le=\"%.10g\"", bounds[i]);
		else
			snprintf(extra, sizeof extra, "le=\"+Inf\"");
		series(out, full, model, extra);
		buf_printf(out, "%llu\n", (unsigned long long)sum);
		if (bounds[i] == 0)
			break;
	}
	snprintf(full, sizeof full, "%s_sum", name);
	series(out, full, model, NULL);
	buf_printf(out, "%.17g\n", h->sum);
	snprintf(full, sizeof full, "%s_count", name);
	series(out, full, model, NULL);
	buf_printf(out, "%llu\n", (unsigned long long)h->count);
}

static void write_outcomes(struct buf *out, const char *model, const struct engine_stats *s)
{
	const char *name = "vllm:request_success_total";
	const struct {
		const char *reason;
		uint64_t n;
	} rows[] = {{"stop", s->finished_stop},
		    {"length", s->finished_length},
		    {"abort", s->cancelled},
		    {"error", s->failed}};
	char extra[64];
	head(out, name, "counter", "Ended generations by reason.");
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		snprintf(extra, sizeof extra, "finished_reason=\"%s\"", rows[i].reason);
		series(out, name, model, extra);
		buf_printf(out, "%llu\n", (unsigned long long)rows[i].n);
	}
}

/* ---- The KV cache ---- */

struct part {
	const char *name; /* value of the label */
	double value;
};

/* One series for each part of a whole. */
static void parts(struct buf *out, const char *name, const char *type, const char *help, const char *model,
		  const char *label_name, const struct part *part, size_t n)
{
	char extra[64];
	head(out, name, type, help);
	for (size_t i = 0; i < n; i++) {
		snprintf(extra, sizeof extra, "%s=\"%s\"", label_name, part[i].name);
		series(out, name, model, extra);
		buf_printf(out, "%.17g\n", part[i].value);
	}
}
#define PARTS(...) (const struct part[]){__VA_ARGS__}, sizeof((const struct part[]){__VA_ARGS__}) / sizeof(struct part)

static void write_evictions(struct buf *out, const char *model, const struct engine_stats *s)
{
	parts(out, "kvasir:prefix_evictions_total", "counter",
	      "KV pages evicted from the prefix index, by what needed the room.", model, "reason",
	      PARTS({"prompt", (double)(s->prefix_evictions - s->prefix_evictions_decode)},
		    {"decode", (double)s->prefix_evictions_decode}));
	parts(out, "kvasir:preemptions_total", "counter",
	      "Times a generation's KV was dropped for others, by what needed it; cap: a limit of its API key.", model,
	      "reason",
	      PARTS({"prompt", (double)s->preempted[ENGINE_ROOM_PROMPT]},
	            {"decode", (double)s->preempted[ENGINE_ROOM_DECODE]},
	            {"cap", (double)s->preempted[ENGINE_ROOM_CAP]}));
}

static void write_context(struct buf *out, const char *model, const struct engine_stats *s)
{
	struct part requests[ENGINE_MAX_CONTEXT_POLICIES], evicted[ENGINE_MAX_CONTEXT_POLICIES];
	struct part merged[ENGINE_MAX_CONTEXT_POLICIES], fallback[ENGINE_MAX_CONTEXT_POLICIES];
	size_t n = 0;
	for (; engine_context_policy(n); n++) {
		requests[n] = (struct part){engine_context_policy(n), (double)s->context_requests[n]};
		evicted[n] = (struct part){engine_context_policy(n), (double)s->context_evicted[n]};
		merged[n] = (struct part){engine_context_policy(n), (double)s->context_merged[n]};
		fallback[n] = (struct part){engine_context_policy(n), (double)s->context_fallback[n]};
	}
	parts(out, "kvasir:context_requests_total", "counter", "Ended generations by context policy.", model, "policy",
	      requests, n);
	parts(out, "kvasir:context_evicted_tokens_total", "counter", "Tokens whose KV a context policy let go of.",
	      model, "policy", evicted, n);
	parts(out, "kvasir:context_merged_tokens_total", "counter",
	      "Tokens of ended generations that share their KV with others.", model, "policy", merged, n);
	parts(out, "kvasir:context_fallback_pages_total", "counter",
	      "Pages of ended generations that were kept in a wider type for a value that their own cannot hold.",
	      model, "policy", fallback, n);
	parts(out, "kvasir:context_page_in_total", "counter",
	      "Pages that left a window and were kept for page_in, that came back, that were lost before that, and that "
	      "were computed again.",
	      model, "event",
	      PARTS({"kept", (double)s->attic_kept}, {"back", (double)s->attic_back}, {"lost", (double)s->attic_lost},
		    {"recomputed", (double)s->attic_again}));
	one(out, "kvasir:context_page_in_choices_total", "counter", "Times that it was chosen which pages come back.",
	    model, (double)s->attic_choices);
	one(out, "kvasir:context_recomputed_tokens_total", "counter",
	    "Tokens that were computed again for pages that were lost.", model, (double)s->attic_again_tokens);
	parts(out, "kvasir:context_triggers_total", "counter",
	      "Ended generations with a trigger of their context policy, by the one that set it off; none: it did not "
	      "act.",
	      model, "trigger",
	      PARTS({"tokens", (double)s->context_triggered[ENGINE_TRIGGER_TOKENS]},
		    {"free_pages", (double)s->context_triggered[ENGINE_TRIGGER_FREE_PAGES]},
		    {"entropy", (double)s->context_triggered[ENGINE_TRIGGER_ENTROPY]},
		    {"none", (double)s->context_triggered[ENGINE_TRIGGER_NONE]}));
	one(out, "kvasir:kv_parked_pages", "gauge",
	    "KV pages that sessions under context policies keep for their next turn.", model, s->parked_pages);
	parts(out, "kvasir:kv_parked_total", "counter",
	      "Ends of turns that left KV for the session alone, turns that went on with it, and such KV lost before "
	      "that.",
	      model, "event",
	      PARTS({"parked", (double)s->parked}, {"resumed", (double)s->parked_resumed},
	            {"dropped", (double)s->parked_dropped}));
}

static void write_compactions(struct buf *out, const char *model, const struct metrics *m)
{
	static const char *const when[] = {"inline", "background"}, *const outcome[] = {"done", "failed"};
	const char *name = "kvasir:context_compactions_total";
	char extra[64];
	head(out, name, "counter",
	     "Summaries of older turns, made for an answer that waited or in the background, by outcome.");
	for (size_t i = 0; i < 2; i++) {
		for (size_t k = 0; k < METRICS_COMPACTION_OUTCOMES; k++) {
			snprintf(extra, sizeof extra, "when=\"%s\",outcome=\"%s\"", when[i], outcome[k]);
			series(out, name, model, extra);
			buf_printf(out, "%llu\n", (unsigned long long)m->compactions[i][k]);
		}
	}
	one(out, "kvasir:context_compacted_tokens_total", "counter", "Tokens by which summaries made prompts shorter.",
	    model, (double)m->compacted_tokens);
	one(out, "kvasir:responses_stored", "gauge", "Responses that can be asked for by their id.", model,
	    (double)m->stored_responses);
	one(out, "kvasir:responses_stored_bytes", "gauge", "Bytes they take.", model, (double)m->stored_bytes);
	one(out, "kvasir:responses_evicted_total", "counter", "Stored responses that made room for others.", model,
	    (double)m->stored_evicted);
}

static void write_kv(struct buf *out, const char *model, const struct engine_kv *kv, uint64_t page_bytes)
{
	double used = (double)kv->pages_total - kv->pages_free;
	parts(out, "kvasir:kv_pages", "gauge",
	      "KV pages, each under the first of these that it belongs to; sessions: the next turns of those that "
	      "wait.",
	      model, "holder",
	      PARTS({"running", kv->pages_running}, {"queued", kv->pages_queued}, {"sessions", kv->pages_sessions},
	            {"index", kv->pages_index}, {"nobody", kv->pages_free}));
	parts(out, "kvasir:kv_references", "gauge", "References on KV pages: one for each holder of a page.", model,
	      "holder",
	      PARTS({"running", (double)kv->refs_running}, {"queued", (double)kv->refs_queued},
	            {"sessions", (double)kv->refs_sessions}, {"index", (double)kv->refs_index}));
	parts(out, "kvasir:kv_tokens", "gauge", "Tokens whose KV is there, shared ones once for each holder.", model,
	      "holder",
	      PARTS({"running", (double)kv->tokens_running}, {"queued", (double)kv->tokens_queued},
	            {"sessions", (double)kv->tokens_sessions}));
	parts(out, "kvasir:kv_bytes", "gauge", "Bytes of the KV pool.", model, "state",
	      PARTS({"used", used * (double)page_bytes}, {"free", (double)kv->pages_free * (double)page_bytes}));
	one(out, "kvasir:kv_pages_shared", "gauge",
	    "KV pages that two or more of generations, queued requests and sessions use.", model, kv->pages_shared);
	one(out, "kvasir:kv_positions_unused", "gauge", "Positions of KV pages in use that hold no token.", model,
	    (double)kv->positions_unused);
	one(out, "kvasir:kv_fragmentation_ratio", "gauge", "The same as a share of all positions in use, 0 to 1.",
	    model, kv->fragmentation);
	one(out, "kvasir:kv_fragmentation_alarm", "gauge",
	    "1 from when fragmentation exceeds 0.2 until it is below 0.15 again.", model, kv->alarm);
	one(out, "kvasir:kv_drift_pages", "gauge",
	    "Difference between the books and the pages; anything but 0 is a bug.", model, (double)kv->drift_pages);
}

/* A figure that several things have, each of which is a structure. */
struct figure {
	const char *name, *type, *help;
	size_t offset; /* within the structure */
	enum { I32, I64, U64, REAL, BOOL } kind;
};

static double read_figure(const struct figure *f, const void *thing)
{
	const void *at = (const char *)thing + f->offset;
	switch (f->kind) {
	case I32: return *(const int32_t *)at;
	case I64: return (double)*(const int64_t *)at;
	case U64: return (double)*(const uint64_t *)at;
	case REAL: return *(const double *)at;
	case BOOL: return *(const bool *)at;
	}
	return 0;
}

/* Things of `size` bytes each, [n], with their names. */
struct things {
	const char *label;
	const char *const *names;
	const void *first;
	size_t size;
	int32_t n;
};

/* A family for each figure, and in it a series for each thing. */
static void write_figures(struct buf *out, const char *model, const struct things *t, const struct figure *figures,
                          size_t n)
{
	for (size_t i = 0; t->n > 0 && i < n; i++) {
		head(out, figures[i].name, figures[i].type, figures[i].help);
		for (int32_t k = 0; k < t->n; k++) {
			buf_printf(out, "%s{", figures[i].name);
			label(out, "model_name", model);
			buf_putc(out, ',');
			label(out, t->label, t->names[k]);
			buf_printf(out, "} %.17g\n",
			           read_figure(&figures[i], (const char *)t->first + (size_t)k * t->size));
		}
	}
}

static void write_tiers(struct buf *out, const char *model, const struct engine_tiers *t)
{
#define TIER(name, type, kind, member, help)                                                                           \
	{                                                                                                              \
		"kvasir:tier_" name, type, help, offsetof(struct engine_tier, member), kind                            \
	}
	static const struct figure figures[] = {
		TIER("pages", "gauge", I32, pages, "KV pages in a tier below the pool."),
		TIER("bytes", "gauge", U64, used_bytes, "Bytes they take."),
		TIER("limit_bytes", "gauge", U64, cap_bytes, "Bytes the tier may take."),
		TIER("loading", "gauge", I32, loading, "Pages on their way up."),
		TIER("writing", "gauge", I32, writing, "Pages on their way down."),
		TIER("off", "gauge", BOOL, off, "1 when the tier failed and is not used."),
		TIER("reconnects_total", "counter", U64, reconnects, "How often a server that failed came back."),
		TIER("pays", "gauge", BOOL, pays, "1 when a page comes back sooner than it is computed."),
		TIER("stored_total", "counter", U64, stored, "Pages that went down."),
		TIER("evicted_total", "counter", U64, evicted, "Pages that left the tier for others."),
		TIER("fetched_total", "counter", U64, fetched, "Pages that came back and joined the prefix index."),
		TIER("absent_total", "counter", U64, absent,
	             "Pages that a tier others use was asked for and did not have."),
		TIER("corrupt_total", "counter", U64, corrupt, "Pages whose stored bytes were not what was put."),
		TIER("unpaid_total", "counter", U64, dropped[ENGINE_TIER_DROP_UNPAID],
	             "Pages dropped since they are computed sooner than fetched."),
		TIER("busy_total", "counter", U64, dropped[ENGINE_TIER_DROP_BUSY],
	             "Pages dropped for want of a buffer."),
		TIER("rate_total", "counter", U64, dropped[ENGINE_TIER_DROP_RATE],
	             "Pages dropped for the bound on writes."),
		TIER("written_bytes_total", "counter", U64, bytes_written, "Bytes written."),
		TIER("read_bytes_total", "counter", U64, bytes_read, "Bytes read."),
		TIER("read_bytes_per_second", "gauge", REAL, read_bytes_per_s, "Measured speed of reading."),
		TIER("write_bytes_per_second", "gauge", REAL, write_bytes_per_s, "Measured speed of writing."),
	};
#undef TIER
	const char *names[ENGINE_TIER_KINDS];
	for (int32_t k = 0; k < t->n; k++)
		names[k] = t->tier[k].kind;
	write_figures(out, model, &(struct things){"tier", names, t->tier, sizeof *t->tier, t->n}, figures,
		      sizeof figures / sizeof *figures);
}

/* As many series as there are API keys, which are few and named by the operator. */
static void write_keys(struct buf *out, const struct metrics_gauges *g)
{
#define KEY(name, type, kind, member, help)                                                                            \
	{                                                                                                              \
		"kvasir:key_" name, type, help, offsetof(struct engine_tenant_usage, member), kind                     \
	}
	static const struct figure figures[] = {
		KEY("running", "gauge", I32, n_running, "Generations of an API key that take part in steps."),
		KEY("waiting", "gauge", I32, n_waiting, "Generations of an API key that wait for their first step."),
		KEY("sessions", "gauge", I32, n_sessions, "Sessions of an API key."),
		KEY("kv_pages", "gauge", I64, n_pages, "KV pages that an API key's generations are charged for."),
		KEY("kv_bytes", "gauge", U64, kv_bytes, "The same in bytes."),
		KEY("kv_limit_bytes", "gauge", U64, limits.kv_bytes, "How many it may be charged for; 0: any number."),
		KEY("requests_total", "counter", U64, requests, "Ended generations of an API key."),
		KEY("prompt_tokens_total", "counter", U64, prompt_tokens,
	            "Prompt tokens of an API key's ended generations."),
		KEY("cached_tokens_total", "counter", U64, cached_tokens, "Of these, tokens found in the cache."),
		KEY("generation_tokens_total", "counter", U64, generated_tokens, "Tokens generated for an API key."),
		KEY("refused_total", "counter", U64, refused,
	            "Requests and sessions that a limit of an API key refused."),
	};
#undef KEY
	write_figures(out, g->model, &(struct things){"key", g->key_names, g->keys, sizeof *g->keys, g->n_keys},
	              figures, sizeof figures / sizeof *figures);
}

static void write_mlflow(struct buf *out, const char *model, const struct mlflow_stats *s)
{
	parts(out, "kvasir:mlflow_records_total", "counter",
	      "Requests whose figures MLflow took, that found no room to wait for it, and that it refused.", model,
	      "outcome",
	      PARTS({"sent", (double)s->sent}, {"dropped", (double)s->dropped}, {"rejected", (double)s->rejected}));
	one(out, "kvasir:mlflow_failures_total", "counter", "Attempts to send figures to MLflow that failed.", model,
	    (double)s->failures);
	one(out, "kvasir:mlflow_queued", "gauge", "Requests whose figures wait to be sent to MLflow.", model,
	    s->queued);
	one(out, "kvasir:mlflow_up", "gauge", "1 when the last attempt succeeded.", model, s->up);
}

static void write_model(struct buf *out, const char *model, const struct engine_info *info)
{
	head(out, "vllm:cache_config_info", "gauge", "The layout of the KV cache; always 1.");
	buf_puts(out, "vllm:cache_config_info{");
	label(out, "model_name", model);
	buf_printf(out, ",block_size=\"%d\",num_gpu_blocks=\"%d\",num_cpu_blocks=\"0\"} 1\n", info->page_tokens,
		   info->n_pages);
	head(out, "kvasir:model_info", "gauge", "The loaded model; always 1.");
	buf_puts(out, "kvasir:model_info{");
	label(out, "model_name", model);
	buf_putc(out, ',');
	label(out, "arch", info->arch);
	buf_putc(out, ',');
	label(out, "quantization", info->quantization);
	buf_putc(out, ',');
	label(out, "backend", info->backend);
	buf_printf(out, ",n_ctx=\"%d\"} 1\n", info->n_ctx);
}

void metrics_write(const struct metrics *m, const struct metrics_gauges *g, struct buf *out)
{
	const struct engine_stats *s = &g->stats;
	const char *model = g->model;
	int32_t used = s->pages_total - s->pages_free - s->pages_cached; /* cached ones are free for the asking */
	const struct {
		const char *name, *type, *help;
		double value;
	} rows[] = {
		{"kvasir:ready", "gauge", "1 when new work is taken.", g->ready},
		{"vllm:num_requests_running", "gauge", "Generations that take part in steps.", s->n_running},
		{"vllm:num_requests_waiting", "gauge", "Generations that wait for their first step.", s->n_waiting},
		{"vllm:kv_cache_usage_perc", "gauge", "Share of KV pages in use, 0 to 1.",
	         s->pages_total ? (double)used / s->pages_total : 0},
		{"vllm:prompt_tokens_total", "counter", "Prompt tokens.", (double)s->prompt_tokens},
		{"vllm:generation_tokens_total", "counter", "Generated tokens.", (double)s->generated_tokens},
		{"vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache.",
	         (double)s->prompt_tokens},
		{"vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the cache.",
	         (double)s->cached_tokens},
		{"vllm:num_preemptions_total", "counter", "Times a generation's KV was dropped for others.",
	         (double)s->preemptions},
		{"kvasir:kv_pages_total", "gauge", "KV pages.", s->pages_total},
		{"kvasir:kv_pages_free", "gauge", "KV pages that nobody holds.", s->pages_free},
		{"kvasir:kv_pages_cached", "gauge", "KV pages that only the prefix index holds.", s->pages_cached},
		{"kvasir:kv_fallback_pages_total", "counter",
	         "KV pages kept in a wider type for a value that their own cannot hold.", (double)s->kv_fallback_pages},
		{"kvasir:kv_unsound_pages_total", "counter",
	         "KV pages with a value that is no number or infinite: they are not shared.",
	         (double)s->kv_unsound_pages},
		{"kvasir:kv_clamped_total", "counter",
	         "Keys and values beyond the range of halves, at which they were held.", (double)s->kv_clamped},
		{"kvasir:overflow_requests", "gauge", "Generations with more KV than the pool holds.",
	         s->overflow.requests},
		{"kvasir:overflow_pages", "gauge", "KV pages that they have below the pool.", s->overflow.pages},
		{"kvasir:overflow_moved_pages_total", "counter", "KV pages that went there.",
	         (double)s->overflow.moved_pages},
		{"kvasir:overflow_lost_total", "counter", "Generations that failed with the disk they were on.",
	         (double)s->overflow.lost_requests},
		{"kvasir:overflow_disk_off", "gauge", "1 when that disk failed and is not used.", s->overflow.disk_off},
		{"kvasir:overflow_read_bytes_total", "counter", "Bytes read from that disk.",
	         (double)s->overflow.bytes_read},
		{"kvasir:overflow_written_bytes_total", "counter", "Bytes written to it.",
	         (double)s->overflow.bytes_written},
		{"kvasir:sessions", "gauge", "Sessions.", s->n_sessions},
		{"kvasir:sessions_created_total", "counter", "Sessions made.", (double)s->sessions_created},
		{"kvasir:sessions_expired_total", "counter", "Sessions ended by heartbeat timeout or TTL.",
	         (double)s->sessions_expired},
		{"kvasir:sessions_deleted_total", "counter", "Sessions ended by their owner.",
	         (double)s->sessions_deleted},
		{"kvasir:queued_holds_dropped_total", "counter",
	         "Times a queued request let go of pages that it waited to use.", (double)s->holds_dropped},
		{"kvasir:prefix_pages", "gauge", "KV pages in the prefix index.", s->prefix_pages},
		{"kvasir:prefix_ghosts", "gauge", "Evicted pages that the policy remembers.", s->prefix_ghosts},
		{"kvasir:prefix_page_queries_total", "counter", "Full pages of admitted prompts.",
	         (double)s->prefix_queries},
		{"kvasir:prefix_page_hits_total", "counter", "Of these, pages that the prefix index knew.",
	         (double)s->prefix_hits},
		{"kvasir:prefix_inserted_total", "counter", "Pages put into it.", (double)s->prefix_inserted},
		{"kvasir:prefix_revived_total", "counter", "Of these, pages that the policy remembered as evicted.",
	         (double)s->prefix_revived},
		{"kvasir:prefix_collisions_total", "counter",
	         "Pages of an equal hash whose tokens turned out to differ.", (double)s->prefix_collisions},
		{"kvasir:computed_prompt_tokens_total", "counter", "Prompt tokens that had to be computed.",
	         (double)s->computed_prompt_tokens},
		{"kvasir:steps_total", "counter", "Steps of the batch.", (double)s->steps},
		{"kvasir:step_rows_total", "counter", "Rows of all steps.", (double)s->step_rows},
		{"kvasir:step_seconds_total", "counter", "Time spent in steps.", (double)s->step_ns / 1e9},
		{"kvasir:connections", "gauge", "Open connections.", g->connections},
		{"kvasir:websockets", "gauge", "Open WebSockets.", g->websockets},
		{"kvasir:websockets_parked", "gauge", "Open WebSockets that are idle and take one descriptor each.",
	         g->websockets_parked},
		{"kvasir:client_bytes", "gauge",
	         "Memory of connections: requests being read, output not sent, and what an idle one needs.",
	         (double)g->client_bytes},
		{"kvasir:log_lines_lost_total", "counter", "Log lines that stderr did not take.", (double)log_n_lost()},
		{"kvasir:api_requests_total", "counter", "Generation requests that have ended.",
	         (double)m->http_requests},
		{"kvasir:api_client_errors_total", "counter", "Generation requests that were refused (4xx).",
	         (double)m->http_client_errors},
		{"kvasir:api_server_errors_total", "counter",
	         "Generation requests that failed (5xx or a broken stream).", (double)m->http_server_errors},
		{"kvasir:api_cancelled_total", "counter",
	         "Generation requests that were cancelled or whose client left.", (double)m->http_cancelled},
	};
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
		one(out, rows[i].name, rows[i].type, rows[i].help, model, rows[i].value);
	write_outcomes(out, model, s);
	write_evictions(out, model, s);
	write_context(out, model, s);
	write_compactions(out, model, m);
	if (g->info) {
		write_kv(out, model, &s->kv, g->info->page_bytes);
		write_model(out, model, g->info);
	}
	write_tiers(out, model, &s->tiers);
	if (g->mlflow)
		write_mlflow(out, model, g->mlflow);
	write_keys(out, g);
#define X(member, name, bounds, help) write_histogram(out, name, help, model, bounds##_bounds, &m->member);
	METRICS_HISTOGRAMS(X)
#undef X
}
