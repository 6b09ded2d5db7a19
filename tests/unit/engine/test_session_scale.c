/*
 * A million sessions with lifetimes, heartbeats, touches and deletes at random, on a clock that the test moves, against
 * a plain list of deadlines. Expiry is exact, and what it costs is counted, not timed: places written in the heap for
 * each session that is made, removed or looked at are at most the depth of the heap, a heartbeat and a look-up write
 * none, and nobody is looked at who has neither expired nor been touched since the last look.
 */
#include "tests/unit/unit.h"

#include <stdio.h>

#include "engine/session.h"

enum { MOST = 1000000, TICKS = 400, EACH_TICK = 1000 };

static struct clock now;

static struct model {
	int64_t created_ms, seen_ms, heartbeat_ms, ttl_ms;
	bool there; /* in the table, expired or not */
} model[MOST];

static int64_t deadline(const struct model *m)
{
	int64_t by_ttl = m->created_ms + m->ttl_ms, by_heartbeat = m->seen_ms + m->heartbeat_ms;
	return by_ttl < by_heartbeat ? by_ttl : by_heartbeat;
}

static void name_of(int i, char id[ENGINE_SESSION_ID_MAX + 1])
{
	snprintf(id, ENGINE_SESSION_ID_MAX + 1, "n%d", i);
}

/* Length of the longest way from the root of a heap of n to a leaf, and one place for what is put at its end. */
static uint64_t depth_of(size_t n)
{
	uint64_t depth = 2;
	while (n >>= 1)
		depth++;
	return depth;
}

static void make(struct session_table *t, int i, uint64_t *rng)
{
	struct model *m = &model[i];
	struct engine_session_params p = {0};
	struct session *s;
	uint64_t before = t->heap_moves;
	m->heartbeat_ms = 1 + (int64_t)(unit_rand(rng) % 30000);
	m->ttl_ms = 1 + (int64_t)(unit_rand(rng) % 300000);
	m->created_ms = m->seen_ms = clock_now_ms(&now);
	m->there = true;
	name_of(i, p.id);
	p.heartbeat_timeout_ms = m->heartbeat_ms;
	p.ttl_ms = m->ttl_ms;
	assert_int_equal(session_create(t, &p, &s, NULL), STATUS_OK);
	assert_true(t->heap_moves - before <= depth_of(t->n_sessions));
}

static struct session *find(struct session_table *t, int i)
{
	char id[ENGINE_SESSION_ID_MAX + 1];
	name_of(i, id);
	uint64_t before = t->heap_moves + t->heap_looks;
	struct session *s = session_find(t, 0, id);
	assert_true((s != NULL) == (model[i].there && deadline(&model[i]) > clock_now_ms(&now)));
	assert_int_equal(t->heap_moves + t->heap_looks, before);
	return s;
}

static void remove_one(struct session_table *t, struct session *s)
{
	uint64_t before = t->heap_moves, depth = depth_of(t->n_sessions);
	model[atoi(s->id + 1)].there = false;
	session_remove(t, s);
	assert_true(t->heap_moves - before <= depth + 1); /* and one place for the last, which takes its own */
}

/* Takes out who has expired; the number of them. */
static uint64_t collect(struct session_table *t)
{
	uint64_t n = 0;
	for (;;) {
		uint64_t looks = t->heap_looks, moves = t->heap_moves;
		struct session *s = session_next_expired(t);
		assert_true(t->heap_moves - moves <= (t->heap_looks - looks) * depth_of(t->n_sessions));
		if (!s)
			return n;
		assert_true(deadline(&model[atoi(s->id + 1)]) <= clock_now_ms(&now));
		remove_one(t, s);
		n++;
	}
}

static size_t alive(int n)
{
	size_t count = 0;
	for (int i = 0; i < n; i++)
		count += model[i].there && deadline(&model[i]) > clock_now_ms(&now);
	return count;
}

static void simulate(int n)
{
	struct tenant_table tenants;
	struct session_table t;
	uint64_t rng = 5, n_expired = 0, n_touched = 0, n_changed;
	memset(model, 0, sizeof model);
	clock_manual_init(&now, 1000000000);
	assert_int_equal(tenant_table_init(&tenants, 4096), STATUS_OK);
	assert_int_equal(session_table_init(&t, &tenants, NULL, &now, 30000, 300000, n), STATUS_OK);
	for (int i = 0; i < n; i++)
		make(&t, i, &rng);
	for (int tick = 0; tick < TICKS; tick++) {
		/* Now and then to the very millisecond before somebody's end, and to the end. */
		int i = (int)(unit_rand(&rng) % (uint64_t)n);
		int64_t ms = (int64_t)(unit_rand(&rng) % 200), left = deadline(&model[i]) - clock_now_ms(&now);
		if (model[i].there && left > 1 && left <= 2000) {
			clock_advance(&now, (left - 1) * 1000000);
			assert_non_null(find(&t, i));
			ms = 1;
		}
		clock_advance(&now, ms * 1000000);
		for (int k = 0; k < EACH_TICK; k++) {
			i = (int)(unit_rand(&rng) % (uint64_t)n);
			struct session *s = find(&t, i);
			switch (s ? unit_rand(&rng) % 8 : 8) {
			case 0:
				remove_one(&t, s);
				break;
			case 8:
				if (!model[i].there)
					make(&t, i, &rng);
				break;
			default:
				session_touch(&t, s);
				model[i].seen_ms = clock_now_ms(&now);
				n_touched++;
			}
		}
		n_expired += collect(&t);
		assert_true(session_next_deadline_ms(&t) > clock_now_ms(&now));
		if (tick % 40 == 0)
			assert_int_equal(t.n_sessions, alive(n));
	}
	assert_int_equal(t.n_sessions, alive(n));
	assert_true(n_expired > (uint64_t)n / 10);
	/* A look finds somebody who has expired, or who was touched since the last one. */
	assert_true(t.heap_looks <= n_expired + n_touched);
	n_changed = t.created * 2 - t.n_sessions + t.heap_looks;
	double each = (double)t.heap_moves / (double)n_changed;
	assert_true(each < (double)depth_of((size_t)n));
	print_message("%d sessions: %llu made, %llu expired, %llu touched; %.1f places written for each change, the "
	              "heap is %llu "
	              "deep\n",
	              n, (unsigned long long)t.created, (unsigned long long)n_expired, (unsigned long long)n_touched,
	              each, (unsigned long long)depth_of((size_t)n));
	while (t.n_sessions)
		remove_one(&t, t.heap[0]);
	session_table_free(&t);
	tenant_table_free(&tenants);
}

static void expiry_is_exact_and_logarithmic_up_to_a_million(void **state)
{
	(void)state;
	static const int sizes[] = {1000, 31623, MOST};
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
		simulate(sizes[i]);
}

UNIT_MAIN(cmocka_unit_test(expiry_is_exact_and_logarithmic_up_to_a_million))
