/*
 * Builds the image of a GGUF v3 file without tensors in memory, for tests that need metadata only. Keys are written in
 * the order they are added; image_finish() fills in their number. Memory failures are sticky in `bytes.failed`.
 */
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/buf.h"

struct gguf_image {
	struct buf bytes;
	uint64_t n_values;
};

/* Type numbers of the format (ggml's gguf.md). */
enum { IMAGE_U32 = 4, IMAGE_I32 = 5, IMAGE_F32 = 6, IMAGE_BOOL = 7, IMAGE_STRING = 8, IMAGE_ARRAY = 9 };

static inline void image_u32(struct gguf_image *im, uint32_t v)
{
	for (int i = 0; i < 4; i++)
		buf_putc(&im->bytes, (char)(v >> 8 * i));
}

static inline void image_u64(struct gguf_image *im, uint64_t v)
{
	image_u32(im, (uint32_t)v);
	image_u32(im, (uint32_t)(v >> 32));
}

static inline void image_text(struct gguf_image *im, struct str s)
{
	image_u64(im, s.n);
	buf_append(&im->bytes, s.p, s.n);
}

static inline void image_begin(struct gguf_image *im)
{
	memset(im, 0, sizeof *im);
	buf_puts(&im->bytes, "GGUF");
	image_u32(im, 3);
	image_u64(im, 0); /* tensors */
	image_u64(im, 0); /* values: see image_finish() */
}

static inline void image_key(struct gguf_image *im, const char *key, uint32_t type)
{
	image_text(im, str_from(key));
	image_u32(im, type);
	im->n_values++;
}

static inline void image_add_u32(struct gguf_image *im, const char *key, uint32_t v)
{
	image_key(im, key, IMAGE_U32);
	image_u32(im, v);
}

static inline void image_add_bool(struct gguf_image *im, const char *key, bool v)
{
	image_key(im, key, IMAGE_BOOL);
	buf_putc(&im->bytes, v);
}

static inline void image_add_str(struct gguf_image *im, const char *key, const char *v)
{
	image_key(im, key, IMAGE_STRING);
	image_text(im, str_from(v));
}

static inline void image_add_array(struct gguf_image *im, const char *key, uint32_t type, size_t n)
{
	image_key(im, key, IMAGE_ARRAY);
	image_u32(im, type);
	image_u64(im, n);
}

static inline void image_add_strs(struct gguf_image *im, const char *key, const struct str *v, size_t n)
{
	image_add_array(im, key, IMAGE_STRING, n);
	for (size_t i = 0; i < n; i++)
		image_text(im, v[i]);
}

static inline void image_add_ints(struct gguf_image *im, const char *key, const int32_t *v, size_t n)
{
	image_add_array(im, key, IMAGE_I32, n);
	for (size_t i = 0; i < n; i++)
		image_u32(im, (uint32_t)v[i]);
}

static inline void image_add_floats(struct gguf_image *im, const char *key, const float *v, size_t n)
{
	image_add_array(im, key, IMAGE_F32, n);
	for (size_t i = 0; i < n; i++) {
		uint32_t bits;
		memcpy(&bits, &v[i], 4);
		image_u32(im, bits);
	}
}

/* The image, borrowed until image_free(). */
static inline struct str image_finish(struct gguf_image *im)
{
	for (int i = 0; i < 8 && !im->bytes.failed; i++)
		im->bytes.data[16 + i] = (char)(im->n_values >> 8 * i);
	return buf_str(&im->bytes);
}

static inline void image_free(struct gguf_image *im)
{
	buf_free(&im->bytes);
}
