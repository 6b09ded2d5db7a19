/*
 * The worker: the one thread that owns a device, its page pool, its sessions and its scheduler. It takes commands
 * between steps, runs a step when there is something to compute, and sleeps when there is not.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "engine/base/log.h"
#include "engine/calibrate.h"
#include "engine/census.h"
#include "engine/context.h"
#include "engine/engine_internal.h"
#include "engine/event.h"
#include "engine/limits.h"
#include "engine/request.h"
#include "engine/restart.h"
#include "engine/sched.h"
#include "engine/session.h"
#include "engine/transfer.h"

/* How long to sleep at most while a tier is at work. */
enum { TIERS_NS = 20000000 };
/* How long before it is tried again when somebody waits and nothing can be computed: there was no memory for a block table. */
enum { STARVED_NS = 5000000 };
/* And how long the end of the process may take for its sessions. */
enum { SAVE_MS = 10000 };

struct worker {
	struct engine *e;
	struct tenant_table tenants;
	struct session_table sessions;
	struct sched sched;
	struct census census;
	struct context_bounds context;
	struct kv_scorer scorer;
	struct transfers transfers;
	struct list exports;    /* commands that wait for a page from a tier */
	struct restart restart; /* sessions of the process before that still wait for their tenant */
	struct engine_kv kv;    /* as the census found it last */
	int64_t census_ms;      /* and when */
	bool census_stale;      /* something may have changed since */
	int64_t next_gc_ms;
	struct list out; /* events of this turn of the loop; they leave together, after the figures that belong to them */
	/* Of a step, by part, [max_running] each: the logits it needs here, or the token that the backend has chosen. */
	float **part_logits;
	int32_t *part_token;
	struct sample_row *choice; /* [max_running] what the backend chooses */
	int32_t *chosen;           /* [max_running] and what comes back */
	struct engine_stats stats; /* counters; gauges are filled in at publication */
	bool stopping;
	bool lost;               /* the device is: nothing can be computed any more */
	struct error lost_error; /* what was wrong with it */
};

/* ---- Endings ---- */

static void end_request(struct worker *w, struct request *r)
{
	struct engine_event *last = r->last;
	int32_t tenant = r->tenant->id;
	r->last = NULL;
	sched_remove(&w->sched, r);
	request_destroy(r);
	flight_end(w->e, tenant);
	list_push_back(&w->out, &last->link);
}

static void fail_request(struct worker *w, struct request *r, const struct error *err)
{
	event_set_error(r->last, err);
	w->stats.failed++;
	end_request(w, r);
}

static void finish_request(struct worker *w, struct request *r, enum engine_finish finish, const char *detail)
{
	struct engine_event *ev = r->last;
	int64_t now = clock_now_ns(w->e->clock);
	if (detok_finish(r->detok, &ev->text), ev->text.failed) {
		struct error err;
		error_set(&err, STATUS_NOMEM, "no memory for the end of the answer");
		fail_request(w, r, &err);
		return;
	}
	ev->finish = finish;
	r->completed = finish != ENGINE_FINISH_CANCELLED;
	ev->detail = detail;
	if (r->first_token_ns) {
		r->usage.decode_ns = now - r->first_token_ns;
	} else if (r->started_ns) {
		r->usage.prefill_ns = now - r->started_ns;
	}
	if (!r->started_ns)
		r->usage.queue_ns = now - r->submitted_ns;
	context_describe(&r->policy, &r->kv, w->e->layout.page_stride, &r->usage.context);
	w->stats.context_requests[r->policy.kind]++;
	ev->usage = r->usage;
	switch (finish) {
	case ENGINE_FINISH_STOP:
		w->stats.finished_stop++;
		break;
	case ENGINE_FINISH_LENGTH:
		w->stats.finished_length++;
		break;
	case ENGINE_FINISH_CANCELLED:
		w->stats.cancelled++;
		break;
	}
	end_request(w, r);
}

/* ---- Sessions ---- */

/* Ends every request of a session, then the session. */
static void end_session(struct worker *w, struct session *s, const char *detail)
{
	if (s->running)
		finish_request(w, s->running, ENGINE_FINISH_CANCELLED, detail);
	list_each(l, next, &w->sched.waiting) {
		struct request *r = list_entry(l, struct request, link);
		if (r->session == s)
			finish_request(w, r, ENGINE_FINISH_CANCELLED, detail);
	}
	session_remove(&w->sessions, s);
}

static void collect_sessions(struct worker *w)
{
	struct session *s;
	while ((s = session_next_expired(&w->sessions))) {
		w->sessions.expired++;
		w->census_stale = true;
		end_session(w, s, "session_expired");
	}
}

static enum status no_session(const struct command *c, struct error *err)
{
	return error_set_param(err, STATUS_NOT_FOUND, "session_id", "there is no session '%s': it was never made, has expired or was deleted",
	                       c->session.id);
}

static void answer_session(struct worker *w, struct command *c, const struct session *s)
{
	struct engine_event *ev = c->reply;
	struct error err;
	ev->sessions = calloc(1, sizeof *ev->sessions);
	if (!ev->sessions) {
		error_set(&err, STATUS_NOMEM, "no memory for the answer");
		command_fail(w->e, c, &err, &w->out);
		return;
	}
	session_describe(&w->sessions, s, w->e->pool, ev->sessions);
	ev->n_sessions = 1;
	command_answer(w->e, c, &w->out);
}

static void take_census(struct worker *w)
{
	census_take(&w->census, &w->kv);
	w->census_ms = clock_now_ms(w->e->clock);
	w->census_stale = false;
}

/* Answers SESSION_LIST and KV_REPORT. */
static void list_sessions(struct worker *w, struct command *c)
{
	struct engine_event *ev = c->reply;
	struct error err;
	enum status st = session_list(&w->sessions, w->e->pool, c->tenant, &c->page, &ev->sessions, &ev->n_sessions, &ev->more_sessions);
	if (st == STATUS_OK && c->type == COMMAND_KV_REPORT) {
		ev->kv = calloc(1, sizeof *ev->kv);
		st = ev->kv ? STATUS_OK : STATUS_NOMEM;
	}
	if (st != STATUS_OK) {
		error_set(&err, st, "no memory for a list of %zu sessions", w->sessions.n_sessions);
		command_fail(w->e, c, &err, &w->out);
		return;
	}
	if (ev->kv) {
		if (w->census_stale)
			take_census(w);
		*ev->kv = w->kv;
	}
	command_answer(w->e, c, &w->out);
}

/* ---- Sessions that move ---- */

static void handle_export(struct worker *w, struct command *c)
{
	struct error err;
	enum status st = STATUS_OK;
	bool later = false;
	if (c->type == COMMAND_SESSION_EXPORT) {
		collect_sessions(w);
		const struct session *s = session_find(&w->sessions, c->tenant, c->session.id);
		st = s ? export_begin(&w->transfers, w->e, c->id, &w->sessions, s, &err) : no_session(c, &err);
	}
	if (st == STATUS_OK)
		st = export_next(&w->transfers, w->e, c->id, &c->reply->text, &c->reply->more, &later, &err);
	if (st == STATUS_OK && c->reply->text.failed)
		st = error_set(&err, STATUS_NOMEM, "no memory to export a session");
	if (st != STATUS_OK) {
		command_fail(w->e, c, &err, &w->out);
	} else if (later) {
		c->type = COMMAND_EXPORT_NEXT;
		list_push_back(&w->exports, &c->link);
	} else {
		command_answer(w->e, c, &w->out);
	}
}

/* Those that wait for pages from tiers try again. */
static void continue_exports(struct worker *w)
{
	struct list waiting;
	list_init(&waiting);
	list_splice_back(&waiting, &w->exports);
	for (struct list *l; (l = list_pop_front(&waiting));)
		handle_export(w, list_entry(l, struct command, link));
}

static void handle_import(struct worker *w, struct command *c)
{
	struct session *s = NULL;
	struct error err;
	enum status st;
	collect_sessions(w);
	if (c->type == COMMAND_SESSION_IMPORT)
		st = import_begin(&w->transfers, w->e, c->id, &c->session, &err);
	else
		st = import_data(&w->transfers, w->e, &w->sessions, c->id, c->text, c->text_n, &s, &err);
	if (st != STATUS_OK) {
		if (s)
			end_session(w, s, "session_deleted");
		command_fail(w->e, c, &err, &w->out);
	} else if (s) {
		c->reply->type = ENGINE_EVENT_SESSION;
		answer_session(w, c, s);
	} else {
		command_answer(w->e, c, &w->out);
	}
}

static void cancel_transfer(struct worker *w, uint64_t id)
{
	struct session *s = transfer_cancel(&w->transfers, w->e, &w->sessions, id);
	if (s)
		end_session(w, s, "session_deleted");
}

static void handle_session(struct worker *w, struct command *c)
{
	struct session *s = NULL;
	struct error err;
	collect_sessions(w);
	if (c->type == COMMAND_SESSION_LIST || c->type == COMMAND_KV_REPORT) {
		list_sessions(w, c);
		return;
	}
	if (c->type == COMMAND_SESSION_CREATE) {
		if (session_create(&w->sessions, &c->session, &s, &err) != STATUS_OK)
			command_fail(w->e, c, &err, &w->out);
		else
			answer_session(w, c, s);
		return;
	}
	s = session_find(&w->sessions, c->tenant, c->session.id);
	if (!s) {
		no_session(c, &err);
		command_fail(w->e, c, &err, &w->out);
		return;
	}
	if (c->type == COMMAND_SESSION_HEARTBEAT)
		session_touch(&w->sessions, s);
	if (c->type != COMMAND_SESSION_DELETE) {
		answer_session(w, c, s);
		return;
	}
	/* The answer describes what is deleted, and goes out after the session's requests have ended. */
	c->reply->sessions = calloc(1, sizeof *c->reply->sessions);
	if (c->reply->sessions) {
		session_describe(&w->sessions, s, w->e->pool, c->reply->sessions);
		c->reply->n_sessions = 1;
	}
	w->sessions.deleted++;
	end_session(w, s, "session_deleted");
	command_answer(w->e, c, &w->out);
}

/* ---- Limits ---- */

/* Ends what has not ended in time; what it computed stays in the index. */
static void end_overdue(struct worker *w)
{
	int64_t now = clock_now_ns(w->e->clock);
	struct list *const heads[] = {&w->sched.running, &w->sched.waiting};
	struct error err;
	for (size_t i = 0; i < 2; i++) {
		list_each(l, next, heads[i]) {
			struct request *r = list_entry(l, struct request, link);
			if (r->deadline_ns > now)
				continue;
			error_set(&err, STATUS_TIMEOUT, "the request did not end within %g s",
			          (double)(r->deadline_ns - r->submitted_ns) / 1e9);
			fail_request(w, r, &err);
		}
	}
}

/* A limit that fell below what an accepted request may come to ends it, for it could wait for ever. */
static void enforce_limit(struct worker *w, const struct tenant *t)
{
	struct list *const heads[] = {&w->sched.running, &w->sched.waiting};
	struct error err;
	for (size_t i = 0; i < 2; i++) {
		list_each(l, next, heads[i]) {
			struct request *r = list_entry(l, struct request, link);
			if (r->tenant != t || kv_policy_max_pages(&r->policy, r->max_total) <= t->max_pages)
				continue;
			error_set_param(&err, STATUS_LIMIT, "kv_memory",
			                "the limit of this API key was lowered to %" PRId32 " tokens, and the request may come to %" PRId32,
			                tenant_max_tokens(t), r->max_total);
			fail_request(w, r, &err);
		}
	}
}

static void handle_tenant(struct worker *w, struct command *c)
{
	if (tenant_set(&w->tenants, &c->set) == STATUS_OK) {
		struct tenant *t = tenant_find(&w->tenants, c->set.id);
		enforce_limit(w, t);
		restart_claim(&w->restart, &w->sessions, t);
	} else {
		log_msg(LOG_ERROR, "tenant", "no memory for tenant %" PRId32, c->set.id);
	}
	command_destroy(c);
}

/* ---- Commands ---- */

static void refuse_generate(struct worker *w, struct command *c, const struct error *err)
{
	w->stats.failed++;
	command_fail(w->e, c, err, &w->out);
}

static void handle_generate(struct worker *w, struct command *c)
{
	struct engine *e = w->e;
	struct engine_request *spec = c->request;
	struct error err = {0};
	struct session *session = NULL;
	struct tenant *tenant = tenant_find(&w->tenants, spec->tenant);
	struct kv_policy policy;
	struct request *r;
	if (!tenant) {
		error_set(&err, STATUS_NOMEM, "no memory for another tenant");
		command_fail(e, c, &err, &w->out);
		return;
	}
	if (spec->session[0]) {
		session = session_find(&w->sessions, spec->tenant, spec->session);
		if (!session) {
			error_set_param(&err, STATUS_NOT_FOUND, "session_id",
			                "there is no session '%s': it was never made, has expired or was deleted", spec->session);
			command_fail(e, c, &err, &w->out);
			return;
		}
		if (limits_session(session, e->options.session_requests, &err) != STATUS_OK) {
			refuse_generate(w, c, &err);
			return;
		}
	}
	if (context_resolve(&w->context, &spec->context, &policy, &err) != STATUS_OK) {
		refuse_generate(w, c, &err);
		return;
	}
	c->request = NULL;
	int32_t n_ctx = context_is_bounded(&e->options, &spec->context) ? e->info.n_ctx_long : e->info.n_ctx;
	if (request_create(spec, &c->tokens, e->tokenizer, e->words, n_ctx, c->submitted_ns, &r, &err) != STATUS_OK) {
		refuse_generate(w, c, &err);
		return;
	}
	r->policy = policy;
	r->tenant = tenant;
	r->session = session;
	r->deadline_ns = limits_deadline_ns(r, e->options.request_timeout_ms);
	if (limits_apply(r, &err) != STATUS_OK) {
		request_destroy(r);
		refuse_generate(w, c, &err);
		return;
	}
	struct kv_root root = e->root;
	root.tenant = str_from(tenant->salt);
	root.salt = str_from(spec->cache_salt ? spec->cache_salt : "");
	kv_key_root(&root, &r->chain.root);
	command_destroy(c); /* the request carries the flight on */
	if (session)
		session_touch(&w->sessions, session);
	sched_add(&w->sched, r);
}

static void handle(struct worker *w, struct command *c)
{
	struct request *r;
	switch (c->type) {
	case COMMAND_GENERATE:
		handle_generate(w, c);
		break;
	case COMMAND_CANCEL:
		r = sched_find(&w->sched, c->id);
		if (r)
			finish_request(w, r, ENGINE_FINISH_CANCELLED, "cancelled");
		cancel_transfer(w, c->id);
		command_destroy(c);
		break;
	case COMMAND_SESSION_CREATE:
	case COMMAND_SESSION_GET:
	case COMMAND_SESSION_HEARTBEAT:
	case COMMAND_SESSION_DELETE:
	case COMMAND_SESSION_LIST:
	case COMMAND_KV_REPORT:
		handle_session(w, c);
		break;
	case COMMAND_SESSION_EXPORT:
	case COMMAND_EXPORT_NEXT:
		handle_export(w, c);
		break;
	case COMMAND_SESSION_IMPORT:
	case COMMAND_IMPORT_DATA:
		handle_import(w, c);
		break;
	case COMMAND_TENANT:
		handle_tenant(w, c);
		break;
	case COMMAND_WAKE:
		atomic_store(&w->e->wake_sent, false);
		command_destroy(c);
		break;
	case COMMAND_STOP:
		w->stopping = true;
		command_destroy(c);
		break;
	default:
		command_destroy(c);
	}
}

/* ---- The step ---- */

/* The prompt is computed: what was known of it goes out, with its log-probabilities if they were wanted. */
static bool send_prompt(struct worker *w, struct request *r)
{
	struct engine_event *ev = event_create(ENGINE_EVENT_PROMPT, r->id);
	if (!ev)
		return false;
	ev->usage = r->usage;
	ev->turns_dropped = r->spec->turns_dropped;
	if (r->spec->want_prompt) {
		ev->tokens = malloc((size_t)r->n_prompt * sizeof *ev->tokens);
		if (r->spec->text)
			buf_append(&ev->text, r->spec->text, r->spec->text_n);
		else
			tokenizer_decode(w->e->tokenizer, r->tokens.ids, (size_t)r->n_prompt, true, &ev->text);
		if (!ev->tokens || ev->text.failed) {
			engine_event_free(ev);
			return false;
		}
		memcpy(ev->tokens, r->tokens.ids, (size_t)r->n_prompt * sizeof *ev->tokens);
		ev->n_tokens = (size_t)r->n_prompt;
	}
	ev->logprobs = r->prompt_logprobs;
	r->prompt_logprobs = NULL;
	w->stats.prompt_tokens += (uint64_t)r->n_prompt;
	w->stats.cached_tokens += (uint64_t)r->usage.cached_tokens;
	r->prompt_done = true;
	list_push_back(&w->out, &ev->link);
	return true;
}

/* Row i of a prompt predicts token i + 1. first: the position of the first of n logit rows. */
static void read_prompt_logprobs(struct worker *w, struct request *r, const float *logits, int32_t first, int32_t n)
{
	int32_t n_vocab = tokenizer_n_vocab(w->e->tokenizer);
	int32_t n_top = r->spec->sampling.n_logprobs > 0 ? r->spec->sampling.n_logprobs : 0;
	if (first == 0) {
		r->prompt_logprobs[0].token = r->tokens.ids[0];
		r->prompt_logprobs[0].logprob = NAN;
	}
	for (int32_t i = 0; i < n && first + i + 1 < r->n_prompt; i++)
		sampler_logprobs(logits + (size_t)i * (size_t)w->e->info.n_vocab, n_vocab, r->tokens.ids[first + i + 1], n_top,
		                 &r->prompt_logprobs[first + i + 1]);
}

/* `token` where the backend has chosen (as `sample` of backend.h marks it), and else this. */
enum { NOT_CHOSEN = INT32_MAX };

/* Chooses the next token, unless that is done, sends it, and ends the request if it was the last. */
static void take_token(struct worker *w, struct request *r, float *logits, int32_t chosen)
{
	struct engine *e = w->e;
	const char *detail;
	const uint64_t *allowed = NULL;
	bool complete = false;
	struct error err;
	struct engine_event *ev = event_create(ENGINE_EVENT_TOKEN, r->id);
	if (!ev)
		goto nomem;
	if (r->matcher && grammar_matcher_mask(r->matcher, &allowed, &err) != STATUS_OK)
		goto fail;
	if (chosen == NOT_CHOSEN)
		sampler_sample_allowed(r->sampler, logits, allowed, &ev->sample);
	else
		ev->sample = (struct sample_result){.token = sampler_take(r->sampler, chosen), .logprob = NAN};
	int32_t token = ev->sample.token;
	if (!r->first_token_ns) {
		r->first_token_ns = clock_now_ns(e->clock);
		r->usage.prefill_ns = r->first_token_ns - r->started_ns;
		r->usage.ttft_ns = r->first_token_ns - r->submitted_ns;
	}
	if (request_is_end_token(r, e->tokenizer, token, &detail)) {
		engine_event_free(ev);
		finish_request(w, r, ENGINE_FINISH_STOP, detail);
		return;
	}
	if (r->matcher && grammar_matcher_accept(r->matcher, token, &complete, &err) != STATUS_OK)
		goto fail;
	struct str piece = tokenizer_piece(e->tokenizer, token, false);
	buf_append(&ev->piece, piece.p, piece.n);
	int stop = detok_push(r->detok, token, &ev->text);
	if (ev->piece.failed || ev->text.failed || !token_buf_add(&r->tokens, token))
		goto nomem;
	sampler_accept(r->sampler, token, true);
	r->state = REQUEST_DECODE;
	r->usage.completion_tokens++;
	w->stats.generated_tokens++;
	list_push_back(&w->out, &ev->link);
	if (stop >= 0) {
		r->last->stop_index = stop;
		finish_request(w, r, ENGINE_FINISH_STOP, "stop");
	} else if (complete) {
		finish_request(w, r, ENGINE_FINISH_STOP, "grammar");
	} else if ((int32_t)r->tokens.n >= r->max_total) {
		finish_request(w, r, ENGINE_FINISH_LENGTH, "length");
	}
	return;

nomem:
	error_set(&err, STATUS_NOMEM, "no memory for the next token");
fail:
	engine_event_free(ev);
	fail_request(w, r, &err);
}

/* mine: the logits of the part's outputs, if they are needed here. */
static void take_part(struct worker *w, const struct step_part *part, float *mine, int32_t chosen)
{
	struct request *r = part->request;
	struct error err;
	int32_t first = r->kv.n_tokens;
	r->kv.n_tokens += part->n_rows;
	sched_index(&w->sched, r);
	sched_let_go(&w->sched, r);
	if (r->state == REQUEST_PREFILL)
		w->stats.computed_prompt_tokens += (uint64_t)part->n_rows;
	if (r->prompt_logprobs && !r->prompt_done)
		read_prompt_logprobs(w, r, mine, first, part->n_outputs);
	if (request_pending(r) > 0)
		return;
	if (!r->prompt_done && !send_prompt(w, r)) {
		error_set(&err, STATUS_NOMEM, "no memory for the prompt's answer");
		fail_request(w, r, &err);
		return;
	}
	if (r->max_total <= r->n_prompt) {
		finish_request(w, r, ENGINE_FINISH_LENGTH, "length");
		return;
	}
	take_token(w, r, mine + (size_t)(part->n_outputs - 1) * (size_t)w->e->info.n_vocab, chosen);
}

/* The sentence for requests that a failed device leaves without an answer. */
static void explain_failure(const struct worker *w, enum status st, struct error *err)
{
	const struct backend *b = w->e->backend;
	const char *why = b->ops->last_failure ? b->ops->last_failure(b) : "";
	error_set(err, st, "the device failed: %s", why[0] ? why : status_text(st));
}

/*
 * A step has failed: its requests end. Memory that ran short or a kernel that could not start concerns them alone; a device
 * that is lost is the end of all of them.
 */
static void fail_step(struct worker *w, enum status st)
{
	const struct batch *b = &w->sched.batch;
	struct error err;
	int32_t n_seqs = b->n_seqs;
	explain_failure(w, st, &err);
	log_msg(LOG_ERROR, "step", "a step of %" PRId32 " rows failed: %s", b->n_rows, err.message);
	for (int32_t i = 0; i < n_seqs; i++)
		fail_request(w, w->sched.part[i].request, &err);
	if (st == STATUS_DEVICE) {
		w->lost = true;
		w->lost_error = err;
	}
}

/* Whether a part's only output is the next token, chosen by the backend: then *row says how. */
static bool chosen_on_device(const struct worker *w, const struct step_part *part, struct sample_row *row)
{
	const struct request *r = part->request;
	/* A grammar's mask is applied here. */
	if (r->matcher || !model_samples(w->e->model) || part->n_outputs != 1 || (r->prompt_logprobs && !r->prompt_done) ||
	    !sampler_offload(r->sampler, row))
		return false;
	row->output = part->first_output;
	return true;
}

/* What the step gave: tokens where the backend can choose them, so that no logits cross the bus, and logits where not. */
static enum status fetch_outputs(struct worker *w)
{
	struct model *m = w->e->model;
	int32_t n_seqs = w->sched.batch.n_seqs, n = 0;
	for (int32_t i = 0; i < n_seqs; i++) {
		const struct step_part *part = &w->sched.part[i];
		w->part_logits[i] = NULL;
		w->part_token[i] = NOT_CHOSEN;
		if (chosen_on_device(w, part, &w->choice[n])) {
			w->part_token[i] = n++; /* for now: which choice */
			continue;
		}
		enum status st = model_logits(m, part->first_output, part->n_outputs, &w->part_logits[i]);
		if (st != STATUS_OK)
			return st;
	}
	if (n == 0)
		return STATUS_OK;
	enum status st = model_sample(m, tokenizer_n_vocab(w->e->tokenizer), w->choice, n, w->chosen);
	for (int32_t i = 0; i < n_seqs; i++) {
		if (w->part_token[i] != NOT_CHOSEN)
			w->part_token[i] = w->chosen[w->part_token[i]];
	}
	return st;
}

static void run_step(struct worker *w)
{
	struct engine *e = w->e;
	const struct batch *b = &w->sched.batch;
	int64_t start = clock_now_ns(clock_system());
	enum status st = model_run(e->model, b, kv_pool_slab(e->pool));
	if (st == STATUS_OK)
		st = fetch_outputs(w);
	int64_t took = clock_now_ns(clock_system()) - start;
	int32_t n_seqs = b->n_seqs;
	if (st != STATUS_OK) {
		fail_step(w, st);
		return;
	}
	w->stats.steps++;
	w->stats.step_rows += (uint64_t)b->n_rows;
	w->stats.step_ns += took;
	sched_measure(&w->sched, b->n_rows, b->n_rows > n_seqs, took);
	for (int32_t i = 0; i < n_seqs; i++)
		take_part(w, &w->sched.part[i], w->part_logits[i], w->part_token[i]);
}

/* ---- The loop ---- */

/* The figures, then the events: who has seen an answer finds it counted. */
static void publish(struct worker *w)
{
	struct engine *e = w->e;
	struct engine_stats s = w->stats;
	if (w->census_stale && clock_now_ms(e->clock) - w->census_ms >= CENSUS_MS)
		take_census(w);
	sched_describe(&w->sched, &s);
	s.n_sessions = (int32_t)w->sessions.n_sessions;
	s.pages_total = kv_pool_n_pages(e->pool);
	s.pages_free = kv_pool_n_free(e->pool);
	s.kv = w->kv;
	engine_tiers_describe(e->tiers, &s.tiers);
	s.sessions_created = w->sessions.created;
	s.sessions_expired = w->sessions.expired;
	s.sessions_deleted = w->sessions.deleted;
	pthread_mutex_lock(&e->lock);
	e->stats = s;
	e->census_ms = w->census_ms;
	e->n_usage = w->tenants.n;
	for (int32_t i = 0; i < w->tenants.n; i++) {
		e->usage[i].id = -1;
		if (w->tenants.all[i])
			tenant_describe(w->tenants.all[i], e->layout.page_stride, &e->usage[i]);
	}
	pthread_mutex_unlock(&e->lock);
	mailbox_post_all(&e->events, &w->out);
}

/* How long to sleep when nothing can be computed: until the next collection that could find something, or the census that is due. */
static int64_t sleep_ns(const struct worker *w)
{
	bool collect = session_next_deadline_ms(&w->sessions) != INT64_MAX;
	struct kv_tiers *tiers = w->e->tiers;
	if (tiers && kv_tiers_ready(tiers))
		return 0;
	/* The disk wakes us; a look now and then finds out that it does not. */
	if (tiers && kv_tiers_busy(tiers))
		return TIERS_NS;
	if (w->sched.n_running + w->sched.n_waiting > 0)
		return STARVED_NS;
	if (!collect && !w->census_stale)
		return -1;
	/* A clock that tests move by hand does not move while we sleep by the system's: look often. */
	if (w->e->clock != clock_system())
		return 2000000;
	int64_t at = collect ? w->next_gc_ms : INT64_MAX;
	if (w->census_stale && w->census_ms + CENSUS_MS < at)
		at = w->census_ms + CENSUS_MS;
	int64_t ms = at - clock_now_ms(w->e->clock);
	return ms > 0 ? ms * 1000000 : 0;
}

/* A question leaves everything as it is, so that asking often costs no census. */
static bool only_looks(enum command_type type)
{
	return type == COMMAND_SESSION_GET || type == COMMAND_SESSION_LIST || type == COMMAND_KV_REPORT || type == COMMAND_SESSION_HEARTBEAT;
}

static void take_commands(struct worker *w, bool idle)
{
	struct list commands;
	list_init(&commands);
	if (idle)
		mailbox_wait(&w->e->worker_box, &commands, sleep_ns(w));
	else
		mailbox_take(&w->e->worker_box, &commands);
	for (struct list *l; (l = list_pop_front(&commands));) {
		struct command *c = list_entry(l, struct command, link);
		w->census_stale = w->census_stale || !only_looks(c->type);
		handle(w, c);
	}
}

static void collect_when_due(struct worker *w)
{
	int64_t now = clock_now_ms(w->e->clock);
	if (now < w->next_gc_ms)
		return;
	collect_sessions(w);
	w->next_gc_ms = now + w->e->options.session_gc_ms;
}

/* Nothing can be computed although somebody waits: perhaps because copying a page has failed, which looks like a full pool. */
static void look_at_device(struct worker *w)
{
	struct backend *b = w->e->backend;
	if (w->sched.n_running + w->sched.n_waiting == 0 || b->ops->sync(b) != STATUS_DEVICE)
		return;
	w->lost = true;
	explain_failure(w, STATUS_DEVICE, &w->lost_error);
}

/* Ends everything for good with one error, and tells why the engine answers nothing from now on. */
static void give_up(struct worker *w)
{
	struct engine *e = w->e;
	struct engine_event *ev = event_create(ENGINE_EVENT_STATE, 0);
	log_msg(LOG_ERROR, "device_lost", "no more requests are taken: %s", w->lost_error.message);
	e->load_error = w->lost_error; /* nobody reads it before the state says so */
	atomic_store_explicit(&e->state, ENGINE_FAILED, memory_order_release);
	for (struct list *l; (l = w->sched.running.next) != &w->sched.running;)
		fail_request(w, list_entry(l, struct request, link), &w->lost_error);
	for (struct list *l; (l = w->sched.waiting.next) != &w->sched.waiting;)
		fail_request(w, list_entry(l, struct request, link), &w->lost_error);
	if (ev)
		list_push_back(&w->out, &ev->link);
}

/* Until the stop, or until the device is lost. */
static void serve(struct worker *w)
{
	struct engine *e = w->e;
	bool idle = false;
	while (!w->stopping && !w->lost) {
		take_commands(w, idle);
		collect_when_due(w);
		end_overdue(w);
		idle = !sched_build(&w->sched);
		if (!idle) {
			run_step(w);
			w->census_stale = true;
		} else {
			look_at_device(w);
		}
		continue_exports(w);
		publish(w);
	}
	if (w->lost)
		give_up(w);
	for (struct list *l; (l = w->sched.running.next) != &w->sched.running;)
		finish_request(w, list_entry(l, struct request, link), ENGINE_FINISH_CANCELLED, "shutdown");
	for (struct list *l; (l = w->sched.waiting.next) != &w->sched.waiting;)
		finish_request(w, list_entry(l, struct request, link), ENGINE_FINISH_CANCELLED, "shutdown");
	if (e->tiers && e->options.kv_disk_dir && !w->lost)
		restart_save(e->options.kv_disk_dir, &e->identity, &w->sessions, e->tiers, &w->restart, SAVE_MS);
	transfers_free(&w->transfers, e);
	continue_exports(w); /* they have ended */
	while (w->sessions.n_sessions > 0)
		session_remove(&w->sessions, w->sessions.heap[0]);
	publish(w);
}

/* Loading failed, there is no memory to serve, or the device is lost: answer everything until the stop. */
static void refuse(struct engine *e)
{
	struct error err;
	struct list commands, out;
	list_init(&commands);
	list_init(&out);
	error_set(&err, STATUS_BUSY, "the model is not available: %.400s", e->load_error.message);
	for (bool stop = false; !stop;) {
		mailbox_wait(&e->worker_box, &commands, -1);
		for (struct list *l; (l = list_pop_front(&commands));) {
			struct command *c = list_entry(l, struct command, link);
			stop = stop || c->type == COMMAND_STOP;
			if (c->reply)
				command_fail(e, c, &err, &out);
			else
				command_destroy(c);
		}
		mailbox_post_all(&e->events, &out);
	}
}

static enum status start(struct worker *w, struct error *err)
{
	struct engine *e = w->e;
	const struct engine_options *o = &e->options;
	enum status st = engine_load(e, err);
	if (st != STATUS_OK)
		return st;
	st = tenant_table_init(&w->tenants, e->layout.page_stride);
	if (st != STATUS_OK)
		return error_set(err, st, "no memory for the tenants");
	st = session_table_init(&w->sessions, &w->tenants, e->prefix, e->clock, o->heartbeat_timeout_ms, o->session_ttl_ms,
	                        o->max_sessions);
	if (st != STATUS_OK)
		return error_set(err, st, "no memory for the session table");
	w->sessions.max_tokens = o->session_tokens;
	st = sched_init(&w->sched, e->pool, e->prefix, &w->sessions, e->clock, o->max_running, o->step_tokens, e->max_outputs);
	if (st != STATUS_OK)
		return error_set(err, st, "no memory for the scheduler");
	st = census_init(&w->census, e->pool, &w->sched, &w->sessions, &w->tenants);
	if (st != STATUS_OK)
		return error_set(err, st, "no memory to count %" PRId32 " pages", kv_pool_n_pages(e->pool));
	take_census(w);
	st = kv_scorer_init(&w->scorer, e->backend, e->pool);
	if (st == STATUS_NOMEM)
		return error_set(err, st, "no memory to look at pages");
	w->sched.scorer = st == STATUS_OK ? &w->scorer : NULL;
	w->context = context_bounds_of(o, kv_pool_n_pages(e->pool), st == STATUS_OK);
	size_t n = (size_t)o->max_running;
	w->part_logits = calloc(n, sizeof *w->part_logits);
	w->part_token = calloc(n, sizeof *w->part_token);
	w->choice = calloc(n, sizeof *w->choice);
	w->chosen = calloc(n, sizeof *w->chosen);
	if (!w->part_logits || !w->part_token || !w->choice || !w->chosen)
		return error_set(err, STATUS_NOMEM, "no memory for the outputs of a step");
	w->sched.tiers = w->sessions.tiers = e->tiers;
	w->sched.horizon = model_horizon(model_params(e->model));
	if (e->tiers) {
		calibrate_prefill(e, &w->sched);
		if (o->kv_disk_dir)
			restart_load(o->kv_disk_dir, &e->identity, &w->sessions, &w->restart);
	}
	w->next_gc_ms = clock_now_ms(e->clock) + o->session_gc_ms;
	return STATUS_OK;
}

void *worker_thread_main(void *engine)
{
	struct engine *e = engine;
	struct worker w = {.e = e};
	struct engine_event *loaded = event_create(ENGINE_EVENT_STATE, 0);
	enum status st = start(&w, &e->load_error);
	list_init(&w.out);
	transfers_init(&w.transfers);
	list_init(&w.exports);
	if (st == STATUS_OK)
		publish(&w);
	atomic_store_explicit(&e->state, st == STATUS_OK ? ENGINE_READY : ENGINE_FAILED, memory_order_release);
	if (loaded)
		mailbox_post(&e->events, &loaded->link);
	if (st == STATUS_OK)
		serve(&w);
	if (!w.stopping)
		refuse(e);
	transfers_free(&w.transfers, e);
	restart_free(&w.restart);
	kv_scorer_free(&w.scorer);
	census_free(&w.census);
	free(w.part_logits);
	free(w.part_token);
	free(w.choice);
	free(w.chosen);
	sched_free(&w.sched);
	session_table_free(&w.sessions);
	tenant_table_free(&w.tenants);
	engine_unload(e);
	return NULL;
}
