/*
 * A look at keys and values before they are stored: struct kv_watch, and the wide copies that pages of a narrow pool
 * fall back to.
 */
#pragma once

#include "engine/backend.h"
#include "engine/cpu/threads.h"

struct narrow_block; /* narrow.h */

/*
 * The bits of the largest |x[i]|, as a positive integer: those of floats are in order, infinities and NaNs above all
 * numbers.
 */
typedef int32_t kv_peak(const float *x, int64_t n);

enum { WATCH_MAX_DIM = 1024 }; /* of heads whose pages get copies while they are written */

struct kv_look {
	struct threads *threads;
	const struct batch *batch;
	char *kv;
	const struct kv_layout *layout;
	const float *k, *v; /* [n_rows][n_head_kv][head_dim] */
	kv_peak *peak;
	/* Writes the block of a layer and head to the page's wide copy. */
	void (*widen)(void *arg, const struct kv_layout *l, int32_t layer, int32_t head_kv,
	              const struct narrow_block *from, char *wide_page);
	void *arg;
};

/* For kv_write(), before it stores. Pages that shall have a wide copy have one then, with all that they held before. */
void kv_look(const struct kv_look *look);
