/*
 * The libuv loop thread: owns every socket, timer and handle. A thin layer so that files which do not speak libuv can
 * have timers and deferred calls.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "engine/base/status.h"

struct loop_timer;

/* Calls cb(arg) every repeat_ms after first_ms (repeat_ms 0: once). NULL when there is no memory. */
struct loop_timer *loop_timer_start(uv_loop_t *loop, uint64_t first_ms, uint64_t repeat_ms, void (*cb)(void *arg),
				    void *arg);
/* Stops and frees it (the handle closes asynchronously); allowed inside its own callback. NULL is allowed. */
void loop_timer_stop(struct loop_timer *t);

/*
 * realloc() for libraries that do not survive a failure of it: tries for a fifth of a second before it gives up. What
 * they ask for is little, and other threads free.
 */
void *loop_realloc(void *old, size_t n);
/* Makes libuv use it; before any other call of libuv. */
void loop_be_patient(void);

/*
 * Lets libuv take the memory for descriptors up to n now. Its table of them grows with the highest one that is polled,
 * and when there is no memory for that it aborts the process (maybe_resize() in src/unix/core.c). NOMEM when there is
 * none now.
 */
enum status loop_reserve_descriptors(uv_loop_t *loop, int n);
