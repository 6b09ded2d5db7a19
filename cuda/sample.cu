/*
 * Choosing tokens where the logits are: engine/sample/sampler.c's chain (edits, top-k, temperature, top-p, min-p,
 * draw), a block of threads for each row. The same logits, parameters and draw give the same token: weights and the
 * draw are computed with the same float and double operations in the same order. Only the mass that top-p keeps is
 * added up otherwise, in integers of 2^-45, so that the order of threads does not matter; a nucleus whose mass is
 * within 2^-28 of top_p may come out one token larger or smaller.
 */
#include "cuda/block.cuh"
#include "cuda/kernels.cuh"

namespace GPU_NS
{

enum {
	THREADS = 512,
	WARPS = THREADS / 32,
	DIGITS = 2048,
	PER_THREAD = DIGITS / THREADS,
	SUM_BLOCK = 256,
	SUM_LANES = 8
};

typedef unsigned long long mass_sum;

struct sample_shared {
	shared_span<mass_sum> digit; /* [DIGITS]; the draw keeps its sums of blocks there */
	shared_span<mass_sum> scan;  /* [WARPS + 2] */
	shared_span<float> value;    /* [SUM_BLOCK] */
	shared_span<int> word;	     /* [4] */
};

/* ---- Reductions ---- */

/* The first index whose logit is `max`, or 0. */
__device__ __forceinline__ int first_equal(const float *x, int n, float max, const struct sample_shared &s)
{
	int first = INT32_MAX;
	for (int i = threadIdx.x; i < n && first == INT32_MAX; i += THREADS)
		if (x[i] == max)
			first = i;
	if (threadIdx.x == 0)
		s.word[0] = INT32_MAX;
	__syncthreads();
	if (first != INT32_MAX)
		atomicMin(s.word + 0, first);
	__syncthreads();
	first = s.word[0];
	return first == INT32_MAX ? 0 : first;
}

/* ---- Selection: select_best() of engine/sample/select.c ---- */

/* In the order of the floats; 0: never kept. */
__device__ __forceinline__ uint32_t key_of(float x)
{
	const float y = x + 0.0f;
	const uint32_t bits = __float_as_uint(y);
	return y > -INFINITY ? bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u) : 0;
}

/* What an element counts: itself, or its weight in units of 2^-45. */
__device__ __forceinline__ mass_sum mass_of(float w, bool by_mass)
{
	return by_mass ? static_cast<mass_sum>(w * 35184372088832.0f) : 1;
}

__device__ __forceinline__ bool eligible(float x, bool by_mass)
{
	return by_mass ? x > 0.0f : x > -INFINITY;
}

/*
 * The digit, from the highest down, in which `target` is reached when `above` lies above all digits; the lowest that
 * holds anything if none does. Returns it, adds to `above` what lies above it, and stores what it holds. share: target
 * is that part of all there is.
 */
__device__ __forceinline__ int find_digit(const struct sample_shared &s, double share, mass_sum *target,
					  mass_sum *above, mass_sum *holds)
{
	const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	mass_sum mine[PER_THREAD], sum = 0;
	for (int i = 0; i < PER_THREAD; i++) { /* this thread's digits, the highest first */
		mine[i] = s.digit[DIGITS - 1 - (static_cast<int>(threadIdx.x) * PER_THREAD + i)];
		sum += mine[i];
	}
	mass_sum before = sum;
	for (int apart = 1; apart < 32; apart *= 2) {
		const mass_sum other = __shfl_up_sync(ALL, before, apart);
		before += lane >= apart ? other : 0;
	}
	if (lane == 31)
		s.scan[warp] = before;
	if (threadIdx.x == 0) {
		s.word[0] = -1; /* reached in this many-th digit from above, */
		s.word[1] = -1; /* and the last that holds anything */
	}
	__syncthreads();
	mass_sum total = 0;
	before -= sum;
	for (int i = 0; i < WARPS; i++) {
		const mass_sum of_warp = s.scan[i];
		before += i < warp ? of_warp : 0;
		total += of_warp;
	}
	if (share >= 0)
		*target = static_cast<mass_sum>(share * static_cast<double>(total));
	if (*target < 1)
		*target = 1;
	mass_sum at = *above + before;
	for (int i = 0; i < PER_THREAD; i++) {
		if (mine[i] == 0)
			continue;
		const int place = static_cast<int>(threadIdx.x) * PER_THREAD + i;
		if (at < *target && at + mine[i] >= *target)
			atomicMax(s.word + 0, place);
		atomicMax(s.word + 1, place);
		at += mine[i];
	}
	__syncthreads();
	const int reached = s.word[0], last = s.word[1], place = reached >= 0 ? reached : last;
	/* Who has the place tells what lies before it. */
	at = *above + before;
	for (int i = 0; i < PER_THREAD; i++) {
		if (static_cast<int>(threadIdx.x) * PER_THREAD + i == place) {
			s.scan[WARPS] = at;
			s.scan[WARPS + 1] = mine[i];
		}
		at += mine[i];
	}
	__syncthreads();
	if (place >= 0) {
		*above = s.scan[WARPS];
		*holds = s.scan[WARPS + 1];
	}
	return place < 0 ? -1 : DIGITS - 1 - place;
}

/*
 * Keeps the best of x[n]: `target` of them, or, by_mass, so many that they hold `share` of the sum. The others become
 * `dropped`.
 */
__device__ __forceinline__ void select_best(float *x, int n, mass_sum target, double share, bool by_mass, float dropped,
					    const struct sample_shared &s)
{
	const int shift[] = {21, 10, 0}, bits[] = {11, 11, 10};
	uint32_t threshold = 0, known = 0;
	mass_sum above = 0, holds = 0;
	for (int pass = 0; pass < 3; pass++) {
		const uint32_t mask = (1u << bits[pass]) - 1;
		__syncthreads();
		for (int i = threadIdx.x; i < DIGITS; i += THREADS)
			s.digit[i] = 0;
		__syncthreads();
		for (int i = threadIdx.x; i < n; i += THREADS) {
			const float v = x[i];
			const uint32_t key = eligible(v, by_mass) ? key_of(v) : 0;
			if (key && (key & known) == threshold)
				atomicAdd(s.digit + (key >> shift[pass] & mask), mass_of(v, by_mass));
		}
		__syncthreads();
		const int digit = find_digit(s, pass == 0 ? share : -1.0, &target, &above, &holds);
		if (digit < 0)
			return; /* what is eligible weighs nothing: it stays as it is */
		threshold |= static_cast<uint32_t>(digit) << shift[pass];
		known |= mask << shift[pass];
	}
	/* Equals are kept from the first index on until the target is reached, one at least. */
	const uint32_t bits_of = threshold & 0x80000000u ? threshold ^ 0x80000000u : ~threshold;
	mass_sum each = mass_of(__uint_as_float(bits_of), by_mass);
	each = each ? each : 1;
	const mass_sum equals = holds / each, wanted = target > above ? (target - above + each - 1) / each : 1;
	const bool all = wanted >= equals;
	mass_sum seen = 0;
	for (int begin = 0; begin < n; begin += THREADS) {
		const int i = begin + threadIdx.x;
		const float v = i < n ? x[i] : -INFINITY;
		const uint32_t key = i < n && eligible(v, by_mass) ? key_of(v) : 0;
		const bool equal = key && key == threshold;
		mass_sum rank = 0;
		if (!all) {
			const unsigned vote = __ballot_sync(ALL, equal);
			__syncthreads();
			if (threadIdx.x % 32 == 0)
				s.scan[threadIdx.x / 32] = static_cast<mass_sum>(__popc(vote));
			__syncthreads();
			rank = seen + static_cast<mass_sum>(__popc(vote & ((1u << threadIdx.x % 32) - 1)));
			for (int w = 0; w < WARPS; w++) {
				const mass_sum of_warp = s.scan[w];
				rank += w < static_cast<int>(threadIdx.x / 32) ? of_warp : 0;
				seen += of_warp;
			}
		}
		if (i < n && !(key > threshold || (equal && (all || rank < wanted))))
			x[i] = dropped;
	}
	__syncthreads();
}

/* ---- Weights and the draw ---- */

/* sampler.c's e^x for x <= 0, operation by operation. */
__device__ __forceinline__ float exp_nonpositive(float x)
{
	const int32_t in_range = -static_cast<int32_t>(x >= -87.0f);
	x = __int_as_float(__float_as_int(x) & in_range);
	const float k = __fsub_rn(__fadd_rn(__fmul_rn(x, 1.44269504f), 12582912.0f), 12582912.0f);
	const float r = __fadd_rn(__fsub_rn(x, __fmul_rn(k, 0.693359375f)), __fmul_rn(k, 2.12194440e-4f));
	float e = __fadd_rn(0.0416666667f, __fmul_rn(r, __fadd_rn(0.00833333333f, __fmul_rn(r, 0.00138888889f))));
	e = __fadd_rn(0.166666667f, __fmul_rn(r, e));
	e = __fadd_rn(0.5f, __fmul_rn(r, e));
	e = __fadd_rn(1.0f, __fmul_rn(r, e));
	e = __fadd_rn(1.0f, __fmul_rn(r, e));
	return __int_as_float((__float_as_int(e) + static_cast<int32_t>(k) * (1 << 23)) & in_range);
}

/* Sums of blocks of 256 weights in the order of sampler.c: eight lanes, after what is left of a short block. */
__device__ __forceinline__ void sum_blocks(const float *w, int n, int n_blocks, shared_span<double> sums)
{
	const int lane = threadIdx.x % SUM_LANES, group = threadIdx.x / SUM_LANES;
	for (int begin = 0; begin < n_blocks; begin += THREADS / SUM_LANES) {
		const int block = begin + group, first = block * SUM_BLOCK;
		const int count = block < n_blocks ? min(static_cast<int>(SUM_BLOCK), n - first) : 0;
		const int whole = count / SUM_LANES * SUM_LANES;
		double part = 0, sum = 0;
		for (int j = lane; j < whole; j += SUM_LANES)
			part += static_cast<double>(w[first + j]);
		if (lane == 0)
			for (int j = whole; j < count; j++)
				sum += static_cast<double>(w[first + j]);
		for (int k = 0; k < SUM_LANES; k++)
			sum += __shfl_sync(ALL, part, k, SUM_LANES);
		if (lane == 0 && block < n_blocks)
			sums[block] = sum;
	}
}

__device__ __forceinline__ int draw(const float *w, int n, double unit, const struct sample_shared &s)
{
	const int n_blocks = (n + SUM_BLOCK - 1) / SUM_BLOCK;
	const shared_span<double> sums = shared_cast<double>(s.digit);
	__syncthreads();
	sum_blocks(w, n, n_blocks, sums);
	__syncthreads();
	double target = 0, at = 0;
	if (threadIdx.x == 0) {
		double total = 0;
		for (int b = 0; b < n_blocks; b++) {
			const double sum = sums[b];
			total += sum;
		}
		target = total * unit;
		int chosen = -1;
		for (int b = 0; b < n_blocks && chosen < 0; b++) {
			const double sum = sums[b];
			if (sum <= 0.0)
				continue;
			if (at + sum <= target && at + sum < total)
				at += sum;
			else
				chosen = b;
		}
		s.word[0] = chosen;
	}
	__syncthreads();
	const int block = s.word[0], first = block * SUM_BLOCK;
	const int count = block < 0 ? 0 : min(static_cast<int>(SUM_BLOCK), n - first);
	for (int i = threadIdx.x; i < count; i += THREADS)
		s.value[i] = w[first + i];
	__syncthreads();
	int chosen = 0;
	if (threadIdx.x == 0)
		for (int i = 0; i < count; i++) {
			const float v = s.value[i];
			if (v <= 0.0f)
				continue;
			chosen = first + i;
			at += static_cast<double>(v);
			if (at > target)
				break;
		}
	return chosen; /* of thread 0 */
}

/* ---- The chain ---- */

__global__ void __launch_bounds__(THREADS, 1) choose(float *logits, int n, int stride, const struct choice *choices,
						  const struct sample_edit *edits, int32_t *tokens)
{
	GPU_SHARED(mass_sum, digit, DIGITS);
	GPU_SHARED(mass_sum, scan, WARPS + 2);
	GPU_SHARED(float, value, SUM_BLOCK);
	GPU_SHARED(int, word, 4);
	const struct sample_shared s = {digit, scan, value, word};
	const struct choice c = choices[blockIdx.x];
	float *x = logits + static_cast<size_t>(c.output) * stride;
	const struct sample_edit *edit = edits + c.first_edit;

	for (int part = 0; part < 2; part++) {
		const int end = part ? c.n_edits : c.n_first;
		for (int i = (part ? c.n_first : 0) + threadIdx.x; i < end; i += THREADS) {
			float v = x[edit[i].token];
			v = v > 0.0f ? __fdiv_rn(v, edit[i].repeat) : __fmul_rn(v, edit[i].repeat);
			x[edit[i].token] = __fadd_rn(__fsub_rn(v, edit[i].minus), edit[i].plus);
		}
		__syncthreads();
	}

	float max = -INFINITY;
	for (int i = threadIdx.x; i < n; i += THREADS)
		max = x[i] > max ? x[i] : max;
	max = block_max<THREADS>(max, s.value);
	if (c.temperature == 0.0f || c.top_k == 1 || max == -INFINITY) {
		const int chosen = first_equal(x, n, max, s);
		if (threadIdx.x == 0)
			tokens[blockIdx.x] = ~chosen;
		return;
	}
	if (c.top_k > 0 && c.top_k < n)
		select_best(x, n, static_cast<mass_sum>(c.top_k), -1.0, false, -INFINITY, s);
	for (int i = threadIdx.x; i < n; i += THREADS) {
		if (max == INFINITY)
			x[i] = x[i] == INFINITY ? 1.0f : 0.0f;
		else
			x[i] = exp_nonpositive(__fdiv_rn(__fsub_rn(x[i], max), c.temperature));
	}
	__syncthreads();
	if (c.top_p < 1.0f)
		select_best(x, n, 0, static_cast<double>(c.top_p), true, 0.0f, s);
	if (c.min_p > 0.0f) /* the best token, which every filter keeps, weighs 1 */
		for (int i = threadIdx.x; i < n; i += THREADS)
			x[i] = x[i] >= c.min_p ? x[i] : 0.0f;
	const int chosen = draw(x, n, c.unit, s);
	if (threadIdx.x == 0)
		tokens[blockIdx.x] = chosen;
}

cudaError_t choose_tokens(float *logits, int n_vocab, int stride, const struct choice *choices,
			  const struct sample_edit *edits, int n, int32_t *tokens, cudaStream_t stream)
{
	if (n_vocab > DIGITS * SUM_BLOCK)
		return cudaErrorInvalidValue;
	GPU_LAUNCH(choose, dim3(static_cast<unsigned>(n)), dim3(THREADS), 0, stream, logits, n_vocab, stride, choices,
		   edits, tokens);
	return cudaGetLastError();
}

} // namespace GPU_NS
