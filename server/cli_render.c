/* kvasir render: a chat template applied to conversations. */
#include "server/cli.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine.h"
#include "server/json.h"

enum { ARENA_BYTES = 64 << 20 };

struct args {
	char *template, *now;
	bool jsonl;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct args, template, "template", NULL, "file that holds a Jinja template, or a built-in one's name"),
	OPTION_ROW_BOOL(struct args, jsonl, "jsonl", "read lines {\"messages\":[...], ...}, print a line {\"prompt\":...} for each"),
	OPTION_ROW_STRING(struct args, now, "now", NULL, "what strftime_now reads: \"2026-01-15 12:00:00\" (UTC) or Unix seconds"),
};

static const struct cli_usage usage = {
	"kvasir render --template FILE --jsonl [--now TIME]",
	"Renders a chat template. Each line of input holds the template's variables; bos_token and eos_token\n"
	"among them are taken as the model's own. A conversation that the template refuses prints {\"error\":...}.",
	{rows, sizeof rows / sizeof *rows},
};

struct job {
	struct engine_template *template;
	int64_t now_unix_s;
};

static bool parse_now(const char *text, int64_t *unix_s)
{
	struct tm tm = {0};
	char *end;
	long long seconds = strtoll(text, &end, 10);
	if (end != text && *end == '\0') {
		*unix_s = seconds;
		return true;
	}
	end = strptime(text, "%Y-%m-%d", &tm);
	if (end && (*end == ' ' || *end == 'T'))
		end = strptime(end + 1, "%H:%M:%S", &tm);
	if (!end || (*end && strcmp(end, "Z") != 0))
		return false;
	*unix_s = timegm(&tm);
	return true;
}

/* The model's own strings may become control tokens; everything else on the line is text of a user. */
static bool trust(struct arena *a, struct value *vars, const json_t *root)
{
	static const char *const names[] = {"bos_token", "eos_token"};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		const json_t *v = json_object_get(root, names[i]);
		if (json_is_string(v) &&
		    !value_dict_set(a, vars, names[i], strlen(names[i]),
		                    value_string(a, json_string_value(v), json_string_length(v), VALUE_TRUSTED)))
			return false;
	}
	return true;
}

static enum status render(const struct job *job, const json_t *root, struct buf *prompt, struct error *err)
{
	enum status st = STATUS_OK;
	struct arena *a = arena_create(ARENA_BYTES);
	struct value *vars = NULL;
	if (!a)
		return error_set(err, STATUS_NOMEM, "out of memory");
	if (!json_is_object(root))
		st = error_set(err, STATUS_INVALID, "expected an object");
	if (st == STATUS_OK)
		st = json_to_value(root, a, &vars, err);
	if (st == STATUS_OK && !trust(a, vars, root))
		st = error_set(err, STATUS_NOMEM, "out of memory");
	if (st == STATUS_OK)
		st = engine_template_render(job->template, vars, job->now_unix_s, prompt, err);
	arena_destroy(a);
	return st;
}

static enum status render_line(void *arg, const char *line, size_t n, struct buf *out, struct error *err)
{
	struct error why;
	struct buf prompt = BUF_INIT;
	json_error_t json_err;
	json_t *root = json_loadb(line, n, JSON_ALLOW_NUL, &json_err);
	bool ok = root && render(arg, root, &prompt, &why) == STATUS_OK;
	(void)err; /* a line that is wrong is answered in its place; the others go on */
	if (!root)
		error_set(&why, STATUS_INVALID, "not valid JSON: %s", json_err.text);
	buf_puts(out, ok ? "{\"prompt\":" : "{\"error\":");
	if (ok)
		buf_json_string(out, prompt.data ? prompt.data : "", prompt.len);
	else
		buf_json_string(out, why.message, strlen(why.message));
	buf_putc(out, '}');
	buf_free(&prompt);
	json_decref(root);
	return STATUS_OK;
}

int cli_render(int argc, char **argv)
{
	struct args args;
	struct error err;
	struct job job = {NULL, (int64_t)time(NULL)};
	struct buf source = BUF_INIT;
	int status;
	if (cli_read_args(&usage, &args, argc, argv, NULL, &status) == CLI_STOP)
		goto out;
	if (!args.template || !args.jsonl) {
		status = cli_misuse("render needs --template FILE and --jsonl");
		goto out;
	}
	if (args.now && !parse_now(args.now, &job.now_unix_s)) {
		status = cli_misuse("--now \"%s\" does not fit; expected 2026-01-15 12:00:00 or seconds since 1970", args.now);
		goto out;
	}
	if (cli_chat_template(args.template, &source, &err) != STATUS_OK ||
	    engine_template_open(source.data ? source.data : "", source.len, &job.template, &err) != STATUS_OK ||
	    cli_each_line(render_line, &job, &err) != STATUS_OK)
		status = cli_fail(&err);
	else
		status = CLI_OK;
out:
	engine_template_close(job.template);
	buf_free(&source);
	option_free(usage.options, &args);
	return status;
}
