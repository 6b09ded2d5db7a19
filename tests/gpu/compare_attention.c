/*
 * Pages, of every form: RoPE, storing keys and values, attention over them, copies; conversations of prompts, chunks
 * and single rows. In a narrow cache some pages have wide copies.
 */
#include "tests/gpu/compare_cache.h"

/* ", bf16" while both devices have been told to keep that. */
static const char *chosen_elements = "";

static void name_row(const char *what, enum kv_form form, int32_t window, float cap)
{
	char name[96];
	int n = snprintf(name, sizeof name, "%s%s%s%s", what, form == KV_FORM_F16 ? "" : ", ",
	                 form == KV_FORM_F16 ? "" : kv_form_name(form), chosen_elements);
	if (window || cap > 0)
		snprintf(name + n, sizeof name - (size_t)n, ", window %d, cap %g", window, (double)cap);
	row_begin(name);
}

static void conversations(struct pair *p, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim,
                          int32_t length, int32_t window, float cap)
{
	char name[48];
	snprintf(name, sizeof name, "attention %dx%d heads of %d", n_head_kv, group, dim);
	name_row(name, form, window, cap);
	struct cache *c = cache_new(p, form, n_head_kv, group, dim, length);
	c->params.window = window;
	c->params.softcap = cap;
	int32_t most = length / 3 < 100 ? length / 3 : 100;
	/* prompts of every length together, and a first chunk that ends within a page */
	begin_step(c);
	for (int32_t s = 0; s < 4; s++)
		add_rows(c, s, random_int(p, 1, most));
	step_on_both(c, true, "prompts");
	/* chunks on top, decode rows beside them, and a sequence that waits */
	begin_step(c);
	add_rows(c, 0, random_int(p, 2, most));
	add_rows(c, 2, 1);
	add_rows(c, 3, 1);
	add_rows(c, 4, random_int(p, 1, most));
	step_on_both(c, true, "chunks and single rows");
	for (int i = 0; i < 3; i++) {
		begin_step(c);
		for (int32_t s = 0; s < 5; s++)
			add_rows(c, s, 1);
		step_on_both(c, i & 1, "single rows");
	}
	cache_free(c);
	row_end();
}

/* Contexts as long as real ones, decoded and extended by a chunk. */
static void long_contexts(struct pair *p, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim,
                          int32_t length, int32_t window)
{
	char name[48];
	snprintf(name, sizeof name, "attention over %d", length);
	name_row(name, form, window, 0);
	struct cache *c = cache_new(p, form, n_head_kv, group, dim, length + 64);
	c->params.window = window;
	while (c->at[0] < length) {
		begin_step(c);
		add_rows(c, 0, length - c->at[0] < MAX_ROWS ? length - c->at[0] : MAX_ROWS);
		/* Only written: the reference would take minutes to attend so often. */
		size_t n = (size_t)(c->batch.n_rows * n_head_kv * dim);
		struct operand k = operand_new(p, n, 1.5f), v = operand_new(p, n, 1);
		struct backend *b[2] = {p->device, p->reference};
		for (int i = 0; i < 2; i++) {
			must(b[i]->ops->step_begin(b[i], &c->batch), "step_begin");
			must(b[i]->ops->kv_write(b[i], i ? c->reference : c->device,
			                         i ? &c->reference_layout : &c->layout, LAYER,
			                         i ? k.reference : k.device, i ? v.reference : v.device),
			     "kv_write");
			must(b[i]->ops->step_end(b[i]), "step_end");
		}
		operand_free(&k);
		operand_free(&v);
	}
	/* Pages before every window are read by nobody: there stands one that holds no numbers. */
	for (int32_t page = 0; window && page < (length - window + 1) / KV_PAGE_TOKENS; page++)
		c->pages[page] = c->pages[5 * c->pages_per_seq];
	begin_step(c);
	add_rows(c, 0, 1);
	add_rows(c, 1, 5);
	step_on_both(c, true, "one row");
	begin_step(c);
	add_rows(c, 0, 30);
	step_on_both(c, true, "a chunk");
	begin_step(c);
	add_rows(c, 0, 1);
	step_on_both(c, true, "one row more");
	cache_free(c);
	row_end();
}

/*
 * Vectors with a value that is no number, in every other row of two steps: they reach those rows that see them, element
 * by element as on the reference, and no others, and are counted where no wide copy keeps them.
 */
static void odd_values(struct pair *p, enum kv_form form)
{
	static const float odd[] = {NAN, INFINITY, -INFINITY};
	enum { ROWS = 40, N_HEAD_KV = 2, GROUP = 3, DIM = 40 };
	name_row("no numbers", form, 0, 0);
	struct cache *c = cache_new(p, form, N_HEAD_KV, GROUP, DIM, 2 * ROWS);
	/* Halves hold what is infinite at the end of their range; bfloat16s keep it. */
	const int n_odd = c->layout.type == QUANT_F16 && c->reference_layout.type == QUANT_F16 ? 3 : 1;
	uint64_t n_lost = 0;
	for (int k = 0; k < 2; k++) {
		begin_step(c);
		/* Long enough for the kernels that prompts have, then so short that all of it shares a tile. */
		for (int32_t s = 0; s < SEQS; s++)
			add_rows(c, s, k == 0 ? ROWS - s : 2);
		size_t n = (size_t)c->batch.n_rows * N_HEAD_KV * DIM;
		struct operand q = operand_new(p, n * GROUP, 1), keys = operand_new(p, n, 1),
			       values = operand_new(p, n, 1);
		struct operand out = operand_new(p, n * GROUP, 1);
		float *spoilt = malloc(n * sizeof *spoilt), *got, *want;
		if (!spoilt)
			give_up("no memory");
		for (int what = 0; what < 2; what++) {
			struct operand *o = what ? &values : &keys;
			memcpy(spoilt, o->host, n * sizeof *spoilt);
			/* Each sequence has one; values of all but the last, a key of the last. */
			for (int32_t s = 0; k == 0 && s < SEQS; s++) {
				if (what == (s == SEQS - 1))
					continue;
				int32_t position = random_int(p, c->seq[s].n_rows / 2, c->seq[s].n_rows - 1),
					row = c->seq[s].first_row + position;
				int32_t page = c->pages[s * c->pages_per_seq + position / KV_PAGE_TOKENS];
				spoilt[row * N_HEAD_KV * DIM + random_int(p, 0, N_HEAD_KV * DIM - 1)] = odd[s % n_odd];
				n_lost += form != KV_FORM_F16 && c->wide.slot[page] < 0;
			}
			must(p->device->ops->mem_write(p->device, o->device, spoilt, n * sizeof *spoilt), "mem_write");
			must(p->reference->ops->mem_write(p->reference, o->reference, spoilt, n * sizeof *spoilt),
			     "mem_write");
		}
		step_on(c, p->device, c->device, q.device, keys.device, values.device, out.device, false);
		step_on(c, p->reference, c->reference, q.reference, keys.reference, values.reference, out.reference,
		        false);
		operand_results(&out, &got, &want);
		size_t n_finite = 0;
		for (size_t i = 0; i < out.n; i++) {
			row_result(!isfinite(got[i]) != !isfinite(want[i]), 0, "element %zu: %g instead of %g", i,
			           (double)got[i], (double)want[i]);
			if (isfinite(want[i]))
				row_result(fabs((double)got[i] - want[i]), 5e-2 * (1 + fabs(want[i])), "element %zu",
				           i);
			n_finite += isfinite(want[i]);
		}
		row_result(n_finite == 0 || n_finite == out.n, 0, "nothing was tested");
		row_result(c->wide.n_not_finite != n_lost || c->reference_wide.n_not_finite != n_lost, 0,
		           "%d and %d vectors are counted, not %d", (int)c->wide.n_not_finite,
		           (int)c->reference_wide.n_not_finite, (int)n_lost);
		free(spoilt);
		free(got);
		free(want);
		operand_free(&q);
		operand_free(&keys);
		operand_free(&values);
		operand_free(&out);
	}
	cache_free(c);
	row_end();
}

/* A copied page serves like the one it was copied from. */
static void copies(struct pair *p, enum kv_form form)
{
	name_row("page_copy", form, 0, 0);
	struct cache *c = cache_new(p, form, 2, 2, 64, 64);
	begin_step(c);
	add_rows(c, 0, 37);
	step_on_both(c, false, "prompt");
	int32_t from[3], to[3];
	for (int i = 0; i < 3; i++) {
		from[i] = c->pages[i];
		to[i] = c->pages[5 * c->pages_per_seq + i];
		/* As the pool has it: a copy is wide only where its original is. */
		if (form != KV_FORM_F16 && c->wide.slot[from[i]] < 0)
			c->wide.slot[to[i]] = -1;
	}
	must(p->device->ops->page_copy(p->device, c->device, &c->layout, from, to, 3), "page_copy");
	must(p->reference->ops->page_copy(p->reference, c->reference, &c->reference_layout, from, to, 3), "page_copy");
	c->at[5] = 37;
	begin_step(c);
	add_rows(c, 5, 3);
	step_on_both(c, true, "after the copy");
	begin_step(c);
	add_rows(c, 0, 1);
	step_on_both(c, true, "the original");
	cache_free(c);
	row_end();
}

/* Hundreds of pages at once, as bytes: those that were copied to are like their source, and no others have changed. */
static void many_copies(struct pair *p)
{
	enum { N = 300 };
	row_begin("page_copy of 300");
	struct cache *c = cache_new(p, KV_FORM_F16, 1, 1, 8, N * 2 / SEQS * KV_PAGE_TOKENS);
	size_t stride = c->layout.page_stride, bytes = stride * (size_t)c->n_pages;
	uint8_t *before = malloc(bytes), *after = malloc(bytes);
	if (!before || !after || c->n_pages != 2 * N)
		give_up("no memory for pages");
	for (size_t i = 0; i < bytes; i++)
		before[i] = (uint8_t)random_bits(p);
	must(p->device->ops->mem_write(p->device, c->device, before, bytes), "mem_write");
	must(p->device->ops->page_copy(p->device, c->device, &c->layout, c->pages, c->pages + N, N), "page_copy");
	must(p->device->ops->mem_read(p->device, after, c->device, bytes), "mem_read");
	for (int i = 0; i < N; i++) {
		const uint8_t *from = before + (size_t)c->pages[i] * stride,
			      *to = after + (size_t)c->pages[N + i] * stride;
		row_result(memcmp(from, to, c->layout.page_bytes) != 0, 0, "page %d", c->pages[N + i]);
		row_result(memcmp(from, after + (size_t)c->pages[i] * stride, stride) != 0, 0,
		           "page %d, which was only read", c->pages[i]);
	}
	free(before);
	free(after);
	cache_free(c);
	row_end();
}

/* Pages of the other 16-bit type, on devices that have both; the reference is told the same. */
static void other_elements(struct pair *p)
{
	struct own_elements own;
	const char *chosen = choose_other_elements(p, &own);
	if (!chosen)
		return;
	chosen_elements = chosen;
	conversations(p, KV_FORM_F16, 3, 3, 64, p->large ? 400 : 90, 0, 0);
	conversations(p, KV_FORM_F16, 2, 1, 128, p->large ? 400 : 90, 0, 0);
	conversations(p, KV_FORM_F16, 1, 4, 256, p->large ? 600 : 120, 33, 0);
	for (int i = 0; i < (p->large ? 6 : 3); i++)
		conversations(p, KV_FORM_F16, random_int(p, 1, 3), random_int(p, 1, 16), 8 * random_int(p, 1, 32),
		              random_int(p, 30, p->large ? 700 : 200), i % 2 ? random_int(p, 1, 200) : 0,
		              i % 3 == 2 ? 4 : 0);
	long_contexts(p, KV_FORM_F16, 1, 4, 64, 1500, 0);
	copies(p, KV_FORM_F16);
	odd_values(p, KV_FORM_F16);
	chosen_elements = "";
	choose_own_elements(p, &own);
}

void compare_attention(struct pair *p)
{
	const struct {
		int32_t n_head_kv, group, dim;
	} shapes[] = {{3, 3, 64},  {2, 1, 128}, {1, 8, 80}, {2, 5, 16},  {1, 40, 32},
	              {2, 12, 96}, {2, 4, 64},  {4, 7, 16}, {1, 2, 256}, {8, 4, 128}};
	for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
		conversations(p, KV_FORM_F16, shapes[i].n_head_kv, shapes[i].group, shapes[i].dim, p->large ? 400 : 90,
		              0, 0);
	for (int form = 0; form < KV_N_FORMS; form++) {
		/*
		 * Any shape that a backend may be asked for; of narrow forms, those that have kernels of their own
		 * first.
		 */
		for (int i = 0; form != KV_FORM_F16 && i < 4; i++)
			conversations(p, (enum kv_form)form, shapes[i].n_head_kv, shapes[i].group, shapes[i].dim,
			              p->large ? 400 : 90, 0, 0);
		for (int i = 0; i < (form == KV_FORM_F16 || p->large ? 6 : 3); i++)
			conversations(p, (enum kv_form)form, random_int(p, 1, 3), random_int(p, 1, 16),
			              8 * random_int(p, 1, 32),
			              random_int(p, 30,
			                         p->large              ? 700
			                         : form == KV_FORM_F16 ? 350
			                                               : 200),
			              i % 2 ? random_int(p, 1, 200) : 0, i % 3 == 2 ? 4 : 0);
		conversations(p, (enum kv_form)form, 1, 4, 256, p->large ? 600 : 200, 33, 0);
		conversations(p, (enum kv_form)form, 2, 2, 128, 150, 50, 2);
		conversations(p, (enum kv_form)form, 1, 8, 80, 120, 1, 0);
		long_contexts(p, (enum kv_form)form, 1, 4, 64, 1500, 0);
		long_contexts(p, (enum kv_form)form, 1, 4, 64, 1500, 500);
		if (p->large) {
			long_contexts(p, (enum kv_form)form, 8, 4, 128, 8192, 0);
			long_contexts(p, (enum kv_form)form, 4, 2, 256, 16384, 4096);
			if (form == KV_FORM_F16)
				long_contexts(p, (enum kv_form)form, 2, 8, 128, 33000, 0);
		}
		copies(p, (enum kv_form)form);
		odd_values(p, (enum kv_form)form);
	}
	many_copies(p);
	other_elements(p);
}
