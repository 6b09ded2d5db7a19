/*
 * Inner order of a KV page: for each layer, the keys of each head, then the values of each head, 16 * head_dim halves a
 * head.
 *
 * Attention multiplies keys and values as left operands of m16n8k16, 16 tokens (one page) by 16 elements. They lie so
 * that a lane's 16-byte load is its part of an operand and a warp's load is 512 contiguous bytes:
 *
 *   keys    [d / 32][token][d % 32]: lane (g, t) = (lane / 4, lane % 4) loads elements 8t .. 8t + 7 of tokens g and g +
 * 8; a product takes two neighbouring pairs of them. In the last block, rows are as long as what is left of head_dim.
 *   values  transposed, [d / 16][lane][8]: elements d = g and g + 8 of tokens 2t, 2t + 1, 2t + 8, 2t + 9 in the
 * operand's own order. When head_dim / 8 is odd, the last block is [lane][4] and has d = g only.
 */
#pragma once

#include "cuda/kernels.cuh"

namespace GPU_NS
{

enum { PAGE_TOKENS = KV_PAGE_TOKENS };

/* Bytes of a head's keys, or values, in a page. */
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
	const bool narrow = head_dim - 16 * block < 16;
	const int element = narrow ? token / 8 * 2 + token % 2 : (token / 8 * 2 + upper) * 2 + token % 2;
	return 2 * (block * 16 * PAGE_TOKENS + lane * (narrow ? 4 : 8) + element);
}

} // namespace GPU_NS
