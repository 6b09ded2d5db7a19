#include "engine/base/clock.h"

#include <time.h>

static int64_t system_now(const struct clock *clock)
{
	struct timespec t;
	(void)clock;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int64_t manual_now(const struct clock *clock)
{
	return atomic_load(&((struct clock *)clock)->manual_ns);
}

const struct clock *clock_system(void)
{
	static const struct clock system = {.now_ns = system_now};
	return &system;
}

void clock_manual_init(struct clock *clock, int64_t start_ns)
{
	clock->now_ns = manual_now;
	atomic_init(&clock->manual_ns, start_ns);
}

void clock_advance(struct clock *clock, int64_t ns)
{
	atomic_fetch_add(&clock->manual_ns, ns);
}
