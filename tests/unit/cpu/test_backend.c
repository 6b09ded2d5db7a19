/* How a backend is chosen, and the geometry of KV pages. */
#include "tests/unit/cpu/fixture.h"

static void a_page_holds_all_layers_of_sixteen_positions(void **state)
{
	(void)state;
	struct kv_layout l;
	assert_int_equal(kv_layout_init(&l, 30, 3, 64, QUANT_F16), STATUS_OK);
	assert_int_equal(l.page_tokens, 16);
	assert_int_equal(l.page_bytes, 2 * 30 * 3 * 64 * 16 * 2);
	assert_int_equal(l.page_stride, l.page_bytes); /* already a multiple of 4096 */
	assert_int_equal(kv_layout_init(&l, 1, 1, 33, QUANT_F16), STATUS_OK);
	assert_int_equal(l.page_bytes, 2112);
	assert_int_equal(l.page_stride, 4096);
}

static void a_layout_that_cannot_be_is_refused(void **state)
{
	(void)state;
	struct kv_layout l;
	assert_int_equal(kv_layout_init(&l, 0, 3, 64, QUANT_F16), STATUS_INVALID);
	assert_int_equal(kv_layout_init(&l, 30, -3, 64, QUANT_F16), STATUS_INVALID);
	assert_int_equal(kv_layout_init(&l, 30, 3, 64, QUANT_Q4_K), STATUS_INVALID);
	assert_int_equal(kv_layout_init(&l, INT32_MAX, INT32_MAX, INT32_MAX, QUANT_F16), STATUS_INVALID);
}

static void cpu_means_the_fastest_kind_of_this_machine(void **state)
{
	(void)state;
	struct backend *b = open_backend("cpu", 0);
	struct backend_info info;
	assert_non_null(b);
	b->ops->info(b, &info);
	assert_true(info.host_memory);
	assert_true(info.n_threads >= 1);
	static const char *const fastest_first[] = {"cpu-avx512-bf16",  "cpu-avx512", "cpu-avx2",
	                                            "cpu-neon-dotprod", "cpu-neon",   "cpu-reference"};
	struct backend *first = NULL;
	const char *name = NULL;
	for (size_t i = 0; i < sizeof fastest_first / sizeof fastest_first[0] && !first; i++) {
		name = fastest_first[i];
		first = open_backend(name, 1);
	}
	assert_non_null(first);
	assert_string_equal(info.name, name);
	first->ops->destroy(first);
	b->ops->destroy(b);
}

static void an_unknown_device_is_named(void **state)
{
	(void)state;
	struct backend_options o = {.device = "abacus"};
	struct backend *b;
	struct error err = {0};
	assert_int_equal(backend_create(&o, &b, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "abacus"));
	o = (struct backend_options){.device = "cpu", .n_threads = -1};
	assert_int_equal(backend_create(&o, &b, &err), STATUS_INVALID);
}

UNIT_MAIN(cmocka_unit_test(a_page_holds_all_layers_of_sixteen_positions),
          cmocka_unit_test(a_layout_that_cannot_be_is_refused),
          cmocka_unit_test(cpu_means_the_fastest_kind_of_this_machine), cmocka_unit_test(an_unknown_device_is_named))
