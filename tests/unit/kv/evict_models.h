/*
 * The eviction policies as their definitions read, for small worlds: everything is searched and counted anew each time.
 * A model shares no code with the engine; it is told of the same uses and evictions.
 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kv/evict.h"

enum { WORLD_SLOTS = 64, WORLD_CLAIMS = 8192 };

struct world_item {
	bool resident;
	uint64_t key, order, uses; /* uses: since it came */
	int64_t used_ms;
	int32_t parent; /* slot */
	int refs;
};

struct world {
	struct world_item items[WORLD_SLOTS];
	int32_t n_slots;
	int64_t now_ms;
	int64_t engine_ms; /* the time of the last call that had one: what the engine takes for now */
	uint64_t order;
	void *state; /* the model's */
	/* All claims ever opened; [0] is none. */
	struct {
		uint64_t name; /* the engine's */
		int64_t until_ms;
	} claims[WORLD_CLAIMS];
	int n_claims;
};

static int world_claim(const struct world *w, uint64_t name)
{
	for (int c = w->n_claims; c > 0; c--) {
		if (w->claims[c].name == name)
			return c;
	}
	return 0;
}

struct model {
	const char *name;
	bool nearly; /* worths are sums of many terms, and ones that differ by rounding alone may go either way */
	void (*init)(struct world *w);
	void (*free)(struct world *w);
	void (*advance)(struct world *w);
	/* The item has its new order and uses, and still its old time. */
	void (*used)(struct world *w, int32_t slot, const struct evict_use *use, bool fresh);
	/* There is a candidate. `chosen` is the engine's choice. */
	int32_t (*victim)(struct world *w, int32_t chosen);
	void (*gone)(struct world *w, int32_t slot);
	int32_t (*max_ghosts)(int32_t n_slots);
	/* NULL: ignored. */
	void (*hint)(struct world *w, int32_t slot, unsigned hints);
};

static bool world_is_candidate(const struct world *w, int32_t slot)
{
	if (!w->items[slot].resident || w->items[slot].refs > 0)
		return false;
	for (int32_t s = 0; s < w->n_slots; s++) {
		if (w->items[s].resident && w->items[s].parent == slot)
			return false;
	}
	return true;
}

/* The candidate of the lowest score, of equal ones the one used first. */
static int32_t world_lowest(const struct world *w, double (*score)(const struct world *w, int32_t slot))
{
	int32_t best = EVICT_NONE;
	double lowest = 0;
	for (int32_t s = 0; s < w->n_slots; s++) {
		if (!world_is_candidate(w, s))
			continue;
		double x = score(w, s);
		if (best == EVICT_NONE || x < lowest || (x == lowest && w->items[s].order < w->items[best].order)) {
			best = s;
			lowest = x;
		}
	}
	return best;
}

static void model_nothing(struct world *w)
{
	(void)w;
}

static void model_free(struct world *w)
{
	free(w->state);
}

static void model_forget(struct world *w, int32_t slot)
{
	(void)w;
	(void)slot;
}

static void model_used(struct world *w, int32_t slot, const struct evict_use *use, bool fresh)
{
	(void)w;
	(void)slot;
	(void)use;
	(void)fresh;
}

static int32_t model_no_ghosts(int32_t n_slots)
{
	(void)n_slots;
	return 0;
}

/* ---- lru, lfu ---- */

static double lru_score(const struct world *w, int32_t slot)
{
	return (double)w->items[slot].order;
}

static int32_t lru_victim(struct world *w, int32_t chosen)
{
	(void)chosen;
	return world_lowest(w, lru_score);
}

static const struct model model_lru = {"lru",      false,      model_nothing, model_nothing,   model_nothing,
                                       model_used, lru_victim, model_forget,  model_no_ghosts, NULL};

static double lfu_score(const struct world *w, int32_t slot)
{
	return (double)w->items[slot].uses;
}

static int32_t lfu_victim(struct world *w, int32_t chosen)
{
	(void)chosen;
	return world_lowest(w, lfu_score);
}

static const struct model model_lfu = {"lfu",      false,      model_nothing, model_nothing,   model_nothing,
                                       model_used, lfu_victim, model_forget,  model_no_ghosts, NULL};

/* ---- gdsf ---- */

struct model_gdsf_state {
	double clock, priority[WORLD_SLOTS];
};

static void gdsf_init(struct world *w)
{
	w->state = calloc(1, sizeof(struct model_gdsf_state));
}

static void gdsf_used(struct world *w, int32_t slot, const struct evict_use *use, bool fresh)
{
	struct model_gdsf_state *g = w->state;
	(void)use;
	(void)fresh;
	g->priority[slot] = g->clock + (double)w->items[slot].uses;
}

static double gdsf_score(const struct world *w, int32_t slot)
{
	return ((const struct model_gdsf_state *)w->state)->priority[slot];
}

static int32_t gdsf_victim(struct world *w, int32_t chosen)
{
	(void)chosen;
	return world_lowest(w, gdsf_score);
}

static void gdsf_gone(struct world *w, int32_t slot)
{
	struct model_gdsf_state *g = w->state;
	if (g->priority[slot] > g->clock)
		g->clock = g->priority[slot];
}

static const struct model model_gdsf = {"gdsf",    false,       gdsf_init, model_free,      model_nothing,
                                        gdsf_used, gdsf_victim, gdsf_gone, model_no_ghosts, NULL};

/* ---- dual ---- */

struct model_dual_state {
	struct {
		int64_t *at_ms; /* every use since it came */
		size_t n;
	} uses[WORLD_SLOTS];
};

static void dual_init(struct world *w)
{
	w->state = calloc(1, sizeof(struct model_dual_state));
}

static void dual_free(struct world *w)
{
	struct model_dual_state *d = w->state;
	for (int32_t s = 0; s < WORLD_SLOTS; s++)
		free(d->uses[s].at_ms);
	free(d);
}

static void dual_used(struct world *w, int32_t slot, const struct evict_use *use, bool fresh)
{
	struct model_dual_state *d = w->state;
	size_t n = d->uses[slot].n = fresh ? 0 : d->uses[slot].n;
	(void)use;
	d->uses[slot].at_ms = realloc(d->uses[slot].at_ms, (n + 1) * sizeof(int64_t));
	d->uses[slot].at_ms[d->uses[slot].n++] = w->now_ms;
}

static double dual_score(const struct world *w, int32_t slot)
{
	const struct model_dual_state *d = w->state;
	int64_t oldest_ms = w->now_ms;
	size_t n = 0;
	for (int32_t s = 0; s < w->n_slots; s++) {
		if (world_is_candidate(w, s) && w->items[s].used_ms < oldest_ms)
			oldest_ms = w->items[s].used_ms;
	}
	for (size_t i = 0; i < d->uses[slot].n; i++)
		n += d->uses[slot].at_ms[i] > w->now_ms - 60000;
	double span = oldest_ms < w->now_ms ? (double)(w->now_ms - oldest_ms) : 1;
	return -(0.7 * ((double)(w->now_ms - w->items[slot].used_ms) / span) + 0.3 / (double)(n + 1));
}

static int32_t dual_victim(struct world *w, int32_t chosen)
{
	(void)chosen;
	return world_lowest(w, dual_score);
}

static const struct model model_dual = {"dual",    false,       dual_init,    dual_free,       model_nothing,
                                        dual_used, dual_victim, model_forget, model_no_ghosts, NULL};

/* ---- s3fifo ---- */

struct fifo {
	int32_t slots[WORLD_SLOTS];
	int n;
};

struct model_s3_state {
	struct fifo small, main;
	uint64_t ghosts[WORLD_SLOTS];
	int n_ghosts;
	int count[WORLD_SLOTS];
};

static void fifo_push(struct fifo *f, int32_t slot)
{
	f->slots[f->n++] = slot;
}

static bool fifo_drop(struct fifo *f, int32_t slot)
{
	for (int i = 0; i < f->n; i++) {
		if (f->slots[i] == slot) {
			memmove(&f->slots[i], &f->slots[i + 1], (size_t)(f->n - i - 1) * sizeof *f->slots);
			f->n--;
			return true;
		}
	}
	return false;
}

static int32_t fifo_first_candidate(const struct world *w, const struct fifo *f)
{
	for (int i = 0; i < f->n; i++) {
		if (world_is_candidate(w, f->slots[i]))
			return f->slots[i];
	}
	return EVICT_NONE;
}

static void s3_init(struct world *w)
{
	w->state = calloc(1, sizeof(struct model_s3_state));
}

static void s3_drop_ghost(struct model_s3_state *s, int i)
{
	memmove(&s->ghosts[i], &s->ghosts[i + 1], (size_t)(s->n_ghosts - i - 1) * sizeof *s->ghosts);
	s->n_ghosts--;
}

static void s3_used(struct world *w, int32_t slot, const struct evict_use *use, bool fresh)
{
	struct model_s3_state *s = w->state;
	if (!fresh) {
		s->count[slot] = s->count[slot] < 3 ? s->count[slot] + 1 : 3;
		return;
	}
	struct fifo *to = &s->small;
	for (int i = 0; i < s->n_ghosts; i++) {
		if (s->ghosts[i] == use->key) {
			s3_drop_ghost(s, i);
			to = &s->main;
			break;
		}
	}
	s->count[slot] = 0;
	fifo_push(to, slot);
}

static int32_t s3_victim(struct world *w, int32_t chosen)
{
	struct model_s3_state *s = w->state;
	(void)chosen;
	for (;;) {
		int32_t in_small = fifo_first_candidate(w, &s->small), in_main = fifo_first_candidate(w, &s->main);
		bool small = s->small.n >= w->n_slots / 10;
		if ((small ? in_small : in_main) == EVICT_NONE)
			small = !small;
		int32_t slot = small ? in_small : in_main;
		if (small && s->count[slot] <= 1)
			return slot;
		if (!small && s->count[slot] == 0)
			return slot;
		fifo_drop(small ? &s->small : &s->main, slot);
		fifo_push(&s->main, slot);
		s->count[slot] = small ? 0 : s->count[slot] - 1;
	}
}

static void s3_gone(struct world *w, int32_t slot)
{
	struct model_s3_state *s = w->state;
	if (fifo_drop(&s->small, slot)) {
		if (s->n_ghosts == w->n_slots)
			s3_drop_ghost(s, 0);
		s->ghosts[s->n_ghosts++] = w->items[slot].key;
	} else {
		fifo_drop(&s->main, slot);
	}
}

static int32_t s3_ghosts(int32_t n_slots)
{
	return n_slots;
}

static const struct model model_s3fifo = {"s3fifo",  false,   s3_init, model_free, model_nothing, s3_used,
                                          s3_victim, s3_gone, s3_ghosts, NULL};

/* ---- retention ---- */

enum { RET_BINS = 42, RET_GROUPS = 4 * 6 * 3 * 2, RET_BLOCKS = 8192 };

struct ret_block {
	uint64_t key, uses;
	int64_t used_ms;
	int claim; /* in world.claim_until_ms; 0: none */
	int group, bin, turn;
	bool claimed;
};

struct model_ret_state {
	double hits[RET_GROUPS][RET_BINS], exposure[RET_GROUPS][RET_BINS];
	double worth[RET_GROUPS][RET_BINS];
	/* all ever seen; the workload has fewer than the ghosts that are remembered */
	struct ret_block blocks[RET_BLOCKS];
	int n_blocks;
	int block_at[WORLD_SLOTS];
	uint64_t n_prompts, n_learned;
	int64_t moment_ms, learned_ms;
	int n_moments;
	double pause_ms;
};

static double ret_edge_ms(int bin)
{
	return bin == 0 ? 0 : bin < 7 ? round(1000 / pow(2, 7 - bin)) : round(1000 * pow(sqrt(2), bin - 7));
}

static double ret_width_ms(int bin)
{
	return ret_edge_ms(bin + 1) - ret_edge_ms(bin);
}

static void ret_blend(const double *hits, const double *exposure, const double *above, double *out)
{
	double sum_hits = 0, sum_expected = 0;
	for (int b = 0; b < RET_BINS; b++) {
		sum_hits += hits[b];
		sum_expected += exposure[b] * above[b];
	}
	double alpha = (20 + sum_hits) / (20 + sum_expected);
	for (int b = 0; b < RET_BINS; b++)
		out[b] = (hits[b] + 200 * alpha * above[b]) / (exposure[b] + 200);
}

static void ret_learn(struct world *w)
{
	struct model_ret_state *s = w->state;
	static double h[RET_GROUPS][RET_BINS], n[RET_GROUPS][RET_BINS];
	double fade = pow(0.98, (double)(s->n_prompts - s->n_learned) / 100);
	s->n_learned = s->n_prompts;
	if (s->n_prompts > 1 && s->n_moments > 0) {
		double mean = (double)(w->now_ms - s->learned_ms) / s->n_moments;
		s->pause_ms = s->pause_ms == 0 ? mean : 0.8 * s->pause_ms + 0.2 * fmin(mean, 2 * s->pause_ms);
	}
	s->learned_ms = w->now_ms;
	s->n_moments = 0;
	for (int g = 0; g < RET_GROUPS; g++) {
		for (int b = 0; b < RET_BINS; b++) {
			h[g][b] = s->hits[g][b] *= fade;
			n[g][b] = s->exposure[g][b] *= fade;
		}
	}
	for (int i = 0; i < s->n_blocks; i++) {
		const struct ret_block *k = &s->blocks[i];
		n[k->group][k->bin] += ((double)(w->now_ms - k->used_ms) - ret_edge_ms(k->bin)) / ret_width_ms(k->bin);
	}
	double all[RET_BINS];
	for (int b = 0; b < RET_BINS; b++) {
		double sh = 0, sn = 0;
		for (int g = 0; g < RET_GROUPS; g++) {
			sh += h[g][b];
			sn += n[g][b];
		}
		all[b] = (sh + 20 * 0.05) / (sn + 20);
	}
	for (int g = 0; g < RET_GROUPS; g++) {
		double h6[RET_BINS] = {0}, n6[RET_BINS] = {0}, h2[RET_BINS] = {0}, n2[RET_BINS] = {0};
		double q6[RET_BINS], q2[RET_BINS], q[RET_BINS];
		for (int o = 0; o < RET_GROUPS; o++) {
			for (int b = 0; b < RET_BINS; b++) {
				h6[b] += o / 6 == g / 6 ? h[o][b] : 0;
				n6[b] += o / 6 == g / 6 ? n[o][b] : 0;
				h2[b] += o / 2 == g / 2 ? h[o][b] : 0;
				n2[b] += o / 2 == g / 2 ? n[o][b] : 0;
			}
		}
		ret_blend(h6, n6, all, q6);
		ret_blend(h2, n2, q6, q2);
		ret_blend(h[g], n[g], q2, q);
		for (int a = 0; a < RET_BINS; a++) {
			double best = 0, top = 0, bottom = 0, survive = 1;
			for (int t = a; t < RET_BINS; t++) {
				top += survive * (1 - exp(-q[t]));
				bottom += survive * ret_width_ms(t) * (1 - exp(-q[t])) / q[t];
				survive *= exp(-q[t]);
				best = fmax(best, top / fmax(bottom, s->pause_ms));
			}
			s->worth[g][a] = best;
		}
	}
}

static void ret_init(struct world *w)
{
	w->state = calloc(1, sizeof(struct model_ret_state));
	ret_learn(w);
}

static bool ret_is_claimed(const struct world *w, const struct ret_block *k)
{
	return k->claim && w->claims[k->claim].until_ms > w->now_ms;
}

static void ret_advance(struct world *w)
{
	struct model_ret_state *s = w->state;
	s->n_moments += w->now_ms > s->moment_ms;
	s->moment_ms = w->now_ms;
	for (int i = 0; i < s->n_blocks; i++) {
		struct ret_block *k = &s->blocks[i];
		int before = k->bin;
		while (k->bin < RET_BINS - 1 && (double)(w->now_ms - k->used_ms) >= ret_edge_ms(k->bin + 1))
			s->exposure[k->group][k->bin++] += 1;
		if (k->bin != before)
			k->claimed = ret_is_claimed(w, k);
	}
}

static int ret_log2(int32_t distance)
{
	return distance == 0 ? 0 : distance < 2 ? 1 : distance < 4 ? 2 : distance < 8 ? 3 : distance < 16 ? 4 : 5;
}

static void ret_used(struct world *w, int32_t slot, const struct evict_use *use, bool fresh)
{
	struct model_ret_state *s = w->state;
	const struct ret_block *parent = use->parent == EVICT_NONE ? NULL : &s->blocks[s->block_at[use->parent]];
	int i = 0;
	if (!parent) {
		s->n_prompts++;
		if (s->n_prompts - s->n_learned >= 100 || (s->n_prompts - s->n_learned) * 20 >= s->n_prompts)
			ret_learn(w);
	}
	while (i < s->n_blocks && s->blocks[i].key != use->key)
		i++;
	struct ret_block *k = &s->blocks[i];
	if (i == s->n_blocks) {
		if (s->n_blocks == RET_BLOCKS)
			abort();
		s->n_blocks++;
		*k = (struct ret_block){.key = use->key};
		k->turn = !parent ? 0 : parent->uses > 1 ? parent->turn + 1 : parent->turn;
		k->turn = k->turn > 2 ? 2 : k->turn;
	} else {
		s->hits[k->group][k->bin] += 1;
		s->exposure[k->group][k->bin] +=
			((double)(w->now_ms - k->used_ms) - ret_edge_ms(k->bin)) / ret_width_ms(k->bin);
	}
	k->uses++;
	k->group = (((int)(k->uses < 4 ? k->uses : 4) - 1) * 6 + ret_log2(use->distance)) * 6 + k->turn * 2 +
	           (int)use->hints;
	k->bin = 0;
	k->used_ms = w->now_ms;
	if (use->claim)
		k->claim = world_claim(w, use->claim);
	k->claimed = ret_is_claimed(w, k);
	s->block_at[slot] = i;
	(void)fresh;
}

static double ret_score(const struct world *w, int32_t slot)
{
	const struct model_ret_state *s = w->state;
	const struct ret_block *k = &s->blocks[s->block_at[slot]];
	int bin = !k->claimed ? k->bin : k->bin < 4 ? 0 : k->bin - 4;
	return (float)s->worth[k->group][bin];
}

static int32_t ret_victim(struct world *w, int32_t chosen)
{
	struct model_ret_state *s = w->state;
	for (;;) {
		int32_t slot = world_lowest(w, ret_score);
		struct ret_block *k = &s->blocks[s->block_at[slot]];
		if (k->claimed && !ret_is_claimed(w, k)) {
			k->claimed = false;
			continue;
		}
		/* Another choice of the engine must be worth the same, but for rounding. */
		if (chosen != EVICT_NONE && chosen != slot && ret_score(w, chosen) > ret_score(w, slot) * 1.00001)
			return EVICT_NONE;
		return slot;
	}
}

static int32_t ret_ghosts(int32_t n_slots)
{
	return n_slots + 65536;
}

static void ret_hint(struct world *w, int32_t slot, unsigned hints)
{
	struct model_ret_state *s = w->state;
	struct ret_block *k = &s->blocks[s->block_at[slot]];
	k->group = k->group / 2 * 2 + (int)hints;
}

static const struct model model_retention = {"retention", true,       ret_init,     model_free, ret_advance,
                                             ret_used,    ret_victim, model_forget, ret_ghosts, ret_hint};

static const struct model *const models[] = {&model_retention, &model_lru,    &model_lfu, &model_dual,
                                             &model_s3fifo,    &model_gdsf, NULL};
