/* Kernels as they should be: host_cuda runs them without complaint, in any order, and computes what a GPU would. */
#include "tests/unit/cuda/host_cuda_fixture.h"

/* ---- grids and indices */

__global__ void number(unsigned *x)
{
	const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
	const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
	x[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 1000 + thread;
}

static void every_thread_of_every_block_runs_once(void **)
{
	enum { N = 2 * 3 * 4 * 5 * 3 * 2 };
	device_array<unsigned> x(N);
	in_every_order([&] {
		unsigned host[N];
		cudaMemsetAsync(x.p, 0, sizeof host, stream);
		GPU_LAUNCH(number, dim3(2, 3, 4), dim3(5, 3, 2), 0, stream, x.p);
		expect_success();
		x.read(host);
		for (unsigned i = 0; i < N; i++)
			assert_int_equal(host[i], i / 30 * 1000 + i % 30);
	});
}

/* ---- barriers, shared memory, collectives */

__global__ void block_sum(const int *x, int n, int *sum)
{
	GPU_SHARED(int, partial, 32);
	int v = 0;
	for (int i = threadIdx.x; i < n; i += blockDim.x)
		v += x[i];
	for (int d = 16; d > 0; d /= 2)
		v += __shfl_xor_sync(~0u, v, d);
	if (threadIdx.x % 32 == 0)
		partial[threadIdx.x / 32] = v;
	__syncthreads();
	if (threadIdx.x < 32) {
		v = threadIdx.x < blockDim.x / 32 ? static_cast<int>(partial[threadIdx.x]) : 0;
		v = __reduce_add_sync(~0u, v);
		if (threadIdx.x == 0)
			*sum = v;
	}
}

static void reduction_over_a_block(void **)
{
	device_array<int> x(1000), sum(1);
	int host[1000], result;
	for (int i = 0; i < 1000; i++)
		host[i] = i * i;
	x.write(host);
	in_every_order([&] {
		GPU_LAUNCH(block_sum, 1, 256, 0, stream, x.p, 1000, sum.p);
		expect_success();
		sum.read(&result);
		assert_int_equal(result, 332833500);
	});
}

__global__ void transpose(const float *x, float *y, int n)
{
	GPU_SHARED(float, tile, 8 * 9);
	for (int base = 0; base < n; base += 8) {
		tile[threadIdx.y * 9 + threadIdx.x] = x[(blockIdx.x * 8 + threadIdx.y) * n + base + threadIdx.x];
		__syncthreads();
		y[(base + threadIdx.y) * n + blockIdx.x * 8 + threadIdx.x] = tile[threadIdx.x * 9 + threadIdx.y];
		__syncthreads();
	}
}

static void transpose_through_shared_memory(void **)
{
	enum { N = 32 };
	device_array<float> x(N * N), y(N * N);
	float in[N * N], out[N * N];
	for (int i = 0; i < N * N; i++)
		in[i] = static_cast<float>(i);
	x.write(in);
	in_every_order([&] {
		GPU_LAUNCH(transpose, N / 8, dim3(8, 8), 0, stream, x.p, y.p, N);
		expect_success();
		y.read(out);
		for (int i = 0; i < N * N; i++)
			assert_true(out[i] == in[i % N * N + i / N]);
	});
}

__global__ void exchange_in_a_warp(int *x)
{
	GPU_SHARED(int, tile, 64);
	for (int round = 0; round < 3; round++) {
		tile[threadIdx.x] = x[threadIdx.x] + round;
		__syncwarp();
		const int v = tile[threadIdx.x ^ 31];
		__syncwarp();
		x[threadIdx.x] = v;
	}
}

static void warp_barriers_order_shared_memory(void **)
{
	device_array<int> x(64);
	int host[64];
	in_every_order([&] {
		for (int i = 0; i < 64; i++)
			host[i] = i;
		x.write(host);
		GPU_LAUNCH(exchange_in_a_warp, 1, 64, 0, stream, x.p);
		expect_success();
		x.read(host);
		for (int i = 0; i < 64; i++)
			assert_int_equal(host[i], (i ^ 31) + 3);
	});
}

__global__ void votes(unsigned *x)
{
	const unsigned lane = threadIdx.x;
	x[lane] = __ballot_sync(~0u, lane % 3 == 0);
	x[32 + lane] = static_cast<unsigned>(__any_sync(~0u, lane == 5)) * 2 +
	               static_cast<unsigned>(__all_sync(~0u, lane < 31));
	x[64 + lane] = static_cast<unsigned>(__syncthreads_count(lane < 7));
	x[96 + lane] =
		static_cast<unsigned>(__syncthreads_or(lane == 31)) * 2 + static_cast<unsigned>(__syncthreads_and(1));
	x[128 + lane] = __match_any_sync(~0u, lane / 8);
	if (lane >= 16)
		x[160 + lane] = __ballot_sync(0xffff0000u, 1);
}

static void votes_count_lanes(void **)
{
	device_array<unsigned> x(192);
	unsigned host[192];
	in_every_order([&] {
		GPU_LAUNCH(votes, 1, 32, 0, stream, x.p);
		expect_success();
		x.read(host);
		for (unsigned i = 0; i < 32; i++) {
			assert_int_equal(host[i], 0x49249249);
			assert_int_equal(host[32 + i], 2);
			assert_int_equal(host[64 + i], 7);
			assert_int_equal(host[96 + i], 3);
			assert_int_equal(host[128 + i], 0xffu << (i / 8 * 8));
		}
		assert_int_equal(host[191], 0xffff0000u);
	});
}

__global__ void shuffles(int *x)
{
	const int lane = static_cast<int>(threadIdx.x);
	x[lane] = __shfl_sync(~0u, lane, 3, 8);
	x[32 + lane] = __shfl_up_sync(~0u, lane, 2, 16);
	x[64 + lane] = __shfl_down_sync(~0u, lane, 3);
	x[96 + lane] = __shfl_xor_sync(~0u, lane, 5);
	x[128 + lane] = static_cast<int>(__shfl_sync(~0u, make_float4(0, 1, 2, static_cast<float>(lane)), lane + 33).w);
}

static void shuffles_find_their_lane(void **)
{
	device_array<int> x(160);
	int host[160];
	in_every_order([&] {
		GPU_LAUNCH(shuffles, 1, 32, 0, stream, x.p);
		expect_success();
		x.read(host);
		for (int i = 0; i < 32; i++) {
			assert_int_equal(host[i], i / 8 * 8 + 3);
			assert_int_equal(host[32 + i], i % 16 < 2 ? i : i - 2);
			assert_int_equal(host[64 + i], i > 28 ? i : i + 3);
			assert_int_equal(host[96 + i], i ^ 5);
			assert_int_equal(host[128 + i], (i + 1) % 32);
		}
	});
}

__global__ void histogram(const unsigned char *x, int n, unsigned *bins)
{
	GPU_SHARED(unsigned, local, 16);
	if (threadIdx.x < 16)
		local[threadIdx.x] = 0;
	__syncthreads();
	for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n;
	     i += static_cast<int>(gridDim.x * blockDim.x))
		atomicAdd(&local[x[i] % 16], 1u);
	__syncthreads();
	if (threadIdx.x < 16)
		atomicAdd(bins + threadIdx.x, static_cast<unsigned>(local[threadIdx.x]));
}

static void atomics_add_up(void **)
{
	device_array<unsigned char> x(1000);
	device_array<unsigned> bins(16);
	unsigned char in[1000];
	for (int i = 0; i < 1000; i++)
		in[i] = static_cast<unsigned char>(i * 7);
	x.write(in);
	in_every_order([&] {
		unsigned out[16], total = 0;
		cudaMemsetAsync(bins.p, 0, sizeof out, stream);
		GPU_LAUNCH(histogram, 3, 64, 0, stream, x.p, 1000, bins.p);
		expect_success();
		bins.read(out);
		for (unsigned n : out)
			total += n;
		assert_int_equal(total, 1000);
	});
}

/* ---- asynchronous copies: a double-buffered pipeline */

__global__ void pipeline(const float *x, float *y, int n_tiles)
{
	GPU_DYNAMIC_SHARED(float, tile);
	for (int stage = 0; stage < 2; stage++) {
		if (stage < n_tiles)
			cp_async<16>(tile + stage * 256 + 4 * threadIdx.x, x + stage * 256 + 4 * threadIdx.x);
		cp_async_commit();
	}
	for (int t = 0; t < n_tiles; t++) {
		cp_async_wait<1>();
		__syncthreads();
		float4 v = ld_shared<float4>(tile + t % 2 * 256 + 4 * (63 - threadIdx.x));
		v.x += v.w;
		stg<float4>(y + t * 256 + 4 * threadIdx.x, v);
		__syncthreads();
		const bool more = t + 2 < n_tiles;
		cp_async<16>(tile + t % 2 * 256 + 4 * threadIdx.x, x + (more ? (t + 2) * 256 : 0) + 4 * threadIdx.x,
		             more);
		cp_async_commit();
	}
}

static void copies_arrive_at_their_wait(void **)
{
	enum { TILES = 5, N = TILES * 256 };
	device_array<float> x(N), y(N);
	float in[N], out[N];
	for (int i = 0; i < N; i++)
		in[i] = static_cast<float>(i);
	x.write(in);
	in_every_order([&] {
		GPU_LAUNCH(pipeline, 1, 64, 2048, stream, x.p, y.p, static_cast<int>(TILES));
		expect_success();
		y.read(out);
		for (int i = 0; i < N; i++) {
			const int source = i / 256 * 256 + (63 - i % 256 / 4) * 4 + i % 4;
			assert_true(out[i] == in[source] + (i % 4 == 0 ? in[source + 3] : 0));
		}
	});
}

/* ---- tensor cores, against the product of the matrices as they lie in memory */

/* a[16][k], b[8][k] (columns of B), d[16][8]; k is 16 halves, through ldmatrix. */
template <bool bf16> __global__ void product16(const uint16_t *a, const uint16_t *b, float *d)
{
	GPU_SHARED(uint16_t, sa, 16 * 16);
	GPU_SHARED(uint16_t, sb, 8 * 16);
	const unsigned lane = threadIdx.x;
	for (unsigned i = lane; i < 256; i += 32)
		sa[i] = a[i];
	for (unsigned i = lane; i < 128; i += 32)
		sb[i] = b[i];
	__syncthreads();
	uint32_t fa[4], fb[2];
	float fd[4] = {};
	ldmatrix_x4(fa, sa + lane % 16 * 16 + lane / 16 * 8);
	ldmatrix_x2(fb, sb + lane % 8 * 16 + lane / 8 % 2 * 8);
	if (bf16)
		mma_bf16(fd, fa, fb);
	else
		mma_f16(fd, fa, fb);
	for (unsigned i = 0; i < 4; i++)
		d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = fd[i];
}

template <bool bf16> static void check_product16()
{
	device_array<uint16_t> a(256), b(128);
	device_array<float> d(128);
	uint16_t ha[256], hb[128];
	float out[128];
	uint64_t seed = 7;
	for (uint16_t &h : ha)
		h = bf16 ? float_to_bf16_bits(static_cast<float>(unit_rand(&seed) % 17) - 8)
		         : float_to_half_bits(static_cast<float>(unit_rand(&seed) % 17) - 8);
	for (uint16_t &h : hb)
		h = bf16 ? float_to_bf16_bits(static_cast<float>(unit_rand(&seed) % 17) - 8)
		         : float_to_half_bits(static_cast<float>(unit_rand(&seed) % 17) - 8);
	a.write(ha);
	b.write(hb);
	GPU_LAUNCH(product16<bf16>, 1, 32, 0, stream, a.p, b.p, d.p);
	expect_success();
	d.read(out);
	for (int r = 0; r < 16; r++)
		for (int c = 0; c < 8; c++) {
			float sum = 0;
			for (int k = 0; k < 16; k++)
				sum += bf16 ? bf16_bits_to_float(ha[r * 16 + k]) * bf16_bits_to_float(hb[c * 16 + k])
				            : half_bits_to_float(ha[r * 16 + k]) * half_bits_to_float(hb[c * 16 + k]);
			assert_true(out[r * 8 + c] == sum);
		}
}

static void tensor_core_products(void **)
{
	in_every_order([] {
		check_product16<false>();
		check_product16<true>();
	});
}

__global__ void product8(const int8_t *a, const int8_t *b, int *d)
{
	const unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
	uint32_t fa[4], fb[2];
	int fd[4] = {1, 2, 3, 4};
	for (unsigned i = 0; i < 4; i++)
		fa[i] = ldg<uint32_t>(a + (g + i % 2 * 8) * 32 + i / 2 * 16 + t * 4);
	for (unsigned i = 0; i < 2; i++)
		fb[i] = ldg<uint32_t>(b + g * 32 + i * 16 + t * 4);
	mma_s8(fd, fa, fb);
	for (unsigned i = 0; i < 4; i++)
		d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = fd[i] - static_cast<int>(i) - 1;
}

static void tensor_core_bytes(void **)
{
	device_array<int8_t> a(512), b(256);
	device_array<int> d(128);
	int8_t ha[512], hb[256];
	int out[128];
	uint64_t seed = 9;
	for (int8_t &v : ha)
		v = static_cast<int8_t>(unit_rand(&seed) >> 40);
	for (int8_t &v : hb)
		v = static_cast<int8_t>(unit_rand(&seed) >> 40);
	a.write(ha);
	b.write(hb);
	GPU_LAUNCH(product8, 1, 32, 0, stream, a.p, b.p, d.p);
	expect_success();
	d.read(out);
	for (int r = 0; r < 16; r++)
		for (int c = 0; c < 8; c++) {
			int sum = 0;
			for (int k = 0; k < 32; k++)
				sum += ha[r * 32 + k] * hb[c * 32 + k];
			assert_int_equal(out[r * 8 + c], sum);
		}
}

/* A lane of a transposed load gets elements of a column: what B wants when it lies with its rows contiguous. */
__global__ void load_transposed(const uint16_t *x, uint32_t *y)
{
	GPU_SHARED(uint16_t, tile, 16 * 8);
	for (unsigned i = threadIdx.x; i < 128; i += 32)
		tile[i] = x[i];
	__syncthreads();
	uint32_t r[2];
	ldmatrix_x2_trans(r, tile + threadIdx.x % 16 * 8);
	y[2 * threadIdx.x] = r[0];
	y[2 * threadIdx.x + 1] = r[1];
}

static void transposed_fragments(void **)
{
	device_array<uint16_t> x(128);
	device_array<uint32_t> y(64);
	uint16_t in[128];
	uint32_t out[64];
	for (unsigned i = 0; i < 128; i++)
		in[i] = static_cast<uint16_t>(i);
	x.write(in);
	GPU_LAUNCH(load_transposed, 1, 32, 0, stream, x.p, y.p);
	expect_success();
	y.read(out);
	for (unsigned lane = 0; lane < 32; lane++)
		for (unsigned m = 0; m < 2; m++) {
			const unsigned k = m * 8 + lane % 4 * 2, column = lane / 4;
			assert_int_equal(out[2 * lane + m], (k * 8 + column) | ((k + 1) * 8 + column) << 16);
		}
}

/* ---- numbers */

static void halves_round_to_nearest_even(void **)
{
	for (uint32_t h = 0; h < 65536; h++) {
		const float f = half_bits_to_float(static_cast<uint16_t>(h));
		if (f == f)
			assert_int_equal(float_to_half_bits(f), h);
	}
	assert_int_equal(float_to_half_bits(1.0f + 0x1p-11f), 0x3c00);
	assert_int_equal(float_to_half_bits(1.0f + 3 * 0x1p-11f), 0x3c02);
	assert_int_equal(float_to_half_bits(65519.9f), 0x7bff);
	assert_int_equal(float_to_half_bits(65520.0f), 0x7c00);
	assert_int_equal(float_to_half_bits(0x1p-25f), 0);
	assert_int_equal(float_to_half_bits(0x1.8p-24f), 2);
	assert_int_equal(float_to_bf16_bits(1.0f + 0x1p-8f), 0x3f80);
	assert_int_equal(float_to_bf16_bits(1.0f + 3 * 0x1p-8f), 0x3f82);
}

static void byte_intrinsics(void **)
{
	assert_int_equal(dp4a(0x01ff7f80, 0x02030405, 10), 10 + 2 - 3 + 127 * 4 - 128 * 5);
	assert_int_equal(__byte_perm(0x33221100, 0x77665544, 0x7531), 0x77553311);
	assert_int_equal(__byte_perm(0x00008000, 0, 0x9999), 0xffffffffu);
	assert_int_equal(__vsubss4(0x80000001, 0x01000002), 0x800000ffu);
	assert_int_equal(__funnelshift_r(0x11223344, 0x55667788, 8), 0x88112233);
	assert_int_equal(__brev(1), 0x80000000u);
}

UNIT_MAIN(HOST_CUDA_TEST(every_thread_of_every_block_runs_once), HOST_CUDA_TEST(reduction_over_a_block),
          HOST_CUDA_TEST(transpose_through_shared_memory), HOST_CUDA_TEST(warp_barriers_order_shared_memory),
          HOST_CUDA_TEST(votes_count_lanes), HOST_CUDA_TEST(shuffles_find_their_lane), HOST_CUDA_TEST(atomics_add_up),
          HOST_CUDA_TEST(copies_arrive_at_their_wait), HOST_CUDA_TEST(tensor_core_products),
          HOST_CUDA_TEST(tensor_core_bytes), HOST_CUDA_TEST(transposed_fragments),
          HOST_CUDA_TEST(halves_round_to_nearest_even), HOST_CUDA_TEST(byte_intrinsics))
