/*
 * What the CPU backends share: the kinds there are, and the operations whose code does not depend on the instruction
 * set.
 */
#pragma once

#include "engine/backend.h"
#include "engine/cpu/threads.h"

/* Every CPU backend begins with this. */
struct cpu_base {
	struct backend backend;
	struct threads *threads;
	const struct batch *batch; /* of the step that is open, else NULL */
};

/* Sets the vtable and starts the threads (n_threads 0: threads_default_count()). */
enum status cpu_base_init(struct cpu_base *c, const struct backend_ops *ops, int32_t n_threads);
void cpu_base_fini(struct cpu_base *c);

/*
 * Constructors, one per row of the table in backend.c: those of x86-64 and of 64-bit ARM are in builds for them alone.
 */
enum status cpu_reference_create(int32_t n_threads, struct backend **out, struct error *err);
enum status cpu_avx2_create(int32_t n_threads, struct backend **out, struct error *err);
enum status cpu_avx512_bf16_create(int32_t n_threads, struct backend **out, struct error *err);
enum status cpu_avx512_create(int32_t n_threads, struct backend **out, struct error *err);
enum status cpu_amx_create(int32_t n_threads, struct backend **out, struct error *err);
enum status cpu_amx_emulated_create(int32_t n_threads, struct backend **out, struct error *err);
enum status cpu_neon_create(int32_t n_threads, struct backend **out, struct error *err);
enum status cpu_neon_dotprod_create(int32_t n_threads, struct backend **out, struct error *err);

/* Entries of the vtable that are the same for all. */
enum status cpu_mem_alloc(struct backend *b, size_t bytes, void **out);
void cpu_mem_free(struct backend *b, void *p, size_t bytes);
enum status cpu_mem_write(struct backend *b, void *dst, const void *host, size_t bytes);
enum status cpu_mem_read(struct backend *b, void *host, const void *src, size_t bytes);
enum status cpu_step_begin(struct backend *b, const struct batch *batch);
enum status cpu_step_end(struct backend *b);
enum status cpu_gather_rows(struct backend *b, const float *x, int32_t dim, const int32_t *rows, int32_t n, float *out);
enum status cpu_page_copy(struct backend *b, void *kv, const struct kv_layout *layout, const int32_t *from,
                          const int32_t *to, int32_t n);
enum status cpu_sync(struct backend *b);
enum status cpu_scan(struct backend *b, const void *p, size_t bytes, uint64_t *sum);

/* Checks a description: sizes above zero, whole blocks in a row, a byte count that does not overflow. */
enum status cpu_check_weight(const struct weight_desc *desc, struct error *err);

/* Bytes of one row of a matrix in the file. */
static inline size_t cpu_row_bytes(const struct weight_desc *d)
{
	return (size_t)d->n_in / d->format->block_elems * d->format->block_bytes;
}
