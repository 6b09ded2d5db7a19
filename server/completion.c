#include "server/completion.h"

#include <stdio.h>
#include <stdlib.h>

#include "server/kv_cache.h"

static void on_prompt(void *arg, int i, const struct engine_event *ev);
static void on_begin(void *arg);
static void on_token(void *arg, int i, const struct engine_event *ev);
static void on_done(void *arg, int i, const struct engine_event *ev);
static void on_ended(void *arg, const struct failure *f, bool began);

static const struct generation_ops ops = {
	.prompt = on_prompt, .begin = on_begin, .token = on_token, .done = on_done, .ended = on_ended};

/* ---- Life ---- */

static void destroy(struct completion *c)
{
	for (int i = 0; i < c->n_choices; i++) {
		struct completion_choice *ch = &c->choices[i];
		buf_free(&ch->text);
		buf_free(&ch->token_ids);
		buf_free(&ch->prompt_ids);
		for (size_t k = 0; k < 4; k++)
			buf_free(&ch->logprobs[k]);
		tool_parser_destroy(ch->parser);
		buf_free(&ch->call_name);
		buf_free(&ch->arguments);
		buf_free(&ch->tool_calls);
	}
	params_free(&c->params);
	turns_free(&c->turns);
	buf_free(&c->head);
	buf_free(&c->out);
	free(c);
}

/* The exchange is over: answered, or the client has left. Its work ends with it. */
static void on_close(struct http_exchange *x, void *arg)
{
	struct completion *c = arg;
	(void)x;
	if (c->generation)
		generation_cancel(c->generation, "disconnect");
	destroy(c);
}

struct completion *completion_create(struct app *a, struct http_exchange *x, const struct completion_shape *shape,
				     struct params *params, int n_prompts)
{
	int n = n_prompts * params->n;
	struct completion *c = calloc(1, sizeof *c + (size_t)n * sizeof *c->choices);
	char path[64];
	struct failure f;

	snprintf(path, sizeof path, "%.*s", STR_ARG(http_path(x)));
	if (c)
		c->generation = generation_create(a, (size_t)n,
						  &(struct generation_origin){.method = method_name(http_method(x)),
									      .path = path,
									      .peer = http_peer(x),
									      .request_id = http_request_id(x)},
						  &ops, c);
	if (!c || !c->generation) {
		free(c);
		failure_set(&f, FAILURE_NOMEM, NULL, "There is no memory for the request.");
		reply_failure(x, &f);
		return NULL;
	}
	c->app = a;
	c->x = x;
	c->shape = shape;
	c->params = *params;
	params->proto = NULL;
	params->tools = (struct tools){0};
	c->created = unix_now();
	c->n_choices = n;
	make_id(c->id, sizeof c->id, shape->id_prefix);
	generation_share_prompt(c->generation, c->params.n);

	buf_printf(&c->head, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", c->id,
		   c->params.stream ? shape->chunk_object : shape->object, (long long)c->created);
	buf_json_string(&c->head, app_model_id(a), strlen(app_model_id(a)));
	buf_printf(&c->head, ",\"system_fingerprint\":\"%s\",\"choices\":[", app_fingerprint(a));
	return c;
}

static void on_text(void *arg, struct str text);
static void on_call(void *arg, struct str name);
static void on_arguments(void *arg, struct str part);

static const struct tool_sink tool_sink = {.text = on_text, .call = on_call, .arguments = on_arguments};

static bool add_parser(struct completion *c, struct completion_choice *ch)
{
	ch->owner = c;
	if (!c->params.tools.active || ch->parser)
		return true;
	ch->parser = tool_parser_create(c->params.tools.family, &c->params.tools.names, &tool_sink, ch);
	return ch->parser != NULL;
}

struct engine_request *completion_request(struct completion *c, int choice)
{
	struct engine_request *r = add_parser(c, &c->choices[choice])
					   ? params_request(&c->params, c->app->engine, choice)
					   : NULL;
	if (r)
		r->want_prompt = c->params.return_token_ids || c->params.echo;
	return r;
}

void completion_add(struct completion *c, struct engine_request *r)
{
	generation_add(c->generation, r);
}

void completion_start(struct completion *c)
{
	http_on_close(c->x, on_close, c);
	generation_start(c->generation);
}

void completion_abort(struct completion *c, const struct error *err)
{
	struct http_exchange *x = c->x;
	generation_discard(c->generation);
	destroy(c);
	reply_error(x, err);
}

/* ---- Parts ---- */

void append_id(struct buf *ids, int32_t id)
{
	buf_printf(ids, ids->len ? ",%d" : "%d", id);
}

void write_token_ids(struct buf *out, const char *name, const struct buf *ids)
{
	buf_printf(out, ",\"%s\":[%s]", name, ids->len ? ids->data : "");
}

static void write_usage(struct completion *c, struct buf *out)
{
	struct generation_usage u;
	generation_usage(c->generation, &u);
	buf_printf(out,
		   "{\"prompt_tokens\":%lld,\"completion_tokens\":%lld,\"total_tokens\":%lld,"
		   "\"prompt_tokens_details\":{\"cached_tokens\":%lld}",
		   (long long)u.prompt_tokens, (long long)u.completion_tokens,
		   (long long)(u.prompt_tokens + u.completion_tokens), (long long)u.cached_tokens);
	turns_write(&c->turns, 0, c->turns_dropped, out);
	buf_putc(out, '}');
}

static void write_kept(struct completion *c, struct buf *out)
{
	struct generation_usage u;
	generation_usage(c->generation, &u);
	kv_cache_write(out, &u.context, NULL, c->params.tell_kv_cache);
}

/* ---- Streaming ---- */

/* The last words of a stream that cannot go on: nothing has to be allocated to write them. */
static const char no_memory_event[] =
	"data: {\"error\":{\"message\":\"There is no memory to go on with the answer.\",\"type\":\"server_error\","
	"\"param\":null,\"code\":\"out_of_memory\"}}\n\ndata: [DONE]\n\n";

static void choice_sent(struct completion_choice *ch)
{
	buf_clear(&ch->text);
	buf_clear(&ch->token_ids);
	buf_clear(&ch->prompt_ids);
	buf_clear(&ch->tool_calls);
	for (size_t k = 0; k < 4; k++)
		buf_clear(&ch->logprobs[k]);
}

/* Whether something of what it has collected is missing. */
static bool has_hole(const struct completion_choice *ch)
{
	bool hole = ch->text.failed || ch->tool_calls.failed || ch->token_ids.failed || ch->prompt_ids.failed ||
		    ch->call_name.failed || ch->arguments.failed || (ch->parser && tool_parser_failed(ch->parser));
	for (size_t k = 0; k < 4; k++)
		hole = hole || ch->logprobs[k].failed;
	return hole;
}

/* Sends c->out. A client that does not read loses its work at once; the exchange closes by itself. */
static void send_out(struct completion *c)
{
	enum status status = c->out.failed ? STATUS_NOMEM : http_stream_write(c->x, c->out.data, c->out.len);
	bool broken = status == STATUS_NOMEM;
	buf_clear(&c->out);
	if (status == STATUS_OK || !c->generation)
		return;
	generation_cancel(c->generation, status == STATUS_LIMIT ? "slow_reader"
	                                 : broken               ? "out_of_memory"
	                                                        : "disconnect");
	c->generation = NULL;
	/* A stream with a hole in it must not look complete. */
	if (broken)
		http_stream_finish(c->x, no_memory_event, sizeof no_memory_event - 1);
}

static void chunk_begin(struct completion *c)
{
	buf_clear(&c->out);
	buf_puts(&c->out, "data: ");
	buf_append_buf(&c->out, &c->head);
}

static void chunk_send(struct completion *c, bool final_usage, bool kept)
{
	buf_putc(&c->out, ']');
	/* A stream need not have usage, and what was left out is always told. */
	if (kept && !c->params.include_usage)
		turns_write(&c->turns, 0, c->turns_dropped, &c->out);
	if (kept)
		write_kept(c, &c->out);
	if (final_usage || c->params.continuous_usage) {
		buf_puts(&c->out, ",\"usage\":");
		write_usage(c, &c->out);
	} else if (c->params.include_usage) {
		buf_puts(&c->out, ",\"usage\":null");
	}
	buf_puts(&c->out, "}\n\n");
	send_out(c);
}

static void send_choice(struct completion *c, int i, const char *finish)
{
	if (!c->generation)
		return;
	chunk_begin(c);
	c->shape->chunk(c, i, finish, &c->out);
	c->out.failed = c->out.failed || has_hole(&c->choices[i]);
	choice_sent(&c->choices[i]);
	/* What was kept is the first choice's, and known when it ends. */
	chunk_send(c, false, finish && i == 0);
}

static void send_intro(struct completion *c, int i)
{
	struct completion_choice *ch = &c->choices[i];
	size_t before;
	if (!c->streaming || !ch->prompt_seen || ch->intro_sent || !c->generation)
		return;
	ch->intro_sent = true;
	chunk_begin(c);
	before = c->out.len;
	c->out.failed = c->out.failed || has_hole(ch);
	c->shape->intro(c, i, &c->out);
	if (c->out.failed || c->out.len > before)
		chunk_send(c, false, false);
}

/* ---- Calls of tools ---- */

bool only_calls(const struct completion_choice *ch)
{
	return ch->n_calls > 0 && ch->text.len == 0;
}

/* The call that is being read, or what is new of it, becomes part of tool_calls. */
static void write_call(struct completion_choice *ch)
{
	bool streaming = ch->owner->streaming, begins = ch->call_name.len > 0;
	struct buf *out = &ch->tool_calls;
	if (!begins && !(streaming && ch->arguments.len))
		return;
	buf_puts(out, out->len ? ",{" : "{");
	/* Streams number their calls in each delta; whole messages have them in order. */
	if (streaming)
		buf_printf(out, "\"index\":%d%s", ch->n_calls - 1, begins ? "," : "");
	if (begins) {
		buf_printf(out, "\"id\":\"%s\",\"type\":\"function\"", ch->call_id);
		buf_puts(out, ",\"function\":{\"name\":");
		buf_json_buf(out, &ch->call_name);
		buf_puts(out, ",\"arguments\":");
	} else {
		buf_puts(out, ",\"function\":{\"arguments\":");
	}
	buf_json_buf(out, &ch->arguments);
	buf_puts(out, "}}");
	buf_clear(&ch->call_name);
	buf_clear(&ch->arguments);
}

/* One call a chunk: readers differ in what they make of several. */
static void flush_call(struct completion_choice *ch)
{
	struct completion *c = ch->owner;
	write_call(ch);
	if (c->streaming && ch->tool_calls.len)
		send_choice(c, (int)(ch - c->choices), NULL);
}

static void on_text(void *arg, struct str text)
{
	struct completion_choice *ch = arg;
	if (ch->n_calls)
		flush_call(ch);
	buf_append(&ch->text, text.p, text.n);
}

static void on_call(void *arg, struct str name)
{
	struct completion_choice *ch = arg;
	if (ch->n_calls)
		flush_call(ch);
	else if (ch->owner->streaming && ch->text.len)
		send_choice(ch->owner, (int)(ch - ch->owner->choices), NULL);
	ch->n_calls++;
	make_id(ch->call_id, sizeof ch->call_id, "call_");
	buf_append(&ch->call_name, name.p, name.n);
}

static void on_arguments(void *arg, struct str part)
{
	struct completion_choice *ch = arg;
	buf_append(&ch->arguments, part.p, part.n);
}

static void add_text(struct completion_choice *ch, const struct buf *text)
{
	if (!ch->parser) {
		buf_append_buf(&ch->text, text);
		return;
	}
	tool_parser_push(ch->parser, buf_str(text));
}

/* ---- Events ---- */

static void on_prompt(void *arg, int i, const struct engine_event *ev)
{
	struct completion *c = arg;
	struct completion_choice *ch = &c->choices[i];
	ch->prompt_seen = true;
	c->turns_dropped = ev->turns_dropped;
	if (c->params.return_token_ids)
		for (size_t k = 0; k < ev->n_tokens; k++)
			append_id(&ch->prompt_ids, ev->tokens[k]);
	if (c->shape->prompt)
		c->shape->prompt(c, ch, ev);
	send_intro(c, i);
}

static void on_begin(void *arg)
{
	struct completion *c = arg;
	generation_set_status(c->generation, 200);
	if (!c->params.stream)
		return;
	http_set_header(c->x, "Cache-Control", "no-cache");
	http_set_header(c->x, "X-Accel-Buffering", "no"); /* nginx would hold the stream back */
	if (http_stream_begin(c->x, 200, "text/event-stream; charset=utf-8") != STATUS_OK) {
		generation_cancel(c->generation, "disconnect");
		c->generation = NULL;
		return;
	}
	c->streaming = true;
	for (int i = 0; i < c->n_choices; i++)
		send_intro(c, i);
}

static void on_token(void *arg, int i, const struct engine_event *ev)
{
	struct completion *c = arg;
	struct completion_choice *ch = &c->choices[i];
	if (c->params.proto->sampling.n_logprobs >= 0)
		c->shape->logprob(c, ch, ev);
	if (c->params.return_token_ids)
		append_id(&ch->token_ids, ev->sample.token);
	add_text(ch, &ev->text);
	/* A token that released no text yet is told with the next one that does. */
	if (c->streaming && (ch->text.len || has_hole(ch)))
		send_choice(c, i, NULL);
	if (c->streaming && ch->n_calls)
		flush_call(ch);
}

static void on_done(void *arg, int i, const struct engine_event *ev)
{
	struct completion *c = arg;
	struct completion_choice *ch = &c->choices[i];
	add_text(ch, &ev->text);
	if (ch->parser) {
		tool_parser_finish(ch->parser);
		flush_call(ch);
	}
	ch->finish = ev->finish == ENGINE_FINISH_LENGTH ? "length" : ch->n_calls ? "tool_calls" : "stop";
	if (!c->streaming)
		return;
	if (c->shape->finish_apart && (ch->text.len || ch->token_ids.len || ch->logprobs[0].len))
		send_choice(c, i, NULL);
	send_choice(c, i, ch->finish);
}

static void stream_end(struct completion *c, const struct failure *f)
{
	if (f) {
		buf_clear(&c->out);
		buf_puts(&c->out, "data: ");
		failure_write_body(&c->out, f);
		buf_puts(&c->out, "\n\n");
		send_out(c);
	} else if (c->params.include_usage) {
		chunk_begin(c);
		chunk_send(c, true, false);
	}
	static const char last[] = "data: [DONE]\n\n";
	c->generation = NULL;
	http_stream_finish(c->x, last, sizeof last - 1);
}

static void reply_whole(struct completion *c)
{
	struct buf body = BUF_INIT;
	buf_append_buf(&body, &c->head);
	for (int i = 0; i < c->n_choices; i++) {
		const struct completion_choice *ch = &c->choices[i];
		if (i)
			buf_putc(&body, ',');
		c->shape->choice(c, i, &body);
		body.failed = body.failed || has_hole(ch);
	}
	buf_puts(&body, "],\"usage\":");
	write_usage(c, &body);
	write_kept(c, &body);
	buf_putc(&body, '}');
	c->generation = NULL;
	reply_json(c->x, 200, &body);
}

static void on_ended(void *arg, const struct failure *f, bool began)
{
	struct completion *c = arg;
	(void)began;
	/* The answer may close the exchange and free *c: it comes last. */
	if (c->streaming)
		stream_end(c, f);
	else if (f) {
		c->generation = NULL;
		reply_failure_unlogged(c->x, f); /* the generation has its line */
	} else {
		reply_whole(c);
	}
}
