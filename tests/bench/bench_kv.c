/*
 * bench_kv: what keeping account of the KV cache costs, beside the step of a model that it serves.
 *
 *   bench_kv [--model FILE] [--device NAME] [--threads N] [--policy NAME] [--pages N] [--steps N] [--waiting N]
 *            [--check PERCENT]
 *
 * The real scheduler, pool and prefix index run over a pool of 100,000 pages that is full of earlier conversations, so
 * every page that is taken is an eviction. 32 generations decode, each growing by a page every 16 steps; each answer
 * has 256 tokens, then a queued prompt of 2,000 tokens takes its place, half of which an earlier conversation has in
 * the index; 64 more (--waiting) wait, all looked after in every step. Nothing is computed; with --model, real decode
 * steps of 32 sequences run in turn with this, so that both find the caches as the other leaves them, and the last
 * lines set one against the other. --check fails when the scheduler takes more than that share of a decode step, and
 * says 77, "skipped", without a model.
 */
#include "engine/sched.h"
#include "tests/bench/model_steps.h"
#include "tests/support/memory_backend.h"
#include "tests/support/taken_part.h"

enum { RUNNING = 32, PROMPT = 2000, ANSWER = 256, CONVERSATIONS = 400, DEPTH = 128, MODEL_STEPS_EVERY = 128 };

struct bench {
	struct memory_backend memory;
	struct clock clock;
	struct kv_pool *pool;
	struct kv_prefix *prefix;
	struct tenant_table tenants;
	struct session_table sessions;
	struct sched sched;
	uint64_t n_requests, rng;
};

static void need(enum status st, const char *what)
{
	if (st != STATUS_OK)
		bench_fail(what, status_text(st));
}

static void start(struct bench *b, int32_t n_pages, const char *policy)
{
	struct error err = {0};
	struct kv_layout layout = memory_layout(); /* the content of pages plays no part */
	memset(b, 0, sizeof *b);
	b->rng = 1;
	memory_backend_init(&b->memory);
	clock_manual_init(&b->clock, 1);
	need(kv_pool_create(&b->memory.base, &layout, n_pages, &b->pool, &err), "pool");
	if (kv_prefix_create(b->pool, policy, &b->prefix, &err) != STATUS_OK)
		bench_fail("index", err.message);
	need(tenant_table_init(&b->tenants, layout.page_stride), "tenants");
	need(session_table_init(&b->sessions, &b->tenants, b->prefix, &b->clock, 30000, 300000, 100), "sessions");
	need(sched_init(&b->sched, b->pool, b->prefix, &b->sessions, &b->clock, RUNNING, STEPS_CHUNK, RUNNING),
	     "scheduler");
	sched_measure(&b->sched, STEPS_CHUNK, true, 250000000); /* so many rows in a quarter of a second */
}

static int32_t below(struct bench *b, int32_t n)
{
	b->rng = b->rng * 6364136223846793005u + 1442695040888963407u;
	return (int32_t)((b->rng >> 33) % (uint64_t)n);
}

/* A prompt whose first half belongs to one of the conversations, and whose second half is its own. */
static void prompt_of(struct bench *b, int32_t *tokens)
{
	int32_t conversation = below(b, CONVERSATIONS);
	for (int32_t i = 0; i < PROMPT; i++)
		tokens[i] = i < PROMPT / 2 ? conversation * PROMPT + i
		                           : (int32_t)(b->n_requests * 131 + (uint64_t)i * 7) & 0xFFFFFF;
}

static void submit(struct bench *b)
{
	struct request *r = calloc(1, sizeof *r);
	struct engine_request *spec = calloc(1, sizeof *spec);
	int32_t tokens[PROMPT];
	if (!r || !spec)
		bench_fail("request", "no memory");
	prompt_of(b, tokens);
	r->spec = spec;
	r->id = ++b->n_requests;
	r->tenant = tenant_find(&b->tenants, 0);
	list_init(&r->link);
	for (int32_t i = 0; i < PROMPT; i++)
		token_buf_add(&r->tokens, tokens[i]);
	r->n_prompt = PROMPT;
	/* Spread, so that not all of them end together. */
	r->max_total = PROMPT + ANSWER / 2 + below(b, ANSWER);
	sched_add(&b->sched, r);
}

/* What the worker does around a step, but for the step. */
static void step(struct bench *b)
{
	clock_advance(&b->clock, 20000000);
	if (!sched_build(&b->sched))
		return;
	int32_t n_seqs = b->sched.batch.n_seqs;
	for (int32_t i = 0; i < n_seqs; i++) {
		struct request *r = b->sched.part[i].request;
		if (!take_part(&b->sched, &b->sched.part[i], (int32_t)(r->id * 31 + r->tokens.n) & 0xFFFFFF))
			continue;
		r->completed = true;
		sched_remove(&b->sched, r);
		request_destroy(r);
		submit(b);
	}
}

static uint64_t evicted(const struct bench *b, struct kv_prefix_stats *st)
{
	uint64_t n = 0;
	kv_prefix_stats(b->prefix, st);
	for (int reason = 0; reason < EVICT_N_REASONS; reason++)
		n += st->evicted[reason];
	return n;
}

/*
 * The operations one by one, in microseconds: a prompt that is found, one that is not, a page put in the place of
 * another.
 */
static void single_operations(struct bench *b)
{
	enum { ROUNDS = 200 };
	struct kv_key root = {{1}};
	double found = 0, missed = 0, put = 0;
	int32_t n_put = 0;
	for (int round = 0; round < ROUNDS; round++) {
		int32_t tokens[PROMPT];
		struct kv_use use = {.request = b->n_requests + (uint64_t)round + 1,
		                     .now_ms = clock_now_ms(&b->clock),
		                     .n_prompt = PROMPT};
		struct kv_chain chain = kv_chain_of(&root);
		struct kv_seq s = KV_SEQ_INIT;
		for (int32_t i = 0; i < PROMPT; i++)
			tokens[i] = 0x1000000 + round * PROMPT + i;
		double t = bench_now();
		kv_prefix_get(b->prefix, &chain, tokens, PROMPT, &use, &s);
		missed += bench_now() - t;
		t = bench_now();
		for (int32_t i = 0; i < PROMPT; i += KV_PAGE_TOKENS) {
			while (kv_seq_prepare(b->pool, &s, KV_PAGE_TOKENS) != STATUS_OK) {
				if (!kv_prefix_evict(b->prefix, use.now_ms, EVICT_FOR_PROMPT))
					bench_fail("eviction", "nothing left");
			}
			s.n_tokens += KV_PAGE_TOKENS;
			kv_prefix_put(b->prefix, &chain, tokens, &s, i / KV_PAGE_TOKENS, &use);
			n_put++;
		}
		put += bench_now() - t;
		kv_seq_release(b->pool, &s);
		kv_chain_free(&chain);
		use.request = 0;
		t = bench_now();
		kv_prefix_get(b->prefix, &chain, tokens, PROMPT, &use, &s);
		found += bench_now() - t;
		kv_seq_release(b->pool, &s);
		kv_chain_free(&chain);
	}
	double found_us = found / ROUNDS * 1e6;
	printf("a prompt of %d tokens: found in %.1f us (%.2f us a page), missed in %.2f us; a page put in the place "
	       "of an evicted "
	       "one: %.2f us\n",
	       PROMPT, found_us, found_us / (PROMPT / KV_PAGE_TOKENS), missed / ROUNDS * 1e6, put / n_put * 1e6);
}

static void stop(struct bench *b)
{
	struct list *heads[] = {&b->sched.running, &b->sched.waiting};
	for (int i = 0; i < 2; i++) {
		for (struct list *l; (l = heads[i]->next) != heads[i];) {
			struct request *r = list_entry(l, struct request, link);
			sched_remove(&b->sched, r);
			request_destroy(r);
		}
	}
	sched_free(&b->sched);
	session_table_free(&b->sessions);
	tenant_table_free(&b->tenants);
	kv_prefix_destroy(b->prefix);
	need(kv_pool_destroy(b->pool), "pool");
}

int main(int argc, char **argv)
{
	struct backend_options o = {.device = "cpu"};
	const char *path = NULL, *policy = NULL;
	int32_t n_pages = 100000, n_steps = 2000, n_waiting = 64;
	double check = 0;
	for (int at = 1; at < argc; at += 2) {
		const char *value = at + 1 < argc ? argv[at + 1] : "";
		if (strcmp(argv[at], "--model") == 0)
			path = value;
		else if (strcmp(argv[at], "--device") == 0)
			o.device = value;
		else if (strcmp(argv[at], "--threads") == 0)
			o.n_threads = atoi(value);
		else if (strcmp(argv[at], "--policy") == 0)
			policy = value;
		else if (strcmp(argv[at], "--pages") == 0)
			n_pages = atoi(value);
		else if (strcmp(argv[at], "--waiting") == 0)
			n_waiting = atoi(value);
		else if (strcmp(argv[at], "--steps") == 0)
			n_steps = atoi(value);
		else if (strcmp(argv[at], "--check") == 0)
			check = atof(value);
		else
			bench_fail(argv[at], "unknown option");
	}
	if (!path && check > 0)
		path = getenv("KVASIR_TEST_MODEL");
	if (check > 0 && (!path || !*path)) {
		printf("skipped: KVASIR_TEST_MODEL names no model\n");
		return 77;
	}
	if (n_pages < 4 * (PROMPT + 2 * ANSWER) / KV_PAGE_TOKENS || n_steps < MODEL_STEPS_EVERY)
		bench_fail("usage", "too few pages or steps");

	static struct bench b;
	struct model_steps model;
	struct kv_prefix_stats before, after;
	start(&b, n_pages, policy);
	for (int i = 0; i < RUNNING + n_waiting; i++)
		submit(&b);
	/* Until the pool is full and evictions are the rule. */
	while (evicted(&b, &before) < (uint64_t)n_pages / 4)
		step(&b);
	/* A step takes as long whatever stands before its position. */
	if (path)
		model_steps_open(&model, path, &o, RUNNING, DEPTH + 1);
	uint64_t evicted_before = evicted(&b, &before), requests_before = b.n_requests;
	double spent = 0, model_spent = 0;
	int n_model_steps = 0;
	for (int32_t i = 0; i < n_steps; i++) {
		double t = bench_now();
		step(&b);
		spent += bench_now() - t;
		if (path && i % MODEL_STEPS_EVERY == 0) {
			t = bench_now();
			model_step(&model, RUNNING, DEPTH, 1);
			model_spent += bench_now() - t;
			n_model_steps++;
		}
	}
	uint64_t evicted_after = evicted(&b, &after);
	printf("%d pages, %d running, %d waiting, %d steps: %llu prompts came, %.1f pages asked for, %.1f found, %.1f "
	       "put and "
	       "%.1f evicted a step\n",
	       n_pages, b.sched.n_running, b.sched.n_waiting, n_steps,
	       (unsigned long long)(b.n_requests - requests_before), (double)(after.queries - before.queries) / n_steps,
	       (double)(after.hits - before.hits) / n_steps, (double)(after.inserted - before.inserted) / n_steps,
	       (double)(evicted_after - evicted_before) / n_steps);
	printf("the scheduler with pool and index: %.1f us a step\n", spent / n_steps * 1e6);
	if (n_pages > 2 * RUNNING * (PROMPT + 2 * ANSWER) / KV_PAGE_TOKENS)
		single_operations(&b); /* else the generations may hold every page */
	double percent = 0;
	if (path) {
		percent = spent / n_steps / (model_spent / n_model_steps) * 100;
		printf("a decode step of %d sequences, %d tokens each: %.1f us; the scheduler's share: %.3f%%\n",
		       RUNNING, DEPTH, model_spent / n_model_steps * 1e6, percent);
		model_steps_close(&model);
	}
	stop(&b);
	if (check > 0 && percent > check) {
		printf("more than %.3f%%\n", check);
		return 1;
	}
	return 0;
}
