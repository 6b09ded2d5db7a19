#include "tests/gpu/compare_cache.h"

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

/* Makes it narrow, with wide copies of a part of the pages. */
static void make_narrow(struct cache *c, enum kv_form form)
{
	struct kv_layout *l = &c->layout;
	struct kv_wide *w = &c->wide;
	int32_t n = 0;
	*w = (struct kv_wide){
		.slot = malloc((size_t)c->n_pages * sizeof *w->slot), .stride = l->page_stride, .bytes = l->page_bytes};
	if (!w->slot)
		give_up("no memory");
	for (int32_t i = 0; i < c->n_pages; i++)
		w->slot[i] = random_int(c->p, 0, 3) == 0 ? n++ : -1;
	kv_layout_narrow(l, form);
	kv_layout_narrow(&c->reference_layout, form);
	w->offset = l->page_stride * (size_t)c->n_pages;
	c->bytes = w->offset + (size_t)n * w->stride;
	c->reference_wide = *w;
	l->wide = &c->wide;
	c->reference_layout.wide = &c->reference_wide;
}

struct cache *cache_new(struct pair *p, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim,
			int32_t max_length)
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
	c->bytes = c->layout.page_stride * (size_t)c->n_pages;
	if (form != KV_FORM_F16)
		make_narrow(c, form);
	c->device = used_pages(p->device, c->bytes);
	c->reference = used_pages(p->reference, c->bytes);
	must(p->device->ops->reserve(p->device, MAX_ROWS, c->n_head * dim, &c->layout), "reserve");
	must(p->reference->ops->reserve(p->reference, MAX_ROWS, c->n_head * dim, &c->reference_layout), "reserve");
	for (int32_t i = 0; i < dim / 2; i++)
		c->freq[i] = (float)pow(10000, -2.0 * i / dim);
	c->rope = (struct rope_params){ROPE_HALVES, dim, c->freq, 1, {0, 0}};
	c->batch = (struct batch){.token = c->token, .position = c->position, .seq = c->seq};
	return c;
}

void cache_of_chunks(struct cache *c, enum rope_pairing pairing, int32_t n_dims, int32_t size, int32_t reach)
{
	c->rope.pairing = pairing;
	c->rope.n_dims = n_dims;
	c->rope.chunks = (struct rope_chunks){size, reach};
	c->params.chunked = &c->rope;
}

void cache_free(struct cache *c)
{
	c->p->device->ops->mem_free(c->p->device, c->device, c->bytes);
	c->p->reference->ops->mem_free(c->p->reference, c->reference, c->bytes);
	free(c->wide.slot);
	free(c->pages);
	free(c);
}

void begin_step(struct cache *c)
{
	c->batch.n_rows = c->batch.n_seqs = 0;
}

void add_rows(struct cache *c, int32_t seq, int32_t n)
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

void step_on(struct cache *c, struct backend *b, void *kv, float *q, float *k, const float *v, float *out, bool rope)
{
	const struct kv_layout *layout = b == c->p->device ? &c->layout : &c->reference_layout;
	int32_t n_head_kv = layout->n_head_kv, dim = layout->head_dim;
	must(b->ops->step_begin(b, &c->batch), "step_begin");
	if (rope)
		must(b->ops->rope(b, q, c->n_head, k, n_head_kv, dim, &c->rope), "rope");
	must(b->ops->kv_write(b, kv, layout, LAYER, k, v), "kv_write");
	must(b->ops->attention(b, kv, layout, LAYER, q, c->n_head, &c->params, out), "attention");
	must(b->ops->step_end(b), "step_end");
}

/* The reference goes on with what the device has. */
static void take_over(struct operand *o)
{
	float *got, *want;
	operand_results(o, &got, &want);
	must(o->p->reference->ops->mem_write(o->p->reference, o->reference, got, o->n * sizeof *got), "mem_write");
	free(got);
	free(want);
}

void step_on_both(struct cache *c, bool rope, const char *what)
{
	struct pair *p = c->p;
	const bool both_bf16 = c->layout.type == QUANT_BF16 && c->reference_layout.type == QUANT_BF16;
	const bool same_keys = rope && (c->layout.form != KV_FORM_F16 || both_bf16);
	size_t kv_size = (size_t)(c->batch.n_rows * c->layout.n_head_kv * c->layout.head_dim);
	size_t q_size = kv_size * (size_t)(c->n_head / c->layout.n_head_kv);
	struct operand q = operand_new(p, q_size, 1.5f), k = operand_new(p, kv_size, 1.5f),
		       v = operand_new(p, kv_size, 1);
	struct operand out = operand_new(p, q_size, 1);
	step_on(c, p->device, c->device, q.device, k.device, v.device, out.device, rope);
	if (same_keys) {
		take_over(&q);
		take_over(&k);
	}
	step_on(c, p->reference, c->reference, q.reference, k.reference, v.reference, out.reference,
	        rope && !same_keys);
	/*
	 * Keys and values are halves, or bfloat16s on one device, which have three bits less, as queries and
	 * probabilities have on a fast CPU; a last bit of RoPE's sines may round a key to the next one, and a device
	 * may round queries and probabilities to halves as well, and codes that it makes wide.
	 */
	const bool fewer_bits = c->layout.type != c->reference_layout.type || (both_bf16 && p->group_error > 0);
	row_results(&out,
	            fewer_bits                                              ? 5e-2
	            : p->element_error > 0 || c->layout.form != KV_FORM_F16 ? 4e-3
	                                                                    : 1e-3,
	            what);
	operand_free(&q);
	operand_free(&k);
	operand_free(&v);
	operand_free(&out);
}
