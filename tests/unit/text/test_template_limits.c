/* The sandbox: whatever a template does, it ends soon, in bounded memory and on a bounded stack, with STATUS_LIMIT. */
#include "engine/text/builtin_templates.h"
#include "tests/unit/text/template_fixture.h"

static void assert_limited(const char *source)
{
	struct outcome o;
	render_limited(source, NULL, &o);
	if (o.status != STATUS_LIMIT)
		print_message("%s: %s\n", source, o.status == STATUS_OK ? "rendered" : o.error.message);
	assert_int_equal(o.status, STATUS_LIMIT);
}

/* `n` times `open`, then `middle`, then `n` times `close`. */
static char *nested(const char *open, size_t n, const char *middle, const char *close)
{
	char *s = malloc(n * (strlen(open) + strlen(close)) + strlen(middle) + 1), *at = s;
	assert_non_null(s);
	for (size_t i = 0; i < n; i++)
		at = stpcpy(at, open);
	at = stpcpy(at, middle);
	for (size_t i = 0; i < n; i++)
		at = stpcpy(at, close);
	return s;
}

static void test_source_nesting_is_bounded(void **state)
{
	static const struct {
		const char *before, *open, *middle, *close, *after;
	} rows[] = {
		{"{{ ", "(", "1", ")", " }}"},
		{"{{ ", "[", "", "]", " }}"},
		{"{{ ", "{1:", "2", "}", " }}"},
		{"{{ ", "-", "1", "", " }}"},
		{"{{ ", "not ", "1", "", " }}"},
		{"{{ ", "1 + ", "1", "", " }}"},
		{"{{ ", "1 if 1 else ", "1", "", " }}"},
		{"{{ x", ".a", "", "", " }}"},
		{"{{ x", "|e", "", "", " }}"},
		{"{{ x", "[0]", "", "", " }}"},
		{"{{ x", "()", "", "", " }}"},
		{"{{ ", "f(", "", ")", " }}"},
		{"", "{% if 1 %}", "x", "{% endif %}", ""},
		{"", "{% for a in b %}", "x", "{% endfor %}", ""},
		{"", "{% set a %}", "x", "{% endset %}", ""},
		{"", "{% macro m() %}", "x", "{% endmacro %}", ""},
		{"", "{% call m() %}", "x", "{% endcall %}", ""},
		{"{% set ", "(", "a", ")", " = 1 %}"},
	};
	(void)state;
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		char *core = nested(rows[i].open, 100000, rows[i].middle, rows[i].close);
		char *source = nested("", 0, rows[i].before, "");
		source = realloc(source, strlen(rows[i].before) + strlen(core) + strlen(rows[i].after) + 1);
		assert_non_null(source);
		strcat(strcat(source, core), rows[i].after);
		assert_limited(source);
		free(core);
		free(source);
	}
}

static void test_recursion_is_bounded(void **state)
{
	(void)state;
	assert_limited("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
	assert_limited("{% macro m(x) %}{% for i in [1] %}{% if true %}{{ m(m(x)) }}{% endif %}{% endfor %}{% endmacro "
		       "%}{{ m(0) }}");
	assert_limited("{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}");
	assert_limited("{% macro m() %}{{ caller }}{% call m() %}{% endcall %}{% endmacro %}{{ m() }}");
	/* A chain of generators is pulled recursively. */
	assert_limited("{% set ns = namespace(g=['a']) %}{% for i in range(5000) %}{% set ns.g = ns.g|map('upper') "
		       "%}{% endfor %}"
		       "{{ ns.g|list }}");
}

static void test_values_that_nest_deeply_or_hold_themselves_are_not_followed_for_ever(void **state)
{
	(void)state;
	assert_limited("{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}");
	assert_limited("{% set ns = namespace() %}{% set ns.me = [ns, ns] %}{{ ns|string }}");
	assert_limited("{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ "
		       "ns.l }}");
	assert_limited("{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ "
		       "ns.l|tojson }}");
	assert_limited("{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ "
		       "ns.l == [ns.l] }}");
	assert_limited("{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ "
		       "ns.l < [ns.l] }}");
	/* Few lists, but exponentially many ways through them. */
	assert_limited("{% set ns = namespace(l=[1]) %}{% for i in range(64) %}{% set ns.l = [ns.l, ns.l] %}{% endfor "
		       "%}{{ ns.l }}");
	assert_limited("{% set ns = namespace(l=[1], k=[1]) %}{% for i in range(64) %}{% set ns.l = [ns.l, ns.l] %}"
		       "{% set ns.k = [ns.k, ns.k] %}{% endfor %}{{ ns.l == ns.k }}");
	assert_limited("{% set ns = namespace(t=(1,)) %}{% for i in range(64) %}{% set ns.t = (ns.t, ns.t) %}{% endfor "
		       "%}{{ {ns.t: 1} }}");
}

static void test_much_from_little_is_bounded(void **state)
{
	(void)state;
	assert_limited("{{ range(1000000000000) }}");
	assert_limited("{{ 'a' * 1000000000000 }}");
	assert_limited("{{ [1] * 1000000000000 }}");
	assert_limited("{{ ('ab' * 100000)|replace('', 'x' * 100000) }}");
	assert_limited("{{ range(100000)|join('x' * 100000) }}");
	assert_limited("{{ 'x'.center(1000000000000) }}{{ 'x'.zfill(1000000000000) }}");
	assert_limited("{{ '%1000000000d' % 1 }}");
	assert_limited("{{ '{:1000000000}'.format(1) }}");
	assert_limited("{{ '%.1000000000f' % 1.5 }}");
	assert_limited("{{ [1]|batch(1000000000000, 1)|list }}");
	assert_limited("{{ [1]|slice(1000000000000)|list }}");
	assert_limited("{{ ('a\\n' * 100000)|indent(100000) }}");
	assert_limited("{{ [[1]]|tojson(indent=1000000000000) }}");
	assert_limited("{{ '\\t'.expandtabs(1000000000000) }}");
	assert_limited(
		"{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}");
	assert_limited("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}");
	assert_limited("{% for a in range(100000) %}{{ 'x' * 100000 }}{% endfor %}");
	assert_limited("{% set l = range(100000)|list %}{% for i in l %}{{ -1 in l }}{% endfor %}");
	assert_limited("{% set u = '\xc3\xa9' * 100000 %}{% for i in range(100000) %}{{ u[i] }}{% endfor %}");
	assert_limited("{{ ('a' * 1000000).rfind('b' + 'a' * 100000) }}");
	assert_limited("{{ 2 ** 64 }}");
	assert_limited("{{ 9223372036854775807 + 1 }}");
	assert_limited("{{ -9223372036854775807 - 2 }}");
	assert_limited("{{ 4611686018427387904 * 2 }}");
	assert_limited("{{ (-9223372036854775807 - 1) // -1 }}");
	assert_limited("{{ '99999999999999999999'|int }}");
	assert_limited("{{ 1e300|int }}");
}

/* With every amount of memory and of steps, a rendering either completes or reports a limit; and enough is enough. */
static void test_limits_can_strike_anywhere(void **state)
{
	static const char source[] =
		"{% macro m(a, b=2) %}{{ a|upper }}{{ caller() if caller }}{% endmacro %}{% set ns = namespace(o=[]) %}"
		"{% for c in 'abc' ~ x %}{% set ns.o = ns.o + [c ~ loop.index] %}{% endfor %}{{ ns.o|sort|join(',') }}"
		"{{ dict|tojson(indent=2) }}{{ m(x) }}{% call m('z') %}{{ {'a': [x, 1.5, none]} }}{% endcall %}"
		"{{ list|map('upper')|select('string')|list }}{{ '%s|{}' % x }}{{ '{:>9}'.format(x) }}{{ "
		"x.split('a')|unique|list }}"
		"{{ (x ~ 'b').replace('a', '--').title()[::-1] }}{{ messages|groupby('role') }}{{ "
		"dict.items()|list|batch(2)|list }}";
	struct outcome full, o;
	(void)state;
	render_limited(source, NULL, &full);
	assert_int_equal(full.status, STATUS_OK);
	bool completed = false;
	for (uint64_t steps = 1; steps < 1000; steps++) {
		render_limited(source, &(struct template_limits){.max_steps = steps}, &o);
		assert_true(o.status == STATUS_OK || o.status == STATUS_LIMIT);
		assert_true(!completed || o.status == STATUS_OK);
		completed = o.status == STATUS_OK;
		if (completed)
			assert_string_equal(o.marked, full.marked);
	}
	assert_true(completed);
	completed = false;
	for (size_t bytes = 16; bytes < 100000 && !completed; bytes += 16) {
		render_limited(source, &(struct template_limits){.max_memory = bytes}, &o);
		if (o.status != STATUS_OK)
			assert_int_equal(o.status, STATUS_LIMIT);
		completed = o.status == STATUS_OK;
	}
	assert_true(completed);
}

static void test_every_beginning_of_a_template_compiles_or_says_why_not(void **state)
{
	(void)state;
	for (size_t i = 0; template_builtin_name(i); i++) {
		const char *source = template_builtin(template_builtin_name(i));
		for (size_t n = 0; n <= strlen(source); n++) {
			struct template *t;
			struct error err = {0};
			enum status st = template_compile(source, n, &t, &err);
			assert_true(st == STATUS_OK ? t != NULL : t == NULL && err.message[0]);
			template_destroy(t);
		}
	}
}

static void test_the_source_itself_is_bounded(void **state)
{
	struct template *t;
	struct error err;
	size_t n = 5 << 20;
	char *source = malloc(n);
	(void)state;
	assert_non_null(source);
	memset(source, 'x', n);
	assert_int_equal(template_compile(source, n, &t, &err), STATUS_LIMIT);
	free(source);
}

UNIT_MAIN(cmocka_unit_test(test_source_nesting_is_bounded), cmocka_unit_test(test_recursion_is_bounded),
	  cmocka_unit_test(test_values_that_nest_deeply_or_hold_themselves_are_not_followed_for_ever),
	  cmocka_unit_test(test_much_from_little_is_bounded), cmocka_unit_test(test_limits_can_strike_anywhere),
	  cmocka_unit_test(test_every_beginning_of_a_template_compiles_or_says_why_not),
	  cmocka_unit_test(test_the_source_itself_is_bounded))
