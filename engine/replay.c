/*
 * Replaying a trace of prompts on the eviction engine that the server runs (kv/evict.h), and the bound no policy can
 * pass.
 *
 * The trace is kept as a forest: a node for each distinct block behind its predecessor, so that equal names at
 * different places, which a well-formed trace does not have, are different blocks.
 */
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "engine/kv/evict.h"
#include "engine/tools.h"

enum { NO_NODE = -1 };

struct trace_prompt {
	int64_t time_ms, output_tokens;
	int32_t first, n_blocks; /* trace.blocks[first .. first + n_blocks) */
};

struct trace_node {
	uint64_t name;
	int32_t parent, hash_next;
};

struct engine_trace {
	struct trace_prompt *prompts;
	int32_t n_prompts, cap_prompts;
	int32_t *blocks; /* [n_blocks] nodes */
	int32_t n_blocks, cap_blocks;
	struct trace_node *nodes;
	int32_t n_nodes, cap_nodes;
	int32_t *buckets; /* [1 << bucket_bits] */
	int bucket_bits;
};

const char *engine_kv_policy(size_t i)
{
	return evict_policy_name(i);
}

const char *engine_kv_policy_find(const char *name)
{
	return evict_policy_find(name);
}

/* ---- The trace ---- */

enum status engine_trace_create(struct engine_trace **out)
{
	*out = calloc(1, sizeof **out);
	return *out ? STATUS_OK : STATUS_NOMEM;
}

void engine_trace_destroy(struct engine_trace *t)
{
	if (!t)
		return;
	free(t->prompts);
	free(t->blocks);
	free(t->nodes);
	free(t->buckets);
	free(t);
}

/* Room for `extra` more elements of an array. LIMIT beyond INT32_MAX of them. */
static enum status reserve(void *array, int32_t n, size_t extra, int32_t *cap, size_t element_bytes)
{
	if (extra > (size_t)(INT32_MAX - n))
		return STATUS_LIMIT;
	if (n + (int32_t)extra <= *cap)
		return STATUS_OK;
	int32_t want = n + (int32_t)extra;
	int32_t cap_new = *cap > INT32_MAX / 2 ? INT32_MAX : *cap * 2;
	if (cap_new < want)
		cap_new = want;
	void *moved = realloc(*(void **)array, (size_t)cap_new * element_bytes);
	if (!moved)
		return STATUS_NOMEM;
	*(void **)array = moved;
	*cap = cap_new;
	return STATUS_OK;
}

static int32_t *bucket_of(const struct engine_trace *t, int32_t parent, uint64_t name)
{
	uint64_t mixed = (name ^ ((uint64_t)(uint32_t)parent << 32)) * UINT64_C(0x9E3779B97F4A7C15);
	mixed ^= mixed >> 29;
	return &t->buckets[mixed * UINT64_C(0xBF58476D1CE4E5B9) >> (64 - t->bucket_bits)];
}

static enum status grow_buckets(struct engine_trace *t)
{
	int bits = t->bucket_bits ? t->bucket_bits + 1 : 10;
	int32_t *buckets = malloc(sizeof *buckets << bits);
	if (!buckets)
		return STATUS_NOMEM;
	for (size_t b = 0; b < (size_t)1 << bits; b++)
		buckets[b] = NO_NODE;
	free(t->buckets);
	t->buckets = buckets;
	t->bucket_bits = bits;
	for (int32_t i = 0; i < t->n_nodes; i++) {
		int32_t *bucket = bucket_of(t, t->nodes[i].parent, t->nodes[i].name);
		t->nodes[i].hash_next = *bucket;
		*bucket = i;
	}
	return STATUS_OK;
}

/* The node of a block behind `parent`, made if need be. */
static enum status node_of(struct engine_trace *t, int32_t parent, uint64_t name, int32_t *out)
{
	enum status st = STATUS_OK;
	if (t->bucket_bits == 0 || t->n_nodes >> t->bucket_bits)
		st = grow_buckets(t);
	if (st != STATUS_OK)
		return st;
	int32_t *bucket = bucket_of(t, parent, name);
	for (*out = *bucket; *out != NO_NODE; *out = t->nodes[*out].hash_next) {
		if (t->nodes[*out].name == name && t->nodes[*out].parent == parent)
			return STATUS_OK;
	}
	st = reserve(&t->nodes, t->n_nodes, 1, &t->cap_nodes, sizeof *t->nodes);
	if (st != STATUS_OK)
		return st;
	t->nodes[t->n_nodes] = (struct trace_node){name, parent, *bucket};
	*out = *bucket = t->n_nodes++;
	return STATUS_OK;
}

enum status engine_trace_add(struct engine_trace *t, int64_t time_ms, const uint64_t *blocks, size_t n,
                             int64_t output_tokens, struct error *err)
{
	int32_t parent = NO_NODE;
	if (time_ms < 0 || (t->n_prompts > 0 && time_ms < t->prompts[t->n_prompts - 1].time_ms))
		return error_set_param(err, STATUS_INVALID, "timestamp",
		                       "timestamp: %lld ms is before the prompt that precedes it", (long long)time_ms);
	enum status st = reserve(&t->prompts, t->n_prompts, 1, &t->cap_prompts, sizeof *t->prompts);
	if (st == STATUS_OK)
		st = reserve(&t->blocks, t->n_blocks, n, &t->cap_blocks, sizeof *t->blocks);
	for (size_t i = 0; i < n && st == STATUS_OK; i++) {
		st = node_of(t, parent, blocks[i], &parent);
		t->blocks[t->n_blocks + (int32_t)i] = parent;
	}
	if (st != STATUS_OK)
		return error_set(err, st,
		                 st == STATUS_LIMIT ? "the trace has too many blocks" : "no memory for the trace");
	t->prompts[t->n_prompts++] = (struct trace_prompt){time_ms, output_tokens, t->n_blocks, (int32_t)n};
	t->n_blocks += (int32_t)n;
	return STATUS_OK;
}

void engine_trace_info(const struct engine_trace *t, struct engine_trace_info *out)
{
	*out = (struct engine_trace_info){
	        .n_prompts = (uint64_t)t->n_prompts,
	        .n_blocks = (uint64_t)t->n_blocks,
	        .n_distinct_blocks = (uint64_t)t->n_nodes,
	        .span_ms = t->n_prompts ? t->prompts[t->n_prompts - 1].time_ms - t->prompts[0].time_ms : 0,
	};
}

/* ---- A policy ---- */

struct cache {
	const struct engine_trace *trace;
	struct evict *evict;
	int32_t *slot_of;    /* [n_nodes] */
	int32_t *node_at;    /* [capacity] */
	int32_t n_used, capacity;
};

/* A slot for one more block, or EVICT_NONE when the prompt's own blocks fill the cache. */
static int32_t take_slot(struct cache *c, int64_t now_ms)
{
	if (c->n_used < c->capacity)
		return c->n_used++;
	int32_t slot = evict_victim(c->evict, now_ms);
	if (slot == EVICT_NONE)
		return EVICT_NONE;
	c->slot_of[c->node_at[slot]] = EVICT_NONE;
	evict_remove(c->evict, slot, EVICT_FOR_PROMPT);
	return slot;
}

/* Returns the number of leading blocks that were there. */
static int32_t run_prompt(struct cache *c, const struct trace_prompt *p, int64_t now_ms)
{
	const int32_t *nodes = c->trace->blocks + p->first;
	struct evict_use use = {.parent = EVICT_NONE, .now_ms = now_ms};
	int32_t n_hits = 0, n = 0;
	if (p->output_tokens < EVICT_SHORT_TOKENS)
		use.hints |= EVICT_SHORT_ANSWER;
	for (; n_hits < p->n_blocks && c->slot_of[nodes[n_hits]] != EVICT_NONE; n_hits++)
		evict_idle(c->evict, c->slot_of[nodes[n_hits]], false);
	for (; n < p->n_blocks; n++) {
		int32_t slot = n < n_hits ? c->slot_of[nodes[n]] : take_slot(c, now_ms);
		if (slot == EVICT_NONE)
			break;
		c->slot_of[nodes[n]] = slot;
		c->node_at[slot] = nodes[n];
		use.key = (uint64_t)nodes[n];
		use.distance = p->n_blocks - 1 - n;
		evict_touch(c->evict, slot, &use);
		use.parent = slot;
	}
	while (n-- > 0)
		evict_idle(c->evict, c->slot_of[nodes[n]], true);
	return n_hits;
}

static enum status replay_policy(const struct engine_trace *t, const char *policy, int32_t capacity, double scale,
                                 struct engine_replay_result *out, struct error *err)
{
	struct cache c = {.trace = t, .capacity = capacity};
	enum status st = evict_create(policy, capacity, &c.evict, err);
	if (st != STATUS_OK)
		return st;
	struct evict_stats stats;
	c.slot_of = malloc(((size_t)t->n_nodes + 1) * sizeof *c.slot_of);
	c.node_at = malloc((size_t)capacity * sizeof *c.node_at);
	if (!c.slot_of || !c.node_at) {
		st = error_set(err, STATUS_NOMEM, "no memory to replay the trace");
		goto out;
	}
	for (int32_t i = 0; i < t->n_nodes; i++)
		c.slot_of[i] = EVICT_NONE;
	for (int32_t i = 0; i < t->n_prompts; i++)
		out->hits += (uint64_t)run_prompt(&c, &t->prompts[i], llround((double)t->prompts[i].time_ms * scale));
	evict_stats(c.evict, &stats);
	out->evictions = stats.removed[EVICT_FOR_PROMPT];
out:
	free(c.slot_of);
	free(c.node_at);
	evict_destroy(c.evict);
	return st;
}

/* ---- The bound ---- */

/*
 * L. A. Belady's choice (1966): the block whose next use is furthest away goes, or does not enter. A block is used
 * whenever one behind it is, so of those used next by the same prompt the deepest goes first, and what is kept is
 * always a beginning.
 *
 * Blocks wait in a heap under their next use; an entry that is out of date is dropped when it comes up.
 */
struct belady_entry {
	int64_t next; /* (prompt, then depth) of its next use; INT64_MAX: none */
	int32_t node;
};

struct belady {
	struct belady_entry *heap; /* furthest first */
	size_t n;
};

static bool further(const struct belady_entry *a, const struct belady_entry *b)
{
	return a->next != b->next ? a->next > b->next : a->node > b->node;
}

static void belady_push(struct belady *h, struct belady_entry x)
{
	size_t at = h->n++;
	for (; at > 0 && further(&x, &h->heap[(at - 1) / 2]); at = (at - 1) / 2)
		h->heap[at] = h->heap[(at - 1) / 2];
	h->heap[at] = x;
}

static struct belady_entry belady_pop(struct belady *h)
{
	struct belady_entry top = h->heap[0], x = h->heap[--h->n];
	size_t at = 0;
	for (size_t child; (child = at * 2 + 1) < h->n; at = child) {
		if (child + 1 < h->n && further(&h->heap[child + 1], &h->heap[child]))
			child++;
		if (!further(&h->heap[child], &x))
			break;
		h->heap[at] = h->heap[child];
	}
	h->heap[at] = x;
	return top;
}

static enum status replay_belady(const struct engine_trace *t, int32_t capacity, struct engine_replay_result *out,
                                 struct error *err)
{
	enum { DEPTH_BITS = 31 };
	enum status st = STATUS_OK;
	struct belady h = {malloc(((size_t)t->n_blocks + 1) * sizeof *h.heap), 0};
	int64_t *next_use = malloc(((size_t)t->n_blocks + 1) * sizeof *next_use); /* of trace.blocks[i] after i */
	/* next use of a node; INT64_MIN: not kept */
	int64_t *pending = malloc(((size_t)t->n_nodes + 1) * sizeof *pending);
	int32_t n_kept = 0;
	if (!h.heap || !next_use || !pending) {
		st = error_set(err, STATUS_NOMEM, "no memory to replay the trace");
		goto out;
	}
	for (int32_t i = 0; i < t->n_nodes; i++)
		pending[i] = INT64_MAX;
	for (int32_t p = t->n_prompts - 1; p >= 0; p--) {
		for (int32_t d = t->prompts[p].n_blocks - 1; d >= 0; d--) {
			int32_t i = t->prompts[p].first + d;
			next_use[i] = pending[t->blocks[i]];
			pending[t->blocks[i]] = ((int64_t)p << DEPTH_BITS) + d;
		}
	}
	for (int32_t i = 0; i < t->n_nodes; i++)
		pending[i] = INT64_MIN;
	for (int32_t i = 0; i < t->n_blocks; i++) {
		int32_t node = t->blocks[i];
		out->hits += pending[node] != INT64_MIN;
		n_kept += pending[node] == INT64_MIN;
		pending[node] = next_use[i];
		belady_push(&h, (struct belady_entry){next_use[i], node});
		while (n_kept > capacity) {
			struct belady_entry e = belady_pop(&h);
			if (pending[e.node] != e.next)
				continue;
			pending[e.node] = INT64_MIN;
			n_kept--;
			out->evictions++;
		}
	}
out:
	free(h.heap);
	free(next_use);
	free(pending);
	return st;
}

static int64_t thread_cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

enum status engine_replay(const struct engine_trace *t, const char *policy, int32_t capacity_blocks, double time_scale,
                          struct engine_replay_result *out, struct error *err)
{
	int64_t last_ms = t->n_prompts ? t->prompts[t->n_prompts - 1].time_ms : 0, start_ns = thread_cpu_ns();
	*out = (struct engine_replay_result){0};
	if (capacity_blocks < 1)
		return error_set_param(err, STATUS_INVALID, "capacity", "capacity: a cache has at least one block");
	/* A century in milliseconds leaves every sum of times far from its limits. */
	if (!(time_scale > 0) || !((double)last_ms * time_scale < 3.2e12))
		return error_set_param(err, STATUS_INVALID, "scale",
		                       "scale: times must stay positive and below a hundred years");
	enum status st = strcmp(policy, ENGINE_REPLAY_BELADY) == 0
	                         ? replay_belady(t, capacity_blocks, out, err)
	                         : replay_policy(t, policy, capacity_blocks, time_scale, out, err);
	out->cpu_ns = thread_cpu_ns() - start_ns;
	return st;
}
