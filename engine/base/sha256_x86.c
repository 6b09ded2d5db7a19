/*
 * SHA-256 with the SHA extension of x86 (Intel SDM, volume 2: SHA256RNDS2, SHA256MSG1, SHA256MSG2). The state lives in
 * two registers, {a, b, e, f} and {c, d, g, h} from the highest word down; one instruction does two rounds.
 */
#include "engine/base/sha256_blocks.h"

#ifdef SHA256_X86

#include <cpuid.h>
#include <immintrin.h>

static bool usable(void)
{
	unsigned a, b, c, d;
	if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1))
		return false;
	return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 29);
}

__attribute__((target("sha,ssse3,sse4.1"))) static void blocks(uint32_t h[8], const uint8_t *p, size_t n_blocks)
{
	const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
	__m128i badc = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)h), 0xB1);
	__m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(h + 4)), 0x1B);
	__m128i abef = _mm_alignr_epi8(badc, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);
	for (; n_blocks > 0; n_blocks--, p += 64) {
		__m128i abef_before = abef, cdgh_before = cdgh, w[4];
#pragma GCC unroll 16
		for (int i = 0; i < 16; i++) {
			__m128i *now = &w[i % 4];
			if (i < 4) {
				*now = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(p + 16 * i)), big_endian);
			} else {
				__m128i back_2 = w[(i + 2) % 4], back_1 = w[(i + 3) % 4];
				__m128i sum = _mm_sha256msg1_epu32(*now, w[(i + 1) % 4]);
				sum = _mm_add_epi32(sum, _mm_alignr_epi8(back_1, back_2, 4));
				*now = _mm_sha256msg2_epu32(sum, back_1);
			}
			__m128i wk = _mm_add_epi32(*now, _mm_loadu_si128((const __m128i *)(sha256_k + 4 * i)));
			cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
			abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0E));
		}
		abef = _mm_add_epi32(abef, abef_before);
		cdgh = _mm_add_epi32(cdgh, cdgh_before);
	}
	__m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
	_mm_storeu_si128((__m128i *)h, _mm_blend_epi16(feba, dchg, 0xF0));
	_mm_storeu_si128((__m128i *)(h + 4), _mm_alignr_epi8(dchg, feba, 8));
}

const struct sha256_way sha256_way_x86 = {"x86 sha", usable, blocks};

#endif
