/* Calls: binding arguments to the parameters of builtins, and what can be called at all. */
#include "engine/text/template_render.h"

const struct builtin *builtin_find(const struct builtin *table, size_t n, struct str name)
{
	for (size_t i = 0; i < n; i++)
		if (str_is(name, table[i].name))
			return &table[i];
	return NULL;
}

/* The next word of a parameter list. */
static bool next_param(const char **params, struct str *name, bool *optional)
{
	const char *p = *params;
	while (*p == ' ')
		p++;
	if (*p == '?') {
		*optional = true;
		p++;
	}
	name->p = p;
	while (*p && *p != ' ')
		p++;
	name->n = (size_t)(p - name->p);
	*params = p;
	return name->n > 0;
}

static bool bind(struct call *c)
{
	const char *params = c->fn->params;
	struct str name;
	bool optional = false;
	size_t n_params = 0, n_keywords = 0;
	for (size_t i = 0; next_param(&params, &name, &optional); i++) {
		n_params++;
		const struct value *keyword = NULL;
		for (size_t k = 0; k < c->raw.n_keywords; k++)
			if (str_eq(c->raw.keywords[k].name, name))
				keyword = &c->raw.keywords[k].value;
		n_keywords += keyword != NULL;
		if (i < c->raw.n && keyword)
			return render_fail(c->r, "%s() got multiple values for argument '%.*s'", c->fn->name,
					   STR_ARG(name));
		if (i < c->raw.n)
			c->arg[i] = c->raw.args[i];
		else if (keyword)
			c->arg[i] = *keyword;
		else if (!optional)
			return render_fail(c->r, "%s() missing required argument '%.*s'", c->fn->name, STR_ARG(name));
	}
	if (c->raw.n > n_params)
		return render_fail(c->r, "%s() takes at most %zu argument%s (%zu given)", c->fn->name, n_params,
				   n_params == 1 ? "" : "s", c->raw.n);
	if (n_keywords == c->raw.n_keywords)
		return true;
	for (size_t k = 0; k < c->raw.n_keywords; k++) {
		struct str unknown = c->raw.keywords[k].name;
		bool known = false;
		params = c->fn->params;
		while (next_param(&params, &name, &optional))
			known |= str_eq(unknown, name);
		if (!known)
			return render_fail(c->r, "%s() got an unexpected keyword argument '%.*s'", c->fn->name,
					   unknown.n > 80 ? 80 : (int)unknown.n, unknown.p);
	}
	return true;
}

bool call_builtin(struct render *r, const struct builtin *fn, const struct value *self, const struct arguments *args,
		  struct value *out)
{
	struct call c = {.r = r, .fn = fn, .raw = *args, .out = out};
	if (self)
		c.self = *self;
	*out = val_none();
	return (!fn->params || bind(&c)) && fn->run(&c);
}

bool call_value(struct render *r, const struct value *callee, const struct arguments *args, struct value *out)
{
	switch (callee->type) {
	case VALUE_FUNCTION:
		return call_builtin(r, callee->function, NULL, args, out);
	case VALUE_METHOD:
		return call_builtin(r, callee->method->builtin, &callee->method->self, args, out);
	case VALUE_MACRO:
		return macro_call(r, callee->macro, args, out);
	case VALUE_LOOP:
		if (args->n != 1 || args->n_keywords)
			return render_fail(r, "a recursive loop takes one argument, what to iterate over");
		return loop_recurse(r, callee->loop, &args->args[0], out);
	case VALUE_JOINER:
		if (callee->joiner->used) {
			*out = callee->joiner->separator;
			return true;
		}
		callee->joiner->used = true;
		return string_new(r, "", 0, VALUE_TRUSTED, out);
	case VALUE_UNDEFINED:
		return undefined_fail(r, callee);
	default:
		return render_fail(r, "'%s' object is not callable", type_name(callee));
	}
}

/* ---- Arguments of builtins ---- */

bool int_arg(struct call *c, int i, int64_t *out)
{
	const struct value *v = &c->arg[i];
	if (!val_given(v))
		return true;
	if (v->type == VALUE_UNDEFINED)
		return undefined_fail(c->r, v);
	if (!val_is_integer(v))
		return render_fail(c->r, "'%s' object cannot be interpreted as an integer", type_name(v));
	*out = val_as_int(v);
	return true;
}

bool int_or_none_arg(struct call *c, int i, int64_t *out)
{
	return c->arg[i].type == VALUE_NONE || int_arg(c, i, out);
}

bool string_arg(struct call *c, int i, struct value *out)
{
	const struct value *v = &c->arg[i];
	if (!val_given(v))
		return true;
	if (v->type != VALUE_STRING)
		return render_fail(c->r, "%s() argument %d must be str, not %s", c->fn->name, i + 1, type_name(v));
	*out = *v;
	return true;
}

bool truth_arg(struct call *c, int i, bool *out)
{
	if (val_given(&c->arg[i]))
		*out = value_truth(&c->arg[i]);
	return true;
}

bool no_keywords(struct call *c)
{
	if (c->raw.n_keywords)
		return render_fail(c->r, "%s() takes no keyword arguments", c->fn->name);
	return true;
}
