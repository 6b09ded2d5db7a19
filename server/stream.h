/*
 * A bounded queue of output for one client. Each push is one piece and comes out as one, so that what was written
 * together can be sent together. A client that does not read makes its own queue full, and nobody else's.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/list.h"
#include "engine/base/status.h"

struct stream {
	struct list pieces;
	size_t pending; /* bytes queued */
	size_t limit;
	size_t headroom; /* free bytes before each piece's data, for a protocol's framing */
};

void stream_init(struct stream *s, size_t limit, size_t headroom);
/* Frees what is queued; the stream is then empty and usable. */
void stream_clear(struct stream *s);
/*
 * Queues a copy of data[0..n) as one piece; n == 0 queues nothing. LIMIT when bytes are queued already and the piece
 * would take the sum over the limit: a single piece larger than the limit passes if the client keeps up.
 */
enum status stream_push(struct stream *s, const void *data, size_t n);
/* What is left of the first piece, with headroom before it while none of it was consumed; NULL when empty. */
char *stream_front(const struct stream *s, size_t *n);
/* Removes n bytes, at most what stream_front() reported. */
void stream_consume(struct stream *s, size_t n);
/* Copies up to n bytes of the first piece (never of two) to out and removes them; 0 when empty. */
size_t stream_take(struct stream *s, char *out, size_t n);
