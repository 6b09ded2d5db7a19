/* How far neighbouring answers speak of the same things. */
#include "tests/unit/unit.h"

#include <math.h>

#include "server/coherence.h"

#define TEXT(...) {(const int32_t[]){__VA_ARGS__}, sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t)}

static void near(double x, double expected)
{
	if (fabs(x - expected) > 1e-9)
		fail_msg("%.12g is not %.12g", x, expected);
}

static void equal_counts_are_one_and_nothing_in_common_is_zero(void **state)
{
	(void)state;
	const struct coherence_text texts[] = {TEXT(1, 2, 3, 2), TEXT(2, 3, 2, 1), TEXT(7, 8)};
	double c[2];
	assert_int_equal(coherence_of_neighbours(texts, 3, c), STATUS_OK);
	near(c[0], 1);
	near(c[1], 0);
}

/* By hand: N = 3; token 1 is in all of them, w = ln 2; 2 in two, w = ln 2.5; 3, 4 and 5 in one, w = ln 4. */
static void what_all_have_counts_least(void **state)
{
	(void)state;
	const struct coherence_text texts[] = {TEXT(1, 1, 2, 3), TEXT(2, 1, 4), TEXT(1, 5)};
	double c[2], all = log(2), two = log(2.5), one = log(4);
	assert_int_equal(coherence_of_neighbours(texts, 3, c), STATUS_OK);
	double a = sqrt(4 * all * all + two * two + one * one), b = sqrt(two * two + all * all + one * one),
	       d = sqrt(all * all + one * one);
	near(c[0], (2 * all * all + two * two) / (a * b));
	near(c[1], all * all / (b * d));
	assert_true(c[1] < c[0]);
}

static void an_empty_answer_has_none(void **state)
{
	(void)state;
	const struct coherence_text texts[] = {TEXT(1), {NULL, 0}, TEXT(1)};
	double c[2];
	assert_int_equal(coherence_of_neighbours(texts, 3, c), STATUS_OK);
	assert_true(isnan(c[0]) && isnan(c[1]));
	assert_int_equal(coherence_of_neighbours(texts, 1, c), STATUS_OK);
	assert_int_equal(coherence_of_neighbours(texts, 0, c), STATUS_OK);
}

UNIT_MAIN(cmocka_unit_test(equal_counts_are_one_and_nothing_in_common_is_zero),
          cmocka_unit_test(what_all_have_counts_least), cmocka_unit_test(an_empty_answer_has_none))
