#include "tests/unit/model/model_file.h"

#include <stdio.h>

#include "engine/base/log.h"
#include "engine/model/arch.h"

static const struct meta llama[] = {
	{"general.architecture", 's', 0, "llama"},     {"llama.block_count", 'u', 3, NULL},
	{"llama.embedding_length", 'u', 48, NULL},     {"llama.feed_forward_length", 'u', 96, NULL},
	{"llama.attention.head_count", 'u', 6, NULL},  {"llama.attention.head_count_kv", 'u', 2, NULL},
	{"llama.context_length", 'u', 4096, NULL},     {"llama.attention.layer_norm_rms_epsilon", 'f', 1e-5, NULL},
	{"llama.rope.freq_base", 'f', 500000.0, NULL}, {"tokenizer.ggml.tokens", 't', 11, NULL},
};

enum { N_LLAMA = sizeof llama / sizeof llama[0] };

/* Reads the parameters of the base file with changes; flags: see below. */
enum { NO_EMBEDDING = 1, WITH_OUTPUT = 2, WITH_ROPE_FREQS = 4, WIDE_EMBEDDING = 8 };

static enum status read_changed(const struct meta *changes, size_t n, int flags, struct model_params *p,
                                struct error *err)
{
	struct model_file f = {0};
	struct buf file = BUF_INIT;
	struct gguf *g;
	model_file_meta(&f, llama, N_LLAMA, changes, n);
	if (!(flags & NO_EMBEDDING))
		model_file_tensor(&f, "token_embd.weight", QUANT_F32, flags & WIDE_EMBEDDING ? 64 : 48, 11);
	if (flags & WITH_OUTPUT)
		model_file_tensor(&f, "output.weight", QUANT_F32, 48, 11);
	if (flags & WITH_ROPE_FREQS)
		model_file_tensor(&f, "rope_freqs.weight", QUANT_F32, 4, 0);
	model_file_finish(&f, &file);
	memset(err, 0, sizeof *err);
	assert_int_equal(gguf_open_memory(file.data, file.len, &g, err), STATUS_OK);
	enum status st = arch_read_params(g, p, err);
	gguf_close(g);
	buf_free(&file);
	return st;
}

#define READ(flags, p, err, ...)                                                                                       \
	read_changed((const struct meta[]){__VA_ARGS__},                                                               \
	             sizeof((const struct meta[]){__VA_ARGS__}) / sizeof(struct meta), flags, p, err)

/* The change is refused with this status, and the sentence holds the text. */
#define REFUSED(expected, text, ...)                                                                                   \
	do {                                                                                                           \
		struct model_params refused_p;                                                                         \
		struct error refused_err;                                                                              \
		assert_int_equal(READ(0, &refused_p, &refused_err, __VA_ARGS__), expected);                            \
		assert_int_equal(refused_err.status, expected);                                                        \
		assert_non_null(strstr(refused_err.message, text));                                                    \
	} while (0)

/* The base file as one of another architecture, with changes. */
static struct model_params read_as(const char *arch, const struct meta *changes, size_t n_changes)
{
	struct meta renamed[N_LLAMA];
	char keys[N_LLAMA][64];
	struct model_params p;
	struct error err;
	struct model_file f = {0};
	struct buf file = BUF_INIT;
	struct gguf *g;
	memcpy(renamed, llama, sizeof llama);
	renamed[0].text = arch;
	for (size_t j = 1; j + 1 < N_LLAMA; j++) {
		snprintf(keys[j], sizeof keys[j], "%s%s", arch, strchr(llama[j].key, '.'));
		renamed[j].key = keys[j];
	}
	model_file_meta(&f, renamed, N_LLAMA, changes, n_changes);
	model_file_tensor(&f, "token_embd.weight", QUANT_F32, 48, 11);
	model_file_finish(&f, &file);
	assert_int_equal(gguf_open_memory(file.data, file.len, &g, &err), STATUS_OK);
	if (arch_read_params(g, &p, &err) != STATUS_OK)
		fail_msg("%s", err.message);
	gguf_close(g);
	buf_free(&file);
	return p;
}

#define READ_AS(arch, ...)                                                                                             \
	read_as(arch, (const struct meta[]){__VA_ARGS__},                                                              \
	        sizeof((const struct meta[]){__VA_ARGS__}) / sizeof(struct meta))

static void llama_files_are_read(void **state)
{
	(void)state;
	struct model_params p;
	struct error err;
	assert_int_equal(read_changed(NULL, 0, 0, &p, &err), STATUS_OK);
	assert_string_equal(p.arch, "llama");
	assert_int_equal(p.n_layer, 3);
	assert_int_equal(p.n_embd, 48);
	assert_int_equal(p.n_ff, 96);
	assert_int_equal(p.n_head, 6);
	assert_int_equal(p.n_head_kv, 2);
	assert_int_equal(p.head_dim, 8);
	assert_int_equal(p.n_vocab, 11);
	assert_int_equal(p.n_ctx_train, 4096);
	assert_true(p.rms_eps == 1e-5f);
	assert_true(!p.qkv_bias && !p.qk_norm && p.tied_output);
	assert_int_equal(p.rope_pairing, ROPE_INTERLEAVED);
	assert_int_equal(p.rope_scaling, ROPE_SCALING_NONE);
	assert_int_equal(p.rope_dims, 8);
	assert_true(p.rope_base == 500000.0f);
	assert_true(p.rope_factor == 1.0f && p.rope_attn_factor == 1.0f);
}

static void absent_keys_have_their_published_defaults(void **state)
{
	(void)state;
	struct model_params p;
	struct error err;
	assert_int_equal(READ(WITH_OUTPUT, &p, &err, {"llama.attention.head_count_kv", 0, 0, NULL},
	                      {"llama.rope.freq_base", 0, 0, NULL}, {"tokenizer.ggml.tokens", 0, 0, NULL}),
	                 STATUS_OK);
	assert_int_equal(p.n_head_kv, 6);
	assert_true(p.rope_base == 10000.0f);
	assert_false(p.tied_output);
}

static void an_explicit_head_dimension_wins(void **state)
{
	(void)state;
	struct model_params p;
	struct error err;
	assert_int_equal(READ(0, &p, &err, {"llama.attention.key_length", 'u', 16, NULL},
	                      {"llama.attention.value_length", 'u', 16, NULL},
	                      {"llama.rope.dimension_count", 'u', 8, NULL}),
	                 STATUS_OK);
	assert_int_equal(p.head_dim, 16);
	assert_int_equal(p.rope_dims, 8);
	REFUSED(STATUS_UNSUPPORTED, "value_length", {"llama.attention.key_length", 'u', 16, NULL},
	        {"llama.attention.value_length", 'u', 8, NULL});
}

static void qwen_rows_differ_in_pairing_biases_and_norms(void **state)
{
	(void)state;
	static const struct {
		const char *arch;
		bool bias, norm;
	} rows[] = {{"qwen2", true, false}, {"qwen3", false, true}};
	for (size_t i = 0; i < 2; i++) {
		struct model_params p = read_as(rows[i].arch, NULL, 0);
		assert_string_equal(p.arch, rows[i].arch);
		assert_int_equal(p.rope_pairing, ROPE_HALVES);
		assert_int_equal(p.qkv_bias, rows[i].bias);
		assert_int_equal(p.qk_norm, rows[i].norm);
	}
}

static void an_unknown_architecture_is_named_with_the_known_ones(void **state)
{
	(void)state;
	REFUSED(STATUS_UNSUPPORTED, "'mamba2'", {"general.architecture", 's', 0, "mamba2"});
	REFUSED(STATUS_UNSUPPORTED, "llama, qwen2, qwen3, gemma2, gemma3", {"general.architecture", 's', 0, "llama4"});
	REFUSED(STATUS_NOT_FOUND, "general.architecture", {"general.architecture", 0, 0, NULL});
	REFUSED(STATUS_INVALID, "general.architecture", {"general.architecture", 'u', 1, NULL});
}

static void missing_keys_are_named(void **state)
{
	(void)state;
	static const char *const keys[] = {"llama.block_count",         "llama.embedding_length",
	                                   "llama.feed_forward_length", "llama.attention.head_count",
	                                   "llama.context_length",      "llama.attention.layer_norm_rms_epsilon"};
	for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
		REFUSED(STATUS_NOT_FOUND, keys[i], {keys[i], 0, 0, NULL});
}

static void values_out_of_range_are_named(void **state)
{
	(void)state;
	static const struct meta bad[] = {
		{"llama.block_count", 'u', 0, NULL},
		{"llama.block_count", 'u', 1e6, NULL},
		{"llama.embedding_length", 'u', 4e9, NULL},
		{"llama.feed_forward_length", 'u', 0, NULL},
		{"llama.attention.head_count", 'u', 0, NULL},
		{"llama.attention.head_count_kv", 'u', 0, NULL},
		{"llama.attention.key_length", 'u', 0, NULL},
		{"llama.context_length", 'u', 0, NULL},
		{"llama.context_length", 'u', 4e9, NULL},
		{"llama.attention.layer_norm_rms_epsilon", 'f', -1, NULL},
		{"llama.attention.layer_norm_rms_epsilon", 'f', NAN, NULL},
		{"llama.rope.freq_base", 'f', 0, NULL},
		{"llama.rope.freq_base", 'f', INFINITY, NULL},
		{"llama.rope.scaling.factor", 'f', 0, NULL},
		{"llama.rope.scaling.factor", 'f', -4, NULL},
		{"llama.rope.scale_linear", 'f', NAN, NULL},
		{"llama.block_count", 's', 0, "many"},
		{"llama.context_length", 't', 2, NULL},
	};
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
		REFUSED(STATUS_INVALID, bad[i].key, bad[i]);
}

static void heads_must_fit(void **state)
{
	(void)state;
	REFUSED(STATUS_INVALID, "4 KV heads", {"llama.attention.head_count_kv", 'u', 4, NULL});
	REFUSED(STATUS_INVALID, "12 KV heads", {"llama.attention.head_count_kv", 'u', 12, NULL});
	REFUSED(STATUS_INVALID, "5 heads", {"llama.attention.head_count", 'u', 5, NULL},
	        {"llama.attention.head_count_kv", 'u', 5, NULL});
	REFUSED(STATUS_INVALID, "rotated dimensions", {"llama.rope.dimension_count", 'u', 10, NULL});
	REFUSED(STATUS_INVALID, "rotated dimensions", {"llama.rope.dimension_count", 'u', 7, NULL});
}

static void rope_types_are_read(void **state)
{
	(void)state;
	struct model_params p;
	struct error err;
	assert_int_equal(READ(0, &p, &err, {"llama.rope.scaling.type", 's', 0, "none"}), STATUS_OK);
	assert_int_equal(p.rope_scaling, ROPE_SCALING_NONE);

	assert_int_equal(READ(0, &p, &err, {"llama.rope.scaling.type", 's', 0, "linear"},
	                      {"llama.rope.scaling.factor", 'f', 4, NULL}),
	                 STATUS_OK);
	assert_int_equal(p.rope_scaling, ROPE_SCALING_LINEAR);
	assert_true(p.rope_factor == 4.0f);

	assert_int_equal(READ(0, &p, &err, {"llama.rope.scaling.type", 's', 0, "yarn"},
	                      {"llama.rope.scaling.factor", 'f', 8, NULL},
	                      {"llama.rope.scaling.original_context_length", 'u', 512, NULL},
	                      {"llama.rope.scaling.attn_factor", 'f', 0.5, NULL},
	                      {"llama.rope.scaling.yarn_beta_fast", 'f', 20, NULL},
	                      {"llama.rope.scaling.yarn_ext_factor", 'f', -1, NULL}),
	                 STATUS_OK);
	assert_int_equal(p.rope_scaling, ROPE_SCALING_YARN);
	assert_int_equal(p.rope_original_ctx, 512);
	assert_true(p.rope_factor == 8.0f && p.rope_attn_factor == 0.5f);
	assert_true(p.yarn_beta_fast == 20.0f && p.yarn_beta_slow == 1.0f && p.yarn_ext_factor == 1.0f);

	assert_int_equal(READ(0, &p, &err, {"llama.rope.scaling.type", 's', 0, "llama3"},
	                      {"llama.rope.scaling.factor", 'f', 32, NULL}),
	                 STATUS_OK);
	assert_int_equal(p.rope_scaling, ROPE_SCALING_LLAMA3);
	assert_true(p.rope_low_freq_factor == 1.0f && p.rope_high_freq_factor == 4.0f);
	assert_int_equal(READ(WITH_ROPE_FREQS, &p, &err, {"llama.rope.scaling.type", 's', 0, "llama3"}), STATUS_OK);
}

static void a_factor_without_a_type_is_linear_as_in_old_files(void **state)
{
	(void)state;
	struct model_params p;
	struct error err;
	assert_int_equal(READ(0, &p, &err, {"llama.rope.scale_linear", 'f', 2, NULL}), STATUS_OK);
	assert_int_equal(p.rope_scaling, ROPE_SCALING_LINEAR);
	assert_true(p.rope_factor == 2.0f);
	assert_int_equal(READ(0, &p, &err, {"llama.rope.scaling.factor", 'f', 3, NULL}), STATUS_OK);
	assert_int_equal(p.rope_scaling, ROPE_SCALING_LINEAR);
	assert_true(p.rope_factor == 3.0f);
}

static void unknown_rope_types_and_missing_factors_are_named(void **state)
{
	(void)state;
	REFUSED(STATUS_UNSUPPORTED, "'longrope'", {"llama.rope.scaling.type", 's', 0, "longrope"});
	REFUSED(STATUS_INVALID, "llama.rope.scaling.type", {"llama.rope.scaling.type", 'u', 1, NULL});
	static const char *const types[] = {"linear", "yarn", "llama3"};
	for (size_t i = 0; i < 3; i++)
		REFUSED(STATUS_NOT_FOUND, "llama.rope.scaling.factor", {"llama.rope.scaling.type", 's', 0, types[i]});
}

/* Each number of a scaling that is out of range, or of another type, is refused by its name. */
static void odd_numbers_of_a_scaling_are_named(void **state)
{
	(void)state;
	static const struct meta bad[] = {
		{"llama.rope.scaling.original_context_length", 'u', 0, NULL},
		{"llama.rope.scaling.original_context_length", 'u', 4e9, NULL},
		{"llama.rope.scaling.original_context_length", 'f', 512.5, NULL},
		{"llama.rope.scaling.attn_factor", 'f', 0, NULL},
		{"llama.rope.scaling.attn_factor", 'f', INFINITY, NULL},
		{"llama.rope.scaling.yarn_attn_factor", 'f', -1, NULL},
		{"llama.rope.scaling.yarn_beta_fast", 'f', 0, NULL},
		{"llama.rope.scaling.yarn_beta_slow", 'f', NAN, NULL},
		{"llama.rope.scaling.yarn_ext_factor", 'f', 2, NULL},
		{"llama.rope.scaling.low_freq_factor", 'f', 0, NULL},
		{"llama.rope.scaling.high_freq_factor", 's', 0, "high"},
	};
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
		REFUSED(STATUS_INVALID, bad[i].key, {"llama.rope.scaling.type", 's', 0, "yarn"},
		        {"llama.rope.scaling.factor", 'f', 4, NULL}, bad[i]);
	REFUSED(STATUS_INVALID, "rope.scaling.factor", {"llama.rope.scaling.factor", 'f', NAN, NULL});
	REFUSED(STATUS_INVALID, "rope.scaling.factor", {"llama.rope.scaling.factor", 's', 0, "four"});
	REFUSED(STATUS_INVALID, "low_freq_factor", {"llama.rope.scaling.type", 's', 0, "llama3"},
	        {"llama.rope.scaling.factor", 'f', 4, NULL}, {"llama.rope.scaling.low_freq_factor", 'f', 8, NULL});
}

/* Mistral 0.1: all layers have the file's window, and nothing that left it is read again. */
static void a_window_of_a_llama_file_holds_in_all_layers(void **state)
{
	(void)state;
	struct model_params p;
	struct error err;
	assert_int_equal(READ(0, &p, &err, {"llama.attention.sliding_window", 'u', 1024, NULL}), STATUS_OK);
	assert_int_equal(p.n_ctx_train, 4096);
	for (int i = 0; i < 3; i++)
		assert_int_equal(model_layer_window(&p, i), 1024);
	assert_int_equal(model_horizon(&p), 1024);
	assert_int_equal(READ(0, &p, &err, {"llama.attention.sliding_window", 'u', 0, NULL}), STATUS_OK);
	assert_int_equal(model_layer_window(&p, 0), 0);
	assert_int_equal(model_horizon(&p), 0);
	assert_int_equal(READ(0, &p, &err, {"llama.attention.sliding_window", 'u', 64, NULL},
	                      {"llama.attention.sliding_window_pattern", 'u', 3, NULL}),
	                 STATUS_OK);
	assert_int_equal(model_layer_window(&p, 1), 64);
	assert_int_equal(model_layer_window(&p, 2), 0);
	assert_int_equal(model_horizon(&p), 0);
}

/*
 * Within the window full attention is exact whichever layers have it, so it bounds the context where files do not say.
 */
static void a_window_of_unknown_layers_limits_the_context(void **state)
{
	(void)state;
	struct model_params p = READ_AS("qwen2", {"qwen2.attention.sliding_window", 'u', 1024, NULL});
	assert_int_equal(p.n_ctx_train, 1024);
	assert_int_equal(model_layer_window(&p, 0), 0);
	p = READ_AS("qwen2", {"qwen2.attention.sliding_window", 'u', 8192, NULL});
	assert_int_equal(p.n_ctx_train, 4096);
	p = READ_AS("qwen2", {"qwen2.attention.sliding_window", 'u', 0, NULL});
	assert_int_equal(p.n_ctx_train, 4096);
}

static void gemma_rows_have_what_their_files_do_not_say(void **state)
{
	(void)state;
	struct model_params p = READ_AS("gemma2", {"gemma2.attn_logit_softcapping", 'f', 50, NULL},
	                                {"gemma2.final_logit_softcapping", 'f', 30, NULL},
	                                {"gemma2.attention.sliding_window", 'u', 8, NULL});
	assert_true(p.post_norm && !p.qk_norm && p.glu == GLU_GELU && p.rope_pairing == ROPE_HALVES);
	assert_true(p.embd_scale == sqrtf(48) && p.attn_scale == 1 / sqrtf(8));
	assert_true(p.attn_softcap == 50 && p.final_softcap == 30 && p.rope_base_local == 0);
	assert_int_equal(model_layer_window(&p, 0), 8);
	assert_int_equal(model_layer_window(&p, 1), 0);
	assert_int_equal(model_layer_window(&p, 2), 8);
	assert_int_equal(model_horizon(&p), 0);
	p = READ_AS("gemma2", {"gemma2.block_count", 'u', 46, NULL}); /* the 27B model */
	assert_int_equal(model_layer_window(&p, 0), 4096);
	assert_true(p.attn_scale == 1 / sqrtf(48.0f / 6) && p.attn_softcap == 0);

	p = READ_AS("gemma3", {"gemma3.attention.sliding_window", 'u', 512, NULL},
	            {"gemma3.block_count", 'u', 12, NULL}, {"gemma3.attention.key_length", 'u', 16, NULL},
	            {"gemma3.attention.value_length", 'u', 16, NULL}, {"gemma3.rope.scaling.type", 's', 0, "linear"},
	            {"gemma3.rope.scaling.factor", 'f', 8, NULL});
	assert_true(p.post_norm && p.qk_norm && p.glu == GLU_GELU && p.attn_scale == 0.25f);
	assert_true(p.rope_base == 500000 && p.rope_base_local == 10000 && p.rope_factor == 8);
	for (int i = 0; i < 12; i++)
		assert_int_equal(model_layer_window(&p, i), i % 6 == 5 ? 0 : 512);
	p = READ_AS("gemma3", {"gemma3.block_count", 'u', 62, NULL}, {"gemma3.attention.scale", 'f', 0.5, NULL},
	            {"gemma3.rope.freq_base_swa", 'f', 20000, NULL});
	assert_true(p.attn_scale == 0.5f && p.rope_base_local == 20000);
	assert_int_equal(model_layer_window(&p, 0), 0);
}

static void scales_and_caps_of_any_file_are_read(void **state)
{
	(void)state;
	struct model_params p;
	struct error err;
	assert_int_equal(READ(0, &p, &err, {"llama.attention.scale", 'f', 0.015625, NULL},
	                      {"llama.attn_logit_softcapping", 'f', 50, NULL},
	                      {"llama.final_logit_softcapping", 'f', 30, NULL}),
	                 STATUS_OK);
	assert_true(p.attn_scale == 0.015625f && p.attn_softcap == 50 && p.final_softcap == 30);
	assert_int_equal(READ(0, &p, &err, {"llama.attention.scale", 'f', 0, NULL}), STATUS_OK);
	assert_true(p.attn_scale == 1 / sqrtf(8) && p.embd_scale == 1 && p.glu == GLU_SILU && !p.post_norm);
	REFUSED(STATUS_INVALID, "llama.attn_logit_softcapping", {"llama.attn_logit_softcapping", 'f', -1, NULL});
	REFUSED(STATUS_INVALID, "llama.attention.sliding_window_pattern",
	        {"llama.attention.sliding_window_pattern", 'u', 0, NULL});
}

static void what_is_not_computed_is_refused_by_name(void **state)
{
	(void)state;
	static const struct meta extras[] = {
		{"llama.expert_count", 'u', 8, NULL},
		{"llama.expert_used_count", 'u', 2, NULL},
		{"llama.logit_scale", 'f', 0.0625, NULL},
		{"llama.residual_scale", 'f', 0.22, NULL},
		{"llama.embedding_scale", 'f', 12, NULL},
		{"llama.attention.clamp_kqv", 'f', 8, NULL},
		{"llama.attention.max_alibi_bias", 'f', 8, NULL},
		{"llama.attention.causal", 'b', 0, NULL},
		{"llama.use_parallel_residual", 'b', 1, NULL},
		{"llama.rope.scaling.yarn_log_multiplier", 'f', 0.1, NULL},
		{"llama.expert_count", 's', 0, "eight"},
	};
	for (size_t i = 0; i < sizeof extras / sizeof extras[0]; i++)
		REFUSED(STATUS_UNSUPPORTED, extras[i].key, extras[i]);

	/* The values that mean "nothing of the kind" are fine. */
	struct model_params p;
	struct error err;
	assert_int_equal(READ(0, &p, &err, {"llama.expert_count", 'u', 0, NULL}, {"llama.logit_scale", 'f', 1, NULL},
	                      {"llama.attention.causal", 'b', 1, NULL}, {"llama.use_parallel_residual", 'b', 0, NULL}),
	                 STATUS_OK);
}

static void the_vocabulary_must_match_the_embedding(void **state)
{
	(void)state;
	struct model_params p;
	struct error err;
	REFUSED(STATUS_CORRUPT, "12 tokens", {"tokenizer.ggml.tokens", 't', 12, NULL});
	assert_int_equal(read_changed(NULL, 0, NO_EMBEDDING, &p, &err), STATUS_NOT_FOUND);
	assert_non_null(strstr(err.message, "token_embd.weight"));
	assert_int_equal(read_changed(NULL, 0, WIDE_EMBEDDING, &p, &err), STATUS_CORRUPT);
	assert_non_null(strstr(err.message, "64 x 11"));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(llama_files_are_read),
		cmocka_unit_test(absent_keys_have_their_published_defaults),
		cmocka_unit_test(an_explicit_head_dimension_wins),
		cmocka_unit_test(qwen_rows_differ_in_pairing_biases_and_norms),
		cmocka_unit_test(an_unknown_architecture_is_named_with_the_known_ones),
		cmocka_unit_test(missing_keys_are_named),
		cmocka_unit_test(values_out_of_range_are_named),
		cmocka_unit_test(heads_must_fit),
		cmocka_unit_test(rope_types_are_read),
		cmocka_unit_test(a_factor_without_a_type_is_linear_as_in_old_files),
		cmocka_unit_test(unknown_rope_types_and_missing_factors_are_named),
		cmocka_unit_test(odd_numbers_of_a_scaling_are_named),
		cmocka_unit_test(a_window_of_a_llama_file_holds_in_all_layers),
		cmocka_unit_test(a_window_of_unknown_layers_limits_the_context),
		cmocka_unit_test(gemma_rows_have_what_their_files_do_not_say),
		cmocka_unit_test(scales_and_caps_of_any_file_are_read),
		cmocka_unit_test(what_is_not_computed_is_refused_by_name),
		cmocka_unit_test(the_vocabulary_must_match_the_embedding),
	};
	log_set_level(LOG_OFF);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
