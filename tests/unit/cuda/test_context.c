/*
 * Context policies on the CUDA backend, its kernels run by the execution model on the CPU: what goes and what is read
 * is what the reference backend lets go of and reads, so that the answers are the same, and the same however the work
 * is cut into steps.
 */
#include "tests/unit/cuda/engine_fixture.h"

#include <math.h>

static const char *const kinds[] = {"bf16", "int8", "f16", "fp8_e4m3"};

static bool is_full(void)
{
	const char *full = getenv("KVASIR_FULL");
	return full && strcmp(full, "yes") == 0;
}

/* All of them with KVASIR_FULL=yes: each takes seconds. */
static size_t n_kinds(void)
{
	return is_full() ? sizeof kinds / sizeof *kinds : 1;
}

static struct engine *start_bounded(const char *device, int32_t step_tokens, const char *kv_type)
{
	struct engine_options o = options_for(device, step_tokens, kv_type);
	o.kv_bounds = true;
	o.kv_ram_bytes = 1 << 20;
	return start_as(&o);
}

static void assert_near(const struct engine_diagnostics *a, const struct engine_diagnostics *b)
{
	assert_int_equal(a->n_rows, b->n_rows);
	assert_int_equal(a->n_samples, b->n_samples);
	assert_true(fabs(a->entropy - b->entropy) < 0.01);
	assert_true(fabs(a->largest - b->largest) < 0.01);
	assert_true(fabs(a->drift - b->drift) < 0.001);
}

/* The same from both, and from steps of a few rows. */
static void compare(const char *kv_type, const struct engine_context *context)
{
	char prompt[PROMPT_MAX];
	long_prompt(prompt);
	struct engine *cuda = start_bounded("cuda-host", 128, kv_type),
		      *cpu = start_bounded("cpu-reference", 128, kv_type);
	struct engine *few = start_bounded("cuda-host", 7, kv_type);
	struct answer a = ask_in_context(cuda, prompt, context), b = ask_in_context(cpu, prompt, context);
	struct answer c = ask_in_context(few, prompt, context);
	assert_same(&a, &b);
	assert_same(&a, &c);
	assert_int_equal(a.context.evicted_tokens, b.context.evicted_tokens);
	assert_int_equal(a.context.tokens_read, b.context.tokens_read);
	assert_int_equal(a.context.pages_back, b.context.pages_back);
	assert_int_equal(a.context.pages_below, b.context.pages_below);
	if (is_full()) {
		struct answer again = ask_in_context(cuda, prompt, context), full = ask(cuda, prompt, 20, 0);
		assert_same(&a, &again);
		if (strcmp(context->policy, "full") != 0)
			assert_memory_not_equal(a.token, full.token, sizeof *a.token * (size_t)a.n);
	}
	if (context->diagnostics) {
		assert_near(&a.context.diagnostics, &b.context.diagnostics);
		assert_memory_equal(&a.context.diagnostics, &c.context.diagnostics, sizeof a.context.diagnostics);
	}
	assert_string_equal(host_cuda_report(), "");
	engine_destroy(cuda);
	engine_destroy(cpu);
	engine_destroy(few);
}

static void pages_go_by_their_norms(void **state)
{
	(void)state;
	for (size_t i = 0; i < n_kinds(); i++)
		if (strcmp(kinds[i], "f16") == 0 || strcmp(kinds[i], "bf16") == 0) /* narrow pages have none */
			compare(kinds[i],
				&(struct engine_context){
					.policy = "evict", .start_size = -1, .recent_size = 32, .max_cache_size = 96});
}

static void pages_go_by_the_attention_they_got(void **state)
{
	(void)state;
	for (size_t i = 0; i < n_kinds(); i++)
		compare(kinds[i], &(struct engine_context){.policy = "evict",
							   .start_size = -1,
							   .recent_size = 32,
							   .max_cache_size = 96,
							   .by_mass = true});
}

static void rows_read_the_pages_that_promise_most(void **state)
{
	(void)state;
	for (size_t i = 0; i < n_kinds(); i++) {
		host_cuda_reset();
		compare(kinds[i],
			&(struct engine_context){
				.policy = "quest", .start_size = -1, .recent_size = 16, .max_cache_size = 64});
		assert_true(host_cuda_calls("cudaGraphLaunch") > 20);
	}
}

static void what_left_the_window_comes_back(void **state)
{
	(void)state;
	static const char *const exact[] = {"bf16", "f16"}; /* narrow pages do not come back */
	const struct engine_context context = {
		.policy = "streaming", .start_size = 4, .max_cache_size = 112, .page_in = true};
	for (size_t i = 0; i < (is_full() ? 2 : 1); i++)
		compare(exact[i], &context);
	struct engine *e = start_bounded("cuda-host", 128, "f16");
	char prompt[PROMPT_MAX];
	long_prompt(prompt);
	struct answer a = ask_in_context(e, prompt, &context);
	assert_true(a.context.pages_in && a.context.pages_back > 0 && a.context.pages_below > a.context.pages_back);
	assert_int_equal(a.context.pages_missing, 0);
	engine_destroy(e);
}

static void rows_tell_how_they_attended(void **state)
{
	(void)state;
	if (is_full())
		compare("f16", &(struct engine_context){.policy = "full", .start_size = -1, .diagnostics = true});
	compare("bf16", &(struct engine_context){.policy = "quest",
						 .start_size = -1,
						 .recent_size = 16,
						 .max_cache_size = 64,
						 .diagnostics = true});
	compare("int8", &(struct engine_context){
				.policy = "streaming", .start_size = 4, .recent_size = 48, .diagnostics = true});
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(pages_go_by_their_norms, forget_failures),
		cmocka_unit_test_teardown(pages_go_by_the_attention_they_got, forget_failures),
		cmocka_unit_test_teardown(rows_read_the_pages_that_promise_most, forget_failures),
		cmocka_unit_test_teardown(what_left_the_window_comes_back, forget_failures),
		cmocka_unit_test_teardown(rows_tell_how_they_attended, forget_failures),
	};
	return cmocka_run_group_tests(tests, write_model, remove_model);
}
