/*
 * Narrow KV (kv_layout_narrow()): every backend of this machine against the reference, and the reference against exact
 * KV; wide copies are exact, whichever pages have them.
 */
#include <math.h>
#include <stdio.h>

#include "tests/unit/cpu/fixture.h"

#include "engine/kv/pool.h"

enum { PAGES = 40, SEQS = 3 };

static const char *const devices[] = {"cpu-reference",   "cpu-avx2", "cpu-avx512",
                                      "cpu-avx512-bf16", "cpu-neon", "cpu-neon-dotprod"};
/* Those that look at what they store; a GPU's kernels are compared elsewhere (tests/gpu). */
static const char *const lookers[] = {"cpu-reference", "cpu-avx2",         "cpu-avx512", "cpu-avx512-bf16",
                                      "cpu-neon",      "cpu-neon-dotprod", "cuda-host"};
static uint64_t seed = 5;
static int32_t n_wide = PAGES; /* room for copies in the pools that are opened */

struct side {
	struct backend *b;
	struct kv_pool *pool;
	struct kv_layout layout;
	int32_t n_head;
};

static struct side open_side(struct backend *b, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim)
{
	struct side s = {.b = b, .n_head = n_head_kv * group};
	assert_int_equal(kv_layout_for(b, &s.layout, 2, n_head_kv, dim), STATUS_OK);
	if (form != KV_FORM_F16)
		kv_layout_narrow(&s.layout, form);
	assert_int_equal(kv_pool_create_narrow(b, &s.layout, PAGES, form == KV_FORM_F16 ? 0 : n_wide, &s.pool, NULL),
	                 STATUS_OK);
	s.layout = *kv_pool_layout(s.pool);
	/* Pages that were used before hold anything. */
	size_t bytes = kv_pool_bytes(&s.layout, PAGES, form == KV_FORM_F16 ? 0 : n_wide);
	char *anything = malloc(bytes);
	memset(anything, 0xFF, bytes);
	assert_int_equal(b->ops->mem_write(b, kv_pool_slab(s.pool), anything, bytes), STATUS_OK);
	free(anything);
	return s;
}

static void close_side(struct side *s)
{
	for (int32_t i = 0; i < PAGES; i++)
		kv_pool_narrow(s->pool, i);
	assert_int_equal(kv_pool_destroy(s->pool), STATUS_OK);
}

/* k, v, q and out are the host's; every step is run until it counts. */
static void step(struct side *s, const struct batch *batch, const float *k, const float *v, const float *q, float *out)
{
	const struct backend_ops *ops = s->b->ops;
	void *kv = kv_pool_slab(s->pool), *on_device[4];
	const struct attention_params params = {.scale = 1 / sqrtf((float)s->layout.head_dim)};
	const float *const from[] = {k, v, q};
	size_t row = (size_t)batch->n_rows * (size_t)s->layout.head_dim * sizeof(float);
	size_t kv_bytes = row * (size_t)s->layout.n_head_kv, q_bytes = row * (size_t)s->n_head;
	const size_t bytes[] = {kv_bytes, kv_bytes, q_bytes, q_bytes};
	for (int i = 0; i < 4; i++)
		assert_int_equal(ops->mem_alloc(s->b, bytes[i], &on_device[i]), STATUS_OK);
	for (int i = 0; i < 3; i++)
		assert_int_equal(ops->mem_write(s->b, on_device[i], from[i], bytes[i]), STATUS_OK);
	enum status st;
	int n_runs = 0;
	assert_int_equal(ops->reserve(s->b, batch->n_rows, s->n_head * s->layout.head_dim, &s->layout), STATUS_OK);
	do {
		assert_int_equal(ops->step_begin(s->b, batch), STATUS_OK);
		assert_int_equal(ops->kv_write(s->b, kv, &s->layout, 1, on_device[0], on_device[1]), STATUS_OK);
		assert_int_equal(
			ops->attention(s->b, kv, &s->layout, 1, on_device[2], s->n_head, &params, on_device[3]),
			STATUS_OK);
		st = ops->step_end(s->b);
	} while (st == STATUS_BUSY && ++n_runs < 2);
	assert_int_equal(st, STATUS_OK);
	assert_int_equal(ops->mem_read(s->b, out, on_device[3], q_bytes), STATUS_OK);
	for (int i = 0; i < 4; i++)
		ops->mem_free(s->b, on_device[i], bytes[i]);
}

static double largest_difference(const float *a, const float *b, size_t n)
{
	double most = 0;
	for (size_t i = 0; i < n; i++) {
		double off = fabs((double)a[i] - b[i]);
		most = off > most ? off : most;
		assert_true(off == off);
	}
	return most;
}

/* Four steps of prompts, chunks and single rows on each side; the largest difference of the first to the others. */
static void compare(struct side *sides, int n_sides, int32_t n_head_kv, int32_t group, int32_t dim, double *worst)
{
	int32_t at[SEQS] = {0};
	struct scattered s;
	scattered_init(&s);
	scattered_shuffle(&s, &seed, PAGES);
	for (int k = 0; k < 4; k++) {
		s.batch.n_seqs = s.batch.n_rows = 0;
		for (int seq = 0; seq < SEQS; seq++) {
			int32_t n = k == 3 ? 1 : random_int(&seed, 1, 50);
			scattered_add(&s, s.pages + seq * (PAGES / SEQS), at[seq], n);
			at[seq] += n;
		}
		size_t kv_size = (size_t)s.batch.n_rows * (size_t)(n_head_kv * dim), q_size = kv_size * (size_t)group;
		float *key = random_floats(&seed, kv_size), *value = random_floats(&seed, kv_size),
		      *q = random_floats(&seed, q_size);
		float *first = malloc(q_size * 4), *other = malloc(q_size * 4);
		step(&sides[0], &s.batch, key, value, q, first);
		for (int i = 1; i < n_sides; i++) {
			step(&sides[i], &s.batch, key, value, q, other);
			double off = largest_difference(first, other, q_size);
			worst[i] = off > worst[i] ? off : worst[i];
		}
		free(key);
		free(value);
		free(q);
		free(first);
		free(other);
	}
}

static void narrow_attention(struct backend *reference, struct backend *b, enum kv_form form)
{
	static const struct {
		int32_t n_head_kv, group, dim;
	} shapes[] = {{3, 3, 64}, {2, 1, 128}, {1, 8, 80}, {2, 5, 12}, {2, 4, 67}, {1, 2, 256}};
	for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
		int32_t n_head_kv = shapes[i].n_head_kv, group = shapes[i].group, dim = shapes[i].dim;
		double worst[3] = {0};
		struct side sides[] = {open_side(reference, form, n_head_kv, group, dim),
		                       open_side(b, form, n_head_kv, group, dim),
		                       open_side(reference, KV_FORM_F16, n_head_kv, group, dim)};
		/* Some pages have wide copies, the same on both. */
		for (int32_t page = 0; page < PAGES; page++) {
			if (random_int(&seed, 0, 3) == 0) {
				kv_pool_widen(sides[0].pool, page);
				kv_pool_widen(sides[1].pool, page);
			}
		}
		compare(sides, 3, n_head_kv, group, dim, worst);
		/*
		 * Codes become halves on the way, which rounds them by up to 2^-11 of themselves, or bfloat16s, by
		 * 2^-9, as queries and weights then are; values are about 1.
		 */
		assert_true(worst[1] < (sides[1].layout.type == QUANT_BF16 ? 2.5e-2 : 4e-3));
		/*
		 * And codes are off by up to 1/254 of a vector's largest, or by 1/16 of themselves: far less than that
		 * on average, not nothing.
		 */
		assert_true(worst[2] > 1e-4 && worst[2] < (form == KV_FORM_INT8 ? 0.1 : 0.5));
		for (int k = 0; k < 3; k++)
			close_side(&sides[k]);
	}
}

static void each_backend_reads_narrow_pages_as_the_reference_does(void **state)
{
	(void)state;
	struct backend *reference = open_backend("cpu-reference", 2);
	for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
		struct backend *b = open_backend(devices[i], 3);
		if (!b) {
			print_message("%s: not on this machine\n", devices[i]);
			continue;
		}
		narrow_attention(reference, b, KV_FORM_INT8);
		narrow_attention(reference, b, KV_FORM_FP8_E4M3);
		b->ops->destroy(b);
	}
	reference->ops->destroy(reference);
}

static void pages_with_wide_copies_are_exact(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
		struct backend *b = open_backend(devices[i], 2);
		double worst[2] = {0};
		if (!b)
			continue;
		struct side sides[] = {open_side(b, KV_FORM_F16, 3, 3, 64), open_side(b, KV_FORM_FP8_E4M3, 3, 3, 64)};
		for (int32_t page = 0; page < PAGES; page++)
			kv_pool_widen(sides[1].pool, page);
		compare(sides, 2, 3, 3, 64, worst);
		assert_true(worst[1] == 0);
		close_side(&sides[0]);
		close_side(&sides[1]);
		b->ops->destroy(b);
	}
}

/* Whether a step goes on to a page that has a copy is nothing to the rows in front of it, in the same block or not. */
static void a_wide_copy_is_nothing_to_rows_in_front_of_it(void **state)
{
	(void)state;
	enum { HEADS = 3, GROUP = 3, WIDTH = 64, ROWS = 112, FRONT = 96 };
	int32_t table[ROWS / KV_PAGE_TOKENS];
	const size_t kv_row = (size_t)HEADS * WIDTH, q_row = kv_row * GROUP;
	float *k = random_floats(&seed, ROWS * kv_row), *v = random_floats(&seed, ROWS * kv_row);
	float *q = random_floats(&seed, ROWS * q_row), *all = malloc(ROWS * q_row * sizeof *all);
	float *front = malloc(FRONT * q_row * sizeof *front);
	for (int32_t i = 0; i < ROWS / KV_PAGE_TOKENS; i++)
		table[i] = i * 3 % PAGES;
	for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++)
		for (int form = KV_FORM_F16 + 1; form < KV_N_FORMS; form++) {
			struct backend *b = open_backend(devices[i], 2);
			if (!b)
				continue;
			struct side without = open_side(b, (enum kv_form)form, HEADS, GROUP, WIDTH);
			struct side with = open_side(b, (enum kv_form)form, HEADS, GROUP, WIDTH);
			struct scattered batch;
			scattered_init(&batch);
			scattered_add(&batch, table, 0, FRONT);
			step(&without, &batch.batch, k, v, q, front);
			kv_pool_widen(with.pool, table[FRONT / KV_PAGE_TOKENS]);
			scattered_init(&batch);
			scattered_add(&batch, table, 0, ROWS);
			step(&with, &batch.batch, k, v, q, all);
			assert_memory_equal(all, front, FRONT * q_row * sizeof *front);
			close_side(&without);
			close_side(&with);
			b->ops->destroy(b);
		}
	free(k);
	free(v);
	free(q);
	free(all);
	free(front);
}

/* What a test writes: row 0 .. BAD_ROW of one page, the last one with one strange value in K or V. */
enum { DIM = 64, BAD_ROW = 5, BAD_DIM = 40, PAGE = 7 };

struct row {
	float k[DIM], v[DIM], q[DIM], out[DIM];
};

static struct row plain_row(int row)
{
	struct row r;
	for (int d = 0; d < DIM; d++) {
		r.k[d] = (float)((d * 7 + row) % 13 - 6) / 8;
		r.v[d] = (float)((d * 5 + row * 3) % 17 - 8) / 8;
		r.q[d] = (float)((d * 3) % 11 - 5) / 16;
	}
	return r;
}

/* Writes them, n_together at a time; what the last one gives. */
static struct row write_page(struct side *s, float bad_k, float bad_v, int n_together)
{
	enum { ROWS = BAD_ROW + 1 };
	int32_t table[1] = {PAGE};
	struct scattered batch;
	struct row last = plain_row(BAD_ROW);
	float k[ROWS][DIM], v[ROWS][DIM], q[ROWS][DIM], out[ROWS][DIM];
	if (bad_k != 0)
		last.k[BAD_DIM] = bad_k;
	if (bad_v != 0)
		last.v[BAD_DIM] = bad_v;
	for (int row = 0; row < ROWS; row++) {
		struct row r = row == BAD_ROW ? last : plain_row(row);
		memcpy(k[row], r.k, sizeof r.k);
		memcpy(v[row], r.v, sizeof r.v);
		memcpy(q[row], r.q, sizeof r.q);
	}
	for (int row = 0; row < ROWS; row += n_together) {
		scattered_init(&batch);
		scattered_add(&batch, table, row, n_together);
		step(s, &batch.batch, k[row], v[row], q[row], out[row]);
	}
	memcpy(last.out, out[BAD_ROW], sizeof last.out);
	return last;
}

static struct kv_wide_counts counts_of(const struct side *s)
{
	struct kv_wide_counts c;
	kv_pool_wide_counts(s->pool, &c);
	return c;
}

/*
 * An element that no scale fits: its vector would be lost, or all but that element of it. The page gets a wide copy
 * instead, with all that it held, and keeps it; there the element stands by itself, and all the others are what they
 * were.
 */
static void falls_back(struct backend *b, enum kv_form form, float bad, int n_together)
{
	struct side s = open_side(b, form, 1, 1, DIM), exact = open_side(b, KV_FORM_F16, 1, 1, DIM);
	bool halves = s.layout.type == QUANT_F16, number = isfinite(bad);
	struct row got = write_page(&s, 0, bad, n_together), want = write_page(&exact, 0, bad, n_together);
	for (int d = 0; d < DIM; d++) {
		if (d == BAD_DIM)
			assert_int_equal(isfinite(got.out[d]) != 0, isfinite(want.out[d]) != 0);
		else
			assert_true(fabsf(got.out[d] - want.out[d]) < 0.04f);
	}
	/* Halves hold what is beyond them at their end, so only what is no number stays none. */
	assert_int_equal(isfinite(got.out[BAD_DIM]) != 0, halves ? !isnan(bad) : number);
	assert_int_equal(counts_of(&s).fallback, 1);
	assert_true(kv_pool_fell_back(s.pool, PAGE));
	assert_false(kv_pool_fell_back(exact.pool, PAGE));
	assert_int_equal(counts_of(&s).n_not_finite, 0);
	assert_int_equal(counts_of(&s).n_clamped, halves && number);
	assert_int_equal(counts_of(&s).n_unsound, !number);
	assert_int_equal(kv_pool_is_sound(s.pool, PAGE), number);
	assert_int_equal(kv_pool_is_sound(exact.pool, PAGE), number);
	/* It is no page that could do without. */
	kv_pool_narrow(s.pool, PAGE);
	assert_true(s.layout.wide->slot[PAGE] >= 0);
	close_side(&s);
	close_side(&exact);
}

static void a_page_falls_back_for_a_value_without_a_narrow_form(void **state)
{
	(void)state;
	const float bad[] = {NAN, INFINITY, -INFINITY, 1e5f, -3e38f};
	for (size_t i = 0; i < sizeof lookers / sizeof lookers[0]; i++) {
		struct backend *b = open_backend(lookers[i], 2);
		for (size_t n = 0; b && n < sizeof bad / sizeof bad[0]; n++) {
			falls_back(b, KV_FORM_INT8, bad[n], 1);
			falls_back(b, KV_FORM_FP8_E4M3, bad[n], 1);
			falls_back(b, KV_FORM_INT8, bad[n], BAD_ROW + 1);
			falls_back(b, KV_FORM_FP8_E4M3, bad[n], 3);
		}
		if (b)
			b->ops->destroy(b);
	}
}

/* Values beyond halves, in K as well, in pages of every kind: answers are numbers. */
static void huge_values_give_numbers(void **state)
{
	(void)state;
	const float huge[] = {65519, 65520, 1e5f, -1e6f, 1e20f};
	for (size_t i = 0; i < sizeof lookers / sizeof lookers[0]; i++) {
		struct backend *b = open_backend(lookers[i], 2);
		for (int form = 0; b && form < KV_N_FORMS; form++) {
			for (size_t n = 0; n < sizeof huge / sizeof huge[0]; n++) {
				struct side s = open_side(b, (enum kv_form)form, 1, 1, DIM);
				struct row got = write_page(&s, huge[n], huge[n], 2);
				for (int d = 0; d < DIM; d++)
					assert_true(isfinite(got.out[d]));
				assert_true(kv_pool_is_sound(s.pool, PAGE));
				close_side(&s);
			}
		}
		if (b)
			b->ops->destroy(b);
	}
}

/* Without room for a copy the vector is none, and counted; the others are as ever. */
static void without_room_a_vector_is_lost_and_counted(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof lookers / sizeof lookers[0]; i++) {
		struct backend *b = open_backend(lookers[i], 2);
		if (!b)
			continue;
		n_wide = 2;
		struct side t = open_side(b, KV_FORM_INT8, 1, 1, DIM);
		n_wide = PAGES;
		kv_pool_widen(t.pool, 0);
		kv_pool_widen(t.pool, 1);
		struct row got = write_page(&t, 0, NAN, 1);
		assert_true(isnan(got.out[3]));
		assert_int_equal(counts_of(&t).n_not_finite, 1);
		assert_int_equal(counts_of(&t).fallback, 0);
		assert_int_equal(counts_of(&t).refused, 1);
		assert_false(kv_pool_is_sound(t.pool, PAGE));
		close_side(&t);
		b->ops->destroy(b);
	}
}

/* 1 / scale of a vector this small would be no float. */
static void the_smallest_vectors_are_zeros(void **state)
{
	(void)state;
	for (int form = KV_FORM_FP8_E4M3; form < KV_N_FORMS; form++) {
		float x[4] = {0x1p-140f, -0x1p-149f, 0, 0x1p-101f};
		uint8_t code[4] = {1, 1, 1, 1};
		assert_true(kv_form_pack((enum kv_form)form, x, 4, KV_HALF_MAX, code, 1) == 0);
		for (int d = 0; d < 4; d++)
			assert_int_equal(code[d] & 0x7F, 0);
		x[3] = 0x1p-90f;
		assert_true(kv_form_pack((enum kv_form)form, x, 4, KV_HALF_MAX, code, 1) > 0);
	}
}

static void copies_of_pages_are_given_back(void **state)
{
	(void)state;
	struct backend *b = open_backend("cpu-reference", 1);
	struct kv_layout layout;
	struct kv_pool *pool;
	struct kv_wide_counts counts;
	const struct kv_holder me = {KV_HOLDER_OTHER, 1};
	assert_int_equal(kv_layout_init(&layout, 1, 1, 64, QUANT_F16), STATUS_OK);
	kv_layout_narrow(&layout, KV_FORM_INT8);
	assert_int_equal(layout.page_bytes, 2 * KV_PAGE_TOKENS * (64 + 4));
	assert_int_equal(kv_pool_create_narrow(b, &layout, 6, 2, &pool, NULL), STATUS_OK);
	int32_t page[4];
	for (int i = 0; i < 3; i++) {
		page[i] = kv_pool_get(pool, me);
		kv_pool_widen(pool, page[i]);
	}
	kv_pool_wide_counts(pool, &counts);
	assert_int_equal(counts.n_used, 2);
	assert_int_equal(counts.refused, 1);
	kv_pool_narrow(pool, page[0]);
	/* A copy of a page that has a wide one gets one as well. */
	page[3] = kv_pool_clone(pool, page[1], me);
	kv_pool_wide_counts(pool, &counts);
	assert_int_equal(counts.n_used, 2);
	assert_true(kv_pool_layout(pool)->wide->slot[page[3]] >= 0);
	for (int i = 0; i < 4; i++)
		kv_pool_unref(pool, page[i], me);
	kv_pool_wide_counts(pool, &counts);
	assert_int_equal(counts.n_used, 0);
	assert_int_equal(kv_pool_destroy(pool), STATUS_OK);
	b->ops->destroy(b);
}

UNIT_MAIN(cmocka_unit_test(each_backend_reads_narrow_pages_as_the_reference_does),
          cmocka_unit_test(pages_with_wide_copies_are_exact),
          cmocka_unit_test(a_wide_copy_is_nothing_to_rows_in_front_of_it),
          cmocka_unit_test(a_page_falls_back_for_a_value_without_a_narrow_form),
          cmocka_unit_test(huge_values_give_numbers), cmocka_unit_test(without_room_a_vector_is_lost_and_counted),
          cmocka_unit_test(the_smallest_vectors_are_zeros), cmocka_unit_test(copies_of_pages_are_given_back))
