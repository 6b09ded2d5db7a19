/*
 * Loading matrices: rows go from the file through pinned memory to the device, and a kernel packs them there.
 */
#include "cuda/backend.cuh"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

namespace GPU_NS
{

static constexpr size_t STAGE_BYTES = 16u << 20;

void stage_free(struct cuda_backend *b)
{
	cudaStreamSynchronize(b->stream);
	for (int i = 0; i < 2; i++) {
		cudaFreeHost(b->stage.host[i]);
		cudaFree(b->stage.device[i]);
		if (b->stage.free[i])
			cudaEventDestroy(b->stage.free[i]);
	}
	b->stage = {};
}

/* Buffers of at least `bytes`. */
static enum status stage_room(struct cuda_backend *b, size_t bytes)
{
	if (bytes <= b->stage.bytes)
		return STATUS_OK;
	stage_free(b);
	enum status s = STATUS_OK;
	for (int i = 0; i < 2 && s == STATUS_OK; i++) {
		s = check(b, cudaMallocHost(reinterpret_cast<void **>(&b->stage.host[i]), bytes),
			  "allocating pinned memory");
		if (s == STATUS_OK)
			s = check(b, cudaMalloc(reinterpret_cast<void **>(&b->stage.device[i]), bytes),
				  "allocating memory to load through");
		if (s == STATUS_OK)
			s = check(b, cudaEventCreateWithFlags(&b->stage.free[i], cudaEventDisableTiming),
				  "making an event");
	}
	if (s == STATUS_OK)
		b->stage.bytes = bytes;
	else
		stage_free(b);
	return s;
}

static enum status check_shape(const struct weight_desc *d, struct error *err)
{
	if (d->n_in <= 0 || d->n_out <= 0)
		return error_set(err, STATUS_INVALID, "matrix \"%s\" is empty", d->name);
	if (d->n_in % d->format->block_elems != 0)
		return error_set(err, STATUS_INVALID,
				 "rows of \"%s\" have %" PRId64 " elements, not a multiple of %u as %s needs", d->name,
				 d->n_in, d->format->block_elems, d->format->name);
	/* Padding to whole units takes below 16 bytes an element and 512 elements a row. */
	if (d->n_in > INT32_MAX / 2 || d->n_out > INT32_MAX / 2 || d->n_in + 512 > INT64_MAX / 16 / (d->n_out + 16))
		return error_set(err, STATUS_INVALID, "matrix \"%s\" of %" PRId64 " x %" PRId64 " is too large",
				 d->name, d->n_in, d->n_out);
	return STATUS_OK;
}

/* Sends rows first .. first + n - 1 to `to`, or packs them there. */
static enum status send_rows(struct cuda_backend *b, const struct weight_desc *d, const struct matrix *m, int64_t first,
			     int64_t n)
{
	const int i = b->stage.next;
	const size_t bytes = static_cast<size_t>(n) * m->row_bytes, at = static_cast<size_t>(first) * m->row_bytes;
	enum status s = check(b, cudaEventSynchronize(b->stage.free[i]), "waiting for a copy");
	if (s != STATUS_OK)
		return s;
	memcpy(b->stage.host[i], static_cast<const uint8_t *>(d->data) + at, bytes);
	uint8_t *to = m->raw ? m->raw + at : b->stage.device[i];
	s = check(b, cudaMemcpyAsync(to, b->stage.host[i], bytes, cudaMemcpyHostToDevice, b->stream),
		  "sending a matrix");
	if (s == STATUS_OK && m->packed) {
		const struct packed_form form = packed_form(m->type);
		struct pack_args a = {};
		a.rows = to;
		a.row_bytes = m->row_bytes;
		a.n_rows = static_cast<int>(n);
		a.n_in = m->n_in;
		a.n_units = m->n_units;
		a.n_tiles = static_cast<int>((n + 15) / 16);
		a.out = m->packed + static_cast<size_t>(first / 16) * static_cast<size_t>(m->n_units) *
					    static_cast<size_t>(form.unit_bytes);
		s = check(b, pack(m->type, a, b->stream), "packing a matrix");
	}
	if (s == STATUS_OK)
		s = check(b, cudaEventRecord(b->stage.free[i], b->stream), "recording an event");
	b->stage.next = !i;
	return s;
}

enum status weight_create(struct backend *backend, const struct weight_desc *d, struct weight **out, struct error *err)
{
	struct cuda_backend *b = self(backend);
	enum status s = check_shape(d, err);
	if (s != STATUS_OK)
		return s;
	struct matrix *m = static_cast<struct matrix *>(calloc(1, sizeof *m));
	if (!m)
		return error_set(err, STATUS_NOMEM, "no memory for matrix \"%s\"", d->name);
	const struct packed_form form = packed_form(d->format->type);
	m->type = d->format->type;
	m->n_in = static_cast<int>(d->n_in);
	m->n_out = static_cast<int>(d->n_out);
	m->n_units = (m->n_in + form.unit - 1) / form.unit;
	m->row_bytes = static_cast<size_t>(d->n_in) / d->format->block_elems * d->format->block_bytes;
	const int64_t n_tiles = (d->n_out + 15) / 16;
	m->bytes = d->rows_only ? static_cast<size_t>(d->n_out) * m->row_bytes
				: static_cast<size_t>(n_tiles) * static_cast<size_t>(m->n_units) *
					  static_cast<size_t>(form.unit_bytes);
	const size_t sixteen = 16 * m->row_bytes;
	const int64_t rows = sixteen > STAGE_BYTES ? 16 : static_cast<int64_t>(STAGE_BYTES / sixteen) * 16;
	int64_t at_once = rows < d->n_out ? rows : n_tiles * 16;
	s = stage_room(b, static_cast<size_t>(at_once) * m->row_bytes);
	if (s == STATUS_OK)
		s = check(b, cudaMalloc(reinterpret_cast<void **>(d->rows_only ? &m->raw : &m->packed), m->bytes),
			  "allocating a matrix");
	for (int64_t first = 0; first < d->n_out && s == STATUS_OK; first += at_once)
		s = send_rows(b, d, m, first, d->n_out - first < at_once ? d->n_out - first : at_once);
	if (s != STATUS_OK) {
		const size_t bytes = m->bytes;
		weight_destroy(backend, reinterpret_cast<struct weight *>(m));
		if (s == STATUS_NOMEM)
			return error_set(err, s, "no device memory for matrix \"%s\" (%zu bytes)", d->name, bytes);
		return error_set(err, s, "matrix \"%s\" (%zu bytes) could not be loaded: %s", d->name, bytes,
		                 b->failure);
	}
	*out = reinterpret_cast<struct weight *>(m);
	return STATUS_OK;
}

void weight_destroy(struct backend *backend, struct weight *w)
{
	struct cuda_backend *b = self(backend);
	struct matrix *m = reinterpret_cast<struct matrix *>(w);
	if (!m)
		return;
	cudaStreamSynchronize(b->stream);
	graphs_forget(b);
	cudaFree(m->raw);
	cudaFree(m->packed);
	free(m);
}

size_t weight_bytes(const struct backend *backend, const struct weight *w)
{
	(void)backend;
	return matrix_of(w)->bytes;
}

} // namespace GPU_NS
