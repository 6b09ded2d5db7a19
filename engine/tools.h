/*
 * Offline tools of the engine: they work in the calling thread and need no engine (engine.h). What a file is, what it
 * takes, its tokenizer and its chat template by themselves, replays of page traffic, and benchmarks.
 */
#pragma once

#include "engine/engine.h"


/* Appends a description of a GGUF file: text for people, or one JSON object. */
enum status engine_inspect(const char *path, bool json, struct buf *out, struct error *err);

/* What a model takes, without loading it. */
struct engine_plan_params {
	const char *model_path;
	int32_t context_tokens; /* 0: as trained, or as far as rope_scaling reaches */
	const char *rope_scaling; /* as in engine_options */
	int32_t n_sessions;     /* conversations of that length to hold at once */
	int32_t step_tokens, max_running; /* 0: the engine's defaults */
	uint64_t memory_bytes;  /* for everything; 0: what the plan itself comes to */
	double tokens_per_s;    /* KV written by all clients together; 0: not known */
	const char *kv_type;    /* as in engine_options */
	bool kv_bounds;
	/* Below a pool of pool_bytes, for conversations larger than it. */
	uint64_t kv_overflow_bytes, kv_overflow_disk_bytes;
};

struct engine_plan {
	char arch[32];
	struct engine_rope rope;
	int32_t n_ctx, n_layer, n_head, n_head_kv, head_dim, page_tokens;
	int32_t window, n_windowed;   /* positions that rows see in n_windowed of the layers; 0: all see all */
	/* of a whole context that is computed: where all layers have a window, pages before it can go */
	uint64_t kv_bytes_running;
	uint64_t weights_bytes;       /* of the tensors in the file */
	uint64_t activation_bytes;    /* of a step */
	uint64_t kv_bytes_per_token;
	uint64_t page_bytes;          /* with the padding to its stride */
	uint64_t bounds_bytes_per_page; /* which the figures below contain; 0: there are none */
	/* a whole context, in whole pages; narrow KV: with what is set aside for wide copies */
	uint64_t kv_bytes_per_session;
	uint64_t kv_bytes;            /* n_sessions of them */
	uint64_t total_bytes;         /* weights, activations and kv_bytes */
	uint64_t pool_bytes;          /* what memory_bytes leaves for KV, in whole pages: */
	uint64_t pool_pages;
	int64_t sessions_that_fit;    /* whole contexts in it */
	double idle_seconds;          /* how long an idle session's pages stay at tokens_per_s; 0: not known */
	/* The longest conversation: in the pool; and with what is below it, or passing through it, n_ctx at most. */
	int32_t pool_tokens, longest_tokens;
	/* What is taken below it; with int8 and fp8_e4m3 some host memory in any case. */
	uint64_t overflow_ram_bytes, overflow_disk_bytes;
};

/* IO, CORRUPT and UNSUPPORTED as for loading; INVALID for impossible numbers. */
enum status engine_plan(const struct engine_plan_params *params, struct engine_plan *out, struct error *err);

/*
 * Whether this build and this machine have the device (as in engine_options): opens and closes it. The error says what
 * lacks.
 */
enum status engine_device_check(const char *device, struct error *err);

/* A vocabulary without a model. */
struct engine_vocab;
enum status engine_vocab_open(const char *path, struct engine_vocab **out, struct error *err);
void engine_vocab_close(struct engine_vocab *v); /* NULL is allowed */
/* *ids is malloc'd. */
enum status engine_vocab_encode(const struct engine_vocab *v, const char *text, size_t n, bool add_special,
                                bool parse_special, int32_t **ids, size_t *n_ids, struct error *err);

/* As engine_split(); *chunks is malloc'd. */
enum status engine_vocab_split(const struct engine_vocab *v, struct str text, const struct engine_split_params *params,
                               struct engine_chunk **chunks, size_t *n_chunks, struct error *err);

/* The source of a chat template that comes with the engine, or NULL when there is none of that name. */
const char *engine_builtin_template(const char *name);

/* Compiles and renders a template once; vars is a dict. The prompt is appended to `out`. */
struct engine_template;
enum status engine_template_open(const char *source, size_t n, struct engine_template **out, struct error *err);
void engine_template_close(struct engine_template *t);
enum status engine_template_render(const struct engine_template *t, const struct value *vars, int64_t now_unix_s,
                                   struct buf *out, struct error *err);

/*
 * A trace of prompts, as blocks of tokens named by their content and all before it, to replay on the code that evicts
 * pages. Times are milliseconds, not falling.
 */
struct engine_trace;
enum status engine_trace_create(struct engine_trace **out);
void engine_trace_destroy(struct engine_trace *t); /* NULL is allowed */
/*
 * Adds a prompt of n blocks at a time; output_tokens were generated for it. INVALID when the time is before the last
 * one's; NOMEM, LIMIT.
 */
enum status engine_trace_add(struct engine_trace *t, int64_t time_ms, const uint64_t *blocks, size_t n,
                             int64_t output_tokens, struct error *err);

struct engine_trace_info {
	uint64_t n_prompts, n_blocks, n_distinct_blocks;
	int64_t span_ms; /* from the first prompt to the last */
};
void engine_trace_info(const struct engine_trace *t, struct engine_trace_info *out);

/* The bound of engine_replay(): evicts what is used again last, knowing the trace. */
#define ENGINE_REPLAY_BELADY "belady"

struct engine_replay_result {
	uint64_t hits;      /* blocks found, from the start of each prompt to its first miss */
	uint64_t evictions;
	int64_t cpu_ns;     /* of the calling thread */
};
/*
 * Replays the trace over a cache of `capacity_blocks` that starts empty, with its times multiplied by time_scale.
 * Prompts take no time; one keeps its own blocks while it is replayed, and what of it does not fit is not cached.
 * INVALID: policy, capacity, scale.
 */
enum status engine_replay(const struct engine_trace *t, const char *policy, int32_t capacity_blocks, double time_scale,
                          struct engine_replay_result *out, struct error *err);

/*
 * Measures a model on a device, in the calling thread and without an engine: the forward pass over paged KV, without
 * sampling.
 *
 * For each depth, that many tokens of context are put in place; then each prompt length is measured on top of them (one
 * sequence, chunks of a step, one row of logits at the end) and, for each batch size, `decode_tokens` steps of one
 * token for each sequence.
 */
enum { ENGINE_BENCH_BATCH_MAX = 256, ENGINE_BENCH_RUNS_MAX = 100, ENGINE_BENCH_OPS_MAX = 16 };

struct engine_bench_params {
	const char *model_path;
	const char *device; /* NULL: "cpu" */
	int32_t n_threads;  /* 0: one per physical core */
	const int32_t *prefill; /* [n_prefill] tokens of a prompt, each at least 1 */
	size_t n_prefill;
	int32_t decode_tokens;  /* 0: no decoding */
	const int32_t *depth;   /* [n_depths] tokens of context */
	size_t n_depths;
	const int32_t *batch;   /* [n_batches] sequences that decode together */
	size_t n_batches;
	int32_t runs;           /* of each test */
	/* fill the context with random keys and values instead of computing them: quick, and the same work to read */
	bool random_kv;
	const char *kv_type;    /* how KV is kept, as in engine_options; no page has a copy in f16 beside it */
	const char *rope_scaling; /* as in engine_options */
};

struct engine_bench_info {
	char backend[64], detail[128];
	struct engine_rope rope;
	int32_t n_threads;
	uint64_t memory_bytes, cache_bytes; /* sizes of what was read */
	double memory_bytes_per_s;          /* reading more than any cache holds; 0: the device cannot tell */
	double cache_bytes_per_s;           /* reading the same small part again and again */
};

struct engine_bench_row {
	bool prefill; /* else decode */
	int32_t tokens, depth, batch; /* tokens of each sequence */
	int32_t runs;
	double tokens_per_s;      /* of all sequences together; median of the runs */
	double best_tokens_per_s;
	double bytes_per_s;       /* of weights and KV, each byte counted once a step, at the median speed */
	double bytes_per_token;
	/* the best that plain reading of memory reached between the runs; 0: the device cannot tell */
	double read_bytes_per_s;
	struct {
		const char *name;
		/* of the time of a run of its own, in which each operation is waited for; "host": what is left */
		double share;
	} ops[ENGINE_BENCH_OPS_MAX];
	size_t n_ops;
};

struct engine_bench_sink {
	void *arg;
	void (*info)(void *arg, const struct engine_bench_info *info); /* once, first */
	void (*row)(void *arg, const struct engine_bench_row *row);
	/* A test that goes beyond the context: engine_rope.reach. */
	void (*left_out)(void *arg, bool prefill, int32_t tokens, int32_t depth);
};

/* INVALID names the number that makes no sense; IO, CORRUPT, UNSUPPORTED and NOMEM as for loading. */
enum status engine_bench(const struct engine_bench_params *params, const struct engine_bench_sink *sink,
                         struct error *err);

/*
 * Measures what long conversations cost under each context policy, and what is lost: an engine of its own, one
 * conversation after the other, in the calling thread.
 *
 * For each length, a prompt of that many tokens is made of a text, with pass keys hidden at even distances ("The pass
 * key of the red door is 31415."). Then the answer is forced: the text goes on for a while, and each pass key is asked
 * for and given. What the model would have said at each of these tokens is compared with what it would have said with
 * everything kept; a second question in the same session is answered freely. Each policy reads the same tokens, and
 * nothing of what another one has computed.
 */
enum { ENGINE_LONG_KEYS_MAX = 16 };

struct engine_long_policy {
	const char *label;             /* in rows */
	struct engine_context context; /* max_cache_size 0, unless by_share: what cache_permille says */
};

struct engine_long_params {
	const char *model_path, *device, *kv_type, *rope_scaling; /* as in engine_options */
	int32_t n_threads;
	const int32_t *length;  /* [n_lengths] tokens of the prompt */
	size_t n_lengths;
	/* [n_policies]; "full" is computed in any case, since others are compared with it */
	const struct engine_long_policy *policy;
	size_t n_policies;
	int32_t cache_permille; /* of the length, that other policies than full may keep */
	int32_t n_keys;         /* pass keys in each prompt */
	int32_t text_tokens;    /* of the text that goes on behind the prompt */
	int32_t answer_tokens;  /* of the second answer; 0: it is not asked for */
	const char *text;       /* what prompts are made of, [text_n]; NULL: sentences that are made up */
	size_t text_n;
	bool speed_only;        /* times and bytes: for models whose words mean nothing */
	/* times are those that the process had a processor, as on a machine that others use too; with one thread */
	bool cpu_time;
};

struct engine_long_info {
	const char *backend, *kv_type;
	int32_t n_threads, n_ctx;
	struct engine_rope rope;
	uint64_t kv_bytes_per_token;
};

/* NAN: not measured. */
struct engine_long_row {
	const char *policy;
	int32_t length;
	int32_t tokens_logical, tokens_resident; /* at the end of the forced answer */
	uint64_t resident_bytes;
	int32_t pages_back, tokens_recomputed; /* by page_in */
	double ttft_s;         /* of the prompt, nothing of which was cached */
	double tokens_per_s;   /* of the forced answer */
	/*
	 * mean Kullback-Leibler divergence of a token's distribution from full's, in nats: where the text goes on, and
	 * where keys are asked for and given
	 */
	double kl_text, kl_recall;
	/* share of the tokens of keys, those with digits in them, that are the most likely ones */
	double passkey;
	double passkey_logprob; /* their mean log-probability */
	double agreement;      /* share of the second answer before it differs from full's */
};

struct engine_long_sink {
	void *arg;
	void (*info)(void *arg, const struct engine_long_info *info); /* once, first */
	void (*row)(void *arg, const struct engine_long_row *row);
	void (*left_out)(void *arg, const char *policy, int32_t length, const char *why);
};

/*
 * INVALID names what makes no sense; else as for loading. What a policy refuses, or no context holds, is left out and
 * not an error.
 */
enum status engine_long(const struct engine_long_params *params, const struct engine_long_sink *sink,
                        struct error *err);
