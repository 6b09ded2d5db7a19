/*
 * Expressions: recursive descent with Jinja2's precedences, which are not always Python's (`~` binds tighter than `+`).
 */
#include <errno.h>
#include <stdlib.h>

#include "engine/base/utf8.h"
#include "engine/text/template_ast.h"

struct expr *expr_new(struct parser *p, enum expr_kind kind, int line)
{
	struct expr *e = parser_alloc(p, sizeof *e);
	if (!e)
		return NULL;
	e->kind = (uint8_t)kind;
	e->line = line;
	e->depth = 1;
	return e;
}

/* Accounts for a child; false when either is missing or the tree would be too deep to walk. */
static bool adopt(struct parser *p, struct expr *parent, const struct expr *child)
{
	if (!parent || !child)
		return false;
	if (child->depth >= MAX_TREE_DEPTH)
		return parser_fail(p, STATUS_LIMIT, child->line, "the expression is nested too deeply");
	if (parent->depth <= child->depth)
		parent->depth = (uint16_t)(child->depth + 1);
	return true;
}

static struct expr *unary(struct parser *p, enum expr_kind kind, int line, struct expr *a)
{
	struct expr *e = a ? expr_new(p, kind, line) : NULL;
	if (!adopt(p, e, a))
		return NULL;
	e->node.a = a;
	return e;
}

static struct expr *binary(struct parser *p, enum expr_kind kind, int line, struct expr *a, struct expr *b)
{
	struct expr *e = b ? unary(p, kind, line, a) : NULL;
	if (!adopt(p, e, b))
		return NULL;
	e->node.b = b;
	return e;
}

/* ---- Literals ---- */

static bool constant_text(struct parser *p, struct expr *e, const char *bytes, size_t n)
{
	struct value_text *text = parser_alloc(p, sizeof *text);
	if (!text)
		return false;
	*text = (struct value_text){bytes, n, value_count_chars(bytes, n), NULL, 0};
	e->constant = (struct value){.type = VALUE_STRING, .origin = VALUE_TRUSTED, .s = text};
	return true;
}

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 32;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Reads `n` hex digits at s[*at]; false when they are not there. */
static bool read_hex(struct str s, size_t *at, int n, uint32_t *cp)
{
	*cp = 0;
	for (int i = 0; i < n; i++, (*at)++) {
		int v = *at < s.n ? hex_digit(s.p[*at]) : -1;
		if (v < 0)
			return false;
		*cp = *cp << 4 | (uint32_t)v;
	}
	return true;
}

/* Replaces Python's escapes; `out` has room for s.n bytes, since no escape is shorter than what it stands for. */
static bool unescape(struct parser *p, struct str s, int line, char *out, size_t *out_n)
{
	size_t n = 0;
	for (size_t i = 0; i < s.n;) {
		if (s.p[i] != '\\' || i + 1 >= s.n) {
			out[n++] = s.p[i++];
			continue;
		}
		char c = s.p[i + 1];
		static const char from[] = "abfnrtv\\'\"", to[] = "\a\b\f\n\r\t\v\\'\"";
		const char *simple = c ? strchr(from, c) : NULL;
		i += 2;
		if (simple) {
			out[n++] = to[simple - from];
		} else if (c == '\n') {
			/* an escaped line end is no character */
		} else if (c == 'x' || c == 'u' || c == 'U' || (c >= '0' && c <= '7')) {
			uint32_t cp = 0;
			if (c >= '0' && c <= '7') {
				i--;
				for (int k = 0; k < 3 && i < s.n && s.p[i] >= '0' && s.p[i] <= '7'; k++)
					cp = cp * 8 + (uint32_t)(s.p[i++] - '0');
			} else if (!read_hex(s, &i, c == 'x' ? 2 : c == 'u' ? 4 : 8, &cp)) {
				return parser_fail(p, STATUS_INVALID, line, "a string has a truncated \\%c escape", c);
			}
			uint32_t low;
			size_t after = i + 2;
			if (cp >= 0xd800 && cp < 0xdc00 && i + 6 <= s.n && s.p[i] == '\\' && s.p[i + 1] == 'u' &&
			    read_hex(s, &after, 4, &low) && low >= 0xdc00 && low < 0xe000) {
				cp = 0x10000 + ((cp - 0xd800) << 10) + (low - 0xdc00);
				i = after;
			}
			if (cp > 0x10ffff)
				return parser_fail(p, STATUS_INVALID, line, "a string has an escape beyond U+10FFFF");
			size_t len = utf8_encode(cp, out + n);
			n += len ? len : utf8_encode(0xfffd, out + n);
		} else if (c == 'N') {
			return parser_fail(p, STATUS_UNSUPPORTED, line, "\\N{...} escapes are not supported");
		} else {
			out[n++] = '\\';
			out[n++] = c;
		}
	}
	*out_n = n;
	return true;
}

/* One or more adjacent string literals. */
static struct expr *parse_string(struct parser *p)
{
	struct expr *e = expr_new(p, EXPR_CONST, p->at->line);
	size_t room = 0;
	for (const struct token *t = p->at; t->type == TOKEN_STRING; t++)
		room += t->text.n;
	char *bytes = e ? parser_alloc(p, room + 4) : NULL;
	if (!bytes)
		return NULL;
	size_t n = 0;
	for (; p->at->type == TOKEN_STRING; p->at++) {
		size_t added = 0;
		if (!unescape(p, p->at->text, p->at->line, bytes + n, &added))
			return NULL;
		n += added;
	}
	return constant_text(p, e, bytes, n) ? e : NULL;
}

static struct expr *parse_number(struct parser *p)
{
	const struct token *t = p->at;
	struct expr *e = expr_new(p, EXPR_CONST, t->line);
	char text[80];
	size_t n = 0;
	if (!e)
		return NULL;
	for (size_t i = 0; i < t->text.n; i++) {
		if (t->text.p[i] == '_')
			continue;
		if (n + 1 == sizeof text) {
			parser_fail(p, STATUS_UNSUPPORTED, t->line, "the number is too long");
			return NULL;
		}
		text[n++] = t->text.p[i];
	}
	text[n] = '\0';
	p->at++;
	if (t->type == TOKEN_FLOAT) {
		e->constant = (struct value){.type = VALUE_FLOAT, .origin = VALUE_TRUSTED, .f = strtod(text, NULL)};
		return e;
	}
	char kind = text[0] == '0' ? (char)(text[1] | 32) : ' ';
	int base = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 10;
	errno = 0;
	long long i = strtoll(text + (base == 10 ? 0 : 2), NULL, base);
	if (errno == ERANGE) {
		parser_fail(p, STATUS_UNSUPPORTED, t->line, "integers beyond 64 bits are not supported");
		return NULL;
	}
	e->constant = (struct value){.type = VALUE_INT, .origin = VALUE_TRUSTED, .i = i};
	return e;
}

static struct expr *parse_name(struct parser *p, bool with_namespace)
{
	static const struct {
		const char *name;
		struct value value;
	} words[] = {
		{"true", {.type = VALUE_BOOL, .origin = VALUE_TRUSTED, .b = true}},
		{"True", {.type = VALUE_BOOL, .origin = VALUE_TRUSTED, .b = true}},
		{"false", {.type = VALUE_BOOL, .origin = VALUE_TRUSTED, .b = false}},
		{"False", {.type = VALUE_BOOL, .origin = VALUE_TRUSTED, .b = false}},
		{"none", {.type = VALUE_NONE, .origin = VALUE_TRUSTED}},
		{"None", {.type = VALUE_NONE, .origin = VALUE_TRUSTED}},
	};
	const struct token *t = p->at++;
	struct expr *e = expr_new(p, EXPR_NAME, t->line);
	if (!e)
		return NULL;
	for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
		if (str_is(t->text, words[i].name)) {
			e->kind = EXPR_CONST;
			e->constant = words[i].value;
			return e;
		}
	}
	e->var.name = t->text;
	if (with_namespace && parser_skip(p, TOKEN_DOT)) {
		e->kind = EXPR_NAMESPACE_ATTR;
		e->var.attr = p->at->text;
		return parser_expect(p, TOKEN_NAME) ? e : NULL;
	}
	if (str_is(t->text, "caller"))
		p->uses |= USES_CALLER;
	else if (str_is(t->text, "kwargs"))
		p->uses |= USES_KWARGS;
	else if (str_is(t->text, "varargs"))
		p->uses |= USES_VARARGS;
	else if (str_is(t->text, "loop"))
		p->uses |= USES_LOOP;
	return e;
}

static struct expr *finish_list(struct parser *p, enum expr_kind kind, int line, struct ptr_list *items)
{
	struct expr *e = expr_new(p, kind, line);
	if (!e)
		return NULL;
	for (size_t i = 0; i < items->n; i++)
		if (!adopt(p, e, items->items[i]))
			return NULL;
	e->list.items = (struct expr **)items->items;
	e->list.n = items->n;
	return e;
}

static struct expr *parse_list(struct parser *p)
{
	int line = p->at++->line;
	struct ptr_list items = {0};
	while (p->at->type != TOKEN_RBRACKET) {
		if (items.n && !parser_expect(p, TOKEN_COMMA))
			return NULL;
		if (p->at->type == TOKEN_RBRACKET)
			break;
		if (!ptr_list_add(p, &items, parse_expression(p, true)))
			return NULL;
	}
	p->at++;
	return finish_list(p, EXPR_LIST, line, &items);
}

static struct expr *parse_dict(struct parser *p)
{
	int line = p->at++->line;
	struct ptr_list items = {0};
	while (p->at->type != TOKEN_RBRACE) {
		if (items.n && !parser_expect(p, TOKEN_COMMA))
			return NULL;
		if (p->at->type == TOKEN_RBRACE)
			break;
		if (!ptr_list_add(p, &items, parse_expression(p, true)) || !parser_expect(p, TOKEN_COLON) ||
		    !ptr_list_add(p, &items, parse_expression(p, true)))
			return NULL;
	}
	p->at++;
	return finish_list(p, EXPR_DICT, line, &items);
}

static struct expr *parse_primary(struct parser *p, bool with_namespace)
{
	switch (p->at->type) {
	case TOKEN_NAME:
		return parse_name(p, with_namespace);
	case TOKEN_STRING:
		return parse_string(p);
	case TOKEN_INTEGER:
	case TOKEN_FLOAT:
		return parse_number(p);
	case TOKEN_LPAREN: {
		p->at++;
		struct expr *e = parse_tuple(p, true, true, NULL);
		return e && parser_expect(p, TOKEN_RPAREN) ? e : NULL;
	}
	case TOKEN_LBRACKET:
		return parse_list(p);
	case TOKEN_LBRACE:
		return parse_dict(p);
	default:
		parser_fail(p, STATUS_INVALID, p->at->line, "unexpected '%s'", token_name(p->at->type));
		return NULL;
	}
}

/* ---- Tuples and targets ---- */

static bool tuple_ends(const struct parser *p, const char *end_name)
{
	switch (p->at->type) {
	case TOKEN_VARIABLE_END:
	case TOKEN_BLOCK_END:
	case TOKEN_RPAREN:
		return true;
	default:
		return end_name && token_is_name(p->at, end_name);
	}
}

enum tuple_of { OF_EXPRESSIONS, OF_EXPRESSIONS_WITHOUT_COND, OF_TARGETS, OF_NAMESPACE_TARGETS };

static struct expr *parse_tuple_of(struct parser *p, enum tuple_of of, bool parenthesised, const char *end_name)
{
	int line = p->at->line;
	struct ptr_list items = {0};
	bool is_tuple = false;
	if (!parser_enter(p))
		return NULL;
	for (;;) {
		if (items.n && !parser_expect(p, TOKEN_COMMA))
			return NULL;
		if (tuple_ends(p, end_name))
			break;
		struct expr *e = of >= OF_TARGETS ? parse_primary(p, of == OF_NAMESPACE_TARGETS)
						  : parse_expression(p, of == OF_EXPRESSIONS);
		if (!ptr_list_add(p, &items, e))
			return NULL;
		if (p->at->type != TOKEN_COMMA)
			break;
		is_tuple = true;
		line = p->at->line;
	}
	parser_leave(p);
	if (!is_tuple && items.n)
		return items.items[0];
	if (!is_tuple && !parenthesised) {
		parser_fail(p, STATUS_INVALID, p->at->line, "expected an expression, got '%s'",
			    token_name(p->at->type));
		return NULL;
	}
	return finish_list(p, EXPR_TUPLE, line, &items);
}

struct expr *parse_tuple(struct parser *p, bool with_condexpr, bool parenthesised, const char *end_name)
{
	return parse_tuple_of(p, with_condexpr ? OF_EXPRESSIONS : OF_EXPRESSIONS_WITHOUT_COND, parenthesised, end_name);
}

static bool mark_target(struct parser *p, struct expr *e)
{
	switch (e->kind) {
	case EXPR_NAME:
		e->store = true;
		return true;
	case EXPR_NAMESPACE_ATTR:
		return true;
	case EXPR_TUPLE:
		for (size_t i = 0; i < e->list.n; i++)
			if (!mark_target(p, e->list.items[i]))
				return false;
		return true;
	default:
		return parser_fail(p, STATUS_INVALID, e->line, "cannot assign to this expression");
	}
}

struct expr *parse_target(struct parser *p, bool with_tuple, bool with_namespace, const char *end_name)
{
	unsigned uses = p->uses; /* storing into a special name is not reading it */
	struct expr *e;
	if (with_tuple)
		e = parse_tuple_of(p, with_namespace ? OF_NAMESPACE_TARGETS : OF_TARGETS, false, end_name);
	else if (p->at->type == TOKEN_NAME)
		e = parse_name(p, false);
	else
		e = NULL, parser_expect(p, TOKEN_NAME);
	p->uses = uses;
	return e && mark_target(p, e) ? e : NULL;
}

/* ---- Postfix ---- */

/* One subscript: an expression or a slice (whose subject is set by the caller). */
static struct expr *parse_subscript(struct parser *p)
{
	int line = p->at->line;
	struct expr *part[3] = {NULL, NULL, NULL};
	if (p->at->type != TOKEN_COLON) {
		part[0] = parse_expression(p, true);
		if (!part[0] || p->at->type != TOKEN_COLON)
			return part[0];
	}
	p->at++;
	if (p->at->type != TOKEN_COLON && p->at->type != TOKEN_RBRACKET && p->at->type != TOKEN_COMMA) {
		part[1] = parse_expression(p, true);
		if (!part[1])
			return NULL;
	}
	if (parser_skip(p, TOKEN_COLON) && p->at->type != TOKEN_RBRACKET && p->at->type != TOKEN_COMMA) {
		part[2] = parse_expression(p, true);
		if (!part[2])
			return NULL;
	}
	struct expr *e = expr_new(p, EXPR_SLICE, line);
	for (int i = 0; i < 3; i++)
		if (part[i] && !adopt(p, e, part[i]))
			return NULL;
	if (!e)
		return NULL;
	e->node.b = part[0];
	e->node.c = part[1];
	e->node.d = part[2];
	return e;
}

static struct expr *parse_brackets(struct parser *p, struct expr *subject)
{
	int line = p->at++->line;
	struct ptr_list items = {0};
	while (p->at->type != TOKEN_RBRACKET) {
		if (items.n && !parser_expect(p, TOKEN_COMMA))
			return NULL;
		struct expr *e = parse_subscript(p);
		if (e && e->kind == EXPR_SLICE && !e->node.a && (items.n || p->at->type == TOKEN_COMMA)) {
			parser_fail(p, STATUS_UNSUPPORTED, e->line,
				    "several subscripts with a slice are not supported");
			return NULL;
		}
		if (!ptr_list_add(p, &items, e))
			return NULL;
	}
	p->at++;
	struct expr *arg = items.n == 1 ? items.items[0] : finish_list(p, EXPR_TUPLE, line, &items);
	if (!arg)
		return NULL;
	if (arg->kind == EXPR_SLICE && !arg->node.a) {
		arg->node.a = subject;
		return adopt(p, arg, subject) ? arg : NULL;
	}
	return binary(p, EXPR_ITEM, line, subject, arg);
}

static struct expr *parse_dot(struct parser *p, struct expr *subject)
{
	int line = p->at++->line;
	const struct token *t = p->at;
	if (t->type == TOKEN_INTEGER) {
		struct expr *index = parse_number(p);
		return binary(p, EXPR_ITEM, line, subject, index);
	}
	if (t->type != TOKEN_NAME) {
		parser_fail(p, STATUS_INVALID, t->line, "expected a name or a number after '.'");
		return NULL;
	}
	p->at++;
	struct expr *e = unary(p, EXPR_ATTR, line, subject);
	if (e)
		e->node.attr = t->text;
	return e;
}

static struct call_args *parse_call_args(struct parser *p, struct expr *owner)
{
	struct call_args *a = parser_alloc(p, sizeof *a);
	int line = p->at->line;
	struct ptr_list args = {0};
	size_t cap_keywords = 0;
	if (!a || !owner || !parser_expect(p, TOKEN_LPAREN) || !parser_enter(p))
		return NULL;
	for (bool first = true; p->at->type != TOKEN_RPAREN; first = false) {
		if (!first) {
			if (!parser_expect(p, TOKEN_COMMA))
				return NULL;
			if (p->at->type == TOKEN_RPAREN)
				break;
		}
		struct expr *e;
		bool allowed;
		if (parser_skip(p, TOKEN_MUL)) {
			allowed = !a->star && !a->star_star;
			e = a->star = parse_expression(p, true);
		} else if (parser_skip(p, TOKEN_POW)) {
			allowed = !a->star_star;
			e = a->star_star = parse_expression(p, true);
		} else if (p->at->type == TOKEN_NAME && p->at[1].type == TOKEN_ASSIGN) {
			allowed = !a->star_star;
			if (a->n_keywords == cap_keywords) {
				cap_keywords = cap_keywords ? cap_keywords * 2 : 4;
				struct keyword *grown = parser_alloc(p, cap_keywords * sizeof *grown);
				if (!grown)
					return NULL;
				if (a->n_keywords)
					memcpy(grown, a->keywords, a->n_keywords * sizeof *grown);
				a->keywords = grown;
			}
			struct keyword *k = &a->keywords[a->n_keywords++];
			k->name = p->at->text;
			p->at += 2;
			e = k->value = parse_expression(p, true);
		} else {
			allowed = !a->star && !a->star_star && !a->n_keywords;
			e = parse_expression(p, true);
			if (!ptr_list_add(p, &args, e))
				return NULL;
		}
		if (!adopt(p, owner, e))
			return NULL;
		if (!allowed) {
			parser_fail(p, STATUS_INVALID, line, "invalid order of arguments in a call");
			return NULL;
		}
	}
	p->at++;
	parser_leave(p);
	a->args = (struct expr **)args.items;
	a->n_args = args.n;
	return a;
}

static struct expr *parse_call(struct parser *p, struct expr *subject)
{
	struct expr *e = subject ? expr_new(p, EXPR_CALL, p->at->line) : NULL;
	if (!adopt(p, e, subject))
		return NULL;
	e->call.subject = subject;
	e->call.args = parse_call_args(p, e);
	return e->call.args ? e : NULL;
}

/*
 * a name, or names with dots between them; they are adjacent in the source but for spaces, which do not belong to the
 * name
 */
static bool parse_dotted(struct parser *p, struct str *name)
{
	*name = p->at->text;
	if (!parser_expect(p, TOKEN_NAME))
		return false;
	while (parser_skip(p, TOKEN_DOT)) {
		name->n = (size_t)(p->at->text.p - name->p) + p->at->text.n;
		if (!parser_expect(p, TOKEN_NAME))
			return false;
	}
	return true;
}

static struct call_args *no_args(struct parser *p)
{
	return parser_alloc(p, sizeof(struct call_args));
}

struct expr *parse_filter_chain(struct parser *p, struct expr *subject, bool first_without_pipe)
{
	while (p->at->type == TOKEN_PIPE || first_without_pipe) {
		if (!first_without_pipe)
			p->at++;
		first_without_pipe = false;
		struct expr *e = expr_new(p, EXPR_FILTER, p->at->line);
		if (!e || (subject && !adopt(p, e, subject)) || !parse_dotted(p, &e->call.name))
			return NULL;
		e->call.subject = subject;
		e->call.args = p->at->type == TOKEN_LPAREN ? parse_call_args(p, e) : no_args(p);
		if (!e->call.args)
			return NULL;
		subject = e;
	}
	return subject;
}

static struct expr *parse_postfix(struct parser *p, struct expr *e)
{
	for (;;) {
		if (!e)
			return NULL;
		if (p->at->type == TOKEN_DOT)
			e = parse_dot(p, e);
		else if (p->at->type == TOKEN_LBRACKET)
			e = parse_brackets(p, e);
		else if (p->at->type == TOKEN_LPAREN)
			e = parse_call(p, e);
		else
			return e;
	}
}

static struct expr *parse_test(struct parser *p, struct expr *subject)
{
	int line = p->at++->line;
	bool negated = parser_skip_name(p, "not");
	struct expr *e = expr_new(p, EXPR_TEST, line);
	if (!adopt(p, e, subject) || !parse_dotted(p, &e->call.name))
		return NULL;
	e->call.subject = subject;
	e->call.args = NULL;
	const struct token *t = p->at;
	switch (t->type) {
	case TOKEN_LPAREN:
		e->call.args = parse_call_args(p, e);
		break;
	case TOKEN_NAME:
		if (token_is_name(t, "else") || token_is_name(t, "or") || token_is_name(t, "and")) {
			e->call.args = no_args(p);
			break;
		}
		if (token_is_name(t, "is")) {
			parser_fail(p, STATUS_INVALID, t->line, "several tests cannot be chained with 'is'");
			return NULL;
		}
		/* fall through */
	case TOKEN_STRING:
	case TOKEN_INTEGER:
	case TOKEN_FLOAT:
	case TOKEN_LBRACKET:
	case TOKEN_LBRACE: {
		struct expr *arg = parse_postfix(p, parse_primary(p, false));
		struct call_args *args = no_args(p);
		struct ptr_list items = {0};
		if (!adopt(p, e, arg) || !args || !ptr_list_add(p, &items, arg))
			return NULL;
		args->args = (struct expr **)items.items;
		args->n_args = 1;
		e->call.args = args;
		break;
	}
	default:
		e->call.args = no_args(p);
	}
	if (!e->call.args)
		return NULL;
	return negated ? unary(p, EXPR_NOT, line, e) : e;
}

static struct expr *parse_filters_and_tests(struct parser *p, struct expr *e)
{
	for (;;) {
		if (!e)
			return NULL;
		if (p->at->type == TOKEN_PIPE)
			e = parse_filter_chain(p, e, false);
		else if (token_is_name(p->at, "is"))
			e = parse_test(p, e);
		else if (p->at->type == TOKEN_LPAREN)
			e = parse_call(p, e);
		else
			return e;
	}
}

/* ---- Operators, loosest first ---- */

static struct expr *parse_unary(struct parser *p, bool with_filter)
{
	int line = p->at->line;
	struct expr *e;
	if (p->at->type == TOKEN_SUB || p->at->type == TOKEN_ADD) {
		enum expr_kind kind = p->at++->type == TOKEN_SUB ? EXPR_NEG : EXPR_POS;
		if (!parser_enter(p))
			return NULL;
		e = unary(p, kind, line, parse_unary(p, false));
		parser_leave(p);
	} else {
		e = parse_primary(p, false);
	}
	e = parse_postfix(p, e);
	return with_filter ? parse_filters_and_tests(p, e) : e;
}

static struct expr *operation(struct parser *p, enum token_type op, int line, struct expr *a, struct expr *b)
{
	struct expr *e = binary(p, EXPR_BINARY, line, a, b);
	if (e)
		e->op = (uint8_t)op;
	return e;
}

static struct expr *parse_power(struct parser *p)
{
	struct expr *left = parse_unary(p, true);
	while (left && p->at->type == TOKEN_POW) {
		int line = p->at++->line;
		left = operation(p, TOKEN_POW, line, left, parse_unary(p, true));
	}
	return left;
}

static struct expr *parse_product(struct parser *p)
{
	struct expr *left = parse_power(p);
	while (left && p->at->type >= TOKEN_MUL && p->at->type <= TOKEN_MOD) {
		const struct token *op = p->at++;
		left = operation(p, op->type, op->line, left, parse_power(p));
	}
	return left;
}

static struct expr *parse_concat(struct parser *p)
{
	int line = p->at->line;
	struct expr *first = parse_product(p);
	if (!first || p->at->type != TOKEN_TILDE)
		return first;
	struct ptr_list items = {0};
	if (!ptr_list_add(p, &items, first))
		return NULL;
	while (parser_skip(p, TOKEN_TILDE))
		if (!ptr_list_add(p, &items, parse_product(p)))
			return NULL;
	return finish_list(p, EXPR_CONCAT, line, &items);
}

static struct expr *parse_sum(struct parser *p)
{
	struct expr *left = parse_concat(p);
	while (left && (p->at->type == TOKEN_ADD || p->at->type == TOKEN_SUB)) {
		const struct token *op = p->at++;
		left = operation(p, op->type, op->line, left, parse_concat(p));
	}
	return left;
}

/* The comparison operator at hand, or -1. */
static int skip_compare_op(struct parser *p)
{
	if (p->at->type >= TOKEN_EQ && p->at->type <= TOKEN_GE)
		return COMPARE_EQ + (p->at++->type - TOKEN_EQ);
	if (parser_skip_name(p, "in"))
		return COMPARE_IN;
	if (token_is_name(p->at, "not") && token_is_name(p->at + 1, "in")) {
		p->at += 2;
		return COMPARE_NOT_IN;
	}
	return -1;
}

static struct expr *parse_compare(struct parser *p)
{
	int line = p->at->line;
	struct expr *first = parse_sum(p);
	struct ptr_list items = {0};
	uint8_t *ops = NULL;
	size_t cap = 0;
	for (;;) {
		int op = first ? skip_compare_op(p) : -1;
		if (op < 0)
			break;
		if (items.n == cap) {
			cap = cap ? cap * 2 : 4;
			uint8_t *grown = parser_alloc(p, cap);
			if (!grown)
				return NULL;
			if (items.n)
				memcpy(grown, ops, items.n);
			ops = grown;
		}
		ops[items.n] = (uint8_t)op;
		if (!ptr_list_add(p, &items, parse_sum(p)))
			return NULL;
	}
	if (!items.n)
		return first;
	struct expr *e = expr_new(p, EXPR_COMPARE, line);
	if (!adopt(p, e, first))
		return NULL;
	for (size_t i = 0; i < items.n; i++)
		if (!adopt(p, e, items.items[i]))
			return NULL;
	e->compare.first = first;
	e->compare.items = (struct expr **)items.items;
	e->compare.ops = ops;
	e->compare.n = items.n;
	return e;
}

static struct expr *parse_not(struct parser *p)
{
	if (!token_is_name(p->at, "not"))
		return parse_compare(p);
	int line = p->at++->line;
	if (!parser_enter(p))
		return NULL;
	struct expr *e = unary(p, EXPR_NOT, line, parse_not(p));
	parser_leave(p);
	return e;
}

static struct expr *parse_and(struct parser *p)
{
	struct expr *left = parse_not(p);
	while (left && token_is_name(p->at, "and")) {
		int line = p->at++->line;
		left = binary(p, EXPR_AND, line, left, parse_not(p));
	}
	return left;
}

static struct expr *parse_or(struct parser *p)
{
	struct expr *left = parse_and(p);
	while (left && token_is_name(p->at, "or")) {
		int line = p->at++->line;
		left = binary(p, EXPR_OR, line, left, parse_and(p));
	}
	return left;
}

struct expr *parse_expression(struct parser *p, bool with_condexpr)
{
	if (!parser_enter(p))
		return NULL;
	int line = p->at->line;
	struct expr *e = parse_or(p);
	while (e && with_condexpr && parser_skip_name(p, "if")) {
		struct expr *test = parse_or(p);
		struct expr *otherwise = NULL;
		if (test && parser_skip_name(p, "else")) {
			otherwise = parse_expression(p, true);
			if (!otherwise)
				return NULL;
		}
		e = binary(p, EXPR_COND, line, e, test);
		if (otherwise && !adopt(p, e, otherwise))
			return NULL;
		if (e)
			e->node.c = otherwise;
	}
	parser_leave(p);
	return e;
}
