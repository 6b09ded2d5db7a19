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

#include "engine/base/hash.h"
#include "engine/base/log.h"

enum { FORMAT = 2, PATH_BYTES = 4200 };
static const char MAGIC[8] = "KVSESSN";

/* In front of [n] struct session_saved. */
struct header {
	char magic[8];
	uint32_t format, record_bytes;
	struct kv_key identity;
	uint64_t n;
	uint64_t checksum; /* of the records, seeded with that of all before it */
};
static_assert(sizeof(struct header) == 8 + 8 + SHA256_BYTES + 16, "padding");

static uint64_t checksum(const struct header *h, const struct session_saved *records)
{
	return hash64(records, (size_t)h->n * sizeof *records, hash64(h, offsetof(struct header, checksum), 0));
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
static bool write_file(const char *dir, const struct header *h, const struct session_saved *records)
{
	char path[PATH_BYTES], temporary[PATH_BYTES];
	snprintf(path, sizeof path, "%s/kvasir-sessions", dir);
	snprintf(temporary, sizeof temporary, "%s/kvasir-sessions.new", dir);
	int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return false;
	bool ok = write_all(fd, h, sizeof *h) && write_all(fd, records, (size_t)h->n * sizeof *records) && fsync(fd) == 0;
	ok = close(fd) == 0 && ok;
	ok = ok && rename(temporary, path) == 0;
	if (!ok)
		unlink(temporary);
	return ok;
}

void restart_save(const char *dir, const struct kv_key *identity, struct session_table *sessions, struct kv_tiers *tiers,
                  const struct restart *r, int64_t limit_ms)
{
	int64_t deadline = clock_now_ms(sessions->clock) + limit_ms, now = calendar_ms(), pages = 0;
	struct header h = {.format = FORMAT, .record_bytes = sizeof(struct session_saved), .identity = *identity};
	struct session_saved *records = calloc(sessions->n_sessions + r->n + 1, sizeof *records);
	memcpy(h.magic, MAGIC, sizeof h.magic);
	for (size_t i = 0; i < sessions->n_sessions; i++) {
		const struct session *s = sessions->heap[i];
		pages += kv_tiers_save(tiers, &s->kv, deadline);
		/* Who has no name but is not tenant 0 could not be told from it. */
		bool named = s->tenant->id == 0 || s->tenant->name[0];
		if (records && named && session_deadline_ms(s) > clock_now_ms(sessions->clock))
			session_save(sessions, s, now, &records[h.n++]);
	}
	kv_tiers_flush(tiers, deadline);
	for (size_t i = 0; records && i < r->n; i++)
		records[h.n++] = r->waiting[i];
	if (records)
		h.checksum = checksum(&h, records);
	if (!records || (h.n > 0 && !write_file(dir, &h, records)))
		log_msg(LOG_WARN, "restart", "the sessions could not be saved in %s", dir);
	else if (h.n > 0)
		log_msg(LOG_INFO, "restart", "saved %" PRIu64 " sessions and their %" PRId64 " pages in %s", h.n, pages, dir);
	free(records);
}

/* The records of the file, [h->n], or NULL when it is not there or is none of ours. */
static struct session_saved *read_file(const char *path, const struct kv_key *identity, struct header *h)
{
	struct stat st;
	struct session_saved *records = NULL;
	FILE *f = fopen(path, "re");
	if (!f)
		return NULL;
	if (fstat(fileno(f), &st) != 0 || fread(h, sizeof *h, 1, f) != 1 || memcmp(h->magic, MAGIC, sizeof h->magic) != 0 ||
	    h->format != FORMAT || h->record_bytes != sizeof *records || memcmp(&h->identity, identity, sizeof *identity) != 0 ||
	    h->n > (uint64_t)st.st_size / sizeof *records)
		goto out;
	records = calloc((size_t)h->n + 1, sizeof *records);
	if (records && (fread(records, sizeof *records, (size_t)h->n, f) != h->n || h->checksum != checksum(h, records))) {
		free(records);
		records = NULL;
	}
out:
	if (!records)
		log_msg(LOG_WARN, "restart", "the sessions in %s are not used: they are damaged, or of another model or version", path);
	fclose(f);
	return records;
}

/* Those of one name become sessions, and leave the list. How many did. */
static size_t restore(struct restart *r, struct session_table *sessions, const char *name, int32_t tenant)
{
	int64_t now = calendar_ms();
	size_t kept = 0, n = 0;
	for (size_t i = 0; i < r->n; i++) {
		if (strcmp(r->waiting[i].tenant, name) != 0)
			r->waiting[kept++] = r->waiting[i];
		else if (session_restore(sessions, tenant, &r->waiting[i], now, NULL) == STATUS_OK)
			n++;
	}
	r->n = kept;
	return n;
}

void restart_load(const char *dir, const struct kv_key *identity, struct session_table *sessions, struct restart *r)
{
	char path[PATH_BYTES];
	struct header h;
	snprintf(path, sizeof path, "%s/kvasir-sessions", dir);
	r->waiting = read_file(path, identity, &h);
	/* It tells of one moment: a session that ends from now on must not come back. */
	unlink(path);
	if (!r->waiting)
		return;
	r->n = (size_t)h.n;
	for (size_t i = 0; i < r->n; i++) {
		r->waiting[i].id[ENGINE_SESSION_ID_MAX] = '\0';
		r->waiting[i].tenant[ENGINE_TENANT_NAME_MAX] = '\0';
	}
	size_t n = restore(r, sessions, "", 0);
	log_msg(LOG_INFO, "restart", "%zu of %" PRIu64 " saved sessions go on, %zu wait for their API keys", n, h.n, r->n);
}

void restart_claim(struct restart *r, struct session_table *sessions, const struct tenant *tenant)
{
	size_t before = r->n;
	if (r->n == 0 || !tenant->name[0])
		return;
	size_t n = restore(r, sessions, tenant->name, tenant->id);
	if (r->n < before)
		log_msg(LOG_INFO, "restart", "%zu of %zu saved sessions of the API key %s go on", n, before - r->n, tenant->name);
}

void restart_free(struct restart *r)
{
	free(r->waiting);
	*r = (struct restart){NULL, 0};
}
