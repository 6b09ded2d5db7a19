/*
 * measure: what the GPU itself does, for the shares that bench-gpu prints. One "NAME VALUE" a line:
 *
 *   copy_gbs            a device copy of 1 GiB, bytes read and written
 *   tier_to_device_gbs  copies from pinned memory, in which pages that left the device lie; the whole of it at once
 *   tier_to_host_gbs    and back
 *   product_tflops      a bf16 product of 8192 x 8192 x 8192 by cuBLASLt, which is looked up at run time; "none"
 *                       without it
 *
 *   measure [--small]   --small: a thousandth of all that, for a try on the emulated GPU (measure-host), whose figures
 *                       mean nothing
 *
 * By hand: nvcc -O3 -std=c++17 -I. -o measure tests/gpu/measure.cu -ldl
 */
#include "cuda/gpu.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace GPU_NS
{

static int divide = 1; /* sizes of copies by its square, of a product's sides by it */

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
	return best > 0 ? best : 1e-9;
}

static double copies_gbs(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
	return 1e-9 * static_cast<double>(bytes) /
	       fastest([&] { must(cudaMemcpyAsync(to, from, bytes, kind, nullptr), "cudaMemcpyAsync"); });
}

static void measure_copies()
{
	const size_t all = (size_t{1} << 30) / static_cast<size_t>(divide * divide), pinned_bytes = all / 4;
	char *a, *b, *host;
	must(cudaMalloc(&a, all), "cudaMalloc");
	must(cudaMalloc(&b, all), "cudaMalloc");
	must(cudaMallocHost(&host, pinned_bytes), "cudaMallocHost");
	memset(host, 1, pinned_bytes);
	must(cudaMemset(a, 1, all), "cudaMemset");
	printf("copy_gbs %.1f\n", 2 * copies_gbs(b, a, all, cudaMemcpyDeviceToDevice));
	printf("tier_to_device_gbs %.1f\n", copies_gbs(a, host, pinned_bytes, cudaMemcpyHostToDevice));
	printf("tier_to_host_gbs %.1f\n", copies_gbs(host, a, pinned_bytes, cudaMemcpyDeviceToHost));
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

/* d[n][n] = a[n][n] b[n][n]^T in bf16: open() once, then run(). False: it cannot be done. */
struct library_product {
	bool open(size_t n);
	bool run(uint16_t *d, const uint16_t *a, const uint16_t *b);

private:
	size_t n_;
	void *lib_, *workspace_;
	size_t workspace_bytes_;
	void *handle_, *desc_, *layout_, *matmul_;
	template <typename F> F get(const char *name);
};

#ifdef KVASIR_HOST_CUDA

bool library_product::open(size_t n)
{
	n_ = n;
	return true;
}

bool library_product::run(uint16_t *d, const uint16_t *a, const uint16_t *b)
{
	using namespace host_cuda;
	const int64_t n = static_cast<int64_t>(n_);
	return gemm(nullptr, n, n, n, 1, a, element::bf16, n, b, element::bf16, n, 0, d, element::bf16, n) ==
	       cudaSuccess;
}

#elif !__has_include(<cublasLt.h>)

bool library_product::open(size_t)
{
	return false;
}

bool library_product::run(uint16_t *, const uint16_t *, const uint16_t *)
{
	return false;
}

#else

} // namespace GPU_NS

#include <cublasLt.h>
#include <dlfcn.h>

namespace GPU_NS
{

template <typename F> F library_product::get(const char *name)
{
	return reinterpret_cast<F>(dlsym(lib_, name));
}

bool library_product::open(size_t n)
{
	using create_f = cublasStatus_t (*)(cublasLtHandle_t *);
	using desc_f = cublasStatus_t (*)(cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t);
	using set_f = cublasStatus_t (*)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *, size_t);
	using layout_f = cublasStatus_t (*)(cublasLtMatrixLayout_t *, cudaDataType, uint64_t, uint64_t, int64_t);
	const cublasOperation_t transposed = CUBLAS_OP_T;
	n_ = n;
	workspace_bytes_ = size_t{32} << 20;
	lib_ = dlopen("libcublasLt.so", RTLD_NOW);
	for (int version = 12; !lib_ && version <= 14; version++) {
		char name[32];
		snprintf(name, sizeof name, "libcublasLt.so.%d", version);
		lib_ = dlopen(name, RTLD_NOW);
	}
	if (!lib_)
		return false;
	const auto create = get<create_f>("cublasLtCreate");
	const auto make_desc = get<desc_f>("cublasLtMatmulDescCreate");
	const auto set = get<set_f>("cublasLtMatmulDescSetAttribute");
	const auto make_layout = get<layout_f>("cublasLtMatrixLayoutCreate");
	matmul_ = dlsym(lib_, "cublasLtMatmul");
	return create && make_desc && set && make_layout && matmul_ &&
	       cudaMalloc(&workspace_, workspace_bytes_) == cudaSuccess &&
	       create(reinterpret_cast<cublasLtHandle_t *>(&handle_)) == CUBLAS_STATUS_SUCCESS &&
	       make_desc(reinterpret_cast<cublasLtMatmulDesc_t *>(&desc_), CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
	               CUBLAS_STATUS_SUCCESS &&
	       set(static_cast<cublasLtMatmulDesc_t>(desc_), CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
	           sizeof transposed) == CUBLAS_STATUS_SUCCESS &&
	       make_layout(reinterpret_cast<cublasLtMatrixLayout_t *>(&layout_), CUDA_R_16BF, n, n,
	                   static_cast<int64_t>(n)) == CUBLAS_STATUS_SUCCESS;
}

bool library_product::run(uint16_t *d, const uint16_t *a, const uint16_t *b)
{
	using matmul_f = cublasStatus_t (*)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
	                                    cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t, const void *,
	                                    const void *, cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t,
	                                    const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t);
	const float one = 1, zero = 0;
	const auto l = static_cast<cublasLtMatrixLayout_t>(layout_);
	return reinterpret_cast<matmul_f>(matmul_)(
		       static_cast<cublasLtHandle_t>(handle_), static_cast<cublasLtMatmulDesc_t>(desc_), &one, a, l, b,
		       l, &zero, d, l, d, l, nullptr, workspace_, workspace_bytes_, nullptr) == CUBLAS_STATUS_SUCCESS;
}

#endif

static void measure_product()
{
	const size_t n = size_t{8192} / static_cast<size_t>(divide);
	library_product p = {};
	uint16_t *a, *b, *d;
	bool done = p.open(n);
	if (!done) {
		printf("product_tflops none\n");
		return;
	}
	must(cudaMalloc(&a, n * n * 2), "cudaMalloc");
	must(cudaMalloc(&b, n * n * 2), "cudaMalloc");
	must(cudaMalloc(&d, n * n * 2), "cudaMalloc");
	GPU_LAUNCH(fill, dim3(1024), dim3(256), 0, nullptr, a, n * n);
	must(cudaGetLastError(), "fill");
	GPU_LAUNCH(fill, dim3(1024), dim3(256), 0, nullptr, b, n * n);
	must(cudaGetLastError(), "fill");
	const double t = fastest([&] { done = p.run(d, a, b) && done; });
	const double side = static_cast<double>(n);
	if (done)
		printf("product_tflops %.*f\n", divide > 1 ? 6 : 1, 2e-12 * side * side * side / t);
	else
		printf("product_tflops none\n");
	cudaFree(a);
	cudaFree(b);
	cudaFree(d);
}

static int measure(int argc, char **argv)
{
	cudaDeviceProp p;
	if (argc > 1 && strcmp(argv[1], "--small") == 0)
		divide = 64;
	must(cudaGetDeviceProperties(&p, 0), "cudaGetDeviceProperties");
	printf("# %s, compute capability %d.%d, %.1f GiB\n", p.name, p.major, p.minor,
	       static_cast<double>(p.totalGlobalMem) / 1073741824.0);
	measure_copies();
	measure_product();
	return 0;
}

} // namespace GPU_NS

int main(int argc, char **argv)
{
	return GPU_NS::measure(argc, argv);
}
