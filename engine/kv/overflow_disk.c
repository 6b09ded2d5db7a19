/*
 * Threads. All of struct overflow_disk that changes is under `lock`, but for the content of buffers: that belongs to
 * whom the buffer's state says. A sum is written before its slot's buffer is settled, and read after.
 */
#include "engine/kv/overflow_disk.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/hash.h"
#include "engine/base/log.h"

enum {
	ALIGN = 4096,
	N_READ = 6,   /* blocks that are there or on their way */
	N_WRITE = 2,  /* slots that are being written */
	READERS = 2,
	THREADS = 1 + READERS,
	DEFAULT_STALL_MS = 5000,
	JOIN_SECONDS = 5,
	PATH_BYTES = 4200,
	NO_SLOT = -1,
};

enum read_state { READ_IDLE, READ_QUEUED, READ_BUSY, READ_READY };

struct read_buffer {
	char *data;
	enum read_state state;
	uint64_t item; /* QUEUED and later */
	size_t block;  /* which block of the file that is */
};

enum write_state { WRITE_IDLE, WRITE_FILLING, WRITE_QUEUED, WRITE_DONE };

struct write_buffer {
	char *data;
	enum write_state state;
	int32_t slot;   /* NO_SLOT: nobody wants it any more */
	int32_t target; /* QUEUED: where it goes */
	uint64_t order;
};

struct overflow_disk {
	int fd;
	int32_t n_layer;
	size_t block_bytes, stride;
	int64_t stall_ms;
	char *memory;
	uint64_t *sums; /* [n_slots][n_layer] */

	pthread_mutex_t lock;
	pthread_cond_t work, done;
	pthread_t thread[THREADS];
	int n_threads;
	bool stop;
	const char *failed;
	struct read_buffer read[N_READ];
	struct write_buffer write[N_WRITE];
	uint64_t last_order;
	/* Of the step: item first_item + layer * n_order + rank is a block of order[rank]. */
	int32_t *order; /* [n_order], room for all slots */
	int32_t n_order;
	uint64_t first_item, next_item; /* items below next_item have been asked for */
	struct overflow_disk_stats stats;
};

size_t overflow_disk_stride(size_t block_bytes)
{
	return (block_bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1);
}

/* ---- Failure ---- */

/* Under lock. */
static void fail(struct overflow_disk *d, const char *reason, int error)
{
	if (d->failed)
		return;
	d->failed = reason;
	log_msg(LOG_WARN, "kv_overflow_off", "conversations larger than the KV cache have no disk from now on: %s%s%s",
	        reason, error ? ": " : "", error ? strerror(error) : "");
	pthread_cond_broadcast(&d->done);
}

/* ---- The threads ---- */

/* All n bytes at data; 0 or an errno. Direct transfers go on at whole blocks. */
static int move(const struct overflow_disk *d, bool write, char *data, size_t n, uint64_t at)
{
	size_t moved = 0;
	while (moved < n) {
		ssize_t k = write ? pwrite(d->fd, data + moved, n - moved, (off_t)(at + moved))
		                  : pread(d->fd, data + moved, n - moved, (off_t)(at + moved));
		if (k < 0 && errno == EINTR)
			continue;
		if (k < 0)
			return errno;
		if (k < ALIGN)
			return EIO;
		moved += (size_t)k;
		if (moved < n)
			moved -= moved % ALIGN;
	}
	return 0;
}

static struct write_buffer *next_write(struct overflow_disk *d)
{
	struct write_buffer *next = NULL;
	for (int i = 0; i < N_WRITE; i++) {
		struct write_buffer *w = &d->write[i];
		if (!d->failed && w->state == WRITE_QUEUED && (!next || w->order < next->order))
			next = w;
	}
	return next;
}

static struct read_buffer *next_read(struct overflow_disk *d)
{
	struct read_buffer *next = NULL;
	for (int i = 0; i < N_READ; i++) {
		struct read_buffer *r = &d->read[i];
		if (!d->failed && r->state == READ_QUEUED && (!next || r->item < next->item))
			next = r;
	}
	return next;
}

static void write_one(struct overflow_disk *d, struct write_buffer *w)
{
	size_t first = (size_t)w->target * (size_t)d->n_layer, bytes = (size_t)d->n_layer * d->stride;
	pthread_mutex_unlock(&d->lock);
	for (int32_t layer = 0; layer < d->n_layer; layer++)
		d->sums[first + (size_t)layer] =
			hash64(w->data + (size_t)layer * d->stride, d->block_bytes, first + (size_t)layer);
	int error = move(d, true, w->data, bytes, (uint64_t)first * d->stride);
	pthread_mutex_lock(&d->lock);
	if (error)
		fail(d, "a write failed", error);
	else
		d->stats.bytes_written += bytes;
	w->state = WRITE_DONE;
	pthread_cond_broadcast(&d->done);
}

static void read_one(struct overflow_disk *d, struct read_buffer *r)
{
	size_t block = r->block;
	r->state = READ_BUSY;
	pthread_mutex_unlock(&d->lock);
	int error = move(d, false, r->data, d->stride, (uint64_t)block * d->stride);
	bool good = !error && hash64(r->data, d->block_bytes, block) == d->sums[block];
	pthread_mutex_lock(&d->lock);
	if (error)
		fail(d, "a read failed", error);
	else if (!good)
		fail(d, "what was read is not what was written", 0);
	else
		d->stats.bytes_read += d->stride;
	r->state = good ? READ_READY : READ_IDLE;
	pthread_cond_broadcast(&d->done);
}

static void *writer_main(void *arg)
{
	struct overflow_disk *d = arg;
	pthread_mutex_lock(&d->lock);
	while (!d->stop) {
		struct write_buffer *w = next_write(d);
		if (w)
			write_one(d, w);
		else
			pthread_cond_wait(&d->work, &d->lock);
	}
	pthread_mutex_unlock(&d->lock);
	return NULL;
}

static void *reader_main(void *arg)
{
	struct overflow_disk *d = arg;
	pthread_mutex_lock(&d->lock);
	while (!d->stop) {
		struct read_buffer *r = next_read(d);
		if (r)
			read_one(d, r);
		else
			pthread_cond_wait(&d->work, &d->lock);
	}
	pthread_mutex_unlock(&d->lock);
	return NULL;
}

/* ---- The worker's side; what follows is under lock where it is static ---- */

static struct timespec stall_end(const struct overflow_disk *d)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	t.tv_sec += d->stall_ms / 1000;
	t.tv_nsec += d->stall_ms % 1000 * 1000000;
	if (t.tv_nsec >= 1000000000) {
		t.tv_sec++;
		t.tv_nsec -= 1000000000;
	}
	return t;
}

/* Until a transfer ends; false, and it has failed, when that takes too long. */
static bool wait_done(struct overflow_disk *d, const struct timespec *until)
{
	if (pthread_cond_timedwait(&d->done, &d->lock, until) == ETIMEDOUT)
		fail(d, "a transfer takes too long", 0);
	return !d->failed;
}

static struct write_buffer *buffer_of(const struct overflow_disk *d, int32_t slot)
{
	for (int i = 0; i < N_WRITE; i++) {
		const struct write_buffer *w = &d->write[i];
		if (w->state != WRITE_IDLE && w->slot == slot)
			return (struct write_buffer *)w;
	}
	return NULL;
}

char *overflow_disk_begin_write(struct overflow_disk *d, int32_t slot)
{
	struct timespec until = stall_end(d);
	char *data = NULL;
	pthread_mutex_lock(&d->lock);
	while (!data && !d->failed) {
		for (int i = 0; i < N_WRITE && !data; i++) {
			struct write_buffer *w = &d->write[i];
			if (w->state != WRITE_IDLE && w->state != WRITE_DONE)
				continue;
			*w = (struct write_buffer){.data = w->data, .state = WRITE_FILLING, .slot = slot};
			data = w->data;
		}
		if (!data && !wait_done(d, &until))
			break;
	}
	pthread_mutex_unlock(&d->lock);
	return data;
}

void overflow_disk_end_write(struct overflow_disk *d, int32_t slot)
{
	pthread_mutex_lock(&d->lock);
	struct write_buffer *w = buffer_of(d, slot);
	w->target = slot;
	w->order = ++d->last_order;
	w->state = WRITE_QUEUED;
	pthread_cond_broadcast(&d->work);
	pthread_mutex_unlock(&d->lock);
}

const char *overflow_disk_buffer(const struct overflow_disk *d, int32_t slot)
{
	pthread_mutex_lock((pthread_mutex_t *)&d->lock);
	const struct write_buffer *w = buffer_of(d, slot);
	pthread_mutex_unlock((pthread_mutex_t *)&d->lock);
	return w ? w->data : NULL;
}

void overflow_disk_settle(struct overflow_disk *d)
{
	pthread_mutex_lock(&d->lock);
	for (int i = 0; i < N_WRITE; i++) {
		if (d->write[i].state == WRITE_DONE)
			d->write[i].state = WRITE_IDLE;
	}
	pthread_mutex_unlock(&d->lock);
}

void overflow_disk_forget(struct overflow_disk *d, int32_t slot)
{
	pthread_mutex_lock(&d->lock);
	struct write_buffer *w = buffer_of(d, slot);
	if (w)
		w->slot = NO_SLOT;
	if (w && w->state == WRITE_FILLING)
		w->state = WRITE_IDLE;
	pthread_mutex_unlock(&d->lock);
}

/*
 * Asks for the blocks from `item` on for which there are buffers; one that is being read for a block that was left out
 * is waited for later. A step that is run again begins with blocks that are no more in their buffers.
 */
static void ask_from(struct overflow_disk *d, uint64_t item)
{
	if (item < d->next_item && d->read[item % N_READ].item != item)
		d->next_item = item;
	uint64_t end = d->first_item + (uint64_t)d->n_order * (uint64_t)d->n_layer;
	uint64_t i = item > d->next_item ? item : d->next_item;
	for (; i < end && i < item + N_READ; i++) {
		struct read_buffer *r = &d->read[i % N_READ];
		uint64_t at = i - d->first_item;
		if (r->state == READ_BUSY)
			break;
		r->item = i;
		r->block = (size_t)d->order[at % (uint64_t)d->n_order] * (size_t)d->n_layer +
		           (size_t)(at / (uint64_t)d->n_order);
		r->state = READ_QUEUED;
		pthread_cond_broadcast(&d->work);
	}
	d->next_item = i;
}

void overflow_disk_schedule(struct overflow_disk *d, const int32_t *slots, int32_t n)
{
	pthread_mutex_lock(&d->lock);
	d->first_item += (uint64_t)d->n_order * (uint64_t)d->n_layer;
	d->next_item = d->first_item;
	for (int i = 0; i < N_READ; i++) {
		if (d->read[i].state == READ_QUEUED)
			d->read[i].state = READ_IDLE;
	}
	memcpy(d->order, slots, (size_t)n * sizeof *slots);
	d->n_order = n;
	ask_from(d, d->first_item);
	pthread_mutex_unlock(&d->lock);
}

const char *overflow_disk_get(struct overflow_disk *d, int32_t layer, int32_t rank)
{
	struct timespec until = stall_end(d);
	uint64_t item = d->first_item + (uint64_t)layer * (uint64_t)d->n_order + (uint64_t)rank;
	struct read_buffer *r = &d->read[item % N_READ];
	bool waited = false;
	pthread_mutex_lock(&d->lock);
	ask_from(d, item);
	while (!d->failed && !(r->state == READ_READY && r->item == item)) {
		waited = true;
		if (wait_done(d, &until))
			ask_from(d, item);
	}
	d->stats.waits += waited;
	const char *data = d->failed ? NULL : r->data;
	pthread_mutex_unlock(&d->lock);
	return data;
}

const char *overflow_disk_failed(struct overflow_disk *d)
{
	pthread_mutex_lock(&d->lock);
	const char *reason = d->failed;
	pthread_mutex_unlock(&d->lock);
	return reason;
}

void overflow_disk_stats(struct overflow_disk *d, struct overflow_disk_stats *out)
{
	pthread_mutex_lock(&d->lock);
	*out = d->stats;
	pthread_mutex_unlock(&d->lock);
}

/* ---- Beginning and end ---- */

/* A file of that many bytes that nobody finds by a name; past the page cache where that is possible. */
static enum status open_file(struct overflow_disk *d, const char *dir, uint64_t bytes, struct error *err)
{
	char path[PATH_BYTES];
	const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
	snprintf(path, sizeof path, "%.4000s/kvasir-overflow", dir);
	if (mkdir(dir, 0700) != 0 && errno != EEXIST)
		return error_set(err, STATUS_IO, "cannot make the directory %s: %s", dir, strerror(errno));
	unlink(path); /* of a process that was killed in between; one that lives needs the name no more */
	d->fd = open(path, flags | O_DIRECT, 0600);
	if (d->fd < 0 && errno == EINVAL) {
		unlink(path);
		d->fd = open(path, flags, 0600);
	}
	if (d->fd < 0)
		return error_set(err, STATUS_IO, "cannot open %s: %s", path, strerror(errno));
	unlink(path);
	int e = posix_fallocate(d->fd, 0, (off_t)bytes);
	if (e != 0)
		return error_set(err, STATUS_IO, "cannot give a file in %s %llu bytes: %s", dir,
		                 (unsigned long long)bytes, strerror(e));
	return STATUS_OK;
}

static enum status make_buffers(struct overflow_disk *d, int32_t n_slots, struct error *err)
{
	size_t written = (size_t)d->n_layer * d->stride, bytes = N_READ * d->stride + N_WRITE * written;
	d->memory = aligned_alloc(ALIGN, bytes);
	d->sums = calloc((size_t)n_slots * (size_t)d->n_layer, sizeof *d->sums);
	d->order = calloc((size_t)n_slots, sizeof *d->order);
	if (!d->memory || !d->sums || !d->order)
		return error_set(err, STATUS_NOMEM, "no memory for conversations on disk");
	memset(d->memory, 0, bytes);
	for (int i = 0; i < N_READ; i++)
		d->read[i].data = d->memory + (size_t)i * d->stride;
	for (int i = 0; i < N_WRITE; i++)
		d->write[i].data = d->memory + N_READ * d->stride + (size_t)i * written;
	return STATUS_OK;
}

static enum status start_threads(struct overflow_disk *d, struct error *err)
{
	for (; d->n_threads < THREADS; d->n_threads++) {
		if (pthread_create(&d->thread[d->n_threads], NULL, d->n_threads == 0 ? writer_main : reader_main, d) !=
		    0)
			return error_set(err, STATUS_NOMEM, "no thread for conversations on disk");
	}
	return STATUS_OK;
}

enum status overflow_disk_create(const struct overflow_disk_options *o, struct overflow_disk **out, struct error *err)
{
	struct overflow_disk *d = calloc(1, sizeof *d);
	pthread_condattr_t attr;
	if (!d)
		return error_set(err, STATUS_NOMEM, "no memory for conversations on disk");
	d->fd = -1;
	d->n_layer = o->n_layer;
	d->block_bytes = o->block_bytes;
	d->stride = overflow_disk_stride(o->block_bytes);
	d->stall_ms = o->stall_ms > 0 ? o->stall_ms : DEFAULT_STALL_MS;
	pthread_mutex_init(&d->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&d->work, &attr);
	pthread_cond_init(&d->done, &attr);
	pthread_condattr_destroy(&attr);
	enum status st = make_buffers(d, o->n_slots, err);
	if (st == STATUS_OK)
		st = open_file(d, o->dir, (uint64_t)o->n_slots * (uint64_t)d->n_layer * d->stride, err);
	if (st == STATUS_OK)
		st = start_threads(d, err);
	if (st != STATUS_OK) {
		overflow_disk_destroy(d);
		return st;
	}
	*out = d;
	return STATUS_OK;
}

void overflow_disk_destroy(struct overflow_disk *d)
{
	struct timespec until;
	if (!d)
		return;
	pthread_mutex_lock(&d->lock);
	d->stop = true;
	pthread_cond_broadcast(&d->work);
	pthread_mutex_unlock(&d->lock);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += JOIN_SECONDS;
	for (int i = 0; i < d->n_threads; i++) {
		if (pthread_timedjoin_np(d->thread[i], NULL, &until) != 0) {
			log_msg(LOG_WARN, "kv_overflow",
			        "the disk with conversations larger than the KV cache hangs; it is left behind");
			return;
		}
	}
	if (d->fd >= 0)
		close(d->fd);
	pthread_cond_destroy(&d->work);
	pthread_cond_destroy(&d->done);
	pthread_mutex_destroy(&d->lock);
	free(d->memory);
	free(d->sums);
	free(d->order);
	free(d);
}
