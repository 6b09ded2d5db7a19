/*
 * SHA-256 with the SHA-2 instructions of ARMv8 (Arm ARM, SHA256H, SHA256H2, SHA256SU0, SHA256SU1): one does four rounds
 * of half a state.
 */
#include "engine/base/sha256_blocks.h"

#ifdef SHA256_ARM

#include <arm_neon.h>
#include <sys/auxv.h>

enum { HAS_SHA2 = 1 << 6 }; /* HWCAP_SHA2 of the kernel's asm/hwcap.h */

static bool usable(void)
{
	return getauxval(AT_HWCAP) & HAS_SHA2;
}

#ifdef __clang__
__attribute__((target("sha2")))
#else
__attribute__((target("+crypto")))
#endif
static void blocks(uint32_t h[8], const uint8_t *p, size_t n_blocks)
{
	uint32x4_t abcd = vld1q_u32(h), efgh = vld1q_u32(h + 4);
	for (; n_blocks > 0; n_blocks--, p += 64) {
		uint32x4_t abcd_before = abcd, efgh_before = efgh, w[4];
#pragma GCC unroll 16
		for (int i = 0; i < 16; i++) {
			uint32x4_t *now = &w[i % 4];
			if (i < 4)
				*now = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(p + 16 * i)));
			else
				*now = vsha256su1q_u32(vsha256su0q_u32(*now, w[(i + 1) % 4]), w[(i + 2) % 4],
				                       w[(i + 3) % 4]);
			uint32x4_t wk = vaddq_u32(*now, vld1q_u32(sha256_k + 4 * i)), abcd_now = abcd;
			abcd = vsha256hq_u32(abcd, efgh, wk);
			efgh = vsha256h2q_u32(efgh, abcd_now, wk);
		}
		abcd = vaddq_u32(abcd, abcd_before);
		efgh = vaddq_u32(efgh, efgh_before);
	}
	vst1q_u32(h, abcd);
	vst1q_u32(h + 4, efgh);
}

const struct sha256_way sha256_way_arm = {"armv8 sha2", usable, blocks};

#endif
