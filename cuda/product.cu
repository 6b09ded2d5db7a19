/*
 * Products of activations with packed weights, on the tensor cores, for any number of rows.
 *
 * What a row gets does not depend on how many rows there are: both kernels below sum an output in the same order. The
 * inputs are cut into eight segments of whole units; a segment's sum runs through the tensor core from its first step
 * to its last, and the segments' sums are added from the first to the last. A tensor core computes an element of a tile
 * by the same arithmetic wherever in the tile it stands.
 *
 *   few_rows:  a block has one tile of 16 outputs, its eight warps a segment each. Weights go from memory to the tensor
 * core through registers and are read once for up to 32 rows. many_rows: a block has 128 outputs and up to 128 rows;
 * its warps go through all inputs, dequantising weights in registers; activations come through shared memory, three
 * steps ahead.
 *
 * Weights are the left operand (16 outputs), activations the right one (8 rows).
 *
 * Why activations are halves, and not bytes for dp4a. A row alone would be cheaper: some 0.8 instructions for each
 * weight of Q4_K instead of two. But as a row's result may not depend on how many there are, prompts would then take
 * bytes, too, and every 32 inputs have a scale of their own there: on sm_80, sm_90 and sm_100 to apply it takes the
 * time in which the tensor cores do twice the work in halves. With halves, a decode step of Q4_K takes about half as
 * long to issue on an H200 as its weights take to arrive; Q2_K and Q3_K come near to equal. All this is counted, not
 * measured.
 */
#include "cuda/kernels.cuh"
#include "cuda/packed.cuh"

namespace GPU_NS
{

enum { SEGMENTS = 8, FEW_ROWS_LIMIT = 64 };

__device__ __forceinline__ int segment_begin(int segment, int n_units)
{
	return static_cast<int>(static_cast<long long>(n_units) * segment / SEGMENTS);
}

__device__ __forceinline__ struct product product_of(const struct products &ps, int block)
{
	int i = 0;
	while (i + 1 < ps.n && block >= ps.p[i + 1].first_block)
		i++;
	return ps.p[i];
}

/* total: all segments of an output, still to be scaled. */
__device__ __forceinline__ void finish(const struct product &p, float total, int row, int out, float scale)
{
	float *y = p.y + static_cast<size_t>(row) * p.n_out + out;
	float v = total * scale;
	if (p.bias)
		v += p.bias[out];
	if (p.accumulate)
		v += *y;
	*y = v;
}

/* ---- Few rows ---- */

template <enum quant_type type, int n8> /* n8: how many times eight rows */
__global__ void __launch_bounds__(32 * SEGMENTS, n8 > (packed_of<type>::low_bits == 8 ? 1 : 2) ? 1 : 2)
	few_rows(struct products ps, int n_units, const __half *x, const float *scale, int stride, int n_rows)
{
	using form = packed_of<type>;
	GPU_SHARED(float, partial, SEGMENTS *n8 * 128);
	const struct product p = product_of(ps, blockIdx.x);
	const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const int tile = blockIdx.x - p.first_block, first_row = blockIdx.y * 8 * n8;
	const uint8_t *units = p.packed + static_cast<size_t>(tile) * n_units * form::unit_bytes;
	const int end = segment_begin(warp + 1, n_units);
	float sum[n8][4] = {};

	/* A lane's activations of a step, 16 of each of its rows. */
	const auto load_rows = [&](uint32_t(&b)[n8][8], int step) {
#pragma unroll
		for (int n = 0; n < n8; n++) {
			const int row = first_row + 8 * n + g;
			uint4 v0 = {0, 0, 0, 0}, v1 = {0, 0, 0, 0};
			if (row < n_rows) {
				const __half *from =
					x + static_cast<size_t>(row) * stride + step * STEP_INPUTS + 16 * t;
				v0 = ldg<uint4>(from);
				v1 = ldg<uint4>(from + 8);
			}
			b[n][0] = v0.x, b[n][1] = v0.y, b[n][2] = v0.z, b[n][3] = v0.w;
			b[n][4] = v1.x, b[n][5] = v1.y, b[n][6] = v1.z, b[n][7] = v1.w;
		}
	};
	/*
	 * The next unit's weights are on their way while one is computed; and so is a whole unit of activations, if
	 * they are few.
	 */
	constexpr bool rows_ahead = n8 == 1;
	typename form::low low[form::steps], next_low[form::steps];
	typename form::meta meta, next_meta;
	uint32_t b[rows_ahead ? form::steps : 1][n8][8];
	const auto load_unit = [&](int unit) {
		const uint8_t *u = units + static_cast<size_t>(unit) * form::unit_bytes;
#pragma unroll
		for (int step = 0; step < form::steps; step++)
			next_low[step] = form::load_low(u, step, lane);
		next_meta = form::load_meta(u, lane);
	};
	const int begin = segment_begin(warp, n_units);
	if (begin < end)
		load_unit(begin);
	for (int unit = begin; unit < end; unit++) {
#pragma unroll
		for (int step = 0; step < form::steps; step++)
			low[step] = next_low[step];
		meta = next_meta;
		if (rows_ahead) {
#pragma unroll
			for (int step = 0; step < form::steps; step++)
				load_rows(b[rows_ahead ? step : 0], unit * form::steps + step);
		}
		if (unit + 1 < end)
			load_unit(unit + 1);
#pragma unroll
		for (int step = 0; step < form::steps; step++) {
			if (!rows_ahead)
				load_rows(b[0], unit * form::steps + step);
			const step_scale s = form::scale(meta, step);
#pragma unroll
			for (int j = 0; j < STEP_PRODUCTS; j++)
#pragma unroll
				for (int plane = 0; plane < form::planes; plane++) {
					uint32_t a[4];
					form::fragment(low[step], meta, s, step, j, plane, a);
#pragma unroll
					for (int n = 0; n < n8; n++) {
						const auto &rows = b[rows_ahead ? step : 0][n];
						const uint32_t bj[2] = {rows[2 * j], rows[2 * j + 1]};
						mma_f16(sum[n], a, bj);
					}
				}
		}
	}
#pragma unroll
	for (int n = 0; n < n8; n++)
#pragma unroll
		for (int c = 0; c < 4; c++)
			partial[(warp * n8 + n) * 128 + c * 32 + lane] = sum[n][c];
	__syncthreads();

	for (int i = threadIdx.x; i < n8 * 128; i += 32 * SEGMENTS) {
		/* Neighbouring threads take neighbouring outputs. */
		const int n = i / 128, column = i / 16 % 8, o = i % 16;
		const int c = o / 8 * 2 + column % 2, from = o % 8 * 4 + column / 2;
		const int row = first_row + 8 * n + column, out = tile * TILE_OUTPUTS + o;
		if (row >= n_rows || out >= p.n_out)
			continue;
		float total = 0;
		for (int w = 0; w < SEGMENTS; w++)
			total += partial[(w * n8 + n) * 128 + c * 32 + from];
		finish(p, total, row, out, scale[row]);
	}
}

/* ---- Many rows ---- */

enum { BLOCK_TILES = 8, BLOCK_OUTPUTS = BLOCK_TILES * TILE_OUTPUTS, MANY_THREADS = 256, STAGES = 3 };

/* Four warps along the outputs, 32 each; two along the rows, 8 * n8 each. A stage is [rows][64] halves. */
template <enum quant_type type, int n8>
__global__ void __launch_bounds__(MANY_THREADS, 1)
	many_rows(struct products ps, int n_units, const __half *x, const float *scale, int stride, int n_rows)
{
	using form = packed_of<type>;
	constexpr int block_rows = 16 * n8, stage_halves = block_rows * STEP_INPUTS;
	GPU_DYNAMIC_SHARED(__half, stages);
	const struct product p = product_of(ps, blockIdx.x);
	const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const int first_tile = (blockIdx.x - p.first_block) * BLOCK_TILES + warp % 4 * 2;
	const int last_tile = (p.n_out - 1) / TILE_OUTPUTS;
	const int first_row = blockIdx.y * block_rows, warp_row = warp / 4 * 8 * n8;
	const int n_steps = n_units * form::steps;
	/* What lies beyond the last output is computed again and not stored. */
	const uint8_t *const units =
		p.packed + static_cast<size_t>(min(first_tile, last_tile)) * n_units * form::unit_bytes;
	const unsigned apart = first_tile < last_tile ? static_cast<unsigned>(n_units) * form::unit_bytes : 0;

	float sum[2][n8][4] = {}, total[2][n8][4] = {};

	/*
	 * A row's 16-byte chunks trade places with their neighbours in odd rows, so that eight lanes never meet in a
	 * bank.
	 */
	const auto copy_stage = [&](int step) {
		if (step < n_steps)
			for (int i = threadIdx.x; i < block_rows * 8; i += MANY_THREADS) {
				const int r = i / 8, chunk = i % 8;
				const bool inside = first_row + r < n_rows;
				cp_async<16>(stages + (step % STAGES * stage_halves + r * STEP_INPUTS +
						       (chunk ^ (r & 1)) * 8),
					     x + (inside ? static_cast<size_t>(first_row + r) * stride +
								   step * STEP_INPUTS + chunk * 8
							 : 0),
					     inside);
			}
		cp_async_commit();
	};
	for (int step = 0; step < STAGES - 1; step++)
		copy_stage(step);

	/*
	 * The weights of the next step are on their way while a step is computed: beside it, or, where they are so wide
	 * that registers would run out, in the place of what has just been used.
	 */
	constexpr bool wide = form::low_bits >= 16;
	typename form::low low[2], next[2];
	int segment = 0;
#pragma unroll
	for (int m = 0; m < 2; m++)
		(wide ? low[m] : next[m]) = form::load_low(units + m * apart, 0, lane);
	for (int unit = 0; unit < n_units; unit++) {
		while (segment + 1 < SEGMENTS && unit >= segment_begin(segment + 1, n_units)) {
#pragma unroll
			for (int m = 0; m < 2; m++)
#pragma unroll
				for (int n = 0; n < n8; n++)
#pragma unroll
					for (int c = 0; c < 4; c++) {
						total[m][n][c] += sum[m][n][c];
						sum[m][n][c] = 0;
					}
			segment++;
		}
		typename form::meta meta[2];
#pragma unroll
		for (int m = 0; m < 2; m++)
			meta[m] = form::load_meta(units + (m * apart + static_cast<unsigned>(unit) * form::unit_bytes),
						  lane);
#pragma unroll(wide ? 1 : form::steps) /* constant steps keep meta in registers */
		for (int step = 0; step < form::steps; step++) {
			const int at = unit * form::steps + step;
			cp_async_wait<STAGES - 2>();
			__syncthreads();
			copy_stage(at + STAGES - 1);
#pragma unroll
			for (int m = 0; m < 2; m++)
				if constexpr (!wide)
					low[m] = next[m];
			const int following = at + 1 < n_steps ? at + 1 : at;
			const unsigned following_at = static_cast<unsigned>(following / form::steps) * form::unit_bytes;
#pragma unroll
			for (int m = 0; m < 2; m++)
				if constexpr (!wide)
					next[m] = form::load_low(units + (m * apart + following_at),
								 following % form::steps, lane);
			const auto stage = stages + at % STAGES * stage_halves;
			step_scale s[2];
#pragma unroll
			for (int m = 0; m < 2; m++)
				s[m] = form::scale(meta[m], step);
#pragma unroll
			for (int half = 0; half < 2; half++) { /* two products from each 16 bytes of a row */
				uint32_t a[2][2][form::planes][4];
#pragma unroll
				for (int m = 0; m < 2; m++)
#pragma unroll
					for (int j = 0; j < 2; j++)
#pragma unroll
						for (int plane = 0; plane < form::planes; plane++)
							form::fragment(low[m], meta[m], s[m], step, 2 * half + j, plane,
								       a[m][j][plane]);
#pragma unroll
				for (int n = 0; n < n8; n++) {
					const int r = warp_row + 8 * n + g;
					const uint4 v = ld_shared<uint4>(
						stage + (r * STEP_INPUTS + ((2 * t + half) ^ (r & 1)) * 8));
					const uint32_t b[2][2] = {{v.x, v.y}, {v.z, v.w}};
#pragma unroll
					for (int j = 0; j < 2; j++)
#pragma unroll
						for (int plane = 0; plane < form::planes; plane++)
#pragma unroll
							for (int m = 0; m < 2; m++)
								mma_f16(sum[m][n], a[m][j][plane], b[j]);
				}
				if constexpr (wide)
#pragma unroll
					for (int m = 0; m < 2; m++)
						form::load_half(low[m], units + (m * apart + following_at),
								following % form::steps, half, lane);
			}
		}
	}
	cp_async_wait<0>();
#pragma unroll
	for (int m = 0; m < 2; m++)
#pragma unroll
		for (int n = 0; n < n8; n++)
#pragma unroll
			for (int c = 0; c < 4; c++) {
				const int out = (first_tile + m) * TILE_OUTPUTS + g + c / 2 * 8;
				const int row = first_row + warp_row + 8 * n + 2 * t + c % 2;
				if (row < n_rows && out < p.n_out)
					finish(p, total[m][n][c] + sum[m][n][c], row, out, scale[row]);
			}
}

/* ---- Launch ---- */

struct product_launch {
	struct products *ps;
	int n_units;
	const struct halves *x;
	int n_rows;
	cudaStream_t stream;

	/* Gives each product its blocks, block_tiles tiles each; returns how many there are. */
	unsigned share_blocks(int block_tiles) const
	{
		int n = 0;
		for (int i = 0; i < ps->n; i++) {
			ps->p[i].first_block = n;
			n += (ps->p[i].n_out + TILE_OUTPUTS * block_tiles - 1) / (TILE_OUTPUTS * block_tiles);
		}
		return static_cast<unsigned>(n);
	}

	template <enum quant_type type, int n8> cudaError_t few() const
	{
		const dim3 grid(share_blocks(1), static_cast<unsigned>((n_rows + 8 * n8 - 1) / (8 * n8)));
		GPU_LAUNCH((few_rows<type, n8>), grid, dim3(32 * SEGMENTS), 0, stream, *ps, n_units, x->x, x->scale,
			   x->stride, n_rows);
		return cudaGetLastError();
	}

	template <enum quant_type type, int n8> cudaError_t many() const
	{
		const dim3 grid(share_blocks(BLOCK_TILES), static_cast<unsigned>((n_rows + 16 * n8 - 1) / (16 * n8)));
		const size_t shared = static_cast<size_t>(STAGES) * 16 * n8 * STEP_INPUTS * sizeof(__half);
		GPU_LAUNCH((many_rows<type, n8>), grid, dim3(MANY_THREADS), shared, stream, *ps, n_units, x->x,
			   x->scale, x->stride, n_rows);
		return cudaGetLastError();
	}

	template <enum quant_type type> cudaError_t run() const
	{
		if constexpr (type == QUANT_BF16) /* packed alike */
			return run<QUANT_F16>();
		else if (n_rows <= 8)
			return few<type, 1>();
		else if (n_rows <= 16)
			return few<type, 2>();
		else if (n_rows <= FEW_ROWS_LIMIT)
			return few<type, 4>();
		else
			return many < type, packed_of<type>::planes == 2 ? 4 : 8 > ();
	}
};

cudaError_t product(enum quant_type type, struct products &ps, int n_units, const struct halves &x, int n_rows,
		    cudaStream_t stream)
{
	return with_type(type, product_launch{&ps, n_units, &x, n_rows, stream});
}

} // namespace GPU_NS
