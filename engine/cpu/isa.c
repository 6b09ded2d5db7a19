/* Which of the fast backends this machine can run: a constructor each, which says what is missing. */
#include "engine/cpu/fast.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/cpu/amx.h"

/* clang's __builtin_cpu_supports() does not know this name; AVX implies that the system saves the registers. */
static bool has_f16c(void)
{
	unsigned a, b, c, d;
	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

enum status cpu_avx2_create(int32_t n_threads, struct backend **out, struct error *err)
{
	if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
		return error_set(err, STATUS_UNSUPPORTED,
		                 "this machine has no AVX2, FMA or F16C, which cpu-avx2 needs");
	return fast_create(&cpu_kernels_avx2, NULL, n_threads, out, err);
}

#ifdef KVASIR_EMULATE_AVX512 /* in builds for tests */
static bool has_avx512(void) { return true; }
static bool has_avx512_bf16(void) { return true; }
#else
static bool has_avx512(void)
{
	return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
	       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
	       __builtin_cpu_supports("avx512vnni");
}

/*
 * BF16 is likewise not known to every compiler: leaf 7.1, EAX bit 5 (Intel, Architecture Instruction Set Extensions).
 */
static bool has_avx512_bf16(void)
{
	unsigned a, b, c, d;
	return has_avx512() && __builtin_cpu_supports("avx512vbmi") && __get_cpuid_count(7, 1, &a, &b, &c, &d) &&
	       (a & 1u << 5);
}
#endif

enum status cpu_avx512_bf16_create(int32_t n_threads, struct backend **out, struct error *err)
{
	if (!has_avx512_bf16())
		return error_set(err, STATUS_UNSUPPORTED,
		                 "this machine has no AVX-512 with BW, DQ, VL, VNNI, VBMI and BF16, which "
		                 "cpu-avx512-bf16 needs");
	return fast_create(&cpu_kernels_avx512_bf16, NULL, n_threads, out, err);
}

enum status cpu_avx512_create(int32_t n_threads, struct backend **out, struct error *err)
{
	if (!has_avx512())
		return error_set(err, STATUS_UNSUPPORTED,
		                 "this machine has no AVX-512 with BW, DQ, VL and VNNI, which cpu-avx512 needs");
	return fast_create(&cpu_kernels_avx512, NULL, n_threads, out, err);
}

/*
 * AMX with BF16 (leaf 7.0, EDX bits 24 and 22), and a system that saves the tiles (XCR0 bits 17 and 18) and lets this
 * process use them: Linux, Documentation/arch/x86/xstate.rst.
 */
static bool has_amx(void)
{
	enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
	unsigned a, b, c, d;
	if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !__get_cpuid_count(7, 0, &a, &b, &c, &d) ||
	    !(d & 1u << 24) || !(d & 1u << 22))
		return false;
	__asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
	if ((a & 3u << 17) != 3u << 17)
		return false;
	return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

enum status cpu_amx_create(int32_t n_threads, struct backend **out, struct error *err)
{
	if (!amx_kernels.product)
		return error_set(err, STATUS_UNSUPPORTED,
		                 "the compiler of this build knew no AMX, which cpu-amx needs");
	if (!has_avx512_bf16() || !has_amx())
		return error_set(err, STATUS_UNSUPPORTED,
		                 "this machine has no AMX with BF16 (or its system does not let programs use it), "
		                 "which cpu-amx needs");
	return fast_create(&cpu_kernels_avx512_bf16, &amx_kernels, n_threads, out, err);
}

enum status cpu_amx_emulated_create(int32_t n_threads, struct backend **out, struct error *err)
{
	if (!has_avx512_bf16())
		return error_set(err, STATUS_UNSUPPORTED,
		                 "this machine has no AVX-512 with BW, DQ, VL, VNNI, VBMI and BF16, which "
		                 "cpu-amx-emulated needs");
	return fast_create(&cpu_kernels_avx512_bf16, &amx_kernels_emulated, n_threads, out, err);
}

#elif defined(__aarch64__)

#include <sys/auxv.h>

enum status cpu_neon_create(int32_t n_threads, struct backend **out, struct error *err)
{
	return fast_create(&cpu_kernels_neon, NULL, n_threads, out, err);
}

enum status cpu_neon_dotprod_create(int32_t n_threads, struct backend **out, struct error *err)
{
	const unsigned long dotprod = 1ul << 20; /* HWCAP_ASIMDDP (Linux, Documentation/arch/arm64/elf_hwcaps.rst) */
	if (!(getauxval(AT_HWCAP) & dotprod))
		return error_set(err, STATUS_UNSUPPORTED,
		                 "this machine has no NEON with DotProd, which cpu-neon-dotprod needs");
	return fast_create(&cpu_kernels_neon_dotprod, NULL, n_threads, out, err);
}

#endif
