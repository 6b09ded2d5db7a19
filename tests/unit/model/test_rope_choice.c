/*
 * How positions are stretched otherwise than the file says: the text of --rope-scaling, and what becomes of a model's
 * own settings.
 */
#include "tests/unit/unit.h"

#include <math.h>

#include "engine/model/rope.h"
#include "engine/model/rope_choice.h"

static struct rope_choice parsed(const char *text)
{
	struct rope_choice c;
	struct error err;
	if (rope_choice_parse(text, &c, &err) != STATUS_OK)
		fail_msg("%s: %s", text, err.message);
	return c;
}

static void check_refused(const char *text, const char *named)
{
	struct rope_choice c = {.factor = 77};
	struct error err;
	assert_int_equal(rope_choice_parse(text, &c, &err), STATUS_INVALID);
	assert_string_equal(err.param, "rope-scaling");
	if (!strstr(err.message, named))
		fail_msg("%s: \"%s\" does not name %s", text, err.message, named);
	assert_true(c.factor == 77.0f); /* untouched */
}

/* A model that was trained on 8,192 tokens and stretches nothing. */
static struct model_params plain(void)
{
	return (struct model_params){.n_ctx_train = 8192,
	                             .n_ctx = 8192,
	                             .rope_original_ctx = 8192,
	                             .rope_dims = 64,
	                             .rope_base = 1e5f,
	                             .rope_factor = 1,
	                             .rope_attn_factor = 1};
}

/* One whose file stretches by YaRN, with a magnitude of its own. */
static struct model_params stretched(void)
{
	struct model_params p = plain();
	p.n_ctx_train = p.n_ctx = 32768;
	p.rope_scaling = ROPE_SCALING_YARN;
	p.rope_factor = 4;
	p.rope_attn_factor = 0.5f;
	p.yarn_beta_fast = 20;
	p.yarn_beta_slow = 2;
	p.yarn_ext_factor = 0.5f;
	return p;
}

static struct model_params applied(const char *text, struct model_params p)
{
	struct rope_choice c = parsed(text);
	struct error err;
	if (rope_choice_apply(&c, &p, &err) != STATUS_OK)
		fail_msg("%s: %s", text, err.message);
	return p;
}

static void check_impossible(const char *text, struct model_params p, const char *named)
{
	struct rope_choice c = parsed(text);
	struct error err;
	assert_int_equal(rope_choice_apply(&c, &p, &err), STATUS_INVALID);
	assert_string_equal(err.param, "rope-scaling");
	if (!strstr(err.message, named))
		fail_msg("%s: \"%s\" does not name %s", text, err.message, named);
}

static void a_type_a_factor_and_keys_are_read(void **state)
{
	(void)state;
	struct rope_choice c = parsed("yarn:4");
	assert_true(c.has_scaling && c.scaling == ROPE_SCALING_YARN && c.factor == 4.0f && c.original_ctx == 0);
	c = parsed("yarn:2.5,original=4096,base=1e6,beta-fast=16,beta-slow=.5,attn-factor=0.9");
	assert_true(c.factor == 2.5f && c.original_ctx == 4096 && c.base == 1e6f && c.beta_fast == 16.0f &&
	            c.beta_slow == 0.5f && c.attn_factor == 0.9f);
	c = parsed("llama3:8,low-freq-factor=1,high-freq-factor=4");
	assert_true(c.scaling == ROPE_SCALING_LLAMA3 && c.low_freq_factor == 1.0f && c.high_freq_factor == 4.0f);
	c = parsed("none");
	assert_true(c.has_scaling && c.scaling == ROPE_SCALING_NONE);
	c = parsed("base=500000");
	assert_true(!c.has_scaling && c.base == 500000.0f);
	assert_false(parsed("").has_scaling);
	struct rope_choice none;
	assert_int_equal(rope_choice_parse(NULL, &none, NULL), STATUS_OK);
	assert_false(none.has_scaling);
}

static void what_is_wrong_is_named(void **state)
{
	(void)state;
	check_refused("longrope:4", "longrope");
	check_refused("YARN:4", "none, linear, yarn, llama3 and dca");
	check_refused("yarn", "factor");
	check_refused("yarn:", "factor");
	check_refused("yarn:0.5", "from 1 to 10000");
	check_refused("yarn:-4", "from 1 to 10000");
	check_refused("yarn:1e9", "from 1 to 10000");
	check_refused("yarn:nan", "from 1 to 10000");
	check_refused("yarn:0x4", "from 1 to 10000");
	check_refused("yarn:4x", "from 1 to 10000");
	check_refused("none:4", "nothing to stretch");
	check_refused("yarn:4,", "comma");
	check_refused("yarn:4,,base=2", "keys are");
	check_refused("yarn:4,betafast=2", "betafast");
	check_refused("yarn:4,original", "keys are");
	check_refused("yarn:4,original=", "original");
	check_refused("yarn:4,original=0", "from 1 to");
	check_refused("yarn:4,original=12.5", "tokens");
	check_refused("yarn:4,original=99999999999", "original");
	check_refused("yarn:4,base=1", "from 1.5");
	check_refused("yarn:4,base=1e6,base=1e7", "twice");
	check_refused("yarn:4,linear:2", "keys are");
	check_refused("linear:4,beta-fast=8", "means nothing to linear");
	check_refused("yarn:4,low-freq-factor=1", "means nothing to yarn");
	check_refused(",yarn:4", "no way to stretch");
}

static void the_context_grows_by_the_factor(void **state)
{
	(void)state;
	struct model_params p = applied("yarn:4", plain());
	assert_int_equal(p.n_ctx, 32768);
	assert_int_equal(p.n_ctx_train, 8192);
	assert_int_equal(p.rope_original_ctx, 8192);
	assert_true(p.rope_scaling == ROPE_SCALING_YARN && p.rope_factor == 4.0f && p.yarn_ext_factor == 1.0f);
	assert_true(p.yarn_beta_fast == 32.0f && p.yarn_beta_slow == 1.0f && p.rope_attn_factor == 1.0f);
	assert_int_equal(applied("linear:1.5", plain()).n_ctx, 12288);
	assert_int_equal(applied("llama3:8,original=4096", plain()).n_ctx, 32768);
	struct model_params none = applied("none", plain()), file = plain();
	assert_memory_equal(&none, &file, sizeof none);
	assert_int_equal(applied("base=1e6", plain()).n_ctx, 8192);
	assert_true(applied("base=1e6", plain()).rope_base == 1e6f);
	assert_int_equal(applied("", plain()).n_ctx, 8192);
}

static void a_type_replaces_all_of_the_files_scaling(void **state)
{
	(void)state;
	struct model_params p = applied("yarn:8", stretched());
	assert_int_equal(p.n_ctx, 65536);
	assert_int_equal(p.rope_original_ctx, 8192);
	assert_true(p.rope_attn_factor == 1.0f && p.yarn_beta_fast == 32.0f && p.yarn_ext_factor == 1.0f);
	p = applied("none", stretched());
	assert_int_equal(p.n_ctx, 8192);
	assert_true(p.rope_scaling == ROPE_SCALING_NONE && rope_magnitude(&p) == 1.0f);
	/* Llama 3.1: 8 times 8,192 are less than the 131,072 it was trained to reach, and so it goes on. */
	struct model_params far = stretched();
	far.n_ctx_train = far.n_ctx = 131072;
	far.rope_scaling = ROPE_SCALING_LLAMA3;
	far.rope_factor = 8;
	assert_int_equal(applied("llama3:16", far).n_ctx, 262144);
	assert_int_equal(applied("none", far).n_ctx, 8192);
}

static void keys_alone_change_the_files_scaling(void **state)
{
	(void)state;
	struct model_params p = applied("beta-fast=40,original=16384", stretched());
	assert_true(p.rope_scaling == ROPE_SCALING_YARN && p.yarn_beta_fast == 40.0f && p.yarn_beta_slow == 2.0f &&
	            p.rope_attn_factor == 0.5f);
	assert_int_equal(p.n_ctx, 65536);
	check_impossible("beta-fast=40", plain(), "none");
	check_impossible("original=40", plain(), "original");
	check_impossible("low-freq-factor=2", stretched(), "yarn");
}

static void a_table_does_not_say_how_far_it_stretches(void **state)
{
	(void)state;
	struct model_params p = plain();
	p.rope_table = true;
	check_impossible("yarn:4", p, "original=N");
	check_impossible("none", p, "original=N");
	struct model_params q = applied("llama3:4,original=2048", p);
	assert_int_equal(q.n_ctx, 8192);
	assert_false(q.rope_table);
	assert_true(applied("base=1e6", p).rope_table);
}

static void nothing_reaches_beyond_a_window_of_unknown_layers(void **state)
{
	(void)state;
	struct model_params p = plain();
	p.ctx_bound = 8192;
	assert_int_equal(applied("yarn:4", p).n_ctx, 8192);
	check_impossible("yarn:10000,original=268435456", plain(), "more than");
	check_impossible("llama3:8,low-freq-factor=4", plain(), "must be below");
}

/* Angles are the file's own; distances end at the trained length, wherever that comes from. */
static void chunks_leave_the_angles_as_they_are(void **state)
{
	(void)state;
	struct rope_choice c = parsed("dca:4");
	assert_true(c.by_chunks && !c.has_scaling && c.factor == 4.0f && c.chunk == 0);
	struct model_params p = applied("dca:4", plain());
	assert_int_equal(p.n_ctx, 4 * 8192);
	assert_int_equal(p.rope_chunks.reach, 8192);
	assert_int_equal(p.rope_chunks.size, 6144);
	assert_true(p.rope_scaling == ROPE_SCALING_NONE && p.rope_factor == 1.0f);
	p = applied("dca:2", stretched());
	assert_true(p.rope_scaling == ROPE_SCALING_YARN && p.rope_factor == 4.0f && p.rope_attn_factor == 0.5f);
	assert_int_equal(p.n_ctx, 65536);
	assert_int_equal(p.rope_chunks.size, 24576);
	p = applied("dca:2.5,original=4000,chunk=1024,base=1e6", plain());
	assert_int_equal(p.n_ctx, 10000);
	assert_int_equal(p.rope_chunks.reach, 4000);
	assert_int_equal(p.rope_chunks.size, 1024);
	assert_true(p.rope_base == 1e6f);
	/* A multiple of 64, and of three quarters the largest. */
	assert_int_equal(applied("dca:2,original=1000", plain()).rope_chunks.size, 704);
	check_refused("dca", "factor");
	check_refused("dca:0.5", "from 1");
	check_refused("dca:2,beta-fast=4", "dca");
	check_refused("dca:2,chunk=64.5", "tokens");
	check_refused("yarn:2,chunk=64", "yarn");
	check_impossible("chunk=64", plain(), "chunk");
	check_impossible("dca:2,chunk=100", plain(), "multiple of 64");
	check_impossible("dca:2,chunk=8192", plain(), "below the 8192");
	check_impossible("dca:2,original=80", plain(), "multiple of 64");
	check_impossible("dca:10000,original=1000000", plain(), "more than");
}

/* The same table as when the file says so, which is what NumPy is compared with. */
static void the_frequencies_are_those_of_a_file_that_says_so(void **state)
{
	(void)state;
	float chosen[32], said[32], before[32];
	struct model_params p = applied("yarn:4", plain()), q = plain();
	q.rope_scaling = ROPE_SCALING_YARN;
	q.rope_factor = 4;
	q.yarn_beta_fast = 32;
	q.yarn_beta_slow = 1;
	q.yarn_ext_factor = 1;
	rope_frequencies(&p, NULL, chosen);
	rope_frequencies(&q, NULL, said);
	assert_memory_equal(chosen, said, sizeof said);
	q = plain();
	rope_frequencies(&q, NULL, before);
	assert_memory_not_equal(chosen, before, sizeof before);
}

UNIT_MAIN(cmocka_unit_test(a_type_a_factor_and_keys_are_read), cmocka_unit_test(what_is_wrong_is_named),
	  cmocka_unit_test(the_context_grows_by_the_factor), cmocka_unit_test(a_type_replaces_all_of_the_files_scaling),
	  cmocka_unit_test(keys_alone_change_the_files_scaling),
	  cmocka_unit_test(a_table_does_not_say_how_far_it_stretches),
	  cmocka_unit_test(nothing_reaches_beyond_a_window_of_unknown_layers),
	  cmocka_unit_test(chunks_leave_the_angles_as_they_are),
	  cmocka_unit_test(the_frequencies_are_those_of_a_file_that_says_so))
