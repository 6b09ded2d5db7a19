/*
 * The eviction engine against naive models of its policies: arrays that are searched from end to end, and counts that
 * are taken anew each time. A random workload of prompts runs through both; at each eviction they must choose the same
 * page.
 */
#include "tests/unit/unit.h"

#include <time.h>

#include "engine/kv/evict_policy.h"
#include "tests/unit/kv/evict_models.h"

/* ---- The workload ---- */

enum { MAX_SLOTS = 64, MAX_DEPTH = 8, MAX_HELD = 3, N_CLAIMS = 6 };

struct chain {
	int32_t slots[MAX_DEPTH];
	int n;
};

struct run {
	struct evict *e;
	const struct model *model;
	struct world w; /* what the model sees */
	uint64_t rng;
	struct chain held[MAX_HELD];
	int n_held;
	int open[N_CLAIMS]; /* in w.claims: of the sessions that live now */
	int64_t n_victims, n_same;
};

static uint64_t pick(struct run *r, uint64_t n)
{
	return unit_rand(&r->rng) % n;
}

static int32_t slot_with(const struct run *r, uint64_t key)
{
	for (int32_t s = 0; s < r->w.n_slots; s++) {
		if (r->w.items[s].resident && r->w.items[s].key == key)
			return s;
	}
	return EVICT_NONE;
}

static void hold(struct run *r, int32_t slot, int n)
{
	struct world_item *it = &r->w.items[slot];
	bool was_idle = it->refs == 0;
	it->refs += n;
	if (was_idle != (it->refs == 0))
		evict_idle(r->e, slot, it->refs == 0);
}

static void let_go(struct run *r, struct chain *c)
{
	/* From either end: the order in which holders leave must not matter. */
	bool forward = pick(r, 2);
	for (int i = 0; i < c->n; i++)
		hold(r, c->slots[forward ? i : c->n - 1 - i], -1);
	c->n = 0;
}

/* Evicts what the engine chooses, having compared; EVICT_NONE when both say that there is nothing. */
static int32_t evict_one(struct run *r)
{
	struct world *w = &r->w;
	r->model->advance(w);
	w->engine_ms = w->now_ms;
	int32_t slot = evict_victim(r->e, w->now_ms), wanted = EVICT_NONE;
	int n_candidates = 0;
	for (int32_t s = 0; s < w->n_slots; s++)
		n_candidates += world_is_candidate(w, s);
	if (n_candidates)
		wanted = r->model->victim(w, slot);
	if (slot == EVICT_NONE || wanted == EVICT_NONE) {
		assert_int_equal(slot, wanted);
		return EVICT_NONE;
	}
	assert_true(world_is_candidate(w, slot));
	r->n_victims++;
	r->n_same += slot == wanted;
	if (!r->model->nearly)
		assert_int_equal(slot, wanted);
	r->model->gone(w, slot);
	w->items[slot].resident = false;
	evict_remove(r->e, slot, EVICT_FOR_PROMPT);
	return slot;
}

static int32_t free_slot(struct run *r)
{
	for (int32_t s = 0; s < r->w.n_slots; s++) {
		if (!r->w.items[s].resident)
			return s;
	}
	return evict_one(r);
}

static void touch(struct run *r, int32_t slot, const struct evict_use *use)
{
	struct world *w = &r->w;
	struct world_item *it = &w->items[slot];
	bool fresh = !it->resident;
	r->model->advance(w);
	if (fresh)
		*it = (struct world_item){.resident = true, .key = use->key, .parent = use->parent, .refs = 1};
	it->order = ++w->order;
	it->uses++;
	r->model->used(w, slot, use, fresh);
	it->used_ms = w->engine_ms = w->now_ms;
	evict_touch(r->e, slot, use);
}

/* A random prompt: a few beginnings are common, ends are not. It stays held for a while, or not. */
static void run_prompt(struct run *r)
{
	struct chain c = {.n = 0};
	struct evict_use use = {.key = 1, .parent = EVICT_NONE, .now_ms = r->w.now_ms, .hints = pick(r, 3) == 0};
	int depth = 1 + (int)pick(r, MAX_DEPTH);
	if (pick(r, 4) == 0)
		use.claim = r->w.claims[r->open[pick(r, N_CLAIMS)]].name;
	for (int i = 0; i < depth; i++) {
		use.key = (use.key * 31 + 1 + pick(r, i < 3 ? 2 : 6)) * 0x9E3779B97F4A7C15u;
		use.distance = depth - 1 - i;
		int32_t slot = slot_with(r, use.key);
		if (slot != EVICT_NONE)
			hold(r, slot, 1);
		else if ((slot = free_slot(r)) == EVICT_NONE)
			break;
		touch(r, slot, &use);
		c.slots[c.n++] = slot;
		use.parent = slot;
	}
	if (r->n_held == MAX_HELD || (r->n_held && pick(r, 2))) {
		let_go(r, &r->held[0]);
		r->held[0] = r->held[--r->n_held];
	}
	if (pick(r, 3) == 0)
		r->held[r->n_held++] = c;
	else
		let_go(r, &c);
}

/* Something is learned of an item after its use. */
static void tell(struct run *r)
{
	int32_t slot = (int32_t)pick(r, (uint64_t)r->w.n_slots);
	unsigned hints = pick(r, 2) ? EVICT_SHORT_ANSWER : 0;
	if (!r->w.items[slot].resident)
		return;
	evict_hint(r->e, slot, hints);
	if (r->model->hint)
		r->model->hint(&r->w, slot, hints);
}

/* Sessions begin, show signs of life, and end. */
static void open_claim(struct run *r, int at)
{
	int64_t until_ms = r->w.now_ms + (int64_t)pick(r, 40000);
	int c = r->open[at] = ++r->w.n_claims;
	assert_true(c < WORLD_CLAIMS);
	r->w.claims[c].name = evict_claim_open(r->e, until_ms);
	r->w.claims[c].until_ms = until_ms;
	assert_true(r->w.claims[c].name != 0);
}

static void live(struct run *r)
{
	int at = (int)pick(r, N_CLAIMS), c = r->open[at];
	int64_t until_ms = r->w.now_ms + (int64_t)pick(r, 90000);
	if (pick(r, 3)) {
		evict_claim_renew(r->e, r->w.claims[c].name, until_ms);
		r->w.claims[c].until_ms = until_ms;
		return;
	}
	evict_claim_close(r->e, r->w.claims[c].name);
	evict_claim_renew(r->e, r->w.claims[c].name, INT64_MAX); /* too late */
	r->w.claims[c].until_ms = INT64_MIN;
	open_claim(r, at);
}

static void pass_time(struct run *r)
{
	static const int64_t steps[] = {0, 0, 0, 1, 40, 300, 2500, 20000, 700000};
	r->w.now_ms += steps[pick(r, pick(r, 50) ? 7 : 9)] * (int64_t)(1 + pick(r, 4));
}

/*
 * Counts the members of a queue, having checked that children come after their parent and that the path down the right
 * is the shortest there is: the bounds of the engine rest on that.
 */
static int32_t check_heap(const struct evict *e, int32_t i, int32_t up)
{
	if (i == EVICT_NONE)
		return 0;
	const struct evict_item *it = &e->items[i];
	int32_t left = it->heap.left, right = it->heap.right;
	int left_depth = left == EVICT_NONE ? 0 : e->items[left].heap_depth;
	int right_depth = right == EVICT_NONE ? 0 : e->items[right].heap_depth;
	assert_int_equal(it->heap.up, up);
	assert_true(left_depth >= right_depth);
	assert_int_equal(it->heap_depth, right_depth + 1);
	if (up != EVICT_NONE) {
		const struct evict_item *above = &e->items[up];
		assert_true(above->rank < it->rank || (above->rank == it->rank && above->order < it->order));
	}
	return 1 + check_heap(e, left, i) + check_heap(e, right, i);
}

static void check_queues(const struct evict *e, int32_t n_candidates)
{
	for (int32_t q = evict_busy_queue(e, 0); q != EVICT_NONE; q = evict_busy_queue(e, q + 1))
		n_candidates -= check_heap(e, e->roots[q], EVICT_NONE);
	assert_int_equal(n_candidates, 0);
}

static void compare(const struct model *model, int32_t n_slots, int n_prompts, uint64_t seed)
{
	struct run r = {.model = model, .rng = seed};
	struct evict_stats st;
	r.w.n_slots = n_slots;
	r.w.now_ms = 5000;
	assert_int_equal(evict_create(model->name, n_slots, &r.e, NULL), STATUS_OK);
	model->init(&r.w);
	assert_int_equal(evict_claims_create(r.e, N_CLAIMS), STATUS_OK);
	for (int c = 0; c < N_CLAIMS; c++)
		open_claim(&r, c);
	assert_int_equal(evict_claim_open(r.e, INT64_MAX), 0);
	for (int i = 0; i < n_prompts; i++) {
		run_prompt(&r);
		pass_time(&r);
		if (pick(&r, 4) == 0)
			tell(&r);
		if (pick(&r, 4) == 0)
			live(&r);
		if (pick(&r, 200) == 0) {
			/* Everything that can goes, leaf after leaf. */
			while (evict_one(&r) != EVICT_NONE)
				;
		}
		int32_t n_items = 0, n_candidates = 0;
		for (int32_t s = 0; s < n_slots; s++) {
			n_items += r.w.items[s].resident;
			n_candidates += world_is_candidate(&r.w, s);
			assert_int_equal(evict_has(r.e, s), r.w.items[s].resident);
		}
		evict_stats(r.e, &st);
		assert_int_equal(st.n_items, n_items);
		assert_int_equal(st.n_candidates, n_candidates);
		check_queues(r.e, n_candidates);
		assert_int_equal(st.inserted, (uint64_t)st.n_items + st.removed[EVICT_FOR_PROMPT]);
		assert_true(st.n_ghosts <= model->max_ghosts(n_slots));
	}
	assert_true(r.n_victims > n_prompts / 10);
	/* Where rounding may decide between equals, it rarely does. */
	assert_true(r.n_same >= r.n_victims - r.n_victims / 100);
	while (r.n_held)
		let_go(&r, &r.held[--r.n_held]);
	while (evict_one(&r) != EVICT_NONE)
		;
	evict_stats(r.e, &st);
	assert_int_equal(st.n_items, 0);
	assert_int_equal(st.n_candidates, 0);
	model->free(&r.w);
	evict_destroy(r.e);
}

static void each_policy_chooses_what_its_definition_says(void **state)
{
	(void)state;
	static const int32_t sizes[] = {1, 7, 20, MAX_SLOTS};
	for (size_t i = 0; models[i]; i++) {
		for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
			compare(models[i], sizes[s], 4000, 17 + i * 10 + s);
	}
}

static void every_policy_has_a_model(void **state)
{
	(void)state;
	size_t n_models = 0, n = 0;
	while (models[n_models])
		n_models++;
	while (evict_policy_name(n))
		n++;
	assert_int_equal(n, n_models);
}

/* ---- What holds for all ---- */

static struct evict *make(const char *policy, int32_t n_slots)
{
	struct evict *e;
	assert_int_equal(evict_create(policy, n_slots, &e, NULL), STATUS_OK);
	return e;
}

static void insert(struct evict *e, int32_t slot, uint64_t key, int32_t parent, int64_t now_ms)
{
	evict_touch(e, slot, &(struct evict_use){.key = key, .parent = parent, .now_ms = now_ms});
}

static void unknown_names_and_sizes_are_refused(void **state)
{
	(void)state;
	struct evict *e;
	struct error err;
	assert_int_equal(evict_create("mru", 8, &e, &err), STATUS_INVALID);
	assert_non_null(strstr(err.message, "\"mru\""));
	assert_string_equal(err.param, "kv-policy");
	assert_int_equal(evict_create(NULL, 0, &e, &err), STATUS_INVALID);
	assert_int_equal(evict_create("lru", INT32_MAX, &e, &err), STATUS_INVALID);
	assert_string_equal(evict_policy_find(NULL), evict_policy_name(0));
	assert_string_equal(evict_policy_find("default"), evict_policy_name(0));
	assert_null(evict_policy_find("mru"));
}

static void nothing_held_and_nothing_with_children_is_chosen(void **state)
{
	(void)state;
	for (size_t i = 0; evict_policy_name(i); i++) {
		struct evict *e = make(evict_policy_name(i), 4);
		insert(e, 0, 100, EVICT_NONE, 1000);
		insert(e, 1, 101, 0, 1000);
		assert_int_equal(evict_victim(e, 2000), EVICT_NONE);
		evict_idle(e, 0, true);
		assert_int_equal(evict_victim(e, 2000), EVICT_NONE);
		evict_idle(e, 1, true);
		assert_int_equal(evict_victim(e, 2000), 1);
		evict_idle(e, 1, false);
		assert_int_equal(evict_victim(e, 2000), EVICT_NONE);
		evict_remove(e, 1, EVICT_FOR_DECODE);
		assert_int_equal(evict_victim(e, 2000), 0);
		evict_destroy(e);
	}
}

static void time_that_goes_back_stands_still(void **state)
{
	(void)state;
	for (size_t i = 0; evict_policy_name(i); i++) {
		struct evict *e = make(evict_policy_name(i), 4);
		for (int32_t s = 0; s < 4; s++) {
			insert(e, s, (uint64_t)s, EVICT_NONE, 1000000 - s * 300000);
			evict_idle(e, s, true);
		}
		for (int n = 0; n < 4; n++) {
			int32_t slot = evict_victim(e, -5);
			assert_int_not_equal(slot, EVICT_NONE);
			evict_remove(e, slot, EVICT_FOR_PROMPT);
		}
		assert_int_equal(evict_victim(e, INT64_MAX / 4), EVICT_NONE);
		evict_destroy(e);
	}
}

static void ghosts_are_known_again_and_bounded(void **state)
{
	(void)state;
	struct evict_stats st;
	enum { SLOTS = 50, GHOSTS = SLOTS + 65536, KEYS = 200000 };
	struct evict *e = make("retention", SLOTS);
	uint64_t key_at[SLOTS], first_gone = 0, last_gone = 0;
	for (uint64_t key = 1; key <= KEYS; key++) {
		int32_t slot = (int32_t)key - 1;
		if (key > SLOTS) {
			slot = evict_victim(e, (int64_t)key);
			last_gone = key_at[slot];
			first_gone = first_gone ? first_gone : last_gone;
			evict_remove(e, slot, EVICT_FOR_PROMPT);
		}
		key_at[slot] = key;
		insert(e, slot, key, EVICT_NONE, (int64_t)key);
		evict_idle(e, slot, true);
	}
	evict_stats(e, &st);
	assert_int_equal(st.n_ghosts, GHOSTS);
	assert_int_equal(st.revived, 0);
	int32_t slot = evict_victim(e, KEYS);
	evict_remove(e, slot, EVICT_FOR_PROMPT);
	insert(e, slot, last_gone, EVICT_NONE, KEYS);
	evict_stats(e, &st);
	assert_int_equal(st.revived, 1);
	evict_remove(e, slot, EVICT_FOR_PROMPT);
	insert(e, slot, first_gone, EVICT_NONE, KEYS); /* long forgotten */
	evict_stats(e, &st);
	assert_int_equal(st.revived, 1);
	evict_destroy(e);
}

static void the_same_calls_choose_the_same_victims(void **state)
{
	(void)state;
	for (size_t i = 0; evict_policy_name(i); i++) {
		struct evict *a = make(evict_policy_name(i), 30), *b = make(evict_policy_name(i), 30);
		uint64_t rng = 5;
		for (int n = 0; n < 5000; n++) {
			uint64_t key = unit_rand(&rng) % 100;
			int32_t slot = n < 30 ? n : evict_victim(a, n * 50);
			if (n >= 30) {
				assert_int_equal(evict_victim(b, n * 50), slot);
				evict_remove(a, slot, EVICT_FOR_PROMPT);
				evict_remove(b, slot, EVICT_FOR_PROMPT);
			}
			insert(a, slot, key, EVICT_NONE, n * 50);
			insert(b, slot, key, EVICT_NONE, n * 50);
			evict_idle(a, slot, true);
			evict_idle(b, slot, true);
		}
		evict_destroy(a);
		evict_destroy(b);
	}
}

/* ---- What the default promises ---- */

static void a_cold_start_is_like_lru(void **state)
{
	(void)state;
	struct evict *e = make("retention", 8);
	static const int32_t order[] = {3, 1, 6, 0, 7, 2, 5, 4};
	for (int i = 0; i < 8; i++) {
		insert(e, order[i], (uint64_t)order[i], EVICT_NONE, 4000 * i);
		evict_idle(e, order[i], true);
	}
	for (int i = 0; i < 8; i++) {
		assert_int_equal(evict_victim(e, 40000), order[i]);
		evict_remove(e, order[i], EVICT_FOR_PROMPT);
	}
	evict_destroy(e);
}

/*
 * Each second a page comes that will be used once more, a minute later, and one that never will: its prompt had a short
 * answer. 180 uses lie between the two of a page and 100 pages fit, so lru would find none again.
 */
static void it_learns_what_comes_back(void **state)
{
	(void)state;
	enum { SLOTS = 100, SECONDS = 5000, PAUSE = 60 };
	struct evict *e = make("retention", SLOTS);
	uint64_t key_at[SLOTS] = {0};
	int32_t n_used = 0, n_asked = 0, n_found = 0;
	for (int n = 1; n < SECONDS; n++) {
		uint64_t keys[3] = {(uint64_t)n * 2, (uint64_t)n * 2 + 1, n > PAUSE ? (uint64_t)(n - PAUSE) * 2 : 0};
		for (int k = 0; k < 3 && keys[k]; k++) {
			int32_t slot = 0;
			while (slot < n_used && key_at[slot] != keys[k])
				slot++;
			n_asked += k == 2 && n > SECONDS / 2;
			n_found += k == 2 && n > SECONDS / 2 && slot < n_used;
			if (slot == n_used && n_used < SLOTS) {
				n_used++;
			} else if (slot == n_used) {
				slot = evict_victim(e, n * 1000);
				evict_remove(e, slot, EVICT_FOR_PROMPT);
			}
			key_at[slot] = keys[k];
			evict_touch(e, slot,
			            &(struct evict_use){.key = keys[k],
			                                .parent = EVICT_NONE,
			                                .now_ms = n * 1000,
			                                .hints = k == 1 ? EVICT_SHORT_ANSWER : 0});
			evict_idle(e, slot, true);
		}
	}
	assert_true(n_found > n_asked * 95 / 100);
	evict_destroy(e);
}

static void a_live_session_raises_the_worth_of_its_pages_and_pins_none(void **state)
{
	(void)state;
	struct evict *e = make("retention", 4);
	uint64_t claims[2];
	assert_int_equal(evict_claims_create(e, 2), STATUS_OK);
	claims[0] = evict_claim_open(e, 40000);
	claims[1] = evict_claim_open(e, 10000);
	/* Three pages of the same age, one claimed for 20 s more, one whose claim has ended. */
	for (int32_t s = 0; s < 3; s++) {
		evict_touch(e, s, &(struct evict_use){.key = (uint64_t)s,
		                                       .parent = EVICT_NONE,
		                                       .now_ms = s,
		                                       .claim = s < 2 ? claims[s] : 0});
		evict_idle(e, s, true);
	}
	assert_int_equal(evict_victim(e, 20000), 1);
	evict_remove(e, 1, EVICT_FOR_PROMPT);
	evict_remove(e, 2, EVICT_FOR_PROMPT);
	/* Signs of life move the end of a claim, for all of its pages; it ends with its session. */
	for (int32_t s = 1; s < 3; s++) {
		uint64_t claim = s == 1 ? claims[1] : 0;
		evict_touch(
			e, s,
			&(struct evict_use){
				.key = (uint64_t)s + 10, .parent = EVICT_NONE, .now_ms = 20000 + s, .claim = claim});
		evict_idle(e, s, true);
	}
	evict_claim_renew(e, claims[0], 22000);
	evict_claim_renew(e, claims[1], 40000);
	assert_int_equal(evict_victim(e, 24000), 0);
	evict_forget(e, 0);
	assert_int_equal(evict_victim(e, 24000), 2);
	evict_claim_close(e, claims[1]);
	/* A new session that gets its place does not vouch for them; a page is looked at again when it grows older. */
	assert_true(evict_claim_open(e, INT64_MAX) != claims[1]);
	assert_int_equal(evict_victim(e, 30000), 1);
	evict_forget(e, 1);
	evict_forget(e, 2);
	claims[0] = evict_claim_open(e, INT64_MAX);
	assert_int_equal(claims[0], 0);
	evict_touch(e, 0, &(struct evict_use){.key = 20, .parent = EVICT_NONE, .now_ms = 24000, .claim = claims[1]});
	evict_idle(e, 0, true);
	/* Against a page used a moment ago it loses, alive or not. */
	insert(e, 3, 3, EVICT_NONE, 38000);
	evict_idle(e, 3, true);
	assert_int_equal(evict_victim(e, 39000), 0);
	evict_destroy(e);
}

/* ---- Cost ---- */

static double cpu_s(void)
{
	struct timespec t;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/*
 * CPU seconds for each block of prompts of 32 blocks, of twice as many kinds as fit into n_slots, some of them
 * frequent: a touch, and an eviction for each block that is not there. What is measured begins when the cache is full.
 */
static double seconds_per_block(const char *policy, int32_t n_slots, int n_prompts)
{
	enum { LEN = 32 };
	int32_t n_kinds = n_slots / LEN * 2, n_used = 0;
	struct evict *e = make(policy, n_slots);
	int32_t(*slots)[LEN] = malloc((size_t)n_kinds * sizeof *slots);
	int32_t *block_at = malloc((size_t)n_slots * sizeof *block_at); /* kind * LEN + index */
	uint64_t rng = 9, n_blocks = 0;
	double start = 0;
	memset(slots, -1, (size_t)n_kinds * sizeof *slots);
	for (int n = 0; n < n_prompts;) {
		uint64_t a = unit_rand(&rng) % (uint64_t)n_kinds, b = unit_rand(&rng) % (uint64_t)n_kinds;
		int32_t kind = (int32_t)(a < b ? a : b), *c = slots[kind];
		int64_t now_ms = (int64_t)(n_blocks++) * 20;
		if (n == 0 && n_used == n_slots)
			start = cpu_s();
		n += n_used == n_slots;
		for (int i = 0; i < LEN && c[i] != EVICT_NONE; i++)
			evict_idle(e, c[i], false);
		for (int i = 0; i < LEN; i++) {
			if (c[i] == EVICT_NONE && n_used < n_slots) {
				c[i] = n_used++;
			} else if (c[i] == EVICT_NONE) {
				c[i] = evict_victim(e, now_ms);
				evict_remove(e, c[i], EVICT_FOR_PROMPT);
				slots[block_at[c[i]] / LEN][block_at[c[i]] % LEN] = EVICT_NONE;
			}
			block_at[c[i]] = kind * LEN + i;
			evict_touch(e, c[i],
			            &(struct evict_use){.key = (uint64_t)block_at[c[i]],
			                                .parent = i ? c[i - 1] : EVICT_NONE,
			                                .distance = LEN - 1 - i,
			                                .now_ms = now_ms});
		}
		for (int i = 0; i < LEN; i++)
			evict_idle(e, c[i], true);
	}
	double took = cpu_s() - start;
	struct evict_stats st;
	evict_stats(e, &st);
	assert_true(st.removed[EVICT_FOR_PROMPT] > (uint64_t)n_prompts * LEN / 4);
	evict_destroy(e);
	free(slots);
	free(block_at);
	return took / n_prompts / LEN;
}

/*
 * CPU seconds for one read of memory that depends on the one before, at random among as many lines as the engine has
 * items.
 */
static double seconds_per_read(void)
{
	enum { LINES = 265536, LINE_INTS = 16, READS = 400000 };
	int32_t *lines = calloc((size_t)LINES * LINE_INTS, sizeof *lines);
	uint64_t rng = 3;
	/* One cycle through all of them (Sattolo's shuffle). */
	for (int32_t i = 0; i < LINES; i++)
		lines[i * LINE_INTS] = i;
	for (int32_t i = LINES - 1; i > 0; i--) {
		int32_t j = (int32_t)(unit_rand(&rng) % (uint64_t)i), at = lines[i * LINE_INTS];
		lines[i * LINE_INTS] = lines[j * LINE_INTS];
		lines[j * LINE_INTS] = at;
	}
	double start = cpu_s();
	int32_t at = 0;
	for (int i = 0; i < READS; i++)
		at = lines[at * LINE_INTS];
	double took = cpu_s() - start;
	assert_true(at >= 0);
	free(lines);
	return took / READS;
}

/*
 * One to two microseconds a block, said so that it holds on any machine: eviction is walking about in memory, so its
 * measure is a read of memory at random. Nor does it grow with the size of the cache as a search would, by 31.
 */
static void a_block_costs_some_reads_of_memory(void **state)
{
	(void)state;
#ifdef __SANITIZE_THREAD__
	/* Every access is a call there, but not every read of memory. */
	skip();
#endif
	for (size_t i = 0; evict_policy_name(i); i++) {
		const char *policy = evict_policy_name(i);
		double read = seconds_per_read(), small = seconds_per_block(policy, 3200, 3000),
		       large = seconds_per_block(policy, 100000, 3000);
		print_message("%-9s %.2f us a block at 100,000, %.2f at 3,200; a read takes %.3f us\n", policy,
		              large * 1e6, small * 1e6, read * 1e6);
		assert_true(large < 30 * read);
		assert_true(large < 8 * small);
	}
}

UNIT_MAIN(cmocka_unit_test(each_policy_chooses_what_its_definition_says), cmocka_unit_test(every_policy_has_a_model),
          cmocka_unit_test(unknown_names_and_sizes_are_refused),
          cmocka_unit_test(nothing_held_and_nothing_with_children_is_chosen),
          cmocka_unit_test(time_that_goes_back_stands_still), cmocka_unit_test(ghosts_are_known_again_and_bounded),
          cmocka_unit_test(the_same_calls_choose_the_same_victims), cmocka_unit_test(a_cold_start_is_like_lru),
          cmocka_unit_test(it_learns_what_comes_back),
          cmocka_unit_test(a_live_session_raises_the_worth_of_its_pages_and_pins_none),
          cmocka_unit_test(a_block_costs_some_reads_of_memory))
