#include "tests/support/fake_engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/utf8.h"
#include "engine/text/split.h"
#include "tests/support/value_text.h"

enum { MAX_SESSIONS = 64 };

struct tokens {
	int32_t *ids;
	size_t n;
};

struct session {
	bool used;
	struct engine_session_info info;
	struct tokens held;
	uint64_t watcher; /* 0: none */
};

struct run {
	struct engine_request *r;
	struct buf prompt_text;
	struct tokens prompt;
	size_t n_prompt, n_cached, n_out;
	struct buf held; /* text not released yet */
	bool prompted, ended;
};

struct engine {
	enum engine_state state;
	struct engine_info info;
	struct error load_error;
	uint64_t next_id;
	const char *reply;
	int queue_limit, max_sessions, n_heartbeats;
	struct list events;
	struct run *runs; /* [n_runs], in the order of submission */
	size_t n_runs;
	struct session sessions[MAX_SESSIONS];
	uint64_t n_serials;
	struct engine_tenant tenants[ENGINE_MAX_TENANTS];
	struct engine_stats stats;
};

static const char *const special[] = {"<s>", "</s>", "<|im_start|>", "<|im_end|>"};

/* ---- Events ---- */

static struct engine_event *event(struct engine *e, enum engine_event_type type, uint64_t id)
{
	struct engine_event *ev = calloc(1, sizeof *ev);
	if (!ev)
		abort();
	ev->type = type;
	ev->request_id = id;
	ev->stop_index = -1;
	list_push_back(&e->events, &ev->link);
	return ev;
}

static void error_event(struct engine *e, uint64_t id, enum status status, const char *message)
{
	struct engine_event *ev = event(e, ENGINE_EVENT_ERROR, id);
	error_set(&ev->error, status, "%s", message);
}

bool engine_poll(struct engine *e, struct list *out)
{
	bool any = !list_empty(&e->events);
	list_splice_back(out, &e->events);
	return any;
}

bool engine_wait(struct engine *e, struct list *out, int64_t timeout_ms)
{
	(void)timeout_ms;
	return engine_poll(e, out);
}

void engine_event_free(struct engine_event *ev)
{
	buf_free(&ev->text);
	buf_free(&ev->piece);
	free(ev->tokens);
	free(ev->logprobs);
	free(ev->chunks);
	free(ev->sessions);
	free(ev->kv);
	free(ev);
}

/* ---- Tokens ---- */

static void push(struct tokens *t, int32_t id)
{
	t->ids = realloc(t->ids, (t->n + 1) * sizeof *t->ids);
	if (!t->ids)
		abort();
	t->ids[t->n++] = id;
}

static void encode(struct tokens *t, const char *s, size_t n, bool parse_special)
{
	for (size_t i = 0; i < n;) {
		size_t k = 4;
		for (k = 0; parse_special && k < 4; k++)
			if (str_starts((struct str){s + i, n - i}, special[k]))
				break;
		if (parse_special && k < 4) {
			push(t, FAKE_BOS + (int32_t)k);
			i += strlen(special[k]);
		} else {
			push(t, (unsigned char)s[i++]);
		}
	}
}

struct str engine_token_piece(const struct engine *e, int32_t token)
{
	static char bytes[256];
	(void)e;
	if (token >= FAKE_BOS && token < FAKE_VOCAB)
		return str_from(special[token - FAKE_BOS]);
	if (token < 0 || token >= FAKE_VOCAB)
		return (struct str){"", 0};
	bytes[token] = (char)token;
	return (struct str){&bytes[token], 1};
}

static void decode(struct engine *e, const int32_t *ids, size_t n, struct buf *out)
{
	for (size_t i = 0; i < n; i++) {
		struct str p = engine_token_piece(e, ids[i]);
		if (ids[i] < FAKE_BOS)
			buf_append(out, p.p, p.n);
	}
}

static int32_t *copy_ids(const struct tokens *t)
{
	int32_t *ids = malloc((t->n ? t->n : 1) * sizeof *ids);
	if (!ids)
		abort();
	if (t->n)
		memcpy(ids, t->ids, t->n * sizeof *ids);
	return ids;
}

/* A made-up distribution: the token at -0.5, its neighbours at -1.5, -2.5, ... */
static void score(int32_t token, int32_t n_logprobs, struct sample_result *s)
{
	s->token = token;
	s->logprob = -0.5f;
	s->n_top = n_logprobs > 0 ? n_logprobs : 0;
	for (int32_t i = 0; i < s->n_top; i++)
		s->top[i] = (struct token_logprob){(token + i) % 256, -0.5f - (float)i};
}

void engine_tokenize(struct engine *e, uint64_t id, const char *text, size_t n, bool add_special, bool parse_special)
{
	struct engine_event *ev = event(e, ENGINE_EVENT_TOKENS, id);
	struct tokens t = {0};
	if (add_special)
		push(&t, FAKE_BOS);
	encode(&t, text, n, parse_special);
	ev->tokens = t.ids;
	ev->n_tokens = t.n;
}

void engine_tokenize_chat(struct engine *e, uint64_t id, struct arena *arena, struct value *chat)
{
	struct engine_event *ev = event(e, ENGINE_EVENT_TOKENS, id);
	struct tokens t = {0};
	value_text_write(chat, &ev->text);
	encode(&t, ev->text.data, ev->text.len, false);
	ev->tokens = t.ids;
	ev->n_tokens = t.n;
	arena_destroy(arena);
}

void engine_detokenize(struct engine *e, uint64_t id, const int32_t *ids, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (ids[i] < 0 || ids[i] >= FAKE_VOCAB) {
			error_event(e, id, STATUS_INVALID, "tokens holds an id outside the vocabulary");
			return;
		}
	}
	decode(e, ids, n, &event(e, ENGINE_EVENT_TEXT, id)->text);
}

static int32_t count_bytes(void *arg, struct str text)
{
	(void)arg;
	return (int32_t)text.n;
}

/* Cut by the engine's own rules, where each byte is a token; all at once. */
void engine_split(struct engine *e, uint64_t id, struct buf *text, const struct engine_split_params *params)
{
	struct engine_event *ev = event(e, ENGINE_EVENT_SPLIT, id);
	struct split s = {.text = buf_str(text),
	                  .max_tokens = params->max_tokens,
	                  .overlap_permille = params->overlap_permille,
	                  .count = count_bytes};
	struct split_chunk c;
	bool done = false;
	ev->text = *text;
	*text = BUF_INIT;
	while (split_next(&s, &c, &done, &ev->error) == STATUS_OK && !done) {
		ev->chunks = realloc(ev->chunks, (ev->n_chunks + 1) * sizeof *ev->chunks);
		if (!ev->chunks)
			abort();
		ev->chunks[ev->n_chunks++] =
			(struct engine_chunk){c.start, c.fresh, c.end, c.n_tokens, split_cut_name(c.cut)};
	}
	if (!done)
		ev->type = ENGINE_EVENT_ERROR;
}

/* ---- Sessions ---- */

static struct session *find_session(struct engine *e, int32_t tenant, const char *id)
{
	for (size_t i = 0; i < MAX_SESSIONS; i++)
		if (e->sessions[i].used && e->sessions[i].info.tenant == tenant &&
		    strcmp(e->sessions[i].info.id, id) == 0)
			return &e->sessions[i];
	return NULL;
}

static void session_event(struct engine *e, uint64_t id, const struct session *s)
{
	struct engine_event *ev = event(e, ENGINE_EVENT_SESSION, id);
	ev->sessions = malloc(sizeof *ev->sessions);
	if (!ev->sessions)
		abort();
	ev->sessions[0] = s->info;
	ev->sessions[0].n_tokens = (int32_t)s->held.n;
	ev->n_sessions = 1;
}

void engine_session_create(struct engine *e, uint64_t id, const struct engine_session_params *p)
{
	struct session *s = NULL;
	if (p->id[0] && find_session(e, p->tenant, p->id)) {
		error_event(e, id, STATUS_EXISTS, "the session exists");
		return;
	}
	for (size_t i = 0; i < MAX_SESSIONS && !s; i++)
		if (!e->sessions[i].used)
			s = &e->sessions[i];
	if (!s || (e->max_sessions && fake_engine_sessions(e) >= e->max_sessions)) {
		error_event(e, id, STATUS_LIMIT, "there are too many sessions");
		return;
	}
	*s = (struct session){.used = true};
	s->info.tenant = p->tenant;
	s->info.serial = ++e->n_serials;
	s->info.max_tokens = p->max_tokens;
	if (p->id[0])
		snprintf(s->info.id, sizeof s->info.id, "%s", p->id);
	else
		snprintf(s->info.id, sizeof s->info.id, "fake-%llu", (unsigned long long)id);
	s->info.heartbeat_timeout_ms = p->heartbeat_timeout_ms ? p->heartbeat_timeout_ms : 30000;
	s->info.ttl_ms = p->ttl_ms ? p->ttl_ms : 300000;
	s->info.expires_in_ms = p->ttl_ms < 0 ? -1 : s->info.heartbeat_timeout_ms;
	session_event(e, id, s);
}

void engine_session_get(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	struct session *s = find_session(e, tenant, session);
	if (s)
		session_event(e, id, s);
	else
		error_event(e, id, STATUS_NOT_FOUND, "there is no such session");
}

void engine_session_watch(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	struct session *s = find_session(e, tenant, session);
	if (!s) {
		error_event(e, id, STATUS_NOT_FOUND, "there is no such session");
		return;
	}
	session_event(e, id, s);
	list_entry(e->events.prev, struct engine_event, link)->type = ENGINE_EVENT_CONTEXT;
	s->watcher = id;
}

void fake_engine_tell(struct engine *e, const char *session)
{
	struct session *s = find_session(e, 0, session);
	if (s && s->watcher) {
		session_event(e, s->watcher, s);
		list_entry(e->events.prev, struct engine_event, link)->type = ENGINE_EVENT_CONTEXT;
	}
}

void engine_session_heartbeat(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	e->n_heartbeats++;
	engine_session_get(e, id, tenant, session);
}

static void end_run(struct engine *e, struct run *run, enum engine_finish finish, const char *detail);

static void end_session(struct engine *e, struct session *s, const char *detail)
{
	for (size_t i = 0; i < e->n_runs; i++)
		if (!e->runs[i].ended && e->runs[i].r->tenant == s->info.tenant &&
		    strcmp(e->runs[i].r->session, s->info.id) == 0)
			end_run(e, &e->runs[i], ENGINE_FINISH_CANCELLED, detail);
	if (s->watcher)
		error_event(e, s->watcher, STATUS_NOT_FOUND, "the session has ended");
	free(s->held.ids);
	*s = (struct session){0};
}

void engine_session_delete(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	struct session *s = find_session(e, tenant, session);
	if (!s) {
		error_event(e, id, STATUS_NOT_FOUND, "there is no such session");
		return;
	}
	session_event(e, id, s);
	end_session(e, s, "session_deleted");
}

static struct engine_event *list_event(struct engine *e, enum engine_event_type type, uint64_t id, int32_t tenant,
				       const struct engine_session_page *page)
{
	struct engine_event *ev = event(e, type, id);
	ev->sessions = calloc(MAX_SESSIONS, sizeof *ev->sessions);
	if (!ev->sessions)
		abort();
	for (size_t i = 0; i < MAX_SESSIONS; i++)
		if (e->sessions[i].used && e->sessions[i].info.serial > page->after &&
		    (tenant == ENGINE_ALL_TENANTS || e->sessions[i].info.tenant == tenant)) {
			if (ev->n_sessions < (size_t)page->limit)
				ev->sessions[ev->n_sessions++] = e->sessions[i].info;
			else
				ev->more_sessions = true;
		}
	return ev;
}

void engine_session_list(struct engine *e, uint64_t id, int32_t tenant, const struct engine_session_page *page)
{
	list_event(e, ENGINE_EVENT_SESSIONS, id, tenant, page);
}

void engine_kv_report(struct engine *e, uint64_t id, int32_t tenant, const struct engine_session_page *page)
{
	struct engine_event *ev = list_event(e, ENGINE_EVENT_KV, id, tenant, page);
	ev->kv = calloc(1, sizeof *ev->kv);
	if (!ev->kv)
		abort();
	ev->kv->pages_total = 64;
	ev->kv->pages_free = 60;
	ev->kv->pages_sessions = 4;
}

void engine_tenant_set(struct engine *e, const struct engine_tenant *tenant)
{
	e->tenants[tenant->id] = *tenant;
}

const struct engine_tenant *fake_engine_tenant(const struct engine *e, int32_t id)
{
	return &e->tenants[id];
}

void engine_tenant_usage(const struct engine *e, int32_t tenant, struct engine_tenant_usage *out)
{
	*out = (struct engine_tenant_usage){.id = tenant, .limits = e->tenants[tenant].limits};
	for (size_t i = 0; i < MAX_SESSIONS; i++)
		out->n_sessions += e->sessions[i].used && e->sessions[i].info.tenant == tenant;
}

void fake_engine_expire(struct engine *e, const char *session)
{
	end_session(e, find_session(e, 0, session), "session_expired");
}

void fake_engine_set_template(struct engine *e, const char *source)
{
	e->info.chat_template = source;
}

int fake_engine_sessions(const struct engine *e)
{
	int n = 0;
	for (size_t i = 0; i < MAX_SESSIONS; i++)
		n += e->sessions[i].used;
	return n;
}

int fake_engine_heartbeats(const struct engine *e)
{
	return e->n_heartbeats;
}

/* ---- Generation ---- */

struct engine_request *engine_request_create(struct engine *e)
{
	struct engine_request *r = calloc(1, sizeof *r);
	if (!r)
		return NULL;
	r->id = engine_next_id(e);
	r->max_tokens = -1;
	r->context.start_size = -1;
	r->sampling = (struct sampling_params){.temperature = 1,
					       .top_p = 1,
					       .typical_p = 1,
					       .repeat_penalty = 1,
					       .penalty_last_n = 64,
					       .n_logprobs = -1};
	return r;
}

void engine_request_destroy(struct engine_request *r)
{
	if (!r)
		return;
	for (size_t i = 0; i < r->n_stops; i++)
		free((char *)r->stops[i].p);
	free(r->stops);
	free(r->stop_tokens);
	free(r->sampling.bias);
	free(r->text);
	free(r->cache_salt);
	free(r->turn_of);
	free(r->turn_starts);
	grammar_unref(r->grammar);
	free(r->tokens);
	arena_destroy(r->arena);
	free(r);
}

bool engine_request_add_stop(struct engine_request *r, const char *s, size_t n)
{
	struct str *stops = realloc(r->stops, (r->n_stops + 1) * sizeof *stops);
	char *copy = malloc(n + 1);
	if (stops)
		r->stops = stops;
	if (!stops || !copy) {
		free(copy);
		return false;
	}
	memcpy(copy, s, n);
	copy[n] = '\0';
	r->stops[r->n_stops++] = (struct str){copy, n};
	return true;
}

static size_t common(const struct tokens *a, const struct tokens *b)
{
	size_t n = 0;
	while (n < a->n && n < b->n && a->ids[n] == b->ids[n])
		n++;
	return n;
}

static bool accept(struct engine *e, struct run *run, char *why, size_t cap, enum status *status)
{
	struct engine_request *r = run->r;
	int32_t wanted = r->max_tokens > 0 ? r->max_tokens : 0;
	if (r->session[0] && !find_session(e, r->tenant, r->session)) {
		*status = STATUS_NOT_FOUND;
		snprintf(why, cap, "there is no session %s", r->session);
		return false;
	}
	if ((int64_t)run->prompt.n + wanted > e->info.n_ctx) {
		*status = STATUS_CONTEXT_LENGTH;
		snprintf(why, cap, "This model's context is %d tokens, but %zu are asked for.", e->info.n_ctx,
			 run->prompt.n + (size_t)wanted);
		return false;
	}
	for (size_t i = 0; i < run->prompt.n; i++) {
		if (run->prompt.ids[i] >= FAKE_VOCAB) {
			*status = STATUS_INVALID;
			snprintf(why, cap, "the prompt holds an id outside the vocabulary");
			return false;
		}
	}
	if (e->queue_limit && fake_engine_active(e) > e->queue_limit) {
		*status = STATUS_LIMIT;
		snprintf(why, cap, "too many requests wait");
		return false;
	}
	return true;
}

void engine_hurry(struct engine *e, uint64_t id)
{
	(void)e;
	(void)id;
}

void engine_submit(struct engine *e, struct engine_request *r)
{
	struct run *run;
	char why[200];
	enum status status;

	e->runs = realloc(e->runs, (e->n_runs + 1) * sizeof *e->runs);
	if (!e->runs)
		abort();
	run = &e->runs[e->n_runs++];
	*run = (struct run){.r = r};
	switch (r->input) {
	case ENGINE_INPUT_TEXT:
		buf_append(&run->prompt_text, r->text, r->text_n);
		encode(&run->prompt, r->text, r->text_n, true);
		break;
	case ENGINE_INPUT_TOKENS:
		for (size_t i = 0; i < r->n_tokens; i++)
			push(&run->prompt, r->tokens[i]);
		decode(e, r->tokens, r->n_tokens, &run->prompt_text);
		break;
	case ENGINE_INPUT_CHAT:
		value_text_write(r->chat, &run->prompt_text);
		encode(&run->prompt, run->prompt_text.data, run->prompt_text.len, false);
		break;
	}
	if (!accept(e, run, why, sizeof why, &status)) {
		run->ended = true;
		e->stats.failed++;
		error_event(e, r->id, status, why);
		return;
	}
	/* What any session holds can be shared, as by the engine's prefix index. */
	for (size_t i = 0; i < MAX_SESSIONS; i++) {
		size_t n = e->sessions[i].used ? common(&e->sessions[i].held, &run->prompt) : 0;
		run->n_cached = n > run->n_cached ? n : run->n_cached;
	}
	if (run->n_cached && run->n_cached == run->prompt.n)
		run->n_cached--;
	run->n_prompt = run->prompt.n;
	e->stats.prompt_tokens += run->n_prompt;
	e->stats.cached_tokens += run->n_cached;
}

static void prompt_event(struct engine *e, struct run *run)
{
	struct engine_request *r = run->r;
	struct engine_event *ev = event(e, ENGINE_EVENT_PROMPT, r->id);
	run->prompted = true;
	ev->usage.prompt_tokens = (int32_t)run->n_prompt;
	ev->usage.cached_tokens = (int32_t)run->n_cached;
	if (!r->want_prompt)
		return;
	buf_append(&ev->text, run->prompt_text.data, run->prompt_text.len);
	ev->tokens = copy_ids(&run->prompt);
	ev->n_tokens = run->n_prompt;
	if (r->want_prompt_logprobs) {
		ev->logprobs = calloc(run->n_prompt + 1, sizeof *ev->logprobs);
		for (size_t i = 0; i < run->n_prompt; i++)
			score(run->prompt.ids[i], r->sampling.n_logprobs, &ev->logprobs[i]);
		ev->logprobs[0].logprob = NAN;
	}
}

static void end_run(struct engine *e, struct run *run, enum engine_finish finish, const char *detail)
{
	struct engine_event *ev = event(e, ENGINE_EVENT_DONE, run->r->id);
	struct session *s = run->r->session[0] ? find_session(e, run->r->tenant, run->r->session) : NULL;
	run->ended = true;
	ev->finish = finish;
	ev->detail = detail;
	ev->usage = (struct engine_usage){.prompt_tokens = (int32_t)run->n_prompt,
					  .cached_tokens = (int32_t)run->n_cached,
					  .completion_tokens = (int32_t)run->n_out,
					  .queue_ns = 1000000,
					  .prefill_ns = 2000000,
					  .decode_ns = 3000000,
					  .ttft_ns = run->n_out ? 3000000 : 0};
	buf_append(&ev->text, run->held.data, run->held.len);
	buf_clear(&run->held);
	if (finish == ENGINE_FINISH_STOP)
		e->stats.finished_stop++;
	else if (finish == ENGINE_FINISH_LENGTH)
		e->stats.finished_length++;
	else
		e->stats.cancelled++;
	if (s) {
		s->info.n_requests++;
		free(s->held.ids);
		s->held = (struct tokens){copy_ids(&run->prompt), run->prompt.n};
	}
}

/* How many bytes at the end of the text could still become a stop string or a code point. */
static size_t hold_back(const struct run *run)
{
	size_t hold = utf8_incomplete_tail(run->held.data, run->held.len);
	for (size_t i = 0; i < run->r->n_stops; i++) {
		struct str stop = run->r->stops[i];
		for (size_t n = stop.n - 1; n > hold && n > 0; n--)
			if (run->held.len >= n && memcmp(run->held.data + run->held.len - n, stop.p, n) == 0)
				hold = n;
	}
	return hold;
}

/* Cuts the text at a stop string. */
static int find_stop(struct run *run)
{
	for (size_t i = 0; i < run->r->n_stops; i++) {
		struct str stop = run->r->stops[i];
		char *at = memmem(run->held.data, run->held.len, stop.p, stop.n);
		if (at) {
			run->held.len = (size_t)(at - run->held.data);
			return (int)i;
		}
	}
	return -1;
}

static void step_run(struct engine *e, struct run *run)
{
	struct engine_request *r = run->r;
	size_t n_reply = strlen(e->reply);
	struct engine_event *ev;
	struct str piece;
	size_t release;
	int32_t token;
	int stop;

	if (!run->prompted) {
		prompt_event(e, run);
		if (r->max_tokens == 0)
			end_run(e, run, ENGINE_FINISH_LENGTH, "length");
		return;
	}
	if (run->n_out >= n_reply && !r->ignore_eos) {
		end_run(e, run, ENGINE_FINISH_STOP, "eos");
		return;
	}
	token = (unsigned char)e->reply[run->n_out % n_reply];
	run->n_out++;
	e->stats.generated_tokens++;
	push(&run->prompt, token);
	piece = engine_token_piece(e, token);
	ev = event(e, ENGINE_EVENT_TOKEN, r->id);
	buf_append(&ev->piece, piece.p, piece.n);
	score(token, r->sampling.n_logprobs, &ev->sample);
	buf_append(&run->held, piece.p, piece.n);
	stop = find_stop(run);
	release = stop >= 0 ? 0 : run->held.len - hold_back(run);
	buf_append(&ev->text, run->held.data, release);
	memmove(run->held.data, run->held.data + release, run->held.len - release);
	run->held.len -= release;
	for (size_t i = 0; i < r->n_stop_tokens; i++)
		if (r->stop_tokens[i] == token)
			stop = 0;
	if (stop >= 0)
		end_run(e, run, ENGINE_FINISH_STOP, "stop");
	else if (r->max_tokens >= 0 && run->n_out >= (size_t)r->max_tokens)
		end_run(e, run, ENGINE_FINISH_LENGTH, "length");
}

/* Requests of one session run one after the other. */
static bool is_blocked(const struct engine *e, size_t i)
{
	for (size_t k = 0; k < i; k++)
		if (!e->runs[k].ended && e->runs[i].r->session[0] &&
		    strcmp(e->runs[k].r->session, e->runs[i].r->session) == 0)
			return true;
	return false;
}

void fake_engine_step(struct engine *e)
{
	size_t n = e->n_runs;
	for (size_t i = 0; i < n; i++)
		if (!e->runs[i].ended && !is_blocked(e, i))
			step_run(e, &e->runs[i]);
}

int fake_engine_active(const struct engine *e)
{
	int n = 0;
	for (size_t i = 0; i < e->n_runs; i++)
		n += !e->runs[i].ended;
	return n;
}

bool fake_engine_has_events(const struct engine *e)
{
	return !list_empty(&e->events);
}

void engine_cancel(struct engine *e, uint64_t id)
{
	for (size_t i = 0; i < e->n_runs; i++)
		if (e->runs[i].r->id == id && !e->runs[i].ended)
			end_run(e, &e->runs[i], ENGINE_FINISH_CANCELLED, "cancelled");
}

void fake_engine_fail(struct engine *e, enum status status, const char *message)
{
	for (size_t i = 0; i < e->n_runs; i++) {
		if (e->runs[i].ended)
			continue;
		e->runs[i].ended = true;
		e->stats.failed++;
		error_event(e, e->runs[i].r->id, status, message);
	}
}

size_t fake_engine_n_submitted(const struct engine *e)
{
	return e->n_runs;
}

const struct engine_request *fake_engine_submitted(const struct engine *e, size_t i)
{
	return e->runs[i].r;
}

struct str fake_engine_prompt(const struct engine *e, size_t i)
{
	return buf_str(&e->runs[i].prompt_text);
}

/* ---- The engine ---- */

struct engine *fake_engine_create(void)
{
	struct engine *e = NULL;
	return engine_create(NULL, &e, NULL) == STATUS_OK ? e : NULL;
}

enum status engine_create(const struct engine_options *options, struct engine **out, struct error *err)
{
	struct engine *e = calloc(1, sizeof *e);
	(void)options;
	(void)err;
	*out = e;
	if (!e)
		return STATUS_NOMEM;
	list_init(&e->events);
	e->state = ENGINE_READY;
	e->reply = "Hello there";
	e->info = (struct engine_info){.model_name = "Fake Model",
				       .file_name = "fake.gguf",
				       .arch = "llama",
				       .backend = "fake",
				       .quantization = "F32",
				       .n_params = 1000,
				       .file_bytes = 4000,
				       .n_ctx = 1000,
				       .n_ctx_train = 2000,
				       .rope = {"yarn", 4, 1e6f, 500, 2000, true},
				       .kv_type = "F16",
				       .n_vocab = FAKE_VOCAB,
				       .n_embd = 8,
				       .n_layer = 1,
				       .page_tokens = 16,
				       .n_pages = 64,
				       .bos_token = FAKE_BOS,
				       .eos_token = FAKE_EOS,
				       .has_chat_template = true,
				       .chat_template = "{{ tools }} <tool_call>"};
	e->stats.pages_total = e->stats.pages_free = 64;
	return STATUS_OK;
}

void engine_destroy(struct engine *e)
{
	struct list *node;
	if (!e)
		return;
	while ((node = list_pop_front(&e->events)))
		engine_event_free(list_entry(node, struct engine_event, link));
	for (size_t i = 0; i < e->n_runs; i++) {
		engine_request_destroy(e->runs[i].r);
		buf_free(&e->runs[i].prompt_text);
		buf_free(&e->runs[i].held);
		free(e->runs[i].prompt.ids);
	}
	for (size_t i = 0; i < MAX_SESSIONS; i++)
		free(e->sessions[i].held.ids);
	free(e->runs);
	free(e);
}

void fake_engine_set_state(struct engine *e, enum engine_state state, const char *why)
{
	e->state = state;
	error_set(&e->load_error, STATUS_CORRUPT, "%s", why ? why : "");
}

void fake_engine_set_context(struct engine *e, int32_t n_ctx)
{
	e->info.n_ctx = n_ctx;
}

void fake_engine_set_reply(struct engine *e, const char *reply)
{
	e->reply = reply;
}

void fake_engine_set_queue(struct engine *e, int n)
{
	e->queue_limit = n;
}

void fake_engine_set_max_sessions(struct engine *e, int n)
{
	e->max_sessions = n;
}

enum engine_state engine_state(const struct engine *e)
{
	return e->state;
}

const struct engine_info *engine_info(const struct engine *e)
{
	return e->state == ENGINE_READY ? &e->info : NULL;
}

const struct error *engine_load_error(const struct engine *e)
{
	return &e->load_error;
}

uint64_t engine_next_id(struct engine *e)
{
	return ++e->next_id;
}

void engine_stats(const struct engine *e, struct engine_stats *out)
{
	*out = e->stats;
	out->n_running = fake_engine_active(e);
	out->n_sessions = fake_engine_sessions(e);
}

/* ---- Sessions do not move ---- */

void engine_session_export(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	(void)tenant;
	(void)session;
	error_event(e, id, STATUS_UNSUPPORTED, "sessions cannot be moved");
}

void engine_session_export_next(struct engine *e, uint64_t id)
{
	error_event(e, id, STATUS_CANCELLED, "the export has ended");
}

void engine_session_import(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	engine_session_export(e, id, tenant, session);
}

void engine_session_import_data(struct engine *e, uint64_t id, char *data, size_t n)
{
	(void)n;
	free(data);
	engine_session_export_next(e, id);
}
