#include "tests/unit/unit.h"

#include <time.h>

#include "tests/support/adversarial.h"
#include "tests/support/vocab.h"

static struct vocab v;
static struct error err;

enum { HE = 256, LL, HELL, HELLO, SPACE_H, AA, AAAA, IM_START, IM, END, TOOL, TOOL_LONG };

static void begin(const char *pre)
{
	vocab_begin(&v, "gpt2", pre);
	vocab_add_bytes(&v);
	assert_int_equal(vocab_merge(&v, "h", "e"), HE);
	assert_int_equal(vocab_merge(&v, "l", "l"), LL);
	assert_int_equal(vocab_merge(&v, "he", "ll"), HELL);
	assert_int_equal(vocab_merge(&v, "hell", "o"), HELLO);
	assert_int_equal(vocab_merge(&v, " ", "h"), SPACE_H);
	assert_int_equal(vocab_merge(&v, "a", "a"), AA);
	assert_int_equal(vocab_merge(&v, "aa", "aa"), AAAA);
	assert_int_equal(vocab_add(&v, "<|im_start|>", VOCAB_CONTROL, 0), IM_START);
	assert_int_equal(vocab_add(&v, "<|im", VOCAB_CONTROL, 0), IM);
	assert_int_equal(vocab_add(&v, "<|im_end|>", VOCAB_CONTROL, 0), END);
	assert_int_equal(vocab_add(&v, "<tool>", VOCAB_USER, 0), TOOL);
	assert_int_equal(vocab_add(&v, "<tool>\n", VOCAB_USER, 0), TOOL_LONG);
}

static void open_it(void)
{
	if (vocab_open(&v, &err))
		fail_msg("%s", err.message);
}

static struct token_buf encode(const char *s, size_t n, const struct text_span *data, size_t n_data, unsigned flags)
{
	struct token_buf ids = {0};
	if (tokenizer_encode(v.tokenizer, s, n, data, n_data, flags, &ids, &err))
		fail_msg("%s", err.message);
	return ids;
}

static void check_ids(const char *file, int line, const char *s, size_t n, const struct text_span *data, size_t n_data,
                      unsigned flags, const int32_t *want, size_t n_want)
{
	struct token_buf ids = encode(s, n, data, n_data, flags);
	bool same = ids.n == n_want && (n_want == 0 || memcmp(ids.ids, want, n_want * sizeof *want) == 0);
	if (!same) {
		struct buf text = BUF_INIT;
		for (size_t i = 0; i < ids.n; i++)
			buf_printf(&text, " %d", ids.ids[i]);
		fail_msg("%s:%d: \"%s\" gives%s", file, line, s, buf_str(&text).p);
	}
	token_buf_free(&ids);
}

#define ASSERT_SPANS(s, data, n_data, flags, ...)                                                                      \
	do {                                                                                                           \
		const int32_t want[] = {__VA_ARGS__};                                                                  \
		check_ids(__FILE__, __LINE__, s, strlen(s), data, n_data, flags, want, sizeof want / sizeof *want);    \
	} while (0)
#define ASSERT_IDS(s, flags, ...) ASSERT_SPANS(s, NULL, 0, flags, __VA_ARGS__)

static void merges_apply_by_rank(void **state)
{
	(void)state;
	begin("gpt-2");
	open_it();
	ASSERT_IDS("hello", 0, HELLO);
	ASSERT_IDS("hell hel", 0, HELL, ' ', HE, 'l'); /* "h e" ranks before " h" */
	ASSERT_IDS(" h", 0, SPACE_H);
	ASSERT_IDS("aaaaaaa", 0, AAAA, AA, 'a');
	check_ids(__FILE__, __LINE__, "", 0, NULL, 0, 0, NULL, 0);
	vocab_close(&v);
}

static void a_whole_token_goes_before_merges_in_llama3(void **state)
{
	(void)state;
	for (int llama3 = 0; llama3 < 2; llama3++) {
		begin(llama3 ? "llama-bpe" : "gpt-2");
		int32_t whole = vocab_add(&v, "ole", VOCAB_NORMAL, 0); /* no merge leads to it */
		open_it();
		if (llama3)
			ASSERT_IDS("ole", 0, whole);
		else
			ASSERT_IDS("ole", 0, 'o', 'l', 'e');
		vocab_close(&v);
	}
}

static void qwen2_normalises_first(void **state)
{
	(void)state;
	begin("qwen2");
	open_it();
	ASSERT_IDS("e\xCC\x81", 0, 0xC3, 0xA9);
	vocab_close(&v);
	begin("llama-bpe");
	open_it();
	ASSERT_IDS("e\xCC\x81", 0, 'e', 0xCC, 0x81);
	vocab_close(&v);
}

static void control_tokens_need_leave(void **state)
{
	(void)state;
	begin("gpt-2");
	open_it();
	ASSERT_IDS("<|im_end|>", 0, '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>');
	ASSERT_IDS("<|im_end|>", TOKENIZE_SPECIAL, END);
	ASSERT_IDS("a<|im_end|><|im_end|>a", TOKENIZE_SPECIAL, 'a', END, END, 'a');
	/* The longest at its place, and what is left of one that does not end. */
	ASSERT_IDS("<|im_start|>", TOKENIZE_SPECIAL, IM_START);
	ASSERT_IDS("<|im_star", TOKENIZE_SPECIAL, IM, '_', 's', 't', 'a', 'r');
	ASSERT_IDS("<|i", TOKENIZE_SPECIAL, '<', '|', 'i');
	vocab_close(&v);
}

static void user_defined_tokens_are_found_everywhere(void **state)
{
	(void)state;
	const struct text_span all = {0, 7};
	begin("gpt-2");
	open_it();
	ASSERT_IDS("<tool>x", 0, TOOL, 'x');
	ASSERT_IDS("<tool>\n", 0, TOOL_LONG);
	ASSERT_SPANS("<tool>x", &all, 1, TOKENIZE_SPECIAL, TOOL, 'x');
	vocab_close(&v);
}

static void data_never_becomes_a_control_token(void **state)
{
	(void)state;
	begin("gpt-2");
	open_it();
	/* "<|im_end|>" whole, its first byte, its last byte, and one in the middle. */
	const struct text_span spans[] = {{0, 10}, {0, 1}, {9, 10}, {5, 6}};
	for (size_t i = 0; i < 2; i++)
		ASSERT_SPANS("<|im_end|>", &spans[i], 1, TOKENIZE_SPECIAL, '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|',
		             '>');
	/* Where the data begins later, a shorter control token before it stays. */
	for (size_t i = 2; i < 4; i++)
		ASSERT_SPANS("<|im_end|>", &spans[i], 1, TOKENIZE_SPECIAL, IM, '_', 'e', 'n', 'd', '|', '>');
	/* Data that only touches it does not matter; neither does an empty range. */
	const struct text_span around[] = {{0, 1}, {3, 3}, {11, 12}};
	ASSERT_SPANS("a<|im_end|>a", around, 3, TOKENIZE_SPECIAL, 'a', END, 'a');
	/* Trusted and data in turn: only the trusted ones count. */
	const struct text_span second[] = {{10, 20}};
	ASSERT_SPANS("<|im_end|><|im_end|><|im_end|>", second, 1, TOKENIZE_SPECIAL, END, '<', '|', 'i', 'm', '_', 'e',
	             'n', 'd', '|', '>', END);
	vocab_close(&v);
}

static void bos_and_eos_go_around_where_the_file_asks(void **state)
{
	(void)state;
	begin("gpt-2");
	image_add_u32(&v.image, "tokenizer.ggml.bos_token_id", IM_START);
	image_add_u32(&v.image, "tokenizer.ggml.eos_token_id", END);
	image_add_bool(&v.image, "tokenizer.ggml.add_bos_token", true);
	image_add_bool(&v.image, "tokenizer.ggml.add_eos_token", true);
	open_it();
	assert_true(tokenizer_adds_bos(v.tokenizer));
	ASSERT_IDS("x", 0, 'x');
	ASSERT_IDS("x", TOKENIZE_ADD_BOS_EOS, IM_START, 'x', END);
	ASSERT_IDS("", TOKENIZE_ADD_BOS_EOS, IM_START, END);
	/* One that the text brings is not doubled. */
	ASSERT_IDS("<|im_start|>x", TOKENIZE_ADD_BOS_EOS | TOKENIZE_SPECIAL, IM_START, 'x', END);
	ASSERT_IDS("<|im_end|>x", TOKENIZE_ADD_BOS_EOS | TOKENIZE_SPECIAL, IM_START, END, 'x', END);
	vocab_close(&v);

	/* GPT-2 has none unless asked, Llama 3 has. */
	for (int llama3 = 0; llama3 < 2; llama3++) {
		begin(llama3 ? "llama-bpe" : NULL);
		image_add_u32(&v.image, "tokenizer.ggml.bos_token_id", IM_START);
		open_it();
		assert_int_equal(tokenizer_adds_bos(v.tokenizer), llama3);
		vocab_close(&v);
	}
}

static void end_tokens_are_known_by_id_and_by_name(void **state)
{
	(void)state;
	begin("gpt-2");
	int32_t deepseek = vocab_add(&v, "<\uFF5Cend\u2581of\u2581sentence\uFF5C>", VOCAB_CONTROL, 0);
	int32_t wrong_type = vocab_add(&v, "<|eot_id|>", VOCAB_NORMAL, 0);
	int32_t looks = vocab_add(&v, "<|assistant|>", VOCAB_USER, 0);
	int32_t wide = vocab_add(&v, "<\uFF5CUser\uFF5C>", VOCAB_USER, 0);
	int32_t turn = vocab_add(&v, "[INST]", VOCAB_USER, 0);
	image_add_u32(&v.image, "tokenizer.ggml.eos_token_id", 'E');
	image_add_u32(&v.image, "tokenizer.ggml.eot_token_id", 'T');
	image_add_u32(&v.image, "tokenizer.ggml.eom_token_id", 'M');
	image_add_u32(&v.image, "tokenizer.ggml.bos_token_id", 'B');
	open_it();
	const int32_t ends[] = {'E', 'T', 'M', END, deepseek, wrong_type};
	for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
		assert_true(tokenizer_is_end(v.tokenizer, ends[i]));
	const int32_t others[] = {'B', 'x', IM_START, TOOL, looks, wide, turn, -1, 100000};
	for (size_t i = 0; i < sizeof others / sizeof *others; i++)
		assert_false(tokenizer_is_end(v.tokenizer, others[i]));
	assert_true(tokenizer_is_special(v.tokenizer, wrong_type));
	assert_true(tokenizer_is_special(v.tokenizer, looks));
	assert_true(tokenizer_is_special(v.tokenizer, wide));
	assert_true(tokenizer_is_special(v.tokenizer, turn));
	assert_false(tokenizer_is_special(v.tokenizer, TOOL));
	assert_false(tokenizer_is_special(v.tokenizer, -1));
	assert_int_equal(tokenizer_eos(v.tokenizer), 'E');
	assert_int_equal(tokenizer_bos(v.tokenizer), 'B');
	ASSERT_IDS("<|eot_id|>", TOKENIZE_SPECIAL, wrong_type);
	vocab_close(&v);
}

static void types_are_guessed_where_the_file_has_none(void **state)
{
	(void)state;
	begin("gpt-2");
	v.no_types = true;
	open_it();
	assert_true(tokenizer_is_special(v.tokenizer, IM_START));
	assert_true(tokenizer_is_end(v.tokenizer, END));
	assert_false(tokenizer_is_special(v.tokenizer, HELLO));
	ASSERT_IDS("hello<|im_end|>", TOKENIZE_SPECIAL, HELLO, END);
	vocab_close(&v);
}

static void a_piece_is_the_bytes_of_the_text(void **state)
{
	(void)state;
	begin("gpt-2");
	open_it();
	assert_true(str_is(tokenizer_piece(v.tokenizer, SPACE_H, true), " h"));
	assert_true(str_is(tokenizer_piece(v.tokenizer, END, false), "<|im_end|>"));
	assert_true(str_eq(tokenizer_piece(v.tokenizer, 0, false), (struct str){"", 1}));
	assert_true(str_is(tokenizer_piece(v.tokenizer, 0xFF, false), "\xFF"));
	assert_int_equal(tokenizer_piece(v.tokenizer, -1, false).n, 0);
	assert_int_equal(tokenizer_piece(v.tokenizer, tokenizer_n_vocab(v.tokenizer), false).n, 0);
	const int32_t ids[] = {HELLO, END, -5, 999999, TOOL};
	struct buf out = BUF_INIT;
	tokenizer_decode(v.tokenizer, ids, 5, false, &out);
	assert_string_equal(out.data, "hello<tool>");
	buf_clear(&out);
	tokenizer_decode(v.tokenizer, ids, 5, true, &out);
	assert_string_equal(out.data, "hello<|im_end|><tool>");
	buf_free(&out);
	vocab_close(&v);
}

static void any_bytes_come_back(void **state)
{
	(void)state;
	const char *pre[] = {"gpt-2", "llama-bpe", "smollm", "deepseek-coder", "deepseek-r1-qwen"};
	const char *parts[] = {"hello",    " hell", "aaaa",     "<|im_end|>", "<tool>",  "\n",
	                       "\xC3\xA9", "\xFF",  "\xE2\x82", "7",          "\xCC\x81"};
	uint64_t seed = 17;
	for (size_t p = 0; p < sizeof pre / sizeof *pre; p++) {
		begin(pre[p]);
		open_it();
		for (int round = 0; round < 2000; round++) {
			struct buf text = BUF_INIT, back = BUF_INIT;
			for (size_t count = unit_rand(&seed) % 12; count > 0; count--) {
				uint64_t r = unit_rand(&seed);
				if (r % 3 == 0)
					buf_putc(&text, (char)(r >> 32));
				else
					buf_puts(&text, parts[(r >> 32) % (sizeof parts / sizeof *parts)]);
			}
			struct str s = buf_str(&text);
			struct token_buf ids = encode(s.p, s.n, NULL, 0, round % 2 ? TOKENIZE_SPECIAL : 0);
			tokenizer_decode(v.tokenizer, ids.ids, ids.n, true, &back);
			assert_true(str_eq(buf_str(&back), s));
			token_buf_free(&ids);
			buf_free(&text);
			buf_free(&back);
		}
		vocab_close(&v);
	}
}

/* SmolLM2 lacks 21 of them. */
static void a_byte_without_a_token_becomes_a_replacement_character(void **state)
{
	(void)state;
	vocab_begin(&v, "gpt2", "smollm");
	for (unsigned b = 0; b < 256; b++) {
		char c = (char)b;
		if (b != 0x04 && b != 0xFF)
			vocab_add_n(&v, vocab_escape(&c, 1), VOCAB_NORMAL, 0);
	}
	open_it();
	struct token_buf ids = encode("a\x04\xFF" "b", 4, NULL, 0, 0);
	struct buf out = BUF_INIT;
	tokenizer_decode(v.tokenizer, ids.ids, ids.n, true, &out);
	assert_string_equal(out.data, "a\xEF\xBF\xBD\xEF\xBF\xBD" "b");
	buf_free(&out);
	token_buf_free(&ids);
	vocab_close(&v);
}

static void open_fails(enum status want, const char *words)
{
	enum status status = vocab_open(&v, &err);
	assert_int_equal(status, want);
	if (!strstr(err.message, words))
		fail_msg("\"%s\" does not say \"%s\"", err.message, words);
	vocab_close(&v);
}

static void what_is_not_known_is_named(void **state)
{
	(void)state;
	begin("superbpe");
	open_fails(STATUS_UNSUPPORTED, "superbpe");
	vocab_begin(&v, "t5", NULL);
	vocab_add_bytes(&v);
	open_fails(STATUS_UNSUPPORTED, "t5");
	vocab_begin(&v, NULL, NULL);
	vocab_add_bytes(&v);
	open_fails(STATUS_INVALID, "tokenizer.ggml.model");
}

static void a_vocabulary_must_hold_together(void **state)
{
	(void)state;
	vocab_begin(&v, "gpt2", "gpt-2");
	open_fails(STATUS_INVALID, "0 tokens");

	begin("gpt-2");
	v.merges[1].n--; /* "l l" -> "l " */
	open_fails(STATUS_INVALID, "line 1");

	begin("gpt-2");
	((char *)v.merges[1].p)[0] = 'x'; /* "x l": there is no token "xl" */
	open_fails(STATUS_INVALID, "line 1");

	begin("gpt-2");
	((char *)v.merges[1].p)[1] = '-'; /* no space */
	open_fails(STATUS_INVALID, "line 1");

	begin("gpt-2");
	v.types[3] = 9;
	open_fails(STATUS_INVALID, "type 9");

	begin("gpt-2");
	v.types[3] = -1;
	open_fails(STATUS_INVALID, "type -1");

	begin("gpt-2");
	v.types[HELLO] = VOCAB_CONTROL; /* a merge leads to a control token */
	open_fails(STATUS_INVALID, "line 3");

	begin("gpt-2");
	image_add_u32(&v.image, "tokenizer.ggml.eos_token_id", 100000);
	open_fails(STATUS_INVALID, "eos_token_id is 100000");

	begin("gpt-2");
	v.no_types = true;
	image_add_ints(&v.image, "tokenizer.ggml.token_type", v.types, 5);
	open_fails(STATUS_INVALID, "5 values");

	vocab_begin(&v, "gpt2", "gpt-2");
	vocab_add(&v, "a", VOCAB_NORMAL, 0);
	open_fails(STATUS_INVALID, "byte 0x00");

	vocab_begin(&v, "gpt2", "gpt-2");
	image_add_u32(&v.image, "tokenizer.ggml.tokens", 1);
	struct str image = image_finish(&v.image);
	assert_int_equal(gguf_open_memory(image.p, image.n, &v.file, &err), STATUS_OK);
	assert_int_equal(tokenizer_create(v.file, &v.tokenizer, &err), STATUS_INVALID);
	vocab_close(&v);
}

static void minus_one_is_no_token(void **state)
{
	(void)state;
	begin("gpt-2");
	image_add_u32(&v.image, "tokenizer.ggml.bos_token_id", UINT32_MAX);
	image_add_bool(&v.image, "tokenizer.ggml.add_bos_token", true);
	open_it();
	assert_int_equal(tokenizer_bos(v.tokenizer), -1);
	assert_false(tokenizer_adds_bos(v.tokenizer));
	vocab_close(&v);
}

static void a_megabyte_of_anything_takes_less_than_a_second(void **state)
{
	(void)state;
	char *s = malloc(ADVERSARIAL_BYTES);
	assert_non_null(s);
	const char *pre[] = {"llama-bpe", "qwen2", "deepseek-coder"};
	for (size_t p = 0; p < sizeof pre / sizeof *pre; p++) {
		begin(pre[p]);
		open_it();
		for (size_t k = 0; k < N_ADVERSARIAL; k++) {
			adversarial_fill(&adversarial_texts[k], s);
			clock_t began = clock();
			struct token_buf ids = encode(s, ADVERSARIAL_BYTES, NULL, 0, TOKENIZE_SPECIAL);
			double seconds = (double)(clock() - began) / CLOCKS_PER_SEC;
			if (seconds > ADVERSARIAL_SECONDS)
				fail_msg("%s: %s took %.2f s", pre[p], adversarial_texts[k].name, seconds);
			assert_true(ids.n > 0);
			token_buf_free(&ids);
		}
		vocab_close(&v);
	}
	free(s);
}

UNIT_MAIN(cmocka_unit_test(merges_apply_by_rank), cmocka_unit_test(a_whole_token_goes_before_merges_in_llama3),
          cmocka_unit_test(qwen2_normalises_first), cmocka_unit_test(control_tokens_need_leave),
          cmocka_unit_test(user_defined_tokens_are_found_everywhere),
          cmocka_unit_test(data_never_becomes_a_control_token),
          cmocka_unit_test(bos_and_eos_go_around_where_the_file_asks),
          cmocka_unit_test(end_tokens_are_known_by_id_and_by_name),
          cmocka_unit_test(types_are_guessed_where_the_file_has_none),
          cmocka_unit_test(a_piece_is_the_bytes_of_the_text), cmocka_unit_test(any_bytes_come_back),
          cmocka_unit_test(a_byte_without_a_token_becomes_a_replacement_character),
          cmocka_unit_test(what_is_not_known_is_named), cmocka_unit_test(a_vocabulary_must_hold_together),
          cmocka_unit_test(minus_one_is_no_token), cmocka_unit_test(a_megabyte_of_anything_takes_less_than_a_second))
