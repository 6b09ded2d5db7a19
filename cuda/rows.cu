/*
 * Operations on rows: norms, rotation, storing keys and values, gates, and the copies between forms of activations.
 * A row is the work of one block or warp, in an order that depends on its length alone.
 */
#include "cuda/block.cuh"
#include "cuda/kv_narrow.cuh"
#include "cuda/packed.cuh"

namespace GPU_NS
{

enum { ROW_THREADS = 256, WIDE_THREADS = 512, LANES = 32, LIST_MAX = 512 };

/*
 * The row's part of struct halves; value(i) is element i, asked for once by the thread that has it, i = thread + k *
 * threads, and `largest` the largest magnitude among a thread's own.
 */
template <int threads, typename Value>
__device__ __forceinline__ void write_halves(int dim, float largest, const struct halves &h, int row,
					     shared_span<float> scratch, const Value &value)
{
	largest = block_max<threads>(largest, scratch);
	/* Of the largest element's exponent; infinities and NaN go through as they are. */
	int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 255) - 127 - 4;
	exponent = largest == 0.0f ? 0 : max(-120, min(exponent, 120));
	const float down = __int_as_float((127 - exponent) << 23);
	__half *to = h.x + static_cast<size_t>(row) * h.stride;
	const int end = (dim + 255) / 256 * 256;
	for (int i = threadIdx.x; i < end; i += threads)
		to[i] = __float2half_rn(i < dim ? value(i) * down : 0.0f);
	if (threadIdx.x == 0)
		h.scale[row] = __int_as_float((127 + exponent) << 23);
}

__global__ void __launch_bounds__(ROW_THREADS) convert_rows(const float *x, int dim, struct halves h)
{
	GPU_SHARED(float, scratch, ROW_THREADS / 32);
	const int row = blockIdx.x;
	float largest = 0;
	x += static_cast<size_t>(row) * dim;
	for (int i = threadIdx.x; i < dim; i += ROW_THREADS)
		largest = fmaxf(largest, fabsf(x[i]));
	write_halves<ROW_THREADS>(dim, largest, h, row, scratch, [&](int i) { return x[i]; });
}

cudaError_t to_halves(const float *x, int n_rows, int dim, const struct halves &h, cudaStream_t stream)
{
	GPU_LAUNCH(convert_rows, dim3(static_cast<unsigned>(n_rows)), dim3(ROW_THREADS), 0, stream, x, dim, h);
	return cudaGetLastError();
}

/* ---- Norm ---- */

/* out may be x: a thread reads and writes its own elements alone, and writes them last. */
__global__ void __launch_bounds__(WIDE_THREADS)
	norm_rows(const float *x, int dim, const float *gain, float eps, float *out, struct halves h)
{
	GPU_SHARED(float, scratch, WIDE_THREADS / 32);
	const int row = blockIdx.x;
	float sum = 0, largest = 0;
	x += static_cast<size_t>(row) * dim;
	out += static_cast<size_t>(row) * dim;
	for (int i = threadIdx.x; i < dim; i += WIDE_THREADS)
		sum += x[i] * x[i];
	sum = block_sum<WIDE_THREADS>(sum, scratch);
	const float scale = 1.0f / sqrtf(sum / dim + eps);
	for (int i = threadIdx.x; i < dim; i += WIDE_THREADS)
		largest = fmaxf(largest, fabsf(x[i] * scale * gain[i]));
	write_halves<WIDE_THREADS>(dim, largest, h, row, scratch, [&](int i) {
		const float y = x[i] * scale * gain[i];
		out[i] = y;
		return y;
	});
}

/* Short rows, heads: a warp each. */
__global__ void __launch_bounds__(ROW_THREADS)
	norm_short_rows(const float *x, long long n, int dim, const float *gain, float eps, float *out)
{
	const long long row = static_cast<long long>(blockIdx.x) * (ROW_THREADS / 32) + threadIdx.x / 32;
	const int lane = threadIdx.x % 32;
	if (row >= n)
		return;
	float sum = 0;
	x += row * dim;
	out += row * dim;
	for (int i = lane; i < dim; i += LANES)
		sum += x[i] * x[i];
	for (int apart = 16; apart; apart /= 2)
		sum += __shfl_xor_sync(ALL, sum, apart);
	const float scale = 1.0f / sqrtf(sum / dim + eps);
	for (int i = lane; i < dim; i += LANES)
		out[i] = x[i] * scale * gain[i];
}

cudaError_t rms_norm(const float *x, int64_t n, int dim, const float *gain, float eps, float *out,
		     const struct halves &h, cudaStream_t stream)
{
	if (h.x)
		GPU_LAUNCH(norm_rows, dim3(static_cast<unsigned>(n)), dim3(WIDE_THREADS), 0, stream, x, dim, gain, eps,
			   out, h);
	else
		GPU_LAUNCH(norm_short_rows,
			   dim3(static_cast<unsigned>((n + ROW_THREADS / 32 - 1) / (ROW_THREADS / 32))),
			   dim3(ROW_THREADS), 0, stream, x, static_cast<long long>(n), dim, gain, eps, out);
	return cudaGetLastError();
}

__global__ void __launch_bounds__(WIDE_THREADS)
	add_norm_rows(const float *x, int dim, const float *gain, float eps, float *out)
{
	GPU_SHARED(float, scratch, WIDE_THREADS / 32);
	float sum = 0;
	x += static_cast<size_t>(blockIdx.x) * dim;
	out += static_cast<size_t>(blockIdx.x) * dim;
	for (int i = threadIdx.x; i < dim; i += WIDE_THREADS)
		sum += x[i] * x[i];
	sum = block_sum<WIDE_THREADS>(sum, scratch);
	const float scale = 1.0f / sqrtf(sum / dim + eps);
	for (int i = threadIdx.x; i < dim; i += WIDE_THREADS)
		out[i] += x[i] * scale * gain[i];
}

cudaError_t rms_norm_add(const float *x, int n, int dim, const float *gain, float eps, float *out, cudaStream_t stream)
{
	GPU_LAUNCH(add_norm_rows, dim3(static_cast<unsigned>(n)), dim3(WIDE_THREADS), 0, stream, x, dim, gain, eps,
	           out);
	return cudaGetLastError();
}

/* ---- Gate ---- */

/* GELU: x / 2 * (1 + tanh(y)) = x / (1 + exp(-2 y)), y = sqrt(2 / pi) * (x + 0.044715 x^3). */
template <enum glu f> __device__ __forceinline__ float gated(float gate, float up)
{
	const float y = f == GLU_GELU ? 1.5957691f * (gate + 0.044715f * gate * gate * gate) : gate;
	return gate / (1.0f + expf(-y)) * up;
}

template <enum glu f>
__global__ void __launch_bounds__(WIDE_THREADS) glu_rows(float *gate, const float *up, int dim, struct halves h)
{
	GPU_SHARED(float, scratch, WIDE_THREADS / 32);
	const int row = blockIdx.x;
	float largest = 0;
	gate += static_cast<size_t>(row) * dim;
	up += static_cast<size_t>(row) * dim;
	if (!h.x) {
		for (int i = threadIdx.x; i < dim; i += WIDE_THREADS)
			gate[i] = gated<f>(gate[i], up[i]);
		return;
	}
	for (int i = threadIdx.x; i < dim; i += WIDE_THREADS)
		largest = fmaxf(largest, fabsf(gated<f>(gate[i], up[i])));
	write_halves<WIDE_THREADS>(dim, largest, h, row, scratch, [&](int i) {
		const float y = gated<f>(gate[i], up[i]);
		gate[i] = y;
		return y;
	});
}

cudaError_t gate_rows(enum glu f, float *gate, const float *up, int n_rows, int dim, const struct halves &h,
		      cudaStream_t stream)
{
	const dim3 grid(static_cast<unsigned>(n_rows));
	if (f == GLU_GELU)
		GPU_LAUNCH((glu_rows<GLU_GELU>), grid, dim3(WIDE_THREADS), 0, stream, gate, up, dim, h);
	else
		GPU_LAUNCH((glu_rows<GLU_SILU>), grid, dim3(WIDE_THREADS), 0, stream, gate, up, dim, h);
	return cudaGetLastError();
}

/* ---- Logits ---- */

__global__ void __launch_bounds__(ROW_THREADS) cap_softly(float *x, long long n, float cap)
{
	const long long i = static_cast<long long>(blockIdx.x) * ROW_THREADS + threadIdx.x;
	if (i < n)
		x[i] = cap * tanhf(x[i] / cap);
}

cudaError_t softcap(float *x, int64_t n, float cap, cudaStream_t stream)
{
	GPU_LAUNCH(cap_softly, dim3(static_cast<unsigned>((n + ROW_THREADS - 1) / ROW_THREADS)), dim3(ROW_THREADS), 0,
		   stream, x, static_cast<long long>(n), cap);
	return cudaGetLastError();
}

/* ---- Rotation, keys and values ---- */

/* Frequencies travel with the launch: they are the host's. */
struct rope_frequencies {
	float inv_freq[ROPE_MAX_PAIRS];
};

/*
 * Cosine and sine of `turns` whole turns. The library's take local memory to reduce large angles, which is plain here:
 * what is left of a quarter turn goes into the Taylor series.
 */
__device__ __forceinline__ void turn(double turns, double *c, double *s)
{
	const double quarter = rint(turns * 4.0), r = (turns * 4.0 - quarter) * 1.5707963267948966, z = r * r;
	const int n = static_cast<int>(static_cast<long long>(quarter) & 3);
	double sine = 1.0, cosine = 1.0;
#pragma unroll
	for (int k = 15; k >= 3; k -= 2) {
		sine = 1.0 - z / (k * (k - 1)) * sine;
		cosine = 1.0 - z / ((k - 1) * (k - 2)) * cosine;
	}
	sine *= r;
	*c = n == 0 ? cosine : n == 1 ? -sine : n == 2 ? -cosine : sine;
	*s = n == 0 ? sine : n == 1 ? cosine : n == 2 ? -sine : -cosine;
}

/*
 * further: a row has angles for keys of the chunk before its own, then for those of others. In double, as the CPU does: a float has no bits
 * left for the angle of a late position.
 */
template <bool further>
__global__ void make_rope_table(struct rope_frequencies f, float magnitude, int pairs, struct rope_chunks chunks,
				const int32_t *position, int n_rows, float2 *table)
{
	enum { KINDS = further ? ROPE_CHUNKS_FAR : 1 };
	const int i = blockIdx.x * ROW_THREADS + threadIdx.x, row = i / pairs / KINDS;
	if (row >= n_rows)
		return;
	int by = chunks.size > 0 ? position[row] % chunks.size : position[row];
	if (further) { /* see rope_chunk_turn(), which is the host's */
		by = chunks.reach - 1 - by;
		by = i / pairs % KINDS == 0 ? min(by, chunks.size) : by;
	}
	const double angle = static_cast<double>(by) * static_cast<double>(f.inv_freq[i % pairs]);
	double c, s;
	turn(angle * 0.15915494309189535, &c, &s);
	table[i] = {static_cast<float>(c * magnitude), static_cast<float>(s * magnitude)};
}

template <bool further>
static cudaError_t make_table(const struct rope_table_args &a, float magnitude, float2 *table, cudaStream_t stream)
{
	struct rope_frequencies f = {};
	const int n = a.n_rows * a.pairs * (further ? ROPE_CHUNKS_FAR : 1);
	memcpy(f.inv_freq, a.inv_freq, static_cast<size_t>(a.pairs) * sizeof *a.inv_freq);
	GPU_LAUNCH(make_rope_table<further>, dim3(static_cast<unsigned>((n + ROW_THREADS - 1) / ROW_THREADS)),
		   dim3(ROW_THREADS), 0, stream, f, magnitude, a.pairs, a.chunks, a.position, a.n_rows, table);
	return cudaGetLastError();
}

cudaError_t rope_table(const struct rope_table_args &a, float2 *table, cudaStream_t stream)
{
	return make_table<false>(a, a.magnitude, table, stream);
}

cudaError_t chunk_table(const struct rope_table_args &a, float2 *table, cudaStream_t stream)
{
	return make_table<true>(a, 1.0f, table, stream);
}

enum { HEAD_THREADS = 64 };

/* Two elements as a plain page, or a wide copy, has them. */
template <enum kv_form form> __device__ __forceinline__ uint32_t element_pair(float low, float high)
{
	return form == PAGES_BF16 ? bf16_bits(low) | bf16_bits(high) << 16
				  : as_u32(__floats2half2_rn(held(low), held(high)));
}

/* A key and a value of a head, which a block has, in 16 bits: keys, values: the head's in the page. */
template <enum kv_form form>
__device__ __forceinline__ void store_elements(const float *k, const float *v, int head_dim, int token, uint8_t *keys,
					       uint8_t *values)
{
	for (int i = threadIdx.x; i < head_dim / 8; i += HEAD_THREADS) {
		const float *x = k + 8 * i;
		stg<uint4>(keys + key_offset(head_dim, token, 8 * i),
			   {element_pair<form>(x[0], x[1]), element_pair<form>(x[2], x[3]),
			    element_pair<form>(x[4], x[5]), element_pair<form>(x[6], x[7])});
	}
	for (int d = threadIdx.x; d < head_dim; d += HEAD_THREADS)
		stg<uint16_t>(values + value_offset(head_dim, token, d),
			      static_cast<uint16_t>(element_pair<form>(v[d], 0.0f)));
}

/* The same as codes, in the head's block. */
template <enum kv_form form>
__device__ __forceinline__ void store_codes(const float *k, const float *v, int head_dim, int token, uint8_t *block,
					    uint32_t *n_lost, shared_span<float> scratch)
{
	float largest[2] = {0, 0};
	for (int d = threadIdx.x; d < head_dim; d += HEAD_THREADS) {
		largest[0] = fmaxf(largest[0], magnitude(k[d]));
		largest[1] = fmaxf(largest[1], magnitude(v[d]));
	}
	const struct narrow_scale ks = narrow_scale_of<form>(block_max<HEAD_THREADS>(largest[0], scratch));
	const struct narrow_scale vs = narrow_scale_of<form>(block_max<HEAD_THREADS>(largest[1], scratch));
	/* Times zero, what is no number would stay none. */
	const auto code = [](float x, const struct narrow_scale &s) {
		return code_of<form>(s.scale == s.scale ? __fmul_rn(held(x), s.inverse) : 0.0f);
	};
	uint8_t *keys = block + codes_offset(head_dim, 0), *values = block + codes_offset(head_dim, 1);
	for (int i = threadIdx.x; i < head_dim / 8; i += HEAD_THREADS) {
		uint32_t four[2] = {0, 0};
		for (int j = 0; j < 8; j++)
			four[j / 4] |= code(k[8 * i + j], ks) << j % 4 * 8;
		stg<uint2>(keys + key_code_offset(head_dim, token, 8 * i),
			   {four[0] ^ page_code_flip<form>, four[1] ^ page_code_flip<form>});
	}
	for (int d = threadIdx.x; d < head_dim; d += HEAD_THREADS)
		stg<uint8_t>(values + value_code_offset(head_dim, token, d),
			     static_cast<uint8_t>(code(v[d], vs) ^ page_code_flip<form>));
	if (threadIdx.x > 0)
		return;
	stg<float>(block + scale_offset(0, token), ks.scale);
	stg<float>(block + scale_offset(1, token), vs.scale);
	const uint32_t n = (ks.scale != ks.scale) + (vs.scale != vs.scale);
	if (n > 0 && n_lost)
		atomicAdd(n_lost, n);
}

/* Tells of a row's key or value, a vector that a block has, when halves cannot hold it. */
__device__ __forceinline__ void look_at(const float *x, int head_dim, int row, struct odd_values *odd)
{
	bool beyond = false, no_number = false;
	for (int d = threadIdx.x; d < head_dim; d += HEAD_THREADS) {
		const float a = fabsf(x[d]);
		beyond = beyond || !(a <= KV_HALF_MAX);
		no_number = no_number || !(a <= 3.402823466e38f);
	}
	if (!__syncthreads_or(beyond))
		return;
	const bool any = __syncthreads_or(no_number);
	if (threadIdx.x > 0)
		return;
	atomicOr(&odd->rows[row], any ? ODD_NO_NUMBER : ODD_BEYOND);
	if (!any)
		atomicAdd(&odd->n_clamped, 1u);
}

/* A block is a head of a row: query heads first, then KV heads. */
template <enum kv_form form>
__global__ void __launch_bounds__(HEAD_THREADS)
	rotate_and_store(struct rope_args r, struct kv_args kv, struct step_rows rows)
{
	const int row = blockIdx.x, n_query = r.q ? r.n_head : 0;
	const bool is_key = static_cast<int>(blockIdx.y) >= n_query;
	const int head = is_key ? blockIdx.y - n_query : blockIdx.y;
	const int head_dim = r.head_dim;
	float *x = is_key ? r.k + (static_cast<size_t>(row) * r.n_head_kv + head) * head_dim
			  : r.q + (static_cast<size_t>(row) * r.n_head + head) * head_dim;
	const int between = r.interleaved ? 1 : r.pairs, step = r.interleaved ? 2 : 1;
	for (int i = threadIdx.x; i < r.pairs; i += HEAD_THREADS) {
		const float2 turn = r.table[static_cast<size_t>(row) * r.pairs + i];
		const float x0 = x[i * step], x1 = x[i * step + between];
		x[i * step] = x0 * turn.x - x1 * turn.y;
		x[i * step + between] = x0 * turn.y + x1 * turn.x;
	}
	if (!is_key || !kv.kv)
		return;
	__syncthreads();
	const int place = rows.place[row], token = place % PAGE_TOKENS;
	const int entry = rows.seq_table[rows.row_seq[row]] + place / PAGE_TOKENS;
	const struct kv_place &at = kv.place;
	const float *v = kv.v + (static_cast<size_t>(row) * r.n_head_kv + head) * head_dim;
	uint8_t *layer = kv.kv + static_cast<size_t>(rows.table[entry]) * at.page_stride + at.layer_offset;
	if (kv.odd) {
		look_at(x, head_dim, row, kv.odd);
		look_at(v, head_dim, row, kv.odd);
	}
	if constexpr (!is_plain(form)) {
		GPU_SHARED(float, scratch, HEAD_THREADS / 32);
		const int32_t slot = rows.slots ? rows.slots[entry] : -1;
		store_codes<form>(x, v, head_dim, token, layer + head * narrow_bytes(head_dim),
				  slot < 0 && kv.odd ? &kv.odd->n_lost : NULL, scratch);
		if (slot < 0)
			return;
		layer = kv.kv + at.wide_offset + static_cast<size_t>(slot) * at.wide_stride + at.wide_layer_offset;
	}
	store_elements<form>(x, v, head_dim, token, layer + head_offset(r.n_head_kv, head_dim, 0, head),
			     layer + head_offset(r.n_head_kv, head_dim, 1, head));
}

cudaError_t rope_and_store(const struct rope_args &r, const struct kv_args &kv, const struct step_rows &rows,
			   cudaStream_t stream)
{
	const unsigned heads = static_cast<unsigned>((r.q ? r.n_head : 0) + (r.k ? r.n_head_kv : 0));
	const dim3 grid(static_cast<unsigned>(rows.n_rows), heads), block(HEAD_THREADS);
	if (kv.place.form == KV_FORM_INT8)
		GPU_LAUNCH((rotate_and_store<KV_FORM_INT8>), grid, block, 0, stream, r, kv, rows);
	else if (kv.place.form == KV_FORM_FP8_E4M3)
		GPU_LAUNCH((rotate_and_store<KV_FORM_FP8_E4M3>), grid, block, 0, stream, r, kv, rows);
	else if (kv.place.form == PAGES_BF16)
		GPU_LAUNCH((rotate_and_store<PAGES_BF16>), grid, block, 0, stream, r, kv, rows);
	else
		GPU_LAUNCH((rotate_and_store<KV_FORM_F16>), grid, block, 0, stream, r, kv, rows);
	return cudaGetLastError();
}

/* A block is a query head of a row. */
__global__ void __launch_bounds__(HEAD_THREADS) turn_rows(struct chunk_args a)
{
	const int row = blockIdx.x, head = blockIdx.y, position = a.position[row];
	const float *x = a.q + (static_cast<size_t>(row) * a.n_head + head) * a.head_dim;
	const int between = a.interleaved ? 1 : a.pairs, step = a.interleaved ? 2 : 1;
	for (int keys = ROPE_CHUNK_OWN; keys < CHUNK_KINDS && position / a.size >= keys; keys++) {
		const float2 *turns =
			a.table + (static_cast<size_t>(row) * ROPE_CHUNKS_FAR + max(keys - 1, 0)) * a.pairs;
		const int pairs = keys == ROPE_CHUNK_OWN ? 0 : a.pairs;
		__half *to =
			a.out + ((static_cast<size_t>(row) * CHUNK_KINDS + keys) * a.n_head + head) * a.head_dim;
		for (int i = threadIdx.x; i < pairs; i += HEAD_THREADS) {
			const float2 turn = turns[i];
			const float x0 = x[i * step], x1 = x[i * step + between];
			to[i * step] = __float2half_rn((x0 * turn.x - x1 * turn.y) * a.scale);
			to[i * step + between] = __float2half_rn((x0 * turn.y + x1 * turn.x) * a.scale);
		}
		for (int d = 2 * pairs + threadIdx.x; d < a.head_dim; d += HEAD_THREADS)
			to[d] = __float2half_rn(x[d] * a.scale);
	}
}

cudaError_t turn_queries(const struct chunk_args &a, cudaStream_t stream)
{
	GPU_LAUNCH(turn_rows, dim3(static_cast<unsigned>(a.n_rows), static_cast<unsigned>(a.n_head)),
		   dim3(HEAD_THREADS), 0, stream, a);
	return cudaGetLastError();
}

/* ---- Rows, listed by the host: the list travels with the launch ---- */

struct row_list {
	int32_t row[LIST_MAX];
};

__global__ void __launch_bounds__(ROW_THREADS) gather(const float *x, int dim, struct row_list list, float *out)
{
	const float *from = x + static_cast<size_t>(list.row[blockIdx.x]) * dim;
	float *to = out + static_cast<size_t>(blockIdx.x) * dim;
	for (int i = threadIdx.x; i < dim; i += ROW_THREADS)
		to[i] = from[i];
}

cudaError_t gather_rows(const float *x, int dim, const int32_t *rows, int n, float *out, cudaStream_t stream)
{
	for (int first = 0; first < n; first += LIST_MAX) {
		struct row_list list = {};
		const int some = n - first < LIST_MAX ? n - first : static_cast<int>(LIST_MAX);
		memcpy(list.row, rows + first, static_cast<size_t>(some) * sizeof *rows);
		GPU_LAUNCH(gather, dim3(static_cast<unsigned>(some)), dim3(ROW_THREADS), 0, stream, x, dim, list,
			   out + static_cast<size_t>(first) * dim);
		const cudaError_t e = cudaGetLastError();
		if (e != cudaSuccess)
			return e;
	}
	return cudaSuccess;
}

} // namespace GPU_NS
