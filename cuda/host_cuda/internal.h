/*
 * What the parts of host_cuda know of each other. Everything runs under one lock: calls of the runtime take it, and a
 * grid runs within the call that waits for it.
 */
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/host_cuda/exec.h"
#include "cuda/host_cuda/runtime.h"
#include "cuda/host_cuda/shared.h"

namespace host_cuda {

/* ---- fibre.cpp: stacks and the switch between them */
/* Below each stack no access is allowed in so many bytes: more than a frame may reach over at once. */
static const size_t STACK_GUARD = 64 * 1024;

struct fibre {
	void *sp = nullptr;
	char *stack = nullptr; /* NULL for the thread's own */
	size_t stack_bytes = 0;
	void *fake_stack = nullptr;
	void *context = nullptr; /* where the switch is ucontext's */
};
/*
 * Gives `f` a stack with a guard below it, once, and makes it begin at `entry`, which never returns. False without
 * memory.
 */
bool fibre_prepare(fibre &f, void (*entry)());
/* Saves the running context in `from` and goes on with `to`. `ends`: `from` will not be resumed. */
void fibre_switch(fibre &from, fibre &to, bool ends);
/* Must be the first thing that `entry` calls; `previous` is where it came from. */
void fibre_started(fibre &previous);
/* Forgets what an abandoned fibre left on its stack. */
void fibre_forget(fibre &f);

/* ---- exec.cpp */
struct warp_state {
	uint32_t present, ready, waiting, exited; /* by lane */
	lane_op *op[warp_lanes];
	/*
	 * Order of accesses within the warp: `now` counts a lane's meetings, seen[u][t] how much of t's time u has
	 * seen.
	 */
	uint16_t now[warp_lanes];
	uint16_t seen[warp_lanes][warp_lanes];
	bool ordered_once; /* seen is not all zero */
};
warp_state &warp_of(const thread_context &t);

/* Grows at each block and barrier: accesses of different epochs are ordered. Never 0. */
extern uint32_t epoch, block_epoch;

/* Ends the grid with an error and a report, as violation() does. */
void fail_kernel(cudaError_t error, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A mistake of the host code: writes the report. */
void misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct launch_record {
	std::string kernel;
	const void *function;
	dim3 grid, block;
	size_t shared_bytes, shared_limit;
	std::function<void()> body;
};
/* Runs a grid to its end; the error is sticky. */
cudaError_t run_grid(const launch_record &l);

/* ---- shared.cpp */
constexpr size_t shared_default_limit = 48 * 1024, shared_optin_limit = 227 * 1024,
		 shared_per_multiprocessor = 228 * 1024;
void shared_begin_block(size_t dynamic_bytes);
void drop_pending_copies();

/* ---- memory.cpp */
enum class memory_kind { device, pinned, registered };
struct allocation {
	char *base;
	size_t bytes;
	memory_kind kind;
	char *map;
	size_t map_bytes, usable; /* of the mapping that may be touched */
};
const allocation *find_allocation(const void *p);
/* The allocation that lies nearest, for reports; NULL when there is none. */
const allocation *nearest_allocation(const void *p);
/* Checks the bytes that fill an allocation up to its alignment; "" or what was written over. */
std::string check_canaries();
/* Between these device memory may be touched; outside, the host faults where the machine has protection keys. Nests. */
void device_memory_open();
void device_memory_close();
struct device_memory_scope {
	device_memory_scope() { device_memory_open(); }
	~device_memory_scope() { device_memory_close(); }
	device_memory_scope(const device_memory_scope &) = delete;
	device_memory_scope &operator=(const device_memory_scope &) = delete;
};

/* ---- stream.cpp */
struct operation {
	std::string name;
	std::function<cudaError_t()> run;
	bool is_kernel = false;
};
struct capture_state;
struct queued {
	operation op;
	uint64_t number;
	std::vector<std::pair<stream_impl *, uint64_t>> after;
};
struct stream_impl {
	bool alive = true, blocking = true;
	std::deque<queued> queue;
	uint64_t last = 0, done = 0; /* numbers of the last operation that was queued and done */
	capture_state *capture = nullptr;
};
struct event_impl {
	bool alive = true, timing = true;
	stream_impl *stream = nullptr; /* of the last record */
	uint64_t number = 0;
	double done_ms = 0;
	capture_state *capture = nullptr;
};
struct graph_impl {
	std::vector<operation> ops;
};
struct capture_state {
	stream_impl *origin;
	cudaStreamCaptureMode mode;
	graph_impl *graph;
	std::vector<stream_impl *> joined;
	bool invalid = false;
};
stream_impl *null_stream();
/* The stream a handle names, or NULL with the error set. */
stream_impl *stream_of(cudaStream_t s);
cudaError_t submit(stream_impl *s, operation op);
/* Does everything up to operation `number` of the stream. */
cudaError_t drain(stream_impl *s, uint64_t number);
cudaError_t drain_all();
/* True when a call that waits or allocates would break a capture; then the captures are invalid. */
bool capture_forbids();
void streams_reset();

/* ---- runtime.cpp: errors and failures on purpose */
extern std::recursive_mutex lock;
extern cudaError_t sticky, last_error;
bool is_sticky(cudaError_t e);
/* Remembers an error as the last one, and as the one that stays if it is of that kind. Returns it. */
cudaError_t error(cudaError_t e);
/* Counts a call of `name`; the error it must return before doing anything, or cudaSuccess. */
cudaError_t enter(const char *name);
void runtime_reset();
extern int n_devices;
extern size_t total_memory, used_memory;

/* ---- control.cpp */
/* 0 in natural order. */
extern uint64_t order_state;
uint64_t chance(); /* the next random number; order_state must not be 0 */
void set_report(const char *where, const char *text);

/* Begins a runtime call: takes the lock and returns the call's failure, if it has one. */
#define HOST_CUDA_ENTER(name)                                                                                          \
	std::lock_guard<std::recursive_mutex> guard(lock);                                                             \
	{                                                                                                              \
		const cudaError_t entered = enter(name);                                                               \
		if (entered != cudaSuccess)                                                                            \
			return entered;                                                                                \
	}

} // namespace host_cuda
