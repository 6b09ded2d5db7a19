#include "engine/kv/attic.h"

#include <stdlib.h>
#include <string.h>

static size_t bounds_elements(const struct kv_layout *l)
{
	return kv_bounds_bytes(l) / sizeof(uint16_t);
}

bool kv_attics_init(struct kv_attics *a, struct kv_tiers *tiers, struct kv_pool *pool)
{
	*a = (struct kv_attics){.tiers = tiers, .pool = pool};
	a->most_bytes = tiers ? kv_tiers_host_bytes(tiers) / KV_ATTIC_SHARE : 0;
	return a->most_bytes > 0 && kv_pool_layout(pool)->bounds;
}

/* Chains begin with the hash of a root, so that none has a key behind this one. */
static void name_page(const struct kv_key *before, uint64_t what, struct kv_page_name *out)
{
	*out = (struct kv_page_name){.parent = *before, .n_tokens = KV_PAGE_TOKENS};
	out->tokens[0] = (int32_t)(what & INT32_MAX);
	out->tokens[1] = (int32_t)(what >> 31);
	kv_key_next(before, out->tokens, &out->key);
}

struct kv_attic *kv_attic_create(struct kv_attics *of)
{
	const struct kv_key nobodys = {{0}};
	struct kv_page_name name;
	struct kv_attic *a = calloc(1, sizeof *a);
	if (!a)
		return NULL;
	name_page(&nobodys, ++of->serial, &name);
	a->of = of;
	a->base = name.key;
	return a;
}

void kv_attic_destroy(struct kv_attic *a)
{
	struct kv_page_name name;
	if (!a)
		return;
	for (int32_t i = 0; i < a->n; i++) {
		name_page(&a->base, (uint64_t)a->number[i], &name);
		kv_tiers_host_drop(a->of->tiers, &name.key);
	}
	a->of->used_bytes -= (uint64_t)a->cap * kv_bounds_bytes(kv_pool_layout(a->of->pool));
	free(a->number);
	free(a->bounds);
	free(a->lost);
	free(a->back);
	free(a);
}

/* Room for one more. */
static bool grow(struct kv_attic *a)
{
	size_t bytes = kv_bounds_bytes(kv_pool_layout(a->of->pool));
	if (a->n < a->cap)
		return true;
	int32_t cap = a->cap ? a->cap + a->cap / 2 : 4;
	uint64_t room = (a->of->most_bytes - a->of->used_bytes) / bytes;
	if (room < (uint64_t)(cap - a->cap))
		cap = a->cap + (int32_t)room;
	if (cap == a->cap)
		return false;
	int32_t *number = realloc(a->number, (size_t)cap * sizeof *number);
	if (!number)
		return false;
	a->number = number;
	uint16_t *bounds = realloc(a->bounds, (size_t)cap * bytes);
	if (!bounds)
		return false;
	a->bounds = bounds;
	bool *lost = realloc(a->lost, (size_t)cap * sizeof *lost);
	if (!lost)
		return false;
	a->lost = lost;
	a->of->used_bytes += (uint64_t)(cap - a->cap) * bytes;
	a->cap = cap;
	return true;
}

static void copy_bounds(struct kv_attic *a, int32_t page)
{
	const size_t n = bounds_elements(kv_pool_layout(a->of->pool));
	uint16_t *to = a->bounds + (size_t)a->n * n;
	/* What is no number gets nothing of a row. */
	if (kv_pool_read_bounds(a->of->pool, page, to) != STATUS_OK)
		memset(to, 0xFF, n * sizeof *to);
}

/* Whether the tier has it no more. */
static void note(struct kv_attic *a, int32_t i, bool lost)
{
	if (a->lost[i] == lost)
		return;
	a->lost[i] = lost;
	a->n_lost += lost ? 1 : -1;
	a->of->n_lost += lost;
}

bool kv_attic_put(struct kv_attic *a, int32_t number, int32_t page)
{
	struct kv_page_name name;
	if (a->n > 0 && number <= a->number[a->n - 1])
		return true;
	if (!grow(a) || kv_pool_bound(a->of->pool, &page, 1) != STATUS_OK) {
		a->n_unknown++;
		a->of->n_lost++;
		return false;
	}
	copy_bounds(a, page);
	a->number[a->n] = number;
	a->lost[a->n] = false;
	name_page(&a->base, (uint64_t)number, &name);
	bool kept = kv_tiers_host_keep(a->of->tiers, &name, page);
	a->of->n_kept += kept;
	note(a, a->n++, !kept);
	return true;
}

void kv_attic_look(struct kv_attic *a)
{
	struct kv_page_name name;
	for (int32_t i = 0; i < a->n; i++) {
		if (a->lost[i])
			continue;
		name_page(&a->base, (uint64_t)a->number[i], &name);
		note(a, i, !kv_tiers_host_has(a->of->tiers, &name));
	}
}

bool kv_attic_bring(struct kv_attic *a, int32_t i, int32_t page)
{
	struct kv_page_name name;
	name_page(&a->base, (uint64_t)a->number[i], &name);
	bool there = !a->lost[i] && kv_tiers_host_bring(a->of->tiers, &name, page);
	note(a, i, !there);
	a->of->n_back += there;
	return there;
}

void kv_attic_keep(struct kv_attic *a, int32_t i, int32_t page)
{
	struct kv_page_name name;
	name_page(&a->base, (uint64_t)a->number[i], &name);
	note(a, i, !kv_tiers_host_keep(a->of->tiers, &name, page));
}

bool kv_attic_reserve_back(struct kv_attic *a, int32_t n)
{
	if (n <= a->cap_back)
		return true;
	int32_t *back = realloc(a->back, (size_t)n * sizeof *back);
	if (!back)
		return false;
	a->back = back;
	a->cap_back = n;
	return true;
}
