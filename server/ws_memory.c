#include "server/ws_memory.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/buf.h"
#include "server/loop.h"

enum {
	BLOCKS = 12,	    /* opening a connection takes 8 */
	BLOCK_BYTES = 8192, /* of up to 4 KiB and a header */
};

static struct {
	void *block[BLOCKS];
	int n;
} aside;

static bool holding;
static struct buf held; /* pointers */

bool ws_memory_reserve(void)
{
	while (aside.n < BLOCKS) {
		void *p = malloc(BLOCK_BYTES);
		if (!p)
			return false;
		aside.block[aside.n++] = p;
	}
	return true;
}

static void *take(size_t n)
{
	if (aside.n == 0 || n > BLOCK_BYTES)
		return NULL;
	void *p = aside.block[--aside.n], *fit = realloc(p, n);
	return fit ? fit : p;
}

void *ws_memory(void *old, size_t n, const char *reason)
{
	(void)reason;
	if (n) {
		void *p = realloc(old, n);
		if (!p && !old)
			p = take(n);
		return p ? p : loop_realloc(old, n);
	}
	if (holding && old)
		buf_append(&held, &old, sizeof old); /* without memory for it, it is lost; the process ends anyway */
	else
		free(old);
	return NULL;
}

void ws_memory_hold(void)
{
	holding = true;
}

void ws_memory_end(void)
{
	void *p;
	for (size_t at = 0; at < held.len; at += sizeof p) {
		memcpy(&p, held.data + at, sizeof p);
		free(p);
	}
	buf_free(&held);
	holding = false;
	while (aside.n)
		free(aside.block[--aside.n]);
}
