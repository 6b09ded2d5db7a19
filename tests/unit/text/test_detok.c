#include "tests/unit/unit.h"

#include "engine/base/utf8.h"
#include "engine/text/detok.h"
#include "tests/support/vocab.h"

static struct vocab v;

enum { AB = 256, ABA, STOP, E_SPLIT, END };

static int setup(void **state)
{
	(void)state;
	struct error err;
	vocab_begin(&v, "gpt2", "gpt-2");
	vocab_add_bytes(&v);
	vocab_merge(&v, "a", "b");
	vocab_merge(&v, "ab", "a");
	vocab_add(&v, "STOP", VOCAB_NORMAL, 0);
	vocab_add_n(&v, vocab_escape("x\xC3", 2), VOCAB_NORMAL, 0);
	vocab_add(&v, "<|im_end|>", VOCAB_CONTROL, 0);
	return vocab_open(&v, &err) == STATUS_OK ? 0 : -1;
}

static int teardown(void **state)
{
	(void)state;
	vocab_close(&v);
	return 0;
}

static struct detok *create(const char *const *stops, size_t n, bool keep_special)
{
	struct str s[8] = {0};
	struct detok *d = NULL;
	for (size_t i = 0; i < n; i++)
		s[i] = str_from(stops[i]);
	assert_int_equal(detok_create(v.tokenizer, s, n, keep_special, &d), STATUS_OK);
	return d;
}

/* Pushes one token; the text it releases must be `want`. */
static void push(struct detok *d, int32_t token, const char *want, int want_stop)
{
	struct buf out = BUF_INIT;
	assert_int_equal(detok_push(d, token, &out), want_stop);
	assert_string_equal(buf_str(&out).p, want);
	buf_free(&out);
}

static void finish(struct detok *d, const char *want)
{
	struct buf out = BUF_INIT;
	detok_finish(d, &out);
	assert_string_equal(buf_str(&out).p, want);
	buf_free(&out);
	detok_destroy(d);
}

static void text_without_stops_is_released_at_once(void **state)
{
	(void)state;
	struct detok *d = create(NULL, 0, false);
	push(d, 'a', "a", -1);
	push(d, ABA, "aba", -1);
	push(d, END, "", -1);
	push(d, -1, "", -1);
	push(d, 1000000, "", -1);
	finish(d, "");
	d = create(NULL, 0, true);
	push(d, END, "<|im_end|>", -1);
	finish(d, "");
	detok_destroy(NULL);
}

static void a_code_point_is_released_whole(void **state)
{
	(void)state;
	struct detok *d = create(NULL, 0, false);
	push(d, E_SPLIT, "x", -1);
	push(d, 0xA9, "\xC3\xA9", -1);
	push(d, 0xF0, "", -1);
	push(d, 0x9F, "", -1);
	push(d, 0x98, "", -1);
	push(d, 0x80, "\xF0\x9F\x98\x80", -1);
	push(d, 0xE2, "", -1);
	push(d, 0x82, "", -1);
	finish(d, "\xEF\xBF\xBD");
}

static void bytes_that_are_not_utf8_are_replaced(void **state)
{
	(void)state;
	struct detok *d = create(NULL, 0, false);
	push(d, 0xFF, "\xEF\xBF\xBD", -1);
	push(d, 0x80, "\xEF\xBF\xBD", -1);
	push(d, 0xE2, "", -1);
	push(d, 0x82, "", -1);
	push(d, 'a', "\xEF\xBF\xBD" "a", -1); /* one for the part that began */
	push(d, 0xC3, "", -1);
	push(d, 0xC3, "\xEF\xBF\xBD", -1); /* and the second may begin another */
	push(d, 0xA9, "\xC3\xA9", -1);
	push(d, 0xC3, "", -1);
	push(d, 0xFF, "\xEF\xBF\xBD\xEF\xBF\xBD", -1);
	push(d, 0xED, "", -1);
	push(d, 0xA0, "\xEF\xBF\xBD\xEF\xBF\xBD", -1); /* a surrogate */
	finish(d, "");
}

static void a_stop_string_is_never_seen_and_nothing_is_lost(void **state)
{
	(void)state;
	const char *stops[] = {"STOP"};
	struct detok *d = create(stops, 1, false);
	push(d, 'x', "x", -1);
	push(d, 'S', "", -1);
	push(d, 'T', "", -1);
	push(d, 'x', "STx", -1);
	push(d, 'S', "", -1);
	push(d, 'S', "S", -1);
	push(d, 'T', "", -1);
	push(d, 'O', "", -1);
	push(d, 'P', "", 0);
	push(d, 'x', "", -1);
	finish(d, "");

	d = create(stops, 1, false);
	push(d, 'S', "", -1);
	push(d, 'T', "", -1);
	finish(d, "ST"); /* one that did not come */

	d = create(stops, 1, false);
	push(d, STOP, "", 0);
	finish(d, "");
}

static void the_stop_that_is_complete_first_counts_then_the_longest(void **state)
{
	(void)state;
	const char *stops[] = {"abcd", "bc", "c", "", "\xFF", "abc", "c"};
	struct detok *d = create(stops, 7, false);
	push(d, AB, "", -1);
	push(d, 'c', "", 5); /* "abc", though "bc" and "c" end here as well */
	finish(d, "");
	d = create(stops, 7, false);
	push(d, 'b', "", -1);
	push(d, 'c', "", 1);
	finish(d, "");
	d = create(stops, 7, false);
	push(d, 'x', "x", -1);
	push(d, 'c', "", 2); /* of two equal ones the first */
	finish(d, "");
}

static void a_stop_may_lie_over_code_points_and_tokens(void **state)
{
	(void)state;
	const char *stops[] = {"\xC3\xA9\xF0\x9F\x98\x80"};
	struct detok *d = create(stops, 1, false);
	push(d, E_SPLIT, "x", -1);
	push(d, 0xA9, "", -1);
	push(d, 0xF0, "", -1);
	push(d, 0x9F, "", -1);
	push(d, 0x98, "", -1);
	push(d, 0x81, "\xC3\xA9\xF0\x9F\x98\x81", -1);
	push(d, 0xC3, "", -1);
	push(d, 0xA9, "", -1);
	push(d, 0xF0, "", -1);
	push(d, 0x9F, "", -1);
	push(d, 0x98, "", -1);
	push(d, 0x80, "", 0);
	finish(d, "");
}

static void a_hidden_token_is_no_part_of_a_stop(void **state)
{
	(void)state;
	const char *stops[] = {"ab", "im_end"};
	struct detok *d = create(stops, 2, false);
	push(d, 'a', "", -1);
	push(d, END, "", -1);
	push(d, 'b', "", 0);
	finish(d, "");
	d = create(stops, 2, true);
	push(d, END, "<|", 1);
	finish(d, "");
}

static void sentencepiece_keeps_the_space_that_continues_a_prompt(void **state)
{
	(void)state;
	static struct vocab spm;
	struct error err;
	vocab_begin(&spm, "llama", NULL);
	vocab_add_spm_base(&spm);
	int32_t word = vocab_add(&spm, "\xE2\x96\x81Paris", VOCAB_NORMAL, -1);
	assert_int_equal(vocab_open(&spm, &err), STATUS_OK);
	for (int drop = 0; drop < 2; drop++) {
		struct detok *d;
		assert_int_equal(detok_create(spm.tokenizer, NULL, 0, false, &d), STATUS_OK);
		if (drop)
			detok_drop_first_space(d);
		push(d, 1, "", -1); /* <s> */
		push(d, word, drop ? "Paris" : " Paris", -1);
		push(d, word, " Paris", -1);
		finish(d, "");
	}
	vocab_close(&spm);
}

/* ---- Random tokens and stops against the definition over the whole text ---- */

/*
 * Appends s as UTF-8 with replacements, as Python's bytes.decode("utf-8", "replace") does; `whole` counts the rest as
 * well.
 */
static void replace_invalid(const char *s, size_t n, bool whole, struct buf *out)
{
	for (size_t i = 0; i < n;) {
		uint32_t cp;
		size_t len = utf8_decode(s + i, n - i, &cp);
		if (len > 0) {
			buf_append(out, s + i, len);
			i += len;
			continue;
		}
		size_t part = 1;
		for (size_t k = 3; k > 1; k--) {
			if (i + k <= n && utf8_incomplete_tail(s + i, k) == k) {
				part = k;
				break;
			}
		}
		if (!whole && i + part == n && utf8_incomplete_tail(s + i, part) == part)
			return;
		buf_puts(out, "\xEF\xBF\xBD");
		i += part;
	}
}

/* The end of the first complete stop, its index and length; -1 when there is none. */
static int find_stop(struct str text, const struct str *stops, size_t n, size_t *end)
{
	for (*end = 0; *end <= text.n; ++*end) {
		int best = -1;
		for (size_t i = 0; i < n; i++) {
			if (stops[i].n > 0 && stops[i].n <= *end &&
			    memcmp(text.p + *end - stops[i].n, stops[i].p, stops[i].n) == 0 &&
			    (best < 0 || stops[i].n > stops[best].n))
				best = (int)i;
		}
		if (best >= 0)
			return best;
	}
	return -1;
}

/* How many bytes at the end of the text begin a stop. */
static size_t begun(struct str text, const struct str *stops, size_t n)
{
	size_t most = 0;
	for (size_t i = 0; i < n; i++) {
		for (size_t k = 1; k < stops[i].n && k <= text.n; k++) {
			if (k > most && memcmp(text.p + text.n - k, stops[i].p, k) == 0)
				most = k;
		}
	}
	return most;
}

static void one_random_answer(uint64_t *seed)
{
	static const char *const pieces[] = {"a", "b", "ab", "ba", "aa", "\xC3\xA9", "\xF0\x9F\x98\x80", "\xEF\xBF\xBD",
	                                     "x"};
	static const int32_t tokens[] = {'a',  'a',  'b',  'b',  AB,   ABA, E_SPLIT, 0xC3, 0xA9,
	                                 0xF0, 0x9F, 0x98, 0x80, 0xFF, END, STOP,    'x'};
	char texts[5][64];
	struct str stops[5];
	size_t n_stops = unit_rand(seed) % 5;
	for (size_t i = 0; i < n_stops; i++) {
		stops[i] = (struct str){texts[i], 0};
		for (size_t k = unit_rand(seed) % 5; k > 0; k--) {
			const char *p = pieces[unit_rand(seed) % (sizeof pieces / sizeof *pieces)];
			memcpy(texts[i] + stops[i].n, p, strlen(p));
			stops[i].n += strlen(p);
		}
	}
	bool keep = unit_rand(seed) % 2;
	struct detok *d;
	struct buf bytes = BUF_INIT, released = BUF_INIT;
	int stop = -1;
	assert_int_equal(detok_create(v.tokenizer, stops, n_stops, keep, &d), STATUS_OK);
	for (size_t count = unit_rand(seed) % 30; count > 0 && stop < 0; count--) {
		int32_t token = tokens[unit_rand(seed) % (sizeof tokens / sizeof *tokens)];
		struct buf text = BUF_INIT;
		tokenizer_decode(v.tokenizer, &token, 1, keep, &bytes);
		replace_invalid(buf_str(&bytes).p, bytes.len, false, &text);
		stop = detok_push(d, token, &released);
		size_t end;
		int want = find_stop(buf_str(&text), stops, n_stops, &end);
		assert_int_equal(stop, want);
		size_t n = want >= 0 ? end - stops[want].n : text.len - begun(buf_str(&text), stops, n_stops);
		assert_int_equal(released.len, n);
		assert_memory_equal(buf_str(&released).p, buf_str(&text).p, n);
		assert_true(utf8_valid(buf_str(&released).p, released.len));
		buf_free(&text);
	}
	if (stop < 0) {
		struct buf text = BUF_INIT;
		replace_invalid(buf_str(&bytes).p, bytes.len, true, &text);
		size_t end, n = text.len;
		int want = find_stop(buf_str(&text), stops, n_stops, &end);
		if (want >= 0) /* only the replacement of the last part can complete one */
			n = end - stops[want].n;
		detok_finish(d, &released);
		assert_int_equal(released.len, n);
		assert_memory_equal(buf_str(&released).p, buf_str(&text).p, n);
		buf_free(&text);
	}
	detok_destroy(d);
	buf_free(&bytes);
	buf_free(&released);
}

static void random_answers_equal_the_definition(void **state)
{
	(void)state;
	uint64_t seed = 31;
	for (int round = 0; round < 30000; round++)
		one_random_answer(&seed);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(text_without_stops_is_released_at_once),
		cmocka_unit_test(a_code_point_is_released_whole),
		cmocka_unit_test(bytes_that_are_not_utf8_are_replaced),
		cmocka_unit_test(a_stop_string_is_never_seen_and_nothing_is_lost),
		cmocka_unit_test(the_stop_that_is_complete_first_counts_then_the_longest),
		cmocka_unit_test(a_stop_may_lie_over_code_points_and_tokens),
		cmocka_unit_test(a_hidden_token_is_no_part_of_a_stop),
		cmocka_unit_test(sentencepiece_keeps_the_space_that_continues_a_prompt),
		cmocka_unit_test(random_answers_equal_the_definition),
	};
	return cmocka_run_group_tests(tests, setup, teardown);
}
