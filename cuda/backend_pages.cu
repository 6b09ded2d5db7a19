/*
 * What the backend does with whole pages and with memory as such: copies, narrow forms, norms, bounds, and the measure
 * of its speed.
 */
#include "cuda/operations.cuh"

#include <string.h>

namespace GPU_NS
{

/* Bytes at a time of from[i] to to[i], found by where(). */
template <typename Where>
static enum status copy_some(struct cuda_backend *b, void *kv, size_t bytes, int32_t n, const Where &where)
{
	struct page_list list;
	int some = 0;
	for (int32_t i = 0; i < n; i++) {
		some += where(i, &list.from[some], &list.to[some]);
		if (some == 0 || (some < PAGE_LIST_MAX && i + 1 < n))
			continue;
		TRY(latch(b, check(b, copy_pages(static_cast<uint8_t *>(kv), bytes, list, some, b->stream),
				   "copying pages")));
		some = 0;
	}
	return STATUS_OK;
}

enum status page_copy(struct backend *backend, void *kv, const struct kv_layout *l, const int32_t *from,
                      const int32_t *to, int32_t n)
{
	struct cuda_backend *b = self(backend);
	const struct kv_wide *w = l->wide;
	TRY(catch_up(b));
	TRY(copy_some(b, kv, l->page_bytes, n, [&](int32_t i, size_t *source, size_t *target) {
		*source = static_cast<size_t>(from[i]) * l->page_stride;
		*target = static_cast<size_t>(to[i]) * l->page_stride;
		return true;
	}));
	return copy_some(b, kv, w ? w->bytes : 0, w ? n : 0, [&](int32_t i, size_t *source, size_t *target) {
		if (w->slot[from[i]] < 0 || w->slot[to[i]] < 0)
			return false;
		*source = w->offset + static_cast<size_t>(w->slot[from[i]]) * w->stride;
		*target = w->offset + static_cast<size_t>(w->slot[to[i]]) * w->stride;
		return true;
	});
}

/* Bytes of a page in a narrow form, and room for it on the device, with four for what pack_page() says. */
static enum status packed_room(struct cuda_backend *b, const struct kv_layout *l, enum kv_form form, size_t *bytes)
{
	struct kv_layout narrow = *l;
	if (l->form != KV_FORM_F16 || l->type != b->kv_type || form == KV_FORM_F16)
		return STATUS_INVALID;
	kv_layout_narrow(&narrow, form);
	*bytes = narrow.page_bytes;
	return grow(b, &b->packed, *bytes + sizeof(uint32_t));
}

enum status page_pack(struct backend *backend, const void *kv, const struct kv_layout *l, int32_t page,
                      enum kv_form form, void *host, bool *packed)
{
	struct cuda_backend *b = self(backend);
	size_t bytes;
	uint32_t odd = 0;
	TRY(catch_up(b));
	TRY(packed_room(b, l, form, &bytes));
	uint8_t *on_device = static_cast<uint8_t *>(b->packed.p);
	uint32_t *flag = reinterpret_cast<uint32_t *>(on_device + bytes);
	TRY(check(b, cudaMemsetAsync(flag, 0, sizeof *flag, b->stream), "narrowing a page"));
	TRY(check(b,
		  pack_page(form, static_cast<const uint8_t *>(kv) + static_cast<size_t>(page) * l->page_stride,
			    l->type == QUANT_BF16, l->n_layer, l->n_head_kv, l->head_dim, on_device, flag, b->stream),
		  "narrowing a page"));
	TRY(check(b, cudaMemcpyAsync(&odd, flag, sizeof odd, cudaMemcpyDeviceToHost, b->stream),
	          "reading a narrow page"));
	TRY(check(b, cudaMemcpyAsync(host, on_device, bytes, cudaMemcpyDeviceToHost, b->stream),
	          "reading a narrow page"));
	TRY(check(b, cudaStreamSynchronize(b->stream), "reading a narrow page"));
	*packed = odd == 0;
	return STATUS_OK;
}

enum status page_unpack(struct backend *backend, void *kv, const struct kv_layout *l, int32_t page, enum kv_form form,
			const void *host)
{
	struct cuda_backend *b = self(backend);
	size_t bytes;
	TRY(catch_up(b));
	TRY(packed_room(b, l, form, &bytes));
	TRY(check(b, cudaMemcpyAsync(b->packed.p, host, bytes, cudaMemcpyHostToDevice, b->stream),
	          "writing a narrow page"));
	TRY(check(b,
		  unpack_page(form, static_cast<const uint8_t *>(b->packed.p), l->n_layer, l->n_head_kv, l->head_dim,
			      static_cast<uint8_t *>(kv) + static_cast<size_t>(page) * l->page_stride,
			      l->type == QUANT_BF16, b->stream),
		  "widening a page"));
	return check(b, cudaStreamSynchronize(b->stream), "writing a narrow page");
}

enum status page_bounds(struct backend *backend, const void *kv, const struct kv_layout *l, const int32_t *pages,
			int32_t n)
{
	struct cuda_backend *b = self(backend);
	struct page_numbers list, slots;
	const int most = sizeof list.page / sizeof *list.page;
	struct bound_args a = {};
	if (l->type != b->kv_type || !l->bounds)
		return STATUS_INVALID;
	TRY(catch_up(b));
	a.kv = static_cast<const uint8_t *>(kv);
	a.place = kv_place(l, 0);
	a.layer_bytes = l->page_bytes / static_cast<size_t>(l->n_layer);
	a.wide_layer_bytes = l->wide ? l->wide->bytes / static_cast<size_t>(l->n_layer) : 0;
	a.n_layer = l->n_layer;
	a.n_head_kv = l->n_head_kv;
	a.head_dim = l->head_dim;
	a.bounds = static_cast<uint16_t *>(l->bounds->slab);
	a.n_pages = l->bounds->n_pages;
	for (int32_t at = 0; at < n; at += most) {
		const int some = n - at < most ? n - at : most;
		for (int i = 0; i < some; i++) {
			list.page[i] = pages[at + i];
			slots.page[i] = l->wide ? l->wide->slot[pages[at + i]] : -1;
		}
		TRY(latch(b, check(b, bound_pages(a, list, slots, some, b->stream), "bounding keys")));
	}
	return STATUS_OK;
}

enum status bounds_read(struct backend *backend, const struct kv_layout *l, int32_t page, uint16_t *host)
{
	struct cuda_backend *b = self(backend);
	const size_t of_head = 2 * static_cast<size_t>(l->head_dim) * sizeof *host;
	if (l->type != b->kv_type || !l->bounds)
		return STATUS_INVALID;
	TRY(catch_up(b));
	TRY(check(b,
		  cudaMemcpy2DAsync(host, of_head,
				    static_cast<const uint8_t *>(l->bounds->slab) + kv_bounds_offset(l, 0, 0, page),
				    of_head * static_cast<size_t>(l->bounds->n_pages), of_head,
				    static_cast<size_t>(l->n_layer) * static_cast<size_t>(l->n_head_kv),
				    cudaMemcpyDeviceToHost, b->stream),
		  "reading bounds of a page"));
	return check(b, cudaStreamSynchronize(b->stream), "reading bounds of a page");
}

enum status page_norms(struct backend *backend, const void *kv, const struct kv_layout *l, const int32_t *pages,
		       int32_t n, double *sums)
{
	struct cuda_backend *b = self(backend);
	struct page_numbers list;
	const int most = sizeof list.page / sizeof *list.page;
	const size_t n_layer = static_cast<size_t>(l->n_layer);
	if (l->form != KV_FORM_F16 || l->type != b->kv_type)
		return STATUS_INVALID;
	TRY(catch_up(b));
	TRY(grow(b, &b->packed, static_cast<size_t>(n) * n_layer * 2 * sizeof *sums));
	double *on_device = static_cast<double *>(b->packed.p);
	for (int32_t at = 0; at < n; at += most) {
		const int some = n - at < most ? n - at : most;
		memcpy(list.page, pages + at, static_cast<size_t>(some) * sizeof *pages);
		TRY(check(b,
			  square_sums(static_cast<const uint8_t *>(kv), l->type == QUANT_BF16, list, some, l->n_layer,
				      l->page_stride, l->page_bytes / n_layer,
				      on_device + static_cast<size_t>(at) * n_layer * 2, b->stream),
			  "adding up norms"));
	}
	TRY(check(b,
		  cudaMemcpyAsync(sums, on_device, static_cast<size_t>(n) * n_layer * 2 * sizeof *sums,
				  cudaMemcpyDeviceToHost, b->stream),
		  "reading norms"));
	return check(b, cudaStreamSynchronize(b->stream), "reading norms");
}

enum status scan(struct backend *backend, const void *p, size_t bytes, uint64_t *sum)
{
	struct cuda_backend *b = self(backend);
	unsigned long long total = 0;
	TRY(catch_up(b));
	TRY(grow(b, &b->packed, sizeof total));
	unsigned long long *on_device = static_cast<unsigned long long *>(b->packed.p);
	TRY(check(b, cudaMemsetAsync(on_device, 0, sizeof total, b->stream), "reading memory"));
	TRY(check(b, scan(static_cast<const uint8_t *>(p), bytes, on_device, b->stream), "reading memory"));
	TRY(check(b, cudaMemcpyAsync(&total, on_device, sizeof total, cudaMemcpyDeviceToHost, b->stream),
	          "reading memory"));
	TRY(check(b, cudaStreamSynchronize(b->stream), "reading memory"));
	*sum = total;
	return STATUS_OK;
}

} // namespace GPU_NS
