/*
 * The kernels' launchers: what backend_cuda.cu calls. Each queues work on a stream and returns what the launch
 * reported. Pointers are device addresses.
 */
#pragma once

#include "cuda/gpu.cuh"

extern "C" {
#include "engine/backend.h"
}

namespace GPU_NS
{

/* ---- Weights (pack.cu) ---- */

/* Geometry of a format's packed form: inputs and bytes of a unit of 16 outputs. */
struct packed_form {
	int unit;
	int unit_bytes;
};
struct packed_form packed_form(enum quant_type type);

/* n_rows rows as they lie in the file become n_tiles tiles of n_units units. */
struct pack_args {
	const uint8_t *rows;
	size_t row_bytes;
	int n_rows, n_in, n_units, n_tiles;
	uint8_t *out;
};
cudaError_t pack(enum quant_type type, const struct pack_args &a, cudaStream_t stream);

struct embed_args {
	const uint8_t *raw; /* rows as in the file; NULL: read `packed` */
	size_t row_bytes;
	const uint8_t *packed;
	int n_units, n_in;
	const int32_t *token; /* [n_rows] */
	int n_rows;
	float scale; /* of all elements */
	float *out;  /* [n_rows][n_in] */
};
cudaError_t embed(enum quant_type type, const struct embed_args &a, cudaStream_t stream);

/* ---- Activations as products read them ---- */

/*
 * Rows of halves times a power of two that keeps the row's largest element between 16 and 32: eleven bits of every
 * element, and no overflow. Elements between a row's length and the stride, a multiple of 256, are zeros where a
 * product may read them.
 */
struct halves {
	__half *x;    /* [n_rows][stride] */
	float *scale; /* [n_rows] what to multiply a product by */
	int stride;
};

/* ---- Products (product.cu) ---- */

enum { MAX_PRODUCTS = 4 };

struct product {
	const uint8_t *packed;
	const float *bias; /* or NULL */
	float *y;	   /* [n_rows][n_out] */
	int n_out;
	int first_block; /* filled in by product() */
	int accumulate;
};

struct products {
	struct product p[MAX_PRODUCTS];
	int n;
};

/* y = x W^T (+ bias) (+ y) for products of one format and one width of input, n_units packed units long. */
cudaError_t product(enum quant_type type, struct products &ps, int n_units, const struct halves &x, int n_rows,
		    cudaStream_t stream);

/* ---- Rows (rows.cu) ---- */

/* x[n_rows][dim] to halves. */
cudaError_t to_halves(const float *x, int n_rows, int dim, const struct halves &h, cudaStream_t stream);
/* h.x NULL: floats only. */
cudaError_t rms_norm(const float *x, int64_t n, int dim, const float *gain, float eps, float *out,
		     const struct halves &h, cudaStream_t stream);
/* out += the normed rows. */
cudaError_t rms_norm_add(const float *x, int n, int dim, const float *gain, float eps, float *out, cudaStream_t stream);
cudaError_t gate_rows(enum glu f, float *gate, const float *up, int n_rows, int dim, const struct halves &h,
		      cudaStream_t stream);
cudaError_t softcap(float *x, int64_t n, float cap, cudaStream_t stream);
/* rows, from and to: host memory, free after the call. */
cudaError_t gather_rows(const float *x, int dim, const int32_t *rows, int n, float *out, cudaStream_t stream);

/* A step's rows as the kernels see them, made by step_begin. */
struct step_rows {
	const int32_t *place;	  /* [n_rows] as their block tables count */
	const int32_t *row_seq;	  /* [n_rows] */
	const int32_t *seq_table; /* [n_seqs] where a sequence's block table begins in `table` */
	const int32_t *table;
	const int32_t *slots; /* beside `table`: where each page's wide copy is, or -1; NULL: none has one */
	int n_rows;
};

enum { ROPE_MAX_PAIRS = 128 };

/* inv_freq: host memory, at most ROPE_MAX_PAIRS. */
struct rope_table_args {
	const float *inv_freq;
	float magnitude;
	int pairs;
	struct rope_chunks chunks;
	const int32_t *position; /* [n_rows] */
	int n_rows;
};

/* table[n_rows][pairs] = cosine and sine of each row's angles, times magnitude. */
cudaError_t rope_table(const struct rope_table_args &a, float2 *table, cudaStream_t stream);
/*
 * table[n_rows][ROPE_CHUNKS_FAR][pairs]: of the angles by which queries are turned further for keys of the chunk before
 * theirs, and of the others.
 */
cudaError_t chunk_table(const struct rope_table_args &a, float2 *table, cudaStream_t stream);

enum { CHUNK_KINDS = ROPE_CHUNKS_FAR + 1 };

/* Queries as they meet the keys of each kind of chunk (enum rope_chunk): struct attention_args.turned. */
struct chunk_args {
	const float *q; /* [n_rows][n_head][head_dim] */
	int n_rows, n_head, head_dim;
	int pairs, interleaved;  /* as in struct rope_args */
	const float2 *table;     /* of chunk_table() */
	const int32_t *position; /* [n_rows] */
	int size;                /* of a chunk, in tokens */
	float scale;             /* of all elements */
	__half *out;
};
cudaError_t turn_queries(const struct chunk_args &a, cudaStream_t stream);

struct rope_args {
	float *q; /* [n_rows][n_head][head_dim], or NULL */
	float *k; /* [n_rows][n_head_kv][head_dim], or NULL */
	int n_head, n_head_kv, head_dim;
	int pairs;	 /* 0: nothing is rotated */
	int interleaved; /* pairs are neighbours; else they are `pairs` apart */
	const float2 *table;
};

/*
 * What kernels call pages of bfloat16s, to tell them from those of halves: backend.h has them as KV_FORM_F16 with
 * another element type.
 */
static constexpr enum kv_form PAGES_BF16 = KV_N_FORMS;

/* Whether an element of a page is what it stands for, rather than a code with a scale. */
__host__ __device__ constexpr bool is_plain(enum kv_form form)
{
	return form == KV_FORM_F16 || form == PAGES_BF16;
}

/* Pages of one layer. */
struct kv_place {
	enum kv_form form; /* or PAGES_BF16 */
	size_t page_stride;
	size_t layer_offset;			/* bytes from a page's beginning to the layer */
	size_t wide_offset, wide_stride;	/* of wide copies: from the slab's beginning, and of one */
	size_t wide_layer_offset;		/* as layer_offset, in a wide copy */
};

struct kv_args {
	uint8_t *kv; /* the pool's slab, or NULL: nothing is stored */
	struct kv_place place;
	const float *v;	      /* [n_rows][n_head_kv][head_dim] */
	struct odd_values *odd; /* NULL: nobody looks */
};

/* What a step has stored that halves cannot hold: counts, and for each row whether there was something. */
struct odd_values {
	uint32_t n_lost;    /* vectors of narrow pages without a wide copy that are no numbers */
	uint32_t n_clamped; /* other vectors with values beyond KV_HALF_MAX */
	uint32_t rows[];    /* [n_rows] ODD_* */
};

enum { ODD_NO_NUMBER = 1, ODD_BEYOND = 2 };

/* Rotates q and k in place, then stores k and v in their pages. */
cudaError_t rope_and_store(const struct rope_args &r, const struct kv_args &kv, const struct step_rows &rows,
			   cudaStream_t stream);

/* ---- Attention (attention.cu) ---- */

enum { SPLIT_TOKENS = 128 };

static constexpr float LOG2_E = 1.44269504f; /* scores are in base 2 */

/* Some rows of one sequence. */
struct attention_item {
	int32_t seq;
	int32_t first_row;
	int32_t n_rows;
	int32_t first_position; /* of first_row */
	int32_t first_split;	/* of a part: which split; of another: which turn it has, see put_whole() in plan.cu */
	/*
	 * Of a part, where its first row's partial results are. Of another, where its pages' weights are:
	 * [head_kv][page]
	 */
	int32_t partial;
	int32_t tells; /* its rows say what they gave to pages */
	/*
	 * Of a part whose row has chosen: where the list of its first KV head begins in attention_args.chosen,
	 * first_position and splits being those of a conversation of nothing else. CHOSEN_NONE: it reads its block
	 * table.
	 */
	int32_t chosen;
};

enum { CHOSEN_NONE = -1 };

/* Where a row's partial results are: splits follow each other by `stride` slots. */
struct merge_item {
	int32_t row;
	int32_t place; /* as that of its parts */
	int32_t first_slot, stride;
	int32_t n_splits;
	int32_t mass, look; /* as in attention_tells */
};

/*
 * To whom rows say what they gave: where their sequence's entries begin in attention_args.masses, and which of its
 * looks is theirs; or NOBODY.
 */
struct attention_tells {
	int32_t mass, look;
};

enum { NOBODY = -1 };

/*
 * What a query gave to the tokens of a page: their weights added up, the weights times their binary logarithms, the
 * largest; weights are relative to 2^max.
 */
struct alignas(16) page_weight {
	float sum, product, largest, max;
};

/* struct attention_look on the device. */
struct look_sums {
	unsigned long long n, entropy, largest;
};

/*
 * A sequence whose first places' logits are raised (batch_seq.plus): where what is added begins in attention_args.plus,
 * and of how many pages it is. n_pages 0: none is.
 */
struct attention_raise {
	int32_t first, n_pages;
};

struct attention_args {
	const uint8_t *kv;
	struct kv_place place;
	int n_head, n_head_kv, head_dim;
	struct attention_params params;
	const float *q;	 /* [n_rows][n_head][head_dim] */
	float *out;	 /* likewise */
	struct halves h; /* the same in halves, scale 1; x NULL: not wanted */
	const int32_t *seq_table, *table, *slots; /* as in step_rows */
	const int32_t *row_place;		  /* its `place` */
	const int32_t *chosen;			  /* entries of `table`, by lists; NULL: no row has chosen */
	const struct attention_item *parts; /* one split of the keys each, their results to be merged */
	int n_parts;
	const struct attention_item *whole; /* all keys, by tiles of rows */
	int n_whole;
	const struct merge_item *merges;
	int n_merges;
	float *partial; /* [slots][n_head][2 + head_dim]: largest score, sum of weights, weighted values */
	/*
	 * NULL: no row tells. Of parts [slots][n_head][SPLIT_TOKENS / KV_PAGE_TOKENS], of others [item's
	 * partial][queries of a block]
	 */
	struct page_weight *part_weights, *whole_weights;
	const struct attention_tells *tells; /* [n_seqs] */
	unsigned long long *masses;	     /* beside `table`, in units of 2^-KV_MASS_BITS */
	struct look_sums *looks;	     /* [n_seqs] */
	/*
	 * Of a sequence with far pages, one part: pages [part_first, part_end) in part_table from part_first on, or if
	 * that is NULL in the sequence's own. Items of `whole` go on with `state`, unless it is the first, and leave
	 * it, unless it is the last.
	 */
	bool in_parts, goes_on, is_last;
	const int32_t *part_table;
	int part_first, part_end;
	/* of items of `whole` in parts, of those that tell, and with `turned` or `raises`: [block][register][thread] */
	float *state;
	/*
	 * NULL, or the queries that keys of chunks meet, times the scale, in powers of two: [n_rows][CHUNK_KINDS]
	 * [n_head][head_dim]. Of a kind that no key of a row is of, there may be anything. Then an item's rows are of
	 * one chunk, of chunk_pages pages.
	 */
	const __half *turned;
	int chunk_pages;
	const struct attention_raise *raises; /* [n_seqs]; NULL: nobody's logits are raised */
	const float *plus;		      /* in powers of two */
};

/* Rows of one item of `parts` and of `whole` for a model's heads. */
int part_rows(int n_head, int n_head_kv);
int whole_rows(int n_head, int n_head_kv, int head_dim);
/* Queries of a block of `whole`, and floats of the state that one leaves. */
int whole_queries(int head_dim);
size_t whole_state(int head_dim);
/* head_dim must be a multiple of 8 up to 256, and a KV head serve at most 64 query heads. */
bool attention_supports(int n_head, int n_head_kv, int head_dim);
cudaError_t attention(const struct attention_args &a, cudaStream_t stream);

/* ---- Choices (choice.cu) ---- */

/* A row that chooses (struct page_choice). n_pages 0: there is none here. */
struct chooser {
	int32_t row;
	int32_t table; /* where its block table begins in attention_args.table */
	int32_t own;   /* its own entry */
	int32_t n_first, n_last, n_pages;
	int32_t chosen; /* where the list of its first KV head goes: n_pages entries for each */
};

/*
 * What kernels leave for each other has room for so much, and more of it is done in turns; on the execution model for
 * little, so that tests take turns too. PARTIAL_BYTES: of partial results. WEIGHTS_AT_ONCE: pages' weights of whole
 * items, each of which is 2 KiB at most. CHOOSERS_AT_ONCE: rows of an answer that is computed again may be many.
 */
#ifdef KVASIR_HOST_CUDA
enum { PARTIAL_BYTES = 64 << 10, WEIGHTS_AT_ONCE = 32, CHOOSERS_AT_ONCE = 4 };
#else
enum { PARTIAL_BYTES = 256 << 20, WEIGHTS_AT_ONCE = 65536, CHOOSERS_AT_ONCE = 128 };
#endif

struct choice_args {
	const uint16_t *bounds; /* of the layer: [n_head_kv][n_pages][least, greatest][head_dim] */
	bool bf16;
	int n_pages; /* of the pool */
	int n_head, n_head_kv, head_dim;
	const float *q; /* [n_rows][n_head][head_dim] */
	const int32_t *table;
	const struct chooser *choosers;
	int n_choosers;
	int most;	 /* entries of any chooser's table, its own among them */
	float *scores;	 /* [n_choosers, but CHOOSERS_AT_ONCE at most][n_head_kv][most] */
	int32_t *chosen; /* entries of `table` */
};
cudaError_t choose_pages(const struct choice_args &a, cudaStream_t stream);

/* ---- Pages (pages.cu, choice.cu) ---- */

/* from[i] to to[i], at most PAGE_LIST_MAX: bytes of them from the slab's beginning. */
enum { PAGE_LIST_MAX = 128 };

struct page_list {
	size_t from[PAGE_LIST_MAX], to[PAGE_LIST_MAX];
};

cudaError_t copy_pages(uint8_t *kv, size_t page_bytes, const struct page_list &list, int n, cudaStream_t stream);

/*
 * A page of halves, or of bfloat16s, and its narrow form as kv_codec_pack() (engine/kv/tier_codec.h) has it. packed:
 * [vectors] scales, then [vectors][head_dim] codes; *odd becomes nonzero when the page has values without such a form,
 * and is not touched otherwise.
 */
cudaError_t pack_page(enum kv_form form, const uint8_t *page, bool bf16, int n_layer, int n_head_kv, int head_dim,
		      uint8_t *packed, uint32_t *odd, cudaStream_t stream);
cudaError_t unpack_page(enum kv_form form, const uint8_t *packed, int n_layer, int n_head_kv, int head_dim,
                        uint8_t *page, bool bf16, cudaStream_t stream);

/*
 * Fills wide copies of narrow pages from them: from[i] is the page's, to[i] its copy's offset in the slab. layer_bytes,
 * wide_layer_bytes: of a layer in either.
 */
cudaError_t fill_wide(enum kv_form form, uint8_t *kv, const struct page_list &list, int n, int n_layer, int n_head_kv,
                      int head_dim, size_t layer_bytes, size_t wide_layer_bytes, cudaStream_t stream);

struct page_numbers {
	int32_t page[2 * PAGE_LIST_MAX];
};

struct bound_args {
	const uint8_t *kv;
	struct kv_place place; /* of any layer */
	size_t layer_bytes, wide_layer_bytes;
	int n_layer, n_head_kv, head_dim;
	uint16_t *bounds; /* [n_layer][n_head_kv][n_pages][least, greatest][head_dim] */
	int n_pages;	  /* of the pool */
};
/* Bounds of the keys in n full pages, of all layers. slots: their wide copies, or -1. */
cudaError_t bound_pages(const struct bound_args &a, const struct page_numbers &list, const struct page_numbers &slots,
			int n, cudaStream_t stream);

/*
 * Sums of squares in whole pages of halves, or of bfloat16s: sums[n][n_layer][2], of a layer's keys and of its values,
 * each added up in the same order whatever else is asked.
 */
cudaError_t square_sums(const uint8_t *kv, bool bf16, const struct page_numbers &list, int n, int n_layer,
			size_t page_stride, size_t layer_bytes, double *sums, cudaStream_t stream);

/* Adds the sum of the 64-bit words of [p, p + bytes) to *sum; bytes is a multiple of 4096. */
cudaError_t scan(const uint8_t *p, size_t bytes, unsigned long long *sum, cudaStream_t stream);

/* ---- Sampling (sample.cu) ---- */

/* struct sample_row on the device. */
struct choice {
	int32_t output, top_k;
	float temperature, top_p, min_p;
	int32_t first_edit, n_first, n_edits; /* in the array of all rows' edits */
	double unit;
};

/* tokens[n] from rows of logits[..][stride], which change; n_vocab at most 524,288. */
cudaError_t choose_tokens(float *logits, int n_vocab, int stride, const struct choice *choices,
			  const struct sample_edit *edits, int n, int32_t *tokens, cudaStream_t stream);

} // namespace GPU_NS
