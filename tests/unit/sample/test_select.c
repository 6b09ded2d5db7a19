#include "tests/unit/unit.h"

#include <math.h>
#include <stdbool.h>

#include "engine/sample/select.h"

struct item {
	float score;
	int32_t index;
};

static int best_first(const void *a, const void *b)
{
	const struct item *x = a, *y = b;
	if (x->score != y->score)
		return x->score > y->score ? -1 : 1;
	return x->index - y->index;
}

/* The definition, by sorting: marks what select_best() has to keep. */
static void naive(const float *score, const float *mass, int32_t n, double target, bool *keep)
{
	struct item *items = malloc((size_t)n * sizeof *items);
	int32_t n_items = 0;
	for (int32_t i = 0; i < n; i++) {
		keep[i] = false;
		if (score[i] > -INFINITY && (!mass || mass[i] > 0.0f))
			items[n_items++] = (struct item){score[i], i};
	}
	qsort(items, (size_t)n_items, sizeof *items, best_first);
	double sum = 0.0;
	for (int32_t i = 0; i < n_items && (i == 0 || sum < target); i++) {
		keep[items[i].index] = true;
		sum += mass ? (double)mass[items[i].index] : 1.0;
	}
	free(items);
}

static float random_score(uint64_t *rng)
{
	uint64_t r = unit_rand(rng);
	switch (r % 16) {
	case 0:
		return -INFINITY;
	case 1:
		return NAN;
	case 2:
		return -0.0f;
	case 3:
		return 0.0f;
	case 4:
		return 1e-42f; /* subnormal */
	case 5:
		return r % 5 ? 1e30f : INFINITY;
	case 6:
	case 7:
		return (float)(int)(r >> 32 & 7) - 4.0f; /* many equals */
	default:
		return (float)(int32_t)(r >> 32) * 0x1p-28f;
	}
}

static void keeps_what_sorting_would_keep(void **state)
{
	(void)state;
	uint64_t rng = 42;
	for (int round = 0; round < 2000; round++) {
		int32_t n = 1 + (int32_t)(unit_rand(&rng) % 700);
		float *score = malloc((size_t)n * sizeof *score), *mass = malloc((size_t)n * sizeof *mass);
		float *values = malloc((size_t)n * sizeof *values);
		bool *keep = malloc((size_t)n * sizeof *keep);
		double total = 0.0;
		bool by_count = round & 1;
		for (int32_t i = 0; i < n; i++) {
			score[i] = random_score(&rng);
			/* Multiples of 1/8 add up exactly, in whatever order. */
			mass[i] = (float)(unit_rand(&rng) % 9) / 8.0f;
			values[i] = (float)i;
			total += by_count ? 1.0 : (double)mass[i];
		}
		double target = total * (double)(unit_rand(&rng) % 1200) / 1000.0;
		if (by_count)
			target = floor(target);
		naive(score, by_count ? NULL : mass, n, target, keep);
		select_best(score, by_count ? NULL : mass, n, target, 0.0f, values, -1.0f);
		for (int32_t i = 0; i < n; i++)
			assert_int_equal(values[i] >= 0.0f, keep[i]);
		free(score);
		free(mass);
		free(values);
		free(keep);
	}
}

static void works_in_place(void **state)
{
	(void)state;
	float w[] = {0.1f, 0.5f, 0.05f, 0.3f, 0.05f};
	select_best(w, w, 5, 0.8, 0.0f, w, 0.0f);
	assert_true(w[0] == 0.0f && w[1] == 0.5f && w[2] == 0.0f && w[3] == 0.3f && w[4] == 0.0f);
}

static void light_elements_are_left_out(void **state)
{
	(void)state;
	float w[] = {0.1f, 0.5f, 0.05f, 0.3f, 0.05f};
	select_best(w, w, 5, 2.0, 0.2f, w, 0.0f);
	assert_true(w[0] == 0.0f && w[1] == 0.5f && w[2] == 0.0f && w[3] == 0.3f && w[4] == 0.0f);
}

static void nothing_to_keep_is_no_crash(void **state)
{
	(void)state;
	float score[] = {NAN, -INFINITY}, values[] = {1.0f, 1.0f};
	select_best(score, NULL, 2, 1.0, 0.0f, values, 0.0f);
	assert_true(values[0] == 0.0f && values[1] == 0.0f);
	select_best(score, NULL, 0, 1.0, 0.0f, values, 0.0f);
}

UNIT_MAIN(cmocka_unit_test(keeps_what_sorting_would_keep), cmocka_unit_test(works_in_place),
          cmocka_unit_test(light_elements_are_left_out), cmocka_unit_test(nothing_to_keep_is_no_crash))
