/*
 * Tokens chosen on the device are those the engine's sampler chooses from the same logits with the same seed, whatever
 * the parameters, over whole generations: penalties, biases and the random numbers move on alike.
 */
#include <math.h>
#include <string.h>

#include "cuda/host_cuda/control.h"
#include "engine/sample/sampler.h"
#include "tests/unit/cpu/fixture.h"

static uint64_t seed = 21;
static struct backend *b;

static int open_device(void **state)
{
	(void)state;
	b = open_backend("cuda-host", 1);
	return b ? 0 : -1;
}

static int close_device(void **state)
{
	(void)state;
	b->ops->destroy(b);
	return 0;
}

enum { MAX_VOCAB = 3000, STRIDE = MAX_VOCAB + 40, ROWS = 3, BIASES = 5 };

/* Rows of logits where the tests want them: random ones, many equals, infinities, NaN. */
static void make_logits(float *x, int32_t n, int kind)
{
	for (int32_t i = 0; i < n; i++) {
		float v = random_normal(&seed) * (kind % 3 == 0 ? 1.0f : 5.0f);
		if (kind % 5 == 1)
			v = floorf(v);
		if (kind % 5 == 2 && i % 7 == 0)
			v = -INFINITY;
		if (kind % 5 == 3 && i % 11 == 0)
			v = NAN;
		x[i] = v;
	}
	if (kind % 17 == 4)
		x[n / 2] = x[n / 3] = INFINITY;
}

static struct sampling_params random_params(struct logit_bias bias[BIASES], int32_t n_vocab)
{
	static const float temperatures[] = {0, 0.3f, 1, 2}, top_ps[] = {1, 0.9f, 0.5f, 0}, min_ps[] = {0, 0.05f, 0.6f};
	static const int32_t top_ks[] = {0, 1, 2, 7, 40, 200, 100000};
	struct sampling_params p;
	sampling_params_init(&p);
	p.temperature = temperatures[random_int(&seed, 0, 3)];
	p.top_p = top_ps[random_int(&seed, 0, 3)];
	p.min_p = min_ps[random_int(&seed, 0, 2)];
	p.top_k = top_ks[random_int(&seed, 0, 6)];
	p.repeat_penalty = random_int(&seed, 0, 1) ? 1.0f : 1.3f;
	p.presence_penalty = random_int(&seed, 0, 1) ? 0.0f : 0.5f;
	p.frequency_penalty = random_int(&seed, 0, 1) ? 0.0f : 0.25f;
	p.penalty_last_n = random_int(&seed, -1, 6);
	p.seed = unit_rand(&seed);
	p.bias = bias;
	p.n_bias = (size_t)random_int(&seed, 0, BIASES);
	for (size_t i = 0; i < p.n_bias; i++)
		bias[i] = (struct logit_bias){(int32_t)i * 31 % n_vocab, i == 2 ? -100.0f : random_normal(&seed) * 4};
	return p;
}

static void tokens_are_those_of_the_sampler(void **state)
{
	(void)state;
	static float x[ROWS * STRIDE], copy[ROWS * STRIDE];
	void *device;
	assert_int_equal(b->ops->mem_alloc(b, sizeof x, &device), STATUS_OK);
	for (int round = 0; round < 60; round++) {
		int32_t n = round % 4 == 0 ? random_int(&seed, 160, 300) : random_int(&seed, 300, MAX_VOCAB);
		struct logit_bias bias[ROWS][BIASES];
		struct sampler *here[ROWS], *there[ROWS];
		for (int r = 0; r < ROWS; r++) {
			struct sampling_params p = random_params(bias[r], n);
			assert_int_equal(sampler_create(&p, n, &here[r]), STATUS_OK);
			assert_int_equal(sampler_create(&p, n, &there[r]), STATUS_OK);
			for (int i = 0; i < 8; i++) {
				int32_t token = random_int(&seed, 0, n - 1);
				sampler_accept(here[r], token, false);
				sampler_accept(there[r], token, false);
			}
		}
		for (int step = 0; step < 5; step++) {
			struct sample_row rows[ROWS];
			int32_t tokens[ROWS];
			for (int r = 0; r < ROWS; r++) {
				make_logits(x + r * STRIDE, STRIDE, round + step + r);
				assert_true(sampler_offload(there[r], &rows[r]));
				rows[r].output = r;
			}
			memcpy(copy, x, sizeof x);
			assert_int_equal(b->ops->mem_write(b, device, x, sizeof x), STATUS_OK);
			assert_int_equal(b->ops->sample(b, device, n, STRIDE, rows, ROWS, tokens), STATUS_OK);
			for (int r = 0; r < ROWS; r++) {
				struct sample_result want;
				sampler_sample(here[r], copy + r * STRIDE, &want);
				int32_t got = sampler_take(there[r], tokens[r]);
				if (got != want.token)
					fail_msg("round %d, step %d, row %d: token %d instead of %d (temperature %g, "
						 "top_k %d, top_p %g, min_p %g, edits %d, %d)",
						 round, step, r, got, want.token, rows[r].temperature, rows[r].top_k,
						 rows[r].top_p, rows[r].min_p, rows[r].n_first, rows[r].n_edits);
				sampler_accept(here[r], got, true);
				sampler_accept(there[r], got, true);
			}
		}
		for (int r = 0; r < ROWS; r++) {
			sampler_destroy(here[r]);
			sampler_destroy(there[r]);
		}
	}
	b->ops->mem_free(b, device, sizeof x);
	assert_string_equal(host_cuda_report(), "");
}

static void nothing_possible_is_what_the_sampler_makes_of_it(void **state)
{
	(void)state;
	enum { N = 300 };
	float x[N];
	void *device;
	struct sampling_params p;
	struct sampler *s;
	struct sample_row row;
	int32_t token;
	sampling_params_init(&p);
	assert_int_equal(sampler_create(&p, N, &s), STATUS_OK);
	assert_int_equal(b->ops->mem_alloc(b, sizeof x, &device), STATUS_OK);
	for (int kind = 0; kind < 2; kind++) {
		for (int i = 0; i < N; i++)
			x[i] = kind || i < 5 ? NAN : -INFINITY;
		assert_true(sampler_offload(s, &row));
		assert_int_equal(b->ops->mem_write(b, device, x, sizeof x), STATUS_OK);
		assert_int_equal(b->ops->sample(b, device, N, N, &row, 1, &token), STATUS_OK);
		assert_true(token < 0); /* no random number was used */
		assert_int_equal(sampler_take(s, token), kind ? 0 : 5);
	}
	b->ops->mem_free(b, device, sizeof x);
	sampler_destroy(s);
}

static void what_a_backend_cannot_do_stays_with_the_sampler(void **state)
{
	(void)state;
	struct sampling_params p;
	struct sampler *s;
	struct sample_row row;
	struct logit_bias twice[2] = {{3, 1}, {3, 2}};
	for (int what = 0; what < 3; what++) {
		sampling_params_init(&p);
		if (what == 0)
			p.n_logprobs = 0;
		if (what == 1)
			p.typical_p = 0.5f;
		if (what == 2)
			p.bias = twice, p.n_bias = 2;
		assert_int_equal(sampler_create(&p, 10, &s), STATUS_OK);
		assert_false(sampler_offload(s, &row));
		sampler_destroy(s);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(tokens_are_those_of_the_sampler),
		cmocka_unit_test(nothing_possible_is_what_the_sampler_makes_of_it),
		cmocka_unit_test(what_a_backend_cannot_do_stays_with_the_sampler),
	};
	return cmocka_run_group_tests(tests, open_device, close_device);
}
