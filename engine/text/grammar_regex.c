/*
 * Regular expressions of JSON schemas ("pattern", "format") -> the inside of a JSON string.
 *
 * The part of ECMA 262 that schemas use: literals, `.`, classes of ASCII characters, \d \w \s and their opposites,
 * groups, alternatives, * + ? {m,n}, and the anchors ^ and $ at the ends of a whole alternative. Without anchors a
 * pattern may match anywhere, as JSON Schema has it. Characters that JSON escapes come in their short escape, or as
 * \u00XX.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"
#include "engine/text/grammar_build.h"

enum { MAX_TIMES = 1000, MAX_GROUPS = 64, MAX_PATTERN = 4096, MAX_WORK = 1 << 16 };

struct regex {
	struct grammar_builder *b;
	const char *where;
	struct str s;
	size_t at;
	int depth;
};

/* Characters: ASCII ones, and whether all others are among them. */
struct class {
	struct grammar_set ascii;
	bool wide;
};

static void fail(struct regex *r, enum status status, const char *what)
{
	if (!grammar_failed(r->b))
		r->b->status =
			error_set(&r->b->err, status, "%.200s %s (at character %zu).", r->where, what, r->at + 1);
}

static int peek(const struct regex *r)
{
	return r->at < r->s.n ? (unsigned char)r->s.p[r->at] : -1;
}

/* ---- Characters ---- */

static void emit_escaped(struct grammar_builder *b, unsigned c)
{
	static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
	const char *at = c ? strchr(from, (int)c) : NULL;
	char text[8] = {'\\', 'u', '0', '0', "01"[c >> 4 & 1], "0123456789abcdef"[c & 15], 0, 0};
	if (at) {
		text[1] = to[at - from];
		text[2] = '\0';
	}
	grammar_emit_text(b, text);
}

static bool is_plain(unsigned c)
{
	return c >= 0x20 && c != '"' && c != '\\';
}

static void emit_class(struct grammar_builder *b, const struct class *c)
{
	struct grammar_choices choices = {0};
	struct grammar_set plain = {{0}};
	unsigned escaped[34];
	size_t n_escaped = 0, n, i = 0;
	bool has_plain = false;
	for (unsigned k = 0; k < 128; k++) {
		if (!grammar_set_has(&c->ascii, k))
			continue;
		if (is_plain(k)) {
			grammar_set_add(&plain, k, k);
			has_plain = true;
		} else {
			escaped[n_escaped++] = k;
		}
	}
	n = n_escaped + has_plain + c->wide;
	if (n == 0)
		grammar_emit(b, GRAMMAR_FAIL, 0, 0);
	if (has_plain) {
		grammar_next_choice(b, &choices, ++i == n);
		grammar_emit_set(b, &plain);
	}
	if (c->wide) {
		grammar_next_choice(b, &choices, ++i == n);
		grammar_emit_call(b, &grammar_wide);
	}
	for (size_t k = 0; k < n_escaped; k++) {
		grammar_next_choice(b, &choices, ++i == n);
		emit_escaped(b, escaped[k]);
	}
	grammar_end_choices(b, &choices);
}

static void negate(struct class *c)
{
	for (unsigned k = 0; k < 2; k++)
		c->ascii.bits[k] = ~c->ascii.bits[k];
	c->wide = !c->wide;
}

/* \d and the like; false when `name` is none of them. */
static bool named_class(int name, struct class *c)
{
	struct class all = {0};
	switch (name) {
	case 'd':
	case 'D':
		grammar_set_add(&all.ascii, '0', '9');
		break;
	case 'w':
	case 'W':
		grammar_set_add(&all.ascii, '0', '9');
		grammar_set_add(&all.ascii, 'A', 'Z');
		grammar_set_add(&all.ascii, 'a', 'z');
		grammar_set_add(&all.ascii, '_', '_');
		break;
	case 's':
	case 'S':
		grammar_set_add(&all.ascii, '\t', '\r');
		grammar_set_add(&all.ascii, ' ', ' ');
		break;
	default:
		return false;
	}
	if (name == 'D' || name == 'W' || name == 'S')
		negate(&all);
	/* \S takes no space beyond ASCII either; which those are is not worth a table. */
	if (name == 'S')
		all.wide = false;
	for (unsigned k = 0; k < 2; k++)
		c->ascii.bits[k] |= all.ascii.bits[k];
	c->wide = c->wide || all.wide;
	return true;
}

static unsigned read_hex(struct regex *r, int digits)
{
	unsigned v = 0;
	for (int i = 0; i < digits; i++, r->at++) {
		int c = peek(r);
		int d = c >= '0' && c <= '9'   ? c - '0'
		        : c >= 'a' && c <= 'f' ? c - 'a' + 10
		        : c >= 'A' && c <= 'F' ? c - 'A' + 10
		                               : -1;
		if (d < 0) {
			fail(r, STATUS_INVALID, "has an escape that is not complete");
			return 0;
		}
		v = v * 16 + (unsigned)d;
	}
	return v;
}

/* The character behind a backslash that is no class. */
static unsigned read_escape(struct regex *r)
{
	static const char from[] = "nrtfv", to[] = "\n\r\t\f\v";
	int c = peek(r);
	const char *at = c > 0 ? strchr(from, c) : NULL;
	r->at += c >= 0;
	if (at)
		return (unsigned char)to[at - from];
	if (c == 'x')
		return read_hex(r, 2);
	if (c == 'u')
		return read_hex(r, 4);
	if (c < 0 || c >= 128 || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
		fail(r, c < 0 ? STATUS_INVALID : STATUS_UNSUPPORTED, "has an escape that is not supported");
	return (unsigned)c;
}

/* A member of a class as a character; a class of its own such as \d is added, and gives -1. */
static int read_member(struct regex *r, struct class *c)
{
	int first = peek(r);
	unsigned v;
	r->at += first >= 0;
	if (first == '\\') {
		if (named_class(peek(r), c)) {
			r->at++;
			return -1;
		}
		v = read_escape(r);
	} else {
		v = (unsigned)first;
	}
	if (first < 0)
		fail(r, STATUS_INVALID, "has a class that does not end");
	else if (v >= 128)
		fail(r, STATUS_UNSUPPORTED, "has a class with characters beyond ASCII, which is not supported");
	return grammar_failed(r->b) ? -1 : (int)v;
}

/* Behind the opening bracket. */
static void read_class(struct regex *r, struct class *c)
{
	bool not = peek(r) == '^';
	r->at += not;
	while (peek(r) != ']' && !grammar_failed(r->b)) {
		int from = read_member(r, c), to = from;
		if (from < 0)
			continue;
		if (peek(r) == '-' && r->at + 1 < r->s.n && r->s.p[r->at + 1] != ']') {
			r->at++;
			to = read_member(r, c);
			if (to < from) {
				fail(r, STATUS_INVALID, "has a range that is empty");
				return;
			}
		}
		grammar_set_add(&c->ascii, (unsigned)from, (unsigned)to);
	}
	r->at++;
	if (not)
		negate(c);
}

static void emit_code_point(struct regex *r, unsigned v)
{
	struct class one = {0};
	if (v < 128) {
		grammar_set_add(&one.ascii, v, v);
		emit_class(r->b, &one);
	} else if (v >= 0xD800 && v <= 0xDFFF) {
		fail(r, STATUS_UNSUPPORTED, "has a surrogate, which is not supported");
	} else {
		char bytes[3] = {(char)(0xE0 | v >> 12), (char)(0x80 | (v >> 6 & 63)), (char)(0x80 | (v & 63))};
		bool two = v < 0x800;
		if (two)
			bytes[1] = (char)(0xC0 | v >> 6);
		grammar_emit_bytes(r->b, (struct str){bytes + two, two ? 2 : 3});
	}
}

/* A character beyond ASCII, whose first byte has been read. */
static void emit_wide_literal(struct regex *r)
{
	size_t from = r->at - 1;
	while (peek(r) >= 0x80 && peek(r) < 0xC0)
		r->at++;
	grammar_emit_bytes(r->b, (struct str){r->s.p + from, r->at - from});
}

/* ---- Structure ---- */

static void emit_alternatives(struct regex *r, bool top);

static void emit_atom(struct regex *r)
{
	struct class c = {0};
	int first = peek(r);
	r->at++;
	/* Repetitions of repetitions of nothing make no program, but take time. */
	if (++r->b->work > MAX_WORK)
		grammar_fail_size(r->b);
	switch (first) {
	case '(':
		if (peek(r) == '?') {
			if (r->at + 1 >= r->s.n || r->s.p[r->at + 1] != ':') {
				fail(r, STATUS_UNSUPPORTED, "has a group of a kind that is not supported");
				return;
			}
			r->at += 2;
		}
		if (++r->depth > MAX_GROUPS) {
			fail(r, STATUS_UNSUPPORTED, "has too many groups inside each other");
			return;
		}
		emit_alternatives(r, false);
		r->depth--;
		if (peek(r) != ')')
			fail(r, STATUS_INVALID, "has a group that does not end");
		r->at++;
		return;
	case '[':
		read_class(r, &c);
		emit_class(r->b, &c);
		return;
	case '.':
		grammar_set_add(&c.ascii, '\n', '\n');
		grammar_set_add(&c.ascii, '\r', '\r');
		negate(&c);
		emit_class(r->b, &c);
		return;
	case '\\':
		if (named_class(peek(r), &c)) {
			r->at++;
			emit_class(r->b, &c);
		} else {
			emit_code_point(r, read_escape(r));
		}
		return;
	case '*':
	case '+':
	case '?':
	case '{':
		fail(r, STATUS_INVALID, "repeats nothing");
		return;
	case '^':
	case '$':
		fail(r, STATUS_UNSUPPORTED, "has an anchor inside, which is not supported");
		return;
	default:
		if (first < 128)
			emit_code_point(r, (unsigned)first);
		else
			emit_wide_literal(r);
	}
}

/* Moves behind one atom without emitting it; a bad one is found when it is emitted. */
static void skip_atom(struct regex *r)
{
	int groups = 0;
	bool in_class = false;
	do {
		int c = peek(r);
		r->at++;
		if (c < 0)
			return;
		if (c == '\\')
			r->at += peek(r) == 'x' ? 3 : peek(r) == 'u' ? 5 : 1;
		else if (in_class)
			in_class = c != ']';
		else if (c == '[')
			in_class = true;
		else if (c == '(')
			groups++;
		else if (c == ')')
			groups--;
		else if (c >= 0xC0)
			while (peek(r) >= 0x80 && peek(r) < 0xC0)
				r->at++;
	} while (groups > 0 || in_class);
}

static int read_count(struct regex *r)
{
	int n = 0;
	if (peek(r) < '0' || peek(r) > '9')
		return -1;
	for (; peek(r) >= '0' && peek(r) <= '9'; r->at++)
		n = n > MAX_TIMES ? n : n * 10 + peek(r) - '0';
	if (n > MAX_TIMES)
		fail(r, STATUS_UNSUPPORTED, "repeats more than 1000 times");
	return n;
}

/* What stands behind an atom; max -1: without bound. */
static void read_quantifier(struct regex *r, int *min, int *max)
{
	int c = peek(r);
	*min = *max = 1;
	if (c == '*' || c == '+') {
		*min = c == '+';
		*max = -1;
		r->at++;
	} else if (c == '?') {
		*min = 0;
		r->at++;
	} else if (c == '{') {
		r->at++;
		*min = *max = read_count(r);
		if (peek(r) == ',') {
			r->at++;
			*max = read_count(r);
		}
		if (*min < 0 || peek(r) != '}' || (*max >= 0 && *max < *min))
			fail(r, STATUS_INVALID, "has a count that is malformed");
		r->at++;
	} else {
		return;
	}
	/* A lazy one takes the same texts. */
	if (peek(r) == '?')
		r->at++;
}

static void emit_repeated(struct regex *r)
{
	size_t atom = r->at, behind;
	int min, max;
	uint32_t out = 0;
	skip_atom(r);
	read_quantifier(r, &min, &max);
	behind = r->at;
	for (int i = 0; i < (max < 0 ? min : max) && !grammar_failed(r->b); i++) {
		if (i >= min) {
			uint32_t split = grammar_emit(r->b, GRAMMAR_SPLIT, 0, out);
			grammar_patch_a(r->b, split, grammar_here(r->b));
			out = split;
		}
		r->at = atom;
		emit_atom(r);
	}
	if (max < 0) {
		uint32_t split = grammar_begin_optional(r->b);
		r->at = atom;
		emit_atom(r);
		grammar_emit(r->b, GRAMMAR_JUMP, split, 0);
		grammar_end_optional(r->b, split);
	}
	while (out && !grammar_failed(r->b)) {
		uint32_t before = r->b->g->code[out].b;
		grammar_patch_b(r->b, out, grammar_here(r->b));
		out = before;
	}
	if (!grammar_failed(r->b))
		r->at = behind;
}

static void emit_anything(struct grammar_builder *b)
{
	grammar_emit_repeat(b, &grammar_char, 0, -1, false);
}

static void emit_sequence(struct regex *r, bool top)
{
	bool open_end = top;
	if (top && peek(r) == '^')
		r->at++;
	else if (top)
		emit_anything(r->b);
	while (peek(r) >= 0 && peek(r) != '|' && peek(r) != ')' && !grammar_failed(r->b)) {
		if (top && peek(r) == '$' && (r->at + 1 == r->s.n || r->s.p[r->at + 1] == '|')) {
			r->at++;
			open_end = false;
			break;
		}
		emit_repeated(r);
	}
	if (open_end)
		emit_anything(r->b);
}

/* Finds out whether another alternative follows the one at hand. */
static bool is_last(const struct regex *r)
{
	struct regex probe = *r;
	while (peek(&probe) >= 0 && peek(&probe) != '|' && peek(&probe) != ')')
		skip_atom(&probe);
	return peek(&probe) != '|';
}

static void emit_alternatives(struct regex *r, bool top)
{
	struct grammar_choices c = {0};
	for (;;) {
		bool last = is_last(r);
		grammar_next_choice(r->b, &c, last);
		emit_sequence(r, top);
		if (last || grammar_failed(r->b))
			break;
		r->at++;
	}
	grammar_end_choices(r->b, &c);
}

void grammar_emit_pattern(struct grammar_builder *b, struct str pattern, const char *where)
{
	struct regex r = {.b = b, .where = where, .s = pattern};
	if (grammar_failed(b))
		return;
	if (pattern.n > MAX_PATTERN) {
		fail(&r, STATUS_LIMIT, "is longer than 4096 bytes");
		return;
	}
	emit_alternatives(&r, true);
	if (!grammar_failed(b) && r.at < pattern.n)
		fail(&r, STATUS_INVALID, "has a ) too many");
}

/*
 * Each takes only texts that are of the format (RFC 3339, RFC 9562, RFC 2673, RFC 1123, RFC 5321), if not all of them.
 */
const char *grammar_format_pattern(struct str format)
{
#define DATE                                                                                                           \
	"[12]\\d{3}-((0[1-9]|1[0-2])-(0[1-9]|1\\d|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
#define TIME "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,6})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"
#define LABEL "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
#define OCTET "(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
	static const struct {
		const char *name, *pattern;
	} formats[] = {
	        {"date", "^" DATE "$"},
	        {"time", "^" TIME "$"},
	        {"date-time", "^" DATE "T" TIME "$"},
	        {"uuid", "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
	        {"ipv4", "^" OCTET "(\\." OCTET "){3}$"},
	        {"hostname", "^" LABEL "(\\." LABEL "){0,5}$"},
	        {"email", "^[A-Za-z0-9_+-]{1,30}(\\.[A-Za-z0-9_+-]{1,10}){0,3}@" LABEL "(\\." LABEL "){1,4}$"},
	};
	for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
		if (str_is(format, formats[i].name))
			return formats[i].pattern;
	return NULL;
}
