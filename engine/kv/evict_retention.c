/*
 * The learned retention index, the default policy.
 *
 * The question is not when a page was used but what keeping it earns: how many uses per second of occupancy, from now
 * on, at best. A page's future depends on what kind of use its last one was, and on how long ago that is. So every
 * known block belongs to a group, set at each use, and to a bin of age, and per group and bin the policy learns the
 * hazard q: the rate of the next use, per width of the bin. With S(b) the probability to come through from the present
 * bin a to bin b, the worth of a group's page in bin a is
 *
 *     max over t >= a of   [sum b = a..t of S(b) (1 - exp -q(b))] / [sum b = a..t of S(b) w(b) (1 - exp -q(b)) / q(b)]
 *
 * (w: width of a bin): the best ratio of expected uses to expected time in the cache over all moments t to give up,
 * which is the Gittins index of the page (J. C. Gittins, 1979). The candidate of the lowest worth goes. Pages go only
 * when something happens, so the time below the line is at least the mean pause between two moments at which something
 * does.
 *
 * Groups. Four things about a use: how many it makes (1, 2, 3, more); how far before the end of its prompt the block
 * lies (0, 1, 2-3, 4-7, 8-15, more, in EVICT_DISTANCE_TOKENS): the end belongs to one conversation, the beginning to
 * many; how many turns the chain had grown by before the block was added (0, 1, more); whether the answer was short.
 *
 * Learning. When a block is used again, H[group][bin] += 1. N[group][bin] is the exposure: time in the bin / width,
 * summed over blocks, those still inside included. Blocks that are gone are followed as ghosts, so what is learned does
 * not depend on what happened to be kept. H and N fade by 0.98 in 100 prompts. Every 100 prompts, and sooner as long as
 * that is more than a twentieth of all, the hazards are estimated anew, each level drawn to the one above it as far as
 * it lacks data of its own: all blocks; uses x distance; then by turn; then by short answer. The prior is a constant
 * hazard per bin; as widths grow with age, a page is then worth less the older it is, so a cold start is about lru.
 *
 * Cost. Blocks of a bin form a list by age; each call moves those on that have outgrown their bin, at most 41 times
 * between two uses. Each (group, bin) has a queue of candidates, and queues are numbered by worth: the victim is the
 * head of the first that has members. A lesson sorts the numbers, some 100 microseconds for 100 prompts.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kv/evict_policy.h"

enum {
	N_BINS = 42,     /* from 0, 1/64, 1/32 ... 1, sqrt 2, 2, ... 2^17 seconds on */
	SECOND_BIN = 7,  /* from 1 second on */
	N_USES = 4,
	N_DISTANCES = 6,
	N_TURNS = 3,
	N_ANSWERS = 2,
	N_GROUPS = N_USES * N_DISTANCES * N_TURNS * N_ANSWERS,
	N_QUEUES = N_GROUPS * N_BINS,
	/*
	 * A page that a live session vouches for counts as if it were a quarter as old, or younger: four bins of sqrt
	 * 2. It yields to what is worth more even so.
	 */
	CLAIM_BINS = 4,
	LESSON_PROMPTS = 100, /* between two lessons, at most */
	LESSON_PART = 20,     /* a lesson is due when this part of all prompts has come since the last one */
	MORE_GHOSTS = 65536, /* a small cache needs a longer memory than its own size */
};

static const double FADE = 0.98; /* in LESSON_PROMPTS prompts */
/* The prior: uses per bin, and the exposure it weighs as much as. */
static const double PRIOR_HAZARD = 0.05, PRIOR_WEIGHT = 20;
/* Expected uses that the level of the group above weighs as much as, and the exposure that its shape does. */
static const double LEVEL_WEIGHT = 20, SHAPE_WEIGHT = 200;
/*
 * How much the latest mean pause counts against the earlier ones, and how many times as long it may seem: nights pass.
 */
static const double PAUSE_PART = 0.2, PAUSE_GROWTH = 2;

/* A known block; beside e->items, and small, since time alone moves it about. */
struct known {
	int32_t prev, next; /* in the list of its bin */
	int64_t used_ms;
	uint64_t claim;
	uint8_t group, bin, turn;
	bool claimed; /* filed as such; looked at again when it moves and before it goes */
	bool ghost;
};

struct cell {
	double hits, exposure; /* of what left the bin */
	uint64_t n;            /* blocks inside */
	uint64_t sum_used_ms;  /* of those; may wrap, and is only used in a difference that does not */
};

struct retention {
	struct known *known;
	int64_t edge_ms[N_BINS + 1];
	struct bin {
		int32_t oldest, newest;
	} bins[N_BINS];
	struct cell cells[N_GROUPS][N_BINS];
	uint64_t n_prompts;
	uint64_t n_learned; /* prompts at the last lesson, learned_ms: its time */
	int64_t learned_ms;
	int64_t n_moments;  /* times at which something has happened since */
	double pause_ms;    /* mean time from one to the next */
	int32_t queue_of[N_QUEUES]; /* by group * N_BINS + bin */
	/* by queue, rising; single precision lets values that differ by rounding alone be equal */
	float worth[N_QUEUES];
	struct lesson {             /* scratch of learn() */
		double hits[N_GROUPS][N_BINS], exposure[N_GROUPS][N_BINS];
		float worth[N_QUEUES];
		int32_t order[N_QUEUES], spare[N_QUEUES];
	} lesson;
};

_Static_assert(N_GROUPS <= 256, "struct known holds a group in a byte");

/* ---- Bins of age ---- */

static int bin_of(const struct retention *r, int64_t age_ms)
{
	int low = 0, high = N_BINS - 1;
	while (low < high) {
		int middle = (low + high + 1) / 2;
		if (r->edge_ms[middle] <= age_ms)
			low = middle;
		else
			high = middle - 1;
	}
	return low;
}

static double width_ms(const struct retention *r, int bin)
{
	return (double)(r->edge_ms[bin + 1] - r->edge_ms[bin]);
}

/* The block, younger than all in this bin, enters it. */
static void enter_bin(struct retention *r, int32_t i, int bin)
{
	struct known *k = &r->known[i];
	struct bin *b = &r->bins[bin];
	struct cell *c = &r->cells[k->group][bin];
	k->bin = (uint8_t)bin;
	k->prev = b->newest;
	k->next = EVICT_NONE;
	*(b->newest == EVICT_NONE ? &b->oldest : &r->known[b->newest].next) = i;
	b->newest = i;
	c->n++;
	c->sum_used_ms += (uint64_t)k->used_ms;
}

static void leave_bin(struct retention *r, int32_t i)
{
	struct known *k = &r->known[i];
	struct bin *b = &r->bins[k->bin];
	struct cell *c = &r->cells[k->group][k->bin];
	*(k->prev == EVICT_NONE ? &b->oldest : &r->known[k->prev].next) = k->next;
	*(k->next == EVICT_NONE ? &b->newest : &r->known[k->next].prev) = k->prev;
	c->n--;
	c->sum_used_ms -= (uint64_t)k->used_ms;
}

/* The block leaves its bin for another reason than age: it was exposed to a part of it. */
static void cut_short(struct evict *e, int32_t i)
{
	struct retention *r = e->state;
	const struct known *k = &r->known[i];
	double inside_ms = (double)(e->now_ms - k->used_ms - r->edge_ms[k->bin]);
	r->cells[k->group][k->bin].exposure += inside_ms / width_ms(r, k->bin);
	leave_bin(r, i);
}

static void retention_advance(struct evict *e)
{
	struct retention *r = e->state;
	r->n_moments++;
	/* From the oldest bin down, so that what moves far finds the bin ahead of it in order. */
	for (int b = N_BINS - 2; b >= 0; b--) {
		for (int32_t i; (i = r->bins[b].oldest) != EVICT_NONE;) {
			struct known *k = &r->known[i];
			int64_t age_ms = e->now_ms - k->used_ms;
			if (age_ms < r->edge_ms[b + 1])
				break;
			bool filed = !k->ghost && evict_unfile(e, i);
			int to = bin_of(r, age_ms);
			for (int passed = b; passed < to; passed++)
				r->cells[k->group][passed].exposure += 1;
			leave_bin(r, i);
			enter_bin(r, i, to);
			k->claimed = !k->ghost && evict_claim_holds(e, k->claim);
			if (filed)
				evict_file(e, i);
		}
	}
}

/* ---- Lessons ---- */

/* Hazards of a group from its own hits and exposure, drawn to those of the group above. */
static void estimate(const double *hits, const double *exposure, const double *above, double *hazard)
{
	double sum = 0, expected = 0;
	for (int b = 0; b < N_BINS; b++) {
		sum += hits[b];
		expected += exposure[b] * above[b];
	}
	double level = (LEVEL_WEIGHT + sum) / (LEVEL_WEIGHT + expected);
	for (int b = 0; b < N_BINS; b++)
		hazard[b] = (hits[b] + SHAPE_WEIGHT * level * above[b]) / (exposure[b] + SHAPE_WEIGHT);
}

/* The same from the sums over n consecutive groups. */
static void estimate_sum(const struct lesson *l, int first, int n, const double *above, double *hazard)
{
	double hits[N_BINS] = {0}, exposure[N_BINS] = {0};
	for (int g = first; g < first + n; g++) {
		for (int b = 0; b < N_BINS; b++) {
			hits[b] += l->hits[g][b];
			exposure[b] += l->exposure[g][b];
		}
	}
	estimate(hits, exposure, above, hazard);
}

static void pooled_hazard(const struct lesson *l, double *hazard)
{
	for (int b = 0; b < N_BINS; b++) {
		double hits = PRIOR_WEIGHT * PRIOR_HAZARD, exposure = PRIOR_WEIGHT;
		for (int g = 0; g < N_GROUPS; g++) {
			hits += l->hits[g][b];
			exposure += l->exposure[g][b];
		}
		hazard[b] = hits / exposure;
	}
}

/* The formula at the top, in uses per millisecond. Hazards are above zero, as the prior is. */
static void worth_by_bin(const struct retention *r, const double *hazard, float *worth)
{
	double use[N_BINS], time_ms[N_BINS];
	for (int b = 0; b < N_BINS; b++) {
		use[b] = -expm1(-hazard[b]);
		time_ms[b] = width_ms(r, b) * use[b] / hazard[b];
	}
	for (int a = 0; a < N_BINS; a++) {
		double stay = 1, uses = 0, ms = 0, best_uses = 0, best_ms = 1;
		for (int t = a; t < N_BINS; t++) {
			uses += stay * use[t];
			ms += stay * time_ms[t];
			stay *= 1 - use[t];
			double paid_ms = ms > r->pause_ms ? ms : r->pause_ms;
			if (uses * best_ms > best_uses * paid_ms) {
				best_uses = uses;
				best_ms = paid_ms;
			}
		}
		worth[a] = (float)(best_uses / best_ms);
	}
}

/*
 * Sorts l->order by rising worth. Positive floats are ordered like their bits; three passes of a radix sort by 11 of
 * them.
 */
static void sort_by_worth(struct lesson *l)
{
	enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };
	int32_t *from = l->order, *to = l->spare;
	for (int shift = 0; shift < 32; shift += DIGIT_BITS) {
		int32_t start[DIGITS + 1] = {0};
		for (int pass = 0; pass < 2; pass++) {
			for (int n = 0; n < N_QUEUES; n++) {
				uint32_t bits;
				memcpy(&bits, &l->worth[from[n]], sizeof bits);
				uint32_t digit = bits >> shift & (DIGITS - 1);
				if (pass == 0)
					start[digit + 1]++;
				else
					to[start[digit]++] = from[n];
			}
			for (int d = 0; pass == 0 && d < DIGITS; d++)
				start[d + 1] += start[d];
		}
		int32_t *swap = from;
		from = to;
		to = swap;
	}
	memcpy(l->order, from, sizeof l->order); /* an odd number of passes leaves it in `spare` */
}

/* Numbers the queues by what their members are worth now, and moves their roots with them. */
static void number_queues(struct evict *e)
{
	struct retention *r = e->state;
	struct lesson *l = &r->lesson;
	for (int n = 0; n < N_QUEUES; n++)
		l->order[n] = n;
	sort_by_worth(l);
	for (int n = 0; n < N_QUEUES; n++)
		l->spare[n] = e->roots[r->queue_of[n]];
	for (int q = 0; q < N_QUEUES; q++) {
		int32_t n = l->order[q];
		r->queue_of[n] = q;
		r->worth[q] = l->worth[n];
		evict_set_root(e, q, l->spare[n]);
	}
}

static void measure_pause(struct evict *e)
{
	struct retention *r = e->state;
	if (r->n_prompts > 1 && r->n_moments > 0) {
		double mean = (double)(e->now_ms - r->learned_ms) / (double)r->n_moments;
		if (r->pause_ms == 0)
			r->pause_ms = mean;
		else if (mean < r->pause_ms * PAUSE_GROWTH)
			r->pause_ms += PAUSE_PART * (mean - r->pause_ms);
		else
			r->pause_ms += PAUSE_PART * (PAUSE_GROWTH - 1) * r->pause_ms;
	}
	r->learned_ms = e->now_ms;
	r->n_moments = 0;
}

static void learn(struct evict *e)
{
	struct retention *r = e->state;
	struct lesson *l = &r->lesson;
	double all[N_BINS], by_use[N_BINS], by_turn[N_BINS], hazard[N_BINS];
	double fade = pow(FADE, (double)(r->n_prompts - r->n_learned) / LESSON_PROMPTS);
	r->n_learned = r->n_prompts;
	measure_pause(e);
	for (int g = 0; g < N_GROUPS; g++) {
		for (int b = 0; b < N_BINS; b++) {
			struct cell *c = &r->cells[g][b];
			/* The sum over the blocks inside of the time they have been there. */
			uint64_t inside_ms = c->n * (uint64_t)(e->now_ms - r->edge_ms[b]) - c->sum_used_ms;
			c->hits *= fade;
			c->exposure *= fade;
			l->hits[g][b] = c->hits;
			l->exposure[g][b] = c->exposure + (double)inside_ms / width_ms(r, b);
		}
	}
	pooled_hazard(l, all);
	for (int g = 0; g < N_GROUPS; g++) {
		if (g % (N_TURNS * N_ANSWERS) == 0)
			estimate_sum(l, g, N_TURNS * N_ANSWERS, all, by_use);
		if (g % N_ANSWERS == 0)
			estimate_sum(l, g, N_ANSWERS, by_use, by_turn);
		estimate(l->hits[g], l->exposure[g], by_turn, hazard);
		worth_by_bin(r, hazard, &l->worth[g * N_BINS]);
	}
	number_queues(e);
}

static bool lesson_is_due(const struct retention *r)
{
	uint64_t since = r->n_prompts - r->n_learned;
	return since >= LESSON_PROMPTS || since * LESSON_PART >= r->n_prompts;
}

/* ---- The policy ---- */

static enum status retention_init(struct evict *e)
{
	struct retention *r = e->state = calloc(1, sizeof *r);
	if (!r)
		return STATUS_NOMEM;
	r->known = calloc((size_t)evict_max_items(e), sizeof *r->known);
	if (!r->known)
		return STATUS_NOMEM;
	for (int b = 0; b < N_BINS; b++)
		r->bins[b] = (struct bin){EVICT_NONE, EVICT_NONE};
	for (int b = 1; b <= N_BINS; b++)
		r->edge_ms[b] = llround(1000 * exp2(b < SECOND_BIN ? b - SECOND_BIN : (b - SECOND_BIN) / 2.0));
	for (int n = 0; n < N_QUEUES; n++)
		r->queue_of[n] = n;
	learn(e);
	return STATUS_OK;
}

static void retention_free(struct evict *e)
{
	struct retention *r = e->state;
	if (r)
		free(r->known);
	free(r);
}

static int group_of(uint32_t uses, int32_t distance, int turn, unsigned hints)
{
	int use = uses < N_USES ? (int)uses - 1 : N_USES - 1;
	int far = 0;
	while (far < N_DISTANCES - 1 && distance >> far)
		far++;
	return ((use * N_DISTANCES + far) * N_TURNS + turn) * N_ANSWERS + ((hints & EVICT_SHORT_ANSWER) != 0);
}

/*
 * By how many turns the chain had grown before a new block: one more than for its parent, unless one prompt brought
 * both.
 */
static int turn_of(const struct evict *e, int32_t i)
{
	const struct retention *r = e->state;
	int32_t parent = e->items[i].parent;
	if (parent == EVICT_NONE)
		return 0;
	int turn = r->known[parent].turn + (e->items[parent].uses > 1);
	return turn < N_TURNS ? turn : N_TURNS - 1;
}

static void retention_used(struct evict *e, int32_t i, const struct evict_use *use, enum evict_seen seen)
{
	struct retention *r = e->state;
	struct known *k = &r->known[i];
	if (use->parent == EVICT_NONE) {
		r->n_prompts++;
		if (lesson_is_due(r))
			learn(e);
	}
	if (seen == EVICT_NEW) {
		k->claim = 0;
		k->turn = (uint8_t)turn_of(e, i);
	} else {
		r->cells[k->group][k->bin].hits += 1;
		cut_short(e, i);
	}
	k->ghost = false;
	k->group = (uint8_t)group_of(e->items[i].uses + 1, use->distance, k->turn, use->hints);
	k->used_ms = e->now_ms;
	/* Who uses it without a claim takes nothing from whoever has one. */
	if (use->claim)
		k->claim = use->claim;
	k->claimed = evict_claim_holds(e, k->claim);
	enter_bin(r, i, 0);
}

static int32_t retention_queue(struct evict *e, int32_t i)
{
	const struct retention *r = e->state;
	const struct known *k = &r->known[i];
	int bin = !k->claimed ? k->bin : k->bin > CLAIM_BINS ? k->bin - CLAIM_BINS : 0;
	e->items[i].rank = 0; /* the order of use decides */
	return r->queue_of[k->group * N_BINS + bin];
}

/* Of the queues whose members are worth least and equal, the head that was used least recently. */
static int32_t cheapest(const struct evict *e)
{
	const struct retention *r = e->state;
	int32_t q = evict_busy_queue(e, 0), best = e->roots[q];
	float lowest = r->worth[q];
	while ((q = evict_busy_queue(e, q + 1)) != EVICT_NONE && r->worth[q] == lowest) {
		if (e->items[e->roots[q]].order < e->items[best].order)
			best = e->roots[q];
	}
	return best;
}

static int32_t retention_victim(struct evict *e)
{
	struct retention *r = e->state;
	for (;;) {
		int32_t i = cheapest(e);
		struct known *k = &r->known[i];
		if (!k->claimed || evict_claim_holds(e, k->claim))
			return i;
		/* Its claim has run out since it was filed. */
		evict_unfile(e, i);
		k->claimed = false;
		evict_file(e, i);
	}
}

static bool retention_gone(struct evict *e, int32_t i)
{
	struct retention *r = e->state;
	r->known[i].ghost = true;
	r->known[i].claimed = false;
	return true;
}

static void retention_forget(struct evict *e, int32_t i)
{
	cut_short(e, i);
}

/* Its time in the present bin counts for the group it turns out to belong to. */
static void retention_hint(struct evict *e, int32_t i, unsigned hints)
{
	struct retention *r = e->state;
	struct known *k = &r->known[i];
	struct cell *from = &r->cells[k->group][k->bin];
	k->group = (uint8_t)(k->group - k->group % N_ANSWERS + ((hints & EVICT_SHORT_ANSWER) != 0));
	struct cell *to = &r->cells[k->group][k->bin];
	from->n--;
	from->sum_used_ms -= (uint64_t)k->used_ms;
	to->n++;
	to->sum_used_ms += (uint64_t)k->used_ms;
}

const struct evict_policy evict_policy_retention = {
        .name = "retention",
        .n_queues = N_QUEUES,
        .ghosts_per_slot = true,
        .more_ghosts = MORE_GHOSTS,
        .init = retention_init,
        .free = retention_free,
        .used = retention_used,
        .queue = retention_queue,
        .victim = retention_victim,
        .gone = retention_gone,
        .forget = retention_forget,
        .advance = retention_advance,
        .hint = retention_hint,
};
