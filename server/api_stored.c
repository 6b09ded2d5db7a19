/*
 * Responses that are stored, and compaction on its own:
 *
 *     GET    /v1/responses/{id}
 *     DELETE /v1/responses/{id}
 *     GET    /v1/responses/{id}/input_items   ?limit=N&order=asc|desc&after=ID
 *     POST   /v1/responses/compact            {"input"?, "previous_response_id"?, "instructions"?,
 * "context_management"?}
 *
 * Each API key has responses of its own: none sees, or can tell of, another's.
 */
#include <stdio.h>
#include <stdlib.h>

#include "server/responses.h"

/* The response that the path names, or answers 404. A draining server still has them. */
static struct stored *find(struct app *a, struct http_exchange *x)
{
	struct str id = http_param(x, "id");
	struct stored *s = store_find(&a->store, http_principal(x), id);
	struct failure f;
	if (s)
		return s;
	failure_set(&f, FAILURE_NO_RESPONSE, "response_id",
		    "There is no response '%.*s': it was not stored, has been deleted, or had to make room.",
		    (int)(id.n < 100 ? id.n : 100), id.p);
	reply_failure(x, &f);
	return NULL;
}

void api_response_get(struct http_exchange *x, void *app)
{
	struct stored *s = find(app, x);
	struct buf body = BUF_INIT;
	if (!s)
		return;
	buf_append_buf(&body, &s->response);
	reply_json(x, 200, &body);
}

void api_response_delete(struct http_exchange *x, void *app)
{
	struct app *a = app;
	struct stored *s = find(a, x);
	struct buf body = BUF_INIT;
	if (!s)
		return;
	buf_printf(&body, "{\"id\":\"%s\",\"object\":\"response\",\"deleted\":true}", s->history->response_id);
	store_remove(&a->store, s);
	reply_json(x, 200, &body);
}

/* ---- Input items ---- */

enum { ITEMS_LIMIT = 20, ITEMS_MAX = 100 };

/* Which items, in which order. False: answered 400. */
static bool read_page(struct http_exchange *x, size_t *limit, bool *ascending)
{
	struct str order = http_query(x, "order"), n = http_query(x, "limit");
	struct failure f;
	*ascending = order.p && str_is(order, "asc");
	*limit = ITEMS_LIMIT;
	if (order.p && !*ascending && !str_is(order, "desc")) {
		failure_set(&f, FAILURE_INVALID, "order", "order must be \"asc\" or \"desc\".");
		reply_failure(x, &f);
		return false;
	}
	if (!n.p)
		return true;
	*limit = 0;
	for (size_t i = 0; i < n.n && i < 4; i++)
		*limit = n.p[i] >= '0' && n.p[i] <= '9' ? *limit * 10 + (size_t)(n.p[i] - '0') : ITEMS_MAX + 1;
	if (*limit >= 1 && *limit <= ITEMS_MAX && n.n < 4)
		return true;
	failure_set(&f, FAILURE_INVALID, "limit", "limit must be a number from 1 to %d.", ITEMS_MAX);
	reply_failure(x, &f);
	return false;
}

static void write_id(struct buf *out, const char *name, const struct json *item)
{
	struct json id = json_get(item, "id");
	buf_printf(out, ",\"%s\":", name);
	json_write(out, &id);
}

void api_response_input(struct http_exchange *x, void *app)
{
	struct stored *s = find(app, x);
	struct str after = http_query(x, "after");
	struct buf text = BUF_INIT, body = BUF_INIT;
	struct json_doc *doc = NULL;
	struct json root, list, first = {0}, last = {0};
	struct error err = {0};
	size_t limit, n = 0, i = 0;
	bool ascending, passed = !after.p;

	if (!s || !read_page(x, &limit, &ascending))
		return;
	buf_puts(&text, "{\"data\":[");
	buf_append_buf(&text, &s->input);
	buf_puts(&text, "]}");
	if (text.failed)
		error_set(&err, STATUS_NOMEM, "There is no memory to answer.");
	if (text.failed || json_parse(buf_str(&text), "What is stored", &doc, &root, &err) != STATUS_OK) {
		buf_free(&text);
		reply_error(x, &err);
		return;
	}
	list = json_get(&root, "data");
	buf_puts(&body, "{\"object\":\"list\",\"data\":[");
	for (; i < json_len(&list) && n < limit; i++) {
		struct json item = json_at(&list, ascending ? i : json_len(&list) - 1 - i), id = json_get(&item, "id");
		if (!passed) {
			passed = str_eq(json_text(&id), after);
			continue;
		}
		if (n++)
			buf_putc(&body, ',');
		else
			first = item;
		last = item;
		json_write(&body, &item);
	}
	buf_puts(&body, "]");
	write_id(&body, "first_id", &first);
	write_id(&body, "last_id", &last);
	buf_printf(&body, ",\"has_more\":%s}", i < json_len(&list) ? "true" : "false");
	json_doc_free(doc);
	buf_free(&text);
	reply_json(x, 200, &body);
}

/* ---- Compaction on its own ---- */

struct compaction {
	struct app *app;
	struct http_exchange *x;
	struct compact *compact; /* NULL once it has ended */
};

static void write_compaction(const struct compacted *c, struct buf *out)
{
	char id[RESPONSE_ID_MAX], item[RESPONSE_ID_MAX];
	struct buf content = BUF_INIT;
	make_id(id, sizeof id, "resp_");
	make_id(item, sizeof item, "cmp_");
	compact_write_content((struct compact_base){c->turns, c->messages}, &c->window, &content);
	buf_printf(out, "{\"id\":\"%s\",\"object\":\"response.compaction\",\"created_at\":%lld,\"output\":[", id,
		   (long long)unix_now());
	compact_write_item(c, item, &content, out);
	buf_printf(out,
		   "],\"usage\":{\"input_tokens\":%lld,\"input_tokens_details\":{\"cached_tokens\":%lld},\"output_"
		   "tokens\":%lld,"
		   "\"output_tokens_details\":{\"reasoning_tokens\":0},\"total_tokens\":%lld",
		   (long long)c->input_tokens, (long long)c->cached_tokens, (long long)c->output_tokens,
		   (long long)(c->input_tokens + c->output_tokens));
	compacted_write(c, out);
	buf_puts(out, "}}");
	buf_free(&content);
}

static void on_compacted(void *arg, struct compacted *made, const struct failure *f)
{
	struct compaction *c = arg;
	struct buf body = BUF_INIT;
	struct failure none;
	c->compact = NULL;
	if (f) {
		reply_failure(c->x, f);
	} else if (!made->window.len) {
		failure_set(&none, FAILURE_INVALID, "input", "There is no summary: %s",
			    made->failed[0] ? made->failed
					    : "no turns are older than those that stay as they are (keep_turns).");
		reply_failure(c->x, &none);
	} else {
		write_compaction(made, &body);
		reply_json(c->x, 200, &body);
	}
}

static const struct compact_ops ops = {.done = on_compacted};

static void on_close(struct http_exchange *x, void *arg)
{
	struct compaction *c = arg;
	(void)x;
	compact_cancel(c->compact);
	free(c);
}

static void start(struct app *a, struct http_exchange *x, struct response_request *q, struct history *base)
{
	struct compaction *c = calloc(1, sizeof *c);
	struct generation_origin origin = {.method = "POST",
					   .path = "/v1/responses/compact",
					   .peer = http_peer(x),
					   .request_id = http_request_id(x)};
	struct buf messages = BUF_INIT;
	struct compact_request request = {
		.settings = q->compact,
		.instructions = buf_str(&q->instructions),
		.tools = buf_str(&q->tools),
		.tools_as_text = q->params.tools.as_text,
		.base = q->base,
		.like = q->params.proto,
		.answer_tokens = -1,
		.force = true,
		.origin = &origin,
	};
	struct error err = {0};
	enum status status = STATUS_OK;
	if (!q->compact.threshold)
		request.settings = compact_defaults(engine_info(a->engine));
	if (base && !q->base.turns) {
		buf_append_buf(&messages, history_window(base));
		request.base = base->base;
	}
	if (messages.len && q->input.len)
		buf_putc(&messages, ',');
	buf_append_buf(&messages, &q->input);
	request.messages = buf_str(&messages);
	if (!c || messages.failed)
		status = error_set(&err, STATUS_NOMEM, "There is no memory for the request.");
	if (status == STATUS_OK) {
		c->app = a;
		c->x = x;
		status = compact_start(a, &request, &ops, c, &c->compact, &err);
	}
	buf_free(&messages);
	if (status != STATUS_OK) {
		free(c);
		reply_error(x, &err);
		return;
	}
	http_on_close(x, on_close, c);
}

void api_responses_compact(struct http_exchange *x, void *app)
{
	response_request_read(app, x, "summarise: it was not stored, or had to make room.", start);
}
