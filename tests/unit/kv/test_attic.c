/* Pages that have left a window: they come back as they were, to nobody else, or are known to be lost. */
#include "tests/unit/unit.h"

#include "engine/base/clock.h"
#include "engine/kv/attic.h"
#include "tests/support/memory_backend.h"

enum { PAGES = 12, BYTES = 4096 };

static const struct kv_holder me = {KV_HOLDER_OTHER, 1};
static struct memory_backend mem;
static struct clock now;
static struct kv_pool *pool;
static struct kv_prefix *prefix;
static struct kv_tiers *tiers;
static struct kv_attics attics;

/* A tier that holds `n` pages of BYTES, which attics may describe `n_bounds` of. */
static void open_all(int32_t n, int32_t n_bounds)
{
	const struct kv_layout layout = {2, 2, 32, KV_PAGE_TOKENS, QUANT_F16, BYTES * 2, BYTES * 2};
	struct kv_tier *tier[KV_TIER_KINDS] = {NULL};
	memory_backend_init(&mem);
	clock_manual_init(&now, 1);
	assert_int_equal(kv_pool_create(&mem.base, &layout, PAGES, &pool, NULL), STATUS_OK);
	assert_int_equal(kv_pool_add_bounds(pool), STATUS_OK);
	assert_int_equal(kv_prefix_create(pool, NULL, &prefix, NULL), STATUS_OK);
	const struct kv_tier_device device = {&mem.base, kv_pool_slab(pool), *kv_pool_layout(pool)};
	assert_int_equal(
		kv_tier_ram_create(&device, &now, (uint64_t)n * BYTES * 2, KV_FORM_F16, &tier[KV_TIER_RAM], NULL),
		STATUS_OK);
	assert_int_equal(kv_tiers_create(pool, prefix, tier, &now, &tiers), STATUS_OK);
	assert_true(kv_attics_init(&attics, tiers, pool));
	assert_int_equal(attics.most_bytes, (uint64_t)n * BYTES * 2 / KV_ATTIC_SHARE);
	if (n_bounds > 0)
		attics.most_bytes = (uint64_t)n_bounds * kv_bounds_bytes(kv_pool_layout(pool));
}

static void close_all(void)
{
	assert_int_equal(attics.used_bytes, 0);
	kv_tiers_destroy(tiers);
	kv_prefix_destroy(prefix);
	assert_int_equal(kv_pool_destroy(pool), STATUS_OK);
}

static char *page_at(int32_t page)
{
	return (char *)kv_pool_slab(pool) + (size_t)page * BYTES * 2;
}

/* A page full of x. */
static int32_t page_of(int x)
{
	int32_t page = kv_pool_get(pool, me);
	memset(page_at(page), x, BYTES * 2);
	return page;
}

static void a_page_comes_back_as_it_was_and_to_its_owner_alone(void **state)
{
	(void)state;
	open_all(8, 0);
	struct kv_attic *a = kv_attic_create(&attics), *b = kv_attic_create(&attics);
	for (int i = 0; i < 3; i++) {
		int32_t page = page_of(10 + i), other = page_of(50 + i);
		assert_true(kv_attic_put(a, 4 + i, page));
		assert_true(kv_attic_put(b, 4 + i, other));
		/* It has it already. */
		assert_true(kv_attic_put(a, 4, other));
		kv_pool_unref(pool, page, me);
		kv_pool_unref(pool, other, me);
	}
	assert_int_equal(a->n, 3);
	int32_t page = page_of(0);
	for (int i = 2; i >= 0; i--) {
		assert_true(kv_attic_bring(a, i, page));
		assert_int_equal(page_at(page)[7], 10 + i);
		assert_true(kv_attic_bring(b, i, page));
		assert_int_equal(page_at(page)[BYTES], 50 + i);
		/* What bounds its keys is what the backend found. */
		assert_int_equal(((const char *)a->bounds)[(size_t)i * kv_bounds_bytes(kv_pool_layout(pool))], 10 + i);
	}
	/* Again, as often as is wanted, until its owner is gone. */
	struct kv_tiers_stats s;
	kv_tiers_stats(tiers, &s);
	assert_int_equal(s.tier[KV_TIER_RAM].n_pages, 6);
	kv_attic_destroy(a);
	kv_tiers_stats(tiers, &s);
	assert_int_equal(s.tier[KV_TIER_RAM].n_pages, 3);
	assert_true(kv_attic_bring(b, 1, page));
	kv_attic_destroy(b);
	kv_attic_destroy(NULL);
	kv_pool_unref(pool, page, me);
	/* The index has not heard of any. */
	struct kv_prefix_stats index;
	kv_prefix_stats(prefix, &index);
	assert_int_equal(index.n_pages, 0);
	close_all();
}

static void what_has_no_room_is_lost_and_counted(void **state)
{
	(void)state;
	open_all(2, 0);
	struct kv_attic *a = kv_attic_create(&attics);
	int32_t page = page_of(1);
	attics.most_bytes = 1 << 20;
	for (int i = 0; i < 4; i++)
		assert_true(kv_attic_put(a, i, page));
	assert_false(kv_attic_bring(a, 0, page));
	assert_false(kv_attic_bring(a, 1, page));
	assert_true(kv_attic_bring(a, 3, page));
	assert_int_equal(a->n_lost, 2);
	/* The last but one has not been asked for, but can be. */
	kv_attic_look(a);
	assert_int_equal(a->n_lost, 2);
	assert_false(a->lost[2]);
	/* Once it has been computed again the tier keeps it, in place of what was touched longest ago. */
	memset(page_at(page), 9, BYTES * 2);
	kv_attic_keep(a, 0, page);
	assert_false(a->lost[0]);
	kv_attic_look(a);
	assert_true(a->lost[1] && a->lost[2] && !a->lost[3]);
	assert_int_equal(a->n_lost, 2);
	memset(page_at(page), 0, BYTES * 2);
	assert_true(kv_attic_bring(a, 0, page));
	assert_int_equal(page_at(page)[7], 9);
	/* Its bounds stay those by which it is chosen. */
	assert_int_equal(((const char *)a->bounds)[0], 1);
	assert_int_equal(attics.n_lost, 3);
	kv_attic_destroy(a);
	kv_pool_unref(pool, page, me);
	close_all();
	/* Nor are there more bounds than their share of memory has room for. */
	open_all(8, 20);
	a = kv_attic_create(&attics);
	page = page_of(1);
	int32_t n = 0;
	for (int i = 0; i < 40; i++)
		n += kv_attic_put(a, i, page);
	assert_int_equal(n, 20);
	assert_int_equal(a->n_unknown, 20);
	assert_true(attics.used_bytes <= attics.most_bytes);
	/* And of those that it has bounds of, the tier has dropped some. */
	kv_attic_look(a);
	assert_int_equal(attics.n_lost, 20 + a->n_lost);
	assert_int_equal(a->n_lost, 12);
	kv_attic_destroy(a);
	kv_pool_unref(pool, page, me);
	close_all();
}

UNIT_MAIN(cmocka_unit_test(a_page_comes_back_as_it_was_and_to_its_owner_alone),
	  cmocka_unit_test(what_has_no_room_is_lost_and_counted))
