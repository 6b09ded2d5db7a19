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
	/* pauses before sleeping: some 50 us, longer than the gap between two operations of a step */
	SPINS = 4000,
	/* a piece is this part of a thread's share of what is left: one that is held up does not hold up all */
	SHARE_PARTS = 3,
};

struct worker {
	struct threads *pool;
	pthread_t thread;
	int index;
};

struct section {
	int64_t n, grain, parts;
	threads_range_fn *fn;
	void *arg;
};

/*
 * The gate counts the workers inside a section, and is closed while there is none. A worker may be late and enter the
 * section after the one that woke it, or the same one twice: either is harmless, since all it does there is to take
 * pieces while they last. Words written by different threads sit in cache lines of their own.
 */
enum { GATE_CLOSED = 1u << 30 };

struct threads {
	int n;
	int n_started;
	struct worker *workers; /* [n - 1] */
	struct section section; /* the owner writes it while the gate is closed and nobody is inside */
	_Alignas(64) _Atomic uint32_t gate;
	_Atomic bool owner_sleeps;
	_Alignas(64) _Atomic uint32_t round; /* counts sections: a change means work, or the end */
	_Atomic bool stop;
	_Alignas(64) _Atomic uint32_t sleepers; /* workers inside, or about to enter, a wait on `round` */
	_Alignas(64) _Atomic int64_t next;      /* first item that nobody has taken */
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

static uint32_t wait_for_round(struct threads *t, uint32_t seen)
{
	uint32_t now;
	for (int i = 0; i < SPINS; i++) {
		now = atomic_load_explicit(&t->round, memory_order_acquire);
		if (now != seen)
			return now;
		relax();
	}
	atomic_fetch_add(&t->sleepers, 1);
	while ((now = atomic_load(&t->round)) == seen)
		futex_wait(&t->round, seen);
	atomic_fetch_sub(&t->sleepers, 1);
	return now;
}

/*
 * Large pieces first, which suit the memory and leave little to meet about, then ever smaller ones, so that all end
 * together.
 */
static void take_pieces(struct threads *t, int thread)
{
	const struct section *s = &t->section;
	int64_t begin = atomic_load_explicit(&t->next, memory_order_relaxed);
	while (begin < s->n) {
		int64_t piece = (s->n - begin) / s->parts;
		piece = piece > s->grain ? piece : s->grain;
		int64_t end = piece < s->n - begin ? begin + piece : s->n;
		if (!atomic_compare_exchange_weak_explicit(&t->next, &begin, end, memory_order_relaxed,
		                                           memory_order_relaxed))
			continue;
		s->fn(s->arg, begin, end, thread);
		begin = atomic_load_explicit(&t->next, memory_order_relaxed);
	}
}

static bool enter(struct threads *t)
{
	uint32_t gate = atomic_load_explicit(&t->gate, memory_order_relaxed);
	while (!(gate & GATE_CLOSED))
		if (atomic_compare_exchange_weak_explicit(&t->gate, &gate, gate + 1, memory_order_acquire,
		                                          memory_order_relaxed))
			return true;
	return false;
}

static void leave(struct threads *t)
{
	/* The owner announces its sleep before it looks at the gate again, so one of the two sees the other. */
	if (atomic_fetch_sub(&t->gate, 1) == GATE_CLOSED + 1 && atomic_load(&t->owner_sleeps))
		futex_wake(&t->gate);
}

static void *worker_main(void *arg)
{
	struct worker *w = arg;
	struct threads *t = w->pool;
	uint32_t seen = 0;
	for (;;) {
		seen = wait_for_round(t, seen);
		if (atomic_load_explicit(&t->stop, memory_order_acquire))
			return NULL;
		if (enter(t)) {
			take_pieces(t, w->index);
			leave(t);
		}
	}
}

static void announce(struct threads *t)
{
	atomic_fetch_add(&t->round, 1);
	if (atomic_load(&t->sleepers))
		futex_wake(&t->round);
}

/* Closes the gate and waits for those inside. */
static void close_section(struct threads *t)
{
	uint32_t gate = atomic_fetch_or(&t->gate, GATE_CLOSED) | GATE_CLOSED;
	for (int i = 0; gate != GATE_CLOSED && i < SPINS; i++) {
		relax();
		gate = atomic_load_explicit(&t->gate, memory_order_acquire);
	}
	if (gate == GATE_CLOSED)
		return;
	atomic_store(&t->owner_sleeps, true);
	while ((gate = atomic_load(&t->gate)) != GATE_CLOSED)
		futex_wait(&t->gate, gate);
	atomic_store(&t->owner_sleeps, false);
}

enum status threads_create(int n_threads, struct threads **out)
{
	struct threads *t = aligned_alloc(64, sizeof *t);
	if (!t)
		return STATUS_NOMEM;
	*t = (struct threads){.n = n_threads < 1 ? 1 : n_threads, .gate = GATE_CLOSED};
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
	announce(t);
	for (int i = 0; i < t->n_started; i++)
		pthread_join(t->workers[i].thread, NULL);
	free(t->workers);
	free(t);
}

int threads_count(const struct threads *t)
{
	return t->n;
}

void threads_for(struct threads *t, int64_t n, int64_t grain, threads_range_fn *fn, void *arg)
{
	if (n <= 0)
		return;
	grain = grain > 1 ? grain : 1;
	if (t->n == 1 || grain >= n) {
		fn(arg, 0, n, 0);
		return;
	}
	t->section = (struct section){n, grain, SHARE_PARTS * (int64_t)t->n, fn, arg};
	atomic_store_explicit(&t->next, 0, memory_order_relaxed);
	atomic_store_explicit(&t->gate, 0, memory_order_release);
	announce(t);
	take_pieces(t, 0);
	close_section(t);
}
