#include "engine/kv/image.h"

bool kv_image_is_wide(const struct kv_layout *l, int32_t page)
{
	return l->wide && l->wide->slot[page] >= 0;
}

size_t kv_image_bytes(const struct kv_layout *l, bool wide)
{
	return l->page_bytes + (wide && l->wide ? l->wide->bytes : 0);
}

int32_t kv_image_n_parts(const struct kv_layout *l, bool wide)
{
	if (wide && l->wide)
		return 1;
	return l->n_layer < KV_IMAGE_PARTS ? l->n_layer : KV_IMAGE_PARTS;
}

static int32_t first_layer(const struct kv_layout *l, int32_t n, int32_t i)
{
	return (int32_t)((int64_t)l->n_layer * i / n);
}

struct kv_image_part kv_image_part(const struct kv_layout *l, int32_t n, int32_t i)
{
	int32_t first = first_layer(l, n, i), end = first_layer(l, n, i + 1);
	size_t layer_bytes = l->page_bytes / (size_t)l->n_layer;
	if (n == 1)
		return (struct kv_image_part){0, l->n_layer, 0, l->page_bytes};
	return (struct kv_image_part){first, end - first, (size_t)first * layer_bytes, (size_t)end * layer_bytes};
}

int32_t kv_image_part_of(const struct kv_layout *l, int32_t n, int32_t layer)
{
	int32_t i = 0;
	while (i + 1 < n && first_layer(l, n, i + 1) <= layer)
		i++;
	return i;
}

static char *page_at(const struct kv_tier_device *d, int32_t page)
{
	return (char *)d->slab + (size_t)page * d->layout.page_stride;
}

static char *copy_at(const struct kv_tier_device *d, int32_t page)
{
	const struct kv_wide *w = d->layout.wide;
	return (char *)d->slab + w->offset + (size_t)w->slot[page] * w->stride;
}

enum status kv_image_read(const struct kv_tier_device *d, int32_t page, bool wide, void *host)
{
	const struct backend_ops *ops = d->backend->ops;
	size_t n = d->layout.page_bytes;
	enum status st = ops->mem_read(d->backend, host, page_at(d, page), n);
	if (st != STATUS_OK || !wide)
		return st;
	if (!kv_image_is_wide(&d->layout, page))
		return STATUS_INVALID;
	return ops->mem_read(d->backend, (char *)host + n, copy_at(d, page), d->layout.wide->bytes);
}

enum status kv_image_write(const struct kv_tier_device *d, int32_t page, bool wide, const void *host)
{
	const struct backend_ops *ops = d->backend->ops;
	const struct kv_wide *w = d->layout.wide;
	size_t n = d->layout.page_bytes;
	enum status st = ops->mem_write(d->backend, page_at(d, page), host, n);
	if (st != STATUS_OK || !wide || !w || !w->widen || w->widen(w->arg, page) < 0)
		return st;
	return ops->mem_write(d->backend, copy_at(d, page), (const char *)host + n, w->bytes);
}

enum status kv_image_write_bytes(const struct kv_tier_device *d, int32_t page, size_t at, size_t bytes,
                                 const void *host)
{
	return d->backend->ops->mem_write(d->backend, page_at(d, page) + at, host, bytes);
}
