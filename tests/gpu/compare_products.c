/* Products and embedding in every format. */
#include "tests/gpu/compare.h"

/*
 * What rounding may do to one output: each product is off by an error of its own, and so their sum stays within a few
 * times its standard deviation; sums of floats in another order add a share of the size of what was summed.
 */
static double product_bound(const struct pair *p, const float *w, const float *x, int64_t n)
{
	double variance = 0, size = 0;
	for (int64_t i = 0; i < n; i += 32) {
		int64_t end = i + 32 < n ? i + 32 : n;
		float top = 0;
		for (int64_t k = i; k < end; k++)
			top = fabsf(x[k]) > top ? fabsf(x[k]) : top;
		for (int64_t k = i; k < end; k++) {
			double term = (double)w[k] * x[k], group = (double)w[k] * top * p->group_error;
			size += fabs(term);
			variance += group * group / 3 + 2 * term * term * p->element_error * p->element_error / 3;
		}
	}
	return 6 * sqrt(variance) + 4e-6 * size + 1e-9;
}

struct product_case {
	int64_t n_in, n_out, n_rows;
	bool accumulate, bias, precise;
};

static struct weight *weight_on(struct backend *b, const struct quant_format *f, const struct product_case *c,
                                const void *data, bool rows_only)
{
	struct weight_desc d = {"weight", f, c->n_in, c->n_out, data, rows_only};
	struct weight *w;
	struct error err = {0};
	if (b->ops->weight_create(b, &d, &w, &err) != STATUS_OK)
		give_up("weight_create: %s", err.message);
	return w;
}

/* Checks the product's outputs; of a large one, about a thousand spread over it. */
static void check_product(struct pair *p, const struct quant_format *f, const struct product_case *c, const void *data,
                          const struct operand *x, const struct operand *y)
{
	float *got, *want, *row = malloc((size_t)c->n_in * sizeof *row);
	size_t n = (size_t)(c->n_out * c->n_rows), stride = n > 4096 ? (n / 1024) | 1 : 1;
	size_t row_bytes = (size_t)(c->n_in / f->block_elems) * f->block_bytes;
	if (!row)
		give_up("no memory for a row");
	operand_results(y, &got, &want);
	for (size_t i = 0; i < n; i += stride) {
		int64_t r = (int64_t)i / c->n_out, o = (int64_t)i % c->n_out;
		f->dequantize((const char *)data + (size_t)o * row_bytes, row, (size_t)c->n_in);
		/* A bias and what was there before are added in float, and round as the sum does. */
		double bound = product_bound(p, row, x->host + r * c->n_in, c->n_in) + 0x1p-22 * fabs(want[i]);
		row_result(fabs((double)got[i] - want[i]), bound,
		           "%lld inputs, output %lld of %lld, row %lld of %lld: %g instead of %g", (long long)c->n_in,
		           (long long)o, (long long)c->n_out, (long long)r, (long long)c->n_rows, got[i], want[i]);
	}
	free(got);
	free(want);
	free(row);
}

static void product(struct pair *p, const struct quant_format *f, const struct product_case *c)
{
	void *data = random_matrix(p, f, c->n_in, c->n_out);
	struct weight *w = weight_on(p->device, f, c, data, false), *rw = weight_on(p->reference, f, c, data, false);
	struct operand x = operand_new(p, (size_t)(c->n_in * c->n_rows), 1), bias = operand_new(p, (size_t)c->n_out, 1);
	struct operand y = operand_new(p, (size_t)(c->n_out * c->n_rows), 1);
	struct matmul mm = {w, c->bias ? bias.device : NULL, y.device, c->accumulate, c->precise};
	struct matmul rmm = {rw, c->bias ? bias.reference : NULL, y.reference, c->accumulate, c->precise};
	must(p->device->ops->matmul(p->device, x.device, c->n_rows, &mm, 1), "matmul");
	must(p->reference->ops->matmul(p->reference, x.reference, c->n_rows, &rmm, 1), "matmul of the reference");
	check_product(p, f, c, data, &x, &y);
	p->device->ops->weight_destroy(p->device, w);
	p->reference->ops->weight_destroy(p->reference, rw);
	operand_free(&x);
	operand_free(&bias);
	operand_free(&y);
	free(data);
}

static void products_of(struct pair *p, const struct quant_format *f)
{
	char name[64];
	snprintf(name, sizeof name, "matmul %s", f->name);
	row_begin(name);
	const int32_t rows[] = {1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65, 100, 129};
	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
		int64_t n_in = f->block_elems == 1
		                       ? random_int(p, 1, 400)
		                       : (int64_t)random_int(p, 1, f->block_elems == 32 ? 14 : 3) * f->block_elems;
		struct product_case c = {n_in, random_int(p, 1, i % 4 == 3 ? 300 : 80), rows[i], i & 1, i & 2, i & 4};
		product(p, f, &c);
	}
	/* and any others: on both sides of where a backend goes over to another kernel */
	for (int i = 0; i < 3; i++) {
		int64_t n_in = f->block_elems == 1
		                       ? random_int(p, 1, 700)
		                       : (int64_t)random_int(p, 1, f->block_elems == 32 ? 40 : 5) * f->block_elems;
		struct product_case c = {n_in,
		                         random_int(p, 1, 333),
		                         random_int(p, 1, i == 0 ? 600 : 140),
		                         random_int(p, 0, 1),
		                         random_int(p, 0, 1),
		                         random_int(p, 0, 1)};
		product(p, f, &c);
	}
	if (p->large) {
		const struct product_case real[] = {
			{4096, 14336, 1, false, false, false}, {14336, 4096, 3, true, false, false},
			{4096, 6144, 64, false, true, false},  {4096, 1024, 512, false, false, false},
			{2048, 8192, 700, true, false, true},  {4096, 128256, 1, false, false, true}};
		for (size_t i = 0; i < sizeof real / sizeof real[0]; i++)
			product(p, f, &real[i]);
	}
	row_end();
}

/* Several products over one input, and the row alone gives the same bits as the row among others. */
static void joint_products(struct pair *p)
{
	enum { N = 3, ROWS = 21, IN = 512 };
	const enum quant_type types[N] = {QUANT_Q4_K, QUANT_Q6_K, QUANT_F16};
	const int64_t outs[N] = {130, 17, 70};
	struct operand x = operand_new(p, IN * ROWS, 1), y[N], alone[N];
	struct matmul mm[N];
	void *data[N];
	row_begin("matmul, joint and alone");
	for (int i = 0; i < N; i++) {
		struct product_case c = {IN, outs[i], ROWS, false, false, false};
		const struct quant_format *f = quant_format(types[i]);
		data[i] = random_matrix(p, f, IN, outs[i]);
		y[i] = operand_new(p, (size_t)(outs[i] * ROWS), 1);
		alone[i] = operand_new(p, (size_t)outs[i], 1);
		mm[i] = (struct matmul){weight_on(p->device, f, &c, data[i], false), NULL, y[i].device, false, false};
	}
	must(p->device->ops->matmul(p->device, x.device, ROWS, mm, N), "matmul");
	for (int i = 0; i < N; i++) {
		float *got, *one, *ignored;
		struct matmul single = mm[i];
		operand_results(&y[i], &got, &ignored);
		free(ignored);
		for (int r = 0; r < ROWS; r++) {
			single.y = alone[i].device;
			must(p->device->ops->matmul(p->device, x.device + r * IN, 1, &single, 1), "matmul");
			operand_results(&alone[i], &one, &ignored);
			for (int64_t o = 0; o < outs[i]; o++)
				row_result(fabs((double)got[r * outs[i] + o] - one[o]), 0,
				           "%s, row %d, output %lld: %g among others, %g alone",
				           quant_format(types[i])->name, r, (long long)o, got[r * outs[i] + o], one[o]);
			free(one);
			free(ignored);
		}
		free(got);
		p->device->ops->weight_destroy(p->device, (struct weight *)mm[i].weight);
		operand_free(&y[i]);
		operand_free(&alone[i]);
		free(data[i]);
	}
	operand_free(&x);
	row_end();
}

static void embeddings_of(struct pair *p, const struct quant_format *f)
{
	enum { ROWS = 37, TOKENS = 60 };
	char name[64];
	int32_t token[ROWS];
	snprintf(name, sizeof name, "embed %s", f->name);
	row_begin(name);
	for (int only = 0; only < 2; only++) {
		struct product_case c = {
			f->block_elems == 1 ? 100 : (int64_t)f->block_elems * 3, TOKENS, ROWS, false, false, false};
		void *data = random_matrix(p, f, c.n_in, c.n_out);
		struct weight *w = weight_on(p->device, f, &c, data, only),
			      *rw = weight_on(p->reference, f, &c, data, only);
		struct operand out = operand_new(p, (size_t)(c.n_in * ROWS), 1);
		struct batch batch = *plain_batch(ROWS);
		batch.token = token;
		for (int i = 0; i < ROWS; i++)
			token[i] = random_int(p, 0, TOKENS - 1);
		must(p->device->ops->step_begin(p->device, &batch), "step_begin");
		must(p->device->ops->embed(p->device, w, 1.5f, out.device), "embed");
		must(p->device->ops->step_end(p->device), "step_end");
		must(p->reference->ops->step_begin(p->reference, &batch), "step_begin");
		must(p->reference->ops->embed(p->reference, rw, 1.5f, out.reference), "embed");
		must(p->reference->ops->step_end(p->reference), "step_end");
		/*
		 * Rows of the file are exact; a packed matrix may have scales, products and differences rounded to
		 * halves.
		 */
		row_results(&out, only ? 1e-7 : 2e-3, only ? "rows only" : "packed");
		p->device->ops->weight_destroy(p->device, w);
		p->reference->ops->weight_destroy(p->reference, rw);
		operand_free(&out);
		free(data);
	}
	row_end();
}

void compare_products(struct pair *p)
{
	const struct quant_format *f;
	for (size_t i = 0; (f = quant_format_at(i)); i++)
		products_of(p, f);
	joint_products(p);
	for (size_t i = 0; (f = quant_format_at(i)); i++)
		embeddings_of(p, f);
}
