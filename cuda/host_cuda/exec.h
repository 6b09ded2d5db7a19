/*
 * Threads of a block as fibres of one host thread, and how a kernel's error is told.
 *
 * A grid runs block by block. A block's threads run one at a time until they wait in a collective or return; which of
 * those that can run goes on is the scheduler's choice (control.h). An error ends the grid: the report names kernel,
 * block and thread, and the launch has failed as it would on a GPU, with an error that stays.
 */
#pragma once

#include <functional>
#include <tuple>
#include <utility>

#include "cuda/host_cuda/types.h"

namespace host_cuda {

constexpr unsigned max_threads = 1024;
constexpr unsigned warp_lanes = 32;

/*
 * A thread's wait in a warp collective. `run` is called once all lanes of `mask` have come, with their operations by
 * lane.
 */
struct lane_op {
	const char *name;
	uint32_t mask;
	void (*run)(lane_op *const *lane, uint32_t mask);
	const void *in;
	void *out;
	unsigned size; /* bytes of in and out */
	int a, b;      /* parameters, by operation */
	uint64_t same; /* must be the same in all lanes */
};

struct thread_context {
	uint3 index;
	unsigned id; /* in the block */
	unsigned lane, warp;
};

struct grid_context {
	const char *kernel;
	dim3 grid, block;
	uint3 block_index;
	unsigned n_threads;
	size_t dynamic_shared;
	size_t shared_limit; /* of static and dynamic bytes together */
};

constexpr int warpSize = 32;

extern thread_context *self; /* the running thread; NULL outside a kernel */
extern grid_context current;

/* Ends the grid with a report. Outside a kernel it only writes the report and returns. */
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Meets the lanes that op.mask names; the results are in op.out when it returns. */
void collective(lane_op &op);

/* Barrier of the block; returns the number of threads whose `predicate` is not zero. */
int block_barrier(const char *name, int predicate);

struct stream_impl;

/* Queues a launch. `body` is one thread's run. */
void launch(const char *kernel, const void *function, dim3 grid, dim3 block, size_t shared_bytes, stream_impl *stream,
            std::function<void()> body);

template <typename... P, typename... A>
inline void launch_kernel(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                          stream_impl *stream, A &&...args)
{
	/* Converted and copied now, as a launch does. */
	std::tuple<P...> values(std::forward<A>(args)...);
	launch(name, reinterpret_cast<const void *>(kernel), grid, block, shared_bytes, stream,
	       [kernel, values]() { std::apply(kernel, values); });
}

} // namespace host_cuda

#define threadIdx (host_cuda::self->index)
#define blockIdx (host_cuda::current.block_index)
#define blockDim (host_cuda::current.block)
#define gridDim (host_cuda::current.grid)

#define GPU_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                     \
	host_cuda::launch_kernel(#kernel, kernel, (grid), (block), (shared_bytes), (stream), ##__VA_ARGS__)
