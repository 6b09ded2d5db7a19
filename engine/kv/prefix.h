/*
 * The prefix index: pages of exact KV, found by what they were computed from.
 *
 * A page's key is a SHA-256 chain: the root binds everything that KV depends on besides tokens (struct kv_root), and
 * each page's key binds its predecessor's key and its own tokens. Every field is length-prefixed and every digest
 * begins with a tag of its own, so no two different inputs can be read as the same bytes. On a hit the page's tokens
 * and its predecessor are compared as well: a collision, forged or not, is a miss.
 *
 * The index holds one reference on each page it knows. Its pages form trees (a page's parent is its predecessor); only
 * a leaf that nobody else holds can be evicted, so a chain never loses its middle. (The end of a chain that is held by
 * sequences which let go of its middle is unlinked where nothing else is left to evict, and stays theirs.) Which one, a
 * policy says (evict.h).
 *
 * Every page but the last of a chain is full. A conversation that pauses leaves its last page, full or not, as well (a
 * tail). A sequence can share the beginning of a page whose rest differs from its own; it then copies the page before
 * it writes on (kv_seq_prepare), unless it is a tail that only the index holds: that is handed over.
 *
 * Who wants to know later what became of pages, without keeping them, holds a weak reference.
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
/* The key of a tail behind `before`: a page that holds these 1 to KV_PAGE_TOKENS - 1 tokens and room. */
void kv_key_tail(const struct kv_key *before, const int32_t *tokens, int32_t n, struct kv_key *out);

/*
 * The keys of the full pages of a sequence of tokens that only grows: each is computed once, when somebody first asks
 * for it, however often the tokens are looked up and indexed. It belongs to whoever has the tokens.
 */
struct kv_chain {
	struct kv_key root;  /* before the first page */
	struct kv_key *keys; /* [n_keys] of the pages from the first on */
	int32_t n_keys, cap_keys;
};

/* A chain without tokens. */
struct kv_chain kv_chain_of(const struct kv_key *root);
void kv_chain_free(struct kv_chain *c); /* leaves it without keys; its root stays */

/* Who uses pages, for the policy that later chooses among them. */
struct kv_use {
	uint64_t request;  /* uses a page once, however often it asks for it or puts it; 0: each time */
	int64_t now_ms;
	int32_t n_prompt;  /* tokens of its prompt: what lies behind belongs to its answer */
	uint64_t claim;    /* of the live session that vouches for the pages from now on; 0: none */
};

/*
 * The pages that a chain had when it was last seen. They may be evicted; a page that comes back is another one, and
 * found by its key (kv_prefix_has(), kv_tiers_where()).
 */
struct kv_weak {
	struct kv_weak_page {
		int32_t page;
		uint64_t serial; /* of its entry in the index */
	} *pages; /* [n_pages] */
	struct kv_key *keys; /* [n_pages] under which they were indexed, and are in a tier perhaps */
	int32_t n_pages;
	int32_t n_tokens; /* that were computed */
};

#define KV_WEAK_INIT ((struct kv_weak){NULL, NULL, 0, 0})

struct kv_prefix;

struct kv_prefix_stats {
	int32_t n_pages;     /* indexed */
	int32_t n_tails;     /* of these, not full */
	int32_t n_idle;      /* of these, pages that nobody else holds: eviction, leaf after leaf, can have them all */
	uint64_t queries, hits; /* in pages asked for and found */
	uint64_t inserted;
	uint64_t collisions; /* pages passed over that have an equal key and other content */
	uint64_t evicted[EVICT_N_REASONS];
	int32_t n_ghosts;    /* evicted pages that the policy remembers */
	uint64_t revived;    /* of the inserted: pages it remembered */
};

/*
 * An index over the pages of `pool`, which must outlive it, with an eviction policy (evict_create()). INVALID for a
 * policy that does not exist, NOMEM.
 */
enum status kv_prefix_create(struct kv_pool *pool, const char *policy, struct kv_prefix **out, struct error *err);
/* How an index makes keys. */
struct kv_key_ops {
	void (*next)(const struct kv_key *before, const int32_t *tokens, struct kv_key *out);
	void (*tail)(const struct kv_key *before, const int32_t *tokens, int32_t n, struct kv_key *out);
};
/*
 * Before the first page: makes keys otherwise than by kv_key_next() and kv_key_tail(). However bad they are, no wrong
 * page is served; tests show that with keys that collide. ops must outlive the index.
 */
void kv_prefix_set_key_ops(struct kv_prefix *p, const struct kv_key_ops *ops);
/* Unlinks every page. NULL is allowed. */
void kv_prefix_destroy(struct kv_prefix *p);

/*
 * In what follows `chain` is that of `tokens`. A key that there is no memory for is one that the index does not know.
 *
 * The longest run of indexed pages that hold tokens[0..n) from the start, n_pages of them. Takes no reference and
 * changes nothing: a question.
 */
int32_t kv_prefix_match(struct kv_prefix *p, struct kv_chain *chain, const int32_t *tokens, int32_t n);
/*
 * Makes the empty `seq` hold a reference on each page of the longest run that holds tokens[0..n), marking them as used
 * now; then on one more whose beginning goes on like the tokens, if there is one. NOMEM (no room in seq's table) leaves
 * seq empty.
 */
enum status kv_prefix_get(struct kv_prefix *p, struct kv_chain *chain, const int32_t *tokens, int32_t n,
                          const struct kv_use *use, struct kv_seq *seq);
/*
 * Holds full pages like kv_prefix_get, but counts as no use: for whoever will use them later and must not lose them
 * until then.
 */
enum status kv_prefix_hold(struct kv_prefix *p, struct kv_chain *chain, const int32_t *tokens, int32_t n,
                           struct kv_seq *seq);
/*
 * What follows takes nothing from a sequence that lost pages (kv_seq_drop()), whose KV is not what the tokens alone
 * would give; the pages in front of the first that left it are what they were.
 *
 * Indexes the full pages of seq from page `first` on; pages before it are indexed already, the last of them is not gone
 * (kv_seq_let_go()), or the call indexes nothing. A page whose content is indexed under another number is replaced in
 * seq by that one, so that equal prefixes end up sharing memory. Returns the number of leading pages of seq that are
 * indexed now; a page that is not sound (pool.h), and those behind it, are not.
 */
int32_t kv_prefix_put(struct kv_prefix *p, struct kv_chain *chain, const int32_t *tokens, struct kv_seq *seq,
                      int32_t first, const struct kv_use *use);
/*
 * Indexes the last page of seq where it is not full, as kv_prefix_put() does full ones; tokens: all of seq. seq must
 * not be written any more but after kv_seq_prepare(). False when there is no such page or its predecessor is not
 * indexed.
 */
bool kv_prefix_put_tail(struct kv_prefix *p, const int32_t *tokens, struct kv_seq *seq, const struct kv_use *use);
/* Tells of the leading n_pages pages of seq that `request` was the last to use: see evict_hint(). */
void kv_prefix_hint(struct kv_prefix *p, const struct kv_seq *seq, int32_t n_pages, uint64_t request, unsigned hints);

/* Makes *out refer to the pages of seq that are indexed, in place of what it held; out->n_pages is 0 without memory. */
void kv_prefix_weaken(struct kv_prefix *p, const struct kv_seq *seq, struct kv_weak *out);
/*
 * Makes the empty *out refer to pages that were known by these keys (copied) before this index was made: none of them
 * is in it.
 */
void kv_weak_recall(const struct kv_key *keys, int32_t n_pages, int32_t n_tokens, struct kv_weak *out);
/* How many of its pages, from the first on, are still there: eviction takes the last one first. O(log n_pages). */
int32_t kv_weak_alive(const struct kv_prefix *p, const struct kv_weak *weak);
void kv_weak_free(struct kv_prefix *p, struct kv_weak *weak); /* leaves it empty */
/* How many weak references there are to a page that is indexed. */
int32_t kv_prefix_n_weak(const struct kv_prefix *p, int32_t page);

/*
 * Claims of sessions on the pages they use (struct kv_use): see evict.h. Without room (NOMEM) there are none, which is
 * allowed.
 */
enum status kv_prefix_claims_create(struct kv_prefix *p, int32_t n);
uint64_t kv_prefix_claim_open(struct kv_prefix *p, int64_t until_ms);
void kv_prefix_claim_renew(struct kv_prefix *p, uint64_t claim, int64_t until_ms);
void kv_prefix_claim_close(struct kv_prefix *p, uint64_t claim);

/*
 * A page by its content, as those below the device know it. A first page has a zero parent: its own key binds the root.
 */
struct kv_page_name {
	struct kv_key key, parent;
	int32_t tokens[KV_PAGE_TOKENS]; /* [n_tokens] */
	int32_t n_tokens;
	bool first;
};

/* Is told of each page that is evicted, which still has its content. */
void kv_prefix_on_evict(struct kv_prefix *p, void (*leaving)(void *arg, int32_t page, const struct kv_page_name *name),
                        void *arg);
/* What an indexed page is; false when it is not indexed. */
bool kv_prefix_name(const struct kv_prefix *p, int32_t page, struct kv_page_name *out);
/* Whether some page of this key is indexed now. */
bool kv_prefix_has(const struct kv_prefix *p, const struct kv_key *key);
/* The serial of a page's entry, another one each time it is indexed; 0: it is not. */
uint64_t kv_prefix_serial(const struct kv_prefix *p, int32_t page);
/*
 * Indexes a page that was brought from elsewhere behind `parent` (an indexed page, KV_NO_PAGE for a first one), as used
 * by `use`. Returns the page that has this content now, which is another one when it had been indexed in between, or
 * KV_NO_PAGE when the parent is not the one that the name says.
 */
int32_t kv_prefix_adopt(struct kv_prefix *p, const struct kv_page_name *name, int32_t parent, int32_t page,
                        const struct kv_use *use);

/*
 * Evicts the page that the policy finds worth least, a leaf that nobody else holds. Sequences that let go of their
 * beginning may leave pages to the index alone that are no leaves: when there are no others, one of those goes, and the
 * index forgets what follows it, which cannot be found without it. False when there is none either.
 */
bool kv_prefix_evict(struct kv_prefix *p, int64_t now_ms, enum evict_reason reason);
void kv_prefix_stats(const struct kv_prefix *p, struct kv_prefix_stats *out);
/* How many tokens the index knows a page to hold; 0 for a page that it does not know. */
int32_t kv_prefix_page_tokens(const struct kv_prefix *p, int32_t page);
