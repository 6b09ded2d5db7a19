#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kv/evict_policy.h"

/* One row a policy; the first is the default. */
static const struct evict_policy *const policies[] = {
        &evict_policy_retention, &evict_policy_lru,    &evict_policy_lfu,
        &evict_policy_dual,      &evict_policy_s3fifo, &evict_policy_gdsf,
};
enum { N_POLICIES = sizeof policies / sizeof *policies };

const char *evict_policy_name(size_t i)
{
	return i < N_POLICIES ? policies[i]->name : NULL;
}

static const struct evict_policy *find_policy(const char *name)
{
	if (!name || strcmp(name, "default") == 0)
		return policies[0];
	for (size_t i = 0; i < N_POLICIES; i++) {
		if (strcmp(policies[i]->name, name) == 0)
			return policies[i];
	}
	return NULL;
}

const char *evict_policy_find(const char *name)
{
	const struct evict_policy *p = find_policy(name);
	return p ? p->name : NULL;
}

/* ---- Queues: leftist heaps ---- */

static bool before(const struct evict_item *a, const struct evict_item *b)
{
	return a->rank != b->rank ? a->rank < b->rank : a->order < b->order;
}

static int depth(const struct evict *e, int32_t i)
{
	return i == EVICT_NONE ? 0 : e->items[i].heap_depth;
}

/* Makes the deeper child the left one and corrects the depth; true when the depth has changed. */
static bool settle(struct evict *e, int32_t i)
{
	struct evict_item *it = &e->items[i];
	if (depth(e, it->heap.left) < depth(e, it->heap.right)) {
		int32_t left = it->heap.left;
		it->heap.left = it->heap.right;
		it->heap.right = left;
	}
	int is = depth(e, it->heap.right) + 1;
	bool changed = is != it->heap_depth;
	it->heap_depth = (uint8_t)is;
	return changed;
}

/*
 * Merges two heaps along their right paths, which have at most log2(n + 1) members each. The result's root has no
 * parent.
 */
static int32_t merge(struct evict *e, int32_t a, int32_t b)
{
	struct evict_item *items = e->items;
	int32_t root = EVICT_NONE, last = EVICT_NONE;
	while (a != EVICT_NONE && b != EVICT_NONE) {
		if (before(&items[b], &items[a])) {
			int32_t c = a;
			a = b;
			b = c;
		}
		if (last == EVICT_NONE)
			root = a;
		else
			items[last].heap.right = a;
		items[a].heap.up = last;
		last = a;
		a = items[a].heap.right;
	}
	int32_t rest = a == EVICT_NONE ? b : a;
	if (rest != EVICT_NONE)
		items[rest].heap.up = last;
	if (last == EVICT_NONE)
		return rest;
	items[last].heap.right = rest;
	for (int32_t i = last; i != EVICT_NONE; i = items[i].heap.up)
		settle(e, i);
	return root;
}

void evict_set_root(struct evict *e, int32_t q, int32_t root)
{
	e->roots[q] = root;
	if (root == EVICT_NONE)
		e->busy[q / 64] &= ~(UINT64_C(1) << (q % 64));
	else
		e->busy[q / 64] |= UINT64_C(1) << (q % 64);
}

static bool is_candidate(const struct evict_item *it)
{
	return it->idle && it->n_children == 0;
}

void evict_file(struct evict *e, int32_t i)
{
	struct evict_item *it = &e->items[i];
	if (!is_candidate(it) || it->heap_depth > 0)
		return;
	int32_t q = e->policy->queue(e, i);
	it->heap.left = it->heap.right = it->heap.up = EVICT_NONE;
	it->heap_depth = 1;
	evict_set_root(e, q, merge(e, e->roots[q], i));
	e->stats.n_candidates++;
}

bool evict_unfile(struct evict *e, int32_t i)
{
	struct evict_item *it = &e->items[i];
	if (it->heap_depth == 0)
		return false;
	int32_t up = it->heap.up, rest = merge(e, it->heap.left, it->heap.right);
	it->heap_depth = 0;
	e->stats.n_candidates--;
	if (up == EVICT_NONE) {
		evict_set_root(e, e->policy->queue(e, i), rest);
		return true;
	}
	struct evict_item *parent = &e->items[up];
	if (parent->heap.left == i)
		parent->heap.left = rest;
	else
		parent->heap.right = rest;
	if (rest != EVICT_NONE)
		e->items[rest].heap.up = up;
	/* Depths change along a path on which they rise by one with each step, so at most log2(n + 1) times. */
	while (up != EVICT_NONE && settle(e, up))
		up = e->items[up].heap.up;
	return true;
}

int32_t evict_busy_queue(const struct evict *e, int32_t from)
{
	int32_t n = e->policy->n_queues;
	if (from >= n)
		return EVICT_NONE;
	uint64_t word = e->busy[from / 64] >> (from % 64) << (from % 64);
	for (int32_t w = from / 64;;) {
		if (word)
			return w * 64 + __builtin_ctzll(word);
		if (++w * 64 >= n)
			return EVICT_NONE;
		word = e->busy[w];
	}
}

/* ---- Life ---- */

int32_t evict_max_items(const struct evict *e)
{
	return e->n_slots + e->max_ghosts;
}

enum status evict_create(const char *policy, int32_t n_slots, struct evict **out, struct error *err)
{
	const struct evict_policy *p = find_policy(policy);
	if (!p)
		return error_set_param(err, STATUS_INVALID, "kv-policy",
		                       "kv-policy: there is no eviction policy \"%.64s\"", policy);
	if (n_slots < 1 || n_slots > (INT32_MAX - p->more_ghosts) / 2)
		return error_set(err, STATUS_INVALID, "eviction among %d items is not possible", n_slots);
	struct evict *e = calloc(1, sizeof *e);
	if (!e)
		goto fail;
	e->policy = p;
	e->n_slots = n_slots;
	e->free_claim = EVICT_NONE;
	e->max_ghosts = (p->ghosts_per_slot ? n_slots : 0) + p->more_ghosts;
	e->first_free = e->oldest_ghost = e->newest_ghost = EVICT_NONE;
	while ((INT64_C(1) << e->ghost_bits) < e->max_ghosts)
		e->ghost_bits++;
	size_t n_buckets = (size_t)1 << e->ghost_bits;
	e->items = calloc((size_t)evict_max_items(e), sizeof *e->items);
	e->item_of = malloc((size_t)n_slots * sizeof *e->item_of);
	e->roots = malloc((size_t)p->n_queues * sizeof *e->roots);
	e->busy = calloc((size_t)p->n_queues / 64 + 1, sizeof *e->busy);
	e->ghost_buckets = malloc(n_buckets * sizeof *e->ghost_buckets);
	if (!e->items || !e->item_of || !e->roots || !e->busy || !e->ghost_buckets)
		goto fail;
	for (int32_t i = 0; i < n_slots; i++)
		e->item_of[i] = EVICT_NONE;
	for (int32_t q = 0; q < p->n_queues; q++)
		e->roots[q] = EVICT_NONE;
	for (size_t b = 0; b < n_buckets; b++)
		e->ghost_buckets[b] = EVICT_NONE;
	if (p->init && p->init(e) != STATUS_OK)
		goto fail;
	*out = e;
	return STATUS_OK;

fail:
	evict_destroy(e);
	return error_set(err, STATUS_NOMEM, "no memory to keep account of %d items", n_slots);
}

void evict_destroy(struct evict *e)
{
	if (!e)
		return;
	if (e->policy->free)
		e->policy->free(e);
	free(e->claims);
	free(e->ghost_buckets);
	free(e->busy);
	free(e->roots);
	free(e->item_of);
	free(e->items);
	free(e);
}

/* ---- Items and ghosts ---- */

/* Residents never exceed the slots and ghosts never their limit, so there always is one. */
static int32_t new_item(struct evict *e)
{
	int32_t i = e->first_free;
	if (i != EVICT_NONE)
		e->first_free = e->items[i].ghost.next;
	else
		i = e->n_items_made++;
	assert(i < evict_max_items(e));
	return i;
}

static void free_item(struct evict *e, int32_t i)
{
	if (e->policy->forget)
		e->policy->forget(e, i);
	e->items[i].ghost.next = e->first_free;
	e->first_free = i;
}

static int32_t *ghost_bucket(const struct evict *e, uint64_t key)
{
	/* Fibonacci hashing: keys may be small numbers. */
	return &e->ghost_buckets[e->ghost_bits ? key * UINT64_C(0x9E3779B97F4A7C15) >> (64 - e->ghost_bits) : 0];
}

static void add_ghost(struct evict *e, int32_t i)
{
	struct evict_item *it = &e->items[i];
	int32_t *bucket = ghost_bucket(e, it->key);
	it->ghost.hash_next = *bucket;
	*bucket = i;
	it->ghost.prev = e->newest_ghost;
	it->ghost.next = EVICT_NONE;
	if (e->newest_ghost == EVICT_NONE)
		e->oldest_ghost = i;
	else
		e->items[e->newest_ghost].ghost.next = i;
	e->newest_ghost = i;
	e->stats.n_ghosts++;
}

static void take_ghost(struct evict *e, int32_t i)
{
	struct evict_item *it = &e->items[i];
	int32_t *at = ghost_bucket(e, it->key);
	while (*at != i)
		at = &e->items[*at].ghost.hash_next;
	*at = it->ghost.hash_next;
	*(it->ghost.prev == EVICT_NONE ? &e->oldest_ghost : &e->items[it->ghost.prev].ghost.next) = it->ghost.next;
	*(it->ghost.next == EVICT_NONE ? &e->newest_ghost : &e->items[it->ghost.next].ghost.prev) = it->ghost.prev;
	e->stats.n_ghosts--;
}

static int32_t find_ghost(const struct evict *e, uint64_t key)
{
	int32_t i = *ghost_bucket(e, key);
	while (i != EVICT_NONE && e->items[i].key != key)
		i = e->items[i].ghost.hash_next;
	return i;
}

static void move_time(struct evict *e, int64_t now_ms)
{
	if (now_ms <= e->now_ms)
		return;
	e->now_ms = now_ms;
	if (e->policy->advance)
		e->policy->advance(e);
}

static int32_t item_at(const struct evict *e, int32_t slot)
{
	assert(slot >= 0 && slot < e->n_slots);
	return e->item_of[slot];
}

/* Makes the item of a slot that holds none. */
static int32_t insert(struct evict *e, int32_t slot, const struct evict_use *use, enum evict_seen *seen)
{
	int32_t i = find_ghost(e, use->key);
	*seen = i == EVICT_NONE ? EVICT_NEW : EVICT_GHOST;
	if (i == EVICT_NONE) {
		i = new_item(e);
		e->items[i].uses = 0;
	} else {
		take_ghost(e, i);
		e->stats.revived++;
	}
	struct evict_item *it = &e->items[i];
	it->key = use->key;
	it->slot = slot;
	it->n_children = 0;
	it->heap_depth = 0;
	it->idle = false;
	it->parent = use->parent == EVICT_NONE ? EVICT_NONE : item_at(e, use->parent);
	assert((it->parent == EVICT_NONE) == (use->parent == EVICT_NONE));
	if (it->parent != EVICT_NONE) {
		evict_unfile(e, it->parent);
		e->items[it->parent].n_children++;
	}
	e->item_of[slot] = i;
	e->stats.n_items++;
	e->stats.inserted++;
	return i;
}

void evict_touch(struct evict *e, int32_t slot, const struct evict_use *use)
{
	enum evict_seen seen = EVICT_RESIDENT;
	int32_t i = item_at(e, slot);
	move_time(e, use->now_ms);
	if (i == EVICT_NONE) {
		i = insert(e, slot, use, &seen);
	} else {
		evict_unfile(e, i);
		e->stats.hits++;
	}
	if (e->policy->used)
		e->policy->used(e, i, use, seen);
	struct evict_item *it = &e->items[i];
	it->order = ++e->order;
	it->used_ms = e->now_ms;
	it->uses += it->uses < UINT32_MAX;
	evict_file(e, i);
}

void evict_idle(struct evict *e, int32_t slot, bool idle)
{
	int32_t i = item_at(e, slot);
	assert(i != EVICT_NONE);
	if (!idle)
		evict_unfile(e, i);
	e->items[i].idle = idle;
	evict_file(e, i);
}

void evict_hint(struct evict *e, int32_t slot, unsigned hints)
{
	int32_t i = item_at(e, slot);
	assert(i != EVICT_NONE);
	if (!e->policy->hint)
		return;
	evict_unfile(e, i);
	e->policy->hint(e, i, hints);
	evict_file(e, i);
}

/* ---- Claims ---- */

enum status evict_claims_create(struct evict *e, int32_t n)
{
	assert(!e->claims);
	e->claims = calloc((size_t)n, sizeof *e->claims);
	if (!e->claims)
		return STATUS_NOMEM;
	e->n_claims = n;
	e->free_claim = 0;
	for (int32_t c = 0; c < n; c++)
		e->claims[c].next_free = c + 1 < n ? c + 1 : EVICT_NONE;
	return STATUS_OK;
}

/* A claim's name: its generation above, its place below; generations of open claims are odd, so that none is 0. */
static struct evict_claim *claim_of(const struct evict *e, uint64_t claim)
{
	uint32_t at = (uint32_t)claim;
	if (claim == 0 || at >= (uint32_t)e->n_claims || e->claims[at].generation != claim >> 32)
		return NULL;
	return &e->claims[at];
}

uint64_t evict_claim_open(struct evict *e, int64_t until_ms)
{
	int32_t at = e->free_claim;
	if (at == EVICT_NONE)
		return 0;
	struct evict_claim *c = &e->claims[at];
	e->free_claim = c->next_free;
	c->generation++;
	c->until_ms = until_ms;
	return (uint64_t)c->generation << 32 | (uint32_t)at;
}

void evict_claim_renew(struct evict *e, uint64_t claim, int64_t until_ms)
{
	struct evict_claim *c = claim_of(e, claim);
	if (c)
		c->until_ms = until_ms;
}

void evict_claim_close(struct evict *e, uint64_t claim)
{
	struct evict_claim *c = claim_of(e, claim);
	if (!c)
		return;
	c->generation++;
	c->next_free = e->free_claim;
	e->free_claim = (int32_t)(uint32_t)claim;
}

bool evict_claim_holds(const struct evict *e, uint64_t claim)
{
	const struct evict_claim *c = claim_of(e, claim);
	return c && c->until_ms > e->now_ms;
}

/* ---- Leaving ---- */

int32_t evict_victim(struct evict *e, int64_t now_ms)
{
	move_time(e, now_ms);
	if (e->stats.n_candidates == 0)
		return EVICT_NONE;
	return e->items[e->policy->victim(e)].slot;
}

/* Empties the slot of item i, which the caller frees or remembers. True when the policy wants it as a ghost. */
static bool leave_slot(struct evict *e, int32_t i, int32_t slot)
{
	assert(i != EVICT_NONE);
	struct evict_item *it = &e->items[i];
	assert(it->n_children == 0);
	evict_unfile(e, i);
	bool remember = e->policy->gone && e->policy->gone(e, i);
	e->item_of[slot] = EVICT_NONE;
	it->slot = EVICT_NONE;
	it->idle = false;
	e->stats.n_items--;
	if (it->parent != EVICT_NONE) {
		e->items[it->parent].n_children--;
		evict_file(e, it->parent);
	}
	return remember && e->max_ghosts > 0;
}

void evict_forget(struct evict *e, int32_t slot)
{
	int32_t i = item_at(e, slot);
	leave_slot(e, i, slot);
	free_item(e, i);
}

void evict_remove(struct evict *e, int32_t slot, enum evict_reason reason)
{
	int32_t i = item_at(e, slot);
	e->stats.removed[reason]++;
	if (!leave_slot(e, i, slot)) {
		free_item(e, i);
		return;
	}
	if (e->stats.n_ghosts == e->max_ghosts) {
		int32_t oldest = e->oldest_ghost;
		take_ghost(e, oldest);
		free_item(e, oldest);
	}
	add_ghost(e, i);
}

bool evict_has(const struct evict *e, int32_t slot)
{
	return item_at(e, slot) != EVICT_NONE;
}

void evict_stats(const struct evict *e, struct evict_stats *out)
{
	*out = e->stats;
}
