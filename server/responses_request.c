/* Reading a Responses request: input items become chat messages, written as JSON text. */
#include "server/messages.h"
#include "server/responses.h"

#define TRY(expr)                                                                                                      \
	do {                                                                                                           \
		enum status try_status = (expr);                                                                       \
		if (try_status != STATUS_OK)                                                                           \
			return try_status;                                                                             \
	} while (0)

static void put_text(struct buf *out, const char *name, struct str s)
{
	buf_printf(out, ",\"%s\":", name);
	buf_json_string(out, s.p ? s.p : "", s.n);
}

/* {"role":...,"content":...} from a message item. */
static enum status add_message(const struct json *item, struct buf *out, struct error *err)
{
	static const char *const roles[] = {"user", "assistant", "system", "developer"};
	struct json role = json_get(item, "role"), content = json_get(item, "content");
	struct str r = json_text(&role);
	struct buf text = BUF_INIT;
	bool known = false;
	enum status status;

	for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
		known = known || str_is(r, roles[i]);
	if (!known)
		return json_fail(&role, STATUS_INVALID, err, "must be one of user, assistant, system and developer.");
	status = content_text(&content, &text, err);
	if (status == STATUS_OK) {
		buf_printf(out, "{\"role\":\"%.*s\"", STR_ARG(r));
		put_text(out, "content", buf_str(&text));
		buf_putc(out, '}');
		out->failed = out->failed || text.failed;
	}
	buf_free(&text);
	return status;
}

static enum status need_text(const struct json *item, const char *key, struct str *out, struct error *err)
{
	struct json j = json_get(item, key);
	*out = json_text(&j);
	return out->p ? STATUS_OK : json_fail(&j, STATUS_INVALID, err, "must be a string.");
}

/* Calls that stand together are one assistant message; `open` tells that the last one can take another. */
static enum status add_call(const struct json *item, bool *open, struct buf *out, struct error *err)
{
	struct str id, name, arguments;
	TRY(need_text(item, "call_id", &id, err));
	TRY(need_text(item, "name", &name, err));
	TRY(need_text(item, "arguments", &arguments, err));
	if (!*open)
		buf_puts(out, "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[");
	else
		buf_putc(out, ',');
	*open = true;
	buf_puts(out, "{\"type\":\"function\"");
	put_text(out, "id", id);
	buf_puts(out, ",\"function\":{\"name\":");
	buf_json_string(out, name.p, name.n);
	put_text(out, "arguments", arguments);
	buf_puts(out, "}}");
	return STATUS_OK;
}

static enum status add_result(const struct json *item, struct buf *out, struct error *err)
{
	struct json output = json_get(item, "output");
	struct buf text = BUF_INIT;
	struct str id;
	enum status status = need_text(item, "call_id", &id, err);
	if (status == STATUS_OK)
		status = content_text(&output, &text, err);
	if (status == STATUS_OK) {
		buf_puts(out, "{\"role\":\"tool\"");
		put_text(out, "tool_call_id", id);
		put_text(out, "content", buf_str(&text));
		buf_putc(out, '}');
		out->failed = out->failed || text.failed;
	}
	buf_free(&text);
	return status;
}

/*
 * A summary of an earlier response: it brings along all that was read after it, so it stands for the items before it,
 * whether a client still sends them or not. What it brings is the client's own, and is checked like any other message.
 */
static enum status add_compaction(struct response_request *q, const struct json *item, bool *open, struct error *err)
{
	struct buf *out = &q->input;
	struct json content = json_get(item, "encrypted_content");
	struct json_doc *doc = NULL;
	struct json root;
	int64_t turns = 0, messages = 0;
	enum status status =
		json_kind(&content) == JSON_TEXT ? json_parse(json_text(&content), "The text", &doc, &root, NULL)
						 : STATUS_INVALID;
	if (status == STATUS_NOMEM)
		return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
	struct json window = {0}, n_turns = {0}, n_messages = {0};
	if (status == STATUS_OK) {
		window = json_get(&root, "window");
		n_turns = json_get(&root, "turns");
		n_messages = json_get(&root, "messages");
		status = json_read_int(&n_turns, 1, INT32_MAX / 2, &turns, NULL);
	}
	if (status == STATUS_OK)
		status = json_read_int(&n_messages, 1, INT32_MAX / 2, &messages, NULL);
	if (status != STATUS_OK || json_kind(&window) != JSON_LIST || json_len(&window) == 0 || turns == 0 ||
	    messages == 0) {
		json_doc_free(doc);
		return json_fail(&content, STATUS_INVALID, err, "is not what a compaction item of this server holds.");
	}
	buf_clear(out);
	*open = false;
	for (size_t i = 0; i < json_len(&window); i++) {
		struct json message = json_at(&window, i);
		if (i)
			buf_putc(out, ',');
		json_write(out, &message);
	}
	json_doc_free(doc);
	q->base = (struct compact_base){(int32_t)turns, (int32_t)messages};
	return STATUS_OK;
}

static enum status read_item(struct response_request *q, const struct json *item, bool *open, struct error *err)
{
	struct buf *out = &q->input;
	struct json type = json_get(item, "type");
	struct str t = json_has(&type) ? json_text(&type) : str_from("message");

	if (json_kind(item) != JSON_DICT)
		return json_fail(item, STATUS_INVALID, err, "must be an object.");
	if (str_is(t, "compaction"))
		return add_compaction(q, item, open, err);
	/* Reasoning of an earlier turn, which clients send back, is not shown to the model again. */
	if (str_is(t, "reasoning"))
		return STATUS_OK;
	if (*open && !str_is(t, "function_call")) {
		buf_puts(out, "]}");
		*open = false;
	}
	if (out->len && !*open)
		buf_putc(out, ',');
	if (str_is(t, "message"))
		return add_message(item, out, err);
	if (str_is(t, "function_call"))
		return add_call(item, open, out, err);
	if (str_is(t, "function_call_output"))
		return add_result(item, out, err);
	return json_fail(&type, STATUS_UNSUPPORTED, err,
			 "is not supported; items are messages, function calls and their outputs, and compactions.");
}

/* An item for whoever asks for it later. */
static void keep_item(const struct json *item, size_t i, struct buf *out)
{
	struct json id = json_get(item, "id"), type = json_get(item, "type"), member;
	void *it = NULL;
	bool first = json_has(&id) && json_has(&type);
	buf_puts(out, i ? ",{" : "{");
	if (!json_has(&id))
		buf_printf(out, "\"id\":\"item_%zu\"", i);
	if (!json_has(&type))
		buf_puts(out, json_has(&id) ? "\"type\":\"message\"" : ",\"type\":\"message\"");
	while (json_next(item, &it, &member)) {
		if (!json_has(&member))
			continue;
		if (!first)
			buf_putc(out, ',');
		first = false;
		buf_json_string(out, member.key, strlen(member.key));
		buf_putc(out, ':');
		json_write(out, &member);
	}
	buf_putc(out, '}');
}

static enum status read_input(struct response_request *q, const struct json *body, struct error *err)
{
	struct json input = json_get(body, "input");
	struct buf *out = &q->input;
	bool open = false;
	if (json_kind(&input) == JSON_TEXT) {
		buf_puts(out, "{\"role\":\"user\"");
		put_text(out, "content", json_text(&input));
		buf_putc(out, '}');
		buf_puts(&q->items, "{\"id\":\"item_0\",\"type\":\"message\",\"role\":\"user\",\"content\":[{\"type\":"
		                    "\"input_text\"");
		put_text(&q->items, "text", json_text(&input));
		buf_puts(&q->items, "}]}");
		return STATUS_OK;
	}
	if (json_has(&input) && json_kind(&input) != JSON_LIST)
		return json_fail(&input, STATUS_INVALID, err, "must be a string or an array of items.");
	for (size_t i = 0; i < json_len(&input); i++) {
		struct json item = json_at(&input, i);
		TRY(read_item(q, &item, &open, err));
		keep_item(&item, i, &q->items);
	}
	if (open)
		buf_puts(out, "]}");
	return STATUS_OK;
}

/* Flat function tools -> the nested form that templates know. */
static enum status read_tools(struct response_request *q, const struct json *body, struct error *err)
{
	struct buf *out = &q->tools;
	struct json tools = json_get(body, "tools"), choice = json_get(body, "tool_choice");
	TRY(json_expect(&tools, JSON_LIST, err));
	if (json_len(&tools) == 0 || str_is(json_text(&choice), "none"))
		return STATUS_OK;
	for (size_t i = 0; i < json_len(&tools); i++) {
		struct json tool = json_at(&tools, i), type = json_get(&tool, "type"), member;
		void *it = NULL;
		bool first = true;
		if (!str_is(json_text(&type), "function"))
			return json_fail(&type, STATUS_UNSUPPORTED, err, "is not supported; tools are functions.");
		buf_puts(out, i ? ",{\"type\":\"function\",\"function\":{" : "[{\"type\":\"function\",\"function\":{");
		while (json_next(&tool, &it, &member)) {
			if (!json_has(&member) || !strcmp(member.key, "type"))
				continue;
			if (!first)
				buf_putc(out, ',');
			first = false;
			buf_json_string(out, member.key, strlen(member.key));
			buf_putc(out, ':');
			json_write(out, &member);
		}
		buf_puts(out, "}}");
	}
	buf_putc(out, ']');
	json_write(&q->flat_tools, &tools);
	return STATUS_OK;
}

/* What this server does not have is refused where ignoring it would change the answer's meaning. */
static enum status refuse_unsupported(const struct json *body, struct error *err)
{
	struct json background = json_get(body, "background");
	bool in_background = false;
	static const char *const absent[] = {"conversation", "prompt"};

	TRY(json_read_bool(&background, &in_background, err));
	if (in_background)
		return json_fail(&background, STATUS_UNSUPPORTED, err, "is not supported.");
	for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
		struct json j = json_get(body, absent[i]);
		if (json_has(&j))
			return json_fail(&j, STATUS_UNSUPPORTED, err, "is not supported.");
	}
	return STATUS_OK;
}

static enum status read_logprobs(struct response_request *q, const struct json *body, struct error *err)
{
	struct json include = json_get(body, "include"), top = json_get(body, "top_logprobs");
	int64_t n = 0;
	TRY(json_expect(&include, JSON_LIST, err));
	for (size_t i = 0; i < json_len(&include); i++) {
		struct json item = json_at(&include, i);
		if (str_is(json_text(&item), "message.output_text.logprobs"))
			q->logprobs = true;
	}
	TRY(json_read_int(&top, 0, SAMPLING_MAX_TOP_LOGPROBS, &n, err));
	if (q->logprobs || n > 0)
		q->params.proto->sampling.n_logprobs = (int32_t)n;
	q->logprobs = q->logprobs || n > 0;
	return STATUS_OK;
}

enum status response_request_parse(struct response_request *q, struct engine *e, int32_t tenant,
                                   const struct json *body, struct str session_header, struct error *err)
{
	struct json instructions = json_get(body, "instructions"), metadata = json_get(body, "metadata");
	struct json previous = json_get(body, "previous_response_id"), generate = json_get(body, "generate"),
		    store = json_get(body, "store");
	struct str id = {NULL, 0};

	*q = (struct response_request){.generate = true, .store = true};
	TRY(params_parse(&q->params, e, tenant, body, PARAMS_RESPONSE, session_header, err));
	TRY(refuse_unsupported(body, err));
	TRY(read_logprobs(q, body, err));
	TRY(json_read_bool(&generate, &q->generate, err));
	TRY(json_read_bool(&store, &q->store, err));
	TRY(compact_read(body, engine_info(e), &q->compact, err));
	TRY(json_expect(&instructions, JSON_TEXT, err));
	TRY(json_expect(&metadata, JSON_DICT, err));
	TRY(json_read_text(&previous, &id, err));
	if (id.n >= sizeof q->previous_id || (id.p && (id.n == 0 || memchr(id.p, 0, id.n))))
		return json_fail(&previous, STATUS_INVALID, err, "is not a response id.");
	if (id.p)
		memcpy(q->previous_id, id.p, id.n);
	TRY(read_input(q, body, err));
	TRY(read_tools(q, body, err));
	if (!q->input.len && !q->input.failed && !q->previous_id[0] && !json_has(&instructions)) {
		struct json input = json_get(body, "input");
		return json_fail(&input, STATUS_INVALID, err, "must not be empty.");
	}
	json_write(&q->instructions, &instructions);
	if (json_has(&metadata))
		json_write(&q->metadata, &metadata);
	else
		buf_puts(&q->metadata, "{}");
	struct json text = json_get(body, "text"), format = json_get(&text, "format"),
		    choice = json_get(body, "tool_choice");
	if (json_has(&format))
		json_write(&q->format, &format);
	if (json_has(&choice))
		json_write(&q->tool_choice, &choice);
	if (q->format.failed || q->tool_choice.failed || q->input.failed || q->items.failed || q->tools.failed ||
	    q->flat_tools.failed || q->instructions.failed || q->metadata.failed)
		return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
	if (!q->generate)
		q->params.proto->max_tokens = 0;
	return STATUS_OK;
}

size_t response_request_bytes(const struct response_request *q)
{
	return q->input.len + q->items.len + q->tools.len + q->flat_tools.len + q->format.len + q->tool_choice.len +
	       q->instructions.len + q->metadata.len;
}

void response_request_free(struct response_request *q)
{
	params_free(&q->params);
	buf_free(&q->input);
	buf_free(&q->items);
	buf_free(&q->tools);
	buf_free(&q->flat_tools);
	buf_free(&q->format);
	buf_free(&q->tool_choice);
	buf_free(&q->instructions);
	buf_free(&q->metadata);
}
