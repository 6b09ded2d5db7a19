/* The rules for a client's WebSocket frames. */
#include "tests/unit/unit.h"

#include "server/frame.h"

#define MAX 1000

struct bytes {
	uint8_t p[70000];
	size_t n;
};

static struct bytes wire, passed, pings;
static struct bytes rest; /* what is on the wire without pings and pongs */

/* Appends a masked frame; `first` is its first byte. */
static void put(uint8_t first, const char *data, size_t n)
{
	static const uint8_t mask[4] = {0x11, 0xE2, 0x73, 0x84};
	uint8_t *p = wire.p + wire.n;
	*p++ = first;
	if (n < 126) {
		*p++ = 0x80 | (uint8_t)n;
	} else {
		*p++ = 0x80 | 126;
		*p++ = (uint8_t)(n >> 8);
		*p++ = (uint8_t)n;
	}
	memcpy(p, mask, 4);
	p += 4;
	for (size_t i = 0; i < n; i++)
		*p++ = (uint8_t)data[i] ^ mask[i & 3];
	size_t at = wire.n;
	wire.n = (size_t)(p - wire.p);
	if (first == 0x89 || first == 0x8A)
		return;
	memcpy(rest.p + rest.n, wire.p + at, wire.n - at);
	rest.n += wire.n - at;
}

static void put_text(uint8_t first, const char *text)
{
	put(first, text, strlen(text));
}

/* Takes p[0..n) as a connection does: false with the reason. What is passed on goes to `passed`, pings to `pings`. */
static bool take(struct frame_check *f, const uint8_t *p, size_t n, struct frame_error *err)
{
	size_t n_held, used;
	while (n && !f->closed) {
		if (!frame_check_quiet(f, false, p, n, &used, err))
			return false;
		p += used;
		n -= used;
		if (f->pinged) {
			memcpy(pings.p + pings.n, f->control, f->n_control);
			pings.n += f->n_control;
			f->pinged = false;
			continue;
		}
		if (n == 0)
			return true;
		if (!frame_check_feed(f, p, n, &n_held, &used, err))
			return false;
		memcpy(passed.p + passed.n, f->held, n_held);
		memcpy(passed.p + passed.n + n_held, p, used);
		passed.n += n_held + used;
		if (used == n || !frame_check_beats(f, p[used]))
			return true;
		p += used;
		n -= used;
	}
	return true;
}

/*
 * The close code that the wire's content earns, in one piece and byte by byte; 0 when it is in order. *frames are
 * counted.
 */
static int verdict(uint64_t *frames)
{
	int codes[2] = {0, 0};
	struct frame_check f;
	for (int slow = 0; slow < 2; slow++) {
		struct frame_error err = {0};
		frame_check_init(&f, MAX);
		size_t step = slow ? 1 : wire.n;
		passed.n = pings.n = 0;
		for (size_t at = 0; at < wire.n; at += step) {
			if (!take(&f, wire.p + at, step, &err)) {
				codes[slow] = err.code;
				assert_non_null(err.reason);
				break;
			}
		}
		/* What is in order passes unchanged, but for pings and pongs; of what is not, no bad header does. */
		assert_memory_equal(passed.p, rest.p, passed.n < rest.n ? passed.n : rest.n);
		if (!codes[slow])
			assert_int_equal(passed.n, rest.n);
	}
	assert_int_equal(codes[0], codes[1]);
	if (frames)
		*frames = f.frames;
	wire.n = rest.n = 0;
	return codes[0];
}

static void put_raw(const char *bytes, size_t n)
{
	memcpy(wire.p + wire.n, bytes, n);
	wire.n += n;
	memcpy(rest.p + rest.n, bytes, n);
	rest.n += n;
}

static void test_messages_pass(void **state)
{
	(void)state;
	uint64_t frames;
	char big[MAX] = {0};
	put_text(0x81, "hello");
	put_text(0x81, "");
	put(0x81, big, MAX);
	put_text(0x89, "ping");
	put_text(0x8A, "");
	assert_int_equal(verdict(&frames), 0);
	assert_int_equal(frames, 5);
}

static void test_fragments_pass_and_control_frames_between_are_told(void **state)
{
	(void)state;
	put_text(0x01, "one ");
	put_text(0x89, "ping");
	put_text(0x00, "two ");
	put_text(0x80, "three");
	put_text(0x81, "next");
	assert_int_equal(verdict(NULL), 0);
	assert_int_equal(pings.n, 4);
	assert_memory_equal(pings.p, "ping", 4);
	/* Each of several, wherever they stand. */
	put_text(0x89, "one");
	put_text(0x89, "two");
	put_text(0x01, "begins ");
	put_text(0x8A, "pong");
	put_text(0x89, "");
	put_text(0x89, "three");
	put_text(0x80, "ends");
	put_text(0x89, "four");
	uint64_t frames;
	assert_int_equal(verdict(&frames), 0);
	assert_int_equal(frames, 8);
	assert_int_equal(pings.n, 15);
	assert_memory_equal(pings.p, "onetwothreefour", 15);
}

static void test_fragments_must_be_in_order(void **state)
{
	(void)state;
	put_text(0x80, "continues nothing");
	assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
	put_text(0x01, "one");
	put_text(0x81, "another");
	assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
	put_text(0x81, "whole");
	put_text(0x80, "continues nothing");
	assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
}

static void test_frames_must_be_masked(void **state)
{
	(void)state;
	put_raw("\x81\x02hi", 4);
	assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
}

static void test_reserved_bits_and_opcodes_are_refused(void **state)
{
	(void)state;
	for (int bit = 0x10; bit <= 0x40; bit <<= 1) {
		put_text((uint8_t)(0x81 | bit), "x");
		assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
	}
	for (uint8_t op = 3; op < 16; op++) {
		if (op >= 8 && op <= 10)
			continue;
		put_text(0x80 | op, "x");
		assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
	}
}

static void test_binary_is_refused(void **state)
{
	(void)state;
	put_text(0x82, "x");
	assert_int_equal(verdict(NULL), WS_UNSUPPORTED_DATA);
}

static void test_control_frames_are_small_and_whole(void **state)
{
	(void)state;
	char data[126] = {0};
	put(0x89, data, 125);
	assert_int_equal(verdict(NULL), 0);
	put(0x89, data, 126);
	assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
	put_text(0x09, "x");
	assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
}

static void test_messages_are_bounded(void **state)
{
	(void)state;
	char big[MAX + 1] = {0};
	put(0x81, big, MAX + 1);
	assert_int_equal(verdict(NULL), WS_TOO_BIG);
	/* The sum of the fragments counts, and a control frame between does not. */
	put(0x01, big, MAX);
	put_text(0x89, "ping");
	put_text(0x80, "x");
	assert_int_equal(verdict(NULL), WS_TOO_BIG);
	/* Announced is enough. */
	put_raw("\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff", 10);
	put_raw("mask", 4);
	assert_int_equal(verdict(NULL), WS_TOO_BIG);
}

static void test_lengths_have_one_encoding(void **state)
{
	(void)state;
	put_raw("\x81\xfe\x00\x7dmask", 8); /* 125 in two bytes */
	assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
	put_raw("\x81\xff\0\0\0\0\0\0\xff\xffmask", 14); /* 65535 in eight */
	assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
	put_raw("\x81\xff\x80\0\0\0\0\0\0\0mask", 14); /* the top bit */
	assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
}

static void test_close_frames_are_proper(void **state)
{
	(void)state;
	static const int good[] = {1000, 1001, 1003, 1007, 1011, 1014, 3000, 4999};
	static const int wrong[] = {0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65535};
	for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
		char data[5] = {(char)(good[i] >> 8), (char)good[i], 'b', 'y', 'e'};
		put(0x88, data, sizeof data);
		assert_int_equal(verdict(NULL), 0);
	}
	for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
		char data[2] = {(char)(wrong[i] >> 8), (char)wrong[i]};
		put(0x88, data, 2);
		assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
	}
	put(0x88, "", 0);
	assert_int_equal(verdict(NULL), 0);
	put(0x88, "\x03", 1);
	assert_int_equal(verdict(NULL), WS_PROTOCOL_ERROR);
	put(0x88, "\x03\xe8\xff", 3);
	assert_int_equal(verdict(NULL), WS_INVALID_PAYLOAD);
}

static void test_headers_pass_whole(void **state)
{
	(void)state;
	struct frame_check f;
	struct frame_error err;
	size_t n_held, used;
	frame_check_init(&f, MAX);
	put_text(0x81, "ab");
	put_text(0x81, "cd");
	/* The first frame, and the second one up to the middle of its mask. */
	assert_true(frame_check_feed(&f, wire.p, 12, &n_held, &used, &err));
	assert_int_equal(n_held, 0);
	assert_int_equal(used, 8);
	assert_true(frame_check_feed(&f, wire.p + 12, wire.n - 12, &n_held, &used, &err));
	assert_int_equal(n_held, 4);
	assert_memory_equal(f.held, wire.p + 8, 4);
	assert_int_equal(used, wire.n - 12);
	wire.n = rest.n = 0;
}

static void test_nothing_follows_a_close(void **state)
{
	(void)state;
	struct frame_check f;
	struct frame_error err;
	size_t n_held, used, n;
	frame_check_init(&f, MAX);
	put(0x88, "\x03\xe8", 2);
	n = wire.n;
	put_text(0x82, "not even looked at");
	assert_true(frame_check_feed(&f, wire.p, wire.n, &n_held, &used, &err));
	assert_int_equal(used, n);
	assert_true(frame_check_feed(&f, wire.p, wire.n, &n_held, &used, &err));
	assert_int_equal(used, 0);
	wire.n = rest.n = 0;
}

/*
 * What frame_check_quiet() takes of the wire, in pieces of `step`: bytes, or -code. Once a piece is not taken whole it
 * is not asked again.
 */
static int quiet(struct frame_check *f, size_t step)
{
	struct frame_error err = {0};
	size_t total = 0, used;
	frame_check_init(f, MAX);
	for (size_t at = 0; at < wire.n; at += step) {
		size_t n = step < wire.n - at ? step : wire.n - at;
		if (!frame_check_quiet(f, true, wire.p + at, n, &used, &err))
			return -err.code;
		total += used;
		if (used < n)
			break;
	}
	return (int)total;
}

static void test_control_frames_can_be_taken_quietly(void **state)
{
	(void)state;
	struct frame_check f;
	struct frame_error err;
	size_t n_held, used;
	put(0x8A, "", 0);
	put_text(0x8A, "of some length");
	size_t pongs = wire.n;
	put_text(0x81, "a message is for others");
	size_t message = wire.n - pongs;
	for (size_t step = 1; step <= wire.n; step++) {
		assert_int_equal(quiet(&f, step), pongs);
		assert_int_equal(f.frames, 2);
		assert_true(frame_check_at_rest(&f));
		assert_true(frame_check_feed(&f, wire.p + pongs, message, &n_held, &used, &err));
		assert_int_equal(used, message);
	}
	wire.n = pongs - 1;
	assert_int_equal(quiet(&f, 1), pongs - 1);
	assert_true(f.quiet && !frame_check_at_rest(&f));

	/* A close frame whose header has not all come when somebody is behind again can still be passed on. */
	wire.n = rest.n = 0;
	put(0x88, "", 0);
	assert_true(frame_check_quiet((frame_check_init(&f, MAX), &f), true, wire.p, 4, &used, &err));
	assert_int_equal(used, 4);
	assert_false(f.quiet);
	assert_true(frame_check_quiet(&f, false, wire.p + 4, 2, &used, &err));
	assert_int_equal(used, 0);
	assert_true(frame_check_feed(&f, wire.p + 4, 2, &n_held, &used, &err));
	assert_int_equal(n_held, 4);
	assert_memory_equal(f.held, wire.p, 4);
	assert_int_equal(used, 2);

	wire.n = rest.n = 0;
	put(0x8A, "", 0);
	put(0x88, "\x03\xe9""bye", 5);
	size_t closed = wire.n;
	put_text(0x81, "not looked at");
	for (size_t step = 1; step <= wire.n; step++) {
		assert_int_equal(quiet(&f, step), closed);
		assert_true(f.closed && !frame_check_at_rest(&f));
		assert_int_equal(f.n_control, 5);
		assert_memory_equal(f.control, "\x03\xe9""bye", 5);
	}
	wire.n = rest.n = 0;
}

static void test_quiet_frames_have_the_same_rules(void **state)
{
	(void)state;
	struct frame_check f;
	static const struct {
		const char *p;
		size_t n;
		int code;
	} bad[] = {
		{"\x8a\x00", 2, WS_PROTOCOL_ERROR},				/* not masked */
		{"\x8a\xfe\x00\x7e", 4, WS_PROTOCOL_ERROR},			/* too long */
		{"\x88\x81\0\0\0\0\x03", 7, WS_PROTOCOL_ERROR},		/* half a code */
		{"\x88\x82\0\0\0\0\x03\xed", 8, WS_PROTOCOL_ERROR},		/* 1005 */
		{"\x88\x83\0\0\0\0\x03\xe8\xff", 9, WS_INVALID_PAYLOAD},
	};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		for (size_t step = 1; step <= bad[i].n; step++) {
			put_raw(bad[i].p, bad[i].n);
			assert_int_equal(quiet(&f, step), -bad[i].code);
			wire.n = rest.n = 0;
		}
	}
	/* Other frames are not looked at here, right or wrong. */
	for (int first = 0; first < 256; first++) {
		char byte = (char)first;
		if (first == 0x8A || first == 0x88 || first == 0x89)
			continue;
		put_raw(&byte, 1);
		assert_int_equal(quiet(&f, 1), 0);
		assert_true(frame_check_at_rest(&f));
		wire.n = rest.n = 0;
	}
}

static void test_control_frames_are_written(void **state)
{
	(void)state;
	uint8_t out[2 + FRAME_MAX_CONTROL];
	char reason[200] = "";
	assert_int_equal(frame_put_control(out, FRAME_PING, NULL, 0), 2);
	assert_memory_equal(out, "\x89\x00", 2);
	assert_int_equal(frame_put_close(out, 1012, NULL), 4);
	assert_memory_equal(out, "\x88\x02\x03\xf4", 4);
	assert_int_equal(frame_put_close(out, 1000, "bye"), 7);
	assert_memory_equal(out, "\x88\x05\x03\xe8""bye", 7);
	/* 41 characters of three bytes are 123; with one byte before them the last does not fit whole. */
	for (int i = 0; i < 45; i++)
		strcat(reason, "\xe2\x82\xac");
	assert_int_equal(frame_put_close(out, 1000, reason), 2 + 2 + 123);
	memmove(reason + 1, reason, 150);
	reason[0] = 'x';
	assert_int_equal(frame_put_close(out, 1000, reason), 2 + 2 + 121);
}

UNIT_MAIN(cmocka_unit_test(test_messages_pass),
	  cmocka_unit_test(test_fragments_pass_and_control_frames_between_are_told),
	  cmocka_unit_test(test_fragments_must_be_in_order), cmocka_unit_test(test_frames_must_be_masked),
	  cmocka_unit_test(test_reserved_bits_and_opcodes_are_refused), cmocka_unit_test(test_binary_is_refused),
	  cmocka_unit_test(test_control_frames_are_small_and_whole), cmocka_unit_test(test_messages_are_bounded),
	  cmocka_unit_test(test_lengths_have_one_encoding), cmocka_unit_test(test_close_frames_are_proper),
	  cmocka_unit_test(test_headers_pass_whole), cmocka_unit_test(test_nothing_follows_a_close),
	  cmocka_unit_test(test_control_frames_can_be_taken_quietly),
	  cmocka_unit_test(test_quiet_frames_have_the_same_rules), cmocka_unit_test(test_control_frames_are_written))
