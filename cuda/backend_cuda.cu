/*
 * The CUDA backend: engine/backend.h's table over the kernels of this directory. One stream, so operations run in the order in which
 * they are called; the host waits in step_end(), mem_read(), mem_write() and sync() alone.
 *
 * Determinism. A row's results do not depend on the rows beside it nor on how its prompt was cut into chunks: see product.cu
 * and attention.cu. They differ from the CPU's: activations are halves in products (eleven bits of each element; `precise` makes no
 * difference), sums are floats.
 *
 * Two things are done behind the table's back to save launches. Whatever writes rows that a product will read writes them as
 * halves as well, and matmul() uses those if nobody has touched the floats since. rope() is put off until kv_write(), which rotates
 * and stores in one go; any other operation does what was put off first.
 */
#include "cuda/backend.cuh"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace GPU_NS {

static struct cuda_backend *self(struct backend *b)
{
	return reinterpret_cast<struct cuda_backend *>(b);
}

/* ---- Errors ---- */

enum status check(struct cuda_backend *b, cudaError_t e, const char *what)
{
	if (e == cudaSuccess)
		return STATUS_OK;
	cudaGetLastError(); /* what is not sticky is forgotten, so that later calls do not report it again */
	/* An error that has broken the context comes back from every call. */
	const bool was_lost = b->lost;
	if (e != cudaErrorMemoryAllocation && b->stream && !b->lost)
		b->lost = cudaStreamSynchronize(b->stream) != cudaSuccess;
	if (!was_lost) /* what comes after a loss tells nothing new */
		snprintf(b->failure, sizeof b->failure, "%s: %s (%s)%s", what, cudaGetErrorString(e), cudaGetErrorName(e),
		         b->lost ? "; the device is lost" : "");
	if (!was_lost)
		log_msg(e == cudaErrorMemoryAllocation ? LOG_WARN : LOG_ERROR, "cuda", "%s", b->failure);
	return e == cudaErrorMemoryAllocation ? STATUS_NOMEM : b->lost ? STATUS_DEVICE : STATUS_INTERNAL;
}

/* An operation's result: what fails within a step fails the step. */
static enum status latch(struct cuda_backend *b, enum status s)
{
	if (s != STATUS_OK && b->step_status == STATUS_OK)
		b->step_status = s;
	return s;
}

static enum status launched(struct cuda_backend *b, cudaError_t e, const char *what)
{
	return latch(b, check(b, e, what));
}

#define TRY(call)                                                                                                      \
	do {                                                                                                           \
		const enum status try_st = (call);                                                                     \
		if (try_st != STATUS_OK)                                                                               \
			return try_st;                                                                                 \
	} while (0)

/* ---- What operations do before their kernels ---- */

/* The floats at p changed: halves made of them are stale. */
static void wrote(struct cuda_backend *b, const float *p, int64_t n)
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
	r.position = uploaded<int32_t>(b, b->position);
	r.row_seq = uploaded<int32_t>(b, b->row_seq);
	r.seq_table = uploaded<int32_t>(b, b->seq_table);
	r.table = uploaded<int32_t>(b, b->table);
	r.n_rows = b->batch->n_rows;
	return r;
}

/* Does what rope() has put off. Every operation begins with this. */
static enum status begin(struct cuda_backend *b)
{
	if (b->lost)
		return latch(b, STATUS_DEVICE);
	if (!b->rope_waits)
		return STATUS_OK;
	b->rope_waits = false;
	return launched(b, rope_and_store(b->rope_args, {}, step_rows(b), b->stream), "rotating");
}

/* ---- Memory ---- */

static enum status mem_alloc(struct backend *backend, size_t bytes, void **out)
{
	enum { ALIGNMENT = 4096 };
	struct cuda_backend *b = self(backend);
	if (b->lost)
		return STATUS_DEVICE;
	if (bytes > SIZE_MAX - ALIGNMENT)
		return STATUS_NOMEM;
	struct allocation *a = static_cast<struct allocation *>(malloc(sizeof *a));
	if (!a)
		return STATUS_NOMEM;
	enum status s = check(b, cudaMalloc(&a->base, bytes + ALIGNMENT), "allocating memory");
	if (s != STATUS_OK) {
		free(a);
		return s;
	}
	a->aligned = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(a->base) + ALIGNMENT - 1) & ~static_cast<uintptr_t>(ALIGNMENT - 1));
	a->next = b->allocations;
	b->allocations = a;
	s = check(b, cudaMemsetAsync(a->base, 0, bytes + ALIGNMENT, b->stream), "clearing memory");
	if (s != STATUS_OK) {
		b->allocations = a->next;
		cudaFree(a->base);
		free(a);
		return s;
	}
	*out = a->aligned;
	return STATUS_OK;
}

static void mem_free(struct backend *backend, void *p, size_t bytes)
{
	struct cuda_backend *b = self(backend);
	wrote(b, static_cast<const float *>(p), static_cast<int64_t>(bytes / sizeof(float)));
	for (struct allocation **at = &b->allocations; *at; at = &(*at)->next) {
		struct allocation *a = *at;
		if (a->aligned != p)
			continue;
		*at = a->next;
		cudaStreamSynchronize(b->stream);
		cudaFree(a->base);
		free(a);
		return;
	}
}

static enum status mem_write(struct backend *backend, void *dst, const void *host, size_t bytes)
{
	struct cuda_backend *b = self(backend);
	TRY(begin(b));
	wrote(b, static_cast<const float *>(dst), static_cast<int64_t>((bytes + sizeof(float) - 1) / sizeof(float)));
	TRY(check(b, cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, b->stream), "writing device memory"));
	return check(b, cudaStreamSynchronize(b->stream), "writing device memory");
}

static enum status mem_read(struct backend *backend, void *host, const void *src, size_t bytes)
{
	struct cuda_backend *b = self(backend);
	TRY(begin(b));
	TRY(check(b, cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, b->stream), "reading device memory"));
	return check(b, cudaStreamSynchronize(b->stream), "reading device memory");
}

static enum status sync(struct backend *backend)
{
	struct cuda_backend *b = self(backend);
	TRY(begin(b));
	return check(b, cudaStreamSynchronize(b->stream), "waiting for the device");
}

static size_t mem_available(struct backend *backend)
{
	size_t free_bytes, total;
	return check(self(backend), cudaMemGetInfo(&free_bytes, &total), "asking for free memory") == STATUS_OK ? free_bytes : 0;
}

static const char *last_failure(const struct backend *backend)
{
	return reinterpret_cast<const struct cuda_backend *>(backend)->failure;
}

/* ---- Steps ---- */

static enum status reserve(struct backend *backend, int32_t max_rows, int32_t max_width, const struct kv_layout *layout)
{
	struct cuda_backend *b = self(backend);
	if (b->lost)
		return STATUS_DEVICE;
	if (!attention_supports(layout->n_head_kv, layout->n_head_kv, layout->head_dim)) {
		log_msg(LOG_ERROR, "cuda", "heads of %" PRId32 " elements are not supported: multiples of 8 up to 256 are", layout->head_dim);
		return STATUS_UNSUPPORTED;
	}
	stage_free(b);
	TRY(grow_halves(b, max_rows, max_width));
	return grow(b, &b->rope, static_cast<size_t>(max_rows) * static_cast<size_t>(layout->head_dim / 2) * sizeof(float2));
}

static enum status step_begin(struct backend *backend, const struct batch *batch)
{
	struct cuda_backend *b = self(backend);
	b->step_status = STATUS_OK;
	b->batch = batch;
	b->rope_freq = NULL;
	b->rope_waits = false;
	b->halves_of = NULL;
	if (b->lost)
		return latch(b, STATUS_DEVICE);
	return latch(b, step_upload(b, batch));
}

static enum status step_end(struct backend *backend)
{
	struct cuda_backend *b = self(backend);
	begin(b);
	launched(b, cudaStreamSynchronize(b->stream), "computing a step");
	b->batch = NULL;
	return b->step_status;
}

/* ---- Operations ---- */

static enum status embed(struct backend *backend, const struct weight *w, float *out)
{
	struct cuda_backend *b = self(backend);
	const struct matrix *m = matrix_of(w);
	for (int32_t i = 0; i < b->batch->n_rows; i++)
		if (b->batch->token[i] < 0 || b->batch->token[i] >= m->n_out)
			return latch(b, STATUS_INVALID);
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
	a.out = out;
	return launched(b, embed(m->type, a, b->stream), "embedding");
}

/* Rows this short are heads, which no product reads. */
enum { SHORT_ROW = 256 };

static enum status rms_norm(struct backend *backend, const float *x, int64_t n, int32_t dim, const float *gain, float eps, float *out)
{
	struct cuda_backend *b = self(backend);
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

static enum status matmul(struct backend *backend, const float *x, int64_t n_rows, const struct matmul *mm, int32_t n_mm)
{
	struct cuda_backend *b = self(backend);
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

static enum status rope(struct backend *backend, float *q, int32_t n_head, float *k, int32_t n_head_kv, int32_t head_dim,
                        const struct rope_params *p)
{
	struct cuda_backend *b = self(backend);
	const int pairs = p->n_dims / 2, n_rows = b->batch->n_rows;
	TRY(begin(b));
	if (pairs < 1 || pairs > ROPE_MAX_PAIRS || 2 * pairs > head_dim)
		return latch(b, STATUS_UNSUPPORTED);
	if (b->rope_freq != p->inv_freq || b->rope_magnitude != p->magnitude || b->rope_pairs != pairs) {
		TRY(latch(b, grow(b, &b->rope, static_cast<size_t>(n_rows) * static_cast<size_t>(pairs) * sizeof(float2))));
		TRY(launched(b, rope_table(p->inv_freq, p->magnitude, pairs, uploaded<int32_t>(b, b->position), n_rows,
		                           static_cast<float2 *>(b->rope.p), b->stream),
		             "angles"));
		b->rope_freq = p->inv_freq;
		b->rope_magnitude = p->magnitude;
		b->rope_pairs = pairs;
	}
	wrote(b, q, static_cast<int64_t>(n_rows) * n_head * head_dim);
	wrote(b, k, static_cast<int64_t>(n_rows) * n_head_kv * head_dim);
	b->rope_args = {q, k, n_head, n_head_kv, head_dim, pairs, p->pairing == ROPE_INTERLEAVED, static_cast<const float2 *>(b->rope.p)};
	b->rope_waits = true;
	return STATUS_OK;
}

static size_t layer_offset(const struct kv_layout *l, int32_t layer)
{
	return static_cast<size_t>(layer) * 2 * static_cast<size_t>(l->n_head_kv) * static_cast<size_t>(l->head_dim) *
	       static_cast<size_t>(l->page_tokens) * sizeof(__half);
}

static enum status kv_write(struct backend *backend, void *kv, const struct kv_layout *l, int32_t layer, const float *k, const float *v)
{
	struct cuda_backend *b = self(backend);
	struct rope_args r = b->rope_args;
	if (!attention_supports(l->n_head_kv, l->n_head_kv, l->head_dim))
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
	const struct kv_args a = {static_cast<uint8_t *>(kv), l->page_stride, layer_offset(l, layer), v};
	return launched(b, rope_and_store(r, a, step_rows(b), b->stream), "storing keys and values");
}

static enum status attention(struct backend *backend, const void *kv, const struct kv_layout *l, int32_t layer, const float *q,
                             int32_t n_head, float scale, float *out)
{
	struct cuda_backend *b = self(backend);
	TRY(begin(b));
	if (!attention_supports(n_head, l->n_head_kv, l->head_dim))
		return latch(b, STATUS_UNSUPPORTED);
	TRY(latch(b, plan_attention(b, n_head, l->n_head_kv, l->head_dim)));
	const struct attention_plan *plan = &b->plan;
	struct attention_args a = {};
	a.kv = static_cast<const uint8_t *>(kv);
	a.page_stride = l->page_stride;
	a.layer_offset = layer_offset(l, layer);
	a.n_head = n_head;
	a.n_head_kv = l->n_head_kv;
	a.head_dim = l->head_dim;
	a.scale = scale;
	a.q = q;
	a.out = out;
	/* Products take whole units of 256: what lies beyond a narrower row must be zeros, which only to_halves() writes. */
	if (n_head * l->head_dim % 256 == 0)
		a.h = claim_halves(b, out, b->batch->n_rows, static_cast<int64_t>(n_head) * l->head_dim);
	else
		wrote(b, out, static_cast<int64_t>(b->batch->n_rows) * n_head * l->head_dim);
	a.seq_table = uploaded<int32_t>(b, b->seq_table);
	a.table = uploaded<int32_t>(b, b->table);
	a.parts = uploaded<struct attention_item>(b, plan->parts);
	a.n_parts = plan->n_parts;
	a.whole = uploaded<struct attention_item>(b, plan->whole);
	a.n_whole = plan->n_whole;
	a.merges = uploaded<struct merge_item>(b, plan->merges);
	a.n_merges = plan->n_merges;
	a.partial = static_cast<float *>(b->partial.p);
	return launched(b, attention(a, b->stream), "attention");
}

static enum status swiglu(struct backend *backend, float *gate, const float *up, int64_t n, int32_t dim)
{
	struct cuda_backend *b = self(backend);
	TRY(begin(b));
	if (n > INT32_MAX)
		return latch(b, STATUS_INVALID);
	const struct halves h = claim_halves(b, gate, n, dim);
	return launched(b, swiglu(gate, up, static_cast<int>(n), dim, h, b->stream), "gate");
}

static enum status gather_rows(struct backend *backend, const float *x, int32_t dim, const int32_t *rows, int32_t n, float *out)
{
	struct cuda_backend *b = self(backend);
	TRY(begin(b));
	wrote(b, out, static_cast<int64_t>(n) * dim);
	return launched(b, gather_rows(x, dim, rows, n, out, b->stream), "gathering rows");
}

static enum status page_copy(struct backend *backend, void *kv, const struct kv_layout *l, const int32_t *from, const int32_t *to, int32_t n)
{
	struct cuda_backend *b = self(backend);
	TRY(begin(b));
	return launched(b, copy_pages(static_cast<uint8_t *>(kv), l->page_stride, l->page_bytes, from, to, n, b->stream), "copying pages");
}

/* ---- Life ---- */

static void info(const struct backend *backend, struct backend_info *out)
{
	const struct cuda_backend *b = reinterpret_cast<const struct cuda_backend *>(backend);
	*out = {};
	out->name = GPU_DEVICE_NAME;
	memcpy(out->detail, b->detail, sizeof out->detail);
}

static void destroy(struct backend *backend)
{
	struct cuda_backend *b = self(backend);
	if (b->stream) {
		cudaStreamSynchronize(b->stream);
		stage_free(b);
	}
	upload_free(&b->upload);
	cudaFree(b->halves_x.p);
	cudaFree(b->halves_scale.p);
	cudaFree(b->partial.p);
	cudaFree(b->rope.p);
	while (b->allocations) {
		struct allocation *a = b->allocations;
		b->allocations = a->next;
		cudaFree(a->base);
		free(a);
	}
	if (b->stream)
		cudaStreamDestroy(b->stream);
	cudaGetLastError();
	free(b);
}

static struct backend_ops make_ops()
{
	struct backend_ops o = {};
	o.destroy = destroy;
	o.info = info;
	o.mem_alloc = mem_alloc;
	o.mem_free = mem_free;
	o.mem_write = mem_write;
	o.mem_read = mem_read;
	o.mem_available = mem_available;
	o.weight_create = weight_create;
	o.weight_destroy = weight_destroy;
	o.weight_bytes = weight_bytes;
	o.reserve = reserve;
	o.step_begin = step_begin;
	o.step_end = step_end;
	o.embed = embed;
	o.rms_norm = rms_norm;
	o.matmul = matmul;
	o.rope = rope;
	o.kv_write = kv_write;
	o.attention = attention;
	o.swiglu = swiglu;
	o.gather_rows = gather_rows;
	o.page_copy = page_copy;
	o.sync = sync;
	o.last_failure = last_failure;
	return o;
}

static enum status open_device(struct cuda_backend *b, struct error *err)
{
	int n = 0;
	cudaDeviceProp prop;
	cudaError_t e = cudaGetDeviceCount(&n);
	if (e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver || (e == cudaSuccess && n == 0)) {
		cudaGetLastError();
		return error_set(err, STATUS_UNSUPPORTED, "no CUDA device can be used: %s",
		                 e == cudaErrorInsufficientDriver ? "there is no NVIDIA driver, or it is too old" : "there is none");
	}
	if (e == cudaSuccess && b->ordinal >= n)
		return error_set(err, STATUS_UNSUPPORTED, "there is no CUDA device %d: this machine has %d", b->ordinal, n);
	if (e == cudaSuccess)
		e = cudaSetDevice(b->ordinal);
	if (e == cudaSuccess)
		e = cudaGetDeviceProperties(&prop, b->ordinal);
	if (e == cudaSuccess && prop.major * 10 + prop.minor < 75)
		return error_set(err, STATUS_UNSUPPORTED, "CUDA device %d, %s, has compute capability %d.%d: 7.5 or later is needed", b->ordinal,
		                 prop.name, prop.major, prop.minor);
	if (e == cudaSuccess)
		e = cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking);
	if (e != cudaSuccess) {
		cudaGetLastError();
		return error_set(err, e == cudaErrorMemoryAllocation ? STATUS_NOMEM : STATUS_UNSUPPORTED, "CUDA device %d cannot be used: %s",
		                 b->ordinal, cudaGetErrorString(e));
	}
	snprintf(b->detail, sizeof b->detail, "%.80s, compute capability %d.%d, %.1f GiB", prop.name, prop.major, prop.minor,
	         static_cast<double>(prop.totalGlobalMem) / (1u << 30));
	return STATUS_OK;
}

} // namespace GPU_NS

extern "C" enum status GPU_CREATE(int32_t ordinal, struct backend **out, struct error *err)
{
	using namespace GPU_NS;
	static const struct backend_ops ops = make_ops();
	struct cuda_backend *b = static_cast<struct cuda_backend *>(calloc(1, sizeof *b));
	if (!b)
		return error_set(err, STATUS_NOMEM, "no memory for the CUDA backend");
	b->base.ops = &ops;
	b->ordinal = ordinal;
	const enum status s = open_device(b, err);
	if (s != STATUS_OK) {
		destroy(&b->base);
		return s;
	}
	*out = &b->base;
	return STATUS_OK;
}
