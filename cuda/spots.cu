/*
 * Merging (engine/kv/merge.h): what is done to single places of pages, of all layers at once, where the pages are. The
 * host decides what joins what and sends lists; of its rounds each costs two launches and one answer.
 *
 * A vector is the key or value of a layer, KV head and place. Means and cosines are those of the host
 * (engine/kv/merge_pages.c) but for the order of additions.
 */
#include "cuda/operations.cuh"

#include "cuda/block.cuh"
#include "cuda/kv_narrow.cuh"
#include "cuda/kv_page.cuh"

#include <string.h>

namespace GPU_NS
{

enum { SPOT_THREADS = 256, SPOT_WARPS = SPOT_THREADS / 32, LANE_DIMS = 256 / 32 };

/* Where a place is, and a pair of them; of a move, a page below 0 stands for zeros. */
struct place {
	int32_t page, token;
};

struct place_pair {
	struct place a, b;
	float part; /* of a in the mean */
};

/* How a layer's keys are turned: its angles for a distance i are table[first + i * pairs + ..]. */
struct key_turns {
	int32_t pairs, interleaved;
	int64_t first;
};

/* Plain pages, of all layers. */
struct spot_args {
	uint8_t *kv;
	bool bf16;
	size_t page_stride;
	int n_layer, n_head_kv, head_dim;
	const struct key_turns *turns; /* [n_layer] */
	const float2 *table;
};

/* ---- Vectors ---- */

/* In the order of a page: layers, then keys and values, then heads. */
__device__ __forceinline__ int vectors_of(const struct spot_args &a)
{
	return 2 * a.n_layer * a.n_head_kv;
}

__device__ __forceinline__ bool is_value(const struct spot_args &a, int vector)
{
	return vector / a.n_head_kv % 2;
}

__device__ __forceinline__ uint8_t *element_at(const struct spot_args &a, const struct place &p, int vector, int d)
{
	return a.kv + static_cast<size_t>(p.page) * a.page_stride + vector * head_bytes(a.head_dim) +
	       element_offset(is_value(a, vector), a.head_dim, p.token, d);
}

__device__ __forceinline__ float load_element(const struct spot_args &a, const struct place &p, int vector, int d)
{
	return element_of(ld_global<uint16_t>(element_at(a, p, vector, d)), a.bf16);
}

/* Means of finite values are finite; turned, one may be beyond halves, at whose end elements of both types are held. */
__device__ __forceinline__ void store_element(const struct spot_args &a, const struct place &p, int vector, int d,
					      float x)
{
	stg<uint16_t>(element_at(a, p, vector, d),
		      a.bf16 ? static_cast<uint16_t>(bf16_bits(x)) : __half_as_ushort(__float2half_rn(held(x))));
}

/* Element d of a key that is turned by the angles at `table`, or of one that is not: NULL. */
__device__ __forceinline__ float turned_element(const struct spot_args &a, const struct place &p, int vector, int d,
						const struct key_turns &t, const float2 *table)
{
	if (!table || d >= 2 * t.pairs)
		return load_element(a, p, vector, d);
	const int i = t.interleaved ? d / 2 : d % t.pairs, from = t.interleaved ? 2 * i : i;
	const bool second = t.interleaved ? d % 2 : d >= t.pairs;
	const float x0 = load_element(a, p, vector, from),
		    x1 = load_element(a, p, vector, from + (t.interleaved ? 1 : t.pairs));
	const float2 angle = table[i];
	const float x = second ? __fadd_rn(__fmul_rn(x0, angle.y), __fmul_rn(x1, angle.x))
			       : __fsub_rn(__fmul_rn(x0, angle.x), __fmul_rn(x1, angle.y));
	return fminf(fmaxf(x, -3.402823466e38f), 3.402823466e38f); /* bfloat16s are as large as floats */
}

/* ---- Whether all are numbers ---- */

/* A block has a place. */
__global__ void __launch_bounds__(SPOT_THREADS)
	find_unsound(struct spot_args a, const struct place *places, uint32_t *unsound)
{
	const struct place p = places[blockIdx.x];
	const uint32_t exponent = a.bf16 ? 0x7f80 : 0x7c00;
	bool odd = false;
	for (int i = threadIdx.x; i < vectors_of(a) * a.head_dim; i += SPOT_THREADS) {
		const uint32_t bits = ld_global<uint16_t>(element_at(a, p, i / a.head_dim, i % a.head_dim));
		odd = odd || (bits & exponent) == exponent;
	}
	odd = __syncthreads_or(odd);
	if (threadIdx.x == 0)
		unsound[blockIdx.x] = odd;
}

/* ---- How far keys are apart ---- */

/* A block has a pair, a warp of it a key at a time; the sum is over warps in their order. */
__global__ void __launch_bounds__(SPOT_THREADS)
	compare_keys(struct spot_args a, const struct place_pair *pairs, float *apart)
{
	GPU_SHARED(double, sums, SPOT_WARPS);
	const struct place_pair pair = pairs[blockIdx.x];
	const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	double sum = 0;
	for (int key = warp; key < a.n_layer * a.n_head_kv; key += SPOT_WARPS) {
		const int layer = key / a.n_head_kv, vector = key + layer * a.n_head_kv;
		const struct key_turns t = a.turns[layer];
		const float2 *table = a.table + t.first + static_cast<int64_t>(blockIdx.x) * t.pairs;
		float both = 0, first = 0, second = 0;
		for (int d = lane; d < a.head_dim; d += 32) {
			const float x = turned_element(a, pair.a, vector, d, t, table),
				    y = load_element(a, pair.b, vector, d);
			both += x * y;
			first += x * x;
			second += y * y;
		}
		for (int by = 16; by; by /= 2) {
			both += __shfl_xor_sync(ALL, both, by);
			first += __shfl_xor_sync(ALL, first, by);
			second += __shfl_xor_sync(ALL, second, by);
		}
		const float norms = sqrtf(first) * sqrtf(second);
		if (norms > 0 && norms <= 3.402823466e38f)
			sum += fminf(fmaxf(__fdiv_rn(both, norms), -1.0f), 1.0f);
	}
	if (lane == 0)
		sums[warp] = sum;
	__syncthreads();
	if (threadIdx.x == 0) {
		sum = 0;
		for (int i = 0; i < SPOT_WARPS; i++)
			sum += static_cast<double>(sums[i]);
		apart[blockIdx.x] = static_cast<float>(1.0 - sum / (a.n_layer * a.n_head_kv));
	}
}

/* ---- Joining ---- */

/*
 * blockIdx.x: a pair; the warps of all blockIdx.y share its vectors. A warp has read all of a vector before it writes.
 */
__global__ void __launch_bounds__(SPOT_THREADS) join_places(struct spot_args a, const struct place_pair *pairs)
{
	const struct place_pair pair = pairs[blockIdx.x];
	const int lane = threadIdx.x % 32, head_dim = a.head_dim;
	for (int vector = blockIdx.y * SPOT_WARPS + threadIdx.x / 32; vector < vectors_of(a);
	     vector += static_cast<int>(gridDim.y) * SPOT_WARPS) {
		const struct key_turns t = a.turns[vector / (2 * a.n_head_kv)];
		const float2 *table = a.table + t.first + 2 * static_cast<int64_t>(blockIdx.x) * t.pairs;
		const bool value = is_value(a, vector);
		float mean[LANE_DIMS] = {};
#pragma unroll
		for (int k = 0; k < LANE_DIMS; k++) {
			const int d = lane + 32 * k;
			if (d >= head_dim)
				continue;
			const float x = turned_element(a, pair.a, vector, d, t, value ? NULL : table),
				    y = turned_element(a, pair.b, vector, d, t, value ? NULL : table + t.pairs);
			mean[k] = __fadd_rn(__fmul_rn(pair.part, x), __fmul_rn(1.0f - pair.part, y));
		}
		__syncwarp();
#pragma unroll
		for (int k = 0; k < LANE_DIMS; k++)
			if (lane + 32 * k < head_dim)
				store_element(a, pair.a, vector, lane + 32 * k, mean[k]);
	}
}

/* ---- Moving ---- */

enum { MOVES_AT_ONCE = PAGE_TOKENS, MOVED_BY_THREAD = MOVES_AT_ONCE * 256 / SPOT_THREADS };

/*
 * A block has one vector of all places, b of a pair to a. No place that a later one reads is written by an earlier one,
 * so a block reads a few and then writes them.
 */
__global__ void __launch_bounds__(SPOT_THREADS) move_places(struct spot_args a, const struct place_pair *moves, int n)
{
	const int vector = blockIdx.x, head_dim = a.head_dim;
	for (int begin = 0; begin < n; begin += MOVES_AT_ONCE) {
		const int elements = min(static_cast<int>(MOVES_AT_ONCE), n - begin) * head_dim;
		uint16_t bits[MOVED_BY_THREAD];
#pragma unroll
		for (int k = 0; k < MOVED_BY_THREAD; k++) {
			const int i = threadIdx.x + k * SPOT_THREADS;
			bits[k] = 0;
			if (i >= elements)
				continue;
			const struct place from = moves[begin + i / head_dim].b;
			if (from.page >= 0)
				bits[k] = ld_global<uint16_t>(element_at(a, from, vector, i % head_dim));
		}
		__syncthreads();
#pragma unroll
		for (int k = 0; k < MOVED_BY_THREAD; k++) {
			const int i = threadIdx.x + k * SPOT_THREADS;
			if (i < elements)
				stg<uint16_t>(element_at(a, moves[begin + i / head_dim].a, vector, i % head_dim),
					      bits[k]);
		}
		__syncthreads();
	}
}

/* ---- What backend.h has of it ---- */

static enum status begin_list(struct cuda_backend *b, const void *kv, const struct kv_layout *l, size_t bytes,
			      struct spot_args *a)
{
	if (l->form != KV_FORM_F16 || l->type != b->kv_type || l->head_dim > 32 * LANE_DIMS)
		return STATUS_UNSUPPORTED;
	TRY(catch_up(b));
	TRY(upload_begin(b)); /* there is no step */
	TRY(upload_room(b, bytes + 64));
	*a = {};
	a->kv = static_cast<uint8_t *>(const_cast<void *>(kv));
	a->bf16 = l->type == QUANT_BF16;
	a->page_stride = l->page_stride;
	a->n_layer = l->n_layer;
	a->n_head_kv = l->n_head_kv;
	a->head_dim = l->head_dim;
	return STATUS_OK;
}

static struct place place_of(const struct kv_spot &s)
{
	return {s.page, s.token};
}

/* What a kernel has left behind what was sent: n elements for whoever waits. */
template <typename T> static enum status read_answers(struct cuda_backend *b, size_t at, size_t n, const char *what)
{
	TRY(check(b,
		  cudaMemcpyAsync(b->upload.host + at, b->upload.device + at, n * sizeof(T), cudaMemcpyDeviceToHost,
				  b->stream),
		  what));
	return settle(b, what);
}

enum status spots_sound(struct backend *backend, const void *kv, const struct kv_layout *l, const struct kv_spot *spots,
			int32_t n, bool *sound)
{
	struct cuda_backend *b = self(backend);
	const size_t count = static_cast<size_t>(n);
	struct spot_args a;
	size_t places_at, answers_at;
	TRY(begin_list(b, kv, l, count * (sizeof(struct place) + sizeof(uint32_t)), &a));
	struct place *places = put<struct place>(b, count, &places_at);
	for (size_t i = 0; i < count; i++)
		places[i] = place_of(spots[i]);
	TRY(upload_send(b));
	const uint32_t *unsound = put<uint32_t>(b, count, &answers_at);
	GPU_LAUNCH(find_unsound, dim3(static_cast<unsigned>(n)), dim3(SPOT_THREADS), 0, b->stream, a,
		   uploaded<struct place>(b, places_at), uploaded<uint32_t>(b, answers_at));
	TRY(check(b, cudaGetLastError(), "looking for what is no number"));
	TRY(read_answers<uint32_t>(b, answers_at, count, "looking for what is no number"));
	for (size_t i = 0; i < count; i++)
		sound[i] = unsound[i] == 0;
	return STATUS_OK;
}

/*
 * Where the angles of n distances are, for each way in which a layer's keys are turned; layers with the same
 * frequencies share them. turns: [n_layer]. *size: how many angles.
 */
static enum status place_turns(const struct kv_layout *l, const struct rope_params *const *rope, size_t n,
			       struct key_turns *turns, int64_t *size)
{
	*size = 0;
	for (int32_t layer = 0; layer < l->n_layer; layer++) {
		const struct rope_params *r = rope[layer];
		const int pairs = r->n_dims / 2;
		int32_t like = 0;
		if (pairs < 1 || pairs > ROPE_MAX_PAIRS || 2 * pairs > l->head_dim)
			return STATUS_UNSUPPORTED;
		while (rope[like]->inv_freq != r->inv_freq || rope[like]->n_dims != r->n_dims)
			like++;
		turns[layer] = {pairs, r->pairing == ROPE_INTERLEAVED, like < layer ? turns[like].first : *size};
		*size += like < layer ? 0 : static_cast<int64_t>(n) * pairs;
	}
	return STATUS_OK;
}

/* by: n distances, on the device. */
static enum status make_turns(struct cuda_backend *b, const struct kv_layout *l, const struct rope_params *const *rope,
			      const struct key_turns *turns, const double *by, size_t n)
{
	float2 *table = static_cast<float2 *>(b->spot_turns.p);
	int64_t made = 0;
	for (int32_t layer = 0; layer < l->n_layer; layer++) {
		if (turns[layer].first < made)
			continue;
		TRY(check(b,
			  turn_table(rope[layer]->inv_freq, turns[layer].pairs, by, static_cast<int>(n),
				     table + turns[layer].first, b->stream),
			  "angles"));
		made = turns[layer].first + static_cast<int64_t>(n) * turns[layer].pairs;
	}
	return STATUS_OK;
}

/* Sends pairs, and makes the angles for them: of a to b's position, or if they join, of both to theirs. */
static enum status send_pairs(struct cuda_backend *b, const void *kv, const struct kv_layout *l,
			      const struct rope_params *const *rope, const struct kv_pair *pairs, int32_t n, bool join,
			      struct spot_args *a, const struct place_pair **on_device, size_t *answers_at)
{
	const size_t count = static_cast<size_t>(n), n_turns = join ? 2 * count : count,
		     n_layer = static_cast<size_t>(l->n_layer);
	size_t pairs_at, by_at, turns_at;
	TRY(begin_list(b, kv, l,
		       count * (sizeof(struct place_pair) + sizeof(float)) + n_turns * sizeof(double) +
			       n_layer * sizeof(struct key_turns),
		       a));
	struct place_pair *to = put<struct place_pair>(b, count, &pairs_at);
	double *by = put<double>(b, n_turns, &by_at);
	struct key_turns *turns = put<struct key_turns>(b, n_layer, &turns_at);
	for (size_t i = 0; i < count; i++) {
		const struct kv_pair *p = &pairs[i];
		to[i] = {place_of(p->a), place_of(p->b),
			 static_cast<float>(p->n_a / (static_cast<double>(p->n_a) + p->n_b))};
		by[join ? 2 * i : i] = (join ? p->position : p->b.position) - p->a.position;
		if (join)
			by[2 * i + 1] = p->position - p->b.position;
	}
	int64_t n_angles;
	TRY(place_turns(l, rope, n_turns, turns, &n_angles));
	TRY(grow(b, &b->spot_turns, static_cast<size_t>(n_angles) * sizeof(float2)));
	TRY(upload_send(b));
	TRY(make_turns(b, l, rope, turns, uploaded<double>(b, by_at), n_turns));
	a->turns = uploaded<struct key_turns>(b, turns_at);
	a->table = static_cast<const float2 *>(b->spot_turns.p);
	*on_device = uploaded<struct place_pair>(b, pairs_at);
	put<float>(b, count, answers_at);
	return STATUS_OK;
}

enum status spots_apart(struct backend *backend, const void *kv, const struct kv_layout *l,
			const struct rope_params *const *rope, const struct kv_pair *pairs, int32_t n, float *apart)
{
	struct cuda_backend *b = self(backend);
	struct spot_args a;
	const struct place_pair *on_device;
	size_t answers_at;
	TRY(send_pairs(b, kv, l, rope, pairs, n, false, &a, &on_device, &answers_at));
	GPU_LAUNCH(compare_keys, dim3(static_cast<unsigned>(n)), dim3(SPOT_THREADS), 0, b->stream, a, on_device,
		   uploaded<float>(b, answers_at));
	TRY(check(b, cudaGetLastError(), "comparing keys"));
	TRY(read_answers<float>(b, answers_at, static_cast<size_t>(n), "comparing keys"));
	memcpy(apart, b->upload.host + answers_at, static_cast<size_t>(n) * sizeof *apart);
	return STATUS_OK;
}

enum status spots_join(struct backend *backend, void *kv, const struct kv_layout *l,
		       const struct rope_params *const *rope, const struct kv_pair *pairs, int32_t n)
{
	enum { BLOCKS = 4 }; /* of a pair */
	struct cuda_backend *b = self(backend);
	struct spot_args a;
	const struct place_pair *on_device;
	size_t answers_at;
	TRY(send_pairs(b, kv, l, rope, pairs, n, true, &a, &on_device, &answers_at));
	GPU_LAUNCH(join_places, dim3(static_cast<unsigned>(n), BLOCKS), dim3(SPOT_THREADS), 0, b->stream, a, on_device);
	return check(b, cudaGetLastError(), "joining keys and values");
}

enum status spots_move(struct backend *backend, void *kv, const struct kv_layout *l, const struct kv_move *moves,
		       int32_t n)
{
	struct cuda_backend *b = self(backend);
	const size_t count = static_cast<size_t>(n);
	struct spot_args a;
	size_t moves_at;
	TRY(begin_list(b, kv, l, count * sizeof(struct place_pair), &a));
	struct place_pair *to = put<struct place_pair>(b, count, &moves_at);
	for (size_t i = 0; i < count; i++)
		to[i] = {place_of(moves[i].to), place_of(moves[i].from), 0};
	TRY(upload_send(b));
	GPU_LAUNCH(move_places, dim3(static_cast<unsigned>(2 * l->n_layer * l->n_head_kv)), dim3(SPOT_THREADS), 0,
		   b->stream, a, uploaded<struct place_pair>(b, moves_at), static_cast<int>(n));
	return check(b, cudaGetLastError(), "moving keys and values");
}

} // namespace GPU_NS
