#include "engine/cpu/cpu.h"

#include <string.h>

#include "engine/cpu/memory.h"
#include "engine/cpu/narrow.h"

enum status cpu_base_init(struct cpu_base *c, const struct backend_ops *ops, int32_t n_threads)
{
	c->backend.ops = ops;
	c->batch = NULL;
	return threads_create(n_threads > 0 ? n_threads : threads_default_count(), &c->threads);
}

void cpu_base_fini(struct cpu_base *c)
{
	threads_destroy(c->threads);
}

enum status cpu_mem_alloc(struct backend *b, size_t bytes, void **out)
{
	(void)b;
	*out = cpu_memory_alloc(bytes);
	return *out ? STATUS_OK : STATUS_NOMEM;
}

void cpu_mem_free(struct backend *b, void *p, size_t bytes)
{
	(void)b;
	cpu_memory_free(p, bytes);
}

enum status cpu_mem_write(struct backend *b, void *dst, const void *host, size_t bytes)
{
	(void)b;
	memcpy(dst, host, bytes);
	return STATUS_OK;
}

enum status cpu_mem_read(struct backend *b, void *host, const void *src, size_t bytes)
{
	(void)b;
	memcpy(host, src, bytes);
	return STATUS_OK;
}

enum status cpu_step_begin(struct backend *b, const struct batch *batch)
{
	((struct cpu_base *)b)->batch = batch;
	return STATUS_OK;
}

enum status cpu_step_end(struct backend *b)
{
	((struct cpu_base *)b)->batch = NULL;
	return STATUS_OK;
}

enum status cpu_sync(struct backend *b)
{
	(void)b;
	return STATUS_OK;
}

enum status cpu_gather_rows(struct backend *b, const float *x, int32_t dim, const int32_t *rows, int32_t n, float *out)
{
	(void)b;
	for (int32_t i = 0; i < n; i++)
		memcpy(out + (int64_t)i * dim, x + (int64_t)rows[i] * dim, (size_t)dim * sizeof *out);
	return STATUS_OK;
}

struct page_copy {
	char *kv;
	const struct kv_layout *layout;
	const int32_t *from, *to;
};

static void copy_pages(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct page_copy *c = arg;
	(void)thread;
	for (int64_t i = begin; i < end; i++)
		memcpy(c->kv + (size_t)c->to[i] * c->layout->page_stride,
		       c->kv + (size_t)c->from[i] * c->layout->page_stride, c->layout->page_bytes);
	for (int64_t i = begin; i < end && c->layout->wide; i++) {
		const char *from = narrow_wide_page(c->layout, c->kv, c->from[i]);
		char *to = narrow_wide_page(c->layout, c->kv, c->to[i]);
		if (from && to)
			memcpy(to, from, c->layout->wide->bytes);
	}
}

enum status cpu_page_copy(struct backend *b, void *kv, const struct kv_layout *layout, const int32_t *from,
                          const int32_t *to, int32_t n)
{
	struct page_copy c = {kv, layout, from, to};
	threads_for(((struct cpu_base *)b)->threads, n, 1, copy_pages, &c);
	return STATUS_OK;
}

/* ---- The measure of memory ---- */

enum { SCAN_PAGE = 4096, SCAN_PIECE_PAGES = 64 };

struct scan {
	const char *p;
	_Atomic uint64_t sum;
};

static void scan_pages(void *arg, int64_t begin, int64_t end, int thread)
{
	typedef uint64_t words __attribute__((vector_size(64)));
	struct scan *s = arg;
	words a = {0}, b = {0};
	(void)thread;
	for (const char *p = s->p + begin * SCAN_PAGE, *stop = s->p + end * SCAN_PAGE; p < stop; p += 2 * sizeof a) {
		a += *(const words *)(const void *)p;
		b += *(const words *)(const void *)(p + sizeof a);
	}
	a += b;
	uint64_t sum = 0;
	for (size_t i = 0; i < sizeof a / sizeof sum; i++)
		sum += a[i];
	atomic_fetch_add(&s->sum, sum);
}

enum status cpu_scan(struct backend *b, const void *p, size_t bytes, uint64_t *sum)
{
	struct scan s = {.p = p};
	threads_for(((struct cpu_base *)b)->threads, (int64_t)(bytes / SCAN_PAGE), SCAN_PIECE_PAGES, scan_pages, &s);
	*sum = s.sum;
	return STATUS_OK;
}

enum status cpu_check_weight(const struct weight_desc *d, struct error *err)
{
	if (d->n_in <= 0 || d->n_out <= 0)
		return error_set(err, STATUS_INVALID, "matrix \"%s\" is empty", d->name);
	if (d->n_in % d->format->block_elems != 0)
		return error_set(err, STATUS_INVALID,
		                 "rows of \"%s\" have %lld elements, not a multiple of %u as %s needs", d->name,
		                 (long long)d->n_in, d->format->block_elems, d->format->name);
	/* The widest packed form takes below 16 bytes an element. */
	if (d->n_in > INT32_MAX || d->n_out > INT32_MAX || d->n_in > INT64_MAX / 16 / d->n_out)
		return error_set(err, STATUS_INVALID, "matrix \"%s\" of %lld x %lld is too large", d->name,
		                 (long long)d->n_in, (long long)d->n_out);
	return STATUS_OK;
}
