/*
 * Logits that are raised (batch_seq.plus): attention agrees with the reference, in batches in which only some sequences
 * are raised, and by some of their pages only. What a row gets is the same bits however rows are cut into steps, and
 * adding nothing changes no bit.
 */
#include "tests/gpu/compare_cache.h"

enum { TALKS = 4, BLOCK = KV_PART_PAGES * KV_PAGE_TOKENS };

struct raised {
	struct cache *c;
	float *plus[TALKS]; /* NULL: that conversation's logits are as they are */
	int32_t n_plus[TALKS];
};

/* ln n of buckets, and places that stand for nothing, a whole page of them too. */
static void raise(struct raised *r, int32_t seq, int32_t n)
{
	r->plus[seq] = malloc((size_t)n * sizeof **r->plus);
	r->n_plus[seq] = n;
	if (!r->plus[seq])
		give_up("no memory");
	for (int32_t i = 0; i < n; i++)
		r->plus[seq][i] = random_int(r->c->p, 0, 9) == 0 || i / KV_PAGE_TOKENS == 3
					  ? -10000.0f
					  : logf((float)random_int(r->c->p, 1, 60));
}

/* What the batch computes on a device; raised: NULL, with nothing added; operands are its rows' from `first` on. */
static void run(struct cache *c, struct backend *b, const struct raised *raised, const int32_t *seqs, struct operand *o,
		int64_t first)
{
	const bool on_device = b == c->p->device;
	const int32_t width = c->layout.n_head_kv * c->layout.head_dim, q_width = c->n_head * c->layout.head_dim;
	int32_t rows[MAX_ROWS];
	float *at[4];
	for (int32_t i = 0; i < c->batch.n_seqs; i++) {
		c->seq[i].plus = raised ? raised->plus[seqs[i]] : NULL;
		c->seq[i].n_plus = raised && raised->plus[seqs[i]] ? raised->n_plus[seqs[i]] : 0;
	}
	for (int32_t i = 0; i < c->batch.n_rows; i++)
		rows[i] = i;
	for (int i = 0; i < 4; i++)
		at[i] = (on_device ? o[i].device : o[i].reference) + first * (i == 0 || i == 3 ? q_width : width);
	/* Where all rows have outputs, a device may record the step. */
	c->batch.output_row = rows;
	c->batch.n_outputs = c->batch.n_rows;
	step_on(c, b, on_device ? c->device : c->reference, at[0], at[1], at[2], at[3], false);
	c->batch.n_outputs = 0;
}

static void new_operands(struct cache *c, int32_t n_rows, struct operand o[4])
{
	const size_t kv_size = (size_t)(n_rows * c->layout.n_head_kv * c->layout.head_dim),
		     q_size = (size_t)(n_rows * c->n_head * c->layout.head_dim);
	for (int i = 0; i < 4; i++)
		o[i] = operand_new(c->p, i == 0 || i == 3 ? q_size : kv_size, i == 0 ? 1.5f : 1);
}

/* The next n_rows[s] rows of each conversation in one step, several times with new operands. */
static void step_of(struct raised *r, const int32_t n_rows[TALKS], int times, const char *what)
{
	struct cache *c = r->c;
	struct pair *p = c->p;
	/* A last bit of bfloat16s, of queries and weights too, is worth so much. */
	const bool fewer_bits = c->layout.type == QUANT_BF16 || c->layout.type != c->reference_layout.type;
	for (int i = 0; i < times; i++) {
		struct operand o[4];
		int32_t seqs[TALKS], n = 0;
		begin_step(c);
		for (int32_t s = 0; s < TALKS; s++) {
			if (n_rows[s] == 0)
				continue;
			add_rows(c, s, n_rows[s]);
			seqs[n++] = s;
		}
		new_operands(c, c->batch.n_rows, o);
		run(c, p->device, r, seqs, o, 0);
		run(c, p->reference, r, seqs, o, 0);
		row_results(&o[3], fewer_bits ? 5e-2 : 4e-3, what);
		for (int k = 0; k < 4; k++)
			operand_free(&o[k]);
	}
}

/* n rows of conversation 0, at most `chunk` at a time, as they come out of the device; free() it. */
static float *cut(struct raised *r, const struct raised *with, int32_t from, int32_t n, int32_t chunk,
		  struct operand o[4])
{
	struct cache *c = r->c;
	const int32_t seq = 0;
	float *got, *unused;
	c->at[0] = from;
	for (int32_t row = 0; row < n; row = c->at[0] - from) {
		begin_step(c);
		add_rows(c, 0, chunk < n - row ? chunk : n - row);
		run(c, c->p->device, with, &seq, o, row);
	}
	operand_results(&o[3], &got, &unused);
	free(unused);
	return got;
}

static void compare_cuts(struct raised *r, int32_t n)
{
	struct cache *c = r->c;
	static float zeros[64 * BLOCK];
	const struct raised nothing = {.plus = {zeros}, .n_plus = {r->n_plus[0]}};
	const int32_t from = c->at[0];
	struct operand o[4];
	if (r->n_plus[0] > 64 * BLOCK)
		give_up("the test asks for too much");
	new_operands(c, n, o);
	const size_t bytes = o[3].n * sizeof(float);
	for (int i = 0; i < 2; i++) {
		const struct raised *with = i ? &nothing : r;
		float *want = cut(r, i ? NULL : r, from, n, n, o);
		for (int32_t chunk = 1; chunk <= n; chunk += chunk == 1 ? 2 : n - 3) {
			float *got = cut(r, with, from, n, chunk, o);
			row_result(memcmp(got, want, bytes) != 0, 0, "other bits in chunks of %d%s", chunk,
				   i ? ", with nothing added" : "");
			free(got);
		}
		free(want);
	}
	for (int i = 0; i < 4; i++)
		operand_free(&o[i]);
}

static void raises(struct pair *p, const char *elements, int32_t n_head_kv, int32_t group, int32_t dim, int32_t length,
		   int32_t window, float cap)
{
	char name[96];
	int used = snprintf(name, sizeof name, "raised %dx%d heads of %d%s", n_head_kv, group, dim, elements);
	if (window || cap > 0)
		snprintf(name + used, sizeof name - (size_t)used, ", window %d, cap %g", window, (double)cap);
	row_begin(name);
	const int32_t many = p->large ? 300 : 40;
	struct raised r = {.c = cache_new(p, KV_FORM_F16, n_head_kv, group, dim, length + 2 * many + 40)};
	struct raised plain = {.c = r.c};
	r.c->params.window = window;
	r.c->params.softcap = cap;
	for (int32_t at = 0; at < length; at += MAX_ROWS / TALKS) {
		const int32_t n = length - at < MAX_ROWS / TALKS ? length - at : MAX_ROWS / TALKS;
		/* One is so short that less than its first block is there. */
		step_of(&plain, (int32_t[TALKS]){n, n, n, at == 0 && n > 70 ? 70 : 0}, 1, "a beginning");
	}
	/* By all that there was, by nothing, by a part, and by more than there is. */
	raise(&r, 0, (length + BLOCK - 1) / BLOCK * BLOCK);
	raise(&r, 2, BLOCK);
	raise(&r, 3, 2 * BLOCK);
	step_of(&r, (int32_t[TALKS]){1, 1, 1, 1}, 5, "single rows");
	step_of(&r, (int32_t[TALKS]){2, 1, 0, 5}, 1, "a few rows");
	step_of(&r, (int32_t[TALKS]){many, 3, 0, many / 2}, 1, "a chunk");
	compare_cuts(&r, many);
	for (int s = 0; s < TALKS; s++)
		free(r.plus[s]);
	cache_free(r.c);
	row_end();
}

void compare_plus(struct pair *p)
{
	struct backend_info info[2];
	struct backend *b[] = {p->device, p->reference};
	for (int i = 0; i < 2; i++)
		b[i]->ops->info(b[i], &info[i]);
	if (!info[0].adds_to_logits || !info[1].adds_to_logits)
		return;
	const int32_t length = p->large ? 5000 : 260;
	raises(p, "", 2, 3, 64, length, 0, 0);
	raises(p, "", 1, 8, 128, length, 0, 0);
	raises(p, "", 2, 4, 24, length, 100, 2);
	raises(p, "", 1, 2, 256, length / 2, 0, 0);
	raises(p, "", random_int(p, 1, 2), random_int(p, 1, 16), 8 * random_int(p, 1, p->large ? 32 : 12), 200,
	       random_int(p, 0, 1) * 150, (float)random_int(p, 0, 1) * 3);
	struct own_elements own;
	const char *chosen = choose_other_elements(p, &own);
	if (!chosen)
		return;
	raises(p, chosen, 2, 3, 64, length, 0, 0);
	raises(p, chosen, 1, 2, 136, 200, 0, 0);
	choose_own_elements(p, &own);
}
