/*
 * What policies ask of pages: norms, the bounds of keys, and rows that read the pages whose bounds promise most. Keys
 * and queries are small multiples of powers of two, so that bounds are the same numbers on both devices and choices the
 * same pages; some pages have the same keys as the one before, so that there are equals to choose among.
 */
#include "tests/gpu/compare_cache.h"

/*
 * Conversations: a long one, one of half its length, and one too short to choose. Pages are written so many at a time.
 */
enum { TALKS = 3, AT_ONCE = MAX_ROWS / KV_PAGE_TOKENS };

struct talk {
	struct cache *c;
	struct kv_bounds device, reference;
	size_t bounds_bytes;
};

static float multiple(struct pair *p, int32_t most, float unit)
{
	return (float)random_int(p, -most, most) * unit;
}

/* New values on both devices, at the same addresses. */
static void refill(struct operand *o, int32_t most, float unit)
{
	for (size_t i = 0; i < o->n; i++)
		o->host[i] = multiple(o->p, most, unit);
	must(o->p->device->ops->mem_write(o->p->device, o->device, o->host, o->n * sizeof(float)), "mem_write");
	must(o->p->reference->ops->mem_write(o->p->reference, o->reference, o->host, o->n * sizeof(float)),
	     "mem_write");
}

static void bound(struct talk *t, int32_t seq, int32_t first, int32_t n)
{
	struct cache *c = t->c;
	struct pair *p = c->p;
	const int32_t *pages = c->pages + seq * c->pages_per_seq + first;
	must(p->device->ops->page_bounds(p->device, c->device, &c->layout, pages, n), "page_bounds");
	must(p->reference->ops->page_bounds(p->reference, c->reference, &c->reference_layout, pages, n), "page_bounds");
}

/* n more pages of a sequence, in the compared layer; sums[n][2] of their squares, as they should be. */
static void write_pages(struct talk *t, int32_t seq, int32_t n, double *sums)
{
	struct cache *c = t->c;
	struct pair *p = c->p;
	size_t page = (size_t)(KV_PAGE_TOKENS * c->layout.n_head_kv * c->layout.head_dim), size = (size_t)n * page;
	struct operand k = operand_new(p, size, 1), v = operand_new(p, size, 1);
	begin_step(c);
	add_rows(c, seq, n * KV_PAGE_TOKENS);
	refill(&k, 40, 1.0f / 16);
	refill(&v, 40, 1.0f / 16);
	for (int32_t i = 1; i < n; i++)
		if (random_int(p, 0, 3) == 0)
			memcpy(k.host + (size_t)i * page, k.host + (size_t)(i - 1) * page, page * sizeof(float));
	must(p->device->ops->mem_write(p->device, k.device, k.host, size * sizeof(float)), "mem_write");
	must(p->reference->ops->mem_write(p->reference, k.reference, k.host, size * sizeof(float)), "mem_write");
	memset(sums, 0, (size_t)n * 2 * sizeof *sums);
	for (size_t i = 0; i < size; i++) {
		sums[i / page * 2] += (double)k.host[i] * k.host[i];
		sums[i / page * 2 + 1] += (double)v.host[i] * v.host[i];
	}
	for (int i = 0; i < 2; i++) {
		struct backend *b = i ? p->reference : p->device;
		must(b->ops->step_begin(b, &c->batch), "step_begin");
		must(b->ops->kv_write(b, i ? c->reference : c->device, i ? &c->reference_layout : &c->layout, LAYER,
				      i ? k.reference : k.device, i ? v.reference : v.device),
		     "kv_write");
		must(b->ops->step_end(b), "step_end");
	}
	operand_free(&k);
	operand_free(&v);
}

static void compare_norms(struct talk *t, int32_t seq, int32_t n, const double *want)
{
	struct cache *c = t->c;
	struct backend *b = c->p->device;
	double *got = calloc((size_t)n * LAYERS * 2, sizeof *got);
	if (!got)
		give_up("no memory");
	if (b->ops->page_norms && c->layout.form == KV_FORM_F16) {
		must(b->ops->page_norms(b, c->device, &c->layout, c->pages + seq * c->pages_per_seq, n, got),
		     "page_norms");
		for (int32_t i = 0; i < 2 * n; i++) {
			double sum = got[(i / 2 * LAYERS + LAYER) * 2 + i % 2];
			row_result(fabs(sum - want[i]), 1e-12 * want[i], "sum of squares %d: %g instead of %g", i, sum,
				   want[i]);
		}
	}
	free(got);
}

static double element_of(enum quant_type type, uint16_t bits)
{
	return type == QUANT_BF16 ? quant_bf16_to_float(bits) : quant_half_to_float(bits);
}

/* As numbers: one device may keep bfloat16s. Narrow codes may differ by one where a quotient lies between two. */
static void compare_bounds(struct talk *t, int32_t seq, int32_t n)
{
	struct cache *c = t->c;
	struct pair *p = c->p;
	const struct kv_layout *l = &c->layout, *r = &c->reference_layout;
	uint16_t *got = malloc(t->bounds_bytes), *want = malloc(t->bounds_bytes);
	double off = l->form == KV_FORM_F16 ? 0 : l->type != r->type ? 0.02 : 1e-3;
	if (!got || !want)
		give_up("no memory");
	must(p->device->ops->mem_read(p->device, got, t->device.slab, t->bounds_bytes), "mem_read");
	must(p->reference->ops->mem_read(p->reference, want, t->reference.slab, t->bounds_bytes), "mem_read");
	for (int32_t page = 0; page < n; page++)
		for (int32_t head = 0; head < l->n_head_kv; head++) {
			size_t at = kv_bounds_offset(l, LAYER, head, c->pages[seq * c->pages_per_seq + page]) /
				    sizeof(uint16_t);
			for (int32_t d = 0; d < 2 * l->head_dim; d++) {
				double a = element_of(l->type, got[at + (size_t)d]),
				       b = element_of(r->type, want[at + (size_t)d]);
				row_result(fabs(a - b), off * (1 + fabs(b)), "bound %d of page %d: %g instead of %g", d,
					   page, a, b);
			}
		}
	free(got);
	free(want);
}

static struct talk *open_talk(struct pair *p, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim,
			      int32_t n_pages)
{
	struct talk *t = calloc(1, sizeof *t);
	if (!t)
		give_up("no memory");
	t->c = cache_new(p, form, n_head_kv, group, dim, (n_pages + 4) * KV_PAGE_TOKENS);
	t->device.n_pages = t->reference.n_pages = t->c->n_pages;
	t->bounds_bytes = (size_t)t->c->n_pages * kv_bounds_bytes(&t->c->layout);
	must(p->device->ops->mem_alloc(p->device, t->bounds_bytes, &t->device.slab), "mem_alloc");
	must(p->reference->ops->mem_alloc(p->reference, t->bounds_bytes, &t->reference.slab), "mem_alloc");
	t->c->layout.bounds = &t->device;
	t->c->reference_layout.bounds = &t->reference;
	double *sums = malloc((size_t)n_pages * 2 * sizeof *sums);
	if (!sums)
		give_up("no memory");
	for (int32_t s = 0; s < TALKS; s++) {
		int32_t n = s == 0 ? n_pages : s == 1 ? n_pages / 2 : 3;
		for (int32_t page = 0; page < n; page += AT_ONCE)
			write_pages(t, s, n - page < AT_ONCE ? n - page : AT_ONCE, sums + 2 * page);
		bound(t, s, 0, n);
		compare_norms(t, s, n, sums);
		compare_bounds(t, s, n);
	}
	free(sums);
	return t;
}

static void close_talk(struct talk *t)
{
	struct pair *p = t->c->p;
	p->device->ops->mem_free(p->device, t->device.slab, t->bounds_bytes);
	p->reference->ops->mem_free(p->reference, t->reference.slab, t->bounds_bytes);
	cache_free(t->c);
	free(t);
}

/* Rows of the batch at hand: all of them give outputs, as those of answers do, so that a device may record the step. */
static void answer(struct talk *t, struct operand *q, struct operand *k, struct operand *v, struct operand *out,
		   const char *what)
{
	struct cache *c = t->c;
	int32_t rows[MAX_ROWS];
	for (int32_t i = 0; i < c->batch.n_rows; i++)
		rows[i] = i;
	c->batch.output_row = rows;
	c->batch.n_outputs = c->batch.n_rows;
	refill(q, 16, 1.0f / 8);
	refill(k, 40, 1.0f / 16);
	refill(v, 40, 1.0f / 16);
	step_on(c, c->p->device, c->device, q->device, k->device, v->device, out->device, false);
	step_on(c, c->p->reference, c->reference, q->reference, k->reference, v->reference, out->reference, false);
	c->batch.n_outputs = 0;
	row_results(out, c->p->group_error > 0 ? 5e-2 : 4e-3, what);
}

static void step_of(struct talk *t, const int32_t *n_rows, const struct page_choice *choice, int times,
		    const char *what)
{
	struct cache *c = t->c;
	int32_t n = n_rows[0] + n_rows[1] + n_rows[2];
	size_t kv_size = (size_t)(n * c->layout.n_head_kv * c->layout.head_dim),
	       q_size = (size_t)(n * c->n_head * c->layout.head_dim);
	struct operand q = operand_new(c->p, q_size, 1), k = operand_new(c->p, kv_size, 1),
		       v = operand_new(c->p, kv_size, 1);
	struct operand out = operand_new(c->p, q_size, 1);
	for (int i = 0; i < times; i++) {
		begin_step(c);
		for (int32_t s = 0; s < TALKS; s++) {
			if (n_rows[s] == 0)
				continue;
			/* The pages before a row that chooses have their bounds. */
			bound(t, s, 0, c->at[s] / KV_PAGE_TOKENS);
			add_rows(c, s, n_rows[s]);
			c->seq[c->batch.n_seqs - 1].choice = *choice;
		}
		answer(t, &q, &k, &v, &out, what);
	}
	operand_free(&q);
	operand_free(&k);
	operand_free(&v);
	operand_free(&out);
}

static void choices(struct pair *p, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim, int32_t n_pages)
{
	char name[64];
	snprintf(name, sizeof name, "choices %dx%d heads of %d%s%s", n_head_kv, group, dim,
		 form == KV_FORM_F16 ? "" : ", ", form == KV_FORM_F16 ? "" : kv_form_name(form));
	row_begin(name);
	struct talk *t = open_talk(p, form, n_head_kv, group, dim, n_pages);
	struct cache *c = t->c;
	/* Codes become bfloat16s on one side and halves on the other: of nearly equal bounds another is larger. */
	if (form != KV_FORM_F16 && c->layout.type != c->reference_layout.type) {
		close_talk(t);
		row_end();
		return;
	}
	const int32_t one_each[] = {1, 1, 1}, chunk[] = {9, 0, 4}, long_one[] = {1, 0, 0};
	/*
	 * Half of what there is, a few, nothing but the first and last, and so many that the second one sees them all.
	 */
	const struct page_choice some[] = {
		{0, n_pages / 2, 2, 3}, {0, 7, 0, 1}, {0, 3, 1, 2}, {0, n_pages / 2 + 1, 1, 1}};
	for (size_t i = 0; i < sizeof some / sizeof *some; i++)
		step_of(t, one_each, &some[i], i == 0 ? 5 : 2, "single rows");
	/* Rows of an answer that are computed again, only the later of which choose. */
	while (c->at[0] % KV_PAGE_TOKENS != 2)
		step_of(t, long_one, &some[0], 1, "a row");
	struct page_choice later = some[1];
	later.from = c->at[0] + 3;
	step_of(t, chunk, &later, 1, "a chunk");
	/* Layers with a window read what it shows, whatever was to be chosen. */
	c->params.window = 3 * KV_PAGE_TOKENS + 5;
	step_of(t, long_one, &some[1], 2, "a window");
	close_talk(t);
	row_end();
}

void compare_choice(struct pair *p)
{
	struct backend_info info;
	p->device->ops->info(p->device, &info);
	if (!info.chooses_pages)
		return;
	const int32_t n = p->large ? 600 : 20;
	choices(p, KV_FORM_F16, 2, 3, 64, n);
	choices(p, KV_FORM_F16, 1, 9, 24, p->large ? 3000 : 150);
	choices(p, KV_FORM_F16, p->large ? 8 : 2, 4, 128, p->large ? 300 : 12);
	choices(p, KV_FORM_F16, 1, 2, 256, n);
	choices(p, KV_FORM_F16, random_int(p, 1, 3), random_int(p, 1, 16), 8 * random_int(p, 1, 32), n);
	for (int form = KV_FORM_F16 + 1; form < KV_N_FORMS; form++) {
		choices(p, (enum kv_form)form, 2, 3, 64, n);
		if (p->large)
			choices(p, (enum kv_form)form, random_int(p, 1, 3), random_int(p, 1, 16),
				8 * random_int(p, 1, 32), n);
	}
}
