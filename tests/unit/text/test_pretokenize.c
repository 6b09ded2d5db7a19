#include "tests/unit/unit.h"

#include "engine/base/buf.h"
#include "engine/text/pretokenize.h"

static void cut(const char *pre, const char *s, size_t n, struct buf *out)
{
	const struct pretokenizer *p = pretokenizer_find(str_from(pre));
	assert_non_null(p);
	struct pretoken_iter it;
	struct str piece;
	pretoken_start(&it, p, s, n);
	for (bool first = true; pretoken_next(&it, &piece); first = false) {
		assert_true(piece.n > 0);
		if (!first)
			buf_putc(out, '|');
		buf_append(out, piece.p, piece.n);
	}
}

/* `want` shows the cuts as bars. */
static void assert_cut(const char *pre, const char *text, const char *want)
{
	struct buf out = BUF_INIT;
	cut(pre, text, strlen(text), &out);
	if (strcmp(buf_str(&out).p, want) != 0)
		fail_msg("%s cuts \"%s\" as \"%s\"", pre, text, buf_str(&out).p);
	buf_free(&out);
}

static void gpt2(void **state)
{
	(void)state;
	assert_cut("gpt-2", "", "");
	assert_cut("gpt-2", "Hello world", "Hello| world");
	assert_cut("gpt-2", "it's we'll I'M", "it|'s| we|'ll| I|'|M");
	assert_cut("gpt-2", "a  b", "a| | b");
	assert_cut("gpt-2", "a   ", "a|   ");
	assert_cut("gpt-2", "a\tb \n c", "a|\t|b| \n| c");
	assert_cut("gpt-2", "x12345 678", "x|12345| 678");
	assert_cut("gpt-2", "wow!!! ...\n\n", "wow|!!!| ...|\n\n");
	assert_cut("gpt-2", "caf\xC3\xA9 \xE2\x82\xAC" "5", "caf\xC3\xA9| \xE2\x82\xAC|5");
	assert_cut("gpt-2", "a\xC2\xA0" "b", "a|\xC2\xA0|b");
	assert_cut("gpt-2", "\xFF\xFE" "a", "\xFF\xFE|a");
	assert_cut("gpt-2", "'", "'");
	assert_cut("gpt-2", "'sand", "'s|and");
	assert_cut("gpt-2", " 's", " '|s");
}

static void llama3(void **state)
{
	(void)state;
	assert_cut("llama-bpe", "Hello world", "Hello| world");
	assert_cut("llama-bpe", "IT'S we'Ve o'\xC5\xBFx", "IT|'S| we|'Ve| o|'\xC5\xBF|x");
	assert_cut("llama-bpe", "1234567 89", "123|456|7| |89");
	assert_cut("llama-bpe", "\tif (x) {\n\n\treturn;\n}", "\tif| (|x|)| {\n\n|\treturn|;\n|}");
	assert_cut("llama-bpe", "a  \n \n  b", "a|  \n \n| | b");
	assert_cut("llama-bpe", "a\nb", "a|\n|b");
	assert_cut("llama-bpe", "\n\nb", "\n\n|b");
	assert_cut("llama-bpe", "a \r\n", "a| \r\n");
	assert_cut("llama-bpe", "  ", "  ");
	assert_cut("llama-bpe", "$price -x", "$price| -|x");
	assert_cut("llama-bpe", "\xC2\xA0word", "\xC2\xA0word");
	assert_cut("llama-bpe", "\xFFword\xFF", "\xFFword|\xFF");
}

static void qwen2(void **state)
{
	(void)state;
	assert_cut("qwen2", "in 2024: 12", "in| |2|0|2|4|:| |1|2");
	assert_cut("qwen2", "x = y\n", "x| =| y|\n");
}

static void smollm(void **state)
{
	(void)state;
	assert_cut("smollm", "in 2024", "in| |2|0|2|4");
	assert_cut("smollm", "a  1 b", "a|  |1| b");
	assert_cut("smollm", "\xC2\xB2x", "\xC2\xB2|x");
	assert_cut("smollm", "it's", "it|'s");
}

static void deepseek_coder(void **state)
{
	(void)state;
	assert_cut("deepseek-coder", "def f(x):\n\treturn 12", "def| f|(|x|):|\n|\treturn| |1|2");
	assert_cut("deepseek-coder", "a == b", "a| ==| b");
	/* The second expression takes the space with the word; the CJK ranges of the fourth cut it off again. */
	assert_cut("deepseek-coder", " \xE4\xB8\xAD\xE6\x96\x87", " |\xE4\xB8\xAD\xE6\x96\x87");
	assert_cut("deepseek-coder", "\n\n", "\n|\n");
}

static void names(void **state)
{
	(void)state;
	assert_null(pretokenizer_find(str_from("no-such-name")));
	assert_null(pretokenizer_find(str_from("qwen")));
	assert_string_equal(pretokenizer_find(str_from(""))->name, "default");
	assert_true(pretokenizer_find(str_from("qwen2"))->nfc);
	assert_true(pretokenizer_find(str_from("llama-bpe"))->whole_first);
	assert_true(pretokenizer_find(str_from("llama-bpe"))->adds_bos);
}

static void pieces_are_the_text_whatever_its_bytes(void **state)
{
	(void)state;
	const char *pre[] = {"gpt-2", "llama-bpe", "qwen2", "smollm", "deepseek-coder"};
	const char *parts[] = {" ",    "  ",       "\n",           "\r\n",     "\t",           "a",
	                       "B",    "'s",       "'LL",          "1",        "23",           "!",
	                       "_",    "\xC3\xA9", "\xE4\xB8\xAD", "\xCC\x81", "\xE2\x80\x83", "\xF0\x9F\x98\x80",
	                       "\xFF", "\xE2\x82", "\xC2\xB2",     "'"};
	uint64_t seed = 5;
	for (int round = 0; round < 20000; round++) {
		char s[256];
		size_t n = 0;
		for (size_t count = unit_rand(&seed) % 20; count > 0; count--) {
			const char *part = parts[unit_rand(&seed) % (sizeof parts / sizeof *parts)];
			memcpy(s + n, part, strlen(part));
			n += strlen(part);
		}
		const struct pretokenizer *p = pretokenizer_find(str_from(pre[round % 5]));
		struct pretoken_iter it;
		struct str piece;
		const char *at = s;
		pretoken_start(&it, p, s, n);
		while (pretoken_next(&it, &piece)) {
			assert_ptr_equal(piece.p, at);
			assert_true(piece.n > 0);
			at += piece.n;
		}
		assert_ptr_equal(at, s + n);
	}
}

UNIT_MAIN(cmocka_unit_test(gpt2), cmocka_unit_test(llama3), cmocka_unit_test(qwen2), cmocka_unit_test(smollm),
          cmocka_unit_test(deepseek_coder), cmocka_unit_test(names),
          cmocka_unit_test(pieces_are_the_text_whatever_its_bytes))
