/* Statements: tokens to a tree. Follows Jinja2's grammar with the extensions that transformers enables. */
#include <stdio.h>

#include "engine/text/template_ast.h"

/* ---- Shared helpers ---- */

bool parser_fail(struct parser *p, enum status status, int line, const char *fmt, ...)
{
	if (p->status != STATUS_OK)
		return false;
	char text[400];
	va_list args;
	va_start(args, fmt);
	vsnprintf(text, sizeof text, fmt, args);
	va_end(args);
	p->status = error_set(p->err, status, "line %d: %s", line, text);
	return false;
}

void *parser_alloc(struct parser *p, size_t n)
{
	void *m = arena_alloc(p->arena, n);
	if (!m && arena_starved(p->arena))
		parser_fail(p, STATUS_NOMEM, p->at->line, "out of memory while compiling a template");
	else if (!m)
		parser_fail(p, STATUS_LIMIT, p->at->line, "the template is too large");
	return m;
}

bool parser_enter(struct parser *p)
{
	if (p->nesting >= MAX_NESTING)
		return parser_fail(p, STATUS_LIMIT, p->at->line, "the template is nested too deeply");
	p->nesting++;
	return true;
}

bool ptr_list_add(struct parser *p, struct ptr_list *l, void *item)
{
	if (!item)
		return false;
	if (l->n == l->cap) {
		size_t cap = l->cap ? l->cap * 2 : 4;
		void **items = parser_alloc(p, cap * sizeof *items);
		if (!items)
			return false;
		if (l->n)
			memcpy(items, l->items, l->n * sizeof *items);
		l->items = items;
		l->cap = cap;
	}
	l->items[l->n++] = item;
	return true;
}

bool token_is_name(const struct token *t, const char *name)
{
	return t->type == TOKEN_NAME && str_is(t->text, name);
}

bool parser_skip(struct parser *p, enum token_type type)
{
	if (p->at->type != type)
		return false;
	p->at++;
	return true;
}

bool parser_skip_name(struct parser *p, const char *name)
{
	if (!token_is_name(p->at, name))
		return false;
	p->at++;
	return true;
}

bool parser_expect(struct parser *p, enum token_type type)
{
	if (parser_skip(p, type))
		return true;
	if (p->at->type == TOKEN_NAME)
		return parser_fail(p, STATUS_INVALID, p->at->line, "expected '%s', got '%.*s'", token_name(type),
				   p->at->text.n > 60 ? 60 : (int)p->at->text.n, p->at->text.p);
	return parser_fail(p, STATUS_INVALID, p->at->line, "expected '%s', got '%s'", token_name(type),
			   token_name(p->at->type));
}

/* ---- Statements ---- */

static struct stmt *stmt_new(struct parser *p, enum stmt_kind kind, int line)
{
	struct stmt *s = parser_alloc(p, sizeof *s);
	if (!s)
		return NULL;
	s->kind = (uint8_t)kind;
	s->line = line;
	s->depth = 1;
	return s;
}

/* Accounts for what a statement contains; false when the tree would be too deep to walk. */
static bool holds(struct parser *p, struct stmt *s, unsigned depth)
{
	if (depth >= MAX_TREE_DEPTH)
		return parser_fail(p, STATUS_LIMIT, s->line, "the template is nested too deeply");
	if (s->depth <= depth)
		s->depth = (uint16_t)(depth + 1);
	return true;
}

static bool holds_body(struct parser *p, struct stmt *s, const struct stmt *body)
{
	for (; body; body = body->next)
		if (!holds(p, s, body->depth))
			return false;
	return true;
}

static bool holds_expr(struct parser *p, struct stmt *s, const struct expr *e)
{
	return e && holds(p, s, e->depth);
}

/* The tags that end a body. */
#define ENDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static bool parse_nodes(struct parser *p, const char *const *ends, struct stmt **body);

/* The rest of an opening tag, and the body up to one of `ends`, at whose name the parser then stands. */
static bool parse_body(struct parser *p, const char *const *ends, struct stmt **body)
{
	parser_skip(p, TOKEN_COLON);
	return parser_expect(p, TOKEN_BLOCK_END) && parser_enter(p) && parse_nodes(p, ends, body) &&
	       (parser_leave(p), true);
}

/* As parse_body, for a body that has only one end; the end's name is consumed. */
static bool parse_body_to(struct parser *p, const char *end, struct stmt **body)
{
	if (!parse_body(p, ENDS(end), body))
		return false;
	p->at++;
	return true;
}

static struct stmt *parse_if(struct parser *p)
{
	struct stmt *s = stmt_new(p, STMT_IF, p->at->line), *branch = s;
	p->at++;
	struct stmt **elifs = s ? &s->cond.elifs : NULL;
	for (;;) {
		if (!branch)
			return NULL;
		branch->cond.test = parse_tuple(p, false, false, NULL);
		if (!holds_expr(p, s, branch->cond.test) ||
		    !parse_body(p, ENDS("elif", "else", "endif"), &branch->cond.then) ||
		    !holds_body(p, s, branch->cond.then))
			return NULL;
		int line = p->at->line;
		if (parser_skip_name(p, "elif")) {
			branch = stmt_new(p, STMT_IF, line);
			*elifs = branch;
			elifs = branch ? &branch->next : NULL;
			continue;
		}
		if (parser_skip_name(p, "else")) {
			if (!parse_body_to(p, "endif", &s->cond.otherwise) || !holds_body(p, s, s->cond.otherwise))
				return NULL;
		} else {
			p->at++;
		}
		return s;
	}
}

/* A loop may not store into its own `loop` variable. */
static bool stores_loop(const struct expr *target)
{
	if (target->kind == EXPR_TUPLE) {
		for (size_t i = 0; i < target->list.n; i++)
			if (stores_loop(target->list.items[i]))
				return true;
		return false;
	}
	return target->kind == EXPR_NAME && str_is(target->var.name, "loop");
}

static bool body_stores_loop(const struct stmt *body)
{
	for (; body; body = body->next) {
		if (body->kind == STMT_SET || body->kind == STMT_SET_BLOCK) {
			if (stores_loop(body->set.target))
				return true;
		} else if (body->kind == STMT_IF) {
			if (body_stores_loop(body->cond.then) || body_stores_loop(body->cond.otherwise) ||
			    body_stores_loop(body->cond.elifs))
				return true;
		}
	}
	return false;
}

static struct stmt *parse_for(struct parser *p)
{
	struct stmt *s = stmt_new(p, STMT_FOR, p->at->line);
	p->at++;
	if (!s)
		return NULL;
	s->loop.target = parse_target(p, true, false, "in");
	if (!s->loop.target)
		return NULL;
	if (!parser_skip_name(p, "in")) {
		parser_fail(p, STATUS_INVALID, p->at->line, "expected 'in' in a for loop");
		return NULL;
	}
	s->loop.iter = parse_tuple(p, false, false, "recursive");
	if (!holds_expr(p, s, s->loop.iter))
		return NULL;
	if (parser_skip_name(p, "if")) {
		s->loop.test = parse_expression(p, true);
		if (!holds_expr(p, s, s->loop.test))
			return NULL;
	}
	if (parser_skip_name(p, "recursive")) {
		s->loop.recursive = parser_alloc(p, sizeof *s->loop.recursive);
		if (!s->loop.recursive)
			return NULL;
	}
	unsigned uses = p->uses;
	p->uses &= ~(unsigned)USES_LOOP;
	p->loops++;
	bool parsed = parse_body(p, ENDS("endfor", "else"), &s->loop.body);
	p->loops--;
	s->loop.uses_loop = (p->uses & USES_LOOP) || s->loop.recursive;
	p->uses |= uses;
	if (!parsed || !holds_body(p, s, s->loop.body))
		return NULL;
	if (parser_skip_name(p, "else")) {
		if (!parse_body_to(p, "endfor", &s->loop.otherwise) || !holds_body(p, s, s->loop.otherwise))
			return NULL;
	} else {
		p->at++;
	}
	if (stores_loop(s->loop.target) || body_stores_loop(s->loop.body)) {
		parser_fail(p, STATUS_INVALID, s->line, "the special variable 'loop' cannot be assigned in a for loop");
		return NULL;
	}
	return s;
}

static struct stmt *parse_set(struct parser *p)
{
	struct stmt *s = stmt_new(p, STMT_SET, p->at->line);
	p->at++;
	if (!s)
		return NULL;
	s->set.target = parse_target(p, true, true, NULL);
	if (!s->set.target)
		return NULL;
	if (parser_skip(p, TOKEN_ASSIGN)) {
		s->set.value = parse_tuple(p, true, false, NULL);
		return holds_expr(p, s, s->set.value) ? s : NULL;
	}
	s->kind = STMT_SET_BLOCK;
	if (p->at->type == TOKEN_PIPE) {
		s->set.filter = parse_filter_chain(p, NULL, false);
		if (!holds_expr(p, s, s->set.filter))
			return NULL;
	}
	return parse_body_to(p, "endset", &s->set.body) && holds_body(p, s, s->set.body) ? s : NULL;
}

/* (a, b=1, ...): parameters of a macro or call block. */
static bool parse_signature(struct parser *p, struct stmt *s, struct function *f)
{
	size_t cap = 0;
	if (!parser_expect(p, TOKEN_LPAREN))
		return false;
	while (p->at->type != TOKEN_RPAREN) {
		if (f->n_params && !parser_expect(p, TOKEN_COMMA))
			return false;
		struct expr *name = parse_target(p, false, false, NULL);
		if (!name)
			return false;
		if (name->kind != EXPR_NAME)
			return parser_fail(p, STATUS_INVALID, name->line, "expected the name of a parameter");
		if (f->n_params == cap) {
			cap = cap ? cap * 2 : 4;
			struct param *grown = parser_alloc(p, cap * sizeof *grown);
			if (!grown)
				return false;
			if (f->n_params)
				memcpy(grown, f->params, f->n_params * sizeof *grown);
			f->params = grown;
		}
		struct param *param = &f->params[f->n_params++];
		param->name = name->var.name;
		if (parser_skip(p, TOKEN_ASSIGN)) {
			param->fallback = parse_expression(p, true);
			if (!holds_expr(p, s, param->fallback))
				return false;
		} else if (f->n_params > 1 && param[-1].fallback) {
			return parser_fail(p, STATUS_INVALID, name->line,
					   "a parameter without default follows one with a default");
		}
		if (str_is(param->name, "caller")) {
			f->explicit_caller = true;
			if (!param->fallback)
				return parser_fail(p, STATUS_INVALID, name->line,
						   "the special parameter 'caller' needs a default");
		}
	}
	p->at++;
	return true;
}

/* A body that becomes a function of its own: no loop of the outside can be left from in it. */
static bool parse_function_body(struct parser *p, struct stmt *s, struct function *f, const char *end)
{
	unsigned uses = p->uses;
	int loops = p->loops;
	p->uses = 0;
	p->loops = 0;
	bool parsed = parse_body_to(p, end, &f->body);
	f->uses = p->uses;
	p->uses |= uses;
	p->loops = loops;
	return parsed && holds_body(p, s, f->body);
}

static struct stmt *function_stmt(struct parser *p, enum stmt_kind kind, const char *name)
{
	struct stmt *s = stmt_new(p, kind, p->at->line);
	p->at++;
	if (!s)
		return NULL;
	s->macro.function = parser_alloc(p, sizeof *s->macro.function);
	if (!s->macro.function)
		return NULL;
	s->macro.function->name = str_from(name);
	return s;
}

static struct stmt *parse_macro(struct parser *p)
{
	struct stmt *s = function_stmt(p, STMT_MACRO, "");
	if (!s)
		return NULL;
	s->macro.target = parse_target(p, false, false, NULL);
	if (!s->macro.target)
		return NULL;
	s->macro.function->name = s->macro.target->var.name;
	return parse_signature(p, s, s->macro.function) && parse_function_body(p, s, s->macro.function, "endmacro")
		       ? s
		       : NULL;
}

static struct stmt *parse_call_block(struct parser *p)
{
	struct stmt *s = function_stmt(p, STMT_CALL_BLOCK, "caller");
	if (!s || (p->at->type == TOKEN_LPAREN && !parse_signature(p, s, s->macro.function)))
		return NULL;
	s->macro.call = parse_expression(p, true);
	if (!holds_expr(p, s, s->macro.call))
		return NULL;
	if (s->macro.call->kind != EXPR_CALL) {
		parser_fail(p, STATUS_INVALID, s->line, "expected a call in a call block");
		return NULL;
	}
	return parse_function_body(p, s, s->macro.function, "endcall") ? s : NULL;
}

/* {% generation %}: marks the assistant's text for training. Like Jinja2's call block, it is a function of its own. */
static struct stmt *parse_generation(struct parser *p)
{
	struct stmt *s = function_stmt(p, STMT_CALL_BLOCK, "caller");
	return s && parse_function_body(p, s, s->macro.function, "endgeneration") ? s : NULL;
}

static struct stmt *parse_filter_block(struct parser *p)
{
	struct stmt *s = stmt_new(p, STMT_FILTER_BLOCK, p->at->line);
	p->at++;
	if (!s)
		return NULL;
	s->set.filter = parse_filter_chain(p, NULL, true);
	return holds_expr(p, s, s->set.filter) && parse_body_to(p, "endfilter", &s->set.body) &&
			       holds_body(p, s, s->set.body)
		       ? s
		       : NULL;
}

static struct stmt *parse_with(struct parser *p)
{
	struct stmt *s = stmt_new(p, STMT_WITH, p->at->line);
	struct ptr_list targets = {0}, values = {0};
	p->at++;
	if (!s)
		return NULL;
	while (p->at->type != TOKEN_BLOCK_END) {
		if (targets.n && !parser_expect(p, TOKEN_COMMA))
			return NULL;
		struct expr *target = parse_target(p, true, false, NULL);
		if (!ptr_list_add(p, &targets, target) || !parser_expect(p, TOKEN_ASSIGN))
			return NULL;
		struct expr *value = parse_expression(p, true);
		if (!ptr_list_add(p, &values, value) || !holds_expr(p, s, value))
			return NULL;
	}
	s->with.targets = (struct expr **)targets.items;
	s->with.values = (struct expr **)values.items;
	s->with.n = targets.n;
	return parse_body_to(p, "endwith", &s->with.body) && holds_body(p, s, s->with.body) ? s : NULL;
}

static struct stmt *parse_autoescape(struct parser *p)
{
	struct stmt *s = stmt_new(p, STMT_SCOPE, p->at->line);
	p->at++;
	struct expr *on = s ? parse_expression(p, true) : NULL;
	if (!on)
		return NULL;
	if (on->kind != EXPR_CONST || on->constant.type != VALUE_BOOL || on->constant.b) {
		parser_fail(p, STATUS_UNSUPPORTED, s->line, "{%% autoescape %%} other than false is not supported");
		return NULL;
	}
	return parse_body_to(p, "endautoescape", &s->with.body) && holds_body(p, s, s->with.body) ? s : NULL;
}

static struct stmt *parse_print(struct parser *p)
{
	struct stmt *s = stmt_new(p, STMT_OUTPUT, p->at->line);
	struct ptr_list items = {0};
	p->at++;
	while (s && p->at->type != TOKEN_BLOCK_END) {
		if (items.n && !parser_expect(p, TOKEN_COMMA))
			return NULL;
		struct expr *e = parse_expression(p, true);
		if (!ptr_list_add(p, &items, e) || !holds_expr(p, s, e))
			return NULL;
	}
	if (s) {
		s->output.items = (struct expr **)items.items;
		s->output.n = items.n;
	}
	return s;
}

static struct stmt *parse_jump(struct parser *p)
{
	bool is_break = token_is_name(p->at, "break");
	struct stmt *s = stmt_new(p, is_break ? STMT_BREAK : STMT_CONTINUE, p->at->line);
	if (p->loops == 0) {
		parser_fail(p, STATUS_INVALID, p->at->line, "{%% %s %%} outside of a loop",
			    is_break ? "break" : "continue");
		return NULL;
	}
	p->at++;
	return s;
}

static const struct {
	const char *name;
	struct stmt *(*parse)(
		struct parser *p); /* NULL: known, but reaches outside of the template or needs what we lack */
} tags[] = {
	{"if", parse_if},
	{"for", parse_for},
	{"set", parse_set},
	{"macro", parse_macro},
	{"call", parse_call_block},
	{"filter", parse_filter_block},
	{"with", parse_with},
	{"print", parse_print},
	{"autoescape", parse_autoescape},
	{"generation", parse_generation},
	{"break", parse_jump},
	{"continue", parse_jump},
	{"include", NULL},
	{"import", NULL},
	{"from", NULL},
	{"extends", NULL},
	{"block", NULL},
};

static struct stmt *parse_statement(struct parser *p, const char *const *ends)
{
	const struct token *t = p->at;
	if (t->type != TOKEN_NAME) {
		parser_fail(p, STATUS_INVALID, t->line, "expected the name of a tag");
		return NULL;
	}
	struct str outer_tag = p->innermost_tag;
	int outer_line = p->innermost_line;
	for (size_t i = 0; i < sizeof tags / sizeof *tags; i++) {
		if (!str_is(t->text, tags[i].name))
			continue;
		if (!tags[i].parse) {
			parser_fail(p, STATUS_UNSUPPORTED, t->line, "{%% %s %%} is not supported", tags[i].name);
			return NULL;
		}
		p->innermost_tag = t->text;
		p->innermost_line = t->line;
		struct stmt *s = tags[i].parse(p);
		p->innermost_tag = outer_tag;
		p->innermost_line = outer_line;
		return s;
	}
	int n = t->text.n > 60 ? 60 : (int)t->text.n;
	if (ends && t->text.n > 3 && memcmp(t->text.p, "end", 3) == 0)
		parser_fail(p, STATUS_INVALID, t->line, "{%% %.*s %%} where {%% %.*s %%} of line %d is open", n,
			    t->text.p, STR_ARG(outer_tag), outer_line);
	else
		parser_fail(p, STATUS_UNSUPPORTED, t->line, "unknown tag {%% %.*s %%}", n, t->text.p);
	return NULL;
}

/* Template text, {{ }} and tags up to one of `ends` (NULL: the end of the template). */
static bool parse_nodes(struct parser *p, const char *const *ends, struct stmt **body)
{
	struct stmt **tail = body, *output = NULL;
	struct ptr_list items = {0};
	*body = NULL;
	for (;;) {
		const struct token *t = p->at;
		bool printed = t->type == TOKEN_TEXT || t->type == TOKEN_VARIABLE_BEGIN;
		if (!printed && output) {
			output->output.items = (struct expr **)items.items;
			output->output.n = items.n;
			output = NULL;
			items = (struct ptr_list){0};
		}
		if (printed && !output) {
			output = stmt_new(p, STMT_OUTPUT, t->line);
			if (!output)
				return false;
			*tail = output;
			tail = &output->next;
		}
		if (t->type == TOKEN_TEXT) {
			struct expr *e = expr_new(p, EXPR_CONST, t->line);
			struct value_text *text = parser_alloc(p, sizeof *text);
			if (!e || !text)
				return false;
			*text = (struct value_text){t->text.p, t->text.n, value_count_chars(t->text.p, t->text.n), NULL,
						    0};
			e->constant = (struct value){.type = VALUE_STRING, .origin = VALUE_TRUSTED, .s = text};
			p->at++;
			if (!ptr_list_add(p, &items, e))
				return false;
		} else if (t->type == TOKEN_VARIABLE_BEGIN) {
			p->at++;
			struct expr *e = parse_tuple(p, true, false, NULL);
			if (!holds_expr(p, output, e) || !parser_expect(p, TOKEN_VARIABLE_END) ||
			    !ptr_list_add(p, &items, e))
				return false;
		} else if (t->type == TOKEN_BLOCK_BEGIN) {
			p->at++;
			for (size_t i = 0; ends && ends[i]; i++)
				if (token_is_name(p->at, ends[i]))
					return true;
			struct stmt *s = parse_statement(p, ends);
			if (!s || !parser_expect(p, TOKEN_BLOCK_END))
				return false;
			*tail = s;
			tail = &s->next;
		} else if (t->type == TOKEN_EOF) {
			if (!ends)
				return true;
			return parser_fail(p, STATUS_INVALID, t->line, "{%% %.*s %%} of line %d has no {%% %s %%}",
					   STR_ARG(p->innermost_tag), p->innermost_line, ends[0]);
		} else {
			return parser_fail(p, STATUS_INVALID, t->line, "unexpected '%s'", token_name(t->type));
		}
	}
}

enum status template_parse(struct template *t, const struct token_list *tokens, struct error *err)
{
	struct parser p = {.arena = t->arena, .at = tokens->items, .err = err};
	if (!parse_nodes(&p, NULL, &t->root.body) && p.status == STATUS_OK)
		parser_fail(&p, STATUS_INTERNAL, p.at->line, "the parser stopped without a reason");
	return p.status;
}
