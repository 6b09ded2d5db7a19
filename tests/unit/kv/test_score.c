/* What a page is worth, on every backend of this machine whose pages can be read. */
#include "tests/unit/unit.h"

#include <math.h>

#include "engine/kv/score.h"

enum { LAYERS = 3, HEADS = 2, DIM = 24 };

static float noise(uint64_t *seed, float size)
{
	return size * (float)((double)(int64_t)unit_rand(seed) / 9223372036854775808.0);
}

/* Writes a page as a step would, and returns what its score should be. */
static double write_page(struct backend *b, struct kv_pool *pool, int32_t page, uint64_t seed, float bad)
{
	const struct kv_layout *l = kv_pool_layout(pool);
	int32_t token[KV_PAGE_TOKENS] = {0}, position[KV_PAGE_TOKENS];
	struct batch_seq seq = {0, KV_PAGE_TOKENS, 0, &page, 1};
	struct batch batch = {.n_rows = KV_PAGE_TOKENS, .token = token, .position = position, .n_seqs = 1, .seq = &seq};
	static float k[KV_PAGE_TOKENS * HEADS * DIM], v[KV_PAGE_TOKENS * HEADS * DIM];
	double score = 0;
	void *on_device[2];
	for (int32_t i = 0; i < KV_PAGE_TOKENS; i++)
		position[i] = i;
	for (int i = 0; i < 2; i++)
		assert_int_equal(b->ops->mem_alloc(b, sizeof k, &on_device[i]), STATUS_OK);
	assert_int_equal(b->ops->reserve(b, KV_PAGE_TOKENS, HEADS * DIM, l), STATUS_OK);
	assert_int_equal(b->ops->step_begin(b, &batch), STATUS_OK);
	for (int32_t layer = 0; layer < LAYERS; layer++) {
		double kk = 0, vv = 0;
		for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
			k[i] = noise(&seed, 1.0f + (float)layer);
			v[i] = noise(&seed, 0.3f);
			kk += (double)k[i] * k[i];
			vv += (double)v[i] * v[i];
		}
		if (layer == 1 && bad != 0)
			v[77] = bad;
		score += sqrt(vv / kk);
		assert_int_equal(b->ops->mem_write(b, on_device[0], k, sizeof k), STATUS_OK);
		assert_int_equal(b->ops->mem_write(b, on_device[1], v, sizeof v), STATUS_OK);
		assert_int_equal(b->ops->kv_write(b, kv_pool_slab(pool), l, layer, on_device[0], on_device[1]),
				 STATUS_OK);
	}
	assert_int_equal(b->ops->step_end(b), STATUS_OK);
	for (int i = 0; i < 2; i++)
		b->ops->mem_free(b, on_device[i], sizeof k);
	return score;
}

static float score(struct kv_scorer *s, int32_t page)
{
	const float *scores = kv_score_pages(s, &page, 1);
	assert_non_null(scores);
	return scores[0];
}

static void a_score_is_the_norm_of_values_by_that_of_keys(void **state)
{
	(void)state;
	const char *const devices[] = {"cpu-reference", "cpu-avx2", "cpu-avx512", "cpu-avx512-bf16", "cuda-host"};
	const struct kv_holder me = {KV_HOLDER_OTHER, 1};
	int tried = 0;
	for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
		struct backend_options o = {.device = devices[i], .n_threads = 1};
		struct backend *b;
		struct kv_layout layout;
		struct kv_pool *pool;
		struct kv_scorer scorer;
		if (backend_create(&o, &b, NULL) != STATUS_OK)
			continue;
		tried++;
		assert_int_equal(kv_layout_for(b, &layout, LAYERS, HEADS, DIM), STATUS_OK);
		assert_int_equal(kv_pool_create(b, &layout, 3, &pool, NULL), STATUS_OK);
		assert_int_equal(kv_scorer_init(&scorer, b, pool), STATUS_OK);
		for (uint64_t seed = 1; seed < 4; seed++) {
			int32_t page = kv_pool_get(pool, me);
			double want = write_page(b, pool, page, seed, 0), got = score(&scorer, page);
			assert_true(fabs(got - want) < 0.005 * want);
			assert_true(score(&scorer, page) == (float)got);
			/* A page with a value that is no number is worth less than any other. */
			write_page(b, pool, page, seed, NAN);
			assert_true(score(&scorer, page) == -1);
			kv_pool_unref(pool, page, me);
		}
		kv_scorer_free(&scorer);
		assert_int_equal(kv_pool_destroy(pool), STATUS_OK);
		b->ops->destroy(b);
	}
	assert_true(tried > 0);
}

static void a_narrow_page_cannot_be_weighed(void **state)
{
	(void)state;
	struct backend_options o = {.device = "cpu-reference", .n_threads = 1};
	struct backend *b;
	struct kv_layout layout;
	struct kv_pool *pool;
	struct kv_scorer scorer;
	assert_int_equal(backend_create(&o, &b, NULL), STATUS_OK);
	assert_int_equal(kv_layout_for(b, &layout, LAYERS, HEADS, DIM), STATUS_OK);
	kv_layout_narrow(&layout, KV_FORM_INT8);
	assert_int_equal(kv_pool_create_narrow(b, &layout, 3, 0, &pool, NULL), STATUS_OK);
	assert_int_equal(kv_scorer_init(&scorer, b, pool), STATUS_UNSUPPORTED);
	kv_scorer_free(&scorer);
	assert_int_equal(kv_pool_destroy(pool), STATUS_OK);
	b->ops->destroy(b);
}

UNIT_MAIN(cmocka_unit_test(a_score_is_the_norm_of_values_by_that_of_keys),
          cmocka_unit_test(a_narrow_page_cannot_be_weighed))
