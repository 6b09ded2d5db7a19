/*
 * A mailbox carries messages from any number of threads to one. Posting links a node under the lock; taking detaches
 * the whole list under the lock. The receiver is woken only when the box goes from empty to non-empty.
 *
 * Ownership: a posted node belongs to the mailbox until it is taken, then to the taker.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/base/list.h"
#include "engine/base/status.h"

struct mailbox {
	pthread_mutex_t lock;
	pthread_cond_t filled;
	struct list items;        /* under lock */
	void (*wake)(void *arg);  /* called outside the lock, from the posting thread; may be NULL */
	void *wake_arg;
};

enum status mailbox_init(struct mailbox *m, void (*wake)(void *arg), void *wake_arg);
/* The box must be empty. */
void mailbox_destroy(struct mailbox *m);
void mailbox_post(struct mailbox *m, struct list *node);
/* Posts every node of `nodes`, which is then empty, under one lock and with at most one wake. */
void mailbox_post_all(struct mailbox *m, struct list *nodes);
/* Appends every waiting node to `out`; false when there was none. Never blocks beyond the lock. */
bool mailbox_take(struct mailbox *m, struct list *out);
/* As mailbox_take, but waits up to timeout_ns for a first node (negative: for ever). */
bool mailbox_wait(struct mailbox *m, struct list *out, int64_t timeout_ns);
