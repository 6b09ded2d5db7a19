/*
 * Rows that choose the pages they read, and rows that score pages elsewhere (struct page_choice and struct page_probe
 * of backend.h), on the fast backends: what both come to by the bounds of keys. What each KV head chooses is found
 * before attention runs, and takes the place of the block table.
 */
#pragma once

#include "engine/cpu/fast.h"

/* What the rows of a step choose; zeroed: nothing yet. */
struct fast_choices {
	struct scratch rows;   /* struct chooser of fast_choice.c */
	struct scratch chosen; /* int32_t: page numbers, one KV head's behind the other's, and so each row's */
	struct scratch bounds; /* float: for each thread, or for each choice of a layer where these are fewer */
	struct scratch probe;  /* float: for each thread, and behind them int32_t [n_pages of the probe at hand] */
	int32_t most_pages;    /* in the block table of a row that chooses */
};

void fast_choices_free(struct fast_choices *o);

/* The queries of a layer. */
struct fast_queries {
	struct fast *f;
	const struct kv_layout *layout;
	int32_t layer;
	const float *q; /* [n_rows][n_head][head_dim] */
	int32_t n_head;
};

/* The first place in its block table from which on rows of a sequence read less than they see; INT32_MAX: none does. */
int32_t fast_chooses_from(const struct batch_seq *seq, int32_t window);
/* Page numbers that the choosing rows of a sequence take in `chosen`. */
int64_t fast_chosen_by(const struct batch_seq *seq, int32_t n_head_kv, int32_t window);
/*
 * Lists the rows of the batch that choose, and makes room for what they do; how many there are. group: query heads of a
 * KV head. NOMEM; INVALID: pages have no bounds.
 */
enum status fast_choices_list(struct fast_choices *o, const struct fast *f, const struct kv_layout *layout,
                              int32_t group, int32_t window, int64_t *n);
/* Finds the pages of the n rows that were listed. */
void fast_choices_make(struct fast_choices *o, const struct fast_queries *q, int64_t n);
/* Adds what the rows of a sequence give to the pages of its probe. scale: of scores. NOMEM. */
enum status fast_choices_probe(struct fast_choices *o, const struct fast_queries *q, const struct batch_seq *seq,
                               float scale);
