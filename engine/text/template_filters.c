/* Filters on text and numbers, and the table lookup of all filters. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/utf8.h"
#include "engine/text/template_render.h"
#include "engine/text/template_unicode.h"

/* Applies a method of str to str(self), with the filter's own arguments or `args`. */
static bool via_method(struct call *c, const char *method, const struct value *args, size_t n)
{
	struct value s;
	struct arguments a = {.args = (struct value *)args, .n = n};
	const struct builtin *fn = builtin_find(string_methods, n_string_methods, str_from(method));
	return value_to_string(c->r, &c->self, &s) && call_builtin(c->r, fn, &s, &a, c->out);
}

static bool run_upper(struct call *c)
{
	return via_method(c, "upper", NULL, 0);
}

static bool run_lower(struct call *c)
{
	return via_method(c, "lower", NULL, 0);
}

static bool run_capitalize(struct call *c)
{
	return via_method(c, "capitalize", NULL, 0);
}

static bool run_trim(struct call *c)
{
	return via_method(c, "strip", c->arg, val_given(&c->arg[0]));
}

static bool run_center(struct call *c)
{
	struct value width = val_given(&c->arg[0]) ? c->arg[0] : val_int(80);
	return via_method(c, "center", &width, 1);
}

static bool run_replace(struct call *c)
{
	struct value args[3];
	if (!value_to_string(c->r, &c->arg[0], &args[0]) || !value_to_string(c->r, &c->arg[1], &args[1]))
		return false;
	args[2] = val_given(&c->arg[2]) && c->arg[2].type != VALUE_NONE ? c->arg[2] : val_int(-1);
	if (!via_method(c, "replace", args, 3))
		return false;
	c->out->flags = 0;
	return true;
}

/* Unlike the method of str, capitalises after spaces and opening brackets only. */
static bool run_title(struct call *c)
{
	struct value s;
	struct text t = {0};
	bool start = true;
	if (!value_to_string(c->r, &c->self, &s) || !render_spend(c->r, s.s->n / 16))
		return false;
	for (size_t i = 0; i < s.s->n;) {
		uint32_t cp, mapped[3];
		char utf8[12];
		size_t n = 0, len = char_next(s.s->p + i, s.s->n - i, &cp);
		bool separator = char_is_space(cp) || (cp < 0x80 && strchr("-({[<", (int)cp));
		int count = char_map(cp, start ? CASE_UPPER : CASE_LOWER, mapped);
		for (int k = 0; k < count; k++)
			n += utf8_encode(mapped[k], utf8 + n);
		if (!(separator || cp == 0xfffd ? text_add_part(c->r, &t, &s, i, i + len)
						: text_add_as(c->r, &t, utf8, n, &s, i, i + len)))
			return false;
		start = separator;
		i += len;
	}
	return text_finish(c->r, &t, c->out);
}

static bool run_string(struct call *c)
{
	return value_to_string(c->r, &c->self, c->out);
}

static bool run_safe(struct call *c)
{
	if (!value_to_string(c->r, &c->self, c->out))
		return false;
	c->out->flags |= VALUE_MARKUP;
	return true;
}

static const char *entity(char ch)
{
	switch (ch) {
	case '&':
		return "&amp;";
	case '<':
		return "&lt;";
	case '>':
		return "&gt;";
	case '\'':
		return "&#39;";
	case '"':
		return "&#34;";
	default:
		return NULL;
	}
}

static bool escape(struct call *c, const struct value *s)
{
	struct text t = {0};
	size_t plain = 0;
	if (!render_spend(c->r, s->s->n / 16))
		return false;
	for (size_t i = 0; i < s->s->n; i++) {
		const char *e = entity(s->s->p[i]);
		if (!e)
			continue;
		if (!text_add_part(c->r, &t, s, plain, i) || !text_add_as(c->r, &t, e, strlen(e), s, i, i + 1))
			return false;
		plain = i + 1;
	}
	if (!text_add_part(c->r, &t, s, plain, s->s->n) || !text_finish(c->r, &t, c->out))
		return false;
	c->out->flags = VALUE_MARKUP;
	return true;
}

static bool run_escape(struct call *c)
{
	struct value s;
	if (c->self.type == VALUE_STRING && (c->self.flags & VALUE_MARKUP)) {
		*c->out = c->self;
		return true;
	}
	return value_to_string(c->r, &c->self, &s) && escape(c, &s);
}

static bool run_forceescape(struct call *c)
{
	struct value s;
	return value_to_string(c->r, &c->self, &s) && escape(c, &s);
}

static bool run_default(struct call *c)
{
	bool boolean = false;
	truth_arg(c, 1, &boolean);
	if (c->self.type != VALUE_UNDEFINED && !(boolean && !value_truth(&c->self))) {
		*c->out = c->self;
		return true;
	}
	*c->out = c->arg[0];
	return val_given(&c->arg[0]) || string_new(c->r, "", 0, VALUE_TRUSTED, c->out);
}

/* ---- Layout ---- */

static bool indentation(struct call *c, struct value *out)
{
	struct value space;
	if (c->arg[0].type == VALUE_STRING) {
		*out = c->arg[0];
		return true;
	}
	int64_t width = 4;
	return int_arg(c, 0, &width) && string_new(c->r, " ", 1, VALUE_TRUSTED, &space) &&
	       op_repeat(c->r, &space, width, out);
}

static bool run_indent(struct call *c)
{
	bool first = false, blank = false;
	struct value indent, lines_value;
	struct text t = {0};
	const struct arguments none = {0};
	const struct builtin *splitlines = builtin_find(string_methods, n_string_methods, str_from("splitlines"));
	truth_arg(c, 1, &first);
	truth_arg(c, 2, &blank);
	if (c->self.type == VALUE_UNDEFINED)
		return undefined_fail(c->r, &c->self);
	if (c->self.type != VALUE_STRING)
		return render_fail(c->r, "unsupported operand type(s) for +=: '%s' and 'str'", type_name(&c->self));
	/* A line end is added first, so that one at the end of the text begins one more, empty line. */
	struct value newline, text;
	if (!indentation(c, &indent) || !string_new(c->r, "\n", 1, VALUE_TRUSTED, &newline) ||
	    !string_concat(c->r, &c->self, &newline, &text) ||
	    !call_builtin(c->r, splitlines, &text, &none, &lines_value))
		return false;
	const struct value_seq *lines = lines_value.seq;
	for (size_t i = 0; i < lines->n; i++) {
		bool indented = i == 0 ? first : blank || lines->items[i].s->n > 0;
		if ((i && !text_puts(c->r, &t, "\n")) || (indented && !text_add_value(c->r, &t, &indent)) ||
		    !text_add_value(c->r, &t, &lines->items[i]))
			return false;
	}
	if (!text_finish(c->r, &t, c->out))
		return false;
	c->out->flags = c->self.flags;
	return true;
}

static bool run_truncate(struct call *c)
{
	int64_t length = 255, leeway = 5;
	bool killwords = false;
	struct value s, end, part;
	truth_arg(c, 1, &killwords);
	if (c->self.type == VALUE_UNDEFINED) {
		*c->out = c->self;
		return true;
	}
	if (c->self.type != VALUE_STRING)
		return render_fail(c->r, "truncate needs a string, not %s", type_name(&c->self));
	s = c->self;
	if (!int_arg(c, 0, &length) || !int_or_none_arg(c, 3, &leeway) ||
	    !string_new(c->r, "...", 3, VALUE_TRUSTED, &end) || !string_arg(c, 2, &end))
		return false;
	int64_t n_end = (int64_t)end.s->n_chars;
	if (length < n_end)
		return render_fail(c->r, "expected length >= %lld, got %lld", (long long)n_end, (long long)length);
	if (leeway < 0)
		return render_fail(c->r, "expected leeway >= 0, got %lld", (long long)leeway);
	*c->out = s;
	if ((int64_t)s.s->n_chars <= length || (int64_t)s.s->n_chars - length <= leeway)
		return true;
	size_t to = string_offset(s.s, (size_t)(length - n_end));
	if (!killwords) {
		const char *space = memrchr(s.s->p, ' ', to);
		to = space ? (size_t)(space - s.s->p) : to;
	}
	return string_part(c->r, &s, 0, to, &part) && string_concat(c->r, &part, &end, c->out);
}

static bool run_wordcount(struct call *c)
{
	struct value s;
	int64_t count = 0;
	bool in_word = false;
	if (!value_to_string(c->r, &c->self, &s) || !render_spend(c->r, s.s->n / 16))
		return false;
	for (size_t i = 0; i < s.s->n;) {
		uint32_t cp;
		i += char_next(s.s->p + i, s.s->n - i, &cp);
		bool word = cp == '_' || char_is_alnum(cp);
		count += word && !in_word;
		in_word = word;
	}
	*c->out = val_int(count);
	return true;
}

static bool run_format(struct call *c)
{
	struct value format, values;
	if (c->raw.n && c->raw.n_keywords)
		return render_fail(c->r, "can't handle positional and keyword arguments at the same time");
	if (!value_to_string(c->r, &c->self, &format))
		return false;
	if (!c->raw.n_keywords)
		return new_tuple(c->r, c->raw.args, c->raw.n, &values) &&
		       format_percent(c->r, &format, &values, c->out);
	if (!new_dict(c->r, &values))
		return false;
	for (size_t i = 0; i < c->raw.n_keywords; i++) {
		struct value key;
		struct str name = c->raw.keywords[i].name;
		if (!string_new(c->r, name.p, name.n, VALUE_TRUSTED, &key) ||
		    !dict_put(c->r, values.dict, &key, c->raw.keywords[i].value))
			return false;
	}
	return format_percent(c->r, &format, &values, c->out);
}

static bool add_quoted(struct call *c, struct text *t, const struct value *v, bool form)
{
	struct value s;
	static const char hex[] = "0123456789ABCDEF";
	if (!value_to_string(c->r, v, &s) || !render_spend(c->r, s.s->n / 16))
		return false;
	for (size_t i = 0; i < s.s->n; i++) {
		unsigned char b = (unsigned char)s.s->p[i];
		bool plain = (b >= '0' && b <= '9') || ((b | 32) >= 'a' && (b | 32) <= 'z') ||
			     (b && strchr("_.-~", b)) || (b == '/' && !form);
		char escaped[3] = {'%', hex[b >> 4], hex[b & 15]};
		if (!(plain		 ? text_add_part(c->r, t, &s, i, i + 1)
		      : b == ' ' && form ? text_add_as(c->r, t, "+", 1, &s, i, i + 1)
					 : text_add_as(c->r, t, escaped, 3, &s, i, i + 1)))
			return false;
	}
	return true;
}

static bool run_urlencode(struct call *c)
{
	struct text t = {0};
	if (c->self.type == VALUE_STRING || !value_is_iterable(&c->self))
		return add_quoted(c, &t, &c->self, false) && text_finish(c->r, &t, c->out);
	struct value pairs = c->self;
	struct view view = {c->self.dict, VIEW_ITEMS};
	struct value_seq *items, *pair;
	if (c->self.type == VALUE_DICT)
		pairs = (struct value){.type = VALUE_VIEW, .view = &view};
	if (!value_items(c->r, &pairs, &items))
		return false;
	for (size_t i = 0; i < items->n; i++) {
		if (!value_items(c->r, &items->items[i], &pair))
			return false;
		if (pair->n != 2)
			return render_fail(c->r, "urlencode needs pairs of key and value");
		if ((i && !text_puts(c->r, &t, "&")) || !add_quoted(c, &t, &pair->items[0], true) ||
		    !text_puts(c->r, &t, "=") || !add_quoted(c, &t, &pair->items[1], true))
			return false;
	}
	return text_finish(c->r, &t, c->out);
}

static bool run_tojson(struct call *c)
{
	struct json_style style = {.indent = c->arg[1]};
	struct text t = {0};
	truth_arg(c, 0, &style.ensure_ascii);
	truth_arg(c, 3, &style.sort_keys);
	const struct value *separators = &c->arg[2];
	if (val_given(&style.indent) && style.indent.type != VALUE_NONE && style.indent.type != VALUE_STRING &&
	    !val_is_integer(&style.indent))
		return render_fail(c->r, "tojson: indent must be an integer or a string, not %s",
				   type_name(&style.indent));
	if (val_given(separators) && separators->type != VALUE_NONE) {
		if ((separators->type != VALUE_TUPLE && separators->type != VALUE_LIST) || separators->seq->n != 2 ||
		    separators->seq->items[0].type != VALUE_STRING || separators->seq->items[1].type != VALUE_STRING)
			return render_fail(c->r, "tojson: separators must be a pair of strings");
		style.item_separator = separators->seq->items[0];
		style.key_separator = separators->seq->items[1];
	}
	return text_add_json(c->r, &t, &c->self, &style) && text_finish(c->r, &t, c->out);
}

/* ---- Numbers ---- */

static bool run_abs(struct call *c)
{
	if (c->self.type == VALUE_UNDEFINED)
		return undefined_fail(c->r, &c->self);
	if (!val_is_number(&c->self))
		return render_fail(c->r, "bad operand type for abs(): '%s'", type_name(&c->self));
	if (c->self.type == VALUE_FLOAT) {
		*c->out = val_float(fabs(c->self.f));
	} else if (val_as_int(&c->self) < 0) {
		return op_negate(c->r, &c->self, c->out);
	} else {
		*c->out = val_int(val_as_int(&c->self));
	}
	c->out->origin = c->self.origin;
	return true;
}

/*
 * The number in a string, without the spaces around it and the underscores in it; false when it is too long to be one.
 */
static bool number_text(const struct value *s, char *out, size_t size)
{
	const char *p = s->s->p;
	size_t from = 0, to = s->s->n, n = 0;
	uint32_t cp;
	while (from < to) {
		size_t len = char_next(p + from, to - from, &cp);
		if (!char_is_space(cp))
			break;
		from += len;
	}
	while (to > from) {
		size_t last = from + char_prev(p + from, to - from);
		char_next(p + last, to - last, &cp);
		if (!char_is_space(cp))
			break;
		to = last;
	}
	for (size_t i = from; i < to; i++) {
		bool between = i > from && i + 1 < to && p[i - 1] != '_' && p[i + 1] != '_' && p[i - 1] != '+' &&
			       p[i - 1] != '-';
		if (p[i] == '_' && between)
			continue;
		if (n + 1 >= size || p[i] == '\0')
			return false;
		out[n++] = p[i];
	}
	out[n] = '\0';
	return n > 0;
}

enum parse_result { PARSE_OK, PARSE_BAD, PARSE_RANGE };

/* int(text, base) */
static enum parse_result parse_int(const struct value *s, int base, int64_t *out)
{
	char text[400], *end;
	if (!number_text(s, text, sizeof text))
		return PARSE_BAD;
	char *p = text;
	bool negative = *p == '-';
	p += *p == '-' || *p == '+';
	if (p[0] == '0' && p[1]) {
		int prefixed = (p[1] | 32) == 'x' ? 16 : (p[1] | 32) == 'o' ? 8 : (p[1] | 32) == 'b' ? 2 : 0;
		if (prefixed && (base == 0 || base == prefixed)) {
			p += 2;
			base = prefixed;
		} else if (base == 0 && strspn(p, "0") != strlen(p)) {
			return PARSE_BAD;
		}
	}
	if (base == 0)
		base = 10;
	if (!((*p >= '0' && *p <= '9') || ((*p | 32) >= 'a' && (*p | 32) <= 'z')))
		return PARSE_BAD;
	if (base == 16 && p[0] == '0' && (p[1] | 32) == 'x') /* strtoll would take a second prefix */
		return PARSE_BAD;
	if (negative)
		*--p = '-';
	errno = 0;
	*out = strtoll(p, &end, base);
	return *end ? PARSE_BAD : errno == ERANGE ? PARSE_RANGE : PARSE_OK;
}

/* float(text): decimal notation, inf and nan; none of the hexadecimal that strtod would take. */
static bool parse_float(const struct value *s, double *out)
{
	char text[800], *end;
	if (!number_text(s, text, sizeof text) || strpbrk(text, "xXpP("))
		return false;
	if (text[0] == ' ')
		return false;
	*out = strtod(text, &end);
	return end != text && !*end;
}

static bool float_to_int(struct call *c, double f, bool *ok)
{
	*ok = isfinite(f);
	if (!*ok)
		return true;
	if (!(fabs(f) < 0x1p63))
		return render_limit(c->r, "integers beyond 64 bits are not supported");
	*c->out = val_int((int64_t)f);
	return true;
}

static bool run_int(struct call *c)
{
	int64_t base = 10, i;
	bool ok = false;
	const struct value *v = &c->self;
	if (!int_arg(c, 1, &base))
		return false;
	if (v->type == VALUE_UNDEFINED)
		return undefined_fail(c->r, v);
	if (v->type == VALUE_STRING) {
		enum parse_result result =
			base == 0 || (base >= 2 && base <= 36) ? parse_int(v, (int)base, &i) : PARSE_BAD;
		double f;
		if (result == PARSE_RANGE)
			return render_limit(c->r, "integers beyond 64 bits are not supported");
		if (result == PARSE_OK) {
			*c->out = val_int(i);
			ok = true;
		} else if (parse_float(v, &f) && !float_to_int(c, f, &ok)) {
			return false;
		}
	} else if (v->type == VALUE_FLOAT) {
		if (!isfinite(v->f) && !isnan(v->f))
			return render_fail(c->r, "cannot convert float infinity to integer");
		if (!float_to_int(c, v->f, &ok))
			return false;
	} else if (val_is_integer(v)) {
		*c->out = val_int(val_as_int(v));
		ok = true;
	}
	if (!ok)
		*c->out = val_given(&c->arg[0]) ? c->arg[0] : val_int(0);
	else
		c->out->origin = v->origin == VALUE_TRUSTED ? VALUE_TRUSTED : VALUE_DATA;
	return true;
}

static bool run_float(struct call *c)
{
	double f;
	const struct value *v = &c->self;
	if (v->type == VALUE_UNDEFINED)
		return undefined_fail(c->r, v);
	if (v->type == VALUE_STRING ? parse_float(v, &f) : val_is_number(v)) {
		*c->out = val_float(v->type == VALUE_STRING ? f : val_as_double(v));
		c->out->origin = v->origin == VALUE_TRUSTED ? VALUE_TRUSTED : VALUE_DATA;
	} else {
		*c->out = val_given(&c->arg[0]) ? c->arg[0] : val_float(0);
	}
	return true;
}

/* round(i, -digits), to even. */
static bool round_int(struct call *c, int64_t i, int64_t digits)
{
	int64_t unit = 1;
	for (; digits > 0; digits--)
		if (__builtin_mul_overflow(unit, (int64_t)10, &unit)) {
			*c->out = val_int(0);
			return true;
		}
	int64_t rest = i % unit;
	if (rest < 0)
		rest += unit;
	int64_t low = i - rest;
	bool up = rest > unit - rest || (rest == unit - rest && (low / unit) % 2 != 0);
	if (up && __builtin_add_overflow(low, unit, &low))
		return render_limit(c->r, "integers beyond 64 bits are not supported");
	*c->out = val_int(low);
	return true;
}

static bool run_round(struct call *c)
{
	int64_t precision = 0;
	struct value method = {.type = VALUE_MISSING};
	if (!int_arg(c, 0, &precision) || !string_arg(c, 1, &method))
		return false;
	const struct value *v = &c->self;
	if (v->type == VALUE_UNDEFINED)
		return undefined_fail(c->r, v);
	if (!val_is_number(v))
		return render_fail(c->r, "type %s doesn't define __round__ method", type_name(v));
	bool common = !val_given(&method) || str_is(val_str(&method), "common");
	double f = val_as_double(v);
	if (common && v->type != VALUE_FLOAT) {
		if (!round_int(c, val_as_int(v), precision < 0 ? -precision : 0))
			return false;
	} else if (common) {
		char text[700];
		if (!isfinite(f) || precision > 330) {
			*c->out = val_float(f);
		} else if (precision >= 0) {
			snprintf(text, sizeof text, "%.*f", (int)precision, f);
			*c->out = val_float(strtod(text, NULL));
		} else {
			double unit = pow(10, (double)-precision);
			*c->out = val_float(isfinite(unit) ? rint(f / unit) * unit : copysign(0, f));
		}
	} else {
		double unit = pow(10, (double)precision);
		bool up = str_is(val_str(&method), "ceil");
		if (!up && !str_is(val_str(&method), "floor"))
			return render_fail(c->r, "method must be common, ceil or floor");
		*c->out = val_float((up ? ceil(f * unit) : floor(f * unit)) / unit);
	}
	c->out->origin = v->origin;
	return true;
}

static bool run_filesizeformat(struct call *c)
{
	static const char *const units[2][8] = {{"kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"},
						{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"}};
	bool binary = false;
	double bytes;
	char text[400];
	truth_arg(c, 0, &binary);
	if (c->self.type == VALUE_STRING ? !parse_float(&c->self, &bytes) : !val_is_number(&c->self))
		return render_fail(c->r, "could not convert %s to float", type_name(&c->self));
	if (c->self.type != VALUE_STRING)
		bytes = val_as_double(&c->self);
	double base = binary ? 1024 : 1000, unit = base;
	if (bytes == 1) {
		strcpy(text, "1 Byte");
	} else if (bytes < base) {
		snprintf(text, sizeof text, "%.0f Bytes", trunc(bytes));
	} else {
		int i = 0;
		for (; i < 7 && bytes >= unit * base; i++)
			unit *= base;
		snprintf(text, sizeof text, "%.1f %s", bytes / unit, units[binary][i]);
	}
	return string_new(c->r, text, strlen(text), c->self.origin, c->out);
}

static const struct builtin text_filters[] = {
	{"abs", "", run_abs},
	{"capitalize", "", run_capitalize},
	{"center", "?width", run_center},
	{"d", "?default_value boolean", run_default},
	{"default", "?default_value boolean", run_default},
	{"e", "", run_escape},
	{"escape", "", run_escape},
	{"filesizeformat", "?binary", run_filesizeformat},
	{"float", "?default", run_float},
	{"forceescape", "", run_forceescape},
	{"format", NULL, run_format},
	{"indent", "?width first blank", run_indent},
	{"int", "?default base", run_int},
	{"lower", "", run_lower},
	{"replace", "old new ?count", run_replace},
	{"round", "?precision method", run_round},
	{"safe", "", run_safe},
	{"string", "", run_string},
	{"title", "", run_title},
	{"tojson", "?ensure_ascii indent separators sort_keys", run_tojson},
	{"trim", "?chars", run_trim},
	{"truncate", "?length killwords end leeway", run_truncate},
	{"upper", "", run_upper},
	{"urlencode", "", run_urlencode},
	{"wordcount", "", run_wordcount},
};

const struct builtin *builtin_filter(struct str name)
{
	const struct builtin *found = builtin_find(text_filters, sizeof text_filters / sizeof *text_filters, name);
	return found ? found : builtin_find(sequence_filters, n_sequence_filters, name);
}
