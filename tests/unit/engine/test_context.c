/* Context policies from the request to the answer, over a tiny model and the reference backend. */
#include "tests/unit/engine/engine_fixture.h"

#include <math.h>

#include "engine/drift.h"
#include "engine/request.h"
#include "engine/truncate.h"
#include "engine/trigger.h"

enum { PAGE = 16, CONTEXT = 512 };

/* `n` characters that do not repeat soon; each is a token. */
static char *text_of(int32_t n, unsigned seed)
{
	char *s = malloc((size_t)n + 1);
	assert_non_null(s);
	for (int32_t i = 0; i < n; i++) {
		seed = seed * 1103515245u + 12345u;
		s[i] = (char)('a' + (seed >> 16) % 26);
	}
	s[n] = '\0';
	return s;
}

static struct engine_request *ask(struct engine *e, int32_t n_prompt, int32_t max_tokens,
                                  const struct engine_context *context)
{
	char *prompt = text_of(n_prompt, 5);
	struct engine_request *r = request(e, prompt, max_tokens);
	free(prompt);
	if (context)
		r->context = *context;
	return r;
}

static struct engine_context streaming(int32_t start, int32_t recent, int32_t most)
{
	return (struct engine_context){
		.policy = "streaming", .start_size = start, .recent_size = recent, .max_cache_size = most};
}

static struct engine_context evicting(int32_t most, int32_t permille)
{
	return (struct engine_context){.policy = "evict",
	                               .start_size = 4,
	                               .recent_size = 32,
	                               .max_cache_size = most,
	                               .by_share = permille > 0,
	                               .shrink_permille = permille};
}

/* By attention; 0: half of the conversation. */
static struct engine_context weighing(int32_t most)
{
	struct engine_context c = evicting(most, most ? 0 : 500);
	c.by_mass = true;
	return c;
}

static struct engine_context merging(int32_t most, int32_t permille)
{
	struct engine_context c = evicting(most, permille);
	c.policy = "merge";
	return c;
}

static struct engine_context choosing(int32_t most)
{
	return (struct engine_context){.policy = "quest", .start_size = -1, .recent_size = 16, .max_cache_size = most};
}

static struct answer run_and_drop_text(struct engine *e, struct engine_request *r)
{
	struct answer a = run(e, r);
	buf_free(&a.text);
	if (a.error.status != STATUS_OK)
		fail_msg("%s", a.error.message);
	return a;
}

static void a_window_as_long_as_the_conversation_changes_nothing(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	struct answer full = run_and_drop_text(e, ask(e, 150, 40, NULL));
	assert_string_equal(full.usage.context.policy, "full");
	assert_int_equal(full.usage.context.evicted_tokens, 0);
	struct engine_context c = streaming(4, 0, 192);
	struct answer a = run_and_drop_text(e, ask(e, 150, 40, &c));
	assert_string_equal(a.usage.context.policy, "streaming");
	assert_int_equal(a.usage.context.evicted_tokens, 0);
	same_tokens(&a, &full);
	/* Neither does evict with nothing to evict. */
	c = evicting(192, 0);
	a = run_and_drop_text(e, ask(e, 150, 40, &c));
	same_tokens(&a, &full);
	/* Nor merge with nothing to merge. */
	c = merging(192, 0);
	a = run_and_drop_text(e, ask(e, 150, 40, &c));
	assert_string_equal(a.usage.context.policy, "merge");
	assert_int_equal(a.usage.context.merged_tokens, 0);
	same_tokens(&a, &full);
	c = (struct engine_context){.policy = "evict", .start_size = -1, .by_share = true};
	a = run_and_drop_text(e, ask(e, 150, 40, &c));
	assert_string_equal(a.usage.context.policy, "evict");
	same_tokens(&a, &full);
	engine_destroy(e);
	/* Nor does reading all there is to read. */
	o.kv_bounds = true;
	e = start(&o);
	c = choosing(192);
	a = run_and_drop_text(e, ask(e, 150, 40, &c));
	assert_string_equal(a.usage.context.policy, "quest");
	assert_int_equal(a.usage.context.tokens_read, 189);
	same_tokens(&a, &full);
	engine_destroy(e);
}

static void what_is_kept_is_told_to_the_byte(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.kv_bytes = 24 * 4096;
	struct engine *e = start(&o);
	uint64_t page_bytes = engine_info(e)->page_bytes;
	/* One page of sinks and a window of 15 that moves by one. */
	struct engine_context c = streaming(-1, 0, 256);
	struct answer a = run_and_drop_text(e, ask(e, 300, 80, &c)), full = run_and_drop_text(e, ask(e, 300, 80, NULL));
	const struct engine_context_usage *u = &a.usage.context;
	assert_int_equal(u->tokens_logical, 379);
	assert_int_equal(u->tokens_logical, u->tokens_resident + u->evicted_tokens);
	assert_int_equal(u->tokens_resident, 15 * PAGE + 379 % PAGE);
	assert_int_equal(u->pages, 16);
	assert_int_equal(u->bytes, 16 * page_bytes);
	assert_memory_not_equal(a.logprobs, full.logprobs, 80 * sizeof *a.logprobs);
	struct engine_stats s;
	engine_stats(e, &s);
	assert_int_equal(s.context_requests[0], 1);
	assert_int_equal(s.context_requests[1], 1);
	assert_int_equal(s.context_evicted[1], u->evicted_tokens);
	assert_at_rest(e);
	engine_destroy(e);
}

static void an_answer_does_not_depend_on_steps_company_or_what_was_known(void **state)
{
	(void)state;
	const struct engine_context contexts[] = {streaming(4, 32, 0), evicting(112, 0), streaming(20, 160, 0),
						  evicting(0, 600),    weighing(112),	 weighing(0),
						  merging(112, 0),     merging(0, 500),	 choosing(96)};
	enum { N = sizeof contexts / sizeof *contexts };
	static struct answer alone[N], again[N], full;
	struct engine_options o = defaults();
	o.kv_bounds = true;
	struct engine *e = start(&o);
	for (int i = 0; i < N; i++) {
		alone[i] = run_and_drop_text(e, ask(e, 260, 60, &contexts[i]));
		const struct engine_context_usage *u = &alone[i].usage.context;
		assert_true(u->chooses ? u->tokens_read == 96 && u->tokens_resident == 319
				       : u->evicted_tokens + u->merged_tokens > 0);
		/* What it left in the index is exact, so it serves itself and others. */
		again[i] = run_and_drop_text(e, ask(e, 260, 60, &contexts[i]));
		assert_true(again[i].usage.cached_tokens >= 2 * PAGE);
		same_tokens(&again[i], &alone[i]);
	}
	full = run_and_drop_text(e, ask(e, 260, 60, NULL));
	assert_memory_not_equal(alone[N - 1].logprobs, full.logprobs, 60 * sizeof *full.logprobs);
	engine_destroy(e);
	/* In short steps; in long ones beside others; in a pool that holds a fraction of them. */
	for (int variant = 0; variant < 3; variant++) {
		uint64_t ids[N + 1];
		static struct answer together[N + 1];
		memset(together, 0, sizeof together);
		o = defaults();
		o.kv_bounds = true;
		o.max_running = 8;
		if (variant == 0)
			o.step_tokens = 8;
		if (variant == 2)
			o.kv_bytes = 23 * 4096;
		e = start(&o);
		for (int i = 0; i <= N; i++) {
			struct engine_request *r = ask(e, 260, 60, i > 0 ? &contexts[i - 1] : NULL);
			ids[i] = r->id;
			engine_submit(e, r);
		}
		await(e, ids, together, N + 1);
		for (int i = 0; i <= N; i++) {
			same_tokens(&together[i], i > 0 ? &alone[i - 1] : &full);
			buf_free(&together[i].text);
		}
		struct engine_stats s;
		engine_stats(e, &s);
		assert_true(variant != 2 || s.preemptions > 0);
		assert_at_rest(e);
		engine_destroy(e);
	}
}

static void a_session_goes_on_as_if_all_were_computed_again_under(struct engine_context c)
{
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	struct answer cold = run_and_drop_text(e, ask(e, 330, 20, &c));
	engine_destroy(e);
	e = start(&o);
	make_session(e, "s");
	struct engine_request *r = ask(e, 300, 0, &c);
	strcpy(r->session, "s");
	struct answer a = run_and_drop_text(e, r);
	assert_int_equal(a.usage.context.tokens_logical, 300);
	uint64_t id = engine_next_id(e);
	engine_session_get(e, id, 0, "s");
	struct engine_event *ev = reply(e, id);
	assert_string_equal(ev->sessions[0].policy, c.policy);
	assert_int_equal(ev->sessions[0].n_logical, 300);
	assert_int_equal(ev->sessions[0].n_tokens, a.usage.context.tokens_resident);
	assert_int_equal(ev->sessions[0].n_pages, a.usage.context.pages);
	engine_event_free(ev);
	r = ask(e, 330, 20, &c);
	strcpy(r->session, "s");
	a = run_and_drop_text(e, r);
	assert_int_equal(a.usage.cached_tokens, 300);
	same_tokens(&a, &cold);
	struct engine_stats s;
	engine_stats(e, &s);
	assert_int_equal(s.parked_resumed, 1);
	assert_true(s.parked_pages > 0);
	/* It ends with its session. */
	id = engine_next_id(e);
	engine_session_delete(e, id, 0, "s");
	engine_event_free(reply(e, id));
	engine_stats(e, &s);
	assert_int_equal(s.parked_pages, 0);
	assert_at_rest(e);
	engine_destroy(e);
}

static void a_session_goes_on_as_if_all_were_computed_again(void **state)
{
	(void)state;
	a_session_goes_on_as_if_all_were_computed_again_under(streaming(4, 64, 0));
	a_session_goes_on_as_if_all_were_computed_again_under(merging(128, 0));
}

/* Each token of the conversation has KV of its own or shares it. */
static void what_is_merged_is_told(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	struct answer none = run_and_drop_text(e, ask(e, 400, 60, NULL));
	for (int i = 0; i < 2; i++) {
		struct engine_context c = i ? merging(0, 500) : merging(128, 0);
		struct answer a = run_and_drop_text(e, ask(e, 400, 60, &c));
		const struct engine_context_usage *u = &a.usage.context;
		assert_string_equal(u->policy, "merge");
		assert_int_equal(u->tokens_logical, 459);
		assert_int_equal(u->evicted_tokens, 0);
		assert_true(i ? u->tokens_resident < 459 / 2 + 8 * PAGE : u->tokens_resident <= 128);
		/* Those that share theirs are at least two to one. */
		assert_true(u->merged_tokens > 459 - u->tokens_resident && u->merged_tokens <= 459 - PAGE - 2 * PAGE);
		assert_true(u->merged_tokens <= 2 * (459 - u->tokens_resident));
		assert_true(u->bytes > (uint64_t)u->pages * 4096 &&
			    u->bytes < (uint64_t)u->pages * 4096 + 32 * (uint64_t)u->tokens_resident);
		assert_memory_not_equal(a.logprobs, none.logprobs, 60 * sizeof *a.logprobs);
		for (int k = 0; k < 60; k++)
			assert_true(isfinite(a.logprobs[k]));
	}
	struct engine_stats s;
	engine_stats(e, &s);
	assert_true(s.context_merged[4] > 0 && s.context_evicted[4] == 0);
	assert_string_equal(engine_context_policy(4), "merge");
	assert_at_rest(e);
	engine_destroy(e);
	o.kv_type = "int8";
	e = start(&o);
	struct engine_context c = merging(128, 0);
	struct answer a = run(e, ask(e, 200, 10, &c));
	assert_int_equal(a.error.status, STATUS_INVALID);
	assert_string_equal(a.error.param, "kv_cache.policy");
	assert_non_null(strstr(a.error.message, "bf16"));
	engine_destroy(e);
}

static void refused(struct engine *e, struct engine_context c, const char *param, const char *says);

static struct engine_context recalling(int32_t most)
{
	struct engine_context c = streaming(4, 0, most);
	c.page_in = true;
	return c;
}

static void what_left_the_window_comes_back_for_the_answer(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.kv_bounds = true;
	o.kv_ram_bytes = 64 * 4096;
	struct engine *e = start(&o);
	struct engine_context c = recalling(512), window = streaming(4, 0, 112);
	/* With nothing to drop there is nothing to bring back. */
	struct answer full = run_and_drop_text(e, ask(e, 200, 40, NULL)), a = run_and_drop_text(e, ask(e, 200, 40, &c));
	same_tokens(&a, &full);
	assert_true(a.usage.context.pages_in && a.usage.context.pages_below == 0);
	/* Of 144: a page that stays, 6 of the window, and 2 that come back. */
	c = recalling(144);
	a = run_and_drop_text(e, ask(e, 360, 60, &c));
	const struct engine_context_usage *u = &a.usage.context;
	assert_int_equal(u->pages_back, 2);
	assert_int_equal(u->evicted_tokens, (u->pages_below - u->pages_back) * PAGE);
	assert_int_equal(u->pages_missing, 0);
	assert_true(u->tokens_resident <= 144 && u->tokens_resident > 112);
	assert_int_equal(u->tokens_logical, u->tokens_resident + u->evicted_tokens);
	struct answer plain = run_and_drop_text(e, ask(e, 360, 60, &window)),
		      again = run_and_drop_text(e, ask(e, 360, 60, &c));
	assert_memory_not_equal(a.logprobs, plain.logprobs, 60 * sizeof *a.logprobs);
	same_tokens(&again, &a);
	/* Short steps, company and a session's turn in between change nothing. */
	make_session(e, "s");
	struct engine_request *r = ask(e, 300, 0, &c);
	strcpy(r->session, "s");
	run_and_drop_text(e, r);
	struct engine_stats s;
	engine_stats(e, &s);
	assert_true(s.attic_kept > 0 && s.attic_back >= 4 && s.attic_lost == 0 && s.attic_bytes > 0);
	r = ask(e, 360, 60, &c);
	strcpy(r->session, "s");
	again = run_and_drop_text(e, r);
	assert_int_equal(again.usage.cached_tokens, 300);
	assert_true(again.usage.context.pages_back == 2);
	/* A turn without an answer has use for nothing. */
	same_tokens(&again, &a);
	uint64_t id = engine_next_id(e);
	engine_session_delete(e, id, 0, "s");
	engine_event_free(reply(e, id));
	/* Nothing of it is left. */
	engine_stats(e, &s);
	assert_true(s.attic_bytes == 0);
	assert_int_equal(s.parked_pages, 0);
	assert_at_rest(e);
	engine_destroy(e);
	o.step_tokens = 8;
	o.kv_bytes = 40 * (4096 + 256);
	e = start(&o);
	uint64_t ids[3];
	static struct answer together[3];
	memset(together, 0, sizeof together);
	for (int i = 0; i < 3; i++) {
		r = ask(e, 360, 60, &c);
		ids[i] = r->id;
		engine_submit(e, r);
	}
	await(e, ids, together, 3);
	for (int i = 0; i < 3; i++) {
		same_tokens(&together[i], &a);
		buf_free(&together[i].text);
	}
	engine_destroy(e);
	o = defaults();
	o.kv_bounds = true;
	o.kv_ram_bytes = 4 * 4096;
	e = start(&o);
	refused(e, (struct engine_context){.policy = "evict", .start_size = -1, .max_cache_size = 128, .page_in = true},
		"kv_cache.page_in", "streaming");
	refused(e, recalling(48), "kv_cache.max_cache_size", "64");
	engine_destroy(e);
	o.kv_ram_bytes = 0;
	e = start(&o);
	refused(e, c, "kv_cache.page_in", "--kv-ram");
	engine_destroy(e);
}

/* What a tier that is too small drops is computed again, to the bit as it was: the answer is that of a large one. */
static void what_the_tier_lost_is_computed_again(void **state)
{
	(void)state;
	enum { N = 360, ANSWER = 40 };
	static struct answer whole, a, together[4];
	/* Of 144 a page that stays, 3 of the window, and 5 that come back. */
	struct engine_context c = streaming(4, 48, 144);
	struct engine_options o = defaults();
	c.page_in = true;
	c.recall_every = -1;
	c.recompute_tokens = 1 << 20;
	o.kv_bounds = true;
	o.kv_ram_bytes = 64 * 4096;
	struct engine *e = start(&o);
	whole = run_and_drop_text(e, ask(e, N, ANSWER, &c));
	assert_int_equal(whole.usage.context.pages_recomputed, 0);
	assert_int_equal(whole.usage.context.recalls, 1);
	engine_destroy(e);
	/* In long steps, in short ones, in a pool that has room for both sequences and not a page more. */
	for (int variant = 0; variant < 3; variant++) {
		o = defaults();
		o.kv_bounds = true;
		o.kv_ram_bytes = 6 * 4096;
		if (variant == 1)
			o.step_tokens = 8;
		if (variant == 2)
			o.kv_bytes = 14 * (4096 + 256);
		e = start(&o);
		a = run_and_drop_text(e, ask(e, N, ANSWER, &c));
		const struct engine_context_usage *u = &a.usage.context;
		same_tokens(&a, &whole);
		assert_int_equal(u->pages_back, 5);
		assert_in_range(u->pages_recomputed, 1, 5);
		assert_true(u->pages_missing > 0);
		/* What the index still knows, at most up to where the policy acted first, is not computed again. */
		assert_in_range(u->tokens_recomputed, PAGE, N - 48 - (variant == 2 ? 0 : 64));
		assert_int_equal(u->tokens_recomputed % PAGE, 0);
		assert_true(u->tokens_resident <= 144);
		struct engine_stats s;
		engine_stats(e, &s);
		assert_int_equal(s.attic_again, u->pages_recomputed);
		assert_int_equal(s.attic_again_tokens, u->tokens_recomputed);
		assert_int_equal(s.attic_choices, 1);
		assert_at_rest(e);
		/* So it is for a session's turn, whose pages left while another one was read. */
		make_session(e, "s");
		for (int32_t n = N - 60; n <= N; n += 60) {
			struct engine_request *r = ask(e, n, n == N ? ANSWER : 0, &c);
			strcpy(r->session, "s");
			a = run_and_drop_text(e, r);
		}
		same_tokens(&a, &whole);
		assert_int_equal(a.usage.cached_tokens, N - 60);
		assert_true(u->pages_recomputed > 0);
		uint64_t id = engine_next_id(e);
		engine_session_delete(e, id, 0, "s");
		engine_event_free(reply(e, id));
		assert_at_rest(e);
		/* Nobody else finds anything of it: what is exact comes out as ever. */
		struct answer exact = run_and_drop_text(e, ask(e, 200, 20, NULL));
		assert_true(exact.usage.cached_tokens <= 144);
		engine_destroy(e);
	}
	/* Beside others, who make each other begin anew; two leave while pages are computed for them, or before. */
	o = defaults();
	o.kv_bounds = true;
	o.kv_ram_bytes = 30 * 4096; /* with bounds of what all of them drop, but not the pages */
	o.step_tokens = 16;
	o.kv_bytes = 24 * (4096 + 256);
	e = start(&o);
	uint64_t ids[4];
	memset(together, 0, sizeof together);
	for (int i = 0; i < 4; i++) {
		struct engine_request *r = ask(e, N, ANSWER, &c);
		ids[i] = r->id;
		engine_submit(e, r);
	}
	await(e, ids, together, 4);
	for (int i = 0; i < 4; i++) {
		same_tokens(&together[i], &whole);
		buf_free(&together[i].text);
	}
	assert_at_rest(e);
	engine_destroy(e);
	/* What it may take is bounded, also where there is no room for it; the answer goes on without those pages. */
	for (int variant = 0; variant < 2; variant++) {
		o = defaults();
		o.kv_bounds = true;
		o.kv_ram_bytes = 6 * 4096;
		c.recompute_tokens = variant ? 1 << 20 : -1;
		if (variant)
			o.kv_bytes = 11 * (4096 + 256);
		e = start(&o);
		a = run_and_drop_text(e, ask(e, N, ANSWER, &c));
		assert_int_equal(a.usage.context.pages_recomputed + a.usage.context.tokens_recomputed, 0);
		assert_true(a.usage.context.pages_missing > 0 && a.n_tokens == ANSWER);
		engine_destroy(e);
	}
}

static void diagnostics_change_nothing_and_tell_how_far_it_is_from_exact(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.kv_bounds = true;
	struct engine *e = start(&o);
	struct engine_context c = choosing(96);
	struct answer plain = run_and_drop_text(e, ask(e, 260, 60, &c));
	assert_false(plain.usage.context.diagnostics.wanted);
	c.diagnostics = true;
	struct answer told = run_and_drop_text(e, ask(e, 260, 60, &c));
	const struct engine_diagnostics *d = &told.usage.context.diagnostics;
	same_tokens(&told, &plain);
	assert_true(d->wanted && d->n_rows > 0 && d->n_rows % 59 == 0);
	assert_int_equal(d->n_samples, (59 + DRIFT_EVERY - 1) / DRIFT_EVERY);
	assert_true(d->drift > 0 && d->drift <= d->drift_most && d->drift_most < 0.6932);
	assert_true(d->entropy > 0 && d->entropy <= log(96) && d->largest >= 1.0 / 96 && d->largest < 1);
	/* What reads all is exact; other policies have nothing to compare with. */
	c.max_cache_size = 512;
	told = run_and_drop_text(e, ask(e, 260, 60, &c));
	assert_int_equal(d->n_samples, 0);
	assert_true(d->entropy > 0);
	c = streaming(4, 64, 0);
	c.diagnostics = true;
	told = run_and_drop_text(e, ask(e, 260, 60, &c));
	assert_true(d->n_samples == 0 && d->entropy > 0 && d->entropy <= log(80));
	c = (struct engine_context){.policy = "full", .start_size = -1, .diagnostics = true};
	told = run_and_drop_text(e, ask(e, 260, 60, &c));
	assert_true(d->n_rows > 0 && d->n_samples == 0);
	engine_destroy(e);
}

static void divergence_is_symmetric_and_bounded(void **state)
{
	(void)state;
	const float p[] = {0.5f, 0.5f, 0, 0}, q[] = {0, 0, 0.25f, 0.75f}, r[] = {0.25f, 0.25f, 0.5f, 0};
	assert_true(drift_divergence(p, p, 4) == 0);
	assert_true(fabs(drift_divergence(p, q, 4) - log(2)) < 1e-12);
	/* 0.5 (ln 4/3) + 0.5 (0.5 ln 2/3 + 0.5 ln 2) */
	assert_true(fabs(drift_divergence(p, r, 4) - 0.5 * (log(4.0 / 3) + 0.5 * log(2.0 / 3) + 0.5 * log(2))) < 1e-12);
	assert_true(fabs(drift_divergence(r, p, 4) - drift_divergence(p, r, 4)) < 1e-15);
}

static void beyond_the_trained_length_the_first_tokens_move(void **state)
{
	(void)state;
	const struct engine_context c = streaming(20, 96, 0);
	static struct answer once, again;
	struct engine_options o = defaults();
	o.context_tokens = 4 * CONTEXT;
	o.kv_bytes = 20 * 4096;
	o.context_policy = "streaming";
	o.max_cache_size = 128;
	struct engine *e = start(&o);
	/* As long as it is not: nothing moves. */
	once = run_and_drop_text(e, ask(e, CONTEXT - 40, 8, &c));
	assert_int_equal(once.usage.context.moved, 0);
	once = run_and_drop_text(e, ask(e, 3 * CONTEXT, 60, &c));
	assert_int_equal(once.usage.context.tokens_logical, 3 * CONTEXT + 59);
	assert_true(once.usage.context.moved >= 3 * CONTEXT + 60 - CONTEXT);
	assert_true(once.usage.context.tokens_resident <= 128);
	for (int32_t i = 0; i < 60; i++)
		assert_true(isfinite(once.logprobs[i]));
	engine_destroy(e);
	/* In short steps, beside others, and in two turns of a session. */
	o.step_tokens = 8;
	o.max_running = 4;
	e = start(&o);
	uint64_t ids[3];
	static struct answer together[3];
	memset(together, 0, sizeof together);
	for (int i = 0; i < 3; i++) {
		struct engine_request *r = ask(e, 3 * CONTEXT, 60, &c);
		ids[i] = r->id;
		engine_submit(e, r);
	}
	await(e, ids, together, 3);
	for (int i = 0; i < 3; i++) {
		same_tokens(&together[i], &once);
		buf_free(&together[i].text);
	}
	make_session(e, "s");
	for (int32_t n = 2 * CONTEXT; n <= 3 * CONTEXT; n += CONTEXT) {
		struct engine_request *r = ask(e, n, n == 3 * CONTEXT ? 60 : 0, &c);
		strcpy(r->session, "s");
		again = run_and_drop_text(e, r);
	}
	assert_int_equal(again.usage.cached_tokens, 2 * CONTEXT);
	same_tokens(&again, &once);
	uint64_t id = engine_next_id(e);
	engine_session_delete(e, id, 0, "s");
	engine_event_free(reply(e, id));
	assert_at_rest(e);
	engine_destroy(e);
}

static void all_is_kept_up_to_the_trigger(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	struct engine_context c = streaming(4, 32, 0);
	c.trigger_tokens = 200;
	struct answer a = run_and_drop_text(e, ask(e, 190, 18, &c));
	assert_int_equal(a.usage.context.evicted_tokens, 0);
	a = run_and_drop_text(e, ask(e, 190, 30, &c));
	assert_int_equal(a.usage.context.tokens_resident, 2 * PAGE + 219 % PAGE);
	engine_destroy(e);
}

/* The same request, that knows from the beginning how many tokens there are when its policy acts. */
static struct answer known_from_the_beginning(struct engine *e, const struct engine_context *open, int32_t n,
					      int32_t max_tokens, int32_t acts)
{
	struct engine_context c = *open;
	c.trigger_free_pages = 0;
	c.trigger_entropy = 0;
	c.trigger_tokens = acts;
	struct answer a = run_and_drop_text(e, ask(e, n, max_tokens, &c));
	assert_int_equal(a.usage.context.trigger, ENGINE_TRIGGER_TOKENS);
	assert_int_equal(a.usage.context.trigger_tokens, acts);
	return a;
}

static int32_t whole_pages(int32_t tokens)
{
	return (tokens + PAGE - 1) / PAGE * PAGE;
}

static void a_policy_acts_when_pages_run_short(void **state)
{
	(void)state;
	enum { PAGES = 24, FREE = 6 };
	struct engine_context all[] = {streaming(4, 64, 0), evicting(112, 0), evicting(96, 600), weighing(80),
				       merging(112, 0)};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		static struct answer full, a, again;
		struct engine_options o = defaults();
		struct engine_context *c = &all[i];
		c->trigger_free_pages = FREE;
		struct engine *roomy = start(&o);
		full = run_and_drop_text(roomy, ask(roomy, 320, 80, NULL));
		a = run_and_drop_text(roomy, ask(roomy, 320, 80, c));
		assert_true(a.usage.context.trigger_asked);
		assert_int_equal(a.usage.context.trigger, ENGINE_TRIGGER_NONE);
		assert_int_equal(a.usage.context.evicted_tokens, 0);
		same_tokens(&a, &full);
		/* Longer than the pool, of which FREE pages are to stay free. */
		o.kv_bytes = PAGES * 4096;
		struct engine *e = start(&o);
		make_session(e, "s");
		struct engine_request *r = ask(e, 320, 80, c);
		strcpy(r->session, "s");
		a = run_and_drop_text(e, r);
		const struct engine_context_usage *u = &a.usage.context;
		assert_int_equal(u->trigger, ENGINE_TRIGGER_FREE_PAGES);
		assert_in_range(u->trigger_tokens, (PAGES - FREE - 2) * PAGE, (PAGES - FREE) * PAGE);
		assert_true(u->evicted_tokens + u->merged_tokens > 0);
		int32_t acts = whole_pages(u->trigger_tokens) + (c->by_mass ? PAGE : 0);
		again = known_from_the_beginning(roomy, c, 320, 80, acts);
		same_tokens(&a, &again);
		/* It stays set off: the next turn goes on from there. */
		r = ask(e, 320, 1, c);
		char *text = text_of(360, 5);
		free(r->text);
		r->text = text;
		r->text_n = 360;
		strcpy(r->session, "s");
		r->max_tokens = 20;
		again = run_and_drop_text(e, r);
		if (again.usage.context.evicted_tokens > 0 && again.usage.cached_tokens > 319)
			assert_int_equal(again.usage.context.trigger_tokens, u->trigger_tokens);
		struct engine_stats s;
		engine_stats(e, &s);
		assert_true(s.context_triggered[ENGINE_TRIGGER_FREE_PAGES] >= 1);
		engine_destroy(e);
		engine_destroy(roomy);
	}
}

static void a_policy_acts_when_attention_narrows(void **state)
{
	(void)state;
	struct engine_context all[] = {streaming(4, 64, 0), evicting(112, 0), weighing(112), merging(112, 0),
				       choosing(96)};
	enum { N = 260, ANSWER = 90 };
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		static struct answer full, a, again;
		struct engine_options o = defaults();
		struct engine_context c = all[i];
		o.kv_bounds = true;
		struct engine *e = start(&o);
		full = run_and_drop_text(e, ask(e, N, ANSWER, NULL));
		/* No row's weights are so few. */
		c.trigger_entropy = 0.001;
		a = run_and_drop_text(e, ask(e, N, ANSWER, &c));
		assert_int_equal(a.usage.context.trigger, ENGINE_TRIGGER_NONE);
		assert_false(a.usage.context.diagnostics.wanted);
		same_tokens(&a, &full);
		/* None has so many: it fires as soon as there are enough tokens to tell. */
		c.trigger_entropy = 19;
		a = run_and_drop_text(e, ask(e, N, ANSWER, &c));
		assert_int_equal(a.usage.context.trigger, ENGINE_TRIGGER_ENTROPY);
		assert_int_equal(a.usage.context.trigger_tokens, N + TRIGGER_WINDOW);
		assert_memory_not_equal(a.logprobs, full.logprobs, ANSWER * sizeof *a.logprobs);
		again = known_from_the_beginning(e, &c, N, ANSWER,
						 whole_pages(N + TRIGGER_WINDOW) + (c.by_mass ? PAGE : 0));
		same_tokens(&a, &again);
		/* Whichever comes first. */
		c.trigger_tokens = 200;
		c.trigger_free_pages = c.policy[0] == 'q' ? 0 : 20;
		again = run_and_drop_text(e, ask(e, N, ANSWER, &c));
		assert_int_equal(again.usage.context.trigger, ENGINE_TRIGGER_TOKENS);
		engine_destroy(e);
		/* Set back for others, in short steps beside them: the same. */
		c.trigger_tokens = c.trigger_free_pages = 0;
		o.kv_bytes = 30 * 4096;
		o.step_tokens = 8;
		o.max_running = 4;
		e = start(&o);
		uint64_t ids[3];
		static struct answer together[3];
		memset(together, 0, sizeof together);
		for (int k = 0; k < 3; k++) {
			struct engine_request *r = ask(e, N, ANSWER, &c);
			ids[k] = r->id;
			engine_submit(e, r);
		}
		await(e, ids, together, 3);
		for (int k = 0; k < 3; k++) {
			same_tokens(&together[k], &a);
			assert_int_equal(together[k].usage.context.trigger_tokens, N + TRIGGER_WINDOW);
			buf_free(&together[k].text);
		}
		engine_destroy(e);
	}
}

static void evict_removes_the_share_that_was_asked_for(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	struct answer none = run_and_drop_text(e, ask(e, 400, 60, NULL));
	for (int32_t permille = 200; permille <= 800; permille += 300) {
		struct engine_context c = evicting(0, permille);
		struct answer a = run_and_drop_text(e, ask(e, 400, 60, &c));
		const struct engine_context_usage *u = &a.usage.context;
		/* It acts each 8 pages; what was added since then is still there. */
		assert_in_range(u->evicted_tokens, (459 - 8 * PAGE) * permille / 1000, 459 * permille / 1000 + PAGE);
		assert_int_equal(u->tokens_resident, 459 - u->evicted_tokens);
		assert_memory_not_equal(a.logprobs, none.logprobs, 60 * sizeof *a.logprobs);
	}
	/* By worth and by age are two choices, and the latter is a window. */
	struct engine_context worth = evicting(272, 0), age = evicting(272, 0), window = streaming(4, 256, 0);
	age.by_age = true;
	struct answer a = run_and_drop_text(e, ask(e, 400, 60, &worth)),
		      b = run_and_drop_text(e, ask(e, 400, 60, &age)),
		      s = run_and_drop_text(e, ask(e, 400, 60, &window));
	assert_int_equal(a.usage.context.tokens_resident, b.usage.context.tokens_resident);
	assert_memory_not_equal(a.logprobs, b.logprobs, 60 * sizeof *a.logprobs);
	same_tokens(&b, &s);
	/* By attention is a third. */
	struct engine_context mass = weighing(272);
	s = run_and_drop_text(e, ask(e, 400, 60, &mass));
	assert_int_equal(s.usage.context.tokens_resident, a.usage.context.tokens_resident);
	assert_memory_not_equal(a.logprobs, s.logprobs, 60 * sizeof *a.logprobs);
	assert_memory_not_equal(b.logprobs, s.logprobs, 60 * sizeof *a.logprobs);
	engine_destroy(e);
}

/* A narrow cache has no pages that could be weighed. */
static void what_cannot_be_weighed_goes_by_age(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.kv_type = "int8";
	struct engine *e = start(&o);
	struct engine_context c = evicting(128, 0);
	struct answer a = run(e, ask(e, 200, 10, &c));
	assert_int_equal(a.error.status, STATUS_INVALID);
	assert_string_equal(a.error.param, "kv_cache.aggregation");
	assert_non_null(strstr(a.error.message, "attention_mass"));
	c.by_age = true;
	a = run_and_drop_text(e, ask(e, 200, 10, &c));
	assert_true(a.usage.context.evicted_tokens > 0);
	c = weighing(128);
	a = run_and_drop_text(e, ask(e, 200, 10, &c));
	assert_true(a.usage.context.evicted_tokens > 0);
	engine_destroy(e);
}

/* The length of a conversation is then bounded by the model, and not by memory. */
static void a_conversation_is_longer_than_the_cache(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.kv_bytes = 12 * 4096;
	struct engine *e = start(&o);
	assert_int_equal(engine_info(e)->n_ctx, 12 * PAGE);
	assert_int_equal(engine_info(e)->n_ctx_long, CONTEXT);
	struct engine_context c = streaming(4, 128, 0);
	struct answer a = run_and_drop_text(e, ask(e, 300, CONTEXT - 300, &c));
	assert_int_equal(a.n_tokens, CONTEXT - 300);
	a = run(e, ask(e, 300, 10, NULL));
	assert_int_equal(a.error.status, STATUS_CONTEXT_LENGTH);
	a = run(e, ask(e, 300, CONTEXT - 299, &c));
	assert_int_equal(a.error.status, STATUS_CONTEXT_LENGTH);
	engine_destroy(e);
	/* The daemon's own default can be one, with a context that it need not hold. */
	o.context_tokens = CONTEXT;
	o.context_policy = "streaming";
	o.max_cache_size = 128;
	e = start(&o);
	a = run_and_drop_text(e, ask(e, 300, 20, NULL));
	assert_string_equal(a.usage.context.policy, "streaming");
	assert_int_equal(a.usage.context.pages, 8);
	engine_destroy(e);
}

/* Thirty-two thousand tokens in a pool that has room for two thousand and the page that is written. */
static void a_conversation_of_32k_tokens_takes_what_its_window_takes(void **state)
{
	(void)state;
	enum { LONG = 32768, KEPT = 2048 };
	char path[64];
	struct engine_options o = defaults();
	assert_true(tiny_model_write(path, LONG, tiny_chat_template, 1));
	o.model_path = path;
	o.device = "cpu";
	o.kv_bytes = (KEPT / PAGE + 1) * 4096;
	struct engine *e = start(&o);
	assert_int_equal(engine_info(e)->n_pages, KEPT / PAGE + 1);
	struct engine_context c = streaming(4, 0, KEPT);
	make_session(e, "s");
	for (int32_t n = LONG / 2; n <= LONG - 100; n += LONG / 2 - 100) {
		struct engine_request *r = ask(e, n, 100, &c);
		strcpy(r->session, "s");
		struct answer a = run_and_drop_text(e, r);
		assert_int_equal(a.usage.context.tokens_logical, n + 99);
		assert_in_range(a.usage.context.tokens_resident, KEPT - 256, KEPT);
		assert_true(a.usage.context.bytes <= (uint64_t)(KEPT / PAGE) * engine_info(e)->page_bytes);
	}
	engine_destroy(e);
	unlink(path);
}

static void refused(struct engine *e, struct engine_context c, const char *param, const char *says)
{
	struct answer a = run(e, ask(e, 100, 10, &c));
	assert_int_equal(a.error.status, STATUS_INVALID);
	assert_string_equal(a.error.param, param);
	if (!strstr(a.error.message, says))
		fail_msg("%s", a.error.message);
}

static void what_cannot_be_is_refused_with_what_can(void **state)
{
	(void)state;
	struct engine_options o = defaults();
	o.max_cache_size = 256;
	o.kv_bytes = 40 * 4096;
	struct engine *e = start(&o);
	refused(e, (struct engine_context){.policy = "full", .start_size = -1, .max_cache_size = 64},
	        "kv_cache.max_cache_size", "full");
	refused(e, (struct engine_context){.start_size = 4}, "kv_cache.start_size", "full");
	refused(e, streaming(4, 31, 0), "kv_cache.recent_size", "32");
	refused(e, streaming(4, 0, 47), "kv_cache.max_cache_size", "48");
	refused(e, streaming(20, 64, 80), "kv_cache.recent_size", "32 and 64");
	refused(e, streaming(4, 0, 512), "kv_cache.max_cache_size", "--max-cache-size");
	struct engine_context c = streaming(4, 64, 0);
	c.trigger_tokens = 32;
	refused(e, c, "kv_cache.trigger.tokens", "80");
	c.trigger_tokens = 300;
	refused(e, c, "kv_cache.trigger.tokens", "256");
	c.trigger_tokens = 0;
	c.trigger_entropy = 1;
	refused(e, c, "kv_cache.trigger", "\"tokens\" as well");
	c = streaming(4, 0, 128);
	c.trigger_tokens = 128;
	c.trigger_free_pages = 40;
	refused(e, c, "kv_cache.trigger.free_pages", "less than the 40 pages");
	c = weighing(128);
	c.trigger_tokens = 128;
	c.trigger_free_pages = 1;
	refused(e, c, "kv_cache.trigger.free_pages", "more than 1");
	refused(e, (struct engine_context){.start_size = -1, .trigger_entropy = 1}, "kv_cache.trigger", "full");
	refused(e, evicting(40, 0), "kv_cache.max_cache_size", "40");
	refused(e, evicting(512, 0), "kv_cache.max_cache_size", "--max-cache-size");
	refused(e,
	        (struct engine_context){.policy = "streaming",
	                                .start_size = -1,
	                                .recent_size = 64,
	                                .by_share = true,
	                                .shrink_permille = 300},
	        "kv_cache.cache_length_shrink_ratio", "evict");
	refused(e, (struct engine_context){.start_size = -1, .by_age = true}, "kv_cache.aggregation", "full");
	refused(e, streaming(INT32_MAX, INT32_MAX, INT32_MAX), "kv_cache.recent_size", "more than");
	/* The server's size serves whoever gives none. */
	c = streaming(-1, 0, 0);
	struct answer a = run_and_drop_text(e, ask(e, 300, 10, &c));
	assert_true(a.usage.context.tokens_resident <= 256);
	engine_destroy(e);
	o.max_cache_size = 0;
	e = start(&o);
	refused(e, streaming(4, 0, 0), "kv_cache.max_cache_size", "needs");
	refused(e, streaming(4, 0, 4096), "kv_cache.max_cache_size", "640");
	refused(e, (struct engine_context){.policy = "evict", .start_size = -1}, "kv_cache.max_cache_size",
	        "cache_length_shrink_ratio");
	refused(e, (struct engine_context){.policy = "merge", .start_size = -1}, "kv_cache.max_cache_size",
		"\"merge\" needs max_cache_size");
	refused(e, merging(640, 0), "kv_cache.max_cache_size", "a page more than the 40");
	c = merging(128, 0);
	c.by_mass = true;
	refused(e, c, "kv_cache.aggregation", "whatever they are worth");
	refused(e, choosing(64), "kv_cache.policy", "--kv-bounds");
	engine_destroy(e);
	o.kv_bounds = true;
	e = start(&o);
	refused(e, choosing(0), "kv_cache.max_cache_size", "needs");
	refused(e, choosing(32), "kv_cache.max_cache_size", "16 and 16");
	struct engine_context q = choosing(64);
	q.trigger_tokens = 48;
	refused(e, q, "kv_cache.trigger.tokens", "64");
	q.trigger_tokens = 0;
	q.trigger_free_pages = 10;
	refused(e, q, "kv_cache.trigger.free_pages", "\"entropy\"");
	q.trigger_free_pages = 0;
	q.by_age = true;
	refused(e, q, "kv_cache.aggregation", "evict");
	engine_destroy(e);
	struct error err;
	o.context_policy = "streaming";
	assert_int_equal(engine_create(&o, &e, &err), STATUS_INVALID);
	assert_string_equal(err.param, "max-cache-size");
	o.context_policy = "least";
	assert_int_equal(engine_create(&o, &e, &err), STATUS_INVALID);
	assert_string_equal(err.param, "context-policy");
}

/* ---- Whole turns ---- */

struct said {
	const char *role;
	int32_t n; /* characters */
	int32_t turn;
};

/* A message takes its characters and, by the tiny template, 3 tokens and its role. */
static struct engine_request *chat(struct engine *e, const struct said *said, size_t n, int32_t max_tokens,
                                   bool may_drop)
{
	struct engine_request *r = engine_request_create(e);
	struct arena *a = r->arena = arena_create(1 << 20);
	struct value *list = value_list(a);
	r->input = ENGINE_INPUT_CHAT;
	r->chat = value_dict(a);
	r->max_tokens = max_tokens;
	r->sampling.temperature = 0;
	r->ignore_eos = r->want_prompt = true;
	r->turn_of = may_drop ? malloc(n * sizeof *r->turn_of) : NULL;
	r->n_turn_of = n;
	for (size_t i = 0; i < n; i++) {
		struct value *m = value_dict(a);
		char *text = text_of(said[i].n, (unsigned)i + 1);
		value_dict_set(a, m, "role", 4, value_string(a, said[i].role, strlen(said[i].role), VALUE_DATA));
		value_dict_set(a, m, "content", 7, value_string(a, text, (size_t)said[i].n, VALUE_DATA));
		assert_true(value_list_add(a, list, m));
		free(text);
		if (may_drop)
			r->turn_of[i] = said[i].turn;
	}
	value_dict_set(a, r->chat, "messages", 8, list);
	value_dict_set(a, r->chat, "add_generation_prompt", 21, value_bool(a, true));
	return r;
}

static struct answer run_chat(struct engine *e, struct engine_request *r, int32_t *turns_dropped)
{
	struct answer a = {0};
	uint64_t id = r->id;
	engine_submit(e, r);
	while (!a.ended) {
		struct list events;
		list_init(&events);
		assert_true(engine_wait(e, &events, 60000));
		for (struct list *l; (l = list_pop_front(&events));) {
			struct engine_event *ev = list_entry(l, struct engine_event, link);
			assert_int_equal(ev->request_id, id);
			if (ev->type == ENGINE_EVENT_PROMPT)
				*turns_dropped = ev->turns_dropped;
			take(&a, ev);
			engine_event_free(ev);
		}
	}
	buf_free(&a.text);
	return a;
}

static void turns_are_left_out_as_few_as_it_takes_and_never_the_last(void **state)
{
	(void)state;
	const struct said said[] = {{"system", 40, -1},   {"user", 60, 0},      {"assistant", 30, 0}, {"user", 50, 1},
	                            {"tool", 20, 1},      {"assistant", 30, 1}, {"system", 5, -1},    {"user", 70, 2},
	                            {"assistant", 40, 2}, {"user", 45, 3}};
	enum { N = sizeof said / sizeof *said, TURNS = 4 };
	struct engine_options o = defaults();
	struct engine *e = start(&o);
	int32_t dropped = -1;
	/* What the prompt takes without the k oldest turns, and what it is. */
	int32_t length[TURNS];
	static struct answer rest[TURNS];
	for (int32_t k = 0; k < TURNS; k++) {
		struct said left[N];
		size_t n = 0;
		for (size_t i = 0; i < N; i++)
			if (said[i].turn < 0 || said[i].turn >= k)
				left[n++] = said[i];
		struct engine_request *r = chat(e, left, n, 1, false);
		rest[k] = run_chat(e, r, &dropped);
		assert_int_equal(dropped, 0);
		length[k] = rest[k].usage.prompt_tokens;
		assert_true(k == 0 || length[k] < length[k - 1]);
	}
	/* max_tokens decides how much room there is. */
	for (int32_t k = 0; k < TURNS; k++) {
		struct answer a = run_chat(e, chat(e, said, N, CONTEXT - length[k], true), &dropped);
		assert_int_equal(a.error.status, STATUS_OK);
		assert_int_equal(dropped, k);
		assert_int_equal(a.usage.prompt_tokens, length[k]);
		if (k == 0)
			continue;
		a = run_chat(e, chat(e, said, N, CONTEXT - length[k] + 1, true), &dropped);
		if (k < TURNS - 1) {
			assert_int_equal(dropped, k + 1);
			assert_int_equal(a.usage.prompt_tokens, length[k + 1]);
		} else {
			/* Nothing is left to leave out. */
			assert_int_equal(a.error.status, STATUS_CONTEXT_LENGTH);
		}
	}
	/* Who did not ask for it is refused. */
	struct answer a = run_chat(e, chat(e, said, N, CONTEXT - length[1], false), &dropped);
	assert_int_equal(a.error.status, STATUS_CONTEXT_LENGTH);
	/* Without max_tokens an eighth of the context is for the answer. */
	const struct said long_ones[] = {{"user", 200, 0}, {"assistant", 100, 0}, {"user", 180, 1}};
	a = run_chat(e, chat(e, long_ones, 3, -1, true), &dropped);
	assert_int_equal(dropped, 1);
	assert_true(a.usage.completion_tokens >= CONTEXT / 8);
	engine_destroy(e);
}

/* Where messages begin is seen in the prompt: evict keeps these pages, and those of the system message, to the last. */
static void turns_are_found_by_the_token_that_begins_them(void **state)
{
	(void)state;
	struct gguf *g;
	struct tokenizer *t;
	assert_int_equal(gguf_open(model_path, &g, NULL), STATUS_OK);
	assert_int_equal(tokenizer_create(g, &t, NULL), STATUS_OK);
	int32_t ids[200];
	for (int32_t i = 0; i < 200; i++)
		ids[i] = i == 0 || i == 40 || i == 100 ? TINY_START : i == 39 || i == 99 ? TINY_END : 'a';
	const struct token_buf tokens = {ids, 200, 200};
	for (int system = 0; system < 2; system++) {
		struct request r = {.spec = calloc(1, sizeof *r.spec)};
		struct arena *a = r.spec->arena = arena_create(1 << 16);
		struct value *m = value_dict(a), *list = value_list(a);
		const char *role = system ? "system" : "user";
		r.spec->chat = value_dict(a);
		value_dict_set(a, m, "role", 4, value_string(a, role, strlen(role), VALUE_DATA));
		value_list_add(a, list, m);
		value_dict_set(a, r.spec->chat, "messages", 8, list);
		assert_true(turns_mark(r.spec, t, &tokens));
		assert_int_equal(r.spec->n_turn_starts, 3);
		assert_int_equal(r.spec->system_tokens, system ? 40 : 0);
		for (int32_t page = 0; page < 13; page++)
			assert_int_equal(request_keeps_page(&r, page),
			                 page == 0 || page == 2 || page == 6 || (system && page == 1));
		engine_request_destroy(r.spec);
	}
	tokenizer_destroy(t);
	gguf_close(g);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_window_as_long_as_the_conversation_changes_nothing),
		cmocka_unit_test(what_is_kept_is_told_to_the_byte),
		cmocka_unit_test(an_answer_does_not_depend_on_steps_company_or_what_was_known),
		cmocka_unit_test(a_session_goes_on_as_if_all_were_computed_again),
		cmocka_unit_test(what_left_the_window_comes_back_for_the_answer),
		cmocka_unit_test(what_the_tier_lost_is_computed_again),
		cmocka_unit_test(what_is_merged_is_told),
		cmocka_unit_test(diagnostics_change_nothing_and_tell_how_far_it_is_from_exact),
		cmocka_unit_test(divergence_is_symmetric_and_bounded),
		cmocka_unit_test(beyond_the_trained_length_the_first_tokens_move),
		cmocka_unit_test(all_is_kept_up_to_the_trigger),
		cmocka_unit_test(a_conversation_is_longer_than_the_cache),
		cmocka_unit_test(what_cannot_be_is_refused_with_what_can),
		cmocka_unit_test(a_policy_acts_when_pages_run_short),
		cmocka_unit_test(a_policy_acts_when_attention_narrows),
		cmocka_unit_test(evict_removes_the_share_that_was_asked_for),
		cmocka_unit_test(what_cannot_be_weighed_goes_by_age),
		cmocka_unit_test(turns_are_found_by_the_token_that_begins_them),
		cmocka_unit_test(turns_are_left_out_as_few_as_it_takes_and_never_the_last),
		cmocka_unit_test(a_conversation_of_32k_tokens_takes_what_its_window_takes),
	};
	return cmocka_run_group_tests(tests, make_model, remove_model);
}
