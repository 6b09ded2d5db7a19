/* A client's bounded output queue. */
#include "tests/unit/unit.h"

#include "server/stream.h"

static void test_pieces_come_out_as_they_went_in(void **state)
{
	(void)state;
	struct stream s;
	char out[16];
	stream_init(&s, 100, 0);
	assert_int_equal(stream_push(&s, "one", 3), STATUS_OK);
	assert_int_equal(stream_push(&s, "", 0), STATUS_OK);
	assert_int_equal(stream_push(&s, "four", 4), STATUS_OK);
	assert_int_equal(s.pending, 7);

	/* Never two pieces in one. */
	assert_int_equal(stream_take(&s, out, sizeof out), 3);
	assert_memory_equal(out, "one", 3);
	assert_int_equal(stream_take(&s, out, 3), 3);
	assert_memory_equal(out, "fou", 3);
	assert_int_equal(stream_take(&s, out, sizeof out), 1);
	assert_int_equal(out[0], 'r');
	assert_int_equal(stream_take(&s, out, sizeof out), 0);
	assert_int_equal(s.pending, 0);
}

static void test_the_limit_holds(void **state)
{
	(void)state;
	struct stream s;
	char data[100] = {0}, out[100];
	stream_init(&s, 100, 0);
	assert_int_equal(stream_push(&s, data, 60), STATUS_OK);
	assert_int_equal(stream_push(&s, data, 41), STATUS_LIMIT);
	assert_int_equal(s.pending, 60);
	assert_int_equal(stream_push(&s, data, 40), STATUS_OK);
	assert_int_equal(stream_push(&s, data, 1), STATUS_LIMIT);
	/* What was sent makes room. */
	assert_int_equal(stream_take(&s, out, 10), 10);
	assert_int_equal(stream_push(&s, data, 10), STATUS_OK);
	stream_clear(&s);
	assert_int_equal(s.pending, 0);
	assert_int_equal(stream_push(&s, data, 100), STATUS_OK);
	stream_clear(&s);
}

static void test_one_large_piece_passes_an_empty_queue(void **state)
{
	(void)state;
	struct stream s;
	char data[500] = {0};
	stream_init(&s, 100, 0);
	assert_int_equal(stream_push(&s, data, 500), STATUS_OK);
	assert_int_equal(stream_push(&s, data, 1), STATUS_LIMIT);
	stream_consume(&s, 450);
	assert_int_equal(stream_push(&s, data, 1), STATUS_OK);
	stream_clear(&s);
}

static void test_headroom_is_writable(void **state)
{
	(void)state;
	struct stream s;
	size_t n;
	stream_init(&s, 100, 16);
	assert_int_equal(stream_push(&s, "abc", 3), STATUS_OK);
	char *p = stream_front(&s, &n);
	assert_int_equal(n, 3);
	memset(p - 16, 'h', 16); /* ASan watches */
	assert_memory_equal(p, "abc", 3);
	stream_consume(&s, 3);
	assert_null(stream_front(&s, &n));
	assert_int_equal(n, 0);
}

UNIT_MAIN(cmocka_unit_test(test_pieces_come_out_as_they_went_in), cmocka_unit_test(test_the_limit_holds),
	  cmocka_unit_test(test_one_large_piece_passes_an_empty_queue), cmocka_unit_test(test_headroom_is_writable))
