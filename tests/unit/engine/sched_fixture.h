/*
 * The scheduler over a pretended device: "computing" a position writes its token and position into its page, so that
 * every test can check that what a request would read back is its own, whatever was shared, dropped, preempted or
 * forked.
 */
#pragma once

#include "tests/unit/unit.h"

#include <stdio.h>

#include "engine/census.h"
#include "engine/sched.h"
#include "tests/support/memory_backend.h"
#include "tests/support/taken_part.h"

enum { PAGE = KV_PAGE_TOKENS, MAX_RUNNING = 6, STEP = 64 };

static struct memory_backend mem;
static struct clock now;

struct fixture {
	struct kv_pool *pool;
	struct kv_prefix *prefix;
	struct tenant_table tenants;
	struct session_table sessions;
	struct sched sched;
	struct census census;
	uint64_t next_id;
};

/* Merging on the pretended device: a bucket reads as its first token, and marks itself as not exact. */
struct pretended_merger {
	struct kv_merger base;
	struct kv_pool *pool;
};

static struct pretended_merger merger;

static inline int32_t *spot_cell(struct kv_merger *m, const struct kv_spot *s);
static inline enum status pretend_sound(struct kv_merger *m, const struct kv_spot *spots, int32_t n, bool *sound)
{
	(void)m;
	(void)spots;
	memset(sound, true, (size_t)n);
	return STATUS_OK;
}

static inline enum status pretend_apart(struct kv_merger *m, const struct kv_pair *pairs, int32_t n, float *apart)
{
	for (int32_t i = 0; i < n; i++)
		apart[i] = (float)((spot_cell(m, &pairs[i].a)[0] * 31 + spot_cell(m, &pairs[i].b)[0]) & 15) / 16;
	return STATUS_OK;
}

static inline enum status pretend_join(struct kv_merger *m, const struct kv_pair *pairs, int32_t n)
{
	for (int32_t i = 0; i < n; i++) {
		const struct kv_pair *p = &pairs[i];
		assert_true(p->n_a > 0 && p->n_b > 0 && p->position > p->a.position && p->position < p->b.position);
		assert_int_equal(kv_pool_refs(((struct pretended_merger *)m)->pool, p->a.page), 1);
		spot_cell(m, &p->a)[1] |= 1 << 24;
	}
	return STATUS_OK;
}

/* All of its tokens are sound, so no place is left over. */
static inline enum status pretend_move(struct kv_merger *m, const struct kv_move *moves, int32_t n)
{
	for (int32_t i = 0; i < n; i++) {
		const struct kv_spot *from = &moves[i].from, *to = &moves[i].to;
		assert_true(from->page >= 0);
		assert_int_equal(kv_pool_refs(((struct pretended_merger *)m)->pool, to->page), 1);
		spot_cell(m, to)[0] = spot_cell(m, from)[0];
		spot_cell(m, to)[1] = spot_cell(m, from)[1] | 1 << 24;
	}
	return STATUS_OK;
}

static inline void setup(struct fixture *f, int32_t n_pages)
{
	/* 8 bytes a position. */
	struct kv_layout layout = {1, 1, 2, PAGE, QUANT_F16, PAGE * 8, PAGE * 8};
	memset(f, 0, sizeof *f);
	memory_backend_init(&mem);
	clock_manual_init(&now, 1);
	assert_int_equal(tenant_table_init(&f->tenants, layout.page_stride), STATUS_OK);
	assert_int_equal(kv_pool_create(&mem.base, &layout, n_pages, &f->pool, NULL), STATUS_OK);
	assert_int_equal(kv_prefix_create(f->pool, NULL, &f->prefix, NULL), STATUS_OK);
	assert_int_equal(session_table_init(&f->sessions, &f->tenants, f->prefix, &now, 30000, 300000, 100), STATUS_OK);
	assert_int_equal(
		sched_init(&f->sched, f->pool, f->prefix, &f->sessions, &now, MAX_RUNNING, STEP, MAX_RUNNING + 8),
		STATUS_OK);
	merger = (struct pretended_merger){{pretend_sound, pretend_apart, pretend_join, pretend_move}, f->pool};
	f->sched.merger = &merger.base;
	assert_int_equal(census_init(&f->census, f->pool, &f->sched, &f->sessions, &f->tenants), STATUS_OK);
}

static inline void teardown(struct fixture *f)
{
	assert_int_equal(f->sched.n_running + f->sched.n_waiting, 0);
	while (f->sessions.n_sessions)
		session_remove(&f->sessions, f->sessions.heap[0]);
	census_free(&f->census);
	sched_free(&f->sched);
	session_table_free(&f->sessions);
	tenant_table_free(&f->tenants);
	kv_prefix_destroy(f->prefix);
	assert_int_equal(kv_pool_n_free(f->pool), kv_pool_n_pages(f->pool));
	assert_int_equal(kv_pool_destroy(f->pool), STATUS_OK);
	assert_int_equal(mem.allocated, 0);
}

/* Tokens whose KV is there for the session's next turn. */
static inline int32_t session_tokens(struct fixture *f, const struct session *s)
{
	struct engine_session_info info;
	session_describe(&f->sessions, s, f->pool, &info);
	return info.n_tokens;
}

static inline struct session *make_session_of(struct fixture *f, int32_t tenant, const char *id)
{
	struct engine_session_params p = {.tenant = tenant};
	struct session *s;
	snprintf(p.id, sizeof p.id, "%s", id);
	assert_int_equal(session_create(&f->sessions, &p, &s, NULL), STATUS_OK);
	return s;
}

static inline struct session *make_session(struct fixture *f, const char *id)
{
	return make_session_of(f, 0, id);
}

static inline struct tenant *make_tenant(struct fixture *f, int32_t id, int32_t max_pages)
{
	struct engine_tenant t = {.id = id, .limits.kv_bytes = (uint64_t)max_pages * PAGE * 8};
	assert_int_equal(tenant_set(&f->tenants, &t), STATUS_OK);
	return tenant_find(&f->tenants, id);
}

/* Counts every page anew: the books must be right to the page. */
static inline struct engine_kv audit(struct fixture *f)
{
	struct engine_kv kv;
	census_take(&f->census, &kv);
	assert_int_equal(kv.drift_pages, 0);
	assert_int_equal(kv.pages_running + kv.pages_queued + kv.pages_sessions + kv.pages_index + kv.pages_free,
	                 kv.pages_total);
	return kv;
}

static inline struct request *add_under(struct fixture *f, struct tenant *t, struct session *s, const int32_t *prompt,
                                        int32_t n, int32_t max_tokens, struct kv_policy policy)
{
	struct request *r = calloc(1, sizeof *r);
	r->spec = calloc(1, sizeof *r->spec);
	r->id = ++f->next_id;
	list_init(&r->link);
	for (int32_t i = 0; i < n; i++)
		token_buf_add(&r->tokens, prompt[i]);
	r->n_prompt = n;
	r->max_total = n + max_tokens;
	r->session = s;
	r->tenant = t;
	r->policy = policy;
	sched_add(&f->sched, r);
	return r;
}

static inline struct request *add_of(struct fixture *f, struct tenant *t, struct session *s, const int32_t *prompt,
                                     int32_t n, int32_t max_tokens)
{
	return add_under(f, t, s, prompt, n, max_tokens, (struct kv_policy){0});
}

static inline struct request *add(struct fixture *f, struct session *s, const int32_t *prompt, int32_t n,
                                  int32_t max_tokens)
{
	return add_of(f, s ? s->tenant : tenant_find(&f->tenants, 0), s, prompt, n, max_tokens);
}

/* Its KV is kept apart from now on. */
static inline void of_another_tenant(struct request *r)
{
	r->chain.root.bytes[0] ^= 1;
	kv_chain_free(&r->chain);
}

/* A prompt of n tokens that nothing else begins with. */
static inline struct request *add_fresh_of(struct fixture *f, struct tenant *t, struct session *s, int32_t n,
                                           int32_t max_tokens)
{
	int32_t prompt[1024];
	for (int32_t i = 0; i < n; i++)
		prompt[i] = (int32_t)f->next_id * 10000 + i;
	return add_of(f, t, s, prompt, n, max_tokens);
}

static inline struct request *add_fresh(struct fixture *f, struct session *s, int32_t n, int32_t max_tokens)
{
	return add_fresh_of(f, s ? s->tenant : tenant_find(&f->tenants, 0), s, n, max_tokens);
}

static inline void finish(struct fixture *f, struct request *r)
{
	sched_remove(&f->sched, r);
	request_destroy(r);
}

static inline int32_t *cell(struct fixture *f, int32_t page, int32_t position)
{
	return (int32_t *)((char *)kv_pool_slab(f->pool) + page * PAGE * 8) + position % PAGE * 2;
}

static inline int32_t *spot_cell(struct kv_merger *m, const struct kv_spot *s)
{
	return (int32_t *)((char *)kv_pool_slab(((struct pretended_merger *)m)->pool) + s->page * PAGE * 8) +
	       s->token * 2;
}

/* Marks the position of a cell that was computed after a policy had acted. */
enum { LOSSY = 1 << 24 };

/* Nothing that is not exact is in the index. */
static inline void assert_index_exact(struct fixture *f)
{
	for (int32_t page = 0; page < kv_pool_n_pages(f->pool); page++)
		for (int32_t i = 0; i < kv_prefix_page_tokens(f->prefix, page); i++)
			assert_true(cell(f, page, i)[1] < LOSSY);
}

/* The answer's next token, a function of all before it, as a model's is. */
static inline int32_t next_token(const struct request *r)
{
	uint32_t h = 17;
	for (size_t i = 0; i < r->tokens.n; i++)
		h = h * 31 + (uint32_t)r->tokens.ids[i];
	return (int32_t)(h % 50000);
}

/*
 * The position that stands at a place of the block table when position `row` is computed, by the words of kv/policy.h:
 * the first pages, and of the rest a window that moves by a jump once it is full.
 */
static inline int32_t position_at(const struct request *r, int32_t row, int32_t place)
{
	const struct kv_policy *p = &r->policy;
	int32_t page = row / PAGE, begin = 0;
	/* What went is nobody's to foresee: pages in front of the last time it acted have their number noted. */
	if (p->kind == KV_POLICY_EVICT && place / PAGE < r->kv.n_notes)
		return r->kv.notes[place / PAGE].number * PAGE + place % PAGE;
	if (p->kind == KV_POLICY_EVICT || (p->kind == KV_POLICY_MERGE && place >= r->kv.n_buckets))
		return place + r->kv.n_dropped * PAGE;
	/* The first token of a bucket is behind those of all before it. */
	for (int32_t i = 0; p->kind == KV_POLICY_MERGE && i < place; i++)
		begin += r->kv.buckets[i].n;
	if (p->kind == KV_POLICY_MERGE)
		return begin;
	if (p->kind == KV_POLICY_STREAMING && page >= p->acts_pages)
		begin = page - (page - p->acts_pages) % p->jump_pages -
		        (p->most_pages - p->first_pages - p->jump_pages) - p->first_pages;
	return place < p->first_pages * PAGE ? place : begin * PAGE + place;
}

/* Computes a built step as a device would, checks all it reads, and appends the new tokens. Returns the rows. */
static inline int32_t run_step(struct fixture *f)
{
	if (!sched_build(&f->sched))
		return 0;
	const struct batch *b = &f->sched.batch;
	int32_t rows = 0;
	assert_in_range(b->n_rows, 1, STEP);
	assert_in_range(b->n_seqs, 1, 2 * MAX_RUNNING);
	for (int32_t i = 0; i < b->n_seqs; i++) {
		const struct batch_seq *q = &b->seq[i];
		const struct step_part *part = &f->sched.part[i];
		struct request *r = part->request;
		assert_int_equal(q->first_row, rows);
		assert_true(q->n_pages * PAGE >= q->first_position + q->n_rows);
		for (int32_t k = 0; part->moves && k < q->n_rows; k++, rows++) {
			int32_t place = q->first_position + k, page = q->block_table[place / PAGE];
			assert_true(place < r->policy.first_pages * PAGE && r->kv.moved > 0);
			assert_int_equal(b->position[rows], r->kv.moved + place);
			assert_int_equal(b->token[rows], r->tokens.ids[place]);
			assert_int_equal(kv_pool_refs(f->pool, page), 1);
			cell(f, page, place)[0] = b->token[rows];
			cell(f, page, place)[1] = r->kv.moved + place + LOSSY;
		}
		if (part->moves)
			continue;
		/* Rows that choose do so from pages that earlier steps have filled. */
		if (q->choice.n_pages > 0 && q->first_position + q->n_rows > q->choice.from) {
			assert_true(q->first_position >= q->choice.from && q->choice.from >= r->n_prompt);
			assert_int_equal(q->first_position / PAGE, (q->first_position + q->n_rows - 1) / PAGE);
		}
		assert_int_equal(q->choice.n_pages, r->policy.kind == KV_POLICY_QUEST ? r->policy.most_pages : 0);
		for (int32_t k = 0; k < q->n_rows; k++, rows++) {
			int32_t place = q->first_position + k, p = r->kv.n_tokens + k,
				page = q->block_table[place / PAGE];
			assert_int_equal(position_at(r, p, place), p);
			assert_int_equal(b->position[rows], p);
			assert_int_equal(b->token[rows], r->tokens.ids[p]);
			/* Nobody else may see a page that is written, the index included. */
			assert_int_equal(kv_pool_refs(f->pool, page), 1);
			cell(f, page, place)[0] = b->token[rows];
			cell(f, page, place)[1] = p < request_exact(r) ? p : p + LOSSY;
			/* A row sees what its policy says, and no other row of the step more or less than by itself. */
			assert_int_equal(position_at(r, p, 0), position_at(r, r->kv.n_tokens, 0));
			assert_int_equal(position_at(r, p, place), position_at(r, r->kv.n_tokens, place));
		}
		assert_true(r->kv.n_buckets == 0
				    ? !q->plus
				    : q->plus && q->n_plus >= r->kv.n_buckets && r->policy.kind == KV_POLICY_MERGE);
		/* What a device would tell of its rows' attention. */
		assert_true(!q->mass || (r->policy.by_mass && r->kv.n_tokens >= kv_policy_weighs_from(&r->policy)));
		for (int32_t page = 0; q->mass && page < q->n_pages; page++)
			q->mass[page] += (uint64_t)((b->token[q->first_row] + page) % 7);
		for (int32_t place = 0; place < q->first_position + q->n_rows; place++) {
			int32_t p = position_at(r, r->kv.n_tokens, place);
			assert_int_equal(cell(f, q->block_table[place / PAGE], place)[0], r->tokens.ids[p]);
			p += place < r->policy.first_pages * PAGE ? r->kv.moved : 0;
			assert_int_equal(cell(f, q->block_table[place / PAGE], place)[1] % LOSSY, p);
			/* Nobody looks back further than is allowed, nor sees two positions in another order. */
			assert_true(r->policy.reach_pages == 0 ||
			            r->kv.n_tokens + q->n_rows - p <= r->policy.reach_pages * PAGE);
			assert_true(place == 0 ||
			            p > cell(f, q->block_table[(place - 1) / PAGE], place - 1)[1] % LOSSY);
		}
	}
	assert_int_equal(rows, b->n_rows);
	int32_t n_seqs = b->n_seqs;
	for (int32_t i = 0; i < n_seqs; i++) {
		const struct step_part *part = &f->sched.part[i];
		struct request *r = part->request;
		size_t n = r->tokens.n;
		bool full = take_part(&f->sched, part, next_token(r));
		if (r->tokens.n > n)
			assert_int_equal(part->n_outputs, 1);
		if (full)
			finish(f, r);
	}
	return rows;
}

static inline void run_all(struct fixture *f)
{
	for (int steps = 0; run_step(f) > 0; steps++)
		assert_true(steps < 100000);
	assert_int_equal(f->sched.n_running + f->sched.n_waiting, 0);
}
