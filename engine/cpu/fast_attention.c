/*
 * Attention of the fast backends, over pages as fast_kv.c writes them.
 *
 * The positions a row sees are cut into ranges whose length depends on the row's position and window alone. Each range
 * is reduced by itself and the ranges are folded in ascending order, so the result is the same whether one thread walks
 * a row's ranges (prefill, many sequences) or several share them (one long conversation).
 *
 * Once per step the batch is cut into tiles: rows of one sequence, so that their query heads go through each loaded K
 * and V together. Items of work are (tile, span of KV heads) or, where that alone is a large part of the step's work,
 * (tile, span, range). A span has as many KV heads as fit, since those of a page stand in a row and memory is faster at
 * longer runs.
 *
 * A row that chooses (fast_choice.h) is a tile by itself, at the position that its last page has among the chosen ones.
 *
 * Under struct rope_chunks a tile has rows of one chunk, and a range is computed in up to three pieces, each with the
 * queries as the keys in it meet them; the sums go on from piece to piece.
 *
 * A part of a sequence (struct attention_part) is computed in the same way from the ranges that it has, and from pieces
 * of them. For each row and query head two partial results are kept in between (`state`): of all ranges that are
 * complete, into which the next ones are folded, and of one that the last part left open, with which the next part goes
 * on as if it had not been interrupted.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cpu/choice.h"
#include "engine/cpu/fast.h"
#include "engine/cpu/fast_choice.h"
#include "engine/cpu/narrow.h"

enum {
	RANGE_TOKENS = 256,  /* shortest range */
	RANGES_MAX = 32,     /* ranges grow with the position so that there are never more */
	SHARES = 4,          /* an item above 1 / (SHARES * n_threads) of the work is split */
	WHOLE = -1,
	ALL = -1,
};

struct attn_tile {
	const struct batch_seq *seq;
	int32_t row;          /* first row, in the batch */
	int32_t n_rows;
	int32_t position;     /* of the first row, in the block table or among what it chooses */
	/* where in `chosen` the pages begin that its first KV head chose; those of the next follow. Or ALL */
	int64_t chosen;
	int32_t head, n_heads; /* query heads within the group of each KV head */
	int32_t span;         /* KV heads of an item */
	int32_t range_tokens;
	int32_t first_range, n_ranges; /* ranges [first_range, first_range + n_ranges) hold what the rows see */
	int32_t from, to;     /* positions that are looked at: all, or those of a part */
	int64_t split;        /* index of its first span in `partials` and `left`, or WHOLE */
};

struct attn_item {
	int32_t tile;
	int32_t head_kv, n_heads_kv;
	int32_t range; /* or WHOLE */
};

/* How the work of a layer is cut. */
struct attn_cut {
	bool valid; /* for the batch, n_head, window and chunks */
	int32_t n_head, window, chunk;
	int64_t n_tiles, n_items;
	int64_t n_choosers;   /* none where there is a window */
	int32_t most_blocks;  /* that a tile sees whose sequence wants the masses of its pages; 0: none does */
	struct scratch tiles; /* struct attn_tile */
	struct scratch items; /* struct attn_item */
};

_Static_assert((int)KV_PART_PAGES * (int)KV_PAGE_TOKENS % (int)ATTN_BLOCK == 0, "a part ends with a block");
_Static_assert((int)ROPE_CHUNK_STEP % (int)ATTN_BLOCK == 0, "a chunk ends with a block");

enum { CUT_ALL, CUT_WINDOW, CUT_PART, N_CUTS }; /* of layers without a window, with one, and of the part at hand */

struct attn_plan {
	struct attn_cut cut[N_CUTS];
	struct scratch left;      /* _Atomic int32_t: ranges of a split (tile, span) that are not done */
	struct scratch partials;  /* float: results of the ranges of split ones, partial_floats() each */
	struct scratch per_thread; /* float: thread_floats() each */
	struct fast_choices choices;
	/* struct block_weights [most_blocks] for each query of an item, of each thread and then of each split */
	struct scratch weights;
	/* float [rows of the sequence][n_head][2][head_dim + 2]: weighted sum, maximum and sum of the parts so far */
	struct scratch state;
};

enum status attn_plan_create(struct attn_plan **out)
{
	*out = calloc(1, sizeof **out);
	return *out ? STATUS_OK : STATUS_NOMEM;
}

void attn_plan_destroy(struct attn_plan *p)
{
	if (!p)
		return;
	for (int i = 0; i < N_CUTS; i++) {
		scratch_free(&p->cut[i].tiles);
		scratch_free(&p->cut[i].items);
	}
	scratch_free(&p->state);
	scratch_free(&p->left);
	scratch_free(&p->partials);
	scratch_free(&p->per_thread);
	scratch_free(&p->weights);
	fast_choices_free(&p->choices);
	free(p);
}

void attn_plan_reset(struct attn_plan *p)
{
	p->cut[CUT_ALL].valid = p->cut[CUT_WINDOW].valid = false;
}

static int32_t min_i32(int32_t a, int32_t b)
{
	return a < b ? a : b;
}

/* The first position that a row at `position` sees. */
static int32_t first_seen(int32_t position, int32_t window)
{
	return window > 0 && position >= window ? position + 1 - window : 0;
}

/*
 * Positions that ranges have to cover for a row at `position`. A window takes no more than half of what RANGES_MAX
 * ranges could, so that it may begin and end within one; twice as far into a text as it is long, the length of ranges
 * changes no more.
 */
static int32_t reach(int32_t position, int32_t window)
{
	return window > 0 && position / 2 >= window ? 2 * window - 1 : position;
}

static int32_t range_tokens(int32_t reach)
{
	int32_t n = RANGE_TOKENS;
	while (reach / RANGES_MAX >= n)
		n *= 2;
	return n;
}

/* max, sum and weighted sum of each query of a tile over one range */
static size_t partial_floats(int32_t head_dim)
{
	return (size_t)ATTN_QUERIES * ((size_t)head_dim + 2);
}

/* Scaled queries, scores, two partials, a block of K and V in floats, and a query that is turned further. */
static size_t thread_floats(int32_t head_dim)
{
	return (size_t)ATTN_QUERIES * ((size_t)head_dim + ATTN_BLOCK) + 2 * partial_floats(head_dim) +
	       (2 * (size_t)ATTN_BLOCK + 1) * (size_t)head_dim;
}

static enum status reserve(struct fast *f, struct attn_cut *cut, int64_t tiles, int64_t whole_items, int32_t head_dim)
{
	struct attn_plan *p = f->plan;
	size_t n_threads = (size_t)threads_count(f->base.threads);
	/* (tile, KV head) pairs that can each be more than a share: at least the spans */
	size_t splits = SHARES * n_threads;
	size_t items = (size_t)whole_items + splits * RANGES_MAX;
	bool ok = scratch_grow(&cut->tiles, (size_t)tiles * sizeof(struct attn_tile)) &&
	          scratch_grow(&cut->items, items * sizeof(struct attn_item)) &&
	          scratch_grow(&p->left, splits * sizeof(_Atomic int32_t)) &&
	          scratch_grow(&p->partials, splits * RANGES_MAX * partial_floats(head_dim) * sizeof(float)) &&
	          scratch_grow(&p->per_thread, n_threads * thread_floats(head_dim) * sizeof(float));
	return ok ? STATUS_OK : STATUS_NOMEM;
}

enum status attn_plan_reserve(struct fast *f, int32_t max_rows, const struct kv_layout *layout)
{
	enum status s = STATUS_OK;
	for (int i = 0; i < CUT_PART && s == STATUS_OK; i++)
		s = reserve(f, &f->plan->cut[i], max_rows, (int64_t)max_rows * layout->n_head_kv, layout->head_dim);
	return s;
}

/* ---- The plan of a step ---- */

/* What a layer's work is cut by. */
struct cut_shape {
	int32_t queries; /* of an item at most */
	int32_t group, n_head_kv;
	int32_t window, chunk;
};

/*
 * Writes the tiles of a sequence to out, where it is not NULL, and counts them. first_chosen: where in `chosen` what
 * its rows choose begins.
 */
static int64_t cut_sequence(const struct batch_seq *seq, const struct cut_shape *shape, int64_t first_chosen,
                            struct attn_tile *out)
{
	const int32_t group = shape->group, window = shape->window, chunk = shape->chunk;
	int32_t n_heads = min_i32(group, shape->queries), rows_max = shape->queries / n_heads,
		choose = fast_chooses_from(seq, window);
	int64_t n = 0, next_chosen = first_chosen;
	for (int32_t row = 0; row < seq->n_rows;) {
		int32_t position = seq->first_position + row;
		bool chooses = position >= choose;
		if (chooses)
			position = (seq->choice.n_pages - 1) * KV_PAGE_TOKENS + position % KV_PAGE_TOKENS;
		int32_t far = reach(position, window), length = range_tokens(far);
		int32_t n_rows = min_i32(rows_max, seq->n_rows - row), first = first_seen(position, window) / length;
		n_rows = chooses ? 1 : min_i32(n_rows, choose - position);
		/* Rows of a tile agree about the length of ranges. */
		if (far == position)
			n_rows = min_i32(n_rows, length * RANGES_MAX - position);
		if (chunk > 0)
			n_rows = min_i32(n_rows, chunk - position % chunk);
		for (int32_t head = 0; head < group; head += n_heads, n++) {
			if (!out)
				continue;
			out[n] = (struct attn_tile){
			        .seq = seq,
			        .row = seq->first_row + row,
			        .n_rows = n_rows,
			        .position = position,
			        .chosen = chooses ? next_chosen : ALL,
			        .head = head,
			        .n_heads = min_i32(n_heads, group - head),
			        .span = 1,
			        .range_tokens = length,
			        .first_range = first,
			        .n_ranges = (position + n_rows - 1) / length + 1 - first,
			        .to = position + n_rows,
			        .split = WHOLE,
			};
		}
		row += n_rows;
		next_chosen += chooses ? (int64_t)shape->n_head_kv * seq->choice.n_pages : 0;
	}
	return n;
}

/* Leaves of a tile what it sees of a part, which may be no range at all. */
static void clip(struct attn_tile *t, const struct attention_part *part)
{
	int32_t end_range = t->first_range + t->n_ranges;
	t->from = part->first_page * KV_PAGE_TOKENS;
	if (!part->last)
		t->to = min_i32(t->to, (part->first_page + part->n_pages) * KV_PAGE_TOKENS);
	if (t->first_range < t->from / t->range_tokens)
		t->first_range = t->from / t->range_tokens;
	end_range = min_i32(end_range, (t->to - 1) / t->range_tokens + 1);
	t->n_ranges = end_range > t->first_range ? end_range - t->first_range : 0;
}

static int64_t tile_cost(const struct attn_tile *t, int32_t window)
{
	int32_t first = first_seen(t->position, window);
	first = first < t->from ? t->from : first;
	return t->to > first ? (int64_t)t->n_rows * t->n_heads * (t->to - first) : 0;
}

/* KV heads of an item: as many as fit, but the tile's `n_ranges` ranges shall make enough items for all threads. */
static int32_t choose_span(const struct attn_tile *t, const struct cut_shape *shape, int64_t n_ranges,
                           int64_t n_threads)
{
	const int32_t n_head_kv = shape->n_head_kv;
	/* Each KV head chooses for itself. */
	if (t->chosen != ALL)
		return 1;
	int32_t span = min_i32(n_head_kv, shape->queries / (t->n_rows * t->n_heads));
	while (span > 1 && n_ranges * ((n_head_kv + span - 1) / span) < 2 * n_threads)
		span = (span + 1) / 2;
	return span;
}

static int64_t n_spans(const struct attn_tile *t, int32_t n_head_kv)
{
	return (n_head_kv + t->span - 1) / t->span;
}

static void add_items(struct attn_cut *p, int32_t tile, int32_t n_head_kv, int32_t first_range, int32_t n_ranges)
{
	const struct attn_tile *t = (const struct attn_tile *)p->tiles.p + tile;
	struct attn_item *items = p->items.p;
	for (int32_t h = 0; h < n_head_kv; h += t->span)
		for (int32_t r = 0; r < n_ranges; r++)
			items[p->n_items++] =
				(struct attn_item){tile, h, min_i32(t->span, n_head_kv - h), first_range + r};
}

static int32_t chunk_of(const struct attention_params *params)
{
	return params->chunked ? params->chunked->chunks.size : 0;
}

/* Of all sequences without far pages, or of a part of one that has some. */
static enum status make_cut(struct fast *f, struct attn_cut *p, const struct kv_layout *layout, int32_t n_head,
			    const struct attention_params *params, const struct attention_part *part)
{
	int32_t window = params->window, chunk = chunk_of(params);
	const struct batch *batch = f->base.batch;
	int32_t group = n_head / layout->n_head_kv, n_head_kv = layout->n_head_kv;
	const struct cut_shape shape = {f->pages->item_queries, group, n_head_kv, window, chunk};
	int64_t n = 0, cost = 0, n_splits = 0, n_chosen = 0, n_threads = threads_count(f->base.threads);
	for (int32_t s = 0; s < batch->n_seqs; s++) {
		if (part ? s == part->seq : !batch->seq[s].far)
			n += cut_sequence(&batch->seq[s], &shape, 0, NULL);
	}
	enum status status = reserve(f, p, n, n * n_head_kv, layout->head_dim);
	p->n_choosers = 0;
	if (status == STATUS_OK && !part)
		status = fast_choices_list(&f->plan->choices, f, layout, group, window, &p->n_choosers);
	if (status != STATUS_OK)
		return status;

	struct attn_tile *tiles = p->tiles.p;
	p->n_tiles = 0;
	for (int32_t s = 0; s < batch->n_seqs; s++) {
		if (part ? s != part->seq : batch->seq[s].far != NULL)
			continue;
		p->n_tiles += cut_sequence(&batch->seq[s], &shape, n_chosen, tiles + p->n_tiles);
		n_chosen += fast_chosen_by(&batch->seq[s], n_head_kv, window);
	}
	for (int64_t i = 0; i < p->n_tiles; i++) {
		if (part)
			clip(&tiles[i], part);
		cost += tile_cost(&tiles[i], window) * n_head_kv;
	}

	/* Split items first, then the long ones of each prompt: the last to finish should be short. */
	int64_t share = cost / (SHARES * n_threads);
	p->n_items = 0;
	for (int64_t i = 0; i < p->n_tiles; i++) {
		if (tiles[i].n_ranges <= 1 || tile_cost(&tiles[i], window) <= share)
			continue;
		tiles[i].span = choose_span(&tiles[i], &shape, tiles[i].n_ranges, n_threads);
		tiles[i].split = n_splits;
		n_splits += n_spans(&tiles[i], n_head_kv);
		add_items(p, (int32_t)i, n_head_kv, tiles[i].first_range, tiles[i].n_ranges);
	}
	for (int64_t i = p->n_tiles - 1; i >= 0; i--) {
		if (tiles[i].split != WHOLE || tiles[i].n_ranges == 0)
			continue;
		tiles[i].span = choose_span(&tiles[i], &shape, p->n_tiles, n_threads);
		add_items(p, (int32_t)i, n_head_kv, WHOLE, 1);
	}
	p->n_head = n_head;
	p->window = window;
	p->chunk = chunk;
	p->most_blocks = 0;
	for (int64_t i = 0; i < p->n_tiles; i++) {
		int32_t n_blocks = tiles[i].n_ranges * tiles[i].range_tokens / ATTN_BLOCK;
		if ((tiles[i].seq->mass || tiles[i].seq->look) && n_blocks > p->most_blocks)
			p->most_blocks = n_blocks;
	}
	size_t places = (size_t)(n_threads + n_splits) * ATTN_QUERIES * (size_t)p->most_blocks;
	p->valid = scratch_grow(&f->plan->weights, places * sizeof(struct block_weights));
	return p->valid ? STATUS_OK : STATUS_NOMEM;
}

/* ---- Attention ---- */

struct attention_call {
	struct fast *f;
	const struct attn_cut *cut;
	const struct attention_part *part; /* NULL: everything at once */
	const char *kv;
	const struct kv_layout *layout;
	int32_t layer;
	const float *q;
	int32_t n_head;
	struct attention_params params;
	float *out;
};

struct partial {
	float *max, *sum, *acc;
};

static struct partial partial_at(float *p)
{
	return (struct partial){p, p + ATTN_QUERIES, p + 2 * ATTN_QUERIES};
}

/* Where query i of an item begins in q and out: [KV heads of the item][rows][query heads of the KV head]. */
static int64_t query_offset(const struct attention_call *c, const struct attn_tile *t, int32_t head_kv, int32_t i)
{
	int32_t group = c->n_head / c->layout->n_head_kv, n_queries = t->n_rows * t->n_heads;
	int64_t row = t->row + i % n_queries / t->n_heads;
	int64_t head = (head_kv + i / n_queries) * group + t->head + i % t->n_heads;
	return (row * c->n_head + head) * c->layout->head_dim;
}

enum { CLOSED_RANGES, OPEN_RANGE };

/* Where query i of an item has its state of either kind. */
static float *state_at(const struct attention_call *c, const struct attn_tile *t, int32_t head_kv, int32_t i, int kind)
{
	int32_t dim = c->layout->head_dim;
	int64_t query = query_offset(c, t, head_kv, i) / dim - (int64_t)t->seq->first_row * c->n_head;
	return (float *)c->f->plan->state.p + (2 * query + kind) * (dim + 2);
}

static void load_state(const struct attention_call *c, const struct attn_tile *t, int32_t head_kv, int n, int kind,
                       struct partial to)
{
	int32_t dim = c->layout->head_dim;
	for (int i = 0; i < n; i++) {
		const float *state = state_at(c, t, head_kv, i, kind);
		memcpy(to.acc + (int64_t)i * dim, state, (size_t)dim * sizeof *state);
		to.max[i] = state[dim];
		to.sum[i] = state[dim + 1];
	}
}

static void store_state(const struct attention_call *c, const struct attn_tile *t, int32_t head_kv, int n, int kind,
                        struct partial from)
{
	int32_t dim = c->layout->head_dim;
	for (int i = 0; i < n; i++) {
		float *state = state_at(c, t, head_kv, i, kind);
		memcpy(state, from.acc + (int64_t)i * dim, (size_t)dim * sizeof *state);
		state[dim] = from.max[i];
		state[dim + 1] = from.sum[i];
	}
}

/* Makes the queries of a job as keys of that kind meet them. */
static void load_queries(const struct attention_call *c, const struct attn_tile *t, struct attn_job *j,
			 enum rope_chunk keys)
{
	const struct rope_params *p = c->params.chunked;
	int32_t dim = c->layout->head_dim, per_head = t->n_rows * t->n_heads;
	for (int i = 0; i < j->n_heads * j->n_queries; i++) {
		const float *q = c->q + query_offset(c, t, j->head_kv, i);
		if (keys != ROPE_CHUNK_OWN) {
			int64_t row = t->row + i % per_head / t->n_heads;
			memcpy(j->turned, q, (size_t)dim * sizeof *q);
			c->f->kernels->rope(j->turned, p->n_dims, p->pairing,
					    (const float *)c->f->turns.table.p +
						    (row * ROPE_CHUNKS_FAR + keys - 1) * p->n_dims);
			q = j->turned;
		}
		c->f->pages->attn_query(q, c->params.scale * 0x1.715476p+0f, dim, (float *)j->q + (int64_t)i * dim);
	}
}

static void run_positions(const struct attention_call *c, struct attn_job *j, int32_t from, int32_t to)
{
	j->from = from;
	j->to = to;
	if (c->layout->form == KV_FORM_F16)
		c->f->pages->attn_run(j);
	else
		c->f->pages->attn_run_narrow(j);
}

/* Positions [from, to) in pieces, by how their keys are met. */
static void run_chunks(const struct attention_call *c, const struct attn_tile *t, struct attn_job *j, int32_t from,
		       int32_t to)
{
	const struct rope_chunks *chunks = &c->params.chunked->chunks;
	for (int keys = ROPE_CHUNKS_FAR; keys >= ROPE_CHUNK_OWN && from < to; keys--) {
		int32_t end = keys == ROPE_CHUNK_OWN
				      ? to
				      : min_i32(to, rope_chunk_begin(chunks, t->position, (enum rope_chunk)(keys - 1)));
		if (from >= end)
			continue;
		load_queries(c, t, j, (enum rope_chunk)keys);
		run_positions(c, j, from, end);
		from = end;
	}
}

/* Reduces one range of a tile into `to`; goes_on: the one after it follows. */
static void run_range(const struct attention_call *c, const struct attn_tile *t, struct attn_job *j, int32_t range,
                      bool goes_on, struct partial to)
{
	int32_t dim = c->layout->head_dim;
	int n = j->n_heads * j->n_queries;
	if (range * t->range_tokens < t->from && !c->part->first) {
		load_state(c, t, j->head_kv, n, OPEN_RANGE, to);
	} else {
		for (int i = 0; i < n; i++) {
			to.max[i] = -INFINITY;
			to.sum[i] = 0;
		}
		memset(to.acc, 0, (size_t)n * (size_t)dim * sizeof *to.acc);
	}
	for (int i = 0; j->weights && i < n; i++) {
		struct block_weights *w =
			j->weights + (int64_t)i * j->n_blocks + range * t->range_tokens / ATTN_BLOCK - j->first_block;
		for (int b = 0; b < t->range_tokens / ATTN_BLOCK; b++)
			w[b] = (struct block_weights){.max = -INFINITY};
	}
	/* What lies before all rows' windows is not looked at; blocks begin where they would without a window. */
	int32_t seen = j->first[0] / ATTN_BLOCK * ATTN_BLOCK;
	seen = seen < t->from ? t->from : seen;
	int32_t from = range * t->range_tokens, end = min_i32((range + 1) * t->range_tokens, t->to);
	from = from < seen ? seen : from;
	j->end = min_i32(end + (goes_on ? t->range_tokens : 0), t->to);
	j->max = to.max;
	j->sum = to.sum;
	j->acc = to.acc;
	if (c->params.chunked)
		run_chunks(c, t, j, from, end);
	else
		run_positions(c, j, from, end);
}

/*
 * Adds range `range` to what the ranges before it gave. A query has nothing of ranges it does not see, and takes its
 * first one as it is.
 */
static void fold(const struct attention_call *c, const struct attn_tile *t, const struct attn_job *j, int32_t range,
                 struct partial to, struct partial from)
{
	int32_t dim = c->layout->head_dim, begin = range * t->range_tokens;
	for (int i = 0; i < j->n_heads * j->n_queries; i++) {
		int32_t first = j->first[i % j->n_queries];
		float *acc = to.acc + (int64_t)i * dim, *more = from.acc + (int64_t)i * dim;
		if (j->limit[i % j->n_queries] <= begin || first >= begin + t->range_tokens)
			continue;
		if (first < begin) {
			c->f->kernels->attn_fold(&to.max[i], &to.sum[i], acc, from.max[i], from.sum[i], more, dim);
			continue;
		}
		to.max[i] = from.max[i];
		to.sum[i] = from.sum[i];
		memcpy(acc, more, (size_t)dim * sizeof *acc);
	}
}

/* Entropy and largest weight of a query over the blocks it saw; p = weight / sum, relative to the largest score. */
static void add_look(struct attention_look *look, const struct block_weights *w, int32_t n_blocks, double max,
                     double sum)
{
	double product = 0; /* of p and its logarithm to the base of two */
	for (int32_t i = 0; i < n_blocks; i++) {
		double total = 0, factor = exp2(w[i].max - max) / sum;
		for (int page = 0; page < ATTN_BLOCK / KV_PAGE_TOKENS; page++)
			total += w[i].page[page];
		product += factor > 0 ? factor * (w[i].product + total * (w[i].max - max)) : 0;
	}
	look_add(look, (log2(sum) - product) * 0.69314718055994531, 1 / sum);
}

/* What the queries of an item gave each page, now that the largest scores and the sums are known. */
static void add_masses(const struct attn_tile *t, const struct attn_job *j, struct partial p)
{
	int32_t last = (t->position + t->n_rows - 1) / KV_PAGE_TOKENS,
		first = j->first_block * (ATTN_BLOCK / KV_PAGE_TOKENS);
	for (int i = 0; i < j->n_heads * j->n_queries; i++) {
		const struct block_weights *w = j->weights + (int64_t)i * j->n_blocks;
		if (t->seq->look)
			add_look(t->seq->look, w, last / (ATTN_BLOCK / KV_PAGE_TOKENS) - j->first_block + 1, p.max[i],
			         p.sum[i]);
		for (int32_t page = first; page <= last; page++) {
			const struct block_weights *b = w + (page - first) * KV_PAGE_TOKENS / ATTN_BLOCK;
			if (t->seq->mass)
				mass_add(&t->seq->mass[page], b->page[page % (ATTN_BLOCK / KV_PAGE_TOKENS)] *
				                                      exp2((double)b->max - p.max[i]) / p.sum[i]);
		}
	}
}

static void finish(const struct attention_call *c, const struct attn_tile *t, const struct attn_job *j, int32_t head_kv,
                   int n, struct partial p)
{
	int32_t dim = c->layout->head_dim;
	if (j->weights)
		add_masses(t, j, p);
	for (int i = 0; i < n; i++)
		c->f->kernels->attn_finish(p.acc + (int64_t)i * dim, p.sum[i], dim,
		                           c->out + query_offset(c, t, head_kv, i));
}

/* A range of a part is there: it joins those before it, or is left open for the next part. */
static void end_range(const struct attention_call *c, const struct attn_tile *t, const struct attn_job *j,
                      int32_t range, struct partial total, struct partial part)
{
	if (!c->part->last && (range + 1) * t->range_tokens > t->to)
		store_state(c, t, j->head_kv, j->n_heads * j->n_queries, OPEN_RANGE, part);
	else
		fold(c, t, j, range, total, part);
}

/* All ranges of a part are folded: that is the result, or what the next part goes on with. */
static void end_part(const struct attention_call *c, const struct attn_tile *t, const struct attn_job *j,
                     int32_t head_kv, int n, struct partial total)
{
	if (c->part->last)
		finish(c, t, j, head_kv, n, total);
	else
		store_state(c, t, head_kv, n, CLOSED_RANGES, total);
}

/* `more`: the item after it, or NULL, is the next that this thread runs. */
static void run_item(const struct attention_call *c, const struct attn_item *item, const struct attn_item *more,
                     int thread, float *scratch)
{
	struct attn_plan *plan = c->f->plan;
	const struct attn_tile *t = (const struct attn_tile *)c->cut->tiles.p + item->tile;
	int32_t dim = c->layout->head_dim, limit[ATTN_QUERIES], first_of[ATTN_QUERIES],
		end = t->first_range + t->n_ranges;
	float *q = scratch, *score = q + (int64_t)ATTN_QUERIES * dim;
	float *first = score + ATTN_QUERIES * ATTN_BLOCK, *second = first + partial_floats(dim);
	const int32_t *pages = t->seq->block_table;
	if (t->chosen != ALL) {
		int64_t at = t->chosen + (int64_t)item->head_kv * t->seq->choice.n_pages;
		pages = (const int32_t *)plan->choices.chosen.p + at;
	}
	struct attn_job j = {
		.kv = c->kv + fast_kv_offset(c->layout, c->layer, item->head_kv),
		.page_stride = c->layout->page_stride,
		.block_table = c->part ? c->part->block_table : pages,
		.first_page = c->part ? c->part->first_page : 0,
		.head_dim = dim,
		.n_heads = item->n_heads_kv,
		.n_queries = t->n_rows * t->n_heads,
		.limit = limit,
		.first = first_of,
		.softcap = c->params.softcap * 0x1.715476p+0f,
		.plus = t->seq->plus,
		.n_plus = t->seq->plus ? t->seq->n_plus : 0,
		.q = q,
		.score = score,
		.slab = c->kv,
		.layout = c->layout,
		.layer = c->layer,
		.head_kv = item->head_kv,
		.unpacked = second + partial_floats(dim),
		.turned = second + partial_floats(dim) + (int64_t)ATTN_BLOCK * 2 * dim,
	};
	const int n = j.n_heads * j.n_queries;
	int64_t place = thread; /* of its weights */
	if (item->range != WHOLE)
		place = threads_count(c->f->base.threads) + t->split + item->head_kv / t->span;
	if (t->seq->mass || t->seq->look) {
		j.weights = (struct block_weights *)plan->weights.p + place * ATTN_QUERIES * c->cut->most_blocks;
		j.first_block = t->first_range * t->range_tokens / ATTN_BLOCK;
		j.n_blocks = c->cut->most_blocks;
	}
	for (int i = 0; i < j.n_queries; i++) {
		int32_t position = t->position + i / t->n_heads;
		limit[i] = min_i32(position + 1, t->to);
		first_of[i] = first_seen(position, c->params.window);
	}
	if (!c->params.chunked)
		load_queries(c, t, &j, ROPE_CHUNK_OWN);
	if (item->range == WHOLE) {
		struct partial total = partial_at(first), part = partial_at(second);
		if (c->part) {
			load_state(c, t, item->head_kv, n, CLOSED_RANGES, total);
			for (int32_t r = t->first_range; r < end; r++) {
				run_range(c, t, &j, r, true, part);
				end_range(c, t, &j, r, total, part);
			}
			end_part(c, t, &j, item->head_kv, n, total);
			return;
		}
		run_range(c, t, &j, t->first_range, true, total);
		for (int32_t r = t->first_range + 1; r < end; r++) {
			run_range(c, t, &j, r, true, part);
			fold(c, t, &j, r, total, part);
		}
		finish(c, t, &j, item->head_kv, n, total);
		return;
	}
	int64_t split = t->split + item->head_kv / t->span;
	float *partials = (float *)plan->partials.p + (size_t)split * RANGES_MAX * partial_floats(dim);
	_Atomic int32_t *left = (_Atomic int32_t *)plan->left.p + split;
	bool goes_on = more && more->tile == item->tile && more->head_kv == item->head_kv;
	run_range(c, t, &j, item->range, goes_on,
	          partial_at(partials + (size_t)(item->range - t->first_range) * partial_floats(dim)));
	/* Whoever ends the last range finds all others written, and folds them in their order. */
	if (atomic_fetch_sub(left, 1) != 1)
		return;
	struct partial total = partial_at(c->part ? first : partials);
	if (c->part) {
		load_state(c, t, item->head_kv, n, CLOSED_RANGES, total);
		for (int32_t r = t->first_range; r < end; r++)
			end_range(c, t, &j, r, total,
			          partial_at(partials + (size_t)(r - t->first_range) * partial_floats(dim)));
		end_part(c, t, &j, item->head_kv, n, total);
		return;
	}
	for (int32_t r = t->first_range + 1; r < end; r++)
		fold(c, t, &j, r, total, partial_at(partials + (size_t)(r - t->first_range) * partial_floats(dim)));
	finish(c, t, &j, item->head_kv, n, total);
}

static void run_items(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct attention_call *c = arg;
	float *scratch = (float *)c->f->plan->per_thread.p + (size_t)thread * thread_floats(c->layout->head_dim);
	const struct attn_item *items = c->cut->items.p;
	for (int64_t i = begin; i < end; i++)
		run_item(c, items + i, i + 1 < end ? items + i + 1 : NULL, thread, scratch);
}

/* Computes what the cut says. */
static void run_cut(const struct attention_call *c)
{
	struct attn_plan *plan = c->f->plan;
	const struct attn_tile *tiles = c->cut->tiles.p;
	for (int64_t i = 0; i < c->cut->n_tiles; i++)
		for (int64_t k = 0; tiles[i].split != WHOLE && k < n_spans(&tiles[i], c->layout->n_head_kv); k++)
			atomic_store_explicit((_Atomic int32_t *)plan->left.p + tiles[i].split + k, tiles[i].n_ranges,
			                      memory_order_relaxed);
	threads_for(c->f->base.threads, c->cut->n_items, 1, run_items, (void *)c);
}

enum status fast_attention(struct backend *b, const void *kv, const struct kv_layout *layout, int32_t layer,
                           const float *q, int32_t n_head, const struct attention_params *params, float *out)
{
	struct fast *f = (struct fast *)b;
	struct attn_cut *p = &f->plan->cut[params->window > 0 ? CUT_WINDOW : CUT_ALL];
	enum status s = STATUS_OK;
	if (layout->type != f->pages->type || (params->chunked && params->window > 0))
		return STATUS_INVALID;
	if (!p->valid || p->n_head != n_head || p->window != params->window || p->chunk != chunk_of(params))
		s = make_cut(f, p, layout, n_head, params, NULL);
	if (s == STATUS_OK && params->chunked)
		s = p->n_choosers > 0 ? STATUS_INVALID : fast_turns(f, params->chunked);
	if (s != STATUS_OK)
		return s;
	struct attention_call c = {f, p, NULL, kv, layout, layer, q, n_head, *params, out};
	const struct fast_queries queries = {f, layout, layer, q, n_head};
	if (p->n_choosers > 0)
		fast_choices_make(&f->plan->choices, &queries, p->n_choosers);
	for (int32_t i = 0; i < f->base.batch->n_seqs && params->window == 0 && s == STATUS_OK; i++) {
		const struct batch_seq *seq = &f->base.batch->seq[i];
		if (seq->probe)
			s = fast_choices_probe(&f->plan->choices, &queries, seq, params->scale);
	}
	if (s != STATUS_OK)
		return s;
	run_cut(&c);
	return STATUS_OK;
}

enum status fast_attention_part(struct backend *b, const void *kv, const struct kv_layout *layout, int32_t layer,
                                const float *q, int32_t n_head, const struct attention_params *params,
                                const struct attention_part *part, float *out)
{
	struct fast *f = (struct fast *)b;
	struct attn_cut *p = &f->plan->cut[CUT_PART];
	size_t queries = (size_t)f->base.batch->seq[part->seq].n_rows * (size_t)n_head;
	if (layout->type != f->pages->type || part->first_page % KV_PART_PAGES != 0)
		return STATUS_INVALID;
	if (part->first) {
		size_t bytes = queries * 2 * ((size_t)layout->head_dim + 2) * sizeof(float);
		if (!scratch_grow(&f->plan->state, bytes))
			return STATUS_NOMEM;
		memset(f->plan->state.p, 0, bytes);
	}
	enum status s = make_cut(f, p, layout, n_head, params, part);
	if (s == STATUS_OK && params->chunked)
		s = fast_turns(f, params->chunked);
	if (s != STATUS_OK)
		return s;
	struct attention_call c = {f, p, part, kv, layout, layer, q, n_head, *params, out};
	run_cut(&c);
	return STATUS_OK;
}

/* ---- Bounds ---- */

struct bounds_call {
	const struct fast *f;
	const char *kv;
	const struct kv_layout *layout;
	const int32_t *pages;
};

/* Items are pages. */
static void bound_pages(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct bounds_call *c = arg;
	const struct kv_layout *l = c->layout;
	const struct cpu_pages *p = c->f->pages;
	uint16_t *widened =
		(uint16_t *)(void *)((float *)c->f->plan->per_thread.p + (size_t)thread * thread_floats(l->head_dim));
	for (int64_t i = begin; i < end; i++) {
		const char *page = c->kv + (size_t)c->pages[i] * l->page_stride;
		const char *wide = l->form == KV_FORM_F16 ? page : narrow_wide_page(l, c->kv, c->pages[i]);
		for (int32_t layer = 0; layer < l->n_layer; layer++)
			for (int32_t head = 0; head < l->n_head_kv; head++) {
				const uint16_t *keys = widened;
				if (wide)
					keys = (const uint16_t *)(const void *)(wide + fast_kv_offset(l, layer, head));
				const void *narrow = page + narrow_offset(l, layer, head);
				void *to = (char *)l->bounds->slab + kv_bounds_offset(l, layer, head, c->pages[i]);
				if (!wide)
					p->narrow_widen(l->form, narrow, l->head_dim, widened);
				bounds_of_keys(keys, p->keys, l->head_dim, to);
			}
	}
}

enum status fast_page_bounds(struct backend *b, const void *kv, const struct kv_layout *layout, const int32_t *pages,
                             int32_t n)
{
	struct fast *f = (struct fast *)b;
	struct bounds_call c = {f, kv, layout, pages};
	if (layout->type != f->pages->type || !layout->bounds)
		return STATUS_INVALID;
	threads_for(f->base.threads, n, 1, bound_pages, &c);
	return STATUS_OK;
}
