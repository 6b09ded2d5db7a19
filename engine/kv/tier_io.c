/* Transfers by pread() and pwrite(), in the thread that submits them; and the choice between this and io_uring. */
#include "engine/kv/tier_io.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

struct plain {
	struct kv_io base;
	struct list ended; /* the tier's thread alone */
	pthread_mutex_t lock;
	pthread_cond_t kicked_cond;
	bool kicked;       /* under lock */
};

static int allocate(struct kv_io *io, int fd, uint64_t bytes)
{
	(void)io;
	return -posix_fallocate(fd, 0, (off_t)bytes);
}

static void attach(struct kv_io *io, void *memory, size_t bytes)
{
	(void)io;
	(void)memory;
	(void)bytes;
}

static int submit(struct kv_io *io, struct kv_io_transfer *x)
{
	struct plain *p = (struct plain *)io;
	ssize_t n;
	do {
		n = x->write ? pwrite(x->fd, x->buffer, x->bytes, (off_t)x->offset)
		             : pread(x->fd, x->buffer, x->bytes, (off_t)x->offset);
	} while (n < 0 && errno == EINTR);
	x->result = n < 0 ? -errno : n;
	list_push_back(&p->ended, &x->link);
	return 0;
}

static void wait_kick(struct plain *p, int64_t wait_ns)
{
	struct timespec until;
	clock_gettime(CLOCK_MONOTONIC, &until);
	int64_t ns = until.tv_nsec + (wait_ns < 0 ? 0 : wait_ns % 1000000000);
	until.tv_sec += (time_t)((wait_ns < 0 ? 0 : wait_ns / 1000000000) + ns / 1000000000);
	until.tv_nsec = (long)(ns % 1000000000);
	pthread_mutex_lock(&p->lock);
	while (!p->kicked) {
		if (wait_ns < 0)
			pthread_cond_wait(&p->kicked_cond, &p->lock);
		else if (pthread_cond_timedwait(&p->kicked_cond, &p->lock, &until) == ETIMEDOUT)
			break;
	}
	p->kicked = false;
	pthread_mutex_unlock(&p->lock);
}

static int reap(struct kv_io *io, struct kv_io_transfer **done, int max, int64_t wait_ns)
{
	struct plain *p = (struct plain *)io;
	int n = 0;
	if (list_empty(&p->ended) && wait_ns != 0)
		wait_kick(p, wait_ns);
	while (n < max && !list_empty(&p->ended))
		done[n++] = list_entry(list_pop_front(&p->ended), struct kv_io_transfer, link);
	return n;
}

static void kick(struct kv_io *io)
{
	struct plain *p = (struct plain *)io;
	pthread_mutex_lock(&p->lock);
	p->kicked = true;
	pthread_cond_signal(&p->kicked_cond);
	pthread_mutex_unlock(&p->lock);
}

static void destroy(struct kv_io *io)
{
	struct plain *p = (struct plain *)io;
	pthread_cond_destroy(&p->kicked_cond);
	pthread_mutex_destroy(&p->lock);
	free(p);
}

struct kv_io *kv_io_create_plain(void)
{
	static const struct kv_io_ops ops = {"threads", allocate, attach, submit, reap, kick, destroy};
	pthread_condattr_t attr;
	struct plain *p = calloc(1, sizeof *p);
	if (!p)
		return NULL;
	p->base.ops = &ops;
	list_init(&p->ended);
	pthread_mutex_init(&p->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&p->kicked_cond, &attr);
	pthread_condattr_destroy(&attr);
	return &p->base;
}

struct kv_io *kv_io_create(void)
{
	struct kv_io *io = kv_io_create_uring();
	return io ? io : kv_io_create_plain();
}
