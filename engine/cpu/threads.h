/*
 * The compute threads of a CPU backend. A parallel section cuts a range of work into pieces and returns when all are
 * done; the caller takes pieces like the others. Between sections the others spin for a moment, so that the next
 * operation of a step starts within a microsecond, and then sleep.
 *
 * A section waits for pieces, not for threads: one that the system runs late, because something else has its core, is
 * not waited for unless it holds a piece.
 *
 * Sections do not nest, and one thread, the owner, starts them.
 */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#include "engine/base/status.h"

struct threads;

/* n_threads >= 1, the caller included. NOMEM when the threads cannot be started. */
enum status threads_create(int n_threads, struct threads **out);
void threads_destroy(struct threads *t); /* NULL is allowed */
int threads_count(const struct threads *t);

typedef void threads_range_fn(void *arg, int64_t begin, int64_t end, int thread);

/*
 * Cuts [0, n) into pieces of at least `grain` and hands them to the threads as they come free; runs in the caller alone
 * when there is only one piece. Which thread gets which piece changes from run to run, so results must not depend on
 * it.
 */
void threads_for(struct threads *t, int64_t n, int64_t grain, threads_range_fn *fn, void *arg);

/*
 * Physical cores this process may use: affinity, sibling hardware threads counted once, and the cgroup's CPU quota. At
 * least 1.
 */
int threads_default_count(void);
