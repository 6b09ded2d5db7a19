/*
 * What the bounds of pages promise a row's queries: for pages among which rows choose (choice.cu), and for pages that
 * they do not see (probe.cu).
 */
#pragma once

#include "cuda/block.cuh"

namespace GPU_NS
{

enum {
	SCORE_THREADS = 256,
	SCORE_LANES = 8, /* of a page */
	SCORE_PAGES = SCORE_THREADS / SCORE_LANES,
	SCORE_ROUNDS = 4, /* of so many pages, by a block */
	SCORE_HEADS = 8,  /* whose queries are in shared memory at a time */
	SCORE_DIM = 256
};

/* Blocks that so many pages take. */
inline unsigned score_runs(int n_pages)
{
	return static_cast<unsigned>((n_pages + SCORE_PAGES * SCORE_ROUNDS - 1) / (SCORE_PAGES * SCORE_ROUNDS));
}

/* Bounds of a KV head: those of page p, [least, greatest][head_dim], begin at from + p * apart. */
struct head_bounds {
	const uint16_t *from;
	size_t apart;
	bool bf16;
};

/* The queries of a row that share the KV head: [n][head_dim]. */
struct head_queries {
	const float *from;
	int n, head_dim;
};

__device__ __forceinline__ float element_at(uint32_t pair, int which, bool bf16)
{
	const uint32_t bits = which ? pair >> 16 : pair & 0xffff;
	return bf16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

/*
 * Of entries [first, end), whose pages are page_of(entry), those of this block's run, blockIdx.y: score[entry] becomes
 * what the page's bounds promise the queries, the largest of them. For each dimension that is the larger product of the
 * two, added up in eights of dimensions by SCORE_LANES lanes and over them. NaN where a bound is no number.
 */
template <typename Page>
__device__ __forceinline__ void score_run(const struct head_bounds &bounds, const struct head_queries &q, int first,
					  int end, float *score, const Page &page_of)
{
	GPU_SHARED(float, query, SCORE_HEADS *SCORE_DIM);
	const int lane = threadIdx.x % SCORE_LANES, head_dim = q.head_dim;
	const int run = first + static_cast<int>(blockIdx.y) * SCORE_PAGES * SCORE_ROUNDS;
	const int begin = run + threadIdx.x / SCORE_LANES;
	if (run >= end)
		return;
	for (int head = 0; head < q.n; head += SCORE_HEADS) {
		const int n_heads = min(static_cast<int>(SCORE_HEADS), q.n - head);
		__syncthreads();
		for (int i = threadIdx.x; i < n_heads * head_dim; i += SCORE_THREADS)
			query[i / head_dim * SCORE_DIM + i % head_dim] =
				q.from[static_cast<size_t>(head) * head_dim + i];
		__syncthreads();
		for (int round = 0; round < SCORE_ROUNDS; round++) {
			const int i = begin + round * SCORE_PAGES;
			const int32_t page = i < end ? page_of(i) : 0;
			const uint16_t *least = bounds.from + static_cast<size_t>(page) * bounds.apart;
			float sum[SCORE_HEADS] = {};
			bool odd = false;
#pragma unroll
			for (int block = 0; block < SCORE_DIM / (8 * SCORE_LANES); block++) {
				const int d = 8 * (block * SCORE_LANES + lane);
				if (i >= end || d >= head_dim)
					continue;
				const uint4 l = ldg<uint4>(least + d), g = ldg<uint4>(least + head_dim + d);
				const uint32_t low_pairs[4] = {l.x, l.y, l.z, l.w},
					       high_pairs[4] = {g.x, g.y, g.z, g.w};
				float low[8], high[8];
#pragma unroll
				for (int e = 0; e < 8; e++) {
					low[e] = element_at(low_pairs[e / 2], e % 2, bounds.bf16);
					high[e] = element_at(high_pairs[e / 2], e % 2, bounds.bf16);
					odd = odd || low[e] != low[e] || high[e] != high[e];
				}
#pragma unroll
				for (int h = 0; h < SCORE_HEADS; h++) {
					if (h >= n_heads)
						continue;
#pragma unroll
					for (int four = 0; four < 2; four++) {
						const float4 f =
							ld_shared<float4>(query + (h * SCORE_DIM + d + 4 * four));
						const float x[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
						for (int e = 0; e < 4; e++)
							sum[h] += x[e] *
								  (x[e] > 0 ? high[4 * four + e] : low[4 * four + e]);
					}
				}
			}
			float best = -INFINITY;
			if (head > 0 && lane == 0 && i < end)
				best = ld_global<float>(score + i);
#pragma unroll
			for (int h = 0; h < SCORE_HEADS; h++) {
				float s = odd ? __int_as_float(0x7fffffff) : sum[h];
				for (int apart = SCORE_LANES / 2; apart; apart /= 2)
					s += __shfl_xor_sync(ALL, s, apart);
				/* What is no number stays. */
				if (h < n_heads)
					best = s > best || s != s ? s : best;
			}
			if (lane == 0 && i < end)
				stg<float>(score + i, best);
		}
	}
}

} // namespace GPU_NS
