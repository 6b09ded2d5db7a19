/*
 * Errors, devices, launches and what functions need.
 */
#include <stdio.h>

#include "cuda/host_cuda/internal.h"

namespace host_cuda {

std::recursive_mutex lock;
cudaError_t sticky, last_error;
int n_devices = 1;
static int current_device;

/* ---- errors */

static const struct {
	cudaError_t error;
	const char *name, *text;
	bool sticky;
} errors[] = {
#define X(name, value, is_sticky, text) {name, #name, text, is_sticky},
        HOST_CUDA_ERRORS(X)
#undef X
};

const char *cudaGetErrorName(cudaError_t e)
{
	for (const auto &row : errors)
		if (row.error == e)
			return row.name;
	return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t e)
{
	for (const auto &row : errors)
		if (row.error == e)
			return row.text;
	return "unrecognized error code";
}

bool is_sticky(cudaError_t e)
{
	for (const auto &row : errors)
		if (row.error == e)
			return row.sticky;
	return false;
}

cudaError_t error(cudaError_t e)
{
	last_error = e;
	if (is_sticky(e))
		sticky = e;
	return e;
}

cudaError_t cudaGetLastError()
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	const cudaError_t e = sticky != cudaSuccess ? sticky : last_error;
	last_error = cudaSuccess;
	return e;
}

cudaError_t cudaPeekAtLastError()
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	return sticky != cudaSuccess ? sticky : last_error;
}

/* ---- devices: one of compute capability 9.0, like an H100's, with few multiprocessors */

cudaError_t cudaGetDeviceCount(int *count)
{
	*count = 0;
	HOST_CUDA_ENTER("cudaGetDeviceCount");
	*count = n_devices;
	return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
	HOST_CUDA_ENTER("cudaSetDevice");
	if (device < 0 || device >= n_devices)
		return error(cudaErrorInvalidDevice);
	current_device = device;
	return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
	HOST_CUDA_ENTER("cudaGetDevice");
	*device = current_device;
	return cudaSuccess;
}

cudaError_t cudaDeviceReset()
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	streams_reset();
	sticky = last_error = cudaSuccess;
	return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	*version = n_devices > 0 ? 13000 : 0;
	return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
	*version = 13000;
	return cudaSuccess;
}

static const struct {
	cudaDeviceAttr attr;
	int value;
} attributes[] = {
        {cudaDevAttrMaxThreadsPerBlock, max_threads},
        {cudaDevAttrMaxSharedMemoryPerBlock, shared_default_limit},
        {cudaDevAttrMultiProcessorCount, 4},
        {cudaDevAttrL2CacheSize, 4 << 20},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, shared_per_multiprocessor},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, shared_optin_limit},
};

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device)
{
	HOST_CUDA_ENTER("cudaDeviceGetAttribute");
	if (device < 0 || device >= n_devices)
		return error(cudaErrorInvalidDevice);
	for (const auto &row : attributes)
		if (row.attr == attr) {
			*value = row.value;
			return cudaSuccess;
		}
	misuse("device attribute %d is not known here", static_cast<int>(attr));
	return error(cudaErrorInvalidValue);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device)
{
	HOST_CUDA_ENTER("cudaGetDeviceProperties");
	if (device < 0 || device >= n_devices)
		return error(cudaErrorInvalidDevice);
	*p = {};
	snprintf(p->name, sizeof p->name, "CPU (host_cuda)");
	p->totalGlobalMem = total_memory;
	p->sharedMemPerBlock = shared_default_limit;
	p->sharedMemPerBlockOptin = shared_optin_limit;
	p->sharedMemPerMultiprocessor = shared_per_multiprocessor;
	p->regsPerBlock = 65536;
	p->warpSize = warp_lanes;
	p->maxThreadsPerBlock = max_threads;
	p->maxThreadsPerMultiProcessor = 2048;
	p->multiProcessorCount = 4;
	p->major = 9;
	p->l2CacheSize = 4 << 20;
	p->concurrentKernels = p->asyncEngineCount = p->canMapHostMemory = p->unifiedAddressing = 1;
	return cudaSuccess;
}

/* ---- functions and launches */

static std::map<const void *, size_t> &dynamic_limits = *new std::map<const void *, size_t>;

cudaError_t set_function_attribute(const void *function, cudaFuncAttribute attr, int value)
{
	HOST_CUDA_ENTER("cudaFuncSetAttribute");
	if (attr == cudaFuncAttributePreferredSharedMemoryCarveout)
		return value >= -1 && value <= 100 ? cudaSuccess : error(cudaErrorInvalidValue);
	if (value < 0 || static_cast<size_t>(value) > shared_optin_limit)
		return error(cudaErrorInvalidValue);
	dynamic_limits[function] = static_cast<size_t>(value);
	return cudaSuccess;
}

static size_t dynamic_limit(const void *function)
{
	const auto it = dynamic_limits.find(function);
	return it == dynamic_limits.end() || it->second < shared_default_limit ? shared_default_limit : it->second;
}

cudaError_t function_attributes(cudaFuncAttributes *attr, const void *function)
{
	HOST_CUDA_ENTER("cudaFuncGetAttributes");
	*attr = {};
	attr->maxThreadsPerBlock = max_threads;
	attr->maxDynamicSharedSizeBytes = static_cast<int>(dynamic_limit(function));
	return cudaSuccess;
}

cudaError_t max_active_blocks(int *blocks, int block_size, size_t dynamic_bytes)
{
	HOST_CUDA_ENTER("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
	if (block_size <= 0 || block_size > static_cast<int>(max_threads))
		return error(cudaErrorInvalidValue);
	const int by_threads = 2048 / block_size,
		  by_shared = static_cast<int>(shared_per_multiprocessor / (dynamic_bytes + 1024));
	*blocks = by_threads < by_shared ? by_threads : by_shared;
	if (*blocks > 32)
		*blocks = 32;
	return cudaSuccess;
}

static bool valid_shape(const launch_record &l)
{
	const dim3 &g = l.grid, &b = l.block;
	return g.x > 0 && g.y > 0 && g.z > 0 && g.x <= 0x7fffffffu && g.y <= 65535 && g.z <= 65535 && b.x > 0 &&
	       b.y > 0 && b.z > 0 && b.x <= max_threads && b.y <= max_threads && b.z <= 64 &&
	       b.x * b.y * b.z <= max_threads;
}

/* A launch returns nothing: its errors are those of cudaGetLastError() and of later calls. */
void launch(const char *kernel, const void *function, dim3 grid, dim3 block, size_t shared_bytes, stream_impl *stream,
            std::function<void()> body)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	if (enter("launch") != cudaSuccess)
		return;
	stream_impl *s = stream_of(stream);
	const launch_record record = {
		kernel,
		function,
		grid,
		block,
		shared_bytes,
		dynamic_limit(function) > shared_default_limit ? shared_optin_limit : shared_default_limit,
		std::move(body)};
	if (!s)
		return;
	if (!valid_shape(record)) {
		misuse("kernel %s: a grid of (%u,%u,%u) blocks of (%u,%u,%u) threads cannot be launched", kernel,
		       grid.x, grid.y, grid.z, block.x, block.y, block.z);
		error(cudaErrorInvalidConfiguration);
		return;
	}
	if (shared_bytes > dynamic_limit(function)) {
		misuse("kernel %s: %zu bytes of dynamic shared memory, but only %zu are allowed", kernel, shared_bytes,
		       dynamic_limit(function));
		error(cudaErrorInvalidValue);
		return;
	}
	operation op;
	op.name = kernel;
	op.is_kernel = true;
	op.run = [record]() { return run_grid(record); };
	submit(s, std::move(op));
}

void runtime_reset()
{
	sticky = last_error = cudaSuccess;
	current_device = 0;
}

} // namespace host_cuda
