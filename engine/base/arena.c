#include "engine/base/arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 16, FIRST_CHUNK = 4096, MAX_CHUNK = 1 << 20 };

struct chunk {
	struct chunk *next;
	size_t size;
};

struct arena {
	struct chunk *chunks;
	char *at, *end;
	size_t used, limit;
	size_t next_chunk;
	bool starved;
};

static size_t round_up(size_t n)
{
	return (n + ALIGN - 1) & ~(size_t)(ALIGN - 1);
}

struct arena *arena_create(size_t limit_bytes)
{
	struct arena *a = calloc(1, sizeof *a);
	if (!a)
		return NULL;
	a->limit = limit_bytes;
	a->next_chunk = FIRST_CHUNK;
	return a;
}

void arena_destroy(struct arena *a)
{
	if (!a)
		return;
	while (a->chunks) {
		struct chunk *c = a->chunks;
		a->chunks = c->next;
		free(c);
	}
	free(a);
}

static int add_chunk(struct arena *a, size_t n)
{
	size_t header = round_up(sizeof(struct chunk));
	size_t size = n > a->next_chunk - header ? n + header : a->next_chunk;
	if (size > a->limit - a->used) {
		size = n + header;
		if (size > a->limit - a->used)
			return 0;
	}
	struct chunk *c = calloc(1, size);
	if (!c) {
		a->starved = true;
		return 0;
	}
	c->next = a->chunks;
	c->size = size;
	a->chunks = c;
	a->used += size;
	a->at = (char *)c + header;
	a->end = (char *)c + size;
	if (a->next_chunk < MAX_CHUNK)
		a->next_chunk *= 2;
	return 1;
}

void *arena_alloc(struct arena *a, size_t n)
{
	if (n > SIZE_MAX / 2)
		return NULL;
	n = round_up(n ? n : 1);
	if (n > (size_t)(a->end - a->at) && !add_chunk(a, n))
		return NULL;
	void *p = a->at;
	a->at += n;
	return p;
}

struct str arena_str(struct arena *a, const char *p, size_t n)
{
	char *copy = n < SIZE_MAX ? arena_alloc(a, n + 1) : NULL;
	if (!copy)
		return (struct str){NULL, 0};
	if (n)
		memcpy(copy, p, n);
	return (struct str){copy, n};
}

bool arena_starved(const struct arena *a)
{
	return a->starved;
}

size_t arena_used(const struct arena *a)
{
	return a->used;
}
