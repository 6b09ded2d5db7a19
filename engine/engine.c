/* The engine's public face: it checks options, starts and stops the threads, and turns calls into commands. */
#include <inttypes.h>
#include <stdlib.h>

#include "engine/engine_internal.h"
#include "engine/event.h"
#include "engine/kv/policy.h"
#include "engine/splitting.h"

/* ---- Life ---- */

static void fill_defaults(struct engine_options *o)
{
	if (o->max_running == 0)
		o->max_running = ENGINE_DEFAULT_MAX_RUNNING;
	if (o->max_queue == 0)
		o->max_queue = ENGINE_DEFAULT_MAX_QUEUE;
	if (o->step_tokens == 0)
		o->step_tokens = ENGINE_DEFAULT_STEP_TOKENS;
	if (o->step_tokens < o->max_running)
		o->step_tokens = o->max_running;
	if (o->max_sessions == 0)
		o->max_sessions = ENGINE_DEFAULT_MAX_SESSIONS;
	if (o->heartbeat_timeout_ms == 0)
		o->heartbeat_timeout_ms = 30000;
	if (o->session_ttl_ms == 0)
		o->session_ttl_ms = 300000;
	if (o->session_gc_ms == 0)
		o->session_gc_ms = 15000;
	if (!o->clock)
		o->clock = clock_system();
}

/* Also replaces the name of the policy by one that lives for ever. */
static enum status check_options(struct engine_options *o, struct rope_choice *rope, struct error *err)
{
	if (!o->model_path || !o->model_path[0])
		return error_set_param(err, STATUS_INVALID, "model", "no model file was given");
	if (o->n_threads < 0 || o->max_cache_size < 0 || o->context_tokens < 0 || o->max_running < 1 ||
	    o->max_queue < -1 || o->step_tokens < 1 || o->max_sessions < 1 || o->session_tokens < 0 ||
	    o->session_requests < 0 || o->request_timeout_ms < 0 || o->heartbeat_timeout_ms < 0 ||
	    o->session_ttl_ms < 0 || o->session_gc_ms < 0)
		return error_set(err, STATUS_INVALID, "an engine option is negative");
	enum status st = rope_choice_parse(o->rope_scaling, rope, err);
	if (st != STATUS_OK)
		return st;
	const char *policy = engine_kv_policy_find(o->kv_policy);
	if (!policy)
		return error_set_param(err, STATUS_INVALID, "kv-policy",
		                       "kv-policy: there is no eviction policy \"%.64s\"", o->kv_policy);
	o->kv_policy = policy;
	enum kv_policy_kind context;
	if (!kv_policy_find(o->context_policy ? o->context_policy : "full", &context))
		return error_set_param(err, STATUS_INVALID, "context-policy",
		                       "context-policy: there is no context policy \"%.64s\"", o->context_policy);
	o->context_policy = kv_policy_name(context);
	o->kv_bounds = o->kv_bounds || context == KV_POLICY_QUEST;
	if (context != KV_POLICY_FULL && rope->by_chunks)
		return error_set_param(err, STATUS_INVALID, "context-policy",
				       "context-policy: under rope-scaling dca it can only be \"full\"");
	if (context != KV_POLICY_FULL && o->max_cache_size == 0)
		return error_set_param(err, STATUS_INVALID, "max-cache-size",
		                       "context-policy: \"%s\" needs max-cache-size: how many tokens to keep",
		                       o->context_policy);
	enum kv_form type;
	if (!kv_form_find(o->kv_ram_type ? o->kv_ram_type : "f16", &type))
		return error_set_param(err, STATUS_INVALID, "kv-ram-dtype",
		                       "kv-ram-dtype: \"%.64s\" is none of f16, int8 and fp8_e4m3", o->kv_ram_type);
	o->kv_ram_type = kv_form_name(type);
	struct kv_choice choice;
	if (!kv_choice_find(o->kv_type, &choice))
		return error_set_param(err, STATUS_INVALID, "kv-dtype", "kv-dtype: \"%.64s\" is none of " KV_CHOICES,
		                       o->kv_type);
	o->kv_type = choice.form != KV_FORM_F16 ? kv_form_name(choice.form)
	             : choice.own               ? "auto"
	             : choice.type == QUANT_F16 ? "f16"
	                                        : "bf16";
	if (choice.form != KV_FORM_F16 && type != KV_FORM_F16)
		return error_set_param(
			err, STATUS_INVALID, "kv-ram-dtype",
			"kv-ram-dtype: pages that are %s by kv-dtype are kept as they are; leave kv-ram-dtype at f16",
			o->kv_type);
	return o->kv_remote ? kv_tier_remote_check(o->kv_remote, err) : STATUS_OK;
}

enum status engine_options_check(const struct engine_options *options, struct error *err)
{
	struct engine_options o = *options;
	struct rope_choice rope;
	fill_defaults(&o);
	return check_options(&o, &rope, err);
}

/*
 * The memory of a command and of its answer. A command that is dropped would strand whoever waits for its answer, so
 * these few hundred bytes are waited for: they come back as running work ends. What a client's input makes large can
 * fail.
 */
static void *wait_for_memory(size_t n)
{
	void *p;
	while (!(p = calloc(1, n)))
		sched_yield();
	return p;
}

static void drop_events(struct engine *e)
{
	struct list rest;
	list_init(&rest);
	mailbox_take(&e->events, &rest);
	for (struct list *l; (l = list_pop_front(&rest));)
		engine_event_free(list_entry(l, struct engine_event, link));
	mailbox_destroy(&e->events);
}

static void drop_all_commands(struct mailbox *m)
{
	struct list rest;
	list_init(&rest);
	mailbox_take(m, &rest);
	for (struct list *l; (l = list_pop_front(&rest));)
		command_destroy(list_entry(l, struct command, link));
}

static void stop_thread(struct mailbox *m, pthread_t thread)
{
	struct command *stop = wait_for_memory(sizeof *stop);
	stop->type = COMMAND_STOP;
	mailbox_post(m, &stop->link);
	pthread_join(thread, NULL);
	drop_all_commands(m);
	mailbox_destroy(m);
}

static char *copy_or_null(const char *s, bool *failed)
{
	char *copy = s ? strdup(s) : NULL;
	*failed = *failed || (s && !copy);
	return copy;
}

enum status engine_create(const struct engine_options *options, struct engine **out, struct error *err)
{
	enum status st;
	bool failed = false;
	struct rope_choice rope;
	struct engine_options o = *options;
	fill_defaults(&o);
	st = check_options(&o, &rope, err);
	if (st != STATUS_OK)
		return st;
	st = error_set(err, STATUS_NOMEM, "no memory for the engine");
	struct engine *e = calloc(1, sizeof *e);
	if (!e)
		return st;
	o.model_path = copy_or_null(o.model_path, &failed);
	o.chat_template = copy_or_null(o.chat_template, &failed);
	o.device = copy_or_null(o.device ? o.device : "cpu", &failed);
	o.kv_disk_dir = copy_or_null(o.kv_disk_dir, &failed);
	o.kv_overflow_dir = copy_or_null(o.kv_overflow_dir, &failed);
	o.kv_remote = copy_or_null(o.kv_remote, &failed);
	o.transfer_key = copy_or_null(o.transfer_key, &failed);
	o.rope_scaling = NULL; /* it is parsed */
	e->options = o;
	e->rope = rope;
	e->clock = o.clock;
	if (failed)
		goto fail_strings;
	if (pthread_mutex_init(&e->lock, NULL) != 0)
		goto fail_strings;
	if (mailbox_init(&e->text_box, NULL, NULL) != STATUS_OK)
		goto fail_text_box;
	if (mailbox_init(&e->worker_box, NULL, NULL) != STATUS_OK)
		goto fail_worker_box;
	if (mailbox_init(&e->events, o.wake, o.wake_arg) != STATUS_OK)
		goto fail_events;
	if (pthread_create(&e->worker_thread, NULL, worker_thread_main, e) != 0)
		goto fail_worker;
	if (pthread_create(&e->text_thread, NULL, text_thread_main, e) != 0)
		goto fail_text;
	*out = e;
	return STATUS_OK;

fail_text:
	stop_thread(&e->worker_box, e->worker_thread);
	drop_events(e);
	goto fail_worker_box;
fail_worker:
	mailbox_destroy(&e->events);
fail_events:
	mailbox_destroy(&e->worker_box);
fail_worker_box:
	mailbox_destroy(&e->text_box);
fail_text_box:
	pthread_mutex_destroy(&e->lock);
fail_strings:
	free((char *)o.model_path);
	free((char *)o.chat_template);
	free((char *)o.device);
	free((char *)o.kv_disk_dir);
	free((char *)o.kv_overflow_dir);
	free((char *)o.kv_remote);
	free((char *)o.transfer_key);
	free(e);
	return st;
}

void engine_destroy(struct engine *e)
{
	if (!e)
		return;
	stop_thread(&e->text_box, e->text_thread);
	stop_thread(&e->worker_box, e->worker_thread);
	drop_events(e);
	pthread_mutex_destroy(&e->lock);
	free((char *)e->options.model_path);
	free((char *)e->options.chat_template);
	free((char *)e->options.device);
	free((char *)e->options.kv_disk_dir);
	free((char *)e->options.kv_overflow_dir);
	free((char *)e->options.kv_remote);
	free((char *)e->options.transfer_key);
	free(e);
}

enum engine_state engine_state(const struct engine *e)
{
	return (enum engine_state)atomic_load_explicit(&((struct engine *)e)->state, memory_order_acquire);
}

const struct engine_info *engine_info(const struct engine *e)
{
	return engine_state(e) == ENGINE_READY ? &e->info : NULL;
}

const struct error *engine_load_error(const struct engine *e)
{
	return engine_state(e) == ENGINE_FAILED ? &e->load_error : NULL;
}

uint64_t engine_next_id(struct engine *e)
{
	return atomic_fetch_add(&e->next_id, 1) + 1;
}

struct str engine_token_piece(const struct engine *e, int32_t token)
{
	return tokenizer_piece(e->tokenizer, token, false);
}

void engine_stats(const struct engine *e, struct engine_stats *out)
{
	struct engine *m = (struct engine *)e;
	pthread_mutex_lock(&m->lock);
	*out = m->stats;
	out->kv.counted_ms_ago = clock_now_ms(m->clock) - m->census_ms;
	pthread_mutex_unlock(&m->lock);
}

void engine_tenant_usage(const struct engine *e, int32_t tenant, struct engine_tenant_usage *out)
{
	struct engine *m = (struct engine *)e;
	*out = (struct engine_tenant_usage){.id = -1};
	pthread_mutex_lock(&m->lock);
	if (tenant >= 0 && tenant < m->n_usage)
		*out = m->usage[tenant];
	pthread_mutex_unlock(&m->lock);
	if (out->id >= 0)
		out->refused += atomic_load(&m->tenants[tenant].refused);
}

/* ---- Events ---- */

bool engine_poll(struct engine *e, struct list *out)
{
	return mailbox_take(&e->events, out);
}

bool engine_wait(struct engine *e, struct list *out, int64_t timeout_ms)
{
	return mailbox_wait(&e->events, out, timeout_ms < 0 ? -1 : timeout_ms * 1000000);
}

/* ---- Commands ---- */

void command_destroy(struct command *c)
{
	engine_request_destroy(c->request);
	token_buf_free(&c->tokens);
	free(c->text);
	splitting_destroy(c->splitting);
	arena_destroy(c->arena);
	engine_event_free(c->reply);
	free(c);
}

void command_answer(struct engine *e, struct command *c, struct list *out)
{
	struct engine_event *ev = c->reply;
	c->reply = NULL;
	if (c->in_flight)
		flight_end(e, c->tenant);
	command_destroy(c);
	list_push_back(out, &ev->link);
}

void command_fail(struct engine *e, struct command *c, const struct error *err, struct list *out)
{
	event_set_error(c->reply, err);
	command_answer(e, c, out);
}

static struct command *command_create(struct engine *e, enum command_type type, uint64_t id,
                                      enum engine_event_type answer)
{
	struct command *c = wait_for_memory(sizeof *c);
	c->type = type;
	c->id = id;
	c->submitted_ns = clock_now_ns(e->clock);
	c->reply = wait_for_memory(sizeof *c->reply);
	event_init(c->reply, answer, id);
	return c;
}

/* Answers a command that does not get as far as a thread. */
static void refuse(struct engine *e, struct command *c, const struct error *err)
{
	struct list out;
	list_init(&out);
	command_fail(e, c, err, &out);
	mailbox_post_all(&e->events, &out);
}

void flight_end(struct engine *e, int32_t tenant)
{
	atomic_fetch_sub(&e->tenants[tenant].n_in_flight, 1);
	atomic_fetch_sub(&e->n_in_flight, 1);
}

/* Only the loop adds, so what it has read can only have become less. */
static enum status flight_begin(struct engine *e, int32_t tenant, struct error *err)
{
	if (tenant < 0 || tenant >= ENGINE_MAX_TENANTS)
		return error_set(err, STATUS_INVALID, "there is no tenant %" PRId32, tenant);
	int32_t most = e->options.max_queue < 0 ? INT32_MAX : e->options.max_running + e->options.max_queue;
	int32_t cap = atomic_load(&e->tenants[tenant].max_requests);
	int32_t mine = atomic_load(&e->tenants[tenant].n_in_flight);
	if (cap > 0 && mine >= cap) {
		atomic_fetch_add(&e->tenants[tenant].refused, 1);
		return error_set_param(err, STATUS_LIMIT, "max_requests",
		                       "this API key has %" PRId32
		                       " generations running or waiting, the most that its max_requests (%" PRId32
		                       ") allows; try again later",
		                       mine, cap);
	}
	if (atomic_load(&e->n_in_flight) >= most)
		return error_set(err, STATUS_LIMIT,
		                 "%" PRId32
		                 " requests are running or waiting, the most that are allowed; try again later",
		                 most);
	atomic_fetch_add(&e->tenants[tenant].n_in_flight, 1);
	atomic_fetch_add(&e->n_in_flight, 1);
	return STATUS_OK;
}

void engine_submit(struct engine *e, struct engine_request *r)
{
	struct command *c = command_create(e, COMMAND_GENERATE, r->id, ENGINE_EVENT_ERROR);
	struct error err;
	c->request = r;
	c->tenant = r->tenant;
	if (!r->background && flight_begin(e, r->tenant, &err) != STATUS_OK) {
		refuse(e, c, &err);
		return;
	}
	c->in_flight = !r->background;
	mailbox_post(&e->text_box, &c->link);
}

void engine_tenant_set(struct engine *e, const struct engine_tenant *tenant)
{
	if (tenant->id < 0 || tenant->id >= ENGINE_MAX_TENANTS)
		return;
	struct command *c = wait_for_memory(sizeof *c);
	c->type = COMMAND_TENANT;
	c->set = *tenant;
	atomic_store(&e->tenants[tenant->id].max_requests, tenant->limits.max_requests);
	mailbox_post(&e->worker_box, &c->link);
}

void engine_cancel(struct engine *e, uint64_t id)
{
	struct mailbox *boxes[] = {&e->text_box, &e->worker_box};
	for (size_t i = 0; i < 2; i++) {
		struct command *c = wait_for_memory(sizeof *c);
		c->type = COMMAND_CANCEL;
		c->id = id;
		mailbox_post(boxes[i], &c->link);
	}
}

void engine_hurry(struct engine *e, uint64_t id)
{
	struct command *c = wait_for_memory(sizeof *c);
	c->type = COMMAND_HURRY;
	c->id = id;
	mailbox_post(&e->worker_box, &c->link);
}

static void refuse_for_memory(struct engine *e, struct command *c)
{
	struct error err;
	error_set(&err, STATUS_NOMEM, "no memory for the request");
	refuse(e, c, &err);
}

void engine_tokenize(struct engine *e, uint64_t id, const char *text, size_t n, bool add_special, bool parse_special)
{
	struct command *c = command_create(e, COMMAND_TOKENIZE, id, ENGINE_EVENT_TOKENS);
	c->text = malloc(n + 1);
	if (!c->text) {
		refuse_for_memory(e, c);
		return;
	}
	memcpy(c->text, text, n);
	c->text_n = n;
	c->tokenize_flags = (add_special ? TOKENIZE_ADD_BOS_EOS : 0u) | (parse_special ? TOKENIZE_SPECIAL : 0u);
	mailbox_post(&e->text_box, &c->link);
}

void engine_tokenize_chat(struct engine *e, uint64_t id, struct arena *arena, struct value *chat)
{
	struct command *c = command_create(e, COMMAND_TOKENIZE_CHAT, id, ENGINE_EVENT_TOKENS);
	c->arena = arena;
	c->chat = chat;
	mailbox_post(&e->text_box, &c->link);
}

void engine_split(struct engine *e, uint64_t id, struct buf *text, const struct engine_split_params *params)
{
	struct command *c = command_create(e, COMMAND_SPLIT, id, ENGINE_EVENT_SPLIT);
	c->splitting = splitting_create(params);
	c->reply->text = *text;
	*text = BUF_INIT;
	if (!c->splitting || c->reply->text.failed) {
		refuse_for_memory(e, c);
		return;
	}
	mailbox_post(&e->text_box, &c->link);
}

void engine_detokenize(struct engine *e, uint64_t id, const int32_t *ids, size_t n)
{
	struct command *c = command_create(e, COMMAND_DETOKENIZE, id, ENGINE_EVENT_TEXT);
	for (size_t i = 0; i < n; i++) {
		if (!token_buf_add(&c->tokens, ids[i])) {
			refuse_for_memory(e, c);
			return;
		}
	}
	mailbox_post(&e->text_box, &c->link);
}

static void session_command(struct engine *e, enum command_type type, uint64_t id, enum engine_event_type answer,
                            const struct engine_session_params *p)
{
	struct command *c = command_create(e, type, id, answer);
	c->session = *p;
	c->tenant = p->tenant;
	mailbox_post(&e->worker_box, &c->link);
}

/* A session by its id. One that is too long names no session: it becomes "", which none has, and never a shorter id. */
static struct engine_session_params named(int32_t tenant, const char *session)
{
	struct engine_session_params p = {.tenant = tenant};
	size_t n = strnlen(session, sizeof p.id);
	if (n < sizeof p.id)
		memcpy(p.id, session, n);
	return p;
}

void engine_session_create(struct engine *e, uint64_t id, const struct engine_session_params *p)
{
	session_command(e, COMMAND_SESSION_CREATE, id, ENGINE_EVENT_SESSION, p);
}

void engine_session_get(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	struct engine_session_params p = named(tenant, session);
	session_command(e, COMMAND_SESSION_GET, id, ENGINE_EVENT_SESSION, &p);
}

void engine_session_heartbeat(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	struct engine_session_params p = named(tenant, session);
	session_command(e, COMMAND_SESSION_HEARTBEAT, id, ENGINE_EVENT_SESSION, &p);
}

void engine_session_watch(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	struct engine_session_params p = named(tenant, session);
	session_command(e, COMMAND_SESSION_WATCH, id, ENGINE_EVENT_CONTEXT, &p);
}

void engine_session_delete(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	struct engine_session_params p = named(tenant, session);
	session_command(e, COMMAND_SESSION_DELETE, id, ENGINE_EVENT_SESSION, &p);
}

void engine_session_export(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	struct engine_session_params p = named(tenant, session);
	session_command(e, COMMAND_SESSION_EXPORT, id, ENGINE_EVENT_EXPORT, &p);
}

void engine_session_export_next(struct engine *e, uint64_t id)
{
	struct command *c = command_create(e, COMMAND_EXPORT_NEXT, id, ENGINE_EVENT_EXPORT);
	mailbox_post(&e->worker_box, &c->link);
}

void engine_session_import(struct engine *e, uint64_t id, int32_t tenant, const char *session)
{
	struct engine_session_params p = named(tenant, session);
	session_command(e, COMMAND_SESSION_IMPORT, id, ENGINE_EVENT_IMPORT, &p);
}

void engine_session_import_data(struct engine *e, uint64_t id, char *data, size_t n)
{
	struct command *c = command_create(e, COMMAND_IMPORT_DATA, id, ENGINE_EVENT_IMPORT);
	c->text = data;
	c->text_n = n;
	mailbox_post(&e->worker_box, &c->link);
}

static void list_command(struct engine *e, enum command_type type, uint64_t id, enum engine_event_type answer,
                         int32_t tenant, const struct engine_session_page *page)
{
	struct command *c = command_create(e, type, id, answer);
	c->tenant = tenant;
	c->page = *page;
	mailbox_post(&e->worker_box, &c->link);
}

void engine_session_list(struct engine *e, uint64_t id, int32_t tenant, const struct engine_session_page *page)
{
	list_command(e, COMMAND_SESSION_LIST, id, ENGINE_EVENT_SESSIONS, tenant, page);
}

void engine_kv_report(struct engine *e, uint64_t id, int32_t tenant, const struct engine_session_page *page)
{
	list_command(e, COMMAND_KV_REPORT, id, ENGINE_EVENT_KV, tenant, page);
}
