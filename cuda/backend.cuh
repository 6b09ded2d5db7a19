/*
 * The CUDA backend's state, shared by backend_cuda.cu (the vtable), step.cu (what a step needs) and weights.cu
 * (loading).
 */
#pragma once

#include "cuda/kernels.cuh"

extern "C" {
#include "cuda/cuda.h"
#include "engine/base/log.h"
}

/* Returns from the function it stands in with what went wrong. */
#define TRY(call)                                                                                                      \
	do {                                                                                                           \
		const enum status try_st = (call);                                                                     \
		if (try_st != STATUS_OK)                                                                               \
			return try_st;                                                                                 \
	} while (0)

namespace GPU_NS
{

/* A matrix on the device. rows_only: as in the file; else packed for products, and embed() reads that. */
struct matrix {
	enum quant_type type;
	int n_in, n_out, n_units;
	size_t row_bytes; /* in the file */
	uint8_t *raw;	  /* or NULL */
	uint8_t *packed;  /* or NULL */
	size_t bytes;
};

/* Memory from mem_alloc(): what cudaMalloc() gave, and the aligned address in it. */
struct allocation {
	struct allocation *next;
	void *base, *aligned;
};

/* Device memory that grows between steps and is reused in all of them. */
struct growing {
	void *p;
	size_t bytes;
};

/*
 * Small arrays of the host's for kernels: put together in pinned memory, then sent by one copy. Offsets are valid in
 * both.
 */
struct upload {
	uint8_t *host, *device;
	size_t capacity, used, sent;
	/* something was sent since the stream was last waited for: the host's bytes may still be read */
	bool in_flight;
};

/*
 * The attention work of a step, which depends on the batch and on the model's heads. Offsets into the upload. Layers
 * without a window, in which rows may choose what they read, and those with one have a division each; it is the same
 * one when no row chooses.
 */
enum { LAYERS_ALL, LAYERS_WINDOW, LAYERS_KINDS };

struct attention_division {
	size_t parts, whole, merges;
	int n_parts, n_whole, n_merges;
	bool takes_turns; /* there is not room for the results of all of it at once */
};

struct attention_plan {
	bool made;
	int n_head, n_head_kv, head_dim;
	int chunk; /* tokens of a chunk (struct rope_chunks), of which an item's rows are all of one; 0: any */
	struct attention_division of[LAYERS_KINDS];
	size_t choosers;
	int n_choosers;
	int most; /* as in struct choice_args */
};

/*
 * Steps of decode rows alone, of one shape, launch the same kernels with the same arguments: what differs lies in the
 * uploaded arrays. They are recorded once as a graph, and later steps launch that.
 */
enum graph_mode { GRAPH_OFF, GRAPH_RECORD, GRAPH_REPLAY };

/* The shape: sizes of the uploaded arrays, rounded up so that a shape lasts for many steps. */
struct graph_key {
	int n_rows, n_pages, n_parts[LAYERS_KINDS];
	int n_choosers, most;
	int tells; /* whether rows say how they attended */
	int n_raised;
};

struct graph_record {
	struct graph_key key;
	int seen; /* steps of this shape so far; 0: the place is free */
	uint64_t last_used;
	cudaGraphExec_t exec;  /* NULL: not recorded yet */
	struct operation *ops; /* [n_ops] what it does */
	int n_ops, cap_ops;
};

enum { GRAPHS_MAX = 12 };

struct graphs {
	enum graph_mode mode;
	bool disabled; /* recording has failed once */
	bool fits;     /* the open step can be a graph, of shape `key` */
	struct graph_key key;
	struct graph_record *open; /* the one that is recorded or replayed */
	int next;		   /* REPLAY: operations found so far */
	uint64_t clock;
	struct graph_record record[GRAPHS_MAX];
};

/*
 * Sequences whose first pages are in host memory: see far.cu. The work of each: its items are n_items of each split, by
 * splits, or n_items that take all keys.
 */
struct far_plan {
	int32_t seq;
	bool is_whole;
	size_t items, merges; /* offsets into the upload */
	int n_items, n_splits, n_merges;
};

enum { FAR_STAGES = 3, FAR_STAGE_PAGES = 128 };

struct far_stages {
	struct far_plan *plans; /* [n_plans] of this step, room for cap_plans */
	int n_plans, cap_plans;
	size_t in_order;     /* offset into the upload: 0, 1, .. */
	cudaStream_t stream; /* NULL: nothing was ever copied */
	cudaEvent_t copied[FAR_STAGES], used[FAR_STAGES];
	bool was_used[FAR_STAGES];
	int next;
	struct growing memory; /* the stages */
};

struct cuda_backend {
	struct backend base;
	int ordinal;
	char detail[128];
	cudaStream_t stream;
	bool lost;	   /* the device answers every call with an error from now on */
	char failure[192]; /* what failed last */
	struct allocation *allocations;

	/*
	 * Loading: two buffers take turns, so that copying from the file overlaps copying to the device. Freed by
	 * reserve().
	 */
	struct {
		uint8_t *host[2], *device[2];
		size_t bytes;
		cudaEvent_t free[2];
		int next;
	} stage;

	/* The step. */
	const struct batch *batch; /* NULL outside */
	enum status step_status;
	struct upload upload;
	size_t token, position, place, row_seq, seq_table, table, slots; /* offsets into it */
	struct attention_plan plan;
	struct growing halves_x, halves_scale, partial, rope, scores, chosen;
	struct growing state; /* of blocks that take rows through all their keys, where it is not in registers */
	struct growing turned, turns; /* attention_args.turned, and chunk_table() */
	int halves_rows, halves_stride;
	/* Whose halves halves_x has: made beside the floats by whatever wrote them. NULL: nobody's. */
	const float *halves_of;
	int halves_n, halves_dim;
	enum quant_type kv_type; /* QUANT_F16 or QUANT_BF16 */
	/*
	 * From reserve(): the layout of the pool, and of it the wide copies of a narrow one and who wants to know of
	 * its values, or NULL.
	 */
	struct kv_layout layout;
	struct kv_wide *wide;
	struct kv_watch *watch;
	void *kv;		    /* the slab that the step has written to */
	struct growing odd, packed; /* odd: a struct odd_values for the step's rows */
	size_t odd_at;		    /* offset into the upload, where that comes at the end of a step */
	/*
	 * How rows attended: [n_masses] masses beside the table, [n_seqs] struct look_sums. told_bytes 0: nobody asks.
	 * Offsets into the upload.
	 */
	struct growing told, part_weights, whole_weights;
	size_t told_bytes, told_at, n_masses, tells;
	/*
	 * What rows have given to the pages of probes, one sequence's behind the other's, in units of 2^-KV_MASS_BITS;
	 * offset into the upload. And bounds of such pages.
	 */
	struct growing probed, probe_bounds;
	size_t probed_bytes, probed_at;
	/* Pages whose tokens' logits are raised; offsets into the upload of attention_args.raises and plus. */
	size_t n_raised, raises, plus;
	/* What rope.p has, so that one table serves all layers of a step. */
	const float *rope_freq;
	float rope_magnitude;
	int rope_pairs;
	int rope_chunk;
	const struct rope_params *turns_of; /* what turns.p has */
	/* rope() waits for kv_write(), so that one launch does both. */
	bool rope_waits;
	struct rope_args rope_args;
	struct graphs graphs;
	struct far_stages far;
};

inline struct cuda_backend *self(struct backend *b)
{
	return reinterpret_cast<struct cuda_backend *>(b);
}

/* Whether what a step stores is looked at. */
inline bool looks(const struct cuda_backend *b)
{
	return b->wide || b->watch;
}

/*
 * OK, or a status, with a line in the log that says what failed. NOMEM: memory. DEVICE: the device is lost. INTERNAL:
 * this call failed, and others may yet work.
 */
enum status check(struct cuda_backend *b, cudaError_t e, const char *what);

/* Whether attention takes kernels that keep their sums in memory: see asks_more() in attention.cuh. */
inline bool asks_more(const struct cuda_backend *b)
{
	return b->told_bytes || b->n_raised || b->plan.chunk;
}

/* Memory that graphs point to has moved or gone. */
void graphs_forget(struct cuda_backend *b);

inline int ceil_div(int a, int b)
{
	return (a + b - 1) / b;
}

/* The angles are those of another step, or were never made. */
inline void forget_angles(struct cuda_backend *b)
{
	b->rope_freq = NULL;
	b->turns_of = NULL;
}

inline int min_int(int a, int b)
{
	return a < b ? a : b;
}

/* n rounded up to one of four sizes between powers of two. */
inline int rounded(int n)
{
	int step = 16;
	while (n > 8 * step)
		step *= 2;
	return (n + step - 1) / step * step;
}

/* ---- step.cu ---- */

/* At least `bytes`; the content is lost when it grows, after all queued work. */
enum status grow(struct cuda_backend *b, struct growing *g, size_t bytes);
/* Of a struct odd_values. */
inline size_t odd_bytes(int32_t n_rows)
{
	return sizeof(struct odd_values) + static_cast<size_t>(n_rows) * sizeof(uint32_t);
}
/* Room for halves of n_rows rows of dim. */
enum status grow_halves(struct cuda_backend *b, int64_t n_rows, int64_t dim);
void upload_free(struct upload *u);
/* Room for `bytes` more. What is there already moves along, offsets stay, and all of it is sent again. */
enum status upload_room(struct cuda_backend *b, size_t bytes);
/* What was put there since the last time goes to the device. */
enum status upload_send(struct cuda_backend *b);
/* Waits for the stream. */
enum status settle(struct cuda_backend *b, const char *what);
/* Sends the batch, and the attention plan if the last step's heads are this one's. */
enum status step_upload(struct cuda_backend *b, const struct batch *batch);
/* Waits for the step, and takes note of what it has stored that halves cannot hold. BUSY: see backend.h. */
enum status step_finish(struct cuda_backend *b);

/* ---- plan.cu ---- */

/* For the heads that the plan names. It is not sent. */
enum status put_plan(struct cuda_backend *b);
/*
 * The plan for these heads, made and sent if step_upload() has not. chunk: where keys are of chunks, their size; else
 * 0, for which any plan will do.
 */
enum status plan_attention(struct cuda_backend *b, int n_head, int n_head_kv, int head_dim, int chunk);

/* The `sample` of backend.h. */
enum status step_sample(struct cuda_backend *b, float *logits, int32_t n_vocab, int32_t stride,
			const struct sample_row *rows, int32_t n, int32_t *tokens);

/* Reserves n elements, 16-byte aligned; upload_room() has made room. */
template <typename T> T *put(struct cuda_backend *b, size_t n, size_t *offset)
{
	struct upload *u = &b->upload;
	*offset = u->used;
	u->used += (n * sizeof(T) + 15) & ~static_cast<size_t>(15);
	return reinterpret_cast<T *>(u->host + *offset);
}

template <typename T> T *uploaded(const struct cuda_backend *b, size_t offset)
{
	return reinterpret_cast<T *>(b->upload.device + offset);
}

/* ---- backend_pages.cu: what backend.h has for pages, and its scan ---- */

enum status page_copy(struct backend *backend, void *kv, const struct kv_layout *l, const int32_t *from,
                      const int32_t *to, int32_t n);
enum status page_pack(struct backend *backend, const void *kv, const struct kv_layout *l, int32_t page,
                      enum kv_form form, void *host, bool *packed);
enum status page_unpack(struct backend *backend, void *kv, const struct kv_layout *l, int32_t page, enum kv_form form,
			const void *host);
enum status page_bounds(struct backend *backend, const void *kv, const struct kv_layout *l, const int32_t *pages,
			int32_t n);
enum status bounds_read(struct backend *backend, const struct kv_layout *l, int32_t page, uint16_t *host);
enum status page_norms(struct backend *backend, const void *kv, const struct kv_layout *l, const int32_t *pages,
		       int32_t n, double *sums);
enum status scan(struct backend *backend, const void *p, size_t bytes, uint64_t *sum);

/* ---- far.cu ---- */

enum status host_alloc(struct backend *backend, size_t bytes, void **out);
void host_free(struct backend *backend, void *p, size_t bytes);
enum status page_layers(struct backend *backend, const void *kv, const struct kv_layout *l, const int32_t *pages,
			int32_t n, void *host, size_t layer_stride);
enum status attention_part(struct backend *backend, const void *kv, const struct kv_layout *l, int32_t layer,
			   const float *q, int32_t n_head, const struct attention_params *params,
			   const struct attention_part *part, float *out);
/* Waits for what is still being copied. */
enum status far_settle(struct cuda_backend *b);
void far_close(struct cuda_backend *b);

/* ---- probe.cu ---- */

/* What the rows of a layer give to the pages of their sequences' probes. scale: of scores. */
enum status probe_pages(struct cuda_backend *b, const struct kv_layout *l, int32_t layer, const float *q,
			int32_t n_head, float scale);

/* ---- weights.cu ---- */

enum status weight_create(struct backend *backend, const struct weight_desc *desc, struct weight **out,
			  struct error *err);
void weight_destroy(struct backend *backend, struct weight *w);
size_t weight_bytes(const struct backend *backend, const struct weight *w);
void stage_free(struct cuda_backend *b);

inline const struct matrix *matrix_of(const struct weight *w)
{
	return reinterpret_cast<const struct matrix *>(w);
}

} // namespace GPU_NS
