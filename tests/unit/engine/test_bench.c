#include "tests/unit/unit.h"

#include <math.h>

#include "engine/tools.h"
#include "tests/support/tiny_model.h"

enum { CONTEXT = 128, ROWS_MAX = 16 };

static char model_path[64];

static int make_model(void **state)
{
	(void)state;
	return tiny_model_write(model_path, CONTEXT, NULL, 1) ? 0 : -1;
}

static int remove_model(void **state)
{
	(void)state;
	return unlink(model_path);
}

struct seen {
	struct engine_bench_info info;
	struct engine_bench_row rows[ROWS_MAX];
	size_t n_infos, n_rows, n_left_out;
	int32_t left_tokens, left_depth;
};

static void see_info(void *arg, const struct engine_bench_info *info)
{
	struct seen *s = arg;
	assert_int_equal(s->n_rows, 0);
	s->info = *info;
	s->n_infos++;
}

static void see_row(void *arg, const struct engine_bench_row *row)
{
	struct seen *s = arg;
	assert_true(s->n_rows < ROWS_MAX);
	s->rows[s->n_rows++] = *row;
}

static void see_left_out(void *arg, bool prefill, int32_t tokens, int32_t depth)
{
	struct seen *s = arg;
	(void)prefill;
	s->n_left_out++;
	s->left_tokens = tokens;
	s->left_depth = depth;
}

static enum status bench(const struct engine_bench_params *p, struct seen *seen, struct error *err)
{
	memset(seen, 0, sizeof *seen);
	const struct engine_bench_sink sink = {seen, see_info, see_row, see_left_out};
	return engine_bench(p, &sink, err);
}

static const int32_t prefill[] = {20, 100}, depth[] = {48, 0}, batch[] = {1, 3};

static struct engine_bench_params params(void)
{
	return (struct engine_bench_params){
	        .model_path = model_path,
	        .device = "cpu-reference",
	        .n_threads = 1,
	        .prefill = prefill,
	        .n_prefill = 2,
	        .decode_tokens = 4,
	        .depth = depth,
	        .n_depths = 2,
	        .batch = batch,
	        .n_batches = 2,
	        .runs = 2,
	};
}

static void check_row(const struct engine_bench_row *row)
{
	double shares = 0;
	assert_true(row->tokens_per_s > 0 && isfinite(row->tokens_per_s));
	assert_true(row->best_tokens_per_s >= row->tokens_per_s);
	assert_true(row->read_bytes_per_s > 0);
	assert_true(fabs(row->bytes_per_s - row->tokens_per_s * row->bytes_per_token) <= 1e-6 * row->bytes_per_s);
	for (size_t i = 0; i < row->n_ops; i++) {
		assert_true(row->ops[i].share >= 0 && row->ops[i].share <= 1);
		assert_non_null(row->ops[i].name);
		shares += row->ops[i].share;
	}
	assert_true(shares > 0.99 && shares < 1.01);
}

static double share_of(const struct engine_bench_row *row, const char *name)
{
	for (size_t i = 0; i < row->n_ops; i++)
		if (strcmp(row->ops[i].name, name) == 0)
			return row->ops[i].share;
	fail_msg("there is no operation \"%s\"", name);
	return 0;
}

static void every_test_that_fits_the_context_is_measured_once_from_the_smallest_depth_on(void **state)
{
	(void)state;
	static const struct {
		bool prefill;
		int32_t tokens, depth, batch;
	} wanted[] = {
		{true, 20, 0, 1},  {true, 100, 0, 1}, {false, 4, 0, 1},  {false, 4, 0, 3},
		{true, 20, 48, 1}, {false, 4, 48, 1}, {false, 4, 48, 3},
	};
	struct engine_bench_params p = params();
	struct seen seen;
	struct error err;
	assert_int_equal(bench(&p, &seen, &err), STATUS_OK);
	assert_int_equal(seen.n_infos, 1);
	assert_string_equal(seen.info.backend, "cpu-reference");
	assert_int_equal(seen.info.n_threads, 1);
	assert_true(seen.info.memory_bytes_per_s > 0 && seen.info.cache_bytes_per_s > 0);
	assert_int_equal(seen.n_rows, sizeof wanted / sizeof wanted[0]);
	for (size_t i = 0; i < seen.n_rows; i++) {
		const struct engine_bench_row *row = &seen.rows[i];
		assert_int_equal(row->prefill, wanted[i].prefill);
		assert_int_equal(row->tokens, wanted[i].tokens);
		assert_int_equal(row->depth, wanted[i].depth);
		assert_int_equal(row->batch, wanted[i].batch);
		assert_int_equal(row->runs, 2);
		check_row(row);
	}
	assert_true(share_of(&seen.rows[2], "attention") > 0 && share_of(&seen.rows[2], "ffn_gate_up") > 0);
	/* 48 + 100 tokens are more than the context has. */
	assert_int_equal(seen.n_left_out, 1);
	assert_int_equal(seen.left_tokens, 100);
	assert_int_equal(seen.left_depth, 48);
}

static void bytes_are_those_of_weights_and_kv(void **state)
{
	(void)state;
	enum {
		Q = TINY_HEADS * TINY_HEAD_DIM,
		KV = TINY_KV_HEADS * TINY_HEAD_DIM,
		LAYER_FLOATS = TINY_EMBD * (2 * Q + 2 * KV + 3 * TINY_FF),
		KV_BYTES = 2 * TINY_LAYERS * KV * 2, /* of a token */
	};
	struct engine_bench_params p = params();
	struct seen seen;
	struct error err;
	p.device = "cpu";
	assert_int_equal(bench(&p, &seen, &err), STATUS_OK);
	const struct engine_bench_row *one = &seen.rows[2], *three = &seen.rows[3], *deep = &seen.rows[5],
				      *deep_three = &seen.rows[6];
	/*
	 * Tokens 0..3 attend to 1..4 positions. Packing may pad matrices, never more than to whole tiles of 64 outputs.
	 */
	double weights = one->bytes_per_token - 2.5 * KV_BYTES;
	if (strcmp(seen.info.backend, "cpu-reference") != 0) {
		assert_true(weights >= 4 * (TINY_LAYERS * LAYER_FLOATS + TINY_EMBD * TINY_VOCAB));
		assert_true(weights <= 3 * 4 * (TINY_LAYERS * LAYER_FLOATS + TINY_EMBD * TINY_VOCAB));
	}
	/* A batch reads the weights once, and the KV of each of its sequences. */
	assert_true(fabs(three->bytes_per_token - (weights / 3 + 2.5 * KV_BYTES)) < 1);
	assert_true(fabs(deep->bytes_per_token - (weights + 50.5 * KV_BYTES)) < 1);
	assert_true(fabs(deep_three->bytes_per_token - (weights / 3 + 50.5 * KV_BYTES)) < 1);
}

static void a_random_context_is_as_much_to_read(void **state)
{
	(void)state;
	struct engine_bench_params p = params();
	struct seen computed, random;
	struct error err;
	p.n_prefill = 0;
	p.n_depths = 1;
	p.runs = 1;
	assert_int_equal(bench(&p, &computed, &err), STATUS_OK);
	p.random_kv = true;
	assert_int_equal(bench(&p, &random, &err), STATUS_OK);
	assert_int_equal(random.n_rows, 2);
	for (size_t i = 0; i < 2; i++)
		assert_true(computed.rows[i].bytes_per_token == random.rows[i].bytes_per_token);
}

static void refuses(const struct engine_bench_params *p, enum status status, const char *param, const char *part)
{
	struct seen seen;
	struct error err = {0};
	assert_int_equal(bench(p, &seen, &err), status);
	assert_string_equal(err.param, param);
	if (!strstr(err.message, part))
		fail_msg("\"%s\" is not in \"%s\"", part, err.message);
	assert_int_equal(seen.n_rows, 0);
}

static void what_makes_no_sense_is_refused_by_name(void **state)
{
	(void)state;
	const int32_t zero = 0, minus = -1, many = ENGINE_BENCH_BATCH_MAX + 1, far = CONTEXT;
	struct engine_bench_params p = params();
	p.prefill = &zero;
	p.n_prefill = 1;
	refuses(&p, STATUS_INVALID, "prefill", "0 is not from 1");
	p = params();
	p.depth = &minus;
	p.n_depths = 1;
	refuses(&p, STATUS_INVALID, "depth", "-1 is not from 0");
	p.n_depths = 0;
	refuses(&p, STATUS_INVALID, "depth", "at least one");
	p = params();
	p.batch = &zero;
	refuses(&p, STATUS_INVALID, "batch", "0 is not from 1");
	p.batch = &many;
	p.n_batches = 1;
	refuses(&p, STATUS_INVALID, "batch", "is not from 1 to 256");
	p = params();
	p.runs = 0;
	refuses(&p, STATUS_INVALID, "runs", "0 is not from 1");
	p = params();
	p.decode_tokens = -1;
	refuses(&p, STATUS_INVALID, "decode", "-1 is not from 0");
	p.decode_tokens = 0;
	p.n_prefill = 0;
	refuses(&p, STATUS_INVALID, "decode", "nothing to measure");
	p = params();
	p.depth = &far;
	p.n_depths = 1;
	refuses(&p, STATUS_INVALID, "depth", "context of 128 tokens");
	p = params();
	p.device = "abacus";
	refuses(&p, STATUS_INVALID, "", "abacus");
	p = params();
	p.model_path = "/nowhere/at/all.gguf";
	refuses(&p, STATUS_IO, "", "/nowhere/at/all.gguf");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(every_test_that_fits_the_context_is_measured_once_from_the_smallest_depth_on),
	        cmocka_unit_test(bytes_are_those_of_weights_and_kv),
	        cmocka_unit_test(a_random_context_is_as_much_to_read),
	        cmocka_unit_test(what_makes_no_sense_is_refused_by_name),
	};
	return cmocka_run_group_tests(tests, make_model, remove_model);
}
