#include "server/responses.h"

#include <stdio.h>
#include <stdlib.h>

#include "server/kv_cache.h"
#include "server/messages.h"

struct response {
	struct app *app;
	struct response_request q;
	const struct response_sink *sink;
	void *arg;
	struct generation_origin origin;
	char *stream_id;
	struct generation *generation; /* NULL before the start and after the end */
	struct history *base;
	struct history *kept; /* of itself, once it has ended */
	char session[ENGINE_SESSION_ID_MAX + 1];
	char id[RESPONSE_ID_MAX], item_id[RESPONSE_ID_MAX];
	int64_t created, sequence;
	const char *status;	/* "in_progress", ... */
	struct failure failure; /* when status is "failed" */
	struct generation_usage usage;
	struct turns turns; /* that may be left out, behind n_instructions messages; and how many were */
	size_t n_instructions;
	int32_t turns_dropped;
	bool ran;	/* the prompt was accepted */
	bool announced; /* created and in_progress have been sent */
	bool cancelling;
	bool dead; /* the sink takes no more */

	struct buf output; /* the items that are closed, as JSON */
	int index;	   /* of the item that is open, or will be next */
	enum { NO_ITEM, MESSAGE, CALL } open;
	struct buf text, logprobs;		     /* of the message that is open */
	struct buf delta_logprobs;		     /* of tokens whose text is held back */
	struct tool_parser *parser;		     /* when there are tools */
	struct buf found;			     /* text that it has let through and that is not sent yet */
	struct buf call_name, arguments, part;	     /* of the call that is open; part: what is to be sent of its arguments */
	char call_id[RESPONSE_ID_MAX];
	struct buf said, calls; /* for the history: all text, and the calls as chat messages have them */
	struct buf out;		   /* the event under construction */
};

/* ---- History ---- */

struct history *history_ref(struct history *h)
{
	if (h)
		h->refs++;
	return h;
}

void history_unref(struct history *h)
{
	if (!h || --h->refs > 0)
		return;
	buf_free(&h->messages);
	free(h);
}

static void add_list(struct buf *out, const struct buf *items)
{
	if (out->len && items->len)
		buf_putc(out, ',');
	buf_append_buf(out, items);
}

static struct history *make_history(const struct response *r)
{
	struct history *h = calloc(1, sizeof *h);
	if (!h)
		return NULL;
	h->refs = 1;
	memcpy(h->response_id, r->id, sizeof h->response_id);
	memcpy(h->session, r->session, sizeof h->session);
	if (r->base)
		add_list(&h->messages, &r->base->messages);
	add_list(&h->messages, &r->q.input);
	if (r->q.generate) {
		if (h->messages.len)
			buf_putc(&h->messages, ',');
		buf_puts(&h->messages, "{\"role\":\"assistant\",\"content\":");
		buf_json_buf(&h->messages, &r->said);
		if (r->calls.len) {
			buf_puts(&h->messages, ",\"tool_calls\":[");
			buf_append_buf(&h->messages, &r->calls);
			buf_putc(&h->messages, ']');
		}
		buf_putc(&h->messages, '}');
	}
	if (h->messages.failed || r->calls.failed) {
		history_unref(h);
		return NULL;
	}
	return h;
}

/* ---- The response object ---- */

static bool is_status(const struct response *r, const char *status)
{
	return strcmp(r->status, status) == 0;
}

static const struct buf nothing;

static void write_logprobs(struct buf *out, const struct buf *logprobs)
{
	buf_puts(out, ",\"logprobs\":[");
	buf_append_buf(out, logprobs);
	buf_putc(out, ']');
}

static void write_part(struct response *r, bool full, struct buf *out)
{
	buf_puts(out, "{\"type\":\"output_text\",\"text\":");
	buf_json_buf(out, full ? &r->text : &nothing);
	buf_puts(out, ",\"annotations\":[]");
	write_logprobs(out, full ? &r->logprobs : &nothing);
	buf_putc(out, '}');
}

static void write_item(struct response *r, bool full, struct buf *out)
{
	const char *status = is_status(r, "completed")	   ? "completed"
			     : is_status(r, "in_progress") ? "in_progress"
							   : "incomplete";
	if (r->open == CALL) {
		buf_printf(out, "{\"id\":\"%s\",\"type\":\"function_call\",\"status\":\"%s\",\"call_id\":\"%s\",\"name\":",
			   r->item_id, status, r->call_id);
		buf_json_buf(out, &r->call_name);
		buf_puts(out, ",\"arguments\":");
		buf_json_buf(out, full ? &r->arguments : &nothing);
		buf_putc(out, '}');
		return;
	}
	buf_printf(out, "{\"id\":\"%s\",\"type\":\"message\",\"status\":\"%s\",\"role\":\"assistant\",\"content\":[",
		   r->item_id, status);
	if (full)
		write_part(r, true, out);
	buf_puts(out, "]}");
}

static void write_outcome(struct response *r, struct buf *out)
{
	buf_puts(out, ",\"error\":");
	if (is_status(r, "failed")) {
		buf_printf(out, "{\"code\":\"%s\",\"message\":", failure_code(&r->failure));
		buf_json_string(out, r->failure.message, strlen(r->failure.message));
		buf_putc(out, '}');
	} else {
		buf_puts(out, "null");
	}
	if (is_status(r, "incomplete"))
		buf_puts(out, ",\"incomplete_details\":{\"reason\":\"max_output_tokens\"}");
	else if (is_status(r, "cancelled"))
		buf_puts(out, ",\"incomplete_details\":{\"reason\":\"cancelled\"}");
	else
		buf_puts(out, ",\"incomplete_details\":null");
}

static void write_usage(struct response *r, struct buf *out)
{
	const struct generation_usage *u = &r->usage;
	if (is_status(r, "in_progress")) {
		buf_puts(out, ",\"usage\":null");
		return;
	}
	buf_printf(out,
		   ",\"usage\":{\"input_tokens\":%lld,\"input_tokens_details\":{\"cached_tokens\":%lld},"
		   "\"output_tokens\":%lld,\"output_tokens_details\":{\"reasoning_tokens\":0},\"total_tokens\":%lld",
		   (long long)u->prompt_tokens, (long long)u->cached_tokens, (long long)u->completion_tokens,
		   (long long)(u->prompt_tokens + u->completion_tokens));
	turns_write(&r->turns, r->n_instructions, r->turns_dropped, out);
	buf_putc(out, '}');
}

void response_write(struct response *r, struct buf *out)
{
	const struct engine_request *p = r->q.params.proto;
	const char *model = app_model_id(r->app);

	buf_printf(out,
		   "{\"id\":\"%s\",\"object\":\"response\",\"created_at\":%lld,\"status\":\"%s\",\"background\":false",
		   r->id, (long long)r->created, r->status);
	write_outcome(r, out);
	buf_puts(out, ",\"instructions\":");
	buf_append_buf(out, &r->q.instructions);
	if (r->q.params.has_max_tokens)
		buf_printf(out, ",\"max_output_tokens\":%d", p->max_tokens);
	else
		buf_puts(out, ",\"max_output_tokens\":null");
	buf_puts(out, ",\"model\":");
	buf_json_string(out, model, strlen(model));
	buf_puts(out, ",\"output\":[");
	if (!is_status(r, "in_progress"))
		buf_append_buf(out, &r->output);
	out->failed = out->failed || r->output.failed;
	buf_printf(out, "],\"parallel_tool_calls\":%s,\"previous_response_id\":",
		   !r->q.params.tools.active || r->q.params.tools.many ? "true" : "false");
	if (r->q.previous_id[0])
		buf_json_string(out, r->q.previous_id, strlen(r->q.previous_id));
	else
		buf_puts(out, "null");
	/* store is what was done, not what was asked: responses live in their connection only. */
	buf_printf(
		out,
		",\"reasoning\":{\"effort\":null,\"summary\":null},\"service_tier\":\"default\",\"store\":false,"
		"\"temperature\":%.6g,\"text\":{\"format\":%s},\"tool_choice\":%s,\"tools\":",
		(double)p->sampling.temperature, r->q.format.len ? r->q.format.data : "{\"type\":\"text\"}",
		r->q.tool_choice.len ? r->q.tool_choice.data : "\"auto\"");
	if (r->q.flat_tools.len)
		buf_append(out, r->q.flat_tools.data, r->q.flat_tools.len);
	else
		buf_puts(out, "[]");
	buf_printf(out, ",\"top_logprobs\":%d,\"top_p\":%.6g,\"truncation\":\"%s\"",
		   p->sampling.n_logprobs > 0 ? p->sampling.n_logprobs : 0, (double)p->sampling.top_p,
		   r->q.params.truncate ? "auto" : "disabled");
	write_usage(r, out);
	if (!is_status(r, "in_progress"))
		kv_cache_write(out, &r->usage.context, r->q.params.tell_kv_cache);
	buf_puts(out, ",\"user\":null,\"metadata\":");
	buf_append(out, r->q.metadata.data, r->q.metadata.len);
	buf_putc(out, '}');
}

/* ---- Events ---- */

static void event_begin(struct response *r, const char *type)
{
	buf_clear(&r->out);
	buf_printf(&r->out, "{\"type\":\"%s\",\"sequence_number\":%lld", type, (long long)r->sequence++);
	if (r->stream_id)
		buf_printf(&r->out, ",\"stream_id\":\"%s\"", r->stream_id);
}

static void event_send(struct response *r, const char *type)
{
	buf_putc(&r->out, '}');
	if (!r->sink->event || r->dead)
		return;
	if (r->sink->event(r->arg, type, &r->out))
		return;
	r->dead = true;
	if (r->generation)
		generation_cancel(r->generation, "slow_reader");
	r->generation = NULL;
}

static void send_object(struct response *r, const char *type)
{
	event_begin(r, type);
	buf_puts(&r->out, ",\"response\":");
	response_write(r, &r->out);
	event_send(r, type);
}

/* Events about the output; `body` follows the item's coordinates. */
static void part_begin(struct response *r, const char *type)
{
	event_begin(r, type);
	buf_printf(&r->out, ",\"response_id\":\"%s\",\"item_id\":\"%s\",\"output_index\":%d", r->id, r->item_id, r->index);
	if (r->open == MESSAGE)
		buf_puts(&r->out, ",\"content_index\":0");
}

static void announce(struct response *r)
{
	if (r->announced)
		return;
	r->announced = true;
	send_object(r, "response.created");
	send_object(r, "response.in_progress");
}

static void item_event(struct response *r, const char *type, bool full)
{
	event_begin(r, type);
	buf_printf(&r->out, ",\"response_id\":\"%s\",\"output_index\":%d,\"item\":", r->id, r->index);
	write_item(r, full, &r->out);
	event_send(r, type);
}

static void open_message(struct response *r)
{
	r->open = MESSAGE;
	make_id(r->item_id, sizeof r->item_id, "msg_");
	item_event(r, "response.output_item.added", false);
	part_begin(r, "response.content_part.added");
	buf_puts(&r->out, ",\"part\":");
	write_part(r, false, &r->out);
	event_send(r, "response.content_part.added");
}

static void end_message(struct response *r)
{
	part_begin(r, "response.output_text.done");
	buf_puts(&r->out, ",\"text\":");
	buf_json_buf(&r->out, &r->text);
	write_logprobs(&r->out, &r->logprobs);
	event_send(r, "response.output_text.done");
	part_begin(r, "response.content_part.done");
	buf_puts(&r->out, ",\"part\":");
	write_part(r, true, &r->out);
	event_send(r, "response.content_part.done");
}

/* Sends what is new of the arguments. */
static void flush_arguments(struct response *r)
{
	if (r->open != CALL || (!r->part.len && !r->part.failed))
		return;
	part_begin(r, "response.function_call_arguments.delta");
	buf_puts(&r->out, ",\"delta\":");
	buf_json_buf(&r->out, &r->part);
	buf_clear(&r->part);
	event_send(r, "response.function_call_arguments.delta");
}

static void end_call(struct response *r)
{
	flush_arguments(r);
	part_begin(r, "response.function_call_arguments.done");
	buf_puts(&r->out, ",\"name\":");
	buf_json_buf(&r->out, &r->call_name);
	buf_puts(&r->out, ",\"arguments\":");
	buf_json_buf(&r->out, &r->arguments);
	event_send(r, "response.function_call_arguments.done");
	buf_puts(&r->calls, r->calls.len ? ",{" : "{");
	buf_printf(&r->calls, "\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", r->call_id);
	buf_json_buf(&r->calls, &r->call_name);
	buf_puts(&r->calls, ",\"arguments\":");
	buf_json_buf(&r->calls, &r->arguments);
	buf_puts(&r->calls, "}}");
}

/* The open item is whole, or all there will be of it. `told`: its last events are sent. */
static void close_item(struct response *r, bool told)
{
	if (r->open == NO_ITEM)
		return;
	if (told && r->open == MESSAGE)
		end_message(r);
	else if (told)
		end_call(r);
	if (told)
		item_event(r, "response.output_item.done", true);
	if (r->output.len)
		buf_putc(&r->output, ',');
	write_item(r, true, &r->output);
	r->open = NO_ITEM;
	r->index++;
	buf_clear(&r->text);
	buf_clear(&r->logprobs);
	buf_clear(&r->call_name);
	buf_clear(&r->arguments);
	buf_clear(&r->part);
}

static void send_text(struct response *r, struct str text)
{
	if (!text.n || r->dead)
		return;
	if (r->open == CALL)
		close_item(r, true);
	if (r->open == NO_ITEM)
		open_message(r);
	buf_append(&r->text, text.p, text.n);
	buf_append(&r->said, text.p, text.n);
	part_begin(r, "response.output_text.delta");
	buf_puts(&r->out, ",\"delta\":");
	buf_json_string(&r->out, text.p, text.n);
	write_logprobs(&r->out, &r->delta_logprobs);
	buf_clear(&r->delta_logprobs);
	event_send(r, "response.output_text.delta");
}

/* The parser looks at single bytes: what a token released of the text is told as one. */
static void flush_text(struct response *r)
{
	send_text(r, buf_str(&r->found));
	r->output.failed = r->output.failed || r->found.failed;
	buf_clear(&r->found);
}

static void on_text(void *arg, struct str text)
{
	struct response *r = arg;
	buf_append(&r->found, text.p, text.n);
}

static void on_call(void *arg, struct str name)
{
	struct response *r = arg;
	flush_text(r);
	if (r->dead)
		return;
	close_item(r, true);
	r->open = CALL;
	make_id(r->item_id, sizeof r->item_id, "fc_");
	make_id(r->call_id, sizeof r->call_id, "call_");
	buf_append(&r->call_name, name.p, name.n);
	item_event(r, "response.output_item.added", false);
}

static void on_arguments(void *arg, struct str part)
{
	struct response *r = arg;
	buf_append(&r->arguments, part.p, part.n);
	buf_append(&r->part, part.p, part.n);
}

static const struct tool_sink tool_sink = {.text = on_text, .call = on_call, .arguments = on_arguments};

static void add_text(struct response *r, const struct buf *text)
{
	if (!r->parser) {
		send_text(r, buf_str(text));
		return;
	}
	tool_parser_push(r->parser, buf_str(text));
	flush_text(r);
	flush_arguments(r);
	r->output.failed = r->output.failed || tool_parser_failed(r->parser);
}

/*
 * Sends what is left to send and hands over to the owner, who may free r. What the client is told to be there to go on
 * from is there: so a history that cannot be had ends it as failed.
 */
static void finish(struct response *r, const char *status, const char *type)
{
	bool failed = strcmp(status, "failed") == 0;
	announce(r);
	r->status = status;
	close_item(r, !failed);
	if (r->sink->keeps && r->ran && !failed) {
		r->kept = make_history(r);
		if (!r->kept) {
			failure_set(&r->failure, FAILURE_NOMEM, NULL, "There is no memory to keep the response.");
			r->status = "failed";
			type = "response.failed";
		}
	}
	send_object(r, type);
	if (!r->dead)
		r->sink->ended(r->arg);
}

/* ---- Generation ---- */

static void on_prompt(void *arg, int i, const struct engine_event *ev)
{
	struct response *r = arg;
	(void)i;
	r->turns_dropped = ev->turns_dropped;
}

static void on_begin(void *arg)
{
	struct response *r = arg;
	r->ran = true;
	generation_set_status(r->generation, 200);
	announce(r);
}

static void on_token(void *arg, int i, const struct engine_event *ev)
{
	struct response *r = arg;
	(void)i;
	if (r->q.logprobs) {
		struct buf *lists[] = {&r->logprobs, &r->delta_logprobs};
		for (size_t k = 0; k < 2; k++) {
			if (lists[k]->len)
				buf_putc(lists[k], ',');
			write_token_logprob(r->app, lists[k], ev, r->q.params.proto->sampling.n_logprobs);
		}
	}
	add_text(r, &ev->text);
}

static void on_done(void *arg, int i, const struct engine_event *ev)
{
	struct response *r = arg;
	(void)i;
	add_text(r, &ev->text);
	if (r->parser && !r->dead) {
		tool_parser_finish(r->parser);
		flush_text(r);
		flush_arguments(r);
		r->output.failed = r->output.failed || tool_parser_failed(r->parser);
	}
	if (r->dead)
		return;
	/* An answer of nothing is an empty message. */
	if (r->q.generate && r->open == NO_ITEM && r->index == 0)
		open_message(r);
	if (ev->finish == ENGINE_FINISH_LENGTH && r->q.generate)
		r->status = "incomplete";
	else
		r->status = "completed";
}

static void on_ended(void *arg, const struct failure *f, bool began)
{
	struct response *r = arg;
	const char *status = r->status;

	generation_usage(r->generation, &r->usage);
	r->generation = NULL;
	r->status = "in_progress"; /* until announced */
	if (!f) {
		if (strcmp(status, "incomplete") == 0)
			finish(r, "incomplete", "response.incomplete");
		else
			finish(r, "completed", "response.completed");
	} else if (r->cancelling && f->kind == FAILURE_CANCELLED) {
		finish(r, "cancelled", "response.incomplete");
	} else if (!began || !r->sink->event) {
		r->sink->refused(r->arg, f);
	} else {
		r->failure = *f;
		finish(r, "failed", "response.failed");
	}
}

static const struct generation_ops ops = {
	.prompt = on_prompt, .begin = on_begin, .token = on_token, .done = on_done, .ended = on_ended};

/* ---- Life ---- */

struct response *response_create(struct app *a, struct response_request *q, const struct response_sink *sink, void *arg,
				 const struct generation_origin *origin, const char *stream_id)
{
	struct response *r = calloc(1, sizeof *r);
	if (!r)
		return NULL;
	if (stream_id)
		r->stream_id = strdup(stream_id);
	if (q->params.tools.active)
		r->parser = tool_parser_create(q->params.tools.family, &r->q.params.tools.names, &tool_sink, r);
	if ((stream_id && !r->stream_id) || (q->params.tools.active && !r->parser)) {
		tool_parser_destroy(r->parser);
		free(r->stream_id);
		free(r);
		return NULL;
	}
	r->app = a;
	r->q = *q;
	*q = (struct response_request){0};
	r->sink = sink;
	r->arg = arg;
	r->origin = *origin;
	r->created = unix_now();
	r->status = "in_progress";
	make_id(r->id, sizeof r->id, "resp_");
	return r;
}

/* instructions, then what came before, then the input: as JSON, to be read like any chat request. */
static void write_messages(struct response *r, struct buf *out)
{
	buf_putc(out, '{');
	buf_puts(out, "\"messages\":[");
	size_t start = out->len;
	r->n_instructions = r->q.instructions.len && r->q.instructions.data[0] == '"';
	if (r->n_instructions) {
		buf_puts(out, "{\"role\":\"system\",\"content\":");
		buf_append(out, r->q.instructions.data, r->q.instructions.len);
		buf_putc(out, '}');
	}
	const struct buf *lists[] = {r->base ? &r->base->messages : NULL, &r->q.input};
	for (size_t i = 0; i < 2; i++) {
		if (!lists[i] || !lists[i]->len)
			continue;
		if (out->len > start)
			buf_putc(out, ',');
		buf_append(out, lists[i]->data, lists[i]->len);
	}
	buf_puts(out, "],\"tools\":");
	if (r->q.tools.len)
		buf_append(out, r->q.tools.data, r->q.tools.len);
	else
		buf_puts(out, "null");
	buf_putc(out, '}');
}

static enum status build_prompt(struct response *r, struct engine_request *request, struct error *err)
{
	struct buf text = BUF_INIT;
	struct json_doc *doc = NULL;
	struct json root;
	enum status status;

	write_messages(r, &text);
	if (text.failed)
		status = error_set(err, STATUS_NOMEM, "There is no memory for the request.");
	else
		status = json_parse(buf_str(&text), &doc, &root, err);
	if (status == STATUS_OK) {
		struct json messages = json_get(&root, "messages"), tools = json_get(&root, "tools");
		/* A warm-up stops where the next turn's input will begin. */
		struct chat_request chat = {.messages = &messages,
					    .tools = &tools,
					    .tools_as_text = r->q.params.tools.as_text,
					    .add_generation_prompt = r->q.generate,
					    .turns = r->q.params.truncate ? &r->turns : NULL,
					    .text_n = text.len};
		turns_free(&r->turns); /* of a start that was refused */
		if (r->q.params.truncate)
			status = turns_read(&r->turns, &messages, err);
		if (status == STATUS_OK)
			status = chat_give(&chat, request, err);
	}
	json_doc_free(doc);
	buf_free(&text);
	return status;
}

enum status response_start(struct response *r, struct history *base, const char *session, struct error *err)
{
	struct engine_request *request = params_request(&r->q.params, r->app->engine, 0);
	struct generation *g = generation_create(r->app, 1, &r->origin, &ops, r);
	enum status status;

	history_ref(base);
	history_unref(r->base);
	r->base = base;
	if (!request || !g) {
		status = error_set(err, STATUS_NOMEM, "There is no memory for the request.");
		goto fail;
	}
	if (session)
		snprintf(request->session, sizeof request->session, "%s", session);
	memcpy(r->session, request->session, sizeof r->session);
	status = build_prompt(r, request, err);
	if (status != STATUS_OK)
		goto fail;
	r->generation = g;
	generation_add(g, request);
	generation_start(g);
	return STATUS_OK;

fail:
	generation_discard(g);
	engine_request_destroy(request);
	return status;
}

void response_cancel(struct response *r)
{
	r->cancelling = true;
	if (r->generation)
		generation_stop(r->generation, "cancelled");
	else
		finish(r, "cancelled", "response.incomplete");
}

void response_destroy(struct response *r)
{
	if (!r)
		return;
	if (r->generation)
		generation_cancel(r->generation, "disconnect");
	history_unref(r->base);
	history_unref(r->kept);
	response_request_free(&r->q);
	turns_free(&r->turns);
	tool_parser_destroy(r->parser);
	buf_free(&r->output);
	buf_free(&r->found);
	buf_free(&r->call_name);
	buf_free(&r->arguments);
	buf_free(&r->part);
	buf_free(&r->said);
	buf_free(&r->calls);
	buf_free(&r->text);
	buf_free(&r->logprobs);
	buf_free(&r->delta_logprobs);
	buf_free(&r->out);
	free(r->stream_id);
	free(r);
}

const char *response_id(const struct response *r)
{
	return r->id;
}

const struct response_request *response_request(const struct response *r)
{
	return &r->q;
}

struct history *response_history(const struct response *r)
{
	return r->kept;
}

int64_t response_next_number(const struct response *r)
{
	return r->sequence;
}
