#include "tests/support/fake_value.h"

#include <string.h>

enum kind { NONE, BOOL, INT, FLOAT, STRING, LIST, DICT };

struct value {
	enum kind kind;
	bool b;
	int64_t i;
	double f;
	struct str s;
	enum value_origin origin;
	struct entry {
		struct entry *next;
		struct str key;
		struct value *item;
	} * first, *last;
};

static struct value *make(struct arena *a, enum kind kind)
{
	struct value *v = arena_alloc(a, sizeof *v);
	if (v)
		v->kind = kind;
	return v;
}

struct value *value_none(struct arena *a)
{
	return make(a, NONE);
}

struct value *value_bool(struct arena *a, bool b)
{
	struct value *v = make(a, BOOL);
	if (v)
		v->b = b;
	return v;
}

struct value *value_int(struct arena *a, int64_t i)
{
	struct value *v = make(a, INT);
	if (v)
		v->i = i;
	return v;
}

struct value *value_float(struct arena *a, double f)
{
	struct value *v = make(a, FLOAT);
	if (v)
		v->f = f;
	return v;
}

struct value *value_string(struct arena *a, const char *p, size_t n, enum value_origin origin)
{
	struct value *v = make(a, STRING);
	if (!v)
		return NULL;
	v->s = arena_str(a, p, n);
	v->origin = origin;
	return v->s.p ? v : NULL;
}

struct value *value_list(struct arena *a)
{
	return make(a, LIST);
}

struct value *value_dict(struct arena *a)
{
	return make(a, DICT);
}

static bool add(struct arena *a, struct value *v, struct str key, struct value *item)
{
	struct entry *e = arena_alloc(a, sizeof *e);
	if (!e)
		return false;
	e->key = key;
	e->item = item;
	if (v->last)
		v->last->next = e;
	else
		v->first = e;
	v->last = e;
	return true;
}

bool value_list_add(struct arena *a, struct value *list, struct value *item)
{
	return list && item && add(a, list, (struct str){NULL, 0}, item);
}

bool value_dict_set(struct arena *a, struct value *dict, const char *key, size_t key_n, struct value *item)
{
	struct str copy;
	if (!dict || !item)
		return false;
	for (struct entry *e = dict->first; e; e = e->next) {
		if (str_eq(e->key, (struct str){key, key_n})) {
			e->item = item;
			return true;
		}
	}
	copy = arena_str(a, key, key_n);
	return copy.p && add(a, dict, copy, item);
}

struct value *value_dict_get(const struct value *dict, const char *key, size_t key_n)
{
	for (struct entry *e = dict->first; e; e = e->next)
		if (str_eq(e->key, (struct str){key, key_n}))
			return e->item;
	return NULL;
}

void fake_value_write(const struct value *v, struct buf *out)
{
	switch (v->kind) {
	case NONE:
		buf_puts(out, "null");
		break;
	case BOOL:
		buf_puts(out, v->b ? "true" : "false");
		break;
	case INT:
		buf_printf(out, "%lld", (long long)v->i);
		break;
	case FLOAT:
		buf_json_number(out, v->f);
		break;
	case STRING:
		if (v->origin != VALUE_DATA)
			buf_putc(out, '!');
		buf_json_string(out, v->s.p, v->s.n);
		break;
	case LIST:
	case DICT:
		buf_putc(out, v->kind == LIST ? '[' : '{');
		for (const struct entry *e = v->first; e; e = e->next) {
			if (e != v->first)
				buf_putc(out, ',');
			if (v->kind == DICT) {
				buf_json_string(out, e->key.p, e->key.n);
				buf_putc(out, ':');
			}
			fake_value_write(e->item, out);
		}
		buf_putc(out, v->kind == LIST ? ']' : '}');
		break;
	}
}
