/*
 * Renders templates for the tests in this directory. Each line of standard input is a JSON object: "source" (a
 * template), "vars" (its variables), "now" (seconds since 1970, for strftime_now) and optionally "trusted": true
 * (strings of vars are marked as trusted). Each line of output is {"prompt": ..., "data": [[begin, end], ...]} or
 * {"error": ..., "status": ...}.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/text/template.h"

enum { VARS_BYTES = 64 << 20 };

static struct value *from_json(struct arena *a, const json_t *j, enum value_origin origin)
{
	switch (json_typeof(j)) {
	case JSON_OBJECT: {
		struct value *dict = value_dict(a);
		const char *key;
		size_t key_n;
		json_t *item;
		json_object_keylen_foreach(
			(json_t *)j, key, key_n,
			item) if (!value_dict_set(a, dict, key, key_n, from_json(a, item, origin))) return NULL;
		return dict;
	}
	case JSON_ARRAY: {
		struct value *list = value_list(a);
		for (size_t i = 0; i < json_array_size(j); i++)
			if (!value_list_add(a, list, from_json(a, json_array_get(j, i), origin)))
				return NULL;
		return list;
	}
	case JSON_STRING:
		return value_string(a, json_string_value(j), json_string_length(j), origin);
	case JSON_INTEGER:
		return value_int(a, json_integer_value(j));
	case JSON_REAL:
		return value_float(a, json_real_value(j));
	case JSON_NULL:
		return value_none(a);
	default:
		return value_bool(a, json_is_true(j));
	}
}

static void print(json_t *j)
{
	char *text = j ? json_dumps(j, JSON_COMPACT | JSON_ENSURE_ASCII) : NULL;
	puts(text ? text : "{\"error\":\"the output is not UTF-8\",\"status\":\"internal error\"}");
	fflush(stdout);
	free(text);
	json_decref(j);
}

static void print_error(const struct error *err)
{
	json_t *message = json_string(err->message);
	print(json_pack("{s:o,s:s}", "error", message ? message : json_string("(not UTF-8)"), "status",
			status_text(err->status)));
}

static void print_rendered(const struct rendered *r)
{
	json_t *spans = json_array(), *text = json_stringn(r->text.data ? r->text.data : "", r->text.len);
	for (size_t i = 0; i < r->n_data; i++)
		json_array_append_new(spans,
				      json_pack("[I,I]", (json_int_t)r->data[i].begin, (json_int_t)r->data[i].end));
	print(json_pack("{s:o,s:o}", "prompt", text, "data", spans));
}

static void run(const json_t *request)
{
	const json_t *source = json_object_get(request, "source"), *vars = json_object_get(request, "vars");
	enum value_origin origin = json_is_true(json_object_get(request, "trusted")) ? VALUE_TRUSTED : VALUE_DATA;
	struct arena *a = arena_create(VARS_BYTES);
	struct template *t = NULL;
	struct rendered out = {0};
	struct error err = {0};
	enum status status = template_compile(json_string_value(source), json_string_length(source), &t, &err);
	if (status == STATUS_OK)
		status = template_render(t, from_json(a, vars, origin),
					 json_integer_value(json_object_get(request, "now")), NULL, &out, &err);
	if (status == STATUS_OK)
		print_rendered(&out);
	else
		print_error(&err);
	rendered_free(&out);
	template_destroy(t);
	arena_destroy(a);
}

int main(void)
{
	char *line = NULL;
	size_t cap = 0;
	while (getline(&line, &cap, stdin) > 0) {
		json_error_t why;
		json_t *request = json_loads(line, JSON_ALLOW_NUL, &why);
		if (!json_is_string(json_object_get(request, "source")) ||
		    !json_is_object(json_object_get(request, "vars"))) {
			fprintf(stderr, "bad request: %s\n", request ? "needs source and vars" : why.text);
			return 1;
		}
		run(request);
		json_decref(request);
	}
	free(line);
	return 0;
}
