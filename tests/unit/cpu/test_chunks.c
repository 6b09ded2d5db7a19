/*
 * Dual Chunk Attention (struct rope_chunks) on every CPU backend this machine can run: what the formula says, stated
 * here once more; within the first chunk what there is without, to the bit; and a row's result is its own, however the
 * rows were cut.
 */
#include <math.h>

#include "tests/unit/cpu/fixture.h"

enum { PAGES = 80, MAX_N = 900, MAX_WIDTH = 512 };

static const char *const devices[] = {"cpu-reference",	 "cpu-avx2", "cpu-avx512",
				      "cpu-avx512-bf16", "cpu-neon", "cpu-neon-dotprod"};
static uint64_t seed = 29;

struct shape {
	int32_t n_head_kv, group, dim, rotated;
	struct rope_chunks chunks;
	int32_t n;
};

/* Of two to five chunks; distances are their own up to reach - size, or none but the nearest. */
static const struct shape shapes[] = {
	{3, 3, 64, 64, {64, 86}, 300}, {1, 2, 80, 64, {128, 129}, 500}, {2, 4, 67, 66, {192, 256}, 400},
	{1, 4, 128, 128, {320, 512}, 900}, {2, 1, 16, 16, {64, 128}, 130},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

struct talk {
	struct backend *b;
	struct kv_layout layout;
	void *kv;
	int32_t n_head, table[PAGES];
	struct rope_params rope;
	struct attention_params params;
	float freq[64];
	float *q, *k, *v; /* [n][heads][dim] before they are turned */
	float *out;
	uint64_t mass[PAGES];
};

static struct talk *open_talk(const char *device, int32_t n_threads, const struct shape *s, enum kv_form form)
{
	struct backend *b = open_backend(device, n_threads);
	if (!b)
		return NULL;
	struct talk *t = calloc(1, sizeof *t);
	uint64_t data = 7;
	size_t kv = (size_t)(s->n * s->n_head_kv * s->dim);
	assert_non_null(t);
	t->b = b;
	t->n_head = s->n_head_kv * s->group;
	for (int32_t i = 0; i < PAGES; i++)
		t->table[i] = i * 37 % PAGES;
	for (int32_t i = 0; i < s->rotated / 2; i++)
		t->freq[i] = powf(1000, -2.0f * (float)i / (float)s->rotated);
	t->rope = (struct rope_params){.pairing = s->group % 2 ? ROPE_HALVES : ROPE_INTERLEAVED,
				       .n_dims = s->rotated,
				       .inv_freq = t->freq,
				       .magnitude = 1.05f,
				       .chunks = s->chunks};
	t->params = (struct attention_params){.scale = 1 / sqrtf((float)s->dim), .chunked = &t->rope};
	assert_int_equal(kv_layout_for(b, &t->layout, 2, s->n_head_kv, s->dim), STATUS_OK);
	if (form != KV_FORM_F16)
		kv_layout_narrow(&t->layout, form);
	assert_int_equal(b->ops->mem_alloc(b, PAGES * t->layout.page_stride, &t->kv), STATUS_OK);
	memset(t->kv, 0xFF, PAGES * t->layout.page_stride);
	assert_int_equal(b->ops->reserve(b, 512, 0, &t->layout), STATUS_OK);
	t->q = random_floats(&data, kv * (size_t)s->group);
	t->k = random_floats(&data, kv);
	t->v = random_floats(&data, kv);
	t->out = calloc(kv * (size_t)s->group, sizeof(float));
	return t;
}

static void close_talk(struct talk *t)
{
	t->b->ops->mem_free(t->b, t->kv, PAGES * t->layout.page_stride);
	t->b->ops->destroy(t->b);
	free(t->q);
	free(t->k);
	free(t->v);
	free(t->out);
	free(t);
}

static float *copied(const float *x, size_t n)
{
	float *p = malloc(n * sizeof *p);
	assert_non_null(p);
	return memcpy(p, x, n * sizeof *p);
}

/* Positions 0 .. n of one conversation, `cut` rows a step. */
static void converse(struct talk *t, int32_t n, int32_t cut, bool weigh)
{
	int64_t width = (int64_t)t->layout.n_head_kv * t->layout.head_dim,
		q_width = (int64_t)t->n_head * t->layout.head_dim;
	const struct backend_ops *ops = t->b->ops;
	for (int32_t at = 0; at < n; at += cut) {
		static struct scattered s;
		int32_t rows = n - at < cut ? n - at : cut;
		scattered_init(&s);
		scattered_add(&s, t->table, at, rows);
		s.seq[0].mass = weigh ? t->mass : NULL;
		float *q = copied(t->q + at * q_width, (size_t)(rows * q_width)),
		      *k = copied(t->k + at * width, (size_t)(rows * width));
		assert_int_equal(ops->step_begin(t->b, &s.batch), STATUS_OK);
		assert_int_equal(ops->rope(t->b, q, t->n_head, k, t->layout.n_head_kv, t->layout.head_dim, &t->rope),
				 STATUS_OK);
		assert_int_equal(ops->kv_write(t->b, t->kv, &t->layout, 1, k, t->v + at * width), STATUS_OK);
		assert_int_equal(
			ops->attention(t->b, t->kv, &t->layout, 1, q, t->n_head, &t->params, t->out + at * q_width),
			STATUS_OK);
		assert_int_equal(ops->step_end(t->b), STATUS_OK);
		free(q);
		free(k);
	}
}

/*
 * The paper's positions of a query and a key: section 3.2, P_q of intra-chunk, successive-chunk and inter-chunk
 * attention.
 */
static int32_t query_position(const struct rope_chunks *c, int32_t query, int32_t key)
{
	int32_t apart = query / c->size - key / c->size, within = query % c->size;
	if (apart == 0)
		return within;
	if (apart > 1)
		return c->reach - 1;
	int32_t local = c->reach - c->size; /* the first `local` queries of a chunk see the one before as it is */
	return within < local ? within + c->size : c->reach - 1;
}

static void turn(const struct talk *t, const float *x, int32_t position, double *out)
{
	int32_t half = t->rope.n_dims / 2;
	for (int32_t d = 0; d < t->layout.head_dim; d++)
		out[d] = x[d];
	for (int32_t i = 0; i < half; i++) {
		int32_t a = t->rope.pairing == ROPE_HALVES ? i : 2 * i,
			b = t->rope.pairing == ROPE_HALVES ? i + half : a + 1;
		double angle = (double)position * t->freq[i], c = cos(angle) * t->rope.magnitude,
		       s = sin(angle) * t->rope.magnitude;
		out[a] = x[a] * c - x[b] * s;
		out[b] = x[a] * s + x[b] * c;
	}
}

/* What query head h of row m gives by the formula, or with `plain` positions. */
static void expect(const struct talk *t, int32_t m, int32_t h, bool plain, double *out)
{
	static double score[MAX_N];
	const struct rope_chunks *c = &t->rope.chunks;
	int32_t dim = t->layout.head_dim, n_head_kv = t->layout.n_head_kv, kv_head = h / (t->n_head / n_head_kv);
	double q[MAX_WIDTH], k[MAX_WIDTH], max = -INFINITY, sum = 0;
	for (int32_t n = 0; n <= m; n++) {
		turn(t, t->q + ((int64_t)m * t->n_head + h) * dim, plain ? m : query_position(c, m, n), q);
		turn(t, t->k + ((int64_t)n * n_head_kv + kv_head) * dim, plain ? n : n % c->size, k);
		score[n] = 0;
		for (int32_t d = 0; d < dim; d++)
			score[n] += q[d] * k[d] * t->params.scale;
		max = score[n] > max ? score[n] : max;
	}
	for (int32_t d = 0; d < dim; d++)
		out[d] = 0;
	for (int32_t n = 0; n <= m; n++) {
		double w = exp(score[n] - max);
		sum += w;
		for (int32_t d = 0; d < dim; d++)
			out[d] += w * t->v[((int64_t)n * n_head_kv + kv_head) * dim + d];
	}
	for (int32_t d = 0; d < dim; d++)
		out[d] /= sum;
}

static void attention_is_what_the_formula_says(void **state)
{
	(void)state;
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++)
		for (int i = 0; i < SHAPES; i++) {
			struct talk *t = open_talk(devices[d], 2, &shapes[i], KV_FORM_F16);
			double want[MAX_WIDTH], plain[MAX_WIDTH], off = 0, other = 0;
			if (!t)
				break;
			converse(t, shapes[i].n, 100, false);
			for (int32_t m = shapes[i].n - 1; m >= 0; m -= random_int(&seed, 1, shapes[i].n / 6))
				for (int32_t h = 0; h < t->n_head; h++) {
					expect(t, m, h, false, want);
					expect(t, m, h, true, plain);
					for (int32_t e = 0; e < t->layout.head_dim; e++) {
						double got =
							t->out[((int64_t)m * t->n_head + h) * t->layout.head_dim + e];
						off = fmax(off, fabs(got - want[e]));
						other = fmax(other, fabs(want[e] - plain[e]));
						assert_true(got == got);
					}
				}
			if (off >= (t->layout.type == QUANT_BF16 ? 3e-2 : 2.5e-3) || other < 0.1)
				fail_msg("%s, shape %d: %g from the formula, which is %g from that of plain positions",
					 devices[d], i, off, other);
			close_talk(t);
		}
}

static void up_to_the_first_chunk_nothing_changes(void **state)
{
	(void)state;
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++)
		for (int i = 0; i < SHAPES * 2; i++) {
			struct shape s = shapes[i % SHAPES];
			s.n = s.chunks.size < s.n ? s.chunks.size : s.n;
			struct talk *with = open_talk(devices[d], 2, &s, i % 2 ? KV_FORM_INT8 : KV_FORM_F16);
			struct talk *without = open_talk(devices[d], 2, &s, i % 2 ? KV_FORM_INT8 : KV_FORM_F16);
			if (!with)
				break;
			without->rope.chunks = (struct rope_chunks){0};
			without->params.chunked = NULL;
			converse(with, s.n, 77, false);
			converse(without, s.n, 77, false);
			assert_memory_equal(with->out, without->out,
					    (size_t)(s.n * with->n_head * s.dim) * sizeof(float));
			close_talk(with);
			close_talk(without);
		}
}

/* Also with pages in any form, and what the rows give to pages. */
static void compare(const char *device, const struct shape *s, enum kv_form form, const struct talk *r)
{
	struct talk *t = open_talk(device, 2, s, form);
	double off = 0, mass = 0;
	if (!t)
		return;
	converse(t, s->n, 130, true);
	for (int64_t e = 0; e < (int64_t)s->n * t->n_head * s->dim; e++) {
		double d = fabs((double)t->out[e] - r->out[e]);
		assert_true(d == d);
		off = d > off ? d : off;
	}
	for (int32_t p = 0; p < PAGES; p++) {
		double d = fabs((double)t->mass[p] - (double)r->mass[p]) / (1.0 + (double)r->mass[p]);
		mass = d > mass ? d : mass;
	}
	if (off >= (t->layout.type == QUANT_BF16 ? 4e-2 : 6e-3) || mass >= 2e-2)
		fail_msg("%s, %d tokens, %s: outputs %g, masses %g apart", device, s->n, kv_form_name(form), off, mass);
	close_talk(t);
}

static void every_form_is_that_of_the_reference(void **state)
{
	(void)state;
	for (int i = 0; i < 2 * SHAPES; i++) {
		const struct shape *s = &shapes[i % SHAPES];
		enum kv_form form = i < SHAPES ? KV_FORM_INT8 : KV_FORM_FP8_E4M3;
		struct talk *r = open_talk("cpu-reference", 2, s, form);
		converse(r, s->n, 130, true);
		for (size_t d = 1; d < sizeof devices / sizeof *devices; d++)
			compare(devices[d], s, form, r);
		close_talk(r);
	}
}

/* And neither does asking for masses. */
static void cuts_and_threads_change_nothing(void **state)
{
	(void)state;
	static const int32_t cuts[] = {16, 61, 512};
	const struct shape s = {2, 3, 64, 64, {192, 250}, 560};
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++)
		for (int form = KV_FORM_F16; form < KV_N_FORMS; form++) {
			struct talk *want = open_talk(devices[d], 1, &s, (enum kv_form)form);
			if (!want)
				break;
			converse(want, s.n, 7, true);
			for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
				struct talk *t = open_talk(devices[d], 1 + (int32_t)i, &s, (enum kv_form)form);
				converse(t, s.n, cuts[i], i > 0);
				assert_memory_equal(t->out, want->out,
						    (size_t)(s.n * t->n_head * s.dim) * sizeof(float));
				if (i > 0)
					assert_memory_equal(t->mass, want->mass, sizeof t->mass);
				close_talk(t);
			}
			close_talk(want);
		}
}

/* Chosen pages stand elsewhere than their positions say. */
static void rows_that_choose_are_refused(void **state)
{
	(void)state;
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
		static struct scattered s;
		struct talk *t = open_talk(devices[d], 1, &shapes[0], KV_FORM_F16);
		struct kv_bounds bounds = {.n_pages = PAGES};
		if (!t)
			continue;
		bounds.slab = calloc(PAGES, kv_bounds_bytes(&t->layout));
		t->layout.bounds = &bounds;
		scattered_init(&s);
		scattered_add(&s, t->table, 200, 1);
		s.seq[0].choice = (struct page_choice){0, 4, 1, 1};
		assert_int_equal(t->b->ops->step_begin(t->b, &s.batch), STATUS_OK);
		assert_int_equal(t->b->ops->attention(t->b, t->kv, &t->layout, 1, t->q, t->n_head, &t->params, t->out),
				 STATUS_INVALID);
		assert_int_equal(t->b->ops->step_end(t->b), STATUS_OK);
		free(bounds.slab);
		close_talk(t);
	}
}

UNIT_MAIN(cmocka_unit_test(attention_is_what_the_formula_says), cmocka_unit_test(up_to_the_first_chunk_nothing_changes),
	  cmocka_unit_test(every_form_is_that_of_the_reference), cmocka_unit_test(cuts_and_threads_change_nothing),
	  cmocka_unit_test(rows_that_choose_are_refused))
