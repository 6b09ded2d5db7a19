/*
 * A bounded reader of GGUF v2 and v3 files (little-endian). The file is mapped read-only; every count, length, offset,
 * alignment and type is checked against the file before use, so that nothing reached through this interface can point
 * outside it. A damaged file gives STATUS_CORRUPT and one sentence that says what is wrong and at which byte.
 *
 * Everything returned is borrowed from the reader and lives until gguf_close().
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/base/str.h"
#include "engine/model/quant.h"

struct gguf;

enum gguf_type {
	GGUF_U8,
	GGUF_I8,
	GGUF_U16,
	GGUF_I16,
	GGUF_U32,
	GGUF_I32,
	GGUF_F32,
	GGUF_BOOL,
	GGUF_STRING,
	GGUF_ARRAY,
	GGUF_U64,
	GGUF_I64,
	GGUF_F64,
};

struct gguf_value {
	struct str key;
	enum gguf_type type;
	enum gguf_type elem_type; /* of an array, else equal to type */
	uint64_t count;           /* elements of an array, else 1 */
	/* first element: numbers little-endian and unaligned; strings as u64 length + bytes */
	const uint8_t *data;
};

enum { GGUF_MAX_DIMS = 4 };

struct gguf_tensor {
	struct str name;
	const struct quant_format *format;
	uint32_t n_dims;
	uint64_t dim[GGUF_MAX_DIMS]; /* dim[0] is contiguous (the inputs of a matrix); unused ones are 1 */
	uint64_t n_elems;
	uint64_t n_bytes;
	uint64_t offset;             /* from the start of the file */
	const uint8_t *data;
};

/* Maps and validates the file. On success *out must be closed. Errors: IO, CORRUPT, UNSUPPORTED, NOMEM. */
enum status gguf_open(const char *path, struct gguf **out, struct error *err);
/* As gguf_open over n bytes at `data`, which the caller keeps alive until gguf_close() (tests, fuzzing). */
enum status gguf_open_memory(const void *data, size_t n, struct gguf **out, struct error *err);
void gguf_close(struct gguf *g); /* NULL is allowed */

uint32_t gguf_version(const struct gguf *g);
uint64_t gguf_file_bytes(const struct gguf *g);
size_t gguf_n_values(const struct gguf *g);
const struct gguf_value *gguf_value_at(const struct gguf *g, size_t i);
size_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i);

/* NULL when the key or tensor is not there. */
const struct gguf_value *gguf_find(const struct gguf *g, const char *key);
const struct gguf_tensor *gguf_find_tensor(const struct gguf *g, const char *name);

/*
 * Typed reads. NOT_FOUND when the key is absent; INVALID, with a sentence naming the key and the type found, when it
 * has another type or does not fit. get_uint takes any integer type that is not negative; get_float any float or
 * integer.
 */
enum status gguf_get_uint(const struct gguf *g, const char *key, uint64_t *out, struct error *err);
enum status gguf_get_float(const struct gguf *g, const char *key, double *out, struct error *err);
enum status gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct error *err);
enum status gguf_get_str(const struct gguf *g, const char *key, struct str *out, struct error *err);

/*
 * Array reads into freshly allocated memory that the caller frees with free(); the strings themselves stay borrowed.
 * Integer and float arrays accept every width that fits the result.
 */
enum status gguf_get_strs(const struct gguf *g, const char *key, struct str **out, size_t *n, struct error *err);
enum status gguf_get_floats(const struct gguf *g, const char *key, float **out, size_t *n, struct error *err);
enum status gguf_get_ints(const struct gguf *g, const char *key, int32_t **out, size_t *n, struct error *err);

/* "u32", "string", ... for messages and `inspect`. */
const char *gguf_type_name(enum gguf_type type);
/* Bytes of one value in the file; 0 for strings and arrays, whose size varies. */
size_t gguf_type_bytes(enum gguf_type type);
