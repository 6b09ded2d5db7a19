#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kv/evict_policy.h"
#ifndef SHORTBIT
#define SHORTBIT 1
#endif

enum {
	N_BINS = 36,
	N_USES = 4,       /* 1, 2, 3, 4 and more */
	N_DISTANCES = 6,  /* 0, 1, 2-3, 4-7, 8-15, 16 and more */
	N_CLASSES = N_USES * N_DISTANCES,
	N_SUBS = 2,       /* long and short answers */
	N_GROUPS = N_CLASSES * N_SUBS,
	N_CLAIMS = 2,
	N_QUEUES = N_GROUPS * N_BINS * N_CLAIMS,
};

static const double DECAY = 0.98;
static const double PRIOR_RATE = 0.02, POOL_WEIGHT = 20, LEVEL_WEIGHT = 20, SHAPE_WEIGHT = 200;
static const double CLAIM_WORTH = 4;
enum { EAGER_PROMPTS = 20, PROMPTS_PER_LESSON = 100, MORE_GHOSTS = 65536 };

struct known {
	int32_t prev, next; /* in the list of its bin */
	uint8_t group, bin;
	bool known, claimed;
	int64_t claim_until_ms;
};

struct cell {
	double hits, exposure;
	int64_t n, sum_used_ms;
};

struct retention {
	struct known *known;
	int64_t edge_ms[N_BINS + 1];
	struct { int32_t oldest, newest; } bins[N_BINS];
	struct cell cells[N_GROUPS][N_BINS];
	uint64_t n_prompts;
	int32_t queue_of[N_QUEUES];
	double worth[N_QUEUES];
};

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

static double width(const struct retention *r, int b)
{
	return (double)(r->edge_ms[b + 1] - r->edge_ms[b]);
}

static void bin_push(struct retention *r, int32_t i, int b)
{
	struct known *k = &r->known[i];
	k->prev = r->bins[b].newest;
	k->next = EVICT_NONE;
	*(k->prev == EVICT_NONE ? &r->bins[b].oldest : &r->known[k->prev].next) = i;
	r->bins[b].newest = i;
	k->bin = (uint8_t)b;
}

static void bin_remove(struct retention *r, int32_t i)
{
	struct known *k = &r->known[i];
	*(k->prev == EVICT_NONE ? &r->bins[k->bin].oldest : &r->known[k->prev].next) = k->next;
	*(k->next == EVICT_NONE ? &r->bins[k->bin].newest : &r->known[k->next].prev) = k->prev;
}

static void count(struct evict *e, int32_t i, int n)
{
	struct retention *r = e->state;
	struct cell *c = &r->cells[r->known[i].group][r->known[i].bin];
	c->n += n;
	c->sum_used_ms += n * e->items[i].used_ms;
}

static int cell_index(int group, int bin, bool claimed)
{
	return (group * N_BINS + bin) * N_CLAIMS + claimed;
}

static int32_t retention_queue(struct evict *e, int32_t i)
{
	const struct retention *r = e->state;
	const struct known *k = &r->known[i];
	e->items[i].rank = 0;
	return r->queue_of[cell_index(k->group, k->bin, k->claimed)];
}

static void worth_of(const struct retention *r, const double q[N_BINS], double g[N_BINS])
{
	double hit[N_BINS], stay[N_BINS], time[N_BINS];
	for (int b = 0; b < N_BINS; b++) {
		stay[b] = exp(-q[b]);
		hit[b] = -expm1(-q[b]);
		time[b] = width(r, b) * (q[b] > 0 ? hit[b] / q[b] : 1);
	}
	for (int a = 0; a < N_BINS; a++) {
		double s = 1, hits = 0, t = 0, best = 0;
		for (int b = a; b < N_BINS; b++) {
			hits += s * hit[b];
			t += s * time[b];
			s *= stay[b];
			if (hits / t > best)
				best = hits / t;
		}
		g[a] = best;
	}
}

static void shrink(const double h[N_BINS], const double n[N_BINS], const double base[N_BINS], double q[N_BINS])
{
	double sum_h = 0, expected = 0;
	for (int b = 0; b < N_BINS; b++) {
		sum_h += h[b];
		expected += n[b] * base[b];
	}
	double alpha = (LEVEL_WEIGHT + sum_h) / (LEVEL_WEIGHT + expected);
	for (int b = 0; b < N_BINS; b++)
		q[b] = (h[b] + SHAPE_WEIGHT * alpha * base[b]) / (n[b] + SHAPE_WEIGHT);
}

static const double *sort_worth;
static int by_worth(const void *a, const void *b)
{
	int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
	if (sort_worth[x] != sort_worth[y])
		return sort_worth[x] < sort_worth[y] ? -1 : 1;
	return x - y;
}

static void learn(struct evict *e)
{
	struct retention *r = e->state;
	static double h[N_GROUPS][N_BINS], n[N_GROUPS][N_BINS], worth[N_QUEUES];
	static int32_t order[N_QUEUES], roots[N_QUEUES];
	double pool_h[N_BINS] = {0}, pool_n[N_BINS] = {0}, pool[N_BINS];
	for (int g = 0; g < N_GROUPS; g++) {
		for (int b = 0; b < N_BINS; b++) {
			struct cell *c = &r->cells[g][b];
			c->hits *= DECAY;
			c->exposure *= DECAY;
			h[g][b] = c->hits;
			n[g][b] = c->exposure +
			          (double)(c->n * (e->now_ms - r->edge_ms[b]) - c->sum_used_ms) / width(r, b);
			pool_h[b] += h[g][b];
			pool_n[b] += n[g][b];
		}
	}
	for (int b = 0; b < N_BINS; b++)
		pool[b] = (pool_h[b] + POOL_WEIGHT * PRIOR_RATE) / (pool_n[b] + POOL_WEIGHT);
	for (int c = 0; c < N_CLASSES; c++) {
		double ch[N_BINS], cn[N_BINS], q[N_BINS], sq[N_BINS], g[N_BINS];
		for (int b = 0; b < N_BINS; b++) {
			ch[b] = h[c * 2][b] + h[c * 2 + 1][b];
			cn[b] = n[c * 2][b] + n[c * 2 + 1][b];
		}
		shrink(ch, cn, pool, q);
		for (int s = 0; s < N_SUBS; s++) {
			if (SHORTBIT) {
				shrink(h[c * 2 + s], n[c * 2 + s], q, sq);
				worth_of(r, sq, g);
			} else
				worth_of(r, q, g);
			for (int b = 0; b < N_BINS; b++) {
				worth[cell_index(c * 2 + s, b, false)] = g[b];
				worth[cell_index(c * 2 + s, b, true)] = g[b] * CLAIM_WORTH;
			}
		}
	}
	for (int i = 0; i < N_QUEUES; i++)
		order[i] = i;
	sort_worth = worth;
	qsort(order, N_QUEUES, sizeof *order, by_worth);
	for (int i = 0; i < N_QUEUES; i++)
		roots[i] = e->roots[r->queue_of[i]];
	memset(e->busy, 0, (N_QUEUES / 64 + 1) * sizeof *e->busy);
	for (int q = 0; q < N_QUEUES; q++) {
		int32_t cell = order[q];
		r->queue_of[cell] = q;
		r->worth[q] = worth[cell];
		e->roots[q] = roots[cell];
		if (roots[cell] != EVICT_NONE)
			e->busy[q / 64] |= UINT64_C(1) << (q % 64);
	}
}

static void retention_free(struct evict *e)
{
	struct retention *r = e->state;
	if (r)
		free(r->known);
	free(r);
}

static enum status retention_init(struct evict *e)
{
	struct retention *r = e->state = calloc(1, sizeof *r);
	if (!r)
		return STATUS_NOMEM;
	r->known = calloc((size_t)evict_max_items(e), sizeof *r->known);
	if (!r->known)
		return STATUS_NOMEM;
	for (int b = 0; b < N_BINS; b++)
		r->bins[b].oldest = r->bins[b].newest = EVICT_NONE;
	for (int b = 1; b <= N_BINS; b++)
		r->edge_ms[b] = llround(1000 * exp2((b - 1) / 2.0));
	for (int i = 0; i < N_QUEUES; i++)
		r->queue_of[i] = i;
	learn(e);
	return STATUS_OK;
}

static void leave(struct evict *e, int32_t i)
{
	struct retention *r = e->state;
	struct known *k = &r->known[i];
	int64_t age = e->now_ms - e->items[i].used_ms;
	r->cells[k->group][k->bin].exposure += (double)(age - r->edge_ms[k->bin]) / width(r, k->bin);
	count(e, i, -1);
	bin_remove(r, i);
}

static int group_of(uint32_t uses, int32_t distance, unsigned hints)
{
	int u = uses < N_USES ? (int)uses - 1 : N_USES - 1;
	int d = 0;
	while (d < N_DISTANCES - 1 && distance >> d)
		d++;
	return (u * N_DISTANCES + d) * N_SUBS + ((hints & EVICT_SHORT_ANSWER) != 0);
}

static void retention_used(struct evict *e, int32_t i, const struct evict_use *use, enum evict_seen seen)
{
	struct retention *r = e->state;
	struct known *k = &r->known[i];
	if (use->parent == EVICT_NONE) {
		r->n_prompts++;
		if (r->n_prompts <= EAGER_PROMPTS || r->n_prompts % PROMPTS_PER_LESSON == 0)
			learn(e);
	}
	if (seen != EVICT_NEW) {
		r->cells[k->group][k->bin].hits++;
		leave(e, i);
	}
	k->group = (uint8_t)group_of(e->items[i].uses + 1, use->distance, use->hints);
	k->claim_until_ms = use->claim_until_ms;
	k->claimed = use->claim_until_ms > e->now_ms;
	bin_push(r, i, 0);
	e->items[i].used_ms = e->now_ms;
	count(e, i, 1);
}

static void retention_advance(struct evict *e)
{
	struct retention *r = e->state;
	for (int b = N_BINS - 2; b >= 0; b--) {
		for (int32_t i; (i = r->bins[b].oldest) != EVICT_NONE;) {
			int64_t age = e->now_ms - e->items[i].used_ms;
			if (age < r->edge_ms[b + 1])
				break;
			bool filed = evict_unfile(e, i);
			struct known *k = &r->known[i];
			int to = bin_of(r, age);
			for (int p = b; p < to; p++)
				r->cells[k->group][p].exposure++;
			count(e, i, -1);
			bin_remove(r, i);
			bin_push(r, i, to);
			count(e, i, 1);
			k->claimed = k->claimed && k->claim_until_ms > e->now_ms;
			if (filed)
				evict_file(e, i);
		}
	}
}

static int32_t retention_victim(struct evict *e)
{
	struct retention *r = e->state;
	for (;;) {
		int32_t q = evict_busy_queue(e, 0), best = e->roots[q];
		double lowest = r->worth[q];
		while ((q = evict_busy_queue(e, q + 1)) != EVICT_NONE && r->worth[q] == lowest) {
			if (e->items[e->roots[q]].order < e->items[best].order)
				best = e->roots[q];
		}
		struct known *k = &r->known[best];
		if (!k->claimed || k->claim_until_ms > e->now_ms)
			return best;
		evict_unfile(e, best);
		k->claimed = false;
		evict_file(e, best);
	}
}

static bool retention_gone(struct evict *e, int32_t i)
{
	(void)e;
	(void)i;
	return true;
}

static void retention_forget(struct evict *e, int32_t i)
{
	leave(e, i);
}

static void retention_hint(struct evict *e, int32_t i, unsigned hints)
{
	struct retention *r = e->state;
	struct known *k = &r->known[i];
	count(e, i, -1);
	k->group = (uint8_t)(k->group - k->group % N_SUBS + ((hints & EVICT_SHORT_ANSWER) != 0));
	count(e, i, 1);
}

static void retention_claim(struct evict *e, int32_t i, int64_t until_ms)
{
	struct retention *r = e->state;
	r->known[i].claim_until_ms = until_ms;
	r->known[i].claimed = until_ms > e->now_ms;
}

const struct evict_policy evict_policy_retention = {
        .name = "retention",
        .about = "the page of the lowest rate of future uses goes, as learned from earlier ones",
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
        .claim = retention_claim,
};
