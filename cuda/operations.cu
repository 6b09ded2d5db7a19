/*
 * The operations of a step: from what the engine asks to kernels.
 *
 * Two things are done behind the table's back to save launches. Whatever writes rows that a product will read writes
 * them as halves as well, and a product uses those if nobody has touched the floats since. rope() is put off until
 * kv_write(), which rotates and stores in one go; any other operation does what was put off first.
 */
#include "cuda/operations.cuh"

#include <string.h>

namespace GPU_NS
{

enum status latch(struct cuda_backend *b, enum status s)
{
	if (s != STATUS_OK && b->step_status == STATUS_OK)
		b->step_status = s;
	return s;
}

static enum status launched(struct cuda_backend *b, cudaError_t e, const char *what)
{
	return latch(b, check(b, e, what));
}

/* ---- What operations do before their kernels ---- */

void wrote(struct cuda_backend *b, const float *p, int64_t n)
{
	const float *end = b->halves_of + static_cast<int64_t>(b->halves_n) * b->halves_dim;
	if (b->halves_of && p < end && b->halves_of < p + n)
		b->halves_of = NULL;
}

static struct halves halves(const struct cuda_backend *b)
{
	return {static_cast<__half *>(b->halves_x.p), static_cast<float *>(b->halves_scale.p), b->halves_stride};
}

/* Where to put the halves of out[n][dim], or nothing if they would not fit what was reserved. */
static struct halves claim_halves(struct cuda_backend *b, const float *out, int64_t n, int64_t dim)
{
	struct halves h = halves(b);
	wrote(b, out, n * dim);
	if (n > b->halves_rows || (dim + 255) / 256 * 256 > b->halves_stride) {
		h.x = NULL;
		return h;
	}
	b->halves_of = out;
	b->halves_n = static_cast<int>(n);
	b->halves_dim = static_cast<int>(dim);
	return h;
}

static struct step_rows step_rows(const struct cuda_backend *b)
{
	struct step_rows r = {};
	r.place = uploaded<int32_t>(b, b->place);
	r.row_seq = uploaded<int32_t>(b, b->row_seq);
	r.seq_table = uploaded<int32_t>(b, b->seq_table);
	r.table = uploaded<int32_t>(b, b->table);
	r.slots = b->wide ? uploaded<int32_t>(b, b->slots) : NULL;
	r.n_rows = b->batch->n_rows;
	return r;
}

enum status begin(struct cuda_backend *b)
{
	if (b->lost)
		return latch(b, STATUS_DEVICE);
	if (!b->rope_waits)
		return STATUS_OK;
	b->rope_waits = false;
	return launched(b, rope_and_store(b->rope_args, {}, step_rows(b), b->stream), "rotating");
}

/* ---- Operations ---- */

static enum status do_embed(struct cuda_backend *b, const struct weight *w, float scale, float *out)
{
	const struct matrix *m = matrix_of(w);
	TRY(begin(b));
	wrote(b, out, static_cast<int64_t>(b->batch->n_rows) * m->n_in);
	struct embed_args a = {};
	a.raw = m->raw;
	a.row_bytes = m->row_bytes;
	a.packed = m->packed;
	a.n_units = m->n_units;
	a.n_in = m->n_in;
	a.token = uploaded<int32_t>(b, b->token);
	a.n_rows = b->batch->n_rows;
	a.scale = scale;
	a.out = out;
	return launched(b, embed(m->type, a, b->stream), "embedding");
}

/* Rows this short are heads, which no product reads. */
enum { SHORT_ROW = 256 };

static enum status do_norm(struct cuda_backend *b, const float *x, int64_t n, int32_t dim, const float *gain, float eps,
			   float *out)
{
	struct halves h = {};
	TRY(begin(b));
	if (dim > SHORT_ROW)
		h = claim_halves(b, out, n, dim);
	else
		wrote(b, out, n * dim);
	if (!h.x && n > INT32_MAX)
		return latch(b, STATUS_INVALID);
	return launched(b, rms_norm(x, n, dim, gain, eps, out, h, b->stream), "norm");
}

static enum status do_norm_add(struct cuda_backend *b, const float *x, int64_t n, int32_t dim, const float *gain,
			       float eps, float *out)
{
	TRY(begin(b));
	if (n > INT32_MAX)
		return latch(b, STATUS_INVALID);
	wrote(b, out, n * dim);
	return launched(b, rms_norm_add(x, static_cast<int>(n), dim, gain, eps, out, b->stream), "norm");
}

enum status execute_matmul(struct cuda_backend *b, const float *x, int64_t n_rows, const struct matmul *mm,
			   int32_t n_mm)
{
	const int n_in = matrix_of(mm[0].weight)->n_in, rows = static_cast<int>(n_rows);
	TRY(begin(b));
	if (n_rows < 1 || n_rows > INT32_MAX / 256)
		return latch(b, STATUS_INVALID);
	if (b->halves_of != x || b->halves_dim != n_in || b->halves_n < rows) {
		TRY(latch(b, grow_halves(b, n_rows, n_in)));
		TRY(launched(b, to_halves(x, rows, n_in, halves(b), b->stream), "converting activations"));
		b->halves_of = x;
		b->halves_n = rows;
		b->halves_dim = n_in;
	}
	/* Products of one format go together. */
	uint64_t done = 0;
	for (int32_t i = 0; i < n_mm; i++) {
		struct products ps = {};
		const struct matrix *first = matrix_of(mm[i].weight);
		if (i < 64 && (done >> i & 1))
			continue;
		for (int32_t j = i; j < n_mm && ps.n < MAX_PRODUCTS && (j < 64 || j == i); j++) {
			const struct matrix *m = matrix_of(mm[j].weight);
			if (m->type != first->type || (done >> j & 1))
				continue;
			if (!m->packed || m->n_in != n_in)
				return latch(b, STATUS_INVALID);
			struct product *p = &ps.p[ps.n++];
			p->packed = m->packed;
			p->bias = mm[j].bias;
			p->y = mm[j].y;
			p->n_out = m->n_out;
			p->accumulate = mm[j].accumulate;
			if (j < 64)
				done |= UINT64_C(1) << j;
		}
		TRY(launched(b, product(first->type, ps, first->n_units, halves(b), rows, b->stream), "product"));
	}
	for (int32_t i = 0; i < n_mm; i++)
		wrote(b, mm[i].y, n_rows * matrix_of(mm[i].weight)->n_out);
	return STATUS_OK;
}

static struct rope_table_args table_of(const struct cuda_backend *b, const struct rope_params *p)
{
	return {p->inv_freq, p->magnitude, p->n_dims / 2, p->chunks, uploaded<int32_t>(b, b->position),
		b->batch->n_rows};
}

static enum status do_rope(struct cuda_backend *b, float *q, int32_t n_head, float *k, int32_t n_head_kv,
			   int32_t head_dim, const struct rope_params *p)
{
	const int pairs = p->n_dims / 2, n_rows = b->batch->n_rows;
	TRY(begin(b));
	if (pairs < 1 || pairs > ROPE_MAX_PAIRS || 2 * pairs > head_dim)
		return latch(b, STATUS_UNSUPPORTED);
	if (b->rope_freq != p->inv_freq || b->rope_magnitude != p->magnitude || b->rope_pairs != pairs ||
	    b->rope_chunk != p->chunks.size) {
		TRY(latch(b, grow(b, &b->rope,
				  static_cast<size_t>(n_rows) * static_cast<size_t>(pairs) * sizeof(float2))));
		TRY(launched(b, rope_table(table_of(b, p), static_cast<float2 *>(b->rope.p), b->stream), "angles"));
		b->rope_freq = p->inv_freq;
		b->rope_magnitude = p->magnitude;
		b->rope_pairs = pairs;
		b->rope_chunk = p->chunks.size;
	}
	wrote(b, q, static_cast<int64_t>(n_rows) * n_head * head_dim);
	wrote(b, k, static_cast<int64_t>(n_rows) * n_head_kv * head_dim);
	b->rope_args = {q,
			k,
			n_head,
			n_head_kv,
			head_dim,
			pairs,
			p->pairing == ROPE_INTERLEAVED,
			static_cast<const float2 *>(b->rope.p)};
	b->rope_waits = true;
	return STATUS_OK;
}

struct kv_place kv_place(const struct kv_layout *l, int32_t layer)
{
	const size_t per_layer = l->page_bytes / static_cast<size_t>(l->n_layer);
	struct kv_place p = {l->type == QUANT_BF16 ? PAGES_BF16 : l->form,
	                     l->page_stride,
	                     static_cast<size_t>(layer) * per_layer,
	                     0,
	                     0,
	                     0};
	if (l->wide) {
		p.wide_offset = l->wide->offset;
		p.wide_stride = l->wide->stride;
		p.wide_layer_offset = static_cast<size_t>(layer) * (l->wide->bytes / static_cast<size_t>(l->n_layer));
	}
	return p;
}

/* Wide copies are looked up at step_begin, so they must be those that reserve() has seen. */
static bool takes(const struct cuda_backend *b, const struct kv_layout *l, int32_t n_head)
{
	return attention_supports(n_head, l->n_head_kv, l->head_dim) && l->type == b->kv_type &&
	       (l->form == KV_FORM_F16 || (l->type == QUANT_F16 && l->wide == b->wide));
}

static enum status do_kv_write(struct cuda_backend *b, void *kv, const struct kv_layout *l, int32_t layer,
			       const float *k, const float *v)
{
	struct rope_args r = b->rope_args;
	if (!takes(b, l, l->n_head_kv))
		return latch(b, STATUS_UNSUPPORTED);
	if (b->rope_waits && (r.k != k || r.n_head_kv != l->n_head_kv || r.head_dim != l->head_dim))
		TRY(begin(b));
	if (b->lost)
		return latch(b, STATUS_DEVICE);
	if (!b->rope_waits) {
		r = {};
		r.k = const_cast<float *>(k); /* nothing is rotated, so it is only read */
		r.n_head_kv = l->n_head_kv;
		r.head_dim = l->head_dim;
	}
	b->rope_waits = false;
	const struct kv_args a = {static_cast<uint8_t *>(kv), kv_place(l, layer), v,
				  looks(b) ? static_cast<struct odd_values *>(b->odd.p) : NULL};
	b->kv = kv;
	return launched(b, rope_and_store(r, a, step_rows(b), b->stream), "storing keys and values");
}

/* The lists of what this layer's rows read. */
static enum status choose(struct cuda_backend *b, const struct kv_layout *l, int32_t layer, const float *q,
			  int32_t n_head)
{
	const struct attention_plan *plan = &b->plan;
	struct choice_args a = {};
	if (!l->bounds)
		return latch(b, STATUS_INVALID);
	a.bounds = static_cast<const uint16_t *>(l->bounds->slab) + kv_bounds_offset(l, layer, 0, 0) / sizeof(uint16_t);
	a.bf16 = l->type == QUANT_BF16;
	a.n_pages = l->bounds->n_pages;
	a.n_head = n_head;
	a.n_head_kv = l->n_head_kv;
	a.head_dim = l->head_dim;
	a.q = q;
	a.table = uploaded<int32_t>(b, b->table);
	a.choosers = uploaded<struct chooser>(b, plan->choosers);
	a.n_choosers = plan->n_choosers;
	a.most = plan->most;
	a.scores = static_cast<float *>(b->scores.p);
	a.chosen = static_cast<int32_t *>(b->chosen.p);
	return launched(b, choose_pages(a, b->stream), "choosing pages");
}

/* What has not room for its results at once is done in turns; the first item of one has the first place there again. */
static enum status attention_by_turns(struct cuda_backend *b, struct attention_args a,
				      const struct attention_division *work)
{
	const struct attention_item *parts =
		reinterpret_cast<const struct attention_item *>(b->upload.host + work->parts);
	const struct attention_item *whole =
		reinterpret_cast<const struct attention_item *>(b->upload.host + work->whole);
	const struct merge_item *merges = reinterpret_cast<const struct merge_item *>(b->upload.host + work->merges);
	int part = 0, item = 0, merge = 0;
	do {
		a.n_parts = a.n_whole = a.n_merges = 0;
		while (part < work->n_parts && (a.n_parts == 0 || parts[part].partial > parts[part - 1].partial)) {
			a.n_parts++;
			part++;
		}
		while (merge < work->n_merges &&
		       (a.n_merges == 0 || merges[merge].first_slot > merges[merge - 1].first_slot)) {
			a.n_merges++;
			merge++;
		}
		while (item < work->n_whole &&
		       (a.n_whole == 0 || whole[item].first_split == whole[item - 1].first_split)) {
			a.n_whole++;
			item++;
		}
		TRY(launched(b, attention(a, b->stream), "attention"));
		a.parts += a.n_parts;
		a.merges += a.n_merges;
		a.whole += a.n_whole;
	} while (part < work->n_parts || item < work->n_whole);
	return STATUS_OK;
}

enum status turn_for_chunks(struct cuda_backend *b, const float *q, int32_t n_head, int32_t head_dim,
			    const struct attention_params *params)
{
	const struct rope_params *p = params->chunked;
	const size_t n_rows = static_cast<size_t>(b->batch->n_rows);
	struct chunk_args a = {};
	if (!p)
		return STATUS_OK;
	a.pairs = p->n_dims / 2;
	if (a.pairs < 1 || a.pairs > ROPE_MAX_PAIRS || 2 * a.pairs > head_dim || p->chunks.size < ROPE_CHUNK_STEP ||
	    p->chunks.size % ROPE_CHUNK_STEP != 0)
		return latch(b, STATUS_UNSUPPORTED);
	TRY(latch(b, grow(b, &b->turned,
			  n_rows * CHUNK_KINDS * static_cast<size_t>(n_head) * static_cast<size_t>(head_dim) *
				  sizeof *a.out)));
	if (b->turns_of != p) {
		TRY(latch(b, grow(b, &b->turns,
				  n_rows * ROPE_CHUNKS_FAR * static_cast<size_t>(a.pairs) * sizeof(float2))));
		TRY(launched(b, chunk_table(table_of(b, p), static_cast<float2 *>(b->turns.p), b->stream), "angles"));
		b->turns_of = p;
	}
	a.q = q;
	a.n_rows = b->batch->n_rows;
	a.n_head = n_head;
	a.head_dim = head_dim;
	a.interleaved = p->pairing == ROPE_INTERLEAVED;
	a.table = static_cast<const float2 *>(b->turns.p);
	a.position = uploaded<int32_t>(b, b->position);
	a.size = p->chunks.size;
	a.scale = params->scale * LOG2_E;
	a.out = static_cast<__half *>(b->turned.p);
	return launched(b, turn_queries(a, b->stream), "turning queries");
}

enum status attention_args_for(struct cuda_backend *b, struct attention_args *a, const void *kv,
			       const struct kv_layout *l, int32_t layer, const float *q, int32_t n_head,
			       const struct attention_params *params, float *out)
{
	const struct rope_params *chunked = params->chunked;
	if (!takes(b, l, n_head))
		return latch(b, STATUS_UNSUPPORTED);
	TRY(latch(b, plan_attention(b, n_head, l->n_head_kv, l->head_dim, chunked ? chunked->chunks.size : 0)));
	if (chunked && (params->window > 0 || b->plan.n_choosers > 0))
		return latch(b, STATUS_INVALID);
	*a = {};
	a->kv = static_cast<const uint8_t *>(kv);
	a->place = kv_place(l, layer);
	a->n_head = n_head;
	a->n_head_kv = l->n_head_kv;
	a->head_dim = l->head_dim;
	a->params = *params;
	a->q = q;
	a->out = out;
	if (b->halves_of == out)
		a->h = halves(b);
	a->seq_table = uploaded<int32_t>(b, b->seq_table);
	a->table = uploaded<int32_t>(b, b->table);
	a->slots = b->wide ? uploaded<int32_t>(b, b->slots) : NULL;
	a->partial = static_cast<float *>(b->partial.p);
	a->state = static_cast<float *>(b->state.p);
	if (chunked) {
		a->turned = static_cast<const __half *>(b->turned.p);
		a->chunk_pages = chunked->chunks.size / KV_PAGE_TOKENS;
	}
	return STATUS_OK;
}

static enum status do_attention(struct cuda_backend *b, const void *kv, const struct kv_layout *l, int32_t layer,
				const float *q, int32_t n_head, const struct attention_params *params, float *out)
{
	struct attention_args a;
	TRY(begin(b));
	/*
	 * Products take whole units of 256: what lies beyond a narrower row must be zeros, which only to_halves()
	 * writes.
	 */
	if (n_head * l->head_dim % 256 == 0)
		claim_halves(b, out, b->batch->n_rows, static_cast<int64_t>(n_head) * l->head_dim);
	else
		wrote(b, out, static_cast<int64_t>(b->batch->n_rows) * n_head * l->head_dim);
	TRY(turn_for_chunks(b, q, n_head, l->head_dim, params));
	TRY(attention_args_for(b, &a, kv, l, layer, q, n_head, params, out));
	const struct attention_plan *plan = &b->plan;
	const struct attention_division *work = &plan->of[params->window > 0 ? LAYERS_WINDOW : LAYERS_ALL];
	if (plan->n_choosers && params->window == 0) {
		TRY(choose(b, l, layer, q, n_head));
		a.chosen = static_cast<const int32_t *>(b->chosen.p);
	}
	if (params->window == 0)
		TRY(probe_pages(b, l, layer, q, n_head, params->scale));
	a.parts = uploaded<struct attention_item>(b, work->parts);
	a.n_parts = work->n_parts;
	a.whole = uploaded<struct attention_item>(b, work->whole);
	a.n_whole = work->n_whole;
	a.merges = uploaded<struct merge_item>(b, work->merges);
	a.n_merges = work->n_merges;
	if (b->n_raised) {
		a.raises = uploaded<struct attention_raise>(b, b->raises);
		a.plus = uploaded<float>(b, b->plus);
	}
	if (b->told_bytes) {
		a.part_weights = static_cast<struct page_weight *>(b->part_weights.p);
		a.whole_weights = static_cast<struct page_weight *>(b->whole_weights.p);
		a.tells = uploaded<struct attention_tells>(b, b->tells);
		a.masses = static_cast<unsigned long long *>(b->told.p);
		a.looks = reinterpret_cast<struct look_sums *>(a.masses + b->n_masses);
	}
	return work->takes_turns ? attention_by_turns(b, a, work) : launched(b, attention(a, b->stream), "attention");
}

static enum status do_glu(struct cuda_backend *b, enum glu f, float *gate, const float *up, int64_t n, int32_t dim)
{
	TRY(begin(b));
	if (n > INT32_MAX)
		return latch(b, STATUS_INVALID);
	const struct halves h = claim_halves(b, gate, n, dim);
	return launched(b, gate_rows(f, gate, up, static_cast<int>(n), dim, h, b->stream), "gate");
}

static enum status do_softcap(struct cuda_backend *b, float *x, int64_t n, float cap)
{
	TRY(begin(b));
	wrote(b, x, n);
	return launched(b, softcap(x, n, cap, b->stream), "soft-capping");
}

enum status execute(struct cuda_backend *b, const struct operation *o)
{
	switch (o->kind) {
	case OP_EMBED:
		return do_embed(b, o->embed.w, o->embed.scale, o->embed.out);
	case OP_NORM:
		return do_norm(b, o->norm.x, o->norm.n, o->norm.dim, o->norm.gain, o->norm.eps, o->norm.out);
	case OP_NORM_ADD:
		return do_norm_add(b, o->norm.x, o->norm.n, o->norm.dim, o->norm.gain, o->norm.eps, o->norm.out);
	case OP_MATMUL:
		return execute_matmul(b, o->matmul.x, o->matmul.n_rows, o->matmul.mm, o->matmul.n);
	case OP_ROPE:
		return do_rope(b, o->rope.q, o->rope.n_head, o->rope.k, o->rope.n_head_kv, o->rope.head_dim,
			       &o->rope.p);
	case OP_KV_WRITE:
		return do_kv_write(b, o->kv_write.kv, &o->kv_write.layout, o->kv_write.layer, o->kv_write.k,
				   o->kv_write.v);
	case OP_ATTENTION:
		return do_attention(b, o->attention.kv, &o->attention.layout, o->attention.layer, o->attention.q,
				    o->attention.n_head, &o->attention.params, o->attention.out);
	case OP_GLU:
		return do_glu(b, o->glu.f, o->glu.gate, o->glu.up, o->glu.n, o->glu.dim);
	case OP_SOFTCAP:
		break;
	}
	return do_softcap(b, o->softcap.x, o->softcap.n, o->softcap.cap);
}

} // namespace GPU_NS
