/* Builds small model files in memory: metadata from a table with changes, tensors filled with repeatable values. */
#pragma once

#include <math.h>

#include "tests/unit/model/gguf_builder.h"
#include "tests/unit/unit.h"

/*
 * One metadata entry. type 'u': u32, 'f': f32, 'b': bool, 's': string, 't': `number` token strings; 0 takes a key away.
 */
struct meta {
	const char *key;
	char type;
	double number;
	const char *text;
};

struct model_file {
	struct buf values, infos, data;
	uint64_t n_values, n_tensors;
};

static inline void model_file_put(struct model_file *f, const struct meta *m)
{
	switch (m->type) {
	case 'u':
		put_value_u32(&f->values, m->key, (uint32_t)m->number);
		break;
	case 'f': {
		float x = (float)m->number;
		put_value(&f->values, m->key, GGUF_F32, &x, sizeof x);
		break;
	}
	case 'b': {
		uint8_t x = m->number != 0.0;
		put_value(&f->values, m->key, GGUF_BOOL, &x, sizeof x);
		break;
	}
	case 's':
		put_value_str(&f->values, m->key, m->text);
		break;
	case 't':
		put_array(&f->values, m->key, GGUF_STRING, (uint64_t)m->number);
		for (int i = 0; i < (int)m->number; i++)
			put_str(&f->values, "x");
		break;
	default:
		return;
	}
	f->n_values++;
}

/* The entries of `base`, each replaced by the change of the same key if there is one; then the changes that are new. */
static inline void model_file_meta(struct model_file *f, const struct meta *base, size_t n_base,
                                   const struct meta *changes, size_t n_changes)
{
	for (size_t i = 0; i < n_base; i++) {
		const struct meta *m = &base[i];
		for (size_t j = 0; j < n_changes; j++) {
			if (strcmp(changes[j].key, m->key) == 0)
				m = &changes[j];
		}
		model_file_put(f, m);
	}
	for (size_t j = 0; j < n_changes; j++) {
		bool is_new = true;
		for (size_t i = 0; i < n_base; i++)
			is_new = is_new && strcmp(changes[j].key, base[i].key) != 0;
		if (is_new)
			model_file_put(f, &changes[j]);
	}
}

/*
 * A tensor of n_in x n_out (n_out 0: a vector). F32 values are random in -1..1 by the tensor's name, other types zero
 * bytes.
 */
static inline void model_file_tensor(struct model_file *f, const char *name, uint32_t type, uint64_t n_in,
                                     uint64_t n_out)
{
	const struct quant_format *format = quant_format(type);
	uint64_t dims[2] = {n_in, n_out}, n = n_in * (n_out ? n_out : 1), rng = 0x9E3779B97F4A7C15ull;
	put_padding(&f->data, 32);
	put_tensor(&f->infos, name, n_out ? 2 : 1, dims, type, f->data.len);
	f->n_tensors++;
	for (const char *c = name; *c; c++)
		rng = (rng ^ (uint64_t)*c) * 0x100000001B3ull;
	for (uint64_t i = 0; i < n && type == QUANT_F32; i++) {
		float x = (float)(int32_t)(unit_rand(&rng) >> 32) * 0x1p-31f;
		buf_append(&f->data, &x, sizeof x);
	}
	for (uint64_t i = 0; i < n / format->block_elems * format->block_bytes && type != QUANT_F32; i++)
		put_u8(&f->data, 0);
}

/* Writes the file to *out (free with buf_free) and frees f. */
static inline void model_file_finish(struct model_file *f, struct buf *out)
{
	put_header(out, 3, f->n_tensors, f->n_values);
	buf_append(out, f->values.data, f->values.len);
	buf_append(out, f->infos.data, f->infos.len);
	put_padding(out, 32);
	buf_append(out, f->data.data, f->data.len);
	put_padding(out, 32);
	assert_false(out->failed || f->data.failed || f->infos.failed || f->values.failed);
	buf_free(&f->values);
	buf_free(&f->infos);
	buf_free(&f->data);
}
