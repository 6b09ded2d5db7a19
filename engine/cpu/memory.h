/*
 * Large zeroed memory for weights, KV pages and activations: page-aligned, on huge pages where the kernel grants them.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* bytes > 0, aligned to 4096 (to 2 MiB from that size on). NULL when there is not enough. */
void *cpu_memory_alloc(size_t bytes);
/* With the size given to cpu_memory_alloc(); NULL is allowed. */
void cpu_memory_free(void *p, size_t bytes);
/*
 * A heap of such memory for many blocks that live long: blocks smaller than a few huge pages stand side by side on
 * shared ones, since most matrices of a small model are smaller than one. A zeroed struct is an empty heap.
 */
struct memory_heap {
	struct memory_chunk *chunks;
};

/* bytes > 0; zeroed, aligned to 4096. NULL when there is not enough. */
void *memory_heap_alloc(struct memory_heap *h, size_t bytes);
/*
 * With the size given to memory_heap_alloc(); NULL is allowed. The heap holds nothing any more when all its blocks are
 * freed.
 */
void memory_heap_free(struct memory_heap *h, void *p, size_t bytes);

/*
 * Tells the kernel that a part of a file mapping will hardly be read again, so that its pages are the first to give up
 * when memory runs short. The content stays valid, whatever kind of memory it is.
 */
void cpu_memory_cool(const void *p, size_t bytes);

/* Memory whose content need not last from one use to the next. */
struct scratch {
	void *p;
	size_t bytes;
};

/*
 * Makes s at least `bytes` large; the content is lost when it grows. False, and s unchanged, when there is no memory.
 */
bool scratch_grow(struct scratch *s, size_t bytes);
void scratch_free(struct scratch *s);
