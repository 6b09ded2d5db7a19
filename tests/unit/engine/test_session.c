#include "tests/unit/unit.h"

#include <stdio.h>

#include "engine/request.h"
#include "engine/session.h"
#include "tests/support/memory_backend.h"

static struct memory_backend mem;
static struct clock now;

struct fixture {
	struct kv_pool *pool;
	struct tenant_table tenants;
	struct session_table table;
};

static void setup(struct fixture *f, int32_t max_sessions)
{
	struct kv_layout layout = memory_layout();
	memory_backend_init(&mem);
	assert_int_equal(kv_pool_create(&mem.base, &layout, 32, &f->pool, NULL), STATUS_OK);
	clock_manual_init(&now, 1000000000000);
	assert_int_equal(tenant_table_init(&f->tenants, layout.page_stride), STATUS_OK);
	assert_int_equal(session_table_init(&f->table, &f->tenants, &now, 30000, 300000, max_sessions), STATUS_OK);
}

static void teardown(struct fixture *f)
{
	while (f->table.n_sessions)
		session_remove(&f->table, f->pool, f->table.heap[0]);
	session_table_free(&f->table);
	assert_int_equal(tenant_find(&f->tenants, 0)->kv.n_pages, 0);
	tenant_table_free(&f->tenants);
	assert_int_equal(kv_pool_destroy(f->pool), STATUS_OK);
}

static void pass_ms(int64_t ms)
{
	clock_advance(&now, ms * 1000000);
}

static struct session *make(struct fixture *f, const char *id, int64_t heartbeat_ms, int64_t ttl_ms)
{
	struct engine_session_params p = {.heartbeat_timeout_ms = heartbeat_ms, .ttl_ms = ttl_ms};
	struct session *s = NULL;
	snprintf(p.id, sizeof p.id, "%s", id);
	assert_int_equal(session_create(&f->table, &p, &s, NULL), STATUS_OK);
	return s;
}

static void silence_ends_a_session_to_the_millisecond(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 10);
	make(&f, "a", 0, 0);
	pass_ms(29999);
	assert_non_null(session_find(&f.table, 0, "a"));
	assert_null(session_next_expired(&f.table));
	pass_ms(1);
	/* Found dead at once, whether or not anybody has collected it. */
	assert_null(session_find(&f.table, 0, "a"));
	struct session *s = session_next_expired(&f.table);
	assert_string_equal(s->id, "a");
	session_remove(&f.table, f.pool, s);
	assert_null(session_next_expired(&f.table));
	teardown(&f);
}

static void heartbeats_keep_it_until_the_ttl(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 10);
	struct session *s = make(&f, "a", 0, 0);
	for (int64_t t = 0; t < 299; t++) {
		pass_ms(1000);
		assert_ptr_equal(session_find(&f.table, 0, "a"), s);
		session_touch(&f.table, s);
		assert_null(session_next_expired(&f.table));
	}
	pass_ms(1000);
	assert_ptr_equal(session_next_expired(&f.table), s);
	teardown(&f);
}

static void a_running_request_is_a_sign_of_life_but_does_not_stop_the_ttl(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 10);
	struct request r = {0};
	struct session *s = make(&f, "a", 0, 0);
	s->running = &r;
	pass_ms(100000);
	assert_null(session_next_expired(&f.table));
	assert_non_null(session_find(&f.table, 0, "a"));
	s->running = NULL;
	session_touch(&f.table, s);
	pass_ms(29999);
	assert_null(session_next_expired(&f.table));
	pass_ms(1);
	assert_ptr_equal(session_next_expired(&f.table), s);
	session_touch(&f.table, s);
	s->running = &r;
	pass_ms(300000);
	assert_ptr_equal(session_next_expired(&f.table), s);
	s->running = NULL;
	teardown(&f);
}

static void a_client_may_ask_for_less_time_but_not_for_more(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 10);
	struct session *brief = make(&f, "brief", 100, 5000), *greedy = make(&f, "greedy", 1 << 30, 1 << 30);
	struct session *own = make(&f, "own", -1, -1);
	assert_int_equal(session_deadline_ms(brief) - clock_now_ms(&now), 100);
	assert_int_equal(session_deadline_ms(greedy) - clock_now_ms(&now), 30000);
	assert_true(session_deadline_ms(own) == INT64_MAX);
	pass_ms(INT64_C(1) << 40);
	assert_ptr_equal(session_find(&f.table, 0, "own"), own);
	teardown(&f);
}

static void ids_are_checked_unique_and_counted(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 3);
	struct error err;
	struct session *s;
	const char *bad[] = {"a b", "a/b", "\xc3\xa9", "a\n"};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct engine_session_params p = {0};
		snprintf(p.id, sizeof p.id, "%s", bad[i]);
		assert_int_equal(session_create(&f.table, &p, &s, &err), STATUS_INVALID);
		assert_string_equal(err.param, "id");
	}
	make(&f, "x", 0, 0);
	struct engine_session_params p = {.id = "x"};
	assert_int_equal(session_create(&f.table, &p, &s, &err), STATUS_EXISTS);
	make(&f, "", 0, 0);
	make(&f, "", 0, 0);
	p.id[0] = '\0';
	assert_int_equal(session_create(&f.table, &p, &s, &err), STATUS_LIMIT);
	teardown(&f);
}

static void idle_kv_goes_least_recently_used_first_and_the_session_lives_on(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 10);
	struct session *s[3];
	for (int i = 0; i < 3; i++) {
		struct token_buf tokens = {NULL, 0, 0};
		struct kv_seq kv = KV_SEQ_INIT;
		char id[8];
		snprintf(id, sizeof id, "s%d", i);
		s[i] = make(&f, id, 0, 0);
		kv_seq_prepare(f.pool, &kv, 20);
		kv.n_tokens = 20;
		for (int t = 0; t < 25; t++)
			token_buf_add(&tokens, t);
		session_keep(&f.table, f.pool, s[i], &tokens, &kv);
		assert_int_equal(s[i]->tokens.n, 20);
	}
	assert_int_equal(f.table.idle_pages, 6);
	struct token_buf tokens = {NULL, 0, 0};
	struct kv_seq kv = KV_SEQ_INIT;
	session_take(&f.table, s[0], &tokens, &kv);
	assert_int_equal(f.table.idle_pages, 4);
	session_keep(&f.table, f.pool, s[0], &tokens, &kv);
	assert_true(session_drop_idle_kv(&f.table, f.pool));
	assert_int_equal(s[1]->kv.n_pages, 0);
	assert_true(session_drop_idle_kv(&f.table, f.pool));
	assert_int_equal(s[2]->kv.n_pages, 0);
	assert_int_equal(s[0]->kv.n_pages, 2);
	assert_true(session_drop_idle_kv(&f.table, f.pool));
	assert_false(session_drop_idle_kv(&f.table, f.pool));
	assert_int_equal(f.table.idle_pages, 0);
	assert_int_equal(kv_pool_n_free(f.pool), 32);
	assert_non_null(session_find(&f.table, 0, "s1"));
	teardown(&f);
}

/* Thousands of sessions with random lifetimes and heartbeats, against a plain list of deadlines. */
static void expiry_matches_a_naive_model(void **state)
{
	(void)state;
	enum { N = 3000 };
	static int64_t created[N], seen[N], heartbeat[N], ttl[N];
	static bool alive[N];
	struct fixture f;
	setup(&f, N);
	uint64_t rng = 99;
	for (int i = 0; i < N; i++) {
		char id[16];
		snprintf(id, sizeof id, "n%d", i);
		heartbeat[i] = 1 + (int64_t)(unit_rand(&rng) % 30000);
		ttl[i] = 1 + (int64_t)(unit_rand(&rng) % 100000);
		make(&f, id, heartbeat[i], ttl[i]);
		created[i] = seen[i] = clock_now_ms(&now);
		alive[i] = true;
		pass_ms((int64_t)(unit_rand(&rng) % 3));
	}
	for (int round = 0; round < 400; round++) {
		pass_ms((int64_t)(unit_rand(&rng) % 500));
		int64_t t = clock_now_ms(&now);
		struct session *s;
		while ((s = session_next_expired(&f.table))) {
			int i = atoi(s->id + 1);
			assert_true(alive[i]);
			assert_true(seen[i] + heartbeat[i] <= t || created[i] + ttl[i] <= t);
			alive[i] = false;
			session_remove(&f.table, f.pool, s);
		}
		for (int i = 0; i < N; i++)
			assert_true(alive[i] == (seen[i] + heartbeat[i] > t && created[i] + ttl[i] > t));
		for (int k = 0; k < 200; k++) {
			char id[16];
			int i = (int)(unit_rand(&rng) % N);
			snprintf(id, sizeof id, "n%d", i);
			s = session_find(&f.table, 0, id);
			assert_true((s != NULL) == alive[i]);
			if (s) {
				session_touch(&f.table, s);
				seen[i] = t;
			}
		}
	}
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(silence_ends_a_session_to_the_millisecond), cmocka_unit_test(heartbeats_keep_it_until_the_ttl),
          cmocka_unit_test(a_running_request_is_a_sign_of_life_but_does_not_stop_the_ttl),
          cmocka_unit_test(a_client_may_ask_for_less_time_but_not_for_more),
          cmocka_unit_test(ids_are_checked_unique_and_counted),
          cmocka_unit_test(idle_kv_goes_least_recently_used_first_and_the_session_lives_on),
          cmocka_unit_test(expiry_matches_a_naive_model))
