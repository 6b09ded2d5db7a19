/*
 * The template engine on arbitrary sources: compiles the input and renders it with a fixed conversation, whose texts
 * also come from the input, under small limits.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/text/template.h"

static struct value *text(struct arena *a, const char *p, size_t n, enum value_origin origin)
{
	return value_string(a, p, n, origin);
}

static struct value *words(struct arena *a, const char *z)
{
	return value_string(a, z, strlen(z), VALUE_TRUSTED);
}

static void set(struct arena *a, struct value *dict, const char *key, struct value *item)
{
	value_dict_set(a, dict, key, strlen(key), item);
}

static struct value *variables(struct arena *a, const char *p, size_t n)
{
	struct value *vars = value_dict(a), *messages = value_list(a), *numbers = value_list(a);
	static const char *const roles[] = {"system", "user", "assistant", "tool"};
	for (size_t i = 0; i < 4; i++) {
		struct value *m = value_dict(a);
		set(a, m, "role", words(a, roles[i]));
		set(a, m, "content", text(a, p + i * n / 4, n / 4, VALUE_DATA));
		value_list_add(a, messages, m);
		value_list_add(a, numbers, i % 2 ? value_int(a, (int64_t)i - 2) : value_float(a, (double)i / 3));
	}
	set(a, vars, "messages", messages);
	set(a, vars, "numbers", numbers);
	set(a, vars, "tools", value_none(a));
	set(a, vars, "add_generation_prompt", value_bool(a, true));
	set(a, vars, "bos_token", words(a, "<s>"));
	set(a, vars, "s", text(a, p, n, VALUE_TRUSTED));
	return vars;
}

/* The spans of a prompt ascend, do not touch and lie inside the text. */
static void check(const struct rendered *r)
{
	size_t end = 0;
	for (size_t i = 0; i < r->n_data; i++) {
		if (r->data[i].begin >= r->data[i].end || r->data[i].end > r->text.len ||
		    (i && r->data[i].begin <= end))
			abort();
		end = r->data[i].end;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const struct template_limits limits = {.max_steps = 50000, .max_memory = 4 << 20};
	struct template *t = NULL;
	struct error err;
	if (template_compile((const char *)data, size, &t, &err) != STATUS_OK)
		return 0;
	struct arena *a = arena_create(4 << 20);
	struct rendered out = {0};
	if (template_render(t, variables(a, (const char *)data, size), 1768478400, &limits, &out, &err) == STATUS_OK)
		check(&out);
	rendered_free(&out);
	template_destroy(t);
	arena_destroy(a);
	return 0;
}
