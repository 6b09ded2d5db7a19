/* POST /v1/responses. */
#include "tests/unit/unit.h"

#include <stdio.h>

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

static struct http_exchange *post(struct fake_server *s, const char *body)
{
	return http_fake_post(s, "/v1/responses", body);
}

static void expect_prompt(struct fake_server *s, const char *expected)
{
	struct str p = fake_engine_prompt(s->engine, fake_engine_n_submitted(s->engine) - 1);
	char *text = strndup(p.p, p.n);
	assert_string_equal(text, expected);
	free(text);
}

/* client-quirks.md 23 */
static void a_whole_response_has_every_key(void **state)
{
	struct http_exchange *x = post(*state, "{\"input\":\"hello\",\"instructions\":\"be "
					       "\\\"brief\\\"\",\"metadata\":{\"k\":\"v\"},\"temperature\":0.5}");
	const char *body = http_fake_body(x);
	assert_int_equal(http_fake_status(x), 200);
	assert_json(body, "object", "\"response\"");
	assert_json(body, "status", "\"completed\"");
	assert_json(body, "error", "null");
	assert_json(body, "incomplete_details", "null");
	assert_json(body, "instructions", "\"be \\\"brief\\\"\"");
	assert_json(body, "metadata", "{\"k\":\"v\"}");
	assert_json(body, "temperature", "0.5");
	assert_json(body, "previous_response_id", "null");
	assert_json(body, "output.0.type", "\"message\"");
	assert_json(body, "output.0.status", "\"completed\"");
	assert_json(body, "output.0.content",
		    "[{\"type\":\"output_text\",\"text\":\"Hi\",\"annotations\":[],\"logprobs\":[]}]");
	assert_json(body, "usage.output_tokens", "2");
	assert_json(body, "usage.input_tokens_details.cached_tokens", "0");
	assert_json(body, "usage.output_tokens_details.reasoning_tokens", "0");
	assert_true(strncmp(json_at_path(body, "id"), "\"resp_", 6) == 0);
	assert_true(strncmp(json_at_path(body, "output.0.id"), "\"msg_", 5) == 0);
}

static void a_stream_has_the_events_in_order(void **state)
{
	static const char *const types[] = {"response.created",		  "response.in_progress",
					    "response.output_item.added", "response.content_part.added",
					    "response.output_text.delta", "response.output_text.delta",
					    "response.output_text.done",  "response.content_part.done",
					    "response.output_item.done",  "response.completed"};
	struct http_exchange *x = post(*state, "{\"input\":\"hello\",\"stream\":true}");
	size_t n = sizeof types / sizeof *types;
	char item[64], quoted[64], line[64];

	assert_int_equal(http_fake_status(x), 200);
	assert_int_equal(http_fake_n_writes(x), n);
	snprintf(item, sizeof item, "%s", json_at_path(http_fake_event(x, 2), "item.id"));
	for (size_t i = 0; i < n; i++) {
		snprintf(quoted, sizeof quoted, "\"%s\"", types[i]);
		snprintf(line, sizeof line, "event: %s\n", types[i]);
		assert_true(str_starts(http_fake_write(x, i), line)); /* client-quirks.md 17 */
		assert_json(http_fake_event(x, i), "type", quoted);
		snprintf(quoted, sizeof quoted, "%zu", i);
		assert_json(http_fake_event(x, i), "sequence_number", quoted);
		assert_json(http_fake_event(x, i), "stream_id", "(absent)");
	}
	assert_json(http_fake_event(x, 0), "response.status", "\"in_progress\"");
	assert_json(http_fake_event(x, 0), "response.output", "[]");
	assert_json(http_fake_event(x, 0), "response.usage", "null");
	assert_json(http_fake_event(x, 4), "delta", "\"H\"");
	assert_json(http_fake_event(x, 4), "item_id", item);
	assert_json(http_fake_event(x, 4), "output_index", "0");
	assert_json(http_fake_event(x, 4), "content_index", "0");
	assert_json(http_fake_event(x, 6), "text", "\"Hi\"");
	assert_json(http_fake_event(x, 7), "part.text", "\"Hi\"");
	assert_json(http_fake_event(x, 8), "item.content.0.text", "\"Hi\"");
	assert_json(http_fake_event(x, 9), "response.status", "\"completed\"");
	assert_json(http_fake_event(x, 9), "response.output.0.id", item);
	assert_true(http_fake_ended(x));
}

static void length_makes_a_response_incomplete(void **state)
{
	struct http_exchange *x = post(*state, "{\"input\":\"hello\",\"max_output_tokens\":1}");
	assert_json(http_fake_body(x), "status", "\"incomplete\"");
	assert_json(http_fake_body(x), "incomplete_details", "{\"reason\":\"max_output_tokens\"}");
	assert_json(http_fake_body(x), "max_output_tokens", "1");
	x = post(*state, "{\"input\":\"hello\",\"max_output_tokens\":1,\"stream\":true}");
	assert_json(http_fake_event(x, http_fake_n_writes(x) - 1), "type", "\"response.incomplete\"");
	assert_json(http_fake_event(x, http_fake_n_writes(x) - 1), "response.output.0.status", "\"incomplete\"");
}

static void items_become_messages(void **state)
{
	struct fake_server *s = *state;
	post(s, "{\"instructions\":\"sys\",\"input\":["
		"{\"role\":\"user\",\"content\":[{\"type\":\"input_text\",\"text\":\"a\"}]},"
		"{\"type\":\"message\",\"id\":\"msg_1\",\"role\":\"assistant\",\"status\":\"completed\","
		"\"content\":[{\"type\":\"output_text\",\"text\":\"b\",\"annotations\":[]}]},"
		"{\"type\":\"reasoning\",\"summary\":[]},"
		"{\"type\":\"function_call\",\"call_id\":\"c1\",\"name\":\"f\",\"arguments\":\"{\\\"x\\\":1}\"},"
		"{\"type\":\"function_call\",\"call_id\":\"c2\",\"name\":\"g\",\"arguments\":\"{}\"},"
		"{\"type\":\"function_call_output\",\"call_id\":\"c1\",\"output\":\"r\"}],"
		"\"tools\":[{\"type\":\"function\",\"name\":\"f\",\"parameters\":{\"type\":\"object\"},\"strict\":null}"
		"]}");
	expect_prompt(s,
		      "{\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":"
		      "\"object\"}}}],"
		      "\"messages\":[{\"role\":\"system\",\"content\":\"sys\"},{\"role\":\"user\",\"content\":\"a\"},"
		      "{\"role\":\"assistant\",\"content\":\"b\"},"
		      "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":["
		      "{\"type\":\"function\",\"id\":\"c1\",\"function\":{\"name\":\"f\",\"arguments\":{\"x\":1}}},"
		      "{\"type\":\"function\",\"id\":\"c2\",\"function\":{\"name\":\"g\",\"arguments\":{}}}]},"
		      "{\"role\":\"tool\",\"content\":\"r\",\"tool_call_id\":\"c1\"}],\"add_generation_prompt\":true}");
}

static void logprobs_are_included_on_request(void **state)
{
	struct http_exchange *x = post(
		*state,
		"{\"input\":\"a\",\"include\":[\"message.output_text.logprobs\"],\"top_logprobs\":1,\"stream\":true}");
	assert_json(http_fake_event(x, 4), "logprobs.0.token", "\"H\"");
	assert_json(http_fake_event(x, 4), "logprobs.0.top_logprobs.0.logprob", "-0.5");
	assert_json(http_fake_event(x, 6), "logprobs.1.token", "\"i\"");
	assert_json(http_fake_event(x, 9), "response.output.0.content.0.logprobs.1.token", "\"i\"");
	assert_json(http_fake_event(x, 9), "response.top_logprobs", "1");
}

static void wrong_requests_are_named(void **state)
{
	static const struct {
		const char *body, *param;
	} cases[] = {
		{"{}", "input"},
		{"{\"input\":[]}", "input"},
		{"{\"input\":5}", "input"},
		{"{\"input\":[5]}", "input[0]"},
		{"{\"input\":[{\"role\":\"wizard\",\"content\":\"a\"}]}", "input[0].role"},
		{"{\"input\":[{\"role\":\"user\"}]}", "input[0].content"},
		{"{\"input\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_image\"}]}]}",
		 "input[0].content[0].type"},
		{"{\"input\":[{\"type\":\"item_reference\",\"id\":\"x\"}]}", "input[0].type"},
		{"{\"input\":[{\"type\":\"function_call\",\"name\":\"f\"}]}", "input[0].call_id"},
		{"{\"input\":[{\"type\":\"function_call_output\",\"call_id\":\"x\"}]}", "input[0].output"},
		{"{\"input\":\"a\",\"instructions\":5}", "instructions"},
		{"{\"input\":\"a\",\"metadata\":[]}", "metadata"},
		{"{\"input\":\"a\",\"temperature\":5}", "temperature"},
		{"{\"input\":\"a\",\"max_output_tokens\":0}", "max_output_tokens"},
		{"{\"input\":\"a\",\"tools\":[{\"type\":\"web_search\"}]}", "tools[0].type"},
		{"{\"input\":\"a\",\"background\":true}", "background"},
		{"{\"input\":\"a\",\"truncation\":\"some\"}", "truncation"},
		{"{\"input\":\"a\",\"text\":{\"format\":{\"type\":\"json_schema\"}}}", "text.format.schema"},
		{"{\"input\":\"a\",\"conversation\":\"c\"}", "conversation"},
		{"{\"input\":\"a\",\"previous_response_id\":5}", "previous_response_id"},
		{"{\"input\":\"a\",\"previous_response_id\":\"resp_1\"}", "previous_response_id"},
		{"{\"input\":\"a\",\"session_id\":\"?\"}", "session_id"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct http_exchange *x = post(*state, cases[i].body);
		char expected[96];
		snprintf(expected, sizeof expected, "\"%s\"", cases[i].param);
		if (http_fake_status(x) != 400)
			fail_msg("%s: status %d", cases[i].body, http_fake_status(x));
		assert_json(http_fake_body(x), "error.param", expected);
	}
	assert_int_equal(
		http_fake_status(post(
			*state, "{\"input\":\"a\",\"truncation\":\"disabled\",\"store\":true,\"reasoning\":null}")),
		200);
}

static void failures_before_the_first_token_are_statuses(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_context(s->engine, 30);
	struct http_exchange *x = post(s, "{\"input\":\"hello\",\"stream\":true}");
	assert_int_equal(http_fake_status(x), 400);
	assert_json(http_fake_body(x), "error.code", "\"context_length_exceeded\"");
}

static void a_failure_in_mid_stream_is_a_terminal_event(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_request(s, HTTP_POST, "/v1/responses", NULL,
						    "{\"input\":\"hello\",\"stream\":true}"),
			     *y;
	y = http_fake_request(s, HTTP_POST, "/v1/responses", NULL, "{\"input\":\"hello\"}");
	fake_server_step(s);
	fake_server_step(s);
	fake_engine_fail(s->engine, STATUS_DEVICE, "the device is gone");
	fake_server_run(s);
	assert_json(http_fake_event(x, http_fake_n_writes(x) - 1), "type", "\"response.failed\"");
	assert_json(http_fake_event(x, http_fake_n_writes(x) - 1), "response.status", "\"failed\"");
	assert_json(http_fake_event(x, http_fake_n_writes(x) - 1), "response.error",
		    "{\"code\":\"internal_error\",\"message\":\"the device is gone\"}");
	assert_true(http_fake_ended(x));
	assert_int_equal(http_fake_status(y), 500);
}

static void a_client_that_leaves_cancels_its_work(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x =
		http_fake_request(s, HTTP_POST, "/v1/responses", NULL, "{\"input\":\"hello\",\"stream\":true}");
	fake_server_step(s);
	http_fake_close(x);
	assert_int_equal(fake_engine_active(s->engine), 0);
}

static void what_is_not_there_is_not_found(void **state)
{
	struct http_exchange *x = http_fake_get(*state, "/v1/responses/resp_1");
	assert_int_equal(http_fake_status(x), 404);
	assert_json(http_fake_body(x), "error.code", "\"response_not_found\"");
	x = http_fake_get(*state, "/v1/responses");
	assert_int_equal(http_fake_status(x), 426);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
UNIT_MAIN(T(a_whole_response_has_every_key), T(a_stream_has_the_events_in_order), T(length_makes_a_response_incomplete),
	  T(items_become_messages), T(logprobs_are_included_on_request), T(wrong_requests_are_named),
	  T(failures_before_the_first_token_are_statuses), T(a_failure_in_mid_stream_is_a_terminal_event),
	  T(a_client_that_leaves_cancels_its_work), T(what_is_not_there_is_not_found))
