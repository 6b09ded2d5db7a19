/*
 * Merging: tokens that stand next to each other and have similar keys come to share their KV. Such a bucket has the
 * mean of their keys before rotation and of their values, and counts for as many tokens as it has: ln n is added to its
 * logit (struct batch_seq), so that attention gives it what it would give to n tokens with that key and value.
 *
 * A bucket takes one place in a page, as a token does. Its key is rotated to the mean of its tokens' positions: to the
 * first order in the distances between them, that is where the mean of their own rotated keys lies, and each of them
 * then is as far off as it can be least.
 *
 * Which tokens join is decided by pairs of neighbours, in rounds, those first whose joining costs least by Ward's
 * criterion (Ward, "Hierarchical Grouping to Optimize an Objective Function", 1963): a b / (a + b) (1 - cosine), for
 * buckets of a and b tokens and the cosine between their keys at one position, a mean over all layers and heads. It
 * keeps buckets small where keys differ and lets them grow where they are alike. What is to be kept (as pages by EVICT,
 * kv/policy.h) joins last. Tokens with a value that is no number are left out.
 *
 * The order is fixed and depends on the pages alone, so that the same conversation has the same buckets.
 */
#pragma once

#include <stdbool.h>

#include "engine/backend.h"
#include "engine/kv/pool.h"
#include "engine/kv/seq.h"

/*
 * What is done to KV where it lies, to many places at a time: n >= 1. Failures are the backend's; then what the places
 * have means nothing any more.
 */
struct kv_merger {
	/* sound[i]: whether all values of a place are finite. */
	enum status (*are_sound)(struct kv_merger *m, const struct kv_spot *spots, int32_t n, bool *sound);
	/* apart[i]: 1 - cosine between two keys, were they at one position; a mean over all layers and heads. */
	enum status (*apart)(struct kv_merger *m, const struct kv_pair *pairs, int32_t n, float *apart);
	/* Puts the means of a (n_a times) and b (n_b times) in a's place, rotated to `position`. Each has one pair. */
	enum status (*join)(struct kv_merger *m, const struct kv_pair *pairs, int32_t n);
	/* One after the other; none goes where a later one comes from. */
	enum status (*move)(struct kv_merger *m, const struct kv_move *moves, int32_t n);
};

/*
 * What is added to the logit of a place that stands for nothing: less than any float of attention can feel, and still a
 * number.
 */
#define KV_MERGE_NOTHING (-10000.0f)

/*
 * Makes `left` pages (1 or more) of the n that stand from page `first` on in the block table of s, which are full and
 * its own (kv_seq_own()), and gives the others back. keep[i], i < n: the tokens of the i-th are to be kept as they are
 * for as long as others are left. NOMEM, or what the merger reports: then what the pages have may mean nothing any
 * more, and s is to be released.
 */
enum status kv_merge(struct kv_merger *m, struct kv_pool *pool, struct kv_seq *s, int32_t first, int32_t n,
		     int32_t left, const bool *keep);

/* How many s->plus has: the buckets, made a multiple of what attention takes together. */
int32_t kv_merge_n_plus(const struct kv_seq *s);
/* Of the tokens that s->n_tokens counts, those that share their KV with others. */
int32_t kv_merged_tokens(const struct kv_seq *s);
/* Bytes that are kept of buckets beside their pages. */
size_t kv_merge_bytes(const struct kv_seq *s);

/* ---- merge_pages.c ---- */

struct kv_page_merger;

/*
 * For pages of that layout in device memory of b, by the host where it can read them, else by the backend;
 * rope_of(arg, layer): how that layer's keys are rotated, valid as long as the merger is used. UNSUPPORTED: the pages
 * are narrow, or neither can do it, or attention on b adds nothing to logits. NOMEM.
 */
enum status kv_page_merger_create(struct backend *b, void *slab, const struct kv_layout *layout,
				  const struct rope_params *(*rope_of)(const void *arg, int32_t layer), const void *arg,
				  struct kv_page_merger **out);
void kv_page_merger_destroy(struct kv_page_merger *m); /* NULL is allowed */
struct kv_merger *kv_page_merger_ops(struct kv_page_merger *m);
