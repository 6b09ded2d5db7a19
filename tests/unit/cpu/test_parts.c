/*
 * Attention by parts: a sequence whose first pages are not in the pool gets what it would get if they were, to the bit
 * on the fast backends, whatever the parts; the other sequences of the step do not notice.
 */
#include "tests/unit/cpu/fixture.h"

static const char *const devices[] = {"cpu-reference",   "cpu-avx2", "cpu-avx512",
                                      "cpu-avx512-bf16", "cpu-neon", "cpu-neon-dotprod"};

enum { LAYERS = 3, LAYER = 1, PAGES = 200, MAX_TOKENS = 2600 };

static uint64_t seed = 11;

struct far {
	struct kv_far base;
	struct kv_layout layout;
	struct kv_wide wide[LAYERS]; /* narrow pages: the copies that some have */
	int32_t wide_slot[PAGES];
	char *slab[LAYERS];  /* one layer of its pages each */
	int32_t table[PAGES];
	int32_t most;        /* pages that are to be had at a time */
	int32_t n_gets;
};

static bool get(struct kv_far *far, int32_t layer, int32_t page, struct kv_far_run *out)
{
	struct far *f = (struct far *)far;
	int32_t left = f->base.n_pages - page, most = f->most - page % f->most;
	f->n_gets++;
	*out = (struct kv_far_run){left < most ? left : most, f->slab[layer], f->table + page,
	                           f->layout.form == KV_FORM_F16 ? NULL : &f->wide[layer]};
	return true;
}

/* Takes the first n pages out of the pool: they are copied, and their places filled with what is not a number. */
static void move_away(struct far *f, const struct kv_layout *layout, char *kv, const int32_t *pages, int32_t n)
{
	f->layout = kv_layout_of_layer(layout);
	f->base = (struct kv_far){n, get};
	for (int32_t layer = 0; layer < LAYERS; layer++)
		f->slab[layer] = malloc((size_t)(n + 1) * f->layout.page_stride);
	for (int32_t layer = 0; layout->wide && layer < LAYERS; layer++) {
		f->wide[layer] = *layout->wide;
		f->wide[layer].slot = f->wide_slot;
		f->wide[layer].offset = (size_t)layer * layout->wide->bytes / LAYERS;
	}
	for (int32_t i = 0; i < n; i++) {
		f->table[i] = n - 1 - i;
		f->wide_slot[f->table[i]] = layout->wide ? layout->wide->slot[pages[i]] : -1;
		for (int32_t layer = 0; layer < LAYERS; layer++)
			memcpy(f->slab[layer] + (size_t)f->table[i] * f->layout.page_stride,
			       kv + (size_t)pages[i] * layout->page_stride + (size_t)layer * f->layout.page_bytes,
			       f->layout.page_bytes);
		memset(kv + (size_t)pages[i] * layout->page_stride, 0xFF, layout->page_bytes);
	}
}

static void come_back(struct far *f, const struct kv_layout *layout, char *kv, const int32_t *pages)
{
	for (int32_t i = 0; i < f->base.n_pages; i++)
		for (int32_t layer = 0; layer < LAYERS; layer++)
			memcpy(kv + (size_t)pages[i] * layout->page_stride + (size_t)layer * f->layout.page_bytes,
			       f->slab[layer] + (size_t)f->table[i] * f->layout.page_stride, f->layout.page_bytes);
	for (int32_t layer = 0; layer < LAYERS; layer++)
		free(f->slab[layer]);
}

/* What forward.c does for one layer: attention over all that is near, then the far sequence's parts. */
static void attend(struct backend *b, const struct kv_layout *layout, const void *kv, const struct batch *batch,
                   int32_t s, const float *q, int32_t n_head, const struct attention_params *params, float *out)
{
	const struct batch_seq *seq = &batch->seq[s];
	struct far *f = (struct far *)seq->far;
	struct attention_part part = {.seq = s, .first = true};
	struct kv_far_run run;
	assert_int_equal(b->ops->step_begin(b, batch), STATUS_OK);
	assert_int_equal(b->ops->attention(b, kv, layout, LAYER, q, n_head, params, out), STATUS_OK);
	int32_t page = params->window && seq->first_position >= params->window
	                       ? (seq->first_position + 1 - params->window) / KV_PAGE_TOKENS
	                       : 0;
	page -= page % KV_PART_PAGES;
	for (; f && page < f->base.n_pages; page += run.n_pages, part.first = false) {
		get(&f->base, LAYER, page, &run);
		part.first_page = page;
		part.n_pages = run.n_pages;
		part.block_table = run.block_table;
		f->layout.wide = run.wide;
		assert_int_equal(b->ops->attention_part(b, run.kv, &f->layout, 0, q, n_head, params, &part, out),
		                 STATUS_OK);
	}
	if (f) {
		part.first_page = page;
		part.n_pages = seq->n_pages - page;
		part.block_table = seq->block_table + page;
		part.last = true;
		assert_int_equal(b->ops->attention_part(b, kv, layout, LAYER, q, n_head, params, &part, out),
		                 STATUS_OK);
	}
	assert_int_equal(b->ops->step_end(b), STATUS_OK);
}

static void write_kv(struct backend *b, void *kv, const struct kv_layout *layout, const int32_t *pages, int32_t n,
                     const float *k, const float *v)
{
	enum { CHUNK = 256 };
	int32_t width = layout->n_head_kv * layout->head_dim;
	for (int32_t at = 0; at < n; at += CHUNK) {
		static struct scattered s;
		scattered_init(&s);
		scattered_add(&s, pages, at, n - at < CHUNK ? n - at : CHUNK);
		assert_int_equal(b->ops->step_begin(b, &s.batch), STATUS_OK);
		assert_int_equal(b->ops->kv_write(b, kv, layout, LAYER, k + (size_t)at * (size_t)width,
		                                  v + (size_t)at * (size_t)width),
		                 STATUS_OK);
		assert_int_equal(b->ops->step_end(b), STATUS_OK);
	}
}

struct shape {
	int32_t n_head_kv, group, dim;
};

/* Makes a layout one of narrow pages, of which one in five has a copy. */
static void make_narrow(struct kv_layout *layout, enum kv_form form, struct kv_wide *wide)
{
	static int32_t slot[PAGES];
	if (form == KV_FORM_F16)
		return;
	*wide = (struct kv_wide){.slot = slot,
	                         .stride = layout->page_stride,
	                         .bytes = layout->page_bytes,
	                         .slab = malloc(layout->page_stride * PAGES)};
	for (int32_t i = 0; i < PAGES; i++)
		slot[i] = i % 5 == 0 ? i / 5 : -1;
	kv_layout_narrow(layout, form);
	layout->wide = wide;
}

/* A batch of a short sequence, a long one with far pages, and another short one. */
static void one_of(enum kv_form form, const char *device, const struct shape *shape,
                   const struct attention_params *given, int32_t n_tokens, int32_t n_rows, int32_t n_far, int32_t most)
{
	enum { SHORT = 70 };
	static struct scattered s;
	struct backend *b = open_backend(device, 1 + (int32_t)(unit_rand(&seed) >> 40) % 3);
	struct kv_layout layout;
	struct kv_wide wide = {0};
	struct far far = {.most = most};
	int32_t n_head = shape->n_head_kv * shape->group;
	size_t width = (size_t)(shape->n_head_kv * shape->dim), row = width * (size_t)shape->group,
	       rows = (size_t)n_rows + 2;
	void *kv;
	if (!b)
		return;
	struct attention_params params = *given;
	params.scale = 1 / sqrtf((float)shape->dim);
	assert_int_equal(kv_layout_for(b, &layout, LAYERS, shape->n_head_kv, shape->dim), STATUS_OK);
	make_narrow(&layout, form, &wide);
	assert_int_equal(b->ops->mem_alloc(b, layout.page_stride * PAGES, &kv), STATUS_OK);
	memset(kv, 0xFF, layout.page_stride * PAGES);
	scattered_init(&s);
	scattered_shuffle(&s, &seed, PAGES);
	const int32_t *pages[3] = {s.pages, s.pages + 10, s.pages + 20};
	float *k = random_floats(&seed, width * MAX_TOKENS), *v = random_floats(&seed, width * MAX_TOKENS),
	      *q = random_floats(&seed, row * rows);
	float *want = malloc(rows * row * sizeof *want), *got = malloc(rows * row * sizeof *got);
	write_kv(b, kv, &layout, pages[0], SHORT, k, v);
	write_kv(b, kv, &layout, pages[1], SHORT, v, k);
	write_kv(b, kv, &layout, pages[2], n_tokens, k, v);
	scattered_add(&s, pages[0], SHORT - 1, 1);
	scattered_add(&s, pages[2], n_tokens - n_rows, n_rows);
	scattered_add(&s, pages[1], SHORT - 1, 1);
	attend(b, &layout, kv, &s.batch, 1, q, n_head, &params, want);
	move_away(&far, &layout, kv, pages[2], n_far);
	s.seq[1].far = &far.base;
	attend(b, &layout, kv, &s.batch, 1, q, n_head, &params, got);
	/* The reference sums up in another order. */
	if (strcmp(device, "cpu-reference") != 0)
		assert_memory_equal(got, want, rows * row * sizeof *got);
	for (size_t i = 0; i < rows * row; i++)
		assert_float_equal(got[i], want[i], 2e-6);
	assert_memory_equal(got, want, row * sizeof *got);
	assert_memory_equal(got + (rows - 1) * row, want + (rows - 1) * row, row * sizeof *got);
	come_back(&far, &layout, kv, pages[2]);
	b->ops->mem_free(b, kv, layout.page_stride * PAGES);
	b->ops->destroy(b);
	free(wide.slab);
	free(k);
	free(v);
	free(q);
	free(want);
	free(got);
}

static void one(const char *device, const struct shape *shape, const struct attention_params *given, int32_t n_tokens,
                int32_t n_rows, int32_t n_far, int32_t most)
{
	one_of(KV_FORM_F16, device, shape, given, n_tokens, n_rows, n_far, most);
}

static const struct shape shapes[] = {{3, 3, 64}, {2, 1, 128}, {1, 8, 80}, {2, 4, 67}, {1, 40, 32}};

static void parts_give_the_same_bits(void **state)
{
	(void)state;
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++)
		for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
			struct attention_params params = {.softcap = i == 2 ? 1.5f : 0};
			/* Parts that are ranges, several, pieces of one, and anything. */
			if (i > 1 && unit_count(1, 0) == 0 && strcmp(devices[d], "cpu-reference") == 0)
				continue;
			one(devices[d], &shapes[i], &params, 2500, 1, 9 * 16, 16);
			one(devices[d], &shapes[i], &params, 2571, 83, 4 * 16, 32);
			one(devices[d], &shapes[i], &params, 700, 130, 32, KV_PART_PAGES);
			one(devices[d], &shapes[i], &params, 2500, 1, KV_PART_PAGES * 19, KV_PART_PAGES * 7);
			one(devices[d], &shapes[i], &params, 2000, 200, KV_PART_PAGES * 13,
			    KV_PART_PAGES * random_int(&seed, 1, 13));
		}
}

static void random_parts(const struct attention_params *params, int i)
{
	int32_t n_tokens = random_int(&seed, 300, 2500), n_rows = i % 3 ? random_int(&seed, 1, 100) : 1;
	int32_t n_far = random_int(&seed, 1, (n_tokens - n_rows) / KV_PAGE_TOKENS / KV_PART_PAGES),
		most = random_int(&seed, 1, 10);
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++)
		one(devices[d], &shapes[i % 5], params, n_tokens, n_rows, n_far * KV_PART_PAGES, most * KV_PART_PAGES);
}

static void and_so_do_any_others(void **state)
{
	(void)state;
	for (int i = 0; i < unit_count(12, 5); i++) {
		struct attention_params params = {.softcap = i % 5 == 4 ? 2 : 0};
		random_parts(&params, i);
	}
}

static void layers_with_a_window_read_the_parts_they_see(void **state)
{
	(void)state;
	static const int32_t windows[] = {16, 100, 257, 900, 4000};
	for (int i = 0; i < unit_count(15, 5); i++) {
		struct attention_params params = {.window = windows[(i + i / 5) % 5]};
		random_parts(&params, i);
	}
}

/* Pieces of parts, ranges and chunks. */
static void chunks_end_anywhere_in_parts(void **state)
{
	(void)state;
	float freq[4] = {1, 0.3f, 0.1f, 0.01f};
	struct rope_params rope = {.n_dims = 8, .inv_freq = freq, .magnitude = 1};
	for (int i = 0; i < unit_count(9, 3); i++) {
		struct attention_params params = {.chunked = &rope};
		rope.chunks.size = random_int(&seed, 1, 12) * ROPE_CHUNK_STEP;
		rope.chunks.reach = rope.chunks.size + random_int(&seed, 1, rope.chunks.size);
		random_parts(&params, i);
	}
}

/* With their copies, beside which the codes do not count. */
static void narrow_pages_as_well(void **state)
{
	(void)state;
	static const enum kv_form forms[] = {KV_FORM_INT8, KV_FORM_FP8_E4M3};
	for (int i = 0; i < unit_count(10, 5); i++) {
		struct attention_params params = {.window = i % 4 == 3 ? 300 : 0};
		const struct shape *shape = &shapes[i % 5];
		int32_t n_rows = i % 3 ? random_int(&seed, 1, 60) : 1, n_far = random_int(&seed, 1, 11),
			most = random_int(&seed, 1, 10);
		for (size_t d = 0; d < sizeof devices / sizeof *devices; d++)
			one_of(forms[i % 2], devices[d], shape, &params, 1500, n_rows, n_far * KV_PART_PAGES,
			       most * KV_PART_PAGES);
	}
}

/* Where a backend could not go on with a block of positions. */
static void a_part_begins_with_a_block(void **state)
{
	(void)state;
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
		struct backend *b = open_backend(devices[d], 1);
		struct kv_layout layout;
		static struct scattered s;
		struct attention_part part = {.first_page = 1, .n_pages = 1, .first = true};
		struct attention_params params = {.scale = 1};
		float q[16] = {0}, out[16];
		if (!b)
			continue;
		scattered_init(&s);
		scattered_add(&s, s.pages, 40, 1);
		assert_int_equal(kv_layout_for(b, &layout, 1, 1, 16), STATUS_OK);
		assert_int_equal(b->ops->step_begin(b, &s.batch), STATUS_OK);
		assert_int_equal(b->ops->attention_part(b, q, &layout, 0, q, 1, &params, &part, out), STATUS_INVALID);
		b->ops->step_end(b);
		b->ops->destroy(b);
	}
}

UNIT_MAIN(cmocka_unit_test(parts_give_the_same_bits), cmocka_unit_test(and_so_do_any_others),
          cmocka_unit_test(layers_with_a_window_read_the_parts_they_see), cmocka_unit_test(narrow_pages_as_well),
          cmocka_unit_test(chunks_end_anywhere_in_parts), cmocka_unit_test(a_part_begins_with_a_block))
