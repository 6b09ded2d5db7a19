/* Tests: what may stand after `is`. */
#include "engine/text/template_render.h"

static bool answer(struct call *c, bool b)
{
	*c->out = val_bool(b);
	return true;
}

static bool run_defined(struct call *c)
{
	return answer(c, c->self.type != VALUE_UNDEFINED);
}

static bool run_undefined(struct call *c)
{
	return answer(c, c->self.type == VALUE_UNDEFINED);
}

static bool run_none(struct call *c)
{
	return answer(c, c->self.type == VALUE_NONE);
}

static bool run_boolean(struct call *c)
{
	return answer(c, c->self.type == VALUE_BOOL);
}

static bool run_true(struct call *c)
{
	return answer(c, c->self.type == VALUE_BOOL && c->self.b);
}

static bool run_false(struct call *c)
{
	return answer(c, c->self.type == VALUE_BOOL && !c->self.b);
}

static bool run_integer(struct call *c)
{
	return answer(c, c->self.type == VALUE_INT);
}

static bool run_float(struct call *c)
{
	return answer(c, c->self.type == VALUE_FLOAT);
}

static bool run_number(struct call *c)
{
	return answer(c, val_is_number(&c->self));
}

static bool run_string(struct call *c)
{
	return answer(c, c->self.type == VALUE_STRING);
}

static bool run_mapping(struct call *c)
{
	return answer(c, c->self.type == VALUE_DICT);
}

/* Has a length and items. Undefined has both, and any use of the latter but asking for it fails. */
static bool run_sequence(struct call *c)
{
	switch (c->self.type) {
	case VALUE_STRING:
	case VALUE_LIST:
	case VALUE_TUPLE:
	case VALUE_DICT:
	case VALUE_RANGE:
	case VALUE_UNDEFINED:
		return answer(c, true);
	default:
		return answer(c, false);
	}
}

static bool run_iterable(struct call *c)
{
	return answer(c, value_is_iterable(&c->self) || c->self.type == VALUE_LOOP);
}

static bool run_callable(struct call *c)
{
	switch (c->self.type) {
	case VALUE_FUNCTION:
	case VALUE_METHOD:
	case VALUE_MACRO:
	case VALUE_LOOP:
	case VALUE_JOINER:
	case VALUE_UNDEFINED:
		return answer(c, true);
	default:
		return answer(c, false);
	}
}

static bool run_escaped(struct call *c)
{
	return answer(c, c->self.flags & VALUE_MARKUP);
}

static bool remainder_of(struct call *c, const struct value *by, struct value *out)
{
	return op_binary(c->r, TOKEN_MOD, &c->self, by, out);
}

static bool remainder_is(struct call *c, const struct value *by, int64_t wanted)
{
	struct value rest, w = val_int(wanted);
	bool same;
	return remainder_of(c, by, &rest) && op_equal(c->r, &rest, &w, &same) && answer(c, same);
}

static bool run_odd(struct call *c)
{
	struct value two = val_int(2);
	return remainder_is(c, &two, 1);
}

static bool run_even(struct call *c)
{
	struct value two = val_int(2);
	return remainder_is(c, &two, 0);
}

static bool run_divisibleby(struct call *c)
{
	return remainder_is(c, &c->arg[0], 0);
}

static bool string_test(struct call *c, const char *method)
{
	struct value s;
	const struct arguments none = {0};
	const struct builtin *fn = builtin_find(string_methods, n_string_methods, str_from(method));
	return value_to_string(c->r, &c->self, &s) && call_builtin(c->r, fn, &s, &none, c->out);
}

static bool run_upper(struct call *c)
{
	return string_test(c, "isupper");
}

static bool run_lower(struct call *c)
{
	return string_test(c, "islower");
}

/* Identity. Scalars that are equal and of one type count as the same object, as Python's small ones are. */
static bool run_sameas(struct call *c)
{
	const struct value *a = &c->self, *b = &c->arg[0];
	bool same;
	if (a->type != b->type)
		return answer(c, false);
	if (val_is_number(a) || a->type == VALUE_STRING || a->type == VALUE_NONE)
		return op_equal(c->r, a, b, &same) && answer(c, same);
	return answer(c, a->seq == b->seq);
}

static bool compare(struct call *c, enum compare_op op)
{
	bool holds;
	return op_compare(c->r, op, &c->self, &c->arg[0], &holds) && answer(c, holds);
}

static bool run_eq(struct call *c)
{
	return compare(c, COMPARE_EQ);
}

static bool run_ne(struct call *c)
{
	return compare(c, COMPARE_NE);
}

static bool run_lt(struct call *c)
{
	return compare(c, COMPARE_LT);
}

static bool run_le(struct call *c)
{
	return compare(c, COMPARE_LE);
}

static bool run_gt(struct call *c)
{
	return compare(c, COMPARE_GT);
}

static bool run_ge(struct call *c)
{
	return compare(c, COMPARE_GE);
}

static bool run_in(struct call *c)
{
	return compare(c, COMPARE_IN);
}

static bool run_filter(struct call *c)
{
	return answer(c, c->self.type == VALUE_STRING && builtin_filter(val_str(&c->self)));
}

static bool run_test(struct call *c)
{
	return answer(c, c->self.type == VALUE_STRING && builtin_test(val_str(&c->self)));
}

static const struct builtin tests[] = {
	{"!=", "other", run_ne},
	{"<", "other", run_lt},
	{"<=", "other", run_le},
	{"==", "other", run_eq},
	{">", "other", run_gt},
	{">=", "other", run_ge},
	{"boolean", "", run_boolean},
	{"callable", "", run_callable},
	{"defined", "", run_defined},
	{"divisibleby", "num", run_divisibleby},
	{"eq", "other", run_eq},
	{"equalto", "other", run_eq},
	{"escaped", "", run_escaped},
	{"even", "", run_even},
	{"false", "", run_false},
	{"filter", "", run_filter},
	{"float", "", run_float},
	{"ge", "other", run_ge},
	{"greaterthan", "other", run_gt},
	{"gt", "other", run_gt},
	{"in", "seq", run_in},
	{"integer", "", run_integer},
	{"iterable", "", run_iterable},
	{"le", "other", run_le},
	{"lessthan", "other", run_lt},
	{"lower", "", run_lower},
	{"lt", "other", run_lt},
	{"mapping", "", run_mapping},
	{"ne", "other", run_ne},
	{"none", "", run_none},
	{"number", "", run_number},
	{"odd", "", run_odd},
	{"sameas", "other", run_sameas},
	{"sequence", "", run_sequence},
	{"string", "", run_string},
	{"test", "", run_test},
	{"true", "", run_true},
	{"undefined", "", run_undefined},
	{"upper", "", run_upper},
};

const struct builtin *builtin_test(struct str name)
{
	return builtin_find(tests, sizeof tests / sizeof *tests, name);
}
