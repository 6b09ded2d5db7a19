/*
 * The template engine: where its output's bytes come from, what it says when it fails, and that it can be shared. That
 * its language is Jinja2's is shown by tests/golden/test_templates.py and test_jinja_diff.py.
 */
#include <pthread.h>
#include <stdio.h>

#include "engine/text/builtin_templates.h"
#include "tests/unit/text/template_fixture.h"

/* ---- Provenance ---- */

static void test_text_of_the_template_is_trusted(void **state)
{
	(void)state;
	assert_marked("<|im_start|>{{ '<|im_end|>' }}{{ \"a\" 'b' }}{{ t }}", "<|im_start|><|im_end|>ab<s>");
}

static void test_text_of_a_variable_is_data(void **state)
{
	(void)state;
	assert_marked("{{ x }}|{{ messages[0].content }}|{{ messages[0]['role'] }}", "[Data]|[Hi]|[user]");
}

static void test_adjacent_data_is_one_range(void **state)
{
	(void)state;
	assert_marked("{{ x }}{{ x }}-{{ x ~ x }}", "[DataData]-[DataData]");
}

static void test_concatenation_keeps_marks_byte_by_byte(void **state)
{
	(void)state;
	assert_marked("{{ '<' + x + '>' }}", "<[Data]>");
	assert_marked("{{ '<' ~ x ~ t ~ n }}", "<[Data]<s>[42]");
	assert_marked("{{ '%s|%s' % (x, t) }}{{ '{}|{}'.format(t, x) }}{{ '<%s>'|format(x) }}",
		      "[Data]|<s><s>|[Data]<[Data]>");
	assert_marked("{{ ', '.join(list) }} {{ list|join('/') }}", "[p], [q] [p]/[q]");
	assert_marked("{{ ('<' ~ x ~ '>') * 2 }}", "<[Data]><[Data]>");
}

static void test_cutting_keeps_marks(void **state)
{
	(void)state;
	assert_marked("{{ ('<<' ~ x ~ '>>')[1:4] }} {{ ('<' ~ x ~ '>')[::-1] }} {{ ('<' ~ x)[0] }}{{ ('<' ~ x)[1] }}",
		      "<[Da] >[ataD]< <[D]");
	assert_marked("{{ (' <' ~ y ~ '> ').strip() }}|{{ y|trim ~ '.' }}", "<[ a-b ]>|[a-b].");
	assert_marked("{{ (x ~ '<sep>' ~ x).split('<sep>')[1] }}{{ ('a,' ~ y).split(',')|join(';') }}",
		      "[Data]a;[ a-b ]");
	assert_marked("{{ (y ~ '!').split('-') | map('trim') | join('|') }}", "[a]|[b ]!");
	assert_marked("{{ ('<' ~ u ~ '>')[1:3] }}{{ ('<' ~ u)[-1] }}", "[\xc3\xa9\xf0\x9f\x99\x82z]");
	assert_marked("{{ ('a' ~ x ~ 'b')|truncate(4, true, '~', 0) }} {{ (x ~ '\nb').splitlines()[0] }}",
		      "a[Da]~ [Data]");
	assert_marked("{{ (t ~ x).removeprefix('<s>') }}{{ (t ~ x).partition('>')[0] }}{{ (t ~ x)|first }}",
		      "[Data]<s<");
}

static void test_changing_keeps_marks(void **state)
{
	(void)state;
	assert_marked(
		"{{ ('<' ~ x ~ '>').upper() }} {{ ('a' ~ x)|lower }} {{ ('a ' ~ x)|title }} {{ (x ~ 'B')|capitalize }}",
		"<[DATA]> a[data] A [Data] [Data]b");
	assert_marked("{{ x.replace('at', '<|>') }} {{ 'a.b'.replace('.', x) }} {{ ('a' ~ x)|replace('a', 'b') }}",
		      "[D]<|>[a] a[Data]b b[D]b[t]b");
	assert_marked("{{ ('1\n' ~ x)|indent(2) }} {{ x.center(6, '*') }} {{ x.zfill(6) }}",
		      "1\n  [Data] *[Data]* 00[Data]");
	assert_marked("{{ ('<' ~ y)|e }} {{ (y ~ '/')|urlencode }}", "&lt;[ a-b ] [%20a-b%20]/");
	assert_marked("{{ x|default('d') }}{{ nothing|default(x) }}{{ nothing|default('d') }}", "[DataData]d");
}

static void test_quoting_marks_what_stands_for_data_as_data(void **state)
{
	(void)state;
	assert_marked("{{ x|tojson }}{{ '<s>'|tojson }}", "\"[Data]\"\"<s>\"");
	assert_marked("{{ ('a\"' ~ u)|tojson }} {{ u|tojson(ensure_ascii=true) }}",
		      "\"a\\\"[\xc3\xa9\xf0\x9f\x99\x82z]\" \"[\\u00e9\\ud83d\\ude42z]\"");
	assert_marked("{{ dict|tojson }} {{ list }} {{ {'a': x} }}",
		      "{\"[k]\": \"[v]\"} ['[p]', '[q]'] {'a': '[Data]'}");
	assert_marked("{{ n }} {{ n + 1 }} {{ 1 + 1 }} {{ x|length }} {{ '7'|int }} {{ [n]|sum }} {{ [n]|tojson }}",
		      "[42] [43] 2 4 7 [42] [[42]]");
}

static void test_marks_survive_variables_blocks_and_macros(void **state)
{
	(void)state;
	assert_marked("{% set a = '<' ~ x %}{{ a }}{% set b %}({{ x }}){% endset %}{{ b }}{% set ns = namespace(v=b) "
		      "%}{{ ns.v }}",
		      "<[Data]([Data])([Data])");
	assert_marked("{% macro m(a) %}<{{ a }}{{ caller() if caller }}>{% endmacro %}{{ m(x) }}{% call m('t') %}{{ x "
		      "}}{% endcall %}",
		      "<[Data]><t[Data]>");
	assert_marked("{% filter upper %}a{{ x }}b{% endfilter %}{% for c in '<' ~ x %}{{ c }}.{% endfor %}",
		      "A[DATA]B<.[D].[a].[t].[a].");
	assert_marked("{% for w in list|sort(reverse=true) %}{{ w }},{% endfor %}{% for k, v in dict.items() %}{{ k "
		      "}}={{ v }}{% endfor %}",
		      "[q],[p],[k]=[v]");
}

/*
 * Whatever is done to a user's text, no byte of it becomes trusted: all of its letters (which no template text has) are
 * data.
 */
static void test_no_chain_of_operations_makes_data_trusted(void **state)
{
	static const char *const steps[] = {
		"|upper",
		"|lower",
		"|trim",
		"[::-1]",
		"[1:]",
		"|replace('1','2')",
		"|string",
		"|title",
		"|e",
		"|indent",
		"~'..'",
		"|tojson",
		"|list|join",
		".split('.')|join('_')",
		".strip('.')",
		"|safe",
		"*2",
		"|capitalize",
		".center(30)",
		"|urlencode",
		".swapcase()",
		"|reverse",
		".partition('.')|join",
		"|map('upper')|join",
		"|truncate(40,true)",
		".format()",
		"|batch(3)|map('join')|join('-')",
	};
	uint64_t seed = 7;
	(void)state;
	for (int round = 0; round < 400; round++) {
		char expr[512] = "'12' ~ x ~ '34'", source[600];
		for (int k = 0; k <= round % 5; k++) {
			snprintf(source, sizeof source, "(%s)%s", expr,
				 steps[unit_rand(&seed) % (sizeof steps / sizeof *steps)]);
			strcpy(expr, source);
		}
		struct outcome o;
		snprintf(source, sizeof source, "{{ %s }}", expr);
		render(source, &o);
		assert_int_equal(o.status, STATUS_OK);
		int depth = 0;
		for (const char *c = o.marked; *c; c++) {
			depth += *c == '[';
			depth -= *c == ']';
			bool of_data = strchr("DdTt", *c) != NULL; /* 'a' also stands in "&amp;" */
			if (of_data && depth != 1)
				print_message("%s: %s\n", source, o.marked);
			assert_true(!of_data || depth == 1);
		}
	}
}

/* ---- Failures ---- */

static void test_a_template_that_cannot_compile_names_construct_and_line(void **state)
{
	(void)state;
	assert_fails("a\n{% include 'x' %}", STATUS_UNSUPPORTED, "line 2: {% include %} is not supported");
	assert_fails("\n\n{% frobnicate %}", STATUS_UNSUPPORTED, "line 3: unknown tag {% frobnicate %}");
	assert_fails("{{ x\n | nosuch }}", STATUS_UNSUPPORTED, "line 2: unknown filter nosuch");
	assert_fails("{{ x is nosuch }}", STATUS_UNSUPPORTED, "line 1: unknown test nosuch");
	assert_fails("{% if x %}\n{{ x }}", STATUS_INVALID, "line 2: {% if %} of line 1 has no {% elif %}");
	assert_fails("{% for m in x %}{% endif %}", STATUS_INVALID,
		     "line 1: {% endif %} where {% for %} of line 1 is open");
	assert_fails("{{ x", STATUS_INVALID, "line 1: a tag has no end");
	assert_fails("{# x", STATUS_INVALID, "line 1: a comment has no end");
	assert_fails("{% raw %}\nx", STATUS_INVALID, "line 1: {% raw %} has no {% endraw %}");
	assert_fails("{{ 'x }}", STATUS_INVALID, "line 1: a string has no end");
	assert_fails("{{ (x] }}", STATUS_INVALID, "line 1: unexpected ']', expected ')'");
	assert_fails("{{ x y }}", STATUS_INVALID, "line 1: expected '}}', got 'y'");
	assert_fails("{{ 1 + }}", STATUS_INVALID, "line 1: unexpected '}}'");
	assert_fails("{{ ? }}", STATUS_INVALID, "line 1: unexpected character '?'");
	assert_fails("{% break %}", STATUS_INVALID, "line 1: {% break %} outside of a loop");
	assert_fails("{% for a in b %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}", STATUS_INVALID,
		     "line 1: {% break %} outside of a loop");
	assert_fails("{% autoescape true %}{% endautoescape %}", STATUS_UNSUPPORTED,
		     "line 1: {% autoescape %} other than false is not supported");
	assert_fails("{{ 99999999999999999999 }}", STATUS_UNSUPPORTED,
		     "line 1: integers beyond 64 bits are not supported");
	assert_fails("{{ '\\N{DASH}' }}", STATUS_UNSUPPORTED, "line 1: \\N{...} escapes are not supported");
}

static void test_a_misused_value_names_the_line(void **state)
{
	(void)state;
	assert_fails("\n{{ x.a.b }}", STATUS_INVALID, "'str object' has no attribute 'a' (line 2 of the template)");
	assert_fails("{{ 'a' +\n list }}", STATUS_INVALID,
		     "can only concatenate str (not \"list\") to str (line 1 of the template)");
	assert_fails("{{ list.append(1) }}", STATUS_INVALID,
		     "access to attribute 'append' of 'list' object is unsafe. (line 1 of the template)");
	assert_fails("{% if t %}\n{{ x|nosuch }}{% endif %}", STATUS_INVALID,
		     "No filter named 'nosuch' found. (line 2 of the template)");
	assert_fails("{{ x|map('upper')|tojson }}", STATUS_INVALID,
		     "Object of type generator is not JSON serializable (line 1 of the template)");
}

static void test_a_refusal_is_the_templates_own_sentence(void **state)
{
	(void)state;
	assert_fails("{{ raise_exception('Roles must alternate, ' ~ x) }}", STATUS_INVALID,
		     "Roles must alternate, Data");
}

static void test_a_long_message_is_cut_between_characters(void **state)
{
	struct outcome o;
	(void)state;
	render_limited("{{ raise_exception('a' ~ '\xc3\xa9' * 1000) }}", NULL, &o);
	assert_int_equal(o.status, STATUS_INVALID);
	size_t n = strlen(o.error.message);
	assert_true(n > 400 && n % 2 == 1);
}

/* Each of these made a sanitizer speak once. */
static void test_found_faults(void **state)
{
	(void)state;
	assert_renders("{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m() }}", "(){}");
}

/* ---- Sharing ---- */

static void *render_many(void *arg)
{
	const struct template *t = arg;
	for (int i = 0; i < 200; i++) {
		struct arena *a = arena_create(1 << 20);
		struct rendered r = {0};
		struct error err;
		bool good = template_render(t, fixture_vars(a), i, NULL, &r, &err) == STATUS_OK &&
			    strcmp(r.text.data, "3<s>Data \xc3\xa9-\xc3\xa9") == 0;
		rendered_free(&r);
		arena_destroy(a);
		if (!good)
			return arg;
	}
	return NULL;
}

static void test_one_template_renders_in_many_threads(void **state)
{
	static const char source[] =
		"{% set ns = namespace(i=0) %}{% for c in 'abc' %}{% set ns.i = ns.i + 1 %}{% endfor %}"
		"{{ ns.i }}{{ t }}{{ x }} {{ ['\xc3\xa9', '\xc3\xa9']|join('-') }}";
	struct template *t;
	struct error err;
	pthread_t threads[4];
	(void)state;
	assert_int_equal(template_compile(source, strlen(source), &t, &err), STATUS_OK);
	for (int i = 0; i < 4; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, render_many, t), 0);
	for (int i = 0; i < 4; i++) {
		void *failed;
		pthread_join(threads[i], &failed);
		assert_null(failed);
	}
	template_destroy(t);
}

static void test_strftime_reads_the_given_clock(void **state)
{
	(void)state;
	assert_renders("{{ strftime_now('%Y-%m-%d %H:%M:%S %A %-d') }}", "2026-01-15 12:00:00 Thursday 15");
}

static void test_bytes_that_are_not_utf8_pass_through(void **state)
{
	(void)state;
	assert_renders("\xff{{ '\xc3' ~ x.upper() }}{{ '\x80z'[1:] }}{{ '\xff\xfe'.upper() }}", "\xff\xc3"
												"DATAz\xff\xfe");
}

/* ---- Templates that come with the engine ---- */

static void test_every_builtin_template_renders_a_chat(void **state)
{
	(void)state;
	for (size_t i = 0; template_builtin_name(i); i++) {
		struct outcome o;
		const char *source = template_builtin(template_builtin_name(i));
		assert_non_null(source);
		render(source, &o);
		assert_int_equal(o.status, STATUS_OK);
		assert_non_null(strstr(o.marked, "Hi")); /* data, perhaps next to the role's name */
	}
	assert_null(template_builtin("nosuch"));
}

static void test_builtin_formats(void **state)
{
	(void)state;
	static const struct {
		const char *name, *expected;
	} rows[] = {
		{"chatml",
		 "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
		 "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"},
		{"llama2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]"},
		{"llama3",
		 "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>"
		 "\n\n"
		 "U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user"
		 "<|end_header_id|>\n\nV<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"},
		{"mistral", "<s>[INST] S\n\nU [/INST] A</s>[INST] V [/INST]"},
		{"zephyr",
		 "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n<|user|>\nV</s>\n<|assistant|>\n"},
		{"gemma", "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_"
			  "of_turn>user\n"
			  "V<end_of_turn>\n<start_of_turn>model\n"},
		{"phi3", "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|"
			 "assistant|>\n"},
		{"vicuna", "<s>S USER: U ASSISTANT: A</s>USER: V ASSISTANT:"},
		{"alpaca",
		 "S\n\n### Instruction:\nU\n\n### Response:\nA</s>\n\n### Instruction:\nV\n\n### Response:\n"},
		{"deepseek-coder",
		 "<s>S### Instruction:\nU\n### Response:\nA\n<|EOT|>\n### Instruction:\nV\n### Response:\n"},
	};
	static const char setup[] =
		"{% set bos_token = '<s>' %}{% set eos_token = '</s>' %}{% set add_generation_prompt = true %}"
		"{% set messages = [{'role': 'system', 'content': 'S'}, {'role': 'user', 'content': 'U'}, "
		"{'role': 'assistant', 'content': 'A'}, {'role': 'user', 'content': [{'type': 'text', "
		"'text': 'V'}]}] %}";
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		char source[8192];
		snprintf(source, sizeof source, "%s%s", setup, template_builtin(rows[i].name));
		assert_renders(source, rows[i].expected);
	}
}

static void test_builtin_templates_refuse_what_they_cannot_say(void **state)
{
	char source[8192];
	(void)state;
	snprintf(source, sizeof source, "{%% set tools = [1] %%}%s", template_builtin("llama2"));
	assert_fails(source, STATUS_INVALID, "this chat template has no format for tools");
	snprintf(source, sizeof source, "{%% set messages = messages + messages %%}%s", template_builtin("mistral"));
	assert_fails(source, STATUS_INVALID,
		     "this chat template needs user and assistant messages in turns, user first");
}

UNIT_MAIN(cmocka_unit_test(test_text_of_the_template_is_trusted), cmocka_unit_test(test_text_of_a_variable_is_data),
	  cmocka_unit_test(test_adjacent_data_is_one_range),
	  cmocka_unit_test(test_concatenation_keeps_marks_byte_by_byte), cmocka_unit_test(test_cutting_keeps_marks),
	  cmocka_unit_test(test_changing_keeps_marks),
	  cmocka_unit_test(test_quoting_marks_what_stands_for_data_as_data),
	  cmocka_unit_test(test_marks_survive_variables_blocks_and_macros),
	  cmocka_unit_test(test_no_chain_of_operations_makes_data_trusted),
	  cmocka_unit_test(test_a_template_that_cannot_compile_names_construct_and_line),
	  cmocka_unit_test(test_a_misused_value_names_the_line),
	  cmocka_unit_test(test_a_refusal_is_the_templates_own_sentence),
	  cmocka_unit_test(test_a_long_message_is_cut_between_characters), cmocka_unit_test(test_found_faults),
	  cmocka_unit_test(test_one_template_renders_in_many_threads),
	  cmocka_unit_test(test_strftime_reads_the_given_clock),
	  cmocka_unit_test(test_bytes_that_are_not_utf8_pass_through),
	  cmocka_unit_test(test_every_builtin_template_renders_a_chat), cmocka_unit_test(test_builtin_formats),
	  cmocka_unit_test(test_builtin_templates_refuse_what_they_cannot_say))
