/*
 * make-shape: a random llama model in the shape of a real one, written as fast as the disk takes it. For measuring and
 * comparing devices; it has no tokenizer.
 *
 *   make-shape FILE tiny|1b|8b BF16|Q4_K [LAYERS]
 *
 * Blocks are random bits with scales that give elements the size they have in trained models; a stretch of them is
 * repeated. Q4_K has its output matrix in Q6_K, as the usual mix does. File format:
 * https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/quant.h"

enum { ALIGNMENT = 32, POOL_BYTES = 16 << 20 };

struct shape {
	const char *name;
	uint32_t n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim, n_vocab;
};

/* 1b and 8b: Llama 3.2 1B and Llama 3.1 8B, with an output matrix of their own. */
static const struct shape shapes[] = {
        {"tiny", 2, 256, 768, 4, 2, 64, 1000},
        {"1b", 16, 2048, 8192, 32, 8, 64, 128256},
        {"8b", 32, 4096, 14336, 32, 8, 128, 128256},
};

struct tensor {
	char name[64];
	uint32_t type, n_dims;
	uint64_t n_in, n_out, offset, bytes;
	float scale;
};

struct writer {
	FILE *f;
	struct tensor *tensor;
	uint32_t n_tensors, n_meta;
	uint64_t offset, seed;
	uint8_t *pool;
};

static _Noreturn void fail(const char *what)
{
	fprintf(stderr, "make-shape: %s\n", what);
	exit(1);
}

static uint64_t bits(struct writer *w)
{
	w->seed ^= w->seed >> 12;
	w->seed ^= w->seed << 25;
	w->seed ^= w->seed >> 27;
	return w->seed * 0x2545F4914F6CDD1Dull;
}

static float normal(struct writer *w)
{
	uint64_t b = bits(w);
	int32_t sum = 0;
	for (int i = 0; i < 4; i++)
		sum += (int32_t)(b >> (16 * i) & 0xffff) - 32768;
	return (float)sum / 37837.0f;
}

static void put(struct writer *w, const void *p, size_t n)
{
	if (n > 0 && fwrite(p, n, 1, w->f) != 1)
		fail("cannot write");
}

static void put_u32(struct writer *w, uint32_t v)
{
	put(w, &v, sizeof v);
}

static void put_u64(struct writer *w, uint64_t v)
{
	put(w, &v, sizeof v);
}

static void put_string(struct writer *w, const char *s)
{
	put_u64(w, strlen(s));
	put(w, s, strlen(s));
}

/* Value types of GGUF: 4 is uint32, 6 float32, 8 string. */
static void meta_u32(struct writer *w, const char *key, uint32_t v)
{
	put_string(w, key);
	put_u32(w, 4);
	put_u32(w, v);
}

static void meta_f32(struct writer *w, const char *key, float v)
{
	put_string(w, key);
	put_u32(w, 6);
	put(w, &v, sizeof v);
}

static void meta_string(struct writer *w, const char *key, const char *v)
{
	put_string(w, key);
	put_u32(w, 8);
	put_string(w, v);
}

static void add(struct writer *w, uint32_t type, uint64_t n_in, uint64_t n_out, float scale, const char *name)
{
	struct tensor *t = &w->tensor[w->n_tensors++];
	const struct quant_format *f = quant_format(type);
	*t = (struct tensor){.type = type, .n_dims = n_out == 0 ? 1 : 2, .n_in = n_in, .n_out = n_out, .scale = scale};
	snprintf(t->name, sizeof t->name, "%s", name);
	t->bytes = n_in / f->block_elems * (n_out ? n_out : 1) * f->block_bytes;
	t->offset = w->offset;
	w->offset += (t->bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void add_tensors(struct writer *w, const struct shape *s, uint32_t type, uint32_t output_type)
{
	char name[64];
	uint32_t q = s->n_head * s->head_dim, kv = s->n_head_kv * s->head_dim;
	float in = 1.0f / __builtin_sqrtf((float)s->n_embd), ff = 1.0f / __builtin_sqrtf((float)s->n_ff);
	add(w, type, s->n_embd, s->n_vocab, 1, "token_embd.weight");
	for (uint32_t i = 0; i < s->n_layer; i++) {
		const struct {
			const char *name;
			uint32_t type;
			uint64_t n_in, n_out;
			float scale;
		} rows[] = {
		        {"attn_norm", QUANT_F32, s->n_embd, 0, 1}, {"attn_q", type, s->n_embd, q, in},
		        {"attn_k", type, s->n_embd, kv, in},       {"attn_v", type, s->n_embd, kv, in},
		        {"attn_output", type, q, s->n_embd, in},   {"ffn_norm", QUANT_F32, s->n_embd, 0, 1},
		        {"ffn_gate", type, s->n_embd, s->n_ff, in}, {"ffn_up", type, s->n_embd, s->n_ff, in},
		        {"ffn_down", type, s->n_ff, s->n_embd, ff},
		};
		for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
			snprintf(name, sizeof name, "blk.%u.%s.weight", i, rows[k].name);
			add(w, rows[k].type, rows[k].n_in, rows[k].n_out, rows[k].scale, name);
		}
	}
	add(w, QUANT_F32, s->n_embd, 0, 1, "output_norm.weight");
	add(w, output_type, s->n_embd, s->n_vocab, 3 * in, "output.weight");
}

/* One block of about the given standard deviation. */
static void make_block(struct writer *w, const struct quant_format *f, float scale, uint8_t *to)
{
	uint16_t half;
	if (f->type == QUANT_BF16) {
		float v = normal(w) * scale;
		memcpy(to, (uint8_t *)&v + 2, 2);
		return;
	}
	for (uint32_t i = 0; i < f->block_bytes; i += 8) {
		uint64_t b = bits(w);
		memcpy(to + i, &b, f->block_bytes - i < 8 ? f->block_bytes - i : 8);
	}
	/* d * scale(0..63) * q(0..15) - dmin * min(0..63): centred, deviation about 180 d */
	if (f->type == QUANT_Q4_K) {
		half = quant_float_to_half(scale / 180);
		memcpy(to, &half, 2);
		half = quant_float_to_half(scale / 180 * 7.5f);
		memcpy(to + 2, &half, 2);
	} else { /* Q6_K: d * scale(-128..127) * q(-32..31) */
		half = quant_float_to_half(scale / 1370);
		memcpy(to + 208, &half, 2);
	}
}

static void write_vector(struct writer *w, const struct tensor *t)
{
	for (uint64_t i = 0; i < t->n_in; i++) {
		float v = 1 + 0.1f * normal(w);
		put(w, &v, sizeof v);
	}
}

static void write_matrix(struct writer *w, const struct tensor *t)
{
	const struct quant_format *f = quant_format(t->type);
	/* An odd number of blocks, so that rows do not repeat in step. */
	uint64_t n = t->bytes / f->block_bytes, most = POOL_BYTES / 8 / f->block_bytes | 1, drawn = n < most ? n : most;
	for (uint64_t i = 0; i < drawn; i++)
		make_block(w, f, t->scale, w->pool + i * f->block_bytes);
	for (uint64_t left = t->bytes; left > 0;) {
		uint64_t bytes = left < drawn * f->block_bytes ? left : drawn * f->block_bytes;
		put(w, w->pool, bytes);
		left -= bytes;
	}
}

static void write_file(struct writer *w, const struct shape *s, const char *type)
{
	static const uint8_t zeros[ALIGNMENT];
	put(w, "GGUF", 4);
	put_u32(w, 3);
	put_u64(w, w->n_tensors);
	put_u64(w, 11);
	meta_string(w, "general.architecture", "llama");
	meta_string(w, "general.name", type);
	meta_u32(w, "llama.block_count", s->n_layer);
	meta_u32(w, "llama.context_length", 131072);
	meta_u32(w, "llama.embedding_length", s->n_embd);
	meta_u32(w, "llama.feed_forward_length", s->n_ff);
	meta_u32(w, "llama.attention.head_count", s->n_head);
	meta_u32(w, "llama.attention.head_count_kv", s->n_head_kv);
	meta_u32(w, "llama.rope.dimension_count", s->head_dim);
	meta_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
	meta_f32(w, "llama.rope.freq_base", 500000.0f);
	for (uint32_t i = 0; i < w->n_tensors; i++) {
		const struct tensor *t = &w->tensor[i];
		put_string(w, t->name);
		put_u32(w, t->n_dims);
		put_u64(w, t->n_in);
		if (t->n_dims == 2)
			put_u64(w, t->n_out);
		put_u32(w, t->type);
		put_u64(w, t->offset);
	}
	long at = ftell(w->f);
	put(w, zeros, (size_t)(-at & (ALIGNMENT - 1)));
	for (uint32_t i = 0; i < w->n_tensors; i++) {
		const struct tensor *t = &w->tensor[i];
		if (t->n_dims == 1)
			write_vector(w, t);
		else
			write_matrix(w, t);
		put(w, zeros, (size_t)(-t->bytes & (ALIGNMENT - 1)));
	}
}

int main(int argc, char **argv)
{
	struct writer w = {.seed = 42};
	struct shape s = {0};
	for (size_t i = 0; argc >= 4 && i < sizeof shapes / sizeof shapes[0]; i++)
		if (strcmp(argv[2], shapes[i].name) == 0)
			s = shapes[i];
	bool bf16 = argc >= 4 && strcmp(argv[3], "BF16") == 0;
	if (!s.name || (!bf16 && strcmp(argv[3], "Q4_K") != 0))
		fail("usage: make-shape FILE tiny|1b|8b BF16|Q4_K [LAYERS]");
	if (argc > 4)
		s.n_layer = (uint32_t)strtoul(argv[4], NULL, 10);
	if (s.n_layer < 1 || s.n_layer > 1000)
		fail("between 1 and 1000 layers");
	w.tensor = calloc(s.n_layer * 9 + 3, sizeof *w.tensor);
	w.pool = malloc(POOL_BYTES);
	w.f = fopen(argv[1], "wb");
	if (!w.tensor || !w.pool)
		fail("no memory");
	if (!w.f)
		fail("cannot create the file");
	add_tensors(&w, &s, bf16 ? QUANT_BF16 : QUANT_Q4_K, bf16 ? QUANT_BF16 : QUANT_Q6_K);
	write_file(&w, &s, argv[3]);
	if (fclose(w.f) != 0)
		fail("cannot write");
	free(w.tensor);
	free(w.pool);
	return 0;
}
