/* What the threads of a block work out together. */
#pragma once

#include "cuda/gpu.cuh"

namespace GPU_NS
{

/* The lanes of a warp. */
static constexpr unsigned ALL = 0xffffffffu;

/*
 * Folds a value of each of a block's `threads` threads, for every thread: within warps, then over warps in their order.
 */
template <int threads, class T, class Combine>
__device__ __forceinline__ T block_fold(T v, shared_span<T> scratch, Combine combine)
{
	for (int apart = 16; apart; apart /= 2)
		v = combine(v, __shfl_xor_sync(ALL, v, apart));
	__syncthreads();
	if (threadIdx.x % 32 == 0)
		scratch[threadIdx.x / 32] = v;
	__syncthreads();
	v = static_cast<T>(scratch[0]);
	for (int i = 1; i < threads / 32; i++)
		v = combine(v, static_cast<T>(scratch[i]));
	return v;
}

struct add_up {
	template <class T> __device__ __forceinline__ T operator()(T a, T b) const
	{
		return a + b;
	}
};

struct take_larger {
	__device__ __forceinline__ float operator()(float a, float b) const
	{
		return fmaxf(a, b);
	}
};

/* scratch: [threads / 32]; it may be in use until here, and is free behind the next barrier. */
template <int threads, class T> __device__ __forceinline__ T block_sum(T v, shared_span<T> scratch)
{
	return block_fold<threads>(v, scratch, add_up());
}

template <int threads> __device__ __forceinline__ float block_max(float v, shared_span<float> scratch)
{
	return block_fold<threads>(v, scratch, take_larger());
}

} // namespace GPU_NS
