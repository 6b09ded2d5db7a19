/*
 * From pages to what attention multiplies: where a page is, its keys and values as left operands, and what of it does
 * not count.
 */
#pragma once

#include "cuda/block.cuh"
#include "cuda/kv_narrow.cuh"
#include "cuda/packed.cuh"

namespace GPU_NS
{

/* Where a page's keys and values of a head are: in 16 bits, in a page or in a wide copy, or a narrow block. */
struct page_place {
	const uint8_t *keys, *values; /* or both at the block */
	bool wide;
};

template <enum kv_form form>
__device__ __forceinline__ struct page_place place_of(const struct attention_args &a, int head_dim, int head_kv,
                                                      int32_t page, int32_t slot)
{
	if (!is_plain(form) && slot < 0) {
		const uint8_t *block = a.kv + static_cast<size_t>(page) * a.place.page_stride + a.place.layer_offset +
				       head_kv * narrow_bytes(head_dim);
		return {block, block, false};
	}
	const uint8_t *layer =
		is_plain(form)
			? a.kv + static_cast<size_t>(page) * a.place.page_stride + a.place.layer_offset
			: a.kv + a.place.wide_offset + static_cast<size_t>(slot) * a.place.wide_stride +
				  a.place.wide_layer_offset;
	return {layer + head_offset(a.n_head_kv, head_dim, 0, head_kv),
		layer + head_offset(a.n_head_kv, head_dim, 1, head_kv), true};
}

/* Where the wide copy is that a narrow page of attention_args.part_table has, or -1. place: in that table. */
__device__ __forceinline__ int part_slot(const struct attention_args &a, int place)
{
	const uint64_t wide = place < 64 ? a.part_wide[0] : a.part_wide[1];
	return wide >> place % 64 & 1 ? place : -1;
}

/* What a function of load_key() and so on needs for memory. */
struct load_global {
	const uint8_t *from;
	template <typename V> __device__ __forceinline__ V operator()(int at, V) const
	{
		return ldg_stream<V>(from + at);
	}
};

struct load_shared {
	shared_span<uint8_t> from;
	template <typename V> __device__ __forceinline__ V operator()(int at, V) const
	{
		return ld_shared<V>(from + at);
	}
};

/*
 * Keys and values of a page as left operands, from memory or from shared memory: load(byte offset, V()) gives a vector
 * V. Loops are over blocks of head_dim rounded up to a template's size.
 */
struct key_block {
	uint4 token[2]; /* tokens g and g + 8, 8 of 32 elements */
};

template <typename Load>
__device__ __forceinline__ struct key_block load_key(int block, int head_dim, int lane, const Load &load)
{
	const int g = lane / 4, d = 32 * block + lane % 4 * 8;
	struct key_block k = {{{0, 0, 0, 0}, {0, 0, 0, 0}}};
	if (d < head_dim) {
		k.token[0] = load(key_offset(head_dim, g, d), uint4());
		k.token[1] = load(key_offset(head_dim, g + 8, d), uint4());
	}
	return k;
}

template <typename Load>
__device__ __forceinline__ uint4 load_value(int block, int head_dim, int lane, const Load &load)
{
	uint4 v = {0, 0, 0, 0};
	if (16 * block + 16 <= head_dim) {
		v = load(512 * block + 16 * lane, uint4());
	} else if (16 * block < head_dim) {
		const uint2 x = load(512 * block + 8 * lane, uint2());
		v.x = x.x;
		v.z = x.y;
	}
	return v;
}

/*
 * Two elements of a plain page, or of a wide copy, as halves. Bfloat16s are held where halves end, and are halves
 * exactly from 2^-14 on.
 */
template <enum kv_form form> __device__ __forceinline__ uint32_t halves_of(uint32_t pair)
{
	if constexpr (form == PAGES_BF16)
		return as_u32(__floats2half2_rn(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)));
	else
		return pair;
}

template <enum kv_form form> __device__ __forceinline__ uint4 halves_of(const uint4 &v)
{
	return {halves_of<form>(v.x), halves_of<form>(v.y), halves_of<form>(v.z), halves_of<form>(v.w)};
}

template <enum kv_form form> __device__ __forceinline__ struct key_block halves_of(const struct key_block &k)
{
	return {{halves_of<form>(k.token[0]), halves_of<form>(k.token[1])}};
}

/* Codes of 32 elements of keys: 8 of token g, then of token g + 8. */
template <typename Load>
__device__ __forceinline__ uint4 load_key_codes(int block, int head_dim, int lane, const Load &load)
{
	const int d = 32 * block + lane % 4 * 8;
	uint4 k = {0, 0, 0, 0};
	if (d < head_dim)
		k = load(key_code_offset(head_dim, lane / 4, d), uint4());
	return k;
}

/* Codes of 32 elements of values: x, y of the first 16, z, w of the others; x or z alone of 8. */
template <typename Load>
__device__ __forceinline__ uint4 load_value_codes(int block, int head_dim, int lane, const Load &load)
{
	const int left = head_dim - 32 * block, at = 512 * block;
	uint4 v = {0, 0, 0, 0};
	if (left >= 32)
		return load(at + 16 * lane, uint4());
	if (left >= 16) {
		const uint2 x = load(at + 8 * lane, uint2());
		v.x = x.x;
		v.y = x.y;
	}
	if (left == 24)
		v.z = load(at + 256 + 4 * lane, uint32_t());
	if (left == 8)
		v.x = load(at + 4 * lane, uint32_t());
	return v;
}

template <enum kv_form form> __device__ __forceinline__ struct key_block key_of_codes(const uint4 &k)
{
	return {{{code_pair<form, 0>(k.x), code_pair<form, 1>(k.x), code_pair<form, 0>(k.y), code_pair<form, 1>(k.y)},
		 {code_pair<form, 0>(k.z), code_pair<form, 1>(k.z), code_pair<form, 0>(k.w), code_pair<form, 1>(k.w)}}};
}

/* Scales of a page's values for this lane. */
struct value_scales {
	float rest[2];	  /* of tokens g and g + 8: for their weights */
	__half2 power[2]; /* of tokens 2t, 2t + 1 and 2t + 8, 2t + 9 */
};

/* Codes times the power are halves: at most 448 * 2^7. */
__device__ __forceinline__ int scale_exponent(float scale)
{
	return max(-24, min(static_cast<int>(__float_as_uint(scale) >> 23 & 255) - 127, 7));
}

__device__ __forceinline__ struct value_scales split_scales(float scale, float scale8, int lane)
{
	const int e[2] = {scale_exponent(scale), scale_exponent(scale8)};
	uint32_t bits[2];
#pragma unroll
	for (int i = 0; i < 2; i++)
		bits[i] = e[i] >= -14 ? static_cast<uint32_t>(e[i] + 15) << 10 : 1u << (e[i] + 24);
	const uint32_t both = bits[0] | bits[1] << 16;
	const uint32_t even = __shfl_sync(ALL, both, lane % 4 * 8), odd = __shfl_sync(ALL, both, lane % 4 * 8 + 4);
	return {{scale * __int_as_float((127 - e[0]) << 23), scale8 * __int_as_float((127 - e[1]) << 23)},
		{as_half2(__byte_perm(even, odd, 0x5410)), as_half2(__byte_perm(even, odd, 0x7632))}};
}

/* Block `block` of 16 elements, from the codes of the 32 that it is in. */
template <enum kv_form form>
__device__ __forceinline__ uint4 value_of_codes(int block, int head_dim, const uint4 &codes,
						const struct value_scales &scales)
{
	const uint32_t low = block % 2 ? codes.z : codes.x, high = block % 2 ? codes.w : codes.y;
	const auto times = [](uint32_t pair, __half2 power) { return as_u32(__hmul2(as_half2(pair), power)); };
	uint4 v = {0, 0, 0, 0};
	if (16 * block + 16 <= head_dim) {
		v.x = times(code_pair<form, 0>(low), scales.power[0]);
		v.y = times(code_pair<form, 1>(low), scales.power[0]);
		v.z = times(code_pair<form, 0>(high), scales.power[1]);
		v.w = times(code_pair<form, 1>(high), scales.power[1]);
	} else if (16 * block < head_dim) {
		v.x = times(code_pair<form, 0>(low), scales.power[0]);
		v.z = times(code_pair<form, 1>(low), scales.power[1]);
	}
	return v;
}

/* Two neighbouring tokens' halves, without those after `last`. What lies there may be anything, NaN as well. */
__device__ __forceinline__ uint32_t without_later(uint32_t pair, int token, int last)
{
	return token > last ? 0 : token + 1 > last ? pair & 0xffffu : pair;
}

__device__ __forceinline__ uint4 hide_later(uint4 v, int first_token, int last, int lane)
{
	const int token = first_token + lane % 4 * 2;
	v.x = without_later(v.x, token, last);
	v.y = without_later(v.y, token, last);
	v.z = without_later(v.z, token + 8, last);
	v.w = without_later(v.w, token + 8, last);
	return v;
}

/* Whether a pair has an infinity or what is no number. */
__device__ __forceinline__ bool odd_pair(uint32_t pair)
{
	return (pair & 0x7c00u) == 0x7c00u || (pair & 0x7c000000u) == 0x7c000000u;
}

} // namespace GPU_NS
