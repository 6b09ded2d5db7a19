#include "engine/kv/tier_codec.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "engine/model/quant.h"

const char *kv_codec_elements(const struct kv_layout *l, enum kv_form type)
{
	if (type != KV_FORM_F16)
		return kv_form_name(type);
	return l->form == KV_FORM_F16 && l->type == QUANT_BF16 ? "bf16" : kv_form_name(l->form);
}

static size_t n_blocks(const struct kv_layout *l)
{
	return (size_t)l->n_layer * 2 * (size_t)l->n_head_kv;
}

size_t kv_codec_bytes(const struct kv_layout *l, enum kv_form type)
{
	if (type == KV_FORM_F16)
		return l->page_bytes;
	return n_blocks(l) * KV_PAGE_TOKENS * (sizeof(float) + (size_t)l->head_dim);
}

/* ---- Pages ---- */

/* As cuda/kv_page.cuh has them. */
static inline int32_t operand_key(int32_t dim, int32_t token, int32_t d)
{
	int32_t block = d / 32, width = dim - 32 * block < 32 ? dim - 32 * block : 32;
	return block * 32 * KV_PAGE_TOKENS + token * width + d % 32;
}

static inline int32_t operand_value(int32_t dim, int32_t token, int32_t d)
{
	int32_t block = d / 16, lane = d % 8 * 4 + token % 8 / 2, in_pair = token % 2;
	if (dim - 16 * block < 16)
		return block * 16 * KV_PAGE_TOKENS + lane * 4 + token / 8 * 2 + in_pair;
	return block * 16 * KV_PAGE_TOKENS + lane * 8 + (token / 8 * 2 + d % 16 / 8) * 2 + in_pair;
}

/* As kv_codec_place(). */
static inline int32_t place(enum kv_block_order order, int32_t dim, int32_t token, int32_t d)
{
	switch (order) {
	case KV_BY_TOKEN:
		break;
	case KV_BY_DIM:
		return d * KV_PAGE_TOKENS + token;
	case KV_BY_DIM_PAIRS:
		return (d & ~1) * KV_PAGE_TOKENS + (d == dim - 1 && dim % 2 ? token : 2 * token + d % 2);
	case KV_BY_TOKEN_PAIRS:
		return (token & ~1) * dim + 2 * d + token % 2;
	case KV_OPERAND_KEYS:
		return operand_key(dim, token, d);
	case KV_OPERAND_VALUES:
		return operand_value(dim, token, d);
	}
	return token * dim + d;
}

/* A block as floats by token, whatever its order and type in the page. */
static void read_block(const uint16_t *block, enum quant_type type, enum kv_block_order order, int32_t dim,
                       float *x /* [KV_PAGE_TOKENS][dim] */)
{
	for (int32_t t = 0; t < KV_PAGE_TOKENS; t++) {
		for (int32_t d = 0; d < dim; d++) {
			uint16_t e = block[place(order, dim, t, d)];
			x[t * dim + d] = type == QUANT_BF16 ? quant_bf16_to_float(e) : quant_half_to_float(e);
		}
	}
}

static void write_block(const float *x, enum quant_type type, enum kv_block_order order, int32_t dim, uint16_t *block)
{
	for (int32_t t = 0; t < KV_PAGE_TOKENS; t++) {
		for (int32_t d = 0; d < dim; d++) {
			float e = x[t * dim + d];
			block[place(order, dim, t, d)] =
				type == QUANT_BF16 ? quant_float_to_bf16(e) : quant_float_to_half(e);
		}
	}
}

static enum kv_block_order block_order(const struct kv_layout *l, struct kv_order order, size_t block)
{
	bool key = order.pairs ? block % 2 == 0 : block / (size_t)l->n_head_kv % 2 == 0;
	return key ? order.keys : order.values;
}

int32_t kv_codec_place(enum kv_block_order order, int32_t dim, int32_t token, int32_t d)
{
	return place(order, dim, token, d);
}

enum { MAX_HEAD_DIM = 1024 };

bool kv_codec_pack(const struct kv_layout *l, struct kv_order order, enum kv_form type, const void *page, void *out)
{
	float x[MAX_HEAD_DIM * KV_PAGE_TOKENS];
	int32_t dim = l->head_dim;
	size_t n = n_blocks(l);
	float *scale = out;
	uint8_t *code = (uint8_t *)out + n * KV_PAGE_TOKENS * sizeof *scale;
	if (type == KV_FORM_F16) {
		memcpy(out, page, l->page_bytes);
		return true;
	}
	if (dim > MAX_HEAD_DIM)
		return false;
	for (size_t b = 0; b < n; b++) {
		read_block((const uint16_t *)page + b * KV_PAGE_TOKENS * (size_t)dim, l->type, block_order(l, order, b),
		           dim, x);
		for (size_t t = 0; t < KV_PAGE_TOKENS; t++) {
			size_t vector = b * KV_PAGE_TOKENS + t;
			scale[vector] =
				kv_form_pack(type, x + t * (size_t)dim, dim, FLT_MAX, code + vector * (size_t)dim, 1);
			if (isnan(scale[vector]))
				return false;
		}
	}
	return true;
}

void kv_codec_spans(const struct kv_layout *l, int32_t first, int32_t count, struct kv_codec_span *scales,
                    struct kv_codec_span *codes)
{
	size_t in_layer = n_blocks(l) / (size_t)l->n_layer * KV_PAGE_TOKENS; /* vectors */
	size_t begin = (size_t)first * in_layer, end = begin + (size_t)count * in_layer;
	size_t all_scales = n_blocks(l) * KV_PAGE_TOKENS * sizeof(float), dim = (size_t)l->head_dim;
	*scales = (struct kv_codec_span){begin * sizeof(float), end * sizeof(float)};
	*codes = (struct kv_codec_span){all_scales + begin * dim, all_scales + end * dim};
}

void kv_codec_unpack_layers(const struct kv_layout *l, struct kv_order order, enum kv_form type, const void *packed,
                            int32_t first, int32_t count, void *page)
{
	float x[MAX_HEAD_DIM * KV_PAGE_TOKENS], value[256];
	int32_t dim = l->head_dim;
	size_t n = n_blocks(l), in_layer = n / (size_t)l->n_layer, in_block = KV_PAGE_TOKENS * (size_t)dim;
	const float *scale = packed;
	const uint8_t *code = (const uint8_t *)packed + n * KV_PAGE_TOKENS * sizeof *scale;
	for (int c = 0; c < 256; c++)
		value[c] = type == KV_FORM_INT8 ? (float)(int8_t)c : quant_fp8_to_float((uint8_t)c);
	for (size_t b = (size_t)first * in_layer, end = b + (size_t)count * in_layer; b < end; b++) {
		for (size_t i = 0; i < in_block; i++)
			x[i] = scale[b * KV_PAGE_TOKENS + i / (size_t)dim] * value[code[b * in_block + i]];
		write_block(x, l->type, block_order(l, order, b), dim, (uint16_t *)page + b * in_block);
	}
}

void kv_codec_unpack(const struct kv_layout *l, struct kv_order order, enum kv_form type, const void *packed,
                     void *page)
{
	if (type == KV_FORM_F16)
		memcpy(page, packed, l->page_bytes);
	else
		kv_codec_unpack_layers(l, order, type, packed, 0, l->n_layer, page);
}
