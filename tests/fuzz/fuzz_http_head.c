/*
 * Any bytes as requests of one connection. However they are cut, the verdict and the ends are the same; a head that
 * passes ends in an empty line, holds no controls and agrees with a plain search of it; a body that passes is as long
 * as its framing says. The first byte of the input decides about the cuts.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "server/head.h"

enum { MAX_HEAD = 1024, MAX_BODY = 4096 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void expect(int holds)
{
	if (!holds)
		abort();
}

/* How many lines of the head begin with `name:`. */
static int count_fields(const char *p, size_t n, const char *name)
{
	int count = 0;
	size_t len = strlen(name);
	for (size_t i = 0; i + len < n; i++)
		count += (i == 0 || p[i - 1] == '\n') && strncasecmp(p + i, name, len) == 0 && p[i + len] == ':';
	return count;
}

static void check_head(const struct head *h, const char *p)
{
	expect(h->length >= 18 && h->length <= MAX_HEAD); /* "GET / HTTP/1.0" and an empty line */
	expect(memcmp(p + h->length - 4, "\r\n\r\n", 4) == 0);
	for (size_t i = 0; i < h->length; i++) {
		unsigned char c = (unsigned char)p[i];
		expect(c >= 0x20 || c == '\t' || (c == '\r' && p[i + 1] == '\n') || (c == '\n' && p[i - 1] == '\r'));
		expect(c != 0x7f);
	}
	int lengths = count_fields(p, h->length, "content-length"),
	    codings = count_fields(p, h->length, "transfer-encoding");
	expect(lengths + codings <= 1);
	expect(count_fields(p, h->length, "host") <= 1);
	expect(!h->is_http11 || count_fields(p, h->length, "host") == 1);
	expect((h->framing == HEAD_CHUNKED) == (codings == 1));
	expect(h->framing != HEAD_SIZED || (lengths == 1 && h->content_length > 0));
	expect(!h->wants_websocket || (h->method == HTTP_GET && h->framing == HEAD_NO_BODY && h->is_http11));
	expect(h->ws_key[0] == '\0' || strlen(h->ws_key) == HEAD_WS_KEY);
}

/* Reads one head in steps; *step 0 is all at once. */
static enum head_result read_head(struct head *h, const char *p, size_t n, size_t step, struct head_error *err)
{
	enum head_result r = HEAD_MORE;
	head_init(h);
	for (size_t at = step ? step : n; r == HEAD_MORE; at += step) {
		if (at > n)
			at = n;
		r = head_feed(h, p, at, MAX_HEAD, err);
		if (at == n)
			break;
	}
	return r;
}

static enum head_result read_body(struct body *b, const struct head *h, const char *p, size_t n, size_t step,
				  size_t *end, struct head_error *err)
{
	enum head_result r = body_init(b, h, MAX_BODY, err);
	size_t at = 0;
	while (r == HEAD_MORE && at < n) {
		size_t used, take = step && step < n - at ? step : n - at;
		r = body_feed(b, p + at, take, &used, err);
		expect(used <= take && (used == take || r != HEAD_MORE));
		at += used;
	}
	*end = at;
	return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 1)
		return 0;
	size_t step = 1 + data[0] % 64;
	const char *p = (const char *)data + 1;
	size_t n = size - 1;

	while (n > 0) {
		struct head whole, cut;
		struct head_error e1 = {0}, e2 = {0};
		enum head_result r = read_head(&whole, p, n, 0, &e1);
		expect(read_head(&cut, p, n, step, &e2) == r);
		if (r == HEAD_BAD)
			expect(e1.status >= 400 && e1.status == e2.status && e1.message == e2.message &&
			       e1.code == e2.code);
		if (r != HEAD_DONE)
			return 0;
		expect(whole.length == cut.length && whole.framing == cut.framing &&
		       whole.content_length == cut.content_length);
		check_head(&whole, p);
		p += whole.length;
		n -= whole.length;

		struct body b1, b2;
		size_t end1, end2;
		r = read_body(&b1, &whole, p, n, 0, &end1, &e1);
		expect(read_body(&b2, &whole, p, n, step, &end2, &e2) == r);
		if (r == HEAD_BAD)
			expect(e1.status >= 400 && e1.status == e2.status && e1.message == e2.message);
		if (r != HEAD_DONE)
			return 0;
		expect(end1 == end2 && end1 <= n && b1.total == b2.total && b1.total <= MAX_BODY);
		expect(whole.framing != HEAD_SIZED || end1 == whole.content_length);
		expect(whole.framing != HEAD_NO_BODY || end1 == 0);
		expect(whole.framing != HEAD_CHUNKED || (end1 >= 5 && memcmp(p + end1 - 4, "\r\n\r\n", 4) == 0));
		p += end1;
		n -= end1;
	}
	return 0;
}
