#include "tests/unit/unit.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/kv/pool.h"
#include "tests/unit/kv/pool_fixture.h"

static const struct kv_holder me = {KV_HOLDER_OTHER, 0};

static void every_page_goes_out_once(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(100);
	bool seen[100] = {false};
	for (int i = 0; i < 100; i++) {
		int32_t page = kv_pool_get(p, me);
		assert_in_range(page, 0, 99);
		assert_false(seen[page]);
		seen[page] = true;
	}
	assert_int_equal(kv_pool_get(p, me), KV_NO_PAGE);
	for (int32_t i = 0; i < 100; i++)
		kv_pool_unref(p, i, me);
	assert_int_equal(kv_pool_n_free(p), 100);
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
	assert_int_equal(mem.allocated, 0);
}

static void the_last_unref_frees(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(1);
	int32_t page = kv_pool_get(p, me);
	kv_pool_ref(p, page, me);
	kv_pool_unref(p, page, me);
	assert_int_equal(kv_pool_get(p, me), KV_NO_PAGE);
	kv_pool_unref(p, page, me);
	assert_int_equal(kv_pool_get(p, me), page);
	kv_pool_unref(p, page, me);
	kv_pool_destroy(p);
}

static void a_pool_with_references_does_not_close(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(2);
	int32_t page = kv_pool_get(p, me);
	assert_int_equal(kv_pool_destroy(p), STATUS_BUSY);
	kv_pool_unref(p, page, me);
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
}

static void a_clone_has_the_bytes_and_a_count_of_its_own(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(2);
	int32_t a = kv_pool_get(p, me);
	char *slab = kv_pool_slab(p);
	memset(slab + a * 64, 7, 64);
	int32_t b = kv_pool_clone(p, a, me);
	assert_int_not_equal(a, b);
	assert_memory_equal(slab + a * 64, slab + b * 64, 64);
	assert_int_equal(kv_pool_refs(p, a), 1);
	assert_int_equal(kv_pool_refs(p, b), 1);
	assert_int_equal(kv_pool_clone(p, a, me), KV_NO_PAGE);
	kv_pool_unref(p, a, me);
	kv_pool_unref(p, b, me);
	kv_pool_destroy(p);
}

/* Runs the misuse in a child and returns the signal that ended it; what it said on stderr goes to `said`. */
static int signal_of(void (*misuse)(struct kv_pool *p), struct kv_pool *p, char said[4096])
{
	int status, ends[2];
	size_t n = 0;
	assert_int_equal(pipe(ends), 0);
	pid_t pid = fork();
	if (pid == 0) {
		dup2(ends[1], STDERR_FILENO);
		misuse(p);
		_exit(0);
	}
	close(ends[1]);
	for (ssize_t got; (got = read(ends[0], said + n, 4095 - n)) > 0;)
		n += (size_t)got;
	said[n] = '\0';
	close(ends[0]);
	waitpid(pid, &status, 0);
	return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void unref_twice(struct kv_pool *p)
{
	int32_t page = kv_pool_get(p, me);
	kv_pool_unref(p, page, me);
	kv_pool_unref(p, page, me);
}

static void ref_of_a_free_page(struct kv_pool *p)
{
	kv_pool_ref(p, 0, me);
}

static void page_out_of_range(struct kv_pool *p)
{
	kv_pool_unref(p, 1000, me);
}

static void a_count_below_zero_aborts(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(4);
	char said[4096];
	assert_int_equal(signal_of(unref_twice, p, said), SIGABRT);
	assert_non_null(strstr(said, "unref of free page"));
	assert_non_null(strstr(said, "g by other 0 in unref_twice: 1 after"));
	assert_non_null(strstr(said, "u by other 0 in unref_twice: 0 after"));
	assert_int_equal(signal_of(ref_of_a_free_page, p, said), SIGABRT);
	assert_int_equal(signal_of(page_out_of_range, p, said), SIGABRT);
	kv_pool_destroy(p);
}

static const struct kv_holder request_7 = {KV_HOLDER_RUNNING, 7}, request_8 = {KV_HOLDER_RUNNING, 8},
                              queued_3 = {KV_HOLDER_WAITING, 3}, index_ = {KV_HOLDER_INDEX, 0};

static void unref_by_another_kind(struct kv_pool *p)
{
	int32_t page = kv_pool_get(p, request_7);
	kv_pool_ref(p, page, index_);
	kv_pool_unref(p, page, queued_3);
}

static void unref_by_another_request(struct kv_pool *p)
{
	int32_t page = kv_pool_get(p, request_7);
	kv_pool_ref(p, page, index_);
	kv_pool_unref(p, page, request_8);
}

static void who_does_not_hold_a_page_cannot_give_it_back(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(4);
	char said[4096];
	assert_int_equal(signal_of(unref_by_another_kind, p, said), SIGABRT);
	assert_non_null(strstr(
		said, "somebody who does not hold it gives away page 0 of 4, by waiting 3 in unref_by_another_kind"));
	assert_non_null(strstr(said, "g by running 7"));
	/* Which request it is, only the ledger knows. */
	assert_int_equal(signal_of(unref_by_another_request, p, said), kv_pool_has_ledger(p) ? SIGABRT : 0);
	if (kv_pool_has_ledger(p))
		assert_non_null(strstr(said, "running 7 holds 1 since unref_by_another_request: 0"));
	kv_pool_destroy(p);
}

static void pages_are_counted_by_the_kind_of_their_holders(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(10);
	struct kv_pool_counts c;
	int32_t a = kv_pool_get(p, request_7), b = kv_pool_get(p, request_7);
	kv_pool_ref(p, a, request_8);
	kv_pool_ref(p, a, index_);
	kv_pool_counts(p, &c);
	assert_int_equal(c.n_free, 8);
	assert_int_equal(c.n_shared, 1);
	assert_int_equal(c.pages[KV_HOLDER_RUNNING], 2);
	assert_int_equal(c.refs[KV_HOLDER_RUNNING], 3);
	assert_int_equal(c.pages[KV_HOLDER_INDEX], 1);
	kv_pool_pass(p, b, request_7, queued_3);
	assert_int_equal(kv_pool_refs(p, b), 1);
	assert_int_equal(kv_pool_refs_of(p, a, KV_HOLDER_RUNNING), 2);
	kv_pool_unref(p, a, request_7);
	kv_pool_unref(p, a, index_);
	kv_pool_counts(p, &c);
	assert_int_equal(c.n_shared, 0);
	assert_int_equal(c.pages[KV_HOLDER_RUNNING], 1);
	assert_int_equal(c.pages[KV_HOLDER_WAITING], 1);
	assert_int_equal(c.pages[KV_HOLDER_INDEX], 0);
	kv_pool_unref(p, a, request_8);
	kv_pool_unref(p, b, queued_3);
	kv_pool_counts(p, &c);
	for (int kind = 0; kind < KV_HOLDER_KINDS; kind++)
		assert_true(c.pages[kind] == 0 && c.refs[kind] == 0);
	kv_pool_destroy(p);
}

static void the_ledger_names_the_holders_of_each_page(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(100);
	struct kv_holder who[4];
	struct buf report = BUF_INIT;
	int32_t pages[5];
	for (int i = 0; i < 5; i++) {
		pages[i] = kv_pool_get(p, request_7);
		kv_pool_ref(p, pages[i], index_);
	}
	kv_pool_ref(p, pages[1], request_8);
	kv_pool_unref(p, pages[3], request_7);
	kv_pool_pass(p, pages[4], request_7, queued_3);
	kv_pool_report(p, &report);
	assert_non_null(
		strstr(report.data,
	               "5 of 100 pages are held; running: 4 references on 3 pages; waiting: 1 references on 1 pages; "
	               "index: 5 references on 5 pages; shared: 4 pages\n"));
	if (kv_pool_has_ledger(p)) {
		assert_int_equal(kv_pool_holders(p, pages[1], who, 4), 3);
		assert_true(kv_holder_is(who[0], request_8) && kv_holder_is(who[1], index_) &&
		            kv_holder_is(who[2], request_7));
		assert_int_equal(kv_pool_holders(p, pages[1], who, 1), 3);
		assert_int_equal(kv_pool_holders(p, 50, who, 4), 0);
		assert_non_null(strstr(report.data,
		                       "running 7 holds 3 since the_ledger_names_the_holders_of_each_page: 0-2\n"));
		assert_non_null(
			strstr(report.data, "running 8 holds 1 since the_ledger_names_the_holders_of_each_page: 1\n"));
		assert_non_null(
			strstr(report.data, "waiting 3 holds 1 since the_ledger_names_the_holders_of_each_page: 4\n"));
		assert_non_null(
			strstr(report.data, "index 0 holds 5 since the_ledger_names_the_holders_of_each_page: 0-4\n"));
	}
	buf_free(&report);
	kv_pool_unref(p, pages[4], queued_3);
	kv_pool_unref(p, pages[1], request_8);
	for (int i = 0; i < 5; i++) {
		kv_pool_unref(p, pages[i], index_);
		if (i < 3)
			kv_pool_unref(p, pages[i], request_7);
	}
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
}

static void a_long_report_is_cut_and_says_so(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(300);
	struct buf report = BUF_INIT;
	int n_lines = 0;
	for (uint64_t i = 0; i < 300; i++)
		kv_pool_get(p, ((struct kv_holder){KV_HOLDER_RUNNING, i / 2}));
	kv_pool_report(p, &report);
	for (const char *c = report.data; (c = strchr(c, '\n')); c++)
		n_lines++;
	assert_in_range(n_lines, 1, 70);
	if (kv_pool_has_ledger(p))
		assert_non_null(strstr(report.data, "and 172 references more\n"));
	buf_free(&report);
	for (int32_t i = 0; i < 300; i++)
		kv_pool_unref(p, i, ((struct kv_holder){KV_HOLDER_RUNNING, (uint64_t)i / 2}));
	kv_pool_destroy(p);
}

static void destroy_early(struct kv_pool *p)
{
	kv_pool_get(p, request_7);
	kv_pool_destroy(p);
}

static void closing_with_references_left_says_who_has_them(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(4);
	char said[4096];
	assert_int_equal(signal_of(destroy_early, p, said), 0);
	assert_non_null(strstr(said, "event=kv_leak"));
	assert_non_null(strstr(said, "1 of 4 pages are held; running: 1 references on 1 pages"));
	if (kv_pool_has_ledger(p))
		assert_non_null(strstr(said, "running 7 holds 1 since destroy_early: 0"));
	kv_pool_destroy(p);
}

static void no_memory_is_a_status(void **state)
{
	(void)state;
	struct kv_layout layout = memory_layout();
	struct kv_pool *p;
	struct error err;
	memory_backend_init(&mem);
	mem.fail_alloc = true;
	assert_int_equal(kv_pool_create(&mem.base, &layout, 8, &p, &err), STATUS_NOMEM);
	assert_non_null(strstr(err.message, "8 pages"));
	assert_int_equal(kv_pool_create(&mem.base, &layout, 0, &p, &err), STATUS_INVALID);
}

UNIT_MAIN(cmocka_unit_test(every_page_goes_out_once), cmocka_unit_test(the_last_unref_frees),
          cmocka_unit_test(a_pool_with_references_does_not_close),
          cmocka_unit_test(a_clone_has_the_bytes_and_a_count_of_its_own), cmocka_unit_test(a_count_below_zero_aborts),
          cmocka_unit_test(who_does_not_hold_a_page_cannot_give_it_back),
          cmocka_unit_test(pages_are_counted_by_the_kind_of_their_holders),
          cmocka_unit_test(the_ledger_names_the_holders_of_each_page),
          cmocka_unit_test(a_long_report_is_cut_and_says_so),
          cmocka_unit_test(closing_with_references_left_says_who_has_them), cmocka_unit_test(no_memory_is_a_status))
