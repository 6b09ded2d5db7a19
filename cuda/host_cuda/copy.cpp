/*
 * Copies and fills. Each end must lie in one allocation, or be host memory where the kind says so.
 */
#include "cuda/host_cuda/internal.h"

namespace host_cuda {

/* What a pointer names, for `bytes` bytes. */
enum class place_kind { device, pinned, pageable, wrong };

static place_kind place_of(const void *p, size_t bytes)
{
	const allocation *a = find_allocation(p);
	if (!a) {
		const allocation *near = nearest_allocation(p);
		const char *c = static_cast<const char *>(p);
		/* Just past an allocation, or on its guard pages: no host memory. */
		if (near && near->map && c >= near->map && c < near->map + near->map_bytes)
			return place_kind::wrong;
		return place_kind::pageable;
	}
	if (static_cast<const char *>(p) + bytes > a->base + a->bytes)
		return place_kind::wrong;
	return a->kind == memory_kind::device ? place_kind::device : place_kind::pinned;
}

static bool on_device(place_kind k)
{
	return k == place_kind::device;
}

/* Reports a copy whose ends are not what `kind` says, or not large enough. */
static cudaError_t check_copy(const void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, place_kind *to,
                              place_kind *from)
{
	*to = place_of(dst, bytes);
	*from = place_of(src, bytes);
	if (*to == place_kind::wrong || *from == place_kind::wrong) {
		misuse("a copy of %zu bytes leaves its %s allocation", bytes,
		       *to == place_kind::wrong ? "destination's" : "source's");
		return error(cudaErrorInvalidValue);
	}
	const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
	const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
	if (kind != cudaMemcpyDefault && (to_device != on_device(*to) || from_device != on_device(*from))) {
		misuse("a copy of %zu bytes does not go where its kind says", bytes);
		return error(cudaErrorInvalidMemcpyDirection);
	}
	return cudaSuccess;
}

static cudaError_t copy_now(void *dst, const void *src, size_t bytes)
{
	const device_memory_scope open;
	memmove(dst, src, bytes);
	return cudaSuccess;
}

static cudaError_t copy_async(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, stream_impl *s)
{
	place_kind to, from;
	cudaError_t e = check_copy(dst, src, bytes, kind, &to, &from);
	if (e != cudaSuccess || bytes == 0)
		return e;
	operation op;
	op.name = "copy";
	if (from == place_kind::pageable && !s->capture) {
		/* The caller may change its bytes as soon as the call returns. */
		const std::string staged(static_cast<const char *>(src), bytes);
		op.run = [dst, staged]() { return copy_now(dst, staged.data(), staged.size()); };
	} else {
		op.run = [dst, src, bytes]() { return copy_now(dst, src, bytes); };
	}
	e = submit(s, std::move(op));
	if (e == cudaSuccess && to == place_kind::pageable && !s->capture)
		e = drain(s, s->last);
	return e;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
	HOST_CUDA_ENTER("cudaMemcpyAsync");
	stream_impl *s = stream_of(stream);
	return s ? copy_async(dst, src, bytes, kind, s) : last_error;
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream)
{
	HOST_CUDA_ENTER("cudaMemcpy2DAsync");
	stream_impl *s = stream_of(stream);
	if (!s)
		return last_error;
	if (width > dst_pitch || width > src_pitch)
		return error(cudaErrorInvalidValue);
	for (size_t y = 0; y < height; y++) {
		const cudaError_t e = copy_async(static_cast<char *>(dst) + y * dst_pitch,
		                                 static_cast<const char *>(src) + y * src_pitch, width, kind, s);
		if (e != cudaSuccess)
			return e;
	}
	return cudaSuccess;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind)
{
	HOST_CUDA_ENTER("cudaMemcpy");
	if (capture_forbids())
		return error(cudaErrorStreamCaptureUnsupported);
	const cudaError_t e = copy_async(dst, src, bytes, kind, null_stream());
	return e != cudaSuccess ? e : drain(null_stream(), null_stream()->last);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream)
{
	HOST_CUDA_ENTER("cudaMemsetAsync");
	stream_impl *s = stream_of(stream);
	if (!s)
		return last_error;
	if (bytes == 0)
		return cudaSuccess;
	const place_kind kind = place_of(p, bytes);
	if (kind != place_kind::device && kind != place_kind::pinned) {
		misuse("a fill of %zu bytes at %p leaves its allocation", bytes, p);
		return error(cudaErrorInvalidValue);
	}
	operation op;
	op.name = "fill";
	op.run = [p, value, bytes]() {
		const device_memory_scope open;
		memset(p, value, bytes);
		return cudaSuccess;
	};
	return submit(s, std::move(op));
}

cudaError_t cudaMemset(void *p, int value, size_t bytes)
{
	/* As a copy within the device, it does not wait. */
	return cudaMemsetAsync(p, value, bytes, nullptr);
}

} // namespace host_cuda
