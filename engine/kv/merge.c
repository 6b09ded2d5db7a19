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

/* What a merger is asked, and what it answers; room for as many as there are places. */
struct lists {
	struct entry *entry;
	struct pair *order;
	struct kv_spot *spots;
	struct kv_pair *pairs;
	struct kv_move *moves;
	int32_t *at; /* entries that are asked about */
	float *apart;
	bool *sound;
};

static void free_lists(struct lists *l)
{
	free(l->entry);
	free(l->order);
	free(l->spots);
	free(l->pairs);
	free(l->moves);
	free(l->at);
	free(l->apart);
	free(l->sound);
}

static bool make_lists(struct lists *l, size_t n)
{
	*l = (struct lists){
		malloc(n * sizeof *l->entry), malloc(n * sizeof *l->order), malloc(n * sizeof *l->spots),
		malloc(n * sizeof *l->pairs), malloc(n * sizeof *l->moves), malloc(n * sizeof *l->at),
		malloc(n * sizeof *l->apart), malloc(n * sizeof *l->sound),
	};
	return l->entry && l->order && l->spots && l->pairs && l->moves && l->at && l->apart && l->sound;
}

/* Lists what stands for something in pages [first, first + n), and whether all of it is sound: buckets are. */
static int32_t list_places(const struct kv_seq *s, int32_t first, int32_t n, const bool *keep, struct lists *l,
			   int32_t *n_new)
{
	int32_t n_out = 0, n_dropped = s->n_dropped * KV_PAGE_TOKENS;
	*n_new = 0;
	for (int32_t i = 0; i < n * KV_PAGE_TOKENS; i++) {
		int32_t place = first * KV_PAGE_TOKENS + i;
		struct entry *e = &l->entry[n_out];
		*e = (struct entry){
			.spot = {s->pages[place / KV_PAGE_TOKENS], place % KV_PAGE_TOKENS, place + n_dropped}};
		if (place < s->n_buckets) {
			e->b = s->buckets[place];
			e->spot.position = e->b.position;
		} else {
			e->b = (struct kv_bucket){
				.n = 1, .position = e->spot.position, .apart = -1, .keep = keep[i / KV_PAGE_TOKENS]};
			l->at[*n_new] = n_out;
			l->spots[(*n_new)++] = e->spot;
		}
		n_out += e->b.n > 0;
	}
	return n_out;
}

/* The same without tokens that have a value which is no number. */
static enum status list_entries(struct kv_merger *m, const struct kv_seq *s, int32_t first, int32_t n, const bool *keep,
				struct lists *l, int32_t *n_entries, int32_t *n_unsound)
{
	int32_t n_new, n_out = 0, next = 0, n_places = list_places(s, first, n, keep, l, &n_new);
	enum status st = n_new > 0 ? m->are_sound(m, l->spots, n_new, l->sound) : STATUS_OK;
	if (st != STATUS_OK)
		return st;
	*n_unsound = 0;
	for (int32_t i = 0; i < n_places; i++) {
		bool is_new = next < n_new && l->at[next] == i;
		if (is_new && !l->sound[next++]) {
			++*n_unsound;
			if (n_out > 0)
				l->entry[n_out - 1].b.apart = -1;
			continue;
		}
		l->entry[n_out++] = l->entry[i];
	}
	*n_entries = n_out;
	return STATUS_OK;
}

/*
 * More than any pair costs of which nothing is to be kept: a b / (a + b) (1 - cosine) is at most as many tokens as
 * there are.
 */
static const double KEEP = 1e12;

static enum status find_pairs(struct kv_merger *m, struct lists *l, int32_t n)
{
	struct entry *e = l->entry;
	int32_t n_unknown = 0;
	for (int32_t i = 0; i + 1 < n; i++) {
		if (e[i].b.apart >= 0)
			continue;
		l->at[n_unknown] = i;
		l->pairs[n_unknown++] = (struct kv_pair){e[i].spot, e[i + 1].spot, e[i].b.n, e[i + 1].b.n, 0};
	}
	enum status st = n_unknown > 0 ? m->apart(m, l->pairs, n_unknown, l->apart) : STATUS_OK;
	if (st != STATUS_OK)
		return st;
	for (int32_t i = 0; i < n_unknown; i++)
		e[l->at[i]].b.apart = l->apart[i];
	for (int32_t i = 0; i + 1 < n; i++) {
		const struct kv_bucket *a = &e[i].b, *b = &e[i + 1].b;
		l->order[i] = (struct pair){(double)a->n * b->n / ((double)a->n + b->n) * (double)a->apart, i};
		if (a->keep || b->keep)
			l->order[i].cost += KEEP;
	}
	return STATUS_OK;
}

/* What two entries become, in the first one's place. */
static struct kv_pair join(struct entry *e, const struct entry *more)
{
	int32_t n = e->b.n + more->b.n;
	double position = (e->b.position * e->b.n + more->b.position * more->b.n) / n;
	struct kv_pair pair = {e->spot, more->spot, e->b.n, more->b.n, position};
	e->spot.position = position;
	e->b = (struct kv_bucket){.n = n, .position = position, .apart = -1, .keep = e->b.keep || more->b.keep};
	return pair;
}

/*
 * Of the `most` cheapest pairs, those join that have no member in common with a cheaper one: the next round knows
 * better what joins them. What is to be kept, only where nothing else does. *n: of entries.
 */
static enum status join_cheapest(struct kv_merger *m, struct lists *l, int32_t *n, int32_t most)
{
	struct entry *e = l->entry;
	int32_t n_out = 0, n_joined = 0;
	enum status st = find_pairs(m, l, *n);
	if (st != STATUS_OK)
		return st;
	qsort(l->order, (size_t)*n - 1, sizeof *l->order, by_cost);
	for (int32_t i = 0; i < *n - 1 && i < most && (n_joined == 0 || l->order[i].cost < KEEP); i++) {
		struct entry *a = &e[l->order[i].first], *b = a + 1;
		if (a->joined || b->joined)
			continue;
		l->pairs[n_joined++] = join(a, b);
		a->joined = b->joined = true;
		b->b.n = 0;
		if (a > e)
			a[-1].b.apart = -1;
	}
	for (int32_t i = 0; i < *n; i++) {
		if (e[i].b.n == 0)
			continue;
		e[n_out] = e[i];
		e[n_out++].joined = false;
	}
	*n = n_out;
	return m->join(m, l->pairs, n_joined);
}

/*
 * Puts the entries one after the other from page `first` on, and nothing into the places that are left of `left` pages.
 */
static enum status put(struct kv_merger *m, struct kv_seq *s, struct lists *l, int32_t n, int32_t first, int32_t left)
{
	const struct entry *e = l->entry;
	int32_t n_moves = 0;
	for (int32_t i = 0; i < left * KV_PAGE_TOKENS; i++) {
		int32_t place = first * KV_PAGE_TOKENS + i;
		struct kv_spot to = {s->pages[place / KV_PAGE_TOKENS], place % KV_PAGE_TOKENS, 0};
		s->buckets[place] = i < n ? e[i].b : (struct kv_bucket){.apart = -1};
		s->plus[place] = i < n ? logf((float)e[i].b.n) : KV_MERGE_NOTHING;
		if (i >= n)
			l->moves[n_moves++] = (struct kv_move){{KV_NO_PAGE, 0, 0}, to};
		else if (e[i].spot.page != to.page || e[i].spot.token != to.token)
			l->moves[n_moves++] = (struct kv_move){e[i].spot, to}; /* forwards: nothing stands there now */
	}
	if (n > 0)
		s->buckets[first * KV_PAGE_TOKENS + n - 1].apart = -1;
	return n_moves > 0 ? m->move(m, l->moves, n_moves) : STATUS_OK;
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
	int32_t n_places = (first + left) * KV_PAGE_TOKENS, room = left * KV_PAGE_TOKENS, n_entries, n_unsound;
	struct lists l;
	enum status st = STATUS_NOMEM;
	if (!make_lists(&l, (size_t)n * KV_PAGE_TOKENS) || !reserve_buckets(s, n_places, first * KV_PAGE_TOKENS))
		goto out;
	st = list_entries(m, s, first, n, keep, &l, &n_entries, &n_unsound);
	if (st != STATUS_OK)
		goto out;
	for (int32_t i = 0; i < n; i++)
		kv_pool_unbound(pool, s->pages[first + i]);
	while (n_entries > room) {
		int32_t more = n_entries - room, most = n_entries / 4 < 1 ? 1 : n_entries / 4;
		st = join_cheapest(m, &l, &n_entries, more < most ? more : most);
		if (st != STATUS_OK)
			goto out;
	}
	st = put(m, s, &l, n_entries, first, left);
	if (st != STATUS_OK)
		goto out;
	s->n_buckets = n_places;
	s->n_unsound += n_unsound;
	kv_seq_drop(pool, s, first + left, n - left);
	/* Of what the tokens alone would give, it has the first pages. */
	s->n_leading = s->n_leading < first ? s->n_leading : first;
out:
	free_lists(&l);
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
