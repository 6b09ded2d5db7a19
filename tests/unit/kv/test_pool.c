#include "tests/unit/unit.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/kv/pool.h"
#include "tests/support/memory_backend.h"

static struct memory_backend mem;

static struct kv_pool *make_pool(int32_t n_pages)
{
	struct kv_layout layout = memory_layout();
	struct kv_pool *p;
	struct error err;
	memory_backend_init(&mem);
	assert_int_equal(kv_pool_create(&mem.base, &layout, n_pages, &p, &err), STATUS_OK);
	return p;
}

static void every_page_goes_out_once(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(100);
	bool seen[100] = {false};
	for (int i = 0; i < 100; i++) {
		int32_t page = kv_pool_get(p);
		assert_in_range(page, 0, 99);
		assert_false(seen[page]);
		seen[page] = true;
	}
	assert_int_equal(kv_pool_get(p), KV_NO_PAGE);
	for (int32_t i = 0; i < 100; i++)
		kv_pool_unref(p, i);
	assert_int_equal(kv_pool_n_free(p), 100);
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
	assert_int_equal(mem.allocated, 0);
}

static void the_last_unref_frees(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(1);
	int32_t page = kv_pool_get(p);
	kv_pool_ref(p, page);
	kv_pool_unref(p, page);
	assert_int_equal(kv_pool_get(p), KV_NO_PAGE);
	kv_pool_unref(p, page);
	assert_int_equal(kv_pool_get(p), page);
	kv_pool_unref(p, page);
	kv_pool_destroy(p);
}

static void a_pool_with_references_does_not_close(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(2);
	int32_t page = kv_pool_get(p);
	assert_int_equal(kv_pool_destroy(p), STATUS_BUSY);
	kv_pool_unref(p, page);
	assert_int_equal(kv_pool_destroy(p), STATUS_OK);
}

static void a_clone_has_the_bytes_and_a_count_of_its_own(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(2);
	int32_t a = kv_pool_get(p);
	char *slab = kv_pool_slab(p);
	memset(slab + a * 64, 7, 64);
	int32_t b = kv_pool_clone(p, a);
	assert_int_not_equal(a, b);
	assert_memory_equal(slab + a * 64, slab + b * 64, 64);
	assert_int_equal(kv_pool_refs(p, a), 1);
	assert_int_equal(kv_pool_refs(p, b), 1);
	assert_int_equal(kv_pool_clone(p, a), KV_NO_PAGE);
	kv_pool_unref(p, a);
	kv_pool_unref(p, b);
	kv_pool_destroy(p);
}

/* Runs the misuse in a child and returns the signal that ended it. */
static int signal_of(void (*misuse)(struct kv_pool *p), struct kv_pool *p)
{
	int status;
	pid_t pid = fork();
	if (pid == 0) {
		close(STDERR_FILENO);
		misuse(p);
		_exit(0);
	}
	waitpid(pid, &status, 0);
	return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void unref_twice(struct kv_pool *p)
{
	int32_t page = kv_pool_get(p);
	kv_pool_unref(p, page);
	kv_pool_unref(p, page);
}

static void ref_of_a_free_page(struct kv_pool *p)
{
	kv_pool_ref(p, 0);
}

static void page_out_of_range(struct kv_pool *p)
{
	kv_pool_unref(p, 1000);
}

static void a_count_below_zero_aborts(void **state)
{
	(void)state;
	struct kv_pool *p = make_pool(4);
	assert_int_equal(signal_of(unref_twice, p), SIGABRT);
	assert_int_equal(signal_of(ref_of_a_free_page, p), SIGABRT);
	assert_int_equal(signal_of(page_out_of_range, p), SIGABRT);
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
          cmocka_unit_test(no_memory_is_a_status))
