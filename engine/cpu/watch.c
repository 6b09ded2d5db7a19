#include "engine/cpu/watch.h"

#include <string.h>

#include "engine/cpu/narrow.h"

enum { INFINITE = 0x7F800000 /* the bits of a float that is */ };

static int32_t page_of(const struct batch_seq *seq, int32_t i)
{
	return seq->block_table[(seq->first_position + i) / KV_PAGE_TOKENS];
}

/* Row i of a sequence. */
static void look_at_row(const struct kv_look *c, const struct batch_seq *seq, int32_t i)
{
	const struct kv_layout *l = c->layout;
	const int64_t width = (int64_t)l->n_head_kv * l->head_dim, at = (seq->first_row + i) * width;
	const float *const rows[] = {c->k + at, c->v + at}, most = KV_HALF_MAX;
	const uint8_t wider = l->form == KV_FORM_F16 ? 0 : KV_MARK_WIDER;
	int32_t limit;
	memcpy(&limit, &most, sizeof limit);
	for (int what = 0; what < 2; what++) {
		if (c->peak(rows[what], width) <= limit)
			continue;
		/* Which of its vectors, and why: rare, so that it may take its time. */
		for (int32_t h = 0; h < l->n_head_kv; h++) {
			int32_t peak = c->peak(rows[what] + (int64_t)h * l->head_dim, l->head_dim);
			if (peak <= limit)
				continue;
			kv_watch_mark(l->watch, page_of(seq, i), peak >= INFINITE ? KV_MARK_UNSOUND | wider : wider);
			if (peak < INFINITE && l->type == QUANT_F16)
				__atomic_fetch_add(&l->watch->n_clamped, 1, __ATOMIC_RELAXED);
		}
	}
}

static void look_at_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct kv_look *c = arg;
	(void)thread;
	for (int32_t s = 0; s < c->batch->n_seqs; s++) {
		const struct batch_seq *seq = &c->batch->seq[s];
		int64_t from = begin - seq->first_row, to = end - seq->first_row;
		for (int64_t i = from > 0 ? from : 0; i < to && i < seq->n_rows; i++)
			look_at_row(c, seq, (int32_t)i);
	}
}

static void fall_back(const struct kv_look *c, int32_t page)
{
	const struct kv_layout *l = c->layout;
	bool had = l->wide->slot[page] >= 0;
	if (l->wide->widen(l->wide->arg, page) < 0 || had)
		return;
	const char *narrow = c->kv + (size_t)page * l->page_stride;
	char *wide = narrow_wide_page(l, c->kv, page);
	for (int32_t layer = 0; layer < l->n_layer; layer++) {
		for (int32_t h = 0; h < l->n_head_kv; h++)
			c->widen(c->arg, l, layer, h,
			         (const struct narrow_block *)(const void *)(narrow + narrow_offset(l, layer, h)),
			         wide);
	}
}

void kv_look(const struct kv_look *c)
{
	const struct kv_layout *l = c->layout;
	if (!l->watch)
		return;
	threads_for(c->threads, c->batch->n_rows, KV_PAGE_TOKENS, look_at_rows, (void *)c);
	if (!l->wide || !l->wide->widen || l->head_dim > WATCH_MAX_DIM)
		return;
	for (int32_t s = 0; s < c->batch->n_seqs; s++) {
		const struct batch_seq *seq = &c->batch->seq[s];
		int32_t first = seq->first_position / KV_PAGE_TOKENS,
			last = (seq->first_position + seq->n_rows - 1) / KV_PAGE_TOKENS;
		for (int32_t i = first; i <= last; i++) {
			if ((l->watch->mark[seq->block_table[i]] & (KV_MARK_WIDER | KV_MARK_ASKED)) == KV_MARK_WIDER)
				fall_back(c, seq->block_table[i]);
		}
	}
}
