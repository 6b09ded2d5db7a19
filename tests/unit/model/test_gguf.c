#include "tests/unit/unit.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/inspect.h"
#include "engine/model/gguf.h"
#include "tests/unit/model/gguf_builder.h"

/* ---- Helpers ---- */

/* Opens what was built, which must succeed. The bytes stay in b. */
static struct gguf *opened(const struct buf *b)
{
	struct gguf *g;
	struct error err;
	if (gguf_open_memory(b->data, b->len, &g, &err) != STATUS_OK)
		fail_msg("%s", err.message);
	return g;
}

/* The bytes in b must be refused with this status and a message that holds both parts. b is emptied. */
static void refused(struct buf *b, enum status status, const char *what, const char *where)
{
	struct gguf *g = (void *)b;
	struct error err = {0};
	/* An exact copy, so that a sanitizer sees a read past the end. */
	char *copy = malloc(b->len + 1);
	memcpy(copy, b->data, b->len);
	enum status st = gguf_open_memory(copy, b->len, &g, &err);
	free(copy);
	if (st != status || err.status != status || !strstr(err.message, what) || !strstr(err.message, where))
		fail_msg("expected %s with \"%s\" and \"%s\", found %s: %s", status_text(status), what, where,
			 status_text(st), err.message);
	assert_null(g);
	buf_free(b);
}

/* Everything a caller can do with an open file; a sanitizer build finds what reaches outside. */
static void walk(const struct gguf *g)
{
	struct error err;
	for (size_t i = 0; i < gguf_n_values(g); i++) {
		char key[256];
		struct str k = gguf_value_at(g, i)->key, s, *strs;
		snprintf(key, sizeof key, "%.*s", STR_ARG(k));
		float *floats;
		int32_t *ints;
		size_t n;
		gguf_get_str(g, key, &s, &err);
		if (gguf_get_strs(g, key, &strs, &n, &err) == STATUS_OK)
			free(strs);
		if (gguf_get_floats(g, key, &floats, &n, &err) == STATUS_OK)
			free(floats);
		if (gguf_get_ints(g, key, &ints, &n, &err) == STATUS_OK)
			free(ints);
	}
	for (size_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);
		float x[256];
		t->format->dequantize(t->data, x, t->format->block_elems);
		t->format->dequantize(t->data + t->n_bytes - t->format->block_bytes, x, t->format->block_elems);
	}
	struct buf out = BUF_INIT;
	assert_int_equal(inspect_gguf(g, "file", false, &out, &err), STATUS_OK);
	assert_int_equal(inspect_gguf(g, "file", true, &out, &err), STATUS_OK);
	buf_free(&out);
}

static const uint64_t MATRIX[4] = {64, 3, 1, 1}, VECTOR[4] = {4, 1, 1, 1};

/* A valid file with one value of every type, arrays, and two tensors: Q8_0 64 x 3 at offset 0, F32 4 at offset 224. */
static void build_small(struct buf *b, uint32_t version)
{
	put_header(b, version, 2, 17);
	put_value(b, "u8", GGUF_U8, &(uint8_t){200}, 1);
	put_value(b, "i8", GGUF_I8, &(int8_t){-5}, 1);
	put_value(b, "u16", GGUF_U16, &(uint16_t){60000}, 2);
	put_value(b, "i16", GGUF_I16, &(int16_t){-300}, 2);
	put_value_u32(b, "u32", 4000000000u);
	put_value(b, "i32", GGUF_I32, &(int32_t){-70000}, 4);
	put_value(b, "u64", GGUF_U64, &(uint64_t){UINT64_MAX}, 8);
	put_value(b, "i64", GGUF_I64, &(int64_t){INT64_MIN}, 8);
	put_value(b, "f32", GGUF_F32, &(float){1e-5f}, 4);
	put_value(b, "f64", GGUF_F64, &(double){1e300}, 8);
	put_value(b, "yes", GGUF_BOOL, &(uint8_t){1}, 1);
	put_value_str(b, "text", "caf\xC3\xA9");
	put_array(b, "strings", GGUF_STRING, 3);
	put_str(b, "one");
	put_str(b, "");
	put_str(b, "three");
	put_array(b, "floats", GGUF_F32, 2);
	buf_append(b, (float[]){0.5f, -2}, 8);
	put_array(b, "ints", GGUF_I16, 3);
	buf_append(b, (int16_t[]){1, -2, 3}, 6);
	put_array(b, "bools", GGUF_BOOL, 2);
	buf_append(b, (uint8_t[]){0, 1}, 2);
	put_array(b, "none", GGUF_U64, 0);
	put_tensor(b, "matrix", 2, MATRIX, QUANT_Q8_0, 0);
	put_tensor(b, "vector", 1, VECTOR, QUANT_F32, 224);
	put_padding(b, 32);
	for (int block = 0; block < 6; block++) {
		buf_append(b, (uint16_t[]){0x3C00}, 2);
		for (int e = 0; e < 32; e++)
			put_u8(b, (uint8_t)(block + e));
	}
	put_padding(b, 32);
	buf_append(b, (float[]){1, 2, 3, 4}, 16);
}

/* ---- Reading ---- */

static void both_versions_give_values_of_every_type(void **state)
{
	(void)state;
	for (uint32_t version = 2; version <= 3; version++) {
		struct buf b = BUF_INIT;
		build_small(&b, version);
		struct gguf *g = opened(&b);
		assert_int_equal(gguf_version(g), version);
		assert_int_equal(gguf_file_bytes(g), b.len);
		assert_int_equal(gguf_n_values(g), 17);

		struct error err;
		uint64_t u;
		double d;
		bool yes;
		struct str s;
		assert_int_equal(gguf_get_uint(g, "u8", &u, &err), STATUS_OK);
		assert_int_equal(u, 200);
		assert_int_equal(gguf_get_uint(g, "u16", &u, &err), STATUS_OK);
		assert_int_equal(u, 60000);
		assert_int_equal(gguf_get_uint(g, "u32", &u, &err), STATUS_OK);
		assert_int_equal(u, 4000000000u);
		assert_int_equal(gguf_get_uint(g, "u64", &u, &err), STATUS_OK);
		assert_true(u == UINT64_MAX);
		assert_int_equal(gguf_get_float(g, "i8", &d, &err), STATUS_OK);
		assert_true(d == -5);
		assert_int_equal(gguf_get_float(g, "i16", &d, &err), STATUS_OK);
		assert_true(d == -300);
		assert_int_equal(gguf_get_float(g, "i32", &d, &err), STATUS_OK);
		assert_true(d == -70000);
		assert_int_equal(gguf_get_float(g, "i64", &d, &err), STATUS_OK);
		assert_true(d == -0x1p63);
		assert_int_equal(gguf_get_float(g, "u64", &d, &err), STATUS_OK);
		assert_true(d == 0x1p64);
		assert_int_equal(gguf_get_float(g, "f32", &d, &err), STATUS_OK);
		assert_true(d == (double)1e-5f);
		assert_int_equal(gguf_get_float(g, "f64", &d, &err), STATUS_OK);
		assert_true(d == 1e300);
		assert_int_equal(gguf_get_bool(g, "yes", &yes, &err), STATUS_OK);
		assert_true(yes);
		assert_int_equal(gguf_get_str(g, "text", &s, &err), STATUS_OK);
		assert_true(str_is(s, "caf\xC3\xA9"));
		gguf_close(g);
		buf_free(&b);
	}
}

static void arrays_come_out_in_the_wanted_type(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	build_small(&b, 3);
	struct gguf *g = opened(&b);
	struct error err;
	struct str *strs;
	float *floats;
	int32_t *ints;
	size_t n;
	assert_int_equal(gguf_get_strs(g, "strings", &strs, &n, &err), STATUS_OK);
	assert_int_equal(n, 3);
	assert_true(str_is(strs[0], "one") && strs[1].n == 0 && str_is(strs[2], "three"));
	free(strs);
	assert_int_equal(gguf_get_floats(g, "floats", &floats, &n, &err), STATUS_OK);
	assert_true(n == 2 && floats[0] == 0.5f && floats[1] == -2);
	free(floats);
	assert_int_equal(gguf_get_floats(g, "ints", &floats, &n, &err), STATUS_OK);
	assert_true(n == 3 && floats[0] == 1 && floats[1] == -2 && floats[2] == 3);
	free(floats);
	assert_int_equal(gguf_get_ints(g, "ints", &ints, &n, &err), STATUS_OK);
	assert_true(n == 3 && ints[0] == 1 && ints[1] == -2 && ints[2] == 3);
	free(ints);
	assert_int_equal(gguf_get_ints(g, "none", &ints, &n, &err), STATUS_OK);
	assert_true(n == 0 && ints != NULL);
	free(ints);
	gguf_close(g);
	buf_free(&b);
}

static void tensors_have_their_shape_and_bytes(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	build_small(&b, 3);
	struct gguf *g = opened(&b);
	assert_int_equal(gguf_n_tensors(g), 2);
	const struct gguf_tensor *m = gguf_find_tensor(g, "matrix"), *v = gguf_find_tensor(g, "vector");
	assert_ptr_equal(m, gguf_tensor_at(g, 0));
	assert_ptr_equal(v, gguf_tensor_at(g, 1));
	assert_int_equal(m->format->type, QUANT_Q8_0);
	assert_int_equal(m->n_dims, 2);
	assert_true(m->dim[0] == 64 && m->dim[1] == 3 && m->dim[2] == 1 && m->dim[3] == 1);
	assert_int_equal(m->n_elems, 192);
	assert_int_equal(m->n_bytes, 6 * 34);
	assert_int_equal(m->offset % 32, 0);
	assert_int_equal(v->offset, m->offset + 224);
	float x[192];
	m->format->dequantize(m->data, x, 192);
	for (int i = 0; i < 192; i++)
		assert_true(x[i] == (float)(i / 32 + i % 32));
	v->format->dequantize(v->data, x, 4);
	assert_true(x[0] == 1 && x[3] == 4);
	assert_null(gguf_find_tensor(g, "matri"));
	assert_null(gguf_tensor_at(g, 2));
	gguf_close(g);
	buf_free(&b);
}

static void the_data_section_begins_at_the_alignment_of_the_file(void **state)
{
	(void)state;
	for (uint32_t alignment = 1; alignment <= 1024; alignment *= 4) {
		struct buf b = BUF_INIT;
		put_header(&b, 3, 1, 1);
		put_value_u32(&b, "general.alignment", alignment);
		put_tensor(&b, "t", 1, VECTOR, QUANT_F32, alignment);
		put_padding(&b, alignment);
		size_t base = b.len;
		put_u8(&b, 1);
		put_padding(&b, alignment);
		buf_append(&b, (float[]){1, 2, 3, 4}, 16);
		struct gguf *g = opened(&b);
		assert_int_equal(gguf_find_tensor(g, "t")->offset, base + alignment);
		gguf_close(g);
		buf_free(&b);
	}
}

static void a_vocabulary_needs_no_tensors_and_a_file_may_be_empty_of_both(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	put_header(&b, 3, 0, 1);
	put_array(&b, "tokenizer.ggml.tokens", GGUF_STRING, 1);
	put_str(&b, "x");
	struct gguf *g = opened(&b);
	assert_int_equal(gguf_n_tensors(g), 0);
	gguf_close(g);
	buf_free(&b);
	put_header(&b, 2, 0, 0);
	g = opened(&b);
	assert_int_equal(gguf_n_values(g), 0);
	assert_null(gguf_find(g, "anything"));
	assert_null(gguf_value_at(g, 0));
	gguf_close(g);
	gguf_close(NULL);
	buf_free(&b);
}

/* ---- What a typed read refuses ---- */

static void typed_reads_name_the_key_and_the_type_they_found(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	build_small(&b, 3);
	struct gguf *g = opened(&b);
	struct error err;
	uint64_t u = 7;
	double d;
	bool yes;
	struct str s, *strs;
	float *floats;
	int32_t *ints;
	size_t n;
	assert_int_equal(gguf_get_uint(g, "absent", &u, &err), STATUS_NOT_FOUND);
	assert_non_null(strstr(err.message, "'absent'"));
	assert_int_equal(gguf_get_uint(g, "text", &u, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "'text' is of type string"));
	assert_int_equal(gguf_get_uint(g, "i32", &u, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "-70000"));
	assert_int_equal(gguf_get_uint(g, "yes", &u, NULL), STATUS_INVALID);
	assert_int_equal(gguf_get_uint(g, "f32", &u, NULL), STATUS_INVALID);
	assert_int_equal(u, 7);
	assert_int_equal(gguf_get_float(g, "text", &d, &err), STATUS_INVALID);
	assert_int_equal(gguf_get_bool(g, "u8", &yes, &err), STATUS_INVALID);
	assert_int_equal(gguf_get_str(g, "strings", &s, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "array of string"));
	assert_int_equal(gguf_get_strs(g, "text", &strs, &n, &err), STATUS_INVALID);
	assert_int_equal(gguf_get_strs(g, "ints", &strs, &n, &err), STATUS_INVALID);
	assert_int_equal(gguf_get_strs(g, "none", &strs, &n, &err), STATUS_INVALID);
	assert_int_equal(gguf_get_floats(g, "strings", &floats, &n, &err), STATUS_INVALID);
	assert_int_equal(gguf_get_floats(g, "bools", &floats, &n, &err), STATUS_INVALID);
	assert_int_equal(gguf_get_ints(g, "floats", &ints, &n, &err), STATUS_INVALID);
	assert_int_equal(gguf_get_ints(g, "absent", &ints, &n, &err), STATUS_NOT_FOUND);
	gguf_close(g);
	buf_free(&b);
}

static void array_elements_that_do_not_fit_are_refused(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	put_header(&b, 3, 0, 4);
	put_array(&b, "large", GGUF_U32, 2);
	buf_append(&b, (uint32_t[]){INT32_MAX, (uint32_t)INT32_MAX + 1}, 8);
	put_array(&b, "small", GGUF_I64, 2);
	buf_append(&b, (int64_t[]){INT32_MIN, (int64_t)INT32_MIN - 1}, 16);
	put_array(&b, "huge", GGUF_F64, 1);
	buf_append(&b, (double[]){1e39}, 8);
	put_array(&b, "special", GGUF_F64, 2);
	buf_append(&b, (double[]){(double)INFINITY, (double)NAN}, 16);
	struct gguf *g = opened(&b);
	struct error err;
	int32_t *ints;
	float *floats;
	size_t n;
	assert_int_equal(gguf_get_ints(g, "large", &ints, &n, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "element 1 of 'large'"));
	assert_int_equal(gguf_get_ints(g, "small", &ints, &n, &err), STATUS_INVALID);
	assert_int_equal(gguf_get_floats(g, "huge", &floats, &n, &err), STATUS_INVALID);
	assert_int_equal(gguf_get_floats(g, "special", &floats, &n, &err), STATUS_OK);
	assert_true(isinf(floats[0]) && isnan(floats[1]));
	free(floats);
	gguf_close(g);
	buf_free(&b);
}

/* ---- Damaged files ---- */

static void damaged_headers_are_named(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	buf_puts(&b, "PK\x03\x04 a zip file, not a model");
	refused(&b, STATUS_CORRUPT, "not a GGUF file", "50 4b 03 04");
	buf_puts(&b, "GG");
	refused(&b, STATUS_CORRUPT, "the magic number", "ends at byte 2");
	put_header(&b, 1, 0, 0);
	refused(&b, STATUS_UNSUPPORTED, "version 1", "byte 4");
	put_header(&b, 4, 0, 0);
	refused(&b, STATUS_UNSUPPORTED, "version 4", "2 and 3 are supported");
	put_header(&b, 0, 0, 0);
	refused(&b, STATUS_UNSUPPORTED, "version 0", "byte 4");
	put_header(&b, 0x03000000, 0, 0);
	refused(&b, STATUS_UNSUPPORTED, "big-endian", "version 3");
	buf_puts(&b, "FUGG\3\2\1\1");
	refused(&b, STATUS_UNSUPPORTED, "big-endian", "");
	put_header(&b, 3, UINT64_MAX, 0);
	refused(&b, STATUS_CORRUPT, "18446744073709551615 tensors", "24 bytes");
	put_header(&b, 3, 0, UINT64_MAX / 14);
	refused(&b, STATUS_CORRUPT, "metadata entries", "24 bytes");
}

static void damaged_metadata_is_named_with_its_key_and_byte(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	char zeros[64] = {0};

	put_header(&b, 3, 0, 1);
	put_u64(&b, UINT64_MAX - 3);
	buf_append(&b, zeros, sizeof zeros);
	refused(&b, STATUS_CORRUPT, "metadata entry 0 at byte 24: the key needs", "at byte 32");

	put_header(&b, 3, 0, 1);
	put_key(&b, "", GGUF_U32);
	buf_append(&b, zeros, sizeof zeros);
	refused(&b, STATUS_CORRUPT, "the key of 0 bytes", "byte 24");

	put_header(&b, 3, 0, 1);
	put_key(&b, "bad\nkey", GGUF_U32);
	buf_append(&b, zeros, sizeof zeros);
	refused(&b, STATUS_CORRUPT, "control character", "byte 35");

	put_header(&b, 3, 0, 1);
	put_key(&b, "bad\xC3key", GGUF_U32);
	buf_append(&b, zeros, sizeof zeros);
	refused(&b, STATUS_CORRUPT, "not UTF-8", "byte 32");

	put_header(&b, 3, 0, 1);
	put_u64(&b, 65536);
	for (int i = 0; i < 65536 + 64; i++)
		put_u8(&b, 'k');
	refused(&b, STATUS_CORRUPT, "65536 bytes", "1 to 65535");

	put_header(&b, 3, 0, 1);
	put_key(&b, "k", 13);
	put_u64(&b, 0);
	refused(&b, STATUS_CORRUPT, "metadata entry 'k' at byte 24: unknown value type 13", "byte 33");

	put_header(&b, 3, 0, 1);
	put_array(&b, "k", 99, 0);
	refused(&b, STATUS_CORRUPT, "unknown element type 99", "byte 37");

	put_header(&b, 3, 0, 1);
	put_array(&b, "k", GGUF_ARRAY, 1);
	put_u64(&b, 0);
	refused(&b, STATUS_UNSUPPORTED, "array of arrays", "'k'");

	put_header(&b, 3, 0, 1);
	put_array(&b, "k", GGUF_U64, UINT64_MAX / 8 + 2);
	put_u64(&b, 0);
	refused(&b, STATUS_CORRUPT, "values of type u64", "past the end");

	put_header(&b, 3, 0, 1);
	put_array(&b, "k", GGUF_STRING, UINT64_MAX);
	put_str(&b, "x");
	refused(&b, STATUS_CORRUPT, "a string needs", "'k'");

	put_header(&b, 3, 0, 1);
	put_array(&b, "k", GGUF_STRING, 2);
	put_str(&b, "x");
	put_u64(&b, UINT64_MAX);
	refused(&b, STATUS_CORRUPT, "a string needs 18446744073709551615 bytes", "'k'");

	put_header(&b, 3, 0, 1);
	put_value(&b, "k", GGUF_BOOL, "\2", 1);
	refused(&b, STATUS_CORRUPT, "bool of value 2", "byte 37");

	put_header(&b, 3, 0, 1);
	put_array(&b, "k", GGUF_BOOL, 3);
	buf_append(&b, "\0\1\377", 3);
	refused(&b, STATUS_CORRUPT, "bool of value 255", "byte 51");

	put_header(&b, 3, 0, 2);
	put_value_u32(&b, "twice", 1);
	put_value_u32(&b, "twice", 1);
	refused(&b, STATUS_CORRUPT, "'twice' at byte 45", "it is there twice");
}

static void damaged_tensors_are_named_with_their_byte(void **state)
{
	(void)state;
	static const struct {
		const char *what, *where;
		enum status status;
		uint32_t n_dims;
		uint64_t dims[5];
		uint32_t type;
		uint64_t offset;
	} cases[] = {
		{"0 dimensions", "tensor 't' at byte 24", STATUS_CORRUPT, 0, {0}, QUANT_F32, 0},
		{"5 dimensions", "byte 33", STATUS_CORRUPT, 5, {1, 1, 1, 1, 1}, QUANT_F32, 0},
		{"dimension 1 is 0", "byte 45", STATUS_CORRUPT, 2, {32, 0}, QUANT_F32, 0},
		{"more elements than 64 bits",
		 "dimension 1",
		 STATUS_CORRUPT,
		 2,
		 {1ull << 32, 1ull << 32},
		 QUANT_F32,
		 0},
		{"more elements than 64 bits",
		 "dimension 1",
		 STATUS_CORRUPT,
		 2,
		 {1ull << 32, 1ull << 31},
		 QUANT_F32,
		 0},
		{"more bytes than 64 bits", "F32", STATUS_CORRUPT, 2, {1ull << 32, 1ull << 30}, QUANT_F32, 0},
		{"tensor type 20 (IQ4_NL)", "'t'", STATUS_UNSUPPORTED, 1, {32}, 20, 0},
		{"tensor type 39 (MXFP4)", "not supported", STATUS_UNSUPPORTED, 1, {32}, 39, 0},
		{"tensor type 777 (unknown)", "byte 45", STATUS_UNSUPPORTED, 1, {32}, 777, 0},
		{"rows of 48 elements", "blocks of 32 (Q4_0)", STATUS_CORRUPT, 2, {48, 2}, QUANT_Q4_0, 0},
		{"rows of 128 elements", "blocks of 256 (Q6_K)", STATUS_CORRUPT, 2, {128, 2}, QUANT_Q6_K, 0},
		{"offset 16 is not a multiple", "alignment 32", STATUS_CORRUPT, 1, {4}, QUANT_F32, 16},
		{"past the end", "128 bytes", STATUS_CORRUPT, 1, {32}, QUANT_F32, 0},
		{"past the end", "offset 128", STATUS_CORRUPT, 1, {4}, QUANT_F32, 128},
		{"past the end", "offset 18446744073709551584", STATUS_CORRUPT, 1, {4}, QUANT_F32, UINT64_MAX - 31},
	};
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		struct buf b = BUF_INIT;
		put_header(&b, 3, 1, 0);
		put_tensor(&b, "t", cases[i].n_dims, cases[i].dims, cases[i].type, cases[i].offset);
		put_padding(&b, 32);
		for (int n = 0; n < 64; n++)
			put_u8(&b, 0);
		refused(&b, cases[i].status, cases[i].what, cases[i].where);
	}

	struct buf b = BUF_INIT;
	char zeros[256] = {0};
	put_header(&b, 3, 2, 0);
	put_tensor(&b, "same", 1, VECTOR, QUANT_F32, 0);
	put_tensor(&b, "same", 1, VECTOR, QUANT_F32, 32);
	buf_append(&b, zeros, sizeof zeros);
	refused(&b, STATUS_CORRUPT, "tensor 'same'", "it is there twice");

	put_header(&b, 3, 2, 0);
	put_tensor(&b, "b", 1, VECTOR, QUANT_F32, 32);
	put_tensor(&b, "a", 1, (uint64_t[]){16}, QUANT_F32, 0);
	buf_append(&b, zeros, sizeof zeros);
	refused(&b, STATUS_CORRUPT, "tensor 'b'", "begins inside tensor 'a'");

	put_header(&b, 3, 1, 0);
	put_u64(&b, 300);
	for (int i = 0; i < 500; i++)
		put_u8(&b, 'n');
	refused(&b, STATUS_CORRUPT, "the name of 300 bytes", "tensor 0 at byte 24");
}

static void a_wrong_alignment_is_refused(void **state)
{
	(void)state;
	static const uint32_t wrong[] = {0, 3, 48, 0x80000000u};
	struct buf b = BUF_INIT;
	for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
		put_header(&b, 3, 0, 1);
		put_value_u32(&b, "general.alignment", wrong[i]);
		refused(&b, STATUS_CORRUPT, "power of two", "byte 53");
	}
	put_header(&b, 3, 0, 1);
	put_value_str(&b, "general.alignment", "32");
	refused(&b, STATUS_CORRUPT, "'general.alignment'", "type string");
}

static void a_file_cut_anywhere_is_refused(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	build_small(&b, 3);
	for (size_t n = 0; n < b.len; n++) {
		struct buf cut = BUF_INIT;
		buf_append(&cut, b.data, n);
		if (n == 0)
			buf_reserve(&cut, 1);
		refused(&cut, STATUS_CORRUPT, "byte", "");
	}
	buf_free(&b);
}

static void no_changed_byte_reaches_outside_the_file(void **state)
{
	(void)state;
	static const uint8_t changes[] = {0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF};
	struct buf b = BUF_INIT;
	build_small(&b, 3);
	char *copy = malloc(b.len);
	int n_opened = 0, n_refused = 0;
	for (size_t at = 0; at < b.len; at++) {
		for (size_t k = 0; k < sizeof changes; k++) {
			memcpy(copy, b.data, b.len);
			copy[at] = (char)(copy[at] ^ changes[k]);
			struct gguf *g;
			struct error err = {0};
			if (gguf_open_memory(copy, b.len, &g, &err) == STATUS_OK) {
				walk(g);
				gguf_close(g);
				n_opened++;
			} else {
				assert_true(err.message[0] != '\0');
				n_refused++;
			}
		}
	}
	/* Data and values can change unnoticed; structure cannot. */
	assert_true(n_opened > 0 && n_refused > 0);
	free(copy);
	buf_free(&b);
}

/* ---- Files ---- */

static char folder[64];

static int make_folder(void **state)
{
	(void)state;
	snprintf(folder, sizeof folder, "/tmp/kvasir-gguf-XXXXXX");
	return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
	(void)state;
	return rmdir(folder);
}

static void path_in(char path[128], const char *name)
{
	snprintf(path, 128, "%s/%s", folder, name);
}

static void write_file(const char *path, const void *data, size_t n)
{
	FILE *f = fopen(path, "wb");
	assert_non_null(f);
	assert_int_equal(fwrite(data, 1, n, f), n);
	assert_int_equal(fclose(f), 0);
}

static void a_file_is_mapped_and_read(void **state)
{
	(void)state;
	char path[128];
	path_in(path, "good.gguf");
	struct buf b = BUF_INIT;
	build_small(&b, 3);
	write_file(path, b.data, b.len);
	struct gguf *g;
	struct error err;
	assert_int_equal(gguf_open(path, &g, &err), STATUS_OK);
	unlink(path); /* the mapping keeps it */
	assert_int_equal(gguf_file_bytes(g), b.len);
	walk(g);
	gguf_close(g);
	buf_free(&b);
}

/* Opening must fail with this status and a message that names the path and holds `what`. */
static void cannot_open(const char *path, enum status status, const char *what)
{
	struct gguf *g;
	struct error err = {0};
	assert_int_equal(gguf_open(path, &g, &err), status);
	assert_null(g);
	assert_non_null(strstr(err.message, path));
	assert_non_null(strstr(err.message, what));
}

static void what_is_not_a_file_is_an_io_error_that_names_the_path(void **state)
{
	(void)state;
	char path[128];
	path_in(path, "absent.gguf");
	cannot_open(path, STATUS_IO, "No such file");
	cannot_open(folder, STATUS_IO, "is a directory");
	cannot_open("/dev/null", STATUS_IO, "not a regular file");
	path_in(path, "pipe");
	assert_int_equal(mkfifo(path, 0600), 0);
	cannot_open(path, STATUS_IO, "not a regular file");
	unlink(path);
	path_in(path, "empty.gguf");
	write_file(path, "", 0);
	cannot_open(path, STATUS_IO, "is empty");
	unlink(path);
	if (geteuid() != 0) { /* root may read everything */
		path_in(path, "secret.gguf");
		write_file(path, "GGUF", 4);
		chmod(path, 0);
		cannot_open(path, STATUS_IO, "Permission denied");
		unlink(path);
	}
}

static void a_damaged_file_is_named_with_its_path(void **state)
{
	(void)state;
	char path[128];
	path_in(path, "bad.gguf");
	write_file(path, "GGUF\3\0\0\0", 8);
	cannot_open(path, STATUS_CORRUPT, "the number of tensors needs 8 bytes at byte 8");
	unlink(path);
}

UNIT_MAIN(cmocka_unit_test(both_versions_give_values_of_every_type),
	  cmocka_unit_test(arrays_come_out_in_the_wanted_type), cmocka_unit_test(tensors_have_their_shape_and_bytes),
	  cmocka_unit_test(the_data_section_begins_at_the_alignment_of_the_file),
	  cmocka_unit_test(a_vocabulary_needs_no_tensors_and_a_file_may_be_empty_of_both),
	  cmocka_unit_test(typed_reads_name_the_key_and_the_type_they_found),
	  cmocka_unit_test(array_elements_that_do_not_fit_are_refused), cmocka_unit_test(damaged_headers_are_named),
	  cmocka_unit_test(damaged_metadata_is_named_with_its_key_and_byte),
	  cmocka_unit_test(damaged_tensors_are_named_with_their_byte), cmocka_unit_test(a_wrong_alignment_is_refused),
	  cmocka_unit_test(a_file_cut_anywhere_is_refused), cmocka_unit_test(no_changed_byte_reaches_outside_the_file),
	  cmocka_unit_test_setup_teardown(a_file_is_mapped_and_read, make_folder, remove_folder),
	  cmocka_unit_test_setup_teardown(what_is_not_a_file_is_an_io_error_that_names_the_path, make_folder,
					  remove_folder),
	  cmocka_unit_test_setup_teardown(a_damaged_file_is_named_with_its_path, make_folder, remove_folder))
