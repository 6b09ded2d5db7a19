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
	assert_int_equal(a->requests, 5);
	assert_int_equal(a->kv.n_pages, 0);
	teardown(&f);
}

static void a_tenant_at_its_limit_drops_its_own_idle_sessions_first(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 100);
	make_tenant(&f, 1, 10);
	struct session *first = make_session_of(&f, 1, "a"), *second = make_session_of(&f, 1, "b"), *other = make_session(&f, "c");
	struct tenant *a = first->tenant;
	add_fresh(&f, other, 60, 1);
	add_fresh(&f, first, 60, 1);
	run_all(&f);
	add_fresh(&f, second, 60, 1);
	run_all(&f);
	assert_int_equal(a->kv.n_pages, 8);
	assert_int_equal(a->idle_pages, 8);
	add_fresh_of(&f, a, NULL, 80, 1);
	run_all(&f);
	/* The one used longest ago is gone, and what it computed is in the index, for nobody's account. */
	assert_int_equal(first->kv.n_pages, 0);
	assert_int_equal(second->kv.n_pages, 4);
	assert_int_equal(other->kv.n_pages, 4);
	assert_int_equal(first->n_dropped, 1);
	assert_int_equal(f.sessions.dropped[ENGINE_ROOM_CAP], 1);
	assert_int_equal(f.sessions.pages_dropped, 4);
	assert_int_equal(a->kv.n_pages, 4);
	audit(&f);
	teardown(&f);
}

static void a_turn_of_a_session_is_not_charged_twice(void **state)
{
	(void)state;
	struct fixture f;
	int32_t turn[200];
	for (int32_t i = 0; i < 200; i++)
		turn[i] = i;
	setup(&f, 100);
	make_tenant(&f, 1, 10);
	struct session *s = make_session_of(&f, 1, "s");
	add(&f, s, turn, 100, 1);
	run_all(&f);
	assert_int_equal(s->tenant->kv.n_pages, 7);
	add(&f, s, turn, 150, 10);
	run_all(&f);
	assert_int_equal(s->tenant->kv.n_pages, 10);
	assert_int_equal(f.sched.n_preemptions, 0);
	assert_int_equal(f.sessions.kv_dropped, 0);
	session_remove(&f.sessions, f.pool, s);
	assert_int_equal(tenant_find(&f.tenants, 1)->kv.n_pages, 0);
	assert_int_equal(f.sessions.pages_released, 10);
	teardown(&f);
}

static void what_could_not_be_enough_is_not_taken(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 20);
	struct session *s = make_session(&f, "s");
	add_fresh(&f, s, 60, 1); /* 4 pages, then idle */
	run_all(&f);
	struct request *big = add_fresh(&f, NULL, 200, 40); /* 13 pages, then more */
	run_step(&f);
	while (big->state != REQUEST_DECODE)
		run_step(&f);
	/* 3 pages are free, 4 could be had: 10 cannot, so the session keeps what it has. */
	struct request *late = add_fresh(&f, NULL, 160, 1);
	run_step(&f);
	assert_int_equal(late->state, REQUEST_WAITING);
	assert_int_equal(s->kv.n_pages, 4);
	assert_int_equal(f.sessions.kv_dropped, 0);
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
	add(&f, s, prompt, 56, 1); /* a session with 3 full pages and 8 positions of another */
	run_all(&f);
	struct engine_kv kv = audit(&f);
	assert_int_equal(kv.pages_sessions, 4);
	assert_int_equal(kv.refs_index, 3);
	assert_int_equal(kv.tokens_sessions, 56);
	assert_int_equal(kv.positions_used, 56);
	assert_int_equal(kv.positions_unused, 8);
	assert_int_equal(kv.tails, 1);
	assert_int_equal(kv.pages_shared, 0);
	assert_float_equal(kv.fragmentation, 0.125, 1e-9);
	/* Another sequence shares the full pages; they move to the generation's account and are shared. */
	prompt[60] = -1;
	struct request *r = add(&f, NULL, prompt, 70, 20);
	run_step(&f);
	kv = audit(&f);
	assert_int_equal(kv.pages_shared, 3);
	assert_int_equal(kv.pages_running, 5);
	assert_int_equal(kv.pages_sessions, 1);
	assert_int_equal(kv.refs_running + kv.refs_sessions, 9);
	finish(&f, r);
	kv = audit(&f);
	assert_int_equal(kv.pages_running, 0);
	assert_int_equal(kv.pages_index, 1); /* the fourth page of the generation was full and stays known */
	teardown(&f);
}

static void the_alarm_has_a_hysteresis(void **state)
{
	(void)state;
	struct fixture f;
	struct session *s[20];
	log_set_level(LOG_OFF);
	setup(&f, 60);
	for (int i = 0; i < 20; i++) {
		char id[8];
		snprintf(id, sizeof id, "s%d", i);
		s[i] = make_session(&f, id);
		/* 14 of 16 positions used: an eighth is unused, which is well. */
		add_fresh(&f, s[i], 14, 1);
		run_all(&f);
	}
	assert_false(audit(&f).alarm);
	/* Six sessions of 4 in 16 more: more than a fifth unused. */
	for (int i = 0; i < 6; i++) {
		char id[8];
		snprintf(id, sizeof id, "t%d", i);
		add_fresh(&f, make_session(&f, id), 4, 1);
		run_all(&f);
	}
	struct engine_kv kv = audit(&f);
	assert_true(kv.fragmentation > 0.20 && kv.alarm);
	/* Between the two thresholds it stays as it was. */
	for (int i = 0; i < 4; i++)
		session_remove(&f.sessions, f.pool, session_find(&f.sessions, 0, (char[]){'t', (char)('0' + i), 0}));
	kv = audit(&f);
	assert_true(kv.fragmentation > 0.15 && kv.fragmentation < 0.20);
	assert_true(kv.alarm);
	for (int i = 4; i < 6; i++)
		session_remove(&f.sessions, f.pool, session_find(&f.sessions, 0, (char[]){'t', (char)('0' + i), 0}));
	kv = audit(&f);
	assert_true(kv.fragmentation < 0.15 && !kv.alarm);
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
			int32_t prompt[200], n = 1 + (int32_t)(unit_rand(&rng) % 100), who = (int32_t)(unit_rand(&rng) % 6);
			int32_t family = (int32_t)(unit_rand(&rng) % 3), cut = (int32_t)(unit_rand(&rng) % 100);
			for (int32_t i = 0; i < n; i++)
				prompt[i] = i < cut ? family * 1000 + i : (int32_t)(unit_rand(&rng) % 1000) + 10000;
			add_of(&f, t[who % 3], unit_rand(&rng) % 2 ? s[who] : NULL, prompt, n, (int32_t)(unit_rand(&rng) % 90));
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
	assert_true(f.sessions.dropped[ENGINE_ROOM_CAP] > 20);
	audit(&f);
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(a_crowd_delays_another_tenant_by_one_request), cmocka_unit_test(cancelled_requests_cost_no_turns),
          cmocka_unit_test(a_limit_is_kept_to_the_page_and_stops_only_its_tenant),
          cmocka_unit_test(a_tenant_at_its_limit_drops_its_own_idle_sessions_first),
          cmocka_unit_test(a_turn_of_a_session_is_not_charged_twice),
          cmocka_unit_test(what_could_not_be_enough_is_not_taken),
          cmocka_unit_test(the_census_counts_each_page_under_its_first_holder),
          cmocka_unit_test(the_alarm_has_a_hysteresis), cmocka_unit_test(a_full_house_forgets_no_page))
