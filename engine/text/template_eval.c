/* Expressions, evaluated by walking the tree. */
#include <stdio.h>

#include "engine/text/template_render.h"

static bool eval_name(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	for (int hops = e->var.place.hops; hops > 0; hops--)
		a = a->parent;
	*out = a->slots[e->var.place.slot];
	if (out->type != VALUE_MISSING)
		return true;
	return undefined_name(r, e->var.name, out);
}

static bool eval_all(struct render *r, struct activation *a, struct expr **items, size_t n, struct value **out)
{
	*out = render_alloc(r, n * sizeof **out);
	if (!*out)
		return false;
	for (size_t i = 0; i < n; i++)
		if (!eval(r, a, items[i], &(*out)[i]))
			return false;
	return true;
}

/* ---- Calls ---- */

static bool add_star(struct render *r, const struct value *star, struct arguments *out)
{
	struct value_seq *more;
	if (!value_is_iterable(star))
		return render_fail(r, "argument after * must be an iterable, not %s", type_name(star));
	if (!value_items(r, star, &more))
		return false;
	struct value *args = render_alloc(r, (out->n + more->n) * sizeof *args);
	if (!args)
		return false;
	if (out->n)
		memcpy(args, out->args, out->n * sizeof *args);
	if (more->n)
		memcpy(args + out->n, more->items, more->n * sizeof *args);
	out->args = args;
	out->n += more->n;
	return true;
}

static bool add_star_star(struct render *r, const struct value *star_star, struct arguments *out)
{
	if (star_star->type != VALUE_DICT)
		return render_fail(r, "argument after ** must be a mapping, not %s", type_name(star_star));
	const struct value_dict *d = star_star->dict;
	struct keyword_value *keywords = render_alloc(r, (out->n_keywords + d->n) * sizeof *keywords);
	if (!keywords)
		return false;
	if (out->n_keywords)
		memcpy(keywords, out->keywords, out->n_keywords * sizeof *keywords);
	for (size_t i = 0; i < d->n; i++) {
		if (d->entries[i].key.type != VALUE_STRING)
			return render_fail(r, "keywords must be strings");
		struct str name = val_str(&d->entries[i].key);
		for (size_t k = 0; k < out->n_keywords; k++)
			if (str_eq(out->keywords[k].name, name))
				return render_fail(r, "got multiple values for keyword argument '%.*s'",
						   name.n > 80 ? 80 : (int)name.n, name.p);
		keywords[out->n_keywords + i] = (struct keyword_value){name, d->entries[i].value};
	}
	out->keywords = keywords;
	out->n_keywords += d->n;
	return render_spend(r, d->n);
}

bool eval_args(struct render *r, struct activation *a, const struct call_args *args, struct arguments *out)
{
	*out = (struct arguments){.n = args->n_args, .n_keywords = args->n_keywords};
	if (args->n_args && !eval_all(r, a, args->args, args->n_args, &out->args))
		return false;
	if (args->n_keywords) {
		out->keywords = render_alloc(r, args->n_keywords * sizeof *out->keywords);
		if (!out->keywords)
			return false;
		for (size_t i = 0; i < args->n_keywords; i++) {
			out->keywords[i].name = args->keywords[i].name;
			for (size_t k = 0; k < i; k++)
				if (str_eq(out->keywords[k].name, out->keywords[i].name))
					return render_fail(r, "keyword argument repeated: %.*s",
							   STR_ARG(out->keywords[i].name));
			if (!eval(r, a, args->keywords[i].value, &out->keywords[i].value))
				return false;
		}
	}
	struct value star;
	if (args->star && (!eval(r, a, args->star, &star) || !add_star(r, &star, out)))
		return false;
	return !args->star_star || (eval(r, a, args->star_star, &star) && add_star_star(r, &star, out));
}

static bool eval_call(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	struct value callee;
	struct arguments args;
	if (!eval(r, a, e->call.subject, &callee) || !eval_args(r, a, e->call.args, &args))
		return false;
	r->line = e->line;
	return call_value(r, &callee, &args, out);
}

bool eval_filter(struct render *r, struct activation *a, const struct expr *e, const struct value *subject,
		 struct value *out)
{
	struct value self;
	struct arguments args;
	if (!render_enter(r))
		return false;
	if (!e->call.subject)
		self = *subject;
	else if (!(subject ? eval_filter(r, a, e->call.subject, subject, &self) : eval(r, a, e->call.subject, &self)))
		return false;
	if (!eval_args(r, a, e->call.args, &args))
		return false;
	r->line = e->line;
	if (!e->call.builtin)
		return render_fail(r, "No filter named '%.*s' found.", STR_ARG(e->call.name));
	if (!call_builtin(r, e->call.builtin, &self, &args, out))
		return false;
	render_leave(r);
	return true;
}

static bool eval_test(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	struct value self;
	struct arguments args;
	if (!eval(r, a, e->call.subject, &self) || !eval_args(r, a, e->call.args, &args))
		return false;
	r->line = e->line;
	if (!e->call.builtin)
		return render_fail(r, "No test named '%.*s' found.", STR_ARG(e->call.name));
	return call_builtin(r, e->call.builtin, &self, &args, out);
}

/* ---- Operators ---- */

static bool eval_logic(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	if (!eval(r, a, e->node.a, out))
		return false;
	if (value_truth(out) == (e->kind == EXPR_OR))
		return true;
	return eval(r, a, e->node.b, out);
}

static bool eval_cond(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	if (!eval(r, a, e->node.b, out))
		return false;
	if (value_truth(out))
		return eval(r, a, e->node.a, out);
	if (e->node.c)
		return eval(r, a, e->node.c, out);
	char hint[128];
	snprintf(hint, sizeof hint,
		 "the inline if-expression on line %d evaluated to false and no else section was defined.", e->line);
	return undefined_hint(r, hint, out);
}

static bool eval_compare(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	struct value left, right;
	bool holds = true;
	if (!eval(r, a, e->compare.first, &left))
		return false;
	for (size_t i = 0; i < e->compare.n && holds; i++) {
		if (!eval(r, a, e->compare.items[i], &right))
			return false;
		r->line = e->line;
		if (!op_compare(r, e->compare.ops[i], &left, &right, &holds))
			return false;
		left = right;
	}
	*out = val_bool(holds);
	return true;
}

static bool eval_concat(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	struct text t = {0};
	for (size_t i = 0; i < e->list.n; i++)
		if (!eval(r, a, e->list.items[i], out) || !text_add_str(r, &t, out))
			return false;
	return text_finish(r, &t, out);
}

static bool eval_dict(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	struct value dict, key, item;
	if (!new_dict(r, &dict))
		return false;
	for (size_t i = 0; i < e->list.n; i += 2)
		if (!eval(r, a, e->list.items[i], &key) || !eval(r, a, e->list.items[i + 1], &item) ||
		    !dict_put(r, dict.dict, &key, item))
			return false;
	*out = dict;
	return true;
}

static bool eval_seq(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	struct value_seq *seq = render_alloc(r, sizeof *seq);
	if (!seq || !eval_all(r, a, e->list.items, e->list.n, &seq->items))
		return false;
	seq->n = seq->cap = e->list.n;
	*out = (struct value){.type = e->kind == EXPR_LIST ? VALUE_LIST : VALUE_TUPLE, .seq = seq};
	return true;
}

static bool eval_slice(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	struct value obj, bounds[3] = {{0}};
	if (!eval(r, a, e->node.a, &obj) || (e->node.b && !eval(r, a, e->node.b, &bounds[0])) ||
	    (e->node.c && !eval(r, a, e->node.c, &bounds[1])) || (e->node.d && !eval(r, a, e->node.d, &bounds[2])))
		return false;
	r->line = e->line;
	return get_slice(r, &obj, bounds, out);
}

static bool eval_node(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	struct value left, right;
	switch (e->kind) {
	case EXPR_ATTR:
		if (!eval(r, a, e->node.a, &left))
			return false;
		r->line = e->line;
		return get_attr(r, &left, e->node.attr, out);
	case EXPR_ITEM:
		if (!eval(r, a, e->node.a, &left) || !eval(r, a, e->node.b, &right))
			return false;
		r->line = e->line;
		return get_item(r, &left, &right, out);
	case EXPR_SLICE:
		return eval_slice(r, a, e, out);
	case EXPR_CALL:
		return eval_call(r, a, e, out);
	case EXPR_FILTER:
		return eval_filter(r, a, e, NULL, out);
	case EXPR_TEST:
		return eval_test(r, a, e, out);
	case EXPR_NEG:
	case EXPR_POS:
		if (!eval(r, a, e->node.a, &left))
			return false;
		r->line = e->line;
		return e->kind == EXPR_NEG ? op_negate(r, &left, out) : op_plus(r, &left, out);
	case EXPR_NOT:
		if (!eval(r, a, e->node.a, &left))
			return false;
		*out = val_bool(!value_truth(&left));
		return true;
	case EXPR_AND:
	case EXPR_OR:
		return eval_logic(r, a, e, out);
	case EXPR_COND:
		return eval_cond(r, a, e, out);
	case EXPR_BINARY:
		if (!eval(r, a, e->node.a, &left) || !eval(r, a, e->node.b, &right))
			return false;
		r->line = e->line;
		return op_binary(r, e->op, &left, &right, out);
	case EXPR_CONCAT:
		return eval_concat(r, a, e, out);
	case EXPR_COMPARE:
		return eval_compare(r, a, e, out);
	case EXPR_LIST:
	case EXPR_TUPLE:
		return eval_seq(r, a, e, out);
	default:
		return eval_dict(r, a, e, out);
	}
}

bool eval(struct render *r, struct activation *a, const struct expr *e, struct value *out)
{
	if (e->kind == EXPR_CONST) {
		*out = e->constant;
		return true;
	}
	if (e->kind == EXPR_NAME) {
		r->line = e->line;
		return eval_name(r, a, e, out);
	}
	if (!render_enter(r) || !eval_node(r, a, e, out))
		return false;
	render_leave(r);
	return true;
}
