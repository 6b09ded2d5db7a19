/*
 * Named options with a kind, bounds and a default, stored in the fields of a structure. One table describes them; every
 * source (file, environment, command line, the commands of `kvasir`) sets them through here, so a value means the same
 * and is refused in the same words wherever it came from.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/base/str.h"

enum option_kind {
	OPTION_STRING,  /* char *, malloc'd or NULL */
	OPTION_BOOL,    /* bool */
	OPTION_INT,     /* int64_t */
	OPTION_BYTES,   /* int64_t; K, M, G, T are powers of 1024 */
	OPTION_SECONDS, /* int64_t milliseconds; fractions and ms, s, m, h */
	OPTION_REAL,    /* double */
};

struct option {
	enum option_kind kind;
	const char *name;     /* "max-queue" */
	size_t offset;        /* of the field in the structure */
	const char *def_text; /* STRING: the default or NULL */
	double def_real;      /* REAL: the default */
	int64_t def, min, max; /* other kinds; REAL: whole-numbered bounds */
	const char *help;
};

/* Rows of a table for `type`: the field must have the type its kind names. */
#define OPTION_ROW_STRING(type, field, name, def, help)                                                                \
	{                                                                                                              \
		OPTION_STRING, name, offsetof(type, field), def, 0, 0, 0, 0, help                                      \
	}
#define OPTION_ROW_BOOL(type, field, name, help)                                                                       \
	{                                                                                                              \
		OPTION_BOOL, name, offsetof(type, field), NULL, 0, 0, 0, 1, help                                       \
	}
#define OPTION_ROW_INT(type, field, name, def, min, max, help)                                                         \
	{OPTION_INT, name, offsetof(type, field), NULL, 0, def, min, max, help}
#define OPTION_ROW_BYTES(type, field, name, def, min, max, help)                                                       \
	{OPTION_BYTES, name, offsetof(type, field), NULL, 0, def, min, max, help}
#define OPTION_ROW_REAL(type, field, name, def, min, max, help)                                                        \
	{OPTION_REAL, name, offsetof(type, field), NULL, def, 0, min, max, help}

struct option_table {
	const struct option *rows;
	size_t n;
};

/* Sets every field to its default; the strings are copied. */
enum status option_defaults(struct option_table t, void *base);
/* Frees the strings. */
void option_free(struct option_table t, void *base);

/* The row called `name`, dashes and underscores being the same; NULL when there is none. */
const struct option *option_find(struct option_table t, struct str name);
/* The name closest to a mistyped one, or NULL when none is close. */
const char *option_nearest(struct option_table t, struct str name);

/* "expected a number of bytes from 1 K to 4 G": what a value of this option looks like, for messages. */
void option_expected(const struct option *o, struct buf *out);

/*
 * Sets a field from text. INVALID when the kind or the bounds do not fit; the field then keeps its value, and the
 * message reads `WHERE: NAME: "TEXT" does not fit; expected ...`, where `where` ("kvasir.json:3", "KVASIR_PORT", "") is
 * the source.
 */
enum status option_set(const struct option *o, void *base, struct str text, const char *where, struct error *err);
/* The message of option_set() for a value that the source itself knows to be of a wrong type. */
enum status option_refuse(const struct option *o, struct str shown, const char *where, struct error *err);

/*
 * Reads argv[1..argc): --name VALUE, --name=VALUE, for booleans --name and --no-name; "--" ends the options. Arguments
 * that are no options go to positional[0..*n_positional) (borrowed), of which there may be max_positional.
 */
enum status option_read_args(struct option_table t, void *base, int argc, char **argv, const char **positional,
                             int max_positional, int *n_positional, struct error *err);

/* Whether a field of two structures has the same value; and exchanges the two values. */
bool option_same(const struct option *o, const void *a, const void *b);
void option_swap(const struct option *o, void *a, void *b);

/* Appends one line for each option: its name, help and default. */
void option_help(struct option_table t, struct buf *out);
/* Appends the value of a field as JSON: BYTES as a number, SECONDS as a number of seconds. */
void option_json(const struct option *o, const void *base, struct buf *out);
