/*
 * Keys of chunks (struct rope_chunks): conversations over several of them agree with the reference, in every form; a
 * row has the same bits however its prompt was cut; and within the first chunk they are those of plain positions.
 */
#include "tests/gpu/compare_cache.h"

/* ", bf16" while both devices have been told to keep that. */
static const char *chosen_elements = "";

static void name_row(const char *what, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim, int32_t size)
{
	char name[64];
	snprintf(name, sizeof name, "%s %d, %dx%d of %d%s%s%s", what, size, n_head_kv, group, dim,
		 form == KV_FORM_F16 ? "" : ", ", form == KV_FORM_F16 ? "" : kv_form_name(form), chosen_elements);
	row_begin(name);
}

/* Prompts, chunks of them that end anywhere, and single rows, up to n_tokens; another conversation beside it. */
static void conversation(struct pair *p, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim,
			 int32_t rotated, int32_t size, int32_t reach, int32_t n_tokens, float cap)
{
	name_row("chunks", form, n_head_kv, group, dim, size);
	struct cache *c = cache_new(p, form, n_head_kv, group, dim, n_tokens + 8);
	c->params.softcap = cap;
	cache_of_chunks(c, group % 2 ? ROPE_HALVES : ROPE_INTERLEAVED, rotated, size, reach);
	while (c->at[0] < n_tokens) {
		int32_t left = n_tokens - c->at[0], n = random_int(p, 1, size + size / 2);
		begin_step(c);
		if (c->at[1] < n_tokens)
			add_rows(c, 1, c->at[1] == 0 ? n_tokens - 3 : 1);
		add_rows(c, 0, n < left ? n : left);
		step_on_both(c, true, "a chunk of the prompt");
		begin_step(c);
		add_rows(c, 0, 1);
		add_rows(c, 2, 1);
		step_on_both(c, true, "single rows");
	}
	cache_free(c);
	row_end();
}

/* n tokens of sequence `s`, at most `cut` rows at a time, of operands that begin with the first; 0: by chance. */
static void converse(struct cache *c, int32_t s, int32_t n, int32_t cut, struct operand *o)
{
	struct backend *b = c->p->device;
	const struct backend_ops *ops = b->ops;
	int64_t width = (int64_t)c->layout.n_head_kv * c->layout.head_dim,
		q_width = (int64_t)c->n_head * c->layout.head_dim;
	for (c->at[s] = 0; c->at[s] < n;) {
		int64_t at = c->at[s];
		int32_t most = cut > 0 ? cut : random_int(c->p, 0, 2) ? random_int(c->p, 1, 90) : 1;
		float *q = o[0].device + at * q_width, *k = o[1].device + at * width;
		begin_step(c);
		add_rows(c, s, n - c->at[s] < most ? n - c->at[s] : most);
		must(ops->mem_write(b, q, o[0].host + at * q_width,
				    (size_t)(c->batch.n_rows * q_width) * sizeof(float)),
		     "mem_write");
		must(ops->mem_write(b, k, o[1].host + at * width, (size_t)(c->batch.n_rows * width) * sizeof(float)),
		     "mem_write");
		step_on(c, b, c->device, q, k, o[2].device + at * width, o[3].device + at * q_width, true);
	}
}

static void bits(struct pair *p, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim, int32_t size,
		 int32_t n_tokens)
{
	name_row("chunk bits", form, n_head_kv, group, dim, size);
	struct cache *c = cache_new(p, form, n_head_kv, group, dim, n_tokens);
	size_t width = (size_t)(n_head_kv * dim), n = (size_t)n_tokens * width;
	struct operand o[] = {operand_new(p, n * (size_t)group, 1.5f), operand_new(p, n, 1.5f), operand_new(p, n, 1),
			      operand_new(p, n * (size_t)group, 1)};
	float *want, *got, *other;
	size_t first = (size_t)size * width * (size_t)group, differ = 0;
	/* The same pages of each are wide. */
	for (int32_t i = 0, slot = 0; form != KV_FORM_F16 && i < c->n_pages; i++)
		c->wide.slot[c->pages[i]] = i % c->pages_per_seq % 8 == 0 ? slot++ : -1;
	cache_of_chunks(c, ROPE_HALVES, dim, size, size + size / 3);
	converse(c, 0, n_tokens, MAX_ROWS, o);
	operand_results(&o[3], &want, &other);
	free(other);
	static const int32_t cuts[] = {0, 13};
	for (int i = 0; i < 2; i++) {
		converse(c, 1 + i, n_tokens, cuts[i], o);
		operand_results(&o[3], &got, &other);
		for (size_t e = 0; e < o[3].n; e++)
			row_result(!(got[e] == want[e]), 0, "element %zu: %g instead of %g", e, (double)got[e],
				   (double)want[e]);
		free(got);
		free(other);
	}
	c->rope.chunks = (struct rope_chunks){0, 0};
	c->params.chunked = NULL;
	converse(c, 3, n_tokens, MAX_ROWS, o);
	operand_results(&o[3], &got, &other);
	for (size_t e = 0; e < o[3].n; e++) {
		if (e < first)
			row_result(!(got[e] == want[e]), 0, "without chunks element %zu is %g instead of %g", e,
				   (double)got[e], (double)want[e]);
		differ += got[e] != want[e];
	}
	row_result(differ == 0, 0, "nothing was tested");
	free(got);
	free(other);
	free(want);
	for (int i = 0; i < 4; i++)
		operand_free(&o[i]);
	cache_free(c);
	row_end();
}

/* Pages of the other 16-bit type, on devices that have both. */
static void other_elements(struct pair *p)
{
	struct own_elements own;
	const char *chosen = choose_other_elements(p, &own);
	if (!chosen)
		return;
	chosen_elements = chosen;
	conversation(p, KV_FORM_F16, 1, 3, 72, 72, 128, 150, 300, 0);
	conversation(p, KV_FORM_F16, 1, 1, 176, 88, 64, 100, 150, 0);
	bits(p, KV_FORM_F16, 1, 5, 128, 64, 150);
	chosen_elements = "";
	choose_own_elements(p, &own);
}

void compare_chunks(struct pair *p)
{
	struct backend_info info;
	p->device->ops->info(p->device, &info);
	if (!info.turns_chunks)
		return;
	const int32_t scale = p->large ? 4 : 1;
	conversation(p, KV_FORM_F16, 3, 3, 64, 64, 64, 86, 210 * scale, 0);
	conversation(p, KV_FORM_F16, 1, 2, 80, 64, 128, 129, 300 * scale, 0);
	conversation(p, KV_FORM_F16, 1, 4, 128, 128, 192, 250, 420 * scale, 3);
	conversation(p, KV_FORM_F16, 1, 40, 32, 32, 64, 65, 140 * scale, 0);
	for (int form = 0; form < KV_N_FORMS; form++) {
		conversation(p, (enum kv_form)form, 1, 2, 256, 128, 64, 100, 150 * scale, 0);
		for (int i = 0; i < (p->large ? 6 : 1); i++) {
			int32_t size = ROPE_CHUNK_STEP * random_int(p, 1, p->large ? 3 : 2);
			int32_t dim = 8 * random_int(p, 1, 32), group = random_int(p, 1, 12);
			conversation(p, (enum kv_form)form, p->large ? 2 : 1, group, dim, dim / 2 * random_int(p, 1, 2),
				     size, size + random_int(p, 1, size), random_int(p, 2 * size, 3 * size), 0);
		}
		bits(p, (enum kv_form)form, 1, 3, 64, 64, 150 * scale);
	}
	bits(p, KV_FORM_F16, 2, 2, 128, 192, 400);
	other_elements(p);
	if (p->large)
		for (int form = 0; form < KV_N_FORMS; form++)
			conversation(p, (enum kv_form)form, 8, 4, 128, 128, 384, 512, 1500, 0);
}
