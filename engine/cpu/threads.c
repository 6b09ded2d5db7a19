#include "engine/cpu/threads.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
	SPINS = 4000,        /* pauses before sleeping: some 50 us, longer than the gap between two operations of a step */
	PIECES_PER_THREAD = 8, /* how finely threads_for() cuts, so that a thread that was held up does not hold up all */
};

struct worker {
	struct threads *pool;
	pthread_t thread;
	int index;
};

/* Words written by different threads sit in cache lines of their own. */
struct threads {
	int n;
	int n_started;
	struct worker *workers; /* [n - 1] */
	threads_fn *fn;
	void *arg;
	_Alignas(64) _Atomic uint32_t section; /* counts sections: a change means work */
	_Alignas(64) _Atomic uint32_t running; /* workers that have not finished the section */
	_Atomic bool stop;
	_Alignas(64) _Atomic uint32_t sleepers; /* workers inside, or about to enter, a wait on `section` */
	_Atomic bool owner_sleeps;
	_Alignas(64) _Atomic int64_t next; /* of threads_for() */
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static uint32_t wait_for_section(struct threads *t, uint32_t seen)
{
	uint32_t now;
	for (int i = 0; i < SPINS; i++) {
		now = atomic_load_explicit(&t->section, memory_order_acquire);
		if (now != seen)
			return now;
		relax();
	}
	atomic_fetch_add(&t->sleepers, 1);
	while ((now = atomic_load(&t->section)) == seen)
		futex_wait(&t->section, seen);
	atomic_fetch_sub(&t->sleepers, 1);
	return now;
}

static void *worker_main(void *arg)
{
	struct worker *w = arg;
	struct threads *t = w->pool;
	uint32_t seen = 0;
	for (;;) {
		seen = wait_for_section(t, seen);
		if (atomic_load_explicit(&t->stop, memory_order_acquire))
			return NULL;
		t->fn(t->arg, w->index);
		/* The owner announces its sleep before it looks at `running` again, so one of the two sees the other. */
		if (atomic_fetch_sub(&t->running, 1) == 1 && atomic_load(&t->owner_sleeps))
			futex_wake(&t->running);
	}
}

static void start_section(struct threads *t)
{
	atomic_fetch_add(&t->section, 1);
	if (atomic_load(&t->sleepers))
		futex_wake(&t->section);
}

static void wait_for_workers(struct threads *t)
{
	uint32_t left;
	for (int i = 0; i < SPINS; i++) {
		if (atomic_load_explicit(&t->running, memory_order_acquire) == 0)
			return;
		relax();
	}
	atomic_store(&t->owner_sleeps, true);
	while ((left = atomic_load(&t->running)) != 0)
		futex_wait(&t->running, left);
	atomic_store(&t->owner_sleeps, false);
}

enum status threads_create(int n_threads, struct threads **out)
{
	struct threads *t = aligned_alloc(64, sizeof *t);
	if (!t)
		return STATUS_NOMEM;
	*t = (struct threads){.n = n_threads < 1 ? 1 : n_threads};
	t->workers = calloc((size_t)t->n, sizeof *t->workers);
	if (!t->workers)
		goto fail;
	for (int i = 0; i < t->n - 1; i++) {
		t->workers[i] = (struct worker){.pool = t, .index = i + 1};
		if (pthread_create(&t->workers[i].thread, NULL, worker_main, &t->workers[i]) != 0)
			goto fail;
		t->n_started++;
	}
	*out = t;
	return STATUS_OK;

fail:
	threads_destroy(t);
	return STATUS_NOMEM;
}

void threads_destroy(struct threads *t)
{
	if (!t)
		return;
	atomic_store(&t->stop, true);
	start_section(t);
	for (int i = 0; i < t->n_started; i++)
		pthread_join(t->workers[i].thread, NULL);
	free(t->workers);
	free(t);
}

int threads_count(const struct threads *t)
{
	return t->n;
}

void threads_run(struct threads *t, threads_fn *fn, void *arg)
{
	if (t->n == 1) {
		fn(arg, 0);
		return;
	}
	t->fn = fn;
	t->arg = arg;
	atomic_store_explicit(&t->running, (uint32_t)(t->n - 1), memory_order_relaxed);
	start_section(t);
	fn(arg, 0);
	wait_for_workers(t);
}

struct range {
	struct threads *pool;
	int64_t n, piece;
	threads_range_fn *fn;
	void *arg;
};

static void run_range(void *arg, int thread)
{
	struct range *r = arg;
	for (;;) {
		int64_t begin = atomic_fetch_add_explicit(&r->pool->next, r->piece, memory_order_relaxed);
		if (begin >= r->n)
			return;
		r->fn(r->arg, begin, begin + r->piece < r->n ? begin + r->piece : r->n, thread);
	}
}

void threads_for(struct threads *t, int64_t n, int64_t grain, threads_range_fn *fn, void *arg)
{
	if (n <= 0)
		return;
	int64_t piece = n / ((int64_t)t->n * PIECES_PER_THREAD);
	piece = piece > grain ? piece : grain;
	piece = piece > 1 ? piece : 1;
	if (t->n == 1 || piece >= n) {
		fn(arg, 0, n, 0);
		return;
	}
	struct range r = {.pool = t, .n = n, .piece = piece, .fn = fn, .arg = arg};
	atomic_store_explicit(&t->next, 0, memory_order_relaxed);
	threads_run(t, run_range, &r);
}
