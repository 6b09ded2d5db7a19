/*
 * The kernels for AVX-512 with BF16; compiled with flags of its own, and run only where fast.c found the instructions.
 */
#include "engine/cpu/simd_avx512.h"

#include "engine/cpu/kernels_matmul.h"
#include "engine/cpu/kernels_rows.h"
#include "engine/cpu/kernels_attention.h"
#include "engine/cpu/kernels_narrow.h"

#define TABLE cpu_kernels_avx512_bf16
#define TABLE_NAME "cpu-avx512-bf16"
#define TABLE_DETAIL "AVX-512 F, BW, DQ, VL, VNNI, VBMI, BF16"
#define PAGES_TABLE cpu_pages_avx512_bf16
#define PAGES_OTHER cpu_pages_avx512
#include "engine/cpu/kernels_table.h"
