/* Compaction: what is summarised, when, and what clients see of it; and responses that are stored. */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "tests/support/fake_engine.h"
#include "tests/support/fake_transport.h"

/*
 * A token of the fake engine is a byte, and a prompt has the JSON of its messages, so turns of these are some 90 tokens
 * each.
 */
#define COMPACT(n)                                                                                                     \
	"\"context_management\":[{\"type\":\"compaction\",\"compact_threshold\":" #n                                   \
	",\"keep_turns\":1,\"max_output_tokens\":16}]"

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

/* The value without its quotes; static. */
static const char *text_at(const char *body, const char *path)
{
	static char text[8][512];
	static int at;
	char *to = text[at++ % 8];
	snprintf(to, sizeof text[0], "%s", json_at_path(body, path));
	size_t n = strlen(to);
	if (n > 1 && to[0] == '"') {
		memmove(to, to + 1, n - 2);
		to[n - 2] = '\0';
	}
	return to;
}

static struct http_exchange *go_on(struct fake_server *s, const char *previous, const char *input, const char *more)
{
	char body[1024];
	snprintf(body, sizeof body, "{\"input\":\"%s\",\"previous_response_id\":\"%s\"%s%s}", input, previous,
		 more[0] ? "," : "", more);
	return post(s, body);
}

static const char *prompt(struct fake_server *s, size_t back)
{
	static char text[4][2048];
	static int at;
	struct str p = fake_engine_prompt(s->engine, fake_engine_n_submitted(s->engine) - 1 - back);
	char *to = text[at++ % 4];
	snprintf(to, sizeof text[0], "%.*s", (int)p.n, p.p);
	return to;
}

static bool has(const char *text, const char *part)
{
	return strstr(text, part) != NULL;
}

/* ---- The store ---- */

static void responses_are_stored_and_continued(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = post(s, "{\"input\":\"one\"}");
	char id[64], path[128];
	assert_json(http_fake_body(x), "store", "true");
	snprintf(id, sizeof id, "%s", text_at(http_fake_body(x), "id"));
	x = go_on(s, id, "two", "");
	assert_int_equal(http_fake_status(x), 200);
	assert_true(has(prompt(s, 0), "\"one\"") && has(prompt(s, 0), "\"Hi\"") && has(prompt(s, 0), "\"two\""));
	snprintf(path, sizeof path, "/v1/responses/%s", id);
	x = http_fake_get(s, path);
	assert_int_equal(http_fake_status(x), 200);
	assert_json(http_fake_body(x), "output.0.content.0.text", "\"Hi\"");
	assert_json(http_fake_body(x), "store", "true");
	snprintf(path, sizeof path, "/v1/responses/%s/input_items", id);
	x = http_fake_get(s, path);
	assert_json(http_fake_body(x), "data.0.content.0.text", "\"one\"");
	assert_json(http_fake_body(x), "has_more", "false");
	snprintf(path, sizeof path, "/v1/responses/%s", id);
	x = http_fake_request(s, HTTP_DELETE, path, NULL, "");
	assert_json(http_fake_body(x), "deleted", "true");
	assert_int_equal(http_fake_status(http_fake_get(s, path)), 404);
	x = go_on(s, id, "three", "");
	assert_json(http_fake_body(x), "error.code", "\"previous_response_not_found\"");
}

static void store_false_is_not_stored(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = post(s, "{\"input\":\"one\",\"store\":false}");
	assert_json(http_fake_body(x), "store", "false");
	x = go_on(s, text_at(http_fake_body(x), "id"), "two", "");
	assert_int_equal(http_fake_status(x), 400);
	assert_json(http_fake_body(x), "error.param", "\"previous_response_id\"");
}

static void input_items_come_in_parts(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = post(s, "{\"input\":[{\"role\":\"user\",\"content\":\"a\"},{\"id\":\"mine\",\"type\":"
					  "\"message\",\"role\":\"assistant\",\"content\":\"b\"},"
					  "{\"role\":\"user\",\"content\":\"c\"}]}");
	char id[64], path[160];
	snprintf(id, sizeof id, "%s", text_at(http_fake_body(x), "id"));
	snprintf(path, sizeof path, "/v1/responses/%s/input_items?limit=2&order=asc", id);
	x = http_fake_get(s, path);
	assert_json(http_fake_body(x), "data.0.content", "\"a\"");
	assert_json(http_fake_body(x), "data.0.type", "\"message\"");
	assert_json(http_fake_body(x), "last_id", "\"mine\"");
	assert_json(http_fake_body(x), "has_more", "true");
	snprintf(path, sizeof path, "/v1/responses/%s/input_items?order=asc&after=mine", id);
	x = http_fake_get(s, path);
	assert_json(http_fake_body(x), "data.0.content", "\"c\"");
	assert_json(http_fake_body(x), "data.1", "(absent)");
	snprintf(path, sizeof path, "/v1/responses/%s/input_items?limit=0", id);
	assert_int_equal(http_fake_status(http_fake_get(s, path)), 400);
}

/* ---- In line ---- */

#define LONG                                                                                                           \
	"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" \
	"aaaaaaaaaaaa"
#define MESSAGE(role, text) "{\"role\":\"" role "\",\"content\":\"" text "\"}"
#define OLD                                                                                                            \
	MESSAGE("system", "rules")                                                                                     \
	"," MESSAGE("user", LONG "1") "," MESSAGE("assistant", LONG "2") "," MESSAGE("user", LONG "3") "," MESSAGE(    \
		"assistant", LONG "4")

static void old_turns_become_a_summary(void **state)
{
	struct fake_server *s = *state;
	size_t before = fake_engine_n_submitted(s->engine);
	struct http_exchange *x = post(s, "{\"instructions\":\"be brief\",\"store\":false," COMPACT(
						  600) ",\"input\":[" OLD "," MESSAGE("user", "now") "]}");
	const char *body = http_fake_body(x);
	assert_int_equal(http_fake_status(x), 200);
	assert_int_equal(fake_engine_n_submitted(s->engine) - before, 2);
	/* The summary is an answer to the old turns as they were, so that their KV serves; it is bounded and cold. */
	const struct engine_request *r = fake_engine_submitted(s->engine, before);
	assert_true(has(prompt(s, 1), "be brief") && has(prompt(s, 1), LONG "4") && has(prompt(s, 1), "Summarise") &&
		    !has(prompt(s, 1), "\"now\""));
	assert_int_equal(r->max_tokens, 16);
	assert_true(r->sampling.temperature == 0 && !r->session[0] && !r->background);
	/* The answer reads instructions and system messages, the summary, and what stays. */
	assert_true(has(prompt(s, 0), "be brief") && has(prompt(s, 0), "rules") && has(prompt(s, 0), "\"now\"") &&
		    !has(prompt(s, 0), LONG));
	assert_json(body, "output.0.type", "\"compaction\"");
	assert_json(body, "output.0.summary", "\"Hi\"");
	assert_json(body, "output.0.turns", "2");
	assert_json(body, "output.0.messages", "4");
	assert_json(body, "output.1.type", "\"message\"");
	assert_json(body, "output.1.content.0.text", "\"Hi\"");
	assert_json(body, "usage.compaction.turns", "2");
	assert_json(body, "usage.compaction.background", "false");
	assert_json(body, "usage.compaction.output_tokens", "2");
	assert_json(body, "usage.compaction.failed", "null");
	/* What was measured is what the answer took. */
	assert_string_equal(text_at(body, "usage.compaction.tokens_after"), text_at(body, "usage.input_tokens"));
	assert_true(atoi(text_at(body, "usage.compaction.tokens_before")) > 600);
}

static void what_is_short_enough_stays_as_it_is(void **state)
{
	struct fake_server *s = *state;
	size_t before = fake_engine_n_submitted(s->engine);
	struct http_exchange *x = post(s, "{" COMPACT(600) ",\"input\":\"hello\"}");
	assert_int_equal(fake_engine_n_submitted(s->engine) - before, 1);
	assert_json(http_fake_body(x), "output.0.type", "\"message\"");
	assert_json(http_fake_body(x), "usage.compaction", "(absent)");
}

static void the_item_sent_back_stands_for_all_before_it(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x =
		post(s, "{\"store\":false," COMPACT(600) ",\"input\":[" OLD "," MESSAGE("user", "now") "]}");
	char item[8192], body[16384];
	snprintf(item, sizeof item, "%s", json_at_path(http_fake_body(x), "output.0"));
	snprintf(body, sizeof body,
		 "{\"input\":[" OLD
		 "," MESSAGE("user", "now") ",%s," MESSAGE("assistant", "Hi") "," MESSAGE("user", "then") "]}",
		 item);
	post(s, body);
	char full[2048];
	snprintf(full, sizeof full, "%s", prompt(s, 0));
	assert_true(has(full, "rules") && has(full, "\"now\"") && has(full, "\"then\"") && has(full, "Summarise") &&
		    !has(full, LONG));
	/* And whoever leaves out what it stands for is read alike. */
	snprintf(body, sizeof body, "{\"input\":[%s," MESSAGE("assistant", "Hi") "," MESSAGE("user", "then") "]}",
		 item);
	post(s, body);
	assert_string_equal(prompt(s, 0), full);
}

static void a_stream_shows_it_first(void **state)
{
	struct http_exchange *x =
		post(*state, "{\"stream\":true," COMPACT(600) ",\"input\":[" OLD "," MESSAGE("user", "now") "]}");
	assert_json(http_fake_event(x, 0), "type", "\"response.created\"");
	assert_json(http_fake_event(x, 2), "type", "\"response.output_item.added\"");
	assert_json(http_fake_event(x, 2), "item.type", "\"compaction\"");
	assert_json(http_fake_event(x, 3), "type", "\"response.output_item.done\"");
	assert_json(http_fake_event(x, 3), "item.summary", "\"Hi\"");
	assert_json(http_fake_event(x, 4), "type", "\"response.output_item.added\"");
	assert_json(http_fake_event(x, 4), "output_index", "1");
	assert_json(http_fake_event(x, http_fake_n_writes(x) - 1), "response.output.0.type", "\"compaction\"");
}

static void a_summary_of_nothing_fails_nothing(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_reply(s->engine, "  ");
	struct http_exchange *x = post(s, "{" COMPACT(600) ",\"input\":[" OLD "," MESSAGE("user", "now") "]}");
	assert_int_equal(http_fake_status(x), 200);
	assert_json(http_fake_body(x), "output.0.type", "\"message\"");
	assert_json(http_fake_body(x), "usage.compaction.turns", "0");
	assert_json(http_fake_body(x), "usage.compaction.failed", "\"The model wrote no summary.\"");
	assert_true(has(prompt(s, 0), LONG "1"));
	/* Unless it does not fit. */
	fake_engine_set_context(s->engine, 640);
	x = post(s, "{" COMPACT(500) ",\"input\":[" OLD "," OLD "," MESSAGE("user", "now") "]}");
	assert_int_equal(http_fake_status(x), 400);
	assert_json(http_fake_body(x), "error.code", "\"context_length_exceeded\"");
}

static void one_that_takes_too_long_fails_nothing(void **state)
{
	struct fake_server *s = *state;
	size_t before = fake_engine_n_submitted(s->engine);
	struct http_exchange *x = http_fake_request(
		s, HTTP_POST, "/v1/responses", NULL,
		"{\"store\":false,\"timeout\":10," COMPACT(600) ",\"input\":[" OLD "," MESSAGE("user", "now") "]}");
	for (int i = 0; i < 2; i++)
		fake_server_step(s);
	/* It has half of the time. */
	assert_in_range(fake_engine_submitted(s->engine, before)->timeout_ms, 1, 5000);
	fake_engine_fail(s->engine, STATUS_TIMEOUT, "that took too long");
	fake_server_run(s);
	assert_int_equal(http_fake_status(x), 200);
	assert_json(http_fake_body(x), "output.0.type", "\"message\"");
	assert_json(http_fake_body(x), "usage.compaction.failed", "\"that took too long\"");
	assert_true(has(prompt(s, 0), LONG "1"));
	/* And the answer has what is left of it. */
	assert_in_range(fake_engine_submitted(s->engine, before + 1)->timeout_ms, 5000, 10000);
}

/* Where turns may be left out as well, the summary is none of them. */
static void truncation_keeps_the_summary(void **state)
{
	struct fake_server *s = *state;
	post(s, "{\"truncation\":\"auto\"," COMPACT(600) ",\"input\":[" OLD "," MESSAGE("user", "now") "]}");
	const struct engine_request *r = fake_engine_submitted(s->engine, fake_engine_n_submitted(s->engine) - 1);
	static const int32_t of[] = {-1, -1, -1, 0};
	assert_int_equal(r->n_turn_of, 4);
	assert_memory_equal(r->turn_of, of, sizeof of);
}

/* A conversation far beyond the context is summarised piece by piece. */
static void what_is_far_too_long_is_folded(void **state)
{
	struct fake_server *s = *state;
	fake_engine_set_context(s->engine, 1200);
	struct http_exchange *x = post(s, "{" COMPACT(600) ",\"max_output_tokens\":16,\"input\":[" OLD "," OLD "," OLD
							   "," OLD "," MESSAGE("user", "now") "]}");
	assert_int_equal(http_fake_status(x), 200);
	assert_json(http_fake_body(x), "output.0.turns", "8");
	assert_json(http_fake_body(x), "output.0.messages", "16");
	assert_true(!has(prompt(s, 0), LONG));
}

static void a_client_that_leaves_ends_the_summary(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x =
		http_fake_request(s, HTTP_POST, "/v1/responses", NULL,
				  "{" COMPACT(600) ",\"input\":[" OLD "," MESSAGE("user", "now") "]}");
	for (int i = 0; i < 2; i++)
		fake_server_step(s);
	http_fake_close(x);
	fake_server_run(s);
	assert_int_equal(fake_engine_active(s->engine), 0);
}

/* ---- In the background ---- */

static void a_conversation_near_the_threshold_is_summarised_while_it_idles(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = post(s, "{" COMPACT(760) ",\"input\":[" OLD "," MESSAGE("user", "now") "]}");
	char first[64];
	/* It was short enough for itself. */
	assert_json(http_fake_body(x), "output.0.type", "\"message\"");
	snprintf(first, sizeof first, "%s", text_at(http_fake_body(x), "id"));
	fake_server_run(s);
	size_t n = fake_engine_n_submitted(s->engine);
	const struct engine_request *warm = fake_engine_submitted(s->engine, n - 1),
				    *summary = fake_engine_submitted(s->engine, n - 2);
	assert_true(warm->background && warm->max_tokens == 0 && summary->background && summary->max_tokens == 16);
	x = go_on(s, first, "then", COMPACT(760));
	assert_int_equal(fake_engine_n_submitted(s->engine) - n, 1);
	assert_json(http_fake_body(x), "output.0.type", "\"compaction\"");
	assert_json(http_fake_body(x), "usage.compaction.background", "true");
	assert_true(has(prompt(s, 0), "\"then\"") && has(prompt(s, 0), "\"now\"") && !has(prompt(s, 0), LONG));
	/* The next one has nothing new to show; whether it asks for compaction or not, it goes on from there. */
	x = go_on(s, text_at(http_fake_body(x), "id"), "and then", "");
	assert_json(http_fake_body(x), "output.0.type", "\"message\"");
	assert_true(has(prompt(s, 0), "\"then\"") && !has(prompt(s, 0), LONG));
}

static void an_older_response_goes_on_from_the_full_text(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = post(s, "{\"input\":[" OLD "," MESSAGE("user", "now") "]}");
	char old[64];
	snprintf(old, sizeof old, "%s", text_at(http_fake_body(x), "id"));
	x = go_on(s, old, "then", COMPACT(600));
	assert_json(http_fake_body(x), "output.0.type", "\"compaction\"");
	go_on(s, old, "instead", "");
	assert_true(has(prompt(s, 0), LONG "1") && has(prompt(s, 0), "\"instead\"") && !has(prompt(s, 0), "\"then\""));
}

static void nothing_begins_in_the_background_while_draining(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x =
		http_fake_request(s, HTTP_POST, "/v1/responses", NULL,
				  "{" COMPACT(760) ",\"input\":[" OLD "," MESSAGE("user", "now") "]}");
	for (int i = 0; i < 2; i++)
		fake_server_step(s);
	app_start_drain(s->app);
	fake_server_run(s);
	assert_int_equal(http_fake_status(x), 200);
	assert_int_equal(fake_engine_n_submitted(s->engine), 1);
	assert_int_equal(app_active(s->app), 0);
}

/* ---- Refusals ---- */

static void impossible_ones_are_refused_with_what_is_possible(void **state)
{
	static const struct {
		const char *value, *param, *says;
	} cases[] = {
		{"5", "context_management", "array"},
		{"[5]", "context_management[0]", "object"},
		{"[{\"type\":\"forget\"}]", "context_management[0].type", "compaction"},
		{"[{\"type\":\"compaction\"}]", "context_management[0].compact_threshold", "128"},
		{"[{\"type\":\"compaction\",\"compact_threshold\":0}]", "context_management[0].compact_threshold",
		 "128"},
		{"[{\"type\":\"compaction\",\"compact_threshold\":-5}]", "context_management[0].compact_threshold",
		 "128"},
		{"[{\"type\":\"compaction\",\"compact_threshold\":1000}]", "context_management[0].compact_threshold",
		 "1000"},
		{"[{\"type\":\"compaction\",\"compact_threshold\":600,\"max_output_tokens\":0}]",
		 "context_management[0].max_output_tokens", "300"},
		{"[{\"type\":\"compaction\",\"compact_threshold\":600,\"max_output_tokens\":301}]",
		 "context_management[0].max_output_tokens", "300"},
		{"[{\"type\":\"compaction\",\"compact_threshold\":600,\"keep_turns\":0}]",
		 "context_management[0].keep_turns", "1"},
	};
	char body[512], expected[96];
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		snprintf(body, sizeof body, "{\"input\":\"a\",\"context_management\":%s}", cases[i].value);
		struct http_exchange *x = post(*state, body);
		if (http_fake_status(x) != 400)
			fail_msg("%s: status %d", body, http_fake_status(x));
		snprintf(expected, sizeof expected, "\"%s\"", cases[i].param);
		assert_json(http_fake_body(x), "error.param", expected);
		if (!has(http_fake_body(x), cases[i].says))
			fail_msg("%s: %s", body, http_fake_body(x));
	}
	struct http_exchange *x = http_fake_post(*state, "/v1/chat/completions",
						 "{\"messages\":[" MESSAGE("user", "a") "]," COMPACT(600) "}");
	assert_int_equal(http_fake_status(x), 400);
	assert_true(has(http_fake_body(x), "/v1/responses") && has(http_fake_body(x), "truncation"));
	x = http_fake_post(*state, "/v1/completions", "{\"prompt\":\"a\"," COMPACT(600) "}");
	assert_int_equal(http_fake_status(x), 400);
	static const char *const blobs[] = {"5", "\"opaque\"", "\"{}\"",
					    "\"{\\\"turns\\\":1,\\\"messages\\\":2,\\\"window\\\":[]}\""};
	for (size_t i = 0; i < sizeof blobs / sizeof *blobs; i++) {
		snprintf(body, sizeof body, "{\"input\":[{\"type\":\"compaction\",\"encrypted_content\":%s}]}",
			 blobs[i]);
		x = post(*state, body);
		assert_int_equal(http_fake_status(x), 400);
		assert_json(http_fake_body(x), "error.param", "\"input[0].encrypted_content\"");
	}
}

static void compaction_on_its_own(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_post(s, "/v1/responses/compact",
						 "{\"input\":[" OLD "," MESSAGE("user", "now") "," MESSAGE(
							 "assistant", "b") "," MESSAGE("user", "then") "]}");
	assert_int_equal(http_fake_status(x), 200);
	assert_json(http_fake_body(x), "object", "\"response.compaction\"");
	assert_json(http_fake_body(x), "output.0.type", "\"compaction\"");
	assert_json(http_fake_body(x), "output.0.turns", "2");
	assert_json(http_fake_body(x), "usage.output_tokens", "2");
	char body[8192];
	snprintf(body, sizeof body, "{\"input\":[%s]}", json_at_path(http_fake_body(x), "output.0"));
	assert_int_equal(http_fake_status(post(s, body)), 200);
	assert_true(has(prompt(s, 0), "\"then\"") && has(prompt(s, 0), "rules") && !has(prompt(s, 0), LONG));
	x = http_fake_post(s, "/v1/responses/compact", "{\"input\":\"one\"}");
	assert_int_equal(http_fake_status(x), 400);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
UNIT_MAIN(T(responses_are_stored_and_continued), T(store_false_is_not_stored), T(input_items_come_in_parts),
          T(old_turns_become_a_summary), T(what_is_short_enough_stays_as_it_is),
          T(the_item_sent_back_stands_for_all_before_it), T(a_stream_shows_it_first),
          T(a_summary_of_nothing_fails_nothing), T(one_that_takes_too_long_fails_nothing),
          T(truncation_keeps_the_summary), T(what_is_far_too_long_is_folded), T(a_client_that_leaves_ends_the_summary),
          T(a_conversation_near_the_threshold_is_summarised_while_it_idles),
          T(an_older_response_goes_on_from_the_full_text), T(nothing_begins_in_the_background_while_draining),
          T(impossible_ones_are_refused_with_what_is_possible), T(compaction_on_its_own))
