/*
 * Eviction: which of the pages that only the index holds is worth least. It knows no memory: an item is a slot (a page
 * number of the pool, a block of a trace), a key that names its content, and counters.
 *
 * Items form trees; only a candidate, a leaf that is idle (nobody but the index holds it), can be the victim, so a
 * chain loses its end first. Some policies remember items that are gone as ghosts, known by their key, to learn from
 * their return. A policy is one row of a table and a pure function of counters and the times it is given: the same
 * calls choose the same victims. Every touch, change and choice takes O(log n) steps, but for the bounds that a policy
 * states.
 *
 * All memory is taken when the engine is made, so nothing can fail, or be lost, for want of it later. One thread uses
 * an engine.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

enum { EVICT_NONE = -1 };

/* The unit in which policies count how far a page lies before the end of a prompt. */
enum { EVICT_DISTANCE_TOKENS = 512 };

enum evict_hint {
	/* The answer was shorter than EVICT_SHORT_TOKENS: a classification or a probe, rarely a conversation. */
	EVICT_SHORT_ANSWER = 1,
};
enum { EVICT_SHORT_TOKENS = 16 };

/* What needed the room of an item that left. */
enum evict_reason {
	EVICT_FOR_PROMPT, /* a prompt that is admitted */
	EVICT_FOR_DECODE, /* the next token of a running generation */
	EVICT_N_REASONS
};

/* One use of an item by one prompt. */
struct evict_use {
	uint64_t key;      /* of the content; equal for equal content */
	int32_t parent;    /* slot of the item before it, which is resident; EVICT_NONE: it is the first of its chain */
	/* EVICT_DISTANCE_TOKENS begun between its end and the prompt's; 0: it ends there or lies beyond */
	int32_t distance;
	int64_t now_ms;    /* a time that went back counts as the latest one seen */
	unsigned hints;    /* of enum evict_hint */
	/* of the live session that vouches for it from now on; 0: none. Raises its worth, never pins it */
	uint64_t claim;
};

struct evict_stats {
	int32_t n_items, n_candidates, n_ghosts;
	uint64_t inserted, hits;
	uint64_t revived;  /* of the inserted: known as ghosts */
	uint64_t removed[EVICT_N_REASONS];
};

struct evict;

/* Names of the policies, the default first; NULL after the last. */
const char *evict_policy_name(size_t i);
/*
 * The policy of that name, "default" and NULL being the default, by the name it has in this table; NULL when there is
 * none.
 */
const char *evict_policy_find(const char *name);

/* An engine for slots [0, n_slots). INVALID (param kv-policy) for a policy evict_policy_find() does not know; NOMEM. */
enum status evict_create(const char *policy, int32_t n_slots, struct evict **out, struct error *err);
void evict_destroy(struct evict *e); /* NULL is allowed */

/*
 * A slot is used: as a new item, which is not idle, when it holds none, or once more; key and parent then stay as they
 * are.
 */
void evict_touch(struct evict *e, int32_t slot, const struct evict_use *use);
/* Whether only the index holds the item now. */
void evict_idle(struct evict *e, int32_t slot, bool idle);
/* What is known better since an item was used; counts as no use. */
void evict_hint(struct evict *e, int32_t slot, unsigned hints);

/*
 * Claims. A live session vouches for the items it used last. Items name the claim, so a heartbeat that moves its end is
 * one store, however many items there are. An ended claim, and one whose end has passed, are worth nothing.
 */
/* Room for n claims at a time, in place of none; called once, before the first is opened. NOMEM. */
enum status evict_claims_create(struct evict *e, int32_t n);
/* A claim, or 0, which is worth nothing, when there are n already. */
uint64_t evict_claim_open(struct evict *e, int64_t until_ms);
/* Moves its end; nothing for 0 or a claim that is closed. */
void evict_claim_renew(struct evict *e, uint64_t claim, int64_t until_ms);
void evict_claim_close(struct evict *e, uint64_t claim);
/*
 * The candidate that is worth least at now_ms, or EVICT_NONE. Choosing is part of a policy's bookkeeping (s3fifo moves
 * what it passes over), so the caller is expected to remove it.
 */
int32_t evict_victim(struct evict *e, int64_t now_ms);
/* Removes an item that has no children, a candidate or not. */
void evict_remove(struct evict *e, int32_t slot, enum evict_reason reason);
/* As evict_remove(), for an item that does not go for want of room: it is not counted and not remembered. */
void evict_forget(struct evict *e, int32_t slot);

bool evict_has(const struct evict *e, int32_t slot);
void evict_stats(const struct evict *e, struct evict_stats *out);
