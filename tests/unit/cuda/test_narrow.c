/*
 * Narrow KV of the CUDA backend, its kernels run by the execution model on the CPU: what it writes is bit for bit what
 * the host's code writes, in pages and in the forms that tiers keep. (tests/gpu/compare_attention.c has attention over
 * such pages.)
 */
#include <math.h>

#include "cuda/host_cuda/control.h"
#include "engine/cpu/narrow.h"
#include "engine/kv/tier_codec.h"
#include "tests/unit/cpu/fixture.h"

static uint64_t seed = 9;

static const enum kv_form forms[] = {KV_FORM_INT8, KV_FORM_FP8_E4M3};
static const enum kv_form codecs[] = {KV_FORM_INT8, KV_FORM_FP8_E4M3};

static struct backend *open_device(void)
{
	struct backend *b = open_backend("cuda-host", 0);
	assert_non_null(b);
	return b;
}

/* ---- Pages as tiers keep them ---- */

/* A page of elements of every size that a half has, in device order. */
static void fill_page(const struct kv_layout *l, uint16_t *page)
{
	for (size_t i = 0; i < l->page_bytes / 2; i++) {
		uint32_t bits = (uint32_t)(unit_rand(&seed) >> 32);
		float x = random_float(&seed);
		/* Any finite half, one about 1, a small one, or zero. */
		uint16_t any = (uint16_t)bits;
		if ((any & 0x7C00) == 0x7C00)
			any &= 0xBFFF;
		page[i] = bits >> 24 < 16    ? any
		          : bits >> 24 < 200 ? quant_float_to_half(x)
		          : bits >> 24 < 240 ? any & 0x83FF
		                             : 0;
		x = quant_half_to_float(page[i]);
		if (l->type == QUANT_BF16) /* 65280 is the last that a half is, too */
			page[i] = quant_float_to_bf16(x > 65280 ? 65280 : x < -65280 ? -65280 : x);
	}
}

static void assert_packs_as_the_host(struct backend *b, int32_t n_layer, int32_t n_head_kv, int32_t dim, int f,
                                     bool spoil)
{
	enum { PAGES = 3, PAGE = 1 };
	struct kv_layout l;
	struct backend_info info;
	void *kv;
	bool packed = false;
	b->ops->info(b, &info);
	assert_int_equal(kv_layout_for(b, &l, n_layer, n_head_kv, dim), STATUS_OK);
	size_t bytes = kv_codec_bytes(&l, codecs[f]), slab_bytes = PAGES * l.page_stride;
	char *slab = malloc(slab_bytes), *after = malloc(slab_bytes), *want = malloc(bytes), *got = malloc(bytes),
	     *wide = malloc(l.page_bytes);
	for (size_t i = 0; i < slab_bytes; i++)
		slab[i] = (char)unit_rand(&seed);
	char *page = slab + PAGE * l.page_stride;
	fill_page(&l, (uint16_t *)(void *)page);
	if (spoil) {
		static const uint16_t odd[][3] = {{0x7C00, 0xFC00, 0x7E01}, {0x7F80, 0xFF80, 0x7FC1}};
		((uint16_t *)(void *)page)[unit_rand(&seed) % (l.page_bytes / 2)] =
			odd[l.type == QUANT_BF16][unit_rand(&seed) % 3];
	}
	assert_int_equal(b->ops->mem_alloc(b, slab_bytes, &kv), STATUS_OK);
	assert_int_equal(b->ops->mem_write(b, kv, slab, slab_bytes), STATUS_OK);
	assert_int_equal(kv_codec_pack(&l, info.kv_order, codecs[f], page, want), !spoil);
	assert_int_equal(b->ops->page_pack(b, kv, &l, PAGE, forms[f], got, &packed), STATUS_OK);
	assert_int_equal(packed, !spoil);
	if (!spoil) {
		assert_memory_equal(got, want, bytes);
		kv_codec_unpack(&l, info.kv_order, codecs[f], want, wide);
		memcpy(page, wide, l.page_bytes);
		assert_int_equal(b->ops->page_unpack(b, kv, &l, PAGE, forms[f], want), STATUS_OK);
		assert_int_equal(b->ops->mem_read(b, after, kv, slab_bytes), STATUS_OK);
		assert_memory_equal(after, slab, slab_bytes); /* this page, and no other */
	}
	b->ops->mem_free(b, kv, slab_bytes);
	free(slab);
	free(after);
	free(want);
	free(got);
	free(wide);
}

static void pages_are_packed_as_by_the_host(void **state)
{
	(void)state;
	struct backend *b = open_device();
	static const int32_t shapes[][3] = {{2, 3, 64}, {1, 2, 128}, {3, 1, 8}, {2, 2, 24}, {1, 1, 80}, {2, 1, 256}};
	static const enum quant_type types[] = {QUANT_BF16, QUANT_F16};
	for (size_t t = 0; t < 2; t++) {
		assert_int_equal(b->ops->choose_kv(b, types[t]), STATUS_OK);
		for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
			for (int f = 0; f < 2; f++) {
				assert_packs_as_the_host(b, shapes[i][0], shapes[i][1], shapes[i][2], f, false);
				assert_packs_as_the_host(b, shapes[i][0], shapes[i][1], shapes[i][2], f, true);
			}
	}
	assert_int_equal(b->ops->choose_kv(b, QUANT_Q8_0), STATUS_UNSUPPORTED);
	assert_string_equal(host_cuda_report(), "");
	b->ops->destroy(b);
}

/* ---- Pages in the pool ---- */

/*
 * Element (token, d) of the codes of keys or values, as cuda/kv_page.cuh has them, by what each lane of a warp loads:
 * the lane's 16 bytes are parts of two operands.
 */
static int find_code(int dim, bool value, int token, int d)
{
	int at = 0;
	for (int first = 0; first < dim; first += 32) {
		int left = dim - first < 32 ? dim - first : 32;
		for (int lane = 0; !value && lane < 32; lane++) {
			for (int e = 0; lane % 4 * 8 < left && e < 16; e++, at++)
				if (lane / 4 + e / 8 * 8 == token && first + lane % 4 * 8 + e % 8 == d)
					return at;
		}
		/* Whole blocks of 32 in one go, else 16 and then 8. */
		for (int part = 0; value && part < left; part += left == 32 ? 32 : left - part >= 16 ? 16 : 8) {
			int width = left == 32 ? 32 : left - part >= 16 ? 16 : 8;
			for (int lane = 0; lane < 32; lane++) {
				for (int e = 0; e < width / 4 * 2; e++, at++) {
					/* an eight has no upper half */
					int in = width == 8 ? e / 2 * 4 + e % 2 : e % 8;
					int its_d = first + part + e / 8 * 16 + lane / 4 + in / 2 % 2 * 8;
					if (lane % 4 * 2 + in % 2 + in / 4 * 8 == token && its_d == d)
						return at;
				}
			}
		}
	}
	return -1;
}

static void assert_vector(const char *page, const struct kv_layout *l, int32_t layer, int32_t head, bool value,
                          int token, const float *x)
{
	uint8_t code[256];
	float scale = kv_form_pack(l->form, x, l->head_dim, KV_HALF_MAX, code, 1), got;
	const char *block = page + narrow_offset(l, layer, head);
	memcpy(&got, block + (token % 8 * 4 + value * 2 + token / 8) * 4, sizeof got);
	assert_true(memcmp(&got, &scale, sizeof got) == 0 || (got != got && scale != scale));
	for (int d = 0; d < l->head_dim; d++) {
		const char *at = block + 8 * KV_PAGE_TOKENS + value * KV_PAGE_TOKENS * l->head_dim +
		                 find_code(l->head_dim, value, token, d);
		uint8_t want = l->form == KV_FORM_INT8 ? code[d] ^ 0x80 : code[d];
		if ((uint8_t)*at != want)
			fail_msg("%s: code %d of token %d is %d, not %d", value ? "value" : "key", d, token,
			         (uint8_t)*at, want);
	}
}

static void assert_writes_as_the_host(struct backend *b, int32_t n_head_kv, int32_t dim, enum kv_form form)
{
	enum { LAYERS = 2, ROWS = 21, PAGES = 4 };
	const int32_t table[] = {2, 1};
	const size_t n = (size_t)(ROWS * n_head_kv * dim);
	struct kv_layout l;
	struct scattered s;
	void *kv, *k, *v;
	assert_int_equal(kv_layout_for(b, &l, LAYERS, n_head_kv, dim), STATUS_OK);
	kv_layout_narrow(&l, form);
	assert_int_equal(b->ops->reserve(b, ROWS, n_head_kv * dim, &l), STATUS_OK);
	assert_int_equal(b->ops->mem_alloc(b, PAGES * l.page_stride, &kv), STATUS_OK);
	assert_int_equal(b->ops->mem_alloc(b, n * sizeof(float), &k), STATUS_OK);
	assert_int_equal(b->ops->mem_alloc(b, n * sizeof(float), &v), STATUS_OK);
	float *x[2] = {random_floats(&seed, n), random_floats(&seed, n)};
	char *pages = malloc(PAGES * l.page_stride);
	for (int what = 0; what < 2; what++) {
		for (int32_t i = 0; i < ROWS * n_head_kv; i++) {
			float *vector = x[what] + (size_t)(i * dim), size = powf(2, (float)(i % 40 - 30));
			for (int d = 0; d < dim; d++)
				vector[d] = i == 5 ? 0 : vector[d] * size;
			if (i % 11 == 7)
				vector[i % dim] = i % 2 ? INFINITY : NAN;
		}
		assert_int_equal(b->ops->mem_write(b, what ? v : k, x[what], n * sizeof(float)), STATUS_OK);
	}
	scattered_init(&s);
	scattered_add(&s, table, 0, ROWS);
	assert_int_equal(b->ops->step_begin(b, &s.batch), STATUS_OK);
	assert_int_equal(b->ops->kv_write(b, kv, &l, 1, k, v), STATUS_OK);
	assert_int_equal(b->ops->step_end(b), STATUS_OK);
	assert_int_equal(b->ops->mem_read(b, pages, kv, PAGES * l.page_stride), STATUS_OK);
	for (int32_t row = 0; row < ROWS; row++)
		for (int32_t head = 0; head < n_head_kv; head++)
			for (int what = 0; what < 2; what++)
				assert_vector(pages + (size_t)table[row / KV_PAGE_TOKENS] * l.page_stride, &l, 1, head,
				              what, row % KV_PAGE_TOKENS,
				              x[what] + (size_t)((row * n_head_kv + head) * dim));
	/* Nothing else was touched: the other layer, the other pages. */
	for (size_t i = 0; i < PAGES * l.page_stride; i++) {
		size_t page = i / l.page_stride, at = i % l.page_stride;
		if (page == 0 || page == 3 || at < narrow_offset(&l, 1, 0) || at >= l.page_bytes)
			assert_int_equal(pages[i], 0);
	}
	b->ops->mem_free(b, kv, PAGES * l.page_stride);
	b->ops->mem_free(b, k, n * sizeof(float));
	b->ops->mem_free(b, v, n * sizeof(float));
	free(x[0]);
	free(x[1]);
	free(pages);
}

static void keys_and_values_are_narrowed_as_by_the_host(void **state)
{
	(void)state;
	struct backend *b = open_device();
	static const int32_t shapes[][2] = {{3, 64}, {1, 128}, {2, 8}, {2, 16}, {1, 24}, {2, 40}, {1, 88}, {1, 256}};
	for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
		for (int f = 0; f < 2; f++)
			assert_writes_as_the_host(b, shapes[i][0], shapes[i][1], forms[f]);
	assert_string_equal(host_cuda_report(), "");
	b->ops->destroy(b);
}

/* A pool whose wide copies the backend has not been told of would be read wrongly. */
static void a_narrow_layout_that_was_not_reserved_is_refused(void **state)
{
	(void)state;
	struct backend *b = open_device();
	const int32_t table[] = {0};
	struct kv_layout l;
	struct scattered s;
	void *kv;
	int32_t slot[1] = {-1};
	struct kv_wide wide = {.slot = slot};
	assert_int_equal(kv_layout_for(b, &l, 1, 1, 64), STATUS_OK);
	kv_layout_narrow(&l, KV_FORM_INT8);
	assert_int_equal(b->ops->reserve(b, 1, 64, &l), STATUS_OK);
	assert_int_equal(b->ops->mem_alloc(b, l.page_stride, &kv), STATUS_OK);
	l.wide = &wide;
	scattered_init(&s);
	scattered_add(&s, table, 0, 1);
	assert_int_equal(b->ops->step_begin(b, &s.batch), STATUS_OK);
	assert_int_equal(b->ops->kv_write(b, kv, &l, 0, kv, kv), STATUS_UNSUPPORTED);
	assert_int_equal(b->ops->step_end(b), STATUS_UNSUPPORTED);
	b->ops->mem_free(b, kv, l.page_stride);
	b->ops->destroy(b);
}

/* ---- The measure of memory ---- */

static void a_scan_reads_every_word_once(void **state)
{
	(void)state;
	static const size_t pages[] = {1, 3, 16, 200};
	struct backend *b = open_device();
	for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
		size_t n = pages[i] * 4096 / sizeof(uint64_t);
		uint64_t *x = malloc(n * sizeof *x), want = 0, sum = 1;
		void *p;
		for (size_t k = 0; k < n; k++)
			want += x[k] = unit_rand(&seed);
		assert_int_equal(b->ops->mem_alloc(b, n * sizeof *x, &p), STATUS_OK);
		assert_int_equal(b->ops->mem_write(b, p, x, n * sizeof *x), STATUS_OK);
		assert_int_equal(b->ops->scan(b, p, n * sizeof *x, &sum), STATUS_OK);
		assert_true(sum == want);
		b->ops->mem_free(b, p, n * sizeof *x);
		free(x);
	}
	assert_string_equal(host_cuda_report(), "");
	b->ops->destroy(b);
}

static int in_any_order(void **state)
{
	(void)state;
	host_cuda_order(23);
	return 0;
}

static int reset(void **state)
{
	(void)state;
	host_cuda_reset();
	return 0;
}

UNIT_MAIN(cmocka_unit_test_teardown(pages_are_packed_as_by_the_host, reset),
          cmocka_unit_test_setup_teardown(pages_are_packed_as_by_the_host, in_any_order, reset),
          cmocka_unit_test_teardown(keys_and_values_are_narrowed_as_by_the_host, reset),
          cmocka_unit_test_setup_teardown(keys_and_values_are_narrowed_as_by_the_host, in_any_order, reset),
          cmocka_unit_test_teardown(a_narrow_layout_that_was_not_reserved_is_refused, reset),
          cmocka_unit_test_teardown(a_scan_reads_every_word_once, reset),
          cmocka_unit_test_setup_teardown(a_scan_reads_every_word_once, in_any_order, reset))
