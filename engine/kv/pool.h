/*
 * The page pool: one slab of device memory cut into pages, and a reference count for each. Mechanism only: who holds
 * a page, and which page to give up, is decided elsewhere.
 *
 * Holders of a reference are a live sequence's block table, the prefix index and a pending copy. kv_pool_get() returns a page with one
 * reference; the last kv_pool_unref() frees it. A count that would go below zero aborts with the page's recent history: it
 * is a bug, and going on would serve one conversation's memory to another.
 *
 * One thread, the device's worker, uses a pool.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/base/status.h"

struct kv_pool;

enum { KV_NO_PAGE = -1 };

/* A pool of n_pages on b. NOMEM when the device cannot hold them. */
enum status kv_pool_create(struct backend *b, const struct kv_layout *layout, int32_t n_pages, struct kv_pool **out,
                           struct error *err);
/* Closes the pool. Returns BUSY and leaves it as it is while any reference is held. NULL is allowed. */
enum status kv_pool_destroy(struct kv_pool *p);

/* A free page with one reference, or KV_NO_PAGE. Its content is undefined. */
int32_t kv_pool_get(struct kv_pool *p);
void kv_pool_ref(struct kv_pool *p, int32_t page);
void kv_pool_unref(struct kv_pool *p, int32_t page);
int32_t kv_pool_refs(const struct kv_pool *p, int32_t page);
/* Whether one of them is an index's: see kv_pool_mark(). */
bool kv_pool_is_indexed(const struct kv_pool *p, int32_t page);

/*
 * Marks a page as known to an index, which holds one of its references. The watcher then hears of each change to and from a single
 * reference: with idle = true the index is the only holder left. It is not called by kv_pool_mark() itself.
 */
void kv_pool_watch(struct kv_pool *p, void (*watcher)(void *arg, int32_t page, bool idle), void *arg);
void kv_pool_mark(struct kv_pool *p, int32_t page, bool indexed);

int32_t kv_pool_n_pages(const struct kv_pool *p);
int32_t kv_pool_n_free(const struct kv_pool *p);
/* The slab, for model_forward(). */
void *kv_pool_slab(const struct kv_pool *p);
const struct kv_layout *kv_pool_layout(const struct kv_pool *p);

/* Copies `from` into a fresh page and returns it with one reference, or KV_NO_PAGE when none is free: copy on write. */
int32_t kv_pool_clone(struct kv_pool *p, int32_t from);
