#include "tests/unit/unit.h"

#include "engine/kv/prefix.h"
#include "tests/support/memory_backend.h"

static struct memory_backend mem;

struct fixture {
	struct kv_pool *pool;
	struct kv_prefix *prefix;
	struct kv_key root;
};

static struct kv_root plain_root(void)
{
	return (struct kv_root){.n_layer = 2,
	                        .n_head_kv = 3,
	                        .head_dim = 4,
	                        .page_tokens = KV_PAGE_TOKENS,
	                        .kv_type = QUANT_F16,
	                        .scheme = str_from("cpu"),
	                        .rope = str_from("rope"),
	                        .salt = str_from("")};
}

static void setup_policy(struct fixture *f, int32_t n_pages, const char *policy)
{
	struct kv_layout layout = memory_layout();
	struct kv_root root = plain_root();
	memory_backend_init(&mem);
	assert_int_equal(kv_pool_create(&mem.base, &layout, n_pages, &f->pool, NULL), STATUS_OK);
	assert_int_equal(kv_prefix_create(f->pool, policy, &f->prefix, NULL), STATUS_OK);
	kv_key_root(&root, &f->root);
}

static void setup(struct fixture *f, int32_t n_pages)
{
	setup_policy(f, n_pages, "lru");
}

static void teardown(struct fixture *f)
{
	kv_prefix_destroy(f->prefix);
	assert_int_equal(kv_pool_n_free(f->pool), kv_pool_n_pages(f->pool));
	assert_int_equal(kv_pool_destroy(f->pool), STATUS_OK);
}

/* A sequence that has computed all of its tokens. */
static struct kv_seq computed(struct fixture *f, int32_t n)
{
	struct kv_seq s = KV_SEQ_INIT;
	assert_int_equal(kv_seq_prepare(f->pool, &s, n), STATUS_OK);
	s.n_tokens = n;
	return s;
}

static const struct kv_use *at(int64_t now_ms)
{
	static struct kv_use use;
	use = (struct kv_use){.now_ms = now_ms};
	return &use;
}

/* A chain without keys yet, until the next call. */
static struct kv_chain *under(const struct kv_key *root)
{
	static struct kv_chain chain;
	kv_chain_free(&chain);
	chain = kv_chain_of(root);
	return &chain;
}

static void fill(int32_t *tokens, int32_t n, int32_t from)
{
	for (int32_t i = 0; i < n; i++)
		tokens[i] = from + i;
}

static void full_pages_are_found_again_and_shared(void **state)
{
	(void)state;
	struct fixture f;
	int32_t tokens[100];
	setup(&f, 20);
	fill(tokens, 100, 0);
	struct kv_seq a = computed(&f, 70), b = KV_SEQ_INIT;
	assert_int_equal(kv_prefix_put(f.prefix, under(&f.root), tokens, &a, 0, at(1)), 4);
	assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), tokens, 100), 4);
	assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), tokens, 63), 3);
	assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), tokens, 100, at(2), &b), STATUS_OK);
	assert_int_equal(b.n_tokens, 64);
	for (int i = 0; i < 4; i++)
		assert_int_equal(a.pages[i], b.pages[i]);
	assert_int_equal(kv_pool_refs(f.pool, a.pages[0]), 3);
	tokens[40] = -1;
	assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), tokens, 100), 2);
	kv_seq_release(f.pool, &a);
	kv_seq_release(f.pool, &b);
	teardown(&f);
}

/* What went wrong in one sequence stays there, and with it what was computed behind it. */
static void pages_with_values_that_are_no_numbers_are_shared_with_nobody(void **state)
{
	(void)state;
	struct fixture f;
	int32_t tokens[100];
	setup(&f, 20);
	fill(tokens, 100, 0);
	struct kv_seq a = computed(&f, 70), b = KV_SEQ_INIT;
	const struct kv_watch *watch = kv_pool_layout(f.pool)->watch;
	watch->mark[a.pages[2]] = KV_MARK_UNSOUND;
	assert_int_equal(kv_prefix_put(f.prefix, under(&f.root), tokens, &a, 0, at(1)), 2);
	assert_int_equal(kv_prefix_put(f.prefix, under(&f.root), tokens, &a, 2, at(1)), 2);
	assert_false(kv_prefix_put_tail(f.prefix, tokens, &a, at(1)));
	assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), tokens, 100, at(2), &b), STATUS_OK);
	assert_int_equal(b.n_pages, 2);
	kv_seq_release(f.pool, &a);
	kv_seq_release(f.pool, &b);
	/* A tail of that kind as well; and the page is as good as any once it is somebody else's. */
	b = computed(&f, 40);
	kv_prefix_put(f.prefix, under(&f.root), tokens, &b, 0, at(3));
	watch->mark[b.pages[2]] = KV_MARK_UNSOUND;
	assert_false(kv_prefix_put_tail(f.prefix, tokens, &b, at(3)));
	kv_seq_release(f.pool, &b);
	for (int32_t i = 0; i < 20; i++)
		assert_true(watch->mark[i] == 0 || kv_pool_refs(f.pool, i) == 0);
	b = computed(&f, 200);
	for (int32_t i = 0; i < b.n_pages; i++)
		assert_true(kv_pool_is_sound(f.pool, b.pages[i]));
	kv_seq_release(f.pool, &b);
	teardown(&f);
}

static void salts_share_nothing(void **state)
{
	(void)state;
	struct fixture f;
	int32_t tokens[64];
	struct kv_root other = plain_root();
	struct kv_key key;
	setup(&f, 20);
	fill(tokens, 64, 0);
	struct kv_seq a = computed(&f, 64);
	kv_prefix_put(f.prefix, under(&f.root), tokens, &a, 0, at(1));
	other.salt = str_from("other");
	kv_key_root(&other, &key);
	assert_int_equal(kv_prefix_match(f.prefix, under(&key), tokens, 64), 0);
	kv_seq_release(f.pool, &a);
	teardown(&f);
}

static void equal_content_computed_twice_ends_up_in_one_place(void **state)
{
	(void)state;
	struct fixture f;
	int32_t tokens[64];
	setup(&f, 20);
	fill(tokens, 64, 0);
	struct kv_seq a = computed(&f, 64), b = computed(&f, 60);
	assert_int_equal(kv_pool_n_free(f.pool), 12);
	kv_prefix_put(f.prefix, under(&f.root), tokens, &a, 0, at(1));
	assert_int_equal(kv_prefix_put(f.prefix, under(&f.root), tokens, &b, 0, at(1)), 3);
	assert_int_equal(kv_pool_n_free(f.pool), 15);
	assert_int_equal(a.pages[2], b.pages[2]);
	assert_int_not_equal(a.pages[3], b.pages[3]);
	kv_seq_release(f.pool, &a);
	kv_seq_release(f.pool, &b);
	teardown(&f);
}

static void pages_are_added_as_they_fill(void **state)
{
	(void)state;
	struct fixture f;
	int32_t tokens[64];
	setup(&f, 20);
	fill(tokens, 64, 0);
	struct kv_seq a = computed(&f, 64);
	int32_t done = 0;
	for (int32_t n = 1; n <= 64; n++) {
		a.n_tokens = n;
		done = kv_prefix_put(f.prefix, under(&f.root), tokens, &a, done, at(n));
		assert_int_equal(done, n / KV_PAGE_TOKENS);
	}
	assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), tokens, 64), 4);
	kv_seq_release(f.pool, &a);
	teardown(&f);
}

static void eviction_takes_leaves_that_nobody_holds_oldest_first(void **state)
{
	(void)state;
	struct fixture f;
	int32_t x[64], y[64];
	struct kv_prefix_stats st;
	setup(&f, 20);
	fill(x, 64, 0);
	fill(y, 64, 0);
	y[32] = -1; /* shares two pages with x */
	struct kv_seq a = computed(&f, 64), b = computed(&f, 64);
	kv_prefix_put(f.prefix, under(&f.root), x, &a, 0, at(1));
	kv_prefix_put(f.prefix, under(&f.root), y, &b, 0, at(2));
	assert_false(kv_prefix_evict(f.prefix, 0, EVICT_FOR_PROMPT));
	kv_seq_release(f.pool, &a);
	kv_prefix_stats(f.prefix, &st);
	assert_int_equal(st.n_pages, 6);
	assert_int_equal(st.n_idle, 2);
	assert_true(kv_prefix_evict(f.prefix, 0, EVICT_FOR_PROMPT));
	assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), x, 64), 3);
	assert_true(kv_prefix_evict(f.prefix, 0, EVICT_FOR_PROMPT));
	assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), x, 64), 2);
	/* The rest belongs to b as well. */
	assert_false(kv_prefix_evict(f.prefix, 0, EVICT_FOR_PROMPT));
	kv_seq_release(f.pool, &b);
	for (int left = 3; left >= 0; left--) {
		assert_true(kv_prefix_evict(f.prefix, 0, EVICT_FOR_PROMPT));
		assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), y, 64), left);
	}
	assert_false(kv_prefix_evict(f.prefix, 0, EVICT_FOR_PROMPT));
	teardown(&f);
}

/* Two chains of two pages, x and y, that nobody holds any more. */
static void two_chains(struct fixture *f, int32_t *x, int32_t *y, const struct kv_use *use_x,
                       const struct kv_use *use_y)
{
	fill(x, 32, 0);
	fill(y, 32, 100);
	struct kv_seq a = computed(f, 32), b = computed(f, 32);
	kv_prefix_put(f->prefix, under(&f->root), x, &a, 0, use_x);
	kv_prefix_put(f->prefix, under(&f->root), y, &b, 0, use_y);
	kv_seq_release(f->pool, &a);
	kv_seq_release(f->pool, &b);
}

static void evict_one(struct fixture *f, int64_t now_ms, enum evict_reason reason)
{
	assert_true(kv_prefix_evict(f->prefix, now_ms, reason));
}

static void a_request_uses_a_page_once_however_often_it_asks(void **state)
{
	(void)state;
	struct fixture f;
	int32_t x[32], y[32];
	struct kv_use one = {.request = 1, .now_ms = 1}, two = {.request = 2, .now_ms = 2},
		      three = {.request = 3, .now_ms = 3};
	setup_policy(&f, 20, "lfu");
	two_chains(&f, x, y, &one, &two);
	struct kv_seq s = KV_SEQ_INIT;
	/* Request 1 is preempted, asks again and again, and puts what it has; request 3 uses y once. */
	for (int i = 0; i < 5; i++) {
		assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), x, 32, &one, &s), STATUS_OK);
		assert_int_equal(kv_prefix_put(f.prefix, under(&f.root), x, &s, 0, &one), 2);
		kv_seq_release(f.pool, &s);
	}
	assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), y, 32, &three, &s), STATUS_OK);
	kv_seq_release(f.pool, &s);
	evict_one(&f, 4, EVICT_FOR_PROMPT);
	assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), x, 32), 1);
	assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), y, 32), 2);
	teardown(&f);
}

static void a_hold_keeps_pages_and_is_no_use(void **state)
{
	(void)state;
	struct fixture f;
	int32_t x[32], y[32];
	struct kv_seq s = KV_SEQ_INIT;
	struct kv_prefix_stats st;
	setup(&f, 20);
	two_chains(&f, x, y, at(1), at(2));
	assert_int_equal(kv_prefix_hold(f.prefix, under(&f.root), x, 32, &s), STATUS_OK);
	assert_int_equal(s.n_tokens, 32);
	evict_one(&f, 3, EVICT_FOR_PROMPT);
	evict_one(&f, 3, EVICT_FOR_DECODE);
	assert_false(kv_prefix_evict(f.prefix, 3, EVICT_FOR_PROMPT));
	assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), y, 32), 0);
	kv_prefix_stats(f.prefix, &st);
	assert_int_equal(st.queries, 0);
	assert_int_equal(st.evicted[EVICT_FOR_PROMPT], 1);
	assert_int_equal(st.evicted[EVICT_FOR_DECODE], 1);
	kv_seq_release(f.pool, &s);
	evict_one(&f, 3, EVICT_FOR_PROMPT);
	teardown(&f);
}

static void what_a_live_session_vouches_for_goes_later(void **state)
{
	(void)state;
	struct fixture f;
	int32_t x[32], y[32];
	setup_policy(&f, 20, NULL);
	assert_int_equal(kv_prefix_claims_create(f.prefix, 2), STATUS_OK);
	/* x is older than y. */
	struct kv_use use = {.now_ms = 1000, .claim = kv_prefix_claim_open(f.prefix, 15000)};
	two_chains(&f, x, y, &use, at(9000));
	kv_prefix_claim_renew(f.prefix, use.claim, 60000);
	evict_one(&f, 20000, EVICT_FOR_PROMPT);
	evict_one(&f, 20000, EVICT_FOR_PROMPT);
	assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), x, 32), 2);
	/* But not never. */
	evict_one(&f, 20000, EVICT_FOR_PROMPT);
	evict_one(&f, 20000, EVICT_FOR_PROMPT);
	assert_false(kv_prefix_evict(f.prefix, 20000, EVICT_FOR_PROMPT));
	teardown(&f);
}

static void an_evicted_page_that_comes_back_is_known(void **state)
{
	(void)state;
	struct fixture f;
	int32_t x[32], y[32];
	struct kv_prefix_stats st;
	setup_policy(&f, 20, NULL);
	two_chains(&f, x, y, at(1000), at(9000));
	while (kv_prefix_evict(f.prefix, 20000, EVICT_FOR_PROMPT))
		;
	kv_prefix_stats(f.prefix, &st);
	assert_int_equal(st.n_ghosts, 4);
	two_chains(&f, x, y, at(21000), at(22000));
	kv_prefix_stats(f.prefix, &st);
	assert_int_equal(st.revived, 4);
	assert_int_equal(st.n_ghosts, 0);
	teardown(&f);
}

static void a_policy_that_does_not_exist_is_refused(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_prefix *other;
	struct error err;
	setup(&f, 4);
	assert_int_equal(kv_prefix_create(f.pool, "best", &other, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "\"best\""));
	teardown(&f);
}

/* Where the pretended device keeps a position's KV: a number. */
static int32_t *cell(struct fixture *f, const struct kv_seq *s, int32_t t)
{
	size_t stride = kv_pool_layout(f->pool)->page_stride;
	return (int32_t *)((char *)kv_pool_slab(f->pool) + (size_t)s->pages[t / KV_PAGE_TOKENS] * stride) +
	       t % KV_PAGE_TOKENS;
}

static void a_conversation_goes_on_from_the_tail_it_left(void **state)
{
	(void)state;
	struct fixture f;
	int32_t tokens[100];
	struct kv_prefix_stats st;
	struct kv_seq b = KV_SEQ_INIT, c = KV_SEQ_INIT;
	setup(&f, 20);
	fill(tokens, 100, 0);
	struct kv_seq a = computed(&f, 40);
	assert_int_equal(kv_prefix_put(f.prefix, under(&f.root), tokens, &a, 0, at(1)), 2);
	assert_true(kv_prefix_put_tail(f.prefix, tokens, &a, at(1)));
	kv_prefix_stats(f.prefix, &st);
	assert_int_equal(st.n_tails, 1);
	/* While another holds it, it is shared, and copied before anyone writes. */
	assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), tokens, 100, at(2), &b), STATUS_OK);
	assert_int_equal(b.n_tokens, 40);
	assert_int_equal(b.pages[2], a.pages[2]);
	assert_int_equal(kv_seq_pages_needed(f.pool, &b, 1), 1);
	kv_seq_release(f.pool, &a);
	kv_seq_release(f.pool, &b);
	/* The only one who wants it gets it whole: no copy, and no page that nobody will ask for stays behind. */
	assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), tokens, 100, at(3), &b), STATUS_OK);
	assert_int_equal(b.n_tokens, 40);
	assert_int_equal(kv_pool_refs(f.pool, b.pages[2]), 1);
	assert_int_equal(kv_seq_pages_needed(f.pool, &b, 8), 0);
	kv_prefix_stats(f.prefix, &st);
	assert_int_equal(st.n_tails, 0);
	assert_int_equal(st.n_pages, 2);
	/* Full, it serves whoever begins like the tail did. */
	b.n_tokens = 48;
	assert_int_equal(kv_prefix_put(f.prefix, under(&f.root), tokens, &b, 2, at(4)), 3);
	kv_seq_release(f.pool, &b);
	assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), tokens, 40, at(5), &c), STATUS_OK);
	assert_int_equal(c.n_tokens, 40);
	kv_seq_release(f.pool, &c);
	teardown(&f);
}

static void a_prompt_that_parts_within_a_page_shares_its_beginning(void **state)
{
	(void)state;
	struct fixture f;
	int32_t x[64], y[64], z[64];
	struct kv_seq s = KV_SEQ_INIT;
	setup(&f, 40);
	fill(x, 64, 0);
	fill(y, 64, 0);
	fill(z, 64, 0);
	fill(y + 42, 22, 1000);
	fill(z + 45, 19, 2000);
	struct kv_seq a = computed(&f, 64), b = computed(&f, 64);
	kv_prefix_put(f.prefix, under(&f.root), x, &a, 0, at(1));
	kv_prefix_put(f.prefix, under(&f.root), y, &b, 0, at(2));
	int32_t page = a.pages[2];
	kv_seq_release(f.pool, &a);
	kv_seq_release(f.pool, &b);
	assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), z, 64, at(3), &s), STATUS_OK);
	assert_int_equal(s.n_tokens, 45);
	assert_int_equal(s.pages[2], page);
	kv_seq_release(f.pool, &s);
	/* Not across salts, and not what lies behind the prompt's end. */
	struct kv_key other = f.root;
	other.bytes[3] ^= 1;
	assert_int_equal(kv_prefix_get(f.prefix, under(&other), z, 64, at(4), &s), STATUS_OK);
	assert_int_equal(s.n_tokens, 0);
	assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), x, 37, at(5), &s), STATUS_OK);
	assert_int_equal(s.n_tokens, 37);
	kv_seq_release(f.pool, &s);
	teardown(&f);
}

static void a_weak_reference_knows_what_is_left(void **state)
{
	(void)state;
	struct fixture f;
	int32_t tokens[40];
	struct kv_weak weak = KV_WEAK_INIT;
	setup(&f, 20);
	fill(tokens, 40, 0);
	struct kv_seq a = computed(&f, 40);
	kv_prefix_put(f.prefix, under(&f.root), tokens, &a, 0, at(1));
	kv_prefix_put_tail(f.prefix, tokens, &a, at(1));
	kv_prefix_weaken(f.prefix, &a, &weak);
	kv_seq_release(f.pool, &a);
	assert_int_equal(weak.n_tokens, 40);
	assert_int_equal(kv_prefix_n_weak(f.prefix, weak.pages[2].page), 1);
	for (int32_t n = 3; n > 0; n--) {
		assert_int_equal(kv_weak_alive(f.prefix, &weak), n);
		assert_true(kv_prefix_evict(f.prefix, 2, EVICT_FOR_PROMPT));
	}
	assert_int_equal(kv_weak_alive(f.prefix, &weak), 0);
	assert_false(kv_prefix_has(f.prefix, &weak.keys[0]));
	/* The same content computed again is not what was referred to, but can be found by its key. */
	a = computed(&f, 40);
	kv_prefix_put(f.prefix, under(&f.root), tokens, &a, 0, at(3));
	assert_int_equal(kv_weak_alive(f.prefix, &weak), 0);
	assert_true(kv_prefix_has(f.prefix, &weak.keys[0]) && kv_prefix_has(f.prefix, &weak.keys[1]));
	assert_false(kv_prefix_has(f.prefix, &weak.keys[2])); /* the tail */
	kv_seq_release(f.pool, &a);
	kv_weak_free(f.prefix, &weak);
	/* Each reference is counted on what it refers to, and only there. */
	struct kv_weak other = KV_WEAK_INIT;
	struct kv_seq b = KV_SEQ_INIT;
	kv_prefix_get(f.prefix, under(&f.root), tokens, 32, at(4), &b);
	kv_prefix_weaken(f.prefix, &b, &weak);
	kv_prefix_weaken(f.prefix, &b, &other);
	int32_t page = b.pages[0];
	assert_int_equal(kv_prefix_n_weak(f.prefix, page), 2);
	kv_weak_free(f.prefix, &weak);
	assert_int_equal(kv_prefix_n_weak(f.prefix, page), 1);
	kv_seq_release(f.pool, &b);
	while (kv_prefix_evict(f.prefix, 5, EVICT_FOR_PROMPT))
		;
	assert_int_equal(kv_prefix_n_weak(f.prefix, page), 0);
	kv_weak_free(f.prefix, &other);
	teardown(&f);
}

/*
 * Random sequences with few distinct beginnings, against the tokens themselves: whatever the index says, a page's
 * content is what was computed there, copies, tails and their handing over included.
 */
static void random_workload(const char *policy)
{
	enum { PAGES = 60, SEQS = 8, LEN = 160 };
	static int32_t tokens[SEQS][LEN];
	struct kv_seq seq[SEQS] = {{0}};
	struct kv_prefix_stats st;
	struct fixture f;
	uint64_t rng = 77;
	int64_t n_tails = 0;
	setup_policy(&f, PAGES, policy);
	for (int round = 0; round < 20000; round++) {
		int i = (int)(unit_rand(&rng) % SEQS);
		kv_seq_release(f.pool, &seq[i]);
		if (unit_rand(&rng) % 4 == 0)
			continue;
		int32_t n = 1 + (int32_t)(unit_rand(&rng) % LEN), family = (int32_t)(unit_rand(&rng) % 3),
		        cut = (int32_t)(unit_rand(&rng) % LEN);
		for (int32_t t = 0; t < n; t++)
			tokens[i][t] = t < cut ? family : (int32_t)(unit_rand(&rng) % 2) + 10;
		assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), tokens[i], n, at(round), &seq[i]), STATUS_OK);
		for (int32_t t = 0; t < seq[i].n_tokens; t++)
			assert_int_equal(*cell(&f, &seq[i], t), tokens[i][t]);
		int32_t known = seq[i].n_tokens / KV_PAGE_TOKENS;
		while (kv_seq_pages_needed(f.pool, &seq[i], n - seq[i].n_tokens) > kv_pool_n_free(f.pool)) {
			if (!kv_prefix_evict(f.prefix, round, EVICT_FOR_PROMPT))
				break;
		}
		if (kv_seq_prepare(f.pool, &seq[i], n - seq[i].n_tokens) != STATUS_OK) {
			kv_seq_truncate(f.pool, &seq[i], seq[i].n_tokens);
			continue;
		}
		for (int32_t t = seq[i].n_tokens; t < n; t++) {
			assert_int_equal(kv_pool_refs(f.pool, seq[i].pages[t / KV_PAGE_TOKENS]), 1);
			*cell(&f, &seq[i], t) = tokens[i][t];
		}
		seq[i].n_tokens = n;
		kv_prefix_put(f.prefix, under(&f.root), tokens[i], &seq[i], known, at(round));
		if (unit_rand(&rng) % 2)
			kv_prefix_put_tail(f.prefix, tokens[i], &seq[i], at(round));
		n_tails += seq[i].n_tokens % KV_PAGE_TOKENS != 0;
		kv_prefix_stats(f.prefix, &st);
		assert_true(st.n_idle >= 0 && st.n_idle <= st.n_pages);
	}
	kv_prefix_stats(f.prefix, &st);
	assert_true(n_tails > 1000 && st.n_tails > 0);
	assert_true(st.hits > 1000 && st.evicted[EVICT_FOR_PROMPT] > 1000);
	for (int i = 0; i < SEQS; i++)
		kv_seq_release(f.pool, &seq[i]);
	kv_prefix_stats(f.prefix, &st);
	assert_int_equal(st.n_idle, st.n_pages);
	while (kv_prefix_evict(f.prefix, 0, EVICT_FOR_PROMPT))
		;
	assert_int_equal(kv_pool_n_free(f.pool), PAGES);
	teardown(&f);
}

static void a_random_workload_never_serves_a_wrong_page(void **state)
{
	(void)state;
	for (size_t i = 0; evict_policy_name(i); i++)
		random_workload(evict_policy_name(i));
}

/*
 * A sequence with a window leaves its beginning to the index, where it is found as long as there is room. Then it goes
 * although it is no leaf, and with it the entries of what follows, whose pages the sequence keeps.
 */
static void the_beginning_of_a_windowed_sequence_can_go(void **state)
{
	(void)state;
	struct fixture f;
	int32_t tokens[100];
	struct kv_prefix_stats stats;
	struct kv_weak weak = KV_WEAK_INIT;
	setup(&f, 8);
	fill(tokens, 100, 0);
	struct kv_seq a = computed(&f, 96), b = KV_SEQ_INIT;
	struct kv_chain chain = kv_chain_of(&f.root);
	assert_int_equal(kv_prefix_put(f.prefix, &chain, tokens, &a, 0, at(1)), 6);
	kv_seq_let_go(f.pool, &a, 30);
	assert_int_equal(a.n_gone, 4);
	assert_int_equal(kv_prefix_get(f.prefix, under(&f.root), tokens, 100, at(2), &b), STATUS_OK);
	assert_int_equal(b.n_tokens, 96);
	/* What a session keeps of it reaches back to the beginning. */
	kv_prefix_weaken(f.prefix, &a, &weak);
	assert_int_equal(weak.n_pages, 6);
	for (int i = 0; i < 6; i++)
		assert_int_equal(weak.pages[i].page, b.pages[i]);
	assert_int_equal(kv_weak_alive(f.prefix, &weak), 6);
	assert_false(kv_prefix_evict(f.prefix, 3, EVICT_FOR_PROMPT));
	kv_seq_release(f.pool, &b);
	kv_prefix_stats(f.prefix, &stats);
	assert_int_equal(stats.n_idle, 4);
	for (int32_t left = 3; left >= 0; left--) {
		assert_true(kv_prefix_evict(f.prefix, 4, EVICT_FOR_PROMPT));
		assert_int_equal(kv_prefix_match(f.prefix, under(&f.root), tokens, 100), left);
		assert_int_equal(kv_weak_alive(f.prefix, &weak), left);
	}
	assert_false(kv_prefix_evict(f.prefix, 5, EVICT_FOR_PROMPT));
	assert_int_equal(kv_pool_n_free(f.pool), 6);
	/* Behind what is forgotten nothing is indexed any more, from wherever it is asked for. */
	assert_int_equal(kv_seq_prepare(f.pool, &a, 20), STATUS_OK);
	a.n_tokens += 4;
	for (int32_t first = 0; first <= 6; first += 3)
		assert_true(kv_prefix_put(f.prefix, &chain, tokens, &a, first, at(6)) <= first);
	assert_false(kv_prefix_put_tail(f.prefix, tokens, &a, at(6)));
	kv_prefix_hint(f.prefix, &a, 6, 1, EVICT_SHORT_ANSWER);
	kv_prefix_weaken(f.prefix, &a, &weak);
	assert_int_equal(weak.n_pages, 0);
	kv_weak_free(f.prefix, &weak);
	kv_seq_release(f.pool, &a);
	kv_chain_free(&chain);
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(the_beginning_of_a_windowed_sequence_can_go),
          cmocka_unit_test(full_pages_are_found_again_and_shared),
          cmocka_unit_test(pages_with_values_that_are_no_numbers_are_shared_with_nobody),
          cmocka_unit_test(salts_share_nothing), cmocka_unit_test(equal_content_computed_twice_ends_up_in_one_place),
          cmocka_unit_test(pages_are_added_as_they_fill),
          cmocka_unit_test(eviction_takes_leaves_that_nobody_holds_oldest_first),
          cmocka_unit_test(a_request_uses_a_page_once_however_often_it_asks),
          cmocka_unit_test(a_hold_keeps_pages_and_is_no_use),
          cmocka_unit_test(what_a_live_session_vouches_for_goes_later),
          cmocka_unit_test(an_evicted_page_that_comes_back_is_known),
          cmocka_unit_test(a_conversation_goes_on_from_the_tail_it_left),
          cmocka_unit_test(a_prompt_that_parts_within_a_page_shares_its_beginning),
          cmocka_unit_test(a_weak_reference_knows_what_is_left),
          cmocka_unit_test(a_policy_that_does_not_exist_is_refused),
          cmocka_unit_test(a_random_workload_never_serves_a_wrong_page))
