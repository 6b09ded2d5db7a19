/*
 * What tests of an engine on the emulated GPU share: a tiny model in a file, engines on it, requests and their answers.
 */
#pragma once

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/host_cuda/control.h"
#include "engine/engine.h"
#include "tests/support/tiny_model.h"
#include "tests/unit/unit.h"

enum { PROMPT_MAX = 200, ANSWER_MAX = 24 };

static char model_path[64];

static inline int write_model(void **state)
{
	(void)state;
	return tiny_model_write(model_path, 512, tiny_chat_template, 3) ? 0 : -1;
}

static inline int remove_model(void **state)
{
	(void)state;
	return unlink(model_path);
}

static inline int forget_failures(void **state)
{
	(void)state;
	host_cuda_reset();
	return 0;
}

static inline void long_prompt(char out[PROMPT_MAX])
{
	for (int i = 0; i < PROMPT_MAX - 1; i++)
		out[i] = (char)('a' + i * i % 23);
	out[PROMPT_MAX - 1] = '\0';
}

struct answer {
	struct error error; /* status OK: it ended well */
	int32_t token[ANSWER_MAX];
	int32_t n;
	bool ended;
	struct engine_context_usage context;
};

static inline void assert_same(const struct answer *a, const struct answer *b)
{
	assert_int_equal(a->error.status, STATUS_OK);
	assert_int_equal(b->error.status, STATUS_OK);
	assert_int_equal(a->n, b->n);
	assert_memory_equal(a->token, b->token, sizeof *a->token * (size_t)a->n);
}

static inline void wait_for_state(struct engine *e, enum engine_state state)
{
	struct list events;
	list_init(&events);
	while (engine_state(e) != state) {
		assert_true(engine_wait(e, &events, 20000));
		for (struct list *l; (l = list_pop_front(&events));)
			engine_event_free(list_entry(l, struct engine_event, link));
	}
}

static inline struct engine_options options_for(const char *device, int32_t step_tokens, const char *kv_type)
{
	return (struct engine_options){.model_path = model_path,
				       .device = device,
				       .n_threads = 1,
				       .step_tokens = step_tokens,
				       .max_running = 4,
				       .kv_type = kv_type,
				       .kv_bytes = 1 << 20};
}

static inline struct engine *start_as(const struct engine_options *o)
{
	struct engine *e;
	struct error err;
	assert_int_equal(engine_create(o, &e, &err), STATUS_OK);
	struct list events;
	list_init(&events);
	assert_true(engine_wait(e, &events, 20000));
	for (struct list *l; (l = list_pop_front(&events));)
		engine_event_free(list_entry(l, struct engine_event, link));
	if (engine_state(e) != ENGINE_READY)
		fail_msg("%s", engine_load_error(e)->message);
	return e;
}

static inline struct engine *start_with(const char *device, int32_t step_tokens, const char *kv_type)
{
	struct engine_options o = options_for(device, step_tokens, kv_type);
	return start_as(&o);
}

static inline struct engine *start(const char *device, int32_t step_tokens)
{
	return start_with(device, step_tokens, NULL);
}

static inline uint64_t submit(struct engine *e, const char *prompt, int32_t max_tokens, float temperature)
{
	struct engine_request *r = engine_request_create(e);
	assert_non_null(r);
	uint64_t id = r->id;
	r->text = strdup(prompt);
	r->text_n = strlen(prompt);
	r->max_tokens = max_tokens;
	r->sampling.temperature = temperature;
	r->sampling.seed = 7;
	r->ignore_eos = true;
	engine_submit(e, r);
	return id;
}

static inline void await(struct engine *e, const uint64_t *ids, struct answer *answers, size_t n)
{
	size_t ended = 0;
	memset(answers, 0, n * sizeof *answers);
	while (ended < n) {
		struct list events;
		list_init(&events);
		assert_true(engine_wait(e, &events, 60000));
		for (struct list *l; (l = list_pop_front(&events));) {
			struct engine_event *ev = list_entry(l, struct engine_event, link);
			for (size_t i = 0; i < n; i++) {
				struct answer *a = &answers[i];
				if (ids[i] != ev->request_id)
					continue;
				assert_false(a->ended);
				if (ev->type == ENGINE_EVENT_TOKEN) {
					assert_in_range(a->n, 0, ANSWER_MAX - 1);
					a->token[a->n++] = ev->sample.token;
				}
				a->ended = ev->type == ENGINE_EVENT_DONE || ev->type == ENGINE_EVENT_ERROR;
				if (ev->type == ENGINE_EVENT_ERROR)
					a->error = ev->error;
				if (ev->type == ENGINE_EVENT_DONE)
					a->context = ev->usage.context;
				ended += a->ended;
			}
			engine_event_free(ev);
		}
	}
}

/* A greedy answer under a context policy. */
static inline struct answer ask_in_context(struct engine *e, const char *prompt, const struct engine_context *context)
{
	struct engine_request *r = engine_request_create(e);
	assert_non_null(r);
	uint64_t id = r->id;
	r->text = strdup(prompt);
	r->text_n = strlen(prompt);
	r->max_tokens = 20;
	r->sampling.temperature = 0;
	r->ignore_eos = true;
	r->context = *context;
	engine_submit(e, r);
	struct answer a;
	await(e, &id, &a, 1);
	return a;
}

static inline struct answer ask(struct engine *e, const char *prompt, int32_t max_tokens, float temperature)
{
	struct answer a;
	uint64_t id = submit(e, prompt, max_tokens, temperature);
	await(e, &id, &a, 1);
	return a;
}
