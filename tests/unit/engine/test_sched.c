/* The scheduler: see sched_fixture.h for the device. */
#include "tests/unit/engine/sched_fixture.h"

static void prompts_are_cut_into_chunks_and_share_steps_with_decoding(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	add_fresh(&f, NULL, 10, 50);
	assert_int_equal(run_step(&f), 10);
	add_fresh(&f, NULL, 300, 5);
	assert_int_equal(run_step(&f), STEP);
	assert_int_equal(f.sched.batch.n_seqs, 2);
	assert_int_equal(f.sched.part[0].n_rows, 1);
	assert_int_equal(f.sched.part[1].n_rows, STEP - 1);
	run_all(&f);
	teardown(&f);
}

static void a_short_prompt_does_not_wait_for_a_long_one(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	add_fresh(&f, NULL, 900, 1);
	struct request *brief = add_fresh(&f, NULL, 20, 1);
	uint64_t id = brief->id;
	run_step(&f);
	assert_null(sched_find(&f.sched, id));
	run_all(&f);
	teardown(&f);
}

static void the_next_turn_computes_only_what_is_new(void **state)
{
	(void)state;
	struct fixture f;
	int32_t turn[200];
	setup(&f, 100);
	struct session *s = make_session(&f, "s");
	for (int32_t i = 0; i < 200; i++)
		turn[i] = i;
	add(&f, s, turn, 50, 1);
	run_all(&f);
	assert_int_equal(session_tokens(&f, s), 50);
	struct request *r = add(&f, s, turn, 60, 1);
	assert_int_equal(run_step(&f), 10);
	run_all(&f);
	/* A history that forks after 40 tokens keeps those 40. */
	turn[40] = -1;
	r = add(&f, s, turn, 70, 2);
	assert_int_equal(run_step(&f), 30);
	assert_int_equal(r->usage.cached_tokens, 40);
	run_all(&f);
	/* The same prompt again still computes its last token. */
	r = add(&f, s, turn, 70, 2);
	assert_int_equal(run_step(&f), 1);
	assert_int_equal(r->usage.cached_tokens, 69);
	run_all(&f);
	teardown(&f);
}

static void requests_of_one_session_run_one_after_the_other(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	struct session *s = make_session(&f, "s");
	struct request *first = add_fresh(&f, s, 20, 5), *second = add_fresh(&f, s, 20, 5);
	struct request *other = add_fresh(&f, NULL, 20, 5);
	run_step(&f);
	assert_int_equal(first->state, REQUEST_DECODE);
	assert_int_equal(second->state, REQUEST_WAITING);
	assert_int_equal(other->state, REQUEST_DECODE);
	run_all(&f);
	assert_int_equal(s->ended.requests, 2);
	assert_int_equal(s->n_waiting, 0);
	teardown(&f);
}

static void a_prompt_shares_the_full_pages_that_anyone_computed(void **state)
{
	(void)state;
	struct fixture f;
	int32_t turn[100];
	setup(&f, 100);
	struct session *a = make_session(&f, "a"), *b = make_session(&f, "b");
	for (int32_t i = 0; i < 100; i++)
		turn[i] = i;
	add(&f, a, turn, 40, 1);
	run_all(&f);
	struct request *fork = add(&f, b, turn, 45, 3);
	assert_int_equal(run_step(&f), 45 - 40);
	assert_int_equal(fork->usage.cached_tokens, 40);
	/* The index and the fork hold what is shared; the tail, which nobody else wanted, was handed over. */
	assert_int_equal(kv_pool_refs(f.pool, fork->kv.pages[0]), 2);
	assert_int_equal(kv_pool_refs(f.pool, fork->kv.pages[2]), 1);
	assert_int_equal(session_tokens(&f, a), 32);
	/* Of another tenant nothing is shared. */
	struct request *other = add(&f, NULL, turn, 45, 3);
	of_another_tenant(other);
	assert_int_equal(run_step(&f), 45 + 1);
	assert_int_equal(other->usage.cached_tokens, 0);
	run_all(&f);
	teardown(&f);
}

static void what_a_cancelled_request_computed_is_not_lost(void **state)
{
	(void)state;
	struct fixture f;
	int32_t prompt[300];
	setup(&f, 100);
	for (int32_t i = 0; i < 300; i++)
		prompt[i] = i;
	struct request *r = add(&f, NULL, prompt, 300, 5);
	run_step(&f);
	run_step(&f);
	assert_int_equal(r->kv.n_tokens, 2 * STEP);
	finish(&f, r);
	r = add(&f, NULL, prompt, 300, 5);
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 2 * STEP);
	run_all(&f);
	teardown(&f);
}

static void equal_prompts_that_arrive_together_are_computed_once(void **state)
{
	(void)state;
	struct fixture f;
	int32_t prompt[200], computed = 0, rows;
	setup(&f, 100);
	for (int32_t i = 0; i < 200; i++)
		prompt[i] = i;
	for (int32_t i = 0; i < 5; i++) {
		prompt[199] = 1000 + i;
		add(&f, NULL, prompt, 200, 1);
	}
	while ((rows = run_step(&f)) > 0)
		computed += rows;
	/* 192 tokens are full pages of the common beginning; each computes its own rest. */
	assert_int_equal(computed, 192 + 5 * 8);
	teardown(&f);
}

static void memory_goes_from_the_index_first_then_from_the_youngest(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 8);
	struct session *s = make_session(&f, "s");
	add_fresh(&f, s, 50, 1);
	run_all(&f);
	assert_int_equal(session_tokens(&f, s), 50);
	struct request *old = add_fresh(&f, NULL, 60, 60);
	run_step(&f);
	assert_int_equal(f.sched.n_preemptions, 0);
	struct request *young = add_fresh(&f, NULL, 20, 40);
	uint64_t young_id = young->id;
	while (f.sched.n_preemptions == 0)
		assert_true(run_step(&f) > 0);
	assert_int_equal(session_tokens(&f, s), 0);
	assert_int_equal(old->usage.n_preempted, 0);
	young = sched_find(&f.sched, young_id);
	assert_int_equal(young->usage.n_preempted, 1);
	assert_int_equal(young->state, REQUEST_WAITING);
	assert_true(young->tokens.n > 20);
	run_all(&f);
	teardown(&f);
}

static void what_a_queued_request_will_hit_is_not_evicted(void **state)
{
	(void)state;
	struct fixture f;
	int32_t prompt[100];
	setup(&f, 100);
	for (int32_t i = 0; i < 100; i++)
		prompt[i] = i;
	add(&f, NULL, prompt, 100, 1);
	run_all(&f);
	for (int i = 0; i < MAX_RUNNING; i++)
		add_fresh(&f, NULL, 20, 10);
	struct request *queued = add(&f, NULL, prompt, 100, 5);
	run_step(&f);
	assert_int_equal(queued->state, REQUEST_WAITING);
	while (kv_prefix_evict(f.prefix, clock_now_ms(&now), EVICT_FOR_PROMPT))
		;
	while (queued->state == REQUEST_WAITING)
		assert_true(run_step(&f) > 0);
	assert_int_equal(queued->usage.cached_tokens, 96);
	run_all(&f);
	teardown(&f);
}

static void what_a_queued_request_holds_goes_before_anyone_is_preempted(void **state)
{
	(void)state;
	struct fixture f;
	int32_t prompt[64];
	setup(&f, 8);
	for (int32_t i = 0; i < 64; i++)
		prompt[i] = i;
	add(&f, NULL, prompt, 64, 0);
	run_all(&f);
	struct session *s = make_session(&f, "s");
	add_fresh(&f, s, 20, 90);
	struct request *queued = add(&f, s, prompt, 64, 1);
	run_step(&f);
	assert_int_equal(queued->kv.n_pages, 4);
	run_all(&f);
	assert_int_equal(f.sched.n_preemptions, 0);
	teardown(&f);
}

static void a_prompt_that_only_warms_the_cache_asks_for_no_logits(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	struct session *s = make_session(&f, "s");
	add_fresh(&f, s, 30, 0);
	assert_int_equal(run_step(&f), 30);
	assert_int_equal(f.sched.batch.n_outputs, 0);
	assert_int_equal(session_tokens(&f, s), 30);
	teardown(&f);
}

static void steps_keep_to_their_time_once_the_speed_is_known(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	sched_measure(&f.sched, 160, true, 1000000000); /* 160 rows a second: 40 in a quarter of one */
	add_fresh(&f, NULL, 300, 2);
	assert_int_equal(run_step(&f), 40);
	run_all(&f);
	teardown(&f);
}

static uint64_t n_keys_made;

static void counted_next(const struct kv_key *before, const int32_t *tokens, struct kv_key *out)
{
	n_keys_made++;
	kv_key_next(before, tokens, out);
}

/* However long a queue waits for memory, and however often a step asks whether its head fits by now. */
static void a_prompt_is_hashed_once_however_long_it_waits(void **state)
{
	(void)state;
	enum { REQUESTS = 60, PROMPT = 400, ANSWER = 40 };
	static const struct kv_key_ops counted = {counted_next, kv_key_tail};
	struct fixture f;
	int steps = 0;
	setup(&f, 64);
	kv_prefix_set_key_ops(f.prefix, &counted);
	n_keys_made = 0;
	for (int i = 0; i < REQUESTS; i++)
		add_fresh(&f, NULL, PROMPT, ANSWER);
	while (run_step(&f) > 0)
		steps++;
	assert_int_equal(f.sched.n_running + f.sched.n_waiting, 0);
	assert_true(steps > 10 * REQUESTS);
	assert_true(n_keys_made <= REQUESTS * (PROMPT + ANSWER) / PAGE);
	teardown(&f);
}

/*
 * Many requests, few pages: everything ends, nothing is ever read that was not the request's own, every page comes
 * back.
 */
static void random_work_under_pressure(void **state)
{
	(void)state;
	struct fixture f;
	struct session *s[5];
	uint64_t rng = 4242;
	setup(&f, 30);
	for (int i = 0; i < 5; i++) {
		char id[8];
		snprintf(id, sizeof id, "s%d", i);
		s[i] = make_session(&f, id);
	}
	for (int round = 0; round < 6000; round++) {
		if (unit_rand(&rng) % 4 == 0 && f.sched.n_waiting < 20) {
			int32_t prompt[300], n = 1 + (int32_t)(unit_rand(&rng) % 200);
			/* Few distinct beginnings, so that histories are common and fork at random places. */
			int32_t family = (int32_t)(unit_rand(&rng) % 3), cut = (int32_t)(unit_rand(&rng) % 200);
			for (int32_t i = 0; i < n; i++)
				prompt[i] = i < cut ? family * 1000 + i : (int32_t)(unit_rand(&rng) % 1000) + 10000;
			struct request *r = add(&f, unit_rand(&rng) % 2 ? s[unit_rand(&rng) % 5] : NULL, prompt, n,
			                        (int32_t)(unit_rand(&rng) % 100));
			if (unit_rand(&rng) % 8 == 0)
				of_another_tenant(r);
		}
		if (unit_rand(&rng) % 16 == 0) {
			struct request *r = sched_find(&f.sched, 1 + unit_rand(&rng) % f.next_id);
			if (r)
				finish(&f, r);
		}
		if (unit_rand(&rng) % 64 == 0)
			kv_prefix_evict(f.prefix, clock_now_ms(&now), EVICT_FOR_PROMPT);
		run_step(&f);
		if (round % 16 == 0)
			audit(&f);
	}
	run_all(&f);
	assert_true(f.sched.n_preemptions > 20);
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(prompts_are_cut_into_chunks_and_share_steps_with_decoding),
          cmocka_unit_test(a_short_prompt_does_not_wait_for_a_long_one),
          cmocka_unit_test(the_next_turn_computes_only_what_is_new),
          cmocka_unit_test(requests_of_one_session_run_one_after_the_other),
          cmocka_unit_test(a_prompt_shares_the_full_pages_that_anyone_computed),
          cmocka_unit_test(what_a_cancelled_request_computed_is_not_lost),
          cmocka_unit_test(equal_prompts_that_arrive_together_are_computed_once),
          cmocka_unit_test(memory_goes_from_the_index_first_then_from_the_youngest),
          cmocka_unit_test(what_a_queued_request_will_hit_is_not_evicted),
          cmocka_unit_test(what_a_queued_request_holds_goes_before_anyone_is_preempted),
          cmocka_unit_test(a_prompt_that_only_warms_the_cache_asks_for_no_logits),
          cmocka_unit_test(steps_keep_to_their_time_once_the_speed_is_known),
          cmocka_unit_test(a_prompt_is_hashed_once_however_long_it_waits),
          cmocka_unit_test(random_work_under_pressure))
