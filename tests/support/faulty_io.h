/*
 * A disk that fails as disks do, in front of plain transfers: what is set in it holds from the next transfer on. The
 * test's thread sets, the tier's looks.
 */
#pragma once

#include <stdatomic.h>
#include <stdlib.h>

#include "engine/kv/tier_file.h"
#include "engine/kv/tier_io.h"
#include "tests/unit/unit.h"

struct faulty {
	struct kv_io base;
	struct kv_io *inner;
	struct list held, ended; /* the tier's thread alone */
	_Atomic int read_error, write_error; /* errno of every transfer from now on; 0: none */
	_Atomic bool half;       /* transfers move about half of what they are asked to */
	_Atomic bool hold;       /* transfers do not end */
	_Atomic int reap_error;
	int allocate_error;
	_Atomic int flip;        /* one of so many reads of records gets a bit of its header or page wrong; 0: none */
	_Atomic int n_halved, n_flipped, n_refused;
	size_t page_bytes;
	uint64_t rng;            /* the tier's thread alone */
};

static inline int faulty_allocate(struct kv_io *io, int fd, uint64_t bytes)
{
	struct faulty *x = (struct faulty *)io;
	return x->allocate_error ? -x->allocate_error : x->inner->ops->allocate(x->inner, fd, bytes);
}

static inline void faulty_attach(struct kv_io *io, void *memory, size_t bytes)
{
	struct faulty *x = (struct faulty *)io;
	x->inner->ops->attach(x->inner, memory, bytes);
}

static inline int faulty_submit(struct kv_io *io, struct kv_io_transfer *t)
{
	struct faulty *x = (struct faulty *)io;
	int error = t->write ? x->write_error : x->read_error;
	if (x->hold) {
		list_push_back(&x->held, &t->link);
		return 0;
	}
	if (error) {
		t->result = -error;
		x->n_refused++;
		list_push_back(&x->ended, &t->link);
		return 0;
	}
	if (x->half && t->bytes > KV_FILE_BLOCK) {
		/* Not at a whole block: the last part has to be moved again. */
		t->bytes = t->bytes / 2 / KV_FILE_BLOCK * KV_FILE_BLOCK;
		x->n_halved++;
	}
	return x->inner->ops->submit(x->inner, t);
}

static inline void faulty_flip(struct faulty *x, const struct kv_io_transfer *t)
{
	int one_of = x->flip;
	size_t record = KV_FILE_BLOCK + (x->page_bytes + KV_FILE_BLOCK - 1) / KV_FILE_BLOCK * KV_FILE_BLOCK, at;
	bool part = (t->offset - KV_FILE_BLOCK) % record != 0; /* of a page, without the record's header */
	if (one_of == 0 || t->write || t->result <= (part ? 0 : KV_FILE_BLOCK) || unit_rand(&x->rng) % (uint64_t)one_of)
		return;
	/* What is behind either is padding. */
	at = unit_rand(&x->rng) % (part ? x->page_bytes : sizeof(struct kv_record_header) + x->page_bytes);
	if (!part && at >= sizeof(struct kv_record_header))
		at += KV_FILE_BLOCK - sizeof(struct kv_record_header);
	if (at >= (size_t)t->result)
		return;
	((uint8_t *)t->buffer)[at] ^= (uint8_t)(1 << unit_rand(&x->rng) % 8);
	x->n_flipped++;
}

static inline int faulty_reap(struct kv_io *io, struct kv_io_transfer **done, int max, int64_t wait_ns)
{
	struct faulty *x = (struct faulty *)io;
	int n = 0;
	if (x->reap_error)
		return -x->reap_error;
	if (!x->hold) {
		for (struct list *l; (l = list_pop_front(&x->held));)
			faulty_submit(io, list_entry(l, struct kv_io_transfer, link));
	}
	while (n < max && !list_empty(&x->ended))
		done[n++] = list_entry(list_pop_front(&x->ended), struct kv_io_transfer, link);
	if (n == 0)
		n = x->inner->ops->reap(x->inner, done, max, wait_ns);
	for (int i = 0; i < n; i++)
		faulty_flip(x, done[i]);
	return n;
}

static inline void faulty_kick(struct kv_io *io)
{
	struct faulty *x = (struct faulty *)io;
	x->inner->ops->kick(x->inner);
}

static inline void faulty_destroy(struct kv_io *io)
{
	struct faulty *x = (struct faulty *)io;
	x->inner->ops->destroy(x->inner);
	free(x);
}

static inline struct faulty *faulty_create(void)
{
	static const struct kv_io_ops ops = {"faulty",    faulty_allocate, faulty_attach, faulty_submit,
	                                     faulty_reap, faulty_kick,     faulty_destroy};
	struct faulty *x = calloc(1, sizeof *x);
	assert_non_null(x);
	x->base.ops = &ops;
	x->inner = kv_io_create_plain();
	assert_non_null(x->inner);
	list_init(&x->held);
	list_init(&x->ended);
	x->rng = 1;
	return x;
}
