/*
 * KV that is a session's own. What a context policy has let go of cannot enter the prefix index (engine/kv/policy.h),
 * so between the turns of a conversation it waits here, for that session's next request under the same policy, which
 * goes on where it ended.
 *
 * It pins nothing for good: the longest unused goes when its pages are needed, or when all that is parked comes to more
 * than half of the pool, and is then computed again. It ends with its session.
 */
#pragma once

#include "engine/base/list.h"
#include "engine/kv/pool.h"
#include "engine/kv/prefix.h"
#include "engine/request.h"
#include "engine/session.h"

struct parked {
	struct list link;  /* of parking.all */
	struct parking *parking;
	struct session *session;
	struct token_buf tokens; /* kv.n_tokens of them are computed */
	struct kv_seq kv;
	struct kv_key root;
	struct kv_policy policy;
	struct trigger trigger; /* and what had set it off */
};

struct parking {
	struct kv_pool *pool;
	struct list all;   /* longest unused first */
	int64_t n_pages;
	/* ends of turns, turns that went on from there, and what had to go before that */
	uint64_t n_parked, n_resumed, n_dropped;
};

void parking_init(struct parking *p, struct kv_pool *pool);
/*
 * Takes the KV and the tokens of a request that ends, in place of what its session had parked. Without memory they are
 * let go of, which costs the next turn time.
 */
void park(struct parking *p, struct request *r);
/*
 * Gives the request, which holds no pages, what its session has parked, as far as its tokens begin alike, but for its
 * last token. False when there is nothing that serves it.
 */
bool unpark(struct request *r);
/* Lets go of what has waited longest; false when there is none. */
bool parking_drop_oldest(struct parking *p);
/* The session ends: NULL is allowed. */
void parked_destroy(struct parked *k);
