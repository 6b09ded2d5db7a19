/*
 * The compiled form of a template, and the steps that make it: lex (source to tokens), parse (tokens to a tree), scope
 * (every variable gets a slot). The tree is immutable once compiled and lives in one arena.
 */
#pragma once

#include "engine/base/arena.h"
#include "engine/base/status.h"
#include "engine/base/str.h"
#include "engine/text/value_internal.h"

enum {
	MAX_NESTING = 400,   /* recursion of the parser: parentheses, blocks, unary operators */
	MAX_TREE_DEPTH = 400 /* depth of the tree, which also grows by long chains of operators */
};

/* ---- Tokens ---- */

enum token_type {
	TOKEN_EOF,
	TOKEN_TEXT, /* literal template text */
	TOKEN_VARIABLE_BEGIN,
	TOKEN_VARIABLE_END,
	TOKEN_BLOCK_BEGIN,
	TOKEN_BLOCK_END,
	TOKEN_NAME,
	TOKEN_STRING, /* text: between the quotes, escapes not yet replaced */
	TOKEN_INTEGER,
	TOKEN_FLOAT,
	TOKEN_ADD,
	TOKEN_SUB,
	TOKEN_MUL,
	TOKEN_DIV,
	TOKEN_FLOORDIV,
	TOKEN_MOD,
	TOKEN_POW,
	TOKEN_TILDE,
	TOKEN_EQ,
	TOKEN_NE,
	TOKEN_LT,
	TOKEN_LE,
	TOKEN_GT,
	TOKEN_GE,
	TOKEN_ASSIGN,
	TOKEN_DOT,
	TOKEN_COMMA,
	TOKEN_COLON,
	TOKEN_SEMICOLON,
	TOKEN_PIPE,
	TOKEN_LPAREN,
	TOKEN_RPAREN,
	TOKEN_LBRACKET,
	TOKEN_RBRACKET,
	TOKEN_LBRACE,
	TOKEN_RBRACE,
};

struct token {
	uint8_t type; /* enum token_type */
	int line;
	struct str text; /* as written in the source */
};

struct token_list {
	struct token *items; /* [n], malloc'd; the last one is TOKEN_EOF */
	size_t n, cap;
};

/* `source` has only \n as line ends; tokens point into it. INVALID names the line. */
enum status template_lex(const char *source, size_t n, struct token_list *out, struct error *err);

/* How a token is called in messages. */
const char *token_name(enum token_type type);

/* ---- Expressions ---- */

enum expr_kind {
	EXPR_CONST,
	EXPR_NAME,
	EXPR_NAMESPACE_ATTR, /* target of {% set ns.attr = ... %} */
	EXPR_ATTR,           /* a.name */
	EXPR_ITEM,           /* a[b] */
	EXPR_SLICE,          /* a[b:c:d] */
	EXPR_CALL,
	EXPR_FILTER,
	EXPR_TEST,
	EXPR_NEG,
	EXPR_POS,
	EXPR_NOT,
	EXPR_AND,
	EXPR_OR,
	EXPR_COND, /* a if b else c; c may be NULL */
	EXPR_BINARY,
	EXPR_CONCAT,
	EXPR_COMPARE,
	EXPR_LIST,
	EXPR_TUPLE,
	EXPR_DICT,
};

enum compare_op { COMPARE_EQ, COMPARE_NE, COMPARE_LT, COMPARE_LE, COMPARE_GT, COMPARE_GE, COMPARE_IN, COMPARE_NOT_IN };

/* Where a variable lives: in a slot of a function `hops` functions out. */
struct place {
	int hops, slot;
};

struct call_args {
	struct expr **args; /* [n_args] */
	size_t n_args;
	struct keyword {
		struct str name;
		struct expr *value;
	} *keywords; /* [n_keywords] */
	size_t n_keywords;
	struct expr *star, *star_star; /* *args and **kwargs, or NULL */
};

struct builtin;

struct expr {
	uint8_t kind; /* enum expr_kind */
	uint8_t op;   /* BINARY: enum token_type */
	bool store;   /* NAME: an assignment target */
	uint16_t depth;
	int line;
	union {
		struct value constant;
		struct { /* NAME, NAMESPACE_ATTR */
			struct str name;
			struct str attr;
			struct place place;
		} var;
		struct { /* ATTR, ITEM, SLICE, NEG, POS, NOT, AND, OR, COND, BINARY */
			struct expr *a, *b, *c, *d;
			struct str attr;
		} node;
		struct { /* CALL, FILTER (subject NULL in filter and set blocks), TEST */
			struct expr *subject;
			struct call_args *args;
			const struct builtin *builtin; /* NULL: unknown, where that is an error only when reached */
			struct str name;
		} call;
		struct { /* CONCAT, LIST, TUPLE; DICT: keys and values alternate */
			struct expr **items;
			size_t n;
		} list;
		struct { /* COMPARE: first op[0] items[0] op[1] items[1] ... */
			struct expr *first;
			struct expr **items;
			uint8_t *ops;
			size_t n;
		} compare;
	};
};

/* ---- Statements ---- */

enum stmt_kind {
	STMT_OUTPUT,
	STMT_IF,
	STMT_FOR,
	STMT_SET,
	STMT_SET_BLOCK,
	STMT_MACRO,
	STMT_CALL_BLOCK,
	STMT_FILTER_BLOCK,
	STMT_WITH,
	STMT_SCOPE, /* a body with variables of its own */
	STMT_BREAK,
	STMT_CONTINUE,
};

/* What happens to variables when a scope is entered; those not listed are set by the scope itself. */
struct scope {
	struct scope_load {
		enum { LOAD_CONTEXT, LOAD_ALIAS, LOAD_UNDEFINED } kind;
		int slot;
		struct str name;    /* CONTEXT */
		struct place alias; /* ALIAS */
	} *loads; /* [n_loads] */
	size_t n_loads;
};

enum special_name { USES_CALLER = 1, USES_KWARGS = 2, USES_VARARGS = 4, USES_LOOP = 8 };

/* A body with slots of its own: the template, a macro, a call block's body, a recursive loop. */
struct function {
	struct function *parent;
	int n_slots;
	struct scope scope;
	struct stmt *body;
	/* Of macros and call blocks: */
	struct str name;
	struct param {
		struct str name;
		int slot;
		struct expr *fallback; /* NULL: undefined when not given */
	} *params; /* [n_params] */
	size_t n_params;
	unsigned uses; /* enum special_name, read anywhere inside */
	int caller_slot, kwargs_slot, varargs_slot; /* -1: not used */
	bool explicit_caller;
};

struct stmt {
	struct stmt *next;
	uint8_t kind; /* enum stmt_kind */
	uint16_t depth;
	int line;
	union {
		struct {
			struct expr **items; /* a constant is printed as it is */
			size_t n;
		} output;
		struct {
			struct expr *test;
			struct stmt *then;
			struct stmt *otherwise;
			struct stmt *elifs; /* STMT_IF statements with test and then */
		} cond;
		struct {
			struct expr *target, *iter, *test;
			struct stmt *body, *otherwise;
			struct scope body_scope, test_scope, else_scope;
			struct function *recursive; /* in whose own slots a recursive loop runs, or NULL */
			int loop_slot;
			bool uses_loop;
		} loop;
		struct { /* SET: value; SET_BLOCK, FILTER_BLOCK: body, filter (may be NULL for SET_BLOCK) */
			struct expr *target;
			struct expr *value;
			struct expr *filter;
			struct stmt *body;
			struct scope scope;
		} set;
		struct { /* MACRO, CALL_BLOCK */
			struct function *function;
			struct expr *target; /* MACRO: its name */
			struct expr *call;   /* CALL_BLOCK */
		} macro;
		struct { /* WITH, SCOPE */
			struct expr **targets, **values;
			size_t n;
			struct stmt *body;
			struct scope scope;
		} with;
	};
};

struct template {
	struct arena *arena;
	struct function root;
};

/* Parses into t->arena. */
enum status template_parse(struct template *t, const struct token_list *tokens, struct error *err);
/* Gives every variable its slot and every filter and test its function. */
enum status template_resolve(struct template *t, struct error *err);

/* ---- Shared by the two parser files ---- */

struct parser {
	struct arena *arena;
	const struct token *at;
	int nesting;
	unsigned uses; /* special names read so far in the innermost function */
	int loops;     /* loops open in the innermost function */
	struct str innermost_tag;
	int innermost_line;
	enum status status; /* of the first failure */
	struct error *err;
};

/* Both keep the first failure and return NULL / false. */
void *parser_alloc(struct parser *p, size_t n);
bool parser_fail(struct parser *p, enum status status, int line, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));
bool parser_enter(struct parser *p);
static inline void parser_leave(struct parser *p)
{
	p->nesting--;
}

bool token_is_name(const struct token *t, const char *name);
bool parser_skip(struct parser *p, enum token_type type);
bool parser_skip_name(struct parser *p, const char *name);
bool parser_expect(struct parser *p, enum token_type type);

/* A growing array in the arena, of pointers. */
struct ptr_list {
	void **items;
	size_t n, cap;
};
bool ptr_list_add(struct parser *p, struct ptr_list *l, void *item);

struct expr *expr_new(struct parser *p, enum expr_kind kind, int line);
struct expr *parse_expression(struct parser *p, bool with_condexpr);
/* An expression or, with commas, a tuple; ends before `end_name` too when that is not NULL. */
struct expr *parse_tuple(struct parser *p, bool with_condexpr, bool parenthesised, const char *end_name);
/* What an assignment may store into: a name, a namespace's attribute (if allowed), or a tuple of such. */
struct expr *parse_target(struct parser *p, bool with_tuple, bool with_namespace, const char *end_name);
/* name(args)|name(args)... ; the innermost subject is NULL. */
struct expr *parse_filter_chain(struct parser *p, struct expr *subject, bool first_without_pipe);
