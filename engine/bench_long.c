/*
 * What long conversations cost under each context policy: `kvasir bench long`. What is measured, and how: engine_long()
 * in engine.h.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "engine/bench_text.h"
#include "engine/engine_internal.h"
#include "engine/kv/policy.h"

enum {
	TEXT_PART_BYTES = 32 << 10, /* of text that is tokenised at once */
	KEY_TOKENS_MAX = 64,        /* a sentence with a pass key */
	QUESTION_TOKENS_MAX = 96,
	PLACE_TOKENS = 48,          /* how far to look for the end of a sentence, to hide a key behind it */
	SPARE_PAGES = 64,
	LENGTH_MIN = 64,
	SEED = 20261130,
};

static const char question[] = "\nQuestion: Which doors have a pass key, and who is spoken of?\nAnswer:";

/* The time that this process has had. */
static int64_t cpu_now_ns(const struct clock *clock)
{
	struct timespec t;
	(void)clock;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static const struct clock cpu_clock = {.now_ns = cpu_now_ns};

struct tokens {
	int32_t *ids;
	size_t n, cap;
};

/* What a forced token says something about. */
enum kind { OF_TEXT, OF_RECALL, OF_KEY };

/*
 * One forced answer: what engine_request.choose works on. Between submission and its end it belongs to the engine's
 * thread.
 */
struct forced {
	const struct clock *clock;
	const int32_t *ids;  /* [n] */
	const uint8_t *kind; /* [n] */
	int32_t n;
	float *exact;        /* [n][n_vocab] log-probabilities under "full"; NULL: there are none */
	bool is_exact;       /* writes them; else it compares with them */
	float *own;          /* [n_vocab] */
	double kl[2], key_logprob;
	int32_t n_kl[2], n_keys, hits;
	int64_t spent_ns;    /* here, which is none of the model's time */
};

struct long_bench {
	const struct engine_long_params *params;
	const struct engine_long_sink *sink;
	const struct clock *clock;
	struct engine *e;
	const struct engine_info *info;
	uint64_t n_runs;
	int32_t context, tail_max; /* what follows a prompt is shorter than tail_max */
	struct tokens text, prompt, tail, question, answer, reference;
	struct tokens ask[ENGINE_LONG_KEYS_MAX], key[ENGINE_LONG_KEYS_MAX], stop;
	uint8_t *kind;             /* [tail.cap] */
	float *exact, *own;
	bool has_exact;            /* of this length */
};

/* ---- Tokens ---- */

static bool add(struct tokens *t, const int32_t *ids, size_t n)
{
	if (t->n + n > t->cap) {
		size_t cap = (t->n + n) * 2;
		int32_t *grown = realloc(t->ids, cap * sizeof *grown);
		if (!grown)
			return false;
		t->ids = grown;
		t->cap = cap;
	}
	if (n)
		memcpy(t->ids + t->n, ids, n * sizeof *ids);
	t->n += n;
	return true;
}

static bool add_all(struct tokens *t, const struct tokens *from)
{
	return add(t, from->ids, from->n);
}

static enum status no_memory(struct error *err)
{
	return error_set(err, STATUS_NOMEM, "no memory for a benchmark");
}

/*
 * The event that ends what `id` stands for, which the caller frees; tokens of an answer on the way go to `tokens`
 * unless that is NULL. Events of others are dropped.
 */
static enum status await(struct long_bench *b, uint64_t id, struct tokens *tokens, struct engine_event **out,
                         struct error *err)
{
	enum status st = STATUS_OK;
	*out = NULL;
	while (!*out) {
		struct list events;
		list_init(&events);
		engine_wait(b->e, &events, -1);
		for (struct list *l; (l = list_pop_front(&events));) {
			struct engine_event *ev = list_entry(l, struct engine_event, link);
			bool mine = ev->request_id == id;
			if (mine && ev->type == ENGINE_EVENT_TOKEN && tokens && !add(tokens, &ev->sample.token, 1))
				st = no_memory(err);
			if (mine && ev->type != ENGINE_EVENT_TOKEN && ev->type != ENGINE_EVENT_PROMPT)
				*out = ev;
			else
				engine_event_free(ev);
		}
	}
	if (st == STATUS_OK && (*out)->type == ENGINE_EVENT_ERROR) {
		*err = (*out)->error;
		st = err->status;
	}
	if (st != STATUS_OK) {
		engine_event_free(*out);
		*out = NULL;
	}
	return st;
}

static enum status tokenize(struct long_bench *b, const char *text, size_t n, bool first, struct tokens *out,
                            struct error *err)
{
	uint64_t id = engine_next_id(b->e);
	struct engine_event *ev;
	engine_tokenize(b->e, id, text, n, first, false);
	enum status st = await(b, id, NULL, &ev, err);
	if (st != STATUS_OK)
		return st;
	if (!add(out, ev->tokens, ev->n_tokens))
		st = no_memory(err);
	engine_event_free(ev);
	return st;
}

/* ---- What is read ---- */

/* At least n tokens of text, or as many as the given one has. */
static enum status prepare_text(struct long_bench *b, size_t n, struct error *err)
{
	const struct engine_long_params *p = b->params;
	struct buf part = BUF_INIT;
	enum status st = STATUS_OK;
	uint64_t seed = SEED;
	for (size_t at = 0; st == STATUS_OK && b->text.n < n && (!p->text || at < p->text_n);) {
		struct str piece;
		buf_clear(&part);
		if (p->text) {
			/* Cut behind a line where there is one. */
			size_t left = p->text_n - at, take = left < TEXT_PART_BYTES ? left : TEXT_PART_BYTES;
			const char *line = take < left ? memrchr(p->text + at, '\n', take) : NULL;
			piece = (struct str){p->text + at, line ? (size_t)(line - p->text) + 1 - at : take};
			at += piece.n;
		} else {
			while (part.len < TEXT_PART_BYTES && !part.failed)
				bench_text_sentence(&part, &seed);
			piece = buf_str(&part);
		}
		st = part.failed ? no_memory(err) : tokenize(b, piece.p, piece.n, b->text.n == 0, &b->text, err);
	}
	buf_free(&part);
	return st;
}

static enum status prepare_keys(struct long_bench *b, struct error *err)
{
	char sentence[128];
	enum status st = tokenize(b, ".\n", 2, false, &b->stop, err);
	for (int32_t i = 0; i < b->params->n_keys && st == STATUS_OK; i++) {
		struct bench_key key = bench_text_key(i, SEED);
		int n = snprintf(sentence, sizeof sentence, "\nThe pass key of the %s door is", key.door);
		st = tokenize(b, sentence, (size_t)n, false, &b->ask[i], err);
		n = snprintf(sentence, sizeof sentence, " %s", key.digits);
		if (st == STATUS_OK)
			st = tokenize(b, sentence, (size_t)n, false, &b->key[i], err);
		if (st == STATUS_OK && b->ask[i].n + b->key[i].n + b->stop.n > KEY_TOKENS_MAX)
			st = error_set(err, STATUS_UNSUPPORTED,
			               "the vocabulary makes more than %d tokens of a sentence", KEY_TOKENS_MAX);
	}
	if (st == STATUS_OK)
		st = tokenize(b, question, sizeof question - 1, false, &b->question, err);
	if (st == STATUS_OK && b->question.n > QUESTION_TOKENS_MAX)
		st = error_set(err, STATUS_UNSUPPORTED, "the vocabulary makes more than %d tokens of a question",
		               QUESTION_TOKENS_MAX);
	return st;
}

static bool add_key(struct long_bench *b, struct tokens *out, int32_t i)
{
	return add_all(out, &b->ask[i]) && add_all(out, &b->key[i]) && add_all(out, &b->stop);
}

static bool ends_sentence(const struct long_bench *b, int32_t token)
{
	struct str piece = engine_token_piece(b->e, token);
	return memchr(piece.p, '.', piece.n) || memchr(piece.p, '\n', piece.n);
}

static bool has_digit(const struct long_bench *b, int32_t token)
{
	struct str piece = engine_token_piece(b->e, token);
	for (size_t i = 0; i < piece.n; i++)
		if (piece.p[i] >= '0' && piece.p[i] <= '9')
			return true;
	return false;
}

/* The prompt of `length` tokens with its keys, and what is forced behind it. False without memory. */
static bool make_prompt(struct long_bench *b, int32_t length)
{
	const struct engine_long_params *p = b->params;
	size_t hidden = 0, at = 0;
	for (int32_t i = 0; i < p->n_keys; i++)
		hidden += b->ask[i].n + b->key[i].n + b->stop.n;
	size_t body = (size_t)length - hidden;
	b->prompt.n = b->tail.n = 0;
	for (int32_t i = 0; i < p->n_keys; i++) {
		size_t place = body * (size_t)(2 * i + 1) / (size_t)(2 * p->n_keys),
		       far = place + PLACE_TOKENS < body ? place + PLACE_TOKENS : body;
		size_t end = place > at ? place : at;
		while (end < far && (end == 0 || !ends_sentence(b, b->text.ids[end - 1])))
			end++;
		if (!add(&b->prompt, b->text.ids + at, end - at) || !add_key(b, &b->prompt, i))
			return false;
		at = end;
	}
	if (!add(&b->prompt, b->text.ids + at, body - at) || !add(&b->tail, b->text.ids + body, (size_t)p->text_tokens))
		return false;
	size_t n_text = b->tail.n;
	for (int32_t i = 0; i < p->n_keys; i++)
		if (!add_key(b, &b->tail, i))
			return false;
	uint8_t *kind = realloc(b->kind, b->tail.n + 1);
	if (!kind)
		return false;
	b->kind = kind;
	memset(kind, OF_TEXT, n_text);
	memset(kind + n_text, OF_RECALL, b->tail.n - n_text);
	size_t from = n_text;
	for (int32_t i = 0; i < p->n_keys; i++) {
		for (size_t k = 0; k < b->key[i].n; k++)
			if (has_digit(b, b->key[i].ids[k]))
				kind[from + b->ask[i].n + k] = OF_KEY;
		from += b->ask[i].n + b->key[i].n + b->stop.n;
	}
	return true;
}

/* ---- One conversation ---- */

static void log_softmax(const float *logits, int32_t n, float *out)
{
	float max = -INFINITY;
	double sum = 0;
	for (int32_t i = 0; i < n; i++)
		max = logits[i] > max ? logits[i] : max;
	for (int32_t i = 0; i < n; i++)
		sum += exp((double)(logits[i] - max));
	float norm = max + (float)log(sum);
	for (int32_t i = 0; i < n; i++)
		out[i] = logits[i] - norm;
}

/* engine_request.choose */
static int32_t force(void *arg, const float *logits, int32_t n_vocab, int32_t n)
{
	struct forced *f = arg;
	if (n >= f->n)
		return 0; /* the answer ends before */
	int64_t start = clock_now_ns(f->clock);
	float *exact = f->exact ? f->exact + (size_t)n * (size_t)n_vocab : NULL;
	float *own = f->is_exact && exact ? exact : f->own;
	int32_t token = f->ids[n], best = 0;
	if (own) {
		log_softmax(logits, n_vocab, own);
		for (int32_t i = 1; i < n_vocab; i++)
			best = own[i] > own[best] ? i : best;
		if (f->kind[n] == OF_KEY) {
			f->n_keys++;
			f->hits += best == token;
			f->key_logprob += (double)own[token];
		}
	}
	if (own && exact) {
		double kl = 0;
		int part = f->kind[n] == OF_TEXT ? 0 : 1;
		for (int32_t i = 0; i < n_vocab && !f->is_exact; i++)
			kl += exp((double)exact[i]) * ((double)exact[i] - (double)own[i]);
		f->kl[part] += kl;
		f->n_kl[part]++;
	}
	f->spent_ns += clock_now_ns(f->clock) - start;
	return token;
}

static enum status submit(struct long_bench *b, const struct engine_context *context, const char *session,
                          struct forced *forced, const struct tokens *prompt, int32_t n, uint64_t *id,
                          struct error *err)
{
	char salt[32];
	struct engine_request *r = engine_request_create(b->e);
	if (!r)
		return no_memory(err);
	snprintf(salt, sizeof salt, "%" PRIu64, b->n_runs);
	snprintf(r->session, sizeof r->session, "%s", session);
	r->input = ENGINE_INPUT_TOKENS;
	r->tokens = malloc(prompt->n * sizeof *r->tokens);
	r->cache_salt = strdup(salt);
	r->context = *context;
	r->max_tokens = n;
	r->ignore_eos = true;
	r->sampling.temperature = 0;
	if (forced) {
		r->choose = force;
		r->choose_arg = forced;
	}
	if (!r->tokens || !r->cache_salt) {
		engine_request_destroy(r);
		return no_memory(err);
	}
	memcpy(r->tokens, prompt->ids, prompt->n * sizeof *r->tokens);
	r->n_tokens = prompt->n;
	*id = r->id;
	engine_submit(b->e, r);
	return STATUS_OK;
}

static enum status open_session(struct long_bench *b, char id[ENGINE_SESSION_ID_MAX + 1], struct error *err)
{
	struct engine_session_params p = {.heartbeat_timeout_ms = -1, .ttl_ms = -1};
	struct engine_event *ev;
	uint64_t command = engine_next_id(b->e);
	engine_session_create(b->e, command, &p);
	enum status st = await(b, command, NULL, &ev, err);
	if (st == STATUS_OK)
		snprintf(id, ENGINE_SESSION_ID_MAX + 1, "%s", ev->sessions[0].id);
	engine_event_free(ev);
	return st;
}

static void close_session(struct long_bench *b, const char *id)
{
	struct engine_event *ev;
	struct error err;
	uint64_t command = engine_next_id(b->e);
	engine_session_delete(b->e, command, 0, id);
	await(b, command, NULL, &ev, &err);
	engine_event_free(ev);
}

static enum status run_forced(struct long_bench *b, const struct engine_context *context, const char *session,
                              struct forced *f, struct engine_long_row *row, struct error *err)
{
	struct engine_event *done;
	uint64_t id;
	enum status st = submit(b, context, session, f, &b->prompt, f->n, &id, err);
	if (st == STATUS_OK)
		st = await(b, id, NULL, &done, err);
	if (st != STATUS_OK)
		return st;
	const struct engine_usage *u = &done->usage;
	int64_t ns = u->decode_ns - f->spent_ns;
	row->tokens_logical = u->context.tokens_logical;
	row->tokens_resident = u->context.tokens_resident;
	row->resident_bytes = u->context.bytes;
	row->pages_back = u->context.pages_back;
	row->tokens_recomputed = u->context.tokens_recomputed;
	row->ttft_s = (double)u->ttft_ns / 1e9;
	row->tokens_per_s = ns > 0 ? (double)(u->completion_tokens - 1) * 1e9 / (double)ns : NAN;
	engine_event_free(done);
	return STATUS_OK;
}

/* The second turn: what was said so far, and a question. */
static enum status run_question(struct long_bench *b, const struct engine_context *context, const char *session,
                                struct error *err)
{
	struct tokens whole = {0};
	struct engine_event *done = NULL;
	uint64_t id;
	enum status st = STATUS_OK;
	b->answer.n = 0;
	if (!add_all(&whole, &b->prompt) || !add_all(&whole, &b->tail) || !add_all(&whole, &b->question))
		st = no_memory(err);
	if (st == STATUS_OK)
		st = submit(b, context, session, NULL, &whole, b->params->answer_tokens, &id, err);
	if (st == STATUS_OK)
		st = await(b, id, &b->answer, &done, err);
	engine_event_free(done);
	free(whole.ids);
	return st;
}

static double agreement(const struct tokens *a, const struct tokens *b)
{
	size_t n = a->n > b->n ? a->n : b->n, same = 0;
	while (same < a->n && same < b->n && a->ids[same] == b->ids[same])
		same++;
	return n ? (double)same / (double)n : NAN;
}

static double mean(double sum, int32_t n)
{
	return n > 0 ? sum / n : NAN;
}

static bool is_full(const struct engine_long_policy *policy)
{
	return !policy->context.policy || strcmp(policy->context.policy, engine_context_policy(0)) == 0;
}

static enum status run_policy(struct long_bench *b, const struct engine_long_policy *policy, bool is_exact,
                              int32_t length, struct engine_long_row *row, struct error *err)
{
	const struct engine_long_params *p = b->params;
	char session[ENGINE_SESSION_ID_MAX + 1];
	struct engine_context context = policy->context;
	struct forced f = {
		.clock = b->clock, .ids = b->tail.ids, .kind = b->kind, .n = (int32_t)b->tail.n, .is_exact = is_exact};
	if (!p->speed_only) {
		f.exact = is_exact || b->has_exact ? b->exact : NULL;
		f.own = b->own;
	}
	if (!is_full(policy) && context.max_cache_size == 0 && !context.by_share)
		context.max_cache_size = (int32_t)((int64_t)length * p->cache_permille / 1000);
	*row = (struct engine_long_row){.policy = policy->label, .length = length, .agreement = NAN};
	b->n_runs++;
	enum status st = open_session(b, session, err);
	if (st != STATUS_OK)
		return st;
	st = run_forced(b, &context, session, &f, row, err);
	if (st == STATUS_OK && p->answer_tokens > 0 && !p->speed_only) {
		st = run_question(b, &context, session, err);
		if (st == STATUS_OK && is_exact) {
			b->reference.n = 0;
			st = add_all(&b->reference, &b->answer) ? STATUS_OK : no_memory(err);
		}
		if (st == STATUS_OK && (is_exact || b->has_exact))
			row->agreement = agreement(&b->answer, &b->reference);
	}
	close_session(b, session);
	row->kl_text = mean(f.kl[0], f.n_kl[0]);
	row->kl_recall = mean(f.kl[1], f.n_kl[1]);
	row->passkey = mean(f.hits, f.n_keys);
	row->passkey_logprob = mean(f.key_logprob, f.n_keys);
	if (is_exact)
		b->has_exact = st == STATUS_OK;
	return st;
}

/* ---- All of it ---- */

/* What one conversation cannot do, another one may. */
static bool only_this_one(enum status st)
{
	return st == STATUS_INVALID || st == STATUS_CONTEXT_LENGTH || st == STATUS_UNSUPPORTED || st == STATUS_LIMIT;
}

static enum status run_length(struct long_bench *b, int32_t length, struct error *err)
{
	const struct engine_long_params *p = b->params;
	const struct engine_long_sink *sink = b->sink;
	const struct engine_long_policy full = {.label = engine_context_policy(0),
	                                        .context = {.policy = engine_context_policy(0), .start_size = -1}};
	struct engine_long_row row;
	char why[160] = "";
	if (length + b->tail_max > b->info->rope.reach)
		snprintf(why, sizeof why,
		         "beyond the model's context of %" PRId32 " tokens, %" PRId32 " of which are for the answers",
		         b->info->rope.reach, b->tail_max);
	else if ((int64_t)length < 2 * (int64_t)p->n_keys * KEY_TOKENS_MAX)
		snprintf(why, sizeof why, "too short for %" PRId32 " pass keys", p->n_keys);
	else if (b->text.n < (size_t)length + (size_t)p->text_tokens)
		snprintf(why, sizeof why, "the text has %zu tokens only", b->text.n);
	for (size_t i = 0; why[0] && i < p->n_policies; i++)
		sink->left_out(sink->arg, p->policy[i].label, length, why);
	if (why[0])
		return STATUS_OK;
	if (!make_prompt(b, length))
		return no_memory(err);
	/* What others are compared with comes first, whether it is wanted as a row or not. */
	b->has_exact = false;
	enum status st_full = p->speed_only ? STATUS_OK : run_policy(b, &full, true, length, &row, err);
	if (st_full != STATUS_OK && !only_this_one(st_full))
		return st_full;
	for (size_t i = 0; i < p->n_policies; i++) {
		const struct engine_long_policy *policy = &p->policy[i];
		enum status st = st_full;
		struct engine_long_row other;
		if (!is_full(policy) || p->speed_only)
			st = run_policy(b, policy, false, length, &other, err);
		if (st == STATUS_OK)
			sink->row(sink->arg, is_full(policy) && !p->speed_only ? &row : &other);
		else if (only_this_one(st))
			sink->left_out(sink->arg, policy->label, length, err->message);
		else
			return st;
	}
	return STATUS_OK;
}

static enum status check(const struct engine_long_params *p, struct error *err)
{
	for (size_t i = 0; i < p->n_lengths; i++)
		if (p->length[i] < LENGTH_MIN || p->length[i] > 1 << 24)
			return error_set_param(err, STATUS_INVALID, "length",
			                       "length: %" PRId32 " is not from %d to %d", p->length[i], LENGTH_MIN,
			                       1 << 24);
	if (p->n_lengths == 0 || p->n_policies == 0)
		return error_set_param(err, STATUS_INVALID, "length",
		                       "there is nothing to measure: no length or no policy");
	if (p->cache_permille < 1 || p->cache_permille > 1 << 20)
		return error_set_param(err, STATUS_INVALID, "cache",
		                       "cache: a policy keeps a part of the length, or more than all of it");
	if (p->n_keys < 0 || p->n_keys > ENGINE_LONG_KEYS_MAX)
		return error_set_param(err, STATUS_INVALID, "keys", "keys: %" PRId32 " is not from 0 to %d", p->n_keys,
		                       ENGINE_LONG_KEYS_MAX);
	if (p->cpu_time && p->n_threads != 1)
		return error_set_param(err, STATUS_INVALID, "threads",
		                       "threads: the processor's time is the model's with one thread only");
	if (p->text_tokens < 1 || p->text_tokens > 4096 || p->answer_tokens < 0 || p->answer_tokens > 4096)
		return error_set_param(err, STATUS_INVALID, "tail",
		                       "the tokens behind the prompt are not from 1 to 4096");
	return STATUS_OK;
}

/* An engine whose context holds the longest prompt that is within the model's reach. */
static enum status start_engine(struct long_bench *b, struct error *err)
{
	const struct engine_long_params *p = b->params;
	struct engine_plan plan;
	bool bounds = false, pages_in = false;
	/* Which policies need what is not always there; others are measured without. */
	for (size_t i = 0; i < p->n_policies; i++) {
		const struct engine_context *c = &p->policy[i].context;
		bounds |= c->page_in || (c->policy && strcmp(c->policy, kv_policy_name(KV_POLICY_QUEST)) == 0);
		pages_in |= c->page_in;
	}
	const struct engine_plan_params look = {.model_path = p->model_path,
	                                        .rope_scaling = p->rope_scaling,
	                                        .kv_type = p->kv_type,
	                                        .kv_bounds = bounds};
	enum status st = engine_plan(&look, &plan, err);
	if (st != STATUS_OK)
		return st;
	b->tail_max = p->text_tokens + p->n_keys * KEY_TOKENS_MAX + QUESTION_TOKENS_MAX + p->answer_tokens;
	int32_t longest = 0;
	for (size_t i = 0; i < p->n_lengths; i++)
		if (p->length[i] + b->tail_max <= plan.rope.reach && p->length[i] > longest)
			longest = p->length[i];
	b->context = longest ? longest + b->tail_max : (plan.rope.reach < 1024 ? plan.rope.reach : 1024);
	struct engine_plan_params sized = look;
	sized.context_tokens = b->context;
	sized.n_sessions = 1;
	st = engine_plan(&sized, &plan, err);
	if (st != STATUS_OK)
		return st;
	/* A session's own KV has at most half of the pool, and may be all but a full context's. */
	const struct engine_options options = {
	        .model_path = p->model_path,
	        .device = p->device,
	        .n_threads = p->n_threads,
	        .kv_type = p->kv_type,
	        .kv_bounds = bounds,
	        .rope_scaling = p->rope_scaling,
	        .context_tokens = b->context,
	        .kv_bytes = plan.kv_bytes_per_session + plan.kv_bytes_per_session / 4 + SPARE_PAGES * plan.page_bytes,
	        .kv_ram_bytes = pages_in ? plan.kv_bytes_per_session : 0,
	        .max_running = 1,
	        .clock = b->clock,
	};
	st = engine_create(&options, &b->e, err);
	if (st != STATUS_OK)
		return st;
	while (engine_state(b->e) == ENGINE_LOADING) {
		struct list events;
		list_init(&events);
		engine_wait(b->e, &events, -1);
		for (struct list *l; (l = list_pop_front(&events));)
			engine_event_free(list_entry(l, struct engine_event, link));
	}
	if (engine_state(b->e) == ENGINE_FAILED) {
		*err = *engine_load_error(b->e);
		return err->status;
	}
	b->info = engine_info(b->e);
	return STATUS_OK;
}

static enum status prepare(struct long_bench *b, struct error *err)
{
	const struct engine_long_params *p = b->params;
	enum status st = start_engine(b, err);
	if (st == STATUS_OK)
		st = prepare_keys(b, err);
	if (st == STATUS_OK)
		st = prepare_text(b, (size_t)b->context + (size_t)p->text_tokens, err);
	if (st != STATUS_OK || p->speed_only)
		return st;
	size_t n = (size_t)p->text_tokens + (size_t)p->n_keys * KEY_TOKENS_MAX, n_vocab = (size_t)b->info->n_vocab;
	b->exact = calloc(n, n_vocab * sizeof *b->exact);
	b->own = calloc(n_vocab, sizeof *b->own);
	return b->exact && b->own ? STATUS_OK : no_memory(err);
}

enum status engine_long(const struct engine_long_params *params, const struct engine_long_sink *sink, struct error *err)
{
	struct long_bench b = {.params = params, .sink = sink, .clock = params->cpu_time ? &cpu_clock : clock_system()};
	enum status st = check(params, err);
	if (st == STATUS_OK)
		st = prepare(&b, err);
	if (st == STATUS_OK) {
		const struct engine_long_info info = {b.info->backend,    b.info->kv_type, b.info->n_threads,
		                                      b.info->rope.reach, b.info->rope,    b.info->kv_bytes_per_token};
		sink->info(sink->arg, &info);
	}
	for (size_t i = 0; i < params->n_lengths && st == STATUS_OK; i++)
		st = run_length(&b, params->length[i], err);
	engine_destroy(b.e);
	struct tokens *const all[] = {&b.text, &b.prompt, &b.tail, &b.question, &b.answer, &b.reference, &b.stop};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		free(all[i]->ids);
	for (size_t i = 0; i < ENGINE_LONG_KEYS_MAX; i++) {
		free(b.ask[i].ids);
		free(b.key[i].ids);
	}
	free(b.kind);
	free(b.exact);
	free(b.own);
	return st;
}
