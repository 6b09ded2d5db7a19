/* Who is told of a session's KV, when, and how often. See sched_fixture.h for the device. */
#include "tests/unit/engine/sched_fixture.h"

#include "engine/session_watch.h"

struct watched {
	struct fixture f;
	struct session_watches w;
	struct engine_event *last; /* the latest CONTEXT or ERROR */
};

static void start(struct watched *t, int32_t n_pages)
{
	setup(&t->f, n_pages);
	session_watches_init(&t->w, &t->f.sessions, t->f.pool, &t->f.sched.parking);
	t->last = NULL;
}

static void stop(struct watched *t)
{
	engine_event_free(t->last);
	session_watches_free(&t->w);
	teardown(&t->f);
}

static void pass_ms(int64_t ms)
{
	clock_advance(&now, ms * 1000000);
}

/* How many events there are to tell now; the last of them stays in t->last. */
static int tell(struct watched *t)
{
	struct list out;
	int n = 0;
	list_init(&out);
	bool any = session_watches_tell(&t->w, clock_now_ms(&now), &out);
	for (struct list *l; (l = list_pop_front(&out)); n++) {
		engine_event_free(t->last);
		t->last = list_entry(l, struct engine_event, link);
		assert_int_equal(t->last->type, ENGINE_EVENT_CONTEXT);
	}
	assert_true(any == (n > 0));
	return n;
}

static void it_is_told_at_once_and_then_when_something_changes(void **state)
{
	(void)state;
	struct watched t;
	start(&t, 50);
	struct session *s = make_session(&t.f, "s"), *other = make_session(&t.f, "other");
	assert_int_equal(session_watch(&t.w, 7, s), STATUS_OK);
	assert_int_equal(tell(&t), 1);
	assert_int_equal(t.last->request_id, 7);
	assert_string_equal(t.last->sessions[0].id, "s");
	pass_ms(1000);
	assert_int_equal(tell(&t), 0);
	assert_true(session_watches_due_ms(&t.w) == INT64_MAX);
	/* What concerns another is looked at, and found to be nothing. */
	add_fresh(&t.f, other, 40, 1);
	run_all(&t.f);
	pass_ms(1000);
	assert_int_equal(tell(&t), 0);
	add_fresh(&t.f, s, 40, 1);
	assert_int_equal(tell(&t), 1);
	assert_int_equal(t.last->sessions[0].n_waiting, 1);
	run_all(&t.f);
	pass_ms(SESSION_WATCH_MS);
	assert_int_equal(tell(&t), 1);
	assert_int_equal(t.last->sessions[0].n_tokens, 40);
	assert_int_equal(t.last->sessions[0].n_requests, 1);
	stop(&t);
}

static void changes_are_put_together(void **state)
{
	(void)state;
	struct watched t;
	start(&t, 50);
	struct session *s = make_session(&t.f, "s");
	assert_int_equal(session_watch(&t.w, 7, s), STATUS_OK);
	add_fresh(&t.f, s, 20, 60);
	int told = tell(&t), ms = 0;
	while (run_step(&t.f)) {
		pass_ms(10);
		ms += 10;
		int n = tell(&t);
		told += n;
		/* What is not told yet has its time. */
		if (!n)
			assert_true(session_watches_due_ms(&t.w) <= clock_now_ms(&now) + SESSION_WATCH_MS);
	}
	assert_in_range(told, ms / SESSION_WATCH_MS, ms / SESSION_WATCH_MS + 1);
	/* And the last of it is told although nothing more happens. */
	int64_t due = session_watches_due_ms(&t.w);
	if (due != INT64_MAX) {
		pass_ms(due - clock_now_ms(&now));
		assert_int_equal(tell(&t), 1);
	}
	assert_int_equal(t.last->sessions[0].n_running, 0);
	assert_int_equal(t.last->sessions[0].n_tokens, 79);
	stop(&t);
}

static void an_eviction_for_another_is_told(void **state)
{
	(void)state;
	struct watched t;
	start(&t, 10);
	struct session *s = make_session(&t.f, "s");
	add_fresh(&t.f, s, 6 * PAGE, 1);
	run_all(&t.f);
	assert_int_equal(session_watch(&t.w, 7, s), STATUS_OK);
	assert_int_equal(tell(&t), 1);
	assert_int_equal(t.last->sessions[0].pages_device, 6);
	assert_int_equal(t.last->moves.evicted, 0);
	pass_ms(SESSION_WATCH_MS);
	add_fresh(&t.f, NULL, 7 * PAGE, 1);
	/* Before the step for which there was to be room. */
	assert_true(sched_build(&t.f.sched));
	assert_int_equal(tell(&t), 1);
	int32_t gone = t.last->moves.evicted;
	assert_true(gone >= 3);
	assert_int_equal(t.last->moves.lost, gone);
	assert_int_equal(t.last->moves.down, 0);
	assert_int_equal(t.last->sessions[0].pages_device, 6 - gone);
	assert_int_equal(t.last->sessions[0].pages_lost, gone);
	run_all(&t.f);
	stop(&t);
}

static void its_end_is_told_and_so_is_nothing_after_that(void **state)
{
	(void)state;
	struct watched t;
	struct list out;
	list_init(&out);
	start(&t, 10);
	struct session *s = make_session(&t.f, "s"), *other = make_session(&t.f, "other");
	assert_int_equal(session_watch(&t.w, 7, s), STATUS_OK);
	assert_int_equal(session_watch(&t.w, 8, s), STATUS_OK);
	assert_int_equal(session_watch(&t.w, 9, other), STATUS_OK);
	assert_true(session_unwatch(&t.w, 8));
	assert_false(session_unwatch(&t.w, 8));
	session_watches_end(&t.w, s, &out);
	struct engine_event *ev = list_entry(list_pop_front(&out), struct engine_event, link);
	assert_int_equal(ev->type, ENGINE_EVENT_ERROR);
	assert_int_equal(ev->error.status, STATUS_NOT_FOUND);
	assert_int_equal(ev->request_id, 7);
	engine_event_free(ev);
	assert_true(list_empty(&out));
	session_remove(&t.f.sessions, s);
	assert_int_equal(tell(&t), 1);
	assert_int_equal(t.last->request_id, 9);
	stop(&t);
}

UNIT_MAIN(cmocka_unit_test(it_is_told_at_once_and_then_when_something_changes),
          cmocka_unit_test(changes_are_put_together), cmocka_unit_test(an_eviction_for_another_is_told),
          cmocka_unit_test(its_end_is_told_and_so_is_nothing_after_that))
