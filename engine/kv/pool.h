/*
 * The page pool: one slab of device memory cut into pages, and a reference count for each. Mechanism only: which page
 * to give up is decided elsewhere.
 *
 * Every reference has a holder, who is named when it is taken and when it is given back (holder.h): a live sequence's
 * block table, a queued request, the prefix index, a copy under way. kv_pool_get() returns a page with one reference;
 * the last kv_pool_unref() frees it. A count that would go below zero, in all or for the kind of the holder, aborts
 * with the page's recent history: it is a bug, and going on would serve one conversation's memory to another. Builds
 * with a ledger (-Dkv_ledger) check the very holder, and know who holds a page.
 *
 * One thread, the device's worker, uses a pool.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/kv/holder.h"

struct kv_pool;

enum { KV_NO_PAGE = -1 };

/* A pool of n_pages on b. NOMEM when the device cannot hold them. */
enum status kv_pool_create(struct backend *b, const struct kv_layout *layout, int32_t n_pages, struct kv_pool **out,
                           struct error *err);
/*
 * The same for a narrow layout (kv_layout_narrow()), with room for wide copies of n_wide pages beside it. What a copy
 * is for, its caller says: kv_pool_widen(). kv_pool_layout() then tells backends of the copies.
 */
enum status kv_pool_create_narrow(struct backend *b, const struct kv_layout *layout, int32_t n_pages, int32_t n_wide,
                                  struct kv_pool **out, struct error *err);
/* What a pool of so many pages and copies takes. */
size_t kv_pool_bytes(const struct kv_layout *layout, int32_t n_pages, int32_t n_wide);
/*
 * Closes the pool. While any reference is held it returns BUSY, logs who holds what (kv_pool_report()) and leaves the
 * pool as it is. NULL is allowed.
 */
enum status kv_pool_destroy(struct kv_pool *p);

/* The function that changes a reference is told along with it, for whoever has to find out how it came about. */
#define kv_pool_get(pool, holder) kv_pool_get_at(pool, holder, __func__)
#define kv_pool_ref(pool, page, holder) kv_pool_ref_at(pool, page, holder, __func__)
#define kv_pool_unref(pool, page, holder) kv_pool_unref_at(pool, page, holder, __func__)
#define kv_pool_pass(pool, page, from, to) kv_pool_pass_at(pool, page, from, to, __func__)

/* A free page with one reference, or KV_NO_PAGE. Its content is undefined. */
int32_t kv_pool_get_at(struct kv_pool *p, struct kv_holder holder, const char *where);
void kv_pool_ref_at(struct kv_pool *p, int32_t page, struct kv_holder holder, const char *where);
void kv_pool_unref_at(struct kv_pool *p, int32_t page, struct kv_holder holder, const char *where);
/* A reference changes hands. */
void kv_pool_pass_at(struct kv_pool *p, int32_t page, struct kv_holder from, struct kv_holder to, const char *where);
int32_t kv_pool_refs(const struct kv_pool *p, int32_t page);
/* Whether one of them is an index's: see kv_pool_mark(). */
bool kv_pool_is_indexed(const struct kv_pool *p, int32_t page);

/*
 * Marks a page as known to an index, which holds one of its references. The watcher then hears of each change to and
 * from a single reference: with idle = true the index is the only holder left. It is not called by kv_pool_mark()
 * itself.
 */
void kv_pool_watch(struct kv_pool *p, void (*watcher)(void *arg, int32_t page, bool idle), void *arg);
void kv_pool_mark(struct kv_pool *p, int32_t page, bool indexed);

int32_t kv_pool_n_pages(const struct kv_pool *p);
int32_t kv_pool_n_free(const struct kv_pool *p);
/* The slab, for model_forward(). */
void *kv_pool_slab(const struct kv_pool *p);
const struct kv_layout *kv_pool_layout(const struct kv_pool *p);

/* Copies `from` into a fresh page and returns it with one reference, or KV_NO_PAGE when none is free: copy on write. */
int32_t kv_pool_clone(struct kv_pool *p, int32_t from, struct kv_holder holder);

/*
 * Gives a page whose content is undefined a wide copy, which it has until kv_pool_narrow(), or until it is free.
 * Without room, which is counted, it has none; nothing happens in a pool that is not narrow. A page with values that
 * have no narrow form keeps its copy.
 */
void kv_pool_widen(struct kv_pool *p, int32_t page);
void kv_pool_narrow(struct kv_pool *p, int32_t page);

/*
 * Makes room for the bounds of all pages (struct kv_bounds), kv_bounds_bytes() for each, for as long as the pool lives;
 * kv_pool_layout() then tells backends of it. To be called before a page is taken. UNSUPPORTED when the backend has
 * none.
 */
enum status kv_pool_add_bounds(struct kv_pool *p);
/*
 * Sees to it that n pages, which are full and computed, have their bounds; they keep them until they are free, or
 * written to. What the backend reports, or STATUS_OK.
 */
enum status kv_pool_bound(struct kv_pool *p, const int32_t *pages, int32_t n);
/*
 * Copies the bounds that a page has to host memory: [n_layer][n_head_kv][least, greatest][head_dim]. What the backend
 * reports, or STATUS_OK.
 */
enum status kv_pool_read_bounds(struct kv_pool *p, int32_t page, uint16_t *to);
/* A page is about to be written to that was held before. */
void kv_pool_unbound(struct kv_pool *p, int32_t page);

/*
 * Whether all values in a page are numbers, as far as the backend looks (struct kv_watch). A page that is not sound
 * shows what went wrong in one sequence, and is nobody else's.
 */
bool kv_pool_is_sound(const struct kv_pool *p, int32_t page);

/* Whether a narrow page has a wide copy because of a value without a narrow form. */
bool kv_pool_fell_back(const struct kv_pool *p, int32_t page);

struct kv_wide_counts {
	int32_t n_slots, n_used;
	uint64_t refused;      /* pages that found no room for a copy */
	uint64_t fallback;     /* pages that have, or had, a copy because of a value without a narrow form */
	uint64_t n_not_finite; /* see struct kv_wide */
	/* Of all pools: */
	uint64_t n_unsound, n_clamped; /* see struct kv_watch */
	uint64_t n_bounded; /* pages whose bounds were computed */
};
void kv_pool_wide_counts(const struct kv_pool *p, struct kv_wide_counts *out);

/* ---- Who holds what ---- */

/* Kept up to date with every change, so asking costs nothing. */
struct kv_pool_counts {
	int32_t n_pages, n_free;
	int32_t n_shared;               /* pages with more than one reference */
	int32_t pages[KV_HOLDER_KINDS]; /* pages that somebody of that kind holds; one may count under several kinds */
	int64_t refs[KV_HOLDER_KINDS];  /* their references */
};
void kv_pool_counts(const struct kv_pool *p, struct kv_pool_counts *out);
/* How many references of one kind a page has. */
int32_t kv_pool_refs_of(const struct kv_pool *p, int32_t page, enum kv_holder_kind kind);

/* Whether this build has a ledger, which lists holders one by one (and has not run out of memory). */
bool kv_pool_has_ledger(const struct kv_pool *p);
/* Who holds a page, newest first: at most max of them go to out. Returns how many there are; 0 without a ledger. */
size_t kv_pool_holders(const struct kv_pool *p, int32_t page, struct kv_holder *out, size_t max);
/*
 * Appends lines for people: references by kind and, with a ledger, which holder has which pages since which function.
 */
void kv_pool_report(const struct kv_pool *p, struct buf *out);
