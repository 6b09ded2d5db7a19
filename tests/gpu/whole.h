/*
 * A model on a device with pages for some sequences: what the programs of this directory that run whole models share.
 */
#pragma once

#include "engine/model/forward.h"
#include "engine/model/rope_choice.h"

enum { WHOLE_SEQS = 64 };

struct whole {
	struct backend *backend;
	struct gguf *gguf;
	struct model *model;
	struct kv_layout layout;
	void *kv;
	size_t kv_bytes;
	int32_t max_rows, n_pages; /* pages of each sequence */
	int32_t *table;            /* [WHOLE_SEQS][n_pages] */
	int32_t *token, *position; /* [max_rows] */
};

/*
 * Opens device and model, for KV of a form, without wide copies; rope: as --rope-scaling says, or NULL. On failure
 * prints why and exits: 77 when the machine has no such device, else 1.
 */
void whole_open(struct whole *w, const char *device, int32_t n_threads, const char *path, int32_t max_rows,
                enum kv_form form, const char *rope);
/* Pages for n_seqs sequences of `length` positions, those of before given back. False when they do not fit. */
bool whole_pages(struct whole *w, int32_t n_seqs, int32_t length);
/*
 * A step of n rows of each of n_seqs sequences from position `at`; tokens [n_seqs][n] or NULL for arbitrary ones. The
 * logits of each sequence's last row, or of all rows, are computed; *logits (may be NULL: they stay on the device) is
 * in host memory.
 */
enum status whole_step(struct whole *w, int32_t n_seqs, int32_t at, int32_t n, const int32_t *tokens, bool all,
                       float **logits);
void whole_close(struct whole *w);
