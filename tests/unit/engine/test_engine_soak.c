/*
 * A whole engine under everything at once, by engine.h alone: its own threads, a tiny model, a pool that is too small.
 * One thread submits and takes events, as the server's loop does; others do what any thread may: cancel, read figures,
 * move the clock that ends sessions. Every answer must begin like the one its prompt gets alone, every command must be
 * answered once, and at the end nothing is held. Under ThreadSanitizer this is the proof that only ids cross the
 * threads.
 *
 * A second run has tiers in memory and on disk below its pool, whose files are cut to nothing on the way.
 *
 * KVASIR_SOAK_OPS / 100 says how many commands (1,000).
 */
#include "tests/unit/unit.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "engine/engine.h"
#include "tests/support/tiny_model.h"

enum { PROMPTS = 24, ANSWER = 48, IN_FLIGHT = 40, SESSIONS = 8, TENANTS = 2 };

static char model_path[64];
static struct clock now;

/* Prompts begin alike, part at many places, and are as long as two to ten pages. */
static char prompts[PROMPTS][200];
static int32_t expected[PROMPTS][ANSWER];

static struct soak {
	struct engine *e;
	struct flight {
		uint64_t id; /* 0: free */
		int prompt;  /* -1: not a generation */
		int32_t n_tokens, max_tokens;
		bool prompt_seen;
	} flights[IN_FLIGHT];
	int n_in_flight;
	uint64_t rng;
	uint64_t n_stopped, n_length, n_cancelled, n_failed, n_replies, n_tokens;
	_Atomic uint64_t last_id;
	_Atomic bool ending;
	int64_t tick_ns; /* about how much time passes at once */
} k;

static int below(uint64_t *rng, int n)
{
	return (int)(unit_rand(rng) % (uint64_t)n);
}

/* disk: where the tiers are, or NULL: there are none. */
static struct engine *start(uint64_t kv_pages, const char *disk)
{
	struct engine_options o = {.model_path = model_path,
	                           .device = "cpu-reference",
	                           .n_threads = 2,
	                           .clock = &now,
	                           .kv_bytes = kv_pages * 4096,
	                           .max_running = 6,
	                           .step_tokens = 64,
	                           .max_sessions = SESSIONS - 2,
	                           .session_gc_ms = 50,
	                           .kv_ram_bytes = disk ? 24 * 4096 : 0,
	                           .kv_disk_dir = disk,
	                           .kv_disk_bytes = 200 * 8192};
	struct engine *e;
	struct list events;
	list_init(&events);
	assert_int_equal(engine_create(&o, &e, NULL), STATUS_OK);
	assert_true(engine_wait(e, &events, -1));
	engine_event_free(list_entry(list_pop_front(&events), struct engine_event, link));
	if (engine_state(e) != ENGINE_READY)
		fail_msg("%s", engine_load_error(e)->message);
	return e;
}

static struct engine_request *request(struct engine *e, int prompt, int32_t max_tokens)
{
	struct engine_request *r = engine_request_create(e);
	assert_non_null(r);
	r->text = strdup(prompts[prompt]);
	r->text_n = strlen(prompts[prompt]);
	r->max_tokens = max_tokens;
	r->sampling.temperature = 0;
	r->ignore_eos = true;
	return r;
}

/* ---- Events ---- */

static void take(struct engine_event *ev)
{
	struct flight *f = k.flights;
	while (f < k.flights + IN_FLIGHT && f->id != ev->request_id)
		f++;
	/* Nothing is heard of what has been answered. */
	assert_true(f < k.flights + IN_FLIGHT);
	switch (ev->type) {
	case ENGINE_EVENT_PROMPT:
		assert_true(f->prompt >= 0 && !f->prompt_seen);
		f->prompt_seen = true;
		return;
	case ENGINE_EVENT_TOKEN:
		assert_true(f->prompt_seen && f->n_tokens < f->max_tokens);
		assert_int_equal(ev->sample.token, expected[f->prompt][f->n_tokens]);
		f->n_tokens++;
		k.n_tokens++;
		return;
	case ENGINE_EVENT_DONE:
		assert_true(f->prompt >= 0);
		if (ev->finish == ENGINE_FINISH_LENGTH)
			assert_int_equal(f->n_tokens, f->max_tokens);
		k.n_length += ev->finish == ENGINE_FINISH_LENGTH;
		k.n_stopped += ev->finish == ENGINE_FINISH_STOP;
		k.n_cancelled += ev->finish == ENGINE_FINISH_CANCELLED;
		break;
	case ENGINE_EVENT_ERROR:
		/* Sessions come and go and places are few; nothing else may fail. */
		assert_true(ev->error.status == STATUS_NOT_FOUND || ev->error.status == STATUS_EXISTS ||
		            ev->error.status == STATUS_LIMIT);
		k.n_failed++;
		break;
	default:
		assert_true(f->prompt < 0);
		if (ev->kv)
			assert_int_equal(ev->kv->drift_pages, 0);
		k.n_replies++;
	}
	f->id = 0;
	k.n_in_flight--;
}

static void take_events(int64_t wait_ms)
{
	struct list events;
	list_init(&events);
	engine_wait(k.e, &events, wait_ms);
	for (struct list *l; (l = list_pop_front(&events));) {
		struct engine_event *ev = list_entry(l, struct engine_event, link);
		take(ev);
		engine_event_free(ev);
	}
}

/* ---- Commands ---- */

static void take_off(uint64_t id, int prompt, int32_t max_tokens)
{
	struct flight *f = k.flights;
	while (f->id)
		f++;
	*f = (struct flight){.id = id, .prompt = prompt, .max_tokens = max_tokens};
	k.n_in_flight++;
	atomic_store(&k.last_id, id);
}

static void submit_one(void)
{
	int prompt = below(&k.rng, PROMPTS);
	int32_t max_tokens = below(&k.rng, ANSWER + 1);
	struct engine_request *r = request(k.e, prompt, max_tokens);
	r->tenant = below(&k.rng, TENANTS);
	if (below(&k.rng, 2))
		snprintf(r->session, sizeof r->session, "s%d", below(&k.rng, SESSIONS));
	if (below(&k.rng, 4) == 0)
		r->cache_salt = strdup(below(&k.rng, 2) ? "a" : "b");
	take_off(r->id, prompt, max_tokens);
	engine_submit(k.e, r);
}

static void command_session(void)
{
	struct engine_session_params p = {.tenant = below(&k.rng, TENANTS)};
	const struct engine_session_page page = {0, 100};
	uint64_t id = engine_next_id(k.e);
	snprintf(p.id, sizeof p.id, "s%d", below(&k.rng, SESSIONS));
	take_off(id, -1, 0);
	switch (below(&k.rng, 8)) {
	case 0:
		engine_session_delete(k.e, id, p.tenant, p.id);
		break;
	case 1:
		engine_session_get(k.e, id, p.tenant, p.id);
		break;
	case 2:
		engine_session_list(k.e, id, ENGINE_ALL_TENANTS, &page);
		break;
	case 3:
		engine_kv_report(k.e, id, ENGINE_ALL_TENANTS, &page);
		break;
	case 4:
	case 5:
		engine_session_heartbeat(k.e, id, p.tenant, p.id);
		break;
	default:
		engine_session_create(k.e, id, &p);
	}
}

/* ---- The other threads ---- */

static void *cancel_at_random(void *arg)
{
	uint64_t rng = 3;
	(void)arg;
	while (!atomic_load(&k.ending)) {
		uint64_t last = atomic_load(&k.last_id);
		engine_cancel(k.e, last - (uint64_t)below(&rng, 20));
		engine_cancel(k.e, engine_next_id(k.e));
		usleep(2000);
	}
	return NULL;
}

static void *read_figures(void *arg)
{
	struct engine_tenant_usage usage;
	struct engine_stats s;
	uint64_t tokens = 0, rng = 4;
	(void)arg;
	while (!atomic_load(&k.ending)) {
		engine_stats(k.e, &s);
		/* No assertion of cmocka's here: it may only fail in the thread of the test. */
		if (s.pages_free + s.pages_cached > s.pages_total || s.kv.drift_pages != 0 ||
		    s.generated_tokens < tokens)
			abort();
		tokens = s.generated_tokens;
		engine_tenant_usage(k.e, below(&rng, TENANTS), &usage);
		if (engine_info(k.e)->n_vocab != TINY_VOCAB || engine_token_piece(k.e, 'x').n != 1)
			abort();
		usleep(500);
	}
	return NULL;
}

static void *pass_time(void *arg)
{
	uint64_t rng = 5;
	(void)arg;
	while (!atomic_load(&k.ending)) {
		clock_advance(&now, below(&rng, 100) * k.tick_ns * (below(&rng, 50) ? 1 : 100));
		usleep(1000);
	}
	return NULL;
}

/* ---- The soak ---- */

static void make_prompts(void)
{
	uint64_t rng = 11;
	for (int i = 0; i < PROMPTS; i++) {
		int n = 20 + below(&rng, 140), cut = below(&rng, 140);
		for (int c = 0; c < n; c++)
			prompts[i][c] = (char)(c < cut ? 'a' + i % 3 : 'a' + below(&rng, 26));
	}
}

/* What each prompt is answered with when nothing else goes on. */
static void answer_alone(void)
{
	struct engine *e = start(400, NULL);
	for (int i = 0; i < PROMPTS; i++) {
		int32_t n = 0;
		engine_submit(e, request(e, i, ANSWER));
		for (bool ended = false; !ended;) {
			struct list events;
			list_init(&events);
			assert_true(engine_wait(e, &events, 60000));
			for (struct list *l; (l = list_pop_front(&events));) {
				struct engine_event *ev = list_entry(l, struct engine_event, link);
				if (ev->type == ENGINE_EVENT_TOKEN)
					expected[i][n++] = ev->sample.token;
				assert_true(ev->type != ENGINE_EVENT_ERROR);
				ended = ended || ev->type == ENGINE_EVENT_DONE;
				engine_event_free(ev);
			}
		}
		assert_int_equal(n, ANSWER);
	}
	engine_destroy(e);
}

/* A disk that vanishes: reads end at once. Its files are left as they are, or there would be no pages to find. */
static void cut_files(const char *disk)
{
	char path[128];
	snprintf(path, sizeof path, "%s/kvasir-kv.0", disk);
	assert_int_equal(truncate(path, 0), 0);
}

/* Whether a read has found that the files were cut, or none will: a disk too slow to pay is not read. */
static bool cut_is_noticed(void)
{
	struct engine_stats s;
	engine_stats(k.e, &s);
	for (int32_t i = 0; i < s.tiers.n; i++) {
		const struct engine_tier *t = &s.tiers.tier[i];
		if (strcmp(t->kind, "disk") == 0)
			return t->off || t->corrupt > 0 || !t->pays;
	}
	return false;
}

static void everything_at_once(const char *disk)
{
	const char *setting = getenv("KVASIR_SOAK_OPS");
	int64_t n_commands = (setting && *setting ? atoll(setting) : 100000) / 100;
	pthread_t threads[3];
	struct engine_stats s;
	memset(&k, 0, sizeof k);
	clock_manual_init(&now, 1000000000);
	/*
	 * A disk that takes five seconds is given up: with tiers less time passes than a transfer takes on a busy
	 * machine.
	 */
	k.tick_ns = disk ? 50000 : 1000000;
	k.e = start(40, disk);
	k.rng = 1;
	const struct engine_tenant tenant = {.id = 1, .salt = "one", .limits = {.kv_bytes = 24 * 4096}};
	engine_tenant_set(k.e, &tenant);
	assert_int_equal(pthread_create(&threads[0], NULL, cancel_at_random, NULL), 0);
	assert_int_equal(pthread_create(&threads[1], NULL, read_figures, NULL), 0);
	assert_int_equal(pthread_create(&threads[2], NULL, pass_time, NULL), 0);
	/* With a disk for as long as it takes until it is read again. */
	for (int64_t i = 0; i < n_commands || (disk && i < 10 * n_commands && !cut_is_noticed()); i++) {
		while (k.n_in_flight == IN_FLIGHT)
			take_events(20000);
		if (disk && i == n_commands * 2 / 3)
			cut_files(disk);
		if (below(&k.rng, 3))
			submit_one();
		else
			command_session();
		if (below(&k.rng, 4) == 0)
			take_events(0);
	}
	atomic_store(&k.ending, true);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	while (k.n_in_flight > 0)
		take_events(60000);
	/* Asked for behind everything else: what is counted is the rest. */
	take_off(engine_next_id(k.e), -1, 0);
	engine_kv_report(k.e, k.last_id, ENGINE_ALL_TENANTS, &(struct engine_session_page){0, 1});
	while (k.n_in_flight > 0)
		take_events(60000);
	engine_stats(k.e, &s);
	assert_int_equal(s.n_running + s.n_waiting, 0);
	assert_int_equal(s.pages_free + s.pages_cached, s.pages_total);
	assert_int_equal(s.kv.drift_pages, 0);
	assert_int_equal(s.kv.refs_running + s.kv.refs_queued, 0);
	print_message("%lld commands: %llu answers to the end, %llu cancelled, %llu refused, %llu replies; %llu "
	              "tokens, %llu of %llu pages found, "
	              "%llu evicted, %llu preemptions, %llu sessions expired\n",
	              (long long)n_commands, (unsigned long long)k.n_length, (unsigned long long)k.n_cancelled,
	              (unsigned long long)k.n_failed, (unsigned long long)k.n_replies, (unsigned long long)k.n_tokens,
	              (unsigned long long)s.prefix_hits, (unsigned long long)s.prefix_queries,
	              (unsigned long long)s.prefix_evictions, (unsigned long long)s.preemptions,
	              (unsigned long long)s.sessions_expired);
	assert_true(k.n_length > 0 && k.n_cancelled > 0 && k.n_replies > 0 && s.prefix_evictions > 0 &&
	            s.prefix_hits > 0);
	assert_int_equal(k.n_stopped, 0);
	for (int32_t i = 0; i < s.tiers.n; i++) {
		const struct engine_tier *t = &s.tiers.tier[i];
		print_message("%s: %llu pages stored, %llu came back, %llu corrupt, %llu cancelled; %s\n", t->kind,
		              (unsigned long long)t->stored, (unsigned long long)t->fetched,
		              (unsigned long long)t->corrupt, (unsigned long long)t->cancelled,
		              t->off ? t->off_reason : "on");
		assert_true(t->stored > 0);
		/* What is read has an end too early, or holes where others were written behind it since. */
		if (strcmp(t->kind, "disk") == 0)
			assert_true(t->off || t->corrupt > 0 || !t->pays);
		else
			assert_true(!t->off && t->corrupt == 0);
	}
	assert_int_equal(s.tiers.n, disk ? 2 : 0);
	assert_int_equal(s.tiers.fetching, 0);
	assert_true(!disk || s.tiers.tier[0].fetched + s.tiers.tier[1].fetched > 0);
	engine_destroy(k.e);
}

static void an_engine_under_everything_at_once(void **state)
{
	(void)state;
	everything_at_once(NULL);
}

static void an_engine_with_tiers_whose_disk_vanishes(void **state)
{
	(void)state;
	char disk[] = "/tmp/kvasir-soak-XXXXXX", path[128];
	assert_non_null(mkdtemp(disk));
	everything_at_once(disk);
	snprintf(path, sizeof path, "%s/kvasir-kv.0", disk);
	assert_int_equal(unlink(path), 0);
	snprintf(path, sizeof path, "%s/kvasir-sessions", disk);
	unlink(path);
	assert_int_equal(rmdir(disk), 0);
}

static int make_model(void **state)
{
	(void)state;
	if (!tiny_model_write(model_path, 256, tiny_chat_template, 1))
		return -1;
	clock_manual_init(&now, 1000000000);
	make_prompts();
	answer_alone();
	return 0;
}

static int remove_model(void **state)
{
	(void)state;
	return unlink(model_path);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(an_engine_under_everything_at_once),
	                                   cmocka_unit_test(an_engine_with_tiers_whose_disk_vanishes)};
	return cmocka_run_group_tests(tests, make_model, remove_model);
}
