#include "engine/kv/score.h"

#include <math.h>
#include <stdlib.h>

enum status kv_scorer_init(struct kv_scorer *s, struct backend *b, const struct kv_pool *pool)
{
	struct backend_info info;
	b->ops->info(b, &info);
	*s = (struct kv_scorer){.backend = b, .pool = pool, .pairs = info.kv_order.pairs};
	if (kv_pool_layout(pool)->form != KV_FORM_F16 ||
	    !(b->ops->page_norms || (info.kv_order.known && info.host_memory)))
		return STATUS_UNSUPPORTED;
	return STATUS_OK;
}

void kv_scorer_free(struct kv_scorer *s)
{
	free(s->sums);
	free(s->scores);
	*s = (struct kv_scorer){0};
}

static bool make_room(struct kv_scorer *s, int32_t n)
{
	size_t n_layer = (size_t)kv_pool_layout(s->pool)->n_layer;
	if (n <= s->cap)
		return true;
	float *scores = realloc(s->scores, (size_t)n * sizeof *scores);
	if (!scores)
		return false;
	s->scores = scores;
	double *sums = realloc(s->sums, (size_t)n * n_layer * 2 * sizeof *sums);
	if (!sums)
		return false;
	s->sums = sums;
	s->cap = n;
	return true;
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

/* Of host memory, as page_norms() of a device has it. */
static void add_up(const struct kv_scorer *s, int32_t page, double *sums)
{
	const struct kv_layout *l = kv_pool_layout(s->pool);
	const char *at = (const char *)kv_pool_slab(s->pool) + (size_t)page * l->page_stride;
	int64_t block = (int64_t)l->head_dim * KV_PAGE_TOKENS;
	const uint16_t *p = (const uint16_t *)(const void *)at;
	for (int32_t layer = 0; layer < l->n_layer; layer++, sums += 2) {
		sums[0] = sums[1] = 0;
		for (int32_t i = 0; i < 2 * l->n_head_kv; i++, p += block)
			sums[s->pairs ? i % 2 : i / l->n_head_kv] += square_sum(p, l->type, block);
	}
}

static float score_of(const double *sums, int32_t n_layer)
{
	double score = 0;
	for (int32_t layer = 0; layer < n_layer; layer++, sums += 2)
		score += isnan(sums[0] + sums[1]) ? NAN : sums[0] > 0 ? sqrt(sums[1] / sums[0]) : 0;
	return isfinite(score) ? (float)score : -1;
}

const float *kv_score_pages(struct kv_scorer *s, const int32_t *pages, int32_t n)
{
	const struct kv_layout *l = kv_pool_layout(s->pool);
	const struct backend_ops *ops = s->backend->ops;
	if (!make_room(s, n))
		return NULL;
	bool known = !ops->page_norms ||
		     ops->page_norms(s->backend, kv_pool_slab(s->pool), l, pages, n, s->sums) == STATUS_OK;
	for (int32_t i = 0; i < n; i++) {
		double *sums = s->sums + (size_t)i * (size_t)l->n_layer * 2;
		if (!ops->page_norms)
			add_up(s, pages[i], sums);
		s->scores[i] = known ? score_of(sums, l->n_layer) : -1;
	}
	return s->scores;
}
