#include "engine/kv/policy.h"

#include <string.h>

static const char *const names[KV_POLICIES] = {
	[KV_POLICY_FULL] = "full",   [KV_POLICY_STREAMING] = "streaming", [KV_POLICY_EVICT] = "evict",
	[KV_POLICY_QUEST] = "quest", [KV_POLICY_MERGE] = "merge",
};

const char *kv_policy_name(enum kv_policy_kind kind)
{
	return (unsigned)kind < KV_POLICIES ? names[kind] : NULL;
}

bool kv_policy_find(const char *name, enum kv_policy_kind *out)
{
	for (int kind = 0; kind < KV_POLICIES; kind++) {
		if (strcmp(names[kind], name) == 0) {
			*out = (enum kv_policy_kind)kind;
			return true;
		}
	}
	return false;
}

struct kv_policy kv_policy_streaming(int32_t first_pages, int32_t window_pages, int32_t acts_pages)
{
	return (struct kv_policy){
	        .kind = KV_POLICY_STREAMING,
	        .first_pages = first_pages,
	        .last_pages = window_pages,
	        .most_pages = first_pages + window_pages,
	        .acts_pages = acts_pages,
	        .jump_pages = window_pages < 8 ? 1 : window_pages / 8,
	};
}

bool kv_policy_keep_within(struct kv_policy *p, int32_t tokens)
{
	int32_t reach = tokens / KV_PAGE_TOKENS, room = reach - p->most_pages;
	if (p->kind != KV_POLICY_STREAMING || room < 1 || p->acts_pages > reach)
		return false;
	p->reach_pages = reach;
	/* Few long steps cost less than many short ones. */
	p->step_pages = reach / 8 < 1 ? 1 : reach / 8 < room ? reach / 8 : room;
	return true;
}

struct kv_policy kv_policy_evict(int32_t first_pages, int32_t last_pages, int32_t most_pages, int32_t dropped_permille,
                                 int32_t acts_pages, int32_t jump_pages)
{
	return (struct kv_policy){
	        .kind = KV_POLICY_EVICT,
	        .first_pages = first_pages,
	        .last_pages = last_pages,
	        .most_pages = most_pages,
	        .dropped_permille = dropped_permille,
	        .acts_pages = acts_pages,
	        .jump_pages = jump_pages,
	};
}

struct kv_policy kv_policy_merge(int32_t first_pages, int32_t last_pages, int32_t most_pages, int32_t merged_permille,
				 int32_t acts_pages, int32_t jump_pages)
{
	struct kv_policy p =
		kv_policy_evict(first_pages, last_pages, most_pages, merged_permille, acts_pages, jump_pages);
	p.kind = KV_POLICY_MERGE;
	return p;
}

struct kv_policy kv_policy_quest(int32_t first_pages, int32_t last_pages, int32_t most_pages, int32_t acts_pages)
{
	return (struct kv_policy){
	        .kind = KV_POLICY_QUEST,
	        .first_pages = first_pages,
	        .last_pages = last_pages,
	        .most_pages = most_pages,
	        .acts_pages = acts_pages,
	};
}

/* Whether it ever takes a page out of a block table. */
static bool drops(const struct kv_policy *p)
{
	return p->kind == KV_POLICY_STREAMING || p->kind == KV_POLICY_EVICT || p->kind == KV_POLICY_MERGE;
}

bool kv_policy_same(const struct kv_policy *a, const struct kv_policy *b)
{
	return a->kind == b->kind && a->first_pages == b->first_pages && a->last_pages == b->last_pages &&
	       a->most_pages == b->most_pages && a->dropped_permille == b->dropped_permille && a->by_age == b->by_age &&
	       a->by_mass == b->by_mass && a->acts_pages == b->acts_pages && a->jump_pages == b->jump_pages &&
	       a->reach_pages == b->reach_pages && a->step_pages == b->step_pages &&
	       a->trained_tokens == b->trained_tokens && a->back_pages == b->back_pages &&
	       a->choose_tokens == b->choose_tokens && a->again_tokens == b->again_tokens;
}

bool kv_policy_same_but_when(const struct kv_policy *a, const struct kv_policy *b)
{
	struct kv_policy c = *b;
	c.acts_pages = a->acts_pages;
	c.reach_pages = a->reach_pages;
	c.step_pages = a->step_pages;
	return kv_policy_same(a, &c);
}

int32_t kv_policy_least_pages(const struct kv_policy *p)
{
	if (p->dropped_permille == 0)
		return p->most_pages;
	return p->first_pages + p->last_pages + (p->kind == KV_POLICY_MERGE) + p->jump_pages;
}

void kv_policy_fire(struct kv_policy *p, int32_t n_tokens)
{
	int32_t acts = kv_pages_for(n_tokens) + (p->by_mass ? p->jump_pages : 0), least = kv_policy_least_pages(p);
	if (acts < least)
		acts = least;
	if (acts < p->acts_pages)
		p->acts_pages = acts;
	kv_policy_keep_within(p, p->trained_tokens);
}

/* How many are left of n pages where it acts: it has room until it acts again. */
static int32_t left_of(const struct kv_policy *p, int32_t n)
{
	int32_t least = p->first_pages + p->last_pages + (p->kind == KV_POLICY_MERGE),
		most = p->most_pages == INT32_MAX ? n : p->most_pages - p->jump_pages;
	if (p->dropped_permille > 0) {
		int32_t share = (int32_t)(n - ((int64_t)n * p->dropped_permille + 999) / 1000);
		if (share < least)
			share = least;
		most = share < most ? share : most;
	}
	return most;
}

int32_t kv_policy_exact_tokens(const struct kv_policy *p)
{
	bool never = p->kind == KV_POLICY_FULL || p->acts_pages > INT32_MAX / KV_PAGE_TOKENS;
	return never ? INT32_MAX : p->acts_pages * KV_PAGE_TOKENS;
}

int32_t kv_policy_max_pages(const struct kv_policy *p, int32_t n_tokens)
{
	int32_t all = kv_pages_for(n_tokens);
	if (!drops(p) || all <= p->acts_pages)
		return all;
	int32_t late = left_of(p, all) + p->jump_pages + p->back_pages;
	return late > p->acts_pages ? late : p->acts_pages;
}

int32_t kv_policy_next(const struct kv_policy *p, int32_t n_tokens)
{
	if (!drops(p))
		return INT32_MAX;
	int32_t first = kv_policy_exact_tokens(p);
	if (n_tokens < first)
		return first;
	int64_t jump = (int64_t)p->jump_pages * KV_PAGE_TOKENS;
	int64_t next = first + ((n_tokens - first) / jump + 1) * jump;
	return next < INT32_MAX ? (int32_t)next : INT32_MAX;
}

int32_t kv_policy_weighs_from(const struct kv_policy *p)
{
	int32_t exact = kv_policy_exact_tokens(p);
	if (!p->by_mass || exact == INT32_MAX)
		return INT32_MAX;
	return exact - p->jump_pages * KV_PAGE_TOKENS > 0 ? exact - p->jump_pages * KV_PAGE_TOKENS : 0;
}

int32_t kv_policy_moved(const struct kv_policy *p, int32_t n_tokens)
{
	int64_t step = (int64_t)p->step_pages * KV_PAGE_TOKENS;
	int64_t over = p->reach_pages > 0
	                       ? (int64_t)kv_policy_next(p, n_tokens) - (int64_t)p->reach_pages * KV_PAGE_TOKENS
	                       : 0;
	return over > 0 ? (int32_t)((over + step - 1) / step * step) : 0;
}

int32_t kv_policy_due(const struct kv_policy *p, const struct kv_seq *s)
{
	int32_t exact = kv_policy_exact_tokens(p);
	if (!drops(p) || s->n_tokens < exact || (s->n_tokens - exact) % (p->jump_pages * KV_PAGE_TOKENS) != 0)
		return 0;
	int32_t n = kv_seq_places(s) / KV_PAGE_TOKENS - s->n_back - left_of(p, s->n_tokens / KV_PAGE_TOKENS);
	return n > 0 ? n : 0;
}

static bool goes_before(const struct kv_policy *p, const struct kv_note *a, const struct kv_note *b)
{
	if (a->keep != b->keep)
		return b->keep;
	return !p->by_age && a->score < b->score;
}

int32_t kv_policy_next_victim(const struct kv_policy *p, const struct kv_seq *s)
{
	int32_t best = p->first_pages + s->n_back, end = kv_seq_places(s) / KV_PAGE_TOKENS - p->last_pages;
	for (int32_t i = best + 1; p->kind == KV_POLICY_EVICT && i < end; i++)
		if (goes_before(p, &s->notes[i], &s->notes[best]))
			best = i;
	return best;
}
