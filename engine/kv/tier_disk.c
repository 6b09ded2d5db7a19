/*
 * The tier in files (tier_file.h). The worker copies a page to a staging buffer and goes on; the tier's own thread sums
 * and moves it.
 *
 * Threads. The worker owns the index, the loads and the list of free buffers. A job goes to the thread by one mailbox
 * and comes back by another; it and its buffer belong to whoever has it. The thread sees the files, the jobs and
 * nothing else.
 *
 * A load of a part reads that part alone, and compares it with the checksum that the worker has had in memory since it
 * indexed the record.
 *
 * An entry is a slot of the files. While its page is being written the entry is in use, so the slot is not taken for
 * another, and a load of it is answered from the staging buffer.
 *
 * The tier is off for good after the first transfer that fails, or takes longer than stall_ms: a cache is not worth
 * waiting for a disk that dies.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/log.h"
#include "engine/base/mailbox.h"
#include "engine/kv/tier_file.h"
#include "engine/kv/tier_impl.h"
#include "engine/kv/tier_io.h"

enum {
	NONE = EVICT_NONE,
	DEFAULT_STAGING = 32,
	MAX_STAGING = KV_IO_DEPTH,
	DEFAULT_STALL_MS = 5000,
	PROBES = 4,            /* records written and read at start, to know the disk's speed */
	JOIN_SECONDS = 5,
};

/* A staging buffer and what is done with it. */
struct job {
	struct list link;
	struct kv_io_transfer transfer;
	char *record;          /* [record_bytes] */
	bool write;
	int32_t slot;
	struct kv_page_name page;
	uint64_t generation;
	int32_t part;          /* read: of the page, or KV_WHOLE */
	uint64_t sum;          /* read: of that part */
	struct kv_record_sums sums; /* write: what they have become */
	size_t moved, end;     /* of the record: what is there up to now (transfers may be short), and what shall be */
	int64_t begun_ns;      /* by the tier's clock, when it was handed over */
	int64_t submitted_ns;  /* by the system's */
	/* The answer. */
	int error;             /* errno, or 0 */
	bool good;             /* read: the record is the page */
	int64_t took_ns;       /* of the disk's time, when it had others to do as well */
	/* The worker's. */
	int32_t load;          /* index of the load it reads for, or NONE: nobody waits any more */
	bool busy;
};

struct disk {
	struct kv_tier base;
	struct kv_file_set files;
	struct kv_io *io;
	size_t record_bytes;
	char *memory;          /* [n_staging][record_bytes] */
	int32_t n_staging, n_busy, n_writes; /* buffers; in use; of these, for writes */
	struct job *jobs;      /* [n_staging] */
	uint64_t *generation;  /* [n_entries] */
	struct kv_record_sums *sums; /* [n_entries] of those that are written */
	uint64_t last_generation;
	uint64_t write_bytes_per_s;
	double write_credit;   /* bytes that may be written now */
	int64_t credit_ns;
	int64_t stall_ms;
	struct mailbox todo, done;
	struct list arrived;   /* answers, taken from done */
	void (*wake)(void *arg);
	void *wake_arg;
	pthread_t thread;
	bool running;
	_Atomic bool stop;
};

/* ---- The thread ---- */

static int64_t now_ns(void)
{
	return clock_now_ns(clock_system());
}

static int submit_rest(struct disk *d, struct job *j)
{
	struct kv_file_place place = kv_file_place(&d->files, j->slot);
	j->transfer = (struct kv_io_transfer){
	        .fd = place.fd,
	        .write = j->write,
	        .offset = place.offset + j->moved,
	        .buffer = j->record + j->moved,
	        .bytes = j->end - j->moved,
	};
	return d->io->ops->submit(d->io, &j->transfer);
}

static void answer(struct disk *d, struct job *j, int error)
{
	j->error = error;
	if (!j->write && error == 0 && j->part == KV_WHOLE)
		j->good = kv_record_check(&d->files, j->slot, j->record, &j->page, j->generation);
	else if (!j->write && error == 0)
		j->good = kv_record_part_check(&d->files, j->record, j->part, j->generation, j->sum);
	mailbox_post(&d->done, &j->link);
}

/* A transfer ended. True when the job did too, and has been answered. */
static bool take_transfer(struct disk *d, struct job *j, int64_t *disk_free_ns)
{
	int64_t result = j->transfer.result;
	int error = result < 0 ? (int)-result : result == 0 ? EIO : 0;
	int64_t now = now_ns();
	if (error == 0) {
		j->moved += (size_t)result;
		if (j->moved < j->end) {
			/* A direct transfer goes on at a whole block. */
			j->moved -= j->moved % KV_FILE_BLOCK;
			error = result < KV_FILE_BLOCK ? EIO : -submit_rest(d, j);
			if (error == 0)
				return false;
		}
	}
	/* Side by side transfers share the disk: each counts for the time since the one before it. */
	j->took_ns = now - (j->submitted_ns > *disk_free_ns ? j->submitted_ns : *disk_free_ns);
	*disk_free_ns = now;
	answer(d, j, error);
	return true;
}

static int start_jobs(struct disk *d)
{
	struct list jobs;
	int n = 0;
	list_init(&jobs);
	mailbox_take(&d->todo, &jobs);
	for (struct list *l; (l = list_pop_front(&jobs));) {
		struct job *j = list_entry(l, struct job, link);
		if (j->write)
			kv_record_seal(&d->files, j->slot, &j->page, j->generation, j->record, &j->sums);
		j->submitted_ns = now_ns();
		int e = submit_rest(d, j);
		if (e != 0)
			answer(d, j, -e);
		else
			n++;
	}
	return n;
}

static void *thread_main(void *arg)
{
	struct disk *d = arg;
	struct kv_io_transfer *ended[KV_IO_DEPTH];
	int n_under_way = 0, dead = 0;
	int64_t disk_free_ns = 0;
	while (dead == 0) {
		/* Read before the mailbox, so that nothing posted before the stop is missed. */
		bool stop = atomic_load(&d->stop);
		int started = start_jobs(d);
		n_under_way += started;
		if (stop && n_under_way == 0)
			break;
		/* What was answered without having begun is news as well. */
		if (d->wake)
			d->wake(d->wake_arg);
		int n = d->io->ops->reap(d->io, ended, KV_IO_DEPTH, -1);
		if (n < 0)
			dead = -n;
		for (int i = 0; i < n; i++)
			n_under_way -= take_transfer(d, list_entry(ended[i], struct job, transfer), &disk_free_ns);
	}
	return NULL;
}

/* ---- Off ---- */

/* Answers everybody, and forgets what can be forgotten. Buffers come back when the thread gives them back. */
static void turn_off(struct disk *d, const char *reason, const char *detail)
{
	struct kv_tier *t = &d->base;
	if (t->stats.off)
		return;
	t->stats.off = true;
	t->stats.off_reason = reason;
	log_msg(LOG_WARN, "kv_disk_off", "the disk tier in %s is off from now on: %s%s%s", d->files.dir, reason,
	        *detail ? ": " : "", detail);
	for (int i = 0; i < KV_TIER_MAX_LOADS; i++) {
		struct kv_tier_load *l = &t->loads[i];
		if (l->entry == NONE || l->ended)
			continue;
		if (l->staging != NONE)
			d->jobs[l->staging].load = NONE;
		kv_tier_end_load(t, l, KV_LOAD_FAILED);
	}
	for (int32_t i = 0; i < t->n_entries; i++) {
		if (t->entries[i].present && t->entries[i].n_users == 0)
			kv_tier_forget(t, i);
	}
}

/* ---- Buffers ---- */

/* Writes leave half of the buffers to reads. */
static bool has_buffer(const struct disk *d, bool write)
{
	return d->n_busy < d->n_staging && (!write || d->n_writes < (d->n_staging + 1) / 2);
}

static struct job *take_job(struct disk *d, bool write)
{
	if (!has_buffer(d, write))
		return NULL;
	struct job *j = d->jobs;
	while (j->busy)
		j++;
	j->busy = true;
	j->write = write;
	j->part = KV_WHOLE;
	j->moved = 0;
	j->end = d->record_bytes;
	j->error = 0;
	j->good = false;
	j->load = NONE;
	d->n_busy++;
	d->n_writes += write;
	return j;
}

static void give_job_back(struct disk *d, struct job *j)
{
	j->busy = false;
	d->n_busy--;
	d->n_writes -= j->write;
}

static void send(struct disk *d, struct job *j, int32_t slot)
{
	j->slot = slot;
	j->page = d->base.entries[slot].page;
	j->generation = d->generation[slot];
	j->begun_ns = clock_now_ns(d->base.clock);
	mailbox_post(&d->todo, &j->link);
}

/* ---- The tier ---- */

/* A second's worth of writes may be saved up, and a record at least. */
static bool may_write(struct disk *d, bool take)
{
	if (d->write_bytes_per_s == 0 || d->base.hurry)
		return true;
	int64_t now = clock_now_ns(d->base.clock);
	double most = (double)d->write_bytes_per_s;
	if (most < (double)d->record_bytes)
		most = (double)d->record_bytes;
	d->write_credit += (double)(now - d->credit_ns) * 1e-9 * (double)d->write_bytes_per_s;
	d->credit_ns = now;
	if (d->write_credit > most)
		d->write_credit = most;
	if (d->write_credit < (double)d->record_bytes)
		return false;
	if (take)
		d->write_credit -= (double)d->record_bytes;
	return true;
}

static bool has_room(struct kv_tier *t)
{
	struct disk *d = (struct disk *)t;
	return has_buffer(d, true) && may_write(d, false);
}

static enum kv_tier_put put(struct kv_tier *t, int32_t entry, int32_t device_page)
{
	struct disk *d = (struct disk *)t;
	struct kv_tier_entry *e = &t->entries[entry];
	struct job *j = take_job(d, true);
	if (!j)
		return KV_PUT_BUSY;
	if (!may_write(d, true)) {
		give_job_back(d, j);
		return KV_PUT_RATE;
	}
	if (kv_tier_read_page(t, device_page, t->pages == KV_TIER_WIDE, j->record + KV_FILE_BLOCK) != STATUS_OK) {
		give_job_back(d, j);
		return KV_PUT_FAILED;
	}
	d->generation[entry] = ++d->last_generation;
	e->writing = true;
	e->at = (int32_t)(j - d->jobs);
	t->stats.n_writing++;
	send(d, j, entry);
	return KV_PUT_STORED;
}

static void end_write(struct disk *d, const struct job *j)
{
	struct kv_tier *t = &d->base;
	struct kv_tier_entry *e = &t->entries[j->slot];
	e->writing = false;
	e->at = NONE;
	t->stats.n_writing--;
	kv_tier_release(t, j->slot);
	if (j->error) {
		turn_off(d, "a write failed", strerror(j->error));
	} else {
		d->sums[j->slot] = j->sums;
		t->stats.bytes_written += d->record_bytes;
		kv_tier_measure(&t->stats.write_bytes_per_s, d->record_bytes, j->took_ns);
	}
	if (t->stats.off && e->present && e->n_users == 0)
		kv_tier_forget(t, j->slot);
}

/* Bytes that a job moves. */
static size_t job_bytes(const struct disk *d, const struct job *j)
{
	size_t begin = 0, end = d->record_bytes;
	if (j->part != KV_WHOLE)
		kv_record_part(&d->files, j->part, &begin, &end);
	return end - begin;
}

static void end_read(struct disk *d, const struct job *j)
{
	struct kv_tier *t = &d->base;
	if (j->error) {
		turn_off(d, "a read failed", strerror(j->error));
		return;
	}
	t->stats.bytes_read += job_bytes(d, j);
	kv_tier_measure(&t->stats.read_bytes_per_s, job_bytes(d, j), j->took_ns);
	if (j->load == NONE)
		return;
	struct kv_tier_load *l = &t->loads[j->load];
	enum kv_tier_end end = KV_LOAD_CORRUPT;
	if (l->cancelled)
		end = KV_LOAD_FAILED;
	else if (j->good)
		end = kv_tier_deliver(t, l, t->pages == KV_TIER_WIDE, j->record + KV_FILE_BLOCK);
	kv_tier_end_load(t, l, end);
}

static void take_answers(struct disk *d)
{
	mailbox_take(&d->done, &d->arrived);
	for (struct list *l; (l = list_pop_front(&d->arrived));) {
		struct job *j = list_entry(l, struct job, link);
		if (j->write)
			end_write(d, j);
		else
			end_read(d, j);
		give_job_back(d, j);
	}
}

static void start_load(struct disk *d, int32_t load)
{
	struct kv_tier *t = &d->base;
	struct kv_tier_load *l = &t->loads[load];
	const struct kv_tier_entry *e = &t->entries[l->entry];
	if (l->cancelled) {
		kv_tier_end_load(t, l, KV_LOAD_FAILED);
		return;
	}
	if (e->writing) {
		const char *bytes = d->jobs[e->at].record + KV_FILE_BLOCK;
		kv_tier_end_load(t, l, kv_tier_deliver(t, l, t->pages == KV_TIER_WIDE, bytes));
		return;
	}
	struct job *j = take_job(d, false);
	if (!j)
		return;
	j->load = load;
	l->staging = (int32_t)(j - d->jobs);
	if (l->part != KV_WHOLE) {
		j->part = l->part;
		j->sum = d->sums[l->entry].part[l->part];
		kv_record_part(&d->files, j->part, &j->moved, &j->end);
	}
	send(d, j, l->entry);
}

static void check_stall(struct disk *d)
{
	int64_t now = clock_now_ns(d->base.clock);
	for (int32_t i = 0; i < d->n_staging; i++) {
		if (d->jobs[i].busy && now - d->jobs[i].begun_ns > d->stall_ms * 1000000)
			turn_off(d, "a transfer takes too long", "");
	}
}

static int32_t n_parts(const struct kv_tier *t, int32_t entry)
{
	(void)entry;
	return ((const struct disk *)t)->files.n_parts;
}

static void advance(struct kv_tier *t)
{
	struct disk *d = (struct disk *)t;
	take_answers(d);
	if (d->n_busy > 0 && !t->stats.off)
		check_stall(d);
	for (int32_t i = 0; i < KV_TIER_MAX_LOADS; i++) {
		if (t->loads[i].entry != NONE && !t->loads[i].ended && t->loads[i].staging == NONE)
			start_load(d, i);
	}
}

static void wait_for(struct kv_tier *t, int64_t timeout_ms)
{
	struct disk *d = (struct disk *)t;
	if (d->n_busy > 0)
		mailbox_wait(&d->done, &d->arrived, timeout_ms * 1000000);
}

static void stats(const struct kv_tier *t, struct kv_tier_stats *out)
{
	const struct disk *d = (const struct disk *)t;
	out->used_bytes = (uint64_t)out->n_pages * d->record_bytes;
	out->index_bytes += (uint64_t)t->n_entries * (sizeof *d->generation + sizeof *d->sums) +
	                    (uint64_t)d->n_staging * d->record_bytes;
	out->io = d->io->ops->name;
}

/* ---- Beginning and end ---- */

/* One round of transfers at start, before there is a thread: jobs[0..n) from their slots; bytes of each. */
static enum status transfer_round(struct disk *d, int32_t n, bool write, size_t bytes, struct error *err)
{
	int left = n;
	struct kv_io_transfer *ended[KV_IO_DEPTH];
	for (int32_t i = 0; i < n; i++) {
		struct job *j = &d->jobs[i];
		struct kv_file_place place = kv_file_place(&d->files, j->slot);
		j->transfer = (struct kv_io_transfer){
			.fd = place.fd, .write = write, .offset = place.offset, .buffer = j->record, .bytes = bytes};
		int e = d->io->ops->submit(d->io, &j->transfer);
		if (e != 0)
			return error_set(err, STATUS_IO, "the disk tier in %s cannot be used: %s", d->files.dir,
			                 strerror(-e));
	}
	while (left > 0) {
		int k = d->io->ops->reap(d->io, ended, KV_IO_DEPTH, d->stall_ms * 1000000);
		if (k <= 0)
			return error_set(err, STATUS_IO, "the disk tier in %s cannot be used: %s", d->files.dir,
			                 k < 0 ? strerror(-k) : "a transfer takes too long");
		for (int i = 0; i < k; i++) {
			if (ended[i]->result < (int64_t)bytes)
				return error_set(err, STATUS_IO, "the disk tier in %s cannot be used: %s", d->files.dir,
				                 ended[i]->result < 0 ? strerror((int)-ended[i]->result)
				                                      : "a transfer is short");
		}
		left -= k;
	}
	return STATUS_OK;
}

struct found {
	uint64_t generation;
	int32_t slot;
};

static int by_generation(const void *a, const void *b)
{
	const struct found *x = a, *y = b;
	return (x->generation > y->generation) - (x->generation < y->generation);
}

/* What the record in slot says joins the index, unless a later one of the same page is there. */
static void index_record(struct disk *d, int32_t slot, const void *record)
{
	struct kv_tier *t = &d->base;
	struct kv_page_name page;
	struct kv_record_sums sums;
	uint64_t generation;
	if (!kv_record_read(&d->files, slot, record, &page, &generation, &sums))
		return;
	int32_t other = kv_tier_lookup(t, &page.key);
	if (other != NONE && d->generation[other] > generation)
		return;
	if (other != NONE)
		kv_tier_forget(t, other);
	kv_tier_enter(t, &page, slot);
	kv_tier_release(t, slot);
	d->generation[slot] = generation;
	d->sums[slot] = sums;
	if (generation > d->last_generation)
		d->last_generation = generation;
}

/* Finds out what the files have. The pages written last are the last to go. */
static enum status rebuild(struct disk *d, struct error *err)
{
	struct kv_tier *t = &d->base;
	int32_t n = 0, n_found = 0, n_slots = kv_file_n_slots(&d->files);
	enum status st = STATUS_OK;
	for (int32_t slot = 0; slot < n_slots && st == STATUS_OK; slot++) {
		if (!d->files.fresh[slot / (int32_t)d->files.common.n_slots])
			d->jobs[n++].slot = slot;
		if (n == d->n_staging || (slot == n_slots - 1 && n > 0)) {
			st = transfer_round(d, n, false, KV_FILE_BLOCK, err);
			for (int32_t i = 0; i < n && st == STATUS_OK; i++)
				index_record(d, d->jobs[i].slot, d->jobs[i].record);
			n = 0;
		}
	}
	kv_tier_list_free(t);
	if (st != STATUS_OK || t->stats.n_pages == 0)
		return st;
	struct found *found = calloc((size_t)t->stats.n_pages, sizeof *found);
	if (!found)
		return error_set(err, STATUS_NOMEM, "no memory for the index of the disk tier");
	for (int32_t i = 0; i < t->n_entries; i++) {
		if (t->entries[i].present)
			found[n_found++] = (struct found){d->generation[i], i};
	}
	qsort(found, (size_t)n_found, sizeof *found, by_generation);
	for (int32_t i = 0; i < n_found; i++)
		kv_tier_touch(t, found[i].slot);
	free(found);
	return STATUS_OK;
}

/* Writes a few records that are none into free slots and reads them back; with no slot free it only reads. */
static enum status measure(struct disk *d, struct error *err)
{
	struct kv_tier *t = &d->base;
	int32_t n = 0, most = PROBES < d->n_staging ? PROBES : d->n_staging;
	enum status st = STATUS_OK;
	for (int32_t i = t->first_free; i != NONE && n < most; i = t->entries[i].hash_next) {
		memset(d->jobs[n].record, 0x5A, d->record_bytes);
		d->jobs[n++].slot = i;
	}
	bool may_overwrite = n > 0;
	for (int32_t i = 0; !may_overwrite && i < t->n_entries && n < most; i++)
		d->jobs[n++].slot = i;
	int64_t start = now_ns();
	if (may_overwrite)
		st = transfer_round(d, n, true, d->record_bytes, err);
	int64_t written = now_ns();
	if (st == STATUS_OK)
		st = transfer_round(d, n, false, d->record_bytes, err);
	if (st != STATUS_OK)
		return st;
	if (may_overwrite)
		kv_tier_measure(&t->stats.write_bytes_per_s, (uint64_t)n * d->record_bytes, written - start);
	kv_tier_measure(&t->stats.read_bytes_per_s, (uint64_t)n * d->record_bytes, now_ns() - written);
	return STATUS_OK;
}

static void free_disk(struct disk *d)
{
	mailbox_destroy(&d->todo);
	mailbox_destroy(&d->done);
	kv_file_close(&d->files);
	d->io->ops->destroy(d->io);
	free(d->generation);
	free(d->sums);
	free(d->jobs);
	free(d->memory);
	if (d->base.entries)
		kv_tier_fini(&d->base);
	free(d);
}

static void destroy(struct kv_tier *t)
{
	struct disk *d = (struct disk *)t;
	struct timespec until;
	atomic_store(&d->stop, true);
	d->io->ops->kick(d->io);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += JOIN_SECONDS;
	/* A disk that hangs must not keep the process: what it may still write to is left to the end of the process. */
	if (d->running && pthread_timedjoin_np(d->thread, NULL, &until) != 0) {
		log_msg(LOG_WARN, "kv_disk", "the disk tier in %s hangs; it is left behind", d->files.dir);
		return;
	}
	struct list left;
	list_init(&left);
	mailbox_take(&d->done, &left);
	mailbox_take(&d->todo, &left);
	free_disk(d);
}

static void kick_io(void *arg)
{
	struct disk *d = arg;
	d->io->ops->kick(d->io);
}

static enum status make_buffers(struct disk *d, int32_t n_staging, struct error *err)
{
	d->n_staging = n_staging <= 0 ? DEFAULT_STAGING : n_staging > MAX_STAGING ? MAX_STAGING : n_staging;
	d->record_bytes = d->files.common.record_bytes;
	size_t bytes = (size_t)d->n_staging * d->record_bytes;
	d->memory = aligned_alloc(KV_FILE_BLOCK, bytes);
	d->jobs = calloc((size_t)d->n_staging, sizeof *d->jobs);
	d->generation = calloc((size_t)kv_file_n_slots(&d->files), sizeof *d->generation);
	d->sums = calloc((size_t)kv_file_n_slots(&d->files), sizeof *d->sums);
	if (!d->memory || !d->jobs || !d->generation || !d->sums)
		return error_set(err, STATUS_NOMEM, "no memory for the disk tier");
	for (int32_t i = 0; i < d->n_staging; i++)
		d->jobs[i].record = d->memory + (size_t)i * d->record_bytes;
	memset(d->memory, 0, bytes);
	d->io->ops->attach(d->io, d->memory, bytes);
	return STATUS_OK;
}

enum status kv_tier_disk_create(const struct kv_tier_device *device, const struct clock *clock,
                                const struct kv_tier_disk_options *o, struct kv_tier **out, struct error *err)
{
	static const struct kv_tier_ops ops = {.put = put,
	                                       .has_room = has_room,
	                                       .n_parts = n_parts,
	                                       .advance = advance,
	                                       .wait = wait_for,
	                                       .stats = stats,
	                                       .destroy = destroy};
	struct kv_io *io = o->io ? o->io : kv_io_create();
	struct disk *d = calloc(1, sizeof *d);
	enum status st;
	if (!io || !d) {
		if (io)
			io->ops->destroy(io);
		free(d);
		return error_set(err, STATUS_NOMEM, "no memory for the disk tier");
	}
	d->io = io;
	d->wake = o->wake;
	d->wake_arg = o->wake_arg;
	d->stall_ms = o->stall_ms > 0 ? o->stall_ms : DEFAULT_STALL_MS;
	d->write_bytes_per_s = o->write_bytes_per_s;
	d->credit_ns = clock_now_ns(clock);
	list_init(&d->arrived);
	mailbox_init(&d->todo, kick_io, d);
	mailbox_init(&d->done, NULL, NULL);
	st = kv_file_plan(o, &device->layout, &d->files, err);
	if (st == STATUS_OK)
		st = kv_file_open(&d->files, io, err);
	if (st == STATUS_OK)
		st = make_buffers(d, o->n_staging, err);
	if (st == STATUS_OK)
		st = kv_tier_init(&d->base, &ops, device, clock, kv_file_n_slots(&d->files), err);
	if (st == STATUS_OK)
		st = rebuild(d, err);
	if (st == STATUS_OK)
		st = measure(d, err);
	if (st == STATUS_OK && pthread_create(&d->thread, NULL, thread_main, d) != 0)
		st = error_set(err, STATUS_NOMEM, "no thread for the disk tier");
	if (st != STATUS_OK) {
		free_disk(d);
		return st;
	}
	d->running = true;
	d->write_credit = (double)(d->write_bytes_per_s > d->record_bytes ? d->write_bytes_per_s : d->record_bytes);
	d->base.pages = o->pages;
	d->base.stats.kind = o->pages == KV_TIER_WIDE ? "disk-wide" : "disk";
	d->base.stats.type = kv_codec_elements(&device->layout, KV_FORM_F16); /* as it is in the pool */
	d->base.stats.cap_bytes = kv_file_bytes(&d->files);
	*out = &d->base;
	return STATUS_OK;
}
