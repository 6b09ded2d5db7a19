#include "engine/cpu/fast_choice.h"

#include "engine/cpu/choice.h"

/* A row that chooses. */
struct chooser {
	const struct batch_seq *seq;
	int32_t row;    /* in the batch */
	int32_t own;    /* its page's entry in the block table */
	int64_t chosen; /* where in `chosen` the pages of its first KV head begin */
};

void fast_choices_free(struct fast_choices *o)
{
	scratch_free(&o->rows);
	scratch_free(&o->chosen);
	scratch_free(&o->bounds);
	scratch_free(&o->probe);
}

/* ---- Who chooses ---- */

int32_t fast_chooses_from(const struct batch_seq *seq, int32_t window)
{
	const struct page_choice *c = &seq->choice;
	if (c->n_pages == 0 || window > 0 || c->n_pages > INT32_MAX / KV_PAGE_TOKENS)
		return INT32_MAX;
	return c->from > c->n_pages * KV_PAGE_TOKENS ? c->from : c->n_pages * KV_PAGE_TOKENS;
}

/* Lists the rows of a sequence that choose in out, where it is not NULL, and counts them. */
static int64_t find_choosers(const struct batch_seq *seq, int32_t n_head_kv, int32_t window, int64_t first_chosen,
                             struct chooser *out)
{
	int32_t choose = fast_chooses_from(seq, window),
		row = choose > seq->first_position ? choose - seq->first_position : 0;
	int64_t n = 0;
	for (; row < seq->n_rows; row++, n++) {
		if (out)
			out[n] = (struct chooser){
			        .seq = seq,
			        .row = seq->first_row + row,
			        .own = (seq->first_position + row) / KV_PAGE_TOKENS,
			        .chosen = first_chosen + n * n_head_kv * seq->choice.n_pages,
			};
	}
	return n;
}

int64_t fast_chosen_by(const struct batch_seq *seq, int32_t n_head_kv, int32_t window)
{
	return find_choosers(seq, n_head_kv, window, 0, NULL) * n_head_kv * seq->choice.n_pages;
}

/* The elements of a KV head's queries above zero, those below, and bounds of pages. */
static size_t bound_floats(int32_t group, int32_t head_dim, int32_t n_pages)
{
	return 2 * (size_t)group * (size_t)head_dim + (size_t)n_pages;
}

enum status fast_choices_list(struct fast_choices *o, const struct fast *f, const struct kv_layout *layout,
                              int32_t group, int32_t window, int64_t *n)
{
	const struct batch *batch = f->base.batch;
	int32_t most = 0;
	int64_t n_chosen = 0;
	*n = 0;
	for (int32_t s = 0; s < batch->n_seqs; s++) {
		const struct batch_seq *seq = &batch->seq[s];
		int64_t n_rows = find_choosers(seq, layout->n_head_kv, window, 0, NULL);
		*n += n_rows;
		n_chosen += n_rows * layout->n_head_kv * seq->choice.n_pages;
		most = n_rows > 0 && seq->n_pages > most ? seq->n_pages : most;
	}
	if (*n == 0)
		return STATUS_OK;
	if (!layout->bounds)
		return STATUS_INVALID;
	size_t n_threads = (size_t)threads_count(f->base.threads);
	if (!scratch_grow(&o->rows, (size_t)*n * sizeof(struct chooser)) ||
	    !scratch_grow(&o->chosen, (size_t)n_chosen * sizeof(int32_t)) ||
	    !scratch_grow(&o->bounds, n_threads * bound_floats(group, layout->head_dim, most) * sizeof(float)))
		return STATUS_NOMEM;
	o->most_pages = most;
	struct chooser *out = o->rows.p;
	n_chosen = 0;
	for (int32_t s = 0; s < batch->n_seqs; s++) {
		out += find_choosers(&batch->seq[s], layout->n_head_kv, window, n_chosen, out);
		n_chosen += fast_chosen_by(&batch->seq[s], layout->n_head_kv, window);
	}
	return STATUS_OK;
}

/* ---- Bounds ---- */

/*
 * bound[i]: of the keys whose least and greatest are those with number pages[i] at `bounds`, for the queries of a row
 * that share KV head `head_kv`. split: room for their elements above zero, and below.
 */
static void bound_pages(const struct fast_queries *q, int64_t row, int32_t head_kv, const void *bounds,
                        const int32_t *pages, int32_t n, float *split, float *bound)
{
	int32_t group = q->n_head / q->layout->n_head_kv;
	int64_t size = (int64_t)group * q->layout->head_dim;
	const float *from = q->q + row * q->n_head * q->layout->head_dim + head_kv * size;
	float *plus = split, *minus = split + size;
	for (int64_t i = 0; i < size; i++) {
		plus[i] = from[i] > 0 ? from[i] : 0;
		minus[i] = from[i] > 0 ? 0 : from[i];
	}
	q->f->pages->attn_bound(&(struct bound_job){
	        .bounds = bounds,
	        .pages = pages,
	        .n = n,
	        .head_dim = q->layout->head_dim,
	        .n_heads = group,
	        .plus = plus,
	        .minus = minus,
	        .bound = bound,
	});
}

/* ---- Choices ---- */

struct choosing {
	struct fast_choices *o;
	const struct fast_queries *q;
};

/* What choice i of a layer, of a row and a KV head, needs. */
struct choice {
	const struct chooser *a;
	int32_t head_kv;
	float *bound; /* [entries of the block table] */
};

/* A thread's place among the bounds, or one of a choice's own: there are no more choices than threads then. */
static float *place_at(const struct choosing *c, int64_t place)
{
	int32_t group = c->q->n_head / c->q->layout->n_head_kv;
	return (float *)c->o->bounds.p +
	       (size_t)place * bound_floats(group, c->q->layout->head_dim, c->o->most_pages);
}

static struct choice choice_at(const struct choosing *c, int64_t i, int64_t place)
{
	const struct kv_layout *l = c->q->layout;
	int32_t group = c->q->n_head / l->n_head_kv;
	return (struct choice){
	        .a = (const struct chooser *)c->o->rows.p + i / l->n_head_kv,
	        .head_kv = (int32_t)(i % l->n_head_kv),
	        .bound = place_at(c, place) + 2 * (size_t)group * (size_t)l->head_dim,
	};
}

/* Piece `piece` of `n_pieces` of the pages that may be chosen. */
static void bound_piece(const struct choosing *c, const struct choice *at, int64_t piece, int64_t n_pieces, int thread)
{
	const struct kv_layout *l = c->q->layout;
	const struct page_choice *choice = &at->a->seq->choice;
	int32_t n = at->a->own + 1 - choice->n_last - choice->n_first;
	int32_t from = choice->n_first + (int32_t)(n * piece / n_pieces),
		to = choice->n_first + (int32_t)(n * (piece + 1) / n_pieces);
	const char *bounds = (const char *)l->bounds->slab + kv_bounds_offset(l, c->q->layer, at->head_kv, 0);
	bound_pages(c->q, at->a->row, at->head_kv, bounds, at->a->seq->block_table + from, to - from,
	            place_at(c, thread), at->bound + from);
}

static void choose(const struct choosing *c, const struct choice *at)
{
	const struct page_choice *choice = &at->a->seq->choice;
	int32_t *chosen = (int32_t *)c->o->chosen.p + at->a->chosen + (int64_t)at->head_kv * choice->n_pages;
	choose_pages(choice, at->a->seq->block_table, at->a->own, at->bound, chosen);
}

static void choose_items(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct choosing *c = arg;
	for (int64_t i = begin; i < end; i++) {
		struct choice at = choice_at(c, i, thread);
		bound_piece(c, &at, 0, 1, thread);
		choose(c, &at);
	}
}

/* Items are (choice, piece), as many pieces of each as there are threads. */
static void bound_items(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct choosing *c = arg;
	int64_t n_pieces = threads_count(c->q->f->base.threads);
	for (int64_t i = begin; i < end; i++) {
		struct choice at = choice_at(c, i / n_pieces, i / n_pieces);
		bound_piece(c, &at, i % n_pieces, n_pieces, thread);
	}
}

/* Threads share the pages of a choice where there are fewer choices than threads. */
void fast_choices_make(struct fast_choices *o, const struct fast_queries *q, int64_t n_rows)
{
	struct choosing c = {o, q};
	struct threads *threads = q->f->base.threads;
	int64_t n = n_rows * q->layout->n_head_kv, n_threads = threads_count(threads);
	if (n >= n_threads) {
		threads_for(threads, n, 1, choose_items, &c);
		return;
	}
	threads_for(threads, n * n_threads, 1, bound_items, &c);
	for (int64_t i = 0; i < n; i++) {
		struct choice at = choice_at(&c, i, i);
		choose(&c, &at);
	}
}

/* ---- Pages elsewhere ---- */

struct probing {
	struct fast_choices *o;
	const struct fast_queries *q;
	const struct batch_seq *seq;
	const int32_t *at; /* [n_pages] where their bounds are, counted in bounds */
	float scale;
};

/* Items are (row, KV head). */
static void probe_items(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct probing *p = arg;
	const struct kv_layout *l = p->q->layout;
	const struct page_probe *probe = p->seq->probe;
	int32_t group = p->q->n_head / l->n_head_kv;
	float *split = (float *)p->o->probe.p + (size_t)thread * bound_floats(group, l->head_dim, probe->n_pages),
	      *bound = split + 2 * (size_t)group * (size_t)l->head_dim;
	for (int64_t i = begin; i < end; i++) {
		int32_t head_kv = (int32_t)(i % l->n_head_kv);
		size_t first = (size_t)(p->q->layer * l->n_head_kv + head_kv) * 2 * (size_t)l->head_dim;
		bound_pages(p->q, p->seq->first_row + i / l->n_head_kv, head_kv, probe->bounds + first, p->at,
		            probe->n_pages, split, bound);
		probe_add(bound, probe->n_pages, p->scale, probe->score);
	}
}

enum status fast_choices_probe(struct fast_choices *o, const struct fast_queries *q, const struct batch_seq *seq,
                               float scale)
{
	const struct kv_layout *l = q->layout;
	struct threads *threads = q->f->base.threads;
	int32_t n = seq->probe->n_pages;
	size_t floats = (size_t)threads_count(threads) * bound_floats(q->n_head / l->n_head_kv, l->head_dim, n);
	if (!scratch_grow(&o->probe, floats * sizeof(float) + (size_t)n * sizeof(int32_t)))
		return STATUS_NOMEM;
	int32_t *at = (int32_t *)(void *)((float *)o->probe.p + floats);
	for (int32_t i = 0; i < n; i++)
		at[i] = i * l->n_layer * l->n_head_kv;
	struct probing p = {o, q, seq, at, scale};
	threads_for(threads, (int64_t)seq->n_rows * l->n_head_kv, 1, probe_items, &p);
	return STATUS_OK;
}
