/*
 * CUDA's arithmetic and bit intrinsics. The approximate ones (__expf, ...) are exact here: tests allow for the
 * difference.
 */
#pragma once

#include <math.h>
#include <stdint.h>

#include "cuda/host_cuda/types.h"

namespace host_cuda {

inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline void __sincosf(float x, float *s, float *c) { *s = sinf(x), *c = cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __saturatef(float x) { return x >= 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }

/* Conversions to integers clamp on GPUs, and NaN becomes zero. */
inline int float_to_int_clamped(float x)
{
	if (x != x)
		return 0;
	return x >= 2147483648.0f ? INT32_MAX : x <= -2147483648.0f ? INT32_MIN : static_cast<int>(x);
}
inline int __float2int_rn(float x) { return float_to_int_clamped(rintf(x)); }
inline int __float2int_rz(float x) { return float_to_int_clamped(truncf(x)); }
inline int __float2int_rd(float x) { return float_to_int_clamped(floorf(x)); }
inline int __float2int_ru(float x) { return float_to_int_clamped(ceilf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

inline float __uint_as_float(unsigned x) { return bits<float>(x); }
inline float __int_as_float(int x) { return bits<float>(x); }
inline unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
inline int __float_as_int(float x) { return bits<int>(x); }
inline long long __double_as_longlong(double x) { return bits<long long>(x); }
inline double __longlong_as_double(long long x) { return bits<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __mul24(int x, int y) { return ((x << 8) >> 8) * ((y << 8) >> 8); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>((static_cast<uint64_t>(x) * y) >> 32); }
inline int __mulhi(int x, int y) { return static_cast<int>((static_cast<int64_t>(x) * y) >> 32); }
inline unsigned __brev(unsigned x)
{
	unsigned r = 0;
	for (int i = 0; i < 32; i++)
		r |= ((x >> i) & 1u) << (31 - i);
	return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift)
{
	return static_cast<unsigned>((((static_cast<uint64_t>(hi) << 32) | lo) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift)
{
	return static_cast<unsigned>(((static_cast<uint64_t>(hi) << 32) | lo) >> (shift & 31));
}

/* Bytes of x (0..3) and y (4..7) picked by the nibbles of s; bit 3 of a nibble spreads the byte's sign. */
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s)
{
	const uint64_t bytes = (static_cast<uint64_t>(y) << 32) | x;
	unsigned r = 0;
	for (int i = 0; i < 4; i++) {
		const unsigned pick = (s >> (4 * i)) & 0xf;
		unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7))) & 0xff;
		if (pick & 8)
			byte = (byte & 0x80) ? 0xff : 0;
		r |= byte << (8 * i);
	}
	return r;
}

template <typename F> inline unsigned each_byte(unsigned a, unsigned b, F f)
{
	unsigned r = 0;
	for (int i = 0; i < 32; i += 8)
		r |= (static_cast<unsigned>(f(static_cast<int8_t>(a >> i), static_cast<int8_t>(b >> i))) & 0xff) << i;
	return r;
}
inline unsigned __vadd4(unsigned a, unsigned b) { return each_byte(a, b, [](int x, int y) { return x + y; }); }
inline unsigned __vsub4(unsigned a, unsigned b) { return each_byte(a, b, [](int x, int y) { return x - y; }); }
inline int clamp_byte(int x) { return x < -128 ? -128 : x > 127 ? 127 : x; }
inline unsigned __vsubss4(unsigned a, unsigned b)
{
	return each_byte(a, b, [](int x, int y) { return clamp_byte(x - y); });
}
inline unsigned __vaddss4(unsigned a, unsigned b)
{
	return each_byte(a, b, [](int x, int y) { return clamp_byte(x + y); });
}
inline unsigned __vcmpeq4(unsigned a, unsigned b)
{
	return each_byte(a, b, [](int x, int y) { return x == y ? 0xff : 0; });
}
inline unsigned __vcmpne4(unsigned a, unsigned b)
{
	return each_byte(a, b, [](int x, int y) { return x != y ? 0xff : 0; });
}

/* Four signed bytes each; the sum wraps. */
inline int dp4a(int a, int b, int c)
{
	for (int i = 0; i < 32; i += 8) {
		const int product = static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
		c = static_cast<int>(static_cast<unsigned>(c) + static_cast<unsigned>(product));
	}
	return c;
}
inline int __dp4a(int a, int b, int c) { return dp4a(a, b, c); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c)
{
	for (int i = 0; i < 32; i += 8)
		c += ((a >> i) & 0xff) * ((b >> i) & 0xff);
	return c;
}

/* The overloads of CUDA's global min and max. */
#define HOST_CUDA_MIN_MAX(type)                                                                                        \
	inline type min(type a, type b) { return b < a ? b : a; }                                                      \
	inline type max(type a, type b) { return a < b ? b : a; }
HOST_CUDA_MIN_MAX(int)
HOST_CUDA_MIN_MAX(unsigned)
HOST_CUDA_MIN_MAX(long)
HOST_CUDA_MIN_MAX(unsigned long)
HOST_CUDA_MIN_MAX(long long)
HOST_CUDA_MIN_MAX(unsigned long long)
#undef HOST_CUDA_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }

} // namespace host_cuda
