#include "server/json.h"

#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/arena.h"

/* Integers a double holds exactly. */
#define EXACT_DOUBLE 9007199254740992.0

struct json_doc {
	struct arena *arena; /* holds all of it, and this */
};

/*
 * Memory of jansson while it parses. Its lexer (2.14) does not look whether its buffer could grow: it drops the
 * character, and when that was a closing quote it reads and writes behind the string. So no allocation of a parser
 * returns NULL: it leaves jansson by longjmp(), and what was built is in an arena, to be thrown away whole. It keeps no
 * lock and no state that could be left half done.
 */
struct parse {
	struct arena *arena;
	jmp_buf starved;
};

static _Thread_local struct parse *parsing; /* NULL: jansson writes, or is used by others */

static void *allocate(size_t n)
{
	if (!parsing)
		return malloc(n);
	void *p = arena_alloc(parsing->arena, n);
	if (!p)
		longjmp(parsing->starved, 1);
	return p;
}

static void release(void *p)
{
	if (!parsing)
		free(p);
}

static void set_memory(void)
{
	json_set_alloc_funcs(allocate, release);
}

/* NULL with *starved, or with the reason in *why. What it returns is never freed but with the arena. */
static json_t *load(struct str text, struct arena *a, json_error_t *why, bool *starved)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct parse p = {.arena = a};
	json_t *volatile root = NULL;
	pthread_once(&once, set_memory);
	*starved = true;
	parsing = &p;
	if (setjmp(p.starved) == 0) {
		root = json_loadb(text.p, text.n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, why);
		*starved = !root && json_error_code(why) == json_error_out_of_memory;
	}
	parsing = NULL;
	return root;
}

/* ---- The text before it is parsed ---- */

/*
 * Refuses what would cost too much to parse. Counts every bracket and comma outside strings; jansson judges the rest.
 */
static enum status measure(struct str s, struct error *err)
{
	size_t depth = 0, values = 1;
	bool in_string = false;
	for (size_t i = 0; i < s.n; i++) {
		char c = s.p[i];
		if (in_string) {
			if (c == '\\')
				i++;
			else if (c == '"')
				in_string = false;
		} else if (c == '"') {
			in_string = true;
		} else if (c == '[' || c == '{') {
			values++;
			if (++depth > JSON_MAX_DEPTH)
				return error_set(err, STATUS_INVALID, "The JSON is nested deeper than %d levels.",
						 JSON_MAX_DEPTH);
		} else if (c == ']' || c == '}') {
			if (depth)
				depth--;
		} else if (c == ',') {
			values++;
		}
	}
	if (values > JSON_MAX_VALUES)
		return error_set(err, STATUS_INVALID, "The JSON holds more than %d values.", JSON_MAX_VALUES);
	return STATUS_OK;
}

/* Appends to a path, staying within it. */
static void path_add(char *path, size_t cap, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

static void path_add(char *path, size_t cap, const char *fmt, ...)
{
	size_t n = strlen(path);
	va_list args;
	va_start(args, fmt);
	vsnprintf(path + n, cap - n, fmt, args);
	va_end(args);
}

/*
 * Where in a text that does not parse the first `upto` bytes end: follows keys and indices without building anything.
 * Only called for texts that measure() has passed, hence the fixed depth.
 */
static void locate(struct str s, size_t upto, char *path, size_t cap)
{
	struct frame {
		bool dict;
		size_t index;
		struct str key;
	} stack[JSON_MAX_DEPTH];
	size_t depth = 0;

	for (size_t i = 0; i < s.n && i < upto; i++) {
		struct frame *top = depth ? &stack[depth - 1] : NULL;
		char c = s.p[i];
		if (c == '"') {
			size_t from = ++i;
			while (i < s.n && s.p[i] != '"')
				i += s.p[i] == '\\' ? 2 : 1;
			if (top && top->dict && top->key.p == NULL && i <= s.n)
				top->key = (struct str){s.p + from, i - from};
		} else if (c == '[' || c == '{') {
			stack[depth++] = (struct frame){.dict = c == '{'};
		} else if ((c == ']' || c == '}') && depth) {
			depth--;
		} else if (c == ',' && top) {
			top->index++;
			top->key = (struct str){NULL, 0};
		}
	}
	path[0] = '\0';
	for (size_t i = 0; i < depth; i++) {
		if (!stack[i].dict)
			path_add(path, cap, "[%zu]", stack[i].index);
		else if (stack[i].key.p)
			path_add(path, cap, "%s%.*s", path[0] ? "." : "",
				 (int)(stack[i].key.n < 64 ? stack[i].key.n : 64), stack[i].key.p);
	}
}

enum status json_parse(struct str text, const char *what, struct json_doc **doc, struct json *root, struct error *err)
{
	json_error_t je;
	json_t *node = NULL;
	char path[64];
	bool starved = true;
	struct json_doc *d = NULL;
	enum status status = STATUS_OK;

	*doc = NULL;
	*root = (struct json){0};
	if (text.n == 0)
		return error_set(err, STATUS_INVALID, "%s is empty; a JSON object is expected.", what);
	if (measure(text, err) != STATUS_OK)
		return STATUS_INVALID;
	struct arena *a = arena_create(SIZE_MAX / 2);
	if (a)
		d = arena_alloc(a, sizeof *d);
	if (d)
		node = load(text, a, &je, &starved);
	if (starved) {
		status = error_set(err, STATUS_NOMEM, "There is no memory to parse the JSON.");
	} else if (!node) {
		enum json_error_code code = json_error_code(&je);
		locate(text, je.position > 0 ? (size_t)je.position : 0, path, sizeof path);
		if (code == json_error_numeric_overflow)
			status = error_set_param(err, STATUS_INVALID, path, "%s is a number out of range.",
			                         path[0] ? path : what);
		else if (code == json_error_duplicate_key)
			status = error_set_param(err, STATUS_INVALID, path, "%s occurs twice in one object.", path);
		else
			status = error_set(err, STATUS_INVALID, "%s is not valid JSON: %s (line %d, column %d).", what,
					   je.text, je.line, je.column);
	} else if (!json_is_object(node)) {
		status = error_set(err, STATUS_INVALID, "%s must be a JSON object.", what);
	}
	if (status != STATUS_OK) {
		arena_destroy(a);
		return status;
	}
	d->arena = a;
	*doc = d;
	*root = (struct json){.node = node, .key = what};
	return STATUS_OK;
}

void json_doc_free(struct json_doc *doc)
{
	if (doc)
		arena_destroy(doc->arena);
}

/* ---- Walking ---- */

/* The value as a cursor's node: null is absence. */
static const void *present(const json_t *v)
{
	return v && !json_is_null(v) ? v : NULL;
}

enum json_kind json_kind(const struct json *j)
{
	if (!j->node)
		return JSON_NONE;
	switch (json_typeof((const json_t *)j->node)) {
	case JSON_OBJECT:
		return JSON_DICT;
	case JSON_ARRAY:
		return JSON_LIST;
	case JSON_STRING:
		return JSON_TEXT;
	case JSON_INTEGER:
		return JSON_INT;
	case JSON_REAL:
		return JSON_FLOAT;
	case JSON_TRUE:
	case JSON_FALSE:
		return JSON_BOOL;
	case JSON_NULL:
		break;
	}
	return JSON_NONE;
}

struct json json_get(const struct json *j, const char *key)
{
	return (struct json){.node = present(json_object_get(j->node, key)), .up = j, .key = key};
}

size_t json_len(const struct json *j)
{
	return json_is_object((const json_t *)j->node) ? json_object_size(j->node) : json_array_size(j->node);
}

struct json json_at(const struct json *list, size_t i)
{
	return (struct json){.node = present(json_array_get(list->node, i)), .up = list, .index = i};
}

bool json_next(const struct json *dict, void **it, struct json *member)
{
	/* jansson asks for a mutable object although iteration changes nothing. */
	json_t *node = (json_t *)dict->node;
	*it = *it ? json_object_iter_next(node, *it) : json_object_iter(node);
	if (!*it)
		return false;
	*member = (struct json){
		.node = present(json_object_iter_value(*it)), .up = dict, .key = json_object_iter_key(*it)};
	return true;
}

struct str json_text(const struct json *j)
{
	if (json_kind(j) != JSON_TEXT)
		return (struct str){NULL, 0};
	return (struct str){json_string_value(j->node), json_string_length(j->node)};
}

void json_path(const struct json *j, char *path, size_t cap)
{
	if (!j->up) {
		path[0] = '\0';
		return;
	}
	json_path(j->up, path, cap);
	if (j->key)
		path_add(path, cap, "%s%s", path[0] ? "." : "", j->key);
	else
		path_add(path, cap, "[%zu]", j->index);
}

/* ---- Reading ---- */

enum status json_fail(const struct json *j, enum status status, struct error *err, const char *fmt, ...)
{
	char path[64], text[256];
	va_list args;
	json_path(j, path, sizeof path);
	va_start(args, fmt);
	vsnprintf(text, sizeof text, fmt, args);
	va_end(args);
	if (!path[0]) { /* the root, or a member whose name is empty */
		while (j->up)
			j = j->up;
		return error_set(err, status, "%s %s", j->key ? j->key : "This", text);
	}
	return error_set_param(err, status, path, "%s %s", path, text);
}

static const char *const kind_names[] = {
	[JSON_NONE] = "null",	  [JSON_BOOL] = "a boolean", [JSON_INT] = "an integer", [JSON_FLOAT] = "a number",
	[JSON_TEXT] = "a string", [JSON_LIST] = "an array",  [JSON_DICT] = "an object",
};

static enum status wrong_kind(const struct json *j, const char *expected, struct error *err)
{
	return json_fail(j, STATUS_INVALID, err, "must be %s, not %s.", expected, kind_names[json_kind(j)]);
}

enum status json_expect(const struct json *j, enum json_kind kind, struct error *err)
{
	if (!j->node || json_kind(j) == kind)
		return STATUS_OK;
	return wrong_kind(j, kind_names[kind], err);
}

enum status json_read_bool(const struct json *j, bool *out, struct error *err)
{
	if (!j->node)
		return STATUS_OK;
	if (json_kind(j) != JSON_BOOL)
		return wrong_kind(j, "a boolean", err);
	*out = json_is_true((const json_t *)j->node);
	return STATUS_OK;
}

enum status json_read_int(const struct json *j, int64_t min, int64_t max, int64_t *out, struct error *err)
{
	int64_t v;
	if (!j->node)
		return STATUS_OK;
	if (json_kind(j) == JSON_INT) {
		v = json_integer_value(j->node);
	} else if (json_kind(j) == JSON_FLOAT) {
		double d = json_real_value(j->node);
		if (d != trunc(d))
			return json_fail(j, STATUS_INVALID, err, "must be an integer, not %.9g.", d);
		if (fabs(d) > EXACT_DOUBLE)
			return json_fail(j, STATUS_INVALID, err, "must be between %lld and %lld.", (long long)min,
					 (long long)max);
		v = (int64_t)d;
	} else {
		return wrong_kind(j, "an integer", err);
	}
	if (v < min || v > max)
		return json_fail(j, STATUS_INVALID, err, "must be between %lld and %lld, not %lld.", (long long)min,
				 (long long)max, (long long)v);
	*out = v;
	return STATUS_OK;
}

enum status json_read_number(const struct json *j, double min, double max, double *out, struct error *err)
{
	double v;
	if (!j->node)
		return STATUS_OK;
	if (json_kind(j) != JSON_INT && json_kind(j) != JSON_FLOAT)
		return wrong_kind(j, "a number", err);
	v = json_number_value(j->node);
	if (!(v >= min && v <= max))
		return json_fail(j, STATUS_INVALID, err, "must be between %g and %g, not %.9g.", min, max, v);
	*out = v;
	return STATUS_OK;
}

enum status json_read_text(const struct json *j, struct str *out, struct error *err)
{
	if (!j->node)
		return STATUS_OK;
	if (json_kind(j) != JSON_TEXT)
		return wrong_kind(j, "a string", err);
	*out = json_text(j);
	return STATUS_OK;
}

/* ---- Passing on ---- */

static int append(const char *data, size_t n, void *arg)
{
	buf_append(arg, data, n);
	return 0;
}

void json_write(struct buf *out, const struct json *j)
{
	if (!j->node)
		buf_puts(out, "null");
	else if (json_dump_callback(j->node, append, out, JSON_COMPACT | JSON_ENCODE_ANY) != 0)
		out->failed = true;
}

/* Recursion is bounded by JSON_MAX_DEPTH. */
struct value *json_to_value(struct arena *a, const struct json *j)
{
	struct value *v;
	switch (json_kind(j)) {
	case JSON_NONE:
		return value_none(a);
	case JSON_BOOL:
		return value_bool(a, json_is_true((const json_t *)j->node));
	case JSON_INT:
		return value_int(a, json_integer_value(j->node));
	case JSON_FLOAT:
		return value_float(a, json_real_value(j->node));
	case JSON_TEXT: {
		struct str s = json_text(j);
		return value_string(a, s.p, s.n, VALUE_DATA);
	}
	case JSON_LIST:
		v = value_list(a);
		for (size_t i = 0; i < json_len(j); i++) {
			struct json item = json_at(j, i);
			if (!value_list_add(a, v, json_to_value(a, &item)))
				return NULL;
		}
		return v;
	case JSON_DICT: {
		struct json member;
		void *it = NULL;
		v = value_dict(a);
		while (json_next(j, &it, &member))
			if (!value_dict_set(a, v, member.key, strlen(member.key), json_to_value(a, &member)))
				return NULL;
		return v;
	}
	}
	return NULL;
}
