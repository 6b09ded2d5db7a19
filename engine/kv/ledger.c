#include "engine/kv/ledger.h"

#include <inttypes.h>
#include <stdlib.h>

#ifdef KVASIR_KV_LEDGER

enum { NONE = -1, FIRST_ENTRIES = 64, REPORT_LINES = 64, REPORT_RANGES = 16 };

enum status kv_ledger_init(struct kv_ledger *l, int32_t n_pages)
{
	*l = (struct kv_ledger){.n_pages = n_pages, .first_free = NONE};
	l->first = malloc((size_t)n_pages * sizeof *l->first);
	if (!l->first)
		return STATUS_NOMEM;
	for (int32_t i = 0; i < n_pages; i++)
		l->first[i] = NONE;
	return STATUS_OK;
}

void kv_ledger_free(struct kv_ledger *l)
{
	free(l->entries);
	free(l->first);
	*l = (struct kv_ledger){.first_free = NONE};
}

static bool grow(struct kv_ledger *l)
{
	if (l->cap > INT32_MAX / 2)
		return false;
	int32_t cap = l->cap ? l->cap * 2 : FIRST_ENTRIES;
	struct kv_ledger_entry *entries = realloc(l->entries, (size_t)cap * sizeof *entries);
	if (!entries)
		return false;
	l->entries = entries;
	for (int32_t i = cap - 1; i >= l->cap; i--) {
		entries[i].next = l->first_free;
		l->first_free = i;
	}
	l->cap = cap;
	return true;
}

void kv_ledger_add(struct kv_ledger *l, int32_t page, struct kv_holder holder, const char *where)
{
	if (l->first_free == NONE && !grow(l)) {
		l->incomplete = true;
		return;
	}
	int32_t i = l->first_free;
	l->first_free = l->entries[i].next;
	l->entries[i] = (struct kv_ledger_entry){holder, where, l->first[page]};
	l->first[page] = i;
}

bool kv_ledger_remove(struct kv_ledger *l, int32_t page, struct kv_holder holder)
{
	int32_t *at = &l->first[page];
	while (*at != NONE && !kv_holder_is(l->entries[*at].holder, holder))
		at = &l->entries[*at].next;
	if (*at == NONE)
		return l->incomplete;
	int32_t i = *at;
	*at = l->entries[i].next;
	l->entries[i].next = l->first_free;
	l->first_free = i;
	return true;
}

bool kv_ledger_complete(const struct kv_ledger *l)
{
	return !l->incomplete;
}

size_t kv_ledger_holders(const struct kv_ledger *l, int32_t page, struct kv_holder *out, size_t max)
{
	size_t n = 0;
	for (int32_t i = l->first[page]; i != NONE; i = l->entries[i].next, n++) {
		if (n < max)
			out[n] = l->entries[i].holder;
	}
	return n;
}

/* ---- The report ---- */

/* One reference, to be sorted: who, where, page. */
struct held {
	const struct kv_ledger_entry *entry;
	int32_t page;
};

static int by_holder(const void *a, const void *b)
{
	const struct held *x = a, *y = b;
	const struct kv_ledger_entry *p = x->entry, *q = y->entry;
	if (p->holder.kind != q->holder.kind)
		return p->holder.kind < q->holder.kind ? -1 : 1;
	if (p->holder.id != q->holder.id)
		return p->holder.id < q->holder.id ? -1 : 1;
	if (p->where != q->where)
		return (uintptr_t)p->where < (uintptr_t)q->where ? -1 : 1;
	return (x->page > y->page) - (x->page < y->page);
}

static bool same_line(const struct held *a, const struct held *b)
{
	return kv_holder_is(a->entry->holder, b->entry->holder) && a->entry->where == b->entry->where;
}

/* Appends the line of list[0..n), references of one holder taken in one place. */
static void report_line(const struct held *list, size_t n, struct buf *out)
{
	const struct kv_ledger_entry *e = list->entry;
	buf_printf(out, "%s %" PRIu64 " holds %zu since %s:", kv_holder_text(e->holder.kind), e->holder.id, n,
	           e->where);
	int n_ranges = 0;
	for (size_t i = 0, end; i < n; i = end) {
		for (end = i + 1; end < n && list[end].page - list[end - 1].page <= 1;)
			end++;
		if (n_ranges++ == REPORT_RANGES) {
			buf_printf(out, " ...");
			break;
		}
		buf_printf(out, " %" PRId32, list[i].page);
		if (list[end - 1].page != list[i].page)
			buf_printf(out, "-%" PRId32, list[end - 1].page);
	}
	buf_append(out, "\n", 1);
}

void kv_ledger_report(const struct kv_ledger *l, struct buf *out)
{
	size_t n = 0, n_lines = 0, n_left = 0;
	struct held *list = calloc((size_t)l->cap + 1, sizeof *list);
	if (!list) {
		buf_printf(out, "there is no memory to list who holds what\n");
		return;
	}
	for (int32_t page = 0; page < l->n_pages; page++) {
		for (int32_t i = l->first[page]; i != NONE; i = l->entries[i].next)
			list[n++] = (struct held){&l->entries[i], page};
	}
	qsort(list, n, sizeof *list, by_holder);
	for (size_t i = 0, end; i < n; i = end) {
		for (end = i + 1; end < n && same_line(&list[i], &list[end]);)
			end++;
		if (n_lines++ < REPORT_LINES)
			report_line(list + i, end - i, out);
		else
			n_left += end - i;
	}
	if (n_left)
		buf_printf(out, "and %zu references more\n", n_left);
	if (l->incomplete)
		buf_printf(out, "the ledger ran out of memory: others may hold pages, too\n");
	free(list);
}

#endif
