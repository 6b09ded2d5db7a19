/* Typed reads of GGUF metadata: any width that fits is accepted, and what does not fit is named. */
#include "engine/model/gguf.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* An integer of any width and sign: `bits` is its two's complement in 64 bits. */
struct integer {
	bool negative;
	uint64_t bits;
};

#define LOAD(type, p)                                                                                                  \
	({                                                                                                             \
		type x_;                                                                                               \
		memcpy(&x_, p, sizeof x_);                                                                             \
		x_;                                                                                                    \
	})

static struct integer from_signed(int64_t x)
{
	return (struct integer){x < 0, (uint64_t)x};
}

/* False when the type is not an integer. */
static bool load_integer(enum gguf_type type, const uint8_t *p, struct integer *out)
{
	switch (type) {
	case GGUF_U8:
		*out = (struct integer){false, *p};
		return true;
	case GGUF_U16:
		*out = (struct integer){false, LOAD(uint16_t, p)};
		return true;
	case GGUF_U32:
		*out = (struct integer){false, LOAD(uint32_t, p)};
		return true;
	case GGUF_U64:
		*out = (struct integer){false, LOAD(uint64_t, p)};
		return true;
	case GGUF_I8:
		*out = from_signed(LOAD(int8_t, p));
		return true;
	case GGUF_I16:
		*out = from_signed(LOAD(int16_t, p));
		return true;
	case GGUF_I32:
		*out = from_signed(LOAD(int32_t, p));
		return true;
	case GGUF_I64:
		*out = from_signed(LOAD(int64_t, p));
		return true;
	case GGUF_F32:
	case GGUF_F64:
	case GGUF_BOOL:
	case GGUF_STRING:
	case GGUF_ARRAY:
		break;
	}
	return false;
}

/* False when the type is not a number. */
static bool load_number(enum gguf_type type, const uint8_t *p, double *out)
{
	struct integer x;
	if (type == GGUF_F32)
		*out = (double)LOAD(float, p);
	else if (type == GGUF_F64)
		*out = LOAD(double, p);
	else if (load_integer(type, p, &x))
		*out = x.negative ? (double)(int64_t)x.bits : (double)x.bits;
	else
		return false;
	return true;
}

static enum status find(const struct gguf *g, const char *key, const struct gguf_value **v, struct error *err)
{
	*v = gguf_find(g, key);
	return *v ? STATUS_OK : error_set(err, STATUS_NOT_FOUND, "metadata key '%s' is missing", key);
}

static enum status wrong_type(const struct gguf_value *v, const char *wanted, struct error *err)
{
	bool array = v->type == GGUF_ARRAY;
	return error_set(err, STATUS_INVALID, "metadata key '%.*s' is of type %s%s where %s is expected",
			 STR_ARG(v->key), array ? "array of " : "", gguf_type_name(v->elem_type), wanted);
}

enum status gguf_get_uint(const struct gguf *g, const char *key, uint64_t *out, struct error *err)
{
	const struct gguf_value *v;
	enum status st = find(g, key, &v, err);
	if (st != STATUS_OK)
		return st;
	struct integer x;
	if (!load_integer(v->type, v->data, &x))
		return wrong_type(v, "an integer", err);
	if (x.negative) {
		return error_set(err, STATUS_INVALID, "metadata key '%s' is %" PRId64 ", but must not be negative", key,
				 (int64_t)x.bits);
	}
	*out = x.bits;
	return STATUS_OK;
}

enum status gguf_get_float(const struct gguf *g, const char *key, double *out, struct error *err)
{
	const struct gguf_value *v;
	enum status st = find(g, key, &v, err);
	if (st == STATUS_OK && !load_number(v->type, v->data, out))
		st = wrong_type(v, "a number", err);
	return st;
}

enum status gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct error *err)
{
	const struct gguf_value *v;
	enum status st = find(g, key, &v, err);
	if (st != STATUS_OK)
		return st;
	if (v->type != GGUF_BOOL)
		return wrong_type(v, "a bool", err);
	*out = *v->data != 0;
	return STATUS_OK;
}

/* The string at *p; moves *p past it. */
static struct str next_string(const uint8_t **p)
{
	uint64_t n = LOAD(uint64_t, *p);
	struct str s = {(const char *)*p + 8, n};
	*p += 8 + n;
	return s;
}

enum status gguf_get_str(const struct gguf *g, const char *key, struct str *out, struct error *err)
{
	const struct gguf_value *v;
	enum status st = find(g, key, &v, err);
	if (st != STATUS_OK)
		return st;
	if (v->type != GGUF_STRING)
		return wrong_type(v, "a string", err);
	const uint8_t *p = v->data;
	*out = next_string(&p);
	return STATUS_OK;
}

/* Finds an array and makes room for its elements; an empty one gets memory too, so that NULL is never a result. */
static enum status find_array(const struct gguf *g, const char *key, const char *wanted, size_t elem_bytes,
			      const struct gguf_value **v, void **out, struct error *err)
{
	enum status st = find(g, key, v, err);
	if (st != STATUS_OK)
		return st;
	if ((*v)->type != GGUF_ARRAY)
		return wrong_type(*v, wanted, err);
	*out = calloc((*v)->count + 1, elem_bytes);
	if (!*out)
		return error_set(err, STATUS_NOMEM, "no memory for the %" PRIu64 " elements of '%s'", (*v)->count, key);
	return STATUS_OK;
}

enum status gguf_get_strs(const struct gguf *g, const char *key, struct str **out, size_t *n, struct error *err)
{
	const char *wanted = "an array of strings";
	const struct gguf_value *v;
	void *memory;
	enum status st = find_array(g, key, wanted, sizeof **out, &v, &memory, err);
	if (st != STATUS_OK)
		return st;
	if (v->elem_type != GGUF_STRING) {
		free(memory);
		return wrong_type(v, wanted, err);
	}
	struct str *strs = memory;
	const uint8_t *p = v->data;
	for (uint64_t i = 0; i < v->count; i++)
		strs[i] = next_string(&p);
	*out = strs;
	*n = v->count;
	return STATUS_OK;
}

enum status gguf_get_floats(const struct gguf *g, const char *key, float **out, size_t *n, struct error *err)
{
	const char *wanted = "an array of numbers";
	const struct gguf_value *v;
	void *memory;
	enum status st = find_array(g, key, wanted, sizeof **out, &v, &memory, err);
	if (st != STATUS_OK)
		return st;
	float *floats = memory;
	for (uint64_t i = 0; i < v->count; i++) {
		double x;
		if (!load_number(v->elem_type, v->data + i * gguf_type_bytes(v->elem_type), &x)) {
			st = wrong_type(v, wanted, err);
			goto fail;
		}
		if (isfinite(x) && fabs(x) > (double)FLT_MAX) {
			st = error_set(err, STATUS_INVALID, "element %" PRIu64 " of '%s' does not fit a float: %g", i,
				       key, x);
			goto fail;
		}
		floats[i] = (float)x;
	}
	*out = floats;
	*n = v->count;
	return STATUS_OK;
fail:
	free(memory);
	return st;
}

enum status gguf_get_ints(const struct gguf *g, const char *key, int32_t **out, size_t *n, struct error *err)
{
	const char *wanted = "an array of integers";
	const struct gguf_value *v;
	void *memory;
	enum status st = find_array(g, key, wanted, sizeof **out, &v, &memory, err);
	if (st != STATUS_OK)
		return st;
	int32_t *ints = memory;
	for (uint64_t i = 0; i < v->count; i++) {
		struct integer x;
		if (!load_integer(v->elem_type, v->data + i * gguf_type_bytes(v->elem_type), &x)) {
			st = wrong_type(v, wanted, err);
			goto fail;
		}
		if (x.negative ? (int64_t)x.bits < INT32_MIN : x.bits > INT32_MAX) {
			st = error_set(err, STATUS_INVALID, "element %" PRIu64 " of '%s' does not fit 32 bits", i, key);
			goto fail;
		}
		ints[i] = (int32_t)x.bits;
	}
	*out = ints;
	*n = v->count;
	return STATUS_OK;
fail:
	free(memory);
	return st;
}
