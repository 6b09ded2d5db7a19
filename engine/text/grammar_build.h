/*
 * Building a grammar's program. Failures (too large, no memory, a schema that is not supported) are remembered in the
 * builder: everything after the first does nothing, and whoever began checks once, at the end.
 */
#pragma once

#include "engine/text/grammar_impl.h"
#include "engine/text/value_internal.h"

enum { GRAMMAR_MAX_ROUTINES = 4096 };

/* Names of the routines that any program may call; a schema's own are named by the dict it stands in. */
extern const char grammar_space, grammar_any, grammar_string, grammar_char, grammar_wide, grammar_integer,
	grammar_number, grammar_object, grammar_array;

struct grammar_builder {
	struct grammar *g;
	uint32_t cap_code, cap_sets;
	const void *routine[GRAMMAR_MAX_ROUTINES]; /* [g->n_routines] */
	/* malloc'd: where the schema of a routine stands; NULL: not a schema's */
	char *where[GRAMMAR_MAX_ROUTINES];
	const struct value *root_of[GRAMMAR_MAX_ROUTINES]; /* what "$ref" refers into, in that routine ... */
	const struct value *root;                  /* ... and where we are */
	uint32_t work; /* parts of patterns that have been read */
	enum status status;
	struct error err;
};

bool grammar_failed(const struct grammar_builder *b);
void grammar_fail_nomem(struct grammar_builder *b);
void grammar_fail_size(struct grammar_builder *b);

/* Appends an instruction and returns its place. */
uint32_t grammar_emit(struct grammar_builder *b, enum grammar_op op, uint32_t a, uint32_t c);
uint32_t grammar_here(const struct grammar_builder *b);
/* Change where a SPLIT or JUMP goes. */
void grammar_patch_a(struct grammar_builder *b, uint32_t at, uint32_t to);
void grammar_patch_b(struct grammar_builder *b, uint32_t at, uint32_t to);

void grammar_emit_bytes(struct grammar_builder *b, struct str s);
void grammar_emit_text(struct grammar_builder *b, const char *z);
void grammar_emit_set(struct grammar_builder *b, const struct grammar_set *set);
/* A byte between two. */
void grammar_emit_between(struct grammar_builder *b, unsigned from, unsigned to);
/* min to max decimal digits, at most 32. */
void grammar_emit_digits(struct grammar_builder *b, int min, int max);
/* The routine of that name, which is made if it is new; NULL (after a failure) does nothing. */
uint32_t grammar_routine(struct grammar_builder *b, const void *name);
void grammar_emit_call(struct grammar_builder *b, const void *name);
/* The body of one of the routines above; false for a name that is none of them. */
bool grammar_emit_builtin(struct grammar_builder *b, const void *name);

/* Begins a part that may be left out; grammar_end_optional() takes the result. */
uint32_t grammar_begin_optional(struct grammar_builder *b);
void grammar_end_optional(struct grammar_builder *b, uint32_t at);

/* Alternatives: zeroed, grammar_next_choice() before each (and whether it is the last), grammar_end_choices(). */
struct grammar_choices {
	uint32_t split;
	uint32_t jumps; /* the last jump to the end; each holds the one before in b */
	bool open;
};

void grammar_next_choice(struct grammar_builder *b, struct grammar_choices *c, bool last);
void grammar_end_choices(struct grammar_builder *b, struct grammar_choices *c);

/* min to max times a routine; max < 0: without bound. `separated`: with commas between (then min is at least 1). */
void grammar_emit_repeat(struct grammar_builder *b, const void *routine, int64_t min, int64_t max, bool separated);
/* What may stand between two parts of JSON. */
void grammar_emit_space(struct grammar_builder *b);
/* A string of min to max characters; an object of any keys, an array of min to max items, of values from a routine. */
void grammar_emit_string(struct grammar_builder *b, int64_t min, int64_t max);
void grammar_emit_map(struct grammar_builder *b, const void *value);
void grammar_emit_list(struct grammar_builder *b, const void *item, int64_t min, int64_t max);

/* The inside of a JSON string whose text matches a regular expression. Failures are the builder's. */
void grammar_emit_pattern(struct grammar_builder *b, struct str pattern, const char *where);
/* The regular expression of a `format`, or NULL when it is not known. */
const char *grammar_format_pattern(struct str format);
/* The integers from min to max (both included), without leading zeros. */
void grammar_emit_range(struct grammar_builder *b, int64_t min, int64_t max);
