#include "tests/unit/unit.h"

#include <stdio.h>
#include <unistd.h>

#include "config/config.h"

static int set_up(void **state)
{
	struct config *c = calloc(1, sizeof *c);
	*state = c;
	return !c || config_init(c) != STATUS_OK;
}

static int tear_down(void **state)
{
	config_free(*state);
	free(*state);
	return 0;
}

/* A file with this content, and its name. */
static void write_file(char path[64], const char *text)
{
	strcpy(path, "/tmp/kvasir-config-XXXXXX");
	int fd = mkstemp(path);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, strlen(text)), strlen(text));
	close(fd);
}

static enum status read_text(struct config *c, const char *text, struct error *err)
{
	char path[64];
	write_file(path, text);
	enum status st = config_read_file(c, path, err);
	unlink(path);
	return st;
}

/* The message after "PATH". */
static const char *after_path(const struct error *err)
{
	const char *p = strchr(err->message, ':');
	assert_non_null(p);
	return p;
}

/* Argument vectors are not const in C, though nobody writes to them. */
#define ARG(text) ((char *)(uintptr_t)(text))
#define ARGV(...) ((char *[]){ARG("kvasir"), __VA_ARGS__, NULL})

static enum status load(struct config *c, char **argv, char **envp, struct error *err)
{
	int argc = 0;
	while (argv[argc])
		argc++;
	return config_load(c, argc, argv, envp, err);
}

static void the_defaults_are_sound(void **state)
{
	struct config *c = *state;
	struct error err;
	assert_int_equal(config_check(c, &err), STATUS_OK);
	assert_string_equal(c->host, "127.0.0.1");
	assert_int_equal(c->port, 8080);
	assert_int_equal(c->session_heartbeat, 30000);
	assert_null(c->model);
}

static void a_later_source_wins(void **state)
{
	struct config *c = *state;
	struct error err;
	char path[64], config_var[96];
	write_file(path, "{\"port\": 1, \"threads\": 1, \"context\": 1, \"model\": \"file\"}");
	snprintf(config_var, sizeof config_var, "KVASIR_CONFIG=%s", path);
	char *envp[] = {config_var, ARG("KVASIR_PORT=2"), ARG("KVASIR_THREADS=2"),
	                ARG("OTHER=x"), ARG("KVASIR_TEST_MODEL=x"), NULL};
	assert_int_equal(load(c, ARGV(ARG("--port"), ARG("3")), envp, &err), STATUS_OK);
	assert_int_equal(c->port, 3);
	assert_int_equal(c->threads, 2);
	assert_int_equal(c->context, 1);
	assert_string_equal(c->model, "file");
	unlink(path);
}

static void a_named_file_wins_over_the_variable(void **state)
{
	struct config *c = *state;
	struct error err;
	char path[64], arg[96];
	write_file(path, "{\"port\": 4}");
	snprintf(arg, sizeof arg, "--config=%s", path);
	char *envp[] = {ARG("KVASIR_CONFIG=/nonexistent"), NULL};
	assert_int_equal(load(c, ARGV(arg), envp, &err), STATUS_OK);
	assert_int_equal(c->port, 4);
	unlink(path);
}

static void a_file_sets_every_kind(void **state)
{
	struct config *c = *state;
	struct error err;
	assert_int_equal(
		read_text(c,
	                  "{\"model\": \"m.gguf\", \"strict-model\": true, \"port\": 0, \"kv_memory\": \"2G\",\n"
	                  " \"max_body\": 2048, \"session_ttl\": 1.5, \"session_gc\": \"5ms\", \"api_key\": null}",
	                  &err),
		STATUS_OK);
	assert_string_equal(c->model, "m.gguf");
	assert_true(c->strict_model);
	assert_int_equal(c->port, 0);
	assert_int_equal(c->kv_memory, 2LL << 30);
	assert_int_equal(c->max_body, 2048);
	assert_int_equal(c->session_ttl, 1500);
	assert_int_equal(c->session_gc, 5);
	assert_null(c->api_key);
}

static void errors_in_a_file_name_the_line(void **state)
{
	struct config *c = *state;
	struct error err;
	const struct {
		const char *text, *message;
	} cases[] = {
		{"{\n\"port\": 8080,\n\"prot\": 1}", ":3: unknown option \"prot\"; did you mean \"port\"?"},
		{"{\n\n\"port\" :\n\"8080\"}",
	         ":3: port: \"8080\" does not fit; expected a whole number from 0 to 65535"},
		{"{\"host\": \"port\",\n\"port\": 70000}",
	         ":2: port: \"70000\" does not fit; expected a whole number from 0 to 65535"},
		{"{\"strict_model\": 1}", ":1: strict-model: \"1\" does not fit; expected true or false"},
		{"{\"port\": true}", ":1: port: \"true\" does not fit; expected a whole number from 0 to 65535"},
		{"{\"port\": 1.5}", ":1: port: \"1.5\" does not fit; expected a whole number from 0 to 65535"},
		{"{\"model\": {\"port\": 1},\n\"port\": 2}", ":1: model: \"{...}\" does not fit; expected text"},
		{"{\"model\": 5}", ":1: model: \"5\" does not fit; expected text"},
		{"[1]", ":1: expected one JSON object with options"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		assert_int_equal(read_text(c, cases[i].text, &err), STATUS_INVALID);
		assert_string_equal(after_path(&err), cases[i].message);
	}
	assert_int_equal(read_text(c, "{\n\"port\": 1,\n\"port\": 2}", &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, ":3: not valid JSON: "));
	assert_int_equal(read_text(c, "{\n\"port\": ", &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "not valid JSON"));
	assert_int_equal(config_read_file(c, "/nonexistent.json", &err), STATUS_IO);
	assert_string_equal(err.message, "/nonexistent.json: cannot be opened: No such file or directory");
}

static void errors_in_the_environment_name_the_variable(void **state)
{
	struct config *c = *state;
	struct error err;
	char *envp[] = {ARG("KVASIR_MAX_QUEUE=many"), NULL};
	assert_int_equal(config_read_env(c, envp, &err), STATUS_INVALID);
	assert_string_equal(
		err.message,
		"KVASIR_MAX_QUEUE: max-queue: \"many\" does not fit; expected a whole number from 1 to 1048576");
}

static void an_empty_text_is_not_set(void **state)
{
	struct config *c = *state;
	struct error err;
	char *envp[] = {ARG("KVASIR_API_KEY="), ARG("KVASIR_CORS_ORIGIN="), NULL};
	assert_int_equal(load(c, ARGV(ARG("--model=m")), envp, &err), STATUS_OK);
	assert_null(c->api_key);
	assert_string_equal(c->cors_origin, "");
}

static void contradictions_are_found(void **state)
{
	struct config *c = *state;
	struct error err;
	c->step_tokens = 16;
	assert_int_equal(config_check(c, &err), STATUS_INVALID);
	assert_string_equal(err.param, "step-tokens");
	c->step_tokens = 512;
	c->session_heartbeat = c->session_ttl + 1;
	assert_int_equal(config_check(c, &err), STATUS_INVALID);
	assert_string_equal(err.param, "session-heartbeat");
	c->session_heartbeat = c->session_ttl;
	c->kv_overflow_disk = strdup("/var/overflow");
	assert_int_equal(config_check(c, &err), STATUS_INVALID);
	assert_string_equal(
		err.message,
		"kv-overflow-disk: \"/var/overflow\" does not fit; expected DIR:SIZE, such as /var/cache/kvasir:20G");
	free(c->kv_overflow_disk);
	c->kv_overflow_disk = strdup("/var:/overflow:3G");
	size_t dir_n;
	int64_t bytes;
	assert_int_equal(config_check(c, &err), STATUS_OK);
	assert_int_equal(config_dir_size("kv-overflow-disk", c->kv_overflow_disk, &dir_n, &bytes, &err), STATUS_OK);
	assert_int_equal(dir_n, strlen("/var:/overflow"));
	assert_int_equal(bytes, 3LL << 30);
	free(c->log_level);
	c->log_level = strdup("loud");
	assert_int_equal(config_check(c, &err), STATUS_INVALID);
	assert_string_equal(err.message, "log-level: \"loud\" does not fit; expected debug, info, warn, error or off");
}

static void origins_are_what_browsers_send(void **state)
{
	static const char *const good[] = {"",
	                                   "*",
	                                   "null",
	                                   "https://chat.example",
	                                   "http://localhost:3000, https://a-b.example:8443",
	                                   "http://[::1]:80",
	                                   "chrome-extension://abcdefgh",
	                                   ",https://a.example,"};
	static const char *const bad[] = {"a.example",
	                                  "https://a.example/",
	                                  "https://a.example/path",
	                                  "*, https://a.example",
	                                  "https://a.example\nX-A: b",
	                                  "https://",
	                                  "://a",
	                                  "https:/a",
	                                  "https://a b",
	                                  "https://\xc3\xa9.example",
	                                  "https://*.example"};
	struct config *c = *state;
	struct error err;
	for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
		free(c->cors_origin);
		c->cors_origin = strdup(good[i]);
		assert_int_equal(config_check(c, &err), STATUS_OK);
	}
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		free(c->cors_origin);
		c->cors_origin = strdup(bad[i]);
		assert_int_equal(config_check(c, &err), STATUS_INVALID);
		assert_string_equal(err.param, "cors-origin");
	}
}

static void keys_are_what_a_header_can_carry(void **state)
{
	static const char *const bad[] = {"sesame\n", " sesame", "sesame ", "ses\tame", "\x7f"};
	struct config *c = *state;
	struct error err;
	c->api_key = strdup("open sesame \xc3\xa9!");
	assert_int_equal(config_check(c, &err), STATUS_OK);
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		free(c->api_key);
		c->api_key = strdup(bad[i]);
		assert_int_equal(config_check(c, &err), STATUS_INVALID);
		assert_string_equal(err.param, "api-key");
	}
}

static void actions_are_told_from_values(void **state)
{
	struct config *c = *state;
	struct error err;
	char *none[] = {NULL};
	assert_int_equal(load(c, ARGV(ARG("--model"), ARG("--check")), none, &err), STATUS_OK);
	assert_int_equal(c->action, CONFIG_SERVE);
	assert_string_equal(c->model, "--check");
	assert_int_equal(load(c, ARGV(ARG("--check"), ARG("--port=9")), none, &err), STATUS_OK);
	assert_int_equal(c->action, CONFIG_CHECK);
	assert_int_equal(c->port, 9);
	assert_int_equal(load(c, ARGV(ARG("--port"), ARG("x"), ARG("--help")), none, &err),
	                 STATUS_OK);
	assert_int_equal(c->action, CONFIG_HELP);
	assert_int_equal(load(c, ARGV(ARG("--config")), none, &err), STATUS_INVALID);
}

static void the_dump_is_a_configuration_file_without_secrets(void **state)
{
	struct config *c = *state;
	struct error err;
	struct buf dump = BUF_INIT, help = BUF_INIT;
	config_dump(c, &dump);
	assert_non_null(strstr(dump.data, "\"api_key\": null"));
	assert_int_equal(read_text(c, dump.data, &err), STATUS_OK);
	c->api_key = strdup("sesame");
	buf_clear(&dump);
	config_dump(c, &dump);
	assert_non_null(strstr(dump.data, "\"api_key\": \"***\""));
	assert_null(strstr(dump.data, "sesame"));
	config_help(&help);
	assert_non_null(strstr(help.data, "--session-heartbeat TIME"));
	assert_non_null(strstr(help.data, "(30s)"));
	buf_free(&help);
	buf_free(&dump);
}

/* Rewrites a file of that name. */
static void rewrite(const char *path, const char *text)
{
	FILE *f = fopen(path, "w");
	assert_non_null(f);
	assert_true(fputs(text, f) >= 0);
	assert_int_equal(fclose(f), 0);
}

static void a_running_process_takes_over_what_can_change(void **state)
{
	struct config *c = *state;
	struct error err;
	struct buf taken = BUF_INIT, later = BUF_INIT;
	char path[64], *none[] = {NULL};
	write_file(path, "{\"port\":1,\"cors_origin\":\"https://a.example\",\"body_timeout\":5}");
	char *argv[] = {ARG("kvasir"), ARG("--config"), path, ARG("--log-level=warn"), NULL};
	assert_int_equal(config_load(c, 4, argv, none, &err), STATUS_OK);
	assert_true(c->has_file);

	/* Nothing has changed. */
	assert_int_equal(config_reload(c, 4, argv, none, &taken, &later, &err), STATUS_OK);
	assert_int_equal(taken.len + later.len, 0);

	/* What can change has; the command line still wins, and the rest waits. */
	rewrite(path, "{\"port\":2,\"cors_origin\":\"\",\"log_level\":\"debug\",\"model\":\"m\"}");
	assert_int_equal(config_reload(c, 4, argv, none, &taken, &later, &err), STATUS_OK);
	assert_string_equal(taken.data, "cors-origin, body-timeout");
	assert_string_equal(later.data, "model, port");
	assert_string_equal(c->cors_origin, "");
	assert_string_equal(c->log_level, "warn");
	assert_int_equal(c->body_timeout, 60000);
	assert_int_equal(c->port, 1);
	assert_null(c->model);

	/* A mistake changes nothing, not even what stands before it. */
	rewrite(path, "{\"body_timeout\":7,\"idle_timeout\":\"never\"}");
	buf_clear(&taken);
	assert_int_equal(config_reload(c, 4, argv, none, &taken, &later, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "idle-timeout"));
	assert_int_equal(c->body_timeout, 60000);
	assert_int_equal(taken.len, 0);
	unlink(path);
	assert_int_equal(config_reload(c, 4, argv, none, &taken, &later, &err), STATUS_IO);
	buf_free(&taken);
	buf_free(&later);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)

UNIT_MAIN(TEST(the_defaults_are_sound), TEST(a_later_source_wins), TEST(a_named_file_wins_over_the_variable),
	  TEST(a_file_sets_every_kind), TEST(errors_in_a_file_name_the_line),
	  TEST(errors_in_the_environment_name_the_variable), TEST(an_empty_text_is_not_set),
	  TEST(contradictions_are_found), TEST(origins_are_what_browsers_send), TEST(keys_are_what_a_header_can_carry),
	  TEST(actions_are_told_from_values), TEST(the_dump_is_a_configuration_file_without_secrets),
	  TEST(a_running_process_takes_over_what_can_change))
