/*
 * Calls that the backend makes to the CUDA runtime fail, one at a time, in each of the ways in which calls fail, from
 * the first call of the start to the last of the end; `tests/run.sh --full cuda` has it for every one of them. Whatever
 * fails: every request ends, an answer that ends well is the right one, an engine that says it is ready is, one that is
 * not says why, and nothing stays allocated.
 */
#include "tests/unit/cuda/engine_fixture.h"

#include "engine/base/log.h"

/*
 * Answers of a token from the prompt, one decoded by kernels, one while they are recorded as a graph, and one by that
 * graph.
 */
enum { ANSWER = 4, QUESTIONS = 4 };

/* The third begins as the second ended, within a page, so that a page is copied before it is written. */
static const char *const question[QUESTIONS] = {"one", "a prompt that takes more than one page, but not two",
						"a prompt that takes more than one page, but not two!", "two"};
static struct answer right[QUESTIONS];
static uint64_t n_calls;
static const char *kv_type = "f16";

static struct engine *begin(void)
{
	struct engine *e;
	struct error err;
	struct engine_options o = {.model_path = model_path,
				   .device = "cuda-host",
				   .n_threads = 1,
				   .step_tokens = 64,
				   .max_running = 4,
				   .kv_type = kv_type,
				   .kv_bytes = 1 << 20};
	assert_int_equal(engine_create(&o, &e, &err), STATUS_OK);
	while (engine_state(e) == ENGINE_LOADING) {
		struct list events;
		list_init(&events);
		assert_true(engine_wait(e, &events, 20000));
		for (struct list *l; (l = list_pop_front(&events));)
			engine_event_free(list_entry(l, struct engine_event, link));
	}
	return e;
}

/* One alone, two beside each other, one alone. */
static void ask_all(struct engine *e, struct answer *a)
{
	uint64_t ids[2];
	a[0] = ask(e, question[0], ANSWER, 0);
	ids[0] = submit(e, question[1], ANSWER, 0);
	ids[1] = submit(e, question[2], ANSWER, 0.8f);
	await(e, ids, a + 1, 2);
	a[3] = ask(e, question[3], ANSWER, 0);
}

static bool is_right(const struct answer *a, int i)
{
	return a->n == right[i].n && memcmp(a->token, right[i].token, sizeof *a->token * (size_t)a->n) == 0;
}

static void learn_what_is_right(void)
{
	host_cuda_reset();
	struct engine *e = begin();
	ask_all(e, right);
	engine_destroy(e);
	n_calls = host_cuda_calls("*");
	for (int i = 0; i < QUESTIONS; i++)
		assert_int_equal(right[i].error.status, STATUS_OK);
}

static int know_what_is_right(void **state)
{
	log_set_level(LOG_OFF);
	if (write_model(state) != 0)
		return -1;
	learn_what_is_right();
	return 0;
}

static void check_one(uint64_t n, const char *error)
{
	char fail[96];
	struct answer a[QUESTIONS] = {0};
	snprintf(fail, sizeof fail, "*:%llu:%s", (unsigned long long)n, error);
	host_cuda_reset();
	size_t before = host_cuda_allocated();
	assert_true(host_cuda_fail(fail));
	struct engine *e = begin();
	if (engine_state(e) == ENGINE_READY) {
		ask_all(e, a);
		for (int i = 0; i < QUESTIONS; i++) {
			if (a[i].error.status == STATUS_OK && !is_right(&a[i], i))
				fail_msg("%s: question %d is answered otherwise than without a failure", fail, i);
			if (a[i].error.status != STATUS_OK && a[i].error.message[0] == '\0')
				fail_msg("%s: question %d fails without a reason", fail, i);
		}
		/*
		 * Afterwards the engine answers rightly or, if the device is lost, not at all. Its state may follow the
		 * last answer a little later.
		 */
		struct answer more = ask(e, question[0], ANSWER, 0);
		if (more.error.status != STATUS_OK && more.error.status != STATUS_BUSY)
			more = ask(e, question[0], ANSWER, 0);
		if (more.error.status == STATUS_OK ? !is_right(&more, 0) || engine_state(e) != ENGINE_READY
						   : more.error.status != STATUS_BUSY)
			fail_msg("%s: afterwards \"%s\", in state %d", fail, more.error.message, (int)engine_state(e));
		if (more.error.status == STATUS_BUSY)
			wait_for_state(e, ENGINE_FAILED);
	}
	if (engine_state(e) == ENGINE_FAILED && engine_load_error(e)->message[0] == '\0')
		fail_msg("%s: the engine has failed without a reason", fail);
	engine_destroy(e);
	if (host_cuda_allocated() != before)
		fail_msg("%s: %zu bytes stay allocated", fail, host_cuda_allocated() - before);
}

/* Each `stride`-th call, from another one for each error; all of them when KVASIR_CUDA_SWEEP is 1. */
static void sweep(const char *error, uint64_t first, uint64_t usual_stride)
{
	const char *env = getenv("KVASIR_CUDA_SWEEP");
	uint64_t stride = env ? strtoull(env, NULL, 10) : usual_stride;
	assert_in_range(stride, 1, 1000);
	for (uint64_t n = first % stride + 1; n <= n_calls; n += stride)
		check_one(n, error);
}

static void memory_that_runs_out(void **state)
{
	(void)state;
	sweep("cudaErrorMemoryAllocation", 0, 37);
}

static void a_call_that_fails_alone(void **state)
{
	(void)state;
	sweep("cudaErrorLaunchOutOfResources", 12, 37);
}

static void a_device_that_is_lost(void **state)
{
	(void)state;
	sweep("cudaErrorIllegalAddress", 24, 37);
}

static void calls_of_a_narrow_cache(void **state)
{
	(void)state;
	kv_type = "int8";
	learn_what_is_right();
	sweep("cudaErrorMemoryAllocation", 5, 79);
	kv_type = "f16";
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(memory_that_runs_out, forget_failures),
		cmocka_unit_test_teardown(a_call_that_fails_alone, forget_failures),
		cmocka_unit_test_teardown(a_device_that_is_lost, forget_failures),
		cmocka_unit_test_teardown(calls_of_a_narrow_cache, forget_failures),
	};
	return cmocka_run_group_tests(tests, know_what_is_right, remove_model);
}
