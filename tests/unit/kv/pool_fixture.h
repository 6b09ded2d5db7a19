/* A pool of small pages over memory of its own, for tests of the rooms that hold pages. */
#pragma once

#include "tests/unit/unit.h"

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
