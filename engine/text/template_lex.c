/*
 * Source to tokens, by the rules of Jinja2's lexer (https://jinja.palletsprojects.com/templates/, sections "Whitespace
 * Control", "Escaping", "Literals") with trim_blocks and lstrip_blocks on, as transformers sets them.
 */
#include <stdlib.h>

#include "engine/text/template_ast.h"
#include "engine/text/template_unicode.h"

enum { MAX_OPEN = 1024 }; /* parentheses open at once inside one tag; the parser's own bound is lower */

struct lexer {
	const char *p;
	size_t n;
	size_t at;
	size_t counted; /* line ends before this offset are in `line` */
	int line;
	bool line_starting; /* the last thing read ended its line */
	struct token_list *out;
	struct error *err;
};

static int line_at(struct lexer *l, size_t offset)
{
	while (l->counted < offset) {
		const char *nl = memchr(l->p + l->counted, '\n', offset - l->counted);
		if (!nl) {
			l->counted = offset;
			break;
		}
		l->counted = (size_t)(nl - l->p) + 1;
		l->line++;
	}
	return l->line;
}

static enum status emit(struct lexer *l, enum token_type type, size_t from, size_t to)
{
	struct token_list *t = l->out;
	if (t->n == t->cap) {
		size_t cap = t->cap ? t->cap * 2 : 256;
		struct token *items = reallocarray(t->items, cap, sizeof *items);
		if (!items)
			return error_set(l->err, STATUS_NOMEM, "out of memory while compiling a template");
		t->items = items;
		t->cap = cap;
	}
	t->items[t->n++] = (struct token){(uint8_t)type, line_at(l, from), {l->p + from, to - from}};
	return STATUS_OK;
}

/* As char_next(), but what is not UTF-8 never takes an ASCII character of the syntax with it. */
static size_t source_char(const struct lexer *l, size_t at, uint32_t *cp)
{
	*cp = (unsigned char)l->p[at];
	return *cp < 0x80 ? 1 : char_next(l->p + at, l->n - at, cp);
}

static size_t skip_space(const struct lexer *l, size_t at)
{
	while (at < l->n) {
		uint32_t cp;
		size_t len = source_char(l, at, &cp);
		if (!char_is_space(cp))
			break;
		at += len;
	}
	return at;
}

static bool looking_at(const struct lexer *l, size_t at, const char *z)
{
	size_t n = strlen(z);
	return at <= l->n && l->n - at >= n && memcmp(l->p + at, z, n) == 0;
}

static void moved_to(struct lexer *l, size_t at)
{
	l->line_starting = at > 0 && l->p[at - 1] == '\n';
	l->at = at;
}

/* Emits the text before a tag, without the whitespace that the tag's sign and lstrip_blocks take away. */
static enum status emit_text(struct lexer *l, size_t from, size_t to, char sign, bool lstrip)
{
	size_t end = to;
	if (sign == '-') {
		while (end > from) {
			uint32_t cp;
			size_t last = char_prev(l->p + from, end - from);
			char_next(l->p + from + last, end - from - last, &cp);
			if (!char_is_space(cp))
				break;
			end = from + last;
		}
	} else if (sign != '+' && lstrip) {
		size_t line = end;
		while (line > from && l->p[line - 1] != '\n')
			line--;
		if ((line > from || l->line_starting) && skip_space(l, line) >= to)
			end = line;
	}
	return end > from ? emit(l, TOKEN_TEXT, from, end) : STATUS_OK;
}

/* The end of a block tag at `at` (-%} +%} %}, with what it swallows), or 0. */
static size_t block_end(const struct lexer *l, size_t at)
{
	if (looking_at(l, at, "-%}"))
		return skip_space(l, at + 3);
	if (looking_at(l, at, "+%}"))
		return at + 3;
	if (looking_at(l, at, "%}"))
		return at + 2 + looking_at(l, at + 2, "\n");
	return 0;
}

static size_t variable_end(const struct lexer *l, size_t at)
{
	if (looking_at(l, at, "-}}"))
		return skip_space(l, at + 3);
	return looking_at(l, at, "}}") ? at + 2 : 0;
}

static size_t skip_sign(const struct lexer *l, size_t at)
{
	return at + (at < l->n && (l->p[at] == '-' || l->p[at] == '+'));
}

/* {% raw %}: the end of the tag when one begins at `at`, else 0. */
static size_t raw_begin(const struct lexer *l, size_t at)
{
	at = skip_space(l, skip_sign(l, at + 2));
	if (!looking_at(l, at, "raw"))
		return 0;
	at = skip_space(l, at + 3);
	if (looking_at(l, at, "-%}"))
		return skip_space(l, at + 3);
	return looking_at(l, at, "%}") ? at + 2 : 0;
}

static enum status lex_raw(struct lexer *l, int line)
{
	for (size_t at = l->at; at < l->n;) {
		const char *found = memmem(l->p + at, l->n - at, "{%", 2);
		if (!found)
			break;
		size_t tag = (size_t)(found - l->p);
		size_t name = skip_space(l, skip_sign(l, tag + 2));
		if (looking_at(l, name, "endraw")) {
			size_t end = block_end(l, skip_space(l, name + 6));
			if (end) {
				char sign = l->p[tag + 2];
				enum status status = emit_text(l, l->at, tag, sign, true);
				moved_to(l, end);
				return status;
			}
		}
		at = tag + 2;
	}
	return error_set(l->err, STATUS_INVALID, "line %d: {%% raw %%} has no {%% endraw %%}", line);
}

static enum status lex_comment(struct lexer *l, int line)
{
	const char *found = memmem(l->p + l->at, l->n - l->at, "#}", 2);
	if (!found)
		return error_set(l->err, STATUS_INVALID, "line %d: a comment has no end", line);
	size_t at = (size_t)(found - l->p);
	char sign = at > l->at ? l->p[at - 1] : ' ';
	at += 2;
	if (sign == '-')
		at = skip_space(l, at);
	else if (sign != '+')
		at += looking_at(l, at, "\n");
	moved_to(l, at);
	return STATUS_OK;
}

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* digits(_digits)* at `at`; the end, or `at` when there is none. */
static size_t digits(const struct lexer *l, size_t at)
{
	while (at < l->n && is_digit(l->p[at])) {
		at++;
		if (at + 1 < l->n && l->p[at] == '_' && is_digit(l->p[at + 1]))
			at++;
	}
	return at;
}

static bool digit_of(char c, int base)
{
	int v = is_digit(c) ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : 99;
	return v < base;
}

static enum status lex_number(struct lexer *l)
{
	size_t from = l->at, end = digits(l, from);
	bool is_float = false;
	if (from == 0 || l->p[from - 1] != '.') {
		size_t at = end;
		if (at + 1 < l->n && l->p[at] == '.' && is_digit(l->p[at + 1])) {
			at = digits(l, at + 1);
			is_float = true;
			end = at;
		}
		if (at < l->n && (l->p[at] | 32) == 'e') {
			size_t exponent = skip_sign(l, at + 1);
			if (exponent < l->n && is_digit(l->p[exponent])) {
				end = digits(l, exponent);
				is_float = true;
			}
		}
	}
	if (!is_float && l->p[from] == '0') {
		char kind = from + 1 < l->n ? (char)(l->p[from + 1] | 32) : ' ';
		int base = kind == 'b' ? 2 : kind == 'o' ? 8 : kind == 'x' ? 16 : 0;
		size_t at = from + 2, last = 0;
		while (base && at < l->n) {
			if (l->p[at] == '_' && at + 1 < l->n)
				at++;
			if (!digit_of(l->p[at], base))
				break;
			last = ++at;
		}
		if (last) {
			end = last;
		} else {
			/* A decimal integer does not begin with 0, except zero itself. */
			end = from + 1;
			while (end < l->n &&
			       (l->p[end] == '0' || (l->p[end] == '_' && end + 1 < l->n && l->p[end + 1] == '0')))
				end++;
		}
	}
	enum status status = emit(l, is_float ? TOKEN_FLOAT : TOKEN_INTEGER, from, end);
	l->at = end;
	return status;
}

static bool name_char(uint32_t cp)
{
	return cp == '_' ||
	       (cp < 0x80 ? is_digit((char)cp) || ((cp | 32) >= 'a' && (cp | 32) <= 'z') : char_is_alnum(cp));
}

static const struct {
	char text[3];
	uint8_t type;
} operators[] = {
	{"//", TOKEN_FLOORDIV}, {"**", TOKEN_POW},   {"==", TOKEN_EQ},	    {"!=", TOKEN_NE},	   {">=", TOKEN_GE},
	{"<=", TOKEN_LE},	{"+", TOKEN_ADD},    {"-", TOKEN_SUB},	    {"/", TOKEN_DIV},	   {"*", TOKEN_MUL},
	{"%", TOKEN_MOD},	{"~", TOKEN_TILDE},  {"[", TOKEN_LBRACKET}, {"]", TOKEN_RBRACKET}, {"(", TOKEN_LPAREN},
	{")", TOKEN_RPAREN},	{"{", TOKEN_LBRACE}, {"}", TOKEN_RBRACE},   {">", TOKEN_GT},	   {"<", TOKEN_LT},
	{"=", TOKEN_ASSIGN},	{".", TOKEN_DOT},    {":", TOKEN_COLON},    {"|", TOKEN_PIPE},	   {",", TOKEN_COMMA},
	{";", TOKEN_SEMICOLON},
};

/* Keeps track of open brackets: a tag ends only outside of them. */
static enum status balance(struct lexer *l, enum token_type type, uint8_t *open, size_t *n_open)
{
	switch (type) {
	case TOKEN_LPAREN:
	case TOKEN_LBRACKET:
	case TOKEN_LBRACE:
		if (*n_open == MAX_OPEN)
			return error_set(l->err, STATUS_LIMIT, "line %d: brackets are nested too deeply", l->line);
		open[(*n_open)++] = (uint8_t)(type + 1); /* the closing one follows the opening one in the enum */
		return STATUS_OK;
	case TOKEN_RPAREN:
	case TOKEN_RBRACKET:
	case TOKEN_RBRACE:
		if (*n_open == 0)
			return error_set(l->err, STATUS_INVALID, "line %d: unexpected '%s'", l->line, token_name(type));
		if (open[--*n_open] != type)
			return error_set(l->err, STATUS_INVALID, "line %d: unexpected '%s', expected '%s'", l->line,
					 token_name(type), token_name(open[*n_open]));
		return STATUS_OK;
	default:
		return STATUS_OK;
	}
}

static enum status lex_string(struct lexer *l)
{
	char quote = l->p[l->at];
	size_t from = l->at + 1, at = from;
	while (at < l->n && l->p[at] != quote)
		at += l->p[at] == '\\' ? 2 : 1;
	if (at >= l->n)
		return error_set(l->err, STATUS_INVALID, "line %d: a string has no end", line_at(l, l->at));
	enum status status = emit(l, TOKEN_STRING, from, at);
	l->at = at + 1;
	return status;
}

/* The inside of {{ }} or {% %}, with its end. */
static enum status lex_tag(struct lexer *l, bool variable)
{
	uint8_t open[MAX_OPEN];
	size_t n_open = 0;
	int first_line = line_at(l, l->at);
	enum status status = STATUS_OK;
	while (status == STATUS_OK) {
		if (n_open == 0) {
			size_t end = variable ? variable_end(l, l->at) : block_end(l, l->at);
			if (end) {
				status = emit(l, variable ? TOKEN_VARIABLE_END : TOKEN_BLOCK_END, l->at, end);
				moved_to(l, end);
				return status;
			}
		}
		if (l->at >= l->n)
			return error_set(l->err, STATUS_INVALID, "line %d: a tag has no end", first_line);
		uint32_t cp;
		size_t len = source_char(l, l->at, &cp);
		if (char_is_space(cp)) {
			l->at = skip_space(l, l->at);
			continue;
		}
		if (cp < 0x80 && is_digit((char)cp)) {
			status = lex_number(l);
			continue;
		}
		if (cp == '"' || cp == '\'') {
			status = lex_string(l);
			continue;
		}
		if (name_char(cp)) {
			size_t from = l->at;
			do {
				l->at += len;
				if (l->at >= l->n)
					break;
				len = source_char(l, l->at, &cp);
			} while (name_char(cp));
			status = emit(l, TOKEN_NAME, from, l->at);
			continue;
		}
		size_t i = 0;
		while (i < sizeof operators / sizeof *operators && !looking_at(l, l->at, operators[i].text))
			i++;
		if (i == sizeof operators / sizeof *operators)
			return error_set(l->err, STATUS_INVALID, "line %d: unexpected character '%.*s'",
					 line_at(l, l->at), cp < 0x20 ? 0 : (int)(len > 4 ? 4 : len), l->p + l->at);
		line_at(l, l->at);
		status = balance(l, operators[i].type, open, &n_open);
		if (status != STATUS_OK)
			return status;
		size_t width = strlen(operators[i].text);
		status = emit(l, operators[i].type, l->at, l->at + width);
		l->at += width;
	}
	return status;
}

/* Text up to the next tag, and the tag. */
static enum status lex_next(struct lexer *l)
{
	size_t from = l->at, tag = from;
	for (;; tag++) {
		const char *brace = memchr(l->p + tag, '{', l->n - tag);
		if (!brace || brace + 1 >= l->p + l->n) {
			l->at = l->n;
			return l->n > from ? emit(l, TOKEN_TEXT, from, l->n) : STATUS_OK;
		}
		tag = (size_t)(brace - l->p);
		if (l->p[tag + 1] == '{' || l->p[tag + 1] == '%' || l->p[tag + 1] == '#')
			break;
	}
	char kind = l->p[tag + 1];
	size_t inside = skip_sign(l, tag + 2);
	char sign = inside > tag + 2 ? l->p[tag + 2] : ' ';
	size_t raw = kind == '%' ? raw_begin(l, tag) : 0;
	enum status status = emit_text(l, from, tag, sign, kind != '{');
	if (status != STATUS_OK)
		return status;
	int line = line_at(l, tag);
	if (raw) {
		moved_to(l, raw);
		return lex_raw(l, line);
	}
	moved_to(l, inside);
	if (kind == '#')
		return lex_comment(l, line);
	status = emit(l, kind == '{' ? TOKEN_VARIABLE_BEGIN : TOKEN_BLOCK_BEGIN, tag, inside);
	return status == STATUS_OK ? lex_tag(l, kind == '{') : status;
}

enum status template_lex(const char *source, size_t n, struct token_list *out, struct error *err)
{
	/* One line end at the very end is not part of the template (keep_trailing_newline is off). */
	if (n > 0 && source[n - 1] == '\n')
		n--;
	struct lexer l = {.p = source, .n = n, .line = 1, .line_starting = true, .out = out, .err = err};
	enum status status = STATUS_OK;
	while (status == STATUS_OK && l.at < n)
		status = lex_next(&l);
	return status == STATUS_OK ? emit(&l, TOKEN_EOF, n, n) : status;
}

const char *token_name(enum token_type type)
{
	switch (type) {
	case TOKEN_EOF:
		return "end of template";
	case TOKEN_TEXT:
		return "template text";
	case TOKEN_VARIABLE_BEGIN:
		return "{{";
	case TOKEN_VARIABLE_END:
		return "}}";
	case TOKEN_BLOCK_BEGIN:
		return "{%";
	case TOKEN_BLOCK_END:
		return "%}";
	case TOKEN_NAME:
		return "name";
	case TOKEN_STRING:
		return "string";
	case TOKEN_INTEGER:
		return "integer";
	case TOKEN_FLOAT:
		return "float";
	default:
		for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
			if (operators[i].type == type)
				return operators[i].text;
		return "token";
	}
}
