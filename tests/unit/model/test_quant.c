#include "tests/unit/unit.h"

#include <math.h>

#include "engine/model/quant.h"

/* The value of a half by its definition, in doubles. */
static double half_value(uint16_t h)
{
	int exponent = h >> 10 & 31, fraction = h & 1023;
	double x = exponent == 31 ? (fraction ? (double)NAN : (double)INFINITY)
		   : exponent	  ? ldexp(1024 + fraction, exponent - 25)
				  : ldexp(fraction, -24);
	return h & 0x8000 ? -x : x;
}

static void every_half_has_its_value_and_survives_a_round_trip(void **state)
{
	(void)state;
	for (uint32_t h = 0; h < 65536; h++) {
		float f = quant_half_to_float((uint16_t)h);
		double x = half_value((uint16_t)h);
		if (isnan(x)) {
			assert_true(isnan(f));
			assert_true(isnan(half_value(quant_float_to_half(f))));
		} else {
			assert_true((double)f == x && !signbit(f) == !(h & 0x8000));
			assert_int_equal(quant_float_to_half(f), h);
		}
	}
}

static void to_half_rounds_to_the_nearest_and_ties_to_even(void **state)
{
	(void)state;
	/* Between each two neighbours: the midpoint goes to the even one, the floats beside it to the nearer one. */
	for (uint32_t h = 0; h < 0x7C00; h++) {
		double next = h == 0x7BFF ? 65536 : half_value((uint16_t)(h + 1));
		float middle = (float)((half_value((uint16_t)h) + next) / 2);
		uint16_t even = (uint16_t)(h & 1 ? h + 1 : h);
		assert_int_equal(quant_float_to_half(middle), even);
		assert_int_equal(quant_float_to_half(-middle), even | 0x8000);
		assert_int_equal(quant_float_to_half(nextafterf(middle, 0)), h);
		assert_int_equal(quant_float_to_half(nextafterf(middle, INFINITY)), h + 1);
	}
}

static void to_half_handles_the_ends_of_the_range(void **state)
{
	(void)state;
	assert_int_equal(quant_float_to_half(65519.996f), 0x7BFF);
	assert_int_equal(quant_float_to_half(65520), 0x7C00);
	assert_int_equal(quant_float_to_half(-3.4e38f), 0xFC00);
	assert_int_equal(quant_float_to_half(INFINITY), 0x7C00);
	assert_int_equal(quant_float_to_half(0x1p-25f), 0);
	assert_int_equal(quant_float_to_half(0x1.000002p-25f), 1);
	assert_int_equal(quant_float_to_half(0x1p-149f), 0);
	assert_int_equal(quant_float_to_half(-0.0f), 0x8000);
	assert_true(isnan(half_value(quant_float_to_half(NAN))));
	/* A NaN whose payload lies only in the dropped bits stays a NaN. */
	uint32_t bits = 0x7F800001;
	float f;
	memcpy(&f, &bits, sizeof f);
	assert_true(isnan(half_value(quant_float_to_half(f))));
}

static void bfloat16_is_the_upper_half_of_a_float(void **state)
{
	(void)state;
	for (uint32_t h = 0; h < 65536; h++) {
		float f = quant_bf16_to_float((uint16_t)h);
		uint32_t bits;
		memcpy(&bits, &f, sizeof bits);
		assert_int_equal(bits, h << 16);
	}
}

/*
 * Known answers: blocks of random bytes with d = 0.5 and m or dmin = 0.25 set at the offsets given, decoded by the
 * Python package gguf 0.19.0. `sum` is the sum of (e + 1) * x[e], which any exchange of two elements changes; every
 * value and the sum are exact in binary.
 */
static const struct known {
	enum quant_type type;
	int d_at, m_at; /* -1: the format has none */
	float some[6];	/* elements 0, 1, 15, 16, 17, 31 of a block of 32; 0, 17, 33, 70, 129, 255 of one of 256 */
	double sum;
} known[] = {
	{QUANT_Q4_0, 0, -1, {-4, -1, 0, 2, -3, -2.5}, 44},
	{QUANT_Q4_1, 0, 2, {6.75, 7.75, 2.75, 4.25, 1.25, 4.75}, 2718.5},
	{QUANT_Q5_0, 0, -1, {-0.5, 7.5, -7.5, 4.5, 0, -2}, -170.5},
	{QUANT_Q5_1, 0, 2, {15.25, 5.75, 5.75, 2.25, 5.75, 12.75}, 4540},
	{QUANT_Q8_0, 0, -1, {56.5, 33.5, -20, 31.5, -60.5, -30.5}, -4393},
	{QUANT_Q2_K, 80, 82, {9.75, 1.5, -1, 19, -0.25, 1.25}, 134079},
	{QUANT_Q3_K, 108, -1, {42, -33, -26, 22, -16.5, 7}, -137909.5},
	{QUANT_Q4_K, 0, 2, {77.5, 39.5, 45.5, 31, 321, 52.5}, 4563165},
	{QUANT_Q5_K, 0, 2, {105, 65, 375.25, 205, 365.75, 106.5}, 8084849},
	{QUANT_Q6_K, 208, -1, {-126, 970, 821.5, 82.5, 769.5, 885.5}, 1527032.5},
};

static void set_half(uint8_t *block, int at, uint16_t h)
{
	if (at >= 0) {
		block[at] = (uint8_t)h;
		block[at + 1] = (uint8_t)(h >> 8);
	}
}

static void blocks_decode_to_known_answers(void **state)
{
	(void)state;
	static const int small[6] = {0, 1, 15, 16, 17, 31}, large[6] = {0, 17, 33, 70, 129, 255};
	for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
		const struct known *k = &known[i];
		const struct quant_format *f = quant_format(k->type);
		/* Two equal blocks at an odd address: blocks in files are not aligned. */
		uint8_t bytes[1 + 2 * 256], *block = bytes + 1;
		uint64_t rand = 0x9E3779B97F4A7C15ull + k->type;
		for (uint32_t b = 0; b < f->block_bytes; b++)
			block[b] = (uint8_t)(unit_rand(&rand) >> 56);
		set_half(block, k->d_at, 0x3800);
		set_half(block, k->m_at, 0x3400);
		memcpy(block + f->block_bytes, block, f->block_bytes);

		float x[512];
		f->dequantize(block, x, 2 * f->block_elems);
		double sum = 0;
		for (uint32_t e = 0; e < f->block_elems; e++) {
			sum += (e + 1) * (double)x[e];
			assert_true(x[e] == x[e + f->block_elems]);
		}
		for (int s = 0; s < 6; s++)
			assert_true(x[f->block_elems == 32 ? small[s] : large[s]] == k->some[s]);
		assert_true(sum == k->sum);
	}
}

static void plain_types_decode_to_known_answers(void **state)
{
	(void)state;
	float x[3];
	static const uint8_t f32[] = {0, 0, 0x80, 0x3F, 0, 0, 0x20, 0xC0, 1, 0, 0, 0};
	quant_format(QUANT_F32)->dequantize(f32, x, 3);
	assert_true(x[0] == 1 && x[1] == -2.5f && x[2] == 0x1p-149f);
	static const uint8_t f16[] = {0, 0x3C, 0, 0xC1, 1, 0};
	quant_format(QUANT_F16)->dequantize(f16, x, 3);
	assert_true(x[0] == 1 && x[1] == -2.5f && x[2] == 0x1p-24f);
	static const uint8_t bf16[] = {0x80, 0x3F, 0x20, 0xC0, 1, 0};
	quant_format(QUANT_BF16)->dequantize(bf16, x, 3);
	assert_true(x[0] == 1 && x[1] == -2.5f && x[2] == 0x1p-133f);
}

static void formats_are_found_by_their_number(void **state)
{
	(void)state;
	size_t n = 0;
	for (const struct quant_format *f; (f = quant_format_at(n)); n++) {
		assert_ptr_equal(quant_format(f->type), f);
		assert_true(f->block_elems == 1 || f->block_elems == 32 || f->block_elems == 256);
	}
	assert_int_equal(n, 13);
	assert_null(quant_format(4));
	assert_null(quant_format(20));
	assert_null(quant_format(UINT32_MAX));
}

UNIT_MAIN(cmocka_unit_test(every_half_has_its_value_and_survives_a_round_trip),
	  cmocka_unit_test(to_half_rounds_to_the_nearest_and_ties_to_even),
	  cmocka_unit_test(to_half_handles_the_ends_of_the_range),
	  cmocka_unit_test(bfloat16_is_the_upper_half_of_a_float), cmocka_unit_test(blocks_decode_to_known_answers),
	  cmocka_unit_test(plain_types_decode_to_known_answers), cmocka_unit_test(formats_are_found_by_their_number))
