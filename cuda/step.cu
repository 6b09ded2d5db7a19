/*
 * What a step needs before its kernels: the batch on the device, the attention work divided, scratch memory large
 * enough. Memory grows to what the largest step so far has needed and stays, so that ordinary steps allocate nothing.
 */
#include "cuda/backend.cuh"

#include <stdlib.h>
#include <string.h>

namespace GPU_NS
{

enum status grow(struct cuda_backend *b, struct growing *g, size_t bytes)
{
	void *p;
	if (bytes <= g->bytes)
		return STATUS_OK;
	if (b->graphs.mode == GRAPH_RECORD)
		return STATUS_INTERNAL; /* the step before, of the same shape, has made room */
	graphs_forget(b);
	bytes += bytes / 4;
	enum status s = check(b, cudaStreamSynchronize(b->stream), "waiting before scratch memory grows");
	if (s == STATUS_OK)
		s = check(b, cudaMalloc(&p, bytes), "allocating scratch memory");
	if (s != STATUS_OK)
		return s;
	cudaFree(g->p);
	g->p = p;
	g->bytes = bytes;
	return STATUS_OK;
}

enum status grow_halves(struct cuda_backend *b, int64_t n_rows, int64_t dim)
{
	const int64_t stride = (dim + 255) / 256 * 256;
	if (n_rows <= b->halves_rows && stride <= b->halves_stride)
		return STATUS_OK;
	const int64_t rows = n_rows > b->halves_rows ? n_rows : b->halves_rows;
	const int64_t width = stride > b->halves_stride ? stride : b->halves_stride;
	if (rows > INT32_MAX || width > INT32_MAX || rows > static_cast<int64_t>(PTRDIFF_MAX / sizeof(__half)) / width)
		return STATUS_NOMEM;
	b->halves_of = NULL;
	enum status s = grow(b, &b->halves_x, static_cast<size_t>(rows * width) * sizeof(__half));
	if (s == STATUS_OK)
		s = grow(b, &b->halves_scale, static_cast<size_t>(rows) * sizeof(float));
	if (s != STATUS_OK)
		return s;
	b->halves_rows = static_cast<int>(rows);
	b->halves_stride = static_cast<int>(width);
	return STATUS_OK;
}

/* ---- Upload ---- */

enum status settle(struct cuda_backend *b, const char *what)
{
	const enum status s = check(b, cudaStreamSynchronize(b->stream), what);
	b->upload.in_flight = b->upload.in_flight && s != STATUS_OK;
	return s;
}

/* Begins it anew. If waiting for the last one has failed, the device may not have read it yet. */
static enum status upload_begin(struct cuda_backend *b)
{
	if (b->upload.in_flight)
		TRY(settle(b, "waiting for the step before"));
	b->upload.used = b->upload.sent = 0;
	return STATUS_OK;
}

void upload_free(struct upload *u)
{
	cudaFreeHost(u->host);
	cudaFree(u->device);
	*u = {};
}

/* Room for `bytes` more. What is there already moves along, offsets stay, and all of it is sent again. */
static enum status upload_room(struct cuda_backend *b, size_t bytes)
{
	struct upload *u = &b->upload, bigger = {};
	const size_t need = u->used + bytes;
	if (need <= u->capacity)
		return STATUS_OK;
	graphs_forget(b);
	bigger.capacity = need + need / 2 + 65536;
	bigger.used = u->used;
	enum status s = settle(b, "waiting before the step's memory grows");
	if (s == STATUS_OK)
		s = check(b, cudaMallocHost(reinterpret_cast<void **>(&bigger.host), bigger.capacity),
			  "allocating pinned memory");
	if (s == STATUS_OK)
		s = check(b, cudaMalloc(reinterpret_cast<void **>(&bigger.device), bigger.capacity),
			  "allocating the step's memory");
	if (s != STATUS_OK) {
		upload_free(&bigger);
		return s;
	}
	if (u->used)
		memcpy(bigger.host, u->host, u->used);
	upload_free(u);
	*u = bigger;
	return STATUS_OK;
}

/* Reserves n elements, 16-byte aligned; upload_room() has made room. */
template <typename T> static T *put(struct cuda_backend *b, size_t n, size_t *offset)
{
	struct upload *u = &b->upload;
	*offset = u->used;
	u->used += (n * sizeof(T) + 15) & ~static_cast<size_t>(15);
	return reinterpret_cast<T *>(u->host + *offset);
}

static enum status send(struct cuda_backend *b)
{
	struct upload *u = &b->upload;
	if (u->sent == u->used)
		return STATUS_OK;
	const enum status s = check(b,
				    cudaMemcpyAsync(u->device + u->sent, u->host + u->sent, u->used - u->sent,
						    cudaMemcpyHostToDevice, b->stream),
				    "sending the batch");
	u->sent = u->used;
	u->in_flight = true;
	return s;
}

/* ---- Attention ---- */

/* Chunks of fewer queries than this per KV head are spread over splits as decode rows are. */
enum { WHOLE_QUERIES = 64 };

static int ceil_div(int a, int b)
{
	return (a + b - 1) / b;
}

static int min_int(int a, int b)
{
	return a < b ? a : b;
}

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
	size_t slots;	/* of partial results */
	size_t entries; /* of chosen lists */
	/* Weights of whole items' pages: of those so far that are launched together, and of the most that are. */
	size_t weights, most_weights;
	int turn; /* which of those launches it is */
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
	for (int r = 0; r < item.n_rows; r++) {
		if (d->merges)
			d->merges[d->n_merges] = {item.first_row + r, item.first_position + r, static_cast<int32_t>(d->slots) + r,
						  item.n_rows, n_splits, d->to.mass, d->to.look};
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

/*
 * What whole items' rows give to pages is in memory between the two: items take turns with as much of it as this, in units of a page and block's
 * queries, which are 2 KiB at most.
 */
enum { WEIGHTS_AT_ONCE = 65536 };

static void put_whole(struct dividing *d, struct attention_item item, int n_head_kv)
{
	const int last = item.first_position + item.n_rows - 1;
	const size_t weights = item.tells ? (static_cast<size_t>(last) / KV_PAGE_TOKENS + 1) * static_cast<size_t>(n_head_kv) : 0;
	if (d->weights > 0 && d->weights + weights > WEIGHTS_AT_ONCE) {
		d->weights = 0;
		d->turn++;
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
static void put_chooser(struct dividing *d, struct attention_item item, const struct page_choice *c, int table, int n_head_kv)
{
	const int place = item.first_position, own = place / KV_PAGE_TOKENS;
	item.first_position = (c->n_pages - 1) * KV_PAGE_TOKENS + place % KV_PAGE_TOKENS;
	item.chosen = static_cast<int32_t>(d->entries);
	if (d->choosers)
		d->choosers[d->n_choosers] = {item.first_row, table, own, c->n_first, c->n_last, c->n_pages, item.chosen};
	d->n_choosers++;
	d->entries += static_cast<size_t>(c->n_pages) * static_cast<size_t>(n_head_kv);
	d->most = own + 1 > d->most ? own + 1 : d->most;
	put_parts(d, item);
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
		while (layers == LAYERS_ALL && exact > 0 && page_choice_binds(&q->choice, q->first_position + exact - 1))
			exact--;
		for (int row = 0; row < q->n_rows;) {
			const int most = row >= exact ? 1 : min_int(exact - row, in_whole ? rows_whole : rows_part);
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

/* n rounded up to one of four sizes between powers of two. */
static int rounded(int n)
{
	int step = 16;
	while (n > 8 * step)
		step *= 2;
	return (n + step - 1) / step * step;
}

/* Room on the device for what the kernels leave for each other, where all kinds of layers find it. */
static enum status grow_for(struct cuda_backend *b, size_t slots, size_t most_weights, const struct dividing *d)
{
	const struct attention_plan *plan = &b->plan;
	const size_t heads = static_cast<size_t>(plan->n_head), lists = static_cast<size_t>(plan->n_choosers) * static_cast<size_t>(plan->n_head_kv);
	if (slots > INT32_MAX || d->entries > INT32_MAX)
		return STATUS_NOMEM;
	TRY(grow(b, &b->partial, slots * heads * static_cast<size_t>(2 + plan->head_dim) * sizeof(float)));
	if (b->told_bytes) {
		TRY(grow(b, &b->part_weights, slots * heads * (SPLIT_TOKENS / KV_PAGE_TOKENS) * sizeof(struct page_weight)));
		TRY(grow(b, &b->whole_weights, most_weights * static_cast<size_t>(whole_queries(plan->head_dim)) * sizeof(struct page_weight)));
	}
	if (plan->n_choosers == 0)
		return STATUS_OK;
	TRY(grow(b, &b->scores, lists * static_cast<size_t>(plan->most) * sizeof(float)));
	return grow(b, &b->chosen, d->entries * sizeof(int32_t));
}

/* Of a sequence with far pages: whole items, or parts by splits, so that those of some pages stand together. Returns the partial results' slots. */
static size_t divide_far(const struct batch_seq *q, int32_t seq, const struct attention_plan *plan, struct far_plan *f, struct attention_item *items,
			 struct merge_item *merges)
{
	const int most = f->is_whole ? whole_rows(plan->n_head, plan->n_head_kv, plan->head_dim) : part_rows(plan->n_head, plan->n_head_kv);
	size_t slots = 0;
	f->seq = seq;
	f->n_splits = ceil_div(q->first_position + q->n_rows, SPLIT_TOKENS);
	f->n_items = ceil_div(q->n_rows, most);
	f->n_merges = f->is_whole ? 0 : q->n_rows;
	for (int i = 0; i < f->n_items; i++) {
		struct attention_item item = {};
		item.seq = seq;
		item.first_row = q->first_row + i * most;
		item.n_rows = min_int(q->n_rows - i * most, most);
		item.first_position = q->first_position + i * most;
		item.chosen = CHOSEN_NONE;
		if (f->is_whole) {
			if (items)
				items[i] = item;
			continue;
		}
		for (int r = 0; merges && r < item.n_rows; r++)
			merges[i * most + r] = {item.first_row + r, item.first_position + r, static_cast<int32_t>(slots) + r, item.n_rows,
						ceil_div(item.first_position + item.n_rows, SPLIT_TOKENS), NOBODY, NOBODY};
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
	size_t slots = 0, state = 0;
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
		const size_t n_items = static_cast<size_t>(p->n_items) * static_cast<size_t>(p->is_whole ? 1 : p->n_splits);
		const size_t blocks = p->is_whole ? static_cast<size_t>(p->n_items) * static_cast<size_t>(plan->n_head_kv) : 0;
		slots = n > slots ? n : slots;
		state = blocks > state ? blocks : state;
		TRY(upload_room(b, n_items * sizeof(struct attention_item) + static_cast<size_t>(p->n_merges) * sizeof(struct merge_item) + 64));
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
	return grow(b, &f->state, state * whole_state(plan->head_dim) * sizeof(float));
}

/* Puts what was counted; n_parts: with those that are not there, which have no rows. */
static void put_division(struct cuda_backend *b, int layers, const struct dividing *counted, int n_parts)
{
	struct attention_plan *plan = &b->plan;
	struct attention_division *to = &plan->of[layers];
	struct dividing d = {};
	d.parts = put<struct attention_item>(b, static_cast<size_t>(n_parts), &to->parts);
	d.whole = put<struct attention_item>(b, static_cast<size_t>(counted->n_whole), &to->whole);
	d.merges = put<struct merge_item>(b, static_cast<size_t>(counted->n_merges), &to->merges);
	if (counted->n_choosers)
		d.choosers = put<struct chooser>(b, static_cast<size_t>(counted->n_choosers), &plan->choosers);
	divide(b->batch, plan, layers, &d);
	if (n_parts > d.n_parts)
		memset(static_cast<void *>(d.parts + d.n_parts), 0, static_cast<size_t>(n_parts - d.n_parts) * sizeof *d.parts);
	to->n_parts = n_parts;
	to->n_whole = d.n_whole;
	to->n_merges = d.n_merges;
}

static enum status put_plan(struct cuda_backend *b)
{
	struct attention_plan *plan = &b->plan;
	struct dividing d[LAYERS_KINDS] = {};
	int n_parts[LAYERS_KINDS] = {}, kinds = 1;
	size_t slots = 0, weights = 0, bytes = 64;
	divide(b->batch, plan, LAYERS_ALL, &d[LAYERS_ALL]);
	if (d[LAYERS_ALL].n_choosers)
		divide(b->batch, plan, LAYERS_WINDOW, &d[kinds++]);
	for (int i = 0; i < kinds; i++)
		b->graphs.fits = b->graphs.fits && d[i].n_whole == 0;
	plan->n_choosers = d[LAYERS_ALL].n_choosers;
	plan->most = d[LAYERS_ALL].most;
	if (b->graphs.fits && plan->n_choosers)
		plan->most = rounded(plan->most);
	for (int i = 0; i < kinds; i++) {
		n_parts[i] = b->graphs.fits ? rounded(d[i].n_parts) : d[i].n_parts;
		d[i].slots = b->graphs.fits ? static_cast<size_t>(n_parts[i]) : d[i].slots;
		slots = d[i].slots > slots ? d[i].slots : slots;
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
	for (int i = 0; i < kinds; i++)
		put_division(b, i, &d[i], n_parts[i]);
	if (kinds == 1)
		plan->of[LAYERS_WINDOW] = plan->of[LAYERS_ALL];
	TRY(put_far(b));
	plan->made = true;
	return STATUS_OK;
}

enum status plan_attention(struct cuda_backend *b, int n_head, int n_head_kv, int head_dim)
{
	struct attention_plan *plan = &b->plan;
	if (plan->made && plan->n_head == n_head && plan->n_head_kv == n_head_kv && plan->head_dim == head_dim)
		return STATUS_OK;
	*plan = {};
	plan->n_head = n_head;
	plan->n_head_kv = n_head_kv;
	plan->head_dim = head_dim;
	const enum status s = put_plan(b);
	return s == STATUS_OK ? send(b) : s;
}

/* ---- The batch ---- */

static bool anyone_tells(const struct batch *batch)
{
	for (int32_t i = 0; i < batch->n_seqs; i++)
		if (batch->seq[i].mass || batch->seq[i].look)
			return true;
	return false;
}

/* Room for so many bytes, of zeros. */
static enum status cleared(struct cuda_backend *b, struct growing *g, size_t bytes)
{
	if (bytes == 0)
		return STATUS_OK;
	TRY(grow(b, g, bytes));
	return check(b, cudaMemsetAsync(g->p, 0, bytes, b->stream), "clearing memory");
}

enum status step_upload(struct cuda_backend *b, const struct batch *batch)
{
	const size_t n_rows = static_cast<size_t>(batch->n_rows), n_seqs = static_cast<size_t>(batch->n_seqs);
	size_t n_pages = 0;
	for (size_t i = 0; i < n_seqs; i++)
		n_pages += static_cast<size_t>(
			ceil_div(batch->seq[i].first_position + batch->seq[i].n_rows, KV_PAGE_TOKENS));
	b->plan.made = false;
	TRY(upload_begin(b));
	bool far = false;
	for (size_t i = 0; i < n_seqs; i++)
		far = far || batch->seq[i].far;
	b->graphs.fits = !far && b->plan.n_head && batch->n_outputs == batch->n_rows && batch->n_seqs == batch->n_rows;
	if (b->graphs.fits) {
		b->graphs.key = {};
		b->graphs.key.n_rows = batch->n_rows;
		b->graphs.key.n_pages = rounded(static_cast<int>(n_pages));
		n_pages = static_cast<size_t>(b->graphs.key.n_pages);
	}
	const size_t odd = looks(b) ? odd_bytes(batch->n_rows) : 0;
	b->n_masses = n_pages;
	b->told_bytes = anyone_tells(batch) ? n_pages * sizeof(unsigned long long) + n_seqs * sizeof(struct look_sums) : 0;
	b->graphs.key.tells = b->told_bytes > 0;
	TRY(upload_room(b, (4 * n_rows + n_seqs + 2 * n_pages) * sizeof(int32_t) + n_seqs * sizeof(struct attention_tells) + odd +
				   b->told_bytes + 224));
	TRY(cleared(b, &b->odd, odd));
	TRY(cleared(b, &b->told, b->told_bytes));
	int32_t *token = put<int32_t>(b, n_rows, &b->token);
	int32_t *position = put<int32_t>(b, n_rows, &b->position);
	int32_t *place = put<int32_t>(b, n_rows, &b->place);
	int32_t *row_seq = put<int32_t>(b, n_rows, &b->row_seq);
	int32_t *seq_table = put<int32_t>(b, n_seqs, &b->seq_table);
	int32_t *table = put<int32_t>(b, n_pages, &b->table);
	int32_t *slots = b->wide ? put<int32_t>(b, n_pages, &b->slots) : NULL;
	if (odd)
		put<uint8_t>(b, odd, &b->odd_at);
	struct attention_tells *to = b->told_bytes ? put<struct attention_tells>(b, n_seqs, &b->tells) : NULL;
	if (b->told_bytes)
		put<uint8_t>(b, b->told_bytes, &b->told_at);
	if (batch->token)
		memcpy(token, batch->token, n_rows * sizeof *token);
	memcpy(position, batch->position, n_rows * sizeof *position);
	n_pages = 0;
	for (size_t i = 0; i < n_seqs; i++) {
		const struct batch_seq *q = &batch->seq[i];
		const size_t n = static_cast<size_t>(ceil_div(q->first_position + q->n_rows, KV_PAGE_TOKENS));
		seq_table[i] = static_cast<int32_t>(n_pages);
		if (to)
			to[i] = {q->mass ? seq_table[i] : NOBODY, q->look ? static_cast<int32_t>(i) : NOBODY};
		memcpy(table + n_pages, q->block_table, n * sizeof *table);
		for (size_t k = 0; slots && k < n; k++)
			slots[n_pages + k] = q->block_table[k] < 0 ? -1 : b->wide->slot[q->block_table[k]];
		n_pages += n;
		for (int r = 0; r < q->n_rows; r++) {
			place[q->first_row + r] = q->first_position + r;
			row_seq[q->first_row + r] = static_cast<int32_t>(i);
		}
	}
	if (b->plan.n_head)
		TRY(put_plan(b));
	return send(b);
}

/* ---- What it has stored ---- */

static void mark_pages(struct cuda_backend *b, const uint32_t *rows)
{
	const uint8_t wider = b->layout.form == KV_FORM_F16 ? 0 : KV_MARK_WIDER;
	for (int32_t s = 0; s < b->batch->n_seqs; s++) {
		const struct batch_seq *q = &b->batch->seq[s];
		for (int32_t i = 0; i < q->n_rows; i++) {
			const uint32_t odd = rows[q->first_row + i];
			if (odd)
				kv_watch_mark(b->watch, q->block_table[(q->first_position + i) / KV_PAGE_TOKENS],
					   static_cast<uint8_t>(odd & ODD_NO_NUMBER ? KV_MARK_UNSOUND | wider : wider));
		}
	}
}

static enum status fill_copies(struct cuda_backend *b, const struct page_list &list, int n)
{
	const struct kv_layout *l = &b->layout;
	const size_t n_layer = static_cast<size_t>(l->n_layer);
	return check(b,
		     fill_wide(l->form, static_cast<uint8_t *>(b->kv), list, n, l->n_layer, l->n_head_kv, l->head_dim,
			       l->page_bytes / n_layer, b->wide->bytes / n_layer, b->stream),
		     "widening a page");
}

/* Wide copies for the pages of the step that want one, with what they hold; *any: whether there are new ones. */
static enum status widen_pages(struct cuda_backend *b, bool *any)
{
	const struct kv_wide *w = b->wide;
	struct page_list list;
	int n = 0;
	for (int32_t s = 0; s < b->batch->n_seqs; s++) {
		const struct batch_seq *q = &b->batch->seq[s];
		const int32_t last = (q->first_position + q->n_rows - 1) / KV_PAGE_TOKENS;
		for (int32_t i = q->first_position / KV_PAGE_TOKENS; i <= last; i++) {
			const int32_t page = q->block_table[i];
			const bool had = w->slot[page] >= 0;
			if ((b->watch->mark[page] & (KV_MARK_WIDER | KV_MARK_ASKED)) != KV_MARK_WIDER ||
			    w->widen(w->arg, page) < 0 || had)
				continue;
			list.from[n] = static_cast<size_t>(page) * b->layout.page_stride;
			list.to[n++] = w->offset + static_cast<size_t>(w->slot[page]) * w->stride;
			*any = true;
			if (n == PAGE_LIST_MAX) {
				TRY(fill_copies(b, list, n));
				n = 0;
			}
		}
	}
	return n ? fill_copies(b, list, n) : STATUS_OK;
}

static enum status take_note(struct cuda_backend *b, const struct odd_values *odd)
{
	bool again = false;
	if (b->watch)
		mark_pages(b, odd->rows);
	if (b->watch && b->wide && b->wide->widen)
		TRY(widen_pages(b, &again));
	if (again)
		return STATUS_BUSY;
	if (b->watch)
		b->watch->n_clamped += odd->n_clamped;
	if (b->wide)
		b->wide->n_not_finite += odd->n_lost;
	return STATUS_OK;
}

/* What rows gave to pages and how they attended goes to whoever asked. */
static void hand_over(const struct cuda_backend *b, const uint8_t *told)
{
	const uint64_t *mass = reinterpret_cast<const uint64_t *>(told);
	const struct look_sums *looks = reinterpret_cast<const struct look_sums *>(mass + b->n_masses);
	for (int32_t i = 0; i < b->batch->n_seqs; i++) {
		const struct batch_seq *q = &b->batch->seq[i];
		const int n = ceil_div(q->first_position + q->n_rows, KV_PAGE_TOKENS);
		for (int k = 0; q->mass && k < n; k++)
			q->mass[k] += mass[k];
		mass += n;
		if (!q->look)
			continue;
		q->look->n += looks[i].n;
		q->look->entropy += looks[i].entropy;
		q->look->largest += looks[i].largest;
	}
}

static enum status fetch(struct cuda_backend *b, const struct growing *from, size_t at, size_t bytes, const char *what)
{
	return bytes ? check(b, cudaMemcpyAsync(b->upload.host + at, from->p, bytes, cudaMemcpyDeviceToHost, b->stream), what) : STATUS_OK;
}

enum status step_finish(struct cuda_backend *b)
{
	const bool went_well = b->step_status == STATUS_OK, look = looks(b) && went_well;
	enum status s = STATUS_OK;
	if (look)
		s = fetch(b, &b->odd, b->odd_at, odd_bytes(b->batch->n_rows), "reading what the step has stored");
	if (s == STATUS_OK && went_well)
		s = fetch(b, &b->told, b->told_at, b->told_bytes, "reading how rows attended");
	const enum status copied = far_settle(b);
	enum status settled = settle(b, "computing a step");
	settled = settled == STATUS_OK ? copied : settled;
	if (s != STATUS_OK || settled != STATUS_OK || !went_well)
		return s != STATUS_OK ? s : settled;
	if (look)
		TRY(take_note(b, reinterpret_cast<const struct odd_values *>(b->upload.host + b->odd_at)));
	if (b->told_bytes)
		hand_over(b, b->upload.host + b->told_at);
	return STATUS_OK;
}

/* ---- Sampling ---- */

enum status step_sample(struct cuda_backend *b, float *logits, int32_t n_vocab, int32_t stride,
			const struct sample_row *rows, int32_t n, int32_t *tokens)
{
	size_t n_edits = 0, choices_at, edits_at, tokens_at;
	for (int32_t i = 0; i < n; i++)
		n_edits += static_cast<size_t>(rows[i].n_edits);
	if (n_edits > INT32_MAX)
		return STATUS_NOMEM;
	TRY(upload_begin(b)); /* the step is over */
	const size_t count = static_cast<size_t>(n);
	enum status s = upload_room(b, count * (sizeof(struct choice) + sizeof(int32_t)) +
					       n_edits * sizeof(struct sample_edit) + 64);
	if (s != STATUS_OK)
		return s;
	struct choice *choices = put<struct choice>(b, count, &choices_at);
	struct sample_edit *edits = put<struct sample_edit>(b, n_edits, &edits_at);
	n_edits = 0;
	for (int32_t i = 0; i < n; i++) {
		const struct sample_row *r = &rows[i];
		choices[i] = {r->output,  r->top_k,   r->temperature, r->top_p, r->min_p, static_cast<int32_t>(n_edits),
			      r->n_first, r->n_edits, r->unit};
		if (r->n_edits)
			memcpy(edits + n_edits, r->edit, static_cast<size_t>(r->n_edits) * sizeof *edits);
		n_edits += static_cast<size_t>(r->n_edits);
	}
	s = send(b);
	if (s != STATUS_OK)
		return s;
	const int32_t *result = put<int32_t>(b, count, &tokens_at);
	s = check(b,
		  choose_tokens(logits, n_vocab, stride, uploaded<struct choice>(b, choices_at),
				uploaded<struct sample_edit>(b, edits_at), n, uploaded<int32_t>(b, tokens_at),
				b->stream),
		  "choosing tokens");
	if (s == STATUS_OK)
		s = check(b,
			  cudaMemcpyAsync(b->upload.host + tokens_at, b->upload.device + tokens_at,
					  count * sizeof *tokens, cudaMemcpyDeviceToHost, b->stream),
			  "reading tokens");
	if (s == STATUS_OK)
		s = settle(b, "choosing tokens");
	if (s == STATUS_OK)
		memcpy(tokens, result, count * sizeof *tokens);
	return s;
}

} // namespace GPU_NS
