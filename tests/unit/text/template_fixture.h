/* Rendering in one line, for the tests of the template engine. */
#pragma once

#include "engine/text/template.h"
#include "tests/unit/unit.h"

/* What came of one rendering: the text, or the status and message. In `marked`, data stands in [square brackets]. */
struct outcome {
	enum status status;
	char text[4096], marked[4096];
	struct error error;
};

static inline void set_var(struct arena *a, struct value *vars, const char *name, struct value *v)
{
	assert_true(value_dict_set(a, vars, name, strlen(name), v));
}

static inline struct value *data_string(struct arena *a, const char *z)
{
	return value_string(a, z, strlen(z), VALUE_DATA);
}

static inline struct value *trusted_string(struct arena *a, const char *z)
{
	return value_string(a, z, strlen(z), VALUE_TRUSTED);
}

/* x: a user's text "Data", y: another, t: trusted text, n: a user's number, list and dict of user's text. */
static inline struct value *fixture_vars(struct arena *a)
{
	struct value *vars = value_dict(a), *list = value_list(a), *dict = value_dict(a), *messages = value_list(a);
	set_var(a, vars, "x", data_string(a, "Data"));
	set_var(a, vars, "y", data_string(a, " a-b "));
	set_var(a, vars, "u", data_string(a, "\xc3\xa9\xf0\x9f\x99\x82z"));
	set_var(a, vars, "t", trusted_string(a, "<s>"));
	set_var(a, vars, "n", value_int(a, 42));
	assert_true(value_list_add(a, list, data_string(a, "p")));
	assert_true(value_list_add(a, list, data_string(a, "q")));
	set_var(a, vars, "list", list);
	set_var(a, dict, "k", data_string(a, "v"));
	set_var(a, vars, "dict", dict);
	struct value *m = value_dict(a);
	set_var(a, m, "role", data_string(a, "user"));
	set_var(a, m, "content", data_string(a, "Hi"));
	assert_true(value_list_add(a, messages, m));
	set_var(a, vars, "messages", messages);
	return vars;
}

static inline void copy_outcome(const struct rendered *r, struct outcome *o)
{
	assert_true(r->text.len < sizeof o->text);
	memcpy(o->text, r->text.data, r->text.len + 1);
	size_t at = 0, n = 0;
	for (size_t i = 0; i <= r->n_data; i++) {
		size_t begin = i < r->n_data ? r->data[i].begin : r->text.len,
		       end = i < r->n_data ? r->data[i].end : begin;
		assert_true(begin >= at && end <= r->text.len && n + (end - at) + 3 < sizeof o->marked);
		memcpy(o->marked + n, r->text.data + at, begin - at);
		n += begin - at;
		if (i < r->n_data) {
			/* ascending, not touching */
			assert_true(end > begin && (i == 0 || begin > r->data[i - 1].end));
			o->marked[n++] = '[';
			memcpy(o->marked + n, r->text.data + begin, end - begin);
			n += end - begin;
			o->marked[n++] = ']';
		}
		at = end;
	}
	o->marked[n] = '\0';
}

static inline void render_limited(const char *source, const struct template_limits *limits, struct outcome *o)
{
	struct template *t;
	struct rendered r = {0};
	memset(o, 0, sizeof *o);
	struct arena *a = arena_create(1 << 20);
	o->status = template_compile(source, strlen(source), &t, &o->error);
	if (o->status == STATUS_OK)
		o->status = template_render(t, fixture_vars(a), 1768478400, limits, &r, &o->error);
	if (o->status == STATUS_OK)
		copy_outcome(&r, o);
	rendered_free(&r);
	template_destroy(t);
	arena_destroy(a);
}

static inline void render(const char *source, struct outcome *o)
{
	render_limited(source, NULL, o);
	if (o->status != STATUS_OK)
		print_message("%s: %s\n", source, o->error.message);
}

/* The rendered text, with data in brackets. */
#define assert_marked(source, expected)                                                                                \
	do {                                                                                                           \
		struct outcome o_;                                                                                     \
		render(source, &o_);                                                                                   \
		assert_int_equal(o_.status, STATUS_OK);                                                                \
		assert_string_equal(o_.marked, expected);                                                              \
	} while (0)

#define assert_renders(source, expected)                                                                               \
	do {                                                                                                           \
		struct outcome o_;                                                                                     \
		render(source, &o_);                                                                                   \
		assert_int_equal(o_.status, STATUS_OK);                                                                \
		assert_string_equal(o_.text, expected);                                                                \
	} while (0)

#define assert_fails(source, expected_status, expected_message)                                                       \
	do {                                                                                                           \
		struct outcome o_;                                                                                     \
		render_limited(source, NULL, &o_);                                                                     \
		assert_int_equal(o_.status, expected_status);                                                          \
		assert_string_equal(o_.error.message, expected_message);                                               \
	} while (0)
