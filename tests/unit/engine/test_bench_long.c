/*
 * What long conversations cost under each policy: engine_long() on a tiny model, where a token is a byte and nothing is
 * trained.
 */
#include "tests/unit/unit.h"

#include <math.h>

#include "engine/bench_text.h"
#include "engine/engine.h"
#include "tests/support/tiny_model.h"

enum { CONTEXT = 1024, ROWS_MAX = 16 };

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
	struct engine_long_info info;
	struct engine_long_row rows[ROWS_MAX];
	struct {
		char policy[32], why[160];
		int32_t length;
	} left_out[ROWS_MAX];
	size_t n_infos, n_rows, n_left_out;
};

static void see_info(void *arg, const struct engine_long_info *info)
{
	struct seen *s = arg;
	assert_int_equal(s->n_rows + s->n_left_out, 0);
	s->info = *info;
	s->n_infos++;
}

static void see_row(void *arg, const struct engine_long_row *row)
{
	struct seen *s = arg;
	assert_true(s->n_rows < ROWS_MAX);
	s->rows[s->n_rows++] = *row;
}

static void see_left_out(void *arg, const char *policy, int32_t length, const char *why)
{
	struct seen *s = arg;
	assert_true(s->n_left_out < ROWS_MAX);
	snprintf(s->left_out[s->n_left_out].policy, 32, "%s", policy);
	snprintf(s->left_out[s->n_left_out].why, 160, "%s", why);
	s->left_out[s->n_left_out++].length = length;
}

static const struct engine_long_policy policies[] = {
        {"full", {.policy = "full", .start_size = -1}},
        {"streaming", {.policy = "streaming", .start_size = -1}},
        {"norms", {.policy = "evict", .start_size = -1}},
        {"recency", {.policy = "evict", .start_size = -1, .by_age = true}},
        {"quest", {.policy = "quest", .start_size = -1}},
	{"page_in", {.policy = "streaming", .start_size = -1, .page_in = true}},
};
static const int32_t lengths[] = {256, 400};

static struct engine_long_params params(void)
{
	return (struct engine_long_params){
	        .model_path = model_path,
	        .device = "cpu-reference",
	        .n_threads = 1,
	        .length = lengths,
	        .n_lengths = 2,
	        .policy = policies,
	        .n_policies = 4,
	        .cache_permille = 500,
	        .n_keys = 2,
	        .text_tokens = 20,
	        .answer_tokens = 8,
	};
}

static enum status measure(const struct engine_long_params *p, struct seen *seen, struct error *err)
{
	memset(seen, 0, sizeof *seen);
	const struct engine_long_sink sink = {seen, see_info, see_row, see_left_out};
	return engine_long(p, &sink, err);
}

static void measured(const struct engine_long_params *p, struct seen *seen)
{
	struct error err;
	if (measure(p, seen, &err) != STATUS_OK)
		fail_msg("%s", err.message);
}

static void every_policy_is_compared_with_full_at_every_length(void **state)
{
	(void)state;
	struct engine_long_params p = params();
	struct seen seen;
	measured(&p, &seen);
	assert_int_equal(seen.n_infos, 1);
	assert_string_equal(seen.info.backend, "cpu-reference");
	assert_int_equal(seen.info.n_ctx, CONTEXT);
	if (seen.n_left_out)
		fail_msg("%s: %s", seen.left_out[0].policy, seen.left_out[0].why);
	assert_int_equal(seen.n_rows, 8);
	for (size_t i = 0; i < seen.n_rows; i++) {
		const struct engine_long_row *row = &seen.rows[i];
		bool full = i % 4 == 0;
		assert_string_equal(row->policy, policies[i % 4].label);
		assert_int_equal(row->length, lengths[i / 4]);
		assert_true(row->ttft_s > 0 && row->tokens_per_s > 0);
		/*
		 * The keys and the text behind the prompt, less the token that is not computed. A sentence with a key
		 * has 40 to 43 bytes.
		 */
		assert_in_range(row->tokens_logical, row->length + 20 + 2 * 40 - 1, row->length + 20 + 2 * 44 - 1);
		assert_true(row->passkey >= 0 && row->passkey <= 1 && row->passkey_logprob < 0);
		assert_true(row->agreement >= 0 && row->agreement <= 1);
		if (full) {
			assert_true(row->kl_text == 0 && row->kl_recall == 0 && row->agreement == 1);
			assert_int_equal(row->tokens_resident, row->tokens_logical);
		} else {
			assert_true(row->kl_text > 1e-4 && row->kl_recall > 1e-4);
			assert_in_range(row->tokens_resident, row->length / 4, row->length / 2);
			assert_true(row->resident_bytes <= seen.rows[i / 4 * 4].resident_bytes / 2);
		}
	}
	/* What is worth most is not what is latest. */
	assert_true(seen.rows[2].kl_recall != seen.rows[3].kl_recall);
}

static void a_window_longer_than_the_conversation_costs_nothing(void **state)
{
	(void)state;
	struct engine_long_params p = params();
	struct seen seen;
	p.cache_permille = 2000;
	measured(&p, &seen);
	assert_int_equal(seen.n_rows, 8);
	for (size_t i = 0; i < seen.n_rows; i++) {
		const struct engine_long_row *row = &seen.rows[i], *full = &seen.rows[i / 4 * 4];
		assert_true(row->kl_text == 0 && row->kl_recall == 0 && row->agreement == 1);
		assert_true(row->passkey == full->passkey && row->passkey_logprob == full->passkey_logprob);
		assert_int_equal(row->tokens_resident, full->tokens_resident);
	}
}

/*
 * The same figures of a policy whether the one that it is compared with has a row of its own or not, and run after run.
 */
static void figures_do_not_depend_on_what_else_is_measured(void **state)
{
	(void)state;
	struct engine_long_params p = params();
	struct seen all, one;
	measured(&p, &all);
	p.policy = &policies[1];
	p.n_policies = 1;
	p.length = &lengths[1];
	p.n_lengths = 1;
	measured(&p, &one);
	assert_int_equal(one.n_rows, 1);
	assert_true(one.rows[0].kl_text == all.rows[5].kl_text && one.rows[0].kl_recall == all.rows[5].kl_recall);
	assert_true(one.rows[0].passkey_logprob == all.rows[5].passkey_logprob &&
	            one.rows[0].agreement == all.rows[5].agreement);
}

static void what_does_not_fit_is_left_out_with_a_reason(void **state)
{
	(void)state;
	static const int32_t odd[] = {1024, 200, 256};
	struct engine_long_params p = params();
	struct seen seen;
	p.length = odd;
	p.n_lengths = 3;
	p.text = "A short text that ends soon.\nIt does.\n";
	p.text_n = strlen(p.text);
	measured(&p, &seen);
	assert_int_equal(seen.n_rows, 0);
	assert_int_equal(seen.n_left_out, 12);
	assert_non_null(strstr(seen.left_out[0].why, "beyond the model's context of 1024 tokens"));
	assert_non_null(strstr(seen.left_out[4].why, "too short for 2 pass keys"));
	assert_non_null(strstr(seen.left_out[8].why, "has 38 tokens only"));
	assert_string_equal(seen.left_out[9].policy, "streaming");
}

static void a_policy_that_refuses_leaves_the_others_their_rows(void **state)
{
	(void)state;
	struct engine_long_policy odd[] = {
		policies[0], {"tight", {.policy = "streaming", .start_size = -1, .max_cache_size = 1}}, policies[1]};
	struct engine_long_params p = params();
	struct seen seen;
	p.policy = odd;
	p.n_policies = 3;
	p.n_lengths = 1;
	measured(&p, &seen);
	assert_int_equal(seen.n_rows, 2);
	assert_int_equal(seen.n_left_out, 1);
	assert_string_equal(seen.left_out[0].policy, "tight");
	assert_string_equal(seen.rows[1].policy, "streaming");
}

/* Quest keeps all, and reads what max_cache_size says: with all of it, it is exact. */
static void quest_costs_no_memory_and_nothing_with_all_of_it(void **state)
{
	(void)state;
	struct engine_long_params p = params();
	struct seen part, whole;
	p.policy = &policies[4];
	p.n_policies = 1;
	p.n_lengths = 1;
	measured(&p, &part);
	p.cache_permille = 2000;
	measured(&p, &whole);
	if (part.n_left_out)
		fail_msg("%s", part.left_out[0].why);
	assert_int_equal(part.n_rows, 1);
	assert_int_equal(part.rows[0].tokens_resident, part.rows[0].tokens_logical);
	assert_true(part.rows[0].kl_recall > 0);
	assert_true(whole.rows[0].kl_text == 0 && whole.rows[0].kl_recall == 0 && whole.rows[0].agreement == 1);
}

/* What comes back is a part of what may be kept, and says something about keys. */
static void page_in_keeps_no_more_and_reads_otherwise(void **state)
{
	(void)state;
	const struct engine_long_policy both[] = {policies[1], policies[5]};
	struct engine_long_params p = params();
	struct seen seen;
	p.policy = both;
	p.n_policies = 2;
	p.n_lengths = 1;
	p.cache_permille = 400;
	measured(&p, &seen);
	if (seen.n_left_out)
		fail_msg("%s", seen.left_out[0].why);
	assert_int_equal(seen.n_rows, 2);
	const struct engine_long_row *window = &seen.rows[0], *back = &seen.rows[1];
	assert_string_equal(back->policy, "page_in");
	assert_int_equal(window->pages_back, 0);
	assert_true(back->pages_back > 0 && back->tokens_resident <= 256 * 400 / 1000);
	/* The tier holds all that leaves. */
	assert_int_equal(back->tokens_recomputed, 0);
	assert_true(back->kl_recall > 0 && back->kl_recall != window->kl_recall);
}

/* A stretched context is measured as far as it reaches. */
static void stretching_reaches_further(void **state)
{
	(void)state;
	static const int32_t far[] = {1100};
	struct engine_long_params p = params();
	struct seen seen;
	p.length = far;
	p.n_lengths = 1;
	p.n_policies = 1;
	p.rope_scaling = "linear:2";
	measured(&p, &seen);
	assert_int_equal(seen.info.n_ctx, 2 * CONTEXT);
	assert_string_equal(seen.info.rope.scaling, "linear");
	assert_int_equal(seen.n_rows, 1);
}

/* On a clock that stands while the process waits. */
static void the_processors_time_can_be_counted(void **state)
{
	(void)state;
	struct engine_long_params p = params();
	struct seen wall, cpu;
	p.n_lengths = 1;
	measured(&p, &wall);
	p.cpu_time = true;
	measured(&p, &cpu);
	assert_int_equal(cpu.n_rows, 4);
	for (size_t i = 0; i < 4; i++) {
		assert_true(cpu.rows[i].ttft_s > 0 && cpu.rows[i].tokens_per_s > 0);
		assert_true(cpu.rows[i].kl_text == wall.rows[i].kl_text &&
		            cpu.rows[i].agreement == wall.rows[i].agreement);
	}
}

static void speed_alone_asks_nothing(void **state)
{
	(void)state;
	struct engine_long_params p = params();
	struct seen seen;
	p.speed_only = true;
	measured(&p, &seen);
	assert_int_equal(seen.n_rows, 8);
	assert_true(seen.rows[1].ttft_s > 0 && seen.rows[1].tokens_per_s > 0 && seen.rows[1].resident_bytes > 0);
	assert_true(isnan(seen.rows[1].kl_text) && isnan(seen.rows[1].passkey) && isnan(seen.rows[1].agreement));
}

static void refuses(const struct engine_long_params *p, const char *param)
{
	struct seen seen;
	struct error err = {0};
	assert_int_equal(measure(p, &seen, &err), STATUS_INVALID);
	assert_string_equal(err.param, param);
	assert_int_equal(seen.n_rows, 0);
}

static void what_makes_no_sense_is_refused_by_name(void **state)
{
	(void)state;
	static const int32_t tiny[] = {1};
	struct engine_long_params p = params();
	p.length = tiny;
	refuses(&p, "length");
	p = params();
	p.n_lengths = 0;
	refuses(&p, "length");
	p = params();
	p.cache_permille = 0;
	refuses(&p, "cache");
	p = params();
	p.n_keys = ENGINE_LONG_KEYS_MAX + 1;
	refuses(&p, "keys");
	p = params();
	p.text_tokens = 0;
	refuses(&p, "tail");
	p = params();
	p.cpu_time = true;
	p.n_threads = 2;
	refuses(&p, "threads");
	p = params();
	p.rope_scaling = "warp:9";
	refuses(&p, "rope-scaling");
}

static void keys_and_text_are_the_same_for_a_seed(void **state)
{
	(void)state;
	struct buf a = BUF_INIT, b = BUF_INIT;
	uint64_t s = 7, t = 7;
	for (int i = 0; i < 200; i++) {
		bench_text_sentence(&a, &s);
		bench_text_sentence(&b, &t);
	}
	assert_string_equal(a.data, b.data);
	assert_true(a.len > 200 * 30 && strchr(a.data, '\n'));
	for (int i = 0; i < ENGINE_LONG_KEYS_MAX; i++) {
		struct bench_key k = bench_text_key(i, 7);
		assert_int_equal(strlen(k.digits), 5);
		for (int j = 0; j < i; j++) {
			assert_string_not_equal(k.door, bench_text_key(j, 7).door);
			assert_string_not_equal(k.digits, bench_text_key(j, 7).digits);
		}
	}
	buf_free(&a);
	buf_free(&b);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_policy_is_compared_with_full_at_every_length),
		cmocka_unit_test(a_window_longer_than_the_conversation_costs_nothing),
		cmocka_unit_test(figures_do_not_depend_on_what_else_is_measured),
		cmocka_unit_test(what_does_not_fit_is_left_out_with_a_reason),
		cmocka_unit_test(a_policy_that_refuses_leaves_the_others_their_rows),
		cmocka_unit_test(quest_costs_no_memory_and_nothing_with_all_of_it),
		cmocka_unit_test(page_in_keeps_no_more_and_reads_otherwise),
		cmocka_unit_test(stretching_reaches_further),
		cmocka_unit_test(the_processors_time_can_be_counted),
		cmocka_unit_test(speed_alone_asks_nothing),
		cmocka_unit_test(what_makes_no_sense_is_refused_by_name),
		cmocka_unit_test(keys_and_text_are_the_same_for_a_seed),
	};
	return cmocka_run_group_tests(tests, make_model, remove_model);
}
