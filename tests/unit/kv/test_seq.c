#include "tests/unit/unit.h"

#include "engine/kv/seq.h"
#include "tests/unit/kv/pool_fixture.h"

/* Stands for model_forward(): writes n positions, each as one byte, where the block table says. */
static void compute(struct kv_pool *p, struct kv_seq *s, int32_t n, char value)
{
	char *slab = kv_pool_slab(p);
	for (int32_t i = 0; i < n; i++, s->n_tokens++) {
		int32_t page = s->pages[s->n_tokens / KV_PAGE_TOKENS];
		assert_int_equal(kv_pool_refs(p, page), 1);
		slab[page * 64 + s->n_tokens % KV_PAGE_TOKENS] = value;
	}
}

static char read_at(struct kv_pool *p, const struct kv_seq *s, int32_t position)
{
	return ((char *)kv_pool_slab(p))[s->pages[position / KV_PAGE_TOKENS] * 64 + position % KV_PAGE_TOKENS];
}

static void prepare_takes_the_pages_that_are_missing(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(10);
	struct kv_seq s = KV_SEQ_INIT;
	assert_int_equal(kv_seq_pages_needed(p, &s, 17), 2);
	assert_int_equal(kv_seq_prepare(p, &s, 17), STATUS_OK);
	assert_int_equal(s.n_pages, 2);
	compute(p, &s, 17, 'a');
	assert_int_equal(kv_seq_pages_needed(p, &s, 15), 0);
	assert_int_equal(kv_seq_pages_needed(p, &s, 16), 1);
	kv_seq_truncate(p, &s, 16);
	assert_int_equal(s.n_pages, 1);
	assert_int_equal(s.n_tokens, 16);
	kv_seq_release(p, &s);
	assert_int_equal(kv_pool_n_free(p), 10);
	kv_pool_destroy(p);
}

static void a_fork_copies_the_tail_on_write_only(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(10);
	struct kv_seq a = KV_SEQ_INIT, b = KV_SEQ_INIT;
	kv_seq_prepare(p, &a, 20);
	compute(p, &a, 20, 'a');
	assert_int_equal(kv_seq_share(p, &b, &a, 20), STATUS_OK);
	assert_int_equal(kv_pool_n_free(p), 8);
	assert_int_equal(kv_seq_pages_needed(p, &b, 1), 1);
	assert_int_equal(kv_seq_prepare(p, &b, 1), STATUS_OK);
	compute(p, &b, 1, 'b');
	/* The other side is alone on the old tail now and writes it in place. */
	assert_int_equal(kv_seq_pages_needed(p, &a, 1), 0);
	assert_int_equal(kv_seq_prepare(p, &a, 1), STATUS_OK);
	compute(p, &a, 1, 'A');
	assert_int_equal(a.pages[0], b.pages[0]);
	assert_int_not_equal(a.pages[1], b.pages[1]);
	assert_int_equal(read_at(p, &a, 20), 'A');
	assert_int_equal(read_at(p, &b, 20), 'b');
	assert_int_equal(read_at(p, &b, 19), 'a');
	kv_seq_release(p, &a);
	kv_seq_release(p, &b);
	assert_int_equal(kv_pool_n_free(p), 10);
	kv_pool_destroy(p);
}

static void truncating_into_a_shared_page_copies_it_before_the_next_write(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(10);
	struct kv_seq a = KV_SEQ_INIT, b = KV_SEQ_INIT;
	kv_seq_prepare(p, &a, 32);
	compute(p, &a, 32, 'a');
	kv_seq_share(p, &b, &a, 32);
	kv_seq_truncate(p, &b, 24);
	kv_seq_prepare(p, &b, 1);
	compute(p, &b, 1, 'b');
	assert_int_equal(read_at(p, &a, 24), 'a');
	assert_int_equal(read_at(p, &b, 24), 'b');
	kv_seq_release(p, &b);
	kv_seq_release(p, &a);
	kv_pool_destroy(p);
}

static void a_full_pool_is_a_status_and_leaks_nothing(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(2);
	struct kv_seq a = KV_SEQ_INIT, b = KV_SEQ_INIT;
	assert_int_equal(kv_seq_prepare(p, &a, 33), STATUS_LIMIT);
	kv_seq_release(p, &a);
	assert_int_equal(kv_pool_n_free(p), 2);
	kv_seq_prepare(p, &a, 20);
	compute(p, &a, 20, 'a');
	kv_seq_share(p, &b, &a, 20);
	assert_int_equal(kv_seq_prepare(p, &b, 1), STATUS_LIMIT);
	kv_seq_release(p, &a);
	kv_seq_release(p, &b);
	assert_int_equal(kv_pool_n_free(p), 2);
	kv_pool_destroy(p);
}

/* Random forks, truncations, appends and releases against a model that keeps each sequence's bytes apart. */
static void random_histories_never_mix(void **state)
{
	(void)state;
	enum { SEQS = 12, LENGTH = 300, PAGES = 90 };
	static char expect[SEQS][LENGTH];
	struct kv_seq seq[SEQS] = {{0}};
	struct kv_pool *p = make_pool(PAGES);
	uint64_t rng = 12345;
	for (int round = 0; round < 20000; round++) {
		int i = (int)(unit_rand(&rng) % SEQS), j = (int)(unit_rand(&rng) % SEQS);
		switch (unit_rand(&rng) % 8) {
		case 0:
			kv_seq_release(p, &seq[i]);
			break;
		case 1:
			if (i != j) {
				int32_t n =
					seq[j].n_tokens ? (int32_t)(unit_rand(&rng) % (uint64_t)seq[j].n_tokens) : 0;
				kv_seq_release(p, &seq[i]);
				assert_int_equal(kv_seq_share(p, &seq[i], &seq[j], n), STATUS_OK);
				memcpy(expect[i], expect[j], (size_t)n);
			}
			break;
		case 2:
			kv_seq_truncate(p, &seq[i], seq[i].n_tokens / 2);
			break;
		default: {
			int32_t n = (int32_t)(unit_rand(&rng) % 40);
			if (seq[i].n_tokens + n > LENGTH || kv_seq_prepare(p, &seq[i], n) != STATUS_OK)
				break;
			char value = (char)unit_rand(&rng);
			memset(expect[i] + seq[i].n_tokens, value, (size_t)n);
			compute(p, &seq[i], n, value);
		}
		}
		for (int32_t t = 0; t < seq[i].n_tokens; t++)
			assert_int_equal(read_at(p, &seq[i], t), expect[i][t]);
	}
	for (int i = 0; i < SEQS; i++)
		kv_seq_release(p, &seq[i]);
	assert_int_equal(kv_pool_n_free(p), PAGES);
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
}

static void an_account_is_charged_for_every_reference(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(16);
	struct kv_account mine = {0}, yours = {0};
	struct kv_seq a = KV_SEQ_INIT, b = KV_SEQ_INIT;
	kv_seq_charge(&a, &mine);
	kv_seq_charge(&b, &yours);
	kv_seq_prepare(p, &a, 40);
	a.n_tokens = 40;
	assert_int_equal(mine.n_pages, 3);
	kv_seq_share(p, &b, &a, 40);
	assert_int_equal(yours.n_pages, 3);
	kv_seq_prepare(p, &b, 20); /* copies the shared tail and takes one more */
	assert_int_equal(yours.n_pages, 4);
	assert_int_equal(mine.n_pages, 3);
	kv_seq_truncate(p, &b, 20);
	assert_int_equal(yours.n_pages, 2);
	/* An emptied sequence keeps its account; another account takes over what is there. */
	kv_seq_release(p, &a);
	assert_int_equal(mine.n_pages, 0);
	kv_seq_prepare(p, &a, 20);
	assert_int_equal(mine.n_pages, 2);
	kv_seq_charge(&a, &yours);
	assert_int_equal(mine.n_pages, 0);
	assert_int_equal(yours.n_pages, 4);
	kv_seq_charge(&a, NULL);
	assert_int_equal(yours.n_pages, 2);
	kv_seq_release(p, &a);
	kv_seq_release(p, &b);
	assert_int_equal(yours.n_pages, 0);
	assert_int_equal(kv_pool_n_free(p), 16);
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
}

/* With a window of 40, position 100 sees 61 and what follows: pages 0 to 2 are over. */
static void pages_before_the_window_are_given_back(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(12);
	struct kv_account account = {0};
	struct kv_seq s = KV_SEQ_INIT;
	kv_seq_charge(&s, &account);
	assert_int_equal(kv_seq_prepare(p, &s, 100), STATUS_OK);
	compute(p, &s, 39, 'a');
	kv_seq_let_go(p, &s, 40);
	assert_int_equal(s.n_gone, 0);
	compute(p, &s, 61, 'b');
	kv_seq_let_go(p, &s, 40);
	assert_int_equal(s.n_gone, 3);
	assert_int_equal(kv_seq_refs(&s), 4);
	assert_int_equal(account.n_pages, 4);
	assert_int_equal(kv_pool_n_free(p), 8);
	assert_int_equal(s.pages[2], KV_NO_PAGE);
	assert_int_equal(read_at(p, &s, 61), 'b');
	/* It goes on where it is, changes hands, and can only lose everything. */
	assert_int_equal(kv_seq_prepare(p, &s, 30), STATUS_OK);
	compute(p, &s, 30, 'c');
	kv_seq_label(p, &s, (struct kv_holder){KV_HOLDER_WAITING, 7});
	kv_seq_let_go(p, &s, 40);
	assert_int_equal(s.n_gone, 5);
	assert_int_equal(account.n_pages, 4);
	kv_seq_truncate(p, &s, 130);
	assert_int_equal(s.n_tokens, 130);
	kv_seq_truncate(p, &s, 129);
	assert_int_equal(s.n_tokens, 0);
	assert_int_equal(s.n_pages, 0);
	assert_int_equal(s.n_gone, 0);
	assert_int_equal(account.n_pages, 0);
	assert_int_equal(kv_pool_n_free(p), 12);
	kv_seq_release(p, &s);
	kv_pool_destroy(p);
}

/* However short the window, the last full page stays: what comes next is indexed behind it. */
static void the_last_full_page_stays(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(6);
	struct kv_seq s = KV_SEQ_INIT;
	kv_seq_prepare(p, &s, 70);
	compute(p, &s, 64, 'a');
	kv_seq_let_go(p, &s, 1);
	assert_int_equal(s.n_gone, 3);
	compute(p, &s, 6, 'a');
	kv_seq_let_go(p, &s, 1);
	assert_int_equal(s.n_gone, 3);
	kv_seq_release(p, &s);
	assert_int_equal(kv_pool_n_free(p), 6);
	kv_pool_destroy(p);
}

static char bound_of(struct kv_pool *p, int32_t page)
{
	const struct kv_layout *l = kv_pool_layout(p);
	return *((char *)l->bounds->slab + kv_bounds_offset(l, 0, 0, page));
}

static void bounds_are_computed_once_for_what_stands_in_a_page(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(6);
	struct kv_seq s = KV_SEQ_INIT, other = KV_SEQ_INIT;
	struct kv_wide_counts counts;
	int32_t first;
	assert_int_equal(kv_pool_bound(p, &first, 0), STATUS_UNSUPPORTED);
	assert_int_equal(kv_pool_add_bounds(p), STATUS_OK);
	assert_int_equal(mem.allocated, 6 * (64 + (int64_t)kv_bounds_bytes(kv_pool_layout(p))));
	kv_seq_prepare(p, &s, 48);
	compute(p, &s, 48, 'a');
	first = s.pages[0];
	assert_int_equal(kv_pool_bound(p, s.pages, 2), STATUS_OK);
	assert_int_equal(kv_pool_bound(p, s.pages, 3), STATUS_OK);
	assert_int_equal(mem.n_bounded, 3);
	/* Another holder finds them. */
	assert_int_equal(kv_seq_share(p, &other, &s, 48), STATUS_OK);
	assert_int_equal(kv_pool_bound(p, other.pages, 3), STATUS_OK);
	assert_int_equal(mem.n_bounded, 3);
	/* One who writes it anew has a copy without, */
	kv_seq_truncate(p, &other, 20);
	assert_int_equal(kv_seq_prepare(p, &other, 12), STATUS_OK);
	compute(p, &other, 12, 'b');
	assert_int_equal(kv_pool_bound(p, other.pages, 2), STATUS_OK);
	assert_int_equal(mem.n_bounded, 4);
	/* and whoever writes behind the end of what is left of a page loses them. */
	kv_seq_truncate(p, &s, 16);
	kv_seq_truncate(p, &other, 17);
	assert_int_equal(kv_seq_prepare(p, &other, 15), STATUS_OK);
	compute(p, &other, 15, 'c');
	assert_int_equal(kv_pool_bound(p, other.pages, 2), STATUS_OK);
	assert_int_equal(mem.n_bounded, 5);
	kv_seq_release(p, &s);
	kv_seq_release(p, &other);
	/* A page that comes back is another one. */
	kv_seq_prepare(p, &s, 96);
	compute(p, &s, 96, 'd');
	assert_int_equal(kv_pool_bound(p, s.pages, 6), STATUS_OK);
	assert_int_equal(mem.n_bounded, 11);
	assert_int_equal(bound_of(p, first), 'd');
	kv_pool_wide_counts(p, &counts);
	assert_int_equal(counts.n_bounded, 11);
	kv_seq_release(p, &s);
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
	assert_int_equal(mem.allocated, 0);
}

UNIT_MAIN(cmocka_unit_test(bounds_are_computed_once_for_what_stands_in_a_page),
          cmocka_unit_test(pages_before_the_window_are_given_back), cmocka_unit_test(the_last_full_page_stays),
          cmocka_unit_test(an_account_is_charged_for_every_reference),
          cmocka_unit_test(prepare_takes_the_pages_that_are_missing),
          cmocka_unit_test(a_fork_copies_the_tail_on_write_only),
          cmocka_unit_test(truncating_into_a_shared_page_copies_it_before_the_next_write),
          cmocka_unit_test(a_full_pool_is_a_status_and_leaks_nothing), cmocka_unit_test(random_histories_never_mix))
