#include "server/loop.h"

#include <stdlib.h>

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
