#include "engine/sched_internal.h"

#include "engine/drift.h"
#include "engine/promotion.h"

/*
 * How long a step should take: a client that leaves, a cancel and a new request wait for at most a step, and with
 * somebody decoding a step is also the time between two of their tokens.
 */
static const double STEP_SECONDS = 0.25, STEP_SECONDS_DECODING = 0.1;
enum { MIN_PROMPT_ROWS = 32 };
/* Adds the next n_rows positions of a request to the batch. */
static void add_rows(struct sched *s, struct request *r, int32_t n_rows, int32_t n_outputs)
{
	struct batch *b = &s->batch;
	int32_t first = b->n_rows, at = r->kv.n_tokens;
	for (int32_t i = 0; i < n_rows; i++) {
		s->token[first + i] = r->tokens.ids[at + i];
		s->position[first + i] = at + i;
	}
	for (int32_t i = 0; i < n_outputs; i++)
		s->output_row[b->n_outputs + i] = first + n_rows - n_outputs + i;
	s->seq[b->n_seqs] = (struct batch_seq){
		.first_row = first,
		.n_rows = n_rows,
		.first_position = kv_seq_places(&r->kv),
		.block_table = r->kv.pages,
		.n_pages = r->kv.n_pages,
		.choice = request_choice(r),
		.mass = at >= kv_policy_weighs_from(&r->policy) ? r->kv.mass : NULL,
		.look = request_looks(r) ? &r->look : NULL,
		.plus = r->kv.n_buckets > 0 ? r->kv.plus : NULL,
		.probe = recall_probes(r) && r->recall.probe.n_pages > 0 ? &r->recall.probe : NULL,
		.n_plus = kv_merge_n_plus(&r->kv),
		.far = r->spill.n_groups > 0 ? &r->spill.far : NULL,
	};
	if (s->seq[b->n_seqs].far)
		s->seq[b->n_seqs].look = NULL; /* attention by parts tells nothing */
	s->part[b->n_seqs] = (struct step_part){r, n_rows, b->n_outputs, n_outputs, false, false, false};
	if (r->fetch.under_way)
		promotion_announce(s, r);
	b->n_rows += n_rows;
	b->n_outputs += n_outputs;
	b->n_seqs++;
}

/*
 * Adds its first positions that have moved, as many as there are and `room` rows at most; whether they are all of them,
 * and a row is left.
 */
static bool add_moved_rows(struct sched *s, struct request *r, int32_t room)
{
	struct batch *b = &s->batch;
	int32_t first = b->n_rows, at = r->policy.first_pages * KV_PAGE_TOKENS - r->n_moving,
		n = r->n_moving < room ? r->n_moving : room;
	for (int32_t i = 0; i < n; i++) {
		s->token[first + i] = r->tokens.ids[at + i];
		s->position[first + i] = r->kv.moved + at + i;
	}
	s->seq[b->n_seqs] = (struct batch_seq){first, n, at, r->kv.pages, r->policy.first_pages};
	s->part[b->n_seqs] = (struct step_part){r, n, b->n_outputs, 0, false, true, false};
	b->n_rows += n;
	b->n_seqs++;
	r->n_moving_now = n;
	return n == r->n_moving && n < room;
}

/* Adds rows of what a request computes again, as many as given or as can be. */
static void add_again_rows(struct sched *s, struct request *r, int32_t n)
{
	struct batch *b = &s->batch;
	const struct kv_seq *again = &r->recall.again;
	int32_t first = b->n_rows, at = again->n_tokens, reach = recall_reach(r);
	n = n < reach ? n : reach;
	for (int32_t i = 0; i < n; i++) {
		s->token[first + i] = r->tokens.ids[at + i];
		s->position[first + i] = at + i;
	}
	s->seq[b->n_seqs] = (struct batch_seq){first, n, kv_seq_places(again), again->pages, again->n_pages};
	s->part[b->n_seqs] = (struct step_part){r, n, b->n_outputs, 0, false, false, true};
	b->n_rows += n;
	b->n_seqs++;
}

void sched_moved(const struct step_part *part)
{
	part->request->n_moving -= part->n_rows;
}

static int32_t step_budget(const struct sched *s, bool decoding)
{
	if (s->rows_per_s <= 0)
		return s->step_tokens < 64 ? s->step_tokens : 64;
	double rows = s->rows_per_s * (decoding ? STEP_SECONDS_DECODING : STEP_SECONDS);
	int32_t floor = s->batch.n_rows + MIN_PROMPT_ROWS;
	if (rows < floor)
		rows = floor;
	return rows < s->step_tokens ? (int32_t)rows : s->step_tokens;
}

/* A prompt's share of the step: as many rows as given, or what its outputs leave room for. */
static void add_prompt_rows(struct sched *s, struct request *r, int32_t n_rows)
{
	int32_t room = s->max_outputs - s->batch.n_outputs;
	bool all_outputs = r->prompt_logprobs && !r->prompt_done;
	if (all_outputs && n_rows > room)
		n_rows = room;
	if (n_rows > sched_reach(s, r))
		n_rows = sched_reach(s, r);
	/* Its next piece begins with a page. */
	if (r->is_large && n_rows < request_pending(r))
		n_rows -= (r->kv.n_tokens + n_rows) % KV_PAGE_TOKENS;
	if (n_rows <= 0 || room <= 0)
		return;
	bool completes = n_rows == request_pending(r);
	/* A prompt that only warms the cache needs no logits at its end. */
	bool wants_last = completes && r->max_total > r->n_prompt;
	add_rows(s, r, n_rows, all_outputs ? n_rows : wants_last ? 1 : 0);
}

/* Whether a running request stands back in this step. */
static bool stands_back(const struct request *r, bool large_rest)
{
	return large_rest && r->spill.n_groups > 0;
}

/* Whether it has rows of known tokens. */
static bool has_known_rows(const struct request *r)
{
	return recall_under_way(r) || (r->state == REQUEST_PREFILL && r->n_moving == r->n_moving_now);
}

static void add_prompts(struct sched *s, bool decoding, bool large_rest)
{
	int32_t n_prompts = 0;
	list_each(l, next, &s->running)
		n_prompts += has_known_rows(sched_entry(l)) && !stands_back(sched_entry(l), large_rest);
	if (n_prompts == 0)
		return;
	int32_t left = step_budget(s, decoding) - s->batch.n_rows;
	list_each(l, next, &s->running) {
		struct request *r = sched_entry(l);
		if (!has_known_rows(r) || left <= 0 || stands_back(r, large_rest))
			continue;
		/*
		 * Equal shares, so that a short prompt behind a long one does not wait for all of it; what one leaves
		 * goes on.
		 */
		int32_t share = (left + n_prompts - 1) / n_prompts;
		if (share < MIN_PROMPT_ROWS)
			share = left < MIN_PROMPT_ROWS ? left : MIN_PROMPT_ROWS;
		/* All that is below the pool is read for it, however many they are. */
		if (r->spill.n_groups > 0)
			share = s->step_tokens - s->batch.n_rows;
		int32_t before = s->batch.n_rows;
		if (recall_under_way(r))
			add_again_rows(s, r, share);
		else
			add_prompt_rows(s, r, share);
		left -= s->batch.n_rows - before;
		n_prompts--;
	}
}

/*
 * Its policy acts where it is time for that, and there is room for what follows up to the next time. As
 * sched_make_room().
 */
static bool go_on(struct sched *s, struct request *r)
{
	if (!sched_make_way(s, r)) {
		sched_preempt(s, r, ENGINE_ROOM_DECODE);
		return false;
	}
	if (!sched_act(s, r, sched_reach(s, r)))
		return false;
	if (recall_under_way(r) && !recall_go_on(s, r))
		return false;
	/* its prompt has its pages since it was admitted */
	bool paged = r->policy.kind == KV_POLICY_FULL && !r->is_large;
	r->kv.goes_on = r->state == REQUEST_PREFILL && sched_reach(s, r) < request_reach(r);
	if (!(r->state == REQUEST_PREFILL && paged) &&
	    !sched_make_room(s, r, &r->kv, r->state == REQUEST_DECODE ? 1 : sched_reach(s, r)))
		return false;
	if (r->kv.n_tokens < kv_policy_weighs_from(&r->policy) || kv_seq_weigh(&r->kv))
		return true;
	sched_preempt(s, r, ENGINE_ROOM_DECODE);
	return false;
}

/* Whether the next row of an answer is to be computed without its policy first. */
static bool wants_exact(const struct request *r)
{
	struct page_choice choice = request_choice(r);
	return r->drift && page_choice_binds(&choice, r->kv.n_tokens) &&
	       drift_wants(r->drift, r->kv.n_tokens, r->kv.n_tokens - choice.from);
}

/* A part becomes one that reads everything and tells nothing. */
static void make_exact(struct step_part *part, struct batch_seq *seq)
{
	part->exact = true;
	seq->choice = (struct page_choice){0};
	seq->look = NULL;
}

/* Large requests stand back while others are owed time. */
static bool others_are_owed(const struct sched *s)
{
	bool others = false;
	list_each(l, next, (struct list *)&s->running)
		others = others || sched_entry(l)->spill.n_groups == 0;
	return s->owed_ns > 0 && others;
}

/* Tells the room below the pool what the step will read of it. */
static void announce_spills(struct sched *s)
{
	int32_t n = 0;
	for (int32_t i = 0; i < s->batch.n_seqs; i++) {
		if (s->batch.seq[i].far)
			s->spill[n++] = &s->part[i].request->spill;
	}
	if (n > 0)
		kv_overflow_step(s->overflow, s->spill, n);
}

bool sched_build(struct sched *s)
{
	struct batch *b = &s->batch;
	int32_t n_seen = 0;
	b->n_rows = b->n_seqs = b->n_outputs = 0;
	b->arrival = NULL;
	sched_admit(s);
	bool large_rest = others_are_owed(s);
	/* Oldest first: whoever has to give way is younger and so not in the batch yet. */
	for (struct list *l = s->running.next; l != &s->running;) {
		struct request *r = sched_entry(l);
		struct list *older = l->prev;
		if (!stands_back(r, large_rest) && !go_on(s, r)) {
			l = older->next;
			continue;
		}
		l = l->next;
		r->n_moving_now = 0;
		/* All behind it may have a row. */
		int32_t room = s->step_tokens - b->n_rows - (s->n_running - ++n_seen);
		bool ready = r->n_moving == 0 || add_moved_rows(s, r, room);
		if (r->state != REQUEST_DECODE || !ready || recall_under_way(r) || stands_back(r, large_rest))
			continue;
		add_rows(s, r, 1, 1);
		if (wants_exact(r))
			make_exact(&s->part[b->n_seqs - 1], &s->seq[b->n_seqs - 1]);
	}
	add_prompts(s, b->n_rows > 0, large_rest);
	if (b->n_rows == 0 && large_rest) {
		s->owed_ns = 0; /* they have no use for it */
		return sched_build(s);
	}
	announce_spills(s);
	return b->n_rows > 0;
}

void sched_measure(struct sched *s, int32_t n_rows, bool has_prompt_rows, int64_t step_ns)
{
	bool large = false;
	for (int32_t i = 0; i < s->batch.n_seqs; i++)
		large = large || s->batch.seq[i].far;
	s->owed_ns = large ? step_ns : s->owed_ns > step_ns ? s->owed_ns - step_ns : 0;
	if (large || !has_prompt_rows || n_rows < MIN_PROMPT_ROWS || step_ns <= 0)
		return;
	double now = n_rows / (step_ns * 1e-9);
	s->rows_per_s = s->rows_per_s > 0 ? 0.7 * s->rows_per_s + 0.3 * now : now;
	if (s->tiers)
		kv_tiers_prefill_rate(s->tiers, s->rows_per_s);
}
