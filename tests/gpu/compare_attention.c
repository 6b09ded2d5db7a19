/* Pages: RoPE, storing keys and values, attention over them, copies; conversations of prompts, chunks and single rows. */
#include "tests/gpu/compare.h"

enum { LAYERS = 2, LAYER = 1, SEQS = 6, MAX_ROWS = 700 };

/* The same pages on both devices, and the sequences that own them. */
struct cache {
	struct pair *p;
	struct kv_layout layout;           /* of the device; that of the reference differs in the type at most */
	struct kv_layout reference_layout;
	int32_t n_head, n_pages, pages_per_seq;
	struct attention_params params;
	void *device, *reference;
	int32_t *pages;    /* [n_pages] in random order; sequence s has pages_per_seq of them from s * pages_per_seq */
	int32_t at[SEQS];  /* length so far */
	float freq[128];
	int32_t token[MAX_ROWS], position[MAX_ROWS];
	struct batch_seq seq[SEQS];
	struct batch batch;
};

/* Pages that were used before hold anything: here, halves that are not numbers. */
static void *used_pages(struct backend *b, size_t bytes)
{
	void *kv, *junk = malloc(bytes);
	if (!junk)
		give_up("no memory for pages");
	memset(junk, 0xFF, bytes);
	must(b->ops->mem_alloc(b, bytes, &kv), "mem_alloc");
	must(b->ops->mem_write(b, kv, junk, bytes), "mem_write");
	free(junk);
	return kv;
}

static struct cache *cache_new(struct pair *p, int32_t n_head_kv, int32_t group, int32_t dim, int32_t max_length)
{
	struct cache *c = calloc(1, sizeof *c);
	if (!c)
		give_up("no memory");
	c->p = p;
	c->n_head = n_head_kv * group;
	c->params.scale = 1 / sqrtf((float)dim);
	c->pages_per_seq = (max_length + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
	c->n_pages = c->pages_per_seq * SEQS;
	c->pages = malloc((size_t)c->n_pages * sizeof *c->pages);
	if (!c->pages)
		give_up("no memory");
	must(kv_layout_for(p->device, &c->layout, LAYERS, n_head_kv, dim), "kv_layout_for");
	must(kv_layout_for(p->reference, &c->reference_layout, LAYERS, n_head_kv, dim), "kv_layout_for");
	for (int32_t i = 0; i < c->n_pages; i++)
		c->pages[i] = i;
	for (int32_t i = c->n_pages - 1; i > 0; i--) {
		int32_t j = random_int(p, 0, i), t = c->pages[i];
		c->pages[i] = c->pages[j];
		c->pages[j] = t;
	}
	size_t bytes = c->layout.page_stride * (size_t)c->n_pages;
	c->device = used_pages(p->device, bytes);
	c->reference = used_pages(p->reference, bytes);
	must(p->device->ops->reserve(p->device, MAX_ROWS, c->n_head * dim, &c->layout), "reserve");
	must(p->reference->ops->reserve(p->reference, MAX_ROWS, c->n_head * dim, &c->reference_layout), "reserve");
	for (int32_t i = 0; i < dim / 2; i++)
		c->freq[i] = (float)pow(10000, -2.0 * i / dim);
	c->batch = (struct batch){.token = c->token, .position = c->position, .seq = c->seq};
	return c;
}

static void cache_free(struct cache *c)
{
	size_t bytes = c->layout.page_stride * (size_t)c->n_pages;
	c->p->device->ops->mem_free(c->p->device, c->device, bytes);
	c->p->reference->ops->mem_free(c->p->reference, c->reference, bytes);
	free(c->pages);
	free(c);
}

static void begin_step(struct cache *c)
{
	c->batch.n_rows = c->batch.n_seqs = 0;
}

static void add_rows(struct cache *c, int32_t seq, int32_t n)
{
	int32_t at = c->at[seq];
	if (c->batch.n_rows + n > MAX_ROWS || at + n > c->pages_per_seq * KV_PAGE_TOKENS)
		give_up("the test asks for too much");
	c->seq[c->batch.n_seqs++] = (struct batch_seq){c->batch.n_rows, n, at, c->pages + seq * c->pages_per_seq,
	                                               (at + n + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS};
	for (int32_t i = 0; i < n; i++)
		c->position[c->batch.n_rows + i] = at + i;
	c->batch.n_rows += n;
	c->at[seq] += n;
}

static void step_on(struct cache *c, struct backend *b, void *kv, float *q, float *k, const float *v, float *out, bool rope)
{
	struct rope_params r = {ROPE_HALVES, c->layout.head_dim, c->freq, 1};
	const struct kv_layout *layout = b == c->p->device ? &c->layout : &c->reference_layout;
	int32_t n_head_kv = layout->n_head_kv, dim = layout->head_dim;
	must(b->ops->step_begin(b, &c->batch), "step_begin");
	if (rope)
		must(b->ops->rope(b, q, c->n_head, k, n_head_kv, dim, &r), "rope");
	must(b->ops->kv_write(b, kv, layout, LAYER, k, v), "kv_write");
	must(b->ops->attention(b, kv, layout, LAYER, q, c->n_head, &c->params, out), "attention");
	must(b->ops->step_end(b), "step_end");
}

/* One step over the batch, compared. */
static void step(struct cache *c, bool rope, const char *what)
{
	struct pair *p = c->p;
	size_t kv_size = (size_t)(c->batch.n_rows * c->layout.n_head_kv * c->layout.head_dim);
	size_t q_size = kv_size * (size_t)(c->n_head / c->layout.n_head_kv);
	struct operand q = operand_new(p, q_size, 1.5f), k = operand_new(p, kv_size, 1.5f), v = operand_new(p, kv_size, 1);
	struct operand out = operand_new(p, q_size, 1);
	step_on(c, p->device, c->device, q.device, k.device, v.device, out.device, rope);
	step_on(c, p->reference, c->reference, q.reference, k.reference, v.reference, out.reference, rope);
	/*
	 * Keys and values are halves, or bfloat16s on either, which have three bits less; a last bit of RoPE's sines may round a key to
	 * the next one, and a device may round queries and probabilities to halves as well.
	 */
	bool bf16 = c->layout.type == QUANT_BF16 || c->reference_layout.type == QUANT_BF16;
	row_results(&out, bf16 ? 5e-2 : p->element_error > 0 ? 4e-3 : 1e-3, what);
	operand_free(&q);
	operand_free(&k);
	operand_free(&v);
	operand_free(&out);
}

static void conversations(struct pair *p, int32_t n_head_kv, int32_t group, int32_t dim, int32_t length, int32_t window, float cap)
{
	char name[96];
	int at = snprintf(name, sizeof name, "attention %dx%d heads of %d", n_head_kv, group, dim);
	if (window || cap > 0)
		snprintf(name + at, sizeof name - (size_t)at, ", window %d, cap %g", window, (double)cap);
	row_begin(name);
	struct cache *c = cache_new(p, n_head_kv, group, dim, length);
	c->params.window = window;
	c->params.softcap = cap;
	int32_t most = length / 3 < 100 ? length / 3 : 100;
	/* prompts of every length together, and a first chunk that ends within a page */
	begin_step(c);
	for (int32_t s = 0; s < 4; s++)
		add_rows(c, s, random_int(p, 1, most));
	step(c, true, "prompts");
	/* chunks on top, decode rows beside them, and a sequence that waits */
	begin_step(c);
	add_rows(c, 0, random_int(p, 2, most));
	add_rows(c, 2, 1);
	add_rows(c, 3, 1);
	add_rows(c, 4, random_int(p, 1, most));
	step(c, true, "chunks and single rows");
	for (int i = 0; i < 3; i++) {
		begin_step(c);
		for (int32_t s = 0; s < 5; s++)
			add_rows(c, s, 1);
		step(c, i & 1, "single rows");
	}
	cache_free(c);
	row_end();
}

/* Contexts as long as real ones, decoded and extended by a chunk. */
static void long_contexts(struct pair *p, int32_t n_head_kv, int32_t group, int32_t dim, int32_t length, int32_t window)
{
	char name[64];
	snprintf(name, sizeof name, window ? "attention over %d in windows of %d" : "attention over %d", length, window);
	row_begin(name);
	struct cache *c = cache_new(p, n_head_kv, group, dim, length + 64);
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
			must(b[i]->ops->kv_write(b[i], i ? c->reference : c->device, i ? &c->reference_layout : &c->layout, LAYER,
			                         i ? k.reference : k.device,
			                         i ? v.reference : v.device),
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
	step(c, true, "one row");
	begin_step(c);
	add_rows(c, 0, 30);
	step(c, true, "a chunk");
	begin_step(c);
	add_rows(c, 0, 1);
	step(c, true, "one row more");
	cache_free(c);
	row_end();
}

/* A copied page serves like the one it was copied from. */
static void copies(struct pair *p)
{
	row_begin("page_copy");
	struct cache *c = cache_new(p, 2, 2, 64, 64);
	begin_step(c);
	add_rows(c, 0, 37);
	step(c, false, "prompt");
	int32_t from[3], to[3];
	for (int i = 0; i < 3; i++) {
		from[i] = c->pages[i];
		to[i] = c->pages[5 * c->pages_per_seq + i];
	}
	must(p->device->ops->page_copy(p->device, c->device, &c->layout, from, to, 3), "page_copy");
	must(p->reference->ops->page_copy(p->reference, c->reference, &c->reference_layout, from, to, 3), "page_copy");
	c->at[5] = 37;
	begin_step(c);
	add_rows(c, 5, 3);
	step(c, true, "after the copy");
	begin_step(c);
	add_rows(c, 0, 1);
	step(c, true, "the original");
	cache_free(c);
	row_end();
}

/* Hundreds of pages at once, as bytes: those that were copied to are like their source, and no others have changed. */
static void many_copies(struct pair *p)
{
	enum { N = 300 };
	row_begin("page_copy of 300");
	struct cache *c = cache_new(p, 1, 1, 8, N * 2 / SEQS * KV_PAGE_TOKENS);
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
		const uint8_t *from = before + (size_t)c->pages[i] * stride, *to = after + (size_t)c->pages[N + i] * stride;
		row_result(memcmp(from, to, c->layout.page_bytes) != 0, 0, "page %d", c->pages[N + i]);
		row_result(memcmp(from, after + (size_t)c->pages[i] * stride, stride) != 0, 0, "page %d, which was only read", c->pages[i]);
	}
	free(before);
	free(after);
	cache_free(c);
	row_end();
}

void compare_attention(struct pair *p)
{
	const struct {
		int32_t n_head_kv, group, dim;
	} shapes[] = {{3, 3, 64}, {2, 1, 128}, {1, 8, 80}, {2, 5, 16}, {1, 40, 32}, {2, 12, 96}, {2, 4, 64}, {4, 7, 16}, {1, 2, 256}, {8, 4, 128}};
	for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
		conversations(p, shapes[i].n_head_kv, shapes[i].group, shapes[i].dim, p->large ? 400 : 90, 0, 0);
	conversations(p, 1, 4, 256, p->large ? 600 : 200, 33, 0);
	conversations(p, 2, 2, 128, 150, 0, 2);
	conversations(p, 2, 3, 64, 150, 50, 5);
	conversations(p, 1, 8, 80, 150, 1, 0);
	/* Any shape that a backend may be asked for. */
	for (int i = 0; i < 6; i++)
		conversations(p, random_int(p, 1, 3), random_int(p, 1, 16), 8 * random_int(p, 1, 32), random_int(p, 30, p->large ? 700 : 350),
		              i % 2 ? random_int(p, 1, 300) : 0, i % 3 == 2 ? 4 : 0);
	long_contexts(p, 1, 4, 64, 1500, 0);
	long_contexts(p, 1, 4, 64, 1500, 500);
	long_contexts(p, 2, 1, 64, 1500, 1000);
	if (p->large) {
		long_contexts(p, 8, 4, 128, 8192, 0);
		long_contexts(p, 4, 2, 256, 16384, 4096);
		long_contexts(p, 2, 8, 128, 33000, 0);
	}
	copies(p);
	many_copies(p);
}
