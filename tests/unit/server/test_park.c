/*
 * Parked WebSockets: the real connection, HTTP and WebSocket servers on a loop, a socket pair as the client's
 * connection, and a clock that stands still unless it is told not to. See server/conn_park.h.
 */
#include "tests/unit/unit.h"

#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "server/conn.h"
#include "server/conn_park.h"
#include "server/frame.h"
#include "server/ws_server.h"

enum { PARK_AFTER = 5000, TURNS = 30 };

struct world {
	uv_loop_t loop;
	struct config config;
	struct conn_host host;
	struct clock clock;
	int n_closed; /* handles and servers, at the end */
	struct ws_conn *ws; /* the latest that opened */
	int opened, closed, alive;
};

static struct world w;

static const struct route route = {HTTP_GET, "/ws", NULL, ROUTE_WEBSOCKET | ROUTE_OPEN};

static const struct route *dispatch(struct http_exchange *x, void *app)
{
	(void)x;
	(void)app;
	return &route;
}

static const char *error_body(struct buf *out, int status, const char *code, const char *message)
{
	(void)message;
	buf_printf(out, "%d %s", status, code);
	return "text/plain";
}

static void on_opened(struct ws_conn *c, void *app)
{
	(void)app;
	w.opened++;
	w.ws = c;
}

static void on_message(struct ws_conn *c, struct str text, void *app)
{
	(void)app;
	ws_send(c, text.p, text.n);
}

static void on_alive(struct ws_conn *c, void *app)
{
	(void)c;
	(void)app;
	w.alive++;
}

static void on_closed(struct ws_conn *c, void *app)
{
	(void)app;
	w.closed++;
	if (w.ws == c)
		w.ws = NULL;
}

static const struct http_app http = {.dispatch = dispatch, .error_body = error_body};
static const struct ws_app ws_app = {
	.opened = on_opened, .message = on_message, .alive = on_alive, .closed = on_closed};

static int set_up(void **state)
{
	(void)state;
	struct error err;
	memset(&w, 0, sizeof w);
	log_set_level(LOG_OFF);
	w.config.max_body = w.config.stream_buffer = 1 << 20;
	w.config.max_header = 8192;
	w.config.max_client_memory = 1 << 30;
	w.config.max_connections = 16;
	w.config.header_timeout = w.config.body_timeout = w.config.idle_timeout = 600000;
	w.config.ws_ping_interval = w.config.ws_ping_timeout = 600000;
	w.config.ws_park_after = PARK_AFTER;
	assert_int_equal(uv_loop_init(&w.loop), 0);
	conn_host_init(&w.host, &w.loop, &w.config);
	clock_manual_init(&w.clock, 1000000000);
	w.host.clock = &w.clock;
	assert_int_equal(http_server_create(&w.loop, &w.config, &http, &w.host.meter, &w.host.http, &err), STATUS_OK);
	assert_int_equal(ws_server_create(&w.loop, &w.config, &ws_app, &w.host.stats, &w.host.meter, &w.host.ws, &err),
	                 STATUS_OK);
	return 0;
}

static void on_handle_closed(uv_handle_t *handle)
{
	(void)handle;
	w.n_closed++;
}

static void on_server_closed(void *arg)
{
	(void)arg;
	w.n_closed++;
}

static int tear_down(void **state)
{
	(void)state;
	conn_close_all(&w.host);
	conn_park_host_close(&w.host, on_handle_closed);
	ws_server_close(w.host.ws, on_server_closed, NULL);
	while (w.host.n_conns)
		uv_run(&w.loop, UV_RUN_NOWAIT);
	http_server_close(w.host.http, on_server_closed, NULL);
	while (w.n_closed < PARK_HANDLES + 2)
		uv_run(&w.loop, UV_RUN_NOWAIT);
	uv_run(&w.loop, UV_RUN_DEFAULT);
	assert_int_equal(uv_loop_close(&w.loop), 0);
	/* Whoever was told that it opened was told that it closed, and nothing is left. */
	assert_int_equal(w.opened, w.closed);
	assert_int_equal(w.host.n_pairs, 0);
	assert_int_equal(w.host.n_parked, 0);
	assert_int_equal(w.host.meter.bytes, 0);
	return 0;
}

static void turn(void)
{
	for (int i = 0; i < TURNS; i++)
		uv_run(&w.loop, UV_RUN_NOWAIT);
}

static void pass_ms(int64_t ms)
{
	turn();
	clock_advance(&w.clock, ms * 1000000);
	conn_park_run(&w.host);
	turn();
}

/* ---- The client ---- */

static void say(int fd, const char *p, size_t n)
{
	assert_int_equal(send(fd, p, n, MSG_NOSIGNAL), n);
}

/* A frame whose mask is zero, which the rules allow. */
static void say_frame(int fd, int first, const char *text, size_t n)
{
	char frame[6 + 125] = {(char)first, (char)(0x80 | n), 0, 0, 0, 0};
	assert_true(n <= 125);
	memcpy(frame + 6, text, n);
	say(fd, frame, 6 + n);
}

/* What has come within some turns of the loop; "END" at its end when the connection has ended. */
static const char *heard(int fd)
{
	static char out[4096];
	size_t n = 0;
	for (int i = 0; i < 10; i++) {
		turn();
		ssize_t r = recv(fd, out + n, sizeof out - n - 4, MSG_DONTWAIT);
		if (r > 0)
			n += (size_t)r;
		if (r == 0) {
			memcpy(out + n, "END", 3);
			n += 3;
			break;
		}
	}
	out[n] = '\0';
	return out;
}

static int connect_client(void)
{
	static const char upgrade[] =
		"GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";
	int fds[2];
	const struct conn_peer peer = {.name = "a client"};
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
	assert_int_equal(conn_open(&w.host, fds[0], &peer, false), STATUS_OK);
	say(fds[1], upgrade, sizeof upgrade - 1);
	assert_non_null(strstr(heard(fds[1]), "HTTP/1.1 101 "));
	assert_non_null(w.ws);
	return fds[1];
}

static int connect_and_park(void)
{
	int fd = connect_client();
	pass_ms(PARK_AFTER);
	assert_int_equal(w.host.n_parked, 1);
	assert_int_equal(w.host.n_pairs, 0);
	return fd;
}

/* ---- Parking ---- */

static void silence_parks(void **state)
{
	(void)state;
	int fd = connect_client();
	size_t awake = (size_t)w.host.meter.bytes;
	pass_ms(PARK_AFTER - 1);
	assert_int_equal(w.host.n_parked, 0);
	pass_ms(1);
	assert_int_equal(w.host.n_parked, 1);
	assert_int_equal(w.host.n_pairs, 0);
	assert_true(w.host.meter.bytes < (int64_t)awake - 4096);
	assert_int_equal(ws_server_count(w.host.ws), 1);
	assert_int_equal(w.closed, 0);
	close(fd);
	turn();
	assert_int_equal(w.closed, 1);
}

static void heartbeats_are_silence(void **state)
{
	(void)state;
	int fd = connect_client(), alive = w.alive;
	for (int i = 0; i < 5; i++) {
		say_frame(fd, 0x8A, "pong", 4);
		pass_ms(PARK_AFTER / 5);
	}
	assert_int_equal(w.host.n_parked, 1);
	for (int i = 0; i < 5; i++) {
		say_frame(fd, 0x8A, "pong", (size_t)i);
		turn();
	}
	assert_int_equal(w.host.n_parked, 1);
	assert_int_equal(w.alive, alive + 10);
	close(fd);
}

static void anything_else_keeps_it_awake(void **state)
{
	(void)state;
	int fd = connect_client();
	for (int i = 0; i < 3; i++) {
		pass_ms(PARK_AFTER - 1);
		say_frame(fd, 0x89, "ping", 4);
		assert_string_equal(heard(fd), "\x8a\x04ping");
		pass_ms(PARK_AFTER - 1);
		ws_send(w.ws, "news", 4);
		assert_string_equal(heard(fd), "\x81\x04news");
	}
	assert_int_equal(w.host.n_parked, 0);
	/* A frame, or a message of several, that has begun: however long ago. */
	say(fd, "\x01\x82\0\0", 4);
	pass_ms(PARK_AFTER * 3);
	say(fd, "\0\0he", 4);
	pass_ms(PARK_AFTER * 3);
	assert_int_equal(w.host.n_parked, 0);
	say_frame(fd, 0x80, "llo", 3);
	assert_string_equal(heard(fd), "\x81\x05hello");
	pass_ms(PARK_AFTER);
	assert_int_equal(w.host.n_parked, 1);
	close(fd);
}

static void zero_means_never(void **state)
{
	(void)state;
	w.config.ws_park_after = 0;
	int fd = connect_client();
	pass_ms(3600000);
	conn_park_make_room(&w.host);
	assert_int_equal(w.host.n_parked, 0);
	close(fd);
}

/* ---- Waking ---- */

static void each_cause_wakes(void **state)
{
	(void)state;
	int fd = connect_and_park();
	for (int cause = 0; cause < 3; cause++) {
		if (cause == 0) {
			say_frame(fd, 0x81, "hello", 5);
			assert_string_equal(heard(fd), "\x81\x05hello");
		} else if (cause == 1) {
			assert_int_equal(ws_send(w.ws, "first", 5), STATUS_OK);
			assert_int_equal(ws_send(w.ws, "second", 6), STATUS_OK);
			assert_string_equal(heard(fd), "\x81\x05" "first\x81\x06second");
		} else { /* byte by byte, behind a pong */
			static const char bytes[] = "\x8a\x81\0\0\0\0x\x81\x82\0\0\0\0hi";
			for (size_t i = 0; i < sizeof bytes - 1; i++) {
				say(fd, bytes + i, 1);
				turn();
			}
			assert_string_equal(heard(fd), "\x81\x02hi");
		}
		assert_int_equal(w.host.n_parked, 0);
		assert_int_equal(w.host.n_pairs, 1);
		pass_ms(PARK_AFTER);
		assert_int_equal(w.host.n_parked, 1);
		assert_int_equal(w.host.n_pairs, 0);
	}
	assert_int_equal(w.opened, 1);
	assert_int_equal(w.closed, 0);
	close(fd);
}

/* Pings and closes need nobody behind the pair, and so no descriptor. */
static void pings_and_closes_do_not_wake(void **state)
{
	(void)state;
	int fd = connect_and_park();
	w.host.max_pairs = 0;
	say_frame(fd, 0x89, "a ping", 6);
	say_frame(fd, 0x89, "", 0);
	assert_string_equal(heard(fd), "\x8a\x06"
				       "a ping\x8a");
	assert_int_equal(w.host.n_parked, 1);
	say_frame(fd, 0x88, "\x0f\xa1" "bye", 5);
	assert_string_equal(heard(fd), "\x88\x05\x0f\xa1" "byeEND");
	assert_int_equal(w.closed, 1);
	close(fd);
	w.host.max_pairs = 16;

	fd = connect_and_park();
	w.host.max_pairs = 0;
	ws_close(w.ws, 1012, "restart");
	assert_string_equal(heard(fd), "\x88\x09\x03\xf4restart");
	assert_int_equal(w.host.n_parked, 0);
	assert_int_equal(w.closed, 1); /* the client has not answered yet */
	assert_int_equal(ws_send(w.ws, "too late", 8), STATUS_CANCELLED);
	say_frame(fd, 0x81, "begun before", 12);
	say_frame(fd, 0x88, "\x03\xf4", 2);
	assert_string_equal(heard(fd), "END");
	assert_int_equal(w.closed, 2);
	close(fd);
	w.host.max_pairs = 16;

	fd = connect_and_park();
	w.host.max_pairs = 0;
	say(fd, "\x81\x01x", 3); /* not masked */
	const char *got = heard(fd);
	assert_memory_equal(got, "\x88", 1);
	assert_memory_equal(got + 2, "\x03\xea", 2);
	assert_int_equal(w.closed, 3);
	close(fd);
}

static void without_room_it_waits_and_then_gives_up(void **state)
{
	(void)state;
	int a = connect_and_park();
	w.host.max_pairs = 0;
	say_frame(a, 0x81, "hello", 5);
	assert_string_equal(heard(a), "");
	pass_ms(PARK_WAKE_MS - 1);
	assert_string_equal(heard(a), "");
	w.host.max_pairs = 1;
	pass_ms(0);
	assert_string_equal(heard(a), "\x81\x05hello");

	pass_ms(PARK_AFTER);
	w.host.max_pairs = 0;
	ws_send(w.ws, "never sent", 10);
	pass_ms(PARK_WAKE_MS - 1);
	assert_int_equal(w.closed, 0);
	pass_ms(1);
	assert_int_equal(w.closed, 1);
	const char *got = heard(a);
	assert_memory_equal(got, "\x88", 1);
	assert_memory_equal(got + 2, "\x03\xf5", 2); /* 1013 */
	assert_string_equal(got + 2 + got[1], "END");
	close(a);
}

static void a_library_that_does_not_answer_is_given_up(void **state)
{
	(void)state;
	int fd = connect_and_park();
	ws_send(w.ws, "never sent", 10);
	conn_park_run(&w.host);
	assert_int_equal(w.host.n_pairs, 1);
	clock_advance(&w.clock, PARK_WAKE_MS * 1000000LL);
	conn_park_run(&w.host); /* before libwebsockets had a turn */
	assert_int_equal(w.closed, 1);
	assert_int_equal(w.host.n_pairs, 0);
	const char *got = heard(fd);
	assert_memory_equal(got, "\x88", 1);
	assert_memory_equal(got + 2, "\x03\xf3", 2); /* 1011 */
	close(fd);
}

static void it_may_end_at_any_point_of_waking(void **state)
{
	(void)state;
	for (int turns = 0; turns < 12; turns++) {
		int fd = connect_and_park();
		say_frame(fd, 0x81, "hello", 5);
		ws_send(w.ws, "news", 4);
		for (int i = 0; i < turns; i++)
			uv_run(&w.loop, UV_RUN_NOWAIT);
		close(fd);
		turn();
		assert_int_equal(w.closed, 2 * turns + 1);
		assert_int_equal(w.host.n_pairs, 0);

		fd = connect_and_park();
		ws_send(w.ws, "last news", 9);
		for (int i = 0; i < turns; i++)
			uv_run(&w.loop, UV_RUN_NOWAIT);
		if (w.ws)
			ws_close(w.ws, 1012, NULL);
		assert_string_equal(heard(fd), "\x81\x09last news\x88\x02\x03\xf4");
		say_frame(fd, 0x88, "\x03\xf4", 2);
		assert_string_equal(heard(fd), "END");
		assert_int_equal(w.closed, 2 * turns + 2);
		close(fd);
	}
}

static void those_that_are_silent_make_room(void **state)
{
	(void)state;
	w.host.max_pairs = 2;
	int fds[6];
	for (int i = 0; i < 6; i++) {
		fds[i] = connect_client();
		pass_ms(PARK_PRESSED_MS);
	}
	assert_int_equal(w.host.n_parked, 4);
	for (int i = 0; i < 6; i++)
		say_frame(fds[i], 0x81, "hello", 5);
	for (int i = 0; i < 6; i++) {
		pass_ms(PARK_PRESSED_MS);
		assert_true(w.host.n_pairs <= 2);
	}
	for (int i = 0; i < 6; i++)
		assert_string_equal(heard(fds[i]), "\x81\x05hello");
	for (int i = 0; i < 6; i++)
		close(fds[i]);
}

/* ---- The answer that is swallowed ---- */

static void the_answer_is_swallowed_however_it_is_cut(void **state)
{
	(void)state;
	static const char wire[] =
		"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nX: \r\r\n\r\n\x81\x05hello";
	const size_t n = sizeof wire - 1, answer = n - 7;
	for (size_t cut = 0; cut <= n; cut++) {
		struct park_answer a = {0};
		size_t first = park_swallow(&a, wire, cut);
		assert_int_equal(first, cut < answer ? cut : answer);
		assert_int_equal(park_swallow(&a, wire + cut, n - cut), answer - first);
		assert_int_equal(a.matched, 4);
		assert_false(a.wrong);
	}
	static const char *const wrong[] = {"HTTP/1.1 403 Forbidden\r\n\r\n", "HTTP/1.1 1010 x\r\n\r\n",
	                                    "\x81\x05hello"};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		struct park_answer a = {0};
		for (size_t at = 0; wrong[i][at]; at++)
			park_swallow(&a, wrong[i] + at, 1);
		assert_true(a.wrong);
	}
	struct park_answer a = {0};
	park_swallow(&a, "HTTP/1.1 101 ", 13);
	for (int i = 0; i < 2000; i++)
		park_swallow(&a, "x", 1);
	assert_true(a.wrong);
}

/* ---- Descriptors ---- */

static void descriptors_are_shared_out(void **state)
{
	(void)state;
	static const struct {
		int64_t connections, descriptors;
		int32_t most, pairs;
	} cases[] = {
		{10100, 31324, 10100, 10100}, /* three for each */
		{10100, 20000, 10100, 4438},
		{4096, 4096, 2048, 512},
		{4096, 1024, 512, 128},
		{16, 1 << 20, 16, 16},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		const struct config config = {.max_connections = cases[i].connections};
		int32_t most, pairs;
		listener_share_descriptors(&config, cases[i].descriptors, &most, &pairs);
		assert_int_equal(most, cases[i].most);
		assert_int_equal(pairs, cases[i].pairs);
	}
}

#define W(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
UNIT_MAIN(W(silence_parks), W(heartbeats_are_silence), W(anything_else_keeps_it_awake), W(zero_means_never),
	  W(each_cause_wakes), W(pings_and_closes_do_not_wake), W(without_room_it_waits_and_then_gives_up),
	  W(a_library_that_does_not_answer_is_given_up), W(it_may_end_at_any_point_of_waking),
	  W(those_that_are_silent_make_room), cmocka_unit_test(the_answer_is_swallowed_however_it_is_cut),
	  cmocka_unit_test(descriptors_are_shared_out))
