#include "engine/calibrate.h"

#include "engine/kv/seq.h"

enum { ROWS = 128, ENOUGH_NS = 100000000 };

/* A step of n rows of one prompt; how long it took, or 0 when it failed. */
static int64_t time_step(struct engine *e, const struct kv_seq *kv, int32_t n)
{
	int32_t token[ROWS], position[ROWS];
	struct batch_seq seq = {0, n, 0, kv->pages, kv->n_pages};
	struct batch batch = {.n_rows = n, .token = token, .position = position, .n_seqs = 1, .seq = &seq};
	float *logits;
	for (int32_t i = 0; i < n; i++) {
		token[i] = i % tokenizer_n_vocab(e->tokenizer);
		position[i] = i;
	}
	int64_t start_ns = clock_now_ns(clock_system());
	if (model_forward(e->model, &batch, kv_pool_slab(e->pool), &logits) != STATUS_OK)
		return 0;
	return clock_now_ns(clock_system()) - start_ns;
}

void calibrate_prefill(struct engine *e, struct sched *sched)
{
	struct kv_seq kv = KV_SEQ_INIT;
	int32_t most = e->options.step_tokens < ROWS ? e->options.step_tokens : ROWS;
	if (kv_seq_prepare(e->pool, &kv, most) == STATUS_OK) {
		/*
		 * The first time the weights come from the file. A device that takes long for a page is not asked for
		 * more.
		 */
		int32_t n = most < KV_PAGE_TOKENS ? most : KV_PAGE_TOKENS;
		int64_t took_ns = time_step(e, &kv, n) ? time_step(e, &kv, n) : 0;
		if (took_ns > 0 && took_ns < ENOUGH_NS) {
			n = most;
			took_ns = time_step(e, &kv, n);
		}
		if (took_ns > 0)
			sched_measure(sched, n, true, took_ns);
	}
	kv_seq_release(e->pool, &kv);
}
