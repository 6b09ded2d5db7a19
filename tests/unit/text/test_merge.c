#include "tests/unit/unit.h"

#include "engine/text/merge.h"

/* The definition: look at all neighbours, merge the leftmost of the lowest rank, begin again. */
static size_t merge_by_definition(const struct merge_table *m, int32_t *ids, size_t n)
{
	for (;;) {
		const struct merge_slot *best = NULL;
		size_t at = 0;
		for (size_t i = 0; i + 1 < n; i++) {
			const struct merge_slot *s = merge_table_find(m, ids[i], ids[i + 1]);
			if (s && (!best || s->rank < best->rank)) {
				best = s;
				at = i;
			}
		}
		if (!best)
			return n;
		ids[at] = best->result;
		memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof *ids);
		n--;
	}
}

static void a_table_holds_what_was_added(void **state)
{
	(void)state;
	struct merge_table m;
	assert_true(merge_table_init(&m, 4));
	for (int32_t i = 0; i < 3000; i++)
		assert_true(merge_table_add(&m, i, i * 7, (uint32_t)i, i + 1));
	for (int32_t i = 0; i < 3000; i++) {
		const struct merge_slot *s = merge_table_find(&m, i, i * 7);
		assert_non_null(s);
		assert_int_equal(s->rank, i);
		assert_int_equal(s->result, i + 1);
		assert_null(merge_table_find(&m, i, i * 7 + 1));
	}
	merge_table_free(&m);
	assert_null(merge_table_find(&m, 0, 0));
}

static void a_pair_keeps_its_lowest_rank(void **state)
{
	(void)state;
	struct merge_table m;
	assert_true(merge_table_init(&m, 4));
	assert_true(merge_table_add(&m, 1, 2, 5, 50));
	assert_true(merge_table_add(&m, 1, 2, 3, 30));
	assert_true(merge_table_add(&m, 1, 2, 4, 40));
	assert_int_equal(merge_table_find(&m, 1, 2)->result, 30);
	merge_table_free(&m);
}

static void nothing_merges_in_nothing(void **state)
{
	(void)state;
	struct merge_table m;
	struct merge_work w = {0};
	int32_t one = 7;
	size_t n = 0;
	assert_true(merge_table_init(&m, 0));
	assert_true(merge_run(&m, &w, &one, &n));
	assert_int_equal(n, 0);
	n = 1;
	assert_true(merge_run(&m, &w, &one, &n));
	assert_int_equal(n, 1);
	assert_int_equal(one, 7);
	merge_work_free(&w);
	merge_table_free(&m);
}

/*
 * Random tables, in which a merge may lead to one of a lower rank and ranks may be equal, over lengths short and long.
 */
static void merging_equals_its_definition(void **state)
{
	(void)state;
	uint64_t seed = 3;
	struct merge_work w = {0};
	for (int round = 0; round < 3000; round++) {
		int32_t n_symbols = 2 + (int32_t)(unit_rand(&seed) % 6), n_ids = n_symbols;
		struct merge_table m;
		assert_true(merge_table_init(&m, 0));
		size_t n_merges = unit_rand(&seed) % 40;
		for (size_t i = 0; i < n_merges; i++) {
			int32_t left = (int32_t)(unit_rand(&seed) % (uint64_t)n_ids),
				right = (int32_t)(unit_rand(&seed) % (uint64_t)n_ids);
			assert_true(merge_table_add(&m, left, right, (uint32_t)(unit_rand(&seed) % 20), n_ids++));
		}
		int32_t got[200], want[200];
		size_t n = unit_rand(&seed) % 200;
		for (size_t i = 0; i < n; i++)
			got[i] = want[i] = (int32_t)(unit_rand(&seed) % (uint64_t)n_symbols);
		size_t n_want = merge_by_definition(&m, want, n);
		assert_true(merge_run(&m, &w, got, &n));
		assert_int_equal(n, n_want);
		assert_memory_equal(got, want, n * sizeof *got);
		merge_table_free(&m);
	}
	merge_work_free(&w);
}

UNIT_MAIN(cmocka_unit_test(a_table_holds_what_was_added), cmocka_unit_test(a_pair_keeps_its_lowest_rank),
          cmocka_unit_test(nothing_merges_in_nothing), cmocka_unit_test(merging_equals_its_definition))
