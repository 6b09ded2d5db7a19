#include "engine/kv/pool.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* The last reference changes of all pages, kept for the message of a broken invariant. */
enum { HISTORY = 64 };

struct change {
	int32_t page;
	int32_t refs_after;
	char what; /* 'g'et, 'r'ef, 'u'nref */
};

struct kv_pool {
	struct backend *backend;
	struct kv_layout layout;
	void *slab;
	size_t slab_bytes;
	int32_t n_pages;
	int32_t *refs;       /* [n_pages] */
	bool *indexed;       /* [n_pages] */
	void (*watcher)(void *arg, int32_t page, bool idle);
	void *watcher_arg;
	int32_t *free_pages; /* [n_free] a stack: the page freed last is warm and goes out first */
	int32_t n_free;
	struct change history[HISTORY];
	uint64_t n_changes;
};

enum status kv_pool_create(struct backend *b, const struct kv_layout *layout, int32_t n_pages, struct kv_pool **out,
                           struct error *err)
{
	struct kv_pool *p;
	if (n_pages < 1 || (size_t)n_pages > SIZE_MAX / layout->page_stride)
		return error_set(err, STATUS_INVALID, "the KV pool cannot have %" PRId32 " pages", n_pages);
	p = calloc(1, sizeof *p);
	if (!p)
		goto fail;
	p->backend = b;
	p->layout = *layout;
	p->n_pages = n_pages;
	p->slab_bytes = (size_t)n_pages * layout->page_stride;
	p->refs = calloc((size_t)n_pages, sizeof *p->refs);
	p->free_pages = calloc((size_t)n_pages, sizeof *p->free_pages);
	p->indexed = calloc((size_t)n_pages, sizeof *p->indexed);
	if (!p->refs || !p->free_pages || !p->indexed)
		goto fail_arrays;
	if (b->ops->mem_alloc(b, p->slab_bytes, &p->slab) != STATUS_OK)
		goto fail_arrays;
	for (int32_t i = 0; i < n_pages; i++)
		p->free_pages[i] = n_pages - 1 - i;
	p->n_free = n_pages;
	*out = p;
	return STATUS_OK;

fail_arrays:
	free(p->indexed);
	free(p->free_pages);
	free(p->refs);
	free(p);
fail:
	return error_set(err, STATUS_NOMEM, "no memory for a KV pool of %" PRId32 " pages (%zu bytes)", n_pages,
	                 (size_t)n_pages * layout->page_stride);
}

enum status kv_pool_destroy(struct kv_pool *p)
{
	if (!p)
		return STATUS_OK;
	if (p->n_free != p->n_pages)
		return STATUS_BUSY;
	p->backend->ops->mem_free(p->backend, p->slab, p->slab_bytes);
	free(p->indexed);
	free(p->free_pages);
	free(p->refs);
	free(p);
	return STATUS_OK;
}

static void record(struct kv_pool *p, int32_t page, char what)
{
	p->history[p->n_changes++ % HISTORY] = (struct change){page, p->refs[page], what};
}

/* Going on with a wrong count would show one conversation's memory to another: stop, with what led here. */
__attribute__((noreturn)) static void broken(const struct kv_pool *p, int32_t page, const char *what)
{
	fprintf(stderr, "kv pool: %s page %" PRId32 " of %" PRId32 "; its last changes (op, count after):", what, page,
	        p->n_pages);
	uint64_t first = p->n_changes > HISTORY ? p->n_changes - HISTORY : 0;
	for (uint64_t i = first; i < p->n_changes; i++) {
		const struct change *c = &p->history[i % HISTORY];
		if (c->page == page)
			fprintf(stderr, " %c%" PRId32, c->what, c->refs_after);
	}
	fputc('\n', stderr);
	abort();
}

static void check_held(const struct kv_pool *p, int32_t page, const char *what)
{
	if (page < 0 || page >= p->n_pages || p->refs[page] <= 0)
		broken(p, page, what);
}

int32_t kv_pool_get(struct kv_pool *p)
{
	if (p->n_free == 0)
		return KV_NO_PAGE;
	int32_t page = p->free_pages[--p->n_free];
	if (p->refs[page] != 0)
		broken(p, page, "free list holds used");
	p->refs[page] = 1;
	record(p, page, 'g');
	return page;
}

void kv_pool_ref(struct kv_pool *p, int32_t page)
{
	check_held(p, page, "ref of free");
	p->refs[page]++;
	record(p, page, 'r');
	if (p->refs[page] == 2 && p->indexed[page])
		p->watcher(p->watcher_arg, page, false);
}

void kv_pool_unref(struct kv_pool *p, int32_t page)
{
	check_held(p, page, "unref of free");
	p->refs[page]--;
	record(p, page, 'u');
	if (p->refs[page] == 1 && p->indexed[page])
		p->watcher(p->watcher_arg, page, true);
	if (p->refs[page] > 0)
		return;
	if (p->indexed[page])
		broken(p, page, "free of indexed");
	p->free_pages[p->n_free++] = page;
}

void kv_pool_watch(struct kv_pool *p, void (*watcher)(void *arg, int32_t page, bool idle), void *arg)
{
	p->watcher = watcher;
	p->watcher_arg = arg;
}

void kv_pool_mark(struct kv_pool *p, int32_t page, bool indexed)
{
	check_held(p, page, "mark of free");
	p->indexed[page] = indexed;
}

int32_t kv_pool_refs(const struct kv_pool *p, int32_t page)
{
	return p->refs[page];
}

bool kv_pool_is_indexed(const struct kv_pool *p, int32_t page)
{
	return p->indexed[page];
}

int32_t kv_pool_n_pages(const struct kv_pool *p)
{
	return p->n_pages;
}

int32_t kv_pool_n_free(const struct kv_pool *p)
{
	return p->n_free;
}

void *kv_pool_slab(const struct kv_pool *p)
{
	return p->slab;
}

const struct kv_layout *kv_pool_layout(const struct kv_pool *p)
{
	return &p->layout;
}

int32_t kv_pool_clone(struct kv_pool *p, int32_t from)
{
	check_held(p, from, "clone of free");
	int32_t to = kv_pool_get(p);
	if (to == KV_NO_PAGE)
		return KV_NO_PAGE;
	if (p->backend->ops->page_copy(p->backend, p->slab, &p->layout, &from, &to, 1) != STATUS_OK) {
		kv_pool_unref(p, to);
		return KV_NO_PAGE;
	}
	return to;
}
