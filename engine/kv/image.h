/*
 * A page as it leaves the device and comes back: its bytes and, in a narrow pool, behind them those of its wide copy when it has one
 * (kv_wide of backend.h). Both are kept, for a page that loses its copy some day must be what it would have been without the journey.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "engine/backend.h"

/* A slab of pages. */
struct kv_tier_device {
	struct backend *backend;
	void *slab; /* the pool's */
	struct kv_layout layout;
};

/* Whether a page has a wide copy now. */
bool kv_image_is_wide(const struct kv_layout *l, int32_t page);
/* Bytes of an image, with or without a wide copy; without one in a pool that has none. */
size_t kv_image_bytes(const struct kv_layout *l, bool wide);
/* The page, and if wide its copy, which it must have. */
enum status kv_image_read(const struct kv_tier_device *d, int32_t page, bool wide, void *host);
/* Likewise; the page is given a copy if wide. Where there is no room for it, which is counted, it goes without. */
enum status kv_image_write(const struct kv_tier_device *d, int32_t page, bool wide, const void *host);
