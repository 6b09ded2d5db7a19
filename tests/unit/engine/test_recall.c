/*
 * What comes back to a window, over a pretended device: what a row leaves in its page depends on all that the row sees,
 * as KV does, and what a row would match is what the test says. So a page that is computed again is the same only if
 * each of its rows, and of all rows in front of it that it depends on, saw the same.
 */
#include "tests/unit/engine/sched_fixture.h"

#include "engine/kv/attic.h"

enum { PROMPT = 30 * PAGE + 5, PAGES_MAX = 64 };

struct house {
	struct fixture f;
	struct kv_tiers *tiers;
	struct kv_attics attics;
	uint32_t first[PAGES_MAX][2 * PAGE]; /* what pages of the conversation were like when they were computed first */
	bool seen[PAGES_MAX];
	int32_t wanted[8], n_wanted; /* numbers of pages, the best first */
	int32_t again_rows;          /* that have been computed */
};

/* A pool of n_pages, and a tier that holds n_below of them, and the bounds of all that there ever are. */
static void open_house(struct house *h, int32_t n_pages, int32_t n_below)
{
	struct kv_tier *tier[KV_TIER_KINDS] = {NULL};
	memset(h, 0, sizeof *h);
	setup(&h->f, n_pages);
	assert_int_equal(kv_pool_add_bounds(h->f.pool), STATUS_OK);
	const struct kv_tier_device device = {&mem.base, kv_pool_slab(h->f.pool), *kv_pool_layout(h->f.pool)};
	/* A page takes a unit of 4096 bytes there. */
	assert_int_equal(kv_tier_ram_create(&device, &now, (uint64_t)n_below * 4096, KV_FORM_F16, &tier[KV_TIER_RAM], NULL),
			 STATUS_OK);
	assert_int_equal(kv_tiers_create(h->f.pool, h->f.prefix, tier, &now, &h->tiers), STATUS_OK);
	assert_true(kv_attics_init(&h->attics, h->tiers, h->f.pool));
	h->f.sched.attics = &h->attics;
}

static void close_house(struct house *h)
{
	assert_int_equal(h->attics.used_bytes, 0);
	kv_tiers_destroy(h->tiers);
	teardown(&h->f);
}

/* 1 page stays, 6 are the window's, and 2 come back. */
static struct kv_policy recalling(int32_t choose_tokens, int32_t again_tokens)
{
	struct kv_policy p = kv_policy_streaming(1, 6, 7);
	p.back_pages = 2;
	p.choose_tokens = choose_tokens;
	p.again_tokens = again_tokens;
	return p;
}

static struct request *add_recalling(struct house *h, int32_t max_tokens, struct kv_policy policy)
{
	int32_t prompt[PROMPT];
	for (int32_t i = 0; i < PROMPT; i++)
		prompt[i] = 7 * i + 1;
	return add_under(&h->f, tenant_find(&h->f.tenants, 0), NULL, prompt, PROMPT, max_tokens, policy);
}

static void want(struct house *h, int32_t best, int32_t second)
{
	h->wanted[0] = best;
	h->wanted[1] = second;
	h->n_wanted = 2;
}

static const char *page_bytes(struct house *h, int32_t page)
{
	return (const char *)kv_pool_slab(h->f.pool) + (size_t)page * PAGE * 8;
}

/* All of its pages that are back are what they were when nothing was. */
static void check_back(struct house *h, const struct request *r)
{
	const struct kv_attic *a = r->kv.attic;
	assert_int_equal(r->kv.n_back, a ? a->n_back : 0);
	for (int32_t i = 0; i < r->kv.n_back; i++) {
		int32_t number = a->number[a->back[i]], page = r->kv.pages[r->policy.first_pages + i];
		assert_true(i == 0 || a->back[i] > a->back[i - 1]);
		assert_true(h->seen[number]);
		assert_memory_equal(page_bytes(h, page), h->first[number], PAGE * 8);
	}
}

static bool step(struct house *h)
{
	struct fixture *f = &h->f;
	if (!sched_build(&f->sched))
		return false;
	const struct batch *b = &f->sched.batch;
	assert_in_range(b->n_rows, 1, STEP);
	for (int32_t i = 0; i < b->n_seqs; i++) {
		const struct batch_seq *q = &b->seq[i];
		const struct step_part *part = &f->sched.part[i];
		struct request *r = part->request;
		assert_false(part->moves);
		if (!part->again)
			check_back(h, r);
		/* Nothing of its own is computed beside what is computed again for it. */
		assert_true(part->again == recall_under_way(r));
		h->again_rows += part->again ? part->n_rows : 0;
		for (int32_t k = 0; k < q->n_rows; k++) {
			int32_t place = q->first_position + k;
			uint32_t x = (uint32_t)b->token[q->first_row + k] * 2654435761u;
			assert_int_equal(b->token[q->first_row + k], r->tokens.ids[b->position[q->first_row + k]]);
			assert_int_equal(kv_pool_refs(f->pool, q->block_table[place / PAGE]), 1);
			for (int32_t seen = 0; seen < place; seen++)
				x = x * 31 + (uint32_t)cell(f, q->block_table[seen / PAGE], seen)[1];
			cell(f, q->block_table[place / PAGE], place)[0] = b->token[q->first_row + k];
			cell(f, q->block_table[place / PAGE], place)[1] = (int32_t)x;
			int32_t number = b->position[q->first_row + k] / PAGE;
			if (place % PAGE == PAGE - 1 && r->kv.n_back == 0 && number < PAGES_MAX && !h->seen[number]) {
				memcpy(h->first[number], page_bytes(h, q->block_table[place / PAGE]), PAGE * 8);
				h->seen[number] = true;
			}
		}
		for (int32_t k = 0; q->probe && k < q->probe->n_pages; k++)
			for (int32_t w = 0; w < h->n_wanted; w++)
				if (r->kv.attic->number[k] == h->wanted[w])
					q->probe->score[k] += (uint64_t)(10 - w);
	}
	int32_t n_seqs = b->n_seqs;
	for (int32_t i = 0; i < n_seqs; i++) {
		const struct step_part *part = &f->sched.part[i];
		if (take_part(&f->sched, part, next_token(part->request)))
			finish(f, part->request);
	}
	audit(f);
	return true;
}

static void run_until_answered(struct house *h, const struct request *r, int32_t n)
{
	while ((int32_t)r->tokens.n < r->n_prompt + n)
		assert_true(step(h));
}

/* Whether these are back, and no others. */
static void assert_back(const struct request *r, int32_t first, int32_t second)
{
	const struct kv_attic *a = r->kv.attic;
	assert_int_equal(r->kv.n_back, 2);
	assert_int_equal(a->number[a->back[0]], first);
	assert_int_equal(a->number[a->back[1]], second);
}

static void what_is_lost_is_computed_again_as_it_was(void **state)
{
	(void)state;
	static struct house h;
	open_house(&h, 60, 3);
	want(&h, 12, 4);
	struct request *r = add_recalling(&h, 20, recalling(0, 1000));
	run_until_answered(&h, r, 1);
	assert_back(r, 4, 12);
	/* The index knew the first seven pages, and so the fourth. */
	assert_int_equal(h.again_rows, (13 - 7) * PAGE);
	assert_int_equal(r->recall.again_tokens, h.again_rows);
	assert_int_equal(r->recall.again_pages, 1);
	assert_int_equal(h.attics.n_again, 1);
	assert_int_equal(h.attics.n_again_tokens, h.again_rows);
	/* It is kept again, and nobody else's. */
	assert_false(r->kv.attic->lost[r->kv.attic->back[1]]);
	while (step(&h))
		;
	assert_int_equal(h.again_rows, (13 - 7) * PAGE);
	struct kv_prefix_stats index;
	kv_prefix_stats(h.f.prefix, &index);
	assert_int_equal(index.n_pages, 7);
	close_house(&h);
}

static void it_takes_no_more_than_was_allowed(void **state)
{
	(void)state;
	static struct house h;
	/* The best is too far from what is known; the next one is not. */
	open_house(&h, 60, 3);
	want(&h, 12, 9);
	struct request *r = add_recalling(&h, 20, recalling(0, 3 * PAGE));
	run_until_answered(&h, r, 1);
	assert_int_equal(r->kv.n_back, 1);
	assert_int_equal(r->kv.attic->number[r->kv.attic->back[0]], 9);
	assert_int_equal(h.again_rows, 3 * PAGE);
	while (step(&h))
		;
	close_house(&h);
	/* Nor than the conversation has, and than there is room for: the pool holds one of both. */
	for (int32_t pages = 10; pages <= 19; pages += 9) {
		open_house(&h, pages, 3);
		want(&h, 12, 11);
		r = add_recalling(&h, 20, recalling(0, INT32_MAX));
		run_until_answered(&h, r, 1);
		assert_int_equal(r->kv.n_back, pages == 19 ? 2 : 0);
		assert_int_equal(h.again_rows > 0, pages == 19);
		while (step(&h))
			;
		assert_int_equal(h.f.sched.n_preemptions, 0);
		close_house(&h);
	}
}

static void what_it_computes_leaves_with_it(void **state)
{
	(void)state;
	static struct house h;
	open_house(&h, 60, 3);
	want(&h, 20, 12);
	struct request *r = add_recalling(&h, 20, recalling(0, 1000));
	while (!recall_under_way(r))
		assert_true(step(&h));
	while (r->recall.again.n_tokens < 14 * PAGE)
		assert_true(step(&h));
	/* One of the two is there. */
	assert_int_equal(r->kv.n_back, 1);
	int32_t rows = h.again_rows;
	assert_in_range(rows, 7 * PAGE, 13 * PAGE);
	finish(&h.f, r);
	assert_false(step(&h));
	assert_int_equal(h.again_rows, rows);
	audit(&h.f);
	close_house(&h);
}

static void whoever_is_set_back_comes_to_the_same(void **state)
{
	(void)state;
	static struct house h;
	/* An older one grows, and takes the pages. */
	open_house(&h, 18, 3);
	want(&h, 20, 12);
	struct request *old = add_fresh(&h.f, NULL, 3 * PAGE, 6 * PAGE);
	struct request *r = add_recalling(&h, 20, recalling(0, 1000));
	bool under_way = false;
	while (r->usage.n_preempted == 0) {
		under_way = recall_under_way(r);
		assert_true(step(&h));
		assert_true((int32_t)old->tokens.n < old->max_total);
	}
	assert_true(under_way);
	assert_false(recall_under_way(r));
	run_until_answered(&h, r, 1);
	assert_back(r, 12, 20);
	while (step(&h))
		;
	close_house(&h);
}

static void it_is_chosen_anew_as_the_answer_grows(void **state)
{
	(void)state;
	static struct house h;
	open_house(&h, 60, 60);
	want(&h, 3, 5);
	struct request *r = add_recalling(&h, 60, recalling(8, 0));
	run_until_answered(&h, r, 1);
	assert_back(r, 3, 5);
	assert_int_equal(h.attics.n_back, 2);
	/* What is wanted on is not copied again. */
	want(&h, 5, 17);
	run_until_answered(&h, r, 7);
	assert_back(r, 3, 5);
	run_until_answered(&h, r, 9);
	assert_back(r, 5, 17);
	assert_int_equal(h.attics.n_back, 3);
	/* What has left the window since may come as well: the answer's own pages, and those in front of it. */
	want(&h, 25, 26);
	run_until_answered(&h, r, 45);
	assert_back(r, 25, 26);
	assert_int_equal(r->recall.n_choices, 1 + 44 / 8);
	assert_int_equal(h.attics.n_choices, 1 + 44 / 8);
	assert_true(r->kv.n_pages <= 9);
	while (step(&h))
		;
	assert_int_equal(h.again_rows, 0);
	close_house(&h);
}

UNIT_MAIN(cmocka_unit_test(what_is_lost_is_computed_again_as_it_was),
	  cmocka_unit_test(it_takes_no_more_than_was_allowed), cmocka_unit_test(what_it_computes_leaves_with_it),
	  cmocka_unit_test(whoever_is_set_back_comes_to_the_same),
	  cmocka_unit_test(it_is_chosen_anew_as_the_answer_grows))
