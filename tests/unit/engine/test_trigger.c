/* What sets a context policy off, without a scheduler. */
#include "tests/unit/unit.h"

#include "engine/trigger.h"

static const double UNIT = 1 << KV_MASS_BITS;

static struct trigger below(double entropy)
{
	const struct engine_context c = {.trigger_entropy = entropy};
	return trigger_of(&c);
}

/* A row of 12 heads, each of that entropy. */
static void add_row(struct attention_look *look, double entropy)
{
	look->n += 12;
	look->entropy += 12 * (uint64_t)(entropy * UNIT);
}

static void it_fires_when_the_mean_of_the_latest_tokens_is_below(void **state)
{
	(void)state;
	struct trigger t = below(2);
	struct attention_look look = {0};
	int32_t position = 100, low = 0;
	for (int i = 0; i < 3 * TRIGGER_WINDOW; i++) {
		add_row(&look, 3);
		assert_false(trigger_saw(&t, position++, &look));
	}
	/* (32 - n) * 3 + n < 32 * 2: from the 17th on. */
	do {
		add_row(&look, 1);
		low++;
	} while (!trigger_saw(&t, position++, &look));
	assert_int_equal(low, TRIGGER_WINDOW / 2 + 1);
	assert_int_equal(t.fired, ENGINE_TRIGGER_ENTROPY);
	assert_int_equal(t.fired_at, position);
	/* Once. */
	add_row(&look, 1);
	assert_false(trigger_saw(&t, position, &look));
	assert_false(trigger_fire(&t, ENGINE_TRIGGER_FREE_PAGES, 7));
	assert_int_equal(t.fired, ENGINE_TRIGGER_ENTROPY);
	assert_false(trigger_watches(&t));
}

static void a_few_tokens_say_nothing(void **state)
{
	(void)state;
	struct trigger t = below(2);
	struct attention_look look = {0};
	for (int32_t i = 0; i < TRIGGER_WINDOW; i++) {
		add_row(&look, 0.5);
		assert_int_equal(trigger_saw(&t, i, &look), i == TRIGGER_WINDOW - 1);
	}
}

/* A request that is set back computes its tokens again. */
static void a_token_counts_once(void **state)
{
	(void)state;
	struct trigger t = below(2);
	struct attention_look look = {0};
	for (int32_t i = 0; i < 20; i++) {
		add_row(&look, 0.5);
		assert_false(trigger_saw(&t, 50 + i, &look));
	}
	look = (struct attention_look){0};
	trigger_reset_look(&t);
	for (int32_t i = 0; i < 20; i++) {
		add_row(&look, 0.5);
		assert_false(trigger_saw(&t, 50 + i, &look));
	}
	/* Nor does one that nobody looked at. */
	assert_false(trigger_saw(&t, 70, &look));
	for (int32_t i = 20; i < TRIGGER_WINDOW; i++) {
		add_row(&look, 0.5);
		assert_int_equal(trigger_saw(&t, 50 + i, &look), i == TRIGGER_WINDOW - 1);
	}
	assert_int_equal(t.fired_at, 50 + TRIGGER_WINDOW);
}

static void what_was_not_asked_for_is_not_waited_for(void **state)
{
	(void)state;
	struct trigger none = below(0), room = trigger_of(&(struct engine_context){.trigger_free_pages = 5});
	struct attention_look look = {0};
	assert_false(trigger_watches(&none) || trigger_waits_for_room(&none) || trigger_watches(&room));
	assert_true(trigger_waits_for_room(&room));
	for (int32_t i = 0; i < 2 * TRIGGER_WINDOW; i++) {
		add_row(&look, 0);
		assert_false(trigger_saw(&none, i, &look));
	}
	assert_true(trigger_same(&room, &room) && !trigger_same(&room, &none));
	assert_true(trigger_fire(&room, ENGINE_TRIGGER_FREE_PAGES, 33));
	assert_false(trigger_waits_for_room(&room));
	assert_int_equal(room.fired_at, 33);
	assert_null(engine_trigger_name(ENGINE_TRIGGER_NONE));
	assert_string_equal(engine_trigger_name(room.fired), "free_pages");
}

UNIT_MAIN(cmocka_unit_test(it_fires_when_the_mean_of_the_latest_tokens_is_below),
	  cmocka_unit_test(a_few_tokens_say_nothing), cmocka_unit_test(a_token_counts_once),
	  cmocka_unit_test(what_was_not_asked_for_is_not_waited_for))
