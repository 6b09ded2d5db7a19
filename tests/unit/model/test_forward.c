/*
 * Loading and running tiny models on the reference backend. What the numbers should be is tested elsewhere
 * (tests/golden); here it is that nothing but a row's own history changes them, that damaged models are refused by
 * name, and that failures leave nothing.
 */
#include "tests/unit/model/model_file.h"

#include <stdio.h>

#include "engine/base/log.h"
#include "engine/model/forward.h"

enum { N_LAYER = 2, N_EMBD = 32, N_FF = 48, N_HEAD = 4, N_HEAD_KV = 2, HEAD_DIM = 8, N_VOCAB = 40, MAX_TENSORS = 64 };

static const struct meta qwen3[] = {
	{"general.architecture", 's', 0, "qwen3"},
	{"qwen3.block_count", 'u', N_LAYER, NULL},
	{"qwen3.embedding_length", 'u', N_EMBD, NULL},
	{"qwen3.feed_forward_length", 'u', N_FF, NULL},
	{"qwen3.attention.head_count", 'u', N_HEAD, NULL},
	{"qwen3.attention.head_count_kv", 'u', N_HEAD_KV, NULL},
	{"qwen3.attention.key_length", 'u', HEAD_DIM, NULL},
	{"qwen3.context_length", 'u', 256, NULL},
	{"qwen3.attention.layer_norm_rms_epsilon", 'f', 1e-6, NULL},
};

/* Tensors of a layer, after "blk.N."; n_out 0 is a vector. */
static const struct {
	const char *name;
	uint64_t n_in, n_out;
} layer_tensors[] = {
	{"attn_norm.weight", N_EMBD, 0},
	{"attn_q.weight", N_EMBD, N_HEAD *HEAD_DIM},
	{"attn_k.weight", N_EMBD, N_HEAD_KV *HEAD_DIM},
	{"attn_v.weight", N_EMBD, N_HEAD_KV *HEAD_DIM},
	{"attn_q_norm.weight", HEAD_DIM, 0},
	{"attn_k_norm.weight", HEAD_DIM, 0},
	{"attn_output.weight", N_HEAD *HEAD_DIM, N_EMBD},
	{"ffn_norm.weight", N_EMBD, 0},
	{"ffn_gate.weight", N_EMBD, N_FF},
	{"ffn_up.weight", N_EMBD, N_FF},
	{"ffn_down.weight", N_FF, N_EMBD},
};

struct tensor_spec {
	char name[64];
	uint32_t type;
	uint64_t n_in, n_out;
};

struct model_spec {
	struct tensor_spec tensor[MAX_TENSORS];
	int n;
};

static struct tensor_spec *spec_add(struct model_spec *s, const char *name, uint32_t type, uint64_t n_in,
                                    uint64_t n_out)
{
	struct tensor_spec *t = &s->tensor[s->n++];
	assert_in_range(s->n, 1, MAX_TENSORS);
	snprintf(t->name, sizeof t->name, "%s", name);
	t->type = type;
	t->n_in = n_in;
	t->n_out = n_out;
	return t;
}

static struct model_spec whole_model(void)
{
	struct model_spec s = {.n = 0};
	spec_add(&s, "token_embd.weight", QUANT_F32, N_EMBD, N_VOCAB);
	spec_add(&s, "output_norm.weight", QUANT_F32, N_EMBD, 0);
	for (int i = 0; i < N_LAYER; i++) {
		for (size_t j = 0; j < sizeof layer_tensors / sizeof layer_tensors[0]; j++) {
			char name[64];
			snprintf(name, sizeof name, "blk.%d.%s", i, layer_tensors[j].name);
			spec_add(&s, name, QUANT_F32, layer_tensors[j].n_in, layer_tensors[j].n_out);
		}
	}
	return s;
}

static struct tensor_spec *spec_find(struct model_spec *s, const char *name)
{
	for (int i = 0; i < s->n; i++) {
		if (strcmp(s->tensor[i].name, name) == 0)
			return &s->tensor[i];
	}
	fail_msg("no tensor %s", name);
	return NULL;
}

static struct gguf *open_model(const struct model_spec *s, struct buf *file)
{
	struct model_file f = {0};
	struct gguf *g;
	struct error err;
	*file = BUF_INIT;
	model_file_meta(&f, qwen3, sizeof qwen3 / sizeof qwen3[0], NULL, 0);
	for (int i = 0; i < s->n; i++)
		model_file_tensor(&f, s->tensor[i].name, s->tensor[i].type, s->tensor[i].n_in, s->tensor[i].n_out);
	model_file_finish(&f, file);
	assert_int_equal(gguf_open_memory(file->data, file->len, &g, &err), STATUS_OK);
	return g;
}

/* ---- A reference backend whose calls can be made to fail ---- */

static struct {
	const struct backend_ops *real;
	int calls_left; /* calls until one fails; negative: never */
	int live;       /* allocations and weights not given back */
	int open_steps;
	bool far_memory; /* pretend that device memory is not the host's */
	bool turns_nothing; /* it cannot compute dca */
} fault;

static bool fails_now(void)
{
	return fault.calls_left >= 0 && fault.calls_left-- == 0;
}

static enum status faulty_mem_alloc(struct backend *b, size_t bytes, void **out)
{
	enum status st = fails_now() ? STATUS_NOMEM : fault.real->mem_alloc(b, bytes, out);
	fault.live += st == STATUS_OK;
	return st;
}

static void counted_mem_free(struct backend *b, void *p, size_t bytes)
{
	fault.live--;
	fault.real->mem_free(b, p, bytes);
}

static enum status faulty_mem_write(struct backend *b, void *dst, const void *host, size_t bytes)
{
	return fails_now() ? STATUS_DEVICE : fault.real->mem_write(b, dst, host, bytes);
}

static enum status faulty_weight_create(struct backend *b, const struct weight_desc *d, struct weight **out,
                                        struct error *err)
{
	enum status st = fails_now() ? error_set(err, STATUS_NOMEM, "no memory for '%s'", d->name)
	                             : fault.real->weight_create(b, d, out, err);
	fault.live += st == STATUS_OK;
	return st;
}

static void counted_weight_destroy(struct backend *b, struct weight *w)
{
	fault.live--;
	fault.real->weight_destroy(b, w);
}

static enum status faulty_reserve(struct backend *b, int32_t rows, int32_t width, const struct kv_layout *layout)
{
	return fails_now() ? STATUS_NOMEM : fault.real->reserve(b, rows, width, layout);
}

static enum status counted_step_begin(struct backend *b, const struct batch *batch)
{
	fault.open_steps++;
	return fault.real->step_begin(b, batch);
}

static enum status counted_step_end(struct backend *b)
{
	fault.open_steps--;
	return fault.real->step_end(b);
}

static enum status faulty_attention(struct backend *b, const void *kv, const struct kv_layout *layout, int32_t layer,
                                    const float *q, int32_t n_head, const struct attention_params *params, float *out)
{
	return fails_now() ? STATUS_DEVICE : fault.real->attention(b, kv, layout, layer, q, n_head, params, out);
}

static void far_info(const struct backend *b, struct backend_info *out)
{
	fault.real->info(b, out);
	out->host_memory = !fault.far_memory;
	out->turns_chunks = out->turns_chunks && !fault.turns_nothing;
}

static struct backend *faulty_backend(void)
{
	static struct backend_ops ops;
	struct backend *b;
	assert_int_equal(backend_create(&(struct backend_options){"cpu-reference", 1}, &b, NULL), STATUS_OK);
	memset(&fault, 0, sizeof fault);
	fault.calls_left = -1;
	fault.real = b->ops;
	ops = *b->ops;
	ops.mem_alloc = faulty_mem_alloc;
	ops.mem_free = counted_mem_free;
	ops.mem_write = faulty_mem_write;
	ops.weight_create = faulty_weight_create;
	ops.weight_destroy = counted_weight_destroy;
	ops.reserve = faulty_reserve;
	ops.step_begin = counted_step_begin;
	ops.step_end = counted_step_end;
	ops.attention = faulty_attention;
	ops.info = far_info;
	b->ops = &ops;
	return b;
}

/* ---- A model ready to run ---- */

enum { MAX_ROWS = 64, N_PAGES = 8 };

struct bench {
	struct buf file;
	struct gguf *g;
	struct backend *b;
	struct model *m;
	struct kv_layout layout;
	void *kv;
};

static void bench_open(struct bench *t, bool far_memory)
{
	struct model_spec s = whole_model();
	struct error err;
	t->g = open_model(&s, &t->file);
	t->b = faulty_backend();
	fault.far_memory = far_memory;
	assert_int_equal(model_load(t->g, t->b, &t->m, &err), STATUS_OK);
	assert_int_equal(kv_layout_init(&t->layout, N_LAYER, N_HEAD_KV, HEAD_DIM, QUANT_F16), STATUS_OK);
	assert_int_equal(model_reserve(t->m, MAX_ROWS, MAX_ROWS, &t->layout, &err), STATUS_OK);
	assert_int_equal(t->b->ops->mem_alloc(t->b, N_PAGES * t->layout.page_stride, &t->kv), STATUS_OK);
}

static void bench_close(struct bench *t)
{
	t->b->ops->mem_free(t->b, t->kv, N_PAGES * t->layout.page_stride);
	model_destroy(t->m);
	assert_int_equal(fault.live, 0);
	assert_int_equal(fault.open_steps, 0);
	t->b->ops->destroy(t->b);
	gguf_close(t->g);
	buf_free(&t->file);
}

/* Runs ids[0..n) as one sequence in chunks; logits[n][N_VOCAB]. */
static void run_chunks(struct bench *t, const int32_t *ids, const int32_t *position, int32_t n, int32_t chunk,
                       const int32_t *table, float *logits)
{
	int32_t rows[MAX_ROWS];
	for (int32_t i = 0; i < MAX_ROWS; i++)
		rows[i] = i;
	for (int32_t at = 0; at < n; at += chunk) {
		int32_t count = n - at < chunk ? n - at : chunk;
		struct batch_seq seq = {0, count, at, table, (n + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS};
		struct batch batch = {count, ids + at, position + at, 1, &seq, count, rows};
		float *out;
		assert_int_equal(model_forward(t->m, &batch, t->kv, &out), STATUS_OK);
		memcpy(logits + at * N_VOCAB, out, (size_t)count * N_VOCAB * sizeof *out);
	}
}

static const int32_t ids[40] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4,
                                6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5, 0, 2, 8, 8, 4, 1, 9, 39};
static int32_t positions[40];

static void logits_do_not_depend_on_chunks_or_pages(void **state)
{
	(void)state;
	static float whole[40 * N_VOCAB], cut[40 * N_VOCAB];
	const int32_t near[] = {0, 1, 2}, scattered[] = {6, 1, 4};
	struct bench t;
	bench_open(&t, false);
	run_chunks(&t, ids, positions, 40, 40, near, whole);
	for (int32_t chunk = 1; chunk < 40; chunk += 6) {
		run_chunks(&t, ids, positions, 40, chunk, scattered, cut);
		assert_memory_equal(cut, whole, sizeof whole);
	}
	bool differ = false;
	for (int i = 0; i < N_VOCAB; i++)
		differ = differ || whole[i] != whole[39 * N_VOCAB + i];
	assert_true(differ);
	bench_close(&t);
}

static void logits_do_not_depend_on_other_sequences_or_outputs(void **state)
{
	(void)state;
	static float alone[40 * N_VOCAB];
	const int32_t table[] = {2, 5}, other_table[] = {0}, third_table[] = {7};
	int32_t token[40], position[40], wanted[] = {4, 29, 36};
	struct bench t;
	float *out;
	bench_open(&t, false);
	run_chunks(&t, ids, positions, 25, 25, table, alone);
	/* Five rows of another sequence, ours, and seven rows of a third. */
	for (int i = 0; i < 37; i++) {
		token[i] = i < 5 ? 11 + i : i < 30 ? ids[i - 5] : i - 30;
		position[i] = i < 5 ? i : i < 30 ? i - 5 : i - 30;
	}
	struct batch_seq seq[] = {{0, 5, 0, other_table, 1}, {5, 25, 0, table, 2}, {30, 7, 0, third_table, 1}};
	struct batch batch = {37, token, position, 3, seq, 3, wanted};
	assert_int_equal(model_forward(t.m, &batch, t.kv, &out), STATUS_OK);
	assert_memory_equal(out + N_VOCAB, alone + 24 * N_VOCAB, N_VOCAB * sizeof *out);
	bench_close(&t);
}

static void a_step_without_outputs_still_fills_the_cache(void **state)
{
	(void)state;
	static float whole[40 * N_VOCAB];
	const int32_t table[] = {0, 1, 2}, fresh[] = {3, 4, 5}, last = 0;
	struct bench t;
	float *out;
	bench_open(&t, false);
	run_chunks(&t, ids, positions, 40, 40, table, whole);
	struct batch_seq fill = {0, 39, 0, fresh, 3}, step = {0, 1, 39, fresh, 3};
	struct batch a = {39, ids, positions, 1, &fill, 0, NULL}, b = {1, ids + 39, positions + 39, 1, &step, 1, &last};
	assert_int_equal(model_forward(t.m, &a, t.kv, &out), STATUS_OK);
	assert_int_equal(model_forward(t.m, &b, t.kv, &out), STATUS_OK);
	assert_memory_equal(out, whole + 39 * N_VOCAB, N_VOCAB * sizeof *out);
	bench_close(&t);
}

/*
 * Rotation is relative: a sequence that begins at any position reads the same, as long as its block table says where it
 * stands.
 */
static void a_row_stands_where_the_block_table_says_and_turns_by_its_position(void **state)
{
	(void)state;
	static float near[40 * N_VOCAB], far[40 * N_VOCAB];
	const int32_t table[] = {5, 0, 3};
	int32_t late[40];
	struct bench t;
	bench_open(&t, false);
	for (int32_t i = 0; i < 40; i++)
		late[i] = 1000 * KV_PAGE_TOKENS + i;
	run_chunks(&t, ids, positions, 40, 7, table, near);
	run_chunks(&t, ids, late, 40, 7, table, far);
	double most = 0;
	bool differ = false;
	for (int32_t i = 0; i < 40 * N_VOCAB; i++) {
		most = fmax(most, fabs((double)far[i] - (double)near[i]));
		differ = differ || far[i] != near[i];
	}
	assert_true(most < 0.02); /* keys are halves */
	assert_true(differ);
	bench_close(&t);
}

/* Nothing is read of a page that left the table. */
static void a_page_that_was_dropped_is_not_seen(void **state)
{
	(void)state;
	static float clean[8 * N_VOCAB], damaged[8 * N_VOCAB], all[40 * N_VOCAB];
	const int32_t whole[] = {2, 4, 6}, rest[] = {2, 6};
	const int32_t rows[] = {0, 1, 2, 3, 4, 5, 6, 7};
	struct bench t;
	float *out;
	bench_open(&t, false);
	run_chunks(&t, ids, positions, 40, 40, whole, all);
	struct batch_seq seq = {0, 8, KV_PAGE_TOKENS, rest, 2};
	struct batch batch = {8, ids + 32, positions + 32, 1, &seq, 8, rows};
	assert_int_equal(model_forward(t.m, &batch, t.kv, &out), STATUS_OK);
	memcpy(clean, out, sizeof clean);
	memset((char *)t.kv + 4 * t.layout.page_stride, 0xff, t.layout.page_bytes);
	assert_int_equal(model_forward(t.m, &batch, t.kv, &out), STATUS_OK);
	memcpy(damaged, out, sizeof damaged);
	assert_memory_equal(clean, damaged, sizeof clean);
	assert_memory_not_equal(clean, all + 32 * N_VOCAB, sizeof clean);
	bench_close(&t);
}

static void logits_are_read_back_where_device_memory_is_not_the_hosts(void **state)
{
	(void)state;
	static float near[40 * N_VOCAB], far[40 * N_VOCAB];
	const int32_t table[] = {0, 1, 2};
	struct bench t;
	bench_open(&t, false);
	run_chunks(&t, ids, positions, 40, 9, table, near);
	bench_close(&t);
	bench_open(&t, true);
	run_chunks(&t, ids, positions, 40, 9, table, far);
	bench_close(&t);
	assert_memory_equal(near, far, sizeof near);
}

static void batches_that_do_not_hold_together_are_refused(void **state)
{
	(void)state;
	const int32_t table[] = {0, 1, 2};
	struct bench t;
	float *out;
	bench_open(&t, false);
	const struct batch_seq good_seq = {0, 8, 0, table, 1};
	const int32_t good_rows[] = {1, 3};
	const struct batch good = {8, ids, positions, 1, &good_seq, 2, good_rows};
	assert_int_equal(model_forward(t.m, &good, t.kv, &out), STATUS_OK);
#define REFUSED(...)                                                                                                   \
	do {                                                                                                           \
		struct batch_seq seq = good_seq;                                                                       \
		struct batch b = good;                                                                                 \
		int32_t token[8], position[8], rows[2] = {1, 3};                                                       \
		memcpy(token, ids, sizeof token);                                                                      \
		memcpy(position, positions, sizeof position);                                                          \
		b.seq = &seq;                                                                                          \
		b.token = token;                                                                                       \
		b.position = position;                                                                                 \
		b.output_row = rows;                                                                                   \
		__VA_ARGS__;                                                                                           \
		assert_int_equal(model_forward(t.m, &b, t.kv, &out), STATUS_INVALID);                                  \
	} while (0)
	REFUSED(token[5] = N_VOCAB);
	REFUSED(token[5] = -1);
	REFUSED(position[2] = 3);
	REFUSED(seq.first_position = 1, seq.n_pages = 2);
	REFUSED(seq.n_rows = 7);
	REFUSED(seq.n_rows = 9);
	REFUSED(seq.first_row = 1);
	REFUSED(seq.first_position = -1);
	REFUSED(seq.n_pages = 0);
	REFUSED(rows[1] = 8);
	REFUSED(rows[1] = 1);
	REFUSED(b.n_rows = 0);
	REFUSED(b.n_rows = MAX_ROWS + 1);
	REFUSED(b.n_outputs = MAX_ROWS + 1);
	REFUSED(b.n_seqs = 0);
#undef REFUSED
	bench_close(&t);
}

/* Where rows stand in block tables says which chunks keys are of; a device that cannot turn for them is named. */
static void chunks_take_rows_at_their_positions_and_a_device_that_turns_for_them(void **state)
{
	(void)state;
	struct model_spec s = whole_model();
	struct buf file;
	struct gguf *g = open_model(&s, &file);
	struct backend *b = faulty_backend();
	struct kv_layout layout;
	struct model *m = NULL;
	struct rope_choice choice;
	struct error err;
	void *kv;
	float *out;
	const int32_t position[4] = {64, 65, 66, 67}, table[N_PAGES] = {0, 1, 2, 3, 4, 5, 6, 7}, rows[1] = {3};
	struct batch_seq seq = {0, 4, 64, table, 5};
	const struct batch batch = {4, ids, position, 1, &seq, 1, rows};
	assert_int_equal(rope_choice_parse("dca:4,original=100,chunk=64", &choice, &err), STATUS_OK);
	fault.turns_nothing = true;
	assert_int_equal(model_load_stretched(g, b, &choice, &m, &err), STATUS_UNSUPPORTED);
	assert_string_equal(err.param, "rope-scaling");
	fault.turns_nothing = false;
	assert_int_equal(model_load_stretched(g, b, &choice, &m, &err), STATUS_OK);
	assert_int_equal(kv_layout_init(&layout, N_LAYER, N_HEAD_KV, HEAD_DIM, QUANT_F16), STATUS_OK);
	assert_int_equal(model_reserve(m, 4, 1, &layout, &err), STATUS_OK);
	assert_int_equal(b->ops->mem_alloc(b, N_PAGES * layout.page_stride, &kv), STATUS_OK);
	assert_int_equal(model_forward(m, &batch, kv, &out), STATUS_OK);
	seq.first_position = 48; /* a page has left it */
	assert_int_equal(model_forward(m, &batch, kv, &out), STATUS_INVALID);
	b->ops->mem_free(b, kv, N_PAGES * layout.page_stride);
	model_destroy(m);
	b->ops->destroy(b);
	gguf_close(g);
	buf_free(&file);
}

static void a_failing_operation_ends_the_step(void **state)
{
	(void)state;
	const int32_t table[] = {0};
	const int32_t row = 3;
	struct batch_seq seq = {0, 4, 0, table, 1};
	struct batch batch = {4, ids, positions, 1, &seq, 1, &row};
	struct bench t;
	float *out;
	bench_open(&t, false);
	fault.calls_left = 1; /* the second layer's attention */
	assert_int_equal(model_forward(t.m, &batch, t.kv, &out), STATUS_DEVICE);
	assert_int_equal(fault.open_steps, 0);
	fault.calls_left = -1;
	assert_int_equal(model_forward(t.m, &batch, t.kv, &out), STATUS_OK);
	bench_close(&t);
}

/* ---- Loading ---- */

/* The spec must be refused with a sentence that holds the text. */
static void check_refused(const struct model_spec *s, enum status expected, const char *text)
{
	struct buf file;
	struct error err = {0};
	struct model *m;
	struct gguf *g = open_model(s, &file);
	struct backend *b = faulty_backend();
	assert_int_equal(model_load(g, b, &m, &err), expected);
	assert_non_null(strstr(err.message, text));
	assert_int_equal(fault.live, 0);
	b->ops->destroy(b);
	gguf_close(g);
	buf_free(&file);
}

static void every_missing_tensor_is_named(void **state)
{
	(void)state;
	struct model_spec whole = whole_model();
	for (int i = 0; i < whole.n; i++) {
		struct model_spec s = whole;
		memmove(&s.tensor[i], &s.tensor[i + 1], sizeof s.tensor[0] * (size_t)(s.n - i - 1));
		s.n--;
		check_refused(&s, STATUS_NOT_FOUND, whole.tensor[i].name);
	}
}

static void every_wrong_shape_is_named(void **state)
{
	(void)state;
	struct model_spec whole = whole_model();
	for (int i = 0; i < whole.n; i++) {
		struct model_spec s = whole;
		s.tensor[i].n_in += 16;
		check_refused(&s, STATUS_CORRUPT, whole.tensor[i].name);
		if (whole.tensor[i].n_out == 0 || strcmp(whole.tensor[i].name, "token_embd.weight") == 0)
			continue;
		s = whole;
		s.tensor[i].n_out -= 1;
		check_refused(&s, STATUS_CORRUPT, whole.tensor[i].name);
	}
}

static void quantised_vectors_are_refused(void **state)
{
	(void)state;
	struct model_spec s = whole_model();
	spec_find(&s, "blk.1.ffn_norm.weight")->type = QUANT_Q8_0;
	check_refused(&s, STATUS_UNSUPPORTED, "'blk.1.ffn_norm.weight' is Q8_0");
}

/* A tensor inside a layer that is not computed would silently change the model. */
static void unknown_tensors_inside_layers_are_refused(void **state)
{
	(void)state;
	struct model_spec s = whole_model();
	spec_add(&s, "blk.1.attn_sinks.weight", QUANT_F32, N_HEAD, 0);
	check_refused(&s, STATUS_UNSUPPORTED, "'blk.1.attn_sinks.weight'");
}

static void damaged_rope_divisors_are_refused(void **state)
{
	(void)state;
	struct model_spec s = whole_model();
	spec_add(&s, "rope_freqs.weight", QUANT_F32, HEAD_DIM, 0);
	check_refused(&s, STATUS_CORRUPT, "rope_freqs.weight");
	spec_find(&s, "rope_freqs.weight")->n_in = HEAD_DIM / 2;
	check_refused(&s, STATUS_CORRUPT, "rope_freqs.weight"); /* random values, some negative */
}

static void optional_and_unrelated_tensors_are_accepted(void **state)
{
	(void)state;
	struct model_spec s = whole_model();
	struct buf file;
	struct error err;
	struct model *m;
	spec_add(&s, "blk.0.attn_q.bias", QUANT_F32, N_HEAD * HEAD_DIM, 0);
	spec_add(&s, "blk.0.attn_output.bias", QUANT_F16, N_EMBD, 0);
	spec_add(&s, "output.weight", QUANT_F32, N_EMBD, N_VOCAB);
	spec_add(&s, "blk.2.attn_norm.weight", QUANT_F32, N_EMBD, 0); /* beyond the last layer */
	struct gguf *g = open_model(&s, &file);
	struct backend *b = faulty_backend();
	assert_int_equal(model_load(g, b, &m, &err), STATUS_OK);
	assert_false(model_params(m)->tied_output);
	uint64_t n_params = 0;
	for (int i = 0; i < s.n; i++)
		n_params += s.tensor[i].n_in * (s.tensor[i].n_out ? s.tensor[i].n_out : 1);
	assert_true(model_n_params(m) == n_params);
	model_destroy(m);
	assert_int_equal(fault.live, 0);
	b->ops->destroy(b);
	gguf_close(g);
	buf_free(&file);
}

static void any_failure_while_loading_frees_everything(void **state)
{
	(void)state;
	struct model_spec s = whole_model();
	struct buf file;
	struct gguf *g = open_model(&s, &file);
	struct backend *b = faulty_backend();
	struct kv_layout layout;
	struct error err;
	int failures = 0;
	assert_int_equal(kv_layout_init(&layout, N_LAYER, N_HEAD_KV, HEAD_DIM, QUANT_F16), STATUS_OK);
	for (int n = 0;; n++) {
		struct model *m = NULL;
		fault.calls_left = n;
		memset(&err, 0, sizeof err);
		enum status st = model_load(g, b, &m, &err);
		if (st == STATUS_OK) {
			int loaded = fault.live;
			st = model_reserve(m, MAX_ROWS, 4, &layout, &err);
			assert_true(st == STATUS_OK || fault.live == loaded);
			model_destroy(m);
		}
		assert_int_equal(fault.live, 0);
		if (st == STATUS_OK)
			break;
		assert_true(err.message[0] != '\0');
		failures++;
	}
	/*
	 * One for the embedding and one for each matrix of a layer, the vectors' memory and writing, step memory and
	 * the reserve.
	 */
	assert_int_equal(failures, 1 + 7 * N_LAYER + 2 + 2);
	b->ops->destroy(b);
	gguf_close(g);
	buf_free(&file);
}

static void reservations_are_checked(void **state)
{
	(void)state;
	struct model_spec s = whole_model();
	struct buf file;
	struct gguf *g = open_model(&s, &file);
	struct backend *b = faulty_backend();
	struct kv_layout layout, other;
	struct model *m;
	struct error err;
	assert_int_equal(model_load(g, b, &m, &err), STATUS_OK);
	assert_int_equal(kv_layout_init(&layout, N_LAYER, N_HEAD_KV, HEAD_DIM, QUANT_F16), STATUS_OK);
	assert_int_equal(kv_layout_init(&other, N_LAYER + 1, N_HEAD_KV, HEAD_DIM, QUANT_F16), STATUS_OK);
	assert_int_equal(model_reserve(m, 0, 0, &layout, &err), STATUS_INVALID);
	assert_int_equal(model_reserve(m, 4, -1, &layout, &err), STATUS_INVALID);
	assert_int_equal(model_reserve(m, 4, 4, &other, &err), STATUS_INVALID);
	/* more outputs than rows: as many as rows */
	assert_int_equal(model_reserve(m, 4, 9, &layout, &err), STATUS_OK);
	assert_int_equal(model_reserve(m, 4, 4, &layout, &err), STATUS_INVALID);
	model_destroy(m);
	model_destroy(NULL);
	assert_int_equal(fault.live, 0);
	b->ops->destroy(b);
	gguf_close(g);
	buf_free(&file);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(logits_do_not_depend_on_chunks_or_pages),
		cmocka_unit_test(logits_do_not_depend_on_other_sequences_or_outputs),
		cmocka_unit_test(a_step_without_outputs_still_fills_the_cache),
		cmocka_unit_test(a_row_stands_where_the_block_table_says_and_turns_by_its_position),
		cmocka_unit_test(a_page_that_was_dropped_is_not_seen),
		cmocka_unit_test(logits_are_read_back_where_device_memory_is_not_the_hosts),
		cmocka_unit_test(batches_that_do_not_hold_together_are_refused),
		cmocka_unit_test(chunks_take_rows_at_their_positions_and_a_device_that_turns_for_them),
		cmocka_unit_test(a_failing_operation_ends_the_step),
		cmocka_unit_test(every_missing_tensor_is_named),
		cmocka_unit_test(every_wrong_shape_is_named),
		cmocka_unit_test(quantised_vectors_are_refused),
		cmocka_unit_test(unknown_tensors_inside_layers_are_refused),
		cmocka_unit_test(damaged_rope_divisors_are_refused),
		cmocka_unit_test(optional_and_unrelated_tensors_are_accepted),
		cmocka_unit_test(any_failure_while_loading_frees_everything),
		cmocka_unit_test(reservations_are_checked),
	};
	for (int32_t i = 0; i < 40; i++)
		positions[i] = i;
	log_set_level(LOG_OFF);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
