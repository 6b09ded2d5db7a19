/*
 * The fast CPU backends. One body of code (fast*.c, pack.c) drives a table of kernels; each
 * instruction set fills that table from the same kernel sources (kernels_*.h) over its own vector primitives
 * (simd_*.h).
 *
 * Vector lanes are outputs, tokens or dimensions, never the terms of one sum: a sum over a row runs in one fixed order
 * inside one lane, whatever the number of rows or threads, so results do not depend on them.
 *
 * A weight matrix is repacked into tiles of `lanes` outputs (tile_floats for float formats) over all inputs:
 *
 * - Quantised formats. Inputs are cut into units of 32. A unit's integers, made unsigned by adding the format's offset,
 *   stand as 8 subvectors j of [lanes][4]: lane l holds inputs 4j..4j+3 of output l. They are stored in bit planes,
 *   each a run of whole vectors of 4 * lanes bytes:
 *     4-bit plane  4 vectors: vector i has subvector i in its low nibbles and i + 4 in its high ones
 *     2-bit plane  2 vectors: vector i has subvector 4i + s at bits 2s
 *     1-bit plane  1 vector: subvector j at bit j
 *     8-bit plane  8 vectors
 *   A tile is a run of spans of 8 units (the last may be shorter): first the span's scales, padded to whole vectors,
 *   then the planes of its units. Memory is thus read in one stream, which the prefetchers of processors need; apart,
 *   planes and scales were read at half the speed. struct pack_format says which scales there are.
 * - Float formats: [n_in][tile_floats] elements; BF16: [n_in / 2, rounded up][tile_floats][2], since the instructions
 *   that multiply them take pairs.
 */
#pragma once

#include "engine/cpu/cpu.h"
#include "engine/cpu/memory.h"
#include "engine/cpu/watch.h"

enum {
	UNIT = 32,         /* inputs that share an activation scale */
	SPAN_UNITS = 8,    /* units of a span, and of a K-quant super-block */
	ROWS_MAX = 8,      /* rows a matmul kernel takes at once */
	ATTN_BLOCK = 64,   /* positions between two updates of the running softmax */
	ATTN_QUERIES = 64, /* query vectors that an attention item takes at once, at most */
};

/*
 * 32 activations of a row, quantised: x = d * q. Eight bits do for most units. Those whose largest value is above the
 * root mean square of the row's units' by more than the square root of two get sixteen, as nearly all of the error of
 * eight bits comes from them: what d * q leaves is quantised again, as another unit with a d of a 256th. On
 * SmolLM2-135M the mean error of log-probabilities is 0.025 with them and above 0.04 without; 0.020 if all above the
 * mean have them.
 *
 * A tenth of the units are such, and they tend to be the same ones in many rows. Of many rows a product therefore goes
 * through the units with those that have more of them by itself; of few, a kernel takes these parts along, row by row.
 * The fine parts are summed up by themselves either way, in ascending order, and added last.
 */
struct act {
	int8_t q[UNIT];
	float d;
	int32_t minus_sum[3]; /* -sum of q: first half, second half, all */
	float sum[3];         /* d * sum of q, likewise */
	int32_t unused;
};

enum pack_planes {
	PLANES_8,
	PLANES_4,
	PLANES_4_1,
	PLANES_4_2,
	PLANES_2,
	PLANES_2_1,
	PLANES_F32,
	PLANES_F16,
	PLANES_BF16
};

/* How a quantised format is packed: one table row each (pack.c). */
struct pack_format {
	enum quant_type type;
	enum pack_planes planes;
	int groups;       /* scales per unit: 1, or 2 for 16 inputs each; 0: a float format */
	/* x = scale * q + min; after each scale stands its minimum (negated for K-quants, which subtract it) */
	bool has_min;
	/* scale = half d per super-block, at the start of its span, * int8 per group; else a half per unit */
	bool super;
};

/* The row of a type, or NULL. */
const struct pack_format *pack_format(enum quant_type type);
bool pack_is_float(const struct pack_format *f);

struct weight {
	struct weight_desc desc;
	const struct pack_format *format;
	int64_t n_units;    /* quantised: n_in / UNIT */
	int64_t n_tiles;
	int32_t tile_outs;
	size_t tile_bytes;
	size_t bytes;       /* n_tiles * tile_bytes; 0 for a table */
	char *tiles;        /* NULL for a table */
};

/* Fills n_units .. bytes. INVALID when sizes overflow. */
enum status pack_layout(struct weight *w, int lanes, int tile_floats);
/* Packs tiles [begin, end) of w->desc.data into w->tiles, which is zeroed. */
void pack_tiles(const struct weight *w, int lanes, int64_t begin, int64_t end);

/* A tile, or several quantised ones in a row, times a group of rows. */
struct tile_job {
	const char *tile;
	int n_tiles;           /* quantised: 1, or, without `fine`, as many as kernels take at once */
	size_t tile_bytes;
	int64_t n_units;       /* quantised */
	const struct act *act; /* [n_units][rows]; one unit only: [rows] */
	/*
	 * Fine parts that are taken along: [n_units][rows], of which the first n_fine[unit] are there, of rows
	 * fine_row. NULL: none.
	 */
	const struct act *fine;
	const int32_t *fine_row, *n_fine;
	int64_t unit;          /* one unit only: which, */
	const int32_t *row;    /* [rows] whose rows these are, */
	/* [..][lanes] and the sums to add to, by row; all units: [rows][lanes] to add in the end, or NULL */
	float *sums;
	int64_t sums_stride;   /* floats between those of a tile and of the next */
	int64_t n_in;          /* float formats */
	const float *x;        /* [rows][n_in] */
	const uint16_t *narrow; /* BF16: [rows][n_in rounded up to even] the same as bfloat16, or NULL: x counts */
	float *y;              /* first output of the tile in the first row */
	int64_t y_stride;      /* floats between rows of y */
	int n_outs;            /* outputs of the tiles that exist */
	const float *bias;     /* of the first output, or NULL */
	bool accumulate;
};

/* The weights of a query in a block of positions, relative to what was its maximum then. */
struct block_weights {
	float page[ATTN_BLOCK / KV_PAGE_TOKENS]; /* their sums by pages */
	float product; /* the sum of weights, each times its logarithm to the base of two */
	float max;
};

/*
 * Query vectors of some KV heads in a row over a run of positions: see kernels_attention.h. N = n_heads * n_queries <=
 * ATTN_QUERIES.
 */
struct attn_job {
	const char *kv;              /* the slab, moved to the layer and the first KV head */
	size_t page_stride;
	const int32_t *block_table;  /* of pages from first_page on */
	int32_t first_page;
	int32_t head_dim;
	/* positions [from, to): whole blocks but for the end; the first ones may be before all of `first` */
	int32_t from, to;
	/* of the positions in the block table: what follows `to` is likely to be read next */
	int32_t end;
	int n_heads;                 /* KV heads */
	int n_queries;               /* query vectors of each */
	/* [n_queries] ascending: query i of each head sees positions below limit[i], ... */
	const int32_t *limit;
	const int32_t *first;        /* [n_queries] ascending: ... from first[i] on */
	float softcap;               /* of scores in powers of two; 0: none */
	void *q; /* [N], head_dim floats' room for each: what attn_query() made, times scale * log2(e) */
	float *score;                /* [N][ATTN_BLOCK] scratch */
	float *max, *sum;            /* [N] running maximum and sum of weights */
	float *acc;                  /* [N][head_dim] running weighted sum of V */
	const float *plus; /* [n_plus] to be added to scores of the first positions, as natural logarithms; whole
			      blocks. NULL: nothing */
	int32_t n_plus;
	/* [N][n_blocks] of the blocks from first_block on, all zeros with the lowest maximum; NULL: not wanted */
	struct block_weights *weights;
	int32_t first_block, n_blocks;
	float *turned; /* [head_dim] scratch */
	void *unpacked; /* [ATTN_BLOCK / 16][2][16 * head_dim] scratch, of floats or of what takes less */
	/* For narrow KV: */
	const char *slab;
	const struct kv_layout *layout;
	int32_t layer, head_kv;      /* the first */
};

/* Bounds of n pages for the queries of a row that share a KV head: see struct kv_bounds. */
struct bound_job {
	const char *bounds;        /* the slab of bounds, moved to the layer and KV head */
	const int32_t *pages;      /* [n] */
	int32_t n;
	int32_t head_dim, n_heads;
	/* [n_heads][head_dim] the queries' elements above zero, and below, zeros for the others */
	const float *plus, *minus;
	float *bound;              /* [n] the largest of the queries', or no number where one of them is none */
};

/* What depends on the elements of KV pages, and on how they lie. */
struct cpu_pages {
	enum quant_type type;
	enum kv_block_order keys, values;
	int item_queries; /* query vectors of an attention item, up to ATTN_QUERIES */

	/* One position of one head, to its places in a page: see kernels_pages_*.h. */
	void (*kv_store)(const float *k, const float *v, int32_t head_dim, int32_t token, uint16_t *k_page,
	                 uint16_t *v_page);
	/* A query, q * scale, in the form attn_run() takes. */
	void (*attn_query)(const float *q, float scale, int32_t head_dim, void *out);
	void (*attn_run)(const struct attn_job *j);
	void (*attn_bound)(const struct bound_job *j);
	/* The same over narrow KV, and its kv_store(). */
	void (*attn_run_narrow)(const struct attn_job *j);
	void (*narrow_store)(enum kv_form form, const float *k, const float *v, int32_t head_dim, int32_t token,
	                     struct narrow_block *to);
	/* A narrow block as one of a page that is not narrow. */
	void (*narrow_widen)(enum kv_form form, const struct narrow_block *from, int32_t head_dim, uint16_t *to);
};

struct cpu_kernels {
	const char *name, *detail;
	int lanes;
	int tile_floats;   /* outputs of a float tile */
	int rows_quant;    /* rows a kernel takes at once, of quantised, */
	int tiles_quant;   /* and how many tiles, if there are so many rows */
	int rows_float;    /* ... and of float formats */
	const struct cpu_pages *pages[2]; /* the best first */

	/*
	 * out: [n_in / UNIT][rows]; fine[unit * fine_stride + row]: whether eight bits are too few, as always for
	 * `precise`.
	 */
	void (*quantize)(const float *x, int64_t n_in, int rows, bool precise, struct act *out, uint8_t *fine,
	                 int64_t fine_stride);
	/* What quantize() leaves of the unit at x, quantised. */
	void (*refine)(const float *x, struct act *out);
	/*
	 * x as bfloat16, rounded to nearest, for products with BF16 weights; out: n rounded up to even. NULL: they take
	 * x as it is.
	 */
	void (*narrow)(const float *x, int64_t n, uint16_t *out);
	/* rows: 1 .. rows_quant or rows_float; several tiles: rows_quant */
	void (*tile)(const struct tile_job *j, enum quant_type type, int rows);
	/* Adds the products of one unit of quantised tiles. */
	void (*tile_add_unit)(const struct tile_job *j, enum quant_type type, int rows);
	/*
	 * For rows whose units all have fine parts. widen() makes both parts of a unit one, in the place of the fine
	 * one, which tile_wide() then takes at once. NULL: tile() is as good.
	 */
	void (*widen)(struct act *coarse, struct act *fine);
	void (*tile_wide)(const struct tile_job *j, enum quant_type type, int rows);

	/* add: to what out has. */
	void (*rms_norm)(const float *x, int32_t dim, const float *gain, float eps, bool add, float *out);
	void (*glu)(enum glu f, float *gate, const float *up, int64_t n);
	void (*softcap)(float *x, int64_t n, float cap);
	/* Rotates one head. cs: cosines and sines, [n_dims / 2][2] when interleaved, [2][n_dims / 2] for halves. */
	void (*rope)(float *x, int32_t n_dims, enum rope_pairing pairing, const float *cs);
	kv_peak *peak;

	/* Folds a later run (max, sum, acc) into an earlier one. */
	void (*attn_fold)(float *max, float *sum, float *acc, float max2, float sum2, const float *acc2,
	                  int32_t head_dim);
	/* out = acc / sum */
	void (*attn_finish)(const float *acc, float sum, int32_t head_dim, float *out);
};

/* Those of x86-64 and of 64-bit ARM; a build has either. */
extern const struct cpu_kernels cpu_kernels_avx2, cpu_kernels_avx512, cpu_kernels_avx512_bf16;
extern const struct cpu_kernels cpu_kernels_neon, cpu_kernels_neon_dotprod;
/* Halves and bfloat16s that become floats as they are read, and bfloat16s that are multiplied as they are. */
extern const struct cpu_pages cpu_pages_avx2, cpu_pages_avx2_bf16, cpu_pages_avx512, cpu_pages_avx512_plain_bf16,
	cpu_pages_avx512_bf16;
extern const struct cpu_pages cpu_pages_neon, cpu_pages_neon_dotprod, cpu_pages_neon_bf16;

struct attn_plan;

/*
 * Sines and cosines of a step's rows. A model turns by one set of angles or, where some layers have their own, by two.
 */
enum { ROPE_TABLES = 2 };
struct rope_table {
	struct scratch table;            /* float [n_rows][n_dims], in the order kernels->rope takes */
	const struct rope_params *valid; /* whose it is; NULL: nobody's yet in this step */
};

struct fast {
	struct cpu_base base;
	const struct cpu_kernels *kernels;
	const struct cpu_pages *pages;
	const struct amx_kernels *amx;        /* NULL: none */
	struct memory_heap weights;           /* tiles of all matrices */
	int64_t max_in, max_narrow_in;        /* widest matrix so far, and widest of BF16 */
	struct scratch act;                   /* struct act: quantised activations of the matmul at hand */
	struct scratch is_fine;               /* uint8_t [n_units][n_rows]: which have a fine part */
	/* Their fine parts, for each block of rows; [n_rows] are those of a block. */
	/* struct act [n_units][n_rows]: of a unit, all or those of n_fine rows ... */
	struct scratch fine;
	struct scratch fine_row;              /* int32_t [n_units][n_rows]: ... which are these, ascending */
	struct scratch n_fine;                /* int32_t [n_units] */
	struct scratch fine_unit;             /* int32_t [n_units]: units that have such rows, ascending, */
	struct scratch n_fine_units;          /* int32_t: and how many there are */
	struct scratch fine_sums;             /* float [n_threads][tiles_quant][rows of a block at most][lanes] */
	/* uint16_t [n_rows][n_in], both rounded up: see narrow_stride() and narrow_room() */
	struct scratch narrow;
	struct scratch amx_scratch;           /* [n_threads][amx_scratch_bytes()] */
	struct rope_table rope[ROPE_TABLES];
	struct rope_table turns; /* float [n_rows][ROPE_CHUNKS_FAR][n_dims]: by what queries are turned further, see
				    fast_turns() */
	struct attn_plan *plan;
};

struct amx_kernels; /* amx.h */

/*
 * A backend over kernels whose instructions this machine has (isa.c). amx: what products go through where they can, or
 * NULL.
 */
enum status fast_create(const struct cpu_kernels *kernels, const struct amx_kernels *amx, int32_t n_threads,
                        struct backend **out, struct error *err);

/*
 * Sines and cosines by which the queries of the step's rows are turned further for keys of chunks before their own, as
 * fast.turns has them: those of row r for keys of the chunk before at [r][0], for others at [r][1].
 */
enum status fast_turns(struct fast *f, const struct rope_params *params);

/* Where the K of a layer and head lies in a page that is not narrow, or in a wide copy; V is behind it. */
static inline size_t fast_kv_offset(const struct kv_layout *l, int32_t layer, int32_t head_kv)
{
	return ((size_t)layer * (size_t)l->n_head_kv + (size_t)head_kv) * 2 * (size_t)l->head_dim * KV_PAGE_TOKENS *
	       sizeof(uint16_t);
}

/* fast_kv.c */
enum status fast_kv_write(struct backend *b, void *kv, const struct kv_layout *layout, int32_t layer, const float *k,
			  const float *v);

/* fast_attention.c */
enum status attn_plan_create(struct attn_plan **out);
void attn_plan_destroy(struct attn_plan *p); /* NULL is allowed */
/* Makes room for steps of max_rows rows. */
enum status attn_plan_reserve(struct fast *f, int32_t max_rows, const struct kv_layout *layout);
/* The batch has changed. */
void attn_plan_reset(struct attn_plan *p);
enum status fast_attention(struct backend *b, const void *kv, const struct kv_layout *layout, int32_t layer,
                           const float *q, int32_t n_head, const struct attention_params *params, float *out);
enum status fast_page_bounds(struct backend *b, const void *kv, const struct kv_layout *layout, const int32_t *pages,
                             int32_t n);
enum status fast_attention_part(struct backend *b, const void *kv, const struct kv_layout *layout, int32_t layer,
                                const float *q, int32_t n_head, const struct attention_params *params,
                                const struct attention_part *part, float *out);
