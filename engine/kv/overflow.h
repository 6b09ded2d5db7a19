/*
 * Room below the device for conversations that are larger than the page pool: their first pages are kept here, and
 * attention reads them from here, layer by layer, so that a sequence may be many times as long as the pool and has the
 * same answer, only later.
 *
 * How it differs from the tiers (tiers.h). A tier is a cache: it may drop what it has, since that can be computed
 * again. What is here is the only copy of what a running request needs for each of its tokens. So room is reserved
 * before a request begins, nothing is dropped before the request ends, and nothing outlives the process. And a tier
 * gives back whole pages, while attention wants one layer of all pages at a time; so pages lie here by layer, in
 * groups: a group is a run of pages of one sequence, and a block one layer of a group.
 *
 * Down. When a sequence would have more pages in the pool than it may (kv_overflow_plan(): resident_pages), its next
 * group goes: it is copied and given back to the pool, where the prefix index may keep it as long as there is room, as
 * it does with pages that left a window. Pages of the open end are never among them.
 *
 * Up. Within a step, for each layer, the forward pass asks for the groups in their order (struct kv_far) and computes
 * attention over them part by part. What lies in host memory is read where it is, as one part. What lies on disk goes
 * through a few buffers, a block in each: while one is being read by attention the next ones, those of the next layer
 * at the end of one, are on their way. Nothing is cached beyond that: the disk is read once for each layer and step,
 * which is why prompts are computed in chunks as large as may be.
 *
 * Pages of a narrow pool bring their wide copies along (kv_wide of backend.h): those of the first page of a
 * conversation, and of pages with values that have no narrow form. There are few of them, so these are in memory
 * always, in slots of their own; when they run out a page goes without, and is counted.
 *
 * Groups are multiples of KV_PART_PAGES, so that a row has the same bits whether or not its sequence had to leave the
 * pool: what is computed of such a sequence is exact, and joins the prefix index like anything else.
 *
 * Disk. A file without a name, as large as it may become from the start, of mode 0600, read and written past the page
 * cache where the file system allows that. Its blocks are compared with their checksums, which are in memory. Two
 * threads move bytes; a write is behind the step that caused it, and its pages are read from the buffer until it is
 * done.
 *
 * Failure. A transfer that fails, is damaged, or takes longer than stall_ms ends the disk part for good, with one line
 * in the log. Sequences that have something there are lost (kv_spill.lost) and their requests fail with a sentence;
 * their rows of the step at hand mean nothing, those of others are what they were. What is in host memory goes on.
 *
 * Where it is possible: on devices that have attention_part(). Of a device whose memory is its own, what lies in host
 * memory is copied to it part by part, the next ones while it computes (backend.h, page_layers() and host_alloc()). One
 * thread, the device's worker, calls this.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/kv/seq.h"

struct kv_overflow;

/* How a pool of some size and what is below it are used. */
struct kv_overflow_plan {
	int32_t group_pages;
	int32_t resident_pages; /* that a sequence with far pages may have in the pool */
	int32_t step_rows;      /* that one step may compute of it */
	int32_t ram_groups, disk_groups;
	int32_t wide_slots;     /* narrow pools: copies that there is room for */
	size_t ram_bytes;       /* of the host's memory for all of it but the disk's buffers */
	uint64_t disk_bytes;    /* of the file */
	int32_t max_tokens;     /* of a sequence that has it all */
};

/*
 * ram_bytes are for groups and wide copies; where there are none, copies take memory of their own. INVALID: the pool is
 * too small for a conversation to pass through, or what is below it for one group; the sentence says how much it takes.
 */
enum status kv_overflow_plan(const struct kv_layout *layout, int32_t pool_pages, int32_t step_tokens,
                             uint64_t ram_bytes, uint64_t disk_bytes, struct kv_overflow_plan *out, struct error *err);
/* Groups that a sequence of so many tokens has to have here. */
int32_t kv_overflow_groups_for(const struct kv_overflow_plan *plan, int32_t n_tokens);

struct kv_overflow_options {
	uint64_t ram_bytes;
	const char *dir;     /* of the file; made with 0700 when it is missing. NULL: no disk */
	uint64_t disk_bytes;
	int32_t step_tokens;
	int64_t stall_ms;    /* 0: default */
};

/*
 * Takes memory and disk at once. UNSUPPORTED: not with this device. A disk that cannot be used is left
 * out, with a line in the log, unless nothing remains (IO). NOMEM, INVALID as the plan.
 */
enum status kv_overflow_create(struct backend *b, struct kv_pool *pool, const struct kv_overflow_options *o,
                               struct kv_overflow **out, struct error *err);
/* All sequences have been released. NULL is allowed. */
void kv_overflow_destroy(struct kv_overflow *o);
/* As it is now: without the disk when that has failed. */
const struct kv_overflow_plan *kv_overflow_now(const struct kv_overflow *o);

/* What one sequence has here; zeroed: nothing. Part of whoever has the sequence, and stays where it is in between. */
struct kv_spill {
	struct kv_far far;       /* for its part of a batch, while n_groups > 0 */
	struct kv_overflow *store;
	struct kv_spill_group {
		int32_t slot;    /* in memory or, behind those, on disk */
		int32_t rank;    /* disk: among those of this step */
	} *groups;               /* [n_groups], cap_groups of room */
	int32_t n_groups, cap_groups;
	int32_t n_reserved;      /* that it may have, n_groups among them */
	bool lost;               /* some of it cannot be had any more */
};

/* Makes sure that s may have n groups in all. False: there are not so many, now; nothing has changed. */
bool kv_overflow_reserve(struct kv_overflow *o, struct kv_spill *s, int32_t n);
/*
 * The next group of seq's pages, all full, leaves the pool; room for it is reserved. False when it could not be copied:
 * s is lost.
 */
bool kv_overflow_spill(struct kv_overflow *o, struct kv_spill *s, struct kv_seq *seq, struct kv_pool *pool);
/* Gives all back; s is empty then. */
void kv_overflow_release(struct kv_spill *s);
/* How many of its pages are in memory, and on disk. */
void kv_overflow_count(const struct kv_spill *s, int32_t *ram, int32_t *disk);
/* The step that begins reads these, in this order within each layer. */
void kv_overflow_step(struct kv_overflow *o, struct kv_spill *const *s, int32_t n);

struct kv_overflow_stats {
	uint64_t ram_bytes, disk_bytes;           /* taken */
	int32_t wide_slots, wide_used;            /* narrow pools */
	uint64_t wide_refused;                    /* pages that left without their copies */
	uint64_t ram_used_bytes, disk_used_bytes; /* by sequences */
	int32_t n_pages, n_sequences;             /* that are here */
	uint64_t pages_spilled, sequences_lost;   /* so far */
	uint64_t bytes_read, bytes_written;       /* of the disk */
	uint64_t waits;                           /* blocks that attention had to wait for */
	bool disk_off;
	const char *off_reason;                   /* "" or a static text */
};
void kv_overflow_stats(const struct kv_overflow *o, struct kv_overflow_stats *out);
