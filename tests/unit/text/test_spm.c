#include "tests/unit/unit.h"

#include "tests/support/vocab.h"

#define MARK "\xE2\x96\x81" /* U+2581, a space in the vocabulary */

static struct vocab v;
static struct error err;

enum { UNK, BOS, EOS, BYTES, SPACE = BYTES + 256, H, E, L, HE, LL, HELL, SPACE_HELL, SPACE_SPACE, E_ACUTE, USER };

static void begin(void)
{
	vocab_begin(&v, "llama", "default");
	vocab_add_spm_base(&v);
	const struct {
		const char *text;
		float score;
	} rows[] = {{MARK, -20}, {"h", -21},   {"e", -22},        {"l", -23},      {"he", -1},
	            {"ll", -1},  {"hell", -3}, {MARK "hell", -4}, {MARK MARK, -2}, {"\xC3\xA9", -30}};
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
		assert_int_equal(vocab_add(&v, rows[i].text, VOCAB_NORMAL, rows[i].score), SPACE + (int32_t)i);
	assert_int_equal(vocab_add(&v, "<tool" MARK "call>", VOCAB_USER, 0), USER);
}

static void open_it(void)
{
	if (vocab_open(&v, &err))
		fail_msg("%s", err.message);
}

static struct token_buf encode(struct str s, unsigned flags)
{
	struct token_buf ids = {0};
	if (tokenizer_encode(v.tokenizer, s.p, s.n, NULL, 0, flags, &ids, &err))
		fail_msg("%s", err.message);
	return ids;
}

static void check_ids(const char *file, int line, struct str s, unsigned flags, const int32_t *want, size_t n_want)
{
	struct token_buf ids = encode(s, flags);
	bool same = ids.n == n_want && (n_want == 0 || memcmp(ids.ids, want, n_want * sizeof *want) == 0);
	if (!same) {
		struct buf text = BUF_INIT;
		for (size_t i = 0; i < ids.n; i++)
			buf_printf(&text, " %d", ids.ids[i]);
		fail_msg("%s:%d: \"%s\" gives%s", file, line, s.p, buf_str(&text).p);
	}
	token_buf_free(&ids);
}

#define ASSERT_IDS(s, flags, ...)                                                                                      \
	do {                                                                                                           \
		const int32_t want[] = {__VA_ARGS__};                                                                  \
		check_ids(__FILE__, __LINE__, str_from(s), flags, want, sizeof want / sizeof *want);                   \
	} while (0)

static void the_join_of_the_highest_score_comes_first(void **state)
{
	(void)state;
	begin();
	open_it();
	ASSERT_IDS("hell", 0, SPACE_HELL);
	ASSERT_IDS("hel", 0, SPACE, HE, L);
	ASSERT_IDS("lll", 0, SPACE, LL, L);
	ASSERT_IDS("  hell", 0, SPACE_SPACE, SPACE_HELL);
	check_ids(__FILE__, __LINE__, str_from(""), 0, NULL, 0);
	vocab_close(&v);
}

static void a_character_without_a_token_is_written_as_bytes(void **state)
{
	(void)state;
	begin();
	open_it();
	ASSERT_IDS("\xC3\xA9", 0, SPACE, E_ACUTE);
	ASSERT_IDS("\xE4\xBD\xA0", 0, SPACE, BYTES + 0xE4, BYTES + 0xBD, BYTES + 0xA0);
	ASSERT_IDS("\nhell", 0, SPACE, BYTES + '\n', HELL);
	ASSERT_IDS("h\xFF" "e", 0, SPACE, H, BYTES + 0xFF, E);
	struct str nul = {"h\0e", 3};
	check_ids(__FILE__, __LINE__, nul, 0, (const int32_t[]){SPACE, H, BYTES, E}, 4);
	vocab_close(&v);
}

static void the_unknown_token_stands_in_where_there_are_no_bytes(void **state)
{
	(void)state;
	vocab_begin(&v, "llama", NULL);
	vocab_add(&v, "<unk>", VOCAB_UNKNOWN, 0);
	vocab_add(&v, "<s>", VOCAB_CONTROL, 0);
	vocab_add(&v, "a", VOCAB_NORMAL, -1);
	vocab_add(&v, MARK, VOCAB_NORMAL, -2);
	vocab_add(&v, "<0x41>", VOCAB_BYTE, 0);
	open_it();
	ASSERT_IDS("a\xE4\xBD\xA0" "A", 0, 3, 2, 0, 4);
	vocab_close(&v);
}

static void the_space_goes_before_a_text_and_after_special_tokens(void **state)
{
	(void)state;
	begin();
	open_it();
	assert_true(tokenizer_adds_bos(v.tokenizer)); /* unless the file says otherwise */
	ASSERT_IDS("hell", TOKENIZE_ADD_BOS_EOS, BOS, SPACE_HELL);
	ASSERT_IDS("hell</s>hell", TOKENIZE_SPECIAL, SPACE_HELL, EOS, SPACE_HELL);
	ASSERT_IDS("<s>", TOKENIZE_SPECIAL | TOKENIZE_ADD_BOS_EOS, BOS);
	ASSERT_IDS("<tool call>h", 0, USER, SPACE, H);
	vocab_close(&v);

	begin();
	image_add_bool(&v.image, "tokenizer.ggml.add_space_prefix", false);
	open_it();
	ASSERT_IDS("hell", 0, HELL);
	ASSERT_IDS(" hell", 0, SPACE_HELL);
	ASSERT_IDS("\n", 0, BYTES + '\n'); /* bytes before any run */
	vocab_close(&v);
}

static void decoding_undoes_encoding(void **state)
{
	(void)state;
	uint64_t seed = 23;
	const char *parts[] = {"hell",        " ",        "  ",           "\n",   "<s>", "</s>",
	                       "<tool call>", "\xC3\xA9", "\xE4\xBD\xA0", "\xFF", "l"};
	for (int prefix = 0; prefix < 2; prefix++) {
		begin();
		image_add_bool(&v.image, "tokenizer.ggml.add_space_prefix", prefix);
		open_it();
		for (int round = 0; round < 3000; round++) {
			struct buf text = BUF_INIT, back = BUF_INIT;
			for (size_t count = unit_rand(&seed) % 12; count > 0; count--)
				buf_puts(&text, parts[unit_rand(&seed) % (sizeof parts / sizeof *parts)]);
			struct token_buf ids = encode(buf_str(&text), round % 2 ? TOKENIZE_SPECIAL : 0);
			tokenizer_decode(v.tokenizer, ids.ids, ids.n, true, &back);
			assert_true(str_eq(buf_str(&back), buf_str(&text)));
			token_buf_free(&ids);
			buf_free(&text);
			buf_free(&back);
		}
		vocab_close(&v);
	}
}

static void a_piece_is_the_bytes_of_the_text(void **state)
{
	(void)state;
	begin();
	open_it();
	assert_true(str_is(tokenizer_piece(v.tokenizer, SPACE_HELL, false), " hell"));
	assert_true(str_is(tokenizer_piece(v.tokenizer, SPACE_HELL, true), "hell"));
	assert_true(str_is(tokenizer_piece(v.tokenizer, SPACE_SPACE, true), " "));
	assert_true(str_is(tokenizer_piece(v.tokenizer, BYTES + 0x0A, false), "\n"));
	assert_true(str_is(tokenizer_piece(v.tokenizer, BYTES + ' ', true), " "));
	assert_true(str_is(tokenizer_piece(v.tokenizer, EOS, false), "</s>"));
	assert_string_equal(tokenizer_model_name(v.tokenizer), "llama");
	assert_string_equal(tokenizer_pre_name(v.tokenizer), "");
	assert_int_equal(tokenizer_bos(v.tokenizer), BOS);
	assert_int_equal(tokenizer_eos(v.tokenizer), EOS);
	assert_true(tokenizer_is_end(v.tokenizer, EOS)); /* known by its name, as the file gives no id */
	vocab_close(&v);
}

static void a_vocabulary_must_hold_together(void **state)
{
	(void)state;
	begin();
	v.tokens[BYTES].n--;
	assert_int_equal(vocab_open(&v, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "type of a byte"));
	vocab_close(&v);

	begin();
	v.scores[H] = __builtin_nanf("");
	assert_int_equal(vocab_open(&v, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "not a number"));
	vocab_close(&v);

	vocab_begin(&v, "llama", NULL);
	vocab_add(&v, "a", VOCAB_NORMAL, 0);
	assert_int_equal(vocab_open(&v, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "no unknown token"));
	vocab_close(&v);

	vocab_begin(&v, "llama", NULL);
	vocab_add(&v, "<unk>", VOCAB_UNKNOWN, 0);
	assert_int_equal(vocab_open(&v, &err), STATUS_INVALID); /* merges instead of scores */
	assert_non_null(strstr(err.message, "scores is missing"));
	vocab_close(&v);
}

/* ---- The algorithm, as SentencePiece states it: on strings, over the whole text, without tables ---- */

static int32_t find_normal(struct str s)
{
	for (size_t i = 0; i < v.n; i++) {
		if (v.types[i] == VOCAB_NORMAL && str_eq(v.tokens[i], s))
			return (int32_t)i;
	}
	return -1;
}

static struct token_buf encode_by_definition(const char *s, size_t n)
{
	struct str parts[256];
	size_t n_parts = 0;
	struct token_buf out = {0};
	for (size_t i = 0; i < n; i++)
		parts[n_parts++] = (struct str){s + i, 1};
	for (;;) {
		size_t best = SIZE_MAX;
		float best_score = 0;
		for (size_t i = 0; i + 1 < n_parts; i++) {
			int32_t id = find_normal((struct str){parts[i].p, parts[i].n + parts[i + 1].n});
			if (id >= 0 && (best == SIZE_MAX || v.scores[id] > best_score)) {
				best = i;
				best_score = v.scores[id];
			}
		}
		if (best == SIZE_MAX)
			break;
		parts[best].n += parts[best + 1].n;
		memmove(parts + best + 1, parts + best + 2, (n_parts - best - 2) * sizeof *parts);
		n_parts--;
	}
	for (size_t i = 0; i < n_parts; i++) {
		int32_t id = find_normal(parts[i]);
		if (id >= 0) {
			assert_true(token_buf_add(&out, id));
			continue;
		}
		for (size_t k = 0; k < parts[i].n; k++)
			assert_true(token_buf_add(&out, BYTES + (unsigned char)parts[i].p[k]));
	}
	return out;
}

/* Random vocabularies over a few letters (some of them no tokens), with equal scores and tokens no merge leads to. */
static void encoding_equals_its_definition(void **state)
{
	(void)state;
	uint64_t seed = 29;
	for (int round = 0; round < 400; round++) {
		vocab_begin(&v, "llama", NULL);
		image_add_bool(&v.image, "tokenizer.ggml.add_space_prefix", false);
		vocab_add_spm_base(&v);
		for (char c = 'a'; c < 'e'; c++)
			vocab_add(&v, (const char[]){c, 0}, VOCAB_NORMAL, -10);
		for (size_t count = unit_rand(&seed) % 30; count > 0; count--) {
			char text[8] = {0};
			size_t n = 2 + unit_rand(&seed) % 5;
			for (size_t i = 0; i < n; i++)
				text[i] = (char)('a' + unit_rand(&seed) % 4);
			if (find_normal(str_from(text)) < 0)
				vocab_add(&v, text, VOCAB_NORMAL, -(float)(unit_rand(&seed) % 6));
		}
		open_it();
		for (int k = 0; k < 20; k++) {
			char s[120];
			size_t n = unit_rand(&seed) % sizeof s;
			for (size_t i = 0; i < n; i++)
				s[i] = (char)('a' + unit_rand(&seed) % 16 % 5); /* 'e' is no token */
			struct token_buf want = encode_by_definition(s, n), got = encode((struct str){s, n}, 0);
			assert_int_equal(got.n, want.n);
			if (got.n > 0)
				assert_memory_equal(got.ids, want.ids, got.n * sizeof *got.ids);
			token_buf_free(&want);
			token_buf_free(&got);
		}
		vocab_close(&v);
	}
}

UNIT_MAIN(cmocka_unit_test(the_join_of_the_highest_score_comes_first),
          cmocka_unit_test(a_character_without_a_token_is_written_as_bytes),
          cmocka_unit_test(the_unknown_token_stands_in_where_there_are_no_bytes),
          cmocka_unit_test(the_space_goes_before_a_text_and_after_special_tokens),
          cmocka_unit_test(decoding_undoes_encoding), cmocka_unit_test(a_piece_is_the_bytes_of_the_text),
          cmocka_unit_test(a_vocabulary_must_hold_together), cmocka_unit_test(encoding_equals_its_definition))
