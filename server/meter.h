/*
 * What connections hold for their clients, all together: requests and messages that are being read, and output that is
 * not sent yet. Each holder says how much it has; before it reads more of something large it asks.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What is this small is always read: with the limit of connections it has a bound of its own. */
enum { METER_SMALL_BYTES = 65536 };

struct meter {
	int64_t bytes, most;
};

/* A holder that had *has bytes has `now`. */
static inline void meter_set(struct meter *m, size_t *has, size_t now)
{
	m->bytes += (int64_t)now - (int64_t)*has;
	*has = now;
}

/* Whether something that is to have `whole` bytes may have `more` of them read now. */
static inline bool meter_allows(const struct meter *m, uint64_t whole, uint64_t more)
{
	return whole <= METER_SMALL_BYTES || (m->bytes <= m->most && more <= (uint64_t)(m->most - m->bytes));
}
