/* Products by the tiles of AMX; compiled with flags of its own, and run only where isa.c found the instructions. */
#include "engine/cpu/amx.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)

#include "engine/cpu/simd_avx512.h"

/* What LDTILECFG reads (Intel, Architecture Instruction Set Extensions, "Palettes"). */
struct tile_config {
	uint8_t palette, start_row, unused[14];
	uint16_t row_bytes[16];
	uint8_t rows[16];
};

_Static_assert(sizeof(struct tile_config) == 64, "the configuration of tiles is 64 bytes");

INLINE void tile_begin(void)
{
	struct tile_config c = {.palette = 1};
	for (int t = 0; t < 8; t++) {
		c.row_bytes[t] = 64;
		c.rows[t] = 16;
	}
	/* gcc 12 thinks that only the first 8 bytes are read, and may leave out the others. */
	__asm__ volatile("" : : "r"(&c) : "memory");
	_tile_loadconfig(&c);
}

/* Gives the tiles up, so that the system need not save them. */
INLINE void tile_end(void) { _tile_release(); }

/* Macros, since the numbers of tiles are part of the instructions. gcc does not know either that loads read memory. */
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, p, stride)                                                                                        \
	do {                                                                                                           \
		__asm__ volatile("" : : : "memory");                                                                   \
		_tile_loadd(t, p, stride);                                                                             \
	} while (0)
#define tile_store(t, p) _tile_stored(t, p, 64)
#define tile_dot_bf16(c, a, b) _tile_dpbf16ps(c, a, b)

#include "engine/cpu/kernels_amx.h"

const struct amx_kernels amx_kernels = {"cpu-amx", "AMX with BF16; AVX-512 F, BW, DQ, VL, VNNI, VBMI, BF16", product};

#else

const struct amx_kernels amx_kernels = {"cpu-amx", "", NULL};

#endif
