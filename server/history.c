#include "server/history.h"

#include <stdlib.h>

struct history *history_create(void)
{
	struct history *h = calloc(1, sizeof *h);
	if (h) {
		h->refs = 1;
		list_init(&h->waiters);
	}
	return h;
}

struct history *history_ref(struct history *h)
{
	if (h)
		h->refs++;
	return h;
}

void history_unref(struct history *h)
{
	if (!h || --h->refs > 0)
		return;
	compact_cancel(h->compact);
	compacted_free(&h->made);
	buf_free(&h->messages);
	buf_free(&h->window);
	free(h);
}

const struct buf *history_window(const struct history *h)
{
	return h->window.len ? &h->window : &h->messages;
}

/* ---- In the background ---- */

static void on_compacted(void *arg, struct compacted *made, const struct failure *f)
{
	struct history *h = history_ref(arg);
	struct list *node;
	h->compact = NULL;
	if (!f && made->window.len) {
		compacted_free(&h->made);
		h->made = *made;
		*made = (struct compacted){0};
		buf_free(&h->window);
		h->window = h->made.window;
		h->made.window = BUF_INIT;
		h->base = (struct compact_base){h->made.turns, h->made.messages};
	}
	while ((node = list_pop_front(&h->waiters))) {
		struct history_waiter *w = list_entry(node, struct history_waiter, link);
		w->ready(w);
	}
	history_unref(h);
}

static const struct compact_ops ops = {.done = on_compacted};

void history_compact(struct app *a, struct history *h, struct compact_request *q)
{
	const struct buf *window = history_window(h);
	struct error err;
	if (a->draining || h->compact || a->n_background >= COMPACT_MAX_BACKGROUND)
		return;
	q->messages = buf_str(window);
	q->base = h->base;
	q->background = true;
	compact_start(a, q, &ops, h, &h->compact, &err);
}

void history_stop_compaction(struct history *h)
{
	if (!list_empty(&h->waiters))
		return;
	compact_cancel(h->compact);
	h->compact = NULL;
}
