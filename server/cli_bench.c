/* kvasir bench: tokens per second of a model on this machine, and how near they are to what its memory gives. */
#include "server/cli.h"

#include <stdlib.h>
#include <string.h>

#include "engine/tools.h"

struct args {
	char *model, *device, *prefill, *depth, *batch, *kv_dtype, *rope_scaling;
	int64_t decode, threads, runs;
	bool random_kv, json;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct args, model, "model", NULL, "GGUF file"),
	OPTION_ROW_STRING(struct args, prefill, "prefill", "512", "lengths of prompts, in tokens; \"\": none"),
	OPTION_ROW_INT(struct args, decode, "decode", 64, 0, 1 << 24, "tokens that each sequence decodes; 0: none"),
	OPTION_ROW_STRING(struct args, depth, "depth", "0", "tokens of context before each test"),
	OPTION_ROW_STRING(struct args, batch, "batch", "1", "sequences that decode together"),
	OPTION_ROW_INT(struct args, runs, "runs", 3, 1, ENGINE_BENCH_RUNS_MAX,
                       "runs of each test, of which the median counts"),
	OPTION_ROW_STRING(struct args, rope_scaling, "rope-scaling", NULL,
                          "as the server's: yarn:4, linear:2, none, ..."),
	OPTION_ROW_STRING(struct args, kv_dtype, "kv-dtype", "auto",
                          "as the server's: auto, f16, bf16, int8 or fp8_e4m3"),
	OPTION_ROW_STRING(struct args, device, "device", "cpu", "backend"),
	OPTION_ROW_INT(struct args, threads, "threads", 0, 0, 4096, "compute threads; 0: one per physical core"),
	OPTION_ROW_BOOL(struct args, random_kv, "random-kv",
                        "fill the context with random numbers: quick, and as much to read"),
	OPTION_ROW_BOOL(struct args, json, "json", "one JSON object instead of a table"),
};

static const struct cli_usage usage = {
	"kvasir bench --model FILE [--prefill N,...] [--decode N] [--depth N,...] [--batch N,...] [--threads N] "
        "[--json]",
	"Measures the forward pass: prefill of each length and decoding with each number of sequences, on top of each "
        "depth of\n"
	"context. The context is a prompt that is computed, or random numbers where --random-kv is given; more "
        "sequences than\n"
	"one get copies of its pages. Bytes are those of weights and KV that a step has to read; \"of memory\" is "
        "their part of\n"
	"what plain reading of memory reached between the same runs. `kvasir bench long` measures what long "
        "conversations cost under\n"
	"each context policy.",
	{rows, sizeof rows / sizeof *rows},
};

/* ---- JSON: collected, and written at the end ---- */

struct json_out {
	struct buf head, rows, left_out;
	const struct args *args;
};

static void json_info(void *arg, const struct engine_bench_info *info)
{
	struct json_out *o = arg;
	const char *name = strrchr(o->args->model, '/');
	name = name ? name + 1 : o->args->model;
	buf_puts(&o->head, "{\"model\":");
	buf_json_string(&o->head, name, strlen(name));
	cli_json_string(&o->head, "backend", info->backend);
	cli_json_string(&o->head, "backend_detail", info->detail);
	buf_printf(&o->head, ",\"threads\":%d", info->n_threads);
	cli_json_string(&o->head, "kv_dtype", o->args->kv_dtype);
	cli_json_string(&o->head, "rope_scaling", info->rope.scaling);
	cli_json_number(&o->head, "rope_factor", (double)info->rope.factor);
	cli_json_string(&o->head, "context", o->args->random_kv ? "random" : "computed");
	buf_puts(&o->head, ",\"read_bandwidth\":");
	if (info->memory_bytes_per_s > 0) {
		buf_printf(&o->head, "{\"memory_bytes\":%llu", (unsigned long long)info->memory_bytes);
		cli_json_number(&o->head, "memory_bytes_per_s", info->memory_bytes_per_s);
		buf_printf(&o->head, ",\"cache_bytes\":%llu", (unsigned long long)info->cache_bytes);
		cli_json_number(&o->head, "cache_bytes_per_s", info->cache_bytes_per_s);
		buf_putc(&o->head, '}');
	} else {
		buf_puts(&o->head, "null");
	}
}

static void json_row(void *arg, const struct engine_bench_row *row)
{
	struct json_out *o = arg;
	struct buf *out = &o->rows;
	buf_printf(out, "%s{\"test\":\"%s\",\"tokens\":%d,\"depth\":%d,\"batch\":%d,\"runs\":%d", out->len ? "," : "",
	           row->prefill ? "prefill" : "decode", row->tokens, row->depth, row->batch, row->runs);
	cli_json_number(out, "tokens_per_s", row->tokens_per_s);
	cli_json_number(out, "best_tokens_per_s", row->best_tokens_per_s);
	cli_json_number(out, "bytes_per_s", row->bytes_per_s);
	cli_json_number(out, "bytes_per_token", row->bytes_per_token);
	if (row->read_bytes_per_s > 0) {
		cli_json_number(out, "read_bytes_per_s", row->read_bytes_per_s);
		cli_json_number(out, "read_fraction", row->bytes_per_s / row->read_bytes_per_s);
	} else {
		buf_puts(out, ",\"read_bytes_per_s\":null,\"read_fraction\":null");
	}
	buf_puts(out, ",\"ops\":{");
	for (size_t i = 0; i < row->n_ops; i++) {
		buf_printf(out, "%s\"%s\":", i ? "," : "", row->ops[i].name);
		buf_json_number(out, row->ops[i].share);
	}
	buf_puts(out, "}}");
}

static void json_left_out(void *arg, bool prefill, int32_t tokens, int32_t depth)
{
	struct json_out *o = arg;
	buf_printf(&o->left_out, "%s{\"test\":\"%s\",\"tokens\":%d,\"depth\":%d}", o->left_out.len ? "," : "",
	           prefill ? "prefill" : "decode", tokens, depth);
}

static bool json_end(struct json_out *o)
{
	buf_printf(&o->head, ",\"rows\":[%s],\"left_out\":[%s]}\n", o->rows.data ? o->rows.data : "",
	           o->left_out.data ? o->left_out.data : "");
	return !o->rows.failed && !o->left_out.failed && !o->head.failed && cli_write(o->head.data, o->head.len);
}

/* ---- Text: a line as soon as it is known ---- */

struct text_out {
	bool failed; /* to write */
};

static void put_text(struct text_out *o, struct buf *line)
{
	if (line->failed || !cli_write(line->data, line->len))
		o->failed = true;
	buf_free(line);
}

static void text_info(void *arg, const struct engine_bench_info *info)
{
	struct buf line = BUF_INIT;
	buf_printf(&line, "%s, %d threads; reading: %.1f GB/s from memory, %.1f GB/s from a cache\n", info->backend,
	           info->n_threads, info->memory_bytes_per_s * 1e-9, info->cache_bytes_per_s * 1e-9);
	buf_printf(&line, "%-8s %7s %7s %6s %12s %12s %10s %10s   most of the time in\n", "test", "tokens", "depth",
	           "batch", "tokens/s", "best", "GB/s", "of memory");
	put_text(arg, &line);
}

/* The operations that take more than a twentieth, the longest first. */
static void put_ops(struct buf *out, const struct engine_bench_row *row)
{
	bool shown[ENGINE_BENCH_OPS_MAX] = {false};
	for (;;) {
		size_t top = row->n_ops;
		for (size_t i = 0; i < row->n_ops; i++)
			if (!shown[i] && row->ops[i].share > 0.05 &&
			    (top == row->n_ops || row->ops[i].share > row->ops[top].share))
				top = i;
		if (top == row->n_ops)
			return;
		shown[top] = true;
		buf_printf(out, " %s %.0f%%", row->ops[top].name, row->ops[top].share * 100);
	}
}

static void text_row(void *arg, const struct engine_bench_row *row)
{
	struct buf line = BUF_INIT;
	buf_printf(&line, "%-8s %7d %7d %6d %12.1f %12.1f %10.1f", row->prefill ? "prefill" : "decode", row->tokens,
	           row->depth, row->batch, row->tokens_per_s, row->best_tokens_per_s, row->bytes_per_s * 1e-9);
	if (row->read_bytes_per_s > 0)
		buf_printf(&line, " %9.0f%%  ", row->bytes_per_s / row->read_bytes_per_s * 100);
	else
		buf_printf(&line, " %10s  ", "-");
	put_ops(&line, row);
	buf_putc(&line, '\n');
	put_text(arg, &line);
}

static void text_left_out(void *arg, bool prefill, int32_t tokens, int32_t depth)
{
	struct buf line = BUF_INIT;
	buf_printf(&line, "%-8s %7d %7d        beyond the model's context\n", prefill ? "prefill" : "decode", tokens,
	           depth);
	put_text(arg, &line);
}

static int run(const struct args *args, const struct engine_bench_params *params)
{
	struct json_out json = {.args = args};
	struct text_out text = {false};
	const struct engine_bench_sink json_sink = {&json, json_info, json_row, json_left_out};
	const struct engine_bench_sink text_sink = {&text, text_info, text_row, text_left_out};
	struct error err;
	int status = CLI_OK;
	enum status st = engine_bench(params, args->json ? &json_sink : &text_sink, &err);
	if (st != STATUS_OK) {
		cli_fail(&err);
		status = st == STATUS_INVALID ? CLI_USAGE : CLI_FAILED;
	} else if (args->json ? !json_end(&json) : text.failed) {
		status = CLI_FAILED;
	}
	buf_free(&json.head);
	buf_free(&json.rows);
	buf_free(&json.left_out);
	return status;
}

int cli_bench(int argc, char **argv)
{
	if (argc > 1 && strcmp(argv[1], "long") == 0)
		return cli_bench_long(argc - 1, argv + 1);
	struct args args;
	struct cli_numbers prefill = {.n = 0}, depth = {.n = 0}, batch = {.n = 0};
	struct error err;
	int status;
	if (cli_read_args(&usage, &args, argc, argv, NULL, &status) == CLI_STOP)
		goto out;
	if (!args.model) {
		status = cli_misuse("bench needs --model FILE");
		goto out;
	}
	if (cli_read_numbers("prefill", args.prefill, &prefill, &err) != STATUS_OK ||
	    cli_read_numbers("depth", args.depth, &depth, &err) != STATUS_OK ||
	    cli_read_numbers("batch", args.batch, &batch, &err) != STATUS_OK) {
		status = cli_misuse("%s", err.message);
		goto out;
	}
	const struct engine_bench_params params = {
		.model_path = args.model,
		.device = args.device,
		.n_threads = (int32_t)args.threads,
		.prefill = prefill.item,
		.n_prefill = prefill.n,
		.decode_tokens = (int32_t)args.decode,
		.depth = depth.item,
		.n_depths = depth.n,
		.batch = batch.item,
		.n_batches = batch.n,
		.runs = (int32_t)args.runs,
		.random_kv = args.random_kv,
		.kv_type = args.kv_dtype,
		.rope_scaling = args.rope_scaling,
	};
	status = run(&args, &params);
out:
	option_free(usage.options, &args);
	return status;
}
