/*
 * kvasir bench long: what a long conversation costs under each context policy, and what the model then no longer knows.
 */
#include "server/cli.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/engine.h"

struct args {
	char *model, *device, *length, *policies, *text, *kv_dtype, *rope_scaling;
	int64_t threads, keys, text_tokens, answer, page_in;
	double cache;
	bool speed_only, cpu_time, json;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct args, model, "model", NULL, "GGUF file"),
	OPTION_ROW_STRING(struct args, length, "length", "1024,2048,4096,8192,16384,32768,65536,131072",
                          "lengths of the prompt, in tokens"),
	OPTION_ROW_STRING(struct args, policies, "policies", "",
                          "as a request's kv_cache: full, streaming:page_in, evict:norm_ratio, ...; \"\": all"),
	OPTION_ROW_REAL(struct args, cache, "cache", 25, 0, 100000,
                        "max_cache_size of policies other than full, in percent of the length"),
	OPTION_ROW_INT(struct args, page_in, "page-in", 16, 0, 1 << 20,
		       "of streaming:page_in, tokens of the answer between choices; 0: one choice"),
	OPTION_ROW_INT(struct args, keys, "keys", 5, 0, ENGINE_LONG_KEYS_MAX,
                       "pass keys that are hidden in each prompt, and asked for"),
	OPTION_ROW_STRING(struct args, text, "text", NULL,
                          "file that prompts are made of; none: sentences that are made up"),
	OPTION_ROW_INT(struct args, text_tokens, "text-tokens", 64, 1, 4096,
                       "tokens of the text that go on behind the prompt"),
	OPTION_ROW_INT(struct args, answer, "answer", 32, 0, 4096, "tokens of the answer to a second question"),
	OPTION_ROW_BOOL(struct args, speed_only, "speed-only", "times and bytes only: for models with random weights"),
	OPTION_ROW_STRING(struct args, kv_dtype, "kv-dtype", "auto",
                          "as the server's: auto, f16, bf16, int8 or fp8_e4m3"),
	OPTION_ROW_STRING(struct args, rope_scaling, "rope-scaling", NULL,
                          "as the server's: yarn:4, linear:2, none, ..."),
	OPTION_ROW_STRING(struct args, device, "device", "cpu", "backend"),
	OPTION_ROW_INT(struct args, threads, "threads", 0, 0, 4096, "compute threads; 0: one per physical core"),
	OPTION_ROW_BOOL(struct args, cpu_time, "cpu-time",
                        "count the processor's time, on a machine that others use too; with --threads 1"),
	OPTION_ROW_BOOL(struct args, json, "json", "one JSON object instead of a table"),
};

static const struct cli_usage usage = {
	"kvasir bench long --model FILE [--length N,...] [--policies P,...] [--cache PERCENT] [--text FILE] [--json]",
	"Has the model read a prompt of each length in which pass keys are hidden, under each context policy, and then "
        "gives it the\n"
	"answer token by token: the text going on, and each key asked for and told. KL is the mean Kullback-Leibler "
        "divergence (nats a\n"
	"token) of what it would have said from what it would have said with everything kept, where the text goes on "
        "and where keys\n"
	"are asked for; passkey the share of the keys' tokens that were its first choice; agreement the share of a "
        "free answer to a\n"
	"second question before it differs. Nothing is cached between runs.",
	{rows, sizeof rows / sizeof *rows},
};

/* ---- Policies ---- */

enum { POLICIES_MAX = 16, LABEL_MAX = 48 };

/* Those of which there is more than one kind. */
static const struct kind {
	const char *label;
	const char *policy;
	bool by_age, by_mass, page_in;
} kinds[] = {
	{"streaming", "streaming", .page_in = false},
	{"streaming:page_in", "streaming", .page_in = true},
	{"evict:norm_ratio", "evict", .by_age = false},
	{"evict:attention_mass", "evict", .by_mass = true},
	{"evict:recency", "evict", .by_age = true},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

struct policies {
	struct engine_long_policy item[POLICIES_MAX];
	char label[POLICIES_MAX][LABEL_MAX];
	size_t n;
};

static bool add_policy(struct policies *p, const char *label, struct engine_context context)
{
	if (p->n == POLICIES_MAX)
		return false;
	snprintf(p->label[p->n], LABEL_MAX, "%s", label);
	context.start_size = -1;
	p->item[p->n] = (struct engine_long_policy){p->label[p->n], context};
	p->n++;
	return true;
}

/*
 * The kind called `label`, or all of one policy: where none is called so, or `all` of a name are wanted. False when
 * there is neither. every: of page_in, as engine_context has it.
 */
static bool add_kinds(struct policies *p, const char *label, bool all, int32_t every)
{
	size_t before = p->n;
	bool is_kind = false;
	for (size_t i = 0; i < N_KINDS; i++)
		is_kind |= strcmp(label, kinds[i].label) == 0;
	for (size_t i = 0; i < N_KINDS; i++)
		if (strcmp(label, is_kind && !all ? kinds[i].label : kinds[i].policy) == 0)
			add_policy(p, kinds[i].label,
				   (struct engine_context){.policy = kinds[i].policy,
							   .by_age = kinds[i].by_age,
							   .by_mass = kinds[i].by_mass,
							   .page_in = kinds[i].page_in,
							   .recall_every = kinds[i].page_in ? every : 0});
	for (size_t i = 0; p->n == before && engine_context_policy(i); i++)
		if (strcmp(label, engine_context_policy(i)) == 0)
			add_policy(p, label, (struct engine_context){.policy = engine_context_policy(i)});
	return p->n > before;
}

static enum status read_policies(const struct args *args, struct policies *out, struct error *err)
{
	struct buf all = BUF_INIT;
	const char *text = args->policies;
	int32_t every = args->page_in > 0 ? (int32_t)args->page_in : -1;
	out->n = 0;
	for (size_t i = 0; engine_context_policy(i); i++)
		buf_printf(&all, "%s%s", i ? "," : "", engine_context_policy(i));
	enum status st = all.failed ? error_set(err, STATUS_NOMEM, "out of memory") : STATUS_OK;
	for (const char *p = text[0] ? text : all.data; st == STATUS_OK && *p;) {
		char label[LABEL_MAX];
		size_t n = strcspn(p, ",");
		snprintf(label, sizeof label, "%.*s", (int)n, p);
		if (n >= sizeof label || !add_kinds(out, label, !text[0], every))
			st = error_set_param(err, STATUS_INVALID, "policies",
			                     "policies: \"%.40s\" is none of %s, streaming:page_in, evict:norm_ratio, "
			                     "evict:attention_mass and evict:recency",
			                     label, all.data);
		p += n + (p[n] == ',');
	}
	buf_free(&all);
	return st;
}

/* ---- What comes out ---- */

struct output {
	const struct args *args;
	struct buf head, rows, left_out; /* JSON: collected, and written at the end */
	bool failed;                     /* to write */
};

static void put_line(struct output *o, struct buf *line)
{
	if (line->failed || !cli_write(line->data, line->len))
		o->failed = true;
	buf_free(line);
}

static void json_info(void *arg, const struct engine_long_info *info)
{
	struct output *o = arg;
	const char *name = strrchr(o->args->model, '/');
	name = name ? name + 1 : o->args->model;
	buf_puts(&o->head, "{\"model\":");
	buf_json_string(&o->head, name, strlen(name));
	cli_json_string(&o->head, "backend", info->backend);
	buf_printf(&o->head, ",\"threads\":%d,\"context\":%d", info->n_threads, info->n_ctx);
	cli_json_string(&o->head, "kv_dtype", info->kv_type);
	buf_printf(&o->head, ",\"kv_bytes_per_token\":%llu", (unsigned long long)info->kv_bytes_per_token);
	cli_json_string(&o->head, "rope_scaling", info->rope.scaling);
	cli_json_number(&o->head, "rope_factor", (double)info->rope.factor);
	cli_json_string(&o->head, "text", o->args->text ? o->args->text : "made up");
	cli_json_string(&o->head, "time", o->args->cpu_time ? "processor" : "wall");
	cli_json_number(&o->head, "cache_percent", o->args->cache);
	buf_printf(&o->head, ",\"keys\":%d,\"text_tokens\":%d,\"answer_tokens\":%d", (int)o->args->keys,
	           (int)o->args->text_tokens, (int)o->args->answer);
}

static void json_row(void *arg, const struct engine_long_row *row)
{
	struct output *o = arg;
	struct buf *out = &o->rows;
	buf_printf(out, "%s{\"length\":%d", out->len ? "," : "", row->length);
	cli_json_string(out, "policy", row->policy);
	cli_json_number(out, "ttft_s", row->ttft_s);
	cli_json_number(out, "tokens_per_s", row->tokens_per_s);
	buf_printf(out, ",\"tokens_logical\":%d,\"tokens_resident\":%d,\"resident_bytes\":%llu", row->tokens_logical,
	           row->tokens_resident, (unsigned long long)row->resident_bytes);
	buf_printf(out, ",\"pages_back\":%d,\"tokens_recomputed\":%d", row->pages_back, row->tokens_recomputed);
	cli_json_number(out, "kl_text", row->kl_text);
	cli_json_number(out, "kl_recall", row->kl_recall);
	cli_json_number(out, "passkey", row->passkey);
	cli_json_number(out, "passkey_logprob", row->passkey_logprob);
	cli_json_number(out, "agreement", row->agreement);
	buf_putc(out, '}');
}

static void json_left_out(void *arg, const char *policy, int32_t length, const char *why)
{
	struct output *o = arg;
	buf_printf(&o->left_out, "%s{\"length\":%d", o->left_out.len ? "," : "", length);
	cli_json_string(&o->left_out, "policy", policy);
	cli_json_string(&o->left_out, "why", why);
	buf_putc(&o->left_out, '}');
}

static bool json_end(struct output *o)
{
	buf_printf(&o->head, ",\"rows\":[%s],\"left_out\":[%s]}\n", o->rows.data ? o->rows.data : "",
	           o->left_out.data ? o->left_out.data : "");
	return !o->rows.failed && !o->left_out.failed && !o->head.failed && cli_write(o->head.data, o->head.len);
}

static void text_info(void *arg, const struct engine_long_info *info)
{
	struct buf line = BUF_INIT;
	buf_printf(&line, "%s, %d threads; KV as %s, %llu bytes a token; a context of %d tokens\n", info->backend,
	           info->n_threads, info->kv_type, (unsigned long long)info->kv_bytes_per_token, info->n_ctx);
	buf_printf(&line, "%7s %-21s %8s %9s %9s %10s %8s %9s %8s %9s %9s\n", "tokens", "policy", "TTFT s", "tokens/s",
	           "resident", "MiB", "KL text", "KL recall", "passkey", "log-prob", "agreement");
	put_line(arg, &line);
}

static void put_figure(struct buf *out, int width, int digits, double x)
{
	if (isnan(x))
		buf_printf(out, " %*s", width, "-");
	else
		buf_printf(out, " %*.*f", width, digits, x);
}

static void text_row(void *arg, const struct engine_long_row *row)
{
	struct buf line = BUF_INIT;
	buf_printf(&line, "%7d %-21s", row->length, row->policy);
	put_figure(&line, 8, 2, row->ttft_s);
	put_figure(&line, 9, 1, row->tokens_per_s);
	buf_printf(&line, " %9d", row->tokens_resident);
	put_figure(&line, 10, 1, (double)row->resident_bytes / (1 << 20));
	put_figure(&line, 8, 4, row->kl_text);
	put_figure(&line, 9, 4, row->kl_recall);
	put_figure(&line, 8, 2, row->passkey);
	put_figure(&line, 9, 2, row->passkey_logprob);
	put_figure(&line, 9, 2, row->agreement);
	buf_putc(&line, '\n');
	put_line(arg, &line);
}

static void text_left_out(void *arg, const char *policy, int32_t length, const char *why)
{
	struct buf line = BUF_INIT;
	buf_printf(&line, "%7d %-21s left out: %s\n", length, policy, why);
	put_line(arg, &line);
}

static int run(const struct args *args, const struct engine_long_params *params)
{
	struct output o = {.args = args};
	const struct engine_long_sink json = {&o, json_info, json_row, json_left_out},
				      text = {&o, text_info, text_row, text_left_out};
	struct error err;
	int status = CLI_OK;
	enum status st = engine_long(params, args->json ? &json : &text, &err);
	if (st != STATUS_OK) {
		cli_fail(&err);
		status = st == STATUS_INVALID ? CLI_USAGE : CLI_FAILED;
	} else if (args->json ? !json_end(&o) : o.failed) {
		status = CLI_FAILED;
	}
	buf_free(&o.head);
	buf_free(&o.rows);
	buf_free(&o.left_out);
	return status;
}

int cli_bench_long(int argc, char **argv)
{
	struct args args;
	struct cli_numbers length = {.n = 0};
	struct policies policies;
	struct buf text = BUF_INIT;
	struct error err;
	int status;
	if (cli_read_args(&usage, &args, argc, argv, NULL, &status) == CLI_STOP)
		goto out;
	if (!args.model) {
		status = cli_misuse("bench long needs --model FILE");
		goto out;
	}
	if (cli_read_numbers("length", args.length, &length, &err) != STATUS_OK ||
	    read_policies(&args, &policies, &err) != STATUS_OK) {
		status = cli_misuse("%s", err.message);
		goto out;
	}
	if (args.text && cli_read_file(args.text, &text, &err) != STATUS_OK) {
		status = cli_fail(&err);
		goto out;
	}
	const struct engine_long_params params = {
		.model_path = args.model,
		.device = args.device,
		.kv_type = args.kv_dtype,
		.rope_scaling = args.rope_scaling,
		.n_threads = (int32_t)args.threads,
		.length = length.item,
		.n_lengths = length.n,
		.policy = policies.item,
		.n_policies = policies.n,
		.cache_permille = (int32_t)(args.cache * 10 + 0.5),
		.n_keys = (int32_t)args.keys,
		.text_tokens = (int32_t)args.text_tokens,
		.answer_tokens = (int32_t)args.answer,
		.text = args.text ? text.data : NULL,
		.text_n = text.len,
		.speed_only = args.speed_only,
		.cpu_time = args.cpu_time,
	};
	status = run(&args, &params);
out:
	buf_free(&text);
	option_free(usage.options, &args);
	return status;
}
