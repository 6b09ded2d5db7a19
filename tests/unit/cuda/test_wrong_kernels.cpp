/* Deliberately wrong kernels: host_cuda must find what is wrong with each, and say where. */
#include "tests/unit/cuda/host_cuda_fixture.h"

/* ---- barriers and collectives */

__global__ void half_waits()
{
	if (threadIdx.x < 32)
		__syncthreads();
}

static void divergent_barrier(void **)
{
	GPU_LAUNCH(half_waits, 1, 64, 0, stream);
	expect_failure(cudaErrorLaunchFailure, "divergent __syncthreads");
}

__global__ void one_returns_early(float *x, int n)
{
	if (static_cast<int>(threadIdx.x) >= n)
		return;
	x[threadIdx.x] = 1;
	__syncthreads();
}

static void return_before_a_barrier(void **)
{
	device_array<float> x(64);
	GPU_LAUNCH(one_returns_early, dim3(3, 2), 64, 0, stream, x.p, 63);
	expect_failure(cudaErrorLaunchFailure, "kernel one_returns_early, block (0,0,0), thread (0,0,0): divergent "
	                                       "__syncthreads: 63 of 64 threads wait, and thread "
	                                       "(63,0,0) has exited");
}

__global__ void lanes_part(int *x)
{
	if (threadIdx.x % 2)
		x[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
	else
		__syncwarp();
}

static void lanes_in_different_collectives(void **)
{
	device_array<int> x(32);
	in_every_order([&] {
		GPU_LAUNCH(lanes_part, 1, 32, 0, stream, x.p);
		expect_failure(cudaErrorLaunchFailure, "divergent");
	});
}

__global__ void shuffle_in_a_branch(int *x)
{
	if (threadIdx.x < 20)
		x[threadIdx.x] = __shfl_down_sync(0xffffffffu, x[threadIdx.x], 1);
}

static void collective_with_exited_lanes(void **)
{
	device_array<int> x(32);
	in_every_order([&] {
		GPU_LAUNCH(shuffle_in_a_branch, 1, 32, 0, stream, x.p);
		expect_failure(cudaErrorLaunchFailure, "divergent __shfl_down_sync");
	});
}

__global__ void wrong_mask(int *x)
{
	x[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 0);
}

static void mask_without_the_caller(void **)
{
	device_array<int> x(32);
	GPU_LAUNCH(wrong_mask, 1, 32, 0, stream, x.p);
	expect_failure(cudaErrorLaunchFailure,
	               "thread (16,0,0): __shfl_sync with mask 0x0000ffff, which does not name the calling lane 16");
}

__global__ void half_warp_shuffle(int *x)
{
	x[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
}

static void mask_of_lanes_that_are_not_there(void **)
{
	device_array<int> x(16);
	GPU_LAUNCH(half_warp_shuffle, 1, 16, 0, stream, x.p);
	expect_failure(cudaErrorLaunchFailure, "names lanes that the block does not have");
}

__global__ void reads_unnamed_lane(int *x)
{
	if (threadIdx.x < 16)
		x[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1, 16);
}

static void shuffle_from_an_unnamed_lane(void **)
{
	device_array<int> x(32);
	GPU_LAUNCH(reads_unnamed_lane, 1, 32, 0, stream, x.p);
	expect_failure(cudaErrorLaunchFailure, "which mask 0x0000ffff does not name");
}

__global__ void two_masks(int *x)
{
	x[threadIdx.x] = __shfl_sync(threadIdx.x < 16 ? 0xffffffffu : 0xffff0000u, 1, 20);
}

static void masks_that_differ(void **)
{
	device_array<int> x(32);
	in_every_order([&] {
		GPU_LAUNCH(two_masks, 1, 32, 0, stream, x.p);
		expect_failure(cudaErrorLaunchFailure, "divergent __shfl_sync");
	});
}

__global__ void mma_in_a_branch(float *x)
{
	float d[4] = {};
	uint32_t a[4] = {}, b[2] = {};
	if (threadIdx.x != 7)
		mma_f16(d, a, b);
	x[threadIdx.x] = d[0];
}

static void tensor_core_without_a_lane(void **)
{
	device_array<float> x(32);
	GPU_LAUNCH(mma_in_a_branch, 1, 32, 0, stream, x.p);
	expect_failure(cudaErrorLaunchFailure, "divergent mma_f16");
}

/* ---- shared memory */

__global__ void shared_past_the_end(float *x)
{
	GPU_SHARED(float, other, 32);
	GPU_SHARED(float, tile, 32);
	other[threadIdx.x] = 0;
	tile[threadIdx.x] = 1;
	__syncthreads();
	x[threadIdx.x] = tile[threadIdx.x + 1] + other[0];
}

static void shared_out_of_bounds(void **)
{
	device_array<float> x(32);
	GPU_LAUNCH(shared_past_the_end, 1, 32, 0, stream, x.p);
	expect_failure(cudaErrorLaunchFailure,
	               "thread (31,0,0): reads 4 bytes of shared memory out of bounds: offset 128 in an array of 128");
}

__global__ void dynamic_past_the_end()
{
	GPU_DYNAMIC_SHARED(int, buf);
	buf[threadIdx.x - 1] = 3;
}

static void shared_before_its_start(void **)
{
	GPU_LAUNCH(dynamic_past_the_end, 1, 8, 64, stream);
	expect_failure(cudaErrorLaunchFailure, "thread (0,0,0): writes 4 bytes of shared memory out of bounds");
}

__global__ void reads_first(float *x)
{
	GPU_SHARED(float, tile, 64);
	if (threadIdx.x < 32)
		tile[threadIdx.x] = 1;
	__syncthreads();
	x[threadIdx.x] = tile[threadIdx.x];
}

static void shared_uninitialised(void **)
{
	device_array<float> x(64);
	in_every_order([&] {
		GPU_LAUNCH(reads_first, 2, 64, 0, stream, x.p);
		expect_failure(cudaErrorLaunchFailure, "reads uninitialised shared memory");
	});
}

__global__ void leaves_for_the_next_block(float *x)
{
	GPU_SHARED(float, tile, 1);
	if (blockIdx.x == 0)
		tile[0] = 1;
	else
		x[0] = tile[0];
}

static void shared_of_an_earlier_block(void **)
{
	device_array<float> x(1);
	GPU_LAUNCH(leaves_for_the_next_block, 2, 1, 0, stream, x.p);
	expect_failure(cudaErrorLaunchFailure, "block (1,0,0), thread (0,0,0): reads uninitialised shared memory");
}

__global__ void vector_at_odd_place(float4 *x)
{
	GPU_SHARED(float, tile, 64);
	for (int i = threadIdx.x; i < 64; i += 8)
		tile[i] = 1;
	__syncthreads();
	x[threadIdx.x] = ld_shared<float4>(tile + 2 * threadIdx.x);
}

static void shared_misaligned_vector(void **)
{
	device_array<float4> x(8);
	GPU_LAUNCH(vector_at_odd_place, 1, 8, 0, stream, x.p);
	expect_failure(cudaErrorLaunchFailure,
	               "thread (1,0,0): misaligned: reads 16 bytes of shared memory at offset 8");
}

__global__ void no_barrier(float *x)
{
	GPU_SHARED(float, tile, 64);
	tile[threadIdx.x] = x[threadIdx.x];
	x[threadIdx.x] = tile[threadIdx.x ^ 1];
}

static void race_within_a_warp(void **)
{
	device_array<float> x(64);
	in_every_order([&] {
		GPU_LAUNCH(no_barrier, 1, 64, 0, stream, x.p);
		/*
		 * Whichever comes first: a neighbour's element that is not there, or one that came without a barrier.
		 */
		assert_int_equal(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
		assert_true(strstr(host_cuda_report(), "race") || strstr(host_cuda_report(), "uninitialised"));
		cudaDeviceReset();
	});
}

__global__ void warp_barrier_for_a_block(float *x)
{
	GPU_SHARED(float, tile, 64);
	tile[threadIdx.x] = x[threadIdx.x];
	__syncthreads();
	tile[threadIdx.x] = 2;
	__syncwarp();
	x[threadIdx.x] = tile[63 - threadIdx.x];
}

static void race_between_warps(void **)
{
	device_array<float> x(64);
	in_every_order([&] {
		GPU_LAUNCH(warp_barrier_for_a_block, 1, 64, 0, stream, x.p);
		expect_failure(cudaErrorLaunchFailure, "race: ");
	});
}

__global__ void reuses_too_early(float *x)
{
	GPU_SHARED(float, tile, 64);
	for (int round = 0; round < 2; round++) {
		tile[threadIdx.x] = x[threadIdx.x];
		__syncthreads();
		x[threadIdx.x] = tile[63 - threadIdx.x];
		/* and here another barrier is missing */
	}
}

static void race_on_reuse(void **)
{
	device_array<float> x(64);
	in_every_order([&] {
		GPU_LAUNCH(reuses_too_early, 1, 64, 0, stream, x.p);
		expect_failure(cudaErrorLaunchFailure, "race: ");
	});
}

__global__ void unsynchronised_partial_warp(int *x)
{
	GPU_SHARED(int, tile, 32);
	tile[threadIdx.x] = 1;
	/* The halves meet, but not each other. */
	__syncwarp(threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u);
	x[threadIdx.x] = tile[31 - threadIdx.x];
}

static void race_between_half_warps(void **)
{
	device_array<int> x(32);
	in_every_order([&] {
		GPU_LAUNCH(unsynchronised_partial_warp, 1, 32, 0, stream, x.p);
		assert_int_equal(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
		assert_true(strstr(host_cuda_report(), "race") || strstr(host_cuda_report(), "uninitialised"));
		cudaDeviceReset();
	});
}

/* Whoever comes last leaves its number, in a block and in the grid. */
__global__ void all_write_one_place(int *x)
{
	x[0] = static_cast<int>(threadIdx.x);
	if (threadIdx.x == 0)
		x[1] = static_cast<int>(blockIdx.x);
}

static void race_in_global_memory(void **)
{
	device_array<int> x(2);
	bool other_thread = false, other_block = false;
	int natural[2], out[2];
	GPU_LAUNCH(all_write_one_place, 40, 64, 0, stream, x.p);
	expect_success();
	x.read(natural);
	assert_true(natural[0] == 63 && natural[1] == 39); /* which a test would take for right */
	in_every_order([&] {
		GPU_LAUNCH(all_write_one_place, 40, 64, 0, stream, x.p);
		expect_success();
		x.read(out);
		other_thread = other_thread || out[0] != natural[0];
		other_block = other_block || out[1] != natural[1];
	});
	assert_true(other_thread && other_block);
}

__global__ void shared_too_large()
{
	GPU_SHARED(char, a, 40 * 1024);
	GPU_DYNAMIC_SHARED(char, b);
	a[0] = 1;
	b[0] = 1;
}

static void shared_over_the_limit(void **)
{
	GPU_LAUNCH(shared_too_large, 1, 1, 10 * 1024, stream);
	expect_failure(cudaErrorLaunchFailure, "only 49152 are allowed");
	GPU_LAUNCH(shared_too_large, 1, 1, 60 * 1024, stream);
	assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
}

/* ---- asynchronous copies */

__global__ void does_not_wait(const float *src, float *x)
{
	GPU_SHARED(float, tile, 32 * 4);
	cp_async<16>(tile + 4 * threadIdx.x, src + 4 * threadIdx.x);
	cp_async_commit();
	__syncthreads();
	x[threadIdx.x] = tile[4 * threadIdx.x];
}

static void copy_not_waited_for(void **)
{
	device_array<float> src(128), x(32);
	GPU_LAUNCH(does_not_wait, 1, 32, 0, stream, src.p, x.p);
	expect_failure(cudaErrorLaunchFailure, "asynchronous copy of thread 0 has not been waited for");
}

__global__ void waits_for_the_wrong_group(const float *src, float *x)
{
	GPU_SHARED(float, tile, 2 * 32);
	for (int stage = 0; stage < 2; stage++) {
		cp_async<4>(tile + 32 * stage + threadIdx.x, src + threadIdx.x);
		cp_async_commit();
	}
	cp_async_wait<1>();
	__syncthreads();
	x[threadIdx.x] = tile[32 + threadIdx.x];
}

static void copy_of_the_wrong_group(void **)
{
	device_array<float> src(32), x(32);
	GPU_LAUNCH(waits_for_the_wrong_group, 1, 32, 0, stream, src.p, x.p);
	expect_failure(cudaErrorLaunchFailure, "has not been waited for");
}

__global__ void others_do_not_wait(const float *src, float *x)
{
	GPU_SHARED(float, tile, 32);
	cp_async<4>(tile + threadIdx.x, src + threadIdx.x);
	cp_async_commit();
	cp_async_wait<0>();
	x[threadIdx.x] = tile[31 - threadIdx.x];
}

static void copy_without_a_barrier(void **)
{
	device_array<float> src(32), x(32);
	in_every_order([&] {
		GPU_LAUNCH(others_do_not_wait, 1, 32, 0, stream, src.p, x.p);
		assert_int_equal(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
		assert_true(strstr(host_cuda_report(), "race") || strstr(host_cuda_report(), "uninitialised") ||
		            strstr(host_cuda_report(), "waited for"));
		cudaDeviceReset();
	});
}

__global__ void copy_to_odd_place(const float *src)
{
	GPU_SHARED(float, tile, 64);
	cp_async<16>(tile + 1, src);
}

static void copy_misaligned(void **)
{
	device_array<float> src(64);
	GPU_LAUNCH(copy_to_odd_place, 1, 1, 0, stream, src.p);
	expect_failure(cudaErrorLaunchFailure, "misaligned: writes 16 bytes of shared memory at offset 4");
}

/* A place that a copy is on its way to is nobody's until the copy has been waited for. */
__global__ void writes_under_a_copy(const float *src)
{
	GPU_SHARED(float, tile, 32);
	cp_async<4>(tile + threadIdx.x, src + threadIdx.x);
	cp_async_commit();
	tile[threadIdx.x] = 1;
	cp_async_wait<0>();
}

static void copy_in_whose_way_something_is_written(void **)
{
	device_array<float> src(32);
	GPU_LAUNCH(writes_under_a_copy, 1, 32, 0, stream, src.p);
	expect_failure(cudaErrorLaunchFailure, "has not been waited for");
}

__global__ void copies_from(const float *src, int offset, bool valid)
{
	GPU_SHARED(float, tile, 4);
	cp_async<16>(tile + 0, src + offset, valid);
	cp_async_commit();
	cp_async_wait<0>();
}

static void copy_from_a_wrong_place(void **)
{
	device_array<float> src(64);
	GPU_LAUNCH(copies_from, 1, 1, 0, stream, src.p, 64, true);
	expect_failure(cudaErrorIllegalAddress, "reads 16 bytes out of bounds");
	GPU_LAUNCH(copies_from, 1, 1, 0, stream, src.p, 2, true);
	expect_failure(cudaErrorMisalignedAddress, "misaligned: reads 16 bytes");
	GPU_LAUNCH(copies_from, 1, 1, 0, stream, src.p, 64, false); /* nothing is read */
	expect_success();
}

/* ---- fragments */

/* d[16][8] = a[16][16] b[8][16]^T; `mistake` is what is wrong with it. */
enum mistake {
	NONE,
	ROWS_SWAPPED,
	HALVES_OF_K_SWAPPED,
	COLUMNS_SWAPPED,
	TRANSPOSED,
	PART_WRITTEN,
	ODD_ROW,
	PAST_THE_END
};

__global__ void multiply_wrongly(const uint16_t *a, const uint16_t *b, float *d, enum mistake mistake)
{
	GPU_SHARED(uint16_t, sa, 16 * 16);
	GPU_SHARED(uint16_t, sb, 8 * 16);
	const unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
	for (unsigned i = lane; i < (mistake == PART_WRITTEN ? 224u : 256u); i += 32)
		sa[i] = a[i];
	for (unsigned i = lane; i < 128; i += 32)
		sb[i] = b[i];
	__syncthreads();
	uint32_t fa[4], fb[2], x[4];
	float fd[4] = {};
	const unsigned row = lane % 16 * 16 + lane / 16 * 8;
	ldmatrix_x4(x, sa + (row + (mistake == ODD_ROW ? 4 : mistake == PAST_THE_END ? 16 : 0)));
	for (unsigned i = 0; i < 4; i++)
		fa[i] = x[mistake == ROWS_SWAPPED ? i ^ 1 : mistake == HALVES_OF_K_SWAPPED ? i ^ 2 : i];
	if (mistake == TRANSPOSED)
		ldmatrix_x2_trans(fb, sb + (lane % 8 * 16 + lane / 8 % 2 * 8));
	else
		ldmatrix_x2(fb, sb + (lane % 8 * 16 + lane / 8 % 2 * 8));
	mma_f16(fd, fa, fb);
	for (unsigned i = 0; i < 4; i++)
		d[(g + i / 2 * 8) * 8 + t * 2 + (mistake == COLUMNS_SWAPPED ? 1 - i % 2 : i % 2)] = fd[i];
}

static void fragments_in_the_wrong_place(void **)
{
	device_array<uint16_t> a(256), b(128);
	device_array<float> d(128);
	uint16_t ha[256], hb[128];
	uint64_t seed = 5;
	for (uint16_t &h : ha)
		h = float_to_half_bits(static_cast<float>(unit_rand(&seed) % 17) - 8);
	for (uint16_t &h : hb)
		h = float_to_half_bits(static_cast<float>(unit_rand(&seed) % 17) - 8);
	a.write(ha);
	b.write(hb);
	for (enum mistake m : {NONE, ROWS_SWAPPED, HALVES_OF_K_SWAPPED, COLUMNS_SWAPPED, TRANSPOSED}) {
		float out[128];
		int wrong = 0;
		GPU_LAUNCH(multiply_wrongly, 1, 32, 0, stream, a.p, b.p, d.p, m);
		expect_success();
		d.read(out);
		for (int i = 0; i < 128; i++) {
			float sum = 0;
			for (int k = 0; k < 16; k++)
				sum += half_bits_to_float(ha[i / 8 * 16 + k]) * half_bits_to_float(hb[i % 8 * 16 + k]);
			wrong += out[i] != sum;
		}
		if ((m == NONE) != (wrong == 0))
			fail_msg("with mistake %d %d of 128 elements are wrong", static_cast<int>(m), wrong);
	}
}

static void fragments_of_wrong_rows(void **)
{
	device_array<uint16_t> a(256), b(128);
	device_array<float> d(128);
	cudaMemset(a.p, 0, 512);
	cudaMemset(b.p, 0, 256);
	in_every_order([&] {
		GPU_LAUNCH(multiply_wrongly, 1, 32, 0, stream, a.p, b.p, d.p, PART_WRITTEN);
		expect_failure(cudaErrorLaunchFailure, "reads uninitialised shared memory");
		GPU_LAUNCH(multiply_wrongly, 1, 32, 0, stream, a.p, b.p, d.p, ODD_ROW);
		expect_failure(cudaErrorLaunchFailure, "misaligned: reads 16 bytes of shared memory");
		GPU_LAUNCH(multiply_wrongly, 1, 32, 0, stream, a.p, b.p, d.p, PAST_THE_END);
		expect_failure(cudaErrorLaunchFailure, "reads 16 bytes of shared memory out of bounds");
	});
}

/* ---- global memory */

__global__ void writes_to(float *x, int i)
{
	x[i] = 1;
}

static void global_far_out_of_bounds(void **)
{
	device_array<float> x(64); /* 256 bytes: the guard comes right after */
	GPU_LAUNCH(writes_to, 1, 1, 0, stream, x.p, 64);
	expect_failure(cudaErrorIllegalAddress, "kernel writes_to, block (0,0,0), thread (0,0,0): writes address");
	GPU_LAUNCH(writes_to, 1, 1, 0, stream, x.p, -10000);
	assert_int_equal(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
	cudaDeviceReset();
}

static void global_just_out_of_bounds(void **)
{
#if defined(__SANITIZE_ADDRESS__)
	skip(); /* ASan ends the program at such a write, which is as good */
#endif
	device_array<float> x(63);
	GPU_LAUNCH(writes_to, 1, 1, 0, stream, x.p, 63);
	expect_failure(cudaErrorIllegalAddress, "bytes just past the end of an allocation of 252 bytes were written");
}

/* UBSan would see it first. */
__attribute__((no_sanitize("undefined"))) __global__ void reads_null(const float *x, float *y)
{
	*y = *x;
}

static void global_null(void **)
{
	device_array<float> y(1);
	GPU_LAUNCH(reads_null, 1, 1, 0, stream, static_cast<const float *>(nullptr), y.p);
	expect_failure(cudaErrorIllegalAddress, "reads address (nil)");
}

__global__ void vector_load(const char *x, size_t offset, uint4 *y)
{
	*y = ldg<uint4>(x + offset);
}

static void vector_out_of_bounds_and_misaligned(void **)
{
	device_array<char> x(40);
	device_array<uint4> y(1);
	GPU_LAUNCH(vector_load, 1, 1, 0, stream, x.p, size_t{32}, y.p);
	expect_failure(cudaErrorIllegalAddress, "reads 16 bytes out of bounds");
	GPU_LAUNCH(vector_load, 1, 1, 0, stream, x.p, size_t{8}, y.p);
	expect_failure(cudaErrorMisalignedAddress, "misaligned: reads 16 bytes");
	GPU_LAUNCH(vector_load, 1, 1, 0, stream, x.p, size_t{16}, y.p);
	expect_success();
}

static int grow_stack(volatile int *p, int depth)
{
	volatile char frame[4096];
	frame[depth % 4096] = static_cast<char>(*p);
	return depth == 0 ? frame[0] : grow_stack(p, depth - 1) + frame[1];
}

__global__ void deep(int *x)
{
	*x = grow_stack(x, 1000);
}

static void stack_overflow(void **)
{
	device_array<int> x(1);
	GPU_LAUNCH(deep, 1, 1, 0, stream, x.p);
	expect_failure(cudaErrorIllegalAddress, "stack overflow");
}

/* ---- launches */

__global__ void nothing() {}

static void launch_of_an_impossible_shape(void **)
{
	GPU_LAUNCH(nothing, 1, 1025, 0, stream);
	assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
	GPU_LAUNCH(nothing, 0, 32, 0, stream);
	assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
	GPU_LAUNCH(nothing, dim3(1, 65536), 32, 0, stream);
	assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
	GPU_LAUNCH(nothing, 1, 1024, 0, stream);
	assert_int_equal(cudaGetLastError(), cudaSuccess);
	expect_success();
}

UNIT_MAIN(HOST_CUDA_TEST(divergent_barrier), HOST_CUDA_TEST(return_before_a_barrier),
          HOST_CUDA_TEST(lanes_in_different_collectives), HOST_CUDA_TEST(collective_with_exited_lanes),
          HOST_CUDA_TEST(mask_without_the_caller), HOST_CUDA_TEST(mask_of_lanes_that_are_not_there),
          HOST_CUDA_TEST(shuffle_from_an_unnamed_lane), HOST_CUDA_TEST(masks_that_differ),
          HOST_CUDA_TEST(tensor_core_without_a_lane), HOST_CUDA_TEST(shared_out_of_bounds),
          HOST_CUDA_TEST(shared_before_its_start), HOST_CUDA_TEST(shared_uninitialised),
          HOST_CUDA_TEST(shared_of_an_earlier_block), HOST_CUDA_TEST(shared_misaligned_vector),
          HOST_CUDA_TEST(race_within_a_warp), HOST_CUDA_TEST(race_between_warps), HOST_CUDA_TEST(race_on_reuse),
          HOST_CUDA_TEST(race_between_half_warps), HOST_CUDA_TEST(race_in_global_memory),
          HOST_CUDA_TEST(shared_over_the_limit), HOST_CUDA_TEST(copy_not_waited_for),
          HOST_CUDA_TEST(copy_of_the_wrong_group), HOST_CUDA_TEST(copy_without_a_barrier),
          HOST_CUDA_TEST(copy_misaligned), HOST_CUDA_TEST(copy_in_whose_way_something_is_written),
          HOST_CUDA_TEST(copy_from_a_wrong_place), HOST_CUDA_TEST(fragments_in_the_wrong_place),
          HOST_CUDA_TEST(fragments_of_wrong_rows), HOST_CUDA_TEST(global_far_out_of_bounds),
          HOST_CUDA_TEST(global_just_out_of_bounds), HOST_CUDA_TEST(global_null),
          HOST_CUDA_TEST(vector_out_of_bounds_and_misaligned), HOST_CUDA_TEST(stack_overflow),
          HOST_CUDA_TEST(launch_of_an_impossible_shape))
