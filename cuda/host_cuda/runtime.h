/*
 * The CUDA runtime calls that the host build has, with the meaning of the CUDA Runtime API reference.
 *
 * Work on a stream is queued and done when somebody waits for it; in permuted order some of it is done earlier, by
 * chance (control.h). A copy from or to pinned memory reads and writes the host's bytes only then; one from pageable
 * memory takes them at once and one to pageable memory waits, as the reference says. An error in a kernel stays: every
 * later call returns it.
 */
#pragma once

#include "cuda/host_cuda/exec.h"

namespace host_cuda {

/* Error codes: name, value as in driver_types.h, whether the context is lost with it, text. */
#define HOST_CUDA_ERRORS(X)                                                                                            \
	X(cudaSuccess, 0, false, "no error")                                                                           \
	X(cudaErrorInvalidValue, 1, false, "invalid argument")                                                         \
	X(cudaErrorMemoryAllocation, 2, false, "out of memory")                                                        \
	X(cudaErrorInitializationError, 3, false, "initialization error")                                              \
	X(cudaErrorInvalidConfiguration, 9, false, "invalid configuration argument")                                   \
	X(cudaErrorInvalidDevicePointer, 17, false, "invalid device pointer")                                          \
	X(cudaErrorInvalidMemcpyDirection, 21, false, "invalid copy direction for memcpy")                             \
	X(cudaErrorInsufficientDriver, 35, false, "CUDA driver version is insufficient for CUDA runtime version")      \
	X(cudaErrorDevicesUnavailable, 46, true, "CUDA-capable device(s) is/are busy or unavailable")                  \
	X(cudaErrorInvalidDeviceFunction, 98, false, "invalid device function")                                        \
	X(cudaErrorNoDevice, 100, false, "no CUDA-capable device is detected")                                         \
	X(cudaErrorInvalidDevice, 101, false, "invalid device ordinal")                                                \
	X(cudaErrorNoKernelImageForDevice, 209, false, "no kernel image is available for execution on the device")     \
	X(cudaErrorECCUncorrectable, 214, true, "uncorrectable ECC error encountered")                                 \
	X(cudaErrorInvalidResourceHandle, 400, false, "invalid resource handle")                                       \
	X(cudaErrorNotReady, 600, false, "device not ready")                                                           \
	X(cudaErrorIllegalAddress, 700, true, "an illegal memory access was encountered")                              \
	X(cudaErrorLaunchOutOfResources, 701, false, "too many resources requested for launch")                        \
	X(cudaErrorLaunchTimeout, 702, true, "the launch timed out and was terminated")                                \
	X(cudaErrorAssert, 710, true, "device-side assert triggered")                                                  \
	X(cudaErrorMisalignedAddress, 716, true, "misaligned address")                                                 \
	X(cudaErrorLaunchFailure, 719, true, "unspecified launch failure")                                             \
	X(cudaErrorNotPermitted, 800, false, "operation not permitted")                                                \
	X(cudaErrorNotSupported, 801, false, "operation not supported")                                                \
	X(cudaErrorStreamCaptureUnsupported, 900, false, "operation not permitted when stream is capturing")           \
	X(cudaErrorStreamCaptureInvalidated, 901, false, "operation failed due to a previous error during capture")    \
	X(cudaErrorStreamCaptureUnjoined, 904, false, "capturing stream has unjoined work")                            \
	X(cudaErrorIllegalState, 401, false, "the operation cannot be performed in the present state")                 \
	X(cudaErrorGraphExecUpdateFailure, 910, false, "the graph update was not performed")                           \
	X(cudaErrorUnknown, 999, true, "unknown error")

enum cudaError {
#define X(name, value, sticky, text) name = value,
	HOST_CUDA_ERRORS(X)
#undef X
};
using cudaError_t = cudaError;

enum cudaMemcpyKind {
	cudaMemcpyHostToHost,
	cudaMemcpyHostToDevice,
	cudaMemcpyDeviceToHost,
	cudaMemcpyDeviceToDevice,
	cudaMemcpyDefault,
};

struct stream_impl;
struct event_impl;
struct graph_impl;
struct graph_exec_impl;
using cudaStream_t = stream_impl *;
using cudaEvent_t = event_impl *;
using cudaGraph_t = graph_impl *;
using cudaGraphExec_t = graph_exec_impl *;
using cudaGraphNode_t = void *;

enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostAllocWriteCombined = 4 };
enum {
	cudaHostRegisterDefault = 0,
	cudaHostRegisterPortable = 1,
	cudaHostRegisterMapped = 2,
	cudaHostRegisterReadOnly = 8
};
enum cudaStreamCaptureMode {
	cudaStreamCaptureModeGlobal,
	cudaStreamCaptureModeThreadLocal,
	cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus {
	cudaStreamCaptureStatusNone,
	cudaStreamCaptureStatusActive,
	cudaStreamCaptureStatusInvalidated
};
enum cudaGraphExecUpdateResult {
	cudaGraphExecUpdateSuccess,
	cudaGraphExecUpdateError,
	cudaGraphExecUpdateErrorTopologyChanged
};
enum cudaFuncAttribute {
	cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
	cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum cudaDeviceAttr {
	cudaDevAttrMaxThreadsPerBlock = 1,
	cudaDevAttrMaxSharedMemoryPerBlock = 8,
	cudaDevAttrMultiProcessorCount = 16,
	cudaDevAttrL2CacheSize = 38,
	cudaDevAttrMaxThreadsPerMultiProcessor = 39,
	cudaDevAttrComputeCapabilityMajor = 75,
	cudaDevAttrComputeCapabilityMinor = 76,
	cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
	cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

struct cudaGraphExecUpdateResultInfo {
	cudaGraphExecUpdateResult result;
	cudaGraphNode_t errorNode, errorFromNode;
};

struct cudaDeviceProp {
	char name[256];
	size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
	int regsPerBlock, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, multiProcessorCount;
	int major, minor, l2CacheSize, memoryBusWidth, concurrentKernels, asyncEngineCount, integrated,
		canMapHostMemory;
	int unifiedAddressing, managedMemory, ECCEnabled, pciBusID, pciDeviceID, pciDomainID;
};

struct cudaFuncAttributes {
	size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
	int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};

const char *cudaGetErrorName(cudaError_t e);
const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceReset();
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);

cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMallocHost(void **p, size_t bytes, unsigned flags = 0);
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *p);
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags);
template <typename T> inline cudaError_t cudaMalloc(T **p, size_t bytes)
{
	return cudaMalloc(reinterpret_cast<void **>(p), bytes);
}
template <typename T> inline cudaError_t cudaMallocHost(T **p, size_t bytes, unsigned flags = 0)
{
	return cudaMallocHost(reinterpret_cast<void **>(p), bytes, flags);
}
template <typename T> inline cudaError_t cudaHostAlloc(T **p, size_t bytes, unsigned flags)
{
	return cudaHostAlloc(reinterpret_cast<void **>(p), bytes, flags);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void *p, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream = nullptr);

cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void *), void *arg);

cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *info);
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count);

cudaError_t set_function_attribute(const void *function, cudaFuncAttribute attr, int value);
template <typename F> inline cudaError_t cudaFuncSetAttribute(F *function, cudaFuncAttribute attr, int value)
{
	return set_function_attribute(reinterpret_cast<const void *>(function), attr, value);
}
cudaError_t function_attributes(cudaFuncAttributes *attr, const void *function);
template <typename F> inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attr, F *function)
{
	return function_attributes(attr, reinterpret_cast<const void *>(function));
}
/* As many as threads and shared memory allow; registers are not known here. */
cudaError_t max_active_blocks(int *blocks, int block_size, size_t dynamic_bytes);
template <typename F>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F *, int block_size, size_t dynamic_bytes)
{
	return max_active_blocks(blocks, block_size, dynamic_bytes);
}

/*
 * Queues `work` on the stream, as a library call would; it is captured like a launch. It touches device memory itself.
 */
cudaError_t enqueue(cudaStream_t stream, const char *name, std::function<void()> work);

/* Element types of gemm(). */
enum class element { f32, f16, bf16 };
/*
 * d[n_rows][n_out] = alpha * x[n_rows][n_in] * w[n_out][n_in]^T + beta * d, rows of the given strides (in elements),
 * products summed in float in the order of n_in. What cublasLtMatmul is asked for, queued on the stream.
 */
cudaError_t gemm(cudaStream_t stream, int64_t n_rows, int64_t n_out, int64_t n_in, float alpha, const void *x,
                 element x_type, int64_t x_stride, const void *w, element w_type, int64_t w_stride, float beta, void *d,
                 element d_type, int64_t d_stride);

} // namespace host_cuda
