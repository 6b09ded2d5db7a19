/*
 * Runs grids: the scheduler of a block's threads, their meetings, and what happens when one of them errs.
 */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include "cuda/host_cuda/internal.h"

namespace host_cuda {

thread_context *self;
grid_context current;
uint32_t epoch = 1, block_epoch = 1;

enum class state { ready, in_collective, at_barrier, exited };

struct cuda_thread {
	thread_context context;
	fibre on;
	state at;
	lane_op *op;
};

static cuda_thread threads[max_threads];
static warp_state warps[max_threads / warp_lanes];
static fibre scheduler;
static const std::function<void()> *body;

/* The barrier that threads wait at. */
static struct {
	const char *name;
	unsigned first; /* the thread that came first */
	unsigned n;
	int votes;
	int result;
} barrier;

static unsigned n_exited;
static cudaError_t grid_error;

warp_state &warp_of(const thread_context &t)
{
	return warps[t.warp];
}

static cuda_thread &running()
{
	return threads[self->id];
}

/* Lets others run until this thread is ready again. */
static void yield_thread(cuda_thread &t)
{
	fibre_switch(t.on, scheduler, false);
}

/* ---- errors */

/* A fibre that errs is left as it is: nothing here may own memory when fibre_switch() is called. */
static char message[1024];

static void end_grid(cudaError_t e, const thread_context &t, const char *text)
{
	char where[512];
	snprintf(where, sizeof where, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): ", current.kernel,
	         current.block_index.x, current.block_index.y, current.block_index.z, t.index.x, t.index.y, t.index.z);
	set_report(where, text);
	grid_error = e;
}

/* Reports `message` for the running thread and leaves it for good. */
static void fail_running(cudaError_t e)
{
	if (!self) {
		set_report("", message);
		return;
	}
	end_grid(e, *self, message);
	fibre_switch(running().on, scheduler, true);
}

#define FORMAT_MESSAGE(format)                                                                                         \
	do {                                                                                                           \
		va_list args;                                                                                          \
		va_start(args, format);                                                                                \
		vsnprintf(message, sizeof message, format, args);                                                      \
		va_end(args);                                                                                          \
	} while (0)

void misuse(const char *format, ...)
{
	FORMAT_MESSAGE(format);
	set_report("", message);
}

void fail_kernel(cudaError_t e, const char *format, ...)
{
	FORMAT_MESSAGE(format);
	fail_running(e);
}

void violation(const char *format, ...)
{
	FORMAT_MESSAGE(format);
	fail_running(cudaErrorLaunchFailure);
}

/* ---- faults: a kernel's plain pointer met a guard page, or the host touched device memory */

static struct {
	void *address;
	bool write, stack;
} fault;

static void fault_in_kernel()
{
	const allocation *a = nearest_allocation(fault.address);
	const char *verb = fault.write ? "writes" : "reads";
	if (fault.stack)
		fail_kernel(cudaErrorIllegalAddress, "stack overflow");
	if (!a)
		fail_kernel(cudaErrorIllegalAddress, "%s address %p, and there is no allocation", verb, fault.address);
	const char *p = static_cast<const char *>(fault.address);
	const long long from_start = p - a->base;
	if (from_start < 0)
		fail_kernel(cudaErrorIllegalAddress, "%s address %p, %lld bytes before the allocation %p of %zu bytes",
		            verb, fault.address, -from_start, static_cast<void *>(a->base), a->bytes);
	fail_kernel(cudaErrorIllegalAddress, "%s address %p, %lld bytes past the end of the allocation %p of %zu bytes",
	            verb, fault.address, from_start - static_cast<long long>(a->bytes), static_cast<void *>(a->base),
	            a->bytes);
	abort();
}

static bool in_stack_guard(const fibre &f, const char *p)
{
	return p >= f.stack - STACK_GUARD && p < f.stack;
}

static void on_fault(int number, siginfo_t *info, void *opaque)
{
	ucontext_t *c = static_cast<ucontext_t *>(opaque);
	fault.address = info->si_addr;
	if (!self) {
		const allocation *a = find_allocation(info->si_addr);
		if (a && a->kind == memory_kind::device)
			misuse("host code touches device memory at %p, %zu bytes into an allocation of %zu",
			       info->si_addr, static_cast<size_t>(static_cast<char *>(info->si_addr) - a->base),
			       a->bytes);
		signal(number, SIG_DFL); /* and again, on return */
		return;
	}
#ifdef __x86_64__
	/*
	 * Goes on in fault_in_kernel(), on the fibre's stack: below what it uses, or at the top when there is no room.
	 */
	greg_t *regs = c->uc_mcontext.gregs;
	const fibre &f = running().on;
	fault.write = (regs[REG_ERR] & 2) != 0;
	fault.stack = in_stack_guard(f, static_cast<char *>(info->si_addr));
	uintptr_t sp = static_cast<uintptr_t>(regs[REG_RSP]);
	if (fault.stack)
		sp = reinterpret_cast<uintptr_t>(f.stack + f.stack_bytes);
	sp = ((sp - 256) & ~static_cast<uintptr_t>(15)) - 8;
	regs[REG_RSP] = static_cast<greg_t>(sp);
	regs[REG_RIP] = static_cast<greg_t>(reinterpret_cast<uintptr_t>(&fault_in_kernel));
#else
	(void)c;
	(void)in_stack_guard;
	(void)fault_in_kernel;
	end_grid(cudaErrorIllegalAddress, *self, "faults");
	abort();
#endif
}

/* The handler runs on a stack of its own; each thread that runs grids needs one. */
static void install_fault_handler()
{
	static thread_local bool installed;
	static thread_local char *alternate;
	struct sigaction action = {}, old;
	if (!installed) {
		stack_t s = {}, previous;
		if (sigaltstack(nullptr, &previous) == 0 && (previous.ss_flags & SS_DISABLE)) {
			const size_t bytes = 64 * 1024;
			alternate = static_cast<char *>(malloc(bytes));
			s.ss_sp = alternate;
			s.ss_size = bytes;
			if (alternate)
				sigaltstack(&s, nullptr);
		}
		installed = true;
	}
	sigaction(SIGSEGV, nullptr, &old);
	if (old.sa_sigaction == on_fault)
		return;
	action.sa_sigaction = on_fault;
	action.sa_flags = SA_SIGINFO | SA_ONSTACK;
	sigemptyset(&action.sa_mask);
	sigaction(SIGSEGV, &action, nullptr);
	sigaction(SIGBUS, &action, nullptr);
}

/* ---- meetings */

static void make_ready(cuda_thread &t)
{
	t.at = state::ready;
	t.op = nullptr;
	warp_state &w = warps[t.context.warp];
	w.ready |= 1u << t.context.lane;
	w.waiting &= ~(1u << t.context.lane);
	w.op[t.context.lane] = nullptr;
}

void collective(lane_op &op)
{
	cuda_thread &t = running();
	warp_state &w = warps[self->warp];
	const uint32_t me = 1u << self->lane;
	if (!(op.mask & me))
		violation("%s with mask 0x%08x, which does not name the calling lane %u", op.name, op.mask, self->lane);
	if (op.mask & ~w.present)
		violation("%s with mask 0x%08x names lanes that the block does not have (0x%08x)", op.name, op.mask,
		          w.present);
	if (op.mask & w.exited)
		violation("divergent %s: mask 0x%08x names lanes that have exited (0x%08x)", op.name, op.mask,
		          op.mask & w.exited);
	w.op[self->lane] = &op;
	if ((w.waiting & op.mask) != (op.mask & ~me)) {
		t.at = state::in_collective;
		t.op = &op;
		w.waiting |= me;
		yield_thread(t);
		return;
	}
	for (unsigned lane = 0; lane < warp_lanes; lane++) {
		if (!(op.mask >> lane & 1))
			continue;
		const lane_op *other = w.op[lane];
		if (strcmp(other->name, op.name) != 0)
			violation("divergent %s: lane %u is in %s", op.name, lane, other->name);
		if (other->mask != op.mask)
			violation("divergent %s: mask 0x%08x, but lane %u has 0x%08x", op.name, op.mask, lane,
			          other->mask);
		if (other->same != op.same)
			violation("divergent %s: lane %u has other parameters", op.name, lane);
	}
	op.run(w.op, op.mask);
	w.op[self->lane] = nullptr;
	for (unsigned lane = 0; lane < warp_lanes; lane++)
		if ((op.mask & ~me) >> lane & 1)
			make_ready(threads[self->warp * warp_lanes + lane]);
}

int block_barrier(const char *name, int predicate)
{
	cuda_thread &t = running();
	if (barrier.n == 0) {
		barrier.name = name;
		barrier.first = self->id;
		barrier.votes = 0;
	} else if (strcmp(barrier.name, name) != 0) {
		violation("divergent %s: thread %u of the block is at %s", name, barrier.first, barrier.name);
	}
	barrier.n++;
	barrier.votes += predicate != 0;
	t.at = state::at_barrier;
	yield_thread(t);
	return barrier.result;
}

static void open_barrier()
{
	barrier.result = barrier.votes;
	barrier.n = 0;
	epoch++;
	for (unsigned i = 0; i < current.n_threads; i++)
		make_ready(threads[i]);
	for (unsigned i = 0; i * warp_lanes < current.n_threads; i++)
		if (warps[i].ordered_once) {
			memset(warps[i].now, 0, sizeof warps[i].now);
			memset(warps[i].seen, 0, sizeof warps[i].seen);
			warps[i].ordered_once = false;
		}
}

/* Nobody can go on, and not all have exited: opens the barrier, or says who waits for whom in vain. */
static void resolve()
{
	if (barrier.n == current.n_threads) {
		open_barrier();
		return;
	}
	char text[512];
	for (unsigned i = 0; i < current.n_threads; i++) {
		const cuda_thread &t = threads[i];
		if (t.at != state::in_collective)
			continue;
		for (unsigned lane = 0; lane < warp_lanes; lane++) {
			const cuda_thread &other = threads[t.context.warp * warp_lanes + lane];
			if (!(t.op->mask >> lane & 1) ||
			    (other.at == state::in_collective && other.op->mask == t.op->mask))
				continue;
			const char *what = other.at == state::exited       ? "has exited"
			                   : other.at == state::at_barrier ? "waits at a barrier of the block"
			                                                   : "waits in a collective of other lanes";
			snprintf(text, sizeof text, "divergent %s with mask 0x%08x: lane %u %s", t.op->name, t.op->mask,
			         lane, what);
			end_grid(cudaErrorLaunchFailure, t.context, text);
			return;
		}
	}
	for (unsigned i = 0; i < current.n_threads; i++) {
		if (threads[i].at != state::exited)
			continue;
		const uint3 &gone = threads[i].context.index;
		snprintf(text, sizeof text, "divergent %s: %u of %u threads wait, and thread (%u,%u,%u) has exited",
		         barrier.name, barrier.n, current.n_threads, gone.x, gone.y, gone.z);
		end_grid(cudaErrorLaunchFailure, threads[barrier.first].context, text);
		return;
	}
	end_grid(cudaErrorLaunchFailure, threads[0].context, "the block's threads wait for each other");
}

/* ---- blocks */

static void thread_entry()
{
	fibre_started(scheduler);
	(*body)();
	cuda_thread &t = running();
	warp_state &w = warps[self->warp];
	t.at = state::exited;
	w.exited |= 1u << self->lane;
	n_exited++;
	fibre_switch(t.on, scheduler, true);
	abort(); /* nobody resumes an exited thread */
}

/*
 * The next thread to run: the first that can, staying with a warp while it can go on; or any, by chance. NULL: none
 * can.
 */
static cuda_thread *pick(unsigned *warp)
{
	const unsigned n_warps = (current.n_threads + warp_lanes - 1) / warp_lanes;
	uint32_t ready = 0;
	unsigned w = order_state ? static_cast<unsigned>(chance() % n_warps) : *warp;
	for (unsigned i = 0; i < n_warps; i++, w = w + 1 == n_warps ? 0 : w + 1) {
		ready = warps[w].ready;
		if (ready)
			break;
	}
	if (!ready)
		return nullptr;
	*warp = w;
	if (order_state)
		for (unsigned skip = static_cast<unsigned>(chance() % static_cast<unsigned>(__builtin_popcount(ready)));
		     skip > 0; skip--)
			ready &= ready - 1;
	const unsigned lane = static_cast<unsigned>(__builtin_ctz(ready));
	warps[w].ready &= ~(1u << lane);
	return &threads[w * warp_lanes + lane];
}

static bool begin_block(uint3 index, const launch_record &l)
{
	const unsigned n = current.n_threads;
	current.block_index = index;
	block_epoch = ++epoch;
	n_exited = 0;
	barrier.n = 0;
	shared_begin_block(l.shared_bytes);
	memset(warps, 0, (n + warp_lanes - 1) / warp_lanes * sizeof warps[0]);
	for (unsigned i = 0; i < n; i++) {
		cuda_thread &t = threads[i];
		if (!fibre_prepare(t.on, thread_entry))
			return false;
		t.context.index = {i % l.block.x, i / l.block.x % l.block.y, i / (l.block.x * l.block.y)};
		t.context.id = i;
		t.context.lane = i % warp_lanes;
		t.context.warp = i / warp_lanes;
		t.at = state::ready;
		t.op = nullptr;
		warps[t.context.warp].present |= 1u << t.context.lane;
		warps[t.context.warp].ready |= 1u << t.context.lane;
	}
	return true;
}

static void run_block()
{
	unsigned warp = 0;
	while (n_exited < current.n_threads && grid_error == cudaSuccess) {
		cuda_thread *t = pick(&warp);
		if (!t) {
			resolve();
			continue;
		}
		self = &t->context;
		fibre_switch(scheduler, t->on, false);
		self = nullptr;
	}
	drop_pending_copies();
}

/* A permutation of [0, n), n a count of blocks: steps of a stride that shares no factor with n, from anywhere. */
struct block_order {
	uint64_t n, start = 0, stride = 1;
	explicit block_order(uint64_t count) : n(count)
	{
		if (!order_state)
			return;
		start = chance() % n;
		do
			stride = chance() % n + 1;
		while (gcd(stride, n) != 1);
	}
	static uint64_t gcd(uint64_t a, uint64_t b)
	{
		return b == 0 ? a : gcd(b, a % b);
	}
	uint64_t at(uint64_t i) const
	{
		return static_cast<uint64_t>((static_cast<unsigned __int128>(i) * stride + start) % n);
	}
};

cudaError_t run_grid(const launch_record &l)
{
	const device_memory_scope open;
	const uint64_t n_blocks = static_cast<uint64_t>(l.grid.x) * l.grid.y * l.grid.z;
	install_fault_handler();
	grid_error = cudaSuccess;
	body = &l.body;
	current.kernel = l.kernel.c_str();
	current.grid = l.grid;
	current.block = l.block;
	current.n_threads = l.block.x * l.block.y * l.block.z;
	current.dynamic_shared = l.shared_bytes;
	current.shared_limit = l.shared_limit;
	const block_order order(n_blocks);
	for (uint64_t i = 0; i < n_blocks && grid_error == cudaSuccess; i++) {
		const uint64_t b = order.at(i);
		const uint3 index = {static_cast<unsigned>(b % l.grid.x),
		                     static_cast<unsigned>(b / l.grid.x % l.grid.y),
		                     static_cast<unsigned>(b / l.grid.x / l.grid.y)};
		if (!begin_block(index, l)) {
			misuse("no memory for the stacks of %u threads", current.n_threads);
			grid_error = cudaErrorLaunchFailure;
		} else {
			run_block();
		}
	}
	if (grid_error == cudaSuccess) {
		const std::string damage = check_canaries();
		if (!damage.empty()) {
			set_report(("kernel " + l.kernel + ": ").c_str(), damage.c_str());
			grid_error = cudaErrorIllegalAddress;
		}
	} else {
		for (unsigned i = 0; i < current.n_threads; i++)
			fibre_forget(threads[i].on);
	}
	return grid_error;
}

} // namespace host_cuda
