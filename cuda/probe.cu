/*
 * Rows that score pages which they do not see (struct page_probe of backend.h). The bounds of these are in host memory;
 * layer by layer, and so many pages at a time, they come to the device where the rows are, and what their bounds
 * promise becomes shares that are added up there until the step ends. The host decides what is copied, so a step with a
 * probe is no graph.
 */
#include "cuda/operations.cuh"
#include "cuda/promise.cuh"

namespace GPU_NS
{

/*
 * Pages whose bounds are on the device at a time, and scores that rows leave there; on the execution model few, so that
 * tests take turns.
 */
#ifdef KVASIR_HOST_CUDA
enum { PROBE_PAGES = 5, PROBE_SCORES = 64 };
#else
enum { PROBE_PAGES = 4096, PROBE_SCORES = 8 << 20 };
#endif

/* Some rows of a sequence in one layer. */
struct probe_args {
	const uint16_t *bounds; /* of n pages from `first` on: [n][n_head_kv][least, greatest][head_dim] */
	bool bf16;
	int first, n;
	int n_pages; /* of the probe */
	int n_head, n_head_kv, head_dim;
	const float *q; /* [rows][n_head][head_dim] */
	float scale;
	float *scores;		    /* [rows][n_head_kv][n_pages] */
	unsigned long long *shares; /* [n_pages] in units of 2^-KV_MASS_BITS */
};

/* blockIdx.x: the row, and KV head; blockIdx.y: a run of the pages at hand. */
__global__ void __launch_bounds__(SCORE_THREADS) score_elsewhere(struct probe_args a)
{
	const int row = blockIdx.x / a.n_head_kv, head_kv = blockIdx.x % a.n_head_kv, group = a.n_head / a.n_head_kv;
	const size_t of_head = 2 * static_cast<size_t>(a.head_dim);
	score_run({a.bounds + head_kv * of_head, a.n_head_kv * of_head, a.bf16},
		  {a.q + (static_cast<size_t>(row) * a.n_head + head_kv * group) * a.head_dim, group, a.head_dim}, 0,
		  a.n, a.scores + static_cast<size_t>(blockIdx.x) * a.n_pages + a.first, [](int i) { return i; });
}

enum { WEIGH_THREADS = 256 };

/*
 * A block has a row and KV head: the squares of the softmax over its scores. Sums are over threads in one order, so
 * that a row's shares depend on nothing beside it.
 */
__global__ void __launch_bounds__(WEIGH_THREADS) weigh_elsewhere(struct probe_args a)
{
	GPU_SHARED(float, scratch, WEIGH_THREADS / 32);
	const float *score = a.scores + static_cast<size_t>(blockIdx.x) * a.n_pages;
	/* What is no number, or beyond all, says nothing. */
	const auto exponent = [&](int i) {
		const float x = __fmul_rn(ld_global<float>(score + i), a.scale * 1.44269504f);
		return fabsf(x) <= 3.402823466e38f ? x : -INFINITY;
	};
	float top = -INFINITY, total = 0;
	for (int i = threadIdx.x; i < a.n_pages; i += WEIGH_THREADS)
		top = fmaxf(top, exponent(i));
	top = block_max<WEIGH_THREADS>(top, scratch);
	if (top == -INFINITY)
		return;
	for (int i = threadIdx.x; i < a.n_pages; i += WEIGH_THREADS)
		total += exp2f(exponent(i) - top);
	total = block_sum<WEIGH_THREADS>(total, scratch);
	for (int i = threadIdx.x; i < a.n_pages; i += WEIGH_THREADS) {
		const float share = __fdiv_rn(exp2f(exponent(i) - top), total);
		const int units = __float2int_rn(share * share * (1 << KV_MASS_BITS));
		if (units > 0)
			atomicAdd(a.shares + i, static_cast<unsigned long long>(units));
	}
}

/* The bounds of a layer in n pages from a.first on go to the device. */
static enum status bring_bounds(struct cuda_backend *b, const struct page_probe *probe, const struct kv_layout *l,
				int32_t layer, const struct probe_args &a)
{
	const size_t of_layer = static_cast<size_t>(l->n_head_kv) * 2 * static_cast<size_t>(l->head_dim),
		     of_page = of_layer * static_cast<size_t>(l->n_layer), element = sizeof *probe->bounds;
	return latch(b, check(b,
			      cudaMemcpy2DAsync(b->probe_bounds.p, of_layer * element,
						probe->bounds + static_cast<size_t>(a.first) * of_page +
							static_cast<size_t>(layer) * of_layer,
						of_page * element, of_layer * element, static_cast<size_t>(a.n),
						cudaMemcpyHostToDevice, b->stream),
			      "bringing bounds of pages"));
}

static enum status probe_rows(struct cuda_backend *b, const struct batch_seq *seq, const struct kv_layout *l,
			      int32_t layer, struct probe_args a)
{
	const struct page_probe *probe = seq->probe;
	const size_t lists = static_cast<size_t>(l->n_head_kv) * static_cast<size_t>(probe->n_pages);
	const int at_once = PROBE_SCORES / lists > 1 ? static_cast<int>(PROBE_SCORES / lists) : 1;
	const float *q = a.q;
	TRY(latch(b, grow(b, &b->scores, static_cast<size_t>(min_int(at_once, seq->n_rows)) * lists * sizeof(float))));
	TRY(latch(b, grow(b, &b->probe_bounds,
			  static_cast<size_t>(min_int(PROBE_PAGES, probe->n_pages)) * 2 *
				  static_cast<size_t>(l->n_head_kv * l->head_dim) * sizeof(uint16_t))));
	a.bounds = static_cast<const uint16_t *>(b->probe_bounds.p);
	a.scores = static_cast<float *>(b->scores.p);
	a.n_pages = probe->n_pages;
	for (int row = 0; row < seq->n_rows; row += at_once) {
		const unsigned heads =
			static_cast<unsigned>(min_int(at_once, seq->n_rows - row)) * static_cast<unsigned>(a.n_head_kv);
		a.q = q + static_cast<size_t>(seq->first_row + row) * static_cast<size_t>(a.n_head * a.head_dim);
		for (a.first = 0; a.first < a.n_pages; a.first += PROBE_PAGES) {
			a.n = min_int(PROBE_PAGES, a.n_pages - a.first);
			if (row == 0 || a.n < a.n_pages)
				TRY(bring_bounds(b, probe, l, layer, a));
			GPU_LAUNCH(score_elsewhere, dim3(heads, score_runs(a.n)), dim3(SCORE_THREADS), 0, b->stream, a);
			TRY(latch(b, check(b, cudaGetLastError(), "scoring pages elsewhere")));
		}
		GPU_LAUNCH(weigh_elsewhere, dim3(heads), dim3(WEIGH_THREADS), 0, b->stream, a);
		TRY(latch(b, check(b, cudaGetLastError(), "scoring pages elsewhere")));
	}
	return STATUS_OK;
}

enum status probe_pages(struct cuda_backend *b, const struct kv_layout *l, int32_t layer, const float *q,
			int32_t n_head, float scale)
{
	struct probe_args a = {};
	if (b->probed_bytes == 0)
		return STATUS_OK;
	a.bf16 = l->type == QUANT_BF16;
	a.n_head = n_head;
	a.n_head_kv = l->n_head_kv;
	a.head_dim = l->head_dim;
	a.q = q;
	a.scale = scale;
	a.shares = static_cast<unsigned long long *>(b->probed.p);
	for (int32_t i = 0; i < b->batch->n_seqs; i++) {
		const struct batch_seq *seq = &b->batch->seq[i];
		if (!seq->probe)
			continue;
		TRY(probe_rows(b, seq, l, layer, a));
		a.shares += seq->probe->n_pages;
	}
	return STATUS_OK;
}

} // namespace GPU_NS
