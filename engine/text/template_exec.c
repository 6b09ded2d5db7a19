/* Statements: output, conditions, loops, assignments, macros and their scopes. */
#include <stdio.h>

#include "engine/text/template_render.h"

struct activation *activation_new(struct render *r, const struct function *f, struct activation *parent)
{
	struct activation *a = render_alloc(r, sizeof *a + (size_t)f->n_slots * sizeof a->slots[0]);
	if (a)
		a->parent = parent;
	return a;
}

/* What a name means outside of the template: a variable of the request, or a global function. */
static struct value from_context(const struct render *r, struct str name)
{
	struct dict_entry *e = value_dict_find_text(r->vars, name);
	if (e)
		return e->value;
	const struct builtin *global = builtin_global(name);
	if (global)
		return (struct value){.type = VALUE_FUNCTION, .function = global};
	return (struct value){.type = VALUE_MISSING};
}

bool scope_enter(struct render *r, struct activation *a, const struct scope *s)
{
	if (!render_spend(r, s->n_loads))
		return false;
	for (size_t i = 0; i < s->n_loads; i++) {
		const struct scope_load *load = &s->loads[i];
		struct value *slot = &a->slots[load->slot];
		switch (load->kind) {
		case LOAD_CONTEXT:
			*slot = from_context(r, load->name);
			break;
		case LOAD_ALIAS: {
			struct activation *from = a;
			for (int hops = load->alias.hops; hops > 0; hops--)
				from = from->parent;
			*slot = from->slots[load->alias.slot];
			break;
		}
		case LOAD_UNDEFINED:
			*slot = (struct value){.type = VALUE_MISSING};
			break;
		}
	}
	return true;
}

/* ---- Assignment ---- */

static bool assign(struct render *r, struct activation *a, const struct expr *target, const struct value *v);

static bool assign_namespace(struct render *r, struct activation *a, const struct expr *target, const struct value *v)
{
	for (int hops = target->var.place.hops; hops > 0; hops--)
		a = a->parent;
	const struct value *ns = &a->slots[target->var.place.slot];
	r->line = target->line;
	if (ns->type != VALUE_NAMESPACE)
		return render_fail(r, "cannot assign attribute on non-namespace object");
	struct dict_entry *there = value_dict_find_text(ns->dict, target->var.attr);
	if (there) {
		there->value = *v;
		return true;
	}
	struct value key;
	return string_new(r, target->var.attr.p, target->var.attr.n, VALUE_TRUSTED, &key) &&
	       dict_put(r, ns->dict, &key, *v);
}

static bool unpack(struct render *r, struct activation *a, const struct expr *target, const struct value *v)
{
	struct value_seq *items;
	r->line = target->line;
	if (!value_is_iterable(v))
		return render_fail(r, "cannot unpack non-iterable %s object", type_name(v));
	if (!value_items(r, v, &items))
		return false;
	if (items->n < target->list.n)
		return render_fail(r, "not enough values to unpack (expected %zu, got %zu)", target->list.n, items->n);
	if (items->n > target->list.n)
		return render_fail(r, "too many values to unpack (expected %zu)", target->list.n);
	for (size_t i = 0; i < items->n; i++)
		if (!assign(r, a, target->list.items[i], &items->items[i]))
			return false;
	return true;
}

static bool assign(struct render *r, struct activation *a, const struct expr *target, const struct value *v)
{
	switch (target->kind) {
	case EXPR_NAME:
		for (int hops = target->var.place.hops; hops > 0; hops--)
			a = a->parent;
		a->slots[target->var.place.slot] = *v;
		return true;
	case EXPR_NAMESPACE_ATTR:
		return assign_namespace(r, a, target, v);
	default:
		return unpack(r, a, target, v);
	}
}

/* Runs a body with its output going to a string. */
static enum flow capture(struct render *r, struct activation *a, const struct stmt *body, struct value *out)
{
	struct text text = {0}, *outer = r->out;
	r->out = &text;
	enum flow flow = exec_body(r, a, body);
	r->out = outer;
	return flow != FLOW_FAIL && text_finish(r, &text, out) ? flow : FLOW_FAIL;
}

/* ---- Loops ---- */

struct value loop_item(const struct loop *l, int64_t i)
{
	return l->range ? val_int(l->range->start + i * l->range->step) : l->seq->items[i];
}

/* Keeps the items for which the loop's test holds. */
static bool filter_items(struct render *r, struct activation *a, const struct stmt *st, struct loop *l)
{
	struct value kept, keep;
	if (!new_list(r, &kept) || !scope_enter(r, a, &st->loop.test_scope))
		return false;
	for (int64_t i = 0; i < l->n; i++) {
		struct value item = loop_item(l, i);
		if (!assign(r, a, st->loop.target, &item) || !eval(r, a, st->loop.test, &keep))
			return false;
		if (value_truth(&keep) && !list_add(r, &kept, item))
			return false;
	}
	l->range = NULL;
	l->seq = kept.seq;
	l->n = (int64_t)kept.seq->n;
	return true;
}

/* `a` holds the loop's variables: the activation around it, or a recursive loop's own. */
static enum flow run_loop(struct render *r, struct activation *a, const struct stmt *st, const struct value *over,
			  int64_t depth0, struct activation *outer)
{
	struct loop *l = render_alloc(r, sizeof *l);
	if (!l)
		return FLOW_FAIL;
	*l = (struct loop){.depth0 = depth0, .stmt = st, .outer = outer};
	r->line = st->line;
	if (over->type == VALUE_RANGE) {
		l->range = over->range;
		l->n = over->range->n;
	} else {
		struct value_seq *items;
		if (!value_is_iterable(over)) {
			render_set_failure(r, STATUS_INVALID, "'%s' object is not iterable", type_name(over));
			return FLOW_FAIL;
		}
		if (!value_items(r, over, &items))
			return FLOW_FAIL;
		l->seq = items;
		l->n = (int64_t)items->n;
	}
	if (st->loop.test && !filter_items(r, a, st, l))
		return FLOW_FAIL;
	bool completed = false; /* an iteration that ended by break or continue does not count */
	if (st->loop.uses_loop)
		a->slots[st->loop.loop_slot] = (struct value){.type = VALUE_LOOP, .loop = l};
	for (int64_t i = 0; i < l->n; i++) {
		struct value item = loop_item(l, i);
		l->index0 = i;
		if (!assign(r, a, st->loop.target, &item) || !scope_enter(r, a, &st->loop.body_scope))
			return FLOW_FAIL;
		enum flow flow = exec_body(r, a, st->loop.body);
		if (flow == FLOW_FAIL)
			return FLOW_FAIL;
		if (flow == FLOW_BREAK)
			break;
		completed |= flow == FLOW_NEXT;
		/* A loop inside may have used the same slot. */
		if (st->loop.uses_loop)
			a->slots[st->loop.loop_slot] = (struct value){.type = VALUE_LOOP, .loop = l};
	}
	if (completed || !st->loop.otherwise)
		return FLOW_NEXT;
	if (!scope_enter(r, a, &st->loop.else_scope))
		return FLOW_FAIL;
	return exec_body(r, a, st->loop.otherwise);
}

static enum flow exec_for(struct render *r, struct activation *a, const struct stmt *st)
{
	struct value over;
	if (!eval(r, a, st->loop.iter, &over))
		return FLOW_FAIL;
	if (!st->loop.recursive)
		return run_loop(r, a, st, &over, 0, a);
	struct activation *own = activation_new(r, st->loop.recursive, a);
	return own ? run_loop(r, own, st, &over, 0, a) : FLOW_FAIL;
}

bool loop_recurse(struct render *r, const struct loop *l, const struct value *items, struct value *out)
{
	if (!l->stmt->loop.recursive)
		return render_fail(r, "The loop must have the 'recursive' marker to be called recursively.");
	struct activation *own = activation_new(r, l->stmt->loop.recursive, l->outer);
	if (!own || !render_enter(r))
		return false;
	struct text text = {0}, *outer = r->out;
	r->out = &text;
	enum flow flow = run_loop(r, own, l->stmt, items, l->depth0 + 1, l->outer);
	r->out = outer;
	render_leave(r);
	return flow != FLOW_FAIL && text_finish(r, &text, out);
}

bool loop_attr(struct render *r, const struct value *loop, struct str name, struct value *out)
{
	const struct loop *l = loop->loop;
	if (str_is(name, "index"))
		*out = val_int(l->index0 + 1);
	else if (str_is(name, "index0"))
		*out = val_int(l->index0);
	else if (str_is(name, "revindex"))
		*out = val_int(l->n - l->index0);
	else if (str_is(name, "revindex0"))
		*out = val_int(l->n - l->index0 - 1);
	else if (str_is(name, "first"))
		*out = val_bool(l->index0 == 0);
	else if (str_is(name, "last"))
		*out = val_bool(l->index0 + 1 >= l->n);
	else if (str_is(name, "length"))
		*out = val_int(l->n);
	else if (str_is(name, "depth"))
		*out = val_int(l->depth0 + 1);
	else if (str_is(name, "depth0"))
		*out = val_int(l->depth0);
	else if (str_is(name, "previtem")) {
		if (l->index0 == 0)
			return undefined_hint(r, "there is no previous item", out);
		*out = loop_item(l, l->index0 - 1);
	} else if (str_is(name, "nextitem")) {
		if (l->index0 + 1 >= l->n)
			return undefined_hint(r, "there is no next item", out);
		*out = loop_item(l, l->index0 + 1);
	}
	return true;
}

/* ---- Macros ---- */

static struct value *take_keyword(const struct arguments *args, bool *taken, struct str name)
{
	for (size_t k = 0; k < args->n_keywords; k++) {
		if (!taken[k] && str_eq(args->keywords[k].name, name)) {
			taken[k] = true;
			return &args->keywords[k].value;
		}
	}
	return NULL;
}

static bool bind_special(struct render *r, const struct function *f, struct activation *a, const struct arguments *args,
			 bool *taken)
{
	if (f->caller_slot >= 0) {
		const struct value *caller = take_keyword(args, taken, str_from("caller"));
		if (caller && caller->type != VALUE_NONE)
			a->slots[f->caller_slot] = *caller;
		else if (!undefined_hint(r, "No caller defined", &a->slots[f->caller_slot]))
			return false;
	}
	struct value rest;
	if (f->kwargs_slot >= 0 && !new_dict(r, &rest))
		return false;
	for (size_t k = 0; k < args->n_keywords; k++) {
		struct str name = args->keywords[k].name;
		if (taken[k])
			continue;
		if (f->kwargs_slot < 0) {
			if (str_is(name, "caller"))
				return render_fail(
					r,
					"macro '%.*s' was invoked with two values for the special caller argument. "
					"This is most likely a bug.",
					STR_ARG(f->name));
			return render_fail(r, "macro '%.*s' takes no keyword argument '%.*s'", STR_ARG(f->name),
					   STR_ARG(name));
		}
		struct value key;
		if (!string_new(r, name.p, name.n, VALUE_TRUSTED, &key) ||
		    !dict_put(r, rest.dict, &key, args->keywords[k].value))
			return false;
	}
	if (f->kwargs_slot >= 0)
		a->slots[f->kwargs_slot] = rest;
	size_t n_extra = args->n > f->n_params ? args->n - f->n_params : 0;
	if (f->varargs_slot >= 0)
		return new_tuple(r, n_extra ? &args->args[f->n_params] : NULL, n_extra, &a->slots[f->varargs_slot]);
	if (n_extra)
		return render_fail(r, "macro '%.*s' takes not more than %zu argument(s)", STR_ARG(f->name),
				   f->n_params);
	return true;
}

static bool bind_params(struct render *r, const struct function *f, struct activation *a, const struct arguments *args)
{
	bool *taken = render_alloc(r, args->n_keywords);
	if (!taken)
		return false;
	for (size_t i = 0; i < f->n_params; i++) {
		const struct value *v = i < args->n ? &args->args[i] : take_keyword(args, taken, f->params[i].name);
		if (v)
			a->slots[f->params[i].slot] = *v;
	}
	if (!bind_special(r, f, a, args, taken) || !scope_enter(r, a, &f->scope))
		return false;
	for (size_t i = 0; i < f->n_params; i++) {
		struct value *slot = &a->slots[f->params[i].slot];
		if (slot->type != VALUE_MISSING)
			continue;
		if (f->params[i].fallback) {
			if (!eval(r, a, f->params[i].fallback, slot))
				return false;
			continue;
		}
		char hint[160];
		snprintf(hint, sizeof hint, "parameter '%.*s' was not provided",
			 f->params[i].name.n > 100 ? 100 : (int)f->params[i].name.n, f->params[i].name.p);
		if (!undefined_hint(r, hint, slot))
			return false;
	}
	return true;
}

bool macro_call(struct render *r, const struct macro *m, const struct arguments *args, struct value *out)
{
	struct activation *a = activation_new(r, m->function, m->outer);
	if (!a || !render_enter(r) || !bind_params(r, m->function, a, args) ||
	    capture(r, a, m->function->body, out) == FLOW_FAIL)
		return false;
	render_leave(r);
	return true;
}

static bool new_macro(struct render *r, const struct function *f, struct activation *outer, struct value *out)
{
	struct macro *m = render_alloc(r, sizeof *m);
	if (!m)
		return false;
	*m = (struct macro){f, outer};
	*out = (struct value){.type = VALUE_MACRO, .macro = m};
	return true;
}

static bool exec_call_block(struct render *r, struct activation *a, const struct stmt *st)
{
	struct value caller, callee, result;
	struct arguments args = {0};
	if (!new_macro(r, st->macro.function, a, &caller))
		return false;
	const struct expr *call = st->macro.call;
	if (!call)
		return call_value(r, &caller, &args, &result) && text_add_str(r, r->out, &result);
	if (!eval(r, a, call->call.subject, &callee) || !eval_args(r, a, call->call.args, &args))
		return false;
	struct keyword_value *keywords = render_alloc(r, (args.n_keywords + 1) * sizeof *keywords);
	if (!keywords)
		return false;
	if (args.n_keywords)
		memcpy(keywords, args.keywords, args.n_keywords * sizeof *keywords);
	keywords[args.n_keywords++] = (struct keyword_value){str_from("caller"), caller};
	args.keywords = keywords;
	r->line = call->line;
	return call_value(r, &callee, &args, &result) && text_add_str(r, r->out, &result);
}

/* ---- Statements ---- */

static bool exec_output(struct render *r, struct activation *a, const struct stmt *st)
{
	struct value v;
	for (size_t i = 0; i < st->output.n; i++) {
		const struct expr *e = st->output.items[i];
		if (e->kind == EXPR_CONST ? !render_spend(r, 1) || !text_add_str(r, r->out, &e->constant)
					  : !eval(r, a, e, &v) || !text_add_str(r, r->out, &v))
			return false;
	}
	return true;
}

static enum flow exec_if(struct render *r, struct activation *a, const struct stmt *st)
{
	struct value test;
	if (!eval(r, a, st->cond.test, &test))
		return FLOW_FAIL;
	if (value_truth(&test))
		return exec_body(r, a, st->cond.then);
	for (const struct stmt *branch = st->cond.elifs; branch; branch = branch->next) {
		if (!eval(r, a, branch->cond.test, &test))
			return FLOW_FAIL;
		if (value_truth(&test))
			return exec_body(r, a, branch->cond.then);
	}
	return exec_body(r, a, st->cond.otherwise);
}

static bool exec_set(struct render *r, struct activation *a, const struct stmt *st)
{
	struct value v;
	return eval(r, a, st->set.value, &v) && assign(r, a, st->set.target, &v);
}

/* A {% set %} or {% filter %} block: its text, filtered. */
static bool block_text(struct render *r, struct activation *a, const struct stmt *st, enum flow *flow,
		       struct value *out)
{
	struct value text;
	if (!scope_enter(r, a, &st->set.scope))
		return false;
	*flow = capture(r, a, st->set.body, &text);
	if (*flow == FLOW_FAIL)
		return false;
	if (*flow != FLOW_NEXT)
		return true;
	if (st->set.filter)
		return eval_filter(r, a, st->set.filter, &text, out);
	*out = text;
	return true;
}

static enum flow exec_block(struct render *r, struct activation *a, const struct stmt *st)
{
	enum flow flow;
	struct value v;
	if (!block_text(r, a, st, &flow, &v))
		return FLOW_FAIL;
	if (flow != FLOW_NEXT) /* a break or continue inside drops the text */
		return flow;
	bool done = st->kind == STMT_SET_BLOCK ? assign(r, a, st->set.target, &v) : text_add_str(r, r->out, &v);
	return done ? FLOW_NEXT : FLOW_FAIL;
}

static enum flow exec_with(struct render *r, struct activation *a, const struct stmt *st)
{
	struct value v;
	if (!scope_enter(r, a, &st->with.scope))
		return FLOW_FAIL;
	for (size_t i = 0; i < st->with.n; i++)
		if (!eval(r, a, st->with.values[i], &v) || !assign(r, a, st->with.targets[i], &v))
			return FLOW_FAIL;
	return exec_body(r, a, st->with.body);
}

static enum flow exec_stmt(struct render *r, struct activation *a, const struct stmt *st)
{
	struct value v;
	switch (st->kind) {
	case STMT_OUTPUT:
		return exec_output(r, a, st) ? FLOW_NEXT : FLOW_FAIL;
	case STMT_IF:
		return exec_if(r, a, st);
	case STMT_FOR:
		return exec_for(r, a, st);
	case STMT_SET:
		return exec_set(r, a, st) ? FLOW_NEXT : FLOW_FAIL;
	case STMT_SET_BLOCK:
	case STMT_FILTER_BLOCK:
		return exec_block(r, a, st);
	case STMT_MACRO:
		return new_macro(r, st->macro.function, a, &v) && assign(r, a, st->macro.target, &v) ? FLOW_NEXT
												     : FLOW_FAIL;
	case STMT_CALL_BLOCK:
		return exec_call_block(r, a, st) ? FLOW_NEXT : FLOW_FAIL;
	case STMT_WITH:
	case STMT_SCOPE:
		return exec_with(r, a, st);
	case STMT_BREAK:
		return FLOW_BREAK;
	default:
		return FLOW_CONTINUE;
	}
}

enum flow exec_body(struct render *r, struct activation *a, const struct stmt *body)
{
	if (!render_enter(r))
		return FLOW_FAIL;
	enum flow flow = FLOW_NEXT;
	for (const struct stmt *st = body; st && flow == FLOW_NEXT; st = st->next) {
		r->line = st->line;
		flow = exec_stmt(r, a, st);
	}
	render_leave(r);
	return flow;
}
