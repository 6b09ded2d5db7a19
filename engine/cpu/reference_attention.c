/*
 * The reference backend's KV cache and attention over it.
 *
 * KV page: [n_layer][K, V][n_head_kv][page_tokens][head_dim] halves or bfloat16s.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cpu/choice.h"
#include "engine/cpu/narrow.h"
#include "engine/cpu/reference.h"
#include "engine/cpu/watch.h"

enum { KEY, VALUE };

/* Where the head_dim halves of one position begin in a page that is not narrow. */
static size_t kv_offset(const struct kv_layout *l, int32_t layer, int what, int32_t head, int32_t token)
{
	size_t vector =
		((((size_t)layer * 2 + (size_t)what) * (size_t)l->n_head_kv + (size_t)head) * (size_t)l->page_tokens +
	         (size_t)token);
	return vector * (size_t)l->head_dim * sizeof(uint16_t);
}

/* One position of one head in a narrow page: its codes, K and V both [16][head_dim], and its scale. */
struct narrow_place {
	uint8_t *code;
	float *scale;
};

static struct narrow_place narrow_place(const struct kv_layout *l, const char *page, int32_t layer, int what,
                                        int32_t head, int32_t token)
{
	struct narrow_block *b = (struct narrow_block *)(void *)(page + narrow_offset(l, layer, head));
	return (struct narrow_place){b->code + ((int64_t)what * KV_PAGE_TOKENS + token) * l->head_dim,
	                             (what == KEY ? b->k_scale : b->v_scale) + token};
}

/* A value as an element of a page that is not narrow; halves are held at the ends of their range. */
static uint16_t element(const struct kv_layout *l, float x)
{
	if (l->type == QUANT_BF16)
		return quant_float_to_bf16(x);
	return quant_float_to_half(x > KV_HALF_MAX ? KV_HALF_MAX : x < -KV_HALF_MAX ? -KV_HALF_MAX : x);
}

/* One vector: in its page, and in the page's wide copy if it is narrow and has one. */
static void store_vector(const struct kv_layout *l, char *kv, int32_t page, int32_t layer, int what, int32_t head,
                         int32_t token, const float *x)
{
	char *at = kv + (size_t)page * l->page_stride,
	     *wide = l->form == KV_FORM_F16 ? at : narrow_wide_page(l, kv, page);
	if (l->form != KV_FORM_F16) {
		struct narrow_place p = narrow_place(l, at, layer, what, head, token);
		*p.scale = kv_form_pack(l->form, x, l->head_dim, FLT_MAX, p.code, 1);
		if (!wide)
			narrow_count(l, *p.scale, 0);
	}
	uint16_t *to = wide ? (uint16_t *)(void *)(wide + kv_offset(l, layer, what, head, token)) : NULL;
	for (int32_t d = 0; to && d < l->head_dim; d++)
		to[d] = element(l, x[d]);
}

static void unpack_vector(const struct kv_layout *l, struct narrow_place p, float *to)
{
	for (int32_t d = 0; d < l->head_dim; d++)
		to[d] = *p.scale * (l->form == KV_FORM_INT8 ? (float)(int8_t)p.code[d] : quant_fp8_to_float(p.code[d]));
}

/* See watch.h: what the narrow page has of a layer and head, in its wide copy. */
static void widen_block(void *arg, const struct kv_layout *l, int32_t layer, int32_t head,
                        const struct narrow_block *from, char *wide)
{
	float *x = ((struct reference *)arg)->scratch;
	const char *page = (const char *)from - narrow_offset(l, layer, head);
	for (int32_t token = 0; token < KV_PAGE_TOKENS; token++)
		for (int what = KEY; what <= VALUE; what++) {
			uint16_t *to = (uint16_t *)(void *)(wide + kv_offset(l, layer, what, head, token));
			unpack_vector(l, narrow_place(l, page, layer, what, head, token), x);
			for (int32_t d = 0; d < l->head_dim; d++)
				to[d] = element(l, x[d]);
		}
}

static int32_t peak(const float *x, int64_t n)
{
	int32_t top = 0, bits;
	for (int64_t i = 0; i < n; i++) {
		memcpy(&bits, x + i, sizeof bits);
		top = (bits & INT32_MAX) > top ? bits & INT32_MAX : top;
	}
	return top;
}

enum status reference_kv_write(struct backend *b, void *kv, const struct kv_layout *l, int32_t layer, const float *k,
                               const float *v)
{
	struct reference *r = reference_of(b);
	const struct batch *batch = r->base.batch;
	const struct kv_look look = {r->base.threads, batch, kv, l, k, v, peak, widen_block, r};
	enum status st = reference_scratch(r, (size_t)l->head_dim);
	if (st != STATUS_OK)
		return st;
	kv_look(&look);
	for (int32_t s = 0; s < batch->n_seqs; s++) {
		const struct batch_seq *seq = &batch->seq[s];
		for (int32_t i = 0; i < seq->n_rows; i++) {
			int32_t position = seq->first_position + i;
			int32_t page = seq->block_table[position / l->page_tokens], token = position % l->page_tokens;
			for (int32_t h = 0; h < l->n_head_kv; h++)
				for (int what = KEY; what <= VALUE; what++) {
					const float *from =
						(what == KEY ? k : v) +
						((int64_t)(seq->first_row + i) * l->n_head_kv + h) * l->head_dim;
					store_vector(l, kv, page, layer, what, h, token, from);
				}
		}
	}
	return STATUS_OK;
}

struct attention_job {
	struct reference *r;
	const char *kv;
	const struct kv_layout *layout;
	int32_t layer;
	const float *q;
	int32_t n_head;
	struct attention_params params;
	float *out;
	size_t n_probed; /* pages of a probe at most: its scratch is behind all other */
};

/*
 * The vectors of one query that the keys of its own chunk meet, those of the chunk before, and all others: struct
 * rope_chunks.
 */
struct query {
	const float *x[ROPE_CHUNKS_FAR + 1];
	int64_t own, before; /* the first positions of these; 0 without chunks */
};

static const float *query_at(const struct query *q, int64_t position)
{
	return q->x[position >= q->own ? ROPE_CHUNK_OWN : position >= q->before ? ROPE_CHUNK_BEFORE : ROPE_CHUNKS_FAR];
}

static void turn(const float *q, int32_t dim, const struct rope_params *p, int32_t by, float *out)
{
	int32_t half = p->n_dims / 2;
	memcpy(out, q, (size_t)dim * sizeof *out);
	for (int32_t i = 0; i < half; i++) {
		int32_t at = p->pairing == ROPE_INTERLEAVED ? 2 * i : i,
			other = p->pairing == ROPE_INTERLEAVED ? at + 1 : at + half;
		double angle = (double)by * p->inv_freq[i], c = cos(angle), s = sin(angle);
		out[at] = (float)(q[at] * c - q[other] * s);
		out[other] = (float)(q[at] * s + q[other] * c);
	}
}

static float *turned_at(const struct attention_job *j, int64_t row, int64_t head, enum rope_chunk keys)
{
	return j->r->turned + ((row * j->n_head + head) * ROPE_CHUNKS_FAR + keys - 1) * j->layout->head_dim;
}

/* Items are rows, and the places of rows in block tables are their positions. */
static void turn_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct attention_job *j = arg;
	const struct rope_params *p = j->params.chunked;
	(void)thread;
	for (int64_t row = begin; row < end; row++)
		for (int64_t h = 0; h < j->n_head; h++)
			for (int keys = ROPE_CHUNK_BEFORE; keys <= ROPE_CHUNKS_FAR; keys++) {
				int32_t by = rope_chunk_turn(&p->chunks, j->r->base.batch->position[row],
							     (enum rope_chunk)keys);
				turn(j->q + (row * j->n_head + h) * j->layout->head_dim, j->layout->head_dim, p, by,
				     turned_at(j, row, h, (enum rope_chunk)keys));
			}
}

static enum status turn_queries(const struct attention_job *j)
{
	struct reference *r = j->r;
	size_t n = (size_t)r->base.batch->n_rows * (size_t)j->n_head * ROPE_CHUNKS_FAR * (size_t)j->layout->head_dim;
	if (!j->params.chunked)
		return STATUS_OK;
	float *turned = realloc(r->turned, n * sizeof *turned);
	if (!turned)
		return STATUS_NOMEM;
	r->turned = turned;
	threads_for(r->base.threads, r->base.batch->n_rows, 1, turn_rows, (void *)j);
	return STATUS_OK;
}

/* That of a row and head. */
static struct query query_of(const struct attention_job *j, int64_t row, int64_t head, int64_t position)
{
	struct query q = {.x = {j->q + (row * j->n_head + head) * j->layout->head_dim}};
	if (!j->params.chunked)
		return q;
	const struct rope_chunks *c = &j->params.chunked->chunks;
	q.x[ROPE_CHUNK_BEFORE] = turned_at(j, row, head, ROPE_CHUNK_BEFORE);
	q.x[ROPE_CHUNKS_FAR] = turned_at(j, row, head, ROPE_CHUNKS_FAR);
	q.own = rope_chunk_begin(c, (int32_t)position, ROPE_CHUNK_OWN);
	q.before = rope_chunk_begin(c, (int32_t)position, ROPE_CHUNK_BEFORE);
	return q;
}

/*
 * Scratch of attention over n positions: K and V as floats, scores, and a row of sums in double; K and V once more of
 * what a row has chosen, bounds, and page numbers.
 */
static size_t attention_floats(const struct kv_layout *l, int64_t n)
{
	size_t n_pages = (size_t)n / KV_PAGE_TOKENS + 1;
	return (size_t)n * (4 * (size_t)l->head_dim + 1) + 2 * (size_t)l->head_dim + 1 + n_pages +
	       n_pages * sizeof(int32_t) / sizeof(float);
}

static float score_of(const float *q, const float *k, int32_t dim, const struct attention_params *p)
{
	double s = reference_dot(q, k, dim) * p->scale;
	return (float)(p->softcap > 0 ? p->softcap * tanh(s / p->softcap) : s);
}

/* first: the place of the first position, for what `seq` wants to know or adds by places. */
static void attend(const struct query *q, const float *k, const float *v, int64_t n, int32_t dim,
		   const struct attention_params *params, float *score, double *sum, float *out, int64_t first,
		   const struct batch_seq *seq)
{
	uint64_t *mass = seq->mass;
	float max = -INFINITY;
	double total = 0;
	for (int64_t t = 0; t < n; t++) {
		score[t] = score_of(query_at(q, first + t), k + t * dim, dim, params);
		score[t] += seq->plus && first + t < seq->n_plus ? seq->plus[first + t] : 0;
		max = score[t] > max ? score[t] : max;
	}
	for (int32_t d = 0; d < dim; d++)
		sum[d] = 0;
	for (int64_t t = 0; t < n; t++) {
		double p = exp((double)score[t] - max);
		total += p;
		for (int32_t d = 0; d < dim; d++)
			sum[d] += p * v[t * dim + d];
	}
	for (int32_t d = 0; d < dim; d++)
		out[d] = (float)(sum[d] / total);
	if (seq->look) {
		double entropy = 0;
		for (int64_t t = 0; t < n; t++) {
			double p = exp((double)score[t] - max) / total;
			entropy -= p > 0 ? p * log(p) : 0;
		}
		look_add(seq->look, entropy, 1 / total);
	}
	if (!mass)
		return;
	/* By pages: the first position may stand within one. */
	double share = 0;
	for (int64_t t = 0; t < n; t++) {
		share += exp((double)score[t] - max) / total;
		if ((first + t) % KV_PAGE_TOKENS != KV_PAGE_TOKENS - 1 && t < n - 1)
			continue;
		mass_add(&mass[(first + t) / KV_PAGE_TOKENS], share);
		share = 0;
	}
}

/* One vector as floats. */
static void load_vector(const struct attention_job *j, int32_t page, int what, int32_t head, int32_t token, float *to)
{
	const struct kv_layout *l = j->layout;
	const char *kv = (const char *)j->kv, *at = kv + (size_t)page * l->page_stride;
	const char *wide = l->form == KV_FORM_F16 ? at : narrow_wide_page(l, kv, page);
	if (!wide) {
		unpack_vector(l, narrow_place(l, at, j->layer, what, head, token), to);
		return;
	}
	const uint16_t *from = (const uint16_t *)(const void *)(wide + kv_offset(l, j->layer, what, head, token));
	for (int32_t d = 0; d < l->head_dim; d++)
		to[d] = l->type == QUANT_BF16 ? quant_bf16_to_float(from[d]) : j->r->half[from[d]];
}

/* The first position that a row at `position` sees. */
static int64_t first_seen(const struct attention_params *p, int64_t position)
{
	return p->window > 0 && position >= p->window ? position + 1 - p->window : 0;
}

static float bound_element(const struct attention_job *j, uint16_t bits)
{
	return j->layout->type == QUANT_BF16 ? quant_bf16_to_float(bits) : j->r->half[bits];
}

static const uint16_t *bounds_of(const struct kv_layout *l, int32_t layer, int32_t head, int32_t page)
{
	return (const uint16_t *)(const void *)((const char *)l->bounds->slab + kv_bounds_offset(l, layer, head, page));
}

/* The largest bound of a page among the `group` query heads of a KV head; NaN when one of its own is. */
static float page_bound(const struct attention_job *j, const float *q, int32_t group, const uint16_t *least)
{
	const struct kv_layout *l = j->layout;
	double most = -INFINITY;
	for (int32_t h = 0; h < group; h++) {
		double sum = 0;
		for (int32_t d = 0; d < l->head_dim; d++) {
			double low = bound_element(j, least[d]), high = bound_element(j, least[l->head_dim + d]),
			       x = q[h * l->head_dim + d];
			sum += x > 0 ? x * high : x * low;
			/* Either bound may be the one that is none. */
			sum += isnan(low) || isnan(high) ? NAN : 0;
		}
		most = sum > most || isnan(sum) ? sum : most;
	}
	return (float)most;
}

/*
 * K and V of the pages that the row at a place chooses, q being its queries of the KV head; how many positions it
 * reads.
 */
static int64_t gather_chosen(const struct attention_job *j, const struct batch_seq *seq, int32_t place, int32_t head,
                             const float *q, int32_t group, float *k, float *v, float *bound, int32_t *pages)
{
	const struct kv_layout *l = j->layout;
	int32_t own = place / KV_PAGE_TOKENS;
	for (int32_t i = seq->choice.n_first; i < own + 1 - seq->choice.n_last; i++)
		bound[i] = page_bound(j, q, group, bounds_of(l, j->layer, head, seq->block_table[i]));
	choose_pages(&seq->choice, seq->block_table, own, bound, pages);
	int32_t n = (seq->choice.n_pages - 1) * KV_PAGE_TOKENS + place % KV_PAGE_TOKENS + 1;
	for (int32_t t = 0; t < n; t++)
		for (int what = KEY; what <= VALUE; what++)
			load_vector(j, pages[t / KV_PAGE_TOKENS], what, head, t % KV_PAGE_TOKENS,
			            (what == KEY ? k : v) + (int64_t)t * l->head_dim);
	return n;
}

/* What a row adds to the scores of pages elsewhere, q being its queries of the KV head. */
static void probe_row(const struct attention_job *j, const struct page_probe *p, int32_t head, const float *q,
		      int32_t group, float *bound)
{
	const struct kv_layout *l = j->layout;
	for (int32_t i = 0; i < p->n_pages; i++) {
		size_t at = ((size_t)i * (size_t)l->n_layer + (size_t)j->layer) * (size_t)l->n_head_kv + (size_t)head;
		bound[i] = page_bound(j, q, group, p->bounds + at * 2 * (size_t)l->head_dim);
	}
	probe_add(bound, p->n_pages, j->params.scale, p->score);
}

/* Items are (sequence, KV head): K and V are gathered through the block table once for all rows and query heads. */
static void attention_items(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct attention_job *j = arg;
	const struct kv_layout *l = j->layout;
	const struct batch *batch = j->r->base.batch;
	int32_t dim = l->head_dim, group = j->n_head / l->n_head_kv;
	for (int64_t item = begin; item < end; item++) {
		const struct batch_seq *seq = &batch->seq[item / l->n_head_kv];
		int32_t head = (int32_t)(item % l->n_head_kv);
		int64_t n = (int64_t)seq->first_position + seq->n_rows;
		if (seq->far)
			continue;
		float *base = j->r->scratch + (size_t)thread * j->r->scratch_floats;
		double *sum = (double *)(((uintptr_t)base + 7) & ~(uintptr_t)7);
		float *k = (float *)(sum + dim), *v = k + n * dim, *score = v + n * dim;
		float *chosen_k = score + n, *chosen_v = chosen_k + n * dim, *bound = chosen_v + n * dim;
		int32_t *pages = (int32_t *)(void *)(bound + n / KV_PAGE_TOKENS + 1);
		for (int64_t t = first_seen(&j->params, seq->first_position); t < n; t++)
			for (int what = KEY; what <= VALUE; what++) {
				load_vector(j, seq->block_table[t / l->page_tokens], what, head,
				            (int32_t)(t % l->page_tokens), (what == KEY ? k : v) + t * dim);
			}
		for (int32_t i = 0; i < seq->n_rows; i++) {
			int64_t position = (int64_t)seq->first_position + i, first = first_seen(&j->params, position);
			int64_t at = ((int64_t)(seq->first_row + i) * j->n_head + head * group) * dim,
				n_read = position + 1 - first;
			const float *row_k = k + first * dim, *row_v = v + first * dim;
			if (j->params.window == 0 && seq->probe)
				probe_row(j, seq->probe, head, j->q + at, group,
					  base + j->r->scratch_floats - j->n_probed);
			if (j->params.window == 0 && page_choice_binds(&seq->choice, (int32_t)position)) {
				n_read = gather_chosen(j, seq, (int32_t)position, head, j->q + at, group, chosen_k,
				                       chosen_v, bound, pages);
				row_k = chosen_k;
				row_v = chosen_v;
			}
			for (int32_t h = 0; h < group; h++, at += dim) {
				struct query query = query_of(j, seq->first_row + i, head * group + h, position);
				attend(&query, row_k, row_v, n_read, dim, &j->params, score, sum, j->out + at, first,
				       seq);
			}
		}
	}
}

enum status reference_attention(struct backend *b, const void *kv, const struct kv_layout *l, int32_t layer,
                                const float *q, int32_t n_head, const struct attention_params *params, float *out)
{
	struct reference *r = reference_of(b);
	const struct batch *batch = r->base.batch;
	int64_t longest = 0;
	for (int32_t s = 0; s < batch->n_seqs; s++) {
		int64_t n = (int64_t)batch->seq[s].first_position + batch->seq[s].n_rows;
		if (params->chunked && batch->seq[s].choice.n_pages > 0)
			return STATUS_INVALID;
		longest = n > longest && !batch->seq[s].far ? n : longest;
	}
	size_t probed = 0;
	for (int32_t s = 0; s < batch->n_seqs; s++)
		probed = batch->seq[s].probe && (size_t)batch->seq[s].probe->n_pages > probed
				 ? (size_t)batch->seq[s].probe->n_pages
				 : probed;
	struct attention_job j = {r, kv, l, layer, q, n_head, *params, out, probed};
	enum status s = reference_scratch(r, attention_floats(l, longest) + probed);
	if (s == STATUS_OK)
		s = turn_queries(&j);
	if (s != STATUS_OK)
		return s;
	threads_for(r->base.threads, (int64_t)batch->n_seqs * l->n_head_kv, 1, attention_items, &j);
	return STATUS_OK;
}

struct bounds_job {
	struct reference *r;
	const char *kv;
	const struct kv_layout *layout;
	const int32_t *pages;
};

/* Items are pages. Narrow keys are widened, as they are for attention. */
static void bound_pages(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct bounds_job *b = arg;
	const struct kv_layout *l = b->layout;
	struct attention_job j = {.r = b->r, .kv = b->kv, .layout = l};
	float *x = b->r->scratch + (size_t)thread * b->r->scratch_floats;
	uint16_t *keys = (uint16_t *)(void *)(x + l->head_dim);
	for (int64_t i = begin; i < end; i++)
		for (j.layer = 0; j.layer < l->n_layer; j.layer++)
			for (int32_t head = 0; head < l->n_head_kv; head++) {
				for (int32_t token = 0; token < KV_PAGE_TOKENS; token++) {
					load_vector(&j, b->pages[i], KEY, head, token, x);
					for (int32_t d = 0; d < l->head_dim; d++)
						keys[token * l->head_dim + d] = element(l, x[d]);
				}
				bounds_of_keys(keys, KV_BY_TOKEN, l->head_dim,
				               (uint16_t *)(void *)((char *)l->bounds->slab +
				                                    kv_bounds_offset(l, j.layer, head, b->pages[i])));
			}
}

enum status reference_page_bounds(struct backend *b, const void *kv, const struct kv_layout *l, const int32_t *pages,
                                  int32_t n)
{
	struct reference *r = reference_of(b);
	enum status s = reference_scratch(r, (size_t)l->head_dim * (1 + KV_PAGE_TOKENS));
	if (s != STATUS_OK)
		return s;
	struct bounds_job j = {r, kv, l, pages};
	threads_for(r->base.threads, n, 1, bound_pages, &j);
	return STATUS_OK;
}

/* ---- Attention by parts ---- */

struct part_job {
	struct attention_job a;
	const struct attention_part *part;
};

/* Scratch of a part: one position's K and V. */
static size_t part_floats(const struct kv_layout *l)
{
	return 2 * (size_t)l->head_dim;
}

/*
 * One more position: what was summed up is scaled to the new maximum. state: [dim] weighted sum, maximum, sum of
 * weights.
 */
static void attend_one(const float *q, const float *k, const float *v, int32_t dim,
                       const struct attention_params *params, double *state)
{
	double s = score_of(q, k, dim, params), *max = state + dim, *total = max + 1;
	if (s > *max) {
		double factor = exp(*max - s);
		for (int32_t d = 0; d < dim; d++)
			state[d] *= factor;
		*total *= factor;
		*max = s;
	}
	double p = exp(s - *max);
	for (int32_t d = 0; d < dim; d++)
		state[d] += p * v[d];
	*total += p;
}

/* Items are KV heads: each position that some row sees is loaded once for all rows and query heads. */
static void part_items(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct part_job *j = arg;
	const struct attention_job *a = &j->a;
	const struct attention_part *part = j->part;
	const struct batch_seq *seq = &a->r->base.batch->seq[part->seq];
	int32_t dim = a->layout->head_dim, group = a->n_head / a->layout->n_head_kv;
	int64_t from = (int64_t)part->first_page * KV_PAGE_TOKENS, to = from + (int64_t)part->n_pages * KV_PAGE_TOKENS;
	float *k = a->r->scratch + (size_t)thread * a->r->scratch_floats, *v = k + dim;
	for (int64_t head = begin; head < end; head++) {
		for (int64_t t = from; t < to && t < (int64_t)seq->first_position + seq->n_rows; t++) {
			for (int what = KEY; what <= VALUE; what++)
				load_vector(a, part->block_table[(t - from) / KV_PAGE_TOKENS], what, (int32_t)head,
				            (int32_t)(t % KV_PAGE_TOKENS), what == KEY ? k : v);
			for (int32_t i = 0; i < seq->n_rows; i++) {
				int64_t position = (int64_t)seq->first_position + i;
				for (int64_t h = head * group;
				     t <= position && t >= first_seen(&a->params, position) && h < (head + 1) * group;
				     h++) {
					struct query q = query_of(a, seq->first_row + i, h, position);
					attend_one(query_at(&q, t), k, v, dim, &a->params,
						   a->r->state + (i * (int64_t)a->n_head + h) * (dim + 2));
				}
			}
		}
	}
}

enum status reference_attention_part(struct backend *b, const void *kv, const struct kv_layout *l, int32_t layer,
                                     const float *q, int32_t n_head, const struct attention_params *params,
                                     const struct attention_part *part, float *out)
{
	struct reference *r = reference_of(b);
	const struct batch_seq *seq = &r->base.batch->seq[part->seq];
	int64_t n = (int64_t)seq->n_rows * n_head, dim = l->head_dim;
	if (part->first_page % KV_PART_PAGES != 0)
		return STATUS_INVALID;
	if (part->first) {
		double *state = realloc(r->state, (size_t)n * ((size_t)dim + 2) * sizeof *state);
		if (!state)
			return STATUS_NOMEM;
		r->state = state;
		for (int64_t i = 0; i < n * (dim + 2); i++)
			state[i] = i % (dim + 2) == dim ? -INFINITY : 0;
	}
	struct part_job j = {{r, kv, l, layer, q, n_head, *params, NULL, 0}, part};
	enum status s = reference_scratch(r, part_floats(l));
	if (s == STATUS_OK)
		s = turn_queries(&j.a);
	if (s != STATUS_OK)
		return s;
	threads_for(r->base.threads, l->n_head_kv, 1, part_items, &j);
	for (int64_t i = 0; part->last && i < n; i++)
		for (int64_t d = 0; d < dim; d++)
			out[(seq->first_row * (int64_t)n_head + i) * dim + d] =
				(float)(r->state[i * (dim + 2) + d] / r->state[i * (dim + 2) + dim + 1]);
	return STATUS_OK;
}
