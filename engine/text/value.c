#include "engine/text/value.h"

#include <math.h>
#include <sys/random.h>
#include <time.h>

#include "engine/text/value_internal.h"

enum {
	SMALL_DICT = 8,	     /* entries searched one by one */
	COMPARE_DEPTH = 200, /* nesting that hashing and comparing follow */
};

/* ---- Building ---- */

static struct value *value_new(struct arena *a, uint8_t type)
{
	struct value *v = a ? arena_alloc(a, sizeof *v) : NULL;
	if (v)
		v->type = type;
	return v;
}

struct value *value_none(struct arena *a)
{
	return value_new(a, VALUE_NONE);
}

struct value *value_bool(struct arena *a, bool b)
{
	struct value *v = value_new(a, VALUE_BOOL);
	if (v)
		v->b = b;
	return v;
}

struct value *value_int(struct arena *a, int64_t i)
{
	struct value *v = value_new(a, VALUE_INT);
	if (v)
		v->i = i;
	return v;
}

struct value *value_float(struct arena *a, double f)
{
	struct value *v = value_new(a, VALUE_FLOAT);
	if (v)
		v->f = f;
	return v;
}

size_t value_count_chars(const char *p, size_t n)
{
	size_t count = n > 0 && ((unsigned char)p[0] & 0xc0) == 0x80;
	for (size_t i = 0; i < n; i++)
		count += ((unsigned char)p[i] & 0xc0) != 0x80;
	return count;
}

static struct value_text *text_copy(struct arena *a, const char *p, size_t n)
{
	struct value_text *s = arena_alloc(a, sizeof *s);
	if (!s)
		return NULL;
	struct str copy = arena_str(a, p, n);
	if (!copy.p)
		return NULL;
	s->p = copy.p;
	s->n = n;
	s->n_chars = value_count_chars(copy.p, n);
	return s;
}

struct value *value_string(struct arena *a, const char *p, size_t n, enum value_origin origin)
{
	struct value *v = value_new(a, VALUE_STRING);
	struct value_text *s = v ? text_copy(a, p, n) : NULL;
	if (!s)
		return NULL;
	v->origin = (uint8_t)origin;
	v->s = s;
	return v;
}

struct value *value_list(struct arena *a)
{
	struct value *v = value_new(a, VALUE_LIST);
	if (!v)
		return NULL;
	v->seq = arena_alloc(a, sizeof *v->seq);
	return v->seq ? v : NULL;
}

bool value_seq_add(struct arena *a, struct value_seq *seq, struct value item)
{
	if (seq->n == seq->cap) {
		size_t cap = seq->cap ? seq->cap * 2 : 4;
		if (cap > SIZE_MAX / 2 / sizeof *seq->items)
			return false;
		struct value *items = arena_alloc(a, cap * sizeof *items);
		if (!items)
			return false;
		if (seq->n)
			memcpy(items, seq->items, seq->n * sizeof *items);
		seq->items = items;
		seq->cap = cap;
	}
	seq->items[seq->n++] = item;
	return true;
}

bool value_list_add(struct arena *a, struct value *list, struct value *item)
{
	return a && list && item && list->type == VALUE_LIST && value_seq_add(a, list->seq, *item);
}

struct value *value_dict(struct arena *a)
{
	struct value *v = value_new(a, VALUE_DICT);
	if (!v)
		return NULL;
	v->dict = arena_alloc(a, sizeof *v->dict);
	return v->dict ? v : NULL;
}

/* ---- Hashing and equality ---- */

/*
 * Keys come from clients, so the hash is keyed (SipHash-1-3, by J.-P. Aumasson and D. J. Bernstein) with a secret of
 * the process.
 */
static uint64_t secret[2];
static pthread_once_t secret_once = PTHREAD_ONCE_INIT;

static void secret_init(void)
{
	if (getrandom(secret, sizeof secret, GRND_NONBLOCK) != (ssize_t)sizeof secret) {
		/* No entropy yet, early at boot: the address layout and the clock are what is left. */
		struct timespec now;
		clock_gettime(CLOCK_REALTIME, &now);
		secret[0] ^= (uint64_t)now.tv_nsec << 32 ^ (uint64_t)now.tv_sec;
		secret[1] ^= (uint64_t)(uintptr_t)&now;
	}
}

static inline uint64_t rotl(uint64_t x, int n)
{
	return x << n | x >> (64 - n);
}

static inline void sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[1] = rotl(v[1], 13) ^ v[0];
	v[0] = rotl(v[0], 32);
	v[2] += v[3];
	v[3] = rotl(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotl(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotl(v[1], 17) ^ v[2];
	v[2] = rotl(v[2], 32);
}

static uint64_t hash_bytes(const void *data, size_t n, uint64_t domain)
{
	pthread_once(&secret_once, secret_init);
	uint64_t k0 = secret[0], k1 = secret[1] ^ domain;
	uint64_t v[4] = {k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d, k0 ^ 0x6c7967656e657261,
			 k1 ^ 0x7465646279746573};
	const unsigned char *p = data;
	size_t left = n;
	for (; left >= 8; left -= 8, p += 8) {
		uint64_t m;
		memcpy(&m, p, 8);
		v[3] ^= m;
		sip_round(v);
		v[0] ^= m;
	}
	uint64_t last = (uint64_t)n << 56;
	for (size_t i = 0; i < left; i++)
		last |= (uint64_t)p[i] << 8 * i;
	v[3] ^= last;
	sip_round(v);
	v[0] ^= last;
	v[2] ^= 0xff;
	for (int i = 0; i < 3; i++)
		sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static bool spend(uint64_t *work, uint64_t cost)
{
	if (*work < cost) {
		*work = 0;
		return false;
	}
	*work -= cost;
	return true;
}

/* True, and the integer, when a number is one; equal numbers must hash alike. */
static bool as_integer(const struct value *v, int64_t *i)
{
	if (v->type == VALUE_BOOL) {
		*i = v->b;
		return true;
	}
	if (v->type == VALUE_INT) {
		*i = v->i;
		return true;
	}
	if (v->type == VALUE_FLOAT && v->f >= -0x1p63 && v->f < 0x1p63 && v->f == floor(v->f)) {
		*i = (int64_t)v->f;
		return true;
	}
	return false;
}

static enum hash_result hash_at(const struct value *v, uint64_t *hash, uint64_t *work, int depth)
{
	if (depth > COMPARE_DEPTH || !spend(work, 1))
		return HASH_EXHAUSTED;
	int64_t i;
	if (as_integer(v, &i)) {
		*hash = hash_bytes(&i, sizeof i, VALUE_INT);
		return HASH_OK;
	}
	switch (v->type) {
	case VALUE_FLOAT:
		*hash = hash_bytes(&v->f, sizeof v->f, VALUE_FLOAT);
		return HASH_OK;
	case VALUE_STRING:
		if (!spend(work, v->s->n / 64))
			return HASH_EXHAUSTED;
		*hash = hash_bytes(v->s->p, v->s->n, VALUE_STRING);
		return HASH_OK;
	case VALUE_TUPLE: {
		uint64_t all = VALUE_TUPLE;
		for (size_t k = 0; k < v->seq->n; k++) {
			uint64_t both[2] = {all, 0};
			enum hash_result result = hash_at(&v->seq->items[k], &both[1], work, depth + 1);
			if (result != HASH_OK)
				return result;
			all = hash_bytes(both, sizeof both, VALUE_TUPLE);
		}
		*hash = all;
		return HASH_OK;
	}
	case VALUE_LIST:
	case VALUE_DICT:
	case VALUE_VIEW:
		return HASH_UNHASHABLE;
	case VALUE_NONE:
	case VALUE_UNDEFINED:
		*hash = v->type;
		return HASH_OK;
	case VALUE_RANGE: /* equal ranges may be different objects */
		*hash = VALUE_RANGE;
		return HASH_OK;
	default: /* compared by identity */
		*hash = hash_bytes(&v->seq, sizeof v->seq, v->type);
		return HASH_OK;
	}
}

enum hash_result value_hash(const struct value *v, uint64_t *hash, uint64_t *work)
{
	return hash_at(v, hash, work, 0);
}

static int equal_at(const struct value *a, const struct value *b, uint64_t *work, int depth);

static int equal_dicts(const struct value_dict *a, const struct value_dict *b, uint64_t *work, int depth)
{
	if (a->n != b->n)
		return 0;
	for (size_t i = 0; i < a->n; i++) {
		struct dict_entry *other;
		if (value_dict_find(b, &a->entries[i].key, work, &other) == HASH_EXHAUSTED)
			return -1;
		if (!other)
			return 0;
		int same = equal_at(&a->entries[i].value, &other->value, work, depth + 1);
		if (same != 1)
			return same;
	}
	return 1;
}

static bool is_number(const struct value *v)
{
	return v->type == VALUE_BOOL || v->type == VALUE_INT || v->type == VALUE_FLOAT;
}

static int equal_at(const struct value *a, const struct value *b, uint64_t *work, int depth)
{
	if (depth > COMPARE_DEPTH || !spend(work, 1))
		return -1;
	if (is_number(a) && is_number(b)) {
		int64_t i, j;
		if (as_integer(a, &i))
			return as_integer(b, &j) && i == j;
		/* Not an integer, so a float; an int on the other side differs from it. */
		return b->type == VALUE_FLOAT && a->f == b->f;
	}
	if (a->type != b->type)
		return 0;
	switch (a->type) {
	case VALUE_NONE:
	case VALUE_UNDEFINED:
		return 1;
	case VALUE_STRING:
		if (a->s == b->s)
			return 1;
		if (a->s->n != b->s->n)
			return 0;
		if (!spend(work, a->s->n / 64))
			return -1;
		return memcmp(a->s->p, b->s->p, a->s->n) == 0;
	case VALUE_LIST:
	case VALUE_TUPLE:
		if (a->seq->n != b->seq->n)
			return 0;
		for (size_t i = 0; i < a->seq->n; i++) {
			int same = equal_at(&a->seq->items[i], &b->seq->items[i], work, depth + 1);
			if (same != 1)
				return same;
		}
		return 1;
	case VALUE_DICT:
		return equal_dicts(a->dict, b->dict, work, depth);
	case VALUE_RANGE:
		return a->range->n == b->range->n && (a->range->n == 0 || a->range->start == b->range->start) &&
		       (a->range->n < 2 || a->range->step == b->range->step);
	default:
		return a->seq == b->seq;
	}
}

int value_equal(const struct value *a, const struct value *b, uint64_t *work)
{
	return equal_at(a, b, work, 0);
}

/* ---- Dicts ---- */

/* Rebuilds the index over all entries; false when the arena is exhausted. */
static bool build_index(struct arena *a, struct value_dict *d, uint64_t *work)
{
	size_t n_index = d->n_index ? d->n_index * 2 : 32;
	while (n_index < d->cap * 2)
		n_index *= 2;
	uint32_t *index = arena_alloc(a, n_index * sizeof *index);
	if (!index)
		return false;
	bool hashed = d->index != NULL;
	for (size_t i = 0; i < d->n; i++) {
		if (!hashed && value_hash(&d->entries[i].key, &d->entries[i].hash, work) != HASH_OK)
			return false;
		size_t at = d->entries[i].hash & (n_index - 1);
		while (index[at])
			at = (at + 1) & (n_index - 1);
		index[at] = (uint32_t)(i + 1);
	}
	d->index = index;
	d->n_index = n_index;
	return true;
}

enum hash_result value_dict_find(const struct value_dict *d, const struct value *key, uint64_t *work,
				 struct dict_entry **found)
{
	*found = NULL;
	uint64_t hash = 0;
	if (d->index || key->type != VALUE_STRING) {
		enum hash_result result = value_hash(key, &hash, work);
		if (result != HASH_OK)
			return result;
	}
	if (!d->index) {
		for (size_t i = 0; i < d->n; i++) {
			int same = value_equal(&d->entries[i].key, key, work);
			if (same < 0)
				return HASH_EXHAUSTED;
			if (same) {
				*found = &d->entries[i];
				return HASH_OK;
			}
		}
		return HASH_OK;
	}
	for (size_t at = hash & (d->n_index - 1); d->index[at]; at = (at + 1) & (d->n_index - 1)) {
		struct dict_entry *e = &d->entries[d->index[at] - 1];
		int same = e->hash == hash ? value_equal(&e->key, key, work) : 0;
		if (same < 0)
			return HASH_EXHAUSTED;
		if (same) {
			*found = e;
			return HASH_OK;
		}
	}
	return HASH_OK;
}

struct dict_entry *value_dict_find_text(const struct value_dict *d, struct str key)
{
	struct value_text text = {key.p, key.n, 0, NULL, 0};
	struct value v = {.type = VALUE_STRING, .s = &text};
	uint64_t work = UINT64_MAX;
	struct dict_entry *found;
	return value_dict_find(d, &v, &work, &found) == HASH_OK ? found : NULL;
}

enum hash_result value_dict_put(struct arena *a, struct value_dict *d, const struct value *key, struct value item,
				uint64_t *work, bool *full)
{
	struct dict_entry *found;
	enum hash_result result = value_dict_find(d, key, work, &found);
	if (result != HASH_OK)
		return result;
	if (found) {
		found->value = item;
		return HASH_OK;
	}
	*full = true;
	if (d->n == d->cap) {
		size_t cap = d->cap ? d->cap * 2 : 4;
		if (cap > UINT32_MAX / 2)
			return HASH_OK;
		struct dict_entry *entries = arena_alloc(a, cap * sizeof *entries);
		if (!entries)
			return HASH_OK;
		if (d->n)
			memcpy(entries, d->entries, d->n * sizeof *entries);
		d->entries = entries;
		d->cap = cap;
	}
	d->entries[d->n] = (struct dict_entry){*key, item, 0};
	d->n++;
	if (d->index ? d->n * 2 > d->n_index : d->n > SMALL_DICT) {
		if (d->index)
			result = value_hash(key, &d->entries[d->n - 1].hash, work);
		if (result != HASH_OK || !build_index(a, d, work)) {
			d->n--;
			return result;
		}
	} else if (d->index) {
		uint64_t hash;
		result = value_hash(key, &hash, work);
		if (result != HASH_OK) {
			d->n--;
			return result;
		}
		d->entries[d->n - 1].hash = hash;
		size_t at = hash & (d->n_index - 1);
		while (d->index[at])
			at = (at + 1) & (d->n_index - 1);
		d->index[at] = (uint32_t)d->n;
	}
	*full = false;
	return HASH_OK;
}

bool value_dict_set(struct arena *a, struct value *dict, const char *key, size_t key_n, struct value *item)
{
	if (!a || !dict || !item || dict->type != VALUE_DICT)
		return false;
	struct dict_entry *there = value_dict_find_text(dict->dict, (struct str){key, key_n});
	if (there) {
		there->value = *item;
		return true;
	}
	struct value_text *text = text_copy(a, key, key_n);
	if (!text)
		return false;
	struct value k = {.type = VALUE_STRING, .origin = VALUE_DATA, .s = text};
	uint64_t work = UINT64_MAX;
	bool full = false;
	return value_dict_put(a, dict->dict, &k, *item, &work, &full) == HASH_OK && !full;
}

struct value *value_dict_get(const struct value *dict, const char *key, size_t key_n)
{
	if (!dict || dict->type != VALUE_DICT)
		return NULL;
	struct dict_entry *e = value_dict_find_text(dict->dict, (struct str){key, key_n});
	return e ? &e->value : NULL;
}
