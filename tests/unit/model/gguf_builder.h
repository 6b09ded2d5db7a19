/* Builds GGUF files in memory, valid ones and any kind of broken one, for tests. */
#pragma once

#include <stdint.h>
#include <string.h>

#include "engine/base/buf.h"
#include "engine/model/gguf.h"

static inline void put_u8(struct buf *b, uint8_t x)
{
	buf_append(b, &x, sizeof x);
}

static inline void put_u32(struct buf *b, uint32_t x)
{
	buf_append(b, &x, sizeof x);
}

static inline void put_u64(struct buf *b, uint64_t x)
{
	buf_append(b, &x, sizeof x);
}

static inline void put_str(struct buf *b, const char *s)
{
	put_u64(b, strlen(s));
	buf_puts(b, s);
}

static inline void put_header(struct buf *b, uint32_t version, uint64_t n_tensors, uint64_t n_values)
{
	buf_puts(b, "GGUF");
	put_u32(b, version);
	put_u64(b, n_tensors);
	put_u64(b, n_values);
}

/* Key and type; the value's bytes follow. */
static inline void put_key(struct buf *b, const char *key, uint32_t type)
{
	put_str(b, key);
	put_u32(b, type);
}

static inline void put_value(struct buf *b, const char *key, enum gguf_type type, const void *value, size_t n)
{
	put_key(b, key, type);
	buf_append(b, value, n);
}

static inline void put_value_u32(struct buf *b, const char *key, uint32_t x)
{
	put_value(b, key, GGUF_U32, &x, sizeof x);
}

static inline void put_value_str(struct buf *b, const char *key, const char *s)
{
	put_key(b, key, GGUF_STRING);
	put_str(b, s);
}

/* Key, element type and count of an array; the elements follow. */
static inline void put_array(struct buf *b, const char *key, uint32_t elem_type, uint64_t count)
{
	put_key(b, key, GGUF_ARRAY);
	put_u32(b, elem_type);
	put_u64(b, count);
}

static inline void put_tensor(struct buf *b, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type,
			      uint64_t offset)
{
	put_str(b, name);
	put_u32(b, n_dims);
	for (uint32_t i = 0; i < n_dims; i++)
		put_u64(b, dims[i]);
	put_u32(b, type);
	put_u64(b, offset);
}

/* Zeros up to a multiple of `alignment`. */
static inline void put_padding(struct buf *b, size_t alignment)
{
	while (b->len % alignment)
		put_u8(b, 0);
}
