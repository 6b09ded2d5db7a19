/* The other kind of KV pages for NEON: bfloat16s, which become floats as they are read. */
#define PAGES_BF16
#include "engine/cpu/simd_neon.h"

#pragma GCC diagnostic ignored "-Wunused-function" /* of the kernels all but those of pages are neon.c's */
#include "engine/cpu/kernels_attention.h"
#include "engine/cpu/kernels_narrow.h"

#define PAGES_TABLE cpu_pages_neon_bf16
#include "engine/cpu/kernels_pages_table.h"
