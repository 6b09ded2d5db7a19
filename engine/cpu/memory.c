#include "engine/cpu/memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t huge_page = (size_t)2 << 20;

static size_t small_page(void)
{
	long n = sysconf(_SC_PAGESIZE);
	return n > 0 ? (size_t)n : 4096;
}

static size_t mapping_bytes(size_t bytes)
{
	size_t align = bytes >= huge_page ? huge_page : small_page();
	return (bytes + align - 1) & ~(align - 1);
}

void *cpu_memory_alloc(size_t bytes)
{
	if (bytes == 0 || bytes > SIZE_MAX / 4)
		return NULL;
	size_t size = mapping_bytes(bytes);
	/* A huge page must be aligned to its size, which mmap() does not promise: map more, then give the ends back. */
	size_t slack = size >= huge_page ? huge_page : 0;
	char *p = mmap(NULL, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return NULL;
	if (slack) {
		char *aligned = (char *)(((uintptr_t)p + huge_page - 1) & ~(uintptr_t)(huge_page - 1));
		size_t head = (size_t)(aligned - p);
		if (head)
			munmap(p, head);
		if (slack - head)
			munmap(aligned + size, slack - head);
		p = aligned;
#ifdef MADV_HUGEPAGE
		madvise(p, size, MADV_HUGEPAGE);
#endif
	}
	return p;
}

void cpu_memory_free(void *p, size_t bytes)
{
	if (p)
		munmap(p, mapping_bytes(bytes));
}

/* ---- The heap ---- */

enum { CHUNK_BYTES = 32 << 20, SHARED_BELOW = 8 << 20, BLOCK_ALIGN = 4096 };

/* Blocks are never placed twice, so that they are zero: the chunk goes when the last of them does. */
struct memory_chunk {
	struct memory_chunk *next;
	char *p;
	size_t used;
	size_t n_blocks;
};

static struct memory_chunk *add_chunk(struct memory_heap *h)
{
	struct memory_chunk *c = calloc(1, sizeof *c);
	if (!c)
		return NULL;
	c->p = cpu_memory_alloc(CHUNK_BYTES);
	if (!c->p) {
		free(c);
		return NULL;
	}
	c->next = h->chunks;
	h->chunks = c;
	return c;
}

void *memory_heap_alloc(struct memory_heap *h, size_t bytes)
{
	if (bytes == 0 || bytes >= SHARED_BELOW)
		return cpu_memory_alloc(bytes);
	size_t size = (bytes + BLOCK_ALIGN - 1) & ~(size_t)(BLOCK_ALIGN - 1);
	struct memory_chunk *c = h->chunks;
	while (c && CHUNK_BYTES - c->used < size)
		c = c->next;
	if (!c)
		c = add_chunk(h);
	if (!c)
		return NULL;
	void *p = c->p + c->used;
	c->used += size;
	c->n_blocks++;
	return p;
}

void memory_heap_free(struct memory_heap *h, void *p, size_t bytes)
{
	if (!p || bytes >= SHARED_BELOW) {
		cpu_memory_free(p, bytes);
		return;
	}
	struct memory_chunk **at = &h->chunks;
	while (*at && ((uintptr_t)p < (uintptr_t)(*at)->p || (uintptr_t)p >= (uintptr_t)(*at)->p + CHUNK_BYTES))
		at = &(*at)->next;
	struct memory_chunk *c = *at;
	if (!c || --c->n_blocks > 0)
		return;
	*at = c->next;
	cpu_memory_free(c->p, CHUNK_BYTES);
	free(c);
}

void cpu_memory_cool(const void *p, size_t bytes)
{
#ifdef MADV_COLD
	size_t page = small_page();
	uintptr_t begin = ((uintptr_t)p + page - 1) & ~(uintptr_t)(page - 1);
	uintptr_t end = ((uintptr_t)p + bytes) & ~(uintptr_t)(page - 1);
	if (end > begin)
		madvise((void *)begin, end - begin, MADV_COLD);
#else
	(void)p;
	(void)bytes;
#endif
}

bool scratch_grow(struct scratch *s, size_t bytes)
{
	if (bytes <= s->bytes)
		return true;
	void *p = cpu_memory_alloc(bytes);
	if (!p)
		return false;
	cpu_memory_free(s->p, s->bytes);
	*s = (struct scratch){p, bytes};
	return true;
}

void scratch_free(struct scratch *s)
{
	cpu_memory_free(s->p, s->bytes);
	*s = (struct scratch){NULL, 0};
}
