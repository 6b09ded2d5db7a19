/*
 * The GGUF reader. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
 *
 *   header    "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries
 *   metadata  string key, u32 type, value; an array is u32 element type, u64 count, elements; a string is u64 length,
 * bytes tensors   string name, u32 number of dimensions, u64 each dimension, u32 type, u64 offset from the data section
 *   data      begins at the next multiple of general.alignment (32 when absent)
 *
 * Parsing walks the file once through a cursor that knows what it is reading, so that each error names it. Nothing is
 * copied but the entry tables: values and names point into the file.
 */
#include "engine/model/gguf.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/hash.h"
#include "engine/base/utf8.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are copied from the file as they are");
static_assert(sizeof(size_t) == 8, "file offsets are used as sizes");

enum {
	DEFAULT_ALIGNMENT = 32,
	MAX_KEY_BYTES = 65535, /* the format's limit */
	MAX_NAME_BYTES = 255,  /* the format says 64; some writers use more */
	/* The least an entry takes, which bounds how many a file of a given size can hold. */
	MIN_VALUE_BYTES = 8 + 1 + 4 + 1,
	MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8,
	MAX_ENTRIES = INT32_MAX, /* indices in the lookup maps are int32 */
};

struct gguf {
	const uint8_t *data;
	uint64_t size;
	bool mapped;
	uint32_t version;
	size_t n_values, n_tensors;
	struct gguf_value *values;
	struct gguf_tensor *tensors;
	struct strmap value_index, tensor_index;
};

/* ---- Types ---- */

static const struct {
	const char *name;
	size_t bytes; /* of an element; 0: it has no fixed size */
} types[] = {
	[GGUF_U8] = {"u8", 1},
	[GGUF_I8] = {"i8", 1},
	[GGUF_U16] = {"u16", 2},
	[GGUF_I16] = {"i16", 2},
	[GGUF_U32] = {"u32", 4},
	[GGUF_I32] = {"i32", 4},
	[GGUF_F32] = {"f32", 4},
	[GGUF_BOOL] = {"bool", 1},
	[GGUF_U64] = {"u64", 8},
	[GGUF_I64] = {"i64", 8},
	[GGUF_STRING] = {"string", 0},
	[GGUF_ARRAY] = {"array", 0},
	[GGUF_F64] = {"f64", 8},
};

enum { N_TYPES = sizeof types / sizeof types[0] };

const char *gguf_type_name(enum gguf_type type)
{
	return (size_t)type < N_TYPES ? types[type].name : "unknown";
}

size_t gguf_type_bytes(enum gguf_type type)
{
	return (size_t)type < N_TYPES ? types[type].bytes : 0;
}

/* Names of tensor types that ggml defines and this reader does not decode, for messages. */
static const char *undecoded_type_name(uint32_t type)
{
	static const char *const names[] = {
		[9] = "Q8_1",   [15] = "Q8_K",   [16] = "IQ2_XXS", [17] = "IQ2_XS", [18] = "IQ3_XXS",
		[19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S",   [22] = "IQ2_S",  [23] = "IQ4_XS",
		[24] = "I8",    [25] = "I16",    [26] = "I32",     [27] = "I64",    [28] = "F64",
		[29] = "IQ1_M", [34] = "TQ1_0",  [35] = "TQ2_0",   [39] = "MXFP4",
	};
	return type < sizeof names / sizeof names[0] && names[type] ? names[type] : "unknown";
}

/* ---- The cursor ---- */

struct cursor {
	const uint8_t *data;
	uint64_t size, at;
	/* What is being read, for messages: `kind` 'name' once the name is known, else `kind` number index. */
	const char *kind;
	uint64_t index;
	struct str name;
	uint64_t start; /* where it begins */
	struct error *err;
};

static enum status fail(const struct cursor *c, enum status status, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

static enum status fail(const struct cursor *c, enum status status, const char *fmt, ...)
{
	char what[300];
	va_list args;
	va_start(args, fmt);
	vsnprintf(what, sizeof what, fmt, args);
	va_end(args);
	if (c->name.n > 0) {
		int n = c->name.n > 120 ? 120 : (int)c->name.n;
		return error_set(c->err, status, "%s '%.*s' at byte %" PRIu64 ": %s", c->kind, n, c->name.p, c->start,
				 what);
	}
	if (c->kind)
		return error_set(c->err, status, "%s %" PRIu64 " at byte %" PRIu64 ": %s", c->kind, c->index, c->start,
				 what);
	return error_set(c->err, status, "GGUF header: %s", what);
}

/* Begins the index-th entry of a kind. */
static void enter(struct cursor *c, const char *kind, uint64_t index)
{
	c->kind = kind;
	c->index = index;
	c->name = (struct str){NULL, 0};
	c->start = c->at;
}

static uint64_t left(const struct cursor *c)
{
	return c->size - c->at;
}

/* The next n bytes, or NULL with the error CORRUPT when the file ends before. */
static const uint8_t *take(struct cursor *c, uint64_t n, const char *what)
{
	if (n > left(c)) {
		fail(c, STATUS_CORRUPT,
		     "%s needs %" PRIu64 " bytes at byte %" PRIu64 ", but the file ends at byte %" PRIu64, what, n,
		     c->at, c->size);
		return NULL;
	}
	const uint8_t *p = c->data + c->at;
	c->at += n;
	return p;
}

static enum status take_u32(struct cursor *c, const char *what, uint32_t *out)
{
	const uint8_t *p = take(c, sizeof *out, what);
	if (!p)
		return STATUS_CORRUPT;
	memcpy(out, p, sizeof *out);
	return STATUS_OK;
}

static enum status take_u64(struct cursor *c, const char *what, uint64_t *out)
{
	const uint8_t *p = take(c, sizeof *out, what);
	if (!p)
		return STATUS_CORRUPT;
	memcpy(out, p, sizeof *out);
	return STATUS_OK;
}

static enum status take_string(struct cursor *c, const char *what, struct str *out)
{
	uint64_t n;
	enum status st = take_u64(c, what, &n);
	if (st != STATUS_OK)
		return st;
	const uint8_t *p = take(c, n, what);
	if (!p)
		return STATUS_CORRUPT;
	*out = (struct str){(const char *)p, n};
	return STATUS_OK;
}

/* Keys and tensor names: never empty, printable UTF-8, so that messages and listings can show them as they are. */
static enum status take_name(struct cursor *c, const char *what, uint64_t max_bytes, struct str *out)
{
	uint64_t at = c->at;
	struct str s;
	enum status st = take_string(c, what, &s);
	if (st != STATUS_OK)
		return st;
	if (s.n == 0 || s.n > max_bytes) {
		return fail(c, STATUS_CORRUPT,
			    "%s of %zu bytes at byte %" PRIu64 ", where 1 to %" PRIu64 " are allowed", what, s.n, at,
			    max_bytes);
	}
	for (size_t i = 0; i < s.n; i++) {
		if ((unsigned char)s.p[i] < 0x20 || s.p[i] == 0x7f)
			return fail(c, STATUS_CORRUPT, "%s holds a control character at byte %" PRIu64, what,
				    at + 8 + i);
	}
	if (!utf8_valid(s.p, s.n))
		return fail(c, STATUS_CORRUPT, "%s at byte %" PRIu64 " is not UTF-8", what, at + 8);
	*out = s;
	return STATUS_OK;
}

/* ---- Parsing ---- */

static enum status parse_header(struct cursor *c, struct gguf *g)
{
	const uint8_t *magic = take(c, 4, "the magic number");
	if (!magic)
		return STATUS_CORRUPT;
	if (memcmp(magic, "FUGG", 4) == 0)
		return fail(c, STATUS_UNSUPPORTED, "the file is big-endian; only little-endian files are supported");
	if (memcmp(magic, "GGUF", 4) != 0) {
		return fail(c, STATUS_CORRUPT,
			    "not a GGUF file: it begins with bytes %02x %02x %02x %02x instead of \"GGUF\"", magic[0],
			    magic[1], magic[2], magic[3]);
	}
	enum status st = take_u32(c, "the version", &g->version);
	if (st != STATUS_OK)
		return st;
	if (g->version != 0 && (g->version & 0xFFFF) == 0) {
		return fail(c, STATUS_UNSUPPORTED,
			    "the file is big-endian (version %u); only little-endian files are supported",
			    __builtin_bswap32(g->version));
	}
	if (g->version != 2 && g->version != 3)
		return fail(c, STATUS_UNSUPPORTED, "version %u at byte 4; versions 2 and 3 are supported", g->version);

	uint64_t n_tensors, n_values;
	st = take_u64(c, "the number of tensors", &n_tensors);
	if (st == STATUS_OK)
		st = take_u64(c, "the number of metadata entries", &n_values);
	if (st != STATUS_OK)
		return st;
	if (n_tensors > MAX_ENTRIES || n_tensors > left(c) / MIN_TENSOR_BYTES) {
		return fail(c, STATUS_CORRUPT, "%" PRIu64 " tensors (byte 8) do not fit a file of %" PRIu64 " bytes",
			    n_tensors, c->size);
	}
	if (n_values > MAX_ENTRIES || n_values > left(c) / MIN_VALUE_BYTES) {
		return fail(c, STATUS_CORRUPT,
			    "%" PRIu64 " metadata entries (byte 16) do not fit a file of %" PRIu64 " bytes", n_values,
			    c->size);
	}
	g->n_tensors = n_tensors;
	g->n_values = n_values;
	return STATUS_OK;
}

/* `count` elements of one type, which is not an array. */
static enum status parse_elements(struct cursor *c, enum gguf_type type, uint64_t count)
{
	if (type == GGUF_STRING) {
		for (uint64_t i = 0; i < count; i++) {
			struct str s;
			enum status st = take_string(c, "a string", &s);
			if (st != STATUS_OK)
				return st;
		}
		return STATUS_OK;
	}
	uint64_t bytes = types[type].bytes;
	if (count > left(c) / bytes) {
		return fail(c, STATUS_CORRUPT,
			    "%" PRIu64 " values of type %s at byte %" PRIu64 " run past the end of the file, "
			    "which is at byte %" PRIu64,
			    count, types[type].name, c->at, c->size);
	}
	if (type == GGUF_BOOL) {
		for (uint64_t i = 0; i < count; i++) {
			if (c->data[c->at + i] > 1) {
				return fail(c, STATUS_CORRUPT, "bool of value %u at byte %" PRIu64, c->data[c->at + i],
					    c->at + i);
			}
		}
	}
	c->at += count * bytes;
	return STATUS_OK;
}

static enum status parse_value(struct cursor *c, struct gguf_value *v)
{
	enum status st = take_name(c, "the key", MAX_KEY_BYTES, &v->key);
	if (st != STATUS_OK)
		return st;
	c->name = v->key;
	uint32_t type;
	st = take_u32(c, "the type", &type);
	if (st != STATUS_OK)
		return st;
	if (type >= N_TYPES)
		return fail(c, STATUS_CORRUPT, "unknown value type %u at byte %" PRIu64, type, c->at - 4);
	v->type = v->elem_type = (enum gguf_type)type;
	v->count = 1;
	if (v->type == GGUF_ARRAY) {
		uint32_t elem_type;
		st = take_u32(c, "the element type", &elem_type);
		if (st != STATUS_OK)
			return st;
		if (elem_type == GGUF_ARRAY) {
			return fail(c, STATUS_UNSUPPORTED,
				    "array of arrays at byte %" PRIu64 "; arrays of plain values are supported",
				    c->at - 4);
		}
		if (elem_type >= N_TYPES)
			return fail(c, STATUS_CORRUPT, "unknown element type %u at byte %" PRIu64, elem_type,
				    c->at - 4);
		v->elem_type = (enum gguf_type)elem_type;
		st = take_u64(c, "the element count", &v->count);
		if (st != STATUS_OK)
			return st;
	}
	v->data = c->data + c->at;
	return parse_elements(c, v->elem_type, v->count);
}

/* Shape and size; the product is checked so that n_bytes cannot wrap. */
static enum status parse_shape(struct cursor *c, struct gguf_tensor *t)
{
	enum status st = take_u32(c, "the number of dimensions", &t->n_dims);
	if (st != STATUS_OK)
		return st;
	if (t->n_dims < 1 || t->n_dims > GGUF_MAX_DIMS) {
		return fail(c, STATUS_CORRUPT, "%u dimensions at byte %" PRIu64 ", where 1 to %d are allowed",
			    t->n_dims, c->at - 4, GGUF_MAX_DIMS);
	}
	t->n_elems = 1;
	for (uint32_t i = 0; i < GGUF_MAX_DIMS; i++) {
		t->dim[i] = 1;
		if (i >= t->n_dims)
			continue;
		st = take_u64(c, "a dimension", &t->dim[i]);
		if (st != STATUS_OK)
			return st;
		if (t->dim[i] == 0)
			return fail(c, STATUS_CORRUPT, "dimension %u is 0 at byte %" PRIu64, i, c->at - 8);
		if (__builtin_mul_overflow(t->n_elems, t->dim[i], &t->n_elems) || t->n_elems > INT64_MAX) {
			return fail(c, STATUS_CORRUPT,
				    "dimension %u of %" PRIu64 " at byte %" PRIu64
				    " makes more elements than 64 bits hold",
				    i, t->dim[i], c->at - 8);
		}
	}
	uint32_t type;
	st = take_u32(c, "the type", &type);
	if (st != STATUS_OK)
		return st;
	t->format = quant_format(type);
	if (!t->format) {
		return fail(c, STATUS_UNSUPPORTED, "tensor type %u (%s) at byte %" PRIu64 " is not supported", type,
			    undecoded_type_name(type), c->at - 4);
	}
	if (t->dim[0] % t->format->block_elems != 0) {
		return fail(c, STATUS_CORRUPT, "rows of %" PRIu64 " elements are not whole blocks of %u (%s)",
			    t->dim[0], t->format->block_elems, t->format->name);
	}
	if (__builtin_mul_overflow(t->n_elems / t->format->block_elems, (uint64_t)t->format->block_bytes,
				   &t->n_bytes)) {
		return fail(c, STATUS_CORRUPT, "%" PRIu64 " elements of type %s take more bytes than 64 bits count",
			    t->n_elems, t->format->name);
	}
	return STATUS_OK;
}

static enum status parse_tensor(struct cursor *c, struct gguf_tensor *t)
{
	enum status st = take_name(c, "the name", MAX_NAME_BYTES, &t->name);
	if (st != STATUS_OK)
		return st;
	c->name = t->name;
	st = parse_shape(c, t);
	if (st != STATUS_OK)
		return st;
	return take_u64(c, "the offset", &t->offset); /* relative until place_tensors() */
}

/* Records name -> i, refusing a second entry of the same name. */
static enum status add_index(const struct cursor *c, struct strmap *index, struct str name, size_t i)
{
	int32_t first;
	if (strmap_get(index, name, &first))
		return fail(c, STATUS_CORRUPT, "it is there twice (entries %d and %zu)", first, i);
	if (!strmap_set(index, name, (int32_t)i))
		return fail(c, STATUS_NOMEM, "no memory for the index");
	return STATUS_OK;
}

static enum status parse_values(struct cursor *c, struct gguf *g)
{
	for (size_t i = 0; i < g->n_values; i++) {
		enter(c, "metadata entry", i);
		enum status st = parse_value(c, &g->values[i]);
		if (st == STATUS_OK)
			st = add_index(c, &g->value_index, g->values[i].key, i);
		if (st != STATUS_OK)
			return st;
	}
	return STATUS_OK;
}

static enum status read_alignment(const struct gguf *g, uint64_t *alignment, struct error *err)
{
	*alignment = DEFAULT_ALIGNMENT;
	enum status st = gguf_get_uint(g, "general.alignment", alignment, err);
	if (st == STATUS_NOT_FOUND)
		return STATUS_OK;
	if (st == STATUS_INVALID) {
		if (err)
			err->status = STATUS_CORRUPT;
		return STATUS_CORRUPT;
	}
	const struct gguf_value *v = gguf_find(g, "general.alignment");
	if (*alignment == 0 || (*alignment & (*alignment - 1)) != 0 || *alignment > INT32_MAX) {
		return error_set(err, STATUS_CORRUPT,
				 "general.alignment of %" PRIu64 " at byte %" PRIu64 " is not a power of two "
				 "below 2^31",
				 *alignment, (uint64_t)(v->data - g->data));
	}
	return STATUS_OK;
}

static int by_offset(const void *a, const void *b)
{
	const struct gguf_tensor *x = *(const struct gguf_tensor *const *)a, *y = *(const struct gguf_tensor *const *)b;
	return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* A damaged offset can be aligned and inside the file and still be wrong; most such ones make two tensors overlap. */
static enum status check_overlap(const struct gguf *g, struct error *err)
{
	const struct gguf_tensor **order = calloc(g->n_tensors + 1, sizeof *order);
	if (!order)
		return error_set(err, STATUS_NOMEM, "no memory for %zu tensors", g->n_tensors);
	for (size_t i = 0; i < g->n_tensors; i++)
		order[i] = &g->tensors[i];
	qsort(order, g->n_tensors, sizeof *order, by_offset);
	enum status st = STATUS_OK;
	for (size_t i = 1; i < g->n_tensors && st == STATUS_OK; i++) {
		const struct gguf_tensor *a = order[i - 1], *b = order[i];
		if (b->offset - a->offset < a->n_bytes) {
			st = error_set(err, STATUS_CORRUPT,
				       "tensor '%.*s' at byte %" PRIu64 " begins inside tensor '%.*s' of %" PRIu64
				       " bytes at byte %" PRIu64,
				       STR_ARG(b->name), b->offset, STR_ARG(a->name), a->n_bytes, a->offset);
		}
	}
	free(order);
	return st;
}

/* The data section begins at the first aligned byte after the tensor entries; offsets count from there. */
static enum status place_tensors(struct cursor *c, struct gguf *g, uint64_t alignment)
{
	uint64_t base = (c->at + alignment - 1) & ~(alignment - 1);
	for (size_t i = 0; i < g->n_tensors; i++) {
		struct gguf_tensor *t = &g->tensors[i];
		c->name = t->name;
		c->start = (uint64_t)((const uint8_t *)t->name.p - g->data) - 8;
		if (t->offset % alignment != 0) {
			return fail(c, STATUS_CORRUPT,
				    "data offset %" PRIu64 " is not a multiple of the alignment %" PRIu64, t->offset,
				    alignment);
		}
		if (base > c->size || t->offset > c->size - base || t->n_bytes > c->size - base - t->offset) {
			return fail(c, STATUS_CORRUPT,
				    "its %" PRIu64 " bytes at offset %" PRIu64 " of the data section (byte %" PRIu64
				    ") run past the end of the file, which is at byte %" PRIu64,
				    t->n_bytes, t->offset, base, c->size);
		}
		t->offset += base;
		t->data = g->data + t->offset;
	}
	return check_overlap(g, c->err);
}

static enum status parse(struct gguf *g, struct error *err)
{
	struct cursor c = {.data = g->data, .size = g->size, .err = err};
	enum status st = parse_header(&c, g);
	if (st != STATUS_OK)
		return st;
	g->values = calloc(g->n_values + 1, sizeof *g->values);
	g->tensors = calloc(g->n_tensors + 1, sizeof *g->tensors);
	if (!g->values || !g->tensors || !strmap_init(&g->value_index, g->n_values) ||
	    !strmap_init(&g->tensor_index, g->n_tensors)) {
		return error_set(err, STATUS_NOMEM, "no memory for %zu metadata entries and %zu tensors", g->n_values,
				 g->n_tensors);
	}
	st = parse_values(&c, g);
	if (st != STATUS_OK)
		return st;
	uint64_t alignment;
	st = read_alignment(g, &alignment, err);
	if (st != STATUS_OK)
		return st;
	for (size_t i = 0; i < g->n_tensors; i++) {
		enter(&c, "tensor", i);
		st = parse_tensor(&c, &g->tensors[i]);
		if (st == STATUS_OK)
			st = add_index(&c, &g->tensor_index, g->tensors[i].name, i);
		if (st != STATUS_OK)
			return st;
	}
	return place_tensors(&c, g, alignment);
}

/* ---- Opening ---- */

enum status gguf_open_memory(const void *data, size_t n, struct gguf **out, struct error *err)
{
	*out = NULL;
	struct gguf *g = calloc(1, sizeof *g);
	if (!g)
		return error_set(err, STATUS_NOMEM, "no memory to open a GGUF file");
	g->data = data;
	g->size = n;
	enum status st = parse(g, err);
	if (st != STATUS_OK) {
		gguf_close(g);
		return st;
	}
	*out = g;
	return STATUS_OK;
}

/* Maps all of a regular, non-empty file. */
static enum status map_file(const char *path, void **data, size_t *size, struct error *err)
{
	/* O_NONBLOCK: opening a FIFO must fail the check below rather than wait for a writer. */
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return error_set(err, STATUS_IO, "cannot open %s: %s", path, strerror(errno));
	struct stat info;
	enum status st = STATUS_OK;
	if (fstat(fd, &info) != 0) {
		st = error_set(err, STATUS_IO, "cannot examine %s: %s", path, strerror(errno));
	} else if (S_ISDIR(info.st_mode)) {
		st = error_set(err, STATUS_IO, "%s is a directory, not a GGUF file", path);
	} else if (!S_ISREG(info.st_mode)) {
		st = error_set(err, STATUS_IO, "%s is not a regular file", path);
	} else if (info.st_size == 0) {
		st = error_set(err, STATUS_IO, "%s is empty", path);
	} else {
		*size = (size_t)info.st_size;
		*data = mmap(NULL, *size, PROT_READ, MAP_PRIVATE, fd, 0);
		if (*data == MAP_FAILED)
			st = error_set(err, STATUS_IO, "cannot map %s (%zu bytes): %s", path, *size, strerror(errno));
	}
	close(fd);
	return st;
}

enum status gguf_open(const char *path, struct gguf **out, struct error *err)
{
	*out = NULL;
	void *data = NULL;
	size_t size = 0;
	enum status st = map_file(path, &data, &size, err);
	if (st != STATUS_OK)
		return st;
	struct error why;
	st = gguf_open_memory(data, size, out, &why);
	if (st != STATUS_OK) {
		munmap(data, size);
		/* The end of a very long path says more than its beginning, and the reason must fit as well. */
		size_t n = strlen(path);
		return n > 180 ? error_set(err, st, "...%s: %s", path + n - 180, why.message)
			       : error_set(err, st, "%s: %s", path, why.message);
	}
	(*out)->mapped = true;
	return STATUS_OK;
}

void gguf_close(struct gguf *g)
{
	if (!g)
		return;
	if (g->mapped)
		munmap((void *)(uintptr_t)g->data, g->size);
	strmap_free(&g->value_index);
	strmap_free(&g->tensor_index);
	free(g->values);
	free(g->tensors);
	free(g);
}

/* ---- Access ---- */

uint32_t gguf_version(const struct gguf *g)
{
	return g->version;
}

uint64_t gguf_file_bytes(const struct gguf *g)
{
	return g->size;
}

size_t gguf_n_values(const struct gguf *g)
{
	return g->n_values;
}

const struct gguf_value *gguf_value_at(const struct gguf *g, size_t i)
{
	return i < g->n_values ? &g->values[i] : NULL;
}

size_t gguf_n_tensors(const struct gguf *g)
{
	return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i)
{
	return i < g->n_tensors ? &g->tensors[i] : NULL;
}

const struct gguf_value *gguf_find(const struct gguf *g, const char *key)
{
	int32_t i;
	return strmap_get(&g->value_index, str_from(key), &i) ? &g->values[i] : NULL;
}

const struct gguf_tensor *gguf_find_tensor(const struct gguf *g, const char *name)
{
	int32_t i;
	return strmap_get(&g->tensor_index, str_from(name), &i) ? &g->tensors[i] : NULL;
}
