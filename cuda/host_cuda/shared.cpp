/*
 * Shared memory of the block that runs, and its shadow.
 */
#include <stdio.h>

#include "cuda/host_cuda/global.h"
#include "cuda/host_cuda/internal.h"
#include "cuda/host_cuda/warp.h"

namespace host_cuda {

/*
 * What is known of a byte: its last write and its last reads, each with the epoch, the thread, and the thread's time
 * within its warp (see warp_state). Epochs never repeat, so that nothing is cleared between blocks. A byte is
 * initialised when its last write is of this block.
 */
struct shadow_byte {
	uint32_t write_epoch, read_epoch;
	uint16_t writer, reader;
	uint16_t write_time, read_time;
};

enum : uint16_t {
	thread_bits = 0x03ff,
	by_atomic = 0x4000,  /* writer: an atomic operation, which conflicts with no other */
	is_pending = 0x8000, /* writer: an asynchronous copy that has not been waited for */
	by_warp = 0x8000,    /* reader: several lanes of warp (reader & thread_bits) */
	by_many = 0xffff,    /* reader: several warps */
};

alignas(128) static unsigned char memory[shared_optin_limit];
static shadow_byte shadow[shared_optin_limit];

/* Static arrays of this block, by their declaration. The dynamic bytes come first. */
static std::vector<std::pair<const void *, int64_t>> sites;
static int64_t top;

void shared_begin_block(size_t dynamic_bytes)
{
	sites.clear();
	top = (static_cast<int64_t>(dynamic_bytes) + 15) & ~INT64_C(15);
}

int64_t dynamic_shared()
{
	return 0;
}

int64_t static_shared(const void *site, size_t bytes)
{
	for (const auto &s : sites)
		if (s.first == site)
			return s.second;
	const int64_t offset = top;
	top = (offset + static_cast<int64_t>(bytes) + 15) & ~INT64_C(15);
	if (top > static_cast<int64_t>(current.shared_limit))
		violation("%lld bytes of shared memory, static and dynamic: only %zu are allowed",
		          static_cast<long long>(top), current.shared_limit);
	sites.emplace_back(site, offset);
	return offset;
}

/*
 * Whether all that the thread `other` did up to `time`, in this epoch, comes before what the running thread does now.
 */
static bool before_us(unsigned other, uint16_t time)
{
	if (other == self->id)
		return true;
	if (other / warp_lanes != self->warp)
		return false;
	return warp_of(*self).seen[self->lane][other % warp_lanes] > time;
}

static bool reads_before_us(const shadow_byte &b)
{
	if (b.reader == by_many)
		return false;
	if (!(b.reader & by_warp))
		return before_us(b.reader, b.read_time);
	const unsigned warp = b.reader & thread_bits;
	if (warp != self->warp)
		return false;
	for (unsigned lane = 0; lane < warp_lanes; lane++)
		if ((warp_of(*self).present >> lane & 1) && !before_us(warp * warp_lanes + lane, b.read_time))
			return false;
	return true;
}

static void note_read(shadow_byte &b)
{
	const uint16_t id = static_cast<uint16_t>(self->id), now = warp_of(*self).now[self->lane];
	if (b.read_epoch != epoch || reads_before_us(b)) {
		b.reader = id;
		b.read_time = now;
	} else if (b.reader != id) {
		const bool ours = b.reader != by_many &&
		                  (b.reader & by_warp ? b.reader & thread_bits : b.reader / warp_lanes) == self->warp;
		b.reader = ours ? static_cast<uint16_t>(by_warp | self->warp) : static_cast<uint16_t>(by_many);
		b.read_time = now > b.read_time ? now : b.read_time;
	}
	b.read_epoch = epoch;
}

static void note_write(shadow_byte &b, uint16_t flags)
{
	b.write_epoch = epoch;
	b.writer = static_cast<uint16_t>(self->id | flags);
	b.write_time = warp_of(*self).now[self->lane];
}

/* The reports say who was there before. */
static void race_with_writer(const char *what, int64_t offset, const shadow_byte &b)
{
	violation("race: %s shared memory at offset %lld that thread %u of the block wrote, with no barrier between",
	          what, static_cast<long long>(offset), b.writer & thread_bits);
}

static void race_with_reader(const char *what, int64_t offset, const shadow_byte &b)
{
	char who[64] = "several warps";
	if (b.reader != by_many)
		snprintf(who, sizeof who, b.reader & by_warp ? "lanes of warp %u" : "thread %u of the block",
		         b.reader & thread_bits);
	violation("race: %s shared memory at offset %lld that %s read, with no barrier between", what,
	          static_cast<long long>(offset), who);
}

static const char *verb(access how)
{
	return how == access::read ? "reads" : how == access::write ? "writes" : "changes";
}

static void check_byte(int64_t offset, shadow_byte &b, access how)
{
	if ((b.writer & is_pending) && b.write_epoch >= block_epoch)
		violation("%s shared memory at offset %lld, where an asynchronous copy of thread %u has not been "
		          "waited for",
		          verb(how), static_cast<long long>(offset), b.writer & thread_bits);
	if (how != access::write && b.write_epoch < block_epoch)
		violation("reads uninitialised shared memory at offset %lld", static_cast<long long>(offset));
	if (b.write_epoch == epoch && !(how == access::atomic && (b.writer & by_atomic)) &&
	    !before_us(b.writer & thread_bits, b.write_time))
		race_with_writer(verb(how), offset, b);
	if (how != access::read && b.read_epoch == epoch && !reads_before_us(b))
		race_with_reader(verb(how), offset, b);
}

static void check_place(int64_t offset, unsigned bytes, unsigned alignment, int64_t begin, int64_t end, access how)
{
	if (!self)
		return;
	if (offset < begin || offset + bytes > end)
		violation("%s %u bytes of shared memory out of bounds: offset %lld in an array of %lld bytes",
		          verb(how), bytes, static_cast<long long>(offset - begin),
		          static_cast<long long>(end - begin));
	if (offset % alignment != 0)
		violation("misaligned: %s %u bytes of shared memory at offset %lld", verb(how), bytes,
		          static_cast<long long>(offset));
}

void *shared_access(int64_t offset, unsigned bytes, unsigned alignment, int64_t begin, int64_t end, access how)
{
	check_place(offset, bytes, alignment, begin, end, how);
	for (int64_t i = offset; i < offset + bytes; i++) {
		shadow_byte &b = shadow[i];
		check_byte(i, b, how);
		if (how == access::read)
			note_read(b);
		if (how != access::read)
			note_write(b, how == access::atomic ? by_atomic : 0);
	}
	return memory + offset;
}

/* ---- asynchronous copies: the bytes come at the wait, and until then nobody may look */

struct pending_copy {
	int64_t offset;
	unsigned bytes;
	uint64_t group; /* number of the thread's group, from 1 */
	unsigned char data[16];
};

static struct {
	std::vector<pending_copy> pending;
	uint64_t groups; /* committed */
} copies[max_threads];

void drop_pending_copies()
{
	for (unsigned i = 0; i < current.n_threads; i++) {
		copies[i].pending.clear();
		copies[i].groups = 0;
	}
}

void copy_async(shared_place dst, const void *src, unsigned bytes, bool valid)
{
	pending_copy c = {};
	check_place(dst.offset, bytes, bytes, dst.begin, dst.end, access::write);
	if (valid) {
		check_global(src, bytes, bytes, false);
		memcpy(c.data, src, bytes);
	}
	for (int64_t i = dst.offset; i < dst.offset + bytes; i++) {
		check_byte(i, shadow[i], access::write);
		note_write(shadow[i], is_pending);
	}
	c.offset = dst.offset;
	c.bytes = bytes;
	c.group = copies[self->id].groups + 1;
	copies[self->id].pending.push_back(c);
}

void cp_async_commit()
{
	copies[self->id].groups++;
}

void copy_async_wait(unsigned may_pend)
{
	auto &mine = copies[self->id];
	size_t kept = 0;
	for (const pending_copy &c : mine.pending) {
		/* A copy that was not committed is in no group that could be waited for. */
		if (c.group + may_pend > mine.groups) {
			mine.pending[kept++] = c;
			continue;
		}
		memcpy(memory + c.offset, c.data, c.bytes);
		for (int64_t i = c.offset; i < c.offset + c.bytes; i++)
			note_write(shadow[i], 0);
	}
	mine.pending.resize(kept);
}

} // namespace host_cuda
