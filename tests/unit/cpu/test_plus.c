/* What is added to the logits of places (batch_seq.plus), on every CPU backend this machine can run. */
#include <math.h>

#include "tests/unit/cpu/fixture.h"

enum {
	KV_HEADS = 2,
	GROUP = 3,
	HEADS = KV_HEADS * GROUP,
	PAGE = KV_PAGE_TOKENS,
	PAGES = 50,
	N = 700,
	DIM = 48,
	PLUS = 512
};

static const char *const devices[] = {"cpu-reference",	 "cpu-avx2", "cpu-avx512",
				      "cpu-avx512-bf16", "cpu-neon", "cpu-neon-dotprod"};
static const char *const types[] = {"f16", "bf16"};
static uint64_t seed = 29;
static float *k, *v, *q; /* [N][heads][DIM]; keys are multiples of 1/16, queries of 1/8 */
static int32_t table[PAGES];

struct talk {
	struct backend *b;
	struct kv_layout layout;
	void *kv;
	struct attention_params params;
	float out[(size_t)N * HEADS * DIM];
	uint64_t mass[PAGES];
	struct attention_look look;
};

/* NULL when this machine has none of the kind. */
static struct talk *open_talk(const char *device, const char *type, int32_t n_threads)
{
	struct backend *b = open_backend(device, n_threads);
	struct kv_choice choice;
	if (!b)
		return NULL;
	struct talk *t = calloc(1, sizeof *t);
	assert_non_null(t);
	t->b = b;
	t->params.scale = 1 / sqrtf(DIM);
	assert_int_equal(kv_choice_make(b, type, &choice, NULL), STATUS_OK);
	assert_int_equal(kv_layout_for(b, &t->layout, 1, KV_HEADS, DIM), STATUS_OK);
	assert_int_equal(b->ops->mem_alloc(b, PAGES * t->layout.page_stride, &t->kv), STATUS_OK);
	assert_int_equal(b->ops->reserve(b, 512, HEADS * DIM, &t->layout), STATUS_OK);
	return t;
}

static void close_talk(struct talk *t)
{
	t->b->ops->mem_free(t->b, t->kv, PAGES * t->layout.page_stride);
	t->b->ops->destroy(t->b);
	free(t);
}

/* All rows, those from `from` on in chunks of `chunk` at most and with what is added. */
static void converse(struct talk *t, int32_t from, int32_t chunk, const float *plus, int32_t n_plus, bool weigh)
{
	memset(t->mass, 0, sizeof t->mass);
	for (int32_t at = 0, n; at < N; at += n) {
		struct scattered s;
		n = at < from ? from - at : chunk;
		n = n > 512 ? 512 : n;
		n = n > N - at ? N - at : n;
		scattered_init(&s);
		scattered_add(&s, table, at, n);
		s.seq[0].plus = at >= from ? plus : NULL;
		s.seq[0].n_plus = n_plus;
		s.seq[0].mass = weigh && at >= from ? t->mass : NULL;
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

/* What a head of a row gives, in double. */
static void expect(const struct attention_params *p, int32_t row, int32_t head, const float *plus, double *out)
{
	double weight[N], total = 0, max = -INFINITY;
	int32_t first = p->window > 0 && row >= p->window ? row + 1 - p->window : 0;
	for (int32_t t = first; t <= row; t++) {
		double s = 0;
		for (int32_t d = 0; d < DIM; d++)
			s += (double)q[((int64_t)row * HEADS + head) * DIM + d] *
			     k[((int64_t)t * KV_HEADS + head / GROUP) * DIM + d];
		s *= p->scale;
		s = p->softcap > 0 ? p->softcap * tanh(s / p->softcap) : s;
		weight[t] = s + (t < PLUS ? plus[t] : 0);
		max = weight[t] > max ? weight[t] : max;
	}
	for (int32_t d = 0; d < DIM; d++)
		out[d] = 0;
	for (int32_t t = first; t <= row; t++) {
		double w = exp(weight[t] - max);
		total += w;
		for (int32_t d = 0; d < DIM; d++)
			out[d] += w * v[((int64_t)t * KV_HEADS + head / GROUP) * DIM + d];
	}
	for (int32_t d = 0; d < DIM; d++)
		out[d] /= total;
}

static void logits_are_raised_behind_the_cap(void **state)
{
	(void)state;
	const struct attention_params params[] = {{.softcap = 0}, {.softcap = 2}, {.window = 300}};
	enum { FROM = 520 };
	float plus[PLUS];
	for (int32_t i = 0; i < PLUS; i++)
		plus[i] = logf((float)random_int(&seed, 1, 40));
	/* Places for nothing, whole ranges of them too. */
	for (int32_t i = 256; i < 512; i++)
		plus[i] = -10000;
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++)
		for (size_t y = 0; y < 2; y++)
			for (size_t i = 0; i < sizeof params / sizeof *params; i++) {
				struct talk *t = open_talk(devices[d], types[y], 2);
				double want[DIM];
				if (!t)
					continue;
				t->params.softcap = params[i].softcap;
				t->params.window = params[i].window;
				converse(t, FROM, 60, plus, PLUS, false);
				for (int32_t row = FROM; row < N; row += 7)
					for (int32_t h = 0; h < HEADS; h++) {
						expect(&t->params, row, h, plus, want);
						for (int32_t x = 0; x < DIM; x++) {
							double got = t->out[((int64_t)row * HEADS + h) * DIM + x];
							if (!(fabs(got - want[x]) < (y ? 2e-2 : 2e-3)))
								fail_msg("%s %s: row %d, head %d has %g, not %g",
									 devices[d], types[y], (int)row, (int)h, got,
									 want[x]);
						}
					}
				close_talk(t);
			}
}

static void chunks_and_threads_change_no_bit_nor_does_adding_nothing(void **state)
{
	(void)state;
	float plus[PLUS], none[PLUS] = {0};
	for (int32_t i = 0; i < PLUS; i++)
		plus[i] = logf((float)random_int(&seed, 1, 9));
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++)
		for (size_t y = 0; y < 2; y++) {
			struct talk *one = open_talk(devices[d], types[y], 1),
				    *three = open_talk(devices[d], types[y], 3);
			if (!one) {
				print_message("%s: not on this machine\n", devices[d]);
				break;
			}
			converse(one, 600, 100, plus, PLUS, true);
			converse(three, 600, 1, plus, PLUS, true);
			assert_memory_equal(one->out, three->out, sizeof one->out);
			assert_memory_equal(one->mass, three->mass, sizeof one->mass);
			converse(three, 600, 7, plus, PLUS, false);
			assert_memory_equal(one->out, three->out, sizeof one->out);
			converse(one, 600, 100, NULL, 0, false);
			converse(three, 600, 9, none, PLUS, false);
			assert_memory_equal(one->out, three->out, sizeof one->out);
			close_talk(one);
			close_talk(three);
		}
}

/* Scores of pages that a row does not see. */
static void pages_elsewhere_are_scored_by_their_bounds(void **state)
{
	(void)state;
	enum { ELSEWHERE = 9, ROWS = 40, FROM = 600 };
	static uint16_t bounds[ELSEWHERE][1][KV_HEADS][2][DIM];
	static float low[ELSEWHERE][KV_HEADS][DIM], high[ELSEWHERE][KV_HEADS][DIM];
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++)
		for (size_t y = 0; y < 2; y++) {
			struct talk *one = open_talk(devices[d], types[y], 1),
				    *three = open_talk(devices[d], types[y], 3);
			double want[ELSEWHERE] = {0};
			if (!one)
				break;
			for (int i = 0; i < ELSEWHERE; i++)
				for (int h = 0; h < KV_HEADS; h++)
					for (int x = 0; x < DIM; x++) {
						/* Multiples of 1/8 are exact in both types. */
						low[i][h][x] = (float)random_int(&seed, -16, 4) / 8;
						high[i][h][x] = low[i][h][x] + (float)random_int(&seed, 0, 8) / 8;
						bounds[i][0][h][0][x] = y ? quant_float_to_bf16(low[i][h][x])
									  : quant_float_to_half(low[i][h][x]);
						bounds[i][0][h][1][x] = y ? quant_float_to_bf16(high[i][h][x])
									  : quant_float_to_half(high[i][h][x]);
					}
			bounds[4][0][1][0][7] = y ? quant_float_to_bf16(NAN) : quant_float_to_half(NAN);
			for (int row = FROM; row < FROM + ROWS; row++)
				for (int h = 0; h < KV_HEADS; h++) {
					double share[ELSEWHERE], total = 0;
					for (int i = 0; i < ELSEWHERE; i++) {
						double most = -INFINITY;
						for (int g = 0; g < GROUP; g++) {
							double sum = 0;
							for (int x = 0; x < DIM; x++) {
								double e =
									q[((int64_t)row * HEADS + h * GROUP + g) * DIM +
									  x];
								sum += e > 0 ? e * (double)high[i][h][x]
									     : e * (double)low[i][h][x];
							}
							most = sum > most ? sum : most;
						}
						share[i] = i == 4 && h == 1 ? 0 : exp(most * (double)one->params.scale);
						total += share[i];
					}
					for (int i = 0; i < ELSEWHERE; i++)
						want[i] += share[i] / total * (share[i] / total);
				}
			uint64_t scores[2][ELSEWHERE] = {{0}};
			for (int cut = 0; cut < 2; cut++) {
				struct talk *t = cut ? three : one;
				const struct page_probe probe = {ELSEWHERE, &bounds[0][0][0][0][0], scores[cut]};
				for (int32_t at = FROM, n; at < FROM + ROWS; at += n) {
					struct scattered s;
					n = cut ? 7 : ROWS;
					n = n > FROM + ROWS - at ? FROM + ROWS - at : n;
					scattered_init(&s);
					scattered_add(&s, table, at, n);
					s.seq[0].probe = &probe;
					assert_int_equal(t->b->ops->step_begin(t->b, &s.batch), STATUS_OK);
					assert_int_equal(t->b->ops->attention(t->b, t->kv, &t->layout, 0,
									      q + (int64_t)at * HEADS * DIM, HEADS,
									      &t->params,
									      t->out + (int64_t)at * HEADS * DIM),
							 STATUS_OK);
					assert_int_equal(t->b->ops->step_end(t->b), STATUS_OK);
				}
			}
			assert_memory_equal(scores[0], scores[1], sizeof scores[0]);
			for (int i = 0; i < ELSEWHERE; i++)
				if (!(fabs((double)scores[0][i] / (1 << KV_MASS_BITS) - want[i]) <
				      1e-3 * want[i] + 1e-4))
					fail_msg("%s: page %d has %g, not %g", devices[d], i,
						 (double)scores[0][i] / (1 << KV_MASS_BITS), want[i]);
			close_talk(one);
			close_talk(three);
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(logits_are_raised_behind_the_cap),
		cmocka_unit_test(chunks_and_threads_change_no_bit_nor_does_adding_nothing),
		cmocka_unit_test(pages_elsewhere_are_scored_by_their_bounds),
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
