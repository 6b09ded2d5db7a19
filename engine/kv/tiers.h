/*
 * The tiers below the device: which pages go down, and which come up.
 *
 * Down. A page that the prefix index evicts is offered to each tier that can give it back sooner than it could be
 * computed again: where bytes of a page / bytes a second of the tier < tokens of a page / tokens a second of prefill.
 * Both are measured at start and with every transfer and step from then on. A tier that does not pay is tried again
 * with a few pages now and then, so that its figures stay true.
 *
 * The disk is slower than prompts come in, so it is not left until a page is evicted: what a request leaves is written
 * behind it, as buffers and the bound on writes allow, and a page that is evicted later is there already.
 *
 * In a narrow pool pages with a wide copy go to files of their own (KV_TIER_DISK_WIDE).
 *
 * The remote tier is written behind as well, so that others find what was computed here. What it has of theirs is not
 * known beforehand: the first page that no nearer tier has is asked for, and only when it is there the ones behind it
 * are.
 *
 * Up. A request that is next in line asks for what the tiers have behind the pages that the index knows
 * (kv_tiers_fetch()). Its pages are taken and filled while others compute, and join the index one by one, in order,
 * each as soon as it is there; so what was fetched for a request that leaves is not lost.
 *
 * When there are no others, the request itself computes meanwhile. Then pages come in parts (image.h): the first layers
 * of all of them, then the next. As soon as the first parts are there the request takes the pages over and begins
 * (kv_tiers_begin()); its step waits, before each layer's attention, for the parts that have it (kv_tiers_wait()). No
 * part is read before its checksum has been compared. Until a page is whole the fetch holds it beside the request, and
 * the index does not know it. When something does not come, or not in time, the step is given up, nothing of it counts,
 * the request gives the pages back (kv_tiers_retreat()), and goes on as if it had waited from the start.
 *
 * A page in a tier may be in the device as well: a tier forgets nothing because it was fetched.
 *
 * One thread, the device's worker, uses it.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/list.h"
#include "engine/kv/pool.h"
#include "engine/kv/prefix.h"
#include "engine/kv/tier.h"

enum kv_tier_kind { KV_TIER_RAM, KV_TIER_DISK, KV_TIER_DISK_WIDE, KV_TIER_REMOTE, KV_TIER_KINDS };

struct kv_tiers;

struct kv_tiers_stats {
	bool has[KV_TIER_KINDS];
	struct kv_tier_stats tier[KV_TIER_KINDS];
	bool pays[KV_TIER_KINDS];         /* by the present figures */
	uint64_t unpaid[KV_TIER_KINDS];   /* pages dropped because they are computed sooner than fetched */
	uint64_t fetched[KV_TIER_KINDS];  /* pages that came up and joined the index */
	uint64_t fetches, fetches_cancelled;
	uint64_t fetches_overlapped;      /* whose last pages came while their request computed with the first layers */
	int32_t n_fetching;               /* requests that wait for pages */
	double prefill_tokens_per_s;      /* as far as it is known; 0: not yet */
};

/* The pages one request waits for; part of the request. */
struct kv_fetch {
	struct list link;   /* among those under way; kv_fetch_init() */
	uint64_t id;
	struct kv_fetch_page *pages; /* [n] */
	int32_t n, next_part, next_load, next_adopt;
	int32_t first;      /* of the pages: its place in the sequence */
	bool remote_has;    /* the remote tier had a page of it: it is worth asking for those behind */
	int32_t n_tokens;   /* that the index and the tiers have of the prompt, when all are there */
	bool by_parts;
	bool under_way;
};

void kv_fetch_init(struct kv_fetch *f);
/* The device page that is taken for page i of a fetch, or KV_NO_PAGE. */
int32_t kv_fetch_page(const struct kv_fetch *f, int32_t i);

/* Takes over the tiers, any of which may be NULL. They end with it. NOMEM: they have ended. */
enum status kv_tiers_create(struct kv_pool *pool, struct kv_prefix *prefix, struct kv_tier *const tier[KV_TIER_KINDS],
                            const struct clock *clock, struct kv_tiers **out);
/* Every fetch must have been cancelled. NULL is allowed. */
void kv_tiers_destroy(struct kv_tiers *t);
void kv_tiers_prefill_rate(struct kv_tiers *t, double tokens_per_s);

/*
 * Begins to bring what the tiers have of tokens[0..n) behind the pages that `seq` holds, which must be what the index
 * knows of them from the start (kv_prefix_hold()). Fetched pages join seq. At most max_pages are taken. by_parts: as
 * long as all of them come from tiers that know what they have, they come in parts, but for one in which the token
 * behind the last of these could have to be written. False when there is nothing to bring.
 */
bool kv_tiers_fetch(struct kv_tiers *t, struct kv_fetch *f, const struct kv_key *root, const int32_t *tokens, int32_t n,
                    const struct kv_seq *seq, int32_t max_pages, bool by_parts);
/* True while a fetch is under way for the same pages that kv_tiers_fetch() would bring. */
bool kv_tiers_comes(const struct kv_tiers *t, const struct kv_key *root, const int32_t *tokens, int32_t n,
                    const struct kv_seq *seq);
/*
 * Moves one fetch on: what has arrived joins the index and seq. True when it is over: everything is there that will
 * come. When seq has lost pages since the beginning it is over as well.
 */
bool kv_tiers_advance(struct kv_tiers *t, struct kv_fetch *f, struct kv_seq *seq, const struct kv_use *use);
/* Whether the first parts of all pages are there, and others are not: it may begin. */
bool kv_tiers_may_begin(const struct kv_fetch *f);
/*
 * Adds all pages to seq, which holds those in front of them, and has no more than `most` tokens then. The last page is
 * seq's own if it is not full. From now on kv_tiers_advance() is not called, until the fetch is over, by
 * kv_tiers_arrived(), or kv_tiers_retreat() was called. False, and nothing has happened: seq has other pages, or no
 * room for more.
 */
bool kv_tiers_begin(struct kv_tiers *t, struct kv_fetch *f, struct kv_seq *seq, int32_t most);
/*
 * Waits, at most until the system's clock reads until_ns, for the parts of the pages that have this layer, and those
 * before it; brings others as well. False: they are not there. For the last layer, the pages are whole.
 */
bool kv_tiers_wait(struct kv_tiers *t, struct kv_fetch *f, int32_t layer, int64_t until_ns);
/* All pages are whole, and are the sequence's alone: the fetch is over. */
void kv_tiers_arrived(struct kv_tiers *t, struct kv_fetch *f);
/* What kv_tiers_begin() added leaves seq; the fetch goes on, unless it is cancelled next. */
void kv_tiers_retreat(struct kv_tiers *t, const struct kv_fetch *f, struct kv_seq *seq);
/* Gives up what has not arrived. Nothing for a fetch that is not under way. */
void kv_tiers_cancel(struct kv_tiers *t, struct kv_fetch *f);

/* A page on its way to host memory; part of whoever wants it. */
enum kv_read_state { KV_READ_NONE, KV_READ_UNDER_WAY, KV_READ_DONE, KV_READ_FAILED };

struct kv_read {
	struct list link;
	uint64_t id;
	enum kv_tier_kind tier;
	enum kv_read_state state; /* kv_tiers_poll() moves it on */
	bool wide;                /* DONE: the image has a wide copy */
};

/* What a tier has under this key: fills name, without bytes. */
bool kv_tiers_find(const struct kv_tiers *t, const struct kv_key *key, struct kv_page_name *name);
/*
 * Begins to read a page's image (image.h) to host memory, which has room for the largest one and belongs to the read
 * while it is under way. NOT_FOUND; LIMIT: too much is under way.
 */
enum status kv_tiers_read(struct kv_tiers *t, struct kv_read *r, const struct kv_page_name *name, void *host);
/* Gives up a read that is under way; nothing for another. */
void kv_tiers_read_cancel(struct kv_tiers *t, struct kv_read *r);

/*
 * Pages that are no index's, in the tier in host memory alone, under keys of their owner (attic.h): they are kept
 * whether or not that pays, until others need the room. Bytes that the tier may have, 0: there is none; whether it
 * keeps a page, and still has it; whether it has copied one to the device; that it need not keep it any more.
 */
uint64_t kv_tiers_host_bytes(const struct kv_tiers *t);
bool kv_tiers_host_keep(struct kv_tiers *t, const struct kv_page_name *name, int32_t page);
bool kv_tiers_host_has(struct kv_tiers *t, const struct kv_page_name *name);
bool kv_tiers_host_bring(struct kv_tiers *t, const struct kv_page_name *name, int32_t page);
void kv_tiers_host_drop(struct kv_tiers *t, const struct kv_key *key);

/* A request ends, and has left these pages to the index: the disk is to have them. */
void kv_tiers_write_behind(struct kv_tiers *t, const struct kv_seq *seq);

/* Takes note of the transfers that have ended. Call it before kv_tiers_advance(). */
void kv_tiers_poll(struct kv_tiers *t);
/* There is something to do at once, without waiting for a transfer. */
bool kv_tiers_ready(const struct kv_tiers *t);
/* Transfers are under way. */
bool kv_tiers_busy(const struct kv_tiers *t);

/*
 * Writes the pages of `weak` that are still there to the disk tier, whatever they are worth, and waits for buffers, at
 * most until the clock reads deadline_ms. For the end of the process. How many are there now.
 */
int32_t kv_tiers_save(struct kv_tiers *t, const struct kv_weak *weak, int64_t deadline_ms);
/* Waits for what is being written, at most until deadline_ms. */
void kv_tiers_flush(struct kv_tiers *t, int64_t deadline_ms);
/* The nearest tier that has a page of this key, as far as is known without asking others; KV_TIER_KINDS: none has. */
enum kv_tier_kind kv_tiers_where(const struct kv_tiers *t, const struct kv_key *key);
void kv_tiers_stats(const struct kv_tiers *t, struct kv_tiers_stats *out);
