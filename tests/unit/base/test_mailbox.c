#include "tests/unit/unit.h"

#include "engine/base/mailbox.h"

struct note {
	struct list link;
	int value;
};

enum { SENDERS = 4, EACH = 5000 };

static _Atomic int wakes;

static void count_wake(void *arg)
{
	(void)arg;
	wakes++;
}

static void *sender(void *arg)
{
	struct mailbox *m = arg;
	for (int i = 0; i < EACH; i++) {
		struct note *n = malloc(sizeof *n);
		n->value = i;
		mailbox_post(m, &n->link);
	}
	return NULL;
}

static void every_message_arrives_once(void **state)
{
	(void)state;
	struct mailbox m;
	pthread_t threads[SENDERS];
	int64_t sum = 0;
	int got = 0;
	assert_int_equal(mailbox_init(&m, count_wake, NULL), STATUS_OK);
	for (int i = 0; i < SENDERS; i++)
		pthread_create(&threads[i], NULL, sender, &m);
	while (got < SENDERS * EACH) {
		struct list out;
		list_init(&out);
		assert_true(mailbox_wait(&m, &out, -1));
		for (struct list *l; (l = list_pop_front(&out));) {
			struct note *n = list_entry(l, struct note, link);
			sum += n->value;
			got++;
			free(n);
		}
	}
	for (int i = 0; i < SENDERS; i++)
		pthread_join(threads[i], NULL);
	assert_int_equal(sum, (int64_t)SENDERS * EACH * (EACH - 1) / 2);
	assert_true(wakes >= 1 && wakes <= SENDERS * EACH);
	struct list out;
	list_init(&out);
	assert_false(mailbox_take(&m, &out));
	assert_false(mailbox_wait(&m, &out, 1000));
	mailbox_destroy(&m);
}

static void wakes_only_on_empty_to_non_empty(void **state)
{
	(void)state;
	struct mailbox m;
	struct note a, b, c;
	struct list out;
	wakes = 0;
	list_init(&out);
	mailbox_init(&m, count_wake, NULL);
	mailbox_post(&m, &a.link);
	mailbox_post(&m, &b.link);
	assert_int_equal(wakes, 1);
	assert_true(mailbox_take(&m, &out));
	assert_ptr_equal(out.next, &a.link);
	assert_ptr_equal(out.prev, &b.link);
	mailbox_post(&m, &c.link);
	assert_int_equal(wakes, 2);
	list_init(&out);
	mailbox_take(&m, &out);
	mailbox_destroy(&m);
}

UNIT_MAIN(cmocka_unit_test(every_message_arrives_once), cmocka_unit_test(wakes_only_on_empty_to_non_empty))
