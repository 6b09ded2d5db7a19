/*
 * Constrained answers: which texts a schema's grammar takes, and which tokens it offers. Every text is tried byte by
 * byte.
 */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "engine/text/grammar_match.h"
#include "server/json.h"
#include "tests/support/vocab.h"

static struct vocab v;
static struct grammar_vocab *words;

enum { QUOTE_A = 256, BRACE_QUOTE, TRUE_, FALSE_, SPACES, HALF, END };

static int setup(void **state)
{
	(void)state;
	struct error err;
	vocab_begin(&v, "gpt2", "gpt-2");
	vocab_add_bytes(&v);
	vocab_merge(&v, "\"", "a");
	vocab_merge(&v, "{", "\"");
	vocab_add(&v, "true", VOCAB_NORMAL, 0);
	vocab_add(&v, "false}", VOCAB_NORMAL, 0);
	vocab_add_n(&v, vocab_escape("    ", 4), VOCAB_NORMAL, 0);
	vocab_add_n(&v, vocab_escape("\"\xC3", 2), VOCAB_NORMAL, 0);
	vocab_add(&v, "<|im_end|>", VOCAB_CONTROL, 0);
	if (vocab_open(&v, &err) != STATUS_OK)
		return -1;
	return grammar_vocab_create(v.tokenizer, &words) == STATUS_OK ? 0 : -1;
}

static int teardown(void **state)
{
	(void)state;
	grammar_vocab_destroy(words);
	vocab_close(&v);
	return 0;
}

static enum status compile(const char *schema, struct grammar **g, struct error *err)
{
	struct json_doc *doc = NULL;
	struct json root, inner;
	struct arena *a = arena_create(1 << 24);
	struct buf text = BUF_INIT;
	enum status status;
	buf_printf(&text, "{\"s\":%s}", schema);
	assert_int_equal(json_parse(buf_str(&text), "The body", &doc, &root, err), STATUS_OK);
	inner = json_get(&root, "s");
	status = grammar_json(json_to_value(a, &inner), g, err);
	json_doc_free(doc);
	buf_free(&text);
	arena_destroy(a); /* the program needs nothing of the schema */
	return status;
}

static struct grammar *compiled(const char *schema)
{
	struct grammar *g = NULL;
	struct error err = {0};
	if (compile(schema, &g, &err) != STATUS_OK)
		fail_msg("%s: %s", schema, err.message);
	return g;
}

static bool offered(struct grammar_matcher *m, int32_t token)
{
	const uint64_t *mask;
	struct error err;
	if (grammar_matcher_mask(m, &mask, &err) != STATUS_OK)
		return false;
	return mask[token / 64] >> (token % 64) & 1;
}

/* How many bytes of the text are taken; the length + 1 when it may also end there. */
static size_t taken(struct grammar *g, struct str text)
{
	struct grammar_matcher *m = NULL;
	struct error err;
	bool complete = false;
	size_t i = 0;
	assert_int_equal(grammar_matcher_create(g, words, false, &m), STATUS_OK);
	for (; i < text.n; i++) {
		int32_t byte = (unsigned char)text.p[i];
		bool ok = offered(m, byte);
		/* The mask and accept() are of one mind. */
		assert_int_equal(grammar_matcher_accept(m, byte, &complete, &err) == STATUS_OK, ok);
		if (!ok)
			break;
	}
	if (i == text.n && offered(m, END))
		i++;
	if (i <= text.n)
		assert_false(complete && i == text.n);
	grammar_matcher_destroy(m);
	return i;
}

static void expect(const char *schema, const char *text, bool is_taken)
{
	struct grammar *g = compiled(schema);
	if ((taken(g, str_from(text)) == strlen(text) + 1) != is_taken)
		fail_msg("%s should%s take %s", schema, is_taken ? "" : " not", text);
	grammar_unref(g);
}

#define TAKES(schema, text) expect(schema, text, true)
#define REFUSES(schema, text) expect(schema, text, false)

static void expect_error(const char *schema, enum status status, const char *part)
{
	struct grammar *g = NULL;
	struct error err = {0};
	assert_int_equal(compile(schema, &g, &err), status);
	if (!strstr(err.message, part))
		fail_msg("\"%s\" should speak of \"%s\"", err.message, part);
}

/* ---- JSON ---- */

static void any_json_is_what_rfc_8259_says(void **state)
{
	(void)state;
	static const char *const good[] = {
		"null",
		"true",
		"0",
		"-1.5e-07",
		"\"\"",
		"\"\\u00e9\\n\\\"\"",
		"\"\xc3\xa9\xf0\x9f\x98\x80\"",
		"[]",
		"[ ]",
		"{}",
		"[1, [2, {\"a\": []}], \"x\"]",
		"{\n  \"a\": 1,\n  \"b\": {\"c\": null}\n}",
		"\"\x7f\"",
	};
	static const char *const bad[] = {
		"",
		"01",
		"+1",
		".5",
		"1.",
		"1e",
		"nul",
		"[1,]",
		"{\"a\":1,}",
		"{a:1}",
		"\"\n\"",
		"\"\\x\"",
		"\"\\ud800\"",
		"\"\xc3\"",
		"\"\xff\"",
		"\"\xc0\xaf\"",
		"\"\xed\xa0\x80\"",
		"[1 2]",
		"'a'",
		"1 ",
		" 1",
		"{}{}",
	};
	struct grammar *g = compiled("{}");
	for (size_t i = 0; i < sizeof good / sizeof *good; i++)
		if (taken(g, str_from(good[i])) != strlen(good[i]) + 1)
			fail_msg("should take %s", good[i]);
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		if (taken(g, str_from(bad[i])) == strlen(bad[i]) + 1)
			fail_msg("should not take %s", bad[i]);
	grammar_unref(g);
}

static void without_a_schema_an_object_must_come(void **state)
{
	(void)state;
	struct grammar *g = NULL;
	struct error err;
	assert_int_equal(grammar_json(NULL, &g, &err), STATUS_OK);
	assert_int_equal(taken(g, str_from("{\"a\":[1]}")), 10);
	assert_int_equal(taken(g, str_from("[1]")), 0);
	assert_int_equal(taken(g, str_from("\"a\"")), 0);
	grammar_unref(g);
}

static void blanks_and_digits_cannot_run_away(void **state)
{
	(void)state;
	char text[64] = "[\n";
	struct grammar *g = compiled("{}");
	memset(text + 2, ' ', 40);
	assert_int_equal(taken(g, str_from(text)), 2 + 32);
	assert_int_equal(taken(g, str_from("[  1]")), 2);
	assert_int_equal(taken(g, str_from("12345678901234567890")), 16);
	grammar_unref(g);
}

static void nesting_is_bounded_and_always_finds_its_end(void **state)
{
	(void)state;
	struct grammar *g = compiled("{}");
	struct grammar_matcher *m = NULL;
	struct error err;
	bool complete = false;
	int depth = 0;
	assert_int_equal(grammar_matcher_create(g, words, false, &m), STATUS_OK);
	while (offered(m, '[')) {
		assert_int_equal(grammar_matcher_accept(m, '[', &complete, &err), STATUS_OK);
		depth++;
	}
	assert_true(depth >= 64 && depth <= 160);
	/* Where no more may be opened, a leaf still may come. */
	for (const char *c = "\"a\""; *c; c++)
		assert_int_equal(grammar_matcher_accept(m, *c, &complete, &err), STATUS_OK);
	while (depth-- > 0)
		assert_int_equal(grammar_matcher_accept(m, ']', &complete, &err), STATUS_OK);
	assert_true(complete);
	grammar_matcher_destroy(m);
	grammar_unref(g);
}

/* ---- Schemas ---- */

#define PERSON                                                                                                         \
	"{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"age\":{\"type\":\"integer\"},"          \
	"\"tags\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}}},\"required\":[\"name\"],"                      \
	"\"additionalProperties\":false}"

static void members_come_in_order_and_required_ones_always(void **state)
{
	(void)state;
	TAKES(PERSON, "{\"name\":\"Ada\"}");
	TAKES(PERSON, "{\"name\": \"Ada\", \"age\": 36}");
	TAKES(PERSON, "{\"name\":\"Ada\",\"tags\":[\"x\",\"y\"]}");
	TAKES(PERSON, "{\"name\":\"Ada\",\"age\":1,\"tags\":[]}");
	REFUSES(PERSON, "{}");
	REFUSES(PERSON, "{\"age\":1}");
	REFUSES(PERSON, "{\"age\":1,\"name\":\"Ada\"}");
	REFUSES(PERSON, "{\"name\":\"Ada\",\"name\":\"Ada\"}");
	REFUSES(PERSON, "{\"name\":\"Ada\",\"other\":1}");
	REFUSES(PERSON, "{\"name\":1}");
	REFUSES(PERSON, "{\"name\":\"Ada\",\"age\":1.5}");
	REFUSES(PERSON, "{\"name\":\"Ada\",}");
}

static void optional_members_may_all_be_left_out(void **state)
{
	(void)state;
	const char *s = "{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{\"type\":\"null\"},\"c\":true}}";
	TAKES(s, "{}");
	TAKES(s, "{ }");
	TAKES(s, "{\"a\":1}");
	TAKES(s, "{\"b\":null}");
	TAKES(s, "{\"c\":[]}");
	TAKES(s, "{\"a\":1,\"c\":2}");
	TAKES(s, "{\"a\":1,\"b\":null,\"c\":2}");
	REFUSES(s, "{,\"a\":1}");
	REFUSES(s, "{\"a\":1,}");
	REFUSES(s, "{\"b\":null,\"a\":1}");
	s = "{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"required\":[\"b\"]}";
	TAKES(s, "{\"b\":1}");
	TAKES(s, "{\"a\":1,\"b\":2}");
	REFUSES(s, "{\"a\":1}");
	REFUSES(s, "{}");
}

static void maps_have_any_keys_and_values_of_one_schema(void **state)
{
	(void)state;
	const char *s = "{\"type\":\"object\",\"additionalProperties\":{\"type\":\"boolean\"}}";
	TAKES(s, "{}");
	TAKES(s, "{\"x\":true,\"y\":false}");
	REFUSES(s, "{\"x\":1}");
	TAKES("{\"type\":\"object\",\"additionalProperties\":false}", "{}");
	REFUSES("{\"type\":\"object\",\"additionalProperties\":false}", "{\"a\":1}");
}

static void values_are_spelled_as_they_stand(void **state)
{
	(void)state;
	TAKES("{\"enum\":[\"red\",\"re\",3,null,{\"a\":[1]}]}", "\"red\"");
	TAKES("{\"enum\":[\"red\",\"re\",3,null,{\"a\":[1]}]}", "\"re\"");
	TAKES("{\"enum\":[\"red\",\"re\",3,null,{\"a\":[1]}]}", "{\"a\":[1]}");
	REFUSES("{\"enum\":[\"red\",\"re\",3,null]}", "\"r\"");
	TAKES("{\"const\":\"a\\\"b\",\"type\":\"string\"}", "\"a\\\"b\"");
	TAKES("{\"const\":null}", "null");
	REFUSES("{\"type\":\"string\",\"enum\":[\"a\",1]}", "1");
	expect_error("{\"type\":\"string\",\"enum\":[1]}", STATUS_INVALID, "schema.enum");
}

static void types_may_be_several(void **state)
{
	(void)state;
	TAKES("{\"type\":[\"string\",\"null\"]}", "null");
	TAKES("{\"type\":[\"string\",\"null\"]}", "\"x\"");
	REFUSES("{\"type\":[\"string\",\"null\"]}", "1");
	TAKES("{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"null\"}]}", "-7");
	REFUSES("{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"null\"}]}", "-7.5");
	TAKES("{\"allOf\":[{\"type\":\"number\"}],\"description\":\"d\"}", "-7.5");
	TAKES("{\"minLength\":2}", "\"ab\"");
	REFUSES("{\"minLength\":2}", "\"a\"");
}

static void lists_and_strings_have_the_length_that_was_asked(void **state)
{
	(void)state;
	const char *s = "{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":2,\"maxItems\":3}";
	REFUSES(s, "[]");
	REFUSES(s, "[1]");
	TAKES(s, "[1,2]");
	TAKES(s, "[1, 2, 3]");
	REFUSES(s, "[1,2,3,4]");
	s = "{\"type\":\"array\",\"minItems\":1}";
	REFUSES(s, "[]");
	TAKES(s, "[1,2,3,4,5]");
	s = "{\"type\":\"array\",\"maxItems\":0}";
	TAKES(s, "[]");
	REFUSES(s, "[1]");
	s = "{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}";
	REFUSES(s, "\"a\"");
	/* Characters count, not bytes, and an escape is one. */
	TAKES(s, "\"\xc3\xa9\xc3\xa9\xc3\xa9\"");
	TAKES(s, "\"\\n\\u0041\"");
	REFUSES(s, "\"abcd\"");
	s = "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"string\"},{\"type\":\"integer\"}],\"minItems\":2,"
	    "\"maxItems\":2}";
	TAKES(s, "[\"a\",1]");
	REFUSES(s, "[\"a\"]");
	REFUSES(s, "[1,\"a\"]");
}

static void integers_stay_within_their_bounds(void **state)
{
	(void)state;
	static const struct {
		int min, max;
	} ranges[] = {{0, 0}, {0, 9}, {1, 10}, {-5, 5}, {-120, -7}, {98, 1203}, {-1, 100}, {100, 999}, {7, 7}};
	char schema[128], text[16];
	for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
		snprintf(schema, sizeof schema, "{\"type\":\"integer\",\"minimum\":%d,\"exclusiveMaximum\":%d}",
		         ranges[i].min, ranges[i].max + 1);
		struct grammar *g = compiled(schema);
		for (int n = -130; n <= 1300; n++) {
			size_t len = (size_t)snprintf(text, sizeof text, "%d", n);
			bool in = n >= ranges[i].min && n <= ranges[i].max;
			if ((taken(g, str_from(text)) == len + 1) != in)
				fail_msg("%s and %d", schema, n);
		}
		grammar_unref(g);
	}
	TAKES("{\"type\":\"integer\",\"minimum\":0}", "123456789012345");
	REFUSES("{\"type\":\"integer\",\"minimum\":0}", "-1");
	REFUSES("{\"type\":\"integer\",\"minimum\":0}", "-0");
	REFUSES("{\"type\":\"integer\",\"minimum\":0}", "007");
	TAKES("{\"type\":\"integer\",\"minimum\":0.5,\"maximum\":1.5}", "1");
	REFUSES("{\"type\":\"integer\",\"minimum\":0.5,\"maximum\":1.5}", "0");
	expect_error("{\"type\":\"integer\",\"minimum\":2,\"maximum\":1}", STATUS_INVALID, "no integer");
}

static void references_may_go_round(void **state)
{
	(void)state;
	const char *s =
		"{\"$defs\":{\"node\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},"
		"\"next\":{\"anyOf\":[{\"$ref\":\"#/$defs/node\"},{\"type\":\"null\"}]}},\"required\":[\"v\",\"next\"],"
		"\"additionalProperties\":false}},\"$ref\":\"#/$defs/node\"}";
	TAKES(s, "{\"v\":1,\"next\":null}");
	TAKES(s, "{\"v\":1,\"next\":{\"v\":2,\"next\":null}}");
	REFUSES(s, "{\"v\":1}");
	TAKES("{\"definitions\":{\"a/b\":{\"type\":\"null\"}},\"$ref\":\"#/definitions/a~1b\"}", "null");
	expect_error("{\"$ref\":\"#/$defs/none\"}", STATUS_INVALID, "$ref");
	expect_error("{\"$ref\":\"http://example.com/\"}", STATUS_INVALID, "$ref");
	/* Round without an end. */
	expect_error("{\"$ref\":\"#\"}", STATUS_INVALID, "no finite text");
	expect_error("{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"}},\"required\":[\"a\"]}",
	             STATUS_INVALID, "no finite text");
	TAKES("{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"}}}", "{\"a\":{\"a\":{}}}");
	/* A way that never ends is not offered where another does. */
	REFUSES("{\"$defs\":{\"x\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/x\"},\"minItems\":1}},"
	        "\"anyOf\":[{\"$ref\":\"#/$defs/x\"},{\"type\":\"null\"}]}",
	        "[");
}

static void patterns_match_as_in_javascript(void **state)
{
	(void)state;
	static const struct {
		const char *pattern, *good, *bad;
	} cases[] = {
	        {"^a+b?$", "aab", "b"},
	        {"^(foo|ba[rz]){2}$", "foobaz", "foo"},
	        {"^[^0-9]{1,3}$", "\xc3\xa9x", "1"},
	        {"^\\\\d{3}-\\\\w$", "123-_", "12-a"},
	        {"b", "abc", "ac"},
	        {"^b", "bc", "ab"},
	        {"b$", "ab", "ba"},
	        {"^(?:a|b)*$", "abba", "abc"},
	        {"^.$", "\xf0\x9f\x98\x80", "ab"},
	        {"^a|b$", "xb", "xc"},
	        {"^\\\\.\\\\/$", "./", "a/"},
	        {"^\\\\u00e9$", "\xc3\xa9", "e"},
	        {"^\xc3\xa9+$", "\xc3\xa9\xc3\xa9", "\xc3\xaa"},
	        {"^[\\\\]a-]+$", "]a-", "b"},
	        {"^a{2,}?$", "aaa", "a"},
	        {"^(a*)*$", "aa", "b"},
	};
	char schema[128], text[64];
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		snprintf(schema, sizeof schema, "{\"type\":\"string\",\"pattern\":\"%s\"}", cases[i].pattern);
		snprintf(text, sizeof text, "\"%s\"", cases[i].good);
		TAKES(schema, text);
		snprintf(text, sizeof text, "\"%s\"", cases[i].bad);
		REFUSES(schema, text);
	}
	/* What JSON escapes comes escaped. */
	TAKES("{\"pattern\":\"^[\\\"\\\\n\\\\\\\\]+$\"}", "\"\\\"\\n\\\\\"");
	TAKES("{\"pattern\":\"^\\\\x01$\"}", "\"\\u0001\"");
	static const char *const wrong[] = {"(",     ")",     "[a",    "a{2",     "*a",       "(?=a)",
	                                    "a(^b)", "\\\\1", "[z-a]", "a{1001}", "\\\\p{L}", "[\xc3\xa9]"};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		struct grammar *g = NULL;
		struct error err = {0};
		snprintf(schema, sizeof schema, "{\"type\":\"string\",\"pattern\":\"%s\"}", wrong[i]);
		enum status status = compile(schema, &g, &err);
		if (status != STATUS_INVALID && status != STATUS_UNSUPPORTED)
			fail_msg("%s: status %d", wrong[i], status);
		assert_non_null(strstr(err.message, "schema.pattern"));
	}
}

static void formats_take_real_values_only(void **state)
{
	(void)state;
	static const struct {
		const char *format, *good, *bad;
	} cases[] = {
	        {"date", "2024-02-28", "2024-02-30"},
	        {"date", "1999-12-31", "1999-11-31"},
	        {"time", "23:59:59Z", "24:00:00Z"},
	        {"date-time", "2024-01-31T00:00:00.5+01:00", "2024-01-31"},
	        {"uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"},
	        {"ipv4", "192.168.0.255", "192.168.0.256"},
	        {"email", "a.b@example.com", "a@b"},
	        {"hostname", "a-b.example", "-a"},
	};
	char schema[128], text[64];
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		snprintf(schema, sizeof schema, "{\"type\":\"string\",\"format\":\"%s\"}", cases[i].format);
		snprintf(text, sizeof text, "\"%s\"", cases[i].good);
		TAKES(schema, text);
		snprintf(text, sizeof text, "\"%s\"", cases[i].bad);
		REFUSES(schema, text);
	}
	expect_error("{\"type\":\"string\",\"format\":\"color\"}", STATUS_UNSUPPORTED, "schema.format");
}

static void what_is_not_supported_is_named(void **state)
{
	(void)state;
	static const struct {
		const char *schema;
		enum status status;
		const char *part;
	} cases[] = {
		{"{\"oneOf\":[{}]}", STATUS_UNSUPPORTED, "schema.oneOf"},
		{"{\"not\":{}}", STATUS_UNSUPPORTED, "schema.not"},
		{"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"array\",\"items\":{\"if\":{}}}}}",
	         STATUS_UNSUPPORTED, "schema.properties.a.items.if"},
		{"{\"type\":\"number\",\"minimum\":0}", STATUS_UNSUPPORTED, "bounds"},
		{"{\"type\":\"array\",\"uniqueItems\":true}", STATUS_UNSUPPORTED, "uniqueItems"},
		{"{\"type\":\"thing\"}", STATUS_INVALID, "type"},
		{"{\"type\":7}", STATUS_INVALID, "type"},
		{"{\"type\":[]}", STATUS_INVALID, "type"},
		{"7", STATUS_INVALID, "schema"},
		{"false", STATUS_INVALID, "satisfied"},
		{"{\"anyOf\":[]}", STATUS_INVALID, "schema.anyOf"},
		{"{\"anyOf\":[{}],\"properties\":{}}", STATUS_UNSUPPORTED, "schema.anyOf"},
		{"{\"allOf\":[{},{}]}", STATUS_UNSUPPORTED, "schema.allOf"},
		{"{\"type\":\"object\",\"required\":[\"a\"]}", STATUS_UNSUPPORTED, "required"},
		{"{\"type\":\"object\",\"required\":\"a\"}", STATUS_INVALID, "required"},
		{"{\"type\":\"object\",\"properties\":[]}", STATUS_INVALID, "properties"},
		{"{\"type\":\"string\",\"minLength\":-1}", STATUS_INVALID, "minLength"},
		{"{\"type\":\"string\",\"minLength\":3,\"maxLength\":2}", STATUS_INVALID, "minLength"},
		{"{\"type\":\"string\",\"maxLength\":1000000}", STATUS_UNSUPPORTED, "maxLength"},
		{"{\"type\":\"array\",\"items\":{\"type\":\"array\",\"items\":{\"pattern\":\"^((a{100}){100}){100}$\"}}"
	         "}",
	         STATUS_LIMIT, "too large"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
		expect_error(cases[i].schema, cases[i].status, cases[i].part);
}

/* ---- Tokens ---- */

static void tokens_of_many_bytes_are_offered_where_all_of_them_fit(void **state)
{
	(void)state;
	struct grammar *g =
		compiled("{\"type\":\"object\",\"properties\":{\"ab\":{\"type\":\"boolean\"}},\"required\":[\"ab\"]}");
	struct grammar_matcher *m = NULL;
	struct error err;
	bool complete = true;
	assert_int_equal(grammar_matcher_create(g, words, false, &m), STATUS_OK);
	assert_true(offered(m, BRACE_QUOTE));
	assert_true(offered(m, '{'));
	assert_false(offered(m, QUOTE_A));
	assert_false(offered(m, END));
	assert_int_equal(grammar_matcher_accept(m, '{', &complete, &err), STATUS_OK);
	assert_false(complete);
	assert_true(offered(m, QUOTE_A));
	assert_false(offered(m, SPACES)); /* one space is enough */
	/* A token that is not offered changes nothing. */
	assert_int_equal(grammar_matcher_accept(m, TRUE_, &complete, &err), STATUS_INVALID);
	assert_int_equal(grammar_matcher_accept(m, QUOTE_A, &complete, &err), STATUS_OK);
	assert_int_equal(grammar_matcher_accept(m, 'b', &complete, &err), STATUS_OK);
	assert_int_equal(grammar_matcher_accept(m, '"', &complete, &err), STATUS_OK);
	assert_int_equal(grammar_matcher_accept(m, ':', &complete, &err), STATUS_OK);
	assert_true(offered(m, TRUE_));
	assert_true(offered(m, FALSE_));
	assert_false(complete);
	assert_int_equal(grammar_matcher_accept(m, FALSE_, &complete, &err), STATUS_OK);
	assert_true(complete);
	assert_true(offered(m, END));
	grammar_matcher_destroy(m);
	grammar_unref(g);
}

static void a_token_may_end_inside_of_a_code_point(void **state)
{
	(void)state;
	struct grammar *g = compiled("{\"enum\":[\"\xc3\xa9\"]}");
	struct grammar_matcher *m = NULL;
	struct error err;
	bool complete;
	assert_int_equal(grammar_matcher_create(g, words, false, &m), STATUS_OK);
	assert_int_equal(grammar_matcher_accept(m, HALF, &complete, &err), STATUS_OK);
	assert_false(offered(m, 'a'));
	assert_true(offered(m, 0xA9));
	grammar_matcher_destroy(m);
	grammar_unref(g);
}

static void a_space_before_the_text_is_taken_where_it_is_not_shown(void **state)
{
	(void)state;
	struct grammar *g = compiled("{}");
	struct grammar_matcher *m = NULL;
	struct error err;
	bool complete;
	assert_int_equal(grammar_matcher_create(g, words, true, &m), STATUS_OK);
	assert_true(offered(m, '{'));
	assert_int_equal(grammar_matcher_accept(m, ' ', &complete, &err), STATUS_OK);
	assert_true(offered(m, '{'));
	assert_false(offered(m, ' '));
	grammar_matcher_destroy(m);
	grammar_unref(g);
}

/* A long text with ever new states: what is remembered is thrown away on the way, and the answer is the same. */
static void a_long_text_takes_bounded_memory(void **state)
{
	(void)state;
	struct grammar *g = compiled("{\"type\":\"string\",\"maxLength\":6000}");
	struct buf text = BUF_INIT;
	buf_putc(&text, '"');
	for (int i = 0; i < 6000; i++)
		buf_putc(&text, 'x');
	buf_putc(&text, '"');
	assert_int_equal(taken(g, buf_str(&text)), 6003);
	buf_putc(&text, 'x');
	assert_int_equal(taken(g, buf_str(&text)), 6002);
	buf_free(&text);
	grammar_unref(g);
}

static void calls_of_tools_are_written_in_the_models_form(void **state)
{
	(void)state;
	struct grammar_call_form form = {"", "<t>\n", "\n</t>", "\n", "", "arguments"};
	struct grammar_tool tools[] = {{str_from("f"), NULL}, {str_from("g\"h"), NULL}};
	struct grammar *g = NULL;
	struct error err;
	const char *one = "<t>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</t>";
	const char *two =
		"<t>\n{\"name\":\"f\",\"arguments\":{}}\n</t>\n<t>\n{\"name\":\"g\\\"h\",\"arguments\":{}}\n</t>";
	assert_int_equal(grammar_tools(&form, tools, 2, false, &g, &err), STATUS_OK);
	assert_int_equal(taken(g, str_from(one)), strlen(one) + 1);
	assert_true(taken(g, str_from(two)) < strlen(two));
	assert_int_equal(taken(g, str_from("Hello")), 0);
	grammar_unref(g);
	assert_int_equal(grammar_tools(&form, tools, 2, true, &g, &err), STATUS_OK);
	assert_int_equal(taken(g, str_from(two)), strlen(two) + 1);
	grammar_unref(g);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(any_json_is_what_rfc_8259_says),
	        cmocka_unit_test(without_a_schema_an_object_must_come),
	        cmocka_unit_test(blanks_and_digits_cannot_run_away),
	        cmocka_unit_test(nesting_is_bounded_and_always_finds_its_end),
	        cmocka_unit_test(members_come_in_order_and_required_ones_always),
	        cmocka_unit_test(optional_members_may_all_be_left_out),
	        cmocka_unit_test(maps_have_any_keys_and_values_of_one_schema),
	        cmocka_unit_test(values_are_spelled_as_they_stand),
	        cmocka_unit_test(types_may_be_several),
	        cmocka_unit_test(lists_and_strings_have_the_length_that_was_asked),
	        cmocka_unit_test(integers_stay_within_their_bounds),
	        cmocka_unit_test(references_may_go_round),
	        cmocka_unit_test(patterns_match_as_in_javascript),
	        cmocka_unit_test(formats_take_real_values_only),
	        cmocka_unit_test(what_is_not_supported_is_named),
	        cmocka_unit_test(tokens_of_many_bytes_are_offered_where_all_of_them_fit),
	        cmocka_unit_test(a_token_may_end_inside_of_a_code_point),
	        cmocka_unit_test(a_space_before_the_text_is_taken_where_it_is_not_shown),
	        cmocka_unit_test(a_long_text_takes_bounded_memory),
	        cmocka_unit_test(calls_of_tools_are_written_in_the_models_form),
	};
	return cmocka_run_group_tests(tests, setup, teardown);
}
