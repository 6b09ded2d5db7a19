/*
 * What attention says of the weights that rows gave to pages (batch_seq.mass), on every CPU backend this machine can
 * run.
 */
#include <math.h>

#include "tests/unit/cpu/fixture.h"

enum { KV_HEADS = 2, GROUP = 3, HEADS = KV_HEADS * GROUP, PAGE = KV_PAGE_TOKENS, PAGES = 90, N = 1100, DIM = 48 };

static const char *const devices[] = {"cpu-reference",   "cpu-avx2", "cpu-avx512",
                                      "cpu-avx512-bf16", "cpu-neon", "cpu-neon-dotprod"};
static uint64_t seed = 23;
static float *k, *v, *q; /* [N][heads][DIM]; keys are multiples of 1/16, queries of 1/8 */
static int32_t table[PAGES];

struct talk {
	struct backend *b;
	struct kv_layout layout;
	void *kv;
	struct kv_watch watch;
	uint8_t mark[PAGES];
	struct attention_params params;
	float out[(size_t)N * HEADS * DIM];
	uint64_t mass[PAGES];
	struct attention_look look;
};

/* All rows from `from` on, in chunks of `chunk` at most; what stands before is written only. */
static void converse(struct talk *t, int32_t from, int32_t chunk, bool weigh)
{
	memset(t->mass, 0, sizeof t->mass);
	memset(&t->look, 0, sizeof t->look);
	for (int32_t at = 0, n; at < N; at += n) {
		struct scattered s;
		n = at < from ? from - at : chunk;
		n = n > 512 ? 512 : n;
		n = n > N - at ? N - at : n;
		scattered_init(&s);
		scattered_add(&s, table, at, n);
		s.seq[0].mass = weigh && at >= from ? t->mass : NULL;
		s.seq[0].look = weigh && at >= from ? &t->look : NULL;
		assert_int_equal(t->b->ops->step_begin(t->b, &s.batch), STATUS_OK);
		assert_int_equal(t->b->ops->kv_write(t->b, t->kv, &t->layout, 0, k + (int64_t)at * KV_HEADS * DIM,
		                                     v + (int64_t)at * KV_HEADS * DIM),
		                 STATUS_OK);
		assert_int_equal(t->b->ops->attention(t->b, t->kv, &t->layout, 0, q + (int64_t)at * HEADS * DIM, HEADS,
		                                      &t->params, t->out + (int64_t)at * HEADS * DIM),
		                 STATUS_OK);
		assert_int_equal(t->b->ops->step_end(t->b), STATUS_OK);
	}
}

static struct talk *open_talk(const char *device, int32_t n_threads, enum kv_form form)
{
	struct backend *b = open_backend(device, n_threads);
	if (!b)
		return NULL;
	struct talk *t = calloc(1, sizeof *t);
	assert_non_null(t);
	t->b = b;
	t->params.scale = 1 / sqrtf(DIM);
	assert_int_equal(kv_layout_for(b, &t->layout, 1, KV_HEADS, DIM), STATUS_OK);
	if (form != KV_FORM_F16)
		kv_layout_narrow(&t->layout, form);
	t->watch.mark = t->mark;
	t->layout.watch = &t->watch;
	assert_int_equal(b->ops->mem_alloc(b, PAGES * t->layout.page_stride, &t->kv), STATUS_OK);
	assert_int_equal(b->ops->reserve(b, 512, 0, &t->layout), STATUS_OK);
	return t;
}

static void close_talk(struct talk *t)
{
	t->b->ops->mem_free(t->b, t->kv, PAGES * t->layout.page_stride);
	t->b->ops->destroy(t->b);
	free(t);
}

/* The same from the definition. */
static void expect(const struct attention_params *p, int32_t from, double *mass, double *entropy, double *largest)
{
	static double w[N];
	*entropy = *largest = 0;
	memset(mass, 0, PAGES * sizeof *mass);
	for (int32_t row = from; row < N; row++)
		for (int32_t h = 0; h < HEADS; h++) {
			int32_t first = p->window > 0 && row >= p->window ? row + 1 - p->window : 0;
			double max = -INFINITY, sum = 0;
			for (int32_t i = first; i <= row; i++) {
				double s = 0;
				for (int32_t d = 0; d < DIM; d++)
					s += (double)q[(row * HEADS + h) * DIM + d] *
					     k[(i * KV_HEADS + h / GROUP) * DIM + d];
				s *= p->scale;
				w[i] = p->softcap > 0 ? p->softcap * tanh(s / p->softcap) : s;
				max = w[i] > max ? w[i] : max;
			}
			for (int32_t i = first; i <= row; i++)
				sum += w[i] = exp(w[i] - max);
			for (int32_t i = first; i <= row; i++) {
				mass[i / PAGE] += w[i] / sum;
				*entropy -= w[i] > 0 ? w[i] / sum * log(w[i] / sum) : 0;
			}
			*largest += 1 / sum;
		}
}

static void masses_are_the_weights_that_pages_got(void **state)
{
	(void)state;
	const struct attention_params params[] = {{.softcap = 0}, {.window = 300}, {.softcap = 2}, {.window = 23}};
	for (size_t i = 0; i < sizeof params / sizeof params[0]; i++)
		for (size_t d = 0; d < sizeof devices / sizeof devices[0]; d++) {
			enum { FROM = 900 };
			double want[PAGES], entropy, largest;
			struct talk *t = open_talk(devices[d], 2, KV_FORM_F16);
			if (!t)
				continue;
			t->params.softcap = params[i].softcap;
			t->params.window = params[i].window;
			expect(&t->params, FROM, want, &entropy, &largest);
			converse(t, FROM, 60, true);
			for (int32_t page = 0; page < PAGES; page++) {
				double got = (double)t->mass[page] / (1 << KV_MASS_BITS);
				/* bfloat16 queries round scores a little */
				double off = 2e-6 * HEADS * (N - FROM) +
				             (t->layout.type == QUANT_BF16 ? 2e-3 : 2e-5) * want[page];
				if (!(fabs(got - want[page]) <= off))
					fail_msg("%s: page %d has %g, not %g", devices[d], (int)page, got, want[page]);
			}
			double unit = 1 << KV_MASS_BITS, near = t->layout.type == QUANT_BF16 ? 2e-3 : 2e-5;
			assert_int_equal(t->look.n, (N - FROM) * HEADS);
			assert_true(fabs((double)t->look.entropy / unit / entropy - 1) < near);
			assert_true(fabs((double)t->look.largest / unit / largest - 1) < near);
			close_talk(t);
		}
}

static void chunks_and_threads_change_no_bit_and_weighing_no_result(void **state)
{
	(void)state;
	for (size_t d = 0; d < sizeof devices / sizeof devices[0]; d++)
		for (int form = KV_FORM_F16; form < KV_N_FORMS; form++) {
			struct talk *one = open_talk(devices[d], 1, (enum kv_form)form),
				    *three = open_talk(devices[d], 3, (enum kv_form)form);
			if (!one) {
				print_message("%s: not on this machine\n", devices[d]);
				break;
			}
			converse(one, 1000, 100, true);
			converse(three, 1000, 1, true);
			assert_memory_equal(one->mass, three->mass, sizeof one->mass);
			assert_memory_equal(&one->look, &three->look, sizeof one->look);
			converse(three, 1000, 7, false);
			assert_memory_equal(one->out, three->out, sizeof one->out);
			/* All weights of all rows and heads, but for rounding. */
			uint64_t sum = 0;
			for (int32_t page = 0; page < PAGES; page++)
				sum += one->mass[page];
			assert_true(fabs((double)sum / (1 << KV_MASS_BITS) - 100 * HEADS) < 0.05);
			assert_int_equal(one->mass[(N - 1) / PAGE + 1], 0);
			close_talk(one);
			close_talk(three);
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(masses_are_the_weights_that_pages_got),
	        cmocka_unit_test(chunks_and_threads_change_no_bit_and_weighing_no_result),
	};
	size_t kv_size = (size_t)N * KV_HEADS * DIM, q_size = (size_t)N * HEADS * DIM;
	k = random_multiples(&seed, kv_size, 40, 1.0f / 16);
	v = random_multiples(&seed, kv_size, 40, 1.0f / 16);
	q = random_multiples(&seed, q_size, 16, 1.0f / 8);
	for (int32_t i = 0; i < PAGES; i++)
		table[i] = i * 37 % PAGES;
	int failed = cmocka_run_group_tests(tests, NULL, NULL);
	free(k);
	free(v);
	free(q);
	return failed;
}
