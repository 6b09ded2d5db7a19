/*
 * The product that cuBLASLt does on a GPU, in float.
 */
#include "cuda/host_cuda/internal.h"

namespace host_cuda {

static float load(const void *p, element type, int64_t i)
{
	switch (type) {
	case element::f32:
		return static_cast<const float *>(p)[i];
	case element::f16:
		return half_bits_to_float(static_cast<const uint16_t *>(p)[i]);
	case element::bf16:
		return bf16_bits_to_float(static_cast<const uint16_t *>(p)[i]);
	}
	return 0;
}

static void store(void *p, element type, int64_t i, float v)
{
	switch (type) {
	case element::f32:
		static_cast<float *>(p)[i] = v;
		break;
	case element::f16:
		static_cast<uint16_t *>(p)[i] = float_to_half_bits(v);
		break;
	case element::bf16:
		static_cast<uint16_t *>(p)[i] = float_to_bf16_bits(v);
		break;
	}
}

static size_t element_bytes(element type)
{
	return type == element::f32 ? 4 : 2;
}

/* A matrix of rows of a stride lies within one allocation. */
static bool fits(const void *p, int64_t rows, int64_t columns, int64_t stride, element type)
{
	const allocation *a = find_allocation(p);
	const size_t bytes = static_cast<size_t>((rows - 1) * stride + columns) * element_bytes(type);
	return a && columns <= stride && static_cast<const char *>(p) + bytes <= a->base + a->bytes;
}

static std::vector<float> as_floats(const void *p, int64_t rows, int64_t columns, int64_t stride, element type)
{
	std::vector<float> f(static_cast<size_t>(rows * columns));
	for (int64_t r = 0; r < rows; r++)
		for (int64_t c = 0; c < columns; c++)
			f[static_cast<size_t>(r * columns + c)] = load(p, type, r * stride + c);
	return f;
}

cudaError_t gemm(cudaStream_t stream, int64_t n_rows, int64_t n_out, int64_t n_in, float alpha, const void *x,
                 element x_type, int64_t x_stride, const void *w, element w_type, int64_t w_stride, float beta, void *d,
                 element d_type, int64_t d_stride)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	if (n_rows <= 0 || n_out <= 0 || n_in <= 0 || !fits(x, n_rows, n_in, x_stride, x_type) ||
	    !fits(w, n_out, n_in, w_stride, w_type) || !fits(d, n_rows, n_out, d_stride, d_type)) {
		misuse("a product of %lld rows, %lld columns and depth %lld leaves its matrices",
		       static_cast<long long>(n_rows), static_cast<long long>(n_out), static_cast<long long>(n_in));
		return error(cudaErrorInvalidValue);
	}
	return enqueue(stream, "gemm", [=]() {
		const std::vector<float> xf = as_floats(x, n_rows, n_in, x_stride, x_type);
		const std::vector<float> wf = as_floats(w, n_out, n_in, w_stride, w_type);
		for (int64_t r = 0; r < n_rows; r++)
			for (int64_t o = 0; o < n_out; o++) {
				const float *a = &xf[static_cast<size_t>(r * n_in)],
					    *b = &wf[static_cast<size_t>(o * n_in)];
				float sum = 0;
				for (int64_t i = 0; i < n_in; i++)
					sum += a[i] * b[i];
				sum *= alpha;
				if (beta != 0)
					sum += beta * load(d, d_type, r * d_stride + o);
				store(d, d_type, r * d_stride + o, sum);
			}
	});
}

} // namespace host_cuda
