/* The runtime calls of host_cuda: queued work, events, graphs, memory, and failures on purpose. */
#include "tests/unit/cuda/host_cuda_fixture.h"

__global__ void add(int *x, int by)
{
	x[blockIdx.x * blockDim.x + threadIdx.x] += by;
}

__global__ void multiply(int *x, int by)
{
	x[blockIdx.x * blockDim.x + threadIdx.x] *= by;
}

__global__ void write_past(int *x)
{
	x[10000] = 1;
}

/* ---- streams */

static void work_waits_for_somebody_who_waits(void **)
{
	int *pinned;
	device_array<int> x(32);
	assert_int_equal(cudaMallocHost(&pinned, sizeof *pinned * 32), cudaSuccess);
	memset(pinned, 0, sizeof *pinned * 32);
	cudaMemsetAsync(x.p, 0, 32 * sizeof(int), stream);
	GPU_LAUNCH(add, 1, 32, 0, stream, x.p, 5);
	cudaMemcpyAsync(pinned, x.p, 32 * sizeof(int), cudaMemcpyDeviceToHost, stream);
	assert_int_equal(pinned[3], 0);
	expect_success();
	assert_int_equal(pinned[3], 5);
	cudaFreeHost(pinned);
}

static void pinned_bytes_are_read_when_the_copy_runs(void **)
{
	int *pinned, out;
	device_array<int> x(1);
	assert_int_equal(cudaMallocHost(&pinned, sizeof *pinned), cudaSuccess);
	*pinned = 1;
	cudaMemcpyAsync(x.p, pinned, sizeof *pinned, cudaMemcpyHostToDevice, stream);
	*pinned = 2; /* too early: the test of a program that forgot to wait sees this */
	expect_success();
	x.read(&out);
	assert_int_equal(out, 2);
	cudaFreeHost(pinned);
	/* Pageable bytes are taken at once. */
	int pageable = 3;
	cudaMemcpyAsync(x.p, &pageable, sizeof pageable, cudaMemcpyHostToDevice, stream);
	pageable = 4;
	expect_success();
	x.read(&out);
	assert_int_equal(out, 3);
}

static void events_order_streams(void **)
{
	in_every_order([] {
		device_array<int> x(1);
		cudaStream_t other;
		cudaEvent_t ready;
		int out = 0;
		assert_int_equal(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
		assert_int_equal(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming), cudaSuccess);
		cudaMemsetAsync(x.p, 0, sizeof(int), other);
		GPU_LAUNCH(add, 1, 1, 0, other, x.p, 5);
		cudaEventRecord(ready, other);
		cudaStreamWaitEvent(stream, ready, 0);
		GPU_LAUNCH(multiply, 1, 1, 0, stream, x.p, 3);
		expect_success();
		x.read(&out);
		assert_int_equal(out, 15);
		assert_int_equal(cudaEventDestroy(ready), cudaSuccess);
		assert_int_equal(cudaStreamDestroy(other), cudaSuccess);
	});
}

static void missing_event_shows(void **)
{
	device_array<int> x(1);
	cudaStream_t other;
	int out = 0;
	assert_int_equal(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
	cudaMemset(x.p, 0, sizeof(int));
	cudaDeviceSynchronize();
	GPU_LAUNCH(add, 1, 1, 0, other, x.p, 5);
	GPU_LAUNCH(multiply, 1, 1, 0, stream, x.p, 3);
	expect_success(); /* the other stream has not run: nobody waited for it */
	x.read(&out);
	cudaStreamDestroy(other);
	assert_int_equal(out, 0);
}

static void default_stream_waits_for_blocking_streams(void **)
{
	device_array<int> x(1);
	cudaStream_t blocking;
	int out = 0;
	assert_int_equal(cudaStreamCreate(&blocking), cudaSuccess);
	cudaMemset(x.p, 0, sizeof(int));
	GPU_LAUNCH(add, 1, 1, 0, blocking, x.p, 5);
	GPU_LAUNCH(multiply, 1, 1, 0, nullptr, x.p, 3);
	GPU_LAUNCH(add, 1, 1, 0, blocking, x.p, 1);
	assert_int_equal(cudaStreamSynchronize(blocking), cudaSuccess);
	x.read(&out);
	assert_int_equal(out, 16);
	cudaStreamDestroy(blocking);
}

static void arguments_are_those_of_the_launch(void **)
{
	device_array<int> x(1);
	int by = 5, out;
	cudaMemsetAsync(x.p, 0, sizeof(int), stream);
	GPU_LAUNCH(add, 1, 1, 0, stream, x.p, by);
	by = 100;
	expect_success();
	x.read(&out);
	assert_int_equal(out, 5);
}

/* ---- graphs */

static void graph_replays_what_was_captured(void **)
{
	device_array<int> x(32);
	int out[32], *pinned;
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	assert_int_equal(cudaMallocHost(&pinned, sizeof(int)), cudaSuccess);
	cudaMemset(x.p, 0, sizeof out);
	cudaDeviceSynchronize();
	assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
	cudaMemcpyAsync(x.p, pinned, sizeof(int), cudaMemcpyHostToDevice, stream);
	GPU_LAUNCH(add, 1, 32, 0, stream, x.p, 2);
	GPU_LAUNCH(multiply, 1, 32, 0, stream, x.p, 3);
	assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
	assert_int_equal(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
	assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
	expect_success();
	x.read(out);
	assert_int_equal(out[1], 0); /* capturing is not running */
	for (int round = 0; round < 2; round++) {
		*pinned = round;
		assert_int_equal(cudaGraphLaunch(exec, stream), cudaSuccess);
		expect_success();
	}
	x.read(out);
	assert_int_equal(out[0], (1 + 2) * 3);
	assert_int_equal(out[1], ((0 + 2) * 3 + 2) * 3);
	assert_int_equal(cudaGraphExecDestroy(exec), cudaSuccess);
	cudaFreeHost(pinned);
}

static void capture_spans_streams_joined_by_events(void **)
{
	device_array<int> x(1);
	cudaStream_t side;
	cudaEvent_t fork, join;
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	int out;
	cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
	cudaEventCreate(&fork);
	cudaEventCreate(&join);
	cudaMemset(x.p, 0, sizeof(int));
	cudaDeviceSynchronize();
	cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
	cudaEventRecord(fork, stream);
	cudaStreamWaitEvent(side, fork, 0);
	GPU_LAUNCH(add, 1, 1, 0, side, x.p, 4);
	cudaEventRecord(join, side);
	cudaStreamWaitEvent(stream, join, 0);
	GPU_LAUNCH(multiply, 1, 1, 0, stream, x.p, 2);
	assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
	assert_int_equal(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
	cudaGraphLaunch(exec, stream);
	expect_success();
	x.read(&out);
	assert_int_equal(out, 8);
	cudaGraphDestroy(graph);
	cudaGraphExecDestroy(exec);
	cudaEventDestroy(fork);
	cudaEventDestroy(join);
	cudaStreamDestroy(side);
}

static void waiting_breaks_a_capture(void **)
{
	cudaGraph_t graph;
	cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
	assert_int_equal(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
	assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
	assert_null(graph);
	cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
	void *p;
	assert_int_equal(cudaMalloc(&p, 16), cudaErrorStreamCaptureUnsupported);
	assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
	assert_int_equal(cudaGetLastError(), cudaErrorStreamCaptureInvalidated);
}

/* ---- memory */

static void memory_is_aligned_and_not_zero(void **)
{
	for (size_t bytes : {1, 255, 256, 4097, 100000}) {
		device_array<unsigned char> x(bytes);
		unsigned char first;
		assert_int_equal(reinterpret_cast<uintptr_t>(x.p) % 256, 0);
		cudaMemcpy(&first, x.p, 1, cudaMemcpyDeviceToHost);
		assert_int_equal(first, 0xff);
	}
}

static void memory_has_an_end(void **)
{
	size_t free_bytes, total;
	void *p, *q;
	host_cuda_memory(1 << 20);
	assert_int_equal(cudaMalloc(&p, 700 << 10), cudaSuccess);
	assert_int_equal(cudaMemGetInfo(&free_bytes, &total), cudaSuccess);
	assert_int_equal(total, 1 << 20);
	assert_int_equal(free_bytes, 324 << 10);
	assert_int_equal(cudaMalloc(&q, 700 << 10), cudaErrorMemoryAllocation);
	assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
	assert_int_equal(cudaGetLastError(), cudaSuccess); /* it does not stay */
	assert_int_equal(cudaFree(p), cudaSuccess);
	assert_int_equal(cudaMalloc(&q, 700 << 10), cudaSuccess);
	assert_int_equal(cudaFree(q), cudaSuccess);
}

static void wrong_frees_and_copies(void **)
{
	device_array<char> x(100);
	char host[200] = {};
	assert_int_equal(cudaFree(x.p + 1), cudaErrorInvalidValue);
	assert_int_equal(cudaMemcpy(x.p, host, 101, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
	assert_int_equal(cudaMemcpy(x.p, host, 100, cudaMemcpyDeviceToHost), cudaErrorInvalidMemcpyDirection);
	assert_int_equal(cudaMemcpy(x.p + 50, host, 51, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
	assert_int_equal(cudaMemset(x.p, 0, 101), cudaErrorInvalidValue);
	assert_int_equal(cudaMemcpy(x.p, host, 100, cudaMemcpyHostToDevice), cudaSuccess);
}

/* ---- errors */

static void error_in_a_kernel_stays(void **)
{
	device_array<int> x(1);
	void *p;
	GPU_LAUNCH(write_past, 1, 1, 0, stream, x.p);
	assert_int_equal(cudaGetLastError(), cudaSuccess); /* nothing has run */
	assert_int_equal(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
	assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress);
	assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress);
	assert_int_equal(cudaMalloc(&p, 16), cudaErrorIllegalAddress);
	GPU_LAUNCH(add, 1, 1, 0, stream, x.p, 1);
	assert_int_equal(cudaPeekAtLastError(), cudaErrorIllegalAddress);
	cudaDeviceReset();
	assert_int_equal(cudaGetLastError(), cudaSuccess);
}

static void calls_fail_on_purpose(void **)
{
	void *p;
	assert_int_equal(host_cuda_fail("cudaMalloc:2:cudaErrorMemoryAllocation"), 1);
	assert_int_equal(cudaMalloc(&p, 16), cudaSuccess);
	cudaFree(p);
	assert_int_equal(cudaMalloc(&p, 16), cudaErrorMemoryAllocation);
	assert_int_equal(cudaMalloc(&p, 16), cudaSuccess);
	cudaFree(p);
	device_array<int> x(1);
	assert_int_equal(host_cuda_fail("launch:1:cudaErrorIllegalAddress,cudaFree:100:cudaErrorUnknown"), 1);
	GPU_LAUNCH(add, 1, 1, 0, stream, x.p, 1);
	assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress);
	assert_int_equal(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
	assert_true(host_cuda_calls("launch") == 1);
	for (const char *wrong :
	     {"cudaMalloc", "cudaMalloc:0:cudaErrorUnknown", "cudaMalloc:1:oops", "cudaMalloc:x:cudaErrorUnknown"})
		assert_int_equal(host_cuda_fail(wrong), 0);
}

static void no_device_at_all(void **)
{
	int n = 7;
	void *p;
	host_cuda_devices(0);
	assert_int_equal(cudaGetDeviceCount(&n), cudaErrorNoDevice);
	assert_int_equal(n, 0);
	assert_int_equal(cudaMalloc(&p, 16), cudaErrorNoDevice);
	host_cuda_devices(1);
	assert_int_equal(cudaSetDevice(1), cudaErrorInvalidDevice);
}

static void products_of_the_library(void **)
{
	device_array<float> x(6), d(4);
	device_array<uint16_t> w(6);
	const float hx[6] = {1, 2, 3, 4, 5, 6};
	const uint16_t hw[6] = {float_to_bf16_bits(1), 0, float_to_bf16_bits(2), 0, float_to_bf16_bits(1),
	                        float_to_bf16_bits(-1)};
	float out[4];
	x.write(hx);
	w.write(hw);
	assert_int_equal(gemm(stream, 2, 2, 3, 2, x.p, element::f32, 3, w.p, element::bf16, 3, 0, d.p, element::f32, 2),
	                 cudaSuccess);
	expect_success();
	d.read(out);
	assert_true(out[0] == 14 && out[1] == -2 && out[2] == 32 && out[3] == -2);
	assert_int_equal(gemm(stream, 3, 2, 3, 1, x.p, element::f32, 3, w.p, element::bf16, 3, 0, d.p, element::f32, 2),
	                 cudaErrorInvalidValue);
}

UNIT_MAIN(HOST_CUDA_TEST(work_waits_for_somebody_who_waits), HOST_CUDA_TEST(pinned_bytes_are_read_when_the_copy_runs),
          HOST_CUDA_TEST(events_order_streams), HOST_CUDA_TEST(missing_event_shows),
          HOST_CUDA_TEST(default_stream_waits_for_blocking_streams), HOST_CUDA_TEST(arguments_are_those_of_the_launch),
          HOST_CUDA_TEST(graph_replays_what_was_captured), HOST_CUDA_TEST(capture_spans_streams_joined_by_events),
          HOST_CUDA_TEST(waiting_breaks_a_capture), HOST_CUDA_TEST(memory_is_aligned_and_not_zero),
          HOST_CUDA_TEST(memory_has_an_end), HOST_CUDA_TEST(wrong_frees_and_copies),
          HOST_CUDA_TEST(error_in_a_kernel_stays), HOST_CUDA_TEST(calls_fail_on_purpose),
          HOST_CUDA_TEST(no_device_at_all), HOST_CUDA_TEST(products_of_the_library))
