/*
 * The disk part of overflow.h: slots of a file, each with one block for each layer. A slot is written as a whole, and
 * read block by block in an order that is known for a step in advance.
 *
 * The worker calls everything here. Threads of its own move bytes: one writes, in the order in which it was asked to;
 * others read.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

struct overflow_disk;

struct overflow_disk_options {
	const char *dir;
	int32_t n_slots, n_layer;
	size_t block_bytes; /* that mean something */
	int64_t stall_ms;   /* 0: default */
};

/* Bytes of a block in the file, and in buffers. */
size_t overflow_disk_stride(size_t block_bytes);

/* IO, NOMEM. */
enum status overflow_disk_create(const struct overflow_disk_options *o, struct overflow_disk **out, struct error *err);
/* A disk that hangs is left behind. NULL is allowed. */
void overflow_disk_destroy(struct overflow_disk *d);

/*
 * A buffer for a slot's blocks, one after another at overflow_disk_stride(); waits until one is free. NULL: the disk
 * has failed.
 */
char *overflow_disk_begin_write(struct overflow_disk *d, int32_t slot);
/* It is filled. */
void overflow_disk_end_write(struct overflow_disk *d, int32_t slot);
/* That buffer as long as nobody has had use for it since; NULL: the slot is on disk. */
const char *overflow_disk_buffer(const struct overflow_disk *d, int32_t slot);
/* What was written last may be read from now on, and its buffers are free: overflow_disk_buffer() changes only here. */
void overflow_disk_settle(struct overflow_disk *d);
/* Nobody wants what the slot has. */
void overflow_disk_forget(struct overflow_disk *d, int32_t slot);

/*
 * A step reads slots[0..n), which are on disk, for each layer, in this order, or leaves some out. The array is copied.
 */
void overflow_disk_schedule(struct overflow_disk *d, const int32_t *slots, int32_t n);
/* Block `layer` of slots[rank], valid until the next call. NULL: the disk has failed. */
const char *overflow_disk_get(struct overflow_disk *d, int32_t layer, int32_t rank);

/* NULL, or why it has failed: a static text. */
const char *overflow_disk_failed(struct overflow_disk *d);

struct overflow_disk_stats {
	uint64_t bytes_read, bytes_written, waits;
};
void overflow_disk_stats(struct overflow_disk *d, struct overflow_disk_stats *out);
