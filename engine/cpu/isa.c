/* Which of the fast backends this machine can run: a constructor each, which says what is missing. */
#include "engine/cpu/fast.h"

#if defined(__x86_64__)

#include <cpuid.h>

/* clang's __builtin_cpu_supports() does not know this name; AVX implies that the system saves the registers. */
static bool has_f16c(void)
{
	unsigned a, b, c, d;
	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

enum status cpu_avx2_create(int32_t n_threads, struct backend **out, struct error *err)
{
	if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
		return error_set(err, STATUS_UNSUPPORTED, "this machine has no AVX2, FMA or F16C, which cpu-avx2 needs");
	return fast_create(&cpu_kernels_avx2, n_threads, out, err);
}

static bool has_avx512(void)
{
	return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
	       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

/* Likewise not known to every compiler: leaf 7.1, EAX bit 5 (Intel, Architecture Instruction Set Extensions). */
static bool has_avx512_bf16(void)
{
	unsigned a, b, c, d;
	return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
}

enum status cpu_avx512_bf16_create(int32_t n_threads, struct backend **out, struct error *err)
{
	if (!has_avx512() || !has_avx512_bf16() || !__builtin_cpu_supports("avx512vbmi"))
		return error_set(err, STATUS_UNSUPPORTED,
		                 "this machine has no AVX-512 with BW, DQ, VL, VNNI, VBMI and BF16, which cpu-avx512-bf16 needs");
	return fast_create(&cpu_kernels_avx512_bf16, n_threads, out, err);
}

enum status cpu_avx512_create(int32_t n_threads, struct backend **out, struct error *err)
{
	if (!has_avx512())
		return error_set(err, STATUS_UNSUPPORTED,
		                 "this machine has no AVX-512 with BW, DQ, VL and VNNI, which cpu-avx512 needs");
	return fast_create(&cpu_kernels_avx512, n_threads, out, err);
}

#elif defined(__aarch64__)

#include <sys/auxv.h>

enum status cpu_neon_create(int32_t n_threads, struct backend **out, struct error *err)
{
	return fast_create(&cpu_kernels_neon, n_threads, out, err);
}

enum status cpu_neon_dotprod_create(int32_t n_threads, struct backend **out, struct error *err)
{
	const unsigned long dotprod = 1ul << 20; /* HWCAP_ASIMDDP (Linux, Documentation/arch/arm64/elf_hwcaps.rst) */
	if (!(getauxval(AT_HWCAP) & dotprod))
		return error_set(err, STATUS_UNSUPPORTED, "this machine has no NEON with DotProd, which cpu-neon-dotprod needs");
	return fast_create(&cpu_kernels_neon_dotprod, n_threads, out, err);
}

#endif
