/*
 * kvasir chunk: carries out an instruction on a document that may be longer than the context, with the engine that the
 * daemon uses.
 */
#include "server/cli.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tools.h"
#include "server/document.h"

struct args {
	char *model, *instruction, *reduce_instruction, *device, *chat_template, *rope_scaling;
	bool split_only, json;
	int64_t max_chunk_tokens, max_output_tokens, parallel, threads, context, kv_memory;
	double overlap;
};

static const struct option rows[] = {
	OPTION_ROW_STRING(struct args, model, "model", NULL, "GGUF file"),
	OPTION_ROW_STRING(struct args, instruction, "instruction", NULL, "what to do with each part"),
	OPTION_ROW_STRING(struct args, reduce_instruction, "reduce-instruction", NULL,
                          "how to put the answers together; none: as the instruction says"),
	OPTION_ROW_INT(struct args, max_chunk_tokens, "max-chunk-tokens", 0, 0, INT32_MAX,
                       "tokens of a part; 0: what fits, at most 2048"),
	OPTION_ROW_REAL(struct args, overlap, "overlap", 0.15, 0, 1,
                        "share of a part that repeats the end of the one before, up to 0.5"),
	OPTION_ROW_INT(struct args, max_output_tokens, "max-output-tokens", 256, 1, INT32_MAX / 4,
                       "longest answer about a part, and in the end"),
	OPTION_ROW_INT(struct args, parallel, "parallel", 4, 1, 64, "parts that are answered for at a time"),
	OPTION_ROW_BOOL(struct args, split_only, "split-only",
                        "print the parts as JSON and ask nothing; only the vocabulary is loaded"),
	OPTION_ROW_BOOL(struct args, json, "json", "all answers, and what they have in common, as one JSON object"),
	OPTION_ROW_STRING(struct args, chat_template, "chat-template", NULL,
                          "a built-in template's name, or a file that holds one"),
	OPTION_ROW_STRING(struct args, rope_scaling, "rope-scaling", NULL,
                          "as the server's: yarn:4, linear:2, none, ..."),
	OPTION_ROW_STRING(struct args, device, "device", "cpu", "as for serve"),
	OPTION_ROW_INT(struct args, threads, "threads", 0, 0, 1024, "compute threads; 0: one per physical core"),
	OPTION_ROW_INT(struct args, context, "context", 0, 0, 1 << 30, "longest sequence; 0: as trained"),
	OPTION_ROW_BYTES(struct args, kv_memory, "kv-memory", 0, 0, INT64_MAX, "cap of the KV cache; 0: derived"),
};

static const struct cli_usage usage = {
	"kvasir chunk --model FILE --instruction TEXT [options] FILE|-",
	"Cuts a document at headings, paragraphs, sentences or words into parts that fit, carries out the instruction "
        "on each, and puts the\n"
	"answers together until there is one, which is written to standard output.",
	{rows, sizeof rows / sizeof *rows},
};

/* ---- Cutting only ---- */

static enum status split_only(const struct args *args, struct document *d, struct buf *text, struct error *err)
{
	struct engine_split_params cut;
	struct engine_vocab *v;
	struct engine_chunk *chunks = NULL;
	struct buf out = BUF_INIT;
	size_t n = 0;
	enum status st = engine_vocab_open(args->model, &v, err);
	if (st != STATUS_OK)
		return st;
	document_split(d, &cut);
	st = engine_vocab_split(v, buf_str(text), &cut, &chunks, &n, err);
	engine_vocab_close(v);
	if (st == STATUS_OK)
		st = document_begin_with(d, text, chunks, n, err);
	if (st != STATUS_OK)
		return st;
	document_write_chunks(d, true, &out);
	buf_putc(&out, '\n');
	if (out.failed)
		st = error_set(err, STATUS_NOMEM, "out of memory");
	else if (!cli_write(out.data, out.len))
		st = error_set(err, STATUS_IO, "cannot write the parts");
	buf_free(&out);
	return st;
}

/* ---- Answers ---- */

enum { RUNS_MAX = 64 };

struct chunking {
	struct engine *engine;
	struct document *document;
	struct {
		uint64_t id; /* 0: free */
		size_t call;
	} run[RUNS_MAX];
	uint64_t split_id;
};

static enum status start_runs(struct chunking *c, struct error *err)
{
	for (;;) {
		struct engine_request *r;
		size_t call, i = 0;
		enum status st = document_next(c->document, c->engine, &r, &call, err);
		if (st != STATUS_OK || !r)
			return st;
		while (c->run[i].id)
			i++;
		c->run[i].id = r->id;
		c->run[i].call = call;
		engine_submit(c->engine, r);
	}
}

static enum status no_memory(struct error *err)
{
	return error_set(err, STATUS_NOMEM, "out of memory");
}

static enum status handle(struct chunking *c, struct engine_event *ev, struct error *err)
{
	if (ev->type == ENGINE_EVENT_ERROR) {
		*err = ev->error;
		return err->status;
	}
	if (ev->request_id == c->split_id)
		return document_begin(c->document, ev, err);
	size_t i = 0;
	while (i < RUNS_MAX && c->run[i].id != ev->request_id)
		i++;
	if (i == RUNS_MAX)
		return STATUS_OK;
	if (ev->type == ENGINE_EVENT_TOKEN && document_token(c->document, c->run[i].call, ev) != STATUS_OK)
		return no_memory(err);
	if (ev->type != ENGINE_EVENT_DONE)
		return STATUS_OK;
	c->run[i].id = 0;
	if (document_done(c->document, c->run[i].call, ev) != STATUS_OK)
		return no_memory(err);
	fprintf(stderr, "answer %zu of %zu so far, %d tokens\n", c->run[i].call + 1, document_n_calls(c->document),
	        ev->usage.completion_tokens);
	return STATUS_OK;
}

static enum status answer(struct chunking *c, struct buf *text, struct error *err)
{
	struct engine_split_params cut;
	enum status st = STATUS_OK;
	document_split(c->document, &cut);
	c->split_id = engine_next_id(c->engine);
	engine_split(c->engine, c->split_id, text, &cut);
	while (st == STATUS_OK && !document_ended(c->document)) {
		struct list events;
		list_init(&events);
		engine_wait(c->engine, &events, CLI_POLL_MS);
		if (cli_interrupted())
			st = error_set(err, STATUS_CANCELLED, "interrupted");
		for (struct list *node; (node = list_pop_front(&events)) != NULL;) {
			struct engine_event *ev = list_entry(node, struct engine_event, link);
			if (st == STATUS_OK)
				st = handle(c, ev, err);
			engine_event_free(ev);
		}
		if (st == STATUS_OK && !document_ended(c->document))
			st = start_runs(c, err);
	}
	return st;
}

static enum status write_answer(const struct args *args, const struct document *d, struct error *err)
{
	struct buf out = BUF_INIT;
	enum status st = STATUS_OK;
	if (args->json) {
		buf_putc(&out, '{');
		st = document_write_result(d, &out);
		buf_puts(&out, "}\n");
	} else {
		struct str s = document_output(d);
		buf_append(&out, s.p, s.n);
		buf_putc(&out, '\n');
	}
	if (st != STATUS_OK || out.failed)
		st = no_memory(err);
	else if (!cli_write(out.data, out.len))
		st = error_set(err, STATUS_IO, "cannot write the answer");
	buf_free(&out);
	return st;
}

static enum status run(const struct args *args, const struct document_params *params, const struct buf *template,
                       struct buf *text, struct error *err)
{
	struct chunking c = {0};
	const struct engine_options options = {
		.model_path = args->model,
		.chat_template = args->chat_template ? template->data : NULL,
		.device = args->device,
		.n_threads = (int32_t)args->threads,
		.context_tokens = (int32_t)args->context,
		.rope_scaling = args->rope_scaling,
		.kv_bytes = (uint64_t)args->kv_memory,
		.max_running = (int32_t)args->parallel,
	};
	enum status st = STATUS_OK;
	if (!args->split_only) {
		st = engine_create(&options, &c.engine, err);
		if (st == STATUS_OK)
			st = cli_wait_ready(c.engine, err);
	}
	if (st == STATUS_OK)
		st = document_create(params, args->split_only ? NULL : engine_info(c.engine), &c.document, err);
	if (st == STATUS_OK && args->split_only)
		st = split_only(args, c.document, text, err);
	else if (st == STATUS_OK)
		st = answer(&c, text, err);
	if (st == STATUS_OK && !args->split_only)
		st = write_answer(args, c.document, err);
	engine_destroy(c.engine);
	document_destroy(c.document);
	return st;
}

int cli_chunk(int argc, char **argv)
{
	struct args args;
	struct error err;
	const char *path = NULL;
	struct buf text = BUF_INIT, template = BUF_INIT;
	int status;
	if (cli_read_args(&usage, &args, argc, argv, &path, &status) == CLI_STOP)
		goto out;
	if (!args.model || !path || (!args.split_only && (!args.instruction || !args.instruction[0]))) {
		status = cli_misuse(
			"chunk needs --model FILE, --instruction TEXT (or --split-only), and a document: FILE or -");
		goto out;
	}
	cli_catch_interrupt();
	status = CLI_OK;
	const struct document_params params = {
		.instruction = args.instruction ? str_from(args.instruction) : (struct str){NULL, 0},
		.reduce_instruction =
			args.reduce_instruction ? str_from(args.reduce_instruction) : (struct str){NULL, 0},
		.max_chunk_tokens = (int32_t)args.max_chunk_tokens,
		.max_output_tokens = (int32_t)args.max_output_tokens,
		.overlap_permille = (int32_t)(args.overlap * 1000 + 0.5),
		.parallel = (int32_t)args.parallel,
		.split_only = args.split_only,
	};
	enum status st = cli_read_file(path, &text, &err);
	if (st == STATUS_OK && args.chat_template)
		st = cli_chat_template(args.chat_template, &template, &err);
	if (st == STATUS_OK)
		st = run(&args, &params, &template, &text, &err);
	if (st != STATUS_OK)
		status = cli_interrupted() ? 128 + SIGINT : cli_fail(&err);
out:
	buf_free(&text);
	buf_free(&template);
	option_free(usage.options, &args);
	return status;
}
