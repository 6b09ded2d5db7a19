/*
 * The values a chat template works on: none, booleans, integers, floats, strings, lists and (ordered) dicts. Built by
 * the server from a request, read by the template engine. All of them live in one arena and die with it; a builder
 * returns NULL (or false) when the arena is exhausted, and every builder accepts NULL operands and passes them on, so a
 * caller checks once at the end.
 *
 * A string remembers where it came from: VALUE_DATA is text of a user or a tool, VALUE_TRUSTED is text of the template
 * or the model file. The mark survives concatenation, slicing and filters byte by byte, and ends up in the rendered
 * prompt's spans: control tokens are recognised only in trusted bytes.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/str.h"

struct value;

enum value_origin { VALUE_DATA, VALUE_TRUSTED };

struct value *value_none(struct arena *a);
struct value *value_bool(struct arena *a, bool b);
struct value *value_int(struct arena *a, int64_t i);
struct value *value_float(struct arena *a, double f);
struct value *value_string(struct arena *a, const char *p, size_t n, enum value_origin origin); /* copies */
struct value *value_list(struct arena *a);
bool value_list_add(struct arena *a, struct value *list, struct value *item);
struct value *value_dict(struct arena *a);
/* Sets a key, keeping the position of one that is already there. The key is copied. */
bool value_dict_set(struct arena *a, struct value *dict, const char *key, size_t key_n, struct value *item);
/* The item under a key, or NULL. */
struct value *value_dict_get(const struct value *dict, const char *key, size_t key_n);
