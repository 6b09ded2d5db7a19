/* kvasir replay: how much of a trace of prompts each eviction policy finds again. */
#include "server/cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tools.h"
#include "server/json.h"

struct args {
	char *capacity, *policy;
	bool json;
	double scale;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct args, capacity, "capacity", "1600,5000,16000,32000", "sizes of the cache in blocks"),
	OPTION_ROW_STRING(struct args, policy, "policy", "all", "names of policies, or all; belady is the bound"),
	OPTION_ROW_BOOL(struct args, json, "json", "one JSON object instead of a table"),
	OPTION_ROW_REAL(struct args, scale, "scale", 1, 0, 1000000, "factor for the times of the trace"),
};

static const struct cli_usage usage = {
	"kvasir replay TRACE [--capacity N,...] [--policy NAME,...] [--scale X] [--json]",
	"Replays a trace on the code that evicts KV pages, and prints which part of its blocks each policy finds in a "
        "cache\n"
	"that starts empty: those of each prompt from its start to the first one missing. TRACE has a line for each "
        "prompt,\n"
	"{\"timestamp\": MS, \"hash_ids\": [...], \"output_length\": TOKENS}: the format of the Mooncake traces, whose "
        "blocks\n"
	"have 512 tokens. - reads standard input.",
	{rows, sizeof rows / sizeof *rows},
};

enum { MAX_CAPACITIES = 32, MAX_POLICIES = 32 };

struct plan {
	const char *policies[MAX_POLICIES];
	int32_t capacities[MAX_CAPACITIES];
	size_t n_policies, n_capacities;
};

/* ---- The arguments ---- */

/* Cuts the next name off a list with commas; false at its end. */
static bool next_name(char **list, char **name)
{
	if (!*list || !**list)
		return false;
	*name = strsep(list, ",");
	return true;
}

/* The policy of that name, as the program spells it; NULL when there is none. */
static const char *known_policy(const char *name)
{
	return strcmp(name, ENGINE_REPLAY_BELADY) == 0 ? ENGINE_REPLAY_BELADY : engine_kv_policy_find(name);
}

/* Adds a policy that is not there yet. */
static void add_policy(struct plan *plan, const char *policy)
{
	for (size_t i = 0; i < plan->n_policies; i++) {
		if (plan->policies[i] == policy)
			return;
	}
	plan->policies[plan->n_policies++] = policy;
}

static enum status read_policies(char *list, struct plan *plan, struct error *err)
{
	for (char *name; next_name(&list, &name);) {
		const char *policy = known_policy(name);
		if (policy) {
			add_policy(plan, policy);
		} else if (strcmp(name, "all") == 0) {
			for (size_t i = 0; engine_kv_policy(i); i++)
				add_policy(plan, engine_kv_policy(i));
			add_policy(plan, ENGINE_REPLAY_BELADY);
		} else {
			return error_set_param(err, STATUS_INVALID, "policy",
			                       "policy: there is no eviction policy \"%.64s\"", name);
		}
	}
	return STATUS_OK;
}

static enum status read_capacities(char *list, struct plan *plan, struct error *err)
{
	for (char *text; next_name(&list, &text);) {
		char *end;
		long n = strtol(text, &end, 10);
		if (end == text || *end || n < 1 || n > 100000000)
			return error_set_param(err, STATUS_INVALID, "capacity",
			                       "capacity: \"%.32s\" is no number of blocks from 1 to 100000000", text);
		if (plan->n_capacities == MAX_CAPACITIES)
			return error_set_param(err, STATUS_INVALID, "capacity", "capacity: more than %d sizes",
			                       MAX_CAPACITIES);
		plan->capacities[plan->n_capacities++] = (int32_t)n;
	}
	return STATUS_OK;
}

/* ---- The trace ---- */

struct blocks {
	uint64_t *ids;
	size_t cap;
};

static enum status read_prompt(struct str line, struct blocks *blocks, struct engine_trace *trace, struct error *err)
{
	struct json_doc *doc = NULL;
	struct json root;
	enum status st = json_parse(line, "The line", &doc, &root, err);
	if (st != STATUS_OK)
		return st;
	struct json time = json_get(&root, "timestamp"), ids = json_get(&root, "hash_ids");
	struct json output = json_get(&root, "output_length");
	double time_ms = 0;
	int64_t output_tokens = INT64_MAX; /* not told: not short */
	size_t n = json_len(&ids);
	st = json_read_number(&time, 0, 9e15, &time_ms, err);
	if (st == STATUS_OK)
		st = json_read_int(&output, 0, INT64_MAX, &output_tokens, err);
	if (st == STATUS_OK)
		st = json_expect(&ids, JSON_LIST, err);
	if (st == STATUS_OK && (!json_has(&time) || !json_has(&ids)))
		st = error_set(err, STATUS_INVALID, "a prompt has a timestamp and hash_ids");
	if (st == STATUS_OK && n > blocks->cap) {
		uint64_t *grown = realloc(blocks->ids, n * sizeof *grown);
		if (grown) {
			blocks->ids = grown;
			blocks->cap = n;
		} else {
			st = error_set(err, STATUS_NOMEM, "out of memory");
		}
	}
	for (size_t i = 0; i < n && st == STATUS_OK; i++) {
		struct json item = json_at(&ids, i);
		int64_t id = 0;
		st = json_has(&item) ? json_read_int(&item, INT64_MIN, INT64_MAX, &id, err)
		                     : json_fail(&ids, STATUS_INVALID, err, "holds null");
		blocks->ids[i] = (uint64_t)id;
	}
	if (st == STATUS_OK)
		st = engine_trace_add(trace, (int64_t)time_ms, blocks->ids, n, output_tokens, err);
	json_doc_free(doc);
	return st;
}

static enum status read_trace(const char *path, struct engine_trace *trace, struct error *err)
{
	struct buf text = BUF_INIT;
	struct blocks blocks = {NULL, 0};
	struct error why;
	enum status st = cli_read_file(path, &text, err);
	size_t line_number = 0;
	for (size_t at = 0, n; st == STATUS_OK && at < text.len; at += n + 1) {
		const char *line = text.data + at, *end = memchr(line, '\n', text.len - at);
		n = end ? (size_t)(end - line) : text.len - at;
		line_number++;
		if (n == 0)
			continue;
		st = read_prompt((struct str){line, n}, &blocks, trace, &why);
		if (st != STATUS_OK)
			error_set(err, st, "%s:%zu: %.400s", path, line_number, why.message);
	}
	free(blocks.ids);
	buf_free(&text);
	return st;
}

/* ---- The figures ---- */

/* The default policy goes by that name in figures: whoever compares need not know which it is. */
static bool is_default(const char *policy)
{
	return policy == engine_kv_policy(0);
}

static void put_json_head(struct buf *out, const char *path, const struct engine_trace_info *info, double scale)
{
	buf_puts(out, "{\"trace\":");
	buf_json_string(out, path, strlen(path));
	buf_printf(out, ",\"prompts\":%llu,\"blocks\":%llu,\"distinct_blocks\":%llu,\"span_s\":",
	           (unsigned long long)info->n_prompts, (unsigned long long)info->n_blocks,
	           (unsigned long long)info->n_distinct_blocks);
	buf_json_number(out, (double)info->span_ms / 1000);
	buf_puts(out, ",\"scale\":");
	buf_json_number(out, scale);
	buf_puts(out, ",\"rows\":[");
}

static void put_json_row(struct buf *out, bool first, const char *policy, int32_t capacity, double hit_rate, double us,
                         const struct engine_replay_result *r)
{
	buf_printf(out, "%s{\"policy\":\"%s\",\"name\":\"%s\",\"capacity_blocks\":%d,\"hit_rate\":", first ? "" : ",",
	           is_default(policy) ? "default" : policy, policy, capacity);
	buf_json_number(out, hit_rate);
	buf_printf(out, ",\"hits\":%llu,\"evictions\":%llu,\"cpu_us_per_block\":", (unsigned long long)r->hits,
	           (unsigned long long)r->evictions);
	buf_json_number(out, us);
	buf_putc(out, '}');
}

static void put_table_head(struct buf *out, const struct engine_trace_info *info, const struct plan *plan)
{
	buf_printf(out, "%llu prompts of %llu blocks, %llu of them distinct, in %.0f s\n\nblocks kept        ",
	           (unsigned long long)info->n_prompts, (unsigned long long)info->n_blocks,
	           (unsigned long long)info->n_distinct_blocks, (double)info->span_ms / 1000);
	for (size_t c = 0; c < plan->n_capacities; c++)
		buf_printf(out, " %9d", plan->capacities[c]);
	buf_puts(out, "   CPU us/block\n");
}

static enum status replay(const struct plan *plan, const struct args *args, const char *path,
                          const struct engine_trace *trace, struct buf *out, struct error *err)
{
	struct engine_trace_info info;
	enum status st = STATUS_OK;
	engine_trace_info(trace, &info);
	double per_block = info.n_blocks ? 1.0 / (double)info.n_blocks : 0;
	if (args->json)
		put_json_head(out, path, &info, args->scale);
	else
		put_table_head(out, &info, plan);
	for (size_t p = 0; p < plan->n_policies; p++) {
		const char *policy = plan->policies[p];
		double slowest_us = 0;
		if (!args->json)
			buf_printf(out, "%-9s%-10s", policy, is_default(policy) ? "(default)" : "");
		for (size_t c = 0; c < plan->n_capacities; c++) {
			struct engine_replay_result r;
			st = engine_replay(trace, policy, plan->capacities[c], args->scale, &r, err);
			if (st != STATUS_OK)
				return st;
			double hit_rate = (double)r.hits * per_block, us = (double)r.cpu_ns / 1000 * per_block;
			slowest_us = us > slowest_us ? us : slowest_us;
			if (args->json)
				put_json_row(out, p == 0 && c == 0, policy, plan->capacities[c], hit_rate, us, &r);
			else
				buf_printf(out, " %9.4f", hit_rate);
		}
		if (!args->json)
			buf_printf(out, " %14.2f\n", slowest_us);
	}
	if (args->json)
		buf_puts(out, "]}\n");
	return out->failed ? error_set(err, STATUS_NOMEM, "out of memory") : STATUS_OK;
}

int cli_replay(int argc, char **argv)
{
	struct args args;
	struct error err;
	struct plan plan = {0};
	struct engine_trace *trace = NULL;
	struct buf out = BUF_INIT;
	const char *path = NULL;
	int status;
	if (cli_read_args(&usage, &args, argc, argv, &path, &status) == CLI_STOP)
		goto out;
	if (!path) {
		status = cli_misuse("replay needs the path of a trace");
		goto out;
	}
	if (read_policies(args.policy, &plan, &err) != STATUS_OK ||
	    read_capacities(args.capacity, &plan, &err) != STATUS_OK) {
		status = cli_misuse("%s", err.message);
		goto out;
	}
	enum status st = engine_trace_create(&trace);
	if (st != STATUS_OK)
		error_set(&err, st, "out of memory");
	else
		st = read_trace(path, trace, &err);
	if (st == STATUS_OK)
		st = replay(&plan, &args, path, trace, &out, &err);
	if (st == STATUS_OK && !cli_write(out.data, out.len))
		st = error_set(&err, STATUS_IO, "standard output: cannot be written");
	status = st == STATUS_OK ? CLI_OK : cli_fail(&err);
out:
	engine_trace_destroy(trace);
	buf_free(&out);
	option_free(usage.options, &args);
	return status;
}
