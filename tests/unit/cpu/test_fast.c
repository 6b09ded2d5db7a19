/*
 * Every operation of every fast backend this machine can run, against the reference backend over random shapes, and the
 * promise that a row's result depends on that row alone, bit for bit.
 */
#include <math.h>
#include <stdio.h>

#include "tests/unit/cpu/fixture.h"

static const char *const devices[] = {"cpu-avx2",         "cpu-avx512", "cpu-avx512-bf16", "cpu-amx",
                                      "cpu-amx-emulated", "cpu-neon",   "cpu-neon-dotprod"};
static uint64_t seed = 11;
static struct backend *reference;

/* Runs a test for each fast backend that this machine has. */
static void each_device(void (*test)(struct backend *b))
{
	reference = open_backend("cpu-reference", 2);
	for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
		struct backend *b = open_backend(devices[i], 3);
		if (!b) {
			print_message("%s: not on this machine\n", devices[i]);
			continue;
		}
		test(b);
		b->ops->destroy(b);
	}
	reference->ops->destroy(reference);
}

/* ---- Matmul ---- */

/*
 * Error of quantised activations: each of n products is off by at most |w| * d / 2, d = max|x| / 127 of its 32 inputs;
 * errors are independent, so their sum stays within a few times its standard deviation, sqrt(sum (w d)^2 / 12). In
 * precise products d is a 256th of that. Floats that become bfloat16s are off by at most 2^-8 of themselves.
 */
static double product_bound(const float *w, const float *x, int64_t n, bool is_float, bool is_narrow, bool precise)
{
	double variance = 0, size = 0;
	for (int64_t i = 0; i < n; i++)
		size += fabs((double)w[i] * x[i]);
	for (int64_t i = 0; i < n && is_narrow; i++)
		variance += (double)w[i] * w[i] * x[i] * x[i] / 256 / 256 / 3;
	if (is_float && is_narrow)
		return 6 * sqrt(variance) + 2e-6 * size + 1e-9;
	if (is_float)
		return 2e-6 * size + 1e-9;
	for (int64_t i = 0; i < n; i += 32) {
		float top = 0;
		for (int64_t k = i; k < i + 32; k++)
			top = fabsf(x[k]) > top ? fabsf(x[k]) : top;
		for (int64_t k = i; k < i + 32; k++)
			variance += (double)w[k] * w[k] * top * top / 127 / 127 / 12 / (precise ? 256 * 256 : 1);
	}
	return 6 * sqrt(variance) + 2e-6 * size;
}

/* Whether a backend rounds quantised weights to bfloat16, and what they are multiplied with. */
static bool has_tiles(struct backend *b)
{
	struct backend_info info;
	b->ops->info(b, &info);
	return strncmp(info.name, "cpu-amx", 7) == 0;
}

static void compare_product(struct backend *b, const struct quant_format *f, int64_t n_in, int64_t n_out,
                            int64_t n_rows, bool accumulate, bool with_bias, bool precise)
{
	size_t n = (size_t)(n_rows * n_out);
	void *data = random_matrix(&seed, f, n_in, n_out);
	float *x = random_floats(&seed, (size_t)(n_rows * n_in)), *bias = random_floats(&seed, (size_t)n_out);
	struct backend_info info;
	b->ops->info(b, &info);
	bool tiles = has_tiles(b) && !precise && (f->block_elems > 1 || f->type == QUANT_BF16);
	bool narrow =
		tiles || (f->type == QUANT_BF16 && !precise && strcmp(info.name, "cpu-avx512-bf16") == 0);
	float *y = random_floats(&seed, n), *want = malloc(n * sizeof *want), *row = malloc((size_t)n_in * sizeof *row);
	memcpy(want, y, n * sizeof *want);
	struct weight *w = open_weight(b, f, n_in, n_out, data), *rw = open_weight(reference, f, n_in, n_out, data);
	struct matmul mm = {w, with_bias ? bias : NULL, y, accumulate, precise},
		      rmm = {rw, mm.bias, want, accumulate, precise};
	assert_int_equal(b->ops->matmul(b, x, n_rows, &mm, 1), STATUS_OK);
	assert_int_equal(reference->ops->matmul(reference, x, n_rows, &rmm, 1), STATUS_OK);
	for (int64_t o = 0; o < n_out; o++) {
		f->dequantize((char *)data + (size_t)(o * (n_in / f->block_elems)) * f->block_bytes, row, (size_t)n_in);
		for (int64_t r = 0; r < n_rows; r++) {
			double bound = product_bound(row, x + r * n_in, n_in, f->block_elems == 1 || tiles, narrow,
			                             precise);
			double off = fabs((double)y[r * n_out + o] - want[r * n_out + o]);
			if (!(off <= bound))
				fail_msg("%s %ldx%ld, row %ld of %ld, output %ld: %g instead of %g, bound %g", f->name,
				         (long)n_in, (long)n_out, (long)r, (long)n_rows, (long)o, y[r * n_out + o],
				         want[r * n_out + o], bound);
		}
	}
	b->ops->weight_destroy(b, w);
	reference->ops->weight_destroy(reference, rw);
	free(data);
	free(x);
	free(bias);
	free(y);
	free(want);
	free(row);
}

static void products(struct backend *b)
{
	const struct quant_format *f;
	for (size_t i = 0; (f = quant_format_at(i)); i++) {
		for (int k = 0; k < 8; k++) {
			int64_t blocks = random_int(&seed, 1, 5);
			int64_t n_in = f->block_elems == 1 ? random_int(&seed, 1, 300) : blocks * f->block_elems;
			compare_product(b, f, n_in, random_int(&seed, 1, 150), random_int(&seed, 1, 70), k & 1, k & 2,
			                false);
		}
		for (int rows = 1; rows <= 17; rows++)
			compare_product(b, f, 256, 33, rows, false, false, false);
	}
}

static void products_are_those_of_the_reference(void **state)
{
	(void)state;
	each_device(products);
}

static void precise_products(struct backend *b)
{
	const struct quant_format *f;
	for (size_t i = 0; (f = quant_format_at(i)); i++)
		for (int rows = 1; rows <= 17; rows++)
			compare_product(b, f, 512, random_int(&seed, 1, 150), rows, false, false, true);
}

static void precise_products_are_those_of_the_reference(void **state)
{
	(void)state;
	each_device(precise_products);
}

/*
 * With activations that quantise without error (integers up to 127, one of them in each unit of 32), what remains is
 * the rounding of float sums: K-quants and all others keep their integers and scales exactly.
 */
static void exact_products(struct backend *b)
{
	const struct quant_format *f;
	for (size_t i = 0; (f = quant_format_at(i)); i++) {
		enum { IN = 512, OUTS = 40, ROWS = 5 };
		void *data = random_matrix(&seed, f, IN, OUTS);
		float *x = random_floats(&seed, IN * ROWS), y[OUTS * ROWS], row[IN];
		for (int k = 0; k < IN * ROWS; k++)
			x[k] = k % 32 == 5 ? -127 : (float)random_int(&seed, -127, 127);
		struct weight *w = open_weight(b, f, IN, OUTS, data);
		struct matmul mm = {w, NULL, y, false};
		assert_int_equal(b->ops->matmul(b, x, ROWS, &mm, 1), STATUS_OK);
		for (int o = 0; o < OUTS; o++) {
			f->dequantize((char *)data + (size_t)o * (IN / f->block_elems) * f->block_bytes, row, IN);
			for (int r = 0; r < ROWS; r++) {
				double sum = 0, size = 0;
				for (int k = 0; k < IN; k++) {
					sum += (double)row[k] * x[r * IN + k];
					size += fabs((double)row[k] * x[r * IN + k]);
				}
				/* Half a unit of bfloat16's last place for each weight. */
				double part = has_tiles(b) && f->block_elems > 1 ? 0x1p-9 + 1e-6 : 1e-6;
				if (!(fabs(y[r * OUTS + o] - sum) <= part * size))
					fail_msg("%s: %g instead of %g", f->name, y[r * OUTS + o], sum);
			}
		}
		b->ops->weight_destroy(b, w);
		free(data);
		free(x);
	}
}

static void weights_are_kept_exactly(void **state)
{
	(void)state;
	each_device(exact_products);
}

/* The row `r` of a product over n rows equals that of the row alone, with any number of threads, precise or not. */
static void row_of_product(struct backend *b)
{
	enum { OUTS = 100, ROWS = 64 };
	const char *name;
	struct backend_info info;
	b->ops->info(b, &info);
	name = info.name;
	const struct quant_format *f;
	for (size_t i = 0; (f = quant_format_at(i)); i++) {
		int64_t n_in = f->block_elems == 1 ? 331 : 768;
		void *data = random_matrix(&seed, f, n_in, OUTS);
		float *x = random_floats(&seed, (size_t)n_in * ROWS), alone[OUTS], *y = malloc(sizeof *y * OUTS * ROWS);
		struct weight *w = open_weight(b, f, n_in, OUTS, data);
		for (int k = 0; k < 4; k++)
			for (int rows = 1; rows <= ROWS; rows = rows < 13 ? rows + 1 : rows + 17) {
				struct backend *other = open_backend(name, k % 2 ? 4 : 1);
				struct weight *ow = open_weight(other, f, n_in, OUTS, data);
				struct matmul many = {ow, NULL, y, false, k / 2};
				assert_int_equal(other->ops->matmul(other, x, rows, &many, 1), STATUS_OK);
				for (int r = 0; r < rows; r++) {
					struct matmul one = {w, NULL, alone, false, k / 2};
					b->ops->matmul(b, x + r * n_in, 1, &one, 1);
					assert_memory_equal(alone, y + r * OUTS, sizeof alone);
				}
				other->ops->weight_destroy(other, ow);
				other->ops->destroy(other);
			}
		b->ops->weight_destroy(b, w);
		free(data);
		free(x);
		free(y);
	}
}

static void a_row_of_a_product_does_not_depend_on_the_others(void **state)
{
	(void)state;
	each_device(row_of_product);
}

/* Several products over the same input, of several formats, give what each alone gives. */
static void joint_products(struct backend *b)
{
	const enum quant_type types[] = {QUANT_Q4_K, QUANT_Q6_K, QUANT_F16, QUANT_Q8_0};
	enum { N = 4, ROWS = 11, IN = 512 };
	const int64_t outs[N] = {130, 17, 70, 64};
	float *x = random_floats(&seed, IN * ROWS), *y[N], *alone[N];
	struct matmul mm[N];
	void *data[N];
	for (int i = 0; i < N; i++) {
		const struct quant_format *f = quant_format(types[i]);
		data[i] = random_matrix(&seed, f, IN, outs[i]);
		y[i] = random_floats(&seed, (size_t)outs[i] * ROWS);
		alone[i] = random_floats(&seed, (size_t)outs[i] * ROWS);
		mm[i] = (struct matmul){open_weight(b, f, IN, outs[i], data[i]), NULL, y[i], false};
	}
	assert_int_equal(b->ops->matmul(b, x, ROWS, mm, N), STATUS_OK);
	for (int i = 0; i < N; i++) {
		mm[i].y = alone[i];
		assert_int_equal(b->ops->matmul(b, x, ROWS, &mm[i], 1), STATUS_OK);
		assert_memory_equal(y[i], alone[i], sizeof(float) * (size_t)outs[i] * ROWS);
		b->ops->weight_destroy(b, (struct weight *)mm[i].weight);
		free(data[i]);
		free(y[i]);
		free(alone[i]);
	}
	free(x);
}

static void joint_products_are_those_of_each(void **state)
{
	(void)state;
	each_device(joint_products);
}

static void zero_and_huge(struct backend *b)
{
	enum { IN = 64, OUTS = 20 };
	const struct quant_format *f = quant_format(QUANT_Q4_0);
	void *data = random_matrix(&seed, f, IN, OUTS);
	struct weight *w = open_weight(b, f, IN, OUTS, data);
	float x[IN] = {0}, y[OUTS];
	struct matmul mm = {w, NULL, y, false};
	assert_int_equal(b->ops->matmul(b, x, 1, &mm, 1), STATUS_OK);
	for (int o = 0; o < OUTS; o++)
		assert_true(y[o] == 0);
	x[3] = 0x1p-126f; /* its inverse scale is infinite */
	assert_int_equal(b->ops->matmul(b, x, 1, &mm, 1), STATUS_OK);
	for (int o = 0; o < OUTS; o++)
		assert_true(fabsf(y[o]) < 1e-30f);
	x[3] = 1e30f;
	assert_int_equal(b->ops->matmul(b, x, 1, &mm, 1), STATUS_OK);
	for (int o = 0; o < OUTS; o++)
		assert_true(isfinite(y[o]));
	b->ops->weight_destroy(b, w);
	free(data);
}

static void zeros_and_extremes_of_activations_stay_finite(void **state)
{
	(void)state;
	each_device(zero_and_huge);
}

static void table_only(struct backend *b)
{
	const struct quant_format *f = quant_format(QUANT_Q6_K);
	void *data = random_matrix(&seed, f, 256, 30);
	struct weight_desc d = {
		.name = "token_embd.weight", .format = f, .n_in = 256, .n_out = 30, .data = data, .rows_only = true};
	struct weight *w;
	assert_int_equal(b->ops->weight_create(b, &d, &w, NULL), STATUS_OK);
	assert_int_equal(b->ops->weight_bytes(b, w), 0);
	struct scattered s;
	scattered_init(&s);
	scattered_add(&s, NULL, 0, 40);
	for (int i = 0; i < 40; i++)
		s.token[i] = random_int(&seed, 0, 29);
	float *out = malloc(sizeof *out * 40 * 256), row[256];
	b->ops->step_begin(b, &s.batch);
	assert_int_equal(b->ops->embed(b, w, 1, out), STATUS_OK);
	for (int i = 0; i < 40; i++) {
		f->dequantize((char *)data + s.token[i] * 210, row, 256);
		assert_memory_equal(row, out + i * 256, sizeof row);
	}
	struct matmul mm = {w, NULL, out, false};
	assert_int_equal(b->ops->matmul(b, out, 1, &mm, 1), STATUS_INVALID);
	s.token[7] = 30;
	assert_int_equal(b->ops->embed(b, w, 1, out), STATUS_INVALID);
	b->ops->step_end(b);
	b->ops->weight_destroy(b, w);
	free(out);
	free(data);
}

static void an_embedding_table_takes_no_memory(void **state)
{
	(void)state;
	each_device(table_only);
}

/* ---- Rows ---- */

static void assert_close(const float *got, const float *want, size_t n, double tolerance)
{
	for (size_t i = 0; i < n; i++)
		if (!(fabs((double)got[i] - want[i]) <= tolerance * (1 + fabs(want[i]))))
			fail_msg("element %zu: %g instead of %g", i, got[i], want[i]);
}

static void row_operations(struct backend *b)
{
	for (int round = 0; round < 20; round++) {
		int32_t n = random_int(&seed, 1, 70), dim = random_int(&seed, 1, 700);
		size_t size = (size_t)n * (size_t)dim;
		float *x = random_floats(&seed, size), *up = random_floats(&seed, size),
		      *gain = random_floats(&seed, (size_t)dim);
		float *got = malloc(size * sizeof *got), *want = malloc(size * sizeof *want);
		b->ops->rms_norm(b, x, n, dim, gain, 1e-5f, got);
		reference->ops->rms_norm(reference, x, n, dim, gain, 1e-5f, want);
		assert_close(got, want, size, 2e-6);
		memcpy(got, x, size * sizeof *got);
		b->ops->rms_norm(b, got, n, dim, gain, 1e-5f, got); /* in place */
		assert_close(got, want, size, 2e-6);
		b->ops->rms_norm_add(b, x, n, dim, gain, 1e-5f, got); /* to what is there */
		reference->ops->rms_norm_add(reference, x, n, dim, gain, 1e-5f, want);
		assert_close(got, want, size, 2e-6);
		for (int f = 0; f < 4; f++) {
			for (size_t i = 0; i < size && f == 2; i++)
				x[i] *= 20; /* far into both tails of the exponential */
			memcpy(got, x, size * sizeof *got);
			memcpy(want, x, size * sizeof *want);
			b->ops->glu(b, f % 2 ? GLU_GELU : GLU_SILU, got, up, n, dim);
			reference->ops->glu(reference, f % 2 ? GLU_GELU : GLU_SILU, want, up, n, dim);
			assert_close(got, want, size, 2e-6);
		}
		for (float cap = 0.5f; cap < 100; cap *= 6) {
			memcpy(got, x, size * sizeof *got);
			memcpy(want, x, size * sizeof *want);
			b->ops->softcap(b, got, (int64_t)size, cap);
			reference->ops->softcap(reference, want, (int64_t)size, cap);
			assert_close(got, want, size, 2e-6 + 2e-7 * cap);
		}
		free(x);
		free(up);
		free(gain);
		free(got);
		free(want);
	}
	float gate[3] = {-200, 200, -88.5f}, up[3] = {1, 1, 1};
	b->ops->glu(b, GLU_SILU, gate, up, 1, 3);
	assert_float_equal(gate[0], 0, 1e-30);
	assert_float_equal(gate[1], 200, 1e-4);
	assert_float_equal(gate[2], 0, 1e-30);
	float wide[5] = {-1e9f, 1e9f, 0, NAN, 1e-3f};
	b->ops->softcap(b, wide, 5, 30);
	assert_true(wide[0] == -30 && wide[1] == 30 && wide[2] == 0 && isnan(wide[3]) &&
	            fabsf(wide[4] - 1e-3f) < 1e-5f);
	float tail[4] = {-1e9f, 1e9f, -20, 20}, ones[4] = {1, 1, 1, 1};
	b->ops->glu(b, GLU_GELU, tail, ones, 1, 4);
	assert_true(fabsf(tail[0]) < 1e-28f && tail[1] == 1e9f && fabsf(tail[2]) < 1e-30f && tail[3] == 20);
}

static void norms_gates_and_caps_are_those_of_the_reference(void **state)
{
	(void)state;
	each_device(row_operations);
}

static void turns(struct backend *b)
{
	for (int round = 0; round < 20; round++) {
		int32_t n_head = random_int(&seed, 1, 9), dim = 2 * random_int(&seed, 1, 70);
		int32_t rows = random_int(&seed, 1, 70), rotated = 2 * random_int(&seed, 1, dim / 2);
		float freq[70];
		for (int i = 0; i < rotated / 2; i++)
			freq[i] = (float)pow(10000, -2.0 * i / rotated);
		struct rope_params p = {round % 2 ? ROPE_HALVES : ROPE_INTERLEAVED, rotated, freq, 1.1f};
		struct scattered s;
		scattered_init(&s);
		scattered_add(&s, NULL, random_int(&seed, 0, 100000), rows);
		size_t size = (size_t)(rows * n_head * dim), k_size = (size_t)(rows * dim);
		float *q = random_floats(&seed, size), *k = random_floats(&seed, k_size);
		float *rq = malloc(size * sizeof *rq), *rk = malloc(k_size * sizeof *rk);
		memcpy(rq, q, size * sizeof *q);
		memcpy(rk, k, k_size * sizeof *k);
		b->ops->step_begin(b, &s.batch);
		reference->ops->step_begin(reference, &s.batch);
		for (int layer = 0; layer < 2; layer++) { /* the second uses the table of the first */
			assert_int_equal(b->ops->rope(b, q, n_head, k, 1, dim, &p), STATUS_OK);
			reference->ops->rope(reference, rq, n_head, rk, 1, dim, &p);
		}
		b->ops->step_end(b);
		reference->ops->step_end(reference);
		assert_close(q, rq, size, 2e-6);
		assert_close(k, rk, k_size, 2e-6);
		free(q);
		free(k);
		free(rq);
		free(rk);
	}
}

static void rope_is_that_of_the_reference(void **state)
{
	(void)state;
	each_device(turns);
}

/* ---- Attention ---- */

struct kv_case {
	struct kv_layout layout;
	int32_t n_head;
	int32_t n_pages;
	void *kv;
	struct backend *b;
	struct attention_params params;
};

static struct kv_case open_kv(struct backend *b, int32_t n_head_kv, int32_t group, int32_t dim, int32_t n_pages)
{
	struct kv_case c = {.n_head = n_head_kv * group, .n_pages = n_pages, .b = b};
	c.params.scale = 1 / sqrtf((float)dim);
	assert_int_equal(kv_layout_for(b, &c.layout, 2, n_head_kv, dim), STATUS_OK);
	assert_int_equal(b->ops->mem_alloc(b, c.layout.page_stride * (size_t)n_pages, &c.kv), STATUS_OK);
	/* Pages that were used before hold anything: here, what is not a number, as a half and as a bfloat16. */
	memset(c.kv, 0xFF, c.layout.page_stride * (size_t)n_pages);
	return c;
}

static bool exact_pages; /* both sides have pages of one type, and compute with floats */

/* Attention differs from that of the reference, whose pages are halves, by little: bfloat16s carry eight bits. */
static void assert_attention(const struct kv_case *c, const float *got, const float *want, size_t n)
{
	bool narrow = c->layout.type == QUANT_BF16 && !exact_pages;
	double sum = 0;
	for (size_t i = 0; i < n; i++)
		sum += fabs((double)got[i] - want[i]);
	assert_close(got, want, n, narrow ? 3e-2 : 5e-6);
	assert_true(sum / (double)n <= (narrow ? 2e-3 : 5e-6));
}

static void close_kv(struct kv_case *c)
{
	c->b->ops->mem_free(c->b, c->kv, c->layout.page_stride * (size_t)c->n_pages);
}

/* One step over the batch in layer 1: k, v and q are rows of the batch. */
static void step(struct kv_case *c, const struct batch *batch, const float *k, const float *v, const float *q,
                 float *out)
{
	struct backend *b = c->b;
	assert_int_equal(b->ops->step_begin(b, batch), STATUS_OK);
	assert_int_equal(b->ops->kv_write(b, c->kv, &c->layout, 1, k, v), STATUS_OK);
	assert_int_equal(b->ops->attention(b, c->kv, &c->layout, 1, q, c->n_head, &c->params, out), STATUS_OK);
	assert_int_equal(b->ops->step_end(b), STATUS_OK);
}

static void attends(struct backend *b)
{
	const struct {
		int32_t n_head_kv, group, dim;
	} shapes[] = {{3, 3, 64},  {2, 1, 128}, {1, 8, 80}, {2, 5, 12},
	              {1, 40, 32}, {2, 4, 67},  {4, 7, 16}, {1, 2, 256}};
	static const struct {
		float softcap;
		int32_t window;
	} params[] = {{0, 0}, {0, 23}, {0.8f, 0}, {2, 64}, {0, 1}, {0, 1000}};
	for (size_t i = 0; i < sizeof shapes / sizeof shapes[0] + 5; i++) {
		enum { SEQS = 4, PAGES = 120, STEPS = 4, SHAPES = sizeof shapes / sizeof shapes[0] };
		int32_t dim = shapes[i % SHAPES].dim, group = shapes[i % SHAPES].group,
			n_head_kv = shapes[i % SHAPES].n_head_kv, at[SEQS] = {0};
		struct kv_case c = open_kv(b, n_head_kv, group, dim, PAGES),
			       r = open_kv(reference, n_head_kv, group, dim, PAGES);
		c.params.softcap = r.params.softcap = params[i % 6].softcap;
		c.params.window = r.params.window = params[i % 6].window;
		struct scattered s;
		scattered_init(&s);
		scattered_shuffle(&s, &seed, PAGES);
		for (int k = 0; k < STEPS; k++) {
			s.batch.n_seqs = s.batch.n_rows = 0;
			for (int seq = 0; seq < SEQS; seq++) {
				/* prompts, chunks and single rows, and one sequence that skips a step */
				int32_t n = k == 3 || seq == 2 ? 1 : random_int(&seed, 1, seq == 0 ? 100 : 40);
				if (seq == 3 && k == 1)
					continue;
				scattered_add(&s, s.pages + seq * (PAGES / SEQS), at[seq], n);
				at[seq] += n;
			}
			size_t rows = (size_t)s.batch.n_rows, kv_size = rows * (size_t)(n_head_kv * dim);
			size_t q_size = kv_size * (size_t)group;
			float *key = random_floats(&seed, kv_size), *value = random_floats(&seed, kv_size);
			float *q = random_floats(&seed, q_size), *got = malloc(q_size * 4), *want = malloc(q_size * 4);
			step(&c, &s.batch, key, value, q, got);
			step(&r, &s.batch, key, value, q, want);
			assert_attention(&c, got, want, q_size);
			free(key);
			free(value);
			free(q);
			free(got);
			free(want);
		}
		close_kv(&c);
		close_kv(&r);
	}
}

static void attention_is_that_of_the_reference(void **state)
{
	(void)state;
	each_device(attends);
}

/*
 * --kv-dtype: halves where bfloat16s are the better ones, and the other way round. Both sides store the same elements.
 */
static void attends_in_the_other_type(struct backend *b)
{
	struct backend_info info;
	b->ops->info(b, &info);
	enum quant_type other = info.kv_type == QUANT_F16 ? QUANT_BF16 : QUANT_F16;
	assert_int_equal(b->ops->choose_kv(b, QUANT_Q8_0), STATUS_UNSUPPORTED);
	assert_int_equal(b->ops->choose_kv(b, other), STATUS_OK);
	assert_int_equal(reference->ops->choose_kv(reference, other), STATUS_OK);
	b->ops->info(b, &info);
	assert_int_equal(info.kv_type, other);
	exact_pages = true;
	attends(b);
	exact_pages = false;
	assert_int_equal(reference->ops->choose_kv(reference, QUANT_F16), STATUS_OK);
}

static void attention_in_the_other_type_is_that_of_the_reference(void **state)
{
	(void)state;
	each_device(attends_in_the_other_type);
}

/* Queries that look for the one position with the largest key in some dimension find it, and get its value as it is. */
static void looks_up(struct backend *b)
{
	const struct {
		int32_t n_head_kv, group, dim;
	} shapes[] = {{2, 3, 67}, {1, 1, 64}, {3, 2, 80}, {1, 7, 16}, {2, 2, 1}};
	for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
		enum { PAGES = 16, N = 199 };
		int32_t dim = shapes[i].dim, group = shapes[i].group, n_head_kv = shapes[i].n_head_kv,
			n_head = n_head_kv * group;
		struct kv_case c = open_kv(b, n_head_kv, group, dim, PAGES);
		struct scattered s;
		scattered_init(&s);
		scattered_shuffle(&s, &seed, PAGES);
		scattered_add(&s, s.pages, 0, N);
		size_t kv_size = (size_t)(N * n_head_kv * dim), q_size = kv_size * (size_t)group;
		float *k = malloc(kv_size * 4), *v = malloc(kv_size * 4), *q = calloc(q_size, 4),
		      *got = malloc(q_size * 4);
		float *want = malloc(q_size * 4);
		for (size_t e = 0; e < kv_size; e++) {
			int32_t d = (int32_t)e % dim, h = (int32_t)e / dim % n_head_kv,
				t = (int32_t)e / dim / n_head_kv;
			k[e] = (float)(37 * (t + 5 * d + 11 * h) % 251 - 125); /* of no two positions the same */
			v[e] = (float)random_int(&seed, -200, 200);
		}
		for (int32_t row = 0; row < N; row++)
			for (int32_t h = 0; h < n_head; h++) {
				int32_t d = (row + h) % dim, best = 0;
				for (int32_t t = 1; t <= row; t++)
					if (k[(t * n_head_kv + h / group) * dim + d] >
					    k[(best * n_head_kv + h / group) * dim + d])
						best = t;
				q[(row * n_head + h) * dim + d] = 512;
				memcpy(want + (row * n_head + h) * dim, v + (best * n_head_kv + h / group) * dim,
				       (size_t)dim * 4);
			}
		step(&c, &s.batch, k, v, q, got);
		assert_close(got, want, q_size, 1e-6);
		close_kv(&c);
		free(k);
		free(v);
		free(q);
		free(got);
		free(want);
	}
}

static void attention_finds_a_position(void **state)
{
	(void)state;
	each_device(looks_up);
}

/* One conversation of n positions, its rows computed in chunks of `chunk`; out holds all rows in the end. */
static void converse(struct kv_case *c, const int32_t *table, int32_t n, int32_t chunk, const float *k, const float *v,
                     const float *q, float *out)
{
	int64_t kv_width = (int64_t)c->layout.n_head_kv * c->layout.head_dim,
		q_width = (int64_t)c->n_head * c->layout.head_dim;
	for (int32_t at = 0; at < n; at += chunk) {
		struct scattered s;
		scattered_init(&s);
		scattered_add(&s, table, at, at + chunk < n ? chunk : n - at);
		step(c, &s.batch, k + at * kv_width, v + at * kv_width, q + at * q_width, out + at * q_width);
	}
}

/* Writes k and v of positions 0 .. n without attending. */
static void fill(struct kv_case *c, const int32_t *table, int32_t n, const float *k, const float *v)
{
	enum { CHUNK = 512 };
	int64_t width = (int64_t)c->layout.n_head_kv * c->layout.head_dim;
	for (int32_t at = 0; at < n; at += CHUNK) {
		struct scattered s;
		scattered_init(&s);
		scattered_add(&s, table, at, at + CHUNK < n ? CHUNK : n - at);
		assert_int_equal(c->b->ops->step_begin(c->b, &s.batch), STATUS_OK);
		assert_int_equal(c->b->ops->kv_write(c->b, c->kv, &c->layout, 1, k + at * width, v + at * width),
		                 STATUS_OK);
		assert_int_equal(c->b->ops->step_end(c->b), STATUS_OK);
	}
}

/* Chunks, pages, neighbours and threads change nothing, also far beyond one range of positions. */
static void rows_alone_in(struct backend *b, int32_t window)
{
	enum { KV_HEADS = 2, GROUP = 3, DIM = 32, N = 1100, PAGES = 300, TABLE = 70 };
	struct backend_info info;
	b->ops->info(b, &info);
	size_t kv_size = (size_t)N * KV_HEADS * DIM, q_size = kv_size * GROUP;
	float *k = random_floats(&seed, kv_size), *v = random_floats(&seed, kv_size), *q = random_floats(&seed, q_size);
	float *want = malloc(q_size * sizeof *want), *got = malloc(q_size * sizeof *got);
	struct scattered pool;
	scattered_init(&pool);
	scattered_shuffle(&pool, &seed, PAGES);
	struct kv_case c = open_kv(b, KV_HEADS, GROUP, DIM, PAGES);
	c.params.window = window;
	converse(&c, pool.pages, N, 1, k, v, q, want);
	const int32_t chunks[] = {2, 7, 16, 33, 512};
	for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++)
		for (int threads = 1; threads <= 5; threads += 2) {
			struct backend *other = open_backend(info.name, threads);
			struct kv_case o = open_kv(other, KV_HEADS, GROUP, DIM, PAGES);
			o.params.window = window;
			memset(got, 0, q_size * sizeof *got);
			converse(&o, pool.pages + 80, N, chunks[i], k, v, q, got);
			assert_memory_equal(got, want, q_size * sizeof *got);
			close_kv(&o);
			other->ops->destroy(other);
		}
	/* The last row again, beside 20 rows of others that do their own writing. */
	struct scattered s;
	scattered_init(&s);
	float *bk = random_floats(&seed, 21 * KV_HEADS * DIM), *bv = random_floats(&seed, 21 * KV_HEADS * DIM);
	float *bq = random_floats(&seed, 21 * KV_HEADS * GROUP * DIM),
	      *bout = random_floats(&seed, 21 * KV_HEADS * GROUP * DIM);
	scattered_add(&s, pool.pages + TABLE, 0, 12);
	scattered_add(&s, pool.pages, N - 1, 1);
	scattered_add(&s, pool.pages + TABLE + 1, 0, 8);
	memcpy(bk + 12 * KV_HEADS * DIM, k + (N - 1) * KV_HEADS * DIM, sizeof(float) * KV_HEADS * DIM);
	memcpy(bv + 12 * KV_HEADS * DIM, v + (N - 1) * KV_HEADS * DIM, sizeof(float) * KV_HEADS * DIM);
	memcpy(bq + 12 * KV_HEADS * GROUP * DIM, q + (N - 1) * KV_HEADS * GROUP * DIM,
	       sizeof(float) * KV_HEADS * GROUP * DIM);
	step(&c, &s.batch, bk, bv, bq, bout);
	assert_memory_equal(bout + 12 * KV_HEADS * GROUP * DIM, want + (N - 1) * KV_HEADS * GROUP * DIM,
	                    sizeof(float) * KV_HEADS * GROUP * DIM);
	close_kv(&c);
	free(k);
	free(v);
	free(q);
	free(want);
	free(got);
	free(bk);
	free(bv);
	free(bq);
	free(bout);
}

static void rows_alone(struct backend *b)
{
	rows_alone_in(b, 0);
	rows_alone_in(b, 300);
}

static void a_row_attends_the_same_whatever_stands_beside_it(void **state)
{
	(void)state;
	each_device(rows_alone);
}

/*
 * Beyond 8,192 positions ranges grow longer; tiles end where they do. Pages before all windows are read by nobody:
 * there stands one that holds no numbers.
 */
static void long_rows_in(struct backend *b, int32_t window)
{
	enum { DIM = 16, N = 8210, PAGES = 520, LAST = 40 };
	struct kv_case c = open_kv(b, 1, 2, DIM, PAGES), r = open_kv(reference, 1, 2, DIM, PAGES);
	float *k = random_floats(&seed, N * DIM), *v = random_floats(&seed, N * DIM),
	      *q = random_floats(&seed, N * DIM * 2);
	float *got = malloc(sizeof(float) * N * DIM * 2), *want = malloc(sizeof(float) * N * DIM * 2);
	struct scattered pool;
	scattered_init(&pool);
	scattered_shuffle(&pool, &seed, PAGES);
	c.params.window = r.params.window = window;
	fill(&c, pool.pages, N - LAST, k, v);
	fill(&r, pool.pages, N - LAST, k, v);
	for (int page = 0; window && page < (N - LAST - window + 1) / KV_PAGE_TOKENS; page++)
		pool.pages[page] = pool.pages[PAGES - 1];
	/* the last rows at once, then one by one */
	for (int chunk = LAST; chunk >= 1; chunk -= LAST - 1)
		for (int at = N - LAST; at < N; at += chunk) {
			struct scattered s;
			scattered_init(&s);
			scattered_add(&s, pool.pages, at, chunk);
			step(&c, &s.batch, k + at * DIM, v + at * DIM, q + at * DIM * 2,
			     chunk == 1 ? want + at * DIM * 2 : got + at * DIM * 2);
		}
	assert_memory_equal(got + (N - LAST) * DIM * 2, want + (N - LAST) * DIM * 2, sizeof(float) * LAST * DIM * 2);
	struct scattered s;
	scattered_init(&s);
	scattered_add(&s, pool.pages, N - LAST, LAST);
	step(&r, &s.batch, k + (N - LAST) * DIM, v + (N - LAST) * DIM, q + (N - LAST) * DIM * 2,
	     want + (N - LAST) * DIM * 2);
	assert_attention(&c, got + (N - LAST) * DIM * 2, want + (N - LAST) * DIM * 2, LAST * DIM * 2);
	close_kv(&c);
	close_kv(&r);
	free(k);
	free(v);
	free(q);
	free(got);
	free(want);
}

static void long_rows(struct backend *b)
{
	const int32_t windows[] = {0, 1, 100, 1024, 3000, 8200};
	for (size_t i = 0; i < sizeof windows / sizeof windows[0]; i++)
		long_rows_in(b, windows[i]);
}

static void long_contexts_are_attended_alike(void **state)
{
	(void)state;
	each_device(long_rows);
}

static void copied_pages(struct backend *b)
{
	enum { DIM = 8, N = 20, PAGES = 6 };
	struct kv_case c = open_kv(b, 2, 2, DIM, PAGES);
	float *k = random_floats(&seed, N * 2 * DIM), *v = random_floats(&seed, N * 2 * DIM),
	      *q = random_floats(&seed, N * 4 * DIM);
	float out[N * 4 * DIM], again[4 * DIM];
	const int32_t table[] = {3, 1}, copy[] = {0, 5};
	converse(&c, table, N, N, k, v, q, out);
	assert_int_equal(b->ops->page_copy(b, c.kv, &c.layout, table, copy, 2), STATUS_OK);
	struct scattered s;
	scattered_init(&s);
	scattered_add(&s, copy, N - 1, 1);
	step(&c, &s.batch, k + (N - 1) * 2 * DIM, v + (N - 1) * 2 * DIM, q + (N - 1) * 4 * DIM, again);
	assert_memory_equal(again, out + (N - 1) * 4 * DIM, sizeof again);
	close_kv(&c);
	free(k);
	free(v);
	free(q);
}

static void a_copied_page_serves_like_the_first(void **state)
{
	(void)state;
	each_device(copied_pages);
}

static void gathered(struct backend *b)
{
	float x[6] = {0, 1, 2, 3, 4, 5}, out[4];
	const int32_t rows[] = {2, 0};
	assert_int_equal(b->ops->gather_rows(b, x, 2, rows, 2, out), STATUS_OK);
	assert_true(out[0] == 4 && out[1] == 5 && out[2] == 0 && out[3] == 1);
}

static void rows_are_gathered(void **state)
{
	(void)state;
	each_device(gathered);
}

UNIT_MAIN(cmocka_unit_test(products_are_those_of_the_reference), cmocka_unit_test(weights_are_kept_exactly),
          cmocka_unit_test(a_row_of_a_product_does_not_depend_on_the_others),
          cmocka_unit_test(joint_products_are_those_of_each),
          cmocka_unit_test(zeros_and_extremes_of_activations_stay_finite),
          cmocka_unit_test(an_embedding_table_takes_no_memory),
          cmocka_unit_test(norms_gates_and_caps_are_those_of_the_reference),
          cmocka_unit_test(rope_is_that_of_the_reference), cmocka_unit_test(attention_is_that_of_the_reference),
          cmocka_unit_test(attention_in_the_other_type_is_that_of_the_reference),
          cmocka_unit_test(attention_finds_a_position),
          cmocka_unit_test(a_row_attends_the_same_whatever_stands_beside_it),
          cmocka_unit_test(long_contexts_are_attended_alike), cmocka_unit_test(a_copied_page_serves_like_the_first),
          cmocka_unit_test(rows_are_gathered), cmocka_unit_test(precise_products_are_those_of_the_reference))
