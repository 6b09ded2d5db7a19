#include "server/loop.h"

#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct loop_timer {
	uv_timer_t handle;
	void (*cb)(void *arg);
	void *arg;
};

static void on_timer(uv_timer_t *handle)
{
	struct loop_timer *t = handle->data;
	t->cb(t->arg);
}

static void on_closed(uv_handle_t *handle)
{
	free(handle->data);
}

struct loop_timer *loop_timer_start(uv_loop_t *loop, uint64_t first_ms, uint64_t repeat_ms, void (*cb)(void *arg),
				    void *arg)
{
	struct loop_timer *t = calloc(1, sizeof *t);
	if (!t)
		return NULL;
	t->cb = cb;
	t->arg = arg;
	uv_timer_init(loop, &t->handle); /* cannot fail */
	t->handle.data = t;
	uv_timer_start(&t->handle, on_timer, first_ms, repeat_ms); /* fails only on a closing handle */
	return t;
}

void loop_timer_stop(struct loop_timer *t)
{
	if (t)
		uv_close((uv_handle_t *)&t->handle, on_closed);
}

void *loop_realloc(void *old, size_t n)
{
	enum { PATIENCE_NS = 200000000 };
	void *p = realloc(old, n);
	for (uint64_t until = p ? 0 : uv_hrtime() + PATIENCE_NS; !p && uv_hrtime() < until; p = realloc(old, n))
		sched_yield();
	return p;
}

static void *patient_malloc(size_t n)
{
	return loop_realloc(NULL, n ? n : 1);
}

static void *patient_calloc(size_t n, size_t size)
{
	size_t bytes;
	void *p = __builtin_mul_overflow(n, size, &bytes) ? NULL : patient_malloc(bytes);
	return p ? memset(p, 0, bytes) : NULL;
}

void loop_be_patient(void)
{
	uv_replace_allocator(patient_malloc, loop_realloc, patient_calloc, free);
}

static void on_poll(uv_poll_t *handle, int status, int events)
{
	(void)handle;
	(void)status;
	(void)events;
}

static void on_reserved(uv_handle_t *handle)
{
	free(handle);
}

/* A high descriptor is polled for a moment; the table does not shrink. */
enum status loop_reserve_descriptors(uv_loop_t *loop, int n)
{
	uv_poll_t *poll = malloc(sizeof *poll);
	void *table = malloc((size_t)n * 2 * sizeof(void *)); /* the size is rounded up to a power of two */
	int low = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), high = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, n - 1);
	enum status status = poll && table ? STATUS_OK : STATUS_NOMEM;
	free(table);
	/* A limit on descriptors below n is no failure: there will be none above it. */
	if (status == STATUS_OK && high >= 0 && uv_poll_init(loop, poll, high) == 0) {
		uv_poll_start(poll, UV_READABLE, on_poll);
		uv_close((uv_handle_t *)poll, on_reserved);
	} else {
		free(poll);
	}
	if (high >= 0)
		close(high);
	if (low >= 0)
		close(low);
	return status;
}
