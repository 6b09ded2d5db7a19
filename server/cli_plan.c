/* kvasir plan: what a model will take, before it is served. */
#include "server/cli.h"

#include <stdio.h>
#include <string.h>

#include "engine/tools.h"

struct args {
	char *model, *kv_dtype, *rope_scaling;
	int64_t ctx, sessions, memory, step_tokens, max_running, kv_overflow, kv_overflow_disk;
	double rate;
	bool kv_bounds, json;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct args, model, "model", NULL, "GGUF file"),
	OPTION_ROW_INT(struct args, ctx, "ctx", 0, 0, 1 << 30,
                       "tokens of a conversation; 0: as trained, or as far as rope-scaling reaches"),
	OPTION_ROW_INT(struct args, sessions, "sessions", 1, 0, 1 << 30, "conversations to hold at once"),
	OPTION_ROW_BYTES(struct args, memory, "memory", 0, 0, INT64_MAX,
                         "memory for everything; 0: what the plan comes to"),
	OPTION_ROW_STRING(struct args, rope_scaling, "rope-scaling", NULL,
                          "as the server's: yarn:4, linear:2, none, ..."),
	OPTION_ROW_STRING(struct args, kv_dtype, "kv-dtype", "auto",
                          "as the server's: auto, f16, bf16, int8 or fp8_e4m3"),
	OPTION_ROW_BOOL(struct args, kv_bounds, "kv-bounds",
                        "as the server's: with the bounds that the context policy quest needs"),
	OPTION_ROW_BYTES(struct args, kv_overflow, "kv-overflow", 0, 0, INT64_MAX,
                         "as the server's: host memory for conversations larger than the KV cache"),
	OPTION_ROW_BYTES(struct args, kv_overflow_disk, "kv-overflow-disk", 0, 0, INT64_MAX,
                         "and bytes of a file for them, without its directory"),
	OPTION_ROW_REAL(struct args, rate, "rate", 0, 0, 1 << 30,
                        "tokens a second that all clients write; 0: not known"),
	OPTION_ROW_INT(struct args, step_tokens, "step-tokens", 0, 0, 65536, "rows of a step; 0: the server's default"),
	OPTION_ROW_INT(struct args, max_running, "max-running", 0, 0, 4096,
                       "generations that run together; 0: the server's default"),
	OPTION_ROW_BOOL(struct args, json, "json", "one JSON object instead of text"),
};

static const struct cli_usage usage = {
	"kvasir plan --model FILE [--ctx N] [--sessions M] [--memory B] [--kv-overflow B] [--kv-overflow-disk B] "
        "[--rate R] [--kv-dtype T]\n"
	"    [--rope-scaling R] [--json]",
	"Says what weights, activations and KV cache will take, how many conversations fit, how long one may be, and "
        "how long an idle one is kept.",
	{rows, sizeof rows / sizeof *rows},
};

static void write_json(const struct engine_plan *p, struct buf *out)
{
	const struct {
		const char *key;
		uint64_t value;
	} rows_out[] = {
		{"context_tokens", (uint64_t)p->n_ctx},
		{"layers", (uint64_t)p->n_layer},
		{"heads", (uint64_t)p->n_head},
		{"kv_heads", (uint64_t)p->n_head_kv},
		{"head_dim", (uint64_t)p->head_dim},
		{"window_tokens", (uint64_t)p->window},
		{"window_layers", (uint64_t)p->n_windowed},
		{"page_tokens", (uint64_t)p->page_tokens},
		{"page_bytes", p->page_bytes},
		{"bounds_bytes_per_page", p->bounds_bytes_per_page},
		{"weights_bytes", p->weights_bytes},
		{"activation_bytes", p->activation_bytes},
		{"kv_bytes_per_token", p->kv_bytes_per_token},
		{"kv_bytes_per_session", p->kv_bytes_per_session},
		{"kv_bytes_running", p->kv_bytes_running},
		{"kv_bytes", p->kv_bytes},
		{"total_bytes", p->total_bytes},
		{"pool_bytes", p->pool_bytes},
		{"sessions_that_fit", (uint64_t)p->sessions_that_fit},
		{"pool_tokens", (uint64_t)p->pool_tokens},
		{"longest_tokens", (uint64_t)p->longest_tokens},
		{"overflow_ram_bytes", p->overflow_ram_bytes},
		{"overflow_disk_bytes", p->overflow_disk_bytes},
	};
	buf_puts(out, "{\"architecture\":");
	buf_json_string(out, p->arch, strlen(p->arch));
	for (size_t i = 0; i < sizeof rows_out / sizeof *rows_out; i++)
		buf_printf(out, ",\"%s\":%llu", rows_out[i].key, (unsigned long long)rows_out[i].value);
	buf_printf(out,
	           ",\"rope_scaling\":\"%s\",\"rope_factor\":%g,\"rope_original_context\":%d,\"rope_freq_base\":%.9g,"
	           "\"rope_reach\":%d",
	           p->rope.scaling, (double)p->rope.factor, p->rope.original_ctx, (double)p->rope.freq_base,
	           p->rope.reach);
	if (p->rope.chunk)
		buf_printf(out, ",\"rope_chunk\":%d", p->rope.chunk);
	buf_puts(out, ",\"idle_seconds\":");
	if (p->idle_seconds > 0)
		buf_json_number(out, p->idle_seconds);
	else
		buf_puts(out, "null");
	buf_puts(out, "}\n");
}

static void write_size(struct buf *out, const char *what, uint64_t bytes, const char *note)
{
	buf_printf(out, "  %-26s %16llu bytes  %10.1f MiB  %s\n", what, (unsigned long long)bytes,
	           (double)bytes / (1 << 20), note);
}

static void write_text(const struct engine_plan *p, const struct args *args, struct buf *out)
{
	char note[120];
	buf_printf(out, "%s, %d layers, %d query and %d KV heads of %d; a context of %d tokens\n", p->arch, p->n_layer,
	           p->n_head, p->n_head_kv, p->head_dim, p->n_ctx);
	if (p->rope.chosen || strcmp(p->rope.scaling, "none") != 0)
		buf_printf(out, "positions are stretched by %s:%g from %d tokens, base %g; they reach %d%s\n",
		           p->rope.scaling, (double)p->rope.factor, p->rope.original_ctx, (double)p->rope.freq_base,
		           p->rope.reach, p->rope.chosen ? " (not as the file says)" : "");
	if (p->rope.chunk)
		buf_printf(out, "they count anew every %d tokens\n", p->rope.chunk);
	if (p->n_windowed)
		buf_printf(out, "%d of the layers see %d tokens back%s\n", p->n_windowed, p->window,
		           p->n_windowed < p->n_layer ? "; the others see all, so all KV is kept" : "");
	write_size(out, "weights", p->weights_bytes, "as in the file");
	write_size(out, "activations", p->activation_bytes, "of a step");
	snprintf(note, sizeof note, "grows by this with each token, with KV heads and not with query heads");
	write_size(out, "KV of a token", p->kv_bytes_per_token, note);
	if (p->bounds_bytes_per_page)
		write_size(out, "bounds of a page", p->bounds_bytes_per_page, "");
	for (int32_t n = 1024; n < p->n_ctx; n *= 2) {
		uint64_t pages = ((uint64_t)n + (uint64_t)p->page_tokens - 1) / (uint64_t)p->page_tokens;
		snprintf(note, sizeof note, "KV of %d tokens", n);
		write_size(out, note, pages * (p->page_bytes + p->bounds_bytes_per_page), "");
	}
	write_size(out, "KV of a whole context", p->kv_bytes_per_session, "in whole pages");
	if (p->kv_bytes_running < p->kv_bytes_per_session)
		write_size(out, "... while it is answered", p->kv_bytes_running,
		           "older pages stay for the next turn as long as there is room");
	snprintf(note, sizeof note, "KV of %lld sessions", (long long)args->sessions);
	write_size(out, note, p->kv_bytes, "");
	write_size(out, "in all", p->total_bytes, "");
	if (args->memory) {
		write_size(out, "given", (uint64_t)args->memory, "");
		write_size(out, "left for KV", p->pool_bytes, "");
	}
	buf_printf(out, "  %-26s %16lld\n", "whole contexts that fit", (long long)p->sessions_that_fit);
	buf_printf(out, "  %-26s %16d tokens%s\n", "the longest conversation", p->longest_tokens,
	           p->longest_tokens == p->pool_tokens ? ""
	           : p->n_windowed == p->n_layer       ? ", which passes through the KV cache: all layers have a window"
	                                               : ", most of it below the KV cache");
	if (p->longest_tokens > p->pool_tokens)
		buf_printf(out, "  %-26s %16d tokens\n", "... in the KV cache alone", p->pool_tokens);
	if (p->overflow_ram_bytes)
		write_size(out, "below it, in memory", p->overflow_ram_bytes,
		           p->overflow_disk_bytes && !args->kv_overflow ? "copies in f16 of some pages" : "");
	if (p->overflow_disk_bytes)
		write_size(out, "below it, on disk", p->overflow_disk_bytes,
		           "read once for each step of such a conversation");
	if (p->idle_seconds > 0)
		buf_printf(out, "  %-26s %16.0f seconds, while all clients write %g tokens a second\n",
		           "an idle session stays", p->idle_seconds, args->rate);
}

int cli_plan(int argc, char **argv)
{
	struct args args;
	struct buf out = BUF_INIT;
	struct error err;
	struct engine_plan plan;
	int status;
	if (cli_read_args(&usage, &args, argc, argv, NULL, &status) == CLI_STOP)
		goto out;
	if (!args.model) {
		status = cli_misuse("plan needs --model FILE");
		goto out;
	}
	const struct engine_plan_params params = {
		.model_path = args.model,
		.context_tokens = (int32_t)args.ctx,
		.n_sessions = (int32_t)args.sessions,
		.step_tokens = (int32_t)args.step_tokens,
		.max_running = (int32_t)args.max_running,
		.memory_bytes = (uint64_t)args.memory,
		.tokens_per_s = args.rate,
		.kv_type = args.kv_dtype,
		.rope_scaling = args.rope_scaling,
		.kv_bounds = args.kv_bounds,
		.kv_overflow_bytes = (uint64_t)args.kv_overflow,
		.kv_overflow_disk_bytes = (uint64_t)args.kv_overflow_disk,
	};
	status = CLI_OK;
	if (engine_plan(&params, &plan, &err) != STATUS_OK) {
		status = cli_fail(&err);
		goto out;
	}
	if (args.json)
		write_json(&plan, &out);
	else
		write_text(&plan, &args, &out);
	if (!cli_write(out.data, out.len))
		status = CLI_FAILED;
out:
	buf_free(&out);
	option_free(usage.options, &args);
	return status;
}
