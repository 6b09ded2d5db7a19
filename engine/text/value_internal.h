/*
 * How values are laid out; for value.c and the template engine only. A value is two words: scalars are inside,
 * everything else is a pointer into an arena. Lists, tuples and dicts do not change once they are built (the template
 * language cannot mutate them), so values are shared freely.
 */
#pragma once

#include <pthread.h>

#include "engine/text/template.h"
#include "engine/text/value.h"

enum value_type {
	VALUE_MISSING, /* no value at all: an unset variable, an argument that was not given */
	VALUE_NONE,
	VALUE_BOOL,
	VALUE_INT,
	VALUE_FLOAT,
	VALUE_STRING,
	VALUE_LIST,
	VALUE_TUPLE,
	VALUE_DICT,
	/* The rest exists only while a template runs. */
	VALUE_UNDEFINED,
	VALUE_RANGE,
	VALUE_GENERATOR,
	VALUE_VIEW,
	VALUE_NAMESPACE,
	VALUE_FUNCTION,
	VALUE_METHOD,
	VALUE_MACRO,
	VALUE_LOOP,
	VALUE_CYCLER,
	VALUE_JOINER,
};

enum { VALUE_MIXED = VALUE_TRUSTED + 1 }; /* a string of both origins: its data ranges are listed */
enum { VALUE_MARKUP = 1 };                /* flag of a string that the filters safe or escape made */

/* The bytes of a string. A character begins at offset 0 and at every byte that does not continue a UTF-8 sequence. */
struct value_text {
	const char *p;
	size_t n;
	size_t n_chars;
	const struct text_span *data; /* [n_data], ascending, not touching; only of a VALUE_MIXED string */
	size_t n_data;
};

struct value_seq;
struct value_dict;
struct undefined;
struct range;
struct generator;
struct view;
struct builtin;
struct method;
struct macro;
struct loop;
struct cycler;
struct joiner;

struct value {
	uint8_t type;   /* enum value_type */
	uint8_t origin; /* of scalars and strings */
	uint8_t flags;
	union {
		bool b;
		int64_t i;
		double f;
		const struct value_text *s;
		struct value_seq *seq;   /* list, tuple */
		struct value_dict *dict; /* dict, namespace */
		const struct undefined *undefined;
		const struct range *range;
		struct generator *generator;
		const struct view *view;
		const struct builtin *function;
		const struct method *method;
		const struct macro *macro;
		struct loop *loop;
		struct cycler *cycler;
		struct joiner *joiner;
	};
};

struct value_seq {
	struct value *items; /* [n] */
	size_t n, cap;
	bool named_pair; /* the (grouper, list) tuples of the groupby filter */
};

struct value_dict {
	struct dict_entry {
		struct value key, value;
		uint64_t hash; /* valid while there is an index */
	} *entries; /* [n], in insertion order */
	size_t n, cap;
	uint32_t *index; /* [n_index]: entry + 1, or 0; only of dicts with more than a few entries */
	size_t n_index;  /* a power of two */
};

struct range {
	int64_t start, stop, step, n; /* n: how many numbers it has */
};

/* The number of characters in n bytes. */
size_t value_count_chars(const char *p, size_t n);

/* Appends; false when the arena is exhausted. */
bool value_seq_add(struct arena *a, struct value_seq *seq, struct value item);

enum hash_result { HASH_OK, HASH_UNHASHABLE, HASH_EXHAUSTED };

/*
 * Hashing and equality as Python has them (1 == 1.0 == True). `work` is counted down by what they cost, and they give
 * up (HASH_EXHAUSTED, -1) when it or a depth limit is used up. value_equal: 1, 0 or -1.
 */
enum hash_result value_hash(const struct value *v, uint64_t *hash, uint64_t *work);
int value_equal(const struct value *a, const struct value *b, uint64_t *work);

/* *found is NULL when the key is not there. */
enum hash_result value_dict_find(const struct value_dict *d, const struct value *key, uint64_t *work,
                                 struct dict_entry **found);
struct dict_entry *value_dict_find_text(const struct value_dict *d, struct str key);
/* Sets a key, keeping its place; *full is set when the arena is exhausted. */
enum hash_result value_dict_put(struct arena *a, struct value_dict *d, const struct value *key, struct value item,
                                uint64_t *work, bool *full);
