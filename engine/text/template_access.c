/* Looking into values: truth, length, iteration, attributes, items and slices, and what is undefined. */
#include <stdio.h>

#include "engine/text/template_render.h"
#include "engine/text/template_unicode.h"

/* ---- Making values ---- */

bool new_list(struct render *r, struct value *out)
{
	struct value_seq *seq = render_alloc(r, sizeof *seq);
	*out = (struct value){.type = VALUE_LIST, .seq = seq};
	return seq != NULL;
}

bool new_tuple(struct render *r, const struct value *items, size_t n, struct value *out)
{
	struct value_seq *seq = render_alloc(r, sizeof *seq);
	if (!seq)
		return false;
	*out = (struct value){.type = VALUE_TUPLE, .seq = seq};
	seq->items = render_alloc(r, n * sizeof *items);
	if (!seq->items)
		return false;
	if (n)
		memcpy(seq->items, items, n * sizeof *items);
	seq->n = seq->cap = n;
	return true;
}

bool new_dict(struct render *r, struct value *out)
{
	struct value_dict *dict = render_alloc(r, sizeof *dict);
	*out = (struct value){.type = VALUE_DICT, .dict = dict};
	return dict != NULL;
}

bool list_add(struct render *r, struct value *list, struct value item)
{
	if (!render_spend(r, 1))
		return false;
	return value_seq_add(r->arena, list->seq, item) || render_exhausted(r, (list->seq->cap * 2 + 4) * sizeof item);
}

static bool hash_failed(struct render *r, enum hash_result result, const struct value *key)
{
	if (result == HASH_UNHASHABLE)
		return render_fail(r, "unhashable type: '%s'", type_name(key));
	return render_limit(r, "the template takes too many steps or compares values that are nested too deeply");
}

bool dict_put(struct render *r, struct value_dict *d, const struct value *key, struct value item)
{
	bool full = false;
	if (!render_spend(r, 1))
		return false;
	enum hash_result result = value_dict_put(r->arena, d, key, item, &r->steps, &full);
	if (result != HASH_OK)
		return hash_failed(r, result, key);
	/* Either the entries or their index had to grow. */
	return !full || render_exhausted(r, (d->cap * 2 + 8) * (sizeof *d->entries + 16));
}

bool dict_get(struct render *r, const struct value_dict *d, const struct value *key, struct value *found)
{
	struct dict_entry *e;
	enum hash_result result = value_dict_find(d, key, &r->steps, &e);
	if (result != HASH_OK)
		return hash_failed(r, result, key);
	*found = e ? e->value : (struct value){.type = VALUE_MISSING};
	return true;
}

bool new_generator(struct render *r, const struct value *over, void *state,
		   bool (*next)(struct render *, struct generator *, struct value *, bool *), struct value *out)
{
	struct generator *g = render_alloc(r, sizeof *g);
	if (!g || !iter_begin(r, &g->source, over))
		return false;
	g->next = next;
	g->state = state;
	*out = (struct value){.type = VALUE_GENERATOR, .generator = g};
	return true;
}

/* ---- Undefined ---- */

static bool new_undefined(struct render *r, struct undefined u, struct value *out)
{
	struct undefined *copy = render_alloc(r, sizeof *copy);
	if (!copy)
		return false;
	*copy = u;
	*out = (struct value){.type = VALUE_UNDEFINED, .origin = VALUE_TRUSTED, .undefined = copy};
	return true;
}

bool undefined_hint(struct render *r, const char *hint, struct value *out)
{
	struct str copy = arena_str(r->arena, hint, strlen(hint));
	return (copy.p || render_exhausted(r, strlen(hint))) &&
	       new_undefined(r, (struct undefined){.hint = copy.p}, out);
}

bool undefined_name(struct render *r, struct str name, struct value *out)
{
	struct undefined u = {0};
	return string_new(r, name.p, name.n, VALUE_TRUSTED, &u.name) && new_undefined(r, u, out);
}

bool undefined_of(struct render *r, const struct value *obj, const struct value *name, struct value *out)
{
	return new_undefined(r, (struct undefined){.has_obj = true, .obj = *obj, .name = *name}, out);
}

/* The module that Python names before types that are not built in. */
static const char *type_module(const struct value *v)
{
	switch (v->type) {
	case VALUE_NAMESPACE:
	case VALUE_CYCLER:
	case VALUE_JOINER:
		return "jinja2.utils.";
	case VALUE_LOOP:
	case VALUE_MACRO:
		return "jinja2.runtime.";
	case VALUE_STRING:
		return v->flags & VALUE_MARKUP ? "markupsafe." : "";
	default:
		return "";
	}
}

bool undefined_fail(struct render *r, const struct value *v)
{
	const struct undefined *u = v->undefined;
	char name[128];
	if (u->hint)
		return render_fail(r, "%s", u->hint);
	describe(r, &u->name, name, sizeof name);
	if (!u->has_obj)
		return render_fail(r, "%s is undefined", name);
	char type[64];
	if (u->obj.type == VALUE_NONE)
		strcpy(type, "None");
	else
		snprintf(type, sizeof type, "%s%s object", type_module(&u->obj), type_name(&u->obj));
	if (u->name.type == VALUE_STRING)
		return render_fail(r, "'%s' has no attribute %s", type, name);
	return render_fail(r, "%s has no element %s", type, name);
}

/* ---- Truth, length, iteration ---- */

int64_t value_length(const struct value *v)
{
	switch (v->type) {
	case VALUE_STRING:
		return (int64_t)v->s->n_chars;
	case VALUE_LIST:
	case VALUE_TUPLE:
		return (int64_t)v->seq->n;
	case VALUE_DICT:
		return (int64_t)v->dict->n;
	case VALUE_VIEW:
		return (int64_t)v->view->dict->n;
	case VALUE_RANGE:
		return v->range->n;
	case VALUE_UNDEFINED:
		return 0;
	case VALUE_LOOP:
		return v->loop->n;
	default:
		return -1;
	}
}

bool value_truth(const struct value *v)
{
	switch (v->type) {
	case VALUE_MISSING:
	case VALUE_NONE:
		return false;
	case VALUE_BOOL:
		return v->b;
	case VALUE_INT:
		return v->i != 0;
	case VALUE_FLOAT:
		return v->f != 0;
	default:
		return value_length(v) != 0;
	}
}

bool value_is_iterable(const struct value *v)
{
	switch (v->type) {
	case VALUE_STRING:
	case VALUE_LIST:
	case VALUE_TUPLE:
	case VALUE_DICT:
	case VALUE_VIEW:
	case VALUE_RANGE:
	case VALUE_GENERATOR:
	case VALUE_UNDEFINED:
		return true;
	default:
		return false;
	}
}

bool iter_begin(struct render *r, struct iter *it, const struct value *over)
{
	if (!value_is_iterable(over))
		return render_fail(r, "'%s' object is not iterable", type_name(over));
	*it = (struct iter){.over = *over};
	return true;
}

static bool next_entry(struct render *r, struct iter *it, const struct value_dict *d, enum view_kind kind,
		       struct value *out, bool *got)
{
	if (it->at >= d->n)
		return true;
	const struct dict_entry *e = &d->entries[it->at++];
	*got = true;
	if (kind == VIEW_ITEMS)
		return new_tuple(r, (struct value[]){e->key, e->value}, 2, out);
	*out = kind == VIEW_KEYS ? e->key : e->value;
	return true;
}

bool iter_next(struct render *r, struct iter *it, struct value *out, bool *got)
{
	const struct value *v = &it->over;
	*got = false;
	if (!render_spend(r, 1))
		return false;
	switch (v->type) {
	case VALUE_STRING: {
		if (it->byte >= v->s->n)
			return true;
		uint32_t cp;
		size_t from = it->byte;
		it->byte += char_next(v->s->p + from, v->s->n - from, &cp);
		*got = true;
		if (!string_part(r, v, from, it->byte, out))
			return false;
		out->flags = 0;
		return true;
	}
	case VALUE_LIST:
	case VALUE_TUPLE:
		if (it->at < v->seq->n) {
			*out = v->seq->items[it->at++];
			*got = true;
		}
		return true;
	case VALUE_DICT:
		return next_entry(r, it, v->dict, VIEW_KEYS, out, got);
	case VALUE_VIEW:
		return next_entry(r, it, v->view->dict, v->view->kind, out, got);
	case VALUE_RANGE:
		if ((int64_t)it->at < v->range->n) {
			*out = val_int(v->range->start + (int64_t)it->at++ * v->range->step);
			*got = true;
		}
		return true;
	case VALUE_GENERATOR: {
		if (v->generator->done)
			return true;
		/* A generator may run over another one, and so on. */
		if (!render_enter(r) || !v->generator->next(r, v->generator, out, got))
			return false;
		render_leave(r);
		v->generator->done = !*got;
		return true;
	}
	default:
		return true;
	}
}

bool value_items(struct render *r, const struct value *v, struct value_seq **out)
{
	if (v->type == VALUE_LIST || v->type == VALUE_TUPLE) {
		*out = v->seq;
		return true;
	}
	struct value list, item;
	struct iter it;
	bool got;
	if (!new_list(r, &list) || !iter_begin(r, &it, v))
		return false;
	for (;;) {
		if (!iter_next(r, &it, &item, &got))
			return false;
		if (!got)
			break;
		if (!list_add(r, &list, item))
			return false;
	}
	*out = list.seq;
	return true;
}

/* ---- Attributes and items ---- */

static bool is_dunder(struct str name)
{
	return name.n > 4 && memcmp(name.p, "__", 2) == 0;
}

static bool unsafe_attr(struct render *r, const struct value *obj, struct str name, struct value *out)
{
	char hint[200];
	snprintf(hint, sizeof hint, "access to attribute '%.*s' of '%s' object is unsafe.",
		 name.n > 80 ? 80 : (int)name.n, name.p, type_name(obj));
	return undefined_hint(r, hint, out);
}

static bool macro_attr(struct render *r, const struct value *v, struct str name, struct value *out)
{
	const struct function *f = v->macro->function;
	if (str_is(name, "name"))
		return string_new(r, f->name.p, f->name.n, VALUE_TRUSTED, out);
	if (str_is(name, "catch_kwargs"))
		*out = val_bool(f->kwargs_slot >= 0);
	else if (str_is(name, "catch_varargs"))
		*out = val_bool(f->varargs_slot >= 0);
	else if (str_is(name, "caller"))
		*out = val_bool(f->uses & USES_CALLER);
	else if (str_is(name, "arguments")) {
		struct value list, item;
		if (!new_list(r, &list))
			return false;
		for (size_t i = 0; i < f->n_params; i++)
			if (!string_new(r, f->params[i].name.p, f->params[i].name.n, VALUE_TRUSTED, &item) ||
			    !list_add(r, &list, item))
				return false;
		return new_tuple(r, list.seq->items, list.seq->n, out);
	}
	return true;
}

/* Python's getattr(): *out is MISSING when there is no such attribute, undefined when the sandbox hides it. */
static bool own_attr(struct render *r, const struct value *obj, struct str name, struct value *out)
{
	*out = (struct value){.type = VALUE_MISSING};
	switch (obj->type) {
	case VALUE_UNDEFINED:
		return undefined_fail(r, obj);
	case VALUE_NAMESPACE: {
		struct dict_entry *e = value_dict_find_text(obj->dict, name);
		if (e)
			*out = e->value;
		break;
	}
	case VALUE_TUPLE:
		if (obj->seq->named_pair && (str_is(name, "grouper") || str_is(name, "list"))) {
			*out = obj->seq->items[str_is(name, "list")];
			return true;
		}
		break;
	case VALUE_RANGE:
		if (str_is(name, "start"))
			*out = val_int(obj->range->start);
		else if (str_is(name, "stop"))
			*out = val_int(obj->range->stop);
		else if (str_is(name, "step"))
			*out = val_int(obj->range->step);
		break;
	case VALUE_MACRO:
		if (!macro_attr(r, obj, name, out))
			return false;
		break;
	case VALUE_LOOP:
		if (!loop_attr(r, obj, name, out))
			return false;
		break;
	case VALUE_CYCLER:
		if (str_is(name, "current"))
			*out = obj->cycler->items.items[obj->cycler->at];
		break;
	default:
		break;
	}
	if (val_given(out))
		return true;
	if (is_dunder(name))
		return unsafe_attr(r, obj, name, out);
	bool refused = false;
	const struct builtin *builtin = builtin_method(obj, name, &refused);
	if (refused)
		return unsafe_attr(r, obj, name, out);
	if (!builtin)
		return true;
	struct method *m = render_alloc(r, sizeof *m);
	if (!m)
		return false;
	*m = (struct method){*obj, builtin};
	*out = (struct value){.type = VALUE_METHOD, .method = m};
	return true;
}

bool get_attr(struct render *r, const struct value *obj, struct str name, struct value *out)
{
	if (!own_attr(r, obj, name, out))
		return false;
	if (val_given(out))
		return true;
	if (obj->type == VALUE_DICT) {
		struct dict_entry *e = value_dict_find_text(obj->dict, name);
		if (e) {
			*out = e->value;
			return true;
		}
	}
	struct value text;
	return string_new(r, name.p, name.n, VALUE_TRUSTED, &text) && undefined_of(r, obj, &text, out);
}

/* A Python index into n items; false when it is outside. */
static bool in_bounds(int64_t i, int64_t n, size_t *at)
{
	if (i < 0)
		i += n;
	*at = (size_t)i;
	return i >= 0 && i < n;
}

static bool char_at(struct render *r, const struct value *s, size_t i, struct value *out)
{
	if (s->s->n_chars != s->s->n && !render_spend(r, s->s->n / 64))
		return false;
	size_t from = string_offset(s->s, i);
	return string_part(r, s, from, string_offset(s->s, i + 1) > from ? string_offset(s->s, i + 1) : s->s->n, out);
}

/* Python's obj[key]: *out is MISSING where that would raise a TypeError or LookupError. */
static bool own_item(struct render *r, const struct value *obj, const struct value *key, struct value *out)
{
	*out = (struct value){.type = VALUE_MISSING};
	size_t at;
	if (obj->type == VALUE_UNDEFINED)
		return undefined_fail(r, obj);
	if (obj->type == VALUE_DICT) {
		struct dict_entry *e = NULL;
		if (value_dict_find(obj->dict, key, &r->steps, &e) == HASH_EXHAUSTED)
			return hash_failed(r, HASH_EXHAUSTED, key);
		if (e)
			*out = e->value;
		return true;
	}
	if (!val_is_integer(key) || !in_bounds(val_as_int(key), value_length(obj), &at))
		return true;
	switch (obj->type) {
	case VALUE_STRING:
		return char_at(r, obj, at, out);
	case VALUE_LIST:
	case VALUE_TUPLE:
		*out = obj->seq->items[at];
		return true;
	case VALUE_RANGE:
		*out = val_int(obj->range->start + (int64_t)at * obj->range->step);
		return true;
	default:
		return true;
	}
}

bool get_item(struct render *r, const struct value *obj, const struct value *key, struct value *out)
{
	if (!own_item(r, obj, key, out))
		return false;
	if (val_given(out))
		return true;
	if (key->type == VALUE_STRING) {
		if (!own_attr(r, obj, val_str(key), out))
			return false;
		if (val_given(out))
			return true;
	}
	return undefined_of(r, obj, key, out);
}

/* ---- Slices ---- */

static bool slice_bound(struct render *r, const struct value *v, int64_t *out, bool *given)
{
	*given = v->type != VALUE_MISSING && v->type != VALUE_NONE;
	if (!*given)
		return true;
	if (!val_is_integer(v))
		return render_fail(r, "slice indices must be integers or None or have an __index__ method");
	*out = val_as_int(v);
	return true;
}

static int64_t clamp(int64_t i, int64_t n, int64_t low, int64_t high)
{
	if (i < 0)
		i += n;
	return i < low ? low : i > high ? high : i;
}

/* The first index, the step and the count of what a slice of n items selects. */
static bool slice_indices(struct render *r, const struct value bounds[3], int64_t n, int64_t *start, int64_t *step,
			  int64_t *count)
{
	int64_t from = 0, to = 0, by = 1;
	bool has_from, has_to, has_by;
	if (!slice_bound(r, &bounds[0], &from, &has_from) || !slice_bound(r, &bounds[1], &to, &has_to) ||
	    !slice_bound(r, &bounds[2], &by, &has_by))
		return false;
	if (by == 0)
		return render_fail(r, "slice step cannot be zero");
	if (by < -INT64_MAX)
		by = -INT64_MAX;
	int64_t low = by < 0 ? -1 : 0, high = by < 0 ? n - 1 : n;
	from = has_from ? clamp(from, n, low, high) : by < 0 ? high : low;
	to = has_to ? clamp(to, n, low, high) : by < 0 ? low : high;
	int64_t distance = by < 0 ? from - to : to - from;
	*start = from;
	*step = by;
	*count = distance <= 0 ? 0 : (distance - 1) / (by < 0 ? -by : by) + 1;
	return true;
}

static bool slice_string(struct render *r, const struct value *s, int64_t start, int64_t step, int64_t count,
			 struct value *out)
{
	if (count <= 0)
		return string_part(r, s, 0, 0, out);
	if (s->s->n_chars != s->s->n && !render_spend(r, s->s->n / 64))
		return false;
	if (step == 1)
		return string_part(r, s, string_offset(s->s, (size_t)start),
				   string_offset(s->s, (size_t)(start + count)), out);
	struct text t = {0};
	size_t at = string_offset(s->s, (size_t)start);
	for (int64_t i = 0; i < count; i++) {
		uint32_t cp;
		size_t len = char_next(s->s->p + at, s->s->n - at, &cp);
		if (!render_spend(r, 1) || !text_add_part(r, &t, s, at, at + len))
			return false;
		/* Walk to the next character from where we are; a step may be far. */
		if (i + 1 == count)
			break;
		if (s->s->n_chars == s->s->n) {
			at = (size_t)((int64_t)at + step);
			continue;
		}
		int64_t distance = step < 0 ? -step : step;
		if (!render_spend(r, (uint64_t)distance / 16))
			return false;
		for (; distance > 0; distance--)
			at = step < 0 ? char_prev(s->s->p, at) : at + char_next(s->s->p + at, s->s->n - at, &cp);
	}
	if (!text_finish(r, &t, out))
		return false;
	out->flags = s->flags;
	return true;
}

bool get_slice(struct render *r, const struct value *obj, const struct value bounds[3], struct value *out)
{
	int64_t start = 0, step = 1, count = 0;
	if (obj->type == VALUE_UNDEFINED)
		return undefined_fail(r, obj);
	if (obj->type == VALUE_DICT)
		return render_fail(r, "unhashable type: 'slice'");
	if (obj->type != VALUE_STRING && obj->type != VALUE_LIST && obj->type != VALUE_TUPLE &&
	    obj->type != VALUE_RANGE)
		return render_fail(r, "'%s' object is not subscriptable", type_name(obj));
	if (!slice_indices(r, bounds, value_length(obj), &start, &step, &count))
		return false;
	if (obj->type == VALUE_STRING)
		return slice_string(r, obj, start, step, count, out);
	if (obj->type == VALUE_RANGE) {
		struct range *range = render_alloc(r, sizeof *range);
		if (!range)
			return false;
		int64_t by = 0;
		if (count > 1 && __builtin_mul_overflow(obj->range->step, step, &by))
			return render_limit(r, "integers beyond 64 bits are not supported");
		int64_t first = obj->range->start + (count > 0 ? start : 0) * obj->range->step;
		*range = (struct range){first, first + by * count, by ? by : 1, count};
		if (count == 1)
			range->stop = first + 1;
		*out = (struct value){.type = VALUE_RANGE, .range = range};
		return true;
	}
	if (!render_spend(r, (uint64_t)count / 4))
		return false;
	if (step == 1 && count > 0) {
		struct value_seq *seq = render_alloc(r, sizeof *seq);
		if (!seq)
			return false;
		/* Lists never change, so a slice can share the items. */
		*seq = (struct value_seq){.items = obj->seq->items + start, .n = (size_t)count, .cap = (size_t)count};
		*out = (struct value){.type = obj->type, .seq = seq};
		return true;
	}
	struct value list;
	if (!new_list(r, &list))
		return false;
	for (int64_t i = 0; i < count; i++)
		if (!list_add(r, &list, obj->seq->items[start + i * step]))
			return false;
	*out = list;
	out->type = obj->type;
	return true;
}
