/*
 * Narrow KV (kv_layout_narrow()): every backend of this machine against the reference, and the reference against exact KV; wide copies are
 * exact, whichever pages have them.
 */
#include <math.h>
#include <stdio.h>

#include "tests/unit/cpu/fixture.h"

#include "engine/kv/pool.h"

enum { PAGES = 40, SEQS = 3 };

static const char *const devices[] = {"cpu-reference", "cpu-avx2", "cpu-avx512", "cpu-avx512-bf16", "cpu-neon", "cpu-neon-dotprod"};
static uint64_t seed = 5;

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
	assert_int_equal(kv_pool_create_narrow(b, &s.layout, PAGES, form == KV_FORM_F16 ? 0 : PAGES, &s.pool, NULL), STATUS_OK);
	s.layout = *kv_pool_layout(s.pool);
	/* Pages that were used before hold anything. */
	memset(kv_pool_slab(s.pool), 0xFF, kv_pool_bytes(&s.layout, PAGES, form == KV_FORM_F16 ? 0 : PAGES));
	return s;
}

static void close_side(struct side *s)
{
	for (int32_t i = 0; i < PAGES; i++)
		kv_pool_narrow(s->pool, i);
	assert_int_equal(kv_pool_destroy(s->pool), STATUS_OK);
}

static void step(struct side *s, const struct batch *batch, const float *k, const float *v, const float *q, float *out)
{
	const struct backend_ops *ops = s->b->ops;
	void *kv = kv_pool_slab(s->pool);
	assert_int_equal(ops->step_begin(s->b, batch), STATUS_OK);
	assert_int_equal(ops->kv_write(s->b, kv, &s->layout, 1, k, v), STATUS_OK);
	assert_int_equal(ops->attention(s->b, kv, &s->layout, 1, q, s->n_head, 1 / sqrtf((float)s->layout.head_dim), out), STATUS_OK);
	assert_int_equal(ops->step_end(s->b), STATUS_OK);
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
		float *key = random_floats(&seed, kv_size), *value = random_floats(&seed, kv_size), *q = random_floats(&seed, q_size);
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
		struct side sides[] = {open_side(reference, form, n_head_kv, group, dim), open_side(b, form, n_head_kv, group, dim),
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
		 * Codes become halves on the way, which rounds them by up to 2^-11 of themselves, or bfloat16s, by 2^-9, as queries
		 * and weights then are; values are about 1.
		 */
		assert_true(worst[1] < (sides[1].layout.type == QUANT_BF16 ? 2.5e-2 : 4e-3));
		/* And codes are off by up to 1/254 of a vector's largest, or by 1/16 of themselves: far less than that on average, not nothing. */
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

/* A vector with a value that is no number has no scale: it is none itself, in its page, and is counted. The others are as ever. */
static void what_is_no_number_is_counted(void **state)
{
	(void)state;
	const float bad[] = {NAN, INFINITY, -INFINITY};
	for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
		struct backend *b = open_backend(devices[i], 2);
		struct kv_wide_counts counts;
		float k[64], v[64], q[64], out[64];
		int32_t table[1] = {7};
		if (!b)
			continue;
		for (size_t n = 0; n < 3; n++) {
			struct side s = open_side(b, KV_FORM_INT8, 1, 1, 64);
			struct scattered batch;
			for (int row = 0; row < 2; row++) {
				scattered_init(&batch);
				scattered_add(&batch, table, row, 1);
				for (int d = 0; d < 64; d++)
					k[d] = v[d] = q[d] = (float)(d + 1) / 64;
				if (row == 1)
					v[40] = bad[n];
				step(&s, &batch.batch, k, v, q, out);
				kv_pool_wide_counts(s.pool, &counts);
				assert_int_equal(counts.n_not_finite, row);
				assert_int_equal(isnan(out[5]) != 0, row);
			}
			close_side(&s);
		}
		b->ops->destroy(b);
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

UNIT_MAIN(cmocka_unit_test(each_backend_reads_narrow_pages_as_the_reference_does), cmocka_unit_test(pages_with_wide_copies_are_exact),
          cmocka_unit_test(what_is_no_number_is_counted), cmocka_unit_test(copies_of_pages_are_given_back))
