/*
 * Rows that choose the pages they read (struct page_choice), on every CPU backend this machine can run: what they
 * choose is found here again from the keys, and what they give is, bit for bit, ordinary attention over a conversation
 * of just these pages.
 */
#include <math.h>

#include "engine/cpu/choice.h"
#include "tests/unit/cpu/fixture.h"

enum { KV_HEADS = 2, GROUP = 3, HEADS = KV_HEADS * GROUP, PAGE = KV_PAGE_TOKENS, PAGES = 90, LAYER = 1 };

static const char *const devices[] = {"cpu-reference",   "cpu-avx2", "cpu-avx512",
                                      "cpu-avx512-bf16", "cpu-neon", "cpu-neon-dotprod"};
static uint64_t seed = 5;

/* A conversation whose pages are full and have their bounds. */
struct talk {
	struct backend *b;
	struct kv_layout layout;
	struct kv_bounds bounds;
	void *kv;
	int32_t dim, n; /* positions */
	int32_t table[PAGES];
	float *k;       /* [n][KV_HEADS][dim] */
	struct kv_watch watch;
	uint8_t mark[PAGES];
};

static void write_rows(struct talk *t, const float *v)
{
	enum { CHUNK = 512 };
	int64_t width = (int64_t)KV_HEADS * t->dim;
	for (int32_t at = 0; at < t->n; at += CHUNK) {
		struct scattered s;
		scattered_init(&s);
		scattered_add(&s, t->table, at, at + CHUNK < t->n ? CHUNK : t->n - at);
		assert_int_equal(t->b->ops->step_begin(t->b, &s.batch), STATUS_OK);
		for (int32_t layer = 0; layer <= LAYER; layer++)
			assert_int_equal(
				t->b->ops->kv_write(t->b, t->kv, &t->layout, layer, t->k + at * width, v + at * width),
				STATUS_OK);
		assert_int_equal(t->b->ops->step_end(t->b), STATUS_OK);
	}
}

/* Keys are multiples of 1/16 that every type of page keeps exactly. */
static struct talk *open_talk(struct backend *b, int32_t dim, int32_t n, enum kv_form form)
{
	struct talk *t = calloc(1, sizeof *t);
	assert_non_null(t);
	t->b = b;
	t->dim = dim;
	t->n = n;
	assert_int_equal(kv_layout_for(b, &t->layout, 1 + LAYER, KV_HEADS, dim), STATUS_OK);
	if (form != KV_FORM_F16)
		kv_layout_narrow(&t->layout, form);
	t->watch.mark = t->mark;
	t->layout.watch = &t->watch;
	t->layout.bounds = &t->bounds;
	t->bounds.n_pages = PAGES;
	assert_int_equal(b->ops->mem_alloc(b, PAGES * t->layout.page_stride, &t->kv), STATUS_OK);
	assert_int_equal(b->ops->mem_alloc(b, PAGES * kv_bounds_bytes(&t->layout), &t->bounds.slab), STATUS_OK);
	assert_int_equal(b->ops->reserve(b, 512, 0, &t->layout), STATUS_OK);
	size_t size = (size_t)n * KV_HEADS * (size_t)dim;
	float *v = random_floats(&seed, size);
	t->k = malloc(size * sizeof *t->k);
	for (size_t i = 0; i < size; i++)
		t->k[i] = (float)random_int(&seed, -40, 40) / 16;
	for (int32_t i = 0; i < PAGES; i++)
		t->table[i] = i * 37 % PAGES;
	write_rows(t, v);
	assert_int_equal(b->ops->page_bounds(b, t->kv, &t->layout, t->table, n / PAGE), STATUS_OK);
	free(v);
	return t;
}

static void close_talk(struct talk *t)
{
	t->b->ops->mem_free(t->b, t->kv, PAGES * t->layout.page_stride);
	t->b->ops->mem_free(t->b, t->bounds.slab, PAGES * kv_bounds_bytes(&t->layout));
	free(t->k);
	free(t);
}

/* n_rows rows at the place `at`, of a block table and choice; q and out: [n_rows][HEADS][dim]. */
static void attend(struct talk *t, const int32_t *table, int32_t at, int32_t n_rows, const struct page_choice *choice,
                   const float *q, float *out)
{
	const struct attention_params params = {.scale = 1 / sqrtf((float)t->dim)};
	struct scattered s;
	scattered_init(&s);
	scattered_add(&s, table, at, n_rows);
	if (choice)
		s.seq[0].choice = *choice;
	assert_int_equal(t->b->ops->step_begin(t->b, &s.batch), STATUS_OK);
	assert_int_equal(t->b->ops->attention(t->b, t->kv, &t->layout, LAYER, q, HEADS, &params, out), STATUS_OK);
	assert_int_equal(t->b->ops->step_end(t->b), STATUS_OK);
}

/* The bound of a page, from its keys; a NaN in it is more than anything. */
static double bound(const struct talk *t, const float *q, int32_t head, int32_t page)
{
	double largest = -INFINITY;
	for (int32_t h = 0; h < GROUP; h++) {
		double sum = 0;
		for (int32_t d = 0; d < t->dim; d++) {
			double most = -INFINITY, x = q[(head * GROUP + h) * t->dim + d];
			for (int32_t i = page * PAGE; i < (page + 1) * PAGE; i++) {
				double k = t->k[(i * KV_HEADS + head) * t->dim + d];
				if (isnan(k))
					return INFINITY;
				most = k * x > most ? k * x : most;
			}
			sum += most;
		}
		largest = sum > largest ? sum : largest;
	}
	return largest;
}

/* What the row at a place reads, by the words of backend.h. */
static void expect(const struct talk *t, const float *q, int32_t head, int32_t at, const struct page_choice *c,
                   int32_t *pages)
{
	int32_t own = at / PAGE, n = 0;
	bool taken[PAGES] = {false};
	for (int32_t i = 0; i <= own; i++)
		taken[i] = i < c->n_first || i > own - c->n_last;
	for (int32_t k = c->n_first + c->n_last; k < c->n_pages; k++) {
		int32_t best = -1;
		for (int32_t i = 0; i <= own; i++)
			if (!taken[i] && (best < 0 || bound(t, q, head, i) > bound(t, q, head, best)))
				best = i;
		taken[best] = true;
	}
	for (int32_t i = 0; i <= own; i++)
		if (taken[i])
			pages[n++] = t->table[i];
	assert_int_equal(n, c->n_pages);
}

/* A row that chooses gives what an ordinary one does of just the pages that it should choose. */
static void check_row(struct talk *t, int32_t at, const struct page_choice *c)
{
	size_t size = (size_t)HEADS * (size_t)t->dim, head_size = (size_t)GROUP * (size_t)t->dim;
	float *q = random_floats(&seed, size), *got = malloc(size * 4), *want = malloc(size * 4);
	attend(t, t->table, at, 1, c, q, got);
	for (int32_t head = 0; head < KV_HEADS; head++) {
		int32_t pages[PAGES];
		expect(t, q, head, at, c, pages);
		attend(t, pages, (c->n_pages - 1) * PAGE + at % PAGE, 1, NULL, q, want);
		assert_memory_equal(got + (size_t)head * head_size, want + (size_t)head * head_size, head_size * 4);
	}
	free(q);
	free(got);
	free(want);
}

static void each_device(void (*test)(struct backend *b))
{
	for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
		struct backend *b = open_backend(devices[i], 3);
		if (!b) {
			print_message("%s: not on this machine\n", devices[i]);
			continue;
		}
		test(b);
		b->ops->destroy(b);
	}
}

static void chooses(struct backend *b)
{
	const int32_t dims[] = {64, 67, 16, 128};
	const struct page_choice choices[] = {{0, 20, 1, 4}, {0, 3, 1, 1},  {0, 12, 0, 1},
	                                      {0, 9, 4, 5},  {0, 59, 1, 1}, {500, 40, 2, 8}};
	for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
		struct talk *t = open_talk(b, dims[i], 60 * PAGE, KV_FORM_F16);
		for (size_t k = 0; k < sizeof choices / sizeof choices[0]; k++) {
			check_row(t, 59 * PAGE + 15, &choices[k]);
			check_row(t, 59 * PAGE + random_int(&seed, 0, 15), &choices[k]);
		}
		close_talk(t);
	}
}

static void a_row_reads_the_pages_with_the_largest_bounds(void **state)
{
	(void)state;
	each_device(chooses);
}

static void covers(struct backend *b)
{
	struct talk *t = open_talk(b, 64, 40 * PAGE, KV_FORM_F16);
	size_t width = (size_t)HEADS * 64;
	float *q = random_floats(&seed, 64 * width), *got = malloc(64 * width * 4), *want = malloc(64 * width * 4);
	attend(t, t->table, 36 * PAGE, 64, NULL, q, want);
	attend(t, t->table, 36 * PAGE, 64, &(struct page_choice){0, 40, 1, 1}, q, got);
	assert_memory_equal(got, want, 64 * width * 4);
	/* So do those that need not choose yet. */
	attend(t, t->table, 36 * PAGE, 64, &(struct page_choice){40 * PAGE, 4, 1, 1}, q, got);
	assert_memory_equal(got, want, 64 * width * 4);
	free(q);
	free(got);
	free(want);
	close_talk(t);
}

static void a_choice_of_all_pages_is_none(void **state)
{
	(void)state;
	each_device(covers);
}

static void alone(struct backend *b)
{
	enum { DIM = 64, FIRST = 50 * PAGE, ROWS = 10 * PAGE };
	struct talk *t = open_talk(b, DIM, 60 * PAGE, KV_FORM_F16);
	const struct page_choice c = {FIRST + 3, 30, 1, 2};
	size_t width = (size_t)HEADS * DIM;
	float *q = random_floats(&seed, ROWS * width), *all = malloc(ROWS * width * 4), *one = malloc(width * 4);
	attend(t, t->table, FIRST, ROWS, &c, q, all);
	for (int32_t i = 0; i < ROWS; i++) {
		attend(t, t->table, FIRST + i, 1, i < 3 ? NULL : &c, q + (size_t)i * width, one);
		assert_memory_equal(one, all + (size_t)i * width, width * 4);
	}
	free(q);
	free(all);
	free(one);
	close_talk(t);
}

static void a_row_chooses_the_same_whatever_stands_beside_it(void **state)
{
	(void)state;
	each_device(alone);
}

static void spoilt(struct backend *b)
{
	enum { DIM = 64, BAD = 31 };
	struct talk *t = open_talk(b, DIM, 60 * PAGE, KV_FORM_F16);
	float *v = random_floats(&seed, (size_t)t->n * KV_HEADS * DIM);
	t->k[((BAD * PAGE + 7) * KV_HEADS + 1) * DIM + 40] = NAN;
	write_rows(t, v);
	assert_int_equal(b->ops->page_bounds(b, t->kv, &t->layout, t->table, t->n / PAGE), STATUS_OK);
	float *q = random_floats(&seed, (size_t)HEADS * DIM), *got = malloc((size_t)HEADS * DIM * 4);
	int32_t pages[PAGES];
	attend(t, t->table, 59 * PAGE + 4, 1, &(struct page_choice){0, 5, 1, 2}, q, got);
	expect(t, q, 1, 59 * PAGE + 4, &(struct page_choice){0, 5, 1, 2}, pages);
	assert_int_equal(pages[1] == t->table[BAD] || pages[2] == t->table[BAD], 1);
	for (int32_t i = 0; i < HEADS * DIM; i++)
		assert_int_equal(isnan(got[i]), i >= GROUP * DIM);
	free(q);
	free(v);
	free(got);
	close_talk(t);
}

static void what_is_no_number_is_not_passed_over(void **state)
{
	(void)state;
	each_device(spoilt);
}

static double element_of(const struct talk *t, uint16_t bits)
{
	return t->layout.type == QUANT_BF16 ? quant_bf16_to_float(bits) : quant_half_to_float(bits);
}

static void bounds_of_narrow(struct backend *b)
{
	enum { DIM = 48 };
	for (int form = KV_FORM_F16; form < KV_N_FORMS; form++) {
		struct talk *t = open_talk(b, DIM, 20 * PAGE, (enum kv_form)form);
		/* see tier_codec.h; and bfloat16 */
		double off = form == KV_FORM_F16 ? 0 : form == KV_FORM_INT8 ? 2.5 / 254 + 2.5 / 256 : 2.5 / 16;
		for (int32_t page = 0; page < 20; page++)
			for (int32_t head = 0; head < KV_HEADS; head++) {
				const void *bounds = (const char *)t->bounds.slab +
				                     kv_bounds_offset(&t->layout, LAYER, head, t->table[page]);
				const uint16_t *p = bounds;
				for (int32_t d = 0; d < DIM; d++) {
					double least = INFINITY, greatest = -INFINITY;
					for (int32_t i = page * PAGE; i < (page + 1) * PAGE; i++) {
						double k = t->k[(i * KV_HEADS + head) * DIM + d];
						least = k < least ? k : least;
						greatest = k > greatest ? k : greatest;
					}
					assert_true(fabs(element_of(t, p[d]) - least) <= off);
					assert_true(fabs(element_of(t, p[DIM + d]) - greatest) <= off);
				}
			}
		close_talk(t);
	}
}

static void bounds_are_those_of_the_keys_in_every_form(void **state)
{
	(void)state;
	each_device(bounds_of_narrow);
}

static void equals_are_taken_in_order(void **state)
{
	(void)state;
	const float score[] = {0, 5, NAN, -1, 5, 5, -0.0f, 0, 0};
	const int32_t table[] = {10, 11, 12, 13, 14, 15, 16, 17, 18};
	int32_t pages[9];
	choose_pages(&(struct page_choice){0, 5, 1, 1}, table, 8, score, pages);
	const int32_t three[] = {10, 11, 12, 14, 18};
	assert_memory_equal(pages, three, sizeof three);
	/* Nothing but the first and the last. */
	choose_pages(&(struct page_choice){0, 2, 1, 1}, table, 8, score, pages);
	assert_int_equal(pages[0], 10);
	assert_int_equal(pages[1], 18);
	/* All but one. */
	choose_pages(&(struct page_choice){0, 8, 0, 1}, table, 8, score, pages);
	const int32_t eight[] = {10, 11, 12, 14, 15, 16, 17, 18};
	assert_memory_equal(pages, eight, sizeof eight);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(equals_are_taken_in_order),
	        cmocka_unit_test(a_row_reads_the_pages_with_the_largest_bounds),
	        cmocka_unit_test(a_choice_of_all_pages_is_none),
	        cmocka_unit_test(a_row_chooses_the_same_whatever_stands_beside_it),
	        cmocka_unit_test(what_is_no_number_is_not_passed_over),
	        cmocka_unit_test(bounds_are_those_of_the_keys_in_every_form),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
