/* Models, tokenizer, health, metrics, sessions, the page. */
#include "tests/unit/unit.h"

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

/* client-quirks.md 32 */
static void models_tell_their_context(void **state)
{
	struct fake_server *s = *state;
	const char *body = http_fake_body(http_fake_get(s, "/v1/models"));
	assert_json(body, "object", "\"list\"");
	assert_json(body, "data.0.id", "\"fake.gguf\"");
	assert_json(body, "data.0.object", "\"model\"");
	assert_json(body, "data.0.owned_by", "\"kvasir\"");
	assert_json(body, "data.0.max_model_len", "1000");
	assert_json(body, "data.0.context_length", "1000");
	assert_json(body, "data.0.meta.n_ctx", "1000");
	assert_json(body, "data.0.meta.n_ctx_train", "2000");
	fake_engine_set_state(s->engine, ENGINE_LOADING, NULL);
	assert_json(http_fake_body(http_fake_get(s, "/v1/models")), "data", "[]");
}

static void a_model_is_found_by_its_id(void **state)
{
	struct fake_server *s = *state;
	assert_json(http_fake_body(http_fake_get(s, "/v1/models/fake.gguf")), "id", "\"fake.gguf\"");
	struct http_exchange *x = http_fake_get(s, "/v1/models/gpt-4o");
	assert_int_equal(http_fake_status(x), 404);
	assert_json(http_fake_body(x), "error.code", "\"model_not_found\"");
	s->config.model_name = (char *)"team/model";
	assert_json(http_fake_body(http_fake_get(s, "/v1/models/team/model")), "id", "\"team/model\"");
}

static void text_becomes_tokens_and_back(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_post(s, "/tokenize", "{\"content\":\"<s>\"}");
	assert_json(http_fake_body(x), "", "{\"tokens\":[60,115,62],\"count\":3,\"max_model_len\":1000}");
	x = http_fake_post(s, "/tokenize", "{\"prompt\":\"<s>a\",\"parse_special\":true,\"add_special\":true}");
	assert_json(http_fake_body(x), "tokens", "[256,256,97]");
	x = http_fake_post(s, "/tokenize", "{\"content\":\"\"}");
	assert_json(http_fake_body(x), "count", "0");
	x = http_fake_post(s, "/detokenize", "{\"tokens\":[104,105]}");
	assert_json(http_fake_body(x), "", "{\"content\":\"hi\",\"prompt\":\"hi\"}");
	x = http_fake_post(s, "/detokenize", "{\"tokens\":[]}");
	assert_json(http_fake_body(x), "content", "\"\"");
}

static void a_chat_can_be_tokenized(void **state)
{
	struct http_exchange *x = http_fake_post(
		*state, "/tokenize",
		"{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"add_generation_prompt\":false}");
	assert_json(http_fake_body(x), "prompt",
		    "\"{\\\"messages\\\":[{\\\"role\\\":\\\"user\\\",\\\"content\\\":\\\"hi\\\"}],\\\"add_generation_"
		    "prompt\\\":false}\"");
}

static void wrong_texts_and_ids_are_named(void **state)
{
	static const struct {
		const char *path, *body, *param;
	} cases[] = {
		{"/tokenize", "{}", "\"content\""},
		{"/tokenize", "{\"content\":5}", "\"content\""},
		{"/tokenize", "{\"prompt\":5}", "\"prompt\""},
		{"/tokenize", "{\"content\":\"a\",\"add_special\":1}", "\"add_special\""},
		{"/tokenize", "{\"messages\":[{}]}", "\"messages[0].role\""},
		{"/detokenize", "{}", "\"tokens\""},
		{"/detokenize", "{\"tokens\":[1,\"a\"]}", "\"tokens[1]\""},
		{"/detokenize", "{\"tokens\":[-1]}", "\"tokens[0]\""},
		{"/detokenize", "{\"tokens\":[null]}", "\"tokens[0]\""},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct http_exchange *x = http_fake_post(*state, cases[i].path, cases[i].body);
		assert_int_equal(http_fake_status(x), 400);
		assert_json(http_fake_body(x), "error.param", cases[i].param);
	}
	assert_int_equal(http_fake_status(http_fake_post(*state, "/detokenize", "{\"tokens\":[9999]}")), 400);
}

static void live_ready_and_draining_are_three_answers(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_get(s, "/health");
	assert_int_equal(http_fake_status(x), 200);
	assert_json(http_fake_body(x), "status", "\"ok\"");
	fake_engine_set_state(s->engine, ENGINE_LOADING, NULL);
	x = http_fake_get(s, "/health/ready");
	assert_int_equal(http_fake_status(x), 503);
	assert_json(http_fake_body(x), "status", "\"loading\"");
	assert_int_equal(http_fake_status(http_fake_get(s, "/health/live")), 200);
	fake_engine_set_state(s->engine, ENGINE_FAILED, "no such file");
	x = http_fake_get(s, "/health/ready");
	assert_json(http_fake_body(x), "status", "\"failed\"");
	assert_non_null(strstr(http_fake_body(x), "no such file"));
	fake_engine_set_state(s->engine, ENGINE_READY, NULL);
	app_start_drain(s->app);
	x = http_fake_get(s, "/health");
	assert_int_equal(http_fake_status(x), 503);
	assert_json(http_fake_body(x), "status", "\"draining\"");
	assert_int_equal(http_fake_status(http_fake_get(s, "/health/live")), 200);
}

static void metrics_count_what_ran(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x;
	http_fake_post(s, "/v1/completions", "{\"prompt\":\"abc\",\"max_tokens\":4}");
	http_fake_post(s, "/v1/completions", "{\"prompt\":\"abc\",\"session_id\":\"nobody\"}");
	http_fake_close(http_fake_request(s, HTTP_POST, "/v1/completions", NULL, "{\"prompt\":\"abc\"}"));
	fake_server_run(s);
	x = http_fake_get(s, "/metrics");
	assert_true(strncmp(http_fake_type(x), "text/plain; version=0.0.4", 25) == 0);
	assert_non_null(strstr(http_fake_body(x), "\nvllm:generation_tokens_total{model_name=\"fake.gguf\"} 4\n"));
	assert_non_null(
		strstr(http_fake_body(x), "\nvllm:time_to_first_token_seconds_count{model_name=\"fake.gguf\"} 1\n"));
	assert_non_null(strstr(http_fake_body(x), "\nkvasir:api_requests_total{model_name=\"fake.gguf\"} 3\n"));
	assert_non_null(strstr(http_fake_body(x), "\nkvasir:api_client_errors_total{model_name=\"fake.gguf\"} 1\n"));
	assert_non_null(strstr(http_fake_body(x), "\nkvasir:api_cancelled_total{model_name=\"fake.gguf\"} 1\n"));
	fake_engine_set_state(s->engine, ENGINE_LOADING, NULL);
	assert_non_null(strstr(http_fake_body(http_fake_get(s, "/metrics")), "\nkvasir:ready{"));
}

static void sessions_are_made_found_and_deleted(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x =
		http_fake_post(s, "/v1/sessions", "{\"id\":\"a.b-c_1\",\"heartbeat_timeout\":1.5,\"ttl\":60}");
	const char *keys[] = {"created", "age",	     "idle",	"expires_in", "tokens",
			      "pages",	 "kv_bytes", "running", "waiting",    "requests"};
	assert_int_equal(http_fake_status(x), 200);
	assert_json(http_fake_body(x), "id", "\"a.b-c_1\"");
	assert_json(http_fake_body(x), "object", "\"session\"");
	assert_json(http_fake_body(x), "heartbeat_timeout", "1.5");
	for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
		assert_string_not_equal(json_at_path(http_fake_body(x), keys[i]), "(absent)");
	assert_int_equal(http_fake_status(http_fake_post(s, "/v1/sessions", "{\"id\":\"a.b-c_1\"}")), 409);
	assert_int_equal(http_fake_status(http_fake_request(s, HTTP_POST, "/v1/sessions", NULL, NULL)), 0);
	fake_server_run(s);
	assert_json(http_fake_body(http_fake_get(s, "/v1/sessions/a.b-c_1")), "ttl", "60.0");
	assert_int_equal(http_fake_status(http_fake_post(s, "/v1/sessions/a.b-c_1/heartbeat", NULL)), 200);
	assert_int_equal(fake_engine_heartbeats(s->engine), 1);
	assert_json(http_fake_body(http_fake_get(s, "/v1/sessions")), "data.0.id", "\"a.b-c_1\"");
	x = http_fake_request(s, HTTP_DELETE, "/v1/sessions/a.b-c_1", NULL, NULL);
	fake_server_run(s);
	assert_json(http_fake_body(x), "", "{\"id\":\"a.b-c_1\",\"object\":\"session.deleted\",\"deleted\":true}");
	x = http_fake_get(s, "/v1/sessions/a.b-c_1");
	assert_int_equal(http_fake_status(x), 404);
	assert_json(http_fake_body(x), "error.code", "\"session_not_found\"");
	assert_int_equal(http_fake_status(http_fake_get(s, "/v1/sessions/a%20b!")), 404);
}

static void the_kv_cache_is_shown_to_whom_it_concerns(void **state)
{
	struct fake_server *s = *state;
	struct error err;
	const char *body = http_fake_body(http_fake_get(s, "/v1/kv"));
	assert_json(body, "object", "\"kv\"");
	assert_json(body, "pages.sessions", "4");
	assert_json(body, "pages.nobody", "60");
	assert_json(body, "pool.pages_used", "4");
	assert_json(body, "keys.0.key", "\"-\"");
	assert_json(body, "sessions.data", "[]");
	assert_int_equal(app_set_keys(s->app,
				      str_from("{\"keys\":[{\"name\":\"a\",\"key\":\"A\",\"max_sessions\":7},"
					       "{\"name\":\"b\",\"key\":\"B\",\"admin\":true}]}"),
				      "test", &err),
			 STATUS_OK);
	assert_int_equal(fake_engine_tenant(s->engine, 1)->limits.max_sessions, 7);
	assert_string_equal(fake_engine_tenant(s->engine, 1)->salt, "a");
	assert_int_equal(http_fake_status(http_fake_request(s, HTTP_GET, "/v1/kv", NULL, NULL)), 401);
	http_fake_request(s, HTTP_POST, "/v1/sessions", "X-Api-Key: B\nContent-Type: application/json\n",
	                  "{\"id\":\"bs\"}");
	app_handle_events(s->app);
	struct http_exchange *x = http_fake_request(s, HTTP_GET, "/v1/kv", "X-Api-Key: A\n", NULL);
	app_handle_events(s->app);
	body = http_fake_body(x);
	assert_json(body, "keys.0.key", "\"a\"");
	assert_json(body, "keys.1", "(absent)");
	assert_json(body, "keys.0.limits", "{\"max_requests\":null,\"max_sessions\":7,\"kv_memory\":null}");
	assert_json(body, "sessions.data", "[]");
	x = http_fake_request(s, HTTP_GET, "/v1/kv", "X-Api-Key: B\n", NULL);
	app_handle_events(s->app);
	body = http_fake_body(x);
	assert_json(body, "keys.1.key", "\"b\"");
	assert_json(body, "keys.1.sessions", "1");
	assert_json(body, "sessions.data.0.id", "\"bs\"");
	assert_json(body, "sessions.data.0.key", "\"b\"");
	/* Figures of single keys are for those who may see them all. */
	x = http_fake_request(s, HTTP_GET, "/metrics", "X-Api-Key: A\n", NULL);
	assert_null(strstr(http_fake_body(x), "kvasir:key_"));
	x = http_fake_request(s, HTTP_GET, "/metrics", "X-Api-Key: B\n", NULL);
	assert_non_null(strstr(http_fake_body(x), ",key=\"b\"} 1\n"));
}

static void wrong_sessions_are_named(void **state)
{
	static const struct {
		const char *body, *param;
	} cases[] = {
		{"{\"id\":\"a b\"}", "\"id\""},
		{"{\"id\":5}", "\"id\""},
		{"{\"ttl\":0}", "\"ttl\""},
		{"{\"ttl\":-1}", "\"ttl\""},
		{"{\"heartbeat_timeout\":\"5\"}", "\"heartbeat_timeout\""},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct http_exchange *x = http_fake_post(*state, "/v1/sessions", cases[i].body);
		assert_int_equal(http_fake_status(x), 400);
		assert_json(http_fake_body(x), "error.param", cases[i].param);
	}
}

static void a_client_may_leave_while_the_engine_thinks(void **state)
{
	struct fake_server *s = *state;
	http_fake_close(http_fake_request(s, HTTP_POST, "/tokenize", NULL, "{\"content\":\"abc\"}"));
	http_fake_close(http_fake_request(s, HTTP_GET, "/v1/sessions", NULL, NULL));
	fake_server_run(s);
}

static void the_page_is_served_with_a_strict_policy(void **state)
{
	struct http_exchange *x = http_fake_get(*state, "/");
	assert_int_equal(http_fake_status(x), 200);
	assert_string_equal(http_fake_type(x), "text/html; charset=utf-8");
	assert_non_null(strstr(http_fake_header(x, "Content-Security-Policy"), "default-src 'none'"));
	assert_string_equal(http_fake_body(x), "<!doctype html>");
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
UNIT_MAIN(T(models_tell_their_context), T(a_model_is_found_by_its_id), T(text_becomes_tokens_and_back),
	  T(a_chat_can_be_tokenized), T(wrong_texts_and_ids_are_named), T(live_ready_and_draining_are_three_answers),
	  T(metrics_count_what_ran), T(sessions_are_made_found_and_deleted),
	  T(the_kv_cache_is_shown_to_whom_it_concerns), T(wrong_sessions_are_named),
	  T(a_client_may_leave_while_the_engine_thinks), T(the_page_is_served_with_a_strict_policy))
