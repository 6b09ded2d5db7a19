/* The other kind of KV pages for AVX-512 without BF16: bfloat16s, which become floats as they are read. */
#define PAGES_BF16
#include "engine/cpu/simd_avx512.h"

#pragma GCC diagnostic ignored "-Wunused-function" /* of the kernels all but those of pages are avx512.c's */
#include "engine/cpu/kernels_attention.h"
#include "engine/cpu/kernels_narrow.h"

#define PAGES_TABLE cpu_pages_avx512_plain_bf16
#include "engine/cpu/kernels_pages_table.h"
