/*
 * Graphs: what a capture recorded, in the order in which it was submitted, done again in that order.
 */
#include "cuda/host_cuda/internal.h"

namespace host_cuda {

struct graph_exec_impl {
	std::vector<operation> ops;
};

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
	HOST_CUDA_ENTER("cudaGraphInstantiate");
	*exec = nullptr;
	if (!graph)
		return error(cudaErrorInvalidValue);
	*exec = new graph_exec_impl{graph->ops};
	return cudaSuccess;
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *info)
{
	HOST_CUDA_ENTER("cudaGraphExecUpdate");
	if (!exec || !graph || !info)
		return error(cudaErrorInvalidValue);
	*info = {cudaGraphExecUpdateSuccess, nullptr, nullptr};
	bool same = exec->ops.size() == graph->ops.size();
	for (size_t i = 0; same && i < graph->ops.size(); i++)
		same = exec->ops[i].name == graph->ops[i].name;
	if (!same) {
		info->result = cudaGraphExecUpdateErrorTopologyChanged;
		return error(cudaErrorGraphExecUpdateFailure);
	}
	exec->ops = graph->ops;
	return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t)
{
	HOST_CUDA_ENTER("cudaGraphUpload");
	return exec ? cudaSuccess : error(cudaErrorInvalidValue);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
	HOST_CUDA_ENTER("cudaGraphLaunch");
	stream_impl *s = stream_of(stream);
	if (!s)
		return last_error;
	if (!exec)
		return error(cudaErrorInvalidValue);
	for (const operation &op : exec->ops) {
		const cudaError_t e = submit(s, op);
		if (e != cudaSuccess)
			return e;
	}
	return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
	HOST_CUDA_ENTER("cudaGraphGetNodes");
	if (!graph || !count)
		return error(cudaErrorInvalidValue);
	if (nodes)
		for (size_t i = 0; i < *count && i < graph->ops.size(); i++)
			nodes[i] = &graph->ops[i];
	*count = graph->ops.size();
	return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	const cudaError_t entered = enter("cudaGraphDestroy");
	delete graph;
	return entered;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
	std::lock_guard<std::recursive_mutex> guard(lock);
	const cudaError_t entered = enter("cudaGraphExecDestroy");
	delete exec;
	return entered;
}

} // namespace host_cuda
