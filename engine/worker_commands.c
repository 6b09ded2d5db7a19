/* What the worker is told: sessions, exports and imports, tenants, generations. */
#include <inttypes.h>
#include <stdlib.h>

#include "engine/base/log.h"
#include "engine/drift.h"
#include "engine/event.h"
#include "engine/limits.h"
#include "engine/request.h"
#include "engine/worker.h"

/* ---- Sessions ---- */

static enum status no_session(const char *id, struct error *err)
{
	return error_set_param(err, STATUS_NOT_FOUND, "session_id",
	                       "there is no session '%s': it was never made, has expired or was deleted", id);
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

/* Answers SESSION_LIST and KV_REPORT. */
static void list_sessions(struct worker *w, struct command *c)
{
	struct engine_event *ev = c->reply;
	struct error err;
	enum status st = session_list(&w->sessions, w->e->pool, c->tenant, &c->page, &ev->sessions, &ev->n_sessions,
	                              &ev->more_sessions);
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
			worker_take_census(w);
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
		worker_collect_sessions(w);
		const struct session *s = session_find(&w->sessions, c->tenant, c->session.id);
		st = s ? export_begin(&w->transfers, w->e, c->id, &w->sessions, s, &err)
		       : no_session(c->session.id, &err);
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

static void handle_import(struct worker *w, struct command *c)
{
	struct session *s = NULL;
	struct error err;
	enum status st;
	worker_collect_sessions(w);
	if (c->type == COMMAND_SESSION_IMPORT)
		st = import_begin(&w->transfers, w->e, c->id, &c->session, &err);
	else
		st = import_data(&w->transfers, w->e, &w->sessions, c->id, c->text, c->text_n, &s, &err);
	if (st != STATUS_OK) {
		if (s)
			worker_end_session(w, s, "session_deleted");
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
		worker_end_session(w, s, "session_deleted");
}

static void handle_session(struct worker *w, struct command *c)
{
	struct session *s = NULL;
	struct error err;
	worker_collect_sessions(w);
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
		no_session(c->session.id, &err);
		command_fail(w->e, c, &err, &w->out);
		return;
	}
	if (c->type == COMMAND_SESSION_WATCH) {
		if (session_watch(&w->watches, c->id, s) != STATUS_OK) {
			error_set(&err, STATUS_NOMEM, "no memory to watch a session");
			command_fail(w->e, c, &err, &w->out);
			return;
		}
		command_destroy(c);
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
	worker_end_session(w, s, "session_deleted");
	command_answer(w->e, c, &w->out);
}

void worker_continue_exports(struct worker *w)
{
	struct list waiting;
	list_init(&waiting);
	list_splice_back(&waiting, &w->exports);
	for (struct list *l; (l = list_pop_front(&waiting));)
		handle_export(w, list_entry(l, struct command, link));
}

/* ---- Tenants ---- */

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
			                "the limit of this API key was lowered to %" PRId32
			                " tokens, and the request may come to %" PRId32,
			                tenant_max_tokens(t), r->max_total);
			worker_fail_request(w, r, &err);
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

/* ---- Generations ---- */

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
	enum status st;
	if (!tenant) {
		error_set(&err, STATUS_NOMEM, "no memory for another tenant");
		command_fail(e, c, &err, &w->out);
		return;
	}
	if (spec->session[0]) {
		session = session_find(&w->sessions, spec->tenant, spec->session);
		if (!session) {
			no_session(spec->session, &err);
			command_fail(e, c, &err, &w->out);
			return;
		}
		if (limits_session(session, e->options.session_requests, &err) != STATUS_OK) {
			refuse_generate(w, c, &err);
			return;
		}
	}
	if (context_resolve(&w->context, &spec->context, &policy, &err) != STATUS_OK ||
	    context_check_diagnostics(&w->context, &spec->context, &err) != STATUS_OK) {
		refuse_generate(w, c, &err);
		return;
	}
	c->request = NULL;
	int32_t n_ctx = policy.kind == KV_POLICY_FULL ? worker_max_tokens(w) : e->info.n_ctx_pool;
	if (context_is_bounded(&e->options, &spec->context))
		n_ctx = e->info.n_ctx_long;
	if (request_create(spec, &c->tokens, e->tokenizer, e->words, n_ctx, c->submitted_ns, &r, &err) != STATUS_OK) {
		refuse_generate(w, c, &err);
		return;
	}
	r->policy = policy;
	r->trigger = trigger_of(&spec->context);
	r->tenant = tenant;
	r->session = session;
	r->deadline_ns = limits_deadline_ns(r, e->options.request_timeout_ms);
	st = limits_apply(r, &err);
	if (st == STATUS_OK && r->spec->context.diagnostics && policy.kind == KV_POLICY_QUEST &&
	    !(r->drift = drift_create(e->info.n_vocab)))
		st = error_set(&err, STATUS_NOMEM, "no memory for another request");
	if (st != STATUS_OK) {
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

void worker_handle(struct worker *w, struct command *c)
{
	struct request *r;
	switch (c->type) {
	case COMMAND_GENERATE:
		handle_generate(w, c);
		break;
	case COMMAND_CANCEL:
		r = sched_find(&w->sched, c->id);
		if (r)
			worker_finish_request(w, r, ENGINE_FINISH_CANCELLED, "cancelled");
		session_unwatch(&w->watches, c->id);
		cancel_transfer(w, c->id);
		command_destroy(c);
		break;
	case COMMAND_HURRY:
		r = sched_find(&w->sched, c->id);
		if (r)
			sched_hurry(&w->sched, r);
		command_destroy(c);
		break;
	case COMMAND_SESSION_CREATE:
	case COMMAND_SESSION_GET:
	case COMMAND_SESSION_HEARTBEAT:
	case COMMAND_SESSION_WATCH:
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
