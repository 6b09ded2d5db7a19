/* kvasir render: a chat template applied to conversations. */
#include "server/cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/tools.h"
#include "server/json.h"

enum { ARENA_BYTES = 64 << 20 };

struct args {
	char *template, *now;
	bool jsonl;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct args, template, "template", NULL,
                          "file that holds a Jinja template, or a built-in one's name"),
	OPTION_ROW_BOOL(struct args, jsonl, "jsonl",
                        "read lines {\"messages\":[...], ...}, print a line {\"prompt\":...} for each"),
	OPTION_ROW_STRING(struct args, now, "now", NULL,
                          "what strftime_now reads: \"2026-01-15 12:00:00\" (UTC) or Unix seconds"),
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
static bool trust(struct arena *a, struct value *vars, const struct json *root)
{
	static const char *const names[] = {"bos_token", "eos_token"};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		struct json member = json_get(root, names[i]);
		struct str s = json_text(&member);
		if (s.p &&
		    !value_dict_set(a, vars, names[i], strlen(names[i]), value_string(a, s.p, s.n, VALUE_TRUSTED)))
			return false;
	}
	return true;
}

static enum status render(const struct job *job, const struct json *root, struct buf *prompt, struct error *err)
{
	enum status st;
	struct arena *a = arena_create(ARENA_BYTES);
	struct value *vars = a ? json_to_value(a, root) : NULL;
	if (!vars || !trust(a, vars, root))
		st = error_set(err, STATUS_NOMEM, "out of memory");
	else
		st = engine_template_render(job->template, vars, job->now_unix_s, prompt, err);
	arena_destroy(a);
	return st;
}

static enum status render_line(void *arg, const char *line, size_t n, struct buf *out, struct error *err)
{
	struct error why;
	struct json_doc *doc = NULL;
	struct json root;
	struct buf prompt = BUF_INIT;
	(void)err; /* a line that is wrong is answered in its place; the others go on */
	enum status st = json_parse((struct str){line, n}, "The line", &doc, &root, &why);
	if (st == STATUS_OK)
		st = render(arg, &root, &prompt, &why);
	if (st == STATUS_OK) {
		buf_puts(out, "{\"prompt\":");
		buf_json_string(out, prompt.data ? prompt.data : "", prompt.len);
		buf_putc(out, '}');
	} else {
		cli_error_line(&why, out);
	}
	buf_free(&prompt);
	json_doc_free(doc);
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
		status = cli_misuse("--now \"%s\" does not fit; expected 2026-01-15 12:00:00 or seconds since 1970",
		                    args.now);
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
