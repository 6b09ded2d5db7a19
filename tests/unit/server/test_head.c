/* The rules for a request's head and its body's framing: what has one reading passes, all else is refused. */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "server/head.h"

#define GET  "GET /health/live HTTP/1.1\r\nHost: a\r\n"
#define POST "POST /tokenize HTTP/1.1\r\nHost: a\r\n"

static struct head_error last;

static enum head_result feed(struct head *h, const char *text, size_t n)
{
	head_init(h);
	return head_feed(h, text, n, 4096, &last);
}

/* The status with which a head is refused; 0 when it passes; -1 when it wants more. */
static int verdict_n(const char *text, size_t n)
{
	struct head h;
	enum head_result r = feed(&h, text, n);

	/* Fed byte by byte, the verdict is the same. */
	struct head slow;
	struct head_error err = {0};
	enum head_result s = HEAD_MORE;
	head_init(&slow);
	for (size_t i = 1; i <= n && s == HEAD_MORE; i++)
		s = head_feed(&slow, text, i, 4096, &err);
	assert_int_equal(s, r);
	if (r == HEAD_BAD) {
		assert_int_equal(err.status, last.status);
		assert_string_equal(err.message, last.message);
	} else if (r == HEAD_DONE) {
		assert_int_equal(slow.length, h.length);
	}
	return r == HEAD_DONE ? 0 : r == HEAD_BAD ? last.status : -1;
}

static int verdict(const char *text)
{
	return verdict_n(text, strlen(text));
}

static struct head parsed(const char *text)
{
	struct head h;
	assert_int_equal(feed(&h, text, strlen(text)), HEAD_DONE);
	return h;
}

static void test_plain_requests_pass(void **state)
{
	(void)state;
	struct head h = parsed(GET "\r\nnext");
	assert_int_equal(h.length, strlen(GET "\r\n"));
	assert_int_equal(h.method, HTTP_GET);
	assert_true(h.is_http11);
	assert_true(h.keep_alive);
	assert_int_equal(h.framing, HEAD_NO_BODY);

	h = parsed(POST "Content-Length: 15\r\n\r\n");
	assert_int_equal(h.framing, HEAD_SIZED);
	assert_int_equal(h.content_length, 15);

	h = parsed(POST "Transfer-Encoding: CHUNKED\r\n\r\n");
	assert_int_equal(h.framing, HEAD_CHUNKED);

	assert_int_equal(verdict(POST "Content-Length: 0\r\n\r\n"), 0);
	assert_int_equal(verdict("GET http://a/b HTTP/1.1\r\nHost: a\r\n\r\n"), 0);
	assert_int_equal(verdict("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n"), 0);
	assert_int_equal(verdict("GET / HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n"), 0);
	assert_int_equal(verdict("GET / HTTP/1.1\r\nHost:\r\n\r\n"), 0);
	assert_int_equal(verdict(GET "X: \t y z \t\xc3\xa9 \r\n\r\n"), 0);
	assert_int_equal(verdict(GET), -1);
	assert_int_equal(verdict(GET "\r"), -1);
}

static void test_connections_persist_as_asked(void **state)
{
	(void)state;
	assert_false(parsed(GET "Connection: close\r\n\r\n").keep_alive);
	assert_false(parsed(GET "Connection: keep-alive, CLOSE\r\n\r\n").keep_alive);
	assert_false(parsed(GET "Connection: x\r\nConnection: close\r\n\r\n").keep_alive);
	assert_true(parsed(GET "Connection: closed\r\n\r\n").keep_alive);
	assert_false(parsed("GET / HTTP/1.0\r\n\r\n").keep_alive);
	assert_true(parsed("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n").keep_alive);
}

static void test_continue_is_noted(void **state)
{
	(void)state;
	assert_true(parsed(POST "Content-Length: 5\r\nExpect: 100-Continue\r\n\r\n").expects_continue);
	assert_false(parsed(GET "Expect: 100-continue\r\n\r\n").expects_continue);
	assert_int_equal(verdict(POST "Content-Length: 5\r\nExpect: tea\r\n\r\n"), 417);
}

#define UPGRADE GET "Connection: keep-alive, Upgrade\r\n"
#define WS_KEY	"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"

static void test_websocket_upgrades_are_recognised(void **state)
{
	(void)state;
	struct head h = parsed(UPGRADE "Upgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n" WS_KEY "\r\n");
	assert_true(h.wants_websocket);
	assert_true(h.ws_version_ok);
	assert_string_equal(h.ws_key, "dGhlIHNhbXBsZSBub25jZQ==");

	assert_false(parsed(UPGRADE "Upgrade: h2c\r\n\r\n").wants_websocket);
	assert_false(parsed(UPGRADE "Upgrade: h2c, websocket\r\n\r\n").wants_websocket);
	assert_false(parsed(UPGRADE "Upgrade: websocket\r\nUpgrade: h2c\r\n\r\n").wants_websocket);
	assert_false(parsed(GET "Upgrade: websocket\r\n\r\n").wants_websocket);
	assert_false(parsed(UPGRADE "Upgrade: websocket\r\nContent-Length: 5\r\n\r\n").wants_websocket);
	assert_false(parsed(UPGRADE "Upgrade: websocket\r\nSec-WebSocket-Version: 12\r\n\r\n").ws_version_ok);

	static const char *const keys[] = {"", "short", "dGhlIHNhbXBsZSBub25jZQ=A",
					   "dGhlIHNhbXBsZSBub25j\"Q==", "dGhlIHNhbXBsZSBub25jZQ==="};
	for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
		char text[512];
		snprintf(text, sizeof text, UPGRADE "Upgrade: websocket\r\nSec-WebSocket-Key: %s\r\n\r\n", keys[i]);
		assert_string_equal(parsed(text).ws_key, "");
	}
}

static void test_two_readings_of_the_length_are_refused(void **state)
{
	(void)state;
	static const struct {
		const char *fields;
		int status;
	} cases[] = {
		{"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", 400},
		{"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n", 400},
		{"Content-Length: 15\r\nContent-Length: 16\r\n", 400},
		{"Content-Length: 15\r\nContent-Length: 15\r\n", 400},
		{"Content-Length: 15, 15\r\n", 400},
		{"Content-Length: +15\r\n", 400},
		{"Content-Length: -1\r\n", 400},
		{"Content-Length: 0x0f\r\n", 400},
		{"Content-Length: \r\n", 400},
		{"Content-Length: 1 5\r\n", 400},
		{"Content-Length: 9223372036854775808\r\n", 400},
		{"Content-Length: 18446744073709551631\r\n", 400},
		{"Content-Length : 15\r\n", 400},
		{"Content-Length\t: 15\r\n", 400},
		{"Transfer-Encoding: xchunked\r\n", 501},
		{"Transfer-Encoding: identity\r\n", 501},
		{"Transfer-Encoding: gzip, chunked\r\n", 501},
		{"Transfer-Encoding: chunked, chunked\r\n", 501},
		{"Transfer-Encoding: \"chunked\"\r\n", 501},
		{"Transfer-Encoding: \x0b"
		 "chunked\r\n",
		 400},
		{"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", 400},
		{"Transfer-Encoding:\r\n", 501},
		{"Content-Length: 5\r\n Transfer-Encoding: chunked\r\n", 400},
	};
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		char text[512];
		snprintf(text, sizeof text, POST "%s\r\n", cases[i].fields);
		int status = verdict(text);
		if (status != cases[i].status)
			fail_msg("%s: %d, not %d", cases[i].fields, status, cases[i].status);
	}
	assert_int_equal(verdict("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), 400);
}

static void test_malformed_heads_are_refused(void **state)
{
	(void)state;
	static const struct {
		const char *text;
		int status;
	} cases[] = {
		{"\r\n", 400},
		{"GET\r\n", 400},
		{"GET /\r\n", 400},
		{"GET  / HTTP/1.1\r\n", 400},
		{"GET /  HTTP/1.1\r\n", 400},
		{"GET / HTTP/1.1 \r\n", 400},
		{"GET / http/1.1\r\n", 400},
		{"GET / HTTP/1.12\r\n", 400},
		{"GET / HTTP/2.0\r\n", 505},
		{"GET / HTTP/1.2\r\n", 505},
		{"GET / HTTP/0.9\r\n", 505},
		{"PRI * HTTP/2.0\r\n", 505},
		{"FOO / HTTP/1.1\r\n", 501},
		{"get / HTTP/1.1\r\n", 501},
		{"CONNECT a:80 HTTP/1.1\r\n", 501},
		{"G@T / HTTP/1.1\r\n", 400},
		{"G\x01T / HTTP/1.1\r\n", 400},
		{"GET /\x7f HTTP/1.1\r\n", 400},
		{"GET /\xc3\xa9 HTTP/1.1\r\n", 400},
		{"GET /a%00b HTTP/1.1\r\n", 400},
		{"GET a HTTP/1.1\r\n", 400},
		{"GET * HTTP/1.1\r\n", 400},
		{"GET ftp://a/ HTTP/1.1\r\n", 400},
		{"GET /health/live HTTP/1.1\r\n\r\n", 400}, /* no Host */
		{GET "Host: b\r\n\r\n", 400},
		{GET "host: a\r\n\r\n", 400},
		{"GET / HTTP/1.1\r\nHost: a b\r\n", 400},
		{"GET / HTTP/1.1\r\nHost: a/b\r\n", 400},
		{"GET / HTTP/1.1\r\nHost: u@a\r\n", 400},
		{"GET / HTTP/1.1\r\n X: y\r\n", 400},
		{GET "X: y\r\n z\r\n", 400},
		{GET "X: y\r\n\tz\r\n", 400},
		{GET "Xy\r\n", 400},
		{GET ": y\r\n", 400},
		{GET "X y: z\r\n", 400},
		{GET "X\xc3\xa9: z\r\n", 400},
		{GET "X: y\rz: q\r\n", 400},
		{GET "X: y\nz: q\r\n", 400},
		{GET "\n", 400},
		{GET "X: y\x7f\r\n", 400},
		{"GET / HTTP/1.1\nHost: a\n\n", 400},
		{"\x16\x03\x01", 400}, /* a TLS hello is refused by its first byte */
	};
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		int status = verdict(cases[i].text);
		if (status != cases[i].status)
			fail_msg("%s: %d, not %d", cases[i].text, status, cases[i].status);
	}
	assert_int_equal(verdict_n(GET "X: y\0z\r\n\r\n", sizeof GET + 10), 400);
}

static void test_heads_are_bounded(void **state)
{
	(void)state;
	char big[8192];
	int n = snprintf(big, sizeof big, GET "X: ");
	memset(big + n, 'y', sizeof big - (size_t)n);
	assert_int_equal(verdict_n(big, sizeof big), 431);
	assert_int_equal(verdict_n(big, 4096), -1);

	/* Headers, query arguments and cookies count alike. */
	static const char *const many[][3] = {
		{GET, "X: y\r\n", ""},
		{"GET /?a", "&b", " HTTP/1.1\r\nHost: a\r\n\r\n"},
		{GET "Cookie: a", ";b", "\r\n\r\n"},
	};
	for (size_t i = 0; i < 3; i++) {
		n = snprintf(big, sizeof big, "%s", many[i][0]);
		for (int k = 0; k < HEAD_MAX_FIELDS; k++)
			n += snprintf(big + n, sizeof big - (size_t)n, "%s", many[i][1]);
		snprintf(big + n, sizeof big - (size_t)n, "%s", many[i][2]);
		assert_int_equal(verdict(big), 431);
	}
}

/* ---- Bodies ---- */

#define MAX_BODY 100

/* Feeds a chunked body in pieces of `step`. *used is where it ended. */
static enum head_result chunked(const char *text, size_t step, size_t *used)
{
	struct head h = parsed(POST "Transfer-Encoding: chunked\r\n\r\n");
	struct body b;
	enum head_result r = body_init(&b, &h, MAX_BODY, &last);
	size_t n = strlen(text), at = 0;
	while (r == HEAD_MORE && at < n) {
		size_t u, take = n - at < step ? n - at : step;
		r = body_feed(&b, text + at, take, &u, &last);
		at += u;
	}
	*used = at;
	return r;
}

static void test_chunked_bodies(void **state)
{
	(void)state;
	static const struct {
		const char *text;
		enum head_result result;
	} cases[] = {
		{"f\r\n{\"content\":\"A\"}\r\n0\r\n\r\n", HEAD_DONE},
		{"F;a=b;c=\"d\"\r\n{\"content\":\"A\"}\r\n0;x\r\n\r\n", HEAD_DONE},
		{"000f\r\n{\"content\":\"A\"}\r\n000\r\nX: y\r\nZ:\r\n\r\n", HEAD_DONE},
		{"1\r\nA\r\n1\r\nB\r\n0\r\n\r\n", HEAD_DONE},
		{"0\r\n\r\n", HEAD_DONE},
		{"5\r\nabc", HEAD_MORE},
		{"0\r\n\r", HEAD_MORE},
		{"0xf\r\n", HEAD_BAD},
		{"+f\r\n", HEAD_BAD},
		{"-1\r\n", HEAD_BAD},
		{"\r\n", HEAD_BAD},
		{";a\r\n", HEAD_BAD},
		{" f\r\n", HEAD_BAD},
		{"f \r\n", HEAD_BAD},
		{"f\n", HEAD_BAD},
		{"1\r\nAB\r\n", HEAD_BAD},
		{"1\r\nA\n", HEAD_BAD},
		{"1\r\nA\rx", HEAD_BAD},
		{"f;a\x01\r\n", HEAD_BAD},
		{"f;a\rb", HEAD_BAD},
		{"0\r\nX y: z\r\n", HEAD_BAD},
		{"1;a=\"b; c\\\"\\\\\";d=\"\"\r\nA\r\n0\r\n\r\n", HEAD_DONE},
		{"1;a=\"\r\nA\r\n0\r\n\r\n", HEAD_BAD},
		{"1;a=\"b\\\"\r\nA\r\n0\r\n\r\n", HEAD_BAD},
		{"1;a=\\\"\r\nA\r\n0\r\n\r\n", HEAD_BAD},
		{"0\r\nX\r\n", HEAD_BAD},
		{"0\r\n: y\r\n", HEAD_BAD},
		{"0\r\n folded\r\n", HEAD_BAD},
		{"0\r\nX: y\nZ: y\r\n", HEAD_BAD},
	};
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		size_t used[3], steps[3] = {1, 3, 1000};
		for (int s = 0; s < 3; s++) {
			enum head_result r = chunked(cases[i].text, steps[s], &used[s]);
			if (r != cases[i].result)
				fail_msg("%s by %zu: %d, not %d", cases[i].text, steps[s], r, cases[i].result);
			if (r == HEAD_DONE)
				assert_int_equal(used[s], strlen(cases[i].text));
		}
	}
	/* What follows is the next request's. */
	size_t used;
	assert_int_equal(chunked("0\r\n\r\nGET / HTTP/1.1\r\n", 1000, &used), HEAD_DONE);
	assert_int_equal(used, 5);
}

static void test_bodies_are_bounded(void **state)
{
	(void)state;
	struct head h = parsed(POST "Content-Length: 101\r\n\r\n");
	struct body b;
	assert_int_equal(body_init(&b, &h, MAX_BODY, &last), HEAD_BAD);
	assert_int_equal(last.status, 413);
	h.content_length = 100;
	assert_int_equal(body_init(&b, &h, MAX_BODY, &last), HEAD_MORE);

	size_t used;
	assert_int_equal(chunked("65\r\n", 1000, &used), HEAD_BAD); /* 101: refused before its data */
	assert_int_equal(last.status, 413);
	assert_int_equal(chunked("ffffffffffffffff\r\n", 1000, &used), HEAD_BAD);
	assert_int_equal(last.status, 413);
	assert_int_equal(chunked("1000000000000000f\r\n", 1000, &used), HEAD_BAD);
	assert_int_equal(last.status, 413);
	assert_int_equal(chunked("1\r\nA\r\n64\r\n", 1000, &used), HEAD_BAD); /* 1 + 100 */
	assert_int_equal(last.status, 413);

	/* Extensions and trailers cannot go on for ever. */
	char long_extension[BODY_MAX_OVERHEAD + 16] = "1;";
	memset(long_extension + 2, 'a', sizeof long_extension - 3);
	long_extension[sizeof long_extension - 1] = '\0';
	assert_int_equal(chunked(long_extension, 1000, &used), HEAD_BAD);
	assert_int_equal(last.status, 400);
}

static void test_sized_bodies_end_where_they_should(void **state)
{
	(void)state;
	struct head h = parsed(POST "Content-Length: 5\r\n\r\n");
	struct body b;
	size_t used;
	assert_int_equal(body_init(&b, &h, MAX_BODY, &last), HEAD_MORE);
	assert_int_equal(body_feed(&b, "abc", 3, &used, &last), HEAD_MORE);
	assert_int_equal(used, 3);
	assert_int_equal(body_feed(&b, "deGET", 5, &used, &last), HEAD_DONE);
	assert_int_equal(used, 2);

	h = parsed(GET "\r\n");
	assert_int_equal(body_init(&b, &h, MAX_BODY, &last), HEAD_DONE);
}

UNIT_MAIN(cmocka_unit_test(test_plain_requests_pass), cmocka_unit_test(test_connections_persist_as_asked),
	  cmocka_unit_test(test_continue_is_noted), cmocka_unit_test(test_websocket_upgrades_are_recognised),
	  cmocka_unit_test(test_two_readings_of_the_length_are_refused),
	  cmocka_unit_test(test_malformed_heads_are_refused), cmocka_unit_test(test_heads_are_bounded),
	  cmocka_unit_test(test_chunked_bodies), cmocka_unit_test(test_bodies_are_bounded),
	  cmocka_unit_test(test_sized_bodies_end_where_they_should))
