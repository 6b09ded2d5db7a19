/* kvasir inspect: what is in a model file. */
#include "server/cli.h"

#include "engine/tools.h"

struct args {
	bool json;
};

static const struct option rows[] = {
	OPTION_ROW_BOOL(struct args, json, "json", "one JSON object instead of text"),
};

static const struct cli_usage usage = {
	"kvasir inspect FILE [--json]",
	"Shows the metadata, tensors, tokenizer, chat template and KV size of a GGUF file.",
	{rows, sizeof rows / sizeof *rows},
};

int cli_inspect(int argc, char **argv)
{
	struct args args;
	struct buf out = BUF_INIT;
	struct error err;
	const char *path = NULL;
	int status;
	if (cli_read_args(&usage, &args, argc, argv, &path, &status) == CLI_STOP)
		goto out;
	if (!path) {
		status = cli_misuse("inspect needs the path of a GGUF file");
		goto out;
	}
	status = CLI_OK;
	if (engine_inspect(path, args.json, &out, &err) != STATUS_OK)
		status = cli_fail(&err);
	else if (!cli_write(out.data, out.len))
		status = CLI_FAILED;
out:
	buf_free(&out);
	option_free(usage.options, &args);
	return status;
}
