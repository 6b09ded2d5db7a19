/* Ranges of integers as alternatives of their digits. */
#include <stdio.h>
#include <string.h>

#include "engine/text/grammar_build.h"

/* The numbers of n digits, leading zeros and all, from `lo` to `hi`. */
static void emit_digits_between(struct grammar_builder *b, const char *lo, const char *hi, int n)
{
	struct grammar_choices c = {0};
	static const char zeros[] = "00000000000000000000", nines[] = "99999999999999999999";
	if (n == 0 || grammar_failed(b))
		return;
	if (memcmp(lo, zeros, (size_t)n) == 0 && memcmp(hi, nines, (size_t)n) == 0) {
		grammar_emit_digits(b, n, n);
		return;
	}
	if (lo[0] == hi[0]) {
		grammar_emit_between(b, (unsigned char)lo[0], (unsigned char)lo[0]);
		emit_digits_between(b, lo + 1, hi + 1, n - 1);
		return;
	}
	grammar_next_choice(b, &c, false);
	grammar_emit_between(b, (unsigned char)lo[0], (unsigned char)lo[0]);
	emit_digits_between(b, lo + 1, nines, n - 1);
	if (hi[0] - lo[0] > 1) {
		grammar_next_choice(b, &c, false);
		grammar_emit_between(b, (unsigned char)lo[0] + 1u, (unsigned char)hi[0] - 1u);
		grammar_emit_digits(b, n - 1, n - 1);
	}
	grammar_next_choice(b, &c, true);
	grammar_emit_between(b, (unsigned char)hi[0], (unsigned char)hi[0]);
	emit_digits_between(b, zeros, hi + 1, n - 1);
	grammar_end_choices(b, &c);
}

/* 0 <= lo <= hi, one alternative for each count of digits. */
static void emit_natural(struct grammar_builder *b, int64_t lo, int64_t hi)
{
	struct grammar_choices c = {0};
	char from[24], to[24];
	bool last;
	do {
		int64_t top = 9;
		int n = snprintf(from, sizeof from, "%lld", (long long)lo);
		for (int i = 1; i < n; i++)
			top = top * 10 + 9;
		last = hi <= top;
		snprintf(to, sizeof to, "%lld", (long long)(last ? hi : top));
		grammar_next_choice(b, &c, last);
		emit_digits_between(b, from, to, n);
		lo = top + 1;
	} while (!last && !grammar_failed(b));
	grammar_end_choices(b, &c);
}

void grammar_emit_range(struct grammar_builder *b, int64_t min, int64_t max)
{
	struct grammar_choices c = {0};
	if (min < 0) {
		grammar_next_choice(b, &c, max < 0);
		grammar_emit_text(b, "-");
		emit_natural(b, max < 0 ? -max : 1, -min);
	}
	if (max >= 0) {
		grammar_next_choice(b, &c, true);
		emit_natural(b, min < 0 ? 0 : min, max);
	}
	grammar_end_choices(b, &c);
}
