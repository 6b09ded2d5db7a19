/*
 * Sequences whose first pages are in host memory (struct kv_far): attention over them part by part gives the bits that
 * it gives over the same pages in the pool, whatever the parts, and the other rows of the step do not notice.
 */
#include "tests/gpu/compare_cache.h"

/*
 * The first pages of a sequence, last first, where memory is the host's; their places in the pool are filled with what
 * is no number.
 */
struct below {
	struct kv_layout layout; /* of one layer */
	void *memory;
	size_t bytes;
	int32_t n_pages, *table;
	struct kv_far far; /* says that there is something; nobody asks it */
};

static void *host_memory(struct backend *b, size_t bytes)
{
	void *p;
	if (b->ops->host_alloc)
		must(b->ops->host_alloc(b, bytes, &p), "host_alloc");
	else
		must(b->ops->mem_alloc(b, bytes, &p), "mem_alloc");
	return p;
}

static void move_away(struct cache *c, struct below *to, int32_t n)
{
	struct backend *b = c->p->device;
	const struct kv_layout *l = &c->layout;
	size_t piece = l->page_bytes / (size_t)l->n_layer, stride = piece * (size_t)n;
	int32_t *pages = malloc((size_t)n * sizeof *pages);
	uint8_t *junk = malloc(l->page_bytes);
	*to = (struct below){.layout = kv_layout_of_layer(l), .bytes = stride * (size_t)l->n_layer, .n_pages = n};
	to->memory = host_memory(b, to->bytes);
	to->table = malloc((size_t)n * sizeof *to->table);
	to->far.n_pages = n;
	if (!pages || !junk || !to->table)
		give_up("no memory");
	for (int32_t i = 0; i < n; i++) {
		to->table[i] = n - 1 - i;
		pages[n - 1 - i] = c->pages[i];
	}
	if (b->ops->page_layers)
		must(b->ops->page_layers(b, c->device, l, pages, n, to->memory, stride), "page_layers");
	memset(junk, 0xFF, l->page_bytes);
	for (int32_t i = 0; i < n; i++) {
		char *page = (char *)c->device + (size_t)pages[i] * l->page_stride;
		for (int32_t layer = 0; !b->ops->page_layers && layer < l->n_layer; layer++)
			memcpy((char *)to->memory + (size_t)layer * stride + (size_t)i * piece,
			       page + (size_t)layer * piece, piece);
		must(b->ops->mem_write(b, page, junk, l->page_bytes), "mem_write");
	}
	free(pages);
	free(junk);
}

static void forget(struct cache *c, struct below *b)
{
	const struct backend_ops *ops = c->p->device->ops;
	if (ops->host_free)
		ops->host_free(c->p->device, b->memory, b->bytes);
	else
		ops->mem_free(c->p->device, b->memory, b->bytes);
	free(b->table);
}

/* As the forward pass does it, at most `most` pages at a time. */
static void attend(struct cache *c, int32_t s, const struct below *below, int32_t most, const float *q, float *out)
{
	struct backend *b = c->p->device;
	const struct batch_seq *seq = &c->seq[s];
	struct attention_part part = {.seq = s, .first = true};
	const int32_t window = c->params.window;
	must(b->ops->step_begin(b, &c->batch), "step_begin");
	must(b->ops->attention(b, c->device, &c->layout, LAYER, q, c->n_head, &c->params, out), "attention");
	if (below) {
		int32_t page = window > 0 && seq->first_position >= window
				       ? (seq->first_position + 1 - window) / KV_PAGE_TOKENS
				       : 0;
		const void *layer = (const char *)below->memory + LAYER * (below->bytes / LAYERS);
		page -= page % KV_PART_PAGES;
		for (; page < below->n_pages; page += part.n_pages, part.first = false) {
			part.first_page = page;
			part.n_pages =
				most - page % most < below->n_pages - page ? most - page % most : below->n_pages - page;
			part.block_table = below->table + page;
			must(b->ops->attention_part(b, layer, &below->layout, 0, q, c->n_head, &c->params, &part, out),
			     "attention_part");
		}
		part.first_page = page > below->n_pages ? page : below->n_pages;
		part.n_pages = seq->n_pages - part.first_page;
		part.block_table = seq->block_table + part.first_page;
		part.last = true;
		must(b->ops->attention_part(b, c->device, &c->layout, LAYER, q, c->n_head, &c->params, &part, out),
		     "attention_part");
	}
	must(b->ops->step_end(b), "step_end");
}

/* n_tokens of a conversation, the last n_rows of them rows, and one row of others on either side. */
static void far(struct pair *p, int32_t n_head_kv, int32_t group, int32_t dim, int32_t n_tokens, int32_t n_rows,
		int32_t n_far, int32_t most, int32_t window, float cap, int32_t chunk)
{
	char name[64];
	snprintf(name, sizeof name, "far %dx%d of %d, %d rows, %d/%d%s", n_head_kv, group, dim, n_rows, n_far, most,
		 window  ? ", window"
		 : chunk ? ", chunks"
			 : "");
	row_begin(name);
	struct cache *c = cache_new(p, KV_FORM_F16, n_head_kv, group, dim, n_tokens);
	struct below below;
	const int32_t length[] = {n_tokens, 70, 33};
	size_t width = (size_t)(n_head_kv * dim), n = (size_t)(n_rows + 2) * width * (size_t)group;
	c->params.window = window;
	c->params.softcap = cap;
	if (chunk)
		cache_of_chunks(c, ROPE_INTERLEAVED, dim, chunk, chunk + chunk / 2);
	for (int32_t s = 0; s < 3; s++)
		while (c->at[s] < length[s]) {
			begin_step(c);
			add_rows(c, s, length[s] - c->at[s] < MAX_ROWS ? length[s] - c->at[s] : MAX_ROWS);
			size_t rows = (size_t)c->batch.n_rows;
			struct operand k = operand_new(p, rows * width, 1), v = operand_new(p, rows * width, 1);
			must(p->device->ops->step_begin(p->device, &c->batch), "step_begin");
			must(p->device->ops->kv_write(p->device, c->device, &c->layout, LAYER, k.device, v.device),
			     "kv_write");
			must(p->device->ops->step_end(p->device), "step_end");
			operand_free(&k);
			operand_free(&v);
		}
	begin_step(c);
	for (int32_t i = 0; i < 3; i++) {
		static const int32_t order[] = {1, 0, 2};
		int32_t s = order[i], rows = s == 0 ? n_rows : 1;
		c->at[s] -= rows;
		add_rows(c, s, rows);
	}
	struct operand q = operand_new(p, n, 1), out = operand_new(p, n, 1);
	float *want, *got, *other;
	attend(c, 1, NULL, 0, q.device, out.device);
	operand_results(&out, &want, &other);
	free(other);
	move_away(c, &below, n_far);
	c->seq[1].far = &below.far;
	for (int twice = 0; twice < 2; twice++) {
		attend(c, 1, &below, most, q.device, out.device);
		operand_results(&out, &got, &other);
		for (size_t i = 0; i < n; i++)
			row_result(!(got[i] == want[i]), 0, "element %zu: %g instead of %g", i, (double)got[i],
				   (double)want[i]);
		free(got);
		free(other);
	}
	free(want);
	forget(c, &below);
	operand_free(&q);
	operand_free(&out);
	cache_free(c);
	row_end();
}

void compare_far(struct pair *p)
{
	const struct backend_ops *ops = p->device->ops;
	struct backend_info info;
	ops->info(p->device, &info);
	/* The reference adds up in another order. */
	if (!ops->attention_part || strcmp(info.name, "cpu-reference") == 0)
		return;
	const int32_t scale = p->large ? 6 : 1, part = KV_PART_PAGES;
	far(p, 2, 3, 64, 1500 * scale, 1, 9 * part * scale, part, 0, 0, 0);
	far(p, 1, 4, 128, 700 * scale, 60, 4 * part * scale, 3 * part, 0, 0, 0);
	far(p, 3, 1, 64, 900 * scale, 7, 6 * part * scale, 1000 * part, 0, 2, 0);
	far(p, 1, 8, 80, 700 * scale, 40, 4 * part * scale, 2 * part, 300, 0, 0);
	far(p, 1, 2, 256, 600 * scale, 50, 3 * part * scale, part, 0, 0, 0);
	far(p, 2, 4, 64, 900 * scale, 1, 5 * part * scale, 2 * part, 0, 0, 448);
	far(p, 1, 3, 128, 800 * scale, 70, 5 * part * scale, part, 0, 0, 192);
	if (p->large)
		far(p, 8, 4, 128, 30000, 1, 200 * part, 1000 * part, 0, 0, 0);
	for (int i = 0; i < (p->large ? 6 : 2); i++) {
		int32_t n_tokens = random_int(p, 300, 1200) * scale, n_rows = i % 2 ? random_int(p, 1, 100) : 1;
		int32_t parts = random_int(p, 1, (n_tokens - n_rows) / KV_PAGE_TOKENS / part);
		far(p, random_int(p, 1, 3), random_int(p, 1, 16), 8 * random_int(p, 1, 32), n_tokens, n_rows,
		    parts * part, random_int(p, 1, parts) * part, i % 3 == 2 ? random_int(p, 20, 900) : 0, 0, 0);
	}
}
