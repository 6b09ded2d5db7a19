#include <stdlib.h>
#include <string.h>

#include "engine/kv/tier_impl.h"

enum { NONE = EVICT_NONE };

/*
 * The order of going is plain lru: a tier sees neither prompts nor most uses, only what falls into it and what is
 * fetched from it, so there is nothing for a learned policy to learn from.
 */
static const char POLICY[] = "lru";

enum status kv_tier_init(struct kv_tier *t, const struct kv_tier_ops *ops, const struct kv_tier_device *device,
                         const struct clock *clock, int32_t n_entries, struct error *err)
{
	struct backend_info info;
	t->ops = ops;
	t->device = *device;
	t->clock = clock;
	t->n_entries = n_entries;
	t->n_buckets = 16;
	if (device->backend->ops->info) {
		device->backend->ops->info(device->backend, &info);
		t->order = info.kv_order;
		t->host_memory = info.host_memory;
	}
	while (t->n_buckets < (size_t)n_entries)
		t->n_buckets *= 2;
	t->entries = calloc((size_t)n_entries, sizeof *t->entries);
	t->buckets = malloc(t->n_buckets * sizeof *t->buckets);
	if (!t->entries || !t->buckets || evict_create(POLICY, n_entries, &t->evict, NULL) != STATUS_OK) {
		kv_tier_fini(t);
		return error_set(err, STATUS_NOMEM, "no memory for the index of a KV tier of %d pages", n_entries);
	}
	for (size_t i = 0; i < t->n_buckets; i++)
		t->buckets[i] = NONE;
	kv_tier_list_free(t);
	for (int32_t i = 0; i < KV_TIER_MAX_LOADS; i++)
		t->loads[i].entry = NONE;
	t->stats.max_pages = n_entries;
	t->stats.index_bytes = kv_tier_index_bytes(n_entries);
	t->stats.off_reason = t->stats.io = "";
	return STATUS_OK;
}

void kv_tier_fini(struct kv_tier *t)
{
	evict_destroy(t->evict);
	free(t->entries);
	free(t->buckets);
	t->evict = NULL;
	t->entries = NULL;
	t->buckets = NULL;
}

uint64_t kv_tier_index_bytes(int32_t n_entries)
{
	return (uint64_t)n_entries * (sizeof(struct kv_tier_entry) + 2 * sizeof(int32_t));
}

/* ---- Entries ---- */

static int32_t *bucket_of(const struct kv_tier *t, const struct kv_key *key)
{
	uint64_t h;
	memcpy(&h, key->bytes, sizeof h);
	return &t->buckets[h & (t->n_buckets - 1)];
}

int32_t kv_tier_lookup(const struct kv_tier *t, const struct kv_key *key)
{
	int32_t i = *bucket_of(t, key);
	while (i != NONE && memcmp(&t->entries[i].page.key, key, sizeof *key) != 0)
		i = t->entries[i].hash_next;
	return i;
}

static bool same_content(const struct kv_page_name *a, const struct kv_page_name *b)
{
	return a->n_tokens == b->n_tokens && memcmp(&a->parent, &b->parent, sizeof a->parent) == 0 &&
	       memcmp(a->tokens, b->tokens, (size_t)a->n_tokens * sizeof *a->tokens) == 0;
}

void kv_tier_list_free(struct kv_tier *t)
{
	t->first_free = NONE;
	for (int32_t i = t->n_entries - 1; i >= 0; i--) {
		if (t->entries[i].present)
			continue;
		t->entries[i].hash_next = t->first_free;
		t->first_free = i;
	}
}

int32_t kv_tier_enter(struct kv_tier *t, const struct kv_page_name *page, int32_t entry)
{
	if (entry == NONE) {
		entry = t->first_free;
		if (entry == NONE)
			return NONE;
		t->first_free = t->entries[entry].hash_next;
	}
	struct kv_tier_entry *e = &t->entries[entry];
	int32_t *bucket = bucket_of(t, &page->key);
	*e = (struct kv_tier_entry){.page = *page, .hash_next = *bucket, .n_users = 1, .present = true, .at = NONE};
	*bucket = entry;
	t->stats.n_pages++;
	kv_tier_touch(t, entry);
	return entry;
}

void kv_tier_touch(struct kv_tier *t, int32_t entry)
{
	struct evict_use use = {.parent = EVICT_NONE, .now_ms = clock_now_ms(t->clock)};
	memcpy(&use.key, t->entries[entry].page.key.bytes, sizeof use.key);
	evict_touch(t->evict, entry, &use);
}

void kv_tier_hold(struct kv_tier *t, int32_t entry)
{
	if (t->entries[entry].n_users++ == 0)
		evict_idle(t->evict, entry, false);
}

void kv_tier_release(struct kv_tier *t, int32_t entry)
{
	if (--t->entries[entry].n_users == 0)
		evict_idle(t->evict, entry, true);
}

static void unlink_entry(struct kv_tier *t, int32_t entry)
{
	struct kv_tier_entry *e = &t->entries[entry];
	int32_t *at = bucket_of(t, &e->page.key);
	while (*at != entry)
		at = &t->entries[*at].hash_next;
	*at = e->hash_next;
	if (t->ops->leave)
		t->ops->leave(t, entry);
	e->present = false;
	e->hash_next = t->first_free;
	t->first_free = entry;
	t->stats.n_pages--;
}

void kv_tier_forget(struct kv_tier *t, int32_t entry)
{
	evict_forget(t->evict, entry);
	unlink_entry(t, entry);
}

bool kv_tier_evict(struct kv_tier *t)
{
	int32_t entry = evict_victim(t->evict, clock_now_ms(t->clock));
	if (entry == NONE)
		return false;
	evict_remove(t->evict, entry, EVICT_FOR_PROMPT);
	unlink_entry(t, entry);
	t->stats.evicted++;
	return true;
}

/* ---- The device ---- */

enum status kv_tier_read_page(struct kv_tier *t, int32_t page, bool wide, void *host)
{
	return kv_image_read(&t->device, page, wide, host);
}

enum kv_tier_end kv_tier_deliver(struct kv_tier *t, const struct kv_tier_load *l, bool wide, const void *image)
{
	if (l->cancelled)
		return KV_LOAD_FAILED;
	if (l->to == KV_NO_PAGE) {
		memcpy(l->host, image, kv_image_bytes(&t->device.layout, wide));
		*l->host_wide = wide;
		return KV_LOAD_DONE;
	}
	enum status st;
	if (l->part == KV_WHOLE) {
		st = kv_image_write(&t->device, l->to, wide, image);
	} else {
		const struct kv_layout *layout = &t->device.layout;
		struct kv_image_part part = kv_image_part(layout, kv_image_n_parts(layout, wide), l->part);
		st = kv_image_write_bytes(&t->device, l->to, part.begin, part.end - part.begin,
		                          (const char *)image + part.begin);
	}
	return st == STATUS_OK ? KV_LOAD_DONE : KV_LOAD_FAILED;
}

void kv_tier_measure(double *bytes_per_s, uint64_t bytes, int64_t ns)
{
	if (ns < 1)
		ns = 1;
	double now = (double)bytes / ((double)ns * 1e-9);
	/* Averages times, not rates: one slow transfer among many quick ones counts as long as it took. */
	*bytes_per_s = *bytes_per_s > 0 ? 1 / (0.9 / *bytes_per_s + 0.1 / now) : now;
}

/* ---- The interface ---- */

bool kv_tier_takes(const struct kv_tier *t, int32_t device_page)
{
	bool wide = kv_image_is_wide(&t->device.layout, device_page);
	return t->pages == KV_TIER_ALL || wide == (t->pages == KV_TIER_WIDE);
}

enum kv_tier_put kv_tier_put(struct kv_tier *t, const struct kv_page_name *page, int32_t from)
{
	enum kv_tier_put put = KV_PUT_OFF;
	int32_t entry = t->stats.off ? NONE : kv_tier_lookup(t, &page->key);
	if (t->stats.off)
		goto out;
	if (entry != NONE && t->entries[entry].damaged) {
		put = KV_PUT_BUSY;
		goto out;
	}
	if (entry != NONE) {
		put = same_content(&t->entries[entry].page, page) ? KV_PUT_PRESENT : KV_PUT_FAILED;
		if (put == KV_PUT_PRESENT)
			kv_tier_touch(t, entry);
		goto out;
	}
	put = KV_PUT_FULL;
	entry = kv_tier_enter(t, page, NONE);
	if (entry == NONE && kv_tier_evict(t))
		entry = kv_tier_enter(t, page, NONE);
	if (entry == NONE)
		goto out;
	put = t->ops->put(t, entry, from);
	if (put != KV_PUT_STORED)
		kv_tier_forget(t, entry);
out:
	t->stats.put[put]++;
	return put;
}

bool kv_tier_has_room(struct kv_tier *t)
{
	return !t->stats.off && (!t->ops->has_room || t->ops->has_room(t));
}

/* The entry whose content is the page's. */
static int32_t find(const struct kv_tier *t, const struct kv_page_name *page)
{
	int32_t entry = t->stats.off ? NONE : kv_tier_lookup(t, &page->key);
	if (entry == NONE || t->entries[entry].damaged || !same_content(&t->entries[entry].page, page))
		return NONE;
	return entry;
}

bool kv_tier_has(struct kv_tier *t, const struct kv_page_name *page)
{
	return find(t, page) != NONE;
}

bool kv_tier_may_have(struct kv_tier *t, const struct kv_page_name *page)
{
	if (t->stats.off)
		return false;
	return find(t, page) != NONE || (t->ops->hopes && t->ops->hopes(t, &page->key));
}

bool kv_tier_find(struct kv_tier *t, const struct kv_key *key, struct kv_page_name *page)
{
	int32_t entry = t->stats.off ? NONE : kv_tier_lookup(t, key);
	if (entry == NONE || t->entries[entry].damaged)
		return false;
	*page = t->entries[entry].page;
	return true;
}

static enum status begin_load(struct kv_tier *t, const struct kv_page_name *page, const struct kv_tier_load *what)
{
	int32_t entry = find(t, page);
	struct kv_tier_load *l = t->loads;
	bool hoped = entry == NONE && !t->stats.off && t->ops->hopes && kv_tier_lookup(t, &page->key) == NONE;
	if (entry == NONE && !hoped)
		return STATUS_NOT_FOUND;
	if (t->n_loads == KV_TIER_MAX_LOADS)
		return STATUS_LIMIT;
	if (hoped) {
		entry = kv_tier_enter(t, page, NONE);
		if (entry == NONE && kv_tier_evict(t))
			entry = kv_tier_enter(t, page, NONE);
		if (entry == NONE)
			return STATUS_LIMIT;
		kv_tier_release(t, entry); /* the load is its user */
	}
	while (l->entry != NONE)
		l++;
	*l = *what;
	l->entry = entry;
	l->staging = NONE;
	t->n_loads++;
	t->stats.n_loading++;
	kv_tier_touch(t, entry);
	kv_tier_hold(t, entry);
	return STATUS_OK;
}

enum status kv_tier_load(struct kv_tier *t, const struct kv_page_name *page, int32_t to, uint64_t ticket)
{
	return begin_load(t, page, &(struct kv_tier_load){.ticket = ticket, .to = to, .part = KV_WHOLE});
}

int32_t kv_tier_n_parts(struct kv_tier *t, const struct kv_page_name *page)
{
	int32_t entry = find(t, page);
	return entry != NONE && t->ops->n_parts ? t->ops->n_parts(t, entry) : 1;
}

enum status kv_tier_load_part(struct kv_tier *t, const struct kv_page_name *page, int32_t part, int32_t to,
                              uint64_t ticket)
{
	return begin_load(t, page, &(struct kv_tier_load){.ticket = ticket, .to = to, .part = part});
}

bool kv_tier_bring(struct kv_tier *t, const struct kv_page_name *page, int32_t to)
{
	int32_t entry = find(t, page);
	if (entry == NONE || !t->ops->load_now)
		return false;
	kv_tier_touch(t, entry);
	enum kv_tier_end end = t->ops->load_now(t, &(struct kv_tier_load){.entry = entry, .part = KV_WHOLE, .to = to});
	t->stats.loads[end]++;
	return end == KV_LOAD_DONE;
}

enum status kv_tier_read(struct kv_tier *t, const struct kv_page_name *page, void *host, bool *wide, uint64_t ticket)
{
	const struct kv_tier_load what = {
	        .ticket = ticket, .to = KV_NO_PAGE, .part = KV_WHOLE, .host = host, .host_wide = wide};
	return begin_load(t, page, &what);
}

void kv_tier_end_load(struct kv_tier *t, struct kv_tier_load *l, enum kv_tier_end end)
{
	struct kv_tier_entry *e = &t->entries[l->entry];
	e->damaged = e->damaged || end == KV_LOAD_CORRUPT;
	kv_tier_release(t, l->entry);
	if (e->damaged && e->n_users == 0)
		kv_tier_forget(t, l->entry);
	l->ended = true;
	l->end = end;
	if (!l->cancelled)
		return;
	l->entry = NONE;
	t->n_loads--;
}

void kv_tier_cancel(struct kv_tier *t, uint64_t ticket)
{
	for (int i = 0; i < KV_TIER_MAX_LOADS; i++) {
		struct kv_tier_load *l = &t->loads[i];
		if (l->entry == NONE || l->ticket != ticket || l->cancelled)
			continue;
		l->cancelled = true;
		t->stats.n_loading--;
		t->stats.cancelled++;
		if (l->ended) {
			l->entry = NONE;
			t->n_loads--;
		}
		return;
	}
}

int32_t kv_tier_poll(struct kv_tier *t, struct kv_tier_done *done, int32_t max)
{
	int32_t n = 0;
	t->ops->advance(t);
	for (int i = 0; i < KV_TIER_MAX_LOADS && n < max; i++) {
		struct kv_tier_load *l = &t->loads[i];
		if (l->entry == NONE || !l->ended)
			continue;
		done[n++] = (struct kv_tier_done){l->ticket, l->end};
		t->stats.loads[l->end]++;
		t->stats.n_loading--;
		t->n_loads--;
		l->entry = NONE;
	}
	return n;
}

void kv_tier_wait(struct kv_tier *t, int64_t timeout_ms)
{
	if (t->ops->wait)
		t->ops->wait(t, timeout_ms);
}

void kv_tier_hurry(struct kv_tier *t)
{
	t->hurry = true;
}

bool kv_tier_quiet(const struct kv_tier *t)
{
	return t->n_loads == 0 && t->stats.n_writing == 0 && !(t->ops->has_news && t->ops->has_news(t));
}

bool kv_tier_drop(struct kv_tier *t, const struct kv_key *key)
{
	int32_t entry = kv_tier_lookup(t, key);
	if (entry == NONE || t->entries[entry].n_users > 0)
		return false;
	kv_tier_forget(t, entry);
	return true;
}

void kv_tier_stats(const struct kv_tier *t, struct kv_tier_stats *out)
{
	*out = t->stats;
	if (t->ops->stats)
		t->ops->stats(t, out);
}

void kv_tier_destroy(struct kv_tier *t)
{
	if (t)
		t->ops->destroy(t);
}

const char *kv_tier_scheme(enum kv_form type)
{
	static const char *const schemes[KV_N_FORMS] = {
		[KV_FORM_F16] = "", [KV_FORM_FP8_E4M3] = "+fp8_e4m3 tier", [KV_FORM_INT8] = "+int8 tier"};
	return schemes[type];
}
