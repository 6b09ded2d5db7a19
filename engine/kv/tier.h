/*
 * A tier: pages of KV that have left the device, found by what they were computed from. Mechanism only: what goes into
 * a tier, and whether a page is worth bringing back, is decided elsewhere.
 *
 * A page is known by its chain key (prefix.h), which binds the model, the layout, the tenant's salt and all tokens
 * before it. On a hit its own tokens and its predecessor's key are compared as well. Pages come from the end of a
 * chain, since the device evicts leaves first; so a tier keeps no tree: the page that was touched longest ago goes
 * first, which is the end of a chain as long as it is put again, from its end, whenever the device evicts it.
 *
 * Three kinds: memory (tier_ram.c), which may keep pages in a narrower type, files (tier_disk.c), and a server that
 * others use as well (tier_remote.c). A tier never fails a request: what it cannot take it drops, what it cannot give
 * it does not have, and each is counted by its reason.
 *
 * Nothing here waits. kv_tier_put() copies the page before it returns; a load is under way until kv_tier_poll() reports
 * it.
 *
 * One thread, the device's worker, uses a tier. It and its device must outlive the tier.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/base/clock.h"
#include "engine/kv/image.h"
#include "engine/kv/prefix.h"
#include "engine/kv/tier_codec.h"

struct kv_tier;

/*
 * Which pages of a narrow pool a tier keeps. Those with a wide copy take about three times the room (image.h); files
 * have slots of one size, so they have files of their own.
 */
enum kv_tier_pages { KV_TIER_ALL, KV_TIER_NARROW, KV_TIER_WIDE };

/* What became of a page that was offered. */
enum kv_tier_put {
	KV_PUT_STORED,
	KV_PUT_PRESENT, /* it was there already */
	/* The others were dropped: */
	KV_PUT_OFF,     /* the tier is off */
	KV_PUT_BUSY,    /* every staging buffer is in use */
	KV_PUT_RATE,    /* more writes than are allowed in a second */
	KV_PUT_FULL,    /* all that is there is being read or written */
	KV_PUT_FAILED,  /* the device did not give it, or its key has other content */
	KV_PUT_N
};

/* How a load ended. */
enum kv_tier_end {
	KV_LOAD_DONE,    /* the page is in its place */
	KV_LOAD_FAILED,  /* the tier went off, or the device failed */
	KV_LOAD_ABSENT,  /* it might have been there, and is not */
	KV_LOAD_CORRUPT, /* what was stored is not what was put; the page has left the tier */
	KV_LOAD_N
};

struct kv_tier_done {
	uint64_t ticket;
	enum kv_tier_end end;
};

enum { KV_TIER_MAX_LOADS = 64 }; /* under way in one tier */

struct kv_tier_stats {
	const char *kind; /* "ram", "disk", "disk-wide", "remote" */
	const char *type; /* of its pages' elements: "f16", "int8", "fp8_e4m3" */
	const char *io;   /* disk: "io_uring" or "threads"; else "" */
	bool off;
	const char *off_reason; /* "" or a static text */
	uint64_t reconnects;    /* how often it came back */
	uint64_t cap_bytes;     /* memory or file bytes it may take, headers included */
	uint64_t used_bytes;    /* of these, by pages */
	uint64_t index_bytes;   /* host memory for finding them, beside the cap */
	int32_t n_pages, max_pages;
	int32_t n_writing, n_loading;
	uint64_t put[KV_PUT_N], loads[KV_LOAD_N], cancelled;
	uint64_t evicted;
	/*
	 * RAM: pages put that stayed wide because they are sinks, or tails, or hold values that the narrow type cannot.
	 */
	uint64_t wide_sinks, wide_tails, wide_values;
	uint64_t bytes_written, bytes_read;
	/* Measured, and kept up to date; 0: not known yet. */
	double read_bytes_per_s, write_bytes_per_s;
};

/*
 * A tier in `bytes` of host memory, which it takes at once and never exceeds. Of another type than f16 it is lossy: its
 * pages must be indexed under roots of their own (see kv_tier_scheme()). NOMEM; INVALID when not even one page fits.
 */
enum status kv_tier_ram_create(const struct kv_tier_device *device, const struct clock *clock, uint64_t bytes,
                               enum kv_form type, struct kv_tier **out, struct error *err);

struct kv_io; /* tier_io.h */

struct kv_tier_disk_options {
	const char *dir;               /* made with 0700 when it is missing */
	uint64_t bytes;                /* of all files together */
	enum kv_tier_pages pages;
	uint64_t write_bytes_per_s;    /* 0: no bound */
	struct kv_key identity;        /* of all that KV depends on but the salt; the files of another are refused */
	const char *version, *host;    /* likewise; borrowed during the call */
	int32_t n_staging;             /* buffers of a page each; 0: default */
	int64_t stall_ms;              /* a transfer that takes longer turns the tier off; 0: default */
	/* transfers; owned by the tier from now on, also on failure. NULL: the best there is */
	struct kv_io *io;
	/* from the tier's thread, when kv_tier_poll() would report something; may be NULL */
	void (*wake)(void *arg);
	void *wake_arg;
};

/*
 * A tier in a few preallocated files. Their pages are found again if their headers agree with `identity`, version, host
 * and geometry; else they are made anew, with one log line. IO and LIMIT (the disk's, another process uses the
 * directory), NOMEM, INVALID when not even one page fits.
 */
enum status kv_tier_disk_create(const struct kv_tier_device *device, const struct clock *clock,
                                const struct kv_tier_disk_options *o, struct kv_tier **out, struct error *err);
struct kv_tier_remote_options {
	const char *address;           /* HOST:PORT, or the path of a socket */
	const char *secret;            /* all daemons that share pages have it; "" is one, too, and proves nothing */
	int64_t timeout_ms;            /* of a transfer, connecting included; 0: default */
	void (*wake)(void *arg);       /* as in kv_tier_disk_options */
	void *wake_arg;
};

/* What can be told of an address without asking it: INVALID, or UNSUPPORTED in a build without hiredis. */
enum status kv_tier_remote_check(const char *address, struct error *err);

/*
 * A tier in the memory of a Valkey or Redis server, under chain keys, which say all that a page depends on: so daemons
 * of one model share pages, and those of others never meet. Each value ends in an HMAC under the secret. UNSUPPORTED in
 * a build without hiredis; INVALID; NOMEM. A server that does not answer is tried again, now and then: until then the
 * tier is off.
 */
enum status kv_tier_remote_create(const struct kv_tier_device *device, const struct clock *clock,
                                  const struct kv_tier_remote_options *o, struct kv_tier **out, struct error *err);
/* Drops loads under way; waits for writes. NULL is allowed. */
void kv_tier_destroy(struct kv_tier *t);

/* Whether it keeps pages like this one. */
bool kv_tier_takes(const struct kv_tier *t, int32_t device_page);
/* Stores a device page that it takes. It is copied when this returns. */
enum kv_tier_put kv_tier_put(struct kv_tier *t, const struct kv_page_name *page, int32_t device_page);
/* Whether a page that it does not have would be stored, for all that is known beforehand. */
bool kv_tier_has_room(struct kv_tier *t);
/* Whether the tier has it now, its content compared; not a use. */
bool kv_tier_has(struct kv_tier *t, const struct kv_page_name *page);
/* Whether it has the page or, where others use it as well, may have it: a load of it finds out. */
bool kv_tier_may_have(struct kv_tier *t, const struct kv_page_name *page);
/* What it has under this key: fills page, without bytes. False: nothing. */
bool kv_tier_find(struct kv_tier *t, const struct kv_key *key, struct kv_page_name *page);
/*
 * Begins to bring a page to device page `to`, which belongs to the tier until kv_tier_poll() reports the ticket (any
 * number that no other load under way has) or kv_tier_cancel() is called. A use. NOT_FOUND; LIMIT: too many loads are
 * under way.
 */
enum status kv_tier_load(struct kv_tier *t, const struct kv_page_name *page, int32_t to, uint64_t ticket);
/*
 * In how many parts (image.h) it can bring the page, which it has: then kv_tier_load_part() brings each by itself. What
 * has arrived of it is good whatever becomes of the others. 1: only as a whole.
 */
int32_t kv_tier_n_parts(struct kv_tier *t, const struct kv_page_name *page);
enum status kv_tier_load_part(struct kv_tier *t, const struct kv_page_name *page, int32_t part, int32_t to,
                              uint64_t ticket);
/* The same at once, where the tier can (host memory): whether the page is there now. A use. */
bool kv_tier_bring(struct kv_tier *t, const struct kv_page_name *page, int32_t to);
/*
 * The same to host memory, which has room for any image (image.h); what there is of the page, *wide says once it is
 * reported as done.
 */
enum status kv_tier_read(struct kv_tier *t, const struct kv_page_name *page, void *host, bool *wide, uint64_t ticket);
/* Forgets a load: its page is the caller's again, and is not reported. Unknown tickets are ignored. */
void kv_tier_cancel(struct kv_tier *t, uint64_t ticket);
/* Moves what is under way on, and reports up to max loads that ended. */
int32_t kv_tier_poll(struct kv_tier *t, struct kv_tier_done *done, int32_t max);
/* Waits until kv_tier_poll() has something to move on, or for timeout_ms; for drains and tests. */
void kv_tier_wait(struct kv_tier *t, int64_t timeout_ms);
/* The bound on writes no longer holds: the process is about to end. */
void kv_tier_hurry(struct kv_tier *t);
/* Nothing is being written or loaded, and kv_tier_poll() would find nothing new. */
bool kv_tier_quiet(const struct kv_tier *t);
/* Forgets a page that nobody reads; false when it is not there or in use. */
bool kv_tier_drop(struct kv_tier *t, const struct kv_key *key);
void kv_tier_stats(const struct kv_tier *t, struct kv_tier_stats *out);

/*
 * What to append to a root's scheme (struct kv_root) where KV may have gone through a tier of this type: "" for exact
 * ones. All KV of a daemon with a lossy tier lies under such roots, so neither its pages nor its files nor its exports
 * are ever taken for exact ones.
 */
const char *kv_tier_scheme(enum kv_form type);
