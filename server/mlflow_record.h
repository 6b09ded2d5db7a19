/*
 * What is told of a request, as MLflow takes it; apart from the sending, so that it can be looked at without a server.
 */
#pragma once

#include "engine/base/buf.h"
#include "engine/engine.h"

struct mlflow_record {
	struct engine_usage usage;
	int64_t total_ns, unix_ms, step; /* step: its number in the run */
};

enum { MLFLOW_BATCH = 64 }; /* records of a batch: with their figures fewer than the 1,000 metrics that the API takes */

/*
 * Appends the body of runs/log-batch: for each record prompt_tokens, cached_tokens, generated_tokens, cache_hit_rate
 * (cached by prompt tokens), shrink_ratio (let go of by a context policy, by all tokens), kv_bytes, preemptions,
 * queue_ms, ttft_ms, prefill_ms, decode_ms, e2e_ms and tokens_per_s. A figure that there is none of is left out.
 */
void mlflow_write_batch(const char *run_id, const struct mlflow_record *records, size_t n, struct buf *out);
