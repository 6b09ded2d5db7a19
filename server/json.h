/*
 * JSON as it comes in: a parsed document and a cursor that knows where in it a value stands, so that every complaint
 * can name its parameter ("messages[2].content"). The only file with jansson, apart from small readers elsewhere.
 *
 * Limits: JSON_MAX_DEPTH levels and JSON_MAX_VALUES values, both checked before anything is allocated; a key that
 * occurs twice in one object is refused, because two readers of it could disagree. Strings may hold \u0000.
 *
 * null and an absent key are the same thing here: clients send explicit nulls for whatever they leave out.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"
#include "engine/base/str.h"
#include "engine/engine.h"

enum { JSON_MAX_DEPTH = 128, JSON_MAX_VALUES = 2000000 };

struct json_doc;

/*
 * A value in a document. `up` is the cursor it was reached through: parents must outlive their children, which they do
 * when both are local variables of nested calls. Strings and keys belong to the document.
 */
struct json {
	const void *node;      /* NULL: absent or null */
	const struct json *up; /* NULL: the root */
	const char *key;       /* under which it stands in an object, or NULL; of the root: what is complained of */
	size_t index;	       /* at which it stands in an array */
};

enum json_kind { JSON_NONE, JSON_BOOL, JSON_INT, JSON_FLOAT, JSON_TEXT, JSON_LIST, JSON_DICT };

/*
 * Parses one JSON object. INVALID says where the text goes wrong; when it is a value that no program could hold (1e999,
 * an integer beyond 64 bits) the error names its parameter. `what` begins the sentences about the text as a whole ("The
 * body"), and is static. *root borrows from *doc, which the caller frees.
 */
enum status json_parse(struct str text, const char *what, struct json_doc **doc, struct json *root, struct error *err);
void json_doc_free(struct json_doc *doc); /* NULL is allowed */

enum json_kind json_kind(const struct json *j);
static inline bool json_has(const struct json *j)
{
	return j->node != NULL;
}

/* The value under a key; absent when j is no object. `key` must outlive the result. */
struct json json_get(const struct json *j, const char *key);
/* Elements of an array, or members of an object; 0 for anything else. */
size_t json_len(const struct json *j);
struct json json_at(const struct json *list, size_t i);

/* Visits the members of an object: start with *it == NULL; false at the end. Order: as in the text. */
bool json_next(const struct json *dict, void **it, struct json *member);

/* The string's bytes; {NULL, 0} when it is none. */
struct str json_text(const struct json *j);

/*
 * Readers of optional values: an absent one leaves *out as it is and is OK; a wrong type or a value out of range is
 * INVALID and names the parameter. Integers may be written with a fraction of zero (1.0).
 */
enum status json_read_bool(const struct json *j, bool *out, struct error *err);
enum status json_read_int(const struct json *j, int64_t min, int64_t max, int64_t *out, struct error *err);
enum status json_read_number(const struct json *j, double min, double max, double *out, struct error *err);
enum status json_read_text(const struct json *j, struct str *out, struct error *err);
/* INVALID unless it is absent or of this kind. */
enum status json_expect(const struct json *j, enum json_kind kind, struct error *err);

/* Writes where j stands, "messages[2].content", into path. */
void json_path(const struct json *j, char *path, size_t cap);
/* Fills *err with a sentence about j: its path, a space, the text. Returns `status`. */
enum status json_fail(const struct json *j, enum status status, struct error *err, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));

/* Appends j as compact JSON; "null" when absent. */
void json_write(struct buf *out, const struct json *j);

/* A template value of everything below j, its strings marked VALUE_DATA. NULL when the arena is full. */
struct value *json_to_value(struct arena *a, const struct json *j);
