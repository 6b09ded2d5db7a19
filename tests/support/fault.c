/*
 * What a machine does to a process, on command: memory that cannot be had, and a wall clock that jumps. A library for
 * LD_PRELOAD, so that it reaches the program and every library it uses, as built and shipped.
 *
 * The file that the environment's FAULT_CONTROL names is mapped; a test maps it too (tests/api/faults.py) and writes
 * into it while the program runs. Until then, and without such a file, everything passes through. FAULT_TRACE names a
 * file to which the stack of each failed allocation is appended.
 *
 * Allocations are those of malloc, calloc, realloc, reallocarray, posix_memalign, aligned_alloc, memalign and valloc,
 * and anonymous mappings. What glibc makes of them (strdup, asprintf, fopen, getline) comes here as well, because its
 * own calls of malloc can be interposed, too. `free` is here for the count of what lives.
 */
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { TRACE_DEPTH = 32 };

/*
 * Names and order are known to tests/api/faults.py. All are 64 bits, each written by one side only while it is armed.
 */
struct fault_control {
	_Atomic int64_t fail_at;    /* the n-th allocation from now fails; counted down; 0: none */
	_Atomic int64_t fail_for;   /* and this many after it as well; counted down */
	_Atomic int64_t one_in;     /* each allocation fails with a chance of 1 in this many; 0: none */
	_Atomic int64_t fired;      /* allocations that failed */
	_Atomic int64_t seen;       /* allocations asked for */
	_Atomic int64_t live;       /* blocks of the heap that are not freed */
	_Atomic int64_t shift_s;    /* seconds by which the wall clock is wrong */
	_Atomic int64_t shifted;    /* times that the wall clock was read wrong */
};

static struct fault_control idle; /* until the file is mapped */
static struct fault_control *control = &idle;
static _Atomic uint64_t dice = 88172645463325252u;
static int trace_fd = -1;
static __thread bool tracing __attribute__((tls_model("initial-exec")));

#define PUBLIC __attribute__((visibility("default")))

static struct {
	void *(*malloc)(size_t);
	void *(*calloc)(size_t, size_t);
	void *(*realloc)(void *, size_t);
	void *(*memalign)(size_t, size_t);
	void (*free)(void *);
	void *(*mmap)(void *, size_t, int, int, int, off_t);
} next;

/* The first allocation comes before any constructor runs. dlsym() itself allocates only when it fails. */
static void find_next(void)
{
	*(void **)&next.free = dlsym(RTLD_NEXT, "free");
	*(void **)&next.calloc = dlsym(RTLD_NEXT, "calloc");
	*(void **)&next.realloc = dlsym(RTLD_NEXT, "realloc");
	*(void **)&next.memalign = dlsym(RTLD_NEXT, "memalign");
	*(void **)&next.mmap = dlsym(RTLD_NEXT, "mmap");
	*(void **)&next.malloc = dlsym(RTLD_NEXT, "malloc");
}

static inline void need_next(void)
{
	if (!next.malloc)
		find_next();
}

__attribute__((constructor)) static void open_files(void)
{
	const char *path = getenv("FAULT_CONTROL"), *trace = getenv("FAULT_TRACE");
	void *stack[1];
	need_next();
	if (!path)
		return;
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return;
	struct fault_control *c = next.mmap(NULL, sizeof *c, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (c == MAP_FAILED)
		return;
	if (trace)
		trace_fd = open(trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	backtrace(stack, 1); /* loads what it needs now */
	c->live = idle.live;
	control = c;
}

/* ---- Memory ---- */

static void write_trace(void)
{
	void *stack[TRACE_DEPTH];
	if (trace_fd < 0)
		return;
	tracing = true;
	int n = backtrace(stack, TRACE_DEPTH);
	backtrace_symbols_fd(stack + 2, n - 2, trace_fd);
	if (write(trace_fd, "\n", 1) < 0)
		trace_fd = -1;
	tracing = false;
}

static uint64_t roll(void)
{
	/* xorshift; a lost update between threads does no harm. */
	uint64_t x = dice;
	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	dice = x;
	return x;
}

/* Is this the allocation that fails? */
static bool fails(void)
{
	struct fault_control *c = control;
	need_next();
	if (tracing)
		return false;
	c->seen++;
	bool now = false;
	if (c->fail_at > 0)
		now = atomic_fetch_sub(&c->fail_at, 1) == 1;
	else if (c->fail_for > 0)
		now = atomic_fetch_sub(&c->fail_for, 1) > 0;
	int64_t one_in = c->one_in;
	if (one_in > 0 && roll() % (uint64_t)one_in == 0)
		now = true;
	if (!now)
		return false;
	c->fired++;
	write_trace();
	errno = ENOMEM;
	return true;
}

static void *count(void *p)
{
	if (p)
		control->live++;
	return p;
}

PUBLIC void *malloc(size_t n)
{
	return fails() ? NULL : count(next.malloc(n));
}

PUBLIC void *calloc(size_t n, size_t size)
{
	return fails() ? NULL : count(next.calloc(n, size));
}

PUBLIC void *realloc(void *old, size_t n)
{
	if (old && n == 0) {
		free(old);
		return NULL;
	}
	if (fails())
		return NULL;
	void *p = next.realloc(old, n);
	return old ? p : count(p);
}

PUBLIC void *reallocarray(void *old, size_t n, size_t size)
{
	size_t bytes;
	if (__builtin_mul_overflow(n, size, &bytes)) {
		errno = ENOMEM;
		return NULL;
	}
	return realloc(old, bytes);
}

PUBLIC void *memalign(size_t align, size_t n)
{
	return fails() ? NULL : count(next.memalign(align, n));
}

PUBLIC void *aligned_alloc(size_t align, size_t n)
{
	return memalign(align, n);
}

PUBLIC void *valloc(size_t n)
{
	return memalign((size_t)sysconf(_SC_PAGESIZE), n);
}

PUBLIC int posix_memalign(void **out, size_t align, size_t n)
{
	int saved = errno;
	void *p = memalign(align, n);
	errno = saved;
	if (!p)
		return ENOMEM;
	*out = p;
	return 0;
}

PUBLIC void free(void *p)
{
	need_next();
	if (!p)
		return;
	control->live--;
	next.free(p);
}

PUBLIC void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
	if (flags & MAP_ANONYMOUS && fails())
		return MAP_FAILED;
	need_next();
	return next.mmap(at, n, prot, flags, fd, offset);
}

/* ---- The wall clock ---- */

static int64_t shift(void)
{
	int64_t s = control->shift_s;
	if (s)
		control->shifted++;
	return s;
}

/* The system calls themselves: libc's functions for them are the ones that are replaced here. */
PUBLIC int clock_gettime(clockid_t id, struct timespec *out)
{
	if (syscall(SYS_clock_gettime, id, out) != 0)
		return -1;
	if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)
		out->tv_sec += shift();
	return 0;
}

PUBLIC int gettimeofday(struct timeval *restrict out, void *restrict zone)
{
	(void)zone;
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	out->tv_sec = t.tv_sec;
	out->tv_usec = t.tv_nsec / 1000;
	return 0;
}

PUBLIC time_t time(time_t *out)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	if (out)
		*out = t.tv_sec;
	return t.tv_sec;
}
