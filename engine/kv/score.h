/*
 * What pages are worth to the conversation that they belong to, for the context policy that chooses which go: of each layer, the norm of a page's
 * values by the norm of its keys, summed over the layers. Keys of small norm tend to be those that attention leans on (Devoto et al., "A Simple
 * and Effective L2 Norm-Based Strategy for KV Cache Compression", 2024), and values of small norm add little whatever it does.
 *
 * The sums run in a fixed order over the bytes of the page, so that equal pages have equal scores.
 */
#pragma once

#include <stdbool.h>

#include "engine/backend.h"
#include "engine/kv/pool.h"

struct kv_scorer {
	struct backend *backend;
	const struct kv_pool *pool;
	bool pairs;   /* see struct kv_order */
	void *staged; /* where device memory is not the host's: a page */
};

/* UNSUPPORTED when the backend's pages cannot be read (an order of their own, a narrow form). NOMEM. */
enum status kv_scorer_init(struct kv_scorer *s, struct backend *b, const struct kv_pool *pool);
void kv_scorer_free(struct kv_scorer *s);
/* A full page's score; -1 when a key or value in it is no number, or it cannot be read. */
float kv_score_page(struct kv_scorer *s, int32_t page);
