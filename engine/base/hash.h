/* Hashing and a map from byte strings to numbers. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/str.h"

/* 64-bit hash of n bytes (XXH64, as specified by its author); not for adversarial keys. */
uint64_t hash64(const void *data, size_t n, uint64_t seed);

/* Byte string -> int32 map with open addressing. Keys are borrowed and must outlive the map. */
struct strmap {
	struct strmap_slot {
		struct str key; /* key.p == NULL: free */
		uint64_t hash;
		int32_t value;
	} *slots;
	size_t n_slots; /* a power of two, or 0 */
	size_t n_used;
};

/* Room for n_keys without growing; false when there is no memory. */
bool strmap_init(struct strmap *m, size_t n_keys);
void strmap_free(struct strmap *m);
/* Adds a key, or changes the value of one that is there; false when there is no memory. */
bool strmap_set(struct strmap *m, struct str key, int32_t value);
/* False when the key is not there; *value is then untouched. */
bool strmap_get(const struct strmap *m, struct str key, int32_t *value);
