/* The kernels of attention.cuh for narrow pages of int8. */
#include "cuda/attention.cuh"

namespace GPU_NS
{

cudaError_t attention_int8(const struct attention_args &a, cudaStream_t stream)
{
	return attention_of<KV_FORM_INT8>(a, stream);
}

} // namespace GPU_NS
