/*
 * Narrower forms of a page of KV, for tiers. A page in f16 or bf16 becomes, for each layer, K or V, head and token, one
 * scale (float) and head_dim codes of a byte (kv_form_pack()); exact pages stay as they are.
 *
 *   int8:     x ~ scale * c, c in -127..127, scale = max|x| / 127           |error| <= scale / 2
 *   fp8_e4m3: x ~ scale * c, c a float of 4 bits of exponent and 3 of mantissa, scale = max|x| / 448
 *             |error| <= max(|x| / 16, scale / 1024)
 *
 * (each but for the rounding of the result to what the page is of). fp8_e4m3 is the "E4M3" of OCP's 8-bit floating
 * point specification (OFP8, 2023): bias 7, largest value 448, no infinity, 0x7F and 0xFF are NaN.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/backend.h"

/* What the elements of a page in that form are: its name, or "bf16"; here KV_FORM_F16 is a page as the pool has it. */
const char *kv_codec_elements(const struct kv_layout *layout, enum kv_form type);
/* Bytes of a page in that form. */
size_t kv_codec_bytes(const struct kv_layout *layout, enum kv_form type);
/*
 * Packs a page of layout->type whose inner order is `order` (backend.h). False when it holds values that have no such
 * form, infinities and NaNs; out is then undefined. out: kv_codec_bytes(), aligned to 4.
 */
bool kv_codec_pack(const struct kv_layout *layout, struct kv_order order, enum kv_form type, const void *page,
                   void *out);
void kv_codec_unpack(const struct kv_layout *layout, struct kv_order order, enum kv_form type, const void *packed,
                     void *page);
/* The same of some layers: of the packed page, as of the page, only what belongs to them is looked at. */
void kv_codec_unpack_layers(const struct kv_layout *layout, struct kv_order order, enum kv_form type,
                            const void *packed, int32_t first, int32_t n, void *page);
/* Where in a packed page what belongs to these layers lies: their scales, and their codes. */
struct kv_codec_span {
	size_t begin, end;
};
void kv_codec_spans(const struct kv_layout *layout, int32_t first, int32_t n, struct kv_codec_span *scales,
                    struct kv_codec_span *codes);
/* Where, in a block of that order, a token's element d is: an index below KV_PAGE_TOKENS * head_dim. */
int32_t kv_codec_place(enum kv_block_order order, int32_t head_dim, int32_t token, int32_t d);
