/* kvasir serve: reads the configuration and runs the daemon, or shows or checks what it would run with. */
#include "server/cli.h"

#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "config/config.h"
#include "engine/tools.h"
#include "server/auth.h"
#include "server/mlflow.h"
#include "server/server.h"
#include "server/tls.h"

static void show_help(void)
{
	struct buf b = BUF_INIT;
	buf_puts(&b, "usage: kvasir serve --model FILE [options]\n\n"
	             "Serves a model over an OpenAI-compatible REST API and over WebSocket, on one port.\n\n");
	config_help(&b);
	buf_puts(&b, "  --config FILE                read options from a JSON file first\n"
	             "  --check                      validate the configuration and exit\n"
	             "  --print-config               print the effective configuration as JSON and exit\n\n"
	             "An option can also be set by the environment (--max-queue: KVASIR_MAX_QUEUE) and in the file "
	             "(max_queue).\n"
	             "The command line wins over the environment, the environment over the file.\n");
	if (b.data)
		cli_write(b.data, b.len);
	buf_free(&b);
}

static enum status check_keys(const struct config *c, struct error *err)
{
	struct buf text = BUF_INIT;
	struct auth *auth = malloc(sizeof *auth);
	enum status st = auth ? cli_api_keys(c->api_keys, &text, err) : error_set(err, STATUS_NOMEM, "out of memory");
	if (st == STATUS_OK) {
		auth_init(auth, c->api_key);
		st = auth_set_keys(auth, buf_str(&text), "api-keys", err);
	}
	buf_free(&text);
	free(auth);
	return st;
}

static enum status check_tls(const struct config *c, struct error *err)
{
	struct tls_context *context = NULL;
	enum status st = tls_context_create(c->tls_cert, c->tls_key, &context, err);
	tls_context_destroy(context);
	return st;
}

/* What can be told without loading the model. */
static enum status check(const struct config *c, struct error *err)
{
	struct buf template = BUF_INIT;
	enum status st = STATUS_OK;
	if (!c->model)
		return error_set_param(err, STATUS_INVALID, "model", "no model is named; give --model FILE");
	if (access(c->model, R_OK) != 0)
		return error_set_param(err, STATUS_IO, "model", "model: %.300s cannot be read", c->model);
	if (c->mlflow && c->mlflow[0] && mlflow_check_url(c->mlflow, err) != STATUS_OK)
		return err->status;
	if (c->chat_template)
		st = cli_chat_template(c->chat_template, &template, err);
	buf_free(&template);
	if (st == STATUS_OK && c->api_keys)
		st = check_keys(c, err);
	if (st == STATUS_OK && (!c->tls_cert != !c->tls_key))
		st = error_set_param(err, STATUS_INVALID, c->tls_cert ? "tls-key" : "tls-cert",
		                     "--tls-cert and --tls-key go together");
	return st;
}

static enum status check_template(const struct config *c, struct error *err)
{
	struct buf source = BUF_INIT;
	struct engine_template *t = NULL;
	enum status st = cli_chat_template(c->chat_template, &source, err);
	if (st == STATUS_OK)
		st = engine_template_open(buf_str(&source).p, source.len, &t, err);
	engine_template_close(t);
	buf_free(&source);
	return st;
}

/* What only fits some models. */
static enum status check_sizes(const struct config *c, struct error *err)
{
	const struct engine_plan_params params = {.model_path = c->model,
	                                          .context_tokens = (int32_t)c->context,
	                                          .rope_scaling = c->rope_scaling,
	                                          .n_sessions = 1,
	                                          .step_tokens = (int32_t)c->step_tokens,
	                                          .max_running = (int32_t)c->max_running};
	struct engine_plan plan;
	enum status st = engine_plan(&params, &plan, err);
	if (st == STATUS_OK && c->kv_memory && (uint64_t)c->kv_memory < plan.page_bytes)
		return error_set_param(err, STATUS_INVALID, "kv-memory",
		                       "kv-memory: %lld bytes are less than one page of %d tokens takes (%llu)",
		                       (long long)c->kv_memory, plan.page_tokens, (unsigned long long)plan.page_bytes);
	return st;
}

static enum status check_host(const char *host, struct error *err)
{
	size_t n = strlen(host);
	bool bracketed = n > 2 && host[0] == '[' && host[n - 1] == ']';
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
	char name[256];
	if (n == 0 || strcmp(host, "*") == 0)
		return STATUS_OK;
	snprintf(name, sizeof name, "%.*s", (int)(bracketed ? n - 2 : n), bracketed ? host + 1 : host);
	int r = getaddrinfo(name, NULL, &hints, &list);
	if (r != 0)
		return error_set_param(err, STATUS_INVALID, "host", "host: \"%.200s\" cannot be resolved: %s", host,
		                       gai_strerror(r));
	freeaddrinfo(list);
	return STATUS_OK;
}

/*
 * --check: also what takes a moment. When serving, the same is found on the way, and a model that fails to load is told
 * by readiness.
 */
static enum status check_deeply(const struct config *c, struct error *err)
{
	struct buf facts = BUF_INIT;
	struct engine_options options;
	enum status st = check(c, err);
	server_engine_options(c, &options);
	if (st == STATUS_OK && c->tls_cert)
		st = check_tls(c, err);
	if (st == STATUS_OK)
		st = check_host(c->host, err);
	if (st == STATUS_OK)
		st = engine_options_check(&options, err);
	if (st == STATUS_OK && c->chat_template)
		st = check_template(c, err);
	if (st == STATUS_OK)
		st = engine_inspect(c->model, true, &facts, err);
	if (st == STATUS_OK)
		st = check_sizes(c, err);
	if (st == STATUS_OK)
		st = engine_device_check(c->device, err);
	buf_free(&facts);
	return st;
}

int cli_serve(int argc, char **argv)
{
	struct config config;
	struct error err;
	struct buf dump = BUF_INIT;
	int status = CLI_FAILED;
	if (config_init(&config) != STATUS_OK)
		return cli_misuse("out of memory");
	if (config_load(&config, argc, argv, environ, &err) != STATUS_OK) {
		cli_fail(&err);
		goto out;
	}
	switch (config.action) {
	case CONFIG_HELP:
		show_help();
		status = CLI_OK;
		break;
	case CONFIG_PRINT:
		config_dump(&config, &dump);
		status = dump.data && cli_write(dump.data, dump.len) ? CLI_OK : CLI_FAILED;
		break;
	case CONFIG_CHECK:
		status = check_deeply(&config, &err) == STATUS_OK ? CLI_OK : cli_fail(&err);
		break;
	case CONFIG_SERVE:
		if (check(&config, &err) != STATUS_OK || server_run(&config, argc, argv, &err) != STATUS_OK)
			status = cli_fail(&err);
		else
			status = CLI_OK;
		break;
	}
out:
	buf_free(&dump);
	config_free(&config);
	return status;
}
