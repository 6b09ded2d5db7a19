/*
 * A backend that has memory, page copies and bounds, and nothing else: what tests of the KV rooms need. Calling any
 * other operation crashes, by design.
 */
#pragma once

#include <stdlib.h>
#include <string.h>

#include "engine/backend.h"

struct memory_backend {
	struct backend base;
	int64_t allocated; /* bytes now */
	bool fail_alloc;
	int64_t fail_write; /* the write that many from now on; 0: none */
	uint64_t n_copied; /* pages */
	uint64_t n_bounded; /* pages: the bounds of each are its first bytes */
};

static inline enum status memory_alloc(struct backend *b, size_t bytes, void **out)
{
	struct memory_backend *m = (struct memory_backend *)b;
	*out = m->fail_alloc ? NULL : calloc(1, bytes);
	if (!*out)
		return STATUS_NOMEM;
	m->allocated += (int64_t)bytes;
	return STATUS_OK;
}

static inline void memory_free(struct backend *b, void *p, size_t bytes)
{
	free(p);
	((struct memory_backend *)b)->allocated -= (int64_t)bytes;
}

static inline enum status memory_read(struct backend *b, void *host, const void *src, size_t bytes)
{
	(void)b;
	memcpy(host, src, bytes);
	return STATUS_OK;
}

static inline enum status memory_write(struct backend *b, void *dst, const void *host, size_t bytes)
{
	struct memory_backend *m = (struct memory_backend *)b;
	if (m->fail_write > 0 && --m->fail_write == 0)
		return STATUS_INTERNAL;
	memcpy(dst, host, bytes);
	return STATUS_OK;
}

static inline enum status memory_page_copy(struct backend *b, void *kv, const struct kv_layout *layout,
                                           const int32_t *from, const int32_t *to, int32_t n)
{
	((struct memory_backend *)b)->n_copied += (uint64_t)n;
	for (int32_t i = 0; i < n; i++)
		memcpy((char *)kv + (size_t)to[i] * layout->page_stride,
		       (char *)kv + (size_t)from[i] * layout->page_stride, layout->page_bytes);
	return STATUS_OK;
}

static inline enum status memory_page_bounds(struct backend *b, const void *kv, const struct kv_layout *layout,
                                             const int32_t *pages, int32_t n)
{
	((struct memory_backend *)b)->n_bounded += (uint64_t)n;
	for (int32_t i = 0; i < n; i++)
		memcpy((char *)layout->bounds->slab + kv_bounds_offset(layout, 0, 0, pages[i]),
		       (const char *)kv + (size_t)pages[i] * layout->page_stride, kv_bounds_bytes(layout));
	return STATUS_OK;
}

static inline void memory_backend_init(struct memory_backend *m)
{
	static const struct backend_ops ops = {
	        .mem_alloc = memory_alloc,
	        .mem_free = memory_free,
	        .mem_read = memory_read,
	        .mem_write = memory_write,
	        .page_copy = memory_page_copy,
	        .page_bounds = memory_page_bounds,
	};
	memset(m, 0, sizeof *m);
	m->base.ops = &ops;
}

/* A page of 64 bytes, so that tests can look at whole pages. */
static inline struct kv_layout memory_layout(void)
{
	return (struct kv_layout){1, 1, 1, KV_PAGE_TOKENS, QUANT_F16, 64, 64};
}
