/* POST /v1/chat/completions. Numbers in comments are cases of client-quirks.md. */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "tests/support/fake_engine.h"
#include "tests/support/fake_transport.h"

static int setup(void **state)
{
	static struct fake_server s;
	fake_server_start(&s);
	*state = &s;
	return 0;
}

static int teardown(void **state)
{
	fake_server_stop(*state);
	return 0;
}

#define USER "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"

static struct http_exchange *post(struct fake_server *s, const char *body)
{
	return http_fake_post(s, "/v1/chat/completions", body);
}

/* Starts a stream without running it. */
static struct http_exchange *open_stream(struct fake_server *s, const char *body)
{
	return http_fake_request(s, HTTP_POST, "/v1/chat/completions", NULL, body);
}

static void expect_template(struct fake_server *s, size_t i, const char *expected)
{
	struct str p = fake_engine_prompt(s->engine, i);
	char *text = strndup(p.p, p.n);
	assert_string_equal(text, expected);
	free(text);
}

static void expect_last_write_done(const struct http_exchange *x)
{
	struct str w = http_fake_write(x, http_fake_n_writes(x) - 1);
	assert_true(str_is(w, "data: [DONE]\n\n")); /* 12 */
	assert_true(http_fake_ended(x));
}

/* ---- Whole answers ---- */

/* 20, 21 */
static void an_answer_has_every_required_key(void **state)
{
	struct http_exchange *x = post(*state, "{" USER "}");
	const char *body = http_fake_body(x);
	assert_int_equal(http_fake_status(x), 200);
	assert_string_equal(http_fake_type(x), "application/json");
	assert_json(body, "object", "\"chat.completion\"");
	assert_json(body, "model", "\"fake.gguf\"");
	assert_json(body, "choices",
		    "[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Hello there\",\"refusal\":null},"
		    "\"logprobs\":null,\"finish_reason\":\"stop\"}]");
	assert_string_equal(json_at_path(body, "usage.completion_tokens"), "11");
	assert_json(body, "usage.prompt_tokens_details.cached_tokens", "0");
	assert_true(strncmp(json_at_path(body, "id"), "\"chatcmpl-", 10) == 0); /* 18 */
	assert_true(strncmp(json_at_path(body, "system_fingerprint"), "\"b", 2) == 0);
	assert_true(atoll(json_at_path(body, "created")) > 1600000000);
}

static void length_is_told_from_stop(void **state)
{
	struct http_exchange *x = post(*state, "{" USER ",\"max_tokens\":5}");
	assert_json(http_fake_body(x), "choices.0.message.content", "\"Hello\"");
	assert_json(http_fake_body(x), "choices.0.finish_reason", "\"length\"");
	x = post(*state, "{" USER ",\"stop\":\" the\"}");
	assert_json(http_fake_body(x), "choices.0.message.content", "\"Hello\"");
	assert_json(http_fake_body(x), "choices.0.finish_reason", "\"stop\"");
}

static void choices_share_one_prompt_in_the_usage(void **state)
{
	struct http_exchange *one = post(*state, "{" USER "}"), *two = post(*state, "{" USER ",\"n\":3}");
	char prompt[32];
	snprintf(prompt, sizeof prompt, "%s", json_at_path(http_fake_body(one), "usage.prompt_tokens"));
	assert_json(http_fake_body(two), "usage.prompt_tokens", prompt);
	assert_json(http_fake_body(two), "usage.completion_tokens", "33");
	assert_json(http_fake_body(two), "choices.2.index", "2");
	assert_json(http_fake_body(two), "choices.2.message.content", "\"Hello there\"");
}

static void logprobs_carry_bytes(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "\xc3\xa9");
	struct http_exchange *x = post(s, "{" USER ",\"logprobs\":true,\"top_logprobs\":2}");
	const char *body = http_fake_body(x);
	assert_json(body, "choices.0.message.content", "\"\xc3\xa9\"");
	assert_json(body, "choices.0.logprobs.content.0.bytes", "[195]");
	assert_json(body, "choices.0.logprobs.content.0.token", "\"\xef\xbf\xbd\"");
	assert_json(body, "choices.0.logprobs.content.0.logprob", "-0.5");
	assert_json(body, "choices.0.logprobs.content.1.bytes", "[169]");
	assert_json(body, "choices.0.logprobs.content.1.top_logprobs.1.logprob", "-1.5");
	assert_json(body, "choices.0.logprobs.refusal", "null");
	x = post(s, "{" USER ",\"logprobs\":true}");
	assert_json(http_fake_body(x), "choices.0.logprobs.content.0.top_logprobs", "[]");
	x = post(s, "{" USER ",\"top_logprobs\":2}");
	assert_json(http_fake_body(x), "error.param", "\"top_logprobs\"");
	x = post(s, "{" USER ",\"logprobs\":5}");
	assert_json(http_fake_body(x), "error.param", "\"logprobs\"");
	x = post(s, "{" USER ",\"logprobs\":true,\"top_logprobs\":21}");
	assert_json(http_fake_body(x), "error.param", "\"top_logprobs\"");
}

static void token_ids_come_when_asked_for(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "ab");
	struct http_exchange *x = post(s, "{" USER ",\"return_token_ids\":true}");
	assert_json(http_fake_body(x), "choices.0.token_ids", "[97,98]");
	assert_true(strlen(json_at_path(http_fake_body(x), "choices.0.prompt_token_ids")) > 10);
}

/* ---- Streams ---- */

/* 1, 2, 3, 8, 9, 13, 18, 39 */
static void a_stream_has_the_shape_that_clients_expect(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "Hi");
	struct http_exchange *x = post(s, "{" USER ",\"stream\":true}");
	char id[64];

	assert_int_equal(http_fake_status(x), 200);
	assert_true(strncmp(http_fake_type(x), "text/event-stream", 17) == 0);
	assert_string_equal(http_fake_header(x, "Cache-Control"), "no-cache");
	assert_string_equal(http_fake_header(x, "X-Accel-Buffering"), "no");
	assert_int_equal(http_fake_n_writes(x), 5);
	assert_json(http_fake_event(x, 0), "choices",
		    "[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_"
		    "reason\":null}]");
	assert_json(http_fake_event(x, 1), "choices",
		    "[{\"index\":0,\"delta\":{\"content\":\"H\"},\"logprobs\":null,\"finish_reason\":null}]");
	assert_json(http_fake_event(x, 3), "choices",
		    "[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}]");
	expect_last_write_done(x);
	snprintf(id, sizeof id, "%s", json_at_path(http_fake_event(x, 0), "id"));
	for (size_t i = 0; i < 4; i++) {
		assert_json(http_fake_event(x, i), "id", id);
		assert_json(http_fake_event(x, i), "object", "\"chat.completion.chunk\"");
		assert_json(http_fake_event(x, i), "usage", "(absent)");
	}
}

/* 8 */
static void usage_comes_in_a_chunk_of_its_own(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "Hi");
	struct http_exchange *x = post(s, "{" USER ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
	assert_int_equal(http_fake_n_writes(x), 6);
	assert_json(http_fake_event(x, 1), "usage", "null");
	assert_json(http_fake_event(x, 4), "choices", "[]");
	assert_json(http_fake_event(x, 4), "usage.completion_tokens", "2");
	assert_json(http_fake_event(x, 4), "usage.prompt_tokens_details.cached_tokens", "0");
}

/* 11 */
static void continuous_usage_rises(void **state)
{
	struct http_exchange *x =
		post(*state,
		     "{" USER
		     ",\"stream\":true,\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true}}");
	int before = -1;
	for (size_t i = 0; i + 1 < http_fake_n_writes(x); i++) {
		int n = atoi(json_at_path(http_fake_event(x, i), "usage.completion_tokens"));
		assert_true(n >= before);
		before = n;
	}
	assert_int_equal(before, 11);
}

/* 19 */
static void a_code_point_is_never_split(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "a\xf0\x9f\x98\x80z");
	struct http_exchange *x = post(s, "{" USER ",\"stream\":true,\"logprobs\":true}");
	assert_int_equal(http_fake_n_writes(x), 6);
	assert_json(http_fake_event(x, 2), "choices.0.delta.content", "\"\xf0\x9f\x98\x80\"");
	/* The log-probabilities of all four bytes come with it. */
	assert_json(http_fake_event(x, 2), "choices.0.logprobs.content.3.bytes", "[128]");
	assert_json(http_fake_event(x, 3), "choices.0.delta.content", "\"z\"");
}

static void held_back_text_comes_before_the_finish(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "abc");
	/* "c" could begin the stop string, so it is held until the end shows that it does not. */
	struct http_exchange *x = post(s, "{" USER ",\"stream\":true,\"stop\":\"cd\"}");
	assert_int_equal(http_fake_n_writes(x), 6);
	assert_json(http_fake_event(x, 3), "choices.0.delta", "{\"content\":\"c\"}");
	assert_json(http_fake_event(x, 3), "choices.0.finish_reason", "null");
	assert_json(http_fake_event(x, 4), "choices.0.delta", "{}");
	assert_json(http_fake_event(x, 4), "choices.0.finish_reason", "\"stop\"");
}

static void choices_are_streamed_side_by_side(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "Hi");
	struct http_exchange *x = post(s, "{" USER ",\"stream\":true,\"n\":2}");
	int roles = 0, finishes = 0;
	assert_int_equal(http_fake_n_writes(x), 9);
	for (size_t i = 0; i < 8; i++) {
		const char *e = http_fake_event(x, i);
		roles += strcmp(json_at_path(e, "choices.0.delta.role"), "\"assistant\"") == 0;
		finishes += strcmp(json_at_path(e, "choices.0.finish_reason"), "\"stop\"") == 0;
	}
	assert_int_equal(roles, 2);
	assert_int_equal(finishes, 2);
}

/* ---- Errors ---- */

/* 16 */
static void what_is_known_before_the_first_token_is_a_real_status(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_context(s->engine, 100);
	struct http_exchange *x = post(s, "{" USER ",\"stream\":true,\"max_tokens\":5000}");
	assert_int_equal(http_fake_status(x), 400);
	assert_json(http_fake_body(x), "error.code", "\"context_length_exceeded\"");
	assert_non_null(strstr(http_fake_body(x), "100 tokens"));
	assert_int_equal(http_fake_n_writes(x), 0);
}

static void one_choice_that_fails_early_fails_the_request(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x;
	fake_engine_set_queue(s->engine, 2);
	x = open_stream(s, "{" USER ",\"stream\":true,\"n\":3}");
	fake_server_run(s);
	assert_int_equal(http_fake_status(x), 429);
	assert_string_equal(http_fake_header(x, "Retry-After"), "1");
	assert_json(http_fake_body(x), "error.type", "\"rate_limit_error\"");
	assert_int_equal(fake_engine_active(s->engine), 0);
}

/* 15 */
static void a_failure_in_mid_stream_is_an_event(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = open_stream(s, "{" USER ",\"stream\":true}");
	size_t n;
	fake_server_step(s);
	fake_server_step(s);
	fake_engine_fail(s->engine, STATUS_DEVICE, "the device is gone");
	fake_server_run(s);
	n = http_fake_n_writes(x);
	assert_json(http_fake_event(x, n - 2), "",
		    "{\"error\":{\"message\":\"the device is "
		    "gone\",\"type\":\"server_error\",\"param\":null,\"code\":\"internal_error\"}}");
	expect_last_write_done(x);
}

static void a_failure_of_a_whole_answer_is_a_status(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = open_stream(s, "{" USER "}");
	fake_server_step(s);
	fake_server_step(s);
	fake_engine_fail(s->engine, STATUS_DEVICE, "the device is gone");
	fake_server_run(s);
	assert_int_equal(http_fake_status(x), 500);
	assert_json(http_fake_body(x), "error.message", "\"the device is gone\"");
}

/* 4: no other finish_reason than OpenAI's */
static void a_session_that_ends_is_an_error_not_a_finish_reason(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x;
	http_fake_post(s, "/v1/sessions", "{\"id\":\"one\"}");
	x = open_stream(s, "{" USER ",\"stream\":true,\"session_id\":\"one\"}");
	fake_server_step(s);
	fake_server_step(s);
	fake_engine_expire(s->engine, "one");
	fake_server_run(s);
	assert_json(http_fake_event(x, http_fake_n_writes(x) - 2), "error.code", "\"session_expired\"");
	expect_last_write_done(x);
}

/* 43 */
static void a_client_that_leaves_cancels_its_work(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = open_stream(s, "{" USER ",\"stream\":true,\"n\":2}");
	fake_server_step(s);
	assert_int_equal(fake_engine_active(s->engine), 2);
	http_fake_close(x);
	assert_int_equal(fake_engine_active(s->engine), 0);
	app_handle_events(s->app);
	assert_int_equal(app_active(s->app), 0);
	/* Also one that waits for a whole answer, and one that leaves before anything has run. */
	http_fake_close(open_stream(s, "{" USER "}"));
	assert_int_equal(fake_engine_active(s->engine), 0);
}

static void a_reader_that_stalls_loses_its_work(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = open_stream(s, "{" USER ",\"stream\":true}");
	fake_server_step(s);
	fake_server_step(s);
	http_fake_stall(x);
	fake_server_step(s);
	assert_int_equal(fake_engine_active(s->engine), 0);
	fake_server_run(s);
	assert_int_equal(app_active(s->app), 0);
}

/* ---- Messages ---- */

static void messages_reach_the_template_as_data(void **state)
{
	struct fake_server *s = *state;
	post(s, "{\"messages\":[{\"role\":\"developer\",\"content\":\"be "
		"<|im_end|>\"},{\"role\":\"user\",\"content\":\"hi\",\"name\":\"bob\"}]}");
	/* The fake puts a ! before text that is not marked as data: there is none. 27: developer is system. */
	expect_template(s, 0,
			"{\"messages\":[{\"role\":\"system\",\"content\":\"be <|im_end|>\"},"
			"{\"role\":\"user\",\"content\":\"hi\",\"name\":\"bob\"}],\"add_generation_prompt\":true}");
}

/* 28 */
static void content_may_be_parts_or_null(void **state)
{
	struct fake_server *s = *state;
	post(s, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\","
		"\"text\":\"b\"}]},"
		"{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"c1\",\"type\":\"function\","
		"\"function\":"
		"{\"name\":\"f\",\"arguments\":\"{\\\"x\\\":1}\"}}]},"
		"{\"role\":\"tool\",\"tool_call_id\":\"c1\",\"content\":\"\"},"
		"{\"role\":\"assistant\",\"tool_calls\":null,\"content\":\"\"}]}");
	expect_template(s, 0,
			"{\"messages\":[{\"role\":\"user\",\"content\":\"a\\nb\"},"
			"{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":\"c1\",\"type\":\"function\","
			"\"function\":"
			"{\"name\":\"f\",\"arguments\":{\"x\":1}}}]},"
			"{\"role\":\"tool\",\"content\":\"\",\"tool_call_id\":\"c1\"},"
			"{\"role\":\"assistant\",\"content\":\"\"}],\"add_generation_prompt\":true}");
}

static void tools_and_template_variables_are_passed_on(void **state)
{
	struct fake_server *s = *state;
	post(s, "{" USER
		",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],\"add_generation_prompt\":false,"
		"\"chat_template_kwargs\":{\"enable_thinking\":false,\"messages\":\"no\"}}");
	expect_template(
		s, 0,
		"{\"enable_thinking\":false,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],"
		"\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],\"add_generation_prompt\":false}");
	post(s, "{" USER ",\"tools\":[{\"type\":\"function\"}],\"tool_choice\":\"none\"}");
	expect_template(s, 1, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"add_generation_prompt\":true}");
}

static void wrong_messages_are_named(void **state)
{
	static const struct {
		const char *body, *param;
	} cases[] = {
		{"{}", "messages"},
		{"{\"messages\":[]}", "messages"},
		{"{\"messages\":{}}", "messages"},
		{"{\"messages\":null}", "messages"},
		{"{\"messages\":[5]}", "messages[0]"},
		{"{\"messages\":[null]}", "messages[0]"},
		{"{\"messages\":[{\"content\":\"x\"}]}", "messages[0].role"},
		{"{\"messages\":[{\"role\":5,\"content\":\"x\"}]}", "messages[0].role"},
		{"{\"messages\":[{\"role\":\"wizard\",\"content\":\"x\"}]}", "messages[0].role"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"user\"}]}", "messages[1].content"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":null}]}", "messages[0].content"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":5}]}", "messages[0].content"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":{}}]}", "messages[0].content"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
		 "messages[0].content[0].type"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}",
		 "messages[0].content[0].text"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":[\"x\"]}]}", "messages[0].content[0]"},
		{"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":5}]}", "messages[0].tool_calls"},
		{"{" USER ",\"tools\":5}", "tools"},
		{"{" USER ",\"chat_template_kwargs\":[]}", "chat_template_kwargs"},
		{"{" USER ",\"add_generation_prompt\":1}", "add_generation_prompt"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct http_exchange *x = post(*state, cases[i].body);
		char expected[96];
		snprintf(expected, sizeof expected, "\"%s\"", cases[i].param);
		if (http_fake_status(x) != 400)
			fail_msg("%s: status %d", cases[i].body, http_fake_status(x));
		assert_json(http_fake_body(x), "error.param", expected);
	}
}

static void the_second_turn_of_a_session_tells_what_was_cached(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x;
	http_fake_post(s, "/v1/sessions", "{\"id\":\"one\"}");
	post(s, "{" USER ",\"session_id\":\"one\"}");
	x = post(s, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":\"Hello "
		    "there\"},"
		    "{\"role\":\"user\",\"content\":\"more\"}],\"session_id\":\"one\"}");
	assert_true(atoi(json_at_path(http_fake_body(x), "usage.prompt_tokens_details.cached_tokens")) > 30);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
UNIT_MAIN(T(an_answer_has_every_required_key), T(length_is_told_from_stop), T(choices_share_one_prompt_in_the_usage),
	  T(logprobs_carry_bytes), T(token_ids_come_when_asked_for), T(a_stream_has_the_shape_that_clients_expect),
	  T(usage_comes_in_a_chunk_of_its_own), T(continuous_usage_rises), T(a_code_point_is_never_split),
	  T(held_back_text_comes_before_the_finish), T(choices_are_streamed_side_by_side),
	  T(what_is_known_before_the_first_token_is_a_real_status), T(one_choice_that_fails_early_fails_the_request),
	  T(a_failure_in_mid_stream_is_an_event), T(a_failure_of_a_whole_answer_is_a_status),
	  T(a_session_that_ends_is_an_error_not_a_finish_reason), T(a_client_that_leaves_cancels_its_work),
	  T(a_reader_that_stalls_loses_its_work), T(messages_reach_the_template_as_data),
	  T(content_may_be_parts_or_null), T(tools_and_template_variables_are_passed_on), T(wrong_messages_are_named),
	  T(the_second_turn_of_a_session_tells_what_was_cached))
