/*
 * The attention of a step, divided: which rows go through which of the kernels of attention.cuh, in what pieces, and
 * where these leave what others add up.
 */
#include "cuda/backend.cuh"

#include <stdlib.h>
#include <string.h>

namespace GPU_NS
{

/* Chunks of fewer queries than this per KV head are spread over splits as decode rows are. */
enum { WHOLE_QUERIES = 64 };

static bool is_whole(const struct batch_seq *q, int group)
{
	return static_cast<int64_t>(q->n_rows) * group >= WHOLE_QUERIES;
}

/* The items of a kind of layers. The arrays are NULL while they are only counted. */
struct dividing {
	struct attention_item *parts, *whole;
	struct merge_item *merges;
	struct chooser *choosers;
	int n_parts, n_whole, n_merges, n_choosers;
	int most;	/* entries of a chooser's table */
	size_t entries; /* of chosen lists */
	/*
	 * Partial results' slots, and weights of whole items' pages: of those so far that are launched together, and of
	 * the most that are.
	 */
	size_t slots, most_slots, weights, most_weights;
	size_t slots_at_once;
	bool takes_turns;
	int turn;		   /* which of the launches of whole items it is */
	struct attention_tells to; /* of the sequence at hand */
};

static bool tells(const struct attention_tells &to)
{
	return to.mass != NOBODY || to.look != NOBODY;
}

/* The splits of some rows, and what they are merged by. */
static void put_parts(struct dividing *d, struct attention_item item)
{
	const int n_splits = ceil_div(item.first_position + item.n_rows, SPLIT_TOKENS);
	const size_t slots = static_cast<size_t>(n_splits) * static_cast<size_t>(item.n_rows);
	if (d->slots > 0 && d->slots + slots > d->slots_at_once) {
		d->slots = 0; /* from which whoever launches them knows that a turn begins */
		d->takes_turns = true;
	}
	if (d->slots + slots > d->most_slots)
		d->most_slots = d->slots + slots;
	for (int r = 0; r < item.n_rows; r++) {
		if (d->merges)
			d->merges[d->n_merges] = {item.first_row + r,
						  item.first_position + r,
						  static_cast<int32_t>(d->slots) + r,
						  item.n_rows,
						  n_splits,
						  d->to.mass,
						  d->to.look};
		d->n_merges++;
	}
	for (int split = 0; split < n_splits; split++) {
		item.first_split = split;
		item.partial = static_cast<int32_t>(d->slots);
		if (d->parts)
			d->parts[d->n_parts] = item;
		d->n_parts++;
		d->slots += static_cast<size_t>(item.n_rows);
	}
}

static void put_whole(struct dividing *d, struct attention_item item, int n_head_kv)
{
	const int last = item.first_position + item.n_rows - 1;
	const size_t weights =
		item.tells ? (static_cast<size_t>(last) / KV_PAGE_TOKENS + 1) * static_cast<size_t>(n_head_kv) : 0;
	if (d->weights > 0 && d->weights + weights > WEIGHTS_AT_ONCE) {
		d->weights = 0;
		d->turn++;
		d->takes_turns = true;
	}
	item.first_split = d->turn;
	item.partial = static_cast<int32_t>(d->weights);
	d->weights += weights;
	d->most_weights = d->weights > d->most_weights ? d->weights : d->most_weights;
	if (d->whole)
		d->whole[d->n_whole] = item;
	d->n_whole++;
}

/* A row that chooses reads as if there were nothing but its list, in which its own page is the last. */
static void put_chooser(struct dividing *d, struct attention_item item, const struct page_choice *c, int table,
			int n_head_kv)
{
	const int place = item.first_position, own = place / KV_PAGE_TOKENS;
	item.first_position = (c->n_pages - 1) * KV_PAGE_TOKENS + place % KV_PAGE_TOKENS;
	item.chosen = static_cast<int32_t>(d->entries);
	if (d->choosers)
		d->choosers[d->n_choosers] = {item.first_row, table,	  own,	      c->n_first,
					      c->n_last,      c->n_pages, item.chosen};
	d->n_choosers++;
	d->entries += static_cast<size_t>(c->n_pages) * static_cast<size_t>(n_head_kv);
	d->most = own + 1 > d->most ? own + 1 : d->most;
	put_parts(d, item);
}

/* How many rows from `position` on an item may have, of those `left`. */
static int rows_from(int position, int left, int most, int chunk)
{
	most = min_int(left, most);
	return chunk > 0 ? min_int(most, chunk - position % chunk) : most;
}

static void divide(const struct batch *batch, const struct attention_plan *plan, int layers, struct dividing *d)
{
	const int group = plan->n_head / plan->n_head_kv;
	const int rows_part = part_rows(plan->n_head, plan->n_head_kv);
	const int rows_whole = whole_rows(plan->n_head, plan->n_head_kv, plan->head_dim);
	int table = 0;
	for (int i = 0; i < batch->n_seqs; i++) {
		const struct batch_seq *q = &batch->seq[i];
		const bool in_whole = is_whole(q, group);
		if (q->far) {
			table += ceil_div(q->first_position + q->n_rows, KV_PAGE_TOKENS);
			continue;
		}
		d->to = {q->mass ? table : NOBODY, q->look ? i : NOBODY};
		int exact = q->n_rows; /* those behind choose */
		while (layers == LAYERS_ALL && exact > 0 &&
		       page_choice_binds(&q->choice, q->first_position + exact - 1))
			exact--;
		for (int row = 0; row < q->n_rows;) {
			const int most = row >= exact ? 1
						      : rows_from(q->first_position + row, exact - row,
								  in_whole ? rows_whole : rows_part, plan->chunk);
			struct attention_item item = {};
			item.seq = i;
			item.first_row = q->first_row + row;
			item.n_rows = most;
			item.first_position = q->first_position + row;
			item.chosen = CHOSEN_NONE;
			item.tells = tells(d->to);
			if (row >= exact) {
				put_chooser(d, item, &q->choice, table, plan->n_head_kv);
			} else if (in_whole) {
				put_whole(d, item, plan->n_head_kv);
			} else {
				put_parts(d, item);
			}
			row += most;
		}
		table += ceil_div(q->first_position + q->n_rows, KV_PAGE_TOKENS);
	}
}

/* Room on the device for what the kernels leave for each other, where all kinds of layers find it. */
static enum status grow_for(struct cuda_backend *b, size_t slots, size_t most_weights, const struct dividing *d)
{
	const struct attention_plan *plan = &b->plan;
	const size_t heads = static_cast<size_t>(plan->n_head);
	const size_t lists =
		static_cast<size_t>(min_int(plan->n_choosers, CHOOSERS_AT_ONCE)) * static_cast<size_t>(plan->n_head_kv);
	if (slots > INT32_MAX || d->entries > INT32_MAX)
		return STATUS_NOMEM;
	TRY(grow(b, &b->partial, slots * heads * static_cast<size_t>(2 + plan->head_dim) * sizeof(float)));
	if (b->told_bytes) {
		TRY(grow(b, &b->part_weights,
			 slots * heads * (SPLIT_TOKENS / KV_PAGE_TOKENS) * sizeof(struct page_weight)));
		TRY(grow(b, &b->whole_weights,
			 most_weights * static_cast<size_t>(whole_queries(plan->head_dim)) *
				 sizeof(struct page_weight)));
	}
	if (plan->n_choosers == 0)
		return STATUS_OK;
	TRY(grow(b, &b->scores, lists * static_cast<size_t>(plan->most) * sizeof(float)));
	return grow(b, &b->chosen, d->entries * sizeof(int32_t));
}

/* For the sums of so many whole items. */
static enum status grow_state(struct cuda_backend *b, int n_items)
{
	const struct attention_plan *plan = &b->plan;
	return grow(b, &b->state,
		    static_cast<size_t>(n_items) * static_cast<size_t>(plan->n_head_kv) * whole_state(plan->head_dim) *
			    sizeof(float));
}

/*
 * Of a sequence with far pages: whole items, or parts by splits, so that those of some pages stand together. Returns
 * the partial results' slots.
 */
static size_t divide_far(const struct batch_seq *q, int32_t seq, const struct attention_plan *plan, struct far_plan *f,
			 struct attention_item *items, struct merge_item *merges)
{
	const int most = f->is_whole ? whole_rows(plan->n_head, plan->n_head_kv, plan->head_dim)
				     : part_rows(plan->n_head, plan->n_head_kv);
	size_t slots = 0;
	f->seq = seq;
	f->n_splits = ceil_div(q->first_position + q->n_rows, SPLIT_TOKENS);
	f->n_merges = f->is_whole ? 0 : q->n_rows;
	f->n_items = 0;
	for (int row = 0; row < q->n_rows; f->n_items++)
		row += rows_from(q->first_position + row, q->n_rows - row, most, plan->chunk);
	for (int i = 0, row = 0; i < f->n_items; i++) {
		struct attention_item item = {};
		item.seq = seq;
		item.first_row = q->first_row + row;
		item.first_position = q->first_position + row;
		item.n_rows = rows_from(item.first_position, q->n_rows - row, most, plan->chunk);
		item.chosen = CHOSEN_NONE;
		const int first = row;
		row += item.n_rows;
		if (f->is_whole) {
			if (items)
				items[i] = item;
			continue;
		}
		for (int r = 0; merges && r < item.n_rows; r++)
			merges[first + r] = {item.first_row + r,
						item.first_position + r,
						static_cast<int32_t>(slots) + r,
						item.n_rows,
						ceil_div(item.first_position + item.n_rows, SPLIT_TOKENS),
						NOBODY,
						NOBODY};
		for (int split = 0; split < f->n_splits; split++) {
			item.first_split = split;
			item.partial = static_cast<int32_t>(slots);
			if (items)
				items[split * f->n_items + i] = item;
			slots += static_cast<size_t>(item.n_rows);
		}
	}
	return slots;
}

static bool room_for_plans(struct far_stages *f, int n)
{
	if (n <= f->cap_plans)
		return true;
	void *p = realloc(static_cast<void *>(f->plans), static_cast<size_t>(n) * sizeof *f->plans);
	if (!p)
		return false;
	f->plans = static_cast<struct far_plan *>(p);
	f->cap_plans = n;
	return true;
}

/* What is to be done for sequences with far pages. */
static enum status put_far(struct cuda_backend *b)
{
	struct far_stages *f = &b->far;
	const struct attention_plan *plan = &b->plan;
	const struct batch *batch = b->batch;
	size_t slots = 0;
	int n_whole = 0;
	f->n_plans = 0;
	for (int32_t i = 0; i < batch->n_seqs; i++) {
		const struct batch_seq *q = &batch->seq[i];
		if (!q->far)
			continue;
		if (!room_for_plans(f, f->n_plans + 1))
			return STATUS_NOMEM;
		struct far_plan *p = &f->plans[f->n_plans++];
		*p = {};
		p->is_whole = is_whole(q, plan->n_head / plan->n_head_kv);
		const size_t n = divide_far(q, i, plan, p, NULL, NULL);
		const size_t n_items =
			static_cast<size_t>(p->n_items) * static_cast<size_t>(p->is_whole ? 1 : p->n_splits);
		slots = n > slots ? n : slots;
		n_whole = p->is_whole && p->n_items > n_whole ? p->n_items : n_whole;
		TRY(upload_room(b, n_items * sizeof(struct attention_item) +
					   static_cast<size_t>(p->n_merges) * sizeof(struct merge_item) + 64));
		struct attention_item *items = put<struct attention_item>(b, n_items, &p->items);
		struct merge_item *merges = put<struct merge_item>(b, static_cast<size_t>(p->n_merges), &p->merges);
		divide_far(q, i, plan, p, items, merges);
	}
	if (f->n_plans == 0)
		return STATUS_OK;
	TRY(upload_room(b, FAR_STAGE_PAGES * sizeof(int32_t) + 16));
	int32_t *in_order = put<int32_t>(b, FAR_STAGE_PAGES, &f->in_order);
	for (int32_t i = 0; i < FAR_STAGE_PAGES; i++)
		in_order[i] = i;
	struct dividing none = {};
	TRY(grow_for(b, slots, 0, &none));
	return grow_state(b, n_whole);
}

/* Puts what was counted; n_parts: with those that are not there, which have no rows. */
static void put_division(struct cuda_backend *b, int layers, const struct dividing *counted, int n_parts)
{
	struct attention_plan *plan = &b->plan;
	struct attention_division *to = &plan->of[layers];
	struct dividing d = {};
	d.slots_at_once = counted->slots_at_once;
	d.parts = put<struct attention_item>(b, static_cast<size_t>(n_parts), &to->parts);
	d.whole = put<struct attention_item>(b, static_cast<size_t>(counted->n_whole), &to->whole);
	d.merges = put<struct merge_item>(b, static_cast<size_t>(counted->n_merges), &to->merges);
	if (counted->n_choosers)
		d.choosers = put<struct chooser>(b, static_cast<size_t>(counted->n_choosers), &plan->choosers);
	divide(b->batch, plan, layers, &d);
	if (n_parts > d.n_parts)
		memset(static_cast<void *>(d.parts + d.n_parts), 0,
		       static_cast<size_t>(n_parts - d.n_parts) * sizeof *d.parts);
	to->n_parts = n_parts;
	to->n_whole = d.n_whole;
	to->n_merges = d.n_merges;
	to->takes_turns = d.takes_turns;
}

enum status put_plan(struct cuda_backend *b)
{
	struct attention_plan *plan = &b->plan;
	struct dividing d[LAYERS_KINDS] = {};
	for (int i = 0; i < LAYERS_KINDS; i++)
		d[i].slots_at_once = PARTIAL_BYTES / (static_cast<size_t>(plan->n_head) *
						      static_cast<size_t>(2 + plan->head_dim) * sizeof(float));
	int n_parts[LAYERS_KINDS] = {}, kinds = 1;
	size_t slots = 0, weights = 0, bytes = 64;
	divide(b->batch, plan, LAYERS_ALL, &d[LAYERS_ALL]);
	if (d[LAYERS_ALL].n_choosers)
		divide(b->batch, plan, LAYERS_WINDOW, &d[kinds++]);
	for (int i = 0; i < kinds; i++)
		b->graphs.fits = b->graphs.fits && d[i].n_whole == 0 && !d[i].takes_turns;
	plan->n_choosers = d[LAYERS_ALL].n_choosers;
	plan->most = d[LAYERS_ALL].most;
	if (b->graphs.fits && plan->n_choosers)
		plan->most = rounded(plan->most);
	for (int i = 0; i < kinds; i++) {
		n_parts[i] = b->graphs.fits ? rounded(d[i].n_parts) : d[i].n_parts;
		const size_t most_slots = b->graphs.fits ? static_cast<size_t>(n_parts[i]) : d[i].most_slots;
		slots = most_slots > slots ? most_slots : slots;
		weights = d[i].most_weights > weights ? d[i].most_weights : weights;
		bytes += static_cast<size_t>(n_parts[i] + d[i].n_whole) * sizeof(struct attention_item) +
			 static_cast<size_t>(d[i].n_merges) * sizeof(struct merge_item) +
			 static_cast<size_t>(d[i].n_choosers) * sizeof(struct chooser) + 64;
		b->graphs.key.n_parts[i] = n_parts[i];
	}
	b->graphs.key.n_choosers = plan->n_choosers;
	b->graphs.key.most = plan->n_choosers ? plan->most : 0;
	TRY(upload_room(b, bytes));
	TRY(grow_for(b, slots, weights, &d[LAYERS_ALL]));
	for (int i = 0; asks_more(b) && i < kinds; i++)
		TRY(grow_state(b, d[i].n_whole));
	for (int i = 0; i < kinds; i++)
		put_division(b, i, &d[i], n_parts[i]);
	if (kinds == 1)
		plan->of[LAYERS_WINDOW] = plan->of[LAYERS_ALL];
	TRY(put_far(b));
	plan->made = true;
	return STATUS_OK;
}

enum status plan_attention(struct cuda_backend *b, int n_head, int n_head_kv, int head_dim, int chunk)
{
	struct attention_plan *plan = &b->plan;
	if (plan->made && plan->n_head == n_head && plan->n_head_kv == n_head_kv && plan->head_dim == head_dim &&
	    (chunk == 0 || plan->chunk == chunk))
		return STATUS_OK;
	*plan = {};
	plan->n_head = n_head;
	plan->n_head_kv = n_head_kv;
	plan->head_dim = head_dim;
	plan->chunk = chunk;
	const enum status s = put_plan(b);
	return s == STATUS_OK ? upload_send(b) : s;
}

} // namespace GPU_NS
