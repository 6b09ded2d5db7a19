#include "tests/unit/unit.h"

#include <stdio.h>

#include "engine/base/hash.h"

static void hash64_is_xxh64(void **state)
{
	(void)state;
	/* Published test values of XXH64. */
	assert_true(hash64("", 0, 0) == 0xEF46DB3751D8E999ull);
	assert_true(hash64("a", 1, 0) == 0xD24EC4F1A98C6E5Bull);
	assert_true(hash64("abc", 3, 0) == 0x44BC2CF5AD770999ull);
}

static void map_finds_what_was_set_and_nothing_else(void **state)
{
	(void)state;
	static char keys[5000][8];
	struct strmap m;
	assert_true(strmap_init(&m, 4));
	for (int i = 0; i < 5000; i++) {
		snprintf(keys[i], sizeof keys[i], "k%d", i);
		assert_true(strmap_set(&m, str_from(keys[i]), i));
	}
	assert_true(strmap_set(&m, str_from("k7"), 70));
	assert_true(strmap_set(&m, (struct str){NULL, 0}, -5));
	int32_t v = 0;
	for (int i = 0; i < 5000; i++) {
		assert_true(strmap_get(&m, str_from(keys[i]), &v));
		assert_int_equal(v, i == 7 ? 70 : i);
	}
	assert_true(strmap_get(&m, str_from(""), &v));
	assert_int_equal(v, -5);
	assert_false(strmap_get(&m, str_from("k5000"), &v));
	assert_int_equal(m.n_used, 5001);
	strmap_free(&m);
	assert_false(strmap_get(&m, str_from("k1"), &v));
}

UNIT_MAIN(cmocka_unit_test(hash64_is_xxh64), cmocka_unit_test(map_finds_what_was_set_and_nothing_else))
