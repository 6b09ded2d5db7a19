/*
 * A step of the worker: the device computes the batch, the next tokens are chosen, and what came of it goes to whom it
 * concerns.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "engine/base/log.h"
#include "engine/drift.h"
#include "engine/event.h"
#include "engine/request.h"
#include "engine/worker.h"

/* The prompt is computed: what was known of it goes out, with its log-probabilities if they were wanted. */
static bool send_prompt(struct worker *w, struct request *r)
{
	struct engine_event *ev = event_create(ENGINE_EVENT_PROMPT, r->id);
	if (!ev)
		return false;
	ev->usage = r->usage;
	ev->turns_dropped = r->spec->turns_dropped;
	if (r->spec->want_prompt) {
		ev->tokens = malloc((size_t)r->n_prompt * sizeof *ev->tokens);
		if (r->spec->text)
			buf_append(&ev->text, r->spec->text, r->spec->text_n);
		else
			tokenizer_decode(w->e->tokenizer, r->tokens.ids, (size_t)r->n_prompt, true, &ev->text);
		if (!ev->tokens || ev->text.failed) {
			engine_event_free(ev);
			return false;
		}
		memcpy(ev->tokens, r->tokens.ids, (size_t)r->n_prompt * sizeof *ev->tokens);
		ev->n_tokens = (size_t)r->n_prompt;
	}
	ev->logprobs = r->prompt_logprobs;
	r->prompt_logprobs = NULL;
	w->stats.prompt_tokens += (uint64_t)r->n_prompt;
	w->stats.cached_tokens += (uint64_t)r->usage.cached_tokens;
	r->prompt_done = true;
	list_push_back(&w->out, &ev->link);
	return true;
}

/* Row i of a prompt predicts token i + 1. first: the position of the first of n logit rows. */
static void read_prompt_logprobs(struct worker *w, struct request *r, const float *logits, int32_t first, int32_t n)
{
	int32_t n_vocab = tokenizer_n_vocab(w->e->tokenizer);
	int32_t n_top = r->spec->sampling.n_logprobs > 0 ? r->spec->sampling.n_logprobs : 0;
	if (first == 0) {
		r->prompt_logprobs[0].token = r->tokens.ids[0];
		r->prompt_logprobs[0].logprob = NAN;
	}
	for (int32_t i = 0; i < n && first + i + 1 < r->n_prompt; i++)
		sampler_logprobs(logits + (size_t)i * (size_t)w->e->info.n_vocab, n_vocab, r->tokens.ids[first + i + 1],
		                 n_top, &r->prompt_logprobs[first + i + 1]);
}

/* `token` where the backend has chosen (as `sample` of backend.h marks it), and else this. */
enum { NOT_CHOSEN = INT32_MAX };

/* Chooses the next token, unless that is done, sends it, and ends the request if it was the last. */
static void take_token(struct worker *w, struct request *r, float *logits, int32_t chosen)
{
	struct engine *e = w->e;
	const char *detail;
	const uint64_t *allowed = NULL;
	bool complete = false;
	struct error err;
	struct engine_event *ev = event_create(ENGINE_EVENT_TOKEN, r->id);
	if (!ev)
		goto nomem;
	if (r->matcher && grammar_matcher_mask(r->matcher, &allowed, &err) != STATUS_OK)
		goto fail;
	if (r->spec->choose)
		ev->sample = (struct sample_result){
			.token = r->spec->choose(r->spec->choose_arg, logits, tokenizer_n_vocab(e->tokenizer),
			                         r->usage.completion_tokens),
			.logprob = NAN,
		};
	else if (chosen == NOT_CHOSEN)
		sampler_sample_allowed(r->sampler, logits, allowed, &ev->sample);
	else
		ev->sample = (struct sample_result){.token = sampler_take(r->sampler, chosen), .logprob = NAN};
	int32_t token = ev->sample.token;
	if (token < 0 || token >= tokenizer_n_vocab(e->tokenizer)) {
		error_set(&err, STATUS_INVALID, "there is no token %" PRId32, token);
		goto fail;
	}
	if (!r->first_token_ns) {
		r->first_token_ns = clock_now_ns(e->clock);
		r->usage.prefill_ns = r->first_token_ns - r->started_ns;
		r->usage.ttft_ns = r->first_token_ns - r->submitted_ns;
	}
	if (request_is_end_token(r, e->tokenizer, token, &detail)) {
		engine_event_free(ev);
		worker_finish_request(w, r, ENGINE_FINISH_STOP, detail);
		return;
	}
	if (r->matcher && grammar_matcher_accept(r->matcher, token, &complete, &err) != STATUS_OK)
		goto fail;
	struct str piece = tokenizer_piece(e->tokenizer, token, false);
	buf_append(&ev->piece, piece.p, piece.n);
	int stop = detok_push(r->detok, token, &ev->text);
	if (ev->piece.failed || ev->text.failed || !token_buf_add(&r->tokens, token))
		goto nomem;
	sampler_accept(r->sampler, token, true);
	r->state = REQUEST_DECODE;
	r->usage.completion_tokens++;
	w->stats.generated_tokens++;
	list_push_back(&w->out, &ev->link);
	if (stop >= 0) {
		r->last->stop_index = stop;
		worker_finish_request(w, r, ENGINE_FINISH_STOP, "stop");
	} else if (complete) {
		worker_finish_request(w, r, ENGINE_FINISH_STOP, "grammar");
	} else if ((int32_t)r->tokens.n >= r->max_total) {
		worker_finish_request(w, r, ENGINE_FINISH_LENGTH, "length");
	}
	return;

nomem:
	error_set(&err, STATUS_NOMEM, "no memory for the next token");
fail:
	engine_event_free(ev);
	worker_fail_request(w, r, &err);
}

/* mine: the logits of the part's outputs, if they are needed here. */
static void take_part(struct worker *w, const struct step_part *part, float *mine, int32_t chosen)
{
	struct request *r = part->request;
	struct error err;
	int32_t first = r->kv.n_tokens;
	if (r->spill.lost) {
		worker_explain_loss(&err);
		worker_fail_request(w, r, &err);
		return;
	}
	if (part->moves) {
		sched_moved(part);
		return;
	}
	if (part->again) {
		recall_computed(&w->sched, r, part->n_rows);
		return;
	}
	if (part->exact) {
		drift_exact(r->drift, first, mine);
		return;
	}
	if (request_waits(r) && trigger_saw(&r->trigger, first, &r->look))
		kv_policy_fire(&r->policy, first + part->n_rows);
	r->kv.n_tokens += part->n_rows;
	sched_index(&w->sched, r);
	sched_let_go(&w->sched, r);
	if (r->state == REQUEST_PREFILL)
		w->stats.computed_prompt_tokens += (uint64_t)part->n_rows;
	if (r->prompt_logprobs && !r->prompt_done)
		read_prompt_logprobs(w, r, mine, first, part->n_outputs);
	if (request_pending(r) > 0)
		return;
	if (!r->prompt_done && !send_prompt(w, r)) {
		error_set(&err, STATUS_NOMEM, "no memory for the prompt's answer");
		worker_fail_request(w, r, &err);
		return;
	}
	if (r->max_total <= r->n_prompt) {
		worker_finish_request(w, r, ENGINE_FINISH_LENGTH, "length");
		return;
	}
	if (r->drift && mine)
		drift_compare(r->drift, mine);
	take_token(w, r, mine + (size_t)(part->n_outputs - 1) * (size_t)w->e->info.n_vocab, chosen);
}

/*
 * A step has failed: its requests end. Memory that ran short or a kernel that could not start concerns them alone; a
 * device that is lost is the end of all of them.
 */
static void fail_step(struct worker *w, enum status st)
{
	const struct batch *b = &w->sched.batch;
	struct error err;
	int32_t n_seqs = b->n_seqs;
	worker_explain_failure(w, st, &err);
	log_msg(LOG_ERROR, "step", "a step of %" PRId32 " rows failed: %s", b->n_rows, err.message);
	for (int32_t i = 0; i < n_seqs; i++) {
		struct request *r = w->sched.part[i].request;
		int32_t later = i + 1;
		while (later < n_seqs && w->sched.part[later].request != r)
			later++;
		if (later == n_seqs)
			worker_fail_request(w, r, &err);
	}
	if (st == STATUS_DEVICE) {
		w->lost = true;
		w->lost_error = err;
	}
}

/* Whether a part's only output is the next token, chosen by the backend: then *row says how. */
static bool chosen_on_device(const struct worker *w, const struct step_part *part, struct sample_row *row)
{
	const struct request *r = part->request;
	/* A grammar's mask is applied here. */
	if (r->matcher || r->drift || r->spec->choose || !model_samples(w->e->model) || part->n_outputs != 1 ||
	    (r->prompt_logprobs && !r->prompt_done) || !sampler_offload(r->sampler, row))
		return false;
	row->output = part->first_output;
	return true;
}

/*
 * What the step gave: tokens where the backend can choose them, so that no logits cross the bus, and logits where not.
 */
static enum status fetch_outputs(struct worker *w)
{
	struct model *m = w->e->model;
	int32_t n_seqs = w->sched.batch.n_seqs, n = 0;
	for (int32_t i = 0; i < n_seqs; i++) {
		const struct step_part *part = &w->sched.part[i];
		w->part_logits[i] = NULL;
		w->part_token[i] = NOT_CHOSEN;
		if (chosen_on_device(w, part, &w->choice[n])) {
			w->part_token[i] = n++; /* for now: which choice */
			continue;
		}
		enum status st = model_logits(m, part->first_output, part->n_outputs, &w->part_logits[i]);
		if (st != STATUS_OK)
			return st;
	}
	if (n == 0)
		return STATUS_OK;
	enum status st = model_sample(m, tokenizer_n_vocab(w->e->tokenizer), w->choice, n, w->chosen);
	for (int32_t i = 0; i < n_seqs; i++) {
		if (w->part_token[i] != NOT_CHOSEN)
			w->part_token[i] = w->chosen[w->part_token[i]];
	}
	return st;
}

/* Rows that choose what they read need the bounds of the pages before their own. */
static enum status bound_pages(struct worker *w)
{
	const struct batch *b = &w->sched.batch;
	enum status st = STATUS_OK;
	for (int32_t i = 0; i < b->n_seqs && st == STATUS_OK; i++) {
		const struct batch_seq *s = &b->seq[i];
		int32_t last = s->first_position + s->n_rows - 1, first = s->choice.n_first;
		if (page_choice_binds(&s->choice, last))
			st = kv_pool_bound(w->e->pool, s->block_table + first, last / KV_PAGE_TOKENS - first);
	}
	return st;
}

void worker_run_step(struct worker *w)
{
	struct engine *e = w->e;
	const struct batch *b = &w->sched.batch;
	int64_t start = clock_now_ns(clock_system());
	enum status st = bound_pages(w);
	if (st == STATUS_OK)
		st = model_run(e->model, b, kv_pool_slab(e->pool));
	if (b->arrival && (st == STATUS_OK || st == STATUS_CANCELLED) && !sched_arrived(&w->sched, st == STATUS_OK))
		return;
	if (st == STATUS_OK)
		st = fetch_outputs(w);
	int64_t took = clock_now_ns(clock_system()) - start;
	int32_t n_seqs = b->n_seqs;
	if (st != STATUS_OK) {
		fail_step(w, st);
		return;
	}
	w->stats.steps++;
	w->stats.step_rows += (uint64_t)b->n_rows;
	w->stats.step_ns += took;
	/* One that waited for pages says nothing about how fast rows are computed. */
	if (!b->arrival)
		sched_measure(&w->sched, b->n_rows, b->n_rows > n_seqs, took);
	for (int32_t i = 0; i < n_seqs; i++)
		take_part(w, &w->sched.part[i], w->part_logits[i], w->part_token[i]);
}
