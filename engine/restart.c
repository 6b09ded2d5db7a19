#include "engine/restart.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/hash.h"
#include "engine/base/log.h"

enum { FORMAT = 3, PATH_BYTES = 4200 };
static const char MAGIC[8] = "KVSESSN";

/* In front of [n] struct record and, behind these, the keys of all of their pages, [n_keys]. */
struct header {
	char magic[8];
	uint32_t format, record_bytes;
	struct kv_key identity;
	uint64_t n, n_keys;
	uint64_t checksum; /* of what follows, seeded with that of all before it */
};
static_assert(sizeof(struct header) == 8 + 8 + SHA256_BYTES + 24, "padding");

struct record {
	struct session_saved session;
	int32_t n_pages, n_tokens; /* of its KV, as struct kv_weak counts them */
};

/* What is behind the header. */
struct content {
	struct record *records; /* [n] */
	struct buf keys;        /* struct kv_key [n_keys] */
};

static uint64_t checksum(const struct header *h, const struct content *c)
{
	uint64_t sum = hash64(h, offsetof(struct header, checksum), 0);
	sum = hash64(c->records, (size_t)h->n * sizeof *c->records, sum);
	return hash64(c->keys.data, c->keys.len, sum);
}

static int64_t calendar_ms(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_REALTIME, &ts);
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

static bool write_all(int fd, const void *data, size_t n)
{
	const char *p = data;
	while (n > 0) {
		ssize_t k = write(fd, p, n);
		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return false;
		p += k;
		n -= (size_t)k;
	}
	return true;
}

/* The file appears whole or not at all. */
static bool write_file(const char *dir, const struct header *h, const struct content *c)
{
	char path[PATH_BYTES], temporary[PATH_BYTES];
	snprintf(path, sizeof path, "%s/kvasir-sessions", dir);
	snprintf(temporary, sizeof temporary, "%s/kvasir-sessions.new", dir);
	int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return false;
	bool ok = write_all(fd, h, sizeof *h) && write_all(fd, c->records, (size_t)h->n * sizeof *c->records) &&
	          write_all(fd, c->keys.data, c->keys.len) && fsync(fd) == 0;
	ok = close(fd) == 0 && ok;
	ok = ok && rename(temporary, path) == 0;
	if (!ok)
		unlink(temporary);
	return ok;
}

/* Whether a session goes on in the next process: who has no name but is not tenant 0 could not be told from it. */
static bool outlives(const struct session *s, const struct session_table *sessions)
{
	bool named = s->tenant->id == 0 || s->tenant->name[0];
	return named && session_deadline_ms(s) > clock_now_ms(sessions->clock);
}

static void add_record(struct header *h, struct content *c, const struct session_saved *session,
                       const struct kv_key *keys, int32_t n_pages, int32_t n_tokens)
{
	/* Of what is not indexed nothing can be found again. */
	int32_t most = n_pages * KV_PAGE_TOKENS;
	c->records[h->n++] = (struct record){*session, n_pages, n_tokens < most ? n_tokens : most};
	buf_append(&c->keys, keys, (size_t)n_pages * sizeof *keys);
	h->n_keys += (uint64_t)n_pages;
}

void restart_save(const char *dir, const struct kv_key *identity, struct session_table *sessions,
                  struct kv_tiers *tiers, const struct restart *r, int64_t limit_ms)
{
	int64_t deadline = clock_now_ms(sessions->clock) + limit_ms, now = calendar_ms(), pages = 0;
	struct header h = {.format = FORMAT, .record_bytes = sizeof(struct record), .identity = *identity};
	struct content c = {.records = calloc(sessions->n_sessions + r->n + 1, sizeof *c.records)};
	struct session_saved saved;
	memcpy(h.magic, MAGIC, sizeof h.magic);
	for (size_t i = 0; i < sessions->n_sessions; i++) {
		const struct session *s = sessions->heap[i];
		pages += kv_tiers_save(tiers, &s->kv, deadline);
		if (!c.records || !outlives(s, sessions))
			continue;
		session_save(sessions, s, now, &saved);
		add_record(&h, &c, &saved, s->kv.keys, s->kv.n_pages, s->kv.n_tokens);
	}
	kv_tiers_flush(tiers, deadline);
	for (size_t i = 0; c.records && i < r->n; i++) {
		const struct restart_session *s = &r->waiting[i];
		add_record(&h, &c, &s->saved, s->keys, s->n_pages, s->n_tokens);
	}
	bool ok = c.records && !c.keys.failed;
	if (ok)
		h.checksum = checksum(&h, &c);
	if (!ok || (h.n > 0 && !write_file(dir, &h, &c)))
		log_msg(LOG_WARN, "restart", "the sessions could not be saved in %s", dir);
	else if (h.n > 0)
		log_msg(LOG_INFO, "restart", "saved %" PRIu64 " sessions and their %" PRId64 " pages in %s", h.n, pages,
		        dir);
	free(c.records);
	buf_free(&c.keys);
}

/* The sizes that the header tells are those of the file. */
static bool sizes_fit(const struct header *h, uint64_t file_bytes)
{
	uint64_t left = file_bytes - sizeof *h; /* it has been read */
	if (h->n > left / sizeof(struct record))
		return false;
	left -= h->n * sizeof(struct record);
	return left % sizeof(struct kv_key) == 0 && h->n_keys == left / sizeof(struct kv_key);
}

/* Fills c with what follows the header; false when it is damaged. */
static bool read_content(FILE *f, const struct header *h, struct content *c)
{
	size_t key_bytes = (size_t)h->n_keys * sizeof(struct kv_key);
	uint64_t n_keys = 0;
	c->records = calloc((size_t)h->n + 1, sizeof *c->records);
	if (!c->records || !buf_reserve(&c->keys, key_bytes) ||
	    fread(c->records, sizeof *c->records, (size_t)h->n, f) != h->n ||
	    fread(c->keys.data, 1, key_bytes, f) != key_bytes)
		return false;
	c->keys.len = key_bytes;
	if (h->checksum != checksum(h, c))
		return false;
	for (uint64_t i = 0; i < h->n; i++) {
		const struct record *x = &c->records[i];
		if (x->n_pages < 0 || x->n_tokens < 0 || x->n_tokens > (int64_t)x->n_pages * KV_PAGE_TOKENS)
			return false;
		n_keys += (uint64_t)x->n_pages;
	}
	return n_keys == h->n_keys;
}

/* Reads the file; false when it is not there or is none of ours. */
static bool read_file(const char *path, const struct kv_key *identity, struct header *h, struct content *c)
{
	struct stat st;
	FILE *f = fopen(path, "re");
	if (!f)
		return false;
	bool ok = fstat(fileno(f), &st) == 0 && fread(h, sizeof *h, 1, f) == 1 &&
	          memcmp(h->magic, MAGIC, sizeof h->magic) == 0 && h->format == FORMAT &&
	          h->record_bytes == sizeof *c->records && memcmp(&h->identity, identity, sizeof *identity) == 0 &&
	          sizes_fit(h, (uint64_t)st.st_size) && read_content(f, h, c);
	if (!ok)
		log_msg(LOG_WARN, "restart",
		        "the sessions in %s are not used: they are damaged, or of another model or version", path);
	fclose(f);
	return ok;
}

/* Those of one name become sessions, and leave the list. How many did. */
static size_t restore(struct restart *r, struct session_table *sessions, const char *name, int32_t tenant)
{
	int64_t now = calendar_ms();
	size_t kept = 0, n = 0;
	for (size_t i = 0; i < r->n; i++) {
		struct restart_session *s = &r->waiting[i];
		if (strcmp(s->saved.tenant, name) != 0) {
			r->waiting[kept++] = *s;
			continue;
		}
		if (session_restore(sessions, tenant, &s->saved, now, NULL) == STATUS_OK) {
			session_recall(session_find(sessions, tenant, s->saved.id), s->keys, s->n_pages, s->n_tokens);
			n++;
		}
		free(s->keys);
	}
	r->n = kept;
	return n;
}

/*
 * Every session of the file waits. Without memory for its keys one has forgotten where its pages are, which costs it an
 * export at most.
 */
static void take_records(struct restart *r, const struct header *h, const struct content *c)
{
	const struct kv_key *keys = (const struct kv_key *)(const void *)c->keys.data;
	r->waiting = calloc((size_t)h->n + 1, sizeof *r->waiting);
	for (size_t i = 0; r->waiting && i < h->n; i++) {
		const struct record *x = &c->records[i];
		struct restart_session *s = &r->waiting[r->n++];
		*s = (struct restart_session){.saved = x->session,
		                              .keys = calloc((size_t)x->n_pages + 1, sizeof *s->keys)};
		s->saved.id[ENGINE_SESSION_ID_MAX] = '\0';
		s->saved.tenant[ENGINE_TENANT_NAME_MAX] = '\0';
		if (s->keys && x->n_pages > 0) {
			memcpy(s->keys, keys, (size_t)x->n_pages * sizeof *keys);
			s->n_pages = x->n_pages;
			s->n_tokens = x->n_tokens;
		}
		keys += x->n_pages;
	}
}

void restart_load(const char *dir, const struct kv_key *identity, struct session_table *sessions, struct restart *r)
{
	char path[PATH_BYTES];
	struct header h;
	struct content c = {0};
	snprintf(path, sizeof path, "%s/kvasir-sessions", dir);
	bool ok = read_file(path, identity, &h, &c);
	/* It tells of one moment: a session that ends from now on must not come back. */
	unlink(path);
	if (ok)
		take_records(r, &h, &c);
	free(c.records);
	buf_free(&c.keys);
	if (!r->waiting)
		return;
	size_t n = restore(r, sessions, "", 0);
	log_msg(LOG_INFO, "restart", "%zu of %" PRIu64 " saved sessions go on, %zu wait for their API keys", n, h.n,
	        r->n);
}

void restart_claim(struct restart *r, struct session_table *sessions, const struct tenant *tenant)
{
	size_t before = r->n;
	if (r->n == 0 || !tenant->name[0])
		return;
	size_t n = restore(r, sessions, tenant->name, tenant->id);
	if (r->n < before)
		log_msg(LOG_INFO, "restart", "%zu of %zu saved sessions of the API key %s go on", n, before - r->n,
		        tenant->name);
}

void restart_free(struct restart *r)
{
	for (size_t i = 0; i < r->n; i++)
		free(r->waiting[i].keys);
	free(r->waiting);
	*r = (struct restart){NULL, 0};
}
