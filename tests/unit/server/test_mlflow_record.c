/* What MLflow is told of requests. */
#include "tests/unit/unit.h"

#include "server/json.h"
#include "server/mlflow_record.h"

static struct mlflow_record record(void)
{
	return (struct mlflow_record){.usage = {.context = {.policy = "evict",
	                                                    .tokens_logical = 400,
	                                                    .tokens_resident = 300,
	                                                    .evicted_tokens = 100,
	                                                    .bytes = 4096},
	                                        .prompt_tokens = 200,
	                                        .cached_tokens = 50,
	                                        .completion_tokens = 20,
	                                        .n_preempted = 1,
	                                        .queue_ns = 1500000,
	                                        .prefill_ns = 20000000,
	                                        .decode_ns = 500000000,
	                                        .ttft_ns = 21500000},
	                              .total_ns = 521500000,
	                              .unix_ms = 1760000000123,
	                              .step = 7};
}

struct parsed {
	struct json_doc *doc;
	struct json root, metrics;
};

static void parse(const struct buf *b, struct parsed *p)
{
	struct error err;
	if (json_parse(buf_str(b), "The body", &p->doc, &p->root, &err) != STATUS_OK)
		fail_msg("%s: %s", err.message, b->data);
	p->metrics = json_get(&p->root, "metrics");
}

/* The value of the metric at this step; -1: there is none. */
static double metric(const struct parsed *p, const char *key, int64_t step)
{
	for (size_t i = 0; i < json_len(&p->metrics); i++) {
		struct json item = json_at(&p->metrics, i), k = json_get(&item, "key"), v = json_get(&item, "value"),
			    s = json_get(&item, "step");
		double value = -1;
		int64_t at = -1;
		struct error err;
		assert_int_equal(json_read_int(&s, 0, INT64_MAX, &at, &err), STATUS_OK);
		assert_int_equal(json_read_number(&v, -1e300, 1e300, &value, &err), STATUS_OK);
		if (at == step && str_is(json_text(&k), key))
			return value;
	}
	return -1;
}

static void a_request_has_lengths_shares_and_times(void **state)
{
	(void)state;
	struct mlflow_record r = record();
	struct buf b = BUF_INIT;
	struct parsed p;
	mlflow_write_batch("run \"1\"", &r, 1, &b);
	parse(&b, &p);
	struct json id = json_get(&p.root, "run_id");
	assert_true(str_is(json_text(&id), "run \"1\""));
	assert_true(metric(&p, "prompt_tokens", 7) == 200 && metric(&p, "cached_tokens", 7) == 50 &&
	            metric(&p, "generated_tokens", 7) == 20);
	assert_true(metric(&p, "cache_hit_rate", 7) == 0.25 && metric(&p, "shrink_ratio", 7) == 0.25);
	assert_true(metric(&p, "queue_ms", 7) == 1.5 && metric(&p, "ttft_ms", 7) == 21.5 &&
	            metric(&p, "e2e_ms", 7) == 521.5);
	assert_true(metric(&p, "tokens_per_s", 7) == 40 && metric(&p, "preemptions", 7) == 1 &&
	            metric(&p, "kv_bytes", 7) == 4096);
	assert_non_null(strstr(b.data, "\"timestamp\":1760000000123"));
	json_doc_free(p.doc);
	buf_free(&b);
}

static void what_there_is_none_of_is_left_out(void **state)
{
	(void)state;
	struct mlflow_record r = {.total_ns = 1000000, .step = 1};
	struct buf b = BUF_INIT;
	struct parsed p;
	mlflow_write_batch("x", &r, 1, &b);
	parse(&b, &p);
	assert_true(metric(&p, "e2e_ms", 1) == 1);
	assert_true(metric(&p, "ttft_ms", 1) == -1 && metric(&p, "cache_hit_rate", 1) == -1 &&
	            metric(&p, "shrink_ratio", 1) == -1 && metric(&p, "tokens_per_s", 1) == -1);
	json_doc_free(p.doc);
	buf_free(&b);
}

/* A batch has at most 1,000 metrics, and at most a megabyte. */
static void a_batch_is_within_what_the_api_takes(void **state)
{
	(void)state;
	static struct mlflow_record r[MLFLOW_BATCH];
	struct buf b = BUF_INIT;
	struct parsed p;
	for (int i = 0; i < MLFLOW_BATCH; i++) {
		r[i] = record();
		r[i].step = i;
	}
	mlflow_write_batch("x", r, MLFLOW_BATCH, &b);
	parse(&b, &p);
	assert_in_range(json_len(&p.metrics), MLFLOW_BATCH * 12, 1000);
	assert_true(b.len < 1000000);
	assert_true(metric(&p, "queue_ms", 0) == 1.5 && metric(&p, "queue_ms", MLFLOW_BATCH - 1) == 1.5);
	json_doc_free(p.doc);
	buf_free(&b);
}

UNIT_MAIN(cmocka_unit_test(a_request_has_lengths_shares_and_times), cmocka_unit_test(what_there_is_none_of_is_left_out),
          cmocka_unit_test(a_batch_is_within_what_the_api_takes))
