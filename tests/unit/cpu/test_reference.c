/* The reference backend against the formulas of backend.h, computed here in the plainest way. */
#include <math.h>

#include "tests/unit/cpu/fixture.h"

static uint64_t seed = 7;

static void a_product_is_the_sum_over_dequantised_weights(void **state)
{
	(void)state;
	struct backend *b = open_backend("cpu-reference", 2);
	const struct quant_format *f;
	for (size_t i = 0; (f = quant_format_at(i)); i++) {
		enum { ROWS = 3, OUTS = 21 };
		int64_t n_in = f->block_elems == 1 ? 37 : 2 * f->block_elems;
		void *data = random_matrix(&seed, f, n_in, OUTS);
		float *x = random_floats(&seed, (size_t)n_in * ROWS), *bias = random_floats(&seed, OUTS);
		float *y = random_floats(&seed, ROWS * OUTS), *row = malloc((size_t)n_in * sizeof *row),
		      before[ROWS * OUTS];
		struct weight *w = open_weight(b, f, n_in, OUTS, data);
		memcpy(before, y, sizeof before);
		struct matmul mm = {w, bias, y, true};
		assert_int_equal(b->ops->matmul(b, x, ROWS, &mm, 1), STATUS_OK);
		for (int o = 0; o < OUTS; o++) {
			f->dequantize((char *)data + (size_t)o * (size_t)(n_in / f->block_elems) * f->block_bytes, row,
			              (size_t)n_in);
			for (int r = 0; r < ROWS; r++) {
				double sum = bias[o] + before[r * OUTS + o], size = fabs(sum);
				for (int64_t k = 0; k < n_in; k++) {
					sum += (double)x[r * n_in + k] * row[k];
					size += fabs((double)x[r * n_in + k] * row[k]);
				}
				assert_true(fabs(y[r * OUTS + o] - sum) <= 1e-6 * size);
			}
		}
		b->ops->weight_destroy(b, w);
		free(data);
		free(x);
		free(bias);
		free(y);
		free(row);
	}
	b->ops->destroy(b);
}

static void embedding_takes_the_rows_of_the_tokens(void **state)
{
	(void)state;
	struct backend *b = open_backend("cpu-reference", 1);
	const struct quant_format *f = quant_format(QUANT_Q4_1);
	void *data = random_matrix(&seed, f, 64, 10);
	struct weight *w = open_weight(b, f, 64, 10, data);
	struct scattered s;
	scattered_init(&s);
	scattered_add(&s, NULL, 0, 3);
	s.token[0] = 9;
	s.token[2] = 4;
	float out[3 * 64], want[64];
	b->ops->step_begin(b, &s.batch);
	assert_int_equal(b->ops->embed(b, w, 1, out), STATUS_OK);
	for (int i = 0; i < 3; i++) {
		f->dequantize((char *)data + s.token[i] * 2 * 20, want, 64);
		assert_memory_equal(out + i * 64, want, sizeof want);
	}
	s.token[1] = 10; /* outside the vocabulary */
	assert_int_equal(b->ops->embed(b, w, 1, out), STATUS_INVALID);
	b->ops->step_end(b);
	b->ops->weight_destroy(b, w);
	b->ops->destroy(b);
	free(data);
}

static void norm_and_swiglu_follow_their_formulas(void **state)
{
	(void)state;
	struct backend *b = open_backend("cpu-reference", 2);
	enum { N = 5, DIM = 33 };
	float *x = random_floats(&seed, N * DIM), *gain = random_floats(&seed, DIM), out[N * DIM];
	b->ops->rms_norm(b, x, N, DIM, gain, 1e-5f, out);
	for (int r = 0; r < N; r++) {
		double sum = 0;
		for (int d = 0; d < DIM; d++)
			sum += (double)x[r * DIM + d] * x[r * DIM + d];
		for (int d = 0; d < DIM; d++)
			assert_float_equal(out[r * DIM + d], x[r * DIM + d] / sqrt(sum / DIM + 1e-5) * gain[d], 1e-6);
	}
	float gate[N * DIM];
	memcpy(gate, x, sizeof gate);
	b->ops->glu(b, GLU_SILU, gate, out, N, DIM);
	for (int i = 0; i < N * DIM; i++)
		assert_float_equal(gate[i], x[i] / (1 + exp(-x[i])) * out[i], 1e-6);
	b->ops->destroy(b);
	free(x);
	free(gain);
}

static void rope_turns_pairs_by_position_times_frequency(void **state)
{
	(void)state;
	struct backend *b = open_backend("cpu-reference", 2);
	enum { ROWS = 3, HEADS = 2, DIM = 10, ROTATED = 8 };
	const float freq[] = {1, 0.3f, 0.05f, 0.001f};
	struct scattered s;
	scattered_init(&s);
	scattered_add(&s, NULL, 1000, ROWS);
	b->ops->step_begin(b, &s.batch);
	for (int pairing = ROPE_INTERLEAVED; pairing <= ROPE_HALVES; pairing++) {
		struct rope_params p = {(enum rope_pairing)pairing, ROTATED, freq, 1.25f};
		float *q = random_floats(&seed, ROWS * HEADS * DIM), *k = random_floats(&seed, ROWS * DIM),
		      was[ROWS * HEADS * DIM];
		memcpy(was, q, sizeof was);
		b->ops->rope(b, q, HEADS, k, 1, DIM, &p);
		for (int i = 0; i < ROWS * HEADS; i++) {
			const float *from = was + i * DIM, *to = q + i * DIM;
			for (int pair = 0; pair < ROTATED / 2; pair++) {
				int at0 = pairing == ROPE_INTERLEAVED ? 2 * pair : pair;
				int at1 = pairing == ROPE_INTERLEAVED ? 2 * pair + 1 : pair + ROTATED / 2;
				double angle = (1000 + i / HEADS) * (double)freq[pair];
				assert_float_equal(to[at0], 1.25 * (from[at0] * cos(angle) - from[at1] * sin(angle)),
				                   1e-5);
				assert_float_equal(to[at1], 1.25 * (from[at0] * sin(angle) + from[at1] * cos(angle)),
				                   1e-5);
			}
			assert_float_equal(to[8], from[8], 0);
			assert_float_equal(to[9], from[9], 0);
		}
		free(q);
		free(k);
	}
	b->ops->destroy(b);
}

/*
 * Writes two sequences in two steps, the second crossing a page, and compares each row with softmax over what it may
 * see.
 */
static void attention_sees_its_own_sequence_up_to_its_position(void **state)
{
	(void)state;
	struct backend *b = open_backend("cpu-reference", 2);
	enum { HEADS = 4, KV_HEADS = 2, DIM = 6, LAYERS = 2, FIRST = 13, THEN = 9, PAGES = 8, N = FIRST + THEN };
	struct kv_layout l;
	assert_int_equal(kv_layout_init(&l, LAYERS, KV_HEADS, DIM, QUANT_F16), STATUS_OK);
	void *kv;
	assert_int_equal(b->ops->mem_alloc(b, l.page_stride * PAGES, &kv), STATUS_OK);
	float *k = random_floats(&seed, 2 * N * KV_HEADS * DIM), *v = random_floats(&seed, 2 * N * KV_HEADS * DIM);
	float *q = random_floats(&seed, 2 * N * HEADS * DIM), out[2 * N * HEADS * DIM];
	struct scattered s;
	scattered_init(&s);
	scattered_shuffle(&s, &seed, PAGES);
	for (int step = 0; step < 2; step++) {
		int first = step ? FIRST : 0, n = step ? THEN : FIRST;
		float step_k[2 * N * KV_HEADS * DIM], step_v[2 * N * KV_HEADS * DIM], step_q[2 * N * HEADS * DIM];
		s.batch.n_seqs = s.batch.n_rows = 0;
		scattered_add(&s, s.pages, first, n);
		scattered_add(&s, s.pages + 4, first, n);
		for (int seq = 0; seq < 2; seq++) {
			memcpy(step_k + seq * n * KV_HEADS * DIM, k + (seq * N + first) * KV_HEADS * DIM,
			       sizeof(float) * (size_t)n * KV_HEADS * DIM);
			memcpy(step_v + seq * n * KV_HEADS * DIM, v + (seq * N + first) * KV_HEADS * DIM,
			       sizeof(float) * (size_t)n * KV_HEADS * DIM);
			memcpy(step_q + seq * n * HEADS * DIM, q + (seq * N + first) * HEADS * DIM,
			       sizeof(float) * (size_t)n * HEADS * DIM);
		}
		b->ops->step_begin(b, &s.batch);
		assert_int_equal(b->ops->kv_write(b, kv, &l, 1, step_k, step_v), STATUS_OK);
		assert_int_equal(
			b->ops->attention(b, kv, &l, 1, step_q, HEADS, &(struct attention_params){.scale = 0.4f}, out),
			STATUS_OK);
		b->ops->step_end(b);
		for (int seq = 0; seq < 2; seq++)
			for (int i = 0; i < n; i++)
				for (int h = 0; h < HEADS; h++) {
					double weight[N], total = 0;
					const float *qv = step_q + ((seq * n + i) * HEADS + h) * DIM;
					for (int t = 0; t <= first + i; t++) {
						const float *kt = k + ((seq * N + t) * KV_HEADS + h / 2) * DIM;
						double dot = 0;
						for (int d = 0; d < DIM; d++)
							dot += (double)qv[d] *
							       quant_half_to_float(quant_float_to_half(kt[d]));
						total += weight[t] = exp(0.4 * dot);
					}
					for (int d = 0; d < DIM; d++) {
						double sum = 0;
						for (int t = 0; t <= first + i; t++) {
							float vt = v[((seq * N + t) * KV_HEADS + h / 2) * DIM + d];
							sum += weight[t] * quant_half_to_float(quant_float_to_half(vt));
						}
						assert_float_equal(out[((seq * n + i) * HEADS + h) * DIM + d],
						                   sum / total, 1e-5);
					}
				}
	}
	b->ops->mem_free(b, kv, l.page_stride * PAGES);
	b->ops->destroy(b);
	free(k);
	free(v);
	free(q);
}

static void memory_is_zeroed_and_aligned_whatever_its_size(void **state)
{
	(void)state;
	struct backend *b = open_backend("cpu-reference", 1);
	const size_t sizes[] = {1, 4096, 100000, 3 << 20, 9 << 20};
	for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
		void *p;
		assert_int_equal(b->ops->mem_alloc(b, sizes[i], &p), STATUS_OK);
		assert_int_equal((uintptr_t)p % 4096, 0);
		assert_int_equal(((char *)p)[0] | ((char *)p)[sizes[i] - 1], 0);
		memset(p, 1, sizes[i]);
		b->ops->mem_free(b, p, sizes[i]);
	}
	void *p;
	assert_int_equal(b->ops->mem_alloc(b, SIZE_MAX, &p), STATUS_NOMEM);
	b->ops->destroy(b);
}

static void a_matrix_that_cannot_be_is_refused(void **state)
{
	(void)state;
	struct backend *b = open_backend("cpu-reference", 1);
	struct weight *w;
	struct error err = {0};
	struct weight_desc d = {
		.name = "blk.0.ffn_up.weight", .format = quant_format(QUANT_Q4_K), .n_in = 200, .n_out = 3};
	assert_int_equal(b->ops->weight_create(b, &d, &w, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "blk.0.ffn_up.weight"));
	d.n_in = 256;
	d.n_out = 0;
	assert_int_equal(b->ops->weight_create(b, &d, &w, &err), STATUS_INVALID);
	d.n_out = INT64_MAX / 300;
	assert_int_equal(b->ops->weight_create(b, &d, &w, &err), STATUS_INVALID);
	b->ops->destroy(b);
}

UNIT_MAIN(cmocka_unit_test(a_product_is_the_sum_over_dequantised_weights),
          cmocka_unit_test(embedding_takes_the_rows_of_the_tokens),
          cmocka_unit_test(norm_and_swiglu_follow_their_formulas),
          cmocka_unit_test(rope_turns_pairs_by_position_times_frequency),
          cmocka_unit_test(attention_sees_its_own_sequence_up_to_its_position),
          cmocka_unit_test(memory_is_zeroed_and_aligned_whatever_its_size),
          cmocka_unit_test(a_matrix_that_cannot_be_is_refused))
