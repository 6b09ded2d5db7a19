/*
 * The store that keeps responses for a while under their ids: to be asked for, and to be continued by any request of
 * the same key. A response is as its client got it, with its input items and its history (history.h).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/list.h"
#include "engine/base/str.h"

struct history;

struct stored {
	struct list link;      /* of response_store.recent */
	struct list hash_link; /* of its bucket */
	int32_t tenant;
	struct history *history; /* with the id */
	struct buf response;	 /* the object as its client got it */
	struct buf input;	 /* its input items, comma-separated */
	size_t bytes;
};

enum { RESPONSE_BUCKETS = 1024 };

/* Bounded by bytes: the longest unused go first. */
struct response_store {
	struct list recent; /* the longest unused first */
	struct list buckets[RESPONSE_BUCKETS];
	size_t bytes, max_bytes;
	int32_t n;
	uint64_t evicted;
};

void store_init(struct response_store *s, size_t max_bytes);
void store_free(struct response_store *s);
/*
 * Keeps a response; takes the content of both buffers, and a reference. False when it is not kept: there is no memory,
 * or it is larger than what all may take.
 */
bool store_put(struct response_store *s, int32_t tenant, struct history *h, struct buf *response, struct buf *input);
/* NULL when the tenant has none of that id. A look-up is a use. */
struct stored *store_find(struct response_store *s, int32_t tenant, struct str id);
void store_remove(struct response_store *s, struct stored *r);
