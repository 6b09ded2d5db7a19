#include "engine/kv/tier_file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/hash.h"
#include "engine/base/log.h"
#include "engine/kv/tier_io.h"

static const char MAGIC[8] = "KVASIRKV";
static const uint64_t RECORD_MAGIC = 0x4B56524543524431; /* "KVRECRD1" */
/* 2: a checksum for each part of a page. */
enum { FORMAT = 2, BYTE_ORDER_MARK = 0x01020304, LOCK_TRIES = 200, LOCK_PAUSE_US = 5000 };

/* No padding: checksums cover every byte, and what a compiler leaves in between would differ. */
static_assert(sizeof(struct kv_file_header) == 8 + 8 + KV_FILE_ID + SHA256_BYTES + 24 + 8 + 48 + 80 + 8, "padding");
static_assert(sizeof(struct kv_record_header) ==
                      8 + KV_FILE_ID + 16 + 2 * SHA256_BYTES + 4 * KV_PAGE_TOKENS + 8 + 8 * KV_IMAGE_PARTS + 8,
              "padding");

/* A file is at least this large, so that a tier of some gigabytes is few files, and one of terabytes not one alone. */
static const uint64_t FILE_BYTES = (uint64_t)4 << 30;

enum status kv_file_plan(const struct kv_tier_disk_options *o, const struct kv_layout *layout, struct kv_file_set *out,
                         struct error *err)
{
	struct kv_file_header *h = &out->common;
	uint64_t n_files = (o->bytes + FILE_BYTES - 1) / FILE_BYTES;
	memset(out, 0, sizeof *out);
	if (n_files > KV_FILE_MAX)
		n_files = KV_FILE_MAX;
	if (strlen(o->dir) + 32 > sizeof out->dir)
		return error_set_param(err, STATUS_INVALID, "kv-disk", "the name of the directory is too long");
	strcpy(out->dir, o->dir);
	memcpy(h->magic, MAGIC, sizeof h->magic);
	h->byte_order = BYTE_ORDER_MARK;
	h->format = FORMAT;
	memcpy(h->identity, o->identity.bytes, sizeof h->identity);
	h->page_bytes = kv_image_bytes(layout, o->pages == KV_TIER_WIDE);
	h->record_bytes = KV_FILE_BLOCK + (h->page_bytes + KV_FILE_BLOCK - 1) / KV_FILE_BLOCK * KV_FILE_BLOCK;
	uint64_t each = n_files ? o->bytes / n_files : 0;
	h->n_slots = each > KV_FILE_BLOCK ? (each - KV_FILE_BLOCK) / h->record_bytes : 0;
	if (h->n_slots > INT32_MAX / KV_FILE_MAX)
		h->n_slots = INT32_MAX / KV_FILE_MAX;
	if (h->n_slots == 0)
		return error_set_param(err, STATUS_INVALID, "kv-disk",
		                       "a disk tier of %llu bytes holds no page of %llu", (unsigned long long)o->bytes,
		                       (unsigned long long)h->record_bytes);
	h->n_files = (uint32_t)n_files;
	snprintf(h->version, sizeof h->version, "%s", o->version ? o->version : "");
	snprintf(h->host, sizeof h->host, "%s", o->host ? o->host : "");
	out->n_files = (int32_t)n_files;
	out->n_parts = kv_image_n_parts(layout, o->pages == KV_TIER_WIDE);
	for (int32_t i = 0; i < out->n_parts; i++)
		out->part[i] = kv_image_part(layout, out->n_parts, i);
	/* A wide copy belongs to the only part that there is then. */
	out->part[out->n_parts - 1].end = h->page_bytes;
	for (int i = 0; i < KV_FILE_MAX; i++)
		out->fd[i] = -1;
	return STATUS_OK;
}

static uint64_t file_bytes(const struct kv_file_set *s)
{
	return KV_FILE_BLOCK + s->common.n_slots * s->common.record_bytes;
}

uint64_t kv_file_bytes(const struct kv_file_set *s)
{
	return file_bytes(s) * (uint64_t)s->n_files;
}

int32_t kv_file_n_slots(const struct kv_file_set *s)
{
	return (int32_t)s->common.n_slots * s->n_files;
}

struct kv_file_place kv_file_place(const struct kv_file_set *s, int32_t i)
{
	uint64_t file = (uint64_t)i / s->common.n_slots, slot = (uint64_t)i % s->common.n_slots;
	return (struct kv_file_place){s->fd[file], KV_FILE_BLOCK + slot * s->common.record_bytes, s->id[file], slot};
}

/* ---- Opening ---- */

static void file_name(const struct kv_file_set *s, int i, char *out, size_t n)
{
	snprintf(out, n, "%s/kvasir-kv.%d", s->dir, i);
}

static uint64_t header_checksum(const struct kv_file_header *h)
{
	return hash64(h, offsetof(struct kv_file_header, checksum), 0);
}

/* What is wrong with the header of file i, or NULL. */
static const char *mismatch(const struct kv_file_set *s, int i, const struct kv_file_header *h)
{
	const struct kv_file_header *c = &s->common;
	if (memcmp(h->magic, c->magic, sizeof h->magic) != 0)
		return "it is not a tier's file";
	if (h->byte_order != c->byte_order)
		return "it has another byte order";
	if (h->checksum != header_checksum(h))
		return "its header is damaged";
	if (h->format != c->format)
		return "it has another format";
	if (memcmp(h->identity, c->identity, sizeof h->identity) != 0 || h->page_bytes != c->page_bytes)
		return "it is of another model, KV type or backend";
	if (memcmp(h->version, c->version, sizeof h->version) != 0)
		return "it is of another version";
	if (memcmp(h->host, c->host, sizeof h->host) != 0)
		return "it is of another host";
	if (h->record_bytes != c->record_bytes || h->n_slots != c->n_slots || h->index != (uint32_t)i ||
	    h->n_files != c->n_files)
		return "it is of a tier of another size";
	return NULL;
}

static enum status make_file(struct kv_file_set *s, int i, struct kv_io *io, void *block, struct error *err)
{
	struct kv_file_header h = s->common;
	int fd = s->fd[i];
	if (getrandom(h.id, sizeof h.id, 0) != sizeof h.id)
		return error_set(err, STATUS_INTERNAL, "the system gives no random numbers");
	h.index = (uint32_t)i;
	h.checksum = header_checksum(&h);
	memset(block, 0, KV_FILE_BLOCK);
	memcpy(block, &h, sizeof h);
	if (ftruncate(fd, 0) != 0)
		return error_set(err, STATUS_IO, "cannot empty file %d of the disk tier in %s: %s", i, s->dir,
		                 strerror(errno));
	int e = io->ops->allocate(io, fd, file_bytes(s));
	if (e != 0)
		return error_set(err, STATUS_IO, "%s has no room for %llu bytes of the disk tier: %s", s->dir,
		                 (unsigned long long)file_bytes(s), strerror(-e));
	/* The header last: a file that is killed here is none. */
	if (pwrite(fd, block, KV_FILE_BLOCK, 0) != KV_FILE_BLOCK || fsync(fd) != 0)
		return error_set(err, STATUS_IO, "cannot write file %d of the disk tier in %s: %s", i, s->dir,
		                 strerror(errno));
	memcpy(s->id[i], h.id, sizeof h.id);
	s->fresh[i] = true;
	return STATUS_OK;
}

static int open_direct(struct kv_file_set *s, const char *name)
{
	int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
	int fd = s->direct ? open(name, flags | O_DIRECT, 0600) : open(name, flags, 0600);
	if (fd < 0 && errno == EINVAL && s->direct) {
		s->direct = false;
		fd = open(name, flags, 0600);
	}
	return fd;
}

/*
 * After kill -9 the kernel still winds up the transfers of the process that died, and keeps its files open until then:
 * a daemon that is started again at once waits for that.
 */
static bool lock_file(int fd)
{
	for (int i = 0; i < LOCK_TRIES; i++) {
		if (flock(fd, LOCK_EX | LOCK_NB) == 0)
			return true;
		usleep(LOCK_PAUSE_US);
	}
	return false;
}

static enum status open_file(struct kv_file_set *s, int i, struct kv_io *io, void *block, struct error *err)
{
	char name[KV_FILE_NAME_MAX + 32];
	struct kv_file_header h;
	struct stat st;
	file_name(s, i, name, sizeof name);
	s->fd[i] = open_direct(s, name);
	if (s->fd[i] < 0 || fchmod(s->fd[i], 0600) != 0 || fstat(s->fd[i], &st) != 0)
		return error_set(err, STATUS_IO, "cannot open %s: %s", name, strerror(errno));
	if (!S_ISREG(st.st_mode))
		return error_set(err, STATUS_IO, "%s is not a file", name);
	if (!lock_file(s->fd[i]))
		return error_set(err, STATUS_LIMIT, "another process uses %s", name);
	if (st.st_size == 0)
		return make_file(s, i, io, block, err);
	memset(block, 0, KV_FILE_BLOCK);
	ssize_t n = pread(s->fd[i], block, KV_FILE_BLOCK, 0);
	memcpy(&h, block, sizeof h);
	const char *wrong = n != KV_FILE_BLOCK                 ? "its header cannot be read"
	                    : mismatch(s, i, &h)               ? mismatch(s, i, &h)
	                    : (uint64_t)st.st_size != file_bytes(s) ? "it has been cut"
	                                                            : NULL;
	if (!wrong) {
		memcpy(s->id[i], h.id, sizeof h.id);
		return STATUS_OK;
	}
	log_msg(LOG_WARN, "kv_disk", "the pages in %s are not used: %s", name, wrong);
	return make_file(s, i, io, block, err);
}

enum status kv_file_open(struct kv_file_set *s, struct kv_io *io, struct error *err)
{
	enum status st = STATUS_OK;
	char name[KV_FILE_NAME_MAX + 32];
	void *block = aligned_alloc(KV_FILE_BLOCK, KV_FILE_BLOCK);
	if (!block)
		return error_set(err, STATUS_NOMEM, "no memory for the disk tier");
	s->direct = true;
	if (mkdir(s->dir, 0700) != 0 && errno != EEXIST)
		st = error_set(err, STATUS_IO, "cannot make the directory %s: %s", s->dir, strerror(errno));
	for (int i = 0; i < s->n_files && st == STATUS_OK; i++)
		st = open_file(s, i, io, block, err);
	for (int i = s->n_files; i < KV_FILE_MAX && st == STATUS_OK; i++) {
		file_name(s, i, name, sizeof name);
		unlink(name);
	}
	free(block);
	if (st != STATUS_OK)
		kv_file_close(s);
	return st;
}

void kv_file_close(struct kv_file_set *s)
{
	for (int i = 0; i < s->n_files; i++) {
		if (s->fd[i] >= 0)
			close(s->fd[i]);
		s->fd[i] = -1;
	}
}

/* ---- Records ---- */

static uint64_t record_checksum(const struct kv_record_header *h)
{
	return hash64(h, offsetof(struct kv_record_header, checksum), RECORD_MAGIC);
}

static uint64_t part_checksum(const struct kv_file_set *s, const void *record, int32_t part, uint64_t generation)
{
	const struct kv_image_part *p = &s->part[part];
	return hash64((const char *)record + KV_FILE_BLOCK + p->begin, p->end - p->begin,
	              generation * KV_IMAGE_PARTS + (uint64_t)part);
}

void kv_record_part(const struct kv_file_set *s, int32_t part, size_t *begin, size_t *end)
{
	const size_t block = KV_FILE_BLOCK;
	*begin = (block + s->part[part].begin) / block * block;
	*end = (block + s->part[part].end + block - 1) / block * block;
}

bool kv_record_part_check(const struct kv_file_set *s, const void *record, int32_t part, uint64_t generation,
                          uint64_t sum)
{
	return part_checksum(s, record, part, generation) == sum;
}

void kv_record_seal(const struct kv_file_set *s, int32_t slot, const struct kv_page_name *page, uint64_t generation,
                    void *record, struct kv_record_sums *sums)
{
	struct kv_file_place place = kv_file_place(s, slot);
	struct kv_record_header h = {
	        .magic = RECORD_MAGIC,
	        .slot = place.slot,
	        .generation = generation,
	        .key = page->key,
	        .parent = page->parent,
	        .n_tokens = page->n_tokens,
	        .first = page->first,
	};
	size_t used = KV_FILE_BLOCK + s->common.page_bytes;
	memcpy(h.file_id, place.id, sizeof h.file_id);
	memcpy(h.tokens, page->tokens, (size_t)page->n_tokens * sizeof *h.tokens);
	for (int32_t i = 0; i < s->n_parts; i++)
		h.part_checksum[i] = part_checksum(s, record, i, generation);
	h.checksum = record_checksum(&h);
	memcpy(sums->part, h.part_checksum, sizeof h.part_checksum);
	memset(record, 0, KV_FILE_BLOCK);
	memcpy(record, &h, sizeof h);
	/* What pads it was some other page's. */
	memset((char *)record + used, 0, s->common.record_bytes - used);
}

bool kv_record_read(const struct kv_file_set *s, int32_t slot, const void *record, struct kv_page_name *page,
                    uint64_t *generation, struct kv_record_sums *sums)
{
	struct kv_file_place place = kv_file_place(s, slot);
	struct kv_record_header h;
	memcpy(&h, record, sizeof h);
	if (h.magic != RECORD_MAGIC || h.checksum != record_checksum(&h) || h.slot != place.slot ||
	    memcmp(h.file_id, place.id, sizeof h.file_id) != 0 || h.n_tokens < 1 || h.n_tokens > KV_PAGE_TOKENS)
		return false;
	*page = (struct kv_page_name){.key = h.key, .parent = h.parent, .n_tokens = h.n_tokens, .first = h.first != 0};
	memcpy(page->tokens, h.tokens, sizeof page->tokens);
	memcpy(sums->part, h.part_checksum, sizeof h.part_checksum);
	*generation = h.generation;
	return true;
}

bool kv_record_check(const struct kv_file_set *s, int32_t slot, const void *record, const struct kv_page_name *page,
                     uint64_t generation)
{
	struct kv_page_name found;
	struct kv_record_sums sums;
	uint64_t of;
	if (!kv_record_read(s, slot, record, &found, &of, &sums) || of != generation ||
	    memcmp(&found.key, &page->key, sizeof found.key) != 0 ||
	    memcmp(&found.parent, &page->parent, sizeof found.parent) != 0)
		return false;
	for (int32_t i = 0; i < s->n_parts; i++) {
		if (!kv_record_part_check(s, record, i, generation, sums.part[i]))
			return false;
	}
	return true;
}
