#include "server/stream.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct piece {
	struct list node;
	size_t len, at; /* bytes, bytes gone */
	char data[];	/* [headroom + len] */
};

void stream_init(struct stream *s, size_t limit, size_t headroom)
{
	list_init(&s->pieces);
	s->pending = 0;
	s->limit = limit;
	s->headroom = headroom;
}

void stream_clear(struct stream *s)
{
	struct list *node;
	while ((node = list_pop_front(&s->pieces)))
		free(list_entry(node, struct piece, node));
	s->pending = 0;
}

enum status stream_push(struct stream *s, const void *data, size_t n)
{
	if (n == 0)
		return STATUS_OK;
	if (s->pending && (s->pending >= s->limit || n > s->limit - s->pending))
		return STATUS_LIMIT;
	if (n > SIZE_MAX / 2 - sizeof(struct piece) - s->headroom)
		return STATUS_NOMEM;
	struct piece *p = malloc(sizeof *p + s->headroom + n);
	if (!p)
		return STATUS_NOMEM;
	p->len = n;
	p->at = 0;
	memcpy(p->data + s->headroom, data, n);
	list_push_back(&s->pieces, &p->node);
	s->pending += n;
	return STATUS_OK;
}

char *stream_front(const struct stream *s, size_t *n)
{
	*n = 0;
	if (list_empty(&s->pieces))
		return NULL;
	struct piece *p = list_entry(s->pieces.next, struct piece, node);
	*n = p->len - p->at;
	return p->data + s->headroom + p->at;
}

void stream_consume(struct stream *s, size_t n)
{
	struct piece *p = list_entry(s->pieces.next, struct piece, node);
	p->at += n;
	s->pending -= n;
	if (p->at == p->len) {
		list_remove(&p->node);
		free(p);
	}
}

size_t stream_take(struct stream *s, char *out, size_t n)
{
	size_t have;
	const char *p = stream_front(s, &have);
	if (!p)
		return 0;
	if (n > have)
		n = have;
	memcpy(out, p, n);
	stream_consume(s, n);
	return n;
}
