#include "engine/tenant.h"

#include <stdlib.h>
#include <string.h>

enum status tenant_table_init(struct tenant_table *t, size_t page_bytes)
{
	struct engine_tenant everybody = {.id = 0};
	memset(t, 0, sizeof *t);
	t->page_bytes = page_bytes;
	return tenant_set(t, &everybody);
}

void tenant_table_free(struct tenant_table *t)
{
	for (int32_t i = 0; i < t->n; i++)
		free(t->all[i]);
	memset(t, 0, sizeof *t);
}

/*
 * A limit below one page still allows one: with none nothing could ever run, which is not what a small number asks for.
 */
static int32_t whole_pages(uint64_t bytes, size_t page_bytes)
{
	uint64_t n = bytes / page_bytes;
	return bytes == 0 || n >= INT32_MAX ? INT32_MAX : n == 0 ? 1 : (int32_t)n;
}

enum status tenant_set(struct tenant_table *t, const struct engine_tenant *given)
{
	struct tenant *n = tenant_find(t, given->id);
	if (given->id < 0 || given->id >= ENGINE_MAX_TENANTS)
		return STATUS_INVALID;
	if (!n) {
		n = calloc(1, sizeof *n);
		if (!n)
			return STATUS_NOMEM;
		n->id = given->id;
		t->all[given->id] = n;
		if (t->n <= given->id)
			t->n = given->id + 1;
	}
	memcpy(n->name, given->name, sizeof n->name);
	memcpy(n->salt, given->salt, sizeof n->salt);
	n->limits = given->limits;
	n->max_pages = whole_pages(given->limits.kv_bytes, t->page_bytes);
	return STATUS_OK;
}

struct tenant *tenant_find(const struct tenant_table *t, int32_t id)
{
	return id >= 0 && id < ENGINE_MAX_TENANTS ? t->all[id] : NULL;
}

int32_t tenant_max_tokens(const struct tenant *t)
{
	return t->max_pages > INT32_MAX / KV_PAGE_TOKENS ? INT32_MAX : t->max_pages * KV_PAGE_TOKENS;
}

void ended_add(struct ended_requests *e, const struct engine_usage *usage)
{
	e->requests++;
	if (!usage)
		return;
	e->prompt_tokens += (uint64_t)usage->prompt_tokens;
	e->cached_tokens += (uint64_t)usage->cached_tokens;
	e->generated_tokens += (uint64_t)usage->completion_tokens;
}

void tenant_describe(const struct tenant *t, size_t page_bytes, struct engine_tenant_usage *out)
{
	*out = (struct engine_tenant_usage){
	        .id = t->id,
	        .limits = t->limits,
	        .n_running = t->n_running,
	        .n_waiting = t->n_waiting,
	        .n_sessions = t->n_sessions,
	        .n_pages = t->kv.n_pages,
	        .kv_bytes = (uint64_t)t->kv.n_pages * page_bytes,
	        .requests = t->ended.requests,
	        .prompt_tokens = t->ended.prompt_tokens,
	        .cached_tokens = t->ended.cached_tokens,
	        .generated_tokens = t->ended.generated_tokens,
	        .refused = t->refused,
	};
}
