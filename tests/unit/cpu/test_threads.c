/* The compute threads: every piece of work is done once, whatever its size, and idle threads cost nothing. */
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "engine/cpu/threads.h"
#include "tests/unit/unit.h"

enum { ITEMS = 5000 };

struct tally {
	_Atomic int done[ITEMS];
	_Atomic int calls[16];
};

static void count_items(void *arg, int64_t begin, int64_t end, int thread)
{
	struct tally *t = arg;
	atomic_fetch_add(&t->calls[thread], 1);
	for (int64_t i = begin; i < end; i++)
		atomic_fetch_add(&t->done[i], 1);
}

static void a_range_is_covered_without_gap_or_overlap(void **state)
{
	(void)state;
	const int64_t sizes[] = {0, 1, 2, 7, 64, 1000, ITEMS}, grains[] = {-1, 0, 1, 3, 100, 10000};
	struct threads *pool;
	assert_int_equal(threads_create(3, &pool), STATUS_OK);
	for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
		for (size_t g = 0; g < sizeof grains / sizeof grains[0]; g++) {
			struct tally t = {0};
			threads_for(pool, sizes[s], grains[g], count_items, &t);
			for (int64_t i = 0; i < ITEMS; i++)
				assert_int_equal(t.done[i], i < sizes[s]);
		}
	threads_destroy(pool);
}

static void small_work_stays_with_the_caller(void **state)
{
	(void)state;
	struct tally t = {0};
	struct threads *pool;
	assert_int_equal(threads_create(4, &pool), STATUS_OK);
	threads_for(pool, 50, 50, count_items, &t);
	assert_int_equal(t.calls[0], 1);
	assert_int_equal(t.calls[1] + t.calls[2] + t.calls[3], 0);
	threads_destroy(pool);
}

/* Each item waits until all have begun, which they only do if each has a thread of its own. */
static void meet(void *arg, int64_t begin, int64_t end, int thread)
{
	struct tally *t = arg;
	atomic_fetch_add(&t->calls[thread], 1);
	atomic_fetch_add(&t->done[0], (int)(end - begin));
	while (atomic_load(&t->done[0]) < 4)
		sched_yield();
}

static void all_threads_take_part(void **state)
{
	(void)state;
	struct threads *pool;
	assert_int_equal(threads_create(4, &pool), STATUS_OK);
	assert_int_equal(threads_count(pool), 4);
	for (int round = 0; round < 20; round++) {
		struct tally t = {0};
		threads_for(pool, 4, 1, meet, &t);
		for (int i = 0; i < 4; i++)
			assert_int_equal(t.calls[i], 1);
	}
	threads_destroy(pool);
}

static void many_short_sections_lose_nothing(void **state)
{
	(void)state;
	struct threads *pool;
	struct tally t = {0};
	assert_int_equal(threads_create(3, &pool), STATUS_OK);
	for (int round = 0; round < 20000; round++)
		threads_for(pool, 5, 1, count_items, &t);
	for (int i = 0; i < 5; i++)
		assert_int_equal(t.done[i], 20000);
	threads_destroy(pool);
}

struct held_up {
	_Atomic int done, held; /* items that are through, and those of the piece that is not */
	_Atomic bool taken;
};

/*
 * The first piece that a worker takes is held up until all other items are through, as when something else has its
 * core.
 */
static void hold_first_piece(void *arg, int64_t begin, int64_t end, int thread)
{
	struct held_up *h = arg;
	if (thread > 0 && !atomic_exchange(&h->taken, true)) {
		atomic_store(&h->held, (int)(end - begin));
		while (atomic_load(&h->done) < ITEMS - (int)(end - begin))
			sched_yield();
	}
	/* The others wait for a piece to be held before they go through the work, so that there is one. */
	while (!atomic_load(&h->taken))
		sched_yield();
	atomic_fetch_add(&h->done, (int)(end - begin));
}

/* With shares that are fixed in advance this would never end. */
static void a_thread_that_is_held_up_holds_up_its_piece_only(void **state)
{
	(void)state;
	for (int n_threads = 2; n_threads <= 4; n_threads++) {
		struct threads *pool;
		struct held_up h = {0};
		assert_int_equal(threads_create(n_threads, &pool), STATUS_OK);
		threads_for(pool, ITEMS, 1, hold_first_piece, &h);
		assert_int_equal(h.done, ITEMS);
		assert_true(h.held <= ITEMS / n_threads / 3 + 1); /* and that is a third of its share at most */
		threads_destroy(pool);
	}
}

static int64_t cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

static void idle_threads_sleep(void **state)
{
	(void)state;
	struct tally t = {0};
	struct threads *pool;
	assert_int_equal(threads_create(4, &pool), STATUS_OK);
	threads_for(pool, 4, 1, meet, &t);
	/* Real time must pass for threads to fall asleep: the one thing here that no clock can be injected into. */
	struct timespec wait = {0, 20000000};
	nanosleep(&wait, NULL);
	int64_t before = cpu_ns();
	wait.tv_nsec = 100000000;
	nanosleep(&wait, NULL);
	assert_true(cpu_ns() - before < 20000000);
	t = (struct tally){0};
	threads_for(pool, 4, 1, meet, &t); /* and wake again */
	assert_int_equal(t.done[0], 4);
	threads_destroy(pool);
}

static void there_is_at_least_one_core(void **state)
{
	(void)state;
	assert_in_range(threads_default_count(), 1, 4096);
}

UNIT_MAIN(cmocka_unit_test(all_threads_take_part), cmocka_unit_test(many_short_sections_lose_nothing),
          cmocka_unit_test(a_range_is_covered_without_gap_or_overlap),
          cmocka_unit_test(small_work_stays_with_the_caller),
          cmocka_unit_test(a_thread_that_is_held_up_holds_up_its_piece_only), cmocka_unit_test(idle_threads_sleep),
          cmocka_unit_test(there_is_at_least_one_core))
