/*
 * The keys of pages, and what happens when they are no good: each thing that KV depends on changes the key by itself,
 * no two inputs read as the same bytes, and an index whose keys collide still serves nothing wrong.
 */
#include "tests/unit/unit.h"

#include "engine/kv/prefix.h"
#include "tests/support/memory_backend.h"

/* ---- Roots ---- */

static struct kv_root plain_root(void)
{
	return (struct kv_root){.n_layer = 2,
	                        .n_head_kv = 3,
	                        .head_dim = 4,
	                        .page_tokens = KV_PAGE_TOKENS,
	                        .kv_type = QUANT_F16,
	                        .scheme = str_from("cpu"),
	                        .rope = str_from("rope"),
	                        .tenant = str_from("acme"),
	                        .salt = str_from("salt")};
}

static struct kv_key key_of(const struct kv_root *root)
{
	struct kv_key key;
	kv_key_root(root, &key);
	return key;
}

/* All of them differ. */
static void assert_distinct(const struct kv_key *keys, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		for (size_t j = 0; j < i; j++)
			assert_memory_not_equal(&keys[i], &keys[j], sizeof keys[i]);
	}
}

static void each_bit_of_each_field_of_the_root_changes_the_key(void **state)
{
	(void)state;
	struct kv_root plain = plain_root();
	const struct kv_key before = key_of(&plain);
	int n_flipped = 0;
	for (size_t byte = 0; byte < SHA256_BYTES; byte++) {
		for (int digest = 0; digest < 2; digest++) {
			struct kv_root r = plain;
			(digest ? r.adapter : r.weights)[byte] ^= (uint8_t)(1 << byte % 8);
			struct kv_key key = key_of(&r);
			assert_memory_not_equal(&key, &before, sizeof key);
			n_flipped++;
		}
	}
	for (int field = 0; field < 5; field++) {
		for (int bit = 0; bit < 32; bit++) {
			struct kv_root r = plain;
			int32_t *fields[] = {&r.n_layer, &r.n_head_kv, &r.head_dim, &r.page_tokens, &r.kv_type};
			*fields[field] = (int32_t)((uint32_t)*fields[field] ^ 1u << bit);
			struct kv_key key = key_of(&r);
			assert_memory_not_equal(&key, &before, sizeof key);
			n_flipped++;
		}
	}
	for (int field = 0; field < 4; field++) {
		struct kv_root r = plain;
		struct str *fields[] = {&r.scheme, &r.rope, &r.tenant, &r.salt};
		char text[5] = {0};
		memcpy(text, fields[field]->p, fields[field]->n);
		fields[field]->p = text;
		for (size_t bit = 0; bit < fields[field]->n * 8; bit++) {
			text[bit / 8] ^= (char)(1 << bit % 8);
			struct kv_key key = key_of(&r);
			assert_memory_not_equal(&key, &before, sizeof key);
			text[bit / 8] ^= (char)(1 << bit % 8);
			n_flipped++;
		}
	}
	assert_int_equal(n_flipped, 2 * 32 + 5 * 32 + (3 + 4 + 4 + 4) * 8);
}

static void equal_values_in_different_fields_are_different_keys(void **state)
{
	(void)state;
	struct kv_root roots[12];
	struct kv_key keys[12];
	for (int i = 0; i < 12; i++)
		roots[i] = (struct kv_root){.page_tokens = 0};
	roots[0].weights[0] = 1;
	roots[1].adapter[0] = 1;
	roots[2].n_layer = 1;
	roots[3].n_head_kv = 1;
	roots[4].head_dim = 1;
	roots[5].page_tokens = 1;
	roots[6].kv_type = 1;
	roots[7].scheme = (struct str){"\1", 1};
	roots[8].rope = (struct str){"\1", 1};
	roots[9].tenant = (struct str){"\1", 1};
	roots[10].salt = (struct str){"\1", 1};
	for (int i = 0; i < 12; i++)
		keys[i] = key_of(&roots[i]);
	assert_distinct(keys, 12);
}

/*
 * Every way to cut one string of bytes into the four texts of a root, empty ones and bytes that look like lengths
 * included.
 */
static void no_cut_of_the_same_bytes_reads_like_another(void **state)
{
	(void)state;
	static const char bytes[8] = {1, 0, 0, 0, 0, 0, 0, 0};
	struct kv_key keys[165];
	size_t n = 0;
	for (size_t a = 0; a <= 8; a++) {
		for (size_t b = a; b <= 8; b++) {
			for (size_t c = b; c <= 8; c++) {
				struct kv_root r = plain_root();
				r.scheme = (struct str){bytes, a};
				r.rope = (struct str){bytes + a, b - a};
				r.tenant = (struct str){bytes + b, c - b};
				r.salt = (struct str){bytes + c, 8 - c};
				keys[n++] = key_of(&r);
			}
		}
	}
	assert_int_equal(n, sizeof keys / sizeof *keys);
	assert_distinct(keys, n);
}

/* A text that holds the encoding of what follows it does not stand for both. */
static void a_field_cannot_forge_its_neighbours(void **state)
{
	(void)state;
	struct kv_root honest = plain_root(), forged = plain_root();
	static const char tail[] = "cpu\4\0\0\0\0\0\0\0rope\4\0\0\0\0\0\0\0acme";
	forged.scheme = (struct str){tail, sizeof tail - 1};
	forged.rope = forged.tenant = str_from("");
	struct kv_key a = key_of(&honest), b = key_of(&forged);
	assert_memory_not_equal(&a, &b, sizeof a);
}

/* ---- Pages ---- */

static void each_token_and_the_key_before_change_the_key_of_a_page(void **state)
{
	(void)state;
	struct kv_key before = {{0}}, plain, key;
	int32_t tokens[KV_PAGE_TOKENS];
	for (int i = 0; i < KV_PAGE_TOKENS; i++)
		tokens[i] = i * 1000;
	kv_key_next(&before, tokens, &plain);
	for (int i = 0; i < KV_PAGE_TOKENS; i++) {
		for (int bit = 0; bit < 32; bit++) {
			int32_t token = tokens[i];
			tokens[i] = (int32_t)((uint32_t)token ^ 1u << bit);
			kv_key_next(&before, tokens, &key);
			assert_memory_not_equal(&key, &plain, sizeof key);
			tokens[i] = token;
		}
	}
	for (int byte = 0; byte < SHA256_BYTES; byte++) {
		before.bytes[byte] ^= 0x80;
		kv_key_next(&before, tokens, &key);
		assert_memory_not_equal(&key, &plain, sizeof key);
		before.bytes[byte] ^= 0x80;
	}
	/* And their order. */
	int32_t first = tokens[0];
	tokens[0] = tokens[1];
	tokens[1] = first;
	kv_key_next(&before, tokens, &key);
	assert_memory_not_equal(&key, &plain, sizeof key);
}

static void a_tail_is_no_page_and_no_shorter_or_longer_tail(void **state)
{
	(void)state;
	struct kv_key before = {{7}}, keys[2 * KV_PAGE_TOKENS];
	int32_t tokens[KV_PAGE_TOKENS] = {0};
	size_t n = 0;
	for (int32_t k = 1; k < KV_PAGE_TOKENS; k++)
		kv_key_tail(&before, tokens, k, &keys[n++]);
	kv_key_next(&before, tokens, &keys[n++]);
	tokens[0] = 1;
	for (int32_t k = 1; k < KV_PAGE_TOKENS; k++)
		kv_key_tail(&before, tokens, k, &keys[n++]);
	keys[n++] = before;
	assert_distinct(keys, n);
}

static void the_salt_reaches_every_page_of_a_chain(void **state)
{
	(void)state;
	struct kv_root a = plain_root(), b = plain_root();
	b.salt = str_from("other");
	struct kv_key x = key_of(&a), y = key_of(&b);
	int32_t tokens[KV_PAGE_TOKENS] = {1, 2, 3};
	for (int i = 0; i < 100; i++) {
		assert_memory_not_equal(&x, &y, sizeof x);
		kv_key_next(&x, tokens, &x);
		kv_key_next(&y, tokens, &y);
	}
}

/* ---- Keys that collide ---- */

static int32_t n_forged;

/* A key is one of very few, so that pages of equal keys and other content are everywhere. */
static void forge(const int32_t *tokens, int32_t n, struct kv_key *out)
{
	memset(out, 0, sizeof *out);
	out->bytes[0] = (uint8_t)(tokens[n - 1] & 1);
	n_forged++;
}

static void forged_next(const struct kv_key *before, const int32_t *tokens, struct kv_key *out)
{
	(void)before;
	forge(tokens, KV_PAGE_TOKENS, out);
}

static void forged_tail(const struct kv_key *before, const int32_t *tokens, int32_t n, struct kv_key *out)
{
	(void)before;
	forge(tokens, n, out);
}

static const struct kv_key_ops forged = {forged_next, forged_tail};

static struct memory_backend mem;

struct fixture {
	struct kv_pool *pool;
	struct kv_prefix *prefix;
};

static void setup(struct fixture *f, int32_t n_pages)
{
	/* Two numbers a position: its token, and a digest of all before it. */
	struct kv_layout layout = {1, 1, 2, KV_PAGE_TOKENS, QUANT_F16, KV_PAGE_TOKENS * 8, KV_PAGE_TOKENS * 8};
	memory_backend_init(&mem);
	assert_int_equal(kv_pool_create(&mem.base, &layout, n_pages, &f->pool, NULL), STATUS_OK);
	assert_int_equal(kv_prefix_create(f->pool, NULL, &f->prefix, NULL), STATUS_OK);
	kv_prefix_set_key_ops(f->prefix, &forged);
}

static void teardown(struct fixture *f)
{
	kv_prefix_destroy(f->prefix);
	assert_int_equal(kv_pool_destroy(f->pool), STATUS_OK);
}

static uint64_t *cell(struct fixture *f, const struct kv_seq *s, int32_t t)
{
	char *page = (char *)kv_pool_slab(f->pool) + (size_t)s->pages[t / KV_PAGE_TOKENS] * KV_PAGE_TOKENS * 8;
	return (uint64_t *)page + t % KV_PAGE_TOKENS;
}

/* What a position's KV is: a function of its token and all before it. */
static uint64_t content(uint64_t before, int32_t token)
{
	return (before + (uint64_t)token + 1) * 0x9E3779B97F4A7C15ull;
}

/* Checks what is known of a sequence, then computes positions up to n. */
static void compute(struct fixture *f, struct kv_seq *s, const int32_t *tokens, int32_t n)
{
	uint64_t c = 0;
	for (int32_t t = 0; t < n; t++) {
		c = content(c, tokens[t]);
		if (t < s->n_tokens)
			assert_true(*cell(f, s, t) == c);
		else
			*cell(f, s, t) = c;
	}
	s->n_tokens = n;
}

static void a_forged_key_is_caught_by_comparison_and_counted(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_use use = {.now_ms = 1};
	struct kv_chain x_chain = {.n_keys = 0}, y_chain = {.n_keys = 0};
	struct kv_seq a = KV_SEQ_INIT, b = KV_SEQ_INIT, c = KV_SEQ_INIT;
	struct kv_prefix_stats st;
	int32_t x[2 * KV_PAGE_TOKENS] = {0}, y[2 * KV_PAGE_TOKENS] = {0};
	setup(&f, 10);
	y[3] = 1; /* the keys of x and y are the same, page by page */
	assert_int_equal(kv_seq_prepare(f.pool, &a, 32), STATUS_OK);
	compute(&f, &a, x, 32);
	assert_int_equal(kv_prefix_put(f.prefix, &x_chain, x, &a, 0, &use), 2);
	/* Its own first page has the key of its second: passed over for its content. */
	kv_prefix_stats(f.prefix, &st);
	uint64_t before = st.collisions;
	assert_int_equal(kv_prefix_get(f.prefix, &y_chain, y, 32, &use, &b), STATUS_OK);
	assert_int_equal(b.n_tokens, 0);
	kv_prefix_stats(f.prefix, &st);
	assert_true(st.collisions > before);
	assert_memory_equal(x_chain.keys, y_chain.keys, sizeof *x_chain.keys);
	/* Both live under the same keys, and each finds its own. */
	assert_int_equal(kv_seq_prepare(f.pool, &b, 32), STATUS_OK);
	compute(&f, &b, y, 32);
	assert_int_equal(kv_prefix_put(f.prefix, &y_chain, y, &b, 0, &use), 2);
	assert_int_equal(kv_prefix_get(f.prefix, &x_chain, x, 32, &use, &c), STATUS_OK);
	assert_int_equal(c.n_tokens, 32);
	assert_int_equal(c.pages[0], a.pages[0]);
	assert_int_equal(c.pages[1], a.pages[1]);
	kv_seq_release(f.pool, &c);
	assert_int_equal(kv_prefix_get(f.prefix, &y_chain, y, 32, &use, &c), STATUS_OK);
	assert_int_equal(c.pages[1], b.pages[1]);
	kv_seq_release(f.pool, &a);
	kv_seq_release(f.pool, &b);
	kv_seq_release(f.pool, &c);
	kv_chain_free(&x_chain);
	kv_chain_free(&y_chain);
	teardown(&f);
}

/* The same random work as with good keys: everything that is found is right, and much is found. */
static void an_index_with_colliding_keys_serves_nothing_wrong(void **state)
{
	(void)state;
	enum { PAGES = 60, SEQS = 6, LEN = 160 };
	static int32_t tokens[SEQS][LEN];
	struct kv_seq seq[SEQS] = {{0}};
	struct kv_chain chain[SEQS] = {{.n_keys = 0}};
	struct kv_prefix_stats st;
	struct fixture f;
	uint64_t rng = 99;
	n_forged = 0;
	setup(&f, PAGES);
	for (int round = 0; round < 20000; round++) {
		struct kv_use use = {.now_ms = round};
		int i = (int)(unit_rand(&rng) % SEQS);
		struct kv_seq *s = &seq[i];
		kv_prefix_put_tail(f.prefix, tokens[i], s, &use);
		kv_seq_release(f.pool, s);
		kv_chain_free(&chain[i]);
		int32_t n = 1 + (int32_t)(unit_rand(&rng) % LEN), family = (int32_t)(unit_rand(&rng) % 3),
		        cut = (int32_t)(unit_rand(&rng) % LEN);
		for (int32_t t = 0; t < n; t++)
			tokens[i][t] = t < cut ? family : (int32_t)(unit_rand(&rng) % 2) + 10;
		assert_int_equal(kv_prefix_get(f.prefix, &chain[i], tokens[i], n, &use, s), STATUS_OK);
		kv_seq_truncate(f.pool, s, s->n_tokens < n ? s->n_tokens : n - 1);
		while (kv_seq_pages_needed(f.pool, s, n - s->n_tokens) > kv_pool_n_free(f.pool)) {
			if (!kv_prefix_evict(f.prefix, round, EVICT_FOR_PROMPT))
				break;
		}
		if (kv_seq_prepare(f.pool, s, n - s->n_tokens) != STATUS_OK) {
			kv_seq_release(f.pool, s);
			continue;
		}
		compute(&f, s, tokens[i], n);
		kv_prefix_put(f.prefix, &chain[i], tokens[i], s, 0, &use);
	}
	kv_prefix_stats(f.prefix, &st);
	assert_true(n_forged > 20000 && st.collisions > 20000 && st.hits > 1000 && st.evicted[EVICT_FOR_PROMPT] > 1000);
	for (int i = 0; i < SEQS; i++) {
		kv_seq_release(f.pool, &seq[i]);
		kv_chain_free(&chain[i]);
	}
	teardown(&f);
}

/* A key is computed once for a chain, not once for each question. */
static void a_chain_computes_each_key_once(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_use use = {.now_ms = 1};
	struct kv_chain chain = {.n_keys = 0};
	struct kv_seq a = KV_SEQ_INIT, b = KV_SEQ_INIT;
	int32_t tokens[20 * KV_PAGE_TOKENS];
	for (int32_t i = 0; i < 20 * KV_PAGE_TOKENS; i++)
		tokens[i] = i;
	setup(&f, 40);
	n_forged = 0;
	/* Of what is not known only the first page is asked for. */
	assert_int_equal(kv_prefix_match(f.prefix, &chain, tokens, 320), 0);
	assert_int_equal(n_forged, 1);
	assert_int_equal(kv_seq_prepare(f.pool, &a, 320), STATUS_OK);
	compute(&f, &a, tokens, 320);
	assert_int_equal(kv_prefix_put(f.prefix, &chain, tokens, &a, 0, &use), 20);
	for (int i = 0; i < 10; i++) {
		assert_int_equal(kv_prefix_match(f.prefix, &chain, tokens, 320), 20);
		assert_int_equal(kv_prefix_get(f.prefix, &chain, tokens, 320, &use, &b), STATUS_OK);
		kv_seq_release(f.pool, &b);
	}
	assert_int_equal(n_forged, 20);
	kv_seq_release(f.pool, &a);
	kv_chain_free(&chain);
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(each_bit_of_each_field_of_the_root_changes_the_key),
          cmocka_unit_test(equal_values_in_different_fields_are_different_keys),
          cmocka_unit_test(no_cut_of_the_same_bytes_reads_like_another),
          cmocka_unit_test(a_field_cannot_forge_its_neighbours),
          cmocka_unit_test(each_token_and_the_key_before_change_the_key_of_a_page),
          cmocka_unit_test(a_tail_is_no_page_and_no_shorter_or_longer_tail),
          cmocka_unit_test(the_salt_reaches_every_page_of_a_chain),
          cmocka_unit_test(a_forged_key_is_caught_by_comparison_and_counted),
          cmocka_unit_test(an_index_with_colliding_keys_serves_nothing_wrong),
          cmocka_unit_test(a_chain_computes_each_key_once))
