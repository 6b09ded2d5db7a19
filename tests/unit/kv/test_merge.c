/*
 * Merging over the pages of every backend of this machine: what becomes one, where it stands, and what attention makes
 * of it.
 */
#include "tests/unit/unit.h"

#include <math.h>

#include "engine/kv/merge.h"
#include "engine/kv/tier_codec.h"

enum { PAGE = KV_PAGE_TOKENS, LAYERS = 2, HEADS = 2, DIM = 24, PAGES = 40, MOST = 400 };

static const struct kv_holder me = {KV_HOLDER_OTHER, 1}, other = {KV_HOLDER_OTHER, 2};
static const char *const devices[] = {"cpu-reference",	 "cpu-avx2", "cpu-avx512",
				      "cpu-avx512-bf16", "cpu-neon", "cpu-neon-dotprod"};
static const float inv_freq[] = {1, 0.3f, 0.1f, 0.03f, 0.01f, 0.003f, 0.001f, 0.0003f};
/* The last does not turn at all. */
static const float still[] = {0};
static const struct rope_params ropes[] = {
	{ROPE_INTERLEAVED, 16, inv_freq, 1}, {ROPE_HALVES, 16, inv_freq, 1}, {ROPE_HALVES, 2, still, 1}};

static float noise(uint64_t *seed)
{
	return (float)((double)(int64_t)unit_rand(seed) / 9223372036854775808.0);
}

/* Keys before rotation and values of tokens, and what they are in pages. */
struct talk {
	struct backend *b;
	struct kv_layout layout;
	struct kv_order order;
	struct kv_pool *pool;
	struct kv_seq seq;
	const struct rope_params *rope;
	struct kv_page_merger *merger;
	float k[MOST][LAYERS][HEADS][DIM], v[MOST][LAYERS][HEADS][DIM];
	int32_t n; /* tokens */
};

static const struct rope_params *rope_of(const void *arg, int32_t layer)
{
	(void)layer;
	return arg;
}

/* NULL when this machine has none of the kind. */
static struct talk *open_talk(const char *device, const char *type, const struct rope_params *rope)
{
	struct backend_options o = {.device = device, .n_threads = 1};
	struct backend_info info;
	struct kv_choice choice;
	struct backend *b;
	if (backend_create(&o, &b, NULL) != STATUS_OK)
		return NULL;
	struct talk *t = calloc(1, sizeof *t);
	assert_non_null(t);
	t->b = b;
	t->rope = rope;
	t->seq = KV_SEQ_INIT;
	t->seq.holder = me;
	assert_int_equal(kv_choice_make(b, type, &choice, NULL), STATUS_OK);
	b->ops->info(b, &info);
	t->order = info.kv_order;
	assert_int_equal(kv_layout_for(b, &t->layout, LAYERS, HEADS, DIM), STATUS_OK);
	assert_int_equal(kv_pool_create(b, &t->layout, PAGES, &t->pool, NULL), STATUS_OK);
	assert_int_equal(b->ops->reserve(b, PAGE, HEADS * DIM, &t->layout), STATUS_OK);
	assert_int_equal(kv_page_merger_create(b, kv_pool_slab(t->pool), &t->layout, rope_of, rope, &t->merger),
			 STATUS_OK);
	return t;
}

static void close_talk(struct talk *t)
{
	kv_page_merger_destroy(t->merger);
	kv_seq_release(t->pool, &t->seq);
	assert_int_equal(kv_pool_destroy(t->pool), STATUS_OK);
	t->b->ops->destroy(t->b);
	free(t);
}

/* A token whose keys and values are `like`'s before rotation, or new ones. */
static void say(struct talk *t, int32_t like, uint64_t *seed)
{
	for (int layer = 0; layer < LAYERS; layer++)
		for (int head = 0; head < HEADS; head++)
			for (int d = 0; d < DIM; d++) {
				t->k[t->n][layer][head][d] = like < 0 ? noise(seed) : t->k[like][layer][head][d];
				t->v[t->n][layer][head][d] = like < 0 ? noise(seed) : t->v[like][layer][head][d];
			}
	t->n++;
}

static void start_step(struct talk *t, struct batch_seq *seq, int32_t *position, struct batch *batch, int32_t at,
		       int32_t n)
{
	static int32_t token[PAGE];
	for (int32_t i = 0; i < n; i++)
		position[i] = at + i;
	*seq = (struct batch_seq){.n_rows = n,
				  .first_position = kv_seq_places(&t->seq),
				  .block_table = t->seq.pages,
				  .n_pages = t->seq.n_pages};
	seq->plus = t->seq.n_buckets > 0 ? t->seq.plus : NULL;
	seq->n_plus = kv_merge_n_plus(&t->seq);
	*batch = (struct batch){.n_rows = n, .token = token, .position = position, .n_seqs = 1, .seq = seq};
	assert_int_equal(t->b->ops->step_begin(t->b, batch), STATUS_OK);
}

/* Computes up to all of its tokens, a page at a time. */
static void compute(struct talk *t)
{
	static float k[PAGE][HEADS][DIM], v[PAGE][HEADS][DIM], q[PAGE][HEADS][DIM];
	int32_t position[PAGE];
	struct batch_seq seq;
	struct batch batch;
	for (int32_t at = t->seq.n_tokens; at < t->n; at += PAGE) {
		assert_int_equal(kv_seq_prepare(t->pool, &t->seq, PAGE), STATUS_OK);
		start_step(t, &seq, position, &batch, at, PAGE);
		for (int layer = 0; layer < LAYERS; layer++) {
			for (int i = 0; i < PAGE; i++) {
				memcpy(k[i], t->k[at + i][layer], sizeof k[i]);
				memcpy(v[i], t->v[at + i][layer], sizeof v[i]);
			}
			assert_int_equal(t->b->ops->rope(t->b, &q[0][0][0], HEADS, &k[0][0][0], HEADS, DIM, t->rope),
					 STATUS_OK);
			assert_int_equal(t->b->ops->kv_write(t->b, kv_pool_slab(t->pool), &t->layout, layer,
							     &k[0][0][0], &v[0][0][0]),
					 STATUS_OK);
		}
		assert_int_equal(t->b->ops->step_end(t->b), STATUS_OK);
		t->seq.n_tokens += PAGE;
	}
}

static uint16_t *element(struct talk *t, int32_t page, int32_t token, int layer, int head, bool value, int d)
{
	size_t block = t->order.pairs ? (size_t)((layer * HEADS + head) * 2 + value)
				      : (size_t)((layer * 2 + value) * HEADS + head);
	char *at = (char *)kv_pool_slab(t->pool) + (size_t)page * t->layout.page_stride;
	return (uint16_t *)(void *)at + block * PAGE * DIM +
	       kv_codec_place(value ? t->order.values : t->order.keys, DIM, token, d);
}

static double value_at(struct talk *t, int32_t place, int layer, int head, bool value, int d)
{
	uint16_t x = *element(t, t->seq.pages[place / PAGE], place % PAGE, layer, head, value, d);
	return t->layout.type == QUANT_BF16 ? quant_bf16_to_float(x) : quant_half_to_float(x);
}

/* The key at a place, turned back to position 0. */
static void key_at(struct talk *t, int32_t place, double position, int layer, int head, double *out)
{
	int half = t->rope->n_dims / 2, step = t->rope->pairing == ROPE_INTERLEAVED ? 2 : 1,
	    apart = t->rope->pairing == ROPE_INTERLEAVED ? 1 : half;
	for (int d = 0; d < DIM; d++)
		out[d] = value_at(t, place, layer, head, false, d);
	for (int i = 0; i < half; i++) {
		double angle = -position * (double)t->rope->inv_freq[i], a = out[i * step], b = out[i * step + apart];
		out[i * step] = a * cos(angle) - b * sin(angle);
		out[i * step + apart] = a * sin(angle) + b * cos(angle);
	}
}

static void merge(struct talk *t, int32_t first, int32_t n, int32_t left, const bool *keep)
{
	static const bool none[PAGES];
	assert_int_equal(kv_seq_own(t->pool, &t->seq, first, n), STATUS_OK);
	assert_int_equal(kv_merge(kv_page_merger_ops(t->merger), t->pool, &t->seq, first, n, left, keep ? keep : none),
			 STATUS_OK);
}

static int32_t count(const struct kv_seq *s)
{
	int32_t sum = 0;
	for (int32_t i = 0; i < s->n_buckets; i++)
		sum += s->buckets[i].n;
	return sum;
}

/* For each kind of page and of rotation. */
static void everywhere(void (*test)(struct talk *t))
{
	int tried = 0;
	for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
		for (int type = 0; type < 2; type++)
			for (size_t r = 0; r < sizeof ropes / sizeof *ropes; r++) {
				struct talk *t = open_talk(devices[i], type ? "bf16" : "f16", &ropes[r]);
				if (!t)
					break;
				test(t);
				close_talk(t);
				tried++;
			}
	assert_true(tried >= 6);
}

static void check_runs(struct talk *t)
{
	uint64_t seed = 3;
	int32_t group[2 * PAGE], begin = PAGE;
	double off = t->layout.type == QUANT_BF16 ? 0.03 : 0.004;
	for (int i = 0; i < PAGE; i++)
		say(t, -1, &seed);
	/* 4 pages of 32 runs. */
	for (int g = 0; g < 2 * PAGE; g++) {
		group[g] = g % 2 == 0 ? 1 + g / 2 % 5 : 4 - (g / 2 % 5) + (g >= 2 * PAGE - 4);
		group[g] = group[g] < 1 ? 1 : group[g];
	}
	for (int g = 0; g < 2 * PAGE; g++)
		for (int i = 0; i < group[g] && t->n < 5 * PAGE; i++)
			say(t, i == 0 ? -1 : t->n - 1, &seed);
	while (t->n < 6 * PAGE)
		say(t, -1, &seed);
	compute(t);
	int32_t n_groups = 0, sum = 0;
	for (; n_groups < 2 * PAGE && sum < 4 * PAGE; n_groups++)
		sum += group[n_groups];
	assert_true(n_groups <= 2 * PAGE);
	merge(t, 1, 4, 2, NULL);
	assert_int_equal(t->seq.n_pages, 4);
	assert_int_equal(t->seq.n_buckets, 3 * PAGE);
	assert_int_equal(t->seq.n_leading, 1);
	assert_int_equal(count(&t->seq), 5 * PAGE);
	assert_int_equal(kv_seq_places(&t->seq), 4 * PAGE);
	/* There are no more runs than places: no bucket has tokens of two. */
	for (int32_t place = PAGE; place < 3 * PAGE; place++) {
		const struct kv_bucket *b = &t->seq.buckets[place];
		assert_true(b->n >= 1);
		assert_memory_equal(t->k[begin], t->k[begin + b->n - 1], sizeof t->k[0]);
		assert_true(fabs(b->position - (begin + (b->n - 1) / 2.0)) < 1e-9);
		assert_true(fabs((double)t->seq.plus[place] - log(b->n)) < 1e-6);
		for (int layer = 0; layer < LAYERS; layer++)
			for (int head = 0; head < HEADS; head++) {
				double key[DIM];
				key_at(t, place, b->position, layer, head, key);
				for (int d = 0; d < DIM; d++) {
					double mean_k = 0, mean_v = 0;
					for (int32_t i = begin; i < begin + b->n; i++) {
						mean_k += (double)t->k[i][layer][head][d] / b->n;
						mean_v += (double)t->v[i][layer][head][d] / b->n;
					}
					assert_true(fabs(key[d] - mean_k) < off);
					assert_true(fabs(value_at(t, place, layer, head, true, d) - mean_v) < off);
				}
			}
		begin += b->n;
	}
	assert_int_equal(begin, 5 * PAGE);
	/* What is behind is as it was. */
	for (int32_t i = 0; i < PAGE; i++) {
		double key[DIM];
		key_at(t, 3 * PAGE + i, 5 * PAGE + i, 1, 1, key);
		for (int d = 0; d < DIM; d++)
			assert_true(fabs(key[d] - (double)t->k[5 * PAGE + i][1][1][d]) < off);
	}
}

static void a_bucket_has_the_means_of_a_run_and_stands_in_its_middle(void **state)
{
	(void)state;
	everywhere(check_runs);
}

/* Attention of a query behind all of it, for one layer. */
static void attend(struct talk *t, int layer, const float *q, float *out)
{
	float k[HEADS * DIM] = {0};
	int32_t position[PAGE];
	struct batch_seq seq;
	struct batch batch;
	const struct attention_params params = {.scale = 0.6f};
	assert_int_equal(kv_seq_prepare(t->pool, &t->seq, 1), STATUS_OK);
	start_step(t, &seq, position, &batch, t->seq.n_tokens, 1);
	assert_int_equal(t->b->ops->kv_write(t->b, kv_pool_slab(t->pool), &t->layout, layer, k, k), STATUS_OK);
	assert_int_equal(t->b->ops->attention(t->b, kv_pool_slab(t->pool), &t->layout, layer, q, HEADS, &params, out),
			 STATUS_OK);
	assert_int_equal(t->b->ops->step_end(t->b), STATUS_OK);
	kv_seq_truncate(t->pool, &t->seq, t->seq.n_tokens);
}

/* Without rotation, tokens with one key and value are to attention what their bucket is. */
static void check_attention(struct talk *t)
{
	uint64_t seed = 5;
	float q[HEADS * DIM], before[HEADS * DIM], after[HEADS * DIM];
	if (t->rope->inv_freq != still)
		return;
	while (t->n < 12 * PAGE)
		say(t, t->n % 5 == 0 || t->n < PAGE || t->n >= 11 * PAGE ? -1 : t->n - 1, &seed);
	compute(t);
	for (int i = 0; i < HEADS * DIM; i++)
		q[i] = 2 * noise(&seed);
	attend(t, 1, q, before);
	merge(t, 1, 10, 3, NULL);
	assert_int_equal(kv_merged_tokens(&t->seq) > 120, true);
	attend(t, 1, q, after);
	for (int i = 0; i < HEADS * DIM; i++)
		if (!(fabsf(before[i] - after[i]) < (t->layout.type == QUANT_BF16 ? 2e-2f : 2e-3f)))
			fail_msg("%d: %g was %g", i, (double)after[i], (double)before[i]);
}

static void a_bucket_weighs_what_its_tokens_weighed(void **state)
{
	(void)state;
	everywhere(check_attention);
}

/* Of every kind of number that is none, in keys and values, anywhere. */
static void check_unsound(struct talk *t)
{
	static const float bad[] = {NAN, INFINITY, -INFINITY};
	uint64_t seed = 7;
	while (t->n < 8 * PAGE)
		say(t, -1, &seed);
	compute(t);
	for (int i = 0; i < 6; i++) {
		uint16_t x = t->layout.type == QUANT_BF16 ? quant_float_to_bf16(bad[i % 3])
							  : quant_float_to_half(bad[i % 3]);
		*element(t, t->seq.pages[1 + i % 5], i * 3, i % LAYERS, i % HEADS, i >= 3, i * 4) = x;
	}
	merge(t, 1, 6, 5, NULL);
	assert_int_equal(t->seq.n_unsound, 6);
	assert_int_equal(count(&t->seq), 7 * PAGE - 6);
	/* A whole page of them, and more: places stand for nothing. */
	while (t->n < 10 * PAGE)
		say(t, -1, &seed);
	compute(t);
	uint16_t nan = t->layout.type == QUANT_BF16 ? quant_float_to_bf16(NAN) : quant_float_to_half(NAN);
	for (int i = 0; i < 2 * PAGE; i++)
		*element(t, t->seq.pages[6 + i / PAGE], i % PAGE, 0, 0, true, 0) = nan;
	merge(t, 1, 7, 6, NULL);
	assert_int_equal(t->seq.n_unsound, 6 + 2 * PAGE);
	assert_int_equal(count(&t->seq), 7 * PAGE - 6);
	assert_int_equal(t->seq.buckets[7 * PAGE - 1].n, 0);
	assert_true(t->seq.plus[7 * PAGE - 1] == KV_MERGE_NOTHING);
	for (int32_t place = 0; place < 7 * PAGE; place++)
		for (int layer = 0; layer < LAYERS; layer++)
			for (int head = 0; head < HEADS; head++)
				for (int d = 0; d < DIM; d++)
					assert_true(isfinite(value_at(t, place, layer, head, d % 2, d)));
	float q[HEADS * DIM] = {1}, out[HEADS * DIM];
	attend(t, 0, q, out);
	for (int i = 0; i < HEADS * DIM; i++)
		assert_true(isfinite(out[i]) && fabsf(out[i]) < 1);
	/* They are what is filled next. */
	merge(t, 1, 7, 6, NULL);
	assert_int_equal(count(&t->seq), 8 * PAGE - 6);
}

/* The largest numbers there are make numbers, whichever way they are turned. */
static void check_largest(struct talk *t)
{
	uint64_t seed = 17;
	uint16_t largest = t->layout.type == QUANT_BF16 ? 0x7F7F : 0x7BFF;
	while (t->n < 8 * PAGE)
		say(t, -1, &seed);
	compute(t);
	for (int32_t i = 0; i < 6 * PAGE; i++)
		for (int layer = 0; layer < LAYERS; layer++)
			for (int head = 0; head < HEADS; head++)
				for (int d = 0; d < 2 * DIM; d++)
					*element(t, t->seq.pages[1 + i / PAGE], i % PAGE, layer, head, d >= DIM,
						 d % DIM) = largest | (unit_rand(&seed) & 1 ? 0x8000 : 0);
	merge(t, 1, 6, 1, NULL);
	assert_int_equal(t->seq.n_unsound, 0);
	for (int32_t place = PAGE; place < 2 * PAGE; place++)
		for (int d = 0; d < 2 * DIM; d++)
			assert_true(isfinite(value_at(t, place, d % LAYERS, d % HEADS, d >= DIM, d % DIM)));
}

static void the_largest_numbers_stay_numbers(void **state)
{
	(void)state;
	everywhere(check_largest);
}

static void what_is_no_number_is_left_out(void **state)
{
	(void)state;
	everywhere(check_unsound);
}

static void check_many_times(struct talk *t)
{
	uint64_t seed = 11;
	bool keep[PAGES] = {false, true};
	for (int i = 0; i < 8 * PAGE; i++)
		say(t, -1, &seed);
	compute(t);
	for (int round = 0; round < 16; round++) {
		merge(t, 1, 6, 5, keep);
		keep[1] = false; /* new ones are not */
		double position = -1;
		for (int32_t i = 0; i < t->seq.n_buckets; i++) {
			assert_true(t->seq.buckets[i].position > position && t->seq.buckets[i].n >= 1);
			position = t->seq.buckets[i].position;
			/* The second of the pages between is as it was. */
			if (i >= PAGE && t->seq.buckets[i].keep)
				assert_true(t->seq.buckets[i].n == 1 && position >= 2 * PAGE && position < 3 * PAGE);
		}
		assert_int_equal(count(&t->seq), (7 + round) * PAGE);
		for (int i = 0; i < PAGE; i++)
			say(t, t->n % 3 ? t->n - 1 : -1, &seed);
		compute(t);
		assert_int_equal(t->seq.n_pages, 8);
	}
	/* Until nothing else is left. */
	for (int i = 0; i < PAGES; i++)
		keep[i] = true;
	merge(t, 1, 6, 1, keep);
	assert_int_equal(count(&t->seq), 23 * PAGE);
	assert_int_equal(t->seq.n_buckets, 2 * PAGE);
	/* Forgotten altogether, it begins anew. */
	kv_seq_truncate(t->pool, &t->seq, 4);
	assert_int_equal(t->seq.n_buckets + t->seq.n_pages + t->seq.n_unsound, 0);
}

static void buckets_grow_and_what_is_to_be_kept_joins_last(void **state)
{
	(void)state;
	everywhere(check_many_times);
}

static void check_shared(struct talk *t)
{
	uint64_t seed = 13;
	struct kv_seq shared = KV_SEQ_INIT;
	while (t->n < 8 * PAGE)
		say(t, -1, &seed);
	compute(t);
	shared.holder = other;
	assert_int_equal(kv_seq_share(t->pool, &shared, &t->seq, 8 * PAGE), STATUS_OK);
	char *was = malloc(8 * t->layout.page_bytes);
	for (int i = 0; i < 8; i++)
		memcpy(was + (size_t)i * t->layout.page_bytes,
		       (char *)kv_pool_slab(t->pool) + (size_t)shared.pages[i] * t->layout.page_stride,
		       t->layout.page_bytes);
	merge(t, 1, 6, 2, NULL);
	for (int i = 0; i < 8; i++) {
		assert_memory_equal(was + (size_t)i * t->layout.page_bytes,
				    (char *)kv_pool_slab(t->pool) + (size_t)shared.pages[i] * t->layout.page_stride,
				    t->layout.page_bytes);
		/* The first and the last are still shared, what was merged is nobody else's. */
		assert_int_equal(kv_pool_refs(t->pool, shared.pages[i]), i == 0 || i == 7 ? 2 : 1);
	}
	free(was);
	kv_seq_release(t->pool, &shared);
	assert_int_equal(kv_pool_n_free(t->pool), PAGES - 4);
}

static void what_others_have_as_well_stays_as_it_is(void **state)
{
	(void)state;
	everywhere(check_shared);
}

/* A merger whose call number `left` fails. */
struct failing {
	struct kv_merger ops, *to;
	int left;
};

static enum status fail_in_time(struct failing *f)
{
	return f->left-- == 0 ? STATUS_INTERNAL : STATUS_OK;
}

static enum status fail_sound(struct kv_merger *m, const struct kv_spot *spots, int32_t n, bool *sound)
{
	struct failing *f = (struct failing *)m;
	enum status st = fail_in_time(f);
	return st == STATUS_OK ? f->to->are_sound(f->to, spots, n, sound) : st;
}

static enum status fail_apart(struct kv_merger *m, const struct kv_pair *pairs, int32_t n, float *apart)
{
	struct failing *f = (struct failing *)m;
	enum status st = fail_in_time(f);
	return st == STATUS_OK ? f->to->apart(f->to, pairs, n, apart) : st;
}

static enum status fail_join(struct kv_merger *m, const struct kv_pair *pairs, int32_t n)
{
	struct failing *f = (struct failing *)m;
	enum status st = fail_in_time(f);
	return st == STATUS_OK ? f->to->join(f->to, pairs, n) : st;
}

static enum status fail_move(struct kv_merger *m, const struct kv_move *moves, int32_t n)
{
	struct failing *f = (struct failing *)m;
	enum status st = fail_in_time(f);
	return st == STATUS_OK ? f->to->move(f->to, moves, n) : st;
}

/* Whichever call fails, it is told, and the pages can be given back. */
static void what_fails_is_told(void **state)
{
	(void)state;
	const bool keep[PAGES] = {false};
	enum status st = STATUS_INTERNAL;
	int nth = 0;
	for (; st != STATUS_OK; nth++) {
		uint64_t seed = 19;
		struct talk *t = open_talk("cpu-reference", "f16", &ropes[0]);
		struct failing f = {{fail_sound, fail_apart, fail_join, fail_move}, kv_page_merger_ops(t->merger), nth};
		while (t->n < 8 * PAGE)
			say(t, -1, &seed);
		compute(t);
		assert_int_equal(kv_seq_own(t->pool, &t->seq, 1, 6), STATUS_OK);
		st = kv_merge(&f.ops, t->pool, &t->seq, 1, 6, 2, keep);
		assert_true(st == STATUS_OK || (st == STATUS_INTERNAL && t->seq.n_pages == 8 && t->seq.n_buckets == 0));
		close_talk(t);
	}
	assert_true(nth > 8); /* a round is two calls */
}

static void narrow_pages_are_refused(void **state)
{
	(void)state;
	struct backend_options o = {.device = "cpu-reference", .n_threads = 1};
	struct backend *b;
	struct kv_layout layout;
	struct kv_pool *pool;
	struct kv_page_merger *m;
	assert_int_equal(backend_create(&o, &b, NULL), STATUS_OK);
	assert_int_equal(kv_layout_for(b, &layout, LAYERS, HEADS, DIM), STATUS_OK);
	kv_layout_narrow(&layout, KV_FORM_INT8);
	assert_int_equal(kv_pool_create_narrow(b, &layout, 4, 1, &pool, NULL), STATUS_OK);
	assert_int_equal(kv_page_merger_create(b, kv_pool_slab(pool), &layout, rope_of, &ropes[0], &m),
			 STATUS_UNSUPPORTED);
	assert_int_equal(kv_pool_destroy(pool), STATUS_OK);
	b->ops->destroy(b);
}

UNIT_MAIN(cmocka_unit_test(a_bucket_has_the_means_of_a_run_and_stands_in_its_middle),
	  cmocka_unit_test(a_bucket_weighs_what_its_tokens_weighed), cmocka_unit_test(the_largest_numbers_stay_numbers),
	  cmocka_unit_test(what_is_no_number_is_left_out),
	  cmocka_unit_test(buckets_grow_and_what_is_to_be_kept_joins_last),
	  cmocka_unit_test(what_others_have_as_well_stays_as_it_is), cmocka_unit_test(what_fails_is_told),
	  cmocka_unit_test(narrow_pages_are_refused))
