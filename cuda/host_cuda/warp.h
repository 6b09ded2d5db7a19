/*
 * Collectives of warps and blocks, tensor-core fragments and asynchronous copies.
 */
#pragma once

#include "cuda/host_cuda/exec.h"
#include "cuda/host_cuda/shared.h"

namespace host_cuda {

inline void __syncthreads()
{
	block_barrier("__syncthreads", 0);
}
inline int __syncthreads_count(int predicate)
{
	return block_barrier("__syncthreads_count", predicate);
}
inline int __syncthreads_or(int predicate)
{
	return block_barrier("__syncthreads_or", predicate) != 0;
}
inline int __syncthreads_and(int predicate)
{
	return block_barrier("__syncthreads_and", !predicate) == 0;
}

void __syncwarp(unsigned mask = 0xffffffffu);

/* How a shuffle finds its source lane. */
enum class shuffle { index, up, down, butterfly };
void shuffle_bytes(shuffle kind, unsigned mask, const void *in, void *out, unsigned size, int operand, int width);

template <typename T> inline T shuffled(shuffle kind, unsigned mask, T v, int operand, int width)
{
	static_assert(sizeof(T) <= 16, "a shuffle moves registers");
	T r;
	shuffle_bytes(kind, mask, &v, &r, sizeof v, operand, width);
	return r;
}
template <typename T> inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32)
{
	return shuffled(shuffle::index, mask, v, lane, width);
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32)
{
	return shuffled(shuffle::up, mask, v, static_cast<int>(delta), width);
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32)
{
	return shuffled(shuffle::down, mask, v, static_cast<int>(delta), width);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32)
{
	return shuffled(shuffle::butterfly, mask, v, lanes, width);
}

unsigned __ballot_sync(unsigned mask, int predicate);
inline int __any_sync(unsigned mask, int predicate)
{
	return __ballot_sync(mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate)
{
	return __ballot_sync(mask, !predicate) == 0;
}
unsigned match_bytes(unsigned mask, const void *value, unsigned size);
template <typename T> inline unsigned __match_any_sync(unsigned mask, T v)
{
	return match_bytes(mask, &v, sizeof v);
}

enum class reduce { add, min_signed, max_signed, min_unsigned, max_unsigned, bit_and, bit_or, bit_xor };
unsigned reduce_sync(reduce kind, unsigned mask, unsigned v);
inline int __reduce_add_sync(unsigned mask, int v)
{
	return static_cast<int>(reduce_sync(reduce::add, mask, static_cast<unsigned>(v)));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) { return reduce_sync(reduce::add, mask, v); }
inline int __reduce_min_sync(unsigned mask, int v)
{
	return static_cast<int>(reduce_sync(reduce::min_signed, mask, static_cast<unsigned>(v)));
}
inline int __reduce_max_sync(unsigned mask, int v)
{
	return static_cast<int>(reduce_sync(reduce::max_signed, mask, static_cast<unsigned>(v)));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) { return reduce_sync(reduce::min_unsigned, mask, v); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) { return reduce_sync(reduce::max_unsigned, mask, v); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned v) { return reduce_sync(reduce::bit_and, mask, v); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) { return reduce_sync(reduce::bit_or, mask, v); }
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v) { return reduce_sync(reduce::bit_xor, mask, v); }

/* row: this lane's 16 bytes, given as a place in shared memory. */
struct shared_place {
	int64_t offset, begin, end;
};
template <typename T> inline shared_place place(const shared_span<T> &s)
{
	return {s.offset(), s.begin_offset(), s.end_offset()};
}
void ldmatrix(uint32_t *r, unsigned n, bool trans, shared_place row);
template <typename T> inline void ldmatrix_x1(uint32_t (&r)[1], const shared_span<T> &row)
{
	ldmatrix(r, 1, false, place(row));
}
template <typename T> inline void ldmatrix_x2(uint32_t (&r)[2], const shared_span<T> &row)
{
	ldmatrix(r, 2, false, place(row));
}
template <typename T> inline void ldmatrix_x4(uint32_t (&r)[4], const shared_span<T> &row)
{
	ldmatrix(r, 4, false, place(row));
}
template <typename T> inline void ldmatrix_x2_trans(uint32_t (&r)[2], const shared_span<T> &row)
{
	ldmatrix(r, 2, true, place(row));
}
template <typename T> inline void ldmatrix_x4_trans(uint32_t (&r)[4], const shared_span<T> &row)
{
	ldmatrix(r, 4, true, place(row));
}

void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mma_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

void copy_async(shared_place dst, const void *src, unsigned bytes, bool valid);
void copy_async_wait(unsigned pending);
void cp_async_commit();
template <int bytes, typename T> inline void cp_async(const shared_span<T> &dst, const void *src, bool valid = true)
{
	static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
	copy_async(place(dst), src, bytes, valid);
}
template <int pending> inline void cp_async_wait()
{
	copy_async_wait(pending);
}

} // namespace host_cuda
