/* Values: what a builder may rely on. */
#include "engine/text/value.h"

#include <stdio.h>

#include "tests/unit/text/template_fixture.h"

/* What a value prints as, alone in a template. */
static void assert_prints(struct arena *a, struct value *v, const char *expected)
{
	static const char source[] = "{{ v }}";
	struct template *t;
	struct rendered r = {0};
	struct error err;
	struct value *vars = value_dict(a);
	set_var(a, vars, "v", v);
	assert_int_equal(template_compile(source, sizeof source - 1, &t, &err), STATUS_OK);
	assert_int_equal(template_render(t, vars, 0, NULL, &r, &err), STATUS_OK);
	assert_string_equal(r.text.data, expected);
	rendered_free(&r);
	template_destroy(t);
}

static void test_values_print_as_python_does(void **state)
{
	struct arena *a = arena_create(1 << 20);
	struct value *list = value_list(a), *dict = value_dict(a);
	(void)state;
	assert_prints(a, value_none(a), "None");
	assert_prints(a, value_bool(a, true), "True");
	assert_prints(a, value_int(a, INT64_MIN), "-9223372036854775808");
	assert_prints(a, value_float(a, 0.1), "0.1");
	assert_prints(a, value_float(a, 100), "100.0");
	assert_prints(a, value_float(a, 1e16), "1e+16");
	assert_prints(a, value_float(a, 5e-324), "5e-324");
	assert_prints(a, value_float(a, 1.7976931348623157e308), "1.7976931348623157e+308");
	assert_true(value_list_add(a, list, data_string(a, "it's")));
	assert_true(value_list_add(a, list, value_list(a)));
	set_var(a, dict, "k", list);
	assert_prints(a, dict, "{'k': [\"it's\", []]}");
	arena_destroy(a);
}

static void test_a_dict_keeps_order_and_the_place_of_a_replaced_key(void **state)
{
	struct arena *a = arena_create(1 << 20);
	struct value *d = value_dict(a);
	(void)state;
	set_var(a, d, "b", value_int(a, 1));
	set_var(a, d, "a", value_int(a, 2));
	set_var(a, d, "b", value_int(a, 3));
	assert_prints(a, d, "{'b': 3, 'a': 2}");
	arena_destroy(a);
}

static void test_a_large_dict_finds_every_key(void **state)
{
	enum { N = 5000 };
	struct arena *a = arena_create(16 << 20);
	struct value *d = value_dict(a);
	char key[16];
	(void)state;
	for (int round = 0; round < 2; round++) /* the second round replaces */
		for (int i = 0; i < N; i++) {
			snprintf(key, sizeof key, "key%d", i);
			set_var(a, d, key, value_int(a, i + round));
		}
	for (int i = 0; i < N; i++) {
		char expected[16];
		snprintf(key, sizeof key, "key%d", i);
		snprintf(expected, sizeof expected, "%d", i + 1);
		assert_prints(a, value_dict_get(d, key, strlen(key)), expected);
	}
	assert_null(value_dict_get(d, "key", 3));
	assert_null(value_dict_get(d, "key50000", 8));
	arena_destroy(a);
}

static void test_keys_may_hold_any_byte(void **state)
{
	struct arena *a = arena_create(1 << 20);
	struct value *d = value_dict(a);
	(void)state;
	assert_true(value_dict_set(a, d, "a\0b", 3, value_int(a, 1)));
	assert_true(value_dict_set(a, d, "", 0, value_int(a, 2)));
	assert_non_null(value_dict_get(d, "a\0b", 3));
	assert_non_null(value_dict_get(d, "", 0));
	assert_null(value_dict_get(d, "a", 1));
	arena_destroy(a);
}

static void test_builders_pass_null_on(void **state)
{
	struct arena *a = arena_create(1 << 20);
	(void)state;
	assert_false(value_list_add(a, NULL, value_none(a)));
	assert_false(value_list_add(a, value_list(a), NULL));
	assert_false(value_dict_set(a, NULL, "k", 1, value_none(a)));
	assert_false(value_dict_set(a, value_dict(a), "k", 1, NULL));
	assert_false(value_list_add(a, value_dict(a), value_none(a)));
	assert_null(value_dict_get(NULL, "k", 1));
	assert_null(value_dict_get(value_list(a), "k", 1));
	assert_null(value_none(NULL));
	arena_destroy(a);
}

/* A builder that runs out of memory at any point says so, and leaves what it had built usable. */
static void test_an_exhausted_arena_is_reported(void **state)
{
	(void)state;
	for (size_t limit = 64; limit < 40000; limit += 256) {
		struct arena *a = arena_create(limit);
		struct value *d = value_dict(a), *list = value_list(a);
		bool complete = true;
		int set = 0;
		for (int i = 0; i < 100 && complete; i++) {
			char key[16];
			snprintf(key, sizeof key, "k%d", i);
			complete = value_list_add(a, list, value_string(a, key, strlen(key), VALUE_DATA)) &&
				   value_dict_set(a, d, key, strlen(key), value_int(a, i));
			set += complete;
		}
		for (int i = 0; i < set; i++) {
			char key[16];
			snprintf(key, sizeof key, "k%d", i);
			assert_non_null(value_dict_get(d, key, strlen(key)));
		}
		assert_true(limit > 64 || !complete);
		if (limit > 39000)
			assert_true(complete);
		arena_destroy(a);
	}
}

UNIT_MAIN(cmocka_unit_test(test_values_print_as_python_does),
	  cmocka_unit_test(test_a_dict_keeps_order_and_the_place_of_a_replaced_key),
	  cmocka_unit_test(test_a_large_dict_finds_every_key), cmocka_unit_test(test_keys_may_hold_any_byte),
	  cmocka_unit_test(test_builders_pass_null_on), cmocka_unit_test(test_an_exhausted_arena_is_reported))
