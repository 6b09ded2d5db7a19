#include "tests/unit/unit.h"

#include <stdio.h>
#include <unistd.h>

#include "engine/tools.h"
#include "engine/inspect.h"
#include "tests/unit/model/gguf_builder.h"

/* The description of the file in b, which is emptied. The caller frees it. */
static char *described(struct buf *b, bool json)
{
	struct gguf *g;
	struct error err;
	assert_false(b->failed);
	if (gguf_open_memory(b->data, b->len, &g, &err) != STATUS_OK)
		fail_msg("%s", err.message);
	struct buf out = BUF_INIT;
	assert_int_equal(inspect_gguf(g, "m.gguf", json, &out, &err), STATUS_OK);
	gguf_close(g);
	buf_free(b);
	char *text = buf_take(&out, NULL);
	assert_non_null(text);
	return text;
}

static void has(const char *text, const char *part)
{
	if (!text || !strstr(text, part))
		fail_msg("\"%s\" is not in:\n%s", part, text ? text : "(nothing)");
}

/* A model of one tensor and all the keys the summary reads. */
static void build_model(struct buf *b)
{
	put_header(b, 3, 1, 14);
	put_value_str(b, "general.architecture", "llama");
	put_value_str(b, "general.name", "Tiny");
	put_value_u32(b, "llama.block_count", 30);
	put_value_u32(b, "llama.embedding_length", 576);
	put_value_u32(b, "llama.attention.head_count", 9);
	put_value_u32(b, "llama.attention.head_count_kv", 3);
	put_value(b, "llama.rope.freq_base", GGUF_F32, &(float){100000}, 4);
	put_value_str(b, "tokenizer.ggml.model", "gpt2");
	put_value_str(b, "tokenizer.ggml.pre", "smollm");
	put_array(b, "tokenizer.ggml.tokens", GGUF_STRING, 3);
	put_str(b, "a");
	put_str(b, "\n");
	put_str(b, "<end>");
	put_value_u32(b, "tokenizer.ggml.bos_token_id", 7);
	put_value_u32(b, "tokenizer.ggml.eos_token_id", 2);
	put_value(b, "tokenizer.ggml.add_bos_token", GGUF_BOOL, "\1", 1);
	put_value_str(b, "tokenizer.chat_template", "{{ 'x' }}");
	put_tensor(b, "output_norm.weight", 2, (uint64_t[]){4, 2}, QUANT_F16, 0);
	put_padding(b, 32);
	for (int i = 0; i < 16; i++)
		put_u8(b, 0);
}

static void text_has_the_facts_a_person_looks_for(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	build_model(&b);
	char *text = described(&b, false);
	has(text, "GGUF version 3\n");
	has(text, "  architecture           \"llama\"\n");
	has(text, "  layers                 30\n");
	has(text, "  head dimension         64\n");
	has(text, "  RoPE base              100000\n");
	has(text, "  KV cache per token     23,040 bytes (22.5 KiB) in f16\n");
	has(text, "  pre-tokenizer          \"smollm\"\n");
	has(text, "  bos                    7 (outside the vocabulary)\n");
	has(text, "  eos                    2 \"<end>\"\n");
	has(text, "  chat template          9 bytes\n");
	has(text, "Metadata: 14 entries\n");
	has(text, "string  [3] \"a\", \"\\n\", \"<end>\"\n");
	has(text, "bool    true\n");
	has(text, "Tensors: 1, 16 bytes\n");
	has(text, "output_norm.weight  F16    4 x 2");
	has(text, "  F16        1 tensors  100.0%  16 bytes\n");
	free(text);
}

static void json_is_one_object_with_everything(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	build_model(&b);
	size_t bytes = b.len;
	char *json = described(&b, true), expected[2048];
	snprintf(expected, sizeof expected,
	         "{\"file\":\"m.gguf\",\"version\":3,\"bytes\":%zu,\"summary\":{\"name\":\"Tiny\",\"architecture\":"
	         "\"llama\","
	         "\"n_layer\":30,\"n_embd\":576,\"n_ff\":null,\"n_head\":9,\"n_head_kv\":3,\"head_dim\":64,"
	         "\"n_ctx_train\":null,\"attention_window\":null,\"rope_dims\":null,\"n_vocab\":3,\"n_params\":8,"
	         "\"tensor_bytes\":16,"
	         "\"kv_bytes_per_token\":23040,\"chat_template_bytes\":9,"
	         "\"tensor_types\":{\"F16\":{\"tensors\":1,\"elements\":8,\"bytes\":16}},"
	         "\"tokenizer\":{\"model\":\"gpt2\",\"pre\":\"smollm\",\"n_tokens\":3,"
	         "\"special\":{\"bos\":{\"id\":7,\"text\":null},\"eos\":{\"id\":2,\"text\":\"<end>\"}}}},"
	         "\"metadata\":{\"general.architecture\":\"llama\",\"general.name\":\"Tiny\",\"llama.block_count\":30,"
	         "\"llama.embedding_length\":576,\"llama.attention.head_count\":9,\"llama.attention.head_count_kv\":3,"
	         "\"llama.rope.freq_base\":100000,\"tokenizer.ggml.model\":\"gpt2\",\"tokenizer.ggml.pre\":\"smollm\","
	         "\"tokenizer.ggml.tokens\":[\"a\", \"\\n\", \"<end>\"],\"tokenizer.ggml.bos_token_id\":7,"
	         "\"tokenizer.ggml.eos_token_id\":2,\"tokenizer.ggml.add_bos_token\":true,"
	         "\"tokenizer.chat_template\":\"{{ 'x' }}\"},"
	         "\"tensors\":[{\"name\":\"output_norm.weight\",\"type\":\"F16\",\"shape\":[4,2],\"bytes\":16,"
	         "\"offset\":%zu}]}\n",
	         bytes, bytes - 16);
	assert_string_equal(json, expected);
	free(json);
}

static void numbers_keep_their_exact_value_in_json(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	put_header(&b, 3, 0, 11);
	put_value(&b, "u64", GGUF_U64, &(uint64_t){UINT64_MAX}, 8);
	put_value(&b, "i64", GGUF_I64, &(int64_t){INT64_MIN}, 8);
	put_value(&b, "u8", GGUF_U8, &(uint8_t){255}, 1);
	put_value(&b, "i8", GGUF_I8, &(int8_t){-128}, 1);
	put_value(&b, "i16", GGUF_I16, &(int16_t){-2}, 2);
	put_value(&b, "i32", GGUF_I32, &(int32_t){-3}, 4);
	put_value(&b, "eps", GGUF_F32, &(float){1e-5f}, 4);
	put_value(&b, "third", GGUF_F32, &(float){1 / 3.0f}, 4);
	put_value(&b, "nan", GGUF_F32, &(uint32_t){0x7FC00000}, 4);
	put_value(&b, "f64", GGUF_F64, &(double){0.1}, 8);
	put_value(&b, "no", GGUF_BOOL, &(uint8_t){0}, 1);
	char *json = described(&b, true);
	has(json,
	    "{\"u64\":18446744073709551615,\"i64\":-9223372036854775808,\"u8\":255,\"i8\":-128,\"i16\":-2,\"i32\":-3,"
	    "\"eps\":1e-05,\"third\":0.33333334,\"nan\":null,\"f64\":0.1,\"no\":false}");
	free(json);
}

static void long_arrays_are_abbreviated(void **state)
{
	(void)state;
	for (uint32_t n = 32; n <= 33; n++) {
		for (int json = 0; json < 2; json++) {
			struct buf b = BUF_INIT;
			put_header(&b, 3, 0, 1);
			put_array(&b, "list", GGUF_U32, n);
			for (uint32_t i = 0; i < n; i++)
				put_u32(&b, i);
			char *text = described(&b, json);
			if (!json)
				has(text, n == 32 ? "[32] 0, 1, 2, 3, ...\n" : "[33] 0, 1, 2, 3, ...\n");
			else if (n == 32)
				has(text, "30, 31]}");
			else
				has(text,
				    "{\"list\":{\"type\":\"u32\",\"count\":33,\"first\":[0, 1, 2, 3, 4, 5, 6, 7]}}");
			free(text);
		}
	}
}

static void kv_bytes_follow_the_shape(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	/* Explicit head dimensions, K and V different: 2 layers * 4 heads * (96 + 64) * 2 bytes. */
	put_header(&b, 3, 0, 5);
	put_value_str(&b, "general.architecture", "new-arch");
	put_value_u32(&b, "new-arch.block_count", 2);
	put_value_u32(&b, "new-arch.attention.head_count", 4);
	put_value_u32(&b, "new-arch.attention.key_length", 96);
	put_value_u32(&b, "new-arch.attention.value_length", 64);
	char *json = described(&b, true);
	has(json, "\"kv_bytes_per_token\":2560,");
	free(json);

	/* Each layer with its own number of KV heads: (1 + 2 + 0) * 2 * 8 * 2 bytes. */
	put_header(&b, 3, 0, 4);
	put_value_str(&b, "general.architecture", "x");
	put_value_u32(&b, "x.block_count", 3);
	put_array(&b, "x.attention.head_count_kv", GGUF_I32, 3);
	buf_append(&b, (int32_t[]){1, 2, 0}, 12);
	put_value_u32(&b, "x.attention.key_length", 8);
	json = described(&b, true);
	has(json, "\"kv_bytes_per_token\":96,");
	free(json);

	/* Numbers that cannot be multiplied give no number. */
	put_header(&b, 3, 0, 4);
	put_value_str(&b, "general.architecture", "x");
	put_value(&b, "x.block_count", GGUF_U64, &(uint64_t){1ull << 40}, 8);
	put_value(&b, "x.attention.head_count", GGUF_U64, &(uint64_t){1ull << 40}, 8);
	put_value_u32(&b, "x.attention.key_length", 8);
	json = described(&b, true);
	has(json, "\"kv_bytes_per_token\":null,");
	free(json);
}

static void strings_of_the_file_cannot_forge_lines(void **state)
{
	(void)state;
	struct buf b = BUF_INIT;
	put_header(&b, 3, 0, 2);
	put_value_str(&b, "general.name", "x\n  layers 99\x1b[2J\xff");
	put_value_str(&b, "long",
		      "0123456789012345678901234567890123456789012345678901234567890123456789\xC3\xA9\xC3\xA9\xC3\xA9");
	char *text = described(&b, false);
	has(text, "\"x\\n  layers 99\\u001b[2J\xEF\xBF\xBD\"");
	has(text, "6789\xC3\xA9\"...\n"); /* cut between code points */
	has(text, "(a vocabulary only)");
	has(text, "KV cache per token     unknown");
	free(text);
}

static void a_file_that_cannot_be_read_is_an_error(void **state)
{
	(void)state;
	struct buf out = BUF_INIT;
	struct error err;
	assert_int_equal(engine_inspect("/nonexistent/m.gguf", false, &out, &err), STATUS_IO);
	has(err.message, "/nonexistent/m.gguf");
	assert_int_equal(out.len, 0);
}

static void real_vocabularies_are_described(void **state)
{
	(void)state;
	static const char *const names[] = {"gpt2", "llama3", "mistral-spm", "qwen2"};
	static const int n_tokens[] = {50257, 128010, 32000, 151646};
	const char *shared = getenv("KVASIR_SHARED");
	for (size_t i = 0; i < 4; i++) {
		char path[512], part[64];
		snprintf(path, sizeof path, "%s/golden/vocab/%s.gguf", shared ? shared : KVASIR_SHARED_DEFAULT,
			 names[i]);
		if (access(path, R_OK) != 0) {
			print_message("skipped: %s is not there\n", path);
			skip();
		}
		struct buf out = BUF_INIT;
		struct error err;
		assert_int_equal(engine_inspect(path, true, &out, &err), STATUS_OK);
		snprintf(part, sizeof part, "\"n_tokens\":%d,", n_tokens[i]);
		has(out.data, part);
		buf_free(&out);
	}
}

UNIT_MAIN(cmocka_unit_test(text_has_the_facts_a_person_looks_for), cmocka_unit_test(json_is_one_object_with_everything),
	  cmocka_unit_test(numbers_keep_their_exact_value_in_json), cmocka_unit_test(long_arrays_are_abbreviated),
	  cmocka_unit_test(kv_bytes_follow_the_shape), cmocka_unit_test(strings_of_the_file_cannot_forge_lines),
	  cmocka_unit_test(a_file_that_cannot_be_read_is_an_error), cmocka_unit_test(real_vocabularies_are_described))
