/*
 * Global memory through checked loads and stores. Plain pointers need no help: an allocation lies between guard pages.
 */
#pragma once

#include "cuda/host_cuda/exec.h"

namespace host_cuda {

/* The bytes must lie in one allocation and be aligned; else the grid ends with a report. */
void check_global(const void *p, unsigned bytes, unsigned alignment, bool write);

template <typename V> inline V ld_global(const void *p)
{
	V v;
	check_global(p, sizeof(V), sizeof(V), false);
	memcpy(&v, p, sizeof v);
	return v;
}

template <typename V> inline V ldg(const void *p)
{
	static_assert(sizeof(V) <= 16 && (sizeof(V) & (sizeof(V) - 1)) == 0, "one load instruction: 1 to 16 bytes");
	return ld_global<V>(p);
}

template <typename V> inline V ldg_stream(const void *p)
{
	return ldg<V>(p);
}

template <typename V> inline void stg(void *p, V v)
{
	check_global(p, sizeof(V), sizeof(V), true);
	memcpy(p, &v, sizeof v);
}

#define HOST_CUDA_CACHE_HINT(load)                                                                                     \
	template <typename V> inline V load(const V *p)                                                                \
	{                                                                                                              \
		return ld_global<V>(p);                                                                                \
	}
HOST_CUDA_CACHE_HINT(__ldg)
HOST_CUDA_CACHE_HINT(__ldcs)
HOST_CUDA_CACHE_HINT(__ldcg)
HOST_CUDA_CACHE_HINT(__ldca)
HOST_CUDA_CACHE_HINT(__ldcv)
HOST_CUDA_CACHE_HINT(__ldlu)
#undef HOST_CUDA_CACHE_HINT

#define HOST_CUDA_CACHE_HINT(store)                                                                                    \
	template <typename V> inline void store(V *p, V v)                                                             \
	{                                                                                                              \
		stg<V>(p, v);                                                                                          \
	}
HOST_CUDA_CACHE_HINT(__stcs)
HOST_CUDA_CACHE_HINT(__stcg)
HOST_CUDA_CACHE_HINT(__stwb)
HOST_CUDA_CACHE_HINT(__stwt)
#undef HOST_CUDA_CACHE_HINT

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

} // namespace host_cuda
