/*
 * Conversations larger than the page pool on the CUDA backend, its kernels and streams run by the execution model on
 * the CPU: what lies in pinned memory or on disk comes back part by part, and the answer has the bits of one that fits.
 */
#include "tests/unit/cuda/engine_fixture.h"

#include "engine/backend.h"

enum {
	CONTEXT = 800,
	SMALL = 40, /* pages of the pool */
	N_PROMPT = 700,
	PAGE_BYTES = 4096,
	GROUP_BYTES = 16 * 2 * TINY_LAYERS * TINY_KV_HEADS * TINY_HEAD_DIM * KV_PAGE_TOKENS * 2,
};

static char dir[] = "/tmp/kvasir-cuda-overflow-XXXXXX";

static int write_large_model(void **state)
{
	(void)state;
	return mkdtemp(dir) && tiny_model_write(model_path, CONTEXT, tiny_chat_template, 3) ? 0 : -1;
}

static int remove_large_model(void **state)
{
	(void)state;
	return unlink(model_path) | rmdir(dir);
}

static struct engine *start_small(uint64_t ram_groups, uint64_t disk_groups, const char *kv_type, const char *rope)
{
	struct engine_options o = options_for("cuda-host", 256, kv_type);
	o.rope_scaling = rope;
	o.kv_bytes = SMALL * PAGE_BYTES;
	o.context_tokens = CONTEXT;
	o.kv_overflow_bytes = ram_groups * GROUP_BYTES;
	if (disk_groups) {
		o.kv_overflow_dir = dir;
		o.kv_overflow_disk_bytes =
			disk_groups * 2 * GROUP_BYTES; /* with what blocks of the file are padded to */
	}
	return start_as(&o);
}

static void prompt_of(char text[N_PROMPT + 1])
{
	uint64_t seed = 5;
	for (int i = 0; i < N_PROMPT; i++)
		text[i] = (char)(' ' + unit_rand(&seed) % 90);
	text[N_PROMPT] = '\0';
}

/* Sampled, so that a difference in the last bits of logits shows soon; beside: a second time, with a short one. */
static void compare(const char *kv_type, const char *rope, uint64_t ram_groups, uint64_t disk_groups, bool beside)
{
	char prompt[N_PROMPT + 1];
	prompt_of(prompt);
	struct engine_options o = options_for("cuda-host", 256, kv_type);
	o.rope_scaling = rope;
	struct engine *large = start_as(&o), *small = start_small(ram_groups, disk_groups, kv_type, rope);
	struct engine_stats stats;
	struct answer want = ask(large, prompt, 8, 1.5f), brief = ask(large, "a short one", 8, 1.5f);
	host_cuda_order(7); /* streams take turns by chance */
	struct answer got = ask(small, prompt, 8, 1.5f);
	assert_same(&want, &got);
	engine_stats(small, &stats);
	assert_true(stats.overflow.moved_pages >= 32);
	if (beside) {
		uint64_t ids[] = {submit(small, prompt, 8, 1.5f), submit(small, "a short one", 8, 1.5f)};
		struct answer both[2];
		await(small, ids, both, 2);
		assert_same(&want, &both[0]);
		assert_same(&brief, &both[1]);
	}
	assert_string_equal(host_cuda_report(), "");
	engine_destroy(large);
	engine_destroy(small);
}

static bool is_full(void)
{
	const char *full = getenv("KVASIR_FULL");
	return full && strcmp(full, "yes") == 0;
}

static void pages_in_pinned_memory_give_the_same_bits(void **state)
{
	(void)state;
	compare(NULL, NULL, 4, 0, is_full());
}

static void pages_on_disk_give_the_same_bits(void **state)
{
	(void)state;
	if (!is_full()) {
		print_message("skipped: seconds; with KVASIR_FULL=yes\n");
		skip();
	}
	compare("bf16", NULL, 1, 4, false);
}

static void pages_of_chunks_give_the_same_bits(void **state)
{
	(void)state;
	compare(NULL, "dca:2,original=400,chunk=192", 4, 0, false);
}

/* What fails to be copied costs its request, and its room is there for the next one. */
static void a_copy_that_fails_costs_its_request_alone(void **state)
{
	(void)state;
	char prompt[N_PROMPT + 1];
	prompt_of(prompt);
	struct engine *small = start_small(4, 0, NULL, NULL);
	struct engine_stats stats;
	assert_true(host_cuda_fail("cudaMemcpy2DAsync:3:cudaErrorLaunchOutOfResources"));
	struct answer failed = ask(small, prompt, 4, 0);
	assert_int_equal(failed.error.status, STATUS_IO);
	assert_int_equal(engine_state(small), ENGINE_READY);
	struct answer after = ask(small, prompt, 4, 0);
	assert_int_equal(after.error.status, STATUS_OK);
	engine_stats(small, &stats);
	assert_int_equal(stats.overflow.pages, 0);
	engine_destroy(small);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(pages_in_pinned_memory_give_the_same_bits, forget_failures),
		cmocka_unit_test_teardown(pages_on_disk_give_the_same_bits, forget_failures),
		cmocka_unit_test_teardown(pages_of_chunks_give_the_same_bits, forget_failures),
		cmocka_unit_test_teardown(a_copy_that_fails_costs_its_request_alone, forget_failures),
	};
	return cmocka_run_group_tests(tests, write_large_model, remove_large_model);
}
