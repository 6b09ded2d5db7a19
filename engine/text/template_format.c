/* Python's two ways to format: "%s" % x and "{}".format(x), with their number formats. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/utf8.h"
#include "engine/text/template_render.h"
#include "engine/text/template_unicode.h"

enum { MAX_WIDTH = 1 << 20, MAX_PRECISION = 300, NUMBER_BYTES = 1100 };

/* A format, from either notation. */
struct spec {
	char fill[5]; /* one character */
	char align;   /* < > = ^, or 0 */
	char sign;    /* + - space, or 0 */
	bool alternate, zero;
	char group;		  /* , _ or 0 */
	int64_t width, precision; /* -1: none */
	char type;		  /* 0: none */
};

static bool pad(struct render *r, struct text *t, const char *fill, int64_t n)
{
	for (; n > 0; n--)
		if (!render_spend(r, 1) || !text_puts(r, t, fill))
			return false;
	return true;
}

/*
 * Puts text of n_chars characters into the field's width; `lead` bytes of it (sign, 0x) stay in front of '=' padding.
 */
static bool add_field(struct render *r, struct text *t, const struct spec *spec, const struct value *s, size_t lead,
		      char default_align)
{
	int64_t missing = spec->width - (int64_t)s->s->n_chars;
	char align = spec->align ? spec->align : default_align;
	const char *fill = spec->fill[0] ? spec->fill : " ";
	if (missing <= 0)
		return text_add_value(r, t, s);
	int64_t left = align == '<' ? 0 : align == '^' ? missing / 2 : missing;
	if (align == '=')
		return text_add_part(r, t, s, 0, lead) && pad(r, t, fill, missing) &&
		       text_add_part(r, t, s, lead, s->s->n);
	return pad(r, t, fill, left) && text_add_value(r, t, s) && pad(r, t, fill, missing - left);
}

static bool add_text_field(struct render *r, struct text *t, const struct spec *spec, const struct value *s, char align)
{
	struct value cut = *s;
	if (spec->precision >= 0 && spec->precision < (int64_t)s->s->n_chars &&
	    !string_part(r, s, 0, string_offset(s->s, (size_t)spec->precision), &cut))
		return false;
	return add_field(r, t, spec, &cut, 0, align);
}

/* Inserts separators into the integer part of digits[*n]; the buffer has room. */
static void group_digits(char *digits, size_t *n, size_t n_integer, char group, size_t every)
{
	size_t n_groups = n_integer ? (n_integer - 1) / every : 0;
	memmove(digits + n_integer + n_groups, digits + n_integer, *n - n_integer);
	for (size_t i = n_integer, o = n_integer + n_groups, k = 0; i > 0; k++) {
		if (k && k % every == 0)
			digits[--o] = group;
		digits[--o] = digits[--i];
	}
	*n += n_groups;
}

/* Sign, prefix and digits as a field. */
static bool add_number_field(struct render *r, struct text *t, const struct spec *spec, bool negative,
			     const char *prefix, char *digits, size_t n, size_t n_integer, uint8_t origin)
{
	char whole[NUMBER_BYTES];
	size_t lead = 0;
	if (negative)
		whole[lead++] = '-';
	else if (spec->sign == '+' || spec->sign == ' ')
		whole[lead++] = spec->sign;
	size_t n_prefix = strlen(prefix);
	memcpy(whole + lead, prefix, n_prefix);
	lead += n_prefix;
	struct spec s = *spec;
	bool zeros = spec->zero && !spec->align;
	if (zeros)
		s.align = '=';
	if (spec->zero && !spec->fill[0])
		strcpy(s.fill, "0");
	if (spec->group) {
		size_t every =
			prefix[0] || spec->type == 'x' || spec->type == 'X' || spec->type == 'b' || spec->type == 'o'
				? 4
				: 3;
		/* Zero padding takes part in the grouping. */
		while (zeros && s.width <= MAX_PRECISION && n_integer > 0 &&
		       (int64_t)(lead + n + (n_integer - 1) / every) < s.width) {
			memmove(digits + 1, digits, n);
			digits[0] = '0';
			n++;
			n_integer++;
		}
		group_digits(digits, &n, n_integer, spec->group, every);
	}
	memcpy(whole + lead, digits, n);
	struct value v = {0};
	return string_new(r, whole, lead + n, origin, &v) && add_field(r, t, &s, &v, lead, '>');
}

static bool add_int(struct render *r, struct text *t, const struct spec *spec, const struct value *v)
{
	int64_t i = val_as_int(v);
	uint64_t u = i < 0 ? 0 - (uint64_t)i : (uint64_t)i;
	char digits[NUMBER_BYTES];
	const char *prefix = "";
	unsigned base = 10;
	size_t n = 0;
	switch (spec->type) {
	case 'b':
		base = 2;
		prefix = spec->alternate ? "0b" : "";
		break;
	case 'o':
		base = 8;
		prefix = spec->alternate ? "0o" : "";
		break;
	case 'x':
	case 'X':
		base = 16;
		prefix = !spec->alternate ? "" : spec->type == 'x' ? "0x" : "0X";
		break;
	default:
		break;
	}
	char reversed[72];
	do {
		reversed[n++] = (spec->type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef")[u % base];
		u /= base;
	} while (u);
	/* A precision (of % formats) is a least number of digits. */
	size_t zeros = spec->precision > (int64_t)n ? (size_t)spec->precision - n : 0;
	memset(digits, '0', zeros);
	for (size_t k = 0; k < n; k++)
		digits[zeros + k] = reversed[n - 1 - k];
	n += zeros;
	return add_number_field(r, t, spec, i < 0, prefix, digits, n, n, v->origin);
}

static bool add_float(struct render *r, struct text *t, const struct spec *spec, const struct value *v)
{
	double f = val_as_double(v);
	char digits[NUMBER_BYTES];
	bool negative = signbit(f) && !isnan(f);
	double x = fabs(f);
	char type = spec->type;
	int precision = spec->precision >= 0 ? (int)spec->precision : 6;
	if (!isfinite(f)) {
		strcpy(digits, isnan(f) ? "nan" : "inf");
		if (type == 'E' || type == 'F' || type == 'G')
			for (char *c = digits; *c; c++)
				*c = (char)(*c - 32);
		if (type == '%')
			strcat(digits, "%");
		struct spec plain = *spec;
		plain.group = 0;
		return add_number_field(r, t, &plain, negative, "", digits, strlen(digits), strlen(digits), v->origin);
	}
	if (type == 0 && spec->precision < 0) {
		format_float(x, digits);
	} else if (type == 0) {
		/* Like g, but with at least one digit after the point. */
		snprintf(digits, sizeof digits, "%.*g", precision ? precision : 1, x);
		if (!strpbrk(digits, ".e"))
			strcat(digits, ".0");
	} else if (type == '%') {
		snprintf(digits, sizeof digits - 1, "%.*f", precision, x * 100);
		strcat(digits, "%");
	} else {
		char c[12];
		snprintf(c, sizeof c, spec->alternate ? "%%#.*%c" : "%%.*%c", type);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
		snprintf(digits, sizeof digits, c, precision, x);
#pragma GCC diagnostic pop
	}
	size_t n_integer = strspn(digits, "0123456789");
	return add_number_field(r, t, spec, negative, "", digits, strlen(digits), n_integer, v->origin);
}

static bool add_char(struct render *r, struct text *t, const struct spec *spec, const struct value *v)
{
	char utf8[4];
	int64_t cp = val_as_int(v);
	size_t n = cp < 0 || cp > 0x10ffff ? 0 : utf8_encode((uint32_t)cp, utf8);
	if (n == 0)
		return render_fail(r, "%%c arg not in range(0x110000)");
	struct value s;
	return string_new(r, utf8, n, v->origin, &s) && add_field(r, t, spec, &s, 0, '>');
}

static int64_t read_digits(struct str s, size_t *at)
{
	int64_t n = 0;
	while (*at < s.n && s.p[*at] >= '0' && s.p[*at] <= '9') {
		n = n > MAX_WIDTH ? n : n * 10 + (s.p[*at] - '0');
		++*at;
	}
	return n;
}

static bool check_sizes(struct render *r, const struct spec *spec)
{
	if (spec->width > MAX_WIDTH || spec->precision > MAX_WIDTH)
		return render_limit(r, "a format is wider than %d", MAX_WIDTH);
	return true;
}

/* ---- % ---- */

struct percent {
	const struct value *values;
	const struct value_seq *tuple; /* NULL: one value */
	size_t at;
	bool by_name;
};

static bool next_value(struct render *r, struct percent *p, struct value *out)
{
	size_t n = p->tuple ? p->tuple->n : 1;
	if (p->at >= n)
		return render_fail(r, "not enough arguments for format string");
	*out = p->tuple ? p->tuple->items[p->at] : *p->values;
	p->at++;
	return true;
}

static bool next_size(struct render *r, struct percent *p, struct str f, size_t *at, int64_t *out)
{
	struct value v = {0};
	if (*at >= f.n || f.p[*at] != '*') {
		*out = read_digits(f, at);
		return true;
	}
	++*at;
	if (!next_value(r, p, &v))
		return false;
	if (!val_is_integer(&v))
		return render_fail(r, "* wants int");
	*out = val_as_int(&v);
	return true;
}

static bool number_wanted(struct render *r, char type, const struct value *v)
{
	if (v->type == VALUE_UNDEFINED)
		return undefined_fail(r, v);
	if (type == 'e' || type == 'E' || type == 'f' || type == 'F' || type == 'g' || type == 'G')
		return val_is_number(v) || render_fail(r, "must be real number, not %s", type_name(v));
	bool real_ok = type == 'd' || type == 'i' || type == 'u';
	if (val_is_integer(v) || (real_ok && v->type == VALUE_FLOAT))
		return true;
	return render_fail(r, "%%%c format: %s is required, not %s", type, real_ok ? "a real number" : "an integer",
			   type_name(v));
}

static bool add_conversion(struct render *r, struct text *t, struct spec *spec, const struct value *v)
{
	struct value s = *v;
	char type = spec->type;
	switch (type) {
	case 's':
		return value_to_string(r, v, &s) && add_text_field(r, t, spec, &s, '>');
	case 'r':
	case 'a': {
		struct text repr = {0};
		return text_add_repr(r, &repr, v) && text_finish(r, &repr, &s) && add_text_field(r, t, spec, &s, '>');
	}
	case 'c':
		if (v->type == VALUE_STRING && v->s->n_chars == 1)
			return add_field(r, t, spec, v, 0, '>');
		if (!val_is_integer(v))
			return render_fail(r, "%%c requires int or char");
		return add_char(r, t, spec, v);
	case 'd':
	case 'i':
	case 'u':
	case 'o':
	case 'x':
	case 'X':
		if (!number_wanted(r, type, v))
			return false;
		spec->type = type == 'i' || type == 'u' ? 'd' : type;
		if (v->type == VALUE_FLOAT) {
			if (!(fabs(v->f) < 0x1p63))
				return render_limit(r, "integers beyond 64 bits are not supported");
			s = val_int((int64_t)v->f);
			s.origin = v->origin;
		}
		if (spec->precision > MAX_PRECISION)
			return render_limit(r, "a number format is more precise than %d digits", MAX_PRECISION);
		return add_int(r, t, spec, &s);
	case 'e':
	case 'E':
	case 'f':
	case 'F':
	case 'g':
	case 'G':
		if (!number_wanted(r, type, v))
			return false;
		if (spec->precision > MAX_PRECISION)
			return render_limit(r, "a number format is more precise than %d digits", MAX_PRECISION);
		return add_float(r, t, spec, v);
	default:
		return render_fail(r, "unsupported format character '%c' (0x%x)", type < 0x20 ? '?' : type,
				   (unsigned char)type);
	}
}

/* One % conversion; *at is behind the %. */
static bool add_percent(struct render *r, struct text *t, const struct value *format, size_t *at, struct percent *p)
{
	struct str f = val_str(format);
	struct spec spec = {.width = 0, .precision = -1};
	struct value v = {.type = VALUE_MISSING};
	if (*at < f.n && f.p[*at] == '(') {
		size_t from = ++*at;
		while (*at < f.n && f.p[*at] != ')')
			++*at;
		if (*at >= f.n)
			return render_fail(r, "incomplete format key");
		struct value key;
		if (p->values->type != VALUE_DICT)
			return render_fail(r, "format requires a mapping");
		if (!string_part(r, format, from, *at, &key) || !dict_get(r, p->values->dict, &key, &v))
			return false;
		if (!val_given(&v))
			return render_fail(r, "KeyError: '%.*s'", *at - from > 80 ? 80 : (int)(*at - from), f.p + from);
		p->by_name = true;
		++*at;
	}
	bool left = false;
	for (; *at < f.n; ++*at) {
		char c = f.p[*at];
		if (c == '-')
			left = true;
		else if (c == '+' || (c == ' ' && spec.sign != '+'))
			spec.sign = c;
		else if (c == '#')
			spec.alternate = true;
		else if (c == '0')
			spec.zero = true;
		else if (c != ' ')
			break;
	}
	if (!next_size(r, p, f, at, &spec.width))
		return false;
	if (spec.width < 0) {
		left = true;
		spec.width = spec.width < -MAX_WIDTH ? MAX_WIDTH + 1 : -spec.width;
	}
	if (*at < f.n && f.p[*at] == '.') {
		++*at;
		if (!next_size(r, p, f, at, &spec.precision))
			return false;
		if (spec.precision < 0)
			spec.precision = 0;
	}
	while (*at < f.n && (f.p[*at] == 'l' || f.p[*at] == 'h' || f.p[*at] == 'L'))
		++*at;
	if (*at >= f.n)
		return render_fail(r, "incomplete format");
	spec.type = f.p[(*at)++];
	if (left) {
		spec.align = '<';
		spec.zero = false;
	}
	if (!check_sizes(r, &spec))
		return false;
	if (spec.type == '%')
		return text_puts(r, t, "%");
	if (!val_given(&v) && !next_value(r, p, &v))
		return false;
	return add_conversion(r, t, &spec, &v);
}

bool format_percent(struct render *r, const struct value *format, const struct value *values, struct value *out)
{
	struct percent p = {.values = values, .tuple = values->type == VALUE_TUPLE ? values->seq : NULL};
	struct str f = val_str(format);
	struct text t = {0};
	size_t plain = 0;
	for (size_t i = 0; i < f.n;) {
		if (f.p[i] != '%') {
			i++;
			continue;
		}
		if (!text_add_part(r, &t, format, plain, i))
			return false;
		i++;
		if (!add_percent(r, &t, format, &i, &p))
			return false;
		plain = i;
	}
	if (!text_add_part(r, &t, format, plain, f.n))
		return false;
	/* Python lets mappings and lists pass, for they might have been used by name. */
	bool lenient = values->type == VALUE_DICT || values->type == VALUE_LIST || values->type == VALUE_UNDEFINED;
	if (p.at < (p.tuple ? p.tuple->n : 1) && !lenient && !p.by_name)
		return render_fail(r, "not all arguments converted during string formatting");
	if (!text_finish(r, &t, out))
		return false;
	out->flags = format->flags;
	return true;
}

/* ---- {} ---- */

static bool is_align(char c)
{
	return c == '<' || c == '>' || c == '=' || c == '^';
}

static bool parse_spec(struct render *r, struct str s, struct spec *out)
{
	*out = (struct spec){.width = 0, .precision = -1};
	size_t at = 0;
	if (s.n > 0) {
		uint32_t cp;
		size_t len = char_next(s.p, s.n, &cp);
		if (len < s.n && len <= 4 && is_align(s.p[len])) {
			memcpy(out->fill, s.p, len);
			out->align = s.p[len];
			at = len + 1;
		} else if (is_align(s.p[0])) {
			out->align = s.p[0];
			at = 1;
		}
	}
	if (at < s.n && (s.p[at] == '+' || s.p[at] == '-' || s.p[at] == ' '))
		out->sign = s.p[at++];
	if (at < s.n && s.p[at] == 'z')
		at++;
	if (at < s.n && s.p[at] == '#') {
		out->alternate = true;
		at++;
	}
	if (at < s.n && s.p[at] == '0') {
		out->zero = true;
		at++;
	}
	out->width = read_digits(s, &at);
	if (at < s.n && (s.p[at] == ',' || s.p[at] == '_'))
		out->group = s.p[at++];
	if (at < s.n && s.p[at] == '.') {
		size_t from = ++at;
		out->precision = read_digits(s, &at);
		if (at == from)
			return render_fail(r, "Format specifier missing precision");
	}
	if (at < s.n)
		out->type = s.p[at++];
	if (at < s.n || (out->type & 0x80))
		return render_fail(r, "Invalid format specifier '%.*s'", s.n > 80 ? 80 : (int)s.n, s.p);
	return check_sizes(r, out);
}

/* format(value, spec) */
static bool add_formatted(struct render *r, struct text *t, const struct value *v, struct str spec_text)
{
	struct spec spec;
	if (spec_text.n == 0)
		return text_add_str(r, t, v);
	if (v->type == VALUE_UNDEFINED || !(val_is_number(v) || v->type == VALUE_STRING))
		return render_fail(r, "unsupported format string passed to %s.__format__", type_name(v));
	if (!parse_spec(r, spec_text, &spec))
		return false;
	if (v->type == VALUE_STRING) {
		if (spec.type && spec.type != 's')
			return render_fail(r, "Unknown format code '%c' for object of type 'str'", spec.type);
		if (spec.sign)
			return render_fail(r, "Sign not allowed in string format specifier");
		if (spec.align == '=')
			return render_fail(r, "'=' alignment not allowed in string format specifier");
		if (spec.group)
			return render_fail(r, "Cannot specify '%c' with 's'.", spec.group);
		if (spec.zero && !spec.fill[0])
			strcpy(spec.fill, "0");
		return add_text_field(r, t, &spec, v, '<');
	}
	if (spec.precision > MAX_PRECISION)
		return render_limit(r, "a number format is more precise than %d digits", MAX_PRECISION);
	if (spec.type == 'n')
		spec.type = v->type == VALUE_FLOAT ? 'g' : 'd';
	if (spec.type && strchr("eEfFgG%", spec.type))
		return add_float(r, t, &spec, v);
	if (v->type == VALUE_FLOAT) {
		if (spec.type)
			return render_fail(r, "Unknown format code '%c' for object of type 'float'", spec.type);
		return add_float(r, t, &spec, v);
	}
	if (spec.type && !strchr("bcdoxX", spec.type))
		return render_fail(r, "Unknown format code '%c' for object of type 'int'", spec.type);
	if (spec.precision >= 0)
		return render_fail(r, "Precision not allowed in integer format specifier");
	return spec.type == 'c' ? add_char(r, t, &spec, v) : add_int(r, t, &spec, v);
}

struct braces {
	const struct arguments *args;
	size_t next;	      /* number of the next {} */
	bool numbered, named; /* {0} and {} were seen: they exclude each other */
};

/* The argument that "0", "" or "name" stands for. */
static bool first_value(struct render *r, struct braces *b, struct str name, struct value *out)
{
	size_t digits_end = 0;
	int64_t index = read_digits(name, &digits_end);
	if (digits_end < name.n) {
		for (size_t k = 0; k < b->args->n_keywords; k++) {
			if (str_eq(b->args->keywords[k].name, name)) {
				*out = b->args->keywords[k].value;
				return true;
			}
		}
		return render_fail(r, "KeyError: '%.*s'", name.n > 80 ? 80 : (int)name.n, name.p);
	}
	if (name.n == 0) {
		b->numbered = true;
		index = (int64_t)b->next++;
	} else {
		b->named = true;
	}
	if (b->numbered && b->named)
		return render_fail(r, "cannot switch between manual field specification and automatic field numbering");
	if (index >= (int64_t)b->args->n)
		return render_fail(r, "Replacement index %lld out of range for positional args tuple",
				   (long long)index);
	*out = b->args->args[index];
	return true;
}

/* name.attr[item]... */
static bool field_value(struct render *r, struct braces *b, struct str field, struct value *out)
{
	size_t at = 0;
	while (at < field.n && field.p[at] != '.' && field.p[at] != '[')
		at++;
	if (!first_value(r, b, (struct str){field.p, at}, out))
		return false;
	while (at < field.n) {
		struct value obj = *out;
		bool is_attr = field.p[at] == '.';
		size_t from = ++at;
		while (at < field.n && (is_attr ? field.p[at] != '.' && field.p[at] != '[' : field.p[at] != ']'))
			at++;
		struct str name = {field.p + from, at - from};
		if (name.n == 0)
			return render_fail(r, "Empty attribute in format string");
		if (is_attr) {
			if (!get_attr(r, &obj, name, out))
				return false;
			continue;
		}
		if (at >= field.n)
			return render_fail(r, "Missing ']' in format string");
		at++;
		size_t digits_end = 0;
		struct value key = val_int(read_digits(name, &digits_end));
		if (digits_end < name.n && !string_new(r, name.p, name.n, VALUE_TRUSTED, &key))
			return false;
		if (!get_item(r, &obj, &key, out))
			return false;
		if (at < field.n && field.p[at] != '.' && field.p[at] != '[')
			return render_fail(r, "Only '.' or '[' may follow ']' in format field specifier");
	}
	return true;
}

static bool add_braces(struct render *r, struct text *t, const struct value *format, size_t from, size_t to,
		       struct braces *b, int level);

/* One replacement field, f[from..to) being what is between the braces. */
static bool add_replacement(struct render *r, struct text *t, const struct value *format, size_t from, size_t to,
			    struct braces *b, int level)
{
	const char *p = format->s->p;
	size_t end = from, spec_from = to;
	char conversion = 0;
	while (end < to && p[end] != ':' && p[end] != '!') {
		if (p[end] == '[')
			while (end < to && p[end] != ']')
				end++;
		end += end < to;
	}
	if (end < to && p[end] == '!') {
		if (end + 1 >= to || (end + 2 < to && p[end + 2] != ':'))
			return render_fail(r, "expected ':' after conversion specifier");
		conversion = p[end + 1];
		spec_from = end + 2 < to ? end + 3 : to;
	} else if (end < to) {
		spec_from = end + 1;
	}
	struct value v = val_none(), s;
	if (!field_value(r, b, (struct str){p + from, end - from}, &v))
		return false;
	struct text converted = {0}, spec = {0};
	if (conversion == 's' || conversion == 'r' || conversion == 'a') {
		if (!(conversion == 's' ? text_add_str(r, &converted, &v) : text_add_repr(r, &converted, &v)) ||
		    !text_finish(r, &converted, &s))
			return false;
		v = s;
	} else if (conversion) {
		return render_fail(r, "Unknown conversion specifier '%c'", conversion < 0x20 ? '?' : conversion);
	}
	if (!add_braces(r, &spec, format, spec_from, to, b, level + 1))
		return false;
	return add_formatted(r, t, &v, (struct str){spec.p ? spec.p : "", spec.n});
}

static bool add_braces(struct render *r, struct text *t, const struct value *format, size_t from, size_t to,
		       struct braces *b, int level)
{
	const char *p = format->s->p;
	size_t plain = from;
	if (level > 2)
		return render_fail(r, "Max string recursion exceeded");
	for (size_t i = from; i < to;) {
		if (p[i] != '{' && p[i] != '}') {
			i++;
			continue;
		}
		if (!text_add_part(r, t, format, plain, i))
			return false;
		if (i + 1 < to && p[i + 1] == p[i] && level == 0) {
			plain = i + 1;
			i += 2;
			continue;
		}
		if (p[i] == '}')
			return render_fail(r, "Single '}' encountered in format string");
		size_t end = i + 1, depth = 1;
		for (; end < to; end++) {
			depth += p[end] == '{';
			depth -= p[end] == '}';
			if (depth == 0)
				break;
		}
		if (depth)
			return render_fail(r, i + 1 == to ? "Single '{' encountered in format string"
							  : "expected '}' before end of string");
		if (!render_spend(r, 1) || !add_replacement(r, t, format, i + 1, end, b, level))
			return false;
		i = plain = end + 1;
	}
	return text_add_part(r, t, format, plain, to);
}

bool format_braces(struct render *r, const struct value *format, const struct arguments *args, struct value *out)
{
	struct braces b = {.args = args};
	struct text t = {0};
	if (!add_braces(r, &t, format, 0, format->s->n, &b, 0) || !text_finish(r, &t, out))
		return false;
	out->flags = format->flags;
	return true;
}
