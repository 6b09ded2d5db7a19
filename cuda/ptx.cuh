/*
 * The device functions of gpu.cuh as PTX instructions. host_cuda/ has the same functions for the CPU.
 * Instructions and fragment layouts: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions" and "Data Movement".
 */
#pragma once

#ifndef __CUDACC__
#error "ptx.cuh is for nvcc"
#endif

template <typename T> using shared_span = T *;

template <typename U, typename T> __device__ __forceinline__ U *shared_cast(T *p)
{
	return reinterpret_cast<U *>(p);
}

template <typename V, typename T> __device__ __forceinline__ V ld_shared(const T *p)
{
	return *reinterpret_cast<const V *>(p);
}

template <typename V, typename T> __device__ __forceinline__ void st_shared(T *p, V v)
{
	*reinterpret_cast<V *>(p) = v;
}

/* Integer carriers of a size, so that any type of that size can be loaded by one instruction. */
template <int bytes> struct gpu_carrier;
template <> struct gpu_carrier<1> { using type = unsigned char; };
template <> struct gpu_carrier<2> { using type = unsigned short; };
template <> struct gpu_carrier<4> { using type = unsigned int; };
template <> struct gpu_carrier<8> { using type = uint2; };
template <> struct gpu_carrier<16> { using type = uint4; };

template <typename V> __device__ __forceinline__ V ldg(const void *p)
{
	using carrier = typename gpu_carrier<sizeof(V)>::type;
	union {
		carrier c;
		V v;
	} u = {__ldg(static_cast<const carrier *>(p))};
	return u.v;
}

template <typename V> __device__ __forceinline__ V ldg_stream(const void *p)
{
	union {
		typename gpu_carrier<sizeof(V)>::type c;
		V v;
	} u;
	if constexpr (sizeof(V) == 16)
		asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
		             : "=r"(u.c.x), "=r"(u.c.y), "=r"(u.c.z), "=r"(u.c.w)
		             : "l"(p));
	else if constexpr (sizeof(V) == 8)
		asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(u.c.x), "=r"(u.c.y) : "l"(p));
	else if constexpr (sizeof(V) == 4)
		asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(u.c) : "l"(p));
	else
		u.v = ldg<V>(p);
	return u.v;
}

template <typename V> __device__ __forceinline__ V ld_global(const void *p)
{
	return *static_cast<const V *>(p);
}

template <typename V> __device__ __forceinline__ void stg(void *p, V v)
{
	*static_cast<V *>(p) = v;
}

__device__ __forceinline__ int dp4a(int a, int b, int c)
{
	return __dp4a(a, b, c);
}

__device__ __forceinline__ unsigned gpu_shared_address(const void *p)
{
	return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

template <typename T> __device__ __forceinline__ void ldmatrix_x1(uint32_t (&r)[1], T *row)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
	             : "=r"(r[0])
	             : "r"(gpu_shared_address(row))
	             : "memory");
}

template <typename T> __device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], T *row)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
	             : "=r"(r[0]), "=r"(r[1])
	             : "r"(gpu_shared_address(row))
	             : "memory");
}

template <typename T> __device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], T *row)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
	             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
	             : "r"(gpu_shared_address(row))
	             : "memory");
}

template <typename T> __device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], T *row)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
	             : "=r"(r[0]), "=r"(r[1])
	             : "r"(gpu_shared_address(row))
	             : "memory");
}

template <typename T> __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], T *row)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
	             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
	             : "r"(gpu_shared_address(row))
	             : "memory");
}

/* Turing has half the depth per instruction: two steps. */
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
#if __CUDA_ARCH__ >= 800
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
	             "{%0,%1,%2,%3};"
	             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
	for (int half = 0; half < 2; half++)
		asm volatile(
			"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
			: "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
			: "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

__device__ __forceinline__ float gpu_bf16_low(uint32_t pair)
{
	return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float gpu_bf16_high(uint32_t pair)
{
	return __uint_as_float(pair & 0xffff0000u);
}

/*
 * Turing has no bf16: the four lanes that hold a row of A, and the two fours that hold the columns of B, pass their
 * parts around.
 */
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
#if __CUDA_ARCH__ >= 800
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
	             "{%0,%1,%2,%3};"
	             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
	const int lane = threadIdx.x & 31, row = lane & ~3, column = (lane & 3) * 8;
	for (int k = 0; k < 4; k++)
		for (int half = 0; half < 2; half++) {
			uint32_t top = __shfl_sync(~0u, a[2 * half], row + k),
				 bottom = __shfl_sync(~0u, a[2 * half + 1], row + k);
			uint32_t left = __shfl_sync(~0u, b[half], column + k),
				 right = __shfl_sync(~0u, b[half], column + 4 + k);
			d[0] += gpu_bf16_low(top) * gpu_bf16_low(left) + gpu_bf16_high(top) * gpu_bf16_high(left);
			d[1] += gpu_bf16_low(top) * gpu_bf16_low(right) + gpu_bf16_high(top) * gpu_bf16_high(right);
			d[2] += gpu_bf16_low(bottom) * gpu_bf16_low(left) + gpu_bf16_high(bottom) * gpu_bf16_high(left);
			d[3] += gpu_bf16_low(bottom) * gpu_bf16_low(right) +
			        gpu_bf16_high(bottom) * gpu_bf16_high(right);
		}
#endif
}

__device__ __forceinline__ void mma_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
#if __CUDA_ARCH__ >= 800
	asm volatile(
		"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		: "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
		: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
	for (int quarter = 0; quarter < 4; quarter++) {
		const int row = quarter & 1; /* the upper or the lower eight rows */
		asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
		             : "+r"(d[2 * row]), "+r"(d[2 * row + 1])
		             : "r"(a[quarter]), "r"(b[quarter / 2]));
	}
#endif
}

/* E4M3: Ada and later. Two codes as halves, and a float as the nearest code, within the largest. */
#if __CUDA_ARCH__ >= 890
#define GPU_HAS_FP8
__device__ __forceinline__ uint32_t fp8_to_halves(uint32_t pair)
{
	uint32_t halves;
	asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
	return halves;
}

__device__ __forceinline__ uint32_t fp8_from_float(float x)
{
	unsigned short pair;
	asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
	return pair & 0xffu;
}
#endif

/* `valid` false: zeros are written and the source is not read. */
template <int bytes, typename T> __device__ __forceinline__ void cp_async(T *dst, const void *src, bool valid = true)
{
	static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
#if __CUDA_ARCH__ >= 800
	if constexpr (bytes == 16)
		asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
		             :
		             : "r"(gpu_shared_address(dst)), "l"(src), "r"(valid ? 16 : 0)
		             : "memory");
	else
		asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
		             :
		             : "r"(gpu_shared_address(dst)), "l"(src), "n"(bytes), "r"(valid ? bytes : 0)
		             : "memory");
#else
	using carrier = typename gpu_carrier<bytes>::type;
	carrier zero = {};
	*reinterpret_cast<carrier *>(dst) = valid ? *static_cast<const carrier *>(src) : zero;
#endif
}

__device__ __forceinline__ void cp_async_commit()
{
#if __CUDA_ARCH__ >= 800
	asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int pending> __device__ __forceinline__ void cp_async_wait()
{
#if __CUDA_ARCH__ >= 800
	asm volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
#endif
}
