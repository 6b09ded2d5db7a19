/*
 * A page as it leaves the device and comes back: its bytes and, in a narrow pool, behind them those of its wide copy
 * when it has one (kv_wide of backend.h). Both are kept, for a page that loses its copy some day must be what it would
 * have been without the journey.
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

/*
 * An image without a wide copy can come in parts, each of some layers, so that what reads the first layers need not
 * wait for the last. One with a copy is whole: there are few of them.
 */
enum { KV_IMAGE_PARTS = 4 };

struct kv_image_part {
	int32_t first_layer, n_layers;
	size_t begin, end; /* bytes of the image */
};

/* How many parts an image has: KV_IMAGE_PARTS, or 1 for each layer where there are fewer; 1 with a wide copy. */
int32_t kv_image_n_parts(const struct kv_layout *l, bool wide);
/* Part i of n. */
struct kv_image_part kv_image_part(const struct kv_layout *l, int32_t n, int32_t i);
/* Which of n parts has a layer. */
int32_t kv_image_part_of(const struct kv_layout *l, int32_t n, int32_t layer);

/* Whether a page has a wide copy now. */
bool kv_image_is_wide(const struct kv_layout *l, int32_t page);
/* Bytes of an image, with or without a wide copy; without one in a pool that has none. */
size_t kv_image_bytes(const struct kv_layout *l, bool wide);
/* The page, and if wide its copy, which it must have. */
enum status kv_image_read(const struct kv_tier_device *d, int32_t page, bool wide, void *host);
/* Likewise; the page is given a copy if wide. Where there is no room for it, which is counted, it goes without. */
enum status kv_image_write(const struct kv_tier_device *d, int32_t page, bool wide, const void *host);
/* Bytes [at, at + bytes) of a page, which belong to its image without a copy. */
enum status kv_image_write_bytes(const struct kv_tier_device *d, int32_t page, size_t at, size_t bytes,
                                 const void *host);
