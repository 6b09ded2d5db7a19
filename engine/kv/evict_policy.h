/*
 * The inside of the eviction engine: what the mechanism (evict.c) offers to policies (evict_classic.c,
 * evict_retention.c).
 *
 * The mechanism keeps items, trees, ghosts and queues of candidates. A queue is an intrusive leftist heap (C. A. Crane,
 * 1972): its root has the lowest rank, the least recently used of equal ones; insertion and removal of any member take
 * O(log n) steps in the worst case. A candidate is in exactly one queue, which its policy names; whatever the answer of
 * ops->queue() or the rank depends on may change only while the item is outside (evict_unfile, evict_file).
 */
#pragma once

#include "engine/kv/evict.h"

/* What is known of one block: resident in a slot, or a ghost. */
struct evict_item {
	uint64_t key;
	uint64_t order;     /* of its last use; every use has its own */
	int64_t used_ms;    /* time of its last use */
	double rank;        /* in its queue, lowest first */
	union {
		struct { int32_t left, right, up; } heap;         /* a candidate */
		struct { int32_t prev, next, hash_next; } ghost;  /* a ghost; free items: next */
	};
	int32_t slot;       /* EVICT_NONE: not resident */
	int32_t parent;     /* item */
	int32_t n_children; /* resident ones */
	uint32_t uses;      /* as long as it is known */
	uint8_t heap_depth; /* length of the path down the right children; 0: in no heap */
	bool idle;
};

enum evict_seen { EVICT_NEW, EVICT_GHOST, EVICT_RESIDENT };

struct evict_policy {
	const char *name;
	int32_t n_queues;
	bool ghosts_per_slot; /* remembers as many ghosts as there are slots */
	int32_t more_ghosts;  /* and so many more */
	/* All hooks but init, free, queue and victim may be NULL. */
	enum status (*init)(struct evict *e); /* makes e->state; NOMEM */
	void (*free)(struct evict *e);        /* also after a failed init */
	/*
	 * Item i is used; its counters are those before this use (uses = 0 for a new one), and it is outside its queue.
	 */
	void (*used)(struct evict *e, int32_t i, const struct evict_use *use, enum evict_seen seen);
	/* Names the queue of a candidate, having set its rank. The answer is the same until the item is unfiled. */
	int32_t (*queue)(struct evict *e, int32_t i);
	/* The candidate to give up, or EVICT_NONE. */
	int32_t (*victim)(struct evict *e);
	/* Item i leaves its slot; true: it becomes a ghost. */
	bool (*gone)(struct evict *e, int32_t i);
	/* What is known of item i is dropped. */
	void (*forget)(struct evict *e, int32_t i);
	/* Time has passed: e->now_ms. */
	void (*advance)(struct evict *e);
	void (*hint)(struct evict *e, int32_t i, unsigned hints);
};

/* Reused for another session, it gets another generation; names of the old one then mean nothing. */
struct evict_claim {
	int64_t until_ms;
	uint32_t generation; /* of its present or next use; odd while it is open */
	int32_t next_free;
};

struct evict {
	const struct evict_policy *policy;
	void *state; /* the policy's */
	int64_t now_ms;
	uint64_t order;
	struct evict_item *items; /* [n_slots + max_ghosts] */
	int32_t n_slots, n_items_made, first_free;
	int32_t *item_of;         /* [n_slots] */
	int32_t *roots;           /* [n_queues] */
	uint64_t *busy;           /* a bit for each queue that has members */
	int32_t *ghost_buckets;   /* [1 << ghost_bits] */
	int32_t ghost_bits, max_ghosts;
	int32_t oldest_ghost, newest_ghost;
	struct evict_claim *claims; /* [n_claims] */
	int32_t n_claims, free_claim;
	struct evict_stats stats;
};

/* The number of items there can be: the size of a policy's array beside e->items. */
int32_t evict_max_items(const struct evict *e);
/* Takes an item out of its queue; false when it is in none. */
bool evict_unfile(struct evict *e, int32_t i);
/* Puts a candidate into the queue that its policy names; nothing for an item that is none, or that is in a queue. */
void evict_file(struct evict *e, int32_t i);
/* Whether a session vouches by this claim now. */
bool evict_claim_holds(const struct evict *e, uint64_t claim);
/* Gives a queue another root: all of its members change. */
void evict_set_root(struct evict *e, int32_t q, int32_t root);
/* The first queue from `from` on that has members, or EVICT_NONE. */
int32_t evict_busy_queue(const struct evict *e, int32_t from);

extern const struct evict_policy evict_policy_lru, evict_policy_lfu, evict_policy_dual, evict_policy_s3fifo,
	evict_policy_gdsf;
extern const struct evict_policy evict_policy_retention;
