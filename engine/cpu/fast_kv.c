/*
 * What the fast backends write into KV pages. Layout: [n_layer][n_head_kv]{ K, V }, head_dim * 16 elements each, in the
 * order that kernels_pages_plain.h or kernels_pages_bf16.h gives.
 */
#include "engine/cpu/fast.h"
#include "engine/cpu/narrow.h"

struct kv_call {
	const struct fast *f;
	char *kv;
	const struct kv_layout *layout;
	int32_t layer;
	const float *k, *v;
};

static void store_row(const struct kv_call *c, const struct batch_seq *seq, int32_t i)
{
	const struct kv_layout *l = c->layout;
	int32_t position = seq->first_position + i, row = seq->first_row + i;
	char *page = c->kv + (size_t)seq->block_table[position / KV_PAGE_TOKENS] * l->page_stride;
	char *wide =
		l->form == KV_FORM_F16 ? page : narrow_wide_page(l, c->kv, seq->block_table[position / KV_PAGE_TOKENS]);
	for (int32_t h = 0; h < l->n_head_kv; h++) {
		int64_t at = ((int64_t)row * l->n_head_kv + h) * l->head_dim;
		if (l->form != KV_FORM_F16) {
			struct narrow_block *block =
				(struct narrow_block *)(void *)(page + narrow_offset(l, c->layer, h));
			int32_t token = position % KV_PAGE_TOKENS;
			c->f->pages->narrow_store(l->form, c->k + at, c->v + at, l->head_dim, token, block);
			if (!wide) {
				narrow_count(l, block->k_scale[token], block->v_scale[token]);
				continue;
			}
		}
		uint16_t *k_page = (uint16_t *)(void *)(wide + fast_kv_offset(l, c->layer, h));
		c->f->pages->kv_store(c->k + at, c->v + at, l->head_dim, position % KV_PAGE_TOKENS, k_page,
				      k_page + (int64_t)l->head_dim * KV_PAGE_TOKENS);
	}
}

static void store_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct kv_call *c = arg;
	const struct batch *batch = c->f->base.batch;
	(void)thread;
	for (int32_t s = 0; s < batch->n_seqs; s++) {
		const struct batch_seq *seq = &batch->seq[s];
		int64_t from = begin - seq->first_row, to = end - seq->first_row;
		for (int64_t i = from > 0 ? from : 0; i < to && i < seq->n_rows; i++)
			store_row(c, seq, (int32_t)i);
	}
}

static void widen_block(void *arg, const struct kv_layout *l, int32_t layer, int32_t head_kv,
			const struct narrow_block *from, char *wide)
{
	const struct fast *f = arg;
	f->pages->narrow_widen(l->form, from, l->head_dim,
			       (uint16_t *)(void *)(wide + fast_kv_offset(l, layer, head_kv)));
}

enum status fast_kv_write(struct backend *b, void *kv, const struct kv_layout *layout, int32_t layer, const float *k,
			  const float *v)
{
	struct fast *f = (struct fast *)b;
	if (layout->type != f->pages->type)
		return STATUS_INVALID;
	const struct kv_look look = {f->base.threads,  f->base.batch, kv, layout, k, v,
				     f->kernels->peak, widen_block,   f};
	struct kv_call c = {f, kv, layout, layer, k, v};
	kv_look(&look);
	threads_for(f->base.threads, f->base.batch->n_rows, KV_PAGE_TOKENS, store_rows, &c);
	return STATUS_OK;
}
