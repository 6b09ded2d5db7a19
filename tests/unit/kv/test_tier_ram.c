#include "tests/unit/kv/tier_fixture.h"

static struct kv_tier *ram(struct tier_fixture *f, uint64_t bytes, enum kv_form type)
{
	struct kv_tier *t = NULL;
	tier_setup(f);
	assert_int_equal(kv_tier_ram_create(&f->device, &f->clock, bytes, type, &t, NULL), STATUS_OK);
	return t;
}

static void done(struct tier_fixture *f, struct kv_tier *t)
{
	kv_tier_destroy(t);
	tier_teardown(f);
}

static void a_page_comes_back_byte_for_byte(void **state)
{
	(void)state;
	struct tier_fixture f;
	struct kv_tier *t = ram(&f, 1 << 20, KV_FORM_F16);
	for (int32_t i = 0; i < 10; i++)
		assert_int_equal(tier_put(&f, t, i), KV_PUT_STORED);
	for (int32_t i = 0; i < 10; i++) {
		assert_int_equal(tier_get(&f, t, i), KV_LOAD_DONE);
		assert_true(tier_holds(&f, 1, i));
	}
	assert_int_equal(tier_get(&f, t, 10), KV_LOAD_N);
	assert_int_equal(tier_put(&f, t, 3), KV_PUT_PRESENT);
	assert_int_equal(tier_stats(t).n_pages, 10);
	done(&f, t);
}

static void a_hit_compares_tokens_and_predecessor(void **state)
{
	(void)state;
	struct tier_fixture f;
	struct kv_tier *t = ram(&f, 1 << 20, KV_FORM_F16);
	struct kv_page_name p = tier_page(1), other = p;
	tier_put(&f, t, 1);
	assert_true(kv_tier_has(t, &p));
	other.tokens[15]++;
	assert_false(kv_tier_has(t, &other));
	assert_int_equal(kv_tier_load(t, &other, 1, 1), STATUS_NOT_FOUND);
	assert_int_equal(kv_tier_put(t, &other, 0), KV_PUT_FAILED);
	other = p;
	other.parent.bytes[31] ^= 1;
	assert_false(kv_tier_has(t, &other));
	other = p;
	other.n_tokens = 15;
	assert_false(kv_tier_has(t, &other));
	assert_true(kv_tier_find(t, &p.key, &other));
	assert_same_name(&other, &p);
	done(&f, t);
}

static void the_cap_holds_to_the_byte_and_the_page_touched_longest_ago_goes(void **state)
{
	(void)state;
	struct tier_fixture f;
	/* Three pages, and a bit that is worth nothing. */
	struct kv_tier *t = ram(&f, 3 * TIER_PAGE_BYTES + 4095, KV_FORM_F16);
	assert_int_equal(tier_stats(t).cap_bytes, 3 * TIER_PAGE_BYTES);
	for (int32_t i = 0; i < 3; i++) {
		clock_advance(&f.clock, 1000000);
		tier_put(&f, t, i);
	}
	assert_int_equal(tier_stats(t).used_bytes, 3 * TIER_PAGE_BYTES);
	clock_advance(&f.clock, 1000000);
	tier_get(&f, t, 0);
	assert_int_equal(tier_put(&f, t, 3), KV_PUT_STORED);
	assert_true(tier_has(t, 0) && !tier_has(t, 1) && tier_has(t, 2) && tier_has(t, 3));
	assert_int_equal(tier_stats(t).used_bytes, 3 * TIER_PAGE_BYTES);
	assert_int_equal(tier_stats(t).evicted, 1);
	done(&f, t);
}

static void a_page_that_is_loaded_stays(void **state)
{
	(void)state;
	struct tier_fixture f;
	struct kv_tier *t = ram(&f, 2 * TIER_PAGE_BYTES, KV_FORM_F16);
	struct kv_page_name p0 = tier_page(0), p1 = tier_page(1);
	struct kv_tier_done ended[4];
	tier_put(&f, t, 0);
	tier_put(&f, t, 1);
	assert_int_equal(kv_tier_load(t, &p0, 2, 10), STATUS_OK);
	assert_int_equal(kv_tier_load(t, &p1, 3, 11), STATUS_OK);
	assert_int_equal(tier_put(&f, t, 2), KV_PUT_FULL);
	assert_false(kv_tier_drop(t, &p0.key));
	assert_int_equal(kv_tier_poll(t, ended, 4), 2);
	assert_true(tier_holds(&f, 2, 0) && tier_holds(&f, 3, 1));
	assert_int_equal(tier_put(&f, t, 2), KV_PUT_STORED);
	done(&f, t);
}

static void a_cancelled_load_leaves_its_page_alone(void **state)
{
	(void)state;
	struct tier_fixture f;
	struct kv_tier *t = ram(&f, 1 << 20, KV_FORM_F16);
	struct kv_page_name p = tier_page(5);
	struct kv_tier_done ended[4];
	tier_put(&f, t, 5);
	memset(tier_bytes(&f, 2), 0xAB, TIER_PAGE_BYTES);
	assert_int_equal(kv_tier_load(t, &p, 2, 77), STATUS_OK);
	kv_tier_cancel(t, 77);
	kv_tier_cancel(t, 78);
	assert_int_equal(kv_tier_poll(t, ended, 4), 0);
	assert_true(kv_tier_quiet(t));
	assert_int_equal(tier_bytes(&f, 2)[0], 0xABAB);
	assert_int_equal(tier_stats(t).cancelled, 1);
	assert_int_equal(tier_stats(t).n_loading, 0);
	assert_true(kv_tier_drop(t, &p.key));
	assert_int_equal(tier_stats(t).used_bytes, 0);
	done(&f, t);
}

static void loads_are_bounded(void **state)
{
	(void)state;
	struct tier_fixture f;
	struct kv_tier *t = ram(&f, 1 << 20, KV_FORM_F16);
	struct kv_page_name p = tier_page(1);
	struct kv_tier_done ended[KV_TIER_MAX_LOADS];
	int32_t n = 0, got;
	tier_put(&f, t, 1);
	for (int32_t i = 0; i < KV_TIER_MAX_LOADS; i++)
		assert_int_equal(kv_tier_load(t, &p, 2 + i, (uint64_t)i), STATUS_OK);
	assert_int_equal(kv_tier_load(t, &p, 79, 99), STATUS_LIMIT);
	/* One poll copies a part of them, so that a step does not wait for all. */
	got = kv_tier_poll(t, ended, KV_TIER_MAX_LOADS);
	assert_true(got > 0 && got < KV_TIER_MAX_LOADS);
	for (n = got; n < KV_TIER_MAX_LOADS; n += kv_tier_poll(t, ended, KV_TIER_MAX_LOADS))
		assert_false(kv_tier_quiet(t));
	assert_true(kv_tier_quiet(t) && tier_holds(&f, 65, 1));
	done(&f, t);
}

/* ---- Narrow types ---- */

static void narrow_pages_take_about_half_and_come_back_near(void **state)
{
	(void)state;
	for (int type = KV_FORM_INT8; type < KV_N_FORMS; type++) {
		struct tier_fixture f;
		struct kv_tier *t = ram(&f, 1 << 20, (enum kv_form)type);
		tier_put(&f, t, 1);
		/* 4,096 codes and 64 scales: two units; the page itself is two as well, so tiny pages gain nothing. */
		assert_int_equal(tier_stats(t).used_bytes, 2 * 4096);
		assert_int_equal(tier_stats(t).bytes_written, 4096 + 64 * 4);
		assert_int_equal(tier_get(&f, t, 1), KV_LOAD_DONE);
		for (int32_t e = 0; e < TIER_PAGE_BYTES / 2; e++) {
			float x = quant_half_to_float(tier_element(1, e)),
			      y = quant_half_to_float(tier_bytes(&f, 1)[e]);
			assert_float_equal(x, y, type == KV_FORM_INT8 ? 2.0f / 127 : 0.13f);
		}
		assert_false(tier_holds(&f, 1, 1));
		assert_string_equal(tier_stats(t).type, kv_form_name((enum kv_form)type));
		done(&f, t);
	}
}

static void sinks_tails_and_what_has_no_narrow_form_stay_exact_and_are_counted(void **state)
{
	(void)state;
	struct tier_fixture f;
	struct kv_tier *t = ram(&f, 1 << 20, KV_FORM_INT8);
	struct kv_page_name tail = tier_page(7), odd = tier_page(8);
	struct kv_tier_done ended;
	tier_put(&f, t, 0);
	assert_int_equal(tier_get(&f, t, 0), KV_LOAD_DONE);
	assert_true(tier_holds(&f, 1, 0));
	tail.n_tokens = 9;
	tier_fill(&f, 0, 7);
	assert_int_equal(kv_tier_put(t, &tail, 0), KV_PUT_STORED);
	assert_int_equal(kv_tier_load(t, &tail, 2, 1), STATUS_OK);
	assert_int_equal(kv_tier_poll(t, &ended, 1), 1);
	assert_true(tier_holds(&f, 2, 7));
	tier_fill(&f, 0, 8);
	tier_bytes(&f, 0)[100] = 0x7C00;
	assert_int_equal(kv_tier_put(t, &odd, 0), KV_PUT_STORED);
	assert_int_equal(kv_tier_load(t, &odd, 2, 1), STATUS_OK);
	assert_int_equal(kv_tier_poll(t, &ended, 1), 1);
	assert_memory_equal(tier_bytes(&f, 2), tier_bytes(&f, 0), TIER_PAGE_BYTES);
	struct kv_tier_stats s = tier_stats(t);
	assert_int_equal(s.wide_sinks, 1);
	assert_int_equal(s.wide_tails, 1);
	assert_int_equal(s.wide_values, 1);
	done(&f, t);
}

static void a_lossy_tier_has_roots_of_its_own(void **state)
{
	(void)state;
	struct kv_key keys[KV_N_FORMS];
	for (int type = 0; type < KV_N_FORMS; type++) {
		struct kv_root root = {.scheme = str_from(kv_tier_scheme((enum kv_form)type))};
		kv_key_root(&root, &keys[type]);
		for (int other = 0; other < type; other++)
			assert_memory_not_equal(&keys[type], &keys[other], sizeof *keys);
	}
	assert_string_equal(kv_tier_scheme(KV_FORM_F16), "");
}

static void a_tier_without_room_for_a_page_is_refused(void **state)
{
	(void)state;
	struct tier_fixture f;
	struct kv_tier *t;
	struct error err;
	tier_setup(&f);
	assert_int_equal(kv_tier_ram_create(&f.device, &f.clock, TIER_PAGE_BYTES - 1, KV_FORM_F16, &t, &err),
	                 STATUS_INVALID);
	assert_int_equal(kv_tier_ram_create(&f.device, &f.clock, 0, KV_FORM_INT8, &t, &err), STATUS_INVALID);
	tier_teardown(&f);
}

/* Random puts, loads, drops and cancels against what a map of the pages would say. */
static void it_is_a_bounded_map(void **state)
{
	(void)state;
	struct tier_fixture f;
	enum { PAGES = 40, ROOM = 16, STEPS = 20000 };
	struct kv_tier *t = ram(&f, ROOM * TIER_PAGE_BYTES, KV_FORM_INT8);
	uint64_t seed = 42;
	int32_t n_hits = 0;
	for (int step = 0; step < STEPS; step++) {
		int32_t i = (int32_t)(unit_rand(&seed) % PAGES) * 2; /* 0 is a sink, and wide */
		struct kv_page_name p = tier_page(i);
		bool had = tier_has(t, i);
		clock_advance(&f.clock, 1000000);
		switch (unit_rand(&seed) % 8) {
		case 0:
			assert_int_equal(kv_tier_drop(t, &p.key), had);
			assert_false(tier_has(t, i));
			break;
		case 1:
		case 2:
			assert_int_equal(kv_tier_load(t, &p, 1, 5), had ? STATUS_OK : STATUS_NOT_FOUND);
			kv_tier_cancel(t, 5);
			tier_settle(t);
			break;
		default:
			if (step % 50 == 0 && had) {
				assert_int_equal(tier_get(&f, t, i), KV_LOAD_DONE);
				assert_float_equal(quant_half_to_float(tier_bytes(&f, 1)[9]),
				                   quant_half_to_float(tier_element(i, 9)), 2.0f / 127);
				n_hits++;
			} else {
				if (!had)
					tier_fill(&f, 0, i);
				assert_int_equal(kv_tier_put(t, &p, 0), had ? KV_PUT_PRESENT : KV_PUT_STORED);
				assert_true(tier_has(t, i));
			}
		}
		struct kv_tier_stats s = tier_stats(t);
		assert_true(s.used_bytes <= s.cap_bytes && s.n_pages <= ROOM);
	}
	assert_true(n_hits > 10);
	for (int32_t i = 0; i < PAGES; i++) {
		struct kv_key key = tier_key(i * 2);
		kv_tier_drop(t, &key);
	}
	assert_int_equal(tier_stats(t).used_bytes, 0);
	assert_int_equal(tier_stats(t).n_pages, 0);
	done(&f, t);
}

UNIT_MAIN(cmocka_unit_test(a_page_comes_back_byte_for_byte), cmocka_unit_test(a_hit_compares_tokens_and_predecessor),
          cmocka_unit_test(the_cap_holds_to_the_byte_and_the_page_touched_longest_ago_goes),
          cmocka_unit_test(a_page_that_is_loaded_stays), cmocka_unit_test(a_cancelled_load_leaves_its_page_alone),
          cmocka_unit_test(loads_are_bounded), cmocka_unit_test(narrow_pages_take_about_half_and_come_back_near),
          cmocka_unit_test(sinks_tails_and_what_has_no_narrow_form_stay_exact_and_are_counted),
          cmocka_unit_test(a_lossy_tier_has_roots_of_its_own),
          cmocka_unit_test(a_tier_without_room_for_a_page_is_refused), cmocka_unit_test(it_is_a_bounded_map))
