#include "server/responses.h"

#include <stdio.h>
#include <stdlib.h>

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
	char session[ENGINE_SESSION_ID_MAX + 1];
	char id[RESPONSE_ID_MAX], item_id[RESPONSE_ID_MAX];
	int64_t created, sequence;
	const char *status;	/* "in_progress", ... */
	struct failure failure; /* when status is "failed" */
	struct generation_usage usage;
	bool ran;	/* the prompt was accepted */
	bool announced; /* created and in_progress have been sent */
	bool item_open;
	bool cancelling;
	bool dead;		   /* the sink takes no more */
	struct buf text, logprobs; /* all of the output so far */
	struct buf delta_logprobs; /* of tokens whose text is held back */
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
	buf_append(out, items->data, items->len);
	out->failed = out->failed || items->failed;
}

struct history *response_history(const struct response *r)
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
		buf_json_string(&h->messages, buf_str(&r->text).p, r->text.len);
		buf_putc(&h->messages, '}');
	}
	if (h->messages.failed || r->text.failed) {
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

static void write_part(struct response *r, bool full, struct buf *out)
{
	buf_puts(out, "{\"type\":\"output_text\",\"text\":");
	buf_json_string(out, buf_str(&r->text).p, full ? r->text.len : 0);
	buf_printf(out, ",\"annotations\":[],\"logprobs\":[%s]}", full && r->logprobs.len ? r->logprobs.data : "");
}

static void write_item(struct response *r, bool full, struct buf *out)
{
	const char *status = is_status(r, "completed")	   ? "completed"
			     : is_status(r, "in_progress") ? "in_progress"
							   : "incomplete";
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
		   "\"output_tokens\":%lld,\"output_tokens_details\":{\"reasoning_tokens\":0},\"total_tokens\":%lld}",
		   (long long)u->prompt_tokens, (long long)u->cached_tokens, (long long)u->completion_tokens,
		   (long long)(u->prompt_tokens + u->completion_tokens));
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
	buf_append(out, r->q.instructions.data, r->q.instructions.len);
	if (r->q.params.has_max_tokens)
		buf_printf(out, ",\"max_output_tokens\":%d", p->max_tokens);
	else
		buf_puts(out, ",\"max_output_tokens\":null");
	buf_puts(out, ",\"model\":");
	buf_json_string(out, model, strlen(model));
	buf_puts(out, ",\"output\":[");
	if (!is_status(r, "in_progress") && r->item_open)
		write_item(r, true, out);
	buf_puts(out, "],\"parallel_tool_calls\":true,\"previous_response_id\":");
	if (r->q.previous_id[0])
		buf_json_string(out, r->q.previous_id, strlen(r->q.previous_id));
	else
		buf_puts(out, "null");
	/* store is what was done, not what was asked: responses live in their connection only. */
	buf_printf(
		out,
		",\"reasoning\":{\"effort\":null,\"summary\":null},\"service_tier\":\"default\",\"store\":false,"
		"\"temperature\":%.6g,\"text\":{\"format\":{\"type\":\"text\"}},\"tool_choice\":\"auto\",\"tools\":[],"
		"\"top_logprobs\":%d,\"top_p\":%.6g,\"truncation\":\"disabled\"",
		(double)p->sampling.temperature, p->sampling.n_logprobs > 0 ? p->sampling.n_logprobs : 0,
		(double)p->sampling.top_p);
	write_usage(r, out);
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
	buf_printf(&r->out, ",\"response_id\":\"%s\",\"item_id\":\"%s\",\"output_index\":0,\"content_index\":0", r->id,
		   r->item_id);
}

static void announce(struct response *r)
{
	if (r->announced)
		return;
	r->announced = true;
	send_object(r, "response.created");
	send_object(r, "response.in_progress");
}

static void open_item(struct response *r)
{
	if (r->item_open)
		return;
	r->item_open = true;
	event_begin(r, "response.output_item.added");
	buf_printf(&r->out, ",\"response_id\":\"%s\",\"output_index\":0,\"item\":", r->id);
	write_item(r, false, &r->out);
	event_send(r, "response.output_item.added");
	part_begin(r, "response.content_part.added");
	buf_puts(&r->out, ",\"part\":");
	write_part(r, false, &r->out);
	event_send(r, "response.content_part.added");
}

static void close_item(struct response *r)
{
	part_begin(r, "response.output_text.done");
	buf_puts(&r->out, ",\"text\":");
	buf_json_string(&r->out, buf_str(&r->text).p, r->text.len);
	buf_printf(&r->out, ",\"logprobs\":[%s]", r->logprobs.len ? r->logprobs.data : "");
	event_send(r, "response.output_text.done");
	part_begin(r, "response.content_part.done");
	buf_puts(&r->out, ",\"part\":");
	write_part(r, true, &r->out);
	event_send(r, "response.content_part.done");
	event_begin(r, "response.output_item.done");
	buf_printf(&r->out, ",\"response_id\":\"%s\",\"output_index\":0,\"item\":", r->id);
	write_item(r, true, &r->out);
	event_send(r, "response.output_item.done");
}

static void add_text(struct response *r, const struct buf *text)
{
	if (!text->len)
		return;
	open_item(r);
	buf_append(&r->text, text->data, text->len);
	part_begin(r, "response.output_text.delta");
	buf_puts(&r->out, ",\"delta\":");
	buf_json_string(&r->out, text->data, text->len);
	buf_printf(&r->out, ",\"logprobs\":[%s]", r->delta_logprobs.len ? r->delta_logprobs.data : "");
	buf_clear(&r->delta_logprobs);
	event_send(r, "response.output_text.delta");
}

/* Sends what is left to send and hands over to the owner, who may free r. */
static void finish(struct response *r, const char *status, const char *type)
{
	bool failed = strcmp(status, "failed") == 0;
	announce(r);
	r->status = status;
	if (r->item_open && !failed)
		close_item(r);
	send_object(r, type);
	if (!r->dead)
		r->sink->ended(r->arg);
}

/* ---- Generation ---- */

static void on_prompt(void *arg, int i, const struct engine_event *ev)
{
	(void)arg;
	(void)i;
	(void)ev;
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
	if (r->dead)
		return;
	if (r->q.generate)
		open_item(r);
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
	if (r && stream_id)
		r->stream_id = strdup(stream_id);
	if (!r || (stream_id && !r->stream_id)) {
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
	make_id(r->item_id, sizeof r->item_id, "msg_");
	return r;
}

/* instructions, then what came before, then the input: as JSON, to be read like any chat request. */
static void write_messages(struct response *r, struct buf *out)
{
	buf_putc(out, '{');
	buf_puts(out, "\"messages\":[");
	size_t start = out->len;
	if (r->q.instructions.len && r->q.instructions.data[0] == '"') {
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
		return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
	status = json_parse(buf_str(&text), &doc, &root, err);
	if (status == STATUS_OK) {
		struct json messages = json_get(&root, "messages"), tools = json_get(&root, "tools");
		/* A warm-up stops where the next turn's input will begin. */
		struct chat_request chat = {.messages = &messages,
					    .tools = &tools,
					    .tools_as_text = r->q.params.tools.as_text,
					    .add_generation_prompt = r->q.generate,
					    .text_n = text.len};
		request->input = ENGINE_INPUT_CHAT;
		status = chat_build(&chat, &request->arena, &request->chat, err);
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
	response_request_free(&r->q);
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

bool response_can_continue(const struct response *r)
{
	return r->ran && !is_status(r, "failed");
}
