#include "tests/unit/unit.h"

#include <time.h>

#include <utf8proc.h>

#include "engine/base/utf8.h"
#include "engine/text/unicode.h"

static void classes_are_those_of_unicode(void **state)
{
	(void)state;
	const struct {
		uint32_t cp;
		enum unicode_class class;
	} cases[] = {
		{'a', UNICODE_LETTER},    {'Z', UNICODE_LETTER},      {'@', UNICODE_PUNCT},
		{'[', UNICODE_PUNCT},     {'`', UNICODE_REST},        {'{', UNICODE_PUNCT},
		{'0', UNICODE_NUMBER},    {'9', UNICODE_NUMBER},      {'_', UNICODE_PUNCT},
		{'$', UNICODE_REST},      {'+', UNICODE_REST},        {' ', UNICODE_SPACE},
		{'\t', UNICODE_SPACE},    {'\v', UNICODE_SPACE},      {'\r', UNICODE_SPACE},
		{0, UNICODE_REST},        {0x1C, UNICODE_REST},       {0x7F, UNICODE_REST},
		{0x85, UNICODE_SPACE},    {0xA0, UNICODE_SPACE},      {0xAA, UNICODE_LETTER},
		{0xB2, UNICODE_NUMBER},   {0xBD, UNICODE_NUMBER},     {0xDF, UNICODE_LETTER},
		{0xD7, UNICODE_REST},     {0x301, UNICODE_REST},      {0x903, UNICODE_REST},
		{0x1680, UNICODE_SPACE},  {0x180E, UNICODE_REST},     {0x2009, UNICODE_SPACE},
		{0x200B, UNICODE_REST},   {0x200D, UNICODE_REST},     {0x2014, UNICODE_PUNCT},
		{0x2028, UNICODE_SPACE},  {0x2029, UNICODE_SPACE},    {0x202F, UNICODE_SPACE},
		{0x2167, UNICODE_NUMBER}, {0x2460, UNICODE_NUMBER},   {0x3000, UNICODE_SPACE},
		{0x3002, UNICODE_PUNCT},  {0x4E00, UNICODE_LETTER},   {0x0967, UNICODE_NUMBER},
		{0xAC00, UNICODE_LETTER}, {0xFEFF, UNICODE_REST},     {0xFFFD, UNICODE_REST},
		{0x1F600, UNICODE_REST},  {0x1D400, UNICODE_LETTER},  {0x10FFFF, UNICODE_REST},
		{0x110000, UNICODE_REST}, {0xFFFFFFFF, UNICODE_REST},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		if (unicode_class(cases[i].cp) != cases[i].class)
			fail_msg("U+%04X is in class %d", cases[i].cp, (int)unicode_class(cases[i].cp));
	}
}

static void every_code_point_has_one_class(void **state)
{
	(void)state;
	for (uint32_t cp = 0; cp <= 0x110000; cp++) {
		unsigned c = unicode_class(cp);
		assert_true(c && (c & (c - 1)) == 0 && c <= UNICODE_REST);
	}
}

static void a_rune_is_a_code_point_or_one_bad_byte(void **state)
{
	(void)state;
	const char s[] = "a\xC3\xA9\xFF\xE2\x82";
	size_t n = sizeof s - 1;
	struct rune r = rune_at(s, n, 0);
	assert_int_equal(r.cp, 'a');
	assert_int_equal(r.n, 1);
	r = rune_at(s, n, 1);
	assert_int_equal(r.cp, 0xE9);
	assert_int_equal(r.n, 2);
	assert_int_equal(r.class, UNICODE_LETTER);
	for (size_t i = 3; i < n; i++) {
		r = rune_at(s, n, i);
		assert_int_equal(r.cp, (unsigned char)s[i]);
		assert_int_equal(r.n, 1);
		assert_int_equal(r.class, UNICODE_REST);
	}
	assert_int_equal(rune_at(s, n, n).n, 0);
	assert_int_equal(rune_at(s, n, n + 5).n, 0);
	assert_int_equal(rune_at(s, n, n).class, 0);
}

static void assert_nfc(const char *s, const char *want)
{
	struct buf out = BUF_INIT;
	assert_true(unicode_nfc(s, strlen(s), &out));
	assert_int_equal(out.len, strlen(want));
	assert_memory_equal(buf_str(&out).p, want, out.len);
	buf_free(&out);
}

static void nfc_composes_and_orders(void **state)
{
	(void)state;
	assert_nfc("", "");
	assert_nfc("plain", "plain");
	assert_nfc("e\xCC\x81", "\xC3\xA9");                                /* e + acute */
	assert_nfc("\xC3\xA9", "\xC3\xA9");                                 /* stays */
	assert_nfc("\xE2\x84\xAB", "\xC3\x85");                             /* ANGSTROM SIGN */
	assert_nfc("\xE2\x84\xAA", "K");                                    /* KELVIN SIGN */
	assert_nfc("\xCD\xBE", ";");                                        /* GREEK QUESTION MARK */
	assert_nfc("q\xCC\x87\xCC\xA3", "q\xCC\xA3\xCC\x87");               /* dot above, dot below: reordered */
	assert_nfc("d\xCC\x87\xCC\xA3", "\xE1\xB8\x8D\xCC\x87");            /* d with dot below, dot above */
	assert_nfc("\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "\xEA\xB0\x81"); /* Hangul jamo */
	assert_nfc("\xE0\xA5\x98", "\xE0\xA4\x95\xE0\xA4\xBC");             /* a composition exclusion */
	assert_nfc("\xCC\x81", "\xCC\x81");                                 /* a mark on nothing */
	assert_nfc("e\xFF\xCC\x81", "e\xFF\xCC\x81");                       /* a byte that is not UTF-8 separates */
	assert_nfc("e\xCC", "e\xCC");
	assert_nfc("\xEF\xAC\x81", "\xEF\xAC\x81");                         /* compatibility forms stay */
}

static size_t random_text(uint64_t *seed, char *s, size_t max)
{
	static const uint32_t pool[] = {'a',    'e',    'q',    ' ',   0xE9,    0x300,   0x301,   0x316,
	                                0x323,  0x307,  0x338,  0x345, 0x344,   0x1100,  0x1161,  0x11A8,
	                                0xAC00, 0x212B, 0x2126, 0x958, 0x915,   0x93C,   0x1E9B,  0x4E00,
	                                0xF900, 0x1F82, 0x3B1,  0x313, 0x1D15E, 0x1F600, 0x10FFFF};
	size_t n = 0, count = unit_rand(seed) % 24;
	for (size_t i = 0; i < count && n + 4 <= max; i++) {
		uint32_t cp = pool[unit_rand(seed) % (sizeof pool / sizeof *pool)];
		if (unit_rand(seed) % 8 == 0)
			cp = (uint32_t)(unit_rand(seed) % 0x30000) + 1;
		n += utf8_encode(cp, s + n);
	}
	return n;
}

static void nfc_equals_utf8proc_on_random_texts(void **state)
{
	(void)state;
	uint64_t seed = 11;
	for (int round = 0; round < 20000; round++) {
		char s[128];
		size_t n = random_text(&seed, s, sizeof s);
		utf8proc_uint8_t *want = NULL;
		utf8proc_ssize_t want_n = utf8proc_map((const utf8proc_uint8_t *)s, (utf8proc_ssize_t)n, &want,
		                                       UTF8PROC_STABLE | UTF8PROC_COMPOSE);
		struct buf out = BUF_INIT;
		assert_true(want_n >= 0);
		assert_true(unicode_nfc(s, n, &out));
		assert_int_equal(out.len, want_n);
		assert_memory_equal(buf_str(&out).p, want, out.len);
		if (unicode_is_plain(s, n))
			assert_memory_equal(buf_str(&out).p, s, n);
		buf_free(&out);
		free(want);
	}
}

/* utf8proc's own ordering takes the square of the number of marks. */
static void a_megabyte_of_marks_is_normalised_in_linear_time(void **state)
{
	(void)state;
	enum { N = 1 << 20 };
	char *s = malloc(N);
	assert_non_null(s);
	for (size_t i = 0; i < N; i++)
		s[i] = "\xCC\x81\xCC\x96"[i % 4];
	struct buf out = BUF_INIT;
	clock_t began = clock();
	assert_true(unicode_nfc(s, N, &out));
	assert_true((double)(clock() - began) / CLOCKS_PER_SEC < 5);
	assert_int_equal(out.len, N);
	for (size_t i = 0; i < N; i += 2)
		assert_memory_equal(out.data + i, i < N / 2 ? "\xCC\x96" : "\xCC\x81", 2);
	buf_free(&out);
	free(s);
}

UNIT_MAIN(cmocka_unit_test(classes_are_those_of_unicode), cmocka_unit_test(every_code_point_has_one_class),
          cmocka_unit_test(a_rune_is_a_code_point_or_one_bad_byte), cmocka_unit_test(nfc_composes_and_orders),
          cmocka_unit_test(nfc_equals_utf8proc_on_random_texts),
          cmocka_unit_test(a_megabyte_of_marks_is_normalised_in_linear_time))
