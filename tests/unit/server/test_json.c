#include "tests/unit/unit.h"

#include "server/json.h"
#include "tests/support/value_text.h"

/* Parses, expects success. */
static struct json_doc *parse(const char *text, struct json *root)
{
	struct json_doc *doc;
	struct error err = {0};
	assert_int_equal(json_parse(str_from(text), "The body", &doc, root, &err), STATUS_OK);
	return doc;
}

/* Parses, expects INVALID; the message holds `what`, the parameter is `param`. */
static void refuse(const char *text, const char *param, const char *what)
{
	struct json_doc *doc;
	struct json root;
	struct error err = {0};
	assert_int_equal(json_parse(str_from(text), "The body", &doc, &root, &err), STATUS_INVALID);
	assert_null(doc);
	assert_string_equal(err.param, param);
	if (!strstr(err.message, what))
		fail_msg("\"%s\" is not in \"%s\"", what, err.message);
}

static void only_an_object_is_taken(void **state)
{
	(void)state;
	struct json root;
	struct json_doc *doc = parse("{}", &root);
	assert_int_equal(json_kind(&root), JSON_DICT);
	json_doc_free(doc);
	refuse("", "", "The body is empty");
	refuse("[1]", "", "The body must be a JSON object");
	refuse("\"x\"", "", "not valid JSON");
	refuse("{\"a\":1", "", "The body is not valid JSON");
	refuse("{\"a\":1} x", "", "not valid JSON");
	refuse("{\"a\":\"\xff\"}", "", "not valid JSON");
	refuse("{\"a\":\"\\ud800\"}", "", "not valid JSON");
	refuse("{\"a\":NaN}", "", "not valid JSON");
}

static void what_the_text_is_begins_the_sentence(void **state)
{
	(void)state;
	struct json_doc *doc;
	struct json root;
	struct error err = {0};
	assert_int_equal(json_parse(str_from("{"), "The message", &doc, &root, &err), STATUS_INVALID);
	assert_memory_equal(err.message, "The message is not", 18);
	assert_int_equal(json_parse(str_from("{}"), "The message", &doc, &root, &err), STATUS_OK);
	assert_int_equal(json_fail(&root, STATUS_INVALID, &err, "has no type."), STATUS_INVALID);
	assert_string_equal(err.message, "The message has no type.");
	json_doc_free(doc);
}

static void numbers_that_no_double_holds_are_refused_by_name(void **state)
{
	(void)state;
	refuse("{\"temperature\":1e999}", "temperature", "temperature");
	refuse("{\"a\":[1,{\"b\":2},{\"seed\":99999999999999999999}]}", "a[2].seed", "out of range");
	refuse("{\"a\":{\"x\":[0,0]},\"b\":{\"c\":-1e400 }}", "b.c", "out of range");
	refuse("{\"a\":\"1e999\",\"b\\\"\":1e999}", "b\\\"", "out of range");
}

static void a_key_that_occurs_twice_is_refused(void **state)
{
	(void)state;
	refuse("{\"a\":{\"n\":1,\"n\":2}}", "a.n", "twice");
}

static void depth_and_size_are_bounded_before_parsing(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	struct json root;
	buf_puts(&b, "{\"a\":");
	for (int i = 0; i < JSON_MAX_DEPTH - 1; i++)
		buf_putc(&b, '[');
	for (int i = 0; i < JSON_MAX_DEPTH - 1; i++)
		buf_putc(&b, ']');
	buf_putc(&b, '}');
	json_doc_free(parse(b.data, &root));
	buf_clear(&b);
	buf_puts(&b, "{\"a\":");
	for (int i = 0; i < JSON_MAX_DEPTH; i++)
		buf_putc(&b, '[');
	refuse(b.data, "", "nested deeper");
	buf_clear(&b);
	buf_puts(&b, "{\"a\":[0");
	for (int i = 0; i < JSON_MAX_VALUES; i++)
		buf_puts(&b, ",0");
	buf_puts(&b, "]}");
	refuse(b.data, "", "more than");
	/* Brackets and commas in strings do not count. */
	buf_clear(&b);
	buf_puts(&b, "{\"a\":\"\\\"");
	for (int i = 0; i < 1000; i++)
		buf_putc(&b, '[');
	buf_puts(&b, "\"}");
	json_doc_free(parse(b.data, &root));
	buf_free(&b);
}

static void null_and_absent_are_the_same(void **state)
{
	(void)state;
	struct json root;
	struct json_doc *doc = parse("{\"a\":null}", &root);
	struct json a = json_get(&root, "a"), b = json_get(&root, "b");
	int64_t n = 7;
	double x = 7;
	bool flag = true;
	struct str s = {"kept", 4};
	struct error err = {0};
	assert_false(json_has(&a));
	assert_false(json_has(&b));
	assert_int_equal(json_read_int(&a, 0, 1, &n, &err), STATUS_OK);
	assert_int_equal(json_read_number(&b, 0, 1, &x, &err), STATUS_OK);
	assert_int_equal(json_read_bool(&a, &flag, &err), STATUS_OK);
	assert_int_equal(json_read_text(&b, &s, &err), STATUS_OK);
	assert_int_equal(n, 7);
	assert_true(x == 7);
	assert_true(flag);
	assert_int_equal(s.n, 4);
	json_doc_free(doc);
}

static void integers_may_be_written_with_a_zero_fraction(void **state)
{
	(void)state;
	struct json root;
	struct json_doc *doc =
		parse("{\"a\":16.0,\"b\":1.5,\"c\":1e18,\"d\":9223372036854775807,\"e\":true,\"f\":\"1\"}", &root);
	struct json a = json_get(&root, "a"), b = json_get(&root, "b"), c = json_get(&root, "c");
	struct json d = json_get(&root, "d"), e = json_get(&root, "e"), f = json_get(&root, "f");
	int64_t n = 0;
	struct error err = {0};
	assert_int_equal(json_read_int(&a, 0, 100, &n, &err), STATUS_OK);
	assert_int_equal(n, 16);
	assert_int_equal(json_read_int(&b, 0, 100, &n, &err), STATUS_INVALID);
	assert_string_equal(err.message, "b must be an integer, not 1.5.");
	assert_int_equal(json_read_int(&c, 0, INT64_MAX, &n, &err), STATUS_INVALID);
	assert_int_equal(json_read_int(&d, 0, INT64_MAX, &n, &err), STATUS_OK);
	assert_true(n == INT64_MAX);
	assert_int_equal(json_read_int(&d, -5, 5, &n, &err), STATUS_INVALID);
	assert_string_equal(err.message, "d must be between -5 and 5, not 9223372036854775807.");
	assert_int_equal(json_read_int(&e, 0, 1, &n, &err), STATUS_INVALID);
	assert_string_equal(err.message, "e must be an integer, not a boolean.");
	assert_int_equal(json_read_int(&f, 0, 1, &n, &err), STATUS_INVALID);
	assert_string_equal(err.param, "f");
	json_doc_free(doc);
}

static void errors_name_the_place(void **state)
{
	(void)state;
	struct json root;
	struct json_doc *doc = parse("{\"messages\":[1,2,{\"content\":[{\"type\":5}]}]}", &root);
	struct json messages = json_get(&root, "messages"), m = json_at(&messages, 2),
		    content = json_get(&m, "content");
	struct json part = json_at(&content, 0), type = json_get(&part, "type");
	struct error err = {0};
	struct str s;
	assert_int_equal(json_read_text(&type, &s, &err), STATUS_INVALID);
	assert_string_equal(err.param, "messages[2].content[0].type");
	assert_string_equal(err.message, "messages[2].content[0].type must be a string, not an integer.");
	json_doc_free(doc);
}

static void strings_keep_their_nul(void **state)
{
	(void)state;
	struct json root;
	struct json_doc *doc = parse("{\"a\":\"x\\u0000y\"}", &root);
	struct json a = json_get(&root, "a");
	assert_int_equal(json_text(&a).n, 3);
	assert_memory_equal(json_text(&a).p, "x\0y", 3);
	json_doc_free(doc);
}

static void values_keep_order_and_are_marked_as_data(void **state)
{
	(void)state;
	const char *text = "{\"z\":1,\"a\":[true,null,\"s\",-2.5],\"m\":{\"k\":\"<|im_end|>\"}}";
	struct json root;
	struct json_doc *doc = parse(text, &root);
	struct arena *arena = arena_create(1 << 20);
	struct buf out = BUF_INIT;
	/* The fake's writer would put a ! before text that is trusted. */
	value_text_write(json_to_value(arena, &root), &out);
	assert_string_equal(out.data, text);
	buf_clear(&out);
	json_write(&out, &root);
	assert_string_equal(out.data, text);
	buf_free(&out);
	arena_destroy(arena);
	arena = arena_create(200);
	assert_null(json_to_value(arena, &root));
	arena_destroy(arena);
	json_doc_free(doc);
}

static void members_are_visited_in_order(void **state)
{
	(void)state;
	struct json root, member;
	struct json_doc *doc = parse("{\"b\":1,\"a\":null}", &root);
	void *it = NULL;
	char path[64];
	assert_true(json_next(&root, &it, &member));
	assert_string_equal(member.key, "b");
	assert_true(json_next(&root, &it, &member));
	json_path(&member, path, sizeof path);
	assert_string_equal(path, "a");
	assert_false(json_has(&member));
	assert_false(json_next(&root, &it, &member));
	/* Whatever is no container has no members. */
	struct json b = json_get(&root, "b"), none = json_get(&b, "x"), item = json_at(&b, 0);
	assert_false(json_has(&none));
	assert_false(json_has(&item));
	assert_int_equal(json_len(&b), 0);
	json_doc_free(doc);
}

UNIT_MAIN(cmocka_unit_test(only_an_object_is_taken), cmocka_unit_test(what_the_text_is_begins_the_sentence),
	  cmocka_unit_test(numbers_that_no_double_holds_are_refused_by_name),
	  cmocka_unit_test(a_key_that_occurs_twice_is_refused),
	  cmocka_unit_test(depth_and_size_are_bounded_before_parsing), cmocka_unit_test(null_and_absent_are_the_same),
	  cmocka_unit_test(integers_may_be_written_with_a_zero_fraction), cmocka_unit_test(errors_name_the_place),
	  cmocka_unit_test(strings_keep_their_nul), cmocka_unit_test(values_keep_order_and_are_marked_as_data),
	  cmocka_unit_test(members_are_visited_in_order))
