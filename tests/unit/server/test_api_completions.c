/* POST /v1/completions. */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "tests/support/fake_engine.h"
#include "tests/support/fake_transport.h"

static int setup(void **state)
{
	static struct fake_server s;
	fake_server_start(&s);
	fake_engine_set_reply(s.engine, "xyz");
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
	return http_fake_post(s, "/v1/completions", body);
}

static void an_answer_has_the_legacy_shape(void **state)
{
	struct http_exchange *x = post(*state, "{\"prompt\":\"abc\"}");
	const char *body = http_fake_body(x);
	assert_int_equal(http_fake_status(x), 200);
	assert_json(body, "object", "\"text_completion\"");
	assert_json(body, "choices", "[{\"index\":0,\"text\":\"xyz\",\"logprobs\":null,\"finish_reason\":\"stop\"}]");
	assert_json(body, "usage",
		    "{\"prompt_tokens\":3,\"completion_tokens\":3,\"total_tokens\":6,\"prompt_tokens_details\":{"
		    "\"cached_tokens\":0}}");
	assert_true(strncmp(json_at_path(body, "id"), "\"cmpl-", 6) == 0);
}

static void prompts_come_in_four_forms(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x;
	post(s, "{\"prompt\":\"a\\u0000b\"}");
	assert_int_equal(fake_engine_submitted(s->engine, 0)->text_n, 3);
	post(s, "{\"prompt\":[1,2,3.0]}");
	assert_int_equal(fake_engine_submitted(s->engine, 1)->input, ENGINE_INPUT_TOKENS);
	assert_int_equal(fake_engine_submitted(s->engine, 1)->n_tokens, 3);
	assert_int_equal(fake_engine_submitted(s->engine, 1)->tokens[2], 3);
	x = post(s, "{\"prompt\":[\"one\",\"three\"],\"n\":2}");
	assert_json(http_fake_body(x), "choices.3.index", "3");
	assert_json(http_fake_body(x), "usage.prompt_tokens", "8");
	assert_json(http_fake_body(x), "usage.completion_tokens", "12");
	assert_true(str_is(fake_engine_prompt(s->engine, 2), "one"));
	assert_true(str_is(fake_engine_prompt(s->engine, 3), "one"));
	assert_true(str_is(fake_engine_prompt(s->engine, 4), "three"));
	x = post(s, "{\"prompt\":[[1],[2,3]]}");
	assert_json(http_fake_body(x), "usage.prompt_tokens", "3");
	assert_int_equal(fake_engine_submitted(s->engine, 7)->n_tokens, 2);
	assert_int_equal(http_fake_status(post(s, "{\"prompt\":\"\"}")), 200);
}

static void wrong_prompts_are_named(void **state)
{
	static const struct {
		const char *prompt, *param;
	} cases[] = {
		{"null", "prompt"},
		{"5", "prompt"},
		{"{}", "prompt"},
		{"[]", "prompt"},
		{"[[]]", "prompt[0]"},
		{"[null]", "prompt[0]"},
		{"[1,-2]", "prompt[1]"},
		{"[1,\"a\"]", "prompt[1]"},
		{"[1,null]", "prompt[1]"},
		{"[1,1.5]", "prompt[1]"},
		{"[1,3000000000]", "prompt[1]"},
		{"[\"a\",5]", "prompt[1]"},
		{"[[1],[true]]", "prompt[1][0]"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		char body[128], expected[64];
		snprintf(body, sizeof body, "{\"prompt\":%s}", cases[i].prompt);
		snprintf(expected, sizeof expected, "\"%s\"", cases[i].param);
		struct http_exchange *x = post(*state, body);
		if (http_fake_status(x) != 400)
			fail_msg("%s: status %d", body, http_fake_status(x));
		assert_json(http_fake_body(x), "error.param", expected);
	}
	/* Whether the vocabulary has an id is for the engine to say. */
	assert_int_equal(http_fake_status(post(*state, "{\"prompt\":[5000]}")), 400);
}

static void too_many_prompts_are_refused(void **state)
{
	struct buf b = BUF_INIT;
	buf_puts(&b, "{\"n\":128,\"prompt\":[\"0\"");
	for (int i = 1; i < 9; i++)
		buf_puts(&b, ",\"x\"");
	buf_puts(&b, "]}");
	assert_json(http_fake_body(post(*state, b.data)), "error.param", "\"prompt\"");
	buf_free(&b);
}

static void logprobs_have_four_parallel_arrays(void **state)
{
	struct http_exchange *x = post(*state, "{\"prompt\":\"abc\",\"logprobs\":2,\"max_tokens\":2}");
	assert_json(http_fake_body(x), "choices.0.logprobs",
		    "{\"tokens\":[\"x\",\"y\"],\"token_logprobs\":[-0.5,-0.5],"
		    "\"top_logprobs\":[{\"x\":-0.5,\"y\":-1.5},{\"y\":-0.5,\"z\":-1.5}],\"text_offset\":[0,1]}");
	x = post(*state, "{\"prompt\":\"abc\",\"logprobs\":0,\"max_tokens\":1}");
	assert_json(http_fake_body(x), "choices.0.logprobs.top_logprobs", "[{\"x\":-0.5}]");
	assert_int_equal(http_fake_status(post(*state, "{\"prompt\":\"abc\",\"logprobs\":true}")), 400);
	assert_int_equal(http_fake_status(post(*state, "{\"prompt\":\"abc\",\"logprobs\":21}")), 400);
}

/* As lm-eval asks for a text's log-likelihood. */
static void echo_scores_the_prompt(void **state)
{
	struct http_exchange *x =
		post(*state, "{\"prompt\":[97,98,256,99],\"echo\":true,\"logprobs\":1,\"max_tokens\":0}");
	assert_json(http_fake_body(x), "choices.0.text", "\"abc\"");
	/* <s> is not in the text, so it takes no room in it. */
	assert_json(http_fake_body(x), "choices.0.logprobs",
		    "{\"tokens\":[\"a\",\"b\",\"<s>\",\"c\"],\"token_logprobs\":[null,-0.5,-0.5,-0.5],"
		    "\"top_logprobs\":[null,{\"b\":-0.5},{\"bytes:\\\\x00\":-0.5,\"<s>\":-0.5},{\"c\":-0.5}],\"text_"
		    "offset\":[0,1,2,2]}");
	assert_json(http_fake_body(x), "usage.completion_tokens", "0");
	assert_json(http_fake_body(x), "choices.0.finish_reason", "\"length\"");
	x = post(*state, "{\"prompt\":\"h\xc3\xa9\",\"echo\":true,\"logprobs\":0,\"max_tokens\":1}");
	assert_json(http_fake_body(x), "choices.0.text", "\"h\xc3\xa9x\"");
	assert_json(http_fake_body(x), "choices.0.logprobs.tokens",
		    "[\"h\",\"bytes:\\\\xc3\",\"bytes:\\\\xa9\",\"x\"]");
	/* Characters, not bytes. */
	assert_json(http_fake_body(x), "choices.0.logprobs.text_offset", "[0,1,2,2]");
	x = post(*state, "{\"prompt\":\"ab\",\"echo\":true}");
	assert_json(http_fake_body(x), "choices.0.text", "\"abxyz\"");
	assert_json(http_fake_body(x), "choices.0.logprobs", "null");
}

static void max_tokens_0_computes_the_prompt_only(void **state)
{
	struct http_exchange *x = post(*state, "{\"prompt\":\"abc\",\"max_tokens\":0}");
	assert_json(http_fake_body(x), "choices.0.text", "\"\"");
	assert_json(http_fake_body(x), "choices.0.finish_reason", "\"length\"");
}

static void token_ids_come_as_in_vllm(void **state)
{
	struct http_exchange *x = post(*state, "{\"prompt\":\"ab\",\"return_token_ids\":true}");
	assert_json(http_fake_body(x), "choices.0.prompt_token_ids", "[97,98]");
	assert_json(http_fake_body(x), "choices.0.token_ids", "[120,121,122]");
	x = post(*state, "{\"prompt\":\"ab\",\"return_token_ids\":true,\"stream\":true}");
	assert_json(http_fake_event(x, 0), "choices.0.prompt_token_ids", "[97,98]");
	assert_json(http_fake_event(x, 0), "choices.0.token_ids", "[120]");
	assert_json(http_fake_event(x, 1), "choices.0.prompt_token_ids", "(absent)");
	assert_json(http_fake_event(x, 1), "choices.0.token_ids", "[121]");
}

static void a_stream_ends_with_text_and_reason_together(void **state)
{
	struct http_exchange *x = post(*state, "{\"prompt\":\"ab\",\"stream\":true,\"stop\":\"zz\"}");
	assert_int_equal(http_fake_n_writes(x), 4);
	assert_json(http_fake_event(x, 0), "choices",
		    "[{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":null}]");
	assert_json(http_fake_event(x, 2), "choices",
		    "[{\"index\":0,\"text\":\"z\",\"logprobs\":null,\"finish_reason\":\"stop\"}]");
	assert_true(str_is(http_fake_write(x, 3), "data: [DONE]\n\n"));
}

static void an_echoed_stream_begins_with_the_prompt(void **state)
{
	struct http_exchange *x =
		post(*state, "{\"prompt\":\"ab\",\"stream\":true,\"echo\":true,\"logprobs\":0,\"max_tokens\":1}");
	assert_json(http_fake_event(x, 0), "choices.0.text", "\"ab\"");
	assert_json(http_fake_event(x, 0), "choices.0.logprobs.token_logprobs", "[null,-0.5]");
	assert_json(http_fake_event(x, 1), "choices.0.text", "\"x\"");
	assert_json(http_fake_event(x, 1), "choices.0.logprobs.text_offset", "[2]");
	assert_json(http_fake_event(x, 2), "choices.0.logprobs", "null");
}

static void offsets_go_on_from_chunk_to_chunk(void **state)
{
	struct http_exchange *x = post(*state, "{\"prompt\":\"ab\",\"stream\":true,\"logprobs\":0}");
	assert_json(http_fake_event(x, 0), "choices.0.logprobs.text_offset", "[0]");
	assert_json(http_fake_event(x, 1), "choices.0.logprobs.text_offset", "[1]");
	assert_json(http_fake_event(x, 2), "choices.0.logprobs.text_offset", "[2]");
}

static void a_prompt_that_fails_takes_the_others_with_it(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x;
	fake_engine_set_context(s->engine, 20);
	x = post(s, "{\"prompt\":[\"a\",\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\",\"b\"],\"max_tokens\":1,\"stream\":true}");
	assert_int_equal(http_fake_status(x), 400);
	assert_json(http_fake_body(x), "error.code", "\"context_length_exceeded\"");
	assert_int_equal(fake_engine_active(s->engine), 0);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
UNIT_MAIN(T(an_answer_has_the_legacy_shape), T(prompts_come_in_four_forms), T(wrong_prompts_are_named),
	  T(too_many_prompts_are_refused), T(logprobs_have_four_parallel_arrays), T(echo_scores_the_prompt),
	  T(max_tokens_0_computes_the_prompt_only), T(token_ids_come_as_in_vllm),
	  T(a_stream_ends_with_text_and_reason_together), T(an_echoed_stream_begins_with_the_prompt),
	  T(offsets_go_on_from_chunk_to_chunk), T(a_prompt_that_fails_takes_the_others_with_it))
