/*
 * What pages are worth to the conversation that they belong to, for the context policy that chooses which go: of each
 * layer, the norm of a page's values by the norm of its keys, summed over the layers. Keys of small norm tend to be
 * those that attention leans on (Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache
 * Compression", 2024), and values of small norm add little whatever it does.
 *
 * The sums run in a fixed order over the bytes of the page, so that equal pages have equal scores. A device whose
 * memory is its own adds up there, and only the sums come back.
 */
#pragma once

#include <stdbool.h>

#include "engine/backend.h"
#include "engine/kv/pool.h"

struct kv_scorer {
	struct backend *backend;
	const struct kv_pool *pool;
	bool pairs;    /* see struct kv_order */
	double *sums;  /* where device memory is not the host's: [cap][n_layer][2], of keys and values */
	float *scores; /* [cap] */
	int32_t cap;
};

/* UNSUPPORTED when the backend's pages cannot be read (an order of their own, a narrow form). */
enum status kv_scorer_init(struct kv_scorer *s, struct backend *b, const struct kv_pool *pool);
void kv_scorer_free(struct kv_scorer *s);
/*
 * The scores of n >= 1 full pages, which stay until the next call: -1 when a key or value in a page is no number, or it
 * cannot be read. NULL: no memory.
 */
const float *kv_score_pages(struct kv_scorer *s, const int32_t *pages, int32_t n);
