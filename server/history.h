/*
 * What responses leave behind to be continued: each its conversation, in full and, where older turns have been
 * summarised, as the model reads it from then on.
 */
#pragma once

#include "server/compact.h"

enum { RESPONSE_ID_MAX = 48 };

/* A conversation up to and including one response: chat messages as JSON text, ready to be continued. */
struct history {
	int refs;
	char response_id[RESPONSE_ID_MAX];
	char session[ENGINE_SESSION_ID_MAX + 1]; /* that holds its KV, or "" */
	struct buf messages;			 /* comma-separated objects */
	struct buf window;			 /* the same with a summary in place of older turns; empty: as it is */
	struct compact_base base;		 /* what the window's first turn stands for */
	/*
	 * A summary that is made while the conversation idles, for the next turn. Who waits for it is in `waiters`, and
	 * is called when it has ended, well or not; then `made`, if it has turns, is what came of it, less the window,
	 * for the output of every response that goes on from here.
	 */
	struct compact *compact;
	struct list waiters; /* struct history_waiter.link */
	struct compacted made;
};

struct history_waiter {
	struct list link; /* linked to itself while it does not wait */
	void (*ready)(struct history_waiter *w);
};

struct history *history_create(void);		/* NULL: no memory */
struct history *history_ref(struct history *h); /* NULL is allowed */
void history_unref(struct history *h);		/* NULL is allowed */
/* What the model reads of it. */
const struct buf *history_window(const struct history *h);
/*
 * Begins to summarise it in the background; q->messages and q->base are filled in here. Nothing happens when there is
 * no room for that.
 */
void history_compact(struct app *a, struct history *h, struct compact_request *q);
/* Ends that, unless somebody waits. */
void history_stop_compaction(struct history *h);
