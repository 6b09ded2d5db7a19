/* Calls of tools: what is found in a model's text, and what becomes of it in an answer. */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "server/tool_parser.h"
#include "tests/support/fake_engine.h"
#include "tests/support/fake_transport.h"

/* ---- The parser ---- */

/* What came out: text as it is, calls as [name|arguments]. */
struct heard {
	struct buf out;
	bool in_call;
};

static void end_call(struct heard *h)
{
	if (h->in_call)
		buf_putc(&h->out, ']');
	h->in_call = false;
}

static void on_text(void *arg, struct str s)
{
	struct heard *h = arg;
	end_call(h);
	buf_append(&h->out, s.p, s.n);
}

static void on_call(void *arg, struct str name)
{
	struct heard *h = arg;
	end_call(h);
	h->in_call = true;
	buf_printf(&h->out, "[%.*s|", STR_ARG(name));
}

static void on_arguments(void *arg, struct str s)
{
	struct heard *h = arg;
	assert_true(h->in_call);
	buf_append(&h->out, s.p, s.n);
}

static const struct tool_sink sink = {on_text, on_call, on_arguments};

/* Cuts the text into pieces of n bytes; the answer does not depend on it. */
static void expect_cut(enum tool_family family, const char *text, const char *want, size_t n)
{
	struct buf names = BUF_INIT;
	struct heard h = {BUF_INIT, false};
	size_t len = strlen(text);
	buf_append(&names, "f\0get_weather", sizeof "f\0get_weather");
	struct tool_parser *p = tool_parser_create(family, &names, &sink, &h);
	assert_non_null(p);
	for (size_t i = 0; i < len; i += n)
		tool_parser_push(p, (struct str){text + i, len - i < n ? len - i : n});
	tool_parser_finish(p);
	assert_false(tool_parser_failed(p));
	if (h.in_call)
		buf_putc(&h.out, ']');
	if (strcmp(buf_str(&h.out).p, want) != 0)
		fail_msg("%s\ncut by %zu gives\n%s\nnot\n%s", text, n, buf_str(&h.out).p, want);
	tool_parser_destroy(p);
	buf_free(&h.out);
	buf_free(&names);
}

static void expect(enum tool_family family, const char *text, const char *want)
{
	for (size_t n = 1; n < 12; n++)
		expect_cut(family, text, want, n);
	expect_cut(family, text, want, 1000);
}

static void plain_text_passes_through(void **state)
{
	(void)state;
	static const char *const texts[] = {"",       "Hello",     "a < b", "<tool", "<tool_call",
	                                    "  x \n", "{\"a\":1}", "[1]",   " \n",   "<<tool_cal>"};
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
		for (int f = TOOLS_TAGGED; f <= TOOLS_MISTRAL; f++)
			expect((enum tool_family)f, texts[i], texts[i]);
}

static void tagged_calls_are_found(void **state)
{
	(void)state;
	expect(TOOLS_TAGGED, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\\\"\"]}}\n</tool_call>",
	       "[f|{\"a\": [1, \"}\\\"\"]}]");
	expect(TOOLS_TAGGED, "Let me see.\n\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>",
	       "Let me see.[f|{}]");
	expect(TOOLS_TAGGED,
	       "<tool_call>{\"name\":\"f\",\"arguments\":{}}</"
	       "tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{\"x\":1}}</tool_call>\n",
	       "[f|{}][g|{\"x\":1}]");
	/* The tag is left open by models that stop early, and a new one may begin at once. */
	expect(TOOLS_TAGGED, "<tool_call>{\"name\":\"f\",\"arguments\":{}}", "[f|{}]");
	expect(TOOLS_TAGGED, "<tool_call>{\"name\":\"f\",\"arguments\":{}}<tool_call>{\"name\":\"f\"}", "[f|{}][f|{}]");
	/* A list in the tags, as SmolLM2 has it. */
	expect(TOOLS_TAGGED,
	       "<tool_call>[{\"name\":\"f\",\"arguments\":{}}, {\"name\":\"g\",\"arguments\":{}}]</tool_call>",
	       "[f|{}][g|{}]");
	/* Arguments before the name, as a string, or none. */
	expect(TOOLS_TAGGED, "<tool_call>{\"arguments\":{\"a\":1},\"name\":\"f\"}</tool_call>", "[f|{\"a\":1}]");
	expect(TOOLS_TAGGED, "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1}\"}</tool_call>",
	       "[f|{\"a\":1}]");
	expect(TOOLS_TAGGED, "<tool_call>{\"name\":\"f\"}</tool_call>", "[f|{}]");
	expect(TOOLS_TAGGED, "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call> Done.", "[f|{}]Done.");
}

static void what_is_no_call_is_text(void **state)
{
	(void)state;
	static const char *const texts[] = {
		"<tool_call>hello",
		"<tool_call>{\"name\":5}",
		"<tool_call>{\"a\":1}</tool_call>",
		"<tool_call>{\"name\" \"f\"}",
		"<tool_call>{",
	};
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
		expect(TOOLS_TAGGED, texts[i], texts[i]);
}

static void an_answer_that_is_cut_leaves_what_there_was_of_the_arguments(void **state)
{
	(void)state;
	expect(TOOLS_TAGGED, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"hal", "[f|{\"a\":\"hal]");
}

static void llama_calls_are_found_by_the_tools_names(void **state)
{
	(void)state;
	expect(TOOLS_LLAMA, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "[f|{\"a\": 1}]");
	expect(TOOLS_LLAMA, "{\"type\": \"function\", \"name\": \"get_weather\", \"parameters\": {}}",
	       "[get_weather|{}]");
	expect(TOOLS_LLAMA, "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}", "[f|{}]");
	expect(TOOLS_LLAMA, "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"f\", \"parameters\": {\"b\":2}}",
	       "[f|{}][f|{\"b\":2}]");
	/* Any other JSON is an answer. */
	expect(TOOLS_LLAMA, "{\"name\": \"Ada\", \"age\": 36}", "{\"name\": \"Ada\", \"age\": 36}");
	expect(TOOLS_LLAMA, "So: {\"name\": \"f\"}", "So: {\"name\": \"f\"}");
}

static void mistral_calls_are_a_list(void **state)
{
	(void)state;
	expect(TOOLS_MISTRAL,
	       "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
	       "[f|{\"a\": 1}][g|{}]");
	expect(TOOLS_MISTRAL, "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}]", "[f|{}]");
}

/* ---- The API ---- */

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

#define TOOLS                                                                                                          \
	"\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\","          \
	"\"properties\":{\"a\":{\"type\":\"integer\"}},\"required\":[\"a\"]}}}]"
#define ASK "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]," TOOLS

static struct http_exchange *post(struct fake_server *s, const char *body)
{
	return http_fake_post(s, "/v1/chat/completions", body);
}

/* client-quirks.md 5, 6, 7, 10, 28 */
static void a_call_is_a_message_without_content(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>");
	const char *body = http_fake_body(post(s, ASK "}"));
	assert_json(body, "choices.0.message.content", "null");
	assert_json(body, "choices.0.finish_reason", "\"tool_calls\"");
	assert_json(body, "choices.0.message.tool_calls.0.type", "\"function\"");
	assert_json(body, "choices.0.message.tool_calls.0.function",
	            "{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": 1}\"}");
	assert_json(body, "choices.0.message.tool_calls.0.index", "(absent)");
	assert_true(strncmp(json_at_path(body, "choices.0.message.tool_calls.0.id"), "\"call_", 6) == 0);
	/* Without tools it is text like any other. */
	body = http_fake_body(post(s, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}"));
	assert_json(body, "choices.0.message.tool_calls", "(absent)");
	assert_json(body, "choices.0.finish_reason", "\"stop\"");
	body = http_fake_body(post(s, ASK ",\"tool_choice\":\"none\"}"));
	assert_json(body, "choices.0.message.tool_calls", "(absent)");
}

static void text_before_a_call_is_kept(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "Hm.<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>"
					 "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":2}}</tool_call>");
	const char *body = http_fake_body(post(s, ASK "}"));
	assert_json(body, "choices.0.message.content", "\"Hm.\"");
	assert_json(body, "choices.0.message.tool_calls.1.function.arguments", "\"{\\\"a\\\":2}\"");
}

static void an_answer_that_is_cut_says_length(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": 1}}</tool_call>");
	const char *body = http_fake_body(post(s, ASK ",\"max_tokens\":40}"));
	assert_json(body, "choices.0.finish_reason", "\"length\"");
	assert_json(body, "choices.0.message.tool_calls.0.function.name", "\"f\"");
}

/* client-quirks.md 2, 5, 6 */
static void a_stream_names_a_call_once_and_numbers_each_delta(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "A<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1}}</tool_call>"
					 "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":22}}</tool_call>");
	struct http_exchange *x = post(s, ASK ",\"stream\":true}");
	struct buf arguments[2] = {BUF_INIT, BUF_INIT};
	int names = 0;
	size_t n = http_fake_n_writes(x);
	for (size_t i = 0; i + 1 < n; i++) {
		const char *e = http_fake_event(x, i);
		if (strcmp(json_at_path(e, "choices.0.delta.tool_calls"), "(absent)") == 0)
			continue;
		int index = atoi(json_at_path(e, "choices.0.delta.tool_calls.0.index"));
		assert_in_range(index, 0, 1);
		assert_json(e, "choices.0.delta.tool_calls.1", "(absent)");
		assert_json(e, "choices.0.delta.content", "(absent)");
		assert_json(e, "choices.0.finish_reason", "null");
		bool first = strcmp(json_at_path(e, "choices.0.delta.tool_calls.0.id"), "(absent)") != 0;
		names += first;
		assert_json(e, "choices.0.delta.tool_calls.0.type", first ? "\"function\"" : "(absent)");
		assert_json(e, "choices.0.delta.tool_calls.0.function.name", first ? "\"f\"" : "(absent)");
		const char *part = json_at_path(e, "choices.0.delta.tool_calls.0.function.arguments");
		assert_int_equal(part[0], '"');
		buf_append(&arguments[index], part + 1, strlen(part) - 2);
	}
	assert_int_equal(names, 2);
	assert_string_equal(buf_str(&arguments[0]).p, "{\\\"a\\\":1}");
	assert_string_equal(buf_str(&arguments[1]).p, "{\\\"a\\\":22}");
	assert_json(http_fake_event(x, n - 2), "choices.0.finish_reason", "\"tool_calls\"");
	assert_json(http_fake_event(x, n - 2), "choices.0.delta", "{}");
	buf_free(&arguments[0]);
	buf_free(&arguments[1]);
}

static void a_call_may_be_demanded(void **state)
{
	struct fake_server *s = *state;
	post(s, ASK ",\"tool_choice\":\"required\"}");
	post(s, ASK ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"f\"}}}");
	post(s, ASK ",\"tool_choice\":\"auto\"}");
	assert_non_null(fake_engine_submitted(s->engine, 0)->grammar);
	assert_non_null(fake_engine_submitted(s->engine, 1)->grammar);
	assert_null(fake_engine_submitted(s->engine, 2)->grammar);
}

static void wrong_tools_are_named(void **state)
{
	static const struct {
		const char *fields, *param;
	} cases[] = {
		{"\"tool_choice\":\"required\"", "tool_choice"},
		{"\"tool_choice\":{\"type\":\"function\"}", "tool_choice.function.name"},
		{"\"tool_choice\":7", "tool_choice"},
		{"\"tool_choice\":\"maybe\"", "tool_choice"},
		{"\"tools\":{}", "tools"},
		{"\"tools\":[7]", "tools[0]"},
		{"\"tools\":[{\"type\":\"retrieval\"}]", "tools[0].type"},
		{"\"tools\":[{\"type\":\"function\"}]", "tools[0].function"},
		{"\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"\"}}]", "tools[0].function.name"},
		{"\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":1}}]",
	         "tools[0].function.parameters"},
		{"\"functions\":[{\"name\":\"f\"}]", "functions"},
		{TOOLS ",\"parallel_tool_calls\":1", "parallel_tool_calls"},
		{TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"g\"}}", "tool_choice"},
		{"\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"not\":{}}}}],\"tool_"
	         "choice\":\"required\"",
	         "tools"},
		{TOOLS ",\"response_format\":{\"type\":\"json_object\"}", "response_format"},
	};
	char body[1024], expected[96];
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		snprintf(body, sizeof body, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],%s}",
		         cases[i].fields);
		struct http_exchange *x = post(*state, body);
		if (http_fake_status(x) != 400)
			fail_msg("%s: status %d", cases[i].fields, http_fake_status(x));
		snprintf(expected, sizeof expected, "\"%s\"", cases[i].param);
		assert_json(http_fake_body(x), "error.param", expected);
	}
}

static void a_template_without_tools_is_told_of_them_in_words(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_template(s->engine, "{{ messages }}");
	post(s, "{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\",\"content\":\"hi\"},"
	        "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"c\",\"type\":\"function\","
	        "\"function\":"
	        "{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1}\"}}]},"
	        "{\"role\":\"tool\",\"tool_call_id\":\"c\",\"content\":\"42\"}]," TOOLS "}");
	struct str prompt = fake_engine_prompt(s->engine, 0);
	char *text = strndup(prompt.p, prompt.n);
	assert_non_null(strstr(text, "{\"role\":\"system\",\"content\":\"Be brief.\\n\\n# Tools"));
	assert_non_null(strstr(text, "{\"role\":\"assistant\",\"content\":\"<tool_call>\\n{\\\"name\\\": \\\"f\\\", "
				     "\\\"arguments\\\": {\\\"a\\\":1}}\\n</tool_call>\"}"));
	assert_non_null(strstr(text, "{\"role\":\"user\",\"content\":\"<tool_response>\\n42\\n</tool_response>\"}"));
	assert_null(strstr(text, "\"tools\":"));
	free(text);
	post(s, ASK "}");
	prompt = fake_engine_prompt(s->engine, 1);
	assert_true(str_starts(prompt, "{\"messages\":[{\"role\":\"system\",\"content\":\"# Tools"));
}

static void a_form_of_the_answer_becomes_a_grammar(void **state)
{
	struct fake_server *s = *state;
	post(s,
	     "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"response_format\":{\"type\":\"json_object\"}}");
	post(s, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"n\":2,\"response_format\":{\"type\":\"json_"
	        "schema\","
	        "\"json_schema\":{\"name\":\"x\",\"strict\":true,\"schema\":{\"type\":\"object\"}}}}");
	http_fake_post(s, "/v1/responses",
	               "{\"input\":\"hi\",\"text\":{\"format\":{\"type\":\"json_schema\",\"name\":\"x\","
	               "\"schema\":{\"type\":\"object\"}}}}");
	http_fake_post(s, "/v1/completions", "{\"prompt\":\"hi\",\"response_format\":{\"type\":\"json_object\"}}");
	assert_int_equal(fake_engine_n_submitted(s->engine), 5);
	for (size_t i = 0; i < 5; i++)
		assert_non_null(fake_engine_submitted(s->engine, i)->grammar);
}

/* The Responses API: a call is an item of its own, and continues as one. */
static void a_response_has_calls_as_items(void **state)
{
	static const char *const types[] = {
		"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
		"response.output_text.delta", "response.output_text.done", "response.content_part.done",
		"response.output_item.done", "response.output_item.added", "response.function_call_arguments.delta",
		"response.function_call_arguments.done", "response.output_item.done", "response.completed"};
	struct fake_server *s = *state;
	size_t at = 0;
	fake_engine_set_reply(s->engine, "\xc3\xa9<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1}}</tool_call>");
	struct http_exchange *x =
		http_fake_post(s, "/v1/responses",
	                       "{\"input\":\"hi\",\"stream\":true,\"tools\":[{\"type\":\"function\",\"name\":\"f\"}]}");
	for (size_t i = 0; i < http_fake_n_writes(x); i++) {
		char got[80];
		snprintf(got, sizeof got, "%s", json_at_path(http_fake_event(x, i), "type"));
		/* Deltas of the arguments may be several. */
		if (i && strstr(got, "arguments.delta") && at && strstr(types[at - 1], "arguments.delta"))
			continue;
		char want[80];
		snprintf(want, sizeof want, "\"%s\"", types[at < 13 ? at : 12]);
		assert_string_equal(got, want);
		at++;
	}
	assert_int_equal(at, 13);
	assert_json(http_fake_event(x, 4), "delta", "\"\xc3\xa9\"");
	x = http_fake_post(s, "/v1/responses", "{\"input\":\"hi\",\"tools\":[{\"type\":\"function\",\"name\":\"f\"}],"
					       "\"parallel_tool_calls\":false}");
	const char *body = http_fake_body(x);
	assert_json(body, "output.0.type", "\"message\"");
	assert_json(body, "output.0.content.0.text", "\"\xc3\xa9\"");
	assert_json(body, "output.1.type", "\"function_call\"");
	assert_json(body, "output.1.name", "\"f\"");
	assert_json(body, "output.1.arguments", "\"{\\\"a\\\":1}\"");
	assert_json(body, "output.1.status", "\"completed\"");
	assert_true(strncmp(json_at_path(body, "output.1.call_id"), "\"call_", 6) == 0);
	assert_json(body, "parallel_tool_calls", "false");
	assert_json(body, "tools", "[{\"type\":\"function\",\"name\":\"f\"}]");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(plain_text_passes_through),
		cmocka_unit_test(tagged_calls_are_found),
		cmocka_unit_test(what_is_no_call_is_text),
		cmocka_unit_test(an_answer_that_is_cut_leaves_what_there_was_of_the_arguments),
		cmocka_unit_test(llama_calls_are_found_by_the_tools_names),
		cmocka_unit_test(mistral_calls_are_a_list),
		cmocka_unit_test_setup_teardown(a_call_is_a_message_without_content, setup, teardown),
		cmocka_unit_test_setup_teardown(text_before_a_call_is_kept, setup, teardown),
		cmocka_unit_test_setup_teardown(an_answer_that_is_cut_says_length, setup, teardown),
		cmocka_unit_test_setup_teardown(a_stream_names_a_call_once_and_numbers_each_delta, setup, teardown),
		cmocka_unit_test_setup_teardown(a_call_may_be_demanded, setup, teardown),
		cmocka_unit_test_setup_teardown(wrong_tools_are_named, setup, teardown),
		cmocka_unit_test_setup_teardown(a_template_without_tools_is_told_of_them_in_words, setup, teardown),
		cmocka_unit_test_setup_teardown(a_form_of_the_answer_becomes_a_grammar, setup, teardown),
		cmocka_unit_test_setup_teardown(a_response_has_calls_as_items, setup, teardown),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
