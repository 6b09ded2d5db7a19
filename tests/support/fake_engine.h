/*
 * An engine without a model, for tests of the server: everything in engine.h, deterministic and in one thread. A token
 * is one byte (ids 0-255), then come <s>, </s>, <|im_start|> and <|im_end|>. An answer is a fixed text that grows by
 * one token per request and step; nothing moves unless the test says so.
 */
#pragma once

#include "engine/engine.h"

enum { FAKE_BOS = 256, FAKE_EOS = 257, FAKE_IM_START = 258, FAKE_IM_END = 259, FAKE_VOCAB = 260 };

/* READY, with a context of 1,000 tokens. Free with engine_destroy(). */
struct engine *fake_engine_create(void);
void fake_engine_set_state(struct engine *e, enum engine_state state, const char *why);
void fake_engine_set_context(struct engine *e, int32_t n_ctx);
/* What every generation answers from now on (borrowed). */
void fake_engine_set_reply(struct engine *e, const char *reply);
/* The source of its chat template, as the server is told of it (borrowed): by default one that knows tools. */
void fake_engine_set_template(struct engine *e, const char *source);
/* How many generations may be unfinished before LIMIT; 0: any number. */
void fake_engine_set_queue(struct engine *e, int n);
void fake_engine_set_max_sessions(struct engine *e, int n);

/* Each generation moves on by one: its PROMPT with the first step, then a token each. */
void fake_engine_step(struct engine *e);
/* Generations that have not ended. */
int fake_engine_active(const struct engine *e);
/* Whether events wait to be taken. */
bool fake_engine_has_events(const struct engine *e);
/* All of them fail. */
void fake_engine_fail(struct engine *e, enum status status, const char *message);
/* Whoever watches the session hears of it. */
void fake_engine_tell(struct engine *e, const char *session);
/* A session's time is over: its requests are cancelled. */
void fake_engine_expire(struct engine *e, const char *session);
int fake_engine_sessions(const struct engine *e);
/* As engine_tenant_set() has set it last. */
const struct engine_tenant *fake_engine_tenant(const struct engine *e, int32_t id);
int fake_engine_heartbeats(const struct engine *e);

/* What was submitted, in order; the request itself stays until the engine is destroyed. */
size_t fake_engine_n_submitted(const struct engine *e);
const struct engine_request *fake_engine_submitted(const struct engine *e, size_t i);
/* The prompt of a submitted request as text; a chat's variables as JSON (see value_text.h). */
struct str fake_engine_prompt(const struct engine *e, size_t i);
