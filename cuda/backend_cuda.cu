/*
 * The CUDA backend: engine/backend.h's table over the kernels of this directory. One stream, so operations run in the
 * order in which they are called; the host waits in step_end(), mem_read(), mem_write() and sync() alone.
 *
 * Determinism. A row's results do not depend on the rows beside it nor on how its prompt was cut into chunks: see
 * product.cu and attention.cuh. They differ from the CPU's: activations are halves in products (eleven bits of each
 * element; `precise` makes no difference), sums are floats.
 */
#include "cuda/operations.cuh"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace GPU_NS
{

/* ---- Errors ---- */

enum status check(struct cuda_backend *b, cudaError_t e, const char *what)
{
	if (e == cudaSuccess)
		return STATUS_OK;
	cudaGetLastError(); /* what is not sticky is forgotten, so that later calls do not report it again */
	/* An error that has broken the context comes back from every call. */
	const bool was_lost = b->lost;
	if (e != cudaErrorMemoryAllocation && b->stream && !b->lost && b->graphs.mode != GRAPH_RECORD)
		b->lost = cudaStreamSynchronize(b->stream) != cudaSuccess;
	if (!was_lost) /* what comes after a loss tells nothing new */
		snprintf(b->failure, sizeof b->failure, "%s: %s (%s)%s", what, cudaGetErrorString(e),
			 cudaGetErrorName(e), b->lost ? "; the device is lost" : "");
	if (!was_lost)
		log_msg(e == cudaErrorMemoryAllocation ? LOG_WARN : LOG_ERROR, "cuda", "%s", b->failure);
	return e == cudaErrorMemoryAllocation ? STATUS_NOMEM : b->lost ? STATUS_DEVICE : STATUS_INTERNAL;
}

enum status catch_up(struct cuda_backend *b)
{
	TRY(graph_leave(b));
	return begin(b);
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
	a->aligned = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(a->base) + ALIGNMENT - 1) &
					      ~static_cast<uintptr_t>(ALIGNMENT - 1));
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
	TRY(catch_up(b));
	wrote(b, static_cast<const float *>(dst), static_cast<int64_t>((bytes + sizeof(float) - 1) / sizeof(float)));
	TRY(check(b, cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, b->stream), "writing device memory"));
	return check(b, cudaStreamSynchronize(b->stream), "writing device memory");
}

static enum status mem_read(struct backend *backend, void *host, const void *src, size_t bytes)
{
	struct cuda_backend *b = self(backend);
	TRY(catch_up(b));
	TRY(check(b, cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, b->stream), "reading device memory"));
	return check(b, cudaStreamSynchronize(b->stream), "reading device memory");
}

static enum status sync(struct backend *backend)
{
	struct cuda_backend *b = self(backend);
	TRY(catch_up(b));
	return check(b, cudaStreamSynchronize(b->stream), "waiting for the device");
}

static size_t mem_available(struct backend *backend)
{
	size_t free_bytes, total;
	return check(self(backend), cudaMemGetInfo(&free_bytes, &total), "asking for free memory") == STATUS_OK
		       ? free_bytes
		       : 0;
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
		log_msg(LOG_ERROR, "cuda",
			"heads of %" PRId32 " elements are not supported: multiples of 8 up to 256 are",
			layout->head_dim);
		return STATUS_UNSUPPORTED;
	}
	stage_free(b);
	if (b->wide != layout->wide || b->watch != layout->watch)
		graphs_forget(b); /* the uploaded arrays lie otherwise with wide copies */
	b->layout = *layout;
	b->wide = layout->wide;
	b->watch = layout->watch;
	if (looks(b))
		TRY(grow(b, &b->odd, odd_bytes(max_rows)));
	TRY(grow_halves(b, max_rows, max_width));
	return grow(b, &b->rope,
		    static_cast<size_t>(max_rows) * static_cast<size_t>(layout->head_dim / 2) * sizeof(float2));
}

static enum status step_begin(struct backend *backend, const struct batch *batch)
{
	struct cuda_backend *b = self(backend);
	b->step_status = STATUS_OK;
	b->batch = batch;
	forget_angles(b);
	b->rope_waits = false;
	b->halves_of = NULL;
	if (b->lost)
		return latch(b, STATUS_DEVICE);
	TRY(latch(b, step_upload(b, batch)));
	graph_begin(b);
	return STATUS_OK;
}

static enum status step_end(struct backend *backend)
{
	struct cuda_backend *b = self(backend);
	latch(b, graph_end(b));
	begin(b);
	latch(b, step_finish(b));
	b->batch = NULL;
	/* While a graph was recorded nobody could ask whether a failure was the device's end. */
	return b->lost ? STATUS_DEVICE : b->step_status;
}

/* ---- Operations ---- */

static enum status embed(struct backend *backend, const struct weight *w, float scale, float *out)
{
	struct cuda_backend *b = self(backend);
	for (int32_t i = 0; i < b->batch->n_rows; i++)
		if (b->batch->token[i] < 0 || b->batch->token[i] >= matrix_of(w)->n_out)
			return latch(b, STATUS_INVALID);
	struct operation o = operation(OP_EMBED);
	o.embed.w = w;
	o.embed.scale = scale;
	o.embed.out = out;
	return graph_submit(b, &o);
}

static enum status submit_norm(struct backend *backend, enum operation_kind kind, const float *x, int64_t n,
			       int32_t dim, const float *gain, float eps, float *out)
{
	struct operation o = operation(kind);
	o.norm.x = x;
	o.norm.n = n;
	o.norm.dim = dim;
	o.norm.gain = gain;
	o.norm.eps = eps;
	o.norm.out = out;
	return graph_submit(self(backend), &o);
}

static enum status rms_norm(struct backend *backend, const float *x, int64_t n, int32_t dim, const float *gain,
			    float eps, float *out)
{
	return submit_norm(backend, OP_NORM, x, n, dim, gain, eps, out);
}

static enum status rms_norm_add(struct backend *backend, const float *x, int64_t n, int32_t dim, const float *gain,
				float eps, float *out)
{
	return submit_norm(backend, OP_NORM_ADD, x, n, dim, gain, eps, out);
}

static enum status matmul(struct backend *backend, const float *x, int64_t n_rows, const struct matmul *mm,
			  int32_t n_mm)
{
	struct cuda_backend *b = self(backend);
	if (n_mm > MAX_PRODUCTS) {
		TRY(graph_leave(b));
		return execute_matmul(b, x, n_rows, mm, n_mm);
	}
	struct operation o = operation(OP_MATMUL);
	o.matmul.x = x;
	o.matmul.n_rows = n_rows;
	o.matmul.n = n_mm;
	for (int32_t i = 0; i < n_mm; i++) { /* member by member: padding stays zero */
		o.matmul.mm[i].weight = mm[i].weight;
		o.matmul.mm[i].bias = mm[i].bias;
		o.matmul.mm[i].y = mm[i].y;
		o.matmul.mm[i].accumulate = mm[i].accumulate;
		o.matmul.mm[i].precise = mm[i].precise;
	}
	return graph_submit(b, &o);
}

static enum status rope(struct backend *backend, float *q, int32_t n_head, float *k, int32_t n_head_kv,
			int32_t head_dim, const struct rope_params *p)
{
	struct operation o = operation(OP_ROPE);
	o.rope.q = q;
	o.rope.n_head = n_head;
	o.rope.k = k;
	o.rope.n_head_kv = n_head_kv;
	o.rope.head_dim = head_dim;
	o.rope.p.pairing = p->pairing;
	o.rope.p.n_dims = p->n_dims;
	o.rope.p.inv_freq = p->inv_freq;
	o.rope.p.magnitude = p->magnitude;
	o.rope.p.chunks = p->chunks;
	return graph_submit(self(backend), &o);
}

static void copy_layout(struct kv_layout *to, const struct kv_layout *from)
{
	to->n_layer = from->n_layer;
	to->n_head_kv = from->n_head_kv;
	to->head_dim = from->head_dim;
	to->page_tokens = from->page_tokens;
	to->type = from->type;
	to->page_bytes = from->page_bytes;
	to->page_stride = from->page_stride;
	to->form = from->form;
	to->wide = from->wide;
	to->bounds = from->bounds;
}

static enum status kv_write(struct backend *backend, void *kv, const struct kv_layout *l, int32_t layer, const float *k,
			    const float *v)
{
	struct operation o = operation(OP_KV_WRITE);
	o.kv_write.kv = kv;
	copy_layout(&o.kv_write.layout, l);
	o.kv_write.layer = layer;
	o.kv_write.k = k;
	o.kv_write.v = v;
	return graph_submit(self(backend), &o);
}

static enum status attention(struct backend *backend, const void *kv, const struct kv_layout *l, int32_t layer,
			     const float *q, int32_t n_head, const struct attention_params *params, float *out)
{
	struct operation o = operation(OP_ATTENTION);
	o.attention.kv = kv;
	copy_layout(&o.attention.layout, l);
	o.attention.layer = layer;
	o.attention.q = q;
	o.attention.n_head = n_head;
	o.attention.params = *params;
	o.attention.out = out;
	return graph_submit(self(backend), &o);
}

static enum status glu(struct backend *backend, enum glu f, float *gate, const float *up, int64_t n, int32_t dim)
{
	struct operation o = operation(OP_GLU);
	o.glu.f = f;
	o.glu.gate = gate;
	o.glu.up = up;
	o.glu.n = n;
	o.glu.dim = dim;
	return graph_submit(self(backend), &o);
}

static enum status softcap(struct backend *backend, float *x, int64_t n, float cap)
{
	struct operation o = operation(OP_SOFTCAP);
	o.softcap.x = x;
	o.softcap.n = n;
	o.softcap.cap = cap;
	return graph_submit(self(backend), &o);
}

static enum status gather_rows(struct backend *backend, const float *x, int32_t dim, const int32_t *rows, int32_t n,
			       float *out)
{
	struct cuda_backend *b = self(backend);
	TRY(catch_up(b));
	wrote(b, out, static_cast<int64_t>(n) * dim);
	return latch(b, check(b, gather_rows(x, dim, rows, n, out, b->stream), "gathering rows"));
}

static enum status sample(struct backend *backend, float *logits, int32_t n_vocab, int32_t stride,
			  const struct sample_row *rows, int32_t n, int32_t *tokens)
{
	struct cuda_backend *b = self(backend);
	TRY(catch_up(b));
	wrote(b, logits, INT32_MAX);
	return step_sample(b, logits, n_vocab, stride, rows, n, tokens);
}

/* ---- Life ---- */

static void info(const struct backend *backend, struct backend_info *out)
{
	const struct cuda_backend *b = reinterpret_cast<const struct cuda_backend *>(backend);
	*out = {};
	out->name = GPU_DEVICE_NAME;
	out->kv_order = {true, false, KV_OPERAND_KEYS, KV_OPERAND_VALUES};
	out->kv_type = b->kv_type;
	out->narrow_kv = true;
	out->chooses_pages = true;
	out->weighs_pages = true;
	out->turns_chunks = true;
	out->probes_pages = true;
	out->adds_to_logits = true;
	memcpy(out->detail, b->detail, sizeof out->detail);
}

static enum status choose_kv(struct backend *backend, enum quant_type type)
{
	if (type != QUANT_F16 && type != QUANT_BF16)
		return STATUS_UNSUPPORTED;
	graphs_forget(self(backend));
	self(backend)->kv_type = type;
	return STATUS_OK;
}

static void destroy(struct backend *backend)
{
	struct cuda_backend *b = self(backend);
	if (b->stream) {
		cudaStreamSynchronize(b->stream);
		stage_free(b);
	}
	graphs_forget(b);
	far_close(b);
	upload_free(&b->upload);
	cudaFree(b->halves_x.p);
	cudaFree(b->halves_scale.p);
	cudaFree(b->partial.p);
	cudaFree(b->scores.p);
	cudaFree(b->state.p);
	cudaFree(b->told.p);
	cudaFree(b->part_weights.p);
	cudaFree(b->whole_weights.p);
	cudaFree(b->chosen.p);
	cudaFree(b->probed.p);
	cudaFree(b->probe_bounds.p);
	cudaFree(b->rope.p);
	cudaFree(b->turned.p);
	cudaFree(b->turns.p);
	cudaFree(b->odd.p);
	cudaFree(b->packed.p);
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
	o.host_alloc = host_alloc;
	o.host_free = host_free;
	o.choose_kv = choose_kv;
	o.mem_available = mem_available;
	o.weight_create = weight_create;
	o.weight_destroy = weight_destroy;
	o.weight_bytes = weight_bytes;
	o.reserve = reserve;
	o.step_begin = step_begin;
	o.step_end = step_end;
	o.embed = embed;
	o.rms_norm = rms_norm;
	o.rms_norm_add = rms_norm_add;
	o.matmul = matmul;
	o.rope = rope;
	o.kv_write = kv_write;
	o.attention = attention;
	o.attention_part = attention_part;
	o.glu = glu;
	o.softcap = softcap;
	o.gather_rows = gather_rows;
	o.sample = sample;
	o.page_copy = page_copy;
	o.page_pack = page_pack;
	o.page_unpack = page_unpack;
	o.page_bounds = page_bounds;
	o.bounds_read = bounds_read;
	o.page_layers = page_layers;
	o.page_norms = page_norms;
	o.sync = sync;
	o.scan = scan;
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
				 e == cudaErrorInsufficientDriver ? "there is no NVIDIA driver, or it is too old"
								  : "there is none");
	}
	if (e == cudaSuccess && b->ordinal >= n)
		return error_set(err, STATUS_UNSUPPORTED, "there is no CUDA device %d: this machine has %d", b->ordinal,
				 n);
	if (e == cudaSuccess)
		e = cudaSetDevice(b->ordinal);
	if (e == cudaSuccess)
		e = cudaGetDeviceProperties(&prop, b->ordinal);
	if (e == cudaSuccess && prop.major * 10 + prop.minor < 75)
		return error_set(err, STATUS_UNSUPPORTED,
				 "CUDA device %d, %s, has compute capability %d.%d: 7.5 or later is needed", b->ordinal,
				 prop.name, prop.major, prop.minor);
	if (e == cudaSuccess)
		e = cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking);
	if (e != cudaSuccess) {
		cudaGetLastError();
		return error_set(err, e == cudaErrorMemoryAllocation ? STATUS_NOMEM : STATUS_UNSUPPORTED,
				 "CUDA device %d cannot be used: %s", b->ordinal, cudaGetErrorString(e));
	}
	snprintf(b->detail, sizeof b->detail, "%.80s, compute capability %d.%d, %.1f GiB", prop.name, prop.major,
		 prop.minor, static_cast<double>(prop.totalGlobalMem) / (1u << 30));
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
	b->kv_type = QUANT_F16;
	const enum status s = open_device(b, err);
	if (s != STATUS_OK) {
		destroy(&b->base);
		return s;
	}
	*out = &b->base;
	return STATUS_OK;
}
