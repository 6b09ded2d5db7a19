#include "server/mlflow_record.h"

#include <math.h>

static double share(double part, double whole)
{
	return whole > 0 ? part / whole : NAN;
}

static double ms(int64_t ns)
{
	return (double)ns / 1e6;
}

static void write_record(const struct mlflow_record *r, bool *first, struct buf *out)
{
	const struct engine_usage *u = &r->usage;
	const struct {
		const char *key;
		double value;
	} rows[] = {
		{"prompt_tokens", u->prompt_tokens},
		{"cached_tokens", u->cached_tokens},
		{"generated_tokens", u->completion_tokens},
		{"cache_hit_rate", share(u->cached_tokens, u->prompt_tokens)},
		{"shrink_ratio", u->context.policy ? share(u->context.tokens_logical - u->context.tokens_resident,
							   u->context.tokens_logical)
						   : NAN},
		{"kv_bytes", u->context.policy ? (double)u->context.bytes : NAN},
		{"preemptions", u->n_preempted},
		{"queue_ms", ms(u->queue_ns)},
		{"ttft_ms", u->ttft_ns > 0 ? ms(u->ttft_ns) : NAN},
		{"prefill_ms", ms(u->prefill_ns)},
		{"decode_ms", ms(u->decode_ns)},
		{"e2e_ms", ms(r->total_ns)},
		{"tokens_per_s", share(u->completion_tokens * 1e9, (double)u->decode_ns)},
	};
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		if (!isfinite(rows[i].value))
			continue;
		buf_printf(out, "%s{\"key\":\"%s\",\"value\":", *first ? "" : ",", rows[i].key);
		buf_json_number(out, rows[i].value);
		buf_printf(out, ",\"timestamp\":%lld,\"step\":%lld}", (long long)r->unix_ms, (long long)r->step);
		*first = false;
	}
}

void mlflow_write_batch(const char *run_id, const struct mlflow_record *records, size_t n, struct buf *out)
{
	bool first = true;
	buf_puts(out, "{\"run_id\":");
	buf_json_string(out, run_id, strlen(run_id));
	buf_puts(out, ",\"metrics\":[");
	for (size_t i = 0; i < n; i++)
		write_record(&records[i], &first, out);
	buf_puts(out, "]}");
}
