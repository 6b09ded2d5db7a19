/* Context policies, which are functions of positions, and the block table that they take pages from. */
#include "tests/unit/unit.h"

#include "engine/kv/policy.h"
#include "tests/unit/kv/pool_fixture.h"

enum { PAGE = KV_PAGE_TOKENS };

static void pages_leave_the_middle_and_the_table_closes(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(20);
	struct kv_account paid = {0};
	struct kv_seq s = KV_SEQ_INIT;
	int32_t before[6];
	kv_seq_charge(&s, &paid);
	assert_int_equal(kv_seq_prepare(p, &s, 6 * PAGE), STATUS_OK);
	memcpy(before, s.pages, sizeof before);
	s.n_tokens = 5 * PAGE + 3;
	kv_seq_drop(p, &s, 1, 3);
	assert_int_equal(s.n_pages, 3);
	assert_int_equal(paid.n_pages, 3);
	assert_int_equal(kv_pool_n_free(p), 17);
	assert_int_equal(s.pages[0], before[0]);
	assert_int_equal(s.pages[1], before[4]);
	assert_int_equal(s.pages[2], before[5]);
	assert_int_equal(s.n_tokens, 5 * PAGE + 3);
	assert_int_equal(kv_seq_places(&s), 2 * PAGE + 3);
	assert_int_equal(s.n_leading, 1);
	/* It grows from its place on. */
	assert_int_equal(kv_seq_pages_needed(p, &s, PAGE - 3), 0);
	assert_int_equal(kv_seq_pages_needed(p, &s, PAGE - 2), 1);
	assert_int_equal(kv_seq_prepare(p, &s, PAGE), STATUS_OK);
	assert_int_equal(s.n_pages, 4);
	s.n_tokens += PAGE;
	/* What came since can be forgotten; what was there when pages went cannot be had again. */
	kv_seq_truncate(p, &s, 5 * PAGE + 5);
	assert_int_equal(s.n_pages, 3);
	assert_int_equal(s.n_tokens, 5 * PAGE + 5);
	kv_seq_truncate(p, &s, 5 * PAGE);
	assert_int_equal(s.n_pages, 0);
	assert_int_equal(s.n_tokens, 0);
	assert_int_equal(kv_seq_places(&s), 0);
	assert_int_equal(paid.n_pages, 0);
	kv_seq_release(p, &s);
	assert_int_equal(kv_pool_n_free(p), 20);
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
}

static void full_keeps_everything(void **state)
{
	(void)state;
	struct kv_policy full = {0};
	struct kv_seq s = {.n_tokens = 1 << 20};
	assert_int_equal(kv_policy_exact_tokens(&full), INT32_MAX);
	assert_int_equal(kv_policy_next(&full, 1 << 20), INT32_MAX);
	assert_int_equal(kv_policy_max_pages(&full, 1000 * PAGE + 1), 1001);
	assert_int_equal(kv_policy_due(&full, &s), 0);
}

/* What a row looks back on, and where its first pages stand, over long conversations. */
static void the_first_pages_stay_within_reach(void **state)
{
	(void)state;
	const struct {
		int32_t first, window, acts, reach;
	} all[] = {{1, 8, 9, 16}, {1, 126, 127, 512}, {4, 60, 64, 65}, {1, 2, 3, 4}, {0, 8, 8, 20}, {1, 8, 30, 32}};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		struct kv_policy p = kv_policy_streaming(all[i].first, all[i].window, all[i].acts);
		int32_t reach = all[i].reach * PAGE, last = 0, n_moves = 0;
		assert_int_equal(kv_policy_moved(&p, 100000), 0);
		assert_true(kv_policy_keep_within(&p, reach + 5));
		for (int32_t at = 0; at < 20 * reach; at++) {
			int32_t moved = kv_policy_moved(&p, at), begin = kv_policy_next(&p, at) - all[i].window * PAGE;
			assert_true(at - moved < reach && moved % PAGE == 0 && moved >= last);
			if (moved > 0)
				assert_true(moved + all[i].first * PAGE <= begin);
			/* Nothing moves while there is no need, nor but where the policy acts. */
			assert_true(moved == 0 || at + p.jump_pages * PAGE >= reach);
			if (moved != last)
				assert_int_equal(kv_policy_next(&p, at - 1), at);
			n_moves += moved != last;
			last = moved;
		}
		assert_true(n_moves > 0 && (reach < 256 || n_moves <= 20 * 16));
	}
	struct kv_policy p = kv_policy_streaming(1, 8, 9);
	assert_false(kv_policy_keep_within(&p, 9 * PAGE));
	p = kv_policy_streaming(1, 8, 20);
	assert_false(kv_policy_keep_within(&p, 19 * PAGE));
	assert_int_equal(kv_policy_moved(&p, 100000), 0);
	p = kv_policy_evict(1, 2, 9, 0, 9, 1);
	assert_false(kv_policy_keep_within(&p, 100 * PAGE));
}

static void quest_keeps_everything_and_is_exact_while_that_is_read(void **state)
{
	(void)state;
	const struct kv_policy p = kv_policy_quest(1, 2, 8, 10);
	struct kv_seq s = {.n_tokens = 1 << 20};
	assert_int_equal(kv_policy_exact_tokens(&p), 10 * PAGE);
	assert_int_equal(kv_policy_next(&p, 1 << 20), INT32_MAX);
	assert_int_equal(kv_policy_max_pages(&p, 1000 * PAGE + 1), 1001);
	assert_int_equal(kv_policy_due(&p, &s), 0);
	assert_true(kv_policy_same(&p, &p));
	assert_false(kv_policy_same(&p, &(struct kv_policy){0}));
	assert_string_equal(kv_policy_name(p.kind), "quest");
}

/* Grows a sequence by random chunks, none beyond where the policy acts, and looks at it after each. */
static void grow(const struct kv_policy *policy, int32_t length, uint64_t seed)
{
	struct kv_pool *p = make_pool(policy->acts_pages + 1);
	struct kv_seq s = KV_SEQ_INIT;
	int32_t least = policy->most_pages - policy->jump_pages;
	while (s.n_tokens < length) {
		int32_t n = kv_policy_due(policy, &s), next = kv_policy_next(policy, s.n_tokens);
		if (n > 0) {
			assert_int_equal(kv_policy_next_victim(policy, &s), policy->first_pages);
			kv_seq_drop(p, &s, policy->first_pages, n);
			assert_int_equal(s.n_pages, least);
			assert_int_equal(kv_policy_due(policy, &s), 0);
		}
		assert_true(next > s.n_tokens);
		assert_int_equal(next % PAGE, 0);
		int32_t chunk = 1 + (int32_t)(unit_rand(&seed) % 200);
		if (chunk > next - s.n_tokens)
			chunk = next - s.n_tokens;
		assert_int_equal(kv_seq_prepare(p, &s, chunk), STATUS_OK);
		s.n_tokens += chunk;
		assert_true(s.n_pages <= kv_policy_max_pages(policy, s.n_tokens));
		if (s.n_tokens <= kv_policy_exact_tokens(policy)) {
			assert_int_equal(s.n_dropped, 0);
		} else {
			assert_true(s.n_pages > least);
			assert_true(s.n_pages <= policy->most_pages);
		}
	}
	assert_true(s.n_dropped > 0);
	kv_seq_release(p, &s);
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
}

static void streaming_keeps_the_first_pages_and_a_window(void **state)
{
	(void)state;
	const struct kv_policy policies[] = {kv_policy_streaming(1, 2, 3), kv_policy_streaming(0, 2, 2),
	                                     kv_policy_streaming(1, 31, 32), kv_policy_streaming(3, 64, 100)};
	for (size_t i = 0; i < sizeof policies / sizeof *policies; i++)
		for (uint64_t seed = 1; seed < 6; seed++)
			grow(&policies[i], 4000, seed);
}

/*
 * Pages of random worth: after each act the worst are gone, the first and last are there, and those to be kept went
 * last.
 */
static void evict(const struct kv_policy *policy, int32_t length, uint64_t seed)
{
	struct kv_pool *p = make_pool(kv_policy_max_pages(policy, length) + 1);
	struct kv_seq s = KV_SEQ_INIT;
	static float score[1000];
	static bool keep[1000];
	for (int i = 0; i < 1000; i++) {
		score[i] = (float)(unit_rand(&seed) % 50); /* some alike */
		keep[i] = unit_rand(&seed) % 10 == 0;
	}
	while (s.n_tokens < length) {
		int32_t n = kv_policy_due(policy, &s), next = kv_policy_next(policy, s.n_tokens),
			now = s.n_tokens / PAGE;
		float worst_gone = -1;
		int32_t had = s.n_pages;
		if (n > 0) {
			s.notes = realloc(s.notes, (size_t)s.n_pages * sizeof *s.notes);
			for (; s.n_notes < s.n_pages; s.n_notes++) {
				int32_t number = s.n_notes + s.n_dropped;
				s.notes[s.n_notes] = (struct kv_note){number, keep[number], score[number]};
			}
		}
		for (int32_t i = 0; i < n; i++) {
			int32_t v = kv_policy_next_victim(policy, &s);
			assert_in_range(v, policy->first_pages, s.n_pages - policy->last_pages - 1);
			if (!s.notes[v].keep && !policy->by_age)
				worst_gone = s.notes[v].score > worst_gone ? s.notes[v].score : worst_gone;
			/* One that is to be kept goes when all others are gone. */
			for (int32_t k = policy->first_pages; s.notes[v].keep && k < s.n_pages - policy->last_pages;
			     k++)
				assert_true(s.notes[k].keep);
			/* By age, nothing that may go is older. */
			for (int32_t k = policy->first_pages; policy->by_age && k < v; k++)
				assert_true(s.notes[k].keep);
			kv_seq_drop(p, &s, v, 1);
		}
		if (n > 0) {
			assert_int_equal(s.n_pages, had - n);
			assert_int_equal(kv_policy_due(policy, &s), 0);
			for (int32_t i = 0; i < s.n_pages; i++) {
				assert_true(i == 0 || s.notes[i].number > s.notes[i - 1].number);
				assert_true(i >= policy->first_pages || s.notes[i].number == i);
				assert_true(i < s.n_pages - policy->last_pages ||
				            s.notes[i].number == now - s.n_pages + i);
				if (i >= policy->first_pages && i < s.n_pages - policy->last_pages && !s.notes[i].keep)
					assert_true(s.notes[i].score >= worst_gone);
			}
			assert_true(policy->dropped_permille == 0 ||
			            s.n_pages <= policy->first_pages + policy->last_pages ||
			            s.n_dropped * 1000 >= now * policy->dropped_permille);
		}
		int32_t chunk = 1 + (int32_t)(unit_rand(&seed) % 200);
		if (chunk > next - s.n_tokens)
			chunk = next - s.n_tokens;
		assert_int_equal(kv_seq_prepare(p, &s, chunk), STATUS_OK);
		s.n_tokens += chunk;
		assert_true(s.n_pages <= kv_policy_max_pages(policy, s.n_tokens));
		assert_true(policy->most_pages == INT32_MAX || s.n_tokens <= kv_policy_exact_tokens(policy) ||
		            s.n_pages <= policy->most_pages);
	}
	assert_true(s.n_dropped > 0);
	kv_seq_release(p, &s);
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
}

static void evict_keeps_what_is_worth_most(void **state)
{
	(void)state;
	struct kv_policy policies[] = {kv_policy_evict(1, 2, 8, 0, 8, 1), kv_policy_evict(1, 8, 64, 0, 100, 8),
	                               kv_policy_evict(0, 4, INT32_MAX, 500, 12, 8),
	                               kv_policy_evict(2, 4, 40, 900, 14, 5), kv_policy_evict(1, 8, 32, 0, 32, 4)};
	policies[4].by_age = true;
	for (size_t i = 0; i < sizeof policies / sizeof *policies; i++)
		for (uint64_t seed = 1; seed < 6; seed++)
			evict(&policies[i], 6000, seed);
}

/* When it acts may be found out on the way: then it does as one that had known. */
static void a_policy_that_is_set_off_acts_at_the_next_page(void **state)
{
	(void)state;
	struct kv_policy open = kv_policy_evict(1, 8, 32, 0, INT32_MAX, 4), known = kv_policy_evict(1, 8, 32, 0, 41, 4);
	assert_int_equal(kv_policy_exact_tokens(&open), INT32_MAX);
	assert_int_equal(kv_policy_max_pages(&open, 1000 * PAGE), 1000);
	assert_int_equal(kv_policy_next(&open, 1000 * PAGE), INT32_MAX);
	assert_true(kv_policy_same_but_when(&open, &known) && !kv_policy_same(&open, &known));
	kv_policy_fire(&open, 40 * PAGE + 1);
	assert_true(kv_policy_same(&open, &known));
	evict(&open, 3000, 3);
	/* No later than at the number of tokens that was given, and never with less than it keeps. */
	kv_policy_fire(&open, 60 * PAGE);
	assert_int_equal(open.acts_pages, 41);
	kv_policy_fire(&open, 5);
	assert_int_equal(open.acts_pages, 32);
	/* What pages are worth to rows takes rows that were looked at. */
	open.acts_pages = INT32_MAX;
	open.by_mass = true;
	kv_policy_fire(&open, 40 * PAGE);
	assert_int_equal(open.acts_pages, 44);
	assert_int_equal(kv_policy_weighs_from(&open), 40 * PAGE);
	/* The first pages of a window begin to move as if it had been known. */
	struct kv_policy window = kv_policy_streaming(1, 8, INT32_MAX), same = kv_policy_streaming(1, 8, 12);
	kv_policy_keep_within(&window, 20 * PAGE);
	assert_int_equal(kv_policy_moved(&window, 500 * PAGE), 0);
	window.trained_tokens = same.trained_tokens = 20 * PAGE;
	assert_true(kv_policy_keep_within(&same, 20 * PAGE));
	kv_policy_fire(&window, 12 * PAGE);
	assert_true(kv_policy_same(&window, &same));
}

/* What came back stands behind the first pages, beside those that the window has. */
static void what_came_back_is_not_the_windows(void **state)
{
	(void)state;
	struct kv_policy p = kv_policy_streaming(1, 8, 9);
	struct kv_pool *pool = make_pool(20);
	struct kv_seq s = KV_SEQ_INIT;
	p.back_pages = 3;
	assert_int_equal(kv_policy_max_pages(&p, 100 * PAGE), 12);
	for (int32_t n = 9; n <= 10; n++) {
		assert_int_equal(kv_seq_prepare(pool, &s, n * PAGE - s.n_tokens), STATUS_OK);
		s.n_tokens = n * PAGE;
		assert_int_equal(kv_policy_due(&p, &s), 1);
		kv_seq_drop(pool, &s, kv_policy_next_victim(&p, &s), 1);
	}
	int32_t back = kv_pool_get(pool, s.holder), second = s.pages[1];
	assert_true(kv_seq_insert(&s, 1, back));
	s.n_back = 1;
	assert_int_equal(s.n_pages, 9);
	assert_int_equal(s.pages[1], back);
	assert_int_equal(s.pages[2], second);
	assert_int_equal(kv_seq_places(&s), 9 * PAGE);
	assert_int_equal(kv_policy_due(&p, &s), 0);
	assert_int_equal(kv_seq_prepare(pool, &s, PAGE), STATUS_OK);
	s.n_tokens += PAGE;
	assert_int_equal(kv_policy_due(&p, &s), 1);
	assert_int_equal(kv_policy_next_victim(&p, &s), 2);
	/* What was there before it came cannot be had again. */
	kv_seq_truncate(pool, &s, 10 * PAGE - 1);
	assert_int_equal(s.n_tokens + s.n_back + s.n_pages, 0);
	kv_seq_release(pool, &s);
	assert_int_equal(kv_pool_destroy(pool), STATUS_OK);
}

static void policies_have_names(void **state)
{
	(void)state;
	enum kv_policy_kind kind;
	for (int i = 0; i < KV_POLICIES; i++) {
		assert_true(kv_policy_find(kv_policy_name((enum kv_policy_kind)i), &kind));
		assert_int_equal(kind, i);
	}
	assert_null(kv_policy_name(KV_POLICIES));
	assert_false(kv_policy_find("Full", &kind));
}

UNIT_MAIN(cmocka_unit_test(pages_leave_the_middle_and_the_table_closes), cmocka_unit_test(full_keeps_everything),
	  cmocka_unit_test(the_first_pages_stay_within_reach),
	  cmocka_unit_test(quest_keeps_everything_and_is_exact_while_that_is_read),
	  cmocka_unit_test(streaming_keeps_the_first_pages_and_a_window),
	  cmocka_unit_test(evict_keeps_what_is_worth_most),
	  cmocka_unit_test(a_policy_that_is_set_off_acts_at_the_next_page),
	  cmocka_unit_test(what_came_back_is_not_the_windows), cmocka_unit_test(policies_have_names))
