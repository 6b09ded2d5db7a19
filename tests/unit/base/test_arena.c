#include "tests/unit/unit.h"

#include "engine/base/arena.h"

static void memory_is_zeroed_aligned_and_apart(void **state)
{
	(void)state;
	struct arena *a = arena_create(1 << 20);
	char *last = NULL;
	for (size_t n = 0; n < 300; n++) {
		char *p = arena_alloc(a, n);
		assert_non_null(p);
		assert_int_equal((uintptr_t)p % 16, 0);
		assert_ptr_not_equal(p, last);
		for (size_t i = 0; i < n; i++)
			assert_int_equal(p[i], 0);
		memset(p, 0xFF, n);
		last = p;
	}
	struct str s = arena_str(a, "hello", 5);
	assert_string_equal(s.p, "hello");
	arena_destroy(a);
}

static void the_limit_holds(void **state)
{
	(void)state;
	struct arena *a = arena_create(100000);
	size_t got = 0;
	while (arena_alloc(a, 1000))
		got += 1000;
	assert_true(got <= 100000);
	assert_true(got >= 80000);
	assert_true(arena_used(a) <= 100000);
	assert_null(arena_alloc(a, SIZE_MAX));
	assert_null(arena_str(a, "x", SIZE_MAX).p);
	assert_false(arena_starved(a)); /* it was the limit */
	arena_destroy(a);
}

UNIT_MAIN(cmocka_unit_test(memory_is_zeroed_aligned_and_apart), cmocka_unit_test(the_limit_holds))
