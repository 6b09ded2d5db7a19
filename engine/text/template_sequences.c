/* Filters on sequences and mappings. */
#include "engine/text/template_render.h"
#include "engine/text/template_unicode.h"

/* ---- Attribute paths: "a.b.0" ---- */

struct path {
	struct value *parts; /* [n] */
	size_t n;
	struct value fallback; /* MISSING, or what stands for an undefined value */
	bool fold_case;
};

/* One path out of text[from..to). */
static bool parse_path(struct render *r, const struct value *text, size_t from, size_t to, struct path *out)
{
	const char *p = text->s->p;
	size_t n = 1, k = 0;
	for (size_t i = from; i < to; i++)
		n += p[i] == '.';
	out->parts = render_alloc(r, n * sizeof *out->parts);
	if (!out->parts)
		return false;
	out->n = n;
	for (size_t i = from; k < n; k++) {
		size_t end = i;
		bool digits = true;
		int64_t index = 0;
		for (; end < to && p[end] != '.'; end++) {
			digits &= p[end] >= '0' && p[end] <= '9' && end - i < 18;
			index = digits ? index * 10 + (p[end] - '0') : 0;
		}
		if (digits && end > i)
			out->parts[k] = val_int(index);
		else if (!string_part(r, text, i, end, &out->parts[k]))
			return false;
		i = end + 1;
	}
	return true;
}

/* attribute: MISSING or None (the item itself), an integer or a dotted string. */
static bool make_path(struct render *r, const struct value *attribute, bool fold_case, struct path *out)
{
	*out = (struct path){.fold_case = fold_case};
	if (!val_given(attribute) || attribute->type == VALUE_NONE)
		return true;
	if (attribute->type == VALUE_STRING)
		return parse_path(r, attribute, 0, attribute->s->n, out);
	out->parts = render_alloc(r, sizeof *out->parts);
	if (!out->parts)
		return false;
	out->parts[0] = *attribute;
	out->n = 1;
	return true;
}

static bool follow(struct render *r, const struct path *path, const struct value *item, struct value *out)
{
	*out = *item;
	for (size_t i = 0; i < path->n; i++) {
		struct value from = *out;
		if (!get_item(r, &from, &path->parts[i], out))
			return false;
		if (out->type == VALUE_UNDEFINED && val_given(&path->fallback) && path->fallback.type != VALUE_NONE)
			*out = path->fallback;
	}
	if (!path->fold_case || out->type != VALUE_STRING)
		return true;
	const struct builtin *lower = builtin_find(string_methods, n_string_methods, str_from("lower"));
	const struct arguments none = {0};
	struct value s = *out;
	return call_builtin(r, lower, &s, &none, out);
}

/* ---- Generators ---- */

static bool next_item(struct render *r, struct generator *g, struct value *out, bool *got)
{
	return iter_next(r, &g->source, out, got);
}

static bool generator_over(struct call *c, const struct value *items)
{
	return new_generator(c->r, items, NULL, next_item, c->out);
}

/* What map, select and their kin do with an item. */
struct transform {
	struct path path;	   /* map(attribute=...), selectattr */
	const struct builtin *run; /* filter or test; NULL: none, or unknown */
	struct str name;	   /* of `run`, if one is wanted */
	struct arguments args;
	bool wanted; /* a filter or test was named */
	bool negate;
};

static bool transform_fails(struct render *r, const struct transform *t, const char *kind)
{
	return render_fail(r, "No %s named '%.*s'.", kind, t->name.n > 80 ? 80 : (int)t->name.n, t->name.p);
}

static bool next_mapped(struct render *r, struct generator *g, struct value *out, bool *got)
{
	struct transform *t = g->state;
	struct value item;
	if (!iter_next(r, &g->source, &item, got))
		return false;
	if (!*got)
		return true;
	if (!t->wanted)
		return follow(r, &t->path, &item, out);
	return t->run ? call_builtin(r, t->run, &item, &t->args, out) : transform_fails(r, t, "filter");
}

static bool next_selected(struct render *r, struct generator *g, struct value *out, bool *got)
{
	struct transform *t = g->state;
	struct value seen, result;
	for (;;) {
		if (!iter_next(r, &g->source, out, got))
			return false;
		if (!*got)
			return true;
		if (!follow(r, &t->path, out, &seen))
			return false;
		result = seen;
		if (t->wanted &&
		    !(t->run ? call_builtin(r, t->run, &seen, &t->args, &result) : transform_fails(r, t, "test")))
			return false;
		if (value_truth(&result) != t->negate)
			return true;
	}
}

/* Takes the name of a filter or test from the arguments at `first`, and leaves it the rest. */
static bool named_function(struct call *c, struct transform *t, size_t first, bool filter)
{
	const struct value *name = &c->raw.args[first];
	if (name->type != VALUE_STRING)
		return render_fail(c->r, "%s: the name of a %s must be a string, not %s", c->fn->name,
				   filter ? "filter" : "test", type_name(name));
	t->wanted = true;
	t->name = val_str(name);
	t->run = filter ? builtin_filter(t->name) : builtin_test(t->name);
	t->args = c->raw;
	t->args.args += first + 1;
	t->args.n -= first + 1;
	return true;
}

/* The generator of the items that pass, or of nothing for what is false (which need not be iterable). */
static bool start(struct call *c, struct transform *t,
		  bool (*next)(struct render *, struct generator *, struct value *, bool *))
{
	struct value empty;
	if (!value_truth(&c->self))
		return new_tuple(c->r, NULL, 0, &empty) && new_generator(c->r, &empty, t, next, c->out);
	return new_generator(c->r, &c->self, t, next, c->out);
}

static bool run_map(struct call *c)
{
	struct transform *t = render_alloc(c->r, sizeof *t);
	const struct value *attribute = NULL, *fallback = NULL;
	if (!t)
		return false;
	for (size_t i = 0; c->raw.n == 0 && i < c->raw.n_keywords; i++) {
		struct str name = c->raw.keywords[i].name;
		if (str_is(name, "attribute"))
			attribute = &c->raw.keywords[i].value;
		else if (str_is(name, "default"))
			fallback = &c->raw.keywords[i].value;
		else
			return render_fail(c->r, "Unexpected keyword argument '%.*s'", STR_ARG(name));
	}
	if (attribute) {
		if (!make_path(c->r, attribute, false, &t->path))
			return false;
		if (fallback)
			t->path.fallback = *fallback;
	} else if (c->raw.n == 0) {
		return render_fail(c->r, "map requires a filter argument");
	} else if (!named_function(c, t, 0, true)) {
		return false;
	}
	return start(c, t, next_mapped);
}

static bool select_items(struct call *c, bool by_attribute, bool negate)
{
	struct transform *t = render_alloc(c->r, sizeof *t);
	if (!t)
		return false;
	t->negate = negate;
	if (by_attribute && c->raw.n == 0)
		return render_fail(c->r, "Missing parameter for attribute name");
	if (by_attribute && !make_path(c->r, &c->raw.args[0], false, &t->path))
		return false;
	if (c->raw.n > by_attribute && !named_function(c, t, by_attribute, false))
		return false;
	return start(c, t, next_selected);
}

static bool run_select(struct call *c)
{
	return select_items(c, false, false);
}

static bool run_reject(struct call *c)
{
	return select_items(c, false, true);
}

static bool run_selectattr(struct call *c)
{
	return select_items(c, true, false);
}

static bool run_rejectattr(struct call *c)
{
	return select_items(c, true, true);
}

struct unique {
	struct path path;
	struct value seen; /* a dict */
};

static bool next_unique(struct render *r, struct generator *g, struct value *out, bool *got)
{
	struct unique *u = g->state;
	struct value key, found;
	for (;;) {
		if (!iter_next(r, &g->source, out, got))
			return false;
		if (!*got)
			return true;
		if (!follow(r, &u->path, out, &key) || !dict_get(r, u->seen.dict, &key, &found))
			return false;
		if (!val_given(&found))
			return dict_put(r, u->seen.dict, &key, val_none());
	}
}

static bool run_unique(struct call *c)
{
	struct unique *u = render_alloc(c->r, sizeof *u);
	bool case_sensitive = false;
	truth_arg(c, 0, &case_sensitive);
	return u && make_path(c->r, &c->arg[1], !case_sensitive, &u->path) && new_dict(c->r, &u->seen) &&
	       new_generator(c->r, &c->self, u, next_unique, c->out);
}

static bool run_items(struct call *c)
{
	struct value empty;
	struct view *view = render_alloc(c->r, sizeof *view);
	if (!view)
		return false;
	if (c->self.type == VALUE_UNDEFINED)
		return new_tuple(c->r, NULL, 0, &empty) && generator_over(c, &empty);
	if (c->self.type != VALUE_DICT)
		return render_fail(c->r, "Can only get item pairs from a mapping.");
	*view = (struct view){c->self.dict, VIEW_ITEMS};
	return generator_over(c, &(struct value){.type = VALUE_VIEW, .view = view});
}

/* ---- Whole sequences ---- */

static bool run_length(struct call *c)
{
	int64_t n = value_length(&c->self);
	if (n < 0)
		return render_fail(c->r, "object of type '%s' has no len()", type_name(&c->self));
	*c->out = val_int(n);
	return true;
}

static bool run_list(struct call *c)
{
	struct value_seq *items;
	if (!value_is_iterable(&c->self))
		return render_fail(c->r, "'%s' object is not iterable", type_name(&c->self));
	if (!value_items(c->r, &c->self, &items))
		return false;
	*c->out = (struct value){.type = VALUE_LIST, .seq = items};
	return true;
}

static bool run_first(struct call *c)
{
	struct iter it;
	bool got;
	if (c->self.type == VALUE_GENERATOR) {
		if (c->self.generator->done)
			return undefined_hint(c->r, "No first item, sequence was empty.", c->out);
	}
	if (!iter_begin(c->r, &it, &c->self) || !iter_next(c->r, &it, c->out, &got))
		return false;
	return got || undefined_hint(c->r, "No first item, sequence was empty.", c->out);
}

/* Items from the end. */
static bool reversed(struct call *c, struct value_seq **out)
{
	struct value_seq *items;
	struct value list;
	if (!value_items(c->r, &c->self, &items) || !new_list(c->r, &list))
		return false;
	for (size_t i = items->n; i > 0; i--)
		if (!list_add(c->r, &list, items->items[i - 1]))
			return false;
	*out = list.seq;
	return true;
}

static bool run_last(struct call *c)
{
	int64_t n = value_length(&c->self);
	struct value_seq *items;
	if (!value_is_iterable(&c->self) || n < 0)
		return render_fail(c->r, "'%s' object is not reversible", type_name(&c->self));
	if (n == 0)
		return undefined_hint(c->r, "No last item, sequence was empty.", c->out);
	if (c->self.type == VALUE_STRING)
		return string_part(c->r, &c->self, char_prev(c->self.s->p, c->self.s->n), c->self.s->n, c->out);
	if (!value_items(c->r, &c->self, &items))
		return false;
	*c->out = items->items[items->n - 1];
	return true;
}

static bool run_reverse(struct call *c)
{
	struct value_seq *items;
	if (c->self.type == VALUE_STRING) {
		struct value bounds[3] = {[2] = val_int(-1)};
		return get_slice(c->r, &c->self, bounds, c->out);
	}
	if (!value_is_iterable(&c->self))
		return render_fail(c->r, "argument must be iterable");
	if (!reversed(c, &items))
		return false;
	struct value list = {.type = VALUE_LIST, .seq = items};
	if (c->self.type == VALUE_GENERATOR) {
		*c->out = list;
		return true;
	}
	return generator_over(c, &list);
}

static bool run_join(struct call *c)
{
	struct value by, item, seen;
	struct text t = {0};
	struct path path;
	struct iter it;
	bool got;
	if (!string_new(c->r, "", 0, VALUE_TRUSTED, &by) ||
	    (val_given(&c->arg[0]) && !value_to_string(c->r, &c->arg[0], &by)) ||
	    !make_path(c->r, &c->arg[1], false, &path) || !iter_begin(c->r, &it, &c->self))
		return false;
	for (size_t i = 0;; i++) {
		if (!iter_next(c->r, &it, &item, &got))
			return false;
		if (!got)
			break;
		if (!follow(c->r, &path, &item, &seen) || (i && !text_add_value(c->r, &t, &by)) ||
		    !text_add_str(c->r, &t, &seen))
			return false;
	}
	return text_finish(c->r, &t, c->out);
}

static bool run_sum(struct call *c)
{
	struct value item, seen, total = val_given(&c->arg[1]) ? c->arg[1] : val_int(0);
	struct path path;
	struct iter it;
	bool got;
	if (total.type == VALUE_STRING)
		return render_fail(c->r, "sum() can't sum strings [use ''.join(seq) instead]");
	if (!make_path(c->r, &c->arg[0], false, &path) || !iter_begin(c->r, &it, &c->self))
		return false;
	for (;;) {
		if (!iter_next(c->r, &it, &item, &got))
			return false;
		if (!got)
			break;
		struct value left = total;
		if (!follow(c->r, &path, &item, &seen) || !op_binary(c->r, TOKEN_ADD, &left, &seen, &total))
			return false;
	}
	*c->out = total;
	return true;
}

static bool extreme(struct call *c, bool max)
{
	struct value item, key, best_key = val_none();
	struct path path;
	struct iter it;
	bool got, better, case_sensitive = false, any = false;
	truth_arg(c, 0, &case_sensitive);
	if (!make_path(c->r, &c->arg[1], !case_sensitive, &path) || !iter_begin(c->r, &it, &c->self))
		return false;
	for (;; any = true) {
		if (!iter_next(c->r, &it, &item, &got))
			return false;
		if (!got)
			break;
		if (!follow(c->r, &path, &item, &key))
			return false;
		better = !any;
		if (any && !(max ? op_less(c->r, &best_key, &key, &better) : op_less(c->r, &key, &best_key, &better)))
			return false;
		if (better) {
			best_key = key;
			*c->out = item;
		}
	}
	return any || undefined_hint(c->r, "No aggregated item, sequence was empty.", c->out);
}

static bool run_min(struct call *c)
{
	return extreme(c, false);
}

static bool run_max(struct call *c)
{
	return extreme(c, true);
}

/* ---- Sorting and grouping ---- */

/* The key of an item for several paths "a,b": a list, which compares equal items before it asks for an order. */
static bool sort_key(struct render *r, const struct path *paths, size_t n_paths, const struct value *item,
		     struct value *out)
{
	struct value part;
	if (!new_list(r, out))
		return false;
	for (size_t i = 0; i < n_paths; i++)
		if (!follow(r, &paths[i], item, &part) || !list_add(r, out, part))
			return false;
	return true;
}

static bool make_paths(struct render *r, const struct value *attribute, bool fold_case, struct path **out, size_t *n)
{
	*n = 1;
	if (attribute->type == VALUE_STRING)
		for (size_t i = 0; i < attribute->s->n; i++)
			*n += attribute->s->p[i] == ',';
	*out = render_alloc(r, *n * sizeof **out);
	if (!*out)
		return false;
	if (attribute->type != VALUE_STRING)
		return make_path(r, attribute, fold_case, *out);
	size_t from = 0;
	for (size_t k = 0; k < *n; k++) {
		const char *comma = memchr(attribute->s->p + from, ',', attribute->s->n - from);
		size_t to = comma ? (size_t)(comma - attribute->s->p) : attribute->s->n;
		if (!parse_path(r, attribute, from, to, &(*out)[k]))
			return false;
		(*out)[k].fold_case = fold_case;
		from = to + 1;
	}
	return true;
}

static bool sorted(struct call *c, const struct value_seq *items, const struct value *keys, bool reverse,
		   struct value *out)
{
	size_t *order;
	if (!new_list(c->r, out) || !sort_order(c->r, keys, items->n, reverse, &order))
		return false;
	for (size_t i = 0; i < items->n; i++)
		if (!list_add(c->r, out, items->items[order[i]]))
			return false;
	return true;
}

static bool run_sort(struct call *c)
{
	bool reverse = false, case_sensitive = false;
	struct path *paths;
	size_t n_paths;
	struct value_seq *items;
	truth_arg(c, 0, &reverse);
	truth_arg(c, 1, &case_sensitive);
	if (!make_paths(c->r, &c->arg[2], !case_sensitive, &paths, &n_paths) || !value_items(c->r, &c->self, &items))
		return false;
	struct value *keys = render_alloc(c->r, items->n * sizeof *keys);
	if (!keys)
		return false;
	for (size_t i = 0; i < items->n; i++)
		if (!sort_key(c->r, paths, n_paths, &items->items[i], &keys[i]))
			return false;
	return sorted(c, items, keys, reverse, c->out);
}

static bool run_dictsort(struct call *c)
{
	bool case_sensitive = false, reverse = false;
	size_t by = 0;
	truth_arg(c, 0, &case_sensitive);
	truth_arg(c, 2, &reverse);
	if (val_given(&c->arg[1])) {
		struct str name = c->arg[1].type == VALUE_STRING ? val_str(&c->arg[1]) : (struct str){"", 0};
		if (!str_is(name, "key") && !str_is(name, "value"))
			return render_fail(c->r, "You can only sort by either \"key\" or \"value\"");
		by = str_is(name, "value");
	}
	if (c->self.type == VALUE_UNDEFINED)
		return undefined_fail(c->r, &c->self);
	if (c->self.type != VALUE_DICT)
		return render_fail(c->r, "'%s' object has no attribute 'items'", type_name(&c->self));
	struct view view = {c->self.dict, VIEW_ITEMS};
	struct value pairs = {.type = VALUE_VIEW, .view = &view};
	struct path path = {.fold_case = !case_sensitive};
	struct value_seq *items;
	if (!value_items(c->r, &pairs, &items))
		return false;
	struct value *keys = render_alloc(c->r, items->n * sizeof *keys);
	if (!keys)
		return false;
	for (size_t i = 0; i < items->n; i++)
		if (!follow(c->r, &path, &items->items[i].seq->items[by], &keys[i]))
			return false;
	return sorted(c, items, keys, reverse, c->out);
}

static bool add_group(struct call *c, const struct path *shown, const struct value *key, struct value *group)
{
	struct value pair[2] = {*key, *group}, tuple;
	if (shown && !follow(c->r, shown, &group->seq->items[0], &pair[0]))
		return false;
	if (!new_tuple(c->r, pair, 2, &tuple))
		return false;
	tuple.seq->named_pair = true;
	return list_add(c->r, c->out, tuple);
}

static bool run_groupby(struct call *c)
{
	bool case_sensitive = false, same;
	struct path path, shown;
	struct value_seq *items;
	truth_arg(c, 2, &case_sensitive);
	if (!make_path(c->r, &c->arg[0], !case_sensitive, &path) || !make_path(c->r, &c->arg[0], false, &shown) ||
	    !value_items(c->r, &c->self, &items) || !new_list(c->r, c->out))
		return false;
	path.fallback = shown.fallback = c->arg[1];
	struct value *keys = render_alloc(c->r, items->n * sizeof *keys);
	size_t *order;
	if (!keys)
		return false;
	for (size_t i = 0; i < items->n; i++)
		if (!follow(c->r, &path, &items->items[i], &keys[i]))
			return false;
	if (!sort_order(c->r, keys, items->n, false, &order))
		return false;
	struct value group = {.type = VALUE_MISSING}, key = val_none();
	for (size_t i = 0; i < items->n; i++) {
		const struct value *now = &keys[order[i]];
		if (val_given(&group) && !op_equal(c->r, &key, now, &same))
			return false;
		if (!val_given(&group) || !same) {
			if (val_given(&group) && !add_group(c, case_sensitive ? NULL : &shown, &key, &group))
				return false;
			if (!new_list(c->r, &group))
				return false;
			key = *now;
		}
		if (!list_add(c->r, &group, items->items[order[i]]))
			return false;
	}
	return !val_given(&group) || add_group(c, case_sensitive ? NULL : &shown, &key, &group);
}

/* ---- Cutting up ---- */

static bool run_batch(struct call *c)
{
	int64_t size = 0;
	struct value_seq *items;
	struct value lists, batch;
	const struct value *fill = val_given(&c->arg[1]) && c->arg[1].type != VALUE_NONE ? &c->arg[1] : NULL;
	if (!int_arg(c, 0, &size) || !value_items(c->r, &c->self, &items) || !new_list(c->r, &lists) ||
	    !new_list(c->r, &batch))
		return false;
	for (size_t i = 0; i < items->n; i++) {
		if ((int64_t)batch.seq->n == size && (!list_add(c->r, &lists, batch) || !new_list(c->r, &batch)))
			return false;
		if (!list_add(c->r, &batch, items->items[i]))
			return false;
	}
	while (fill && batch.seq->n && (int64_t)batch.seq->n < size)
		if (!list_add(c->r, &batch, *fill))
			return false;
	return (batch.seq->n == 0 || list_add(c->r, &lists, batch)) && generator_over(c, &lists);
}

static bool run_slice(struct call *c)
{
	int64_t slices = 0;
	struct value_seq *items;
	struct value lists, slice;
	if (!int_arg(c, 0, &slices) || !value_items(c->r, &c->self, &items) || !new_list(c->r, &lists))
		return false;
	if (slices == 0)
		return render_fail(c->r, "integer division or modulo by zero");
	bool fill = val_given(&c->arg[1]) && c->arg[1].type != VALUE_NONE;
	size_t at = 0;
	for (int64_t i = 0; i < slices; i++) {
		int64_t extra = (int64_t)items->n % slices, n = (int64_t)items->n / slices + (i < extra);
		if (!new_list(c->r, &slice) || !list_add(c->r, &lists, slice))
			return false;
		for (; n > 0; n--)
			if (!list_add(c->r, &slice, items->items[at++]))
				return false;
		if (fill && i >= extra && !list_add(c->r, &slice, c->arg[1]))
			return false;
	}
	return generator_over(c, &lists);
}

static bool run_attr(struct call *c)
{
	struct value name;
	bool refused = false;
	if (!string_arg(c, 0, &name))
		return false;
	/* Unlike a dot, it does not fall back to the items of a mapping. */
	if (c->self.type == VALUE_DICT && !builtin_method(&c->self, val_str(&name), &refused) && !refused)
		return undefined_of(c->r, &c->self, &name, c->out);
	return get_attr(c->r, &c->self, val_str(&name), c->out);
}

const struct builtin sequence_filters[] = {
	{"attr", "name", run_attr},
	{"batch", "linecount ?fill_with", run_batch},
	{"count", "", run_length},
	{"dictsort", "?case_sensitive by reverse", run_dictsort},
	{"first", "", run_first},
	{"groupby", "attribute ?default case_sensitive", run_groupby},
	{"items", "", run_items},
	{"join", "?d attribute", run_join},
	{"last", "", run_last},
	{"length", "", run_length},
	{"list", "", run_list},
	{"map", NULL, run_map},
	{"max", "?case_sensitive attribute", run_max},
	{"min", "?case_sensitive attribute", run_min},
	{"reject", NULL, run_reject},
	{"rejectattr", NULL, run_rejectattr},
	{"reverse", "", run_reverse},
	{"select", NULL, run_select},
	{"selectattr", NULL, run_selectattr},
	{"slice", "slices ?fill_with", run_slice},
	{"sort", "?reverse case_sensitive attribute", run_sort},
	{"sum", "?attribute start", run_sum},
	{"unique", "?case_sensitive attribute", run_unique},
};
const size_t n_sequence_filters = sizeof sequence_filters / sizeof *sequence_filters;
