/*
 * The prefix index: full pages of exact KV, found by what they were computed from.
 *
 * A page's key is a SHA-256 chain: the root binds everything that KV depends on besides tokens (struct kv_root), and each
 * page's key binds its predecessor's key and its own tokens. Every field is length-prefixed and every digest begins
 * with a tag of its own, so no two different inputs can be read as the same bytes. On a hit the page's tokens and its
 * predecessor are compared as well: a collision, forged or not, is a miss.
 *
 * The index holds one reference on each page it knows. Its pages form trees (a page's parent is its predecessor);
 * only a leaf that nobody else holds can be evicted, so a chain never loses its middle. Which one, a policy says (evict.h).
 *
 * One thread, the device's worker, uses an index.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/sha256.h"
#include "engine/base/status.h"
#include "engine/base/str.h"
#include "engine/kv/evict.h"
#include "engine/kv/seq.h"

/* What a page's bytes depend on besides its tokens and those before it. */
struct kv_root {
	uint8_t weights[SHA256_BYTES]; /* digest of the model's weights */
	uint8_t adapter[SHA256_BYTES]; /* of an adapter, or zero */
	int32_t n_layer, n_head_kv, head_dim, page_tokens;
	int32_t kv_type;               /* enum quant_type */
	struct str scheme;             /* how the page is laid out and scaled: the backend's kind */
	struct str rope;               /* the RoPE parameters, as bytes */
	struct str tenant;             /* the salt of the tenant: those of different salts share nothing */
	struct str salt;               /* the request's own: equal prompts under different salts share nothing */
};

struct kv_key {
	uint8_t bytes[SHA256_BYTES];
};

/* The key before a first page. */
void kv_key_root(const struct kv_root *root, struct kv_key *out);
/* The key of the page behind `before` that holds these KV_PAGE_TOKENS tokens. */
void kv_key_next(const struct kv_key *before, const int32_t *tokens, struct kv_key *out);

/* Who uses pages, for the policy that later chooses among them. */
struct kv_use {
	uint64_t request;  /* uses a page once, however often it asks for it or puts it; 0: each time */
	int64_t now_ms;
	int32_t n_prompt;  /* tokens of its prompt: what lies behind belongs to its answer */
	int64_t claim_until_ms; /* until when a live session vouches for the pages; 0: none does */
};

struct kv_prefix;

struct kv_prefix_stats {
	int32_t n_pages;     /* indexed */
	int32_t n_idle;      /* of these, pages that nobody else holds: eviction, leaf after leaf, can have them all */
	uint64_t queries, hits; /* in pages asked for and found */
	uint64_t inserted, collisions;
	uint64_t evicted[EVICT_N_REASONS];
	int32_t n_ghosts;    /* evicted pages that the policy remembers */
	uint64_t revived;    /* of the inserted: pages it remembered */
};

/*
 * An index over the pages of `pool`, which must outlive it, with an eviction policy (evict_create()). INVALID for a policy
 * that does not exist, NOMEM.
 */
enum status kv_prefix_create(struct kv_pool *pool, const char *policy, struct kv_prefix **out, struct error *err);
/* Unlinks every page. NULL is allowed. */
void kv_prefix_destroy(struct kv_prefix *p);

/*
 * The longest run of indexed pages that hold tokens[0..n) from the start under `root`, n_pages of them. Takes no reference and changes
 * nothing: a question.
 */
int32_t kv_prefix_match(struct kv_prefix *p, const struct kv_key *root, const int32_t *tokens, int32_t n);
/*
 * As kv_prefix_match, and makes the empty `seq` hold a reference on each of the pages, marking them as used now.
 * seq->n_tokens is then a multiple of the page size. NOMEM (no room in seq's table) leaves seq empty.
 */
enum status kv_prefix_get(struct kv_prefix *p, const struct kv_key *root, const int32_t *tokens, int32_t n,
                          const struct kv_use *use, struct kv_seq *seq);
/* As kv_prefix_get, but counts as no use: for whoever will use the pages later and must not lose them until then. */
enum status kv_prefix_hold(struct kv_prefix *p, const struct kv_key *root, const int32_t *tokens, int32_t n,
                           struct kv_seq *seq);
/*
 * Indexes the full pages of seq from page `first` on; pages before it are indexed already or the call indexes nothing. A page whose
 * content is indexed under another number is replaced in seq by that one, so that equal prefixes end up sharing memory.
 * Returns the number of leading pages of seq that are indexed now.
 */
int32_t kv_prefix_put(struct kv_prefix *p, const struct kv_key *root, const int32_t *tokens, struct kv_seq *seq, int32_t first,
                      const struct kv_use *use);
/* Tells of the leading n_pages pages of seq that `request` was the last to use: see evict_hint(). */
void kv_prefix_hint(struct kv_prefix *p, const struct kv_seq *seq, int32_t n_pages, uint64_t request, unsigned hints);
/* A session vouches for the full pages of seq that are indexed: see evict_claim(). */
void kv_prefix_claim(struct kv_prefix *p, const struct kv_seq *seq, int64_t until_ms);
/* Evicts the page that the policy finds worth least, a leaf that nobody else holds; false when there is none. */
bool kv_prefix_evict(struct kv_prefix *p, int64_t now_ms, enum evict_reason reason);
void kv_prefix_stats(const struct kv_prefix *p, struct kv_prefix_stats *out);
