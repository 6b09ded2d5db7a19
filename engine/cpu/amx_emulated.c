/*
 * The source of the AMX products over tiles in plain C, which do what the instructions are documented to do (Intel,
 * Architecture Instruction Set Extensions, TILELOADD, TILESTORED and TDPBF16PS): products of even and of odd inputs are
 * summed up apart, each fused with its addition, then the two sums are added, then they are added to what the tile had.
 * Numbers that are too small to be normal count as zeros, on the way in and on the way out.
 */
#include <string.h>

#include "engine/cpu/simd_avx512.h"

#include "engine/cpu/amx.h"

static _Thread_local union tile {
	float sum[16][16];
	uint16_t pair[16][16][2];
} tiles[8];

INLINE void tile_begin(void) {}
INLINE void tile_end(void) {}

INLINE float normal_or_zero(float x)
{
	return x > -0x1p-126f && x < 0x1p-126f ? x * 0 : x;
}

INLINE float from_bf16(uint16_t h)
{
	uint32_t bits = (uint32_t)h << 16;
	float x;
	memcpy(&x, &bits, sizeof x);
	return normal_or_zero(x);
}

static void tile_zero(int t)
{
	memset(&tiles[t], 0, sizeof tiles[t]);
}

static void tile_load(int t, const void *p, size_t stride)
{
	for (int r = 0; r < 16; r++)
		memcpy(tiles[t].pair[r], (const char *)p + (size_t)r * stride, 64);
}

static void tile_store(int t, void *p)
{
	memcpy(p, &tiles[t], sizeof tiles[t]);
}

static void tile_dot_bf16(int c, int a, int b)
{
	for (int m = 0; m < 16; m++) {
		float even[16] = {0}, odd[16] = {0};
		for (int k = 0; k < 16; k++) {
			const float x = from_bf16(tiles[a].pair[m][k][0]), y = from_bf16(tiles[a].pair[m][k][1]);
			for (int n = 0; n < 16; n++) {
				even[n] = normal_or_zero(__builtin_fmaf(x, from_bf16(tiles[b].pair[k][n][0]), even[n]));
				odd[n] = normal_or_zero(__builtin_fmaf(y, from_bf16(tiles[b].pair[k][n][1]), odd[n]));
			}
		}
		for (int n = 0; n < 16; n++)
			tiles[c].sum[m][n] =
				normal_or_zero(normal_or_zero(tiles[c].sum[m][n]) + normal_or_zero(even[n] + odd[n]));
	}
}

#include "engine/cpu/kernels_amx.h"

const struct amx_kernels amx_kernels_emulated = {
	"cpu-amx-emulated", "emulated tiles, for tests; AVX-512 F, BW, DQ, VL, VNNI, VBMI, BF16", product};
