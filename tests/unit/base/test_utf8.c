#include "tests/unit/unit.h"

#include "engine/base/utf8.h"

static void every_code_point_round_trips(void **state)
{
	(void)state;
	for (uint32_t cp = 0; cp <= 0x110000; cp++) {
		char s[4];
		uint32_t back;
		size_t n = utf8_encode(cp, s);
		if ((cp >= 0xD800 && cp <= 0xDFFF) || cp > 0x10FFFF) {
			assert_int_equal(n, 0);
			continue;
		}
		assert_int_equal(utf8_decode(s, n, &back), n);
		assert_int_equal(back, cp);
		for (size_t cut = 1; cut < n; cut++) {
			assert_int_equal(utf8_decode(s, cut, &back), 0);
			assert_int_equal(utf8_incomplete_tail(s, cut), cut);
		}
		assert_int_equal(utf8_incomplete_tail(s, n), 0);
	}
}

static void malformed_bytes_are_refused(void **state)
{
	(void)state;
	const char *bad[] = {"\x80",
	                     "\xC0\x80",
	                     "\xC1\xBF",
	                     "\xE0\x80\x80",
	                     "\xED\xA0\x80",
	                     "\xF0\x80\x80\x80",
	                     "\xF4\x90\x80\x80",
	                     "\xF5\x80\x80\x80",
	                     "\xE2\x28\xA1",
	                     "\xFF"};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		uint32_t cp;
		assert_int_equal(utf8_decode(bad[i], strlen(bad[i]), &cp), 0);
		assert_false(utf8_valid(bad[i], strlen(bad[i])));
		assert_int_equal(utf8_incomplete_tail(bad[i], strlen(bad[i])), 0);
	}
}

UNIT_MAIN(cmocka_unit_test(every_code_point_round_trips), cmocka_unit_test(malformed_bytes_are_refused))
