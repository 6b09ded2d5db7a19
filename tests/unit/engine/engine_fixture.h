/*
 * What tests of a whole engine share: a tiny model in a file, engines on the reference backend, requests and their
 * answers.
 */
#pragma once

#include "tests/unit/unit.h"

#include <unistd.h>

#include "engine/engine.h"
#include "tests/support/tiny_model.h"

static char model_path[64];
static struct clock now;

static inline int make_model(void **state)
{
	(void)state;
	return tiny_model_write(model_path, 512, tiny_chat_template, 1) ? 0 : -1;
}

static inline int remove_model(void **state)
{
	(void)state;
	return unlink(model_path);
}

static inline struct engine_options defaults(void)
{
	clock_manual_init(&now, 1000000000);
	return (struct engine_options){
		.model_path = model_path, .device = "cpu-reference", .n_threads = 1, .clock = &now};
}

static inline struct engine *start(const struct engine_options *o)
{
	struct engine *e;
	struct error err;
	struct list events;
	list_init(&events);
	assert_int_equal(engine_create(o, &e, &err), STATUS_OK);
	assert_true(engine_wait(e, &events, -1));
	struct engine_event *ev = list_entry(list_pop_front(&events), struct engine_event, link);
	assert_int_equal(ev->type, ENGINE_EVENT_STATE);
	engine_event_free(ev);
	if (engine_state(e) != ENGINE_READY)
		fail_msg("%s", engine_load_error(e)->message);
	return e;
}

/* What became of one generation. */
struct answer {
	struct engine_usage usage;
	enum engine_finish finish;
	const char *detail;
	struct error error; /* status OK: it ended with DONE */
	int32_t tokens[512];
	int32_t n_tokens;
	struct buf text;
	float logprobs[512];
	int32_t prompt_tokens[512];
	float prompt_logprobs[512];
	size_t n_prompt;
	bool prompt_seen, ended;
};

static inline void take(struct answer *a, struct engine_event *ev)
{
	assert_false(a->ended);
	switch (ev->type) {
	case ENGINE_EVENT_PROMPT:
		assert_false(a->prompt_seen);
		assert_int_equal(a->n_tokens, 0);
		a->prompt_seen = true;
		a->n_prompt = ev->n_tokens;
		for (size_t i = 0; i < ev->n_tokens; i++) {
			a->prompt_tokens[i] = ev->tokens[i];
			a->prompt_logprobs[i] = ev->logprobs ? ev->logprobs[i].logprob : 0;
		}
		break;
	case ENGINE_EVENT_TOKEN:
		assert_true(a->prompt_seen);
		a->logprobs[a->n_tokens] = ev->sample.logprob;
		a->tokens[a->n_tokens++] = ev->sample.token;
		buf_append(&a->text, ev->text.data, ev->text.len);
		break;
	case ENGINE_EVENT_DONE:
		buf_append(&a->text, ev->text.data, ev->text.len);
		a->usage = ev->usage;
		a->finish = ev->finish;
		a->detail = ev->detail;
		a->ended = true;
		break;
	case ENGINE_EVENT_ERROR:
		a->error = ev->error;
		a->ended = true;
		break;
	default:
		fail();
	}
}

/* Waits until n generations with these ids have ended. */
static inline void await(struct engine *e, const uint64_t *ids, struct answer *answers, size_t n)
{
	for (size_t ended = 0; ended < n;) {
		struct list events;
		list_init(&events);
		assert_true(engine_wait(e, &events, 60000));
		for (struct list *l; (l = list_pop_front(&events));) {
			struct engine_event *ev = list_entry(l, struct engine_event, link);
			for (size_t i = 0; i < n; i++) {
				if (ids[i] == ev->request_id) {
					take(&answers[i], ev);
					ended += answers[i].ended;
				}
			}
			engine_event_free(ev);
		}
	}
}

static inline struct engine_request *request(struct engine *e, const char *prompt, int32_t max_tokens)
{
	struct engine_request *r = engine_request_create(e);
	assert_non_null(r);
	r->text = strdup(prompt);
	r->text_n = strlen(prompt);
	r->max_tokens = max_tokens;
	r->sampling.temperature = 0;
	r->sampling.n_logprobs = 0;
	r->ignore_eos = true;
	return r;
}

/* Submits and waits; free the text with buf_free(). */
static inline struct answer run(struct engine *e, struct engine_request *r)
{
	struct answer a = {0};
	uint64_t id = r->id;
	engine_submit(e, r);
	await(e, &id, &a, 1);
	return a;
}

static inline struct engine_event *reply(struct engine *e, uint64_t id)
{
	struct list events;
	list_init(&events);
	assert_true(engine_wait(e, &events, 60000));
	struct engine_event *ev = list_entry(list_pop_front(&events), struct engine_event, link);
	assert_int_equal(ev->request_id, id);
	assert_true(list_empty(&events));
	return ev;
}

/* Nothing runs, and every page is free or can be had. */
static inline void assert_at_rest(struct engine *e)
{
	struct engine_stats s;
	engine_stats(e, &s);
	assert_int_equal(s.n_running, 0);
	assert_int_equal(s.n_waiting, 0);
	assert_int_equal(s.pages_free + s.pages_cached, s.pages_total);
}

static inline void make_session(struct engine *e, const char *id)
{
	struct engine_session_params p = {0};
	uint64_t command = engine_next_id(e);
	snprintf(p.id, sizeof p.id, "%s", id);
	engine_session_create(e, command, &p);
	struct engine_event *ev = reply(e, command);
	assert_int_equal(ev->type, ENGINE_EVENT_SESSION);
	assert_string_equal(ev->sessions[0].id, id);
	engine_event_free(ev);
}

static inline void same_tokens(const struct answer *a, const struct answer *b)
{
	assert_int_equal(a->error.status, STATUS_OK);
	assert_int_equal(a->n_tokens, b->n_tokens);
	assert_memory_equal(a->tokens, b->tokens, (size_t)a->n_tokens * sizeof *a->tokens);
	assert_memory_equal(a->logprobs, b->logprobs, (size_t)a->n_tokens * sizeof *a->logprobs);
}
