/* Prefetching for the attention kernels: included by kernels_pages_*.h. */
#pragma once

#include "engine/cpu/kernels_matmul.h"

enum {
	PAGE_VECTORS = KV_PAGE_TOKENS / LANES,
	BLOCK_PAGES = ATTN_BLOCK / KV_PAGE_TOKENS,
};

/* What products read of K and V: what stands in pages, floats that it became before, or codes (narrow.h). */
enum elements { ELEMENTS_PAGE, ELEMENTS_FLOAT, ELEMENTS_INT8, ELEMENTS_E4M3 };

/*
 * Asks for the lines of the pages that will be read next, while the present ones are computed with. In ascending order,
 * since other orders confuse the hardware's own prefetching, and a few at a time, since a processor keeps few requests.
 */
struct fetcher {
	const uint16_t *pages[BLOCK_PAGES];
	int n_pages, page;
	const char *line;   /* the next one, or NULL */
	int32_t page_lines; /* wanted of each page */
	int32_t left;       /* of this page */
};

/* n is a constant. */
INLINE void fetch(struct fetcher *f, int n)
{
	if (!f->line)
		return;
	UNROLL
	for (int i = 0; i < n; i++)
		__builtin_prefetch(f->line + 64 * i, 0, 2); /* to the second-level cache */
	f->line += 64 * n;
	f->left -= n;
	if (f->left <= 0) {
		f->line = ++f->page < f->n_pages ? (const char *)f->pages[f->page] : NULL;
		f->left += f->page_lines;
	}
}
