#include "config/option.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The field of an option, as the type of its kind. */
static char **field_string(const struct option *o, void *base)
{
	return (char **)((char *)base + o->offset);
}

static bool *field_bool(const struct option *o, void *base)
{
	return (bool *)((char *)base + o->offset);
}

static int64_t *field_int(const struct option *o, void *base)
{
	return (int64_t *)((char *)base + o->offset);
}

static double *field_real(const struct option *o, void *base)
{
	return (double *)((char *)base + o->offset);
}

static enum status set_string(char **field, struct str value)
{
	char *copy = strndup(value.p, value.n);
	if (!copy)
		return STATUS_NOMEM;
	free(*field);
	*field = copy;
	return STATUS_OK;
}

enum status option_defaults(struct option_table t, void *base)
{
	for (size_t i = 0; i < t.n; i++) {
		const struct option *o = &t.rows[i];
		switch (o->kind) {
		case OPTION_STRING:
			*field_string(o, base) = NULL;
			if (o->def_text && set_string(field_string(o, base), str_from(o->def_text)) != STATUS_OK)
				return STATUS_NOMEM;
			break;
		case OPTION_BOOL:
			*field_bool(o, base) = o->def != 0;
			break;
		case OPTION_REAL:
			*field_real(o, base) = o->def_real;
			break;
		default:
			*field_int(o, base) = o->def;
		}
	}
	return STATUS_OK;
}

void option_free(struct option_table t, void *base)
{
	for (size_t i = 0; i < t.n; i++)
		if (t.rows[i].kind == OPTION_STRING) {
			free(*field_string(&t.rows[i], base));
			*field_string(&t.rows[i], base) = NULL;
		}
}

static char dashed(char c)
{
	return c == '_' ? '-' : c;
}

const struct option *option_find(struct option_table t, struct str name)
{
	for (size_t i = 0; i < t.n; i++) {
		const char *want = t.rows[i].name;
		size_t k = 0;
		while (k < name.n && want[k] && dashed(name.p[k]) == want[k])
			k++;
		if (k == name.n && !want[k])
			return &t.rows[i];
	}
	return NULL;
}

/* Letters to insert, delete or replace to make one name of the other (Levenshtein 1966); names are short. */
static size_t edit_distance(struct str a, const char *b)
{
	size_t row[64], nb = strlen(b);
	if (a.n >= 64 || nb >= 64)
		return SIZE_MAX;
	for (size_t j = 0; j <= nb; j++)
		row[j] = j;
	for (size_t i = 1; i <= a.n; i++) {
		size_t diagonal = row[0];
		row[0] = i;
		for (size_t j = 1; j <= nb; j++) {
			size_t replaced = diagonal + (dashed(a.p[i - 1]) != b[j - 1]);
			diagonal = row[j];
			size_t best = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
			row[j] = replaced < best ? replaced : best;
		}
	}
	return row[nb];
}

const char *option_nearest(struct option_table t, struct str name)
{
	const char *nearest = NULL;
	size_t best = name.n / 3 + 2; /* farther away is another word, not a slip */
	for (size_t i = 0; i < t.n; i++) {
		size_t d = edit_distance(name, t.rows[i].name);
		if (d < best) {
			best = d;
			nearest = t.rows[i].name;
		}
	}
	return nearest;
}

/* The units of BYTES and SECONDS, largest first; a value that is a multiple of one is shown in it. */
struct unit {
	const char *suffix;
	int64_t factor;
};

static const struct unit byte_units[] = {
	{"T", 1LL << 40}, {"G", 1LL << 30}, {"M", 1LL << 20}, {"K", 1LL << 10}, {"", 1}, {NULL, 0}};
static const struct unit time_units[] = {{"h", 3600000}, {"m", 60000}, {"s", 1000}, {"ms", 1}, {NULL, 0}};

static void show_value(const struct option *o, int64_t v, struct buf *out)
{
	const struct unit *u = o->kind == OPTION_BYTES ? byte_units : o->kind == OPTION_SECONDS ? time_units : NULL;
	for (; u && u->suffix; u++)
		if (v != 0 && v % u->factor == 0) {
			buf_printf(out, "%lld%s", (long long)(v / u->factor), u->suffix);
			return;
		}
	buf_printf(out, "%lld", (long long)v);
}

void option_expected(const struct option *o, struct buf *out)
{
	static const char *const what[] = {
		[OPTION_STRING] = "text",
		[OPTION_BOOL] = "true or false",
		[OPTION_INT] = "a whole number",
		[OPTION_BYTES] = "a number of bytes such as 512M or 4G",
		[OPTION_SECONDS] = "a time such as 30, 1.5s or 5m",
		[OPTION_REAL] = "a number",
	};
	buf_printf(out, "expected %s", what[o->kind]);
	if (o->kind == OPTION_STRING || o->kind == OPTION_BOOL)
		return;
	buf_puts(out, o->max == INT64_MAX ? " of at least " : " from ");
	show_value(o, o->min, out);
	if (o->max != INT64_MAX) {
		buf_puts(out, " to ");
		show_value(o, o->max, out);
	}
}

enum status option_refuse(const struct option *o, struct str shown, const char *where, struct error *err)
{
	struct buf expected = BUF_INIT;
	int shown_n = shown.n > 80 ? 80 : (int)shown.n;
	option_expected(o, &expected);
	error_set_param(err, STATUS_INVALID, o->name, "%s%s%s: \"%.*s\" does not fit; %s", where, *where ? ": " : "",
	                o->name, shown_n, shown.p, expected.data ? expected.data : "expected another value");
	buf_free(&expected);
	return STATUS_INVALID;
}

static bool parse_bool(struct str s, bool *out)
{
	static const char *const yes[] = {"true", "yes", "on", "1"}, *const no[] = {"false", "no", "off", "0"};
	for (size_t i = 0; i < 4; i++) {
		if (str_is(s, yes[i]) || str_is(s, no[i])) {
			*out = str_is(s, yes[i]);
			return true;
		}
	}
	return false;
}

/* A decimal number and what follows it. strtod alone would also take hexadecimal, infinities and leading spaces. */
static bool parse_number(struct str s, double *number, struct str *rest)
{
	char copy[64];
	size_t n = 0;
	while (n < s.n && n < sizeof copy - 1 &&
	       (isdigit((unsigned char)s.p[n]) || s.p[n] == '.' || (n == 0 && (s.p[n] == '-' || s.p[n] == '+'))))
		n++;
	/* An exponent only where digits follow, so that the E of a unit would not be swallowed. */
	if (n && n + 1 < s.n && (s.p[n] == 'e' || s.p[n] == 'E')) {
		size_t k = n + 1;
		if (s.p[k] == '-' || s.p[k] == '+')
			k++;
		size_t digits = k;
		while (k < s.n && isdigit((unsigned char)s.p[k]))
			k++;
		if (k > digits)
			n = k;
	}
	if (n == 0 || n >= sizeof copy)
		return false;
	memcpy(copy, s.p, n);
	copy[n] = '\0';
	char *end;
	*number = strtod(copy, &end);
	*rest = (struct str){s.p + n, s.n - n};
	return *end == '\0' && isfinite(*number);
}

static bool parse_whole(struct str s, int64_t *out)
{
	char copy[32], *end;
	if (s.n == 0 || s.n >= sizeof copy || isspace((unsigned char)s.p[0]))
		return false;
	memcpy(copy, s.p, s.n);
	copy[s.n] = '\0';
	errno = 0;
	long long v = strtoll(copy, &end, 10);
	*out = v;
	return errno == 0 && end == copy + s.n;
}

/* number * factor as an integer; false when it is no whole number of units or leaves the range of int64_t. */
static bool scale(double number, int64_t factor, int64_t *out)
{
	double v = number * (double)factor;
	if (!(v > -9.2e18 && v < 9.2e18))
		return false;
	*out = (int64_t)llround(v);
	return factor > 1 || v == floor(v);
}

static bool parse_bytes(struct str s, int64_t *out)
{
	double number;
	struct str rest;
	if (parse_whole(s, out))
		return true;
	if (!parse_number(s, &number, &rest))
		return false;
	if (rest.n > 1 && (rest.p[rest.n - 1] == 'B' || rest.p[rest.n - 1] == 'b'))
		rest.n--; /* KB and KiB mean what K does */
	if (rest.n > 1 && rest.p[rest.n - 1] == 'i')
		rest.n--;
	for (const struct unit *u = byte_units; u->suffix; u++)
		if (rest.n == strlen(u->suffix) && strncasecmp(rest.p, u->suffix, rest.n) == 0)
			return scale(number, u->factor, out);
	return false;
}

static bool parse_seconds(struct str s, int64_t *out_ms)
{
	double number;
	struct str rest;
	if (!parse_number(s, &number, &rest))
		return false;
	if (rest.n == 0)
		return scale(number, 1000, out_ms);
	for (const struct unit *u = time_units; u->suffix; u++)
		if (str_is(rest, u->suffix))
			return scale(number, u->factor, out_ms);
	return false;
}

enum status option_set(const struct option *o, void *base, struct str text, const char *where, struct error *err)
{
	int64_t whole = 0;
	double real;
	struct str rest;
	bool flag;
	switch (o->kind) {
	case OPTION_STRING:
		if (memchr(text.p, '\0', text.n))
			return option_refuse(o, text, where, err);
		if (set_string(field_string(o, base), text) != STATUS_OK)
			return error_set(err, STATUS_NOMEM, "out of memory");
		return STATUS_OK;
	case OPTION_BOOL:
		if (!parse_bool(text, &flag))
			return option_refuse(o, text, where, err);
		*field_bool(o, base) = flag;
		return STATUS_OK;
	case OPTION_REAL:
		if (!parse_number(text, &real, &rest) || rest.n || real < (double)o->min || real > (double)o->max)
			return option_refuse(o, text, where, err);
		*field_real(o, base) = real;
		return STATUS_OK;
	case OPTION_INT:
		if (!parse_whole(text, &whole))
			return option_refuse(o, text, where, err);
		break;
	case OPTION_BYTES:
		if (!parse_bytes(text, &whole))
			return option_refuse(o, text, where, err);
		break;
	case OPTION_SECONDS:
		if (!parse_seconds(text, &whole))
			return option_refuse(o, text, where, err);
		break;
	}
	if (whole < o->min || whole > o->max)
		return option_refuse(o, text, where, err);
	*field_int(o, base) = whole;
	return STATUS_OK;
}

static enum status unknown(struct option_table t, struct str name, struct error *err)
{
	const char *nearest = option_nearest(t, name);
	return error_set(err, STATUS_INVALID, "unknown option --%.*s%s%s%s", STR_ARG(name),
	                 nearest ? "; did you mean --" : "", nearest ? nearest : "", nearest ? "?" : "");
}

/* One argument that begins with "--"; *i moves on when it takes the next one as its value. */
static enum status read_option(struct option_table t, void *base, int argc, char **argv, int *i, struct error *err)
{
	const char *arg = argv[*i] + 2, *equals = strchr(arg, '=');
	struct str name = {arg, equals ? (size_t)(equals - arg) : strlen(arg)};
	const struct option *o = option_find(t, name);
	if (!o && !equals && str_starts(name, "no-")) {
		o = option_find(t, (struct str){name.p + 3, name.n - 3});
		if (o && o->kind == OPTION_BOOL)
			return option_set(o, base, str_from("false"), "", err);
		o = NULL;
	}
	if (!o)
		return unknown(t, name, err);
	if (equals)
		return option_set(o, base, str_from(equals + 1), "", err);
	if (o->kind == OPTION_BOOL)
		return option_set(o, base, str_from("true"), "", err);
	if (*i + 1 >= argc) {
		struct buf expected = BUF_INIT;
		option_expected(o, &expected);
		error_set_param(err, STATUS_INVALID, o->name, "--%s needs a value; %s", o->name,
		                expected.data ? expected.data : "");
		buf_free(&expected);
		return STATUS_INVALID;
	}
	return option_set(o, base, str_from(argv[++*i]), "", err);
}

enum status option_read_args(struct option_table t, void *base, int argc, char **argv, const char **positional,
                             int max_positional, int *n_positional, struct error *err)
{
	bool options = true;
	int n = 0;
	for (int i = 1; i < argc; i++) {
		if (options && strcmp(argv[i], "--") == 0) {
			options = false;
		} else if (options && strncmp(argv[i], "--", 2) == 0) {
			enum status st = read_option(t, base, argc, argv, &i, err);
			if (st != STATUS_OK)
				return st;
		} else if (options && argv[i][0] == '-' && argv[i][1]) {
			return error_set(err, STATUS_INVALID, "unknown option %s; options begin with two dashes",
			                 argv[i]);
		} else if (n < max_positional) {
			positional[n++] = argv[i];
		} else {
			return error_set(err, STATUS_INVALID, "unexpected argument \"%s\"", argv[i]);
		}
	}
	if (n_positional)
		*n_positional = n;
	return STATUS_OK;
}

bool option_same(const struct option *o, const void *a, const void *b)
{
	void *p = (void *)(uintptr_t)a, *q = (void *)(uintptr_t)b; /* the accessors serve readers and writers */
	switch (o->kind) {
	case OPTION_STRING: {
		const char *s = *field_string(o, p), *t = *field_string(o, q);
		return s && t ? strcmp(s, t) == 0 : s == t;
	}
	case OPTION_BOOL:
		return *field_bool(o, p) == *field_bool(o, q);
	case OPTION_REAL:
		return *field_real(o, p) == *field_real(o, q);
	default:
		return *field_int(o, p) == *field_int(o, q);
	}
}

#define SWAP(type, field)                                                                                              \
	do {                                                                                                           \
		type kept = *field(o, a);                                                                              \
		*field(o, a) = *field(o, b);                                                                           \
		*field(o, b) = kept;                                                                                   \
	} while (0)

void option_swap(const struct option *o, void *a, void *b)
{
	switch (o->kind) {
	case OPTION_STRING:
		SWAP(char *, field_string);
		break;
	case OPTION_BOOL:
		SWAP(bool, field_bool);
		break;
	case OPTION_REAL:
		SWAP(double, field_real);
		break;
	default:
		SWAP(int64_t, field_int);
	}
}

void option_help(struct option_table t, struct buf *out)
{
	static const char *const argument[] = {
		[OPTION_STRING] = " TEXT", [OPTION_BOOL] = "", [OPTION_INT] = " N",
		[OPTION_BYTES] = " BYTES", [OPTION_SECONDS] = " TIME", [OPTION_REAL] = " X",
	};
	for (size_t i = 0; i < t.n; i++) {
		const struct option *o = &t.rows[i];
		char left[48];
		snprintf(left, sizeof left, "--%s%s", o->name, argument[o->kind]);
		buf_printf(out, "  %-28s %s", left, o->help);
		if (o->kind == OPTION_STRING && o->def_text && *o->def_text) {
			buf_printf(out, " (%s)", o->def_text);
		} else if (o->kind == OPTION_REAL) {
			buf_printf(out, " (%g)", o->def_real);
		} else if (o->kind != OPTION_STRING && o->kind != OPTION_BOOL) {
			buf_puts(out, " (");
			show_value(o, o->def, out);
			buf_putc(out, ')');
		}
		buf_putc(out, '\n');
	}
}

void option_json(const struct option *o, const void *base, struct buf *out)
{
	void *b = (void *)(uintptr_t)base; /* the accessors serve readers and writers */
	switch (o->kind) {
	case OPTION_STRING:
		if (*field_string(o, b))
			buf_json_string(out, *field_string(o, b), strlen(*field_string(o, b)));
		else
			buf_puts(out, "null");
		break;
	case OPTION_BOOL:
		buf_puts(out, *field_bool(o, b) ? "true" : "false");
		break;
	case OPTION_REAL:
		buf_json_number(out, *field_real(o, b));
		break;
	case OPTION_SECONDS:
		buf_json_number(out, (double)*field_int(o, b) / 1000);
		break;
	default:
		buf_printf(out, "%lld", (long long)*field_int(o, b));
	}
}
