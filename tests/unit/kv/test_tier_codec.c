#include "tests/unit/unit.h"

#include <math.h>

#include "engine/kv/tier_codec.h"

enum { DIM = 24, BLOCKS = 3 * 2 * 2, ELEMENTS = BLOCKS * DIM * KV_PAGE_TOKENS };

static struct kv_layout layout_of(void)
{
	struct kv_layout l;
	assert_int_equal(kv_layout_init(&l, 3, 2, DIM, QUANT_F16), STATUS_OK);
	assert_int_equal(l.page_bytes, ELEMENTS * 2);
	return l;
}

/* Vectors of very different sizes, so that one scale for several of them would show. */
static void fill(uint16_t *page, uint64_t seed)
{
	for (int i = 0; i < ELEMENTS; i++) {
		float size = powf(2, (float)(i / DIM % 19) - 9);
		page[i] = quant_float_to_half(size * ((float)(unit_rand(&seed) >> 40) / (float)(1 << 23) - 1));
	}
}

static float largest(const uint16_t *vector)
{
	float max = 0;
	for (int d = 0; d < DIM; d++)
		max = fmaxf(max, fabsf(quant_half_to_float(vector[d])));
	return max;
}

static void check_bound(enum kv_form type)
{
	static uint16_t page[ELEMENTS], back[ELEMENTS];
	struct kv_layout l = layout_of();
	struct kv_order rows = {.known = true};
	void *packed = malloc(kv_codec_bytes(&l, type));
	double square = 0, total = 0;
	fill(page, 7);
	assert_true(kv_codec_pack(&l, rows, type, page, packed));
	kv_codec_unpack(&l, rows, type, packed, back);
	for (int v = 0; v < ELEMENTS / DIM; v++) {
		float max = largest(page + v * DIM);
		for (int d = 0; d < DIM; d++) {
			float x = quant_half_to_float(page[v * DIM + d]), y = quant_half_to_float(back[v * DIM + d]);
			float bound = type == KV_FORM_INT8 ? max / 127 / 2 : fmaxf(fabsf(x) / 16, max / 448 / 1024);
			/* And the result is a half again. */
			bound = bound * 1.001f + fmaxf(fabsf(x), 0x1p-14f) * 0x1p-10f;
			if (fabsf(x - y) > bound)
				fail_msg("%s: %g became %g, more than %g away", kv_form_name(type), (double)x,
				         (double)y, (double)bound);
			square += (double)(x - y) * (double)(x - y) / ((double)max * (double)max);
			total++;
		}
	}
	/* A codec that clips or shifts could keep to the bound and still be worse than rounding is. */
	assert_true(sqrt(square / total) < (type == KV_FORM_INT8 ? 0.0024 : 0.016));
	free(packed);
}

static void int8_is_within_half_a_step_of_the_largest_element(void **state)
{
	(void)state;
	check_bound(KV_FORM_INT8);
}

static void fp8_is_within_a_sixteenth_of_each_element(void **state)
{
	(void)state;
	check_bound(KV_FORM_FP8_E4M3);
}

static void f16_is_exact(void **state)
{
	(void)state;
	static uint16_t page[ELEMENTS], packed[ELEMENTS], back[ELEMENTS];
	struct kv_layout l = layout_of();
	struct kv_order rows = {.known = true};
	fill(page, 3);
	page[5] = 0x7C00; /* even what is no number */
	assert_int_equal(kv_codec_bytes(&l, KV_FORM_F16), sizeof page);
	assert_true(kv_codec_pack(&l, rows, KV_FORM_F16, page, packed));
	kv_codec_unpack(&l, rows, KV_FORM_F16, packed, back);
	assert_memory_equal(page, back, sizeof page);
}

static void narrow_pages_take_a_byte_an_element_and_a_scale_a_vector(void **state)
{
	(void)state;
	struct kv_layout l = layout_of();
	assert_int_equal(kv_codec_bytes(&l, KV_FORM_INT8), ELEMENTS + ELEMENTS / DIM * 4);
	assert_int_equal(kv_codec_bytes(&l, KV_FORM_FP8_E4M3), ELEMENTS + ELEMENTS / DIM * 4);
}

/*
 * The element of a run that (token, d) is, for KV_OPERAND_VALUES: by lanes, as the operand of a tensor core has them.
 */
static int operand_value(int dim, int token, int d)
{
	int at = 0;
	for (int first = 0; first < dim; first += 16) {
		for (int lane = 0; lane < 32; lane++) {
			for (int e = 0; e < 8; e++) {
				int its_token = lane % 4 * 2 + e % 2 + e / 4 * 8,
				    its_d = first + lane / 4 + e / 2 % 2 * 8;
				if (its_d >= dim)
					continue;
				if (its_token == token && its_d == d)
					return at;
				at++;
			}
		}
	}
	return -1;
}

/* Where element (layer, what, head, token, d) lies in a page of an order: backend.h. */
static int place(struct kv_order o, int dim, int layer, int what, int head, int token, int d)
{
	int block = (o.pairs ? (layer * 2 + head) * 2 + what : (layer * 2 + what) * 2 + head) * dim * KV_PAGE_TOKENS;
	switch (what == 0 ? o.keys : o.values) {
	case KV_BY_TOKEN:
		return block + token * dim + d;
	case KV_BY_DIM:
		return block + d * KV_PAGE_TOKENS + token;
	case KV_BY_DIM_PAIRS:
		if (d == dim - 1 && dim % 2)
			return block + d * KV_PAGE_TOKENS + token;
		return block + d / 2 * 2 * KV_PAGE_TOKENS + token * 2 + d % 2;
	case KV_BY_TOKEN_PAIRS:
		return block + token / 2 * 2 * dim + d * 2 + token % 2;
	case KV_OPERAND_KEYS:
		return block + d / 32 * 32 * KV_PAGE_TOKENS + token * (dim - d / 32 * 32 < 32 ? dim % 32 : 32) + d % 32;
	case KV_OPERAND_VALUES:
		return block + operand_value(dim, token, d);
	}
	return -1;
}

static void check_orders(int dim, enum quant_type type)
{
	static uint16_t plain[ELEMENTS], plain_back[ELEMENTS], page[ELEMENTS], back[ELEMENTS];
	static const struct kv_order orders[] = {
		{true, false, KV_BY_DIM, KV_BY_TOKEN},	     {true, true, KV_BY_TOKEN, KV_BY_TOKEN},
		{true, true, KV_BY_DIM, KV_BY_TOKEN},	     {true, true, KV_BY_DIM_PAIRS, KV_BY_TOKEN_PAIRS},
		{true, false, KV_BY_TOKEN_PAIRS, KV_BY_DIM}, {true, false, KV_OPERAND_KEYS, KV_OPERAND_VALUES},
	};
	struct kv_order rows = {.known = true};
	struct kv_layout l;
	uint64_t seed = 11;
	assert_int_equal(kv_layout_init(&l, 3, 2, dim, type), STATUS_OK);
	void *packed = malloc(kv_codec_bytes(&l, KV_FORM_INT8));
	int n = BLOCKS * dim * KV_PAGE_TOKENS;
	for (int i = 0; i < n; i++) {
		float x = (float)(unit_rand(&seed) >> 40) / (float)(1 << 23) - 1;
		plain[i] = type == QUANT_BF16 ? quant_float_to_bf16(x) : quant_float_to_half(x);
	}
	assert_true(kv_codec_pack(&l, rows, KV_FORM_INT8, plain, packed));
	kv_codec_unpack(&l, rows, KV_FORM_INT8, packed, plain_back);
	for (int i = 0; i < n; i++) {
		float x = type == QUANT_BF16 ? quant_bf16_to_float(plain[i]) : quant_half_to_float(plain[i]);
		float y = type == QUANT_BF16 ? quant_bf16_to_float(plain_back[i]) : quant_half_to_float(plain_back[i]);
		assert_true(fabsf(x - y) <= 0.5f / 127 * 1.001f + fabsf(x) / 256);
	}
	for (size_t o = 0; o < sizeof orders / sizeof *orders; o++) {
		if (orders[o].keys == KV_OPERAND_KEYS && dim % 8)
			continue;
		for (int i = 0; i < n; i++) {
			int d = i % dim, token = i / dim % KV_PAGE_TOKENS, block = i / dim / KV_PAGE_TOKENS;
			page[place(orders[o], dim, block / 4, block / 2 % 2, block % 2, token, d)] = plain[i];
		}
		assert_true(kv_codec_pack(&l, orders[o], KV_FORM_INT8, page, packed));
		kv_codec_unpack(&l, orders[o], KV_FORM_INT8, packed, back);
		for (int i = 0; i < n; i++) {
			int d = i % dim, token = i / dim % KV_PAGE_TOKENS, block = i / dim / KV_PAGE_TOKENS;
			assert_int_equal(back[place(orders[o], dim, block / 4, block / 2 % 2, block % 2, token, d)],
			                 plain_back[i]);
		}
	}
	free(packed);
}

static void every_inner_order_gives_the_same_elements(void **state)
{
	(void)state;
	check_orders(DIM, QUANT_F16);
	check_orders(DIM, QUANT_BF16);
	check_orders(DIM - 8, QUANT_F16);
	check_orders(DIM - 16, QUANT_F16);
	check_orders(DIM - 1, QUANT_F16);
	check_orders(DIM - 1, QUANT_BF16);
}

static void what_is_no_number_is_refused_wherever_it_stands(void **state)
{
	(void)state;
	static uint16_t page[ELEMENTS];
	static const uint16_t bad[] = {0x7C00, 0xFC00, 0x7E00};
	struct kv_layout l = layout_of();
	struct kv_order rows = {.known = true};
	void *packed = malloc(kv_codec_bytes(&l, KV_FORM_INT8));
	for (int i = 0; i < ELEMENTS; i += 997) {
		fill(page, 5);
		page[i] = bad[i % 3];
		assert_false(kv_codec_pack(&l, rows, KV_FORM_INT8, page, packed));
		assert_false(kv_codec_pack(&l, rows, KV_FORM_FP8_E4M3, page, packed));
	}
	free(packed);
}

static void the_largest_and_the_smallest_halves_have_a_form(void **state)
{
	(void)state;
	static uint16_t page[ELEMENTS], back[ELEMENTS];
	struct kv_layout l = layout_of();
	struct kv_order rows = {.known = true};
	void *packed = malloc(kv_codec_bytes(&l, KV_FORM_INT8));
	for (int type = KV_FORM_INT8; type < KV_N_FORMS; type++) {
		memset(page, 0, sizeof page);
		page[0] = 0x7BFF;
		page[DIM] = 0x0001;
		assert_true(kv_codec_pack(&l, rows, (enum kv_form)type, page, packed));
		kv_codec_unpack(&l, rows, (enum kv_form)type, packed, back);
		assert_memory_equal(page, back, sizeof page);
	}
	free(packed);
}

static void codes_of_fp8_have_the_values_of_the_specification(void **state)
{
	(void)state;
	/* OFP8, table 2: S.1111.110 = 448, S.0001.000 = 2^-6, S.0000.111 = 0.875 * 2^-6, S.0000.001 = 2^-9. */
	assert_true(quant_fp8_to_float(0x7E) == 448 && quant_fp8_to_float(0xFE) == -448);
	assert_true(quant_fp8_to_float(0x08) == 0x1p-6f && quant_fp8_to_float(0x07) == 0.875f * 0x1p-6f &&
	            quant_fp8_to_float(0x01) == 0x1p-9f);
	assert_true(quant_fp8_to_float(0x38) == 1 && quant_fp8_to_float(0) == 0);
	assert_true(isnan(quant_fp8_to_float(0x7F)) && isnan(quant_fp8_to_float(0xFF)));
	for (int c = 0; c < 256; c++) {
		if ((c & 0x7F) != 0x7F)
			assert_int_equal(quant_fp8_from_float(quant_fp8_to_float((uint8_t)c)), c);
	}
}

static void fp8_takes_the_nearest_code(void **state)
{
	(void)state;
	uint64_t seed = 1;
	for (int n = 0; n < 20000; n++) {
		float x = ldexpf((float)(unit_rand(&seed) >> 40) / (float)(1 << 23) - 1,
		                 (int)(unit_rand(&seed) % 22) - 12);
		float got = quant_fp8_to_float(quant_fp8_from_float(x)), best = INFINITY;
		for (int c = 0; c < 256; c++) {
			float v = quant_fp8_to_float((uint8_t)c);
			if (!isnan(v) && fabsf(v - x) < fabsf(best - x))
				best = v;
		}
		assert_true(fabsf(got - x) == fabsf(best - x));
	}
	/* Ties go to the even code: 1.0625 lies between 1 and 1.125, 1.1875 between 1.125 and 1.25. */
	assert_true(quant_fp8_to_float(quant_fp8_from_float(1.0625f)) == 1);
	assert_true(quant_fp8_to_float(quant_fp8_from_float(1.1875f)) == 1.25f);
	assert_true(quant_fp8_to_float(quant_fp8_from_float(1e9f)) == 448);
	assert_int_equal(quant_fp8_from_float(NAN) & 0x7F, 0x7F);
}

UNIT_MAIN(cmocka_unit_test(int8_is_within_half_a_step_of_the_largest_element),
          cmocka_unit_test(fp8_is_within_a_sixteenth_of_each_element), cmocka_unit_test(f16_is_exact),
          cmocka_unit_test(narrow_pages_take_a_byte_an_element_and_a_scale_a_vector),
          cmocka_unit_test(every_inner_order_gives_the_same_elements),
          cmocka_unit_test(what_is_no_number_is_refused_wherever_it_stands),
          cmocka_unit_test(the_largest_and_the_smallest_halves_have_a_form),
          cmocka_unit_test(codes_of_fp8_have_the_values_of_the_specification),
          cmocka_unit_test(fp8_takes_the_nearest_code))
