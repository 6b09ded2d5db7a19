#include "server/store.h"

#include <stdlib.h>

#include "engine/base/hash.h"
#include "server/history.h"

void store_init(struct response_store *s, size_t max_bytes)
{
	*s = (struct response_store){.max_bytes = max_bytes};
	list_init(&s->recent);
	for (size_t i = 0; i < RESPONSE_BUCKETS; i++)
		list_init(&s->buckets[i]);
}

void store_free(struct response_store *s)
{
	while (!list_empty(&s->recent))
		store_remove(s, list_entry(s->recent.next, struct stored, link));
}

/* Ids are random, so any hash will do. */
static struct list *bucket_of(struct response_store *s, struct str id)
{
	return &s->buckets[hash64(id.p, id.n, 0) % RESPONSE_BUCKETS];
}

bool store_put(struct response_store *s, int32_t tenant, struct history *h, struct buf *response, struct buf *input)
{
	/*
	 * A summary that is made later shortens what it replaces, so its window is no more than the conversation again.
	 */
	size_t bytes = sizeof(struct stored) + sizeof *h + h->messages.cap + h->window.cap + response->cap + input->cap;
	struct stored *r = bytes <= s->max_bytes ? calloc(1, sizeof *r) : NULL;
	if (!r || response->failed || input->failed) {
		free(r);
		return false;
	}
	while (s->max_bytes - s->bytes < bytes) {
		s->evicted++;
		store_remove(s, list_entry(s->recent.next, struct stored, link));
	}
	r->tenant = tenant;
	r->history = history_ref(h);
	r->response = *response;
	r->input = *input;
	*response = *input = BUF_INIT;
	r->bytes = bytes;
	s->bytes += bytes;
	s->n++;
	list_push_back(&s->recent, &r->link);
	list_push_back(bucket_of(s, str_from(h->response_id)), &r->hash_link);
	return true;
}

struct stored *store_find(struct response_store *s, int32_t tenant, struct str id)
{
	list_each(node, tmp, bucket_of(s, id))
	{
		struct stored *r = list_entry(node, struct stored, hash_link);
		if (r->tenant != tenant || !str_is(id, r->history->response_id))
			continue;
		list_remove(&r->link);
		list_push_back(&s->recent, &r->link);
		return r;
	}
	return NULL;
}

void store_remove(struct response_store *s, struct stored *r)
{
	list_remove(&r->link);
	list_remove(&r->hash_link);
	s->bytes -= r->bytes;
	s->n--;
	history_unref(r->history);
	buf_free(&r->response);
	buf_free(&r->input);
	free(r);
}
