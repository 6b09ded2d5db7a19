/*
 * A disk that does what disks do, on command: a library for LD_PRELOAD. It stands before the transfers of the daemon's
 * KV files (kvasir-kv.*, kvasir-overflow), which have no io_uring then, since that passes by the C library.
 *
 * The file that the environment's BAD_DISK names is mapped; a test maps it too (tests/api/bad_disk.py) and writes into
 * it while the daemon runs. Without such a file everything passes through.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

enum { BLOCK = 4096 };

/* Names and order are known to tests/api/bad_disk.py. */
struct bad_disk {
	_Atomic int64_t read_error, write_error; /* errno of every transfer; 0: none */
	_Atomic int64_t allocate_error;          /* of making room */
	_Atomic int64_t read_us;                 /* how much longer a read takes */
	_Atomic int64_t hang_reads, hang_writes; /* they do not end before this is 0 again */
	_Atomic int64_t halve;                   /* a transfer moves half of what it is asked to, in whole blocks */
	_Atomic int64_t flip_reads;              /* what is read has a wrong bit */
	_Atomic int64_t n_failed, n_hung, n_halved, n_flipped;
	_Atomic int64_t n_reads, n_writes;       /* that were asked for */
};

static struct bad_disk idle;
static struct bad_disk *disk = &idle;

static struct {
	ssize_t (*pread)(int fd, void *buf, size_t n, off64_t at);
	ssize_t (*pwrite)(int fd, const void *buf, size_t n, off64_t at);
	int (*allocate)(int fd, off64_t at, off64_t n);
} next;

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("BAD_DISK");
	*(void **)&next.pread = dlsym(RTLD_NEXT, "pread64");
	*(void **)&next.pwrite = dlsym(RTLD_NEXT, "pwrite64");
	*(void **)&next.allocate = dlsym(RTLD_NEXT, "posix_fallocate64");
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	if (fd < 0)
		return;
	void *p = mmap(NULL, sizeof *disk, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (p != MAP_FAILED)
		disk = p;
}

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

static int is_kv_file(int fd)
{
	char link[64], path[4200];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, path, sizeof path - 1);
	path[n > 0 ? n : 0] = '\0';
	return strstr(path, "/kvasir-kv.") || strstr(path, "/kvasir-overflow");
}

static void hang(_Atomic int64_t *while_set)
{
	if (*while_set)
		disk->n_hung++;
	while (*while_set)
		usleep(1000);
}

/* How much of n bytes is moved. */
static size_t some_of(size_t n)
{
	if (!disk->halve || n <= BLOCK)
		return n;
	disk->n_halved++;
	return n / 2 / BLOCK * BLOCK;
}

static ssize_t fails(int64_t error)
{
	disk->n_failed++;
	errno = (int)error;
	return -1;
}

EXPORTED ssize_t pread64(int fd, void *buf, size_t n, off64_t at);
ssize_t pread64(int fd, void *buf, size_t n, off64_t at)
{
	if (!is_kv_file(fd))
		return next.pread(fd, buf, n, at);
	disk->n_reads++;
	hang(&disk->hang_reads);
	if (disk->read_us)
		usleep((useconds_t)disk->read_us);
	if (disk->read_error)
		return fails(disk->read_error);
	ssize_t k = next.pread(fd, buf, some_of(n), at);
	if (disk->flip_reads && k > 0) {
		((char *)buf)[k / 2] ^= 0x10;
		disk->n_flipped++;
	}
	return k;
}

EXPORTED ssize_t pwrite64(int fd, const void *buf, size_t n, off64_t at);
ssize_t pwrite64(int fd, const void *buf, size_t n, off64_t at)
{
	if (!is_kv_file(fd))
		return next.pwrite(fd, buf, n, at);
	disk->n_writes++;
	hang(&disk->hang_writes);
	if (disk->write_error)
		return fails(disk->write_error);
	return next.pwrite(fd, buf, some_of(n), at);
}

EXPORTED int posix_fallocate64(int fd, off64_t at, off64_t n);
int posix_fallocate64(int fd, off64_t at, off64_t n)
{
	if (disk->allocate_error && is_kv_file(fd)) {
		disk->n_failed++;
		return (int)disk->allocate_error;
	}
	return next.allocate(fd, at, n);
}

#ifndef __USE_FILE_OFFSET64
EXPORTED ssize_t pread(int fd, void *buf, size_t n, off_t at);
ssize_t pread(int fd, void *buf, size_t n, off_t at)
{
	return pread64(fd, buf, n, at);
}

EXPORTED ssize_t pwrite(int fd, const void *buf, size_t n, off_t at);
ssize_t pwrite(int fd, const void *buf, size_t n, off_t at)
{
	return pwrite64(fd, buf, n, at);
}

EXPORTED int posix_fallocate(int fd, off_t at, off_t n);
int posix_fallocate(int fd, off_t at, off_t n)
{
	return posix_fallocate64(fd, at, n);
}
#endif
