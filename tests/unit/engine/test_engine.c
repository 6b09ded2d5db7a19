/* The engine as the server uses it, over a tiny model and the reference backend: commands in, events out. */
#include "tests/unit/engine/engine_fixture.h"

#include "engine/tools.h"

static const char *const prompts[] = {
	"the first prompt",
	"a second one, somewhat longer than the first",
	"3",
	"and the fourth is about nothing at all",
	"five",
	"the sixth prompt is here to be cut into chunks of sixteen tokens and to take several steps",
	"seven, seven",
	"the first prompt, but with another end",
};
enum { N_PROMPTS = sizeof prompts / sizeof *prompts };

static void an_answer_does_not_depend_on_company_chunks_or_preemption(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct answer alone[N_PROMPTS], together[N_PROMPTS];
	struct engine *e = start(&o);
	for (int i = 0; i < N_PROMPTS; i++) {
		alone[i] = run(e, request(e, prompts[i], 60));
		assert_int_equal(alone[i].n_tokens, 60);
	}
	engine_destroy(e);
	/* All at once; in chunks of 16; and in a pool that holds a fraction of them. */
	for (int variant = 0; variant < 3; variant++) {
		uint64_t ids[N_PROMPTS];
		o = defaults();
		if (variant == 1)
			o.step_tokens = 16, o.max_running = 8;
		if (variant == 2)
			o.kv_bytes = 14 * 4096;
		memset(together, 0, sizeof together);
		e = start(&o);
		for (int i = 0; i < N_PROMPTS; i++) {
			struct engine_request *r = request(e, prompts[i], 60);
			ids[i] = r->id;
			engine_submit(e, r);
		}
		await(e, ids, together, N_PROMPTS);
		struct engine_stats s;
		engine_stats(e, &s);
		assert_true((s.preemptions > 0) == (variant == 2));
		for (int i = 0; i < N_PROMPTS; i++) {
			same_tokens(&together[i], &alone[i]);
			buf_free(&together[i].text);
		}
		assert_at_rest(e);
		engine_destroy(e);
	}
	for (int i = 0; i < N_PROMPTS; i++)
		buf_free(&alone[i].text);
}

static void a_session_computes_only_what_is_new_and_answers_the_same(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	const char *first = "hello there, this is turn one",
		   *second = "hello there, this is turn one and a second turn",
		   *forked = "hello there, this is another end";
	struct answer cold = run(e, request(e, second, 20));
	struct answer cold_fork = run(e, request(e, forked, 20));
	assert_int_equal(cold.usage.cached_tokens, 0);
	engine_destroy(e);
	e = start(&o);
	make_session(e, "s");
	struct engine_request *r = request(e, first, 1);
	strcpy(r->session, "s");
	struct answer a = run(e, r);
	buf_free(&a.text);
	r = request(e, second, 20);
	strcpy(r->session, "s");
	a = run(e, r);
	assert_int_equal(a.usage.cached_tokens, (int)strlen(first));
	same_tokens(&a, &cold);
	buf_free(&a.text);
	r = request(e, forked, 20);
	strcpy(r->session, "s");
	a = run(e, r);
	assert_int_equal(a.usage.cached_tokens, 21);
	same_tokens(&a, &cold_fork);
	buf_free(&a.text);
	buf_free(&cold.text);
	buf_free(&cold_fork.text);
	engine_destroy(e);
}

static void equal_prompts_share_pages_unless_their_salts_differ(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	const char *prompt = "forty characters of prompt to be shared!", *salts[] = {NULL, NULL, "a", "a", "b", ""};
	const int cached[] = {0, 39, 0, 39, 0, 39}; /* all but the last token, of which the logits are wanted */
	struct answer first = run(e, request(e, prompt, 10));
	for (size_t i = 1; i < 6; i++) {
		struct engine_request *r = request(e, prompt, 10);
		r->cache_salt = salts[i] ? strdup(salts[i]) : NULL;
		struct answer a = run(e, r);
		assert_int_equal(a.usage.cached_tokens, cached[i]);
		same_tokens(&a, &first);
		buf_free(&a.text);
	}
	buf_free(&first.text);
	assert_at_rest(e);
	engine_destroy(e);
}

static void sessions_expire_by_the_clock_and_return_everything(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	make_session(e, "s");
	struct engine_request *r = request(e, "some text that fills more than a page", 2);
	strcpy(r->session, "s");
	struct answer a = run(e, r);
	buf_free(&a.text);
	uint64_t id = engine_next_id(e);
	engine_session_get(e, id, 0, "s");
	struct engine_event *ev = reply(e, id);
	assert_int_equal(ev->type, ENGINE_EVENT_SESSION);
	assert_int_equal(ev->sessions[0].n_tokens, 38);
	assert_int_equal(ev->sessions[0].n_pages, 3);
	assert_int_equal(ev->sessions[0].expires_in_ms, 30000);
	engine_event_free(ev);
	clock_advance(&now, 29999 * INT64_C(1000000));
	id = engine_next_id(e);
	engine_session_heartbeat(e, id, 0, "s");
	ev = reply(e, id);
	assert_int_equal(ev->type, ENGINE_EVENT_SESSION);
	engine_event_free(ev);
	clock_advance(&now, 30000 * INT64_C(1000000));
	r = request(e, "x", 1);
	strcpy(r->session, "s");
	a = run(e, r);
	assert_int_equal(a.error.status, STATUS_NOT_FOUND);
	assert_string_equal(a.error.param, "session_id");
	/* The collection finds it without anybody asking. */
	struct engine_stats s;
	for (int i = 0; i < 1000; i++) {
		engine_stats(e, &s);
		if (s.sessions_expired)
			break;
		usleep(1000);
	}
	assert_int_equal(s.sessions_expired, 1);
	assert_int_equal(s.n_sessions, 0);
	assert_at_rest(e);
	engine_destroy(e);
}

static void a_ttl_ends_what_runs_and_a_delete_too(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.session_gc_ms = 1;
	struct engine *e = start(&o);
	for (int by_delete = 0; by_delete < 2; by_delete++) {
		struct answer a[2];
		uint64_t ids[2];
		memset(a, 0, sizeof a);
		make_session(e, "s");
		for (int i = 0; i < 2; i++) {
			struct engine_request *r = request(e, "a prompt", 500);
			strcpy(r->session, "s");
			ids[i] = r->id;
			engine_submit(e, r);
		}
		uint64_t id = engine_next_id(e);
		if (by_delete)
			engine_session_delete(e, id, 0, "s");
		else
			clock_advance(&now, 300000 * INT64_C(1000000));
		await(e, ids, a, 2);
		for (int i = 0; i < 2; i++) {
			if (a[i].error.status == STATUS_OK) {
				assert_int_equal(a[i].finish, ENGINE_FINISH_CANCELLED);
				assert_string_equal(a[i].detail, by_delete ? "session_deleted" : "session_expired");
			} else {
				/* It had not reached the worker yet. */
				assert_int_equal(a[i].error.status, STATUS_NOT_FOUND);
			}
			buf_free(&a[i].text);
		}
		assert_at_rest(e);
	}
	engine_destroy(e);
}

static void a_cancel_ends_a_request_wherever_it_is(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.max_running = 2;
	struct engine *e = start(&o);
	struct answer a[20];
	uint64_t ids[20];
	memset(a, 0, sizeof a);
	for (int i = 0; i < 20; i++) {
		struct engine_request *r = request(e, "a prompt to be cancelled", 480);
		ids[i] = r->id;
		engine_submit(e, r);
	}
	for (int i = 0; i < 20; i++)
		engine_cancel(e, ids[i]);
	engine_cancel(e, 123456);
	await(e, ids, a, 20);
	for (int i = 0; i < 20; i++) {
		assert_int_equal(a[i].error.status, STATUS_OK);
		assert_int_equal(a[i].finish, ENGINE_FINISH_CANCELLED);
		assert_true(a[i].n_tokens < 480);
		buf_free(&a[i].text);
	}
	assert_at_rest(e);
	engine_destroy(e);
}

static void what_takes_too_long_ends_with_a_timeout(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.max_running = 1;
	o.request_timeout_ms = 60000;
	struct engine *e = start(&o);
	struct answer a[20];
	uint64_t ids[20];
	int late = 0;
	memset(a, 0, sizeof a);
	for (int i = 0; i < 20; i++) {
		struct engine_request *r = request(e, "a prompt that has its time", 480);
		r->timeout_ms = i % 2 ? 900000 : 1500; /* a longer one than the engine's is cut to it */
		ids[i] = r->id;
		engine_submit(e, r);
	}
	clock_advance(&now, 1600 * INT64_C(1000000));
	await(e, ids, a, 20);
	for (int i = 0; i < 20; i++) {
		assert_true(a[i].error.status == STATUS_OK || (i % 2 == 0 && a[i].error.status == STATUS_TIMEOUT));
		if (a[i].error.status == STATUS_TIMEOUT) {
			assert_non_null(strstr(a[i].error.message, "1.5 s"));
			late++;
		}
		buf_free(&a[i].text);
	}
	assert_true(late > 0);
	assert_at_rest(e);
	struct engine_request *r = request(e, "the engine's own limit", 480);
	r->timeout_ms = 900000;
	ids[0] = r->id;
	memset(a, 0, sizeof a);
	engine_submit(e, r);
	clock_advance(&now, 61000 * INT64_C(1000000));
	await(e, ids, a, 1);
	assert_int_equal(a[0].error.status, STATUS_TIMEOUT);
	buf_free(&a[0].text);
	engine_destroy(e);
}

static void a_session_has_so_many_requests_and_no_more(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.session_requests = 2;
	struct engine *e = start(&o);
	struct answer a[6];
	uint64_t ids[6];
	int refused = 0;
	memset(a, 0, sizeof a);
	make_session(e, "s");
	for (int i = 0; i < 6; i++) {
		struct engine_request *r = request(e, "turn by turn", 480);
		strcpy(r->session, "s");
		ids[i] = r->id;
		engine_submit(e, r);
	}
	await(e, ids, a, 6);
	for (int i = 0; i < 6; i++) {
		refused += a[i].error.status == STATUS_LIMIT;
		assert_true(a[i].error.status == STATUS_LIMIT || a[i].n_tokens == 480);
		if (a[i].error.status == STATUS_LIMIT)
			assert_string_equal(a[i].error.param, "session_id");
		buf_free(&a[i].text);
	}
	assert_true(refused > 0 && refused <= 4);
	assert_at_rest(e);
	engine_destroy(e);
}

static void a_tenant_has_so_many_requests_and_no_more(void **state)
{
	(void)state;
	struct engine *e = start(&(struct engine_options){
		.model_path = model_path, .device = "cpu-reference", .n_threads = 1, .clock = &now});
	struct engine_tenant t = {.id = 3, .limits.max_requests = 2};
	struct engine_tenant_usage usage;
	struct answer a[6];
	uint64_t ids[6];
	int refused = 0;
	memset(a, 0, sizeof a);
	engine_tenant_set(e, &t);
	for (int i = 0; i < 6; i++) {
		struct engine_request *r = request(e, "one of many", 480);
		r->tenant = i < 5 ? 3 : 0;
		ids[i] = r->id;
		engine_submit(e, r);
	}
	await(e, ids, a, 6);
	for (int i = 0; i < 6; i++) {
		refused += a[i].error.status == STATUS_LIMIT;
		buf_free(&a[i].text);
	}
	assert_int_equal(a[5].error.status, STATUS_OK);
	assert_true(refused > 0 && refused <= 3);
	engine_tenant_usage(e, 3, &usage);
	assert_int_equal(usage.refused, refused);
	assert_int_equal(usage.requests, 5 - refused);
	assert_int_equal(usage.generated_tokens, 480 * (5 - refused));
	assert_int_equal(usage.n_running + usage.n_waiting + usage.n_pages, 0);
	/* Whoever was never set may do nothing, and nobody has such a number. */
	struct engine_request *stranger = request(e, "who", 1);
	stranger->tenant = 7;
	a[0] = run(e, stranger);
	assert_int_not_equal(a[0].error.status, STATUS_OK);
	engine_tenant_usage(e, 7, &usage);
	assert_int_equal(usage.id, -1);
	assert_at_rest(e);
	engine_destroy(e);
}

static void what_does_not_fit_is_refused_with_its_numbers(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.context_tokens = 64;
	struct engine *e = start(&o);
	struct answer a = run(e, request(e, "exactly twenty bytes", 45));
	assert_int_equal(a.error.status, STATUS_CONTEXT_LENGTH);
	assert_non_null(strstr(a.error.message, "64"));
	assert_non_null(strstr(a.error.message, "65"));
	a = run(e, request(e, "exactly twenty bytes", 44));
	assert_int_equal(a.error.status, STATUS_OK);
	assert_int_equal(a.n_tokens, 44);
	buf_free(&a.text);
	a = run(e, request(e, "exactly twenty bytes", -1));
	assert_int_equal(a.n_tokens, 44);
	assert_int_equal(a.finish, ENGINE_FINISH_LENGTH);
	buf_free(&a.text);
	char long_prompt[66];
	memset(long_prompt, 'x', 65);
	long_prompt[65] = '\0';
	a = run(e, request(e, long_prompt, 1));
	assert_int_equal(a.error.status, STATUS_CONTEXT_LENGTH);
	long_prompt[64] = '\0';
	a = run(e, request(e, long_prompt, -1));
	assert_int_equal(a.error.status, STATUS_CONTEXT_LENGTH);
	a = run(e, request(e, "", 1));
	assert_int_equal(a.error.status, STATUS_INVALID);
	struct engine_request *r = request(e, "", 1);
	r->input = ENGINE_INPUT_TOKENS;
	r->tokens = malloc(2 * sizeof *r->tokens);
	r->tokens[0] = 5;
	r->tokens[1] = TINY_VOCAB;
	r->n_tokens = 2;
	a = run(e, r);
	assert_int_equal(a.error.status, STATUS_INVALID);
	assert_non_null(strstr(a.error.message, "259"));
	engine_destroy(e);
}

static void the_queue_has_an_end(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.max_running = 1;
	o.max_queue = 2;
	struct engine *e = start(&o);
	struct answer a[5];
	uint64_t ids[5];
	int refused = 0;
	memset(a, 0, sizeof a);
	for (int i = 0; i < 5; i++) {
		struct engine_request *r = request(e, "wait", 400);
		ids[i] = r->id;
		engine_submit(e, r);
	}
	for (int i = 0; i < 5; i++)
		engine_cancel(e, ids[i]);
	await(e, ids, a, 5);
	for (int i = 0; i < 5; i++) {
		refused += a[i].error.status == STATUS_LIMIT;
		buf_free(&a[i].text);
	}
	assert_int_equal(refused, 2);
	/* And the places come back. */
	struct answer again = run(e, request(e, "wait", 4));
	assert_int_equal(again.error.status, STATUS_OK);
	buf_free(&again.text);
	engine_destroy(e);
}

static void stop_strings_and_stop_tokens_end_an_answer(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	struct answer whole = run(e, request(e, "stop here", 60));
	/* A stop string from the middle of what it would say, and what stands before its first occurrence. */
	char stop[4] = {0};
	memcpy(stop, whole.text.data + whole.text.len / 2, 3);
	if (!utf8_valid(stop, 3))
		memcpy(stop, whole.text.data, 1), stop[1] = '\0';
	size_t before = (size_t)(strstr(whole.text.data, stop) - whole.text.data);
	struct engine_request *r = request(e, "stop here", 60);
	engine_request_add_stop(r, "not in there at all", 19);
	engine_request_add_stop(r, stop, strlen(stop));
	struct answer a = run(e, r);
	assert_int_equal(a.finish, ENGINE_FINISH_STOP);
	assert_string_equal(a.detail, "stop");
	assert_int_equal(a.text.len, before);
	buf_free(&a.text);
	r = request(e, "stop here", 60);
	r->stop_tokens = malloc(sizeof *r->stop_tokens);
	r->stop_tokens[0] = whole.tokens[5];
	r->n_stop_tokens = 1;
	a = run(e, r);
	assert_int_equal(a.finish, ENGINE_FINISH_STOP);
	assert_string_equal(a.detail, "stop_token");
	assert_true(a.n_tokens <= 5);
	assert_int_equal(a.usage.completion_tokens, a.n_tokens);
	buf_free(&a.text);
	buf_free(&whole.text);
	engine_destroy(e);
}

static void a_prompts_own_log_probabilities_agree_with_generation(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	struct answer a = run(e, request(e, "score me", 20));
	/*
	 * The greedy answer, given back as part of a prompt, must score exactly what it scored when it was generated.
	 */
	struct engine_request *r = request(e, "", 0);
	r->input = ENGINE_INPUT_TOKENS;
	r->n_tokens = 28;
	r->tokens = malloc(28 * sizeof *r->tokens);
	for (int i = 0; i < 8; i++)
		r->tokens[i] = (unsigned char)"score me"[i];
	memcpy(r->tokens + 8, a.tokens, 20 * sizeof *a.tokens);
	r->want_prompt = true;
	r->want_prompt_logprobs = true;
	struct answer b = run(e, r);
	assert_int_equal(b.n_tokens, 0);
	assert_int_equal(b.n_prompt, 28);
	assert_true(isnan(b.prompt_logprobs[0]));
	for (int i = 0; i < 20; i++)
		assert_true(b.prompt_logprobs[8 + i] == a.logprobs[i]);
	buf_free(&a.text);
	buf_free(&b.text);
	engine_destroy(e);
}

static void control_tokens_in_a_message_stay_text(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	struct arena *arena = arena_create(1 << 20);
	struct value *chat = value_dict(arena), *messages = value_list(arena), *m = value_dict(arena);
	value_dict_set(arena, m, "role", 4, value_string(arena, "user", 4, VALUE_DATA));
	value_dict_set(arena, m, "content", 7, value_string(arena, "<|im_end|>", 10, VALUE_DATA));
	value_list_add(arena, messages, m);
	value_dict_set(arena, chat, "messages", 8, messages);
	uint64_t id = engine_next_id(e);
	engine_tokenize_chat(e, id, arena, chat);
	struct engine_event *ev = reply(e, id);
	assert_int_equal(ev->type, ENGINE_EVENT_TOKENS);
	assert_string_equal(ev->text.data, "<|im_start|>user\n<|im_end|><|im_end|>\n");
	int ends = 0;
	for (size_t i = 0; i < ev->n_tokens; i++)
		ends += ev->tokens[i] == TINY_END;
	assert_int_equal(ev->tokens[0], TINY_START);
	assert_int_equal(ends, 1);
	assert_int_equal(ev->n_tokens, 1 + 5 + 10 + 1 + 1);
	engine_event_free(ev);
	/* A raw prompt is what its author says it is. */
	id = engine_next_id(e);
	engine_tokenize(e, id, "<|im_end|>", 10, true, true);
	ev = reply(e, id);
	assert_int_equal(ev->n_tokens, 1);
	engine_event_free(ev);
	id = engine_next_id(e);
	engine_tokenize(e, id, "<|im_end|>", 10, true, false);
	ev = reply(e, id);
	assert_int_equal(ev->n_tokens, 10);
	engine_event_free(ev);
	engine_destroy(e);
}

static void a_model_that_cannot_be_loaded_says_why(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e;
	struct error err;
	struct list events;
	o.model_path = "/nowhere/at/all.gguf";
	list_init(&events);
	assert_int_equal(engine_create(&o, &e, &err), STATUS_OK);
	assert_true(engine_wait(e, &events, -1));
	engine_event_free(list_entry(list_pop_front(&events), struct engine_event, link));
	assert_int_equal(engine_state(e), ENGINE_FAILED);
	assert_non_null(strstr(engine_load_error(e)->message, "/nowhere/at/all.gguf"));
	struct answer a = run(e, request(e, "anyone?", 1));
	assert_int_equal(a.error.status, STATUS_BUSY);
	engine_destroy(e);
	o.model_path = NULL;
	assert_int_equal(engine_create(&o, &e, &err), STATUS_INVALID);
}

static void a_pool_too_small_for_the_asked_context_is_a_start_up_error(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e;
	struct list events;
	list_init(&events);
	o.context_tokens = 512;
	o.kv_bytes = 10 * 4096;
	assert_int_equal(engine_create(&o, &e, NULL), STATUS_OK);
	assert_true(engine_wait(e, &events, -1));
	engine_event_free(list_entry(list_pop_front(&events), struct engine_event, link));
	assert_int_equal(engine_state(e), ENGINE_FAILED);
	assert_non_null(strstr(engine_load_error(e)->message, "--kv-memory"));
	engine_destroy(e);
	/* Without a wish the context follows what there is. */
	o.context_tokens = 0;
	e = start(&o);
	assert_int_equal(engine_info(e)->n_ctx, 160);
	engine_destroy(e);
}

static void a_plan_is_what_the_engine_then_takes_to_the_byte(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine_plan_params params = {
		.model_path = model_path, .context_tokens = 300, .n_sessions = 3, .tokens_per_s = 10};
	struct engine_plan plan, other;
	struct error err;
	assert_int_equal(engine_plan(&params, &plan, &err), STATUS_OK);
	/* Exactly the memory it asks for, and the engine holds exactly so many conversations. */
	o.context_tokens = 300;
	o.kv_bytes = plan.kv_bytes;
	struct engine *e = start(&o);
	const struct engine_info *info = engine_info(e);
	assert_int_equal(info->kv_bytes, plan.kv_bytes);
	assert_int_equal(info->kv_bytes_per_token, plan.kv_bytes_per_token);
	assert_int_equal(plan.kv_bytes_per_token, 2 * TINY_LAYERS * TINY_KV_HEADS * TINY_HEAD_DIM * 2);
	assert_int_equal(plan.sessions_that_fit, 3);
	make_session(e, "s");
	struct engine_request *r = request(e, "0123456789012345678901234567890123456789", 261);
	strcpy(r->session, "s");
	struct answer a = run(e, r);
	assert_int_equal(a.n_tokens, 0); /* 301 do not fit */
	r = request(e, "0123456789012345678901234567890123456789", 260);
	strcpy(r->session, "s");
	a = run(e, r);
	assert_int_equal(a.n_tokens, 260);
	uint64_t id = engine_next_id(e);
	engine_session_get(e, id, 0, "s");
	struct engine_event *ev = reply(e, id);
	assert_int_equal(ev->sessions[0].n_tokens, 299); /* the last token's KV is never needed */
	assert_int_equal(ev->sessions[0].kv_bytes, plan.kv_bytes_per_session);
	engine_event_free(ev);
	buf_free(&a.text);
	engine_destroy(e);
	/* Linear in the tokens, page by page, and in the sessions. */
	for (int32_t pages = 1; pages < 20; pages++) {
		params.context_tokens = pages * 16;
		assert_int_equal(engine_plan(&params, &other, &err), STATUS_OK);
		assert_int_equal(other.kv_bytes_per_session, (uint64_t)pages * other.page_bytes);
		assert_int_equal(other.total_bytes,
		                 other.weights_bytes + other.activation_bytes + 3 * other.kv_bytes_per_session);
		assert_true(other.idle_seconds == (double)pages * 3 * 16 / 10);
	}
	params.memory_bytes = 1;
	assert_int_equal(engine_plan(&params, &other, &err), STATUS_OK);
	assert_int_equal(other.sessions_that_fit, 0);
	params.tokens_per_s = -1;
	assert_int_equal(engine_plan(&params, &other, &err), STATUS_INVALID);
}

static void a_plan_of_narrow_kv_fits_and_leaves_little(void **state)
{
	(void)state;
	static const char *const types[] = {"int8", "fp8_e4m3"};
	struct error err;
	for (size_t i = 0; i < 2; i++) {
		struct engine_plan_params params = {
			.model_path = model_path, .context_tokens = 300, .n_sessions = 30, .kv_type = types[i]};
		struct engine_options o = defaults();
		struct engine_plan plan;
		assert_int_equal(engine_plan(&params, &plan, &err), STATUS_OK);
		assert_true(plan.sessions_that_fit == 30);
		o.context_tokens = 300;
		o.kv_type = types[i];
		o.kv_bytes = plan.kv_bytes;
		struct engine *e = start(&o);
		assert_in_range(engine_info(e)->n_pages, 30 * 19, 30 * 19 + 10);
		engine_destroy(e);
	}
	struct engine_plan_params wrong = {.model_path = model_path, .kv_type = "int3"};
	struct engine_plan plan;
	assert_int_equal(engine_plan(&wrong, &plan, &err), STATUS_INVALID);
	assert_string_equal(err.param, "kv-dtype");
}

/*
 * Four conversations of 360 tokens are 92 pages, and the pool has 25: in windows of 48 tokens each keeps five or six,
 * and they run beside each other to the same ends as with all the memory they could want.
 */
static void pages_out_of_every_window_make_room(void **state)
{
	(void)state;
	enum { N = 4 };
	struct engine_options o = defaults();
	char path[64];
	struct answer answers[2][N];
	assert_true(tiny_model_write_windowed(path, 512, 48, tiny_chat_template, 5));
	o.model_path = path;
	o.context_tokens = 400;
	o.max_running = N;
	memset(answers, 0, sizeof answers);
	for (int small = 0; small < 2; small++) {
		o.kv_bytes = (small ? 25 : 200) * 4096;
		struct engine *e = start(&o);
		uint64_t ids[N];
		for (int i = 0; i < N; i++) {
			struct engine_request *r = request(e, prompts[i], 360 - (int32_t)strlen(prompts[i]));
			ids[i] = r->id;
			engine_submit(e, r);
		}
		await(e, ids, answers[small], N);
		assert_at_rest(e);
		struct engine_stats s;
		engine_stats(e, &s);
		assert_int_equal(s.preemptions, 0);
		assert_int_equal(s.kv.drift_pages, 0);
		/* The longest again, on top of what the index has left of it. */
		struct answer again = run(e, request(e, prompts[3], 360 - (int32_t)strlen(prompts[3])));
		same_tokens(&again, &answers[small][3]);
		buf_free(&again.text);
		engine_destroy(e);
	}
	for (int i = 0; i < N; i++) {
		same_tokens(&answers[1][i], &answers[0][i]);
		buf_free(&answers[0][i].text);
		buf_free(&answers[1][i].text);
	}
	unlink(path);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(an_answer_does_not_depend_on_company_chunks_or_preemption),
	        cmocka_unit_test(a_session_computes_only_what_is_new_and_answers_the_same),
	        cmocka_unit_test(equal_prompts_share_pages_unless_their_salts_differ),
	        cmocka_unit_test(sessions_expire_by_the_clock_and_return_everything),
	        cmocka_unit_test(a_ttl_ends_what_runs_and_a_delete_too),
	        cmocka_unit_test(a_cancel_ends_a_request_wherever_it_is),
	        cmocka_unit_test(what_takes_too_long_ends_with_a_timeout),
	        cmocka_unit_test(a_session_has_so_many_requests_and_no_more),
	        cmocka_unit_test(a_tenant_has_so_many_requests_and_no_more),
	        cmocka_unit_test(what_does_not_fit_is_refused_with_its_numbers),
	        cmocka_unit_test(the_queue_has_an_end),
	        cmocka_unit_test(stop_strings_and_stop_tokens_end_an_answer),
	        cmocka_unit_test(a_prompts_own_log_probabilities_agree_with_generation),
	        cmocka_unit_test(control_tokens_in_a_message_stay_text),
	        cmocka_unit_test(a_model_that_cannot_be_loaded_says_why),
	        cmocka_unit_test(a_pool_too_small_for_the_asked_context_is_a_start_up_error),
	        cmocka_unit_test(a_plan_is_what_the_engine_then_takes_to_the_byte),
	        cmocka_unit_test(pages_out_of_every_window_make_room),
	        cmocka_unit_test(a_plan_of_narrow_kv_fits_and_leaves_little),
	};
	return cmocka_run_group_tests(tests, make_model, remove_model);
}
