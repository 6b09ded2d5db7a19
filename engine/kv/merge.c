#include "engine/kv/merge.h"

#include <math.h>
#include <stdlib.h>

enum { PLUS_BLOCK = KV_PART_PAGES * KV_PAGE_TOKENS };

/* A token or bucket on its way into fewer pages. */
struct entry {
	struct kv_spot spot;
	struct kv_bucket b;
	bool joined; /* in this round */
};

/* A pair of neighbours that may join. */
struct pair {
	double cost;
	int32_t first; /* entry */
};

/* All else being equal, the earlier ones. */
static int by_cost(const void *a, const void *b)
{
	const struct pair *x = a, *y = b;
	if (x->cost != y->cost)
		return x->cost < y->cost ? -1 : 1;
	return x->first < y->first ? -1 : x->first > y->first;
}

/* Lists what stands for something in pages [first, first + n); returns how many entries there are. */
static int32_t list_entries(struct kv_merger *m, struct kv_seq *s, int32_t first, int32_t n, const bool *keep,
			    struct entry *out, int32_t *n_unsound)
{
	int32_t n_out = 0, n_dropped = s->n_dropped * KV_PAGE_TOKENS;
	*n_unsound = 0;
	for (int32_t i = 0; i < n * KV_PAGE_TOKENS; i++) {
		int32_t place = first * KV_PAGE_TOKENS + i;
		struct entry *e = &out[n_out];
		bool is_new = place >= s->n_buckets;
		*e = (struct entry){
			.spot = {s->pages[place / KV_PAGE_TOKENS], place % KV_PAGE_TOKENS, place + n_dropped}};
		if (!is_new) {
			e->b = s->buckets[place];
			e->spot.position = e->b.position;
		} else {
			e->b = (struct kv_bucket){
				.n = 1, .position = e->spot.position, .apart = -1, .keep = keep[i / KV_PAGE_TOKENS]};
		}
		if (e->b.n == 0)
			continue;
		if (is_new && !m->is_sound(m, &e->spot)) {
			++*n_unsound;
			if (n_out > 0)
				out[n_out - 1].b.apart = -1;
			continue;
		}
		n_out++;
	}
	return n_out;
}

/*
 * More than any pair costs of which nothing is to be kept: a b / (a + b) (1 - cosine) is at most as many tokens as
 * there are.
 */
static const double KEEP = 1e12;

static void find_pairs(struct kv_merger *m, struct entry *e, int32_t n, struct pair *out)
{
	for (int32_t i = 0; i + 1 < n; i++) {
		struct kv_bucket *a = &e[i].b, *b = &e[i + 1].b;
		if (a->apart < 0)
			a->apart = m->apart(m, &e[i].spot, &e[i + 1].spot);
		out[i] = (struct pair){(double)a->n * b->n / ((double)a->n + b->n) * (double)a->apart, i};
		if (a->keep || b->keep)
			out[i].cost += KEEP;
	}
}

static void join(struct kv_merger *m, struct entry *e, const struct entry *more)
{
	int32_t n = e->b.n + more->b.n;
	double position = (e->b.position * e->b.n + more->b.position * more->b.n) / n;
	m->join(m, &e->spot, e->b.n, &more->spot, more->b.n, position);
	e->spot.position = position;
	e->b = (struct kv_bucket){.n = n, .position = position, .apart = -1, .keep = e->b.keep || more->b.keep};
}

/*
 * Of the `most` cheapest pairs, those join that have no member in common with a cheaper one: the next round knows
 * better what joins them. What is to be kept, only where nothing else does.
 */
static int32_t join_cheapest(struct kv_merger *m, struct entry *e, int32_t n, int32_t most, struct pair *pairs)
{
	int32_t n_out = 0;
	bool any = false;
	find_pairs(m, e, n, pairs);
	qsort(pairs, (size_t)n - 1, sizeof *pairs, by_cost);
	for (int32_t i = 0; i < n - 1 && i < most && (!any || pairs[i].cost < KEEP); i++) {
		struct entry *a = &e[pairs[i].first], *b = a + 1;
		if (a->joined || b->joined)
			continue;
		join(m, a, b);
		a->joined = b->joined = true;
		b->b.n = 0;
		if (a > e)
			a[-1].b.apart = -1;
		any = true;
	}
	for (int32_t i = 0; i < n; i++) {
		if (e[i].b.n == 0)
			continue;
		e[n_out] = e[i];
		e[n_out++].joined = false;
	}
	return n_out;
}

/*
 * Puts the entries one after the other from page `first` on, and nothing into the places that are left of `left` pages.
 */
static void put(struct kv_merger *m, struct kv_seq *s, struct entry *e, int32_t n, int32_t first, int32_t left)
{
	for (int32_t i = 0; i < left * KV_PAGE_TOKENS; i++) {
		int32_t place = first * KV_PAGE_TOKENS + i;
		struct kv_spot to = {s->pages[place / KV_PAGE_TOKENS], place % KV_PAGE_TOKENS, 0};
		s->buckets[place] = i < n ? e[i].b : (struct kv_bucket){.apart = -1};
		s->plus[place] = i < n ? logf((float)e[i].b.n) : KV_MERGE_NOTHING;
		if (i >= n)
			m->clear(m, &to);
		else if (e[i].spot.page != to.page || e[i].spot.token != to.token)
			m->move(m, &e[i].spot, &to); /* forwards: nothing stands there any more */
	}
	if (n > 0)
		s->buckets[first * KV_PAGE_TOKENS + n - 1].apart = -1;
}

/* Room for n_places buckets, with those of the first pages, which are tokens. False without memory. */
static bool reserve_buckets(struct kv_seq *s, int32_t n_places, int32_t n_first)
{
	size_t n_plus = ((size_t)n_places + PLUS_BLOCK - 1) / PLUS_BLOCK * PLUS_BLOCK;
	size_t most = n_places > s->n_buckets ? (size_t)n_places : (size_t)s->n_buckets;
	struct kv_bucket *buckets = realloc(s->buckets, most * sizeof *buckets);
	if (buckets)
		s->buckets = buckets;
	float *plus = calloc(n_plus, sizeof *plus);
	if (!buckets || !plus) {
		free(plus);
		return false;
	}
	free(s->plus);
	s->plus = plus;
	for (int32_t i = s->n_buckets; i < n_first; i++)
		buckets[i] = (struct kv_bucket){.n = 1, .position = i, .apart = -1};
	return true;
}

enum status kv_merge(struct kv_merger *m, struct kv_pool *pool, struct kv_seq *s, int32_t first, int32_t n,
		     int32_t left, const bool *keep)
{
	int32_t n_places = (first + left) * KV_PAGE_TOKENS, room = left * KV_PAGE_TOKENS, n_unsound;
	enum status st = STATUS_NOMEM;
	struct entry *e = malloc((size_t)n * KV_PAGE_TOKENS * sizeof *e);
	struct pair *pairs = malloc((size_t)n * KV_PAGE_TOKENS * sizeof *pairs);
	if (!e || !pairs)
		goto out;
	int32_t n_entries = list_entries(m, s, first, n, keep, e, &n_unsound);
	if (!reserve_buckets(s, n_places, first * KV_PAGE_TOKENS))
		goto out;
	for (int32_t i = 0; i < n; i++)
		kv_pool_unbound(pool, s->pages[first + i]);
	while (n_entries > room) {
		int32_t more = n_entries - room, most = n_entries / 4 < 1 ? 1 : n_entries / 4;
		n_entries = join_cheapest(m, e, n_entries, more < most ? more : most, pairs);
	}
	put(m, s, e, n_entries, first, left);
	s->n_buckets = n_places;
	s->n_unsound += n_unsound;
	kv_seq_drop(pool, s, first + left, n - left);
	/* Of what the tokens alone would give, it has the first pages. */
	s->n_leading = s->n_leading < first ? s->n_leading : first;
	st = STATUS_OK;
out:
	free(e);
	free(pairs);
	return st;
}

int32_t kv_merge_n_plus(const struct kv_seq *s)
{
	return (s->n_buckets + PLUS_BLOCK - 1) / PLUS_BLOCK * PLUS_BLOCK;
}

int32_t kv_merged_tokens(const struct kv_seq *s)
{
	int32_t sum = 0;
	for (int32_t i = 0; i < s->n_buckets; i++)
		sum += s->buckets[i].n > 1 ? s->buckets[i].n : 0;
	return sum;
}

size_t kv_merge_bytes(const struct kv_seq *s)
{
	return (size_t)s->n_buckets * (sizeof *s->buckets + sizeof *s->plus);
}
