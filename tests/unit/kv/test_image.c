/* Pages of a narrow pool on their way through tiers: those with a wide copy come back with it. */
#include "tests/unit/unit.h"

#include <stdio.h>
#include <unistd.h>

#include "engine/kv/tier.h"
#include "tests/support/memory_backend.h"

enum { PAGES = 6, WIDE = 3, FROM = 0, TO = 1, OTHER = 2 };

struct fixture {
	struct memory_backend backend;
	struct clock clock;
	struct kv_pool *pool;
	struct kv_tier_device device;
	int32_t page[PAGES]; /* all of the pool's */
	char dir[64];
};

static const struct kv_holder me = {KV_HOLDER_OTHER, 1};

static void setup(struct fixture *f)
{
	struct kv_layout layout;
	memory_backend_init(&f->backend);
	clock_manual_init(&f->clock, 1000000000);
	assert_int_equal(kv_layout_init(&layout, 2, 3, 32, QUANT_F16), STATUS_OK);
	kv_layout_narrow(&layout, KV_FORM_INT8);
	assert_int_equal(kv_pool_create_narrow(&f->backend.base, &layout, PAGES, WIDE, &f->pool, NULL), STATUS_OK);
	f->device = (struct kv_tier_device){&f->backend.base, kv_pool_slab(f->pool), *kv_pool_layout(f->pool)};
	for (int i = 0; i < PAGES; i++)
		f->page[i] = kv_pool_get(f->pool, me);
	snprintf(f->dir, sizeof f->dir, "/tmp/kvasir-image-%d", (int)getpid());
}

static void teardown(struct fixture *f)
{
	char path[128];
	for (int i = 0; i < PAGES; i++)
		kv_pool_unref(f->pool, f->page[i], me);
	assert_int_equal(kv_pool_destroy(f->pool), STATUS_OK);
	snprintf(path, sizeof path, "%s/kvasir-kv.0", f->dir);
	unlink(path);
	rmdir(f->dir);
}

static char *narrow_bytes(const struct fixture *f, int32_t page)
{
	return (char *)f->device.slab + (size_t)page * f->device.layout.page_stride;
}

static char *wide_bytes(const struct fixture *f, int32_t page)
{
	const struct kv_wide *w = f->device.layout.wide;
	assert_true(w->slot[page] >= 0);
	return (char *)f->device.slab + w->offset + (size_t)w->slot[page] * w->stride;
}

static void fill(char *p, size_t n, uint64_t seed)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (char)(unit_rand(&seed) >> 33);
}

static struct kv_page_name name_of(int i)
{
	struct kv_page_name p = {.n_tokens = KV_PAGE_TOKENS, .first = true};
	p.key.bytes[0] = (uint8_t)(i + 1);
	return p;
}

static enum kv_tier_end finish(struct kv_tier *t)
{
	struct kv_tier_done done;
	while (kv_tier_poll(t, &done, 1) == 0)
		kv_tier_wait(t, 1000);
	return done.end;
}

static struct kv_tier *open_tier(struct fixture *f, bool disk)
{
	struct kv_tier *t = NULL;
	if (disk) {
		struct kv_tier_disk_options o = {
			.dir = f->dir, .bytes = 1 << 20, .pages = KV_TIER_WIDE, .version = "1", .host = "here"};
		assert_int_equal(kv_tier_disk_create(&f->device, &f->clock, &o, &t, NULL), STATUS_OK);
	} else {
		assert_int_equal(kv_tier_ram_create(&f->device, &f->clock, 1 << 20, KV_FORM_F16, &t, NULL), STATUS_OK);
	}
	return t;
}

static void wide_page_comes_back(bool disk)
{
	struct fixture f;
	setup(&f);
	const struct kv_layout *l = &f.device.layout;
	const size_t narrow = l->page_bytes, wide = l->wide->bytes;
	struct kv_tier *t = open_tier(&f, disk);
	struct kv_page_name name = name_of(0);
	struct kv_wide_counts counts;
	char *host = malloc(kv_image_bytes(l, true));
	bool host_wide = false;
	assert_int_equal(kv_image_bytes(l, true), narrow + wide);
	kv_pool_widen(f.pool, f.page[FROM]);
	fill(narrow_bytes(&f, f.page[FROM]), narrow, 1);
	fill(wide_bytes(&f, f.page[FROM]), wide, 2);
	assert_true(kv_tier_takes(t, f.page[FROM]));
	assert_int_equal(kv_tier_takes(t, f.page[OTHER]), !disk);
	assert_int_equal(kv_tier_put(t, &name, f.page[FROM]), KV_PUT_STORED);

	assert_int_equal(kv_tier_load(t, &name, f.page[TO], 1), STATUS_OK);
	assert_int_equal(finish(t), KV_LOAD_DONE);
	assert_memory_equal(narrow_bytes(&f, f.page[TO]), narrow_bytes(&f, f.page[FROM]), narrow);
	assert_memory_equal(wide_bytes(&f, f.page[TO]), wide_bytes(&f, f.page[FROM]), wide);
	/* It counts among the wide ones, and not as one that fell back. */
	kv_pool_wide_counts(f.pool, &counts);
	assert_int_equal(counts.n_used, 2);
	assert_int_equal(counts.fallback, 0);

	assert_int_equal(kv_tier_read(t, &name, host, &host_wide, 2), STATUS_OK);
	assert_int_equal(finish(t), KV_LOAD_DONE);
	assert_true(host_wide);
	assert_memory_equal(host, narrow_bytes(&f, f.page[FROM]), narrow);
	assert_memory_equal(host + narrow, wide_bytes(&f, f.page[FROM]), wide);

	/* Without room for another copy it goes without. */
	kv_pool_widen(f.pool, f.page[3]);
	assert_int_equal(kv_tier_load(t, &name, f.page[OTHER], 3), STATUS_OK);
	assert_int_equal(finish(t), KV_LOAD_DONE);
	assert_memory_equal(narrow_bytes(&f, f.page[OTHER]), narrow_bytes(&f, f.page[FROM]), narrow);
	assert_true(l->wide->slot[f.page[OTHER]] < 0);
	kv_pool_wide_counts(f.pool, &counts);
	assert_int_equal(counts.refused, 1);
	kv_tier_destroy(t);
	free(host);
	teardown(&f);
}

static void a_page_with_a_wide_copy_comes_back_with_it_from_ram(void **state)
{
	(void)state;
	wide_page_comes_back(false);
}

static void a_page_with_a_wide_copy_comes_back_with_it_from_disk(void **state)
{
	(void)state;
	wide_page_comes_back(true);
}

/* In RAM both kinds stand side by side, each taking what it needs. */
static void a_narrow_page_comes_back_without_one(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f);
	struct kv_tier *t = open_tier(&f, false);
	struct kv_tier_stats stats;
	struct kv_page_name name = name_of(1);
	fill(narrow_bytes(&f, f.page[FROM]), f.device.layout.page_bytes, 3);
	assert_int_equal(kv_tier_put(t, &name, f.page[FROM]), KV_PUT_STORED);
	kv_tier_stats(t, &stats);
	assert_true(stats.used_bytes < f.device.layout.page_bytes + 4096);
	assert_int_equal(kv_tier_load(t, &name, f.page[TO], 1), STATUS_OK);
	assert_int_equal(finish(t), KV_LOAD_DONE);
	assert_memory_equal(narrow_bytes(&f, f.page[TO]), narrow_bytes(&f, f.page[FROM]), f.device.layout.page_bytes);
	assert_true(f.device.layout.wide->slot[f.page[TO]] < 0);
	kv_tier_destroy(t);
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(a_page_with_a_wide_copy_comes_back_with_it_from_ram),
          cmocka_unit_test(a_page_with_a_wide_copy_comes_back_with_it_from_disk),
          cmocka_unit_test(a_narrow_page_comes_back_without_one))
