#include "tests/unit/unit.h"

#include "config/option.h"

struct sample {
	char *text;
	bool flag;
	int64_t whole, bytes, time_ms;
	double real;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct sample, text, "some-text", "abc", "a text"),
	OPTION_ROW_BOOL(struct sample, flag, "flag", "a switch"),
	OPTION_ROW_INT(struct sample, whole, "whole", 7, -5, 100, "a number"),
	{OPTION_BYTES, "bytes", offsetof(struct sample, bytes), NULL, 0, 4096, 1024, INT64_MAX, "a size"},
	{OPTION_SECONDS, "time", offsetof(struct sample, time_ms), NULL, 0, 30000, 10, 3600000, "a time"},
	OPTION_ROW_REAL(struct sample, real, "real", 0.5, 0, 2, "a fraction"),
};
static const struct option_table table = {rows, sizeof rows / sizeof *rows};

static int set_up(void **state)
{
	struct sample *s = calloc(1, sizeof *s);
	*state = s;
	return !s || option_defaults(table, s) != STATUS_OK;
}

static int tear_down(void **state)
{
	option_free(table, *state);
	free(*state);
	return 0;
}

static enum status set(struct sample *s, const char *name, const char *text, struct error *err)
{
	const struct option *o = option_find(table, str_from(name));
	assert_non_null(o);
	return option_set(o, s, str_from(text), "", err);
}

static void defaults_come_from_the_table(void **state)
{
	struct sample *s = *state;
	assert_string_equal(s->text, "abc");
	assert_false(s->flag);
	assert_int_equal(s->whole, 7);
	assert_int_equal(s->bytes, 4096);
	assert_int_equal(s->time_ms, 30000);
	assert_true(s->real == 0.5);
}

static void names_take_dashes_and_underscores(void **state)
{
	(void)state;
	assert_ptr_equal(option_find(table, str_from("some_text")), &rows[0]);
	assert_ptr_equal(option_find(table, str_from("some-text")), &rows[0]);
	assert_null(option_find(table, str_from("some-tex")));
	assert_null(option_find(table, str_from("some-texts")));
	assert_null(option_find(table, str_from("")));
}

static void whole_numbers_keep_to_their_bounds(void **state)
{
	struct sample *s = *state;
	struct error err;
	assert_int_equal(set(s, "whole", "-5", &err), STATUS_OK);
	assert_int_equal(s->whole, -5);
	assert_int_equal(set(s, "whole", "100", &err), STATUS_OK);
	const char *bad[] = {"101", "-6", "", " 1", "1 ", "1.5", "0x10", "1e2", "99999999999999999999", "one"};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		assert_int_equal(set(s, "whole", bad[i], &err), STATUS_INVALID);
		assert_int_equal(s->whole, 100);
	}
	assert_string_equal(err.message, "whole: \"one\" does not fit; expected a whole number from -5 to 100");
	assert_string_equal(err.param, "whole");
}

static void sizes_take_powers_of_1024(void **state)
{
	struct sample *s = *state;
	struct error err;
	const struct {
		const char *text;
		int64_t want;
	} good[] = {{"1024", 1024},    {"2K", 2048},        {"2k", 2048},
	            {"3MiB", 3 << 20}, {"1.5G", 3LL << 29}, {"2TB", 2LL << 40}};
	for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
		assert_int_equal(set(s, "bytes", good[i].text, &err), STATUS_OK);
		assert_int_equal(s->bytes, good[i].want);
	}
	const char *bad[] = {"1023", "K", "-1K", "1X", "1.5", "infT", "nan", "1e30T", "8388608T", "1KK", "1 K"};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		assert_int_equal(set(s, "bytes", bad[i], &err), STATUS_INVALID);
	set(s, "bytes", "1", &err);
	assert_string_equal(err.message,
	                    "bytes: \"1\" does not fit; expected a number of bytes such as 512M or 4G of at least 1K");
}

static void times_are_seconds_unless_they_say_otherwise(void **state)
{
	struct sample *s = *state;
	struct error err;
	const struct {
		const char *text;
		int64_t want;
	} good[] = {{"30", 30000}, {"0.05", 50}, {"1.5s", 1500}, {"250ms", 250}, {"5m", 300000}, {"1h", 3600000}};
	for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
		assert_int_equal(set(s, "time", good[i].text, &err), STATUS_OK);
		assert_int_equal(s->time_ms, good[i].want);
	}
	const char *bad[] = {"0", "0.001", "2h", "s", "-1", "1d", "1 s", "1s2", "."};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		assert_int_equal(set(s, "time", bad[i], &err), STATUS_INVALID);
	assert_int_equal(set(s, "time", "2h", &err), STATUS_INVALID);
	assert_string_equal(err.message,
	                    "time: \"2h\" does not fit; expected a time such as 30, 1.5s or 5m from 10ms to 1h");
}

static void reals_and_switches(void **state)
{
	struct sample *s = *state;
	struct error err;
	assert_int_equal(set(s, "real", "1e-3", &err), STATUS_OK);
	assert_true(s->real == 0.001);
	assert_int_equal(set(s, "real", "2.01", &err), STATUS_INVALID);
	assert_int_equal(set(s, "real", "inf", &err), STATUS_INVALID);
	assert_int_equal(set(s, "flag", "on", &err), STATUS_OK);
	assert_true(s->flag);
	assert_int_equal(set(s, "flag", "0", &err), STATUS_OK);
	assert_false(s->flag);
	assert_int_equal(set(s, "flag", "maybe", &err), STATUS_INVALID);
	assert_string_equal(err.message, "flag: \"maybe\" does not fit; expected true or false");
}

static enum status read_args(struct sample *s, const char **positional, int max, int *n, struct error *err, ...)
{
	char *argv[16] = {(char *)(uintptr_t)"prog"};
	int argc = 1;
	va_list args;
	va_start(args, err);
	for (char *a; (a = va_arg(args, char *)) != NULL;)
		argv[argc++] = a;
	va_end(args);
	return option_read_args(table, s, argc, argv, positional, max, n, err);
}

static void arguments_in_every_spelling(void **state)
{
	struct sample *s = *state;
	struct error err;
	const char *positional[2];
	int n;
	assert_int_equal(read_args(s, positional, 2, &n, &err, "--whole", "8", "file", "--flag", "--some-text=a=b",
	                           "--", "--x", NULL),
	                 STATUS_OK);
	assert_int_equal(s->whole, 8);
	assert_true(s->flag);
	assert_string_equal(s->text, "a=b");
	assert_int_equal(n, 2);
	assert_string_equal(positional[0], "file");
	assert_string_equal(positional[1], "--x");
	assert_int_equal(read_args(s, NULL, 0, NULL, &err, "--no-flag", "--some_text", "", NULL), STATUS_OK);
	assert_false(s->flag);
	assert_string_equal(s->text, "");
	/* A value may look like an option. */
	assert_int_equal(read_args(s, NULL, 0, NULL, &err, "--some-text", "--flag", "--whole", "-3", NULL), STATUS_OK);
	assert_string_equal(s->text, "--flag");
	assert_false(s->flag);
	assert_int_equal(s->whole, -3);
}

static void wrong_arguments_are_named(void **state)
{
	struct sample *s = *state;
	struct error err;
	assert_int_equal(read_args(s, NULL, 0, NULL, &err, "--hwole", "1", NULL), STATUS_INVALID);
	assert_string_equal(err.message, "unknown option --hwole; did you mean --whole?");
	assert_int_equal(read_args(s, NULL, 0, NULL, &err, "--zzzzzzzzzz", NULL), STATUS_INVALID);
	assert_string_equal(err.message, "unknown option --zzzzzzzzzz");
	assert_int_equal(read_args(s, NULL, 0, NULL, &err, "--whole", NULL), STATUS_INVALID);
	assert_string_equal(err.message, "--whole needs a value; expected a whole number from -5 to 100");
	assert_int_equal(read_args(s, NULL, 0, NULL, &err, "--no-whole", NULL), STATUS_INVALID);
	assert_int_equal(read_args(s, NULL, 0, NULL, &err, "stray", NULL), STATUS_INVALID);
	assert_string_equal(err.message, "unexpected argument \"stray\"");
	assert_int_equal(read_args(s, NULL, 0, NULL, &err, "-x", NULL), STATUS_INVALID);
}

static void values_are_shown_as_json(void **state)
{
	struct sample *s = *state;
	struct buf b = BUF_INIT;
	s->time_ms = 1500;
	for (size_t i = 0; i < table.n; i++) {
		option_json(&rows[i], s, &b);
		buf_putc(&b, ' ');
	}
	assert_string_equal(b.data, "\"abc\" false 7 4096 1.5 0.5 ");
	buf_free(&b);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)

UNIT_MAIN(TEST(defaults_come_from_the_table), TEST(names_take_dashes_and_underscores),
          TEST(whole_numbers_keep_to_their_bounds), TEST(sizes_take_powers_of_1024),
          TEST(times_are_seconds_unless_they_say_otherwise), TEST(reals_and_switches),
          TEST(arguments_in_every_spelling), TEST(wrong_arguments_are_named), TEST(values_are_shown_as_json))
