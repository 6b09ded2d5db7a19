/* A device with a few pages for tests of the tiers, and pages whose bytes follow from their number. */
#pragma once

#include "tests/unit/unit.h"

#include "engine/kv/tier.h"
#include "tests/support/memory_backend.h"

enum { TIER_DEVICE_PAGES = 80, TIER_PAGE_BYTES = 8192 };

struct tier_fixture {
	struct memory_backend backend;
	struct kv_tier_device device;
	struct clock clock;
};

static inline void tier_setup(struct tier_fixture *f)
{
	memory_backend_init(&f->backend);
	clock_manual_init(&f->clock, 1000000000);
	f->device.backend = &f->backend.base;
	assert_int_equal(kv_layout_init(&f->device.layout, 2, 1, 64, QUANT_F16), STATUS_OK);
	assert_int_equal(f->device.layout.page_bytes, TIER_PAGE_BYTES);
	f->device.slab = calloc(TIER_DEVICE_PAGES, f->device.layout.page_stride);
	assert_non_null(f->device.slab);
}

static inline void tier_teardown(struct tier_fixture *f)
{
	free(f->device.slab);
}

static inline uint16_t *tier_bytes(const struct tier_fixture *f, int32_t device_page)
{
	return (uint16_t *)((char *)f->device.slab + (size_t)device_page * f->device.layout.page_stride);
}

/* The key of page i of one long chain; page 0 is its first. */
static inline struct kv_key tier_key(int32_t i)
{
	struct kv_key k;
	uint64_t x = (uint64_t)(i + 2) * 0x9E3779B97F4A7C15ull;
	for (size_t b = 0; b < sizeof k.bytes; b += 8) {
		uint64_t r = unit_rand(&x);
		memcpy(k.bytes + b, &r, 8);
	}
	return k;
}

/* All but the padding, which an assignment may leave as it is. */
static inline void assert_same_name(const struct kv_page_name *a, const struct kv_page_name *b)
{
	assert_memory_equal(a, b, offsetof(struct kv_page_name, first) + sizeof a->first);
}

static inline struct kv_page_name tier_page(int32_t i)
{
	struct kv_page_name p = {
		.key = tier_key(i), .parent = tier_key(i - 1), .n_tokens = KV_PAGE_TOKENS, .first = i == 0};
	for (int32_t t = 0; t < KV_PAGE_TOKENS; t++)
		p.tokens[t] = i * KV_PAGE_TOKENS + t;
	return p;
}

/* Element e of page i: finite halves of about -2 to 2, no two pages alike. */
static inline uint16_t tier_element(int32_t i, int32_t e)
{
	uint64_t x = ((uint64_t)i << 32 | (uint32_t)e) * 0x9E3779B97F4A7C15ull + 1;
	uint64_t r = unit_rand(&x);
	return quant_float_to_half((float)(r >> 40) / (float)(1 << 22) - 2);
}

static inline void tier_fill(const struct tier_fixture *f, int32_t device_page, int32_t i)
{
	for (int32_t e = 0; e < TIER_PAGE_BYTES / 2; e++)
		tier_bytes(f, device_page)[e] = tier_element(i, e);
}

static inline bool tier_holds(const struct tier_fixture *f, int32_t device_page, int32_t i)
{
	for (int32_t e = 0; e < TIER_PAGE_BYTES / 2; e++) {
		if (tier_bytes(f, device_page)[e] != tier_element(i, e))
			return false;
	}
	return true;
}

static inline enum kv_tier_put tier_put(struct tier_fixture *f, struct kv_tier *t, int32_t i)
{
	struct kv_page_name p = tier_page(i);
	tier_fill(f, 0, i);
	enum kv_tier_put put = kv_tier_put(t, &p, 0);
	/* The tier has its own copy by now. */
	memset(tier_bytes(f, 0), 0xEE, TIER_PAGE_BYTES);
	return put;
}

static inline bool tier_has(struct kv_tier *t, int32_t i)
{
	struct kv_page_name p = tier_page(i);
	return kv_tier_has(t, &p);
}

/* Moves what is under way on until nothing is. */
static inline void tier_settle(struct kv_tier *t)
{
	struct kv_tier_done done[KV_TIER_MAX_LOADS];
	while (!kv_tier_quiet(t)) {
		kv_tier_poll(t, done, KV_TIER_MAX_LOADS);
		if (!kv_tier_quiet(t))
			kv_tier_wait(t, 1000);
	}
}

/* Brings page i to device page 1 and tells how that ended; KV_LOAD_N: it is not there. */
static inline enum kv_tier_end tier_get(struct tier_fixture *f, struct kv_tier *t, int32_t i)
{
	struct kv_page_name p = tier_page(i);
	struct kv_tier_done done;
	memset(tier_bytes(f, 1), 0xEE, TIER_PAGE_BYTES);
	if (kv_tier_load(t, &p, 1, (uint64_t)i) != STATUS_OK)
		return KV_LOAD_N;
	while (kv_tier_poll(t, &done, 1) == 0)
		kv_tier_wait(t, 1000);
	assert_int_equal(done.ticket, i);
	return done.end;
}

static inline struct kv_tier_stats tier_stats(const struct kv_tier *t)
{
	struct kv_tier_stats s;
	kv_tier_stats(t, &s);
	return s;
}
