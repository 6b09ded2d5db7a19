#include "engine/base/hash.h"

#include <stdlib.h>
#include <string.h>

/* XXH64's constants (xxHash specification, section "XXH64 algorithm description"). */
#define P1 0x9E3779B185EBCA87ull
#define P2 0xC2B2AE3D27D4EB4Full
#define P3 0x165667B19E3779F9ull
#define P4 0x85EBCA77C2B2AE63ull
#define P5 0x27D4EB2F165667C5ull

static uint64_t rotl(uint64_t x, int r)
{
	return x << r | x >> (64 - r);
}

static uint64_t read64(const unsigned char *p)
{
	uint64_t v;
	memcpy(&v, p, 8);
	return v;
}

static uint64_t lane(uint64_t acc, uint64_t input)
{
	return rotl(acc + input * P2, 31) * P1;
}

static uint64_t merge(uint64_t h, uint64_t acc)
{
	return (h ^ lane(0, acc)) * P1 + P4;
}

uint64_t hash64(const void *data, size_t n, uint64_t seed)
{
	const unsigned char *p = data, *end = p + n;
	uint64_t h;
	if (n >= 32) {
		uint64_t a = seed + P1 + P2, b = seed + P2, c = seed, d = seed - P1;
		for (; end - p >= 32; p += 32) {
			a = lane(a, read64(p));
			b = lane(b, read64(p + 8));
			c = lane(c, read64(p + 16));
			d = lane(d, read64(p + 24));
		}
		h = rotl(a, 1) + rotl(b, 7) + rotl(c, 12) + rotl(d, 18);
		h = merge(merge(merge(merge(h, a), b), c), d);
	} else {
		h = seed + P5;
	}
	h += n;
	for (; end - p >= 8; p += 8)
		h = rotl(h ^ lane(0, read64(p)), 27) * P1 + P4;
	if (end - p >= 4) {
		uint32_t v;
		memcpy(&v, p, 4);
		h = rotl(h ^ v * P1, 23) * P2 + P3;
		p += 4;
	}
	for (; p < end; p++)
		h = rotl(h ^ *p * P5, 11) * P1;
	h = (h ^ h >> 33) * P2;
	h = (h ^ h >> 29) * P3;
	return h ^ h >> 32;
}

static size_t slots_for(size_t n_keys)
{
	size_t n = 16;
	while (n / 2 < n_keys)
		n *= 2;
	return n;
}

bool strmap_init(struct strmap *m, size_t n_keys)
{
	memset(m, 0, sizeof *m);
	if (n_keys > SIZE_MAX / 4 / sizeof *m->slots)
		return false;
	m->n_slots = slots_for(n_keys);
	m->slots = calloc(m->n_slots, sizeof *m->slots);
	if (!m->slots)
		m->n_slots = 0;
	return m->slots != NULL;
}

void strmap_free(struct strmap *m)
{
	free(m->slots);
	memset(m, 0, sizeof *m);
}

/* The slot that holds the key, or the free one where it belongs. */
static struct strmap_slot *find(const struct strmap *m, struct str key, uint64_t hash)
{
	size_t i = hash & (m->n_slots - 1);
	for (;; i = (i + 1) & (m->n_slots - 1)) {
		struct strmap_slot *s = &m->slots[i];
		if (!s->key.p || (s->hash == hash && str_eq(s->key, key)))
			return s;
	}
}

static bool grow(struct strmap *m)
{
	struct strmap bigger;
	if (!strmap_init(&bigger, m->n_slots))
		return false;
	for (size_t i = 0; i < m->n_slots; i++) {
		if (m->slots[i].key.p)
			*find(&bigger, m->slots[i].key, m->slots[i].hash) = m->slots[i];
	}
	bigger.n_used = m->n_used;
	free(m->slots);
	*m = bigger;
	return true;
}

bool strmap_set(struct strmap *m, struct str key, int32_t value)
{
	if (!key.p)
		key.p = "";
	if (m->n_used >= m->n_slots / 2 && !grow(m))
		return false;
	uint64_t hash = hash64(key.p, key.n, 0);
	struct strmap_slot *s = find(m, key, hash);
	if (!s->key.p)
		m->n_used++;
	*s = (struct strmap_slot){key, hash, value};
	return true;
}

bool strmap_get(const struct strmap *m, struct str key, int32_t *value)
{
	if (m->n_slots == 0)
		return false;
	if (!key.p)
		key.p = "";
	const struct strmap_slot *s = find(m, key, hash64(key.p, key.n, 0));
	if (!s->key.p)
		return false;
	*value = s->value;
	return true;
}
