#include "engine/kv/pool.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "engine/kv/ledger.h"

/* The last reference changes of all pages, kept for the message of a broken invariant. */
enum { HISTORY = 256 };

struct change {
	int32_t page;
	int32_t refs_after;
	char what; /* 'g'et, 'r'ef, 'u'nref, 'p'ass */
	struct kv_holder holder;
	const char *where;
};

/* References of a page by the kind of their holder. */
struct page {
	int32_t refs;
	int32_t refs_of[KV_HOLDER_KINDS];
	bool indexed;
};

struct kv_pool {
	struct backend *backend;
	struct kv_layout layout;
	void *slab;
	size_t slab_bytes;
	struct page *pages;  /* [counts.n_pages] */
	void (*watcher)(void *arg, int32_t page, bool idle);
	void *watcher_arg;
	int32_t *free_pages; /* [counts.n_free] a stack: the page freed last is warm and goes out first */
	struct kv_watch watch;   /* layout.watch points here */
	struct kv_wide wide;     /* layout.wide points here in a narrow pool */
	int32_t *free_slots;     /* [n_slots - n_used] */
	struct kv_wide_counts wide_counts;
	struct kv_bounds bounds; /* layout.bounds points here when there are any */
	size_t bounds_bytes;
	bool *bounded;           /* [n_pages] which have them; NULL: there are none */
	int32_t *unbounded;      /* [n_pages] for kv_pool_bound() */
	struct kv_pool_counts counts;
	struct kv_ledger ledger;
	struct change history[HISTORY];
	uint64_t n_changes;
};

const char *kv_holder_text(enum kv_holder_kind kind)
{
	static const char *const texts[] = {
#define X(name, text) text,
	        KV_HOLDER_MAP(X)
#undef X
	};
	return texts[kind];
}

/* The same pages in f16. */
static struct kv_layout wide_layout(const struct kv_layout *l)
{
	struct kv_layout wide = {0};
	kv_layout_init(&wide, l->n_layer, l->n_head_kv, l->head_dim, QUANT_F16);
	return wide;
}

size_t kv_pool_bytes(const struct kv_layout *layout, int32_t n_pages, int32_t n_wide)
{
	return (size_t)n_pages * layout->page_stride +
	       (n_wide > 0 ? (size_t)n_wide * wide_layout(layout).page_stride : 0);
}

/* See struct kv_wide. A page is counted as falling back when a mark was the reason. */
static int32_t widen(void *arg, int32_t page)
{
	struct kv_pool *p = arg;
	uint8_t *mark = &p->watch.mark[page];
	if (*mark & KV_MARK_ASKED)
		return p->wide.slot[page];
	kv_pool_widen(p, page);
	p->wide_counts.fallback += *mark && p->wide.slot[page] >= 0;
	*mark |= *mark ? KV_MARK_ASKED : 0;
	return p->wide.slot[page];
}

/* The arrays of wide copies; true when there are none. */
static bool make_wide(struct kv_pool *p, int32_t n_wide)
{
	if (p->layout.form == KV_FORM_F16)
		return true;
	struct kv_layout wide = wide_layout(&p->layout);
	p->wide = (struct kv_wide){
	        .slot = malloc((size_t)p->counts.n_pages * sizeof *p->wide.slot),
	        .offset = (size_t)p->counts.n_pages * p->layout.page_stride,
	        .stride = wide.page_stride,
	        .bytes = wide.page_bytes,
	        .widen = widen,
	        .arg = p,
	};
	p->free_slots = malloc((size_t)(n_wide + 1) * sizeof *p->free_slots);
	p->layout.wide = &p->wide;
	p->wide_counts.n_slots = n_wide;
	for (int32_t i = 0; p->wide.slot && i < p->counts.n_pages; i++)
		p->wide.slot[i] = -1;
	for (int32_t i = 0; p->free_slots && i < n_wide; i++)
		p->free_slots[i] = n_wide - 1 - i;
	return p->wide.slot && p->free_slots;
}

enum status kv_pool_create(struct backend *b, const struct kv_layout *layout, int32_t n_pages, struct kv_pool **out,
                           struct error *err)
{
	return kv_pool_create_narrow(b, layout, n_pages, 0, out, err);
}

enum status kv_pool_create_narrow(struct backend *b, const struct kv_layout *layout, int32_t n_pages, int32_t n_wide,
                                  struct kv_pool **out, struct error *err)
{
	struct kv_pool *p;
	if (n_pages < 1 || (size_t)n_pages > SIZE_MAX / 2 / layout->page_stride || n_wide < 0 ||
	    (n_wide > 0 && (size_t)n_wide > SIZE_MAX / 2 / wide_layout(layout).page_stride))
		return error_set(err, STATUS_INVALID, "the KV pool cannot have %" PRId32 " pages", n_pages);
	p = calloc(1, sizeof *p);
	if (!p)
		goto fail;
	p->backend = b;
	p->layout = *layout;
	p->counts.n_pages = n_pages;
	p->slab_bytes = kv_pool_bytes(layout, n_pages, n_wide);
	p->pages = calloc((size_t)n_pages, sizeof *p->pages);
	p->free_pages = calloc((size_t)n_pages, sizeof *p->free_pages);
	p->watch.mark = calloc((size_t)n_pages, sizeof *p->watch.mark);
	p->layout.watch = &p->watch;
	if (!p->pages || !p->free_pages || !p->watch.mark || !make_wide(p, n_wide))
		goto fail_arrays;
	if (kv_ledger_init(&p->ledger, n_pages) != STATUS_OK)
		goto fail_arrays;
	if (b->ops->mem_alloc(b, p->slab_bytes, &p->slab) != STATUS_OK)
		goto fail_ledger;
	for (int32_t i = 0; i < n_pages; i++)
		p->free_pages[i] = n_pages - 1 - i;
	p->counts.n_free = n_pages;
	*out = p;
	return STATUS_OK;

fail_ledger:
	kv_ledger_free(&p->ledger);
fail_arrays:
	free(p->watch.mark);
	free(p->wide.slot);
	free(p->free_slots);
	free(p->free_pages);
	free(p->pages);
	free(p);
fail:
	return error_set(err, STATUS_NOMEM, "no memory for a KV pool of %" PRId32 " pages (%zu bytes)", n_pages,
	                 kv_pool_bytes(layout, n_pages, n_wide));
}

/* One line of the log for each of the report. */
static void log_report(const struct kv_pool *p)
{
	struct buf report = BUF_INIT;
	kv_pool_report(p, &report);
	for (char *line = report.data, *end; line && (end = strchr(line, '\n')); line = end + 1) {
		*end = '\0';
		log_msg(LOG_ERROR, "kv_leak", "%s", line);
	}
	buf_free(&report);
}

enum status kv_pool_destroy(struct kv_pool *p)
{
	if (!p)
		return STATUS_OK;
	if (p->counts.n_free != p->counts.n_pages) {
		log_report(p);
		return STATUS_BUSY;
	}
	p->backend->ops->mem_free(p->backend, p->slab, p->slab_bytes);
	if (p->bounds.slab)
		p->backend->ops->mem_free(p->backend, p->bounds.slab, p->bounds_bytes);
	kv_ledger_free(&p->ledger);
	free(p->bounded);
	free(p->unbounded);
	free(p->watch.mark);
	free(p->wide.slot);
	free(p->free_slots);
	free(p->free_pages);
	free(p->pages);
	free(p);
	return STATUS_OK;
}

/* ---- Changes ---- */

static void drop_wide(struct kv_pool *p, int32_t page)
{
	struct kv_wide_counts *c = &p->wide_counts;
	if (!p->layout.wide || p->wide.slot[page] < 0)
		return;
	p->free_slots[c->n_slots - c->n_used--] = p->wide.slot[page];
	p->wide.slot[page] = -1;
}

/* Going on with a wrong count would show one conversation's memory to another: stop, with what led here. */
__attribute__((noreturn)) static void broken(const struct kv_pool *p, int32_t page, const char *what,
                                             struct kv_holder holder, const char *where)
{
	struct buf report = BUF_INIT;
	fprintf(stderr, "kv pool: %s page %" PRId32 " of %" PRId32 ", by %s %" PRIu64 " in %s; its last changes:\n",
	        what, page, p->counts.n_pages, kv_holder_text(holder.kind), holder.id, where);
	uint64_t first = p->n_changes > HISTORY ? p->n_changes - HISTORY : 0;
	for (uint64_t i = first; i < p->n_changes; i++) {
		const struct change *c = &p->history[i % HISTORY];
		if (c->page == page)
			fprintf(stderr, "  %c by %s %" PRIu64 " in %s: %" PRId32 " after\n", c->what,
			        kv_holder_text(c->holder.kind), c->holder.id, c->where, c->refs_after);
	}
	kv_pool_report(p, &report);
	fprintf(stderr, "%s", report.data ? report.data : "");
	abort();
}

static void check_held(const struct kv_pool *p, int32_t page, const char *what, struct kv_holder holder,
                       const char *where)
{
	if (page < 0 || page >= p->counts.n_pages || p->pages[page].refs <= 0)
		broken(p, page, what, holder, where);
}

static void record(struct kv_pool *p, int32_t page, char what, struct kv_holder holder, const char *where)
{
	p->history[p->n_changes++ % HISTORY] = (struct change){page, p->pages[page].refs, what, holder, where};
}

static void add(struct kv_pool *p, int32_t page, struct kv_holder holder, const char *where)
{
	p->counts.refs[holder.kind]++;
	if (p->pages[page].refs_of[holder.kind]++ == 0)
		p->counts.pages[holder.kind]++;
	kv_ledger_add(&p->ledger, page, holder, where);
}

static void take_away(struct kv_pool *p, int32_t page, struct kv_holder holder, const char *where)
{
	if (p->pages[page].refs_of[holder.kind] <= 0 || !kv_ledger_remove(&p->ledger, page, holder))
		broken(p, page, "somebody who does not hold it gives away", holder, where);
	p->counts.refs[holder.kind]--;
	if (--p->pages[page].refs_of[holder.kind] == 0)
		p->counts.pages[holder.kind]--;
}

int32_t kv_pool_get_at(struct kv_pool *p, struct kv_holder holder, const char *where)
{
	if (p->counts.n_free == 0)
		return KV_NO_PAGE;
	int32_t page = p->free_pages[--p->counts.n_free];
	if (p->pages[page].refs != 0)
		broken(p, page, "free list holds used", holder, where);
	p->pages[page].refs = 1;
	p->watch.mark[page] = 0;
	kv_pool_unbound(p, page);
	add(p, page, holder, where);
	record(p, page, 'g', holder, where);
	return page;
}

void kv_pool_ref_at(struct kv_pool *p, int32_t page, struct kv_holder holder, const char *where)
{
	check_held(p, page, "ref of free", holder, where);
	add(p, page, holder, where);
	int32_t refs = ++p->pages[page].refs;
	record(p, page, 'r', holder, where);
	if (refs != 2)
		return;
	p->counts.n_shared++;
	if (p->pages[page].indexed)
		p->watcher(p->watcher_arg, page, false);
}

void kv_pool_unref_at(struct kv_pool *p, int32_t page, struct kv_holder holder, const char *where)
{
	check_held(p, page, "unref of free", holder, where);
	take_away(p, page, holder, where);
	int32_t refs = --p->pages[page].refs;
	record(p, page, 'u', holder, where);
	if (refs == 1) {
		p->counts.n_shared--;
		if (p->pages[page].indexed)
			p->watcher(p->watcher_arg, page, true);
	}
	if (refs > 0)
		return;
	if (p->pages[page].indexed)
		broken(p, page, "free of indexed", holder, where);
	drop_wide(p, page);
	p->free_pages[p->counts.n_free++] = page;
}

void kv_pool_pass_at(struct kv_pool *p, int32_t page, struct kv_holder from, struct kv_holder to, const char *where)
{
	check_held(p, page, "pass of free", from, where);
	take_away(p, page, from, where);
	add(p, page, to, where);
	record(p, page, 'p', to, where);
}

void kv_pool_watch(struct kv_pool *p, void (*watcher)(void *arg, int32_t page, bool idle), void *arg)
{
	p->watcher = watcher;
	p->watcher_arg = arg;
}

void kv_pool_mark(struct kv_pool *p, int32_t page, bool indexed)
{
	check_held(p, page, "mark of free", (struct kv_holder){KV_HOLDER_INDEX, 0}, __func__);
	p->pages[page].indexed = indexed;
}

int32_t kv_pool_clone(struct kv_pool *p, int32_t from, struct kv_holder holder)
{
	const struct kv_holder copy = {KV_HOLDER_COPY, 0};
	check_held(p, from, "clone of free", holder, __func__);
	int32_t to = kv_pool_get(p, copy);
	if (to == KV_NO_PAGE)
		return KV_NO_PAGE;
	if (p->layout.wide && p->wide.slot[from] >= 0)
		kv_pool_widen(p, to);
	if (p->backend->ops->page_copy(p->backend, p->slab, &p->layout, &from, &to, 1) != STATUS_OK) {
		kv_pool_unref(p, to, copy);
		return KV_NO_PAGE;
	}
	p->watch.mark[to] = p->watch.mark[from];
	kv_pool_pass(p, to, copy, holder);
	return to;
}

/* ---- Wide copies ---- */

void kv_pool_widen(struct kv_pool *p, int32_t page)
{
	struct kv_wide_counts *c = &p->wide_counts;
	if (!p->layout.wide || p->wide.slot[page] >= 0)
		return;
	if (c->n_used == c->n_slots) {
		c->refused++;
		return;
	}
	p->wide.slot[page] = p->free_slots[c->n_slots - ++c->n_used];
}

void kv_pool_narrow(struct kv_pool *p, int32_t page)
{
	if (!p->watch.mark[page])
		drop_wide(p, page);
}

/* ---- Bounds ---- */

enum status kv_pool_add_bounds(struct kv_pool *p)
{
	const struct backend_ops *ops = p->backend->ops;
	size_t n = (size_t)p->counts.n_pages;
	void *slab;
	if (!ops->page_bounds)
		return STATUS_UNSUPPORTED;
	p->bounds_bytes = n * kv_bounds_bytes(&p->layout); /* less than the slab of pages */
	bool *bounded = calloc(n, sizeof *bounded);
	int32_t *unbounded = calloc(n, sizeof *unbounded);
	if (!bounded || !unbounded || ops->mem_alloc(p->backend, p->bounds_bytes, &slab) != STATUS_OK) {
		free(bounded);
		free(unbounded);
		return STATUS_NOMEM;
	}
	p->bounded = bounded;
	p->unbounded = unbounded;
	p->bounds = (struct kv_bounds){slab, p->counts.n_pages};
	p->layout.bounds = &p->bounds;
	return STATUS_OK;
}

enum status kv_pool_bound(struct kv_pool *p, const int32_t *pages, int32_t n)
{
	int32_t n_unbounded = 0;
	if (!p->bounded)
		return STATUS_UNSUPPORTED;
	for (int32_t i = 0; i < n; i++) {
		if (!p->bounded[pages[i]])
			p->unbounded[n_unbounded++] = pages[i];
	}
	if (n_unbounded == 0)
		return STATUS_OK;
	enum status st = p->backend->ops->page_bounds(p->backend, p->slab, &p->layout, p->unbounded, n_unbounded);
	for (int32_t i = 0; st == STATUS_OK && i < n_unbounded; i++)
		p->bounded[p->unbounded[i]] = true;
	p->wide_counts.n_bounded += st == STATUS_OK ? (uint64_t)n_unbounded : 0;
	return st;
}

enum status kv_pool_read_bounds(struct kv_pool *p, int32_t page, uint16_t *to)
{
	const struct kv_layout *l = &p->layout;
	const size_t of_head = 2 * (size_t)l->head_dim;
	if (p->backend->ops->bounds_read)
		return p->backend->ops->bounds_read(p->backend, l, page, to);
	for (int32_t layer = 0; layer < l->n_layer; layer++)
		for (int32_t head = 0; head < l->n_head_kv; head++, to += of_head)
			memcpy(to, (const char *)l->bounds->slab + kv_bounds_offset(l, layer, head, page),
			       of_head * sizeof *to);
	return STATUS_OK;
}

void kv_pool_unbound(struct kv_pool *p, int32_t page)
{
	if (p->bounded)
		p->bounded[page] = false;
}

/* ---- What is in them ---- */

bool kv_pool_is_sound(const struct kv_pool *p, int32_t page)
{
	return !(p->watch.mark[page] & KV_MARK_UNSOUND);
}

bool kv_pool_fell_back(const struct kv_pool *p, int32_t page)
{
	return p->layout.form != KV_FORM_F16 && (p->watch.mark[page] & KV_MARK_ASKED) && p->wide.slot[page] >= 0;
}

void kv_pool_wide_counts(const struct kv_pool *p, struct kv_wide_counts *out)
{
	*out = p->wide_counts;
	out->n_not_finite = p->wide.n_not_finite;
	out->n_unsound = p->watch.n_unsound;
	out->n_clamped = p->watch.n_clamped;
}

/* ---- Questions ---- */

int32_t kv_pool_refs(const struct kv_pool *p, int32_t page)
{
	return p->pages[page].refs;
}

int32_t kv_pool_refs_of(const struct kv_pool *p, int32_t page, enum kv_holder_kind kind)
{
	return p->pages[page].refs_of[kind];
}

bool kv_pool_is_indexed(const struct kv_pool *p, int32_t page)
{
	return p->pages[page].indexed;
}

int32_t kv_pool_n_pages(const struct kv_pool *p)
{
	return p->counts.n_pages;
}

int32_t kv_pool_n_free(const struct kv_pool *p)
{
	return p->counts.n_free;
}

void *kv_pool_slab(const struct kv_pool *p)
{
	return p->slab;
}

const struct kv_layout *kv_pool_layout(const struct kv_pool *p)
{
	return &p->layout;
}

void kv_pool_counts(const struct kv_pool *p, struct kv_pool_counts *out)
{
	*out = p->counts;
}

bool kv_pool_has_ledger(const struct kv_pool *p)
{
	return kv_ledger_complete(&p->ledger);
}

size_t kv_pool_holders(const struct kv_pool *p, int32_t page, struct kv_holder *out, size_t max)
{
	return kv_ledger_holders(&p->ledger, page, out, max);
}

void kv_pool_report(const struct kv_pool *p, struct buf *out)
{
	const struct kv_pool_counts *c = &p->counts;
	buf_printf(out, "%" PRId32 " of %" PRId32 " pages are held;", c->n_pages - c->n_free, c->n_pages);
	for (int kind = 0; kind < KV_HOLDER_KINDS; kind++) {
		if (c->refs[kind])
			buf_printf(out, " %s: %" PRId64 " references on %" PRId32 " pages;", kv_holder_text(kind),
			           c->refs[kind], c->pages[kind]);
	}
	buf_printf(out, " shared: %" PRId32 " pages\n", c->n_shared);
	kv_ledger_report(&p->ledger, out);
}
