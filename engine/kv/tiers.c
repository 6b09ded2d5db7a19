#include "engine/kv/tiers.h"

#include <stdlib.h>

enum {
	/* A tier that does not pay is tried with so many pages, so often. */
	TRIAL_PAGES = 2,
	TRIAL_MS = 30000,
	MAX_FETCH_PAGES = 1 << 16,
	DONE_BATCH = 64,
	WAIT_MS = 2, /* before a step that waits looks again, in case that nobody woke it */
	/* Pages that wait to be written behind; when there are more, the oldest wait for their eviction instead. */
	BEHIND = 8192,
};

struct kv_fetch_page {
	struct kv_page_name name;
	enum kv_tier_kind tier;
	int32_t n_parts;     /* in which it comes */
	uint8_t asked, here; /* one bit for each part */
	bool failed;
	int32_t page; /* of the device, or KV_NO_PAGE */
};
_Static_assert(KV_IMAGE_PARTS <= 8, "parts are bits of a byte");

struct kv_tiers {
	struct kv_pool *pool;
	struct kv_prefix *prefix;
	const struct clock *clock;
	struct kv_tier *tier[KV_TIER_KINDS]; /* or NULL */
	int64_t trial_ms[KV_TIER_KINDS];     /* of the last trial's beginning */
	int32_t trial_left[KV_TIER_KINDS];
	struct kv_weak_page *behind;         /* [BEHIND] a ring; NULL without a disk */
	uint64_t first_behind, n_behind;
	struct list fetches, reads;
	uint64_t last_id; /* of both */
	struct kv_tiers_stats stats;
};

static struct kv_holder holder_of(const struct kv_fetch *f)
{
	return (struct kv_holder){KV_HOLDER_COPY, f->id};
}

void kv_fetch_init(struct kv_fetch *f)
{
	*f = (struct kv_fetch){0};
	list_init(&f->link);
}

int32_t kv_fetch_page(const struct kv_fetch *f, int32_t i)
{
	return f->pages[i].page;
}

/* ---- What pays ---- */

static bool pays(const struct kv_tiers *t, enum kv_tier_kind kind)
{
	struct kv_tier_stats s;
	double prefill = t->stats.prefill_tokens_per_s;
	kv_tier_stats(t->tier[kind], &s);
	if (s.read_bytes_per_s <= 0 || prefill <= 0)
		return true;
	return (double)kv_pool_layout(t->pool)->page_bytes / s.read_bytes_per_s < KV_PAGE_TOKENS / prefill;
}

/* Whether a page may go to or come from a tier: it pays, or it is time for a trial. */
static bool may_use(struct kv_tiers *t, enum kv_tier_kind kind)
{
	int64_t now = clock_now_ms(t->clock);
	if (!t->tier[kind])
		return false;
	if (pays(t, kind))
		return true;
	if (now - t->trial_ms[kind] >= TRIAL_MS) {
		t->trial_ms[kind] = now;
		t->trial_left[kind] = TRIAL_PAGES;
	}
	return t->trial_left[kind] > 0 && t->trial_left[kind]-- > 0;
}

void kv_tiers_prefill_rate(struct kv_tiers *t, double tokens_per_s)
{
	t->stats.prefill_tokens_per_s = tokens_per_s;
}

/* ---- Down ---- */

/*
 * A page goes to every tier at once, rather than from one to the next: the disk gets exact bytes where the RAM tier
 * keeps narrow ones, and neither waits for the other.
 */
static void leaving(void *arg, int32_t page, const struct kv_page_name *name)
{
	struct kv_tiers *t = arg;
	for (int kind = 0; kind < KV_TIER_KINDS; kind++) {
		if (!t->tier[kind] || !kv_tier_takes(t->tier[kind], page))
			continue;
		if (may_use(t, (enum kv_tier_kind)kind))
			kv_tier_put(t->tier[kind], name, page);
		else
			t->stats.unpaid[kind]++;
	}
}

uint64_t kv_tiers_host_bytes(const struct kv_tiers *t)
{
	struct kv_tier_stats s;
	if (!t->tier[KV_TIER_RAM])
		return 0;
	kv_tier_stats(t->tier[KV_TIER_RAM], &s);
	return s.cap_bytes;
}

bool kv_tiers_host_keep(struct kv_tiers *t, const struct kv_page_name *name, int32_t page)
{
	if (!t->tier[KV_TIER_RAM] || !kv_tier_takes(t->tier[KV_TIER_RAM], page))
		return false;
	enum kv_tier_put put = kv_tier_put(t->tier[KV_TIER_RAM], name, page);
	return put == KV_PUT_STORED || put == KV_PUT_PRESENT;
}

bool kv_tiers_host_has(struct kv_tiers *t, const struct kv_page_name *name)
{
	return t->tier[KV_TIER_RAM] && kv_tier_has(t->tier[KV_TIER_RAM], name);
}

bool kv_tiers_host_bring(struct kv_tiers *t, const struct kv_page_name *name, int32_t page)
{
	return t->tier[KV_TIER_RAM] && kv_tier_bring(t->tier[KV_TIER_RAM], name, page);
}

void kv_tiers_host_drop(struct kv_tiers *t, const struct kv_key *key)
{
	if (t->tier[KV_TIER_RAM])
		kv_tier_drop(t->tier[KV_TIER_RAM], key);
}

void kv_tiers_write_behind(struct kv_tiers *t, const struct kv_seq *seq)
{
	for (int32_t i = seq->n_gone; t->behind && i < seq->n_pages; i++) {
		uint64_t serial = kv_prefix_serial(t->prefix, seq->pages[i]);
		if (serial == 0)
			continue;
		if (t->n_behind == BEHIND) {
			t->first_behind++;
			t->n_behind--;
		}
		t->behind[(t->first_behind + t->n_behind++) % BEHIND] = (struct kv_weak_page){seq->pages[i], serial};
	}
}

/* Those that are written behind. */
static bool is_behind(const struct kv_tiers *t, int kind)
{
	struct kv_tier_stats s;
	if (kind == KV_TIER_RAM || !t->tier[kind])
		return false;
	kv_tier_stats(t->tier[kind], &s);
	return !s.off;
}

static bool can_write_behind(const struct kv_tiers *t)
{
	bool can = false;
	for (int kind = 0; kind < KV_TIER_KINDS && t->n_behind > 0; kind++) {
		if (!is_behind(t, kind))
			continue;
		if (!kv_tier_has_room(t->tier[kind]))
			return false;
		can = true;
	}
	return can;
}

static void write_behind(struct kv_tiers *t)
{
	struct kv_page_name name;
	while (can_write_behind(t)) {
		struct kv_weak_page w = t->behind[t->first_behind++ % BEHIND];
		t->n_behind--;
		if (kv_prefix_serial(t->prefix, w.page) != w.serial || !kv_prefix_name(t->prefix, w.page, &name))
			continue;
		for (int kind = 0; kind < KV_TIER_KINDS; kind++) {
			if (!is_behind(t, kind) || !kv_tier_takes(t->tier[kind], w.page) ||
			    kv_tier_has(t->tier[kind], &name))
				continue;
			if (may_use(t, (enum kv_tier_kind)kind))
				kv_tier_put(t->tier[kind], &name, w.page);
			else
				t->stats.unpaid[kind]++;
		}
	}
}

/* ---- Up ---- */

/* The nearest tier that has the page; the remote one may only be hoped to. */
static bool may_be_in_tiers(const struct kv_tiers *t, const struct kv_page_name *name, enum kv_tier_kind *kind)
{
	for (int k = 0; k < KV_TIER_KINDS; k++) {
		if (t->tier[k] && kv_tier_may_have(t->tier[k], name)) {
			*kind = (enum kv_tier_kind)k;
			return true;
		}
	}
	return false;
}

static bool in_tiers(const struct kv_tiers *t, const struct kv_page_name *name, enum kv_tier_kind *kind)
{
	for (int k = 0; k < KV_TIER_KINDS; k++) {
		if (t->tier[k] && kv_tier_has(t->tier[k], name)) {
			*kind = (enum kv_tier_kind)k;
			return true;
		}
	}
	return false;
}

/* The name of the full page behind `before` that holds these tokens. */
static struct kv_page_name name_of(const struct kv_key *before, const int32_t *tokens, bool first)
{
	struct kv_page_name name = {.n_tokens = KV_PAGE_TOKENS, .first = first};
	kv_key_next(before, tokens, &name.key);
	if (!first)
		name.parent = *before;
	memcpy(name.tokens, tokens, sizeof name.tokens);
	return name;
}

/* The key of the last full page that seq holds, or of the root. False when that page has left the index. */
static bool last_key(const struct kv_tiers *t, const struct kv_key *root, const struct kv_seq *seq, struct kv_key *out)
{
	struct kv_page_name name;
	*out = *root;
	if (seq->n_pages == 0)
		return true;
	if (!kv_prefix_name(t->prefix, seq->pages[seq->n_pages - 1], &name) || name.n_tokens < KV_PAGE_TOKENS)
		return false;
	*out = name.key;
	return true;
}

bool kv_tiers_comes(const struct kv_tiers *t, const struct kv_key *root, const int32_t *tokens, int32_t n,
                    const struct kv_seq *seq)
{
	struct kv_key key;
	int32_t at = seq->n_pages;
	if (list_empty(&t->fetches) || (at + 1) * KV_PAGE_TOKENS > n || !last_key(t, root, seq, &key))
		return false;
	struct kv_page_name name = name_of(&key, tokens + at * KV_PAGE_TOKENS, at == 0);
	list_each(l, next, (struct list *)&t->fetches) {
		const struct kv_fetch *f = list_entry(l, struct kv_fetch, link);
		for (int32_t i = f->next_adopt; i < f->n; i++) {
			if (memcmp(&f->pages[i].name.key, &name.key, sizeof name.key) == 0)
				return true;
		}
	}
	return false;
}

static bool is_whole(const struct kv_fetch_page *p)
{
	return p->here == (1u << p->n_parts) - 1;
}

/* Adds a page to the fetch; false without memory. */
static bool want(struct kv_fetch *f, const struct kv_page_name *name, enum kv_tier_kind kind)
{
	if ((f->n & (f->n - 1)) == 0) {
		struct kv_fetch_page *pages = realloc(f->pages, (size_t)(f->n ? f->n * 2 : 1) * sizeof *pages);
		if (!pages)
			return false;
		f->pages = pages;
	}
	f->pages[f->n++] = (struct kv_fetch_page){.name = *name, .tier = kind, .n_parts = 1, .page = KV_NO_PAGE};
	return true;
}

/*
 * The tail that a conversation left behind these full pages. A tier knows it only by its key, which binds its tokens:
 * so each possible length is asked for, the longest first.
 */
static void want_tail(struct kv_tiers *t, struct kv_fetch *f, const struct kv_key *before, const int32_t *tokens,
                      int32_t n)
{
	enum kv_tier_kind kind;
	for (int32_t k = n < KV_PAGE_TOKENS ? n : KV_PAGE_TOKENS - 1; k > 0; k--) {
		struct kv_page_name name = {.parent = *before, .n_tokens = k};
		kv_key_tail(before, tokens, k, &name.key);
		memcpy(name.tokens, tokens, (size_t)k * sizeof *tokens);
		if (!in_tiers(t, &name, &kind))
			continue;
		if (may_use(t, kind) && want(f, &name, kind))
			f->n_tokens += k;
		return;
	}
}

/* Whether its pages come in parts, and in how many each. */
static void choose_parts(struct kv_tiers *t, struct kv_fetch *f, int32_t n_tokens)
{
	for (int32_t i = 0; i < f->n; i++) {
		struct kv_fetch_page *p = &f->pages[i];
		f->by_parts = f->by_parts && p->tier != KV_TIER_REMOTE;
		/* The token behind it may have its place in it. */
		if (p->name.n_tokens == KV_PAGE_TOKENS && (f->first + i + 1) * KV_PAGE_TOKENS < n_tokens)
			p->n_parts = kv_tier_n_parts(t->tier[p->tier], &p->name);
	}
	for (int32_t i = 0; i < f->n && !f->by_parts; i++)
		f->pages[i].n_parts = 1;
}

bool kv_tiers_fetch(struct kv_tiers *t, struct kv_fetch *f, const struct kv_key *root, const int32_t *tokens, int32_t n,
                    const struct kv_seq *seq, int32_t max_pages, bool by_parts)
{
	struct kv_key key;
	enum kv_tier_kind kind;
	int32_t at = seq->n_pages;
	if (max_pages > MAX_FETCH_PAGES)
		max_pages = MAX_FETCH_PAGES;
	f->n = 0;
	f->remote_has = false;
	if (!last_key(t, root, seq, &key))
		return false;
	for (; (at + 1) * KV_PAGE_TOKENS <= n && f->n < max_pages; at++) {
		struct kv_page_name name = name_of(&key, tokens + at * KV_PAGE_TOKENS, at == 0);
		if (!may_be_in_tiers(t, &name, &kind) || !may_use(t, kind) || !want(f, &name, kind))
			break;
		key = name.key;
	}
	f->n_tokens = at * KV_PAGE_TOKENS;
	if (at > 0 && at * KV_PAGE_TOKENS < n && f->n < max_pages)
		want_tail(t, f, &key, tokens + at * KV_PAGE_TOKENS, n - at * KV_PAGE_TOKENS);
	if (f->n == 0) {
		free(f->pages);
		f->pages = NULL;
		return false;
	}
	f->id = ++t->last_id;
	f->first = seq->n_pages;
	f->by_parts = by_parts;
	choose_parts(t, f, n);
	f->next_part = f->next_load = f->next_adopt = 0;
	f->under_way = true;
	list_push_back(&t->fetches, &f->link);
	t->stats.fetches++;
	t->stats.n_fetching++;
	return true;
}

/* A ticket names the fetch, the page in it, and the part of that; or a read, which has one page. */
static uint64_t ticket_of(uint64_t id, int32_t i, int32_t part)
{
	return (id * MAX_FETCH_PAGES + (uint64_t)i) * KV_IMAGE_PARTS + (uint64_t)part;
}

/* Gives back the pages from `from` on, and wants no more of them. */
static void cut(struct kv_tiers *t, struct kv_fetch *f, int32_t from)
{
	for (int32_t i = from; i < f->n; i++) {
		struct kv_fetch_page *p = &f->pages[i];
		for (int32_t part = 0; part < p->n_parts; part++) {
			if (p->asked & ~p->here & 1u << part)
				kv_tier_cancel(t->tier[p->tier], ticket_of(f->id, i, part));
		}
		if (p->page != KV_NO_PAGE)
			kv_pool_unref(t->pool, p->page, holder_of(f));
	}
	f->n = from;
}

static void end(struct kv_tiers *t, struct kv_fetch *f)
{
	free(f->pages);
	list_remove(&f->link);
	f->pages = NULL;
	f->n = 0;
	f->under_way = false;
	t->stats.n_fetching--;
}

void kv_tiers_cancel(struct kv_tiers *t, struct kv_fetch *f)
{
	if (!f->under_way)
		return;
	t->stats.fetches_cancelled++;
	cut(t, f, f->next_adopt);
	end(t, f);
}

/* A page to load into. What it takes from the index is no page that a fetch or its request holds. */
static int32_t take_page(struct kv_tiers *t, const struct kv_fetch *f)
{
	int32_t page = kv_pool_get(t->pool, holder_of(f));
	if (page == KV_NO_PAGE && kv_prefix_evict(t->prefix, clock_now_ms(t->clock), EVICT_FOR_PROMPT))
		page = kv_pool_get(t->pool, holder_of(f));
	return page;
}

/* Asks for a page, or for a part of it. LIMIT: later. */
static enum status start_load(struct kv_tiers *t, struct kv_fetch *f, int32_t i, int32_t part)
{
	struct kv_fetch_page *p = &f->pages[i];
	struct kv_tier *tier = t->tier[p->tier];
	if (p->page == KV_NO_PAGE)
		p->page = take_page(t, f);
	if (p->page == KV_NO_PAGE)
		return STATUS_NOMEM;
	enum status st = p->n_parts == 1 ? kv_tier_load(tier, &p->name, p->page, ticket_of(f->id, i, 0))
	                                 : kv_tier_load_part(tier, &p->name, part, p->page, ticket_of(f->id, i, part));
	if (st == STATUS_OK)
		p->asked |= (uint8_t)(1u << part);
	return st;
}

/* The first part of each page, or all of it, then the next of each. */
static void start_loads(struct kv_tiers *t, struct kv_fetch *f)
{
	for (; f->next_part < KV_IMAGE_PARTS; f->next_part++, f->next_load = 0) {
		for (; f->next_load < f->n; f->next_load++) {
			const struct kv_fetch_page *p = &f->pages[f->next_load];
			if (f->next_part >= p->n_parts || p->failed)
				continue;
			if (p->tier == KV_TIER_REMOTE && !f->remote_has && f->next_load > f->next_adopt)
				return; /* the first of them will tell */
			enum status st = start_load(t, f, f->next_load, f->next_part);
			if (st == STATUS_LIMIT)
				return;
			if (st != STATUS_OK)
				f->pages[f->next_load].failed = true;
			if (st != STATUS_OK && f->next_part == 0) {
				cut(t, f, f->next_load);
				return;
			}
		}
	}
}

/* The page that has arrived next joins the index and the sequence; false when it cannot. */
static bool adopt(struct kv_tiers *t, struct kv_fetch *f, struct kv_seq *seq, const struct kv_use *use)
{
	struct kv_fetch_page *p = &f->pages[f->next_adopt];
	int32_t parent = seq->n_pages ? seq->pages[seq->n_pages - 1] : KV_NO_PAGE;
	int32_t page = kv_prefix_adopt(t->prefix, &p->name, parent, p->page, use);
	if (page == KV_NO_PAGE || (p->name.n_tokens == KV_PAGE_TOKENS && !kv_seq_append(t->pool, seq, page)))
		return false;
	/* A tail is not held: whoever goes on from it takes it over from the index. */
	kv_pool_unref(t->pool, p->page, holder_of(f));
	p->page = KV_NO_PAGE;
	t->stats.fetched[p->tier]++;
	f->remote_has = f->remote_has || p->tier == KV_TIER_REMOTE;
	f->next_adopt++;
	return true;
}

bool kv_tiers_advance(struct kv_tiers *t, struct kv_fetch *f, struct kv_seq *seq, const struct kv_use *use)
{
	if (!f->under_way)
		return true;
	start_loads(t, f);
	while (f->next_adopt < f->n && is_whole(&f->pages[f->next_adopt])) {
		if (!adopt(t, f, seq, use))
			cut(t, f, f->next_adopt);
	}
	if (f->next_adopt < f->n && f->pages[f->next_adopt].failed)
		cut(t, f, f->next_adopt);
	/* What has arrived may have made room, or shown that there is more. */
	start_loads(t, f);
	if (f->next_adopt < f->n)
		return false;
	end(t, f);
	return true;
}

/* ---- What has ended ---- */

static void end_read(struct kv_read *r, enum kv_read_state state)
{
	list_remove(&r->link);
	r->state = state;
}

static void take_end(struct kv_tiers *t, const struct kv_tier_done *done)
{
	uint64_t page = done->ticket / KV_IMAGE_PARTS, id = page / MAX_FETCH_PAGES;
	list_each(l, next, &t->fetches) {
		struct kv_fetch *f = list_entry(l, struct kv_fetch, link);
		if (f->id != id)
			continue;
		struct kv_fetch_page *p = &f->pages[page % MAX_FETCH_PAGES];
		if (done->end == KV_LOAD_DONE)
			p->here |= (uint8_t)(1u << done->ticket % KV_IMAGE_PARTS);
		else
			p->failed = true;
	}
	list_each(l, next, &t->reads) {
		struct kv_read *r = list_entry(l, struct kv_read, link);
		if (r->id == id)
			end_read(r, done->end == KV_LOAD_DONE ? KV_READ_DONE : KV_READ_FAILED);
	}
}

/* Takes note of the loads that have ended. */
static void poll_loads(struct kv_tiers *t)
{
	struct kv_tier_done done[DONE_BATCH];
	for (int kind = 0; kind < KV_TIER_KINDS; kind++) {
		int32_t n = t->tier[kind] ? kv_tier_poll(t->tier[kind], done, DONE_BATCH) : 0;
		for (int32_t i = 0; i < n; i++)
			take_end(t, &done[i]);
	}
}

/* ---- Up, beside the step ---- */

/* The first of its pages that lacks one of the parts up to this one; f->n: none does. */
static int32_t first_lacking(const struct kv_fetch *f, int32_t part, int32_t from)
{
	int32_t i = from;
	for (; i < f->n; i++) {
		const struct kv_fetch_page *p = &f->pages[i];
		int32_t n = part + 1 < p->n_parts ? part + 1 : p->n_parts;
		if ((~p->here & ((1u << n) - 1)) != 0)
			break;
	}
	return i;
}

bool kv_tiers_may_begin(const struct kv_fetch *f)
{
	if (!f->under_way || !f->by_parts || first_lacking(f, 0, f->next_adopt) < f->n)
		return false;
	for (int32_t i = f->next_adopt; i < f->n; i++) {
		if (f->pages[i].failed)
			return false;
	}
	return first_lacking(f, KV_IMAGE_PARTS - 1, f->next_adopt) < f->n;
}

void kv_tiers_retreat(struct kv_tiers *t, const struct kv_fetch *f, struct kv_seq *seq)
{
	kv_seq_truncate(t->pool, seq, (f->first + f->next_adopt) * KV_PAGE_TOKENS);
}

bool kv_tiers_begin(struct kv_tiers *t, struct kv_fetch *f, struct kv_seq *seq, int32_t most)
{
	int32_t at = f->first + f->next_adopt, n_tokens = 0;
	if (seq->n_pages != at || seq->n_tokens != at * KV_PAGE_TOKENS)
		return false;
	for (int32_t i = f->next_adopt; i < f->n; i++) {
		if (!kv_seq_append(t->pool, seq, f->pages[i].page)) {
			kv_tiers_retreat(t, f, seq);
			return false;
		}
		n_tokens = (f->first + i) * KV_PAGE_TOKENS + f->pages[i].name.n_tokens;
	}
	kv_seq_truncate(t->pool, seq, n_tokens < most ? n_tokens : most);
	/* What will be written to has come as a whole, and is nobody else's. */
	struct kv_fetch_page *last = &f->pages[f->n - 1];
	if (seq->n_tokens % KV_PAGE_TOKENS != 0) {
		kv_pool_unref(t->pool, last->page, holder_of(f));
		t->stats.fetched[last->tier]++;
		f->n--;
	}
	return true;
}

bool kv_tiers_wait(struct kv_tiers *t, struct kv_fetch *f, int32_t layer, int64_t until_ns)
{
	const struct kv_layout *l = kv_pool_layout(t->pool);
	int32_t part = kv_image_part_of(l, kv_image_n_parts(l, false), layer), i = f->next_adopt;
	for (;;) {
		poll_loads(t);
		start_loads(t, f);
		i = first_lacking(f, part, i);
		if (i == f->n)
			return true;
		if (f->pages[i].failed || clock_now_ns(clock_system()) >= until_ns)
			return false;
		kv_tier_wait(t->tier[f->pages[i].tier], WAIT_MS);
	}
}

void kv_tiers_arrived(struct kv_tiers *t, struct kv_fetch *f)
{
	for (int32_t i = f->next_adopt; i < f->n; i++) {
		kv_pool_unref(t->pool, f->pages[i].page, holder_of(f));
		t->stats.fetched[f->pages[i].tier]++;
	}
	t->stats.fetches_overlapped++;
	end(t, f);
}

/* ---- To host memory ---- */

bool kv_tiers_find(const struct kv_tiers *t, const struct kv_key *key, struct kv_page_name *name)
{
	for (int kind = 0; kind < KV_TIER_KINDS; kind++) {
		if (t->tier[kind] && kv_tier_find(t->tier[kind], key, name))
			return true;
	}
	return false;
}

enum status kv_tiers_read(struct kv_tiers *t, struct kv_read *r, const struct kv_page_name *name, void *host)
{
	enum kv_tier_kind kind;
	if (!in_tiers(t, name, &kind))
		return STATUS_NOT_FOUND;
	*r = (struct kv_read){.id = t->last_id + 1, .tier = kind, .state = KV_READ_UNDER_WAY};
	enum status st = kv_tier_read(t->tier[kind], name, host, &r->wide, ticket_of(r->id, 0, 0));
	if (st != STATUS_OK)
		return st;
	t->last_id++;
	list_push_back(&t->reads, &r->link);
	return STATUS_OK;
}

void kv_tiers_read_cancel(struct kv_tiers *t, struct kv_read *r)
{
	if (r->state != KV_READ_UNDER_WAY)
		return;
	kv_tier_cancel(t->tier[r->tier], ticket_of(r->id, 0, 0));
	end_read(r, KV_READ_NONE);
}

void kv_tiers_poll(struct kv_tiers *t)
{
	poll_loads(t);
	if (t->behind)
		write_behind(t);
}

bool kv_tiers_ready(const struct kv_tiers *t)
{
	return t->tier[KV_TIER_RAM] && !kv_tier_quiet(t->tier[KV_TIER_RAM]);
}

bool kv_tiers_busy(const struct kv_tiers *t)
{
	for (int kind = 0; kind < KV_TIER_KINDS; kind++) {
		if (t->tier[kind] && !kv_tier_quiet(t->tier[kind]))
			return true;
	}
	return !list_empty(&t->fetches) || !list_empty(&t->reads) || can_write_behind(t);
}

/* ---- The end of the process ---- */

enum { DISKS_FROM = KV_TIER_DISK, DISKS_TO = KV_TIER_DISK_WIDE };

/* A disk tier that is at work, or NULL. */
static struct kv_tier *busy_disk(const struct kv_tiers *t)
{
	for (int kind = DISKS_FROM; kind <= DISKS_TO; kind++) {
		if (t->tier[kind] && !kv_tier_quiet(t->tier[kind]))
			return t->tier[kind];
	}
	return NULL;
}

static bool wait_a_bit(struct kv_tiers *t, int64_t deadline_ms)
{
	struct kv_tier *disk = busy_disk(t);
	if (clock_now_ms(t->clock) >= deadline_ms)
		return false;
	if (disk)
		kv_tier_wait(disk, 20);
	kv_tiers_poll(t);
	return true;
}

/* The disk tier for a page, or NULL. */
static struct kv_tier *disk_for(const struct kv_tiers *t, int32_t page)
{
	for (int kind = DISKS_FROM; kind <= DISKS_TO; kind++) {
		if (t->tier[kind] && kv_tier_takes(t->tier[kind], page))
			return t->tier[kind];
	}
	return NULL;
}

int32_t kv_tiers_save(struct kv_tiers *t, const struct kv_weak *weak, int64_t deadline_ms)
{
	int32_t n = kv_weak_alive(t->prefix, weak), saved = 0;
	t->n_behind = 0;
	struct kv_page_name name;
	for (int kind = DISKS_FROM; kind <= DISKS_TO; kind++) {
		if (t->tier[kind])
			kv_tier_hurry(t->tier[kind]);
	}
	/* The beginning last: the tier lets go of what was touched first. */
	for (int32_t i = n - 1; i >= 0; i--) {
		enum kv_tier_put put;
		struct kv_tier *disk = disk_for(t, weak->pages[i].page);
		if (!disk || !kv_prefix_name(t->prefix, weak->pages[i].page, &name))
			continue;
		while ((put = kv_tier_put(disk, &name, weak->pages[i].page)) == KV_PUT_BUSY) {
			if (!wait_a_bit(t, deadline_ms))
				return saved;
		}
		saved += put == KV_PUT_STORED || put == KV_PUT_PRESENT;
	}
	return saved;
}

void kv_tiers_flush(struct kv_tiers *t, int64_t deadline_ms)
{
	while (busy_disk(t) && wait_a_bit(t, deadline_ms))
		;
}

/* ---- Life ---- */

enum status kv_tiers_create(struct kv_pool *pool, struct kv_prefix *prefix, struct kv_tier *const tier[KV_TIER_KINDS],
                            const struct clock *clock, struct kv_tiers **out)
{
	struct kv_tiers *t = calloc(1, sizeof *t);
	bool behind = tier[KV_TIER_DISK] || tier[KV_TIER_REMOTE];
	if (t && behind)
		t->behind = calloc(BEHIND, sizeof *t->behind);
	if (!t || (behind && !t->behind)) {
		for (int kind = 0; kind < KV_TIER_KINDS; kind++)
			kv_tier_destroy(tier[kind]);
		free(t);
		return STATUS_NOMEM;
	}
	t->pool = pool;
	t->prefix = prefix;
	t->clock = clock;
	for (int kind = 0; kind < KV_TIER_KINDS; kind++) {
		t->tier[kind] = tier[kind];
		t->trial_ms[kind] = clock_now_ms(clock);
	}
	list_init(&t->fetches);
	list_init(&t->reads);
	kv_prefix_on_evict(prefix, leaving, t);
	*out = t;
	return STATUS_OK;
}

void kv_tiers_destroy(struct kv_tiers *t)
{
	if (!t)
		return;
	kv_prefix_on_evict(t->prefix, NULL, NULL);
	for (int kind = 0; kind < KV_TIER_KINDS; kind++)
		kv_tier_destroy(t->tier[kind]);
	free(t->behind);
	free(t);
}

enum kv_tier_kind kv_tiers_where(const struct kv_tiers *t, const struct kv_key *key)
{
	struct kv_page_name name;
	int kind = 0;
	while (kind < KV_TIER_KINDS && !(t->tier[kind] && kv_tier_find(t->tier[kind], key, &name)))
		kind++;
	return (enum kv_tier_kind)kind;
}

void kv_tiers_stats(const struct kv_tiers *t, struct kv_tiers_stats *out)
{
	*out = t->stats;
	for (int kind = 0; kind < KV_TIER_KINDS; kind++) {
		out->has[kind] = t->tier[kind] != NULL;
		if (!t->tier[kind])
			continue;
		kv_tier_stats(t->tier[kind], &out->tier[kind]);
		out->pays[kind] = pays(t, (enum kv_tier_kind)kind);
	}
}
