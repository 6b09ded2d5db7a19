/*
 * Collectives of a warp: each is a lane's request, and a function that the last lane to come runs over all of them.
 */
#include "cuda/host_cuda/internal.h"
#include "cuda/host_cuda/warp.h"

namespace host_cuda {

template <typename F> static void each_lane(uint32_t mask, F f)
{
	for (; mask != 0; mask &= mask - 1)
		f(static_cast<unsigned>(__builtin_ctz(mask)));
}

/* All that the lanes did before is before all that they do after, and so is what each of them had seen. */
static void order_lanes(lane_op *const *, uint32_t mask)
{
	warp_state &w = warp_of(*self);
	uint16_t joined[warp_lanes] = {};
	each_lane(mask, [&](unsigned t) {
		for (unsigned i = 0; i < warp_lanes; i++)
			joined[i] = w.seen[t][i] > joined[i] ? w.seen[t][i] : joined[i];
	});
	each_lane(mask, [&](unsigned t) { joined[t] = ++w.now[t]; });
	each_lane(mask, [&](unsigned t) { memcpy(w.seen[t], joined, sizeof joined); });
	w.ordered_once = true;
}

void __syncwarp(unsigned mask)
{
	lane_op op = {};
	op.name = "__syncwarp";
	op.mask = mask;
	op.run = order_lanes;
	collective(op);
}

/* PTX ISA, shfl.sync: the source lane of each kind, or the lane's own value where the source is outside its segment. */
static int source_lane(shuffle kind, int lane, int operand, int width)
{
	const int first = lane & ~(width - 1), last = first + width - 1;
	int source = lane;
	switch (kind) {
	case shuffle::index:
		return first + (operand & (width - 1));
	case shuffle::up:
		source = lane - operand;
		return source < first ? lane : source;
	case shuffle::down:
		source = lane + operand;
		return source > last ? lane : source;
	case shuffle::butterfly:
		source = lane ^ operand;
		return source > last ? lane : source;
	}
	return lane;
}

static void run_shuffle(lane_op *const *lanes, uint32_t mask)
{
	each_lane(mask, [&](unsigned lane) {
		lane_op &op = *lanes[lane];
		const int source = source_lane(static_cast<shuffle>(op.same & 3), static_cast<int>(lane), op.a, op.b);
		if (!(mask >> source & 1))
			violation("%s: lane %u reads lane %d, which mask 0x%08x does not name", op.name, lane, source,
			          mask);
		memcpy(op.out, lanes[source]->in, op.size);
	});
}

void shuffle_bytes(shuffle kind, unsigned mask, const void *in, void *out, unsigned size, int operand, int width)
{
	static const char *const names[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync"};
	lane_op op = {};
	op.name = names[static_cast<int>(kind)];
	if (width < 1 || width > 32 || (width & (width - 1)) != 0)
		violation("%s with a width of %d", op.name, width);
	op.mask = mask;
	op.run = run_shuffle;
	op.in = in;
	op.out = out;
	op.size = size;
	op.a = operand;
	op.b = width;
	op.same = static_cast<uint64_t>(kind) | static_cast<uint64_t>(size) << 8;
	collective(op);
}

/* Lanes whose predicate holds. */
static void run_ballot(lane_op *const *lanes, uint32_t mask)
{
	unsigned votes = 0;
	each_lane(mask, [&](unsigned lane) { votes |= static_cast<unsigned>(lanes[lane]->a != 0) << lane; });
	each_lane(mask, [&](unsigned lane) { *static_cast<unsigned *>(lanes[lane]->out) = votes; });
}

unsigned __ballot_sync(unsigned mask, int predicate)
{
	unsigned votes = 0;
	lane_op op = {};
	op.name = "a vote";
	op.mask = mask;
	op.run = run_ballot;
	op.out = &votes;
	op.a = predicate;
	collective(op);
	return votes;
}

static void run_match(lane_op *const *lanes, uint32_t mask)
{
	each_lane(mask, [&](unsigned lane) {
		unsigned equal = 0;
		each_lane(mask, [&](unsigned other) {
			equal |=
				static_cast<unsigned>(memcmp(lanes[lane]->in, lanes[other]->in, lanes[lane]->size) == 0)
				<< other;
		});
		*static_cast<unsigned *>(lanes[lane]->out) = equal;
	});
}

unsigned match_bytes(unsigned mask, const void *value, unsigned size)
{
	unsigned equal = 0;
	lane_op op = {};
	op.name = "__match_any_sync";
	op.mask = mask;
	op.run = run_match;
	op.in = value;
	op.out = &equal;
	op.size = size;
	op.same = size;
	collective(op);
	return equal;
}

static unsigned reduce_two(reduce kind, unsigned x, unsigned y)
{
	const int sx = static_cast<int>(x), sy = static_cast<int>(y);
	switch (kind) {
	case reduce::add:
		return x + y;
	case reduce::min_signed:
		return sx < sy ? x : y;
	case reduce::max_signed:
		return sx < sy ? y : x;
	case reduce::min_unsigned:
		return x < y ? x : y;
	case reduce::max_unsigned:
		return x < y ? y : x;
	case reduce::bit_and:
		return x & y;
	case reduce::bit_or:
		return x | y;
	case reduce::bit_xor:
		return x ^ y;
	}
	return x;
}

static void run_reduce(lane_op *const *lanes, uint32_t mask)
{
	const unsigned first = static_cast<unsigned>(__builtin_ctz(mask));
	unsigned total = *static_cast<const unsigned *>(lanes[first]->in);
	each_lane(mask & (mask - 1), [&](unsigned lane) {
		total = reduce_two(static_cast<reduce>(lanes[lane]->same), total,
		                   *static_cast<const unsigned *>(lanes[lane]->in));
	});
	each_lane(mask, [&](unsigned lane) { *static_cast<unsigned *>(lanes[lane]->out) = total; });
}

unsigned reduce_sync(reduce kind, unsigned mask, unsigned v)
{
	unsigned total = 0;
	lane_op op = {};
	op.name = "a __reduce_*_sync";
	op.mask = mask;
	op.run = run_reduce;
	op.in = &v;
	op.out = &total;
	op.same = static_cast<uint64_t>(kind);
	collective(op);
	return total;
}

} // namespace host_cuda
