/* POST /v1/chunk: a document answered for in parts. In the fake engine a token is a byte, and the context has 1,000. */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "tests/support/fake_engine.h"
#include "tests/support/fake_transport.h"

static int setup(void **state)
{
	static struct fake_server s;
	fake_server_start(&s);
	fake_engine_set_context(s.engine, 4000);
	fake_engine_set_reply(s.engine, "xyz");
	*state = &s;
	return 0;
}

static int teardown(void **state)
{
	fake_server_stop(*state);
	return 0;
}

/* {"input": n sentences of 20 bytes, "instruction": "Sum up.", more} */
static char *body_of(int n, const char *more)
{
	static char body[1 << 16];
	size_t at = (size_t)snprintf(body, sizeof body, "{\"instruction\":\"Sum up.\",%s\"input\":\"", more);
	for (int i = 0; i < n; i++)
		at += (size_t)snprintf(body + at, sizeof body - at, "This is number %03d. ", i);
	snprintf(body + at, sizeof body - at, "\"}");
	return body;
}

#define SIZES "\"max_chunk_tokens\":200,\"max_output_tokens\":10,\"overlap\":0.2,"

static int number(const char *body, const char *path)
{
	return atoi(json_at_path(body, path));
}

static void a_short_document_is_one_request(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_post(s, "/v1/chunk", body_of(3, ""));
	const char *body = http_fake_body(x);
	assert_int_equal(http_fake_status(x), 200);
	assert_json(body, "object", "\"chunk.result\"");
	assert_json(body, "output", "\"xyz\"");
	assert_json(body, "finish_reason", "\"stop\"");
	assert_json(body, "chunks.0.start", "0");
	assert_json(body, "chunks.0.end", "60");
	assert_json(body, "chunks.0.cut", "\"end\"");
	assert_json(body, "chunks.0.coherence_with_next", "null");
	assert_json(body, "chunks.1", "(absent)");
	assert_json(body, "reductions", "[]");
	assert_json(body, "coherence", "{\"mean\":null,\"min\":null}");
	assert_json(body, "usage.requests", "1");
	assert_int_equal(fake_engine_n_submitted(s->engine), 1);
	struct str prompt = fake_engine_prompt(s->engine, 0);
	assert_non_null(memmem(prompt.p, prompt.n, "Sum up.", 7));
	assert_non_null(memmem(prompt.p, prompt.n, "This is the document:", 21));
	assert_non_null(memmem(prompt.p, prompt.n, "number 002. ", 12));
	assert_int_equal(fake_engine_submitted(s->engine, 0)->input, ENGINE_INPUT_CHAT);
	assert_true(fake_engine_submitted(s->engine, 0)->sampling.temperature == 0);
}

static void a_long_one_is_cut_answered_for_and_put_together(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_post(s, "/v1/chunk", body_of(100, SIZES));
	const char *body = http_fake_body(x);
	assert_int_equal(http_fake_status(x), 200);
	/* 2,000 bytes in parts of 200, of which the first 40 repeat: 160 are new. */
	assert_json(body, "chunks.0.end", "200");
	assert_json(body, "chunks.1.start", "160");
	assert_json(body, "chunks.1.fresh", "200");
	assert_json(body, "chunks.1.end", "360");
	assert_json(body, "chunks.1.cut", "\"sentence\"");
	assert_json(body, "chunks.1.output", "\"xyz\"");
	/* The same answer about each. */
	assert_json(body, "chunks.1.coherence_with_next", "1");
	assert_json(body, "coherence", "{\"mean\":1,\"min\":1}");
	int n = 0;
	char path[32];
	for (;; n++) {
		snprintf(path, sizeof path, "chunks.%d.index", n);
		if (strcmp(json_at_path(body, path), "(absent)") == 0)
			break;
	}
	assert_in_range(n, 12, 14);
	/* Answers of 3 bytes and their labels, 19 each: ten fit a group, and two groups are put together. */
	assert_json(body, "reductions.0.level", "1");
	assert_json(body, "reductions.0.of", "[0,9]");
	assert_json(body, "reductions.2.level", "2");
	assert_json(body, "reductions.2.of", "[0,1]");
	assert_json(body, "reductions.3", "(absent)");
	assert_json(body, "output", "\"xyz\"");
	assert_int_equal(number(body, "usage.requests"), n + 3);
	assert_int_equal(fake_engine_n_submitted(s->engine), (size_t)n + 3);
	assert_int_equal(number(body, "usage.completion_tokens"), 3 * (n + 3));
	struct str last = fake_engine_prompt(s->engine, (size_t)n + 2);
	assert_non_null(memmem(last.p, last.n, "Part 2:", 7));
	assert_non_null(memmem(last.p, last.n, "Sum up.", 7));
	assert_null(memmem(last.p, last.n, "This is number", 14));
}

static void at_most_so_many_run_at_a_time(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x =
		http_fake_request(s, HTTP_POST, "/v1/chunk", NULL, body_of(100, SIZES "\"parallel\":3,"));
	int most = 0;
	for (int i = 0; i < 200 && !http_fake_status(x); i++) {
		fake_server_step(s);
		int active = fake_engine_active(s->engine);
		most = active > most ? active : most;
	}
	assert_int_equal(http_fake_status(x), 200);
	assert_int_equal(most, 3);
}

static void a_stream_tells_of_parts_answers_and_what_is_new(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_post(s, "/v1/chunk", body_of(30, SIZES "\"stream\":true,"));
	size_t n = http_fake_n_writes(x), answers = 0, deltas = 0;
	assert_int_equal(http_fake_status(x), 200);
	assert_string_equal(http_fake_type(x), "text/event-stream; charset=utf-8");
	assert_json(http_fake_event(x, 0), "type", "\"chunk.split\"");
	assert_json(http_fake_event(x, 0), "chunks.0.end", "200");
	for (size_t i = 1; i + 2 < n; i++) {
		answers += strcmp(json_at_path(http_fake_event(x, i), "type"), "\"chunk.output\"") == 0;
		deltas += strcmp(json_at_path(http_fake_event(x, i), "type"), "\"chunk.delta\"") == 0;
	}
	/* Four parts and what they are put together in, which is the only one that is told word by word. */
	assert_int_equal(answers, 5);
	assert_int_equal(deltas, 3);
	assert_json(http_fake_event(x, n - 3), "answer.level", "1");
	assert_json(http_fake_event(x, n - 2), "type", "\"chunk.completed\"");
	assert_json(http_fake_event(x, n - 2), "result.output", "\"xyz\"");
	assert_true(str_is(http_fake_write(x, n - 1), "data: [DONE]\n\n"));
}

static void cutting_alone_asks_nothing(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_post(s, "/v1/chunk",
	                                         "{\"split_only\":true,\"max_chunk_tokens\":16,\"overlap\":0,\"input\":"
	                                         "\"One two three. Four five six.\"}");
	assert_int_equal(http_fake_status(x), 200);
	assert_json(http_fake_body(x), "object", "\"chunk.split\"");
	assert_json(http_fake_body(x), "chunks.0.text", "\"One two three. \"");
	assert_json(http_fake_body(x), "chunks.1.text", "\"Four five six.\"");
	assert_int_equal(fake_engine_n_submitted(s->engine), 0);
}

static void what_is_wrong_is_named(void **state)
{
	static const struct {
		const char *body, *param, *said;
	} cases[] = {
		{"{\"instruction\":\"a\"}", "input", "must be a string"},
		{"{\"instruction\":\"a\",\"input\":\"\"}", "input", "must be a string"},
		{"{\"instruction\":\"a\",\"input\":[\"x\"]}", "input", "must be a string"},
		{"{\"input\":\"x\"}", "instruction", "what to do"},
		{"{\"input\":\"x\",\"instruction\":5}", "instruction", "string"},
		{"{\"input\":\"x\",\"instruction\":\"a\\u0000b\"}", "instruction", "NUL"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"reduce_instruction\":{}}", "reduce_instruction", "string"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"max_chunk_tokens\":1}", "max_chunk_tokens", "16"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"max_chunk_tokens\":5000}", "max_chunk_tokens", "at most"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"max_chunk_tokens\":300}", "max_chunk_tokens",
	         "at least 544"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"max_output_tokens\":0}", "max_output_tokens", "1"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"max_output_tokens\":3900}", "max_output_tokens", "no room"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"overlap\":0.6}", "overlap", "0.5"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"overlap\":\"much\"}", "overlap", "number"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"parallel\":17}", "parallel", "16"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"temperature\":-1}", "temperature", "0"},
		{"{\"input\":\"x\",\"instruction\":\"a\",\"stream\":1}", "stream", "boolean"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		char expected[64];
		struct http_exchange *x = http_fake_post(*state, "/v1/chunk", cases[i].body);
		if (http_fake_status(x) != 400)
			fail_msg("%s: status %d", cases[i].body, http_fake_status(x));
		snprintf(expected, sizeof expected, "\"%s\"", cases[i].param);
		assert_json(http_fake_body(x), "error.param", expected);
		if (!strstr(json_at_path(http_fake_body(x), "error.message"), cases[i].said))
			fail_msg("%s: %s", cases[i].body, http_fake_body(x));
	}
	struct fake_server *s = *state;
	assert_int_equal(fake_engine_n_submitted(s->engine), 0);
}

static void who_leaves_cancels_all_of_it(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_request(s, HTTP_POST, "/v1/chunk", NULL, body_of(100, SIZES));
	assert_int_equal(app_active(s->app), 1);
	for (int i = 0; i < 3; i++)
		fake_server_step(s);
	assert_int_equal(fake_engine_active(s->engine), 4);
	http_fake_close(x);
	assert_int_equal(fake_engine_active(s->engine), 0);
	fake_server_run(s);
	assert_int_equal(app_active(s->app), 0);
	assert_int_equal(fake_engine_n_submitted(s->engine), 4);
	/* And while it is being cut. */
	x = http_fake_request(s, HTTP_POST, "/v1/chunk", NULL, body_of(100, SIZES));
	http_fake_close(x);
	fake_server_run(s);
	assert_int_equal(app_active(s->app), 0);
	assert_int_equal(fake_engine_n_submitted(s->engine), 4);
}

static void one_failure_ends_all_of_it(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_request(s, HTTP_POST, "/v1/chunk", NULL, body_of(100, SIZES));
	for (int i = 0; i < 3; i++)
		fake_server_step(s);
	fake_engine_fail(s->engine, STATUS_INTERNAL, "the device failed");
	fake_server_run(s);
	assert_int_equal(http_fake_status(x), 500);
	assert_json(http_fake_body(x), "error.message", "\"the device failed\"");
	assert_int_equal(fake_engine_n_submitted(s->engine), 4);
	x = http_fake_request(s, HTTP_POST, "/v1/chunk", NULL, body_of(100, SIZES "\"stream\":true,"));
	for (int i = 0; i < 3; i++)
		fake_server_step(s);
	fake_engine_fail(s->engine, STATUS_INTERNAL, "the device failed");
	fake_server_run(s);
	assert_int_equal(http_fake_status(x), 200);
	assert_non_null(strstr(http_fake_body(x), "the device failed"));
	assert_true(http_fake_ended(x));
}

static void a_slow_reader_loses_its_work(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x =
		http_fake_request(s, HTTP_POST, "/v1/chunk", NULL, body_of(100, SIZES "\"stream\":true,"));
	fake_server_step(s);
	assert_int_equal(fake_engine_active(s->engine), 4);
	http_fake_stall(x);
	fake_server_run(s);
	assert_int_equal(fake_engine_active(s->engine), 0);
	assert_true(fake_engine_n_submitted(s->engine) <= 8);
}

static void instructions_salt_and_seed_go_along(void **state)
{
	struct fake_server *s = *state;
	http_fake_post(s, "/v1/chunk",
	               body_of(30, SIZES "\"reduce_instruction\":\"Merge "
	                                 "these.\",\"seed\":7,\"cache_salt\":\"pepper\",\"temperature\":0.5,"));
	size_t n = fake_engine_n_submitted(s->engine);
	for (size_t i = 0; i < n; i++) {
		const struct engine_request *r = fake_engine_submitted(s->engine, i);
		assert_string_equal(r->cache_salt, "pepper");
		assert_int_equal(r->sampling.seed, 7 + i);
		assert_true(r->sampling.temperature == 0.5f);
		assert_int_equal(r->max_tokens, 10);
	}
	struct str last = fake_engine_prompt(s->engine, n - 1);
	assert_non_null(memmem(last.p, last.n, "Merge these.", 12));
	assert_null(memmem(last.p, last.n, "Sum up.", 7));
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

UNIT_MAIN(TEST(a_short_document_is_one_request), TEST(a_long_one_is_cut_answered_for_and_put_together),
          TEST(at_most_so_many_run_at_a_time), TEST(a_stream_tells_of_parts_answers_and_what_is_new),
          TEST(cutting_alone_asks_nothing), TEST(what_is_wrong_is_named), TEST(who_leaves_cancels_all_of_it),
          TEST(one_failure_ends_all_of_it), TEST(a_slow_reader_loses_its_work),
          TEST(instructions_salt_and_seed_go_along))
