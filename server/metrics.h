/*
 * Latency histograms of finished generations, and their rendering in Prometheus' text format. The names, units and
 * bucket bounds of series that vLLM also has are vLLM's (docs.vllm.ai, "Production Metrics"), so that its dashboards
 * and the Gateway API inference extension read them; what only this server has is called kvasir:*.
 */
#pragma once

#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/engine.h"
#include "server/mlflow.h"

/* One row per histogram: member, name, bounds (below), help. */
#define METRICS_HISTOGRAMS(X)                                                                                          \
	X(ttft, "vllm:time_to_first_token_seconds", latency, "Time from submission to the first token.")               \
	X(itl, "vllm:inter_token_latency_seconds", token, "Time between two tokens of one generation.")                \
	X(tpot, "vllm:request_time_per_output_token_seconds", token,                                                   \
	  "Mean time per token after the first, by request.")                                                          \
	X(e2e, "vllm:e2e_request_latency_seconds", request, "Time from submission to the end.")                        \
	X(queue, "vllm:request_queue_time_seconds", request, "Time from submission to the first step.")                \
	X(prefill, "vllm:request_prefill_time_seconds", request, "Time from the first step to the first token.")       \
	X(decode, "vllm:request_decode_time_seconds", request, "Time from the first token to the end.")                \
	X(inference, "vllm:request_inference_time_seconds", request, "Prefill and decode time.")                       \
	X(prompt_tokens, "vllm:request_prompt_tokens", count, "Prompt tokens by request.")                             \
	X(generation_tokens, "vllm:request_generation_tokens", count, "Generated tokens by request.")

enum { METRICS_MAX_BOUNDS = 24 };
enum { METRICS_COMPACTION_DONE, METRICS_COMPACTION_FAILED, METRICS_COMPACTION_OUTCOMES };

struct histogram {
	uint64_t buckets[METRICS_MAX_BOUNDS + 1]; /* not cumulative; the last one has no upper bound */
	uint64_t count;
	double sum;
};

struct metrics {
#define X(member, name, bounds, help) struct histogram member;
	METRICS_HISTOGRAMS(X)
#undef X
	uint64_t http_requests; /* of generation endpoints, by outcome */
	uint64_t http_client_errors, http_server_errors, http_cancelled;
	uint64_t compactions[2][METRICS_COMPACTION_OUTCOMES]; /* in line, in the background */
	uint64_t compacted_tokens; /* by which prompts became shorter */
	uint64_t stored_responses, stored_bytes, stored_evicted; /* of the store, filled in when they are asked for */
};

/* A finished generation. total_ns: from submission to the end. */
void metrics_finished(struct metrics *m, const struct engine_usage *usage, int64_t total_ns);
/* A token came this long after the one before it. */
void metrics_token(struct metrics *m, int64_t since_last_ns);

struct metrics_gauges {
	const char *model;		/* label model_name */
	const struct engine_info *info; /* NULL while the model is not loaded */
	struct engine_stats stats;
	int32_t connections, websockets;
	bool ready;
	const struct mlflow_stats *mlflow; /* NULL: figures go to no tracking server */
	/* What each API key holds and has used, [n_keys], and their names; none where the reader must not know. */
	const struct engine_tenant_usage *keys;
	const char *const *key_names;
	int32_t n_keys;
};
/* Appends the exposition: "text/plain; version=0.0.4". */
void metrics_write(const struct metrics *m, const struct metrics_gauges *g, struct buf *out);
