/*
 * Variables to slots. Jinja2 compiles a template to Python functions whose local variables are decided before anything
 * runs, and its scoping rules follow from that (a {% set %} in a loop does not leak, a name that is stored anywhere in
 * a scope belongs to it from its beginning, both branches of an if count). The same analysis is done here: for every
 * scope, first all its statements are visited to find which names it loads and stores, then its expressions get their
 * slots.
 */
#include <stdio.h>

#include "engine/text/template_ast.h"
#include "engine/text/template_render.h"

enum { SCRATCH_BYTES = 64 << 20, MAX_WORK = 100000000 };

enum symbol_load { SYMBOL_PARAM, SYMBOL_CONTEXT, SYMBOL_ALIAS, SYMBOL_UNDEFINED };

struct function_scope {
	struct function_scope *parent;
	struct function *function;
	int depth;
	/* A name has one slot per level of scopes, shared by scopes side by side. */
	struct slot_name {
		struct str name;
		int level;
	} * slots; /* [function->n_slots] */
	int cap;
};

struct symbol {
	struct str name;
	int slot;
	uint8_t load; /* enum symbol_load: what the scope does with it when it is entered */
	bool stored;
	const struct symbol *alias; /* ALIAS; stays valid: symbols of outer scopes are complete by then */
	struct function_scope *alias_owner;
};

struct symbols {
	struct symbols *parent;
	struct function_scope *owner;
	int level;
	struct symbol *items; /* [n] */
	size_t n, cap;
};

struct resolver {
	struct arena *arena, *scratch;
	long work;
	enum status status;
	struct error *err;
};

static bool resolver_fail(struct resolver *r, enum status status, int line, const char *text, struct str name)
{
	if (r->status == STATUS_OK)
		r->status = error_set(r->err, status, "line %d: %s%.*s", line, text, name.n > 80 ? 80 : (int)name.n,
				      name.p);
	return false;
}

static bool too_large(struct resolver *r)
{
	if (arena_starved(r->arena) || arena_starved(r->scratch))
		return resolver_fail(r, STATUS_NOMEM, 1, "out of memory while compiling a template",
		                     (struct str){"", 0});
	return resolver_fail(r, STATUS_LIMIT, 1, "the template has too many variables", (struct str){"", 0});
}

static bool work(struct resolver *r, size_t n)
{
	r->work += (long)n + 1;
	return r->work <= MAX_WORK || too_large(r);
}

/* ---- Symbols of one scope ---- */

static struct symbol *symbol_here(struct resolver *r, const struct symbols *s, struct str name)
{
	work(r, s->n);
	for (size_t i = 0; i < s->n; i++)
		if (str_eq(s->items[i].name, name))
			return &s->items[i];
	return NULL;
}

/* The innermost symbol of that name, and the scope that has it. */
static struct symbol *symbol_find(struct resolver *r, const struct symbols *s, struct str name,
				  const struct symbols **where)
{
	for (; s; s = s->parent) {
		struct symbol *found = symbol_here(r, s, name);
		if (found) {
			if (where)
				*where = s;
			return found;
		}
	}
	return NULL;
}

static int slot_for(struct resolver *r, struct function_scope *f, int level, struct str name)
{
	int n = f->function->n_slots;
	work(r, (size_t)n);
	for (int i = 0; i < n; i++)
		if (f->slots[i].level == level && str_eq(f->slots[i].name, name))
			return i;
	if (n == f->cap) {
		int cap = f->cap ? f->cap * 2 : 16;
		struct slot_name *grown = arena_alloc(r->scratch, (size_t)cap * sizeof *grown);
		if (!grown) {
			too_large(r);
			return 0;
		}
		if (n)
			memcpy(grown, f->slots, (size_t)n * sizeof *grown);
		f->slots = grown;
		f->cap = cap;
	}
	f->slots[n] = (struct slot_name){name, level};
	return f->function->n_slots++;
}

static struct symbol *symbol_define(struct resolver *r, struct symbols *s, struct str name, enum symbol_load load)
{
	struct symbol *sym = symbol_here(r, s, name);
	if (!sym) {
		if (s->n == s->cap) {
			size_t cap = s->cap ? s->cap * 2 : 8;
			struct symbol *grown = arena_alloc(r->scratch, cap * sizeof *grown);
			if (!grown) {
				too_large(r);
				return NULL;
			}
			if (s->n)
				memcpy(grown, s->items, s->n * sizeof *grown);
			s->items = grown;
			s->cap = cap;
		}
		sym = &s->items[s->n++];
		*sym = (struct symbol){.name = name};
	}
	sym->slot = slot_for(r, s->owner, s->level, name);
	sym->load = (uint8_t)load;
	return sym;
}

static bool alias_of(struct resolver *r, struct symbols *s, struct symbol *sym)
{
	const struct symbols *where = NULL;
	const struct symbol *outer = symbol_find(r, s->parent, sym->name, &where);
	if (!outer)
		return false;
	sym->load = SYMBOL_ALIAS;
	sym->alias = outer;
	sym->alias_owner = where->owner;
	return true;
}

static void symbol_loaded(struct resolver *r, struct symbols *s, struct str name)
{
	if (!symbol_find(r, s, name, NULL))
		symbol_define(r, s, name, SYMBOL_CONTEXT);
}

static void symbol_stored(struct resolver *r, struct symbols *s, struct str name)
{
	struct symbol *sym = symbol_here(r, s, name);
	if (!sym) {
		sym = symbol_define(r, s, name, SYMBOL_UNDEFINED);
		if (sym)
			alias_of(r, s, sym);
	}
	if (sym)
		sym->stored = true;
}

static void symbol_param(struct resolver *r, struct symbols *s, struct str name)
{
	struct symbol *sym = symbol_define(r, s, name, SYMBOL_PARAM);
	if (sym)
		sym->stored = true;
}

static bool symbols_copy(struct resolver *r, const struct symbols *from, struct symbols *to)
{
	*to = *from;
	to->cap = from->n;
	to->items = arena_alloc(r->scratch, from->n * sizeof *to->items);
	if (!to->items)
		return too_large(r);
	if (from->n)
		memcpy(to->items, from->items, from->n * sizeof *to->items);
	return work(r, from->n);
}

/* What the branches of an if do to its scope: a name that not all of them store is loaded as before for the others. */
static void symbols_join(struct resolver *r, struct symbols *s, const struct symbols *branches, int n_branches)
{
	size_t n_before = s->n;
	struct symbols before;
	if (!symbols_copy(r, s, &before))
		return;
	for (int b = 0; b < n_branches; b++) {
		for (size_t i = 0; i < branches[b].n; i++) {
			const struct symbol *from = &branches[b].items[i];
			struct symbol *to = i < n_before ? &s->items[i] : symbol_here(r, s, from->name);
			if (!to)
				to = symbol_define(r, s, from->name, from->load);
			if (!to)
				return;
			bool stored = to->stored || from->stored;
			*to = *from;
			to->stored = stored;
		}
	}
	for (size_t i = 0; i < s->n; i++) {
		struct symbol *sym = &s->items[i];
		const struct symbol *old = i < n_before ? &before.items[i] : NULL;
		if (!sym->stored || (old && old->stored))
			continue;
		int count = 0;
		for (int b = 0; b < n_branches; b++) {
			const struct symbol *in = i < branches[b].n && str_eq(branches[b].items[i].name, sym->name)
							  ? &branches[b].items[i]
							  : symbol_here(r, &branches[b], sym->name);
			count += in && in->stored;
		}
		if (count < n_branches && !alias_of(r, s, sym))
			sym->load = SYMBOL_CONTEXT;
	}
}

/* ---- First visit: which names a scope loads and stores ---- */

static void visit_expr(struct resolver *r, struct symbols *s, const struct expr *e);

static void visit_args(struct resolver *r, struct symbols *s, const struct call_args *a)
{
	for (size_t i = 0; i < a->n_args; i++)
		visit_expr(r, s, a->args[i]);
	for (size_t i = 0; i < a->n_keywords; i++)
		visit_expr(r, s, a->keywords[i].value);
	visit_expr(r, s, a->star);
	visit_expr(r, s, a->star_star);
}

static void visit_expr(struct resolver *r, struct symbols *s, const struct expr *e)
{
	if (!e || r->status != STATUS_OK)
		return;
	switch (e->kind) {
	case EXPR_CONST:
		return;
	case EXPR_NAME:
		if (e->store)
			symbol_stored(r, s, e->var.name);
		else
			symbol_loaded(r, s, e->var.name);
		return;
	case EXPR_NAMESPACE_ATTR:
		symbol_loaded(r, s, e->var.name);
		return;
	case EXPR_CALL:
	case EXPR_FILTER:
	case EXPR_TEST:
		visit_expr(r, s, e->call.subject);
		visit_args(r, s, e->call.args);
		return;
	case EXPR_CONCAT:
	case EXPR_LIST:
	case EXPR_TUPLE:
	case EXPR_DICT:
		for (size_t i = 0; i < e->list.n; i++)
			visit_expr(r, s, e->list.items[i]);
		return;
	case EXPR_COMPARE:
		visit_expr(r, s, e->compare.first);
		for (size_t i = 0; i < e->compare.n; i++)
			visit_expr(r, s, e->compare.items[i]);
		return;
	default:
		visit_expr(r, s, e->node.a);
		visit_expr(r, s, e->node.b);
		visit_expr(r, s, e->node.c);
		visit_expr(r, s, e->node.d);
	}
}

static void visit_params(struct resolver *r, struct symbols *s, const struct expr *target)
{
	if (target->kind == EXPR_TUPLE)
		for (size_t i = 0; i < target->list.n; i++)
			visit_params(r, s, target->list.items[i]);
	else if (target->kind == EXPR_NAME)
		symbol_param(r, s, target->var.name);
	else
		visit_expr(r, s, target);
}

static void visit_body(struct resolver *r, struct symbols *s, const struct stmt *body);

static void visit_if(struct resolver *r, struct symbols *s, const struct stmt *st)
{
	struct symbols branches[3];
	visit_expr(r, s, st->cond.test);
	for (int b = 0; b < 3; b++)
		if (!symbols_copy(r, s, &branches[b]))
			return;
	visit_body(r, &branches[0], st->cond.then);
	visit_body(r, &branches[1], st->cond.elifs);
	visit_body(r, &branches[2], st->cond.otherwise);
	if (r->status == STATUS_OK)
		symbols_join(r, s, branches, 3);
}

static void visit_body(struct resolver *r, struct symbols *s, const struct stmt *body)
{
	for (const struct stmt *st = body; st && r->status == STATUS_OK; st = st->next) {
		switch (st->kind) {
		case STMT_OUTPUT:
			for (size_t i = 0; i < st->output.n; i++)
				visit_expr(r, s, st->output.items[i]);
			break;
		case STMT_IF:
			visit_if(r, s, st);
			break;
		case STMT_FOR: /* the body is a scope of its own; what is iterated belongs to this one */
			visit_expr(r, s, st->loop.iter);
			break;
		case STMT_SET:
			visit_expr(r, s, st->set.value);
			visit_expr(r, s, st->set.target);
			break;
		case STMT_SET_BLOCK:
			visit_expr(r, s, st->set.target);
			break;
		case STMT_MACRO:
			symbol_stored(r, s, st->macro.target->var.name);
			break;
		case STMT_CALL_BLOCK:
			visit_expr(r, s, st->macro.call);
			break;
		case STMT_FILTER_BLOCK:
			visit_expr(r, s, st->set.filter);
			break;
		case STMT_WITH:
			for (size_t i = 0; i < st->with.n; i++)
				visit_expr(r, s, st->with.values[i]);
			break;
		default:
			break;
		}
	}
}

/* ---- Second visit: slots ---- */

static void place_body(struct resolver *r, struct symbols *s, struct stmt *body, bool soft);

static void place_expr(struct resolver *r, struct symbols *s, struct expr *e, bool soft);

static void place_args(struct resolver *r, struct symbols *s, struct call_args *a, bool soft)
{
	for (size_t i = 0; i < a->n_args; i++)
		place_expr(r, s, a->args[i], soft);
	for (size_t i = 0; i < a->n_keywords; i++)
		place_expr(r, s, a->keywords[i].value, soft);
	place_expr(r, s, a->star, soft);
	place_expr(r, s, a->star_star, soft);
}

/* `soft`: inside an if, where an unknown filter or test matters only when it is reached. */
static void place_expr(struct resolver *r, struct symbols *s, struct expr *e, bool soft)
{
	if (!e || r->status != STATUS_OK)
		return;
	switch (e->kind) {
	case EXPR_CONST:
		return;
	case EXPR_NAME:
	case EXPR_NAMESPACE_ATTR: {
		const struct symbols *where;
		const struct symbol *sym = symbol_find(r, s, e->var.name, &where);
		if (!sym) {
			resolver_fail(r, STATUS_INTERNAL, e->line, "no slot for the variable ", e->var.name);
			return;
		}
		e->var.place = (struct place){s->owner->depth - where->owner->depth, sym->slot};
		return;
	}
	case EXPR_FILTER:
		e->call.builtin = builtin_filter(e->call.name);
		if (!e->call.builtin && !soft)
			resolver_fail(r, STATUS_UNSUPPORTED, e->line, "unknown filter ", e->call.name);
		place_expr(r, s, e->call.subject, soft);
		place_args(r, s, e->call.args, soft);
		return;
	case EXPR_TEST:
		e->call.builtin = builtin_test(e->call.name);
		if (!e->call.builtin && !soft)
			resolver_fail(r, STATUS_UNSUPPORTED, e->line, "unknown test ", e->call.name);
		place_expr(r, s, e->call.subject, soft);
		place_args(r, s, e->call.args, soft);
		return;
	case EXPR_CALL:
		place_expr(r, s, e->call.subject, soft);
		place_args(r, s, e->call.args, soft);
		return;
	case EXPR_CONCAT:
	case EXPR_LIST:
	case EXPR_TUPLE:
	case EXPR_DICT:
		for (size_t i = 0; i < e->list.n; i++)
			place_expr(r, s, e->list.items[i], soft);
		return;
	case EXPR_COMPARE:
		place_expr(r, s, e->compare.first, soft);
		for (size_t i = 0; i < e->compare.n; i++)
			place_expr(r, s, e->compare.items[i], soft);
		return;
	default:
		soft = soft || e->kind == EXPR_COND;
		place_expr(r, s, e->node.a, soft);
		place_expr(r, s, e->node.b, soft);
		place_expr(r, s, e->node.c, soft);
		place_expr(r, s, e->node.d, soft);
	}
}

/* Turns the symbols of a scope into what is done when it is entered. */
static void finish_scope(struct resolver *r, const struct symbols *s, struct scope *out)
{
	out->loads = arena_alloc(r->arena, s->n * sizeof *out->loads);
	if (!out->loads) {
		too_large(r);
		return;
	}
	out->n_loads = 0;
	for (size_t i = 0; i < s->n; i++) {
		const struct symbol *sym = &s->items[i];
		if (sym->load == SYMBOL_PARAM)
			continue;
		struct scope_load *load = &out->loads[out->n_loads++];
		load->slot = sym->slot;
		load->name = sym->name;
		load->kind = sym->load == SYMBOL_CONTEXT ? LOAD_CONTEXT
			     : sym->load == SYMBOL_ALIAS ? LOAD_ALIAS
							 : LOAD_UNDEFINED;
		if (sym->load == SYMBOL_ALIAS)
			load->alias = (struct place){s->owner->depth - sym->alias_owner->depth, sym->alias->slot};
	}
}

static struct symbols inner(struct symbols *s)
{
	return (struct symbols){.parent = s, .owner = s->owner, .level = s->level + 1};
}

static struct function_scope enter_function(struct symbols *s, struct function *f)
{
	f->parent = s->owner->function;
	f->caller_slot = f->kwargs_slot = f->varargs_slot = -1;
	return (struct function_scope){.parent = s->owner, .function = f, .depth = s->owner->depth + 1};
}

static int special_param(struct resolver *r, struct symbols *s, const char *name)
{
	symbol_param(r, s, str_from(name));
	struct symbol *sym = symbol_here(r, s, str_from(name));
	return sym ? sym->slot : -1;
}

static void place_function(struct resolver *r, struct symbols *outer, struct function *f)
{
	struct function_scope owner = enter_function(outer, f);
	struct symbols s = inner(outer);
	bool own_kwargs = false, own_varargs = false;
	s.owner = &owner;
	for (size_t i = 0; i < f->n_params; i++) {
		symbol_param(r, &s, f->params[i].name);
		own_kwargs |= str_is(f->params[i].name, "kwargs");
		own_varargs |= str_is(f->params[i].name, "varargs");
	}
	for (size_t i = 0; i < f->n_params; i++)
		visit_expr(r, &s, f->params[i].fallback);
	visit_body(r, &s, f->body);
	if ((f->uses & USES_CALLER) && !f->explicit_caller)
		f->caller_slot = special_param(r, &s, "caller");
	if ((f->uses & USES_KWARGS) && !own_kwargs)
		f->kwargs_slot = special_param(r, &s, "kwargs");
	if ((f->uses & USES_VARARGS) && !own_varargs)
		f->varargs_slot = special_param(r, &s, "varargs");
	if (r->status != STATUS_OK)
		return;
	for (size_t i = 0; i < f->n_params; i++) {
		f->params[i].slot = slot_for(r, &owner, s.level, f->params[i].name);
		place_expr(r, &s, f->params[i].fallback, false);
	}
	finish_scope(r, &s, &f->scope);
	place_body(r, &s, f->body, false);
}

static void place_for(struct resolver *r, struct symbols *outer, struct stmt *st, bool soft)
{
	place_expr(r, outer, st->loop.iter, soft);
	struct function_scope owner;
	struct symbols body = inner(outer), test = inner(outer), otherwise = inner(outer);
	if (st->loop.recursive) {
		owner = enter_function(outer, st->loop.recursive);
		body.owner = test.owner = otherwise.owner = &owner;
	}
	st->loop.loop_slot = special_param(r, &body, "loop");
	visit_params(r, &body, st->loop.target);
	visit_body(r, &body, st->loop.body);
	visit_body(r, &otherwise, st->loop.otherwise);
	if (st->loop.test) {
		visit_params(r, &test, st->loop.target);
		visit_expr(r, &test, st->loop.test);
	}
	if (r->status != STATUS_OK)
		return;
	finish_scope(r, &body, &st->loop.body_scope);
	finish_scope(r, &test, &st->loop.test_scope);
	finish_scope(r, &otherwise, &st->loop.else_scope);
	place_expr(r, &body, st->loop.target, false);
	place_expr(r, &test, st->loop.test, false);
	place_body(r, &body, st->loop.body, false);
	place_body(r, &otherwise, st->loop.otherwise, false);
}

static void place_if(struct resolver *r, struct symbols *s, struct stmt *st)
{
	place_expr(r, s, st->cond.test, true);
	place_body(r, s, st->cond.then, true);
	place_body(r, s, st->cond.elifs, true);
	place_body(r, s, st->cond.otherwise, true);
}

/* A body with variables of its own inside the same function. */
static void place_inner(struct resolver *r, struct symbols *outer, struct stmt *body, struct scope *scope,
			struct expr *filter)
{
	struct symbols s = inner(outer);
	visit_expr(r, &s, filter);
	visit_body(r, &s, body);
	finish_scope(r, &s, scope);
	place_expr(r, &s, filter, false);
	place_body(r, &s, body, false);
}

static void place_with(struct resolver *r, struct symbols *outer, struct stmt *st)
{
	struct symbols s = inner(outer);
	for (size_t i = 0; i < st->with.n; i++)
		visit_params(r, &s, st->with.targets[i]);
	visit_body(r, &s, st->with.body);
	if (r->status != STATUS_OK)
		return;
	finish_scope(r, &s, &st->with.scope);
	for (size_t i = 0; i < st->with.n; i++) {
		place_expr(r, &s, st->with.targets[i], false);
		place_expr(r, outer, st->with.values[i], false);
	}
	place_body(r, &s, st->with.body, false);
}

static void place_body(struct resolver *r, struct symbols *s, struct stmt *body, bool soft)
{
	for (struct stmt *st = body; st && r->status == STATUS_OK; st = st->next) {
		switch (st->kind) {
		case STMT_OUTPUT:
			for (size_t i = 0; i < st->output.n; i++)
				place_expr(r, s, st->output.items[i], soft);
			break;
		case STMT_IF:
			place_if(r, s, st);
			break;
		case STMT_FOR:
			place_for(r, s, st, soft);
			break;
		case STMT_SET:
			place_expr(r, s, st->set.value, soft);
			place_expr(r, s, st->set.target, soft);
			break;
		case STMT_SET_BLOCK:
			place_inner(r, s, st->set.body, &st->set.scope, st->set.filter);
			place_expr(r, s, st->set.target, soft);
			break;
		case STMT_FILTER_BLOCK:
			place_inner(r, s, st->set.body, &st->set.scope, st->set.filter);
			break;
		case STMT_MACRO:
			place_expr(r, s, st->macro.target, soft);
			place_function(r, s, st->macro.function);
			break;
		case STMT_CALL_BLOCK:
			place_function(r, s, st->macro.function);
			place_expr(r, s, st->macro.call, soft);
			break;
		case STMT_WITH:
			place_with(r, s, st);
			break;
		case STMT_SCOPE:
			place_inner(r, s, st->with.body, &st->with.scope, NULL);
			break;
		default:
			break;
		}
	}
}

enum status template_resolve(struct template *t, struct error *err)
{
	struct resolver r = {.arena = t->arena, .scratch = arena_create(SCRATCH_BYTES), .err = err};
	if (!r.scratch)
		return error_set(err, STATUS_NOMEM, "out of memory while compiling a template");
	struct function_scope owner = {.function = &t->root};
	struct symbols root = {.owner = &owner};
	visit_body(&r, &root, t->root.body);
	if (r.status == STATUS_OK)
		finish_scope(&r, &root, &t->root.scope);
	place_body(&r, &root, t->root.body, false);
	arena_destroy(r.scratch);
	return r.status;
}
