#include "server/responses_internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "server/kv_cache.h"

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
		buf_printf(out,
		           "{\"id\":\"%s\",\"type\":\"function_call\",\"status\":\"%s\",\"call_id\":\"%s\",\"name\":",
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

/* The summary that this response is the first to read; NULL: none. */
static const struct compacted *first_summary(const struct response *r)
{
	return r->compacted.turns ? &r->compacted : response_goes_on(r) && r->base->made.turns ? &r->base->made : NULL;
}

/* What is told of it, and of one that could not be made. */
static const struct compacted *told_compaction(const struct response *r)
{
	return r->compacted.failed[0] || !first_summary(r) ? &r->compacted : first_summary(r);
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
	compacted_write(told_compaction(r), out);
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
	/* store is what was done, not what was asked. */
	buf_printf(out,
	           ",\"reasoning\":{\"effort\":null,\"summary\":null},\"service_tier\":\"default\",\"store\":%s,"
	           "\"temperature\":%.6g,\"text\":{\"format\":%s},\"tool_choice\":%s,\"tools\":",
	           r->stored ? "true" : "false", (double)p->sampling.temperature,
	           r->q.format.len ? r->q.format.data : "{\"type\":\"text\"}",
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
		kv_cache_write(out, &r->usage.context, told_compaction(r), r->q.params.tell_kv_cache);
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

void response_send_object(struct response *r, const char *type)
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
	buf_printf(&r->out, ",\"response_id\":\"%s\",\"item_id\":\"%s\",\"output_index\":%d", r->id, r->item_id,
	           r->index);
	if (r->open == MESSAGE)
		buf_puts(&r->out, ",\"content_index\":0");
}

void response_announce(struct response *r)
{
	if (r->announced)
		return;
	r->announced = true;
	response_send_object(r, "response.created");
	response_send_object(r, "response.in_progress");
}

static void item_event(struct response *r, const char *type, bool full)
{
	event_begin(r, type);
	buf_printf(&r->out, ",\"response_id\":\"%s\",\"output_index\":%d,\"item\":", r->id, r->index);
	write_item(r, full, &r->out);
	event_send(r, type);
}

/* It stands for all that it replaced and brings along what was read after it, this input too. */
void response_send_summary(struct response *r)
{
	static const char *const types[] = {"response.output_item.added", "response.output_item.done"};
	const struct compacted *c = first_summary(r);
	struct buf content = BUF_INIT;
	if (!c || r->dead)
		return;
	make_id(r->item_id, sizeof r->item_id, "cmp_");
	compact_write_content(r->window_base, &r->window, &content);
	compact_write_item(c, r->item_id, &content, &r->output);
	buf_free(&content);
	for (size_t i = 0; i < 2; i++) {
		event_begin(r, types[i]);
		buf_printf(&r->out, ",\"response_id\":\"%s\",\"output_index\":%d,\"item\":", r->id, r->index);
		buf_append_buf(&r->out, &r->output);
		event_send(r, types[i]);
	}
	r->index++;
	r->has_summary = true;
}

void response_open_message(struct response *r)
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

void response_close_item(struct response *r, bool told)
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
		response_close_item(r, true);
	if (r->open == NO_ITEM)
		response_open_message(r);
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
	response_close_item(r, true);
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

void response_add_text(struct response *r, const struct buf *text)
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

void response_end_text(struct response *r)
{
	if (!r->parser || r->dead)
		return;
	tool_parser_finish(r->parser);
	flush_text(r);
	flush_arguments(r);
	r->output.failed = r->output.failed || tool_parser_failed(r->parser);
}

const struct tool_sink response_tool_sink = {.text = on_text, .call = on_call, .arguments = on_arguments};
