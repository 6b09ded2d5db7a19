/*
 * An operation of a step as data: what the vtable's functions were called with. operations.cu does one; graph.cu
 * remembers those of a step and sends them all at once the next time.
 */
#pragma once

#include "cuda/backend.cuh"

namespace GPU_NS
{

enum operation_kind {
	OP_EMBED,
	OP_NORM,
	OP_NORM_ADD,
	OP_MATMUL,
	OP_ROPE,
	OP_KV_WRITE,
	OP_ATTENTION,
	OP_GLU,
	OP_SOFTCAP
};

/* All bytes of it count when two are compared: begin with operation(). */
struct operation {
	enum operation_kind kind;
	union {
		struct {
			const struct weight *w;
			float scale;
			float *out;
		} embed;
		struct {
			const float *x, *gain;
			float *out;
			int64_t n;
			int32_t dim;
			float eps;
		} norm; /* and of NORM_ADD */
		struct {
			const float *x;
			int64_t n_rows;
			int32_t n;
			struct matmul mm[MAX_PRODUCTS];
		} matmul;
		struct {
			float *q, *k;
			int32_t n_head, n_head_kv, head_dim;
			struct rope_params p;
		} rope;
		struct {
			void *kv;
			struct kv_layout layout;
			int32_t layer;
			const float *k, *v;
		} kv_write;
		struct {
			const void *kv;
			struct kv_layout layout;
			int32_t layer, n_head;
			const float *q;
			struct attention_params params;
			float *out;
		} attention;
		struct {
			enum glu f;
			float *gate;
			const float *up;
			int64_t n;
			int32_t dim;
		} glu;
		struct {
			float *x;
			int64_t n;
			float cap;
		} softcap;
	};
};

inline struct operation operation(enum operation_kind kind)
{
	struct operation o;
	memset(&o, 0, sizeof o);
	o.kind = kind;
	return o;
}

/* Queues an operation's kernels. What fails is kept for step_end(). */
enum status execute(struct cuda_backend *b, const struct operation *o);
/* As OP_MATMUL, for any number of products. */
enum status execute_matmul(struct cuda_backend *b, const float *x, int64_t n_rows, const struct matmul *mm,
			   int32_t n_mm);
/* Does what rope() has put off. Everything else that touches the stream begins with this. */
enum status begin(struct cuda_backend *b);
/* For what cannot wait for the end of the step: everything before it is queued. */
enum status catch_up(struct cuda_backend *b);
/* The floats at p changed: halves made of them are stale. */
void wrote(struct cuda_backend *b, const float *p, int64_t n);
/* What attention of a layer begins with: everything but what is to be done, in a plan that is made. */
enum status attention_args_for(struct cuda_backend *b, struct attention_args *a, const void *kv,
			       const struct kv_layout *l, int32_t layer, const float *q, int32_t n_head,
			       const struct attention_params *params, float *out);
/* Where keys are of chunks, the queries that they meet: attention_args.turned. Of all rows. */
enum status turn_for_chunks(struct cuda_backend *b, const float *q, int32_t n_head, int32_t head_dim,
			    const struct attention_params *params);
/* Where the pages of a layer are. */
struct kv_place kv_place(const struct kv_layout *l, int32_t layer);
/* What fails within a step fails the step. */
enum status latch(struct cuda_backend *b, enum status s);

/* ---- graph.cu ---- */

/* At step_begin(), when the batch is on the device: whether this step is recorded, replayed or just done. */
void graph_begin(struct cuda_backend *b);
/* An operation of the open step: done, recorded, or found in the record that is replayed. */
enum status graph_submit(struct cuda_backend *b, const struct operation *o);
/*
 * Something a graph cannot have comes next in the step: what was put off is done, and the rest of the step is done as
 * it comes.
 */
enum status graph_leave(struct cuda_backend *b);
/* At step_end(): launches what was recorded or replayed. */
enum status graph_end(struct cuda_backend *b);

} // namespace GPU_NS
