/*
 * What every file of cuda/ is written against, and the contract between the kernels and the two ways they are built.
 *
 * The .cu files of this directory are compiled twice: by nvcc for GPUs, and as C++17 by the host's compiler with
 * -DKVASIR_HOST_CUDA, where cuda/host_cuda/ runs them on the CPU and checks what a GPU would not tell. The code is the
 * same in both; this header is the only one that knows the difference. A source includes it first and puts everything
 * into namespace GPU_NS, so that both builds can live in one program; the one symbol with C linkage is GPU_CREATE.
 *
 *     #include "cuda/gpu.cuh"
 *     namespace GPU_NS {
 *     __global__ void scale(float *x, int n, float by) { ... }
 *     }
 *
 * Launch:      GPU_LAUNCH(scale, grid, block, shared_bytes, stream, x, n, 2.0f);  a template's name in parentheses.
 * Runtime:     by its real names: cudaMalloc, cudaMemcpyAsync, cudaStreamCreateWithFlags, cudaGraphLaunch, ...
 *              (host_cuda/runtime.h lists what the host build has). Every result is checked by the caller.
 *
 * Shared memory. GPU_SHARED(float, tile, 32 * 33); declares `tile` in a kernel or device function,
 *              GPU_DYNAMIC_SHARED(float, buf); names the launch's dynamic bytes (16-byte aligned). Both are a
 *              shared_span<T>: `T *` on the GPU, a checked pointer on the host. Index it, add to it, pass it as
 *              shared_span<T>, reinterpret it with shared_cast<U>(). A scalar is read and written as span[i]; anything
 *              wider, or with members, with ld_shared<V>(span + i) and st_shared<V>(span + i, v), which want V's
 *              alignment. `auto x = span[i]` would keep a reference: name the type. The host build reports accesses out
 *              of bounds, misaligned ones, reads of what the block has not written, and two threads' accesses to one
 *              byte, one of them a write, without a barrier between them.
 *
 * Global memory. Scalars through plain pointers. Vectors through ldg<V>(p) (read-only for the whole launch:
 *              ld.global.nc), ldg_stream<V>(p) (the same, not kept in L1: weights that are read once), ld_global<V>(p)
 *              (memory that this launch also writes) and stg<V>(p, v). The host build checks bounds and alignment
 *              against the allocations; plain pointers fault at an allocation's guard page.
 *
 * Collectives. __syncthreads*(), __syncwarp(), __shfl*_sync(), votes, __reduce_*_sync(), ldmatrix and mma want every
 *              lane they name; the host build reports a lane that exited or went elsewhere. A thread that has returned
 *              may not be waited for, not even by __syncthreads(), although GPUs allow that: loop or predicate instead
 *              of returning early. Blocks of a grid may run in any order and one at a time: no block may wait for
 *              another.
 *
 * Tensor cores and copies, for whole warps, with the fragments of the PTX manual (host_cuda emulates them lane by
 *              lane): ldmatrix_x1/x2/x4(r, row) and ldmatrix_x2/x4_trans(r, row); `row` is this lane's 16-byte row, as
 *              ldmatrix has it. mma_f16(d, a, b), mma_bf16: d[4] += a[4] * b[2], m16n8k16, f32 sums. mma_s8: m16n8k32,
 *              s32 sums. cp_async<N>(dst, src), N = 4, 8 or 16 bytes; cp_async<N>(dst, src, valid) writes zeros where
 *              !valid and does not read; cp_async_commit(); cp_async_wait<N>() leaves the N latest groups pending. What
 *              arrived is this thread's alone until a barrier. Below sm_80 copies are plain loads and bf16 products use
 *              FMA: correct, not fast. dp4a(a, b, c): four signed bytes each. Where GPU_HAS_FP8 is defined (sm_89 and
 *              later), fp8_to_halves() and fp8_from_float() are instructions; elsewhere, on the host too, kv_narrow.cuh
 *              has them in software.
 *
 * Streams of the host build run what is queued only when somebody waits (or at random moments, see
 * host_cuda/control.h), so a missing cudaStreamSynchronize shows. A library call that has no kernel (cuBLASLt) is a
 * function with an #ifdef KVASIR_HOST_CUDA whose host version queues its work by host_cuda::enqueue(stream, "name",
 * function); host_cuda::gemm() is one.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef KVASIR_HOST_CUDA

#include "cuda/host_cuda/host_cuda.h"

#define GPU_NS kvasir_host_cuda
#define GPU_CREATE cuda_host_create
/* The name under which the backend presents itself. */
#define GPU_DEVICE_NAME "cuda-host"

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define GPU_NS kvasir_cuda
#define GPU_CREATE cuda_create
#define GPU_DEVICE_NAME "cuda"

#define GPU_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                     \
	kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)

#define GPU_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define GPU_DYNAMIC_SHARED(type, name)                                                                                 \
	extern __shared__ __align__(16) unsigned char gpu_dynamic_shared[];                                            \
	type *const name = reinterpret_cast<type *>(gpu_dynamic_shared)

#include "cuda/ptx.cuh"

#endif
