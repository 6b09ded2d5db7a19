/* kvasir tokenize: text to token ids, with the vocabulary of a model file alone. */
#include "server/cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tools.h"
#include "server/json.h"

struct args {
	char *model, *text;
	bool jsonl, add_special, parse_special;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct args, model, "model", NULL, "GGUF file; one without tensors is enough"),
	OPTION_ROW_STRING(struct args, text, "text", NULL, "the text; - reads it from standard input"),
	OPTION_ROW_BOOL(struct args, jsonl, "jsonl",
                        "read lines {\"text\":...} and print a line {\"ids\":[...]} for each"),
	OPTION_ROW_BOOL(struct args, add_special, "add-special", "add the tokens the model wants around a text (BOS)"),
	OPTION_ROW_BOOL(struct args, parse_special, "parse-special", "recognise control tokens written in the text"),
};

static const struct cli_usage usage = {
	"kvasir tokenize --model FILE (--text TEXT | --jsonl) [--add-special] [--parse-special]",
	"Prints the token ids of a text.",
	{rows, sizeof rows / sizeof *rows},
};

struct job {
	struct engine_vocab *vocab;
	const struct args *args;
};

/* Appends {"ids":[...]}, or {"error":...} for a text that cannot be encoded. */
static enum status encode(const struct job *job, const char *text, size_t n, struct buf *out, struct error *err)
{
	int32_t *ids = NULL;
	size_t n_ids = 0;
	enum status st = engine_vocab_encode(job->vocab, text, n, job->args->add_special, job->args->parse_special,
	                                     &ids, &n_ids, err);
	if (st != STATUS_OK)
		return st;
	buf_puts(out, "{\"ids\":[");
	for (size_t i = 0; i < n_ids; i++)
		buf_printf(out, i ? ",%d" : "%d", ids[i]);
	buf_puts(out, "]}");
	free(ids);
	return STATUS_OK;
}

static enum status encode_line(void *arg, const char *line, size_t n, struct buf *out, struct error *err)
{
	const struct job *job = arg;
	struct error why;
	struct json_doc *doc = NULL;
	struct json root;
	struct str text = {NULL, 0};
	(void)err; /* a line that is wrong is answered in its place; the others go on */
	enum status st = json_parse((struct str){line, n}, "The line", &doc, &root, &why);
	if (st == STATUS_OK) {
		struct json member = json_get(&root, "text");
		st = json_read_text(&member, &text, &why);
		if (st == STATUS_OK && !text.p)
			st = error_set_param(&why, STATUS_INVALID, "text", "text is missing");
	}
	if (st == STATUS_OK)
		st = encode(job, text.p, text.n, out, &why);
	if (st != STATUS_OK)
		cli_error_line(&why, out);
	json_doc_free(doc);
	return STATUS_OK;
}

int cli_tokenize(int argc, char **argv)
{
	struct args args;
	struct error err;
	struct job job = {NULL, &args};
	struct buf text = BUF_INIT, out = BUF_INIT;
	enum status st;
	int status;
	if (cli_read_args(&usage, &args, argc, argv, NULL, &status) == CLI_STOP)
		goto out;
	if (!args.model || !args.jsonl == !args.text) {
		status = cli_misuse("tokenize needs --model FILE, and either --text TEXT or --jsonl");
		goto out;
	}
	st = engine_vocab_open(args.model, &job.vocab, &err);
	if (st == STATUS_OK && args.jsonl) {
		st = cli_each_line(encode_line, &job, &err);
	} else if (st == STATUS_OK) {
		if (strcmp(args.text, "-") == 0)
			st = cli_read_file("-", &text, &err);
		else
			buf_puts(&text, args.text);
		if (st == STATUS_OK)
			st = encode(&job, text.data ? text.data : "", text.len, &out, &err);
		buf_putc(&out, '\n');
		if (st == STATUS_OK && !cli_write(out.data, out.len))
			st = error_set(&err, STATUS_IO, "standard output: cannot be written");
	}
	status = st == STATUS_OK ? CLI_OK : cli_fail(&err);
out:
	engine_vocab_close(job.vocab);
	buf_free(&text);
	buf_free(&out);
	option_free(usage.options, &args);
	return status;
}
