/*
 * What rows say of their attention: the shares that pages get of it (batch_seq.mass), its entropy and the largest
 * weight (struct attention_look). They agree with the reference, and are the same bits whether rows stand alone or in a
 * chunk, which other kernels compute.
 */
#include "tests/gpu/compare_cache.h"

struct told {
	uint64_t mass[512];
	struct attention_look look;
};

/*
 * Rows of sequence 0 from `from` to `to`, at most `chunk` at a time, of operands that begin with `from`; another one,
 * that tells nothing, beside them.
 */
static void converse(struct cache *c, struct backend *b, void *kv, struct operand *o, int32_t from, int32_t to,
		     int32_t chunk, struct told *told)
{
	bool on_device = b == c->p->device;
	int32_t width = c->layout.n_head_kv * c->layout.head_dim, q_width = c->n_head * c->layout.head_dim,
		rows[MAX_ROWS];
	float *at[4];
	memset(told, 0, sizeof *told);
	c->at[0] = from;
	for (int32_t n; c->at[0] < to;) {
		for (int i = 0; i < 4; i++) {
			int64_t offset = (int64_t)(c->at[0] - from) * (i == 0 || i == 3 ? q_width : width);
			at[i] = (on_device ? o[i].device : o[i].reference) + offset;
		}
		n = to - c->at[0] < chunk ? to - c->at[0] : chunk;
		begin_step(c);
		add_rows(c, 0, n);
		c->seq[0].mass = told->mass;
		c->seq[0].look = &told->look;
		for (int32_t i = 0; i < n; i++)
			rows[i] = i;
		/* Where all rows have outputs, a device may record the step. */
		c->batch.output_row = rows;
		c->batch.n_outputs = n;
		step_on(c, b, kv, at[0], at[1], at[2], at[3], false);
	}
	c->batch.n_outputs = 0;
}

static void compare_told(const struct told *got, const struct told *want, int32_t n_pages, double n, double near)
{
	const double unit = 1 << KV_MASS_BITS;
	double sum = 0;
	row_result(fabs((double)got->look.n - n), 0, "%d rows and heads are told of", (int)got->look.n);
	for (int32_t page = 0; page < n_pages; page++) {
		double a = (double)got->mass[page] / unit, b = (double)want->mass[page] / unit;
		row_result(fabs(a - b), near * b + 1e-6 * n, "page %d got %g instead of %g", page, a, b);
		sum += a;
	}
	row_result(fabs(sum - n), 1e-4 * n, "the weights of %g rows and heads come to %g", n, sum);
	double entropy = (double)got->look.entropy / unit, largest = (double)got->look.largest / unit;
	row_result(fabs(entropy - (double)want->look.entropy / unit), near * n, "entropies come to %g instead of %g",
		   entropy, (double)want->look.entropy / unit);
	row_result(fabs(largest - (double)want->look.largest / unit), near * n,
		   "the largest weights come to %g instead of %g", largest, (double)want->look.largest / unit);
}

static void masses(struct pair *p, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim, int32_t from,
		   int32_t n_rows, int32_t window, float cap, int32_t chunk)
{
	char name[64];
	int used = snprintf(name, sizeof name, "masses %dx%d heads of %d%s%s", n_head_kv, group, dim,
			    form == KV_FORM_F16 ? "" : ", ", form == KV_FORM_F16 ? "" : kv_form_name(form));
	if (window || cap > 0)
		snprintf(name + used, sizeof name - (size_t)used, ", window %d, cap %g", window, (double)cap);
	if (chunk)
		snprintf(name + used, sizeof name - (size_t)used, ", chunks %d", chunk);
	row_begin(name);
	int32_t to = from + n_rows, pages = (to + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
	struct cache *c = cache_new(p, form, n_head_kv, group, dim, to);
	size_t width = (size_t)(n_head_kv * dim), rows = (size_t)n_rows;
	static struct told got, again, want;
	if (pages > 512)
		give_up("the test asks for too much");
	c->params.window = window;
	c->params.softcap = cap;
	if (chunk)
		cache_of_chunks(c, ROPE_HALVES, dim, chunk, chunk + chunk / 2);
	while (c->at[0] < from) {
		begin_step(c);
		add_rows(c, 0, from - c->at[0] < MAX_ROWS ? from - c->at[0] : MAX_ROWS);
		size_t n = (size_t)c->batch.n_rows;
		struct operand k = operand_new(p, n * width, 1), v = operand_new(p, n * width, 1);
		for (int i = 0; i < 2; i++) {
			struct backend *b = i ? p->reference : p->device;
			must(b->ops->step_begin(b, &c->batch), "step_begin");
			must(b->ops->kv_write(b, i ? c->reference : c->device, i ? &c->reference_layout : &c->layout,
					      LAYER, i ? k.reference : k.device, i ? v.reference : v.device),
			     "kv_write");
			must(b->ops->step_end(b), "step_end");
		}
		operand_free(&k);
		operand_free(&v);
	}
	struct operand o[] = {operand_new(p, rows * width * (size_t)group, 1), operand_new(p, rows * width, 1),
			      operand_new(p, rows * width, 1), operand_new(p, rows * width * (size_t)group, 1)};
	converse(c, p->reference, c->reference, o, from, to, n_rows, &want);
	converse(c, p->device, c->device, o, from, to, n_rows, &got);
	/* Queries are rounded, to halves or less. */
	compare_told(&got, &want, pages, (double)n_rows * c->n_head,
		     c->layout.type != c->reference_layout.type || p->group_error > 0 ? 5e-2 : 1e-2);
	static const int32_t chunks[] = {1, 3};
	for (int i = 0; i < 2; i++) {
		converse(c, p->device, c->device, o, from, to, chunks[i], &again);
		row_result(memcmp(&again, &got, sizeof got) != 0, 0, "other bits in chunks of %d", chunks[i]);
	}
	for (int i = 0; i < 4; i++)
		operand_free(&o[i]);
	cache_free(c);
	row_end();
}

void compare_mass(struct pair *p)
{
	struct backend_info info;
	p->device->ops->info(p->device, &info);
	if (!info.weighs_pages)
		return;
	const int32_t from = p->large ? 5000 : 200, rows = p->large ? 300 : 40;
	masses(p, KV_FORM_F16, 2, 3, 64, from, rows, 0, 0, 0);
	masses(p, KV_FORM_F16, 1, 8, 128, from, rows, 0, 0, 0);
	masses(p, KV_FORM_F16, 2, 4, 64, from, rows, 100, 2, 0);
	masses(p, KV_FORM_F16, 1, 2, 256, from / 2, rows, 0, 0, 0);
	masses(p, KV_FORM_F16, random_int(p, 1, 2), random_int(p, 1, 16), 8 * random_int(p, 1, 32), 100, rows,
	       random_int(p, 0, 1) * 33, 0, 0);
	masses(p, KV_FORM_F16, 2, 3, 64, from, rows, 0, 0, 64);
	masses(p, KV_FORM_INT8, 1, 4, 128, from, rows, 0, 2, 64);
	for (int form = KV_FORM_F16 + 1; form < KV_N_FORMS; form++) {
		masses(p, (enum kv_form)form, 2, 3, 64, from, rows, 0, 0, 0);
		masses(p, (enum kv_form)form, 1, 4, 128, from / 2, rows, 50, 0, 0);
	}
}
