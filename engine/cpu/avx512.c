/* The kernels for AVX-512; compiled with flags of its own, and run only where fast.c found the instructions. */
#include "engine/cpu/simd_avx512.h"

#include "engine/cpu/kernels_matmul.h"
#include "engine/cpu/kernels_rows.h"
#include "engine/cpu/kernels_attention.h"
#include "engine/cpu/kernels_narrow.h"

#define TABLE cpu_kernels_avx512
#define TABLE_NAME "cpu-avx512"
#define TABLE_DETAIL "AVX-512 F, BW, DQ, VL, VNNI"
#define PAGES_TABLE cpu_pages_avx512
#define PAGES_OTHER cpu_pages_avx512_plain_bf16
#include "engine/cpu/kernels_table.h"
