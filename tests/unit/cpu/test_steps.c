/*
 * Steps of a CPU backend allocate nothing: after the first of each kind, every byte they need is there. The linker
 * sends the calls of the engine's code here (--wrap, see meson.build), so that they can be counted while a step runs.
 */
#include <stdatomic.h>
#include <sys/mman.h>

#include "tests/unit/cpu/fixture.h"

#include "engine/model/forward.h"
#include "tests/support/tiny_model.h"

static _Atomic bool counting;
static _Atomic int n_allocations;

static void count(void)
{
	if (counting)
		n_allocations++;
}

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t align, size_t n);
void *__real_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_aligned_alloc(size_t align, size_t n);
void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);

void *__wrap_malloc(size_t n)
{
	count();
	return __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
	count();
	return __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n)
{
	count();
	return __real_realloc(p, n);
}

void *__wrap_aligned_alloc(size_t align, size_t n)
{
	count();
	return __real_aligned_alloc(align, n);
}

void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
	count();
	return __real_mmap(at, n, prot, flags, fd, offset);
}

/* Not the reference backend, whose scratch grows with the longest sequence. */
static const char *const devices[] = {"cpu-avx2", "cpu-avx512", "cpu-avx512-bf16", "cpu-neon", "cpu-neon-dotprod"};

enum { ROWS = 96, SEQS = 8, PAGES = 64, SEQ_PAGES = PAGES / SEQS, VOCAB = 100 };

/* What a step is about: rows of each of the first n_seqs sequences, behind `at` positions. */
static const struct kind {
	const char *name;
	int32_t n_seqs, rows[SEQS], at;
} kinds[] = {
        {"a prompt", 1, {ROWS}, 0},         {"a chunk of one", 1, {24}, 90},
        {"one decode row", 1, {1}, 120},    {"eight decode rows", 8, {1, 1, 1, 1, 1, 1, 1, 1}, 100},
        {"a mixed step", 3, {1, 50, 1}, 60}, {"one decode row at the start", 1, {1}, 0},
};

struct step {
	struct batch batch;
	struct batch_seq seq[SEQS];
	int32_t token[ROWS], position[ROWS], output[SEQS], table[PAGES];
};

static void make_step(struct step *s, const struct kind *k)
{
	s->batch = (struct batch){0, s->token, s->position, k->n_seqs, s->seq, k->n_seqs, s->output};
	for (int i = 0; i < PAGES; i++)
		s->table[i] = i * 37 % PAGES;
	for (int i = 0; i < k->n_seqs; i++) {
		s->seq[i] = (struct batch_seq){s->batch.n_rows, k->rows[i], k->at, s->table + i * SEQ_PAGES, SEQ_PAGES};
		for (int r = 0; r < k->rows[i]; r++, s->batch.n_rows++) {
			s->token[s->batch.n_rows] = (k->at + r) % VOCAB;
			s->position[s->batch.n_rows] = k->at + r;
		}
		s->output[i] = s->batch.n_rows - 1;
	}
}

static void the_count_counts(void **state)
{
	(void)state;
	n_allocations = 0;
	counting = true;
	struct backend *b = open_backend("cpu-reference", 2);
	counting = false;
	assert_true(n_allocations > 0);
	b->ops->destroy(b);
}

/* The forward pass of a whole model. */
static void a_forward_pass_allocates_nothing(void **state)
{
	(void)state;
	struct buf file = BUF_INIT;
	struct gguf *g;
	struct error err = {0};
	tiny_model_build(&file, 256, 0, NULL, 1);
	assert_int_equal(gguf_open_memory(file.data, file.len, &g, &err), STATUS_OK);
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
		struct backend *b = open_backend(devices[d], 3);
		struct model *m;
		struct kv_layout layout;
		static struct step s;
		void *kv;
		float *logits;
		if (!b)
			continue;
		assert_int_equal(model_load(g, b, &m, &err), STATUS_OK);
		const struct model_params *p = model_params(m);
		assert_int_equal(kv_layout_for(b, &layout, p->n_layer, p->n_head_kv, p->head_dim), STATUS_OK);
		assert_int_equal(b->ops->mem_alloc(b, layout.page_stride * PAGES, &kv), STATUS_OK);
		assert_int_equal(model_reserve(m, ROWS, SEQS, &layout, &err), STATUS_OK);
		/* What is reserved is enough: nothing is left for the first step either. */
		for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
			make_step(&s, &kinds[i]);
			n_allocations = 0;
			counting = true;
			enum status st = model_forward(m, &s.batch, kv, &logits);
			counting = false;
			assert_int_equal(st, STATUS_OK);
			if (n_allocations)
				fail_msg("%s, %s: %d allocations", devices[d], kinds[i].name, n_allocations);
		}
		b->ops->mem_free(b, kv, layout.page_stride * PAGES);
		model_destroy(m);
		b->ops->destroy(b);
	}
	gguf_close(g);
	buf_free(&file);
}

/* A layer of each format of weights and each form of KV, operation by operation. */
static void no_operation_allocates(void **state)
{
	(void)state;
	enum { WIDE = 512, HEADS = 8, HEADS_KV = 2, DIM = 64 };
	static struct step s;
	uint64_t seed = 4;
	float inv_freq[DIM / 2], gain[WIDE];
	float *x = random_floats(&seed, ROWS * WIDE), *y = random_floats(&seed, ROWS * WIDE),
	      *out = random_floats(&seed, ROWS * WIDE);
	float *k = random_floats(&seed, ROWS * WIDE), *v = random_floats(&seed, ROWS * WIDE);
	for (int i = 0; i < DIM / 2; i++)
		inv_freq[i] = 1.0f / (float)(i + 1);
	for (int i = 0; i < WIDE; i++)
		gain[i] = 1;
	const struct rope_params rope = {.n_dims = DIM, .pairing = ROPE_HALVES, .inv_freq = inv_freq, .magnitude = 1};
	for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
		struct backend *b = open_backend(devices[d], 3);
		const struct quant_format *f;
		for (size_t i = 0; b && (f = quant_format_at(i)); i++) {
			enum kv_form form = (enum kv_form)(i % KV_N_FORMS);
			const struct backend_ops *ops = b->ops;
			struct kv_layout layout;
			struct weight *w, *narrow;
			void *kv, *data = random_matrix(&seed, f, WIDE, WIDE);
			struct weight_desc desc = {.name = "w", .format = f, .n_in = WIDE, .n_out = WIDE, .data = data};
			assert_int_equal(ops->weight_create(b, &desc, &w, NULL), STATUS_OK);
			desc.n_out = HEADS_KV * DIM;
			assert_int_equal(ops->weight_create(b, &desc, &narrow, NULL), STATUS_OK);
			assert_int_equal(kv_layout_for(b, &layout, 1, HEADS_KV, DIM), STATUS_OK);
			if (form != KV_FORM_F16)
				kv_layout_narrow(&layout, form);
			assert_int_equal(ops->mem_alloc(b, layout.page_stride * PAGES, &kv), STATUS_OK);
			assert_int_equal(ops->reserve(b, ROWS, WIDE, &layout), STATUS_OK);
			for (size_t n = 0; n < sizeof kinds / sizeof *kinds; n++) {
				make_step(&s, &kinds[n]);
				int32_t rows = s.batch.n_rows;
				const struct matmul qkv[] = {
					{.weight = w, .y = y}, {.weight = narrow, .y = k}, {.weight = narrow, .y = v}};
				const struct matmul back = {.weight = w, .y = x, .accumulate = true};
				enum status st[10];
				n_allocations = 0;
				counting = true;
				st[0] = ops->step_begin(b, &s.batch);
				st[1] = ops->rms_norm(b, x, rows, WIDE, gain, 1e-5f, out);
				st[2] = ops->matmul(b, out, rows, qkv, 3);
				st[3] = ops->rope(b, y, HEADS, k, HEADS_KV, DIM, &rope);
				st[4] = ops->kv_write(b, kv, &layout, 0, k, v);
				st[5] = ops->attention(b, kv, &layout, 0, y, HEADS,
				                       &(struct attention_params){.scale = 0.125f}, out);
				st[6] = ops->matmul(b, out, rows, &back, 1);
				st[7] = ops->glu(b, GLU_SILU, y, out, rows, WIDE);
				st[8] = ops->gather_rows(b, x, WIDE, s.output, s.batch.n_seqs, out);
				st[9] = ops->step_end(b);
				counting = false;
				for (size_t j = 0; j < sizeof st / sizeof *st; j++)
					assert_int_equal(st[j], STATUS_OK);
				if (n_allocations)
					fail_msg("%s, %s, %s: %d allocations", devices[d], f->name, kinds[n].name,
					         n_allocations);
			}
			ops->mem_free(b, kv, layout.page_stride * PAGES);
			ops->weight_destroy(b, narrow);
			ops->weight_destroy(b, w);
			free(data);
		}
		if (b)
			b->ops->destroy(b);
	}
	free(x);
	free(y);
	free(out);
	free(k);
	free(v);
}

UNIT_MAIN(cmocka_unit_test(the_count_counts), cmocka_unit_test(a_forward_pass_allocates_nothing),
          cmocka_unit_test(no_operation_allocates))
