#include "tests/unit/unit.h"

#include <stdio.h>

#include "server/metrics.h"

static void expect_line(const struct buf *out, const char *line)
{
	char needle[256];
	snprintf(needle, sizeof needle, "\n%s\n", line);
	if (!strstr(out->data, needle))
		fail_msg("no line %s", line);
}

static struct buf render(const struct metrics *m, const char *model)
{
	static const struct engine_info info = {.arch = "llama",
						.quantization = "Q4_1",
						.backend = "cpu",
						.page_tokens = 16,
						.n_pages = 64,
						.n_ctx = 2048};
	struct metrics_gauges g = {.model = model, .info = &info, .ready = true};
	struct buf out = BUF_INIT;
	g.stats.pages_total = 64;
	g.stats.pages_free = 48;
	g.stats.n_running = 3;
	g.stats.n_waiting = 2;
	g.stats.finished_stop = 5;
	g.stats.generated_tokens = UINT64_C(9007199254740993);
	metrics_write(m, &g, &out);
	return out;
}

static void series_have_the_names_that_dashboards_read(void **state)
{
	(void)state;
	struct metrics m = {0};
	struct buf out = render(&m, "m");
	expect_line(&out, "vllm:num_requests_running{model_name=\"m\"} 3");
	expect_line(&out, "vllm:num_requests_waiting{model_name=\"m\"} 2");
	expect_line(&out, "vllm:kv_cache_usage_perc{model_name=\"m\"} 0.25");
	expect_line(&out, "vllm:request_success_total{model_name=\"m\",finished_reason=\"stop\"} 5");
	expect_line(&out, "vllm:cache_config_info{model_name=\"m\",block_size=\"16\",num_gpu_blocks=\"64\",num_cpu_"
			  "blocks=\"0\"} 1");
	expect_line(&out, "# TYPE vllm:time_to_first_token_seconds histogram");
	expect_line(&out, "vllm:generation_tokens_total{model_name=\"m\"} 9007199254740992");
	buf_free(&out);
}

static void the_kv_cache_is_told_by_holder_and_by_key(void **state)
{
	(void)state;
	struct metrics m = {0};
	static const struct engine_info info = {.page_tokens = 16,
	                                        .n_pages = 64,
	                                        .kv_bytes = 64 * 1024,
	                                        .page_bytes = 1024,
	                                        .arch = "",
	                                        .quantization = "",
	                                        .backend = ""};
	static const struct engine_tenant_usage keys[] = {
		{.id = 1, .n_pages = 3, .kv_bytes = 3072, .limits.kv_bytes = 9000, .refused = 2},
		{.id = 2, .n_running = 1}};
	static const char *const names[] = {"alice", "bob"};
	struct metrics_gauges g = {.model = "m", .info = &info, .keys = keys, .key_names = names, .n_keys = 2};
	struct buf out = BUF_INIT;
	g.stats.kv = (struct engine_kv){.pages_total = 64,
	                                .pages_free = 50,
	                                .pages_running = 6,
	                                .pages_sessions = 8,
	                                .refs_running = 9,
	                                .positions_unused = 30,
	                                .fragmentation = 0.25,
	                                .alarm = true};
	g.stats.preempted[ENGINE_ROOM_CAP] = 4;
	g.stats.context_evicted[1] = 320;
	g.stats.context_merged[1] = 48;
	g.stats.context_fallback[2] = 5;
	g.stats.context_triggered[ENGINE_TRIGGER_FREE_PAGES] = 6;
	m.compactions[1][METRICS_COMPACTION_DONE] = 3;
	g.stats.prefix_evictions = 7;
	g.stats.prefix_evictions_decode = 2;
	metrics_write(&m, &g, &out);
	expect_line(&out, "kvasir:kv_pages{model_name=\"m\",holder=\"running\"} 6");
	expect_line(&out, "kvasir:kv_pages{model_name=\"m\",holder=\"nobody\"} 50");
	expect_line(&out, "kvasir:kv_references{model_name=\"m\",holder=\"running\"} 9");
	expect_line(&out, "kvasir:kv_bytes{model_name=\"m\",state=\"used\"} 14336");
	expect_line(&out, "kvasir:kv_fragmentation_ratio{model_name=\"m\"} 0.25");
	expect_line(&out, "kvasir:kv_fragmentation_alarm{model_name=\"m\"} 1");
	expect_line(&out, "kvasir:preemptions_total{model_name=\"m\",reason=\"cap\"} 4");
	expect_line(&out, "kvasir:prefix_evictions_total{model_name=\"m\",reason=\"prompt\"} 5");
	expect_line(&out, "kvasir:context_evicted_tokens_total{model_name=\"m\",policy=\"streaming\"} 320");
	expect_line(&out, "kvasir:context_merged_tokens_total{model_name=\"m\",policy=\"streaming\"} 48");
	expect_line(&out, "kvasir:context_fallback_pages_total{model_name=\"m\",policy=\"evict\"} 5");
	expect_line(&out, "kvasir:context_triggers_total{model_name=\"m\",trigger=\"free_pages\"} 6");
	expect_line(&out, "kvasir:context_compactions_total{model_name=\"m\",when=\"background\",outcome=\"done\"} 3");
	expect_line(&out, "kvasir:key_kv_pages{model_name=\"m\",key=\"alice\"} 3");
	expect_line(&out, "kvasir:key_kv_limit_bytes{model_name=\"m\",key=\"alice\"} 9000");
	expect_line(&out, "kvasir:key_refused_total{model_name=\"m\",key=\"alice\"} 2");
	expect_line(&out, "kvasir:key_running{model_name=\"m\",key=\"bob\"} 1");
	buf_free(&out);
	/* Whoever may not see keys sees none. */
	g.n_keys = 0;
	metrics_write(&m, &g, &out);
	assert_null(strstr(out.data, "key_"));
	buf_free(&out);
}

static void histograms_are_cumulative_and_end_in_infinity(void **state)
{
	(void)state;
	struct metrics m = {0};
	struct engine_usage u = {
		.prompt_tokens = 7, .completion_tokens = 3, .ttft_ns = 15000000, .decode_ns = 40000000};
	struct buf out;
	metrics_finished(&m, &u, 55000000);
	u.ttft_ns = INT64_C(700000000000);
	metrics_finished(&m, &u, 55000000);
	metrics_token(&m, 20000000);
	out = render(&m, "m");
	expect_line(&out, "vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.01\"} 0");
	expect_line(&out, "vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.02\"} 1");
	expect_line(&out, "vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"640\"} 1");
	expect_line(&out, "vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"+Inf\"} 2");
	expect_line(&out, "vllm:time_to_first_token_seconds_count{model_name=\"m\"} 2");
	expect_line(&out, "vllm:request_time_per_output_token_seconds_bucket{model_name=\"m\",le=\"0.025\"} 2");
	expect_line(&out, "vllm:inter_token_latency_seconds_bucket{model_name=\"m\",le=\"0.025\"} 1");
	expect_line(&out, "vllm:request_prompt_tokens_sum{model_name=\"m\"} 14");
	buf_free(&out);
}

static void label_values_are_escaped(void **state)
{
	(void)state;
	struct metrics m = {0};
	struct buf out = render(&m, "a\"b\\c\nd");
	expect_line(&out, "vllm:num_requests_running{model_name=\"a\\\"b\\\\c\\nd\"} 3");
	buf_free(&out);
}

UNIT_MAIN(cmocka_unit_test(the_kv_cache_is_told_by_holder_and_by_key),
	  cmocka_unit_test(series_have_the_names_that_dashboards_read),
	  cmocka_unit_test(histograms_are_cumulative_and_end_in_infinity), cmocka_unit_test(label_values_are_escaped))
