/*
 * POST /v1/chunk: a document that may be longer than the context, answered for in parts (document.h).
 *
 *     {"input": "...", "instruction": "Summarise this.", "reduce_instruction"?, "max_chunk_tokens"?, "overlap"?,
 *      "max_output_tokens"?, "temperature"?, "seed"?, "parallel"?, "cache_salt"?, "split_only"?, "stream"?}
 *
 * A stream has an event for the parts (chunk.split), for each answer (chunk.output), for what is new of the last one
 * (chunk.delta), and the whole as without one (chunk.completed). Each request is a generation of its own, a few at a
 * time, so that others take turns with them. Whoever leaves cancels all of them.
 */
#include <stdio.h>
#include <stdlib.h>

#include "server/api.h"
#include "server/document.h"
#include "server/generation.h"

enum { PARALLEL_MAX = 16, SALT_MAX = 256 };

#define TRY(expr)                                                                                                      \
	do {                                                                                                           \
		enum status try_status = (expr);                                                                       \
		if (try_status != STATUS_OK)                                                                           \
			return try_status;                                                                             \
	} while (0)

/* Held by the exchange until it closes, and by the engine while it cuts. */
struct chunking {
	struct waiter waiter;
	struct app *app;
	struct http_exchange *x; /* NULL once closed */
	struct document *document;
	struct list runs;        /* struct run.link */
	bool stream, streaming, split_only, cutting;
	char id[40];
	int64_t created;
	struct buf out;
};

/* A request that runs. */
struct run {
	struct list link;
	struct chunking *owner;
	struct generation *generation;
	size_t call;
};

static void on_prompt(void *arg, int i, const struct engine_event *ev);
static void on_begin(void *arg);
static void on_token(void *arg, int i, const struct engine_event *ev);
static void on_done(void *arg, int i, const struct engine_event *ev);
static void on_ended(void *arg, const struct failure *f, bool began);

static const struct generation_ops ops = {
	.prompt = on_prompt, .begin = on_begin, .token = on_token, .done = on_done, .ended = on_ended};

/* ---- Life ---- */

static void cancel_runs(struct chunking *c, const char *why)
{
	struct list *node;
	while ((node = list_pop_front(&c->runs))) {
		struct run *r = list_entry(node, struct run, link);
		generation_cancel(r->generation, why);
		free(r);
	}
}

static void release(struct chunking *c)
{
	if (c->x || c->cutting)
		return;
	c->app->n_documents--;
	document_destroy(c->document);
	buf_free(&c->out);
	free(c);
}

static void on_close(struct http_exchange *x, void *arg)
{
	struct chunking *c = arg;
	(void)x;
	c->x = NULL;
	cancel_runs(c, "disconnect");
	if (c->cutting)
		engine_cancel(c->app->engine, c->waiter.id);
	release(c);
}

/* ---- Output ---- */

static const char no_memory_event[] =
	"data: {\"error\":{\"message\":\"There is no memory to go on with the answer.\",\"type\":\"server_error\","
	"\"param\":null,\"code\":\"out_of_memory\"}}\n\ndata: [DONE]\n\n";

/* Ends the exchange with a failure, after which c may be gone. */
static void fail(struct chunking *c, const struct failure *f, bool logged)
{
	static const char last[] = "data: [DONE]\n\n";
	cancel_runs(c, "failed");
	if (!c->streaming) {
		if (logged)
			reply_failure_unlogged(c->x, f);
		else
			reply_failure(c->x, f);
		return;
	}
	buf_clear(&c->out);
	buf_puts(&c->out, "data: ");
	failure_write_body(&c->out, f);
	buf_puts(&c->out, "\n\n");
	buf_puts(&c->out, last);
	if (c->out.failed)
		http_stream_finish(c->x, no_memory_event, sizeof no_memory_event - 1);
	else
		http_stream_finish(c->x, c->out.data, c->out.len);
}

static void fail_error(struct chunking *c, const struct error *err)
{
	struct failure f;
	failure_from(&f, err);
	fail(c, &f, false);
}

static void fail_memory(struct chunking *c)
{
	struct failure f;
	failure_set(&f, FAILURE_NOMEM, NULL, "There is no memory for the document.");
	fail(c, &f, false);
}

/* Begins c->out as an event; its members follow. */
static void event_begin(struct chunking *c, const char *type)
{
	buf_clear(&c->out);
	buf_printf(&c->out, "data: {\"type\":\"%s\"", type);
}

/* False when nothing more can be sent; c may be gone then. A slow reader's exchange closes by itself. */
static bool event_send(struct chunking *c)
{
	buf_puts(&c->out, "}\n\n");
	enum status st = c->out.failed ? STATUS_NOMEM : http_stream_write(c->x, c->out.data, c->out.len);
	if (st == STATUS_OK)
		return true;
	cancel_runs(c, st == STATUS_LIMIT ? "slow_reader" : st == STATUS_NOMEM ? "out_of_memory" : "disconnect");
	if (st == STATUS_NOMEM)
		http_stream_finish(c->x, no_memory_event, sizeof no_memory_event - 1);
	return false;
}

static void write_head(struct chunking *c, const char *object, struct buf *out)
{
	buf_printf(out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", c->id, object,
	           (long long)c->created);
	buf_json_string(out, app_model_id(c->app), strlen(app_model_id(c->app)));
	buf_putc(out, ',');
}

/* The whole answer; c may be gone afterwards. */
static void complete(struct chunking *c)
{
	struct buf body = BUF_INIT;
	static const char last[] = "data: [DONE]\n\n";
	write_head(c, "chunk.result", &body);
	if (document_write_result(c->document, &body) != STATUS_OK)
		body.failed = true;
	buf_putc(&body, '}');
	if (!c->streaming) {
		reply_json(c->x, 200, &body);
		return;
	}
	event_begin(c, "chunk.completed");
	buf_puts(&c->out, ",\"result\":");
	buf_append_buf(&c->out, &body);
	buf_free(&body);
	if (event_send(c))
		http_stream_finish(c->x, last, sizeof last - 1);
}

/* ---- Requests ---- */

/* Starts what may run, or completes the answer. c may be gone afterwards. */
static void go_on(struct chunking *c)
{
	struct error err;
	char path[64];
	if (document_ended(c->document)) {
		complete(c);
		return;
	}
	snprintf(path, sizeof path, "%.*s", STR_ARG(http_path(c->x)));
	const struct generation_origin origin = {.method = method_name(http_method(c->x)),
	                                         .path = path,
	                                         .peer = http_peer(c->x),
	                                         .request_id = http_request_id(c->x)};
	for (;;) {
		struct engine_request *request;
		size_t call;
		if (document_next(c->document, c->app->engine, &request, &call, &err) != STATUS_OK) {
			fail_error(c, &err);
			return;
		}
		if (!request)
			return;
		struct run *r = calloc(1, sizeof *r);
		if (r)
			r->generation = generation_create(c->app, 1, &origin, &ops, r);
		if (!r || !r->generation) {
			free(r);
			engine_request_destroy(request);
			fail_memory(c);
			return;
		}
		r->owner = c;
		r->call = call;
		list_push_back(&c->runs, &r->link);
		generation_add(r->generation, request);
		generation_start(r->generation);
	}
}

static void on_prompt(void *arg, int i, const struct engine_event *ev)
{
	(void)arg;
	(void)i;
	(void)ev;
}

static void on_begin(void *arg)
{
	struct run *r = arg;
	generation_set_status(r->generation, 200);
}

static void on_token(void *arg, int i, const struct engine_event *ev)
{
	struct run *r = arg;
	struct chunking *c = r->owner;
	(void)i;
	if (document_token(c->document, r->call, ev) != STATUS_OK) {
		fail_memory(c);
		return;
	}
	if (!c->streaming || !ev->text.len || !document_is_last(c->document, r->call))
		return;
	event_begin(c, "chunk.delta");
	buf_puts(&c->out, ",\"delta\":");
	buf_json_string(&c->out, ev->text.data, ev->text.len);
	event_send(c);
}

static void on_done(void *arg, int i, const struct engine_event *ev)
{
	struct run *r = arg;
	struct chunking *c = r->owner;
	(void)i;
	bool last = document_is_last(c->document, r->call);
	if (document_done(c->document, r->call, ev) != STATUS_OK) {
		fail_memory(c);
		return;
	}
	if (!c->streaming)
		return;
	if (last && ev->text.len) {
		event_begin(c, "chunk.delta");
		buf_puts(&c->out, ",\"delta\":");
		buf_json_string(&c->out, ev->text.data, ev->text.len);
		if (!event_send(c))
			return;
	}
	event_begin(c, "chunk.output");
	buf_puts(&c->out, ",\"answer\":");
	document_write_call(c->document, r->call, &c->out);
	event_send(c);
}

static void on_ended(void *arg, const struct failure *f, bool began)
{
	struct run *r = arg;
	struct chunking *c = r->owner;
	(void)began;
	list_remove(&r->link);
	free(r);
	if (f)
		fail(c, f, true);
	else
		go_on(c);
}

/* ---- Cutting ---- */

static void reply_split(struct chunking *c)
{
	struct buf body = BUF_INIT;
	write_head(c, "chunk.split", &body);
	buf_puts(&body, "\"chunks\":");
	document_write_chunks(c->document, true, &body);
	buf_putc(&body, '}');
	reply_json(c->x, 200, &body);
}

static void on_split(struct waiter *w, const struct engine_event *ev)
{
	struct chunking *c = list_entry(w, struct chunking, waiter);
	struct error err;
	c->cutting = false;
	if (!c->x) {
		release(c);
		return;
	}
	if (ev->type == ENGINE_EVENT_ERROR) {
		fail_error(c, &ev->error);
		return;
	}
	/* The event is ours to take from: nobody else sees it. */
	if (document_begin(c->document, (struct engine_event *)ev, &err) != STATUS_OK) {
		fail_error(c, &err);
		return;
	}
	if (c->split_only) {
		reply_split(c);
		return;
	}
	if (c->stream) {
		http_set_header(c->x, "Cache-Control", "no-cache");
		http_set_header(c->x, "X-Accel-Buffering", "no"); /* nginx would hold the stream back */
		if (http_stream_begin(c->x, 200, "text/event-stream; charset=utf-8") != STATUS_OK)
			return;
		c->streaming = true;
		event_begin(c, "chunk.split");
		buf_puts(&c->out, ",\"chunks\":");
		document_write_chunks(c->document, false, &c->out);
		if (!event_send(c))
			return;
	}
	go_on(c);
}

/* ---- The request ---- */

static enum status read_size(const struct json *root, const char *name, int64_t min, int64_t max, int32_t *out,
                             struct error *err)
{
	struct json field = json_get(root, name);
	int64_t v = *out;
	TRY(json_read_int(&field, min, max, &v, err));
	*out = (int32_t)v;
	return STATUS_OK;
}

static enum status read_string(const struct json *root, const char *name, struct str *out, struct error *err)
{
	struct json field = json_get(root, name);
	TRY(json_read_text(&field, out, err));
	if (out->p && memchr(out->p, 0, out->n))
		return json_fail(&field, STATUS_INVALID, err, "must not hold a NUL.");
	return STATUS_OK;
}

/* salt: [SALT_MAX + 1] */
static enum status read_params(struct chunking *c, const struct json *root, struct document_params *p, char *salt,
                               struct error *err)
{
	struct json stream = json_get(root, "stream"), split_only = json_get(root, "split_only"),
		    overlap = json_get(root, "overlap");
	struct json temperature = json_get(root, "temperature"), seed = json_get(root, "seed"),
		    cache_salt = json_get(root, "cache_salt");
	struct str s = {NULL, 0};
	double share = -1;
	int64_t seed_value = 0;
	TRY(json_read_bool(&stream, &c->stream, err));
	TRY(json_read_bool(&split_only, &c->split_only, err));
	p->split_only = c->split_only;
	TRY(read_string(root, "instruction", &p->instruction, err));
	TRY(read_string(root, "reduce_instruction", &p->reduce_instruction, err));
	TRY(read_size(root, "max_chunk_tokens", 16, INT32_MAX, &p->max_chunk_tokens, err));
	TRY(read_size(root, "max_output_tokens", 1, INT32_MAX / 4, &p->max_output_tokens, err));
	TRY(read_size(root, "parallel", 1, PARALLEL_MAX, &p->parallel, err));
	TRY(json_read_number(&overlap, 0, 0.5, &share, err));
	p->overlap_permille = share < 0 ? -1 : (int32_t)(share * 1000 + 0.5);
	TRY(json_read_number(&temperature, 0, 2, &p->temperature, err));
	TRY(json_read_int(&seed, INT64_MIN, INT64_MAX, &seed_value, err));
	p->seed = (uint64_t)seed_value;
	TRY(read_string(root, "cache_salt", &s, err));
	if (s.n > SALT_MAX)
		return json_fail(&cache_salt, STATUS_INVALID, err, "must have at most %d bytes.", SALT_MAX);
	if (s.p) {
		snprintf(salt, SALT_MAX + 1, "%.*s", STR_ARG(s));
		p->cache_salt = salt;
	}
	return STATUS_OK;
}

static enum status begin(struct chunking *c, const struct json *root, struct error *err)
{
	struct json input = json_get(root, "input");
	struct str text = json_text(&input);
	struct document_params p = {.overlap_permille = -1, .tenant = http_principal(c->x)};
	struct engine_split_params cut;
	struct buf copy = BUF_INIT;
	char salt[SALT_MAX + 1];
	if (!text.p || text.n == 0)
		return json_fail(&input, STATUS_INVALID, err, "must be a string with the document's text.");
	TRY(read_params(c, root, &p, salt, err));
	TRY(document_create(&p, engine_info(c->app->engine), &c->document, err));
	buf_append(&copy, text.p, text.n);
	document_split(c->document, &cut);
	uint64_t id = engine_next_id(c->app->engine);
	c->waiter.event = on_split;
	c->cutting = true;
	app_wait(c->app, &c->waiter, id);
	http_on_close(c->x, on_close, c);
	engine_split(c->app->engine, id, &copy, &cut);
	return STATUS_OK;
}

void api_chunk(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct json_doc *doc;
	struct json root, model;
	struct failure f;
	struct error err = {0};
	if (!app_accepts(a, &f)) {
		reply_failure(x, &f);
		return;
	}
	if (!read_body(x, false, &doc, &root))
		return;
	model = json_get(&root, "model");
	struct chunking *c = calloc(1, sizeof *c);
	if (!c) {
		failure_set(&f, FAILURE_NOMEM, NULL, "There is no memory for the request.");
		reply_failure(x, &f);
	} else if (!app_serves(a, &model, &f)) {
		reply_failure(x, &f);
		free(c);
	} else {
		c->app = a;
		c->x = x;
		c->created = unix_now();
		list_init(&c->runs);
		make_id(c->id, sizeof c->id, "chunk-");
		a->n_documents++;
		if (begin(c, &root, &err) != STATUS_OK) {
			c->x = NULL;
			release(c);
			reply_error(x, &err);
		}
	}
	json_doc_free(doc);
}
