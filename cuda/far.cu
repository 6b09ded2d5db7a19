/*
 * Conversations whose first pages are in host memory (struct kv_far of backend.h). Attention runs over them part by
 * part, each of whole splits, so that a row has the bits it would have if they were on the device: decode rows and
 * short chunks leave every split's results where the last part merges them, and chunks go on with the sums that the
 * part before has left.
 *
 * A part comes through one of a few stages by a stream of its own, which runs as far ahead as there are free stages:
 * the host queues a whole step without waiting, so the first pages of the next layer are on their way while this one is
 * computed.
 */
#include "cuda/operations.cuh"

#include <stdlib.h>

namespace GPU_NS
{

enum status host_alloc(struct backend *backend, size_t bytes, void **out)
{
	struct cuda_backend *b = self(backend);
	return b->lost ? STATUS_DEVICE : check(b, cudaMallocHost(out, bytes), "allocating pinned memory");
}

void host_free(struct backend *backend, void *p, size_t bytes)
{
	(void)backend;
	(void)bytes;
	cudaFreeHost(p);
}

enum status page_layers(struct backend *backend, const void *kv, const struct kv_layout *l, const int32_t *pages,
			int32_t n, void *host, size_t layer_stride)
{
	struct cuda_backend *b = self(backend);
	const size_t n_layer = static_cast<size_t>(l->n_layer), piece = l->page_bytes / n_layer;
	if (l->form != KV_FORM_F16)
		return STATUS_INVALID;
	TRY(catch_up(b));
	for (int32_t i = 0; i < n; i++)
		TRY(check(b,
			  cudaMemcpy2DAsync(static_cast<uint8_t *>(host) + static_cast<size_t>(i) * piece, layer_stride,
					    static_cast<const uint8_t *>(kv) +
						    static_cast<size_t>(pages[i]) * l->page_stride,
					    piece, piece, n_layer, cudaMemcpyDeviceToHost, b->stream),
			  "reading pages"));
	return check(b, cudaStreamSynchronize(b->stream), "reading pages");
}

/* ---- Stages ---- */

enum { FAR_SPLIT_PAGES = SPLIT_TOKENS / KV_PAGE_TOKENS };
static_assert(KV_PART_PAGES % FAR_SPLIT_PAGES == 0 && FAR_STAGE_PAGES % FAR_SPLIT_PAGES == 0,
	      "parts are of whole splits");

enum status far_settle(struct cuda_backend *b)
{
	return b->far.stream ? check(b, cudaStreamSynchronize(b->far.stream), "reading pages beyond the pool")
			     : STATUS_OK;
}

/* Before the first part of all. */
static enum status open_stages(struct cuda_backend *b, size_t bytes)
{
	struct far_stages *f = &b->far;
	if (!f->stream)
		TRY(check(b, cudaStreamCreateWithFlags(&f->stream, cudaStreamNonBlocking), "making a stream"));
	for (int i = 0; i < FAR_STAGES; i++) {
		if (!f->copied[i])
			TRY(check(b, cudaEventCreateWithFlags(&f->copied[i], cudaEventDisableTiming),
				  "making an event"));
		if (!f->used[i])
			TRY(check(b, cudaEventCreateWithFlags(&f->used[i], cudaEventDisableTiming), "making an event"));
	}
	return grow(b, &f->memory, bytes * FAR_STAGES);
}

void far_close(struct cuda_backend *b)
{
	struct far_stages *f = &b->far;
	if (f->stream)
		cudaStreamSynchronize(f->stream);
	for (int i = 0; i < FAR_STAGES; i++) {
		if (f->copied[i])
			cudaEventDestroy(f->copied[i]);
		if (f->used[i])
			cudaEventDestroy(f->used[i]);
	}
	if (f->stream)
		cudaStreamDestroy(f->stream);
	cudaFree(f->memory.p);
	free(f->plans);
	*f = {};
}

/*
 * Sends n pages of one layer to a stage once what was there has been read; pages that follow each other in memory go
 * together.
 */
static enum status fill_stage(struct cuda_backend *b, int stage, uint8_t *to, const uint8_t *kv, size_t page_bytes,
			      const int32_t *pages, int n)
{
	struct far_stages *f = &b->far;
	if (f->was_used[stage])
		TRY(check(b, cudaStreamWaitEvent(f->stream, f->used[stage], 0), "waiting for a stage"));
	for (int i = 0; i < n;) {
		int some = 1;
		while (i + some < n && pages[i + some] == pages[i] + some)
			some++;
		TRY(check(b,
			  cudaMemcpyAsync(to + static_cast<size_t>(i) * page_bytes,
					  kv + static_cast<size_t>(pages[i]) * page_bytes,
					  static_cast<size_t>(some) * page_bytes, cudaMemcpyHostToDevice, f->stream),
			  "reading pages beyond the pool"));
		i += some;
	}
	TRY(check(b, cudaEventRecord(f->copied[stage], f->stream), "reading pages beyond the pool"));
	return check(b, cudaStreamWaitEvent(b->stream, f->copied[stage], 0), "waiting for pages beyond the pool");
}

/* ---- Parts ---- */

/* Pages [first, end) of the sequence, whose table a.part_table is from `first` on. */
static enum status run_part(struct cuda_backend *b, const struct far_plan *plan, struct attention_args a, int first,
			    int end, bool begins, bool ends)
{
	const int from = first / FAR_SPLIT_PAGES,
		  to = ends ? plan->n_splits : (end + FAR_SPLIT_PAGES - 1) / FAR_SPLIT_PAGES;
	a.in_parts = true;
	a.part_first = first;
	a.part_end = end;
	a.goes_on = !begins;
	a.is_last = ends;
	if (plan->is_whole) {
		a.whole = uploaded<struct attention_item>(b, plan->items);
		a.n_whole = plan->n_items;
	} else {
		a.parts = uploaded<struct attention_item>(b, plan->items) + static_cast<size_t>(from) * plan->n_items;
		a.n_parts = (to - from) * plan->n_items;
		a.merges = uploaded<struct merge_item>(b, plan->merges);
		a.n_merges = ends ? plan->n_merges : 0;
	}
	return latch(b, check(b, attention(a, b->stream), "attention"));
}

static const struct far_plan *plan_of(const struct cuda_backend *b, int32_t seq)
{
	for (int i = 0; i < b->far.n_plans; i++)
		if (b->far.plans[i].seq == seq)
			return &b->far.plans[i];
	return NULL;
}

enum status attention_part(struct backend *backend, const void *kv, const struct kv_layout *l, int32_t layer,
			   const float *q, int32_t n_head, const struct attention_params *params,
			   const struct attention_part *part, float *out)
{
	struct cuda_backend *b = self(backend);
	struct far_stages *f = &b->far;
	const size_t page_bytes = l->page_bytes / static_cast<size_t>(l->n_layer);
	if (part->first_page % KV_PART_PAGES != 0 || l->form != KV_FORM_F16)
		return latch(b, STATUS_INVALID);
	TRY(catch_up(b));
	if (part->first)
		TRY(turn_for_chunks(b, q, n_head, l->head_dim, params));
	struct attention_args a;
	TRY(attention_args_for(b, &a, kv, l, layer, q, n_head, params, out));
	const struct far_plan *plan = plan_of(b, part->seq);
	if (!plan)
		return latch(b, STATUS_INVALID);
	if (part->last)
		return run_part(b, plan, a, part->first_page, INT32_MAX, part->first, true);
	TRY(latch(b, open_stages(b, page_bytes * FAR_STAGE_PAGES)));
	a.part_table = uploaded<int32_t>(b, f->in_order);
	for (int at = 0, n; at < part->n_pages; at += n) {
		const int stage = f->next, page = part->first_page + at;
		uint8_t *memory =
			static_cast<uint8_t *>(f->memory.p) + static_cast<size_t>(stage) * FAR_STAGE_PAGES * page_bytes;
		n = FAR_STAGE_PAGES - page % FAR_STAGE_PAGES;
		n = n < part->n_pages - at ? n : part->n_pages - at;
		TRY(latch(b, fill_stage(b, stage, memory, static_cast<const uint8_t *>(kv), page_bytes,
					part->block_table + at, n)));
		a.kv = memory;
		a.place.page_stride = page_bytes;
		a.place.layer_offset = 0;
		TRY(run_part(b, plan, a, page, page + n, part->first && at == 0, false));
		TRY(latch(b, check(b, cudaEventRecord(f->used[stage], b->stream),
				   "computing with pages beyond the pool")));
		f->was_used[stage] = true;
		f->next = (stage + 1) % FAR_STAGES;
	}
	return STATUS_OK;
}

} // namespace GPU_NS
