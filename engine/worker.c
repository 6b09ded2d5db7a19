/*
 * The worker: the one thread that owns a device, its page pool, its sessions and its scheduler. It takes commands
 * between steps, runs a step when there is something to compute, and sleeps when there is not.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "engine/base/log.h"
#include "engine/calibrate.h"
#include "engine/drift.h"
#include "engine/event.h"
#include "engine/request.h"
#include "engine/worker.h"

/* How long to sleep at most while a tier is at work. */
enum { TIERS_NS = 20000000 };
/*
 * How long before it is tried again when somebody waits and nothing can be computed: there was no memory for a block
 * table.
 */
enum { STARVED_NS = 5000000 };
/* And how long the end of the process may take for its sessions. */
enum { SAVE_MS = 10000 };

/* ---- Endings ---- */

static void end_request(struct worker *w, struct request *r)
{
	struct engine_event *last = r->last;
	int32_t tenant = r->tenant->id;
	bool in_flight = !r->spec->background;
	r->last = NULL;
	sched_remove(&w->sched, r);
	request_destroy(r);
	if (in_flight)
		flight_end(w->e, tenant);
	list_push_back(&w->out, &last->link);
}

void worker_fail_request(struct worker *w, struct request *r, const struct error *err)
{
	event_set_error(r->last, err);
	w->stats.failed++;
	end_request(w, r);
}

static void describe_diagnostics(const struct request *r, struct engine_diagnostics *out)
{
	const double unit = 1 << KV_MASS_BITS;
	const struct attention_look *look = &r->look;
	*out = (struct engine_diagnostics){.wanted = r->spec->context.diagnostics, .n_rows = look->n};
	if (look->n > 0) {
		out->entropy = (double)look->entropy / unit / (double)look->n;
		out->largest = (double)look->largest / unit / (double)look->n;
	}
	if (r->drift && r->drift->n > 0) {
		out->n_samples = r->drift->n;
		out->drift = r->drift->sum / r->drift->n;
		out->drift_most = r->drift->most;
	}
}

/* Its pages below the pool, which hold none of it. */
static void describe_spill(const struct worker *w, const struct request *r, struct engine_context_usage *out)
{
	int32_t *ram = &out->pages_tier[ENGINE_TIER_RAM], *disk = &out->pages_tier[ENGINE_TIER_DISK];
	kv_overflow_count(&r->spill, ram, disk);
	out->pages -= *ram + *disk;
	out->bytes -= (uint64_t)(*ram + *disk) * w->e->layout.page_stride;
}

void worker_finish_request(struct worker *w, struct request *r, enum engine_finish finish, const char *detail)
{
	struct engine_event *ev = r->last;
	int64_t now = clock_now_ns(w->e->clock);
	if (detok_finish(r->detok, &ev->text), ev->text.failed) {
		struct error err;
		error_set(&err, STATUS_NOMEM, "no memory for the end of the answer");
		worker_fail_request(w, r, &err);
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
	context_describe(&r->policy, &r->kv, w->e->pool, &r->usage.context);
	describe_spill(w, r, &r->usage.context);
	r->usage.context.recalls = r->recall.n_choices;
	r->usage.context.pages_recomputed = r->recall.again_pages;
	r->usage.context.tokens_recomputed = r->recall.again_tokens;
	describe_diagnostics(r, &r->usage.context.diagnostics);
	context_describe_trigger(&r->spec->context, &r->trigger, &r->policy, &r->kv, &r->usage.context);
	w->stats.context_triggered[r->usage.context.trigger] += r->usage.context.trigger_asked;
	w->stats.context_requests[r->policy.kind]++;
	w->stats.context_merged[r->policy.kind] += (uint64_t)r->usage.context.merged_tokens;
	w->stats.context_fallback[r->policy.kind] += (uint64_t)r->usage.context.fallback_pages;
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

void worker_end_session(struct worker *w, struct session *s, const char *detail)
{
	if (s->running)
		worker_finish_request(w, s->running, ENGINE_FINISH_CANCELLED, detail);
	list_each(l, next, &w->sched.waiting) {
		struct request *r = list_entry(l, struct request, link);
		if (r->session == s)
			worker_finish_request(w, r, ENGINE_FINISH_CANCELLED, detail);
	}
	session_watches_end(&w->watches, s, &w->out);
	session_remove(&w->sessions, s);
}

void worker_collect_sessions(struct worker *w)
{
	struct session *s;
	while ((s = session_next_expired(&w->sessions))) {
		w->sessions.expired++;
		w->census_stale = true;
		worker_end_session(w, s, "session_expired");
	}
}

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
			worker_fail_request(w, r, &err);
		}
	}
}

void worker_explain_loss(struct error *err)
{
	error_set(err, STATUS_IO,
	          "the disk that has conversations larger than the KV cache failed, and this one needs it");
}

void worker_explain_failure(const struct worker *w, enum status st, struct error *err)
{
	const struct backend *b = w->e->backend;
	const char *why = b->ops->last_failure ? b->ops->last_failure(b) : "";
	error_set(err, st, "the device failed: %s", why[0] ? why : status_text(st));
}

static const struct rope_params *rope_of(const void *model, int32_t layer)
{
	return model_rope(model, layer);
}

/* ---- The loop ---- */

void worker_take_census(struct worker *w)
{
	census_take(&w->census, &w->kv);
	w->census_ms = clock_now_ms(w->e->clock);
	w->census_stale = false;
}

/* The figures, then the events: who has seen an answer finds it counted. */
static void publish(struct worker *w)
{
	struct engine *e = w->e;
	struct engine_stats s = w->stats;
	if (w->census_stale && clock_now_ms(e->clock) - w->census_ms >= CENSUS_MS)
		worker_take_census(w);
	sched_describe(&w->sched, &s);
	s.n_sessions = (int32_t)w->sessions.n_sessions;
	s.pages_total = kv_pool_n_pages(e->pool);
	s.pages_free = kv_pool_n_free(e->pool);
	s.kv = w->kv;
	engine_tiers_describe(e->tiers, &s.tiers);
	engine_overflow_describe(e->overflow, &s.overflow);
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

/*
 * How long to sleep when nothing can be computed: until the next collection that could find something, or the census
 * that is due.
 */
static int64_t sleep_ns(const struct worker *w)
{
	bool collect = session_next_deadline_ms(&w->sessions) != INT64_MAX;
	struct kv_tiers *tiers = w->e->tiers;
	if (tiers && kv_tiers_ready(tiers))
		return 0;
	int64_t due_ms = session_watches_due_ms(&w->watches);
	if (due_ms != INT64_MAX) {
		int64_t ms = due_ms - clock_now_ms(w->e->clock);
		return ms <= 0 ? 0 : w->e->clock != clock_system() ? 2000000 : ms * 1000000;
	}
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
	return type == COMMAND_SESSION_GET || type == COMMAND_SESSION_WATCH || type == COMMAND_SESSION_LIST ||
	       type == COMMAND_KV_REPORT || type == COMMAND_SESSION_HEARTBEAT;
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
		worker_handle(w, c);
	}
}

static void collect_when_due(struct worker *w)
{
	int64_t now = clock_now_ms(w->e->clock);
	if (now < w->next_gc_ms)
		return;
	worker_collect_sessions(w);
	w->next_gc_ms = now + w->e->options.session_gc_ms;
}

/*
 * Nothing can be computed although somebody waits: perhaps because copying a page has failed, which looks like a full
 * pool.
 */
static void look_at_device(struct worker *w)
{
	struct backend *b = w->e->backend;
	if (w->sched.n_running + w->sched.n_waiting == 0 || b->ops->sync(b) != STATUS_DEVICE)
		return;
	w->lost = true;
	worker_explain_failure(w, STATUS_DEVICE, &w->lost_error);
}

int32_t worker_max_tokens(const struct worker *w)
{
	const struct engine_info *info = &w->e->info;
	if (!w->e->overflow)
		return info->n_ctx;
	int32_t most = kv_overflow_now(w->e->overflow)->max_tokens;
	most = most > info->n_ctx_pool ? most : info->n_ctx_pool;
	return most < info->n_ctx ? most : info->n_ctx;
}

/*
 * The room below the pool has become less, since its disk has failed: requests that need what it had end now, rather
 * than wait for ever.
 */
static void look_below(struct worker *w)
{
	struct list *const heads[] = {&w->sched.running, &w->sched.waiting};
	struct error err;
	if (!w->e->overflow || kv_overflow_now(w->e->overflow)->max_tokens >= w->overflow_tokens)
		return;
	w->overflow_tokens = kv_overflow_now(w->e->overflow)->max_tokens;
	int32_t most = worker_max_tokens(w);
	for (size_t i = 0; i < 2; i++) {
		list_each(l, next, heads[i]) {
			struct request *r = list_entry(l, struct request, link);
			if (r->policy.kind != KV_POLICY_FULL || r->max_total <= most)
				continue;
			/*
			 * What it said it needs, or has already, is no longer to be had; else its answer ends sooner.
			 */
			if (r->spec->max_tokens < 0 && (int32_t)r->tokens.n < most) {
				r->max_total = most;
				continue;
			}
			worker_explain_loss(&err);
			worker_fail_request(w, r, &err);
		}
	}
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
		worker_fail_request(w, list_entry(l, struct request, link), &w->lost_error);
	for (struct list *l; (l = w->sched.waiting.next) != &w->sched.waiting;)
		worker_fail_request(w, list_entry(l, struct request, link), &w->lost_error);
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
		look_below(w);
		idle = !sched_build(&w->sched);
		/* What was evicted for the step is told before it. */
		if (session_watches_tell(&w->watches, clock_now_ms(e->clock), &w->out))
			publish(w);
		if (!idle) {
			worker_run_step(w);
			w->census_stale = true;
		} else {
			look_at_device(w);
		}
		worker_continue_exports(w);
		session_watches_tell(&w->watches, clock_now_ms(e->clock), &w->out);
		publish(w);
	}
	session_watches_free(&w->watches);
	if (w->lost)
		give_up(w);
	for (struct list *l; (l = w->sched.running.next) != &w->sched.running;)
		worker_finish_request(w, list_entry(l, struct request, link), ENGINE_FINISH_CANCELLED, "shutdown");
	for (struct list *l; (l = w->sched.waiting.next) != &w->sched.waiting;)
		worker_finish_request(w, list_entry(l, struct request, link), ENGINE_FINISH_CANCELLED, "shutdown");
	if (e->tiers && e->options.kv_disk_dir && !w->lost)
		restart_save(e->options.kv_disk_dir, &e->identity, &w->sessions, e->tiers, &w->restart, SAVE_MS);
	transfers_free(&w->transfers, e);
	worker_continue_exports(w); /* they have ended */
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
	st = session_table_init(&w->sessions, &w->tenants, e->prefix, e->clock, o->heartbeat_timeout_ms,
	                        o->session_ttl_ms, o->max_sessions);
	if (st != STATUS_OK)
		return error_set(err, st, "no memory for the session table");
	w->sessions.max_tokens = o->session_tokens;
	st = sched_init(&w->sched, e->pool, e->prefix, &w->sessions, e->clock, o->max_running, o->step_tokens,
	                e->max_outputs);
	if (st != STATUS_OK)
		return error_set(err, st, "no memory for the scheduler");
	st = census_init(&w->census, e->pool, &w->sched, &w->sessions, &w->tenants);
	if (st != STATUS_OK)
		return error_set(err, st, "no memory to count %" PRId32 " pages", kv_pool_n_pages(e->pool));
	worker_take_census(w);
	st = kv_scorer_init(&w->scorer, e->backend, e->pool);
	if (st == STATUS_NOMEM)
		return error_set(err, st, "no memory to look at pages");
	w->sched.scorer = st == STATUS_OK ? &w->scorer : NULL;
	enum status merges = kv_page_merger_create(e->backend, e->pool, rope_of, e->model, &w->merger);
	if (merges == STATUS_NOMEM)
		return error_set(err, merges, "no memory to merge pages");
	w->sched.merger = merges == STATUS_OK ? kv_page_merger_ops(w->merger) : NULL;
	bool recalls = e->backend_info.probes_pages && e->layout.form == KV_FORM_F16 &&
		       kv_attics_init(&w->attics, e->tiers, e->pool);
	w->sched.attics = recalls ? &w->attics : NULL;
	w->context = context_bounds_of(o, (struct context_bounds){
						  .pool_pages = kv_pool_n_pages(e->pool),
						  .can_score = st == STATUS_OK,
						  .can_weigh = e->backend_info.weighs_pages,
						  .can_choose = e->layout.bounds != NULL,
						  .can_merge = merges == STATUS_OK,
						  .can_recall = recalls,
						  .n_ctx_train = e->info.n_ctx_train,
						  .by_chunks = e->info.rope.chunk > 0,
					  });
	size_t n = (size_t)o->max_running;
	w->part_logits = calloc(2 * n, sizeof *w->part_logits);
	w->part_token = calloc(2 * n, sizeof *w->part_token);
	w->choice = calloc(n, sizeof *w->choice);
	w->chosen = calloc(n, sizeof *w->chosen);
	if (!w->part_logits || !w->part_token || !w->choice || !w->chosen)
		return error_set(err, STATUS_NOMEM, "no memory for the outputs of a step");
	w->sched.tiers = w->sessions.tiers = e->tiers;
	w->sched.overlaps =
		e->backend_info.host_memory; /* elsewhere a page that is written waits for what was computed before */
	w->sched.overflow = e->overflow;
	w->overflow_tokens = e->overflow ? kv_overflow_now(e->overflow)->max_tokens : 0;
	w->sched.horizon = model_horizon(model_params(e->model));
	if (w->sched.horizon > 0)
		w->sched.large = sched_large_windowed(kv_pool_n_pages(e->pool), w->sched.horizon, o->step_tokens);
	if (e->tiers) {
		calibrate_prefill(e, &w->sched);
		if (o->kv_disk_dir)
			restart_load(o->kv_disk_dir, &e->identity, &w->sessions, &w->restart);
	}
	session_watches_init(&w->watches, &w->sessions, e->pool, &w->sched.parking);
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
	kv_page_merger_destroy(w.merger);
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
