/* The kernels of attention.cuh for narrow pages of fp8_e4m3. */
#include "cuda/attention.cuh"

namespace GPU_NS
{

cudaError_t attention_fp8(const struct attention_args &a, cudaStream_t stream)
{
	return attention_of<KV_FORM_FP8_E4M3>(a, stream);
}

} // namespace GPU_NS
