/*
 * The files of the disk tier. A file is a header block and slots; a slot is a record: a header block and the bytes of a
 * page, padded to 4096. All fields are in the byte order of the machine, which the file's header tells.
 *
 * A file header binds the file to what its pages depend on; one that differs in anything is not read but made anew. A
 * record counts only if its header's checksum is right and names this file, this slot and this page, and if the
 * checksums of the page's bytes, which the header holds, are right too: a record that was torn while it was written, or
 * written to the wrong place, is none. The header's own checksum is looked at when the index is rebuilt, those of the
 * bytes at each load. There is one for each part of the page (image.h), so that a part can be read, and trusted,
 * without the others. Checksums (XXH64) guard against accidents, not against somebody who can write the files: they are
 * private to the user (0600).
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/kv/tier.h"

enum {
	KV_FILE_BLOCK = 4096,
	KV_FILE_MAX = 16,
	KV_FILE_ID = 16,
	KV_FILE_NAME_MAX = 4096,
};

struct kv_file_header {
	char magic[8];
	uint32_t byte_order, format;
	uint8_t id[KV_FILE_ID];     /* random: records of a file that was here before are not this one's */
	uint8_t identity[SHA256_BYTES];
	uint64_t page_bytes, record_bytes, n_slots;
	uint32_t index, n_files;
	char version[48], host[80];
	uint64_t checksum;          /* of all before it */
};

struct kv_record_header {
	uint64_t magic;
	uint8_t file_id[KV_FILE_ID];
	uint64_t slot;              /* in its file */
	uint64_t generation;        /* of all writes, rising: of two records of a page the later one counts */
	struct kv_key key, parent;
	int32_t tokens[KV_PAGE_TOKENS];
	int32_t n_tokens;
	uint32_t first;
	uint64_t part_checksum[KV_IMAGE_PARTS]; /* of those that there are; the others are 0 */
	uint64_t checksum;          /* of all before it */
};

/* What all files of a tier have in common. */
struct kv_file_set {
	char dir[KV_FILE_NAME_MAX];
	struct kv_file_header common; /* with id and index left out */
	int32_t n_files;
	int fd[KV_FILE_MAX];
	uint8_t id[KV_FILE_MAX][KV_FILE_ID];
	bool fresh[KV_FILE_MAX];    /* made anew: it has no records */
	bool direct;                /* O_DIRECT: the file system has it */
	int32_t n_parts;            /* of a page */
	struct kv_image_part part[KV_IMAGE_PARTS];
};

/*
 * How many files and slots in each so many bytes are; INVALID when there is no room for a record. Fills common and
 * n_files.
 */
enum status kv_file_plan(const struct kv_tier_disk_options *o, const struct kv_layout *layout, struct kv_file_set *out,
                         struct error *err);
/*
 * Opens the files of a plan, or makes those that are missing or not as planned, taking all their room now; files of a
 * larger set are removed. LIMIT: another process has them. IO. On failure all are closed.
 */
enum status kv_file_open(struct kv_file_set *s, struct kv_io *io, struct error *err);
void kv_file_close(struct kv_file_set *s);

/* Where slot i of the whole set lies. */
struct kv_file_place {
	int fd;
	uint64_t offset;
	const uint8_t *id;
	uint64_t slot;
};
struct kv_file_place kv_file_place(const struct kv_file_set *s, int32_t i);
int32_t kv_file_n_slots(const struct kv_file_set *s);
uint64_t kv_file_bytes(const struct kv_file_set *s);

/* Checksums of the parts of a page. */
struct kv_record_sums {
	uint64_t part[KV_IMAGE_PARTS];
};

/* Completes a record whose bytes are in place behind its header block. */
void kv_record_seal(const struct kv_file_set *s, int32_t slot, const struct kv_page_name *page, uint64_t generation,
                    void *record, struct kv_record_sums *sums);
/*
 * Whether a header block is a record's at that slot; then *page, *generation and *sums are what it says. Does not look
 * at the bytes.
 */
bool kv_record_read(const struct kv_file_set *s, int32_t slot, const void *record, struct kv_page_name *page,
                    uint64_t *generation, struct kv_record_sums *sums);
/* Whether a whole record is that of `page` with that generation, bytes included. */
bool kv_record_check(const struct kv_file_set *s, int32_t slot, const void *record, const struct kv_page_name *page,
                     uint64_t generation);
/* Where in a record the whole blocks lie that have a part of the page. */
void kv_record_part(const struct kv_file_set *s, int32_t part, size_t *begin, size_t *end);
/* Whether the bytes of a part, which stand in their place in a record, are those that have this checksum. */
bool kv_record_part_check(const struct kv_file_set *s, const void *record, int32_t part, uint64_t generation,
                          uint64_t sum);
