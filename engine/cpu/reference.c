/*
 * The reference backend: plain C, written to be read. Activations stay float, weights are dequantised row by row, sums
 * run in double. The fast backends are compared with it, and a machine without their instruction sets runs on it.
 */
#include <math.h>
#include <stdlib.h>

#include "engine/cpu/reference.h"

enum {
	OUT_TILE = 8,  /* weight rows dequantised together, so that each activation row is read once for all of them */
	DOT_LANES = 16 /* partial sums of a dot product; a compiler turns them into vectors */
};

struct weight {
	struct weight_desc desc;
};

static int64_t min_i64(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

enum status reference_scratch(struct reference *r, size_t floats)
{
	size_t n_threads = (size_t)threads_count(r->base.threads);
	if (floats <= r->scratch_floats)
		return STATUS_OK;
	if (floats > SIZE_MAX / sizeof(float) / n_threads)
		return STATUS_NOMEM;
	float *p = malloc(n_threads * floats * sizeof *p);
	if (!p)
		return STATUS_NOMEM;
	free(r->scratch);
	r->scratch = p;
	r->scratch_floats = floats;
	return STATUS_OK;
}

double reference_dot(const float *a, const float *b, int64_t n)
{
	float part[DOT_LANES] = {0};
	int64_t i = 0;
	for (; i + DOT_LANES <= n; i += DOT_LANES)
		for (int j = 0; j < DOT_LANES; j++)
			part[j] += a[i + j] * b[i + j];
	double sum = 0;
	for (; i < n; i++)
		sum += (double)a[i] * b[i];
	for (int j = 0; j < DOT_LANES; j++)
		sum += part[j];
	return sum;
}

/* ---- Weights ---- */

static enum status weight_create(struct backend *b, const struct weight_desc *desc, struct weight **out,
                                 struct error *err)
{
	struct reference *r = reference_of(b);
	enum status s = cpu_check_weight(desc, err);
	if (s != STATUS_OK)
		return s;
	struct weight *w = malloc(sizeof *w);
	if (!w || reference_scratch(r, (size_t)desc->n_in * OUT_TILE) != STATUS_OK) {
		free(w);
		return error_set(err, STATUS_NOMEM, "no memory for matrix \"%s\"", desc->name);
	}
	w->desc = *desc;
	*out = w;
	return STATUS_OK;
}

static void weight_destroy(struct backend *b, struct weight *w)
{
	(void)b;
	free(w);
}

static size_t weight_bytes(const struct backend *b, const struct weight *w)
{
	(void)b;
	(void)w;
	return 0;
}

static void dequantize_row(const struct weight *w, int64_t row, float *out)
{
	w->desc.format->dequantize((const char *)w->desc.data + (size_t)row * cpu_row_bytes(&w->desc), out,
	                           (size_t)w->desc.n_in);
}

struct embed_job {
	const struct weight *w;
	const int32_t *token;
	float scale;
	float *out;
};

static void embed_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct embed_job *j = arg;
	(void)thread;
	for (int64_t i = begin; i < end; i++) {
		float *out = j->out + i * j->w->desc.n_in;
		dequantize_row(j->w, j->token[i], out);
		for (int64_t d = 0; d < j->w->desc.n_in; d++)
			out[d] *= j->scale;
	}
}

static enum status embed(struct backend *b, const struct weight *w, float scale, float *out)
{
	struct reference *r = reference_of(b);
	const struct batch *batch = r->base.batch;
	for (int32_t i = 0; i < batch->n_rows; i++)
		if (batch->token[i] < 0 || batch->token[i] >= w->desc.n_out)
			return STATUS_INVALID;
	struct embed_job j = {w, batch->token, scale, out};
	threads_for(r->base.threads, batch->n_rows, 1, embed_rows, &j);
	return STATUS_OK;
}

struct matmul_job {
	struct reference *r;
	const float *x;
	int64_t n_rows;
	const struct matmul *mm;
};

static void matmul_outputs(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct matmul_job *j = arg;
	const struct matmul *mm = j->mm;
	int64_t n_in = mm->weight->desc.n_in, n_out = mm->weight->desc.n_out;
	float *rows = j->r->scratch + (size_t)thread * j->r->scratch_floats;
	for (int64_t o = begin; o < end; o += OUT_TILE) {
		int64_t n = min_i64(OUT_TILE, end - o);
		for (int64_t k = 0; k < n; k++)
			dequantize_row(mm->weight, o + k, rows + k * n_in);
		for (int64_t i = 0; i < j->n_rows; i++)
			for (int64_t k = 0; k < n; k++) {
				float *y = mm->y + i * n_out + o + k;
				double sum = reference_dot(j->x + i * n_in, rows + k * n_in, n_in);
				sum += mm->bias ? mm->bias[o + k] : 0;
				*y = (float)(mm->accumulate ? sum + *y : sum);
			}
	}
}

static enum status matmul(struct backend *b, const float *x, int64_t n_rows, const struct matmul *mm, int32_t n_mm)
{
	struct reference *r = reference_of(b);
	for (int32_t i = 0; i < n_mm; i++) {
		struct matmul_job j = {r, x, n_rows, &mm[i]};
		threads_for(r->base.threads, mm[i].weight->desc.n_out, OUT_TILE, matmul_outputs, &j);
	}
	return STATUS_OK;
}

/* ---- Rows ---- */

struct norm_job {
	const float *x;
	int32_t dim;
	const float *gain;
	float eps;
	bool add; /* to what is there */
	float *out;
};

static void norm_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct norm_job *j = arg;
	(void)thread;
	for (int64_t i = begin; i < end; i++) {
		const float *x = j->x + i * j->dim;
		float *out = j->out + i * j->dim;
		double sum = 0;
		for (int32_t d = 0; d < j->dim; d++)
			sum += (double)x[d] * x[d];
		double scale = 1 / sqrt(sum / j->dim + j->eps);
		for (int32_t d = 0; d < j->dim; d++)
			out[d] = (float)((j->add ? out[d] : 0) + x[d] * scale * j->gain[d]);
	}
}

static enum status rms_norm(struct backend *b, const float *x, int64_t n, int32_t dim, const float *gain, float eps,
                            float *out)
{
	struct norm_job j = {x, dim, gain, eps, false, out};
	threads_for(reference_of(b)->base.threads, n, 16, norm_rows, &j);
	return STATUS_OK;
}

static enum status rms_norm_add(struct backend *b, const float *x, int64_t n, int32_t dim, const float *gain, float eps,
                                float *out)
{
	struct norm_job j = {x, dim, gain, eps, true, out};
	threads_for(reference_of(b)->base.threads, n, 16, norm_rows, &j);
	return STATUS_OK;
}

struct rope_job {
	const int32_t *position;
	float *x;
	int32_t n_head, head_dim;
	const struct rope_params *p;
};

static void rope_rows(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct rope_job *j = arg;
	int32_t half = j->p->n_dims / 2;
	int32_t step = j->p->pairing == ROPE_INTERLEAVED ? 2 : 1;
	int32_t apart = j->p->pairing == ROPE_INTERLEAVED ? 1 : half;
	(void)thread;
	for (int64_t row = begin; row < end; row++)
		for (int32_t i = 0; i < half; i++) {
			int32_t position = j->p->chunks.size ? j->position[row] % j->p->chunks.size : j->position[row];
			double angle = (double)position * j->p->inv_freq[i];
			double c = cos(angle) * j->p->magnitude, s = sin(angle) * j->p->magnitude;
			for (int32_t h = 0; h < j->n_head; h++) {
				float *x = j->x + (row * j->n_head + h) * j->head_dim + i * step;
				double x0 = x[0], x1 = x[apart];
				x[0] = (float)(x0 * c - x1 * s);
				x[apart] = (float)(x0 * s + x1 * c);
			}
		}
}

static enum status rope(struct backend *b, float *q, int32_t n_head, float *k, int32_t n_head_kv, int32_t head_dim,
                        const struct rope_params *params)
{
	struct reference *r = reference_of(b);
	const struct batch *batch = r->base.batch;
	struct rope_job j = {batch->position, q, n_head, head_dim, params};
	threads_for(r->base.threads, batch->n_rows, 1, rope_rows, &j);
	j = (struct rope_job){batch->position, k, n_head_kv, head_dim, params};
	threads_for(r->base.threads, batch->n_rows, 1, rope_rows, &j);
	return STATUS_OK;
}

struct glu_job {
	enum glu f;
	float *gate;
	const float *up;
};

static double gated(enum glu f, double x)
{
	if (f == GLU_GELU)
		return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
	return x / (1 + exp(-x));
}

static void glu_range(void *arg, int64_t begin, int64_t end, int thread)
{
	const struct glu_job *j = arg;
	(void)thread;
	for (int64_t i = begin; i < end; i++)
		j->gate[i] = (float)(gated(j->f, j->gate[i]) * j->up[i]);
}

static enum status glu(struct backend *b, enum glu f, float *gate, const float *up, int64_t n, int32_t dim)
{
	struct glu_job j = {f, gate, up};
	threads_for(reference_of(b)->base.threads, n * dim, 1024, glu_range, &j);
	return STATUS_OK;
}

static enum status softcap(struct backend *b, float *x, int64_t n, float cap)
{
	(void)b;
	for (int64_t i = 0; i < n; i++)
		x[i] = (float)(cap * tanh((double)x[i] / cap));
	return STATUS_OK;
}
/* ---- The backend ---- */

static enum status reserve(struct backend *b, int32_t max_rows, int32_t max_width, const struct kv_layout *layout)
{
	(void)max_rows; /* scratch depends on the widest matrix and the longest sequence only */
	(void)layout;
	return reference_scratch(reference_of(b), (size_t)(max_width > 0 ? max_width : 0) * OUT_TILE);
}

static enum status choose_kv(struct backend *b, enum quant_type type)
{
	if (type != QUANT_F16 && type != QUANT_BF16)
		return STATUS_UNSUPPORTED;
	reference_of(b)->kv_type = type;
	return STATUS_OK;
}

static void info(const struct backend *b, struct backend_info *out)
{
	*out = (struct backend_info){
		.name = "cpu-reference",
		.detail = "plain C, float activations",
		.n_threads = threads_count(reference_of(b)->base.threads),
		.host_memory = true,
		.kv_order = {.known = true},
		.kv_type = reference_of(b)->kv_type,
		.narrow_kv = true,
		.chooses_pages = true,
		.weighs_pages = true,
		.turns_chunks = true,
		.adds_to_logits = true,
		.probes_pages = true,
	};
}

static void destroy(struct backend *b)
{
	struct reference *r = reference_of(b);
	cpu_base_fini(&r->base);
	free(r->half);
	free(r->scratch);
	free(r->state);
	free(r->turned);
	free(r);
}

static const struct backend_ops reference_ops = {
        .destroy = destroy,
        .info = info,
        .choose_kv = choose_kv,
        .mem_alloc = cpu_mem_alloc,
        .mem_free = cpu_mem_free,
        .mem_write = cpu_mem_write,
        .mem_read = cpu_mem_read,
        .weight_create = weight_create,
        .weight_destroy = weight_destroy,
        .weight_bytes = weight_bytes,
        .reserve = reserve,
        .step_begin = cpu_step_begin,
        .step_end = cpu_step_end,
        .embed = embed,
        .rms_norm = rms_norm,
        .rms_norm_add = rms_norm_add,
        .matmul = matmul,
        .rope = rope,
        .kv_write = reference_kv_write,
        .attention = reference_attention,
        .attention_part = reference_attention_part,
        .glu = glu,
        .softcap = softcap,
        .gather_rows = cpu_gather_rows,
        .page_copy = cpu_page_copy,
        .page_bounds = reference_page_bounds,
        .sync = cpu_sync,
        .scan = cpu_scan,
};

enum status cpu_reference_create(int32_t n_threads, struct backend **out, struct error *err)
{
	struct reference *r = calloc(1, sizeof *r);
	if (!r)
		goto fail;
	r->kv_type = QUANT_F16;
	r->half = malloc(65536 * sizeof *r->half);
	if (!r->half)
		goto fail_half;
	for (uint32_t i = 0; i < 65536; i++)
		r->half[i] = quant_half_to_float((uint16_t)i);
	if (cpu_base_init(&r->base, &reference_ops, n_threads) != STATUS_OK)
		goto fail_base;
	*out = &r->base.backend;
	return STATUS_OK;

fail_base:
	free(r->half);
fail_half:
	free(r);
fail:
	return error_set(err, STATUS_NOMEM, "no memory for the reference backend");
}
