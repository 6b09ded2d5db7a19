#include "engine/calibrate.h"

#include "engine/kv/seq.h"

void calibrate_prefill(struct engine *e, struct sched *sched)
{
	enum { ROWS = 128 };
	struct kv_seq kv = KV_SEQ_INIT;
	int32_t token[ROWS], position[ROWS], n = e->options.step_tokens < ROWS ? e->options.step_tokens : ROWS;
	float *logits;
	if (kv_seq_prepare(e->pool, &kv, n) == STATUS_OK) {
		struct batch_seq seq = {0, n, 0, kv.pages, kv.n_pages};
		struct batch batch = {.n_rows = n, .token = token, .position = position, .n_seqs = 1, .seq = &seq};
		for (int32_t i = 0; i < n; i++) {
			token[i] = i % tokenizer_n_vocab(e->tokenizer);
			position[i] = i;
		}
		/* The first time the weights come from the file. */
		for (int i = 0; i < 2; i++) {
			int64_t start_ns = clock_now_ns(clock_system());
			if (model_forward(e->model, &batch, kv_pool_slab(e->pool), &logits) == STATUS_OK && i > 0)
				sched_measure(sched, n, true, clock_now_ns(clock_system()) - start_ns);
		}
	}
	kv_seq_release(e->pool, &kv);
}
