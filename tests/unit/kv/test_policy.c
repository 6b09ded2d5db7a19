/* Context policies, which are functions of positions, and the block table that they take pages from. */
#include "tests/unit/unit.h"

#include "engine/kv/policy.h"
#include "tests/support/memory_backend.h"

enum { PAGE = KV_PAGE_TOKENS };

static struct memory_backend mem;

static struct kv_pool *make_pool(int32_t n_pages)
{
	struct kv_layout layout = memory_layout();
	struct kv_pool *p;
	memory_backend_init(&mem);
	assert_int_equal(kv_pool_create(&mem.base, &layout, n_pages, &p, NULL), STATUS_OK);
	return p;
}

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
	int32_t first;
	assert_int_equal(kv_policy_exact_tokens(&full), INT32_MAX);
	assert_int_equal(kv_policy_next(&full, 1 << 20), INT32_MAX);
	assert_int_equal(kv_policy_max_pages(&full, 1000 * PAGE + 1), 1001);
	assert_int_equal(kv_policy_due(&full, &s, &first), 0);
}

/* Grows a sequence by random chunks, none beyond where the policy acts, and looks at it after each. */
static void grow(const struct kv_policy *policy, int32_t length, uint64_t seed)
{
	struct kv_pool *p = make_pool(policy->acts_pages + 1);
	struct kv_seq s = KV_SEQ_INIT;
	int32_t least = policy->most_pages - policy->jump_pages;
	while (s.n_tokens < length) {
		int32_t first = -1, n = kv_policy_due(policy, &s, &first), next = kv_policy_next(policy, s.n_tokens);
		if (n > 0) {
			assert_int_equal(first, policy->first_pages);
			kv_seq_drop(p, &s, first, n);
			assert_int_equal(s.n_pages, least);
			assert_int_equal(kv_policy_due(policy, &s, &first), 0);
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
	const struct kv_policy policies[] = {kv_policy_streaming(1, 2, 3), kv_policy_streaming(0, 2, 2), kv_policy_streaming(1, 31, 32),
	                                     kv_policy_streaming(3, 64, 100)};
	for (size_t i = 0; i < sizeof policies / sizeof *policies; i++)
		for (uint64_t seed = 1; seed < 6; seed++)
			grow(&policies[i], 4000, seed);
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
          cmocka_unit_test(streaming_keeps_the_first_pages_and_a_window), cmocka_unit_test(policies_have_names))
