/* Operations on rows: norm, gate, RoPE, gathering. */
#include "tests/gpu/compare.h"

static int32_t any_dim(struct pair *p, int round)
{
	static const int32_t dims[] = {64, 128, 576, 1024, 4096, 1, 2, 33, 257, 1000};
	return round < 10 ? dims[round] : random_int(p, 1, p->large ? 16384 : 1500);
}

static void norms(struct pair *p)
{
	row_begin("rms_norm");
	for (int round = 0; round < 16; round++) {
		int32_t n = random_int(p, 1, p->large ? 700 : 20), dim = any_dim(p, round);
		struct operand x = operand_new(p, (size_t)n * (size_t)dim, round % 3 == 2 ? 30 : 1),
			       gain = operand_new(p, (size_t)dim, 1);
		struct operand out = operand_new(p, x.n, 1);
		must(p->device->ops->rms_norm(p->device, x.device, n, dim, gain.device, 1e-5f, out.device), "rms_norm");
		must(p->reference->ops->rms_norm(p->reference, x.reference, n, dim, gain.reference, 1e-5f,
		                                 out.reference),
		     "rms_norm");
		row_results(&out, 5e-6, "to another place");
		must(p->device->ops->rms_norm_add(p->device, x.device, n, dim, gain.device, 1e-5f, out.device),
		     "rms_norm_add");
		must(p->reference->ops->rms_norm_add(p->reference, x.reference, n, dim, gain.reference, 1e-5f,
		                                     out.reference),
		     "rms_norm_add");
		row_results(&out, 5e-6, "added");
		must(p->device->ops->rms_norm(p->device, x.device, n, dim, gain.device, 1e-5f, x.device), "rms_norm");
		must(p->reference->ops->rms_norm(p->reference, x.reference, n, dim, gain.reference, 1e-5f, x.reference),
		     "rms_norm");
		row_results(&x, 5e-6, "in place");
		operand_free(&x);
		operand_free(&gain);
		operand_free(&out);
	}
	row_end();
}

static void gates(struct pair *p)
{
	row_begin("glu");
	for (int round = 0; round < 24; round++) {
		enum glu f = round % 3 ? GLU_GELU : GLU_SILU;
		int32_t n = random_int(p, 1, p->large ? 500 : 20), dim = any_dim(p, round);
		/* Every other time far into both tails of the exponential. */
		struct operand gate = operand_new(p, (size_t)n * (size_t)dim, round % 2 ? 40 : 1),
			       up = operand_new(p, gate.n, 1);
		must(p->device->ops->glu(p->device, f, gate.device, up.device, n, dim), "glu");
		must(p->reference->ops->glu(p->reference, f, gate.reference, up.reference, n, dim), "glu");
		row_results(&gate, 5e-6, "gate");
		operand_free(&gate);
		operand_free(&up);
	}
	row_end();
}

static void caps(struct pair *p)
{
	row_begin("softcap");
	for (int round = 0; round < 12; round++) {
		int32_t n = random_int(p, 1, p->large ? 1000000 : 5000);
		struct operand x = operand_new(p, (size_t)n, round % 2 ? 100 : 3);
		must(p->device->ops->softcap(p->device, x.device, n, 30), "softcap");
		must(p->reference->ops->softcap(p->reference, x.reference, n, 30), "softcap");
		row_results(&x, 5e-6, "x");
		operand_free(&x);
	}
	row_end();
}

static void gathered(struct pair *p)
{
	row_begin("gather_rows");
	for (int round = 0; round < 10; round++) {
		int32_t rows[600], n_rows = random_int(p, 1, 50), n = round == 0 ? 600 : random_int(p, 1, 32),
				   dim = any_dim(p, round);
		struct operand x = operand_new(p, (size_t)n_rows * (size_t)dim, 1),
			       out = operand_new(p, (size_t)n * (size_t)dim, 1);
		for (int32_t i = 0; i < n; i++)
			rows[i] = random_int(p, 0, n_rows - 1);
		must(p->device->ops->step_begin(p->device, plain_batch(n_rows)), "step_begin");
		must(p->device->ops->gather_rows(p->device, x.device, dim, rows, n, out.device), "gather_rows");
		must(p->device->ops->step_end(p->device), "step_end");
		must(p->reference->ops->gather_rows(p->reference, x.reference, dim, rows, n, out.reference),
		     "gather_rows");
		row_results(&out, 0, "rows");
		operand_free(&x);
		operand_free(&out);
	}
	row_end();
}

/* Alone; compare_attention() has it before kv_write(), where a device may do both at once. */
static void turned(struct pair *p)
{
	row_begin("rope");
	for (int round = 0; round < 12; round++) {
		enum { MAX_ROWS = 60 };
		int32_t n_head_kv = random_int(p, 1, 3), group = random_int(p, 1, 4),
			dim = round < 4 ? 64 << (round % 2) : 2 * random_int(p, 1, 64);
		int32_t rows = random_int(p, 1, MAX_ROWS), rotated = round < 4 ? dim : 2 * random_int(p, 1, dim / 2),
			first = random_int(p, 0, 30000);
		int32_t token[MAX_ROWS] = {0}, position[MAX_ROWS], table[(30000 + MAX_ROWS) / KV_PAGE_TOKENS + 1] = {0};
		float freq[64];
		for (int32_t i = 0; i < rotated / 2; i++)
			freq[i] = (float)pow(10000, -2.0 * i / rotated);
		for (int32_t i = 0; i < rows; i++)
			position[i] = first + i;
		struct rope_params rope = {round % 2 ? ROPE_HALVES : ROPE_INTERLEAVED, rotated, freq, 1.1f};
		struct batch_seq seq = {0, rows, first, table, (first + rows + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS};
		struct batch batch = {rows, token, position, 1, &seq, 0, NULL};
		struct operand q = operand_new(p, (size_t)(rows * n_head_kv * group * dim), 1);
		struct operand k = operand_new(p, (size_t)(rows * n_head_kv * dim), 1);
		must(p->device->ops->step_begin(p->device, &batch), "step_begin");
		must(p->device->ops->rope(p->device, q.device, n_head_kv * group, k.device, n_head_kv, dim, &rope),
		     "rope");
		must(p->device->ops->step_end(p->device), "step_end");
		must(p->reference->ops->step_begin(p->reference, &batch), "step_begin");
		must(p->reference->ops->rope(p->reference, q.reference, n_head_kv * group, k.reference, n_head_kv, dim,
		                             &rope),
		     "rope");
		must(p->reference->ops->step_end(p->reference), "step_end");
		row_results(&q, 2e-5, "q");
		row_results(&k, 2e-5, "k");
		operand_free(&q);
		operand_free(&k);
	}
	row_end();
}

void compare_rows(struct pair *p)
{
	norms(p);
	gates(p);
	caps(p);
	gathered(p);
	turned(p);
}
