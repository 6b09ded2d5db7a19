/*
 * The inside of a tier: what every kind of tier begins with (tier.c), for tier_ram.c and tier_disk.c.
 *
 * An entry is a page the tier has, is writing, or is reading. Entries come from an array that is made with the tier, so
 * finding room for one cannot fail for want of memory.
 */
#pragma once

#include "engine/kv/evict.h"
#include "engine/kv/tier.h"

struct kv_tier_entry {
	struct kv_page_name page;
	int32_t hash_next;  /* or next free one */
	int32_t n_users;    /* transfers under way; an entry with users is not evicted */
	bool present;
	bool writing;
	bool wide;          /* it is stored with a wide copy */
	bool damaged;       /* a load has found it wrong: it goes with its last user, and is not found any more */
	enum kv_form form; /* RAM: of its bytes */
	int32_t at;         /* RAM: first unit; disk: the staging buffer it is written from */
};

enum { KV_WHOLE = -1 };

struct kv_tier_load {
	uint64_t ticket;
	int32_t entry;      /* EVICT_NONE: free */
	int32_t to;         /* device page, or KV_NO_PAGE: */
	int32_t part;       /* of the image, or KV_WHOLE */
	void *host;         /* where else its image goes, */
	bool *host_wide;    /* and whether it has a wide copy */
	int32_t staging;    /* disk: buffer, or EVICT_NONE while it waits for one */
	bool cancelled;     /* nobody waits for it */
	bool ended;
	enum kv_tier_end end;
};

struct kv_tier_ops {
	/*
	 * The page is not there, and has an entry, which is not idle: store it. Anything but STORED: the entry is taken
	 * back.
	 */
	enum kv_tier_put (*put)(struct kv_tier *t, int32_t entry, int32_t device_page);
	/* Whether put() would find what it needs besides an entry; NULL: it always does. */
	bool (*has_room)(struct kv_tier *t);
	/* In how many parts an entry can be loaded; NULL: as a whole only. */
	int32_t (*n_parts)(const struct kv_tier *t, int32_t entry);
	/* There is something for advance() though nothing is under way; NULL: there never is. */
	bool (*has_news)(const struct kv_tier *t);
	/* A page that has no entry may be there all the same: others put some. NULL: none is. */
	bool (*hopes)(struct kv_tier *t, const struct kv_key *key);
	/* Does a load at once; NULL: it takes time. */
	enum kv_tier_end (*load_now)(struct kv_tier *t, const struct kv_tier_load *l);
	/* Moves loads on; those that end are marked. */
	void (*advance)(struct kv_tier *t);
	/* Its entry is about to go. */
	void (*leave)(struct kv_tier *t, int32_t entry);
	/* Waits until there is something to advance; NULL: there always is. */
	void (*wait)(struct kv_tier *t, int64_t timeout_ms);
	void (*stats)(const struct kv_tier *t, struct kv_tier_stats *out);
	void (*destroy)(struct kv_tier *t);
};

struct kv_tier {
	const struct kv_tier_ops *ops;
	struct kv_tier_device device;
	enum kv_tier_pages pages;
	struct kv_order order;
	bool host_memory;               /* the device's is */
	const struct clock *clock;
	struct evict *evict;            /* its slots are entries */
	struct kv_tier_entry *entries;  /* [n_entries] */
	int32_t n_entries, first_free;
	int32_t *buckets;               /* [n_buckets] */
	size_t n_buckets;               /* a power of two */
	struct kv_tier_load loads[KV_TIER_MAX_LOADS];
	int32_t n_loads;                /* that are not free */
	bool hurry;                     /* writes have no bound any more */
	struct kv_tier_stats stats;
};

/* Fills a zeroed tier. On failure nothing is left. */
enum status kv_tier_init(struct kv_tier *t, const struct kv_tier_ops *ops, const struct kv_tier_device *device,
                         const struct clock *clock, int32_t n_entries, struct error *err);
void kv_tier_fini(struct kv_tier *t);
/* Bytes of host memory that n_entries take. */
uint64_t kv_tier_index_bytes(int32_t n_entries);

/* The entry with this key, or EVICT_NONE. */
int32_t kv_tier_lookup(const struct kv_tier *t, const struct kv_key *key);
/*
 * An entry for a page that has none, in use by its maker (n_users 1): the next free one, or `entry`, which is free.
 * After entries have been chosen, which is possible only before the first is not, kv_tier_list_free() finds out which
 * are left.
 */
int32_t kv_tier_enter(struct kv_tier *t, const struct kv_page_name *page, int32_t entry);
void kv_tier_list_free(struct kv_tier *t);
/* Counts a use of an entry, one more user, or one less. */
void kv_tier_touch(struct kv_tier *t, int32_t entry);
void kv_tier_hold(struct kv_tier *t, int32_t entry);
void kv_tier_release(struct kv_tier *t, int32_t entry);
/* Takes an entry out, which nobody uses; not for want of room. */
void kv_tier_forget(struct kv_tier *t, int32_t entry);
/* Takes out the entry that was touched longest ago; false when none can go. */
bool kv_tier_evict(struct kv_tier *t);
/* Copies the image of a device page to host memory. */
enum status kv_tier_read_page(struct kv_tier *t, int32_t page, bool wide, void *host);
/* Gives a load what it wants, of a whole image of which that is there; its end. */
enum kv_tier_end kv_tier_deliver(struct kv_tier *t, const struct kv_tier_load *l, bool wide, const void *image);
/* A load has ended and lets go of its entry. */
void kv_tier_end_load(struct kv_tier *t, struct kv_tier_load *l, enum kv_tier_end end);
/* Adds a sample to an average of bytes a second. */
void kv_tier_measure(double *bytes_per_s, uint64_t bytes, int64_t ns);
