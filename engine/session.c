#include "engine/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#include "engine/base/hash.h"
#include "engine/parked.h"
#include "engine/request.h"

enum { FIRST_BUCKETS = 64 };

enum status session_table_init(struct session_table *t, struct tenant_table *tenants, struct kv_prefix *prefix,
                               const struct clock *clock, int64_t heartbeat_ms, int64_t ttl_ms, int32_t max_sessions)
{
	memset(t, 0, sizeof *t);
	t->tenants = tenants;
	t->clock = clock;
	t->prefix = prefix;
	t->heartbeat_ms = heartbeat_ms;
	t->ttl_ms = ttl_ms;
	t->max_sessions = max_sessions;
	/* The seed keeps clients from choosing ids that share a bucket. */
	if (getrandom(t->id_seed, sizeof t->id_seed, 0) != sizeof t->id_seed)
		return STATUS_INTERNAL;
	if (prefix && kv_prefix_claims_create(prefix, max_sessions) != STATUS_OK)
		return STATUS_NOMEM;
	t->buckets = calloc(FIRST_BUCKETS, sizeof *t->buckets);
	if (!t->buckets)
		return STATUS_NOMEM;
	t->n_buckets = FIRST_BUCKETS;
	return STATUS_OK;
}

void session_table_free(struct session_table *t)
{
	free(t->heap);
	free(t->buckets);
	t->heap = NULL;
	t->buckets = NULL;
}

/* ---- The index by id ---- */

static struct session **bucket_of(const struct session_table *t, int32_t tenant, const char *id)
{
	return &t->buckets[hash64(id, strlen(id), t->id_seed[0] + (uint64_t)tenant) & (t->n_buckets - 1)];
}

static struct session *lookup(const struct session_table *t, int32_t tenant, const char *id)
{
	struct session *s = *bucket_of(t, tenant, id);
	while (s && (s->tenant->id != tenant || strcmp(s->id, id) != 0))
		s = s->hash_next;
	return s;
}

/* Without memory the chains grow longer and nothing else changes. */
static void grow_buckets(struct session_table *t)
{
	struct session **old = t->buckets;
	size_t n_old = t->n_buckets;
	struct session **buckets = calloc(n_old * 2, sizeof *buckets);
	if (!buckets)
		return;
	t->buckets = buckets;
	t->n_buckets = n_old * 2;
	for (size_t i = 0; i < n_old; i++) {
		for (struct session *s = old[i], *next; s; s = next) {
			next = s->hash_next;
			struct session **b = bucket_of(t, s->tenant->id, s->id);
			s->hash_next = *b;
			*b = s;
		}
	}
	free(old);
}

/* ---- The heap of deadlines ---- */

static void heap_put(struct session_table *t, size_t at, struct session *s)
{
	t->heap[at] = s;
	s->heap_at = at;
	t->heap_moves++;
}

static void heap_up(struct session_table *t, size_t at)
{
	struct session *s = t->heap[at];
	while (at > 0 && t->heap[(at - 1) / 2]->heap_deadline_ms > s->heap_deadline_ms) {
		heap_put(t, at, t->heap[(at - 1) / 2]);
		at = (at - 1) / 2;
	}
	heap_put(t, at, s);
}

static void heap_down(struct session_table *t, size_t at)
{
	struct session *s = t->heap[at];
	for (;;) {
		size_t child = at * 2 + 1;
		if (child >= t->n_sessions)
			break;
		if (child + 1 < t->n_sessions &&
		    t->heap[child + 1]->heap_deadline_ms < t->heap[child]->heap_deadline_ms)
			child++;
		if (t->heap[child]->heap_deadline_ms >= s->heap_deadline_ms)
			break;
		heap_put(t, at, t->heap[child]);
		at = child;
	}
	heap_put(t, at, s);
}

static void heap_remove(struct session_table *t, struct session *s)
{
	size_t at = s->heap_at;
	struct session *moved = t->heap[--t->n_sessions];
	if (moved == s)
		return;
	heap_put(t, at, moved);
	heap_up(t, at);
	heap_down(t, moved->heap_at);
}

/* ---- Life ---- */

static int64_t add_ms(int64_t from, int64_t ms)
{
	return ms < 0 ? INT64_MAX : from > INT64_MAX - ms ? INT64_MAX : from + ms;
}

static int64_t ttl_end_ms(const struct session *s)
{
	return add_ms(s->created_ms, s->ttl_ms);
}

/* When its claim ends if no sign of life follows: a request that runs is none for the time after it. */
static int64_t claim_end_ms(const struct session *s)
{
	int64_t by_ttl = ttl_end_ms(s), by_heartbeat = add_ms(s->seen_ms, s->heartbeat_ms);
	return by_ttl < by_heartbeat ? by_ttl : by_heartbeat;
}

int64_t session_deadline_ms(const struct session *s)
{
	return s->running || s->n_waiting ? ttl_end_ms(s) : claim_end_ms(s);
}

static bool id_is_valid(const char *id)
{
	for (const char *c = id; *c; c++) {
		bool ok = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') ||
		          *c == '_' || *c == '-' || *c == '.';
		if (!ok)
			return false;
	}
	return id[0] != '\0';
}

/* What the client asked for, within the table's bounds; -1 (never) is for the server's own sessions. */
static int64_t bounded(int64_t asked, int64_t bound)
{
	if (asked < 0)
		return -1;
	return asked == 0 || asked > bound ? bound : asked;
}

/* Of a session and of all of them the smaller limit counts; 0 is none. */
static int32_t bounded_tokens(int32_t asked, int32_t bound)
{
	return asked <= 0 || (bound > 0 && asked > bound) ? bound : asked;
}

enum status session_create(struct session_table *t, const struct engine_session_params *p, struct session **out,
                           struct error *err)
{
	struct session *s;
	struct tenant *tenant = tenant_find(t->tenants, p->tenant);
	if (!tenant)
		return error_set(err, STATUS_NOMEM, "no memory for another tenant");
	char id[ENGINE_SESSION_ID_MAX + 1];
	if (p->id[0]) {
		if (!id_is_valid(p->id))
			return error_set_param(err, STATUS_INVALID, "id",
			                       "a session id is made of letters, digits, '_', '.' and '-'");
		memcpy(id, p->id, sizeof id);
		if (lookup(t, p->tenant, id))
			return error_set_param(err, STATUS_EXISTS, "id", "a session '%s' exists already", id);
	} else {
		uint64_t r[2];
		if (getrandom(r, sizeof r, 0) != sizeof r)
			return error_set(err, STATUS_INTERNAL, "the system gives no random numbers");
		snprintf(id, sizeof id, "sess_%016llx%016llx", (unsigned long long)r[0], (unsigned long long)r[1]);
	}
	if (t->n_sessions >= (size_t)t->max_sessions)
		return error_set(err, STATUS_LIMIT, "there are %d sessions already, the most that are allowed",
		                 t->max_sessions);
	if (tenant->limits.max_sessions > 0 && tenant->n_sessions >= tenant->limits.max_sessions) {
		tenant->refused++;
		return error_set_param(err, STATUS_LIMIT, "max_sessions",
		                       "this API key has %d sessions, the most that its max_sessions (%d) allows",
		                       tenant->n_sessions, tenant->limits.max_sessions);
	}
	if (t->n_sessions == t->cap_heap) {
		size_t cap = t->cap_heap ? t->cap_heap * 2 : 64;
		struct session **heap = realloc(t->heap, cap * sizeof(struct session *));
		if (!heap)
			return error_set(err, STATUS_NOMEM, "no memory for another session");
		t->heap = heap;
		t->cap_heap = cap;
	}
	s = calloc(1, sizeof *s);
	if (!s)
		return error_set(err, STATUS_NOMEM, "no memory for another session");
	memcpy(s->id, id, sizeof id);
	s->created_ms = s->seen_ms = clock_now_ms(t->clock);
	s->heartbeat_ms = bounded(p->heartbeat_timeout_ms, t->heartbeat_ms);
	s->ttl_ms = bounded(p->ttl_ms, t->ttl_ms);
	s->max_tokens = bounded_tokens(p->max_tokens, t->max_tokens);
	s->tenant = tenant;
	s->serial = t->created + 1;
	tenant->n_sessions++;
	if (t->n_sessions >= t->n_buckets)
		grow_buckets(t);
	struct session **b = bucket_of(t, tenant->id, id);
	s->hash_next = *b;
	*b = s;
	s->heap_deadline_ms = session_deadline_ms(s);
	t->heap[t->n_sessions] = s;
	s->heap_at = t->n_sessions++;
	heap_up(t, s->heap_at);
	t->created++;
	s->claim = t->prefix ? kv_prefix_claim_open(t->prefix, s->heap_deadline_ms) : 0;
	*out = s;
	return STATUS_OK;
}

void session_save(const struct session_table *t, const struct session *s, int64_t calendar_ms,
                  struct session_saved *out)
{
	memset(out, 0, sizeof *out);
	memcpy(out->id, s->id, sizeof out->id);
	memcpy(out->tenant, s->tenant->name, sizeof out->tenant);
	out->created_ms = calendar_ms - (clock_now_ms(t->clock) - s->created_ms);
	out->heartbeat_ms = s->heartbeat_ms;
	out->ttl_ms = s->ttl_ms;
	out->max_tokens = s->max_tokens;
	out->ended = s->ended;
}

enum status session_restore(struct session_table *t, int32_t tenant, const struct session_saved *saved,
                            int64_t calendar_ms, struct error *err)
{
	struct engine_session_params p = {
	        .heartbeat_timeout_ms = saved->heartbeat_ms,
	        .ttl_ms = saved->ttl_ms,
	        .max_tokens = saved->max_tokens,
	        .tenant = tenant,
	};
	struct session *s;
	/* A calendar that was set back makes nobody younger than now, and nobody is older than the calendar. */
	int64_t created_ms = saved->created_ms > 0 ? saved->created_ms : 0;
	int64_t age_ms = calendar_ms > created_ms ? calendar_ms - created_ms : 0;
	if (saved->ttl_ms >= 0 && age_ms >= saved->ttl_ms)
		return error_set(err, STATUS_NOT_FOUND, "the session's TTL has passed");
	memcpy(p.id, saved->id, sizeof p.id);
	enum status st = session_create(t, &p, &s, err);
	if (st != STATUS_OK)
		return st;
	s->created_ms -= age_ms;
	s->ended = saved->ended;
	s->heap_deadline_ms = session_deadline_ms(s);
	heap_up(t, s->heap_at);
	session_touch(t, s);
	return STATUS_OK;
}

struct session *session_find(struct session_table *t, int32_t tenant, const char *id)
{
	struct session *s = lookup(t, tenant, id);
	return s && session_deadline_ms(s) > clock_now_ms(t->clock) ? s : NULL;
}

void session_touch(struct session_table *t, struct session *s)
{
	s->seen_ms = clock_now_ms(t->clock);
	if (t->prefix)
		kv_prefix_claim_renew(t->prefix, s->claim, claim_end_ms(s));
}

struct session *session_next_expired(struct session_table *t)
{
	int64_t now = clock_now_ms(t->clock);
	while (t->n_sessions > 0 && t->heap[0]->heap_deadline_ms <= now) {
		struct session *s = t->heap[0];
		t->heap_looks++;
		int64_t deadline = session_deadline_ms(s);
		if (deadline <= now)
			return s;
		/*
		 * A session that runs has no heartbeat deadline now, but may have one the moment it stops: look again
		 * then.
		 */
		int64_t look_again =
			s->heartbeat_ms < 0 ? deadline : add_ms(now, s->heartbeat_ms > 0 ? s->heartbeat_ms : 1);
		s->heap_deadline_ms = deadline < look_again ? deadline : look_again;
		heap_down(t, 0);
	}
	return NULL;
}

int64_t session_next_deadline_ms(const struct session_table *t)
{
	return t->n_sessions ? t->heap[0]->heap_deadline_ms : INT64_MAX;
}

void session_remove(struct session_table *t, struct session *s)
{
	struct session **at = bucket_of(t, s->tenant->id, s->id);
	while (*at != s)
		at = &(*at)->hash_next;
	*at = s->hash_next;
	heap_remove(t, s);
	if (t->prefix)
		kv_prefix_claim_close(t->prefix, s->claim);
	kv_weak_free(t->prefix, &s->kv);
	parked_destroy(s->parked);
	s->tenant->n_sessions--;
	free(s);
}

/* ---- Its KV ---- */

void session_keep(struct session_table *t, struct session *s, const struct kv_seq *kv)
{
	if (t->prefix)
		kv_prefix_weaken(t->prefix, kv, &s->kv);
}

void session_recall(struct session *s, const struct kv_key *keys, int32_t n_pages, int32_t n_tokens)
{
	if (s)
		kv_weak_recall(keys, n_pages, n_tokens, &s->kv);
}

/* own: references on it that are the session's, weak and strong. */
static void describe_page(const struct session_table *t, const struct kv_pool *pool, int32_t page, int32_t own,
                          struct engine_session_info *out)
{
	int32_t refs = kv_pool_refs(pool, page);
	bool indexed = kv_pool_is_indexed(pool, page);
	out->references += refs;
	out->pages_indexed += indexed;
	out->pages_exclusive += refs - indexed + (t->prefix ? kv_prefix_n_weak(t->prefix, page) : 0) == own;
}

/*
 * Where its pages are, of which the first `alive` never left; those of a request that runs, and those that are its own,
 * are on the device, but for what a large one has below.
 */
static void describe_places(const struct session_table *t, const struct session *s, int32_t alive,
                            struct engine_session_info *out)
{
	out->pages_device = out->n_pages;
	if (s->running)
		kv_overflow_count(&s->running->spill, &out->pages_tier[KV_TIER_RAM], &out->pages_tier[KV_TIER_DISK]);
	if (s->running || s->parked)
		return;
	for (int32_t i = alive; i < s->kv.n_pages; i++) {
		const struct kv_key *key = &s->kv.keys[i];
		int tier = KV_TIER_KINDS;
		if (kv_prefix_has(t->prefix, key))
			out->pages_device++;
		else if (t->tiers && (tier = (int)kv_tiers_where(t->tiers, key)) < KV_TIER_KINDS)
			out->pages_tier[tier]++;
		else
			out->pages_lost++;
	}
}

/*
 * The pages of its running request, or those that are its own, or what is left in the index of those of its last one.
 */
static void describe_pages(const struct session_table *t, const struct session *s, const struct kv_pool *pool,
                           struct engine_session_info *out)
{
	int32_t alive = t->prefix ? kv_weak_alive(t->prefix, &s->kv) : 0;
	if (s->running || s->parked) {
		const struct kv_seq *kv = s->running ? &s->running->kv : &s->parked->kv;
		out->policy = kv_policy_name(s->running ? s->running->policy.kind : s->parked->policy.kind);
		out->n_logical = kv->n_tokens;
		out->n_tokens = kv_seq_places(kv) - kv->n_gone * KV_PAGE_TOKENS;
		out->n_pages = kv_seq_refs(kv);
		for (int32_t i = kv->n_gone; i < kv->n_pages; i++)
			describe_page(t, pool, kv->pages[i], 1 + (i < alive && s->kv.pages[i].page == kv->pages[i]),
			              out);
	} else {
		out->policy = kv_policy_name(KV_POLICY_FULL);
		out->n_pages = alive;
		out->n_tokens = out->n_logical =
			out->n_pages * KV_PAGE_TOKENS < s->kv.n_tokens ? out->n_pages * KV_PAGE_TOKENS : s->kv.n_tokens;
		for (int32_t i = 0; i < out->n_pages; i++)
			describe_page(t, pool, s->kv.pages[i].page, 1, out);
	}
	describe_places(t, s, alive, out);
	out->kv_bytes = (uint64_t)out->n_pages * kv_pool_layout(pool)->page_stride;
	out->positions_unused = out->n_pages * KV_PAGE_TOKENS - out->n_tokens;
}

void session_describe(const struct session_table *t, const struct session *s, const struct kv_pool *pool,
                      struct engine_session_info *out)
{
	int64_t now = clock_now_ms(t->clock), deadline = session_deadline_ms(s);
	memset(out, 0, sizeof *out);
	memcpy(out->id, s->id, sizeof out->id);
	out->age_ms = now - s->created_ms;
	out->idle_ms = s->running ? 0 : now - s->seen_ms;
	out->expires_in_ms = deadline == INT64_MAX ? -1 : deadline > now ? deadline - now : 0;
	out->heartbeat_timeout_ms = s->heartbeat_ms;
	out->ttl_ms = s->ttl_ms;
	describe_pages(t, s, pool, out);
	out->n_running = s->running != NULL;
	out->n_waiting = s->n_waiting;
	out->n_requests = s->ended.requests;
	out->prompt_tokens = s->ended.prompt_tokens;
	out->cached_tokens = s->ended.cached_tokens;
	out->generated_tokens = s->ended.generated_tokens;
	out->tenant = s->tenant->id;
	out->serial = s->serial;
	out->max_tokens = s->max_tokens;
	int64_t claim = claim_end_ms(s);
	out->claim_ms = claim == INT64_MAX ? -1 : claim > now ? claim - now : 0;
}

static int by_serial(const void *a, const void *b)
{
	const struct session *const *s = a, *const *r = b;
	return ((*s)->serial > (*r)->serial) - ((*s)->serial < (*r)->serial);
}

enum status session_list(const struct session_table *t, const struct kv_pool *pool, int32_t tenant,
                         const struct engine_session_page *page, struct engine_session_info **out, size_t *n,
                         bool *more)
{
	size_t limit = page->limit > 0 ? (size_t)page->limit : 0, found = 0;
	const struct session **all = calloc(t->n_sessions + 1, sizeof(struct session *));
	*out = NULL;
	*n = 0;
	if (!all)
		return STATUS_NOMEM;
	for (size_t i = 0; i < t->n_sessions; i++) {
		const struct session *s = t->heap[i];
		if (s->serial > page->after && (tenant == ENGINE_ALL_TENANTS || s->tenant->id == tenant))
			all[found++] = s;
	}
	qsort(all, found, sizeof(struct session *), by_serial);
	*more = found > limit;
	*n = *more ? limit : found;
	*out = calloc(*n + 1, sizeof **out);
	for (size_t i = 0; *out && i < *n; i++)
		session_describe(t, all[i], pool, &(*out)[i]);
	free(all);
	return *out ? STATUS_OK : STATUS_NOMEM;
}
