#include "server/responses_internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "server/messages.h"

/* ---- History ---- */

static void add_list(struct buf *out, const struct buf *items)
{
	if (out->len && items->len)
		buf_putc(out, ',');
	buf_append_buf(out, items);
}

/* What was said and called, as a message. */
static void add_answer(const struct response *r, struct buf *out)
{
	if (!r->q.generate)
		return;
	if (out->len)
		buf_putc(out, ',');
	buf_puts(out, "{\"role\":\"assistant\",\"content\":");
	buf_json_buf(out, &r->said);
	if (r->calls.len) {
		buf_puts(out, ",\"tool_calls\":[");
		buf_append_buf(out, &r->calls);
		buf_putc(out, ']');
	}
	buf_putc(out, '}');
}

static struct history *make_history(const struct response *r)
{
	struct history *h = history_create();
	if (!h)
		return NULL;
	memcpy(h->response_id, r->id, sizeof h->response_id);
	memcpy(h->session, r->session, sizeof h->session);
	if (response_goes_on(r))
		add_list(&h->messages, &r->base->messages);
	add_list(&h->messages, &r->q.input);
	add_answer(r, &h->messages);
	h->base = r->window_base;
	if (r->window_base.turns) {
		add_list(&h->window, &r->window);
		add_answer(r, &h->window);
	}
	if (h->messages.failed || h->window.failed || r->calls.failed) {
		history_unref(h);
		return NULL;
	}
	return h;
}

/* ---- The end ---- */

/* Keeps it for whoever asks for it by its id, if there is room. */
static void store(struct response *r)
{
	struct buf object = BUF_INIT;
	r->stored = true;
	response_write(r, &object);
	r->stored = store_put(&r->app->store, r->q.params.proto->tenant, r->kept, &object, &r->q.items);
	buf_free(&object);
}

/* The request as a compaction has to know it, but for the messages. */
static struct compact_request compact_request(const struct response *r)
{
	return (struct compact_request){
		.settings = r->q.compact,
		.instructions = buf_str(&r->q.instructions),
		.tools = buf_str(&r->q.tools),
		.tools_as_text = r->q.params.tools.as_text,
		.like = r->q.params.proto,
		.answer_tokens = r->q.params.proto->max_tokens,
		.origin = &r->origin,
		.session = r->session,
	};
}

/* How much the next turn may add: about as much as this one did, within an eighth and a quarter of the threshold. */
static int64_t next_turn_tokens(const struct response *r)
{
	enum { MARKS = 16 }; /* what a template puts around messages */
	int64_t threshold = r->q.compact.threshold, n = r->usage.prompt_tokens - r->usage.cached_tokens + MARKS;
	return n < threshold / 8 ? threshold / 8 : n < threshold / 4 ? n : threshold / 4;
}

/*
 * The next turn will pass the threshold, or be near it: the summary is made while the conversation idles. The response
 * is over for its client then, so that only a history that somebody keeps is worth it.
 */
static void look_ahead(struct response *r)
{
	const struct compact_settings *s = &r->q.compact;
	struct compact_request q = compact_request(r);
	if (s->threshold && r->q.generate && (r->stored || r->sink->keeps) &&
	    r->usage.prompt_tokens + r->usage.completion_tokens > s->threshold - next_turn_tokens(r))
		history_compact(r->app, r->kept, &q);
}

/*
 * Sends what is left to send and hands over to the owner, who may free r. What the client is told to be there to go on
 * from is there: so a history that cannot be had ends it as failed.
 */
static void finish(struct response *r, const char *status, const char *type)
{
	bool failed = strcmp(status, "failed") == 0;
	response_announce(r);
	r->status = status;
	response_close_item(r, !failed);
	if ((r->sink->keeps || r->q.store) && r->ran && !failed) {
		r->kept = make_history(r);
		if (!r->kept && r->sink->keeps) {
			failure_set(&r->failure, FAILURE_NOMEM, NULL, "There is no memory to keep the response.");
			r->status = "failed";
			type = "response.failed";
		}
	}
	if (r->kept && r->q.store)
		store(r);
	if (r->kept && !r->cancelling)
		look_ahead(r);
	response_send_object(r, type);
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
	response_announce(r);
	response_send_summary(r);
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
	response_add_text(r, &ev->text);
}

static void on_done(void *arg, int i, const struct engine_event *ev)
{
	struct response *r = arg;
	(void)i;
	response_add_text(r, &ev->text);
	response_end_text(r);
	if (r->dead)
		return;
	/* An answer of nothing is an empty message. */
	if (r->q.generate && r->open == NO_ITEM && r->index == r->has_summary)
		response_open_message(r);
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
		r->parser =
			tool_parser_create(q->params.tools.family, &r->q.params.tools.names, &response_tool_sink, r);
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

/* instructions, then the window: as JSON, to be read like any chat request. */
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
	if (r->window.len) {
		if (out->len > start)
			buf_putc(out, ',');
		buf_append_buf(out, &r->window);
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
		status = json_parse(buf_str(&text), "The conversation", &doc, &root, err);
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
		if (status == STATUS_OK && r->window_base.turns)
			turns_keep_first(&r->turns);
		if (status == STATUS_OK)
			status = chat_give(&chat, request, err);
	}
	json_doc_free(doc);
	buf_free(&text);
	return status;
}

/* What it continues as far as the model reads it, and the input. */
static enum status make_window(struct response *r, struct error *err)
{
	buf_clear(&r->window);
	r->window_base = r->q.base;
	if (response_goes_on(r)) {
		add_list(&r->window, history_window(r->base));
		r->window_base = r->base->base;
	}
	add_list(&r->window, &r->q.input);
	return r->window.failed ? error_set(err, STATUS_NOMEM, "There is no memory for the request.") : STATUS_OK;
}

/* Submits the window as it is. */
static enum status submit(struct response *r, struct error *err)
{
	struct engine_request *request = params_request(&r->q.params, r->app->engine, 0);
	struct generation *g = generation_create(r->app, 1, &r->origin, &ops, r);
	int64_t spent_ms = clock_now_ms(clock_system()) - r->start_ms;
	enum status status;

	if (!request || !g) {
		status = error_set(err, STATUS_NOMEM, "There is no memory for the request.");
		goto fail;
	}
	if (request->timeout_ms > 0)
		request->timeout_ms = request->timeout_ms > spent_ms ? request->timeout_ms - spent_ms : 1;
	memcpy(request->session, r->session, sizeof request->session);
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

/* ---- Compaction ---- */

static void refuse(struct response *r, const struct error *err)
{
	struct failure f;
	failure_from(&f, err);
	r->sink->refused(r->arg, &f);
}

static const struct compact_ops compact_ops;

static enum status measure(struct response *r, struct error *err)
{
	struct compact_request q = compact_request(r);
	q.messages = buf_str(&r->window);
	q.base = r->window_base;
	return compact_start(r->app, &q, &compact_ops, r, &r->compact, err);
}

/* The base's summary has come, or will not come. */
static void on_base_ready(struct history_waiter *w)
{
	struct response *r = list_entry(w, struct response, waiter);
	struct error err = {0};
	r->app->n_preparing--;
	if (make_window(r, &err) != STATUS_OK || measure(r, &err) != STATUS_OK)
		refuse(r, &err);
}

static void stop_waiting(struct response *r)
{
	if (r->waiter.ready && !list_empty(&r->waiter.link)) {
		list_remove(&r->waiter.link);
		r->app->n_preparing--;
	}
}

/*
 * It is too long. A summary that is being written is waited for, and in the background no longer; one that has not
 * begun is made here and now instead.
 */
static bool on_needed(void *arg)
{
	struct response *r = arg;
	if (!response_goes_on(r) || !r->base->compact)
		return true;
	if (!compact_is_writing(r->base->compact)) {
		history_stop_compaction(r->base);
		return true;
	}
	compact_hurry(r->base->compact);
	r->compact = NULL;
	r->waiter.ready = on_base_ready;
	list_push_back(&r->base->waiters, &r->waiter.link);
	r->app->n_preparing++;
	return false;
}

static void on_compacted(void *arg, struct compacted *made, const struct failure *f)
{
	struct response *r = arg;
	struct error err = {0};
	r->compact = NULL;
	if (f) {
		r->sink->refused(r->arg, f);
		return;
	}
	/* Short enough as it is: what is under way behind it would not be read. */
	if (response_goes_on(r) && !made->turns)
		history_stop_compaction(r->base);
	compacted_free(&r->compacted);
	r->compacted = *made;
	*made = (struct compacted){0};
	if (r->compacted.turns) {
		buf_free(&r->window);
		r->window = r->compacted.window;
		r->compacted.window = BUF_INIT;
		r->window_base = (struct compact_base){r->compacted.turns, r->compacted.messages};
	}
	if (submit(r, &err) != STATUS_OK)
		refuse(r, &err);
}

static const struct compact_ops compact_ops = {.needed = on_needed, .done = on_compacted};

enum status response_start(struct response *r, struct history *base, const char *session, struct error *err)
{
	history_ref(base);
	history_unref(r->base);
	r->base = base;
	r->start_ms = clock_now_ms(clock_system());
	snprintf(r->session, sizeof r->session, "%s", session ? session : r->q.params.proto->session);
	enum status status = make_window(r, err);
	if (status != STATUS_OK)
		return status;
	if (r->q.compact.threshold && r->q.generate)
		return measure(r, err);
	if (response_goes_on(r))
		history_stop_compaction(r->base);
	return submit(r, err);
}

void response_cancel(struct response *r)
{
	r->cancelling = true;
	compact_cancel(r->compact);
	r->compact = NULL;
	stop_waiting(r);
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
	compact_cancel(r->compact);
	stop_waiting(r);
	history_unref(r->base);
	history_unref(r->kept);
	buf_free(&r->window);
	compacted_free(&r->compacted);
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
