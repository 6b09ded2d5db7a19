#include "tests/unit/kv/tier_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/kv/tier_file.h"
#include "engine/kv/tier_io.h"
#include "tests/support/faulty_io.h"

enum { RECORD = KV_FILE_BLOCK + TIER_PAGE_BYTES };

struct fixture {
	struct tier_fixture base;
	char dir[64];
	struct kv_tier_disk_options options;
};

static void setup(struct fixture *f, int32_t n_slots)
{
	tier_setup(&f->base);
	strcpy(f->dir, "/tmp/kvasir-tier-XXXXXX");
	assert_non_null(mkdtemp(f->dir));
	f->options = (struct kv_tier_disk_options){
	        .dir = f->dir,
	        .bytes = KV_FILE_BLOCK + (uint64_t)n_slots * RECORD,
	        .identity = tier_key(1000),
	        .version = "1",
	        .host = "here",
	};
	log_set_level(LOG_OFF);
}

static void path_of(const struct fixture *f, char out[128])
{
	snprintf(out, 128, "%s/kvasir-kv.0", f->dir);
}

static void teardown(struct fixture *f)
{
	char path[128];
	path_of(f, path);
	unlink(path);
	rmdir(f->dir);
	tier_teardown(&f->base);
}

static struct kv_tier *open_tier(struct fixture *f)
{
	struct kv_tier *t = NULL;
	struct error err = {0};
	if (kv_tier_disk_create(&f->base.device, &f->base.clock, &f->options, &t, &err) != STATUS_OK)
		fail_msg("%s", err.message);
	return t;
}

/* Puts pages [from, to), one after the other has arrived. */
static void put_all(struct fixture *f, struct kv_tier *t, int32_t from, int32_t to)
{
	for (int32_t i = from; i < to; i++) {
		assert_int_equal(tier_put(&f->base, t, i), KV_PUT_STORED);
		tier_settle(t);
	}
}

static bool get_right(struct fixture *f, struct kv_tier *t, int32_t i)
{
	return tier_get(&f->base, t, i) == KV_LOAD_DONE && tier_holds(&f->base, 1, i);
}

/* ---- A disk that fails as disks do ---- */

static struct kv_tier *open_faulty(struct fixture *f, struct faulty **x)
{
	*x = faulty_create();
	f->options.io = &(*x)->base;
	struct kv_tier *t = open_tier(f);
	f->options.io = NULL;
	return t;
}

/* ---- Pages ---- */

static void check_round_trip(struct kv_io *io)
{
	struct fixture f;
	setup(&f, 8);
	f.options.io = io;
	struct kv_tier *t = open_tier(&f);
	put_all(&f, t, 0, 8);
	for (int32_t i = 0; i < 8; i++)
		assert_true(get_right(&f, t, i));
	assert_int_equal(tier_put(&f.base, t, 3), KV_PUT_PRESENT);
	assert_int_equal(tier_get(&f.base, t, 9), KV_LOAD_N);
	struct kv_tier_stats s = tier_stats(t);
	assert_int_equal(s.used_bytes, 8 * RECORD);
	assert_int_equal(s.cap_bytes, KV_FILE_BLOCK + 8 * RECORD);
	assert_int_equal(s.bytes_written, 8 * RECORD);
	assert_int_equal(s.loads[KV_LOAD_DONE], 8);
	assert_true(s.read_bytes_per_s > 0 && s.write_bytes_per_s > 0);
	kv_tier_destroy(t);
	teardown(&f);
}

static void a_page_comes_back_by_io_uring(void **state)
{
	(void)state;
	struct kv_io *io = kv_io_create_uring();
	if (!io) {
		print_message("skipped: there is no io_uring here\n");
		skip();
	}
	check_round_trip(io);
}

static void a_page_comes_back_by_plain_transfers(void **state)
{
	(void)state;
	check_round_trip(kv_io_create_plain());
}

static void many_pages_at_a_time(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_tier_done done[KV_TIER_MAX_LOADS];
	setup(&f, 64);
	struct kv_tier *t = open_tier(&f);
	put_all(&f, t, 0, 64);
	/* More loads than there are buffers: they wait for one. */
	for (int32_t i = 0; i < 64; i++) {
		struct kv_page_name p = tier_page(i);
		assert_int_equal(kv_tier_load(t, &p, 2 + i, (uint64_t)i), STATUS_OK);
	}
	for (int32_t n = 0; n < 64;) {
		int32_t k = kv_tier_poll(t, done, KV_TIER_MAX_LOADS);
		for (int32_t i = 0; i < k; i++)
			assert_int_equal(done[i].end, KV_LOAD_DONE);
		n += k;
		if (k == 0)
			kv_tier_wait(t, 1000);
	}
	for (int32_t i = 0; i < 64; i++)
		assert_true(tier_holds(&f.base, 2 + i, i));
	kv_tier_destroy(t);
	teardown(&f);
}

static void the_cap_holds_to_the_byte_and_the_oldest_page_goes(void **state)
{
	(void)state;
	struct fixture f;
	struct stat st;
	char path[128];
	setup(&f, 3);
	f.options.bytes += RECORD - 1; /* all but a fourth */
	struct kv_tier *t = open_tier(&f);
	for (int32_t i = 0; i < 3; i++) {
		clock_advance(&f.base.clock, 1000000);
		put_all(&f, t, i, i + 1);
	}
	clock_advance(&f.base.clock, 1000000);
	assert_true(get_right(&f, t, 0));
	put_all(&f, t, 3, 4);
	assert_true(tier_has(t, 0) && !tier_has(t, 1) && tier_has(t, 2) && tier_has(t, 3));
	path_of(&f, path);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_size, KV_FILE_BLOCK + 3 * RECORD);
	assert_true((uint64_t)st.st_size <= f.options.bytes);
	assert_int_equal(st.st_mode & 0777, 0600);
	kv_tier_destroy(t);
	teardown(&f);
}

static void a_cancelled_load_leaves_its_page_alone(void **state)
{
	(void)state;
	struct fixture f;
	struct faulty *x;
	struct kv_page_name p = tier_page(2);
	struct kv_tier_done done;
	setup(&f, 4);
	struct kv_tier *t = open_faulty(&f, &x);
	put_all(&f, t, 2, 3);
	x->hold = true;
	memset(tier_bytes(&f.base, 5), 0xAB, TIER_PAGE_BYTES);
	assert_int_equal(kv_tier_load(t, &p, 5, 1), STATUS_OK);
	kv_tier_poll(t, &done, 1);
	kv_tier_cancel(t, 1);
	x->hold = false;
	kv_tier_wait(t, 0);
	x->base.ops->kick(&x->base);
	tier_settle(t);
	assert_int_equal(tier_bytes(&f.base, 5)[0], 0xABAB);
	assert_int_equal(tier_stats(t).cancelled, 1);
	assert_true(get_right(&f, t, 2));
	kv_tier_destroy(t);
	teardown(&f);
}

static void a_page_that_is_still_being_written_is_there(void **state)
{
	(void)state;
	struct fixture f;
	struct faulty *x;
	setup(&f, 8);
	f.options.n_staging = 4;
	struct kv_tier *t = open_faulty(&f, &x);
	x->hold = true;
	assert_int_equal(tier_put(&f.base, t, 0), KV_PUT_STORED);
	assert_int_equal(tier_put(&f.base, t, 1), KV_PUT_STORED);
	/* Half of the buffers are for writes; a page that finds none is dropped, and nobody waits. */
	assert_int_equal(tier_put(&f.base, t, 2), KV_PUT_BUSY);
	assert_false(tier_has(t, 2));
	assert_int_equal(tier_stats(t).n_writing, 2);
	assert_true(get_right(&f, t, 0) && get_right(&f, t, 1));
	x->hold = false;
	x->base.ops->kick(&x->base);
	tier_settle(t);
	assert_true(get_right(&f, t, 0) && get_right(&f, t, 1));
	assert_int_equal(tier_stats(t).put[KV_PUT_BUSY], 1);
	kv_tier_destroy(t);
	teardown(&f);
}

static void writes_keep_to_their_rate(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 64);
	f.options.write_bytes_per_s = 2 * RECORD;
	struct kv_tier *t = open_tier(&f);
	/* A second's worth is saved up; then the clock decides. */
	put_all(&f, t, 0, 2);
	assert_int_equal(tier_put(&f.base, t, 2), KV_PUT_RATE);
	clock_advance(&f.base.clock, 499000000);
	assert_int_equal(tier_put(&f.base, t, 2), KV_PUT_RATE);
	clock_advance(&f.base.clock, 2000000);
	put_all(&f, t, 2, 3);
	assert_int_equal(tier_put(&f.base, t, 3), KV_PUT_RATE);
	clock_advance(&f.base.clock, 60000000000);
	put_all(&f, t, 3, 5);
	assert_int_equal(tier_put(&f.base, t, 5), KV_PUT_RATE);
	assert_int_equal(tier_stats(t).bytes_written, 5 * RECORD);
	kv_tier_destroy(t);
	teardown(&f);
}

/* ---- Parts ---- */

/* Brings a part of page i to device page 1 and tells how that ended. */
static enum kv_tier_end get_part(struct kv_tier *t, int32_t i, int32_t part)
{
	struct kv_page_name p = tier_page(i);
	struct kv_tier_done done;
	if (kv_tier_load_part(t, &p, part, 1, 100) != STATUS_OK)
		return KV_LOAD_N;
	while (kv_tier_poll(t, &done, 1) == 0)
		kv_tier_wait(t, 1000);
	return done.end;
}

static void damage(const struct fixture *f, off_t at);

static void a_part_comes_by_itself_and_is_good_by_itself(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_page_name p = tier_page(2);
	setup(&f, 4);
	struct kv_tier *t = open_tier(&f);
	put_all(&f, t, 0, 4);
	for (int restarted = 0; restarted < 2; restarted++) {
		assert_int_equal(kv_tier_n_parts(t, &p), 2); /* of one layer each */
		memset(tier_bytes(&f.base, 1), 0xEE, TIER_PAGE_BYTES);
		uint64_t read = tier_stats(t).bytes_read;
		assert_int_equal(get_part(t, 2, 1), KV_LOAD_DONE);
		assert_int_equal(tier_stats(t).bytes_read - read, TIER_PAGE_BYTES / 2);
		assert_int_equal(tier_bytes(&f.base, 1)[0], 0xEEEE);
		assert_int_equal(tier_bytes(&f.base, 1)[TIER_PAGE_BYTES / 4], tier_element(2, TIER_PAGE_BYTES / 4));
		assert_int_equal(get_part(t, 2, 0), KV_LOAD_DONE);
		assert_true(tier_holds(&f.base, 1, 2));
		/* What its checksum is, is in the record. */
		kv_tier_destroy(t);
		t = open_tier(&f);
	}
	/* A wrong bit in the second part: the first is served, the second never, and the page is gone then. */
	kv_tier_destroy(t);
	damage(&f, KV_FILE_BLOCK + 2 * RECORD + KV_FILE_BLOCK + TIER_PAGE_BYTES - 5);
	t = open_tier(&f);
	int32_t wrong = -1;
	for (int32_t i = 0; i < 4; i++) {
		memset(tier_bytes(&f.base, 1), 0xEE, TIER_PAGE_BYTES);
		assert_int_equal(get_part(t, i, 0), KV_LOAD_DONE);
		if (get_part(t, i, 1) == KV_LOAD_DONE) {
			assert_true(tier_holds(&f.base, 1, i));
			continue;
		}
		assert_int_equal(wrong, -1);
		assert_int_equal(tier_bytes(&f.base, 1)[TIER_PAGE_BYTES / 4], 0xEEEE);
		wrong = i;
	}
	assert_true(wrong >= 0);
	assert_false(tier_has(t, wrong));
	assert_int_equal(tier_stats(t).n_pages, 3);
	assert_int_equal(tier_stats(t).loads[KV_LOAD_CORRUPT], 1);
	kv_tier_destroy(t);
	teardown(&f);
}

/*
 * One that is found wrong while another part of it is on its way is not found any more, and goes when that has ended.
 */
static void a_damaged_page_goes_with_its_last_user(void **state)
{
	(void)state;
	struct fixture f;
	struct faulty *x;
	struct kv_page_name p = tier_page(0);
	struct kv_tier_done done[2];
	setup(&f, 4);
	struct kv_tier *t = open_faulty(&f, &x);
	put_all(&f, t, 0, 1);
	kv_tier_destroy(t);
	damage(&f, KV_FILE_BLOCK + KV_FILE_BLOCK + 100);
	t = open_faulty(&f, &x);
	memset(tier_bytes(&f.base, 1), 0xEE, TIER_PAGE_BYTES);
	assert_int_equal(kv_tier_load_part(t, &p, 0, 1, 1), STATUS_OK);
	assert_int_equal(kv_tier_load_part(t, &p, 1, 1, 2), STATUS_OK);
	for (int32_t n = 0; n < 2;) {
		int32_t more = kv_tier_poll(t, done, 1);
		assert_true(more == 0 || done[0].end == (done[0].ticket == 1 ? KV_LOAD_CORRUPT : KV_LOAD_DONE));
		if (more && done[0].ticket == 1)
			assert_false(kv_tier_has(t, &p));
		n += more;
		if (!more)
			kv_tier_wait(t, 1000);
	}
	assert_int_equal(tier_stats(t).n_pages, 0);
	assert_int_equal(tier_put(&f.base, t, 0), KV_PUT_STORED);
	tier_settle(t);
	assert_true(get_right(&f, t, 0));
	kv_tier_destroy(t);
	teardown(&f);
}

/* ---- Files ---- */

static void pages_are_found_again_after_a_restart(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_page_name found;
	struct kv_key key = tier_key(4);
	setup(&f, 6);
	struct kv_tier *t = open_tier(&f);
	put_all(&f, t, 0, 6);
	put_all(&f, t, 6, 8); /* in the place of 0 and 1 */
	kv_tier_destroy(t);
	t = open_tier(&f);
	assert_int_equal(tier_stats(t).n_pages, 6);
	for (int32_t i = 2; i < 8; i++)
		assert_true(get_right(&f, t, i));
	assert_true(kv_tier_find(t, &key, &found));
	struct kv_page_name expected = tier_page(4);
	assert_same_name(&found, &expected);
	kv_tier_destroy(t);
	/* Their order is known as well: the page that was written first goes first. */
	t = open_tier(&f);
	put_all(&f, t, 20, 21);
	assert_false(tier_has(t, 2));
	assert_true(tier_has(t, 3) && tier_has(t, 7) && tier_has(t, 20));
	kv_tier_destroy(t);
	teardown(&f);
}

static void expect_refused(struct fixture *f, const char *why)
{
	struct kv_tier *t = open_tier(f);
	if (tier_stats(t).n_pages != 0)
		fail_msg("pages were taken from a file with %s", why);
	/* It has been made anew, and works. */
	put_all(f, t, 0, 4);
	assert_true(get_right(f, t, 3));
	kv_tier_destroy(t);
}

static void a_file_of_something_else_is_refused(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 4);
	struct kv_tier *t = open_tier(&f);
	put_all(&f, t, 0, 4);
	kv_tier_destroy(t);
	t = open_tier(&f);
	assert_int_equal(tier_stats(t).n_pages, 4);
	kv_tier_destroy(t);
	f.options.identity.bytes[0] ^= 1;
	expect_refused(&f, "another identity");
	f.options.version = "2";
	expect_refused(&f, "another version");
	f.options.host = "there";
	expect_refused(&f, "another host");
	f.options.bytes += RECORD;
	expect_refused(&f, "another size");
	t = open_tier(&f);
	assert_int_equal(tier_stats(t).n_pages, 4);
	kv_tier_destroy(t);
	/* Pages of another layout, with the identity forged. */
	assert_int_equal(kv_layout_init(&f.base.device.layout, 1, 1, 64, QUANT_F16), STATUS_OK);
	t = open_tier(&f);
	assert_int_equal(tier_stats(t).n_pages, 0);
	kv_tier_destroy(t);
	teardown(&f);
}

/* Changes a byte of the file; returns what was there. */
static void damage(const struct fixture *f, off_t at)
{
	char path[128];
	uint8_t byte;
	path_of(f, path);
	int fd = open(path, O_RDWR);
	assert_true(fd >= 0);
	assert_int_equal(pread(fd, &byte, 1, at), 1);
	byte ^= 0x10;
	assert_int_equal(pwrite(fd, &byte, 1, at), 1);
	close(fd);
}

static void every_byte_of_the_file_header_counts(void **state)
{
	(void)state;
	for (off_t at = 0; at < (off_t)sizeof(struct kv_file_header); at += 7) {
		struct fixture f;
		setup(&f, 2);
		struct kv_tier *t = open_tier(&f);
		put_all(&f, t, 0, 2);
		kv_tier_destroy(t);
		damage(&f, at);
		t = open_tier(&f);
		assert_int_equal(tier_stats(t).n_pages, 0);
		kv_tier_destroy(t);
		teardown(&f);
	}
}

static void a_file_that_was_cut_or_is_foreign_is_made_anew(void **state)
{
	(void)state;
	struct fixture f;
	char path[128];
	setup(&f, 4);
	path_of(&f, path);
	struct kv_tier *t = open_tier(&f);
	put_all(&f, t, 0, 4);
	kv_tier_destroy(t);
	assert_int_equal(truncate(path, KV_FILE_BLOCK + 2 * RECORD), 0);
	expect_refused(&f, "its end cut off");
	assert_int_equal(truncate(path, 100), 0);
	expect_refused(&f, "half a header");
	FILE *file = fopen(path, "w");
	fputs("my diary", file);
	fclose(file);
	expect_refused(&f, "a text");
	teardown(&f);
}

static void a_record_that_was_torn_is_never_served(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 4);
	struct kv_tier *t = open_tier(&f);
	put_all(&f, t, 0, 4);
	/* Bytes of a page: found at the load, and the page is gone then. Slots are taken in order. */
	damage(&f, KV_FILE_BLOCK + 1 * RECORD + KV_FILE_BLOCK + 5000);
	assert_int_equal(tier_get(&f.base, t, 1), KV_LOAD_CORRUPT);
	assert_int_equal(tier_bytes(&f.base, 1)[0], 0xEEEE);
	assert_false(tier_has(t, 1));
	assert_int_equal(tier_stats(t).loads[KV_LOAD_CORRUPT], 1);
	assert_true(get_right(&f, t, 0) && get_right(&f, t, 2));
	kv_tier_destroy(t);
	/* A record's header: not in the index. */
	damage(&f, KV_FILE_BLOCK + 2 * RECORD + 60);
	t = open_tier(&f);
	assert_false(tier_has(t, 2));
	assert_true(get_right(&f, t, 0) && get_right(&f, t, 3));
	kv_tier_destroy(t);
	teardown(&f);
}

static void copy_record(const struct fixture *f, int from, int to)
{
	static char record[RECORD];
	char path[128];
	path_of(f, path);
	int fd = open(path, O_RDWR);
	assert_int_equal(pread(fd, record, RECORD, KV_FILE_BLOCK + from * RECORD), RECORD);
	assert_int_equal(pwrite(fd, record, RECORD, KV_FILE_BLOCK + to * RECORD), RECORD);
	close(fd);
}

static void a_record_in_the_wrong_place_is_none(void **state)
{
	(void)state;
	struct fixture f;
	setup(&f, 4);
	struct kv_tier *t = open_tier(&f);
	put_all(&f, t, 0, 4);
	/* Under a tier that runs: its slot has the wrong page's record now, which is whole in itself. */
	copy_record(&f, 1, 0);
	assert_int_equal(tier_get(&f.base, t, 0), KV_LOAD_CORRUPT);
	kv_tier_destroy(t);
	t = open_tier(&f);
	assert_int_equal(tier_stats(t).n_pages, 3);
	kv_tier_destroy(t);
	teardown(&f);
}

static void drop(struct kv_tier *t, int32_t i)
{
	struct kv_key key = tier_key(i);
	assert_true(kv_tier_drop(t, &key));
}

/* A dropped page's record stays in its slot. Put again the page goes to another, before or behind it. */
static void the_later_of_two_records_of_a_page_counts(void **state)
{
	(void)state;
	for (int32_t old = 0; old < 2; old++) {
		struct fixture f;
		setup(&f, 4);
		struct kv_tier *t = open_tier(&f);
		put_all(&f, t, old == 0 ? 0 : 5, old == 0 ? 1 : 6);
		put_all(&f, t, old == 0 ? 5 : 0, old == 0 ? 6 : 1);
		/* The slot that was freed last is taken first. */
		drop(t, 0);
		drop(t, 5);
		put_all(&f, t, 0, 1);
		kv_tier_destroy(t);
		damage(&f, KV_FILE_BLOCK + old * RECORD + KV_FILE_BLOCK + 77);
		t = open_tier(&f);
		assert_int_equal(tier_stats(t).n_pages, 1);
		assert_true(get_right(&f, t, 0));
		kv_tier_destroy(t);
		teardown(&f);
	}
}

static void one_process_at_a_time_uses_a_directory(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_tier *other;
	struct error err;
	setup(&f, 4);
	struct kv_tier *t = open_tier(&f);
	put_all(&f, t, 0, 1);
	assert_int_equal(kv_tier_disk_create(&f.base.device, &f.base.clock, &f.options, &other, &err), STATUS_LIMIT);
	assert_true(get_right(&f, t, 0));
	kv_tier_destroy(t);
	teardown(&f);
}

static void a_disk_that_cannot_be_used_is_a_sentence(void **state)
{
	(void)state;
	struct fixture f;
	struct kv_tier *t;
	struct error err;
	setup(&f, 4);
	f.options.bytes = KV_FILE_BLOCK + RECORD - 1;
	assert_int_equal(kv_tier_disk_create(&f.base.device, &f.base.clock, &f.options, &t, &err), STATUS_INVALID);
	f.options.bytes += 1;
	f.options.dir = "/proc/none";
	assert_int_equal(kv_tier_disk_create(&f.base.device, &f.base.clock, &f.options, &t, &err), STATUS_IO);
	assert_non_null(strstr(err.message, "/proc/none"));
	f.options.dir = f.dir;
	struct faulty *x = faulty_create();
	x->allocate_error = ENOSPC;
	f.options.io = &x->base;
	assert_int_equal(kv_tier_disk_create(&f.base.device, &f.base.clock, &f.options, &t, &err), STATUS_IO);
	assert_non_null(strstr(err.message, "No space left"));
	x = faulty_create();
	x->write_error = EIO; /* already the first one, that measures */
	f.options.io = &x->base;
	assert_int_equal(kv_tier_disk_create(&f.base.device, &f.base.clock, &f.options, &t, &err), STATUS_IO);
	teardown(&f);
}

/* ---- Faults while it runs ---- */

static void check_off(struct fixture *f, struct kv_tier *t, const char *reason)
{
	struct kv_tier_stats s = tier_stats(t);
	assert_true(s.off);
	assert_string_equal(s.off_reason, reason);
	assert_int_equal(tier_put(&f->base, t, 60), KV_PUT_OFF);
	assert_false(tier_has(t, 0));
	assert_int_equal(tier_get(&f->base, t, 0), KV_LOAD_N);
	assert_int_equal(s.n_loading, 0);
}

static void a_write_that_fails_turns_the_tier_off(void **state)
{
	(void)state;
	static const int errors[] = {ENOSPC, EIO, ENODEV, EDQUOT};
	for (size_t i = 0; i < 4; i++) {
		struct fixture f;
		struct faulty *x;
		setup(&f, 8);
		struct kv_tier *t = open_faulty(&f, &x);
		put_all(&f, t, 0, 3);
		x->write_error = errors[i];
		assert_int_equal(tier_put(&f.base, t, 3), KV_PUT_STORED);
		assert_int_equal(tier_put(&f.base, t, 4), KV_PUT_STORED);
		tier_settle(t);
		check_off(&f, t, "a write failed");
		assert_int_equal(tier_stats(t).n_pages, 0);
		kv_tier_destroy(t);
		teardown(&f);
	}
}

static void a_read_that_fails_turns_the_tier_off_and_ends_every_load(void **state)
{
	(void)state;
	struct fixture f;
	struct faulty *x;
	struct kv_tier_done done[KV_TIER_MAX_LOADS];
	setup(&f, 40);
	struct kv_tier *t = open_faulty(&f, &x);
	put_all(&f, t, 0, 40);
	x->read_error = EIO;
	for (int32_t i = 0; i < 40; i++) {
		struct kv_page_name p = tier_page(i);
		assert_int_equal(kv_tier_load(t, &p, 2 + i, (uint64_t)i), STATUS_OK);
	}
	for (int32_t n = 0; n < 40;) {
		int32_t k = kv_tier_poll(t, done, KV_TIER_MAX_LOADS);
		for (int32_t i = 0; i < k; i++)
			assert_int_equal(done[i].end, KV_LOAD_FAILED);
		n += k;
		if (k == 0)
			kv_tier_wait(t, 1000);
	}
	check_off(&f, t, "a read failed");
	kv_tier_destroy(t);
	teardown(&f);
}

static void short_transfers_go_on_where_they_stopped(void **state)
{
	(void)state;
	struct fixture f;
	struct faulty *x;
	setup(&f, 4);
	struct kv_tier *t = open_faulty(&f, &x);
	x->half = true;
	put_all(&f, t, 0, 4);
	for (int32_t i = 0; i < 4; i++)
		assert_true(get_right(&f, t, i));
	assert_true(x->n_halved >= 8);
	assert_false(tier_stats(t).off);
	kv_tier_destroy(t);
	t = open_tier(&f);
	assert_true(get_right(&f, t, 3));
	kv_tier_destroy(t);
	teardown(&f);
}

static void a_disk_that_stalls_is_given_up(void **state)
{
	(void)state;
	struct fixture f;
	struct faulty *x;
	struct kv_page_name p = tier_page(0);
	struct kv_tier_done done;
	setup(&f, 4);
	f.options.stall_ms = 1000;
	struct kv_tier *t = open_faulty(&f, &x);
	put_all(&f, t, 0, 1);
	x->hold = true;
	assert_int_equal(kv_tier_load(t, &p, 2, 9), STATUS_OK);
	assert_int_equal(kv_tier_poll(t, &done, 1), 0);
	clock_advance(&f.base.clock, 1000000000);
	assert_int_equal(kv_tier_poll(t, &done, 1), 0);
	clock_advance(&f.base.clock, 1);
	assert_int_equal(kv_tier_poll(t, &done, 1), 1);
	assert_int_equal(done.end, KV_LOAD_FAILED);
	memset(tier_bytes(&f.base, 2), 0xAB, TIER_PAGE_BYTES);
	/* What the disk says when it comes back reaches nobody. */
	x->hold = false;
	x->base.ops->kick(&x->base);
	kv_tier_wait(t, 1000);
	kv_tier_poll(t, &done, 1);
	assert_int_equal(tier_bytes(&f.base, 2)[0], 0xABAB);
	check_off(&f, t, "a transfer takes too long");
	kv_tier_destroy(t);
	teardown(&f);
}

/* ---- kill -9 ---- */

enum { KILL_PAGES = 200, KILL_SLOTS = 48 };

/* Puts pages without end, as fast as the disk takes them; each that is taken is a byte for `told`. */
static void write_until_killed(struct fixture *f, uint64_t seed, int told)
{
	struct kv_tier_done done[1];
	struct kv_tier *t = open_tier(f);
	for (;;) {
		if (tier_put(&f->base, t, (int32_t)(unit_rand(&seed) % KILL_PAGES)) == KV_PUT_STORED &&
		    write(told, "", 1) < 0)
			_exit(1);
		kv_tier_poll(t, done, 1);
		if (tier_stats(t).n_writing > 4)
			kv_tier_wait(t, 100);
	}
}

/* Every page that is there is right; how many. */
static int32_t check_all(struct fixture *f, int32_t *n_corrupt)
{
	struct kv_tier *t = open_tier(f);
	int32_t n = 0;
	for (int32_t i = 0; i < KILL_PAGES; i++) {
		enum kv_tier_end end = tier_get(&f->base, t, i);
		if (end == KV_LOAD_DONE && !tier_holds(&f->base, 1, i))
			fail_msg("page %d has wrong bytes", i);
		if (end == KV_LOAD_FAILED)
			fail_msg("page %d could not be read", i);
		n += end == KV_LOAD_DONE;
		*n_corrupt += end == KV_LOAD_CORRUPT;
	}
	kv_tier_destroy(t);
	return n;
}

static void kill_9_at_any_instant_loses_what_is_in_flight_and_nothing_else(void **state)
{
	(void)state;
	const char *full = getenv("KVASIR_FULL"), *asked = getenv("KVASIR_KILLS");
	int kills = asked ? atoi(asked) : full && strcmp(full, "yes") == 0 ? 1000 : 200;
	int32_t n_found = 0, n_corrupt = 0, n_full = 0;
	uint64_t seed = (uint64_t)getpid() * 2654435761u + 1;
	struct fixture f;
	setup(&f, KILL_SLOTS);
	for (int k = 0; k < kills; k++) {
		char path[128];
		uint64_t child_seed = unit_rand(&seed) | 1;
		int told[2];
		char taken;
		/*
		 * Now and then it dies while it makes its files, else after it has taken some pages, or more than there
		 * is room for.
		 */
		path_of(&f, path);
		if (k % 5 == 4)
			unlink(path);
		assert_int_equal(pipe(told), 0);
		pid_t pid = fork();
		assert_true(pid >= 0);
		if (pid == 0)
			write_until_killed(&f, child_seed, told[1]);
		close(told[1]);
		for (int n = k % 5 == 4 ? 0 : k % 5 == 3 ? 2 * KILL_SLOTS : 12; n > 0; n--)
			assert_int_equal(read(told[0], &taken, 1), 1);
		usleep((useconds_t)(unit_rand(&seed) % 20000));
		kill(pid, SIGKILL);
		assert_int_equal(waitpid(pid, NULL, 0), pid);
		close(told[0]);
		int32_t n = check_all(&f, &n_corrupt);
		n_found += n;
		n_full += n >= KILL_SLOTS - 16;
	}
	print_message("%d kills: %d pages found and right, %d torn ones refused, %d times all but those in flight\n",
	              kills, n_found, n_corrupt, n_full);
	/* It was at work when it was killed, and little of it was lost: no more than there are buffers for writes. */
	assert_true(n_found > kills * 4 && n_full > 0);
	assert_true(n_corrupt <= kills * 8);
	teardown(&f);
}

UNIT_MAIN(cmocka_unit_test(a_page_comes_back_by_io_uring), cmocka_unit_test(a_page_comes_back_by_plain_transfers),
          cmocka_unit_test(many_pages_at_a_time), cmocka_unit_test(the_cap_holds_to_the_byte_and_the_oldest_page_goes),
          cmocka_unit_test(a_cancelled_load_leaves_its_page_alone),
          cmocka_unit_test(a_page_that_is_still_being_written_is_there),
          cmocka_unit_test(a_part_comes_by_itself_and_is_good_by_itself),
          cmocka_unit_test(a_damaged_page_goes_with_its_last_user), cmocka_unit_test(writes_keep_to_their_rate),
          cmocka_unit_test(pages_are_found_again_after_a_restart),
          cmocka_unit_test(a_file_of_something_else_is_refused), cmocka_unit_test(every_byte_of_the_file_header_counts),
          cmocka_unit_test(a_file_that_was_cut_or_is_foreign_is_made_anew),
          cmocka_unit_test(a_record_that_was_torn_is_never_served),
          cmocka_unit_test(a_record_in_the_wrong_place_is_none),
          cmocka_unit_test(the_later_of_two_records_of_a_page_counts),
          cmocka_unit_test(one_process_at_a_time_uses_a_directory),
          cmocka_unit_test(a_disk_that_cannot_be_used_is_a_sentence),
          cmocka_unit_test(a_write_that_fails_turns_the_tier_off),
          cmocka_unit_test(a_read_that_fails_turns_the_tier_off_and_ends_every_load),
          cmocka_unit_test(short_transfers_go_on_where_they_stopped), cmocka_unit_test(a_disk_that_stalls_is_given_up),
          cmocka_unit_test(kill_9_at_any_instant_loses_what_is_in_flight_and_nothing_else))
