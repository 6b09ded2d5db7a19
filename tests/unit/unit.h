/* What every unit test needs: cmocka in the order it asks for, and a main that runs a table of tests. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* An argument is a pattern, of names with * and ?, for the tests to run. */
#define UNIT_MAIN(...)                                                                                                 \
	int main(int argc, char **argv)                                                                                \
	{                                                                                                              \
		const struct CMUnitTest tests[] = {__VA_ARGS__};                                                       \
		if (argc > 1)                                                                                          \
			cmocka_set_test_filter(argv[1]);                                                               \
		return cmocka_run_group_tests(tests, NULL, NULL);                                                      \
	}

/* How many of something a test tries: all with KVASIR_FULL=yes, else `few`. */
static inline int unit_count(int all, int few)
{
	const char *full = getenv("KVASIR_FULL");
	return full && strcmp(full, "yes") == 0 ? all : few;
}

/* A small repeatable generator for property tests (xorshift64*). */
static inline uint64_t unit_rand(uint64_t *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545F4914F6CDD1Dull;
}
