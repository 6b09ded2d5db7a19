/*
 * The policies from the literature, over candidates (leaves that are idle). Pages are equal in size and in the cost to
 * compute them again, so no formula has those terms.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/kv/evict_policy.h"

/* ---- lru: least recently used ---- */

static int32_t lru_queue(struct evict *e, int32_t i)
{
	e->items[i].rank = 0; /* so that the order of use decides */
	return 0;
}

static int32_t only_root(struct evict *e)
{
	return e->roots[0];
}

const struct evict_policy evict_policy_lru = {
        .name = "lru",
        .n_queues = 1,
        .queue = lru_queue,
        .victim = only_root,
};

/* ---- lfu: least frequently used since it came, then least recently ---- */

static int32_t lfu_queue(struct evict *e, int32_t i)
{
	e->items[i].rank = e->items[i].uses;
	return 0;
}

const struct evict_policy evict_policy_lfu = {
        .name = "lfu",
        .n_queues = 1,
        .queue = lfu_queue,
        .victim = only_root,
};

/*
 * ---- gdsf: GreedyDual-Size with Frequency (L. Cherkasova, HP Labs HPL-98-69, 1998) ----
 *
 * The priority is the clock + uses; the clock is the highest priority that was evicted, so old popularity is overtaken.
 */

struct gdsf {
	double clock;
};

static enum status gdsf_init(struct evict *e)
{
	e->state = calloc(1, sizeof(struct gdsf));
	return e->state ? STATUS_OK : STATUS_NOMEM;
}

static void free_state(struct evict *e)
{
	free(e->state);
}

static void gdsf_used(struct evict *e, int32_t i, const struct evict_use *use, enum evict_seen seen)
{
	const struct gdsf *g = e->state;
	(void)use;
	(void)seen;
	e->items[i].rank = g->clock + e->items[i].uses + 1;
}

static int32_t gdsf_queue(struct evict *e, int32_t i)
{
	(void)e;
	(void)i;
	return 0;
}

static int32_t gdsf_victim(struct evict *e)
{
	struct gdsf *g = e->state;
	double lowest = e->items[e->roots[0]].rank;
	if (lowest > g->clock)
		g->clock = lowest;
	return e->roots[0];
}

const struct evict_policy evict_policy_gdsf = {
        .name = "gdsf",
        .n_queues = 1,
        .init = gdsf_init,
        .free = free_state,
        .used = gdsf_used,
        .queue = gdsf_queue,
        .victim = gdsf_victim,
};

/*
 * ---- s3fifo: three static FIFO queues (J. Yang et al., SOSP 2023) ----
 *
 * New pages enter a small FIFO of a tenth of the slots; those used twice and more there move on to the main FIFO, the
 * others go and are remembered; what returns while remembered enters the main FIFO. There a page used since it was last
 * looked at goes round again. An item keeps its place in its FIFO while it is held or has children, and is passed over.
 */

enum { S3_SMALL, S3_MAIN, S3_QUEUES };
enum { S3_MAX_COUNT = 3, S3_SMALL_PERCENT = 10 };

struct s3_item {
	uint8_t queue, count; /* count: uses, up to S3_MAX_COUNT, in this place */
};

struct s3fifo {
	struct s3_item *items;
	int32_t n_small; /* residents in the small FIFO, candidates or not */
	uint64_t place;
};

static enum status s3fifo_init(struct evict *e)
{
	struct s3fifo *s = e->state = calloc(1, sizeof *s);
	if (!s)
		return STATUS_NOMEM;
	s->items = calloc((size_t)evict_max_items(e), sizeof *s->items);
	return s->items ? STATUS_OK : STATUS_NOMEM;
}

static void s3fifo_free(struct evict *e)
{
	struct s3fifo *s = e->state;
	if (s)
		free(s->items);
	free(s);
}

static void s3fifo_enter(struct evict *e, int32_t i, int queue)
{
	struct s3fifo *s = e->state;
	s->items[i] = (struct s3_item){(uint8_t)queue, 0};
	s->n_small += queue == S3_SMALL;
	e->items[i].rank = (double)++s->place;
}

static void s3fifo_used(struct evict *e, int32_t i, const struct evict_use *use, enum evict_seen seen)
{
	struct s3fifo *s = e->state;
	(void)use;
	if (seen != EVICT_RESIDENT)
		s3fifo_enter(e, i, seen == EVICT_NEW ? S3_SMALL : S3_MAIN);
	else if (s->items[i].count < S3_MAX_COUNT)
		s->items[i].count++;
}

static int32_t s3fifo_queue(struct evict *e, int32_t i)
{
	const struct s3fifo *s = e->state;
	return s->items[i].queue;
}

/*
 * Each round ends the search or takes a use away, of which each touch has given one: O(log n) amortised over touches.
 */
static int32_t s3fifo_victim(struct evict *e)
{
	struct s3fifo *s = e->state;
	for (;;) {
		int q = s->n_small >= e->n_slots / (100 / S3_SMALL_PERCENT) ? S3_SMALL : S3_MAIN;
		if (e->roots[q] == EVICT_NONE)
			q = 1 - q;
		int32_t i = e->roots[q];
		struct s3_item *it = &s->items[i];
		if (it->count <= (q == S3_SMALL))
			return i;
		evict_unfile(e, i);
		if (q == S3_SMALL) {
			s->n_small--;
			s3fifo_enter(e, i, S3_MAIN);
		} else {
			it->count--;
			e->items[i].rank = (double)++s->place;
		}
		evict_file(e, i);
	}
}

static bool s3fifo_gone(struct evict *e, int32_t i)
{
	struct s3fifo *s = e->state;
	s->n_small -= s->items[i].queue == S3_SMALL;
	return s->items[i].queue == S3_SMALL;
}

const struct evict_policy evict_policy_s3fifo = {
        .name = "s3fifo",
        .n_queues = S3_QUEUES,
        .ghosts_per_slot = true,
        .init = s3fifo_init,
        .free = s3fifo_free,
        .used = s3fifo_used,
        .queue = s3fifo_queue,
        .victim = s3fifo_victim,
        .gone = s3fifo_gone,
};

/*
 * ---- dual: age and recent frequency ----
 *
 * The candidate with the highest 0.7 * age / age of the oldest candidate + 0.3 / (uses in the last 60 s + 1) goes; of
 * equal ones the least recently used. Uses are counted up to DUAL_LEVELS - 1.
 *
 * There is one queue for each count of uses, by age. Among equal counts the oldest is the best, so a choice compares
 * only the heads. A count of u takes u uses within the window, so with U uses in it at most sqrt(2 U) different counts
 * occur (and DUAL_LEVELS); in practice a few. The uses in the window stand in a ring, which each use enters and leaves
 * once. The ring grows; without memory for that its oldest use leaves early, which loses nothing but a little of that
 * item's standing.
 */

enum { DUAL_WINDOW_MS = 60000, DUAL_LEVELS = 1024, DUAL_FIRST_RING = 4096 };

struct dual_use {
	int64_t at_ms;
	int32_t item;
	uint32_t life; /* which of the blocks that have been this item */
};

struct dual_item {
	uint32_t life;
	uint32_t n_recent; /* its uses in the ring */
};

struct dual {
	struct dual_item *items;
	struct dual_use *ring;
	size_t n_ring, first, n_uses; /* n_ring: a power of two */
};

static enum status dual_init(struct evict *e)
{
	struct dual *d = e->state = calloc(1, sizeof *d);
	if (!d)
		return STATUS_NOMEM;
	d->n_ring = DUAL_FIRST_RING;
	d->items = calloc((size_t)evict_max_items(e), sizeof *d->items);
	d->ring = malloc(d->n_ring * sizeof *d->ring);
	return d->items && d->ring ? STATUS_OK : STATUS_NOMEM;
}

static void dual_free(struct evict *e)
{
	struct dual *d = e->state;
	if (d) {
		free(d->items);
		free(d->ring);
	}
	free(d);
}

static void dual_expire_first(struct evict *e)
{
	struct dual *d = e->state;
	struct dual_use u = d->ring[d->first];
	d->first = (d->first + 1) & (d->n_ring - 1);
	d->n_uses--;
	if (d->items[u.item].life != u.life)
		return;
	bool filed = evict_unfile(e, u.item);
	d->items[u.item].n_recent--;
	if (filed)
		evict_file(e, u.item);
}

static void dual_advance(struct evict *e)
{
	struct dual *d = e->state;
	while (d->n_uses > 0 && d->ring[d->first].at_ms <= e->now_ms - DUAL_WINDOW_MS)
		dual_expire_first(e);
}

static bool dual_grow(struct dual *d)
{
	if (d->n_ring > SIZE_MAX / 2 / sizeof *d->ring)
		return false;
	struct dual_use *ring = malloc(d->n_ring * 2 * sizeof *ring);
	if (!ring)
		return false;
	for (size_t i = 0; i < d->n_uses; i++)
		ring[i] = d->ring[(d->first + i) & (d->n_ring - 1)];
	free(d->ring);
	d->ring = ring;
	d->n_ring *= 2;
	d->first = 0;
	return true;
}

static void dual_used(struct evict *e, int32_t i, const struct evict_use *use, enum evict_seen seen)
{
	struct dual *d = e->state;
	(void)use;
	if (seen == EVICT_NEW)
		d->items[i].n_recent = 0;
	if (d->n_uses == d->n_ring && !dual_grow(d))
		dual_expire_first(e);
	d->ring[(d->first + d->n_uses++) & (d->n_ring - 1)] = (struct dual_use){e->now_ms, i, d->items[i].life};
	d->items[i].n_recent++;
}

static int32_t dual_queue(struct evict *e, int32_t i)
{
	const struct dual *d = e->state;
	uint32_t n = d->items[i].n_recent;
	e->items[i].rank = 0;
	return n < DUAL_LEVELS ? (int32_t)n : DUAL_LEVELS - 1;
}

static int32_t dual_victim(struct evict *e)
{
	int32_t best = EVICT_NONE;
	int64_t oldest_ms = e->now_ms;
	double best_score = -1;
	for (int32_t q = evict_busy_queue(e, 0); q != EVICT_NONE; q = evict_busy_queue(e, q + 1)) {
		const struct evict_item *head = &e->items[e->roots[q]];
		if (head->used_ms < oldest_ms)
			oldest_ms = head->used_ms;
	}
	double span = e->now_ms > oldest_ms ? (double)(e->now_ms - oldest_ms) : 1;
	for (int32_t q = evict_busy_queue(e, 0); q != EVICT_NONE; q = evict_busy_queue(e, q + 1)) {
		const struct evict_item *head = &e->items[e->roots[q]];
		double score = 0.7 * ((double)(e->now_ms - head->used_ms) / span) + 0.3 / (q + 1);
		if (score > best_score || (score == best_score && head->order < e->items[best].order)) {
			best = e->roots[q];
			best_score = score;
		}
	}
	return best;
}

static bool dual_gone(struct evict *e, int32_t i)
{
	struct dual *d = e->state;
	d->items[i].life++;
	return false;
}

const struct evict_policy evict_policy_dual = {
        .name = "dual",
        .n_queues = DUAL_LEVELS,
        .init = dual_init,
        .free = dual_free,
        .used = dual_used,
        .queue = dual_queue,
        .victim = dual_victim,
        .gone = dual_gone,
        .advance = dual_advance,
};
