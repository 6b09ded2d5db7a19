/*
 * What a step needs before its kernels, the batch on the device and scratch memory large enough, and what of it comes
 * back. Memory grows to what the largest step so far has needed and stays, so that ordinary steps allocate nothing.
 */
#include "cuda/backend.cuh"

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

enum status upload_room(struct cuda_backend *b, size_t bytes)
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

enum status upload_send(struct cuda_backend *b)
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

/* ---- The batch ---- */

static bool anyone_tells(const struct batch *batch)
{
	for (int32_t i = 0; i < batch->n_seqs; i++)
		if (batch->seq[i].mass || batch->seq[i].look)
			return true;
	return false;
}

/* Of a sequence's pages, those whose tokens' logits are raised. */
static size_t raised_pages(const struct batch_seq *q)
{
	const int n = q->plus ? q->n_plus / KV_PAGE_TOKENS : 0;
	return static_cast<size_t>(min_int(n, ceil_div(q->first_position + q->n_rows, KV_PAGE_TOKENS)));
}

/* Sums of weights are over powers of two. */
static void put_raises(struct cuda_backend *b)
{
	static const float log2_e = 1.44269504f;
	const struct batch *batch = b->batch;
	struct attention_raise *raises =
		put<struct attention_raise>(b, static_cast<size_t>(batch->n_seqs), &b->raises);
	float *plus = put<float>(b, b->n_raised * KV_PAGE_TOKENS, &b->plus);
	int32_t first = 0;
	for (int32_t i = 0; i < batch->n_seqs; i++) {
		const struct batch_seq *q = &batch->seq[i];
		raises[i] = {first, static_cast<int32_t>(raised_pages(q))};
		const int32_t n = raises[i].n_pages * KV_PAGE_TOKENS;
		for (int32_t k = 0; k < n; k++)
			plus[first + k] = q->plus[k] * log2_e;
		first += n;
	}
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
	size_t n_pages = 0, n_raised = 0;
	for (size_t i = 0; i < n_seqs; i++) {
		n_raised += raised_pages(&batch->seq[i]);
		n_pages += static_cast<size_t>(
			ceil_div(batch->seq[i].first_position + batch->seq[i].n_rows, KV_PAGE_TOKENS));
	}
	b->plan.made = false;
	TRY(upload_begin(b));
	bool far = false;
	b->probed_bytes = 0;
	for (size_t i = 0; i < n_seqs; i++) {
		const struct batch_seq *q = &batch->seq[i];
		far = far || q->far;
		b->probed_bytes += q->probe ? static_cast<size_t>(q->probe->n_pages) * sizeof(unsigned long long) : 0;
	}
	b->graphs.fits = !far && b->probed_bytes == 0 && b->plan.n_head && batch->n_outputs == batch->n_rows &&
			 batch->n_seqs == batch->n_rows;
	if (b->graphs.fits) {
		b->graphs.key = {};
		b->graphs.key.n_rows = batch->n_rows;
		b->graphs.key.n_pages = rounded(static_cast<int>(n_pages));
		n_pages = static_cast<size_t>(b->graphs.key.n_pages);
		if (n_raised)
			n_raised = static_cast<size_t>(rounded(static_cast<int>(n_raised)));
		b->graphs.key.n_raised = static_cast<int>(n_raised);
	}
	b->n_raised = n_raised;
	const size_t odd = looks(b) ? odd_bytes(batch->n_rows) : 0;
	b->n_masses = n_pages;
	b->told_bytes =
		anyone_tells(batch) ? n_pages * sizeof(unsigned long long) + n_seqs * sizeof(struct look_sums) : 0;
	b->graphs.key.tells = b->told_bytes > 0;
	TRY(upload_room(b, (4 * n_rows + n_seqs + 2 * n_pages) * sizeof(int32_t) +
				   n_seqs * sizeof(struct attention_tells) + odd + b->told_bytes + b->probed_bytes +
				   n_seqs * sizeof(struct attention_raise) +
				   n_raised * KV_PAGE_TOKENS * sizeof(float) + 272));
	TRY(cleared(b, &b->odd, odd));
	TRY(cleared(b, &b->told, b->told_bytes));
	TRY(cleared(b, &b->probed, b->probed_bytes));
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
	if (b->probed_bytes)
		put<uint8_t>(b, b->probed_bytes, &b->probed_at);
	if (b->n_raised)
		put_raises(b);
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
	return upload_send(b);
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

/* What rows gave to pages elsewhere, likewise. */
static void hand_over_probes(const struct cuda_backend *b, const uint8_t *probed)
{
	const uint64_t *share = reinterpret_cast<const uint64_t *>(probed);
	for (int32_t i = 0; i < b->batch->n_seqs; i++) {
		const struct page_probe *probe = b->batch->seq[i].probe;
		for (int32_t k = 0; probe && k < probe->n_pages; k++)
			probe->score[k] += *share++;
	}
}

static enum status fetch(struct cuda_backend *b, const struct growing *from, size_t at, size_t bytes, const char *what)
{
	return bytes ? check(b, cudaMemcpyAsync(b->upload.host + at, from->p, bytes, cudaMemcpyDeviceToHost, b->stream),
			     what)
		     : STATUS_OK;
}

enum status step_finish(struct cuda_backend *b)
{
	const bool went_well = b->step_status == STATUS_OK, look = looks(b) && went_well;
	enum status s = STATUS_OK;
	if (look)
		s = fetch(b, &b->odd, b->odd_at, odd_bytes(b->batch->n_rows), "reading what the step has stored");
	if (s == STATUS_OK && went_well)
		s = fetch(b, &b->told, b->told_at, b->told_bytes, "reading how rows attended");
	if (s == STATUS_OK && went_well)
		s = fetch(b, &b->probed, b->probed_at, b->probed_bytes, "reading what pages elsewhere are worth");
	const enum status copied = far_settle(b);
	enum status settled = settle(b, "computing a step");
	settled = settled == STATUS_OK ? copied : settled;
	if (s != STATUS_OK || settled != STATUS_OK || !went_well)
		return s != STATUS_OK ? s : settled;
	if (look)
		TRY(take_note(b, reinterpret_cast<const struct odd_values *>(b->upload.host + b->odd_at)));
	if (b->told_bytes)
		hand_over(b, b->upload.host + b->told_at);
	if (b->probed_bytes)
		hand_over_probes(b, b->upload.host + b->probed_at);
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
	s = upload_send(b);
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
