#include "tests/unit/kv/tier_fixture.h"

#include "engine/kv/tiers.h"

enum { POOL_PAGES = 24 };

struct fixture {
	struct tier_fixture base;
	struct kv_pool *pool;
	struct kv_prefix *prefix;
	struct kv_tiers *tiers;
	struct kv_chain chain;
	int32_t tokens[POOL_PAGES * KV_PAGE_TOKENS * 4];
};

static void setup(struct fixture *f, uint64_t ram_pages)
{
	struct kv_tier *ram;
	struct kv_key root = tier_key(-7);
	tier_setup(&f->base);
	assert_int_equal(kv_pool_create(f->base.device.backend, &f->base.device.layout, POOL_PAGES, &f->pool, NULL),
	                 STATUS_OK);
	free(f->base.device.slab);
	f->base.device.slab = kv_pool_slab(f->pool);
	assert_int_equal(kv_prefix_create(f->pool, "lru", &f->prefix, NULL), STATUS_OK);
	assert_int_equal(kv_tier_ram_create(&f->base.device, &f->base.clock, ram_pages * TIER_PAGE_BYTES, KV_FORM_F16,
	                                    &ram, NULL),
	                 STATUS_OK);
	assert_int_equal(
		kv_tiers_create(f->pool, f->prefix, (struct kv_tier *[KV_TIER_KINDS]){ram}, &f->base.clock, &f->tiers),
		STATUS_OK);
	f->chain = kv_chain_of(&root);
	for (size_t i = 0; i < sizeof f->tokens / sizeof *f->tokens; i++)
		f->tokens[i] = (int32_t)i * 3 + 1;
}

static void teardown(struct fixture *f)
{
	kv_tiers_destroy(f->tiers);
	kv_prefix_destroy(f->prefix);
	kv_chain_free(&f->chain);
	/* Nothing that was fetched, cancelled or dropped has left a reference behind. */
	assert_int_equal(kv_pool_n_free(f->pool), POOL_PAGES);
	assert_int_equal(kv_pool_destroy(f->pool), STATUS_OK);
}

static struct kv_use use_at(const struct fixture *f)
{
	return (struct kv_use){.now_ms = clock_now_ms(&f->base.clock)};
}

/* A conversation of n tokens is computed, and leaves its pages to the index; page i has the bytes of number i. */
static void compute(struct fixture *f, int32_t n)
{
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_use use = use_at(f);
	assert_int_equal(kv_seq_prepare(f->pool, &s, n), STATUS_OK);
	for (int32_t i = 0; i < s.n_pages; i++)
		tier_fill(&f->base, s.pages[i], i);
	s.n_tokens = n;
	kv_prefix_put(f->prefix, &f->chain, f->tokens, &s, 0, &use);
	kv_prefix_put_tail(f->prefix, f->tokens, &s, &use);
	kv_seq_release(f->pool, &s);
}

static void evict(struct fixture *f, int32_t n)
{
	for (int32_t i = 0; i < n; i++)
		assert_true(kv_prefix_evict(f->prefix, clock_now_ms(&f->base.clock), EVICT_FOR_PROMPT));
}

/* Holds what the index has, and brings what the tiers have behind it. The pages held at the end. */
static int32_t bring(struct fixture *f, int32_t n, int32_t max_pages)
{
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_fetch fetch;
	struct kv_use use = use_at(f);
	kv_fetch_init(&fetch);
	assert_int_equal(kv_prefix_hold(f->prefix, &f->chain, f->tokens, n, &s), STATUS_OK);
	if (kv_tiers_fetch(f->tiers, &fetch, &f->chain.root, f->tokens, n, &s, max_pages, false)) {
		while (!kv_tiers_advance(f->tiers, &fetch, &s, &use))
			kv_tiers_poll(f->tiers);
	}
	int32_t held = s.n_pages;
	for (int32_t i = 0; i < held; i++)
		assert_true(tier_holds(&f->base, s.pages[i], i));
	kv_seq_release(f->pool, &s);
	return held;
}

static struct kv_tiers_stats stats(const struct fixture *f)
{
	struct kv_tiers_stats s;
	kv_tiers_stats(f->tiers, &s);
	return s;
}

static void what_is_evicted_comes_back_behind_what_is_still_there(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 40);
	compute(&f, 10 * KV_PAGE_TOKENS);
	evict(&f, 4);
	assert_int_equal(kv_prefix_match(f.prefix, &f.chain, f.tokens, 160), 6);
	assert_int_equal(bring(&f, 160, 100), 10);
	assert_int_equal(kv_prefix_match(f.prefix, &f.chain, f.tokens, 160), 10);
	assert_int_equal(stats(&f).fetched[KV_TIER_RAM], 4);
	/* It is asked for by its key alone. A tier forgets nothing because it was fetched. */
	kv_prefix_match(f.prefix, &f.chain, f.tokens, 160);
	assert_int_equal(kv_tiers_where(f.tiers, &f.chain.keys[9]), KV_TIER_RAM);
	assert_int_equal(kv_tiers_where(f.tiers, &f.chain.keys[0]), KV_TIER_KINDS);
	/* All of it, from the first page on; and a prompt that goes another way gets the common part. */
	evict(&f, 10);
	f.tokens[100]++;
	kv_chain_free(&f.chain);
	assert_int_equal(bring(&f, 160, 100), 6);
	teardown(&f);
}

static void a_tail_comes_back_to_the_index(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_use use;
	setup(&f, 40);
	compute(&f, 3 * KV_PAGE_TOKENS + 5);
	evict(&f, 4);
	assert_int_equal(bring(&f, 3 * KV_PAGE_TOKENS + 9, 100), 3);
	use = use_at(&f);
	assert_int_equal(kv_prefix_get(f.prefix, &f.chain, f.tokens, 3 * KV_PAGE_TOKENS + 9, &use, &s), STATUS_OK);
	assert_int_equal(s.n_tokens, 3 * KV_PAGE_TOKENS + 5);
	kv_seq_release(f.pool, &s);
	teardown(&f);
}

static void a_fetch_takes_no_more_pages_than_it_may(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 40);
	compute(&f, 10 * KV_PAGE_TOKENS);
	evict(&f, 10);
	assert_int_equal(bring(&f, 160, 3), 3);
	assert_int_equal(kv_pool_n_free(f.pool), POOL_PAGES - 3);
	assert_int_equal(bring(&f, 160, 0), 3);
	teardown(&f);
}

static void a_cancelled_fetch_gives_its_pages_back_and_keeps_what_has_come(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_fetch fetch;
	struct kv_use use;
	setup(&f, 40);
	compute(&f, 20 * KV_PAGE_TOKENS);
	evict(&f, 20);
	use = use_at(&f);
	kv_fetch_init(&fetch);
	assert_true(kv_tiers_fetch(f.tiers, &fetch, &f.chain.root, f.tokens, 320, &s, 100, false));
	/* Another that begins alike waits for it rather than fetching it twice. */
	assert_true(kv_tiers_comes(f.tiers, &f.chain.root, f.tokens, 320, &s));
	assert_false(kv_tiers_advance(f.tiers, &fetch, &s, &use));
	assert_int_equal(kv_pool_n_free(f.pool), POOL_PAGES - 20);
	/* One poll brings a part. */
	kv_tiers_poll(f.tiers);
	assert_false(kv_tiers_advance(f.tiers, &fetch, &s, &use));
	int32_t come = s.n_pages;
	assert_true(come > 0 && come < 20);
	kv_tiers_cancel(f.tiers, &fetch);
	kv_tiers_cancel(f.tiers, &fetch);
	kv_seq_release(f.pool, &s);
	assert_int_equal(kv_pool_n_free(f.pool), POOL_PAGES - come);
	assert_int_equal(kv_prefix_match(f.prefix, &f.chain, f.tokens, 320), come);
	assert_false(kv_tiers_comes(f.tiers, &f.chain.root, f.tokens, 320, &s));
	kv_tiers_poll(f.tiers);
	assert_false(kv_tiers_busy(f.tiers));
	assert_int_equal(stats(&f).fetches_cancelled, 1);
	assert_int_equal(bring(&f, 320, 100), 20);
	teardown(&f);
}

static void a_sequence_that_lost_its_pages_ends_the_fetch(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_fetch fetch;
	struct kv_use use;
	setup(&f, 40);
	compute(&f, 10 * KV_PAGE_TOKENS);
	evict(&f, 5);
	use = use_at(&f);
	kv_fetch_init(&fetch);
	assert_int_equal(kv_prefix_hold(f.prefix, &f.chain, f.tokens, 160, &s), STATUS_OK);
	assert_true(kv_tiers_fetch(f.tiers, &fetch, &f.chain.root, f.tokens, 160, &s, 100, false));
	kv_seq_release(f.pool, &s);
	kv_tiers_advance(f.tiers, &fetch, &s, &use);
	kv_tiers_poll(f.tiers);
	assert_true(kv_tiers_advance(f.tiers, &fetch, &s, &use));
	assert_int_equal(s.n_pages, 0);
	assert_int_equal(kv_pool_n_free(f.pool), POOL_PAGES - 5);
	teardown(&f);
}

static void a_page_that_was_computed_meanwhile_is_not_doubled(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_fetch fetch;
	struct kv_use use;
	setup(&f, 40);
	compute(&f, 4 * KV_PAGE_TOKENS);
	evict(&f, 4);
	use = use_at(&f);
	kv_fetch_init(&fetch);
	assert_true(kv_tiers_fetch(f.tiers, &fetch, &f.chain.root, f.tokens, 64, &s, 100, false));
	kv_tiers_advance(f.tiers, &fetch, &s, &use);
	compute(&f, 4 * KV_PAGE_TOKENS);
	kv_tiers_poll(f.tiers);
	assert_true(kv_tiers_advance(f.tiers, &fetch, &s, &use));
	assert_int_equal(s.n_pages, 4);
	assert_int_equal(kv_pool_n_free(f.pool), POOL_PAGES - 4);
	kv_seq_release(f.pool, &s);
	teardown(&f);
}

/* ---- What pays ---- */

/* ---- Pages that come in parts ---- */

enum { PAGES = 20, HALF = TIER_PAGE_BYTES / 4 /* elements of a layer */ };

/* A conversation of 20 pages that have left; a fetch of them for n tokens, which has come so far that it may begin. */
static void come_so_far(struct fixture *f, struct kv_fetch *fetch, struct kv_seq *s, int32_t n)
{
	struct kv_use use;
	setup(f, 2 * PAGES);
	compute(f, PAGES * KV_PAGE_TOKENS);
	evict(f, PAGES);
	memset(f->base.device.slab, 0xEE, (size_t)POOL_PAGES * f->base.device.layout.page_stride);
	use = use_at(f);
	kv_fetch_init(fetch);
	assert_true(kv_tiers_fetch(f->tiers, fetch, &f->chain.root, f->tokens, n, s, 100, true));
	int polls = 0;
	for (; !kv_tiers_may_begin(fetch); polls++) {
		assert_false(kv_tiers_advance(f->tiers, fetch, s, &use));
		kv_tiers_poll(f->tiers);
	}
	assert_int_equal(polls, 2); /* 16 parts each */
	assert_int_equal(s->n_pages, 0);
}

static bool holds_layer(const struct fixture *f, int32_t page, int32_t i, int32_t layer)
{
	for (int32_t e = layer * HALF; e < (layer + 1) * HALF; e++) {
		if (tier_bytes(&f->base, page)[e] != tier_element(i, e))
			return false;
	}
	return true;
}

static int64_t soon(void)
{
	return clock_now_ns(clock_system()) + 1000000000;
}

static void a_sequence_begins_with_the_first_layers(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_fetch fetch;
	come_so_far(&f, &fetch, &s, PAGES * KV_PAGE_TOKENS + 9);
	assert_true(kv_tiers_begin(f.tiers, &fetch, &s, PAGES * KV_PAGE_TOKENS + 8));
	assert_int_equal(s.n_tokens, PAGES * KV_PAGE_TOKENS);
	int32_t n_whole = 0;
	for (int32_t i = 0; i < s.n_pages; i++) {
		assert_true(holds_layer(&f, s.pages[i], i, 0));
		n_whole += holds_layer(&f, s.pages[i], i, 1);
		assert_int_equal(kv_pool_refs(f.pool, s.pages[i]), 2);
	}
	assert_int_equal(n_whole, 12);
	/* Nobody else finds them yet. */
	assert_int_equal(kv_prefix_match(f.prefix, &f.chain, f.tokens, 320), 0);
	assert_true(kv_tiers_wait(f.tiers, &fetch, 0, 0));
	assert_true(kv_tiers_wait(f.tiers, &fetch, 1, soon()));
	kv_tiers_arrived(f.tiers, &fetch);
	for (int32_t i = 0; i < s.n_pages; i++) {
		assert_true(tier_holds(&f.base, s.pages[i], i));
		assert_int_equal(kv_pool_refs(f.pool, s.pages[i]), 1);
	}
	assert_int_equal(stats(&f).fetched[KV_TIER_RAM], PAGES);
	assert_int_equal(stats(&f).n_fetching, 0);
	kv_seq_release(f.pool, &s);
	teardown(&f);
}

/* The last token is computed in any case: the page that it stands in comes as a whole, and is written where it is. */
static void the_page_that_is_written_to_is_the_sequences_own(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_fetch fetch;
	int32_t n = PAGES * KV_PAGE_TOKENS;
	come_so_far(&f, &fetch, &s, n);
	assert_true(kv_tiers_begin(f.tiers, &fetch, &s, n - 1));
	assert_int_equal(s.n_tokens, n - 1);
	int32_t last = s.pages[PAGES - 1];
	assert_true(tier_holds(&f.base, last, PAGES - 1));
	assert_int_equal(kv_pool_refs(f.pool, last), 1);
	assert_int_equal(kv_seq_prepare(f.pool, &s, 1), STATUS_OK);
	assert_int_equal(s.pages[PAGES - 1], last);
	/* The others come on when it gives up, and the index gets them. */
	kv_tiers_retreat(f.tiers, &fetch, &s);
	assert_int_equal(s.n_pages, 0);
	struct kv_use use = use_at(&f);
	while (!kv_tiers_advance(f.tiers, &fetch, &s, &use))
		kv_tiers_poll(f.tiers);
	assert_int_equal(kv_prefix_match(f.prefix, &f.chain, f.tokens, n), PAGES - 1);
	for (int32_t i = 0; i < s.n_pages; i++)
		assert_true(tier_holds(&f.base, s.pages[i], i));
	kv_seq_release(f.pool, &s);
	teardown(&f);
}

static void what_begins_can_be_cancelled_and_leaves_nothing(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_fetch fetch;
	come_so_far(&f, &fetch, &s, PAGES * KV_PAGE_TOKENS + 1);
	assert_true(kv_tiers_begin(f.tiers, &fetch, &s, PAGES * KV_PAGE_TOKENS));
	kv_tiers_retreat(f.tiers, &fetch, &s);
	kv_tiers_cancel(f.tiers, &fetch);
	assert_int_equal(kv_pool_n_free(f.pool), POOL_PAGES);
	kv_tiers_poll(f.tiers);
	assert_false(kv_tiers_busy(f.tiers));
	assert_int_equal(kv_prefix_match(f.prefix, &f.chain, f.tokens, 320), 0);
	kv_seq_release(f.pool, &s);
	teardown(&f);
}

/* A part that is not to be had any more: the step is given up, and what is whole in front of it is kept. */
static void a_part_that_does_not_come_ends_the_wait(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_fetch fetch;
	come_so_far(&f, &fetch, &s, PAGES * KV_PAGE_TOKENS + 1);
	f.base.backend.fail_write = 3;
	assert_true(kv_tiers_begin(f.tiers, &fetch, &s, PAGES * KV_PAGE_TOKENS));
	assert_true(kv_tiers_wait(f.tiers, &fetch, 0, 0));
	assert_false(kv_tiers_wait(f.tiers, &fetch, 1, soon()));
	kv_tiers_retreat(f.tiers, &fetch, &s);
	struct kv_use use = use_at(&f);
	while (!kv_tiers_advance(f.tiers, &fetch, &s, &use))
		kv_tiers_poll(f.tiers);
	assert_in_range(s.n_pages, 12, PAGES - 1);
	assert_int_equal(kv_prefix_match(f.prefix, &f.chain, f.tokens, PAGES * KV_PAGE_TOKENS), s.n_pages);
	for (int32_t i = 0; i < s.n_pages; i++)
		assert_true(tier_holds(&f.base, s.pages[i], i));
	kv_seq_release(f.pool, &s);
	teardown(&f);
}

static void a_sequence_that_has_other_pages_does_not_begin(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_fetch fetch;
	come_so_far(&f, &fetch, &s, PAGES * KV_PAGE_TOKENS + 1);
	assert_int_equal(kv_seq_prepare(f.pool, &s, 1), STATUS_OK);
	assert_false(kv_tiers_begin(f.tiers, &fetch, &s, PAGES * KV_PAGE_TOKENS));
	assert_int_equal(s.n_pages, 1);
	kv_tiers_cancel(f.tiers, &fetch);
	kv_seq_release(f.pool, &s);
	teardown(&f);
}

static void the_break_even_decides_both_ways(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 40);
	compute(&f, 8 * KV_PAGE_TOKENS);
	/* Known of neither side: pages go down, and coming up the speed of memory is measured. */
	evict(&f, 2);
	assert_int_equal(bring(&f, 128, 100), 8);
	double speed = stats(&f).tier[KV_TIER_RAM].read_bytes_per_s;
	assert_true(speed > 0);
	double even = KV_PAGE_TOKENS / (TIER_PAGE_BYTES / speed);
	/* A device that computes 1,000 times slower than memory copies. */
	kv_tiers_prefill_rate(f.tiers, even / 1000);
	assert_true(stats(&f).pays[KV_TIER_RAM]);
	evict(&f, 4);
	assert_int_equal(stats(&f).unpaid[KV_TIER_RAM], 0);
	assert_int_equal(bring(&f, 128, 100), 8);
	/* And one that computes 1,000 times faster: nothing goes down, nothing comes up. */
	kv_tiers_prefill_rate(f.tiers, even * 1000);
	assert_false(stats(&f).pays[KV_TIER_RAM]);
	evict(&f, 4);
	assert_int_equal(stats(&f).unpaid[KV_TIER_RAM], 4);
	assert_int_equal(bring(&f, 128, 100), 4);
	teardown(&f);
}

static void a_tier_that_does_not_pay_is_tried_now_and_then(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 40);
	compute(&f, 10 * KV_PAGE_TOKENS);
	evict(&f, 10);
	assert_int_equal(bring(&f, 160, 100), 10);
	kv_tiers_prefill_rate(f.tiers, 1e15);
	evict(&f, 8);
	assert_int_equal(bring(&f, 160, 100), 2);
	clock_advance(&f.base.clock, 30000000000);
	/* A few pages; so its figures stay true. */
	assert_int_equal(bring(&f, 160, 100), 4);
	assert_int_equal(bring(&f, 160, 100), 4);
	/* The device got slower: the tier pays again at once. */
	kv_tiers_prefill_rate(f.tiers, 1);
	assert_int_equal(bring(&f, 160, 100), 10);
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(what_is_evicted_comes_back_behind_what_is_still_there),
          cmocka_unit_test(a_tail_comes_back_to_the_index), cmocka_unit_test(a_fetch_takes_no_more_pages_than_it_may),
          cmocka_unit_test(a_cancelled_fetch_gives_its_pages_back_and_keeps_what_has_come),
          cmocka_unit_test(a_sequence_that_lost_its_pages_ends_the_fetch),
          cmocka_unit_test(a_page_that_was_computed_meanwhile_is_not_doubled),
          cmocka_unit_test(a_sequence_begins_with_the_first_layers),
          cmocka_unit_test(the_page_that_is_written_to_is_the_sequences_own),
          cmocka_unit_test(what_begins_can_be_cancelled_and_leaves_nothing),
          cmocka_unit_test(a_part_that_does_not_come_ends_the_wait),
          cmocka_unit_test(a_sequence_that_has_other_pages_does_not_begin),
          cmocka_unit_test(the_break_even_decides_both_ways),
          cmocka_unit_test(a_tier_that_does_not_pay_is_tried_now_and_then))
