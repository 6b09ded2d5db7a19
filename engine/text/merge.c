#include "engine/text/merge.h"

#include <stdlib.h>
#include <string.h>

#define NO_RANK UINT32_MAX

/* Sequences up to this length are merged by looking at every pair each time: most words, and all of it in cache. */
enum { SHORT_MAX = 32 };

static uint64_t pair_of(int32_t left, int32_t right)
{
	return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

static size_t slot_of(const struct merge_table *m, uint64_t pair)
{
	uint64_t h = (pair ^ pair >> 31) * 0x9E3779B97F4A7C15ull;
	return (size_t)(h >> 20) & (m->n_slots - 1);
}

bool merge_table_init(struct merge_table *m, size_t n)
{
	memset(m, 0, sizeof *m);
	if (n > SIZE_MAX / 8 / sizeof *m->slots)
		return false;
	size_t n_slots = 16;
	while (n_slots / 2 < n)
		n_slots *= 2;
	m->slots = malloc(n_slots * sizeof *m->slots);
	if (!m->slots)
		return false;
	memset(m->slots, 0xFF, n_slots * sizeof *m->slots);
	m->n_slots = n_slots;
	return true;
}

void merge_table_free(struct merge_table *m)
{
	free(m->slots);
	memset(m, 0, sizeof *m);
}

static struct merge_slot *probe(const struct merge_table *m, uint64_t pair)
{
	for (size_t i = slot_of(m, pair);; i = (i + 1) & (m->n_slots - 1)) {
		struct merge_slot *s = &m->slots[i];
		if (s->pair == pair || s->pair == MERGE_FREE)
			return s;
	}
}

static bool grow(struct merge_table *m)
{
	struct merge_table bigger;
	if (!merge_table_init(&bigger, m->n_slots))
		return false;
	for (size_t i = 0; i < m->n_slots; i++) {
		if (m->slots[i].pair != MERGE_FREE)
			*probe(&bigger, m->slots[i].pair) = m->slots[i];
	}
	bigger.n_used = m->n_used;
	free(m->slots);
	*m = bigger;
	return true;
}

bool merge_table_add(struct merge_table *m, int32_t left, int32_t right, uint32_t rank, int32_t result)
{
	if (m->n_used >= m->n_slots / 2 && !grow(m))
		return false;
	struct merge_slot *s = probe(m, pair_of(left, right));
	if (s->pair == MERGE_FREE)
		m->n_used++;
	else if (s->rank <= rank)
		return true;
	*s = (struct merge_slot){pair_of(left, right), rank, result};
	return true;
}

const struct merge_slot *merge_table_find(const struct merge_table *m, int32_t left, int32_t right)
{
	if (m->n_slots == 0)
		return NULL;
	const struct merge_slot *s = probe(m, pair_of(left, right));
	return s->pair == MERGE_FREE ? NULL : s;
}

/* A symbol, and the merge of it with the next one. */
struct merge_node {
	int32_t id; /* -1: merged into the one before */
	uint32_t prev, next;
	uint32_t rank; /* NO_RANK: there is no merge */
	int32_t result;
};

void merge_work_free(struct merge_work *w)
{
	free(w->nodes);
	free(w->heap);
	memset(w, 0, sizeof *w);
}

static bool work_reserve(struct merge_work *w, size_t n)
{
	if (n <= w->cap)
		return true;
	/* The content is not kept, so nothing is copied. */
	merge_work_free(w);
	w->nodes = malloc(n * sizeof *w->nodes);
	w->heap = malloc(n * 2 * sizeof *w->heap);
	if (!w->nodes || !w->heap) {
		merge_work_free(w);
		return false;
	}
	w->cap = n;
	return true;
}

static size_t merge_short(const struct merge_table *m, int32_t *ids, size_t n)
{
	uint32_t rank[SHORT_MAX];
	int32_t result[SHORT_MAX];
	for (size_t i = 0; i + 1 < n; i++) {
		const struct merge_slot *s = merge_table_find(m, ids[i], ids[i + 1]);
		rank[i] = s ? s->rank : NO_RANK;
		result[i] = s ? s->result : -1;
	}
	while (n > 1) {
		size_t best = 0;
		for (size_t i = 1; i + 1 < n; i++) {
			if (rank[i] < rank[best])
				best = i;
		}
		if (rank[best] == NO_RANK)
			break;
		ids[best] = result[best];
		n--;
		for (size_t i = best + 1; i < n; i++) {
			ids[i] = ids[i + 1];
			rank[i - 1] = rank[i];
			result[i - 1] = result[i];
		}
		for (size_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < n; i++) {
			const struct merge_slot *s = merge_table_find(m, ids[i], ids[i + 1]);
			rank[i] = s ? s->rank : NO_RANK;
			result[i] = s ? s->result : -1;
		}
	}
	return n;
}

/* A binary heap of rank << 32 | position, smallest on top. */

static void sift_down(uint64_t *heap, size_t n, size_t i)
{
	uint64_t v = heap[i];
	for (;;) {
		size_t child = 2 * i + 1;
		if (child >= n)
			break;
		if (child + 1 < n && heap[child + 1] < heap[child])
			child++;
		if (heap[child] >= v)
			break;
		heap[i] = heap[child];
		i = child;
	}
	heap[i] = v;
}

static void sift_up(uint64_t *heap, size_t i)
{
	uint64_t v = heap[i];
	while (i > 0 && heap[(i - 1) / 2] > v) {
		heap[i] = heap[(i - 1) / 2];
		i = (i - 1) / 2;
	}
	heap[i] = v;
}

/* Looks up the merge of node i with the next one and notes it there; true when there is one. */
static bool rank_node(const struct merge_table *m, struct merge_node *nodes, uint32_t i, size_t n)
{
	struct merge_node *a = &nodes[i];
	const struct merge_slot *s = a->next < n ? merge_table_find(m, a->id, nodes[a->next].id) : NULL;
	a->rank = s ? s->rank : NO_RANK;
	a->result = s ? s->result : -1;
	return s != NULL;
}

static size_t merge_long(const struct merge_table *m, struct merge_work *w, int32_t *ids, size_t n)
{
	struct merge_node *nodes = w->nodes;
	uint64_t *heap = w->heap;
	size_t n_heap = 0;
	for (size_t i = 0; i < n; i++)
		nodes[i] = (struct merge_node){ids[i], (uint32_t)i - 1, (uint32_t)i + 1, NO_RANK, -1};
	for (size_t i = 0; i < n; i++) {
		if (rank_node(m, nodes, (uint32_t)i, n))
			heap[n_heap++] = (uint64_t)nodes[i].rank << 32 | i;
	}
	for (size_t i = n_heap / 2; i-- > 0;)
		sift_down(heap, n_heap, i);

	/*
	 * An entry is stale when its node is gone or has another merge by now. Each merge takes one entry and adds at
	 * most two, and there are fewer than n merges: 2n entries are enough.
	 */
	while (n_heap > 0) {
		uint64_t top = heap[0];
		uint32_t i = (uint32_t)top, rank = (uint32_t)(top >> 32);
		struct merge_node *a = &nodes[i];
		if (a->id < 0 || a->rank != rank) {
			heap[0] = heap[--n_heap];
			sift_down(heap, n_heap, 0);
			continue;
		}
		struct merge_node *b = &nodes[a->next];
		a->id = a->result;
		b->id = -1;
		a->next = b->next;
		if (a->next < n)
			nodes[a->next].prev = i;
		/* The first new entry takes the place of the one that was used. */
		if (rank_node(m, nodes, i, n)) {
			heap[0] = (uint64_t)a->rank << 32 | i;
		} else {
			heap[0] = heap[--n_heap];
		}
		sift_down(heap, n_heap, 0);
		if (a->prev < n && rank_node(m, nodes, a->prev, n)) {
			heap[n_heap] = (uint64_t)nodes[a->prev].rank << 32 | a->prev;
			sift_up(heap, n_heap++);
		}
	}

	size_t left = 0;
	for (uint32_t i = 0; i < n; i = nodes[i].next)
		ids[left++] = nodes[i].id;
	return left;
}

bool merge_run(const struct merge_table *m, struct merge_work *w, int32_t *ids, size_t *n)
{
	if (*n <= SHORT_MAX) {
		*n = merge_short(m, ids, *n);
		return true;
	}
	if (!work_reserve(w, *n))
		return false;
	*n = merge_long(m, w, ids, *n);
	return true;
}
