/* The Responses API over a WebSocket. */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "server/lanes.h"
#include "tests/support/fake_engine.h"
#include "tests/support/fake_transport.h"

static int setup(void **state)
{
	static struct fake_server s;
	fake_server_start(&s);
	fake_engine_set_reply(s.engine, "Hi");
	*state = &s;
	return 0;
}

static int teardown(void **state)
{
	fake_server_stop(*state);
	return 0;
}

#define CREATE "{\"type\":\"response.create\""

/* Says it and lets everything run. */
static void say(struct fake_server *s, struct ws_conn *c, const char *text)
{
	ws_fake_say(c, text);
	fake_server_run(s);
}

static const char *last(const struct ws_conn *c)
{
	return ws_fake_sent(c, ws_fake_n(c) - 1);
}

/* The id of the response that the last event is about, unquoted. */
static void response_id_of(const struct ws_conn *c, char id[64])
{
	snprintf(id, 64, "%s", json_at_path(last(c), "response.id") + 1);
	id[strcspn(id, "\"")] = '\0';
}

static void say_next(struct fake_server *s, struct ws_conn *c, const char *previous, const char *fields)
{
	char text[512];
	snprintf(text, sizeof text, CREATE ",\"previous_response_id\":\"%s\"%s}", previous, fields);
	say(s, c, text);
}

static void expect_prompt(struct fake_server *s, const char *expected)
{
	struct str p = fake_engine_prompt(s->engine, fake_engine_n_submitted(s->engine) - 1);
	char *text = strndup(p.p, p.n);
	assert_string_equal(text, expected);
	free(text);
}

static void expect_error(const struct ws_conn *c, const char *code)
{
	char quoted[64];
	snprintf(quoted, sizeof quoted, "\"%s\"", code);
	assert_json(last(c), "type", "\"error\"");
	assert_json(last(c), "error.code", quoted);
}

static int count(const struct ws_conn *c, const char *type)
{
	char quoted[64];
	int n = 0;
	snprintf(quoted, sizeof quoted, "\"%s\"", type);
	for (size_t i = 0; i < ws_fake_n(c); i++)
		n += strcmp(json_at_path(ws_fake_sent(c, i), "type"), quoted) == 0;
	return n;
}

static void a_turn_has_the_events_of_the_stream(void **state)
{
	static const char *const types[] = {"response.created",		  "response.in_progress",
					    "response.output_item.added", "response.content_part.added",
					    "response.output_text.delta", "response.output_text.delta",
					    "response.output_text.done",  "response.content_part.done",
					    "response.output_item.done",  "response.completed"};
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	size_t n = sizeof types / sizeof *types;
	char quoted[64];
	say(s, c, CREATE ",\"input\":\"hello\"}");
	assert_int_equal(ws_fake_n(c), n);
	for (size_t i = 0; i < n; i++) {
		snprintf(quoted, sizeof quoted, "\"%s\"", types[i]);
		assert_json(ws_fake_sent(c, i), "type", quoted);
		snprintf(quoted, sizeof quoted, "%zu", i);
		assert_json(ws_fake_sent(c, i), "sequence_number", quoted);
	}
	assert_json(ws_fake_sent(c, 4), "stream_id", "(absent)");
	assert_json(last(c), "response.output.0.content.0.text", "\"Hi\"");
}

static void the_next_turn_sends_only_what_is_new(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char id[64], quoted[70];
	say(s, c, CREATE ",\"input\":\"one\",\"store\":false,\"instructions\":\"sys\"}");
	response_id_of(c, id);
	say_next(s, c, id, ",\"input\":\"two\"");
	/* instructions hold for one response. */
	expect_prompt(
		s, "{\"messages\":[{\"role\":\"user\",\"content\":\"one\"},{\"role\":\"assistant\",\"content\":\"Hi\"},"
		   "{\"role\":\"user\",\"content\":\"two\"}],\"add_generation_prompt\":true}");
	snprintf(quoted, sizeof quoted, "\"%s\"", id);
	assert_json(last(c), "response.previous_response_id", quoted);
	response_id_of(c, id);
	say_next(s, c, id, ",\"input\":\"three\"");
	assert_true(atoi(json_at_path(last(c), "response.usage.input_tokens_details.cached_tokens")) > 60);
	assert_int_equal(fake_engine_sessions(s->engine), 1);
	assert_string_equal(fake_engine_submitted(s->engine, 0)->session, fake_engine_submitted(s->engine, 2)->session);
}

static void an_id_that_is_not_kept_is_said_so(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s), *other = ws_fake_open(s);
	char first[64], second[64];
	say(s, c, CREATE ",\"input\":\"one\",\"store\":false}");
	response_id_of(c, first);
	say_next(s, c, first, ",\"input\":\"two\",\"store\":false");
	response_id_of(c, second);
	/* Only the latest is kept, of those that are not stored. */
	say_next(s, c, first, ",\"input\":\"again\"");
	expect_error(c, "previous_response_not_found");
	assert_json(last(c), "status", "400");
	assert_json(last(c), "error.param", "\"previous_response_id\"");
	/* And only for its own connection. */
	say_next(s, other, second, ",\"input\":\"mine\"");
	expect_error(other, "previous_response_not_found");
	say_next(s, c, second, ",\"input\":\"three\"");
	assert_json(last(c), "type", "\"response.completed\"");
}

static void a_lane_forks_from_another(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char id[64];
	say(s, c, CREATE ",\"input\":\"one\",\"stream_id\":\"main\"}");
	response_id_of(c, id);
	assert_json(ws_fake_sent(c, 4), "stream_id", "\"main\"");
	say_next(s, c, id, ",\"input\":\"left\",\"stream_id\":\"fork.1\"");
	assert_json(last(c), "stream_id", "\"fork.1\"");
	assert_true(atoi(json_at_path(last(c), "response.usage.input_tokens_details.cached_tokens")) > 30);
	/* main still has its own. */
	say_next(s, c, id, ",\"input\":\"right\",\"stream_id\":\"main\"");
	expect_prompt(
		s, "{\"messages\":[{\"role\":\"user\",\"content\":\"one\"},{\"role\":\"assistant\",\"content\":\"Hi\"},"
		   "{\"role\":\"user\",\"content\":\"right\"}],\"add_generation_prompt\":true}");
	assert_int_equal(fake_engine_sessions(s->engine), 2);
}

static void lanes_run_side_by_side_and_each_in_order(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	ws_fake_say(c, CREATE ",\"input\":\"a1\",\"stream_id\":\"a\"}");
	ws_fake_say(c, CREATE ",\"input\":\"a2\",\"stream_id\":\"a\"}");
	ws_fake_say(c, CREATE ",\"input\":\"b1\",\"stream_id\":\"b\"}");
	fake_server_step(s);
	assert_int_equal(fake_engine_active(s->engine), 2);
	fake_server_run(s);
	assert_int_equal(count(c, "response.completed"), 3);
	/* a2 was created only after a1 had completed. */
	int created = 0, completed = 0;
	for (size_t i = 0; i < ws_fake_n(c); i++) {
		const char *e = ws_fake_sent(c, i);
		if (strcmp(json_at_path(e, "stream_id"), "\"a\"") != 0)
			continue;
		if (strcmp(json_at_path(e, "type"), "\"response.created\"") == 0)
			assert_int_equal(completed, created++);
		completed += strcmp(json_at_path(e, "type"), "\"response.completed\"") == 0;
	}
	assert_int_equal(completed, 2);
	assert_true(str_is(fake_engine_prompt(s->engine, 2),
			   "{\"messages\":[{\"role\":\"user\",\"content\":\"a2\"}],\"add_generation_prompt\":true}"));
}

static void a_waiting_turn_may_continue_the_one_before_it(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char id[64], text[256];
	ws_fake_say(c, CREATE ",\"input\":\"one\"}");
	fake_server_step(s);
	fake_server_step(s);
	snprintf(id, sizeof id, "%s", json_at_path(ws_fake_sent(c, 0), "response.id"));
	snprintf(text, sizeof text, CREATE ",\"input\":\"two\",\"previous_response_id\":%s}", id);
	ws_fake_say(c, text);
	/* Another lane cannot continue what has not ended. */
	snprintf(text, sizeof text, CREATE ",\"input\":\"x\",\"stream_id\":\"b\",\"previous_response_id\":%s}", id);
	ws_fake_say(c, text);
	expect_error(c, "previous_response_not_found");
	fake_server_run(s);
	assert_int_equal(count(c, "response.completed"), 2);
	expect_prompt(
		s, "{\"messages\":[{\"role\":\"user\",\"content\":\"one\"},{\"role\":\"assistant\",\"content\":\"Hi\"},"
		   "{\"role\":\"user\",\"content\":\"two\"}],\"add_generation_prompt\":true}");
}

static void limits_are_said_and_survived(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char text[128];
	for (int i = 0; i < LANES_MAX_IN_FLIGHT; i++) {
		snprintf(text, sizeof text, CREATE ",\"input\":\"a\",\"stream_id\":\"s%d\"}", i);
		ws_fake_say(c, text);
	}
	assert_int_equal(ws_fake_n(c), 0);
	ws_fake_say(c, CREATE ",\"input\":\"a\",\"stream_id\":\"s0\"}");
	expect_error(c, "websocket_stream_limit_reached");
	fake_server_run(s);
	assert_int_equal(count(c, "response.completed"), LANES_MAX_IN_FLIGHT);
	for (int i = LANES_MAX_IN_FLIGHT; i < LANES_MAX; i++) {
		snprintf(text, sizeof text, CREATE ",\"input\":\"a\",\"stream_id\":\"s%d\"}", i);
		say(s, c, text);
	}
	assert_int_equal(count(c, "response.completed"), LANES_MAX);
	say(s, c, CREATE ",\"input\":\"a\",\"stream_id\":\"one_more\"}");
	expect_error(c, "websocket_stream_limit_reached");
	assert_json(last(c), "error.param", "\"stream_id\"");
	say(s, c, CREATE ",\"input\":\"a\",\"stream_id\":\"s3\"}");
	assert_json(last(c), "type", "\"response.completed\"");
}

/* A conversation that leaves out its oldest turns fits the context for ever, and still has a bound. */
static void what_a_connection_keeps_is_bounded(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char id[64], text[2000], pad[1001];
	memset(pad, 'x', 1000);
	pad[1000] = '\0';
	int turns = 0;
	fake_engine_set_context(s->engine, 100000);
	snprintf(text, sizeof text, CREATE ",\"input\":\"%s\"}", pad);
	for (say(s, c, text); strcmp(json_at_path(last(c), "type"), "\"error\"") != 0 && turns < 10; turns++) {
		response_id_of(c, id);
		snprintf(text, sizeof text, CREATE ",\"input\":\"%s\",\"previous_response_id\":\"%s\"}", pad, id);
		say(s, c, text);
	}
	assert_int_equal(turns, 2);
	expect_error(c, "invalid_value");
	assert_json(last(c), "error.param", "\"input\"");
	/* What waits counts as well. */
	snprintf(text, sizeof text, CREATE ",\"input\":\"%s\",\"stream_id\":\"b\"}", pad);
	ws_fake_clear(c);
	ws_fake_say(c, text);
	ws_fake_say(c, text);
	expect_error(c, "invalid_value");
	fake_server_run(s);
	assert_int_equal(count(c, "response.completed"), 1);
	/* A new conversation in the lane takes the old one's place, and a small turn passes. */
	say(s, c, CREATE ",\"input\":\"a\"}");
	assert_json(last(c), "type", "\"response.completed\"");
	say(s, c, text);
	assert_json(last(c), "type", "\"response.completed\"");
}

static void stream_ids_are_checked(void **state)
{
	const char *ids[] = {"\"\"", "\"a b\"", "5", "\"\\u00e9\"", "\"a\\u0000b\"", "[]"};
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char text[512], name[258];
	for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
		snprintf(text, sizeof text, CREATE ",\"input\":\"a\",\"stream_id\":%s}", ids[i]);
		say(s, c, text);
		expect_error(c, "invalid_stream_id");
	}
	memset(name, 'x', 257);
	name[257] = '\0';
	snprintf(text, sizeof text, CREATE ",\"input\":\"a\",\"stream_id\":\"%s\"}", name);
	say(s, c, text);
	expect_error(c, "invalid_stream_id");
	name[256] = '\0';
	snprintf(text, sizeof text, CREATE ",\"input\":\"a\",\"stream_id\":\"%s\"}", name);
	say(s, c, text);
	assert_json(last(c), "type", "\"response.completed\"");
}

static void bad_messages_are_answered_and_survived(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	static const char *const texts[] = {"",
					    "not json",
					    "[]",
					    "{}",
					    "{\"type\":5}",
					    "{\"type\":\"session.update\"}",
					    CREATE "}",
					    CREATE ",\"input\":5}",
					    CREATE ",\"input\":\"a\",\"temperature\":1e999}",
					    CREATE ",\"input\":\"a\",\"temperature\":9,\"stream_id\":\"s\"}",
					    "{\"type\":\"response.cancel\",\"response_id\":5}"};
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
		say(s, c, texts[i]);
		assert_int_equal(ws_fake_n(c), i + 1);
		assert_json(last(c), "type", "\"error\"");
		assert_json(last(c), "status", "400");
		assert_json(last(c), "error.type", "\"invalid_request_error\"");
	}
	assert_json(ws_fake_sent(c, 9), "error.param", "\"temperature\"");
	assert_json(ws_fake_sent(c, 9), "stream_id", "\"s\"");
	assert_int_equal(ws_fake_close_code(c), 0);
	say(s, c, CREATE ",\"input\":\"a\"}");
	assert_json(last(c), "type", "\"response.completed\"");
}

static void a_warm_up_has_an_id_and_no_output(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char id[64];
	say(s, c,
	    CREATE ",\"generate\":false,\"instructions\":\"sys\",\"input\":[{\"role\":\"user\",\"content\":\"ctx\"}]}");
	assert_int_equal(ws_fake_n(c), 3);
	assert_json(last(c), "type", "\"response.completed\"");
	assert_json(last(c), "response.output", "[]");
	assert_json(last(c), "response.usage.output_tokens", "0");
	response_id_of(c, id);
	say_next(s, c, id, ",\"input\":\"go\",\"instructions\":\"sys\"");
	expect_prompt(
		s, "{\"messages\":[{\"role\":\"system\",\"content\":\"sys\"},{\"role\":\"user\",\"content\":\"ctx\"},"
		   "{\"role\":\"user\",\"content\":\"go\"}],\"add_generation_prompt\":true}");
	assert_true(atoi(json_at_path(last(c), "response.usage.input_tokens_details.cached_tokens")) > 60);
}

static void a_cancelled_response_ends_with_what_it_has(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char id[64];
	ws_fake_say(c, CREATE ",\"input\":\"one\"}");
	fake_server_step(s);
	fake_server_step(s);
	ws_fake_say(c, "{\"type\":\"response.cancel\"}");
	assert_int_equal(fake_engine_active(s->engine), 0);
	fake_server_run(s);
	assert_json(last(c), "type", "\"response.incomplete\"");
	assert_json(last(c), "response.status", "\"cancelled\"");
	assert_json(last(c), "response.incomplete_details.reason", "\"cancelled\"");
	assert_json(last(c), "response.output.0.content.0.text", "\"H\"");
	/* The conversation goes on from there. */
	response_id_of(c, id);
	say_next(s, c, id, ",\"input\":\"two\"");
	expect_prompt(
		s, "{\"messages\":[{\"role\":\"user\",\"content\":\"one\"},{\"role\":\"assistant\",\"content\":\"H\"},"
		   "{\"role\":\"user\",\"content\":\"two\"}],\"add_generation_prompt\":true}");
}

static void a_cancel_finds_its_response(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char text[128];
	say(s, c, "{\"type\":\"response.cancel\"}");
	expect_error(c, "response_not_found");
	ws_fake_say(c, CREATE ",\"input\":\"a\",\"stream_id\":\"a\"}");
	ws_fake_say(c, CREATE ",\"input\":\"b\",\"stream_id\":\"b\"}");
	fake_server_step(s);
	fake_server_step(s);
	/* Two are in flight, and none in the unnamed lane: which one is meant? */
	ws_fake_clear(c);
	ws_fake_say(c, "{\"type\":\"response.cancel\"}");
	expect_error(c, "response_not_found");
	ws_fake_say(c, "{\"type\":\"response.cancel\",\"response_id\":\"resp_none\"}");
	expect_error(c, "response_not_found");
	ws_fake_say(c, "{\"type\":\"response.cancel\",\"stream_id\":\"b\"}");
	app_handle_events(s->app);
	assert_json(last(c), "response.status", "\"cancelled\"");
	assert_json(last(c), "stream_id", "\"b\"");
	assert_int_equal(fake_engine_active(s->engine), 1);
	fake_server_run(s);
	assert_json(last(c), "type", "\"response.completed\"");
	/* By its id, while it still waits behind another: it never runs. */
	ws_fake_say(c, CREATE ",\"input\":\"a\"}");
	ws_fake_say(c, CREATE ",\"input\":\"b\"}");
	fake_server_step(s);
	fake_server_step(s);
	snprintf(text, sizeof text, "{\"type\":\"response.cancel\",\"response_id\":%s}",
		 json_at_path(last(c), "response_id"));
	ws_fake_say(c, text);
	fake_server_run(s);
	assert_int_equal(count(c, "response.completed"), 2);
}

static void a_turn_that_waits_can_be_cancelled(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	/* Its session is still being made. */
	ws_fake_say(c, CREATE ",\"input\":\"a\"}");
	ws_fake_say(c, "{\"type\":\"response.cancel\"}");
	assert_int_equal(ws_fake_n(c), 3);
	assert_json(ws_fake_sent(c, 0), "type", "\"response.created\"");
	assert_json(last(c), "type", "\"response.incomplete\"");
	fake_server_run(s);
	assert_int_equal(fake_engine_n_submitted(s->engine), 0);
	say(s, c, CREATE ",\"input\":\"a\"}");
	assert_json(last(c), "type", "\"response.completed\"");
}

static void what_fails_before_it_begins_is_an_error(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	fake_engine_set_context(s->engine, 30);
	say(s, c, CREATE ",\"input\":\"a\",\"stream_id\":\"s\"}");
	assert_int_equal(ws_fake_n(c), 1);
	expect_error(c, "context_length_exceeded");
	assert_json(last(c), "stream_id", "\"s\"");
	fake_engine_set_context(s->engine, 1000);
	say(s, c, CREATE ",\"input\":\"a\",\"stream_id\":\"s\"}");
	assert_json(last(c), "type", "\"response.completed\"");
}

static void what_fails_later_is_a_failed_response(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char id[64];
	say(s, c, CREATE ",\"input\":\"one\"}");
	response_id_of(c, id);
	ws_fake_say(c, CREATE ",\"input\":\"two\"}");
	fake_server_step(s);
	fake_server_step(s);
	fake_engine_fail(s->engine, STATUS_DEVICE, "the device is gone");
	fake_server_run(s);
	assert_json(last(c), "type", "\"response.failed\"");
	assert_json(last(c), "response.error.message", "\"the device is gone\"");
	/* The lane still has what came before. */
	say_next(s, c, id, ",\"input\":\"three\"");
	assert_json(last(c), "type", "\"response.completed\"");
}

static void a_clients_own_session_is_used_and_kept_alive(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	http_fake_post(s, "/v1/sessions", "{\"id\":\"mine\"}");
	say(s, c, CREATE ",\"input\":\"a\",\"session_id\":\"mine\"}");
	assert_json(last(c), "type", "\"response.completed\"");
	assert_string_equal(fake_engine_submitted(s->engine, 0)->session, "mine");
	assert_int_equal(fake_engine_sessions(s->engine), 1);
	ws_fake_alive(c);
	ws_fake_alive(c); /* at most a few within a heartbeat timeout */
	assert_int_equal(fake_engine_heartbeats(s->engine), 1);
	fake_engine_expire(s->engine, "mine");
	say(s, c, CREATE ",\"input\":\"a\",\"session_id\":\"mine\"}");
	expect_error(c, "session_not_found");
	assert_json(last(c), "status", "404");
}

static void a_session_that_ends_in_mid_response_fails_it(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	http_fake_post(s, "/v1/sessions", "{\"id\":\"mine\"}");
	ws_fake_say(c, CREATE ",\"input\":\"a\",\"session_id\":\"mine\"}");
	fake_server_step(s);
	fake_server_step(s);
	fake_engine_expire(s->engine, "mine");
	fake_server_run(s);
	assert_json(last(c), "type", "\"response.failed\"");
	assert_json(last(c), "response.error.code", "\"session_expired\"");
}

static void a_lane_survives_the_loss_of_its_session(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	char id[64], path[128];
	say(s, c, CREATE ",\"input\":\"one\"}");
	response_id_of(c, id);
	snprintf(path, sizeof path, "/v1/sessions/%s", fake_engine_submitted(s->engine, 0)->session);
	http_fake_request(s, HTTP_DELETE, path, NULL, NULL);
	fake_server_run(s);
	assert_int_equal(fake_engine_sessions(s->engine), 0);
	ws_fake_clear(c);
	say_next(s, c, id, ",\"input\":\"two\"");
	assert_int_equal(count(c, "error"), 0);
	assert_int_equal(count(c, "response.created"), 1);
	assert_json(last(c), "type", "\"response.completed\"");
	assert_int_equal(fake_engine_sessions(s->engine), 1);
}

static void no_room_for_a_session_is_an_error(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	http_fake_post(s, "/v1/sessions", "{}");
	fake_engine_set_max_sessions(s->engine, 1);
	ws_fake_say(c, CREATE ",\"input\":\"a\"}");
	ws_fake_say(c, CREATE ",\"input\":\"b\"}");
	fake_server_run(s);
	assert_int_equal(ws_fake_n(c), 2);
	expect_error(c, "rate_limit_exceeded");
	fake_engine_set_max_sessions(s->engine, 0);
	say(s, c, CREATE ",\"input\":\"a\"}");
	assert_json(last(c), "type", "\"response.completed\"");
}

static void closing_ends_all_work_and_all_sessions(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	ws_fake_say(c, CREATE ",\"input\":\"a\",\"stream_id\":\"a\"}");
	ws_fake_say(c, CREATE ",\"input\":\"b\",\"stream_id\":\"a\"}");
	ws_fake_say(c, CREATE ",\"input\":\"c\",\"stream_id\":\"b\"}");
	fake_server_step(s);
	fake_server_step(s);
	ws_fake_say(c, CREATE ",\"input\":\"d\",\"stream_id\":\"opening\"}");
	assert_int_equal(fake_engine_active(s->engine), 2);
	ws_fake_close(c);
	assert_int_equal(fake_engine_active(s->engine), 0);
	fake_server_run(s);
	assert_int_equal(app_active(s->app), 0);
	assert_int_equal(fake_engine_sessions(s->engine), 0);
}

static void a_reader_that_stalls_loses_its_work(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	ws_fake_say(c, CREATE ",\"input\":\"a\"}");
	fake_server_step(s);
	fake_server_step(s);
	ws_fake_stall(c);
	fake_server_step(s);
	assert_int_equal(fake_engine_active(s->engine), 0);
	app_handle_events(s->app);
	assert_int_equal(app_active(s->app), 0);
}

static void a_draining_server_takes_no_new_turns(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	ws_fake_say(c, CREATE ",\"input\":\"a\"}");
	fake_server_step(s);
	app_start_drain(s->app);
	ws_fake_say(c, CREATE ",\"input\":\"b\"}");
	expect_error(c, "server_draining");
	assert_json(last(c), "status", "503");
	fake_server_run(s);
	assert_json(last(c), "type", "\"response.completed\"");
}

static void a_drain_closes_each_connection_when_nothing_runs_on_it(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *idle = ws_fake_open(s), *busy = ws_fake_open(s), *late;
	say(s, idle, CREATE ",\"input\":\"a\"}");
	ws_fake_say(busy, CREATE ",\"input\":\"a\"}");
	ws_fake_say(busy, CREATE ",\"input\":\"b\"}");
	fake_server_step(s);
	assert_int_equal(ws_fake_close_code(idle), 0);
	app_start_drain(s->app);
	assert_int_equal(ws_fake_close_code(idle), 1012);
	assert_int_equal(ws_fake_close_code(busy), 0);
	fake_server_run(s);
	assert_int_equal(count(busy, "response.completed"), 2);
	assert_int_equal(ws_fake_close_code(busy), 1012);
	/* One whose upgrade was under way. */
	late = ws_fake_open(s);
	assert_int_equal(ws_fake_close_code(late), 1012);
}

static void the_drain_deadline_fails_what_runs(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	ws_fake_say(c, CREATE ",\"input\":\"a\"}");
	fake_server_step(s);
	fake_server_step(s);
	app_start_drain(s->app);
	app_cancel_all(s->app);
	fake_server_run(s);
	assert_json(last(c), "type", "\"response.failed\"");
	assert_json(last(c), "response.error.code", "\"cancelled\"");
}

/* ---- session.context events ---- */

#define WATCH "{\"type\":\"session.update\",\"context_events\":true"

static void whoever_asks_is_told_of_its_sessions(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s), *quiet = ws_fake_open(s);
	say(s, c, WATCH "}");
	assert_json(last(c), "type", "\"session.updated\"");
	assert_json(last(c), "context_events", "true");
	assert_json(last(c), "session_id", "null");
	say(s, c, CREATE ",\"input\":\"one\"}");
	say(s, quiet, CREATE ",\"input\":\"one\"}");
	assert_int_equal(count(c, "session.context"), 1);
	assert_int_equal(count(quiet, "session.context"), 0);
	const char *session = fake_engine_submitted(s->engine, 0)->session;
	fake_engine_tell(s->engine, session);
	fake_server_step(s);
	assert_json(last(c), "type", "\"session.context\"");
	char quoted[80];
	snprintf(quoted, sizeof quoted, "\"%s\"", session);
	assert_json(last(c), "session_id", quoted);
	assert_json(last(c), "pages_by_tier.device", "0");
	assert_json(last(c), "moved.lost", "0");
	/* And not any more. */
	say(s, c, "{\"type\":\"session.update\",\"context_events\":false}");
	size_t n = ws_fake_n(c);
	fake_engine_tell(s->engine, session);
	fake_server_step(s);
	assert_int_equal(ws_fake_n(c), n);
}

static void one_session_may_be_watched_by_its_name(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	struct engine_session_params p = {.id = "tea"};
	engine_session_create(s->engine, engine_next_id(s->engine), &p);
	say(s, c, WATCH ",\"session_id\":\"tea\"}");
	assert_int_equal(count(c, "session.context"), 1);
	/* Twice is once. */
	say(s, c, WATCH ",\"session_id\":\"tea\"}");
	fake_engine_tell(s->engine, "tea");
	fake_server_step(s);
	assert_int_equal(count(c, "session.context"), 2);
	/* Lanes are not. */
	say(s, c, CREATE ",\"input\":\"one\"}");
	assert_int_equal(count(c, "session.context"), 2);
	fake_engine_expire(s->engine, "tea");
	fake_server_step(s);
	assert_json(last(c), "ended", "true");
	assert_json(last(c), "session_id", "\"tea\"");
	say(s, c, WATCH ",\"session_id\":\"nobody\"}");
	assert_json(last(c), "ended", "true");
	static const struct {
		const char *text, *param;
	} wrong[] = {{"{\"type\":\"session.update\"}", "\"context_events\""},
		     {"{\"type\":\"session.update\",\"context_events\":1}", "\"context_events\""},
		     {WATCH ",\"session_id\":\"no name\"}", "\"session_id\""}};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		say(s, c, wrong[i].text);
		assert_json(last(c), "type", "\"error\"");
		assert_json(last(c), "error.param", wrong[i].param);
	}
}

static void who_does_not_read_gets_the_latest_when_it_has_read(void **state)
{
	struct fake_server *s = *state;
	struct ws_conn *c = ws_fake_open(s);
	struct engine_session_params p = {.id = "tea"};
	engine_session_create(s->engine, engine_next_id(s->engine), &p);
	say(s, c, WATCH ",\"session_id\":\"tea\"}");
	size_t n = ws_fake_n(c);
	ws_fake_leave_unread(c, 100000);
	for (int i = 0; i < 50; i++) {
		fake_engine_tell(s->engine, "tea");
		fake_server_step(s);
	}
	assert_int_equal(ws_fake_n(c), n);
	ws_fake_leave_unread(c, 0);
	assert_int_equal(ws_fake_n(c), n + 1);
	ws_fake_leave_unread(c, 0);
	assert_int_equal(ws_fake_n(c), n + 1);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
UNIT_MAIN(T(whoever_asks_is_told_of_its_sessions), T(one_session_may_be_watched_by_its_name),
          T(who_does_not_read_gets_the_latest_when_it_has_read), T(a_turn_has_the_events_of_the_stream),
          T(the_next_turn_sends_only_what_is_new), T(an_id_that_is_not_kept_is_said_so), T(a_lane_forks_from_another),
          T(lanes_run_side_by_side_and_each_in_order), T(a_waiting_turn_may_continue_the_one_before_it),
          T(limits_are_said_and_survived), T(what_a_connection_keeps_is_bounded), T(stream_ids_are_checked),
          T(bad_messages_are_answered_and_survived), T(a_warm_up_has_an_id_and_no_output),
          T(a_cancelled_response_ends_with_what_it_has), T(a_cancel_finds_its_response),
          T(a_turn_that_waits_can_be_cancelled), T(what_fails_before_it_begins_is_an_error),
          T(what_fails_later_is_a_failed_response), T(a_clients_own_session_is_used_and_kept_alive),
          T(a_session_that_ends_in_mid_response_fails_it), T(a_lane_survives_the_loss_of_its_session),
          T(no_room_for_a_session_is_an_error), T(closing_ends_all_work_and_all_sessions),
          T(a_reader_that_stalls_loses_its_work), T(a_draining_server_takes_no_new_turns),
          T(a_drain_closes_each_connection_when_nothing_runs_on_it), T(the_drain_deadline_fails_what_runs))
