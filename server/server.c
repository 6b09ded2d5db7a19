/*
 * Life of the daemon:
 *   start    the listener opens at once, so that health checks get an answer; the engine loads in its worker
 *   ready    the engine's STATE event has come: the block on stdout, READY=1
 *   failed   it could not load: the daemon stays, readiness says why; restarting it in a circle would not help
 *   reload   SIGHUP: the configuration file, the API keys and the certificate are read again; what cannot be read
 *            changes nothing
 *   drain    the first signal: readiness fails, new work gets 503, running work ends or is cancelled at the deadline,
 *            WebSockets are closed with 1012, then the loop stops; a second signal ends the process at once
 * All of it runs on the loop thread; the engine only calls uv_async_send().
 */
#include "server/server.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "engine/base/log.h"
#include "engine/engine.h"
#include "server/app.h"
#include "server/cli.h"
#include "server/listener.h"
#include "server/loop.h"
#include "server/metrics.h"
#include "server/notify.h"
#include "server/ws.h"

enum {
	DRAIN_TICK_MS = 20,   /* how often a drain looks whether it is over */
	DRAIN_GRACE_MS = 2000, /* for cancelled work to end, and again for the last bytes to leave */
};

enum phase { PHASE_LOADING, PHASE_READY, PHASE_FAILED, PHASE_DRAINING, PHASE_CANCELLED, PHASE_CLOSING };

struct server {
	struct config *config;
	int argc; /* where it came from */
	char **argv;
	struct error *err;
	enum status status;
	enum phase phase;
	uv_loop_t loop;
	uv_async_t wake;
	uv_signal_t sigterm, sigint, sighup;
	struct engine *engine;
	struct app *app;
	struct mlflow *mlflow;
	struct listener *listener;
	bool listener_closed;
	struct loop_timer *drain_timer, *watchdog_timer;
	uint64_t phase_deadline_ms; /* on the loop's clock; DRAINING and later */
};

static void show_size(struct buf *b, uint64_t bytes)
{
	static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
	double v = (double)bytes;
	size_t u = 0;
	while (v >= 1024 && u + 1 < sizeof units / sizeof *units) {
		v /= 1024;
		u++;
	}
	buf_printf(b, u ? "%.1f %s" : "%.0f %s", v, units[u]);
}

/* The one block that says what now runs where. */
static void announce(struct server *s)
{
	const struct engine_info *info = engine_info(s->engine);
	const char *host = s->config->host;
	bool bare_ipv6 = strchr(host, ':') && host[0] != '[';
	struct engine_stats stats;
	struct buf b = BUF_INIT;
	buf_printf(&b, "kvasir %s is ready\n", KVASIR_VERSION);
	buf_printf(&b, "  listening  http%s://%s%s%s:%d\n", s->config->tls_cert ? "s" : "", bare_ipv6 ? "[" : "", host,
	           bare_ipv6 ? "]" : "", listener_port(s->listener));
	buf_printf(&b, "  model      %s (%s, %s, %.1f M parameters, ",
	           s->config->model_name ? s->config->model_name : info->file_name, info->arch, info->quantization,
	           (double)info->n_params / 1e6);
	show_size(&b, info->file_bytes);
	buf_printf(&b, ")\n  context    %d tokens (trained for %d", info->n_ctx, info->n_ctx_train);
	if (info->rope.chosen)
		buf_printf(&b, "; %s:%g, base %g, reaches %d", info->rope.scaling, (double)info->rope.factor,
		           (double)info->rope.freq_base, info->rope.reach);
	if (info->rope.chunk)
		buf_printf(&b, ", chunks of %d", info->rope.chunk);
	buf_puts(&b, ")\n");
	buf_printf(&b, "  compute    %s, %d thread%s\n", info->backend, info->n_threads,
	           info->n_threads == 1 ? "" : "s");
	buf_printf(&b, "  KV cache   %lld tokens in ", (long long)info->n_pages * info->page_tokens);
	show_size(&b, info->kv_bytes);
	buf_printf(&b, " (%d pages of %d)\n", info->n_pages, info->page_tokens);
	engine_stats(s->engine, &stats);
	for (int32_t i = 0; i < stats.tiers.n; i++) {
		const struct engine_tier *t = &stats.tiers.tier[i];
		buf_printf(&b, "%s%s%s", i ? ", " : "  below it   ", t->kind, t->cap_bytes ? " " : "");
		if (t->cap_bytes) /* a server's is its own affair */
			show_size(&b, t->cap_bytes);
	}
	if (stats.tiers.n)
		buf_putc(&b, '\n');
	if (info->chat_template_error)
		buf_printf(&b, "  chat       not available: %s\n", info->chat_template_error);
	if (b.data)
		cli_write(b.data, b.len);
	buf_free(&b);
	if (info->chat_template_error)
		log_msg(LOG_WARN, "chat_template", "%s%s", info->chat_template_error,
		        info->has_chat_template ? "; choose another with --chat-template" : "");
}

/* The engine has events, among them perhaps that loading has ended. */
static void on_wake(uv_async_t *handle)
{
	struct server *s = handle->data;
	app_handle_events(s->app);
	if (s->phase != PHASE_LOADING)
		return;
	switch (engine_state(s->engine)) {
	case ENGINE_LOADING:
		break;
	case ENGINE_READY:
		s->phase = PHASE_READY;
		announce(s);
		notify_service_manager("READY=1");
		notify_status("serving on port %d", listener_port(s->listener));
		break;
	case ENGINE_FAILED:
		/* An option that names something unknown is the caller's mistake, to be seen where it was made. */
		if (engine_load_error(s->engine)->param[0]) {
			*s->err = *engine_load_error(s->engine);
			s->status = s->err->status;
			uv_stop(&s->loop);
			break;
		}
		s->phase = PHASE_FAILED;
		log_msg(LOG_ERROR, "load", "the model could not be loaded: %s", engine_load_error(s->engine)->message);
		notify_status("the model could not be loaded: %s", engine_load_error(s->engine)->message);
		break;
	}
}

static void wake_loop(void *arg)
{
	struct server *s = arg;
	uv_async_send(&s->wake); /* fails only for a handle that is closing: the engine is destroyed before that */
}

static void enter(struct server *s, enum phase phase, uint64_t for_ms)
{
	s->phase = phase;
	s->phase_deadline_ms = uv_now(&s->loop) + for_ms;
}

/*
 * DRAINING: running work goes on. CANCELLED: the deadline has passed and what was left has been told to end. CLOSING:
 * nothing runs; the last bytes and the close frames leave. A drain ends by itself, and no phase outlasts its deadline.
 */
static void on_drain_tick(void *arg)
{
	struct server *s = arg;
	bool late = uv_now(&s->loop) >= s->phase_deadline_ms;
	if (s->phase == PHASE_DRAINING && late && app_active(s->app) > 0) {
		log_msg(LOG_WARN, "drain", "cancelling %d generations at the drain deadline", app_active(s->app));
		app_cancel_all(s->app);
		enter(s, PHASE_CANCELLED, DRAIN_GRACE_MS);
	} else if ((s->phase == PHASE_DRAINING || s->phase == PHASE_CANCELLED) && (late || app_active(s->app) == 0)) {
		listener_stop_accepting(s->listener);
		listener_close_websockets(s->listener, WS_CLOSE_SERVICE_RESTART, "the server restarts");
		enter(s, PHASE_CLOSING, DRAIN_GRACE_MS);
	} else if (s->phase == PHASE_CLOSING && (late || listener_active(s->listener) == 0)) {
		uv_stop(&s->loop);
	}
}

/*
 * The second signal ends the process, whatever state it is in. By its default action where that works; the first
 * process of a container has none, so it exits with the status that a shell would show.
 */
static void on_second_signal(int signo)
{
	raise(signo); /* SA_RESETHAND has brought the default action back */
	_exit(128 + signo);
}

static void on_signal(uv_signal_t *handle, int signo)
{
	struct server *s = handle->data;
	const struct sigaction at_once = {.sa_handler = on_second_signal, .sa_flags = (int)(SA_RESETHAND | SA_NODEFER)};
	uv_signal_stop(&s->sigterm);
	uv_signal_stop(&s->sigint);
	sigaction(SIGTERM, &at_once, NULL);
	sigaction(SIGINT, &at_once, NULL);
	log_msg(LOG_INFO, "drain", "%s: draining %d generations for up to %g s",
	        signo == SIGTERM ? "SIGTERM" : "SIGINT", app_active(s->app), (double)s->config->drain_timeout / 1000);
	notify_service_manager("STOPPING=1");
	notify_status("draining");
	app_start_drain(s->app);
	listener_drain(s->listener);
	uv_update_time(&s->loop);
	enter(s, PHASE_DRAINING, (uint64_t)s->config->drain_timeout);
	s->drain_timer = loop_timer_start(&s->loop, 0, DRAIN_TICK_MS, on_drain_tick, s);
	if (!s->drain_timer) {
		log_msg(LOG_ERROR, "drain", "out of memory; stopping at once");
		uv_stop(&s->loop);
	}
}

/* Reads the API keys into the application, if there are any to read. */
static enum status read_keys(struct server *s, struct error *err)
{
	struct buf text = BUF_INIT;
	if (!s->config->api_keys)
		return STATUS_OK;
	const char *where = s->config->api_keys[0] == '{' ? "api-keys" : s->config->api_keys;
	enum status st = cli_api_keys(s->config->api_keys, &text, err);
	if (st == STATUS_OK)
		st = app_set_keys(s->app, buf_str(&text), where, err);
	buf_free(&text);
	return st;
}

static void set_log_level(const struct config *config)
{
	enum log_level level = LOG_INFO;
	log_level_parse(config->log_level, &level);
	log_set_level(level);
}

static void say_reload(const char *what, enum status status, const struct error *err)
{
	if (status == STATUS_OK)
		log_msg(LOG_INFO, "reload", "SIGHUP: the %s read again", what);
	else
		log_msg(LOG_ERROR, "reload", "SIGHUP: the %s not read again and stays as it was: %s", what,
		        err->message);
}

/* Options of the file that can change while the daemon runs. */
static void reload_options(struct server *s)
{
	struct error err = {0};
	struct buf taken = BUF_INIT, later = BUF_INIT;
	enum status st = config_reload(s->config, s->argc, s->argv, environ, &taken, &later, &err);
	say_reload("configuration was", st, &err);
	set_log_level(s->config);
	if (taken.len)
		log_msg(LOG_INFO, "reload", "changed from now on: %s", taken.data);
	if (later.len)
		log_msg(LOG_WARN, "reload", "changes when the daemon is started again: %s", later.data);
	buf_free(&taken);
	buf_free(&later);
}

static void on_reload(uv_signal_t *handle, int signo)
{
	struct server *s = handle->data;
	struct error err = {0};
	(void)signo;
	if (s->config->has_file)
		reload_options(s);
	if (s->config->api_keys)
		say_reload("file of API keys was", read_keys(s, &err), &err);
	if (s->config->tls_cert)
		say_reload("certificate was", listener_reload_tls(s->listener, &err), &err);
	if (!s->config->has_file && !s->config->api_keys && !s->config->tls_cert)
		log_msg(LOG_INFO, "reload", "SIGHUP: there is nothing to read again");
}

static void listener_figures(void *listener, struct metrics_gauges *g)
{
	struct listener_stats stats;
	listener_stats(listener, &stats);
	g->connections = stats.connections;
	g->websockets = stats.websockets;
	g->websockets_parked = stats.parked;
	g->client_bytes = stats.client_bytes;
}

void server_engine_options(const struct config *c, struct engine_options *out)
{
	*out = (struct engine_options){
		.model_path = c->model,
		.device = c->device,
		.n_threads = (int32_t)c->threads,
		.context_tokens = (int32_t)c->context,
		.rope_scaling = c->rope_scaling,
		.kv_bytes = (uint64_t)c->kv_memory,
		.kv_type = c->kv_dtype,
		.kv_ram_bytes = (uint64_t)c->kv_ram,
		.kv_ram_type = c->kv_ram_dtype,
		.kv_disk_write_bytes_per_s = (uint64_t)c->kv_disk_rate,
		.kv_overflow_bytes = (uint64_t)c->kv_overflow,
		.kv_policy = c->kv_policy,
		.context_policy = c->context_policy,
		.max_cache_size = (int32_t)c->max_cache_size,
		.kv_bounds = c->kv_bounds,
		.kv_remote = c->kv_remote,
		.transfer_key = c->transfer_key,
		.max_running = (int32_t)c->max_running,
		.max_queue = (int32_t)c->max_queue,
		.step_tokens = (int32_t)c->step_tokens,
		.heartbeat_timeout_ms = c->session_heartbeat,
		.session_ttl_ms = c->session_ttl,
		.session_gc_ms = c->session_gc,
		.max_sessions = (int32_t)c->max_sessions,
		.session_tokens = (int32_t)c->session_tokens,
		.session_requests = (int32_t)c->session_requests,
		.request_timeout_ms = c->request_timeout,
	};
}

/* DIR:SIZE in its parts; *dir is malloc'd. NULL: neither. */
static enum status dir_and_size(const char *option, const char *value, char **dir, uint64_t *bytes, struct error *err)
{
	size_t n;
	int64_t size;
	*dir = NULL;
	*bytes = 0;
	if (!value)
		return STATUS_OK;
	enum status st = config_dir_size(option, value, &n, &size, err);
	if (st != STATUS_OK)
		return st;
	*bytes = (uint64_t)size;
	*dir = strndup(value, n);
	return *dir ? STATUS_OK : error_set(err, STATUS_NOMEM, "out of memory");
}

static enum status start_engine(struct server *s, const char *chat_template)
{
	const struct config *c = s->config;
	struct engine_options options;
	char *dir = NULL, *overflow_dir = NULL;
	server_engine_options(c, &options);
	enum status st = dir_and_size("kv-disk", c->kv_disk, &dir, &options.kv_disk_bytes, s->err);
	if (st == STATUS_OK)
		st = dir_and_size("kv-overflow-disk", c->kv_overflow_disk, &overflow_dir,
		                  &options.kv_overflow_disk_bytes, s->err);
	options.chat_template = chat_template;
	options.kv_disk_dir = dir;
	options.kv_overflow_dir = overflow_dir;
	options.wake = wake_loop;
	options.wake_arg = s;
	if (st == STATUS_OK)
		st = engine_create(&options, &s->engine, s->err);
	free(dir);
	free(overflow_dir);
	return st;
}

/* Figures of ended requests go to a tracking server, if there is to be one. */
static enum status start_mlflow(struct server *s, struct error *err)
{
	const struct mlflow_options options = {.url = s->config->mlflow, .experiment = s->config->mlflow_experiment};
	if (!options.url || !options.url[0])
		return STATUS_OK;
	const char *file = strrchr(s->config->model, '/');
	enum status st = mlflow_create(&options, &s->mlflow, err);
	if (st != STATUS_OK)
		return st;
	mlflow_set_param(s->mlflow, "version", KVASIR_VERSION);
	mlflow_set_param(s->mlflow, "model",
	                 s->config->model_name ? s->config->model_name
	                 : file                ? file + 1
	                                       : s->config->model);
	mlflow_set_param(s->mlflow, "device", s->config->device);
	mlflow_set_param(s->mlflow, "kv_policy", s->config->kv_policy);
	mlflow_set_param(s->mlflow, "context_policy", s->config->context_policy);
	app_set_mlflow(s->app, s->mlflow);
	return STATUS_OK;
}

static enum status start_signals(struct server *s)
{
	uv_signal_init(&s->loop, &s->sigterm);
	uv_signal_init(&s->loop, &s->sigint);
	uv_signal_init(&s->loop, &s->sighup);
	s->sigterm.data = s->sigint.data = s->sighup.data = s;
	int rc = uv_signal_start(&s->sigterm, on_signal, SIGTERM);
	if (rc == 0)
		rc = uv_signal_start(&s->sighup, on_reload, SIGHUP);
	if (rc == 0)
		rc = uv_signal_start(&s->sigint, on_signal, SIGINT);
	return rc == 0 ? STATUS_OK : error_set(s->err, STATUS_INTERNAL, "cannot watch signals: %s", uv_strerror(rc));
}

/*
 * The first process of a container loses a signal that it has no handler for yet; one that is blocked waits. The
 * threads that start meanwhile keep them blocked: signals belong to the loop thread.
 */
static void block_signals(int how)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	pthread_sigmask(how, &set, NULL);
}

static void on_watchdog(void *arg)
{
	(void)arg;
	notify_service_manager("WATCHDOG=1");
}

/* The service manager is told that the loop turns, twice as often as it asks to be. */
static void start_watchdog(struct server *s)
{
	uint64_t period_ms = notify_watchdog_ms() / 2;
	if (period_ms == 0)
		return;
	s->watchdog_timer = loop_timer_start(&s->loop, 0, period_ms, on_watchdog, NULL);
	if (!s->watchdog_timer)
		log_msg(LOG_WARN, "watchdog",
		        "out of memory; the service manager will not be told that the daemon lives");
}

static void on_listener_closed(void *arg)
{
	((struct server *)arg)->listener_closed = true;
}

static void close_handle(uv_handle_t *handle, void *arg)
{
	(void)arg;
	if (!uv_is_closing(handle))
		uv_close(handle, NULL);
}

enum status server_run(struct config *config, int argc, char **argv, struct error *err)
{
	struct server s = {.config = config, .argc = argc, .argv = argv, .err = err};
	struct buf template = BUF_INIT;
	int rc;

	set_log_level(config);
	signal(SIGPIPE, SIG_IGN);
	int n_descriptors = listener_allow_descriptors(config);
	block_signals(SIG_BLOCK);
	if (config->chat_template) {
		s.status = cli_chat_template(config->chat_template, &template, err);
		if (s.status != STATUS_OK)
			goto free_template;
	}
	loop_be_patient();
	rc = uv_loop_init(&s.loop);
	if (rc) {
		s.status = error_set(err, STATUS_INTERNAL, "cannot start the event loop: %s", uv_strerror(rc));
		goto free_template;
	}
	s.status = loop_reserve_descriptors(&s.loop, n_descriptors);
	if (s.status != STATUS_OK) {
		error_set(err, s.status, "There is no memory for the event loop.");
		goto close_loop;
	}
	rc = uv_async_init(&s.loop, &s.wake, on_wake);
	if (rc) {
		s.status = error_set(err, STATUS_INTERNAL, "cannot start the event loop: %s", uv_strerror(rc));
		goto close_loop;
	}
	s.wake.data = &s;
	s.status = start_engine(&s, config->chat_template ? template.data : NULL);
	if (s.status != STATUS_OK)
		goto close_loop;
	s.status = app_create(config, s.engine, &s.app);
	if (s.status != STATUS_OK) {
		error_set(err, s.status, "cannot start the application: %s", status_text(s.status));
		goto close_loop;
	}
	s.status = start_mlflow(&s, err);
	if (s.status == STATUS_OK)
		s.status = read_keys(&s, err);
	if (s.status != STATUS_OK)
		goto close_loop;
	s.status = listener_start(&s.loop, config, app_http(s.app), app_ws(s.app), &s.listener, err);
	if (s.status != STATUS_OK)
		goto close_loop;
	app_set_listener(s.app, s.listener, listener_figures);
	start_watchdog(&s);
	s.status = start_signals(&s);
	block_signals(SIG_UNBLOCK);
	if (s.status == STATUS_OK)
		uv_run(&s.loop, UV_RUN_DEFAULT);

	app_set_listener(s.app, NULL, NULL);
	loop_timer_stop(s.drain_timer);
	loop_timer_stop(s.watchdog_timer);
	listener_close(s.listener, on_listener_closed, &s);
	while (!s.listener_closed)
		uv_run(&s.loop, UV_RUN_ONCE);
close_loop:
	/* The app lets go of the engine, and the engine of `wake`, before the handles close. */
	app_destroy(s.app);
	engine_destroy(s.engine);
	mlflow_destroy(s.mlflow);
	uv_walk(&s.loop, close_handle, NULL);
	uv_run(&s.loop, UV_RUN_DEFAULT);
	rc = uv_loop_close(&s.loop);
	if (rc)
		log_msg(LOG_ERROR, "server", "the event loop still has work at the end: %s", uv_strerror(rc));
free_template:
	block_signals(SIG_UNBLOCK);
	buf_free(&template);
	return s.status;
}
