/* The kernels of attention.cuh for pages of bfloat16s. */
#include "cuda/attention.cuh"

namespace GPU_NS
{

cudaError_t attention_bf16(const struct attention_args &a, cudaStream_t stream)
{
	return attention_of<PAGES_BF16>(a, stream);
}

} // namespace GPU_NS
