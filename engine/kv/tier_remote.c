/*
 * The tier in a Valkey or Redis server. An entry is a page that this daemon has put there or found there; the server
 * may have forgotten it since, and have others. Values are a header and the page's bytes.
 *
 * Threads. The worker owns the index, the loads and the list of free buffers, and copies pages to and from buffers; the
 * tier's own thread talks to the server. A job goes to the thread by one mailbox and comes back by another, as in
 * tier_disk.c.
 *
 * The tier is off after a transfer that fails or takes longer than the timeout: whoever waits for pages from there
 * computes them instead. The thread then tries to reach the server again, at longer and longer intervals; once it
 * answers the tier is on, and knows of no page. A daemon whose server is not there at the start begins in the same way.
 */
#include "engine/kv/tier_impl.h"

#ifdef KVASIR_HIREDIS

#include <assert.h>
#include <hiredis/hiredis.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/hash.h"
#include "engine/base/hmac.h"
#include "engine/base/log.h"
#include "engine/base/mailbox.h"

enum {
	NONE = EVICT_NONE,
	ENTRIES = 1 << 15,
	JOBS = 32,
	DEFAULT_TIMEOUT_MS = 500,
	LIFE_SECONDS = 3600,    /* the server forgets a page that long after it was put */
	MISSES = 4096,          /* keys that are known not to be there */
	MISS_MS = 2000,         /* for how long */
	/* before the first try to reach the server again; each takes twice as long as the one before, */
	RETRY_MS = 500,
	MOST_RETRY_MS = 30000,  /* up to this */
	NAME_BYTES = 3 + 2 * SHA256_BYTES + 1,
};

struct header {
	uint64_t magic;
	uint64_t page_bytes;
	struct kv_key key, parent;
	int32_t tokens[KV_PAGE_TOKENS];
	int32_t n_tokens;
	uint32_t first;
	uint8_t tag[SHA256_BYTES]; /* of all before it and the bytes behind it */
};
static const uint64_t MAGIC = 0x315047415056564B;
static_assert(sizeof(struct header) == 24 + 5 * SHA256_BYTES, "padding");

enum outcome { FOUND, ABSENT, WRONG, BROKEN };

struct job {
	struct list link;
	bool busy, write;
	int32_t entry, load;    /* load: or NONE */
	struct kv_page_name page;
	char *value;            /* [max_value_bytes] */
	size_t n;               /* of it */
	bool wide;              /* it has a wide copy */
	int64_t begun_ns;       /* by the tier's clock */
	enum outcome outcome;
	int64_t took_ns;
};

struct remote {
	struct kv_tier base;
	char address[256];
	char *secret;
	int64_t timeout_ms;
	size_t max_value_bytes; /* of a page with a wide copy */
	char *memory;           /* [JOBS][max_value_bytes] */
	struct job jobs[JOBS];
	int32_t n_busy, n_writes;
	struct {
		uint64_t hash;
		int64_t until_ms;
	} misses[MISSES];
	struct mailbox todo, done;
	struct list arrived;
	redisContext *server;   /* the thread's; NULL or in error: there is none */
	_Atomic bool lost;      /* the worker wants the thread to reach the server again */
	_Atomic bool back;      /* it has; every job from before has been answered */
	int64_t retry_ms, retry_at_ns; /* the thread's */
	char failure[128];      /* what the server said last; written before the job that failed is posted */
	void (*wake)(void *arg);
	void *wake_arg;
	pthread_t thread;
	_Atomic bool stop;
};

/* ---- The thread ---- */

static void name_of(const struct kv_key *key, char name[NAME_BYTES])
{
	memcpy(name, "kv:", 4);
	for (int i = 0; i < SHA256_BYTES; i++)
		snprintf(name + 3 + 2 * i, 3, "%02x", key->bytes[i]);
}

static void tag_of(const struct remote *r, const struct job *j, uint8_t tag[SHA256_BYTES])
{
	struct hmac h;
	hmac_init(&h, r->secret, strlen(r->secret));
	hmac_update(&h, j->value, offsetof(struct header, tag));
	hmac_update(&h, j->value + sizeof(struct header), j->n - sizeof(struct header));
	hmac_final(&h, tag);
}

static size_t value_bytes(const struct remote *r, bool wide)
{
	return sizeof(struct header) + kv_image_bytes(&r->base.device.layout, wide);
}

static void fill_header(const struct job *j, struct header *h)
{
	const struct kv_page_name *p = &j->page;
	*h = (struct header){.magic = MAGIC, .page_bytes = j->n - sizeof *h, .key = p->key, .parent = p->parent};
	memcpy(h->tokens, p->tokens, (size_t)p->n_tokens * sizeof *h->tokens);
	h->n_tokens = p->n_tokens;
	h->first = p->first;
}

/* Whether the value is that of the job's page, which it then holds. */
static bool take_value(const struct remote *r, struct job *j, const char *value, size_t n)
{
	struct header ours, theirs;
	uint8_t tag[SHA256_BYTES];
	j->wide = n == r->max_value_bytes && n != value_bytes(r, false);
	if (n != value_bytes(r, j->wide))
		return false;
	j->n = n;
	memcpy(j->value, value, n);
	memcpy(&theirs, value, sizeof theirs);
	fill_header(j, &ours);
	tag_of(r, j, tag);
	return memcmp(&ours, &theirs, offsetof(struct header, tag)) == 0 && hmac_equal(tag, theirs.tag);
}

static int append(struct remote *r, struct job *j)
{
	char name[NAME_BYTES];
	name_of(&j->page.key, name);
	if (!j->write)
		return redisAppendCommand(r->server, "GET %s", name);
	struct header h;
	fill_header(j, &h);
	memcpy(j->value, &h, sizeof h);
	tag_of(r, j, h.tag);
	memcpy(j->value, &h, sizeof h);
	return redisAppendCommand(r->server, "SET %s %b EX %d", name, j->value, j->n, LIFE_SECONDS);
}

static enum outcome read_reply(struct remote *r, struct job *j)
{
	redisReply *reply = NULL;
	enum outcome out = BROKEN;
	if (redisGetReply(r->server, (void **)&reply) != REDIS_OK) {
		snprintf(r->failure, sizeof r->failure, "%s",
		         r->server->errstr[0] ? r->server->errstr : "no answer in time");
		return BROKEN;
	}
	if (reply->type == REDIS_REPLY_ERROR)
		snprintf(r->failure, sizeof r->failure, "%.120s", reply->str);
	else if (j->write)
		out = FOUND;
	else if (reply->type == REDIS_REPLY_STRING)
		out = take_value(r, j, reply->str, reply->len) ? FOUND : WRONG;
	else
		out = ABSENT;
	freeReplyObject(reply);
	return out;
}

static bool is_there(const struct remote *r)
{
	return r->server && !r->server->err;
}

/* All that waits goes to the server at once, and the answers come in the same order. */
static void talk(struct remote *r, struct list *jobs)
{
	struct list sent;
	int64_t last = clock_now_ns(clock_system());
	list_init(&sent);
	for (struct list *l; (l = list_pop_front(jobs));) {
		struct job *j = list_entry(l, struct job, link);
		j->outcome = is_there(r) && append(r, j) == REDIS_OK ? FOUND : BROKEN;
		list_push_back(&sent, &j->link);
	}
	for (struct list *l; (l = list_pop_front(&sent));) {
		struct job *j = list_entry(l, struct job, link);
		if (j->outcome != BROKEN)
			j->outcome = is_there(r) ? read_reply(r, j) : BROKEN;
		if (j->outcome != BROKEN)
			r->retry_ms = r->retry_at_ns = 0;
		int64_t now = clock_now_ns(clock_system());
		j->took_ns = now - last;
		last = now;
		mailbox_post(&r->done, &j->link);
		if (r->wake)
			r->wake(r->wake_arg);
	}
}

static enum status reach(struct remote *r, struct error *err);

/* There are no jobs: the worker gives none while the tier is off, and those from before have been answered. */
static void try_again(struct remote *r)
{
	int64_t now = clock_now_ns(clock_system());
	if (now < r->retry_at_ns)
		return;
	enum status st = reach(r, NULL);
	/*
	 * One that answers and then fails at once is no better than one that does not: only a transfer that goes well
	 * starts anew.
	 */
	r->retry_ms = r->retry_ms == 0 ? RETRY_MS : r->retry_ms * 2 < MOST_RETRY_MS ? r->retry_ms * 2 : MOST_RETRY_MS;
	r->retry_at_ns = clock_now_ns(clock_system()) + r->retry_ms * 1000000;
	if (st != STATUS_OK)
		return;
	atomic_store(&r->lost, false);
	atomic_store(&r->back, true);
	if (r->wake)
		r->wake(r->wake_arg);
}

static void *thread_main(void *arg)
{
	struct remote *r = arg;
	struct list jobs;
	list_init(&jobs);
	for (;;) {
		/* Read before the mailbox, so that nothing posted before the stop is missed. */
		bool stop = atomic_load(&r->stop);
		if (mailbox_wait(&r->todo, &jobs, stop ? 0 : 50000000))
			talk(r, &jobs);
		else if (stop)
			return NULL;
		else if (atomic_load(&r->lost))
			try_again(r);
	}
}

/* ---- Off ---- */

static void turn_off(struct remote *r, const char *reason, const char *detail)
{
	struct kv_tier *t = &r->base;
	if (t->stats.off)
		return;
	t->stats.off = true;
	t->stats.off_reason = reason;
	atomic_store(&r->lost, true);
	log_msg(LOG_WARN, "kv_remote_off", "the remote tier at %s is off until it can be reached again: %s%s%s",
	        r->address, reason, *detail ? ": " : "", detail);
	for (int i = 0; i < KV_TIER_MAX_LOADS; i++) {
		struct kv_tier_load *l = &t->loads[i];
		if (l->entry == NONE || l->ended)
			continue;
		if (l->staging != NONE)
			r->jobs[l->staging].load = NONE;
		kv_tier_end_load(t, l, KV_LOAD_FAILED);
	}
	for (int32_t i = 0; i < t->n_entries; i++) {
		if (t->entries[i].present && t->entries[i].n_users == 0)
			kv_tier_forget(t, i);
	}
}

/* The server answers again. What it had may be gone, and what was known not to be there may have come. */
static void turn_on(struct remote *r)
{
	struct kv_tier *t = &r->base;
	atomic_store(&r->back, false);
	t->stats.off = false;
	t->stats.off_reason = "";
	t->stats.reconnects++;
	memset(r->misses, 0, sizeof r->misses);
	log_msg(LOG_INFO, "kv_remote_on", "the remote tier at %s is on again", r->address);
}

static bool has_news(const struct kv_tier *t)
{
	return atomic_load(&((struct remote *)t)->back);
}

/* ---- The tier ---- */

static size_t miss_at(const struct kv_key *key, uint64_t *hash)
{
	memcpy(hash, key->bytes, sizeof *hash);
	return *hash % MISSES;
}

static bool hopes(struct kv_tier *t, const struct kv_key *key)
{
	struct remote *r = (struct remote *)t;
	uint64_t hash;
	size_t at = miss_at(key, &hash);
	return r->misses[at].hash != hash || clock_now_ms(t->clock) >= r->misses[at].until_ms;
}

/* Writes leave half of the buffers to reads. */
static bool has_room(struct kv_tier *t)
{
	struct remote *r = (struct remote *)t;
	return r->n_busy < JOBS && r->n_writes < JOBS / 2;
}

static struct job *take_job(struct remote *r, bool write, int32_t entry)
{
	struct job *j = r->jobs;
	if (r->n_busy == JOBS || (write && !has_room(&r->base)))
		return NULL;
	while (j->busy)
		j++;
	j->busy = true;
	j->write = write;
	j->entry = entry;
	j->load = NONE;
	j->page = r->base.entries[entry].page;
	j->begun_ns = clock_now_ns(r->base.clock);
	r->n_busy++;
	r->n_writes += write;
	return j;
}

static void give_job_back(struct remote *r, struct job *j)
{
	j->busy = false;
	r->n_busy--;
	r->n_writes -= j->write;
}

static enum kv_tier_put put(struct kv_tier *t, int32_t entry, int32_t device_page)
{
	struct remote *r = (struct remote *)t;
	struct job *j = take_job(r, true, entry);
	if (!j)
		return KV_PUT_BUSY;
	j->wide = kv_image_is_wide(&t->device.layout, device_page);
	j->n = value_bytes(r, j->wide);
	if (kv_tier_read_page(t, device_page, j->wide, j->value + sizeof(struct header)) != STATUS_OK) {
		give_job_back(r, j);
		return KV_PUT_FAILED;
	}
	t->entries[entry].writing = true;
	t->stats.n_writing++;
	mailbox_post(&r->todo, &j->link);
	return KV_PUT_STORED;
}

static void end_write(struct remote *r, const struct job *j)
{
	struct kv_tier *t = &r->base;
	t->entries[j->entry].writing = false;
	t->stats.n_writing--;
	kv_tier_release(t, j->entry);
	if (j->outcome == FOUND) {
		t->stats.bytes_written += j->n;
		t->entries[j->entry].wide = j->wide;
		kv_tier_measure(&t->stats.write_bytes_per_s, j->n, j->took_ns);
	}
}

static void end_read(struct remote *r, const struct job *j)
{
	static const enum kv_tier_end ends[] = {[FOUND] = KV_LOAD_DONE,
	                                        [ABSENT] = KV_LOAD_ABSENT,
	                                        [WRONG] = KV_LOAD_CORRUPT,
	                                        [BROKEN] = KV_LOAD_FAILED};
	struct kv_tier *t = &r->base;
	enum kv_tier_end end = ends[j->outcome];
	uint64_t hash;
	if (end == KV_LOAD_DONE) {
		t->stats.bytes_read += j->n;
		kv_tier_measure(&t->stats.read_bytes_per_s, j->n, j->took_ns);
	} else {
		size_t at = miss_at(&j->page.key, &hash);
		r->misses[at].hash = hash;
		r->misses[at].until_ms = clock_now_ms(t->clock) + MISS_MS;
	}
	if (j->load != NONE) {
		struct kv_tier_load *l = &t->loads[j->load];
		if (end == KV_LOAD_DONE)
			end = kv_tier_deliver(t, l, j->wide, j->value + sizeof(struct header));
		kv_tier_end_load(t, l, end);
	}
	if (j->outcome != FOUND && t->entries[j->entry].present && t->entries[j->entry].n_users == 0)
		kv_tier_forget(t, j->entry);
}

static void start_load(struct remote *r, int32_t load)
{
	struct kv_tier_load *l = &r->base.loads[load];
	struct job *j;
	/* What is being put is not there yet; it is in the device still, or will be asked for again. */
	if (l->cancelled || r->base.entries[l->entry].writing) {
		kv_tier_end_load(&r->base, l, KV_LOAD_ABSENT);
	} else if ((j = take_job(r, false, l->entry))) {
		j->load = load;
		l->staging = (int32_t)(j - r->jobs);
		mailbox_post(&r->todo, &j->link);
	}
}

static void advance(struct kv_tier *t)
{
	struct remote *r = (struct remote *)t;
	int64_t now = clock_now_ns(t->clock);
	bool back = atomic_load(&r->back);
	mailbox_take(&r->done, &r->arrived);
	for (struct list *l; (l = list_pop_front(&r->arrived));) {
		struct job *j = list_entry(l, struct job, link);
		if (j->write)
			end_write(r, j);
		else
			end_read(r, j);
		if (j->outcome == BROKEN)
			turn_off(r, "a transfer failed", r->failure);
		if (t->stats.off && t->entries[j->entry].present && t->entries[j->entry].n_users == 0)
			kv_tier_forget(t, j->entry);
		give_job_back(r, j);
	}
	for (int i = 0; i < JOBS && !t->stats.off; i++) {
		if (r->jobs[i].busy && now - r->jobs[i].begun_ns > r->timeout_ms * 1000000)
			turn_off(r, "a transfer takes too long", "");
	}
	if (back)
		turn_on(r);
	for (int32_t i = 0; i < KV_TIER_MAX_LOADS; i++) {
		if (t->loads[i].entry != NONE && !t->loads[i].ended && t->loads[i].staging == NONE)
			start_load(r, i);
	}
}

static void wait_for(struct kv_tier *t, int64_t timeout_ms)
{
	struct remote *r = (struct remote *)t;
	if (r->n_busy > 0)
		mailbox_wait(&r->done, &r->arrived, timeout_ms * 1000000);
}

static void stats(const struct kv_tier *t, struct kv_tier_stats *out)
{
	const struct remote *r = (const struct remote *)t;
	out->used_bytes = (uint64_t)out->n_pages * value_bytes(r, false);
	out->index_bytes += JOBS * r->max_value_bytes + sizeof *r;
}

static void free_remote(struct remote *r)
{
	mailbox_destroy(&r->todo);
	mailbox_destroy(&r->done);
	if (r->server)
		redisFree(r->server);
	if (r->base.entries)
		kv_tier_fini(&r->base);
	free(r->memory);
	free(r->secret);
	free(r);
}

static void destroy(struct kv_tier *t)
{
	struct remote *r = (struct remote *)t;
	struct list left;
	atomic_store(&r->stop, true);
	/* Each transfer ends within the timeout. */
	pthread_join(r->thread, NULL);
	list_init(&left);
	mailbox_take(&r->done, &left);
	free_remote(r);
}

/* ---- Beginning ---- */

enum status kv_tier_remote_check(const char *address, struct error *err)
{
	const char *colon = strrchr(address, ':');
	char *end = NULL;
	long port = colon ? strtol(colon + 1, &end, 10) : 0;
	bool is_port = colon > address && colon[1] >= '0' && colon[1] <= '9' && !*end && port > 0 && port <= UINT16_MAX;
	if (strlen(address) >= sizeof((struct remote *)0)->address || (address[0] != '/' && !is_port))
		return error_set_param(err, STATUS_INVALID, "kv-remote",
		                       "kv-remote: \"%.200s\" is neither HOST:PORT nor the path of a socket", address);
	return STATUS_OK;
}

static enum status set_address(struct remote *r, const char *address, struct error *err)
{
	enum status st = kv_tier_remote_check(address, err);
	if (st == STATUS_OK)
		snprintf(r->address, sizeof r->address, "%s", address);
	return st;
}

/* A connection on which the server answers, in place of the one there was. */
static enum status reach(struct remote *r, struct error *err)
{
	struct timeval timeout = {r->timeout_ms / 1000, r->timeout_ms % 1000 * 1000};
	const char *address = r->address, *colon = strrchr(address, ':');
	char host[sizeof r->address];
	if (r->server)
		redisFree(r->server);
	if (address[0] == '/') {
		r->server = redisConnectUnixWithTimeout(address, timeout);
	} else {
		snprintf(host, sizeof host, "%.*s", (int)(colon - address), address);
		r->server = redisConnectWithTimeout(host, atoi(colon + 1), timeout);
	}
	if (!r->server)
		return error_set(err, STATUS_NOMEM, "no memory for the remote tier");
	if (r->server->err || redisSetTimeout(r->server, timeout) != REDIS_OK)
		return error_set(err, STATUS_IO, "the server at %s cannot be reached: %.120s", address,
		                 r->server->errstr);
	redisReply *reply = redisCommand(r->server, "PING");
	bool well = reply && reply->type == REDIS_REPLY_STATUS;
	error_set(err, STATUS_IO, "the server at %s does not take commands: %.120s", address,
	          reply && reply->str ? reply->str : r->server->errstr);
	if (reply)
		freeReplyObject(reply);
	return well ? STATUS_OK : STATUS_IO;
}

enum status kv_tier_remote_create(const struct kv_tier_device *device, const struct clock *clock,
                                  const struct kv_tier_remote_options *o, struct kv_tier **out, struct error *err)
{
	static const struct kv_tier_ops ops = {.put = put,
	                                       .has_room = has_room,
	                                       .has_news = has_news,
	                                       .hopes = hopes,
	                                       .advance = advance,
	                                       .wait = wait_for,
	                                       .stats = stats,
	                                       .destroy = destroy};
	struct remote *r = calloc(1, sizeof *r);
	struct error unreached = {0};
	if (!r)
		return error_set(err, STATUS_NOMEM, "no memory for the remote tier");
	r->timeout_ms = o->timeout_ms > 0 ? o->timeout_ms : DEFAULT_TIMEOUT_MS;
	r->max_value_bytes = sizeof(struct header) + kv_image_bytes(&device->layout, true);
	r->wake = o->wake;
	r->wake_arg = o->wake_arg;
	list_init(&r->arrived);
	mailbox_init(&r->todo, NULL, NULL);
	mailbox_init(&r->done, NULL, NULL);
	r->secret = strdup(o->secret ? o->secret : "");
	r->memory = malloc(JOBS * r->max_value_bytes);
	enum status st = r->secret && r->memory ? set_address(r, o->address, err)
	                                        : error_set(err, STATUS_NOMEM, "no memory for the remote tier");
	for (int i = 0; i < JOBS; i++)
		r->jobs[i].value = r->memory + (size_t)i * r->max_value_bytes;
	if (st == STATUS_OK)
		st = kv_tier_init(&r->base, &ops, device, clock, ENTRIES, err);
	if (st == STATUS_OK && reach(r, &unreached) != STATUS_OK)
		turn_off(r, "the server cannot be reached", unreached.message);
	if (st == STATUS_OK && pthread_create(&r->thread, NULL, thread_main, r) != 0)
		st = error_set(err, STATUS_NOMEM, "no thread for the remote tier");
	if (st != STATUS_OK) {
		free_remote(r);
		return st;
	}
	r->base.stats.kind = "remote";
	r->base.stats.type = kv_codec_elements(&device->layout, KV_FORM_F16);
	r->base.stats.io = "hiredis";
	*out = &r->base;
	return STATUS_OK;
}

#else

enum status kv_tier_remote_check(const char *address, struct error *err)
{
	return error_set_param(err, STATUS_UNSUPPORTED, "kv-remote",
	                       "kv-remote: this build has no hiredis to reach %.200s with", address);
}

enum status kv_tier_remote_create(const struct kv_tier_device *device, const struct clock *clock,
                                  const struct kv_tier_remote_options *o, struct kv_tier **out, struct error *err)
{
	(void)device;
	(void)clock;
	(void)out;
	return kv_tier_remote_check(o->address, err);
}

#endif
