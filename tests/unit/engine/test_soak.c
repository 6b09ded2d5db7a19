/*
 * The KV rooms under everything at once: sessions, turns, forks, cancels, expiry, eviction, preemption, salts and
 * copies on write, at random, over a pool that is always too small. What a page holds is a function of its tokens
 * (pretend_device.h), so a page that is served to the wrong request is a failure; and every so often all references are
 * counted again from those who should hold them, and compared with the pool's counts, its ledger and its bytes.
 *
 * The same again with tiers below, whose disk fails in one of the ways that disks do while the work goes on: nobody may
 * notice.
 *
 * KVASIR_SOAK_OPS says how many operations (100,000, shared out among the eviction policies), KVASIR_SOAK_SEED which
 * ones.
 */
#include "tests/unit/unit.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/census.h"
#include "engine/kv/tiers.h"
#include "tests/support/faulty_io.h"
#include "tests/support/memory_backend.h"
#include "tests/support/pretend_device.h"
#include "tests/support/taken_part.h"

enum {
	PAGES = 34,
	MAX_RUNNING = 6,
	STEP = 48,
	CLIENTS = 14,
	SALTS = 3,
	TENANTS = 2,
	TENANT_PAGES = 24, /* the limit of tenant 1 */
	FORKS = 2,
	HISTORY = 260, /* tokens a conversation may have */
	AUDIT_EVERY = 500,
	RAM_BYTES = 64 << 10, /* a few pages: the disk has most of them */
	DISK_PAGES = 100,
	MAX_HOLDERS = 128,
};

/* One row an operation: name, weight. */
#define OP_MAP(X)                                                                                                      \
	X(step, 80)                                                                                                    \
	X(create, 4)                                                                                                   \
	X(turn, 14)                                                                                                    \
	X(fork_turn, 4)                                                                                                \
	X(stateless, 5)                                                                                                \
	X(burst, 1)                                                                                                    \
	X(cancel, 6)                                                                                                   \
	X(delete, 2)                                                                                                   \
	X(heartbeat, 6)                                                                                                \
	X(tick, 4)                                                                                                     \
	X(evict, 2)                                                                                                    \
	X(calm, 1)                                                                                                     \
	X(share, 4)                                                                                                    \
	X(write, 4)

enum op {
#define X(name, weight) OP_##name,
	OP_MAP(X)
#undef X
	N_OPS
};

/* What a client remembers of its conversation, which changes its salt now and then. */
struct client {
	bool alive;
	char id[16];
	int32_t tenant;
	int salt;
	int32_t tokens[HISTORY + 64];
	int32_t n;
};

/* A sequence beside the scheduler that shares a running request's beginning and goes on in its own way. */
struct fork {
	struct kv_seq kv;
	int32_t tokens[HISTORY + 64];
	int salt;
};

static struct memory_backend mem;
static struct clock now;

struct soak {
	struct kv_pool *pool;
	struct kv_prefix *prefix;
	struct tenant_table tenants;
	struct session_table sessions;
	struct sched sched;
	struct census census;
	struct client clients[CLIENTS];
	struct fork forks[FORKS];
	struct kv_key roots[SALTS];
	struct kv_tiers *tiers; /* NULL: none */
	struct kv_tier *disk_tier;
	struct faulty *disk;
	char dir[64];
	uint64_t rng, next_id, n_done[N_OPS], n_answers, n_expired, n_audits, n_begun, n_given_up;
};

static int32_t below(struct soak *k, int32_t n)
{
	return (int32_t)(unit_rand(&k->rng) % (uint64_t)n);
}

static uint64_t salt_digest(int salt)
{
	return 0xABCDEF + (uint64_t)salt;
}

/* ---- Requests ---- */

static struct client *client_of(struct soak *k, const struct request *r)
{
	for (int i = 0; i < CLIENTS; i++) {
		if (k->clients[i].alive && strcmp(k->clients[i].id, r->spec->session) == 0)
			return &k->clients[i];
	}
	return NULL;
}

static int salt_of(const struct soak *k, const struct request *r)
{
	int salt = 0;
	while (memcmp(&k->roots[salt], &r->chain.root, sizeof r->chain.root) != 0)
		salt++;
	return salt;
}

static void submit(struct soak *k, const struct client *c, int salt, const int32_t *tokens, int32_t n,
                   int32_t max_tokens)
{
	if (k->sched.n_waiting >= 16)
		return;
	struct request *r = calloc(1, sizeof *r);
	r->spec = calloc(1, sizeof *r->spec);
	assert_non_null(r->spec);
	r->id = ++k->next_id;
	list_init(&r->link);
	kv_fetch_init(&r->fetch);
	for (int32_t i = 0; i < n; i++)
		assert_true(token_buf_add(&r->tokens, tokens[i]));
	r->n_prompt = n;
	r->max_total = n + max_tokens;
	r->chain = kv_chain_of(&k->roots[salt]);
	r->tenant = tenant_find(&k->tenants, c ? c->tenant : below(k, TENANTS));
	if (c) {
		strcpy(r->spec->session, c->id);
		r->session = session_find(&k->sessions, c->tenant, c->id);
		assert_non_null(r->session);
		session_touch(&k->sessions, r->session);
	}
	sched_add(&k->sched, r);
}

static void finish(struct soak *k, struct request *r, bool completed)
{
	struct client *c = client_of(k, r);
	r->completed = completed;
	if (c && completed && r->tokens.n <= HISTORY) {
		c->n = (int32_t)r->tokens.n;
		memcpy(c->tokens, r->tokens.ids, r->tokens.n * sizeof *c->tokens);
	}
	k->n_answers += completed;
	sched_remove(&k->sched, r);
	request_destroy(r);
}

/* A beginning that others have, too, up to a random place. */
static int32_t fresh_prompt(struct soak *k, int32_t *tokens, int32_t most)
{
	int32_t n = 1 + below(k, most), family = below(k, 3), cut = below(k, most);
	for (int32_t i = 0; i < n; i++)
		tokens[i] = i < cut ? family * 1000 + i : 10000 + below(k, 4);
	return n;
}

static struct client *any_client(struct soak *k)
{
	struct client *c = &k->clients[below(k, CLIENTS)];
	return c->alive && session_find(&k->sessions, c->tenant, c->id) ? c : NULL;
}

static void end_session(struct soak *k, struct session *s)
{
	for (int i = 0; i < CLIENTS; i++) {
		if (k->clients[i].alive && strcmp(k->clients[i].id, s->id) == 0)
			k->clients[i].alive = false;
	}
	if (s->running)
		finish(k, s->running, false);
	list_each(l, next, &k->sched.waiting) {
		struct request *r = list_entry(l, struct request, link);
		if (r->session == s)
			finish(k, r, false);
	}
	session_remove(&k->sessions, s);
}

static void collect_sessions(struct soak *k)
{
	for (struct session *s; (s = session_next_expired(&k->sessions)); k->n_expired++)
		end_session(k, s);
}

/* ---- Operations ---- */

/* A step that has begun before its pages were there; each fourth ends too soon for another reason. */
static bool arrive(struct soak *k)
{
	struct kv_arrival *a = k->sched.batch.arrival;
	bool here = true;
	int32_t layers = ++k->n_begun % 4 ? kv_pool_layout(k->pool)->n_layer : below(k, 3);
	assert_int_equal(k->sched.batch.n_seqs, 1);
	for (int32_t layer = 0; layer < layers && here; layer++)
		here = a->wait(a, layer);
	here = here && k->n_begun % 4;
	here = sched_arrived(&k->sched, here);
	k->n_given_up += !here;
	return here;
}

static void do_step(struct soak *k)
{
	if (!sched_build(&k->sched)) {
		/* As the worker does. */
		if (k->tiers && kv_tiers_busy(k->tiers))
			kv_tier_wait(k->disk_tier, 1);
		return;
	}
	const struct batch *b = &k->sched.batch;
	uint64_t digest[MAX_RUNNING];
	if (b->arrival && !arrive(k))
		return;
	for (int32_t i = 0; i < b->n_seqs; i++) {
		const struct request *r = k->sched.part[i].request;
		assert_int_equal(b->seq[i].first_position, r->kv.n_tokens);
		for (int32_t row = 0; row < b->seq[i].n_rows; row++)
			assert_int_equal(b->token[b->seq[i].first_row + row], r->tokens.ids[r->kv.n_tokens + row]);
		digest[i] = pretend_compute(k->pool, b->seq[i].block_table, r->tokens.ids, r->kv.n_tokens,
		                            b->seq[i].n_rows, salt_digest(salt_of(k, r)));
	}
	int32_t n_seqs = b->n_seqs;
	for (int32_t i = 0; i < n_seqs; i++) {
		struct request *r = k->sched.part[i].request;
		if (take_part(&k->sched, &k->sched.part[i], pretend_token(digest[i])))
			finish(k, r, true);
	}
}

static struct client *new_client(struct soak *k)
{
	struct client *c = &k->clients[below(k, CLIENTS)];
	struct engine_session_params p = {0};
	struct session *s;
	if (c->alive)
		return NULL;
	collect_sessions(k);
	snprintf(c->id, sizeof c->id, "c%" PRIu64, ++k->next_id);
	strcpy(p.id, c->id);
	p.tenant = c->tenant = below(k, TENANTS);
	p.heartbeat_timeout_ms = 1 + below(k, 40000);
	p.ttl_ms = 1 + below(k, 400000);
	assert_int_equal(session_create(&k->sessions, &p, &s, NULL), STATUS_OK);
	c->alive = true;
	c->salt = below(k, SALTS);
	c->n = 0;
	return c;
}

static void do_create(struct soak *k)
{
	new_client(k);
}

static void do_turn(struct soak *k)
{
	struct client *c = any_client(k);
	if (!c)
		return;
	if (below(k, 20) == 0)
		c->salt = below(k, SALTS);
	if (c->n == 0 || c->n > HISTORY - 100)
		c->n = fresh_prompt(k, c->tokens, 120);
	for (int32_t i = 1 + below(k, 30); i > 0; i--)
		c->tokens[c->n++] = 20000 + below(k, 1000);
	submit(k, c, c->salt, c->tokens, c->n, below(k, 80));
}

/* A conversation that goes on from an earlier place: in its own session, or as a new one with the same tenant. */
static void do_fork_turn(struct soak *k)
{
	struct client *from = any_client(k), *c = from;
	if (!from || from->n < 2)
		return;
	if (below(k, 2)) {
		c = new_client(k);
		if (!c || !from->alive)
			return;
		c->salt = from->salt;
		c->n = from->n;
		memcpy(c->tokens, from->tokens, sizeof c->tokens);
	}
	c->n = 1 + below(k, c->n < HISTORY - 100 ? c->n : HISTORY - 80);
	c->tokens[c->n++] = 30000 + below(k, 1000);
	submit(k, c, c->salt, c->tokens, c->n, below(k, 80));
}

static void do_stateless(struct soak *k)
{
	int32_t tokens[HISTORY];
	submit(k, NULL, below(k, SALTS), tokens, fresh_prompt(k, tokens, 120), below(k, 120));
}

/* n > 1: equal prompts that arrive together. */
static void do_burst(struct soak *k)
{
	int32_t tokens[HISTORY], n = fresh_prompt(k, tokens, 200), salt = below(k, SALTS);
	for (int i = 0; i < 4; i++)
		submit(k, NULL, salt, tokens, n, below(k, 30));
}

static void do_cancel(struct soak *k)
{
	struct list *heads[] = {&k->sched.running, &k->sched.waiting};
	struct list *head = heads[below(k, 2)];
	int32_t at = below(k, 8);
	list_each(l, next, head) {
		if (at-- == 0) {
			struct request *r = list_entry(l, struct request, link);
			assert_ptr_equal(sched_find(&k->sched, r->id), r);
			finish(k, r, false);
			return;
		}
	}
}

static void do_delete(struct soak *k)
{
	struct client *c = any_client(k);
	if (c)
		end_session(k, session_find(&k->sessions, c->tenant, c->id));
}

static void do_heartbeat(struct soak *k)
{
	struct client *c = any_client(k);
	if (c)
		session_touch(&k->sessions, session_find(&k->sessions, c->tenant, c->id));
}

/* Time passes for the disk as well: what is only slow by the test's clock must not look as if it hung. */
static void let_disk_work(struct soak *k)
{
	while (!k->disk->hold && !kv_tier_quiet(k->disk_tier)) {
		kv_tier_wait(k->disk_tier, 1);
		kv_tiers_poll(k->tiers);
	}
}

static void do_tick(struct soak *k)
{
	if (k->tiers)
		let_disk_work(k);
	clock_advance(&now, (below(k, 16) ? below(k, 1500) : below(k, 30000)) * INT64_C(1000000));
	collect_sessions(k);
	/* Now and then the device computes so quickly that no tier pays. */
	if (k->tiers)
		kv_tiers_prefill_rate(k->tiers, below(k, 8) ? 1 : 1e15);
}

static void do_evict(struct soak *k)
{
	kv_prefix_evict(k->prefix, clock_now_ms(&now), below(k, 2) ? EVICT_FOR_PROMPT : EVICT_FOR_DECODE);
}

/* Nobody asks for anything, then one client does whose pages have left: it begins while they come. */
static void do_calm(struct soak *k)
{
	struct list *heads[] = {&k->sched.running, &k->sched.waiting};
	for (int i = 0; i < 2; i++) {
		while (!list_empty(heads[i]))
			finish(k, list_entry(heads[i]->next, struct request, link), false);
	}
	for (int i = 0; i < 12; i++)
		do_evict(k);
	do_turn(k);
	for (int i = 0; i < 6; i++)
		do_step(k);
}

static void check_fork(struct soak *k, const struct fork *f)
{
	pretend_compute(k->pool, f->kv.pages, f->tokens, f->kv.n_tokens, 0, salt_digest(f->salt));
}

static void do_share(struct soak *k)
{
	struct fork *f = &k->forks[below(k, FORKS)];
	kv_seq_release(k->pool, &f->kv);
	if (list_empty(&k->sched.running) || below(k, 3) == 0)
		return;
	const struct request *r = list_entry(k->sched.running.next, struct request, link);
	int32_t n = r->kv.n_tokens < 120 ? r->kv.n_tokens : 120;
	if (n == 0)
		return;
	n = 1 + below(k, n);
	/*
	 * The rest of a prompt is made writable once, at admission: until it is computed only full pages may be shared.
	 */
	if (r->state == REQUEST_PREFILL)
		n -= n % KV_PAGE_TOKENS;
	assert_int_equal(kv_seq_share(k->pool, &f->kv, &r->kv, n), STATUS_OK);
	memcpy(f->tokens, r->tokens.ids, (size_t)n * sizeof *f->tokens);
	f->salt = salt_of(k, r);
	check_fork(k, f);
}

/* Writes on from a shared beginning: its tail is copied first, and the other's stays as it was. */
static void do_write(struct soak *k)
{
	struct fork *f = &k->forks[below(k, FORKS)];
	int32_t n = 1 + below(k, 10);
	if (f->kv.n_tokens == 0 || f->kv.n_tokens + n > 130)
		return;
	check_fork(k, f);
	if (kv_seq_prepare(k->pool, &f->kv, n) != STATUS_OK)
		return;
	for (int32_t i = 0; i < n; i++)
		f->tokens[f->kv.n_tokens + i] = 40000 + below(k, 1000);
	pretend_compute(k->pool, f->kv.pages, f->tokens, f->kv.n_tokens, n, salt_digest(f->salt));
	f->kv.n_tokens += n;
}

/* ---- The audit ---- */

struct audit {
	struct kv_pool_counts counts;
	int32_t refs[PAGES], refs_of[PAGES][KV_HOLDER_KINDS];
	struct kv_holder holders[PAGES][MAX_HOLDERS];
};

static void expect(struct audit *a, int32_t page, struct kv_holder holder)
{
	assert_true(page >= 0 && page < PAGES && a->refs[page] < MAX_HOLDERS);
	a->holders[page][a->refs[page]++] = holder;
	a->counts.refs[holder.kind]++;
	if (a->refs_of[page][holder.kind]++ == 0)
		a->counts.pages[holder.kind]++;
}

static void expect_seq(struct audit *a, const struct kv_seq *s, struct kv_holder holder)
{
	for (int32_t i = 0; i < s->n_pages; i++)
		expect(a, s->pages[i], holder);
}

/* The ledger has exactly these holders. */
static void check_holders(const struct kv_pool *pool, int32_t page, struct kv_holder *expected, int32_t n)
{
	struct kv_holder found[MAX_HOLDERS];
	assert_int_equal(kv_pool_holders(pool, page, found, MAX_HOLDERS), n);
	for (int32_t i = 0; i < n; i++) {
		int32_t j = i;
		while (j < n && !kv_holder_is(expected[j], found[i]))
			j++;
		assert_true(j < n);
		expected[j] = expected[i];
	}
}

static void audit(struct soak *k)
{
	static struct audit a;
	struct kv_prefix_stats index;
	struct kv_pool_counts counts;
	struct engine_kv census;
	int64_t charged[TENANTS] = {0}, not_the_engines = 0;
	int32_t n_idle = 0, n_waiting = 0, n_running = 0;
	memset(&a, 0, sizeof a);
	list_each(l, next, &k->sched.running) {
		const struct request *r = list_entry(l, struct request, link);
		expect_seq(&a, &r->kv, (struct kv_holder){KV_HOLDER_RUNNING, r->id});
		charged[r->tenant->id] += r->kv.n_pages;
		n_running++;
	}
	list_each(l, next, &k->sched.waiting) {
		const struct request *r = list_entry(l, struct request, link);
		expect_seq(&a, &r->kv, (struct kv_holder){KV_HOLDER_WAITING, r->id});
		for (int32_t i = 0; i < r->fetch.n; i++) {
			if (kv_fetch_page(&r->fetch, i) != KV_NO_PAGE)
				expect(&a, kv_fetch_page(&r->fetch, i),
				       (struct kv_holder){KV_HOLDER_COPY, r->fetch.id});
		}
		n_waiting++;
	}
	assert_int_equal(n_running, k->sched.n_running);
	assert_int_equal(n_waiting, k->sched.n_waiting);
	for (size_t i = 0; i < k->sessions.n_sessions; i++) {
		const struct session *s = k->sessions.heap[i];
		int32_t alive = kv_weak_alive(k->prefix, &s->kv);
		assert_true(alive >= 0 && alive <= s->kv.n_pages &&
		            alive * KV_PAGE_TOKENS < s->kv.n_tokens + KV_PAGE_TOKENS);
	}
	for (int i = 0; i < FORKS; i++)
		expect_seq(&a, &k->forks[i].kv, (struct kv_holder){KV_HOLDER_OTHER, (uint64_t)i});
	for (int32_t page = 0; page < PAGES; page++) {
		if (kv_prefix_page_tokens(k->prefix, page) > 0) {
			expect(&a, page, (struct kv_holder){KV_HOLDER_INDEX, 0});
			n_idle += a.refs[page] == 1;
		}
		a.counts.n_free += a.refs[page] == 0;
		a.counts.n_shared += a.refs[page] > 1;
		assert_int_equal(kv_pool_refs(k->pool, page), a.refs[page]);
		for (int kind = 0; kind < KV_HOLDER_KINDS; kind++)
			assert_int_equal(kv_pool_refs_of(k->pool, page, kind), a.refs_of[page][kind]);
		not_the_engines += a.refs_of[page][KV_HOLDER_OTHER] +
		                   (a.refs[page] > 0 && a.refs[page] == a.refs_of[page][KV_HOLDER_OTHER]);
		if (kv_pool_has_ledger(k->pool))
			check_holders(k->pool, page, a.holders[page], a.refs[page]);
	}
	a.counts.n_pages = PAGES;
	kv_pool_counts(k->pool, &counts);
	assert_memory_equal(&counts, &a.counts, sizeof counts);
	kv_prefix_stats(k->prefix, &index);
	assert_int_equal(index.n_pages, a.counts.pages[KV_HOLDER_INDEX]);
	assert_int_equal(index.n_idle, n_idle);
	/* Bytes: what the device gave, and what is in use of it. */
	assert_int_equal(mem.allocated, PAGES * PRETEND_PAGE);
	int64_t drift = (int64_t)(PAGES - kv_pool_n_free(k->pool)) * PRETEND_PAGE;
	for (int32_t page = 0; page < PAGES; page++)
		drift -= a.refs[page] > 0 ? PRETEND_PAGE : 0;
	assert_int_equal(drift, 0);
	for (int32_t i = 0; i < TENANTS; i++)
		assert_int_equal(tenant_find(&k->tenants, i)->kv.n_pages, charged[i]);
	assert_true(charged[1] <= TENANT_PAGES);
	/*
	 * The engine's own audit does not know the sequences beside its scheduler, and nothing else that it would have
	 * to.
	 */
	census_take(&k->census, &census);
	assert_int_equal(census.drift_pages, not_the_engines);
	for (int i = 0; i < FORKS; i++)
		check_fork(k, &k->forks[i]);
	k->n_audits++;
}

/* ---- The soak ---- */

static void start(struct soak *k, const char *policy, uint64_t seed)
{
	struct kv_layout layout = pretend_layout();
	memset(k, 0, sizeof *k);
	log_set_level(LOG_ERROR); /* fragmentation is not the point here */
	k->rng = seed;
	memory_backend_init(&mem);
	clock_manual_init(&now, 1);
	assert_int_equal(kv_pool_create(&mem.base, &layout, PAGES, &k->pool, NULL), STATUS_OK);
	assert_int_equal(kv_prefix_create(k->pool, policy, &k->prefix, NULL), STATUS_OK);
	assert_int_equal(tenant_table_init(&k->tenants, layout.page_stride), STATUS_OK);
	const struct engine_tenant limited = {.id = 1, .limits = {.kv_bytes = TENANT_PAGES * layout.page_stride}};
	assert_int_equal(tenant_set(&k->tenants, &limited), STATUS_OK);
	assert_int_equal(session_table_init(&k->sessions, &k->tenants, k->prefix, &now, 30000, 300000, CLIENTS),
	                 STATUS_OK);
	assert_int_equal(
		sched_init(&k->sched, k->pool, k->prefix, &k->sessions, &now, MAX_RUNNING, STEP, MAX_RUNNING + 8),
		STATUS_OK);
	assert_int_equal(census_init(&k->census, k->pool, &k->sched, &k->sessions, &k->tenants), STATUS_OK);
	for (int i = 0; i < SALTS; i++) {
		char name[8];
		snprintf(name, sizeof name, "%d", i);
		struct kv_root root = {.page_tokens = KV_PAGE_TOKENS, .salt = str_from(name)};
		kv_key_root(&root, &k->roots[i]);
	}
	for (int i = 0; i < FORKS; i++)
		k->forks[i].kv.holder = (struct kv_holder){KV_HOLDER_OTHER, (uint64_t)i};
}

static void do_op(struct soak *k, enum op op)
{
	switch (op) {
#define X(name, weight)                                                                                                \
	case OP_##name:                                                                                                \
		do_##name(k);                                                                                          \
		break;
		OP_MAP(X)
#undef X
	case N_OPS:
		break;
	}
	k->n_done[op]++;
}

static enum op random_op(struct soak *k)
{
	static const int weights[] = {
#define X(name, weight) weight,
	        OP_MAP(X)
#undef X
	};
	int total = 0, op = 0;
	for (int i = 0; i < N_OPS; i++)
		total += weights[i];
	for (int32_t at = below(k, total); at >= weights[op]; op++)
		at -= weights[op];
	return (enum op)op;
}

static void end_work(struct soak *k)
{
	for (struct list *l; (l = k->sched.running.next) != &k->sched.running;)
		finish(k, list_entry(l, struct request, link), false);
	for (struct list *l; (l = k->sched.waiting.next) != &k->sched.waiting;)
		finish(k, list_entry(l, struct request, link), false);
	while (k->sessions.n_sessions > 0)
		end_session(k, k->sessions.heap[0]);
	for (int i = 0; i < FORKS; i++)
		kv_seq_release(k->pool, &k->forks[i].kv);
	audit(k);
}

static void end(struct soak *k)
{
	kv_tiers_destroy(k->tiers);
	sched_free(&k->sched);
	session_table_free(&k->sessions);
	census_free(&k->census);
	for (int32_t i = 0; i < TENANTS; i++)
		assert_int_equal(tenant_find(&k->tenants, i)->kv.n_pages, 0);
	tenant_table_free(&k->tenants);
	kv_prefix_destroy(k->prefix);
}

/* ---- Tiers ---- */

/* What happens to the disk on the way, one row a kind: name, and what to do to it. */
#define FAULT_MAP(X)                                                                                                   \
	X(none, (void)0)                                                                                               \
	X(enospc, disk->write_error = ENOSPC)                                                                          \
	X(eio, disk->read_error = EIO)                                                                                 \
	X(short_transfers, disk->half = true)                                                                          \
	X(wrong_bytes, disk->flip = 3)                                                                                 \
	X(hang, disk->hold = true)

enum fault {
#define X(name, act) FAULT_##name,
	FAULT_MAP(X)
#undef X
	N_FAULTS
};

static const char *strike(struct faulty *disk, enum fault fault)
{
	switch (fault) {
#define X(name, act)                                                                                                   \
	case FAULT_##name:                                                                                             \
		act;                                                                                                   \
		return #name;
		FAULT_MAP(X)
#undef X
	case N_FAULTS:
		break;
	}
	return "";
}

static void start_tiers(struct soak *k)
{
	const struct kv_tier_device device = {&mem.base, kv_pool_slab(k->pool), pretend_layout()};
	struct kv_tier *ram;
	struct error err = {0};
	strcpy(k->dir, "/tmp/kvasir-soak-XXXXXX");
	assert_non_null(mkdtemp(k->dir));
	k->disk = faulty_create();
	k->disk->page_bytes = PRETEND_PAGE;
	struct kv_tier_disk_options o = {
	        .dir = k->dir,
	        .bytes = (DISK_PAGES + 1) * 2 * KV_FILE_BLOCK,
	        .identity = k->roots[0],
	        .version = "1",
	        .host = "here",
	        .io = &k->disk->base,
	        .stall_ms = 40000, /* longer than any tick */
	};
	if (kv_tier_ram_create(&device, &now, RAM_BYTES, KV_FORM_F16, &ram, &err) != STATUS_OK ||
	    kv_tier_disk_create(&device, &now, &o, &k->disk_tier, &err) != STATUS_OK)
		fail_msg("%s", err.message);
	assert_int_equal(kv_tiers_create(k->pool, k->prefix, (struct kv_tier *[KV_TIER_KINDS]){ram, k->disk_tier}, &now,
	                                 &k->tiers),
	                 STATUS_OK);
	k->sched.tiers = k->tiers;
	k->sched.overlaps = true;
}

static void end_hang(struct soak *k)
{
	k->disk->hold = false;
	k->disk->base.ops->kick(&k->disk->base);
}

static void remove_files(const struct soak *k)
{
	char path[128];
	snprintf(path, sizeof path, "%s/kvasir-kv.0", k->dir);
	assert_int_equal(unlink(path), 0);
	assert_int_equal(rmdir(k->dir), 0);
}

/* It would prove little if the tiers had little to do, or the fault had come to nothing. */
static void judge_tiers(const struct soak *k, enum fault fault, int64_t n_ops)
{
	struct kv_tiers_stats s;
	kv_tiers_stats(k->tiers, &s);
	const struct kv_tier_stats *ram = &s.tier[KV_TIER_RAM], *disk = &s.tier[KV_TIER_DISK];
	print_message("disk %s: %" PRIu64 " and %" PRIu64 " pages stored in RAM and on disk, %" PRIu64 " and %" PRIu64
	              " came back, %" PRIu64 " corrupt, %" PRIu64 " of %" PRIu64 " fetches cancelled; %" PRIu64
	              " begun with, %" PRIu64 " of these given up; off: %s\n",
	              strike(&(struct faulty){0}, fault), ram->put[KV_PUT_STORED], disk->put[KV_PUT_STORED],
	              s.fetched[KV_TIER_RAM], s.fetched[KV_TIER_DISK], disk->loads[KV_LOAD_CORRUPT],
	              s.fetches_cancelled, s.fetches, k->n_begun, k->n_given_up, disk->off ? disk->off_reason : "no");
	uint64_t some = (uint64_t)n_ops / 2000;
	assert_true(ram->put[KV_PUT_STORED] > some && s.fetched[KV_TIER_RAM] > some && !ram->off);
	assert_true(disk->put[KV_PUT_STORED] > some && s.fetched[KV_TIER_DISK] > 0 &&
	            (disk->off || s.fetches_cancelled > 0));
	assert_int_equal(disk->off, fault == FAULT_enospc || fault == FAULT_eio || fault == FAULT_hang);
	assert_int_equal(disk->loads[KV_LOAD_CORRUPT] > 0, fault == FAULT_wrong_bytes);
	assert_true(disk->loads[KV_LOAD_CORRUPT] <= (uint64_t)k->disk->n_flipped);
	assert_int_equal(k->disk->n_halved > 0, fault == FAULT_short_transfers);
	assert_true(k->n_begun > 0 && k->n_given_up >= k->n_begun / 4 &&
	            (fault != FAULT_none || k->n_given_up < k->n_begun));
	assert_int_equal(s.n_fetching, 0);
	assert_true(ram->used_bytes <= ram->cap_bytes && disk->used_bytes <= disk->cap_bytes);
}

/*
 * The same counts at the end as at the start, and nothing wrong in between. fault: of the disk below, or N_FAULTS: no
 * tiers.
 */
static void soak(const char *policy, int64_t n_ops, int64_t seed, enum fault fault)
{
	static struct soak k;
	struct kv_pool_counts first, last;
	struct kv_prefix_stats index;
	start(&k, policy, (uint64_t)seed);
	if (fault != N_FAULTS)
		start_tiers(&k);
	kv_pool_counts(k.pool, &first);
	int64_t strikes_at = n_ops / 2 + below(&k, (int32_t)(n_ops / 4));
	for (int64_t i = 0; i < n_ops; i++) {
		do_op(&k, random_op(&k));
		if (k.tiers && i == strikes_at)
			strike(k.disk, fault);
		if (i % AUDIT_EVERY == 0)
			audit(&k);
	}
	kv_prefix_stats(k.prefix, &index);
	uint64_t n_preemptions = k.sched.n_preemptions;
	end_work(&k);
	if (k.tiers) {
		judge_tiers(&k, fault, n_ops);
		end_hang(&k);
	}
	end(&k);
	if (k.tiers)
		remove_files(&k);
	kv_pool_counts(k.pool, &last);
	assert_memory_equal(&first, &last, sizeof first);
	assert_int_equal(kv_pool_destroy(k.pool), STATUS_OK);
	assert_int_equal(mem.allocated, 0);
	print_message("%s: %" PRId64 " operations, %" PRIu64 " audits without drift; %" PRIu64 " answers, %" PRIu64
	              " of %" PRIu64 " pages found, %" PRIu64 " indexed, %" PRIu64 " evicted, %" PRIu64
	              " copied, %" PRIu64 " preemptions, %" PRIu64 " sessions expired\n",
	              policy, n_ops, k.n_audits, k.n_answers, index.hits, index.queries, index.inserted,
	              index.evicted[EVICT_FOR_PROMPT] + index.evicted[EVICT_FOR_DECODE], mem.n_copied, n_preemptions,
	              k.n_expired);
	/* It would prove little if any of this were rare. */
	uint64_t some = (uint64_t)n_ops / 1000;
	assert_true(k.n_answers > some && index.hits > some && mem.n_copied > some && n_preemptions > some &&
	            k.n_expired > some);
	assert_true(index.evicted[EVICT_FOR_PROMPT] > some && index.evicted[EVICT_FOR_DECODE] > some);
	for (int op = 0; op < N_OPS; op++)
		assert_true(k.n_done[op] > some);
}

static int64_t setting(const char *name, int64_t otherwise)
{
	const char *s = getenv(name);
	return s && *s ? atoll(s) : otherwise;
}

static void random_work_leaves_nothing_behind_and_serves_nothing_wrong(void **state)
{
	(void)state;
	int64_t n_ops = setting("KVASIR_SOAK_OPS", 100000), seed = setting("KVASIR_SOAK_SEED", 20260101),
		n_policies = 0;
	while (evict_policy_name((size_t)n_policies))
		n_policies++;
	for (int64_t i = 0; i < n_policies; i++)
		soak(evict_policy_name((size_t)i), n_ops / n_policies + 1, seed + i, N_FAULTS);
}

static void tiers_and_failing_disks_change_nothing_of_that(void **state)
{
	(void)state;
	int64_t n_ops = setting("KVASIR_SOAK_OPS", 100000), seed = setting("KVASIR_SOAK_SEED", 20260101),
		n_policies = 0;
	while (evict_policy_name((size_t)n_policies))
		n_policies++;
	for (int64_t i = 0; i < N_FAULTS; i++)
		soak(evict_policy_name((size_t)((i + seed) % n_policies)), n_ops / N_FAULTS + 1, seed + i,
		     (enum fault)i);
}

UNIT_MAIN(cmocka_unit_test(random_work_leaves_nothing_behind_and_serves_nothing_wrong),
          cmocka_unit_test(tiers_and_failing_disks_change_nothing_of_that))
