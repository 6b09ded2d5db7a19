/*
 * measure: what the GPU itself does, for the shares that bench-gpu prints. One "NAME VALUE" a line:
 *
 *   copy_gbs        a device copy of 1 GiB, bytes read and written
 *   to_device_gbs, to_host_gbs   copies from and to pinned memory
 *   product_tflops  a bf16 product of 8192 x 8192 x 8192 by cuBLASLt, which is looked up at run time; "none" without it
 *
 *   nvcc -O3 -o measure measure.cu -ldl
 */
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(cudaError_t e, const char *what)
{
	if (e == cudaSuccess)
		return;
	fprintf(stderr, "measure: %s: %s\n", what, cudaGetErrorString(e));
	exit(1);
}

/* Seconds of the fastest of some rounds. */
template <typename F> static double fastest(F work)
{
	cudaEvent_t begin, end;
	double best = 1e30;
	must(cudaEventCreate(&begin), "cudaEventCreate");
	must(cudaEventCreate(&end), "cudaEventCreate");
	for (int i = 0; i < 8; i++) {
		float ms;
		must(cudaEventRecord(begin), "cudaEventRecord");
		work();
		must(cudaEventRecord(end), "cudaEventRecord");
		must(cudaEventSynchronize(end), "cudaEventSynchronize");
		must(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
		best = i > 0 && ms * 1e-3 < best ? ms * 1e-3 : best; /* the first warms up */
	}
	cudaEventDestroy(begin);
	cudaEventDestroy(end);
	return best;
}

static void measure_copies()
{
	const size_t bytes = size_t{1} << 30, pinned_bytes = size_t{256} << 20;
	char *a, *b, *host;
	must(cudaMalloc(&a, bytes), "cudaMalloc");
	must(cudaMalloc(&b, bytes), "cudaMalloc");
	must(cudaMallocHost(&host, pinned_bytes), "cudaMallocHost");
	memset(host, 1, pinned_bytes);
	must(cudaMemset(a, 1, bytes), "cudaMemset");
	printf("copy_gbs %.1f\n", 2e-9 * bytes / fastest([&] { cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice); }));
	printf("to_device_gbs %.1f\n", 1e-9 * pinned_bytes / fastest([&] { cudaMemcpyAsync(a, host, pinned_bytes, cudaMemcpyHostToDevice); }));
	printf("to_host_gbs %.1f\n", 1e-9 * pinned_bytes / fastest([&] { cudaMemcpyAsync(host, a, pinned_bytes, cudaMemcpyDeviceToHost); }));
	cudaFree(a);
	cudaFree(b);
	cudaFreeHost(host);
}

/* Random bf16 numbers near one: a product of zeros would run faster than any real one. */
__global__ void fill(uint16_t *x, size_t n)
{
	for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
		uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
		h ^= h >> 15;
		h *= 2246822519u;
		h ^= h >> 13;
		x[i] = static_cast<uint16_t>(0x3f00 | (h & 0x80ff));
	}
}

/* The functions of cuBLASLt that are used, by name. */
struct library {
	void *handle;
	template <typename F> F *get(F *, const char *name)
	{
		F *f = reinterpret_cast<F *>(dlsym(handle, name));
		if (!f) {
			printf("product_tflops none\n");
			exit(0);
		}
		return f;
	}
};

static void measure_product()
{
	const uint64_t n = 8192;
	library lib = {dlopen("libcublasLt.so", RTLD_NOW)};
	for (int version = 12; !lib.handle && version <= 14; version++) {
		char name[32];
		snprintf(name, sizeof name, "libcublasLt.so.%d", version);
		lib.handle = dlopen(name, RTLD_NOW);
	}
	if (!lib.handle) {
		printf("product_tflops none\n");
		return;
	}
	using create_f = cublasStatus_t(cublasLtHandle_t *);
	using matmul_desc_f = cublasStatus_t(cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t);
	using set_f = cublasStatus_t(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *, size_t);
	using layout_f = cublasStatus_t(cublasLtMatrixLayout_t *, cudaDataType, uint64_t, uint64_t, int64_t);
	using matmul_f = cublasStatus_t(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *, cublasLtMatrixLayout_t,
	                                const void *, cublasLtMatrixLayout_t, const void *, const void *, cublasLtMatrixLayout_t, void *,
	                                cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t);
	auto *create = lib.get(static_cast<create_f *>(nullptr), "cublasLtCreate");
	auto *desc_create = lib.get(static_cast<matmul_desc_f *>(nullptr), "cublasLtMatmulDescCreate");
	auto *set = lib.get(static_cast<set_f *>(nullptr), "cublasLtMatmulDescSetAttribute");
	auto *layout_create = lib.get(static_cast<layout_f *>(nullptr), "cublasLtMatrixLayoutCreate");
	auto *matmul = lib.get(static_cast<matmul_f *>(nullptr), "cublasLtMatmul");
	uint16_t *a, *b, *d;
	must(cudaMalloc(&a, n * n * 2), "cudaMalloc");
	must(cudaMalloc(&b, n * n * 2), "cudaMalloc");
	must(cudaMalloc(&d, n * n * 2), "cudaMalloc");
	fill<<<1024, 256>>>(a, n * n);
	fill<<<1024, 256>>>(b, n * n);
	cublasLtHandle_t handle;
	cublasLtMatmulDesc_t desc;
	cublasLtMatrixLayout_t layout;
	const cublasOperation_t transposed = CUBLAS_OP_T;
	const float one = 1, zero = 0;
	if (create(&handle) || desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) ||
	    set(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed) || layout_create(&layout, CUDA_R_16BF, n, n, n)) {
		printf("product_tflops none\n");
		return;
	}
	int failed = 0;
	const double t = fastest([&] {
		failed |= matmul(handle, desc, &one, a, layout, b, layout, &zero, d, layout, d, layout, nullptr, nullptr, 0, nullptr);
	});
	if (failed)
		printf("product_tflops none\n");
	else
		printf("product_tflops %.1f\n", 2e-12 * n * n * n / t);
}

int main()
{
	cudaDeviceProp p;
	must(cudaGetDeviceProperties(&p, 0), "cudaGetDeviceProperties");
	printf("# %s, compute capability %d.%d, %.1f GiB\n", p.name, p.major, p.minor, p.totalGlobalMem / 1073741824.0);
	measure_copies();
	measure_product();
	return 0;
}
