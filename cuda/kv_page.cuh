/*
 * Inner order of a KV page.
 *
 * In f16: for each layer, the keys of each head, then the values of each head, 16 * head_dim halves a head. Attention
 * multiplies keys and values as left operands of m16n8k16, 16 tokens (one page) by 16 elements. They lie so that a
 * lane's 16-byte load is its part of an operand and a warp's load is 512 contiguous bytes:
 *
 *   keys    [d / 32][token][d % 32]: lane (g, t) = (lane / 4, lane % 4) loads elements 8t .. 8t + 7 of tokens g and
 *           g + 8; a product takes two neighbouring pairs of them. In the last block, rows are as long as what is left
 *           of head_dim.
 *   values  transposed, [d / 16][lane][8]: elements d = g and g + 8 of tokens 2t, 2t + 1, 2t + 8, 2t + 9 in the
 *           operand's own order. When head_dim / 8 is odd, the last block is [lane][4] and has d = g only.
 *
 * These are KV_OPERAND_KEYS and KV_OPERAND_VALUES of backend.h; engine/kv/tier_codec.c has the same formulas for the
 * host.
 *
 * Narrow: for each layer and head a block, a code where f16 has a half, so that a lane's 16 bytes are two of those
 * loads:
 *
 *   scales  [g][4] floats: of the keys of tokens g and g + 8, and of their values
 *   keys    [d / 32][g][t][16]: elements 8t .. 8t + 7 of token g, then of token g + 8; in the last block there are as
 *           many t as head_dim has left eights
 *   values  [d / 32][lane][16]: what the lane has of the block's first 16 elements, then of the others. What is left
 *           of head_dim at the end: [lane][8] of 16 elements, then [lane][4] of 8.
 *
 * Codes of int8 are kept as c + 128.
 */
#pragma once

#include "cuda/kernels.cuh"

namespace GPU_NS
{

enum { PAGE_TOKENS = KV_PAGE_TOKENS, NARROW_SCALES = 8 * PAGE_TOKENS }; /* bytes of a block's scales */

/* Bytes of a head's keys, or values, in a page in f16. */
__device__ __host__ __forceinline__ size_t head_bytes(int head_dim)
{
	return static_cast<size_t>(2 * PAGE_TOKENS) * head_dim;
}

/* Where the keys (or values: value = 1) of a head begin in a page's layer. */
__device__ __forceinline__ size_t head_offset(int n_head_kv, int head_dim, int value, int head)
{
	return static_cast<size_t>(value * n_head_kv + head) * head_bytes(head_dim);
}

/* Byte offsets from there. d is a multiple of 8 for keys: eight elements are contiguous. */
__device__ __forceinline__ int key_offset(int head_dim, int token, int d)
{
	const int block = d / 32, width = min(32, head_dim - 32 * block);
	return 2 * (block * 32 * PAGE_TOKENS + token * width + d % 32);
}

__device__ __forceinline__ int value_offset(int head_dim, int token, int d)
{
	const int block = d / 16, upper = d % 16 / 8, lane = d % 8 * 4 + token % 8 / 2;
	const bool eight = head_dim - 16 * block < 16;
	const int element = eight ? token / 8 * 2 + token % 2 : (token / 8 * 2 + upper) * 2 + token % 2;
	return 2 * (block * 16 * PAGE_TOKENS + lane * (eight ? 4 : 8) + element);
}

/* ---- Narrow ---- */

/* Bytes of a head's block in a layer of a narrow page. */
__device__ __host__ __forceinline__ size_t narrow_bytes(int head_dim)
{
	return NARROW_SCALES + static_cast<size_t>(2 * PAGE_TOKENS) * head_dim;
}

/* Where in a block its keys' codes begin (or its values': value = 1). */
__device__ __forceinline__ int codes_offset(int head_dim, int value)
{
	return NARROW_SCALES + value * PAGE_TOKENS * head_dim;
}

/* Byte offset of the scale of a token's key or value. */
__device__ __forceinline__ int scale_offset(int value, int token)
{
	return 4 * (token % 8 * 4 + value * 2 + token / 8);
}

/* Byte offsets from codes_offset(). d is a multiple of 8 for keys: eight codes are contiguous. */
__device__ __forceinline__ int key_code_offset(int head_dim, int token, int d)
{
	const int block = d / 32, n_t = min(32, head_dim - 32 * block) / 8;
	return block * 32 * PAGE_TOKENS + (token % 8 * n_t + d % 32 / 8) * 16 + token / 8 * 8;
}

__device__ __forceinline__ int value_code_offset(int head_dim, int token, int d)
{
	const int block = d / 32, left = head_dim - 32 * block, which = d % 32 / 16, upper = d % 16 / 8;
	const int lane = d % 8 * 4 + token % 8 / 2, element = (token / 8 * 2 + upper) * 2 + token % 2;
	if (left >= 32)
		return block * 32 * PAGE_TOKENS + lane * 16 + which * 8 + element;
	const int at = block * 32 * PAGE_TOKENS + which * 16 * PAGE_TOKENS;
	return left - 16 * which >= 16 ? at + lane * 8 + element : at + lane * 4 + token / 8 * 2 + token % 2;
}

} // namespace GPU_NS
