/* Global functions, and the methods of everything that is not a string. */
#include <stdio.h>
#include <time.h>

#include "engine/text/template_render.h"

/* ---- Global functions ---- */

static bool run_range(struct call *c)
{
	int64_t part[3] = {0, 0, 1};
	if (!no_keywords(c))
		return false;
	if (c->raw.n < 1 || c->raw.n > 3)
		return render_fail(c->r, "range expected 1 to 3 arguments, got %zu", c->raw.n);
	for (size_t i = 0; i < c->raw.n; i++) {
		const struct value *v = &c->raw.args[i];
		if (!val_is_integer(v))
			return v->type == VALUE_UNDEFINED
				       ? undefined_fail(c->r, v)
				       : render_fail(c->r, "'%s' object cannot be interpreted as an integer",
						     type_name(v));
		part[c->raw.n == 1 ? 1 : i] = val_as_int(v);
	}
	int64_t start = part[0], stop = part[1], step = part[2];
	if (step == 0)
		return render_fail(c->r, "range() arg 3 must not be zero");
	/* Unsigned, since the distance of two 64-bit numbers may not fit. */
	uint64_t distance = step > 0 ? (stop > start ? (uint64_t)stop - (uint64_t)start : 0)
				     : (start > stop ? (uint64_t)start - (uint64_t)stop : 0);
	uint64_t by = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;
	uint64_t n = distance ? (distance - 1) / by + 1 : 0;
	if (n > MAX_RANGE)
		return render_limit(c->r, "Range too big. The sandbox blocks ranges larger than %d.", MAX_RANGE);
	struct range *range = render_alloc(c->r, sizeof *range);
	if (!range)
		return false;
	*range = (struct range){start, stop, step, (int64_t)n};
	*c->out = (struct value){.type = VALUE_RANGE, .range = range};
	return true;
}

/* Adds what dict() and namespace() take: mappings or pairs, then keywords. */
static bool fill_dict(struct call *c, struct value_dict *d)
{
	if (c->raw.n > 1)
		return render_fail(c->r, "%s expected at most 1 argument, got %zu", c->fn->name, c->raw.n);
	if (c->raw.n == 1 && c->raw.args[0].type == VALUE_DICT) {
		const struct value_dict *from = c->raw.args[0].dict;
		for (size_t i = 0; i < from->n; i++)
			if (!dict_put(c->r, d, &from->entries[i].key, from->entries[i].value))
				return false;
	} else if (c->raw.n == 1) {
		struct value_seq *items, *pair;
		if (!value_items(c->r, &c->raw.args[0], &items))
			return false;
		for (size_t i = 0; i < items->n; i++) {
			if (!value_items(c->r, &items->items[i], &pair))
				return false;
			if (pair->n != 2)
				return render_fail(
					c->r, "dictionary update sequence element #%zu has length %zu; 2 is required",
					i, pair->n);
			if (!dict_put(c->r, d, &pair->items[0], pair->items[1]))
				return false;
		}
	}
	for (size_t i = 0; i < c->raw.n_keywords; i++) {
		struct value key;
		struct str name = c->raw.keywords[i].name;
		if (!string_new(c->r, name.p, name.n, VALUE_TRUSTED, &key) ||
		    !dict_put(c->r, d, &key, c->raw.keywords[i].value))
			return false;
	}
	return true;
}

static bool run_dict(struct call *c)
{
	return new_dict(c->r, c->out) && fill_dict(c, c->out->dict);
}

static bool run_namespace(struct call *c)
{
	if (!new_dict(c->r, c->out))
		return false;
	c->out->type = VALUE_NAMESPACE;
	return fill_dict(c, c->out->dict);
}

static bool run_raise_exception(struct call *c)
{
	struct value message;
	if (!value_to_string(c->r, &c->arg[0], &message))
		return false;
	c->r->refused = true;
	return render_fail(c->r, "%.*s", message.s->n > 4096 ? 4096 : (int)message.s->n, message.s->p);
}

static bool run_strftime_now(struct call *c)
{
	struct value format;
	struct text t = {0};
	return string_arg(c, 0, &format) && text_add_time(c->r, &t, &format, c->r->now_unix_s) &&
	       text_finish(c->r, &t, c->out);
}

static bool run_cycler(struct call *c)
{
	struct cycler *cycler = render_alloc(c->r, sizeof *cycler);
	if (!cycler || !no_keywords(c))
		return false;
	if (c->raw.n == 0)
		return render_fail(c->r, "at least one item has to be provided");
	cycler->items = (struct value_seq){.items = c->raw.args, .n = c->raw.n, .cap = c->raw.n};
	*c->out = (struct value){.type = VALUE_CYCLER, .cycler = cycler};
	return true;
}

static bool run_joiner(struct call *c)
{
	struct joiner *joiner = render_alloc(c->r, sizeof *joiner);
	if (!joiner)
		return false;
	joiner->separator = c->arg[0];
	if (!val_given(&c->arg[0]) && !string_new(c->r, ", ", 2, VALUE_TRUSTED, &joiner->separator))
		return false;
	*c->out = (struct value){.type = VALUE_JOINER, .joiner = joiner};
	return true;
}

static const struct builtin globals[] = {
	{"cycler", NULL, run_cycler},
	{"dict", NULL, run_dict},
	{"joiner", "?sep", run_joiner},
	{"namespace", NULL, run_namespace},
	{"raise_exception", "message", run_raise_exception},
	{"range", NULL, run_range},
	{"strftime_now", "format", run_strftime_now},
};

const struct builtin *builtin_global(struct str name)
{
	return builtin_find(globals, sizeof globals / sizeof *globals, name);
}

/* ---- Methods ---- */

static bool run_get(struct call *c)
{
	if (!dict_get(c->r, c->self.dict, &c->arg[0], c->out))
		return false;
	if (!val_given(c->out))
		*c->out = val_given(&c->arg[1]) ? c->arg[1] : val_none();
	return true;
}

static bool new_view(struct call *c, enum view_kind kind)
{
	struct view *view = render_alloc(c->r, sizeof *view);
	if (!view)
		return false;
	*view = (struct view){c->self.dict, kind};
	*c->out = (struct value){.type = VALUE_VIEW, .view = view};
	return true;
}

static bool run_keys(struct call *c)
{
	return new_view(c, VIEW_KEYS);
}

static bool run_values(struct call *c)
{
	return new_view(c, VIEW_VALUES);
}

static bool run_items(struct call *c)
{
	return new_view(c, VIEW_ITEMS);
}

/* Lists and dicts never change, so a copy need not be one. */
static bool run_copy(struct call *c)
{
	*c->out = c->self;
	return true;
}

static bool run_seq_index(struct call *c)
{
	int64_t n = value_length(&c->self), start = 0, stop = n;
	if (!int_arg(c, 1, &start) || !int_arg(c, 2, &stop))
		return false;
	start = start < 0 ? (start + n < 0 ? 0 : start + n) : start;
	stop = stop < 0 ? stop + n : stop;
	for (int64_t i = start; i < stop && i < n; i++) {
		bool same;
		struct value at = val_int(i), item;
		if (!get_item(c->r, &c->self, &at, &item) || !op_equal(c->r, &item, &c->arg[0], &same))
			return false;
		if (same) {
			*c->out = val_int(i);
			return true;
		}
	}
	char text[120];
	return render_fail(c->r, "%s is not in %s", describe(c->r, &c->arg[0], text, sizeof text), type_name(&c->self));
}

static bool run_seq_count(struct call *c)
{
	int64_t count = 0;
	struct iter it;
	struct value item;
	bool got, same;
	if (!iter_begin(c->r, &it, &c->self))
		return false;
	for (;;) {
		if (!iter_next(c->r, &it, &item, &got))
			return false;
		if (!got)
			break;
		if (!op_equal(c->r, &item, &c->arg[0], &same))
			return false;
		count += same;
	}
	*c->out = val_int(count);
	return true;
}

static bool run_loop_cycle(struct call *c)
{
	if (c->raw.n == 0)
		return render_fail(c->r, "no items for cycling given");
	*c->out = c->raw.args[c->self.loop->index0 % (int64_t)c->raw.n];
	return no_keywords(c);
}

static bool run_loop_changed(struct call *c)
{
	struct value now;
	struct loop *l = c->self.loop;
	bool same = false;
	if (!no_keywords(c) || !new_tuple(c->r, c->raw.args, c->raw.n, &now))
		return false;
	if (val_given(&l->last_changed) && !op_equal(c->r, &l->last_changed, &now, &same))
		return false;
	l->last_changed = now;
	*c->out = val_bool(!same);
	return true;
}

static bool run_cycler_next(struct call *c)
{
	struct cycler *cycler = c->self.cycler;
	*c->out = cycler->items.items[cycler->at];
	cycler->at = (cycler->at + 1) % cycler->items.n;
	return true;
}

static bool run_cycler_reset(struct call *c)
{
	c->self.cycler->at = 0;
	*c->out = val_none();
	return true;
}

static bool run_is_integer(struct call *c)
{
	*c->out = val_bool(c->self.f == (double)(int64_t)c->self.f);
	return true;
}

static const struct builtin dict_methods[] = {
	{"copy", "", run_copy}, {"get", "key ?default", run_get}, {"items", "", run_items},
	{"keys", "", run_keys}, {"values", "", run_values},
};
static const struct builtin seq_methods[] = {
	{"count", "value", run_seq_count},
	{"index", "value ?start stop", run_seq_index},
	{"copy", "", run_copy}, /* lists only */
};
static const struct builtin loop_methods[] = {
	{"changed", NULL, run_loop_changed},
	{"cycle", NULL, run_loop_cycle},
};
static const struct builtin cycler_methods[] = {
	{"next", "", run_cycler_next},
	{"reset", "", run_cycler_reset},
};
static const struct builtin float_methods[] = {
	{"is_integer", "", run_is_integer},
};

/* Methods that change their object: the sandbox of transformers hides them. */
static const char *const list_changing[] = {"append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"};
static const char *const dict_changing[] = {"clear", "pop", "popitem", "setdefault", "update"};

static bool is_one_of(struct str name, const char *const *names, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (str_is(name, names[i]))
			return true;
	return false;
}

#define COUNT(table) (sizeof(table) / sizeof *(table))

const struct builtin *builtin_method(const struct value *obj, struct str name, bool *refused)
{
	switch (obj->type) {
	case VALUE_STRING:
		return builtin_find(string_methods, n_string_methods, name);
	case VALUE_DICT:
		*refused = is_one_of(name, dict_changing, COUNT(dict_changing));
		return *refused ? NULL : builtin_find(dict_methods, COUNT(dict_methods), name);
	case VALUE_LIST:
		*refused = is_one_of(name, list_changing, COUNT(list_changing));
		return *refused ? NULL : builtin_find(seq_methods, COUNT(seq_methods), name);
	case VALUE_TUPLE:
	case VALUE_RANGE:
		return builtin_find(seq_methods, COUNT(seq_methods) - 1, name);
	case VALUE_LOOP:
		return builtin_find(loop_methods, COUNT(loop_methods), name);
	case VALUE_CYCLER:
		return builtin_find(cycler_methods, COUNT(cycler_methods), name);
	case VALUE_FLOAT:
		return builtin_find(float_methods, COUNT(float_methods), name);
	default:
		return NULL;
	}
}

/* ---- Time ---- */

bool text_add_time(struct render *r, struct text *t, const struct value *format, int64_t unix_s)
{
	time_t now = (time_t)unix_s;
	struct tm tm;
	if (!gmtime_r(&now, &tm))
		return render_fail(r, "the time is out of range");
	const char *p = format->s->p;
	size_t n = format->s->n, plain = 0;
	for (size_t i = 0; i < n;) {
		if (p[i] != '%') {
			i++;
			continue;
		}
		/* One directive: % flags width letter. Python itself answers %f, %z and %Z; its time has no zone. */
		size_t end = i + 1;
		while (end < n && strchr("-_0^#123456789", p[end]) && p[end] && end - i < 6)
			end++;
		if (end < n && (p[end] == 'E' || p[end] == 'O'))
			end++;
		if (end >= n)
			break;
		char directive[12], out[256];
		size_t len = end + 1 - i;
		memcpy(directive, p + i, len);
		directive[len] = '\0';
		if (!render_spend(r, 1) || !text_add_part(r, t, format, plain, i))
			return false;
		size_t out_n;
		if (p[end] == 'f')
			out_n = strlen(strcpy(out, "000000"));
		else if (p[end] == 'z' || p[end] == 'Z')
			out_n = 0;
		else if (p[end] == 's') /* libc would take the fields for local time */
			out_n = (size_t)snprintf(out, sizeof out, "%lld", (long long)unix_s);
		else
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
			out_n = strftime(out, sizeof out, directive, &tm);
#pragma GCC diagnostic pop
		if (!text_add_as(r, t, out, out_n, format, i, end + 1))
			return false;
		i = plain = end + 1;
	}
	return text_add_part(r, t, format, plain, n);
}
