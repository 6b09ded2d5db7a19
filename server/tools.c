#include "server/tools.h"

#include <stdlib.h>

#define TRY(expr)                                                                                                      \
	do {                                                                                                           \
		enum status try_status = (expr);                                                                       \
		if (try_status != STATUS_OK)                                                                           \
			return try_status;                                                                             \
	} while (0)

enum { MAX_TOOLS = 1024, MAX_NAME = 128, SCHEMA_MEMORY = 64 << 20 };

void tools_free(struct tools *t)
{
	buf_free(&t->names);
}

/* ---- Families ---- */

static enum tool_family family_of(const char *source)
{
	if (strstr(source, "[TOOL_CALLS]"))
		return TOOLS_MISTRAL;
	if (strstr(source, "<tool_call>"))
		return TOOLS_TAGGED;
	if (strstr(source, "<|python_tag|>") ||
	    (strstr(source, "<|start_header_id|>") && strstr(source, "\"parameters\"")))
		return TOOLS_LLAMA;
	return TOOLS_TAGGED;
}

/* Such a template would leave them out without a word. */
bool tools_as_text(const struct engine_info *info)
{
	return info &&
	       (!strstr(info->chat_template, "tools") || strstr(info->chat_template, "has no format for tools"));
}

static const struct grammar_call_form forms[] = {
	[TOOLS_TAGGED] = {"", "<tool_call>\n", "\n</tool_call>", "\n", "", "arguments"},
	[TOOLS_LLAMA] = {"", "", "", "; ", "", "parameters"},
	[TOOLS_MISTRAL] = {"[TOOL_CALLS][", "", "", ", ", "]", "arguments"},
};

/* ---- Reading ---- */

static struct json function_of(const struct json *tool, bool flat)
{
	return flat ? *tool : json_get(tool, "function");
}

static enum status read_tool(struct tools *t, const struct json *tool, bool flat, struct error *err)
{
	struct json type = json_get(tool, "type"), function = function_of(tool, flat);
	struct json name = json_get(&function, "name"), parameters = json_get(&function, "parameters");
	struct str s = json_text(&name);
	if (json_kind(tool) != JSON_DICT)
		return json_fail(tool, STATUS_INVALID, err, "must be an object.");
	if (!str_is(json_text(&type), "function"))
		return json_fail(&type, STATUS_UNSUPPORTED, err, "is not supported; tools are functions.");
	if (json_kind(&function) != JSON_DICT)
		return json_fail(&function, STATUS_INVALID, err, "must be an object with a \"name\".");
	if (!s.p || s.n == 0 || s.n > MAX_NAME || memchr(s.p, 0, s.n))
		return json_fail(&name, STATUS_INVALID, err, "must be a name of at most %d bytes.", MAX_NAME);
	TRY(json_expect(&parameters, JSON_DICT, err));
	buf_append(&t->names, s.p, s.n);
	buf_putc(&t->names, '\0');
	return t->names.failed ? error_set(err, STATUS_NOMEM, "There is no memory for the tools.") : STATUS_OK;
}

/* What tool_choice asks for; *name: the one function that must be called, or empty. */
static enum status read_choice(struct tools *t, const struct json *choice, bool flat, bool *none, struct str *name,
			       struct error *err)
{
	struct str word = json_text(choice);
	struct json type, function, named;
	*name = (struct str){NULL, 0};
	*none = str_is(word, "none");
	t->forced = str_is(word, "required");
	if (!json_has(choice) || *none || t->forced || str_is(word, "auto"))
		return STATUS_OK;
	type = json_get(choice, "type");
	function = function_of(choice, flat);
	named = json_get(&function, "name");
	if (!str_is(json_text(&type), "function"))
		return json_fail(choice, word.p ? STATUS_INVALID : STATUS_UNSUPPORTED, err,
				 "must be \"none\", \"auto\", \"required\" or the name of a function.");
	*name = json_text(&named);
	t->forced = true;
	return name->n ? STATUS_OK : json_fail(&named, STATUS_INVALID, err, "must be the name of a function.");
}

/* Why there is no value of a schema: the arena's limit, or the memory. */
static enum status too_large(const struct arena *a, const struct json *schema, struct error *err)
{
	if (!a || arena_starved(a))
		return error_set(err, STATUS_NOMEM, "There is no memory for the schema.");
	return json_fail(schema, STATUS_INVALID, err, "is too large.");
}

/* The grammar of calls of all tools, or of the one that is named. */
static enum status force_call(const struct tools *t, const struct json *list, bool flat, struct str only,
			      const struct json *choice, struct grammar **grammar, struct error *err)
{
	size_t n = 0;
	struct arena *a = arena_create(SCHEMA_MEMORY);
	struct grammar_tool *tools = calloc(json_len(list), sizeof *tools);
	enum status status;
	struct error why = {0};
	if (!a || !tools) {
		status = error_set(err, STATUS_NOMEM, "There is no memory for the tools.");
		goto done;
	}
	for (size_t i = 0; i < json_len(list); i++) {
		struct json tool = json_at(list, i), function = function_of(&tool, flat);
		struct json name = json_get(&function, "name"), parameters = json_get(&function, "parameters");
		if (only.p && !str_eq(json_text(&name), only))
			continue;
		tools[n].name = json_text(&name);
		tools[n].parameters = json_has(&parameters) ? json_to_value(a, &parameters) : NULL;
		if (json_has(&parameters) && !tools[n].parameters) {
			status = too_large(a, &parameters, err);
			goto done;
		}
		n++;
	}
	if (n == 0) {
		status = json_fail(choice, STATUS_INVALID, err, "names a function that is not among the tools.");
		goto done;
	}
	status = grammar_tools(&forms[t->family], tools, n, t->many && !only.p, grammar, &why);
	if (status == STATUS_NOMEM)
		error_set(err, status, "%s", why.message);
	else if (status != STATUS_OK)
		status = json_fail(list, status == STATUS_LIMIT ? STATUS_INVALID : status, err,
				   "cannot be enforced: %s", why.message);
done:
	free(tools);
	arena_destroy(a);
	return status;
}

enum status tools_read(struct tools *t, const struct json *body, bool flat, const struct engine_info *info,
		       struct grammar **grammar, struct error *err)
{
	struct json list = json_get(body, "tools"), choice = json_get(body, "tool_choice");
	struct json parallel = json_get(body, "parallel_tool_calls"), old = json_get(body, "functions");
	const char *source = info ? info->chat_template : "";
	struct str name;
	bool none;

	t->many = true;
	t->as_text = tools_as_text(info);
	TRY(json_expect(&list, JSON_LIST, err));
	TRY(json_read_bool(&parallel, &t->many, err));
	TRY(read_choice(t, &choice, flat, &none, &name, err));
	if (json_len(&old))
		return json_fail(&old, STATUS_UNSUPPORTED, err, "is not supported; use tools.");
	if (json_len(&list) == 0) {
		if (t->forced)
			return json_fail(&choice, STATUS_INVALID, err, "is only allowed with tools.");
		return STATUS_OK;
	}
	if (none)
		return STATUS_OK;
	if (json_len(&list) > MAX_TOOLS)
		return json_fail(&list, STATUS_INVALID, err, "has more than %d entries.", MAX_TOOLS);
	for (size_t i = 0; i < json_len(&list); i++) {
		struct json tool = json_at(&list, i);
		TRY(read_tool(t, &tool, flat, err));
	}
	t->active = true;
	t->family = t->as_text ? TOOLS_TAGGED : family_of(source);
	return t->forced ? force_call(t, &list, flat, name, &choice, grammar, err) : STATUS_OK;
}

/* ---- Formats of answers ---- */

static enum status compile(const struct json *schema, const struct json *format, struct grammar **grammar,
                           struct error *err)
{
	struct arena *a = NULL;
	struct value *v = NULL;
	struct error why = {0};
	enum status status;
	if (json_has(schema)) {
		a = arena_create(SCHEMA_MEMORY);
		v = a ? json_to_value(a, schema) : NULL;
		if (!v) {
			status = too_large(a, schema, err);
			arena_destroy(a);
			return status;
		}
	}
	status = grammar_json(v, grammar, &why);
	arena_destroy(a);
	if (status == STATUS_OK || status == STATUS_NOMEM)
		return status == STATUS_OK ? status : error_set(err, status, "%s", why.message);
	return json_fail(json_has(schema) ? schema : format, status == STATUS_LIMIT ? STATUS_INVALID : status, err,
			 "cannot be enforced: %s", why.message);
}

enum status answer_format_read(const struct json *format, bool flat, struct grammar **grammar, struct error *err)
{
	struct json type = json_get(format, "type"), inner = json_get(format, "json_schema"), schema;
	struct str kind = json_text(&type);
	TRY(json_expect(format, JSON_DICT, err));
	if (!json_has(format) || str_is(kind, "text"))
		return STATUS_OK;
	if (str_is(kind, "json_object")) {
		schema = json_get(format, "schema");
		TRY(json_expect(&schema, JSON_DICT, err));
		return compile(&schema, format, grammar, err);
	}
	if (!str_is(kind, "json_schema"))
		return json_fail(&type, kind.p ? STATUS_UNSUPPORTED : STATUS_INVALID, err,
				 "must be \"text\", \"json_object\" or \"json_schema\".");
	schema = flat ? json_get(format, "schema") : json_get(&inner, "schema");
	if (json_kind(&schema) != JSON_DICT)
		return json_fail(&schema, STATUS_INVALID, err, "must be a JSON schema.");
	return compile(&schema, format, grammar, err);
}
