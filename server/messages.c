#include "server/messages.h"

#include <stdlib.h>

static const char *const roles[] = {"system", "developer", "user", "assistant", "tool", "function"};

/* Bytes an arena may take for n bytes of JSON: a value is about 16 times the two bytes that its shortest text takes. */
static size_t arena_limit(size_t n)
{
	const size_t base = 1 << 20, most = (size_t)1 << 29;
	return n > (most - base) / 32 ? most : base + 32 * n;
}

static enum status no_memory(struct error *err)
{
	return error_set(err, STATUS_NOMEM, "There is no memory for the request.");
}

static enum status no_room(const struct arena *a, struct error *err)
{
	if (arena_starved(a))
		return no_memory(err);
	return error_set_param(err, STATUS_INVALID, "messages", "The messages are too large.");
}

static enum status part_text(const struct json *part, struct buf *out, struct error *err)
{
	struct json type = json_get(part, "type"), text = json_get(part, "text");
	struct str t = json_text(&type);
	/* A refusal that a client replays is what the assistant said. */
	if (str_is(t, "refusal"))
		text = json_get(part, "refusal");
	else if (json_kind(part) != JSON_DICT || !t.p)
		return json_fail(part, STATUS_INVALID, err, "must be an object with a \"type\".");
	else if (!str_is(t, "text") && !str_is(t, "input_text") && !str_is(t, "output_text"))
		return json_fail(&type, STATUS_UNSUPPORTED, err, "'%.*s' is not supported; the model reads text.",
				 (int)(t.n < 40 ? t.n : 40), t.p);
	if (json_kind(&text) != JSON_TEXT)
		return json_fail(&text, STATUS_INVALID, err, "must be a string.");
	buf_append(out, json_text(&text).p, json_text(&text).n);
	return STATUS_OK;
}

enum status content_text(const struct json *content, struct buf *out, struct error *err)
{
	struct str s = json_text(content);
	if (json_kind(content) == JSON_TEXT) {
		buf_append(out, s.p, s.n);
	} else if (json_kind(content) == JSON_LIST) {
		for (size_t i = 0; i < json_len(content); i++) {
			struct json part = json_at(content, i);
			if (i)
				buf_putc(out, '\n');
			enum status status = part_text(&part, out, err);
			if (status != STATUS_OK)
				return status;
		}
	} else {
		return json_fail(content, STATUS_INVALID, err, "must be a string or an array of parts.");
	}
	return STATUS_OK;
}

/*
 * tool_calls with arguments parsed; what does not parse stays the string it is. *starved: there was no memory to parse.
 */
static struct value *tool_calls_value(struct arena *a, const struct json *calls, bool *starved)
{
	struct value *list = value_list(a);
	for (size_t i = 0; i < json_len(calls); i++) {
		struct json call = json_at(calls, i), function = json_get(&call, "function");
		struct json arguments = json_get(&function, "arguments"), root;
		struct value *v = json_to_value(a, &call);
		struct json_doc *doc = NULL;
		enum status parsed = STATUS_INVALID;
		bool ok = true;
		if (json_kind(&arguments) == JSON_TEXT)
			parsed = json_parse(json_text(&arguments), "The text", &doc, &root, NULL);
		if (parsed == STATUS_OK) {
			struct value *f = json_to_value(a, &function);
			ok = value_dict_set(a, f, "arguments", 9, json_to_value(a, &root)) &&
			     value_dict_set(a, v, "function", 8, f);
		}
		*starved = *starved || parsed == STATUS_NOMEM;
		json_doc_free(doc);
		if (!ok || *starved || !value_list_add(a, list, v))
			return NULL;
	}
	return list;
}

static enum status role_of(const struct json *message, struct str *role, struct error *err)
{
	struct json j = json_get(message, "role");
	*role = json_text(&j);
	if (json_kind(&j) != JSON_TEXT)
		return json_fail(&j, STATUS_INVALID, err, "must be a string.");
	for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
		if (str_is(*role, roles[i])) {
			if (str_is(*role, "developer"))
				*role = str_from("system");
			return STATUS_OK;
		}
	}
	return json_fail(&j, STATUS_INVALID, err,
			 "must be one of system, developer, user, assistant, tool and function.");
}

/* ---- Tools as text ---- */

static void write_tools(struct buf *out, const struct json *tools)
{
	buf_puts(out, "# Tools\n\nThese functions can be called:\n<tools>");
	for (size_t i = 0; i < json_len(tools); i++) {
		struct json tool = json_at(tools, i);
		buf_putc(out, '\n');
		json_write(out, &tool);
	}
	buf_puts(out, "\n</tools>\n\nTo call one, answer with a JSON object between tool_call tags:\n<tool_call>\n"
		      "{\"name\": <name>, \"arguments\": <object with the arguments>}\n</tool_call>");
}

static void write_calls(struct buf *out, const struct json *calls)
{
	for (size_t i = 0; i < json_len(calls); i++) {
		struct json call = json_at(calls, i), function = json_get(&call, "function");
		struct json name = json_get(&function, "name"), arguments = json_get(&function, "arguments");
		if (out->len)
			buf_putc(out, '\n');
		buf_puts(out, "<tool_call>\n{\"name\": ");
		json_write(out, &name);
		buf_puts(out, ", \"arguments\": ");
		if (json_kind(&arguments) == JSON_TEXT)
			buf_append(out, json_text(&arguments).p, json_text(&arguments).n);
		else
			json_write(out, &arguments);
		buf_puts(out, "}\n</tool_call>");
	}
}

static void wrap_result(struct buf *text)
{
	struct buf wrapped = BUF_INIT;
	buf_puts(&wrapped, "<tool_response>\n");
	buf_append_buf(&wrapped, text);
	buf_puts(&wrapped, "\n</tool_response>");
	buf_free(text);
	*text = wrapped;
}

/* A message of which nothing but its role and its text is passed on. `tools`: to be described in it, or NULL. */
static enum status plain_message(struct arena *a, struct value *list, struct str role, struct buf *text,
				 const struct json *calls, const struct json *tools, struct error *err)
{
	struct value *v = value_dict(a);
	bool ok, failed;
	if (tools) {
		if (text->len)
			buf_puts(text, "\n\n");
		write_tools(text, tools);
	}
	if (str_is(role, "tool") || str_is(role, "function")) {
		wrap_result(text);
		role = str_from("user");
	}
	write_calls(text, calls);
	failed = text->failed;
	ok = !failed && value_dict_set(a, v, "role", 4, value_string(a, role.p, role.n, VALUE_DATA)) &&
	     value_dict_set(a, v, "content", 7, value_string(a, buf_str(text).p, text->len, VALUE_DATA)) &&
	     value_list_add(a, list, v);
	buf_free(text);
	return ok ? STATUS_OK : failed ? no_memory(err) : no_room(a, err);
}

/* `as_text`: see struct chat_request; then `tools` are described in this message, unless NULL. */
static enum status add_message(struct arena *a, struct value *list, const struct json *message, bool as_text,
			       const struct json *tools, struct error *err)
{
	struct json content = json_get(message, "content"), member, calls = json_get(message, "tool_calls");
	struct value *v = value_dict(a);
	struct buf text = BUF_INIT;
	struct str role;
	void *it = NULL;
	bool ok, starved;
	enum status status;

	if (json_kind(message) != JSON_DICT)
		return json_fail(message, STATUS_INVALID, err, "must be an object.");
	status = role_of(message, &role, err);
	if (status == STATUS_OK)
		status = json_expect(&calls, JSON_LIST, err);
	/* An assistant that only called tools has no content, and neither has a tool that only acted. */
	if (status == STATUS_OK && (json_has(&content) || str_is(role, "user") || str_is(role, "system")))
		status = content_text(&content, &text, err);
	if (status != STATUS_OK) {
		buf_free(&text);
		return status;
	}
	if (as_text)
		return plain_message(a, list, role, &text, &calls, tools, err);
	ok = value_dict_set(a, v, "role", 4, value_string(a, role.p, role.n, VALUE_DATA)) &&
	     value_dict_set(a, v, "content", 7, value_string(a, buf_str(&text).p, text.len, VALUE_DATA));
	starved = text.failed;
	buf_free(&text);
	while (ok && !starved && json_next(message, &it, &member)) {
		/* Templates ask whether a key is there: a null is not passed on. */
		if (!json_has(&member) || !strcmp(member.key, "role") || !strcmp(member.key, "content"))
			continue;
		ok = value_dict_set(a, v, member.key, strlen(member.key),
				    !strcmp(member.key, "tool_calls") ? tool_calls_value(a, &member, &starved)
								      : json_to_value(a, &member));
	}
	if (starved)
		return no_memory(err);
	if (!ok || !value_list_add(a, list, v))
		return no_room(a, err);
	return STATUS_OK;
}

bool chat_is_system(struct str role)
{
	return str_is(role, "system") || str_is(role, "developer");
}

static bool tells_of_tools(const struct chat_request *c)
{
	return c->tools && json_len(c->tools) > 0 && c->tools_as_text;
}

enum status chat_build(const struct chat_request *c, struct arena **arena, struct value **chat, struct error *err)
{
	struct arena *a;
	struct value *vars, *list;
	struct json member;
	bool has_tools = c->tools && json_len(c->tools) > 0, told = !tells_of_tools(c);
	void *it = NULL;
	enum status status = STATUS_OK;

	*arena = NULL;
	*chat = NULL;
	if (json_kind(c->messages) != JSON_LIST)
		return json_fail(c->messages, STATUS_INVALID, err, "must be an array of messages.");
	if (json_len(c->messages) == 0)
		return json_fail(c->messages, STATUS_INVALID, err, "must not be empty.");
	if (c->tools && json_expect(c->tools, JSON_LIST, err) != STATUS_OK)
		return STATUS_INVALID;
	if (c->extra && json_expect(c->extra, JSON_DICT, err) != STATUS_OK)
		return STATUS_INVALID;
	a = arena_create(arena_limit(c->text_n));
	if (!a)
		return no_memory(err);
	vars = value_dict(a);
	list = value_list(a);
	for (size_t i = 0; status == STATUS_OK && i < json_len(c->messages); i++) {
		struct json message = json_at(c->messages, i), role = json_get(&message, "role");
		bool is_system = chat_is_system(json_text(&role));
		struct buf none = BUF_INIT;
		struct json no_calls = {0};
		/* The first system message tells of the tools; when the first message is none, one is put before it. */
		if (!told && !is_system)
			status = plain_message(a, list, str_from("system"), &none, &no_calls, c->tools, err);
		if (status == STATUS_OK)
			status = add_message(a, list, &message, c->tools_as_text, !told && is_system ? c->tools : NULL,
			                     err);
		told = true;
	}
	if (status != STATUS_OK)
		goto fail;
	/* A client's own variables come first: they cannot replace the conversation. */
	while (c->extra && json_next(c->extra, &it, &member))
		if (!value_dict_set(a, vars, member.key, strlen(member.key), json_to_value(a, &member)))
			goto no_room;
	if (has_tools && !c->tools_as_text && !value_dict_set(a, vars, "tools", 5, json_to_value(a, c->tools)))
		goto no_room;
	if (!value_dict_set(a, vars, "messages", 8, list) ||
	    !value_dict_set(a, vars, "add_generation_prompt", 21, value_bool(a, c->add_generation_prompt)))
		goto no_room;
	*arena = a;
	*chat = vars;
	return STATUS_OK;

no_room:
	status = no_room(a, err);
fail:
	arena_destroy(a);
	return status;
}

enum status chat_give(const struct chat_request *c, struct engine_request *r, struct error *err)
{
	r->input = ENGINE_INPUT_CHAT;
	enum status status = chat_build(c, &r->arena, &r->chat, err);
	if (status != STATUS_OK || !c->turns)
		return status;
	struct json first = json_at(c->messages, 0), role = json_get(&first, "role");
	return turns_give(c->turns, tells_of_tools(c) && !chat_is_system(json_text(&role)), r, err);
}
