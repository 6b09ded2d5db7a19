#include "engine/kv/seq.h"

#include <stdlib.h>
#include <string.h>

#include "engine/kv/attic.h"

int32_t kv_pages_for(int32_t n_tokens)
{
	return n_tokens / KV_PAGE_TOKENS + (n_tokens % KV_PAGE_TOKENS != 0);
}

static bool reserve(struct kv_seq *s, int32_t n_pages)
{
	if (n_pages <= s->cap_pages)
		return true;
	int32_t cap = s->cap_pages ? s->cap_pages : 8;
	while (cap < n_pages)
		cap = cap > INT32_MAX / 2 ? n_pages : cap * 2;
	int32_t *pages = realloc(s->pages, (size_t)cap * sizeof *pages);
	if (!pages)
		return false;
	s->pages = pages;
	s->cap_pages = cap;
	return true;
}

/* The one place where the number of references changes. */
static void set_pages(struct kv_seq *s, int32_t n_pages, int32_t n_gone)
{
	if (s->account)
		s->account->n_pages += n_pages - n_gone - kv_seq_refs(s);
	s->n_pages = n_pages;
	s->n_gone = n_gone;
}

static void set_n_pages(struct kv_seq *s, int32_t n_pages)
{
	set_pages(s, n_pages, s->n_gone);
}

/* The page that the next position falls into is partly filled and visible to another holder. */
static bool tail_is_shared(const struct kv_pool *pool, const struct kv_seq *s)
{
	return s->n_tokens % KV_PAGE_TOKENS != 0 && kv_pool_refs(pool, s->pages[kv_seq_places(s) / KV_PAGE_TOKENS]) > 1;
}

int32_t kv_seq_pages_needed(const struct kv_pool *pool, const struct kv_seq *s, int32_t n)
{
	int32_t missing = kv_pages_for(kv_seq_places(s) + n) - s->n_pages;
	return (missing > 0 ? missing : 0) + (n > 0 && tail_is_shared(pool, s));
}

enum status kv_seq_prepare(struct kv_pool *pool, struct kv_seq *s, int32_t n)
{
	int32_t want = kv_pages_for(kv_seq_places(s) + n);
	if (n > 0 && tail_is_shared(pool, s) &&
	    kv_seq_own(pool, s, kv_seq_places(s) / KV_PAGE_TOKENS, 1) != STATUS_OK)
		return STATUS_LIMIT;
	if (!reserve(s, want))
		return STATUS_NOMEM;
	/* It may have been full before it was cut. */
	if (n > 0 && s->n_tokens % KV_PAGE_TOKENS != 0)
		kv_pool_unbound(pool, s->pages[kv_seq_places(s) / KV_PAGE_TOKENS]);
	/* A last page that is full is the last no more. */
	if (s->n_pages > 1 && s->n_pages < want && kv_seq_places(s) == s->n_pages * KV_PAGE_TOKENS)
		kv_pool_narrow(pool, s->pages[s->n_pages - 1]);
	/* One that was taken for a piece of what went on, and nothing of it is computed, is the last now. */
	if (n > 0 && !s->goes_on && s->n_pages == want && kv_seq_places(s) <= (want - 1) * KV_PAGE_TOKENS)
		kv_pool_widen(pool, s->pages[want - 1]);
	while (s->n_pages < want) {
		int32_t page = kv_pool_get(pool, s->holder);
		if (page == KV_NO_PAGE)
			return STATUS_LIMIT;
		if (s->n_pages == 0 || (s->n_pages == want - 1 && !s->goes_on))
			kv_pool_widen(pool, page);
		s->pages[s->n_pages] = page;
		set_n_pages(s, s->n_pages + 1);
	}
	return STATUS_OK;
}

void kv_seq_let_go(struct kv_pool *pool, struct kv_seq *s, int32_t window)
{
	int32_t seen = s->n_tokens >= window ? (s->n_tokens + 1 - window) / KV_PAGE_TOKENS : 0;
	int32_t last_full = s->n_tokens / KV_PAGE_TOKENS - 1;
	kv_seq_move_out(pool, s, seen < last_full ? seen : last_full);
}

void kv_seq_move_out(struct kv_pool *pool, struct kv_seq *s, int32_t n)
{
	for (int32_t i = s->n_gone; i < n; i++) {
		kv_pool_unref(pool, s->pages[i], s->holder);
		s->pages[i] = KV_NO_PAGE;
		set_pages(s, s->n_pages, i + 1);
	}
}

void kv_seq_truncate(struct kv_pool *pool, struct kv_seq *s, int32_t n_tokens)
{
	if (s->n_dropped > 0 && n_tokens < s->dropped_at)
		n_tokens = s->n_dropped = 0;
	if (s->n_gone > 0 && n_tokens < s->n_tokens)
		n_tokens = 0;
	int32_t keep = kv_pages_for(n_tokens - s->n_dropped * KV_PAGE_TOKENS);
	if (s->n_notes > keep)
		s->n_notes = keep;
	if (s->n_mass > keep)
		s->n_mass = keep;
	while (s->n_pages > keep && s->n_pages > s->n_gone) {
		kv_pool_unref(pool, s->pages[s->n_pages - 1], s->holder);
		set_n_pages(s, s->n_pages - 1);
	}
	if (s->n_pages > keep)
		set_pages(s, 0, 0);
	if (s->n_tokens > n_tokens)
		s->n_tokens = n_tokens;
	if (s->n_tokens == 0) {
		s->moved = s->n_buckets = s->n_unsound = s->n_back = 0;
		kv_attic_destroy(s->attic);
		s->attic = NULL;
	}
}

void kv_seq_drop(struct kv_pool *pool, struct kv_seq *s, int32_t first, int32_t n)
{
	for (int32_t i = 0; i < n; i++)
		kv_pool_unref(pool, s->pages[first + i], s->holder);
	memmove(s->pages + first, s->pages + first + n, (size_t)(s->n_pages - first - n) * sizeof *s->pages);
	set_n_pages(s, s->n_pages - n);
	if (s->n_notes > first) {
		int32_t noted = s->n_notes - first < n ? s->n_notes - first : n;
		memmove(s->notes + first, s->notes + first + noted,
		        (size_t)(s->n_notes - first - noted) * sizeof *s->notes);
		s->n_notes -= noted;
	}
	if (s->n_mass > first) {
		int32_t weighed = s->n_mass - first < n ? s->n_mass - first : n;
		memmove(s->mass + first, s->mass + first + weighed,
		        (size_t)(s->n_mass - first - weighed) * sizeof *s->mass);
		s->n_mass -= weighed;
	}
	if (s->n_dropped == 0 || first < s->n_leading)
		s->n_leading = first;
	s->n_dropped += n;
	s->dropped_at = s->n_tokens;
}

bool kv_seq_insert(struct kv_seq *s, int32_t at, int32_t page)
{
	if (!reserve(s, s->n_pages + 1))
		return false;
	memmove(s->pages + at + 1, s->pages + at, (size_t)(s->n_pages - at) * sizeof *s->pages);
	s->pages[at] = page;
	set_n_pages(s, s->n_pages + 1);
	s->n_dropped--;
	return true;
}

void kv_seq_remove(struct kv_pool *pool, struct kv_seq *s, int32_t at)
{
	int32_t dropped_at = s->dropped_at;
	kv_seq_drop(pool, s, at, 1);
	s->dropped_at = dropped_at;
}

void kv_seq_release(struct kv_pool *pool, struct kv_seq *s)
{
	kv_seq_truncate(pool, s, 0);
	free(s->pages);
	s->pages = NULL;
	s->cap_pages = 0;
	free(s->notes);
	s->notes = NULL;
	s->n_notes = 0;
	free(s->mass);
	s->mass = NULL;
	s->n_mass = 0;
	free(s->buckets);
	s->buckets = NULL;
	free(s->plus);
	s->plus = NULL;
}

enum status kv_seq_share(struct kv_pool *pool, struct kv_seq *dst, const struct kv_seq *src, int32_t n_tokens)
{
	int32_t n_pages = kv_pages_for(n_tokens);
	if (!reserve(dst, n_pages))
		return STATUS_NOMEM;
	for (int32_t i = 0; i < n_pages; i++) {
		kv_pool_ref(pool, src->pages[i], dst->holder);
		dst->pages[i] = src->pages[i];
	}
	set_n_pages(dst, n_pages);
	dst->n_tokens = n_tokens;
	return STATUS_OK;
}

bool kv_seq_weigh(struct kv_seq *s)
{
	if (s->n_mass >= s->n_pages)
		return true;
	uint64_t *mass = realloc(s->mass, (size_t)s->n_pages * sizeof *mass);
	if (!mass)
		return false;
	s->mass = mass;
	memset(mass + s->n_mass, 0, (size_t)(s->n_pages - s->n_mass) * sizeof *mass);
	s->n_mass = s->n_pages;
	return true;
}

enum status kv_seq_renew(struct kv_pool *pool, struct kv_seq *s, int32_t n)
{
	for (int32_t i = 0; i < n; i++) {
		if (kv_pool_refs(pool, s->pages[i]) > 1) {
			int32_t page = kv_pool_get(pool, s->holder);
			if (page == KV_NO_PAGE)
				return STATUS_LIMIT;
			kv_pool_unref(pool, s->pages[i], s->holder);
			s->pages[i] = page;
			if (i == 0)
				kv_pool_widen(pool, page);
		}
		kv_pool_unbound(pool, s->pages[i]);
	}
	/* Of what the tokens alone would give, it has nothing any more. */
	s->n_leading = 0;
	return STATUS_OK;
}

enum status kv_seq_own(struct kv_pool *pool, struct kv_seq *s, int32_t first, int32_t n)
{
	for (int32_t i = first; i < first + n; i++) {
		if (kv_pool_refs(pool, s->pages[i]) == 1)
			continue;
		int32_t page = kv_pool_clone(pool, s->pages[i], s->holder);
		if (page == KV_NO_PAGE)
			return STATUS_LIMIT;
		kv_pool_unref(pool, s->pages[i], s->holder);
		s->pages[i] = page;
	}
	return STATUS_OK;
}

bool kv_seq_append(struct kv_pool *pool, struct kv_seq *s, int32_t page)
{
	if (!reserve(s, s->n_pages + 1))
		return false;
	kv_pool_ref(pool, page, s->holder);
	s->pages[s->n_pages] = page;
	set_n_pages(s, s->n_pages + 1);
	s->n_tokens += KV_PAGE_TOKENS;
	return true;
}

void kv_seq_label(struct kv_pool *pool, struct kv_seq *s, struct kv_holder holder)
{
	for (int32_t i = s->n_gone; i < s->n_pages && !kv_holder_is(s->holder, holder); i++)
		kv_pool_pass(pool, s->pages[i], s->holder, holder);
	s->holder = holder;
}

void kv_seq_charge(struct kv_seq *s, struct kv_account *account)
{
	int32_t n_pages = s->n_pages, n_gone = s->n_gone;
	set_pages(s, 0, 0);
	s->account = account;
	set_pages(s, n_pages, n_gone);
}
