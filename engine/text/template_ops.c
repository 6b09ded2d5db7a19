/* Operators with Python's rules: arithmetic, comparison, containment. */
#include <math.h>

#include "engine/text/template_render.h"

static const char *op_text(enum token_type op)
{
	return op == TOKEN_POW ? "** or pow()" : token_name(op);
}

static bool unsupported(struct render *r, enum token_type op, const struct value *a, const struct value *b)
{
	if (op == TOKEN_ADD && a->type == VALUE_STRING)
		return render_fail(r, "can only concatenate str (not \"%s\") to str", type_name(b));
	if (op == TOKEN_ADD && (a->type == VALUE_LIST || a->type == VALUE_TUPLE))
		return render_fail(r, "can only concatenate %s (not \"%s\") to %s", type_name(a), type_name(b),
				   type_name(a));
	return render_fail(r, "unsupported operand type(s) for %s: '%s' and '%s'", op_text(op), type_name(a),
			   type_name(b));
}

static bool too_big(struct render *r)
{
	return render_limit(r, "integers beyond 64 bits are not supported");
}

/* ---- Numbers ---- */

static bool int_power(struct render *r, int64_t base, int64_t exponent, int64_t *out)
{
	int64_t result = 1;
	while (exponent > 0) {
		if ((exponent & 1) && __builtin_mul_overflow(result, base, &result))
			return too_big(r);
		exponent >>= 1;
		if (exponent > 0 && __builtin_mul_overflow(base, base, &base))
			return too_big(r);
	}
	*out = result;
	return true;
}

/* Quotient and remainder with the sign of the divisor. */
static bool floor_divide(struct render *r, int64_t a, int64_t b, int64_t *quotient, int64_t *remainder)
{
	if (b == -1) {
		*remainder = 0;
		return !__builtin_sub_overflow((int64_t)0, a, quotient) || too_big(r);
	}
	*quotient = a / b;
	*remainder = a % b;
	if (*remainder != 0 && (*remainder < 0) != (b < 0)) {
		*quotient -= 1;
		*remainder += b;
	}
	return true;
}

static bool int_op(struct render *r, enum token_type op, int64_t a, int64_t b, struct value *out)
{
	int64_t i = 0, rest;
	bool overflow = false;
	switch (op) {
	case TOKEN_ADD:
		overflow = __builtin_add_overflow(a, b, &i);
		break;
	case TOKEN_SUB:
		overflow = __builtin_sub_overflow(a, b, &i);
		break;
	case TOKEN_MUL:
		overflow = __builtin_mul_overflow(a, b, &i);
		break;
	case TOKEN_DIV:
		if (b == 0)
			return render_fail(r, "division by zero");
		*out = val_float((double)a / (double)b);
		return true;
	case TOKEN_FLOORDIV:
	case TOKEN_MOD:
		if (b == 0)
			return render_fail(r, op == TOKEN_MOD ? "integer modulo by zero"
							      : "integer division or modulo by zero");
		if (!floor_divide(r, a, b, &i, &rest))
			return false;
		if (op == TOKEN_MOD)
			i = rest;
		break;
	default: /* TOKEN_POW */
		if (b < 0) {
			if (a == 0)
				return render_fail(r, "0.0 cannot be raised to a negative power");
			*out = val_float(pow((double)a, (double)b));
			return true;
		}
		if (!int_power(r, a, b, &i))
			return false;
	}
	if (overflow)
		return too_big(r);
	*out = val_int(i);
	return true;
}

static bool float_op(struct render *r, enum token_type op, double a, double b, struct value *out)
{
	double f;
	switch (op) {
	case TOKEN_ADD:
		f = a + b;
		break;
	case TOKEN_SUB:
		f = a - b;
		break;
	case TOKEN_MUL:
		f = a * b;
		break;
	case TOKEN_DIV:
		if (b == 0)
			return render_fail(r, "float division by zero");
		f = a / b;
		break;
	case TOKEN_FLOORDIV:
	case TOKEN_MOD: {
		if (b == 0)
			return render_fail(r, op == TOKEN_MOD ? "float modulo" : "float floor division by zero");
		double rest = fmod(a, b);
		double quotient = (a - rest) / b;
		if (rest != 0 && (rest < 0) != (b < 0)) {
			rest += b;
			quotient -= 1;
		} else if (rest == 0) {
			rest = copysign(0, b);
		}
		if (quotient != 0) {
			double whole = floor(quotient);
			if (quotient - whole > 0.5)
				whole += 1;
			quotient = whole;
		} else {
			quotient = copysign(0, a / b);
		}
		f = op == TOKEN_MOD ? rest : quotient;
		break;
	}
	default:
		if (a == 0 && b < 0)
			return render_fail(r, "0.0 cannot be raised to a negative power");
		f = pow(a, b);
		if (isnan(f) && !isnan(a) && !isnan(b))
			return render_fail(r, "complex numbers are not supported");
		if (isinf(f) && isfinite(a) && isfinite(b))
			return render_fail(r, "(34, 'Numerical result out of range')");
	}
	*out = val_float(f);
	return true;
}

/* ---- Sequences ---- */

static bool concat_seqs(struct render *r, const struct value *a, const struct value *b, struct value *out)
{
	size_t n = a->seq->n + b->seq->n;
	struct value_seq *seq = render_alloc(r, sizeof *seq);
	struct value *items = seq ? render_alloc(r, n * sizeof *items) : NULL;
	if (!items || !render_spend(r, n / 4))
		return false;
	if (a->seq->n)
		memcpy(items, a->seq->items, a->seq->n * sizeof *items);
	if (b->seq->n)
		memcpy(items + a->seq->n, b->seq->items, b->seq->n * sizeof *items);
	*seq = (struct value_seq){.items = items, .n = n, .cap = n};
	*out = (struct value){.type = a->type, .seq = seq};
	return true;
}

bool op_repeat(struct render *r, const struct value *what, int64_t times, struct value *out)
{
	if (times < 0)
		times = 0;
	if (what->type == VALUE_STRING) {
		struct text t = {0};
		if (what->s->n == 0 || times == 0)
			return string_part(r, what, 0, 0, out);
		if ((uint64_t)times > r->max_memory / what->s->n)
			return render_limit(r, "the template takes more than %zu bytes of memory", r->max_memory);
		for (int64_t i = 0; i < times; i++)
			if (!render_spend(r, 1) || !text_add_value(r, &t, what))
				return false;
		if (!text_finish(r, &t, out))
			return false;
		out->flags = what->flags;
		return true;
	}
	struct value list;
	if (!new_list(r, &list))
		return false;
	for (int64_t i = 0; what->seq->n && i < times; i++)
		for (size_t k = 0; k < what->seq->n; k++)
			if (!list_add(r, &list, what->seq->items[k]))
				return false;
	*out = list;
	out->type = what->type;
	return true;
}

/* Adding to markup escapes what is added, from either side. */
static bool concat_strings(struct render *r, const struct value *a, const struct value *b, struct value *out)
{
	struct value escaped;
	if ((a->flags & VALUE_MARKUP) != (b->flags & VALUE_MARKUP)) {
		const struct builtin *escape = builtin_filter(str_from("escape"));
		const struct arguments none = {0};
		bool left = !(a->flags & VALUE_MARKUP);
		if (!call_builtin(r, escape, left ? a : b, &none, &escaped))
			return false;
		return left ? string_concat(r, &escaped, b, out) : string_concat(r, a, &escaped, out);
	}
	return string_concat(r, a, b, out);
}

static bool is_seq(const struct value *v)
{
	return v->type == VALUE_STRING || v->type == VALUE_LIST || v->type == VALUE_TUPLE;
}

bool op_binary(struct render *r, enum token_type op, const struct value *a, const struct value *b, struct value *out)
{
	if (a->type == VALUE_STRING && op == TOKEN_MOD)
		return format_percent(r, a, b, out);
	if (a->type == VALUE_UNDEFINED)
		return undefined_fail(r, a);
	if (b->type == VALUE_UNDEFINED)
		return undefined_fail(r, b);
	if (val_is_number(a) && val_is_number(b)) {
		bool ints = val_is_integer(a) && val_is_integer(b);
		bool done = ints ? int_op(r, op, val_as_int(a), val_as_int(b), out)
				 : float_op(r, op, val_as_double(a), val_as_double(b), out);
		out->origin = origin_join(a, b);
		return done;
	}
	if (op == TOKEN_ADD && a->type == b->type && is_seq(a))
		return a->type == VALUE_STRING ? concat_strings(r, a, b, out) : concat_seqs(r, a, b, out);
	if (op == TOKEN_MUL && is_seq(a) && val_is_integer(b))
		return op_repeat(r, a, val_as_int(b), out);
	if (op == TOKEN_MUL && is_seq(b) && val_is_integer(a))
		return op_repeat(r, b, val_as_int(a), out);
	if (op == TOKEN_MUL && is_seq(a))
		return render_fail(r, "can't multiply sequence by non-int of type '%s'", type_name(b));
	return unsupported(r, op, a, b);
}

bool op_negate(struct render *r, const struct value *v, struct value *out)
{
	if (v->type == VALUE_UNDEFINED)
		return undefined_fail(r, v);
	if (!val_is_number(v))
		return render_fail(r, "bad operand type for unary -: '%s'", type_name(v));
	if (v->type == VALUE_FLOAT)
		*out = val_float(-v->f);
	else if (val_as_int(v) == INT64_MIN)
		return too_big(r);
	else
		*out = val_int(-val_as_int(v));
	out->origin = v->origin;
	return true;
}

bool op_plus(struct render *r, const struct value *v, struct value *out)
{
	if (v->type == VALUE_UNDEFINED)
		return undefined_fail(r, v);
	if (!val_is_number(v))
		return render_fail(r, "bad operand type for unary +: '%s'", type_name(v));
	*out = v->type == VALUE_FLOAT ? *v : val_int(val_as_int(v));
	out->origin = v->origin;
	return true;
}

/* ---- Comparison ---- */

bool op_equal(struct render *r, const struct value *a, const struct value *b, bool *out)
{
	int same = value_equal(a, b, &r->steps);
	if (same < 0)
		return render_limit(r,
				    "the template takes too many steps or compares values that are nested too deeply");
	*out = same;
	return true;
}

/* -1, 0, 1; 2 when a NaN makes all orderings false. */
static int compare_numbers(const struct value *a, const struct value *b)
{
	if (a->type != VALUE_FLOAT && b->type != VALUE_FLOAT) {
		int64_t i = val_as_int(a), j = val_as_int(b);
		return (i > j) - (i < j);
	}
	if (a->type == VALUE_FLOAT && b->type == VALUE_FLOAT)
		return isnan(a->f) || isnan(b->f) ? 2 : (a->f > b->f) - (a->f < b->f);
	/* An integer and a float: compare without rounding the integer. */
	bool swapped = a->type == VALUE_FLOAT;
	double f = swapped ? a->f : b->f;
	int64_t i = val_as_int(swapped ? b : a);
	int result;
	if (isnan(f))
		return 2;
	if (f >= 0x1p63)
		result = -1;
	else if (f < -0x1p63)
		result = 1;
	else {
		int64_t whole = (int64_t)floor(f);
		result = i < whole ? -1 : i > whole ? 1 : f > (double)whole ? -1 : 0;
	}
	return swapped ? -result : result;
}

static int compare_strings(const struct value *a, const struct value *b)
{
	/* UTF-8 sorts like the code points it encodes. */
	size_t n = a->s->n < b->s->n ? a->s->n : b->s->n;
	int c = n ? memcmp(a->s->p, b->s->p, n) : 0;
	return c < 0 ? -1 : c > 0 ? 1 : (a->s->n > b->s->n) - (a->s->n < b->s->n);
}

static bool order(struct render *r, enum compare_op op, const struct value *a, const struct value *b, int depth,
		  bool *out);

static bool order_seqs(struct render *r, enum compare_op op, const struct value *a, const struct value *b, int depth,
		       bool *out)
{
	for (size_t i = 0; i < a->seq->n && i < b->seq->n; i++) {
		bool same = false;
		if (!op_equal(r, &a->seq->items[i], &b->seq->items[i], &same))
			return false;
		if (!same)
			return order(r, op, &a->seq->items[i], &b->seq->items[i], depth + 1, out);
	}
	struct value n = val_int((int64_t)a->seq->n), m = val_int((int64_t)b->seq->n);
	return order(r, op, &n, &m, depth, out);
}

static bool order(struct render *r, enum compare_op op, const struct value *a, const struct value *b, int depth,
		  bool *out)
{
	static const char *const symbols[] = {"==", "!=", "<", "<=", ">", ">="};
	int c;
	if (depth > MAX_VALUE_DEPTH)
		return render_limit(r, "the template compares values that are nested too deeply");
	if (!render_spend(r, 1))
		return false;
	if (a->type == VALUE_UNDEFINED)
		return undefined_fail(r, a);
	if (b->type == VALUE_UNDEFINED)
		return undefined_fail(r, b);
	if (val_is_number(a) && val_is_number(b)) {
		c = compare_numbers(a, b);
	} else if (a->type == VALUE_STRING && b->type == VALUE_STRING) {
		if (!render_spend(r, (a->s->n < b->s->n ? a->s->n : b->s->n) / 64))
			return false;
		c = compare_strings(a, b);
	} else if (a->type == b->type && (a->type == VALUE_LIST || a->type == VALUE_TUPLE)) {
		return order_seqs(r, op, a, b, depth, out);
	} else {
		return render_fail(r, "'%s' not supported between instances of '%s' and '%s'", symbols[op],
				   type_name(a), type_name(b));
	}
	*out = c != 2 && (op == COMPARE_LT ? c < 0 : op == COMPARE_LE ? c <= 0 : op == COMPARE_GT ? c > 0 : c >= 0);
	return true;
}

bool op_less(struct render *r, const struct value *a, const struct value *b, bool *out)
{
	return order(r, COMPARE_LT, a, b, 0, out);
}

/* Merges order[0..half) and order[half..n) through `spare`. */
static bool merge(struct render *r, const struct value *keys, size_t *at, size_t half, size_t n, size_t *spare,
		  bool reverse)
{
	size_t i = 0, j = half, k = 0;
	while (i < half && j < n) {
		bool later_first;
		const struct value *a = &keys[at[i]], *b = &keys[at[j]];
		if (!(reverse ? op_less(r, a, b, &later_first) : op_less(r, b, a, &later_first)))
			return false;
		spare[k++] = later_first ? at[j++] : at[i++];
	}
	memcpy(spare + k, at + i, (half - i) * sizeof *at);
	memcpy(spare + k + half - i, at + j, (n - j) * sizeof *at);
	memcpy(at, spare, n * sizeof *at);
	return true;
}

bool sort_order(struct render *r, const struct value *keys, size_t n, bool reverse, size_t **out)
{
	size_t *order_of = render_alloc(r, n * sizeof *order_of), *spare = render_alloc(r, n * sizeof *spare);
	if (!order_of || !spare)
		return false;
	for (size_t i = 0; i < n; i++)
		order_of[i] = i;
	for (size_t width = 1; width < n; width *= 2) {
		if (!render_spend(r, n / 8))
			return false;
		for (size_t from = 0; from + width < n; from += 2 * width) {
			size_t len = n - from < 2 * width ? n - from : 2 * width;
			if (!merge(r, keys, order_of + from, width, len, spare, reverse))
				return false;
		}
	}
	*out = order_of;
	return true;
}

bool op_contains(struct render *r, const struct value *in, const struct value *item, bool *out)
{
	*out = false;
	if (in->type == VALUE_STRING) {
		if (item->type == VALUE_UNDEFINED)
			return undefined_fail(r, item);
		if (item->type != VALUE_STRING)
			return render_fail(r, "'in <string>' requires string as left operand, not %s", type_name(item));
		if (!render_spend(r, in->s->n / 64))
			return false;
		*out = item->s->n == 0 || memmem(in->s->p, in->s->n, item->s->p, item->s->n) != NULL;
		return true;
	}
	if (in->type == VALUE_DICT || (in->type == VALUE_VIEW && in->view->kind == VIEW_KEYS)) {
		struct value found;
		if (!dict_get(r, in->type == VALUE_DICT ? in->dict : in->view->dict, item, &found))
			return false;
		*out = val_given(&found);
		return true;
	}
	if (!value_is_iterable(in))
		return render_fail(r, "argument of type '%s' is not iterable", type_name(in));
	struct iter it;
	struct value next;
	bool got;
	if (!iter_begin(r, &it, in))
		return false;
	for (;;) {
		if (!iter_next(r, &it, &next, &got))
			return false;
		if (!got)
			return true;
		if (!op_equal(r, &next, item, out))
			return false;
		if (*out)
			return true;
	}
}

bool op_compare(struct render *r, enum compare_op op, const struct value *a, const struct value *b, bool *out)
{
	switch (op) {
	case COMPARE_EQ:
		return op_equal(r, a, b, out);
	case COMPARE_NE:
		if (!op_equal(r, a, b, out))
			return false;
		*out = !*out;
		return true;
	case COMPARE_IN:
		return op_contains(r, b, a, out);
	case COMPARE_NOT_IN:
		if (!op_contains(r, b, a, out))
			return false;
		*out = !*out;
		return true;
	default:
		return order(r, op, a, b, 0, out);
	}
}
