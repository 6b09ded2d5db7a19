#include "engine/base/mailbox.h"

#include <time.h>

enum status mailbox_init(struct mailbox *m, void (*wake)(void *arg), void *wake_arg)
{
	pthread_condattr_t attr;
	list_init(&m->items);
	m->wake = wake;
	m->wake_arg = wake_arg;
	if (pthread_mutex_init(&m->lock, NULL) != 0)
		return STATUS_NOMEM;
	if (pthread_condattr_init(&attr) != 0)
		goto fail_attr;
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	int rc = pthread_cond_init(&m->filled, &attr);
	pthread_condattr_destroy(&attr);
	if (rc != 0)
		goto fail_attr;
	return STATUS_OK;

fail_attr:
	pthread_mutex_destroy(&m->lock);
	return STATUS_NOMEM;
}

void mailbox_destroy(struct mailbox *m)
{
	pthread_cond_destroy(&m->filled);
	pthread_mutex_destroy(&m->lock);
}

/* Releases the lock after a post, and wakes the receiver if the box was empty before it. */
static void posted(struct mailbox *m, bool was_empty)
{
	if (was_empty)
		pthread_cond_signal(&m->filled);
	pthread_mutex_unlock(&m->lock);
	if (was_empty && m->wake)
		m->wake(m->wake_arg);
}

void mailbox_post(struct mailbox *m, struct list *node)
{
	pthread_mutex_lock(&m->lock);
	bool was_empty = list_empty(&m->items);
	list_push_back(&m->items, node);
	posted(m, was_empty);
}

void mailbox_post_all(struct mailbox *m, struct list *nodes)
{
	if (list_empty(nodes))
		return;
	pthread_mutex_lock(&m->lock);
	bool was_empty = list_empty(&m->items);
	list_splice_back(&m->items, nodes);
	posted(m, was_empty);
}

static bool take_locked(struct mailbox *m, struct list *out)
{
	if (list_empty(&m->items))
		return false;
	list_splice_back(out, &m->items);
	return true;
}

bool mailbox_take(struct mailbox *m, struct list *out)
{
	pthread_mutex_lock(&m->lock);
	bool any = take_locked(m, out);
	pthread_mutex_unlock(&m->lock);
	return any;
}

bool mailbox_wait(struct mailbox *m, struct list *out, int64_t timeout_ns)
{
	struct timespec until;
	if (timeout_ns >= 0) {
		clock_gettime(CLOCK_MONOTONIC, &until);
		int64_t ns = until.tv_nsec + timeout_ns % 1000000000;
		until.tv_sec += timeout_ns / 1000000000 + ns / 1000000000;
		until.tv_nsec = ns % 1000000000;
	}
	pthread_mutex_lock(&m->lock);
	while (list_empty(&m->items)) {
		int rc = timeout_ns < 0 ? pthread_cond_wait(&m->filled, &m->lock)
		                        : pthread_cond_timedwait(&m->filled, &m->lock, &until);
		if (rc != 0)
			break;
	}
	bool any = take_locked(m, out);
	pthread_mutex_unlock(&m->lock);
	return any;
}
