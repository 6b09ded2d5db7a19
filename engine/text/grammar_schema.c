/*
 * JSON schemas (json-schema.org, draft 2020-12, and the older names of the same things) -> programs over bytes.
 *
 * Each subschema that is a member's, an item's or a reference's becomes a routine, so that the program grows with the
 * schema and not with the ways through it, and so that schemas may refer to themselves.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/buf.h"
#include "engine/text/grammar_build.h"

enum { MAX_COUNT = 20000, MAX_MEMBERS = 2000, MAX_PASSES = 256 };

/* Where in the schema one is, for messages: links of a list on the stack. */
struct path {
	const struct path *up;
	struct str key; /* .p == NULL: an index; of the first link: all that comes before */
	size_t index;
};

static void write_path(const struct path *p, struct buf *out)
{
	if (p->up)
		write_path(p->up, out);
	if (!p->key.p)
		buf_printf(out, "[%zu]", p->index);
	else
		buf_printf(out, "%s%.*s", out->len ? "." : "", (int)(p->key.n < 200 ? p->key.n : 200), p->key.p);
}

static void fail_at(struct grammar_builder *b, const struct path *p, enum status status, const char *what)
{
	struct buf where = BUF_INIT;
	if (grammar_failed(b))
		return;
	write_path(p, &where);
	b->status = error_set(&b->err, status, "%.380s %s", buf_str(&where).p, what);
	buf_free(&where);
}

static const struct value *member(const struct value_dict *d, const char *key)
{
	struct dict_entry *e = value_dict_find_text(d, str_from(key));
	return e && e->value.type != VALUE_NONE ? &e->value : NULL;
}

static struct str text_of(const struct value *v)
{
	return v && v->type == VALUE_STRING ? (struct str){v->s->p, v->s->n} : (struct str){NULL, 0};
}

/* A count under `key`; `otherwise` when it is absent. */
static int64_t count_of(struct grammar_builder *b, const struct value_dict *d, const char *key, int64_t otherwise,
                        const struct path *p)
{
	const struct value *v = member(d, key);
	struct path here = {p, str_from(key), 0};
	int64_t n = otherwise;
	if (!v)
		return n;
	if (v->type == VALUE_INT)
		n = v->i;
	else if (v->type == VALUE_FLOAT && v->f == floor(v->f) && fabs(v->f) < 1e15)
		n = (int64_t)v->f;
	else
		n = -1;
	if (n < 0)
		fail_at(b, &here, STATUS_INVALID, "must be a count.");
	else if (n > MAX_COUNT)
		fail_at(b, &here, STATUS_UNSUPPORTED, "is larger than 20000, the most that is supported.");
	return n;
}

enum keyword_kind { NOTE, GENERAL, OBJECT, ARRAY, STRING, NUMBER };

/* The keywords that are understood; NOTE: that say nothing about the text. */
static const struct {
	const char *name;
	enum keyword_kind kind;
} keywords[] = {
	{"$anchor", NOTE},
	{"$comment", NOTE},
	{"$defs", NOTE},
	{"$id", NOTE},
	{"$schema", NOTE},
	{"default", NOTE},
	{"definitions", NOTE},
	{"deprecated", NOTE},
	{"description", NOTE},
	{"example", NOTE},
	{"examples", NOTE},
	{"readOnly", NOTE},
	{"strict", NOTE},
	{"title", NOTE},
	{"writeOnly", NOTE},
	{"$ref", GENERAL},
	{"allOf", GENERAL},
	{"anyOf", GENERAL},
	{"const", GENERAL},
	{"enum", GENERAL},
	{"type", GENERAL},
	{"properties", OBJECT},
	{"required", OBJECT},
	{"additionalProperties", OBJECT},
	{"items", ARRAY},
	{"prefixItems", ARRAY},
	{"minItems", ARRAY},
	{"maxItems", ARRAY},
	{"uniqueItems", ARRAY},
	{"minLength", STRING},
	{"maxLength", STRING},
	{"pattern", STRING},
	{"format", STRING},
	{"minimum", NUMBER},
	{"maximum", NUMBER},
	{"exclusiveMinimum", NUMBER},
	{"exclusiveMaximum", NUMBER},
};

static bool find_keyword(struct str name, enum keyword_kind *kind)
{
	for (size_t i = 0; i < sizeof keywords / sizeof *keywords; i++) {
		if (str_is(name, keywords[i].name)) {
			*kind = keywords[i].kind;
			return true;
		}
	}
	return false;
}

/* Counts the keywords of each kind; names the first that is not understood. */
static void count_keywords(struct grammar_builder *b, const struct value_dict *d, const struct path *p,
                           int n[NUMBER + 1])
{
	for (size_t i = 0; i < d->n; i++) {
		struct str name = text_of(&d->entries[i].key);
		struct path here = {p, name, 0};
		enum keyword_kind kind;
		if (find_keyword(name, &kind))
			n[kind] += d->entries[i].value.type != VALUE_NONE || str_is(name, "const");
		else
			fail_at(b, &here, STATUS_UNSUPPORTED,
			        str_is(name, "oneOf") ? "is not supported; use anyOf." : "is not supported.");
	}
}

/* The node a "$ref" names: "#", or "#/" and keys with ~0 and ~1 for ~ and / (RFC 6901). */
static const struct value *resolve(const struct value *root, struct str ref)
{
	const struct value *at = root;
	char key[256];
	size_t i = 1;
	if (ref.n == 0 || ref.p[0] != '#' || (ref.n > 1 && ref.p[1] != '/'))
		return NULL;
	while (i < ref.n) {
		size_t n = 0;
		for (i++; i < ref.n && ref.p[i] != '/'; i++) {
			if (n == sizeof key)
				return NULL;
			if (ref.p[i] == '~' && i + 1 < ref.n && (ref.p[i + 1] == '0' || ref.p[i + 1] == '1'))
				key[n++] = ref.p[++i] == '0' ? '~' : '/';
			else
				key[n++] = ref.p[i];
		}
		if (at->type == VALUE_DICT) {
			struct dict_entry *e = value_dict_find_text(at->dict, (struct str){key, n});
			at = e ? &e->value : NULL;
		} else if (at->type == VALUE_LIST && n > 0 && n < 9) {
			size_t index = 0;
			for (size_t k = 0; k < n; k++)
				index = key[k] >= '0' && key[k] <= '9' ? index * 10 + (size_t)(key[k] - '0')
				                                       : SIZE_MAX / 16;
			at = index < at->seq->n ? &at->seq->items[index] : NULL;
		} else {
			at = NULL;
		}
		if (!at)
			return NULL;
	}
	return at;
}

/* The routine of a subschema, which remembers where it stands; NULL after a failure. */
static const void *routine_of(struct grammar_builder *b, const struct value *v, const struct path *p)
{
	struct buf where = BUF_INIT;
	uint32_t i;
	if (!v || (v->type == VALUE_BOOL && v->b))
		return &grammar_any;
	if (v->type != VALUE_DICT) {
		fail_at(b, p, STATUS_INVALID, v->type == VALUE_BOOL ? "cannot be satisfied." : "must be a schema.");
		return NULL;
	}
	i = grammar_routine(b, v->dict);
	if (grammar_failed(b))
		return NULL;
	if (!b->where[i]) {
		b->root_of[i] = b->root;
		write_path(p, &where);
		b->where[i] = buf_take(&where, NULL);
		if (!b->where[i])
			grammar_fail_nomem(b);
	}
	return v->dict;
}

static void write_json(struct grammar_builder *b, const struct value *v, struct buf *out, int depth)
{
	if (depth > 64) {
		grammar_fail_size(b);
		return;
	}
	switch (v->type) {
	case VALUE_NONE:
		buf_puts(out, "null");
		break;
	case VALUE_BOOL:
		buf_puts(out, v->b ? "true" : "false");
		break;
	case VALUE_INT:
		buf_printf(out, "%" PRId64, v->i);
		break;
	case VALUE_FLOAT:
		buf_json_number(out, v->f);
		break;
	case VALUE_STRING:
		buf_json_string(out, v->s->p, v->s->n);
		break;
	case VALUE_LIST:
		buf_putc(out, '[');
		for (size_t i = 0; i < v->seq->n; i++) {
			if (i)
				buf_putc(out, ',');
			write_json(b, &v->seq->items[i], out, depth + 1);
		}
		buf_putc(out, ']');
		break;
	default:
		buf_putc(out, '{');
		for (size_t i = 0; v->type == VALUE_DICT && i < v->dict->n; i++) {
			if (i)
				buf_putc(out, ',');
			write_json(b, &v->dict->entries[i].key, out, depth + 1);
			buf_putc(out, ':');
			write_json(b, &v->dict->entries[i].value, out, depth + 1);
		}
		buf_putc(out, '}');
	}
}

static void emit_literal(struct grammar_builder *b, const struct value *v)
{
	struct buf text = BUF_INIT;
	write_json(b, v, &text, 0);
	if (text.failed)
		grammar_fail_nomem(b);
	grammar_emit_bytes(b, buf_str(&text));
	buf_free(&text);
}

static bool has_type(const struct value *v, struct str type)
{
	switch (v->type) {
	case VALUE_NONE:
		return str_is(type, "null");
	case VALUE_BOOL:
		return str_is(type, "boolean");
	case VALUE_INT:
		return str_is(type, "integer") || str_is(type, "number");
	case VALUE_FLOAT:
		return str_is(type, "number") || (str_is(type, "integer") && v->f == floor(v->f));
	case VALUE_STRING:
		return str_is(type, "string");
	case VALUE_LIST:
		return str_is(type, "array");
	default:
		return str_is(type, "object");
	}
}

static bool allowed_by_type(const struct value *v, const struct value *type)
{
	if (!type)
		return true;
	if (type->type == VALUE_STRING)
		return has_type(v, text_of(type));
	for (size_t i = 0; type->type == VALUE_LIST && i < type->seq->n; i++)
		if (has_type(v, text_of(&type->seq->items[i])))
			return true;
	return false;
}

static void emit_enum(struct grammar_builder *b, const struct value *values, size_t n, const struct value *type,
                      const struct path *p)
{
	struct grammar_choices c = {0};
	size_t last = n;
	for (size_t i = 0; i < n; i++)
		if (allowed_by_type(&values[i], type))
			last = i;
	if (last == n) {
		fail_at(b, p, STATUS_INVALID, "allows no value.");
		return;
	}
	for (size_t i = 0; i <= last && !grammar_failed(b); i++) {
		if (!allowed_by_type(&values[i], type))
			continue;
		grammar_next_choice(b, &c, i == last);
		emit_literal(b, &values[i]);
	}
	grammar_end_choices(b, &c);
}

static void emit_any_of(struct grammar_builder *b, const struct value *list, const struct path *p)
{
	struct grammar_choices c = {0};
	if (list->type != VALUE_LIST || list->seq->n == 0) {
		fail_at(b, p, STATUS_INVALID, "must be a list of schemas.");
		return;
	}
	for (size_t i = 0; i < list->seq->n && !grammar_failed(b); i++) {
		struct path here = {p, {NULL, 0}, i};
		grammar_next_choice(b, &c, i + 1 == list->seq->n);
		grammar_emit_call(b, routine_of(b, &list->seq->items[i], &here));
	}
	grammar_end_choices(b, &c);
}

/* ---- Objects ---- */

static bool is_required(const struct value *required, struct str name)
{
	for (size_t i = 0; required && i < required->seq->n; i++)
		if (str_eq(text_of(&required->seq->items[i]), name))
			return true;
	return false;
}

static void emit_member(struct grammar_builder *b, const struct dict_entry *e, bool first, const struct path *p)
{
	struct path here = {p, text_of(&e->key), 0};
	if (!first) {
		grammar_emit_space(b);
		grammar_emit_text(b, ",");
		grammar_emit_space(b);
	}
	emit_literal(b, &e->key);
	grammar_emit_space(b);
	grammar_emit_text(b, ":");
	grammar_emit_space(b);
	grammar_emit_call(b, routine_of(b, &e->value, &here));
}

/*
 * Members come in order, up to the blanks before the brace; there is at least one in the schema. Twice: a chain for
 * while none has come, and one for when one has, to which jump[i] leads from taking the i-th in the first.
 */
static void emit_members(struct grammar_builder *b, const struct value_dict *d, const struct value *required,
                         const struct path *p)
{
	uint32_t *jump = calloc(d->n + 1, sizeof *jump), none = 0, skip;
	size_t n_first = 0; /* members that can come first */
	if (!jump) {
		grammar_fail_nomem(b);
		return;
	}
	for (bool may_skip = true; n_first < d->n && may_skip && !grammar_failed(b); n_first++) {
		const struct dict_entry *e = &d->entries[n_first];
		may_skip = !is_required(required, text_of(&e->key));
		skip = may_skip ? grammar_begin_optional(b) : 0;
		emit_member(b, e, true, p);
		jump[n_first] = grammar_emit(b, GRAMMAR_JUMP, 0, 0);
		if (may_skip) {
			grammar_end_optional(b, skip);
			if (n_first + 1 == d->n)
				none = grammar_emit(b, GRAMMAR_JUMP, 0, 0);
		}
	}
	for (size_t i = 1; i < d->n && !grammar_failed(b); i++) {
		const struct dict_entry *e = &d->entries[i];
		bool may_skip = !is_required(required, text_of(&e->key));
		if (i - 1 < n_first)
			grammar_patch_a(b, jump[i - 1], grammar_here(b));
		skip = may_skip ? grammar_begin_optional(b) : 0;
		emit_member(b, e, false, p);
		if (may_skip)
			grammar_end_optional(b, skip);
	}
	if (d->n - 1 < n_first)
		grammar_patch_a(b, jump[d->n - 1], grammar_here(b));
	grammar_emit_space(b);
	if (none)
		grammar_patch_a(b, none, grammar_here(b));
	free(jump);
}

static void emit_object(struct grammar_builder *b, const struct value_dict *d, const struct path *p)
{
	const struct value *properties = member(d, "properties"), *required = member(d, "required");
	const struct value *rest = member(d, "additionalProperties");
	struct path at_properties = {p, str_from("properties"), 0}, at_required = {p, str_from("required"), 0};
	struct path at_rest = {p, str_from("additionalProperties"), 0};
	bool open = !(rest && rest->type == VALUE_BOOL && !rest->b);

	if (properties && properties->type != VALUE_DICT)
		fail_at(b, &at_properties, STATUS_INVALID, "must be an object.");
	if ((properties && properties->type == VALUE_DICT && properties->dict->n > MAX_MEMBERS) ||
	    (required && required->type == VALUE_LIST && required->seq->n > MAX_MEMBERS))
		grammar_fail_size(b);
	if (required && required->type != VALUE_LIST)
		fail_at(b, &at_required, STATUS_INVALID, "must be a list of names.");
	for (size_t i = 0; !grammar_failed(b) && required && i < required->seq->n; i++) {
		struct str name = text_of(&required->seq->items[i]);
		if (!name.p)
			fail_at(b, &at_required, STATUS_INVALID, "must be a list of names.");
		else if (!properties || !value_dict_find_text(properties->dict, name))
			fail_at(b, &at_required, STATUS_UNSUPPORTED, "names a member that properties do not list.");
	}
	if (grammar_failed(b))
		return;
	if ((!properties || properties->dict->n == 0) && open) {
		grammar_emit_map(b, routine_of(b, rest, &at_rest));
		return;
	}
	grammar_emit(b, GRAMMAR_NEST, 0, 0);
	grammar_emit_text(b, "{");
	grammar_emit_space(b);
	if (properties && properties->dict->n > 0)
		emit_members(b, properties->dict, required, &at_properties);
	grammar_emit_text(b, "}");
}

/* ---- Arrays, strings, numbers ---- */

static void emit_array(struct grammar_builder *b, const struct value_dict *d, const struct path *p)
{
	const struct value *items = member(d, "items"), *prefix = member(d, "prefixItems"),
			   *unique = member(d, "uniqueItems");
	struct path at_items = {p, str_from("items"), 0}, at_prefix = {p, str_from("prefixItems"), 0};
	struct path at_unique = {p, str_from("uniqueItems"), 0};
	int64_t min = count_of(b, d, "minItems", 0, p), max = count_of(b, d, "maxItems", -1, p);

	if (unique && !(unique->type == VALUE_BOOL && !unique->b))
		fail_at(b, &at_unique, STATUS_UNSUPPORTED, "is not supported.");
	if (max >= 0 && min > max)
		fail_at(b, p, STATUS_INVALID, "has minItems above maxItems.");
	if (grammar_failed(b))
		return;
	if (!prefix) {
		bool none = items && items->type == VALUE_BOOL && !items->b;
		if (none && min > 0)
			fail_at(b, &at_items, STATUS_INVALID, "cannot be satisfied.");
		else
			grammar_emit_list(b, none ? &grammar_any : routine_of(b, items, &at_items), min,
			                  none ? 0 : max);
		return;
	}
	if (prefix->type != VALUE_LIST || prefix->seq->n == 0) {
		fail_at(b, &at_prefix, STATUS_INVALID, "must be a list of schemas.");
		return;
	}
	if (min > (int64_t)prefix->seq->n || (max >= 0 && max < (int64_t)prefix->seq->n)) {
		fail_at(b, &at_prefix, STATUS_UNSUPPORTED, "is only supported when as many items are allowed.");
		return;
	}
	grammar_emit(b, GRAMMAR_NEST, 0, 0);
	grammar_emit_text(b, "[");
	grammar_emit_space(b);
	for (size_t i = 0; i < prefix->seq->n && !grammar_failed(b); i++) {
		struct path here = {&at_prefix, {NULL, 0}, i};
		if (i) {
			grammar_emit_space(b);
			grammar_emit_text(b, ",");
			grammar_emit_space(b);
		}
		grammar_emit_call(b, routine_of(b, &prefix->seq->items[i], &here));
	}
	grammar_emit_space(b);
	grammar_emit_text(b, "]");
}

static void emit_text_type(struct grammar_builder *b, const struct value_dict *d, const struct path *p)
{
	const struct value *pattern = member(d, "pattern"), *format = member(d, "format");
	struct path at_pattern = {p, str_from("pattern"), 0}, at_format = {p, str_from("format"), 0};
	int64_t min = count_of(b, d, "minLength", 0, p), max = count_of(b, d, "maxLength", -1, p);
	struct str source = text_of(pattern);
	struct buf where = BUF_INIT;

	if (max >= 0 && min > max)
		fail_at(b, p, STATUS_INVALID, "has minLength above maxLength.");
	if ((pattern || format) && (min > 0 || max >= 0 || (pattern && format))) {
		fail_at(b, pattern ? &at_pattern : &at_format, STATUS_UNSUPPORTED,
		        "is not supported beside other bounds of a string.");
		return;
	}
	if (!pattern && !format) {
		grammar_emit_string(b, min, max);
		return;
	}
	if (format) {
		const char *known = grammar_format_pattern(text_of(format));
		if (!known) {
			fail_at(b, &at_format, STATUS_UNSUPPORTED,
			        "is not supported; formats are date, time, date-time, uuid, ipv4, hostname and email.");
			return;
		}
		source = str_from(known);
	} else if (!source.p) {
		fail_at(b, &at_pattern, STATUS_INVALID, "must be a string.");
		return;
	}
	write_path(&at_pattern, &where);
	grammar_emit_text(b, "\"");
	grammar_emit_pattern(b, source, buf_str(&where).p);
	grammar_emit_text(b, "\"");
	buf_free(&where);
}

/* A bound as a number; false when there is none. */
static bool bound_of(struct grammar_builder *b, const struct value_dict *d, const char *key, const struct path *p,
                     double *out)
{
	const struct value *v = member(d, key);
	struct path here = {p, str_from(key), 0};
	if (!v)
		return false;
	if (v->type != VALUE_INT && v->type != VALUE_FLOAT)
		fail_at(b, &here, STATUS_INVALID, "must be a number.");
	*out = v->type == VALUE_INT ? (double)v->i : v->type == VALUE_FLOAT ? v->f : 0;
	return true;
}

static void emit_bounded_integer(struct grammar_builder *b, const struct value_dict *d, const struct path *p)
{
	const double most = 999999999999999; /* 15 digits: exact in a double */
	double min = -most, max = most, v;
	if (bound_of(b, d, "minimum", p, &v))
		min = fmax(min, ceil(v));
	if (bound_of(b, d, "exclusiveMinimum", p, &v))
		min = fmax(min, floor(v) + 1);
	if (bound_of(b, d, "maximum", p, &v))
		max = fmin(max, floor(v));
	if (bound_of(b, d, "exclusiveMaximum", p, &v))
		max = fmin(max, ceil(v) - 1);
	if (min > max)
		fail_at(b, p, STATUS_INVALID, "allows no integer.");
	if (!grammar_failed(b))
		grammar_emit_range(b, (int64_t)min, (int64_t)max);
}

static void emit_type(struct grammar_builder *b, const struct value_dict *d, struct str type, const struct path *p)
{
	static const char *const bounds[] = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};
	bool bounded = false;
	for (size_t i = 0; i < 4; i++)
		bounded = bounded || member(d, bounds[i]);
	if (str_is(type, "object")) {
		emit_object(b, d, p);
	} else if (str_is(type, "array")) {
		emit_array(b, d, p);
	} else if (str_is(type, "string")) {
		emit_text_type(b, d, p);
	} else if (str_is(type, "integer") && bounded) {
		emit_bounded_integer(b, d, p);
	} else if (str_is(type, "integer")) {
		grammar_emit_call(b, &grammar_integer);
	} else if (str_is(type, "number") && bounded) {
		fail_at(b, p, STATUS_UNSUPPORTED, "has bounds for a number; bounds are supported for integers.");
	} else if (str_is(type, "number")) {
		grammar_emit_call(b, &grammar_number);
	} else if (str_is(type, "boolean")) {
		struct grammar_choices c = {0};
		grammar_next_choice(b, &c, false);
		grammar_emit_text(b, "true");
		grammar_next_choice(b, &c, true);
		grammar_emit_text(b, "false");
		grammar_end_choices(b, &c);
	} else if (str_is(type, "null")) {
		grammar_emit_text(b, "null");
	} else {
		fail_at(b, p, STATUS_INVALID, "has a type that is none of JSON's.");
	}
}

static void emit_typed(struct grammar_builder *b, const struct value_dict *d, const int n[NUMBER + 1],
                       const struct path *p)
{
	static const char *const implied[] = {
		[OBJECT] = "object", [ARRAY] = "array", [STRING] = "string", [NUMBER] = "integer"};
	const struct value *type = member(d, "type");
	struct grammar_choices c = {0};
	if (!type) {
		/* Keywords speak of one type each; a value of that type satisfies them like any other. */
		for (int k = OBJECT; k <= NUMBER; k++) {
			if (n[k]) {
				emit_type(b, d, str_from(implied[k]), p);
				return;
			}
		}
		grammar_emit_call(b, &grammar_any);
		return;
	}
	if (type->type == VALUE_LIST && type->seq->n > 0) {
		for (size_t i = 0; i < type->seq->n && !grammar_failed(b); i++) {
			grammar_next_choice(b, &c, i + 1 == type->seq->n);
			emit_type(b, d, text_of(&type->seq->items[i]), p);
		}
		grammar_end_choices(b, &c);
	} else {
		emit_type(b, d, text_of(type), p);
	}
}

static void emit_dict(struct grammar_builder *b, const struct value_dict *d, const struct path *p)
{
	static const char *const alone[] = {"$ref", "anyOf", "allOf", "enum", "const"};
	int n[NUMBER + 1] = {0};
	const struct value *v = NULL;
	const char *which = NULL;
	count_keywords(b, d, p, n);
	for (size_t i = 0; i < sizeof alone / sizeof *alone && !which; i++) {
		struct dict_entry *e = value_dict_find_text(d, str_from(alone[i]));
		if (e && (e->value.type != VALUE_NONE || !strcmp(alone[i], "const"))) {
			which = alone[i];
			v = &e->value;
		}
	}
	if (grammar_failed(b))
		return;
	if (!which) {
		emit_typed(b, d, n, p);
		return;
	}
	struct path here = {p, str_from(which), 0};
	const struct value *type = member(d, "type");
	bool is_value = !strcmp(which, "enum") || !strcmp(which, "const");
	int others = n[GENERAL] - 1 - (is_value && type) + n[OBJECT] + n[ARRAY] + n[STRING] + n[NUMBER];
	if (others > 0) {
		fail_at(b, &here, STATUS_UNSUPPORTED, "is not supported beside other keywords.");
	} else if (!strcmp(which, "$ref")) {
		const struct value *to = resolve(b->root, text_of(v));
		if (!to)
			fail_at(b, &here, STATUS_INVALID, "names nothing in this document.");
		else
			grammar_emit_call(b, routine_of(b, to, &here));
	} else if (!strcmp(which, "anyOf")) {
		emit_any_of(b, v, &here);
	} else if (!strcmp(which, "allOf")) {
		if (v->type != VALUE_LIST || v->seq->n != 1)
			fail_at(b, &here, STATUS_UNSUPPORTED, "is only supported with one schema.");
		else
			grammar_emit_call(b, routine_of(b, &v->seq->items[0], &here));
	} else if (!strcmp(which, "enum")) {
		if (v->type != VALUE_LIST)
			fail_at(b, &here, STATUS_INVALID, "must be a list of values.");
		else
			emit_enum(b, v->seq->items, v->seq->n, type, &here);
	} else {
		emit_enum(b, v, 1, type, &here);
	}
}

/* ---- The whole ---- */

/* Whether a thread that begins at `from` can come to a RETURN or END before `to`, by routines that can. */
static bool reaches_end(const struct grammar *g, const bool *ends, bool *seen, uint32_t *stack, uint32_t from,
                        uint32_t to)
{
	size_t n = 0;
	memset(seen + from, 0, to - from);
	stack[n++] = from;
	seen[from] = true;
	while (n > 0) {
		uint32_t at = stack[--n], next[2] = {at + 1, 0}, n_next = 1;
		const struct grammar_instr *i = &g->code[at];
		switch ((enum grammar_op)i->op) {
		case GRAMMAR_RETURN:
		case GRAMMAR_END:
			return true;
		case GRAMMAR_FAIL:
			n_next = 0;
			break;
		case GRAMMAR_SPLIT:
			next[n_next++] = i->b;
			/* fall through */
		case GRAMMAR_JUMP:
			next[0] = i->a;
			break;
		case GRAMMAR_CALL:
			n_next = ends[i->a];
			break;
		case GRAMMAR_BYTE:
		case GRAMMAR_SET:
		case GRAMMAR_NEST:
			break;
		}
		for (uint32_t k = 0; k < n_next; k++) {
			if (!seen[next[k]]) {
				seen[next[k]] = true;
				stack[n++] = next[k];
			}
		}
	}
	return false;
}

/*
 * Schemas that refer to themselves without a way out have no finite text. Their calls fail at once, so that no answer
 * walks into them; when that leaves nothing, the schema is refused.
 */
static void remove_endless(struct grammar_builder *b)
{
	struct grammar *g = b->g;
	uint32_t n = g->n_routines, n_passes = 0;
	bool *ends = calloc(n + 1, sizeof *ends), *seen = malloc(g->n_code * sizeof *seen), more = true;
	uint32_t *stack = malloc(g->n_code * sizeof *stack);
	if (!ends || !seen || !stack) {
		grammar_fail_nomem(b);
		goto done;
	}
	/* Back and forth, so that a chain of calls in either order takes few passes. */
	for (; more && n_passes < MAX_PASSES; n_passes++) {
		more = false;
		for (uint32_t k = 0; k < n; k++) {
			uint32_t i = n_passes % 2 ? k : n - 1 - k;
			uint32_t to = i + 1 < n ? g->entry[i + 1] : g->n_code;
			if (!ends[i] && reaches_end(g, ends, seen, stack, g->entry[i], to))
				more = ends[i] = true;
		}
	}
	if (more) {
		grammar_fail_size(b);
		goto done;
	}
	for (uint32_t i = 0; i < g->n_code; i++)
		if (g->code[i].op == GRAMMAR_CALL && !ends[g->code[i].a])
			g->code[i] = (struct grammar_instr){GRAMMAR_FAIL, 0, 0};
	if (!reaches_end(g, ends, seen, stack, 0, n ? g->entry[0] : g->n_code))
		b->status = error_set(&b->err, STATUS_INVALID, "The schema allows no finite text.");
done:
	free(ends);
	free(seen);
	free(stack);
}

static void emit_routines(struct grammar_builder *b)
{
	struct grammar *g = b->g;
	g->entry = calloc(GRAMMAR_MAX_ROUTINES, sizeof *g->entry);
	if (!g->entry) {
		grammar_fail_nomem(b);
		return;
	}
	for (uint32_t i = 0; i < g->n_routines && !grammar_failed(b); i++) {
		g->entry[i] = grammar_here(b);
		if (!grammar_emit_builtin(b, b->routine[i])) {
			struct path p = {NULL, str_from(b->where[i]), 0};
			b->root = b->root_of[i];
			emit_dict(b, b->routine[i], &p);
		}
		grammar_emit(b, GRAMMAR_RETURN, 0, 0);
	}
}

static struct grammar_builder *builder_create(void)
{
	struct grammar_builder *b = calloc(1, sizeof *b);
	if (b)
		b->g = calloc(1, sizeof *b->g);
	if (!b || !b->g) {
		free(b);
		return NULL;
	}
	b->g->refs = 1;
	return b;
}

static enum status builder_finish(struct grammar_builder *b, struct grammar **out, struct error *err)
{
	enum status status;
	emit_routines(b);
	if (!grammar_failed(b))
		remove_endless(b);
	status = b->status;
	if (status == STATUS_OK)
		*out = b->g;
	else {
		error_set(err, status, "%s", b->err.message);
		grammar_unref(b->g);
	}
	for (uint32_t i = 0; i < GRAMMAR_MAX_ROUTINES; i++)
		free(b->where[i]);
	free(b);
	return status;
}

static void begin_program(struct grammar_builder *b, uint32_t *body)
{
	*body = grammar_emit(b, GRAMMAR_JUMP, 0, 0);
	grammar_emit(b, GRAMMAR_FAIL, 0, 0);
	/* Where a space before the text is not shown. */
	grammar_emit(b, GRAMMAR_SPLIT, 0, 3);
	grammar_emit_text(b, " ");
	grammar_emit(b, GRAMMAR_JUMP, 0, 0);
	grammar_patch_a(b, *body, grammar_here(b));
}

enum status grammar_json(const struct value *schema, struct grammar **out, struct error *err)
{
	struct grammar_builder *b = builder_create();
	struct path top = {NULL, str_from("schema"), 0};
	uint32_t body;
	if (!b)
		return error_set(err, STATUS_NOMEM, "no memory for the schema's grammar");
	b->root = schema;
	begin_program(b, &body);
	grammar_emit_call(b, schema ? routine_of(b, schema, &top) : &grammar_object);
	grammar_emit(b, GRAMMAR_END, 0, 0);
	return builder_finish(b, out, err);
}

static void emit_call_of_tool(struct grammar_builder *b, const struct grammar_call_form *f,
                              const struct grammar_tool *t)
{
	struct path top = {NULL, str_from("parameters"), 0};
	struct buf name = BUF_INIT;
	buf_json_string(&name, t->name.p, t->name.n);
	if (name.failed)
		grammar_fail_nomem(b);
	grammar_emit_text(b, f->open);
	grammar_emit_text(b, "{\"name\":");
	grammar_emit_space(b);
	grammar_emit_bytes(b, buf_str(&name));
	grammar_emit_text(b, ",");
	grammar_emit_space(b);
	grammar_emit_text(b, "\"");
	grammar_emit_text(b, f->arguments_key);
	grammar_emit_text(b, "\":");
	grammar_emit_space(b);
	if (t->parameters && t->parameters->type != VALUE_NONE)
		grammar_emit_call(b, routine_of(b, t->parameters, &top));
	else
		grammar_emit_call(b, &grammar_object);
	grammar_emit_text(b, "}");
	grammar_emit_text(b, f->close);
	buf_free(&name);
}

enum status grammar_tools(const struct grammar_call_form *form, const struct grammar_tool *tools, size_t n_tools,
                          bool many, struct grammar **out, struct error *err)
{
	struct grammar_builder *b = builder_create();
	struct grammar_choices c = {0};
	uint32_t body, call;
	if (!b)
		return error_set(err, STATUS_NOMEM, "no memory for the tools' grammar");
	begin_program(b, &body);
	grammar_emit_text(b, form->before);
	call = grammar_here(b);
	for (size_t i = 0; i < n_tools && !grammar_failed(b); i++) {
		/* "#" in a tool's schema is that schema. */
		b->root = tools[i].parameters;
		grammar_next_choice(b, &c, i + 1 == n_tools);
		emit_call_of_tool(b, form, &tools[i]);
	}
	grammar_end_choices(b, &c);
	if (many) {
		uint32_t again = grammar_begin_optional(b);
		grammar_emit_text(b, form->separator);
		grammar_emit(b, GRAMMAR_JUMP, call, 0);
		grammar_end_optional(b, again);
	}
	grammar_emit_text(b, form->after);
	grammar_emit(b, GRAMMAR_END, 0, 0);
	return builder_finish(b, out, err);
}

struct grammar *grammar_ref(struct grammar *g)
{
	if (g)
		atomic_fetch_add(&g->refs, 1);
	return g;
}

void grammar_unref(struct grammar *g)
{
	if (!g || atomic_fetch_sub(&g->refs, 1) > 1)
		return;
	free(g->code);
	free(g->sets);
	free(g->entry);
	free(g);
}
