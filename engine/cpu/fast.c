/* The fast backends: weights, matmul and row operations over a table of kernels. Layouts: fast.h. */
#include "engine/cpu/fast.h"

#include "engine/cpu/amx.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
	PIECE_BYTES = 256 << 10,      /* smallest share of weights worth handing to a thread */
	BLOCK_BYTES = 256 << 10,     /* weights that stay in the second-level cache while all rows pass by, */
	ACT_BYTES = 256 << 10,       /* beside quantised activations of a block of rows, */
	/* which has this many rows at most, so that a tile's sums of their fine parts stay in the first */
	BLOCK_ROWS = 256,
	INLINE_FLOATS = 8 << 10,     /* row operations below this size are quicker done alone */
	/* rows whose fine parts kernels take along; more are worth the lists of those that have one in a unit */
	FINE_ALONG = 32,
};

static struct fast *self(const struct backend *b)
{
	return (struct fast *)b;
}

static int64_t min_i64(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

/* Rows of `width` floats that make a piece for a thread. */
static int64_t row_grain(int64_t width)
{
	return INLINE_FLOATS / width + 1;
}

/* ---- Weights ---- */

struct pack_job {
	const struct weight *w;
	int lanes;
};

static void pack_range(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct pack_job *j = arg;
	(void)thread;
	pack_tiles(j->w, j->lanes, begin, end);
}

/* Whether products with it go through the tiles of AMX, unless they are to be precise. */
static bool takes_amx(const struct fast *f, const struct weight *w)
{
	return f->amx && (!pack_is_float(w->format) || w->format->type == QUANT_BF16);
}

/* Whether they take activations as bfloat16s. */
static bool takes_narrow(const struct fast *f, const struct weight *w)
{
	return takes_amx(f, w) || (w->format->type == QUANT_BF16 && f->kernels->narrow);
}

static enum status weight_create(struct backend *b, const struct weight_desc *desc, struct weight **out,
                                 struct error *err)
{
	struct fast *f = self(b);
	enum status s = cpu_check_weight(desc, err);
	if (s != STATUS_OK)
		return s;
	struct weight *w = calloc(1, sizeof *w);
	if (!w)
		goto no_memory;
	w->desc = *desc;
	w->format = pack_format(desc->format->type);
	if (!w->format) {
		free(w);
		return error_set(err, STATUS_UNSUPPORTED, "no kernel for the format %s of \"%s\"", desc->format->name,
		                 desc->name);
	}
	if (!desc->rows_only) {
		if (pack_layout(w, f->kernels->lanes, f->kernels->tile_floats) != STATUS_OK)
			goto no_memory;
		w->tiles = memory_heap_alloc(&f->weights, w->bytes);
		if (!w->tiles)
			goto no_memory;
		struct pack_job j = {w, f->kernels->lanes};
		threads_for(f->base.threads, w->n_tiles, 1, pack_range, &j);
		cpu_memory_cool(desc->data, cpu_row_bytes(desc) * (size_t)desc->n_out);
	}
	f->max_in = desc->n_in > f->max_in ? desc->n_in : f->max_in;
	if (takes_narrow(f, w) && desc->n_in > f->max_narrow_in)
		f->max_narrow_in = desc->n_in;
	*out = w;
	return STATUS_OK;

no_memory:
	free(w);
	return error_set(err, STATUS_NOMEM, "no memory for matrix \"%s\"", desc->name);
}

static void weight_destroy(struct backend *b, struct weight *w)
{
	if (w)
		memory_heap_free(&self(b)->weights, w->tiles, w->bytes);
	free(w);
}

static size_t weight_bytes(const struct backend *b, const struct weight *w)
{
	(void)b;
	return w->bytes;
}

struct embed_job {
	const struct weight_desc *desc;
	const int32_t *token;
	float scale;
	float *out;
};

static void embed_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct embed_job *j = arg;
	const struct weight_desc *d = j->desc;
	(void)thread;
	for (int64_t i = begin; i < end; i++) {
		float *out = j->out + i * d->n_in;
		d->format->dequantize((const char *)d->data + (size_t)j->token[i] * cpu_row_bytes(d), out,
		                      (size_t)d->n_in);
		for (int64_t k = 0; k < d->n_in && j->scale != 1; k++)
			out[k] *= j->scale;
	}
}

static enum status embed(struct backend *b, const struct weight *w, float scale, float *out)
{
	const struct batch *batch = self(b)->base.batch;
	for (int32_t i = 0; i < batch->n_rows; i++)
		if (batch->token[i] < 0 || batch->token[i] >= w->desc.n_out)
			return STATUS_INVALID;
	struct embed_job j = {&w->desc, batch->token, scale, out};
	threads_for(self(b)->base.threads, batch->n_rows, row_grain(w->desc.n_in), embed_rows, &j);
	return STATUS_OK;
}

/* ---- Matmul ---- */

struct matmul_job {
	const struct fast *f;
	const float *x;
	int64_t n_rows, n_in;
	const struct matmul *mm;
	int32_t n_mm;
	bool precise;
	bool narrow; /* those products that can take bfloat16s do */
	bool along; /* kernels take fine parts along: a block is what one call of them takes */
	bool wide;  /* ... and all units have them, as one with the other part */
	int64_t block_rows; /* rows whose fine parts are listed together */
};

/* What is kept of the fine parts of a block of rows: see struct fast. */
struct fine_block {
	int64_t first, n_rows;
	struct act *fine;           /* [n_units][n_rows] */
	int32_t *row;               /* [n_units][n_rows] counted from the first of the block */
	int32_t *n_fine;            /* [n_units] */
	int32_t *unit, *n_units;    /* [*n_units] */
};

static struct fine_block fine_block(const struct matmul_job *j, int64_t block)
{
	const struct fast *f = j->f;
	int64_t n_units = j->n_in / UNIT, first = block * j->block_rows;
	return (struct fine_block){
	        .first = first,
	        .n_rows = min_i64(j->block_rows, j->n_rows - first),
	        .fine = (struct act *)f->fine.p + first * n_units,
	        .row = (int32_t *)f->fine_row.p + first * n_units,
	        .n_fine = (int32_t *)f->n_fine.p + block * n_units,
	        .unit = (int32_t *)f->fine_unit.p + block * n_units,
	        .n_units = (int32_t *)f->n_fine_units.p + block,
	};
}

/* Of rows of bfloat16s: what the products read. */
static int64_t narrow_stride(const struct fast *f, int64_t n_in)
{
	return f->amx ? amx_stride(n_in) : (n_in + 1) & ~INT64_C(1);
}

/* Elements of n_rows such rows. */
static int64_t narrow_room(const struct fast *f, int64_t n_rows, int64_t n_in)
{
	return (f->amx ? amx_rows(n_rows) : n_rows) * narrow_stride(f, n_in);
}

static void narrow_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct matmul_job *j = arg;
	(void)thread;
	const int64_t stride = narrow_stride(j->f, j->n_in);
	for (int64_t row = begin; row < end; row++) {
		uint16_t *out = (uint16_t *)j->f->narrow.p + row * stride;
		j->f->kernels->narrow(j->x + row * j->n_in, j->n_in, out);
		memset(out + j->n_in, 0, (size_t)(stride - j->n_in) * sizeof *out);
	}
}

/* Items are groups of rows_quant rows. */
static void quantize_groups(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct matmul_job *j = arg;
	int64_t group = j->f->kernels->rows_quant;
	(void)thread;
	for (int64_t row = begin * group; row < end * group && row < j->n_rows; row += group)
		j->f->kernels->quantize(j->x + row * j->n_in, j->n_in, (int)min_i64(group, j->n_rows - row), j->precise,
		                        (struct act *)j->f->act.p + row * (j->n_in / UNIT),
		                        (uint8_t *)j->f->is_fine.p + row, j->n_rows);
}

/* Items are units of blocks of rows: collects the fine parts of those rows that have them. */
static void refine_units(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct matmul_job *j = arg;
	const int64_t n_units = j->n_in / UNIT;
	(void)thread;
	for (int64_t i = begin; i < end; i++) {
		struct fine_block b = fine_block(j, i / n_units);
		int64_t u = i % n_units;
		const uint8_t *is_fine = (const uint8_t *)j->f->is_fine.p + u * j->n_rows + b.first;
		struct act *fine = b.fine + u * b.n_rows;
		int32_t *row = b.row + u * b.n_rows, n = 0;
		for (int64_t r = 0; r < b.n_rows; r++) {
			if (!is_fine[r])
				continue;
			j->f->kernels->refine(j->x + (b.first + r) * j->n_in + u * UNIT, fine + n);
			if (j->wide)
				j->f->kernels->widen((struct act *)j->f->act.p + b.first * n_units + u * b.n_rows + r,
						     fine + n);
			row[n++] = (int32_t)r;
		}
		b.n_fine[u] = n;
	}
}

/* The units of each block that some row has a fine part of. */
static void list_fine_units(const struct matmul_job *j)
{
	for (int64_t block = 0; block * j->block_rows < j->n_rows; block++) {
		struct fine_block b = fine_block(j, block);
		*b.n_units = 0;
		for (int64_t u = 0; u < j->n_in / UNIT; u++)
			if (b.n_fine[u])
				b.unit[(*b.n_units)++] = (int32_t)u;
	}
}

typedef void tile_fn(const struct tile_job *j, enum quant_type type, int rows);

/* Several tiles at once where there are as many rows as kernels want for that, else one after the other. */
static void run_tiles(const struct cpu_kernels *k, tile_fn *run, const struct tile_job *tiles, enum quant_type type,
                      int rows)
{
	if (tiles->n_tiles == 1 || rows == k->rows_quant) {
		run(tiles, type, rows);
		return;
	}
	struct tile_job one = *tiles;
	one.n_tiles = 1;
	for (int t = 0; t < tiles->n_tiles; t++) {
		run(&one, type, rows);
		one.tile += tiles->tile_bytes;
		one.y += k->lanes;
		one.n_outs -= k->lanes;
		one.bias = one.bias ? one.bias + k->lanes : NULL;
		one.sums = one.sums ? one.sums + tiles->sums_stride : NULL;
	}
}

/*
 * Sums up the fine parts of a block's rows with some tiles, in sums[tiles][BLOCK_ROWS][lanes], as a kernel does that
 * takes both parts at once: by themselves, in ascending order.
 */
static void sum_fine(const struct matmul_job *j, const struct fine_block *b, enum quant_type type,
                     struct tile_job *tile, float *sums)
{
	const struct cpu_kernels *k = j->f->kernels;
	for (int t = 0; t < tile->n_tiles; t++)
		memset(sums + t * tile->sums_stride, 0, (size_t)b->n_rows * (size_t)k->lanes * sizeof *sums);
	tile->sums = sums;
	for (int32_t i = 0; i < *b->n_units; i++) {
		int64_t u = b->unit[i], n = b->n_fine[u];
		tile->unit = u;
		for (int64_t r = 0; r < n; r += k->rows_quant) {
			tile->act = b->fine + u * b->n_rows + r;
			tile->row = b->row + u * b->n_rows + r;
			run_tiles(k, k->tile_add_unit, tile, type, (int)min_i64(k->rows_quant, n - r));
		}
	}
}

/*
 * n tiles of a product from t on, for rows that aim() gives: filled in place, as copies of it cost more than a small
 * product.
 */
static void begin_tiles(const struct matmul_job *j, const struct matmul *mm, int64_t t, int64_t n, struct tile_job *out)
{
	const struct weight *w = mm->weight;
	int64_t at = t * w->tile_outs;
	out->tile = w->tiles + (size_t)t * w->tile_bytes;
	out->n_tiles = (int)n;
	out->tile_bytes = w->tile_bytes;
	out->n_units = w->n_units;
	out->fine = NULL;
	out->n_in = j->n_in;
	out->y_stride = w->desc.n_out;
	out->n_outs = (int)min_i64(n * w->tile_outs, w->desc.n_out - at);
	out->bias = mm->bias ? mm->bias + at : NULL;
	out->accumulate = mm->accumulate;
	out->sums = NULL;
	out->sums_stride = (int64_t)BLOCK_ROWS * j->f->kernels->lanes;
}

/* The rows from `row` on. */
static void aim(const struct matmul_job *j, const struct matmul *mm, int64_t t, int64_t row, struct tile_job *out)
{
	const struct weight *w = mm->weight;
	out->act = (const struct act *)j->f->act.p + row * w->n_units;
	out->x = j->x + row * j->n_in;
	out->narrow = j->narrow ? (const uint16_t *)j->f->narrow.p + row * narrow_stride(j->f, j->n_in) : NULL;
	out->y = mm->y + row * w->desc.n_out + t * w->tile_outs;
}

/*
 * Tiles [begin, end) of a product of quantised weights for a block of rows: what is fine first, which the kernel then
 * adds to the rest.
 */
static void multiply_block(const struct matmul_job *j, const struct matmul *mm, int64_t block, int64_t begin,
                           int64_t end, float *sums)
{
	const struct weight *w = mm->weight;
	const struct cpu_kernels *k = j->f->kernels;
	struct fine_block b = fine_block(j, block);
	bool fine = !j->along && *b.n_units > 0;
	/* A few rows, whose fine parts are taken along, wait for memory, and are best off with one stream of it. */
	int64_t at_once = j->along || b.n_rows < k->rows_quant ? 1 : k->tiles_quant;
	for (int64_t t = begin, n; t < end; t += n) {
		struct tile_job tile;
		n = end - t < at_once ? 1 : at_once;
		begin_tiles(j, mm, t, n, &tile);
		if (fine)
			sum_fine(j, &b, w->format->type, &tile, sums);
		if (j->along && *b.n_units > 0) {
			tile.fine = b.fine;
			tile.fine_row = b.row;
			tile.n_fine = b.n_fine;
		}
		for (int64_t r = 0; r < b.n_rows; r += k->rows_quant) {
			aim(j, mm, t, b.first + r, &tile);
			tile.sums = fine ? sums + r * k->lanes : NULL;
			run_tiles(k, j->wide ? k->tile_wide : k->tile, &tile, w->format->type,
			          (int)min_i64(k->rows_quant, b.n_rows - r));
		}
	}
}

/* Tiles [begin, end) of one product for all rows, by AMX. */
static void multiply_amx(const struct matmul_job *j, const struct matmul *mm, int64_t begin, int64_t end, int thread)
{
	const struct fast *f = j->f;
	struct amx_job job = {
	        .weight = mm->weight,
	        .begin = begin,
	        .end = end,
	        .n_rows = j->n_rows,
	        .x = f->narrow.p,
	        .stride = amx_stride(j->n_in),
	        .y = mm->y,
	        .bias = mm->bias,
	        .accumulate = mm->accumulate,
	        .scratch = (char *)f->amx_scratch.p + (size_t)thread * amx_scratch_bytes(f->max_narrow_in),
	};
	f->amx->product(&job);
}

/* Tiles [begin, end) of one product for all rows. */
static void multiply_tiles(const struct matmul_job *j, const struct matmul *mm, int64_t begin, int64_t end, int thread)
{
	const struct weight *w = mm->weight;
	const struct cpu_kernels *k = j->f->kernels;
	if (takes_amx(j->f, w) && !j->precise) {
		multiply_amx(j, mm, begin, end, thread);
		return;
	}
	int64_t some = (int64_t)(BLOCK_BYTES / w->tile_bytes) + 1;
	float *sums = (float *)j->f->fine_sums.p + (int64_t)thread * BLOCK_ROWS * k->lanes * k->tiles_quant;
	for (; begin < end; begin += some) {
		int64_t stop = min_i64(begin + some, end);
		if (!pack_is_float(w->format)) {
			for (int64_t block = 0; block * j->block_rows < j->n_rows; block++)
				multiply_block(j, mm, block, begin, stop, sums);
			continue;
		}
		for (int64_t row = 0; row < j->n_rows; row += k->rows_float)
			for (int64_t t = begin; t < stop; t++) {
				struct tile_job tile;
				begin_tiles(j, mm, t, 1, &tile);
				aim(j, mm, t, row, &tile);
				k->tile(&tile, w->format->type, (int)min_i64(k->rows_float, j->n_rows - row));
			}
	}
}

/* Items are the tiles of all products, one after the other. */
static void multiply_range(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct matmul_job *j = arg;
	int64_t first = 0;
	for (int32_t i = 0; i < j->n_mm && first < end; i++) {
		int64_t n = j->mm[i].weight->n_tiles;
		if (begin < first + n)
			multiply_tiles(j, &j->mm[i], begin > first ? begin - first : 0, min_i64(n, end - first),
			               thread);
		first += n;
	}
}

/* Rows of a block: one group, or, if fine parts are not taken along, as many as ACT_BYTES hold. */
static int64_t block_rows(const struct fast *f, int64_t n_in, bool along)
{
	int64_t group = f->kernels->rows_quant;
	if (along)
		return group;
	int64_t n = ACT_BYTES / ((n_in / UNIT + 1) * (int64_t)sizeof(struct act)) / group * group;
	return n < group ? group : min_i64(n, BLOCK_ROWS);
}

static enum status reserve_act(struct fast *f, int64_t n_rows, int64_t n_in)
{
	size_t n_units = (size_t)(n_in / UNIT), n = (size_t)n_rows * n_units;
	size_t n_blocks = (size_t)((n_rows + f->kernels->rows_quant - 1) / f->kernels->rows_quant);
	bool ok = n == 0 ||
	          (scratch_grow(&f->act, n * sizeof(struct act)) && scratch_grow(&f->is_fine, n) &&
	           scratch_grow(&f->fine, n * sizeof(struct act)) && scratch_grow(&f->fine_row, n * sizeof(int32_t)) &&
	           scratch_grow(&f->n_fine, n_blocks * n_units * sizeof(int32_t)) &&
	           scratch_grow(&f->fine_unit, n_blocks * n_units * sizeof(int32_t)) &&
	           scratch_grow(&f->n_fine_units, n_blocks * sizeof(int32_t)) &&
	           scratch_grow(&f->fine_sums, BLOCK_ROWS * (size_t)f->kernels->lanes *
	                                               (size_t)f->kernels->tiles_quant *
	                                               (size_t)threads_count(f->base.threads) * sizeof(float)));
	return ok ? STATUS_OK : STATUS_NOMEM;
}

static enum status reserve_narrow(struct fast *f, int64_t n_rows, int64_t n_in)
{
	if (n_in == 0)
		return STATUS_OK;
	size_t n_threads = (size_t)threads_count(f->base.threads);
	bool ok = scratch_grow(&f->narrow, (size_t)narrow_room(f, n_rows, n_in) * sizeof(uint16_t)) &&
	          (!f->amx || scratch_grow(&f->amx_scratch, n_threads * amx_scratch_bytes(f->max_narrow_in)));
	return ok ? STATUS_OK : STATUS_NOMEM;
}

static enum status matmul(struct backend *b, const float *x, int64_t n_rows, const struct matmul *mm, int32_t n_mm)
{
	struct fast *f = self(b);
	struct matmul_job j = {.f = f, .x = x, .n_rows = n_rows, .mm = mm, .n_mm = n_mm};
	int64_t n_tiles = 0, tile_bytes = 1;
	bool quantised = false;
	if (n_rows <= 0 || n_mm <= 0)
		return STATUS_OK;
	j.n_in = mm[0].weight->desc.n_in;
	for (int32_t i = 0; i < n_mm; i++) {
		const struct weight *w = mm[i].weight;
		if (!w->tiles || w->desc.n_in != j.n_in)
			return STATUS_INVALID;
		j.precise |= mm[i].precise;
		n_tiles += w->n_tiles;
		tile_bytes = (int64_t)w->tile_bytes > tile_bytes ? (int64_t)w->tile_bytes : tile_bytes;
	}
	for (int32_t i = 0; i < n_mm; i++) {
		const struct weight *w = mm[i].weight;
		j.narrow |= !j.precise && takes_narrow(f, w);
		quantised |= !pack_is_float(w->format) && (j.precise || !takes_amx(f, w));
	}
	if (quantised) {
		int64_t group = f->kernels->rows_quant;
		j.along = j.precise || n_rows <= FINE_ALONG;
		j.wide = j.precise && f->kernels->tile_wide;
		enum status s = reserve_act(f, n_rows, j.n_in);
		if (s != STATUS_OK)
			return s;
		threads_for(f->base.threads, (n_rows + group - 1) / group, row_grain(group * j.n_in), quantize_groups,
		            &j);
		j.block_rows = block_rows(f, j.n_in, j.along);
		int64_t n_blocks = (n_rows + j.block_rows - 1) / j.block_rows;
		threads_for(f->base.threads, n_blocks * (j.n_in / UNIT), row_grain(min_i64(n_rows, j.block_rows)),
		            refine_units, &j);
		list_fine_units(&j);
	}
	if (j.narrow) {
		enum status s = reserve_narrow(f, n_rows, j.n_in);
		if (s != STATUS_OK)
			return s;
		threads_for(f->base.threads, n_rows, row_grain(j.n_in), narrow_rows, &j);
	}
	/* Long runs suit the memory; but all threads shall have one. */
	int64_t n_threads = threads_count(f->base.threads), share = (n_tiles + n_threads - 1) / n_threads;
	threads_for(f->base.threads, n_tiles, min_i64(PIECE_BYTES / tile_bytes, share), multiply_range, &j);
	return STATUS_OK;
}

/* ---- Rows ---- */

struct norm_job {
	const struct cpu_kernels *kernels;
	const float *x;
	int32_t dim;
	const float *gain;
	float eps;
	bool add; /* to what is there */
	float *out;
};

static void norm_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct norm_job *j = arg;
	(void)thread;
	for (int64_t i = begin; i < end; i++)
		j->kernels->rms_norm(j->x + i * j->dim, j->dim, j->gain, j->eps, j->add, j->out + i * j->dim);
}

static enum status rms_norm(struct backend *b, const float *x, int64_t n, int32_t dim, const float *gain, float eps,
                            float *out)
{
	struct norm_job j = {self(b)->kernels, x, dim, gain, eps, false, out};
	threads_for(self(b)->base.threads, n, row_grain(dim), norm_rows, &j);
	return STATUS_OK;
}

static enum status rms_norm_add(struct backend *b, const float *x, int64_t n, int32_t dim, const float *gain, float eps,
                                float *out)
{
	struct norm_job j = {self(b)->kernels, x, dim, gain, eps, true, out};
	threads_for(self(b)->base.threads, n, row_grain(dim), norm_rows, &j);
	return STATUS_OK;
}

struct glu_job {
	const struct cpu_kernels *kernels;
	enum glu f;
	float *gate;
	const float *up;
	int32_t dim;
};

static void glu_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct glu_job *j = arg;
	(void)thread;
	for (int64_t i = begin; i < end; i++)
		j->kernels->glu(j->f, j->gate + i * j->dim, j->up + i * j->dim, j->dim);
}

static enum status glu(struct backend *b, enum glu f, float *gate, const float *up, int64_t n, int32_t dim)
{
	struct glu_job j = {self(b)->kernels, f, gate, up, dim};
	threads_for(self(b)->base.threads, n, row_grain(dim), glu_rows, &j);
	return STATUS_OK;
}

struct softcap_job {
	const struct cpu_kernels *kernels;
	float *x;
	float cap;
};

static void softcap_range(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct softcap_job *j = arg;
	(void)thread;
	j->kernels->softcap(j->x + begin, end - begin, j->cap);
}

static enum status softcap(struct backend *b, float *x, int64_t n, float cap)
{
	struct softcap_job j = {self(b)->kernels, x, cap};
	threads_for(self(b)->base.threads, n, row_grain(1), softcap_range, &j);
	return STATUS_OK;
}

struct rope_job {
	const struct fast *f;
	const struct rope_params *params;
	float *table; /* [n_rows][n_dims], in the order kernels->rope takes */
	const int32_t *position;
	float *q, *k;
	int32_t n_head, n_head_kv, head_dim;
};

/*
 * What turns by so many positions, in the order kernels->rope takes. Angles are products in double, so that they stay
 * exact at any position.
 */
static void write_turn(const struct rope_params *p, int32_t by, float magnitude, float *cs)
{
	int32_t half = p->n_dims / 2;
	for (int32_t i = 0; i < half; i++) {
		double angle = (double)by * p->inv_freq[i];
		float c = (float)(cos(angle) * magnitude), s = (float)(sin(angle) * magnitude);
		if (p->pairing == ROPE_INTERLEAVED) {
			cs[2 * i] = c;
			cs[2 * i + 1] = s;
		} else {
			cs[i] = c;
			cs[half + i] = s;
		}
	}
}

static void rope_table_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct rope_job *j = arg;
	int32_t chunk = j->params->chunks.size;
	(void)thread;
	for (int64_t row = begin; row < end; row++)
		write_turn(j->params, chunk ? j->position[row] % chunk : j->position[row], j->params->magnitude,
			   j->table + row * j->params->n_dims);
}

static void turn_table_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct rope_job *j = arg;
	const struct rope_params *p = j->params;
	(void)thread;
	for (int64_t row = begin; row < end; row++)
		for (int k = ROPE_CHUNK_BEFORE; k <= ROPE_CHUNKS_FAR && j->position[row] >= k * p->chunks.size; k++)
			write_turn(p, rope_chunk_turn(&p->chunks, j->position[row], (enum rope_chunk)k), 1,
				   j->table + (row * ROPE_CHUNKS_FAR + k - 1) * p->n_dims);
}

static void rope_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct rope_job *j = arg;
	const struct rope_params *p = j->params;
	(void)thread;
	for (int64_t row = begin; row < end; row++) {
		const float *cs = j->table + row * p->n_dims;
		for (int32_t h = 0; h < j->n_head; h++)
			j->f->kernels->rope(j->q + (row * j->n_head + h) * j->head_dim, p->n_dims, p->pairing, cs);
		for (int32_t h = 0; h < j->n_head_kv; h++)
			j->f->kernels->rope(j->k + (row * j->n_head_kv + h) * j->head_dim, p->n_dims, p->pairing, cs);
	}
}

static enum status reserve_rope(struct rope_table *t, int64_t n_rows, int64_t n_dims)
{
	return scratch_grow(&t->table, (size_t)n_rows * (size_t)n_dims * sizeof(float)) ? STATUS_OK : STATUS_NOMEM;
}

static enum status rope(struct backend *b, float *q, int32_t n_head, float *k, int32_t n_head_kv, int32_t head_dim,
                        const struct rope_params *params)
{
	struct fast *f = self(b);
	const struct batch *batch = f->base.batch;
	int i = 0;
	while (i < ROPE_TABLES - 1 && f->rope[i].valid && f->rope[i].valid != params)
		i++;
	if (f->rope[i].valid != params) {
		enum status s = reserve_rope(&f->rope[i], batch->n_rows, params->n_dims);
		if (s != STATUS_OK)
			return s;
	}
	struct rope_job j = {f, params, f->rope[i].table.p, batch->position, q, k, n_head, n_head_kv, head_dim};
	if (f->rope[i].valid != params) {
		threads_for(f->base.threads, batch->n_rows, row_grain(64 * (int64_t)params->n_dims), rope_table_rows,
		            &j);
		f->rope[i].valid = params;
	}
	threads_for(f->base.threads, batch->n_rows, row_grain((int64_t)(n_head + n_head_kv) * head_dim), rope_rows, &j);
	return STATUS_OK;
}

enum status fast_turns(struct fast *f, const struct rope_params *params)
{
	const struct batch *batch = f->base.batch;
	if (f->turns.valid == params)
		return STATUS_OK;
	enum status s = reserve_rope(&f->turns, (int64_t)batch->n_rows * ROPE_CHUNKS_FAR, params->n_dims);
	if (s != STATUS_OK)
		return s;
	struct rope_job j = {.f = f, .params = params, .table = f->turns.table.p, .position = batch->position};
	threads_for(f->base.threads, batch->n_rows, row_grain(128 * (int64_t)params->n_dims), turn_table_rows, &j);
	f->turns.valid = params;
	return STATUS_OK;
}

/* ---- The backend ---- */

static enum status step_begin(struct backend *b, const struct batch *batch)
{
	struct fast *f = self(b);
	for (int i = 0; i < ROPE_TABLES; i++)
		f->rope[i].valid = NULL;
	f->turns.valid = NULL;
	attn_plan_reset(f->plan);
	return cpu_step_begin(b, batch);
}

static enum status reserve(struct backend *b, int32_t max_rows, int32_t max_width, const struct kv_layout *layout)
{
	struct fast *f = self(b);
	(void)max_width; /* the weights say how wide inputs are */
	enum status s = reserve_act(f, max_rows, f->max_in);
	if (s == STATUS_OK)
		s = reserve_narrow(f, max_rows, f->max_narrow_in);
	for (int i = 0; i < ROPE_TABLES && s == STATUS_OK; i++)
		s = reserve_rope(&f->rope[i], max_rows, layout->head_dim);
	if (s == STATUS_OK)
		s = reserve_rope(&f->turns, (int64_t)max_rows * ROPE_CHUNKS_FAR, layout->head_dim);
	return s == STATUS_OK ? attn_plan_reserve(f, max_rows, layout) : s;
}

static enum status choose_kv(struct backend *b, enum quant_type type)
{
	struct fast *f = self(b);
	for (int i = 0; i < 2; i++) {
		if (f->kernels->pages[i]->type == type) {
			f->pages = f->kernels->pages[i];
			return STATUS_OK;
		}
	}
	return STATUS_UNSUPPORTED;
}

static void info(const struct backend *b, struct backend_info *out)
{
	const struct fast *f = self(b);
	*out = (struct backend_info){
		.name = f->amx ? f->amx->name : f->kernels->name,
		.n_threads = threads_count(f->base.threads),
		.host_memory = true,
		.kv_order = {.known = true, .pairs = true, .keys = f->pages->keys, .values = f->pages->values},
		.kv_type = f->pages->type,
		.narrow_kv = true,
		.chooses_pages = true,
		.weighs_pages = true,
		.turns_chunks = true,
		.adds_to_logits = true,
		.probes_pages = true,
	};
	const char *detail = f->amx ? f->amx->detail : f->kernels->detail;
	for (size_t i = 0; i + 1 < sizeof out->detail && detail[i]; i++)
		out->detail[i] = detail[i];
}

static void destroy(struct backend *b)
{
	struct fast *f = self(b);
	cpu_base_fini(&f->base);
	attn_plan_destroy(f->plan);
	scratch_free(&f->act);
	scratch_free(&f->is_fine);
	scratch_free(&f->fine);
	scratch_free(&f->fine_row);
	scratch_free(&f->n_fine);
	scratch_free(&f->fine_unit);
	scratch_free(&f->n_fine_units);
	scratch_free(&f->fine_sums);
	scratch_free(&f->narrow);
	scratch_free(&f->amx_scratch);
	for (int i = 0; i < ROPE_TABLES; i++)
		scratch_free(&f->rope[i].table);
	scratch_free(&f->turns.table);
	free(f);
}

static const struct backend_ops fast_ops = {
        .destroy = destroy,
        .info = info,
        .choose_kv = choose_kv,
        .mem_alloc = cpu_mem_alloc,
        .mem_free = cpu_mem_free,
        .mem_write = cpu_mem_write,
        .mem_read = cpu_mem_read,
        .weight_create = weight_create,
        .weight_destroy = weight_destroy,
        .weight_bytes = weight_bytes,
        .reserve = reserve,
        .step_begin = step_begin,
        .step_end = cpu_step_end,
        .embed = embed,
        .rms_norm = rms_norm,
        .rms_norm_add = rms_norm_add,
        .matmul = matmul,
        .rope = rope,
        .kv_write = fast_kv_write,
        .attention = fast_attention,
        .attention_part = fast_attention_part,
        .glu = glu,
        .softcap = softcap,
        .gather_rows = cpu_gather_rows,
        .page_copy = cpu_page_copy,
        .page_bounds = fast_page_bounds,
        .sync = cpu_sync,
        .scan = cpu_scan,
};

enum status fast_create(const struct cpu_kernels *kernels, const struct amx_kernels *amx, int32_t n_threads,
                        struct backend **out, struct error *err)
{
	struct fast *f = calloc(1, sizeof *f);
	if (!f)
		goto fail;
	f->kernels = kernels;
	f->pages = kernels->pages[0];
	f->amx = amx;
	if (attn_plan_create(&f->plan) != STATUS_OK)
		goto fail_plan;
	if (cpu_base_init(&f->base, &fast_ops, n_threads) != STATUS_OK)
		goto fail_base;
	*out = &f->base.backend;
	return STATUS_OK;

fail_base:
	attn_plan_destroy(f->plan);
fail_plan:
	free(f);
fail:
	return error_set(err, STATUS_NOMEM, "no memory for the backend %s", kernels->name);
}
