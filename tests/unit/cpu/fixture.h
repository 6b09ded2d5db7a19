/* What the tests of the CPU backends share: random data of every kind a backend takes. */
#pragma once

#include "engine/backend.h"
#include "tests/support/block_halves.h"
#include "tests/unit/unit.h"

/* Uniform in [-1, 1). */
static inline float random_float(uint64_t *seed)
{
	return (float)((double)(int64_t)unit_rand(seed) / 9223372036854775808.0);
}

/* Roughly normal, standard deviation 1. */
static inline float random_normal(uint64_t *seed)
{
	float sum = 0;
	for (int i = 0; i < 12; i++)
		sum += random_float(seed);
	return sum * 0.5f;
}

static inline int32_t random_int(uint64_t *seed, int32_t from, int32_t to)
{
	return from + (int32_t)(unit_rand(seed) >> 33) % (to - from + 1);
}

/* n multiples of `unit`, up to `most` of them above and below zero; the caller frees them. */
static inline float *random_multiples(uint64_t *seed, size_t n, int32_t most, float unit)
{
	float *x = malloc(n * sizeof *x);
	assert_non_null(x);
	for (size_t i = 0; i < n; i++)
		x[i] = (float)random_int(seed, -most, most) * unit;
	return x;
}

static inline float *random_floats(uint64_t *seed, size_t n)
{
	float *p = malloc((n ? n : 1) * sizeof *p);
	assert_non_null(p);
	for (size_t i = 0; i < n; i++)
		p[i] = random_normal(seed);
	return p;
}

/* A matrix of any format: random bits, with scales that give elements of ordinary size. free() it. */
static inline void *random_matrix(uint64_t *seed, const struct quant_format *f, int64_t n_in, int64_t n_out)
{
	size_t n_blocks = (size_t)(n_in / f->block_elems * n_out), bytes = n_blocks * f->block_bytes;
	uint8_t *data = malloc(bytes);
	assert_non_null(data);
	for (size_t i = 0; i < bytes; i++)
		data[i] = (uint8_t)(unit_rand(seed) >> 40);
	for (size_t i = 0; i < n_blocks; i++) {
		uint8_t *block = data + i * f->block_bytes;
		float value = random_normal(seed) * 0.05f;
		uint16_t half = quant_float_to_half(value);
		int scale, min;
		if (f->type == QUANT_F32) {
			memcpy(block, &value, 4);
		} else if (f->type == QUANT_F16) {
			memcpy(block, &half, 2);
		} else if (f->type == QUANT_BF16) {
			uint32_t bits;
			memcpy(&bits, &value, 4);
			block[0] = (uint8_t)(bits >> 16);
			block[1] = (uint8_t)(bits >> 24);
		} else {
			block_halves(f->type, &scale, &min);
			half = quant_float_to_half((random_float(seed) + 1.1f) * 0.004f);
			memcpy(block + scale, &half, 2);
			half = quant_float_to_half(random_float(seed) * 0.02f);
			if (min >= 0)
				memcpy(block + min, &half, 2);
		}
	}
	return data;
}

static inline struct backend *open_backend(const char *device, int32_t n_threads)
{
	struct backend_options o = {.device = device, .n_threads = n_threads};
	struct backend *b = NULL;
	struct error err = {0};
	enum status s = backend_create(&o, &b, &err);
	if (s == STATUS_UNSUPPORTED)
		return NULL;
	assert_int_equal(s, STATUS_OK);
	return b;
}

static inline struct weight *open_weight(struct backend *b, const struct quant_format *f, int64_t n_in, int64_t n_out,
                                         const void *data)
{
	struct weight_desc d = {.name = "test", .format = f, .n_in = n_in, .n_out = n_out, .data = data};
	struct weight *w = NULL;
	struct error err = {0};
	assert_int_equal(b->ops->weight_create(b, &d, &w, &err), STATUS_OK);
	return w;
}

/* A batch whose sequences own pages scattered over the pool. */
struct scattered {
	struct batch batch;
	struct batch_seq seq[64];
	int32_t token[512], position[512], output_row[512];
	int32_t pages[8192];
	int32_t n_pages; /* the pool's */
};

static inline void scattered_init(struct scattered *s)
{
	memset(s, 0, sizeof *s);
	s->batch.token = s->token;
	s->batch.position = s->position;
	s->batch.seq = s->seq;
	s->batch.output_row = s->output_row;
}

/* Gives the pool n_pages pages in random order, which scattered_add() hands out. */
static inline void scattered_shuffle(struct scattered *s, uint64_t *seed, int32_t n_pages)
{
	assert_true(n_pages <= 8192);
	s->n_pages = n_pages;
	for (int32_t i = 0; i < n_pages; i++)
		s->pages[i] = i;
	for (int32_t i = n_pages - 1; i > 0; i--) {
		int32_t j = random_int(seed, 0, i), t = s->pages[i];
		s->pages[i] = s->pages[j];
		s->pages[j] = t;
	}
}

/* Adds n_rows rows of a sequence whose block table begins at `table`. */
static inline void scattered_add(struct scattered *s, const int32_t *table, int32_t first_position, int32_t n_rows)
{
	struct batch_seq *q = &s->seq[s->batch.n_seqs++];
	*q = (struct batch_seq){
	        .first_row = s->batch.n_rows,
	        .n_rows = n_rows,
	        .first_position = first_position,
	        .block_table = table,
	        .n_pages = (first_position + n_rows + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS,
	};
	for (int32_t i = 0; i < n_rows; i++)
		s->position[s->batch.n_rows + i] = first_position + i;
	s->batch.n_rows += n_rows;
}
