/*
 * Constrained answers: a grammar says which texts an answer may be, a matcher (grammar_match.h) which tokens may come
 * next.
 *
 * A grammar is compiled from a JSON schema (the subset listed at grammar_json()) into a program of a pushdown automaton
 * over bytes. The texts it allows are a subset of what the schema allows: members come in the order in which
 * `properties` lists them, members that are not listed do not come, whitespace is bounded (none, a space, or a line
 * break with up to 32 blanks), numbers have a bounded count of digits. So every complete text satisfies the schema, and
 * no answer can run away in blanks or digits.
 *
 * A grammar is immutable and may be shared between threads; a matcher belongs to one generation.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/base/str.h"
#include "engine/text/value.h"

struct grammar;

/*
 * The JSON texts that satisfy a schema; NULL: any JSON object.
 *
 * Understood: true and {} (anything), type (one or a list), enum, const, properties, required, additionalProperties,
 * items, prefixItems, minItems, maxItems, minLength, maxLength, pattern and format (see grammar_regex.c), anyOf, allOf
 * of one, minimum, maximum, exclusiveMinimum and exclusiveMaximum of integers, $ref within the document. Annotations
 * (title, description, default, ...) are ignored. Everything else is UNSUPPORTED, named by its path; what is malformed
 * or cannot be satisfied is INVALID, what would take too large a program is LIMIT. Errors name no parameter.
 */
enum status grammar_json(const struct value *schema, struct grammar **out, struct error *err);

/* How a model writes a call: open {"name": "f", "arguments": {...}} close; calls are separated by `separator`. */
struct grammar_call_form {
	const char *before, *open, *close, *separator, *after;
	const char *arguments_key; /* "arguments" or "parameters" */
};

struct grammar_tool {
	struct str name;
	const struct value *parameters; /* schema of an object; NULL: any object */
};

/* Answers that call one of the tools, or (many) one or more of them one after the other. Errors as above. */
enum status grammar_tools(const struct grammar_call_form *form, const struct grammar_tool *tools, size_t n_tools,
                          bool many, struct grammar **out, struct error *err);

struct grammar *grammar_ref(struct grammar *g); /* NULL is allowed; so below. [any thread] */
void grammar_unref(struct grammar *g);
