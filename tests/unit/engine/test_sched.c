/*
 * The scheduler over a pretended device: "computing" a position writes its token and position into its page, so that every
 * test can check that what a request would read back is its own, whatever was shared, dropped, preempted or forked.
 */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "engine/census.h"
#include "engine/sched.h"
#include "tests/support/memory_backend.h"

enum { PAGE = KV_PAGE_TOKENS, MAX_RUNNING = 6, STEP = 64 };

static struct memory_backend mem;
static struct clock now;

struct fixture {
	struct kv_pool *pool;
	struct kv_prefix *prefix;
	struct tenant_table tenants;
	struct session_table sessions;
	struct sched sched;
	struct census census;
	uint64_t next_id;
};

static void setup(struct fixture *f, int32_t n_pages)
{
	/* 8 bytes a position. */
	struct kv_layout layout = {1, 1, 2, PAGE, QUANT_F16, PAGE * 8, PAGE * 8};
	memset(f, 0, sizeof *f);
	memory_backend_init(&mem);
	clock_manual_init(&now, 1);
	assert_int_equal(tenant_table_init(&f->tenants, layout.page_stride), STATUS_OK);
	assert_int_equal(kv_pool_create(&mem.base, &layout, n_pages, &f->pool, NULL), STATUS_OK);
	assert_int_equal(kv_prefix_create(f->pool, NULL, &f->prefix, NULL), STATUS_OK);
	assert_int_equal(session_table_init(&f->sessions, &f->tenants, f->prefix, &now, 30000, 300000, 100), STATUS_OK);
	assert_int_equal(sched_init(&f->sched, f->pool, f->prefix, &f->sessions, &now, MAX_RUNNING, STEP, MAX_RUNNING + 8), STATUS_OK);
	assert_int_equal(census_init(&f->census, f->pool, &f->sched, &f->sessions, &f->tenants), STATUS_OK);
}

static void teardown(struct fixture *f)
{
	assert_int_equal(f->sched.n_running + f->sched.n_waiting, 0);
	while (f->sessions.n_sessions)
		session_remove(&f->sessions, f->sessions.heap[0]);
	census_free(&f->census);
	sched_free(&f->sched);
	session_table_free(&f->sessions);
	tenant_table_free(&f->tenants);
	kv_prefix_destroy(f->prefix);
	assert_int_equal(kv_pool_n_free(f->pool), kv_pool_n_pages(f->pool));
	assert_int_equal(kv_pool_destroy(f->pool), STATUS_OK);
	assert_int_equal(mem.allocated, 0);
}

/* Tokens whose KV is there for the session's next turn. */
static int32_t session_tokens(struct fixture *f, const struct session *s)
{
	struct engine_session_info info;
	session_describe(&f->sessions, s, f->pool, &info);
	return info.n_tokens;
}

static struct session *make_session(struct fixture *f, const char *id)
{
	struct engine_session_params p = {0};
	struct session *s;
	snprintf(p.id, sizeof p.id, "%s", id);
	assert_int_equal(session_create(&f->sessions, &p, &s, NULL), STATUS_OK);
	return s;
}

static struct request *add(struct fixture *f, struct session *s, const int32_t *prompt, int32_t n, int32_t max_tokens)
{
	struct request *r = calloc(1, sizeof *r);
	r->spec = calloc(1, sizeof *r->spec);
	r->id = ++f->next_id;
	list_init(&r->link);
	for (int32_t i = 0; i < n; i++)
		token_buf_add(&r->tokens, prompt[i]);
	r->n_prompt = n;
	r->max_total = n + max_tokens;
	r->session = s;
	r->tenant = s ? s->tenant : tenant_find(&f->tenants, 0);
	sched_add(&f->sched, r);
	return r;
}

/* Its KV is kept apart from now on. */
static void of_another_tenant(struct request *r)
{
	r->chain.root.bytes[0] ^= 1;
	kv_chain_free(&r->chain);
}

/* A prompt of n tokens that nothing else begins with. */
static struct request *add_fresh(struct fixture *f, struct session *s, int32_t n, int32_t max_tokens)
{
	int32_t prompt[1024];
	for (int32_t i = 0; i < n; i++)
		prompt[i] = (int32_t)f->next_id * 10000 + i;
	return add(f, s, prompt, n, max_tokens);
}

static void finish(struct fixture *f, struct request *r)
{
	sched_remove(&f->sched, r);
	request_destroy(r);
}

static int32_t *cell(struct fixture *f, int32_t page, int32_t position)
{
	return (int32_t *)((char *)kv_pool_slab(f->pool) + page * PAGE * 8) + position % PAGE * 2;
}

/* The answer's next token, a function of all before it, as a model's is. */
static int32_t next_token(const struct request *r)
{
	uint32_t h = 17;
	for (size_t i = 0; i < r->tokens.n; i++)
		h = h * 31 + (uint32_t)r->tokens.ids[i];
	return (int32_t)(h % 50000);
}

/* Computes a built step as a device would, checks all it reads, and appends the new tokens. Returns the rows. */
static int32_t run_step(struct fixture *f)
{
	if (!sched_build(&f->sched))
		return 0;
	const struct batch *b = &f->sched.batch;
	int32_t rows = 0;
	assert_in_range(b->n_rows, 1, STEP);
	assert_in_range(b->n_seqs, 1, MAX_RUNNING);
	for (int32_t i = 0; i < b->n_seqs; i++) {
		const struct batch_seq *q = &b->seq[i];
		const struct step_part *part = &f->sched.part[i];
		struct request *r = part->request;
		assert_int_equal(q->first_row, rows);
		assert_int_equal(q->first_position, r->kv.n_tokens);
		assert_true(q->n_pages * PAGE >= q->first_position + q->n_rows);
		for (int32_t k = 0; k < q->n_rows; k++, rows++) {
			int32_t p = q->first_position + k, page = q->block_table[p / PAGE];
			assert_int_equal(b->position[rows], p);
			assert_int_equal(b->token[rows], r->tokens.ids[p]);
			/* Nobody else may see a page that is written, the index included. */
			assert_int_equal(kv_pool_refs(f->pool, page), 1);
			cell(f, page, p)[0] = b->token[rows];
			cell(f, page, p)[1] = p;
		}
		for (int32_t p = 0; p < q->first_position + q->n_rows; p++) {
			assert_int_equal(cell(f, q->block_table[p / PAGE], p)[0], r->tokens.ids[p]);
			assert_int_equal(cell(f, q->block_table[p / PAGE], p)[1], p);
		}
	}
	assert_int_equal(rows, b->n_rows);
	int32_t n_seqs = b->n_seqs;
	for (int32_t i = 0; i < n_seqs; i++) {
		struct request *r = f->sched.part[i].request;
		r->kv.n_tokens += f->sched.part[i].n_rows;
		sched_index(&f->sched, r);
		if (request_pending(r) > 0)
			continue;
		r->prompt_done = true;
		if ((int32_t)r->tokens.n < r->max_total) {
			assert_int_equal(f->sched.part[i].n_outputs, 1);
			token_buf_add(&r->tokens, next_token(r));
			r->state = REQUEST_DECODE;
		}
		if ((int32_t)r->tokens.n >= r->max_total)
			finish(f, r);
	}
	return rows;
}

static void run_all(struct fixture *f)
{
	for (int steps = 0; run_step(f) > 0; steps++)
		assert_true(steps < 100000);
	assert_int_equal(f->sched.n_running + f->sched.n_waiting, 0);
}

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
	assert_int_equal(s->n_requests, 2);
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

/* Many requests, few pages: everything ends, nothing is ever read that was not the request's own, every page comes back. */
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
          cmocka_unit_test(random_work_under_pressure))
