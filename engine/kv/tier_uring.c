/* Transfers by io_uring, with the tier's memory registered so that the kernel need not pin it each time. */
#include "engine/kv/tier_io.h"

#ifdef KVASIR_URING

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct uring {
	struct kv_io base;
	struct io_uring ring;
	int event_fd;       /* kick() adds to it; a read of it is always under way */
	uint64_t event;     /* what that read gets */
	bool event_read;    /* under way */
	bool registered;
};

static int allocate(struct kv_io *io, int fd, uint64_t bytes)
{
	(void)io;
	return -posix_fallocate(fd, 0, (off_t)bytes);
}

static void attach(struct kv_io *io, void *memory, size_t bytes)
{
	struct uring *u = (struct uring *)io;
	struct iovec whole = {memory, bytes};
	/* May be refused by RLIMIT_MEMLOCK. */
	u->registered = io_uring_register_buffers(&u->ring, &whole, 1) == 0;
}

/*
 * A failed submission leaves the entry in the ring; the next one takes it along. So it has begun, unless the ring is
 * full.
 */
static int submit(struct kv_io *io, struct kv_io_transfer *x)
{
	struct uring *u = (struct uring *)io;
	struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
	if (!sqe)
		return -EAGAIN;
	if (u->registered && x->write)
		io_uring_prep_write_fixed(sqe, x->fd, x->buffer, (unsigned)x->bytes, x->offset, 0);
	else if (u->registered)
		io_uring_prep_read_fixed(sqe, x->fd, x->buffer, (unsigned)x->bytes, x->offset, 0);
	else if (x->write)
		io_uring_prep_write(sqe, x->fd, x->buffer, (unsigned)x->bytes, x->offset);
	else
		io_uring_prep_read(sqe, x->fd, x->buffer, (unsigned)x->bytes, x->offset);
	io_uring_sqe_set_data(sqe, x);
	io_uring_submit(&u->ring);
	return 0;
}

static void read_event(struct uring *u)
{
	struct io_uring_sqe *sqe = u->event_read ? NULL : io_uring_get_sqe(&u->ring);
	if (!sqe)
		return;
	io_uring_prep_read(sqe, u->event_fd, &u->event, sizeof u->event, 0);
	io_uring_sqe_set_data(sqe, NULL);
	u->event_read = true;
}

static int take_ended(struct uring *u, struct kv_io_transfer **done, int max, bool *kicked)
{
	struct io_uring_cqe *cqe;
	int n = 0;
	while (n < max && io_uring_peek_cqe(&u->ring, &cqe) == 0) {
		struct kv_io_transfer *x = io_uring_cqe_get_data(cqe);
		if (x) {
			x->result = cqe->res;
			done[n++] = x;
		} else {
			u->event_read = false;
			*kicked = true;
		}
		io_uring_cqe_seen(&u->ring, cqe);
	}
	return n;
}

static int reap(struct kv_io *io, struct kv_io_transfer **done, int max, int64_t wait_ns)
{
	struct uring *u = (struct uring *)io;
	struct io_uring_cqe *cqe;
	struct __kernel_timespec ts = {wait_ns / 1000000000, wait_ns % 1000000000};
	bool kicked = false;
	read_event(u);
	int st = io_uring_submit(&u->ring);
	int n = take_ended(u, done, max, &kicked);
	if (n > 0 || kicked || wait_ns == 0)
		return n;
	if (st < 0 && st != -EINTR && st != -EAGAIN && st != -EBUSY)
		return st;
	st = wait_ns < 0 ? io_uring_wait_cqe(&u->ring, &cqe) : io_uring_wait_cqe_timeout(&u->ring, &cqe, &ts);
	if (st < 0 && st != -ETIME && st != -EINTR && st != -EAGAIN)
		return st;
	return take_ended(u, done, max, &kicked);
}

static void kick(struct kv_io *io)
{
	uint64_t one = 1;
	ssize_t n = write(((struct uring *)io)->event_fd, &one, sizeof one);
	(void)n; /* it can only fail when it is full, and then the reader is awake */
}

static void destroy(struct kv_io *io)
{
	struct uring *u = (struct uring *)io;
	io_uring_queue_exit(&u->ring);
	close(u->event_fd);
	free(u);
}

struct kv_io *kv_io_create_uring(void)
{
	static const struct kv_io_ops ops = {"io_uring", allocate, attach, submit, reap, kick, destroy};
	struct uring *u = calloc(1, sizeof *u);
	if (!u)
		return NULL;
	u->base.ops = &ops;
	u->event_fd = eventfd(0, EFD_CLOEXEC);
	if (u->event_fd < 0)
		goto fail;
	if (io_uring_queue_init(KV_IO_DEPTH * 2, &u->ring, 0) != 0)
		goto fail_ring;
	return &u->base;

fail_ring:
	close(u->event_fd);
fail:
	free(u);
	return NULL;
}

#else

struct kv_io *kv_io_create_uring(void)
{
	return NULL;
}

#endif
