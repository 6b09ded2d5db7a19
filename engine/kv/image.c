#include "engine/kv/image.h"

bool kv_image_is_wide(const struct kv_layout *l, int32_t page)
{
	return l->wide && l->wide->slot[page] >= 0;
}

size_t kv_image_bytes(const struct kv_layout *l, bool wide)
{
	return l->page_bytes + (wide && l->wide ? l->wide->bytes : 0);
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
