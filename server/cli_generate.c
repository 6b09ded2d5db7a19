/* kvasir generate: one answer, streamed to stdout, with the engine that the daemon uses. */
#include "server/cli.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "engine/engine.h"

enum {
	ARENA_BYTES = 64 << 20, /* more than any prompt that fits a context */
};

struct args {
	char *model, *prompt, *system, *device, *chat_template, *rope_scaling;
	bool chat, ignore_eos, show_special;
	int64_t max_tokens, seed, threads, context, kv_memory, top_k;
	double temperature, top_p, min_p, repeat_penalty;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct args, model, "model", NULL, "GGUF file"),
	OPTION_ROW_STRING(struct args, prompt, "prompt", NULL, "the prompt; - reads it from standard input"),
	OPTION_ROW_BOOL(struct args, chat, "chat", "the prompt is a user's message: the chat template is applied"),
	OPTION_ROW_STRING(struct args, system, "system", NULL, "with --chat: a system message in front"),
	OPTION_ROW_STRING(struct args, chat_template, "chat-template", NULL,
                          "a built-in template's name, or a file that holds one"),
	OPTION_ROW_INT(struct args, max_tokens, "max-tokens", 256, -1, 1 << 30,
                       "longest answer; -1: until the context is full"),
	OPTION_ROW_REAL(struct args, temperature, "temperature", 0.7, 0, 100, "0: always the most likely token"),
	OPTION_ROW_INT(struct args, top_k, "top-k", 0, 0, INT32_MAX, "sample among this many; 0: all"),
	OPTION_ROW_REAL(struct args, top_p, "top-p", 1, 0, 1, "sample from this much of the probability"),
	OPTION_ROW_REAL(struct args, min_p, "min-p", 0, 0, 1, "drop tokens less likely than this part of the best"),
	OPTION_ROW_REAL(struct args, repeat_penalty, "repeat-penalty", 1, 0, 100, "1: none"),
	OPTION_ROW_INT(struct args, seed, "seed", -1, -1, INT64_MAX, "same seed, same answer; -1: a random one"),
	OPTION_ROW_BOOL(struct args, ignore_eos, "ignore-eos", "go on past the end of the answer"),
	OPTION_ROW_BOOL(struct args, show_special, "show-special", "show control tokens as text"),
	OPTION_ROW_STRING(struct args, device, "device", "cpu", "as for serve"),
	OPTION_ROW_INT(struct args, threads, "threads", 0, 0, 1024, "compute threads; 0: one per physical core"),
	OPTION_ROW_INT(struct args, context, "context", 0, 0, 1 << 30, "longest sequence; 0: as trained"),
	OPTION_ROW_STRING(struct args, rope_scaling, "rope-scaling", NULL,
                          "as the server's: yarn:4, linear:2, none, ..."),
	{OPTION_BYTES, "kv-memory", offsetof(struct args, kv_memory), NULL, 0, 0, 0, INT64_MAX,
         "cap of the KV cache; 0: derived"},
};

static const struct cli_usage usage = {
	"kvasir generate --model FILE --prompt TEXT [options]",
	"Streams one answer to standard output, and timings to standard error.",
	{rows, sizeof rows / sizeof *rows},
};

/* {"messages": [{"role", "content"}...], "add_generation_prompt": true} */
static struct value *chat_value(struct arena *a, const struct args *args, const struct buf *prompt)
{
	const struct {
		const char *role, *content;
		size_t n;
	} turns[] = {{"system", args->system, args->system ? strlen(args->system) : 0},
	             {"user", prompt->data, prompt->len}};
	struct value *chat = value_dict(a), *messages = value_list(a);
	bool ok = chat && messages;
	for (size_t i = 0; ok && i < 2; i++) {
		if (i == 0 && !args->system)
			continue;
		struct value *turn = value_dict(a);
		ok = value_dict_set(a, turn, "role", 4,
		                    value_string(a, turns[i].role, strlen(turns[i].role), VALUE_DATA)) &&
		     value_dict_set(a, turn, "content", 7, value_string(a, turns[i].content, turns[i].n, VALUE_DATA)) &&
		     value_list_add(a, messages, turn);
	}
	ok = ok && value_dict_set(a, chat, "messages", 8, messages) &&
	     value_dict_set(a, chat, "add_generation_prompt", 21, value_bool(a, true));
	return ok ? chat : NULL;
}

static enum status build_request(struct engine *e, const struct args *args, struct buf *prompt,
                                 struct engine_request **out, struct error *err)
{
	struct engine_request *r = engine_request_create(e);
	if (!r)
		return error_set(err, STATUS_NOMEM, "out of memory");
	r->max_tokens = (int32_t)args->max_tokens;
	r->ignore_eos = args->ignore_eos;
	r->keep_special = args->show_special;
	r->sampling.temperature = (float)args->temperature;
	r->sampling.top_k = (int32_t)args->top_k;
	r->sampling.top_p = (float)args->top_p;
	r->sampling.min_p = (float)args->min_p;
	r->sampling.repeat_penalty = (float)args->repeat_penalty;
	r->sampling.seed = (uint64_t)args->seed;
	if (args->seed < 0 && getrandom(&r->sampling.seed, sizeof r->sampling.seed, 0) != sizeof r->sampling.seed)
		r->sampling.seed = (uint64_t)clock_now_ns(clock_system());
	if (args->chat) {
		r->input = ENGINE_INPUT_CHAT;
		r->arena = arena_create(ARENA_BYTES);
		r->chat = r->arena ? chat_value(r->arena, args, prompt) : NULL;
		if (!r->chat) {
			engine_request_destroy(r);
			return error_set(err, STATUS_NOMEM, "out of memory");
		}
	} else {
		r->input = ENGINE_INPUT_TEXT;
		r->text = buf_take(prompt, &r->text_n);
	}
	*out = r;
	return STATUS_OK;
}

static double per_second(int32_t n, int64_t ns)
{
	return ns > 0 ? n * 1e9 / (double)ns : 0;
}

static void report(const struct engine_event *done)
{
	const struct engine_usage *u = &done->usage;
	int32_t computed = u->prompt_tokens - u->cached_tokens;
	fprintf(stderr,
	        "prompt: %d tokens in %.3f s (%.1f tokens/s), answer: %d tokens in %.3f s (%.1f tokens/s), "
	        "first token after %.3f s, ended by %s\n",
	        u->prompt_tokens, (double)u->prefill_ns / 1e9, per_second(computed, u->prefill_ns),
	        u->completion_tokens, (double)u->decode_ns / 1e9, per_second(u->completion_tokens, u->decode_ns),
	        (double)u->ttft_ns / 1e9, done->detail ? done->detail : "?");
}

/* Shows the answer as it comes; the exit status of the command. */
static int stream(struct engine *e, uint64_t id)
{
	bool cancelled = false, ended = false;
	int status = CLI_OK;
	while (!ended) {
		struct list events;
		list_init(&events);
		engine_wait(e, &events, CLI_POLL_MS);
		if (cli_interrupted() && !cancelled) {
			engine_cancel(e, id);
			cancelled = true;
		}
		for (struct list *node; (node = list_pop_front(&events)) != NULL;) {
			struct engine_event *ev = list_entry(node, struct engine_event, link);
			if (ev->request_id == id && (ev->type == ENGINE_EVENT_TOKEN || ev->type == ENGINE_EVENT_DONE) &&
			    ev->text.len && !cli_write(ev->text.data, ev->text.len) && !cancelled) {
				engine_cancel(e, id);
				cancelled = true;
				status = CLI_FAILED;
			}
			if (ev->request_id == id && ev->type == ENGINE_EVENT_DONE) {
				cli_write("\n", 1);
				report(ev);
				ended = true;
			} else if (ev->request_id == id && ev->type == ENGINE_EVENT_ERROR) {
				status = cli_fail(&ev->error);
				ended = true;
			}
			engine_event_free(ev);
		}
	}
	return cli_interrupted() ? 128 + SIGINT : status;
}

int cli_generate(int argc, char **argv)
{
	struct args args;
	struct error err;
	struct engine *engine = NULL;
	struct engine_request *request = NULL;
	struct buf prompt = BUF_INIT, template = BUF_INIT;
	int status;
	if (cli_read_args(&usage, &args, argc, argv, NULL, &status) == CLI_STOP)
		goto out;
	if (!args.model || !args.prompt) {
		status = cli_misuse("generate needs --model FILE and --prompt TEXT");
		goto out;
	}
	status = CLI_FAILED;
	cli_catch_interrupt();
	if (strcmp(args.prompt, "-") == 0) {
		if (cli_read_file("-", &prompt, &err) != STATUS_OK)
			goto fail;
	} else {
		buf_puts(&prompt, args.prompt);
	}
	if (args.chat_template && cli_chat_template(args.chat_template, &template, &err) != STATUS_OK)
		goto fail;
	const struct engine_options options = {
		.model_path = args.model,
		.chat_template = args.chat_template ? template.data : NULL,
		.device = args.device,
		.n_threads = (int32_t)args.threads,
		.context_tokens = (int32_t)args.context,
		.rope_scaling = args.rope_scaling,
		.kv_bytes = (uint64_t)args.kv_memory,
		.max_running = 1,
	};
	if (engine_create(&options, &engine, &err) != STATUS_OK || cli_wait_ready(engine, &err) != STATUS_OK)
		goto fail;
	if (build_request(engine, &args, &prompt, &request, &err) != STATUS_OK)
		goto fail;
	uint64_t id = request->id;
	engine_submit(engine, request);
	status = stream(engine, id);
	goto out;
fail:
	status = cli_fail(&err);
out:
	engine_destroy(engine);
	buf_free(&template);
	buf_free(&prompt);
	option_free(usage.options, &args);
	return status;
}
