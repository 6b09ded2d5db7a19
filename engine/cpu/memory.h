/* Large zeroed memory for weights, KV pages and activations: page-aligned, on huge pages where the kernel grants them. */
#pragma once

#include <stddef.h>

/* bytes > 0, aligned to 4096 (to 2 MiB from that size on). NULL when there is not enough. */
void *cpu_memory_alloc(size_t bytes);
/* With the size given to cpu_memory_alloc(); NULL is allowed. */
void cpu_memory_free(void *p, size_t bytes);
/*
 * Tells the kernel that a part of a read-only file mapping will hardly be read again, so that its pages may leave this process;
 * reading it later is still correct. Does nothing for memory that is not such a mapping.
 */
void cpu_memory_drop(const void *p, size_t bytes);
