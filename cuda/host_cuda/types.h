/*
 * The types that CUDA's headers give: qualifiers, dim3, vectors with their alignment, half and bfloat16.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

namespace host_cuda {

struct dim3 {
	unsigned x, y, z;
	constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct uint3 {
	unsigned x, y, z;
};

#define HOST_CUDA_VECTORS(name, element, align2, align4)                                                               \
	struct alignas(align2) name##2                                                                                 \
	{                                                                                                              \
		element x, y;                                                                                          \
	};                                                                                                             \
	struct name##3                                                                                                 \
	{                                                                                                              \
		element x, y, z;                                                                                       \
	};                                                                                                             \
	struct alignas(align4) name##4                                                                                 \
	{                                                                                                              \
		element x, y, z, w;                                                                                    \
	};                                                                                                             \
	inline name##2 make_##name##2(element x, element y)                                                            \
	{                                                                                                              \
		return {x, y};                                                                                         \
	}                                                                                                              \
	inline name##3 make_##name##3(element x, element y, element z)                                                 \
	{                                                                                                              \
		return {x, y, z};                                                                                      \
	}                                                                                                              \
	inline name##4 make_##name##4(element x, element y, element z, element w)                                      \
	{                                                                                                              \
		return {x, y, z, w};                                                                                   \
	}

HOST_CUDA_VECTORS(char, signed char, 2, 4)
HOST_CUDA_VECTORS(uchar, unsigned char, 2, 4)
HOST_CUDA_VECTORS(short, short, 4, 8)
HOST_CUDA_VECTORS(ushort, unsigned short, 4, 8)
HOST_CUDA_VECTORS(int, int, 8, 16)
struct alignas(8) uint2 {
	unsigned x, y;
};
struct alignas(16) uint4 {
	unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y)
{
	return {x, y};
}
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z)
{
	return {x, y, z};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
	return {x, y, z, w};
}
HOST_CUDA_VECTORS(float, float, 8, 16)
HOST_CUDA_VECTORS(longlong, long long, 16, 16)
HOST_CUDA_VECTORS(ulonglong, unsigned long long, 16, 16)
HOST_CUDA_VECTORS(double, double, 16, 16)
#undef HOST_CUDA_VECTORS

template <typename To, typename From> inline To bits(From from)
{
	static_assert(sizeof(To) == sizeof(From), "one size");
	To to;
	memcpy(&to, &from, sizeof to);
	return to;
}

float half_bits_to_float(uint16_t h);
uint16_t float_to_half_bits(float f); /* nearest, ties to even */
uint16_t float_to_bf16_bits(float f); /* likewise */

inline float bf16_bits_to_float(uint16_t h)
{
	return bits<float>(static_cast<uint32_t>(h) << 16);
}

struct __half {
	uint16_t raw;
	__half() = default;
	__half(float f) : raw(float_to_half_bits(f)) {}
	operator float() const { return half_bits_to_float(raw); }
};

struct alignas(4) __half2 {
	__half x, y;
	__half2() = default;
	__half2(__half x_, __half y_) : x(x_), y(y_) {}
};

struct __nv_bfloat16 {
	uint16_t raw;
	__nv_bfloat16() = default;
	__nv_bfloat16(float f) : raw(float_to_bf16_bits(f)) {}
	operator float() const { return bf16_bits_to_float(raw); }
};

struct alignas(4) __nv_bfloat162 {
	__nv_bfloat16 x, y;
	__nv_bfloat162() = default;
	__nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {}
};

using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline float __half2float(__half h) { return h; }
inline __half __float2half(float f) { return f; }
inline __half __float2half_rn(float f) { return f; }
inline unsigned short __half_as_ushort(__half h) { return h.raw; }
inline short __half_as_short(__half h) { return static_cast<short>(h.raw); }
inline __half __ushort_as_half(unsigned short u) { return bits<__half>(u); }
inline __half __short_as_half(short u) { return bits<__half>(u); }
inline float2 __half22float2(__half2 h) { return {h.x, h.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 f) { return {f.x, f.y}; }
inline __half2 __float2half2_rn(float f) { return {f, f}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half h) { return {h, h}; }
inline __half __low2half(__half2 h) { return h.x; }
inline __half __high2half(__half2 h) { return h.y; }
inline float __low2float(__half2 h) { return h.x; }
inline float __high2float(__half2 h) { return h.y; }
inline __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
inline __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }
inline __half __hadd(__half a, __half b) { return float(a) + float(b); }
inline __half __hsub(__half a, __half b) { return float(a) - float(b); }
inline __half __hmul(__half a, __half b) { return float(a) * float(b); }
inline __half __hneg(__half a) { return -float(a); }
/* The product of two halves is exact in a double, and so is rounded once. */
inline __half __hfma(__half a, __half b, __half c) { return static_cast<float>(double(a) * double(b) + double(c)); }
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }

inline float __bfloat162float(__nv_bfloat16 h) { return h; }
inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.raw; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return bits<__nv_bfloat16>(u); }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {h.x, h.y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return {f.x, f.y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline float __low2float(__nv_bfloat162 h) { return h.x; }
inline float __high2float(__nv_bfloat162 h) { return h.y; }
inline __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) * float(b); }
inline __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) + float(b); }

} // namespace host_cuda
