/*
 * Context policies: which of its pages a sequence that grows long keeps in its block table. Pure functions of positions; who drops the pages
 * is the scheduler (kv_seq_drop).
 *
 * A policy acts at fixed positions only, in front of the row that stands there, and what it does there depends on nothing but the
 * sequence's own positions. So a row sees the same pages however the prompt was cut into chunks, whatever else ran, and whether
 * earlier turns were computed again or found: the same request has the same answer. Rows in front of the first of these positions see
 * all there is: their KV is exact, and only theirs may enter the prefix index.
 *
 * STREAMING keeps the first pages, on which attention leans whatever they say, and a window of the last ones (Xiao et al., "Efficient
 * Streaming Language Models with Attention Sinks", 2023), all at their exact positions. The window moves in jumps of an eighth of its
 * length, so that a prompt can still be computed in chunks.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/kv/seq.h"

enum kv_policy_kind { KV_POLICY_FULL, KV_POLICY_STREAMING, KV_POLICIES };

/* Zeroed: all pages stay. Other policies are made by kv_policy_streaming(). */
struct kv_policy {
	enum kv_policy_kind kind;
	int32_t first_pages; /* that stay */
	int32_t most_pages;  /* in the block table, once it has acted */
	int32_t acts_pages;  /* it acts first when the sequence would have more pages than this */
	int32_t jump_pages;  /* and again each time it has grown by so many */
};

/* "full", "streaming"; NULL past the end. */
const char *kv_policy_name(enum kv_policy_kind kind);
/* False when there is none of that name. */
bool kv_policy_find(const char *name, enum kv_policy_kind *out);

/* Shortest window that can move and still show a row more than its own page. */
enum { KV_POLICY_MIN_WINDOW = 2 };
/* first_pages + window_pages stay, once there are acts_pages; window_pages >= KV_POLICY_MIN_WINDOW, acts_pages >= both. */
struct kv_policy kv_policy_streaming(int32_t first_pages, int32_t window_pages, int32_t acts_pages);
bool kv_policy_same(const struct kv_policy *a, const struct kv_policy *b);

/* Positions below this are computed as without a policy; INT32_MAX: all. */
int32_t kv_policy_exact_tokens(const struct kv_policy *p);
/* The most pages that a sequence of so many tokens ever has in its block table. */
int32_t kv_policy_max_pages(const struct kv_policy *p, int32_t n_tokens);
/* The next position behind n_tokens at which it acts: no step goes beyond it. */
int32_t kv_policy_next(const struct kv_policy *p, int32_t n_tokens);
/* Pages that have to go before position s->n_tokens is computed, beginning at *first of the block table. */
int32_t kv_policy_due(const struct kv_policy *p, const struct kv_seq *s, int32_t *first);
