/* Strings with marked bytes: building, cutting, and how Python prints values. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/text/template_render.h"
#include "engine/text/template_unicode.h"

/* ---- Builder ---- */

static bool grow(struct render *r, struct text *t, size_t extra)
{
	if (extra <= t->cap - t->n)
		return true;
	if (extra > SIZE_MAX / 4 - t->n)
		return render_limit(r, "the template builds a string that is too long");
	size_t cap = t->cap ? t->cap * 2 : 256;
	while (cap < t->n + extra)
		cap *= 2;
	char *p = render_alloc(r, cap);
	if (!p)
		return false;
	if (t->n)
		memcpy(p, t->p, t->n);
	t->p = p;
	t->cap = cap;
	return true;
}

static bool mark_data(struct render *r, struct text *t, size_t from, size_t to)
{
	if (t->n_data && t->data[t->n_data - 1].end == from) {
		t->data[t->n_data - 1].end = to;
		return true;
	}
	if (t->n_data == t->cap_data) {
		size_t cap = t->cap_data ? t->cap_data * 2 : 8;
		struct text_span *data = render_alloc(r, cap * sizeof *data);
		if (!data)
			return false;
		if (t->n_data)
			memcpy(data, t->data, t->n_data * sizeof *data);
		t->data = data;
		t->cap_data = cap;
	}
	t->data[t->n_data++] = (struct text_span){from, to};
	return true;
}

bool text_add(struct render *r, struct text *t, const char *p, size_t n, uint8_t origin)
{
	if (n == 0)
		return true;
	if (!render_spend(r, n / 64) || !grow(r, t, n))
		return false;
	memcpy(t->p + t->n, p, n);
	if (origin != VALUE_TRUSTED && !mark_data(r, t, t->n, t->n + n))
		return false;
	t->n += n;
	return true;
}

bool text_puts(struct render *r, struct text *t, const char *z)
{
	return text_add(r, t, z, strlen(z), VALUE_TRUSTED);
}

/* The first data range that ends after `at`. */
static size_t span_after(const struct value_text *s, size_t at)
{
	size_t low = 0, high = s->n_data;
	while (low < high) {
		size_t mid = (low + high) / 2;
		if (s->data[mid].end <= at)
			low = mid + 1;
		else
			high = mid;
	}
	return low;
}

uint8_t string_origin(const struct value *s, size_t from, size_t to)
{
	if (s->origin != VALUE_MIXED)
		return s->origin;
	size_t i = span_after(s->s, from);
	return i < s->s->n_data && s->s->data[i].begin < to ? VALUE_DATA : VALUE_TRUSTED;
}

bool text_add_as(struct render *r, struct text *t, const char *p, size_t n, const struct value *s, size_t from,
		 size_t to)
{
	return text_add(r, t, p, n, string_origin(s, from, to));
}

bool text_add_part(struct render *r, struct text *t, const struct value *s, size_t from, size_t to)
{
	if (from >= to)
		return true;
	if (s->origin != VALUE_MIXED)
		return text_add(r, t, s->s->p + from, to - from, s->origin);
	if (!render_spend(r, (to - from) / 64) || !grow(r, t, to - from))
		return false;
	memcpy(t->p + t->n, s->s->p + from, to - from);
	for (size_t i = span_after(s->s, from); i < s->s->n_data && s->s->data[i].begin < to; i++) {
		size_t begin = s->s->data[i].begin > from ? s->s->data[i].begin : from;
		size_t end = s->s->data[i].end < to ? s->s->data[i].end : to;
		if (!render_spend(r, 1) || !mark_data(r, t, t->n + (begin - from), t->n + (end - from)))
			return false;
	}
	t->n += to - from;
	return true;
}

bool text_add_value(struct render *r, struct text *t, const struct value *s)
{
	return text_add_part(r, t, s, 0, s->s->n);
}

/* Classifies n bytes whose data ranges are known. */
static uint8_t origin_of(const struct text_span *data, size_t n_data, size_t n)
{
	if (n_data == 0)
		return VALUE_TRUSTED;
	return n_data == 1 && data[0].begin == 0 && data[0].end == n ? VALUE_DATA : VALUE_MIXED;
}

static bool make_string(struct render *r, const char *p, size_t n, const struct text_span *data, size_t n_data,
			struct value *out)
{
	struct value_text *s = render_alloc(r, sizeof *s);
	if (!s || !render_spend(r, n / 64))
		return false;
	uint8_t origin = origin_of(data, n_data, n);
	*s = (struct value_text){n ? p : "", n, value_count_chars(p, n), NULL, 0};
	if (origin == VALUE_MIXED) {
		s->data = data;
		s->n_data = n_data;
	}
	*out = (struct value){.type = VALUE_STRING, .origin = origin, .s = s};
	return true;
}

bool text_finish(struct render *r, struct text *t, struct value *out)
{
	return make_string(r, t->p, t->n, t->data, t->n_data, out);
}

bool string_new(struct render *r, const char *p, size_t n, uint8_t origin, struct value *out)
{
	char *copy = render_alloc(r, n);
	if (!copy)
		return false;
	if (n)
		memcpy(copy, p, n);
	struct text_span all = {0, n};
	return make_string(r, copy, n, &all, origin != VALUE_TRUSTED && n > 0, out);
}

bool string_part(struct render *r, const struct value *s, size_t from, size_t to, struct value *out)
{
	uint8_t flags = s->flags;
	if (from >= to) {
		static const struct value_text empty = {"", 0, 0, NULL, 0};
		*out = (struct value){.type = VALUE_STRING, .origin = VALUE_TRUSTED, .flags = flags, .s = &empty};
		return true;
	}
	if (from == 0 && to == s->s->n) {
		*out = *s;
		return true;
	}
	const char *p = s->s->p + from;
	size_t n = to - from;
	struct text_span one = {0, n}, *data = &one;
	size_t n_data = s->origin == VALUE_DATA;
	if (s->origin == VALUE_MIXED) {
		size_t first = span_after(s->s, from), last = first;
		while (last < s->s->n_data && s->s->data[last].begin < to)
			last++;
		n_data = last - first;
		if (!render_spend(r, n_data))
			return false;
		data = n_data ? render_alloc(r, n_data * sizeof *data) : &one;
		if (!data)
			return false;
		for (size_t i = 0; i < n_data; i++) {
			const struct text_span *d = &s->s->data[first + i];
			data[i].begin = d->begin > from ? d->begin - from : 0;
			data[i].end = d->end < to ? d->end - from : n;
		}
	}
	if (!make_string(r, p, n, data, n_data, out))
		return false;
	out->flags = flags;
	return true;
}

bool string_concat(struct render *r, const struct value *a, const struct value *b, struct value *out)
{
	if (b->s->n == 0 || a->s->n == 0) {
		uint8_t flags = a->flags | b->flags;
		*out = b->s->n == 0 ? *a : *b;
		out->flags = flags;
		return true;
	}
	struct text t = {0};
	/* Twice as much as needed at once: the builder would round up to a power of two anyway. */
	if (!grow(r, &t, a->s->n + b->s->n) || !text_add_value(r, &t, a) || !text_add_value(r, &t, b) ||
	    !text_finish(r, &t, out))
		return false;
	out->flags = a->flags | b->flags;
	return true;
}

size_t string_offset(const struct value_text *s, size_t i)
{
	if (s->n_chars == s->n)
		return i;
	if (i >= s->n_chars)
		return s->n;
	size_t at = 0;
	while (i > 0) {
		at++;
		while (at < s->n && ((unsigned char)s->p[at] & 0xc0) == 0x80)
			at++;
		i--;
	}
	return at;
}

/* ---- Printing ---- */

void format_float(double f, char out[40])
{
	if (!isfinite(f)) {
		strcpy(out, isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
		return;
	}
	/*
	 * Any decimal of up to 15 digits survives a double, so 15 digits without trailing zeros are the shortest if
	 * they read back at all. That does not hold for subnormal numbers.
	 */
	char e[40];
	int precision = fabs(f) < 0x1p-1022 ? 0 : 14;
	for (; precision < 17; precision++) {
		snprintf(e, sizeof e, "%.*e", precision, f);
		if (strtod(e, NULL) == f)
			break;
	}
	char *mark = strchr(e, 'e');
	int exponent = atoi(mark + 1);
	char digits[40];
	int n = 0;
	for (char *c = e; c < mark; c++)
		if (*c >= '0' && *c <= '9')
			digits[n++] = *c;
	while (n > 1 && digits[n - 1] == '0')
		n--;
	char *o = out;
	if (signbit(f))
		*o++ = '-';
	if (exponent < -4 || exponent >= 16) {
		*o++ = digits[0];
		if (n > 1) {
			*o++ = '.';
			memcpy(o, digits + 1, (size_t)n - 1);
			o += n - 1;
		}
		sprintf(o, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
		return;
	}
	if (exponent < 0) {
		*o++ = '0';
		*o++ = '.';
		for (int i = -1; i > exponent; i--)
			*o++ = '0';
		memcpy(o, digits, (size_t)n);
		o[n] = '\0';
		return;
	}
	for (int i = 0; i <= exponent; i++)
		*o++ = i < n ? digits[i] : '0';
	*o++ = '.';
	if (n > exponent + 1) {
		memcpy(o, digits + exponent + 1, (size_t)(n - exponent - 1));
		o += n - exponent - 1;
	} else {
		*o++ = '0';
	}
	*o = '\0';
}

const char *type_name(const struct value *v)
{
	switch (v->type) {
	case VALUE_NONE:
		return "NoneType";
	case VALUE_BOOL:
		return "bool";
	case VALUE_INT:
		return "int";
	case VALUE_FLOAT:
		return "float";
	case VALUE_STRING:
		return v->flags & VALUE_MARKUP ? "Markup" : "str";
	case VALUE_LIST:
		return "list";
	case VALUE_TUPLE:
		return "tuple";
	case VALUE_DICT:
		return "dict";
	case VALUE_UNDEFINED:
		return "Undefined";
	case VALUE_RANGE:
		return "range";
	case VALUE_GENERATOR:
		return "generator";
	case VALUE_VIEW:
		return v->view->kind == VIEW_KEYS     ? "dict_keys"
		       : v->view->kind == VIEW_VALUES ? "dict_values"
						      : "dict_items";
	case VALUE_NAMESPACE:
		return "Namespace";
	case VALUE_FUNCTION:
		return "function";
	case VALUE_METHOD:
		return "builtin_function_or_method";
	case VALUE_MACRO:
		return "Macro";
	case VALUE_LOOP:
		return "LoopContext";
	case VALUE_CYCLER:
		return "Cycler";
	case VALUE_JOINER:
		return "Joiner";
	default:
		return "missing";
	}
}

static bool add_repr(struct render *r, struct text *t, const struct value *v, int depth);

static bool add_quoted(struct render *r, struct text *t, const struct value *s)
{
	const char *p = s->s->p;
	size_t n = s->s->n;
	char quote = n && memchr(p, '\'', n) && !memchr(p, '"', n) ? '"' : '\'';
	if (!text_add(r, t, &quote, 1, VALUE_TRUSTED))
		return false;
	size_t plain = 0; /* bytes from here on are copied as they are */
	for (size_t i = 0; i < n;) {
		uint32_t cp;
		size_t len = char_next(p + i, n - i, &cp);
		char escape[12];
		escape[0] = '\0';
		if (cp == (uint32_t)quote || cp == '\\')
			sprintf(escape, "\\%c", (char)cp);
		else if (cp == '\n' || cp == '\r' || cp == '\t')
			sprintf(escape, "\\%c", cp == '\n' ? 'n' : cp == '\r' ? 'r' : 't');
		else if (cp < 0x80 ? cp < 0x20 || cp == 0x7f : !char_is_printable(cp))
			sprintf(escape, cp < 0x100 ? "\\x%02x" : cp < 0x10000 ? "\\u%04x" : "\\U%08x", cp);
		if (escape[0]) {
			if (!text_add_part(r, t, s, plain, i) ||
			    !text_add_as(r, t, escape, strlen(escape), s, i, i + len))
				return false;
			plain = i + len;
		}
		i += len;
	}
	return text_add_part(r, t, s, plain, n) && text_add(r, t, &quote, 1, VALUE_TRUSTED);
}

static bool add_items(struct render *r, struct text *t, const struct value *items, size_t n, const char *open,
		      const char *close, int depth)
{
	if (!text_puts(r, t, open))
		return false;
	for (size_t i = 0; i < n; i++)
		if ((i && !text_puts(r, t, ", ")) || !add_repr(r, t, &items[i], depth + 1))
			return false;
	return text_puts(r, t, close);
}

static bool add_dict(struct render *r, struct text *t, const struct value_dict *d, int depth)
{
	if (!text_puts(r, t, "{"))
		return false;
	for (size_t i = 0; i < d->n; i++)
		if ((i && !text_puts(r, t, ", ")) || !add_repr(r, t, &d->entries[i].key, depth + 1) ||
		    !text_puts(r, t, ": ") || !add_repr(r, t, &d->entries[i].value, depth + 1))
			return false;
	return text_puts(r, t, "}");
}

static bool add_view(struct render *r, struct text *t, const struct value *v, int depth)
{
	const struct value_dict *d = v->view->dict;
	if (!text_puts(r, t, type_name(v)) || !text_puts(r, t, "(["))
		return false;
	for (size_t i = 0; i < d->n; i++) {
		if (i && !text_puts(r, t, ", "))
			return false;
		bool pair = v->view->kind == VIEW_ITEMS;
		if ((pair && !text_puts(r, t, "(")) ||
		    (v->view->kind != VIEW_VALUES && !add_repr(r, t, &d->entries[i].key, depth + 1)) ||
		    (pair && !text_puts(r, t, ", ")) ||
		    (v->view->kind != VIEW_KEYS && !add_repr(r, t, &d->entries[i].value, depth + 1)) ||
		    (pair && !text_puts(r, t, ")")))
			return false;
	}
	return text_puts(r, t, "])");
}

static bool add_other(struct render *r, struct text *t, const struct value *v)
{
	char s[160];
	switch (v->type) {
	case VALUE_RANGE:
		snprintf(s, sizeof s, v->range->step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)",
			 (long long)v->range->start, (long long)v->range->stop, (long long)v->range->step);
		break;
	case VALUE_MACRO:
		return text_puts(r, t, "<Macro '") &&
		       text_add(r, t, v->macro->function->name.p, v->macro->function->name.n, VALUE_TRUSTED) &&
		       text_puts(r, t, "'>");
	case VALUE_LOOP:
		snprintf(s, sizeof s, "<LoopContext %lld/%lld>", (long long)v->loop->index0 + 1, (long long)v->loop->n);
		break;
	case VALUE_FUNCTION:
		snprintf(s, sizeof s, "<function %s>", v->function->name);
		break;
	case VALUE_METHOD:
		snprintf(s, sizeof s, "<built-in method %s of %s object>", v->method->builtin->name,
			 type_name(&v->method->self));
		break;
	default:
		snprintf(s, sizeof s, "<%s object>", type_name(v));
	}
	return text_puts(r, t, s);
}

static bool add_repr(struct render *r, struct text *t, const struct value *v, int depth)
{
	char s[40];
	if (depth > MAX_VALUE_DEPTH)
		return render_limit(r, "a value is nested too deeply to be printed");
	if (!render_spend(r, 1))
		return false;
	switch (v->type) {
	case VALUE_NONE:
		return text_add(r, t, "None", 4, v->origin);
	case VALUE_BOOL:
		return text_add(r, t, v->b ? "True" : "False", v->b ? 4 : 5, v->origin);
	case VALUE_INT:
		snprintf(s, sizeof s, "%lld", (long long)v->i);
		return text_add(r, t, s, strlen(s), v->origin);
	case VALUE_FLOAT:
		format_float(v->f, s);
		return text_add(r, t, s, strlen(s), v->origin);
	case VALUE_STRING:
		if (!(v->flags & VALUE_MARKUP))
			return add_quoted(r, t, v);
		return text_puts(r, t, "Markup(") && add_quoted(r, t, v) && text_puts(r, t, ")");
	case VALUE_LIST:
		return add_items(r, t, v->seq->items, v->seq->n, "[", "]", depth);
	case VALUE_TUPLE:
		return add_items(r, t, v->seq->items, v->seq->n, "(", v->seq->n == 1 ? ",)" : ")", depth);
	case VALUE_DICT:
		return add_dict(r, t, v->dict, depth);
	case VALUE_NAMESPACE:
		return text_puts(r, t, "<Namespace ") && add_dict(r, t, v->dict, depth) && text_puts(r, t, ">");
	case VALUE_UNDEFINED:
		return text_puts(r, t, "Undefined");
	case VALUE_VIEW:
		return add_view(r, t, v, depth);
	default:
		return add_other(r, t, v);
	}
}

bool text_add_repr(struct render *r, struct text *t, const struct value *v)
{
	return add_repr(r, t, v, 0);
}

bool text_add_str(struct render *r, struct text *t, const struct value *v)
{
	if (v->type == VALUE_STRING)
		return text_add_value(r, t, v);
	if (v->type == VALUE_UNDEFINED)
		return true;
	return add_repr(r, t, v, 0);
}

bool value_to_string(struct render *r, const struct value *v, struct value *out)
{
	if (v->type == VALUE_STRING) {
		*out = *v;
		return true;
	}
	struct text t = {0};
	return text_add_str(r, &t, v) && text_finish(r, &t, out);
}

const char *describe(struct render *r, const struct value *v, char *out, size_t n)
{
	struct text t = {0};
	struct value cut = *v;
	if (v->type == VALUE_STRING && v->s->n > n && !string_part(r, v, 0, string_offset(v->s, n / 4), &cut))
		cut = val_none();
	if (!text_add_repr(r, &t, &cut) || t.n == 0)
		snprintf(out, n, "a %s", type_name(v));
	else
		snprintf(out, n, "%.*s", (int)(t.n < n ? t.n : n), t.p);
	return out;
}
