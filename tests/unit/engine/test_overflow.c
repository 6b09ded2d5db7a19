/*
 * Conversations larger than the page pool: the same tokens and the same probabilities as where they fit, to the bit on
 * backends that sum in one order, whatever else runs, however they are cancelled, and with nothing left behind.
 */
#include "tests/unit/engine/engine_fixture.h"

#include <stdio.h>

#include "engine/kv/seq.h"

enum {
	PAGE_BYTES = 4096,
	SMALL = 40,           /* pages of the pool */
	LARGE = 4 * SMALL,    /* of the conversation */
	GROUP_BYTES = 16 * 2 * TINY_LAYERS * TINY_KV_HEADS * TINY_HEAD_DIM * 16 * 2,
	CONTEXT = LARGE * 16,
	N_PROMPT = CONTEXT - 120,
};

static char dir[] = "/tmp/kvasir-overflow-XXXXXX";
static const char *const devices[] = {"cpu-reference", "cpu"};

static int make_context_model(void **state)
{
	(void)state;
	assert_non_null(mkdtemp(dir));
	return tiny_model_write(model_path, CONTEXT, tiny_chat_template, 1) ? 0 : -1;
}

static int remove_context_model(void **state)
{
	(void)state;
	return unlink(model_path) | rmdir(dir);
}

/* A text of n tokens, which are bytes. */
static char *text_of(int number, int32_t n)
{
	char *text = malloc((size_t)n + 1);
	uint64_t x = (uint64_t)number * 2 + 1;
	for (int32_t i = 0; i < n; i++)
		text[i] = (char)(' ' + unit_rand(&x) % 90);
	text[n] = '\0';
	return text;
}

static struct engine_request *ask(struct engine *e, int number, int32_t n_prompt, int32_t max_tokens)
{
	char *text = text_of(number, n_prompt);
	struct engine_request *r = request(e, text, max_tokens);
	r->sampling.n_logprobs = 3;
	free(text);
	return r;
}

static struct engine_options small_options(const char *device, uint64_t ram_groups, uint64_t disk_groups)
{
	struct engine_options o = defaults();
	o.device = device;
	o.n_threads = 2;
	o.kv_bytes = SMALL * PAGE_BYTES;
	o.context_tokens = ram_groups + disk_groups ? CONTEXT : 0;
	o.kv_overflow_bytes = ram_groups * GROUP_BYTES;
	if (disk_groups) {
		o.kv_overflow_dir = dir;
		o.kv_overflow_disk_bytes = disk_groups * GROUP_BYTES; /* blocks of 16 KiB need no padding */
	}
	return o;
}

static void same_answer(const struct answer *a, const struct answer *b, const char *device)
{
	assert_int_equal(a->error.status, STATUS_OK);
	assert_int_equal(b->error.status, STATUS_OK);
	assert_int_equal(a->n_tokens, b->n_tokens);
	for (int i = 0; i < a->n_tokens; i++) {
		assert_int_equal(a->tokens[i], b->tokens[i]);
		if (strcmp(device, "cpu-reference") == 0)
			assert_float_equal(a->logprobs[i], b->logprobs[i], 1e-4);
		else
			assert_true(a->logprobs[i] == b->logprobs[i]);
	}
}

static struct engine_overflow overflow_of(struct engine *e)
{
	struct engine_stats s;
	engine_stats(e, &s);
	return s.overflow;
}

static void assert_empty(struct engine *e)
{
	struct engine_overflow o = overflow_of(e);
	assert_at_rest(e);
	assert_int_equal(o.requests + o.pages, 0);
	assert_int_equal(o.ram_used_bytes + o.disk_used_bytes, 0);
}

/* The answer where all of it fits. */
static struct answer large_answer_of(const char *type, const char *device, int number, int32_t n_prompt,
                                     int32_t max_tokens)
{
	struct engine_options o = defaults();
	o.kv_type = type;
	o.device = device;
	o.n_threads = 2;
	struct engine *e = start(&o);
	struct answer a = run(e, ask(e, number, n_prompt, max_tokens));
	engine_destroy(e);
	return a;
}

static struct answer large_answer(const char *device, int number, int32_t n_prompt, int32_t max_tokens)
{
	return large_answer_of(NULL, device, number, n_prompt, max_tokens);
}

static void four_times_the_pool_gives_the_same_tokens(void **state)
{
	(void)state;
	static const uint64_t rooms[][2] = {{9, 0}, {0, 9}, {4, 5}};
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
		struct answer whole = large_answer(devices[d], 1, N_PROMPT, 100);
		for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) {
			struct engine_options o = small_options(devices[d], rooms[i][0], rooms[i][1]);
			struct engine *e = start(&o);
			assert_int_equal(engine_info(e)->n_ctx, CONTEXT);
			assert_int_equal(engine_info(e)->n_ctx_pool, SMALL * 16);
			struct answer a = run(e, ask(e, 1, N_PROMPT, 100));
			same_answer(&whole, &a, devices[d]);
			const struct engine_context_usage *c = &a.usage.context;
			const int all = kv_pages_for(N_PROMPT + 99), ram = c->pages_tier[ENGINE_TIER_RAM];
			assert_int_equal(c->pages + ram + c->pages_tier[ENGINE_TIER_DISK], all);
			assert_true(c->pages <= SMALL / 2);
			assert_int_equal(
				ram, rooms[i][0]
					     ? (rooms[i][0] < 9 ? (int)rooms[i][0] : (all - SMALL / 2 + 15) / 16) * 16
					     : 0);
			assert_int_equal(c->pages_tier[ENGINE_TIER_DISK] > 0, rooms[i][1] > 0);
			assert_empty(e);
			/* A second one finds what the pool still has of the first, and says the same. */
			struct answer b = run(e, ask(e, 1, N_PROMPT, 100));
			same_answer(&whole, &b, devices[d]);
			assert_empty(e);
			buf_free(&a.text);
			buf_free(&b.text);
			engine_destroy(e);
		}
		buf_free(&whole.text);
	}
}

/* It begins in the pool and grows out of it, with and without having said how far. */
static void an_answer_may_outgrow_the_pool(void **state)
{
	(void)state;
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
		struct answer whole = large_answer(devices[d], 2, SMALL * 16 - 100, 400);
		for (int said = 0; said < 2; said++) {
			struct engine_options o = small_options(devices[d], 0, 9);
			o.context_tokens = SMALL * 16 + 300;
			struct engine *e = start(&o);
			struct answer a = run(e, ask(e, 2, SMALL * 16 - 100, said ? 400 : -1));
			same_answer(&whole, &a, devices[d]);
			assert_int_equal(a.finish, ENGINE_FINISH_LENGTH);
			assert_int_equal(a.usage.n_preempted, 0);
			assert_true(a.usage.context.pages_tier[ENGINE_TIER_DISK] > 0);
			assert_empty(e);
			buf_free(&a.text);
			engine_destroy(e);
		}
		buf_free(&whole.text);
	}
}

/* Small ones beside two large ones, of which one has to wait for the other's room. */
static void others_have_their_answers_beside_large_ones(void **state)
{
	(void)state;
	enum { N = 8 };
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
		struct answer answers[N] = {0}, want[N];
		uint64_t ids[N];
		/* One engine after the other: they share the clock, which begins anew with each. */
		for (int i = 0; i < N; i++) {
			bool large = i == 1 || i == 4;
			want[i] = large_answer(devices[d], 10 + i, large ? N_PROMPT - 300 * i : 60 + i, 40);
		}
		struct engine_options o = small_options(devices[d], 3, 8);
		struct engine *e = start(&o);
		for (int i = 0; i < N; i++) {
			bool large = i == 1 || i == 4;
			struct engine_request *r = ask(e, 10 + i, large ? N_PROMPT - 300 * i : 60 + i, 40);
			ids[i] = r->id;
			engine_submit(e, r);
		}
		await(e, ids, answers, N);
		for (int i = 0; i < N; i++) {
			same_answer(&want[i], &answers[i], devices[d]);
			buf_free(&answers[i].text);
			buf_free(&want[i].text);
		}
		assert_int_equal(overflow_of(e).lost_requests, 0);
		assert_empty(e);
		engine_destroy(e);
	}
}

/* Narrow pages bring their copies along, and have the same ones however the prompt was cut, beside others as well. */
static void and_so_do_narrow_pages(void **state)
{
	(void)state;
	enum { N = 3 };
	static const char *const types[] = {"int8", "fp8_e4m3"};
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
		for (size_t k = 0; k < sizeof types / sizeof *types; k++) {
			struct answer answers[N] = {0}, want[N];
			uint64_t ids[N];
			for (int i = 0; i < N; i++)
				want[i] = large_answer_of(types[k], devices[d], 30 + i, i == 1 ? N_PROMPT - 7 : 61 + i,
				                          60);
			struct engine_options o = small_options(devices[d], k ? 10 : 0, k ? 0 : 10);
			o.kv_type = types[k];
			o.kv_bytes += o.kv_bytes / 2; /* a part of it is for copies */
			struct engine *e = start(&o);
			assert_true(engine_info(e)->n_ctx_pool < N_PROMPT / 2);
			for (int i = 0; i < N; i++) {
				struct engine_request *r = ask(e, 30 + i, i == 1 ? N_PROMPT - 7 : 61 + i, 60);
				ids[i] = r->id;
				engine_submit(e, r);
			}
			await(e, ids, answers, N);
			for (int i = 0; i < N; i++) {
				same_answer(&want[i], &answers[i], devices[d]);
				buf_free(&want[i].text);
			}
			assert_true(answers[1].usage.context.pages_tier[k ? ENGINE_TIER_RAM : ENGINE_TIER_DISK] > 0);
			for (int i = 0; i < N; i++)
				buf_free(&answers[i].text);
			assert_int_equal(overflow_of(e).wide_refused, 0);
			assert_empty(e);
			engine_destroy(e);
		}
	}
}

static void a_cancelled_one_leaves_nothing(void **state)
{
	(void)state;
	struct answer whole = large_answer("cpu", 3, N_PROMPT, 30);
	struct engine_options o = small_options("cpu", 2, 7);
	struct engine *e = start(&o);
	for (int i = 0; i < 12; i++) {
		struct engine_request *r = ask(e, 3, N_PROMPT, 100);
		uint64_t id = r->id;
		struct answer a = {0};
		engine_submit(e, r);
		/* At another moment each time. */
		for (int64_t pages = i * 10; overflow_of(e).pages < pages;)
			usleep(200);
		engine_cancel(e, id);
		await(e, &id, &a, 1);
		assert_int_equal(a.finish, ENGINE_FINISH_CANCELLED);
		assert_empty(e);
		buf_free(&a.text);
	}
	struct answer b = run(e, ask(e, 3, N_PROMPT, 30));
	same_answer(&whole, &b, "cpu");
	buf_free(&b.text);
	buf_free(&whole.text);
	engine_destroy(e);
}

static void what_is_too_long_even_so_is_refused(void **state)
{
	(void)state;
	struct engine_options o = small_options("cpu", 3, 0);
	struct error err;
	struct list events;
	struct engine *e;
	/* Three groups beside half of the pool are 68 pages. */
	o.context_tokens = 0;
	e = start(&o);
	assert_int_equal(engine_info(e)->n_ctx, (SMALL / 2 + 3 * 16) * 16);
	struct answer a = run(e, ask(e, 4, 1000, 200));
	assert_int_equal(a.error.status, STATUS_CONTEXT_LENGTH);
	/* What a policy chooses from has to be in the pool. */
	struct engine_request *r = ask(e, 4, SMALL * 16 + 5, 10);
	r->context.policy = "evict";
	r->context.by_share = true;
	r->context.shrink_permille = 100;
	struct answer b = run(e, r);
	assert_int_equal(b.error.status, STATUS_CONTEXT_LENGTH);
	assert_empty(e);
	engine_destroy(e);
	/* A context that was asked for by name and does not fit is refused at the start. */
	o.context_tokens = CONTEXT;
	list_init(&events);
	assert_int_equal(engine_create(&o, &e, &err), STATUS_OK);
	assert_true(engine_wait(e, &events, -1));
	engine_event_free(list_entry(list_pop_front(&events), struct engine_event, link));
	assert_int_equal(engine_state(e), ENGINE_FAILED);
	assert_non_null(strstr(engine_load_error(e)->message, "with what is below it"));
	engine_destroy(e);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(four_times_the_pool_gives_the_same_tokens),
		cmocka_unit_test(an_answer_may_outgrow_the_pool),
		cmocka_unit_test(others_have_their_answers_beside_large_ones),
		cmocka_unit_test(a_cancelled_one_leaves_nothing),
		cmocka_unit_test(and_so_do_narrow_pages),
		cmocka_unit_test(what_is_too_long_even_so_is_refused),
	};
	if (argc > 1)
		cmocka_set_test_filter(argv[1]);
	return cmocka_run_group_tests(tests, make_context_model, remove_context_model);
}
