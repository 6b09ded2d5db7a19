/* Every parameter's type and range, through the API, so that the errors are seen as clients see them. */
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

static struct http_exchange *post_chat(struct fake_server *s, const char *fields)
{
	char body[2048];
	snprintf(body, sizeof body, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]%s%s}", fields[0] ? "," : "",
		 fields);
	return http_fake_post(s, "/v1/chat/completions", body);
}

static struct http_exchange *post_completion(struct fake_server *s, const char *fields)
{
	char body[2048];
	snprintf(body, sizeof body, "{\"prompt\":\"hi\"%s%s}", fields[0] ? "," : "", fields);
	return http_fake_post(s, "/v1/completions", body);
}

/* The last request that reached the engine. */
static const struct engine_request *last(struct fake_server *s)
{
	return fake_engine_submitted(s->engine, fake_engine_n_submitted(s->engine) - 1);
}

static void wrong_values_name_their_parameter(void **state)
{
	static const struct {
		const char *fields, *param;
	} cases[] = {
		{"\"temperature\":-0.1", "temperature"},
		{"\"temperature\":2.1", "temperature"},
		{"\"temperature\":\"1\"", "temperature"},
		{"\"temperature\":1e999", "temperature"},
		{"\"top_p\":1.5", "top_p"},
		{"\"top_p\":true", "top_p"},
		{"\"top_k\":-2", "top_k"},
		{"\"top_k\":1.5", "top_k"},
		{"\"min_p\":-1", "min_p"},
		{"\"typical_p\":2", "typical_p"},
		{"\"repeat_penalty\":0", "repeat_penalty"},
		{"\"repetition_penalty\":-1", "repetition_penalty"},
		{"\"presence_penalty\":3", "presence_penalty"},
		{"\"frequency_penalty\":-3", "frequency_penalty"},
		{"\"seed\":1.5", "seed"},
		{"\"seed\":\"a\"", "seed"},
		{"\"seed\":18446744073709551616", "seed"},
		{"\"logit_bias\":5", "logit_bias"},
		{"\"logit_bias\":{\"abc\":1}", "logit_bias.abc"},
		{"\"logit_bias\":{\"1\":101}", "logit_bias.1"},
		{"\"logit_bias\":{\"-1\":1}", "logit_bias.-1"},
		{"\"logit_bias\":{\"1\":null}", "logit_bias.1"},
		{"\"logit_bias\":[]", "logit_bias"},
		{"\"logit_bias\":[[1,1]]", "logit_bias"},
		{"\"n\":0", "n"},
		{"\"n\":129", "n"},
		{"\"n\":\"2\"", "n"},
		{"\"max_tokens\":-2", "max_tokens"},
		{"\"max_tokens\":3000000000", "max_tokens"},
		{"\"max_tokens\":\"a\"", "max_tokens"},
		{"\"max_completion_tokens\":1.5", "max_completion_tokens"},
		{"\"stop\":5", "stop"},
		{"\"stop\":\"\"", "stop"},
		{"\"stop\":[\"a\",5]", "stop[1]"},
		{"\"stop\":[\"a\",\"\"]", "stop[1]"},
		{"\"stop\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", "stop"},
		{"\"stop_token_ids\":\"a\"", "stop_token_ids"},
		{"\"stop_token_ids\":[null]", "stop_token_ids[0]"},
		{"\"stream\":\"yes\"", "stream"},
		{"\"stream\":true,\"stream_options\":5", "stream_options"},
		{"\"stream\":true,\"stream_options\":{\"include_usage\":1}", "stream_options.include_usage"},
		{"\"stream_options\":{\"include_usage\":true}", "stream_options"}, /* client-quirks.md 29 */
		{"\"session_id\":5", "session_id"},
		{"\"session_id\":\"a b\"", "session_id"},
		{"\"session_id\":\"\"", "session_id"},
		{"\"cache_salt\":1", "cache_salt"},
		{"\"cache_salt\":\"a\\u0000b\"", "cache_salt"},
		{"\"ignore_eos\":1", "ignore_eos"},
		{"\"return_token_ids\":1", "return_token_ids"},
		{"\"response_format\":{\"type\":\"yaml\"}", "response_format.type"},
		{"\"response_format\":{\"type\":\"json_object\",\"schema\":1}", "response_format.schema"},
		{"\"response_format\":{\"type\":\"json_schema\"}", "response_format.json_schema.schema"},
		{"\"response_format\":\"json\"", "response_format"},
		{"\"truncation\":\"all\"", "truncation"},
		{"\"truncation\":true", "truncation"},
		{"\"kv_cache\":5", "kv_cache"},
		{"\"kv_cache\":{\"policy\":\"some\"}", "kv_cache.policy"},
		{"\"kv_cache\":{\"policy\":\"Merge\"}", "kv_cache.policy"},
		{"\"kv_cache\":{\"policy\":\"Quest\"}", "kv_cache.policy"},
		{"\"kv_cache\":{\"diagnostics\":1}", "kv_cache.diagnostics"},
		{"\"kv_cache\":{\"cache_length_shrink_ratio\":0.96}", "kv_cache.cache_length_shrink_ratio"},
		{"\"kv_cache\":{\"cache_length_shrink_ratio\":\"0\"}", "kv_cache.cache_length_shrink_ratio"},
		{"\"kv_cache\":{\"aggregation\":\"sum\"}", "kv_cache.aggregation"},
		{"\"kv_cache\":{\"policy\":7}", "kv_cache.policy"},
		{"\"kv_cache\":{\"start_size\":-1}", "kv_cache.start_size"},
		{"\"kv_cache\":{\"recent_size\":0}", "kv_cache.recent_size"},
		{"\"kv_cache\":{\"max_cache_size\":2147483648}", "kv_cache.max_cache_size"},
		{"\"kv_cache\":{\"trigger\":64}", "kv_cache.trigger"},
		{"\"kv_cache\":{\"trigger\":{\"tokens\":0}}", "kv_cache.trigger.tokens"},
		{"\"kv_cache\":{\"trigger\":{\"pages\":1}}", "kv_cache.trigger.pages"},
		{"\"kv_cache\":{\"trigger\":{\"free_pages\":0}}", "kv_cache.trigger.free_pages"},
		{"\"kv_cache\":{\"trigger\":{\"entropy\":0}}", "kv_cache.trigger.entropy"},
		{"\"kv_cache\":{\"trigger\":{\"entropy\":\"low\"}}", "kv_cache.trigger.entropy"},
		{"\"kv_cache\":{\"dtype\":\"int4\"}", "kv_cache.dtype"},
		{"\"kv_cache\":{\"size\":4}", "kv_cache.size"},
		{"\"model\":5", "model"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct http_exchange *all[] = {post_chat(*state, cases[i].fields),
					       post_completion(*state, cases[i].fields)};
		for (size_t k = 0; k < 2; k++) {
			char expected[96];
			snprintf(expected, sizeof expected, "\"%s\"", cases[i].param);
			if (http_fake_status(all[k]) != 400)
				fail_msg("%s: status %d", cases[i].fields, http_fake_status(all[k]));
			assert_json(http_fake_body(all[k]), "error.param", expected);
			assert_json(http_fake_body(all[k]), "error.type", "\"invalid_request_error\"");
			http_fake_close(all[k]);
		}
	}
	assert_int_equal(fake_engine_n_submitted(((struct fake_server *)*state)->engine), 0);
}

static void what_cannot_be_done_says_so(void **state)
{
	struct http_exchange *x = post_chat(*state, "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":"
						    "{\"schema\":{\"oneOf\":[]}}}");
	assert_json(http_fake_body(x), "error.code", "\"unsupported_value\"");
	assert_json(http_fake_body(x), "error.param", "\"response_format.json_schema.schema\"");
	x = post_completion(*state, "\"best_of\":3,\"n\":2");
	assert_int_equal(http_fake_status(x), 400);
	assert_json(http_fake_body(x), "error.param", "\"best_of\"");
	x = post_completion(*state, "\"truncation\":\"auto\"");
	assert_json(http_fake_body(x), "error.param", "\"truncation\"");
	x = post_completion(*state, "\"suffix\":\"end\"");
	assert_json(http_fake_body(x), "error.param", "\"suffix\"");
	assert_int_equal(http_fake_status(post_completion(*state, "\"best_of\":2,\"n\":2,\"suffix\":\"\"")), 200);
	assert_int_equal(
		http_fake_status(post_chat(*state, "\"response_format\":{\"type\":\"text\"},\"tool_choice\":\"auto\"")),
		200);
}

/* client-quirks.md 24 and 25 */
static void nulls_and_unknown_fields_are_fine(void **state)
{
	static const char *const nulls[] = {"temperature",
					    "top_p",
					    "top_k",
					    "min_p",
					    "typical_p",
					    "repeat_penalty",
					    "repetition_penalty",
					    "presence_penalty",
					    "frequency_penalty",
					    "seed",
					    "logit_bias",
					    "n",
					    "max_tokens",
					    "max_completion_tokens",
					    "stop",
					    "stop_token_ids",
					    "stream",
					    "stream_options",
					    "session_id",
					    "ignore_eos",
					    "logprobs",
					    "top_logprobs",
					    "tools",
					    "tool_choice",
					    "response_format",
					    "user",
					    "metadata",
					    "store",
					    "model",
					    "echo",
					    "suffix",
					    "best_of",
					    "return_token_ids",
					    "chat_template_kwargs",
					    "kv_cache",
					    "truncation",
					    "parallel_tool_calls",
					    "something_new"};
	for (size_t i = 0; i < sizeof nulls / sizeof *nulls; i++) {
		char fields[96];
		snprintf(fields, sizeof fields, "\"%s\":null", nulls[i]);
		assert_int_equal(http_fake_status(post_chat(*state, fields)), 200);
		assert_int_equal(http_fake_status(post_completion(*state, fields)), 200);
	}
	assert_int_equal(http_fake_status(post_chat(
				 *state, "\"user\":\"u\",\"store\":true,\"service_tier\":\"auto\",\"x\":{\"y\":[]}")),
			 200);
}

static void values_reach_the_engine(void **state)
{
	struct fake_server *s = *state;
	const struct engine_request *r;
	assert_int_equal(http_fake_status(post_chat(s, "\"temperature\":0.5,\"top_p\":0.25,\"top_k\":40.0,\"min_p\":0."
						       "125,\"typical_p\":0.75,\"repeat_penalty\":1.5,"
						       "\"presence_penalty\":-1,\"frequency_penalty\":1,\"seed\":42,"
						       "\"max_tokens\":5,\"stop\":[\"x\",\"yz\"],"
						       "\"stop_token_ids\":[7,8],\"ignore_eos\":true,\"logit_bias\":{"
						       "\"65\":-100,\"66\":1.5},\"logprobs\":true,"
						       "\"top_logprobs\":3,\"skip_special_tokens\":false")),
			 200);
	r = last(s);
	assert_true(r->sampling.temperature == 0.5f && r->sampling.top_p == 0.25f && r->sampling.top_k == 40);
	assert_true(r->sampling.min_p == 0.125f && r->sampling.typical_p == 0.75f &&
		    r->sampling.repeat_penalty == 1.5f);
	assert_true(r->sampling.presence_penalty == -1 && r->sampling.frequency_penalty == 1);
	assert_int_equal(r->sampling.seed, 42);
	assert_int_equal(r->max_tokens, 5);
	assert_null(r->context.policy);
	assert_int_equal(r->context.start_size, -1);
	assert_int_equal(r->n_stops, 2);
	assert_true(str_is(r->stops[1], "yz"));
	assert_int_equal(r->n_stop_tokens, 2);
	assert_int_equal(r->stop_tokens[1], 8);
	assert_true(r->ignore_eos);
	assert_true(r->keep_special);
	assert_int_equal(r->sampling.n_bias, 2);
	assert_int_equal(r->sampling.bias[0].token, 65);
	assert_true(r->sampling.bias[0].bias == -100 && r->sampling.bias[1].bias == 1.5f);
	assert_int_equal(r->sampling.n_logprobs, 3);
	post_chat(s, "\"logit_bias\":{},\"repetition_penalty\":2");
	assert_int_equal(last(s)->sampling.n_bias, 0);
	assert_true(last(s)->sampling.repeat_penalty == 2);
}

static void defaults_are_openais(void **state)
{
	struct fake_server *s = *state;
	post_completion(s, "");
	assert_int_equal(last(s)->max_tokens, 16);
	assert_int_equal(last(s)->sampling.n_logprobs, -1);
	assert_true(last(s)->sampling.temperature == 1);
	post_chat(s, "");
	assert_int_equal(last(s)->max_tokens, -1);
}

/* client-quirks.md 26 */
static void max_completion_tokens_is_max_tokens(void **state)
{
	struct fake_server *s = *state;
	post_chat(s, "\"max_completion_tokens\":3");
	assert_int_equal(last(s)->max_tokens, 3);
	post_chat(s, "\"max_completion_tokens\":4,\"max_tokens\":9");
	assert_int_equal(last(s)->max_tokens, 4);
	post_chat(s, "\"max_tokens\":-1");
	assert_int_equal(last(s)->max_tokens, -1);
	assert_int_equal(http_fake_status(post_chat(s, "\"max_tokens\":0")), 400);
	assert_int_equal(http_fake_status(post_completion(s, "\"max_tokens\":0")), 200);
}

static void each_choice_has_a_seed_of_its_own(void **state)
{
	struct fake_server *s = *state;
	uint64_t first;
	post_chat(s, "\"n\":3,\"seed\":-5");
	for (uint64_t i = 0; i < 3; i++)
		assert_true(fake_engine_submitted(s->engine, i)->sampling.seed == (uint64_t)-5 + i);
	post_chat(s, "");
	first = last(s)->sampling.seed;
	post_chat(s, "");
	assert_true(last(s)->sampling.seed != first);
}

static void a_session_comes_from_the_body_or_the_header(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x;
	http_fake_post(s, "/v1/sessions", "{\"id\":\"one\"}");
	http_fake_post(s, "/v1/sessions", "{\"id\":\"two\"}");
	assert_int_equal(http_fake_status(post_chat(s, "\"session_id\":\"one\"")), 200);
	assert_string_equal(last(s)->session, "one");
	http_fake_request(s, HTTP_POST, "/v1/completions", "X-Session-Token: two\n", "{\"prompt\":\"hi\"}");
	fake_server_run(s);
	assert_string_equal(last(s)->session, "two");
	http_fake_request(s, HTTP_POST, "/v1/completions", "X-Session-Token: two\n",
			  "{\"prompt\":\"hi\",\"session_id\":\"one\"}");
	fake_server_run(s);
	assert_string_equal(last(s)->session, "one");
	x = http_fake_request(s, HTTP_POST, "/v1/completions", "X-Session-Token: t w o\n", "{\"prompt\":\"hi\"}");
	assert_json(http_fake_body(x), "error.param", "\"x-session-token\"");
	x = post_chat(s, "\"session_id\":\"nobody\"");
	assert_int_equal(http_fake_status(x), 404);
	assert_json(http_fake_body(x), "error.code", "\"session_not_found\"");
}

static void only_the_first_choice_writes_to_the_session(void **state)
{
	struct fake_server *s = *state;
	http_fake_post(s, "/v1/sessions", "{\"id\":\"one\"}");
	post_chat(s, "\"session_id\":\"one\",\"n\":2");
	assert_string_equal(fake_engine_submitted(s->engine, 0)->session, "one");
	assert_string_equal(fake_engine_submitted(s->engine, 1)->session, "");
}

static void every_choice_carries_the_cache_salt(void **state)
{
	struct fake_server *s = *state;
	post_chat(s, "\"cache_salt\":\"tenant one\",\"n\":2");
	assert_string_equal(fake_engine_submitted(s->engine, 0)->cache_salt, "tenant one");
	assert_string_equal(fake_engine_submitted(s->engine, 1)->cache_salt, "tenant one");
	post_chat(s, "\"cache_salt\":null");
	assert_null(fake_engine_submitted(s->engine, 2)->cache_salt);
}

/* client-quirks.md 33 */
static void another_model_is_refused_only_when_strict(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = post_chat(s, "\"model\":\"gpt-4o\"");
	assert_int_equal(http_fake_status(x), 200);
	assert_json(http_fake_body(x), "model", "\"fake.gguf\"");
	s->config.strict_model = true;
	x = post_chat(s, "\"model\":\"gpt-4o\"");
	assert_int_equal(http_fake_status(x), 404);
	assert_json(http_fake_body(x), "error.code", "\"model_not_found\"");
	assert_int_equal(http_fake_status(post_chat(s, "\"model\":\"fake.gguf\"")), 200);
	s->config.model_name = (char *)"mine";
	x = post_chat(s, "\"model\":\"mine\"");
	assert_json(http_fake_body(x), "model", "\"mine\"");
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
static void what_is_to_be_kept_reaches_the_engine_and_every_choice(void **state)
{
	struct fake_server *s = *state;
	const struct engine_request *r;
	assert_int_equal(
		http_fake_status(post_chat(
			s, "\"n\":2,\"kv_cache\":{\"policy\":\"streaming\",\"start_size\":0,\"recent_size\":64,"
			   "\"max_cache_size\":128,\"trigger\":{\"tokens\":256,\"free_pages\":9,\"entropy\":1.5},"
			   "\"dtype\":null}")),
		200);
	for (size_t i = 0; i < 2; i++) {
		r = fake_engine_submitted(s->engine, fake_engine_n_submitted(s->engine) - 1 - i);
		assert_string_equal(r->context.policy, "streaming");
		assert_int_equal(r->context.start_size, 0);
		assert_int_equal(r->context.recent_size, 64);
		assert_int_equal(r->context.max_cache_size, 128);
		assert_int_equal(r->context.trigger_tokens, 256);
		assert_int_equal(r->context.trigger_free_pages, 9);
		assert_true(r->context.trigger_entropy == 1.5);
		assert_false(r->context.by_share);
	}
	assert_int_equal(
		http_fake_status(post_chat(s, "\"kv_cache\":{\"policy\":\"evict\",\"cache_length_shrink_ratio\":0.4,"
	                                      "\"aggregation\":\"recency\"}")),
		200);
	r = last(s);
	assert_string_equal(r->context.policy, "evict");
	assert_int_equal(r->context.shrink_permille, 400);
	assert_true(r->context.by_age && !r->context.by_mass && !r->context.diagnostics);
	assert_int_equal(http_fake_status(post_chat(
				 s, "\"kv_cache\":{\"aggregation\":\"attention_mass\",\"diagnostics\":true}")),
	                 200);
	r = last(s);
	assert_true(r->context.by_mass && !r->context.by_age && r->context.diagnostics);
	assert_int_equal(http_fake_status(post_chat(s, "\"kv_cache\":{\"policy\":\"quest\",\"diagnostics\":null}")),
	                 200);
	r = last(s);
	assert_string_equal(r->context.policy, "quest");
	assert_false(r->context.diagnostics);
}

UNIT_MAIN(T(what_is_to_be_kept_reaches_the_engine_and_every_choice), T(wrong_values_name_their_parameter),
          T(what_cannot_be_done_says_so), T(nulls_and_unknown_fields_are_fine), T(values_reach_the_engine),
          T(defaults_are_openais), T(max_completion_tokens_is_max_tokens), T(each_choice_has_a_seed_of_its_own),
          T(a_session_comes_from_the_body_or_the_header), T(only_the_first_choice_writes_to_the_session),
          T(every_choice_carries_the_cache_salt), T(another_model_is_refused_only_when_strict))
