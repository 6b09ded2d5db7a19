/* The program under construction, and the parts that all JSON is made of (RFC 8259). */
#include "engine/text/grammar_build.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_BLANKS = 32, MAX_DIGITS = 16, MAX_SETS = 4096 };

const char grammar_space, grammar_any, grammar_string, grammar_char, grammar_wide, grammar_integer, grammar_number,
        grammar_object, grammar_array;

/* ---- Emitting ---- */

bool grammar_failed(const struct grammar_builder *b)
{
	return b->status != STATUS_OK;
}

void grammar_fail_nomem(struct grammar_builder *b)
{
	if (!grammar_failed(b))
		b->status = error_set(&b->err, STATUS_NOMEM, "no memory for the schema's grammar");
}

void grammar_fail_size(struct grammar_builder *b)
{
	if (!grammar_failed(b))
		b->status = error_set(&b->err, STATUS_LIMIT, "the schema is too large");
}

/* Room for one more of n elements; false after a failure. */
static bool room(struct grammar_builder *b, void **array, uint32_t *cap, uint32_t n, size_t size)
{
	if (n < *cap)
		return true;
	uint32_t more = *cap ? *cap * 2 : 256;
	void *grown = realloc(*array, (size_t)more * size);
	if (!grown) {
		grammar_fail_nomem(b);
		return false;
	}
	*array = grown;
	*cap = more;
	return true;
}

uint32_t grammar_here(const struct grammar_builder *b)
{
	return b->g->n_code;
}

uint32_t grammar_emit(struct grammar_builder *b, enum grammar_op op, uint32_t a, uint32_t c)
{
	struct grammar *g = b->g;
	if (grammar_failed(b))
		return 0;
	if (g->n_code >= GRAMMAR_MAX_INSTRS) {
		grammar_fail_size(b);
		return 0;
	}
	if (!room(b, (void **)&g->code, &b->cap_code, g->n_code, sizeof *g->code))
		return 0;
	g->code[g->n_code] = (struct grammar_instr){op, a, c};
	return g->n_code++;
}

void grammar_patch_a(struct grammar_builder *b, uint32_t at, uint32_t a)
{
	if (!grammar_failed(b))
		b->g->code[at].a = a;
}

void grammar_patch_b(struct grammar_builder *b, uint32_t at, uint32_t to)
{
	if (!grammar_failed(b))
		b->g->code[at].b = to;
}

void grammar_emit_bytes(struct grammar_builder *b, struct str s)
{
	for (size_t i = 0; i < s.n && !grammar_failed(b); i++)
		grammar_emit(b, GRAMMAR_BYTE, (unsigned char)s.p[i], 0);
}

void grammar_emit_text(struct grammar_builder *b, const char *z)
{
	grammar_emit_bytes(b, str_from(z));
}

void grammar_emit_set(struct grammar_builder *b, const struct grammar_set *set)
{
	struct grammar *g = b->g;
	uint32_t i = 0;
	while (i < g->n_sets && memcmp(&g->sets[i], set, sizeof *set) != 0)
		i++;
	if (i == MAX_SETS) {
		grammar_fail_size(b);
		return;
	}
	if (i == g->n_sets) {
		if (grammar_failed(b) || !room(b, (void **)&g->sets, &b->cap_sets, g->n_sets, sizeof *g->sets))
			return;
		g->sets[g->n_sets++] = *set;
	}
	grammar_emit(b, GRAMMAR_SET, i, 0);
}

static void emit_class(struct grammar_builder *b, const char *members)
{
	struct grammar_set set = {{0}};
	for (; *members; members++)
		grammar_set_add(&set, (unsigned char)*members, (unsigned char)*members);
	grammar_emit_set(b, &set);
}

void grammar_emit_between(struct grammar_builder *b, unsigned from, unsigned to)
{
	struct grammar_set set = {{0}};
	grammar_set_add(&set, from, to);
	grammar_emit_set(b, &set);
}

uint32_t grammar_routine(struct grammar_builder *b, const void *name)
{
	uint32_t i = 0;
	if (grammar_failed(b) || !name)
		return 0;
	while (i < b->g->n_routines && b->routine[i] != name)
		i++;
	if (i == GRAMMAR_MAX_ROUTINES) {
		grammar_fail_size(b);
		return 0;
	}
	if (i == b->g->n_routines)
		b->routine[b->g->n_routines++] = name;
	return i;
}

void grammar_emit_call(struct grammar_builder *b, const void *name)
{
	uint32_t i = grammar_routine(b, name);
	if (!grammar_failed(b))
		grammar_emit(b, GRAMMAR_CALL, i, 0);
}

void grammar_emit_space(struct grammar_builder *b)
{
	grammar_emit_call(b, &grammar_space);
}

/* ---- What all JSON is made of ---- */

void grammar_emit_digits(struct grammar_builder *b, int min, int max)
{
	uint32_t split[MAX_BLANKS];
	int n = 0;
	for (int i = 0; i < max; i++) {
		if (i >= min) {
			split[n] = grammar_emit(b, GRAMMAR_SPLIT, 0, 0);
			grammar_patch_a(b, split[n++], grammar_here(b));
		}
		grammar_emit_between(b, '0', '9');
	}
	while (n > 0)
		grammar_patch_b(b, split[--n], grammar_here(b));
}

uint32_t grammar_begin_optional(struct grammar_builder *b)
{
	uint32_t at = grammar_emit(b, GRAMMAR_SPLIT, 0, 0);
	grammar_patch_a(b, at, grammar_here(b));
	return at;
}

void grammar_end_optional(struct grammar_builder *b, uint32_t at)
{
	grammar_patch_b(b, at, grammar_here(b));
}

void grammar_next_choice(struct grammar_builder *b, struct grammar_choices *c, bool last)
{
	if (c->open) {
		c->jumps = grammar_emit(b, GRAMMAR_JUMP, 0, c->jumps);
		grammar_patch_b(b, c->split, grammar_here(b));
	}
	c->open = !last;
	if (!last)
		c->split = grammar_begin_optional(b);
}

void grammar_end_choices(struct grammar_builder *b, struct grammar_choices *c)
{
	while (c->jumps && !grammar_failed(b)) {
		uint32_t before = b->g->code[c->jumps].b;
		grammar_patch_a(b, c->jumps, grammar_here(b));
		grammar_patch_b(b, c->jumps, 0);
		c->jumps = before;
	}
}

/* Nothing, a space, or a line break with blanks before what follows it. */
static void emit_space_body(struct grammar_builder *b)
{
	struct grammar_choices c = {0};
	uint32_t split[MAX_BLANKS];
	grammar_next_choice(b, &c, false);
	grammar_next_choice(b, &c, false);
	grammar_emit_text(b, " ");
	grammar_next_choice(b, &c, true);
	grammar_emit_text(b, "\n");
	for (int i = 0; i < MAX_BLANKS; i++) {
		split[i] = grammar_begin_optional(b);
		emit_class(b, " \t");
	}
	for (int i = 0; i < MAX_BLANKS; i++)
		grammar_end_optional(b, split[i]);
	grammar_end_choices(b, &c);
}

/* Well-formed UTF-8 of two to four bytes (Unicode 15, table 3-7). */
static void emit_wide_body(struct grammar_builder *b)
{
	static const struct {
		unsigned char first[2], second[2];
		int more;
	} rows[] = {
	        {{0xC2, 0xDF}, {0x80, 0xBF}, 0}, {{0xE0, 0xE0}, {0xA0, 0xBF}, 1}, {{0xE1, 0xEC}, {0x80, 0xBF}, 1},
	        {{0xED, 0xED}, {0x80, 0x9F}, 1}, {{0xEE, 0xEF}, {0x80, 0xBF}, 1}, {{0xF0, 0xF0}, {0x90, 0xBF}, 2},
	        {{0xF1, 0xF3}, {0x80, 0xBF}, 2}, {{0xF4, 0xF4}, {0x80, 0x8F}, 2},
	};
	struct grammar_choices c = {0};
	size_t n = sizeof rows / sizeof *rows;
	for (size_t i = 0; i < n; i++) {
		grammar_next_choice(b, &c, i + 1 == n);
		grammar_emit_between(b, rows[i].first[0], rows[i].first[1]);
		grammar_emit_between(b, rows[i].second[0], rows[i].second[1]);
		for (int k = 0; k < rows[i].more; k++)
			grammar_emit_between(b, 0x80, 0xBF);
	}
	grammar_end_choices(b, &c);
}

static void emit_hex(struct grammar_builder *b)
{
	emit_class(b, "0123456789abcdefABCDEF");
}

/* RFC 8259, section 7. Escaped surrogates are left out: what needs them can be written as UTF-8. */
static void emit_char_body(struct grammar_builder *b)
{
	struct grammar_set plain = {{0}};
	struct grammar_choices c = {0}, u = {0};
	grammar_set_add(&plain, 0x20, 0x21);
	grammar_set_add(&plain, 0x23, 0x5B);
	grammar_set_add(&plain, 0x5D, 0x7F);
	grammar_next_choice(b, &c, false);
	grammar_emit_set(b, &plain);
	grammar_next_choice(b, &c, false);
	grammar_emit_call(b, &grammar_wide);
	grammar_next_choice(b, &c, false);
	grammar_emit_text(b, "\\");
	emit_class(b, "\"\\/bfnrt");
	grammar_next_choice(b, &c, true);
	grammar_emit_text(b, "\\u");
	grammar_next_choice(b, &u, false);
	emit_class(b, "0123456789abcefABCEF");
	emit_hex(b);
	grammar_next_choice(b, &u, true);
	emit_class(b, "dD");
	emit_class(b, "01234567");
	grammar_end_choices(b, &u);
	emit_hex(b);
	emit_hex(b);
	grammar_end_choices(b, &c);
}

void grammar_emit_repeat(struct grammar_builder *b, const void *routine, int64_t min, int64_t max, bool separated)
{
	/* Jumps out are chained through their b, as in struct grammar_choices. */
	uint32_t out = 0;
	for (int64_t i = 0; i < (max < 0 ? min : max) && !grammar_failed(b); i++) {
		if (i >= min) {
			uint32_t split = grammar_emit(b, GRAMMAR_SPLIT, 0, out);
			grammar_patch_a(b, split, grammar_here(b));
			out = split;
		}
		if (separated && i > 0) {
			grammar_emit_space(b);
			grammar_emit_text(b, ",");
			grammar_emit_space(b);
		}
		grammar_emit_call(b, routine);
	}
	if (max < 0) {
		uint32_t split;
		split = grammar_begin_optional(b);
		if (separated) {
			grammar_emit_space(b);
			grammar_emit_text(b, ",");
			grammar_emit_space(b);
		}
		grammar_emit_call(b, routine);
		grammar_emit(b, GRAMMAR_JUMP, split, 0);
		grammar_end_optional(b, split);
	}
	while (out && !grammar_failed(b)) {
		uint32_t before = b->g->code[out].b;
		grammar_patch_b(b, out, grammar_here(b));
		out = before;
	}
}

void grammar_emit_string(struct grammar_builder *b, int64_t min, int64_t max)
{
	grammar_emit_text(b, "\"");
	grammar_emit_repeat(b, &grammar_char, min, max, false);
	grammar_emit_text(b, "\"");
}

static void emit_integer_body(struct grammar_builder *b)
{
	struct grammar_choices c = {0};
	uint32_t sign = grammar_begin_optional(b);
	grammar_emit_text(b, "-");
	grammar_end_optional(b, sign);
	grammar_next_choice(b, &c, false);
	grammar_emit_text(b, "0");
	grammar_next_choice(b, &c, true);
	grammar_emit_between(b, '1', '9');
	grammar_emit_digits(b, 0, MAX_DIGITS - 1);
	grammar_end_choices(b, &c);
}

static void emit_number_body(struct grammar_builder *b)
{
	uint32_t optional, sign;
	grammar_emit_call(b, &grammar_integer);
	optional = grammar_begin_optional(b);
	grammar_emit_text(b, ".");
	grammar_emit_digits(b, 1, MAX_DIGITS);
	grammar_end_optional(b, optional);
	optional = grammar_begin_optional(b);
	emit_class(b, "eE");
	sign = grammar_begin_optional(b);
	emit_class(b, "+-");
	grammar_end_optional(b, sign);
	/* Two digits: within what a double holds, whatever stands before. */
	grammar_emit_digits(b, 1, 2);
	grammar_end_optional(b, optional);
}

void grammar_emit_map(struct grammar_builder *b, const void *value)
{
	uint32_t some, more;
	grammar_emit(b, GRAMMAR_NEST, 0, 0);
	grammar_emit_text(b, "{");
	grammar_emit_space(b);
	some = grammar_begin_optional(b);
	for (int pass = 0; pass < 2; pass++) {
		more = pass ? grammar_begin_optional(b) : 0;
		if (pass) {
			grammar_emit_space(b);
			grammar_emit_text(b, ",");
			grammar_emit_space(b);
		}
		grammar_emit_call(b, &grammar_string);
		grammar_emit_space(b);
		grammar_emit_text(b, ":");
		grammar_emit_space(b);
		grammar_emit_call(b, value);
		if (pass) {
			grammar_emit(b, GRAMMAR_JUMP, more, 0);
			grammar_end_optional(b, more);
		}
	}
	grammar_emit_space(b);
	grammar_end_optional(b, some);
	grammar_emit_text(b, "}");
}

void grammar_emit_list(struct grammar_builder *b, const void *item, int64_t min, int64_t max)
{
	uint32_t none = 0;
	grammar_emit(b, GRAMMAR_NEST, 0, 0);
	grammar_emit_text(b, "[");
	grammar_emit_space(b);
	if (max != 0) {
		/* What is empty has one run of blanks, not two. */
		if (min == 0)
			none = grammar_begin_optional(b);
		grammar_emit_repeat(b, item, min > 0 ? min : 1, max, true);
		grammar_emit_space(b);
		if (min == 0)
			grammar_end_optional(b, none);
	}
	grammar_emit_text(b, "]");
}

static void emit_any_body(struct grammar_builder *b)
{
	static const void *const kinds[] = {&grammar_object, &grammar_array, &grammar_string, &grammar_number};
	static const char *const words[] = {"true", "false", "null"};
	struct grammar_choices c = {0};
	for (size_t i = 0; i < 4; i++) {
		grammar_next_choice(b, &c, false);
		grammar_emit_call(b, kinds[i]);
	}
	for (size_t i = 0; i < 3; i++) {
		grammar_next_choice(b, &c, i == 2);
		grammar_emit_text(b, words[i]);
	}
	grammar_end_choices(b, &c);
}

bool grammar_emit_builtin(struct grammar_builder *b, const void *name)
{
	if (name == &grammar_space)
		emit_space_body(b);
	else if (name == &grammar_any)
		emit_any_body(b);
	else if (name == &grammar_string)
		grammar_emit_string(b, 0, -1);
	else if (name == &grammar_char)
		emit_char_body(b);
	else if (name == &grammar_wide)
		emit_wide_body(b);
	else if (name == &grammar_integer)
		emit_integer_body(b);
	else if (name == &grammar_number)
		emit_number_body(b);
	else if (name == &grammar_object)
		grammar_emit_map(b, &grammar_any);
	else if (name == &grammar_array)
		grammar_emit_list(b, &grammar_any, 0, -1);
	else
		return false;
	return true;
}
