/*
 * Fibres: a stack each, and a switch that saves what the System V ABI wants preserved. On x86-64 that is six registers
 * and the stack pointer; elsewhere ucontext does it.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "cuda/host_cuda/internal.h"

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif

#ifdef WITH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace host_cuda {

#ifdef WITH_ASAN
static const size_t stack_size = 512 * 1024;
/* The stack of the thread that runs the scheduler, learnt when a fibre begins. */
static const void *thread_stack;
static size_t thread_stack_bytes;
#else
static const size_t stack_size = 128 * 1024;
#endif

#ifdef __x86_64__

extern "C" void host_cuda_switch(void **save, void *load);
asm(".text\n"
    ".p2align 4\n"
    ".hidden host_cuda_switch\n"
    ".globl host_cuda_switch\n"
    ".type host_cuda_switch,@function\n"
    "host_cuda_switch:\n"
    "	pushq %rbp\n"
    "	pushq %rbx\n"
    "	pushq %r12\n"
    "	pushq %r13\n"
    "	pushq %r14\n"
    "	pushq %r15\n"
    "	movq %rsp, (%rdi)\n"
    "	movq %rsi, %rsp\n"
    "	popq %r15\n"
    "	popq %r14\n"
    "	popq %r13\n"
    "	popq %r12\n"
    "	popq %rbx\n"
    "	popq %rbp\n"
    "	ret\n"
    ".size host_cuda_switch,.-host_cuda_switch\n");

static void set_entry(fibre &f, void (*entry)())
{
	/* At `entry` the stack pointer is 8 below a multiple of 16, as after a call; no return address follows. */
	void **sp = reinterpret_cast<void **>(f.stack + f.stack_bytes) - 10;
	memset(sp, 0, 10 * sizeof *sp);
	sp[6] = reinterpret_cast<void *>(entry);
	f.sp = sp;
}

static void swap(fibre &from, fibre &to)
{
	host_cuda_switch(&from.sp, to.sp);
}

#else

static ucontext_t *context(fibre &f)
{
	if (!f.context)
		f.context = calloc(1, sizeof(ucontext_t));
	return static_cast<ucontext_t *>(f.context);
}

static void set_entry(fibre &f, void (*entry)())
{
	ucontext_t *c = context(f);
	getcontext(c);
	c->uc_stack.ss_sp = f.stack;
	c->uc_stack.ss_size = f.stack_bytes;
	c->uc_link = nullptr;
	makecontext(c, entry, 0);
}

static void swap(fibre &from, fibre &to)
{
	swapcontext(context(from), context(to));
}

#endif

bool fibre_prepare(fibre &f, void (*entry)())
{
	if (!f.stack) {
		void *p = mmap(nullptr, stack_size + STACK_GUARD, PROT_READ | PROT_WRITE,
		               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (p == MAP_FAILED)
			return false;
		mprotect(p, STACK_GUARD, PROT_NONE);
		f.stack = static_cast<char *>(p) + STACK_GUARD;
		f.stack_bytes = stack_size;
	}
	set_entry(f, entry);
	return true;
}

void fibre_switch(fibre &from, fibre &to, bool ends)
{
#ifdef WITH_ASAN
	__sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.stack ? to.stack : thread_stack,
	                               to.stack ? to.stack_bytes : thread_stack_bytes);
	swap(from, to);
	__sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#else
	(void)ends;
	swap(from, to);
#endif
}

void fibre_started(fibre &previous)
{
#ifdef WITH_ASAN
	const void *bottom;
	size_t bytes;
	__sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
	if (!previous.stack) {
		thread_stack = bottom;
		thread_stack_bytes = bytes;
	}
#else
	(void)previous;
#endif
}

void fibre_forget(fibre &f)
{
#ifdef WITH_ASAN
	if (f.stack)
		__asan_unpoison_memory_region(f.stack, f.stack_bytes);
#else
	(void)f;
#endif
}

} // namespace host_cuda
