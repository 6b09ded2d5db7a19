#include "tests/unit/unit.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>

#include "engine/sample/sampler.h"

enum { MAX_VOCAB = 2000 };

static double uniform(uint64_t *rng)
{
	return (double)(unit_rand(rng) >> 11) * 0x1p-53;
}

static int32_t sample_once(const struct sampling_params *p, const float *logits, int32_t n)
{
	float copy[MAX_VOCAB];
	struct sampler *s;
	struct sample_result r;
	memcpy(copy, logits, (size_t)n * sizeof *copy);
	assert_int_equal(sampler_create(p, n, &s), STATUS_OK);
	sampler_sample(s, copy, &r);
	sampler_destroy(s);
	return r.token;
}

/* ---- A second implementation, by sorting, in double precision ---- */

struct item {
	int32_t token;
	double p, key; /* larger keys come first */
};

static int by_key(const void *a, const void *b)
{
	const struct item *x = a, *y = b;
	if (x->key != y->key)
		return x->key > y->key ? -1 : 1;
	return x->token - y->token;
}

static int normalise(struct item *it, int n)
{
	double sum = 0.0;
	for (int i = 0; i < n; i++)
		sum += it[i].p;
	for (int i = 0; i < n; i++)
		it[i].p /= sum;
	return n;
}

static int nucleus(struct item *it, int n, double mass)
{
	int kept = 0;
	qsort(it, (size_t)n, sizeof *it, by_key);
	for (double sum = 0.0; kept < n && (kept == 0 || sum < mass); kept++)
		sum += it[kept].p;
	return normalise(it, kept);
}

/* out[n]: the probability with which each token must be drawn. */
static void naive_distribution(const struct sampling_params *p, const float *logits, int n, double *out)
{
	struct item it[MAX_VOCAB];
	double max = -INFINITY;
	for (int i = 0; i < n; i++)
		max = (double)logits[i] > max ? (double)logits[i] : max;
	for (int i = 0; i < n; i++) {
		it[i] = (struct item){i, exp(((double)logits[i] - max) / (double)p->temperature), (double)logits[i]};
		out[i] = 0.0;
	}
	qsort(it, (size_t)n, sizeof *it, by_key);
	int left = p->top_k > 0 && p->top_k < n ? p->top_k : n;
	normalise(it, left);
	if (p->typical_p < 1.0f) {
		double entropy = 0.0;
		for (int i = 0; i < left; i++)
			entropy -= it[i].p * log(it[i].p);
		for (int i = 0; i < left; i++)
			it[i].key = -fabs(-log(it[i].p) - entropy);
		left = nucleus(it, left, (double)p->typical_p);
	}
	for (int i = 0; i < left; i++)
		it[i].key = it[i].p;
	left = nucleus(it, left, p->top_p < 1.0f ? (double)p->top_p : 2.0);
	double least = (double)p->min_p * it[0].p;
	while (it[left - 1].p < least)
		left--;
	normalise(it, left);
	for (int i = 0; i < left; i++)
		out[it[i].token] = it[i].p;
}

/* Draws n_draws tokens with one sampler and compares their counts with `expected` (Pearson's chi-square). */
static void check_distribution(const struct sampling_params *p, const float *logits, int n, const double *expected,
                               int n_draws)
{
	static int count[MAX_VOCAB];
	float copy[MAX_VOCAB];
	struct sampler *s;
	struct sample_result r;
	memset(count, 0, sizeof count);
	assert_int_equal(sampler_create(p, n, &s), STATUS_OK);
	for (int i = 0; i < n_draws; i++) {
		memcpy(copy, logits, (size_t)n * sizeof *copy);
		sampler_sample(s, copy, &r);
		assert_in_range(r.token, 0, n - 1);
		count[r.token]++;
	}
	sampler_destroy(s);

	double chi2 = 0.0, rare_expected = 0.0;
	int cells = 0, rare = 0;
	for (int i = 0; i < n; i++) {
		double e = expected[i] * n_draws;
		if (expected[i] == 0.0) {
			assert_int_equal(count[i], 0);
		} else if (e < 5.0) {
			rare += count[i];
			rare_expected += e;
		} else {
			chi2 += (count[i] - e) * (count[i] - e) / e;
			cells++;
		}
	}
	if (rare_expected > 1.0) {
		chi2 += (rare - rare_expected) * (rare - rare_expected) / rare_expected;
		cells++;
	}
	/*
	 * Mean `df`, standard deviation sqrt(2 df): five of them above the mean is far out of reach for a right
	 * sampler.
	 */
	double df = cells > 1 ? cells - 1 : 1;
	assert_true(chi2 < df + 5.0 * sqrt(2.0 * df) + 5.0);
}

/* ---- Draws ---- */

static void draws_follow_softmax(void **state)
{
	(void)state;
	uint64_t rng = 7;
	float logits[MAX_VOCAB];
	double expected[MAX_VOCAB];
	struct sampling_params p;
	sampling_params_init(&p);
	for (int n = 1; n <= 1300; n = n * 3 + 1) { /* across the sampler's blocks */
		for (int i = 0; i < n; i++)
			logits[i] = (float)(uniform(&rng) * 4.0);
		p.seed = (uint64_t)n;
		naive_distribution(&p, logits, n, expected);
		check_distribution(&p, logits, n, expected, 8000);
	}
}

static void each_filter_and_their_chain_match_a_naive_implementation(void **state)
{
	(void)state;
	uint64_t rng = 99;
	float logits[MAX_VOCAB];
	double expected[MAX_VOCAB];
	for (int round = 0; round < 150; round++) {
		struct sampling_params p;
		sampling_params_init(&p);
		int n = 2 + (int)(unit_rand(&rng) % 400);
		for (int i = 0; i < n; i++)
			logits[i] = (float)(uniform(&rng) * 8.0 - 30.0);
		/* The first rounds turn on one setting each, the later ones any combination. */
		unsigned on = round < 60 ? 1u << round % 5 : (unsigned)unit_rand(&rng) & 31;
		if (on & 1)
			p.temperature = (float)(0.3 + 1.5 * uniform(&rng));
		if (on & 2)
			p.top_k = 2 + (int32_t)(unit_rand(&rng) % 60);
		if (on & 4)
			p.typical_p = (float)(0.1 + 0.85 * uniform(&rng));
		if (on & 8)
			p.top_p = (float)(0.1 + 0.85 * uniform(&rng));
		if (on & 16)
			p.min_p = (float)(0.3 * uniform(&rng));
		p.seed = unit_rand(&rng);
		naive_distribution(&p, logits, n, expected);
		check_distribution(&p, logits, n, expected, 2000);
	}
}

/* Here the sampler narrows the choice by blocks first. Ties and impossible tokens are among the logits. */
static void top_k_of_a_large_vocabulary_is_exact(void **state)
{
	(void)state;
	uint64_t rng = 17;
	float logits[MAX_VOCAB];
	double expected[MAX_VOCAB];
	for (int round = 0; round < 60; round++) {
		struct sampling_params p;
		sampling_params_init(&p);
		int n = 1025 + (int)(unit_rand(&rng) % (MAX_VOCAB - 1025));
		for (int i = 0; i < n; i++)
			logits[i] = unit_rand(&rng) % 8 ? (float)(unit_rand(&rng) % (round % 2 ? 300 : 4)) : -INFINITY;
		p.temperature = 100.0f;
		p.top_k = 2 + (int32_t)(unit_rand(&rng) % 3);
		p.seed = unit_rand(&rng);
		naive_distribution(&p, logits, n, expected);
		check_distribution(&p, logits, n, expected, 200);
	}
}

static void same_seed_same_tokens(void **state)
{
	(void)state;
	float logits[500], copy[500];
	uint64_t rng = 3;
	struct sampling_params p;
	struct sample_result ra, rb;
	struct sampler *a, *b;
	for (int i = 0; i < 500; i++)
		logits[i] = (float)uniform(&rng);
	sampling_params_init(&p);
	p.seed = 1234;
	assert_int_equal(sampler_create(&p, 500, &a), STATUS_OK);
	assert_int_equal(sampler_create(&p, 500, &b), STATUS_OK);
	for (int i = 0; i < 100; i++) {
		memcpy(copy, logits, sizeof copy);
		sampler_sample(a, copy, &ra);
		memcpy(copy, logits, sizeof copy);
		sampler_sample(b, copy, &rb);
		assert_int_equal(ra.token, rb.token);
	}
	sampler_destroy(b);
	p.seed = 1235;
	int differ = 0;
	assert_int_equal(sampler_create(&p, 500, &b), STATUS_OK);
	for (int i = 0; i < 100; i++) {
		memcpy(copy, logits, sizeof copy);
		sampler_sample(a, copy, &ra);
		memcpy(copy, logits, sizeof copy);
		sampler_sample(b, copy, &rb);
		differ += ra.token != rb.token;
	}
	assert_true(differ > 80);
	sampler_destroy(a);
	sampler_destroy(b);
}

/* The answer to a seed is part of what users rely on: a change of these values is a break. */
static void the_generator_is_xoshiro256starstar(void **state)
{
	(void)state;
	float logits[1024] = {0};
	struct sampling_params p;
	sampling_params_init(&p);
	/*
	 * Over 1,024 equal tokens a draw shows the top ten bits of the generator's output. splitmix64 from seed 0 gives
	 * the state e220a8397b1dcdaf 6e789e6aa1b965f4 06c45d188009454f f88bb8a8724c81ec (its published sequence), whose
	 * first output is rotl(s[1] * 5, 7) * 9.
	 */
	uint64_t s1 = 0x6e789e6aa1b965f4ull * 5;
	uint64_t first = (s1 << 7 | s1 >> 57) * 9;
	assert_int_equal(sample_once(&p, logits, 1024), (int32_t)(first >> 54));
}

/* ---- Greedy ---- */

static void temperature_0_and_top_k_1_take_the_first_of_the_best(void **state)
{
	(void)state;
	float logits[MAX_VOCAB];
	struct sampling_params greedy, k1;
	uint64_t rng = 5;
	sampling_params_init(&greedy);
	greedy.temperature = 0.0f;
	sampling_params_init(&k1);
	k1.top_k = 1;
	for (int round = 0; round < 300; round++) {
		int n = 1 + (int)(unit_rand(&rng) % 40), best = 0;
		for (int i = 0; i < n; i++) {
			logits[i] = (float)(unit_rand(&rng) % 6) - 7.0f;
			best = logits[i] > logits[best] ? i : best;
		}
		assert_int_equal(sample_once(&greedy, logits, n), best);
		assert_int_equal(sample_once(&k1, logits, n), best);
	}
}

/* ---- Odd logits ---- */

static void broken_logits_still_give_a_valid_token(void **state)
{
	(void)state;
	static const float bad[] = {NAN, -INFINITY, INFINITY, 1.0f, -1e38f, 3e38f, 1e-45f};
	enum { N_BAD = sizeof bad / sizeof bad[0], N = 37 };
	uint64_t rng = 11;
	for (int round = 0; round < 3000; round++) {
		float logits[N], copy[N];
		struct sampling_params p;
		struct sampler *s;
		struct sample_result r;
		sampling_params_init(&p);
		int first = (int)(unit_rand(&rng) % N_BAD), kinds = 1 + (int)(unit_rand(&rng) % 3);
		for (int i = 0; i < N; i++)
			logits[i] = bad[(first + (int)(unit_rand(&rng) % (unsigned)kinds)) % N_BAD];
		unsigned on = (unsigned)unit_rand(&rng);
		p.temperature = on & 1 ? 0.0f : on & 2 ? 1e-30f : 1.0f;
		p.top_k = on & 4 ? 3 : 0;
		p.top_p = on & 8 ? 0.5f : 1.0f;
		p.typical_p = on & 16 ? 0.5f : 1.0f;
		p.min_p = on & 32 ? 0.5f : 0.0f;
		p.repeat_penalty = on & 64 ? 1.5f : 1.0f;
		p.n_logprobs = on & 128 ? 20 : -1;
		p.seed = unit_rand(&rng);
		assert_int_equal(sampler_create(&p, N, &s), STATUS_OK);
		sampler_accept(s, 3, true);
		memcpy(copy, logits, sizeof copy);
		sampler_sample(s, copy, &r);
		assert_in_range(r.token, 0, N - 1);
		bool any_number = false;
		for (int i = 0; i < N; i++)
			any_number = any_number || !isnan(logits[i]);
		assert_true(!any_number || !isnan(logits[r.token]));
		if (p.n_logprobs >= 0) {
			assert_false(isnan(r.logprob));
			for (int i = 0; i < r.n_top; i++)
				assert_false(isnan(r.top[i].logprob));
		}
		sampler_destroy(s);
	}
}

static void the_largest_float_shares_nothing(void **state)
{
	(void)state;
	float logits[] = {0.0f, INFINITY, 5.0f, INFINITY};
	double expected[] = {0.0, 0.5, 0.0, 0.5};
	struct sampling_params p;
	struct sample_result r;
	sampling_params_init(&p);
	check_distribution(&p, logits, 4, expected, 2000);
	sampler_logprobs(logits, 4, 3, 2, &r);
	assert_true(fabsf(r.logprob - logf(0.5f)) < 1e-6f);
	sampler_logprobs(logits, 4, 2, 2, &r);
	assert_true(r.logprob == -INFINITY && r.top[0].token == 1 && r.top[1].token == 3);
}

/* ---- Penalties and bias ---- */

/* The greedy token after penalties shows the order of two logits; this finds the logit of token 0 by bisection. */
static float penalised(const struct sampling_params *p, float logit, const int32_t *tokens, const bool *generated,
                       int n)
{
	float low = -100.0f, high = 100.0f;
	for (int i = 0; i < 60; i++) {
		float mid = 0.5f * (low + high), logits[8] = {logit, mid};
		struct sampling_params greedy = *p;
		struct sampler *s;
		struct sample_result r;
		greedy.temperature = 0.0f;
		for (int j = 2; j < 8; j++)
			logits[j] = -INFINITY;
		assert_int_equal(sampler_create(&greedy, 8, &s), STATUS_OK);
		for (int j = 0; j < n; j++)
			sampler_accept(s, tokens[j], generated[j]);
		sampler_sample(s, logits, &r);
		sampler_destroy(s);
		if (r.token == 0)
			low = mid;
		else
			high = mid;
	}
	return low;
}

#define ASSERT_NEAR(a, b) assert_true(fabs((double)(a) - (double)(b)) < 1e-4)

static void repeat_penalty_sees_the_last_n_of_prompt_and_answer(void **state)
{
	(void)state;
	const int32_t tokens[] = {0, 5, 6, 7};
	const bool generated[] = {false, false, true, true};
	struct sampling_params p;
	sampling_params_init(&p);
	p.repeat_penalty = 2.0f;
	p.penalty_last_n = 4;
	ASSERT_NEAR(penalised(&p, 3.0f, tokens, generated, 4), 1.5f);
	ASSERT_NEAR(penalised(&p, -3.0f, tokens, generated, 4), -6.0f);
	p.penalty_last_n = 3;
	ASSERT_NEAR(penalised(&p, 3.0f, tokens, generated, 4), 3.0f);
	ASSERT_NEAR(penalised(&p, 3.0f, tokens, generated, 3), 1.5f);
	p.penalty_last_n = 0;
	ASSERT_NEAR(penalised(&p, 3.0f, tokens, generated, 4), 3.0f);
	p.penalty_last_n = -1;
	ASSERT_NEAR(penalised(&p, 3.0f, tokens, generated, 4), 1.5f);
	const int32_t again[] = {0, 0, 5};
	ASSERT_NEAR(penalised(&p, 3.0f, again, generated, 3), 1.5f); /* once, however often it was seen */
	p.penalty_last_n = 2;
	ASSERT_NEAR(penalised(&p, 3.0f, again, generated, 3), 1.5f);
}

static void presence_and_frequency_count_the_answer_only(void **state)
{
	(void)state;
	const int32_t tokens[] = {0, 0, 0, 5, 0};
	const bool generated[] = {false, false, true, true, true};
	struct sampling_params p;
	sampling_params_init(&p);
	p.presence_penalty = 0.5f;
	ASSERT_NEAR(penalised(&p, 3.0f, tokens, generated, 2), 3.0f);
	ASSERT_NEAR(penalised(&p, 3.0f, tokens, generated, 5), 2.5f);
	p.frequency_penalty = -0.25f;
	ASSERT_NEAR(penalised(&p, 3.0f, tokens, generated, 5), 3.0f);
	p.presence_penalty = 0.0f;
	p.penalty_last_n = 0; /* belongs to repeat_penalty alone */
	ASSERT_NEAR(penalised(&p, 3.0f, tokens, generated, 5), 3.5f);
}

static void bias_is_added_and_minus_100_bans(void **state)
{
	(void)state;
	float logits[] = {1.0f, 2.0f, 3.0f};
	struct logit_bias bias[] = {{2, -1.5f}, {0, 0.25f}};
	struct sampling_params p;
	sampling_params_init(&p);
	p.temperature = 0.0f;
	p.bias = bias;
	p.n_bias = 2;
	assert_int_equal(sample_once(&p, logits, 3), 1);
	bias[1].bias = 1.25f;
	assert_int_equal(sample_once(&p, logits, 3), 0);
	float certain[] = {1000.0f, -1000.0f, -1000.0f};
	bias[0] = (struct logit_bias){0, -100.0f};
	p.n_bias = 1;
	assert_int_equal(sample_once(&p, certain, 3), 1);
	p.temperature = 1.0f;
	for (uint64_t seed = 0; seed < 50; seed++) {
		p.seed = seed;
		assert_int_not_equal(sample_once(&p, certain, 3), 0);
	}
}

/* ---- Log-probabilities ---- */

static void logprobs_are_of_the_raw_distribution(void **state)
{
	(void)state;
	enum { N = 1500 };
	float logits[N], copy[N];
	uint64_t rng = 21;
	for (int i = 0; i < N; i++)
		logits[i] = (float)(uniform(&rng) * 20.0 - 500.0);
	logits[700] = logits[900] = -470.0f; /* two equals at the top */
	long double sum = 0.0L;
	for (int i = 0; i < N; i++)
		sum += expl((long double)logits[i] + 470.0L);
	long double norm = logl(sum) - 470.0L;

	struct logit_bias ban = {700, -100.0f};
	struct sampling_params p;
	struct sampler *s;
	struct sample_result r;
	sampling_params_init(&p);
	p.temperature = 0.1f;
	p.n_logprobs = 20;
	p.bias = &ban;
	p.n_bias = 1;
	assert_int_equal(sampler_create(&p, N, &s), STATUS_OK);
	memcpy(copy, logits, sizeof copy);
	sampler_sample(s, copy, &r);
	sampler_destroy(s);
	assert_int_equal(r.token, 900);
	assert_true(fabsl((long double)r.logprob - (-470.0L - norm)) < 1e-6L);
	assert_int_equal(r.n_top, 20);
	assert_int_equal(r.top[0].token, 700);
	assert_int_equal(r.top[1].token, 900);
	for (int i = 0; i < 20; i++) {
		int larger = 0;
		for (int j = 0; j < N; j++)
			larger += logits[j] > logits[r.top[i].token];
		assert_int_equal(larger, i == 1 ? 0 : i);
		assert_true(fabsl((long double)r.top[i].logprob - ((long double)logits[r.top[i].token] - norm)) <
		            2e-6L);
	}
}

static void top_logprobs_are_cut_to_the_vocabulary(void **state)
{
	(void)state;
	float logits[] = {NAN, 1.0f, 0.0f};
	struct sample_result r;
	sampler_logprobs(logits, 3, 0, 20, &r);
	assert_int_equal(r.n_top, 2);
	assert_int_equal(r.top[0].token, 1);
	assert_true(r.logprob == -INFINITY);
	sampler_logprobs(logits, 3, 2, 0, &r);
	assert_int_equal(r.n_top, 0);
	ASSERT_NEAR(r.logprob, -1.313262);
}

/* ---- Checks ---- */

static void out_of_range_parameters_are_named(void **state)
{
	(void)state;
	struct sampling_params p;
	struct error err;
	struct logit_bias bias = {10, 1.0f};
	sampling_params_init(&p);
	assert_int_equal(sampling_params_check(&p, 10, &err), STATUS_OK);
#define REFUSED(field, value, name)                                                                                    \
	do {                                                                                                           \
		sampling_params_init(&p);                                                                              \
		p.field = value;                                                                                       \
		assert_int_equal(sampling_params_check(&p, 10, &err), STATUS_INVALID);                                 \
		assert_string_equal(err.param, name);                                                                  \
		assert_non_null(strstr(err.message, name));                                                            \
	} while (0)
	REFUSED(temperature, -0.1f, "temperature");
	REFUSED(temperature, NAN, "temperature");
	REFUSED(temperature, INFINITY, "temperature");
	REFUSED(top_p, 1.01f, "top_p");
	REFUSED(min_p, -1.0f, "min_p");
	REFUSED(typical_p, 2.0f, "typical_p");
	REFUSED(repeat_penalty, 0.0f, "repeat_penalty");
	REFUSED(presence_penalty, 2.5f, "presence_penalty");
	REFUSED(frequency_penalty, -2.5f, "frequency_penalty");
	REFUSED(penalty_last_n, -2, "repeat_last_n");
	REFUSED(n_logprobs, 21, "top_logprobs");
#undef REFUSED
	sampling_params_init(&p);
	p.bias = &bias;
	p.n_bias = 1;
	assert_int_equal(sampling_params_check(&p, 10, &err), STATUS_INVALID);
	assert_string_equal(err.param, "logit_bias");
	assert_int_equal(sampling_params_check(&p, 11, &err), STATUS_OK);
	bias.bias = NAN;
	assert_int_equal(sampling_params_check(&p, 11, &err), STATUS_INVALID);
}

UNIT_MAIN(cmocka_unit_test(draws_follow_softmax),
          cmocka_unit_test(each_filter_and_their_chain_match_a_naive_implementation),
          cmocka_unit_test(top_k_of_a_large_vocabulary_is_exact), cmocka_unit_test(same_seed_same_tokens),
          cmocka_unit_test(the_generator_is_xoshiro256starstar),
          cmocka_unit_test(temperature_0_and_top_k_1_take_the_first_of_the_best),
          cmocka_unit_test(broken_logits_still_give_a_valid_token), cmocka_unit_test(the_largest_float_shares_nothing),
          cmocka_unit_test(repeat_penalty_sees_the_last_n_of_prompt_and_answer),
          cmocka_unit_test(presence_and_frequency_count_the_answer_only),
          cmocka_unit_test(bias_is_added_and_minus_100_bans), cmocka_unit_test(logprobs_are_of_the_raw_distribution),
          cmocka_unit_test(top_logprobs_are_cut_to_the_vocabulary), cmocka_unit_test(out_of_range_parameters_are_named))
