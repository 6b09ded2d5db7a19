/*
 * Device and pinned memory. Each allocation is a mapping of its own whose end lies at a guard, aligned to 256 bytes as
 * cudaMalloc promises and no better; new memory is full of NaN. What fills it up to the alignment is checked after
 * every kernel.
 */
#include <algorithm>
#include <stdlib.h>
#include <sys/mman.h>

#include "cuda/host_cuda/global.h"
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
#endif

namespace host_cuda {

/* The guard on either side is wide, so that a wrong index meets it and not somebody else's memory. */
static const size_t page = 4096, guard_bytes = 1 << 20, alignment = 256;
static const unsigned char fresh = 0xff, canary = 0xa7;

static std::vector<allocation> &table = *new std::vector<allocation>; /* by base */
size_t total_memory = static_cast<size_t>(2) << 30, used_memory;

static size_t round_up(size_t n, size_t to)
{
	return (n + to - 1) / to * to;
}

/* The first allocation that begins after p. */
static std::vector<allocation>::iterator after(const void *p)
{
	return std::upper_bound(table.begin(), table.end(), p, [](const void *x, const allocation &a) {
		return static_cast<const char *>(x) < a.base;
	});
}

const allocation *find_allocation(const void *p)
{
	static allocation last;
	const char *c = static_cast<const char *>(p);
	if (last.base && c >= last.base && c < last.base + last.bytes) {
		auto it = after(last.base);
		if (it != table.begin() && (it - 1)->base == last.base && (it - 1)->bytes == last.bytes)
			return &*(it - 1);
	}
	auto it = after(p);
	if (it == table.begin())
		return nullptr;
	--it;
	if (c >= it->base + it->bytes)
		return nullptr;
	last = *it;
	return &*it;
}

const allocation *nearest_allocation(const void *p)
{
	const char *c = static_cast<const char *>(p);
	auto it = after(p);
	if (it == table.begin())
		return table.empty() ? nullptr : &*it;
	const allocation *before = &*(it - 1);
	if (it == table.end())
		return before;
	return c - (before->base + before->bytes) <= it->base - c ? before : &*it;
}

void check_global(const void *p, unsigned bytes, unsigned align, bool write)
{
	const allocation *a = find_allocation(p);
	const char *c = static_cast<const char *>(p), *verb = write ? "writes" : "reads";
	if (a && c + bytes <= a->base + a->bytes) {
		if (reinterpret_cast<uintptr_t>(p) % align != 0)
			fail_kernel(cudaErrorMisalignedAddress,
			            "misaligned: %s %u bytes at %p, %zu bytes into an allocation", verb, bytes, p,
			            static_cast<size_t>(c - a->base));
		return;
	}
	a = nearest_allocation(p);
	if (!a)
		fail_kernel(cudaErrorIllegalAddress, "%s %u bytes at %p, and there is no allocation", verb, bytes, p);
	else
		fail_kernel(cudaErrorIllegalAddress,
		            "%s %u bytes out of bounds: at %p, %lld bytes into the allocation %p of %zu bytes", verb,
		            bytes, p, static_cast<long long>(c - a->base), static_cast<void *>(a->base), a->bytes);
}

/* ---- who may touch device memory, where the processor has protection keys */

static int key = -2; /* -2: not asked for yet, -1: there are none */
static unsigned open_depth;

#if defined(__x86_64__) && defined(PKEY_DISABLE_ACCESS)
static void protect(char *p, size_t bytes)
{
	if (key == -2)
		key = pkey_alloc(0, 0);
	if (key >= 0)
		pkey_mprotect(p, bytes, PROT_READ | PROT_WRITE, key);
}
static void allow(bool yes)
{
	if (key >= 0)
		pkey_set(key, yes ? 0 : PKEY_DISABLE_ACCESS);
}
#else
static void protect(char *, size_t) {}
static void allow(bool) {}
#endif

void device_memory_open()
{
	if (open_depth++ == 0)
		allow(true);
}

void device_memory_close()
{
	if (--open_depth == 0)
		allow(false);
}

/* ---- allocations */

static cudaError_t allocate(void **out, size_t bytes, memory_kind kind)
{
	const size_t usable = round_up(bytes, page), map_bytes = usable + 2 * guard_bytes;
	allocation a = {};
	*out = nullptr;
	if (bytes == 0)
		return cudaSuccess;
	if (bytes > static_cast<size_t>(1) << 46)
		return error(cudaErrorMemoryAllocation);
	const size_t rounded = round_up(bytes, alignment);
	if (kind == memory_kind::device && (rounded > total_memory || used_memory > total_memory - rounded))
		return error(cudaErrorMemoryAllocation);
	void *map = mmap(nullptr, map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (map == MAP_FAILED)
		return error(cudaErrorMemoryAllocation);
	a.map = static_cast<char *>(map);
	a.map_bytes = map_bytes;
	a.usable = usable;
	a.bytes = bytes;
	a.kind = kind;
	a.base = a.map + guard_bytes + usable - rounded;
	mprotect(a.map + guard_bytes, usable, PROT_READ | PROT_WRITE);
	if (kind == memory_kind::device) {
		protect(a.map + guard_bytes, usable);
		used_memory += rounded;
	}
	{
		const device_memory_scope open;
		memset(a.map + guard_bytes, canary, usable - rounded);
		memset(a.base, fresh, bytes);
		memset(a.base + bytes, canary, rounded - bytes);
#ifdef WITH_ASAN
		__asan_poison_memory_region(a.base + bytes, rounded - bytes);
#endif
	}
	table.insert(after(a.base), a);
	*out = a.base;
	return cudaSuccess;
}

/* Canaries are not read through ASan, which guards them itself. */
#if defined(__clang__) || defined(__GNUC__)
__attribute__((no_sanitize("address")))
#endif
static bool intact(const allocation &a)
{
	const char *end = a.base + round_up(a.bytes, alignment);
	for (const char *p = a.base + a.bytes; p < end; p++)
		if (static_cast<unsigned char>(*p) != canary)
			return false;
	return true;
}

std::string check_canaries()
{
	for (const allocation &a : table)
		if (a.kind != memory_kind::registered && !intact(a))
			return "bytes just past the end of an allocation of " + std::to_string(a.bytes) +
			       " bytes were written";
	return "";
}

static void unmap(const allocation &a)
{
#ifdef WITH_ASAN
	__asan_unpoison_memory_region(a.map + guard_bytes, a.usable);
#endif
	if (a.kind == memory_kind::device)
		used_memory -= round_up(a.bytes, alignment);
	if (a.map)
		munmap(a.map, a.map_bytes);
}

/* Takes the allocation that begins at p out of the table. */
static cudaError_t release(void *p, memory_kind kind)
{
	if (!p)
		return cudaSuccess;
	auto it = after(p);
	if (it == table.begin() || (it - 1)->base != p || (it - 1)->kind != kind) {
		misuse("%p, which is to be freed, is no such allocation", p);
		return error(cudaErrorInvalidValue);
	}
	--it;
	unmap(*it);
	table.erase(it);
	return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
	HOST_CUDA_ENTER("cudaMalloc");
	if (capture_forbids())
		return error(cudaErrorStreamCaptureUnsupported);
	return allocate(p, bytes, memory_kind::device);
}

cudaError_t cudaFree(void *p)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	/* After an error that stays memory is gone all the same, so that a process can end cleanly. */
	const cudaError_t entered = enter("cudaFree");
	if (entered == cudaSuccess && capture_forbids())
		return error(cudaErrorStreamCaptureUnsupported);
	const cudaError_t e = drain_all(), r = release(p, memory_kind::device);
	return entered != cudaSuccess ? entered : e != cudaSuccess ? e : r;
}

cudaError_t cudaMallocHost(void **p, size_t bytes, unsigned)
{
	HOST_CUDA_ENTER("cudaMallocHost");
	return allocate(p, bytes, memory_kind::pinned);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned)
{
	HOST_CUDA_ENTER("cudaHostAlloc");
	return allocate(p, bytes, memory_kind::pinned);
}

cudaError_t cudaFreeHost(void *p)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	const cudaError_t entered = enter("cudaFreeHost");
	const cudaError_t e = drain_all(), r = release(p, memory_kind::pinned);
	return entered != cudaSuccess ? entered : e != cudaSuccess ? e : r;
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned)
{
	HOST_CUDA_ENTER("cudaHostRegister");
	if (!p || bytes == 0 || find_allocation(p))
		return error(cudaErrorInvalidValue);
	allocation a = {};
	a.base = static_cast<char *>(p);
	a.bytes = bytes;
	a.kind = memory_kind::registered;
	table.insert(after(p), a);
	return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *p)
{
	HOST_CUDA_ENTER("cudaHostUnregister");
	auto it = after(p);
	if (it == table.begin() || (it - 1)->base != p || (it - 1)->kind != memory_kind::registered)
		return error(cudaErrorInvalidValue);
	const cudaError_t e = drain_all();
	table.erase(after(p) - 1);
	return e;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned)
{
	HOST_CUDA_ENTER("cudaHostGetDevicePointer");
	const allocation *a = find_allocation(host);
	if (!a || a->kind == memory_kind::device)
		return error(cudaErrorInvalidValue);
	*device = host;
	return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
	HOST_CUDA_ENTER("cudaMemGetInfo");
	*total_bytes = total_memory;
	*free_bytes = total_memory > used_memory ? total_memory - used_memory : 0;
	return cudaSuccess;
}

} // namespace host_cuda

extern "C" size_t host_cuda_allocated(void)
{
	size_t n = 0;
	std::lock_guard<std::recursive_mutex> guard(host_cuda::lock);
	for (const host_cuda::allocation &a : host_cuda::table)
		n += a.kind == host_cuda::memory_kind::registered ? 0 : a.bytes;
	return n;
}
