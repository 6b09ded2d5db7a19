/*
 * A whole engine on the CUDA backend, its kernels run by the execution model on the CPU: the answers are those of the
 * reference backend, do not depend on how work is cut into steps, and a device that fails costs the requests it had and
 * not the daemon.
 */
#include "tests/unit/cuda/engine_fixture.h"

static void greedy_answers_are_those_of_the_reference(void **state)
{
	(void)state;
	char prompt[PROMPT_MAX];
	long_prompt(prompt);
	struct engine *cuda = start("cuda-host", 64), *cpu = start("cpu-reference", 64);
	const char *const prompts[] = {"x", "hello, world", prompt};
	for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++) {
		struct answer a = ask(cuda, prompts[i], 20, 0), b = ask(cpu, prompts[i], 20, 0);
		assert_same(&a, &b);
	}
	assert_string_equal(host_cuda_report(), "");
	engine_destroy(cuda);
	engine_destroy(cpu);
}

/*
 * Of each kind of KV that is not f16, as the reference backend has it; launched by graphs, as the answers go on over
 * several pages.
 */
static void greedy_answers_over_any_kv_are_those_of_the_reference(void **state)
{
	(void)state;
	static const char *const types[] = {"bf16", "int8", "fp8_e4m3"};
	char prompt[PROMPT_MAX];
	long_prompt(prompt);
	for (size_t k = 0; k < 3; k++) {
		struct engine *cuda = start_with("cuda-host", 64, types[k]),
			      *cpu = start_with("cpu-reference", 64, types[k]);
		struct engine_stats stats;
		const char *const prompts[] = {"x", "hello, world", prompt};
		for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++) {
			struct answer a = ask(cuda, prompts[i], 20, 0), b = ask(cpu, prompts[i], 20, 0);
			assert_same(&a, &b);
		}
		engine_stats(cuda, &stats);
		assert_int_equal(stats.kv_wide_pages > 0, k > 0);
		assert_true(host_cuda_calls("cudaGraphLaunch") > 0);
		engine_destroy(cuda);
		engine_destroy(cpu);
	}
	assert_string_equal(host_cuda_report(), "");
}

/* Pages that leave the middle of a conversation: a row's place in the block table and its position are two things. */
static struct answer ask_streaming(struct engine *e, const char *prompt)
{
	const struct engine_context window = {.policy = "streaming", .start_size = 4, .recent_size = 48};
	return ask_in_context(e, prompt, &window);
}

static void a_window_of_a_conversation_is_that_of_the_reference(void **state)
{
	(void)state;
	char prompt[PROMPT_MAX];
	long_prompt(prompt);
	struct engine *cuda = start("cuda-host", 64), *cpu = start("cpu-reference", 64),
		      *chunks = start("cuda-host", 7);
	struct answer a = ask_streaming(cuda, prompt), b = ask_streaming(cpu, prompt),
		      c = ask_streaming(chunks, prompt);
	struct answer full = ask(cuda, prompt, 20, 0);
	assert_same(&a, &b);
	assert_same(&a, &c);
	assert_memory_not_equal(a.token, full.token, sizeof *a.token * (size_t)a.n);
	assert_string_equal(host_cuda_report(), "");
	engine_destroy(cuda);
	engine_destroy(cpu);
	engine_destroy(chunks);
}

static struct engine *start_in_chunks(const char *device, int32_t step_tokens, const char *kv_type)
{
	struct engine_options o = options_for(device, step_tokens, kv_type);
	o.rope_scaling = "dca:4,original=100,chunk=64";
	return start_as(&o);
}

/* Positions that count anew every 64 tokens, over four times as many; in graphs too, and by rows that tell. */
static void positions_in_chunks_are_those_of_the_reference(void **state)
{
	(void)state;
	static const char *const types[] = {"f16", "int8"};
	char prompt[PROMPT_MAX];
	long_prompt(prompt);
	for (size_t k = 0; k < 2; k++) {
		struct engine *cuda = start_in_chunks("cuda-host", 128, types[k]),
			      *cpu = start_in_chunks("cpu-reference", 128, types[k]),
			      *few = start_in_chunks("cuda-host", 7, types[k]),
			      *plain = start_with("cuda-host", 128, types[k]);
		const struct engine_context told = {.policy = "full", .start_size = -1, .diagnostics = true};
		uint64_t graphs = host_cuda_calls("cudaGraphLaunch");
		struct answer a = ask(cuda, prompt, 20, 0), b = ask(cpu, prompt, 20, 0), c = ask(few, prompt, 20, 0);
		assert_same(&a, &b);
		assert_same(&a, &c);
		assert_true(host_cuda_calls("cudaGraphLaunch") - graphs >= 30);
		b = ask_in_context(cuda, prompt, &told);
		c = ask_in_context(few, prompt, &told);
		assert_same(&a, &b);
		assert_same(&a, &c);
		assert_memory_equal(&b.context.diagnostics, &c.context.diagnostics, sizeof b.context.diagnostics);
		b = ask(plain, prompt, 20, 0);
		assert_memory_not_equal(a.token, b.token, sizeof *a.token * (size_t)a.n);
		engine_destroy(cuda);
		engine_destroy(cpu);
		engine_destroy(few);
		engine_destroy(plain);
	}
	assert_string_equal(host_cuda_report(), "");
}

/*
 * Alone in steps of 7 rows, then beside others in large ones: sampled tokens show any difference in the logits' last
 * bits soon.
 */
static void answers_do_not_depend_on_steps_or_neighbours(void **state)
{
	(void)state;
	char prompt[PROMPT_MAX];
	long_prompt(prompt);
	struct engine *e = start("cuda-host", 7);
	struct answer alone = ask(e, prompt, 16, 1.5f);
	engine_destroy(e);
	e = start("cuda-host", 256);
	uint64_t ids[3] = {submit(e, "something else", 16, 1.0f), submit(e, prompt, 16, 1.5f),
			   submit(e, prompt + 3, 16, 1.0f)};
	struct answer beside[3];
	await(e, ids, beside, 3);
	assert_same(&alone, &beside[1]);
	engine_destroy(e);
}

static void a_lost_device_ends_requests_and_readiness_but_not_the_engine(void **state)
{
	(void)state;
	struct engine *e = start("cuda-host", 64);
	assert_true(host_cuda_fail("launch:60:cudaErrorIllegalAddress"));
	uint64_t ids[2] = {submit(e, "one", 20, 0), submit(e, "two", 20, 0)};
	struct answer a[2];
	await(e, ids, a, 2);
	for (int i = 0; i < 2; i++) {
		assert_int_equal(a[i].error.status, STATUS_DEVICE);
		assert_non_null(strstr(a[i].error.message, "cudaErrorIllegalAddress"));
	}
	wait_for_state(e, ENGINE_FAILED);
	assert_non_null(strstr(engine_load_error(e)->message, "the device is lost"));
	struct answer late = ask(e, "three", 1, 0);
	assert_int_equal(late.error.status, STATUS_BUSY);
	engine_destroy(e);
}

static void a_kernel_that_cannot_start_costs_its_step_alone(void **state)
{
	(void)state;
	struct engine *e = start("cuda-host", 64);
	struct answer before = ask(e, "one", 8, 0);
	assert_true(host_cuda_fail("launch:40:cudaErrorLaunchOutOfResources"));
	struct answer a = ask(e, "another", 20, 0);
	assert_int_equal(a.error.status, STATUS_INTERNAL);
	assert_non_null(strstr(a.error.message, "cudaErrorLaunchOutOfResources"));
	assert_int_equal(engine_state(e), ENGINE_READY);
	struct answer after = ask(e, "one", 8, 0);
	assert_same(&before, &after);
	engine_destroy(e);
}

static void memory_that_runs_out_in_a_step_costs_its_requests_alone(void **state)
{
	(void)state;
	struct engine *e = start("cuda-host", 64);
	/* The first step allocates what steps need. */
	assert_true(host_cuda_fail("cudaMalloc:1:cudaErrorMemoryAllocation"));
	struct answer a = ask(e, "one", 8, 0);
	assert_int_equal(a.error.status, STATUS_NOMEM);
	struct answer b = ask(e, "one", 8, 0);
	assert_int_equal(b.error.status, STATUS_OK);
	assert_int_equal(b.n, 8);
	engine_destroy(e);
}

/* What fails to load leaves nothing behind and says which device and why. */
static void a_device_too_small_for_the_model_is_a_start_up_error(void **state)
{
	(void)state;
	struct engine *e;
	struct engine_options o = {.model_path = model_path, .device = "cuda-host", .n_threads = 1};
	size_t before = host_cuda_allocated();
	host_cuda_memory(64 << 10);
	assert_int_equal(engine_create(&o, &e, NULL), STATUS_OK);
	wait_for_state(e, ENGINE_FAILED);
	assert_int_equal(engine_load_error(e)->status, STATUS_NOMEM);
	engine_destroy(e);
	assert_int_equal(host_cuda_allocated(), before);
}

static void ordinary_steps_allocate_nothing(void **state)
{
	(void)state;
	struct engine *e = start("cuda-host", 64);
	ask(e, "to begin with", 20, 0);
	uint64_t calls = host_cuda_calls("cudaMalloc") + host_cuda_calls("cudaMallocHost");
	ask(e, "and again", 20, 0);
	assert_int_equal(host_cuda_calls("cudaMalloc") + host_cuda_calls("cudaMallocHost"), calls);
	engine_destroy(e);
}

/*
 * The third decode step of a shape and those after it are one launch each, and give what kernels launched one by one
 * give.
 */
static void decode_steps_are_launched_as_graphs(void **state)
{
	(void)state;
	struct engine *e = start("cuda-host", 64);
	assert_true(host_cuda_fail("cudaStreamBeginCapture:1:cudaErrorNotSupported"));
	struct answer plain = ask(e, "graphs", 20, 0); /* the shape is not recorded: that is tried once */
	assert_int_equal(host_cuda_calls("cudaGraphLaunch"), 0);
	engine_destroy(e);
	host_cuda_reset();
	e = start("cuda-host", 64);
	ask(e, "warm up", 3, 0);
	uint64_t launches = host_cuda_calls("launch"), graphs = host_cuda_calls("cudaGraphLaunch");
	struct answer a = ask(e, "graphs", 20, 0);
	assert_same(&plain, &a);
	assert_true(host_cuda_calls("cudaGraphLaunch") - graphs >= 15);
	assert_true(host_cuda_calls("launch") - launches < 200); /* one by one they would be some 400 */
	engine_destroy(e);
}

static void a_graph_that_cannot_be_made_is_done_without(void **state)
{
	(void)state;
	struct engine *e = start("cuda-host", 64);
	struct answer want = ask(e, "graphs", 20, 0);
	engine_destroy(e);
	host_cuda_reset();
	e = start("cuda-host", 64);
	assert_true(host_cuda_fail("cudaGraphInstantiate:1:cudaErrorNotSupported"));
	struct answer a = ask(e, "graphs", 20, 0);
	assert_same(&want, &a);
	assert_int_equal(host_cuda_calls("cudaGraphLaunch"), 0);
	engine_destroy(e);
}

static void a_failure_in_a_graph_is_a_failure_of_its_step(void **state)
{
	(void)state;
	struct engine *e = start("cuda-host", 64);
	assert_true(host_cuda_fail("cudaGraphLaunch:4:cudaErrorIllegalAddress"));
	struct answer a = ask(e, "graphs", 20, 0);
	assert_int_equal(a.error.status, STATUS_DEVICE);
	wait_for_state(e, ENGINE_FAILED);
	engine_destroy(e);
}

/*
 * Whether the device is lost cannot be asked while a graph is recorded; it must be known when the step has ended all
 * the same.
 */
static void a_device_lost_while_a_graph_is_recorded_is_known_to_be(void **state)
{
	(void)state;
	struct engine *e = start("cuda-host", 64);
	uint64_t before = host_cuda_calls("launch");
	ask(e, "warm up", 2, 0);
	/* As many launches again, but the decode step, with the last of them, is recorded. */
	char fail[64];
	snprintf(fail, sizeof fail, "launch:%d:cudaErrorIllegalAddress", (int)(host_cuda_calls("launch") - before) - 4);
	assert_int_equal(host_cuda_calls("cudaStreamBeginCapture"), 0);
	assert_true(host_cuda_fail(fail));
	struct answer a = ask(e, "pu mraw", 4, 0);
	assert_int_equal(host_cuda_calls("cudaStreamBeginCapture"), 1);
	assert_int_equal(host_cuda_calls("cudaGraphLaunch"), 0);
	assert_int_equal(a.error.status, STATUS_DEVICE);
	wait_for_state(e, ENGINE_FAILED);
	engine_destroy(e);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(greedy_answers_are_those_of_the_reference, forget_failures),
		cmocka_unit_test_teardown(greedy_answers_over_any_kv_are_those_of_the_reference, forget_failures),
		cmocka_unit_test_teardown(a_window_of_a_conversation_is_that_of_the_reference, forget_failures),
		cmocka_unit_test_teardown(positions_in_chunks_are_those_of_the_reference, forget_failures),
		cmocka_unit_test_teardown(answers_do_not_depend_on_steps_or_neighbours, forget_failures),
		cmocka_unit_test_teardown(a_lost_device_ends_requests_and_readiness_but_not_the_engine,
					  forget_failures),
		cmocka_unit_test_teardown(a_kernel_that_cannot_start_costs_its_step_alone, forget_failures),
		cmocka_unit_test_teardown(memory_that_runs_out_in_a_step_costs_its_requests_alone, forget_failures),
		cmocka_unit_test_teardown(a_device_too_small_for_the_model_is_a_start_up_error, forget_failures),
		cmocka_unit_test_teardown(ordinary_steps_allocate_nothing, forget_failures),
		cmocka_unit_test_teardown(decode_steps_are_launched_as_graphs, forget_failures),
		cmocka_unit_test_teardown(a_graph_that_cannot_be_made_is_done_without, forget_failures),
		cmocka_unit_test_teardown(a_failure_in_a_graph_is_a_failure_of_its_step, forget_failures),
		cmocka_unit_test_teardown(a_device_lost_while_a_graph_is_recorded_is_known_to_be, forget_failures),
	};
	return cmocka_run_group_tests(tests, write_model, remove_model);
}
