/*
 * How the disk tier moves bytes: a table of functions, with io_uring behind it, or pread() and pwrite(), or a test that
 * fails as disks do. One thread, the tier's, calls everything but kick().
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/list.h"

struct kv_io;

struct kv_io_transfer {
	struct list link;
	int fd;
	bool write;
	uint64_t offset;
	void *buffer;   /* inside what attach() was given */
	size_t bytes;   /* with offset and buffer a multiple of 4096 */
	int64_t result; /* bytes moved, fewer than asked for perhaps, or -errno */
};

struct kv_io_ops {
	const char *name; /* "io_uring", "threads" */
	/* Makes a file of that many bytes have its room; 0 or -errno. */
	int (*allocate)(struct kv_io *io, int fd, uint64_t bytes);
	/*
	 * The memory that transfers use; called once, before the first. May fail silently: registering is only quicker.
	 */
	void (*attach)(struct kv_io *io, void *memory, size_t bytes);
	/* Begins a transfer; the caller bounds their number by KV_IO_DEPTH. 0, or -errno and it has not begun. */
	int (*submit)(struct kv_io *io, struct kv_io_transfer *x);
	/*
	 * Up to max transfers that have ended. Waits for a first one, or a kick, at most wait_ns (negative: for ever;
	 * 0: not at all).
	 * -errno: nothing will end any more.
	 */
	int (*reap)(struct kv_io *io, struct kv_io_transfer **done, int max, int64_t wait_ns);
	/* Makes a reap() that waits, or the next one, return. Any thread. */
	void (*kick)(struct kv_io *io);
	void (*destroy)(struct kv_io *io);
};

struct kv_io {
	const struct kv_io_ops *ops;
};

enum { KV_IO_DEPTH = 64 };

/* io_uring where it is built in and the system allows it, else pread() and pwrite(). NULL: no memory. */
struct kv_io *kv_io_create(void);
struct kv_io *kv_io_create_plain(void);
/* NULL where it is not built in or the system refuses it. */
struct kv_io *kv_io_create_uring(void);
