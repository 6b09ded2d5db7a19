#include "tests/unit/unit.h"

#include "engine/base/buf.h"

static void appends_and_terminates(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	buf_puts(&b, "ab");
	buf_putc(&b, 'c');
	buf_printf(&b, "%d", 42);
	assert_string_equal(b.data, "abc42");
	assert_int_equal(b.len, 5);
	buf_clear(&b);
	assert_int_equal(b.len, 0);
	buf_free(&b);
}

static void a_size_beyond_memory_fails_and_sticks(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	buf_puts(&b, "x");
	assert_false(buf_reserve(&b, SIZE_MAX / 2));
	buf_puts(&b, "y");
	assert_true(b.failed);
	assert_null(buf_take(&b, NULL));
}

static void a_hole_is_passed_on(void **state)
{
	(void)state;
	struct buf whole = BUF_INIT, broken = BUF_INIT, b = BUF_INIT, json = BUF_INIT;
	buf_puts(&whole, "a\"");
	buf_puts(&broken, "b");
	broken.failed = true;
	buf_append_buf(&b, &whole);
	buf_append_buf(&b, &(struct buf){0});
	assert_string_equal(b.data, "a\"");
	assert_false(b.failed);
	buf_append_buf(&b, &broken);
	assert_true(b.failed);
	buf_json_buf(&json, &whole);
	buf_json_buf(&json, &(struct buf){0});
	assert_string_equal(json.data, "\"a\\\"\"\"\"");
	assert_false(json.failed);
	buf_json_buf(&json, &broken);
	assert_true(json.failed);
	buf_free(&whole);
	buf_free(&broken);
	buf_free(&b);
	buf_free(&json);
}

static void json_strings_are_escaped_and_always_utf8(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	const char in[] = "a\"\\\n\x01\x7f\xc3\xa9\xff\xc2\x85\xe2\x80\xa8\xc3";
	buf_json_string(&b, in, sizeof in - 1);
	assert_string_equal(b.data, "\"a\\\"\\\\\\n\\u0001\\u007f\xc3\xa9\xEF\xBF\xBD\\u0085\\u2028\xEF\xBF\xBD\"");
	buf_free(&b);
}

static void json_numbers_read_back(void **state)
{
	(void)state;
	const double cases[] = {0.1, 1.0 / 3, -12345.678901234567, 1e300, 5e-324, 0};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct buf b = BUF_INIT;
		buf_json_number(&b, cases[i]);
		assert_true(strtod(b.data, NULL) == cases[i]);
		buf_free(&b);
	}
	struct buf b = BUF_INIT;
	buf_json_number(&b, 1.0 / 0.0);
	assert_string_equal(b.data, "null");
	buf_free(&b);
}

UNIT_MAIN(cmocka_unit_test(appends_and_terminates), cmocka_unit_test(a_size_beyond_memory_fails_and_sticks),
          cmocka_unit_test(a_hole_is_passed_on), cmocka_unit_test(json_strings_are_escaped_and_always_utf8),
          cmocka_unit_test(json_numbers_read_back))
