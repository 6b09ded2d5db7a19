/* Work in the background, which nobody waits for: last in every order. See sched_fixture.h for the device. */
#include "tests/unit/engine/sched_fixture.h"

static struct request *add_background(struct fixture *f, int32_t n, int32_t max_tokens)
{
	struct request *r = add_fresh(f, NULL, n, max_tokens);
	/* As sched_add() would have found it. */
	sched_remove(&f->sched, r);
	r->spec->background = true;
	r->state = REQUEST_WAITING;
	sched_add(&f->sched, r);
	return r;
}

static void it_begins_when_nothing_else_runs_or_waits(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	struct request *late = add_background(&f, 20, 5), *user = add_fresh(&f, NULL, 20, 3);
	uint64_t id = user->id;
	run_step(&f);
	assert_int_equal(user->state, REQUEST_DECODE);
	assert_int_equal(late->state, REQUEST_WAITING);
	while (sched_find(&f.sched, id)) {
		assert_int_equal(late->state, REQUEST_WAITING);
		run_step(&f);
	}
	run_step(&f);
	assert_int_equal(late->state, REQUEST_DECODE);
	/* Whoever comes then runs beside it. */
	user = add_fresh(&f, NULL, 20, 3);
	run_step(&f);
	assert_int_equal(user->state, REQUEST_DECODE);
	assert_int_equal(f.sched.batch.n_seqs, 2);
	run_all(&f);
	teardown(&f);
}

static void it_takes_no_turn_from_anybody(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	struct request *r = add_background(&f, 20, 2);
	uint64_t turn = f.sched.turn;
	run_all(&f);
	(void)r;
	assert_int_equal(f.sched.turn, turn);
	struct request *user = add_fresh(&f, NULL, 20, 1);
	assert_int_equal(user->turn, turn + 1);
	run_all(&f);
	teardown(&f);
}

static void it_gives_up_its_place_and_its_pages_for_a_prompt(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 10);
	struct request *r = add_background(&f, 5 * PAGE, 40);
	run_step(&f);
	run_step(&f);
	assert_int_equal(r->state, REQUEST_DECODE);
	/* Six pages are held, and eight are wanted. */
	struct request *user = add_fresh(&f, NULL, 7 * PAGE + 4, 2);
	uint64_t id = user->id;
	run_step(&f);
	assert_int_equal(user->state, REQUEST_PREFILL);
	assert_int_equal(r->state, REQUEST_WAITING);
	assert_int_equal(f.sched.preempted[ENGINE_ROOM_PROMPT], 1);
	while (sched_find(&f.sched, id))
		run_step(&f);
	audit(&f);
	run_all(&f); /* and goes on afterwards, with the answer that it would have had */
	teardown(&f);
}

static void all_places_taken_by_it_are_free_for_others(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	for (int i = 0; i < MAX_RUNNING; i++)
		add_background(&f, 20, 30);
	for (int i = 0; i < 3; i++)
		run_step(&f);
	assert_int_equal(f.sched.n_running, MAX_RUNNING);
	struct request *user = add_fresh(&f, NULL, 20, 3);
	run_step(&f);
	assert_int_equal(user->state, REQUEST_DECODE);
	assert_int_equal(f.sched.n_running, MAX_RUNNING);
	run_all(&f);
	teardown(&f);
}

static void one_that_is_waited_for_is_in_the_background_no_longer(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	struct request *r = add_background(&f, 20, 5);
	add_fresh(&f, NULL, 20, 40);
	run_step(&f);
	assert_int_equal(r->state, REQUEST_WAITING);
	sched_hurry(&f.sched, r);
	run_step(&f);
	assert_int_equal(r->state, REQUEST_DECODE);
	run_all(&f);
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(it_begins_when_nothing_else_runs_or_waits), cmocka_unit_test(it_takes_no_turn_from_anybody),
          cmocka_unit_test(it_gives_up_its_place_and_its_pages_for_a_prompt),
          cmocka_unit_test(all_places_taken_by_it_are_free_for_others),
          cmocka_unit_test(one_that_is_waited_for_is_in_the_background_no_longer))
