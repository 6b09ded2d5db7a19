/*
 * Rows that score pages elsewhere (struct page_probe): the shares agree with the reference, and are the same bits
 * whatever rows are beside them and however they are cut into steps. Sequences with probes stand beside one without;
 * some bounds are no numbers.
 */
#include "tests/gpu/compare_cache.h"

enum { NAME = 7, MOST_KNOWN = 20 };

/* What one sequence has elsewhere. Bounds are numbers that both types of element have exactly. */
struct elsewhere {
	int32_t n;
	uint16_t *device, *reference; /* [n][LAYERS][n_head_kv][least, greatest][head_dim] */
	uint64_t *got, *want;
};

static uint16_t element_bits(const struct kv_layout *l, float x)
{
	return l->type == QUANT_BF16 ? quant_float_to_bf16(x) : quant_float_to_half(x);
}

static struct elsewhere elsewhere_new(struct cache *c, int32_t n)
{
	const int32_t dim = c->layout.head_dim;
	size_t heads = (size_t)(n * LAYERS * c->layout.n_head_kv), size = heads * 2 * (size_t)dim;
	struct elsewhere e = {n, malloc(size * sizeof *e.device), malloc(size * sizeof *e.reference),
			      calloc((size_t)n, sizeof *e.got), calloc((size_t)n, sizeof *e.want)};
	if (!e.device || !e.reference || !e.got || !e.want)
		give_up("no memory");
	for (size_t head = 0; head < heads; head++) {
		/* One in twelve has a bound that is no number. */
		int32_t odd = random_int(c->p, 0, 11) == 0 ? random_int(c->p, 0, 2 * dim - 1) : -1;
		for (int32_t d = 0; d < dim; d++) {
			float low = (float)random_int(c->p, -16, 4) / 8,
			      high = low + (float)random_int(c->p, 0, 8) / 8;
			low = odd == d ? NAN : low;
			high = odd == dim + d ? NAN : high;
			size_t at = head * 2 * (size_t)dim + (size_t)d;
			e.device[at] = element_bits(&c->layout, low);
			e.device[at + (size_t)dim] = element_bits(&c->layout, high);
			e.reference[at] = element_bits(&c->reference_layout, low);
			e.reference[at + (size_t)dim] = element_bits(&c->reference_layout, high);
		}
	}
	return e;
}

static void elsewhere_free(struct elsewhere *e)
{
	free(e->device);
	free(e->reference);
	free(e->got);
	free(e->want);
}

/* A step of what is in the batch, in which row `first` of the operands is the first; probes[i] is of sequence i. */
static void run(struct cache *c, struct backend *b, struct operand *o, int32_t first, const struct page_probe *probes,
		int32_t n_probes)
{
	const bool on_device = b == c->p->device;
	const int32_t width = c->layout.n_head_kv * c->layout.head_dim, q_width = c->n_head * c->layout.head_dim;
	int32_t rows[MAX_ROWS];
	float *at[4];
	for (int32_t i = 0; i < n_probes; i++)
		c->seq[i].probe = probes[i].n_pages ? &probes[i] : NULL;
	for (int32_t i = 0; i < c->batch.n_rows; i++)
		rows[i] = i;
	for (int i = 0; i < 4; i++)
		at[i] = (on_device ? o[i].device : o[i].reference) +
			(int64_t)first * (i == 0 || i == 3 ? q_width : width);
	/* Where all rows have outputs, a device may record the step. */
	c->batch.output_row = rows;
	c->batch.n_outputs = c->batch.n_rows;
	step_on(c, b, on_device ? c->device : c->reference, at[0], at[1], at[2], at[3], false);
	c->batch.n_outputs = 0;
}

static void begin_talks(struct cache *c, const int32_t *n_rows)
{
	begin_step(c);
	for (int32_t s = 0; s < 3; s++) {
		c->at[s] = 0;
		add_rows(c, s, n_rows[s]);
	}
}

static void compare_shares(const struct elsewhere *e, int32_t n_rows, double near)
{
	const double unit = 1 << KV_MASS_BITS;
	for (int32_t i = 0; i < e->n; i++) {
		double got = (double)e->got[i] / unit, want = (double)e->want[i] / unit;
		row_result(fabs(got - want), near * want + 1e-6 * n_rows, "page %d got %g instead of %g", i, got, want);
	}
}

/* The first n pages give as much under a name as without. */
static void compare_known(struct cache *c, struct operand *o, const struct elsewhere *e, int32_t n)
{
	uint64_t with[MOST_KNOWN] = {0}, without[MOST_KNOWN] = {0};
	for (int i = 0; i < 2; i++) {
		const struct page_probe probe = {n, e->device, i ? with : without, i ? NAME : 0};
		c->at[0] = 0;
		begin_step(c);
		add_rows(c, 0, 1);
		run(c, c->p->device, o, 0, &probe, 1);
	}
	c->at[0] = 0;
	row_result(memcmp(with, without, sizeof with) != 0, 0, "other bits for %d pages that are known", n);
}

static void probes(struct pair *p, const char *elements, int32_t n_head_kv, int32_t group, int32_t dim, int32_t n_pages)
{
	char name[64];
	snprintf(name, sizeof name, "probes %dx%d heads of %d%s", n_head_kv, group, dim, elements);
	row_begin(name);
	const int32_t n_rows[] = {16, 3, p->large ? 40 : 5}, all = n_rows[0] + n_rows[1] + n_rows[2];
	struct cache *c = cache_new(p, KV_FORM_F16, n_head_kv, group, dim, 64);
	const size_t width = (size_t)(n_head_kv * dim), rows = (size_t)all;
	struct operand o[] = {operand_new(p, rows * width * (size_t)group, 1), operand_new(p, rows * width, 1),
			      operand_new(p, rows * width, 1), operand_new(p, rows * width * (size_t)group, 1)};
	struct elsewhere a = elsewhere_new(c, n_pages), z = elsewhere_new(c, 1 + n_pages / 3);
	const struct page_probe device[] = {{a.n, a.device, a.got}, {0}, {z.n, z.device, z.got}};
	const struct page_probe reference[] = {{a.n, a.reference, a.want}, {0}, {z.n, z.reference, z.want}};
	begin_talks(c, n_rows);
	run(c, p->device, o, 0, device, 3);
	run(c, p->reference, o, 0, reference, 3);
	/* Twice what is lost where queries are rounded, since shares are squared. */
	const double near = p->group_error > 0 || c->layout.type != c->reference_layout.type ? 0.15 : 1e-3;
	compare_shares(&a, n_rows[0] * n_head_kv, near);
	compare_shares(&z, n_rows[2] * n_head_kv, near);
	/*
	 * By themselves, in steps of a few and of one; by names by which a device knows them again, too, under which
	 * there are more of them by and by. Others come in between.
	 */
	static const int32_t grows[] = {1, 16, 18, 20};
	uint64_t *again = malloc((size_t)n_pages * sizeof *again);
	if (!again)
		give_up("no memory");
	for (int32_t chunk = 1; chunk <= 5; chunk += 2) {
		uint64_t others[MOST_KNOWN];
		memset(again, 0, (size_t)n_pages * sizeof *again);
		c->at[0] = 0;
		for (size_t i = 0; chunk == 3 && i < sizeof grows / sizeof *grows && grows[i] <= a.n; i++)
			compare_known(c, o, &a, grows[i]);
		for (int32_t row = 0; row < n_rows[0]; row = c->at[0]) {
			const struct page_probe alone = {a.n, a.device, again, chunk == 1 ? 0 : NAME};
			const struct page_probe other = {z.n < MOST_KNOWN ? z.n : MOST_KNOWN, z.device, others,
							 100 + (uint64_t)row};
			if (chunk == 5) {
				memset(others, 0, sizeof others);
				begin_step(c);
				add_rows(c, 0, 1);
				run(c, p->device, o, row, &other, 1);
				c->at[0] = row;
			}
			begin_step(c);
			add_rows(c, 0, chunk < n_rows[0] - row ? chunk : n_rows[0] - row);
			run(c, p->device, o, row, &alone, 1);
		}
		row_result(memcmp(again, a.got, (size_t)n_pages * sizeof *again) != 0, 0, "other bits in steps of %d",
			   chunk);
	}
	/* Layers with a window score nothing. */
	c->params.window = 5;
	begin_talks(c, n_rows);
	run(c, p->device, o, 0, device, 3);
	row_result(memcmp(again, a.got, (size_t)n_pages * sizeof *again) != 0, 0, "a layer with a window scores");
	free(again);
	elsewhere_free(&a);
	elsewhere_free(&z);
	for (int i = 0; i < 4; i++)
		operand_free(&o[i]);
	cache_free(c);
	row_end();
}

void compare_probe(struct pair *p)
{
	struct backend_info info[2];
	struct backend *b[] = {p->device, p->reference};
	for (int i = 0; i < 2; i++)
		b[i]->ops->info(b[i], &info[i]);
	if (!info[0].probes_pages || !info[1].probes_pages)
		return;
	const int32_t n = p->large ? 3000 : 24;
	probes(p, "", 2, 3, 64, n);
	probes(p, "", p->large ? 8 : 2, 4, 128, n);
	probes(p, "", 1, 9, 24, p->large ? 10000 : 70);
	probes(p, "", 1, 2, 256, 1);
	probes(p, "", random_int(p, 1, 3), random_int(p, 1, 16), 8 * random_int(p, 1, 32), n);
	struct own_elements own;
	const char *chosen = choose_other_elements(p, &own);
	if (!chosen)
		return;
	probes(p, chosen, 2, 3, 64, n);
	choose_own_elements(p, &own);
}
