/* The monotonic clock, injected so that tests decide what time it is. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

struct clock {
	int64_t (*now_ns)(const struct clock *clock);
	_Atomic int64_t manual_ns; /* what a manual clock reads */
};

/* CLOCK_MONOTONIC; shared, never freed. */
const struct clock *clock_system(void);
/* A clock that stands at start_ns until clock_advance() moves it; safe to move from another thread. */
void clock_manual_init(struct clock *clock, int64_t start_ns);
void clock_advance(struct clock *clock, int64_t ns);

static inline int64_t clock_now_ns(const struct clock *clock)
{
	return clock->now_ns(clock);
}

static inline int64_t clock_now_ms(const struct clock *clock)
{
	return clock->now_ns(clock) / 1000000;
}
