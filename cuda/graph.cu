/*
 * Graphs: the launches of a decode step, recorded and sent at once.
 *
 * The engine calls the same operations with the same arguments in every step of a shape (struct graph_key). The second
 * step of a shape is recorded: its operations are remembered, and the stream captures their kernels instead of running
 * them until step_end() launches the graph. In later steps an operation is only compared with the remembered one;
 * step_end() launches. If an operation differs, or one comes that no graph has, those found so far are done as usual,
 * and so is the rest of the step: a step that does not repeat costs a comparison.
 */
#include "cuda/operations.cuh"

#include <stdlib.h>
#include <string.h>

namespace GPU_NS
{

static void forget(struct graph_record *r)
{
	if (r->exec)
		cudaGraphExecDestroy(r->exec);
	free(r->ops);
	*r = {};
}

void graphs_forget(struct cuda_backend *b)
{
	bool any = false;
	for (int i = 0; i < GRAPHS_MAX; i++)
		any = any || b->graphs.record[i].exec;
	if (any)
		cudaStreamSynchronize(b->stream); /* one may be running */
	for (int i = 0; i < GRAPHS_MAX; i++)
		forget(&b->graphs.record[i]);
}

/* The record of the open step's shape, or the place of the one unused for longest. */
static struct graph_record *find(struct graphs *g)
{
	struct graph_record *oldest = &g->record[0];
	for (int i = 0; i < GRAPHS_MAX; i++) {
		struct graph_record *r = &g->record[i];
		if (r->seen && memcmp(&r->key, &g->key, sizeof g->key) == 0)
			return r;
		if (r->last_used < oldest->last_used)
			oldest = r;
	}
	forget(oldest);
	oldest->key = g->key;
	return oldest;
}

void graph_begin(struct cuda_backend *b)
{
	struct graphs *g = &b->graphs;
	g->mode = GRAPH_OFF;
	g->next = 0;
	if (!g->fits || g->disabled)
		return;
	struct graph_record *r = find(g);
	r->last_used = ++g->clock;
	r->seen++;
	g->open = r;
	if (r->exec)
		g->mode = GRAPH_REPLAY;
	else if (r->seen == 2 && cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess)
		g->mode = GRAPH_RECORD;
	cudaGetLastError();
}

static bool remember(struct graph_record *r, const struct operation *o)
{
	if (r->n_ops == r->cap_ops) {
		const int cap = r->cap_ops ? 2 * r->cap_ops : 256;
		struct operation *p = static_cast<struct operation *>(
			realloc(static_cast<void *>(r->ops), static_cast<size_t>(cap) * sizeof *p));
		if (!p)
			return false;
		r->ops = p;
		r->cap_ops = cap;
	}
	memcpy(static_cast<void *>(&r->ops[r->n_ops++]), o, sizeof *o);
	return true;
}

/* Does the first n operations of the record, which the step has asked for and not got. */
static enum status catch_up(struct cuda_backend *b, int n)
{
	for (int i = 0; i < n; i++) {
		const enum status s = execute(b, &b->graphs.open->ops[i]);
		if (s != STATUS_OK)
			return s;
	}
	return STATUS_OK;
}

enum status graph_leave(struct cuda_backend *b)
{
	struct graphs *g = &b->graphs;
	const enum graph_mode was = g->mode;
	cudaGraph_t graph = NULL;
	g->mode = GRAPH_OFF;
	if (was == GRAPH_OFF)
		return STATUS_OK;
	if (was == GRAPH_REPLAY)
		return catch_up(b, g->next);
	/* The capture is thrown away: its kernels have not run, and the state of the step begins anew. */
	if (cudaStreamEndCapture(b->stream, &graph) == cudaSuccess && graph)
		cudaGraphDestroy(graph);
	cudaGetLastError();
	b->halves_of = NULL;
	forget_angles(b);
	b->rope_waits = false;
	const enum status s = b->step_status == STATUS_OK ? catch_up(b, g->open->n_ops) : b->step_status;
	g->open->n_ops = 0; /* it is not recorded again: seen is past that */
	return s;
}

enum status graph_submit(struct cuda_backend *b, const struct operation *o)
{
	struct graphs *g = &b->graphs;
	struct graph_record *r = g->open;
	if (g->mode == GRAPH_REPLAY) {
		if (g->next < r->n_ops && memcmp(static_cast<const void *>(&r->ops[g->next]), o, sizeof *o) == 0) {
			g->next++;
			return STATUS_OK;
		}
		const enum status s = graph_leave(b);
		return s == STATUS_OK ? execute(b, o) : s;
	}
	if (g->mode == GRAPH_RECORD && !remember(r, o)) {
		const enum status s = graph_leave(b);
		if (s != STATUS_OK)
			return s;
	}
	return execute(b, o);
}

/* Ends the capture and makes the graph; false when that cannot be done, and nothing has run. */
static bool instantiate(struct cuda_backend *b)
{
	struct graph_record *r = b->graphs.open;
	cudaGraph_t graph = NULL;
	cudaError_t e = cudaStreamEndCapture(b->stream, &graph);
	if (e == cudaSuccess)
		e = cudaGraphInstantiate(&r->exec, graph, 0);
	if (e != cudaSuccess)
		r->exec = NULL;
	if (graph)
		cudaGraphDestroy(graph);
	cudaGetLastError();
	return e == cudaSuccess;
}

enum status graph_end(struct cuda_backend *b)
{
	struct graphs *g = &b->graphs;
	struct graph_record *r = g->open;
	if (g->mode == GRAPH_RECORD) {
		begin(b); /* what was put off belongs to it */
		if (b->step_status != STATUS_OK)
			return graph_leave(b);
		g->mode = GRAPH_OFF;
		if (!instantiate(b)) {
			log_msg(LOG_WARN, "cuda",
				"the device makes no graph of a step: steps are launched kernel by kernel");
			g->disabled = true;
			b->halves_of = NULL;
			forget_angles(b);
			return catch_up(b, r->n_ops);
		}
	} else if (g->mode == GRAPH_REPLAY) {
		if (g->next != r->n_ops)
			return graph_leave(b);
		g->mode = GRAPH_OFF;
	} else {
		return STATUS_OK;
	}
	return check(b, cudaGraphLaunch(r->exec, b->stream), "launching a step");
}

} // namespace GPU_NS
