#include "tests/unit/unit.h"

#include <stdio.h>

#include "engine/request.h"
#include "engine/session.h"
#include "tests/support/memory_backend.h"

static struct memory_backend mem;
static struct clock now;

struct fixture {
	struct kv_pool *pool;
	struct kv_prefix *prefix;
	struct tenant_table tenants;
	struct session_table table;
};

static void setup(struct fixture *f, int32_t max_sessions)
{
	struct kv_layout layout = memory_layout();
	memory_backend_init(&mem);
	assert_int_equal(kv_pool_create(&mem.base, &layout, 32, &f->pool, NULL), STATUS_OK);
	clock_manual_init(&now, 1000000000000);
	assert_int_equal(kv_prefix_create(f->pool, NULL, &f->prefix, NULL), STATUS_OK);
	assert_int_equal(tenant_table_init(&f->tenants, layout.page_stride), STATUS_OK);
	assert_int_equal(session_table_init(&f->table, &f->tenants, f->prefix, &now, 30000, 300000, max_sessions),
	                 STATUS_OK);
}

static void teardown(struct fixture *f)
{
	while (f->table.n_sessions)
		session_remove(&f->table, f->table.heap[0]);
	session_table_free(&f->table);
	kv_prefix_destroy(f->prefix);
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
	session_remove(&f.table, s);
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

/* A conversation of n tokens computed for a session, which then pauses. */
static void talk(struct fixture *f, struct session *s, int32_t first_token, int32_t n)
{
	int32_t tokens[256];
	struct kv_seq kv = KV_SEQ_INIT;
	struct kv_chain chain = {.n_keys = 0};
	struct kv_use use = {.now_ms = clock_now_ms(&now), .n_prompt = n, .claim = s->claim};
	for (int32_t i = 0; i < n; i++)
		tokens[i] = first_token + i;
	assert_int_equal(kv_seq_prepare(f->pool, &kv, n), STATUS_OK);
	kv.n_tokens = n;
	kv_prefix_put(f->prefix, &chain, tokens, &kv, 0, &use);
	kv_prefix_put_tail(f->prefix, tokens, &kv, &use);
	session_keep(&f->table, s, &kv);
	kv_chain_free(&chain);
	kv_seq_release(f->pool, &kv);
}

static void assert_kv(struct fixture *f, const struct session *s, int32_t n_pages, int32_t n_tokens)
{
	struct engine_session_info info;
	session_describe(&f->table, s, f->pool, &info);
	assert_int_equal(info.n_pages, n_pages);
	assert_int_equal(info.n_tokens, n_tokens);
	assert_int_equal(info.kv_bytes, (uint64_t)n_pages * kv_pool_layout(f->pool)->page_stride);
}

static void a_session_tells_what_is_left_of_its_kv(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 10);
	struct session *s = make(&f, "s", 0, 0);
	assert_kv(&f, s, 0, 0);
	talk(&f, s, 0, 37);
	assert_kv(&f, s, 3, 37);
	/* It pins nothing: its end goes first, then page by page. */
	for (int32_t n = 2; n >= 0; n--) {
		assert_true(kv_prefix_evict(f.prefix, clock_now_ms(&now), EVICT_FOR_PROMPT));
		assert_kv(&f, s, n, n * KV_PAGE_TOKENS);
	}
	assert_int_equal(kv_pool_n_free(f.pool), 32);
	assert_non_null(session_find(&f.table, 0, "s"));
	/* Others' use of the same pages is not taken for its own. */
	struct session *other = make(&f, "other", 0, 0);
	talk(&f, other, 1000, 64);
	assert_kv(&f, s, 0, 0);
	assert_kv(&f, other, 4, 64);
	teardown(&f);
}

static void signs_of_life_raise_the_worth_of_its_pages_until_it_ends(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 10);
	struct session *living = make(&f, "living", 0, 0), *silent = make(&f, "silent", 0, 0);
	talk(&f, living, 0, 32);
	pass_ms(100);
	talk(&f, silent, 1000, 32);
	/* Both are claimed, so age decides; then only one heartbeat is heard. */
	for (int i = 0; i < 4; i++) {
		pass_ms(9000);
		session_touch(&f.table, living);
	}
	assert_null(session_find(&f.table, 0, "silent"));
	for (int i = 0; i < 2; i++)
		assert_true(kv_prefix_evict(f.prefix, clock_now_ms(&now), EVICT_FOR_PROMPT));
	assert_kv(&f, living, 2, 32);
	assert_kv(&f, silent, 0, 0);
	/* Deleted, it vouches for nothing any more. */
	struct session *late = make(&f, "late", 0, 0);
	talk(&f, late, 2000, 32);
	pass_ms(1000);
	struct session *deleted = make(&f, "deleted", 0, 0);
	talk(&f, deleted, 3000, 32);
	session_remove(&f.table, living);
	session_remove(&f.table, deleted);
	pass_ms(20000);
	for (int i = 0; i < 4; i++)
		assert_true(kv_prefix_evict(f.prefix, clock_now_ms(&now), EVICT_FOR_PROMPT));
	assert_kv(&f, late, 2, 32);
	/* But nothing is pinned for good. */
	assert_true(kv_prefix_evict(f.prefix, clock_now_ms(&now), EVICT_FOR_PROMPT));
	assert_true(kv_prefix_evict(f.prefix, clock_now_ms(&now), EVICT_FOR_PROMPT));
	assert_int_equal(kv_pool_n_free(f.pool), 32);
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
			session_remove(&f.table, s);
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

UNIT_MAIN(cmocka_unit_test(silence_ends_a_session_to_the_millisecond),
          cmocka_unit_test(heartbeats_keep_it_until_the_ttl),
          cmocka_unit_test(a_running_request_is_a_sign_of_life_but_does_not_stop_the_ttl),
          cmocka_unit_test(a_client_may_ask_for_less_time_but_not_for_more),
          cmocka_unit_test(ids_are_checked_unique_and_counted),
          cmocka_unit_test(a_session_tells_what_is_left_of_its_kv),
          cmocka_unit_test(signs_of_life_raise_the_worth_of_its_pages_until_it_ends),
          cmocka_unit_test(expiry_matches_a_naive_model))
