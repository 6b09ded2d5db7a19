/* Tenants in the scheduler: turns, limits, what they are charged; and the census that audits it all. */
#include "engine/base/log.h"
#include "tests/unit/engine/sched_fixture.h"

/* Admits one request at a time and tells whose it was. */
static int32_t next_admitted(struct fixture *f)
{
	int32_t id;
	assert_true(sched_build(&f->sched));
	struct request *r = f->sched.part[0].request;
	id = r->tenant->id;
	finish(f, r);
	return id;
}

static void a_crowd_delays_another_tenant_by_one_request(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	f.sched.max_running = 1;
	struct tenant *a = make_tenant(&f, 1, 0), *b = make_tenant(&f, 2, 0);
	for (int i = 0; i < 20; i++)
		add_fresh_of(&f, a, NULL, 20, 1);
	for (int i = 0; i < 3; i++)
		assert_int_equal(next_admitted(&f), 1);
	for (int i = 0; i < 3; i++)
		add_fresh_of(&f, b, NULL, 20, 1);
	/* One of the crowd had its turn first; from there they take turns. */
	int32_t seen[7];
	for (int i = 0; i < 7; i++)
		seen[i] = next_admitted(&f);
	assert_memory_equal(seen, ((int32_t[]){1, 2, 1, 2, 1, 2, 1}), sizeof seen);
	while (f.sched.n_waiting)
		assert_int_equal(next_admitted(&f), 1);
	/* Whoever comes back after a pause has no turns saved up, and owes none. */
	add_fresh_of(&f, a, NULL, 20, 1);
	add_fresh_of(&f, b, NULL, 20, 1);
	add_fresh_of(&f, b, NULL, 20, 1);
	assert_int_equal(next_admitted(&f), 1);
	assert_int_equal(next_admitted(&f), 2);
	assert_int_equal(next_admitted(&f), 2);
	teardown(&f);
}

static void cancelled_requests_cost_no_turns(void **state)
{
	(void)state;
	struct fixture f;
	struct request *r[20];
	setup(&f, 100);
	f.sched.max_running = 1;
	struct tenant *a = make_tenant(&f, 1, 0), *b = make_tenant(&f, 2, 0);
	for (int i = 0; i < 20; i++)
		r[i] = add_fresh_of(&f, a, NULL, 20, 1);
	for (int i = 0; i < 20; i++)
		finish(&f, r[i]);
	for (int i = 0; i < 5; i++)
		add_fresh_of(&f, b, NULL, 20, 1);
	add_fresh_of(&f, a, NULL, 20, 1);
	assert_int_equal(next_admitted(&f), 2);
	assert_int_equal(next_admitted(&f), 1);
	while (f.sched.n_waiting)
		next_admitted(&f);
	teardown(&f);
}

static void a_limit_is_kept_to_the_page_and_stops_only_its_tenant(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	struct tenant *a = make_tenant(&f, 1, 9), *b = make_tenant(&f, 2, 0);
	for (int i = 0; i < 5; i++)
		add_fresh_of(&f, a, NULL, 40, 60);
	add_fresh_of(&f, b, NULL, 200, 60);
	bool both = false;
	int64_t most = 0;
	for (int steps = 0; f.sched.n_running + f.sched.n_waiting > 0; steps++) {
		assert_true(steps < 10000);
		run_step(&f);
		audit(&f);
		assert_true(a->kv.n_pages <= 9);
		most = a->kv.n_pages > most ? a->kv.n_pages : most;
		both = both || (a->n_running && b->n_running);
	}
	assert_true(both);
	assert_int_equal(most, 9);
	/* They end one after the other, each whole: the limit set some back, and nobody else. */
	assert_true(f.sched.preempted[ENGINE_ROOM_CAP] > 0);
	assert_int_equal(f.sched.preempted[ENGINE_ROOM_DECODE], 0);
	assert_int_equal(a->ended.requests, 5);
	assert_int_equal(a->kv.n_pages, 0);
	teardown(&f);
}

static void sessions_cost_their_tenant_nothing_while_nothing_runs(void **state)
{
	(void)state;
	struct fixture f;
	int32_t turn[200];
	for (int32_t i = 0; i < 200; i++)
		turn[i] = i;
	setup(&f, 100);
	struct tenant *a = make_tenant(&f, 1, 12);
	struct session *one = make_session_of(&f, 1, "one"), *two = make_session_of(&f, 1, "two");
	add(&f, one, turn, 100, 1);
	struct request *r = add_fresh(&f, two, 60, 1);
	run_step(&f);
	assert_true(a->kv.n_pages > 0);
	finish(&f, r);
	run_all(&f);
	/* Both left their KV to the index, where it is nobody's to pay for and may be found again. */
	assert_int_equal(a->kv.n_pages, 0);
	assert_true(session_tokens(&f, one) == 100 && session_tokens(&f, two) > 0);
	/* A turn takes its pages over, and is charged for them once. */
	r = add(&f, one, turn, 150, 10);
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 100);
	assert_int_equal(a->kv.n_pages, 10);
	audit(&f);
	run_all(&f);
	assert_int_equal(f.sched.n_preemptions, 0);
	assert_int_equal(a->kv.n_pages, 0);
	teardown(&f);
}

static void what_could_not_be_enough_is_not_taken(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 20);
	struct session *s = make_session(&f, "s");
	add_fresh(&f, s, 60, 1); /* leaves 4 pages in the index */
	run_all(&f);
	struct request *big = add_fresh(&f, NULL, 200, 40); /* 13 pages, then more */
	run_step(&f);
	while (big->state != REQUEST_DECODE)
		run_step(&f);
	/* 3 pages are free, 4 could be had: 10 cannot, so the index keeps what it has. */
	struct request *late = add_fresh(&f, NULL, 160, 1);
	run_step(&f);
	assert_int_equal(late->state, REQUEST_WAITING);
	assert_int_equal(session_tokens(&f, s), 60);
	finish(&f, big);
	run_step(&f);
	assert_int_equal(late->state, REQUEST_PREFILL);
	run_all(&f);
	teardown(&f);
}

static void the_census_counts_each_page_under_its_first_holder(void **state)
{
	(void)state;
	struct fixture f;
	int32_t prompt[100];
	for (int32_t i = 0; i < 100; i++)
		prompt[i] = i;
	setup(&f, 50);
	struct session *s = make_session(&f, "s");
	add(&f, s, prompt, 56, 1); /* a session with 3 full pages and 8 positions of another, all in the index */
	run_all(&f);
	struct engine_kv kv = audit(&f);
	assert_int_equal(kv.pages_sessions, 4);
	assert_int_equal(kv.refs_index, 4);
	assert_int_equal(kv.tokens_sessions, 56);
	assert_int_equal(kv.positions_used, 56);
	assert_int_equal(kv.positions_unused, 8);
	assert_int_equal(kv.pages_shared, 0);
	assert_float_equal(kv.fragmentation, 0.125, 1e-9);
	/* Another prompt begins with the full pages: they are the generation's now, first of all. */
	prompt[50] = -1;
	struct request *r = add(&f, NULL, prompt, 70, 20);
	run_step(&f);
	kv = audit(&f);
	assert_int_equal(kv.pages_running, 5);
	assert_int_equal(kv.refs_running, 5);
	assert_int_equal(kv.pages_sessions, 1);
	assert_int_equal(kv.pages_shared, 3); /* the session still names them */
	struct engine_session_info info;
	session_describe(&f.sessions, s, f.pool, &info);
	assert_int_equal(info.n_pages, 4);
	assert_int_equal(info.pages_exclusive, 1);
	assert_int_equal(info.references, 4 + 3);
	/* A third shares them, too. */
	prompt[52] = -2;
	struct request *q = add(&f, NULL, prompt, 70, 20);
	run_step(&f);
	kv = audit(&f);
	assert_int_equal(kv.pages_shared, 3);
	assert_int_equal(kv.pages_running, 7);
	assert_int_equal(kv.refs_running, 10);
	finish(&f, r);
	finish(&f, q);
	kv = audit(&f);
	assert_int_equal(kv.pages_running, 0);
	assert_int_equal(kv.pages_sessions, 4);
	assert_int_equal(kv.pages_sessions + kv.pages_index, kv.refs_index);
	/*
	 * All of its pages are there; then the index loses what it has, and without a tier they are to be computed
	 * again.
	 */
	session_describe(&f.sessions, s, f.pool, &info);
	assert_int_equal(info.pages_device, 4);
	assert_int_equal(info.pages_lost, 0);
	while (kv_prefix_evict(f.prefix, 0, EVICT_FOR_PROMPT))
		;
	session_describe(&f.sessions, s, f.pool, &info);
	assert_int_equal(info.n_pages, 0);
	assert_int_equal(info.pages_device, 0);
	assert_int_equal(info.pages_lost, 4);
	teardown(&f);
}

/* Lets go of pages until only n are in use. */
static void evict_to(struct fixture *f, int32_t n)
{
	while (kv_pool_n_pages(f->pool) - kv_pool_n_free(f->pool) > n)
		assert_true(kv_prefix_evict(f->prefix, clock_now_ms(&now), EVICT_FOR_PROMPT));
}

static void the_alarm_has_a_hysteresis(void **state)
{
	(void)state;
	struct fixture f;
	log_set_level(LOG_OFF);
	setup(&f, 60);
	/* 10 conversations of 30 positions in two pages: a sixteenth is unused, which is well. */
	for (int i = 0; i < 10; i++)
		add_fresh(&f, NULL, 30, 1);
	run_all(&f);
	struct engine_kv kv = audit(&f);
	assert_int_equal(kv.pages_index, 20);
	assert_true(kv.fragmentation < 0.15 && !kv.alarm);
	/* Six generations of 4 positions in a page of 16 more: more than a fifth is unused. */
	struct request *brief[6];
	for (int i = 0; i < 6; i++)
		brief[i] = add_fresh(&f, NULL, 4, 50);
	run_step(&f);
	kv = audit(&f);
	assert_true(kv.fragmentation > 0.20 && kv.alarm);
	/* Between the two thresholds it stays as it was; below the lower one it is well again. */
	bool between = false;
	for (int steps = 0; kv.alarm; steps++) {
		assert_true(steps < 20);
		assert_true(kv.fragmentation >= 0.15);
		between = between || kv.fragmentation < 0.20;
		run_step(&f);
		kv = audit(&f);
	}
	assert_true(between);
	assert_true(kv.fragmentation < 0.15);
	/* A handful of pages is not worth an alarm, whatever is in them. */
	for (int i = 0; i < 6; i++)
		finish(&f, brief[i]);
	evict_to(&f, 0);
	for (int i = 0; i < 6; i++)
		brief[i] = add_fresh(&f, NULL, 2, 50);
	run_step(&f);
	kv = audit(&f);
	assert_int_equal(kv.pages_running, 6);
	assert_true(kv.fragmentation > 0.5 && !kv.alarm);
	run_all(&f);
	teardown(&f);
}

static void a_full_house_forgets_no_page(void **state)
{
	(void)state;
	struct fixture f;
	struct session *s[6];
	struct tenant *t[3];
	bool lowered[3] = {false, false, false};
	uint64_t rng = 99;
	setup(&f, 40);
	for (int i = 0; i < 3; i++)
		t[i] = make_tenant(&f, i + 1, (int32_t[]){12, 20, 0}[i]);
	for (int i = 0; i < 6; i++) {
		char id[8];
		snprintf(id, sizeof id, "s%d", i / 3);
		s[i] = make_session_of(&f, i % 3 + 1, id);
	}
	for (int round = 0; round < 6000; round++) {
		if (unit_rand(&rng) % 3 == 0 && f.sched.n_waiting < 20) {
			int32_t prompt[200], n = 1 + (int32_t)(unit_rand(&rng) % 100),
					     who = (int32_t)(unit_rand(&rng) % 6);
			int32_t family = (int32_t)(unit_rand(&rng) % 3), cut = (int32_t)(unit_rand(&rng) % 100);
			for (int32_t i = 0; i < n; i++)
				prompt[i] = i < cut ? family * 1000 + i : (int32_t)(unit_rand(&rng) % 1000) + 10000;
			add_of(&f, t[who % 3], unit_rand(&rng) % 2 ? s[who] : NULL, prompt, n,
			       (int32_t)(unit_rand(&rng) % 90));
		}
		if (unit_rand(&rng) % 16 == 0) {
			struct request *r = sched_find(&f.sched, 1 + unit_rand(&rng) % f.next_id);
			if (r)
				finish(&f, r);
		}
		if (unit_rand(&rng) % 256 == 0) { /* a limit moves, but never below what a request may come to */
			int32_t who = (int32_t)(unit_rand(&rng) % 3);
			make_tenant(&f, who + 1, 12 + (int32_t)(unit_rand(&rng) % 10));
			lowered[who] = true;
		}
		run_step(&f);
		audit(&f);
		for (int i = 0; i < 3; i++) {
			/* A lower limit stops growth at once; what is there may end before it is kept again. */
			lowered[i] = lowered[i] && t[i]->kv.n_pages > t[i]->max_pages;
			assert_true(lowered[i] || t[i]->kv.n_pages <= t[i]->max_pages);
		}
	}
	run_all(&f);
	assert_true(f.sched.preempted[ENGINE_ROOM_CAP] > 20);
	audit(&f);
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(a_crowd_delays_another_tenant_by_one_request),
          cmocka_unit_test(cancelled_requests_cost_no_turns),
          cmocka_unit_test(a_limit_is_kept_to_the_page_and_stops_only_its_tenant),
          cmocka_unit_test(sessions_cost_their_tenant_nothing_while_nothing_runs),
          cmocka_unit_test(what_could_not_be_enough_is_not_taken),
          cmocka_unit_test(the_census_counts_each_page_under_its_first_holder),
          cmocka_unit_test(the_alarm_has_a_hysteresis), cmocka_unit_test(a_full_house_forgets_no_page))
