/*
 * host_cuda: CUDA's execution model on the CPU, for tests. A source that includes cuda/gpu.cuh with KVASIR_HOST_CUDA
 * defined is C++17 and runs here: grids, blocks, warps of 32, barriers, shuffles, votes, atomics, shared memory,
 * tensor-core fragments, copies, streams, events and graphs. It is made to find mistakes, not to be fast.
 *
 *   types.h    vector types, half and bfloat16        shared.h   shared memory and its shadow
 *   math.h     arithmetic and bit intrinsics          warp.h     collectives, tensor cores, asynchronous copies
 *   exec.h     threads, blocks, how an error is told  runtime.h  memory, streams, events, graphs: the runtime calls
 *   control.h  (C) what a test sets: the order of threads, failures of runtime calls
 */
#pragma once

#include "cuda/host_cuda/types.h"
#include "cuda/host_cuda/math.h"
#include "cuda/host_cuda/exec.h"
#include "cuda/host_cuda/shared.h"
#include "cuda/host_cuda/warp.h"
#include "cuda/host_cuda/global.h"
#include "cuda/host_cuda/runtime.h"

using namespace host_cuda;
