/*
 * A bump allocator with a byte limit: everything in it is freed together. Used where one input builds many small
 * objects that die with it (a chat request's values, a template's temporaries), and where the input must not be able to
 * take more memory than it was given.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/str.h"

struct arena;

/* limit_bytes bounds the sum of all chunks, headers included. NULL when there is no memory. */
struct arena *arena_create(size_t limit_bytes);
void arena_destroy(struct arena *a); /* NULL is allowed */
/* n bytes, zeroed and aligned to 16; NULL when the limit or the memory is exhausted. n == 0 gives a valid pointer. */
void *arena_alloc(struct arena *a, size_t n);
/* A copy of s with a NUL after it; p == NULL when there is no room. */
struct str arena_str(struct arena *a, const char *p, size_t n);
/* Whether an allocation has failed for want of memory, and not for the limit. */
bool arena_starved(const struct arena *a);
/* Bytes handed out and lost to chunk ends so far. */
size_t arena_used(const struct arena *a);
