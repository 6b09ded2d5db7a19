/*
 * What `kvasir bench long` has models read: text that is made up, and pass keys to find in it. Only bytes; the same for
 * the same seed.
 */
#pragma once

#include <stdint.h>

#include "engine/base/buf.h"

/* Appends one sentence, ended by a full stop and a space or a new line. *seed moves on. */
void bench_text_sentence(struct buf *out, uint64_t *seed);

/* Which door the i-th pass key opens, and the key: five digits. Different ones for 0 <= i < ENGINE_LONG_KEYS_MAX. */
struct bench_key {
	const char *door;
	char digits[6];
};
struct bench_key bench_text_key(int32_t i, uint64_t seed);
