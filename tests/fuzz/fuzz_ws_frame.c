/*
 * Any bytes as a client's WebSocket frames. However they are cut, the verdict is the same, and so is what is passed
 * on; and a plain reader of that finds nothing but masked frames in order, of bounded size, no pings and pongs among
 * them. Whether closes are taken quietly (frame_check_quiet()) changes nothing about the verdict. The first byte of the
 * input decides about the cuts.
 */
#include <stdbool.h>
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

/*
 * Takes in steps, as a connection does; the close code or 0, what was passed on to out[size], and how much of the input
 * that was with what was not: pings and pongs, and after `alone` bytes, when nobody is behind, closes.
 */
static int run(const uint8_t *p, size_t n, size_t step, size_t alone, uint8_t *out, size_t *n_out, uint64_t *frames,
	       uint64_t *pings)
{
	struct frame_check f;
	struct frame_error err = {0};
	frame_check_init(&f, MAX_MESSAGE);
	*n_out = *pings = 0;
	for (size_t at = 0, end = 0; at < n && !f.closed; at = end) {
		end = step < n - at ? at + step : n;
		while (at < end && !f.closed) {
			size_t n_held, used;
			bool close_too = at >= alone && (!f.in_message || f.quiet);
			if (!frame_check_quiet(&f, close_too, p + at, end - at, &used, &err))
				goto out;
			expect(used <= end - at && (!f.pinged || used));
			at += used;
			*pings += f.pinged;
			if (f.pinged) {
				expect(f.n_control <= FRAME_MAX_CONTROL);
				f.pinged = false;
				continue;
			}
			if (at == end || f.closed)
				break;
			expect(!frame_check_beats(&f, p[at]));
			if (!frame_check_feed(&f, p + at, end - at, &n_held, &used, &err))
				goto out;
			expect(used <= end - at && n_held <= FRAME_MAX_HEADER && *n_out + n_held + used <= n);
			memcpy(out + *n_out, f.held, n_held);
			memcpy(out + *n_out + n_held, p + at, used);
			*n_out += n_held + used;
			if (used == end - at || !frame_check_beats(&f, p[at + used]))
				break;
			at += used;
		}
	}
out:
	expect(!err.code || (err.code >= 1000 && err.reason));
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
			expect(fin && len <= 125 && op == 8);
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
	size_t step = 1 + data[0] % 16, n = size - 1, n1, n2, n3;
	const uint8_t *p = data + 1;
	uint64_t f1, f2, f3, pings1, pings2, pings3;
	uint8_t *out = malloc(3 * n);
	if (!out)
		return 0;
	int whole = run(p, n, n, n, out, &n1, &f1, &pings1);
	int cut = run(p, n, step, n, out + n, &n2, &f2, &pings2);
	expect(whole == cut && f1 == f2 && pings1 == pings2);
	expect(run(p, n, step, data[0], out + 2 * n, &n3, &f3, &pings3) == whole && f3 == f1 && pings3 == pings1);
	/* All at once, a violation anywhere stops everything; cut, what came before it was passed on. */
	expect(n1 <= n2 && memcmp(out, out + n, n1) == 0 && (whole || n1 == n2));
	check_passed(out + n, n2);
	free(out);
	return 0;
}
