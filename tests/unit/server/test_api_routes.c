/* Lookup, CORS, keys, and errors that have nothing to do with a resource. */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "server/auth.h"
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

static const char chat[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";

static int status_of(struct fake_server *s, enum http_method method, const char *path)
{
	return http_fake_status(http_fake_request(s, method, path, NULL, "{}"));
}

/* client-quirks.md 31 */
static void v1_and_a_trailing_slash_are_optional(void **state)
{
	const char *paths[] = {"/v1/models", "/models", "/v1/models/", "/models/"};
	for (size_t i = 0; i < 4; i++)
		assert_int_equal(status_of(*state, HTTP_GET, paths[i]), 200);
	assert_int_equal(http_fake_status(http_fake_post(*state, "/chat/completions", chat)), 200);
	assert_int_equal(http_fake_status(http_fake_post(*state, "/v1/chat/completions/", chat)), 200);
	assert_int_equal(http_fake_status(http_fake_post(*state, "/tokenize", "{\"content\":\"a\"}")), 200);
	assert_int_equal(status_of(*state, HTTP_GET, "/v1/models//"), 404);
	assert_int_equal(status_of(*state, HTTP_GET, "/v1"), 404);
	assert_int_equal(status_of(*state, HTTP_GET, "/v1/health"), 404);
}

/* client-quirks.md 22 */
static void errors_have_four_keys(void **state)
{
	struct http_exchange *x = http_fake_get(*state, "/nothing/here");
	assert_int_equal(http_fake_status(x), 404);
	assert_string_equal(http_fake_type(x), "application/json");
	assert_json(http_fake_body(x), "",
		    "{\"error\":{\"message\":\"There is nothing at /nothing/here.\",\"type\":\"invalid_request_error\","
		    "\"param\":null,\"code\":\"unknown_url\"}}");
}

static void a_wrong_method_names_the_right_ones(void **state)
{
	struct http_exchange *x = http_fake_request(*state, HTTP_DELETE, "/v1/models", NULL, NULL);
	assert_int_equal(http_fake_status(x), 405);
	assert_string_equal(http_fake_header(x, "Allow"), "GET, HEAD, OPTIONS");
	assert_json(http_fake_body(x), "error.code", "\"method_not_allowed\"");
	x = http_fake_request(*state, HTTP_PUT, "/v1/sessions/abc", NULL, NULL);
	assert_string_equal(http_fake_header(x, "Allow"), "GET, HEAD, DELETE, OPTIONS");
	x = http_fake_request(*state, HTTP_GET, "/v1/chat/completions", NULL, NULL);
	assert_int_equal(http_fake_status(x), 405);
}

/* client-quirks.md 42 */
static void head_works_wherever_get_does(void **state)
{
	const char *paths[] = {"/", "/health", "/v1/models", "/metrics"};
	for (size_t i = 0; i < 4; i++)
		assert_int_equal(status_of(*state, HTTP_HEAD, paths[i]), 200);
	assert_int_equal(status_of(*state, HTTP_HEAD, "/v1/chat/completions"), 405);
}

/* client-quirks.md 37 */
static void preflight_allows_what_it_is_asked_for(void **state)
{
	struct http_exchange *x = http_fake_request(*state, HTTP_OPTIONS, "/v1/chat/completions",
						    "Origin: https://app.example\n"
						    "Access-Control-Request-Headers: authorization, x-stainless-os\n",
						    NULL);
	assert_int_equal(http_fake_status(x), 204);
	assert_string_equal(http_fake_header(x, "Access-Control-Allow-Origin"), "*");
	assert_string_equal(http_fake_header(x, "Access-Control-Allow-Headers"), "authorization, x-stainless-os");
	assert_string_equal(http_fake_header(x, "Access-Control-Allow-Methods"), "POST, OPTIONS");
	assert_string_equal(http_fake_body(x), "");
	/* What is no list of names is not echoed. */
	x = http_fake_request(*state, HTTP_OPTIONS, "/v1/chat/completions", "Access-Control-Request-Headers: a: <b>\n",
			      NULL);
	assert_null(strchr(http_fake_header(x, "Access-Control-Allow-Headers"), '<'));
	assert_int_equal(status_of(*state, HTTP_OPTIONS, "/nothing"), 404);
}

static void every_answer_carries_the_cors_header(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *all[] = {
		http_fake_get(s, "/v1/models"),
		http_fake_get(s, "/nothing"),
		http_fake_post(s, "/v1/chat/completions", "not json"),
		http_fake_post(s, "/v1/chat/completions",
			       "{\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}"),
	};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		assert_string_equal(http_fake_header(all[i], "Access-Control-Allow-Origin"), "*");
	s->config.cors_origin = (char *)"https://app.example";
	assert_string_equal(http_fake_header(http_fake_get(s, "/health"), "Vary"), "Origin");
	s->config.cors_origin = (char *)"https://a.example, https://b.example";
	struct http_exchange *b = http_fake_request(s, HTTP_GET, "/health", "Origin: https://b.example\n", NULL);
	assert_string_equal(http_fake_header(b, "Access-Control-Allow-Origin"), "https://b.example");
	assert_string_equal(http_fake_header(b, "Vary"), "Origin");
	static const char *const others[] = {"Origin: https://b.exampl\n", "Origin: https://b.example.evil\n",
	                                     "Origin: ,\n", NULL};
	for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
		b = http_fake_request(s, HTTP_GET, "/health", others[i], NULL);
		assert_null(http_fake_header(b, "Access-Control-Allow-Origin"));
		assert_string_equal(http_fake_header(b, "Vary"), "Origin");
	}
	s->config.cors_origin = (char *)"";
	assert_null(http_fake_header(http_fake_get(s, "/health"), "Access-Control-Allow-Origin"));
}

/* A browser sends the origin of the page and opens the WebSocket whatever it is: the server has to look. */
static void a_websocket_is_not_for_pages_of_others(void **state)
{
	struct fake_server *s = *state;
	static const struct {
		const char *cors, *origin;
		bool opens;
	} cases[] = {
		{"*", "Origin: https://any.example\n", true},
		{"", "", true}, /* a program */
		{"", "Origin: https://any.example\n", false},
		{"", "Origin: null\n", false},
		{"", "Origin: http://here:8080\n", true},
		{"", "Origin: https://HERE:8080\n", true},
		{"", "Origin: http://here:80801\n", false},
		{"", "Origin: http://there:8080\n", false},
		{"", "Origin: http://\n", false},
		{"", "Origin: here:8080\n", false},
		{"https://a.example,https://b.example", "Origin: https://b.example\n", true},
		{"https://a.example,https://b.example", "Origin: https://b.example.evil\n", false},
		{"null", "Origin: null\n", true},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		char headers[200];
		s->config.cors_origin = (char *)(uintptr_t)cases[i].cors;
		snprintf(headers, sizeof headers, "Host: here:8080\nUpgrade: websocket\n%s", cases[i].origin);
		struct http_exchange *x = http_fake_request(s, HTTP_GET, "/v1/responses", headers, NULL);
		if ((http_fake_status(x) != 403) != cases[i].opens)
			fail_msg("\"%s\" and %s: %d", cases[i].cors, cases[i].origin, http_fake_status(x));
		if (!cases[i].opens)
			assert_json(http_fake_body(x), "error.code", "\"origin_not_allowed\"");
	}
	/* What it may not open it may not read either; but a request without an upgrade is the browser's affair. */
	s->config.cors_origin = (char *)"";
	struct http_exchange *x =
		http_fake_request(s, HTTP_GET, "/v1/models", "Host: here:8080\nOrigin: https://any.example\n", NULL);
	assert_int_equal(http_fake_status(x), 200);
}

/* client-quirks.md 34 */
static void keys_are_asked_for_when_there_is_one(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_request(s, HTTP_GET, "/v1/models", "Authorization: Bearer dummy\n", NULL);
	assert_int_equal(http_fake_status(x), 200);
	struct error err;
	assert_int_equal(
		app_set_keys(s->app, str_from("{\"keys\":[{\"name\":\"a\",\"key\":\"sekret\"}]}"), "test", &err),
		STATUS_OK);
	x = http_fake_get(s, "/v1/models");
	assert_int_equal(http_fake_status(x), 401);
	assert_json(http_fake_body(x), "error.code", "\"invalid_api_key\"");
	assert_non_null(http_fake_header(x, "WWW-Authenticate"));
	x = http_fake_request(s, HTTP_GET, "/v1/models", "Authorization: Bearer sekret\n", NULL);
	assert_int_equal(http_fake_status(x), 200);
	x = http_fake_request(s, HTTP_GET, "/v1/models", "X-Api-Key: sekret\n", NULL);
	assert_int_equal(http_fake_status(x), 200);
	x = http_fake_request(s, HTTP_GET, "/v1/models", "X-Api-Key: sekret2\n", NULL);
	assert_int_equal(http_fake_status(x), 401);
	assert_int_equal(http_fake_status(http_fake_get(s, "/health")), 200);
	assert_int_equal(status_of(s, HTTP_OPTIONS, "/v1/models"), 204);
}

static void keys_are_compared_whole(void **state)
{
	static struct auth a;
	struct str none = {NULL, 0};
	(void)state;
	auth_init(&a, "abc");
	assert_int_equal(auth_check(&a, str_from("bearer   abc"), none), 0);
	assert_int_equal(auth_check(&a, str_from("Bearer ab"), none), AUTH_REFUSED);
	assert_int_equal(auth_check(&a, str_from("Bearer abcabc"), none), AUTH_REFUSED);
	assert_int_equal(auth_check(&a, str_from("Bearer "), none), AUTH_REFUSED);
	assert_int_equal(auth_check(&a, str_from("Basic abc"), none), AUTH_REFUSED);
	assert_int_equal(auth_check(&a, none, str_from("")), AUTH_REFUSED);
	assert_int_equal(auth_check(&a, none, str_from("abc")), 0);
}

static void a_body_that_is_no_json_is_a_400(void **state)
{
	const char *paths[] = {"/v1/completions", "/v1/chat/completions", "/v1/responses",
			       "/tokenize",	  "/detokenize",	  "/v1/sessions"};
	for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
		struct http_exchange *x = http_fake_post(*state, paths[i], "{\"a\":");
		assert_int_equal(http_fake_status(x), 400);
		assert_json(http_fake_body(x), "error.type", "\"invalid_request_error\"");
	}
}

static void the_transport_gets_error_bodies_of_the_same_form(void **state)
{
	struct fake_server *s = *state;
	struct buf out = BUF_INIT;
	app_http(s->app)->error_body(&out, 413, "body_too_large", "The body is \"too\" large.");
	assert_json(out.data, "",
		    "{\"error\":{\"message\":\"The body is \\\"too\\\" "
		    "large.\",\"type\":\"invalid_request_error\",\"param\":null,"
		    "\"code\":\"body_too_large\"}}");
	buf_free(&out);
	app_http(s->app)->error_body(&out, 500, NULL, "x");
	assert_json(out.data, "error.type", "\"server_error\"");
	assert_json(out.data, "error.code", "null");
	buf_free(&out);
}

/* client-quirks.md 41 */
static void a_draining_server_sends_clients_elsewhere(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *running = http_fake_request(s, HTTP_POST, "/v1/chat/completions", NULL, chat), *x;
	app_start_drain(s->app);
	x = http_fake_post(s, "/v1/chat/completions", chat);
	assert_int_equal(http_fake_status(x), 503);
	assert_json(http_fake_body(x), "error.code", "\"server_draining\"");
	assert_string_equal(http_fake_header(x, "Retry-After"), "1");
	assert_string_equal(http_fake_header(x, "Connection"), "close");
	/* What ran goes on to its end. */
	assert_int_equal(http_fake_status(running), 200);
	assert_json(http_fake_body(running), "choices.0.message.content", "\"Hello there\"");
}

static void the_drain_deadline_ends_what_runs(void **state)
{
	struct fake_server *s = *state;
	struct http_exchange *x = http_fake_request(s, HTTP_POST, "/v1/chat/completions", NULL, chat);
	fake_server_step(s);
	assert_int_equal(app_active(s->app), 1);
	app_start_drain(s->app);
	app_cancel_all(s->app);
	fake_server_run(s);
	assert_int_equal(app_active(s->app), 0);
	assert_int_equal(http_fake_status(x), 503);
	assert_json(http_fake_body(x), "error.code", "\"cancelled\"");
}

static void work_waits_for_the_model(void **state)
{
	struct fake_server *s = *state;
	const char *paths[] = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/sessions"};
	for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
		fake_engine_set_state(s->engine, ENGINE_LOADING, NULL);
		struct http_exchange *x = http_fake_post(s, paths[i], "{}");
		assert_int_equal(http_fake_status(x), 503);
		assert_json(http_fake_body(x), "error.code", "\"model_loading\"");
		assert_non_null(http_fake_header(x, "Retry-After"));
		fake_engine_set_state(s->engine, ENGINE_FAILED, "tensor blk.0 lies outside the file");
		x = http_fake_post(s, paths[i], "{}");
		assert_json(http_fake_body(x), "error.message",
			    "\"The model is not available: tensor blk.0 lies outside the file\"");
	}
	fake_engine_set_state(s->engine, ENGINE_READY, NULL);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
UNIT_MAIN(T(v1_and_a_trailing_slash_are_optional), T(errors_have_four_keys), T(a_wrong_method_names_the_right_ones),
	  T(head_works_wherever_get_does), T(preflight_allows_what_it_is_asked_for),
	  T(every_answer_carries_the_cors_header), T(a_websocket_is_not_for_pages_of_others),
	  T(keys_are_asked_for_when_there_is_one), T(keys_are_compared_whole), T(a_body_that_is_no_json_is_a_400),
	  T(the_transport_gets_error_bodies_of_the_same_form), T(a_draining_server_sends_clients_elsewhere),
	  T(the_drain_deadline_ends_what_runs), T(work_waits_for_the_model))
