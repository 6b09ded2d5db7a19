/*
 * Room below the pool: what leaves it is found again, layer by layer, from memory and from disk; nothing is promised
 * twice; and what was taken comes back.
 */
#include "tests/unit/unit.h"

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/kv/overflow.h"

enum { LAYERS = 3, HEADS = 2, DIM = 16, POOL = 64, GROUP = 16, STEP = 64 };

static char dir[] = "/tmp/kvasir-overflow-XXXXXX";
static struct backend *device;
static struct kv_layout layout;
static struct kv_pool *pool;
static uint64_t seed = 5;

static uint64_t ram_of(int32_t groups)
{
	return (uint64_t)groups * GROUP * layout.page_bytes;
}

static uint64_t disk_of(int32_t groups)
{
	uint64_t block = layout.page_bytes / LAYERS * GROUP;
	return (uint64_t)groups * LAYERS * ((block + 4095) / 4096 * 4096);
}

static int set_up(void **state)
{
	struct backend_options o = {.device = "cpu-reference", .n_threads = 1};
	struct error err;
	(void)state;
	assert_non_null(mkdtemp(dir));
	assert_int_equal(backend_create(&o, &device, &err), STATUS_OK);
	assert_int_equal(kv_layout_for(device, &layout, LAYERS, HEADS, DIM), STATUS_OK);
	assert_int_equal(kv_pool_create(device, &layout, POOL, &pool, &err), STATUS_OK);
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	assert_int_equal(kv_pool_n_free(pool), POOL);
	assert_int_equal(kv_pool_destroy(pool), STATUS_OK);
	device->ops->destroy(device);
	return rmdir(dir); /* nothing is left in it */
}

static struct kv_overflow *open_overflow(int32_t ram_groups, int32_t disk_groups)
{
	struct kv_overflow_options o = {.ram_bytes = ram_of(ram_groups),
	                                .dir = disk_groups ? dir : NULL,
	                                .disk_bytes = disk_of(disk_groups),
	                                .step_tokens = STEP};
	struct kv_overflow *over;
	struct error err = {0};
	if (kv_overflow_create(device, pool, &o, &over, &err) != STATUS_OK)
		fail_msg("%s", err.message);
	assert_int_equal(kv_overflow_now(over)->ram_groups, ram_groups);
	assert_int_equal(kv_overflow_now(over)->disk_groups, disk_groups);
	assert_int_equal(kv_overflow_now(over)->group_pages, GROUP);
	return over;
}

/* A sequence whose pages have bytes that say what they are. */
struct conversation {
	int number;
	struct kv_seq kv;
	struct kv_spill spill;
};

static uint8_t byte_of(const struct conversation *c, int32_t page, size_t at)
{
	uint64_t x = (uint64_t)c->number * 1000003 + (uint64_t)page * 7919 + at / 8;
	return (uint8_t)((x * 0x9E3779B97F4A7C15ull) >> (at % 8 * 8));
}

/* It has n_pages more, all full, and one that it is about to fill. */
static void grow(struct conversation *c, int32_t n_pages)
{
	assert_int_equal(kv_seq_prepare(pool, &c->kv, (n_pages + 1) * KV_PAGE_TOKENS), STATUS_OK);
	for (int32_t i = c->kv.n_tokens / KV_PAGE_TOKENS, end = i + n_pages; i < end; i++) {
		uint8_t *page = (uint8_t *)kv_pool_slab(pool) + (size_t)c->kv.pages[i] * layout.page_stride;
		for (size_t at = 0; at < layout.page_bytes; at++)
			page[at] = byte_of(c, i, at);
	}
	c->kv.n_tokens += n_pages * KV_PAGE_TOKENS;
	kv_seq_truncate(pool, &c->kv, c->kv.n_tokens);
}

/* As a scheduler would: what has to go, goes, then it grows. */
static void go_on(struct kv_overflow *over, struct conversation *c, int32_t n_pages)
{
	while (c->kv.n_tokens / KV_PAGE_TOKENS - c->kv.n_gone + n_pages > 30) {
		assert_true(kv_overflow_reserve(over, &c->spill, c->spill.n_groups + 1));
		assert_true(kv_overflow_spill(over, &c->spill, &c->kv, pool));
	}
	grow(c, n_pages);
}

static void end(struct conversation *c)
{
	kv_seq_release(pool, &c->kv);
	kv_overflow_release(&c->spill);
}

/* All that a step reads of these: from page `from` on, every third byte looked at. */
static void read_all(struct kv_overflow *over, struct conversation *all, int n, int32_t from)
{
	struct kv_spill *spills[8];
	size_t piece = layout.page_bytes / LAYERS;
	for (int i = 0; i < n; i++)
		spills[i] = &all[i].spill;
	kv_overflow_step(over, spills, n);
	/* A step may be run again, as where pages have got wide copies since. */
	for (int32_t pass = 0; pass < 2 * LAYERS; pass++) {
		int32_t layer = pass % LAYERS;
		for (int i = 0; i < n; i++) {
			struct kv_far *far = &all[i].spill.far;
			struct kv_far_run run;
			assert_int_equal(far->n_pages, all[i].kv.n_gone);
			/* A layer with a window begins anywhere. */
			for (int32_t page = layer == 1 ? from % far->n_pages : 0; page < far->n_pages;
			     page += run.n_pages) {
				assert_true(far->get(far, layer, page, &run));
				assert_in_range(run.n_pages, 1, far->n_pages - page);
				for (int32_t p = 0; p < run.n_pages; p++) {
					const uint8_t *got =
						(const uint8_t *)run.kv + (size_t)run.block_table[p] * piece;
					for (size_t at = 0; at < piece; at += 3)
						assert_int_equal(got[at], byte_of(&all[i], page + p,
										  (size_t)layer * piece + at));
				}
			}
		}
	}
}

static void what_left_the_pool_is_found_again(void **state)
{
	(void)state;
	static const int32_t rooms[][2] = {{12, 0}, {0, 12}, {3, 9}, {11, 1}};
	for (size_t k = 0; k < sizeof rooms / sizeof *rooms; k++) {
		struct kv_overflow *over = open_overflow(rooms[k][0], rooms[k][1]);
		struct conversation c = {.number = (int)k, .kv = KV_SEQ_INIT};
		struct kv_overflow_stats s;
		int32_t ram, disk;
		/* Read while it is written, when all is written, and both. */
		for (int32_t pages = 0; pages < 200; pages += 8) {
			go_on(over, &c, 8);
			assert_in_range(kv_seq_refs(&c.kv), 0, 31);
			if (c.spill.n_groups > 0)
				read_all(over, &c, 1, (int32_t)(unit_rand(&seed) >> 40));
		}
		assert_in_range(c.spill.n_groups, 10, 12);
		kv_overflow_count(&c.spill, &ram, &disk);
		assert_int_equal(ram, (c.spill.n_groups < rooms[k][0] ? c.spill.n_groups : rooms[k][0]) * GROUP);
		assert_int_equal(ram + disk, c.kv.n_gone);
		kv_overflow_stats(over, &s);
		assert_int_equal(s.n_pages, c.kv.n_gone);
		assert_int_equal(s.n_sequences, 1);
		assert_int_equal(s.pages_spilled, c.kv.n_gone);
		if (disk > 2 * GROUP)
			assert_true(s.bytes_read > 0 && s.bytes_written > 0);
		else
			assert_true(disk > 0 || s.bytes_read + s.bytes_written == 0);
		end(&c);
		kv_overflow_stats(over, &s);
		assert_int_equal(s.ram_used_bytes + s.disk_used_bytes, 0);
		assert_int_equal(s.n_pages + s.n_sequences, 0);
		kv_overflow_destroy(over);
	}
}

/* Sequences that come and go reuse each other's slots, whose writes may still be under way. */
static void sequences_do_not_see_each_other(void **state)
{
	(void)state;
	struct kv_overflow *over = open_overflow(2, 9);
	struct conversation all[2] = {{.number = 1, .kv = KV_SEQ_INIT}, {.number = 2, .kv = KV_SEQ_INIT}};
	for (int round = 0; round < 60; round++) {
		int i = (int)(unit_rand(&seed) >> 40) % 2;
		if (all[i].spill.n_groups >= 5 || unit_rand(&seed) >> 61 == 0) {
			end(&all[i]);
			all[i] = (struct conversation){.number = 10 + round, .kv = KV_SEQ_INIT};
		}
		go_on(over, &all[i], 1 + (int32_t)(unit_rand(&seed) >> 40) % 14);
		if (all[0].spill.n_groups > 0 && all[1].spill.n_groups > 0)
			read_all(over, all, 2, (int32_t)(unit_rand(&seed) >> 40));
	}
	end(&all[0]);
	end(&all[1]);
	kv_overflow_destroy(over);
}

static void room_is_promised_once(void **state)
{
	(void)state;
	struct kv_overflow *over = open_overflow(3, 2);
	struct kv_spill a = {0}, b = {0};
	assert_true(kv_overflow_reserve(over, &a, 3));
	assert_false(kv_overflow_reserve(over, &b, 3));
	assert_int_equal(b.n_reserved, 0);
	assert_true(kv_overflow_reserve(over, &b, 2));
	assert_true(kv_overflow_reserve(over, &a, 1));
	assert_false(kv_overflow_reserve(over, &a, 4));
	kv_overflow_release(&b);
	assert_true(kv_overflow_reserve(over, &a, 5));
	kv_overflow_release(&a);
	kv_overflow_release(&a);
	assert_true(kv_overflow_reserve(over, &b, 5));
	kv_overflow_release(&b);
	kv_overflow_destroy(over);
}

static void a_plan_says_how_long_conversations_may_be(void **state)
{
	(void)state;
	struct kv_overflow_plan p;
	struct error err;
	assert_int_equal(kv_overflow_plan(&layout, POOL, STEP, ram_of(4), disk_of(2), &p, &err), STATUS_OK);
	assert_int_equal(p.resident_pages, POOL / 2);
	assert_int_equal(p.max_tokens, (POOL / 2 + 6 * GROUP) * KV_PAGE_TOKENS);
	assert_int_equal(kv_overflow_groups_for(&p, p.max_tokens), 6);
	assert_int_equal(kv_overflow_groups_for(&p, p.max_tokens - GROUP * KV_PAGE_TOKENS), 5);
	assert_int_equal(kv_overflow_groups_for(&p, POOL / 2 * KV_PAGE_TOKENS), 0);
	assert_int_equal(kv_overflow_groups_for(&p, POOL / 2 * KV_PAGE_TOKENS + 1), 1);
	/* Groups leave room for a step beside them. */
	for (int32_t pages = 38; pages < 5000; pages += 13) {
		assert_int_equal(kv_overflow_plan(&layout, pages, 512, ram_of(1000), 0, &p, &err), STATUS_OK);
		assert_int_equal(p.group_pages % KV_PART_PAGES, 0);
		assert_in_range(p.step_rows, 1, 512);
		assert_true(p.group_pages + 2 + kv_pages_for(p.step_rows) <= p.resident_pages);
	}
	assert_int_equal(kv_overflow_plan(&layout, 37, 512, ram_of(4), 0, &p, &err), STATUS_INVALID);
	assert_string_equal(err.message, "conversations larger than the KV cache pass through it in groups of 16 "
	                                 "pages, for which it is too small: "
	                                 "it has 37 pages, and takes 38");
	assert_int_equal(kv_overflow_plan(&layout, POOL, 512, ram_of(1) - 1, 0, &p, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "are too few: 16 pages"));
	/* However much there is, numbers do not overflow. */
	assert_int_equal(kv_overflow_plan(&layout, INT32_MAX, 512, UINT64_MAX, UINT64_MAX, &p, &err), STATUS_OK);
	assert_true(p.max_tokens > 0);
}

/* Pages of a narrow pool come with their wide copies, as far as there is room for these. */
static void copies_of_narrow_pages_go_with_them(void **state)
{
	(void)state;
	struct kv_layout narrow = layout;
	struct kv_pool *own = pool;
	struct kv_overflow_stats s;
	size_t wide_layer = layout.page_bytes / LAYERS;
	kv_layout_narrow(&narrow, KV_FORM_INT8);
	for (int on_disk = 0; on_disk < 2; on_disk++) {
		struct kv_overflow *over;
		struct error err;
		struct conversation c = {.number = 7 + on_disk, .kv = KV_SEQ_INIT};
		struct kv_overflow_options o = {.dir = on_disk ? dir : NULL, .step_tokens = STEP};
		assert_int_equal(kv_pool_create_narrow(device, &narrow, POOL, POOL, &pool, &err), STATUS_OK);
		const struct kv_layout *l = kv_pool_layout(pool);
		uint64_t groups = (uint64_t)GROUP * l->page_bytes * 8;
		*(on_disk ? &o.disk_bytes : &o.ram_bytes) =
			groups + groups / 2 + 6 * layout.page_bytes; /* blocks are padded on disk */
		assert_int_equal(kv_overflow_create(device, pool, &o, &over, &err), STATUS_OK);
		assert_in_range(kv_overflow_now(over)->wide_slots, 5, 8);
		/* As one page in 16 has a value without a narrow form; the first has a copy in any case. */
		struct kv_layout saved = layout;
		layout = *l;
		for (int i = 0; i < 10; i++) {
			go_on(over, &c, 8);
			int32_t page = c.kv.n_tokens / KV_PAGE_TOKENS - 8;
			if (page % GROUP == 0) {
				kv_pool_widen(pool, c.kv.pages[page]);
				int32_t slot = l->wide->slot[c.kv.pages[page]];
				assert_true(slot >= 0);
				char *copy =
					(char *)kv_pool_slab(pool) + l->wide->offset + (size_t)slot * l->wide->stride;
				for (size_t at = 0; at < l->wide->bytes; at++)
					copy[at] = (char)byte_of(&c, 1000 + page, at);
			}
		}
		struct kv_spill *spill = &c.spill;
		kv_overflow_step(over, &spill, 1);
		assert_in_range(c.spill.n_groups, 3, 4);
		for (int32_t layer = 0; layer < LAYERS; layer++) {
			struct kv_far_run run;
			for (int32_t page = 0; page < c.spill.far.n_pages; page += run.n_pages) {
				assert_true(c.spill.far.get(&c.spill.far, layer, page, &run));
				for (int32_t p = 0; p < run.n_pages; p++) {
					int32_t slot = run.wide->slot[run.block_table[p]];
					assert_int_equal(slot >= 0, (page + p) % GROUP == 0);
					const char *copy = (const char *)run.wide->slab + run.wide->offset +
					                   (size_t)slot * run.wide->stride;
					for (size_t at = 0; slot >= 0 && at < wide_layer; at++)
						assert_int_equal(copy[at],
						                 (char)byte_of(&c, 1000 + page + p,
						                               (size_t)layer * wide_layer + at));
				}
			}
		}
		layout = saved;
		kv_overflow_stats(over, &s);
		assert_int_equal(s.wide_used, c.spill.n_groups);
		assert_int_equal(s.wide_refused, 0);
		assert_true(s.ram_bytes <= (on_disk ? 8 * layout.page_bytes : o.ram_bytes));
		end(&c);
		kv_overflow_stats(over, &s);
		assert_int_equal(s.wide_used, 0);
		kv_overflow_destroy(over);
		assert_int_equal(kv_pool_n_free(pool), POOL);
		assert_int_equal(kv_pool_destroy(pool), STATUS_OK);
	}
	pool = own;
}

static void what_cannot_be_had_is_a_sentence(void **state)
{
	(void)state;
	struct kv_overflow *over;
	struct error err;
	struct kv_overflow_options o = {.dir = "/proc/nowhere/at-all", .disk_bytes = disk_of(2), .step_tokens = STEP};
	assert_int_equal(kv_overflow_create(device, pool, &o, &over, &err), STATUS_IO);
	assert_non_null(strstr(err.message, "/proc/nowhere"));
	/* Memory is enough to go on with. */
	o.ram_bytes = ram_of(2);
	assert_int_equal(kv_overflow_create(device, pool, &o, &over, &err), STATUS_OK);
	assert_int_equal(kv_overflow_now(over)->disk_groups, 0);
	assert_int_equal(kv_overflow_now(over)->max_tokens, (POOL / 2 + 2 * GROUP) * KV_PAGE_TOKENS);
	kv_overflow_destroy(over);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_left_the_pool_is_found_again),
		cmocka_unit_test(sequences_do_not_see_each_other),
		cmocka_unit_test(room_is_promised_once),
		cmocka_unit_test(a_plan_says_how_long_conversations_may_be),
		cmocka_unit_test(what_cannot_be_had_is_a_sentence),
		cmocka_unit_test(copies_of_narrow_pages_go_with_them),
	};
	if (argc > 1)
		cmocka_set_test_filter(argv[1]);
	return cmocka_run_group_tests(tests, set_up, tear_down);
}
