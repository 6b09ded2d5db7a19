/*
 * The running side of the template engine: the state of one rendering, and what its files offer each other. Functions
 * that return bool return false after render_fail() (or an exhausted limit), and the rendering then unwinds.
 */
#pragma once

#include "engine/base/arena.h"
#include "engine/base/status.h"
#include "engine/text/template_ast.h"
#include "engine/text/value_internal.h"

enum {
	MAX_RENDER_DEPTH = 2000, /* nested evaluations of expressions and statements, macros included */
	MAX_VALUE_DEPTH = 200,   /* nesting of values that are printed */
	MAX_RANGE = 100000,      /* as Jinja2's sandbox has it */
	MAX_PARAMS = 8,          /* named parameters of a builtin */
};

/* The variables of a running function. */
struct activation {
	struct activation *parent; /* of the function around it in the source */
	struct value slots[];
};

/* Text under construction, with the marks of its bytes. Lives in the rendering's arena. */
struct text {
	char *p;
	size_t n, cap;
	struct text_span *data; /* [n_data] */
	size_t n_data, cap_data;
};

struct render {
	struct arena *arena;
	uint64_t steps; /* left */
	size_t max_memory;
	int depth;
	int64_t now_unix_s;
	const struct value_dict *vars;
	struct text *out;
	int line; /* of the node that is evaluated */
	enum status status;
	bool refused; /* the template called raise_exception: the message stands alone */
	char message[480];
};

/* ---- State (template.c) ---- */

/* Both keep the first failure and are always false, which as macros they also tell the compiler. */
void render_set_failure(struct render *r, enum status status, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
#define render_fail(r, ...) (render_set_failure(r, STATUS_INVALID, __VA_ARGS__), false)
/* Fails because a limit of the sandbox is reached. */
#define render_limit(r, ...) (render_set_failure(r, STATUS_LIMIT, __VA_ARGS__), false)
/* Counts steps: about one per evaluated node, per item and per 64 bytes that are touched. */
static inline bool render_spend(struct render *r, uint64_t steps)
{
	if (__builtin_expect(r->steps < steps, 0)) {
		r->steps = 0;
		return render_limit(r, "the template takes too many steps");
	}
	r->steps -= steps;
	return true;
}
static inline bool render_enter(struct render *r)
{
	if (__builtin_expect(++r->depth > MAX_RENDER_DEPTH, 0))
		return render_limit(r, "the template nests or recurses too deeply");
	return render_spend(r, 1);
}
static inline void render_leave(struct render *r)
{
	r->depth--;
}
/* Zeroed memory that lives as long as the rendering. */
void *render_alloc(struct render *r, size_t n);
/* Always false: n bytes could not be had, by the sandbox's limit or the system's. */
bool render_exhausted(struct render *r, size_t n);

/* ---- Scalars ---- */

static inline struct value val_none(void)
{
	return (struct value){.type = VALUE_NONE, .origin = VALUE_TRUSTED};
}
static inline struct value val_bool(bool b)
{
	return (struct value){.type = VALUE_BOOL, .origin = VALUE_TRUSTED, .b = b};
}
static inline struct value val_int(int64_t i)
{
	return (struct value){.type = VALUE_INT, .origin = VALUE_TRUSTED, .i = i};
}
static inline struct value val_float(double f)
{
	return (struct value){.type = VALUE_FLOAT, .origin = VALUE_TRUSTED, .f = f};
}
static inline bool val_is_number(const struct value *v)
{
	return v->type == VALUE_BOOL || v->type == VALUE_INT || v->type == VALUE_FLOAT;
}
/* int or bool: what Python takes as an index or a count. */
static inline bool val_is_integer(const struct value *v)
{
	return v->type == VALUE_BOOL || v->type == VALUE_INT;
}
static inline int64_t val_as_int(const struct value *v)
{
	return v->type == VALUE_BOOL ? v->b : v->i;
}
static inline double val_as_double(const struct value *v)
{
	return v->type == VALUE_FLOAT ? v->f : (double)val_as_int(v);
}
static inline bool val_given(const struct value *v)
{
	return v->type != VALUE_MISSING;
}
/* The origin of something computed from two values. */
static inline uint8_t origin_join(const struct value *a, const struct value *b)
{
	return a->origin == VALUE_TRUSTED && b->origin == VALUE_TRUSTED ? VALUE_TRUSTED : VALUE_DATA;
}
static inline struct str val_str(const struct value *v)
{
	return (struct str){v->s->p, v->s->n};
}

/* ---- Text (template_text.c) ---- */

bool text_add(struct render *r, struct text *t, const char *p, size_t n, uint8_t origin);
bool text_puts(struct render *r, struct text *t, const char *z); /* trusted */
/* Bytes [from, to) of a string, with their marks. */
bool text_add_part(struct render *r, struct text *t, const struct value *s, size_t from, size_t to);
bool text_add_value(struct render *r, struct text *t, const struct value *s);
/* `n` bytes that stand for the bytes [from, to) of s, and are as trusted as all of these. */
bool text_add_as(struct render *r, struct text *t, const char *p, size_t n, const struct value *s, size_t from,
		 size_t to);
/* The finished string. The builder must not be used afterwards. */
bool text_finish(struct render *r, struct text *t, struct value *out);

bool string_new(struct render *r, const char *p, size_t n, uint8_t origin, struct value *out); /* copies */
/* Bytes [from, to) of s as a string that shares its memory; keeps the markup flag. */
bool string_part(struct render *r, const struct value *s, size_t from, size_t to, struct value *out);
bool string_concat(struct render *r, const struct value *a, const struct value *b, struct value *out);
/* The byte offset of a character, 0 <= i <= s->n_chars. */
size_t string_offset(const struct value_text *s, size_t i);
/* The origin of a byte range: TRUSTED only if all of it is. */
uint8_t string_origin(const struct value *s, size_t from, size_t to);

/* str(v) and repr(v), appended. */
bool text_add_str(struct render *r, struct text *t, const struct value *v);
bool text_add_repr(struct render *r, struct text *t, const struct value *v);
/* str(v): the same value when it is a string. */
bool value_to_string(struct render *r, const struct value *v, struct value *out);
/* repr(float) of Python: the shortest digits that read back. */
void format_float(double f, char out[40]);
/* How a value looks in an error message, cut to the buffer. */
const char *describe(struct render *r, const struct value *v, char *out, size_t n);
/* As Python calls the type. */
const char *type_name(const struct value *v);

/* ---- Access (template_access.c) ---- */

struct iter {
	struct value over;
	size_t at;   /* items taken */
	size_t byte; /* of a string */
};

bool value_truth(const struct value *v);
/* -1 when the value has no length. */
int64_t value_length(const struct value *v);
bool iter_begin(struct render *r, struct iter *it, const struct value *over);
/* One item; *got is false at the end. */
bool iter_next(struct render *r, struct iter *it, struct value *out, bool *got);
bool value_is_iterable(const struct value *v);
/* All items, as a list (the value's own when it is a list or a tuple). */
bool value_items(struct render *r, const struct value *v, struct value_seq **out);

bool get_attr(struct render *r, const struct value *obj, struct str name, struct value *out);
bool get_item(struct render *r, const struct value *obj, const struct value *key, struct value *out);
/* Bounds are MISSING or None where left out. */
bool get_slice(struct render *r, const struct value *obj, const struct value bounds[3], struct value *out);

struct undefined {
	const char *hint; /* replaces the usual message */
	bool has_obj;
	struct value obj, name;
};
bool undefined_name(struct render *r, struct str name, struct value *out);
bool undefined_of(struct render *r, const struct value *obj, const struct value *name, struct value *out);
bool undefined_hint(struct render *r, const char *hint, struct value *out); /* hint: copied */
/* Always false: fails with what was undefined. */
bool undefined_fail(struct render *r, const struct value *v);

bool new_list(struct render *r, struct value *out);
bool new_tuple(struct render *r, const struct value *items, size_t n, struct value *out);
bool new_dict(struct render *r, struct value *out);
bool list_add(struct render *r, struct value *list, struct value item);
bool dict_put(struct render *r, struct value_dict *d, const struct value *key, struct value item);
/* *found is MISSING when the key is not there; fails for unhashable keys. */
bool dict_get(struct render *r, const struct value_dict *d, const struct value *key, struct value *found);

struct view {
	struct value_dict *dict;
	enum view_kind { VIEW_KEYS, VIEW_VALUES, VIEW_ITEMS } kind;
};

/* An iterator that computes its items when asked, once. */
struct generator {
	bool (*next)(struct render *r, struct generator *g, struct value *out, bool *got);
	struct iter source;
	void *state;
	bool done;
};
bool new_generator(struct render *r, const struct value *over, void *state,
                   bool (*next)(struct render *, struct generator *, struct value *, bool *), struct value *out);

/* ---- Operators (template_ops.c) ---- */

bool op_binary(struct render *r, enum token_type op, const struct value *a, const struct value *b, struct value *out);
bool op_negate(struct render *r, const struct value *v, struct value *out);
bool op_plus(struct render *r, const struct value *v, struct value *out);
bool op_compare(struct render *r, enum compare_op op, const struct value *a, const struct value *b, bool *out);
bool op_equal(struct render *r, const struct value *a, const struct value *b, bool *out);
/* The stable order of n keys, as indices; reverse keeps equal ones in place, as Python's sorted() does. */
bool sort_order(struct render *r, const struct value *keys, size_t n, bool reverse, size_t **out);
bool op_contains(struct render *r, const struct value *in, const struct value *item, bool *out);
/* a < b, for sorting. */
bool op_less(struct render *r, const struct value *a, const struct value *b, bool *out);
/* A string, list or tuple, repeated. */
bool op_repeat(struct render *r, const struct value *what, int64_t times, struct value *out);

/* ---- Calls (template_call.c) ---- */

struct keyword_value {
	struct str name;
	struct value value;
};

struct arguments {
	struct value *args; /* [n] */
	size_t n;
	struct keyword_value *keywords; /* [n_keywords] */
	size_t n_keywords;
};

struct call {
	struct render *r;
	const struct builtin *fn;
	struct value self; /* of methods; what a filter or test is applied to */
	struct arguments raw;
	struct value arg[MAX_PARAMS]; /* by the builtin's parameters; MISSING when not given */
	struct value *out;
};

struct builtin {
	const char *name;
	/* Names of the parameters, optional ones after '?': "old new ?count". NULL: takes `raw` as it comes. */
	const char *params;
	bool (*run)(struct call *c);
};

struct method {
	struct value self;
	const struct builtin *builtin;
};

bool call_builtin(struct render *r, const struct builtin *fn, const struct value *self, const struct arguments *args,
                  struct value *out);
bool call_value(struct render *r, const struct value *callee, const struct arguments *args, struct value *out);

/* Integer and string parameters of builtins; a missing one leaves *out alone. */
bool int_arg(struct call *c, int i, int64_t *out);
bool int_or_none_arg(struct call *c, int i, int64_t *out); /* None is as good as missing */
bool string_arg(struct call *c, int i, struct value *out);
bool truth_arg(struct call *c, int i, bool *out);
/* The first keyword that is not in params, for functions that take `raw`; fails if there is any. */
bool no_keywords(struct call *c);

const struct builtin *builtin_filter(struct str name);
const struct builtin *builtin_test(struct str name);
const struct builtin *builtin_global(struct str name);
const struct builtin *builtin_find(const struct builtin *table, size_t n, struct str name);
/* NULL when the type has no such method. *refused: it would change the value. */
const struct builtin *builtin_method(const struct value *obj, struct str name, bool *refused);
extern const struct builtin string_methods[];
extern const size_t n_string_methods;
extern const struct builtin sequence_filters[];
extern const size_t n_sequence_filters;

/* ---- Evaluation (template_eval.c, template_exec.c) ---- */

bool eval(struct render *r, struct activation *a, const struct expr *e, struct value *out);
/* `subject`: what a {% filter %} or {% set %} block feeds its chain of filters, or NULL for an expression. */
bool eval_filter(struct render *r, struct activation *a, const struct expr *e, const struct value *subject,
		 struct value *out);
bool eval_args(struct render *r, struct activation *a, const struct call_args *args, struct arguments *out);
struct activation *activation_new(struct render *r, const struct function *f, struct activation *parent);
bool scope_enter(struct render *r, struct activation *a, const struct scope *s);

enum flow { FLOW_FAIL, FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE };
enum flow exec_body(struct render *r, struct activation *a, const struct stmt *body);

struct macro {
	const struct function *function;
	struct activation *outer;
};
bool macro_call(struct render *r, const struct macro *m, const struct arguments *args, struct value *out);

struct loop {
	const struct value_seq *seq; /* items, or */
	const struct range *range;
	int64_t n;
	int64_t index0;
	int64_t depth0;
	struct value last_changed; /* MISSING at first */
	const struct stmt *stmt;   /* of a recursive loop, with the function around it */
	struct activation *outer;
};
struct value loop_item(const struct loop *l, int64_t i);
bool loop_attr(struct render *r, const struct value *loop, struct str name, struct value *out);
/* loop(items): renders a recursive loop one level deeper. */
bool loop_recurse(struct render *r, const struct loop *l, const struct value *items, struct value *out);

struct cycler {
	struct value_seq items;
	size_t at;
};
struct joiner {
	struct value separator;
	bool used;
};

/* ---- Formatting (template_format.c, template_json.c, template_time.c) ---- */

/* format % values */
bool format_percent(struct render *r, const struct value *format, const struct value *values, struct value *out);
/* format.format(*args, **keywords) */
bool format_braces(struct render *r, const struct value *format, const struct arguments *args, struct value *out);

struct json_style {
	struct value indent; /* MISSING or None: on one line; else an int or a string */
	struct value item_separator, key_separator; /* MISSING: Python's defaults */
	bool ensure_ascii, sort_keys;
};
bool text_add_json(struct render *r, struct text *t, const struct value *v, const struct json_style *style);

/* strftime in the C locale, for a time in UTC. */
bool text_add_time(struct render *r, struct text *t, const struct value *format, int64_t unix_s);
