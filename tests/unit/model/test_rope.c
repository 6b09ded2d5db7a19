/*
 * The expected tables were computed in NumPy by tests/golden/numpy_reference.py, which shares no code with the engine.
 */
#include "tests/unit/unit.h"

#include <math.h>

#include "engine/model/rope.h"

static void check(const struct model_params *p, const float *factors, const float *expected)
{
	float inv_freq[64];
	rope_frequencies(p, factors, inv_freq);
	for (int32_t i = 0; i < p->rope_dims / 2; i++)
		assert_true(fabsf(inv_freq[i] - expected[i]) <= 1e-6f * expected[i]);
}

static struct model_params plain(int32_t dims, float base)
{
	return (struct model_params){
		.rope_dims = dims, .rope_base = base, .rope_factor = 1.0f, .rope_attn_factor = 1.0f};
}

static void unscaled_frequencies_are_powers_of_the_base(void **state)
{
	(void)state;
	static const float expected[] = {1.0f,  0.316227766f,   0.1f,   0.0316227766f,
	                                 0.01f, 0.00316227766f, 0.001f, 0.000316227766f};
	struct model_params p = plain(16, 10000.0f);
	check(&p, NULL, expected);
	assert_true(rope_magnitude(&p) == 1.0f);
}

static void linear_scaling_divides_all(void **state)
{
	(void)state;
	static const float expected[] = {0.25f,           0.0592843426f,   0.0140585331f,   0.00333380358f,
	                                 0.000790569415f, 0.000187473552f, 4.44569853e-05f, 1.05424126e-05f};
	struct model_params p = plain(16, 100000.0f);
	p.rope_scaling = ROPE_SCALING_LINEAR;
	p.rope_factor = 4.0f;
	check(&p, NULL, expected);
	assert_true(rope_magnitude(&p) == 1.0f);
}

static void llama3_stretches_long_waves(void **state)
{
	(void)state;
	static const float expected[] = {
		1.0f,           0.440366603f,    0.193922745f,    0.0853971003f,   0.0376060309f,
		0.0165604401f,  0.00729266474f,  0.00321144599f,  0.000524846161f, 7.78465527e-05f,
		3.4281022e-05f, 1.50962172e-05f, 6.64786987e-06f, 2.92749987e-06f, 1.28917317e-06f,
		5.6770881e-07f};
	struct model_params p = plain(32, 500000.0f);
	p.rope_scaling = ROPE_SCALING_LLAMA3;
	p.rope_factor = 8.0f;
	p.rope_original_ctx = 8192;
	p.rope_low_freq_factor = 1.0f;
	p.rope_high_freq_factor = 4.0f;
	check(&p, NULL, expected);
	assert_true(rope_magnitude(&p) == 1.0f);
}

static void divisors_of_the_file_replace_the_llama3_rule(void **state)
{
	(void)state;
	static const float factors[] = {1.0f, 2.0f, 4.0f, 8.0f, 8.0f, 8.0f, 8.0f, 8.0f};
	static const float expected[] = {1.0f,     0.158113883f,    0.025f,    0.00395284708f,
	                                 0.00125f, 0.000395284708f, 0.000125f, 3.95284708e-05f};
	struct model_params p = plain(16, 10000.0f);
	check(&p, factors, expected);
	p.rope_scaling = ROPE_SCALING_LLAMA3;
	p.rope_factor = 8.0f;
	p.rope_original_ctx = 8192;
	p.rope_low_freq_factor = 1.0f;
	p.rope_high_freq_factor = 4.0f;
	check(&p, factors, expected);
}

static void yarn_blends_by_pair(void **state)
{
	(void)state;
	static const float expected[] = {1.0f,
	                                 0.421696503f,
	                                 0.177827941f,
	                                 0.0749894209f,
	                                 0.0316227766f,
	                                 0.0133352143f,
	                                 0.00477990126f,
	                                 0.00165996159f,
	                                 0.00055f,
	                                 0.000168678601f,
	                                 4.44569853e-05f,
	                                 1.87473552e-05f,
	                                 7.90569415e-06f,
	                                 3.33380358e-06f,
	                                 1.40585331e-06f,
	                                 5.92843426e-07f};
	struct model_params p = plain(32, 1000000.0f);
	p.rope_scaling = ROPE_SCALING_YARN;
	p.rope_factor = 4.0f;
	p.rope_original_ctx = 32768;
	p.yarn_beta_fast = 32.0f;
	p.yarn_beta_slow = 1.0f;
	p.yarn_ext_factor = 1.0f;
	check(&p, NULL, expected);
	assert_true(fabsf(rope_magnitude(&p) - 1.13862944f) < 1e-6f);
	p.rope_attn_factor = 0.5f;
	assert_true(fabsf(rope_magnitude(&p) - 0.56931472f) < 1e-6f);
}

static void yarn_takes_its_bounds_from_the_file(void **state)
{
	(void)state;
	static const float expected[] = {1.0f,     0.316227766f,    0.1f,      0.0217406589f,
	                                 0.00375f, 0.000197642354f, 6.25e-05f, 1.97642354e-05f};
	struct model_params p = plain(16, 10000.0f);
	p.rope_scaling = ROPE_SCALING_YARN;
	p.rope_factor = 16.0f;
	p.rope_original_ctx = 2048;
	p.yarn_beta_fast = 20.0f;
	p.yarn_beta_slow = 2.0f;
	p.yarn_ext_factor = 1.0f;
	check(&p, NULL, expected);
	assert_true(fabsf(rope_magnitude(&p) - 1.27725887f) < 1e-6f);
}

/* Without extrapolation every pair is interpolated, which is linear scaling, and no magnitude is due. */
static void yarn_without_extrapolation_is_linear(void **state)
{
	(void)state;
	float expected[8];
	struct model_params p = plain(16, 10000.0f);
	p.rope_scaling = ROPE_SCALING_LINEAR;
	p.rope_factor = 16.0f;
	rope_frequencies(&p, NULL, expected);
	p.rope_scaling = ROPE_SCALING_YARN;
	p.rope_original_ctx = 2048;
	p.yarn_beta_fast = 32.0f;
	p.yarn_beta_slow = 1.0f;
	p.yarn_ext_factor = 0.0f;
	check(&p, NULL, expected);
	assert_true(rope_magnitude(&p) == 1.0f);
}

UNIT_MAIN(cmocka_unit_test(unscaled_frequencies_are_powers_of_the_base), cmocka_unit_test(linear_scaling_divides_all),
          cmocka_unit_test(llama3_stretches_long_waves), cmocka_unit_test(divisors_of_the_file_replace_the_llama3_rule),
          cmocka_unit_test(yarn_blends_by_pair), cmocka_unit_test(yarn_takes_its_bounds_from_the_file),
          cmocka_unit_test(yarn_without_extrapolation_is_linear))
