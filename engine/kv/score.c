#include "engine/kv/score.h"

#include <math.h>
#include <stdlib.h>

enum status kv_scorer_init(struct kv_scorer *s, struct backend *b, const struct kv_pool *pool)
{
	struct backend_info info;
	const struct kv_layout *l = kv_pool_layout(pool);
	b->ops->info(b, &info);
	*s = (struct kv_scorer){.backend = b, .pool = pool, .pairs = info.kv_order.pairs};
	if (!info.kv_order.known || l->form != KV_FORM_F16)
		return STATUS_UNSUPPORTED;
	if (!info.host_memory && !(s->staged = malloc(l->page_bytes)))
		return STATUS_NOMEM;
	return STATUS_OK;
}

void kv_scorer_free(struct kv_scorer *s)
{
	free(s->staged);
	*s = (struct kv_scorer){0};
}

/* Order within a block does not matter to its norm. */
static double square_sum(const uint16_t *block, enum quant_type type, int64_t n)
{
	double sum = 0;
	for (int64_t i = 0; i < n; i++) {
		double x = type == QUANT_BF16 ? quant_bf16_to_float(block[i]) : quant_half_to_float(block[i]);
		sum += x * x;
	}
	return sum;
}

float kv_score_page(struct kv_scorer *s, int32_t page)
{
	const struct kv_layout *l = kv_pool_layout(s->pool);
	const char *at = (const char *)kv_pool_slab(s->pool) + (size_t)page * l->page_stride;
	int64_t block = (int64_t)l->head_dim * KV_PAGE_TOKENS;
	double score = 0;
	if (s->staged) {
		if (s->backend->ops->mem_read(s->backend, s->staged, at, l->page_bytes) != STATUS_OK)
			return -1;
		at = s->staged;
	}
	const uint16_t *p = (const uint16_t *)(const void *)at;
	for (int32_t layer = 0; layer < l->n_layer; layer++) {
		double sums[2] = {0, 0}; /* of K, V */
		for (int32_t i = 0; i < 2 * l->n_head_kv; i++, p += block)
			sums[s->pairs ? i % 2 : i / l->n_head_kv] += square_sum(p, l->type, block);
		score += sums[0] > 0 ? sqrt(sums[1] / sums[0]) : 0;
	}
	return isfinite(score) ? (float)score : -1;
}
