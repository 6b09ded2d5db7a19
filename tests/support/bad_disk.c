/*
 * A disk that is as slow as asked for, for LD_PRELOAD: reads of the disk tier's files take KVASIR_SLOW_READ_US microseconds longer. The
 * daemon has no io_uring then, whose transfers pass by the C library.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

struct io_uring;
struct io_uring_params;

EXPORTED int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags);
EXPORTED int io_uring_queue_init_params(unsigned entries, struct io_uring *ring, struct io_uring_params *p);

int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags)
{
	(void)entries;
	(void)ring;
	(void)flags;
	return -ENOSYS;
}

int io_uring_queue_init_params(unsigned entries, struct io_uring *ring, struct io_uring_params *p)
{
	(void)p;
	return io_uring_queue_init(entries, ring, 0);
}

static int is_tier_file(int fd)
{
	char link[64], path[4200];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, path, sizeof path - 1);
	path[n > 0 ? n : 0] = '\0';
	return strstr(path, "/kvasir-kv.") != NULL;
}

static ssize_t slow_read(const char *name, int fd, void *buf, size_t n, off64_t at)
{
	static ssize_t (*real)(int fd, void *buf, size_t n, off64_t at);
	const char *delay = getenv("KVASIR_SLOW_READ_US");
	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, name);
	if (delay && is_tier_file(fd))
		usleep((useconds_t)atol(delay));
	return real(fd, buf, n, at);
}

EXPORTED ssize_t pread64(int fd, void *buf, size_t n, off64_t at);
ssize_t pread64(int fd, void *buf, size_t n, off64_t at)
{
	return slow_read("pread64", fd, buf, n, at);
}

#ifndef __USE_FILE_OFFSET64
EXPORTED ssize_t pread(int fd, void *buf, size_t n, off_t at);
ssize_t pread(int fd, void *buf, size_t n, off_t at)
{
	return slow_read("pread", fd, buf, n, at);
}
#endif
