/*
 * Any bytes as a client's WebSocket frames. However they are cut, the verdict is the same and what is passed on is a
 * prefix of the input; and a plain reader of what was passed on finds nothing but masked frames in order, of bounded
 * size. Taking pongs and closes quietly (frame_check_quiet()) changes nothing about it. The first byte of the input decides about the cuts.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "server/frame.h"

enum { MAX_MESSAGE = 300 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void expect(int holds)
{
	if (!holds)
		abort();
}

/* Feeds in steps; the close code or 0, and what was passed on to out[size]. */
static int run(const uint8_t *p, size_t n, size_t step, uint8_t *out, size_t *n_out, uint64_t *frames)
{
	struct frame_check f;
	frame_check_init(&f, MAX_MESSAGE);
	*n_out = 0;
	int code = 0;
	for (size_t at = 0; at < n && !code; at += step) {
		struct frame_error err = {0};
		size_t n_held, used, take = step < n - at ? step : n - at;
		if (!frame_check_feed(&f, p + at, take, &n_held, &used, &err)) {
			expect(err.code >= 1000 && err.reason);
			code = err.code;
			break;
		}
		expect(used <= take && n_held <= FRAME_MAX_HEADER && *n_out + n_held + used <= n);
		memcpy(out + *n_out, f.held, n_held);
		memcpy(out + *n_out + n_held, p + at, used);
		*n_out += n_held + used;
	}
	*frames = f.frames;
	return code;
}

/* The same as run() gives, when whatever frame_check_quiet() would take, between frames, is given to it first. */
static int run_quietly(const uint8_t *p, size_t n, size_t step, uint64_t *frames)
{
	struct frame_check f;
	struct frame_error err = {0};
	frame_check_init(&f, MAX_MESSAGE);
	for (size_t at = 0; at < n; at += step) {
		size_t n_held, used = 0, more, take = step < n - at ? step : n - at;
		if ((frame_check_at_rest(&f) || f.quiet) && !frame_check_quiet(&f, p + at, take, &used, &err))
			break;
		expect(used <= take && (used == take || f.closed || !f.quiet));
		if (!frame_check_feed(&f, p + at + used, take - used, &n_held, &more, &err))
			break;
	}
	*frames = f.frames;
	return err.code;
}

static void check_passed(const uint8_t *p, size_t n)
{
	uint64_t message = 0;
	int inside = 0;
	for (size_t at = 0; at < n;) {
		expect(n - at >= 6);
		int op = p[at] & 15, fin = p[at] >> 7;
		uint64_t len = p[at + 1] & 127;
		expect((p[at] & 0x70) == 0 && p[at + 1] & 0x80);
		size_t extended = len == 126 ? 2 : len == 127 ? 8 : 0;
		at += 2;
		expect(n - at >= extended + 4);
		if (extended)
			len = 0;
		for (size_t i = 0; i < extended; i++)
			len = len << 8 | p[at++];
		at += 4;
		if (op >= 8) {
			expect(fin && len <= 125 && op <= 10);
		} else {
			expect(op <= 1 && (op == 0) == inside);
			message = (op ? 0 : message) + len;
			expect(message <= MAX_MESSAGE);
			inside = !fin;
		}
		if (len > n - at)
			return; /* the payload has not all come */
		at += (size_t)len;
		expect(op != 8 || at == n);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 2)
		return 0;
	size_t step = 1 + data[0] % 16, n = size - 1, n1, n2;
	const uint8_t *p = data + 1;
	uint64_t f1, f2, f3;
	uint8_t *out = malloc(2 * n);
	if (!out)
		return 0;
	int whole = run(p, n, n, out, &n1, &f1);
	int cut = run(p, n, step, out + n, &n2, &f2);
	expect(whole == cut && f1 == f2);
	expect(run_quietly(p, n, step, &f3) == whole && f3 == f1);
	expect(memcmp(out + n, p, n2) == 0);
	/* All at once, a violation anywhere stops everything; cut, what came before it was passed on. */
	if (!whole)
		expect(n1 == n2 && memcmp(out, p, n1) == 0);
	check_passed(out + n, n2);
	free(out);
	return 0;
}
