/*
 * What a device does for the engine: memory, weights and the operations of a transformer, each over a whole batch.
 * The forward pass (model/forward.c) is written once over this table; cpu/ and cuda/ implement it.
 *
 * Addresses. `float *` and `void *` operands of operations are device addresses: the host may compute with them but
 * reads and writes them only through mem_read() and mem_write(). Arrays inside struct batch are host memory.
 *
 * Order. Operations of one backend run in the order they are called. They may be asynchronous: a result may be read
 * after mem_read() or sync(), and a host array passed to an operation may change after step_end().
 *
 * Determinism. What an operation computes for a row depends on that row alone: not on which rows share the batch, how a
 * prompt was cut into chunks, how many threads there are, or where its pages lie.
 *
 * Failures. NOMEM and INTERNAL fail an operation, and the step it belongs to; the next may go well. DEVICE: the device
 * is lost, and every later operation fails with it.
 *
 * Threads. One thread, the worker that owns the device, calls a backend.
 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/model/quant.h"

struct backend;
struct weight; /* a matrix as the backend keeps it, possibly repacked; opaque to the engine */

/* How the pool keeps KV. */
enum kv_form {
	KV_FORM_F16,
	/*
	 * A byte for each element, times a scale for each vector (layer, K or V, head, token): max|x| / 448 or / 127. A
	 * vector with a value that is no number, or infinite, has no such form: see struct kv_wide.
	 */
	KV_FORM_FP8_E4M3,
	KV_FORM_INT8,
	KV_N_FORMS
};

/*
 * What a narrow pool has beside its pages: room for some of them in f16 as well. While a page has such a copy, it is
 * written with the page and read in its place. The first page of a conversation and the one it fills have one
 * (kv/seq.h), and a page that gets a value which has no narrow form falls back to one: whoever writes such a value asks
 * for it first, and fills it with what the page holds already.
 */
struct kv_wide {
	void *slab;           /* where the copies are; NULL: in the slab of the pages */
	int32_t *slot;        /* [n_pages] where a page's copy is, or -1 */
	size_t offset;        /* of the first slot in the slab */
	size_t stride, bytes; /* of a slot, and of a page in f16 */
	/* vectors that were written as NaNs, for want of a copy; threads of the backend add to it (__atomic) */
	uint64_t n_not_finite;
	/*
	 * Gives a page a copy, whose content is undefined, unless it has one; its slot, or -1: there is no room. For
	 * the worker's thread.
	 * NULL: there is none.
	 */
	int32_t (*widen)(void *arg, int32_t page);
	void *arg;
};

/* What a pool wants to know of the values in its pages. Threads of the backend add to the counts (__atomic). */
struct kv_watch {
	uint8_t *mark;      /* [n_pages] enum kv_mark, which the backend adds to (__atomic) */
	uint64_t n_unsound; /* pages that became so */
	uint64_t n_clamped; /* vectors with values beyond KV_HALF_MAX, at which halves were held */
};

enum kv_mark {
	KV_MARK_UNSOUND = 1, /* has got a value that is no number, or infinite */
	/* narrow pools: has got such a value, or one beyond KV_HALF_MAX, beside which a scale leaves nothing else */
	KV_MARK_WIDER = 2,
	KV_MARK_ASKED = 4,   /* set by struct kv_wide's widen(): it is not asked twice for such a page */
};

/* Adds to a page's marks, and counts it when it becomes unsound. */
static inline void kv_watch_mark(struct kv_watch *w, int32_t page, uint8_t marks)
{
	uint8_t before = __atomic_fetch_or(&w->mark[page], marks, __ATOMIC_RELAXED);
	if (marks & ~before & KV_MARK_UNSOUND)
		__atomic_fetch_add(&w->n_unsound, 1, __ATOMIC_RELAXED);
}

#define KV_HALF_MAX 65504.0f

/*
 * What bounds the scores of a full page's keys: in each layer and KV head, the least and the greatest value of each
 * dimension. A product of some query with any of the keys is at most the sum, over the dimensions, of the larger of its
 * products with the two. Written by page_bounds(), read by rows that choose (struct page_choice).
 */
struct kv_bounds {
	/* device memory: [n_layer][n_head_kv][n_pages][least, greatest][head_dim] elements of the layout's type */
	void *slab;
	int32_t n_pages; /* of the pool */
};

/*
 * Geometry of the KV cache. A page holds page_tokens positions of ALL layers. Its inner order belongs to the backend,
 * except that its layers stand one after the other, page_bytes / n_layer bytes each.
 */
struct kv_layout {
	int32_t n_layer;
	int32_t n_head_kv;
	int32_t head_dim;     /* of K and of V */
	int32_t page_tokens;  /* KV_PAGE_TOKENS */
	/* QUANT_F16 or QUANT_BF16, as the backend's pages (of a narrow form: their wide copies) are */
	enum quant_type type;
	/* 2 * n_layer * n_head_kv * head_dim * page_tokens * element bytes, or as kv_layout_narrow() says */
	size_t page_bytes;
	size_t page_stride;   /* page_bytes rounded up to 4096: distance of two pages in the pool's slab */
	enum kv_form form;
	struct kv_wide *wide; /* NULL: no page has a wide copy */
	struct kv_watch *watch; /* NULL: nobody wants to know */
	struct kv_bounds *bounds; /* NULL: there are none, and no row chooses */
};

enum { KV_PAGE_TOKENS = 16 };

/* Bytes of the bounds of a page: an eighth of its elements, or a sixteenth of an exact page. */
static inline size_t kv_bounds_bytes(const struct kv_layout *l)
{
	return 2 * (size_t)l->n_layer * (size_t)l->n_head_kv * (size_t)l->head_dim * sizeof(uint16_t);
}

/* Where those of a layer, KV head and page begin in the slab; the ones of the next page follow them. */
static inline size_t kv_bounds_offset(const struct kv_layout *l, int32_t layer, int32_t head_kv, int32_t page)
{
	size_t head = (size_t)layer * (size_t)l->n_head_kv + (size_t)head_kv;
	return (head * (size_t)l->bounds->n_pages + (size_t)page) * 2 * (size_t)l->head_dim * sizeof(uint16_t);
}

/*
 * The inner order of a page, for whoever narrows its elements: a page is a run of blocks of page_tokens * head_dim
 * elements, one for each layer, K or V, and head.
 */
enum kv_block_order {
	KV_BY_TOKEN,       /* [token][head_dim] */
	KV_BY_DIM,         /* [head_dim][token] */
	KV_BY_DIM_PAIRS,   /* [head_dim / 2][token][2]; when head_dim is odd, then [token] of the last */
	KV_BY_TOKEN_PAIRS, /* [page_tokens / 2][head_dim][2] */
	/* As tensor cores take them: cuda/kv_page.cuh. head_dim is a multiple of 8. */
	KV_OPERAND_KEYS,
	KV_OPERAND_VALUES,
};

struct kv_order {
	bool known; /* false: pages have another order, and can only be kept as they are */
	bool pairs; /* blocks are [layer][head][K, V]; else [layer][K, V][head] */
	enum kv_block_order keys, values;
};

/* Pages that follow each other in a sequence, of one layer. */
struct kv_far_run {
	int32_t n_pages;
	const void *kv;             /* host memory: the slab of a pool of pages of that layer: kv_layout_of_layer() */
	const int32_t *block_table; /* [n_pages] host memory */
	struct kv_wide *wide;       /* of a narrow pool, that layer of the copies that pages have; NULL: none has any */
};

/*
 * The first pages of a sequence where they are not in the pool, but somewhere further off. They are whole, and are only
 * read. The forward pass asks for them layer by layer, and within a layer in their order.
 */
struct kv_far {
	int32_t n_pages;
	/*
	 * Pages from `page` on, as many as can be had together, in host memory: in that of host_alloc() they stay until
	 * the end of the step, elsewhere until the next call, for whichever sequence. False: they cannot be had any
	 * more. Then what is computed for the sequence means nothing.
	 */
	bool (*get)(struct kv_far *far, int32_t layer, int32_t page, struct kv_far_run *out);
};

/*
 * Rows that do not read all they see (Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM
 * Inference", 2024). In layers without a window such a row reads, in each layer and for each KV head, at most n_pages
 * of the pages up to its own: the first n_first, the last n_last, its own among them, and of those between the ones
 * whose bound is largest: the largest of those of the KV head's query heads, as their sum finds less (of five keys in
 * 2,048 tokens 0.24 of the digits against 0.44). Of equals the earlier, and first those whose bound is no number. Where
 * it sees no more than n_pages it reads all, as a row that does not choose. All pages before a choosing row's own have
 * their bounds.
 */
struct page_choice {
	int32_t from;    /* rows from this place in the block table on choose */
	int32_t n_pages; /* n_first + n_last or more; 0: no row chooses */
	int32_t n_first, n_last; /* n_last >= 1 */
};

/*
 * Pages that a sequence has elsewhere, which its rows do not see, and how well they would match them: in layers without
 * a window each row adds to their scores, for each KV head, the squares of the softmax of their bounds times the scale
 * (of the KV head's query heads the largest): a head that is undecided says little. In integers, as masses are. A page
 * whose bound is no number gets nothing.
 */
struct page_probe {
	int32_t n_pages;
	/* [n_pages][n_layer][n_head_kv][least, greatest][head_dim] host memory, elements as in struct kv_bounds */
	const uint16_t *bounds;
	uint64_t *score;        /* [n_pages] in units of 2^-KV_MASS_BITS */
};

/*
 * One sequence's part of a step. Its rows stand at first_position, first_position + 1, ... as its block table counts,
 * and see all before. Pages that left a sequence leave no hole in its table: what stands there of a row is its position
 * less what was dropped.
 */
struct batch_seq {
	int32_t first_row;
	int32_t n_rows;
	int32_t first_position;     /* in the block table */
	const int32_t *block_table; /* [n_pages] page numbers; position p lies in page block_table[p / page_tokens] */
	int32_t n_pages;            /* enough for first_position + n_rows */
	struct page_choice choice;  /* zeroed: its rows read all they see */
	/*
	 * NULL, or [n_pages]: attention adds to each page's entry what its rows gave it of their weights, which come to
	 * 1 for each layer and query head: in units of 2^-KV_MASS_BITS, each row's, layer's and head's share rounded to
	 * the nearest. Integers, so that the order in which rows, heads and threads add to them changes nothing. Not
	 * together with a choice.
	 */
	uint64_t *mass;
	struct attention_look *look; /* NULL, or what attention adds a description of its rows to */
	/*
	 * NULL, or [n_plus]: what is added to the logits of its first places in the block table, after any softcap,
	 * finite: ln n where a key and value stand for n tokens. n_plus is a multiple of KV_PART_PAGES * KV_PAGE_TOKENS
	 * and may be more than there are places. Not together with a choice or far pages, nor in narrow pages.
	 */
	const float *plus;
	int32_t n_plus;
	/* NULL, or what its rows score. Not together with far pages, nor in narrow pages */
	const struct page_probe *probe;
	/* NULL, or where its first pages are, whose places in the table are empty. None of its rows writes there */
	struct kv_far *far;
};

enum { KV_MASS_BITS = 24 };

/* How rows attended, summed over rows, layers and query heads as integers, in units of 2^-KV_MASS_BITS but for n. */
struct attention_look {
	uint64_t n;       /* rows, layers and heads */
	uint64_t entropy; /* of the weights that each gave to positions, in nats */
	uint64_t largest; /* of each's weights */
};

/* Whether the row at a place of the block table reads less than it sees, where a layer has no window. */
static inline bool page_choice_binds(const struct page_choice *c, int32_t place)
{
	return c->n_pages > 0 && place >= c->from && place / KV_PAGE_TOKENS >= c->n_pages;
}

/* KV that is still on its way from elsewhere when a step begins, in pages that its rows see and none of them writes. */
struct kv_arrival {
	/*
	 * Waits until all that the step sees of a layer is there; the forward pass asks in front of each layer's
	 * attention. False: it does not come, or not in time. Then the step ends, and means nothing.
	 */
	bool (*wait)(struct kv_arrival *arrival, int32_t layer);
};

/* One step: decode rows and prefill chunks of many sequences together. */
struct batch {
	int32_t n_rows;
	const int32_t *token;    /* [n_rows] */
	/* [n_rows] of the conversation, which rotate queries and keys; not below what the block table counts */
	const int32_t *position;
	int32_t n_seqs;
	const struct batch_seq *seq; /* [n_seqs]; rows of all of them cover [0, n_rows) without gaps, in order */
	int32_t n_outputs;
	const int32_t *output_row;   /* [n_outputs] rows whose logits are wanted, ascending */
	struct kv_arrival *arrival;  /* NULL: all is there. Only where device memory is the host's */
};

/* A matrix in the model file: n_out rows of n_in elements. */
struct weight_desc {
	const char *name;
	const struct quant_format *format;
	int64_t n_in;
	int64_t n_out;
	const void *data; /* host memory; stays valid until the weight is destroyed */
	bool rows_only;   /* only embed() will read it, so it need not be repacked for products */
};

/* y[n_rows][n_out] = x[n_rows][n_in] * W^T (+ bias[n_out]) (+ y when accumulate). */
struct matmul {
	const struct weight *weight;
	const float *bias; /* device address or NULL */
	float *y;
	bool accumulate;
	bool precise; /* worth more than eight bits of every activation, where the backend quantises them: the logits */
};

/*
 * A change of one logit x: x > 0 ? x / repeat : x * repeat, then x - minus, then x + plus. 1, 0 and 0 change nothing.
 */
struct sample_edit {
	int32_t token;
	float repeat, minus, plus;
};

/*
 * One choice of a token, as engine/sample/sampler.h describes it; what its sampler knows of the past is in the edits.
 */
struct sample_row {
	int32_t output; /* row of the logits */
	float temperature;
	int32_t top_k;
	float top_p, min_p;
	double unit;    /* uniform in [0, 1): the draw */
	/*
	 * [n_edits] host memory. The first n_first name each token once at most, the others too; they come after the
	 * first.
	 */
	const struct sample_edit *edit;
	int32_t n_first, n_edits;
};

enum rope_pairing {
	ROPE_INTERLEAVED, /* rotates (x[2i], x[2i+1]): llama files */
	ROPE_HALVES,      /* rotates (x[i], x[i + n_dims/2]): qwen files ("neox") */
};

/*
 * Dual Chunk Attention (An et al., "Training-Free Long-Context Scaling of Large Language Models", 2024): positions
 * count anew with each chunk of `size`, so that no distance is longer than those a model was trained on. A key at
 * position n is turned as if it stood at n % size. A query at m meets the keys of its own chunk as if it stood at m %
 * size; those of the chunk before, at min(m % size + size, reach - 1), so that what is less than reach - size behind it
 * has its own distance; and those of all chunks before that, at reach - 1.
 */
struct rope_chunks {
	int32_t size;  /* a multiple of ROPE_CHUNK_STEP; 0: there are none, and positions are what they are */
	int32_t reach; /* more than size: positions that the model was trained on */
};

enum { ROPE_CHUNK_STEP = 64 };

/* Where keys stand, seen from a query. */
enum rope_chunk { ROPE_CHUNK_OWN, ROPE_CHUNK_BEFORE, ROPE_CHUNKS_FAR };

/*
 * By how many positions a query at `position`, which is turned for keys of its own chunk, has to be turned further for
 * others.
 */
static inline int32_t rope_chunk_turn(const struct rope_chunks *c, int32_t position, enum rope_chunk keys)
{
	int32_t most = c->reach - 1 - position % c->size;
	return keys == ROPE_CHUNK_OWN ? 0 : keys == ROPE_CHUNK_BEFORE && c->size < most ? c->size : most;
}

/*
 * The first position whose keys are such to a query at `position`; those of ROPE_CHUNKS_FAR begin at 0. They end where
 * the next kind begins.
 */
static inline int32_t rope_chunk_begin(const struct rope_chunks *c, int32_t position, enum rope_chunk keys)
{
	int32_t number = position / c->size - (int32_t)keys;
	return keys == ROPE_CHUNKS_FAR || number < 0 ? 0 : number * c->size;
}

/*
 * Angle of pair i at position p: p * inv_freq[i]; sine and cosine are scaled by `magnitude` (YaRN's attention factor).
 */
struct rope_params {
	enum rope_pairing pairing;
	int32_t n_dims;        /* rotated dimensions of a head; the rest pass through */
	const float *inv_freq; /* host, [n_dims / 2], stays valid as long as the model */
	float magnitude;
	struct rope_chunks chunks;
};

/* What attention computes, beside the heads: softmax(score) v over the positions a row sees. */
struct attention_params {
	float scale;    /* score = scale * q k, ... */
	float softcap;  /* ... then, where this is not 0, softcap * tanh(score / softcap) */
	int32_t window; /* a row sees its last `window` positions, itself among them; 0: all */
	/*
	 * NULL, or what rope() was called with, which has chunks: queries are turned further for keys of chunks before
	 * their own. Not together with a window or with rows that choose; rows stand in their block tables at their
	 * positions.
	 */
	const struct rope_params *chunked;
};

/* Where a backend can interrupt a sum and go on with the same bits: at multiples of 64 tokens a CPU, of 128 a GPU. */
enum { KV_PART_PAGES = 8 };

/* Some of the pages that the rows of one sequence see. */
struct attention_part {
	int32_t seq;                 /* of the batch; it has far pages */
	/* in its block table, the first a multiple of KV_PART_PAGES; of the last part, those of its rows as well */
	int32_t first_page, n_pages;
	const int32_t *block_table;  /* [n_pages] where they are */
	bool first, last;            /* nothing that a row sees is in front of it, or behind it */
};

/* Gated linear units (Shazeer, "GLU Variants Improve Transformer", 2020), by what the gate goes through. */
enum glu {
	GLU_SILU, /* x / (1 + exp(-x)) */
	GLU_GELU, /* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) */
};

struct backend_info {
	const char *name;   /* "cpu-avx512", "cpu-reference", "cuda" */
	char detail[128];   /* e.g. the instruction sets or the GPU's name */
	int32_t n_threads;  /* 0 where it does not apply */
	bool host_memory;   /* device addresses are host addresses */
	struct kv_order kv_order;
	/* elements of KV pages: the only layouts it takes are of this type, its own or that of choose_kv() */
	enum quant_type kv_type;
	bool narrow_kv;     /* takes layouts of all forms; else only KV_FORM_F16 */
	bool weighs_pages;  /* takes batches with masses, and with looks */
	bool chooses_pages; /* has page_bounds(), and takes batches with rows that choose */
	bool turns_chunks;  /* takes struct rope_chunks */
	bool adds_to_logits; /* takes batches with batch_seq.plus */
	bool probes_pages;   /* and with batch_seq.probe */
};

struct backend_ops {
	void (*destroy)(struct backend *b);
	void (*info)(const struct backend *b, struct backend_info *out);

	/* Zeroed device memory, aligned to 4096 bytes. NOMEM when there is not enough. */
	enum status (*mem_alloc)(struct backend *b, size_t bytes, void **out);
	void (*mem_free)(struct backend *b, void *p, size_t bytes);
	enum status (*mem_write)(struct backend *b, void *dst, const void *host, size_t bytes);
	enum status (*mem_read)(struct backend *b, void *host, const void *src, size_t bytes);
	/*
	 * Host memory that the device reads and writes while it computes, aligned to 4096 bytes. NOMEM. NULL where
	 * mem_alloc() gives that.
	 */
	enum status (*host_alloc)(struct backend *b, size_t bytes, void **out);
	void (*host_free)(struct backend *b, void *p, size_t bytes);
	/*
	 * Before anything has to do with KV: its pages are to have elements of that type. UNSUPPORTED. NULL: it has one
	 * type only.
	 */
	enum status (*choose_kv)(struct backend *b, enum quant_type type);

	/*
	 * Bytes that mem_alloc() could still give; 0 when that is not known. NULL where device memory is the machine's.
	 */
	size_t (*mem_available)(struct backend *b);

	enum status (*weight_create)(struct backend *b, const struct weight_desc *desc, struct weight **out,
	                             struct error *err);
	void (*weight_destroy)(struct backend *b, struct weight *w);
	/* Bytes of device memory the weight takes beyond the mapped file. */
	size_t (*weight_bytes)(const struct backend *b, const struct weight *w);

	/*
	 * Brackets a step; the batch and its arrays stay valid and unchanged in between. max_rows bounds scratch
	 * memory. Steps over narrow pages use the layout of the last reserve(), whose `wide` stays valid until the next
	 * one or destroy(), and does not change within a step.
	 */
	enum status (*reserve)(struct backend *b, int32_t max_rows, int32_t max_width, const struct kv_layout *layout);
	enum status (*step_begin)(struct backend *b, const struct batch *batch);
	/*
	 * Waits; a failure of any operation since step_begin shows here, and that the device is lost rather than
	 * another. BUSY, of backends that look at what was stored only now: pages of a narrow pool have got wide copies
	 * which the step has not written to. It did nothing that counts, and is to be run again as it was.
	 */
	enum status (*step_end)(struct backend *b);

	/*
	 * out[n_rows][n_in] = scale * rows `token` of the embedding matrix, in float; tokens are those of the step's
	 * batch.
	 */
	enum status (*embed)(struct backend *b, const struct weight *w, float scale, float *out);
	/* out[n][dim] = x / sqrt(mean(x^2) + eps) * gain; out may be x. gain is a device address. */
	enum status (*rms_norm)(struct backend *b, const float *x, int64_t n, int32_t dim, const float *gain, float eps,
	                        float *out);
	/* out[n][dim] += x / sqrt(mean(x^2) + eps) * gain; out is not x. */
	enum status (*rms_norm_add)(struct backend *b, const float *x, int64_t n, int32_t dim, const float *gain,
	                            float eps, float *out);
	/*
	 * n_mm products over the same x[n_rows][n_in]; activations are quantised once where the backend does so, with
	 * the precision that the most demanding product wants.
	 */
	enum status (*matmul)(struct backend *b, const float *x, int64_t n_rows, const struct matmul *mm, int32_t n_mm);
	/*
	 * Rotates q[n_rows][n_head][head_dim] and k[n_rows][n_head_kv][head_dim] in place by each row's position, or
	 * the one in its chunk.
	 */
	enum status (*rope)(struct backend *b, float *q, int32_t n_head, float *k, int32_t n_head_kv, int32_t head_dim,
	                    const struct rope_params *rope);
	/*
	 * Stores k and v[n_rows][n_head_kv][head_dim] of the batch's rows where the block tables say. kv: the pool's
	 * slab. In pages of halves values beyond their range are held at its end; what is no number stays none, and
	 * layout->watch is told of both.
	 */
	enum status (*kv_write)(struct backend *b, void *kv, const struct kv_layout *layout, int32_t layer,
	                        const float *k, const float *v);
	/*
	 * Causal attention of q[n_rows][n_head][head_dim] over the positions of its block table up to its own that each
	 * row sees. Query head h uses KV head h / (n_head / n_head_kv). Pages that lie wholly before a row's window are
	 * not read for it: where no row of a sequence sees a page, its place in the block table may hold anything. Rows
	 * that choose read what struct page_choice says; rows of sequences with far pages are left out.
	 */
	enum status (*attention)(struct backend *b, const void *kv, const struct kv_layout *layout, int32_t layer,
	                         const float *q, int32_t n_head, const struct attention_params *params, float *out);
	/*
	 * The same for the rows of a sequence with far pages, part by part: from the one that is `first` to the one
	 * that is `last`, each behind the one before it, with no other sequence's in between. Softmax over each is
	 * merged into what was before by maxima and sums of weights; the last one fills the rows of out. That is
	 * attention() over all of them, to the bit where the backend can go on with a sum that it has interrupted (all
	 * but the reference), or to within rounding. kv is what kv_far's get() gave, host memory, or for the last part
	 * the pool. On GPUs layouts that are not narrow. NULL where the backend has none.
	 */
	enum status (*attention_part)(struct backend *b, const void *kv, const struct kv_layout *layout, int32_t layer,
	                              const float *q, int32_t n_head, const struct attention_params *params,
	                              const struct attention_part *part, float *out);
	/* gate[n][dim] = f(gate) * up */
	enum status (*glu)(struct backend *b, enum glu f, float *gate, const float *up, int64_t n, int32_t dim);
	/* x[n] = cap * tanh(x / cap) */
	enum status (*softcap)(struct backend *b, float *x, int64_t n, float cap);
	/* out[i] = x[rows[i]], rows of dim floats; rows is host memory. */
	enum status (*gather_rows)(struct backend *b, const float *x, int32_t dim, const int32_t *rows, int32_t n,
	                           float *out);
	/*
	 * Chooses tokens[n] (host memory) from logits[..][stride], of which the first n_vocab elements of a row are
	 * tokens, as a sampler would with the same draws; changes the logits. A negative token t stands for ~t, chosen
	 * without using the draw. Waits. NULL where the logits are the host's anyway.
	 */
	enum status (*sample)(struct backend *b, float *logits, int32_t n_vocab, int32_t stride,
	                      const struct sample_row *rows, int32_t n, int32_t *tokens);
	/* Copies whole pages within the slab: to[i] = from[i]; the pairs do not overlap. */
	enum status (*page_copy)(struct backend *b, void *kv, const struct kv_layout *layout, const int32_t *from,
	                         const int32_t *to, int32_t n);
	/*
	 * Writes the bounds of n full pages, of all layers, to layout->bounds. A NaN among the keys makes a bound that
	 * is none. Narrow pages: of what attention would read. NULL where info.chooses_pages is false.
	 */
	enum status (*page_bounds)(struct backend *b, const void *kv, const struct kv_layout *layout,
	                           const int32_t *pages, int32_t n);
	/*
	 * Copies the bounds of a page to host memory, as struct page_probe has them: [n_layer][n_head_kv][least,
	 * greatest][head_dim]. Waits. NULL where they are in host memory.
	 */
	enum status (*bounds_read)(struct backend *b, const struct kv_layout *layout, int32_t page, uint16_t *host);
	/*
	 * Writes a page of an exact layout in a narrow form to host memory: bit for bit as kv_codec_pack() has it
	 * (engine/kv/tier_codec.h), whose result is *packed. page_unpack() is the way back. Both wait. NULL where the
	 * host does it as well.
	 */
	enum status (*page_pack)(struct backend *b, const void *kv, const struct kv_layout *layout, int32_t page,
	                         enum kv_form form, void *host, bool *packed);
	enum status (*page_unpack)(struct backend *b, void *kv, const struct kv_layout *layout, int32_t page,
	                           enum kv_form form, const void *host);
	/*
	 * Copies n whole pages of an exact layout to host memory, by layers: layer l of the i-th to host + l *
	 * layer_stride + i * page_bytes / n_layer. Waits. NULL where pages are in host memory.
	 */
	enum status (*page_layers)(struct backend *b, const void *kv, const struct kv_layout *layout,
				   const int32_t *pages, int32_t n, void *host, size_t layer_stride);
	/*
	 * Sums of squares of a layer's keys and of its values in whole pages of an exact layout: sums[n][n_layer][2],
	 * host memory. Waits. Equal pages have equal sums. NULL where the host reads pages as well as the device does.
	 */
	enum status (*page_norms)(struct backend *b, const void *kv, const struct kv_layout *layout,
				  const int32_t *pages, int32_t n, double *sums);
	enum status (*sync)(struct backend *b);
	/*
	 * Reads device memory [p, p + bytes) once, as fast as the device can, and sums its 64-bit words: what a
	 * benchmark calls the read bandwidth. bytes is a multiple of 4096. NULL where the backend has none.
	 */
	enum status (*scan)(struct backend *b, const void *p, size_t bytes, uint64_t *sum);
	/*
	 * One phrase about what failed last, "" when nothing has; valid until the next failure. NULL where nothing is
	 * known.
	 */
	const char *(*last_failure)(const struct backend *b);
};

/* Every implementation begins with this. */
struct backend {
	const struct backend_ops *ops;
};

/* Fills page_bytes and page_stride from the other fields. INVALID when they overflow or the type has no KV form. */
enum status kv_layout_init(struct kv_layout *layout, int32_t n_layer, int32_t n_head_kv, int32_t head_dim,
                           enum quant_type type);
/* Makes it a layout of a narrow form: a page takes 2 * n_layer * n_head_kv * page_tokens * (head_dim + 4) bytes. */
void kv_layout_narrow(struct kv_layout *layout, enum kv_form form);
/* The layout of a slab that holds one layer of such pages, without anything in between. */
struct kv_layout kv_layout_of_layer(const struct kv_layout *layout);
/* "f16", "fp8_e4m3", "int8"; NULL past the end. */
const char *kv_form_name(enum kv_form form);
/* False when there is none of that name. */
bool kv_form_find(const char *name, enum kv_form *out);

/* What is asked of a pool: a form, and whether elements of two bytes are of a type or of the backend's own. */
struct kv_choice {
	enum kv_form form;
	bool own;
	enum quant_type type; /* unless own */
};

#define KV_CHOICES "auto, f16, bf16, int8 and fp8_e4m3"
/* One of KV_CHOICES, or NULL: "auto". False when there is none of that name. */
bool kv_choice_find(const char *name, struct kv_choice *out);
/*
 * Finds one and has the backend keep KV so, before anything has to do with KV. UNSUPPORTED (param kv-dtype): it cannot.
 */
enum status kv_choice_make(struct backend *b, const char *name, struct kv_choice *out, struct error *err);

/*
 * A vector's codes in a narrow form, `step` bytes apart, and its scale: x ~ scale * code, with the error that
 * tier_codec.h names; values beyond +-most are held there. NaN: the vector has a value that is no number, or infinite,
 * and all codes are 0. A vector below 2^-100 becomes zeros: 1 / scale would be no float.
 */
static inline float kv_form_pack(enum kv_form form, const float *x, int32_t n, float most, uint8_t *code, int32_t step)
{
	/* 1.5 * 2^23: see quant_fp8_from_float() */
	const float largest = form == KV_FORM_INT8 ? 127 : 448, rounder = 12582912.0f;
	float max = 0;
	bool finite = true;
	for (int32_t i = 0; i < n; i++) {
		float a = fabsf(x[i]);
		max = a > max ? a : max;
		finite &= a <= 3.402823466e38f;
	}
	max = max < most ? max : most;
	bool nothing = !finite || max < 0x1p-100f;
	float inverse = nothing ? 0 : largest / max;
	for (int32_t i = 0; i < n; i++) {
		float held = x[i] > most ? most : x[i] < -most ? -most : x[i];
		float y = finite ? held * inverse : 0;
		code[(int64_t)i * step] =
			form == KV_FORM_INT8 ? (uint8_t)(int8_t)((y + rounder) - rounder) : quant_fp8_from_float(y);
	}
	return !finite ? NAN : nothing ? 0 : max / largest;
}

/* The layout of such a cache in the backend's own type. */
enum status kv_layout_for(const struct backend *b, struct kv_layout *layout, int32_t n_layer, int32_t n_head_kv,
                          int32_t head_dim);

/* How a backend is chosen: "cpu" (the fastest kind this machine has), "cpu-reference", "cpu-avx2", "cpu-neon", ... */
struct backend_options {
	const char *device;
	int32_t n_threads; /* 0: one per physical core this process may use */
};

/* One row per device kind in backend.c. UNSUPPORTED names what the machine lacks; INVALID an unknown device. */
enum status backend_create(const struct backend_options *options, struct backend **out, struct error *err);
