/* What the tests of host_cuda share: kernels are launched, and the report says what was wrong with them. */
#pragma once

#include "cuda/gpu.cuh"
#include "cuda/host_cuda/control.h"

extern "C" {
#include "tests/unit/unit.h"
}

static cudaStream_t stream;

/* Every test begins with a fresh device and a stream, and leaves no memory behind. */
static inline int fresh_device(void **state)
{
	(void)state;
	host_cuda_reset();
	return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess ? 0 : -1;
}

static inline int no_leaks(void **state)
{
	(void)state;
	cudaDeviceReset();
	host_cuda_reset();
	cudaStreamDestroy(stream);
	return host_cuda_allocated() == 0 ? 0 : -1;
}

/* Device memory for n values, freed at the end of the scope. */
template <typename T> struct device_array {
	T *p = nullptr;
	size_t n;
	explicit device_array(size_t count) : n(count)
	{
		if (cudaMalloc(&p, n * sizeof(T)) != cudaSuccess)
			abort();
	}
	~device_array() { cudaFree(p); }
	device_array(const device_array &) = delete;
	device_array &operator=(const device_array &) = delete;
	void write(const T *host)
	{
		assert_int_equal(cudaMemcpy(p, host, n * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
	}
	void read(T *host)
	{
		assert_int_equal(cudaMemcpy(host, p, n * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
	}
};

static inline void expect_success(void)
{
	const cudaError_t e = cudaStreamSynchronize(stream);
	if (e != cudaSuccess)
		fail_msg("%s: %s", cudaGetErrorString(e), host_cuda_report());
}

/* What was launched fails with `error`, and the report contains `text`. */
static inline void expect_failure(cudaError_t error, const char *text)
{
	assert_int_equal(cudaStreamSynchronize(stream), error);
	if (!strstr(host_cuda_report(), text))
		fail_msg("the report is \"%s\", not \"...%s...\"", host_cuda_report(), text);
	cudaDeviceReset();
}

/* Runs a test's body in natural order and in several others. */
template <typename F> static inline void in_every_order(F body)
{
	for (uint64_t seed = 0; seed < 8; seed++) {
		host_cuda_order(seed);
		body();
	}
	host_cuda_order(0);
}

#define HOST_CUDA_TEST(name) cmocka_unit_test_setup_teardown(name, fresh_device, no_leaks)
