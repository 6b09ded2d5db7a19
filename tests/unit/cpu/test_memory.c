/* Memory of the CPU backends: zeroed, aligned, on huge pages where the machine has them, and given back. */
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>

#include "engine/cpu/fast.h"
#include "tests/unit/cpu/fixture.h"

enum { MIB = 1 << 20, HUGE = 2 * MIB };

/* ---- What the kernel says: /proc/self/smaps, proc(5) ---- */

/*
 * KiB of a field of the mapping that holds p; -1 when there is none. `flag`: a two-letter flag to look for instead, 1
 * when it is set.
 */
static long mapping_field(const void *p, const char *field, const char *flag)
{
	char line[512];
	bool inside = false;
	long found = -1;
	FILE *f = fopen("/proc/self/smaps", "re");
	assert_non_null(f);
	while (found < 0 && fgets(line, sizeof line, f)) {
		uintptr_t from, to;
		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2)
			inside = from <= (uintptr_t)p && (uintptr_t)p < to;
		else if (inside && strncmp(line, field, strlen(field)) == 0)
			found = flag ? strstr(line, flag) != NULL : atol(line + strlen(field));
	}
	fclose(f);
	return found;
}

/* Whether the kernel takes the advice, and says so: an emulator's may not. */
static bool advice_is_taken(void)
{
	const size_t bytes = 4 * (size_t)MIB;
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_ptr_not_equal(p, MAP_FAILED);
	bool taken = madvise(p, bytes, MADV_HUGEPAGE) == 0 && mapping_field(p, "VmFlags:", " hg") == 1;
	munmap(p, bytes);
	return taken;
}

/* Whether memory that asks for huge pages may get them. */
static bool huge_pages_allowed(void)
{
	char line[128] = "";
	FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
	if (f) {
		if (!fgets(line, sizeof line, f))
			line[0] = '\0';
		fclose(f);
	}
	return (strstr(line, "[always]") || strstr(line, "[madvise]")) && advice_is_taken();
}

/*
 * KiB in huge pages of the mapping that holds p, of which `bytes` were written. Some of them may be refused where
 * memory is in pieces.
 */
static void check_huge(const void *p, size_t bytes, const char *what)
{
	assert_int_equal((uintptr_t)p % 4096, 0);
	assert_int_equal(mapping_field(p, "VmFlags:", " hg"), 1);
	long huge = mapping_field(p, "AnonHugePages:", NULL);
	print_message("%s: %ld of %zu KiB in huge pages\n", what, huge, bytes >> 10);
	assert_true(huge >= (long)(bytes >> 10) / 2);
}

static void large_memory_is_on_huge_pages(void **state)
{
	(void)state;
	const size_t bytes = 24 * (size_t)MIB;
	if (!huge_pages_allowed()) {
		print_message("skipped: this machine grants no huge pages\n");
		skip();
	}
	char *p = cpu_memory_alloc(bytes);
	assert_non_null(p);
	assert_int_equal((uintptr_t)p % HUGE, 0);
	memset(p, 1, bytes);
	check_huge(p, bytes, "one block");
	cpu_memory_free(p, bytes);
}

static void weights_and_pages_are_on_huge_pages(void **state)
{
	(void)state;
	enum { N = 40, N_IN = 576, N_OUT = 1536 };
	static const char *const devices[] = {"cpu-avx2", "cpu-avx512", "cpu-avx512-bf16", "cpu-neon",
	                                      "cpu-neon-dotprod"};
	struct kv_layout layout;
	if (!huge_pages_allowed()) {
		print_message("skipped: this machine grants no huge pages\n");
		skip();
	}
	uint64_t seed = 3;
	const struct quant_format *f = quant_format(QUANT_Q4_1);
	void *data = random_matrix(&seed, f, N_IN, N_OUT);
	for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
		struct backend *b = open_backend(devices[i], 2);
		if (!b)
			continue;
		/* Each is a quarter of a huge page, as in a small model. */
		struct weight *w[N];
		struct weight_desc desc = {.name = "w", .format = f, .n_in = N_IN, .n_out = N_OUT, .data = data};
		for (int k = 0; k < N; k++)
			assert_int_equal(b->ops->weight_create(b, &desc, &w[k], NULL), STATUS_OK);
		check_huge(w[0]->tiles, N * b->ops->weight_bytes(b, w[0]), devices[i]);
		for (int k = 0; k < N; k++)
			b->ops->weight_destroy(b, w[k]);
		void *kv;
		assert_int_equal(kv_layout_for(b, &layout, 4, 2, 64), STATUS_OK);
		size_t bytes = layout.page_stride * 300;
		assert_int_equal(b->ops->mem_alloc(b, bytes, &kv), STATUS_OK);
		memset(kv, 1, bytes);
		check_huge(kv, bytes, "KV");
		b->ops->mem_free(b, kv, bytes);
		b->ops->destroy(b);
	}
	free(data);
}

/* ---- The heap ---- */

static void blocks_of_a_heap_are_zero_and_apart(void **state)
{
	(void)state;
	enum { N = 200 };
	struct memory_heap h = {0};
	uint64_t seed = 9;
	for (int round = 0; round < 3; round++) {
		char *p[N];
		size_t bytes[N];
		for (int i = 0; i < N; i++) {
			bytes[i] = (size_t)random_int(&seed, 1, i % 20 == 0 ? 12 * MIB : MIB);
			p[i] = memory_heap_alloc(&h, bytes[i]);
			assert_non_null(p[i]);
			assert_int_equal((uintptr_t)p[i] % 4096, 0);
			assert_true(p[i][0] == 0 && p[i][bytes[i] / 2] == 0 && p[i][bytes[i] - 1] == 0);
			p[i][0] = p[i][bytes[i] - 1] = (char)(i + 1);
		}
		for (int i = 0; i < N; i++)
			assert_true(p[i][0] == (char)(i + 1) && p[i][bytes[i] - 1] == (char)(i + 1));
		/* In any order. */
		for (int i = 0; i < N; i++)
			memory_heap_free(&h, p[i * 77 % N], bytes[i * 77 % N]);
		assert_null(h.chunks);
	}
	memory_heap_free(&h, NULL, 5);
}

static void what_cannot_be_had_is_refused(void **state)
{
	(void)state;
	struct memory_heap h = {0};
	assert_null(memory_heap_alloc(&h, 0));
	assert_null(memory_heap_alloc(&h, SIZE_MAX));
	assert_null(memory_heap_alloc(&h, (size_t)1 << 55));
	assert_null(h.chunks);
}

UNIT_MAIN(cmocka_unit_test(large_memory_is_on_huge_pages), cmocka_unit_test(weights_and_pages_are_on_huge_pages),
          cmocka_unit_test(blocks_of_a_heap_are_zero_and_apart), cmocka_unit_test(what_cannot_be_had_is_refused))
