/* Where documents are cut. Here a token is a run of letters and digits, or any other byte, as it is easy to count. */
#include "tests/unit/unit.h"

#include <ctype.h>
#include <stdio.h>

#include "engine/base/buf.h"
#include "engine/base/utf8.h"
#include "engine/text/split.h"

static int32_t count_words(void *arg, struct str text)
{
	int32_t n = 0;
	int *calls = arg;
	if (calls)
		++*calls;
	for (size_t i = 0; i < text.n; i++)
		n += !isalnum((unsigned char)text.p[i]) || i == 0 || !isalnum((unsigned char)text.p[i - 1]);
	return n;
}

static int32_t count_bytes(void *arg, struct str text)
{
	(void)arg;
	return (int32_t)text.n;
}

enum { CHUNKS_MAX = 4096 };

struct parts {
	struct split_chunk c[CHUNKS_MAX];
	size_t n;
};

static struct split splitter(const char *text, int32_t max, int32_t overlap)
{
	return (struct split){
		.text = str_from(text), .max_tokens = max, .overlap_permille = overlap, .count = count_words};
}

/* Cuts, and checks what holds for every document. */
static void cut(struct split s, struct parts *out)
{
	bool done = false;
	struct error err;
	size_t at = 0;
	out->n = 0;
	while (true) {
		struct split_chunk c;
		if (split_next(&s, &c, &done, &err) != STATUS_OK)
			fail_msg("%s", err.message);
		if (done)
			break;
		assert_true(out->n < CHUNKS_MAX);
		assert_true(c.fresh == at && c.start <= c.fresh && c.end > c.fresh && c.end <= s.text.n);
		assert_true(out->n == 0 ? c.start == 0 : c.start > out->c[out->n - 1].start);
		assert_int_equal(c.n_tokens, s.count(s.arg, (struct str){s.text.p + c.start, c.end - c.start}));
		assert_in_range(c.n_tokens, 1, s.max_tokens);
		if (utf8_valid(s.text.p, s.text.n))
			assert_true(utf8_valid(s.text.p + c.start, c.fresh - c.start) &&
			            utf8_valid(s.text.p + c.fresh, c.end - c.fresh));
		assert_int_equal(c.cut == SPLIT_END, c.end == s.text.n);
		out->c[out->n++] = c;
		at = c.end;
	}
	assert_int_equal(at, s.text.n);
}

static void check_part(const char *text, const struct parts *p, size_t i, const char *fresh, enum split_cut kind)
{
	assert_true(i < p->n);
	struct str got = {text + p->c[i].fresh, p->c[i].end - p->c[i].fresh};
	if (!str_is(got, fresh))
		fail_msg("part %zu is \"%.*s\", not \"%s\"", i, STR_ARG(got), fresh);
	assert_string_equal(split_cut_name(p->c[i].cut), split_cut_name(kind));
}

static struct parts parts;

static void a_short_document_is_one_part(void **state)
{
	(void)state;
	cut(splitter("One sentence. Another one.", 16, 200), &parts);
	assert_int_equal(parts.n, 1);
	check_part("One sentence. Another one.", &parts, 0, "One sentence. Another one.", SPLIT_END);
	cut(splitter("", 16, 200), &parts);
	assert_int_equal(parts.n, 0);
}

static void the_best_boundary_near_the_end_is_taken(void **state)
{
	(void)state;
	/*
	 * Each part holds 20 tokens: a heading goes before a paragraph, that before a line, that before a sentence,
	 * that before a word.
	 */
	const char *headings = "One two three four five.\n\nSix seven eight.\n# Nine\nTen eleven.\n\nTwelve thirteen "
	                       "fourteen fifteen.\n";
	cut(splitter(headings, 20, 0), &parts);
	check_part(headings, &parts, 0, "One two three four five.\n\nSix seven eight.\n", SPLIT_HEADING);
	const char *setext = "One two three four five.\n\nSix seven eight.\nNine\n====\nTen eleven.\n\nTwelve thirteen "
	                     "fourteen fifteen.\n";
	cut(splitter(setext, 20, 0), &parts);
	check_part(setext, &parts, 0, "One two three four five.\n\nSix seven eight.\n", SPLIT_HEADING);
	const char *paragraphs = "One two three four five six.\n \nSeven eight. Nine ten eleven twelve thirteen.";
	cut(splitter(paragraphs, 20, 0), &parts);
	check_part(paragraphs, &parts, 0, "One two three four five six.\n \n", SPLIT_PARAGRAPH);
	const char *lines = "one two three four five six\nseven eight. Nine ten eleven twelve thirteen";
	cut(splitter(lines, 20, 0), &parts);
	check_part(lines, &parts, 0, "one two three four five six\n", SPLIT_LINE);
	const char *sentences = "One two three four five. Six seven eight? Nine ten eleven twelve.";
	cut(splitter(sentences, 20, 0), &parts);
	check_part(sentences, &parts, 0, "One two three four five. Six seven eight? ", SPLIT_SENTENCE);
	const char *words = "one two three four five six seven eight nine ten eleven twelve";
	cut(splitter(words, 20, 0), &parts);
	check_part(words, &parts, 0, "one two three four five six seven eight nine ten ", SPLIT_WORD);
	struct split letters = splitter("abcdefghijklmnopqrstuvwxyz", 16, 0);
	letters.count = count_bytes;
	cut(letters, &parts);
	check_part("abcdefghijklmnopqrstuvwxyz", &parts, 0, "abcdefghijklmnop", SPLIT_TOKEN);
	assert_int_equal(parts.n, 2);
}

static void full_stops_that_end_nothing_are_passed_over(void **state)
{
	(void)state;
	const char *initials = "One two three four. J. R. R. Tolkien wrote it in vain and more.";
	cut(splitter(initials, 16, 0), &parts);
	check_part(initials, &parts, 0, "One two three four. ", SPLIT_SENTENCE);
	const char *small = "He had one two three (cf. four five six) and so on and on.";
	cut(splitter(small, 16, 0), &parts);
	assert_string_equal(split_cut_name(parts.c[0].cut), "word");
	const char *quoted = "She said \"one two three.\" Then she left us here for good.";
	cut(splitter(quoted, 20, 0), &parts);
	check_part(quoted, &parts, 0, "She said \"one two three.\" ", SPLIT_SENTENCE);
	/* Chinese and Japanese have no space behind theirs. */
	const char *wide =
		"\xE4\xB8\x80\xE4\xBA\x8C\xE3\x80\x82\xE4\xB8\x89\xE5\x9B\x9B\xE4\xBA\x94\xE5\x85\xAD\xE4\xB8\x83";
	struct split s = splitter(wide, 16, 0);
	s.count = count_bytes;
	cut(s, &parts);
	check_part(wide, &parts, 0, "\xE4\xB8\x80\xE4\xBA\x8C\xE3\x80\x82", SPLIT_SENTENCE);
}

static void parts_repeat_the_end_of_the_one_before(void **state)
{
	(void)state;
	struct buf text = BUF_INIT;
	for (int i = 0; i < 400; i++)
		buf_printf(&text, "Sentence %d has seven words in it.%c", i, i % 9 == 8 ? '\n' : ' ');
	for (int overlap = 150; overlap <= 200; overlap += 50) {
		struct split s = splitter(text.data, 200, overlap);
		cut(s, &parts);
		assert_true(parts.n > 30);
		for (size_t i = 1; i < parts.n; i++) {
			struct split_chunk c = parts.c[i];
			int32_t repeated = count_words(NULL, (struct str){text.data + c.start, c.fresh - c.start});
			assert_in_range(repeated, 200 * overlap / 1000 / 2, 200 * overlap / 1000);
			/* Whole sentences. */
			assert_memory_equal(text.data + c.start, "Sentence ", 9);
			assert_true(c.start >= parts.c[i - 1].start);
		}
	}
	buf_free(&text);
}

static void without_overlap_nothing_is_repeated(void **state)
{
	(void)state;
	struct buf text = BUF_INIT;
	for (int i = 0; i < 100; i++)
		buf_printf(&text, "word%d ", i);
	cut(splitter(text.data, 32, 0), &parts);
	for (size_t i = 0; i < parts.n; i++)
		assert_int_equal(parts.c[i].start, parts.c[i].fresh);
	buf_free(&text);
}

static void code_points_stay_whole(void **state)
{
	(void)state;
	struct buf text = BUF_INIT;
	for (int i = 0; i < 100; i++)
		buf_puts(&text, i % 3 ? "\xF0\x9F\x98\x80" : i % 2 ? "\xC3\xA9" : "\xE2\x82\xAC");
	for (int32_t max = 16; max < 40; max++) {
		struct split s = splitter(text.data, max, 300);
		s.count = count_bytes;
		cut(s, &parts); /* checks it */
		assert_true(parts.n > 5);
	}
	buf_free(&text);
}

static void bytes_that_are_no_text_are_cut_as_well(void **state)
{
	(void)state;
	static char bytes[300];
	memset(bytes, 0x80, sizeof bytes);
	for (size_t i = 0; i < sizeof bytes; i += 7)
		bytes[i] = (char)(0xF0 + i % 16);
	bytes[100] = '\0';
	struct split s = {
		.text = {bytes, sizeof bytes}, .max_tokens = 16, .overlap_permille = 200, .count = count_bytes};
	cut(s, &parts);
	assert_true(parts.n >= 300 / 16);
}

static void names_of_control_tokens_stay_whole(void **state)
{
	(void)state;
	static const struct str atoms[] = {{"<|im_start|>", 12}, {"<|im_end|>", 10}, {"|><|", 4}};
	struct buf text = BUF_INIT;
	for (int i = 0; i < 60; i++)
		buf_printf(&text, "%.*s%s", i % 7, "abcdefg", i % 2 ? "<|im_end|>" : "<|im_start|>");
	for (int32_t max = 32; max < 48; max++) {
		struct split s = splitter(text.data, max, 200);
		s.count = count_bytes;
		s.atoms = atoms;
		s.n_atoms = 3;
		cut(s, &parts);
		for (size_t i = 0; i < parts.n; i++) {
			const size_t at[] = {parts.c[i].start, parts.c[i].end};
			for (size_t k = 0; k < 2; k++)
				for (size_t a = 0; a < 3; a++)
					for (size_t back = 1; back < atoms[a].n && back <= at[k]; back++)
						assert_false(at[k] - back + atoms[a].n <= text.len &&
						             memcmp(text.data + at[k] - back, atoms[a].p, atoms[a].n) ==
						                     0);
		}
	}
	buf_free(&text);
	/* One that is longer than a part cannot. */
	const struct str longer = {"----------------------------------------", 40};
	struct split s = splitter("----------------------------------------", 16, 0);
	s.count = count_bytes;
	s.atoms = &longer;
	s.n_atoms = 1;
	cut(s, &parts);
	assert_int_equal(parts.n, 3);
}

/* More text may have fewer tokens; what is counted at the end is what holds. */
static int32_t count_oddly(void *arg, struct str text)
{
	(void)arg;
	return (int32_t)(text.n / 2 + (text.n % 7 == 3 ? 9 : 0) + 1);
}

static void the_limit_holds_whatever_the_tokenizer_does(void **state)
{
	(void)state;
	struct buf text = BUF_INIT;
	uint64_t seed = 3;
	for (int i = 0; i < 3000; i++)
		buf_putc(&text, "abc de. F\n"[unit_rand(&seed) % 10]);
	for (int32_t max = 16; max < 60; max += 5) {
		struct split s = splitter(text.data, max, max * 7 % 500);
		s.count = count_oddly;
		cut(s, &parts);
	}
	buf_free(&text);
}

/* Counting is what costs: each byte of the document a few times. */
static void a_part_is_counted_a_few_times(void **state)
{
	(void)state;
	struct buf text = BUF_INIT;
	int calls = 0;
	for (int i = 0; i < 20000; i++)
		buf_printf(&text, "word%d%s", i, i % 12 ? " " : ".\n");
	struct split s = splitter(text.data, 512, 150);
	s.arg = &calls;
	bool done = false;
	struct error err;
	struct split_chunk c;
	int n = 0;
	for (; !done; n++)
		assert_int_equal(split_next(&s, &c, &done, &err), STATUS_OK);
	assert_true(n > 80);
	assert_true(calls < 10 * n);
	buf_free(&text);
}

static int32_t count_many(void *arg, struct str text)
{
	(void)arg;
	return (int32_t)text.n * 20;
}

static int32_t count_nothing(void *arg, struct str text)
{
	(void)arg;
	(void)text;
	return -1;
}

static void refuses(struct split s, enum status status, const char *param)
{
	struct split_chunk c;
	struct error err = {0};
	bool done;
	assert_int_equal(split_next(&s, &c, &done, &err), status);
	assert_string_equal(err.param, param);
}

static void what_cannot_be_is_named(void **state)
{
	(void)state;
	struct split s = splitter("some text", SPLIT_MIN_TOKENS - 1, 0);
	refuses(s, STATUS_INVALID, "max_chunk_tokens");
	s = splitter("some text", 16, 501);
	refuses(s, STATUS_INVALID, "overlap");
	s = splitter("some text", 16, -1);
	refuses(s, STATUS_INVALID, "overlap");
	s = splitter("some text", 16, 0);
	s.count = count_many;
	refuses(s, STATUS_INVALID, "max_chunk_tokens");
	s.count = count_nothing;
	refuses(s, STATUS_NOMEM, "");
}

UNIT_MAIN(cmocka_unit_test(a_short_document_is_one_part), cmocka_unit_test(the_best_boundary_near_the_end_is_taken),
          cmocka_unit_test(full_stops_that_end_nothing_are_passed_over),
          cmocka_unit_test(parts_repeat_the_end_of_the_one_before),
          cmocka_unit_test(without_overlap_nothing_is_repeated), cmocka_unit_test(code_points_stay_whole),
          cmocka_unit_test(bytes_that_are_no_text_are_cut_as_well),
          cmocka_unit_test(names_of_control_tokens_stay_whole),
          cmocka_unit_test(the_limit_holds_whatever_the_tokenizer_does),
          cmocka_unit_test(a_part_is_counted_a_few_times), cmocka_unit_test(what_cannot_be_is_named))
