/* The scheduler under context policies: see sched_fixture.h for the device, which checks what each row sees. */
#include "tests/unit/engine/sched_fixture.h"

static struct request *add_streaming(struct fixture *f, struct session *s, const int32_t *prompt, int32_t n,
                                     int32_t max_tokens, struct kv_policy policy)
{
	return add_under(f, tenant_find(&f->tenants, 0), s, prompt, n, max_tokens, policy);
}

static void count_up(int32_t *prompt, int32_t n, int32_t from)
{
	for (int32_t i = 0; i < n; i++)
		prompt[i] = from + i;
}

static void a_long_conversation_fits_a_small_pool(void **state)
{
	(void)state;
	struct fixture f;
	static int32_t prompt[3000];
	setup(&f, 12);
	count_up(prompt, 3000, 0);
	struct request *r = add_streaming(&f, NULL, prompt, 2000, 1000, kv_policy_streaming(1, 8, 9));
	int32_t most = 0, rows = 0;
	uint64_t id = r->id;
	while (sched_find(&f.sched, id)) {
		int32_t n = run_step(&f);
		assert_true(n > 0);
		rows += n;
		r = sched_find(&f.sched, id);
		most = r && r->kv.n_pages > most ? r->kv.n_pages : most;
		audit(&f);
	}
	assert_int_equal(most, 9);
	assert_int_equal(rows, 2000 + 1000 - 1);
	assert_int_equal(f.sched.n_preemptions, 0);
	assert_index_exact(&f);
	teardown(&f);
}

static void a_window_as_long_as_the_conversation_drops_nothing(void **state)
{
	(void)state;
	struct fixture f;
	int32_t prompt[100];
	setup(&f, 40);
	count_up(prompt, 100, 0);
	struct request *r = add_streaming(&f, NULL, prompt, 100, 60, kv_policy_streaming(1, 9, 10));
	for (int i = 0; i < 40; i++)
		run_step(&f);
	assert_int_equal(r->kv.n_dropped, 0);
	run_all(&f);
	assert_int_equal(f.sched.pages_dropped[KV_POLICY_STREAMING], 0);
	/* And what it computed is everybody's. */
	r = add(&f, NULL, prompt, 100, 2);
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 99);
	run_all(&f);
	teardown(&f);
}

static void the_exact_beginning_is_shared_both_ways_and_nothing_else(void **state)
{
	(void)state;
	struct fixture f;
	int32_t prompt[400];
	setup(&f, 60);
	count_up(prompt, 400, 0);
	struct request *r = add_streaming(&f, NULL, prompt, 400, 20, kv_policy_streaming(1, 7, 8));
	run_all(&f);
	assert_index_exact(&f);
	r = add(&f, NULL, prompt, 400, 1);
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 8 * PAGE);
	run_all(&f);
	/* All of it is known now; but behind 8 pages a row of the policy is another one. */
	r = add_streaming(&f, NULL, prompt, 400, 20, kv_policy_streaming(1, 7, 8));
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 8 * PAGE);
	run_all(&f);
	assert_index_exact(&f);
	teardown(&f);
}

static void the_next_turn_goes_on_where_the_session_ended(void **state)
{
	(void)state;
	struct fixture f;
	static int32_t turn[2000];
	const struct kv_policy policy = kv_policy_streaming(1, 8, 9);
	setup(&f, 40);
	struct session *s = make_session(&f, "s");
	count_up(turn, 2000, 0);
	struct request *r = add_streaming(&f, s, turn, 500, 30, policy);
	while (r->tokens.n < 529)
		run_step(&f);
	memcpy(turn, r->tokens.ids, 529 * sizeof *turn);
	run_all(&f);
	assert_int_equal(f.sched.parking.n_parked, 1);
	assert_int_equal(session_tokens(&f, s), 529 - (529 - 9 * PAGE) / PAGE * PAGE - PAGE);
	audit(&f);
	r = add_streaming(&f, s, turn, 600, 5, policy);
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 529);
	run_all(&f);
	assert_int_equal(f.sched.parking.n_resumed, 1);
	/*
	 * An answer that reads otherwise in its last tokens goes on before them; one that differs where pages are gone
	 * begins anew.
	 */
	memcpy(turn, s->parked->tokens.ids, s->parked->tokens.n * sizeof *turn);
	turn[603] = -1;
	r = add_streaming(&f, s, turn, 700, 5, policy);
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 603);
	run_all(&f);
	turn[300] = -1;
	r = add_streaming(&f, s, turn, 700, 5, policy);
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 9 * PAGE);
	run_all(&f);
	/* Another policy is another conversation. */
	r = add_streaming(&f, s, turn, 700, 5, kv_policy_streaming(1, 9, 10));
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 9 * PAGE);
	run_all(&f);
	assert_index_exact(&f);
	teardown(&f);
}

static void what_sessions_have_parked_makes_room(void **state)
{
	(void)state;
	struct fixture f;
	static int32_t prompt[600];
	const struct kv_policy policy = kv_policy_streaming(1, 8, 9);
	setup(&f, 40);
	for (int i = 0; i < 4; i++) {
		char id[8];
		snprintf(id, sizeof id, "s%d", i);
		count_up(prompt, 400, 10000 * i);
		add_streaming(&f, make_session(&f, id), prompt, 400, 10, policy);
		run_all(&f);
		/* No more than half of the pool. */
		assert_true(f.sched.parking.n_pages <= 20);
		audit(&f);
	}
	assert_int_equal(f.sched.parking.n_dropped, 2);
	add_fresh(&f, NULL, 600, 20);
	run_all(&f);
	assert_int_equal(f.sched.parking.n_pages, 0);
	assert_int_equal(f.sched.parking.n_dropped, 4);
	/* A session that lost it computes it again. */
	count_up(prompt, 500, 30000);
	struct request *r = add_streaming(&f, f.sessions.heap[0], prompt, 500, 2, policy);
	run_step(&f);
	assert_true(r->usage.cached_tokens < 9 * PAGE);
	run_all(&f);
	teardown(&f);
}

static void the_first_pages_move_after_rows_that_would_look_too_far_back(void **state)
{
	(void)state;
	struct fixture f;
	static int32_t prompt[3000];
	struct kv_policy policy = kv_policy_streaming(2, 8, 10);
	assert_true(kv_policy_keep_within(&policy, 16 * PAGE));
	setup(&f, 30);
	count_up(prompt, 3000, 0);
	/*
	 * Two that share their beginning, so that the first to move finds its pages shared, and one that is in the way.
	 */
	struct request *a = add_under(&f, tenant_find(&f.tenants, 0), NULL, prompt, 700, 300, policy);
	struct request *b = add_under(&f, tenant_find(&f.tenants, 0), NULL, prompt, 900, 200, policy);
	add_fresh(&f, NULL, 100, 40);
	uint64_t ids[] = {a->id, b->id};
	int32_t moved = 0, steps = 0;
	while (sched_find(&f.sched, ids[0]) || sched_find(&f.sched, ids[1])) {
		assert_true(run_step(&f) > 0);
		a = sched_find(&f.sched, ids[0]);
		moved = a && a->kv.moved > moved ? a->kv.moved : moved;
		audit(&f);
		assert_index_exact(&f);
		assert_true(++steps < 20000);
	}
	assert_true(moved >= 999 - 16 * PAGE && moved < 999 - 13 * PAGE);
	run_all(&f);
	teardown(&f);
}

/* Rows of pages that move take turns with those of others, however few a step has. */
static void moving_takes_what_a_step_leaves(void **state)
{
	(void)state;
	struct fixture f;
	static int32_t prompt[3000];
	struct kv_policy policy = kv_policy_streaming(6, 3, 9);
	assert_true(kv_policy_keep_within(&policy, 10 * PAGE));
	setup(&f, 70);
	for (int i = 0; i < MAX_RUNNING; i++) {
		count_up(prompt, 200, i * 1000);
		add_under(&f, tenant_find(&f.tenants, 0), NULL, prompt, 200, 100 + i, policy);
	}
	/* In the middle of it one leaves, and its session keeps nothing half done. */
	struct session *s = make_session(&f, "s");
	count_up(prompt, 200, 9000);
	struct request *r = add_under(&f, s->tenant, s, prompt, 200, 100, policy);
	while (r->n_moving == 0 || r->n_moving == 6 * PAGE)
		assert_true(run_step(&f) > 0);
	finish(&f, r);
	assert_null(s->parked);
	run_all(&f);
	audit(&f);
	teardown(&f);
}

static void what_rows_that_chose_have_left_is_computed_again(void **state)
{
	(void)state;
	struct fixture f;
	static int32_t turn[400];
	const struct kv_policy policy = kv_policy_quest(1, 1, 4, 4);
	setup(&f, 60);
	struct session *s = make_session(&f, "s");
	count_up(turn, 400, 0);
	struct request *r = add_under(&f, s->tenant, s, turn, 100, 60, policy);
	while (r->state != REQUEST_DECODE || r->tokens.n < 150)
		run_step(&f);
	memcpy(turn, r->tokens.ids, 150 * sizeof *turn);
	run_all(&f);
	assert_index_exact(&f);
	assert_null(s->parked);
	/* The next turn, and anybody else, finds the prompt and not a token more. */
	r = add_under(&f, s->tenant, s, turn, 200, 2, policy);
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 100);
	run_all(&f);
	r = add(&f, NULL, turn, 300, 2);
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 200);
	run_all(&f);
	/* What needed no choice is exact. */
	count_up(turn, 400, 10000);
	r = add_under(&f, s->tenant, s, turn, 20, 30, policy);
	run_all(&f);
	assert_int_equal(session_tokens(&f, s), 49);
	assert_index_exact(&f);
	teardown(&f);
}

/* When it acts is left open. */
static void open_up(struct kv_policy *p)
{
	p->trained_tokens = p->reach_pages * PAGE;
	p->reach_pages = p->step_pages = 0;
	p->acts_pages = INT32_MAX;
}

/* Of pages that everybody has, only copies are merged; a pool with a page to spare is enough. */
static void merging_takes_a_page_at_a_time(void **state)
{
	(void)state;
	struct fixture f;
	static int32_t turn[2000];
	const struct kv_policy policy = kv_policy_merge(1, 4, 16, 0, 16, 2);
	setup(&f, 17);
	struct session *s = make_session(&f, "s");
	count_up(turn, 2000, 0);
	struct request *r = add_streaming(&f, s, turn, 700, 30, policy);
	while (r->tokens.n < 729) {
		assert_true(run_step(&f) > 0);
		assert_true(r->kv.n_pages <= 16);
		assert_index_exact(&f);
	}
	assert_int_equal(f.sched.n_preemptions, 0);
	assert_int_equal(kv_merged_tokens(&r->kv) > 700 - 16 * PAGE, true);
	memcpy(turn, r->tokens.ids, 729 * sizeof *turn);
	run_all(&f);
	audit(&f);
	/* Half of such a pool is too little for what it would park. */
	assert_null(s->parked);
	teardown(&f);
	/* The next turn goes on with what was merged. */
	setup(&f, 40);
	s = make_session(&f, "s");
	add_streaming(&f, s, turn, 700, 30, policy);
	run_all(&f);
	audit(&f);
	assert_non_null(s->parked);
	assert_true(s->parked->kv.n_buckets > 0);
	memcpy(turn, s->parked->tokens.ids, s->parked->tokens.n * sizeof *turn);
	r = add_streaming(&f, s, turn, 800, 5, policy);
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 729);
	run_all(&f);
	/* Where it reads otherwise before that, nothing of it serves. */
	turn[300] = -1;
	r = add_streaming(&f, s, turn, 800, 5, policy);
	run_step(&f);
	assert_true(r->usage.cached_tokens <= 16 * PAGE);
	run_all(&f);
	assert_index_exact(&f);
	teardown(&f);
}

static void short_of_pages_a_policy_acts_and_stays_so_for_the_next_turn(void **state)
{
	(void)state;
	struct fixture f;
	static int32_t turn[2000];
	struct kv_policy policy = kv_policy_streaming(1, 8, INT32_MAX);
	setup(&f, 30);
	struct session *s = make_session(&f, "s");
	count_up(turn, 2000, 0);
	struct request *r = add_streaming(&f, s, turn, 900, 30, policy);
	r->trigger.free_pages = 5;
	while (r->tokens.n < 929) {
		assert_true(run_step(&f) > 0);
		struct kv_prefix_stats index;
		kv_prefix_stats(f.prefix, &index);
		assert_true(kv_pool_n_free(f.pool) + index.n_idle >= 4);
		assert_index_exact(&f);
	}
	assert_int_equal(r->trigger.fired, ENGINE_TRIGGER_FREE_PAGES);
	assert_in_range(r->trigger.fired_at, 23 * PAGE, 25 * PAGE);
	int32_t acts = r->policy.acts_pages, at = r->trigger.fired_at;
	assert_int_equal(acts, (at + PAGE - 1) / PAGE);
	memcpy(turn, r->tokens.ids, 929 * sizeof *turn);
	run_all(&f);
	audit(&f);
	r = add_streaming(&f, s, turn, 1000, 5, policy);
	r->trigger.free_pages = 5;
	run_step(&f);
	assert_int_equal(r->usage.cached_tokens, 929);
	assert_int_equal(r->policy.acts_pages, acts);
	assert_int_equal(r->trigger.fired_at, at);
	run_all(&f);
	/* What waits for other things is another conversation. */
	r = add_streaming(&f, s, turn, 1000, 5, policy);
	r->trigger.free_pages = 6;
	run_step(&f);
	assert_true(r->usage.cached_tokens <= acts * PAGE);
	run_all(&f);
	assert_index_exact(&f);
	teardown(&f);
}

/* Sessions under all kinds of policies beside exact ones, in a pool that is too small for them. */
static void random_mixes_leave_nothing_lossy_in_the_index(void **state)
{
	(void)state;
	struct fixture f;
	struct session *s[6];
	uint64_t rng = 777;
	int32_t n_set_off = 0;
	const struct kv_policy policies[] = {{0},
					     kv_policy_evict(1, 4, 12, 0, 12, 1),
					     kv_policy_streaming(1, 2, 3),
					     kv_policy_streaming(1, 5, 9),
					     kv_policy_evict(1, 2, INT32_MAX, 600, 7, 4),
					     kv_policy_streaming(2, 16, 18),
					     kv_policy_quest(1, 2, 6, 6),
					     kv_policy_evict(1, 3, 10, 0, 10, 2),
					     kv_policy_merge(1, 3, 10, 0, 10, 2)};
	struct kv_policy moving[9];
	memcpy(moving, policies, sizeof moving);
	moving[7].by_mass = true;
	assert_true(kv_policy_keep_within(&moving[2], 5 * PAGE));
	assert_true(kv_policy_keep_within(&moving[5], 24 * PAGE));
	setup(&f, 60);
	for (int i = 0; i < 6; i++) {
		char id[8];
		snprintf(id, sizeof id, "s%d", i);
		s[i] = make_session(&f, id);
	}
	for (int round = 0; round < 12000; round++) {
		if (unit_rand(&rng) % 4 == 0 && f.sched.n_waiting < 6) {
			static int32_t prompt[1500];
			int who = (int)(unit_rand(&rng) % 7);
			struct kv_policy policy = moving[unit_rand(&rng) % 4 == 0 ? (int)(unit_rand(&rng) % 9) : who];
			struct trigger trigger = {0};
			/* Some act only when pages run short. */
			if (unit_rand(&rng) % 3 == 0 && policy.kind != KV_POLICY_FULL &&
			    policy.kind != KV_POLICY_QUEST && !policy.by_mass) {
				trigger.free_pages = 1 + (int32_t)(unit_rand(&rng) % 30);
				open_up(&policy);
			}
			int32_t most = policy.kind == KV_POLICY_FULL || policy.kind == KV_POLICY_QUEST ||
			                               policy.most_pages == INT32_MAX
			                       ? 300
			                       : 600,
				n = 1 + (int32_t)(unit_rand(&rng) % (uint64_t)most);
			int32_t family = who < 6 ? who / 2 : (int32_t)(unit_rand(&rng) % 3),
				cut = (int32_t)(unit_rand(&rng) % 700);
			for (int32_t i = 0; i < n; i++)
				prompt[i] = i < cut ? family * 1000 + i : (int32_t)(unit_rand(&rng) % 1000) + 10000;
			/* Mostly the conversation goes on, some of its last words put otherwise. */
			const struct parked *parked = who < 6 ? s[who]->parked : NULL;
			if (parked && parked->tokens.n < 1000 && unit_rand(&rng) % 4) {
				int32_t keep = (int32_t)parked->tokens.n - (int32_t)(unit_rand(&rng) % 4);
				memcpy(prompt, parked->tokens.ids, (size_t)keep * sizeof *prompt);
				n = keep + 1 + (int32_t)(unit_rand(&rng) % 100);
				for (int32_t i = keep; i < n; i++)
					prompt[i] = (int32_t)(unit_rand(&rng) % 1000) + 10000;
				policy = parked->policy;
				trigger = (struct trigger){.free_pages = parked->trigger.free_pages};
				if (trigger.free_pages > 0)
					open_up(&policy);
				n_set_off += parked->trigger.fired == ENGINE_TRIGGER_FREE_PAGES;
			}
			struct request *r = add_under(&f, tenant_find(&f.tenants, 0), who < 6 ? s[who] : NULL, prompt,
						      n, (int32_t)(unit_rand(&rng) % 100), policy);
			r->trigger = trigger;
		}
		if (unit_rand(&rng) % 16 == 0) {
			struct request *r = sched_find(&f.sched, 1 + unit_rand(&rng) % f.next_id);
			if (r)
				finish(&f, r);
		}
		if (unit_rand(&rng) % 64 == 0)
			kv_prefix_evict(f.prefix, clock_now_ms(&now), EVICT_FOR_PROMPT);
		run_step(&f);
		assert_index_exact(&f);
		if (round % 16 == 0)
			audit(&f);
	}
	run_all(&f);
	audit(&f);
	assert_true(f.sched.pages_dropped[KV_POLICY_STREAMING] > 1000);
	assert_true(f.sched.pages_dropped[KV_POLICY_EVICT] > 1000);
	assert_true(f.sched.pages_dropped[KV_POLICY_MERGE] > 300);
	assert_true(f.sched.parking.n_resumed > 20);
	assert_true(f.sched.parking.n_dropped > 20);
	assert_true(f.sched.n_preemptions > 5);
	assert_true(n_set_off > 20);
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(a_long_conversation_fits_a_small_pool),
	  cmocka_unit_test(a_window_as_long_as_the_conversation_drops_nothing),
	  cmocka_unit_test(the_exact_beginning_is_shared_both_ways_and_nothing_else),
	  cmocka_unit_test(the_next_turn_goes_on_where_the_session_ended),
	  cmocka_unit_test(what_sessions_have_parked_makes_room),
	  cmocka_unit_test(the_first_pages_move_after_rows_that_would_look_too_far_back),
	  cmocka_unit_test(moving_takes_what_a_step_leaves),
	  cmocka_unit_test(what_rows_that_chose_have_left_is_computed_again),
	  cmocka_unit_test(merging_takes_a_page_at_a_time),
	  cmocka_unit_test(short_of_pages_a_policy_acts_and_stays_so_for_the_next_turn),
	  cmocka_unit_test(random_mixes_leave_nothing_lossy_in_the_index))
