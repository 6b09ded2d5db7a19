/* Pages on two devices, and the conversations that own them: what comparisons of attention are made of. */
#pragma once

#include "tests/gpu/compare.h"

enum { LAYERS = 2, LAYER = 1, SEQS = 6, MAX_ROWS = 700 };

/* The same pages on both devices, and the sequences that own them. */
struct cache {
	struct pair *p;
	struct kv_layout layout; /* of the device; that of the reference differs in the type at most, and in `wide` */
	struct kv_layout reference_layout;
	struct kv_wide wide, reference_wide;
	size_t bytes; /* of pages and wide copies */
	int32_t n_head, n_pages, pages_per_seq;
	struct attention_params params;
	void *device, *reference;
	int32_t *pages;	  /* [n_pages] in random order; sequence s has pages_per_seq of them from s * pages_per_seq */
	int32_t at[SEQS]; /* length so far */
	float freq[128];
	struct rope_params rope;
	int32_t token[MAX_ROWS], position[MAX_ROWS];
	struct batch_seq seq[SEQS];
	struct batch batch;
};

/* group: query heads of a KV head. */
struct cache *cache_new(struct pair *p, enum kv_form form, int32_t n_head_kv, int32_t group, int32_t dim,
			int32_t max_length);
void cache_free(struct cache *c);
/* From now on keys are of chunks (struct rope_chunks); n_dims of each head are turned. */
void cache_of_chunks(struct cache *c, enum rope_pairing pairing, int32_t n_dims, int32_t size, int32_t reach);
/* The next step's batch begins, and gets the next n rows of a sequence. */
void begin_step(struct cache *c);
void add_rows(struct cache *c, int32_t seq, int32_t n);
/* On the device or the reference, as b is. */
void step_on(struct cache *c, struct backend *b, void *kv, float *q, float *k, const float *v, float *out, bool rope);
/*
 * One step over the batch, compared. Keys that are rotated may differ in a last bit, which could make another code of
 * one: of a narrow cache, or one of bfloat16s, the reference takes the device's.
 */
void step_on_both(struct cache *c, bool rope, const char *what);
